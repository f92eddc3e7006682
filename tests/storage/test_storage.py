"""Storages: what all of them promise, and what a local directory promises beside."""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import resource
import shutil
import signal
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event, Lock, get_ident
from typing import Any

import numpy as np
import pytest

import trajstore
from tests.conftest import Place
from trajstore.errors import StorageError
from trajstore.storage import ABSENT, ANY, OWN, UNSEEN, Put, Storage, open_storage, written_files
from trajstore.storage.written_files import WrittenFiles
from trajstore.testing.conformance import StorageConformance

NOBODY = 65534
JOIN_S = 120


class TestLocal(StorageConformance):
    @pytest.fixture
    def storage(self, new_place: Callable[[str], Place]) -> Storage:
        return open_storage(new_place("local").url)


class TestMemory(StorageConformance):
    is_per_process = True

    @pytest.fixture
    def storage(self, new_place: Callable[[str], Place]) -> Storage:
        return open_storage(new_place("memory").url)


@pytest.mark.s3
class TestS3(StorageConformance):
    @pytest.fixture
    def storage(self, new_place: Callable[[str], Place]) -> Storage:
        place = new_place("s3")
        return open_storage(place.url, place.options)


# ---- the calls to the operating system that a local put consists of ------------------------------------


class OsCalls:
    """Watches the file calls below a directory, keeps what a power cut would lose, and can fail one of them."""

    NAMES = ("open", "write", "writev", "fsync", "replace", "link", "rename", "mkdir")

    def __init__(self, patch: pytest.MonkeyPatch, root: Path) -> None:
        self.scratch = root / "scratch"
        self.calls: list[str] = []
        self.fail_at: int | None = None  # number of the call that raises instead
        self.check: Callable[[], None] = lambda: None  # made before and after every call
        self.unsynced: dict[int, str] = {}  # by inode: contents or entries that no fsync has covered
        self.early: list[str] = []  # published before all of it was synced
        self.has_published = False
        self._root = root
        self._descriptors: dict[int, str] = {}
        self._lock = Lock()
        for name in self.NAMES:
            patch.setattr(os, name, self._watched(name, getattr(os, name)))

    def _watched(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            paths = [self._path_of(arg) for arg in args[: 2 if name in ("replace", "link", "rename") else 1]]
            if kwargs.get("dir_fd") is not None or not all(self._is_ours(path) for path in paths):
                return real(*args, **kwargs)
            self.check()
            with self._lock:
                self.calls.append(name)
                fails = self.fail_at == len(self.calls)
            if fails:
                raise OSError(errno.EIO, os.strerror(errno.EIO), paths[0])
            self._before(name, paths)
            result = real(*args, **kwargs)
            self._after(name, paths, result)
            self.check()
            return result

        return call

    def _path_of(self, arg: Any) -> str:
        return self._descriptors.get(arg, "") if isinstance(arg, int) else os.fspath(arg)

    def _is_ours(self, path: str) -> bool:
        return Path(path).is_relative_to(self._root) or path == str(self._root.parent)

    def _before(self, name: str, paths: list[str]) -> None:
        if name in ("replace", "link", "rename") and not self._is_scratch(paths[1]):
            self.has_published = True
            self.early += [path for path in tree(paths[0]) if os.stat(path).st_ino in self.unsynced]

    def _after(self, name: str, paths: list[str], result: Any) -> None:
        if name == "open":
            self._descriptors[result] = paths[0]
        elif name == "fsync":
            self.unsynced.pop(os.stat(paths[0]).st_ino, None)
        elif name in ("write", "writev"):
            self.unsynced[os.stat(paths[0]).st_ino] = paths[0]
        else:
            directory = os.path.dirname(paths[-1])
            self.unsynced[os.stat(directory).st_ino] = directory

    def _is_scratch(self, path: str) -> bool:
        return Path(path).is_relative_to(self.scratch)

    def lost_by_a_power_cut(self) -> list[str]:
        return [path for path in self.unsynced.values() if not self._is_scratch(path)]


def tree(path: str) -> Iterator[str]:
    yield path
    for directory, names, files in os.walk(path):
        yield from (os.path.join(directory, name) for name in (*names, *files))


def temporaries(root: Path) -> list[str]:
    return sorted(set(os.listdir(root / "scratch")) - {"zarr.json"})


def put_one(key: str, expect: str) -> Callable[[Storage, bytes], object]:
    return lambda storage, data: storage.put(key, data, expect)


def put_wave(storage: Storage, data: bytes) -> object:
    return storage.put_many([Put(key, lambda: data) for key in ("old/key", "old/new", "x/y/z", "x/a", "top")])


PUTS: dict[str, Callable[[Storage, bytes], object]] = {
    "replacing": put_one("old/key", ANY),
    "exclusive": put_one("old/new", ABSENT),
    "into new directories": put_one("new/deep/key", ANY),
    "exclusive into new directories": put_one("new/deep/key", ABSENT),
    "at the top": put_one("top", ANY),
}
any_put = pytest.mark.parametrize("put", PUTS.values(), ids=PUTS)
any_put_or_wave = pytest.mark.parametrize("put", [*PUTS.values(), put_wave], ids=[*PUTS, "a wave"])


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A storage that holds one object, ``old/key``, and has its scratch directory."""
    open_storage(tmp_path / "root").put("old/key", b"old")
    return tmp_path / "root"


@any_put_or_wave
def test_nothing_is_renamed_into_place_before_it_is_synced(
    root: Path, monkeypatch: pytest.MonkeyPatch, put: Callable[[Storage, bytes], object]
) -> None:
    calls = OsCalls(monkeypatch, root)
    put(open_storage(root), b"new")
    assert calls.has_published
    assert calls.early == []


@any_put_or_wave
def test_a_put_returns_only_when_no_power_cut_can_undo_it(
    root: Path, monkeypatch: pytest.MonkeyPatch, put: Callable[[Storage, bytes], object]
) -> None:
    calls = OsCalls(monkeypatch, root)
    put(open_storage(root), b"new")
    assert calls.has_published
    assert calls.lost_by_a_power_cut() == []


def test_a_new_root_directory_survives_a_power_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = OsCalls(monkeypatch, tmp_path / "root")
    open_storage(tmp_path / "root").put("key", b"new")
    assert calls.lost_by_a_power_cut() == []


def test_all_new_directories_above_the_root_survive_a_power_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = OsCalls(monkeypatch, tmp_path / "runs")
    open_storage(tmp_path / "runs" / "walker" / "root").put("key", b"new")
    scratch = str(tmp_path / "runs" / "walker" / "root" / "scratch")
    assert [path for path in calls.lost_by_a_power_cut() if path != scratch] == []


@any_put_or_wave
def test_without_fsync_nothing_is_synced(
    root: Path, monkeypatch: pytest.MonkeyPatch, put: Callable[[Storage, bytes], object]
) -> None:
    calls = OsCalls(monkeypatch, root)
    put(open_storage(root, fsync=False), b"new")
    assert calls.has_published
    assert "fsync" not in calls.calls


@any_put_or_wave
def test_no_directory_is_ever_seen_without_its_content(
    root: Path, monkeypatch: pytest.MonkeyPatch, put: Callable[[Storage, bytes], object]
) -> None:
    calls = OsCalls(monkeypatch, root)
    seen: list[str] = []

    def look() -> None:
        for directory, names, files in os.walk(root):
            if directory == str(root):
                names.remove("scratch")
            if not names and not files:
                seen.append(directory)

    calls.check = look
    put(open_storage(root), b"new")
    assert calls.has_published
    assert seen == []


def put_wave_alone(storage: Storage, data: bytes) -> object:
    """No two objects make the same directory: the loser of such a race cleans up, which must not fail as well."""
    return storage.put_many([Put(key, lambda: data) for key in ("old/key", "old/new", "x/y/z", "top")])


@pytest.mark.parametrize("put", [*PUTS.values(), put_wave_alone], ids=[*PUTS, "a wave"])
def test_a_fault_at_any_call_leaves_the_old_object_and_no_litter(
    tmp_path: Path, put: Callable[[Storage, bytes], object]
) -> None:
    for k in range(1, 100):
        root = tmp_path / str(k)
        open_storage(root).put("old/key", b"old")
        if not fails_cleanly(root, put, k):
            assert k > 4  # a temporary file is opened, written, synced and renamed, and its directory synced
            return
    pytest.fail("a put that never ends")


def fails_cleanly(root: Path, put: Callable[[Storage, bytes], object], k: int) -> bool:
    """Whether the k-th call of a put could be made to fail; checks what is left then."""
    storage = open_storage(root)
    with pytest.MonkeyPatch.context() as patch:
        calls = OsCalls(patch, root)
        calls.fail_at = k
        with contextlib.suppress(StorageError):
            put(storage, b"new")
        if len(calls.calls) < k:
            return False
    where = f"call {k}, {calls.calls[k - 1]}"
    assert storage.get("old/key") in ({b"old", b"new"} if calls.has_published else {b"old"}), where
    assert temporaries(root) == [], where
    storage.put("old/key", b"newer")
    storage.put("new/deep/key", b"newer")
    assert storage.get_many(["old/key", "new/deep/key"]) == [b"newer"] * 2, where
    return True


def test_the_files_of_a_wave_are_written_before_the_first_is_synced(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = OsCalls(monkeypatch, root)
    open_storage(root).put_many([Put(f"old/{i}", lambda: b"new", UNSEEN if i % 2 else ANY) for i in range(20)])
    files = calls.calls[: calls.calls.index("replace")]
    assert files.count("write") == files.count("fsync") == 20
    assert files.index("fsync") > len(files) - 1 - files[::-1].index("write")
    assert calls.calls[len(files) :].count("fsync") == 1  # the directory


def test_a_wave_that_fails_leaves_every_old_object_and_no_litter_and_can_be_repeated(root: Path) -> None:
    storage, keys = open_storage(root), [f"old/{i}" for i in range(20)]
    storage.put_many([Put(key, lambda: b"old") for key in keys])

    def fail() -> bytes:
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        storage.put_many([*(Put(key, lambda: b"new") for key in keys), Put("old/last", fail)])
    assert storage.get_many(keys) == [b"old"] * 20
    assert temporaries(root) == []
    storage.put_many([Put(key, lambda: b"new") for key in keys])
    assert storage.get_many(keys) == [b"new"] * 20


def test_a_sync_that_fails_names_its_own_object(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys, real = [f"old/{i}" for i in range(20)], os.fsync
    monkeypatch.setattr(written_files, "MAX_OPEN", 3)

    def fail(descriptor: int) -> None:
        if os.fstat(descriptor).st_size == 7:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fail)
    puts = [Put(key, lambda key=key: bytes(7 if key == "old/8" else 5)) for key in keys]  # type: ignore[misc]
    with pytest.raises(StorageError, match="old/8:"):
        open_storage(root).put_many(puts)
    assert os.listdir(root / "old") == ["key"]
    assert temporaries(root) == []


@pytest.mark.parametrize("expect", [ANY, UNSEEN])
def test_a_wave_of_many_objects_keeps_few_files_open(
    root: Path, monkeypatch: pytest.MonkeyPatch, expect: str
) -> None:
    monkeypatch.setattr(written_files, "MAX_OPEN", 3)
    calls, n_open, most = OsCalls(monkeypatch, root), set[int](), list[int]()
    opens, closes = os.open, os.close

    def watched_open(*args: Any, **kwargs: Any) -> int:
        descriptor = opens(*args, **kwargs)
        n_open.add(descriptor)
        most.append(len(n_open))
        return descriptor

    def watched_close(descriptor: int) -> None:
        n_open.discard(descriptor)
        closes(descriptor)

    monkeypatch.setattr(os, "open", watched_open)
    monkeypatch.setattr(os, "close", watched_close)
    storage = open_storage(root)
    storage.put_many([Put(f"old/{i}", lambda: b"new", expect) for i in range(50)])
    assert max(most) <= 3 + 2 * storage.n_threads  # each thread writes one and syncs one
    assert not n_open
    assert calls.lost_by_a_power_cut() == []
    assert calls.early == []


@pytest.mark.parametrize("most", [1, 3, 1000])
def test_pieces_are_written_in_order_also_where_a_call_writes_few_bytes(
    root: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    write = os.write
    monkeypatch.setattr(written_files, "_BATCH_PIECES", 4)
    monkeypatch.setattr(os, "writev", lambda file, pieces: write(file, b"".join(pieces)[:most]))
    monkeypatch.setattr(os, "write", lambda file, data: write(file, data[:most]))
    pieces = [bytes([i]) * (i % 5) for i in range(23)]
    storage = open_storage(root)
    storage.put_many([Put("old/pieces", lambda: b"", make_pieces=lambda: iter(pieces))])
    assert storage.get("old/pieces") == b"".join(pieces)


def test_a_wave_that_is_over_keeps_nothing_that_a_thread_writes_late(tmp_path: Path) -> None:
    late, descriptors = tmp_path / "late", len(os.listdir("/proc/self/fd")) if Path("/proc").is_dir() else None
    with WrittenFiles(fsync=True) as files:
        files.write("early", str(tmp_path / "early"), [b"1"], os.O_TRUNC)
    assert files.write("late", str(late), [b"1"], os.O_EXCL) is None
    assert not late.exists()
    assert files.take() == []
    if descriptors is not None:
        assert len(os.listdir("/proc/self/fd")) == descriptors


@pytest.mark.parametrize("k", range(2, 8))  # the first call makes the scratch directory, which exists
def test_a_fault_is_never_silent(root: Path, monkeypatch: pytest.MonkeyPatch, k: int) -> None:
    OsCalls(monkeypatch, root).fail_at = k
    with pytest.raises(StorageError, match="old/key") as caught:
        open_storage(root).put("old/key", b"new")
    assert caught.value.errno == errno.EIO


def test_an_interrupted_put_leaves_the_old_object_and_no_litter(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(descriptor: int, data: bytes) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "write", interrupt)
    with pytest.raises(KeyboardInterrupt):
        open_storage(root).put("old/key", b"new")
    assert open_storage(root).get("old/key") == b"old"
    assert temporaries(root) == []


def test_short_writes_are_continued(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: real(descriptor, bytes(data)[:7]))
    open_storage(root).put("old/key", b"many bytes, seven at a time")
    assert open_storage(root).get("old/key") == b"many bytes, seven at a time"


# ---- full disks, forbidden places, other processes -----------------------------------------------------


def in_child(function: Callable[[], Any]) -> Any:
    """What the function returns, or raises, in a forked child."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        here, there = multiprocessing.Pipe(duplex=False)
        child = multiprocessing.get_context("fork").Process(target=report, args=(function, there))
        child.start()
    there.close()
    try:
        if not here.poll(JOIN_S):
            child.kill()
        return here.recv()
    finally:
        child.join()
        child.close()
        here.close()


def report(function: Callable[[], Any], there: Any) -> None:
    try:
        there.send(function())
    except BaseException as error:
        there.send((type(error), getattr(error, "errno", None), str(error)))


def test_a_disk_that_fills_half_way_leaves_the_old_object(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write

    def fill(descriptor: int, data: Any) -> int:
        if len(data) <= 500:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, data[:500])

    monkeypatch.setattr(os, "write", fill)
    with pytest.raises(StorageError, match="old/key") as caught:
        open_storage(root).put("old/key", bytes(1000))
    assert caught.value.errno == errno.ENOSPC
    assert open_storage(root).get("old/key") == b"old"
    assert temporaries(root) == []


def test_a_file_too_large_for_the_process_leaves_the_old_object(root: Path) -> None:
    def put() -> object:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        return open_storage(root).put("old/key", bytes(10_000))

    kind, code, message = in_child(put)
    assert (kind, code) == (StorageError, errno.EFBIG)
    assert "old/key" in message
    assert open_storage(root).get("old/key") == b"old"
    assert temporaries(root) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte."""
    mounted = tmp_path / "disk"
    mounted.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(mounted)]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this process may not mount a file system")
    try:
        yield mounted
    finally:
        subprocess.run(["umount", "-l", str(mounted)], check=True)


def test_a_full_disk_leaves_the_old_object_and_no_litter(small_disk: Path) -> None:
    storage = open_storage(small_disk / "root")
    storage.put("key", b"old")
    with pytest.raises(StorageError, match="key") as caught:
        storage.put("key", bytes(2_000_000))
    assert caught.value.errno == errno.ENOSPC
    assert storage.get("key") == b"old"
    assert temporaries(small_disk / "root") == []
    storage.put("key", b"fits")
    assert storage.get("key") == b"fits"


def test_a_commit_that_met_a_full_disk_succeeds_once_there_is_room(small_disk: Path) -> None:
    ballast = small_disk / "ballast"
    noise = np.random.default_rng(0).integers(0, 256, (10, 10_000), dtype=np.uint8)
    store = trajstore.create(small_disk / "root")
    writer = store.writer(commit_seconds=None)
    writer.append_episode({"x": noise[:1]}, terminated=True)
    writer.commit()
    ballast.write_bytes(bytes(950_000))
    writer.append_episode({"x": noise}, terminated=True)
    with pytest.raises(StorageError, match="No space left"):
        writer.commit()
    assert len(trajstore.open(small_disk / "root")) == 1
    ballast.unlink()
    writer.commit()
    assert np.array_equal(trajstore.open(small_disk / "root").read_episode(1)["x"], noise)
    writer.close()


@pytest.fixture
def foreign_root() -> Iterator[Path]:
    """A storage that everybody may read and only its owner may write."""
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o755)
        root = Path(directory) / "root"
        open_storage(root).put("old/key", b"old")
        made_read_only = [path for path in tree(str(root)) if os.path.isdir(path)]
        for path in made_read_only:
            os.chmod(path, 0o555)
        yield root
        for path in made_read_only:
            os.chmod(path, 0o755)


def as_nobody(function: Callable[[], Any]) -> Any:
    def call() -> Any:
        if os.getuid() == 0:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
        return function()

    return in_child(call)


@pytest.mark.parametrize("key", ["old/key", "old/new", "new/key", "top"])
def test_a_put_that_is_not_permitted_says_so_and_where(foreign_root: Path, key: str) -> None:
    kind, code, message = as_nobody(lambda: open_storage(foreign_root).put(key, b"new"))
    assert (kind, code) == (StorageError, errno.EACCES)
    assert f"{foreign_root}/{key}" in message
    assert "\n" not in message


def test_a_root_that_may_not_be_made_says_so_and_where(foreign_root: Path) -> None:
    inside = foreign_root / "a" / "store"
    kind, code, message = as_nobody(lambda: open_storage(inside).put("key", b"new"))
    assert (kind, code) == (StorageError, errno.EACCES)
    assert f"{inside}/key" in message


def test_a_read_that_is_not_permitted_says_so_and_where(foreign_root: Path) -> None:
    os.chmod(foreign_root / "old" / "key", 0)
    kind, code, message = as_nobody(lambda: open_storage(foreign_root).get("old/key"))
    assert (kind, code) == (StorageError, errno.EACCES)
    assert f"{foreign_root}/old/key" in message


def test_what_may_be_read_is_read_without_permission_to_write(foreign_root: Path) -> None:
    assert as_nobody(lambda: open_storage(foreign_root).get("old/key")) == b"old"
    assert as_nobody(lambda: open_storage(foreign_root).list_names("old")) == ["key"]


def wins(root: Path, number: int, keys: list[str], start: Any) -> list[str]:
    storage = open_storage(root)
    won = []
    for key in keys:
        start.wait(JOIN_S)
        with contextlib.suppress(FileExistsError):
            storage.put(key, b"process %d" % number, ABSENT)
            won.append(key)
    return won


def test_exactly_one_of_four_processes_wins_an_exclusive_put(tmp_path: Path) -> None:
    keys = [f"key{i}" for i in range(25)] + [f"new{i}/deep/key" for i in range(25)]
    start = multiprocessing.get_context("fork").Barrier(4)
    with ThreadPoolExecutor(4) as threads:
        won = list(threads.map(lambda n: in_child(lambda: wins(tmp_path / "root", n, keys, start)), range(4)))
    assert sorted(key for part in won for key in part) == sorted(keys)
    for number, part in enumerate(won):
        assert set(open_storage(tmp_path / "root").get_many(part)) <= {b"process %d" % number}
    assert temporaries(tmp_path / "root") == []


def test_a_child_forked_while_a_thread_names_a_temporary_file_can_put(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage, is_inside, is_over, main = open_storage(root), Event(), Event(), get_ident()
    real = time.time_ns

    def wait() -> int:
        if get_ident() != main and not is_over.is_set():
            is_inside.set()
            is_over.wait(JOIN_S)
        return real()

    monkeypatch.setattr(time, "time_ns", wait)
    with ThreadPoolExecutor(1) as threads:
        slow = threads.submit(storage.put, "slow", b"1")
        assert is_inside.wait(JOIN_S)
        try:
            answer = in_child(lambda: (storage.put("child", b"2"), storage.get("child"))[1])
        except EOFError:
            answer = "the child hangs"
        finally:
            is_over.set()
        slow.result()
    assert answer == b"2"


@pytest.mark.parametrize("kind", ["memory", pytest.param("s3", marks=pytest.mark.s3)])
def test_a_duplicate_request_that_comes_late_does_not_undo_a_later_put(kind: str, new_place: Any) -> None:
    place = new_place(kind)
    storage = open_storage(place.url, place.options)
    version = storage.put("chunk", b"5", UNSEEN)
    assert storage.put("chunk", b"5", OWN) in (version, ANY)  # a second try finds its own bytes
    storage.put("chunk", b"56", version)
    for expect in (UNSEEN, OWN):
        with pytest.raises(FileExistsError):
            storage.put("chunk", b"5", expect)
    assert storage.get("chunk") == b"56"
