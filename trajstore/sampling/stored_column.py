"""A column of the step table as it is stored: a derived column of streams, read once and saved as it changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from trajstore.sampling.batch_assembler import BatchAssembler
from trajstore.sampling.step_table import StepTable
from trajstore.schema import Array
from trajstore.writing.writer import Writer


class StoredColumn:
    """Reads stored values for streams that are new here, and hands changes to a writer.

    Args:
        source: Whose steps these are.
        table: Has a column of this name.
        name: Of the column, in the table and in streams.
        check: Refuses stored values, by stream, that are not what the column holds.
        fill: Gives the value of rows that are stored and not here, and never had one.
    """

    def __init__(
        self,
        source: BatchAssembler,
        table: StepTable,
        name: str,
        check: Callable[[Mapping[str, Array]], None],
        fill: Callable[[], Any],
    ) -> None:
        self._source, self._table, self._name, self._check, self._fill = source, table, name, check, fill
        self._known: set[str] = set()  # streams whose stored values were looked for
        self._saved_by = ""  # the stream of the writer that has put what is stored
        self._saved: dict[int, tuple[int, int]] = {}  # by source: first row of its generation, changes since

    def follow(self) -> None:
        """Catch up with the index, and load what is stored for streams that are new in it."""
        index, snapshot = self._source.index, self._source.snapshot
        fresh = index.numbers.keys() - self._known
        targets = {t for r in snapshot.streams for t, named in r.columns.items() if self._name in named}
        stored = snapshot.column(self._name, fresh & targets) if fresh & targets else {}
        self._check({name: values for name, (_, values) in stored.items()})
        self._table.follow()
        self._table.load(self._name, {index.numbers[name] + 1: found for name, found in stored.items()})
        self._known |= fresh

    def save(self, writer: Writer) -> int:
        """Hand what has changed to a writer, for its next commit; returns how many values that is.

        Single values at first; once they are more than half of a stream's rows, all of them.
        """
        is_new = self._saved_by != writer.stream
        if is_new:  # another writer: what the one before had may never have become durable
            self._saved_by, self._saved = writer.stream, {}
        changes = self._table.take_changes(self._name)
        if is_new:
            for source in range(1, len(self._source.index.numbers) + 1):
                rows, address = self._table.rows_of(source)
                if len(rows):
                    changes[source] = rows, address
        try:
            return self._hand_over(changes, writer)
        except BaseException:
            self._table.restore_changes(self._name, changes)
            raise

    def _hand_over(self, changes: Mapping[int, tuple[Array, Array]], writer: Writer) -> int:
        names, marks, n = list(self._source.index.numbers), self._source.marks, 0
        n_rows = {record.id: record.rows for record in self._source.snapshot.streams}
        for source, (rows, address) in changes.items():
            name = names[source - 1]
            first, stop = int(marks[source]), n_rows[name]
            old_first, n_deltas = self._saved.get(source, (0, stop))
            here = rows >= max(first, old_first)
            rows, address = rows[here], address[here]
            if n_deltas + len(rows) > (stop - first) // 2:
                values = self._by_row(source, first, stop)
                writer.put_column(self._name, name, values, first=first)
                self._saved[source] = first, 0
            else:
                values = self._table.get(self._name, address)
                writer.put_column(self._name, name, values, rows=rows)
                self._saved[source] = old_first, n_deltas + len(rows)
            n += len(values)
        return n

    def _by_row(self, source: int, first: int, stop: int) -> Array:
        """Values of a stream's rows. Rows above the mark may be evicted here, and others see them: theirs stay."""
        rows, address = self._table.rows_of(source)
        here = rows >= first
        found = self._table.get(self._name, address[here])
        values = np.full((stop - first, *found.shape[1:]), self._fill(), found.dtype)
        if source in self._saved and here.sum() < stop - first:
            stream = list(self._source.index.numbers)[source - 1]
            for old_first, old in self._source.snapshot.column(self._name, [stream]).values():
                kept = old[max(0, first - old_first) :][: stop - max(first, old_first)]
                values[max(0, old_first - first) :][: len(kept)] = kept
        values[rows[here] - first] = found
        return values
