"""Copies of stores, or of what a checkpoint shows, at another URL."""

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
from trajstore.format.first_live_rows import first_live_rows
from trajstore.format.ids import is_stream_id
from trajstore.format.zarr_json import to_json_bytes
from trajstore.schema import Schema
from trajstore.storage import Put, Storage, open_storage
from trajstore.store.checkpoints import Checkpoint, find, list_checkpoints, stored_objects
from trajstore.store.snapshot import Snapshot
from trajstore.store.store import Store, Url, check_root, put_root, read_schema
from trajstore.store.store import open as open_store

Progress = Callable[[int, int], None]

_WAVE_OBJECTS = 256
_TRIES = 5
_PARTS = frozenset({"scratch", "schema", "streams", "checkpoints"})


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
    """Copy a store, also one that others write to: what its records said when it began, or later.

    The copy becomes a store when all of it is there. One that was interrupted is none, and may be begun again.
    Nothing is decoded. Between directories of one file system, objects that never change are hard links; within
    one service the service makes the copies.

    Args:
        source_url: The store.
        target_url: Where nothing is, or what an interrupted copy has left.
        at: Name or id of a checkpoint, or ``"latest"``: copy only what that shows, and itself.
        storage_options: For the source, as in `open`.
        target_options: For the target, as in `open`.
        progress: Called with the bytes copied and the bytes to copy, now and then, and at the end.
        fsync: As in `open`, for the copy.

    Raises:
        StoreExistsError: The target is taken.
        CorruptionError: The source lacks an object.
        SnapshotExpiredError: The store changes faster than it can be copied; copy a checkpoint of it.
    """
    target = open_storage(target_url, target_options, fsync=fsync)
    copy_objects(open_storage(source_url, storage_options), target, at=at, progress=progress)
    return open_store(target_url, storage_options=target_options, fsync=fsync)


def copy_objects(
    source: Storage, target: Storage, *, at: str | None = None, progress: Progress | None = None
) -> None:
    """`copy`, between storages."""
    check_root(source)
    schema = read_schema(source)
    checkpoint = None if at is None else find(source, at)
    _clear(target)
    copying: _Copying = _Live(source, target, schema, progress)
    if checkpoint is not None:
        copying = _Fixed(source, target, schema, progress, checkpoint)
    records, checkpoints = copying.copy_chunks()
    _put_records(target, records)
    copying.copy_checkpoints(checkpoints)
    if schema is not None:
        source.copy("schema/zarr.json", target, "schema/zarr.json")
    _verify(target, schema, records)
    if not put_root(target):
        raise StoreExistsError(f"{target.display} became a store while it was copied to")
    copying.report_end()


def _clear(target: Storage) -> None:
    """Remove what an interrupted copy has left; refuse to touch anything else."""
    names = set(target.list_names(""))
    if "zarr.json" in names:
        raise StoreExistsError(f"{target.display} is taken; choose another place for the copy")
    left = [f"{part}/{name}" for part in ("streams", "checkpoints") for name in target.list_names(part)]
    left = [key for key in left if not key.endswith("/zarr.json")]
    is_ours = names <= _PARTS and all(is_stream_id(key.partition("/")[2]) for key in left)
    if not is_ours or not set(target.list_names("schema")) <= {"zarr.json"}:
        raise StoreExistsError(f"{target.display} is not empty; choose another place for the copy")
    for key in (*left, "schema"):
        target.remove_tree(key)


def _put_records(target: Storage, records: Mapping[str, CommitRecord]) -> None:
    for record in records.values():
        prefix = f"streams/{record.id}"
        nodes = {f"{prefix}/{path}/zarr.json": to_json_bytes(node) for path, node in record.nodes().items()}
        target.put_many([Put(key, lambda data=data: data) for key, data in nodes.items()])  # type: ignore[misc]
        target.put(record.key, record.to_bytes())


def _verify(target: Storage, schema: Schema | None, records: Mapping[str, CommitRecord]) -> None:
    found = {record.id: record for record in Snapshot.load(target, schema).streams}
    if found != dict(records):
        wrong = sorted(id_ for id_ in found.keys() | records.keys() if found.get(id_) != records.get(id_))
        raise CorruptionError(f"{target.display}: streams differ from what was copied: {', '.join(wrong)}")


@dataclass(frozen=True, slots=True)
class _Object:
    """One chunk object of a stream."""

    key: str
    may_link: bool


class _Copying:
    """Copies objects in waves, and says how far it has come."""

    def __init__(self, source: Storage, target: Storage, schema: Schema | None, progress: Progress | None) -> None:
        self._source = source
        self._target = target
        self._schema = schema
        self._progress = progress
        self._n_bytes = 0
        self._total_bytes = 0
        self._copied: dict[str, CommitRecord] = {}  # what is there of each stream already

    def copy_chunks(self) -> tuple[dict[str, CommitRecord], Sequence[Checkpoint]]:
        """Copy the chunks of every stream; the records that name them, and checkpoints of which all is there."""
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
        """Leave out a checkpoint that was removed meanwhile."""
        self._target.remove_tree(f"checkpoints/{checkpoint.id}")
        if checkpoint in list_checkpoints(self._source):
            raise CorruptionError(f"checkpoint '{checkpoint.id}' lacks an object: {error}") from error

    def _measure(
        self, records: Mapping[str, CommitRecord], first: Mapping[str, int], checkpoints: Sequence[Checkpoint]
    ) -> None:
        """Find out how much there is to copy, if anybody wants to know."""
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
        # Where one is missing the copy will end, however many the record claims there are.
        there = itertools.takewhile(lambda o: o.key in sizes, _objects(record, first, None))
        return sum(sizes[o.key] for o in there)

    def _sizes(self, record: CommitRecord) -> dict[str, int]:
        return {} if self._progress is None else self._source.tree_sizes(f"streams/{record.id}")

    def _copy_stream(self, record: CommitRecord, first: int) -> None:
        self._copy(_objects(record, first, self._copied.get(record.id)), self._sizes(record))
        self._copied[record.id] = record

    def _copy(self, objects: Iterator[_Object], sizes: Mapping[str, int]) -> None:
        while wave := list(itertools.islice(objects, _WAVE_OBJECTS)):
            for may_link in (True, False):
                keys = [(o.key, o.key) for o in wave if o.may_link == may_link]
                self._source.copy_many(keys, self._target, may_link=may_link)
            if self._progress is not None:
                self._n_bytes += sum(sizes.get(o.key, 0) for o in wave)
                self._progress(min(self._n_bytes, self._total_bytes), self._total_bytes)


