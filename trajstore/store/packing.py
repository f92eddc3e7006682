"""Packs finished streams: the same steps in few large objects, while others read and write the store."""

from __future__ import annotations

import contextlib
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from trajstore.arguments import parse_bytes
from trajstore.errors import ConflictError, DataError, StorageError
from trajstore.format.array_layout import ArrayLayout
from trajstore.format.codec import Codec
from trajstore.format.commit_record import CommitRecord, Replaces
from trajstore.format.ids import new_id
from trajstore.format.marks import Marks
from trajstore.format.packed_streams import replaced_copies, unfinished, unfinished_copies
from trajstore.format.zarr_json import to_json_bytes
from trajstore.storage import ABSENT, Put, Storage, open_storage
from trajstore.store import checkpoints
from trajstore.store.column_reader import read_records
from trajstore.store.garbage_collection import remove_copy
from trajstore.store.packed_arrays import SHARD_BYTES, ArrayPacker, PackSettings, Pause, n_objects, packed_layouts
from trajstore.store.schema_objects import read_schema
from trajstore.store.snapshot import Snapshot
from trajstore.store.store import Url, check_root
from trajstore.store.stream_reader import MissingChunkError, StreamReader

Progress = Callable[[int, int], None]  # decoded bytes packed so far, and in total

_RENEW_S = 300.0  # the record of an unfinished copy is put again this often, which says that it is being written
NOT_CLOSED = "its writer has not closed it"
_MIN_FACTOR = 2  # a stream is packed if it then has at most one object where it had two


@dataclass(frozen=True, slots=True)
class PackedStream:
    """One stream that was packed, or would be.

    Attributes:
        stream: Its id, which stays the id in handles.
        packed_in: Id of the stream that holds its rows now; None after a dry run.
        n_objects: Number of its objects before.
        n_bytes: Their size.
        n_packed_objects: Number of objects of the packed stream; of a dry run, the number expected.
        n_packed_bytes: Their size; 0 after a dry run.
    """

    stream: str
    packed_in: str | None
    n_objects: int
    n_bytes: int
    n_packed_objects: int
    n_packed_bytes: int = 0


@dataclass(frozen=True, slots=True)
class PackReport:
    """What `pack` did.

    Attributes:
        url: The store.
        packed: Streams that were packed; after a dry run, those that would be.
        left: By stream id: why it was not packed.
        removed: Ids of stored streams that were removed because packed ones replace them.
        is_dry_run: Whether nothing was written.
    """

    url: str
    packed: tuple[PackedStream, ...] = ()
    left: Mapping[str, str] = field(default_factory=dict)
    removed: tuple[str, ...] = ()
    is_dry_run: bool = False


def pack(
    url: Url,
    *,
    streams: Collection[str] | None = None,
    shard_bytes: int | str | None = None,
    chunk_bytes: int | str | None = None,
    codecs: Mapping[str, str] | None = None,
    dry_run: bool = False,
    wait: bool = False,
    grace_s: float = 10.0,
    progress: Progress | None = None,
    storage_options: Mapping[str, Any] | None = None,
    fsync: bool = True,
) -> PackReport:
    """Rewrite finished streams as few large objects, even while others read and write the store.

    Handles, priorities, derived columns and checkpoints stay valid, and the same seed draws the same batches.
    Readers see the packed stream once it is complete, by one atomic put. The originals are removed later, by the
    garbage collection of a running buffer, or here with ``wait``. An interrupted call changes nothing that readers
    see; call it again.

    A stream is packed if its writer has closed it or was declared dead, and if that at least halves the number of
    its objects. With ``chunk_bytes`` or ``codecs`` it is also packed, or packed again, if its chunks or codecs are
    others.

    Args:
        url: URL of the store.
        streams: Ids of the streams to pack; all by default.
        shard_bytes: Size of the objects, about; 128 MiB by default.
        chunk_bytes: Decoded size of the chunks inside them, at most. By default as writers choose it:
            128 KiB, for rows of 4 KiB or more 512 KiB if they are compressed and 256 KiB if not, and what the
            schema says for fields that declare ``chunk_rows``.
        codecs: By field path: the codec to use instead of the present one, such as ``{"pixels": "zstd:5"}``.
        dry_run: Only report what would be packed.
        wait: After ``grace_s`` seconds, in which readers may finish with the originals, remove them.
        grace_s: See ``wait``.
        progress: Called after every object with the decoded bytes packed so far and in total.
        storage_options: As in `open`.
        fsync: As in `open`.

    Raises:
        DataError: A stream or a field does not exist.
        SchemaError: A codec is not one that trajstore has.
        CorruptionError: A chunk is damaged; its stream is left as it is.
        ValueError: A size or ``grace_s`` is out of range.
    """
    if shard_bytes is not None:
        shard_bytes = parse_bytes(shard_bytes, "shard_bytes")
    if not 0 <= grace_s < math.inf:
        raise ValueError(f"grace_s: expected seconds, at least 0, got {grace_s!r}")
    settings = PackSettings(
        shard_bytes or SHARD_BYTES,
        None if chunk_bytes is None else parse_bytes(chunk_bytes, "chunk_bytes"),
        {path: Codec.parse(text) for path, text in (codecs or {}).items()},
    )
    storage = open_storage(url, storage_options, fsync=fsync)
    check_root(storage)
    packing = Packing(storage, settings, progress, has_size=shard_bytes is not None)
    report = packing.plan(streams) if dry_run else packing.run(streams)
    if wait and not dry_run:
        report = replace(report, removed=tuple(remove_replaced(storage, grace_s)))
    return report


