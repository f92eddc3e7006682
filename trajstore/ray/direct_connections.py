"""Direct connections between a learner and actors on the same machine: actors write into the learner's memory.

A call through Ray costs about as much as assembling a batch of pixels, and so does the copy of the batch into
Ray's object store. A learner therefore asks actors on its own machine over a socket, and shares memory with them.
When one end dies, the socket closes and the other end notices at once. Nothing is left behind: neither the memory
nor, once both ends are connected, the socket has a name in the file system.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import struct
import tempfile
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path

import torch

from trajstore.ray.batch_memory import BatchLayout, BatchMemory, MemoryLease, map_memory
from trajstore.ray.draw_weights import DrawWeight
from trajstore.schema import Array

_RANK = struct.Struct("<q")
_REQUEST = struct.Struct("<qqqq")  # number of the memory; its bytes if the descriptor comes along; start and stop
_ANSWER = struct.Struct("<?q?dddddd")  # whether it succeeded; number of the actor; its draw weight
_WEIGHT_ONLY = -1  # number of the memory in a request for the draw weight
_CONNECT_S = 10.0
_MAX_MEMORIES = 16


class ConnectionLostError(ConnectionError):
    """The actor is gone or could not answer. Ask it through Ray, which raises the reason."""


class ActorConnection:
    """A learner's connection to one actor. Answers come in the order of requests."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._sent_memories: set[int] = set()  # numbers of the memory that the actor has mapped
        self.is_lost = False

    def receive_rank(self) -> int:
        """The rank of the actor, which is the first thing that it sends."""
        self._socket.settimeout(_CONNECT_S)
        data = self._socket.recv(_RANK.size)
        self._socket.settimeout(None)
        if not data:
            raise ConnectionLostError("the actor closed the connection before it sent its rank")
        rank: int = _RANK.unpack(data)[0]
        return rank

    def request_windows(self, memory: BatchMemory, start: int, stop: int) -> None:
        """Ask the actor to write windows ``start`` to ``stop`` of the batch in this memory."""
        is_new = memory.number not in self._sent_memories
        self._sent_memories.add(memory.number)
        request = _REQUEST.pack(memory.number, memory.n_bytes if is_new else 0, start, stop)
        self._send(request, [memory.descriptor] if is_new else [])

    def request_weight(self) -> None:
        """Ask the actor for its draw weight only."""
        self._send(_REQUEST.pack(_WEIGHT_ONLY, 0, 0, 0), [])

    def _send(self, request: bytes, descriptors: list[int]) -> None:
        try:
            socket.send_fds(self._socket, [request], descriptors)
        except OSError as error:
            self.close()
            raise ConnectionLostError(str(error)) from error

    def receive_answer(self) -> tuple[int, DrawWeight]:
        """Wait for the next answer: the number of the actor, and its weight for the next draw."""
        try:
            data = b"" if self.is_lost else self._socket.recv(_ANSWER.size)
        except OSError as error:
            self.close()
            raise ConnectionLostError(str(error)) from error
        if not data or not _ANSWER.unpack(data)[0]:
            self.close()
            raise ConnectionLostError("the actor is gone, or could not write the windows")
        return _unpack_answer(data)

    def close(self) -> None:
        self.is_lost = True
        self._socket.close()

    def __del__(self) -> None:  # for handles that are never closed: it ends the actor's thread
        self.close()


class ActorConnections:
    """A learner's connections to all actors on its machine, for one kind of batch.

    Attributes:
        layout: Layout of the batches.
        by_rank: The connections, by rank of the actor.
    """

    def __init__(self, layout: BatchLayout) -> None:
        self.layout = layout
        self.by_rank: dict[int, ActorConnection] = {}
        self._free: deque[BatchMemory] = deque()
        self._n_memories = 0

    @staticmethod
    def are_possible() -> bool:
        """Whether the operating system has what they need."""
        return all(hasattr(os, name) for name in ("memfd_create", "posix_fallocate"))

    def connect(self, invite: Callable[[str], int]) -> None:
        """Listen on a socket and accept the actors that connect.

        Args:
            invite: Sends the address of the socket to all actors; returns how many have connected.
        """
        directory = Path(tempfile.mkdtemp(prefix="trajstore-"))  # other users can't enter it
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
                listener.bind(str(directory / "line"))
                listener.listen()
                listener.settimeout(_CONNECT_S)
                for _ in range(invite(str(directory / "line"))):
                    connection = ActorConnection(listener.accept()[0])
                    self.by_rank[connection.receive_rank()] = connection
        except OSError:
            self.close()
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    def lease_memory(self) -> MemoryLease | None:
        """Memory for a batch; None if too much is in use, or the system has none left."""
        with contextlib.suppress(IndexError):
            return MemoryLease(self._free.pop(), self._free)  # the last one used is still in the processor's cache
        if self._n_memories >= _MAX_MEMORIES or not self.by_rank:
            return None
        try:
            memory = BatchMemory(self._n_memories, self.layout.n_bytes)
        except OSError:
            return None
        self._n_memories += 1
        return MemoryLease(memory, self._free)

    def weights(self) -> list[DrawWeight]:
        """The draw weights of all connected actors, by rank; no other answers may be outstanding."""
        for connection in self.by_rank.values():
            connection.request_weight()
        return [self.by_rank[rank].receive_answer()[1] for rank in sorted(self.by_rank)]

    @property
    def is_lost(self) -> bool:
        """Whether any of the connections is lost."""
        return any(connection.is_lost for connection in self.by_rank.values())

    def close(self) -> None:
        for connection in self.by_rank.values():
            connection.close()


