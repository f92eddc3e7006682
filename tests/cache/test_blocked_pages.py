"""Frames that do not fit in the cache are read from mapped files, block by block: same batches, damage is found."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import threading
from pathlib import Path
from typing import Any

import numcodecs.blosc
import numpy as np
import pytest
import tensorstore
import torch
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

import trajstore
from tests.cache.test_cache import chunk_file
from tests.cache.test_mapped_pages import deleted_files_in_memory, mapped_pages
from trajstore import CorruptionError, Field, Reader, ReplayBuffer, Schema, Windows
from trajstore.cache.block_decoders import BLOCKED, BlockDecoders
from trajstore.format.blosc_blocks import encode_blocks
from trajstore.format.codec import crc32c
from trajstore.format.zstd_library import zstd_library
from trajstore.sampling.compiled import block_loops
from trajstore.storage.file_maps import can_map_files

Array = np.ndarray[Any, np.dtype[Any]]
FIELDS = {
    "frame": Field("uint8", (64, 64), final=True, chunk_rows=32),  # blocks of 16 rows
    "stack": Field("uint8", (32, 32, 4), final=True, chunk_rows=8),  # one shuffled block
    "noise": Field("uint8", (64, 64), chunk_rows=32),
    "action": Field("int64"),
}


@pytest.fixture(autouse=True)
def local(tmp_path: Path) -> None:
    if not can_map_files(tmp_path) or zstd_library() is None:
        pytest.skip("blocks are not mapped here")


def frames(n: int, shape: tuple[int, ...], seed: int) -> Array:
    """Mostly the same from row to row, so that they compress."""
    rows = np.zeros((n, *shape), np.uint8)
    rows[:, ::5] = np.random.default_rng(seed).integers(0, 9, rows[0, ::5].shape)
    rows[:, 1, : shape[1] // 2] = np.arange(n).reshape(-1, *[1] * (len(shape) - 1)) % 251
    return rows


def episode(k: int, n: int) -> dict[str, Array]:
    return {
        "frame": frames(n + 1, (64, 64), k),
        "stack": frames(n + 1, (32, 32, 4), k),
        "noise": np.random.default_rng(k).integers(0, 256, (n, 64, 64), np.uint8),
        "action": np.arange(n),
    }


def stored(root: Path, lengths: tuple[int, ...] = (30, 1, 50, 20)) -> tuple[trajstore.Store, str]:
    store = trajstore.create(root, Schema(FIELDS), fsync=False)
    with store.writer() as writer:
        for k, n in enumerate(lengths):
            writer.append_episode(episode(k, n), terminated=True)
    store.refresh()
    return store, writer.stream


KINDS = Windows.transitions(), Windows(20, boundary="pad_both"), Windows(3)


@pytest.mark.parametrize("kind", KINDS, ids=["transitions", "padded", "short"])
@pytest.mark.parametrize("n_threads", [1, 2])
def test_batches_are_those_of_a_large_cache(tmp_path: Path, kind: Windows, n_threads: int) -> None:
    store, _ = stored(tmp_path)
    before = torch.get_num_threads()
    torch.set_num_threads(n_threads)
    try:
        small, large = (Reader(store, cache_bytes=n, seed=5) for n in (1, 1 << 30))
        for n in (64, 64, 3, 64, 64, 64):
            ours, theirs = (flattened(reader.sample(n, kind)) for reader in (small, large))
            assert ours.keys() == theirs.keys()
            assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    finally:
        torch.set_num_threads(before)
    assert mapped_pages(small) > 0
    assert not mapped_pages(large)


def flattened(batch: Any, prefix: str = "") -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for key, value in batch.items():
        found |= {prefix + key: value} if isinstance(value, torch.Tensor) else flattened(value, f"{key}/")
    return found


def test_without_the_functions_of_zstd_batches_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, _ = stored(tmp_path)
    blocked = Reader(store, cache_bytes=1, seed=5)
    expected = [flattened(blocked.sample(32, Windows.transitions())) for _ in range(4)]
    monkeypatch.setattr("trajstore.store.stream_reader.zstd_library", lambda: None)
    plain = Reader(store, cache_bytes=1, seed=5)
    for batch in expected:
        found = flattened(plain.sample(32, Windows.transitions()))
        assert all(torch.equal(found[key], value) for key, value in batch.items())
    assert blocked.assembler.cache._columns["frame"].table.n_mapped
    assert not plain.assembler.cache._columns["frame"].table.n_mapped


def test_a_settled_batch_is_one_compiled_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, _ = stored(tmp_path)
    reader = Reader(store, cache_bytes=1, seed=5)
    for _ in range(30):
        reader.sample(64, Windows.transitions())
    monkeypatch.setattr(type(reader.assembler.cache), "gather", lambda *_: pytest.fail("a page is missing"))
    for _ in range(10):
        reader.sample(64, Windows.transitions())


# ---- a cache that holds a part


CHUNK_BYTES = 32 * 64 * 64


def test_half_of_a_column_is_kept_decoded_and_the_rest_is_mapped(tmp_path: Path) -> None:
    store = trajstore.create(tmp_path, Schema({"frame": FIELDS["frame"]}), fsync=False)
    with store.writer() as writer:
        for k in range(10):
            writer.append_episode({"frame": frames(33, (64, 64), k)}, terminated=True)
    store.refresh()
    n = 11  # chunks
    for n_slots, kept in ((2, 0), (5, 0), (7, 7), (10, 10), (11, 11)):
        reader = Reader(store, cache_bytes=n_slots * CHUNK_BYTES, seed=5)
        large = Reader(store, cache_bytes=1 << 30, seed=5)
        for size in (64, 64, 3, 64, 64, 64, 64, 64):
            ours, theirs = (flattened(r.sample(size, Windows.transitions())) for r in (reader, large))
            assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
        table = reader.assembler.cache._columns["frame"].table
        assert (table.n_resident, table.n_mapped) == (kept, n - kept)
        assert not reader.stats()["evictions"]
        assert reader.stats()["bytes_decoded"] <= kept * CHUNK_BYTES  # each once


def test_mapped_columns_leave_the_cache_to_others(tmp_path: Path) -> None:
    """They need no slots, not even those without which other columns can't be read."""
    fields = {"frame": FIELDS["frame"], "action": Field("int64", chunk_rows=8, codec="zstd:1")}
    store = trajstore.create(tmp_path, Schema(fields), fsync=False)
    with store.writer() as writer:
        writer.append_episode({"frame": frames(101, (64, 64), 0), "action": np.arange(100)}, terminated=True)
    store.refresh()
    reader = Reader(store, cache_bytes=2000, seed=0)
    for _ in range(20):
        reader.sample(32, Windows())
    columns = reader.assembler.cache._columns
    assert columns["action"].table.is_complete
    assert reader.assembler.cache.nbytes <= 2000