def remove_replaced(storage: Storage, grace_s: float) -> list[str]:
    """Remove stored streams that packed ones have replaced for a grace time, and remains of interrupted packing.

    Needs no look at checkpoints: the packed streams have all rows that any of them needs.

    Returns:
        The ids of the removed streams.
    """
    before = replaced_copies(Snapshot.load(storage, None).stored)
    if before and grace_s > 0:
        time.sleep(grace_s)
    stored = Snapshot.load(storage, None).stored
    unused = (replaced_copies(stored) & before) | unfinished_copies(stored)
    removed = [record for record in stored if record.id in unused]
    for record in removed:
        remove_copy(storage, record)
    return [record.id for record in removed]


@dataclass(frozen=True, slots=True)
class StreamPlan:
    """How one stream will be packed.

    Attributes:
        record: The stream as readers show it.
        first: The first row that a session or a checkpoint needs; earlier ones are not copied.
        layouts: Layouts of the packed arrays.
        n_objects: Number of its objects now.
        n_bytes: Their size.
        n_data_objects: Number of its objects now that are not metadata.
    """

    record: CommitRecord
    first: int
    layouts: Mapping[str, ArrayLayout]
    n_objects: int
    n_bytes: int
    n_data_objects: int

    def first_of(self, path: str) -> int:
        return self.first if path.startswith("steps/") else 0

    @property
    def n_packed_data_objects(self) -> int:
        lengths = ((path, layout, self.record.length(path)) for path, layout in self.layouts.items())
        return sum(n_objects(layout, n, self.first_of(path)) for path, layout, n in lengths)

    @property
    def n_packed_objects(self) -> int:
        return self.n_packed_data_objects + len(self.record.nodes()) + 1

    @property
    def decoded_bytes(self) -> int:
        lengths = ((layout, self.record.length(p) - self.first_of(p)) for p, layout in self.layouts.items())
        return sum(layout.row_bytes * max(0, n) for layout, n in lengths)

    @property
    def has_other_chunks(self) -> bool:
        """Whether chunks or codecs of a field would change."""
        steps = ((a, self.record.layouts[p]) for p, a in self.layouts.items() if p.startswith("steps/"))
        return any((new.chunk_rows, new.codec) != (old.chunk_rows, old.codec) for new, old in steps)


