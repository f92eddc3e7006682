"""One stream of a snapshot: its reader, and its spans once they are read."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

from trajstore.background_pool import BackgroundPool
from trajstore.format.commit_record import CommitRecord
from trajstore.format.spans import Spans
from trajstore.schema import Array
from trajstore.storage import Storage
from trajstore.store.stream_reader import SPAN_ARRAYS, StreamReader, concat_spans

_N_THREADS = 256  # reads of spans under way at a time, when each is a request


class StreamView:
    """One stream of a snapshot. Its spans are read once; later snapshots read only new ones."""

    def __init__(self, reader: StreamReader, known: Spans | None = None) -> None:
        self.reader = reader
        self._known = known  # spans that an earlier snapshot has read: a prefix of these
        self._read: tuple[Array, Array] | None = None  # rows of the other ones, if they were read ahead

    @property
    def record(self) -> CommitRecord:
        return self.reader.record

    @property
    def has_spans(self) -> bool:
        """Whether all spans were read, by this view or by that of an earlier snapshot."""
        return "spans" in self.__dict__ or len(self._known or ()) == self.record.spans

    @cached_property
    def spans(self) -> Spans:
        start = 0 if self._known is None else len(self._known)
        read, self._read = self._read, None
        new = self.reader.read_spans(start, read)
        return new if self._known is None else concat_spans([self._known, new])

    def read_array(self, path: str) -> Array:
        """The rows of one of `SPAN_ARRAYS` that are not known."""
        return self.reader.read_rows(path, 0 if self._known is None else len(self._known), self.record.spans)

    def keep(self, ints: Array, floats: Array) -> None:
        """Use these rows as soon as spans are asked for."""
        self._read = (ints, floats)

    def advanced(self, record: CommitRecord) -> StreamView:
        known = self.__dict__.get("spans", self._known)
        return StreamView(self.reader.advanced(record), known)


def read_spans_ahead(storage: Storage, streams: Iterable[StreamView]) -> None:
    """Read the spans of streams at once, where each read is a request. What fails is read again when it is used."""
    unread = [stream for stream in streams if not stream.has_spans]
    if not unread or not storage.is_remote:
        return
    # Not the storage's own threads: reads of many chunks wait for these.
    pool = BackgroundPool(_N_THREADS, "trajstore-spans")
    jobs = [(stream, path) for stream in unread for path in SPAN_ARRAYS]
    found = pool.map(lambda job: job[0].read_array(job[1]), jobs)
    pool.shutdown()
    for i, stream in enumerate(unread):
        ints, floats = found[2 * i : 2 * i + 2]
        if not isinstance(ints, BaseException) and not isinstance(floats, BaseException):
            stream.keep(ints, floats)
