"""Files that lost their names to newer ones: a thread of its own frees their room on the disk.

A file system frees a file when its last name is gone and it is closed, and some take milliseconds for that. A file
that is open when it is replaced is freed when it is closed, which nobody has to wait for.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import sys
from collections import deque
from collections.abc import Iterator

from trajstore.background_pool import BackgroundPool

if sys.platform == "linux":
    import resource

MAX_HELD = 256  # files that wait to be freed, or fewer; further ones are freed when they are replaced
_SHARE_OF_FILES = 4  # one in so many of the files that the process may open
# Only Linux keeps a file alive without opening it for reading, and other systems may refuse to replace an open one.
_HOLD = getattr(os, "O_PATH", 0)

_NOT_HELD = (errno.ENOENT, errno.EMFILE, errno.ENFILE)  # there is no such file, or too many are open


class ReplacedFiles:
    """Keeps replaced files alive until a thread frees them. Thread-safe.

    Nothing is left behind after a crash, because the files have no names.
    """

    def __init__(self) -> None:
        self._held: deque[int] = deque()  # descriptors
        self._most = min(MAX_HELD, _most_open() // _SHARE_OF_FILES)

    def replace(self, path: str, target: str) -> None:
        """Rename a file, and keep alive the one that had the name."""
        if len(self._held) < self._most:
            self._hold(target)
        os.replace(path, target)

    def _hold(self, path: str) -> None:
        try:
            self._held.append(os.open(path, _HOLD | os.O_CLOEXEC))
        except OSError as error:
            if error.errno not in _NOT_HELD:
                raise

    @contextlib.contextmanager
    def freed_later(self) -> Iterator[None]:
        """When the block has ended, have a thread free what was replaced in it."""
        try:
            yield
        finally:
            if self._held:
                _thread_of(os.getpid()).submit(self._free)

    def close_in_child(self) -> None:
        """Close in a child process what its parent will free."""
        self._free()

    def _free(self) -> None:
        while self._held:
            with contextlib.suppress(IndexError):
                os.close(self._held.popleft())


@functools.cache
def _thread_of(process: int) -> BackgroundPool:
    """The thread that frees files, one for all storages of a process; a forked child needs its own."""
    return BackgroundPool(1, "trajstore-free")


def _most_open() -> int:
    """Files that this process may have open; 0 where none is held."""
    if sys.platform != "linux":
        return 0
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_HELD * _SHARE_OF_FILES if soft == resource.RLIM_INFINITY else soft
