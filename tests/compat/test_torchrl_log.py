"""The log below a TrajStorage: it frees what was overwritten, and a crash at any moment loses nothing durable.

Run as a script, this file is the nursery: it imports everything once and forks a child for every line on its
standard input. Children report on the nursery's standard output.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what torchrl's own imports warn of
    pytest.importorskip("torchrl")
    from torchrl.data import TensorDictMaxValueWriter, TensorDictReplayBuffer

from tensordict import TensorDict

import trajstore
import trajstore.compat.torchrl.store_generations
import trajstore.store.store
from tests.conftest import Place
from tests.support.faulty import DieAt, Died, FailOnce, FaultyStorage, Plan, real_storage
from tests.support.rank_threads import buffer_threads
from trajstore import ClosedError, StorageError, StoreNotFoundError
from trajstore.compat.torchrl import TrajStorage, row_log, slot_map, slot_table
from trajstore.compat.torchrl.row_log import RowLog
from trajstore.compat.torchrl.slot_map import SlotMap
from trajstore.format import column_layouts

N_SLOTS = 150
N_KILLS = 12
GROUP_ROWS = 16
OPTIONS: dict[str, Any] = {"grace_s": 0.0, "fsync": False, "commit_seconds": None}


@pytest.fixture
def small_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets of so few rows that a short test fills many."""
    for module in (row_log, slot_map):
        monkeypatch.setattr(module, "GROUP_ROWS", GROUP_ROWS)


def rows(numbers: np.ndarray) -> TensorDict:
    number = torch.from_numpy(numbers)
    return TensorDict({"number": number, "wide": number[:, None].repeat(1, 32).float()}, batch_size=[len(number)])


def operation(first: int) -> tuple[bool, np.ndarray]:
    """The operation after a number of rows: whether to empty the storage, and the slots to write."""
    rng = np.random.default_rng(first)
    n = int(rng.integers(1, 30))
    if first < N_SLOTS:  # fill it first, in turn
        return False, np.arange(first, first + n) % N_SLOTS
    start = int(rng.integers(N_SLOTS))
    is_run = rng.random() < 0.3
    return rng.random() < 0.01, (start + np.arange(n)) % N_SLOTS if is_run else rng.permutation(N_SLOTS)[:n]


def carry_out(storage: TrajStorage, first: int) -> int:
    is_emptied, chosen = operation(first)
    if is_emptied:
        storage._empty()
    numbers = np.arange(first, first + len(chosen))
    storage.set(torch.from_numpy(chosen), rows(numbers))
    return first + len(chosen)


def model_after(n_rows: int) -> dict[int, int]:
    """By slot, the number of its row."""
    held: dict[int, int] = {}
    first = 0
    while first < n_rows:
        is_emptied, chosen = operation(first)
        held = {} if is_emptied else held
        held |= {int(slot): first + i for i, slot in enumerate(chosen)}
        first += len(chosen)
    assert first == n_rows, "not the end of an operation"
    return held


def found_in(storage: TrajStorage) -> dict[int, int]:
    if storage.table is None:
        return {}
    held = storage.table.held_slots
    found = storage.table.rows(held)
    assert torch.equal(found["td1/wide"], found["td1/number"][:, None].repeat(1, 32).float())
    return dict(zip(held.tolist(), found["td1/number"].tolist(), strict=True))


def check(storage: TrajStorage, at_least: int) -> int:
    """Check that it holds the result of an operation after at least this many rows; returns their number."""
    found = found_in(storage)
    n_rows = max(found.values(), default=-1) + 1
    assert n_rows >= at_least
    assert found == model_after(n_rows)
    return n_rows


# ---- which rows are held


