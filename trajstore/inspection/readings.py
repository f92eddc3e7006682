"""What can be seen of a running session from outside: what its commits show, read again and again."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from trajstore.format.marks import Marks
from trajstore.format.spans import End, VisibleSpans
from trajstore.schema import Array
from trajstore.store.checkpoints import list_checkpoints
from trajstore.store.snapshot import Snapshot
from trajstore.store.store import Store

N_RECENT = 200  # episodes whose returns and lengths are shown
_TAIL_SPANS = 20_000  # of each stream that are searched for them


@dataclass(frozen=True, slots=True)
class Reading:
    """A store at one moment.

    Attributes:
        at: UNIX seconds.
        n_rows: Committed rows that are not evicted.
        n_written: All rows that were ever committed, of streams that still exist.
        n_finished: Episodes that terminated or were truncated.
        n_commits: Commits of all streams.
        n_streams: Streams.
        open_streams: Ids of those whose writers have not closed them, newest last.
        last_commit_at: UNIX seconds; None: nothing is committed.
        returns: Of the last finished episodes, oldest first.
        lengths: Their steps.
        checkpoint: Name of the newest checkpoint, and its UNIX seconds; None: there is none.
        stored_bytes: Bytes of all objects; None: not asked for.
    """

    at: float
    n_rows: int
    n_written: int
    n_finished: int
    n_commits: int
    n_streams: int
    open_streams: tuple[str, ...]
    last_commit_at: float | None
    returns: Array
    lengths: Array
    checkpoint: tuple[str, float] | None
    stored_bytes: int | None

    @property
    def idle_s(self) -> float | None:
        """Seconds since the last commit: how far readers may be behind the writers."""
        return None if self.last_commit_at is None else max(0.0, self.at - self.last_commit_at)


@dataclass(frozen=True, slots=True)
class Rates:
    """What changed between two readings, a second."""

    rows: float
    episodes: float
    commits: float
    stored_bytes: float | None


class Watch:
    """Reads a store again and again. A reading costs what is new, and what the store's records take.

    Args:
        store: The store.
        with_bytes: Whether to sum up the bytes of all objects, which lists them.
    """

    def __init__(self, store: Store, *, with_bytes: bool) -> None:
        self._store = store
        self._with_bytes = with_bytes
        self._checkpoints: tuple[frozenset[str], tuple[str, float] | None] = frozenset(), None

    def read(self) -> Reading:
        """Look at the newest commits.

        Raises:
            StorageError: The storage does not answer.
        """
        snapshot = self._store.refresh()
        records, wanted = snapshot.streams, Marks.wanted(snapshot.streams)
        dead = {stream for record in records for stream in record.view.dead}
        finished = _Finished.of(snapshot)
        return Reading(
            at=time.time(),
            n_rows=sum(max(0, r.rows - wanted.get(r.id, 0)) for r in records),
            n_written=sum(r.rows for r in records),
            n_finished=finished.n,
            n_commits=sum(r.commit for r in records),
            n_streams=len(records),
            open_streams=tuple(r.id for r in records if not r.is_sealed and r.id not in dead),
            last_commit_at=max((r.committed_at for r in records), default=None),
            returns=finished.returns,
            lengths=finished.lengths,
            checkpoint=self._newest_checkpoint(snapshot),
            stored_bytes=_stored_bytes(snapshot) if self._with_bytes else None,
        )

    def _newest_checkpoint(self, snapshot: Snapshot) -> tuple[str, float] | None:
        names = frozenset(snapshot.storage.list_names("checkpoints"))
        if names != self._checkpoints[0]:
            newest = max(list_checkpoints(snapshot.storage), key=lambda c: c.created_at, default=None)
            self._checkpoints = names, None if newest is None else (newest.name, newest.created_at)
        return self._checkpoints[1]


def rates(before: Reading, after: Reading) -> Rates | None:
    """Rates between two readings; None if no time has passed."""
    seconds = after.at - before.at
    if seconds <= 0:
        return None
    sizes = before.stored_bytes, after.stored_bytes
    return Rates(
        rows=max(0, after.n_written - before.n_written) / seconds,
        episodes=max(0, after.n_finished - before.n_finished) / seconds,
        commits=max(0, after.n_commits - before.n_commits) / seconds,
        stored_bytes=None if sizes[0] is None or sizes[1] is None else (sizes[1] - sizes[0]) / seconds,
    )


@dataclass(frozen=True, slots=True)
class _Finished:
    """Episodes that terminated or were truncated: how many, and the last ones in order of time."""

    n: int
    returns: Array
    lengths: Array

    @staticmethod
    def of(snapshot: Snapshot) -> _Finished:
        n, parts = 0, []
        for part in snapshot.parts():
            end = part.spans.ints[:, part.columns[0].index("end")]
            n += int(np.isin(end, (End.TERMINATED, End.TRUNCATED)).sum())
            parts.append(_last_spans(part))
        columns = np.concatenate(parts) if parts else np.empty((0, 3))
        columns = columns[np.argsort(columns[:, 0], kind="stable")][-N_RECENT:]
        return _Finished(n, columns[:, 1], columns[:, 2].astype(np.int64))


def _last_spans(part: VisibleSpans) -> Array:
    """Time, return and length of the last finished episodes of one stream."""
    ints, floats = part.spans.ints[-_TAIL_SPANS:], part.spans.floats[-_TAIL_SPANS:]
    number = {name: ints[:, i] for i, name in enumerate(part.columns[0])}
    value = {name: floats[:, i] for i, name in enumerate(part.columns[1])}
    length = number["t_start"] + number["row_stop"] - number["row_start"] - number["has_final"]
    is_last = np.isin(number["end"], (End.TERMINATED, End.TRUNCATED))
    return np.stack([value["time"], value["return"], length.astype(np.float64)], 1)[is_last][-N_RECENT:]


def _stored_bytes(snapshot: Snapshot) -> int:
    storage = snapshot.storage
    return sum(sum(storage.tree_sizes(name).values()) for name in ("streams", "checkpoints"))
