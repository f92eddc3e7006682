"""The owner's side of a storage that other processes use: a thread per process that carries out its requests."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import threading
from collections.abc import Callable
from multiprocessing.connection import Client, Connection, Listener
from typing import TYPE_CHECKING, Any

from trajstore.compat.torchrl.messages import Message, receive, send, unpack_index
from trajstore.compat.torchrl.non_tensor import restore
from trajstore.compat.torchrl.row_structure import Leaves, from_leaves, marked_keys

if TYPE_CHECKING:
    from trajstore.compat.torchrl.storage import TrajStorage

_log = logging.getLogger(__name__)
_owned: dict[tuple[int, str], TrajStorage] = {}


def owned_storage(address: str) -> TrajStorage | None:
    """Return the storage that this process serves at an address; None if another process does."""
    return _owned.get((os.getpid(), address))


class StorageServer:
    """Lets other processes use a storage, which stays open until it is closed or the process ends.

    Only processes with the authentication key of `multiprocessing` may connect: those that this process starts.

    Attributes:
        address: Where it listens.
    """

    def __init__(self, storage: TrajStorage) -> None:
        self._storage = storage
        self._listener = Listener(backlog=64, authkey=multiprocessing.current_process().authkey)
        self.address: str = self._listener.address
        self._is_closed = False
        _owned[os.getpid(), self.address] = storage
        self._run(self._accept)

    def _run(self, work: Callable[..., None], *arguments: Any) -> None:
        threading.Thread(target=work, args=arguments, name="trajstore-torchrl-server", daemon=True).start()

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                connection = self._listener.accept()
            except multiprocessing.AuthenticationError:
                _log.warning("a process without the authentication key of this one tried to use a TrajStorage")
            except (EOFError, OSError):  # a process that ended while it connected, or `close`
                continue
            else:
                self._run(self._serve, connection)
        self._listener.close()

    def _serve(self, connection: Connection) -> None:
        with contextlib.suppress(EOFError, OSError), connection:
            while True:
                request, tensors = receive(connection)
                send(connection, *self._answer(request, tensors))

    def _answer(self, request: Message, tensors: Leaves) -> tuple[Message, Leaves]:
        storage = self._storage
        try:
            storage.check_usable()
            result, leaves = _CALLS[request["call"]](storage, request, tensors)
        except Exception as error:  # it is raised in the process that asked
            return {"error": type(error).__name__, "text": str(error)}, {}
        return {"result": result, "version": storage.table_version}, leaves

    def close(self) -> None:
        """Accept no more processes; requests of those that are connected fail, because the storage is closed."""
        self._is_closed = True
        _owned.pop((os.getpid(), self.address), None)
        with contextlib.suppress(EOFError, OSError):
            Client(self.address).close()  # wakes the thread that accepts


def _describe(storage: TrajStorage, request: Message, tensors: Leaves) -> tuple[Any, Leaves]:
    table = storage.table
    fields = None if table is None else {p: [f.dtype, list(f.shape)] for p, f in table.structure.fields.items()}
    return {
        "fields": fields,
        "n_slots": 0 if table is None else table.n_slots,
        "max_size": storage.max_size,
        "counters": storage.counters,
        "version": storage.table_version,
    }, {}


def _set(storage: TrajStorage, request: Message, tensors: Leaves) -> tuple[Any, Leaves]:
    index = unpack_index(request["index"], tensors)
    data = from_leaves(tensors)
    if marked := marked_keys(tensors):
        data = restore(data, marked)
    storage.set(index, storage.as_data_class(data), set_cursor=request["set_cursor"])
    return storage.counters, {}


def _select(storage: TrajStorage, request: Message, tensors: Leaves) -> tuple[Any, Leaves]:
    if storage.table is None:
        raise IndexError("the storage has no rows")
    return storage.counters, storage.table.select(tensors["slots"], request["fields"])


def _patch(storage: TrajStorage, request: Message, tensors: Leaves) -> tuple[Any, Leaves]:
    index = unpack_index(request["index"], tensors)
    storage.patch(index, tensors)
    return storage.counters, {}


def _empty(storage: TrajStorage, request: Message, tensors: Leaves) -> tuple[Any, Leaves]:
    storage._empty()
    return storage.counters, {}


def _flush(storage: TrajStorage, request: Message, tensors: Leaves) -> tuple[Any, Leaves]:
    storage.flush()
    return storage.counters, {}


def _dumps(storage: TrajStorage, request: Message, tensors: Leaves) -> tuple[Any, Leaves]:
    storage.dumps(request["path"])
    return storage.counters, {}


def _loads(storage: TrajStorage, request: Message, tensors: Leaves) -> tuple[Any, Leaves]:
    storage.loads(request["path"])
    return storage.counters, {}


def _next_slot(storage: TrajStorage, request: Message, tensors: Leaves) -> tuple[Any, Leaves]:
    return [storage.next_slot, storage.resume_slot()], {}


_CALLS: dict[str, Callable[[TrajStorage, Message, Leaves], tuple[Any, Leaves]]] = {
    "describe": _describe,
    "set": _set,
    "select": _select,
    "patch": _patch,
    "empty": _empty,
    "flush": _flush,
    "dumps": _dumps,
    "loads": _loads,
    "next_slot": _next_slot,
}