@pytest.mark.parametrize("n_slots", [4, 12])
def test_staged_draws_do_not_depend_on_what_can_be_mapped(tmp_path: Path, n_slots: int) -> None:
    """Their segments follow from the size of the cache and the columns alone, wherever a store lies."""
    store, _ = stored(tmp_path / "store", (30, 1, 50, 20) * 4)
    trajstore.copy(tmp_path / "store", other := f"memory://{tmp_path.name}-{n_slots}")
    runs, n_mapped = [], []
    for each, compiled in ((store, True), (trajstore.open(other), True), (store, False)):
        reader = Reader(each, cache_bytes=n_slots * CHUNK_BYTES, seed=8, compiled=compiled)
        with reader.staged(8, Windows(2)) as batches:
            runs.append([next(batches)["index"].tolist() for _ in range(30)])
            assert batches.stats()["n_segments"] > 17
        n_mapped.append(mapped_pages(reader))
    assert runs[0] == runs[1] == runs[2]
    assert [n > 0 for n in n_mapped] == [True, False, False]


def test_zarr_and_tensorstore_read_the_same(tmp_path: Path) -> None:
    _, stream = stored(tmp_path)
    for name in ("frame", "stack", "noise"):
        expected = np.concatenate([_column(k, n, name) for k, n in enumerate((30, 1, 50, 20))])
        path = f"streams/{stream}/steps/{name}"
        assert np.array_equal(zarr.open_array(str(tmp_path / path), mode="r")[:], expected)
        spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{tmp_path}/{path}/"}}
        assert (tensorstore.open(spec, read=True).result().read().result() == expected).all()


def _column(k: int, n: int, name: str) -> Array:
    rows = episode(k, n)[name]
    final = np.zeros((n + 1 - len(rows), *rows.shape[1:]), rows.dtype)
    return np.concatenate([rows, final])


def test_a_live_buffer_reads_back_what_it_committed(tmp_path: Path) -> None:
    options: dict[str, Any] = {"cache_bytes": "100KiB", "commit_seconds": None, "fsync": False}
    with ReplayBuffer(tmp_path / "store", schema=Schema({"x": FIELDS["noise"]}), **options) as buffer:
        rows = episode(0, 120)["noise"]
        for t in range(120):
            buffer.append({"x": rows[t]}, terminated=t == 119)
            if t % 7 == 6:
                buffer.flush()
            if t > 8:
                batch = buffer.sample(8, Windows(2))
                start = batch["index"][:, 2].numpy()
                assert (batch["x"].numpy() == rows[start[:, None] + np.arange(2)]).all()
    assert deleted_files_in_memory() == 0


# ---- damage


