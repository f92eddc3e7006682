"""Windows to batches: one index, one cache, and what is kept for every kind of window that was asked for."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch

from trajstore.cache.chunk_cache import ChunkCache
from trajstore.cache.row_request import RowRequest
from trajstore.errors import (
    ClosedError,
    CorruptionError,
    DataError,
    EpisodeNotFoundError,
    NotReadyError,
    SnapshotExpiredError,
)
from trajstore.format.commit_record import CommitRecord
from trajstore.format.episode_table import EpisodeTable
from trajstore.format.handles import EpisodeKey
from trajstore.sampling.batch_plan import PER_WINDOW_KEYS, BatchPlan, BatchPlanner
from trajstore.sampling.compiled.selection import compiled_loops
from trajstore.sampling.episode_index import LIVE, EpisodeIndex, RowLocations
from trajstore.sampling.live_episodes import AppendedRows, IndexChange, LiveEpisodes
from trajstore.sampling.outputs import check_outputs
from trajstore.sampling.window_starts import DrawnWindows, WindowStarts
from trajstore.sampling.windows import Windows
from trajstore.schema import Array, Schema
from trajstore.store.snapshot import Snapshot
from trajstore.store.stream_reader import ChunkError, MissingChunkError
from trajstore.writing.staging import Staging
from trajstore.writing.writer import Writer

_MAX_KINDS = 64  # whose sums are kept
_SPARE_ROWS = 1 << 14  # live rows beyond what a writer buffers: pages of environments are not always full
_LEAST_LIVE_ROWS = 128
_MAX_MOVED = 1 << 18  # rows that have become others since the oldest plan that is not made anew
_SHOWN = 5
_REWARDS = "n_step/return"

Where = Callable[[EpisodeTable], Array]


@dataclass(frozen=True, slots=True)
class WindowKind:
    """One kind of window among some of the episodes: which there are, and how they become batches."""

    windows: Windows
    starts: WindowStarts
    planner: BatchPlanner

    def plan(self, draw: DrawnWindows) -> BatchPlan:
        return self.planner.plan(draw, self.starts)


class BatchAssembler:
    """Follows snapshots, plans batches and carries plans out.

    Methods are called with ``lock`` held; one batch is assembled at a time, so nothing that it needs is evicted
    under it.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        device: torch.device,
        budget: int,
        host_budget: int,
        *,
        writer: Writer | None = None,
        compiled: bool = True,
        streams: Sequence[str] = (),
    ) -> None:
        self.lock = threading.RLock()
        self.device = device
        self.kernels = compiled_loops(device, compiled)
        self.index = EpisodeIndex(device, self.kernels)
        self.budget, self.host_budget = budget, host_budget
        self._known: CommitRecord | None = None  # of the writer that is followed, as the cache knows it
        self._moves: deque[tuple[Array, Array]] = deque()  # live rows, and what they became
        self._n_moved = 0  # rows of those
        self.n_moves = 0
        self.n_placed = 0  # of them, those that the index knows as rows of the stream; some more may be durable
        self._cache: ChunkCache | None = None
        self._kinds: dict[tuple[Windows, Where | None], WindowKind] = {}
        self._writer = writer
        self._live: LiveEpisodes | None = None
        self._is_torn = self._is_closed = False
        self.published: Callable[[], None] | None = None  # called after what a writer appended is shown
        for name in streams:
            self.index.number_of(name)
        self._last: Any = None  # on a GPU, the event after what was done to the cache last
        if writer is not None:
            self._live = LiveEpisodes(self.index.number_of(writer.stream))
            self.index.followed = writer.stream
            self.index.rank = writer.rank or 0
        self.follow(snapshot)
        if writer is not None and self._live is not None:
            writer.set_append_listener(self._live)  # last: it can't be undone

    def follow(self, snapshot: Snapshot) -> None:
        """Show what a newer snapshot shows; costs what is new and what is open.

        It may know less of the writer that is followed than was shown already: that stays.
        """
        self.snapshot = snapshot if self._known is None else snapshot.advanced(self._known)
        if snapshot.schema is None:
            return
        if self._writer is None:
            self._make_cache(snapshot.schema, 0)
        self.index.update(snapshot)
        if self._cache is not None:
            self._set_sources()
            if self._live is not None:  # the index knows episodes that grow as they were when last told whole
                self._live.retell()
                self._show_live()

    def _make_cache(self, schema: Schema, live_rows: int) -> None:
        if self._cache is None:
            budgets = self.budget, self.host_budget
            self._cache = ChunkCache(
                schema, self.device, *budgets, self.snapshot.storage, live_rows=live_rows, kernels=self.kernels
            )
            self._set_sources()

    def _set_sources(self, written: int = -1) -> None:
        assert self._cache is not None
        readers = {reader.record.id: reader for reader in self.snapshot.readers}
        marks = self.index.marks.tolist()
        with self.ordered():
            self._cache.set_sources([readers.get(name) for name in self.index.numbers], marks, written)

    @property
    def live_epoch(self) -> int:
        """Changes when rows that plans refer to may have been given back."""
        return self._live.epoch if self._live is not None else 0

    @property
    def n_removed(self) -> int:
        """Changes when steps that could be drawn before can't any more."""
        return self.index.n_evictions + (self._live.n_aborted if self._live is not None else 0)

    def publish(self, *, may_commit: bool = True, waits: bool = False) -> None:
        """Show what the writer that is followed has appended since; costs what is new and what is open.

        While another thread appends, or waits for the disk in a commit, that is what was shown before, unless one
        ``waits`` for it.

        Where very many short episodes came since the last commit there is no room for them before the next one,
        which is then made first; ``may_commit=False`` leaves them out instead.
        """
        if self._live is None or self._writer is None or self._is_closed:
            return
        if self._is_torn:
            raise DataError("this reader lost track of its writer by an error before; make another")
        # Nobody who holds the writer's lock waits for ours.
        with self._writer.locked_staging(blocking=waits or self._cache is None) as staging:
            if self._cache is None and not self._make_live_cache(staging):
                return
            self._is_torn = True  # until everything that was taken is where it belongs
            changes = self._live.take(staging)
            with self.ordered():
                self._advance(self._writer.record)
                for change in changes:
                    self._apply(change)
            self._is_torn = False
            needs_commit = may_commit and self._live.is_full and self._live.is_behind(staging)
        self._show_live()
        if self.published is not None:
            self.published()
        if needs_commit:
            self._writer.commit()
            self.publish(may_commit=False, waits=waits)

    def _show_live(self) -> None:
        assert self._live is not None
        lengths = self._live.lengths()
        if lengths is not None:
            self.index.set_lengths(lengths)
        elif (episodes := self._live.episodes()) is not None:
            self.index.set_live(*episodes)

    def is_behind(self, staging: Staging | None) -> bool:
        """Whether some of what was appended is not shown yet: it will be once a commit has made room."""
        return self._live is not None and self._live.is_behind(staging)

    def evict(self, stream: Array, episode: Array, t: Array) -> None:
        """Show the steps of episodes below ``t`` no more (`GONE`: none of them); called after `publish`."""
        live = self.index.evict(stream, episode, t)
        if len(live[0]):
            assert self._live is not None
            self._live.trim(*live)
            told = self._live.episodes()
            assert told is not None
            self.index.set_live(*told)

    def keep_arrivals(self) -> None:
        """Remember the order in which rows of the writer that is followed arrive."""
        if self._live is not None:
            self._live.keeps_arrivals = True

    def take_arrivals(self) -> Array:
        """Episodes of the rows that arrived since this was last asked, in that order."""
        return self._live.take_arrivals() if self._live is not None else np.empty(0, np.int64)

    @property
    def unplaced(self) -> Array:
        """Episodes of the writer that is followed that are open, or not placed for good yet."""
        return self._live.unplaced if self._live is not None else np.empty(0, np.int64)

    def set_marks(self, marks: Mapping[str, int]) -> None:
        """Rows of streams below these are never asked for again."""
        self.index.set_marks(marks)
        if self._cache is not None:
            self._set_sources(written=self.index.numbers.get(self.index.followed, -2) + 1)

    def _advance(self, record: CommitRecord | None) -> None:
        """Know the rows that the writer has committed."""
        assert self._writer is not None
        known = self._known
        if record is None or (known is not None and record.commit <= known.commit):
            return
        self._known, self.snapshot = record, self.snapshot.advanced(record)
        if record.rows > (known.rows if known is not None else 0):
            self._set_sources(written=self.index.numbers[self._writer.stream] + 1)

    def _apply(self, change: IndexChange) -> None:
        assert self._writer is not None
        if isinstance(change, AppendedRows):
            self.cache.write_live(change.rows, change.values)
        else:
            source = self.index.numbers[self._writer.stream] + 1
            self.cache.move_live(source, change.live, change.rows, change.start, change.stop)
            self.n_placed = max(self.n_placed, change.stop)
            self.n_moves += 1
            self._moves.append((change.live, change.rows))
            self._n_moved += len(change.live)
            while len(self._moves) > 1 and self._n_moved > _MAX_MOVED:
                self._n_moved -= len(self._moves.popleft()[0])

    def _make_live_cache(self, staging: Staging | None) -> bool:
        """Make the cache once it is known how many rows may be on their way to disk."""
        assert self._writer is not None
        assert self._live is not None
        schema = self._writer.schema or self.snapshot.schema
        if schema is None or (staging is None and not self._writer.is_closed):
            return False
        capacity = staging.capacity if staging is not None else 0
        spare = min(_SPARE_ROWS, self.budget // 8 // max(1, schema.row_bytes))
        n_rows = 2 * capacity + max(spare, capacity // 2, _LEAST_LIVE_ROWS)
        if n_rows * schema.row_bytes > self.budget // 2:
            raise ValueError(
                f"cache_bytes: {n_rows * schema.row_bytes} bytes of steps that are not committed yet take more than"
                f" half of {self.budget}; lower the writer's buffer_bytes"
            )
        self._make_cache(schema, n_rows)
        self._live.set_rows(n_rows)
        return True

    @property
    def has_schema(self) -> bool:
        """Whether the fields are known: nothing is before the first data, in a store that declared none."""
        return self.snapshot.schema is not None or (self._writer is not None and self._writer.schema is not None)

    @property
    def schema(self) -> Schema:
        schema = self.snapshot.schema or (self._writer.schema if self._writer is not None else None)
        if schema is None:
            raise self._nothing()
        return schema

    def _nothing(self) -> NotReadyError:
        missing = "committed" if self._writer is None else "appended yet"
        return NotReadyError(f"{self.snapshot!r} is empty: nothing is {missing}, so there is nothing to read")

    @property
    def has_cache(self) -> bool:
        """Whether anything was read or appended yet."""
        return self._cache is not None

    def close(self) -> None:
        """Give back the memory of the cache; nothing can be read any more."""
        self._cache, self._is_closed = None, True

    @property
    def cache(self) -> ChunkCache:
        if self._is_closed:
            raise ClosedError(f"{self.snapshot!r} was read by a buffer that is closed")
        if self._cache is None:
            raise self._nothing()
        return self._cache

    def kind(self, windows: Windows, where: Where | None = None) -> WindowKind:
        """What is kept for a kind of window, up to date."""
        kind = self._kinds.get((windows, where))
        if kind is None:
            kind = self._kinds[windows, where] = self.new_kind(windows, where)
            if len(self._kinds) > _MAX_KINDS:  # whoever passes a new function each time
                self._kinds.pop(next(iter(self._kinds)))
        kind.starts.update()
        return kind

    def new_kind(self, windows: Windows, where: Where | None = None) -> WindowKind:
        with_observation = self.schema.reward_alignment == "observation"
        mask = None if where is None else lambda: self.mask(where)
        starts = WindowStarts(self.index, windows, with_observation, mask, self.kernels)
        return WindowKind(windows, starts, BatchPlanner(self.index, self.schema, windows, self.kernels))

    def mask(self, where: Where) -> Array:
        """Which index entries a function of the episode table chooses."""
        table = self.snapshot.episodes
        chosen = np.asarray(where(table))
        if chosen.dtype != bool or chosen.shape != (len(table),):
            raise DataError(
                f"where: expected {len(table)} bools, one an episode, got {chosen.dtype} of shape {chosen.shape}"
            )
        numbers = np.array([self.index.numbers[name] for name in self.snapshot.names], np.int64)
        stream = numbers[table.stream_positions[chosen]] if len(table) else numbers[:0]
        entry = self.index.find(stream, table["episode"][chosen])
        mask = np.zeros(self.index.n, bool)
        mask[entry[entry >= 0]] = True
        return mask

    def entries_of(self, keys: Iterable[EpisodeKey]) -> Array:
        """Index entries of those of some episodes that are here."""
        named = [(self.index.numbers[key.stream], key.episode) for key in keys if key.stream in self.index.numbers]
        stream, episode = np.array(named, np.int64).reshape(-1, 2).T
        entry = self.index.find(stream, episode)
        return np.unique(entry[entry >= 0])

    def no_windows(self, windows: Windows, condition: str) -> NotReadyError:
        """Why nothing can be drawn."""
        lengths = self.index.lengths()
        if not len(lengths):
            return NotReadyError(f"{self.snapshot!r} has no episode to draw from")
        outside = (windows.burn_in + windows.bootstrap) * windows.stride if windows.strict_context else 0
        needed = 1 + outside + (windows.reach if windows.boundary in ("strict", "cross") else 0)
        return NotReadyError(
            f"no episode {condition}has {needed} usable steps, so no such window exists; the longest of all has"
            f" {lengths.max()}"
        )

    def draw_at(self, kind: WindowKind, handles: Array, n: torch.Tensor | None, is_strict: bool) -> DrawnWindows:
        """The windows of given handles (stream number, episode, t).

        Raises:
            EpisodeNotFoundError: An episode is not here, or no window may start there (where ``is_strict``).
        """
        entry = self.index.find(handles[:, 0], handles[:, 1])
        if (entry < 0).any():
            lost = handles[np.flatnonzero(entry < 0)[0]].tolist()
            raise EpisodeNotFoundError(f"index {lost}: this reader has no such episode")
        start = handles[:, 2] - self.index.t_base.host[entry]
        on_device = torch.from_numpy(entry).to(self.device)
        if is_strict:
            bad = ~kind.starts.has_start(entry, start)
            if bad.any():
                lost = handles[np.flatnonzero(bad)[0]].tolist()
                raise EpisodeNotFoundError(f"index {lost}: no window can start at that step")
        return DrawnWindows(on_device, torch.from_numpy(start).to(self.device), n)

    def check_plan(self, plan: BatchPlan) -> None:
        """See that what a plan made before a refresh wants is still there.

        Raises:
            SnapshotExpiredError: Some of it was evicted.
        """
        readers = {reader.record.id for reader in self.snapshot.readers}
        marks = self.index.marks
        marks[1:] = [
            m if name in readers else 1 << 62 for name, m in zip(self.index.numbers, marks[1:], strict=True)
        ]
        on_device = torch.from_numpy(marks).to(self.device)
        for rows in {id(w.row): w for w in plan.wanted.values()}.values():
            if bool((rows.row < on_device[rows.source.to(torch.int64)]).any()):
                raise SnapshotExpiredError("windows that were planned ahead have been evicted meanwhile")

    def moved(self, plan: BatchPlan, n_moves: int) -> BatchPlan | None:
        """A plan made so many moves ago, with rows that were live then where they are now; None: too long ago."""
        n_since = self.n_moves - n_moves
        if n_since > len(self._moves):
            return None
        moves = list(self._moves)[len(self._moves) - n_since :]
        where: dict[int, RowLocations] = {}
        for w in plan.wanted.values():
            if id(w.row) not in where:
                where[id(w.row)] = self._moved_rows(w, moves)
        found = {key: (w, where[id(w.row)]) for key, w in plan.wanted.items()}
        return replace(
            plan, wanted={key: RowRequest(w.path, rows.source, rows.row) for key, (w, rows) in found.items()}
        )

    def _moved_rows(self, wanted: RowRequest, moves: Sequence[tuple[Array, Array]]) -> RowLocations:
        source = wanted.source.expand(wanted.row.shape).clone()
        row, own = wanted.row.clone(), self.index.numbers[self.index.followed] + 1
        for live, rows in moves:
            order = np.argsort(live)
            was, now = (torch.from_numpy(a[order]).to(self.device) for a in (live, rows))
            at = torch.searchsorted(was, row).clamp(max=len(was) - 1) if len(was) else None
            if at is not None:
                is_moved = (source == LIVE) & (was[at] == row)
                row = torch.where(is_moved, now[at], row)
                source = torch.where(is_moved, own, source)
        return RowLocations(source, row)

    def pin(self, kind: WindowKind, draw: DrawnWindows) -> None:
        """Keep the chunks of windows in the cache."""
        try:
            with self.ordered():
                self.cache.pin(kind.plan(draw).wanted.values())
        except ChunkError as error:
            raise self._explained(error) from error

    def load(self, kind: WindowKind, draw: DrawnWindows) -> None:
        """Read the chunks of windows ahead of time."""
        try:
            with self.ordered():
                self.cache.load(kind.plan(draw).wanted.values())
        except ChunkError as error:
            raise self._explained(error) from error

    @contextlib.contextmanager
    def ordered(self) -> Iterator[None]:
        """On a GPU, after what was done to the cache before, on whatever stream; the lock orders only the host."""
        if self.device.type != "cuda":
            yield
            return
        stream = torch.cuda.current_stream(self.device)
        if self._last is not None:
            stream.wait_event(self._last)
        try:
            yield
        finally:
            self._last = stream.record_event()

    def carry_out(
        self, kind: WindowKind, plan: BatchPlan, outs: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Read what a plan wants and make the flat batch; ``outs`` is written where it has a key.

        Raises:
            CorruptionError: A chunk is damaged or lost; names the episodes in it.
            SnapshotExpiredError: It was evicted.
        """
        if outs:
            outs = _opened(outs, kind.windows)
            shapes = self.cache.shapes(plan.wanted) | plan.shapes()
            check_outputs(outs, {key: shape for key, shape in shapes.items() if key != _REWARDS})
        try:
            # Rewards are summed before they are output.
            with self.ordered():
                values = self.cache.gather(plan.wanted, {key: out for key, out in outs.items() if key != _REWARDS})
        except ChunkError as error:
            raise self._explained(error) from error
        flat = kind.planner.finish(plan, values)
        for key in outs.keys() & flat.keys():
            if flat[key].data_ptr() != outs[key].data_ptr():
                flat[key] = outs[key].copy_(flat[key].view(outs[key].shape)).view(flat[key].shape)
        return flat

    def _explained(self, error: ChunkError) -> Exception:
        """The error with the episodes that it takes away."""
        if isinstance(error, MissingChunkError):
            reason = self.snapshot.reason(error, error.stop - 1)
            if not isinstance(reason, CorruptionError):
                return reason
        index, source = self.index, self.index.numbers[error.stream] + 1
        rows = index.span_row.host  # of evicted spans, which lie in no chunk that is asked for, anything
        ends = rows + np.diff(np.append(index.span_logical.host, index.n_rows))
        spans = np.flatnonzero((index.span_source.host == source) & (rows < error.stop) & (ends > error.start))
        entries = np.unique(np.searchsorted(index.logical.host, index.span_logical.host[spans], side="right") - 1)
        episodes = index.episode.host[entries].tolist()
        more = f" and {len(episodes) - _SHOWN} more" if len(episodes) > _SHOWN else ""
        return CorruptionError(f"{error}; it holds steps of episodes {episodes[:_SHOWN]}{more}")

    def stats(self) -> dict[str, Any]:
        cache = self._cache
        figures = asdict(cache.stats) if cache else {}
        return figures | {
            "cache_bytes": cache.nbytes if cache else 0,
            "host_cache_bytes": cache.tier.nbytes if cache else 0,
            "index_bytes": self.index.nbytes,
            "span_bytes": self.index.span_nbytes,
            "n_episodes": self.index.n - self.index.first,
            "n_spans": self.index.span_row.n,
            "is_compiled": self.kernels is not None,
        }


def _opened(outs: Mapping[str, torch.Tensor], windows: Windows) -> dict[str, torch.Tensor]:
    """Outputs with the axis of the window, which squeezed batches lack."""
    if not windows.squeeze:
        return dict(outs)
    return {key: out if key in PER_WINDOW_KEYS else out.unsqueeze(1) for key, out in outs.items()}
