"""Shard objects: many encoded chunks in one object, with an index at its start or end."""

from __future__ import annotations

from collections.abc import Sequence

from trajstore.format.array_layout import ArrayLayout


def assemble_shard(layout: ArrayLayout, chunks: Sequence[bytes | None]) -> bytes:
    """The object that holds encoded chunks, each with its checksum, in order.

    Args:
        layout: The layout of the array, which is sharded.
        chunks: The chunks of the shard, already encoded; None where the shard holds none. Those after the last one
            given are absent as well.
    """
    encoded = layout.encode_shard_index([None if chunk is None else len(chunk) for chunk in chunks])
    present = [chunk for chunk in chunks if chunk is not None]
    return b"".join((encoded, *present) if layout.index_at_start else (*present, encoded))