@pytest.mark.parametrize("place", [0, 2, 4, 8, 12, 17, 30, 200, -6, -1])
def test_a_flipped_bit_is_found_and_named(tmp_path: Path, place: int) -> None:
    store, stream = stored(tmp_path)
    file = chunk_file(tmp_path, stream, "frame", 1)
    file = file if file.exists() else file.with_name("c.1.0.0")
    damaged = bytearray(file.read_bytes())
    damaged[place] ^= 1
    file.write_bytes(damaged)
    with pytest.raises(CorruptionError, match=r"steps/frame.*chunk 1 \(rows 32 to 64\)"):
        Reader(store, cache_bytes=1, seed=0).sample(256, Windows())


@pytest.mark.parametrize("place", [0, 2, 8, 17, 24])
def test_a_chunk_that_was_damaged_before_its_checksum_was_made_is_named(tmp_path: Path, place: int) -> None:
    store, stream = stored(tmp_path)
    file = chunk_file(tmp_path, stream, "frame", 1)
    file = file if file.exists() else file.with_name("c.1.0.0")
    damaged = bytearray(file.read_bytes())[:-4]
    damaged[place] ^= 255
    file.write_bytes(damaged + crc32c(bytes(damaged)).to_bytes(4, "little"))
    reader = Reader(store, cache_bytes=1, seed=0)
    for _ in range(3):
        with pytest.raises(CorruptionError, match=r"steps/frame.*chunk 1 \(rows 32 to 64\)"):
            reader.sample(256, Windows())


# ---- one chunk


def copied(chunk: bytes, n_rows: int, row_bytes: int, wanted: Array, block_bytes: int) -> tuple[int, Array]:
    """What the compiled loop copies of a chunk, and what it returns."""
    return copied_at(
        np.frombuffer(chunk, np.uint8).copy().ctypes, len(chunk), n_rows, row_bytes, wanted, block_bytes
    )


def copied_at(
    chunk: Any, n_bytes: int, n_rows: int, row_bytes: int, wanted: Array, block_bytes: int
) -> tuple[int, Array]:
    """The same for a chunk at a memory address, ``chunk.data``."""
    decoders = BlockDecoders()
    decoders.reserve(block_bytes)
    table, sizes = np.array([-(int(chunk.data) + BLOCKED)]), np.array([n_bytes])
    out = np.full((len(wanted) + 1, row_bytes), 77, np.uint8)  # one row more, which stays as it is
    column = np.array([0, row_bytes, table.ctypes.data, n_rows, 0, sizes.ctypes.data])
    places = out.ctypes.data + row_bytes * np.arange(len(wanted))
    found = block_loops.copy_blocked_rows(decoders.address(1), column, wanted, places)
    assert (out[-1] == 77).all()
    return int(found), out[:-1]


CASES = st.tuples(
    st.integers(1, 20), st.integers(1, 300), st.sampled_from([1, 2, 3, 4, 8]), st.integers(0, 3), st.integers(0, 99)
)


@settings(max_examples=150, deadline=None)
@given(case=CASES, shuffle=st.sampled_from([0, 1]), level=st.sampled_from([0, 1, 5]), blocks=st.integers(1, 2000))
def test_chunks_of_blosc_are_read_row_by_row(
    case: tuple[int, int, int, int, int], shuffle: int, level: int, blocks: int
) -> None:
    n_rows, row_bytes, typesize, noise, seed = case
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, 1 + 60 * noise, (n_rows, row_bytes)).astype(np.uint8)
    chunk = bytes(numcodecs.blosc.compress(rows, b"zstd", level, shuffle, blocks, typesize))
    wanted = rng.integers(0, n_rows, 7)
    found, out = copied(chunk, n_rows, row_bytes, wanted, int.from_bytes(chunk[8:12], "little"))
    assert found == block_loops.COPIED
    assert (out == rows[wanted]).all()


@settings(max_examples=50, deadline=None)
@given(case=CASES, blocks=st.integers(1, 2000))
def test_chunks_that_are_written_in_blocks_are_read_by_blosc(
    case: tuple[int, int, int, int, int], blocks: int
) -> None:
    n_rows, row_bytes, _, noise, seed = case
    rows = np.random.default_rng(seed).integers(0, 1 + 60 * noise, n_rows * row_bytes).astype(np.uint8)
    chunk = encode_blocks(memoryview(rows), min(blocks, len(rows)))  # type: ignore[arg-type]
    assert bytes(numcodecs.blosc.decompress(chunk)) == rows.tobytes()
    found, out = copied(chunk, n_rows, row_bytes, np.arange(n_rows), blocks)
    assert found == block_loops.COPIED
    assert (out.reshape(-1) == rows).all()


