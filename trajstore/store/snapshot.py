"""An immutable view of a store at one moment: its streams, its episodes and their rows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from trajstore.errors import CorruptionError, DataError, SnapshotExpiredError
from trajstore.format.checkpoint_record import Checkpoint
from trajstore.format.commit_record import CommitRecord, StreamExtent
from trajstore.format.episode_table import EpisodeTable, SpanExtent
from trajstore.format.handles import EpisodeKey
from trajstore.format.lineage import Lineage, discarded_episodes
from trajstore.format.marks import Marks
from trajstore.format.packed_streams import shown_records
from trajstore.format.spans import Spans, VisibleSpans, span_columns
from trajstore.schema import Array, Schema, nest, selected_paths, widen_bfloat16
from trajstore.storage import Storage
from trajstore.store.column_reader import ColumnReader, ColumnRows, StepNumbers, read_records
from trajstore.store.episodes_ahead import EpisodesAhead
from trajstore.store.schema_objects import check_streams, union_of_schemas
from trajstore.store.snapshot_html import SnapshotHtml
from trajstore.store.span_rows import SpanRows
from trajstore.store.stored_copies import at_place_of, is_moved, load_records, with_packed_copies
from trajstore.store.stream_reader import MissingChunkError, StreamReader
from trajstore.store.stream_view import StreamView, read_spans_ahead

T = TypeVar("T")


class Snapshot(SnapshotHtml):
    """An immutable view of a store at one moment.

    A snapshot names one commit of each stream. It reads span tables on first use, and rows when they are requested.
    It is thread-safe, and cheap to make and to pickle.

    It shows the episodes of one `Lineage`: by default that of the newest session, so that what a session wrote
    before it was killed, and the session that resumed its checkpoint does not have, is not shown. `history` has it.
    """

    def __init__(
        self,
        storage: Storage,
        schema: Schema | None,
        streams: Mapping[str, StreamView],
        lineage: Lineage | None = None,
        stored: Mapping[str, CommitRecord] | None = None,
    ) -> None:
        self._storage = storage
        self._schema = schema
        self._streams = dict(streams)
        self._lineage = lineage  # None: that of the newest session
        self._stored = stored  # by id, every record that was read; None: those of the streams
        self._pins: dict[str, str] = {}  # by stream: id of the checkpoint that pins its rows

    @staticmethod
    def at(storage: Storage, schema: Schema | None, checkpoint: Checkpoint) -> Snapshot:
        """The view of a checkpoint: each of its streams up to its extent, with open episodes shown as cut.

        Lists the streams, and reads the records of those that were still open when the checkpoint was taken or were
        created later. Streams that were packed since are read from the packed copies.

        Raises:
            CorruptionError: A stream is missing, or has fewer rows than the checkpoint lists.
        """
        where = f"{storage.display}: checkpoint '{checkpoint.id}'"
        extents = checkpoint.streams
        records = {name: extent.record for name, extent in extents.items() if extent.record is not None}
        records |= read_records(storage, [name for name in extents if name not in records])
        records = with_packed_copies(storage, extents, records)
        if missing := [name for name in extents if name not in records]:
            raise CorruptionError(f"{where} needs streams that are missing: {', '.join(missing)}")
        try:
            ended = {name: extent.truncate(records[name]) for name, extent in extents.items()}
        except CorruptionError as error:
            raise CorruptionError(f"{where}: {error}") from error
        streams = {name: StreamView(StreamReader(storage, record, schema)) for name, record in ended.items()}
        snapshot = Snapshot._from_streams(storage, schema, streams, streams.values())
        snapshot._lineage = Lineage()
        snapshot._pins = dict.fromkeys(streams, checkpoint.id)
        return snapshot

    @staticmethod
    def _from_streams(
        storage: Storage, schema: Schema | None, streams: Mapping[str, StreamView], new: Iterable[StreamView]
    ) -> Snapshot:
        if schema is None and streams:  # streams differ only in fields with a fill, which all of them show
            schema = union_of_schemas(storage.display, [s.record for s in streams.values()])
            streams = {name: StreamView(StreamReader(storage, s.record, schema)) for name, s in streams.items()}
        elif schema is not None:
            check_streams(storage.display, schema, [s.record for s in new])
        return Snapshot(storage, schema, dict(sorted(streams.items(), key=_by_creation)))

    @staticmethod
    def load(
        storage: Storage,
        schema: Schema | None,
        before: Snapshot | None = None,
        names: Sequence[str] | None = None,
    ) -> Snapshot:
        """The newest commit of every stream.

        Costs one listing, and one wave of reads of the records that may have changed since ``before``.

        Args:
            storage: Storage of the store.
            schema: Its schema; None if it has none yet.
            before: What is known already.
            names: The names below ``streams``; None: list them.
        """
        known = {record.id: record for record in before.stored} if before else {}
        old = before._streams if before else {}
        stored = load_records(storage, known, names)
        streams: dict[str, StreamView] = {}
        for record in shown_records(stored.values()):
            name, place = record.id, record.location or record.id
            if name not in old:
                streams[name] = StreamView(StreamReader(storage, record, schema))
            elif old[name].record.folder == record.folder and stored[place] is known.get(place):
                streams[name] = old[name]
            else:
                streams[name] = old[name].advanced(record)
        new = [s for name, s in streams.items() if name not in old]
        snapshot = Snapshot._from_streams(storage, schema, streams, new)
        snapshot._stored = stored
        return snapshot

    @property
    def stored(self) -> tuple[CommitRecord, ...]:
        """The record of every stored stream, also of originals that were packed and of unfinished copies."""
        if self._stored is None:
            return tuple(record.as_stored() for record in self.streams)
        return tuple(self._stored.values())

    def advanced(self, record: CommitRecord) -> Snapshot:
        """This view with one stream advanced to a record; reads nothing.

        Returns the same snapshot if it already shows that commit or a newer one.
        """
        old = self._streams.get(record.id)
        if old is not None and old.record.commit >= record.commit:
            return self
        reader = StreamReader(self._storage, record, self._schema)
        streams = {**self._streams, record.id: StreamView(reader) if old is None else old.advanced(record)}
        snapshot = Snapshot(self._storage, self._schema or record.schema, streams, self._lineage)
        snapshot._pins = self._pins
        return snapshot

    def joined(self, other: Snapshot, world: str) -> Snapshot:
        """This view plus the streams of one world from another view.

        Streams that the other view reads from other objects, because they were packed, are read from there.
        """
        more = {name: s for name, s in other._streams.items() if s.record.world == world}
        more |= {
            name: s.advanced(at_place_of(other._streams[name].record, s.record))
            for name, s in self._streams.items()
            if name not in more and name in other._streams and other._streams[name].record.folder != s.record.folder
        }
        snapshot = Snapshot(self._storage, self._schema or other.schema, {**self._streams, **more}, self.lineage)
        snapshot._pins = self._pins
        return snapshot

    def ended(self, names: Collection[str]) -> Snapshot:
        """This view with some streams treated as finished: their open episodes are shown as cut."""
        streams = dict(self._streams)
        for name in names:
            if name in streams and not streams[name].record.is_sealed:
                streams[name] = streams[name].advanced(replace(streams[name].record, is_sealed=True))
        snapshot = Snapshot(self._storage, self._schema, streams, self._lineage)
        snapshot._pins = self._pins
        return snapshot

    def only(self, chosen: Callable[[CommitRecord], bool]) -> Snapshot:
        """This view restricted to the streams whose records satisfy a condition."""
        streams = {name: stream for name, stream in self._streams.items() if chosen(stream.record)}
        snapshot = Snapshot(self._storage, self._schema, streams, self.lineage)
        snapshot._pins = self._pins
        return snapshot

    @cached_property
    def lineage(self) -> Lineage:
        """What this snapshot shows of each stream; the rest is abandoned."""
        return Lineage.newest(self.streams) if self._lineage is None else self._lineage

    def within(self, lineage: Lineage) -> Snapshot:
        """This view as one lineage has it; streams of which nothing belongs to the lineage are left out."""
        snapshot = self.only(lambda record: not lineage.is_abandoned(record.id))
        snapshot._lineage = lineage
        return snapshot

    def with_abandoned(self) -> Snapshot:
        """This view with everything that is stored, also what belongs to no session that goes on."""
        return self.within(Lineage())

    def cuts(self) -> dict[str, StreamExtent]:
        """The extent of every stream in this view, for a checkpoint; streams without wanted rows are left out."""
        records, lineage = self.streams, self.lineage
        live, discarded = self._first_rows(), discarded_episodes(records, lineage)
        extents: dict[str, StreamExtent] = {}
        for r in records:
            episodes = tuple(sorted(discarded.get(r.shown_as, ())))
            stop, limit = lineage.n_rows(r), lineage.limits.get(r.id)
            text_bytes = r.text_bytes if limit is None else limit.text_bytes
            extent = StreamExtent(min(live[r.id], stop), stop, lineage.n_spans(r), text_bytes, None, episodes)
            if extent.first < extent.stop:
                extents[r.id] = replace(extent, record=extent.truncate(r)) if r.is_sealed else extent
        return extents

    def __getstate__(self) -> dict[str, Any]:
        # The other process gets the same records, and reads the span tables itself.
        records = {s.record.as_stored().id: s.record.to_bytes() for s in self._streams.values()}
        return {
            "storage": self._storage,
            "records": records,
            "schema": self._schema and self._schema.to_json(),
            "pins": self._pins,
            "lineage": self._lineage,
            "packed": {s.record.location for s in self._streams.values() if s.record.location is not None},
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        storage: Storage = state["storage"]
        self._storage = storage
        self._schema = Schema.from_json(state["schema"]) if state["schema"] else None
        self._pins = state["pins"]
        self._lineage = state["lineage"]
        self._stored = None
        stored = [CommitRecord.from_bytes(data, name, storage.display) for name, data in state["records"].items()]
        records = [record.shown() if record.id in state["packed"] else record for record in stored]
        self._streams = {r.id: StreamView(StreamReader(storage, r, self._schema)) for r in records}

    @property
    def schema(self) -> Schema | None:
        """The schema of the store; None until one is declared or data is committed."""
        return self._schema

    @property
    def streams(self) -> tuple[CommitRecord, ...]:
        """The commit records of all streams, oldest stream first."""
        return tuple(stream.record for stream in self._streams.values())

    @property
    def n_rows(self) -> int:
        """Number of committed rows, including final rows and evicted rows."""
        return sum(stream.record.rows for stream in self._streams.values())

    @cached_property
    def episodes(self) -> EpisodeTable:
        """The episode table: one row an episode. Read on first use."""
        return self._table(self.parts())

    def _table(self, parts: Sequence[VisibleSpans], *, is_history: bool = False) -> EpisodeTable:
        readers = self.readers
        return EpisodeTable(
            self.names,
            parts,
            self._schema,
            lambda s, a, b: readers[s].read_text(a, b),
            is_history=is_history,
            derived=StepNumbers(self.columns, list(self._streams)),
        )

    def history(self, *, abandoned: bool = False) -> EpisodeTable:
        """The episode table of the whole run: evicted episodes too, until their stream is removed as a whole.

        ``length`` counts evicted steps. The columns ``is_evicted`` and ``is_abandoned`` say which episodes are no
        longer stored or shown. Rows differ from those of `episodes`: pass keys to `read_episode`.

        Args:
            abandoned: Also list what sessions wrote after a checkpoint from which a later session resumed. If only
                the last steps of an episode are abandoned, they are a row of their own.
        """
        names, parts = self.names, self.parts()
        if abandoned:
            everything = self._parts(Lineage(), self._first_rows())
            for part, whole in zip(list(parts), everything, strict=True):
                if part.limit is not None:
                    parts.append(replace(whole, stream=whole.stream + len(names), n_skipped=part.limit))
        return self._table(parts, is_history=True)

    @property
    def storage(self) -> Storage:
        return self._storage

    @property
    def names(self) -> list[str]:
        """Ids of the streams that handles name. The first ones are the streams of `readers`, in the same order."""
        return list(self._positions())

    @property
    def readers(self) -> list[StreamReader]:
        return [stream.reader for stream in self._streams.values()]

    def _positions(self) -> dict[str, int]:
        """Positions of the streams that handles name: first stored streams, then streams that others replace."""
        replaced = (s.record.replaces.stream for s in self._streams.values() if s.record.replaces)
        return {name: i for i, name in enumerate(dict.fromkeys((*self._streams, *replaced)))}

    def parts(self) -> list[VisibleSpans]:
        """The spans of every stream as this view shows them; stream numbers are positions in `names`."""
        return self._parts(self.lineage, self._first_rows())

    def _first_rows(self) -> Marks:
        """The first row of each stream that is neither evicted nor below what the lineage has of it."""
        marks = Marks.wanted(self.streams)
        limits = {stream: limit.first for stream, limit in self.lineage.limits.items() if limit is not None}
        return marks.raised(Marks(limits).only(marks))

    def _parts(self, lineage: Lineage, first_rows: Mapping[str, int]) -> list[VisibleSpans]:
        """The spans of every stream that belong to a lineage, with the rows from ``first_rows`` on."""
        position = self._positions()
        records = [stream.record for stream in self._streams.values()]
        discarded = discarded_episodes(records, lineage)
        dead = {s for r in records for s in r.view.dead}
        hidden: dict[str, tuple[tuple[int, int], ...]] = {}
        for r in records:
            if r.replaces and not lineage.is_abandoned(r.id):
                place = (r.replaces.start, r.replaces.stop)
                hidden[r.replaces.stream] = (*hidden.get(r.replaces.stream, ()), place)
        read_spans_ahead(self._storage, (s for s in self._streams.values() if lineage.n_spans(s.record)))
        parts = []
        for name, stream in self._streams.items():
            record, logical = stream.record, stream.record.shown_as
            is_limited = name in lineage.limits
            part = VisibleSpans(
                stream=position[logical],
                source=position[name],
                spans=self._spans_of(stream, lineage),
                columns=span_columns(record.schema),
                first_row=first_rows.get(name, 0),
                # What follows a limit was abandoned, so an episode that is open there was cut.
                is_finished=record.is_sealed or name in dead or is_limited,
                hidden=hidden.get(name, ()),
                discarded=frozenset(discarded.get(logical, ())),
                limit=lineage.n_spans(record) if is_limited else None,
            )
            parts.append(part)
        return parts

    def _spans_of(self, stream: StreamView, lineage: Lineage) -> Spans:
        n = lineage.n_spans(stream.record)
        if not n:  # nothing to read
            ints, floats = span_columns(stream.record.schema)
            return Spans(np.empty((0, len(ints)), np.int64), np.empty((0, len(floats)), np.float64))
        return self._explained(0, lambda: stream.spans).first(n)

    def read_episode(
        self,
        episode: int | EpisodeKey | tuple[str, int],
        *,
        fields: Iterable[str] | None = None,
        columns: Iterable[str] | bool = False,
        start: int = 0,
        stop: int | None = None,
    ) -> dict[str, Any]:
        """Read the steps of one episode as new numpy arrays, nested as they were written.

        Fields with a final value have one row more than the others if the episode has its final values and ``stop``
        reaches its end. bfloat16 is returned as float32, which holds it exactly. Episodes that are read in order
        read each chunk once: the snapshot keeps the chunks that reads ended in, up to 16 MiB. From an object store
        the next episodes are fetched in the background, up to 64 MiB of them.

        Args:
            episode: Its row in `episodes`, or its key.
            fields: Paths of fields, or names of groups, to read; all by default.
            columns: Names of derived columns to read too, such as ``("priority",)``; True: all of them. Steps
                without a stored value have NaN, or 0 in columns that are not floats.
            start: First step, counted from the first step that is still stored.
            stop: Step after the last; the end of the episode by default.

        Raises:
            EpisodeNotFoundError: This snapshot does not show an episode with this key.
            DataError: A derived column does not exist.
            IndexError: The episode does not have these steps.
            SnapshotExpiredError: The steps were evicted since the snapshot was made; refresh the store.
            CorruptionError: A chunk is damaged or missing.
        """
        table = self.episodes
        i = episode if isinstance(episode, (int, np.integer)) else table.find(EpisodeKey(*episode))
        n_rows, has_final = table.n_rows(int(i)), table.has_final(int(i))
        n_steps = n_rows - has_final
        end = n_steps if stop is None else stop
        if not 0 <= start <= end <= n_steps:
            raise IndexError(f"episode {episode}: steps {start} to {end}, but it has {n_steps} steps")
        spans = table.spans(int(i))
        schema = self._schema
        assert schema is not None  # a store with an episode has a schema
        arrays: dict[str, Array] = {}
        paths = selected_paths(schema, fields)
        if self._ahead is not None:
            last = n_rows if end == n_steps else end
            self._ahead.follow(int(i) % len(table), start, last, [f"steps/{path}" for path in paths])
        for path in paths:
            last = end + 1 if has_final and end == n_steps and schema[path].final else end
            rows = self._rows.read(f"steps/{path}", spans, start, last)
            arrays[path] = widen_bfloat16(rows) if schema[path].dtype == "bfloat16" else rows
        for name in self.columns.names if columns is True else columns or ():
            arrays[name] = self._column_rows(name, spans, start, end)
        return nest(arrays)

    def _column_rows(self, name: str, spans: Sequence[SpanExtent], start: int, stop: int) -> Array:
        streams = list(self._streams)
        stored = self.column(name, {streams[span.source] for span in spans})
        values = ColumnRows(next(iter(self.columns.states(name).values())), stored)
        parts = [values.read(streams[span.source], span.row_start, span.row_stop) for span in spans]
        rows: Array = np.concatenate(parts)[start:stop] if parts else values.read("", 0, 0)
        return rows

    def column(self, name: str, targets: Iterable[str] | None = None) -> dict[str, tuple[int, Array]]:
        """Read a derived column: by stream id, the first row that has a value, and the values from there on.

        Rows that were never set are 0. If several writers have written the column for a stream, the newest one
        counts. Rows that this snapshot does not show are left out.

        Args:
            name: Name of the column.
            targets: Ids of the streams to read it for; all by default.

        Raises:
            DataError: This snapshot has no such column.
            SnapshotExpiredError: The column was replaced since the snapshot was made; refresh the store.
        """
        columns = self.columns
        if name not in columns.names:
            hint = "; it is a field: read it with read_episode" if self._schema and name in self._schema else ""
            known = ", ".join(columns.names) or "none"
            raise DataError(f"no derived column '{name}' in {self!r}; it has {known}{hint}")
        return columns.read(name, None if targets is None else set(targets))

    @cached_property
    def columns(self) -> ColumnReader:
        """The derived columns that this snapshot shows."""
        return ColumnReader(self._storage, self.readers)

    @cached_property
    def _rows(self) -> SpanRows:
        return SpanRows(self.readers, self._explained, None if self._ahead is None else self._ahead.ahead)

    @cached_property
    def _ahead(self) -> EpisodesAhead | None:
        """Fetches episodes ahead, where a read is a request over the network."""
        return EpisodesAhead(self.readers, self.episodes) if self._storage.is_remote else None

    def _explained(self, row: int, read: Callable[[], T]) -> T:
        """Call ``read``; if a chunk is missing, raise an error that says whether it was evicted or lost."""
        try:
            return read()
        except MissingChunkError as missing:
            raise self.reason(missing, row) from missing

    def reason(self, missing: MissingChunkError, row: int) -> SnapshotExpiredError | CorruptionError:
        """The error for a missing chunk that holds this row.

        It was evicted, packed or lost, according to the newest records.
        """
        fresh, is_pinned = Snapshot.load(self._storage, self._schema), self._is_pinned(missing.stream)
        old, new = self._streams.get(missing.stream), fresh._streams.get(missing.stream)
        if old and new and is_moved(old.record, new.record, fresh.stored, is_pinned=is_pinned):
            return SnapshotExpiredError(f"stream '{missing.stream}' was packed; refresh the store")
        if is_pinned:
            return CorruptionError(str(missing))
        first = Marks.wanted(fresh.streams).get(missing.stream, 0)
        if missing.stream not in fresh._streams or first > row:
            return SnapshotExpiredError(
                f"rows from {row} on of stream '{missing.stream}' were evicted; refresh the store"
            )
        return CorruptionError(str(missing))

    def relocated(self) -> Snapshot:
        """This view, with streams that were packed since read from the packed objects."""
        records = {name: s.record for name, s in self._streams.items()}
        found = with_packed_copies(self._storage, records, records)
        streams = {n: s if found[n] is s.record else s.advanced(found[n]) for n, s in self._streams.items()}
        if all(streams[name] is stream for name, stream in self._streams.items()):
            return self
        snapshot = Snapshot(self._storage, self._schema, streams, self._lineage)
        snapshot._pins = self._pins
        return snapshot

    def _is_pinned(self, stream: str) -> bool:
        """Whether the checkpoint that this snapshot shows still exists, and so pins its rows of the stream."""
        if stream not in self._pins:
            return False
        try:
            self._storage.size(f"checkpoints/{self._pins[stream]}/zarr.json")
        except FileNotFoundError:
            return False
        return True

    def __repr__(self) -> str:
        return f"<Snapshot of {self._storage.display}: {len(self._streams)} streams, {self.n_rows} rows>"


def _by_creation(item: tuple[str, StreamView]) -> tuple[float, str]:
    return item[1].record.created_at, item[0]
