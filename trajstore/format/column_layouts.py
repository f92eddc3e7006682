"""Chooses the layouts of a new stream's columns: which are compressed, and how many chunks share an object."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from trajstore.format.array_layout import WIDE_ROW_BYTES, ArrayLayout, rows_within
from trajstore.schema import Field, Schema

# A field whose compressor leaves more than this share of its bytes is stored as it is: reading single rows of
# uncompressed chunks is many times faster. Measured shares: noise and the states of control tasks 0.80 to 0.95,
# float64 made of float32 0.50, discrete actions and sparse rewards 0.05 to 0.25, Atari frames below 0.06.
MAX_STORED_SHARE = 0.6
# A commit writes the last, part-filled object of every column again, on average half of it. Together they have
# about the bytes of a few commits, so a commit writes about four times what was appended.
_COMMITS_IN_LAST_OBJECTS = 5
_LEAST_LAST_OBJECTS_BYTES = 256 << 10  # but not less than this, however small the commits are
_LEAST_OBJECT_BYTES = 16 << 10  # a smaller file takes as long to write
_LEAST_FRAMES_BYTES = 1 << 20  # decoded; frames usually take a small part of it on storage
# Several objects are in memory at a time, so with a small buffer they are smaller.
_OBJECT_BYTES, _OBJECTS_OF_BUFFER = 8 << 20, 8
_LAST_OBJECTS_BYTES = 32 << 20  # and at most half of the buffer
_DECODED_OBJECT_BYTES = 64 << 20
_MAX_CHUNKS_PER_OBJECT = 1024
# A chunk that is not compressed is stored whole, however few rows it has.
_RAW_CHUNKS_PER_OBJECT = 4


@dataclass(frozen=True, slots=True)
class KnownRows:
    """What a writer knows of its rows when it chooses layouts.

    Attributes:
        n_rows: Rows of the first commit.
        commit_steps: Rows after which the writer commits; None: not by count.
        shares: By field: stored bytes of a sample, compressed, divided by its bytes. Fields with too few rows to
            tell are missing.
        buffer_bytes: Memory for steps that are not durable. Objects in memory are bounded in proportion to it.
    """

    n_rows: int = 0
    commit_steps: int | None = None
    shares: Mapping[str, float] = field(default_factory=dict)
    buffer_bytes: int = 64 << 20


def column_layouts(schema: Schema, known: KnownRows) -> dict[str, ArrayLayout]:
    """The layout of every field's column, by field; a field that declares its chunks gets what it declares."""
    flat = {path: _flat_layout(spec, known.shares.get(path)) for path, spec in schema.fields.items()}
    stored = {  # bytes of a row on storage, about
        path: layout.row_bytes * (1.0 if layout.codec.name == "none" else known.shares.get(path, 1.0))
        for path, layout in flat.items()
    }
    object_bytes = min(_OBJECT_BYTES, known.buffer_bytes // _OBJECTS_OF_BUFFER)
    commit_bytes = sum(stored.values()) * max(known.n_rows, known.commit_steps or 0)
    last_bytes = max(_LEAST_LAST_OBJECTS_BYTES, _COMMITS_IN_LAST_OBJECTS * commit_bytes)
    last_bytes = min(last_bytes, _LAST_OBJECTS_BYTES, known.buffer_bytes // 2)
    total = sum(math.sqrt(n) for n in stored.values())
    layouts = {}
    for path, spec in schema.fields.items():
        layouts[path] = flat[path]
        if spec.chunk_rows is None:
            # Sizes in proportion to the square root of a row's bytes give the fewest objects for a sum of sizes.
            n_bytes = max(_LEAST_OBJECT_BYTES, min(object_bytes, last_bytes * math.sqrt(stored[path]) / total))
            layouts[path] = _with_objects(flat[path], spec, n_bytes / stored[path])
    return layouts


def _flat_layout(spec: Field, share: float | None) -> ArrayLayout:
    return ArrayLayout.of(spec, is_compressed=None if share is None else share <= MAX_STORED_SHARE)


def _with_objects(flat: ArrayLayout, spec: Field, wanted: float) -> ArrayLayout:
    """A layout whose objects have about as many rows as wanted, a power of two, and chunks that fit in them."""
    rows = min(wanted, _DECODED_OBJECT_BYTES / spec.row_bytes, _MAX_CHUNKS_PER_OBJECT * flat.chunk_rows)
    object_rows = 1 << round(math.log2(max(1.0, rows)))
    chunk_rows = flat.chunk_rows
    if flat.is_raw:
        least = rows_within(_LEAST_OBJECT_BYTES, spec)
        chunk_rows = min(chunk_rows, max(least, object_rows // _RAW_CHUNKS_PER_OBJECT))
    elif spec.row_bytes >= WIDE_ROW_BYTES:
        object_rows = max(object_rows, rows_within(_LEAST_FRAMES_BYTES, spec))
    if object_rows <= chunk_rows:
        return replace(flat, chunk_rows=chunk_rows)
    return replace(flat, chunk_rows=chunk_rows, shard_rows=object_rows)
