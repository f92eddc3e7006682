"""A live buffer and its model, driven by the same calls, show the same; interrupted runs go on bit by bit."""

from __future__ import annotations

import copy
import hashlib
import os
import shutil
import tempfile
import uuid
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

import trajstore
from tests.replay.test_buffer import crash, new_buffer, resumed
from tests.sampling.test_live_episodes import check_masses
from tests.sampling.test_reader import Episode as Facts
from tests.sampling.test_reader import legal_starts
from trajstore import DataError, NotReadyError, Priorities, ReplayBuffer, Retention, SamplesPerInsert, Windows
from trajstore.errors import CheckpointNotFoundError
from trajstore.sampling.priorities.priority_options import Linear
from trajstore.schema import Array

ENVS = 4
MAX_CHECKPOINTS = 4
PART = 256  # an eviction frees one part in so many
GAMMA = 0.5

Key = tuple[str, int]  # stream, episode
Row = tuple[int, str, int, int]  # age of the stream, stream, episode, t


# ---- the model ------------------------------------------------------------------------------------------


@dataclass
class Episode:
    """What is known of an episode; ``steps`` are the serial numbers of its steps from t = 0 on."""

    age: int  # of its stream: sessions are counted
    stream: str
    number: int
    steps: list[int] = field(default_factory=list)
    end: str = "open"
    has_final: bool = False
    floor: int = 0  # steps below were evicted

    @property
    def n(self) -> int:
        """Steps that are left."""
        return max(0, len(self.steps) - self.floor)

    @property
    def facts(self) -> Facts:
        return Facts(0, self.n, self.end, self.has_final)

    def serial(self, position: int) -> int:
        return self.steps[self.floor + position]

    def observation(self, position: int) -> list[float]:
        """What stands at a position; one past the last step is the final row."""
        t = self.floor + position
        return final_of(self.age, self.steps[-1], t) if t == len(self.steps) else of(self.age, self.steps[t], t)


def of(age: int, serial: int, t: int) -> list[float]:
    return [age, serial, t]


def final_of(age: int, serial: int, t: int) -> list[float]:
    return [age, -serial, t]


def reward_of(serial: int) -> float:
    return float(serial * 7 % 11 - 5)


