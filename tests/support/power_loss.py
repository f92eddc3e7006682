"""Power loss as a model: which directories a crash of the machine may leave behind, and all of them tried.

`Recorder` runs a workload on a real directory and records every file operation that `LocalStorage` makes, in one
total order, together with marks that say what was promised when. `FileSystem` replays such a log and knows, after
each operation, what is durable and what is not. `explore` makes states that a loss of power at that moment may
leave, each distinct one once, and hands them to a reader.

The rules of the model, which are more pessimistic than any common file system:

1. The data of a file is durable once the file was fsynced. Data written or truncated since may be there as it is,
   as it was before, not at all (length 0), half (a torn prefix), or as zeros in its full length (delayed
   allocation). Each file is independent of the others.
2. The entries of a directory are durable once the directory was fsynced. An fsync of a file does not make its name
   durable, and an fsync of a directory does not make the data of its files or its own name durable.
3. A change of an entry (create, mkdir, link, unlink, rmdir, rename) that is not durable may have happened or not,
   independently for each name. The changes of one name happen in their order.
4. A rename adds the new name and removes the old one. The new name may be durable while the old one is still
   there, also if both are in one directory. The old name is never gone without the new one: journaled file systems
   do not lose a file that way. A directory never has two names, so both halves of its rename happen or neither.
5. A name that is replaced, by a rename or otherwise, is never missing: it is the old file or the new one.
6. The directory that the workload begins with is empty and durable.

Files in the directory of temporary files are part of each state, but two states that differ only there count as
one: readers ignore it.

How many distinct states are tried is limited, by default to `DEFAULT_STATES` in each workload. Set
``TRAJSTORE_POWER_STATES=50000`` in the environment for more: states are then combined at random, with a fixed seed,
until there are that many in each workload, or no new ones are found.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trajstore.storage import LocalStorage

DEFAULT_STATES = 700
_STATES_VARIABLE = "TRAJSTORE_POWER_STATES"
_MAX_SYSTEMATIC = 40  # choices at one point of a log, beside random ones
_SCRATCH = "scratch"  # docs/format.md: temporary files, which readers ignore


def n_states() -> int:
    """How many distinct states a workload is tried with."""
    return int(os.environ.get(_STATES_VARIABLE, DEFAULT_STATES))


# ---- recording --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Operation:
    """One file operation that was executed; paths are relative to the directory of the recording."""

    name: str
    path: str = ""
    other: str = ""  # the new name, of a rename or a link
    data: bytes = b""
    handle: int = 0  # of an open file: the number of the operation that opened it
    creates: bool = False
    truncates: bool = False

    def __str__(self) -> str:
        return " ".join(part for part in (self.name, self.path, self.other) if part)


@dataclass(frozen=True, slots=True)
class Mark:
    """The workload says something at this place in the log."""

    word: str
    value: int


Entry = Operation | Mark


class Recorder:
    """Executes and records the file operations that `LocalStorage` makes below a directory.

    Attributes:
        base: The directory; empty at the beginning.
        log: Operations and marks in the order in which they were executed.
    """

    def __init__(self, base: Path) -> None:
        self.base = base
        self.log: list[Entry] = []
        self._lock = threading.RLock()
        self._open: dict[int, tuple[int, str, bool]] = {}  # by descriptor: handle, path, whether a directory
        self._skipped = {"files": 0, "directories": 0}
        self._root = f"{base}{os.sep}"

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record while the block runs; afterwards see that nothing happened past the recorder."""
        package = LocalStorage.__module__.rpartition(".")[0]
        modules = [module for name, module in sys.modules.items() if name.startswith(f"{package}.")]
        with pytest.MonkeyPatch.context() as patch:
            for module in modules:  # all of `storage`: the functions of one may be called by another
                for name, recorder in (("os", _RecordingOs(self)), ("shutil", _RecordingShutil(self))):
                    if hasattr(module, name):
                        patch.setattr(module, name, recorder)
            yield
            with self._lock:
                self._check()

    def _check(self) -> None:
        model = FileSystem.after(self.log)
        assert model.volatile_tree() == _tree_of(self.base), "the library changed files past the recorder"

    def mark(self, word: str, value: int) -> None:
        with self._lock:
            self.log.append(Mark(word, value))

    @contextlib.contextmanager
    def skipping(self, *what: str) -> Iterator[None]:
        """A planted bug: no fsync of ``files``, of ``directories``, or of both, by any thread."""
        self.skip(*what)
        try:
            yield
        finally:
            self.skip(*what, n=-1)

    def skip(self, *what: str, n: int = 1) -> None:
        """The same until the end."""
        with self._lock:
            for name in what:
                self._skipped[name] += n

    def relative(self, path: Any) -> str | None:
        """The path below the base; None elsewhere."""
        text = os.path.abspath(os.fspath(path))
        if text == str(self.base):
            return "."
        return text.removeprefix(self._root) if text.startswith(self._root) else None

    def run(self, name: str, call: Callable[[], Any], path: Any, other: Any = "") -> Any:
        """Execute an operation on names and record it."""
        with self._lock:
            result = call()
            known, second = self.relative(path), self.relative(other) if other else ""
            if known is not None and second is not None:
                self.log.append(Operation(name, known, second))
            return result

    def open(self, path: Any, flags: int, mode: int) -> int:
        with self._lock:
            known, is_new = self.relative(path), not os.path.lexists(path)
            descriptor = os.open(path, flags, mode)
            if known is not None:
                self._open[descriptor] = len(self.log), known, os.path.isdir(path)
                truncates = bool(flags & os.O_TRUNC)
                entry = Operation("open", known, handle=len(self.log), creates=is_new, truncates=truncates)
                self.log.append(entry)
            return descriptor

    def write(self, descriptor: int, data: Any) -> int:
        with self._lock:
            n = os.write(descriptor, data)
            if descriptor in self._open:
                handle, path, _ = self._open[descriptor]
                self.log.append(Operation("write", path, data=bytes(memoryview(data)[:n]), handle=handle))
            return n

    def writev(self, descriptor: int, pieces: Any) -> int:
        # As one write: a crash may leave any part of either.
        return self.write(descriptor, b"".join(pieces))

    def fsync(self, descriptor: int) -> None:
        with self._lock:
            handle, path, is_directory = self._open.get(descriptor, (0, "", False))
            if path and self._skipped["directories" if is_directory else "files"]:
                return
            os.fsync(descriptor)
            if path:
                self.log.append(Operation("fsync", path, handle=handle))

    def close(self, descriptor: int) -> None:
        with self._lock:
            self._open.pop(descriptor, None)
            os.close(descriptor)

    def makedirs(self, path: Any, exist_ok: bool) -> None:
        with self._lock:
            if os.path.isdir(path):
                if not exist_ok:
                    raise FileExistsError(path)
                return
            missing = [d for d in (Path(path), *Path(path).parents) if not d.exists()]
            for directory in reversed(missing):
                self.run("mkdir", lambda d=directory: os.mkdir(d), directory)  # type: ignore[misc]

    def rmtree(self, path: Any) -> None:
        for directory, folders, files in os.walk(path, topdown=False):
            for name in files:
                file = os.path.join(directory, name)
                self.run("unlink", lambda file=file: os.unlink(file), file)  # type: ignore[misc]
            for name in folders:
                folder = os.path.join(directory, name)
                self.run("rmdir", lambda folder=folder: os.rmdir(folder), folder)  # type: ignore[misc]
        self.run("rmdir", lambda: os.rmdir(path), path)


