"""Save the frames of an episode as pictures or as a video."""

import itertools
from pathlib import Path
from typing import Any

from trajstore.cli.exit_codes import UsageError
from trajstore.cli.output import Progress
from trajstore.errors import MissingExtraError
from trajstore.plot.images import image_field, n_frames, read_images
from trajstore.plot.videos import save_video
from trajstore.store.snapshot import Snapshot

_VIDEOS = (".gif", ".mp4")


def check_target(path: Path) -> None:
    """Refuse a target that would replace something, or that is no kind of file that is written.

    Raises:
        UsageError: A file, or a directory that is not empty, stands there, or the name has another ending.
    """
    if path.suffix.lower() in _VIDEOS:
        if path.exists():
            raise UsageError(f"--frames: {path} exists; choose another file, or remove it")
    elif path.suffix and not path.is_dir():
        raise UsageError(
            f"--frames: expected a file that ends in .gif or .mp4, or a directory for PNGs, got {path.name!r}"
        )
    elif path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise UsageError(f"--frames: {path} exists and is not an empty directory; choose another one")


def save_frames(
    snapshot: Snapshot,
    row: int,
    field: str,
    path: Path,
    *,
    fps: float,
    every: int,
    progress: Progress | None,
) -> list[str]:
    """Save frames as a GIF or an MP4, or each as a PNG in a directory that is named after its step.

    Args:
        snapshot: What holds the episode.
        row: The episode.
        field: Path of the field of the frames.
        path: A file that ends in ``.gif`` or ``.mp4``, or a directory.
        fps: Pictures a second of a file.
        every: Save one frame of this many.
        progress: Called with the number of frames that are saved and the number of all.

    Returns:
        The files.

    Raises:
        MissingExtraError: What encodes the frames is not installed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix.lower() in _VIDEOS:
        return [str(save_video(snapshot, path, row, field=field, fps=fps, every=every, progress=progress))]
    image: Any = _import_image()
    _, layout = image_field(snapshot, field)
    n = n_frames(snapshot, row, field)
    path.mkdir(exist_ok=True)
    written: list[str] = []
    pictures = itertools.chain.from_iterable(read_images(snapshot, row, field, layout, 0, n))
    for t, picture in itertools.islice(enumerate(pictures), None, None, every):
        written.append(str(path / f"{t:06d}.png"))
        image.fromarray(picture).save(written[-1])
        if progress is not None:
            progress(len(written), -(-n // every))
    return written


def _import_image() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingExtraError("saving frames needs Pillow: pip install 'trajstore[plot]'") from error
    return Image
