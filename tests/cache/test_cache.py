"""The chunk cache: budgets, pins, tiers, live rows, stale tails, damaged chunks, and the memory of the index."""

from __future__ import annotations

import shutil
import time
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import trajstore
from tests.sampling.test_batch_iterator import FIELDS, open_store, write
from tests.support.sharding import mark, pack, read_record
from trajstore import CorruptionError, Field, Reader, Schema, SnapshotExpiredError, Store, Windows
from trajstore.cache.chunk_cache import ChunkCache
from trajstore.cache.compressed_tier import CompressedTier
from trajstore.cache.row_request import RowRequest
from trajstore.format.commit_record import SessionView

OBS_PAGE, ACTION_PAGE = 4 * 16, 8 * 8


def sealed(root: Path, lengths: list[int]) -> tuple[Store, str]:
    store, writer = open_store(lengths, root)
    writer.close()
    store.refresh()
    return store, writer.stream


def check(batch: dict[str, Any]) -> dict[str, Any]:
    """Every step is the one that the index names."""
    expected = batch["index"][:, None, 1:].repeat(1, batch["obs"].shape[1], 1)
    expected[..., 1] += torch.arange(batch["obs"].shape[1])
    assert torch.equal(batch["obs"], expected)
    assert torch.equal(batch["action"], expected[..., 1])
    return batch


def everything(reader: Reader, windows: Windows | None = None) -> None:
    for batch in reader.epoch(64, windows or Windows()):
        check(batch)


def all_of(*episodes: int, n: int = 4) -> torch.Tensor:
    return torch.tensor([[0, k, t] for k in episodes for t in range(n)])


# ---- figures and budgets -------------------------------------------------------------------------------


