"""Looks at everything that a reader relies on, and says all that is wrong with it.

Damage stops nothing: what hangs on a damaged object is left out, the rest is looked at. What does no harm, such as
objects of a commit that never came, is noted. Writers may go on meanwhile; what they change is looked up again
before it is called a problem.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trajstore.errors import (
    CheckpointNotFoundError,
    CorruptionError,
    FormatError,
    SchemaError,
    StorageError,
    StoreNotFoundError,
)
from trajstore.format.array_layout import ArrayLayout
from trajstore.format.checkpoint_record import Checkpoint, parse_checkpoint
from trajstore.format.commit_record import CommitRecord, DerivedColumnState
from trajstore.format.first_live_rows import first_live_rows
from trajstore.format.ids import is_stream_id
from trajstore.format.spans import MAX_ENV, End
from trajstore.format.zarr_json import FORMAT, check_checksum, parse_json, trajstore_attributes
from trajstore.schema import MAX_METADATA_BYTES, Array, Schema
from trajstore.storage import Storage, open_storage
from trajstore.store.checkpoints import find, parts_of, place_of, read_state
from trajstore.store.store import Store
from trajstore.store.stream_reader import ChunkError, MissingChunkError, StreamReader

Progress = Callable[[int, int], None]  # chunks looked at, chunks in all
Consume = Callable[[int, int, Array | None], None]  # rows from, to, and their values; None where they are damaged

_COUNTED = ("streams", "rows", "spans", "episodes", "checkpoints", "chunks", "bytes")
_WAVE_CHUNKS = 64
_WAVE_BYTES = 64 << 20
_TEXT_BYTES = 1 << 20
_STATE_BYTES = 256 << 20  # states up to here are also decoded as a whole
_MAX_LISTED = 20  # of one kind in one stream; the others are counted
_SUM_TOLERANCE = 1e-9  # of the sum of magnitudes: other writers may add in another order
_SPANS = ("spans/ints", "spans/floats")
_TOP = frozenset({"zarr.json", "schema", "streams", "checkpoints", "scratch", "worlds"})
_GROUP_KEYS = frozenset({"zarr_format", "node_type", "attributes", "consolidated_metadata"})
_NO_RECORD = "missing, so nothing of the stream can be read"
_CHUNK = re.compile(r"c\.(0|[1-9]\d{0,17})(\.0)*")


@dataclass(frozen=True, slots=True)
class VerifyProblem:
    """Something that a reader relies on is not as it must be."""

    where: str
    what: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


@dataclass(frozen=True, slots=True)
class VerifyNote:
    """Something left over, or in progress, that does no harm."""

    where: str
    what: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


@dataclass(slots=True)
class VerifyReport:
    """What `verify` found.

    Attributes:
        url: Where the store is, without credentials.
        problems: All that is wrong; none in a healthy store.
        notes: What is left over.
        counts: How much was looked at: streams, rows, spans, episodes, checkpoints, chunks, bytes.
    """

    url: str
    problems: list[VerifyProblem] = field(default_factory=list)
    notes: list[VerifyNote] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_COUNTED, 0))

    @property
    def is_clean(self) -> bool:
        return not self.problems


def verify(
    store: Store | str | os.PathLike[str],
    *,
    fast: bool = False,
    progress: Progress | None = None,
    at: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> VerifyReport:
    """Look at every object that a reader relies on, and report all problems.

    Memory is bounded by a wave of chunks and the span table of one stream.

    Args:
        store: A store, or its URL: one too damaged to be opened can still be looked at.
        fast: Read records and span tables; of all other chunks only see that they are there, in a plausible size.
        progress: Called after every wave with the number of chunks looked at so far, and of all.
        at: Look only at what this checkpoint shows; its name, its id, or ``"latest"``.
        storage_options: Options for fsspec's filesystem, where a URL is given.

    Raises:
        StoreNotFoundError: There is no store.
        FormatError: What is there is not a store, or one of a newer format.
        CheckpointNotFoundError: There is no such checkpoint.
        StorageError: The storage does not answer any more.
    """
    storage = store.snapshot.storage if isinstance(store, Store) else open_storage(store, storage_options)
    verification = _Verification(storage, fast, progress)
    verification.run(at)
    return verification.report


@dataclass(frozen=True, slots=True)
class _Array:
    """One array under scrutiny."""

    name: str
    prefix: str  # of its keys
    layout: ArrayLayout
    length: int
    first_row: int  # rows below it are evicted
    read: Callable[[int], bytes | memoryview]  # one chunk as it is stored

    @property
    def chunks(self) -> range:
        """Numbers of the chunks that must be there."""
        stop = -(-self.length // self.layout.chunk_rows)
        return range(self.first_row // self.layout.chunk_rows if self.first_row < self.length else stop, stop)

    def rows(self, index: int) -> tuple[int, int]:
        """The rows of a chunk that exist."""
        size = self.layout.chunk_rows
        return index * size, min(self.length, (index + 1) * size)


@dataclass(slots=True)
class _Part:
    """One stream under scrutiny."""

    record: CommitRecord
    reader: StreamReader
    first_row: int  # nobody wants rows below it
    hidden: tuple[tuple[int, int], ...]  # row ranges that other streams hold in its place
    spans: tuple[Array, Array] | None = None  # ints and floats, once they are known to be sane

    @property
    def name(self) -> str:
        return f"stream '{self.record.id}'"

    @property
    def logical(self) -> str:
        """The stream whose episodes these are."""
        return self.record.replaces.stream if self.record.replaces else self.record.id

    def array(self, path: str) -> _Array:
        return _Array(
            f"{self.name}, array '{path}'",
            f"streams/{self.record.id}/{path}",
            self.record.layouts[path],
            self.record.length(path),
            self.first_row if path.startswith("steps/") else 0,
            lambda index: self.reader.chunk(path, index, bytearray()),
        )


class _Verification:
    def __init__(self, storage: Storage, fast: bool, progress: Progress | None) -> None:
        self.report = VerifyReport(storage.display)
        self._storage = storage
        self._fast = fast
        self._progress = progress
        self._n_chunks = 0  # in all
        self._at: Checkpoint | None = None  # look only at what it shows
        self._records: dict[str, CommitRecord] = {}
        self._checkpoints: list[Checkpoint] = []

    def run(self, at: str | None) -> None:
        self._check_root()
        self._check_groups()
        if at is None:
            self._records = self._read_records()
            self._checkpoints = self._read_checkpoints()
            for checkpoint in self._checkpoints:
                self._cut_records(checkpoint)
        else:
            self._at = find(self._storage, at)
            self._checkpoints = [self._at]
            self._records = self._cut_records(self._at)
        self._check_schemas(self._read_schema())
        self._check_streams()
        for checkpoint in self._checkpoints:
            self._check_checkpoint(checkpoint)

    def _check_streams(self) -> None:
        parts = self._parts()
        self._n_chunks = sum(len(part.array(path).chunks) for part in parts for path in part.record.layouts)
        by_logical: dict[str, list[_Part]] = {}
        for part in parts:
            by_logical.setdefault(part.logical, []).append(part)
        for logical, members in by_logical.items():
            for part in members:
                self._check_stream(part)
            self._check_episodes(logical, members)
            for part in members:
                part.spans = None  # the next stream needs the memory

    def _problem(self, where: str, what: str) -> None:
        self.report.problems.append(VerifyProblem(where, what))

    def _note(self, where: str, what: str) -> None:
        self.report.notes.append(VerifyNote(where, what))

    def _some(self, items: Sequence[tuple[str, str]], rest: str) -> None:
        """Report many problems of one kind: the first by name, the others by number."""
        for where, what in items[:_MAX_LISTED]:
            self._problem(where, what)
        if len(items) > _MAX_LISTED:
            self._problem(rest, f"{len(items) - _MAX_LISTED} more of the same kind: {items[0][1]}, ...")

    # ---- above the streams -------------------------------------------------------------------------------

    def _check_root(self) -> None:
        display, names = self._storage.display, self._storage.list_names("")
        try:
            own = trajstore_attributes(parse_json(self._storage.get("zarr.json"), display), "store", display)
        except FileNotFoundError:
            if not self._has_streams():
                raise StoreNotFoundError(f"{display}: there is no store here") from None
            self._problem("zarr.json", "missing, so nobody finds the store")
        except FormatError as error:
            if not self._has_streams() or _is_of_another_format(error):
                raise
            self._problem("zarr.json", _reason(error, display))
        else:
            if not isinstance(own.get("id"), str) or not _is_time(own.get("created_at")):
                self._problem("zarr.json", "has no id, or no time of creation")
        for name in sorted(set(names) - _TOP):
            self._note(name, "not part of a store; readers ignore it")

    def _has_streams(self) -> bool:
        return any(is_stream_id(name) for name in self._storage.list_names("streams"))

    def _check_groups(self) -> None:
        for name in ("streams", "checkpoints"):
            self._check_node(f"{name}/zarr.json", f"{name}/zarr.json", _group_fault)
        scratch = self._storage.list_names("scratch")
        if "scratch" in self._storage.list_names(""):
            self._check_node("scratch/zarr.json", "scratch/zarr.json", _scratch_fault)
        if n := len(set(scratch) - {"zarr.json"}):
            self._note("scratch", f"{n} temporary files, of writers at work or of such that died")

    def _check_node(self, key: str, where: str, fault: Callable[[dict[str, Any]], str | None]) -> None:
        """Look at one ``zarr.json``; ``fault`` says what is wrong with its content."""
        try:
            what = fault(parse_json(self._storage.get(key), where))
        except FileNotFoundError:
            what = "missing"
        except FormatError as error:
            what = _reason(error, where)
        if what:
            self._problem(where, what)

    def _read_schema(self) -> Schema | None:
        where = "schema/zarr.json"
        try:
            data = self._storage.get(where)
            own = trajstore_attributes(parse_json(data, where), "schema", where)
            check_checksum(data, where)
            return Schema.from_json(own.get("schema"))
        except FileNotFoundError:
            if self._records:
                self._problem(where, "missing, although there are streams")
        except (FormatError, SchemaError) as error:
            self._problem(where, _reason(error, where))
        return None

    def _read_records(self) -> dict[str, CommitRecord]:
        names = self._storage.list_names("streams")
        streams = [name for name in names if is_stream_id(name)]
        for name in sorted(set(names) - {"zarr.json", *streams}):
            self._note(f"streams/{name}", "not a stream; readers ignore it")
        found = dict(zip(streams, self._storage.map(self._read_record, streams), strict=True))
        records = {name: record for name, record in found.items() if isinstance(record, CommitRecord)}
        marks = {stream: row for r in records.values() for stream, row in r.view.first_rows.items()}
        for name, fault in found.items():
            where = f"stream '{name}', commit record"
            if fault == _NO_RECORD and name in marks:
                self._note(where, f"missing; its rows below {marks[name]} are given up, so it was being removed")
            elif isinstance(fault, str):
                self._problem(where, fault)
        self.report.counts["streams"] = len(streams)
        return dict(sorted(records.items(), key=_by_creation))

    def _read_record(self, stream: str) -> CommitRecord | str:
        """A record, or what is wrong with it."""
        try:
            return self._newest(stream)
        except FileNotFoundError:
            return _NO_RECORD
        except FormatError as error:
            return _reason(error, f"{self._storage.display}/streams/{stream}")

    def _newest(self, stream: str) -> CommitRecord:
        data = self._storage.get(f"streams/{stream}/zarr.json")
        return CommitRecord.from_bytes(data, stream, self._storage.display)

    def _check_schemas(self, schema: Schema | None) -> None:
        for record in self._records.values():
            schema = schema or record.schema
            if differences := schema.differences(record.schema):
                self._problem(f"stream '{record.id}'", f"has another schema: {'; '.join(differences)}")
            for what in _record_faults(record):
                self._problem(f"stream '{record.id}', commit record", what)

    def _parts(self) -> list[_Part]:
        records = list(self._records.values())
        wanted = self._wanted_rows(records)
        hidden: dict[str, tuple[tuple[int, int], ...]] = {}
        for record in records:
            if replaces := record.replaces:
                hidden[replaces.stream] = (*hidden.get(replaces.stream, ()), (replaces.start, replaces.stop))
        return [
            _Part(r, StreamReader(self._storage, r), min(r.rows, wanted[r.id]), hidden.get(r.id, ()))
            for r in records
        ]

    def _wanted_rows(self, records: Sequence[CommitRecord]) -> dict[str, int]:
        """The first row of each stream that is live, or that a checkpoint keeps."""
        wanted = first_live_rows(records)
        for checkpoint in self._checkpoints:
            for stream, kept in checkpoint.streams.items():
                wanted[stream] = min(kept.first, wanted.get(stream, kept.first))
        return wanted

    # ---- checkpoints -------------------------------------------------------------------------------------

    def _read_checkpoints(self) -> list[Checkpoint]:
        """Those that are complete."""
        names = self._storage.list_names("checkpoints")
        ids = [name for name in names if is_stream_id(name)]
        for name in sorted(set(names) - {"zarr.json", *ids}):
            self._note(f"checkpoints/{name}", "not a checkpoint; readers ignore it")
        complete = []
        for name, found in zip(ids, self._storage.map(self._read_checkpoint, ids), strict=True):
            where = f"checkpoint '{name}'"
            if isinstance(found, str):
                self._problem(where, found)
            elif not found.is_complete:
                self._note(where, "not complete: it is being saved or removed, or that did not come to its end")
            else:
                complete.append(found)
        self.report.counts["checkpoints"] = len(complete)
        return complete

    def _read_checkpoint(self, name: str) -> Checkpoint | str:
        """A checkpoint, or what is wrong with it."""
        try:
            return parse_checkpoint(
                self._storage.get(f"checkpoints/{name}/zarr.json"), name, self._storage.display
            )[0]
        except FileNotFoundError:
            return "its record is missing, so it can't be read"
        except FormatError as error:
            return _reason(error, f"{self._storage.display}/checkpoints/{name}")

    def _cut_records(self, checkpoint: Checkpoint) -> dict[str, CommitRecord]:
        """The records of a checkpoint's streams, as it shows them."""
        records: dict[str, CommitRecord] = {}
        for stream, kept in checkpoint.streams.items():
            newest = self._records.get(stream) or self._read_record(stream)
            where = f"checkpoint '{checkpoint.id}', stream '{stream}'"
            if isinstance(newest, str):
                self._problem(where, f"its commit record: {newest}")
                continue
            try:
                records[stream] = kept.truncate(newest)
                if kept.record is not None and kept.record.layouts != records[stream].layouts:
                    self._problem(where, "its copy of the commit record describes other arrays")
            except CorruptionError as error:
                self._problem(where, _reason(error, f"stream '{stream}'"))
        return dict(sorted(records.items(), key=_by_creation))

    def _check_checkpoint(self, checkpoint: Checkpoint) -> None:
        for rank in parts_of(checkpoint):
            self._check_part(checkpoint, rank)

    def _check_part(self, checkpoint: Checkpoint, rank: int | None) -> None:
        key, where = place_of(checkpoint.id, rank), f"checkpoint '{checkpoint.id}'"
        where += "" if rank is None else f", part of rank {rank}"
        try:
            _, _, nodes = parse_checkpoint(
                self._storage.get(f"{key}/zarr.json"), checkpoint.id, self._storage.display
            )
            faults = self._state_faults(key, where, nodes)
            if not faults and not self._fast and _state_bytes(nodes) <= _STATE_BYTES:
                read_state(self._storage, checkpoint, rank)
        except (FileNotFoundError, CheckpointNotFoundError):
            if rank is not None and not isinstance(self._read_checkpoint(checkpoint.id), str):
                self._problem(where, "is missing")
            else:
                self._note(where, "was removed while it was looked at")
        except (FormatError, CorruptionError) as error:
            self._problem(where, _reason(error, f"{self._storage.display}/{key}"))
        else:
            self.report.problems += faults

    def _state_faults(self, key: str, where: str, nodes: Mapping[str, Any]) -> list[VerifyProblem]:
        """What is wrong with the arrays of a checkpoint."""
        faults = []
        for path, node in nodes.items():
            name = f"{where}, {node.get('node_type')} '{path}'"
            if fault := self._copy_fault(f"{key}/{path}/zarr.json", node):
                faults.append(VerifyProblem(f"{name}, zarr.json", fault))
            if node.get("node_type") == "array":
                layout, length = ArrayLayout.from_metadata(node, path)
                array = _Array(name, f"{key}/{path}", layout, length, 0, self._chunk_of(f"{key}/{path}", layout))
                found, _ = self._look(array, is_read=not self._fast)
                faults += _chunk_problems(array, found)
        return faults

    def _chunk_of(self, prefix: str, layout: ArrayLayout) -> Callable[[int], bytes]:
        return lambda index: self._storage.get(f"{prefix}/{layout.chunk_key(index)}")

    def _copy_fault(self, key: str, expected: Mapping[str, Any]) -> str | None:
        """What is wrong with a node that is to say the same as the record does."""
        try:
            return (
                None if parse_json(self._storage.get(key), key) == expected else "differs from what the record says"
            )
        except FileNotFoundError:
            return "missing"
        except FormatError as error:
            return _reason(error, key)

    # ---- one stream --------------------------------------------------------------------------------------

    def _check_stream(self, part: _Part) -> None:
        counts, record = self.report.counts, part.record
        counts["rows"] += record.rows
        counts["spans"] += record.spans
        self._check_nodes(part)
        are_sound = [self._check_array(part, path) for path in _SPANS]
        if all(are_sound):
            self._check_spans(part)
        self._check_steps(part)
        self._check_array(part, "spans/text")
        if part.spans is not None and not self._fast:
            self._check_texts(part)
        for target, named in record.columns.items():
            for name, state in named.items():
                self._check_column(part, target, name, state)

    def _check_steps(self, part: _Part) -> None:
        returns = _Returns(part) if part.spans is not None and not self._fast else None
        reward = f"steps/{part.record.schema.reward}"
        for path in part.record.layouts:
            if path.startswith("steps/"):
                self._check_array(part, path, returns.take if returns and path == reward else None)
        if returns is not None:
            self._some([*returns.faults()], part.name)

    def _check_nodes(self, part: _Part) -> None:
        """Compare what every group and array says of itself with what the record says of it."""
        try:
            data = self._storage.get(part.record.key)  # the newest: no node may be ahead of that
            record = CommitRecord.from_bytes(data, part.record.id, self._storage.display)
        except (FileNotFoundError, FormatError):
            self._problem(f"{part.name}, commit record", "vanished, or was damaged, while it was looked at")
            return
        nodes = parse_json(data, part.name)["consolidated_metadata"]["metadata"]
        paths = list(record.nodes())

        def look(path: str) -> tuple[str, bool] | None:
            return self._node_fault(record, path, nodes.get(path))

        for path, fault in zip(paths, self._storage.map(look, paths), strict=True):
            kind = "array" if path in record.layouts else "group"
            where = f"{part.name}, {kind} '{path}', zarr.json"
            if fault is not None:
                (self._problem if fault[1] else self._note)(where, fault[0])
        if self._at is None:
            self._note_strangers(part, record)

    def _node_fault(self, record: CommitRecord, path: str, expected: Any) -> tuple[str, bool] | None:
        """What is wrong with a node, and whether it matters."""
        try:
            own = parse_json(self._storage.get(f"streams/{record.id}/{path}/zarr.json"), path)
        except FileNotFoundError:
            below = (p for p in record.layouts if p == path or p.startswith(f"{path}/"))
            is_new = record.commit == 0 or path.startswith("columns")
            if is_new and not record.is_sealed and not any(record.length(p) for p in below):
                return "not there yet; its writer is about to put it, or died", False
            return "missing", True
        except FormatError as error:
            return _reason(error, path), True
        if path not in record.layouts:
            fault = _group_fault(own)
        else:
            fault = _array_fault(own, expected, record, path)
            if fault is not None and not record.is_sealed:  # was there a commit after the record was read?
                newest = self._read_record(record.id)
                if isinstance(newest, str):
                    return f"{fault}; and of that: {newest}", True
                if newest.is_sealed:
                    return self._node_fault(newest, path, expected)
                fault = _array_fault(own, expected, newest, path)
        return (fault, True) if fault else None

    def _note_strangers(self, part: _Part, record: CommitRecord) -> None:
        paths = record.nodes().keys()
        for group in ("", *(path for path in paths if path not in record.layouts)):
            prefix = f"{group}/" if group else ""
            known = {path.removeprefix(prefix).split("/")[0] for path in paths if path.startswith(prefix)}
            names = self._storage.list_names(f"streams/{record.id}/{group}".rstrip("/"))
            for name in sorted(set(names) - known - {"zarr.json"}):
                self._note(part.name, f"'{prefix}{name}' is not named by the record; readers ignore it")

    # ---- one array ---------------------------------------------------------------------------------------

    def _check_array(self, part: _Part, path: str, consume: Consume | None = None) -> bool:
        """Look at the chunks of a stream's array; returns whether all are sound."""
        array = part.array(path)
        faults, names = self._look(array, is_read=not self._fast or path in _SPANS, consume=consume)
        if faults:
            faults = self._still_wrong(part, path, faults)
        self.report.problems += _chunk_problems(array, faults)
        if self._at is None:
            self._note_leftovers(array, names)
        return not faults

    def _look(
        self, array: _Array, *, is_read: bool, consume: Consume | None = None
    ) -> tuple[dict[int, str], Iterable[str]]:
        """What is wrong with the chunks of an array, by number, and the names of its objects."""
        if is_read:
            return self._read_chunks(array, consume), self._storage.list_names(array.prefix)
        below = self._storage.tree_sizes(array.prefix)
        sizes = {key.removeprefix(f"{array.prefix}/"): size for key, size in below.items()}
        return self._look_for_chunks(array, sizes), sizes

    def _read_chunks(self, array: _Array, consume: Consume | None) -> dict[int, str]:
        faults: dict[int, str] = {}

        def read(index: int) -> tuple[int, Array | str | None]:
            n_bytes, found = self._decode(array, index)
            return n_bytes, found if consume is not None or isinstance(found, str) else None

        for wave in _waves(array):
            for index, (n_bytes, found) in zip(wave, self._storage.map(read, wave), strict=True):
                self.report.counts["bytes"] += n_bytes
                if isinstance(found, str):
                    faults[index] = found
                if consume is not None:
                    start, stop = array.rows(index)
                    consume(start, stop, found[: stop - start] if isinstance(found, np.ndarray) else None)
            self._advance(len(wave))
        return faults

    def _decode(self, array: _Array, index: int) -> tuple[int, Array | str]:
        """The stored size of a chunk, and its rows or what is wrong with it."""
        layout = array.layout
        try:
            data = array.read(index)
            block = np.empty((layout.chunk_rows, *layout.row_shape), layout.dtype)
            layout.decode(data, block)
        except (MissingChunkError, FileNotFoundError):
            return 0, "missing"
        except ChunkError as error:
            return 0, str(error.__cause__)
        except CorruptionError as error:
            return len(data), str(error)
        except StorageError as error:
            self._storage.list_names("")  # raises where it is the storage that fails, not the object
            return 0, f"can't be read: {error}"
        return len(data), block

    def _look_for_chunks(self, array: _Array, sizes: Mapping[str, int]) -> dict[int, str]:
        faults: dict[int, str] = {}
        counted: set[str] = set()  # a shard holds many chunks
        for index in array.chunks:
            key = array.layout.chunk_key(index)
            if key not in sizes:
                faults[index] = "missing"
            elif fault := _size_fault(array.layout, sizes[key]):
                faults[index] = fault
            counted.add(key)
        self.report.counts["bytes"] += sum(sizes.get(key, 0) for key in counted)
        self._advance(len(array.chunks))
        return faults

    def _advance(self, n: int) -> None:
        self.report.counts["chunks"] += n
        if self._progress is not None and n:
            self._progress(self.report.counts["chunks"], self._n_chunks)

    def _still_wrong(self, part: _Part, path: str, faults: dict[int, str]) -> dict[int, str]:
        """Leave out what was evicted or written anew while it was looked at."""
        layout, stream = part.record.layouts[path], part.record.id
        there = set(self._storage.list_names("checkpoints"))
        self._checkpoints = [checkpoint for checkpoint in self._checkpoints if checkpoint.id in there]
        found = self._storage.map(self._read_record, list(self._records))
        newest = {record.id: record for record in found if isinstance(record, CommitRecord)}
        if stream not in newest:
            self._note(part.name, "was removed while it was looked at")
            return {}
        if path.startswith("columns/"):
            _, target, name, _, _ = path.split("/")
            before, now = (r.columns.get(target, {}).get(name) for r in (part.record, newest[stream]))
            return {} if before and now and now.generation > before.generation else faults
        first = self._wanted_rows(list(newest.values()))[stream] if path.startswith("steps/") else 0
        return {index: what for index, what in faults.items() if (index + 1) * layout.chunk_rows > first}

    def _note_leftovers(self, array: _Array, names: Iterable[str]) -> None:
        layout = array.layout
        n_past = n_below = 0
        for name in set(names) - {"zarr.json"}:
            found = _CHUNK.fullmatch(name)
            index = int(found[1]) * layout.chunks_per_shard if found else 0
            if not found or name != layout.chunk_key(index):
                self._note(array.name, f"'{name}' is not a chunk; readers ignore it")
            elif index * layout.chunk_rows >= array.length:
                n_past += 1
            elif (index + layout.chunks_per_shard) * layout.chunk_rows <= array.first_row:
                n_below += 1
        if n_past:
            is_column = "/columns/" in array.prefix
            whose = "older generations" if is_column else "a commit that is under way or never came"
            self._note(array.name, f"objects past its {array.length} rows, of {whose}: {n_past}")
        if n_below:
            self._note(array.name, f"objects below row {array.first_row}, which nobody wants: {n_below}")

    # ---- spans, text, columns ----------------------------------------------------------------------------

    def _check_spans(self, part: _Part) -> None:
        record = part.record
        try:
            ints, floats = (part.reader.read_rows(path, 0, record.spans) for path in _SPANS)
        except CorruptionError as error:
            self._problem(f"{part.name}, spans", f"changed while they were looked at: {error}")
            return
        faults = [
            (f"{part.name}, {_span_name(ints, i)}", what)
            for mask, what in _span_faults(ints, floats, record)
            for i in np.flatnonzero(mask)
        ]
        last = int(ints[-1, 4]) if len(ints) else 0
        if last != record.rows:
            faults.append((f"{part.name}, spans", f"end at row {last}, the record says {record.rows}"))
        self._some(faults, part.name)
        if not faults:
            part.spans = ints, floats

    def _check_texts(self, part: _Part) -> None:
        assert part.spans is not None
        ints, schema = part.spans[0], part.record.schema
        stop = ints[:, 8]
        start = np.concatenate([[0], stop[:-1]])
        faults: list[tuple[str, str]] = []
        for group in _text_groups(start, stop):
            low, high = int(start[group[0]]), int(stop[group[-1]])
            try:
                data = part.reader.read_text(low, high)
            except CorruptionError:
                continue  # a problem of the chunk, and reported as such
            for i in group:
                text = data[start[i] - low : stop[i] - low]
                if fault := _text_fault(text, int(ints[i, 7]), schema):
                    faults.append((f"{part.name}, {_span_name(ints, i)}", fault))
        self._some(faults, part.name)

    def _check_column(self, part: _Part, target: str, name: str, state: DerivedColumnState) -> None:
        where = f"{part.name}, column '{name}' of stream '{target}'"
        values, delta_rows, delta_values = state.paths(target, name)
        bounds, priorities = _Bounds(), _Priorities()
        is_priority = name == "priority" and state.dtype == "float32"
        consumers: dict[str, Consume] = {delta_rows: bounds.take}
        if is_priority:
            consumers |= dict.fromkeys((values, delta_values), priorities.take)
        is_sound = [self._check_array(part, path, consumers.get(path)) for path in state.lengths(target, name)]
        if target not in self._records:
            self._note(where, "its stream is not here")
        elif all(is_sound):
            low, high = min(bounds.low, state.first), max(bounds.high, state.stop)
            self._check_column_rows(where, target, low, high, state)
        if priorities.n_bad:
            self._problem(where, f"{priorities.n_bad} priorities are negative or not finite")

    def _check_column_rows(self, where: str, target: str, low: int, high: int, state: DerivedColumnState) -> None:
        if low < state.first:
            self._problem(where, f"has changes from row {low} on, but its first row is {state.first}")
        if high > self._records[target].rows and high > self._newest(target).rows:
            self._problem(where, f"has rows up to {high}, its stream has {self._records[target].rows}")

    # ---- episodes ----------------------------------------------------------------------------------------

    def _check_episodes(self, logical: str, members: Sequence[_Part]) -> None:
        """See that the spans of every episode follow each other, whichever streams hold them."""
        if any(part.spans is None for part in members):
            return  # reported already
        table = _episode_spans(members)
        named = [
            (f"{part.name}, {_span_name(part.spans[0], table['span'][i])}", what)
            # Of a stream that is gone only a part may have been taken over.
            for i, what in _episode_faults(table, is_whole=logical in self._records)
            if (part := members[table["member"][i]]).spans is not None
        ]
        self._some(named, f"stream '{logical}'")
        self.report.counts["episodes"] += len(np.unique(table["episode"]))


