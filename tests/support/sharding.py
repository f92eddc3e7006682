"""Streams written by zarr-python: flat or sharded copies of a sealed stream, with a commit record of their own."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from zarr.codecs import BloscCodec, Crc32cCodec, ZstdCodec

from trajstore.format.array_layout import ArrayLayout
from trajstore.format.codec import Codec
from trajstore.format.commit_record import CommitRecord, Replaces
from trajstore.format.ids import new_id

Array = np.ndarray[Any, np.dtype[Any]]


def read_record(root: Path, stream: str) -> CommitRecord:
    return CommitRecord.from_bytes((root / "streams" / stream / "zarr.json").read_bytes(), stream, str(root))


def write_record(root: Path, record: CommitRecord) -> None:
    path = root / record.key
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(record.to_bytes())


def mark(root: Path, record: CommitRecord, **changes: Any) -> CommitRecord:
    """Write another commit of a stream: its record with some parts changed."""
    changed = replace(record, commit=record.commit + 1, **changes)
    write_record(root, changed)
    return changed


def stream_arrays(root: Path, stream: str) -> dict[str, Array]:
    """Every array of a stream, as zarr-python reads it."""
    group = zarr.open_group(root / "streams" / stream, mode="r")
    return {path: np.asarray(group[path][...]) for path in read_record(root, stream).layouts}


def rewrite(root: Path, stream: str, *, chunks_per_shard: int | None, index_at_start: bool = True) -> None:
    """Write all arrays of a sealed stream again with zarr-python, in place; same values, other objects."""
    record, arrays = read_record(root, stream), stream_arrays(root, stream)
    for child in (root / "streams" / stream).iterdir():
        if child.is_dir():
            shutil.rmtree(child)
    layouts = sharded(record.layouts, chunks_per_shard, index_at_start)
    write_arrays(root, stream, layouts, arrays)
    write_record(root, replace(record, layouts=layouts))


def pack(root: Path, stream: str, start: int, stop: int, *, chunks_per_shard: int = 2) -> str:
    """Copy rows of a stream, on the bounds of spans, into a new sealed stream that replaces them."""
    record, arrays = read_record(root, stream), stream_arrays(root, stream)
    layouts = sharded(record.layouts, chunks_per_shard, index_at_start=True)
    packed = {path: values[start:stop] for path, values in arrays.items() if path.startswith("steps/")}
    packed |= _packed_spans(arrays, start, stop, is_last=stop == record.rows)
    copy = replace(
        record,
        id=new_id("packed"),
        name="packed",
        layouts=layouts,
        rows=stop - start,
        spans=len(packed["spans/ints"]),
        text_bytes=len(packed["spans/text"]),
        created_at=record.created_at + 1,
        replaces=Replaces(stream, start, stop),
    )
    write_arrays(root, copy.id, layouts, packed)
    write_record(root, copy)
    return copy.id


def _packed_spans(arrays: Mapping[str, Array], start: int, stop: int, *, is_last: bool) -> dict[str, Array]:
    ints, floats, text = (arrays[f"spans/{name}"] for name in ("ints", "floats", "text"))
    row_start, row_stop, text_stop = ints[:, 3], ints[:, 4], ints[:, 8]
    text_start = np.concatenate([[0], text_stop[:-1]]).astype(np.int64)
    within = (row_start >= start) & (row_stop <= stop) & ((row_start < stop) | is_last)
    kept = np.flatnonzero(within)
    parts = [text[text_start[k] : text_stop[k]] for k in kept]
    moved = ints[kept].copy()
    moved[:, 3:5] -= start
    moved[:, 8] = np.cumsum([len(part) for part in parts])
    joined = np.concatenate([*parts, np.empty(0, np.uint8)])
    return {"spans/ints": moved, "spans/floats": floats[kept], "spans/text": joined}


def sharded(
    layouts: Mapping[str, ArrayLayout], chunks_per_shard: int | None, index_at_start: bool
) -> dict[str, ArrayLayout]:
    return {
        path: replace(
            layout,
            shard_rows=layout.chunk_rows * chunks_per_shard if chunks_per_shard else None,
            index_at_start=index_at_start,
        )
        for path, layout in layouts.items()
    }


def write_arrays(root: Path, stream: str, layouts: Mapping[str, ArrayLayout], arrays: Mapping[str, Array]) -> None:
    """Create arrays of these layouts with zarr-python, every chunk written, and check that the layouts say so."""
    group = zarr.open_group(root / "streams" / stream, mode="a")
    for path, layout in layouts.items():
        values = arrays[path]
        array = group.create_array(
            path,
            shape=values.shape,
            dtype=layout.dtype,
            chunks=(layout.chunk_rows, *layout.row_shape),
            shards=_shards(layout),
            compressors=_compressors(layout.codec, layout.dtype.itemsize),
            fill_value=layout.dtype.type(0),
            chunk_key_encoding={"name": "default", "separator": "."},
            attributes=dict(layout.attributes),
            dimension_names=layout.dimensions,
            config={"write_empty_chunks": True},
        )
        array[...] = values
        written = json.loads((root / "streams" / stream / path / "zarr.json").read_text())
        assert ArrayLayout.from_metadata(written, path) == (layout, len(values))


def _shards(layout: ArrayLayout) -> Any:
    if layout.shard_rows is None:
        return None
    location = "start" if layout.index_at_start else "end"
    return {"shape": (layout.shard_rows, *layout.row_shape), "index_location": location}


def _compressors(codec: Codec, itemsize: int) -> list[Any]:
    if codec.name == "zstd":
        return [ZstdCodec(level=codec.level), Crc32cCodec()]
    if codec.name == "blosc":
        blosc = BloscCodec(
            typesize=codec.typesize or itemsize,
            cname=codec.cname,
            clevel=codec.level,
            shuffle=codec.shuffle,
            blocksize=codec.blocksize,
        )
        return [blosc, Crc32cCodec()]
    return [Crc32cCodec()]
