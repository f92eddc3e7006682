"""What the plots read: an episode table or a snapshot of what they are given, and samples of steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from trajstore.errors import DataError
from trajstore.format.episode_table import EpisodeTable
from trajstore.schema import Array, widen_bfloat16
from trajstore.store.snapshot import Snapshot
from trajstore.store.store import Store
from trajstore.store.visible_rows import VisibleRows

if TYPE_CHECKING:
    from trajstore.replay.buffer import ReplayBuffer
    from trajstore.sampling.reader import Reader

    Source = Store | Snapshot | ReplayBuffer | Reader
    TableSource = Source | EpisodeTable
    Drawn = Iterable[Any] | Mapping[str, Any]

_BLOCKS = 64  # from so many places in the data a sample of steps is read


def snapshot_of(data: object) -> Snapshot:
    """The snapshot that a store, a buffer or a reader shows; of a buffer, its committed steps.

    Raises:
        TypeError: It is something else.
    """
    if isinstance(data, Snapshot):
        return data
    if isinstance(data, Store):
        return data.snapshot
    reader = getattr(data, "reader", data)
    assembler = getattr(reader, "assembler", None)
    if assembler is None:
        raise TypeError(
            f"expected a Store, a Snapshot, a ReplayBuffer or a Reader, got {type(data).__name__};"
            " open a URL with trajstore.open(url)"
        )
    with assembler.lock:
        assembler.publish(may_commit=False)
        snapshot: Snapshot = assembler.snapshot
    return snapshot


def table_of(data: object) -> EpisodeTable:
    """The episode table of a store, snapshot, buffer or reader; a table itself.

    Raises:
        TypeError: It is something else.
    """
    return data if isinstance(data, EpisodeTable) else snapshot_of(data).episodes


def stream_ids(data: object) -> list[str]:
    """The ids that the stream numbers of a batch's ``index`` stand for."""
    reader: Any = getattr(data, "reader", data)
    return list(reader.streams) if hasattr(reader, "assembler") else snapshot_of(data).names


def sampled_values(snapshot: Snapshot, path: str, max_steps: int) -> tuple[Array, int]:
    """Values of a field at some steps, and the number of steps in the snapshot.

    All steps are read if there are at most ``max_steps``; else blocks of steps from evenly spread places.

    Raises:
        KeyError: The field does not exist.
    """
    rows = VisibleRows(snapshot)
    if snapshot.schema is None or not len(rows):
        return np.empty(0, np.float32), len(rows)
    if path not in snapshot.schema:
        raise KeyError(f"no field {path!r}; the fields are {', '.join(snapshot.schema)}")
    parts = [rows.read(f"steps/{path}", a, b) for a, b in _blocks(len(rows), max_steps)]
    values = np.concatenate(parts)
    return (widen_bfloat16(values) if snapshot.schema[path].dtype == "bfloat16" else values), len(rows)


def _blocks(n: int, most: int) -> list[tuple[int, int]]:
    if n <= most:
        return [(0, n)]
    size = max(1, most // _BLOCKS)
    starts = np.linspace(0, n - size, min(_BLOCKS, most)).astype(np.int64)
    return [(start, start + size) for start in starts.tolist()]


def step_priorities(data: object) -> Array:
    """The priority of every step: of a buffer's or reader's memory, or as stored in a snapshot.

    Raises:
        ValueError: A buffer or reader has none.
        DataError: The snapshot has none.
    """
    if hasattr(data, "priorities"):
        values: Array = data.priorities()
        return values
    return stored_numbers(snapshot_of(data), "priority")


def stored_numbers(snapshot: Snapshot, name: str) -> Array:
    """The values of a derived column with one number per step, at all steps that have one.

    Raises:
        DataError: There is no such column.
    """
    spans, streams = VisibleRows(snapshot).spans, [record.id for record in snapshot.streams]
    lengths, parts = np.diff(spans.number), [np.empty(0, np.float64)]
    for stream, (first, values) in snapshot.column(name).items():
        if values.ndim != 1:
            raise DataError(f"column '{name}': expected one number per step, got shape {values.shape[1:]} per step")
        mine = spans.source == streams.index(stream)
        start = np.clip(spans.row[mine] - first, 0, len(values))
        stop = np.clip(spans.row[mine] + lengths[mine] - first, 0, len(values))
        change = np.zeros(len(values) + 1, np.int64)
        np.add.at(change, start, 1)
        np.add.at(change, stop, -1)
        parts.append(values[np.cumsum(change[:-1]) > 0])
    return np.concatenate(parts)


def drawn_handles(drawn: Drawn) -> Array:
    """The ``index`` of drawn batches as int64 ``[draws, 3]``: stream number, episode and t.

    Args:
        drawn: A batch, an ``index``, or an iterable of them.

    Raises:
        DataError: It is something else.
    """
    index = drawn["index"] if isinstance(drawn, Mapping) else drawn
    if hasattr(index, "shape"):
        return _handles(index)
    parts = [_handles(each["index"] if isinstance(each, Mapping) else each) for each in index]
    return np.concatenate(parts) if parts else np.empty((0, 3), np.int64)


def _handles(index: Any) -> Array:
    array: Array = np.asarray(index.detach().cpu() if hasattr(index, "detach") else index)
    if array.ndim != 2 or array.shape[1] != 3 or array.dtype.kind != "i":
        raise DataError(
            "drawn: expected batches, or their 'index' of shape (batch, 3), got"
            f" {array.dtype} of shape {array.shape}"
        )
    return array.astype(np.int64, copy=False)


def rows_of_handles(table: EpisodeTable, streams: list[str], handles: Array) -> Array:
    """The row of the table that each handle's episode has; -1 if the table lacks it."""
    found = np.full(len(handles), -1, np.int64)
    names, episodes = table["stream"], table["episode"]
    for number in np.unique(handles[:, 0]).tolist():
        if not 0 <= number < len(streams):
            continue
        mine = np.flatnonzero(names == streams[number])
        chosen = np.flatnonzero(handles[:, 0] == number)
        if len(mine):
            mine = mine[np.argsort(episodes[mine], kind="stable")]  # a part of a table has any order
            at = np.minimum(np.searchsorted(episodes[mine], handles[chosen, 1]), len(mine) - 1)
            row = mine[at]
            found[chosen] = np.where(episodes[row] == handles[chosen, 1], row, -1)
    return found
