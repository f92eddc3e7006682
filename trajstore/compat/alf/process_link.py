"""Adds experience from other processes: they send it to the process that has the buffer, which adds it."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import secrets
import threading
import weakref
from collections.abc import Callable
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

from trajstore.compat.alf.default_device import is_plain_torch, plain_torch
from trajstore.compat.alf.nested_tensors import leaves_by_path
from trajstore.compat.alf.process_messages import decode_batch, decode_error, encode_batch, encode_error
from trajstore.errors import ClosedError, StorageError

_log = logging.getLogger(__name__)
_POLL_S = 1.0  # how often a waiting process checks that the process that has the buffer still runs
_CLOSED = "the process that has the replay buffer closed it or ended; these steps were not added"
_LOST = "the process that has the replay buffer closed it or ended; these steps may not have been added"


class OwnerLock:
    """A reentrant lock for the threads of one process, within which torch has its own default device.

    A forked process is refused, because its copy of the buffer does not change.
    """

    def __init__(self) -> None:
        self._lock, self._pid = threading.RLock(), os.getpid()
        self._depth = 0  # how often the thread that has the lock entered it
        self._contexts: list[tuple[int, contextlib.AbstractContextManager[Any]]] = []

    def __enter__(self) -> None:
        if os.getpid() != self._pid:
            raise ClosedError(
                f"this replay buffer belongs to process {self._pid}, and this is a forked process, {os.getpid()};"
                " with allow_multiprocess=True, other processes may call add_batch, and nothing else"
            )
        self._lock.acquire()
        self._depth += 1
        if not is_plain_torch():
            self._contexts.append((self._depth, plain_torch()))
            self._contexts[-1][1].__enter__()

    def __exit__(self, *error: Any) -> None:
        if self._contexts and self._contexts[-1][0] == self._depth:
            self._contexts.pop()[1].__exit__(*error)
        self._depth -= 1
        self._lock.release()


class RemoteReplayBuffer:
    """A replay buffer of another process: experience that is added here is added there.

    A process gets one when a `trajstore.compat.alf.ReplayBuffer` with ``allow_multiprocess`` is sent to it.

    Args:
        address: Where the other process listens.
        key: The key that both processes have.
    """

    def __init__(self, address: str, key: bytes) -> None:
        self.address, self.key = address, key
        self._local = threading.local()  # each thread has its own connection

    def __reduce__(self) -> tuple[type[RemoteReplayBuffer], tuple[str, bytes]]:
        return RemoteReplayBuffer, (self.address, self.key)

    def add_batch(self, batch: Any, env_ids: Any = None, blocking: bool = False) -> None:
        """Add one step to each of some environments; see `trajstore.compat.alf.ReplayBuffer.add_batch`.

        The call returns when the other process has the steps. An error there is raised here.

        Raises:
            StorageError: The other process closed the buffer or ended.
        """
        message = encode_batch(leaves_by_path(batch), env_ids, blocking)
        try:
            error = self._exchange(message)
        except (OSError, EOFError) as failure:
            self._local.connection = None
            raise StorageError(_LOST) from failure
        if error is not None:
            raise error

    def _exchange(self, message: bytes) -> Exception | None:
        connection, parent = self._connection(), multiprocessing.parent_process()
        connection.send_bytes(message)
        while not connection.poll(_POLL_S):
            if parent is not None and not parent.is_alive():
                raise EOFError
        return decode_error(connection.recv_bytes())

    def _connection(self) -> Connection:
        pid, connection = getattr(self._local, "connection", None) or (None, None)
        if connection is None or pid != os.getpid():  # a forked process cannot share the connection of its parent
            connection = Client(self.address, authkey=self.key)
            self._local.connection = os.getpid(), connection
        return connection


class ProcessLink(RemoteReplayBuffer):
    """Receives experience from other processes, in the process that has the buffer.

    A forked process has a copy of this object, which sends.

    Args:
        add: A method of the buffer that adds a batch; called from other threads. The buffer is not kept alive.
    """

    def __init__(self, add: Callable[[Any, Any, bool], None]) -> None:
        key = secrets.token_bytes(32)
        self._listener = Listener(backlog=64, authkey=key)
        super().__init__(str(self._listener.address), key)
        self._pid, self._is_closed = os.getpid(), threading.Event()
        _start(_accept, self._listener, weakref.WeakMethod(add), self._is_closed)

    @property
    def is_remote(self) -> bool:
        """Whether this process is not the one that has the buffer."""
        return os.getpid() != self._pid

    def close(self) -> None:
        """Accept no further connections; does nothing in other processes, or if called twice."""
        if self.is_remote or self._is_closed.is_set():
            return
        self._is_closed.set()
        with contextlib.suppress(OSError, EOFError):
            Client(self.address, authkey=self.key).close()  # wakes the thread that accepts
        self._listener.close()


def _start(target: Callable[..., None], *args: Any) -> None:
    threading.Thread(target=target, args=args, name="trajstore-alf-processes", daemon=True).start()


def _accept(listener: Listener, add: weakref.WeakMethod[Any], is_closed: threading.Event) -> None:
    while not is_closed.is_set():
        try:
            connection = listener.accept()
        except multiprocessing.AuthenticationError:
            _log.warning("a process without the key tried to add experience; it was refused")
        except (OSError, EOFError):  # the process that connected ended, or the listener was closed
            continue
        else:
            _start(_serve, connection, add, is_closed)


def _serve(connection: Connection, add: weakref.WeakMethod[Any], is_closed: threading.Event) -> None:
    with connection, contextlib.suppress(OSError, EOFError):  # the other process ended
        while True:
            error = _try_to_add(add, is_closed, connection.recv_bytes())
            connection.send_bytes(encode_error(error))


def _try_to_add(add: weakref.WeakMethod[Any], is_closed: threading.Event, message: bytes) -> Exception | None:
    """Return the error that adding raised."""
    method = add()
    if method is None or is_closed.is_set():
        return StorageError(_CLOSED)
    try:
        method(*decode_batch(message))
    except Exception as error:
        return error.with_traceback(None)  # or the buffer would stay alive with the error
    return None
