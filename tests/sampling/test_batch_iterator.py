"""Iterators over batches: epochs, prefetch, resuming, rings, staged draws, DataLoaders, threads beside writers."""

from __future__ import annotations

import itertools
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import trajstore
from tests.sampling.test_reader import chi_square, small_store
from tests.support.sharding import mark, read_record
from trajstore import BatchDataset, Field, Reader, Ring, Schema, Store, WindowDataset, Windows
from trajstore.errors import ClosedError, CorruptionError
from trajstore.format.commit_record import SessionView
from trajstore.sampling.batches.outputs import flat_outputs
from trajstore.sampling.permutation import Permutation
from trajstore.schema import Array
from trajstore.writing.writer import Writer

FIELDS = {"obs": Field("int64", (2,), chunk_rows=4), "action": Field("int64", chunk_rows=8)}


def numbered(k: int, n: int) -> dict[str, Array]:
    """An episode whose steps hold its number and their t."""
    return {"obs": np.stack([np.full(n, k), np.arange(n)], 1), "action": np.arange(n)}


def write(writer: Writer, lengths: list[int], first: int = 0) -> None:
    for k, n in enumerate(lengths, first):
        writer.append_episode(numbered(k, n), terminated=True)
    writer.commit()


def open_store(lengths: list[int], url: Any = None, fields: Any = None) -> tuple[Store, Writer]:
    """A store with these episodes, and the writer, to go on with."""
    options = {} if url is None else {"fsync": False}
    store = trajstore.create(url or f"memory://batches-{uuid.uuid4().hex}", Schema(fields or FIELDS), **options)
    writer = store.writer(commit_seconds=None)
    write(writer, lengths)
    store.refresh()
    return store, writer


def new_store(lengths: list[int]) -> Store:
    return open_store(lengths)[0]


def evict(root: Path, stream: str, first_row: int) -> None:
    """What a session does that evicts the head of another stream: its record says from which row on it is left."""
    writer = trajstore.open(root, fsync=False).writer("session")
    writer.append({"obs": np.zeros(2, np.int64), "action": 0})
    writer.abort_episode()
    writer.close()
    view = SessionView(first_rows={stream: first_row}, discarded={writer.stream: (0,)})
    mark(root, read_record(root, writer.stream), view=view)


def steps_of(batches: Any) -> list[tuple[int, int]]:
    """Episode and t of every window's first step, as the data says; the index must say the same."""
    found = []
    for batch in batches:
        steps = batch["obs"][:, 0].tolist()
        assert steps == batch["index"][:, 1:].tolist()
        found += [tuple(step) for step in steps]
    return found


def starts(lengths: list[int], length: int, first: int = 0) -> list[tuple[int, int]]:
    return [(k, t) for k, n in enumerate(lengths, first) for t in range(n - length + 1)]


# ---- epochs --------------------------------------------------------------------------------------------

