"""The HTML of stores and snapshots: episodes, fields, streams and checkpoints, without reading a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

from trajstore.format.commit_record import CommitRecord
from trajstore.format.episode_html import statistics_section
from trajstore.format.episode_table import EpisodeTable
from trajstore.format.lineage import Lineage
from trajstore.format.marks import Marks
from trajstore.html_blocks import Section, count, facts, moment, representation, table
from trajstore.schema import Schema
from trajstore.storage import Storage

_MAX_STREAMS = 20
_MAX_CHECKPOINTS = 20


class View(Protocol):
    """What these functions need of a snapshot."""

    @property
    def schema(self) -> Schema | None: ...
    @property
    def streams(self) -> tuple[CommitRecord, ...]: ...
    @property
    def n_rows(self) -> int: ...
    @property
    def episodes(self) -> EpisodeTable: ...
    @property
    def lineage(self) -> Lineage: ...
    @property
    def storage(self) -> Storage: ...


class SnapshotHtml:
    """The part of a `Snapshot` that notebooks show."""

    def _repr_html_(self: View) -> str:
        return representation("Snapshot", self.storage.display, partial(summary, self), sections(self))


def summary(view: View) -> str:
    """One line, for which nothing is read."""
    return f"{count(len(view.streams), 'stream')}, {count(view.n_rows, 'row')}"


def sections(view: View) -> list[Callable[[], Section]]:
    """What a snapshot holds. Reads the span tables, once."""
    return [
        lambda: statistics_section(view.episodes),
        lambda: _fields(view),
        lambda: _streams(view),
        lambda: _derived(view.streams),
        lambda: _storage(view.storage),
    ]


def _fields(view: View) -> Section:
    schema = view.schema
    if schema is None:
        return Section("Fields", "not known before the first commit")
    return schema.fields_section()


def _streams(view: View) -> Section:
    records = view.streams
    if not records:
        return Section("Streams", "none; nothing was written yet")
    first_rows, newest = Marks.wanted(records), records[-_MAX_STREAMS:][::-1]
    headings = [
        "stream, newest first",
        ">rows",
        ">evicted",
        ">abandoned",
        ">spans",
        ">commits",
        "state",
        "last commit",
    ]
    rows = [_stream_cells(record, first_rows, view.lineage) for record in newest]
    states = Counter(_state(record) for record in records)
    text = ", ".join(f"{n:,} {state}" for state, n in states.items())
    return Section("Streams", text, table(headings, rows, len(records)))


def _stream_cells(record: CommitRecord, first_rows: Mapping[str, int], lineage: Lineage) -> list[str]:
    evicted, abandoned = first_rows[record.id], record.rows - lineage.n_rows(record)
    numbers = [record.rows, evicted, abandoned, record.spans, record.commit]
    return [record.id, *(f"{n:,}" for n in numbers), _state(record), moment(record.committed_at)]


def _state(record: CommitRecord) -> str:
    return "packed" if record.location else "sealed" if record.is_sealed else "open"


def _derived(records: Sequence[CommitRecord]) -> Section:
    """The derived columns by name; the streams of one column are counted."""
    # Of several sessions that have written a column for a stream, the newest counts.
    newest = {(name, t): s for r in records for t, named in r.columns.items() for name, s in named.items()}
    streams: Counter[tuple[str, str]] = Counter()
    rows: Counter[tuple[str, str]] = Counter()
    for (name, _), state in newest.items():
        key = name, f"{state.dtype}{list(state.shape) if state.shape else ''}"
        streams[key] += 1
        rows[key] += state.stop - state.first
    if not streams:
        return Section("Derived columns", "none")
    cells = [
        [name, dtype, f"{streams[name, dtype]:,}", f"{rows[name, dtype]:,}"] for name, dtype in sorted(streams)
    ]
    names = ", ".join(dict.fromkeys(name for name, _ in sorted(streams)))
    return Section("Derived columns", names, table(["column", "dtype", ">streams", ">rows"], cells))


def _storage(storage: Storage) -> Section:
    pairs = [
        ("URL", storage.display),
        ("requests are made by", storage.transport if storage.is_remote else None),
        ("because", storage.transport_reason or None if storage.is_remote else None),
        ("can be written", "no" if storage.is_read_only else "yes"),
    ]
    return Section("Storage", storage.transport if storage.is_remote else "local", facts(pairs))


def checkpoints_section(storage: Storage) -> Section:
    """The ids of the checkpoints. Costs one listing."""
    ids = [name for name in storage.list_names("checkpoints") if name != "zarr.json"]
    if not ids:
        return Section("Checkpoints", "none")
    newest = sorted(ids, key=lambda id_: id_.rpartition("-")[2], reverse=True)
    rows = [[id_] for id_ in newest[:_MAX_CHECKPOINTS]]
    more = facts([("more", "store.checkpoints reads their records")])
    return Section(
        "Checkpoints", f"{len(ids):,}, unfinished ones included", table(["newest first"], rows, len(ids)) + more
    )
