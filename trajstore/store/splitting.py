"""Splits the episodes of a store among new stores, such as one for training and one for validation."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trajstore.errors import DataError
from trajstore.format.commit_record import CommitRecord
from trajstore.format.handles import EpisodeKey
from trajstore.format.spans import VisibleSpans
from trajstore.schema import Array
from trajstore.storage import Storage, open_storage
from trajstore.store.flat_streams import flat_records, missing_object
from trajstore.store.new_store import Progress, clear_remains, complete, put_record, put_schema
from trajstore.store.snapshot import Snapshot
from trajstore.store.store import Store, Url
from trajstore.store.store import open as open_store
from trajstore.store.stream_parts import PartWriter, StreamPart, plan_part
from trajstore.store.stream_reader import MissingChunkError

Share = float | int | None | Iterable[int | EpisodeKey]


@dataclass(frozen=True, slots=True)
class SplitPart:
    """One of the new stores: its URL without credentials, and what it holds."""

    url: str
    n_streams: int
    n_episodes: int
    n_steps: int


@dataclass(frozen=True, slots=True)
class SplitReport:
    """What `split` did.

    Attributes:
        source: The store that was split, without credentials.
        parts: The new stores, in the order in which they were given.
        n_left: Episodes that are in none of them.
    """

    source: str
    parts: tuple[SplitPart, ...]
    n_left: int


def split(
    source: Store | Url,
    parts: Mapping[Url, Share],
    *,
    episodes: Iterable[int | EpisodeKey] | None = None,
    seed: int = 0,
    storage_options: Mapping[str, Any] | None = None,
    target_options: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    fsync: bool = True,
) -> SplitReport:
    """Split whole episodes of a store among new stores. The source is only read.

    Each new store has its episodes with all that belongs to them: ends, final values, metadata, times, priorities
    and other derived columns. Streams keep their ids and episodes their numbers, so handles stay valid, and `merge`
    puts parts together again. Checkpoints stay behind. Open episodes read as cut.

    Which episodes go where depends on nothing but the seed, the shares and the episodes of the store in order, so
    the same call on the same episodes makes the same parts.

    The new stores become stores when all of them are written. After an interruption, split again to the same URLs.

    Args:
        source: The store, or its URL.
        parts: By URL of a new store, its share: a float is a fraction of the episodes, an int a number of them,
            None the rest; or the episodes themselves, as rows of `Store.episodes` or as keys.
        episodes: The episodes to split, as rows or keys; all that have steps by default.
        seed: Decides which episodes go where, for fractions, numbers and the rest.
        storage_options: As in `open`, for the source.
        target_options: As in `open`, for the new stores.
        progress: Called after every block of rows with the decoded bytes copied so far and in total.
        fsync: As in `open`, for the new stores.

    Raises:
        ValueError: Shares are more than there is, or can't be told apart.
        DataError: An episode is in two parts, or a stream can't be split.
        EpisodeNotFoundError: The store does not show an episode.
        StoreExistsError: A new store exists already, or its place holds something else.
        CorruptionError: A chunk is damaged or missing.
    """
    store = source if isinstance(source, Store) else open_store(source, storage_options=storage_options)
    snapshot = store.snapshot
    check_can_be_split(snapshot)
    rows = assign(snapshot, list(parts.values()), episodes, seed)
    urls = [os.fspath(url) for url in parts]
    targets = [open_storage(url, target_options, fsync=fsync) for url in urls]
    for target in targets:
        clear_remains(target)
    return _Splitting(snapshot, targets, rows, progress).run()


def check_can_be_split(snapshot: Snapshot) -> None:
    """Refuse streams whose episodes lie in several streams.

    Raises:
        DataError: One does.
    """
    for record in snapshot.streams:
        if record.replaces is not None:
            raise DataError(
                f"stream '{record.id}' holds a part of stream '{record.replaces.stream}'; it can't be split"
            )


def assign(
    snapshot: Snapshot, shares: Sequence[Share], episodes: Iterable[int | EpisodeKey] | None, seed: int
) -> list[Array]:
    """The rows of the episode table that each part gets, sorted."""
    table = snapshot.episodes
    if episodes is None:
        candidates = np.flatnonzero(table["length"] + table["has_final"] > 0)
    else:
        candidates = np.unique(_rows_of(snapshot, episodes))
    listed = [i for i, share in enumerate(shares) if isinstance(share, Iterable)]
    if not shares or (listed and len(listed) < len(shares)):
        raise ValueError("parts: expected at least one; either all are lists of episodes, or none is")
    if listed:
        found = [_rows_of(snapshot, share) for share in shares if isinstance(share, Iterable)]
        _check_disjoint(snapshot, found)
        return [np.unique(rows[np.isin(rows, candidates)]) for rows in found]
    counts = share_counts([share for share in shares if not isinstance(share, Iterable)], len(candidates))
    order = candidates[np.random.default_rng(seed).permutation(len(candidates))]
    stops = np.cumsum(counts)
    return [np.sort(order[stop - n : stop]) for n, stop in zip(counts, stops, strict=True)]


def share_counts(shares: Sequence[float | int | None], n: int) -> list[int]:
    """How many of ``n`` episodes each share gets; fractions are rounded so that their sum is.

    Raises:
        ValueError: They are more than there are, or not shares.
    """
    if shares.count(None) > 1:
        raise ValueError("parts: only one can get the rest")
    for share in shares:
        is_number = isinstance(share, (int, float)) and not isinstance(share, bool)
        if share is not None and not (is_number and (0 <= share <= 1 if isinstance(share, float) else share >= 0)):
            raise ValueError(f"parts: expected fractions from 0.0 to 1.0, numbers or None, got {share!r:.80}")
    fractions = np.array([share if isinstance(share, float) else 0.0 for share in shares])
    if fractions.sum() > 1 + 1e-9:
        raise ValueError(f"parts: the fractions add up to {fractions.sum():g}, more than 1")
    bounds = np.rint(np.concatenate([[0], np.cumsum(fractions)]) * n).astype(int)  # rounded so that none is lost
    counts = [
        share if isinstance(share, int) else int(part) for share, part in zip(shares, np.diff(bounds), strict=True)
    ]
    left = n - sum(counts)
    if left < 0:
        raise ValueError(f"parts: expected at most {n} episodes, which the store has, got {sum(counts)}")
    return [left if share is None else count for share, count in zip(shares, counts, strict=True)]


def _rows_of(snapshot: Snapshot, episodes: Iterable[int | EpisodeKey]) -> Array:
    table = snapshot.episodes
    rows = [int(one) if isinstance(one, (int, np.integer)) else table.find(EpisodeKey(*one)) for one in episodes]
    for row in rows:
        table.n_rows(row)  # raises if there is no such row
    return np.array(rows, np.int64) % max(1, len(table))


def _check_disjoint(snapshot: Snapshot, parts: Sequence[Array]) -> None:
    rows, counts = np.unique(np.concatenate([np.unique(rows) for rows in parts]), return_counts=True)
    if (twice := rows[counts > 1]).size:
        key = snapshot.episodes.key(int(twice[0]))
        raise DataError(f"parts: episode {key.episode} of stream '{key.stream}' is in two of them")


class _Splitting:
    """One split in progress."""

    def __init__(
        self, snapshot: Snapshot, targets: Sequence[Storage], rows: Sequence[Array], progress: Progress | None
    ) -> None:
        self._snapshot, self._targets, self._rows, self._progress = snapshot, targets, rows, progress
        self._spans = {snapshot.names[part.source]: part for part in snapshot.parts()}
        flat = flat_records(snapshot)
        self._plans = [self._plan(flat, chosen) for chosen in rows]
        self._n_bytes = 0
        self._total_bytes = sum(part.decoded_bytes for plan in self._plans for part in plan)

    def _plan(self, flat: Mapping[str, CommitRecord], chosen: Array) -> list[StreamPart]:
        table = self._snapshot.episodes
        streams, numbers = table["stream"][chosen], table["episode"][chosen]
        return [
            plan_part(self._spans[id_], record, mine)
            for id_, record in flat.items()
            if (mine := numbers[streams == id_]).size
        ]

    def run(self) -> SplitReport:
        self._tell(0)
        put = [self._put(target, plan) for target, plan in zip(self._targets, self._plans, strict=True)]
        for target, records in zip(self._targets, put, strict=True):
            complete(target, self._snapshot.schema, records)
        lengths = self._snapshot.episodes["length"]
        parts = [
            SplitPart(target.display, len(plan), len(chosen), int(lengths[chosen].sum()))
            for target, plan, chosen in zip(self._targets, self._plans, self._rows, strict=True)
        ]
        n_left = len(lengths) - sum(part.n_episodes for part in parts)
        return SplitReport(self._snapshot.storage.display, tuple(parts), n_left)

    def _put(self, target: Storage, plan: Sequence[StreamPart]) -> dict[str, CommitRecord]:
        writer = PartWriter(self._snapshot, target, self._tell)
        records: dict[str, CommitRecord] = {}
        for part in plan:
            id_ = part.record.id
            record = self._put_stream(writer, self._spans[id_], part)
            put_record(target, record)
            records[id_] = record
        put_schema(target, self._snapshot.schema)
        return records

    def _put_stream(self, writer: PartWriter, spans: VisibleSpans, part: StreamPart) -> CommitRecord:
        try:
            return writer.put(spans, part)
        except (FileNotFoundError, MissingChunkError) as error:
            raise missing_object(self._snapshot, part.record.id, error) from error

    def _tell(self, n_bytes: int) -> None:
        self._n_bytes += n_bytes
        if self._progress is not None:
            self._progress(self._n_bytes, self._total_bytes)
