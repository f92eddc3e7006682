"""A column of the step table and its stored form: read from streams once, then saved as it changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from trajstore.sampling.batches.batch_assembler import BatchAssembler
from trajstore.sampling.step_columns.step_table import StepTable
from trajstore.schema import Array
from trajstore.writing.writer import Writer


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
        self._saved: dict[int, tuple[int, int]] = {}  # by source: first row written whole, single values since

    def follow(self) -> None:
        """Follow the index, and load the stored values of streams that are new in it."""
        index, snapshot = self._assembler.index, self._assembler.snapshot
        new = index.numbers.keys() - self._known
        targets = {t for r in snapshot.streams for t, named in r.columns.items() if self._name in named}
        stored = snapshot.column(self._name, new & targets) if new & targets else {}
        self._check({name: values for name, (_, values) in stored.items()})
        self._table.follow()
        self._table.load(self._name, {index.numbers[name] + 1: found for name, found in stored.items()})
        self._known |= new

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
            old_first, n_single = self._saved.get(source, (0, stop))
            is_kept = rows >= max(first, old_first)
            rows, address = rows[is_kept], address[is_kept]
            if n_single + len(rows) > (stop - first) // 2:
                values = self._by_row(source, first, stop)
                writer.put_column(self._name, stream, values, first=first)
                self._saved[source] = first, 0
            else:
                values = self._table.get(self._name, address)
                writer.put_column(self._name, stream, values, rows=rows)
                self._saved[source] = old_first, n_single + len(rows)
            n += len(values)
        return n

    def _by_row(self, source: int, first: int, stop: int) -> Array:
        """Values of rows ``first`` to ``stop`` of a source.

        Rows above the mark may be evicted in this session while others still show them: these keep their stored
        value.
        """
        rows, address = self._table.rows_of(source)
        is_kept = rows >= first
        found = self._table.get(self._name, address[is_kept])
        values = np.full((stop - first, *found.shape[1:]), self._fill(), found.dtype)
        if source in self._saved and is_kept.sum() < stop - first:
            stream = list(self._assembler.index.numbers)[source - 1]
            for old_first, old in self._assembler.snapshot.column(self._name, [stream]).values():
                kept = old[max(0, first - old_first) :][: stop - max(first, old_first)]
                values[max(0, old_first - first) :][: len(kept)] = kept
        values[rows[is_kept] - first] = found
        return values
