"""Shard objects: many encoded chunks in one object, with an index at its start or end."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trajstore.format.array_layout import ArrayLayout
from trajstore.format.codec import Codec

_ABSENT = (1 << 64) - 1  # offset and size of a chunk that a shard does not hold


def assemble_shard(layout: ArrayLayout, chunks: Sequence[bytes | None]) -> bytes:
    """The object that holds encoded chunks, each with its checksum, in order.

    Args:
        layout: The layout of the array, which is sharded.
        chunks: The chunks of the shard, already encoded; None where the shard holds none. Those after the last one
            given are absent as well.
    """
    index = np.full((layout.chunks_per_shard, 2), _ABSENT, np.uint64)
    offset = layout.shard_index_bytes if layout.index_at_start else 0
    for i, chunk in enumerate(chunks):
        if chunk is not None:
            index[i] = offset, len(chunk)
            offset += len(chunk)
    encoded = Codec("none").encode(index)
    present = [chunk for chunk in chunks if chunk is not None]
    return b"".join((encoded, *present) if layout.index_at_start else (*present, encoded))
