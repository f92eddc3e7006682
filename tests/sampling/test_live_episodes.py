"""Appended steps can be sampled at once, and stay the same while they are committed behind."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import trajstore
from tests.support.faulty import BlockPuts, FaultyStorage, real_storage, through
from trajstore import Field, Priorities, Reader, Schema, Store, Windows, Writer
from trajstore.sampling.live.writer_inbox import WriterInbox
from trajstore.writing.staging import Staging

SPEC = Windows(length=3, boundary="pad_right")


def new_store(chunk_rows: int = 8) -> Store:
    schema = Schema(
        {
            "obs": Field("float32", (2,), final=True, chunk_rows=chunk_rows),
            "reward": Field("float32", chunk_rows=16),
        }
    )
    return trajstore.create(f"memory://live-{np.random.default_rng().integers(1 << 60)}", schema)


def step(episode: int, t: int) -> dict[str, Any]:
    return {"obs": np.array([episode, t], np.float32), "reward": float(t)}


class Model:
    """What was appended, by episode; every value is a function of (episode, t)."""

    def __init__(self, writer: Writer) -> None:
        self.writer = writer
        self.lengths: dict[int, int] = {}
        self.ends: dict[int, str] = {}
        self.open: dict[int, int] = {}  # by env
        self.n_begun = 0

    def append(self, env: int, end: str = "", has_final: bool = False) -> None:
        if env not in self.open:
            self.open[env], self.lengths[self.n_begun] = self.n_begun, 0
            self.n_begun += 1
        episode = self.open[env]
        t = self.lengths[episode]
        final = {"obs": np.array([episode, t + 1], np.float32)} if end and has_final else None
        self.writer.append(step(episode, t), env=env, final=final, **({end: True} if end else {}))
        self.lengths[episode] += 1
        if end:
            self.ends[episode] = end
            del self.open[env]

    def append_many(self, envs: list[int]) -> None:
        for env in envs:
            if env not in self.open:
                self.open[env], self.lengths[self.n_begun] = self.n_begun, 0
                self.n_begun += 1
        steps = [step(self.open[env], self.lengths[self.open[env]]) for env in envs]
        self.writer.append(
            {
                "obs": np.stack([s["obs"] for s in steps]),
                "reward": np.array([s["reward"] for s in steps], np.float32),
            },
            envs=envs,
        )
        for env in envs:
            self.lengths[self.open[env]] += 1

    def act(self, action: str, *arguments: Any) -> None:
        if action == "append":
            self.append(*arguments)
        elif action == "many":
            self.append_many(*arguments)
        elif action == "abort" and arguments[0] in self.open:
            self.abort(*arguments)
        elif action == "burst":
            for _ in range(arguments[1]):
                self.append(arguments[0])

    def abort(self, env: int) -> None:
        self.writer.abort_episode(env=env)
        del self.lengths[self.open.pop(env)]

    def check(self, reader: Reader, n: int = 16) -> torch.Tensor | None:
        total = sum(self.lengths.values())
        if not total:
            return None
        assert reader.n_windows(Windows()) == total
        batch = reader.sample(n, SPEC)
        index = batch["index"]
        t = index[:, 2:] + torch.arange(3)
        length = torch.tensor([self.lengths[e] for e in index[:, 1].tolist()])[:, None]
        assert torch.equal(batch["valid"], t < length)
        expected = torch.stack([index[:, 1:2].expand_as(t), t], -1).float()
        assert torch.equal(batch["obs"][batch["valid"]], expected[batch["valid"]])
        ends = [self.ends.get(e, "open") for e in index[:, 1].tolist()]
        is_last = t == length - 1
        for kind in ("terminated", "truncated"):
            assert torch.equal(batch[kind], is_last & torch.tensor([e == kind for e in ends])[:, None])
        assert torch.equal(batch["is_last"], is_last & torch.tensor([e != "open" for e in ends])[:, None])
        return torch.as_tensor(index)


ends = st.sampled_from(["", "", "", "terminated", "truncated"])
actions = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(0, 3), ends, st.booleans()),
        st.tuples(st.just("many"), st.lists(st.integers(0, 4), min_size=1, unique=True)),
        st.tuples(st.just("commit")),
        st.tuples(st.just("abort"), st.integers(0, 3)),
        st.tuples(st.just("sample")),
        st.tuples(st.just("burst"), st.integers(0, 3), st.integers(1, 150)),
    ),
    max_size=40,
)  # fmt: skip


def play(script: list[tuple[Any, ...]], with_commits: bool, compiled: bool) -> list[torch.Tensor]:
    store = new_store()
    writer = store.writer(commit_seconds=None, buffer_bytes="64KB")
    reader, model, drawn = (
        Reader(store, writer=writer, seed=1, cache_bytes="8MB", compiled=compiled),
        Model(writer),
        [],
    )
    for action, *arguments in script:
        if action == "commit" and with_commits:
            writer.commit()
        elif action == "sample" and (index := model.check(reader)) is not None:
            drawn.append(index)
        else:
            model.act(action, *arguments)
    index = model.check(reader)
    writer.close()
    model.ends |= dict.fromkeys(model.open.values(), "cut")
    model.check(reader)
    return drawn if index is None else [*drawn, index]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(actions, st.booleans())
def test_appended_steps_are_sampled_as_they_were_appended(script: list[tuple[Any, ...]], compiled: bool) -> None:
    play(script, True, compiled)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(actions)
def test_batches_do_not_depend_on_when_steps_are_committed(script: list[tuple[Any, ...]]) -> None:
    with_commits, without = play(script, True, True), play(script, False, True)
    assert all(torch.equal(a, b) for a, b in zip(with_commits, without, strict=True))


def play_prioritised(
    script: list[tuple[Any, ...]], with_commits: bool, compiled: bool, spec: Windows, over: Any
) -> list[torch.Tensor]:
    store = new_store()
    writer = store.writer(commit_seconds=None, buffer_bytes="64KB")
    priorities = Priorities(alpha=0.7, over=over, normalize="buffer")
    reader = Reader(store, writer=writer, seed=1, cache_bytes="8MB", compiled=compiled, priorities=priorities)
    model, drawn = Model(writer), list[torch.Tensor]()
    for action, *arguments in [*script, ("sample",), ("sample",)]:
        if action == "commit":
            if with_commits:
                writer.commit()
        elif action != "sample":
            model.act(action, *arguments)
        elif reader.n_windows(spec):
            batch = reader.sample(16, spec)
            drawn += [batch["index"], batch["priority"]["weight"], batch["priority"]["probability"]]
            t = batch["index"].sum(1)
            reader.update_priorities(batch["index"], (t % 5) + 0.1 * (1 + t % 3))
            check_masses(reader, spec)
    writer.close()
    return drawn


def check_masses(reader: Reader, spec: Windows) -> None:
    """The tree that was kept up to date holds what one made anew would hold."""
    sampler = reader.priority_sampler
    assert sampler is not None
    kept = sampler._tree(spec, None)._tree.get(torch.arange(sampler.priority_column.size))
    sampler._trees = {}
    anew = sampler._tree(spec, None)._tree.get(torch.arange(sampler.priority_column.size))
    assert torch.equal(kept, anew)


specs = st.sampled_from(
    [
        Windows(),
        Windows(length=3, boundary="pad_right"),
        Windows(length=2, boundary="short"),
        Windows(length=2, burn_in=2, strict_context=True),
        Windows.transitions(n_step=2),
    ]
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(actions, st.booleans(), specs, st.sampled_from(["start", "max", 0.5]))
def test_prioritised_batches_do_not_depend_on_when_steps_are_committed(
    script: list[tuple[Any, ...]], compiled: bool, spec: Windows, over: Any
) -> None:
    with_commits = play_prioritised(script, True, compiled, spec, over)
    without = play_prioritised(script, False, True, spec, over)
    assert all(torch.equal(a, b) for a, b in zip(with_commits, without, strict=True))


def test_what_was_committed_before_anybody_looked_is_read_from_the_stream() -> None:
    store = new_store()
    writer = store.writer(commit_seconds=None, buffer_bytes="64KB")
    reader, model = Reader(store, writer=writer, cache_bytes="8MB"), Model(writer)
    for i in range(5000):
        model.append(i % 3, "terminated" if i % 50 == 0 else "", has_final=i % 100 == 0)
    writer.commit()
    live = reader.assembler.live
    assert live is not None
    assert all(block.values is None for block in live.episodes.inbox.blocks)  # their memory is not kept
    for _ in range(20):
        model.append(1)
        model.check(reader, 64)
    writer.close()


def test_a_commit_is_made_when_live_rows_run_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trajstore.sampling.live.live_pages.LivePages.set_rows", lambda self, n: _few(self))
    store = new_store()
    writer = store.writer(commit_seconds=None, buffer_bytes="1MB")
    reader, model = Reader(store, writer=writer, cache_bytes="32MB"), Model(writer)
    for _ in range(100):
        model.append(0)
    model.check(reader)
    for _ in range(200):
        model.append(0)
    assert writer.committed_rows == 0
    assert reader.n_windows(Windows()) == 300  # three more pages, and only two were left
    assert writer.committed_rows == 300
    model.check(reader)
    for _ in range(100):
        model.append(0)
    model.check(reader)
    writer.close()


def test_rows_are_shown_that_found_room_only_because_a_commit_was_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """They were handed off when no live rows were free, and a commit that frees some was reported meanwhile."""
    monkeypatch.setattr("trajstore.sampling.live.live_pages.LivePages.set_rows", lambda self, n: _few(self))
    plan = BlockPuts()
    plan.gate.set()
    with through(FaultyStorage(real_storage("memory://blocked-puts"), plan)):
        store = new_store()
    writer = store.writer(commit_seconds=None, buffer_bytes="1MB")
    reader, model = Reader(store, writer=writer, cache_bytes="32MB"), Model(writer)
    for _ in range(200):
        model.append(0)
    model.check(reader)  # all pages are taken
    writer.commit()
    plan.gate.clear()
    for _ in range(200):
        model.append(0)
    writer.begin_commit()
    assert plan.reached.wait(60)
    reader.sample(1, Windows())
    assert reader.assembler.index.n_steps == 400
    plan.gate.set()
    model.check(reader)
    writer.close()


def _few(pages: Any) -> None:
    pages.free, pages.n_free = np.arange(4), 4


def test_amended_steps_are_sampled_as_amended() -> None:
    store = new_store()
    writer = store.writer(commit_seconds=None, buffer_bytes="1MB")
    reader, model = Reader(store, writer=writer, cache_bytes="32MB"), Model(writer)
    for _ in range(5):
        model.append(0)
    model.check(reader)
    writer.amend({"reward": 77.0}, t=2)
    batch = reader.sample(200, Windows())
    assert {(int(i[2]), float(r)) for i, r in zip(batch["index"], batch["reward"][:, 0], strict=True)} == {
        (0, 0.0), (1, 1.0), (2, 77.0), (3, 3.0), (4, 4.0)
    }  # fmt: skip
    writer.commit()
    again = reader.sample(200, Windows())
    assert 77.0 in again["reward"]
    writer.close()


def test_other_writers_join_at_a_refresh() -> None:
    store = new_store()
    data = {"obs": np.full((4, 2), 9, np.float32), "reward": np.zeros(4, np.float32)}
    with store.writer("other") as other:
        other.append_episode(data, terminated=True)
    store.refresh()
    writer = store.writer("own", commit_seconds=None, buffer_bytes="1MB")
    reader, model = Reader(store, writer=writer, cache_bytes="32MB"), Model(writer)
    model.append(0)
    assert reader.n_windows(Windows()) == 5
    with store.writer("another") as other:
        other.append_episode(data, terminated=True)
    model.append(0, "terminated")
    assert reader.n_windows(Windows()) == 6
    writer.commit()
    reader.refresh()
    assert reader.n_windows(Windows()) == 10
    batch = reader.sample(500, Windows())
    own = reader.streams.index(writer.stream)
    mine = batch["index"][:, 0] == own
    assert mine.any()
    assert torch.equal(batch["obs"][mine, 0], batch["index"][mine, 1:].float())
    assert (batch["obs"][~mine] == 9).all()
    writer.close()


def test_a_refresh_does_not_take_back_steps_that_were_seen() -> None:
    store = new_store()
    writer = store.writer("own", commit_seconds=None, buffer_bytes="1MB")
    reader, model = Reader(store, writer=writer, cache_bytes="32MB"), Model(writer)
    for _ in range(3):
        model.append(0)
        model.append(1)
        model.check(reader)
    model.append(0)
    model.check(reader)
    reader.refresh()
    model.check(reader)
    writer.commit()
    reader.refresh()
    model.check(reader)
    writer.close()


def test_a_queued_batch_survives_its_steps_moving_into_the_stream() -> None:
    store = new_store()
    writer = store.writer(commit_seconds=None, buffer_bytes="1MB")
    reader, model = Reader(store, writer=writer, cache_bytes="32MB"), Model(writer)
    for i in range(300):
        model.append(i % 2)
    with reader.batches(64, Windows(), prefetch=3) as batches, reader.assembler.lock:
        batches._fill()  # planned; the thread behind waits for the lock
        writer.commit()
        reader.assembler.publish()
        for i in range(300):  # live rows are used again
            model.append(2 + i % 2)
        reader.assembler.publish()
    with reader.batches(64, Windows(), prefetch=3) as batches:
        for _ in range(4):
            batch = next(batches)
            assert torch.equal(batch["obs"][:, 0], batch["index"][:, 1:].float())
    writer.close()


def test_a_writer_that_has_appended_can_not_be_followed() -> None:
    store = new_store()
    began = store.writer()
    began.append(step(0, 0))
    with pytest.raises(ValueError, match="has a listener already, or steps were appended before it"):
        Reader(store, writer=began)
    began.close()


@pytest.mark.usefixtures("lock_order")
@pytest.mark.slow
def test_a_thread_samples_a_million_windows_while_another_appends() -> None:
    store = new_store(chunk_rows=256)
    writer = store.writer(commit_seconds=0.02, buffer_bytes="2MB")
    reader = Reader(store, writer=writer, cache_bytes="64MB")
    is_over = threading.Event()
    failures: list[BaseException] = []

    def collect() -> None:
        t = np.zeros(8, np.int64)
        episode = np.arange(8)
        n_begun = 8
        try:
            while not is_over.is_set():
                block = np.stack([episode, t], 1).astype(np.float32)
                ending = (t > 40) & (episode % 7 == t % 7)
                flags = {"terminated": ending} if ending.any() else {}
                writer.append({"obs": block, "reward": t.astype(np.float32)}, envs=range(8), **flags)
                time.sleep(0.0005)  # environments take time, too; else it would hardly ever let go of the GIL
                t += 1
                for env in np.flatnonzero(ending):
                    t[env], episode[env], n_begun = 0, n_begun, n_begun + 1
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=collect)
    thread.start()
    try:
        spec, n = Windows(length=4), 0
        while n < 1_000_000:
            try:
                batch = reader.sample(4000, spec)
            except trajstore.DataError:
                continue  # nothing is long enough yet
            n += 4000
            steps = batch["index"][:, 2:] + torch.arange(4)
            assert torch.equal(batch["obs"][..., 1], steps.float())
            assert (batch["obs"][..., 0] == batch["obs"][:, :1, 0]).all()
            assert torch.equal(batch["reward"], steps.float())
    finally:
        is_over.set()
        thread.join()
        writer.close()
    assert not failures


def test_an_amended_step_stays_amended_once_it_is_committed() -> None:
    store = new_store()
    writer = store.writer(commit_seconds=None, buffer_bytes="1MB")
    reader, model = Reader(store, writer=writer, cache_bytes="32MB"), Model(writer)
    model.append(0)
    model.append(0)
    model.check(reader)
    writer.amend({"reward": 99.0}, t=1)
    writer.commit()
    batch = reader.sample(100, Windows())
    assert set(batch["reward"].flatten().tolist()) == {0.0, 99.0}
    writer.close()


def test_an_amendment_of_a_step_that_was_not_looked_at_hits_no_other() -> None:
    store = new_store()
    writer = store.writer(commit_seconds=None, buffer_bytes="1MB")
    reader, model = Reader(store, writer=writer, cache_bytes="32MB"), Model(writer)
    for env in (0, 1):
        for _ in range(64):
            model.append(env)
    model.check(reader)
    for _ in range(70):
        model.append(0)
    for t in range(64, 128):
        writer.amend({"reward": -7.0}, env=0, t=t)
    live = reader.assembler.live
    assert live is not None
    for change in live.episodes.take(None):  # as if another thread was appending at this moment
        live._apply(change)
    batch = reader.sample(2000, Windows())
    rewards, index = batch["reward"][:, 0], batch["index"]
    is_amended = (index[:, 1] == 0) & (index[:, 2] >= 64) & (index[:, 2] < 128)
    assert torch.equal(rewards, torch.where(is_amended, -7.0, index[:, 2].float()))
    writer.close()


def test_steps_that_were_discarded_are_drawn_no_more() -> None:
    store = new_store()
    writer = store.writer(commit_seconds=None, buffer_bytes="1MB")
    reader, model = Reader(store, writer=writer, cache_bytes="32MB"), Model(writer)
    for _ in range(5):
        model.append(0)
        model.append(1, "terminated")
    writer.commit()
    for _ in range(5):
        model.append(0)
    assert reader.n_windows(Windows()) == 15
    writer.discard()
    assert reader.n_windows(Windows()) == 10
    batch = reader.sample(200, Windows())
    assert torch.equal(batch["obs"][:, 0], batch["index"][:, 1:].float())
    fresh = Reader(store.refresh())
    assert fresh.n_windows(Windows()) == 10


def test_wide_rows_get_few_spare_live_rows() -> None:
    schema = Schema({"image": Field("uint8", (128, 128, 3))})
    store = trajstore.create("memory://live-wide", schema)
    writer = store.writer(commit_seconds=None, buffer_bytes="1MB")
    reader = Reader(store, writer=writer, cache_bytes="256MB")
    writer.append({"image": np.full((128, 128, 3), 7, np.uint8)})
    assert (reader.sample(2, Windows())["image"] == 7).all()
    writer.close()


def evicted(store: Store, reader: Reader, row: int) -> Any:
    from tests.sampling.test_episode_index import Evicted

    snapshot: Any = Evicted(store.snapshot, {reader.streams[0]: row})
    snapshot.schema, snapshot.readers, snapshot.storage = (
        store.schema,
        store.snapshot.readers,
        store.snapshot.storage,
    )
    return snapshot


def store_of_episodes() -> tuple[Store, Reader]:
    store = new_store()
    with store.writer(commit_seconds=None) as writer:
        model = Model(writer)
        for _ in range(10):
            for t in range(8):
                model.append(0, "terminated" if t == 7 else "")
    reader = Reader(store.refresh())
    for _ in reader.epoch(16, Windows()):
        pass
    return store, reader


@pytest.mark.parametrize("prefetch", [0, 2])
def test_windows_that_were_evicted_before_their_turn_are_drawn_anew(prefetch: int) -> None:
    store, reader = store_of_episodes()
    batches = reader.batches(64, Windows(length=2), prefetch=prefetch)
    batches._fill()
    planned = batches._queue[0].windows.clone()
    reader.assembler.follow(evicted(store, reader, 40))
    batch = next(batches)
    kept = planned[:, 1] >= 5
    assert kept.any()
    assert torch.equal(batch["index"][kept], planned[kept])  # the others stay where they are
    assert (batch["index"][:, 1] >= 5).all()
    assert torch.equal(batch["obs"][:, 0], batch["index"][:, 1:].float())
    batches.close()


def test_batches_of_an_epoch_planned_before_an_eviction_leave_out_what_is_gone() -> None:
    store, reader = store_of_episodes()
    batches = reader.epoch(64, Windows(), shuffle=False)
    batches._fill()
    reader.assembler.follow(evicted(store, reader, 40))
    for size in (24, 16):
        batch = next(batches)
        assert torch.equal(batch["obs"][:, 0], batch["index"][:, 1:].float())
        assert len(batch["index"]) == size
    assert batches.stats()["n_skipped"] == 40


def test_rows_that_were_handed_off_are_not_copied_and_stay_while_they_are_read() -> None:
    staging, inbox = Staging(Schema({"x": Field("int64")}), 4), WriterInbox()
    spans = np.zeros((1, 9), np.int64)

    def hand_off(value: int) -> None:
        staging.clear()
        staging.extend({"x": np.full(4, value)}, np.zeros(4, np.int64), np.zeros(4, np.int64))
        inbox.handed_off(staging)

    hand_off(1)
    ((block, values),) = inbox.take().blocks
    assert values is not None
    assert np.shares_memory(values["x"], staging.columns["x"])
    assert inbox.committed(spans), "the reader may still be copying"
    assert block.values is None
    inbox.end_reading()
    inbox.remove_blocks(1)
    hand_off(2)
    assert not inbox.committed(spans)
    assert inbox.take().blocks[0][1] is None, "durable rows are read from the stream"
    hand_off(3)
    assert not inbox.committed(spans), "nothing of it was taken"