class Packing:
    """Packs the streams of one store, one after the other.

    Args:
        storage: Storage of the store.
        settings: Sizes and codecs.
        progress: As for `pack`.
        has_size: Whether the size of shards was asked for, so that streams are packed again for it.
        pause: Called after every few chunks and for every stream, to work slowly; stops the packing by raising.
    """

    def __init__(
        self,
        storage: Storage,
        settings: PackSettings,
        progress: Progress | None = None,
        *,
        has_size: bool = False,
        pause: Pause | None = None,
    ) -> None:
        self._pause = pause
        self._storage, self._settings, self._progress = storage, settings, progress
        self._has_size = has_size
        self._n_bytes = self._total_bytes = 0

    def plan(self, streams: Collection[str] | None = None) -> PackReport:
        """What `run` would do."""
        plans, left = self._named_plans(streams)
        packed = tuple(PackedStream(p.record.id, None, p.n_objects, p.n_bytes, p.n_packed_objects) for p in plans)
        return PackReport(self._storage.display, packed, left, is_dry_run=True)

    def run(self, streams: Collection[str] | None = None) -> PackReport:
        """Pack; readers see each stream packed when it is complete."""
        self._storage.check_writable()
        for record in Snapshot.load(self._storage, None).stored:
            if record.id in unfinished_copies([record]):
                remove_copy(self._storage, record)
        plans, left = self._named_plans(streams)
        self._total_bytes = sum(plan.decoded_bytes for plan in plans)
        packed = []
        for plan in plans:
            try:
                packed.append(self.pack(plan))
            except ConflictError as error:
                left[plan.record.id] = str(error)
        return PackReport(self._storage.display, tuple(packed), left)

    # ---- what is packed

    def _named_plans(self, streams: Collection[str] | None) -> tuple[list[StreamPlan], dict[str, str]]:
        snapshot = Snapshot.load(self._storage, read_schema(self._storage))
        self._check_names(snapshot, streams)
        return self.plans(snapshot, streams)

    def plans(
        self, snapshot: Snapshot, streams: Collection[str] | None = None
    ) -> tuple[list[StreamPlan], dict[str, str]]:
        """How each stream of a snapshot is packed, and why others are left alone.

        Plans may be carried out later: then more rows than needed are copied, or `pack` raises `ConflictError`.

        Args:
            snapshot: What is stored.
            streams: Ids of the streams to pack; all by default.
        """
        records = snapshot.streams
        # Checkpoints after records: a checkpoint that is put later needs no row below the marks of these records.
        needed = Marks.wanted(records).lowered(checkpoints.pins(self._storage))
        dead = {stream for record in records for stream in record.view.dead}
        plans, left = [], {}
        for record in records:
            if streams is None or record.id in streams:
                if self._pause is not None:
                    self._pause()
                plan = self._plan_of(record, needed[record.id], is_dead=record.id in dead)
                if isinstance(plan, StreamPlan):
                    plans.append(plan)
                else:
                    left[record.id] = plan
        return plans, left

    def _check_names(self, snapshot: Snapshot, streams: Collection[str] | None) -> None:
        known = [record.id for record in snapshot.streams]
        if unknown := [stream for stream in streams or () if stream not in known]:
            listed = ", ".join(known) or "none"
            raise DataError(f"{self._storage.display} has no stream {unknown[0]!r}; it has {listed}")
        fields = snapshot.schema.fields if snapshot.schema is not None else {}
        if unknown := [path for path in self._settings.codecs if path not in fields]:
            raise DataError(f"codecs: no field {unknown[0]!r}; the fields are {', '.join(fields) or 'none'}")

    def _plan_of(self, record: CommitRecord, first: int, *, is_dead: bool) -> StreamPlan | str:
        """How a stream is packed, or why it is left alone."""
        if not (record.is_sealed or is_dead):
            return NOT_CLOSED
        if record.replaces is not None:
            return "it replaces a part of another stream"
        if first >= record.rows:
            return "none of its rows is needed"
        found = self._storage.tree_sizes(record.folder)
        data = {key: n for key, n in found.items() if not key.endswith("/zarr.json")}
        sizes: Counter[str] = Counter()
        for key, n in data.items():
            sizes[key.removeprefix(f"{record.folder}/").rpartition("/")[0]] += n
        layouts = packed_layouts(record, sizes, first, self._settings)
        plan = StreamPlan(record, first, layouts, len(found), sum(found.values()), len(data))
        return plan if self._is_worthwhile(plan) else "it has few objects already"

    def _is_worthwhile(self, plan: StreamPlan) -> bool:
        before, after = plan.n_data_objects, plan.n_packed_data_objects
        if before >= _MIN_FACTOR * after or (self._has_size and after >= _MIN_FACTOR * before):
            return True
        is_asked = self._settings.chunk_bytes is not None or bool(self._settings.codecs)
        return is_asked and plan.has_other_chunks

    # ---- packing one stream

    def pack(self, plan: StreamPlan) -> PackedStream:
        """Pack one stream.

        Raises:
            ConflictError: It was removed, changed, evicted or packed by another process; another plan may succeed.
        """
        record = plan.record
        packed = replace(
            record.as_stored(),
            id=new_id(record.name, after=record.as_stored().id),
            layouts=dict(plan.layouts),
            is_sealed=True,
            replaces=Replaces(record.id, 0, record.rows),
        )
        try:
            n_bytes = _CopyWriter(self._storage, plan, packed, self._count, self._pause).write()
        except BaseException:
            with contextlib.suppress(StorageError):  # readers ignore the remains, and a later call removes them
                _withdraw(self._storage, packed)
            raise
        return PackedStream(record.id, packed.id, plan.n_objects, plan.n_bytes, plan.n_packed_objects, n_bytes)

    def _count(self, n_bytes: int) -> None:
        self._n_bytes += n_bytes
        if self._progress is not None:
            self._progress(self._n_bytes, self._total_bytes)


