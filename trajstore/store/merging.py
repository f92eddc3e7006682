"""Merges stores of one schema into a new store, by copying their streams without decoding them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from trajstore.errors import SchemaError
from trajstore.format.commit_record import CommitRecord
from trajstore.format.ids import is_stream_id, new_id
from trajstore.schema import Schema
from trajstore.storage import Storage, open_storage
from trajstore.store.flat_streams import (
    column_values,
    flat_records,
    missing_object,
    put_columns,
    renamed,
    same_spans,
)
from trajstore.store.new_store import (
    Progress,
    StreamObject,
    clear_remains,
    complete,
    copy_wave,
    put_record,
    put_schema,
    stream_objects,
    waves,
)
from trajstore.store.snapshot import Snapshot
from trajstore.store.store import Store, Url
from trajstore.store.store import open as open_store


@dataclass(frozen=True, slots=True)
class MergedSource:
    """What one source contributed to a merged store.

    Attributes:
        url: The source, without credentials.
        n_streams: Streams that were copied from it.
        n_episodes: Episodes of the source, as it shows them.
        n_steps: Steps of these.
        n_bytes: Bytes of the copied objects.
        renamed: By stream id: the new id, because an earlier source has another stream of this id.
        repeated: Ids of streams that an earlier source has already, with the same episodes.
        n_checkpoints: Checkpoints of the source, which are not in the merged store.
    """

    url: str
    n_streams: int
    n_episodes: int
    n_steps: int
    n_bytes: int
    renamed: Mapping[str, str] = field(default_factory=dict)
    repeated: tuple[str, ...] = ()
    n_checkpoints: int = 0


@dataclass(frozen=True, slots=True)
class MergeReport:
    """What `merge` did.

    Attributes:
        url: The merged store, without credentials.
        sources: What each source contributed, in the order in which they were given.
    """

    url: str
    sources: tuple[MergedSource, ...]


def merge(
    target_url: Url,
    source_urls: Sequence[Url],
    *,
    storage_options: Mapping[str, Any] | None = None,
    target_options: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    fsync: bool = True,
) -> MergeReport:
    """Merge stores of one schema into a new store. The sources are only read.

    The merged store has every episode that the sources show, with its end, final values, metadata and times, in
    streams of the same ids: handles stay valid. Objects are copied without being decoded. A stream that two sources
    have, with the same episodes, is taken once; another stream of that id gets a new id, which the report names.
    Priorities and other derived columns are kept. Checkpoints are not, and neither are ranks and lineages: they
    belong to one run. What a source does not show (evicted, discarded or abandoned episodes) stays behind, and open
    episodes read as cut.

    The target becomes a store when everything is copied. After an interruption, merge again to the same URL.

    Args:
        target_url: URL of the new store: an empty location, or the remains of an interrupted call.
        source_urls: URLs of the stores to merge.
        storage_options: As in `open`, for all sources.
        target_options: As in `open`, for the new store.
        progress: Called after every wave of objects with the bytes copied so far and in total.
        fsync: As in `open`, for the new store.

    Raises:
        SchemaError: Two sources have different schemas; the message names the fields.
        StoreExistsError: The target is a store already, or holds something else.
        CorruptionError: An object of a source is missing.
        SnapshotExpiredError: A source lost rows while it was read; merge a copy of it.
    """
    if isinstance(source_urls, (str, bytes)) or not source_urls:
        raise ValueError(f"source_urls: expected a list of at least one URL, got {source_urls!r:.80}")
    sources = [open_store(url, storage_options=storage_options) for url in source_urls]
    schema = common_schema(sources)
    target = open_storage(target_url, target_options, fsync=fsync)
    clear_remains(target)
    return _Merging(target, sources, schema, progress).run()


def common_schema(stores: Sequence[Store]) -> Schema | None:
    """The schema with the fields of all stores; None if none of them has one.

    Raises:
        SchemaError: Two of them contradict each other; the message names the fields.
    """
    common: Schema | None = None
    first = ""
    for store in stores:
        if store.schema is None:
            continue
        if common is None:
            common, first = store.schema, store.url
        elif differences := common.differences(store.schema, first, store.url, filled=True):
            raise SchemaError(f"the stores have different schemas: {'; '.join(differences)}")
        common = common.merged(store.schema)
    return common


@dataclass(frozen=True, slots=True)
class _Part:
    """One stream to copy: the record that readers of the source use, and the one to put."""

    shown: CommitRecord
    record: CommitRecord

    def objects(self) -> Iterator[StreamObject]:
        return stream_objects(self.record, self.record.first_row)


@dataclass(frozen=True, slots=True)
class _Plan:
    """What is copied from one source; ``sizes`` are bytes of the objects by key."""

    store: Store
    snapshot: Snapshot
    parts: Sequence[_Part]
    renamed: Mapping[str, str]
    repeated: tuple[str, ...]
    sizes: Mapping[str, int]

    @property
    def n_bytes(self) -> int:
        return sum(self.sizes.values())

    def report(self) -> MergedSource:
        episodes = self.snapshot.episodes
        n_checkpoints = sum(map(is_stream_id, self.snapshot.storage.list_names("checkpoints")))
        return MergedSource(
            self.store.url,
            len(self.parts),
            len(episodes),
            int(episodes["length"].sum()),
            self.n_bytes,
            self.renamed,
            self.repeated,
            n_checkpoints,
        )


class _Merging:
    """One merge in progress."""

    def __init__(
        self, target: Storage, sources: Sequence[Store], schema: Schema | None, progress: Progress | None
    ) -> None:
        self._target = target
        self._schema = schema
        self._progress = progress
        self._taken: dict[str, tuple[Snapshot, CommitRecord]] = {}  # by id in the sources: who had it first
        self._plans = [self._plan(store) for store in sources]
        self._records: dict[str, CommitRecord] = {}
        self._n_bytes, self._total_bytes = 0, sum(plan.n_bytes for plan in self._plans)

    def run(self) -> MergeReport:
        self._tell(0)
        for plan in self._plans:
            for part in plan.parts:
                self._copy(plan, part)
        put_schema(self._target, self._schema)
        complete(self._target, self._schema, self._records)
        self._tell(self._total_bytes - self._n_bytes)
        return MergeReport(self._target.display, tuple(plan.report() for plan in self._plans))

    def _plan(self, store: Store) -> _Plan:
        snapshot = store.snapshot
        flat = flat_records(snapshot)
        names, repeated = {}, []
        for id_, record in flat.items():
            if id_ not in self._taken:
                self._taken[id_] = snapshot, record
            elif self._is_same(snapshot, record):
                repeated.append(id_)
            else:
                names[id_] = new_id(record.name, after=id_)
        shown = {record.id: record for record in snapshot.streams}
        parts = [_Part(shown[id_], renamed(flat[id_], names)) for id_ in flat if id_ not in repeated]
        return _Plan(store, snapshot, parts, names, tuple(repeated), _sizes(snapshot.storage, parts))

    def _is_same(self, snapshot: Snapshot, record: CommitRecord) -> bool:
        """Whether a stream of this id that was met before has the same rows and episodes."""
        other_snapshot, other = self._taken[record.id]
        if replace(record, layouts=other.layouts) != other:  # layouts differ if it is packed in one of the stores
            return False
        return same_spans(_spans(snapshot, record), _spans(other_snapshot, other))

    def _copy(self, plan: _Plan, part: _Part) -> None:
        record, folder, storage = part.record, part.shown.folder, plan.snapshot.storage
        try:
            for wave in waves(part.objects()):
                copy_wave(storage, folder, self._target, record.folder, wave)
                self._tell(sum(plan.sizes.get(f"{folder}/{o.path}", 0) for o in wave))
        except FileNotFoundError as error:
            raise missing_object(plan.snapshot, part.shown.id, error) from error
        record = put_columns(self._target, record, column_values(plan.snapshot, part.shown.id, record.rows))
        put_record(self._target, record)
        self._records[record.id] = record

    def _tell(self, n_bytes: int) -> None:
        self._n_bytes += n_bytes
        if self._progress is not None:
            self._progress(self._n_bytes, self._total_bytes)


def _sizes(storage: Storage, parts: Sequence[_Part]) -> dict[str, int]:
    """Bytes of the objects to copy, by key."""
    sizes: dict[str, int] = {}
    for part in parts:
        found = storage.tree_sizes(part.shown.folder)
        # A damaged record may claim any number of objects; the copy fails at the first one that is missing.
        keys = (f"{part.shown.folder}/{o.path}" for o in part.objects())
        sizes |= {key: found[key] for key in itertools.takewhile(found.__contains__, keys)}
    return sizes


def _spans(snapshot: Snapshot, record: CommitRecord) -> tuple[Any, Any]:
    (spans,) = (part.spans for part in snapshot.parts() if snapshot.names[part.source] == record.id)
    return spans.ints, spans.floats
