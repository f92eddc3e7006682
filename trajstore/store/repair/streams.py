"""Repairs one stream: puts its intact rows into the new store, under the same numbers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from trajstore.errors import CorruptionError
from trajstore.format.commit_record import CommitRecord, StreamExtent
from trajstore.format.spans import Spans, check_spans
from trajstore.schema import Array
from trajstore.storage import Storage
from trajstore.store.array_writing import put_array
from trajstore.store.repair.objects import ArrayDamage, StoredArray, salvage
from trajstore.store.repair.report import Damage, LostEpisode, RepairReport, ShortenedEpisode
from trajstore.store.repair.spans import DamagedRows, SalvagedSpans, SpanTable, salvage_spans
from trajstore.store.stream_parts import summed_reward
from trajstore.store.stream_reader import StreamReader

SPAN_ARRAYS = ("spans/ints", "spans/floats", "spans/text")


class LostStreamError(Exception):
    """Nothing of a stream can be kept."""


@dataclass(slots=True)
class RepairedStream:
    """One stream in the new store.

    Attributes:
        record: Its record there, without the changes that other streams ask for.
        damaged: Its damaged rows.
        spans: How its span table has changed.
        first: First row that readers show.
        lost_columns: Targets and names of derived columns that it held and that are damaged.
    """

    record: CommitRecord
    damaged: DamagedRows
    spans: SalvagedSpans
    first: int
    lost_columns: set[tuple[str, str]] = field(default_factory=set)

    def fault_for(self, extent: StreamExtent) -> str | None:
        """Why a checkpoint can't show an extent of the stream any more; None if it can."""
        lost = self.spans.first_lost_span
        if lost is not None and lost < extent.spans:
            return "its spans are damaged"
        if self.damaged.hits(min(extent.first, self.first), extent.stop):
            return "its rows are damaged"
        try:
            extent.truncate(self.record)
        except CorruptionError as error:
            return str(error)
        return None

    def remapped(self, extent: StreamExtent) -> StreamExtent:
        """An extent that a session continues, with as many spans of it as were kept."""
        if self.spans.first_lost_span is None:
            return extent
        n = self.spans.spans_before(extent.spans)
        stop = min(extent.stop, self.record.rows)
        return replace(
            extent, first=min(extent.first, stop), stop=stop, spans=n, text_bytes=self.spans.text_before(n)
        )


