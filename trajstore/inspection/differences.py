"""What differs between two stores, or between two checkpoints of one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trajstore.format.commit_record import CommitRecord
from trajstore.format.episode_table import EpisodeTable, RowRanges
from trajstore.format.handles import EpisodeKey
from trajstore.inspection.row_samples import RowPiece, read_piece, sample_pieces
from trajstore.schema import Array, Schema
from trajstore.store.snapshot import Snapshot

MAX_LISTED = 1000  # episodes of a kind; more are only counted
_COLUMNS = ("env", "length", "end", "return", "has_final", "is_headless")

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Change:
    """A value that differs: what the first and the second store have."""

    name: str
    first: Any
    second: Any


@dataclass(frozen=True, slots=True)
class StreamDifference:
    """A stream that only one store has, or that differs.

    Attributes:
        id: Id of the stream.
        kind: ``only in the first``, ``only in the second`` or ``changed``.
        changes: What differs.
    """

    id: str
    kind: str
    changes: tuple[Change, ...] = ()


@dataclass(frozen=True, slots=True)
class EpisodeDifference:
    """An episode that both stores have, and that differs. Fields are listed if their bytes differ."""

    key: EpisodeKey
    changes: tuple[Change, ...] = ()
    fields: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Differences:
    """What differs between two stores.

    Attributes:
        schema: Differences of the schemas, as text.
        streams: Streams that differ.
        n_equal: Episodes that are the same, as far as was compared.
        n_only_first: Episodes that only the first store shows.
        n_only_second: Episodes that only the second store shows.
        n_changed: Episodes of both that differ.
        only_first: Keys of the first of these.
        only_second: The same of the second store.
        changed: The first of these.
        columns: Derived columns that only one store has, or whose values differ.
        checkpoints: Ids of checkpoints that only the first, and only the second store has.
        is_deep: Whether the bytes of steps, text and columns were compared.
        n_bytes: How many decoded bytes of each store were compared.
    """

    schema: tuple[str, ...] = ()
    streams: tuple[StreamDifference, ...] = ()
    n_equal: int = 0
    n_only_first: int = 0
    n_only_second: int = 0
    n_changed: int = 0
    only_first: tuple[EpisodeKey, ...] = ()
    only_second: tuple[EpisodeKey, ...] = ()
    changed: tuple[EpisodeDifference, ...] = ()
    columns: tuple[str, ...] = ()
    checkpoints: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    is_deep: bool = False
    n_bytes: int = 0

    @property
    def is_empty(self) -> bool:
        """Whether nothing differs."""
        n_episodes = self.n_only_first + self.n_only_second + self.n_changed
        return not (self.schema or self.streams or n_episodes or self.columns or any(self.checkpoints))


def compare(
    first: Snapshot,
    second: Snapshot,
    *,
    checkpoints: tuple[Sequence[str], Sequence[str]] = ((), ()),
    deep: bool = False,
    progress: Progress | None = None,
) -> Differences:
    """Compare what two snapshots show. Episodes are matched by their keys.

    Args:
        first: One store, or one checkpoint.
        second: The other.
        checkpoints: Ids of the checkpoints of both stores.
        deep: Also compare metadata, derived columns and the bytes of all steps, which reads both stores.
        progress: Called with the bytes that were compared, and in total.
    """
    tables = first.episodes, second.episodes
    rows = _matched(*tables)
    found = _Changes(len(rows[0]))
    kinds = {} if first.schema is None else first.schema.episode
    _compare_columns(tables, rows, kinds, found, deep=deep)
    n_bytes, columns = 0, _column_names(first, second)
    if deep:
        n_bytes = _compare_steps((first, second), rows, found, progress)
        columns += _column_values(first, second)
    only = [np.setdiff1d(np.arange(len(table)), used) for table, used in zip(tables, rows, strict=True)]
    return Differences(
        schema=_compare_schemas(first.schema, second.schema),
        streams=tuple(_compare_streams(first.streams, second.streams)),
        n_equal=len(rows[0]) - found.n,
        n_only_first=len(only[0]),
        n_only_second=len(only[1]),
        n_changed=found.n,
        only_first=tuple(tables[0].key(int(i)) for i in only[0][:MAX_LISTED]),
        only_second=tuple(tables[1].key(int(i)) for i in only[1][:MAX_LISTED]),
        changed=found.listed(tables[0], rows[0]),
        columns=tuple(columns),
        checkpoints=_only(*checkpoints),
        is_deep=deep,
        n_bytes=n_bytes,
    )


@dataclass(slots=True)
class _Changes:
    """Changes of matched episodes, by their number among these; details of the first ones."""

    n_matched: int
    is_changed: Array = field(init=False)
    changes: dict[int, list[Change]] = field(default_factory=dict)
    fields: dict[int, list[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.is_changed = np.zeros(self.n_matched, bool)

    @property
    def n(self) -> int:
        return int(self.is_changed.sum())

    def note(self, name: str, differs: Array, first: Array, second: Array) -> None:
        self.is_changed |= differs
        for i in np.flatnonzero(differs)[:MAX_LISTED]:
            change = Change(name, _plain(first[i]), _plain(second[i]))
            self.changes.setdefault(int(i), []).append(change)

    def note_field(self, path: str, numbers: Array) -> None:
        self.is_changed[numbers] = True
        for i in numbers[:MAX_LISTED]:
            self.fields.setdefault(int(i), []).append(path)

    def listed(self, table: EpisodeTable, rows: Array) -> tuple[EpisodeDifference, ...]:
        return tuple(
            EpisodeDifference(
                table.key(int(rows[i])), tuple(self.changes.get(i, ())), tuple(self.fields.get(i, ()))
            )
            for i in map(int, np.flatnonzero(self.is_changed)[:MAX_LISTED])
        )


def _matched(first: EpisodeTable, second: EpisodeTable) -> tuple[Array, Array]:
    """Rows of the episodes that both tables have, in the same order."""
    place: dict[str, int] = {}
    streams = []
    for table in (first, second):
        codes, labels = table.codes("stream")
        numbers = np.array([place.setdefault(label, len(place)) for label in labels], np.int64)
        streams.append(numbers[codes] if len(codes) else np.empty(0, np.int64))
    stream = np.concatenate(streams)
    episode = np.concatenate([first["episode"], second["episode"]])
    order = np.lexsort(
        (np.arange(len(stream)), episode, stream)
    )  # of two equal keys, that of the first comes first
    s, e = stream[order], episode[order]
    is_pair = np.flatnonzero((s[1:] == s[:-1]) & (e[1:] == e[:-1]))
    return order[is_pair], order[is_pair + 1] - len(first)


def _compare_columns(
    tables: tuple[EpisodeTable, EpisodeTable],
    rows: tuple[Array, Array],
    kinds: Mapping[str, str],
    found: _Changes,
    *,
    deep: bool,
) -> None:
    """Compare columns of the table; text only if it is asked for, because it is read for all episodes."""
    names = [name for name, kind in kinds.items() if (deep or kind != "str") and name in tables[1].columns]
    for name in (*_COLUMNS, *names, *(("metadata",) if deep else ())):
        first, second = (table[name][chosen] for table, chosen in zip(tables, rows, strict=True))
        found.note(name, _differs(first, second), first, second)


def _differs(first: Array, second: Array) -> Array:
    if first.dtype == object:
        return np.fromiter((a != b for a, b in zip(first, second, strict=True)), bool, len(first))
    masks = np.ma.getmaskarray(first), np.ma.getmaskarray(second)
    values = np.ma.getdata(first), np.ma.getdata(second)
    is_other: Array = values[0] != values[1]
    if values[0].dtype.kind == "f":
        is_other &= ~(np.isnan(values[0]) & np.isnan(values[1]))
    differs: Array = (masks[0] != masks[1]) | (is_other & ~masks[0])
    return differs


def _plain(value: Any) -> Any:
    if value is np.ma.masked:
        return None
    return value.item() if isinstance(value, np.generic) else value


def _compare_streams(first: Sequence[CommitRecord], second: Sequence[CommitRecord]) -> Iterator[StreamDifference]:
    theirs = {record.id: record for record in second}
    for record in first:
        other = theirs.pop(record.id, None)
        if other is None:
            yield StreamDifference(record.id, "only in the first")
        elif changes := tuple(_record_changes(record, other)):
            yield StreamDifference(record.id, "changed", changes)
    for id_ in theirs:
        yield StreamDifference(id_, "only in the second")


def _record_changes(first: CommitRecord, second: CommitRecord) -> Iterator[Change]:
    facts = [
        {
            "rows": r.rows,
            "spans": r.spans,
            "first row": r.first_row,
            "state": "packed" if r.location else "sealed" if r.is_sealed else "open",
        }
        for r in (first, second)
    ]
    for name, value in facts[0].items():
        if value != facts[1][name]:
            yield Change(name, value, facts[1][name])


def _compare_steps(
    snapshots: tuple[Snapshot, Snapshot], rows: tuple[Array, Array], found: _Changes, progress: Progress | None
) -> int:
    """Compare the stored bytes of the fields that both have, of episodes with equally many rows."""
    first, second = snapshots
    ranges = [_ranges(snapshot, chosen) for snapshot, chosen in zip(snapshots, rows, strict=True)]
    if first.schema is None or second.schema is None or not len(rows[0]):
        return 0
    places = {record.id: i for i, record in enumerate(second.streams)}
    source = np.array([places.get(record.id, -1) for record in first.streams], np.int64)
    is_same = _at_same_rows(ranges[0], ranges[1], source, len(rows[0]))
    paths = [p for p in first.schema if p in second.schema and first.schema[p] == second.schema[p]]
    together = _kept(ranges[0], is_same[ranges[0].row])
    apart = [int(i) for i in np.flatnonzero(~is_same)]
    total = sum(_n_rows(ranges[0]) * first.schema[p].row_bytes for p in paths)
    done = 0
    for path in paths:
        spec = first.schema[path]
        for piece in sample_pieces(together, spec, 1 << 62):
            done += _compare_piece(snapshots, path, piece, int(source[piece.source]), together, found)
            if progress is not None:
                progress(min(done, total), total)
        for i in apart:
            values = [_episode_bytes(s, int(chosen[i]), path) for s, chosen in zip(snapshots, rows, strict=True)]
            done += len(values[0])
            if values[0] != values[1]:
                found.note_field(path, np.array([i]))
    return done


def _at_same_rows(first: RowRanges, second: RowRanges, source: Array, n: int) -> Array:
    """Which episodes lie in the same rows of the same stream in both."""
    if len(first.row) != len(second.row) or (first.row != second.row).any():
        return np.zeros(n, bool)
    is_same = np.ones(n, bool)
    differs = (first.start != second.start) | (first.stop != second.stop) | (source[first.source] != second.source)
    is_same[first.row[differs]] = False
    return is_same


def _compare_piece(
    snapshots: tuple[Snapshot, Snapshot],
    path: str,
    piece: RowPiece,
    source: int,
    ranges: RowRanges,
    found: _Changes,
) -> int:
    """Compare the same rows of both; returns the bytes."""
    theirs = RowPiece(source, piece.start, piece.stop, piece.is_used)
    values = [read_piece(snapshot, path, p) for snapshot, p in zip(snapshots, (piece, theirs), strict=True)]
    first, second = (np.ascontiguousarray(rows) for rows in values)
    if len(first):
        flat = [rows.reshape(len(rows), -1).view(np.uint8) for rows in (first, second)]
        differs = (flat[0] != flat[1]).any(1)
        if differs.any():
            numbers = (np.flatnonzero(piece.is_used) + piece.start)[differs]
            mine = np.flatnonzero(ranges.source == piece.source)
            order = mine[np.argsort(ranges.start[mine], kind="stable")]
            at = np.searchsorted(ranges.start[order], numbers, "right") - 1
            found.note_field(path, np.unique(ranges.row[order[at]]))
    return first.nbytes


def _ranges(snapshot: Snapshot, rows: Array) -> RowRanges:
    ranges = snapshot.episodes.take(rows).row_ranges
    return _kept(ranges, ranges.stop > ranges.start)


def _kept(ranges: RowRanges, is_kept: Array) -> RowRanges:
    return RowRanges(*(column[is_kept] for column in ranges))


def _n_rows(ranges: RowRanges) -> int:
    return int((ranges.stop - ranges.start).sum())


def _episode_bytes(snapshot: Snapshot, row: int, path: str) -> bytes:
    value = snapshot.read_episode(row, fields=[path])
    for name in path.split("/"):
        value = value[name]
    return np.asarray(value).tobytes()


def _column_names(first: Snapshot, second: Snapshot) -> list[str]:
    names = set(first.columns.names), set(second.columns.names)
    return [f"'{name}' only in the first" for name in sorted(names[0] - names[1])] + [
        f"'{name}' only in the second" for name in sorted(names[1] - names[0])
    ]


def _column_values(first: Snapshot, second: Snapshot) -> list[str]:
    """Derived columns of both whose values differ."""
    found = []
    for name in first.columns.names:
        if name not in second.columns.names:
            continue
        stored = first.column(name), second.column(name)
        streams = [
            id_ for id_ in stored[0] if id_ in stored[1] and not _same_column(stored[0][id_], stored[1][id_])
        ]
        if streams:
            found.append(f"'{name}' has other values for {', '.join(streams)}")
    return found


def _same_column(first: tuple[int, Array], second: tuple[int, Array]) -> bool:
    """Whether two columns have the same values in the rows that both have."""
    start, stop = max(first[0], second[0]), min(first[0] + len(first[1]), second[0] + len(second[1]))
    a, b = (values[start - at : max(start, stop) - at] for at, values in (first, second))
    return a.dtype == b.dtype and a.tobytes() == b.tobytes()


def _compare_schemas(first: Schema | None, second: Schema | None) -> tuple[str, ...]:
    if first is None or second is None:
        return () if first is second else (f"only the {'second' if first is None else 'first'} has fields",)
    return tuple(first.differences(second))


def _only(first: Sequence[str], second: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return tuple(x for x in first if x not in set(second)), tuple(x for x in second if x not in set(first))
