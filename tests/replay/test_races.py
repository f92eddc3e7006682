"""What several threads do to one buffer, at the worst moment."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

import trajstore
from tests.support.lock_order import LockOrder, TracedLock
from trajstore import (
    ClosedError,
    EpisodeKey,
    Field,
    Hindsight,
    NotReadyError,
    Priorities,
    ReplayBuffer,
    Retention,
    Ring,
    Schema,
    Windows,
)
from trajstore.writing.stream_appender import remove_stream

SCHEMA = Schema({"obs": Field("float32", (2,), chunk_rows=16)})
ONE = Windows()

pytestmark = pytest.mark.usefixtures("lock_order")


@pytest.fixture
def url(tmp_path_factory: Any) -> str:
    return f"memory://{tmp_path_factory.mktemp('race').name}"


def new_buffer(url: str, **options: Any) -> ReplayBuffer:
    small = {"commit_seconds": None, "buffer_bytes": "64KB", "cache_bytes": "8MB", "grace_s": 0.0}
    return ReplayBuffer(url, **({"schema": SCHEMA} | small | options))


def add(buffer: ReplayBuffer, env: int, first: int, stop: int, every: int | None = None) -> None:
    """Steps that say whose they are; an episode ends after ``every`` of them."""
    for t in range(first, stop):
        is_last = every is not None and (t + 1) % every == 0
        buffer.append({"obs": np.array([env, t], np.float32)}, env=env, truncated=is_last)


def aside(act: Callable[[], Any]) -> Any:
    """Do something on another thread, to its end."""
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(act).result(60)


@contextlib.contextmanager
def beside_a_slow_disk(url: str) -> Iterator[ReplayBuffer]:
    """Three episodes, one of them seen, while another thread is in the middle of a commit, for a while."""
    inside, go = threading.Event(), threading.Event()
    with new_buffer(url, priorities=Priorities()) as buffer:
        add(buffer, 0, 0, 4, every=4)
        assert buffer.n_steps == 4
        add(buffer, 0, 4, 12, every=4)
        hand_off = buffer.session.writer._pipeline.hand_off

        def slow(*args: Any, **options: Any) -> int:
            inside.set()
            go.wait(60)
            return hand_off(*args, **options)

        buffer.session.writer._pipeline.hand_off = slow  # type: ignore[method-assign]
        thread, later = threading.Thread(target=buffer.session.writer.commit), threading.Timer(0.3, go.set)
        thread.start()
        inside.wait(60)
        later.start()
        yield buffer
        thread.join(60)


# ---- batches that were planned ahead


@pytest.mark.parametrize("how", ["abort", "evict"])
@pytest.mark.parametrize("prefetch", [0, 3])
def test_an_epoch_leaves_out_what_went_after_it_was_planned(url: str, how: str, prefetch: int) -> None:
    """Live rows that were given back belong to others by then."""
    with new_buffer(url) as buffer:
        add(buffer, 5, 0, 6, every=6)
        add(buffer, 7, 0, 20)
        with buffer.epoch(4, ONE, shuffle=False, prefetch=prefetch) as epoch:
            with buffer.reader.assembler.lock:  # the thread behind comes late
                epoch._fill()
                if how == "abort":
                    buffer.abort_episode(7)
                else:
                    buffer.evict(keys=[EpisodeKey(buffer.stream, 1)])
                    buffer.flush()
                assert buffer.n_steps == 6
                add(buffer, 9, 100, 120)
                assert buffer.n_steps == 26
            found = [step for batch in epoch for step in batch["obs"][:, 0].tolist()]
            assert found == [[5, t] for t in range(6)]
            assert epoch.stats()["n_skipped"] == 20


def test_batches_at_random_are_drawn_anew_when_a_stream_is_removed(url: str) -> None:
    with trajstore.create(url, SCHEMA).writer("old") as writer:
        obs = np.stack([np.full(40, 5), np.arange(40)], 1).astype(np.float32)
        writer.append_episode({"obs": obs}, terminated=True)
    with new_buffer(url) as buffer:
        add(buffer, 7, 0, 40)
        with buffer.batches(8, ONE, prefetch=3) as batches:
            with buffer.reader.assembler.lock:
                batches._fill()
                remove_stream(buffer.session.storage, writer.stream)
                buffer.flush()
                buffer.refresh()
                assert buffer.n_steps == 40
            for _ in range(6):
                batch = next(batches)
                assert (batch["obs"][:, 0, 0] == 7).all()
                assert torch.equal(batch["obs"][:, 0, 1], batch["index"][:, 2].float())


@pytest.mark.parametrize("cause", ["checkpoint", "eviction"])
def test_memory_of_a_ring_that_is_in_use_is_not_written(url: str, cause: str) -> None:
    """However often a batch is made anew, it has one place in the ring."""
    with new_buffer(url) as buffer:
        add(buffer, 0, 0, 200, every=10)
        with buffer.batches(4, ONE, prefetch=2, out=Ring(4)) as batches:
            for k in range(8):
                batch = next(batches)
                kept = {key: batch[key].clone() for key in ("obs", "index")}
                for item in list(batches._queue):
                    item.work.result()  # type: ignore[union-attr]
                if cause == "checkpoint":
                    buffer.save_checkpoint(f"c{k}", wait=True)
                else:
                    buffer.evict(1)
                for item in list(batches._queue):
                    item.work.result()  # type: ignore[union-attr]
                assert all(torch.equal(batch[key], kept[key]) for key in kept)
                assert torch.equal(batch["obs"][:, 0, 1], batch["index"][:, 2] + 10.0 * batch["index"][:, 1])


@pytest.mark.parametrize("prefetch", [0, 1, 3])
@pytest.mark.parametrize("is_running", [False, True])
def test_loading_a_state_does_not_write_into_a_batch_of_the_ring_that_is_in_use(
    url: str, prefetch: int, is_running: bool
) -> None:
    with new_buffer(url) as buffer:
        add(buffer, 0, 0, 200, every=10)
        with buffer.batches(4, ONE, prefetch=prefetch, out=Ring(prefetch + 2)) as batches:
            for _ in range(5):
                state = batches.state_dict()
                expected = [next(batches)["index"].clone() for _ in range(2)]
                batches.load_state_dict(state)
                assert [next(batches)["index"].tolist() for _ in range(2)] == [e.tolist() for e in expected]
                batches.load_state_dict(state)
                batch = next(batches)
                kept = {key: batch[key].clone() for key in ("obs", "index")}
                if not is_running:
                    wait_for_prefetch(batches)
                for _ in range(3):
                    batches.load_state_dict(batches.state_dict())
                wait_for_prefetch(batches)
                assert all(torch.equal(batch[key], kept[key]) for key in kept)
                later = next(batches)
                wait_for_prefetch(batches)
                assert all(torch.equal(batch[key], kept[key]) for key in kept)
                assert torch.equal(later["obs"][:, 0, 1], later["index"][:, 2] + 10.0 * later["index"][:, 1])


def test_a_batch_of_an_epoch_that_was_evicted_whole_does_not_cost_the_one_in_use(url: str) -> None:
    with new_buffer(url) as buffer:
        add(buffer, 0, 0, 80, every=4)
        with buffer.epoch(4, ONE, shuffle=False, prefetch=1, out=Ring(3)) as epoch:
            with buffer.reader.assembler.lock:  # the thread behind comes late
                epoch._fill()
                buffer.evict(keys=[EpisodeKey(buffer.stream, 1)])
            batch = next(epoch)
            kept = batch["obs"].clone()
            assert next(epoch)["index"][:, 1].tolist() == [2] * 4
            wait_for_prefetch(epoch)
            assert torch.equal(batch["obs"], kept)


def wait_for_prefetch(batches: Any) -> None:
    for item in list(batches._queue):
        if isinstance(item.work, Future):
            item.work.result()


def test_an_iterator_over_nothing_goes_on_with_the_same_batch_once_there_is_something(url: str) -> None:
    admitted: list[int] = []
    with new_buffer(url) as buffer:
        add(buffer, 0, 0, 20)
        with buffer.reader.batches(4, ONE, prefetch=1, admit=admitted.append) as batches:
            next(batches)
            buffer.clear()
            for _ in range(2):
                with pytest.raises(NotReadyError):
                    next(batches)
            buffer.save_checkpoint("empty", wait=True)
            add(buffer, 0, 20, 30)
            for _ in range(3):
                assert (next(batches)["obs"][:, 0, 1] >= 20).all()
            assert admitted == [4] * 4


@pytest.mark.parametrize("prefetch", [0, 2])
def test_one_iterator_serves_several_threads(url: str, prefetch: int) -> None:
    with new_buffer(url) as buffer:
        add(buffer, 0, 0, 400)
        with buffer.batches(4, ONE, prefetch=prefetch) as alone:
            expected = sorted(str(next(alone)["index"].tolist()) for _ in range(60))
        buffer.session.reader.rng.counter -= 1  # the next one is the same again
        with buffer.batches(4, ONE, prefetch=prefetch) as batches, ThreadPoolExecutor(3) as threads:
            found = threads.map(lambda _: str(next(batches)["index"].tolist()), range(60))
            assert sorted(found) == expected
            assert batches


def test_what_a_window_crosses_into_may_go_before_it_is_read(url: str) -> None:
    with new_buffer(url) as buffer:
        add(buffer, 1, 0, 8, every=8)
        add(buffer, 1, 8, 16)
        with buffer.batches(2, Windows(length=4, boundary="cross"), prefetch=10) as batches:
            with buffer.reader.assembler.lock:
                batches._fill()
                buffer.abort_episode(1)
                assert buffer.n_steps == 8
                add(buffer, 9, 100, 140)
                assert buffer.n_steps == 48
            for _ in range(11):
                obs = next(batches)["obs"]
                assert torch.equal(obs[..., 0], obs[:, :1, 0].expand(2, 4))


def test_a_goal_may_go_before_it_is_read(url: str) -> None:
    schema = Schema({"goal": Field("float32", (2,)), "obs": Field("float32", (2,))})
    with new_buffer(url, schema=schema) as buffer:
        for env in (0, 1):
            for t in range(20):
                value = np.array([env, t], np.float32)
                buffer.append({"goal": value, "obs": value}, env=env)
        relabel = Hindsight(goal="goal", achieved="obs", strategy="random", fraction=1.0)
        with buffer.batches(1, ONE, prefetch=20, relabel=relabel) as batches:
            with buffer.reader.assembler.lock:
                batches._fill()
                buffer.abort_episode(1)
                assert buffer.n_steps == 20
                for t in range(100, 140):
                    value = np.array([9, t], np.float32)
                    buffer.append({"goal": value, "obs": value}, env=5)
                assert buffer.n_steps == 60
            batches._is_evicted = lambda queued: False  # type: ignore[method-assign]  # that was before
            for _ in range(21):
                batch = next(batches)
                of, t = batch["hindsight"]["goal_index"][:, 1:].T
                expected = torch.stack([torch.where(of == 0, 0, 9), torch.where(of == 0, t, t + 100)], 1)
                assert torch.equal(batch["goal"][:, 0], expected.float())


def test_iterators_of_several_threads_are_all_known(url: str) -> None:
    with new_buffer(url) as buffer:
        add(buffer, 0, 0, 50)
        with ThreadPoolExecutor(8) as threads:
            made = list(threads.map(lambda _: buffer.batches(2, ONE), range(40)))
        assert len({batches._draws._rng.seed for batches in made}) == 40  # type: ignore[union-attr]
        assert len(buffer.session.drawing._iterators) == 40
        made[0].close()
        assert len(buffer.session.state()["iterators"]) == 39
        for batches in made:
            batches.close()


def test_a_checkpoint_is_taken_while_iterators_come_and_go(url: str) -> None:
    with new_buffer(url) as buffer:
        add(buffer, 0, 0, 50)
        is_over = threading.Event()

        def iterate() -> None:
            while not is_over.is_set():
                with buffer.batches(2, ONE, prefetch=2) as batches:
                    next(batches)

        with ThreadPoolExecutor(2) as threads:
            work = [threads.submit(iterate) for _ in range(2)]
            for k in range(20):
                buffer.save_checkpoint(f"c{k}", wait=True, keep_last=2)
            is_over.set()
            assert [w.result(60) for w in work] == [None, None]


# ---- what is kept for steps


def test_a_refresh_takes_no_steps_away_from_those_who_look_before_the_next_batch(url: str) -> None:
    with new_buffer(url, priorities=Priorities(alpha=1.0, eps=0.0)) as buffer:
        buffer.add_column("note", Field("float32"), fill=-1)
        for t in range(60):
            add(buffer, 0, t, t + 1)
            assert buffer.n_steps == t + 1
        every = torch.tensor([[0, 0, t] for t in range(60)])
        buffer.write_column("note", every, torch.arange(60.0))
        buffer.update_priorities(every, torch.arange(60.0) + 1)
        buffer.refresh()
        assert buffer.reader.column("note").tolist() == list(range(60))
        buffer.reader.priority_stats(ONE)
        assert buffer.at(every, ONE)["note"].flatten().tolist() == list(range(60))
        batch = buffer.sample(500)
        expected = (batch["index"][:, 2] + 1) / (60 * 61 / 2)
        assert torch.allclose(batch["priority"]["probability"].float(), expected.float(), rtol=1e-3)


@pytest.mark.parametrize("how", ["abort", "evict"])
def test_forgetting_an_episode_that_has_moved_leaves_others_as_they_are(url: str, how: str) -> None:
    with new_buffer(url, priorities=Priorities(alpha=1.0, eps=0.0)) as buffer:
        buffer.add_column("note", Field("float32"), fill=-1)
        rare = Windows(length=3)  # whose tree is seldom brought up to date
        for t in range(10):
            add(buffer, 0, t, t + 1)
            buffer.sample(1)
        buffer.sample(4, rare)
        obs = np.stack([np.ones(20), np.arange(20)], 1).astype(np.float32)
        buffer.add_episode({"obs": obs}, terminated=True, env=1)
        every = torch.tensor([[0, 1, t] for t in range(20)])
        buffer.write_column("note", every, torch.arange(20.0))
        buffer.update_priorities(every, torch.full((20,), 7.0))
        buffer.evict(keys=[EpisodeKey(buffer.stream, 0)])
        for t in range(10, 25):  # it outgrows its room, and moves behind the other
            add(buffer, 0, t, t + 1)
            buffer.sample(1)
        buffer.abort_episode(0) if how == "abort" else buffer.evict(keys=[EpisodeKey(buffer.stream, 0)])
        buffer.sample(4, rare)
        assert buffer.at(every, ONE)["note"].flatten().tolist() == list(range(20))
        buffer.set_priorities(alpha=0.9)  # masses are made anew
        assert set(buffer.sample(4000)["index"][:, 2].tolist()) == set(range(20))


def test_columns_are_flushed_again_and_again_and_what_is_not_here_stays_stored(url: str) -> None:
    schema = Schema({"obs": Field("float32", (2,), final=True), "action": Field("int64")})
    with new_buffer(url, schema=schema) as buffer:
        buffer.add_column("note", Field("float32"), fill=-1)
        keys = []
        for k, n in enumerate((30, 20)):
            steps = {"obs": np.zeros((n + 1, 2), np.float32), "action": np.zeros(n, np.int64)}
            keys.append(buffer.add_episode(steps, terminated=True))
            buffer.write_all("note", np.full(buffer.n_steps, k, np.float32))
            buffer.flush()
        buffer.evict(keys=[keys[1]])
        for value in (5.0, 6.0):
            buffer.write_all("note", np.full(30, value, np.float32))
            buffer.flush()
        _, stored = trajstore.open(url).snapshot.column("note")[buffer.stream]
        assert stored[:30].tolist() == [6.0] * 30
        assert stored[31:51].tolist() == [1.0] * 20


@pytest.mark.parametrize("act", ["clear", "evict"])
def test_arrivals_that_went_otherwise_are_forgotten(url: str, act: str) -> None:
    limit = Retention(steps=100_000) if act == "clear" else Retention(episodes=5)
    with new_buffer(url, capacity=limit, buffer_bytes="4MB", cache_bytes="64MB") as buffer:
        sizes = []
        for _ in range(30):
            block = np.zeros((2, 1000, 2), np.float32)
            buffer.extend({"obs": block}, envs=range(1000), terminated=np.ones((2, 1000), bool))
            assert buffer.n_steps
            if act == "clear":
                buffer.clear()
            sizes.append(sum(map(len, buffer.session.evictor._queues.values())))
        assert max(sizes) < 12_000


# ---- whoever needs all that was appended


def test_what_was_appended_is_found_while_another_thread_waits_for_the_disk(url: str) -> None:
    with beside_a_slow_disk(url) as buffer:
        assert buffer.at(torch.tensor([[0, 2, 3]]), ONE)["obs"].flatten().tolist() == [0, 11]


@pytest.mark.parametrize(
    ("act", "expected"),
    [
        (lambda buffer: buffer.clear(), 12),
        (lambda buffer: buffer.evict(2), 8),
        (lambda buffer: buffer.update_priorities(torch.tensor([[0, 2, 3]]), torch.ones(1)), 0),
    ],
    ids=["clear", "evict", "update_priorities"],
)
def test_what_was_appended_counts_while_another_thread_waits_for_the_disk(
    url: str, act: Callable[[ReplayBuffer], int], expected: int
) -> None:
    with beside_a_slow_disk(url) as buffer:
        assert act(buffer) == expected


# ---- checkpoints and closing


def test_rows_are_held_from_the_cut_on(url: str) -> None:
    """Others evict between the cut and the moment at which the checkpoint is on its way."""
    with new_buffer(url, capacity=200) as buffer:
        add(buffer, 0, 0, 400, every=50)
        buffer.sample(4)
        take = buffer.session.schedule._capture

        def overtaken(*args: Any) -> Any:
            taken = take(*args)

            def evict() -> None:
                add(buffer, 0, 400, 1000, every=50)
                buffer.session.writer.commit()
                buffer.sample(4)
                buffer.session.collector.publish()

            aside(evict)
            return taken

        buffer.session.schedule._capture = overtaken
        buffer.save_checkpoint("a", wait=True)
        assert [c.name for c in buffer.checkpoints] == ["a"]


def test_two_threads_save_one_after_the_other(url: str) -> None:
    with new_buffer(url, capacity=200) as buffer:
        add(buffer, 0, 0, 400, every=50)
        both, before = threading.Barrier(2), buffer.session.schedule._failure_of_previous
        waited: list[int] = []

        def at_once() -> Any:
            found = before()
            waited.append(1)
            if len(waited) <= 2:
                both.wait(120)
            return found

        buffer.session.schedule._failure_of_previous = at_once  # type: ignore[method-assign]
        on_the_way: list[int] = []
        run = buffer.session.schedule._called._save

        def alone(id_: str, taken: Any) -> None:
            on_the_way.append(buffer.session.schedule._called._current is taken)
            run(id_, taken)

        buffer.session.schedule._called._save = alone  # type: ignore[method-assign]
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(buffer.save_checkpoint, ["a", "b"]))
        buffer.session.schedule.wait()
        assert on_the_way == [True, True]
        assert sorted(c.name for c in buffer.checkpoints) == ["a", "b"]


def test_a_buffer_may_be_closed_by_several_threads(url: str) -> None:
    for k in range(10):
        buffer = new_buffer(f"{url}-{k}", capacity=20)
        add(buffer, 0, 0, 100)
        assert buffer.n_steps <= 20
        with ThreadPoolExecutor(4) as threads:
            assert list(threads.map(lambda _: buffer.close(), range(4))) == [None] * 4  # noqa: B023


@pytest.mark.parametrize("cause", ["the last commit", "the seal", "an interrupt"])
def test_a_buffer_that_could_not_be_closed_is_closed_by_the_next_call(
    url: str, cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = new_buffer(url)
    add(buffer, 0, 0, 5)
    pipeline, error = buffer.session.writer._pipeline, OSError("the disk is full")
    broken = {"the last commit": "wait", "the seal": "seal", "an interrupt": "make_room"}[cause]

    def fail(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt if cause == "an interrupt" else error

    def close_badly() -> None:
        commit = buffer.session.writer.commit
        patch.setattr(buffer.session.writer, "commit", lambda: (commit(), patch.setattr(pipeline, broken, fail)))
        buffer.close()

    with monkeypatch.context() as patch:
        if cause == "an interrupt":
            patch.setattr(pipeline, broken, fail)
            with pytest.raises(KeyboardInterrupt):
                add(buffer, 0, 5, 6, every=6)  # a step that ends an episode is checked in full
        else:
            with pytest.raises(OSError, match="full"):
                close_badly()
            assert not buffer.reader.sample(16, ONE)["is_last"].any()
    buffer.close()
    assert buffer.session.is_closed
    table = trajstore.open(url).snapshot.episodes
    assert table["end"].tolist() == ([] if cause == "an interrupt" else ["cut"])


@pytest.mark.parametrize("how", ["close", "release"])
@pytest.mark.parametrize(
    "draw", ["sample", "at", "batches", "prefetch", "epoch", "in order", "episodes", "refresh"]
)
def test_batches_drawn_beside_a_close_do_not_show_open_episodes_as_ended(url: str, how: str, draw: str) -> None:
    """Closing ends open episodes as cut on disk; for a batch, such an episode has not ended."""
    buffer = new_buffer(url)
    add(buffer, 0, 0, 9, every=3)
    add(buffer, 7, 0, 3)
    given = buffer.sample(64)["index"]
    batches, ahead = buffer.batches(64, ONE), buffer.batches(64, ONE, prefetch=1)
    first, epoch = next(ahead), buffer.epoch(4, ONE, shuffle=False)
    refresh = buffer.session.follow_others
    draws: dict[str, Callable[[], list[Any]]] = {
        "sample": lambda: [buffer.reader.sample(64, ONE)],
        "at": lambda: [buffer.reader.at(given, ONE)],
        "batches": lambda: [next(batches)],
        "prefetch": lambda: [next(ahead), next(ahead)],
        "epoch": lambda: list(epoch),
        "in order": lambda: list(buffer.reader.read_all_in_order()),
        "episodes": lambda: [buffer.reader.sample_episodes(16)],
        "refresh": lambda: [refresh(), buffer.reader.sample(64, ONE)][1:],  # type: ignore[func-returns-value]
    }
    found: list[Any] = [first]
    stop = buffer.session.writer._pipeline.stop

    def stop_after_a_draw() -> None:
        found.extend(aside(draws[draw]))  # the commit thread has done all its work
        stop()

    buffer.session.writer._pipeline.stop = stop_after_a_draw  # type: ignore[method-assign]
    buffer.close() if how == "close" else buffer._release()
    assert len(found) > 1
    for batch in found:
        env, t = batch["obs"][..., 0], batch["obs"][..., 1]
        is_end = (env == 0) & (t % 3 == 2) & batch.get("valid", torch.ones_like(batch["is_last"]))
        assert torch.equal(batch["is_last"], is_end)
        assert torch.equal(batch["truncated"], is_end)
    assert any((batch["obs"][..., 0] == 7).any() for batch in found[1:])
    for iterator in (batches, ahead, epoch):
        iterator.close()


def test_a_checkpoint_that_comes_after_closing_began_says_so(url: str) -> None:
    buffer = new_buffer(url)
    add(buffer, 0, 0, 10)
    take = buffer.session.schedule._capture

    def closed_meanwhile(*args: Any) -> Any:
        taken = take(*args)
        aside(buffer.session.schedule._called.close)
        return taken

    buffer.session.schedule._capture = closed_meanwhile
    with pytest.raises(ClosedError, match="closed before its checkpoint was begun"):
        buffer.save_checkpoint("a")
    buffer.close()


# ---- the order of locks


def test_a_lock_that_is_taken_against_the_order_is_noticed() -> None:
    for names in (("WriterLifecycle.lock", "BatchAssembler.lock"), ("Storage._lock", "Storage._lock")):
        order = LockOrder()
        outer, inner = (TracedLock(threading.Lock(), name, order) for name in names)
        with inner:
            assert inner.acquire(blocking=False) is False  # who does not wait can't be stuck
        order.check()
        with outer, inner:
            pass
        with pytest.raises(AssertionError, match=f"against LOCK_ORDER: .*{names[0]}.*{names[1]}"):
            order.check()


def test_a_lock_without_a_place_in_the_order_is_noticed() -> None:
    order = LockOrder()
    with (
        TracedLock(threading.RLock(), "BatchAssembler.lock", order),
        TracedLock(threading.RLock(), "New.lock", order),
    ):
        pass
    with pytest.raises(AssertionError, match=r"give \['New.lock'\] a place"):
        order.check()


def test_a_commit_that_is_waited_for_with_a_lock_that_it_needs_is_noticed() -> None:
    order = LockOrder()
    lock = TracedLock(threading.Lock(), "WriterLifecycle.lock", order)
    condition = threading.Condition(TracedLock(threading.RLock(), "CommitThread._condition", order))  # type: ignore[arg-type]
    with lock, condition:
        condition.wait(0.001)
    order.check()

    def take() -> None:
        with lock:
            pass

    thread = threading.Thread(target=take, name="trajstore-commit")
    thread.start()
    thread.join()
    with pytest.raises(AssertionError, match=r"wanted by the one that commits: \['WriterLifecycle.lock'\]"):
        order.check()


def test_locks_of_a_buffer_are_traced(url: str, lock_order: LockOrder) -> None:
    with new_buffer(url, capacity=50) as buffer:
        add(buffer, 0, 0, 100, every=10)
        buffer.sample(4, ONE)
        buffer.save_checkpoint("a", wait=True)
    expected = [
        ("CheckpointSchedule._lock", "BatchAssembler.lock"),
        ("BatchAssembler.lock", "WriterLifecycle.lock"),
    ]
    assert lock_order.nested >= {*expected, ("WriterLifecycle.lock", "WriterInbox.lock")}
