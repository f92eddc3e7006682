"""A disk cache in front of an object store, shared by the processes of one machine."""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trajstore.arguments import parse_bytes
from trajstore.errors import StorageError
from trajstore.storage.completer import Completer
from trajstore.storage.disk_files import BLOCK_BYTES, DiskFiles
from trajstore.storage.file_maps import FileMap, can_map_files
from trajstore.storage.interface import Data, Place, Storage
from trajstore.storage.layers import StorageLayer

_STREAMS = "streams"
_COUNTS = ("hits", "misses", "mapped", "bytes_hit", "bytes_missed")
_MIN_PLACES = 8  # a thread reads at least this many
_N_CPUS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
_Span = tuple[int, int | None]  # bytes [start, stop) of an object; all of it without stop


@dataclass(frozen=True)
class DiskCache:
    """Where the objects of a remote store are kept on a local disk, so that they are read over the network once.

    Any number of processes of one user may share a directory, also for several stores. It may be removed at any
    time. The objects that were used least recently make room for others. It has no effect on a store that is in a
    local directory.

    Args:
        directory: A directory on a local disk; it is made if it does not exist.
        budget_bytes: The most bytes on that disk, as an int or as text such as ``"100GiB"``. It is counted over all
            processes; if they name different budgets, each keeps to its own.
    """

    directory: str | os.PathLike[str]
    budget_bytes: int | str

    def __post_init__(self) -> None:
        if not isinstance(self.directory, (str, os.PathLike)) or "://" in os.fspath(self.directory):
            raise ValueError(f"disk_cache: expected a local directory, got {self.directory!r:.80}")
        object.__setattr__(self, "directory", os.path.abspath(Path(self.directory).expanduser()))
        object.__setattr__(self, "budget_bytes", parse_bytes(self.budget_bytes, "budget_bytes"))


@dataclass(frozen=True, slots=True)
class _Rows:
    """What is known of one array: rows in an object, rows of the array, and whether a reader expects no more."""

    per_object: int
    n_rows: int
    is_final: bool


@dataclass(frozen=True, slots=True)
class _Copy:
    """The file that an object is kept in; ``is_whole``: it is kept as a whole or not at all."""

    name: str
    is_whole: bool


