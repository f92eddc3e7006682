"""Reads derived columns: values computed after collection, stored by the row of the stream that they belong to."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from trajstore.errors import CorruptionError, SnapshotExpiredError
from trajstore.format.commit_record import CommitRecord, DerivedColumnState
from trajstore.schema import Array
from trajstore.storage import Storage
from trajstore.store.stream_reader import StreamReader


class ColumnReader:
    """Reads the derived columns that the records of a snapshot name. Thread-safe.

    If several sessions have written a column for a stream, that of the newest stream counts.

    Args:
        storage: Storage of the store.
        readers: The streams of the snapshot, oldest first.
    """

    def __init__(self, storage: Storage, readers: Sequence[StreamReader]) -> None:
        self._storage = storage
        self._records = {reader.record.id: reader.record for reader in readers}
        self._newest: dict[str, dict[str, StreamReader]] = {}  # by name and target
        for reader in readers:
            for target, named in reader.record.columns.items():
                for name in named:
                    self._newest.setdefault(name, {})[target] = reader

    def states(self, name: str) -> dict[str, DerivedColumnState]:
        """By stream: dtype, shape and rows of a column."""
        found = self._newest.get(name, {})
        return {t: reader.record.columns[t][name] for t, reader in found.items() if t in self._records}

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the columns that have values, sorted."""
        return tuple(sorted(name for name in self._newest if self.states(name)))

    def read(self, name: str, targets: Collection[str] | None = None) -> dict[str, tuple[int, Array]]:
        """A column by stream: the first row that has a value, and the values from there on.

        Raises:
            SnapshotExpiredError: The column was replaced since the snapshot was made; refresh the store.
        """
        wanted = self._records.keys() if targets is None else self._records.keys() & set(targets)
        found = self._newest.get(name, {})
        return {target: self._read(reader, target, name) for target, reader in found.items() if target in wanted}

    def _read(self, reader: StreamReader, target: str, name: str) -> tuple[int, Array]:
        state, n_rows = reader.record.columns[target][name], self._records[target].rows
        lengths = state.lengths(target, name)
        self._check_rows(name, target, state.stop, n_rows)
        try:
            values, rows, changes = (reader.read_rows(path, 0, lengths[path]) for path in state.paths(target, name))
        finally:
            # Generations alternate between two places: once the next one is published, this one may be overwritten.
            place = reader.record.location or reader.record.id
            fresh = read_records(self._storage, [place]).get(place)
            if fresh is None:  # what was read may be incomplete
                raise SnapshotExpiredError(
                    f"stream '{reader.record.id}' has column '{name}' of stream '{target}', and was removed or"
                    " packed; refresh the store"
                )
            now = fresh.columns.get(target, {}).get(name) if fresh is not None else None
            if now is not None and now.generation > state.generation:
                raise SnapshotExpiredError(f"column '{name}' of stream '{target}' was replaced; refresh the store")
        self._check_rows(name, target, int(rows.max()) + 1 if len(rows) else 0, n_rows)
        if len(rows) and rows.min() < state.first:
            raise CorruptionError(
                f"column '{name}' of stream '{target}' has changes below its first row {state.first}"
            )
        return state.first, _with_changes(values, state.first, rows, changes, n_rows)

    def _check_rows(self, name: str, target: str, stop: int, n_rows: int) -> None:
        """Refuse rows that the stream's newest record does not have; a column may be newer than this snapshot."""
        if stop > n_rows:
            place = self._records[target].location or target
            known = read_records(self._storage, [place]).get(place)
            if known is None:
                raise SnapshotExpiredError(f"stream '{target}' was removed or packed; refresh the store")
            if stop > known.rows:
                raise CorruptionError(
                    f"column '{name}' of stream '{target}' has rows up to {stop}, the stream has fewer"
                )


class StepNumbers:
    """The derived columns that have one number per step, by position of the stream in the snapshot.

    Args:
        columns: The derived columns.
        streams: Ids of the snapshot's streams, in order.
    """

    def __init__(self, columns: ColumnReader, streams: Sequence[str]) -> None:
        self._columns = columns
        self._streams = list(streams)

    @property
    def names(self) -> tuple[str, ...]:
        columns = self._columns
        return tuple(n for n in columns.names if all(not s.shape for s in columns.states(n).values()))

    def numbers(self, name: str) -> dict[int, tuple[int, Array]]:
        return {self._streams.index(target): found for target, found in self._columns.read(name).items()}


class ColumnRows:
    """The values of one derived column at any rows; NaN (0 in columns that are not floats) where none is stored.

    Args:
        state: Dtype and shape of the column.
        stored: As `ColumnReader.read` returns it.
    """

    def __init__(self, state: DerivedColumnState, stored: Mapping[str, tuple[int, Array]]) -> None:
        self._dtype, self._shape = np.dtype(state.dtype), state.shape
        self._stored = stored

    def read(self, target: str, start: int, stop: int) -> Array:
        """The values of rows ``[start, stop)`` of a stream; a new array."""
        out = np.full((stop - start, *self._shape), np.nan if self._dtype.kind == "f" else 0, self._dtype)
        first, values = self._stored.get(target, (0, out[:0]))
        low, high = max(start, first), min(stop, first + len(values))
        if low < high:
            out[low - start : high - start] = values[low - first : high - first]
        return out


def read_records(storage: Storage, names: Sequence[str]) -> dict[str, CommitRecord]:
    """The commit records of some streams, read in one wave; streams without a record are left out."""

    def read(name: str) -> CommitRecord | None:
        try:
            return CommitRecord.from_bytes(storage.get(f"streams/{name}/zarr.json"), name, storage.display)
        except FileNotFoundError:
            return None  # a stream that is being removed, or a directory that is not a stream

    found = storage.map(read, list(names))
    return {name: record for name, record in zip(names, found, strict=True) if record is not None}


def _with_changes(values: Array, first: int, rows: Array, changes: Array, n_rows: int) -> Array:
    """Apply changes of single rows to values that begin at row ``first``; rows from ``n_rows`` on are dropped."""
    kept = rows < n_rows
    rows, changes = rows[kept], changes[kept]
    values = values[: max(0, n_rows - first)]
    if not len(rows):
        return values
    grown = np.zeros((max(int(rows.max()) + 1 - first, len(values)), *values.shape[1:]), values.dtype)
    grown[: len(values)] = values
    # The last of several changes to a row must win, which numpy's fancy assignment does not promise.
    last = len(rows) - 1 - np.unique(rows[::-1], return_index=True)[1]
    grown[rows[last] - first] = changes[last]
    return grown