class Model:
    """What a buffer shows, as plain lists.

    Steps go in order of arrival. Those that arrived within one page of ``page_rows`` go episode by episode.
    """

    def __init__(self, capacity: Any) -> None:
        self.limits = Retention.of(capacity)
        steps = self.limits.steps
        self.page_rows = max(1, min(1024, (1024 * 64 if steps is None else steps) // 64))
        self.episodes: dict[Key, Episode] = {}
        self.ended: list[Key] = []  # in order of their ends
        self.left_open: list[Key] = []  # by writers that died, where nobody said so
        self.growing: list[Key] = []
        self.pending: list[Row] = []  # appended and not yet taken up
        self.page: list[Row] = []
        self.queue: deque[Row] = deque()
        self.evicted = {"steps": [0, 0], "episodes": [0, 0]}
        self.priorities: dict[tuple[str, int, int], float] = {}
        self.largest = 1.0
        self.unread: dict[str, float] = {}  # by stream: the largest stored priority, until priorities are loaded
        self.n_batches = 0

    # appending

    def step(self, age: int, stream: str, number: int, serial: int) -> None:
        if (stream, number) not in self.episodes:
            self.episodes[stream, number] = Episode(age, stream, number)
            self.growing = sorted([*self.growing, (stream, number)], key=lambda key: key[1])
        episode = self.episodes[stream, number]
        self.pending.append((age, stream, number, len(episode.steps)))
        episode.steps.append(serial)

    def end(self, key: Key, end: str, has_final: bool) -> None:
        episode = self.episodes[key]
        episode.end, episode.has_final = end, has_final
        self.growing.remove(key)
        self.ended.append(key)

    def final_row(self, key: Key) -> None:
        episode = self.episodes[key]
        self.pending.append((episode.age, *key, len(episode.steps)))

    def abort(self, key: Key) -> None:
        del self.episodes[key]
        self.growing.remove(key)

    # evicting

    def publish(self) -> None:
        self.page += self.pending
        self.pending = []
        self._turn(len(self.page) - len(self.page) % self.page_rows)
        before = copy.deepcopy(self.evicted)
        if self.limits.steps is not None and self.n_steps > self.limits.steps:
            self._shrink(self.n_steps - self.limits.steps + self.limits.steps // PART)
        if self.limits.episodes is not None:
            self._drop_episodes(self.limits.episodes)
        if self.evicted != before:  # priorities follow each eviction
            self.load_largest()

    def _turn(self, n: int) -> None:
        rows, self.page = self.page[:n], self.page[n:]
        for first in range(0, n, self.page_rows):
            self.queue += sorted(rows[first : first + self.page_rows])

    def _shrink(self, need: int) -> None:
        while need:
            if not self.queue:
                if not self.page:
                    return
                self._turn(len(self.page))
            *_, stream, number, t = self.queue.popleft()
            episode = self.episodes.get((stream, number))
            if episode is not None and episode.floor <= t < len(episode.steps):
                need -= 1
                episode.floor = t + 1
                self._count("steps", 1, not episode.n)

    def _drop_episodes(self, limit: int) -> None:
        shown = self.shown
        if len(shown) <= limit:
            return
        for episode in shown[: len(shown) - limit + limit // PART]:
            if episode.end != "open":
                self._count("episodes", episode.n, True)
                episode.floor = len(episode.steps)

    def _count(self, cause: str, n_steps: int, is_gone: bool) -> None:
        self.evicted[cause][0] += n_steps
        self.evicted[cause][1] += is_gone

    # what there is

    @property
    def shown(self) -> list[Episode]:
        """In the order of the index."""
        every = (self.episodes[key] for key in (*self.ended, *self.left_open, *self.growing))
        return [episode for episode in every if episode.n]

    @property
    def n_steps(self) -> int:
        return sum(episode.n for episode in self.shown)

    def starts(self, spec: Windows) -> list[tuple[Episode, int]]:
        return [(e, p) for e in self.shown for p in sorted(legal_starts(e.facts, spec, "action"))]

    def load_largest(self) -> None:
        """Stored priorities are loaded when they are first needed, of streams that have steps then."""
        streams = {episode.stream for episode in self.shown}
        self.largest = max([self.largest, *(value for name, value in self.unread.items() if name in streams)])
        self.unread = {}

    def follow_priorities(self) -> None:
        self.load_largest()
        known = self.priorities
        self.priorities = {}
        for e in self.shown:
            for t in range(e.floor, len(e.steps)):
                handle = e.stream, e.number, t
                self.priorities[handle] = known.get(handle, self.largest)

    def priority(self, e: Episode, position: int, spec: Windows, over: Any) -> float:
        reach = [position + i * spec.stride for i in range(spec.length)]
        values = [self.priorities[e.stream, e.number, e.floor + p] for p in reach if p < e.n]
        eta = {"max": 1.0, "mean": 0.0}.get(over) if isinstance(over, str) else over
        return values[0] if eta is None else eta * max(values) + (1 - eta) * float(np.mean(values))

    def resumed(self) -> Model:
        """As a session that goes on from here sees it: open episodes were cut."""
        model = copy.deepcopy(self)
        for key in (*model.left_open, *model.growing):
            model.episodes[key].end = "cut"
        model.ended += [*model.left_open, *model.growing]
        model.left_open, model.growing = [], []
        return model


# ---- batches against the model --------------------------------------------------------------------------


def check_batch(
    model: Model, batch: dict[str, Any], spec: Windows, streams: list[str]
) -> list[tuple[Episode, int]]:
    """Every value, mask and handle of a batch; returns its windows."""
    found = []
    for i, (stream, number, t) in enumerate(batch["index"].tolist()):
        episode = model.episodes[streams[stream], number]
        start = window_start(batch, i, spec, episode)
        assert t == episode.floor + max(start, 0)
        assert start in legal_starts(episode.facts, spec, "action")
        found.append((episode, start))
        for k in range(spec.size):
            check_step(batch, i if spec.squeeze else (i, k), k, episode, start, spec)
    return found


def window_start(batch: dict[str, Any], i: int, spec: Windows, episode: Episode) -> int:
    """Where a window starts, also before its episode: the index names its first step then."""
    if spec.boundary != "pad_both":
        return int(batch["index"][i, 2]) - episode.floor
    first = int(batch["valid"][i].int().argmax())
    return int(batch["obs"][i, first, 2]) - episode.floor - spec.stride * (first - spec.burn_in)


def check_step(batch: dict[str, Any], at: Any, k: int, e: Episode, start: int, spec: Windows) -> None:
    position = start + spec.stride * (k - spec.burn_in)
    exists, inside = 0 <= position < e.n, min(max(position, 0), e.n - 1)
    serial, is_last = e.serial(inside), position == e.n - 1
    taken = 0 if spec.n_step is None else n_taken(e, inside, spec)
    learns = exists and spec.burn_in <= k < spec.burn_in + spec.length
    expected = {
        "valid": exists,
        "learn": learns and (taken > 0 or not spec.needs_next),
        "is_first": exists and e.floor + position == 0,
        "is_last": is_last and e.end != "open",
        "terminated": is_last and e.end == "terminated",
        "truncated": is_last and e.end == "truncated",
        "action": serial,
        "reward": reward_of(serial),
    }
    if spec.bootstrap:
        expected["is_final"] = position == e.n and e.has_final
        inside_rows = min(max(position, 0), e.n - 1 + e.has_final)
    else:
        inside_rows = inside
    assert {name: batch[name][at].item() for name in expected} == expected
    assert batch["obs"][at].tolist() == e.observation(inside_rows)
    if spec.n_step is not None:
        check_transition(batch, at, e, inside, taken)


def n_taken(e: Episode, position: int, spec: Windows) -> int:
    assert isinstance(spec.n_step, int)
    stop = e.n - 1 + (e.has_final or e.end == "terminated")
    return max(0, min(spec.n_step, stop - position))


def check_transition(batch: dict[str, Any], at: Any, e: Episode, position: int, taken: int) -> None:
    last_row = e.n - 1 + e.has_final
    assert batch["next"]["obs"][at].tolist() == e.observation(min(position + taken, last_row))
    is_terminal = position + taken == e.n and e.end == "terminated"
    rewards = [reward_of(e.serial(position + k)) * GAMMA**k for k in range(taken)]
    found = batch["n_step"]
    assert found["n"][at] == taken
    assert found["return"][at] == sum(rewards)
    assert found["discount"][at] == (0.0 if is_terminal else GAMMA**taken)


def check_priorities(
    model: Model, batch: dict[str, Any], spec: Windows, windows: list[tuple[Episode, int]], options: Priorities
) -> None:
    """Probabilities and weights in float64, from the model's priorities."""

    def mass(e: Episode, position: int) -> float:
        p = model.priority(e, position, spec, options.over)
        return (p + options.eps) ** options.alpha if p > 0 else 0.0

    every = [mass(*start) for start in model.starts(spec)]
    u, total = round(len(windows) * options.uniform) / len(windows), sum(every)
    drawn = np.array([(1 - u) * mass(*window) / total + u / len(every) for window in windows])
    least = drawn.min()
    if options.normalize == "buffer":
        positive = [m for m in every if m > 0 or u]
        least = (1 - u) * min(positive) / total + u / len(every)
    np.testing.assert_allclose(batch["priority"]["probability"].numpy(), drawn, rtol=1e-6)
    weights = (least / drawn) ** options.beta_at(model.n_batches)
    np.testing.assert_allclose(batch["priority"]["weight"].numpy(), weights, rtol=1e-6)


# ---- the machine ----------------------------------------------------------------------------------------

CAPACITIES = (
    *(None, 1, 2, 3, 7, 20, 50, 130, 300, 700),
    *(Retention(episodes=1), Retention(episodes=4), Retention(steps=40, episodes=3)),
)
SPECS = (
    Windows(),
    Windows(length=3, boundary="pad_right"),
    Windows(length=2, boundary="short"),
    Windows(length=2, burn_in=2, strict_context=True),
    Windows(length=2, burn_in=2, bootstrap=1, stride=2),
    Windows.transitions(n_step=2, gamma=GAMMA),
    Windows(length=3, stride=2, boundary="pad_both"),
)
OPTIONS = (
    None,
    None,
    Priorities(alpha=0.7, beta=0.5),
    Priorities(alpha=1.0, normalize="buffer", uniform=0.25),
    Priorities(alpha=0.5, over="max", eps=0.1, stratified=True),
    Priorities(alpha=1.0, over=0.5, duplicates="max", normalize="buffer"),
)


class BufferMachine(RuleBasedStateMachine):
    """Appends, samples, evicts, checkpoints, crashes and resumes; the model is asked after each sample."""

    buffer: ReplayBuffer

    def new_url(self) -> str:
        return f"memory://replay-model-{uuid.uuid4().hex}"

    def remove(self, url: str) -> None:
        objects = fsspec.filesystem("memory").store
        for key in [key for key in objects if key.startswith(url.removeprefix("memory:/"))]:
            del objects[key]

    @initialize(data=st.data(), compiled=st.booleans(), seconds=st.sampled_from((None, None, 0.01)))
    def begin(self, data: st.DataObject, compiled: bool, seconds: float | None) -> None:
        capacity = data.draw(st.sampled_from(CAPACITIES), label="capacity")
        options = data.draw(st.sampled_from(OPTIONS), label="priorities")
        spec = data.draw(st.sampled_from(SPECS), label="windows")
        if options is not None and spec.boundary == "pad_both":
            spec = SPECS[1]
        steps = Retention.of(capacity).steps
        self.make(
            compiled=compiled,
            capacity=capacity,
            sample=spec if steps is None or steps > 8 else Windows(),
            priorities=options,
            commit_seconds=seconds,
            cache_bytes=data.draw(st.sampled_from(("1MB", "8MB")), label="cache"),
            buffer_bytes=data.draw(st.sampled_from(("24KB", "64KB")), label="buffer"),
            seed=data.draw(st.integers(0, 99), label="seed"),
        )

    def make(self, **options: Any) -> None:
        self.url, self.made_with = self.new_url(), options
        self.capacity, self.spec, self.options = (options[n] for n in ("capacity", "sample", "priorities"))
        self.n_sessions = self.serial = 0
        self.saved: dict[str, Model] = {}  # by checkpoint
        self.durable: set[str] = set()  # of these
        self.has_lineage = False  # whether the session saved a checkpoint, or continued one
        self.written: dict[Key, list[int]] = {}
        self.kept: dict[tuple[str, int, int], float] = {}  # priorities that were stored last
        self.dropped: set[tuple[str, int, int]] = set()  # of these: evicted when others were stored later
        self.model = Model(self.capacity)
        self.buffer = new_buffer(self.url, **options)
        self.start_session()

    def start_session(self) -> None:
        self.n_sessions += 1
        self.open: dict[int, int] = {}  # by env, of this session

    def teardown(self) -> None:
        if hasattr(self, "buffer"):
            crash(self.buffer)
            self.remove(self.url)

    # ---- appending

    def steps(self, shape: tuple[int, ...], t: Array) -> tuple[dict[str, Any], Array]:
        """Values of new steps at these t, and their serial numbers."""
        n = int(np.prod(shape))
        serial = np.arange(self.serial, self.serial + n).reshape(shape) + 1
        self.serial += n
        obs = np.stack([np.full(shape, self.n_sessions), serial, t], -1).astype(np.float32)
        return {"obs": obs, "action": serial, "reward": (serial * 7 % 11 - 5).astype(np.float32)}, serial

    def finals(self, serial: Array, t: Array) -> dict[str, Any]:
        return {"obs": np.stack([np.full(t.shape, self.n_sessions), -serial, t + 1], -1).astype(np.float32)}

    def length(self, env: int) -> int:
        return len(self.model.episodes[self.buffer.stream, self.open[env]].steps) if env in self.open else 0

    def note(self, env: int, number: int, t: int, serial: int) -> None:
        """A step was appended."""
        stream = self.buffer.stream
        assert t == self.length(env)
        assert self.open.setdefault(env, number) == number
        self.model.step(self.n_sessions, stream, number, serial)
        self.written.setdefault((stream, number), []).append(serial)

    def note_end(self, env: int, end: str, has_final: bool) -> None:
        self.model.end((self.buffer.stream, self.open.pop(env)), end, has_final)

    @rule(
        env=st.integers(0, ENVS - 1), end=st.sampled_from(("", "", "terminated", "truncated")), final=st.booleans()
    )
    def append(self, env: int, end: str, final: bool) -> None:
        t = np.array(self.length(env))
        step, serial = self.steps((), t)
        has_final = bool(end) and final
        given_final = self.finals(serial, t) if has_final else None
        handle = self.buffer.append(step, env=env, final=given_final, **({end: True} if end else {}))
        assert isinstance(handle, trajstore.Handle)
        self.note(env, handle.episode, handle.t, int(serial))
        if has_final:
            self.model.final_row((handle.stream, handle.episode))
        if end:
            self.note_end(env, end, has_final)

    @rule(env=st.integers(0, ENVS - 1), n=st.integers(2, 70))
    def append_some(self, env: int, n: int) -> None:
        for _ in range(n):
            self.append(env, "", False)

    @rule(
        envs=st.lists(st.integers(0, ENVS - 1), min_size=1, unique=True),
        seed=st.integers(0, 99),
        final=st.booleans(),
    )
    def append_many(self, envs: list[int], seed: int, final: bool) -> None:
        t = np.array([self.length(env) for env in envs])
        step, serial = self.steps((len(envs),), t)
        terminated, truncated = self.flags(seed, (len(envs),))
        flags = {"terminated": terminated, "truncated": truncated}
        handles = self.buffer.append(step, envs=envs, final=self.finals(serial, t) if final else None, **flags)
        assert isinstance(handles, trajstore.Handles)
        for i, env in enumerate(envs):
            self.note(env, int(handles.episode[i]), int(handles.t[i]), int(serial[i]))
        self.note_ends(np.array(envs)[None], handles.episode[None], terminated[None], truncated[None], final)

    def flags(self, seed: int, shape: tuple[int, ...]) -> tuple[Array, Array]:
        rng = np.random.default_rng(seed)
        return rng.random(shape) < 0.15, rng.random(shape) < 0.1

    def note_ends(self, envs: Array, episodes: Array, terminated: Array, truncated: Array, final: bool) -> None:
        ending = list(zip(*np.nonzero(terminated | truncated), strict=True))
        for at in ending if final else []:  # final rows come after all steps of the call
            self.model.final_row((self.buffer.stream, int(episodes[at])))
        for at in ending:
            key = self.buffer.stream, int(episodes[at])
            self.model.end(key, "terminated" if terminated[at] else "truncated", final)
            self.open = {env: number for env, number in self.open.items() if number != key[1]}

    @rule(n=st.integers(1, 90), end=st.sampled_from(("terminated", "truncated", "cut")), final=st.booleans())
    def add_episode(self, n: int, end: str, final: bool) -> None:
        step, serial = self.steps((n,), np.arange(n))
        if final:
            last = self.finals(serial[-1:], np.array([n - 1]))
            step["obs"] = np.concatenate([step["obs"], last["obs"]])
        flags = {end: True} if end != "cut" else {}
        key = self.buffer.add_episode(step, env=ENVS, **flags)
        for t in range(n):
            self.note(ENVS, key.episode, t, int(serial[t]))
        if final:
            self.model.final_row(tuple(key))
        self.note_end(ENVS, end, final)

    @rule(n=st.integers(1, 30), seed=st.integers(0, 99), final=st.booleans())
    def extend(self, n: int, seed: int, final: bool) -> None:
        shape = n, ENVS
        terminated, truncated = self.flags(seed, shape)
        t = np.zeros(shape, np.int64)
        for env in range(ENVS):
            at = self.length(env)
            for i in range(n):
                t[i, env] = at
                at = 0 if terminated[i, env] or truncated[i, env] else at + 1
        step, serial = self.steps(shape, t)
        flags = {"terminated": terminated, "truncated": truncated}
        handles = self.buffer.extend(step, final=self.finals(serial, t) if final else None, **flags)
        assert np.array_equal(handles.t, t)
        for at in np.ndindex(shape):
            key = self.buffer.stream, int(handles.episode[at])
            self.model.step(self.n_sessions, *key, int(serial[at]))
            self.written.setdefault(key, []).append(int(serial[at]))
            self.open[at[1]] = key[1]
        envs = np.broadcast_to(np.arange(ENVS), shape)
        self.note_ends(envs, handles.episode, terminated, truncated, final)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), end=st.sampled_from(("terminated", "truncated")), final=st.booleans())
    def end_episode(self, data: st.DataObject, end: str, final: bool) -> None:
        env = data.draw(st.sampled_from(sorted(self.open)), label="env")
        key = self.buffer.stream, self.open[env]
        episode = self.model.episodes[key]
        last = self.finals(np.array(episode.steps[-1]), np.array(len(episode.steps) - 1)) if final else None
        assert self.buffer.end_episode(env, final=last, **{end: True}) == key
        if final:
            self.model.final_row(key)
        self.note_end(env, end, final)

    # Where pages have several rows, rows of aborted episodes count or not, as the disk has it: tested on its own.
    @precondition(lambda self: self.open and self.model.page_rows == 1)
    @rule(data=st.data())
    def abort_episode(self, data: st.DataObject) -> None:
        env = data.draw(st.sampled_from(sorted(self.open)), label="env")
        key = self.buffer.stream, self.open.pop(env)
        assert self.buffer.abort_episode(env) == key
        self.model.abort(key)

    # ---- sampling

    @rule(n=st.integers(1, 24))
    def sample(self, n: int) -> None:
        self.model.publish()
        self.model.follow_priorities()
        starts = self.model.starts(self.spec)
        if not starts:
            with pytest.raises(NotReadyError):
                self.buffer.sample(n)
            return
        if self.options is not None and not any(self.model.priority(*s, self.spec, "start") for s in starts):
            return  # what is said then is tested elsewhere
        batch = self.buffer.sample(n)
        windows = check_batch(self.model, batch, self.spec, self.buffer.streams)
        if self.options is not None:
            check_priorities(self.model, batch, self.spec, windows, self.options)
            check_masses(self.buffer.reader, self.spec)
            self.model.n_batches += 1

    # Whether a checkpoint outlives a crash is a matter of time, and so is what a session finds then. Preconditions
    # must not depend on that, so rules that need something of this return if it is not there.

    @precondition(lambda self: self.options is not None)
    @rule(seed=st.integers(0, 999), n=st.integers(1, 12))
    def update_priorities(self, seed: int, n: int) -> None:
        if not self.model.priorities:
            return
        rng, model = np.random.default_rng(seed), self.model
        known = list(model.priorities)  # of the last sample; some may be evicted since
        self.look()
        chosen = [known[int(i)] for i in rng.integers(0, len(known), n)]
        values = (rng.uniform(0.05, 4.0, n) * (rng.random(n) > 0.1)).astype(np.float32)
        shown = {(e.stream, e.number, t) for e in model.shown for t in range(e.floor, len(e.steps))}
        numbers = {name: i for i, name in enumerate(self.buffer.streams)}
        index = torch.tensor([[numbers[stream], episode, t] for stream, episode, t in chosen])
        model.follow_priorities()
        ignored = self.buffer.update_priorities(index, torch.from_numpy(values))
        assert ignored == sum(handle not in shown for handle in chosen)
        assert self.options is not None
        new: dict[tuple[str, int, int], float] = {}
        for handle, value in zip(chosen, values.tolist(), strict=True):
            if handle in shown:
                new[handle] = max(value, new.get(handle, 0.0)) if self.options.duplicates == "max" else value
                model.largest = max(model.largest, value if self.options.duplicates == "last" else 0.0)
        model.largest = max([model.largest, *new.values()])
        model.priorities |= new

    @rule()
    def look(self) -> None:
        self.model.publish()
        assert self.buffer.n_steps == self.model.n_steps
        assert self.buffer.n_episodes == len(self.model.shown)
        assert len(self.buffer) == self.model.n_steps
        assert self.buffer.n_windows() == len(self.model.starts(self.spec))
        counts = {"min_steps": self.model.n_steps, "min_episodes": len(self.model.shown)}
        assert self.buffer.is_ready(**counts) == bool(not self.model.n_steps or self.model.starts(self.spec))
        evicted = self.buffer.stats()["evicted"]
        found = {cause: [evicted[cause]["steps"], evicted[cause]["episodes"]] for cause in self.model.evicted}
        if isinstance(self.capacity, Retention) and None not in (self.capacity.steps, self.capacity.episodes):
            # A full staging applies the limits in between, so either of them may come first.
            assert np.sum(list(found.values()), 0).tolist() == np.sum(list(self.model.evicted.values()), 0).tolist()
        else:
            assert found == self.model.evicted

    # ---- durability

    @rule()
    def flush(self) -> None:
        self.buffer.flush()
        self.durable = set(self.saved)
        self.keep_priorities()

    def keep_priorities(self) -> None:
        """The buffer has stored its priorities; it looks at all its steps for that, so limits are applied."""
        if self.options is not None:
            self.model.publish()
            self.model.follow_priorities()
            self.kept |= self.model.priorities
            self.dropped = self.kept.keys() - self.model.priorities.keys()

    @rule(wait=st.booleans())
    def save_checkpoint(self, wait: bool) -> None:
        if len(self.saved) >= MAX_CHECKPOINTS:
            return
        self.model.publish()
        checkpoint = self.buffer.save_checkpoint("some", wait=wait)
        self.has_lineage = True
        self.durable = set(self.saved)  # a checkpoint waits for the one before
        self.saved[checkpoint] = copy.deepcopy(self.model)
        if wait:
            self.durable.add(checkpoint)
            self.keep_priorities()

    @rule(keep=st.integers(1, 2), every=st.booleans())
    def prune(self, keep: int, every: bool) -> None:
        if not self.saved:
            return
        if not (every or self.has_lineage):
            with pytest.raises(CheckpointNotFoundError, match="all_sessions=True"):
                self.buffer.prune_checkpoints(keep)
            return
        removed = self.buffer.prune_checkpoints(keep, all_sessions=every)
        for gone in removed:
            del self.saved[gone]
        if removed:  # limits are applied before storage is freed
            self.model.publish()
        self.durable = set(self.saved)
        assert {c.id for c in self.buffer.checkpoints} == set(self.saved)

    def leave(self, is_closed: bool) -> None:
        if is_closed:
            self.buffer.close()
            self.keep_priorities()
        crash(self.buffer)
        there = {c.id for c in trajstore.open(self.url).checkpoints}
        lost = self.saved.keys() - there
        assert not lost & self.durable
        assert not (lost and is_closed)
        self.saved = {checkpoint: model for checkpoint, model in self.saved.items() if checkpoint in there}

    @rule(which=st.integers(0, MAX_CHECKPOINTS - 1), is_closed=st.booleans())
    def resume(self, which: int, is_closed: bool) -> None:
        self.leave(is_closed)
        if not self.saved:
            self.open_anew()
            return
        checkpoint = list(self.saved)[which % len(self.saved)]
        self.buffer = resumed(self.url, checkpoint)
        self.has_lineage = True
        self.model = self.saved[checkpoint].resumed()
        self.start_session()
        self.look()

    @rule(is_closed=st.booleans())
    def open_again(self, is_closed: bool) -> None:
        self.leave(is_closed)
        self.open_anew()

    def open_anew(self) -> None:
        snapshot = trajstore.open(self.url).snapshot
        self.model = self.stored(snapshot)
        self.buffer = new_buffer(self.url, **self.made_with)
        self.has_lineage = False
        self.start_session()
        self.look()

    def stored(self, snapshot: trajstore.Snapshot) -> Model:
        """A model of what the store shows; all of that was written."""
        model, ages = Model(self.capacity), {}
        for i, row in enumerate(snapshot.episodes):
            key = row["stream"], row["episode"]
            if row["end"] == "aborted" or not row["length"]:
                continue
            data, first = snapshot.read_episode(i, columns=True), snapshot.episodes.spans(i)[0].t_start
            ages[key[0]] = int(data["obs"][0, 0])
            steps = self.written[key][: first + row["length"]]
            assert data["action"].tolist() == steps[first:]
            episode = Episode(ages[key[0]], *key, steps, row["end"], bool(row["has_final"]), first)
            model.episodes[key] = episode
            (model.left_open if row["end"] == "open" else model.ended).append(key)
            if self.options is not None:
                model.priorities |= self.stored_priorities(
                    key, first, data.get("priority", np.full(row["length"], np.nan))
                )
        if self.options is not None and "priority" in snapshot.columns.names:
            stored = snapshot.column("priority", {key[0] for key in model.episodes})
            model.unread = {name: float(values.max(initial=0.0)) for name, (_, values) in stored.items()}
        spans = []
        for record, part in zip(snapshot.streams, snapshot.parts(), strict=True):
            for ints, floats in zip(part.spans.ints.tolist(), part.spans.floats.tolist(), strict=True):
                spans += [(floats[1], record.id, ints[0], ints[2] + i) for i in range(ints[4] - ints[3])]
        spans.sort(key=lambda span: span[0])
        model.queue += [(ages.get(stream, 0), stream, number, t) for _, stream, number, t in spans]
        return model

    def stored_priorities(self, key: Key, first: int, stored: Array) -> dict[tuple[str, int, int], float]:
        """The priorities that steps of an episode have on storage: those that they had when these were stored."""
        steps = {(*key, first + i): value for i, value in enumerate(stored.tolist())}
        differ = {step: value for step, value in steps.items() if value != self.kept.get(step)}
        assert not self.kept.keys() & differ.keys() - self.dropped
        # Steps that were evicted when priorities were stored may be shown again, from a checkpoint or because other
        # rows are stored before them. They have no priority, or that of new steps; never 0, which is not drawn.
        found = {step: value for step, value in steps.items() if not np.isnan(value)}
        assert all(found[step] >= 1.0 for step in found.keys() & differ.keys())
        return found


class LocalBufferMachine(BufferMachine):
    """The same in a directory."""

    def new_url(self) -> str:
        return tempfile.mkdtemp(prefix="trajstore-replay-model-")

    def remove(self, url: str) -> None:
        shutil.rmtree(url)


# In CI a failure is reported as it was found: to look for a shorter one would take minutes.
RUNS: dict[str, Any] = (
    {"derandomize": True, "phases": [Phase.explicit, Phase.generate]} if os.environ.get("CI") else {}
)


def _case(machine: type[BufferMachine], max_examples: int) -> Any:
    case = machine.TestCase
    case.settings = settings(
        max_examples=max_examples,
        stateful_step_count=30,
        deadline=None,
        **RUNS,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
    )
    return pytest.mark.slow(case)


TestBufferInMemory = _case(BufferMachine, 25)
TestBufferInDirectory = _case(LocalBufferMachine, 6)


# ---- interrupted runs go on bit by bit ------------------------------------------------------------------


class Trainer:
    """Appends and samples by a script; what every batch holds is logged."""

    def __init__(self, buffer: ReplayBuffer, prefetch: int) -> None:
        self.buffer, self._prefetch = buffer, prefetch
        self.log: list[str] = []
        self._serial, self._t = 0, [0] * ENVS
        self._last: dict[str, Any] | None = None
        self._iterator: Any = None

    def go_on(self, buffer: ReplayBuffer) -> None:
        """After a crash, with another buffer; the streams that were there have the same numbers."""
        self.buffer = buffer
        if self._iterator is not None:
            self._iterator = buffer.batches(8, prefetch=self._prefetch)

    def do(self, action: str, *arguments: Any) -> None:
        getattr(self, action)(*arguments)

    def _steps(self, shape: tuple[int, ...]) -> dict[str, Any]:
        n = int(np.prod(shape))
        serial = np.arange(self._serial, self._serial + n).reshape(shape)
        self._serial += n
        obs = np.stack([serial % 101, serial % 7, serial], -1).astype(np.float32)
        return {"obs": obs, "action": serial, "reward": (serial * 7 % 11).astype(np.float32) / 8}

    def step(self, env: int, end: str, final: bool) -> None:
        last = {"obs": self._steps(())["obs"]} if end and final else None
        self.buffer.append(self._steps(()), env=env, final=last, **({end: True} if end else {}))
        self._t[env] = 0 if end else self._t[env] + 1

    def rollout(self, n: int, ends: Array, final: bool) -> None:
        last = {"obs": self._steps((n, ENVS))["obs"]} if final else None
        self.buffer.extend(self._steps((n, ENVS)), terminated=ends, final=last)
        for row in ends:
            self._t = [0 if end else t + 1 for t, end in zip(self._t, row, strict=True)]

    def episode(self, n: int) -> None:
        self.buffer.add_episode(self._steps((n,)), env=ENVS, truncated=True)

    def abort(self, env: int) -> None:
        if self._t[env]:
            self.buffer.abort_episode(env)
            self._t[env] = 0

    def end_all(self) -> None:
        for env in range(ENVS):
            if self._t[env]:
                self.buffer.end_episode(env, truncated=True)
                self._t[env] = 0

    def sample(self, n: int) -> None:
        try:
            self._note(self.buffer.sample(n))
        except DataError as error:
            self.log.append(type(error).__name__)

    def iterate(self) -> None:
        if self._iterator is None:
            self._iterator = self.buffer.batches(8, prefetch=self._prefetch)
        try:
            self._note(next(self._iterator))
        except DataError as error:
            self.log.append(type(error).__name__)

    def _note(self, batch: dict[str, Any]) -> None:
        self._last = batch
        self.log.append(digest(batch))

    def update(self) -> None:
        """Priorities that follow from what the last batch holds."""
        if self._last is not None and self.buffer.options.priorities is not None:
            serial = self._last["action"].reshape(len(self._last["index"]), -1)[:, 0]
            values = (serial % 13).double() / 4 + (serial % 3 == 0)
            self.log.append(str(self.buffer.update_priorities(self._last["index"], values)))


def digest(batch: dict[str, Any]) -> str:
    """A hash of everything but the names of streams and episodes, which are others after a resume."""
    found = hashlib.sha256()
    for name, value in sorted(batch.items()):
        if isinstance(value, dict):
            found.update(digest(value).encode())
        elif name != "index":
            found.update(name.encode() + value.numpy().tobytes())
    return found.hexdigest()


def scripts(seed: int, n: int) -> list[tuple[Any, ...]]:
    """Some hundred calls, a checkpoint among them now and then."""
    rng = np.random.default_rng(seed)
    kinds = ["step"] * 8 + ["sample"] * 4 + ["iterate"] * 3 + ["update"] * 3
    kinds += ["rollout", "episode", "abort", "checkpoint"]
    arguments = {
        "step": lambda: (int(rng.integers(ENVS)), str(rng.choice(["", "", "", "terminated"])), rng.random() < 0.5),
        "rollout": lambda: (5, rng.random((5, ENVS)) < 0.1, rng.random() < 0.5),
        "episode": lambda: (int(rng.integers(1, 40)),),
        "abort": lambda: (int(rng.integers(ENVS)),),
        "sample": lambda: (int(rng.integers(1, 16)),),
    }
    chosen = [str(rng.choice(kinds)) for _ in range(n)]
    return [("episode", 5), *((kind, *arguments.get(kind, tuple)()) for kind in chosen)]


def spoil(buffer: ReplayBuffer, rng: Any) -> None:
    """What a session does after its last checkpoint, and nobody may ever see."""
    n = int(rng.integers(0, 60))
    junk = {"obs": np.full((n + 1, 3), -1, np.float32), "action": np.full(n + 1, -1)}
    buffer.add_episode(junk | {"reward": np.full(n + 1, -1, np.float32)}, terminated=True)
    if rng.random() < 0.5:
        buffer.sample(4, Windows())
    if rng.random() < 0.5:
        buffer.flush()


def run(
    script: list[tuple[Any, ...]], prefetch: int, rng: Any, is_interrupted: bool, **options: Any
) -> tuple[Trainer, str]:
    url = f"memory://twin-{uuid.uuid4().hex}"
    trainer = Trainer(new_buffer(url, **options), prefetch)
    for action, *arguments in script:
        if action != "checkpoint":
            trainer.do(action, *arguments)
            continue
        trainer.end_all()
        checkpoint = trainer.buffer.save_checkpoint("twin", wait=bool(rng.random() < 0.5))
        if is_interrupted and rng.random() < 0.6:
            trainer.buffer.flush()
            spoil(trainer.buffer, rng)
            crash(trainer.buffer)
            trainer.go_on(resumed(url, checkpoint))
    return trainer, url


PRIORITIES = (
    None,
    Priorities(alpha=0.7, beta=Linear(0.4, 1.0, 20)),
    Priorities(alpha=1.0, kind="rank", rank_every=5),
    Priorities(alpha=0.6, over="max", normalize="buffer"),
    Priorities(alpha=0.6, over="mean", uniform=0.3),
    Priorities(alpha=0.6, over=0.4, stratified=True, initial=0.5),
)
KINDS = (
    Windows(),
    Windows(length=3, boundary="pad_right"),
    Windows.transitions(n_step=(1, 3)),
    Windows(length=2, burn_in=2, strict_context=True),
)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 1 << 30),
    capacity=st.sampled_from([None, 16, 60, 160, 400, Retention(episodes=5)]),
    kind=st.sampled_from(KINDS),
    priorities=st.sampled_from(PRIORITIES),
    prefetch=st.sampled_from([0, 2]),
    compiled=st.booleans(),
    seconds=st.sampled_from([None, 0.002]),
)
def test_an_interrupted_run_goes_on_bit_by_bit(
    seed: int, capacity: Any, kind: Windows, priorities: Any, prefetch: int, compiled: bool, seconds: float | None
) -> None:
    script, rng = scripts(seed, 150), np.random.default_rng(seed)
    options = {"capacity": capacity, "sample": kind, "priorities": priorities, "seed": seed, "statistics": True}
    limiter = [SamplesPerInsert(2.0, slack=1e6) for _ in range(2)]
    whole, _ = run(script, prefetch, rng, False, samples_per_insert=limiter[0], buffer_bytes="1MB", **options)
    parts, _ = run(
        *(script, prefetch, rng, True),
        **options | {"samples_per_insert": limiter[1], "compiled": compiled, "commit_seconds": seconds},
    )
    assert parts.log == whole.log
    assert parts.buffer.n_steps == whole.buffer.n_steps
    figures = [trainer.buffer.stats() for trainer in (parts, whole)]
    for name in ("n_sampled", "evicted", "samples_per_insert"):
        assert figures[0][name] == figures[1][name]
    for trainer in (parts, whole):
        trainer.buffer.close()
    if not any(action == "abort" for action, *_ in script):  # what was committed before it was aborted counts
        assert_same_statistics(parts.buffer, whole.buffer)


def assert_same_statistics(a: ReplayBuffer, b: ReplayBuffer) -> None:
    """Sums of floats depend on how they are grouped, so all but the counts may differ in their last bits."""
    found, expected = a.statistics(), b.statistics()
    assert found.keys() == expected.keys()
    for path in expected:
        assert np.array_equal(found[path]["count"], expected[path]["count"])
        for name in ("mean", "std", "min", "max"):
            np.testing.assert_allclose(found[path][name], expected[path][name], rtol=1e-9, atol=1e-9)
