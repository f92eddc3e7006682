"""Direct lines between a learner and actors on the same machine: batches are written where they are read.

A call of Ray costs about as much as making a batch of pixels does, and so does the copy of the batch into its
object store. A learner therefore asks actors on its own machine over a socket, and hands them memory of its own to
write into. Whoever dies is noticed by the other at once, as the socket ends, and nothing is left behind: neither
the memory nor, once both are connected, the socket has a name.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import shutil
import socket
import struct
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trajstore.schema import Array

_ALIGN = 64
_RANK = struct.Struct("<q")
_REQUEST = struct.Struct("<qqqq")  # slot, bytes of its memory where that comes along, first row, row after the last
_ANSWER = struct.Struct("<?q?dddddd")  # whether it went well, actor; the share
_CONNECT_S = 10.0
_MAX_SLOTS = 16


class LineLostError(ConnectionError):
    """The other end is gone, or could not do what it was asked: ask it through Ray, which says why."""


@dataclass(frozen=True)
class Share:
    """How much an actor has of what a batch is drawn in proportion to.

    Attributes:
        parts: The two parts of a batch as fraction and amount: windows here, or the sum of their masses.
        least: The smallest probability that a window has here; for weights.
        beta: The exponent of the weights.
        is_by_buffer: Whether weights are divided by the largest of the buffer; else of the batch.
    """

    parts: tuple[tuple[float, float], tuple[float, float]] = ((0.0, 0.0), (0.0, 0.0))
    least: float = math.inf
    beta: float = 0.0
    is_by_buffer: bool = False


@dataclass(frozen=True)
class Column:
    """Where the rows of one tensor lie in a slot."""

    start: int
    dtype: str
    shape: tuple[int, ...]
    is_bfloat16: bool

    def array(self, memory: Any, n: int) -> Array:
        count = n * math.prod(self.shape)
        return np.frombuffer(memory, self.dtype, count, self.start).reshape(n, *self.shape)

    def tensor(self, array: Array) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        return tensor.view(torch.bfloat16) if self.is_bfloat16 else tensor


@dataclass(frozen=True)
class Layout:
    """The tensors of a batch of ``n`` windows, one after the other."""

    n: int
    columns: Mapping[str, Column]
    n_bytes: int

    @classmethod
    def of(cls, flat: Mapping[str, torch.Tensor], n: int) -> Layout:
        columns, start = {}, 0
        for key, value in flat.items():
            is_odd = value.dtype == torch.bfloat16
            dtype = np.dtype(np.int16) if is_odd else value[:0].numpy().dtype
            columns[key] = Column(start, dtype.str, tuple(value.shape[1:]), is_odd)
            n_bytes = n * math.prod(value.shape[1:]) * dtype.itemsize
            start += -(-n_bytes // _ALIGN) * _ALIGN
        return cls(n, columns, max(start, 1))


class Slot:
    """Memory for one batch at a time, made by a learner and mapped by actors."""

    def __init__(self, number: int, n_bytes: int) -> None:
        self.number, self.n_bytes = number, n_bytes
        self.handle = os.memfd_create("trajstore")
        try:
            os.posix_fallocate(self.handle, 0, n_bytes)  # now, rather than a fatal signal when it is written
            self.memory = _mapped(self.handle, n_bytes)
        except BaseException:
            os.close(self.handle)
            raise

    def __del__(self) -> None:
        if hasattr(self, "memory"):
            os.close(self.handle)


def _mapped(handle: int, n_bytes: int) -> mmap.mmap:
    return mmap.mmap(handle, n_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)


class Lease:
    """A slot in use: until the last tensor on it is gone."""

    def __init__(self, slot: Slot, free: deque[Slot]) -> None:
        self.slot, self._free = slot, free

    def __del__(self) -> None:
        self._free.append(self.slot)

    def tensors(self, layout: Layout) -> dict[str, torch.Tensor]:
        """The whole batch; each tensor holds the lease."""
        return {
            key: column.tensor(np.asarray(_Held(column.array(self.slot.memory, layout.n), self)))
            for key, column in layout.columns.items()
        }


class _Held:
    """An array that keeps something else alive."""

    def __init__(self, array: Array, owner: object) -> None:
        self._array, self._owner = array, owner
        self.__array_interface__ = array.__array_interface__


class Line:
    """The learner's end, to one actor. Answers come in the order of requests."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._known: set[int] = set()
        self.is_lost = False

    def rank(self) -> int:
        """Of the actor, which says so first."""
        self._end.settimeout(_CONNECT_S)
        data = self._end.recv(_RANK.size)
        self._end.settimeout(None)
        if not data:
            raise LineLostError("the actor was gone as soon as it had come")
        rank: int = _RANK.unpack(data)[0]
        return rank

    def ask(self, slot: Slot, start: int, stop: int) -> None:
        """Let rows of a slot be written."""
        is_new = slot.number not in self._known
        self._known.add(slot.number)
        request = _REQUEST.pack(slot.number, slot.n_bytes if is_new else 0, start, stop)
        self._send(request, [slot.handle] if is_new else [])

    def ask_share(self) -> None:
        """Ask only how much the actor has."""
        self._send(_REQUEST.pack(-1, 0, 0, 0), [])

    def _send(self, request: bytes, handles: list[int]) -> None:
        try:
            socket.send_fds(self._end, [request], handles)
        except OSError as error:
            self.close()
            raise LineLostError(str(error)) from error

    def answer(self) -> tuple[int, Share]:
        """The number of the actor, and what the next draw is in proportion to."""
        try:
            data = b"" if self.is_lost else self._end.recv(_ANSWER.size)
        except OSError as error:
            self.close()
            raise LineLostError(str(error)) from error
        if not data or not _ANSWER.unpack(data)[0]:
            self.close()
            raise LineLostError("the actor is gone, or could not give the batch")
        _, actor, is_by_buffer, *amounts, least, beta = _ANSWER.unpack(data)
        parts = (amounts[0], amounts[1]), (amounts[2], amounts[3])
        return actor, Share(parts, least, beta, is_by_buffer)

    def close(self) -> None:
        self.is_lost = True
        self._end.close()

    def __del__(self) -> None:  # also of a handle that nobody has closed: the actor's thread ends with it
        self.close()