class Guarded:
    """A copy of bytes that ends where the memory of the process does: reading behind it would end the process.

    Attributes:
        data: Its memory address.
    """

    def __init__(self, content: bytes) -> None:
        n = -(-len(content) // mmap.PAGESIZE) * mmap.PAGESIZE
        self._pages = mmap.mmap(-1, n + mmap.PAGESIZE)
        start = np.frombuffer(self._pages, np.uint8).ctypes.data
        libc = ctypes.CDLL(None, use_errno=True)
        assert not libc.mprotect(ctypes.c_void_p(start + n), ctypes.c_size_t(mmap.PAGESIZE), 0)
        self.data = start + n - len(content)
        self.bytes = np.frombuffer(self._pages, np.uint8)[n - len(content) : n]
        self.bytes[:] = np.frombuffer(content, np.uint8)


def blosc_chunk(shuffle: int) -> bytearray:
    rows = frames(16, (16, 16), 0).reshape(16, -1)
    return bytearray(numcodecs.blosc.compress(rows, b"zstd", 1, shuffle, 1024, 4))


@settings(max_examples=300, deadline=None)
@given(
    changes=st.lists(st.tuples(st.integers(0, 999) | st.integers(0, 31), st.integers(1, 255)), max_size=4),
    shuffle=st.sampled_from([0, 1]),
    stop=st.integers(0, 999) | st.just(1000),
)
def test_damage_after_the_check_never_reads_or_writes_elsewhere(
    changes: list[tuple[int, int]], shuffle: int, stop: int
) -> None:
    chunk = blosc_chunk(shuffle)
    for place, flips in changes:
        chunk[place % len(chunk)] ^= flips
    data = Guarded(bytes(chunk[:stop]))
    found, _ = copied_at(data, len(chunk[:stop]), 16, 256, np.arange(16), 1024)
    assert found in (block_loops.COPIED, block_loops.DAMAGED)


@pytest.mark.parametrize("place", range(12, 16))
def test_the_size_that_a_chunk_names_is_not_used(place: int) -> None:
    chunk = blosc_chunk(0)
    expected = copied(bytes(chunk), 16, 256, np.arange(16), 1024)
    chunk[place] ^= 255
    found, out = copied(bytes(chunk), 16, 256, np.arange(16), 1024)
    assert found == block_loops.COPIED
    assert (out == expected[1]).all()


def test_a_start_or_a_size_beyond_the_chunk_is_damage() -> None:
    for place in (16, 17, 18, 19, int.from_bytes(blosc_chunk(0)[16:20], "little") + 2):
        chunk = blosc_chunk(0)
        chunk[12:16] = b"\xff\xff\xff\x7f"  # as if there were room
        chunk[place] ^= 64
        found, _ = copied_at(Guarded(bytes(chunk)), len(chunk), 16, 256, np.arange(4), 1024)
        assert found == block_loops.DAMAGED


@pytest.mark.parametrize("shuffle", [0, 1])
def test_a_chunk_that_changes_while_it_is_read_never_leads_elsewhere(shuffle: int) -> None:
    chunk = bytes(blosc_chunk(shuffle))
    data, is_done = Guarded(chunk), threading.Event()
    rng = np.random.default_rng(0)

    def edit() -> None:
        while not is_done.is_set():
            for place in rng.integers(0, len(chunk), 50).tolist() + rng.integers(0, 24, 50).tolist():
                data.bytes[place] ^= 1 << place % 8
            data.bytes[:] = np.frombuffer(chunk, np.uint8)

    editor = threading.Thread(target=edit)
    editor.start()
    try:
        for _ in range(300):
            found, _ = copied_at(data, len(chunk), 16, 256, np.arange(16), 1024)
            assert found in (block_loops.COPIED, block_loops.DAMAGED)
    finally:
        is_done.set()
        editor.join()


def test_a_file_that_is_edited_after_its_check_gives_rows_or_an_error(tmp_path: Path) -> None:
    store, stream = stored(tmp_path)
    reader = Reader(store, cache_bytes=1, seed=5)
    for _ in range(20):
        reader.sample(64, Windows.transitions())
    file = chunk_file(tmp_path, stream, "frame", 1)
    file = file if file.exists() else file.with_name("c.1.0.0")
    good, rng = file.read_bytes(), np.random.default_rng(0)
    with file.open("r+b") as edited:
        for places in ([12, 13, 14, 15], *rng.integers(0, len(good), (30, 3)).tolist()):
            damaged = bytearray(good)
            for place in places:
                damaged[place] ^= 255
            edited.seek(0)
            edited.write(damaged)  # in place: the mapped pages change
            edited.flush()
            with contextlib.suppress(CorruptionError):  # or rows that no check notices
                reader.sample(64, Windows.transitions())
            edited.seek(0)
            edited.write(good)
            edited.flush()
            for _ in range(2):
                reader.sample(64, Windows.transitions())
