"""One stream of a snapshot: its reader, and its spans once they are read."""

from __future__ import annotations

from functools import cached_property

from trajstore.format.commit_record import CommitRecord
from trajstore.format.spans import Spans
from trajstore.store.stream_reader import StreamReader, concat_spans


class StreamView:
    """One stream of a snapshot. Its spans are read once; later snapshots read only new ones."""

    def __init__(self, reader: StreamReader, known: Spans | None = None) -> None:
        self.reader = reader
        self._known = known  # spans that an earlier snapshot has read: a prefix of these

    @property
    def record(self) -> CommitRecord:
        return self.reader.record

    @cached_property
    def spans(self) -> Spans:
        if self._known is None:
            return self.reader.read_spans()
        return concat_spans([self._known, self.reader.read_spans(len(self._known))])

    def advanced(self, record: CommitRecord) -> StreamView:
        known = self.__dict__.get("spans", self._known)
        return StreamView(self.reader.advanced(record), known)