class _CopyWriter:
    """Writes the packed copy of one stream: an unfinished record, the shards, and then the record that counts."""

    def __init__(
        self,
        storage: Storage,
        plan: StreamPlan,
        packed: CommitRecord,
        count: Callable[[int], None],
        pause: Pause | None,
    ) -> None:
        self._storage, self._plan, self._packed, self._count = storage, plan, packed, count
        self._pause = pause
        self._version = ABSENT
        self._put_at = 0.0

    def write(self) -> int:
        """Write everything; returns the size of the objects.

        Raises:
            ConflictError: The stream was removed or changed, or another process has packed it and removed this one.
        """
        record, packed = self._plan.record, self._packed
        # The record comes first, as for any stream: a group without one makes Zarr readers warn.
        self._announce()
        self._put_nodes(unfinished(packed, 0))
        n_bytes, reader = 0, StreamReader(self._storage, record)
        try:
            for path, layout in packed.layouts.items():
                first = self._plan.first_of(path)
                packer = ArrayPacker(self._storage, reader, path, layout, first, packed.folder, pause=self._pause)
                n_bytes += packer.write(lambda n, size=layout.row_bytes: self._wrote(n * size))  # type: ignore[misc]
        except MissingChunkError as error:
            if record.key not in self._storage.tree_sizes(record.folder):
                raise ConflictError("it was removed, or packed by another process") from error
            if first_needed(self._storage, record.id) > self._plan.first:
                raise ConflictError(
                    "some of its rows were evicted while it was being packed; pack again"
                ) from error
            raise
        n_bytes += self._put_nodes(packed)
        self._check_unchanged()
        self._check_present()
        data = packed.to_bytes()
        self._storage.put(packed.key, data, self._version)
        return n_bytes + len(data)

    def _wrote(self, n_bytes: int) -> None:
        self._count(n_bytes)
        if time.time() - self._put_at > _RENEW_S:
            self._check_present()
            self._announce()

    def _announce(self) -> None:
        self._put_at = time.time()
        data = unfinished(self._packed, self._put_at).to_bytes()
        self._version = self._storage.put(self._packed.key, data, self._version)

    def _put_nodes(self, record: CommitRecord) -> int:
        nodes = {f"{record.folder}/{path}/zarr.json": to_json_bytes(node) for path, node in record.nodes().items()}
        self._storage.put_many([Put(key, lambda data=data: data) for key, data in nodes.items()])  # type: ignore[misc]
        return sum(map(len, nodes.values()))

    def _check_unchanged(self) -> None:
        """Refuse to replace a stream that was removed or continued since it was read."""
        stored = self._plan.record.as_stored()
        if read_records(self._storage, [stored.id]).get(stored.id) != stored:
            raise ConflictError("it was removed, changed, or packed by another process")

    def _check_present(self) -> None:
        """Refuse to complete a copy that was removed because it seemed to be abandoned."""
        try:
            self._storage.size(self._packed.key)
        except FileNotFoundError:
            raise ConflictError("the packed copy was removed while it was being written; pack again") from None


def first_needed(storage: Storage, stream: str) -> int:
    """The first row of a stream that a session or a checkpoint needs now."""
    wanted = Marks.wanted(Snapshot.load(storage, None).streams)
    return wanted.lowered(checkpoints.pins(storage)).get(stream, 0)


def _withdraw(storage: Storage, packed: CommitRecord) -> None:
    """Remove an unfinished copy. One that readers use already, because only an answer was lost, is kept."""
    found = read_records(storage, [packed.id]).get(packed.id)
    if found is None or not found.is_sealed:
        storage.remove_tree(packed.folder)
