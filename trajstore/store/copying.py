"""Copies a store, or the view of one checkpoint, to another URL."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from trajstore.errors import CheckpointNotFoundError, CorruptionError, SnapshotExpiredError
from trajstore.format.commit_record import CommitRecord
from trajstore.format.ids import is_stream_id
from trajstore.format.marks import Marks
from trajstore.schema import Schema
from trajstore.storage import Storage, open_storage
from trajstore.store.checkpoints import Checkpoint, find, list_checkpoints, stored_objects
from trajstore.store.new_store import (
    Progress,
    StreamObject,
    clear_remains,
    complete,
    copy_wave,
    put_record,
    stream_objects,
    waves,
)
from trajstore.store.schema_objects import read_schema, read_schemas, schema_key
from trajstore.store.snapshot import Snapshot
from trajstore.store.store import Store, Url, check_root
from trajstore.store.store import open as open_store

_MAX_ATTEMPTS = 5


def copy(
    source_url: Url,
    target_url: Url,
    *,
    at: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
    target_options: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    fsync: bool = True,
) -> Store:
    """Copy a store, even while writers append to it: the copy shows the commits at its start, or later ones.

    The copy becomes a store when everything is copied. An interrupted copy is not a store; copy again to the same
    URL. Chunks are not decoded. Between directories of one file system, objects that never change are hard-linked;
    within one object store, the service copies the objects.

    Args:
        source_url: URL of the store.
        target_url: URL of the copy: an empty location, or the remains of an interrupted copy.
        at: Name or id of a checkpoint, or ``"latest"``: copy only this checkpoint and the rows that it shows.
        storage_options: As in `open`, for the source.
        target_options: As in `open`, for the copy.
        progress: Called after every wave, and at the end, with the bytes copied so far and in total.
        fsync: As in `open`, for the copy.

    Returns:
        The copy, opened.

    Raises:
        StoreExistsError: The target is a store already, or holds something else.
        CorruptionError: An object of the source is missing.
        SnapshotExpiredError: The store changes faster than it can be copied; copy a checkpoint of it.
    """
    target = open_storage(target_url, target_options, fsync=fsync)
    copy_objects(open_storage(source_url, storage_options), target, at=at, progress=progress)
    return open_store(target_url, storage_options=target_options, fsync=fsync)


def copy_objects(
    source: Storage, target: Storage, *, at: str | None = None, progress: Progress | None = None
) -> None:
    """Copy a store between storages; see `copy`."""
    check_root(source)
    schema = read_schema(source)
    checkpoint = None if at is None else find(source, at)
    clear_remains(target)
    copying: _Copying = _StoreCopying(source, target, schema, progress)
    if checkpoint is not None:
        copying = _CheckpointCopying(source, target, schema, progress, checkpoint)
    records, checkpoints = copying.copy_chunks()
    for record in records.values():
        put_record(target, record)
    copying.copy_checkpoints(checkpoints)
    for number in range(len(read_schemas(source))):  # read again: fields may have been added during the copy
        source.copy(schema_key(number), target, schema_key(number))
    complete(target, schema, records)
    copying.report_end()


class _Copying:
    """Copies objects in waves, and reports progress."""

    def __init__(self, source: Storage, target: Storage, schema: Schema | None, progress: Progress | None) -> None:
        self._source = source
        self._target = target
        self._schema = schema
        self._progress = progress
        self._n_bytes = 0
        self._total_bytes = 0
        self._copied: dict[str, CommitRecord] = {}  # by folder of a stream: the record up to which it is copied

    def copy_chunks(self) -> tuple[dict[str, CommitRecord], Sequence[Checkpoint]]:
        """Copy the chunks of every stream; returns the records that name them, and checkpoints of copied rows."""
        raise NotImplementedError

    def copy_checkpoints(self, checkpoints: Sequence[Checkpoint]) -> None:
        for checkpoint in checkpoints:
            prefix = f"checkpoints/{checkpoint.id}"
            try:
                record, keys = stored_objects(self._source, checkpoint)
                sizes = {} if self._progress is None else self._source.tree_sizes(prefix)
                names = (key.removeprefix(f"{prefix}/") for key in keys)
                self._copy(prefix, (StreamObject(name, not name.endswith("zarr.json")) for name in names), sizes)
            except (FileNotFoundError, CheckpointNotFoundError) as error:
                self._drop(checkpoint, error)
            else:
                self._target.put(f"{prefix}/zarr.json", record)

    def report_end(self) -> None:
        if self._progress is not None:
            self._progress(self._total_bytes, self._total_bytes)

    def _drop(self, checkpoint: Checkpoint, error: Exception) -> None:
        """Leave out a checkpoint that was removed during the copy.

        Raises:
            CorruptionError: It still exists, so an object of it is missing.
        """
        self._target.remove_tree(f"checkpoints/{checkpoint.id}")
        if checkpoint in list_checkpoints(self._source):
            raise CorruptionError(f"checkpoint '{checkpoint.id}': an object is missing: {error}") from error

    def _measure(
        self, records: Mapping[str, CommitRecord], first: Mapping[str, int], checkpoints: Sequence[Checkpoint]
    ) -> None:
        """Sum up the bytes to copy, if progress is reported."""
        if self._progress is None or self._total_bytes:
            return
        self._total_bytes += sum(self._stream_bytes(record, first[record.id]) for record in records.values())
        for checkpoint in checkpoints:
            sizes = self._source.tree_sizes(f"checkpoints/{checkpoint.id}")
            self._total_bytes += sum(
                n for key, n in sizes.items() if key != f"checkpoints/{checkpoint.id}/zarr.json"
            )
        self._progress(0, self._total_bytes)

    def _stream_bytes(self, record: CommitRecord, first: int) -> int:
        sizes = self._sizes(record)
        # The copy fails at the first missing object; a damaged record may claim any number after it.
        keys = (f"{record.folder}/{o.path}" for o in stream_objects(record, first))
        return sum(sizes[key] for key in itertools.takewhile(lambda key: key in sizes, keys))

    def _sizes(self, record: CommitRecord) -> dict[str, int]:
        return {} if self._progress is None else self._source.tree_sizes(record.folder)

    def _copy_stream(self, record: CommitRecord, first: int) -> None:
        objects = stream_objects(record, first, self._copied.get(record.folder))
        self._copy(record.folder, objects, self._sizes(record))
        self._copied[record.folder] = record

    def _drop_others(self, records: Mapping[str, CommitRecord]) -> None:
        """Remove streams that an earlier attempt copied and that no longer exist in the source."""
        copied = filter(is_stream_id, self._target.list_names("streams"))
        for stream in set(copied) - {record.as_stored().id for record in records.values()}:
            self._target.remove_tree(f"streams/{stream}")

    def _copy(self, folder: str, objects: Iterator[StreamObject], sizes: Mapping[str, int]) -> None:
        for wave in waves(objects):
            copy_wave(self._source, folder, self._target, folder, wave)
            if self._progress is not None:
                self._n_bytes += sum(sizes.get(f"{folder}/{o.path}", 0) for o in wave)
                self._progress(min(self._n_bytes, self._total_bytes), self._total_bytes)


class _CheckpointCopying(_Copying):
    """Copies the rows that a checkpoint shows: they are pinned, so they are not evicted during the copy."""

    def __init__(
        self,
        source: Storage,
        target: Storage,
        schema: Schema | None,
        progress: Progress | None,
        checkpoint: Checkpoint,
    ) -> None:
        super().__init__(source, target, schema, progress)
        self._checkpoint = checkpoint

    def copy_chunks(self) -> tuple[dict[str, CommitRecord], Sequence[Checkpoint]]:
        snapshot = Snapshot.at(self._source, self._schema, self._checkpoint)
        while not self._copy_streams(snapshot):
            snapshot = snapshot.relocated()
        records = {record.id: record for record in snapshot.streams}
        self._drop_others(records)
        return records, [self._checkpoint]

    def _copy_streams(self, snapshot: Snapshot) -> bool:
        """Copy the streams of a snapshot; returns False if some of them were packed during the copy."""
        records = {record.id: record for record in snapshot.streams}
        first = {record.id: record.first_row for record in snapshot.streams}
        self._measure(records, first, [self._checkpoint])
        try:
            for record in records.values():
                self._copy_stream(record, first[record.id])
        except FileNotFoundError as error:
            if snapshot.relocated() is not snapshot:
                return False
            self._drop(self._checkpoint, error)
            raise self._removed() from error
        return True

    def copy_checkpoints(self, checkpoints: Sequence[Checkpoint]) -> None:
        super().copy_checkpoints(checkpoints)
        if not self._target.list_names(f"checkpoints/{self._checkpoint.id}"):
            raise self._removed()

    def _removed(self) -> CheckpointNotFoundError:
        return CheckpointNotFoundError(f"checkpoint '{self._checkpoint.id}' was removed while it was copied")


class _StoreCopying(_Copying):
    """Copies a whole store, which writers may change during the copy."""

    def copy_chunks(self) -> tuple[dict[str, CommitRecord], Sequence[Checkpoint]]:
        for _ in range(_MAX_ATTEMPTS):
            checkpoints = list_checkpoints(self._source)
            # A column names rows of other streams. Records that are read after the column have those rows.
            older = self._read_records()
            records = {id_: _with_columns_of(older.get(id_), r) for id_, r in self._read_records().items()}
            first = _wanted_rows(records, checkpoints)
            self._measure(records, first, checkpoints)
            try:
                for record in records.values():
                    self._copy_stream(record, first[record.id])
            except FileNotFoundError as error:
                self._check_eviction(records, first, error)
            else:
                if not _are_columns_replaced(records, self._read_records()):
                    self._drop_others(records)
                    return records, checkpoints
        raise SnapshotExpiredError(
            f"{self._source.display} changes faster than it can be copied; copy a checkpoint of it, with at="
        )

    def _read_records(self) -> dict[str, CommitRecord]:
        return {record.id: record for record in Snapshot.load(self._source, self._schema).streams}

    def _check_eviction(
        self, records: Mapping[str, CommitRecord], first: Mapping[str, int], error: FileNotFoundError
    ) -> None:
        """Return if rows were evicted, removed or packed during the copy.

        Raises:
            CorruptionError: Nothing was evicted, so the missing object is lost.
        """
        checkpoints = list_checkpoints(self._source)
        newest = self._read_records()
        now = _wanted_rows(newest, checkpoints)
        is_packed = any(newest[id_].folder != r.folder for id_, r in records.items() if id_ in newest)
        if not is_packed and all(now.get(stream, row + 1) <= row for stream, row in first.items()):
            raise CorruptionError(f"{self._source.display}: an object is missing: {error}") from error


def _wanted_rows(records: Mapping[str, CommitRecord], checkpoints: Sequence[Checkpoint]) -> Marks:
    """By stream id, the first row that is live or pinned by a checkpoint."""
    wanted = Marks.wanted(list(records.values()))
    for checkpoint in checkpoints:
        wanted = wanted.lowered(Marks.pinned_by(checkpoint))
    return wanted


def _with_columns_of(older: CommitRecord | None, record: CommitRecord) -> CommitRecord:
    """A record with the derived columns of an older record of its stream; without columns if that is None."""
    if record.location is not None:  # it is packed, and its columns do not change
        return record
    columns = {} if older is None else {p: a for p, a in older.layouts.items() if p.startswith("columns/")}
    others = {path: a for path, a in record.layouts.items() if not path.startswith("columns/")}
    return replace(record, columns=older.columns if older else {}, layouts={**others, **columns})


def _are_columns_replaced(records: Mapping[str, CommitRecord], now: Mapping[str, CommitRecord]) -> bool:
    """Whether a column has a newer generation than the copied one, which may have been overwritten."""
    return any(
        now[id_].columns[target][name].generation > state.generation
        for id_, record in records.items()
        if id_ in now
        for target, named in record.columns.items()
        for name, state in named.items()
        if name in now[id_].columns.get(target, {})
    )
