"""Ids of streams and checkpoints, and names of derived columns."""

from __future__ import annotations

import os
import re
import time

_STREAM_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,63}-[0-9a-v]{26}\Z")
_COLUMN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,63}\Z")
_BASE32 = "0123456789abcdefghijklmnopqrstuv"


def new_id(name: str, after: str | None = None) -> str:
    """A new id ``<name>-<unique part>``. Ids of one name sort by the time they were made.

    Args:
        name: What the id begins with.
        after: An id that the new one must sort after, whatever the clock says.
    """
    earliest = 0 if after is None else _milliseconds(after) + 1
    return _format_id(name, max(time.time_ns() // 1_000_000, earliest), os.urandom(10))


def derived_id(name: str, of: str, digest: bytes) -> str:
    """An id ``<name>-<unique part>`` from the time of another id and ten bytes; equal arguments give equal ids."""
    return _format_id(name, _milliseconds(of), digest)


def _milliseconds(id_: str) -> int:
    return int(id_.rpartition("-")[2], 32) >> 80


def _format_id(name: str, milliseconds: int, last_ten: bytes) -> str:
    number = (milliseconds << 80) | int.from_bytes(last_ten, "big")
    return name + "-" + "".join(_BASE32[number >> shift & 31] for shift in range(125, -1, -5))


def is_stream_id(name: str) -> bool:
    return _STREAM_ID.match(name) is not None


def is_column_name(name: object) -> bool:
    return isinstance(name, str) and _COLUMN_NAME.match(name) is not None and name != "zarr.json"
