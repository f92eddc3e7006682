"""Frames that do not fit in the cache are read from mapped files, block by block: same batches, damage is found."""

from __future__ import annotations

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
    decoders = BlockDecoders()
    decoders.reserve(block_bytes)
    data = np.frombuffer(chunk, np.uint8).copy()
    table = np.array([-(int(data.ctypes.data) + BLOCKED)])
    out = np.full((len(wanted), row_bytes), 77, np.uint8)
    column = np.array([0, row_bytes, table.ctypes.data, n_rows, 0, 0])
    places = out.ctypes.data + row_bytes * np.arange(len(wanted))
    found = block_loops.copy_blocked_rows(decoders.address(1), column, wanted, places)
    return int(found), out


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


@settings(max_examples=200, deadline=None)
@given(place=st.integers(0, 10_000), bit=st.integers(0, 7), shuffle=st.sampled_from([0, 1]))
def test_damage_after_the_check_never_reads_or_writes_elsewhere(place: int, bit: int, shuffle: int) -> None:
    rows = frames(16, (16, 16), 0).reshape(16, -1)
    chunk = bytearray(numcodecs.blosc.compress(rows, b"zstd", 1, shuffle, 1024, 4))
    place %= len(chunk)
    if not 12 <= place < 16:  # the size of the chunk itself, which is what bounds are checked against
        chunk[place] ^= 1 << bit
    found, out = copied(bytes(chunk), 16, 256, np.arange(16), 1024)
    assert found in (block_loops.COPIED, block_loops.DAMAGED)
    assert out.shape == (16, 256)
