"""A column of the step table and its stored form: read from streams once, then saved as it changes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from trajstore.errors import SnapshotExpiredError
from trajstore.sampling.batches.batch_assembler import BatchAssembler
from trajstore.sampling.step_columns.step_table import StepTable
from trajstore.schema import Array
from trajstore.writing.writer import Writer


class _Saved(NamedTuple):
    """What was handed to the writer for one source."""

    first: int  # the first row with a value
    stop: int  # the row after the last
    n_single: int  # values written since the column was written whole


class StoredColumn:
    """Loads stored values into a column of the step table, and hands its changes to a writer.

    Not thread-safe: call methods with the assembler's lock held.

    Args:
        assembler: Provides the index and the snapshot.
        table: Holds the column.
        name: The name of the column, in the table and in streams.
        check: Called with the stored values by stream; raises if they do not fit the column.
        fill: Returns the value of stored rows that this session does not have and that never had a value.
    """

    def __init__(
        self,
        assembler: BatchAssembler,
        table: StepTable,
        name: str,
        check: Callable[[Mapping[str, Array]], None],
        fill: Callable[[], Any],
    ) -> None:
        self._assembler, self._table, self._name, self._check, self._fill = assembler, table, name, check, fill
        self._known: set[str] = set()  # streams whose stored values were loaded
        self._saved_by = ""  # the stream of the writer that the values were saved with
        self._saved: dict[int, _Saved] = {}  # by source

    def follow(self) -> None:
        """Follow the index, and load the stored values of streams that are new in it.

        Values of streams without a step are not read: they may be deleted at any moment.
        """
        index, snapshot = self._assembler.index, self._assembler.snapshot
        if len(index.numbers) == len(self._known):  # streams are never removed
            self._table.follow()
            return
        new = index.numbers.keys() - self._known
        targets = {t for r in snapshot.streams for t, named in r.columns.items() if self._name in named}
        wanted = new & targets & self._with_steps() if new & targets else set()
        stored = snapshot.columns.read(self._name, wanted) if wanted else {}
        self._check({name: values for name, (_, values) in stored.items()})
        self._table.follow()
        self._table.load(self._name, {index.numbers[name] + 1: found for name, found in stored.items()})
        self._known |= new

    def _with_steps(self) -> set[str]:
        """Names of the streams that have steps in the index; looks at all episodes."""
        index = self._assembler.index
        has_steps = index.lengths(index.first, index.n) > 0
        numbers = set(index.stream.host[index.first : index.n][has_steps].tolist())
        return {name for name, number in index.numbers.items() if number in numbers}

    def save(self, writer: Writer) -> int:
        """Hand changed values to a writer, for its next commit; returns the number of values.

        Changes are written as single values; once they exceed half of a stream's rows, the whole column of that
        stream is written. If the writer raises, the changes are kept for the next call.
        """
        is_new = self._saved_by != writer.stream
        if is_new:  # values handed to another writer may never have become durable
            self._saved_by, self._saved = writer.stream, {}
        changes = self._table.take_changes(self._name)
        if is_new:
            for source in range(1, len(self._assembler.index.numbers) + 1):
                rows, address = self._table.rows_of(source)
                if len(rows):
                    changes[source] = rows, address
        try:
            return self._hand_over(changes, writer)
        except BaseException:
            self._table.restore_changes(self._name, changes)
            raise

    def _hand_over(self, changes: Mapping[int, tuple[Array, Array]], writer: Writer) -> int:
        index = self._assembler.index
        streams, marks, n = list(index.numbers), self._assembler.marks, 0
        n_rows = {record.id: record.rows for record in self._assembler.snapshot.streams}
        for source, (rows, address) in changes.items():
            stream = streams[source - 1]
            first, stop = int(marks[source]), n_rows[stream]
            saved = self._saved.get(source, _Saved(0, 0, stop))
            is_kept = rows >= max(first, saved.first)
            rows, address = rows[is_kept], address[is_kept]
            if saved.n_single + len(rows) > (stop - first) // 2:
                values = self._by_row(source, first, stop)
                writer.put_column(self._name, stream, values, first=first)
                self._saved[source] = _Saved(first, stop, 0)
            else:
                values = self._table.get(self._name, address)
                rows, values = self._without_gaps(rows, values, max(saved.first, saved.stop))
                writer.put_column(self._name, stream, values, rows=rows)
                last = int(rows[-1]) + 1 if len(rows) else 0
                self._saved[source] = _Saved(saved.first, max(saved.stop, last), saved.n_single + len(rows))
            n += len(values)
        return n

    def _without_gaps(self, rows: Array, values: Array, start: int) -> tuple[Array, Array]:
        """Single values, and those of the rows between them from ``start`` on: rows that are left out read as 0.

        These rows were evicted in this session before they were saved, and others may still show them.
        """
        n_new = len(rows) - int(np.searchsorted(rows, start))
        if not n_new or n_new == int(rows[-1]) + 1 - start:
            return rows, values
        every = np.concatenate([rows[:-n_new], np.arange(start, int(rows[-1]) + 1)])
        filled = np.full((len(every), *values.shape[1:]), self._fill(), values.dtype)
        filled[np.searchsorted(every, rows)] = values
        return every, filled

    def _by_row(self, source: int, first: int, stop: int) -> Array:
        """Values of rows ``first`` to ``stop`` of a source.

        Rows above the mark may be evicted in this session while others still show them: these keep their stored
        value.
        """
        rows, address = self._table.rows_of(source)
        is_kept = rows >= first
        found = self._table.get(self._name, address[is_kept])
        values = np.full((stop - first, *found.shape[1:]), self._fill(), found.dtype)
        if is_kept.sum() < stop - first:
            stream = list(self._assembler.index.numbers)[source - 1]
            with contextlib.suppress(SnapshotExpiredError):  # another session has replaced them
                for old_first, old in self._assembler.snapshot.columns.read(self._name, [stream]).values():
                    kept = old[max(0, first - old_first) :][: stop - max(first, old_first)]
                    values[max(0, old_first - first) :][: len(kept)] = kept
        values[rows[is_kept] - first] = found
        return values