# ---- the actor's end

WriteWindows = Callable[[dict[str, torch.Tensor] | None], tuple[int, DrawWeight]]


def serve_learner(address: str, rank: int, layout: BatchLayout, write_windows: WriteWindows) -> bool:
    """Connect an actor to a learner and start a thread that answers it; False if the learner can't be reached.

    Args:
        address: Address of the learner's socket.
        rank: Rank of the actor.
        layout: Layout of the learner's batches.
        write_windows: Draws windows and writes them into tensors; with None it draws nothing. Returns the number of
            the actor and its weight for the next draw.
    """
    end = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        end.connect(address)
        end.send(_RANK.pack(rank))
    except OSError:  # the learner is probably on another machine
        end.close()
        return False
    connection = _LearnerConnection(end, layout, write_windows)
    threading.Thread(target=connection.answer_requests, daemon=True).start()
    return True


class _LearnerConnection:
    """An actor's connection to one learner."""

    def __init__(self, end: socket.socket, layout: BatchLayout, write_windows: WriteWindows) -> None:
        self._socket, self._layout, self._write_windows = end, layout, write_windows
        self._arrays: dict[int, dict[str, Array]] = {}  # by number of the memory: the whole batch
        self._tensors: dict[tuple[int, int, int], dict[str, torch.Tensor]] = {}  # by memory, start and stop

    def answer_requests(self) -> None:
        """Answer requests until the learner closes the connection."""
        with self._socket, contextlib.suppress(OSError):  # the learner is gone
            while True:
                data, descriptors, _, _ = socket.recv_fds(self._socket, _REQUEST.size, 1)
                if not data:
                    return
                memory, n_bytes, start, stop = _REQUEST.unpack(data)
                for descriptor in descriptors:
                    self._map(memory, descriptor, n_bytes)
                out = None if memory == _WEIGHT_ONLY else self._windows(memory, start, stop)
                self._socket.send(self._answer(out))

    def _map(self, memory: int, descriptor: int, n_bytes: int) -> None:
        mapped = map_memory(descriptor, n_bytes)
        os.close(descriptor)
        tensors = self._layout.tensors.items()
        self._arrays[memory] = {key: tensor.view(mapped, self._layout.n_windows) for key, tensor in tensors}

    def _windows(self, memory: int, start: int, stop: int) -> dict[str, torch.Tensor]:
        """Windows of a batch as tensors. The last ones are kept: making them takes longer than a small batch."""
        key = memory, start, stop
        if key not in self._tensors:
            layouts, arrays = self._layout.tensors, self._arrays[memory]
            out = {name: layouts[name].to_tensor(array[start:stop]) for name, array in arrays.items()}
            self._tensors = {**(self._tensors if len(self._tensors) < _MAX_MEMORIES else {}), key: out}
        return self._tensors[key]

    def _answer(self, out: dict[str, torch.Tensor] | None) -> bytes:
        try:
            actor, weight = self._write_windows(out)
        except Exception:  # the learner asks again through Ray, which raises it there
            return _ANSWER.pack(False, 0, False, *[0.0] * 6)
        return _pack_answer(actor, weight)


def _pack_answer(actor: int, weight: DrawWeight) -> bytes:
    parts = (number for part in weight.parts for number in part)
    return _ANSWER.pack(True, actor, weight.is_by_buffer, *parts, weight.least_probability, weight.beta)


def _unpack_answer(data: bytes) -> tuple[int, DrawWeight]:
    _, actor, is_by_buffer, *parts, least_probability, beta = _ANSWER.unpack(data)
    weight = DrawWeight(((parts[0], parts[1]), (parts[2], parts[3])), least_probability, beta, is_by_buffer)
    return actor, weight
