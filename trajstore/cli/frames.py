"""Save the frames of an episode as pictures."""

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from trajstore.cli.exit_codes import UsageError
from trajstore.cli.output import Progress
from trajstore.errors import MissingExtraError
from trajstore.schema import Array


def check_target(path: Path) -> None:
    """Refuse a target that would replace something.

    Raises:
        UsageError: A file, or a directory that is not empty, stands there.
    """
    if path.suffix.lower() == ".gif":
        if path.exists():
            raise UsageError(f"--frames: {path} exists; choose another file, or remove it")
    elif path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise UsageError(f"--frames: {path} exists and is not an empty directory; choose another one")


def save_frames(
    frames: Iterable[tuple[int, Array]], path: Path, *, fps: float, n: int, progress: Progress | None
) -> list[str]:
    """Save frames as one GIF, or each as a PNG in a directory that is named after its step.

    Args:
        frames: Steps and pictures.
        path: A file that ends in ``.gif``, or a directory.
        fps: Pictures a second of a GIF.
        n: How many frames there are, for the progress.
        progress: Called with the number saved and ``n``.

    Returns:
        The files.

    Raises:
        MissingExtraError: Pillow is not installed.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingExtraError("saving frames needs Pillow: pip install 'trajstore[plot]'") from error

    def images() -> Iterator[tuple[int, Any]]:
        for number, (t, picture) in enumerate(frames, 1):
            yield t, Image.fromarray(picture)
            if progress is not None:
                progress(number, n)

    if path.suffix.lower() == ".gif":
        return _save_gif((image for _, image in images()), path, round(1000 / fps))
    path.mkdir(parents=True, exist_ok=True)
    written = []
    for t, image in images():
        written.append(str(path / f"{t:06d}.png"))
        image.save(written[-1])
    return written


def _save_gif(images: Iterator[Any], path: Path, frame_ms: int) -> list[str]:
    first = next(images, None)
    if first is None:
        return []
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        first.save(part, format="GIF", save_all=True, append_images=images, duration=max(20, frame_ms), loop=0)
        part.rename(path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            part.unlink()
    return [str(path)]
