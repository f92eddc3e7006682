"""Makes a store out of objects that exist elsewhere: a location becomes a store when everything is in its place.

The root is put last. What an interrupted call leaves is not a store; the next call removes it and begins again.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from trajstore.errors import CorruptionError, StoreExistsError
from trajstore.format.commit_record import CommitRecord
from trajstore.format.ids import is_stream_id
from trajstore.format.zarr_json import to_json_bytes
from trajstore.schema import Schema
from trajstore.storage import Put, Storage
from trajstore.store.schema_objects import schema_bytes, schema_key
from trajstore.store.snapshot import Snapshot
from trajstore.store.store import put_root

Progress = Callable[[int, int], None]  # bytes done so far, bytes in total

WAVE_OBJECTS = 256  # copied at a time
_TOP_NAMES = frozenset({"scratch", "schema", "streams", "checkpoints"})


@dataclass(frozen=True, slots=True)
class StreamObject:
    """One object of a stream.

    Attributes:
        path: Its key below the stream's folder.
        may_link: Whether it never changes, so that a hard link will do for a copy.
    """

    path: str
    may_link: bool


def clear_remains(target: Storage) -> None:
    """Remove what an interrupted call has left at the location of a new store.

    Raises:
        StoreExistsError: The location holds anything else.
        StorageError: Nothing can be put there.
    """
    if target.is_read_only:
        target.check_writable()  # raises
    names = set(target.list_names(""))
    if "zarr.json" in names:
        raise StoreExistsError(f"{target.display} is already a store; choose another location for the new one")
    remains = [f"{part}/{name}" for part in ("streams", "checkpoints") for name in target.list_names(part)]
    remains = [key for key in remains if not key.endswith("/zarr.json")]
    is_ours = names <= _TOP_NAMES and all(is_stream_id(key.partition("/")[2]) for key in remains)
    if not is_ours or not all(n == "zarr.json" or n.isdecimal() for n in target.list_names("schema")):
        raise StoreExistsError(f"{target.display} is not empty; choose another location for the new store")
    for key in (*remains, "schema"):
        target.remove_tree(key)


def stream_objects(record: CommitRecord, first: int, copied: CommitRecord | None = None) -> Iterator[StreamObject]:
    """The chunk objects of a stream that hold rows.

    Args:
        record: Names the rows.
        first: Leave out objects of steps whose rows all lie below.
        copied: Leave out objects that hold no other rows than those of this older record.
    """
    for path, layout in record.layouts.items():
        size = layout.object_rows
        n_rows, start = record.length(path), first // size if path.startswith("steps/") else 0
        if copied is not None and not path.startswith("columns/"):  # columns are replaced in the same places
            start = max(start, copied.length(path) // size)
        for i in range(start, -(-n_rows // size)):
            key = f"{path}/{layout.chunk_key(i * layout.chunks_per_shard)}"
            yield StreamObject(key, record.is_sealed and (i + 1) * size <= n_rows)


def waves(objects: Iterable[StreamObject]) -> Iterator[list[StreamObject]]:
    """Objects in groups that are copied at once."""
    left = iter(objects)
    while wave := list(itertools.islice(left, WAVE_OBJECTS)):
        yield wave


def copy_wave(
    source: Storage, source_folder: str, target: Storage, target_folder: str, wave: Iterable[StreamObject]
) -> None:
    """Copy objects of a stream, without decoding them.

    Raises:
        FileNotFoundError: One of them does not exist.
    """
    objects = list(wave)
    for may_link in (True, False):
        keys = [
            (f"{source_folder}/{o.path}", f"{target_folder}/{o.path}") for o in objects if o.may_link == may_link
        ]
        source.copy_many(keys, target, may_link=may_link)


def put_record(target: Storage, record: CommitRecord) -> None:
    """Put the metadata of a stream's groups and arrays, then its commit record."""
    prefix = record.folder
    nodes = {f"{prefix}/{path}/zarr.json": to_json_bytes(node) for path, node in record.nodes().items()}
    target.put_many([Put(key, lambda data=data: data) for key, data in nodes.items()])  # type: ignore[misc]
    target.put(record.key, record.to_bytes())


def put_schema(target: Storage, schema: Schema | None) -> None:
    """Put the only schema of a new store, if it has one."""
    if schema is not None:
        target.put(schema_key(0), schema_bytes(schema))


def complete(target: Storage, schema: Schema | None, records: Mapping[str, CommitRecord]) -> None:
    """Check that readers find exactly these records, and put the root, which makes the location a store.

    Raises:
        CorruptionError: Other records are stored.
        StoreExistsError: Another process created a store there.
    """
    found = {record.id: record for record in Snapshot.load(target, schema).streams}
    if found != dict(records):
        wrong = sorted(id_ for id_ in found.keys() | records.keys() if found.get(id_) != records.get(id_))
        raise CorruptionError(f"{target.display}: streams differ from those that were put: {', '.join(wrong)}")
    if not put_root(target):
        raise StoreExistsError(f"{target.display}: another process has created a store there")