class SlowlyCounted:
    """Counters whose value is read long before it is written back."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def __getattr__(self, name: str) -> int:
        found = self.__dict__["counts"].get(name, 0)
        time.sleep(0.002)
        return int(found)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "counts":
            super().__setattr__(name, value)
        else:
            self.counts[name] = value


def test_no_count_is_lost_when_several_threads_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    store, _ = open_store([4] * 40)
    found = []
    for n_threads in (1, 4):
        monkeypatch.setattr("trajstore.cache.chunk_fetcher._N_CPUS", n_threads)
        reader, counted = Reader(store), SlowlyCounted()
        reader.assembler.cache._loader._fetcher._stats = counted  # type: ignore[assignment]
        reader.at(all_of(*range(40)), Windows())
        found.append(counted.counts["bytes_read"])
    assert found[0] == found[1]


def test_the_figures_say_what_was_done() -> None:
    store, _ = open_store([4] * 10)
    reader = Reader(store)
    assert reader.stats()["misses"] == 0
    check(reader.at(all_of(0, 1), Windows(fields=None)))
    stats = reader.stats()
    assert stats["misses"] == 2 + 1  # two chunks of obs, one of action
    assert stats["hits"] == stats["evictions"] == stats["host_hits"] == stats["n_parts"] == 0
    assert stats["bytes_decoded"] == 2 * OBS_PAGE + ACTION_PAGE
    assert stats["bytes_read"] > 0
    check(reader.at(all_of(1, 2), Windows()))
    stats = reader.stats()
    assert stats["misses"] == 3 + 2
    assert stats["hits"] == 2
    assert set(stats["seconds"]) == {"plan", "load", "gather"}
    assert stats["n_syncs"] == 0
    assert (stats["n_episodes"], stats["n_spans"]) == (10, 10)


def test_every_chunk_is_decoded_once_however_many_windows_need_it() -> None:
    store, _ = open_store([64])
    reader = Reader(store)
    reader.sample(500, Windows(length=8, offsets={"obs": (-1, 0, 1)}))
    assert reader.stats()["misses"] == 64 // 4 + 64 // 8


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(1, 8)), min_size=1, max_size=3),
    st.integers(1, 60),
    st.integers(0, 3000),
)
def test_arenas_stay_within_the_budget(columns: list[tuple[int, int]], n_rows: int, above: int) -> None:
    """From two chunks a field on, which it takes to make any progress."""
    fields = {f"f{i}": Field("uint8", (width,), chunk_rows=rows) for i, (width, rows) in enumerate(columns)}
    store = trajstore.create(f"memory://budget-{uuid.uuid4().hex}", Schema(fields))
    with store.writer() as writer:
        data = {name: np.zeros((n_rows, *f.shape), np.uint8) for name, f in fields.items()}
        writer.append_episode(data, terminated=True)
    store.refresh()
    budget = sum(2 * width * rows for width, rows in columns) + above
    reader = Reader(store, cache_bytes=budget)
    reader.sample(16, Windows())
    assert reader.stats()["cache_bytes"] <= budget


def test_the_budget_holds_while_the_store_grows() -> None:
    store, writer = open_store([4])
    budget = 10 * OBS_PAGE + 10 * ACTION_PAGE
    reader = Reader(store, cache_bytes=budget)
    for k in range(1, 60):
        write(writer, [4], first=k)
        reader.refresh()
        check(reader.sample(32, Windows(length=2)))
        assert reader.stats()["cache_bytes"] <= budget
    assert reader.stats()["evictions"] > 0


@pytest.mark.parametrize("n_chunks", range(2, 12))
def test_a_store_that_outgrows_a_cache_it_just_filled_is_still_read(n_chunks: int) -> None:
    store, writer = open_store([4] * 4)
    reader = Reader(store, cache_bytes=n_chunks * OBS_PAGE)
    everything(reader)
    write(writer, [4] * 8, first=4)
    reader.refresh()
    everything(reader)


def test_a_cache_too_small_for_a_batch_assembles_it_in_parts() -> None:
    store, _ = open_store([4] * 50)
    small, large = Reader(store, cache_bytes=1, seed=1), Reader(store, seed=1)
    for spec in (Windows(length=3), Windows(length=4, offsets={"obs": (-1, 0)}), Windows(boundary="pad_both")):
        expected, got = large.sample(64, spec), small.sample(64, spec)
        assert all(torch.equal(expected[key], got[key]) for key in expected)
    assert small.stats()["n_parts"] > 0
    assert large.stats()["n_parts"] == 0
    assert small.stats()["cache_bytes"] == 2 * OBS_PAGE + 2 * ACTION_PAGE


def test_the_least_recently_used_chunk_goes_first() -> None:
    store, _ = open_store([4] * 20, fields={"obs": FIELDS["obs"], "action": Field("int64", chunk_rows=4)})
    reader = Reader(store, cache_bytes=4 * (OBS_PAGE + 32))
    spec = Windows(fields=["obs"])

    def misses(*episodes: int) -> int:
        before = reader.stats()["misses"]
        reader.at(all_of(*episodes), spec)
        return int(reader.stats()["misses"] - before)

    slots = reader.assembler.cache._columns["obs"].table.n_slots
    assert slots >= 3
    assert misses(*range(slots)) == slots
    assert misses(0) == 0
    assert misses(10) == 1  # takes the place of 1, as 0 was just used
    assert misses(0) == 0
    assert misses(*range(2, slots)) == 0
    assert misses(1) == 1


# ---- pin, invalidate, resize ---------------------------------------------------------------------------


def test_pinned_chunks_stay() -> None:
    store, _ = open_store([4] * 40)
    reader = Reader(store, cache_bytes=8 * (OBS_PAGE + ACTION_PAGE))
    spec = Windows(fields=["obs"])
    reader.pin(all_of(0, 1), spec)
    assert reader.stats()["misses"] == 2
    for _ in range(30):
        check(reader.sample(3, Windows()))
    before = reader.stats()
    reader.at(all_of(0, 1), spec)
    assert reader.stats()["misses"] == before["misses"]
    reader.unpin()
    for k in range(2, 40):
        reader.at(all_of(k), spec)
    reader.at(all_of(0, 1), spec)
    assert reader.stats()["misses"] >= before["misses"] + 38


def test_what_does_not_fit_is_not_pinned() -> None:
    store, _ = open_store([4] * 40)
    reader = Reader(store, cache_bytes=8 * (OBS_PAGE + ACTION_PAGE))
    with pytest.raises(ValueError, match=r"field 'obs': 40 chunks can't be pinned, the cache holds \d+; pin fewer"):
        reader.pin(all_of(*range(40)), Windows())
    assert all(column.table.n_pinned == 0 for column in reader.assembler.cache._columns.values())
    check(reader.sample(64, Windows()))


def test_pinning_the_same_again_changes_nothing() -> None:
    store, _ = open_store([4] * 40)
    reader = Reader(store, cache_bytes=16 * (OBS_PAGE + ACTION_PAGE))
    n = reader.assembler.cache._columns["obs"].table.n_slots - 2
    for _ in range(3):
        reader.pin(all_of(*range(n)), Windows(fields=["obs"]))
    everything(reader)


@pytest.mark.parametrize("then", ["invalidate", "resize", "grow", "grow the tail"])
def test_a_reader_with_everything_pinned_goes_on(then: str) -> None:
    store, writer = open_store([4] * 7 + [2])
    reader = Reader(store, cache_bytes=8 * OBS_PAGE + 4 * ACTION_PAGE)
    everything(reader)
    reader.pin(all_of(*range(7)), Windows())
    reader.pin(all_of(7, n=2), Windows())
    if then == "invalidate":
        reader.invalidate()
    elif then == "resize":
        reader.resize(cache_bytes=4 * OBS_PAGE + 2 * ACTION_PAGE)
    else:
        write(writer, [2] if then == "grow the tail" else [4] * 9, first=8)
        reader.refresh()
    everything(reader)
    reader.unpin()
    everything(reader)


def test_invalidated_chunks_are_read_again() -> None:
    store, _ = open_store([4] * 10)
    reader = Reader(store, host_cache_bytes="1MiB")
    everything(reader)
    before = reader.stats()
    everything(reader)
    assert reader.stats()["misses"] == before["misses"]
    reader.invalidate()
    assert reader.stats()["host_cache_bytes"] == 0
    everything(reader)
    after = reader.stats()
    assert after["misses"] == 2 * before["misses"]
    assert after["bytes_read"] == 2 * before["bytes_read"]
    assert after["host_hits"] == 0


def test_resizing_keeps_what_fits_and_changes_no_values() -> None:
    store, _ = open_store([4] * 40)
    reader = Reader(store)
    everything(reader)
    for chunks in (20, 5, 2, 30, 1000):
        reader.resize(cache_bytes=chunks * (OBS_PAGE + ACTION_PAGE))
        assert reader.stats()["cache_bytes"] <= chunks * (OBS_PAGE + ACTION_PAGE)
        everything(reader)
    before = reader.stats()["misses"]
    everything(reader)
    assert reader.stats()["misses"] == before
    reader.resize(cache_bytes=20 * (OBS_PAGE + ACTION_PAGE))
    reader.resize(cache_bytes="1MiB")
    everything(reader)
    assert 0 < reader.stats()["misses"] - before < 60


# ---- the tier of compressed chunks ---------------------------------------------------------------------


def test_the_host_tier_spares_reads(tmp_path: Path) -> None:
    store, stream = sealed(tmp_path, [4] * 40)
    reader = Reader(store, cache_bytes=1, host_cache_bytes="1MiB")
    everything(reader)
    before = reader.stats()
    assert before["host_cache_bytes"] > 0
    shutil.rmtree(tmp_path / "streams" / stream / "steps")
    everything(reader)
    after = reader.stats()
    assert after["bytes_read"] == before["bytes_read"]
    assert after["host_hits"] > before["host_hits"]


@pytest.mark.parametrize("budget", [300, 1000])
def test_the_host_tier_stays_within_its_budget(budget: int) -> None:
    store, _ = open_store([4] * 40)
    reader = Reader(store, cache_bytes=1, host_cache_bytes=budget)
    for _ in range(20):
        check(reader.sample(16, Windows()))
        assert reader.stats()["host_cache_bytes"] <= budget
    assert reader.stats()["host_cache_bytes"] > 0
    reader.resize(host_cache_bytes=100)
    assert reader.stats()["host_cache_bytes"] <= 100


def test_the_host_tier_can_be_turned_off() -> None:
    store, _ = open_store([4] * 4)
    reader = Reader(store, host_cache_bytes=0)
    everything(reader)
    assert reader.stats()["host_cache_bytes"] == 0
    reader.resize(host_cache_bytes=0)


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 40), st.sampled_from(["put", "get", "drop"]))))
def test_the_host_tier_is_a_least_recently_used_cache(actions: list[tuple[int, int, str]]) -> None:
    tier, model, budget = CompressedTier(60), dict[int, bytes](), 60
    for key, size, action in actions:
        name = ("s", "p", key)
        if action == "put" and size <= budget:
            tier.put(name, memoryview(bytes(size)))
            model.pop(key, None)
            model[key] = bytes(size)
            while sum(map(len, model.values())) > budget:
                model.pop(next(iter(model)))
        elif action == "get":
            assert tier.get(name) == model.get(key)
            if key in model:
                model[key] = model.pop(key)
        elif action == "drop":
            tier.drop(name)
            model.pop(key, None)
        assert tier.nbytes == sum(map(len, model.values()))


# ---- live rows -----------------------------------------------------------------------------------------


def live_cache(store: Store, budget: int, live_rows: int, compiled: bool) -> ChunkCache:
    from trajstore.sampling.compiled.selection import compiled_loops

    device, snapshot = torch.device("cpu"), store.snapshot
    assert snapshot.schema is not None
    kernels = compiled_loops(device, compiled)
    cache = ChunkCache(snapshot.schema, device, budget, 0, snapshot.storage, live_rows=live_rows, kernels=kernels)
    cache.set_sources(snapshot.readers)
    return cache


def gathered(cache: ChunkCache, source: list[int], row: list[int]) -> dict[str, torch.Tensor]:
    rows, sources = torch.tensor(row, dtype=torch.int64)[None], torch.tensor(source, dtype=torch.int32)[None]
    return cache.gather({path: RowRequest(path, sources, rows) for path in FIELDS}, {})


def test_rows_of_a_page_that_is_not_there_are_an_error_and_not_what_lies_beside() -> None:
    store, _ = open_store([4] * 30)
    cache = live_cache(store, 1 << 20, 0, compiled=True)
    assert gathered(cache, [1] * 120, list(range(120)))["obs"][0, 50].tolist() == [12, 2]
    for column in cache._columns.values():
        page = np.array([50 // column.page_rows])
        column.table.forget(page)
        column.table.n_resident += 1  # as if nothing were missing
    with pytest.raises(RuntimeError, match="field 'obs': row 50 of a batch is not in the cache"):
        gathered(cache, [1, 1], [0, 50])


def test_nothing_is_gathered_of_no_rows() -> None:
    store, _ = open_store([4] * 3)
    assert gathered(live_cache(store, 1 << 20, 0, compiled=True), [], [])["obs"].shape[:2] == (1, 0)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("budget", [1, 1 << 20])
def test_live_and_stored_rows_are_gathered_together(budget: int, compiled: bool) -> None:
    store, _ = open_store([4] * 30)
    cache = live_cache(store, budget, 10, compiled)
    rng = np.random.default_rng(0)
    for round_ in range(12):
        rows = torch.from_numpy(rng.permutation(10)[:5].copy())
        values = torch.stack([torch.full((5,), -1 - round_), rows], 1)
        cache.write_live(rows, {"obs": values, "action": rows - 1000 * (round_ + 1)})
        stored = rng.integers(0, 120, 20).tolist()
        got = gathered(cache, [0] * 5 + [1] * 20, rows.tolist() + stored)
        assert torch.equal(got["obs"][0, :5], values)
        assert torch.equal(got["action"][0, :5], rows - 1000 * (round_ + 1))
        assert got["obs"][0, 5:].tolist() == [[r // 4, r % 4] for r in stored]
        assert got["action"][0, 5:].tolist() == [r % 4 for r in stored]


@pytest.mark.parametrize("then", ["invalidate", "resize", "grow", "other chunks"])
def test_live_rows_are_never_lost(then: str) -> None:
    store, writer = open_store([4] * 30)
    cache = live_cache(store, 2000, 10, True)
    rows = torch.arange(10)
    values = {"obs": torch.stack([rows, -rows], 1), "action": rows * 7}
    cache.write_live(rows, values)
    if then == "invalidate":
        cache.invalidate()
        cache.unpin()
    elif then == "resize":
        cache.resize(1, 0)
        cache.resize(5000, 0)
    elif then == "grow":
        write(writer, [4] * 100, first=30)
        cache.set_sources(store.refresh().readers)
    else:
        cache.set_sources([*store.snapshot.readers, *other_chunks((6, 5), 4, 6).readers])
    gathered(cache, [1] * 120, list(range(120)))
    got = gathered(cache, [0] * 10, list(range(10)))
    assert torch.equal(got["obs"][0], values["obs"])
    assert torch.equal(got["action"][0], values["action"])


# ---- several streams, growing tails --------------------------------------------------------------------


def test_streams_with_chunks_of_different_sizes_are_read_together() -> None:
    store, _ = open_store([5] * 6)
    snapshots = [store.snapshot, *(other_chunks(rows, 5, 6) for rows in ((6, 4), (3, 16)))]
    for budget in (1, 1 << 20):
        cache = live_cache(store, budget, 0, True)
        for n in (1, 2, 3):  # pages become smaller as streams join
            cache.set_sources([reader for snapshot in snapshots[:n] for reader in snapshot.readers])
            rng = np.random.default_rng(n)
            for _ in range(5):
                source, row = rng.integers(1, n + 1, 40).tolist(), rng.integers(0, 30, 40).tolist()
                got = gathered(cache, source, row)
                assert got["obs"][0].tolist() == [[r // 5, r % 5] for r in row]
                assert got["action"][0].tolist() == [r % 5 for r in row]


def other_chunks(chunk_rows: tuple[int, int], length: int, n: int) -> trajstore.Snapshot:
    """Episodes in chunks of other sizes, as writers with other settings would make them."""
    rows = dict(zip(FIELDS, chunk_rows, strict=True))
    fields = {name: replace(f, chunk_rows=rows[name]) for name, f in FIELDS.items()}
    return open_store([length] * n, fields=fields)[0].snapshot


def test_a_tail_that_grew_is_read_again() -> None:
    for host_bytes in (None, "1MiB"):
        store, writer = open_store([3])
        reader = Reader(store, host_cache_bytes=host_bytes)
        for k in range(1, 30):
            everything(reader)
            write(writer, [1 + k % 3], first=k)
            reader.refresh()
        everything(reader)


def test_an_older_snapshot_shows_its_own_rows_beside_a_newer_one() -> None:
    store, writer = open_store([3, 3])
    old = Reader(store.snapshot)
    everything(old)
    write(writer, [3] * 5, first=2)
    new = Reader(store)
    new.refresh()
    old.refresh()  # a snapshot does not change
    assert old.n_windows(Windows()) == 6
    assert new.n_windows(Windows()) == 21
    old.invalidate()
    everything(old)
    everything(new)


def test_a_stream_that_was_replaced_and_removed_leaves_no_trace(tmp_path: Path) -> None:
    store, stream = sealed(tmp_path, [4] * 8)
    reader = Reader(store)
    everything(reader)
    pack(tmp_path, stream, 0, 32)
    reader.refresh()
    shutil.rmtree(tmp_path / "streams" / stream)
    reader.refresh()
    everything(reader)
    assert reader.n_windows(Windows()) == 32


def test_a_stream_that_is_gone_is_not_drawn_from(tmp_path: Path) -> None:
    store, stream = sealed(tmp_path, [4] * 8)
    with store.writer("other") as writer:
        write(writer, [5], first=0)
    store.refresh()
    reader = Reader(store)
    shutil.rmtree(tmp_path / "streams" / stream)
    reader.refresh()
    assert reader.n_windows(Windows()) == 5
    check(reader.sample(32, Windows()))


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 9)), min_size=1, max_size=25), st.sampled_from([1, 900])
)
def test_streams_that_grow_in_turn_are_read_right(turns: list[tuple[int, int]], cache_bytes: int) -> None:
    store = trajstore.create(f"memory://turns-{uuid.uuid4().hex}", Schema(FIELDS))
    writers = [store.writer(f"w{i}", commit_seconds=None) for i in range(3)]
    counts = [0, 0, 0]
    reader = Reader(store, cache_bytes=cache_bytes)
    plain = Reader(store, compiled=False)
    for i, n in turns:
        write(writers[i], [n], first=counts[i])
        counts[i] += 1
        for one in (reader, plain):
            one.refresh()
            check(one.sample(8, Windows()))
    everything(reader)
    everything(plain)


# ---- damaged and missing chunks ------------------------------------------------------------------------


def chunk_file(root: Path, stream: str, path: str, chunk: int) -> Path:
    files = (root / "streams" / stream / "steps" / path).glob("c.*")
    return next(file for file in files if file.name.split(".")[1] == str(chunk))


def flip(file: Path) -> bytes:
    whole = file.read_bytes()
    damaged = bytearray(whole)
    damaged[len(damaged) // 2] ^= 1
    file.write_bytes(damaged)
    return whole


@pytest.mark.parametrize("host_bytes", [None, "1MiB"])
@pytest.mark.parametrize("cache_bytes", [1, 1 << 20])
def test_a_damaged_chunk_is_named_and_the_rest_stays_readable(
    tmp_path: Path, cache_bytes: int, host_bytes: Any
) -> None:
    store, stream = sealed(tmp_path, [6] * 10)
    reader = Reader(store, cache_bytes=cache_bytes, host_cache_bytes=host_bytes)
    check(reader.at(torch.tensor([[0, 0, 0], [0, 9, 0]]), Windows()))
    file = chunk_file(tmp_path, stream, "obs", 4)  # rows 16 to 19, of episodes 2 and 3
    whole = flip(file)
    for _ in range(2):
        with pytest.raises(CorruptionError) as caught:
            reader.sample(200, Windows())
        for part in (str(tmp_path), stream, "steps/obs", "chunk 4 (rows 16 to 20)", "episodes [2, 3]"):
            assert part in str(caught.value)
    others = torch.tensor([[0, k, t] for k in (0, 1, 4, 5, 9) for t in range(6)])
    check(reader.at(others, Windows()))
    reader.sample(200, Windows(fields=["action"]))
    file.write_bytes(whole)
    everything(reader)


def test_a_long_list_of_damaged_episodes_is_cut_short(tmp_path: Path) -> None:
    store, stream = sealed(tmp_path, [1] * 20)
    flip(chunk_file(tmp_path, stream, "action", 1))
    with pytest.raises(CorruptionError, match=r"episodes \[8, 9, 10, 11, 12\] and 3 more"):
        Reader(store).sample(100, Windows())


def test_a_missing_chunk_is_corruption(tmp_path: Path) -> None:
    store, stream = sealed(tmp_path, [6] * 10)
    reader = Reader(store)
    file = chunk_file(tmp_path, stream, "obs", 4)
    whole = file.read_bytes()
    file.unlink()
    with pytest.raises(
        CorruptionError, match=r"chunk 4 \(rows 16 to 20\) is missing; .* episodes \[2, 3\]"
    ) as caught:
        reader.sample(200, Windows())
    assert not isinstance(caught.value, SnapshotExpiredError)
    file.write_bytes(whole)
    everything(reader)


def evict(root: Path, stream: str, first_row: int) -> None:
    writer = trajstore.open(root, fsync=False).writer("session")
    writer.append({"obs": np.zeros(2, np.int64), "action": 0})
    writer.abort_episode()
    writer.close()
    view = SessionView(first_rows={stream: first_row}, discarded={writer.stream: (0,)})
    mark(root, read_record(root, writer.stream), view=view)


@pytest.mark.parametrize("call", ["sample", "pin", "epoch", "staged"])
def test_an_evicted_chunk_says_that_the_snapshot_expired(tmp_path: Path, call: str) -> None:
    store, stream = sealed(tmp_path, [8] * 10)
    reader = Reader(store, cache_bytes=1000)
    evict(tmp_path, stream, 40)
    for path, rows in (("obs", 4), ("action", 8)):
        for chunk in range(40 // rows):
            chunk_file(tmp_path, stream, path, chunk).unlink()
    calls = {
        "sample": lambda: reader.sample(200, Windows()),
        "pin": lambda: reader.pin(all_of(0), Windows()),
        "epoch": lambda: list(reader.epoch(16, Windows())),
        "staged": lambda: [next(batches) for batches in [reader.staged(16, Windows())] for _ in range(50)],
    }
    with pytest.raises(SnapshotExpiredError, match=f"stream '{stream}' were evicted; refresh"):
        calls[call]()
    reader.refresh()
    everything(reader)
    assert reader.n_windows(Windows()) == 40


# ---- memory of the index, compiled loops ---------------------------------------------------------------


def test_the_index_takes_few_bytes_an_episode() -> None:
    n, length = 100_000, 3
    store = trajstore.create(f"memory://many-{uuid.uuid4().hex}", Schema({"x": Field("int32")}))
    with store.writer(commit_seconds=None, buffer_bytes="64MiB") as writer:
        ends = np.zeros((length, 1000), bool)
        ends[-1] = True
        for _ in range(n // 1000):
            writer.append_rollout({"x": np.zeros((length, 1000), np.int32)}, terminated=ends)
            writer.commit()
    store.refresh()
    reader = Reader(store)
    stats, index = reader.stats(), reader.assembler.index
    assert stats["n_episodes"] == n
    assert stats["n_spans"] >= n
    assert index.nbytes - index.span_nbytes <= 64 * n
    assert index.span_nbytes <= 32 * stats["n_spans"]
    assert reader.n_windows(Windows(length=2)) == 2 * n
    assert stats["index_bytes"] == index.nbytes


def test_compiled_loops_are_compiled_once() -> None:
    from trajstore.sampling.compiled import batch_loops as kernels
    from trajstore.sampling.compiled import program_loops

    store, writer = open_store([6] * 30)
    reader = Reader(store, cache_bytes=900)
    specs = (
        Windows(),
        Windows(length=3, boundary="pad_both", pad="zero"),
        Windows(length=2, offsets={"obs": (-1, 0)}, next_fields=["obs"]),
        Windows(length=4, boundary="cross", weight="step"),
        Windows(length=2, weight="episode", stride=2, strict_context=True, burn_in=1),
    )
    for _ in range(2):
        for spec in specs:
            reader.sample(8, spec)
            reader.sample(8, spec, out=reader.sample(8, spec))
            reader.sample(8, spec, recent_steps=20)
        list(reader.epoch(8, specs[1], shuffle=False))
        reader.at(torch.tensor([[0, 1, 2]]), specs[0])
        reader.sample_episodes(4)
        with store.writer("more", commit_seconds=None) as more:
            write(more, [3] * 4)
        write(writer, [2], first=100)
        reader.refresh()
    for name in ("draw", "distinct_pages", "copy_columns"):
        assert len(getattr(kernels, name).signatures) == 1, name
    assert program_loops.run_parts.is_compiled
