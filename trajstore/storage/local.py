"""Storage in a local directory: temporary files, fsync and rename make puts atomic and durable."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from trajstore.errors import StorageError
from trajstore.storage.atomic_files import sync_file
from trajstore.storage.file_maps import FileMap, can_map_files
from trajstore.storage.interface import ABSENT, ANY, UNSEEN, Put, Storage, check_key, check_tree, storage_error
from trajstore.storage.replaced_files import ReplacedFiles
from trajstore.storage.shared_work import map_in_threads
from trajstore.storage.written_files import WrittenFiles, sync_and_close

T = TypeVar("T")

_N_THREADS = 4
_N_SYNC_THREADS = 16  # syncs wait for the disk, which does several together in the time of one
_SCRATCH = "scratch"
# Errors of os.link: another device, a file system without links, too many links, or a protected file.
_NO_LINKS = frozenset(
    {errno.EXDEV, errno.EPERM, errno.EACCES, errno.EMLINK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}
)
# Zarr readers that walk the hierarchy do not look into the directory of an array, so temporary files go there.
_SCRATCH_NODE = (
    b'{"zarr_format":3,"node_type":"array","shape":[0],"data_type":"uint8",'
    b'"chunk_grid":{"name":"regular","configuration":{"chunk_shape":[1]}},'
    b'"chunk_key_encoding":{"name":"default","configuration":{"separator":"."}},'
    b'"fill_value":0,"codecs":[{"name":"bytes"}],"storage_transformers":[],"dimension_names":["none"],'
    b'"attributes":{"trajstore_note":"temporary files of running writers; readers ignore them"}}'
)


class LocalStorage(Storage):
    """A directory. A put writes a temporary file, syncs and renames it, so it happens as a whole or not at all.

    The files of a wave are synced together, before any of them gets its name.
    """

    n_threads = _N_THREADS

    def __init__(self, root: Path, *, fsync: bool) -> None:
        super().__init__()
        self._root = root
        self._fsync = fsync
        self._scratch_ready = 0  # id of the process that has checked that the scratch directory exists
        self._n_temporary = 0
        self._replaced = ReplacedFiles()
        self.display = str(root)

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (str(self._root), self._fsync)

    def get(self, key: str) -> bytes:
        with self._translated("read", key), open(self._path(key), "rb", buffering=0) as file:
            return _read_all(file)

    def get_into(self, key: str, buffer: bytearray) -> memoryview:
        check_key(key)
        with self._translated("read", key):
            descriptor = os.open(f"{self.display}/{key}", os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
            try:
                size = os.fstat(descriptor).st_size
                if size > len(buffer):
                    buffer.extend(bytes(size - len(buffer)))
                view = memoryview(buffer)[:size]
                if os.readv(descriptor, [view]) != size:
                    raise OSError(errno.EIO, "read fewer bytes than the file has")
                return view
            finally:
                os.close(descriptor)

    def get_range(self, key: str, start: int, stop: int) -> bytes:
        with self._translated("read", key), open(self._path(key), "rb", buffering=0) as file:
            return os.pread(file.fileno(), stop - start, start)

    def get_range_into(self, key: str, start: int, stop: int, room: memoryview) -> memoryview:
        check_key(key)
        with self._translated("read", key):
            descriptor = os.open(f"{self.display}/{key}", os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
            try:
                return room[: os.preadv(descriptor, [room[: stop - start]], start)]
            finally:
                os.close(descriptor)

    @functools.cached_property
    def can_map(self) -> bool:
        return can_map_files(self._root)

    def map_object(self, key: str) -> FileMap:
        with self._translated("read", key):
            return FileMap(self._path(key))

    def size(self, key: str) -> int:
        with self._translated("read", key):
            return self._path(key).stat().st_size

    def put(self, key: str, data: bytes | memoryview, expect: str = ANY) -> str:
        self._put_wave([Put(key, lambda: data, expect)])
        return ANY

    def put_many(self, puts: Iterable[Put]) -> dict[str, str]:
        wave = list(puts)
        self._put_wave(wave)
        return {put.key: ANY for put in wave}

    def _put_wave(self, wave: Sequence[Put]) -> None:
        """Write all files, then sync all, then give all their names, then sync each directory once.

        Until all files are durable, no name changes: a failure leaves the old objects.
        """
        with self._replaced.freed_later(), WrittenFiles(fsync=self._fsync) as files:
            temporaries = self._share(lambda put: self._write(put, files), wave)
            self._share(self._sync_written, files.take(), _N_SYNC_THREADS)
            pairs = list(zip(wave, temporaries, strict=True))
            named = self._share(self._give_name, [(put, path) for put, path in pairs if path is not None])
            in_place = {os.path.dirname(self._name(put.key)) for put, path in pairs if path is None}
            with self._translated("sync", wave[0].key if len(wave) == 1 else ""):
                self._sync_directories(in_place.union(*named))

    def _share(self, function: Callable[[Any], T], items: Sequence[Any], n_threads: int = _N_THREADS) -> list[T]:
        return map_in_threads(function, items, lambda: self._threads(n_threads), n_threads)

    def _write(self, put: Put, files: WrittenFiles) -> str | None:
        """Write the file of an object; return its temporary name, or None if it has its own name already."""
        # Outside _translated: its errors are not storage errors.
        data = [put.make()] if put.make_pieces is None else put.make_pieces()
        with self._translated("write", put.key):
            temporary, due = self._write_data(put, data, files)
        if due is not None:
            self._sync_written(due)
        return temporary

    def _write_data(
        self, put: Put, data: Iterable[bytes | memoryview], files: WrittenFiles
    ) -> tuple[str | None, tuple[str, int] | None]:
        if put.expect == UNSEEN:
            # Most objects are new chunks, for which a temporary file and a rename cost as much as the write.
            with contextlib.suppress(FileNotFoundError):  # the directory does not exist yet
                return None, files.write(put.key, self._name(put.key), data, os.O_TRUNC)
        temporary = f"{self._scratch()}/{self._temporary_name()}"
        return temporary, files.write(put.key, temporary, data, os.O_EXCL)

    def _sync_written(self, file: tuple[str, int]) -> None:
        key, descriptor = file
        with self._translated("write", key):
            sync_and_close(descriptor)

    def _give_name(self, unnamed: tuple[Put, str]) -> set[str]:
        """Give a temporary file its name; return the directories to sync."""
        put, temporary = unnamed
        with self._translated("write", put.key):
            return self._publish_file(temporary, self._name(put.key), put.expect)

    def check_writable(self) -> None:
        if self._root.exists() and not os.access(self._root, os.W_OK):
            raise StorageError(f"{self.display} is read-only for this process; it can be read, but not written")

    def list_names(self, prefix: str) -> list[str]:
        with self._translated("list", prefix):
            try:
                return sorted(os.listdir(self._path(prefix)))
            except (FileNotFoundError, NotADirectoryError):
                return []

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            with self._translated("delete", key), contextlib.suppress(FileNotFoundError):
                os.unlink(self._path(key))

    def tree_sizes(self, prefix: str) -> dict[str, int]:
        sizes: dict[str, int] = {}
        with self._translated("list", prefix):
            for directory, _, names in os.walk(self._path(prefix), onerror=_raise_unless_gone):
                folder = Path(directory).relative_to(self._root)
                for name in names:
                    with contextlib.suppress(FileNotFoundError):
                        sizes[f"{folder.as_posix()}/{name}"] = os.stat(os.path.join(directory, name)).st_size
        return sizes

    def remove_tree(self, prefix: str) -> None:
        """Remove a directory in one step, by renaming it into ``scratch``; then delete its files there."""
        check_tree(prefix)
        path = self._path(prefix)
        if not path.is_dir():
            return
        with self._translated("delete", prefix):
            aside = self._scratch() / self._temporary_name()
            try:
                os.rename(path, aside)
            except FileNotFoundError:  # another process removed it first
                return
            self._sync_directories({str(path.parent)})
            shutil.rmtree(aside)

    def copy_many(self, keys: Sequence[tuple[str, str]], other: Storage, *, may_link: bool = False) -> None:
        if not may_link or not isinstance(other, LocalStorage):
            return super().copy_many(keys, other)
        with other._replaced.freed_later():
            linked = self.map(lambda pair: self._link(pair[0], other, pair[1]), keys)
        with other._translated("sync", ""):
            other._sync_directories({directory for found in linked for directory in found or ()})
        return super().copy_many([pair for pair, found in zip(keys, linked, strict=True) if found is None], other)

    def _link(self, source_key: str, other: LocalStorage, key: str) -> set[str] | None:
        """Give a file a second name; return the directories to sync, or None if the file systems can't link."""
        temporary = other._scratch() / other._temporary_name()
        with self._translated("read", source_key):
            try:
                os.link(self._path(source_key), temporary)
            except OSError as error:
                if error.errno in _NO_LINKS:
                    return None
                raise
        with other._translated("write", key):
            try:
                other._sync_file(temporary)
                return other._publish_file(str(temporary), other._name(key), ANY)
            finally:
                # Renaming one name of a file to another name of the same file does nothing.
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(temporary)

    def reset_locks(self) -> None:
        super().reset_locks()
        self._replaced.close_in_child()

    def _path(self, key: str) -> Path:
        return Path(self._name(key))

    def _name(self, key: str) -> str:
        check_key(key)
        return f"{self.display}/{key}"

    def _publish_file(self, temporary: str, target: str, expect: str) -> set[str]:
        """Give a temporary file its name; return the directories to sync."""
        folder = os.path.dirname(target)
        while True:
            try:
                self._link_or_rename(temporary, target, expect)
            except FileExistsError:
                # Our own first try may have made it, and its directories may not be synced yet.
                self._sync_directories({folder, os.path.dirname(folder)})
                raise
            except FileNotFoundError:
                if made := self._publish_with_parents(Path(temporary), Path(target)):
                    return made
            else:
                return {folder}

    def _link_or_rename(self, temporary: str, target: str, expect: str) -> None:
        if expect == ABSENT:
            os.link(temporary, target)
            os.unlink(temporary)
        else:
            self._replaced.replace(temporary, target)

    def _publish_with_parents(self, temporary: Path, target: Path) -> set[str]:
        """Make the missing directories and the file appear in one step, by renaming a whole directory.

        Zarr readers warn about a directory without ``zarr.json``, and a crash would leave it for ever. Returns the
        directories to sync; none if another process made the directory first.
        """
        top = target.parent
        while not top.parent.exists():
            top = top.parent
        base = self._scratch() / self._temporary_name()
        new_file = base / target.relative_to(top)
        try:
            os.makedirs(new_file.parent)
            os.rename(temporary, new_file)
            self._sync_directories(
                {str(d) for d in (new_file.parent, *new_file.parents) if base in (d, *d.parents)}
            )
            os.rename(base, top)
        except OSError as error:
            try:
                with contextlib.suppress(FileNotFoundError):
                    os.rename(new_file, temporary)
            finally:
                shutil.rmtree(base, ignore_errors=True)
            if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
                return set()
            raise
        return {str(top.parent)}

    def _sync_file(self, path: Path) -> None:
        if self._fsync:
            sync_file(path)

    def _sync_directories(self, paths: set[str]) -> None:
        if self._fsync:
            self._share(lambda path: sync_file(path, getattr(os, "O_DIRECTORY", 0)), sorted(paths), _N_SYNC_THREADS)

    def _scratch(self) -> Path:
        """The directory for temporary files, made if it does not exist."""
        scratch = self._root / _SCRATCH
        if self._scratch_ready != os.getpid():
            missing = [d for d in (self._root, *self._root.parents) if not d.exists()]
            os.makedirs(scratch, exist_ok=True)
            self._sync_directories({str(d.parent) for d in missing})
            node = scratch / "zarr.json"
            if not node.exists():
                temporary = scratch / self._temporary_name()
                with WrittenFiles(fsync=self._fsync) as files:
                    files.write(node.name, str(temporary), [_SCRATCH_NODE], os.O_EXCL)
                    for _, descriptor in files.take():
                        sync_and_close(descriptor)
                os.replace(temporary, node)
                self._sync_directories({str(scratch)})  # else a power cut may leave a directory without metadata
            self._scratch_ready = os.getpid()
        return scratch

    def _temporary_name(self) -> str:
        with self._lock:
            self._n_temporary += 1
            return f"{os.getpid()}-{threading.get_ident()}-{time.time_ns()}-{self._n_temporary}.tmp"

    @contextlib.contextmanager
    def _translated(self, action: str, key: str) -> Iterator[None]:
        """Turn errors of the file system into StorageError; on reads, a missing file into FileNotFoundError."""
        try:
            yield
        except (FileExistsError, StorageError):
            raise
        except OSError as error:
            if isinstance(error, (FileNotFoundError, NotADirectoryError)) and action == "read":
                # The caller decides what a missing object means.
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), f"{self.display}/{key}") from error
            raise storage_error(action, f"{self.display}/{key}", error) from error


def _read_all(file: Any) -> bytes:
    data: bytes = file.readall()
    return data


def _raise_unless_gone(error: OSError) -> None:
    if not isinstance(error, (FileNotFoundError, NotADirectoryError)):
        raise error


def _reopen(root: str, fsync: bool) -> LocalStorage:
    return LocalStorage(Path(root), fsync=fsync)
