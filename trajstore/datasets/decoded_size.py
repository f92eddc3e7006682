"""How large a chunk becomes when it is decoded, told before it is: a few bytes may stand for gigabytes."""

from __future__ import annotations

import bz2
import lzma
import struct
import zlib
from collections.abc import Callable
from typing import Any

_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_ZSTD_FORMATS = {1: "<H", 2: "<I", 3: "<Q"}
_GZIP = zlib.MAX_WBITS | 16


def is_larger(codec: str, data: bytes, n_bytes: int) -> bool:
    """Whether a chunk that this codec encoded would take more than so many bytes, or can't be told to take less.

    Codecs of images, and arrays without one, are taken to keep to their bounds.
    """
    if codec in _HEADERS:
        size = _HEADERS[codec](data)
        return size is None or size > n_bytes
    return codec in _STREAMS and _is_stream_larger(_STREAMS[codec](), data, n_bytes)


def _is_stream_larger(stream: Any, data: bytes, n_bytes: int) -> bool:
    """Decode up to that size. Nobody writes several streams to a chunk, but those who decode it would take them."""
    try:
        return len(stream.decompress(data, n_bytes + 1)) > n_bytes or bool(stream.unused_data)
    except (OSError, EOFError, zlib.error, lzma.LZMAError):
        return True


def _at(layout: str, data: bytes, start: int) -> int | None:
    end = start + struct.calcsize(layout)
    return int(struct.unpack(layout, data[start:end])[0]) if len(data) >= end else None


def _zstd_size(data: bytes) -> int | None:
    """Of the first frame; there are no others in a chunk."""
    if data[:4] != _ZSTD_MAGIC or len(data) < 5:
        return 0  # not encoded by it, which is found out at once
    kind, is_single, dictionary = data[4] >> 6, bool(data[4] & 0x20), data[4] & 3
    start = 5 + (not is_single) + (0, 1, 2, 4)[dictionary]
    if not kind:
        return _at("<B", data, start) if is_single else None
    size = _at(_ZSTD_FORMATS[kind], data, start)
    return size + 256 if kind == 1 and size is not None else size


_HEADERS: dict[str, Callable[[bytes], int | None]] = {
    "blosc": lambda data: _at("<I", data, 4),
    "lz4": lambda data: _at("<I", data, 0),
    "zstd": _zstd_size,
}
_STREAMS: dict[str, Callable[[], Any]] = {
    "zlib": zlib.decompressobj,
    "gzip": lambda: zlib.decompressobj(_GZIP),
    "bz2": bz2.BZ2Decompressor,
    "lzma": lambda: lzma.LZMADecompressor(memlimit=1 << 30),
}