class Lines:
    """Lines of one learner to all actors that are on its machine, for one kind of batch."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.lines: dict[int, Line] = {}
        self._free: deque[Slot] = deque()
        self._n_made = 0

    @staticmethod
    def are_possible() -> bool:
        return all(hasattr(os, name) for name in ("memfd_create", "posix_fallocate"))

    def connect(self, invite: Callable[[str], int]) -> None:
        """Listen at an address, tell actors, and accept as many as say that they have come."""
        place = Path(tempfile.mkdtemp(prefix="trajstore-"))  # which nobody else may enter
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door:
                door.bind(str(place / "line"))
                door.listen()
                door.settimeout(_CONNECT_S)
                for _ in range(invite(str(place / "line"))):
                    line = Line(door.accept()[0])
                    self.lines[line.rank()] = line
        except OSError:
            self.close()
        finally:
            shutil.rmtree(place, ignore_errors=True)

    def lease(self) -> Lease | None:
        """Memory for a batch; None where all is in use, or none is to be had."""
        with contextlib.suppress(IndexError):
            return Lease(self._free.pop(), self._free)  # the last one used: processors still know it
        if self._n_made >= _MAX_SLOTS or not self.lines:
            return None
        try:
            slot = Slot(self._n_made, self.layout.n_bytes)
        except OSError:
            return None
        self._n_made += 1
        return Lease(slot, self._free)

    def shares(self) -> list[Share]:
        """How much every actor has, by rank; nothing else is on its way."""
        for line in self.lines.values():
            line.ask_share()
        return [self.lines[rank].answer()[1] for rank in sorted(self.lines)]

    @property
    def is_lost(self) -> bool:
        return any(line.is_lost for line in self.lines.values())

    def close(self) -> None:
        for line in self.lines.values():
            line.close()


Fill = Callable[[dict[str, torch.Tensor] | None], tuple[int, Share]]


def serve(address: str, rank: int, layout: Layout, fill: Fill) -> bool:
    """Begin to answer a learner, on a thread; False if it can't be reached from here.

    Args:
        address: Where it listens.
        rank: Of this actor.
        layout: Of its batches.
        fill: Writes rows of a batch into tensors, or nothing if it gets none; returns the actor's number and its
            share.
    """
    end = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        end.connect(address)
        end.send(_RANK.pack(rank))
    except OSError:  # another machine, most likely
        end.close()
        return False
    threading.Thread(target=_Desk(end, layout, fill).answer_all, daemon=True).start()
    return True


class _Desk:
    """The actor's end of a line."""

    def __init__(self, end: socket.socket, layout: Layout, fill: Fill) -> None:
        self._end, self._layout, self._fill = end, layout, fill
        self._arrays: dict[int, dict[str, Array]] = {}  # of every slot that the learner has shown
        self._outs: dict[tuple[int, int, int], dict[str, torch.Tensor]] = {}

    def answer_all(self) -> None:
        with self._end, contextlib.suppress(OSError):  # the learner is gone
            while True:
                data, handles, _, _ = socket.recv_fds(self._end, _REQUEST.size, 1)
                if not data:
                    return
                slot, n_bytes, start, stop = _REQUEST.unpack(data)
                for handle in handles:
                    self._show(slot, handle, n_bytes)
                self._end.send(self._answer(None if slot < 0 else self._out((slot, start, stop))))

    def _show(self, slot: int, handle: int, n_bytes: int) -> None:
        memory = _mapped(handle, n_bytes)
        os.close(handle)
        columns = self._layout.columns.items()
        self._arrays[slot] = {key: column.array(memory, self._layout.n) for key, column in columns}

    def _out(self, rows: tuple[int, int, int]) -> dict[str, torch.Tensor]:
        """Rows of a slot as tensors; the newest ones are kept, as making them takes longer than small batches."""
        if rows not in self._outs:
            slot, start, stop = rows
            columns, arrays = self._layout.columns, self._arrays[slot]
            out = {key: columns[key].tensor(array[start:stop]) for key, array in arrays.items()}
            self._outs = {**(self._outs if len(self._outs) < _MAX_SLOTS else {}), rows: out}
        return self._outs[rows]

    def _answer(self, out: dict[str, torch.Tensor] | None) -> bytes:
        try:
            actor, share = self._fill(out)
        except Exception:  # the learner asks again through Ray, and gets to know it there
            return _ANSWER.pack(False, 0, False, *[0.0] * 6)
        amounts = (number for part in share.parts for number in part)
        return _ANSWER.pack(True, actor, share.is_by_buffer, *amounts, share.least, share.beta)
