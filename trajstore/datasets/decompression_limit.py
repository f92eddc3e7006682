"""Find out whether a chunk is too large when decoded, before it is decoded.

A damaged or hostile chunk of a few bytes may decode to gigabytes.
"""

from __future__ import annotations

import bz2
import lzma
import struct
import zlib
from collections.abc import Callable
from typing import Any

_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_ZSTD_SIZE_FORMATS = {1: "<H", 2: "<I", 3: "<Q"}
_GZIP = zlib.MAX_WBITS | 16


def exceeds_decoded_size(codec: str, data: bytes, max_bytes: int) -> bool:
    """Return whether a chunk decodes to more than ``max_bytes``, or its decoded size is unknown.

    Image codecs and chunks without a codec are not checked.
    """
    if codec in _SIZES_IN_HEADER:
        size = _SIZES_IN_HEADER[codec](data)
        return size is None or size > max_bytes
    return codec in _DECOMPRESSORS and _exceeds_when_decompressed(_DECOMPRESSORS[codec](), data, max_bytes)


def _exceeds_when_decompressed(decompressor: Any, data: bytes, max_bytes: int) -> bool:
    """Decompress up to the limit.

    Data after the first stream counts as too large: no writer puts several streams in a chunk, but decoders
    would decode them all.
    """
    try:
        return len(decompressor.decompress(data, max_bytes + 1)) > max_bytes or bool(decompressor.unused_data)
    except (OSError, EOFError, zlib.error, lzma.LZMAError):
        return True


def _unpack_at(layout: str, data: bytes, start: int) -> int | None:
    end = start + struct.calcsize(layout)
    return int(struct.unpack(layout, data[start:end])[0]) if len(data) >= end else None


def _zstd_size(data: bytes) -> int | None:
    """Return the decoded size in the header of the first frame; a chunk has one frame."""
    if data[:4] != _ZSTD_MAGIC or len(data) < 5:
        return 0  # not zstd; decoding it fails at once
    size_kind, is_single_segment, dictionary_kind = data[4] >> 6, bool(data[4] & 0x20), data[4] & 3
    start = 5 + (not is_single_segment) + (0, 1, 2, 4)[dictionary_kind]
    if not size_kind:
        return _unpack_at("<B", data, start) if is_single_segment else None
    size = _unpack_at(_ZSTD_SIZE_FORMATS[size_kind], data, start)
    return size + 256 if size_kind == 1 and size is not None else size


_SIZES_IN_HEADER: dict[str, Callable[[bytes], int | None]] = {
    "blosc": lambda data: _unpack_at("<I", data, 4),
    "lz4": lambda data: _unpack_at("<I", data, 0),
    "zstd": _zstd_size,
}
_DECOMPRESSORS: dict[str, Callable[[], Any]] = {
    "zlib": zlib.decompressobj,
    "gzip": lambda: zlib.decompressobj(_GZIP),
    "bz2": bz2.BZ2Decompressor,
    "lzma": lambda: lzma.LZMADecompressor(memlimit=1 << 30),
}
