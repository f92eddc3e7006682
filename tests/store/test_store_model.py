"""A store and its model, driven by the same random calls, show the same."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import uuid
from typing import Any

import fsspec
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import trajstore
from trajstore import DataError, Schema, Snapshot, StepPlacedError, Writer
from trajstore.schema import flatten, nest
from trajstore.testing import strategies as ours
from trajstore.testing.model import ModelStore, ModelWriter, ends_of
from trajstore.writing.staging import ROW_OVERHEAD_BYTES

ENVS = 3
MAX_WRITERS = 2
SMALL_ROWS = 2 * ENVS  # the most rows one vectorised step can take, so no call is refused


def digest(snapshot: Snapshot) -> str:
    """A hash of everything a snapshot shows."""
    found = hashlib.sha256()
    for i, row in enumerate(snapshot.episodes):
        found.update(repr(row).encode())
        for path, values in flatten(snapshot.read_episode(i)).items():
            found.update(path.encode() + values.tobytes())
    return found.hexdigest()


class StoreMachine(RuleBasedStateMachine):
    """Appends, commits, crashes and reopens; after each commit and refresh the model is asked."""

    writers: list[tuple[Writer, ModelWriter]]
    kept: tuple[Snapshot, str] | None

    def new_url(self) -> str:
        return f"memory://model-{uuid.uuid4().hex}"

    def remove(self, url: str) -> None:
        objects = fsspec.filesystem("memory").store
        for key in [key for key in objects if key.startswith(url.removeprefix("memory:/"))]:
            del objects[key]

    @initialize(schema=ours.schemas(), is_small=st.booleans())
    def create(self, schema: Schema, is_small: bool) -> None:
        self.url = self.new_url()
        self.schema = schema
        self.store = trajstore.create(self.url, schema, fsync=False)
        self.is_small = is_small
        self.model = ModelStore(schema, commits_by_itself=is_small)
        self.writers = []
        self.kept = None
        self.open_writer()

    def teardown(self) -> None:
        if hasattr(self, "url"):
            for writer, _ in self.writers:
                writer.discard()
            self.remove(self.url)

    # ---- writers -----------------------------------------------------------------------------------

    @precondition(lambda self: len(self.writers) < MAX_WRITERS)
    @rule()
    def open_writer(self) -> None:
        row_bytes = self.schema.row_bytes + ROW_OVERHEAD_BYTES
        buffer_bytes = 2 * SMALL_ROWS * row_bytes if self.is_small else "8MiB"
        writer = self.store.writer(commit_seconds=None, buffer_bytes=buffer_bytes)
        self.writers.append((writer, self.model.writer(writer.stream)))

    def pick(self, data: st.DataObject) -> tuple[Writer, ModelWriter]:
        return data.draw(st.sampled_from(self.writers), label="writer")

    def open_episodes(self) -> list[tuple[Writer, ModelWriter, int]]:
        return [(w, m, env) for w, m in self.writers for env in m.open_envs]

    def pick_open(self, data: st.DataObject) -> tuple[Writer, ModelWriter, int]:
        return data.draw(st.sampled_from(self.open_episodes()), label="open")

    def draw_final(self, data: st.DataObject, lead: tuple[int, ...] = ()) -> dict[str, Any] | None:
        if self.schema.final_fields and data.draw(st.booleans(), label="has final"):
            return data.draw(ours.steps(self.schema, lead, final=True))
        return None

    # ---- appending ---------------------------------------------------------------------------------

    @precondition(lambda self: self.writers)
    @rule(data=st.data(), env=st.integers(0, ENVS - 1), end=st.sampled_from((None, "terminated", "truncated")))
    def append_one(self, data: st.DataObject, env: int, end: str | None) -> None:
        writer, model = self.pick(data)
        step = data.draw(ours.steps(self.schema))
        final = self.draw_final(data) if end else None
        handle = writer.append(
            step, env=env, terminated=end == "terminated", truncated=end == "truncated", final=final
        )
        model.append(step, env=env, end=end, final=final)
        assert handle.stream == writer.stream

    @precondition(lambda self: self.writers)
    @rule(data=st.data(), n_steps=st.integers(1, 5))
    def continue_an_episode(self, data: st.DataObject, n_steps: int) -> None:
        writer, model = self.pick(data)
        env = data.draw(st.sampled_from(sorted(model.open_envs) or range(ENVS)), label="env")
        for _ in range(n_steps):
            step = data.draw(ours.steps(self.schema))
            writer.append(step, env=env)
            model.append(step, env=env)

    @precondition(lambda self: self.writers)
    @rule(data=st.data(), envs=st.lists(st.integers(0, ENVS - 1), min_size=1, max_size=ENVS, unique=True))
    def append_many(self, data: st.DataObject, envs: list[int]) -> None:
        writer, model = self.pick(data)
        step = data.draw(ours.steps(self.schema, (len(envs),)))
        terminated, truncated = self.draw_flags(data, (len(envs),))
        final = self.draw_final(data, (len(envs),))
        handles = writer.append(step, envs=envs, terminated=terminated, truncated=truncated, final=final)
        model.append_many(step, envs, ends_of(terminated, truncated), final)
        assert len(handles.t) == len(envs)

    @precondition(lambda self: self.writers)
    @rule(data=st.data(), n_steps=st.integers(1, 12), n_envs=st.integers(1, ENVS))
    def append_rollout(self, data: st.DataObject, n_steps: int, n_envs: int) -> None:
        writer, model = self.pick(data)
        shape = (n_steps, n_envs)
        rollout = data.draw(ours.steps(self.schema, shape))
        terminated, truncated = self.draw_flags(data, shape)
        final, metadata = self.draw_final(data, shape), data.draw(ours.metadata(self.schema))
        flags = {"terminated": terminated, "truncated": truncated}
        n_rows = terminated.size + (0 if final is None else int((terminated | truncated).sum()))
        try:
            writer.append_rollout(rollout, final=final, metadata=metadata, **flags)
        except DataError:
            assert self.is_small, "refused although it fits the buffer"
            assert n_rows > SMALL_ROWS, "refused although it fits the buffer"
            return  # a block that does not fit leaves no trace
        ends = [ends_of(a, b) for a, b in zip(terminated, truncated, strict=True)]
        model.append_rollout(rollout, range(n_envs), ends, final, metadata)

    def draw_flags(self, data: st.DataObject, shape: tuple[int, ...]) -> tuple[Any, Any]:
        rng = np.random.default_rng(data.draw(st.integers(0, 255), label="flags"))
        return rng.random(shape) < 0.2, rng.random(shape) < 0.1

    @precondition(lambda self: self.writers)
    @rule(data=st.data(), end=st.sampled_from(("terminated", "truncated", "cut")))
    def append_episode(self, data: st.DataObject, end: str) -> None:
        writer, model = self.pick(data)
        free = [env for env in range(ENVS + 1) if env not in model.open_envs]
        env = data.draw(st.sampled_from(free), label="env")
        episode, metadata = data.draw(ours.episodes(self.schema)), data.draw(ours.metadata(self.schema))
        key = writer.append_episode(
            episode, terminated=end == "terminated", truncated=end == "truncated", env=env, metadata=metadata
        )
        model.append_episode(episode, env=env, end=end, metadata=metadata)
        assert key == (writer.stream, len(model.episodes) - 1)

    @precondition(lambda self: self.open_episodes())
    @rule(data=st.data(), end=st.sampled_from(("terminated", "truncated")))
    def end_episode(self, data: st.DataObject, end: str) -> None:
        writer, model, env = self.pick_open(data)
        final, metadata = self.draw_final(data), data.draw(ours.metadata(self.schema))
        flags = {end: True}
        writer.end_episode(env, final=final, metadata=metadata, **flags)
        model.end_episode(env, end=end, final=final, metadata=metadata)

    @precondition(lambda self: self.open_episodes())
    @rule(data=st.data())
    def abort_episode(self, data: st.DataObject) -> None:
        writer, model, env = self.pick_open(data)
        writer.abort_episode(env)
        model.abort_episode(env)
        self.maybe_commit(data, writer, model)

    @precondition(lambda self: self.open_episodes())
    @rule(data=st.data())
    def amend_the_step_after_a_commit(self, data: st.DataObject) -> None:
        writer, model, env = self.pick_open(data)
        step, amended = data.draw(ours.steps(self.schema)), data.draw(ours.steps(self.schema))
        writer.commit()
        model.commit()
        for call in (writer, model):
            call.append(step, env=env)
        writer.amend(amended, env=env)
        model.amend(amended, env=env, t=len(model.open_envs[env].rows) - 1)

    @precondition(lambda self: self.open_episodes())
    @rule(data=st.data())
    def amend(self, data: st.DataObject) -> None:
        writer, model, env = self.pick_open(data)
        episode = model.open_envs[env]
        newest = len(episode.rows) - 1
        t = data.draw(st.just(newest) | st.integers(0, newest), label="t")
        path = data.draw(st.sampled_from(list(self.schema)), label="field")
        values = nest({path: data.draw(ours.values(self.schema[path]))})
        try:
            writer.amend(values, env=env, t=t)
        except StepPlacedError:
            assert self.is_small or t < episode.n_durable
        else:
            assert t >= episode.n_durable
            model.amend(values, env=env, t=t)
            self.maybe_commit(data, writer, model)

    # ---- making durable, and ending ----------------------------------------------------------------

    @precondition(lambda self: self.writers)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        writer, model = self.pick(data)
        writer.commit()
        model.commit()
        self.refresh()

    def maybe_commit(self, data: st.DataObject, writer: Writer, model: ModelWriter) -> None:
        if data.draw(st.booleans(), label="commit at once"):
            writer.commit()
            model.commit()
            self.refresh()

    @rule()
    def refresh(self) -> None:
        self.model.check(self.store.refresh())

    @precondition(lambda self: self.writers)
    @rule(data=st.data())
    def crash(self, data: st.DataObject) -> None:
        writer, model = self.leave(data)
        writer.release()  # ends its thread; what is staged is lost and nobody seals the stream
        model.crash()
        self.refresh()

    @precondition(lambda self: self.writers)
    @rule(data=st.data(), is_kept=st.booleans())
    def close(self, data: st.DataObject, is_kept: bool) -> None:
        writer, model = self.leave(data)
        writer.close() if is_kept else writer.discard()
        model.close() if is_kept else model.discard()
        self.refresh()

    def leave(self, data: st.DataObject) -> tuple[Writer, ModelWriter]:
        return self.writers.pop(data.draw(st.integers(0, len(self.writers) - 1), label="leaving"))

    @rule()
    def reopen(self) -> None:
        self.store = trajstore.open(self.url, fsync=False)
        self.model.check(self.store.snapshot)

    @rule()
    def keep_snapshot(self) -> None:
        self.kept = (self.store.snapshot, digest(self.store.snapshot))

    @invariant()
    def kept_snapshot_does_not_change(self) -> None:
        if getattr(self, "kept", None):
            assert digest(self.kept[0]) == self.kept[1]


class LocalStoreMachine(StoreMachine):
    """The same in a directory."""

    def new_url(self) -> str:
        return tempfile.mkdtemp(prefix="trajstore-model-")

    def remove(self, url: str) -> None:
        shutil.rmtree(url)


def _case(machine: type[StoreMachine], max_examples: int) -> Any:
    case = machine.TestCase
    case.settings = settings(
        max_examples=max_examples,
        stateful_step_count=30,
        deadline=None,
        derandomize="CI" in os.environ,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
    )
    return pytest.mark.slow(case)


TestStoreInMemory = _case(StoreMachine, 40)
TestStoreInDirectory = _case(LocalStoreMachine, 10)