class _Returns:
    """Adds up rewards by span, as their chunks pass by, and compares them with the returns on record."""

    def __init__(self, part: _Part) -> None:
        assert part.spans is not None
        self._part = part
        self._ints, self._floats = part.spans
        self._start, self._stop = self._ints[:, 3], self._ints[:, 4]
        self._sum = np.zeros(len(self._ints))
        self._magnitude = np.zeros(len(self._ints))
        self._is_known = self._start >= part.first_row
        schema = part.record.schema
        spec = schema.fields.get(schema.reward) if schema.reward else None
        self._is_summed = spec is not None and math.prod(spec.shape) == 1 and spec.dtype not in ("bool", "bfloat16")
        self._skips_first = schema.reward_alignment == "observation"

    def take(self, start: int, stop: int, block: Array | None) -> None:
        low = int(np.searchsorted(self._stop, start, "right"))
        high = int(np.searchsorted(self._start, stop, "left"))
        if not self._is_summed or low >= high:
            return
        if block is None:
            self._is_known[low:high] = False
            return
        values = np.append(block.reshape(-1).astype(np.float64), 0.0)
        if self._skips_first:
            first = self._start[low:high][(self._ints[low:high, 2] == 0) & (self._stop > self._start)[low:high]]
            values[first[first >= start] - start] = 0.0
        bounds = np.stack([self._start[low:high], self._stop[low:high]], 1).clip(start, stop) - start
        for total, terms in ((self._sum, values), (self._magnitude, np.abs(values))):
            with np.errstate(all="ignore"):
                sums = np.add.reduceat(terms, bounds.reshape(-1))[::2]
                total[low:high] += np.where(bounds[:, 0] < bounds[:, 1], sums, 0.0)

    def faults(self) -> Iterator[tuple[str, str]]:
        recorded = self._floats[:, 0]
        before, is_known = self._before()
        with np.errstate(all="ignore"):
            expected = before + self._sum
            tolerance = _SUM_TOLERANCE * (self._magnitude + np.abs(before)) + np.finfo(np.float64).tiny
            is_close = np.abs(recorded - expected) <= tolerance
        if not self._is_summed:
            expected, is_close, is_known = recorded, np.isnan(recorded), np.ones(len(recorded), bool)
        # Infinite rewards may add up to anything that is not finite, in one order or another.
        is_good = is_close | ~is_known | (~np.isfinite(self._magnitude + before) & ~np.isfinite(recorded))
        for i in np.flatnonzero(~is_good):
            sums = f"the rewards sum to {expected[i]:g}" if self._is_summed else "there is no reward to sum"
            yield f"{self._part.name}, {_span_name(self._ints, i)}", f"records a return of {recorded[i]:g}, {sums}"

    def _before(self) -> tuple[Array, Array]:
        """The return before each span, and of which spans it and the rewards are known."""
        episode, is_start = self._ints[:, 0], self._ints[:, 2] == 0
        order = np.argsort(episode, kind="stable")
        before, has_before = np.zeros(len(order)), np.zeros(len(order), bool)
        follows = np.flatnonzero(np.diff(episode[order]) == 0) + 1
        before[order[follows]] = self._floats[order[follows - 1], 0]
        has_before[order[follows]] = True
        return before, self._is_known & (has_before | is_start)


