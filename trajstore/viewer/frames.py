"""Which fields are frames, and one frame as an image."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from trajstore.schema import Array, Field
from trajstore.viewer.json_numbers import number
from trajstore.viewer.png import encode_png

MIN_SIDE = 8  # pixels; smaller arrays are plotted, not shown
MIN_OTHER_SIDE = 16  # of other dtypes than uint8, whose small arrays are tables
MAX_PIXELS = 4 << 20  # of an image; larger ones are thinned
MAX_STACK = 16  # frames of a stack that are shown side by side


@dataclass(frozen=True, slots=True)
class Image:
    """A frame as PNG.

    Attributes:
        data: The bytes.
        note: What was done to the values to show them; empty if nothing.
    """

    data: bytes
    note: str = ""


def is_frames(spec: Field) -> bool:
    """Whether each step of a field is an image, or a stack of images."""
    return _layout(spec) is not None


def render(frame: Array, spec: Field) -> Image:
    """One step of a field of frames as an image.

    Frames of other dtypes than uint8 are scaled to their range, stacks are laid side by side, and large images are
    thinned; the note says so.
    """
    layout = _layout(spec)
    assert layout is not None  # the caller asked is_frames
    image = _laid_out(frame, layout)
    notes = []
    stride = math.ceil(math.sqrt(image.shape[0] * image.shape[1] / MAX_PIXELS))
    if stride > 1:
        image = image[::stride, ::stride]
        notes.append(f"one pixel of {stride} in each axis")
    if image.dtype != np.uint8:
        image, note = _scaled(image)
        notes.append(note)
    return Image(encode_png(np.ascontiguousarray(image)), ", ".join(notes))


def _layout(spec: Field) -> str | None:
    """The order of the axes: height, width, colours, and K for the frames of a stack; None if it is no image."""
    shape = spec.shape
    by_axes: dict[int, Callable[[tuple[int, ...]], str | None]] = {2: _two_axes, 3: _three_axes, 4: _four_axes}
    layout = by_axes[len(shape)](shape) if len(shape) in by_axes else None
    if layout is None:
        return None
    side = min(shape[layout.index("H")], shape[layout.index("W")])
    is_short = "K" not in layout or shape[layout.index("K")] <= MAX_STACK
    return layout if side >= (MIN_SIDE if spec.dtype == "uint8" else MIN_OTHER_SIDE) and is_short else None


def _two_axes(_: tuple[int, ...]) -> str:
    return "HW"


def _three_axes(shape: tuple[int, ...]) -> str:
    if shape[2] in (1, 3) or (shape[2] == 4 and shape[0] >= MIN_SIDE and shape[0] != shape[1]):
        return "HWC"
    if shape[0] in (1, 3):
        return "CHW"
    return "KHW" if shape[0] <= shape[2] else "HWK"


def _four_axes(shape: tuple[int, ...]) -> str | None:
    if shape[3] in (1, 3, 4):
        return "KHWC"
    return "KCHW" if shape[1] in (1, 3, 4) else None


def _laid_out(frame: Array, layout: str) -> Array:
    """``[height, width]`` or ``[height, width, colours]``; the frames of a stack side by side, oldest first."""
    if "K" in layout:
        parts = np.moveaxis(frame, layout.index("K"), 0)
        rest = layout.replace("K", "")
        return np.concatenate([_laid_out(part, rest) for part in parts], axis=1)
    return np.moveaxis(frame, 0, -1) if layout == "CHW" else frame


def _scaled(image: Array) -> tuple[Array, str]:
    values = image.astype(np.float64)
    finite = values[np.isfinite(values)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
    shown = np.zeros(image.shape, np.uint8)
    if high > low:
        shown = np.nan_to_num((np.clip(values, low, high) - low) / (high - low) * 255, nan=0).astype(np.uint8)
    return shown, f"black is {number(low):g}, white is {number(high):g}"
