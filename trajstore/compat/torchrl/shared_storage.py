"""A `TrajStorage` that another process opened."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Iterable, Mapping
from multiprocessing.connection import Client, Connection
from multiprocessing.context import get_spawning_popen
from typing import Any

import torch
from tensordict import is_tensorclass
from torchrl.data import TensorStorage

import trajstore.errors
from trajstore.compat.torchrl.messages import Message, pack_index, receive, send
from trajstore.compat.torchrl.non_tensor import restore
from trajstore.compat.torchrl.paged_tensor import PagedTensor
from trajstore.compat.torchrl.row_structure import (
    Leaves,
    RowStructure,
    from_leaves,
    marked_keys,
    stack_items,
    to_leaves,
    torch_dtype,
)
from trajstore.compat.torchrl.slot_indexing import is_row_list
from trajstore.compat.torchrl.storage_server import owned_storage
from trajstore.errors import ClosedError
from trajstore.schema import Field

_BUILTIN_ERRORS = {error.__name__: error for error in (IndexError, KeyError, TypeError, ValueError)}
_COUNTERS = ("_len_value", "_mutation_revision_value", "_last_cursor_index_value")


def attach(address: str, options: dict[str, Any], counters: dict[str, Any] | None) -> Any:
    """Return the storage at an address: the storage itself in its own process, otherwise a `SharedTrajStorage`.

    Args:
        address: Where the process that opened the storage listens.
        options: ``max_size``, ``ndim``, ``device``, and ``data_class``.
        counters: Length, revision and cursor in shared memory; None if they cannot be shared.
    """
    return owned_storage(address) or SharedTrajStorage(address, options, counters)


class SharedTrajStorage(TensorStorage):  # type: ignore[misc]
    """A `TrajStorage` that another process opened; unpickling a `TrajStorage` there returns it.

    The process that opened the storage carries out all reads and writes, so all processes see the same rows at
    once. It must be alive and on the same machine. Rows are read when they are used: ``storage[:]`` reads nothing
    until a key is used.
    """

    shared_init = True

    def __init__(self, address: str, options: dict[str, Any], counters: dict[str, Any] | None) -> None:
        super().__init__(None, options["max_size"], device=options["device"], ndim=options["ndim"])
        self._address, self._options, self._shares_counters = address, options, counters is not None
        self.data_class: Any = options["data_class"]
        for name, value in (counters or {}).items():
            setattr(self, name, value)
        self._lock = threading.RLock()
        self._connection: Connection | None = None
        self._pid = -1
        self._version = -1
        self._structure: RowStructure | None = None

    # ---- requests

    def _request(self, call: str, tensors: Leaves | None = None, **arguments: Any) -> tuple[Any, Leaves]:
        """Let the owner carry out a call.

        Raises:
            ClosedError: The owner has closed the storage, has ended, or cannot be reached.
        """
        with self._lock:
            try:
                if self._connection is None or self._pid != os.getpid():
                    self._connect()
                assert self._connection is not None
                send(self._connection, {"call": call, **arguments}, tensors or {})
                reply, leaves = receive(self._connection)
            except (EOFError, OSError, multiprocessing.AuthenticationError) as error:
                self._connection = None
                raise ClosedError(
                    "the process that opened the storage does not answer: it has closed the storage, or has ended,"
                    " or did not start this process with multiprocessing"
                ) from error
        if "error" in reply:
            raise _error(reply)
        if call != "describe" and reply["version"] != self._version:
            self._refresh()
        return reply["result"], leaves

    def _connect(self) -> None:
        self._connection = Client(self._address, authkey=multiprocessing.current_process().authkey)
        self._pid = os.getpid()

    def _refresh(self) -> None:
        """Learn the fields, sizes and length that the owner has now."""
        with self._lock:
            found, _ = self._request("describe")
            self._count(found["counters"])
            self.max_size = found["max_size"]
            if found["fields"] is None:
                return
            fields = {path: Field(dtype, tuple(shape)) for path, (dtype, shape) in found["fields"].items()}
            self._structure = RowStructure(fields)
            self._storage = from_leaves({p: self._paged(p, f, found["n_slots"]) for p, f in fields.items()})
            self.__dict__["_total_shape_value"] = torch.Size([found["n_slots"], *self._structure.lanes(self.ndim)])
            self._version = found["version"]
            self.initialized = True

    def _paged(self, path: str, field: Field, n_slots: int) -> PagedTensor:
        return PagedTensor(
            lambda slots: self._select(slots, [path])[path],
            range(n_slots),
            field.shape,
            torch_dtype(field),
            self.device,
        )

    def _count(self, counters: list[int]) -> None:
        """Take over the owner's counters, unless they are in shared memory."""
        if not self._shares_counters:
            for name, value in zip(_COUNTERS, counters, strict=True):
                getattr(self, name).value = value

    def _select(self, slots: torch.Tensor, fields: Iterable[str] | None = None) -> Leaves:
        chosen = None if fields is None else list(fields)
        _, leaves = self._request("select", {"slots": slots.cpu()}, fields=chosen)
        return {path: leaf.to(self.device) for path, leaf in leaves.items()}

    # ---- TorchRL's calls

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __len__(self) -> int:
        if not self._shares_counters:
            self._refresh()
        length: int = self._len
        return length

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
        """Write rows to slots; see `TrajStorage.set`."""
        data = stack_items(data) if isinstance(data, list) else data
        leaves = to_leaves(data)
        tensors: Leaves = {}
        index = pack_index(cursor, tensors)
        counters, _ = self._request("set", {**leaves, **tensors}, index=index, set_cursor=set_cursor)
        self._count(counters)
        if set_cursor:
            self._last_cursor = cursor
        self.data_class = type(data) if is_tensorclass(data) else None

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def get(self, index: Any) -> Any:
        """Return rows at an index; fields of a slice are read when they are used."""
        if self.initialized and self.ndim == 1 and is_row_list(index, len(self)):
            leaves = self._select(index)
            data, marked = from_leaves(leaves), marked_keys(leaves)
        else:
            self._refresh()
            data, marked = super().get(index), self._structure.marked if self._structure is not None else []
        data = restore(data, marked) if marked else data
        return data if self.data_class is None else self.data_class.from_tensordict(data)

    def _empty(self) -> None:
        self._count(self._request("empty")[0])

    def _apply_conditional_patch(self, index: torch.Tensor, patch: Mapping[Any, torch.Tensor]) -> None:
        assert self._structure is not None  # TorchRL checked the patch against it
        tensors = {self._structure.path(key): value for key, value in patch.items()}
        packed = pack_index(tuple(index.unbind(-1)) if index.ndim > 1 else (index,), tensors)
        self._count(self._request("patch", tensors, index=packed)[0])

    def dumps(self, path: str | os.PathLike[str]) -> None:
        """Let the owner write a dump."""
        self._request("dumps", path=os.path.abspath(path))

    def loads(self, path: str | os.PathLike[str]) -> None:
        """Let the owner replace all rows by those of a dump."""
        self._count(self._request("loads", path=os.path.abspath(path))[0])

    def state_dict(self) -> dict[str, Any]:
        """Not supported here."""
        raise TypeError("state_dict: expected the process that opened the storage, got another one; use dumps here")

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Not supported here."""
        raise TypeError("load_state_dict: expected the process that opened the storage, got another one")

    # ---- continuing and closing

    @property
    def next_slot(self) -> int:
        """The slot after the last one that a writer wrote in its turn."""
        return int(self._request("next_slot")[0][0])

    def resume(self, buffer: Any) -> None:
        """Set a buffer's writer to continue after the last row, or at an empty slot before it."""
        buffer.writer._cursor = int(self._request("next_slot")[0][1])

    def flush(self) -> None:
        """Make all rows durable, those of other processes too."""
        self._request("flush")

    def close(self) -> None:
        """Release the connection; the storage stays open in the process that opened it."""
        with self._lock:
            if self._connection is not None:
                self._connection.close()
            self._connection = None

    def __reduce__(self) -> Any:
        counters = shared_counters(self) if self._shares_counters else None
        return attach, (self._address, self._options, counters), list(self._attached_entities)

    def __setstate__(self, attached: list[Any]) -> None:
        for buffer in attached:
            self.attach(buffer)


def shared_counters(storage: TensorStorage) -> dict[str, Any] | None:
    """Return length, revision and cursor in shared memory; None if a process is not being started.

    `multiprocessing` shares memory only with processes that it starts, when it starts them.
    """
    if get_spawning_popen() is None:
        return None
    return {name: getattr(storage, name) for name in _COUNTERS}


def _error(reply: Message) -> Exception:
    name, text = reply["error"], reply["text"]
    kind = _BUILTIN_ERRORS.get(name) or getattr(trajstore.errors, name, None)
    return kind(text) if kind is not None else RuntimeError(f"{name}: {text}")
