"""Writes a GIF frame by frame, so that an episode of any length needs the memory of one frame."""

from __future__ import annotations

import io
import struct
from typing import Any, BinaryIO

from trajstore.errors import MissingExtraError
from trajstore.schema import Array

MAX_GIF_FPS = 50  # browsers show frames of less than two hundredths of a second slowly
_LOOPS = b"!\xff\x0bNETSCAPE2.0\x03\x01\x00\x00\x00"  # for ever
_END = b";"


class GifWriter:
    """Writes frames of one size to a file; each has its own palette.

    Args:
        file: The file; `close` ends it, and leaves it open.
        width: Width of the frames in pixels.
        height: Height of the frames.
        fps: Frames per second.

    Raises:
        MissingExtraError: Pillow is not installed.
    """

    def __init__(self, file: BinaryIO, width: int, height: int, fps: float) -> None:
        self._file, self._fps, self._n = file, fps, 0
        self._pillow = _import_pillow()
        file.write(b"GIF89a" + struct.pack("<HHBBB", width, height, 0x70, 0, 0) + _LOOPS)

    def write(self, image: Array) -> None:
        """Add a frame: uint8 of shape ``[height, width]`` or ``[height, width, 3]``."""
        # Delays are hundredths of a second. Rounding the times, not the delays, keeps the whole on time.
        delay = round(100 * (self._n + 1) / self._fps) - round(100 * self._n / self._fps)
        self._n += 1
        self._file.write(b"!\xf9\x04" + struct.pack("<BHBB", 0x04, delay, 0, 0))
        self._file.write(_image_block(self._encoded(image)))

    def close(self) -> None:
        self._file.write(_END)

    def _encoded(self, image: Array) -> bytes:
        """The frame as a GIF of its own."""
        frame = self._pillow.fromarray(image)
        if frame.mode != "L":
            frame = frame.quantize(256, method=self._pillow.Quantize.FASTOCTREE, dither=0)
        out = io.BytesIO()
        frame.save(out, format="GIF", optimize=False)
        return out.getvalue()


def _image_block(gif: bytes) -> bytes:
    """The image of a GIF with one frame, with the palette of the GIF as its own."""
    flags = gif[10]
    palette_size = 2 << (flags & 7) if flags & 0x80 else 0
    palette, at = gif[13 : 13 + 3 * palette_size], 13 + 3 * palette_size
    while gif[at] == 0x21:  # an extension: its label, then blocks that begin with their length
        at += 2
        while gif[at]:
            at += 1 + gif[at]
        at += 1
    assert gif[at] == 0x2C  # the image descriptor
    descriptor, own = gif[at : at + 9], gif[at + 9]
    if own & 0x80:  # it has a palette already
        return gif[at:-1]
    return descriptor + bytes([own & 0x40 | 0x80 | (flags & 7)]) + palette + gif[at + 10 : -1]


def _import_pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingExtraError("GIF files need Pillow: pip install 'trajstore[plot]'") from error
    return Image
