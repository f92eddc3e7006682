"""The episode table of a followed writer's store, with the episodes that are not committed yet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from trajstore.format.episode_table import EpisodeTable
from trajstore.format.spans import Spans, VisibleSpans, span_columns
from trajstore.store.snapshot import Snapshot
from trajstore.store.stream_reader import concat_spans
from trajstore.writing.commit_batch import CommitBatch
from trajstore.writing.writer import Writer

_TextReader = Callable[[int, int], bytes]  # reads bytes [start, stop) of a stream's text


def table_with_pending_episodes(snapshot: Snapshot, writer: Writer) -> tuple[EpisodeTable, list[str]]:
    """The episode table as it would be after a commit of the writer now, and the ids of its streams.

    Waits for a running commit of the writer. Cost is proportional to the steps that are not committed, and to the
    episodes.
    """
    record, staged = writer.staged_spans()
    if record is not None:
        snapshot = snapshot.advanced(record)
    schema = snapshot.schema or writer.schema
    if staged is None or schema is None:
        return snapshot.episodes, snapshot.names
    names, parts = snapshot.names, snapshot.parts()
    readers: list[_TextReader] = [reader.read_text for reader in snapshot.readers]
    added = Spans(staged.span_ints, staged.span_floats)
    if record is None:
        names = [*names, writer.stream]
        parts = [*parts, VisibleSpans(len(names) - 1, len(readers), added, span_columns(schema), 0, False)]
        readers = [*readers, _text_reader(lambda start, stop: b"", 0, staged)]
    else:
        source = next(i for i, reader in enumerate(snapshot.readers) if reader.record.id == writer.stream)
        parts[source] = replace(parts[source], spans=concat_spans([parts[source].spans, added]))
        readers[source] = _text_reader(readers[source], record.text_bytes, staged)
    return EpisodeTable(names, parts, schema, lambda s, a, b: readers[s](a, b)), names


def _text_reader(committed: _TextReader, n_committed: int, staged: CommitBatch) -> _TextReader:
    """Reads text of episodes from the stream, and behind its ``n_committed`` bytes from a commit to come."""

    def read(start: int, stop: int) -> bytes:
        durable = committed(start, min(stop, n_committed)) if start < n_committed else b""
        return durable + staged.text[max(0, start - n_committed) : max(0, stop - n_committed)]

    return read
