"""Makes a new store of everything that is intact in a damaged one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from trajstore.errors import CorruptionError, StoreNotFoundError
from trajstore.format.commit_record import CommitRecord
from trajstore.format.ids import is_stream_id
from trajstore.format.lineage import Lineage, discarded_episodes
from trajstore.format.marks import Marks
from trajstore.format.packed_streams import shown_records
from trajstore.storage import Storage, open_storage
from trajstore.store.new_store import Progress, clear_remains, complete, put_record, put_schema
from trajstore.store.repair.checkpoints import CheckpointRepair
from trajstore.store.repair.records import (
    KnownSchema,
    RecordRebuilding,
    lost_record,
    read_known_schema,
    read_records,
    without_foreign_schemas,
)
from trajstore.store.repair.report import RepairReport
from trajstore.store.repair.streams import LostStreamError, RepairedStream, StreamRepair
from trajstore.store.schema_objects import schema_key
from trajstore.store.snapshot import Snapshot
from trajstore.store.store import Url
from trajstore.store.stream_reader import StreamReader
from trajstore.store.verify import verify
from trajstore.store.verify.inspection import Inspection
from trajstore.store.verify.report import VerifyReport
from trajstore.store.verify.store_objects import check_groups, check_root

_PUT_LAST = frozenset({"zarr.json", "streams/zarr.json", "checkpoints/zarr.json"})


def repair(
    source_url: Url,
    target_url: Url,
    *,
    storage_options: Mapping[str, Any] | None = None,
    target_options: Mapping[str, Any] | None = None,
    check: bool = True,
    progress: Progress | None = None,
    fsync: bool = True,
) -> RepairReport:
    """Make a new store of everything that is intact in a damaged store, and say what was lost.

    The damaged store is only read: it may be all that is left, and the next look at it may find more. Objects are
    copied as they are after a check of their checksums. Streams keep their ids and rows their numbers, so handles,
    marks, lineages, priorities and other derived columns stay valid. Nothing is made up:

    - An episode with a damaged step ends before that step, as `cut`; without any step left, it is lost. Steps after
      the damaged one are lost too: an episode has no gaps.
    - Of a damaged span table the spans that can be read are kept. If none can, the stream is lost.
    - A damaged commit record is made again from the metadata of the arrays (of sealed streams), or from checkpoints
      that list the stream; a damaged schema from the commit records.
    - A derived column or a checkpoint is kept if all of it is intact, and all rows that the checkpoint lists.
    - Root and metadata of groups and arrays are written again.

    The target becomes a store when everything is in its place and has passed `verify`. After an interruption,
    repair again to the same URL. Nobody should write to the source at the same time: rows that are evicted while
    they are read count as lost.

    Args:
        source_url: URL of the damaged store.
        target_url: URL of the new store: an empty location, or the remains of an interrupted call.
        storage_options: As in `open`, for the source.
        target_options: As in `open`, for the new store.
        check: Verify the new store before it becomes one.
        progress: Called after every wave of objects with the bytes read so far and in total.
        fsync: As in `open`, for the new store.

    Raises:
        StoreNotFoundError: The source has neither a root nor streams.
        FormatError: The source is no store, or needs a newer trajstore.
        StoreExistsError: The target is a store already, or holds something else.
        CorruptionError: The new store does not pass `verify`.
        StorageError: A storage stopped answering.
    """
    source = open_storage(source_url, storage_options).source
    target = open_storage(target_url, target_options, fsync=fsync)

    def verified() -> None:
        if check and target.list_names("streams"):
            found = verify(target_url, storage_options=target_options).problems
            if wrong := [problem for problem in found if problem.where not in _PUT_LAST]:
                raise CorruptionError(
                    f"{target.display}: the repaired store does not pass verify: {wrong[0]}; check=False keeps it"
                )

    repairing = _Repairing(source, target, progress)
    repairing.put_all()
    verified()
    return repairing.complete()


class _Repairing:
    def __init__(self, source: Storage, target: Storage, progress: Progress | None) -> None:
        self._source, self._target, self._progress = source, target, progress
        self._report = RepairReport(source.display, target.display)
        self._n_bytes = self._total_bytes = 0
        self._schema = KnownSchema(None)
        self._put: dict[str, CommitRecord] = {}

    def put_all(self) -> None:
        """Put everything but the root."""
        report = self._report
        self._check_top()
        stored, faults = read_records(self._source, report)
        stored = without_foreign_schemas(stored, report)
        self._schema = read_known_schema(self._source, stored, report)
        clear_remains(self._target)
        self._total_bytes = sum(self._source.tree_sizes("").values()) if self._progress is not None else 0
        checkpoints = CheckpointRepair(self._source, self._target, report, self._tell)
        rebuilding = RecordRebuilding(self._source, self._schema.schema, checkpoints.found)
        stored |= self._rebuilt(rebuilding, stored, faults)
        shown = {record.id: record for record in shown_records(stored.values())}
        wanted = Marks.wanted(list(shown.values()))
        needed = wanted
        for checkpoint in checkpoints.found:
            needed = needed.lowered(Marks.pinned_by(checkpoint))
        streams = self._repair_streams(shown, wanted, needed)
        self._put = self._final_records(streams)
        self._put_schema()
        for record in self._put.values():
            put_record(self._target, record)
        checkpoints.run({id_: replace_record(streams[id_], record) for id_, record in self._put.items()})

    def complete(self) -> RepairReport:
        """Put the root; returns the report."""
        complete(self._target, self._schema.schema, self._put)
        if self._progress is not None:
            self._progress(self._total_bytes, self._total_bytes)
        episodes = Snapshot.load(self._target, self._schema.schema).episodes
        self._report.n_streams = len(self._put)
        self._report.n_episodes, self._report.n_steps = len(episodes), int(episodes["length"].sum())
        return self._report

    def _check_top(self) -> None:
        """Check root and groups, which are simply made again."""
        inspection = Inspection(self._source, False, None, VerifyReport(self._source.display))
        check_root(inspection)
        if not self._source.list_names(""):
            raise StoreNotFoundError(f"{self._source.display}: there is no store here")
        check_groups(inspection)
        self._report.mended += [str(problem) for problem in inspection.report.problems]

    def _tell(self, n_bytes: int) -> None:
        self._n_bytes += n_bytes
        if self._progress is not None:
            self._progress(min(self._n_bytes, self._total_bytes), self._total_bytes)

    # ---- commit records

    def _rebuilt(
        self, rebuilding: RecordRebuilding, stored: Mapping[str, CommitRecord], faults: Mapping[str, str]
    ) -> dict[str, CommitRecord]:
        """The records of streams whose own is damaged, as far as they can be made again."""
        rebuilt: dict[str, CommitRecord] = {}
        for name, fault in faults.items():
            record = None
            if not any(r.replaces is not None and r.replaces.stream == name for r in stored.values()):
                record = rebuilding.rebuilt(name)
                if record is None:
                    self._report.lost_streams[name] = lost_record(fault)
            if record is not None and not any(self._is_copy(record, other) for other in stored.values()):
                rebuilt[name] = record
                self._report.mended.append(
                    f"stream '{name}': its commit record was made again, with {record.rows} rows; rank, lineage,"
                    " marks and decisions about other streams are lost"
                )
                self._note_columns(name)
        return rebuilt

    def _is_copy(self, record: CommitRecord, other: CommitRecord) -> bool:
        """Whether another stream holds the same spans: one of them was packed in the other."""
        counts = [(r.name, r.rows, r.spans, r.text_bytes) for r in (record, other)]
        if counts[0] != counts[1]:
            return False
        try:
            spans = [StreamReader(self._source, r).read_rows("spans/ints", 0, r.spans) for r in (record, other)]
        except CorruptionError:
            return False
        return np.array_equal(spans[0], spans[1])

    def _note_columns(self, name: str) -> None:
        """Report the derived columns of a stream: only its record said what of them counts."""
        for target in self._source.list_names(f"streams/{name}/columns"):
            if is_stream_id(target):
                columns = self._source.list_names(f"streams/{name}/columns/{target}")
                self._report.lost_columns += [(target, c) for c in columns if c != "zarr.json"]

    # ---- streams

    def _repair_streams(
        self, shown: Mapping[str, CommitRecord], wanted: Marks, needed: Marks
    ) -> dict[str, RepairedStream]:
        discarded = discarded_episodes(shown.values(), Lineage.newest(list(shown.values())))
        work = StreamRepair(self._source, self._target, self._report, self._tell)
        streams: dict[str, RepairedStream] = {}
        for id_, record in shown.items():
            try:
                not_shown = discarded.get(record.shown_as, ())
                streams[id_] = work.run(record, wanted[id_], min(wanted[id_], needed[id_]), not_shown)
            except LostStreamError as error:
                self._report.lost_streams[id_] = str(error)
                self._target.remove_tree(record.folder)
        return streams

    def _final_records(self, streams: Mapping[str, RepairedStream]) -> dict[str, CommitRecord]:
        """The records to put: without lost columns, and with lineages that name the spans that are left."""
        lost = self._lost_columns(streams)
        return {id_: self._final(stream.record, streams, lost) for id_, stream in streams.items()}

    def _lost_columns(self, streams: Mapping[str, RepairedStream]) -> dict[tuple[str, str], float]:
        """Targets and names of derived columns that are lost, and when the stream was made that held them.

        Older values of the same column, in streams made before, must not take their place.
        """
        lost: dict[tuple[str, str], float] = {}
        for stream in streams.values():
            for column in stream.lost_columns:
                lost[column] = max(stream.record.created_at, lost.get(column, 0.0))
            for target, named in stream.record.columns.items():
                for name, state in named.items():
                    if target not in streams or state.stop > streams[target].record.rows:
                        lost[target, name] = max(stream.record.created_at, lost.get((target, name), 0.0))
        known = {*self._report.lost_columns, *self._report.lost_streams}
        self._report.lost_columns += [c for c in lost if c not in known and c[0] in streams]
        return lost

    def _final(
        self, record: CommitRecord, streams: Mapping[str, RepairedStream], lost: Mapping[tuple[str, str], float]
    ) -> CommitRecord:
        columns, layouts = {}, dict(record.layouts)
        for target, named in record.columns.items():
            kept = {n: s for n, s in named.items() if lost.get((target, n), -1.0) < record.created_at}
            for name in named.keys() - kept.keys():
                self._target.remove_tree(f"{record.folder}/columns/{target}/{name}")
                layouts = {p: a for p, a in layouts.items() if not p.startswith(f"columns/{target}/{name}/")}
            if kept:
                columns[target] = kept
        continues = record.continues
        if continues is not None:
            continues = {
                id_: streams[id_].remapped(extent) if id_ in streams else extent
                for id_, extent in continues.items()
            }
        return replace(record, columns=columns, layouts=layouts, continues=continues)

    def _put_schema(self) -> None:
        if not self._schema.objects:
            put_schema(self._target, self._schema.schema)
        for number, data in enumerate(self._schema.objects):
            self._target.put(schema_key(number), data)


def replace_record(stream: RepairedStream, record: CommitRecord) -> RepairedStream:
    """A repaired stream with its final record."""
    return replace(stream, record=record)
