"""From windows to batches: one episode index, one chunk cache, and the kinds of windows that were asked for.

Locks of `sampling`, `writing` and `replay`, outermost first. A thread that holds a lock waits only for later ones:

1. ``Session._ending`` (one thread closes), ``CheckpointSchedule._lock`` (one capture at a time),
   ``Mixture._lock``, ``Readiness._appended`` (threads that wait for enough steps).
2. ``BatchIterator._turn``: one thread at a time takes a batch. It is held while ``admit`` waits. Then
   ``StoredBytes._measuring``, held while the sizes of stored objects are read.
3. ``BatchAssembler.lock``: the index, the cache, and everything derived from them; held while a batch is read.
4. ``GarbageCollector._sweeping``, then ``_publishing``: one sweep, one publication of marks at a time.
5. ``WriterLifecycle.lock``, the writer's: the staged steps. `Writer.locked_staging` does not wait for it while
   another thread appends, unless its caller asks for that.
6. Held for a moment: ``WriterInbox.lock``, ``CommitThread._condition``, ``SamplesPerInsert._changed``,
   ``RunningStatistics._lock``, ``GarbageCollector._condition``, ``CompressedTier._lock``,
   ``CheckpointWriter._lock``, ``CheckpointRequests._condition``, ``ChunkFetcher._counting``,
   ``Drawing._counting``, ``ReadAhead._lock``. ``StoreNotes._lock`` and ``CheckpointLineage.lock`` are held while
   storage is written.
7. ``Storage._lock``, ``FsspecConnection._lock``.
8. ``BackgroundPool._lock``, ``WrittenFiles._lock``, and the lock of the registry in `trajstore.unclosed`. Then
   ``_Count._lock`` of a pool.

The commit thread waits for no lock before 6, because an append that finds both stagings full waits for it with the
writer's lock held. It takes the writer's lock only if that is free. Appends never wait for the assembler's lock.
A commit in `BatchAssembler.publish` releases it: other threads sample while one waits for the storage.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from trajstore.cache.chunk_cache import ChunkCache
from trajstore.errors import DataError, EpisodeNotFoundError, NotReadyError
from trajstore.format.episode_table import EpisodeTable
from trajstore.format.handles import EpisodeKey
from trajstore.sampling.batches.batch_plan import BatchPlan
from trajstore.sampling.batches.batch_program import PER_WINDOW_KEYS, BatchProgram
from trajstore.sampling.batches.compiled_executor import CompiledExecutor
from trajstore.sampling.batches.outputs import check_outputs
from trajstore.sampling.batches.plan_rows import check_not_evicted, with_moved_rows
from trajstore.sampling.batches.scratch import Scratch
from trajstore.sampling.batches.torch_executor import TorchExecutor
from trajstore.sampling.batches.triton_executor import TritonExecutor, new_executor
from trajstore.sampling.compiled.selection import compiled_loops
from trajstore.sampling.index.episode_index import EpisodeIndex
from trajstore.sampling.index.snapshot_follower import SnapshotFollower
from trajstore.sampling.live.cached_rows import CachedRows
from trajstore.sampling.live.pending_episodes import table_with_pending_episodes
from trajstore.sampling.live.writer_follower import WriterFollower
from trajstore.sampling.rng import CounterRng
from trajstore.sampling.window_starts import DrawnWindows, WindowStarts
from trajstore.sampling.windows import Windows, usable_steps
from trajstore.schema import Array, Schema
from trajstore.store.snapshot import Snapshot
from trajstore.writing.staging import Staging
from trajstore.writing.writer import Writer

_MAX_KINDS = 64  # kinds of windows whose sums are kept
_REWARDS = "n_step/return"
_NEVER = 1 << 62  # the mark of a stream that can't be read

Where = Callable[[EpisodeTable], Array]


@dataclass(frozen=True, slots=True)
class WindowKind:
    """One kind of window among chosen episodes: which windows exist, and how they become batches."""

    windows: Windows
    starts: WindowStarts
    executor: TorchExecutor

    def plan(self, draw: DrawnWindows) -> BatchPlan:
        return self.executor.plan(draw, self.starts)


class BatchAssembler:
    """Shows snapshots and the steps of a writer, and reads planned batches.

    Call methods with ``lock`` held. One batch is read at a time, so nothing that it needs is evicted while it is
    read.

    Attributes:
        lock: Guards the index, the cache and everything derived from them.
        index: The episodes that can be sampled.
        live: Follows the writer whose uncommitted steps are shown; None without one.
        published: Called after steps of the followed writer became visible.
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
        self._program_loops = compiled_loops(device, compiled, "program_loops")
        self._scratch = Scratch()
        self.index = EpisodeIndex(device, self.kernels, compiled_loops(device, compiled, "growth_loops"))
        self.published: Callable[[], None] | None = None
        self._follower = SnapshotFollower(self.index)
        self._rows = CachedRows(
            snapshot, self.index, device, budget, host_budget, self.kernels, has_writer=writer is not None
        )
        self._kinds: dict[tuple[Windows, Where | None], WindowKind] = {}
        self._writer = writer
        self.live: WriterFollower | None = None
        for name in streams:
            self.index.number_of(name)
        if writer is not None:
            self.live = WriterFollower(writer, self.index, self._rows, self._mark_list)
        self.follow(snapshot)
        if self.live is not None:
            self.live.start()  # last, because it can't be undone

    # ---- what can be sampled

    @property
    def snapshot(self) -> Snapshot:
        """The snapshot that is shown, with the followed writer's newest commit."""
        return self._rows.snapshot

    def follow(self, snapshot: Snapshot) -> None:
        """Show a newer snapshot. Cost is proportional to new, open and evicted episodes.

        Commits of the followed writer that are shown already stay, even if the snapshot lacks them.
        """
        record = self.live.record if self.live is not None else None
        self._rows.snapshot = snapshot if record is None else snapshot.advanced(record)
        if snapshot.schema is None:
            return
        if self.live is None:
            self._rows.make_cache(snapshot.schema, 0, self._mark_list())
        self._follower.follow(snapshot)
        if self._rows.has_cache:
            self._rows.set_sources(self._mark_list())
            if self.live is not None:
                self.live.show_all()

    def publish(self, *, may_commit: bool = True, waits: bool = False) -> None:
        """Show steps that the followed writer appended. Cost is proportional to new and open episodes.

        Args:
            may_commit: Whether to commit if new steps find no free live rows before the next commit, as after very
                many short episodes; else these steps are shown later. The commit releases the lock, so pass False
                if the caller relies on anything that it read before.
            waits: Whether to wait while another thread appends or commits; else its steps are shown later.
        """
        if self.live is None or self.live.is_stopped or self._rows.is_closed:
            return
        needs_commit = self.live.update(waits=waits, may_commit=may_commit)
        if needs_commit is None:
            return
        if self.published is not None:
            self.published()
        if needs_commit:
            self._commit_unlocked()
            self.publish(may_commit=False, waits=waits)

    def stop_following(self) -> None:
        """Show nothing that the followed writer does from now on; see `WriterFollower.stop`."""
        if self.live is not None:
            self.live.stop()

    def _commit_unlocked(self) -> None:
        """Commit, and let other threads sample while this one waits for the storage."""
        assert self._writer is not None
        self.lock.release()
        try:
            self._writer.commit()
        finally:
            self.lock.acquire()

    def is_behind(self, staging: Staging | None) -> bool:
        """Whether some appended steps are not shown yet, because no live rows are free until the next commit."""
        return self.live is not None and self.live.episodes.is_behind(staging)

    def evict(self, stream: Array, episode: Array, t: Array) -> None:
        """Stop showing the steps of episodes before ``t`` (`GONE`: all steps). Call it after `publish`."""
        live = self._follower.evict(stream, episode, t)
        if len(live[0]):
            assert self.live is not None
            self.live.evict(*live)

    @property
    def marks(self) -> Array:
        """By source: rows below were evicted, by their writer or here."""
        return self._follower.marks

    def _mark_list(self) -> list[int]:
        marks: list[int] = self._follower.marks.tolist()
        return marks

    def set_marks(self, marks: Mapping[str, int]) -> None:
        """Note by stream that rows below are never read again."""
        self._follower.set_marks(marks)
        if self._rows.has_cache:
            self._rows.set_sources(
                self._mark_list(), written=self.index.numbers.get(self.index.followed_stream, -2) + 1
            )

    def order(self) -> dict[str, Any]:
        """The episodes of the index in order, for `arrange`."""
        return self._follower.order()

    def arrange(self, order: Mapping[str, Any], *, growing: Collection[str] = ()) -> None:
        """Show only the episodes that another assembler's `order` names; see `SnapshotFollower.arrange`."""
        self._follower.arrange(order, growing=growing)

    # ---- arrivals of the followed writer, for retention

    def keep_arrivals(self) -> None:
        """Remember the order in which rows of the followed writer arrive."""
        if self.live is not None:
            self.live.episodes.keeps_arrivals = True

    def take_arrivals(self) -> Array:
        """The episode of each row that arrived since the last call, in order of arrival."""
        return self.live.episodes.take_arrivals() if self.live is not None else np.empty(0, np.int64)

    @property
    def uncommitted_episodes(self) -> Array:
        """Numbers of the followed writer's episodes that are open or not committed whole."""
        return self.live.episodes.uncommitted if self.live is not None else np.empty(0, np.int64)

    @property
    def n_placed(self) -> int:
        """Rows of the followed writer's stream that the index knows as committed; a few more may be durable."""
        return self.live.n_placed if self.live is not None else 0

    # ---- schema and cache

    def reserve_name(self, name: str) -> None:
        """Let the followed writer refuse a field of this name, if the fields are not known yet."""
        if self._writer is not None:
            self._writer.reserve_name(name)

    @property
    def has_schema(self) -> bool:
        """Whether the fields are known; before the first data they may not be."""
        return self.snapshot.schema is not None or (self._writer is not None and self._writer.schema is not None)

    @property
    def schema(self) -> Schema:
        """The fields.

        Raises:
            NotReadyError: They are not known before the first data.
        """
        schema = self.snapshot.schema or (self._writer.schema if self._writer is not None else None)
        if schema is None:
            raise self._rows.not_ready()
        return schema

    @property
    def has_cache(self) -> bool:
        """Whether anything was read or appended yet."""
        return self._rows.has_cache

    @property
    def cache(self) -> ChunkCache:
        """The chunk cache; raises an error if it is closed or there is no data yet."""
        return self._rows.cache

    def resize(self, *, budget: int | None = None, host_budget: int | None = None) -> None:
        """Change the bounds of the cache's memory in bytes; None keeps one."""
        rows = self._rows
        rows.budget = rows.budget if budget is None else budget
        rows.host_budget = rows.host_budget if host_budget is None else host_budget
        rows.cache.resize(rows.budget, rows.host_budget)

    def close(self) -> None:
        """Free the memory of the cache; nothing can be read afterwards."""
        self._rows.close()

    # ---- windows

    def kind(self, windows: Windows, where: Where | None = None) -> WindowKind:
        """The windows of one kind, up to date with the index. The last 64 kinds are kept."""
        if not isinstance(windows, Windows):
            raise TypeError(
                f"windows: expected Windows, such as Windows(32) or Windows.transitions(); got"
                f" {type(windows).__name__}"
            )
        if where is not None and not callable(where):
            raise TypeError(
                "where: expected a function of the episode table that returns one bool for each episode, such as"
                f" lambda episodes: episodes['return'] > 0; got {type(where).__name__}"
            )
        kind = self._kinds.get((windows, where))
        if kind is None:
            kind = self._kinds[windows, where] = self.new_kind(windows, where)
            if len(self._kinds) > _MAX_KINDS:  # for callers that pass a new function each time
                self._kinds.pop(next(iter(self._kinds)))
        kind.starts.update()
        return kind

    def new_kind(self, windows: Windows, where: Where | None = None) -> WindowKind:
        """The windows of one kind, not kept and not updated."""
        with_observation = self.schema.reward_alignment == "observation"
        mask = None if where is None else lambda: self.mask(where)
        starts = WindowStarts(self.index, windows, with_observation, mask, self.kernels)
        program, loops = BatchProgram.of(self.schema, windows), self._program_loops
        if loops is None:
            return WindowKind(windows, starts, new_executor(self.index, program))
        executor = CompiledExecutor(self.index, program, self.schema, loops, self._scratch)
        return WindowKind(windows, starts, executor)

    def mask(self, where: Where) -> Array:
        """For each index entry, whether a function of the episode table chooses its episode.

        Raises:
            DataError: The function returned something other than one bool for each episode.
        """
        if self._writer is None:
            table, names = self.snapshot.episodes, self.snapshot.names
        else:
            table, names = table_with_pending_episodes(self.snapshot, self._writer)
        chosen = np.asarray(where(table))
        if chosen.dtype != bool or chosen.shape != (len(table),):
            raise DataError(
                f"where: expected {len(table)} bools, one for each episode, got {chosen.dtype} of shape"
                f" {chosen.shape}"
            )
        numbers = np.array([self.index.numbers.get(name, -1) for name in names], np.int64)
        stream = numbers[table.stream_positions[chosen]] if len(table) else numbers[:0]
        entry = self.index.find(stream, table["episode"][chosen])
        mask = np.zeros(self.index.n, bool)
        mask[entry[entry >= 0]] = True
        return mask

    def entries_of(self, keys: Iterable[EpisodeKey]) -> Array:
        """Index entries of the named episodes, in order; episodes that are not in the index are left out."""
        named = [(self.index.numbers[key.stream], key.episode) for key in keys if key.stream in self.index.numbers]
        stream, episode = np.array(named, np.int64).reshape(-1, 2).T
        entry = self.index.find(stream, episode)
        return np.unique(entry[entry >= 0])

    def no_windows(self, windows: Windows, condition: str) -> NotReadyError:
        """The error for drawing where no window exists; ``condition`` restricts "no episode ... has"."""
        lengths, flags = self.index.lengths(), self.index.flags.host[: self.index.n]
        if not len(lengths):
            return NotReadyError(f"{self.snapshot!r} has no episode to draw from")
        with_observation = self.schema.reward_alignment == "observation"
        usable = usable_steps(lengths, flags, windows, with_observation).clip(0)
        outside = (windows.burn_in + windows.bootstrap) * windows.stride if windows.strict_context else 0
        needed = 1 + outside + (windows.reach if windows.boundary in ("strict", "cross") else 0)
        why = ""
        if (usable < lengths).any():
            why = (
                "; a step is usable if the observation after it is known, so the newest step of an open episode is"
                " not, and neither is the last step of a truncated or cut episode without a final observation"
            )
        return NotReadyError(
            f"no episode {condition}has {needed} usable step{'s' if needed > 1 else ''}, so no such window exists;"
            f" the longest of all has {usable.max()}{why}"
        )

    def draw_at(self, kind: WindowKind, handles: Array, n: torch.Tensor | None, is_strict: bool) -> DrawnWindows:
        """The windows at given handles (stream number, episode, t).

        Args:
            kind: The kind of windows.
            handles: ``[batch, 3]``.
            n: Steps of the n-step returns, where they are drawn.
            is_strict: Whether to refuse steps at which no window of this kind starts.

        Raises:
            EpisodeNotFoundError: An episode is not in the index, or no window starts at that step.
        """
        entry = self.index.find(handles[:, 0], handles[:, 1])
        if (entry < 0).any():
            lost = handles[np.flatnonzero(entry < 0)[0]].tolist()
            raise EpisodeNotFoundError(f"index {lost}: this reader has no such episode")
        start = handles[:, 2] - self.index.t_base.host[entry]
        on_device = torch.from_numpy(entry).to(self.device)
        if is_strict:
            is_bad = ~kind.starts.has_start(entry, start)
            if is_bad.any():
                lost = handles[np.flatnonzero(is_bad)[0]].tolist()
                raise EpisodeNotFoundError(f"index {lost}: no window can start at that step")
        return DrawnWindows(on_device, torch.from_numpy(start).to(self.device), n)

    # ---- plans

    def check_plan(self, plan: BatchPlan) -> None:
        """Check that no row of a plan was evicted since it was made.

        Raises:
            SnapshotExpiredError: Some rows were evicted.
        """
        readers = {reader.record.id for reader in self.snapshot.readers}
        marks = self.marks
        marks[1:] = [
            m if name in readers else _NEVER for name, m in zip(self.index.numbers, marks[1:], strict=True)
        ]
        check_not_evicted(plan, marks)

    def with_moved_rows(self, plan: BatchPlan, version: int) -> BatchPlan | None:
        """Update the rows of a plan made at ``version`` after live rows were committed; None if it is too old."""
        moves = self.index.changes.moves_since(version)
        if moves is None:
            return None
        return with_moved_rows(plan, moves, self.index.numbers[self.index.followed_stream] + 1)

    def pin(self, kind: WindowKind, draw: DrawnWindows) -> None:
        """Keep the chunks of windows in the cache."""
        self._rows.pin(kind.plan(draw).wanted.values())

    def load(self, kind: WindowKind, draw: DrawnWindows) -> None:
        """Read the chunks of windows ahead of time."""
        self._rows.load(kind.plan(draw).wanted.values())

    def run_batch(
        self, kind: WindowKind, drawn: DrawnWindows | tuple[int, CounterRng, int], outs: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor] | None:
        """Make a flat batch in one call if everything is resident, else return None; see `CompiledExecutor.run`.

        Outputs go to ``outs`` where it has the key.
        """
        if isinstance(kind.executor, TritonExecutor):
            with self._rows.access():
                return kind.executor.run(self._rows.cache, kind.starts, drawn, outs)
        if not isinstance(kind.executor, CompiledExecutor):
            return None
        self._rows.cache.tend_maps()
        return kind.executor.run(self._rows.cache, kind.starts, drawn, outs)

    def read_batch(
        self, kind: WindowKind, plan: BatchPlan, outs: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Read the rows of a plan and make the flat batch, into ``outs`` where it has the key.

        Raises:
            CorruptionError: A chunk is damaged or lost; names the episodes in it.
            SnapshotExpiredError: A chunk was evicted.
        """
        if outs:
            outs = _with_window_axis(outs, kind.windows)
            shapes = self.cache.shapes(plan.wanted) | plan.shapes()
            check_outputs(outs, {key: shape for key, shape in shapes.items() if key != _REWARDS})
        # Rewards are summed before they are output.
        values = self._rows.gather(plan.wanted, {key: out for key, out in outs.items() if key != _REWARDS})
        flat = kind.executor.finish(plan, values)
        for key in outs.keys() & flat.keys():
            if flat[key].data_ptr() != outs[key].data_ptr():
                flat[key] = outs[key].copy_(flat[key].view(outs[key].shape)).view(flat[key].shape)
        return flat

    def stats(self) -> dict[str, Any]:
        """Counters and sizes of the cache, and sizes of the index."""
        return self._rows.stats() | {
            "index_bytes": self.index.nbytes,
            "span_bytes": self.index.span_nbytes,
            "n_episodes": self.index.n_episodes,
            "n_spans": self.index.span_row.n,
            "is_compiled": self.kernels is not None,
        }


def _with_window_axis(outs: Mapping[str, torch.Tensor], windows: Windows) -> dict[str, torch.Tensor]:
    """Outputs with the axis of the window, which squeezed batches lack."""
    if not windows.squeeze:
        return dict(outs)
    return {key: out if key in PER_WINDOW_KEYS else out.unsqueeze(1) for key, out in outs.items()}
