"""One episode: its facts, its fields over time, its frames."""

from __future__ import annotations

import math
import threading
from typing import Any

import numpy as np

from trajstore.errors import CorruptionError, DataError, EpisodeNotFoundError
from trajstore.format.handles import EpisodeKey
from trajstore.schema import Array, Schema, flatten
from trajstore.store.column_reader import ColumnRows
from trajstore.store.snapshot import Snapshot
from trajstore.viewer.frames import Image, is_frames, render
from trajstore.viewer.json_numbers import to_json
from trajstore.viewer.live_view import Moment
from trajstore.viewer.series import shortened

MAX_COLUMN_BYTES = 512 << 20  # of a derived column of one stream, which is read as a whole
_reading_column = threading.Lock()  # one at a time, because a column is read as a whole
MAX_METADATA_BYTES = 256 << 10  # shown of an episode


class EpisodePage:
    """One episode of a moment.

    Args:
        moment: The store.
        key: The episode.

    Raises:
        EpisodeNotFoundError: The moment does not show it: it was evicted, or never existed.
    """

    def __init__(self, moment: Moment, key: EpisodeKey) -> None:
        self._moment = moment
        self._snapshot: Snapshot = moment.snapshot
        self._key = key
        self._table = moment.episodes
        self._i = self._table.find(key)
        self._spans = self._table.spans(self._i)
        self._has_final = self._table.has_final(self._i)
        self._n_steps = self._table.n_rows(self._i) - self._has_final

    def facts(self) -> dict[str, Any]:
        """Everything but the values of its steps."""
        row, damaged = self._row()
        n_bytes = len(to_json(row["metadata"]))
        is_long = n_bytes > MAX_METADATA_BYTES
        stored_from = self._spans[0].t_start if self._spans else 0
        return {
            "row": row | {"metadata": {}} if is_long else row,
            "damaged": damaged,
            "metadata_note": f"{n_bytes:,} bytes, which are not shown" if is_long else "",
            "position": self._i,
            "n_episodes": len(self._table),
            "previous": self._neighbour(-1),
            "next": self._neighbour(1),
            "n_steps": self._n_steps,
            "first_step": stored_from,
            "n_spans": len(self._spans),
            "fields": [self._field(path) for path in self._schema],
            "columns": self._columns(),
        }

    def _row(self) -> tuple[dict[str, Any], dict[str, str]]:
        """The values of the episode, and the damage of those that can't be read, which are None."""
        try:
            return self._table.row(self._i), {}
        except CorruptionError:
            pass
        table = self._table.take(np.array([self._i]))
        row, damaged = dict[str, Any](), dict[str, str]()
        for name in table.columns:
            try:
                row[name] = table[name].tolist()[0]
            except CorruptionError as error:
                row[name] = {} if name == "metadata" else None
                damaged[name] = str(error)
        return row, damaged

    @property
    def _schema(self) -> Schema:
        schema = self._snapshot.schema
        assert schema is not None  # a store with an episode has a schema
        return schema

    def _neighbour(self, offset: int) -> list[str | int] | None:
        i = self._i + offset
        return [*self._table.key(i)] if 0 <= i < len(self._table) else None

    def _field(self, path: str) -> dict[str, Any]:
        spec = self._schema[path]
        return {
            "path": path,
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "n": self._n_values(path),
            "is_frames": is_frames(spec),
            "is_reward": path == self._schema.reward,
        }

    def _n_values(self, path: str) -> int:
        return self._n_steps + (1 if self._has_final and self._schema[path].final else 0)

    def _columns(self) -> list[dict[str, Any]]:
        """The derived columns that have values for a stream of this episode."""
        streams = {self._snapshot.readers[span.source].record.id for span in self._spans}
        columns = self._snapshot.columns
        found = []
        for name in columns.names:
            states = columns.states(name)
            if stream := next(iter(streams & states.keys()), None):
                state = states[stream]
                found.append({"path": name, "dtype": state.dtype, "shape": list(state.shape), "n": self._n_steps})
        return found

    def series(self, path: str, start: int, stop: int | None, points: int) -> dict[str, Any]:
        """A field between two steps, shortened to some points."""
        if path not in self._schema:
            raise DataError(f"no field {path!r:.100}")
        spec, n = self._schema[path], self._n_values(path)
        start, stop = _clipped(start, stop, n)
        if is_frames(spec):
            raise DataError(f"field {path!r:.100} holds frames, which are not plotted")
        itemsize = spec.storage_dtype.itemsize

        def read(first: int, last: int) -> Array:
            return self._rows(path, first, last)

        return shortened(read, start, stop, spec.shape, itemsize, points)

    def column(self, name: str, start: int, stop: int | None, points: int) -> dict[str, Any]:
        """A derived column between two steps, shortened to some points."""
        start, stop = _clipped(start, stop, self._n_steps)
        values = self._moment.keep(("column", name, self._key), lambda: self._column_values(name))
        return shortened(lambda a, b: values[a:b], start, stop, values.shape[1:], values.itemsize, points)

    def _column_values(self, name: str) -> Array:
        columns = self._snapshot.columns
        if name not in columns.names:
            raise DataError(f"no derived column {name!r:.100}")
        states = columns.states(name)
        streams = [reader.record.id for reader in self._snapshot.readers]
        targets = {streams[span.source] for span in self._spans}
        for target in targets & states.keys():
            state = states[target]
            n_bytes = (state.stop - state.first + state.deltas) * np.dtype(state.dtype).itemsize
            n_bytes *= math.prod(state.shape)
            if n_bytes > MAX_COLUMN_BYTES:
                raise DataError(
                    f"column {name!r:.100} takes {n_bytes:,} bytes in stream '{target}'; at most"
                    f" {MAX_COLUMN_BYTES:,} are read here"
                )
        with _reading_column:
            rows = ColumnRows(next(iter(states.values())), columns.read(name, targets))
            parts = [rows.read(streams[s.source], s.row_start, s.row_stop) for s in self._spans]
            values: Array = np.concatenate(parts)[: self._n_steps] if parts else rows.read("", 0, 0)
        return values

    def frame(self, path: str, step: int) -> Image:
        """One frame, as an image."""
        if path not in self._schema or not is_frames(self._schema[path]):
            raise DataError(f"no field of frames {path!r:.100}")
        if not 0 <= step < self._n_values(path):
            raise EpisodeNotFoundError(f"step {step}: the episode has {self._n_values(path)} frames")
        return render(self._rows(path, step, step + 1)[0], self._schema[path])

    def values(self, step: int) -> dict[str, Any]:
        """The values of all small fields at one step."""
        found = {}
        for path, spec in self._schema.fields.items():
            if not is_frames(spec) and math.prod(spec.shape) <= 64 and 0 <= step < self._n_values(path):
                found[path] = self._rows(path, step, step + 1)[0].ravel().tolist()
        return found

    def _rows(self, path: str, start: int, stop: int) -> Array:
        """Rows of a field; the final one comes after the last step."""
        read = self._snapshot.read_episode
        last = min(stop, self._n_steps)
        rows = read(self._key, fields=[path], start=min(start, last), stop=last)
        found: Array = flatten(rows)[path]
        return found[: stop - start]


def _clipped(start: int, stop: int | None, n: int) -> tuple[int, int]:
    start = min(max(0, start), n)
    return start, n if stop is None else min(max(start, stop), n)