small_lengths = st.lists(st.integers(1, 9), min_size=1, max_size=8)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(small_lengths, st.integers(1, 3), st.integers(1, 20), st.booleans(), st.booleans(), st.integers(0, 3))
def test_an_epoch_covers_every_window_once(
    lengths: list[int], length: int, batch_size: int, shuffle: bool, drop_last: bool, prefetch: int
) -> None:
    expected = starts(lengths, length)
    reader = Reader(new_store(lengths))
    spec = Windows(length=length)
    if not expected:
        with pytest.raises(trajstore.DataError, match="no such window exists"):
            reader.epoch(batch_size, spec)
        return
    with reader.epoch(batch_size, spec, shuffle=shuffle, drop_last=drop_last, prefetch=prefetch) as epoch:
        batches = list(epoch)
        assert next(epoch, None) is None
        assert len(epoch) == len(batches)
    sizes = [len(batch["index"]) for batch in batches]
    rest = len(expected) % batch_size
    full = [batch_size] * (len(expected) // batch_size)
    assert sizes == full + ([rest] if rest and not drop_last else [])
    found = steps_of(batches)
    if not shuffle:
        assert found == expected[: len(found)]
    assert len(set(found)) == len(found)
    assert set(found) <= set(expected)
    assert drop_last or set(found) == set(expected)


def test_epochs_of_one_reader_have_different_orders() -> None:
    reader = Reader(new_store([50] * 4), seed=1)
    first, second = (steps_of(reader.epoch(16, Windows())) for _ in range(2))
    assert sorted(first) == sorted(second)
    assert first != second
    assert first != sorted(first)
    assert steps_of(Reader(new_store([50] * 4), seed=1).epoch(16, Windows())) == first


@pytest.mark.parametrize("prefetch", [0, 3])
def test_an_epoch_keeps_to_the_windows_it_began_with(prefetch: int) -> None:
    store, writer = open_store([5, 6])
    writer.append({"obs": np.array([2, 0]), "action": 0})
    writer.commit()
    reader = Reader(store)
    reader.refresh()
    expected = [*starts([5, 6], 1), (2, 0)]
    with reader.epoch(3, Windows(), prefetch=prefetch) as epoch:
        found = steps_of([next(epoch)])
        writer.append({"obs": np.array([2, 1]), "action": 1})  # the open episode moves behind what follows
        writer.append_episode(numbered(3, 7), terminated=True, env=1)
        writer.commit()
        reader.refresh()
        found += steps_of(epoch)
    assert sorted(found) == expected
    assert len(steps_of(reader.epoch(3, Windows()))) == len(expected) + 8


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_evicted_windows_are_skipped_and_counted(tmp_path: Path, shuffle: bool, prefetch: int) -> None:
    lengths = [6] * 10
    store, writer = open_store(lengths, tmp_path)
    writer.close()
    store.refresh()
    reader = Reader(store)
    with reader.epoch(7, Windows(length=2), shuffle=shuffle, prefetch=prefetch) as epoch:
        before = steps_of([next(epoch)])
        queued = steps_of([reader.at(q.windows, Windows(length=2)) for q in epoch._queue])
        evict(tmp_path, writer.stream, 5 * 6 + 2)  # five episodes, and the first two steps of the sixth
        reader.refresh()
        after = steps_of(epoch)
        left = {(k, t) for k, t in starts(lengths, 2) if k > 5 or (k == 5 and t >= 2)}
        expected = left - set(before) | set(queued)
        assert sorted(after) == sorted(expected)
        assert epoch.stats()["n_skipped"] == 50 - len(before) - len(after)


def test_an_epoch_whose_windows_were_all_evicted_ends(tmp_path: Path) -> None:
    store, writer = open_store([6] * 4, tmp_path)
    writer.close()
    store.refresh()
    reader = Reader(store)
    epoch = reader.epoch(5, Windows())
    next(epoch)
    evict(tmp_path, writer.stream, 24)
    reader.refresh()
    assert list(epoch) == []
    assert epoch.stats()["n_skipped"] == 19
    with pytest.raises(trajstore.DataError, match="has no episode to draw from"):
        reader.sample(4, Windows())


def test_an_epoch_of_chosen_episodes() -> None:
    reader = Reader(new_store([3, 9, 4, 8]))
    found = steps_of(reader.epoch(5, Windows(), where=lambda table: table["length"] > 5))
    assert sorted(found) == [(k, t) for k in (1, 3) for t in range([3, 9, 4, 8][k])]


def test_batches_at_random_have_no_length() -> None:
    with pytest.raises(TypeError, match="batches drawn at random have no end, so their iterator has no length"):
        len(Reader(new_store([3])).batches(2, Windows()))


# ---- the permutation behind a shuffled epoch -----------------------------------------------------------


@settings(max_examples=60)
@given(st.one_of(st.integers(1, 40), st.integers(1, 3000)), st.integers(0, (1 << 64) - 1))
def test_a_permutation_has_every_number_once(n: int, seed: int) -> None:
    order = Permutation(n, seed)
    whole = order(0, n)
    assert np.array_equal(np.sort(whole), np.arange(n))
    middle = n // 2
    assert np.array_equal(np.concatenate([order(0, middle), order(middle, n)]), whole)


@settings(max_examples=60)
@given(st.one_of(st.integers(1, 40), st.integers(1, 1 << 62)), st.integers(0, (1 << 64) - 1))
def test_a_compiled_permutation_has_the_order_of_array_operations(n: int, seed: int) -> None:
    pytest.importorskip("numba")
    start = seed % n
    orders = [Permutation(n, seed, compiled=compiled)(start, min(n, start + 20)) for compiled in (True, False)]
    assert orders[0].dtype == orders[1].dtype == np.int64
    assert orders[0].tolist() == orders[1].tolist()


def test_permutations_depend_on_the_seed() -> None:
    orders = {tuple(Permutation(100, seed)(0, 100).tolist()) for seed in range(50)}
    assert len(orders) == 50
    assert {tuple(Permutation(3, seed)(0, 3).tolist()) for seed in range(200)} == set(
        itertools.permutations(range(3))
    )


def test_a_huge_permutation_takes_no_memory_and_repeats_nothing() -> None:
    n = 10**15 + 7
    some = np.concatenate([Permutation(n, 3)(start, start + 5000) for start in (0, n // 2, n - 5000)])
    assert len(np.unique(some)) == 15_000
    assert some.min() >= 0
    assert some.max() < n
    counts = np.bincount((some // (n // 10 + 1)).astype(int), minlength=10)
    assert chi_square(counts, np.full(10, 1500.0)) < 3


# ---- prefetch ------------------------------------------------------------------------------------------


def indices(batches: Any, n: int) -> list[list[list[int]]]:
    return [batch["index"].tolist() for batch in itertools.islice(batches, n)]


@pytest.mark.parametrize("prefetch", [1, 2, 5])
@pytest.mark.parametrize("make", ["batches", "epoch", "staged"])
def test_prefetch_does_not_change_the_sequence(make: str, prefetch: int) -> None:
    store = new_store([11] * 9)
    spec, sequences = Windows(length=3), []
    for depth in (0, prefetch):
        with getattr(Reader(store, seed=5, cache_bytes=2000), make)(8, spec, prefetch=depth) as batches:
            sequences.append(indices(batches, 9))
    assert sequences[0] == sequences[1]


def test_a_sequence_does_not_depend_on_what_else_is_sampled() -> None:
    store = new_store([11] * 9)
    alone, beside = Reader(store, seed=5), Reader(store, seed=5)
    expected = indices(alone.batches(8, Windows()), 6)
    batches, found = beside.batches(8, Windows(), prefetch=2), []
    for _ in range(6):
        beside.sample(3, Windows())
        found += indices(batches, 1)
    batches.close()
    assert found == expected


SPECS = {
    "plain": Windows(length=3),
    "padded": Windows(length=3, boundary="pad_both", stride=2),
    "weighted": Windows(length=2, weight="episode"),
    "cross": Windows(length=5, burn_in=2, boundary="cross"),
}


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("depths", [(0, 0), (3, 0), (2, 5)])
@pytest.mark.parametrize("make", ["batches", "epoch", "staged"])
def test_an_iterator_goes_on_where_another_was(make: str, depths: tuple[int, int], name: str) -> None:
    if make != "batches" and name == "weighted":
        return
    spec, store = SPECS[name], new_store([11] * 9)
    with getattr(Reader(store, seed=5, cache_bytes=2000), make)(8, spec, prefetch=depths[0]) as batches:
        indices(batches, 2)
        state = batches.state_dict()
        expected = [flat_outputs(b) for b in itertools.islice(batches, 6)]
    with getattr(Reader(store, seed=99, cache_bytes=2000), make)(8, spec, prefetch=depths[1]) as again:
        again.load_state_dict(state)
        for wanted, got in zip(expected, again, strict=False):
            got = flat_outputs(got)
            assert all(torch.equal(wanted[key], got[key]) for key in wanted)


@pytest.mark.parametrize("make", ["epoch", "staged"])
@pytest.mark.parametrize("name", ["plain", "padded", "cross"])
@pytest.mark.parametrize("refreshed", ["before", "after"])
def test_an_iterator_goes_on_also_after_more_was_committed(make: str, name: str, refreshed: str) -> None:
    spec = SPECS[name]
    store, writer = open_store([11] * 9)
    writer.append({"obs": np.array([9, 0]), "action": 0}, env=1)
    writer.append({"obs": np.array([9, 1]), "action": 1}, env=1)
    writer.commit()
    store.refresh()
    with getattr(Reader(store, seed=5, cache_bytes=2000), make)(8, spec, prefetch=2) as batches:
        indices(batches, 2)
        state = batches.state_dict()
        expected = indices(batches, 6)
    write(writer, [7] * 6, first=10)
    other = Reader(store, seed=99, cache_bytes=2000)
    if refreshed == "before":
        other.refresh()
    with getattr(other, make)(8, spec) as again:
        if refreshed == "after":
            other.refresh()
        again.load_state_dict(state)
        assert indices(again, 6) == expected
        again.stats()


def test_queued_windows_survive_a_refresh_and_later_draws_see_more() -> None:
    store, writer = open_store([11] * 9)
    reader = Reader(store, seed=5)
    batches = reader.batches(8, Windows(length=3), prefetch=3)
    next(batches)
    state = batches.state_dict()
    assert len(state["queued"]) == 3
    queued = indices(batches, 3)
    batches.close()
    write(writer, [50] * 60, first=9)
    other = Reader(store, seed=1)
    other.refresh()
    with other.batches(8, Windows(length=3)) as again:
        again.load_state_dict(state)
        assert indices(again, 3) == queued
        assert max(step[1] for batch in indices(again, 3) for step in batch) > 9


def test_a_state_can_be_saved_by_torch(tmp_path: Path) -> None:
    store = new_store([11] * 9)
    batches = Reader(store, seed=5).epoch(8, Windows(), prefetch=2)
    next(batches)
    torch.save(batches.state_dict(), tmp_path / "state.pt")
    expected = indices(batches, 99)
    again = Reader(store).epoch(8, Windows())
    again.load_state_dict(torch.load(tmp_path / "state.pt"))
    assert indices(again, 99) == expected
    batches.close()


def test_an_epoch_that_is_over_stays_over() -> None:
    reader = Reader(new_store([4]))
    epoch = reader.epoch(4, Windows())
    assert len(list(epoch)) == 1
    again = reader.epoch(4, Windows())
    again.load_state_dict(epoch.state_dict())
    assert list(again) == []


def chunk_file(root: Path, stream: str, path: str, chunk: int) -> Path:
    files = (root / "streams" / stream / "steps" / path).glob("c.*")
    return next(file for file in files if file.name.split(".")[1] == str(chunk))


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_exception_stands_in_the_place_of_its_batch(tmp_path: Path, prefetch: int) -> None:
    store, writer = open_store([4] * 10, tmp_path)
    writer.close()
    store.refresh()
    damaged = chunk_file(tmp_path, writer.stream, "obs", 6)
    damaged.write_bytes(damaged.read_bytes()[::-1])
    outcomes: list[Any] = []
    with Reader(store).epoch(4, Windows(), shuffle=False, prefetch=prefetch) as epoch:
        for _ in range(10):
            try:
                outcomes += steps_of([next(epoch)])
            except CorruptionError as error:
                outcomes.append(str(error))
        assert next(epoch, None) is None
    errors = [i for i, outcome in enumerate(outcomes) if isinstance(outcome, str)]
    assert errors == [24]
    assert "episodes [6]" in outcomes[24]
    assert outcomes[:24] + outcomes[25:] == [step for step in starts([4] * 10, 1) if step[0] != 6]


def test_staged_batches_go_on_after_a_failure(tmp_path: Path) -> None:
    store, writer = open_store([4] * 200, tmp_path)
    writer.close()
    store.refresh()
    files = [chunk_file(tmp_path, writer.stream, "obs", chunk) for chunk in range(0, 200, 3)]
    whole = [file.read_bytes() for file in files]
    for file, data in zip(files, whole, strict=True):
        file.write_bytes(data[::-1])
    with Reader(store, cache_bytes=4000).staged(16, Windows()) as batches:
        assert n_failures(batches, 60) > 0
        for file, data in zip(files, whole, strict=True):
            file.write_bytes(data)
        n_failures(batches, 3)  # what was under way may still fail
        assert n_failures(batches, 60) == 0


def n_failures(batches: Any, n: int) -> int:
    count = 0
    for _ in range(n):
        try:
            next(batches)
        except CorruptionError:
            count += 1
    return count


def test_closed_batches_say_so() -> None:
    before = set(threading.enumerate())
    for prefetch in (0, 2):
        batches = Reader(new_store([9])).batches(2, Windows(), prefetch=prefetch)
        next(batches)
        batches.close()
        batches.close()
        with pytest.raises(ClosedError, match="these batches are closed"):
            next(batches)
    assert not [t for t in set(threading.enumerate()) - before if t.name.startswith("trajstore-prefetch")]


def test_closed_staged_batches_leave_no_thread() -> None:
    before = set(threading.enumerate())
    with Reader(new_store([9] * 20), cache_bytes=500).staged(2, Windows(), prefetch=1) as batches:
        next(batches)
    left = {t.name for t in set(threading.enumerate()) - before}
    assert not [name for name in left if name.startswith(("trajstore-prefetch", "trajstore-staged"))]


# ---- output memory -------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 4])
def test_a_ring_batch_is_valid_for_the_next_ones_and_then_used_again(n: int) -> None:
    reader, plain = (Reader(new_store([30] * 5), seed=3) for _ in range(2))
    spec, ring = Windows(length=4, boundary="pad_both", n_step=None), Ring(n)
    given_out: list[dict[str, Any]] = []
    expected = []
    for k in range(4 * n):
        given_out.append(flat_outputs(reader.sample(8, spec, out=ring)))
        expected.append(flat_outputs(plain.sample(8, spec)))
        for batch, wanted in list(zip(given_out, expected, strict=True))[-n:]:
            assert all(torch.equal(batch[key], wanted[key]) for key in wanted)
        if k >= n:
            before = given_out[k - n]
            assert all(given_out[k][key].data_ptr() == before[key].data_ptr() for key in before)
            assert torch.equal(before["index"], given_out[k]["index"])


def test_all_outputs_of_a_ring_are_used_again() -> None:
    store, _ = small_store("ring-outputs")
    reader, spec = Reader(store), Windows.transitions(n_step=3)
    ring = Ring(1)
    first, second = (flat_outputs(reader.sample(8, spec, out=ring)) for _ in range(2))
    assert [key for key in first if first[key].data_ptr() != second[key].data_ptr()] == []


def test_a_ring_for_another_kind_of_batch_gets_new_memory() -> None:
    reader, ring = Reader(new_store([30] * 5)), Ring(2)
    first = reader.sample(8, Windows(length=4), out=ring)
    kept = first["obs"].clone()
    for size in (7, 6, 5):
        reader.sample(size, Windows(length=4), out=ring)
    assert torch.equal(first["obs"], kept)


def test_a_ring_that_is_too_short_is_refused() -> None:
    reader = Reader(new_store([30]))
    with pytest.raises(ValueError, match=r"out: expected a ring of at least 5 \(prefetch \+ 2\), got 4"):
        reader.batches(4, Windows(), prefetch=3, out=Ring(4))
    for bad in (0, -1, 1.5, True):
        with pytest.raises(ValueError, match="n: expected a positive integer"):
            Ring(bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_batches_in_a_ring_are_what_they_are_without(prefetch: int) -> None:
    store, spec = new_store([30] * 5), Windows(length=4)
    plain = Reader(store, seed=1).epoch(16, spec)
    with Reader(store, seed=1).epoch(16, spec, prefetch=prefetch, out=Ring(prefetch + 2)) as ringed:
        before: Any = None
        for wanted, got in zip(plain, ringed, strict=True):
            assert all(torch.equal(wanted[key], got[key]) for key in wanted)
            if before is not None:
                assert torch.equal(before[0]["obs"], before[1])
            before = got, got["obs"].clone()


def test_a_resumed_queue_longer_than_the_ring_is_not_overwritten() -> None:
    store = new_store([30] * 5)
    with Reader(store).batches(4, Windows(), prefetch=4) as batches:
        next(batches)
        state = batches.state_dict()
        expected = indices(batches, 6)
    with Reader(store).batches(4, Windows(), out=Ring(2)) as again:
        again.load_state_dict(state)
        assert indices(again, 6) == expected


def test_an_earlier_batch_can_be_overwritten() -> None:
    store, _ = small_store("overwritten")
    reader, plain = Reader(store, seed=1), Reader(store, seed=1)
    for spec in (Windows(length=4, n_step=2, next_fields=("obs",)), Windows.transitions(n_step=(1, 3))):
        out = reader.sample(8, spec)
        plain.sample(8, spec)
        got = reader.sample(8, spec, out=out)
        expected, got, out = (flat_outputs(b) for b in (plain.sample(8, spec), got, out))
        assert all(torch.equal(expected[key], got[key]) for key in expected)
        assert [key for key in expected if not torch.equal(expected[key], out[key])] == []


def test_outputs_of_another_shape_are_refused() -> None:
    reader = Reader(new_store([30] * 5))
    out = reader.sample(8, Windows(length=4))
    with pytest.raises(ValueError, match=r"out 'obs': expected torch.int64 of shape \(9, 4, 2\), got .*\(8, 4"):
        reader.sample(9, Windows(length=4), out=out)
    with pytest.raises(ValueError, match=r"out 'obs': expected torch.int64 of .*, got torch.int32"):
        reader.sample(8, Windows(length=4), out={"obs": out["obs"].to(torch.int32)})
    with pytest.raises(ValueError, match=r"out 'obs': .*, not contiguous"):
        reader.sample(8, Windows(length=4), out={"obs": torch.empty(8, 4, 4, dtype=torch.int64)[..., ::2]})
    with pytest.raises(ValueError, match="out 'valid'"):
        reader.sample(8, Windows(length=4), out={"valid": torch.empty(8, 4)})
    part = reader.sample(8, Windows(length=4), out={"action": out["action"]})
    assert part["action"].data_ptr() == out["action"].data_ptr()
    assert part["obs"].data_ptr() != out["obs"].data_ptr()


def test_batches_can_be_tensordicts() -> None:
    tensordict = pytest.importorskip("tensordict")
    store, _ = small_store("tensordicts")
    reader, plain = Reader(store, seed=2, as_tensordict=True), Reader(store, seed=2)
    spec = Windows(length=3, next_fields=("obs",), n_step=2)
    got, expected = reader.sample(8, spec), plain.sample(8, spec)
    assert isinstance(got, tensordict.TensorDict)
    assert got.batch_size == (8,)
    assert torch.equal(got["next", "obs"], expected["next"]["obs"])
    assert torch.equal(got["n_step", "return"], expected["n_step"]["return"])
    again = reader.sample(8, spec, out=got)
    assert again["obs"].data_ptr() == got["obs"].data_ptr()
    with reader.epoch(8, spec, prefetch=1) as epoch:
        assert isinstance(next(epoch), tensordict.TensorDict)


# ---- staged draws --------------------------------------------------------------------------------------


@pytest.mark.parametrize("cache_bytes", [200, 2500])
def test_staged_draws_are_uniform_over_many_rounds(cache_bytes: int) -> None:
    lengths = [10] * 50
    reader = Reader(new_store(lengths), cache_bytes=cache_bytes, seed=3)
    counts = np.zeros((50, 10))
    with reader.staged(100, Windows()) as batches:
        for batch in itertools.islice(batches, 40 * 5):  # forty rounds
            episode, t = batch["obs"][:, 0].T.numpy()
            np.add.at(counts, (episode, t), 1)
        stats = batches.stats()
    assert chi_square(counts.ravel(), np.full(500, 40.0)) < 1.5
    assert stats["distance"] < 0.1
    assert stats["n_skipped"] == 0


@pytest.mark.parametrize("reuse", [0.5, 2.0])
def test_staged_draws_use_what_is_loaded_as_often_as_asked(reuse: float) -> None:
    """By the time that a whole round has entered, every window was drawn about that often."""
    reader = Reader(new_store([10] * 100), cache_bytes=3000, seed=3)
    with reader.staged(5, Windows(), reuse=reuse) as batches:
        for _ in range(int(1000 * reuse / 5)):
            next(batches)
        stats = batches.stats()
    assert set(stats) == {"n_skipped", "n_segments", "n_resident", "resident_fraction", "reuse", "distance"}
    assert stats["n_segments"] > 2 * stats["n_resident"]
    assert stats["resident_fraction"] == stats["n_resident"] / stats["n_segments"]
    assert abs(stats["reuse"] - reuse) < 0.1 * reuse


def test_staged_draws_load_less_than_uniform_ones() -> None:
    store = new_store([10] * 200)
    staged, uniform = Reader(store, cache_bytes=6000), Reader(store, cache_bytes=6000)
    with staged.staged(20, Windows(), reuse=4.0) as batches:
        for _ in range(80):
            next(batches)
    for _ in range(80):
        uniform.sample(20, Windows())
    assert staged.stats()["misses"] < uniform.stats()["misses"] / 2


def test_staged_draws_are_the_same_every_time() -> None:
    store = new_store([10] * 100)
    runs = []
    for prefetch in (0, 0, 3):
        with Reader(store, cache_bytes=3000, seed=8).staged(16, Windows(length=2), prefetch=prefetch) as batches:
            runs.append(indices(batches, 60))
    assert runs[0] == runs[1] == runs[2]


def test_staged_draws_skip_what_was_evicted(tmp_path: Path) -> None:
    store, writer = open_store([6] * 40, tmp_path)
    writer.close()
    store.refresh()
    reader = Reader(store, cache_bytes=1000)
    with reader.staged(8, Windows()) as batches:
        next(batches)
        evict(tmp_path, writer.stream, 120)
        reader.refresh()
        next(batches)  # was planned before
        found = steps_of(itertools.islice(batches, 50))
        assert len(found) == 400
        assert min(k for k, _ in found) >= 20
        assert batches.stats()["n_skipped"] > 0


# ---- DataLoaders ---------------------------------------------------------------------------------------


def long_ones(table: trajstore.EpisodeTable) -> Array:
    return np.asarray(table["length"] > 6)


LENGTHS = [5, 9, 3, 12, 7]
forks = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


def saved(tmp_path: Path) -> Store:
    store, writer = open_store(LENGTHS, tmp_path / "store")
    writer.close()
    store.refresh()
    return store


def loader(dataset: Any, workers: int, context: str | None, **options: Any) -> Any:
    return DataLoader(dataset, num_workers=workers, multiprocessing_context=context, **options)


WORKERS = [(0, None), (2, "fork"), (2, "spawn")]


@forks
@pytest.mark.parametrize(("workers", "context"), WORKERS)
def test_workers_share_the_batches_of_an_epoch(tmp_path: Path, workers: int, context: str | None) -> None:
    store = saved(tmp_path)
    dataset = BatchDataset(store, 4, Windows(length=2), epoch=True, where=long_ones)
    expected = [step for step in starts(LENGTHS, 2) if LENGTHS[step[0]] > 6]
    Reader(store).sample(4, Windows())  # threads that a child would miss
    orders = []
    for _ in range(2 if context != "spawn" else 1):
        found = steps_of(loader(dataset, workers, context, batch_size=None))
        assert sorted(found) == expected
        orders.append(found)
        dataset.set_epoch(1)
    assert context == "spawn" or orders[0] != orders[1]


@forks
@pytest.mark.parametrize("n_workers", [1, 2])
def test_workers_keep_the_number_of_batches(tmp_path: Path, n_workers: int) -> None:
    store = saved(tmp_path)
    for drop_last in (True, False):
        dataset = BatchDataset(store, 5, Windows(), epoch=True, drop_last=drop_last)
        sizes = [len(b["index"]) for b in loader(dataset, n_workers, "fork", batch_size=None)]
        assert sorted(sizes, reverse=True) == [5] * 7 + ([] if drop_last else [1])


@forks
def test_workers_draw_different_windows(tmp_path: Path) -> None:
    dataset = BatchDataset(saved(tmp_path), 64, Windows(), seed=7)
    batches = iter(loader(dataset, 2, "fork", batch_size=None))
    drawn = [next(batches)["index"].tolist() for _ in range(6)]
    del batches
    assert len({str(batch) for batch in drawn}) == 6
    again = iter(loader(dataset, 2, "fork", batch_size=None))
    assert [next(again)["index"].tolist() for _ in range(6)] == drawn


def test_a_dataset_without_workers_goes_on_with_other_draws(tmp_path: Path) -> None:
    dataset = BatchDataset(saved(tmp_path), 64, Windows(), seed=7)
    first, second = (next(iter(dataset))["index"] for _ in range(2))
    assert not torch.equal(first, second)


@forks
@pytest.mark.parametrize(("workers", "context"), [(0, None), (2, "fork"), (1, "spawn")])
def test_single_windows_for_a_sampler_of_ones_own(tmp_path: Path, workers: int, context: str | None) -> None:
    dataset = WindowDataset(saved(tmp_path), Windows(length=2))
    expected = starts(LENGTHS, 2)
    assert len(dataset) == len(expected)
    ordered = steps_of(loader(dataset, workers, context, batch_size=4))
    assert ordered == expected
    if context != "spawn":
        generator = torch.Generator().manual_seed(0)
        shuffled = steps_of(loader(dataset, workers, context, batch_size=4, shuffle=True, generator=generator))
        assert sorted(shuffled) == expected
        assert shuffled != expected


def test_single_windows_are_found_by_number(tmp_path: Path) -> None:
    dataset = WindowDataset(saved(tmp_path), Windows(length=2))
    expected = starts(LENGTHS, 2)
    for i in (0, 5, len(expected) - 1, -1):
        assert tuple(dataset[i]["obs"][0].tolist()) == expected[i]
    for i in (len(expected), -len(expected) - 1):
        with pytest.raises(IndexError, match=f"window {i}: the dataset has {len(expected)} windows"):
            dataset[i]
    with pytest.raises(ValueError, match="weight='step': items are windows"):
        WindowDataset(saved(tmp_path / "other"), Windows(weight="step"))


# ---- beside writers ------------------------------------------------------------------------------------

NARROW = Schema({"code": Field("int64", chunk_rows=256), "copy": Field("int64", (2,), chunk_rows=100)})
N_ENVS = 8


def narrow(writer: int, episode: Array, t: Array) -> dict[str, Array]:
    code = (writer << 48) + (episode << 20) + t
    return {"code": code, "copy": np.stack([code, ~code], 1)}


class Appender(threading.Thread):
    """Appends to two streams, commits and refreshes, until it is told to stop."""

    def __init__(self, store: Store, reader: Reader) -> None:
        super().__init__(name="appender")
        self._reader = reader
        self._writers = [store.writer(f"w{i}", commit_seconds=None) for i in range(2)]
        self.numbers = {writer.stream: i for i, writer in enumerate(self._writers)}
        self._t = np.zeros((2, N_ENVS), np.int64)
        self._episode = np.zeros((2, N_ENVS), np.int64)
        self._n_episodes = [0, 0]
        self._rng = np.random.default_rng(0)
        self._is_stopped = threading.Event()
        self.errors: list[BaseException] = []
        self.n_commits = 0
        self.step()

    def step(self) -> None:
        for number, writer in enumerate(self._writers):
            for _ in range(20):
                self._append(number, writer)
            writer.commit()
        self._reader.refresh()
        self.n_commits += 1

    def _append(self, number: int, writer: Writer) -> None:
        t, episode = self._t[number], self._episode[number]
        begins = t == 0
        episode[begins] = self._n_episodes[number] + np.arange(begins.sum())
        self._n_episodes[number] += int(begins.sum())
        ends = self._rng.random(N_ENVS) < 0.05
        handles = writer.append(narrow(number, episode, t), envs=range(N_ENVS), terminated=ends)
        assert np.array_equal(handles.episode, episode)
        self._t[number] = np.where(ends, 0, t + 1)

    def run(self) -> None:
        try:
            while not self._is_stopped.is_set():
                self.step()
        except BaseException as error:
            self.errors.append(error)

    def stop(self) -> None:
        self._is_stopped.set()
        self.join()
        for writer in self._writers:
            writer.discard()
        assert not self.errors


def assert_whole(batch: dict[str, Any], numbers: torch.Tensor) -> None:
    """Every row is the one that the index names: none is torn, none another's."""
    stream, episode, t = batch["index"].T
    first = (numbers[stream] << 48) + (episode << 20) + t
    code = first[:, None] + torch.arange(batch["code"].shape[1])
    assert torch.equal(batch["code"], code)
    assert torch.equal(batch["copy"], torch.stack([code, ~code], 2))
    assert torch.equal(batch["is_first"], code & ((1 << 20) - 1) == 0)


def numbers_of(reader: Reader, numbers: dict[str, int]) -> torch.Tensor:
    return torch.tensor([numbers[name] for name in reader.streams])


@pytest.mark.parametrize(("cache_bytes", "n_batches"), [("1GiB", 4000), ("20KB", 100)])
def test_a_million_windows_beside_a_writer_are_whole(cache_bytes: str, n_batches: int) -> None:
    store = trajstore.create(f"memory://beside-{uuid.uuid4().hex}", NARROW)
    reader = Reader(store, cache_bytes=cache_bytes)
    appender = Appender(store, reader)
    numbers = numbers_of(reader, appender.numbers)
    spec, ring = Windows(length=4), Ring(2)
    appender.start()
    try:
        for i in range(n_batches):
            recent = {"recent_steps": 200} if i % 2 else {}  # where parts of chunks are new
            assert_whole(reader.sample(256, spec, out=ring, **recent), numbers)
    finally:
        appender.stop()
    assert appender.n_commits > 2  # how many there are depends on the machine
    assert reader.stats()["n_episodes"] > 16


def test_prefetched_batches_beside_a_writer_are_whole() -> None:
    store = trajstore.create(f"memory://beside-{uuid.uuid4().hex}", NARROW)
    reader = Reader(store, cache_bytes="50KB")
    appender = Appender(store, reader)
    numbers = numbers_of(reader, appender.numbers)
    appender.start()
    try:
        with reader.batches(64, Windows(length=4), prefetch=3, out=Ring(5)) as batches:
            for batch in itertools.islice(batches, 100):
                assert_whole(batch, numbers)
    finally:
        appender.stop()


@pytest.mark.usefixtures("lock_order")
def test_several_threads_may_sample_from_one_reader() -> None:
    store, errors = new_store([20] * 30), []
    reader = Reader(store, cache_bytes=2000)

    def sample() -> None:
        try:
            for _ in range(100):
                steps_of([reader.sample(16, Windows(length=2))])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=sample) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


# ---- a checkpoint beside a thread that takes batches -----------------------------------------------------


class ObservedLock:
    """A lock that calls a function before a thread waits for it, and another after it was released."""

    def __init__(self, lock: Any, before: Callable[[], None], after: Callable[[], None]) -> None:
        self._lock, self._before, self._after = lock, before, after

    def __enter__(self) -> None:
        self._before()
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        self._after()


@pytest.mark.parametrize("prefetch", [1, 3])
def test_a_queue_that_is_planned_again_while_it_is_filled_gets_no_batch_too_many(prefetch: int) -> None:
    """One batch more would be read into the memory of the batch that is in use.

    A thread has filled the queue and looks whether it is full, just when a checkpoint has taken it apart.
    """
    reader = Reader(new_store([10, 10, 10]), seed=3)
    lock = reader.assembler.lock
    is_full, is_empty, is_asked_for = threading.Event(), threading.Event(), threading.Event()
    taken: list[Any] = []
    with reader.batches(4, Windows(), prefetch=prefetch, out=Ring(prefetch + 2)) as batches:
        in_use = next(batches)
        kept = in_use["obs"].clone()
        thread = threading.Thread(target=lambda: taken.append(next(batches)))

        def before() -> None:
            if threading.current_thread() is thread and is_empty.is_set():
                is_asked_for.set()

        def after() -> None:
            if (
                threading.current_thread() is thread
                and len(batches._queue) == prefetch + 1
                and not is_full.is_set()
            ):
                is_full.set()
                assert is_empty.wait(60)

        def requeue(queued: Any) -> None:
            is_empty.set()
            assert is_asked_for.wait(60)
            real_requeue(queued)

        real_requeue, batches._requeue = batches._requeue, requeue  # type: ignore[method-assign]
        reader.assembler.lock = ObservedLock(lock, before, after)  # type: ignore[assignment]
        thread.start()
        assert is_full.wait(60)
        batches.plan_queue_again()
        thread.join(60)
        assert len(taken) == 1
        for item in list(batches._queue):
            item.work.result()  # type: ignore[union-attr]
        assert torch.equal(in_use["obs"], kept)
        assert len(batches._queue) == prefetch
        reader.assembler.lock = lock


@pytest.mark.parametrize("prefetch", [1, 3])
def test_an_iterator_that_waits_to_be_admitted_continues_with_a_ring_of_the_same_size(prefetch: int) -> None:
    """While it waits, its queue holds one batch more than ``prefetch``: the one that is delivered next."""
    store, states = new_store([10, 10, 10]), list[Any]()

    def save(size: int) -> None:
        states.append(batches.state_dict())

    options: dict[str, Any] = {"prefetch": prefetch}
    with Reader(store, seed=3).batches(4, Windows(), admit=save, out=Ring(prefetch + 2), **options) as batches:
        expected = [next(batches)["obs"].clone() for _ in range(12)]
    assert len(states[4]["queued"]) == prefetch + 1
    with Reader(store, seed=3).batches(4, Windows(), out=Ring(prefetch + 2), **options) as again:
        again.load_state_dict(states[4])
        for k in range(4, 12):
            in_use = next(again)["obs"]
            for item in list(again._queue):
                item.work.result()  # type: ignore[union-attr]
            assert torch.equal(in_use, expected[k])
    with Reader(store, seed=3).batches(4, Windows(), prefetch=1, out=Ring(3)) as small:
        if prefetch > 1:
            with pytest.raises(ValueError, match=r"out: expected a ring of at least 5 \(queued \+ 1\), got 3"):
                small.load_state_dict(states[4])
