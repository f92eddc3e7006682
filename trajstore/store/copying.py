"""Copies a store, or the view of one checkpoint, to another URL."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trajstore.errors import (
    CheckpointNotFoundError,
    CorruptionError,
    SnapshotExpiredError,
    StoreExistsError,
)
from trajstore.format.commit_record import CommitRecord
from trajstore.format.ids import is_stream_id
from trajstore.format.marks import Marks
from trajstore.format.zarr_json import to_json_bytes
from trajstore.schema import Schema
from trajstore.storage import Put, Storage, open_storage
from trajstore.store.checkpoints import Checkpoint, find, list_checkpoints, stored_objects
from trajstore.store.schema_objects import read_schema, read_schemas, schema_key
from trajstore.store.snapshot import Snapshot
from trajstore.store.store import Store, Url, check_root, put_root
from trajstore.store.store import open as open_store

Progress = Callable[[int, int], None]  # bytes copied so far, bytes in total

_WAVE_OBJECTS = 256
_MAX_ATTEMPTS = 5
_TOP_NAMES = frozenset({"scratch", "schema", "streams", "checkpoints"})


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
    if target.is_read_only:
        target.check_writable()  # raises
    check_root(source)
    schema = read_schema(source)
    checkpoint = None if at is None else find(source, at)
    _clear(target)
    copying: _Copying = _StoreCopying(source, target, schema, progress)
    if checkpoint is not None:
        copying = _CheckpointCopying(source, target, schema, progress, checkpoint)
    records, checkpoints = copying.copy_chunks()
    _put_records(target, records)
    copying.copy_checkpoints(checkpoints)
    for number in range(len(read_schemas(source))):  # read again: fields may have been added during the copy
        source.copy(schema_key(number), target, schema_key(number))
    _check_records(target, schema, records)
    if not put_root(target):
        raise StoreExistsError(f"{target.display}: another process created a store there during the copy")
    copying.report_end()


def _clear(target: Storage) -> None:
    """Remove the remains of an interrupted copy.

    Raises:
        StoreExistsError: The target holds anything else.
    """
    names = set(target.list_names(""))
    if "zarr.json" in names:
        raise StoreExistsError(f"{target.display} is already a store; choose another location for the copy")
    remains = [f"{part}/{name}" for part in ("streams", "checkpoints") for name in target.list_names(part)]
    remains = [key for key in remains if not key.endswith("/zarr.json")]
    is_copy = names <= _TOP_NAMES and all(is_stream_id(key.partition("/")[2]) for key in remains)
    if not is_copy or not all(n == "zarr.json" or n.isdecimal() for n in target.list_names("schema")):
        raise StoreExistsError(f"{target.display} is not empty; choose another location for the copy")
    for key in (*remains, "schema"):
        target.remove_tree(key)


def _put_records(target: Storage, records: Mapping[str, CommitRecord]) -> None:
    for record in records.values():
        prefix = record.folder
        nodes = {f"{prefix}/{path}/zarr.json": to_json_bytes(node) for path, node in record.nodes().items()}
        target.put_many([Put(key, lambda data=data: data) for key, data in nodes.items()])  # type: ignore[misc]
        target.put(record.key, record.to_bytes())


def _check_records(target: Storage, schema: Schema | None, records: Mapping[str, CommitRecord]) -> None:
    """Check that a reader of the copy finds exactly these records."""
    found = {record.id: record for record in Snapshot.load(target, schema).streams}
    if found != dict(records):
        wrong = sorted(id_ for id_ in found.keys() | records.keys() if found.get(id_) != records.get(id_))
        raise CorruptionError(f"{target.display}: streams differ from the copied ones: {', '.join(wrong)}")


@dataclass(frozen=True, slots=True)
class _Object:
    """One object to copy."""

    key: str
    may_link: bool  # it never changes, so a hard link will do


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
                self._copy((_Object(key, not key.endswith("/zarr.json")) for key in keys), sizes)
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
        existing = itertools.takewhile(lambda o: o.key in sizes, _objects(record, first, None))
        return sum(sizes[o.key] for o in existing)

    def _sizes(self, record: CommitRecord) -> dict[str, int]:
        return {} if self._progress is None else self._source.tree_sizes(record.folder)

    def _copy_stream(self, record: CommitRecord, first: int) -> None:
        self._copy(_objects(record, first, self._copied.get(record.folder)), self._sizes(record))
        self._copied[record.folder] = record

    def _drop_others(self, records: Mapping[str, CommitRecord]) -> None:
        """Remove streams that an earlier attempt copied and that no longer exist in the source."""
        copied = filter(is_stream_id, self._target.list_names("streams"))
        for stream in set(copied) - {record.as_stored().id for record in records.values()}:
            self._target.remove_tree(f"streams/{stream}")

    def _copy(self, objects: Iterator[_Object], sizes: Mapping[str, int]) -> None:
        while wave := list(itertools.islice(objects, _WAVE_OBJECTS)):
            for may_link in (True, False):
                keys = [(o.key, o.key) for o in wave if o.may_link == may_link]
                self._source.copy_many(keys, self._target, may_link=may_link)
            if self._progress is not None:
                self._n_bytes += sum(sizes.get(o.key, 0) for o in wave)
                self._progress(min(self._n_bytes, self._total_bytes), self._total_bytes)


def _objects(record: CommitRecord, first: int, copied: CommitRecord | None) -> Iterator[_Object]:
    """Objects with rows that a record names, from row ``first`` on; without those copied for an older record."""
    for path, layout in record.layouts.items():
        size = layout.shard_rows or layout.chunk_rows
        n_rows, start = record.length(path), first // size if path.startswith("steps/") else 0
        if copied is not None and not path.startswith("columns/"):  # columns are replaced in the same places
            start = max(start, copied.length(path) // size)
        for i in range(start, -(-n_rows // size)):
            key = f"{record.folder}/{path}/{layout.chunk_key(i * layout.chunks_per_shard)}"
            yield _Object(key, record.is_sealed and (i + 1) * size <= n_rows)


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
