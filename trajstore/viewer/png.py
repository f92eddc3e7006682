"""Encodes images as PNG, with nothing but zlib."""

from __future__ import annotations

import struct
import zlib

import numpy as np

from trajstore.errors import DataError
from trajstore.schema import Array

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_COLOUR_TYPES = {1: 0, 3: 2, 4: 6}  # by number of channels: grey, RGB, RGBA
_UP = 2  # the filter that stores each row as its difference from the row above


def encode_png(image: Array, *, level: int = 6) -> bytes:
    """Encode a uint8 image of shape ``[height, width]`` or ``[height, width, channels]``; 1, 3 or 4 channels.

    Raises:
        DataError: It has another dtype or shape.
    """
    pixels = image[:, :, None] if image.ndim == 2 else image
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] not in _COLOUR_TYPES or not pixels.size:
        raise DataError(f"image: expected uint8 of 1, 3 or 4 channels, got {image.dtype} of shape {image.shape}")
    height, width, channels = pixels.shape
    rows = pixels.reshape(height, width * channels)
    filtered = np.empty((height, width * channels + 1), np.uint8)
    filtered[:, 0] = _UP
    filtered[0, 1:] = rows[0]
    filtered[1:, 1:] = rows[1:] - rows[:-1]  # wraps, as the format wants
    header = struct.pack(">IIBBBBB", width, height, 8, _COLOUR_TYPES[channels], 0, 0, 0)
    data = zlib.compress(filtered.tobytes(), level)
    return _SIGNATURE + _chunk(b"IHDR", header) + _chunk(b"IDAT", data) + _chunk(b"IEND", b"")


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
