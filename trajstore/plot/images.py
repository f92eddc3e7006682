"""Which fields hold images, how their axes are ordered, and episodes read as images, a few at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, get_args

import numpy as np

from trajstore.errors import DataError
from trajstore.format.handles import EpisodeKey
from trajstore.schema import Array, Field
from trajstore.store.snapshot import Snapshot

Layout = Literal["HW", "HWC", "CHW", "KHW", "HWK", "KHWC", "KCHW"]

_BLOCK_BYTES = 16 << 20  # decoded at a time
_MIN_SIDE = 8  # a shape with a shorter side is a vector or a table, unless the layout is named
_COLOURS = (1, 3, 4)
_HELP = (
    "expected uint8 of shape HW, HWC, CHW, or a stack K of such frames; name the layout with"
    " layout='HW', 'HWC', 'CHW', 'KHW', 'HWK', 'KHWC' or 'KCHW'"
)


def image_field(snapshot: Snapshot, field: str | None, layout: Layout | None = None) -> tuple[str, Layout]:
    """The field that holds frames, and the order of its axes.

    Args:
        snapshot: Has the schema.
        field: Path of the field; None: the only one that holds images, or the first of several.
        layout: The order of the axes; None: found out from the shape. H is height, W width, C colours and K the
            frames of a stack, oldest first.

    Raises:
        KeyError: The field does not exist.
        DataError: No field holds images, or this one does not.
    """
    fields = {} if snapshot.schema is None else snapshot.schema.fields
    if field is None:
        found = [(path, shape) for path, spec in fields.items() if (shape := image_layout(spec)) is not None]
        if not found:
            raise DataError(
                f"no field holds images; {_HELP}; the fields are {', '.join(fields) or 'not known yet'}"
            )
        return found[0] if layout is None else _checked(found[0][0], fields[found[0][0]], layout)
    if field not in fields:
        raise KeyError(f"no field {field!r}; the fields are {', '.join(fields)}")
    if layout is not None:
        return _checked(field, fields[field], layout)
    guessed = image_layout(fields[field])
    if guessed is None:
        raise DataError(f"field '{field}' holds {fields[field].dtype} of shape {fields[field].shape}; {_HELP}")
    return field, guessed


def _checked(field: str, spec: Field, layout: Layout) -> tuple[str, Layout]:
    if layout not in get_args(Layout):
        raise ValueError(f"layout: expected one of {', '.join(get_args(Layout))}, got {layout!r}")
    is_colour = "C" not in layout or (len(spec.shape) == len(layout) and spec.shape[layout.index("C")] in _COLOURS)
    if spec.dtype != "uint8" or len(spec.shape) != len(layout) or not is_colour:
        raise DataError(
            f"field '{field}': layout {layout} needs uint8 with {len(layout)} axes (C: 1, 3 or 4 colours), got"
            f" {spec.dtype} of shape {spec.shape}"
        )
    return field, layout


def image_layout(spec: Field) -> Layout | None:
    """The order of the axes of images; None if the field holds none."""
    shape = spec.shape
    if spec.dtype != "uint8" or not 2 <= len(shape) <= 4:
        return None
    found: dict[int, Any] = {2: _two_axes, 3: _three_axes, 4: _four_axes}
    layout: Layout | None = found[len(shape)](shape)
    if layout is None or min(shape[layout.index("H")], shape[layout.index("W")]) < _MIN_SIDE:
        return None
    return layout


def _two_axes(_: tuple[int, ...]) -> Layout:
    return "HW"


def _three_axes(shape: tuple[int, ...]) -> Layout:
    """Colours are 1, 3 or 4 elements last, or 1 or 3 first; any other short axis is a stack."""
    if shape[2] in (1, 3) or (shape[2] == 4 and shape[0] >= _MIN_SIDE and shape[0] != shape[1]):
        return "HWC"
    if shape[0] in (1, 3):
        return "CHW"
    return "KHW" if shape[0] <= shape[2] else "HWK"


def _four_axes(shape: tuple[int, ...]) -> Layout | None:
    if shape[3] in _COLOURS:
        return "KHWC"
    return "KCHW" if shape[1] in _COLOURS else None


def as_images(values: Array, layout: Layout) -> Array:
    """Frames as uint8 ``[n, height, width]``, or with 3 or 4 colours as a last axis; of stacks the newest frame."""
    if "K" in layout:
        values = np.take(values, -1, axis=1 + layout.index("K"))
    if "C" not in layout:
        return values
    rest = layout.replace("K", "")
    values = np.moveaxis(values, 1 + rest.index("C"), -1)
    return values[..., 0] if values.shape[-1] == 1 else values


def n_frames(snapshot: Snapshot, episode: int | EpisodeKey | tuple[str, int], field: str) -> int:
    """The number of frames that an episode has of a field, its final one included.

    Raises:
        EpisodeNotFoundError: The snapshot does not show the episode.
    """
    i, table = row_of(snapshot, episode), snapshot.episodes
    assert snapshot.schema is not None  # it has an episode
    without = table.has_final(i) and not snapshot.schema[field].final
    return table.n_rows(i) - without


def row_of(snapshot: Snapshot, episode: int | EpisodeKey | tuple[str, int]) -> int:
    """The row of an episode in the snapshot's table.

    Raises:
        EpisodeNotFoundError: The snapshot does not show it.
    """
    if isinstance(episode, (int, np.integer)):
        snapshot.episodes.key(int(episode))  # raises
        return int(episode)
    return snapshot.episodes.find(EpisodeKey(*episode))


def read_images(
    snapshot: Snapshot,
    episode: int | EpisodeKey | tuple[str, int],
    field: str,
    layout: Layout,
    start: int,
    stop: int,
) -> Iterator[Array]:
    """The frames of an episode from ``start`` to ``stop``, in blocks of at most 16 MiB."""
    assert snapshot.schema is not None  # it has an episode
    i = row_of(snapshot, episode)
    table = snapshot.episodes
    n_steps = table.n_rows(i) - table.has_final(i)
    size = max(1, _BLOCK_BYTES // snapshot.schema[field].row_bytes)
    for low in range(start, stop, size):
        high = min(low + size, stop)
        # The final frame comes with a read that reaches the end of the steps.
        read = snapshot.read_episode(i, fields=[field], start=min(low, n_steps), stop=min(high, n_steps))
        for name in field.split("/"):
            read = read[name]
        frames: Any = read
        yield as_images(frames[: high - low], layout)


def read_image(
    snapshot: Snapshot, episode: int | EpisodeKey | tuple[str, int], field: str, layout: Layout, t: int
) -> Array:
    """One frame of an episode."""
    (image,) = next(read_images(snapshot, episode, field, layout, t, t + 1))
    frame: Array = image
    return frame