class DiskCachedStorage(StorageLayer):
    """Keeps what was read of objects that never change in files of a local disk.

    An object never changes once it is full of rows (`note_rows`). A part-filled one is kept only for readers that
    expect no more rows, under the number of rows: a later one has these rows and others. Records, schemas,
    checkpoints and derived columns are always read from the store.
    """

    def __init__(self, inner: Storage, options: DiskCache) -> None:
        super().__init__(inner)
        self._options = options
        root = Path(options.directory) / "trajstore-1"
        _check_owner(root)
        self._files = DiskFiles(root, parse_bytes(options.budget_bytes, "budget_bytes"))
        self._completer = Completer(inner, self._files)
        self._refused: set[str] = set()  # files that were damaged where they were mapped
        # Ids of streams are unique, so the display name need not tell apart servers with equal buckets.
        self._folder = hashlib.sha256(self.display.encode()).hexdigest()[:16]
        self._rows: dict[str, dict[str, _Rows]] = {}  # by folder of a stream and path of the array
        self._counts = dict.fromkeys(_COUNTS, 0)
        self._streams: frozenset[str] = frozenset()  # when they were listed last

    def __reduce__(self) -> tuple[Any, ...]:
        return DiskCachedStorage, (self.inner, self._options)

    def reset_locks(self) -> None:
        super().reset_locks()
        self._files.reset_locks()
        self._completer.reset_locks()

    @property
    def keeps_objects(self) -> bool:
        return True

    def note_rows(self, folder: str, arrays: Mapping[str, tuple[int, int]], *, is_final: bool) -> None:
        with self._lock:
            known = self._rows.setdefault(folder, {})
            for path, (per_object, n_rows) in arrays.items():
                old = known.get(path)
                if old is None or old.n_rows < n_rows or (old.n_rows == n_rows and is_final and not old.is_final):
                    known[path] = _Rows(per_object, n_rows, is_final)

    def stats(self) -> dict[str, Any]:
        """Return what the storage behind reports, and ``disk_cache``: what was found on the disk, and what not."""
        files = self._files
        with self._lock:
            own = dict(self._counts)
        own |= {"bytes_written": files.bytes_written, "evictions": files.evictions, "damaged": files.damaged}
        own["completed"] = self._completer.n_completed
        return {**self.inner.stats(), "disk_cache": {**own, "is_full": files.is_paused}}

    # ---- reading

    def get(self, key: str) -> bytes:
        return bytes(self.get_ranges([(key, 0, None)])[0])

    def get_into(self, key: str, buffer: bytearray) -> memoryview:
        return self.inner.get_into(key, buffer) if self._copy_of(key) is None else memoryview(self.get(key))

    def get_range(self, key: str, start: int, stop: int) -> bytes:
        return bytes(self.get_ranges([(key, start, stop)])[0])

    def get_range_into(self, key: str, start: int, stop: int, room: memoryview) -> memoryview:
        if self._copy_of(key) is None:
            return self.inner.get_range_into(key, start, stop, room)
        return memoryview(self.get_range(key, start, stop))

    def get_many(self, keys: Sequence[str]) -> list[bytes]:
        return list(map(bytes, self.get_ranges([(key, 0, None) for key in keys])))

    def get_ranges(self, places: Sequence[Place]) -> Sequence[Data]:
        copies = [self._copy_of(key) for key, _, _ in places]
        found: list[Data | None] = list(self._read_all(copies, places))
        absent = [i for i, data in enumerate(found) if data is None]
        kept = [i for i in absent if copies[i] is not None]
        self._count(found, copies, [places[i] for i in kept])
        if absent:
            fetched = self._fetch([(copies[i], places[i]) for i in absent])
            for i, data in zip(absent, fetched, strict=True):
                found[i] = data
        return [data for data in found if data is not None]

    def _read_all(self, copies: Sequence[_Copy | None], places: Sequence[Place]) -> list[bytes | None]:
        """What the disk has of each place, read by several threads if there are many."""
        found: list[bytes | None] = [None] * len(places)
        n_tasks = min(len(places) // _MIN_PLACES, _N_CPUS) or 1

        def read_part(task: int) -> None:
            for i in range(task, len(places), n_tasks):
                if (copy := copies[i]) is not None:
                    found[i] = self._files.read(copy.name, *places[i][1:])

        self.map(read_part, range(n_tasks))
        return found

    def _count(self, found: Sequence[Data | None], copies: Sequence[_Copy | None], absent: Sequence[Place]) -> None:
        hits = [len(data) for data, copy in zip(found, copies, strict=True) if copy and data is not None]
        with self._lock:
            self._counts["hits"] += len(hits)
            self._counts["bytes_hit"] += sum(hits)
            self._counts["misses"] += len(absent)

    def _fetch(self, wanted: Sequence[tuple[_Copy | None, Place]]) -> Sequence[Data]:
        """Read places from the store in one wave, and keep what may be kept."""
        if self._files.is_paused:
            return self.inner.get_ranges([place for _, place in wanted])
        spans: dict[str, list[_Span]] = {}  # by key: what is read of objects that are kept
        for copy, (key, start, stop) in wanted:
            if copy is not None:
                spans.setdefault(key, []).append((0, None) if copy.is_whole else _in_blocks(start, stop))
        asked: list[Place] = [(key, *span) for key, some in spans.items() for span in _united(some)]
        n_kept = len(asked)
        asked += [place for copy, place in wanted if copy is None]
        read = self.inner.get_ranges(asked)
        others = iter(read[n_kept:])
        pieces: dict[str, list[tuple[Place, Data]]] = {}
        for place, data in zip(asked[:n_kept], read, strict=False):
            pieces.setdefault(place[0], []).append((place, data))
        self._keep({place[0]: copy for copy, place in wanted if copy is not None}, pieces)
        return [next(others) if copy is None else _cut(pieces[place[0]], place) for copy, place in wanted]

    def _keep(self, copies: Mapping[str, _Copy], pieces: Mapping[str, Sequence[tuple[Place, Data]]]) -> None:
        for key, some in pieces.items():
            with self._lock:
                self._counts["bytes_missed"] += sum(len(data) for _, data in some)
            # Fewer bytes than asked: the object ends there.
            ends = [p[1] + len(data) for p, data in some if p[2] is None or len(data) < p[2] - p[1]]
            size = min(ends) if ends else None
            blocks = [(place[1], data) for place, data in some if data]
            has_all = len(blocks) == 1 and blocks[0][0] == 0 and len(blocks[0][1]) == size
            self._files.write(copies[key].name, blocks, size, whole=has_all or copies[key].is_whole)

    # ---- mapping

    @functools.cached_property
    def may_map(self) -> bool:
        return can_map_files(Path(self._options.directory))

    def map_if_local(self, key: str) -> FileMap | None:
        copy = self._copy_of(key)
        if copy is None or copy.name in self._refused:
            return None
        file = self._files.map(copy.name)
        if file is not None:
            with self._lock:
                self._counts["mapped"] += 1
        elif not copy.is_whole:
            self._completer.note(key, copy.name)
        return file

    def drop_local(self, key: str) -> bool:
        copy = self._copy_of(key)
        if copy is None or copy.name in self._refused:
            return False
        self._refused.add(copy.name)
        self._files.drop_damaged(copy.name)
        return True

    # ---- which objects are kept

    def _copy_of(self, key: str) -> _Copy | None:
        """Where an object is kept; None if it may change."""
        folder, path, number = _parse(key)
        with self._lock:
            rows = self._rows.get(folder, {}).get(path)
        if rows is None or number is None or number * rows.per_object >= rows.n_rows:
            return None
        name = f"{self._stream_folder(folder)}/{hashlib.sha256(key.encode()).hexdigest()[:32]}"
        if (number + 1) * rows.per_object <= rows.n_rows:
            return _Copy(name, is_whole=False)
        return _Copy(f"{name}-{rows.n_rows}", is_whole=True) if rows.is_final else None

    def _stream_folder(self, folder: str) -> str:
        return f"{self._folder}/{folder.removeprefix(f'{_STREAMS}/')}"

    # ---- what is gone from the store is gone from the disk

    def list_names(self, prefix: str) -> list[str]:
        names = self.inner.list_names(prefix)
        if prefix == _STREAMS and (present := frozenset(names)) != self._streams:
            self._streams = present
            self._forget(name for name in self._files.names(self._folder) if name not in present)
        return names

    def _forget(self, streams: Iterable[str]) -> None:
        for stream in streams:
            self._files.remove(f"{self._folder}/{stream}")
            with self._lock:
                self._rows.pop(f"{_STREAMS}/{stream}", None)

    def delete(self, keys: Sequence[str]) -> None:
        self.inner.delete(keys)
        for key in keys:
            if (copy := self._copy_of(key)) is not None:
                self._files.remove(copy.name)

    def remove_tree(self, prefix: str) -> None:
        self.inner.remove_tree(prefix)
        top, _, stream = prefix.strip("/").partition("/")
        if top == _STREAMS and stream and "/" not in stream:
            self._forget([stream])


def _check_owner(root: Path) -> None:
    """Refuse a directory that others may write to: they could give it any content.

    Raises:
        StorageError: It belongs to another user, or is not a directory.
    """
    try:
        status = os.lstat(root)
    except FileNotFoundError:
        return
    except OSError as error:
        raise StorageError(f"disk_cache: can't use {root}: {error.strerror}") from error
    if not os.path.isdir(root) or os.path.islink(root) or status.st_uid != os.geteuid():
        raise StorageError(f"disk_cache: {root} is not a directory of this user; choose another one")
    if status.st_mode & 0o077:
        os.chmod(root, 0o700)


def _parse(key: str) -> tuple[str, str, int | None]:
    """Folder of the stream, path of the array and number of the object that a key names; None if it names none."""
    parts = key.split("/")
    name = parts[-1].split(".")
    if len(parts) < 4 or parts[0] != _STREAMS or name[0] != "c" or len(name) < 2 or not name[1].isdecimal():
        return "", "", None
    return "/".join(parts[:2]), "/".join(parts[2:-1]), int(name[1])


def _in_blocks(start: int, stop: int | None) -> _Span:
    """A span that begins and ends with whole blocks and has these bytes."""
    if stop is None:
        return 0, None
    return start // BLOCK_BYTES * BLOCK_BYTES, -(-stop // BLOCK_BYTES) * BLOCK_BYTES


def _united(spans: Sequence[_Span]) -> list[_Span]:
    """The same bytes in spans that do not overlap, in order."""
    if any(stop is None for _, stop in spans):
        return [(0, None)]
    found: list[tuple[int, int]] = []
    for start, stop in sorted((start, stop or 0) for start, stop in spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(stop, found[-1][1])
        else:
            found.append((start, stop))
    return list(found)


def _cut(pieces: Sequence[tuple[Place, Data]], place: Place) -> Data:
    """The bytes of a place, out of the piece that has them."""
    _, start, stop = place
    for (_, low, high), data in pieces:
        if low <= start and (high is None or (stop is not None and stop <= high)):
            if (low, high) == (start, stop):
                return data
            return memoryview(data)[start - low : None if stop is None else stop - low]
    raise AssertionError("a wave has every place that was asked for")