class _RecordingOs:
    """Stands where the library looks for ``os``."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def open(self, path: Any, flags: int, mode: int = 0o777) -> int:
        return self._recorder.open(path, flags, mode)

    def write(self, descriptor: int, data: Any) -> int:
        return self._recorder.write(descriptor, data)

    def writev(self, descriptor: int, pieces: Any) -> int:
        return self._recorder.writev(descriptor, pieces)

    def fsync(self, descriptor: int) -> None:
        self._recorder.fsync(descriptor)

    fdatasync = fsync

    def close(self, descriptor: int) -> None:
        self._recorder.close(descriptor)

    def rename(self, path: Any, other: Any) -> None:
        self._recorder.run("rename", lambda: os.rename(path, other), path, other)

    def replace(self, path: Any, other: Any) -> None:
        self._recorder.run("rename", lambda: os.replace(path, other), path, other)

    def link(self, path: Any, other: Any) -> None:
        self._recorder.run("link", lambda: os.link(path, other), path, other)

    def unlink(self, path: Any) -> None:
        self._recorder.run("unlink", lambda: os.unlink(path), path)

    remove = unlink

    def mkdir(self, path: Any, mode: int = 0o777) -> None:
        self._recorder.run("mkdir", lambda: os.mkdir(path, mode), path)

    def makedirs(self, path: Any, mode: int = 0o777, exist_ok: bool = False) -> None:
        self._recorder.makedirs(path, exist_ok)

    def rmdir(self, path: Any) -> None:
        self._recorder.run("rmdir", lambda: os.rmdir(path), path)


class _RecordingShutil:
    """Stands where the library looks for ``shutil``."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def __getattr__(self, name: str) -> Any:
        return getattr(shutil, name)

    def rmtree(self, path: Any, ignore_errors: bool = False) -> None:
        with contextlib.suppress(*([OSError] if ignore_errors else [])):
            self._recorder.rmtree(path)


