"""Read frames of videos by their time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from trajstore.datasets.optional_imports import import_optional
from trajstore.errors import FormatError, StoreNotFoundError
from trajstore.schema import Array


def import_pyav() -> Any:
    return import_optional(
        "av", "frames of videos need PyAV: pip install av, or leave videos out with videos=False"
    )


def read_frames(path: Path, start_s: float, n: int, fps: float, shape: tuple[int, ...]) -> Array:
    """Read frames from a time on, one every ``1 / fps`` seconds, as RGB of shape ``[n, height, width, 3]``.

    Raises:
        StoreNotFoundError: The file does not exist.
        FormatError: The file cannot be decoded, a frame has another shape, or no frame is within half a step of an
            expected time.
    """
    av = import_pyav()
    if not path.is_file():
        raise StoreNotFoundError(f"{path} is missing")
    found = np.empty((n, *shape), np.uint8)
    is_found = np.zeros(n, bool)
    try:
        with av.open(str(path)) as container:
            for number, frame in _decode_frames(container, start_s, n, fps):
                if (frame.height, frame.width, 3) != shape:
                    raise FormatError(f"{path}: expected frames of {shape}, got {(frame.height, frame.width, 3)}")
                found[number], is_found[number] = frame.to_ndarray(format="rgb24"), True
    except av.FFmpegError as error:
        raise FormatError(f"{path} can't be decoded: {error}") from error
    if not is_found.all():
        t = start_s + int(is_found.argmin()) / fps
        raise FormatError(f"{path}: expected {n} frames from {start_s:.3f} s on, got none at {t:.3f} s")
    return found


def _decode_frames(container: Any, start_s: float, n: int, fps: float) -> Any:
    """Yield the wanted frames with their numbers."""
    stream = container.streams.video[0]
    # Start at the key frame before: later frames may be stored as differences from it.
    container.seek(int(start_s / stream.time_base), stream=stream, backward=True)
    for frame in container.decode(stream):
        number = -1 if frame.time is None else round((frame.time - start_s) * fps)
        if number >= n:
            return
        if number >= 0:
            yield number, frame
