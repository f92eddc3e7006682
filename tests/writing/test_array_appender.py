"""The objects that appending to one array makes: others read them, retries repeat them, full ones are let go."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore
import zarr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trajstore import Field
from trajstore.format.array_layout import ArrayLayout
from trajstore.format.codec import Codec
from trajstore.schema import as_array
from trajstore.storage import ANY, UNSEEN, open_storage
from trajstore.testing import strategies as ours
from trajstore.testing.model import assert_same_bits
from trajstore.writing.array_appender import ArrayAppender
from trajstore.writing.commit_batch import NewRows

Array = np.ndarray[Any, np.dtype[Any]]
many = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])


def stored(values: Any) -> Array:
    """Values in their dtype on disk, in memory of their own."""
    return np.ascontiguousarray(as_array("", values)[0])


@st.composite
def growths(draw: st.DrawFn) -> tuple[Field, list[NewRows]]:
    """A field, and the rows of some commits: in order, or to be taken in another order."""
    spec = draw(ours.fields())
    commits = []
    for n in draw(st.lists(st.integers(1, 40), min_size=1, max_size=6)):
        rows = stored(draw(ours.values(spec, (n,))))
        order = np.array(draw(st.permutations(range(n)))) if draw(st.booleans()) else None
        commits.append(NewRows(rows, order))
    return spec, commits


class Growing:
    """An array in a directory, and the appender that writes it."""

    def __init__(self, layout: ArrayLayout) -> None:
        self.root = Path(tempfile.mkdtemp())
        self.layout = layout
        self.appender = ArrayAppender("x", layout)
        self.storage = open_storage(str(self.root), None, fsync=False)
        self.n_bytes = 0
        self.describe()

    def describe(self) -> None:
        (self.root / "x").mkdir(exist_ok=True)
        (self.root / "x" / "zarr.json").write_text(json.dumps(self.layout.metadata(self.appender.rows)))

    def commit(self, new: NewRows) -> None:
        versions = self.storage.put_many(self.appender.puts(new, UNSEEN))
        self.n_bytes += int(self.appender.advance(len(new), versions).n_bytes.sum())
        self.describe()

    def read_by_zarr(self) -> Array:
        return np.asarray(zarr.open_array(self.root / "x", mode="r")[...])

    def read_by_tensorstore(self) -> Array:
        kvstore = {"driver": "file", "path": f"{self.root}/x"}
        return np.asarray(tensorstore.open({"driver": "zarr3", "kvstore": kvstore}).result().read().result())

    def sizes(self) -> dict[str, int]:
        return {file.name: file.stat().st_size for file in (self.root / "x").glob("c.*")}


def joined(commits: Sequence[NewRows]) -> Array:
    return np.concatenate([new.to_array() for new in commits])


@given(growths())
@many
def test_zarr_and_tensorstore_read_every_commit_bit_by_bit(growth: tuple[Field, list[NewRows]]) -> None:
    spec, commits = growth
    array = Growing(ArrayLayout.of(spec))
    for n, new in enumerate(commits, 1):
        array.commit(new)
        assert_same_bits(array.read_by_zarr(), joined(commits[:n]), f"after commit {n}")
    assert_same_bits(array.read_by_tensorstore(), joined(commits), "tensorstore")


@given(growths())
@many
def test_the_bytes_of_all_commits_are_those_of_the_objects(growth: tuple[Field, list[NewRows]]) -> None:
    spec, commits = growth
    array = Growing(ArrayLayout.of(spec))
    for new in commits:
        array.commit(new)
        padding = array.layout.padding_bytes(array.appender.rows)  # zeros do not count
        assert array.n_bytes == sum(array.sizes().values()) - padding
    n_objects = -(-array.appender.rows // array.layout.object_rows)
    assert len(array.sizes()) == n_objects


@given(growths())
@many
def test_a_commit_that_is_tried_again_puts_the_same_bytes(growth: tuple[Field, list[NewRows]]) -> None:
    spec, commits = growth
    once, again = (ArrayAppender("x", ArrayLayout.of(spec)) for _ in range(2))
    for new in commits:
        expected = {put.key: bytes(put.make()) for put in once.puts(new, UNSEEN)}
        for put in again.puts(new, UNSEEN)[:1]:
            put.make()  # an attempt that failed after its first object
        for _ in range(2):
            assert {put.key: bytes(put.make()) for put in again.puts(new, UNSEEN)} == expected
        once.advance(len(new), {})
        again.advance(len(new), {})


@given(growths())
@many
def test_the_pieces_of_an_object_are_its_bytes(growth: tuple[Field, list[NewRows]]) -> None:
    spec, commits = growth
    appender = ArrayAppender("x", ArrayLayout.of(spec))
    for new in commits:
        for put in appender.puts(new, UNSEEN):
            data = bytes(put.make())
            if put.make_pieces is not None:
                assert b"".join(put.make_pieces()) == data
        appender.advance(len(new), {})


def test_full_shards_of_an_uncompressed_column_are_written_without_a_copy() -> None:
    layout = ArrayLayout(np.dtype("int32"), (2,), 4, Codec("none"), shard_rows=16)
    appender = ArrayAppender("x", layout)
    appender.advance(0, {})
    for n, n_copied, n_shared in ((6, 0, 0), (45, 1, 10), (13, 1, 3)):
        rows = np.arange(2 * n, dtype=np.int32).reshape(n, 2)
        puts = appender.puts(NewRows(rows), UNSEEN)
        chunks = [
            np.frombuffer(piece, np.int32)
            for put in puts
            if put.make_pieces is not None
            for piece in put.make_pieces()
            if len(piece) == layout.chunk_bytes
        ]
        shared = [chunk for chunk in chunks if np.shares_memory(chunk, rows)]
        assert (len(chunks) - len(shared), len(shared)) == (n_copied, n_shared)
        for put in puts:
            put.make()
        appender.advance(n, {})


LAYOUTS = [
    ArrayLayout(np.dtype("int32"), (2,), 4, codec, shard_rows=shard_rows)
    for codec in (Codec("none"), Codec.parse("zstd:1"), Codec.parse("blosc-lz4"))
    for shard_rows in (None, 16)
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_part_filled_object_is_replaced_by_its_version_and_others_are_new(layout: ArrayLayout) -> None:
    appender = ArrayAppender("x", layout)
    rows = NewRows(np.arange(2 * 3, dtype=np.int32).reshape(3, 2))
    size = layout.object_rows
    for start in range(0, 5 * size, 3):
        puts = appender.puts(rows, UNSEEN)
        grown = "version 1" if start % size else UNSEEN
        assert [put.expect for put in puts] == [grown, *(UNSEEN for _ in puts[1:])]
        for put in puts:
            put.make()
        appender.advance(3, {put.key: "version 1" for put in puts})


@pytest.mark.parametrize("codec", ["none", "zstd:1"])
def test_complete_chunks_of_a_shard_stay_where_they_are_and_others_are_absent(codec: str) -> None:
    layout = ArrayLayout(np.dtype("int64"), (), 4, Codec.parse(codec), shard_rows=16)
    appender, before = ArrayAppender("x", layout), np.empty((0, 2), np.uint64)
    for n in range(16):
        (put,) = appender.puts(NewRows(np.array([n])), ANY)
        data = bytes(put.make())
        index = layout.decode_shard_index(data[: layout.shard_index_bytes])
        n_chunks = n // 4 + 1
        assert (index[n_chunks:] == 2**64 - 1).all()
        assert (index[: n_chunks - 1] == before[: n_chunks - 1]).all()
        assert len(data) == int(index[n_chunks - 1].sum())
        appender.advance(1, {})
        before = index


def test_complete_chunks_are_not_encoded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = ArrayLayout(np.dtype("int64"), (), 4, Codec.parse("zstd:1"), shard_rows=64)
    appender = ArrayAppender("x", layout)
    n_encoded = []
    encode = ArrayLayout.encode
    monkeypatch.setattr(ArrayLayout, "encode", lambda self, chunk: n_encoded.append(1) or encode(self, chunk))
    for _ in range(15):
        for put in appender.puts(NewRows(np.arange(4)), ANY):
            put.make()
        appender.advance(4, {})
    assert len(n_encoded) == 15


@pytest.mark.parametrize("codec", ["none", "zstd:1"])
def test_nothing_is_kept_of_full_shards(codec: str) -> None:
    layout = ArrayLayout(np.dtype("int64"), (), 4, Codec.parse(codec), shard_rows=16)
    appender = ArrayAppender("x", layout)
    for n in (16, 40, 8):
        for put in appender.puts(NewRows(np.arange(n)), ANY):
            put.make()
        full = [made for number, made in appender._made.items() if (number + 1) * 16 <= appender.rows + n]
        assert all(len(made.encoded) == 0 and made.tail is None for made in full)
        appender.advance(n, {})
    assert appender.rows % 16 == 0
    assert len(appender._last.encoded) == 0
    assert not appender._made
