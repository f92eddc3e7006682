"""Keeps the machine code of compiled loops on disk, where a directory can be written. Imports numba.

numba's own cache is not used, because two processes that compile at the same time can make it return the code of
another signature, processor or source: its index names data files that others overwrite. It also overlooks changes
of functions and constants in other modules, and fails on damaged files and full disks. Here every loop, signature
and processor has its own file, whose name covers everything that the code depends on and which appears atomically.
"""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, cast

import llvmlite
import numba
import numpy as np
from numba.core.caching import CompileResultCacheImpl, FunctionCache, IndexDataCacheFile
from numba.misc.appdirs import AppDirs

from trajstore.sampling.compiled.compile_times import COMPILE_TIMES

_PREFIX = "trajstore-"
_MAX_VERSIONS = 16  # directories of other versions that are kept beside the current one, about 1 MB each


class CodeCache(FunctionCache):
    """The kept machine code of one loop.

    Neither a damaged file nor a directory that can't be written is an error: the loop is compiled, and not kept.
    """

    def __init__(self, function: Callable[..., object]) -> None:
        # The constructors of numba's classes look for a directory, and raise an error if they find none.
        self._py_func = function
        self._name = repr(function)
        self._impl = CompileResultCacheImpl.__new__(CompileResultCacheImpl)
        self._files = [
            _CodeFiles(path, f"{function.__module__.rpartition('.')[2]}.{function.__name__}")
            for path in directories()
        ]
        self.enable()

    @property
    def cache_path(self) -> str | None:
        """The directory that holds code, if one does."""
        return next((str(path) for path in directories() if os.path.isdir(path)), None)

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Return the compiled function, or None if it is not kept."""
        target_context.refresh()
        key = self._index_key(sig, target_context.codegen())
        for files in self._files:
            try:
                data = files.load(key)
                if data is not None:
                    return self._impl.rebuild(target_context, data)
            except Exception:  # noqa: S112 - of any kind, because a damaged file can hold anything
                continue
        return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keep a compiled function in the first directory that can be written."""
        key, kept_in = self._index_key(sig, data.codegen), None
        for path, files in zip(directories(), self._files, strict=True):
            try:
                files.save(key, self._impl.reduce(data))
                kept_in = path
                break
            except OSError:  # the directory can't be written, or the disk is full
                continue
        COMPILE_TIMES.loop_compiled(kept_in, directories())

    def _index_key(self, sig: Any, codegen: Any) -> Any:
        return super()._index_key(sig, codegen), sorted(_constants(cast(FunctionType, self._py_func)))


class _CodeFiles(IndexDataCacheFile):
    """Files of one loop in one directory. There is no index: the names say what the files hold."""

    def __init__(self, directory: Path, name: str) -> None:
        super().__init__(str(directory), name, None)
        self._directory, self._loop = directory, name

    def _file_name(self, key: Any) -> str:
        return f"{self._loop}-{_digest(repr(key).encode())}.nbc"

    def load(self, key: Any) -> Any:
        try:
            return self._load_data(self._file_name(key))
        except OSError:
            return None

    def save(self, key: Any, data: Any) -> None:
        if not self._directory.exists():
            self._directory.mkdir(parents=True, exist_ok=True)
            _remove_old_versions(self._directory)
        self._save_data(self._file_name(key), data)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:24]


def _remove_old_versions(current: Path) -> None:
    others = [path for path in current.parent.glob(f"{_PREFIX}*") if path != current]
    others.sort(key=lambda path: path.stat().st_mtime, reverse=True)
    for path in others[_MAX_VERSIONS:]:
        shutil.rmtree(path, ignore_errors=True)


# ---- where code is kept


@functools.cache
def directories() -> tuple[Path, ...]:
    """The directories that may hold code of this version, in the order in which they are tried.

    They lie in numba's cache directory if one is set (``NUMBA_CACHE_DIR``), else in the package's ``__pycache__``
    and in the user's cache directory. Code in the package is used even by users who can't write there, so the loops
    of an image can be compiled when the image is built.
    """
    here = Path(__file__).parent
    try:
        sources = b"".join(path.read_bytes() for path in sorted(here.glob("*.py")))
    except OSError:
        sources = b""
    if not sources:  # imported from an archive
        return ()
    versions = (numba.__version__, llvmlite.__version__, sys.implementation.cache_tag, sys.platform)
    version = _PREFIX + _digest(repr(versions).encode() + sources)
    config: Any = numba.config
    if config.CACHE_DIR:
        return (Path(config.CACHE_DIR).absolute() / version,)
    of_user = Path(AppDirs("trajstore", appauthor=False).user_cache_dir)
    places = (here / "__pycache__", *([of_user] if of_user.is_absolute() else []))  # relative: no home is known
    return tuple(place / version for place in places)


# ---- what code depends on


def callees(function: FunctionType) -> Iterator[Any]:
    """Compiled loops that a loop may call."""
    return (value for _, value in _globals_of(function) if hasattr(value, "py_func"))


def _constants(function: FunctionType) -> set[tuple[str, str]]:
    """Names and values of the constants that a loop and those that it calls may use, also from other modules."""
    found, ahead, seen = set(), [function], {function}
    while ahead:
        current = ahead.pop()
        for name, value in _globals_of(current):
            if isinstance(value, (bool, int, float, str, tuple, np.generic)):
                found.add((f"{current.__name__}.{name}", repr(value)))
        inner = {loop.py_func for loop in callees(current)} - seen
        seen |= inner
        ahead += inner
    return found


def _globals_of(function: FunctionType) -> Iterator[tuple[str, Any]]:
    names = function.__code__.co_names
    for name in names:
        value = function.__globals__.get(name)
        yield name, value
        if isinstance(value, ModuleType) and value is not np:
            yield from ((f"{name}.{inner}", getattr(value, inner, None)) for inner in names)
