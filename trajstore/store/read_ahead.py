"""Encoded chunks that are fetched in the background before a scan reads them."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from trajstore.background_pool import BackgroundPool

_N_THREADS = 16  # requests, or waves of requests for small objects, that are under way at a time
_MAX_KNOWN = 1 << 16  # keys of chunks that are remembered, so that none is fetched twice

ChunkKey = tuple[str, str, int]  # folder of the stream, path of the field, number of the chunk
Read = Callable[[], Sequence[memoryview]]


@dataclass(slots=True, eq=False)
class _Piece:
    """Chunks that are fetched together."""

    keys: Sequence[ChunkKey]
    n_bytes: int
    position: int
    n_left: int
    work: Future[Sequence[memoryview]]


class ReadAhead:
    """Fetches chunks in the order of the requests, and hands each of them out once.

    A chunk whose fetch failed is not handed out. The reader then reads it itself, when it needs it, and raises the
    error. Thread-safe. Threads exist only while something is fetched. After a fork, the child starts with nothing.

    Args:
        max_bytes: About the most decoded bytes of chunks that are fetched and not handed out yet.

    Attributes:
        max_bytes: The same, for the next requests; may be lowered for a while.
        most_bytes: The same, as it was given.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = self.most_bytes = max_bytes
        self._start_empty()

    def _start_empty(self) -> None:
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._pieces: dict[ChunkKey, _Piece] = {}  # by chunk that was not handed out, in the order of the requests
        self._known: dict[ChunkKey, None] = {}
        self._n_bytes = self._n_unfinished = 0
        self._threads: BackgroundPool | None = None

    def _check_process(self) -> None:
        if self._process != os.getpid():  # the threads that would finish the work do not exist in the child
            self._start_empty()

    @property
    def room(self) -> int:
        """Bytes that may be requested now; 0 until a quarter of them is free, so that requests come in waves."""
        self._check_process()
        free = self.max_bytes - self._n_bytes
        return free if 4 * free >= self.max_bytes else 0

    def keep(self, key: ChunkKey, position: int) -> bool:
        """Keep a requested chunk until the scan has passed ``position``; returns whether it was requested."""
        piece = self._pieces.get(key)
        if piece is not None:
            piece.position = max(piece.position, position)
        return key in self._known

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self._pieces and self._process == os.getpid()

    def request(self, keys: Sequence[ChunkKey], n_bytes: int, position: int, read: Read) -> None:
        """Fetch chunks in the background.

        Args:
            keys: The chunks.
            n_bytes: Bytes that they take, at most.
            position: The number of the part of the scan that needs them; see `forget_before`.
            read: Returns the encoded chunks.
        """
        self._check_process()
        reference = weakref.ref(self)
        with self._lock:
            self._threads = self._threads or BackgroundPool(_N_THREADS, "trajstore-ahead")
            self._n_unfinished += 1
            work = self._threads.submit(_read_if_needed, reference, read)
            piece = _Piece(keys, n_bytes, position, len(keys), work)
            self._pieces.update(dict.fromkeys(keys, piece))
            self._known.update(dict.fromkeys(keys))
            for key in list(self._known)[:-_MAX_KNOWN] if len(self._known) > 2 * _MAX_KNOWN else ():
                del self._known[key]
            self._n_bytes += n_bytes
        work.add_done_callback(lambda _: _note_end(reference))

    def _note_end(self) -> None:
        with self._lock:
            self._n_unfinished -= 1
            if not self._n_unfinished:
                self._threads = None  # threads without a pool end

    def take(self, key: ChunkKey) -> memoryview | None:
        """Hand out a chunk, after waiting for it if it is being fetched.

        None if it was not requested, or its fetch failed.
        """
        self._check_process()
        with self._lock:
            piece = self._pieces.pop(key, None)
            if piece is not None:
                self._release(piece)
        if piece is None:
            return None
        try:
            return piece.work.result()[piece.keys.index(key)]
        except Exception:  # the reader tries again, and its error is raised
            return None

    def _release(self, piece: _Piece) -> None:
        piece.n_left -= 1
        if not piece.n_left:
            self._n_bytes -= piece.n_bytes

    def _drop(self, keys: Sequence[ChunkKey]) -> None:
        with self._lock:
            pieces = [self._pieces.pop(key) for key in keys if key in self._pieces]
            for piece in pieces:
                self._release(piece)
        for piece in pieces:  # without the lock: a piece that is cancelled calls `_note_end`
            piece.work.cancel()

    def forget_before(self, position: int) -> None:
        """Drop chunks that were requested for parts of the scan that are over, and not used there."""
        self._check_process()
        with self._lock:
            stale = [key for key, piece in self._pieces.items() if piece.position < position]
        self._drop(stale)

    def clear(self) -> None:
        """Drop everything, and forget which chunks were requested. What is being fetched is not waited for."""
        self._check_process()
        self._drop(list(self._pieces))
        self._known.clear()

    def close(self) -> None:
        """Drop everything, and wait for the end of the requests that are under way."""
        self.clear()
        threads = self._threads
        if threads is not None:
            threads.shutdown()


def _read_if_needed(reference: weakref.ref[ReadAhead], read: Read) -> Sequence[memoryview]:
    return () if reference() is None else read()  # an abandoned scan needs nothing


def _note_end(reference: weakref.ref[ReadAhead]) -> None:
    ahead = reference()
    if ahead is not None:
        ahead._note_end()