class _Bounds:
    """The smallest value, and one more than the largest."""

    def __init__(self) -> None:
        self.low, self.high = 1 << 63, 0

    def take(self, start: int, stop: int, block: Array | None) -> None:
        if block is not None and len(block):
            self.low, self.high = min(self.low, int(block.min())), max(self.high, int(block.max()) + 1)


class _Priorities:
    """Counts priorities that nothing can be drawn by."""

    def __init__(self) -> None:
        self.n_bad = 0

    def take(self, start: int, stop: int, block: Array | None) -> None:
        if block is not None:
            self.n_bad += int((~(np.isfinite(block) & (block >= 0))).sum())


def _reason(error: Exception, what: str) -> str:
    """An error without the name of what it is about."""
    return str(error).removeprefix(what).removeprefix(":").strip()


def _is_of_another_format(error: FormatError) -> bool:
    return f"this trajstore reads format {FORMAT}" in str(error)


def _is_time(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _group_fault(node: Mapping[str, Any]) -> str | None:
    is_group = node.get("zarr_format") == 3 and node.get("node_type") == "group"
    if is_group and set(node) <= _GROUP_KEYS and isinstance(node.get("attributes", {}), dict):
        return None
    return "not a Zarr v3 group"


def _scratch_fault(node: Mapping[str, Any]) -> str | None:
    try:
        is_empty = node["node_type"] == "array" and node["zarr_format"] == 3 and node["shape"] == [0]
    except KeyError:
        is_empty = False
    return None if is_empty else "not a Zarr v3 array of no elements"


def _array_fault(own: dict[str, Any], expected: Any, record: CommitRecord, path: str) -> str | None:
    """What is wrong with an array's own metadata, given what the record says of it."""
    try:
        _, rows = ArrayLayout.from_metadata(own, path)
    except FormatError as error:
        return _reason(error, f"array '{path}'")
    wrong = [key for key in sorted({*own, *expected} - {"shape"}) if own.get(key) != expected.get(key)]
    if wrong or own["shape"][1:] != expected["shape"][1:]:
        return f"differs from what the commit record says of it: {', '.join(wrong or ['shape'])}"
    committed = record.length(path)
    if rows > committed or (record.is_sealed and rows != committed):
        return f"shows {rows} rows, the {'sealed ' if record.is_sealed else ''}record {committed}"
    return None


def _record_faults(record: CommitRecord) -> Iterator[str]:
    if not record.id.startswith(f"{record.name}-"):
        yield f"is named {record.name!r}, which is not how the stream's id begins"
    if record.first_row > record.rows:
        yield f"its first row is {record.first_row}, but it has {record.rows} rows"
    if record.rank is not None and record.world_size is not None and record.rank >= record.world_size:
        yield f"its rank is {record.rank}, of {record.world_size}"
    if record.replaces and record.replaces.stop - record.replaces.start != record.rows:
        yield f"replaces rows {record.replaces.start} to {record.replaces.stop}, but has {record.rows} rows"
    if not (_is_time(record.created_at) and _is_time(record.committed_at)):
        yield "its times are not finite"


def _size_fault(layout: ArrayLayout, size: int) -> str | None:
    """What is wrong with the size of an object: empty, cut short or blown up beyond what a codec makes."""
    n, per = layout.chunk_bytes, layout.chunks_per_shard
    low, high = {"none": (n, n), "blosc": (16, n + 16), "zstd": (9, n + n // 128 + 512)}[layout.codec.name]
    low, high = (low + 4), (high + 4) * per
    if layout.shard_rows is not None:
        low, high = low + layout.shard_index_bytes, high + layout.shard_index_bytes
    if low <= size <= high:
        return None
    return f"has {size} bytes, expected {low}" if low == high else f"has {size} bytes, expected {low} to {high}"


def _waves(array: _Array) -> Iterator[range]:
    """The chunks of an array in parts that take a bounded memory when they are decoded."""
    n = max(1, min(_WAVE_CHUNKS, _WAVE_BYTES // max(1, array.layout.chunk_bytes)))
    return (array.chunks[i : i + n] for i in range(0, len(array.chunks), n))


def _chunk_problems(array: _Array, faults: Mapping[int, str]) -> list[VerifyProblem]:
    problems = []
    for first, last, what in _runs(faults):
        chunks = f"chunk {first}" if first == last else f"chunks {first} to {last}"
        rows = f"rows {array.rows(first)[0]} to {array.rows(last)[1]}"
        problems.append(VerifyProblem(f"{array.name}, {chunks} ({rows})", what))
    return problems


def _by_creation(item: tuple[str, CommitRecord]) -> tuple[float, str]:
    return item[1].created_at, item[0]


def _state_bytes(nodes: Mapping[str, Any]) -> int:
    """What the arrays of a state take when they are decoded."""
    arrays = [ArrayLayout.from_metadata(n, path) for path, n in nodes.items() if n.get("node_type") == "array"]
    return sum(layout.row_bytes * rows for layout, rows in arrays)


def _runs(faults: Mapping[int, str]) -> Iterator[tuple[int, int, str]]:
    """Neighbouring chunks with the same fault, as one: first, last and what it is."""
    numbered = enumerate(sorted(faults.items()))
    for (_, what), run in itertools.groupby(numbered, key=lambda item: (item[1][0] - item[0], item[1][1])):
        indexes = [index for _, (index, _) in run]
        yield indexes[0], indexes[-1], what


def _span_name(ints: Array, i: np.integer[Any] | int) -> str:
    return f"episode {ints[i, 0]}, span {i} (rows {ints[i, 3]} to {ints[i, 4]})"


def _span_faults(ints: Array, floats: Array, record: CommitRecord) -> list[tuple[Array, str]]:
    """By kind of fault: which spans have it."""
    episode, env, t_start, start, stop, end, has_final, present, text_stop = ints[:, :9].T
    after_text = np.concatenate([[0], text_stop[:-1]])[: len(ints)]
    after_rows = np.concatenate([[0], stop[:-1]])[: len(ints)]
    return [
        (
            (episode < 0) | (t_start < 0) | (env < 0) | (env >= MAX_ENV),
            "has an episode, step or environment below 0",
        ),
        ((start < 0) | (start > stop) | (stop > record.rows), f"has rows that are not there, of {record.rows}"),
        (start < after_rows, "begins before the span before it ends"),
        ((end < 0) | (end >= len(End)), f"has an end other than 0 to {len(End) - 1}"),
        ((has_final < 0) | (has_final > 1) | (has_final > stop - start), "has a final row that it can't have"),
        (
            (present < 0) | (present >> len(record.schema.episode) != 0),
            "has episode columns that the schema has not",
        ),
        ((text_stop < after_text) | (text_stop > record.text_bytes), f"has text past {record.text_bytes} bytes"),
        (~np.isfinite(floats[:, 1]), "has a time that is not finite"),
    ]


def _text_groups(start: Array, stop: Array) -> Iterator[list[int]]:
    """Numbers of spans that have text, in groups to be read at once."""
    group: list[int] = []
    for i in np.flatnonzero(stop > start):
        if group and stop[i] - start[group[0]] > _TEXT_BYTES:
            yield group
            group = []
        group.append(int(i))
    if group:
        yield group


def _text_fault(text: bytes, present: int, schema: Schema) -> str | None:
    if len(text) > MAX_METADATA_BYTES:
        return f"has {len(text)} bytes of text; at most {MAX_METADATA_BYTES}"
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        return f"has text that is not JSON: {error}"
    if not isinstance(values, dict):
        return f"has text that is a {type(values).__name__}, expected an object"
    for bit, (name, kind) in enumerate(schema.episode.items()):
        if kind == "str" and present >> bit & 1 and not isinstance(values.get(name), str):
            return f"has no text for the episode column '{name}'"
    return None


def _episode_spans(members: Sequence[_Part]) -> dict[str, Array]:
    """The spans that a reader shows of one stream, by episode and in order of time, and where each stands."""
    columns: dict[str, list[Array]] = {}
    for number, part in enumerate(members):
        assert part.spans is not None
        ints = part.spans[0]
        shown = np.ones(len(ints), bool)
        for start, stop in part.hidden:
            shown &= (ints[:, 3] < start) | (ints[:, 3] >= stop)
        kept = np.flatnonzero(shown)
        found = {name: ints[kept, i] for i, name in ((0, "episode"), (1, "env"), (2, "t_start"), (5, "end"))}
        found |= {"has_final": ints[kept, 6], "n_rows": ints[kept, 4] - ints[kept, 3]}
        found |= {"span": kept, "member": np.full(len(kept), number)}
        for name, column in found.items():
            columns.setdefault(name, []).append(column)
    joined = {name: np.concatenate(blocks) for name, blocks in columns.items()}
    order = np.lexsort((np.arange(len(joined["span"])), joined["t_start"], joined["episode"]))
    return {name: column[order] for name, column in joined.items()}


def _episode_faults(spans: Mapping[str, Array], *, is_whole: bool) -> Iterator[tuple[int, str]]:
    """Spans that do not follow those before them; ``is_whole`` says that all of every episode must be there."""
    t, env, stop = spans["t_start"], spans["env"], spans["t_start"] + spans["n_rows"]
    has_ended = (spans["end"] != End.OPEN) | (spans["has_final"] != 0)
    follows = np.zeros(len(t), bool)
    follows[1:] = np.diff(spans["episode"]) == 0
    for i in np.flatnonzero(~follows & (t != 0)).tolist() if is_whole else ():
        yield i, f"begins at step {t[i]}, and the steps before are nowhere"
    for i in np.flatnonzero(follows & (t != np.roll(stop, 1))).tolist():
        yield i, f"begins at step {t[i]}, the span before it ends at step {stop[i - 1]}"
    for i in np.flatnonzero(follows & np.roll(has_ended, 1)).tolist():
        yield i, "goes on with an episode that has ended"
    for i in np.flatnonzero(follows & (env != np.roll(env, 1))).tolist():
        yield i, f"is of environment {env[i]}, the span before it of {env[i - 1]}"