def _objects(record: CommitRecord, first: int, copied: CommitRecord | None) -> Iterator[_Object]:
    """The objects that hold rows a record names, from row ``first`` on, but for those copied for an older one."""
    for path, layout in record.layouts.items():
        size = layout.shard_rows or layout.chunk_rows
        n_rows, start = record.length(path), first // size if path.startswith("steps/") else 0
        if copied is not None and not path.startswith("columns/"):  # those are written anew in the same places
            start = max(start, copied.length(path) // size)
        for i in range(start, -(-n_rows // size)):
            key = f"streams/{record.id}/{path}/{layout.chunk_key(i * layout.chunks_per_shard)}"
            yield _Object(key, record.is_sealed and (i + 1) * size <= n_rows)


class _Fixed(_Copying):
    """Copies what a checkpoint shows: it is pinned, so nothing of it goes away."""

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
        streams = Snapshot.at(self._source, self._schema, self._checkpoint).streams
        records = {record.id: record for record in streams}
        first = {record.id: record.first_row for record in streams}
        self._measure(records, first, [self._checkpoint])
        try:
            for record in records.values():
                self._copy_stream(record, first[record.id])
        except FileNotFoundError as error:
            self._drop(self._checkpoint, error)
            raise self._removed() from error
        return records, [self._checkpoint]

    def copy_checkpoints(self, checkpoints: Sequence[Checkpoint]) -> None:
        super().copy_checkpoints(checkpoints)
        if not self._target.list_names(f"checkpoints/{self._checkpoint.id}"):
            raise self._removed()

    def _removed(self) -> CheckpointNotFoundError:
        return CheckpointNotFoundError(f"checkpoint '{self._checkpoint.id}' was removed while it was copied")


class _Live(_Copying):
    """Copies a store that others may write to."""

    def copy_chunks(self) -> tuple[dict[str, CommitRecord], Sequence[Checkpoint]]:
        for _ in range(_TRIES):
            checkpoints = list_checkpoints(self._source)
            # A column names rows of other streams: records that are read after it have them.
            older = self._read_records()
            records = {id_: _with_columns_of(older.get(id_), r) for id_, r in self._read_records().items()}
            first = _wanted(records, checkpoints)
            self._measure(records, first, checkpoints)
            try:
                for record in records.values():
                    self._copy_stream(record, first[record.id])
            except FileNotFoundError as error:
                self._check_eviction(first, error)
            else:
                if not _are_written_anew(records, self._read_records()):
                    self._drop_others(records)
                    return records, checkpoints
        raise SnapshotExpiredError(
            f"{self._source.display} changes faster than it can be copied; copy a checkpoint of it, with at="
        )

    def _read_records(self) -> dict[str, CommitRecord]:
        return {record.id: record for record in Snapshot.load(self._source, self._schema).streams}

    def _check_eviction(self, first: Mapping[str, int], error: FileNotFoundError) -> None:
        """What is missing was evicted if somebody gave up rows or removed something meanwhile, else it is lost."""
        checkpoints = list_checkpoints(self._source)
        now = _wanted(self._read_records(), checkpoints)
        if all(now.get(stream, row + 1) <= row for stream, row in first.items()):
            raise CorruptionError(f"{self._source.display} lacks an object: {error}") from error

    def _drop_others(self, records: Mapping[str, CommitRecord]) -> None:
        """Remove what an earlier try has copied of streams that are no more."""
        there = filter(is_stream_id, self._target.list_names("streams"))
        for stream in set(there) - records.keys():
            self._target.remove_tree(f"streams/{stream}")


def _wanted(records: Mapping[str, CommitRecord], checkpoints: Sequence[Checkpoint]) -> dict[str, int]:
    """By stream, the first row that anybody wants."""
    wanted = first_live_rows(list(records.values()))
    for checkpoint in checkpoints:
        for stream, cut in checkpoint.streams.items():
            if stream in wanted:
                wanted[stream] = min(wanted[stream], cut.first)
    return wanted


def _with_columns_of(older: CommitRecord | None, record: CommitRecord) -> CommitRecord:
    columns = {} if older is None else {p: a for p, a in older.layouts.items() if p.startswith("columns/")}
    others = {path: a for path, a in record.layouts.items() if not path.startswith("columns/")}
    return replace(record, columns=older.columns if older else {}, layouts={**others, **columns})


def _are_written_anew(records: Mapping[str, CommitRecord], now: Mapping[str, CommitRecord]) -> bool:
    """Whether a column has a generation newer than the one that was copied: it may have been overwritten."""
    return any(
        now[id_].columns[target][name].generation > state.generation
        for id_, record in records.items()
        if id_ in now
        for target, named in record.columns.items()
        for name, state in named.items()
        if name in now[id_].columns.get(target, {})
    )
