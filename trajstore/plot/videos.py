"""The frames of an episode as a GIF or an MP4, written as they are read."""

from __future__ import annotations

import contextlib
import math
import os
import tempfile
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trajstore.arguments import check_positive
from trajstore.errors import MissingExtraError
from trajstore.format.handles import EpisodeKey
from trajstore.plot.frame_strips import checked_range, resize
from trajstore.plot.gif import MAX_GIF_FPS, GifWriter
from trajstore.plot.images import Layout, image_field, n_frames, read_images
from trajstore.plot.sources import snapshot_of
from trajstore.schema import Array

if TYPE_CHECKING:
    from trajstore.plot.sources import Source

_SHORT_SIDE = 240  # pixels that small frames are enlarged to
_MAX_SIDE = 8192

Write = Callable[[Array], None]


def save_video(
    data: Source,
    path: str | os.PathLike[str],
    episode: int | EpisodeKey | tuple[str, int] = 0,
    *,
    field: str | None = None,
    fps: float = 30.0,
    size: int | tuple[int, int] | None = None,
    every: int = 1,
    start: int = 0,
    stop: int | None = None,
    layout: Layout | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Write the frames of an episode to a file ``.gif`` or ``.mp4``.

    Frames are read and encoded a few at a time, so memory does not grow with the episode. The file appears when it
    is complete; an existing one is replaced.

    Args:
        data: A store, snapshot, buffer (its committed steps) or reader.
        path: The file. GIFs need Pillow, which comes with the extra ``plot``; MP4s need the extra ``video``.
        episode: Its row in the episode table, or its key.
        field: Path of the field that holds frames; by default the first that does.
        fps: Frames shown per second; a GIF has at most 50.
        size: Height in pixels, or ``(width, height)``. By default, small frames are enlarged by a whole factor.
        every: Show each frame (1), each second one (2), and so on.
        start: First step, counted from the first step that is still stored.
        stop: Step after the last; the end of the episode by default.
        layout: The order of the axes, such as ``"CHW"``; found out from the shape by default. Of a stack of frames
            (``K``), the newest is shown.
        progress: Called with the number of frames that are written and the number of all.

    Returns:
        The path.

    Raises:
        EpisodeNotFoundError: The data does not show this episode.
        DataError: No field holds frames, or this one does not.
        IndexError: The episode does not have these steps.
        MissingExtraError: The library that encodes the file is not installed.
    """
    target = Path(path)
    opened = _opener(target, fps)
    check_positive("every", every)
    snapshot = snapshot_of(data)
    name, order = image_field(snapshot, field, layout)
    assert snapshot.schema is not None  # it has a field
    first, end = checked_range(n_frames(snapshot, episode, name), start, stop)
    shape = snapshot.schema[name].shape
    plain = order.replace("K", "") if "K" in order else order
    sides = [n for letter, n in zip(order, shape, strict=True) if letter != "K"]
    height, width = _size((sides[plain.index("H")], sides[plain.index("W")]), size)
    with _complete_file(target) as partial, opened(partial, height, width) as write:
        n, n_written, t = -(-(end - first) // every), 0, first
        for block in read_images(snapshot, episode, name, order, first, end):
            for image in block:
                if (t - first) % every == 0:
                    write(_coloured(image, height, width))
                    n_written += 1
                    if progress is not None:
                        progress(n_written, n)
                t += 1
    return target


def _opener(target: Path, fps: float) -> Callable[[Path, int, int], contextlib.AbstractContextManager[Write]]:
    """Opens a file of the kind that the path names.

    Raises:
        ValueError: The path names no such kind, or the rate is not possible.
    """
    kind = target.suffix.lower()
    if kind not in (".gif", ".mp4"):
        raise ValueError(f"path: expected a name that ends in .gif or .mp4, got {target.name!r}")
    if not isinstance(fps, (int, float)) or not math.isfinite(fps) or not 0 < fps <= 1000:
        raise ValueError(f"fps: expected a number from 0 to 1000, got {fps!r}")
    if kind == ".gif" and fps > MAX_GIF_FPS:
        raise ValueError(
            f"fps: a GIF shows at most {MAX_GIF_FPS} frames per second, got {fps:g}; leave frames out (every=2), or"
            " write an .mp4"
        )
    if kind == ".gif":
        return lambda path, height, width: _open_gif(path, fps, height, width)
    _import_av()
    return lambda path, height, width: _open_mp4(path, fps, height, width)


def _size(frame: tuple[int, int], size: int | tuple[int, int] | None) -> tuple[int, int]:
    """Height and width to write."""
    height, width = frame
    if size is None:
        factor = max(1, _SHORT_SIDE // min(frame))
        wanted = height * factor, width * factor
    elif isinstance(size, int):
        check_positive("size", size)
        wanted = size, max(1, round(width * size / height))
    else:
        for n in size:
            check_positive("size", n)
        wanted = size[1], size[0]
    if max(wanted) > _MAX_SIDE:
        raise ValueError(f"size: at most {_MAX_SIDE} pixels a side, got {wanted[1]} x {wanted[0]}")
    return wanted


def _coloured(image: Array, height: int, width: int) -> Array:
    """The image in this size, without an alpha channel."""
    opaque = image[..., :3] if image.ndim == 3 else image
    return opaque if opaque.shape[:2] == (height, width) else resize(opaque, height, width)


@contextlib.contextmanager
def _complete_file(target: Path) -> Iterator[Path]:
    """A file beside the target that takes its place at the end, and is removed if there is an error."""
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.stem}-", suffix=target.suffix)
    os.close(handle)
    try:
        yield Path(name)
        umask = os.umask(0)
        os.umask(umask)
        Path(name).chmod(0o666 & ~umask)  # mkstemp makes files that only their owner may read
        Path(name).replace(target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def _open_gif(path: Path, fps: float, height: int, width: int) -> Iterator[Write]:
    with path.open("wb") as file:
        writer = GifWriter(file, width, height, fps)
        yield writer.write
        writer.close()


@contextlib.contextmanager
def _open_mp4(path: Path, fps: float, height: int, width: int) -> Iterator[Write]:
    av = _import_av()
    with av.open(str(path), "w", format="mp4", options={"movflags": "+faststart"}) as container:
        stream = container.add_stream("libx264", rate=Fraction(fps).limit_denominator(1001))
        # The usual format of colours, which every player shows, has sides of even length.
        stream.width, stream.height = width + width % 2, height + height % 2
        stream.pix_fmt = "yuv420p"
        stream.options = {"crf": "18", "preset": "medium"}

        def write(image: Array) -> None:
            even = np.ascontiguousarray(_with_even_sides(image))
            frame = av.VideoFrame.from_ndarray(even, format="gray" if image.ndim == 2 else "rgb24")
            for packet in stream.encode(frame):
                container.mux(packet)

        yield write
        for packet in stream.encode(None):
            container.mux(packet)


def _with_even_sides(image: Array) -> Array:
    """The image with its last row and column repeated where it has an odd number of them."""
    padding = [(0, image.shape[0] % 2), (0, image.shape[1] % 2)] + [(0, 0)] * (image.ndim - 2)
    return np.pad(image, padding, mode="edge")


def _import_av() -> Any:
    try:
        import av
    except ImportError as error:
        raise MissingExtraError("MP4 files need PyAV: pip install 'trajstore[video]'") from error
    return av