@given(st.lists(st.lists(st.integers(0, 19), unique=True), max_size=40))
def test_slots_know_their_newest_place_and_the_front(writes: list[list[int]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slot_map, "GROUP_ROWS", 4)
        found, place, n = SlotMap(20), {}, 0
        for chosen in writes:
            found.append(np.array(chosen, np.int64))
            place |= {slot: n + i for i, slot in enumerate(chosen)}
            n += len(chosen)
            assert found.n_live == len(place)
            assert {int(s): int(p) for s, p in enumerate(found.place) if p >= 0} == place
            oldest = min(place.values(), default=n)
            assert found.front == (oldest // 4 * 4 if place else n)
            if found.is_sparse:
                again = found.oldest(6)
                assert place[int(again[0])] == oldest
                assert len(again)
            assert found.n_filled == next(i for i in range(21) if i not in place)
        found.clear()
        assert (found.n_live, found.n_filled, found.front) == (0, 0, n)
        found.append(np.arange(3))
        assert (found.n_live, found.n_filled, found.front) == (3, 3, n)


# ---- freed storage


def test_a_ring_is_freed_behind_without_writing_anything_twice(small_sets: None, tmp_path: Path) -> None:
    with TrajStorage(tmp_path, N_SLOTS, **OPTIONS) as storage:
        for first in range(0, 3000, 30):
            storage.set(torch.arange(first, first + 30) % N_SLOTS, rows(np.arange(first, first + 30)))
            storage.flush()
        stats = storage.stats()
        assert stats["writer"]["steps"] == 3000
        assert stats["n_rows"] < N_SLOTS + 2 * GROUP_ROWS
    kept = trajstore.open(tmp_path / "1")
    assert len(kept.episodes) <= (N_SLOTS + 30) // GROUP_ROWS + 3
    with TrajStorage(tmp_path, N_SLOTS, **OPTIONS) as again:
        assert sorted(found_in(again).values()) == list(range(3000 - N_SLOTS, 3000))


@pytest.mark.parametrize("is_paged", [False, True])
def test_the_log_stays_short_whatever_is_overwritten(
    is_paged: bool, small_sets: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_paged:
        monkeypatch.setattr(slot_table, "_resident_fields", lambda *_: {"td1/number"})
    with TrajStorage(tmp_path, N_SLOTS, **OPTIONS, cache_bytes="16MiB") as storage:
        n = 0
        while n < 4000:
            n = carry_out(storage, n)
            storage.flush()
            assert storage.stats()["n_rows"] <= 2 * N_SLOTS + 3 * GROUP_ROWS
        assert check(storage, n) == n
        written = storage.stats()["writer"]["steps"]
        assert n < written < 3 * n
    with TrajStorage(tmp_path, N_SLOTS, **OPTIONS, cache_bytes="16MiB") as again:
        assert check(again, n) == n


@pytest.mark.parametrize(
    ("n_before", "n_written", "freed"), [(100, 450, "n_streams_removed"), (0, 4500, "n_chunks_deleted")]
)
def test_what_was_given_up_is_not_read_to_complete_the_cache(
    n_before: int, n_written: int, freed: str, small_sets: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slot_table, "_resident_fields", lambda *_: {"td1/number"})
    # Nothing is compressed: objects of columns that compress well have more rows than are written here.
    monkeypatch.setattr(column_layouts, "MAX_STORED_SHARE", 0.0)
    if n_before:
        with TrajStorage(tmp_path, N_SLOTS, **OPTIONS) as storage:
            storage.set(range(n_before), rows(np.arange(n_before)))
    with TrajStorage(tmp_path, N_SLOTS, **OPTIONS, cache_bytes="16MiB") as storage:
        for first in range(0, n_written, N_SLOTS):  # nobody reads, so the cache has none of these rows
            storage.set(range(N_SLOTS), rows(np.arange(first, first + N_SLOTS)))
            storage.flush()
        assert storage.table is not None
        storage.table.log._collector.flush()
        assert storage.stats()["storage"][freed] > 0
        for _ in range(3):  # once the rows themselves are in the cache, it is completed by others
            assert list(found_in(storage).values()) == list(range(n_written - N_SLOTS, n_written))


def test_disk_is_freed_with_max_value_writers_too(small_sets: None, tmp_path: Path) -> None:
    storage = TrajStorage(tmp_path, 40, **OPTIONS)
    rb = TensorDictReplayBuffer(storage=storage, writer=TensorDictMaxValueWriter(rank_key="number"))
    rb.extend(rows(np.array([10_000])))  # one that stays for ever, at the front of the log
    order = np.random.default_rng(0).permutation(2000)
    for chosen in np.split(order, 100):
        rb.extend(rows(np.sort(chosen)))
        storage.flush()
    assert sorted(found_in(storage).values()) == [*range(1961, 2000), 10_000]
    assert storage.stats()["n_rows"] <= 2 * 40 + 3 * GROUP_ROWS
    storage.close()
    first = trajstore.open(tmp_path / "1").streams[0].first_row
    assert first > 0


def test_what_was_emptied_stays_so(tmp_path: Path) -> None:
    with TrajStorage(tmp_path, N_SLOTS, **OPTIONS) as storage:
        storage.set(range(100), rows(np.arange(100)))
        storage.flush()
        storage._empty()
        storage.set(range(10), rows(np.arange(10)))
        storage.flush()
    with TrajStorage(tmp_path, N_SLOTS, **OPTIONS) as again:
        assert len(again) == 10
        again._empty()
        assert len(again) == 0
        again.set(range(3), rows(np.arange(3)))
    with TrajStorage(tmp_path, N_SLOTS, **OPTIONS) as again:
        assert found_in(again) == {0: 0, 1: 1, 2: 2}


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_storage_that_was_emptied_is_found_empty(is_killed: bool, tmp_path: Path) -> None:
    with TrajStorage(tmp_path, N_SLOTS, **OPTIONS) as storage:
        storage.set(range(100), rows(np.arange(100)))
    for _ in range(2):
        storage = TrajStorage(tmp_path, N_SLOTS, **OPTIONS)
        storage._empty()
        storage.flush()
        if is_killed:
            abandon(storage)
        else:
            storage.close()
        with TrajStorage(tmp_path, N_SLOTS, **OPTIONS) as again:
            assert (len(again), again.next_slot, found_in(again)) == (0, 0, {})
    with TrajStorage(tmp_path, N_SLOTS, **OPTIONS) as again:
        again.set(range(3), rows(np.arange(3)))
    with TrajStorage(tmp_path, N_SLOTS, **OPTIONS) as again:
        assert found_in(again) == {0: 0, 1: 1, 2: 2}


def test_a_log_that_was_freed_and_emptied_is_closed(small_sets: None, tmp_path: Path) -> None:
    with TrajStorage(tmp_path, N_SLOTS, **OPTIONS) as storage:
        for _ in range(3):
            storage.set(range(100), rows(np.arange(100)))
            storage.flush()
        storage._empty()
        storage.flush()
        storage.flush()
        assert storage.table is not None
        storage.table.log._collector.flush()
        storage.set(range(5), rows(np.arange(5)))
    with TrajStorage(tmp_path, N_SLOTS, **OPTIONS) as again:
        assert found_in(again) == {i: i for i in range(5)}


@pytest.mark.parametrize("grace_s", [0.0, 0.01])
def test_sessions_that_write_once_and_close_leave_no_more_than_one(
    grace_s: float, small_sets: None, tmp_path: Path
) -> None:
    for session in range(8):
        with TrajStorage(tmp_path, N_SLOTS, **{**OPTIONS, "grace_s": grace_s}) as storage:
            storage.set(range(100), rows(np.arange(100) + session))
            if grace_s:  # this one lasts
                storage.flush()
                assert storage.table is not None
                storage.table.log._collector.flush()
    assert len(trajstore.open(tmp_path / "1").streams) <= 3


def abandon(storage: TrajStorage) -> None:
    """Leave it as a process does that is killed."""
    assert storage.table is not None
    storage.table.log._collector._closing.set()
    storage.table.log._writer.release()
    storage._open.is_closed = True
    assert storage._open._registration is not None
    storage._open._registration.end()


def test_many_sessions_leave_no_more_than_one(small_sets: None, tmp_path: Path) -> None:
    n = 0
    for _ in range(12):
        with TrajStorage(tmp_path, N_SLOTS, **OPTIONS) as storage:
            assert check(storage, n) == n
            for _ in range(40):
                n = carry_out(storage, n)
            storage.flush()
            assert storage.table is not None
            storage.table.log._collector.flush()
    assert len(trajstore.open(tmp_path / "1").streams) <= 3


ENDS_WITHOUT_CLOSING = """
import sys, torch
from tensordict import TensorDict
from trajstore.compat.torchrl import TrajStorage
storage = TrajStorage(sys.argv[1], 1000, fsync=False)
storage.set(range(100), TensorDict({"number": torch.arange(100)}, [100]))
"""


@pytest.mark.slow
def test_a_process_that_ends_without_closing_leaves_everything(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", ENDS_WITHOUT_CLOSING, tmp_path / "run"], check=True)
    with TrajStorage(tmp_path / "run", 1000) as storage:
        assert torch.equal(storage[:]["number"], torch.arange(100))


@pytest.mark.closes_dropped
def test_a_storage_without_references_is_closed(tmp_path: Path) -> None:
    held = [TrajStorage(tmp_path / "run", N_SLOTS, **OPTIONS)]
    held[0].set(range(10), rows(np.arange(10)))
    table = held[0]._open
    gc.collect()
    with pytest.warns(ResourceWarning, match=r"TrajStorage at .* was dropped unclosed"):
        held.clear()
    until = time.monotonic() + 300
    while not table.is_closed and time.monotonic() < until:  # by a thread
        time.sleep(0.01)
    with TrajStorage(tmp_path / "run", N_SLOTS, **OPTIONS) as again:
        assert len(found_in(again)) == 10


def test_every_backend_gives_the_rows_back(place: Place) -> None:
    options = {**OPTIONS, "url": place.url, "storage_options": place.options or None}
    with TrajStorage(max_size=N_SLOTS, **options) as storage:
        storage.set(range(100), rows(np.arange(100)))
        storage[slice(0, 100)] = TensorDict({"more": torch.ones(100)}, batch_size=[100])
        storage.set(range(10), rows(np.arange(500, 510)).set("more", torch.zeros(10)))
    with TrajStorage(max_size=N_SLOTS, **options) as again:
        assert list(found_in(again).values()) == [*range(500, 510), *range(10, 100)]
        assert again[:]["more"].tolist() == [0.0] * 10 + [1.0] * 90


# ---- dying at every storage call


class Places:
    """Storages that die together, by one plan, counted through."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.calls = plan, []  # type: ignore[var-annotated]

    def __call__(self, url: Any, options: Any = None, **_: Any) -> FaultyStorage:
        storage = FaultyStorage(real_storage(str(url)), self.plan)
        storage.calls = self.calls
        return storage


def through(places: Places, patch: pytest.MonkeyPatch) -> None:
    for module in (trajstore.store.store, trajstore.compat.torchrl.store_generations):
        patch.setattr(module, "open_storage", places)


def live(url: Path, n_operations: int, durable: list[int], grown: bool) -> None:
    storage = TrajStorage(url, N_SLOTS, **OPTIONS)
    try:
        n = 0
        for i in range(n_operations):
            n = carry_out(storage, n)
            if i % 3 == 2:
                storage.flush()
                durable.append(n)
        if grown:
            more = rows(np.zeros(N_SLOTS, np.int64)).set("more", torch.ones(N_SLOTS)).exclude("number", "wide")
            storage[slice(0, N_SLOTS)] = more
        storage.close()
        durable.append(n)
    finally:
        if storage.table is not None:
            abandon(storage)


def test_a_death_at_any_storage_call_loses_no_row_that_was_durable(small_sets: None, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        through(places := Places(Plan()), patch)
        live(tmp_path / "whole", 30, [], True)
    n_calls = len(places.calls)
    assert n_calls > 100
    for at in range(1, n_calls + 1, 5):
        url, durable = tmp_path / str(at), [0]
        with pytest.MonkeyPatch.context() as patch:
            through(Places(DieAt(at, is_after=at % 2 == 0)), patch)
            with contextlib.suppress(Died, StorageError, ClosedError):
                live(url, 30, durable, True)
        with TrajStorage(url, N_SLOTS, **OPTIONS) as storage:
            n = check(storage, durable[-1])
            if storage.table is None or "td1/more" not in storage.table.leaves:
                carry_out(storage, n)


def dump(whole: TrajStorage, url: Path) -> None:
    whole.dumps(url)


def found_dumped(url: Path) -> int:
    with TrajStorage(None, N_SLOTS, **OPTIONS) as again:
        try:
            again.loads(url)
        except StoreNotFoundError:
            return 0
        return len(again)


def load(whole: TrajStorage, url: Path) -> None:
    storage = TrajStorage(url, N_SLOTS, **OPTIONS)
    try:
        storage.load_state_dict(whole.state_dict())
    finally:
        if storage.table is not None:
            abandon(storage)


def found_loaded(url: Path) -> int:
    with TrajStorage(url, N_SLOTS, **OPTIONS) as again:
        n = len(again)
        if not n:  # no trace is left of what was not finished
            again.set(range(1), TensorDict({"other": torch.zeros(1)}, batch_size=[1]))
        return n


@pytest.mark.parametrize(("act", "found"), [(dump, found_dumped), (load, found_loaded)])
def test_a_first_dump_or_load_that_is_not_finished_does_not_count(
    act: Callable[[TrajStorage, Path], None], found: Callable[[Path], int], tmp_path: Path
) -> None:
    held = set()
    with TrajStorage(None, N_SLOTS, **OPTIONS) as whole:
        whole.set(range(100), rows(np.arange(100)))
        for at in itertools.count(1, 2):
            url = tmp_path / str(at)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(row_log, "_BLOCK_ROWS", 30)
                patch.setattr(RowLog, "_write", committing(RowLog._write))  # as a thread behind may at any moment
                through(places := Places(DieAt(at, is_after=at % 4 == 1)), patch)
                with contextlib.suppress(Died, StorageError, ClosedError):
                    act(whole, url)
            held.add(found(url))
            if len(places.calls) < at:
                break
    assert held == {0, 100}


def committing(put: Callable[..., None]) -> Callable[..., None]:
    def wrapped(self: RowLog, header: np.ndarray, leaves: Any) -> None:
        put(self, header, leaves)
        self._writer.commit()

    return wrapped


def test_a_storage_fault_while_keys_are_added_does_not_last(tmp_path: Path) -> None:
    more = TensorDict({"more": torch.ones(100)}, batch_size=[100])

    def grow(url: Path, plan: Plan) -> tuple[TrajStorage, Places]:
        with pytest.MonkeyPatch.context() as patch:
            through(places := Places(plan), patch)
            storage = TrajStorage(url, N_SLOTS, **OPTIONS)
            storage.set(range(100), rows(np.arange(100)))
            storage.flush()
            begun = len(places.calls)
            with contextlib.suppress(OSError, StorageError):
                storage[slice(0, 100)] = more
            storage[slice(0, 100)] = more  # the fault is over
        places.calls[:] = places.calls[begun:]
        return storage, places

    storage, places = grow(tmp_path / "whole", Plan())
    storage.close()
    n_before = places.calls[0].number
    threads = len(buffer_threads())
    for at in range(n_before, n_before + len(places.calls), 3):
        storage, _ = grow(tmp_path / str(at), FailOnce(at, at % 2 == 0, lambda: StorageError("no network")))
        storage.set(range(10), rows(np.arange(500, 510)).set("more", torch.zeros(10)))
        storage.close()
        assert len(buffer_threads()) <= threads
        with TrajStorage(tmp_path / str(at), N_SLOTS, **OPTIONS) as again:
            assert list(found_in(again).values()) == [*range(500, 510), *range(10, 100)]
            assert again[:]["more"].tolist() == [0.0] * 10 + [1.0] * 90


@pytest.mark.parametrize("call", ["flush", "write", "patch"])
def test_what_another_thread_changes_in_place_beside_it_is_not_lost(call: str, tmp_path: Path) -> None:
    with TrajStorage(tmp_path / "run", N_SLOTS, **OPTIONS) as storage:
        storage.set(range(10), rows(np.arange(10)))
        assert storage.table is not None
        held, append = storage.table.leaves["td1/number"], storage.table.log.append

        def change(*given: Any) -> None:
            append(*given)
            held[3] = 77  # as `rb.set_at_` does it, which has TorchRL's lock and not the storage's

        storage.table.log.append = change  # type: ignore[method-assign]
        if call == "flush":
            held[0] = 70
            storage.flush()
        elif call == "write":
            storage.set(range(5, 6), rows(np.array([5])))
        else:
            storage._apply_conditional_patch(torch.tensor([5]), {"number": torch.tensor([5])})
        storage.table.log.append = append  # type: ignore[method-assign]
    with TrajStorage(tmp_path / "run", N_SLOTS, **OPTIONS) as again:
        assert again[3]["number"] == 77


@pytest.mark.parametrize("is_inference", [False, True])
def test_what_a_storage_writes_itself_is_logged_once(is_inference: bool, tmp_path: Path) -> None:
    for _ in range(2):
        with TrajStorage(tmp_path / "run", N_SLOTS, **OPTIONS) as storage, torch.inference_mode(is_inference):
            n_before = storage.stats().get("n_rows", 0)
            storage.set(range(10), rows(np.arange(10)))
            storage.set(range(3, 3), rows(np.arange(0)))
            storage.set(20, rows(np.arange(1))[0], set_cursor=False)
            storage._apply_conditional_patch(torch.tensor([5]), {"number": torch.tensor([5])})
            storage.flush()
            assert storage.stats()["n_rows"] - n_before <= 12


# ---- killed


def train(url: str, is_paged: bool) -> None:
    """Go on with what is there until killed; say what is durable."""
    for module in (row_log, slot_map):
        module.GROUP_ROWS = GROUP_ROWS  # type: ignore[attr-defined]
    if is_paged:
        slot_table._resident_fields = lambda *_: {"td1/number"}
    storage = TrajStorage(url, N_SLOTS, **{**OPTIONS, "commit_seconds": 0.01}, cache_bytes="16MiB")
    n = check(storage, 0)
    say("begun", n)
    for i in range(10**9):
        n = carry_out(storage, n)
        if i % 5 == 4:
            storage.flush()
            say("durable", n)


def say(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def nursery() -> None:
    for line in sys.stdin:
        url, is_paged = line.split()
        pid = os.fork()
        if not pid:
            try:
                train(url, is_paged == "1")
            except BaseException as error:
                say("failed", repr(error))
            os._exit(1)
        say("pid", pid)
        os.waitpid(pid, 0)
        say("gone")


@pytest.fixture
def nursed() -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.compat.test_torchrl_log"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=Path(__file__).resolve().parents[2],
    )
    yield process
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.close()
    process.wait(60)
    process.stdout.close()


@pytest.mark.slow
def test_a_storage_whose_process_is_killed_comes_back_as_a_commit_left_it(
    nursed: subprocess.Popen[str], tmp_path: Path, small_sets: None
) -> None:
    durable = 0
    for kill in range(N_KILLS):
        durable = _life(nursed, tmp_path / "run", bool(kill % 2), durable, 0.05 + 0.03 * kill)
        with TrajStorage(tmp_path / "run", N_SLOTS, **OPTIONS) as storage:
            durable = check(storage, durable)
    assert durable > 500


def _life(nursed: subprocess.Popen[str], url: Path, is_paged: bool, durable: int, seconds: float) -> int:
    """Begin a child, kill it after some time, and return how much it said was durable."""
    assert nursed.stdin is not None
    assert nursed.stdout is not None
    nursed.stdin.write(f"{url} {int(is_paged)}\n")
    nursed.stdin.flush()
    pid, killed = 0, False
    while (words := nursed.stdout.readline().split()) and words[0] != "gone":
        assert words[0] != "failed", words
        if words[0] == "pid":
            pid = int(words[1])
        elif words[0] == "begun":
            begun = time.monotonic()
        elif words[0] == "durable":
            durable = int(words[1])
            if not killed and time.monotonic() - begun > seconds:
                os.kill(pid, signal.SIGKILL)
                killed = True
    return durable


if __name__ == "__main__":
    nursery()
