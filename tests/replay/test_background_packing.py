"""A buffer with `pack` packs finished streams in the background, and nothing else changes."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trajstore
from tests.support.faulty import Call, Died, FaultyStorage, Plan, broken, real_storage, through
from tests.support.rank_threads import Open, teams
from trajstore import CorruptionError, ReplayBuffer, Retention, StorageError, Windows
from trajstore.errors import ConflictError
from trajstore.format.commit_record import CommitRecord
from trajstore.replay import background_packing
from trajstore.replay.background_packing import is_packed_by
from trajstore.store.packed_arrays import PackSettings
from trajstore.store.packing import Packing, pack
from trajstore.store.snapshot import Snapshot
from trajstore.store.verify import verify


def new_buffer(url: str, **options: Any) -> ReplayBuffer:
    schema = {
        "action": trajstore.Field("int64", chunk_rows=8),
        "reward": trajstore.Field("float32", chunk_rows=16),
    }
    trajstore.create(url, schema, exist_ok=True, fsync=False)
    defaults = {"sample": Windows(2), "exist": "join", "seed": 5, "grace_s": 0.0, "fsync": False}
    return ReplayBuffer(url, **defaults | options)


def fill(buffer: ReplayBuffer, *numbers: int, n: int = 40) -> None:
    for i in numbers:
        steps = {"action": np.arange(n) + 1000 * i, "reward": np.full(n, float(i), np.float32)}
        buffer.add_episode(steps, terminated=True, metadata={"number": i})
        buffer.flush()


def earlier_session(url: str, *numbers: int) -> str:
    with new_buffer(url) as buffer:
        fill(buffer, *(numbers or range(5)))
    return buffer.stream


def numbers(url: str, **options: Any) -> list[int]:
    return [row["metadata"]["number"] for row in trajstore.open(url, **options).episodes]


def batches(buffer: ReplayBuffer, n: int = 3) -> list[Any]:
    return [buffer.sample(16)["action"].tolist() for _ in range(n)]


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def wait_packed(buffer: ReplayBuffer, n: int = 1) -> None:
    wait_until(lambda: buffer.stats()["packing"]["n_streams"] >= n)


def stored(url: str) -> dict[str, bool]:
    """By id of every stored stream: whether it is packed."""
    return {record.id: record.replaces is not None for record in trajstore.open(url).snapshot.stored}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_packing, "_SHARE", 1.0)
    monkeypatch.setattr(background_packing, "_LOOK_S", 0.02)


@pytest.fixture
def url(tmp_path: Path) -> str:
    return str(tmp_path / "store")


@pytest.fixture
def team(tmp_path: Path) -> Iterator[Open]:
    with teams(tmp_path) as opened:
        yield opened


# ---- what is packed -----------------------------------------------------------------------------


def test_streams_of_earlier_sessions_are_packed_and_the_draws_stay_the_same(url: str) -> None:
    old = [earlier_session(url), earlier_session(url, 7, 8, 9)]
    twin_url = f"{url}-twin"
    trajstore.copy(url, twin_url, fsync=False)
    buffer, twin = new_buffer(url, pack=True, cache_bytes="2KiB"), new_buffer(twin_url, cache_bytes="2KiB")
    for one in (buffer, twin):
        fill(one, 10, 11)
    assert batches(buffer) == batches(twin)
    wait_packed(buffer, 2)
    wait_until(lambda: not set(old) & set(stored(url)))  # the originals are removed, too
    assert batches(buffer, 6) == batches(twin, 6)
    packing = buffer.stats()["packing"]
    assert packing["n_streams"] == 2
    assert packing["n_objects"] > 2 * packing["n_packed_objects"]
    assert packing["n_packed_bytes"] > 0
    assert "packing" not in twin.stats()
    buffer.close()
    twin.close()
    assert sorted(stored(url).values()) == [False, True, True]
    assert numbers(url) == numbers(twin_url)
    assert verify(url).is_clean


def test_a_resumed_session_packs_the_stream_of_the_one_that_died(url: str) -> None:
    first = new_buffer(url, pack=True)
    fill(first, 0, 1, 2)
    first.save_checkpoint("one", wait=True)
    expected = batches(first)
    first._release()
    second = ReplayBuffer.resume(url, "one", fsync=False)
    assert second.options.pack
    assert batches(second, 1) == expected[:1]
    wait_packed(second)
    second.save_checkpoint("two", wait=True)
    assert batches(second, 2) == expected[1:]
    wait_until(lambda: first.stream not in stored(url))
    second.prune_checkpoints(1)
    second.close()
    third = ReplayBuffer.resume(url, "two", fsync=False)
    assert batches(third, 2) == expected[1:]
    third.close()
    assert numbers(url) == numbers(url, at="two") == [0, 1, 2]
    assert verify(url).is_clean


def test_what_an_ended_session_left_is_removed_by_the_next_one(url: str) -> None:
    old = earlier_session(url)
    assert pack(url, fsync=False).packed
    with new_buffer(url, pack=True):
        wait_until(lambda: old not in stored(url))
    assert numbers(url) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("share", ["partition", "whole"])
def test_of_several_ranks_exactly_one_packs_a_stream(team: Open, tmp_path: Path, share: str) -> None:
    url = str(tmp_path / "shared")
    one = team(3, url, pack=True, share=share)
    for _ in range(6):
        one.fill(40)
        for buffer in one.buffers:
            buffer.flush()
    one.close()
    old = set(stored(url))
    assert len(old) == 3
    again = team(3, url, pack=True, share=share, grace_s=0.0)
    for buffer in again.buffers:
        wait_packed(buffer)
    wait_until(lambda: not old & set(stored(url)))
    assert [buffer.stats()["packing"]["n_streams"] for buffer in again.buffers] == [1, 1, 1]
    again.end()
    assert verify(url).is_clean


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("old_rank", [None, 0, 1, 4])
def test_after_a_change_of_the_ranks_every_stream_has_one_rank_that_packs_it(
    size: int, old_rank: int | None
) -> None:
    class Record:
        rank = old_rank

    record: CommitRecord = Record()  # type: ignore[assignment]
    assert sum(is_packed_by(record, rank, size) for rank in range(size)) == 1


def test_the_option_is_a_bool(url: str) -> None:
    with pytest.raises(TypeError, match="pack: expected bool, got 'yes'"):
        ReplayBuffer(url, pack="yes")  # type: ignore[arg-type]


# ---- the end, and failures ----------------------------------------------------------------------


class InPacking(Plan):
    """Fails or dies at a call of the packing thread; counts these calls."""

    def __init__(self, at: int = 0, *, dies: bool = False, is_after: bool = False, action: str = "") -> None:
        self.n = 0
        self.happened = threading.Event()
        self.is_released = (
            False  # what is left of a dead process is given up: it can't write, and does not die again
        )
        self._at, self._dies, self._is_after, self._action = at, dies, is_after, action

    def before(self, call: Call) -> None:
        if self._dies and self.happened.is_set():
            raise broken() if self.is_released else Died(f"at {call}")
        if threading.current_thread().name == "trajstore-pack" and self._action in call.action:
            self.n += 1
            if not self._is_after:
                self._happen(call)

    def after(self, call: Call) -> None:
        if threading.current_thread().name == "trajstore-pack" and self._is_after:
            self._happen(call)

    def _happen(self, call: Call) -> None:
        if self.n == self._at and not self.happened.is_set():
            self.happened.set()
            raise Died(f"at {call}") if self._dies else broken()


def test_closing_stops_the_packing_and_leaves_nothing_of_it(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    old, has_begun = earlier_session(url), threading.Event()

    class SlowFromTheFirstChunk(Plan):
        def before(self, call: Call) -> None:
            if call.action == "put" and "/steps/" in call.key:
                monkeypatch.setattr(background_packing, "_SHARE", 1e-9)
                has_begun.set()

    with through(FaultyStorage(real_storage(url), SlowFromTheFirstChunk())):
        buffer = new_buffer(url, pack=True)
    assert has_begun.wait(60)
    assert len(stored(url)) == 2
    buffer.close()
    assert stored(url) == {old: False}
    assert numbers(url) == [0, 1, 2, 3, 4]
    assert not [thread for thread in threading.enumerate() if thread.name == "trajstore-pack"]


def test_a_failure_is_raised_once_and_packing_is_tried_again(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_packing, "_RETRY_S", 0.02)
    earlier_session(url)
    plan = InPacking(4, action="put")
    with through(FaultyStorage(real_storage(url), plan)):
        buffer = new_buffer(url)  # the schema exists
        buffer.close()
        buffer = new_buffer(url, pack=True)
    assert plan.happened.wait(60)
    with pytest.raises(StorageError, match="Input/output error"):
        wait_until(lambda: bool(buffer.n_steps < 0))
    wait_packed(buffer)
    buffer.close()
    assert verify(url).is_clean


def test_a_damaged_stream_is_named_once_and_left_alone(url: str) -> None:
    damaged, sound = earlier_session(url), earlier_session(url, 6, 7, 8)
    chunk = Path(url) / "streams" / damaged / "steps" / "action" / "c.1"
    chunk.write_bytes(bytes([chunk.read_bytes()[0] ^ 1]) + chunk.read_bytes()[1:])
    buffer = new_buffer(url, pack=True)
    with pytest.raises(CorruptionError, match="action"):
        wait_until(lambda: bool(buffer.n_steps < 0))
    wait_packed(buffer)
    buffer.close()
    is_packed = {record.id: record.location is not None for record in trajstore.open(url).streams}
    assert is_packed == {damaged: False, sound: True}


@pytest.mark.parametrize("is_after", [False, True])
@pytest.mark.parametrize("dies", [False, True])
def test_a_kill_or_a_failure_at_any_call_of_the_packing_thread_takes_nothing(
    tmp_path: Path, dies: bool, is_after: bool
) -> None:
    source = str(tmp_path / "source")
    earlier_session(source, 0, 1, 2)

    def run(plan: InPacking, name: str) -> str:
        url = str(tmp_path / name)
        trajstore.copy(source, url, fsync=False)
        with through(FaultyStorage(real_storage(url), plan)):
            buffer = new_buffer(url, pack=True)
        wait_until(lambda: plan.happened.is_set() or buffer.session.packing.stats()["n_streams"] == 1)  # type: ignore[union-attr]
        try:
            fill(buffer, 9)
        except (StorageError, Died):
            pass
        finally:
            plan.is_released = True
            with contextlib.suppress(Died):  # that of the packing thread, once
                buffer._release()
            buffer._release()
        return url

    counted = InPacking()
    run(counted, "counted")
    assert counted.n > 30
    for at in range(1, counted.n - 5, 5):
        url = run(InPacking(at, dies=dies, is_after=is_after), f"{at}")
        assert numbers(url)[:3] == [0, 1, 2]
        assert verify(url).is_clean
        pack(url, fsync=False, wait=True, grace_s=0)
        assert numbers(url)[:3] == [0, 1, 2]


# ---- beside everything else ---------------------------------------------------------------------


@contextlib.contextmanager
def drawing(buffer: ReplayBuffer) -> Iterator[None]:
    """Two threads draw windows inside the block, all of them whole."""
    stop, failures = threading.Event(), list[BaseException]()

    def draw() -> None:
        try:
            while not stop.is_set():
                windows = buffer.sample(16)["action"]
                assert ((windows[:, 1] - windows[:, 0]) == 1).all()
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=draw) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not failures


def test_appends_draws_evictions_and_checkpoints_beside_the_packing(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background_packing, "_SHARE", 0.2)
    monkeypatch.setattr(background_packing, "SHARD_BYTES", 256)
    old = {earlier_session(url, *range(10 * i, 10 * i + 8)) for i in range(3)}
    buffer = new_buffer(url, pack=True, capacity=Retention(steps=400), cache_bytes="4KiB")
    with drawing(buffer):
        for i in range(100, 109):
            fill(buffer, i)
            if i % 3 == 0:
                buffer.save_checkpoint(f"at-{i}", wait=True)
                buffer.prune_checkpoints(2)
        wait_until(lambda: not old & set(stored(url)))
    buffer.close()
    assert numbers(url)[-6:] == list(range(103, 109))
    assert verify(url).is_clean
    for name in ("at-105", "at-108"):
        with ReplayBuffer.resume(url, name, fsync=False) as resumed:
            assert len(batches(resumed)) == 3


def test_a_stream_that_is_evicted_while_it_is_packed_is_no_damage(url: str) -> None:
    earlier_session(url, *range(8))
    buffer = new_buffer(url, capacity=Retention(steps=200))
    storage = real_storage(url)
    snapshot = Snapshot.load(storage, buffer.schema)
    for settings in (PackSettings(), PackSettings(chunk_bytes=32)):
        packing = Packing(storage, settings)
        plans, _ = packing.plans(snapshot)
        fill(buffer, 20, 21)
        assert buffer.n_steps <= 200
        buffer.session.collector.flush()
        with pytest.raises(ConflictError, match="evicted while it was being packed; pack again"):
            packing.pack(plans[0])
    assert len(pack(url, fsync=False).packed) == 1
    buffer.close()
    assert verify(url).is_clean
