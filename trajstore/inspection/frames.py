"""Fields that hold pictures, and their values as arrays that image libraries take."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from trajstore.errors import DataError
from trajstore.schema import Array, Field, Schema
from trajstore.store.snapshot import Snapshot

_MIN_SIDE = 8  # pixels; smaller arrays of bytes are rarely pictures
_CHANNELS = (1, 3, 4)
_BLOCK_BYTES = 8 << 20


def is_frame(spec: Field) -> bool:
    """Whether a field looks like pictures: bytes of shape (H, W), (H, W, channels) or (channels, H, W)."""
    if spec.dtype != "uint8" or len(spec.shape) not in (2, 3):
        return False
    sides = spec.shape
    if len(sides) == 3:
        sides = sides[:2] if sides[2] in _CHANNELS else sides[1:]
        has_channels = spec.shape[2] in _CHANNELS or spec.shape[0] in _CHANNELS
        return has_channels and min(sides) >= _MIN_SIDE
    return min(sides) >= _MIN_SIDE


def frame_fields(schema: Schema) -> list[str]:
    """Paths of the fields that look like pictures."""
    return [path for path, spec in schema.fields.items() if is_frame(spec)]


def as_pictures(values: Array) -> Array:
    """Values of a frame field as ``[n, height, width]`` or ``[n, height, width, 3 or 4]``; a view."""
    if values.ndim == 4 and values.shape[3] not in _CHANNELS:
        values = np.moveaxis(values, 1, 3)
    return values[..., 0] if values.ndim == 4 and values.shape[3] == 1 else values


def pictures(
    snapshot: Snapshot, episode: int, path: str, *, start: int = 0, stop: int | None = None, every: int = 1
) -> Iterator[tuple[int, Array]]:
    """The pictures of an episode, one after the other, each with its step. Memory is bounded.

    Args:
        snapshot: What to read.
        episode: Its row in the episode table.
        path: A frame field.
        start: First step, counted from the first one that is still stored.
        stop: Step after the last; the end, with the final row, by default.
        every: Take one picture of this many.

    Raises:
        DataError: The field is no frame field.
    """
    schema = snapshot.schema
    if schema is None or path not in schema or not is_frame(schema[path]):
        known = ", ".join(frame_fields(schema)) if schema is not None else ""
        raise DataError(f"'{path:.80}' does not hold pictures; fields that do: {known or 'none'}")
    n_steps = snapshot.episodes.n_rows(episode) - snapshot.episodes.has_final(episode)
    end = n_steps if stop is None else min(stop, n_steps)
    block = max(1, _BLOCK_BYTES // schema[path].row_bytes)
    for low in range(start, end, block):
        high = min(low + block, end)
        value = snapshot.read_episode(episode, fields=[path], start=low, stop=high)
        for name in path.split("/"):
            value = value[name]
        for t, picture in enumerate(as_pictures(np.asarray(value)), low):
            if (t - start) % every == 0 and (t < high or stop is None):
                yield t, picture
