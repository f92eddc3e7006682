"""Ids of streams and checkpoints, and names of derived columns."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Collection

from trajstore.errors import DataError

_STREAM_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,63}-[0-9a-v]{26}\Z")
_COLUMN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,63}\Z")
_BASE32 = "0123456789abcdefghijklmnopqrstuv"


def new_id(name: str, after: str | None = None) -> str:
    """``<name>-<unique id>``; ids of one name sort by the time they were made, in any case after a given one."""
    earliest = 0 if after is None else (int(after.rpartition("-")[2], 32) >> 80) + 1
    number = (max(time.time_ns() // 1_000_000, earliest) << 80) | int.from_bytes(os.urandom(10), "big")
    return name + "-" + "".join(_BASE32[number >> shift & 31] for shift in range(125, -1, -5))


def derived_id(name: str, of: str, digest: bytes) -> str:
    """``<name>-<unique id>`` from the time of another id and ten bytes: the same wherever it is made."""
    time_part = int(of.rpartition("-")[2], 32) >> 80
    number = (time_part << 80) | int.from_bytes(digest, "big")
    return name + "-" + "".join(_BASE32[number >> shift & 31] for shift in range(125, -1, -5))


def is_stream_id(name: str) -> bool:
    return _STREAM_ID.match(name) is not None


def check_stream_ids(streams: Collection[str], what: str) -> None:
    if isinstance(streams, str) or not isinstance(streams, Collection):
        raise DataError(f"{what}: expected a list of stream ids, got {streams!r:.80}")
    for stream in streams:
        if not isinstance(stream, str) or not is_stream_id(stream):
            raise DataError(f"{what}: expected stream ids, got {stream!r:.80}")


def is_column_name(name: object) -> bool:
    return isinstance(name, str) and _COLUMN_NAME.match(name) is not None and name != "zarr.json"