class StreamRepair:
    """Repairs streams one by one.

    Args:
        source: The damaged store.
        target: The new store.
        report: Takes what is damaged and lost.
        tell: Called with the bytes of objects that were read.
    """

    def __init__(self, source: Storage, target: Storage, report: RepairReport, tell: Callable[[int], None]) -> None:
        self._source, self._target, self._report, self._tell = source, target, report, tell

    def run(self, record: CommitRecord, first: int, stored: int, not_shown: Collection[int] = ()) -> RepairedStream:
        """Repair a stream.

        Args:
            record: The stream as readers show it.
            first: First row that readers show.
            stored: First row that must be stored: checkpoints may need more than readers show.
            not_shown: Numbers of its episodes that sessions have discarded.

        Raises:
            LostStreamError: Its span table is lost, so nobody knows what its rows are.
        """
        n_damages = len(self._report.damages)
        table = self._span_table(record)
        if record.spans and not table.is_known.any():
            raise LostStreamError("its span table is lost, which says what its rows are")
        if not table.is_known.all():
            record = self._cut(record, table)
        damaged = self._salvage_steps(record, stored)
        rewards = self._rewards(record)
        spans = salvage_spans(table, record, damaged, first, stored, rewards)
        if record.replaces is not None and len(self._report.damages) > n_damages:
            raise LostStreamError("it holds a part of another stream, and is damaged")
        record = self._put_spans(record, spans)
        lost_columns = self._salvage_columns(record)
        self._note_losses(record, spans, not_shown)
        return RepairedStream(record, damaged, spans, first, lost_columns)

    # ---- spans

    def _span_table(self, record: CommitRecord) -> SpanTable:
        values, damages = {}, {}
        for path in SPAN_ARRAYS:
            layout = record.layouts[path]
            values[path] = np.zeros((record.length(path), *layout.row_shape), layout.dtype)
            damages[path] = self._salvage(record, path, 0, values[path])
        is_known = np.ones(record.spans, bool)
        for path in SPAN_ARRAYS[:2]:
            for start, stop, _ in damages[path].ranges():
                is_known[start:stop] = False
        lost_text = [(start, stop) for start, stop, _ in damages["spans/text"].ranges()]
        ints, floats, text = (values[path] for path in SPAN_ARRAYS)
        table = SpanTable(ints, floats, is_known, text, lost_text)
        self._check(record, table)
        return table

    def _check(self, record: CommitRecord, table: SpanTable) -> None:
        known = Spans(table.ints[table.is_known], table.floats[table.is_known])
        try:
            check_spans(known, record.rows, record.text_bytes)
        except CorruptionError as error:
            self._report.damages.append(Damage(f"stream '{record.id}', spans", str(error)))
            raise LostStreamError("its span table has impossible values") from error

    def _cut(self, record: CommitRecord, table: SpanTable) -> CommitRecord:
        """The record without rows after the last known span."""
        last = int(table.ints[np.flatnonzero(table.is_known)[-1], 4])
        return record if table.is_known[-1] else replace(record, rows=last)

    def _put_spans(self, record: CommitRecord, spans: SalvagedSpans) -> CommitRecord:
        if not spans.is_changed:
            return record
        values: Mapping[str, Array] = dict(zip(SPAN_ARRAYS, (spans.ints, spans.floats, spans.text), strict=True))
        for path, rows in values.items():
            self._target.remove_tree(f"{record.folder}/{path}")
            put_array(self._target, record.folder, path, record.layouts[path], rows)
        view = record.view
        if spans.hidden:
            discarded = {*view.discarded.get(record.id, ()), *spans.hidden}
            view = replace(view, discarded={**view.discarded, record.id: tuple(sorted(discarded))})
        return replace(record, spans=len(spans.ints), text_bytes=len(spans.text), view=view)

    # ---- rows

    def _salvage(self, record: CommitRecord, path: str, first: int = 0, values: Array | None = None) -> ArrayDamage:
        array = StoredArray(f"{record.folder}/{path}", record.layouts[path], record.length(path), first)
        prefix = f"{record.folder}/{path}"
        damage = salvage(self._source, array, self._target, prefix, values=values, report=self._tell)
        for start, stop, what in damage.ranges():
            where = f"stream '{record.id}', array '{path}', rows {start} to {stop}"
            self._report.damages.append(Damage(where, what))
        return damage

    def _salvage_steps(self, record: CommitRecord, stored: int) -> DamagedRows:
        every: list[tuple[int, int]] = []
        others: list[tuple[int, int]] = []
        for path, spec in record.schema.fields.items():
            ranges = self._salvage(record, f"steps/{path}", stored).ranges()
            (every if spec.final else others).extend((start, stop) for start, stop, _ in ranges)
        return DamagedRows(merged(every), merged(others))

    def _rewards(self, record: CommitRecord) -> Callable[[int, int], Array] | None:
        """Reads rewards that are intact, from the new store; None if returns are not sums of rewards."""
        path = summed_reward(record.schema)
        if path is None:
            return None
        reader = StreamReader(self._target, record)
        return partial(reader.read_rows, f"steps/{path}")

    # ---- columns

    def _salvage_columns(self, record: CommitRecord) -> set[tuple[str, str]]:
        """Copy derived columns; returns those that are damaged, by target and name."""
        lost = set()
        for target, named in record.columns.items():
            for name, state in named.items():
                damages = [self._salvage(record, path) for path in state.lengths(target, name)]
                if any(damages):
                    lost.add((target, name))
        return lost

    def _note_losses(self, record: CommitRecord, spans: SalvagedSpans, not_shown: Collection[int]) -> None:
        report, stream = self._report, record.shown_as
        for number, n in spans.lost.items():
            if number not in not_shown:
                report.lost_episodes.append(LostEpisode(stream, number, n))
        for number, (n, n_lost) in spans.shortened.items():
            if number not in not_shown:
                report.shortened.append(ShortenedEpisode(stream, number, n, n_lost))
        report.lost_metadata += [(stream, number) for number in spans.lost_metadata if number not in not_shown]


def merged(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ranges of rows without overlaps, in order."""
    found: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(stop, found[-1][1])
        else:
            found.append((start, stop))
    return found