def _tree_of(base: Path) -> dict[str, bytes | None]:
    """Every file below a directory with its bytes, every directory with None."""
    return {
        path.relative_to(base).as_posix(): None if path.is_dir() else path.read_bytes() for path in base.rglob("*")
    }


# ---- the file system --------------------------------------------------------------------------------------

Key = tuple[int, str]  # a directory and a name in it
_ROOT = 0
_DIRECTORY = -1
FULL, OLD, EMPTY, TORN, ZEROS = range(5)  # what becomes of data that is not durable


@dataclass(slots=True)
class _File:
    now: bytes = b""
    durable: bytes = b""
    is_dirty: bool = False

    def data(self, variant: int) -> bytes:
        if not self.is_dirty or variant == OLD:
            return self.durable
        if variant == FULL:
            return self.now
        return {EMPTY: b"", TORN: self.now[: len(self.now) // 2], ZEROS: bytes(len(self.now))}[variant]


@dataclass(frozen=True, slots=True)
class _Change:
    """A name stands for this inode from here on, or for nothing."""

    inode: int | None
    rename: int = 0


@dataclass(frozen=True, slots=True)
class _Rename:
    added: Key
    removed: Key
    is_directory: bool


@dataclass(slots=True)
class _Part:
    """What is below a directory: a sum over all that no choice changes, and the rest by path.

    Attributes:
        dirty: Files whose data is not durable.
        open: Names that have changes.
    """

    total: int = 0
    dirty: list[tuple[str, int]] = field(default_factory=list)
    open: list[tuple[str, Key]] = field(default_factory=list)

    def add(self, other: _Part) -> None:
        self.total += other.total
        self.dirty += other.dirty
        self.open += other.open


@dataclass(frozen=True, slots=True)
class Choice:
    """What a crash keeps of all that is not durable.

    Attributes:
        keeps: Whether names that are not in ``entries`` have all of their changes, or none.
        data: What becomes of files that are not in ``files``.
        entries: By name, how many of its changes are kept.
        files: By inode, what becomes of its data.
    """

    keeps: bool
    data: int = FULL
    entries: Mapping[Key, int] = field(default_factory=dict)
    files: Mapping[int, int] = field(default_factory=dict)


class FileSystem:
    """Inodes, names, and how much of both is durable; see the rules at the top."""

    def __init__(self) -> None:
        self._files: dict[int, _File] = {}
        self._dirty: set[int] = set()
        self._now: dict[int, dict[str, int]] = {_ROOT: {}}  # by directory
        self._durable: dict[int, dict[str, int]] = {_ROOT: {}}
        self._pending: dict[int, dict[str, list[_Change]]] = {}
        self._renames: dict[int, _Rename] = {}  # those whose new name is not durable
        self._renames_of: dict[Key, set[int]] = {}  # the same by name, old or new
        self._handles: dict[int, tuple[int, int]] = {}  # inode and position
        self._quiet: set[int] = set()  # directories of temporary files
        self._n = 0
        self._contents: dict[int, bytes] = {}  # by hash
        self._parts: dict[tuple[str, int], _Part] = {}  # by path and directory; forgotten with every operation

    @staticmethod
    def after(log: list[Entry]) -> FileSystem:
        system = FileSystem()
        for entry in log:
            if isinstance(entry, Operation):
                system.apply(entry)
        return system

    # -- operations --

    def apply(self, operation: Operation) -> bool:
        """Execute an operation; returns whether it changed what a crash may leave."""
        self._parts.clear()
        method: Callable[[Operation], bool] = getattr(self, f"_{operation.name}")
        return method(operation)

    def _open(self, operation: Operation) -> bool:
        if operation.creates:
            inode = self._new()
            self._files[inode] = _File()
            self._change(self._key(operation.path), _Change(inode))
        inode = self._find(operation.path)
        self._handles[operation.handle] = inode, 0
        if operation.truncates and not operation.creates:
            self._set_data(inode, b"")
        return operation.creates or operation.truncates

    def _write(self, operation: Operation) -> bool:
        inode, at = self._handles[operation.handle]
        now, end = self._files[inode].now, at + len(operation.data)
        self._set_data(inode, now[:at] + operation.data + now[end:])
        self._handles[operation.handle] = inode, end
        return True

    def _set_data(self, inode: int, data: bytes) -> None:
        file = self._files[inode]
        file.now, file.is_dirty = data, True
        self._dirty.add(inode)

    def _fsync(self, operation: Operation) -> bool:
        inode, _ = self._handles[operation.handle]
        if inode in self._files:
            file = self._files[inode]
            file.durable, file.is_dirty = file.now, False
            self._dirty.discard(inode)
        else:
            everything = {(inode, name): len(found) for name, found in self._pending.get(inode, {}).items()}
            self._commit(self._settled(Choice(keeps=False, entries=everything)))
        return True

    def _mkdir(self, operation: Operation) -> bool:
        inode = self._new()
        self._now[inode], self._durable[inode] = {}, {}
        if Path(operation.path).name == _SCRATCH:
            self._quiet.add(inode)
        self._change(self._key(operation.path), _Change(inode))
        return True

    def _link(self, operation: Operation) -> bool:
        self._change(self._key(operation.other), _Change(self._find(operation.path)))
        return True

    def _unlink(self, operation: Operation) -> bool:
        self._change(self._key(operation.path), _Change(None))
        return True

    _rmdir = _unlink

    def _rename(self, operation: Operation) -> bool:
        inode, source, target = self._find(operation.path), self._key(operation.path), self._key(operation.other)
        if self._now[target[0]].get(target[1]) == inode:
            return False  # two names of one file: POSIX does nothing
        number = self._new()
        self._renames[number] = _Rename(target, source, inode not in self._files)
        for key in (source, target):
            self._renames_of.setdefault(key, set()).add(number)
        self._change(target, _Change(inode, number))
        self._change(source, _Change(None, number))
        return True

    def _new(self) -> int:
        self._n += 1
        return self._n

    def _find(self, path: str) -> int:
        inode = _ROOT
        for name in Path(path).parts:
            inode = self._now[inode][name]
        return inode

    def _key(self, path: str) -> Key:
        return self._find(os.path.dirname(path)), os.path.basename(path)

    def _change(self, key: Key, change: _Change) -> None:
        self._pending.setdefault(key[0], {}).setdefault(key[1], []).append(change)
        _set(self._now[key[0]], key[1], change.inode)

    # -- what is durable --

    def _n_kept(self, key: Key, choice: Choice, entries: Mapping[Key, int]) -> int:
        changes = self._pending.get(key[0], {}).get(key[1], ())
        return min(len(changes), entries.get(key, len(changes) if choice.keeps else 0))

    def _settled(self, choice: Choice) -> dict[Key, int]:
        """The entries of a choice, with both halves of each rename as rule 4 says."""
        entries = dict(choice.entries)
        ahead = list(entries)
        while ahead:  # names that are not there are all alike, so they agree with each other
            key = ahead.pop()
            found = [self._coupled(number, choice, entries) for number in self._renames_of.get(key, ())]
            ahead += [changed for changed in found if changed is not None]
        return entries

    def _coupled(self, number: int, choice: Choice, entries: dict[Key, int]) -> Key | None:
        """Make both halves of a rename agree; returns the name that is changed by that."""
        rename = self._renames[number]
        added, removed = self._half(rename.added, number), self._half(rename.removed, number)
        has_added = self._n_kept(rename.added, choice, entries) >= added
        has_removed = self._n_kept(rename.removed, choice, entries) >= removed
        if has_added == has_removed or (has_added and not rename.is_directory):
            return None
        if choice.keeps:  # take back the half that happened
            key, n = (rename.added, added) if has_added else (rename.removed, removed)
            entries[key] = n - 1
        else:  # let the other half happen
            key, n = (rename.removed, removed) if has_added else (rename.added, added)
            entries[key] = n
        return key

    def _half(self, key: Key, number: int) -> int:
        """How many changes of a name must be kept for this half of a rename; 0 if it is durable."""
        changes = self._pending.get(key[0], {}).get(key[1], ())
        return next((i for i, change in enumerate(changes, 1) if change.rename == number), 0)

    def _commit(self, entries: Mapping[Key, int]) -> None:
        for (directory, name), n in entries.items():
            changes = self._pending.get(directory, {}).get(name, [])
            if n and changes:
                _set(self._durable[directory], name, changes[n - 1].inode)
                del changes[:n]
                if not changes:
                    del self._pending[directory][name]
        for number in [n for n, rename in self._renames.items() if not self._half(rename.added, n)]:
            rename = self._renames.pop(number)
            for key in (rename.added, rename.removed):
                self._renames_of[key].discard(number)

    # -- what a crash leaves --

    def choices(self) -> Iterator[Choice]:
        """All lost, all kept, each kind of damage, each single one lost or damaged, each single one kept."""
        variants = (FULL, OLD, EMPTY, TORN, ZEROS) if self._dirty else (FULL,)
        for keeps in (True, False):
            yield from (Choice(keeps, data) for data in variants)
        for key, n in self._open_entries().items():
            yield from (Choice(True, entries={key: i}) for i in range(n))
            yield Choice(False, entries={key: n})
        for inode in sorted(self._dirty):
            yield from (Choice(True, files={inode: data}) for data in variants[1:])

    def random_choice(self, rng: np.random.Generator) -> Choice:
        entries = {key: int(rng.integers(0, n + 1)) for key, n in self._open_entries().items()}
        files = {inode: int(rng.integers(0, ZEROS + 1)) for inode in sorted(self._dirty)}
        return Choice(bool(rng.integers(2)), FULL, entries, files)

    @property
    def is_settled(self) -> bool:
        """Whether nothing but temporary files is open to choice."""
        return not self._dirty and not self._open_entries()

    def _open_entries(self) -> dict[Key, int]:
        return {
            (directory, name): len(changes)
            for directory, named in self._pending.items()
            if directory not in self._quiet
            for name, changes in named.items()
        }

    def fingerprint(self, choice: Choice) -> int:
        """A number that is equal for equal states, whatever temporary files are there."""
        entries, total = self._settled(choice), 0
        ahead = [self._part("", _ROOT)]
        while ahead:
            part = ahead.pop()
            total += part.total
            total += sum(_hash(path, self._number(self._data(inode, choice))) for path, inode in part.dirty)
            for path, key in part.open:
                inode = self._inode(key, choice, entries)
                if inode in self._files:
                    total += _hash(path, self._number(self._data(inode, choice)))
                elif inode is not None and inode not in self._quiet:
                    total += _hash(path, _DIRECTORY)
                    ahead.append(self._part(f"{path}/", inode))
        return total & (1 << 64) - 1

    def _part(self, prefix: str, directory: int) -> _Part:
        """What is below a directory; looked at once for each state of this file system."""
        if (prefix, directory) not in self._parts:
            self._parts[prefix, directory] = self._looked_at(prefix, directory)
        return self._parts[prefix, directory]

    def _looked_at(self, prefix: str, directory: int) -> _Part:
        pending = self._pending.get(directory, {})
        part = _Part(open=[(f"{prefix}{name}", (directory, name)) for name in pending])
        for name, inode in self._durable[directory].items():
            path = f"{prefix}{name}"
            if name in pending or inode in self._quiet:
                continue
            if inode not in self._files:
                part.total += _hash(path, _DIRECTORY)
                part.add(self._part(f"{path}/", inode))
            elif self._files[inode].is_dirty:
                part.dirty.append((path, inode))
            else:
                part.total += _hash(path, self._number(self._files[inode].durable))
        return part

    def _data(self, inode: int, choice: Choice) -> bytes:
        return self._files[inode].data(choice.files.get(inode, choice.data))

    def _inode(self, key: Key, choice: Choice, entries: Mapping[Key, int]) -> int | None:
        """What a name with changes stands for after a crash."""
        directory, name = key
        if n := self._n_kept(key, choice, entries):
            return self._pending[directory][name][n - 1].inode
        return self._durable[directory].get(name)

    def state(self, choice: Choice) -> dict[str, int]:
        """The paths that a crash leaves, each with the hash of its content, or -1 for a directory."""
        found: dict[str, int] = {}
        entries = self._settled(choice)
        ahead = [("", _ROOT)]
        while ahead:
            prefix, directory = ahead.pop()
            for name, inode in self._entries(directory, choice, entries).items():
                path = f"{prefix}{name}"
                if inode in self._files:
                    found[path] = self._number(self._data(inode, choice))
                else:
                    found[path] = _DIRECTORY
                    ahead.append((f"{path}/", inode))
        return found

    def tree(self, choice: Choice) -> dict[str, bytes | None]:
        """All that a crash leaves: every file with its bytes, every directory with None."""
        state = self.state(choice)
        return {path: None if n == _DIRECTORY else self._contents[n] for path, n in state.items()}

    def volatile_tree(self) -> dict[str, bytes | None]:
        """What a running program sees."""
        return self.tree(Choice(keeps=True))

    def _entries(self, directory: int, choice: Choice, entries: Mapping[Key, int]) -> dict[str, int]:
        found = self._durable[directory]
        pending = self._pending.get(directory)
        if not pending:
            return found
        found = dict(found)
        for name, changes in pending.items():
            if n := self._n_kept((directory, name), choice, entries):
                _set(found, name, changes[n - 1].inode)
        return found

    def _number(self, data: bytes) -> int:
        number = hash(data)  # never -1
        self._contents[number] = data
        return number


def _hash(path: str, content: int) -> int:
    # Of one string: hashes of pairs are so regular that sums of them are often equal.
    return hash(f"{path} {content}")


def _set(named: dict[str, int], name: str, inode: int | None) -> None:
    if inode is None:
        named.pop(name, None)
    else:
        named[name] = inode


# ---- trying all of it -------------------------------------------------------------------------------------


class Image:
    """A real directory that takes on one state after the other; only what differs is written."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self._held: dict[str, bytes | None] = {}
        base.mkdir(parents=True, exist_ok=True)

    def show(self, tree: Mapping[str, bytes | None]) -> None:
        gone = [path for path in self._held if path not in tree]
        for path in sorted(gone, key=len, reverse=True):
            (os.unlink if self._held[path] is not None else os.rmdir)(self.base / path)
        for path in sorted(tree, key=len):
            if path not in self._held or self._held[path] != tree[path]:
                self._put(path, tree[path])
        self._held = dict(tree)

    def _put(self, path: str, data: bytes | None) -> None:
        if data is None:
            os.mkdir(self.base / path)
        else:
            (self.base / path).write_bytes(data)


@dataclass(frozen=True, slots=True)
class Crash:
    """One state that a loss of power may leave.

    Attributes:
        at: The number of the last entry of the log before the crash.
        marks: The last value of each word that was marked before.
        state: Equal for equal states.
        tree: What is left.
    """

    at: int
    marks: Mapping[str, int]
    state: int
    tree: Callable[[], dict[str, bytes | None]]


def crashes(log: list[Entry], n_random: int, chosen: set[int] | None = None) -> Iterator[Crash]:
    """Crashes after every entry of a log; of those in ``chosen`` only, if given. Equal states come repeatedly."""
    system, marks = FileSystem(), dict[str, int]()
    for at, entry in enumerate(log):
        if isinstance(entry, Mark):
            marks[entry.word] = entry.value
        elif not system.apply(entry):
            continue
        yield from _crashes_now(system, at, dict(marks), n_random, chosen)


def _crashes_now(
    system: FileSystem, at: int, marks: Mapping[str, int], n_random: int, chosen: set[int] | None
) -> Iterator[Crash]:
    seen: set[int] = set()
    for choice in _choices_now(system, np.random.default_rng(at), n_random):
        state = system.fingerprint(choice)
        if state not in seen and (chosen is None or state in chosen):
            seen.add(state)
            yield Crash(at, marks, state, lambda choice=choice: system.tree(choice))  # type: ignore[misc]


def _choices_now(system: FileSystem, rng: np.random.Generator, n_random: int) -> list[Choice]:
    if system.is_settled:
        return [Choice(keeps=True)]
    first, *rest = system.choices()
    picked = sorted(rng.permutation(len(rest))[: _MAX_SYSTEMATIC + n_random])  # many only where little is synced
    return [first, *(rest[i] for i in picked), *(system.random_choice(rng) for _ in range(n_random))]


def choose(log: list[Entry], limit: int) -> tuple[set[int], int]:
    """Distinct states to try, ``limit`` of them if there are as many, and how many random choices lead to them."""
    n_random, found = 4, list[int]()
    while True:
        before = len(found)
        found = list(dict.fromkeys(crash.state for crash in crashes(log, n_random)))
        if len(found) >= limit or len(found) == before or n_random > 1 << 12:
            break
        n_random *= 4
    picked = np.random.default_rng(0).permutation(len(found))[:limit]
    return {found[i] for i in picked}, n_random
