"""The live buffer that a trainer holds: append while you train, sample, get killed, resume exactly."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, InvalidStateError
from dataclasses import replace
from types import TracebackType
from typing import Any

import numpy as np
import torch

from trajstore.arguments import check_positive
from trajstore.distributed.partitions import PartitionReport, Policy
from trajstore.distributed.redistribution import plan_partitions as plan_partitions
from trajstore.errors import ClosedError, RankError, SnapshotExpiredError
from trajstore.format.checkpoint_record import Checkpoint, StreamExtent
from trajstore.format.commit_record import CommitRecord
from trajstore.format.handles import EpisodeKey, Handle, Handles
from trajstore.replay.checkpoint_schedule import CheckpointOptions, CheckpointSchedule
from trajstore.replay.checkpoint_writer import CapturedState, prune
from trajstore.replay.exit_hooks import ExitHooks
from trajstore.replay.options import ReplayOptions, check_options, to_json, with_ranks
from trajstore.replay.retention import Evictor, Retention, unshown_rows
from trajstore.replay.session_start import (
    RedistributionOptions,
    SessionStart,
    as_tensors,
    start_fresh,
    start_rejoined,
    start_resumed,
)
from trajstore.replay.statistics import RunningStatistics
from trajstore.sampling.batch_assembler import Where
from trajstore.sampling.batch_iterator import BatchIterator
from trajstore.sampling.outputs import Ring
from trajstore.sampling.reader import Reader
from trajstore.sampling.rng import rank_seed
from trajstore.sampling.windows import Windows
from trajstore.schema import Array, Field, Schema
from trajstore.store import checkpoints
from trajstore.store.garbage_collection import GarbageCollector
from trajstore.store.snapshot import Snapshot
from trajstore.store.store import Store, Url, create
from trajstore.store.store import open as open_store
from trajstore.writing.open_episodes import Flags
from trajstore.writing.validation import Step

_log = logging.getLogger(__name__)
VERSION = "policy_version"
_PUBLISH_ROWS = 1 << 14  # appended before they are taken up even if nobody samples
_SWEEPS = 64  # marks are told when so large a part of the limit was evicted since
_REDRAWS = 8
_YIELD_S = 0.05  # at the most, and only while a batch is being made
_POLL_S = 0.05  # steps may also come from elsewhere, by a refresh


class ReplayBuffer:
    """Appends, keeps, samples and checkpoints experience at a URL; safe to use from several threads.

    An appended step can be sampled at once, open episodes included; it is encoded and stored behind, and durable
    after `flush` or a background commit. What is over ``capacity`` goes, oldest first. Use it as a context manager,
    or `close` it.

    ```
    buffer = ReplayBuffer("runs/7", capacity=1_000_000, sample=Windows(length=32), seed=0)
    buffer.append({"observation": obs, "action": action, "reward": reward}, env=0, terminated=False)
    batch = buffer.sample(256)
    buffer.save_checkpoint("step-1000")
    buffer = ReplayBuffer.resume("runs/7", "latest")  # after a crash: goes on with the very next batch
    ```

    Args:
        url: A path, or an fsspec URL of memory, S3, GCS or Azure. A store that is there is gone on with: all of it
            can be sampled; `resume` goes on from a checkpoint instead.
        schema: The fields; None: those of the store, or read off the first data.
        capacity: Steps to keep, or a `Retention`; None: everything.
        device: Where batches and the cache live.
        cache_bytes: Bound of the memory for decoded chunks on the device, steps not yet committed included.
        host_cache_bytes: Bound of the memory for compressed chunks in RAM; see `Reader`.
        sample: The windows that `sample` draws unless told otherwise.
        priorities: Draw by priority.
        samples_per_insert: Makes appends and samples wait for each other; see `SamplesPerInsert`.
        statistics: Keep running statistics of all fields, or of these; see `statistics`.
        seed: Of the draws.
        name: Of the stream that this session writes.
        commit_steps: Commit in the background whenever so many steps are staged.
        commit_seconds: Commit in the background at least this often.
        buffer_bytes: Bound of the memory for steps that are appended and not yet durable.
        grace_s: How long evicted steps stay on storage, for readers that still look at them.
        rank: Rank of this session among those that write the store together; by default that of torch.distributed
            where it is in use, else there is but one. With several, making the buffer waits for all of them.
        world_size: Number of ranks; goes with ``rank``.
        share: ``"partition"``: a rank samples what it has appended, and its part of what it resumed from.
            ``"whole"``: it samples everything; `refresh` shows what others have committed.
        rank_timeout_s: How long to wait for another rank before an error names it.
        through: How ranks reach each other: ``"torch"`` (torch.distributed) or ``"store"`` (notes in the store); by
            default torch.distributed where it has the same ranks.
        attend_s: Look so often whether somebody asks for a checkpoint; see `request_checkpoint`. By default every
            second with several ranks, and never with one.
        checkpoint_seconds: Take a checkpoint so often, of all ranks, in the background.
        keep_checkpoints: Of those that were asked for or taken by the clock, keep so many.
        as_tensordict: Give batches as TensorDicts.
        compiled: Use compiled loops on the CPU; the batches are the same without.
        storage_options: Options for fsspec's filesystem (credentials, endpoints); never stored or shown.
        fsync: Whether commits to a local directory survive a power cut.
    """

    def __init__(
        self,
        url: Url,
        *,
        schema: Schema | None = None,
        storage_options: Mapping[str, Any] | None = None,
        fsync: bool = True,
        **options: Any,
    ) -> None:
        settled = check_options(ReplayOptions(), with_ranks(options))
        store = create(url, schema, storage_options=storage_options, exist_ok=True, fsync=fsync)
        self._begin(start_fresh(store, settled))

    @classmethod
    def resume(
        cls,
        url: Url,
        checkpoint: str | Mapping[str, Any] = "latest",
        *,
        policy: Policy | None = None,
        incomplete: str | Mapping[str, str] = "keep",
        n_envs: int | None = None,
        storage_options: Mapping[str, Any] | None = None,
        fsync: bool = True,
        **changes: Any,
    ) -> ReplayBuffer:
        """Go on from a checkpoint, as a session of its own: the next batch is the one that would have come.

        Shows what the checkpoint holds and what this session appends. What another session wrote after the
        checkpoint stays readable in the store, is `abandoned` here and never mixed in. Episodes that were open read
        as cut.

        With another number of ranks than saved it (``rank`` and ``world_size``, or those of torch.distributed), the
        episodes are dealt out anew, whole, without copying any; `partition_report` says what became of them. Limits
        are scaled so that their sum over the ranks stays; none takes away what a rank was given, unless
        ``capacity`` is given anew.

        Args:
            url: Of the store.
            checkpoint: Name or id of a checkpoint, "latest", or what `state_dict` gave.
            policy: How to deal out episodes, see `redistribute`. By default they stay where they are if there are
                as many ranks as before, and go by steps else.
            incomplete: What becomes of open, headless and cut episodes; see `redistribute`.
            n_envs: Environments of a rank; see `redistribute`.
            storage_options: As for the buffer itself; never stored.
            fsync: The same.
            changes: Options that are to differ from those of the session that saved it. A limit that is lowered
                evicts, another device or cache changes nothing in the batches.

        Raises:
            CheckpointNotFoundError: There is no such checkpoint.
            AmbiguousCheckpointError: "latest" could be one of several, of different lineages.
        """
        store = open_store(url, storage_options=storage_options, fsync=fsync)
        which = checkpoint if isinstance(checkpoint, str) else checkpoint["checkpoint"]
        buffer = cls.__new__(cls)
        buffer._begin(start_resumed(store, which, changes, RedistributionOptions(policy, incomplete, n_envs)))
        return buffer

    @classmethod
    def rejoin(
        cls,
        url: Url,
        *,
        rank: int,
        world_size: int,
        world: str | None = None,
        storage_options: Mapping[str, Any] | None = None,
        fsync: bool = True,
        **changes: Any,
    ) -> ReplayBuffer:
        """Take the place of a rank that died alone, while the others go on.

        Shows again all of its partition that was committed; episodes that it left open read as cut. Priorities,
        columns and counters are those of the last checkpoint of the world; later steps are as new. For ranks that
        reach each other through the store: a process group of torch.distributed does not outlive one of its ranks.

        Args:
            url: Of the store.
            rank: Which rank.
            world_size: Number of ranks.
            world: Id of the world; by default the newest with a place for such a rank.
            storage_options: As for the buffer itself; never stored.
            fsync: The same.
            changes: Options that are to differ from those of the last checkpoint; without one, all options.

        Raises:
            RankError: There is no such world.
        """
        store = open_store(url, storage_options=storage_options, fsync=fsync)
        buffer = cls.__new__(cls)
        buffer._begin(start_rejoined(store, world, {**changes, "rank": rank, "world_size": world_size}))
        return buffer

    def _begin(self, start: SessionStart) -> None:
        self._start, self.options = start, start.options
        self._store, self._world, self._plan = start.store, start.world, start.plan
        self._storage = start.store.snapshot.storage
        self._pid = os.getpid()
        self._is_closed = self._is_closing = False
        self._ending = threading.RLock()
        self._changed = threading.Condition()
        self._idle = threading.Event()  # no batch is being made
        self._idle.set()
        self._appendable = threading.Event()  # no cut waits for room
        self._appendable.set()
        self._sampler = 0  # the thread that sampled last
        self._waiting = 0  # threads that want to know of appends
        self._n_sampled = self._n_redrawn = self._n_unpublished = self._n_told = 0
        self._has_removed = False  # steps that may not be committed yet
        self._version: int | None = None
        self._bytes_per_step: float | None = None
        self._hooks: ExitHooks | None = None
        self._iterators: list[weakref.ref[BatchIterator]] = []
        self._saved_iterators: list[Mapping[str, Any]] = list(start.state["iterators"]) if start.state else []
        self._given_up = {record.id: record.first_row for record in start.store.snapshot.streams}
        self.abandoned = start.abandoned
        self._limiter = start.options.samples_per_insert
        self._statistics = _statistics(start.store.schema, start.options, start.state)
        try:
            self._enter(start)
        except BaseException as failure:
            self._world.is_closing.set()
            if not isinstance(failure, RankError):
                _failure_of(self._world.leave)  # nobody need wait for this one
            raise

    def _enter(self, start: SessionStart) -> None:
        """Take part: with a stream of its own, and a say in what is kept of the others."""
        options, world, checkpoint = start.options, start.world, start.checkpoint
        self._writer = start.store.writer(
            options.name,
            commit_steps=options.commit_steps,
            commit_seconds=options.commit_seconds,
            buffer_bytes=options.buffer_bytes,
            rank=options.rank,
            world_size=options.world_size,
            world=world.id,
            checkpoint=checkpoint.id if checkpoint is not None else None,
            dead=start.dead,
        )
        try:
            # What is gone stays gone for readers: of all records only those of the newest sessions count.
            self._writer.set_view(first_rows=start.first_marks())
            self._connect(checkpoint, start.state)
            if world.size > 1:
                # Of older streams, what all ranks have passed may go: so all of them say what they want of these
                # before the first of them goes on.
                if start.store.schema is not None:
                    self._writer.wait(self._writer.publish_view())
                if not start.is_back:
                    world.gather("ready", True)
                if checkpoint is not None:
                    with self._source.lock:
                        self._tell_marks()  # from here on: of what this rank did not get, the others decide
            if start.plan is not None:
                _log.info("rank %d of %d:\n%s", world.rank, world.size, start.plan.report)
            self._saver.start(is_back=start.is_back)
        except BaseException:
            self._end_threads()
            raise

    def _connect(self, checkpoint: Checkpoint | None, state: Mapping[str, Any] | None) -> None:
        options = self.options
        shown = self._start.first_shown()
        self._reader = Reader(
            shown,
            device=options.device,
            cache_bytes=options.cache_bytes,
            host_cache_bytes=options.host_cache_bytes,
            seed=rank_seed(options.seed, self._world.rank, self._world.size),
            writer=self._writer,
            priorities=options.priorities,
            as_tensordict=options.as_tensordict,
            compiled=options.compiled,
            streams=state["order"]["streams"] if state else (),
        )
        self._source = self._reader._source
        self._retainer = Evictor(self._source, Retention.of(options.capacity))
        if state is not None:
            self._restore(state)
        self._retainer.follow(shown)
        if options.statistics:
            self._writer.observe(self._observe)
        self._sweeper = GarbageCollector(
            self._storage, self._writer, grace_s=options.grace_s, pins=self._pins, records=self._records
        )
        self._saver = CheckpointSchedule(
            self._storage,
            self._world,
            checkpoint.id if checkpoint is not None else None,
            self._sweeper.check_pins,
            self._writer.wait,
            self._take_cut,
            CheckpointOptions(options.attend_s, options.checkpoint_seconds, options.keep_checkpoints),
        )
        self._source.published = self._retain
        if (checkpoint is not None or self._start.is_back) and self._store.schema is not None:
            self._writer.publish_view()  # what this session wants of older streams counts from now on

    def _restore(self, state: Mapping[str, Any]) -> None:
        if state["counters"]["policy_version"] is not None:
            self._keep_versions(int(state["counters"]["policy_version"]))
        with self._source.lock:
            self._source.arrange(state["order"], growing=self._start.growing)
            self._retainer.load_state_dict(state["retention"], self._start.seen)
            self._reader.load_state_dict(as_tensors(state["reader"]))
        counters = state["counters"]
        self._n_sampled, self._n_redrawn = int(counters["sampled"]), int(counters["redrawn"])
        self._bytes_per_step = counters["bytes_per_step"]
        if self._limiter is not None and state["limiter"] is not None:
            self._limiter.load_state_dict(state["limiter"])

    # ---- appending

    def append(
        self,
        step: Step,
        *,
        env: int | None = None,
        envs: Iterable[int] | None = None,
        terminated: Flags = None,
        truncated: Flags = None,
        final: Step | None = None,
    ) -> Handle | Handles:
        """Append one step of one environment, or of several at once; see `Writer.append`."""
        envs = envs if envs is None or hasattr(envs, "__len__") else list(envs)
        n = 1 if envs is None else len(envs)  # type: ignore[arg-type]
        with self._inserting(n):
            return self._writer.append(
                step, env=env, envs=envs, terminated=terminated, truncated=truncated, final=final
            )

    def add_episode(
        self,
        data: Step,
        *,
        terminated: bool = False,
        truncated: bool = False,
        env: int = 0,
        metadata: Mapping[str, Any] | None = None,
    ) -> EpisodeKey:
        """Append a whole episode of T steps; see `Writer.append_episode`."""
        with self._inserting(_n_rows(data, 1)):
            return self._writer.append_episode(
                data, terminated=terminated, truncated=truncated, env=env, metadata=metadata
            )

    def extend(
        self,
        data: Step,
        *,
        envs: Iterable[int] | None = None,
        terminated: Flags = None,
        truncated: Flags = None,
        final: Step | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> Handles:
        """Append a ``[T, B]`` block of T steps of B environments; see `Writer.append_rollout`."""
        with self._inserting(_n_rows(data, 2)):
            return self._writer.append_rollout(
                data, envs=envs, terminated=terminated, truncated=truncated, final=final, metadata=metadata
            )

    def end_episode(
        self,
        env: int = 0,
        *,
        terminated: bool = False,
        truncated: bool = False,
        final: Step | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> EpisodeKey:
        """End the open episode of an environment; see `Writer.end_episode`."""
        with self._call():
            return self._writer.end_episode(
                env, terminated=terminated, truncated=truncated, final=final, metadata=metadata
            )

    def abort_episode(self, env: int = 0) -> EpisodeKey:
        """Give up the open episode of an environment; its steps are drawn no more."""
        with self._call():
            return self._writer.abort_episode(env)

    def amend(self, values: Step, *, env: int = 0, t: int | None = None) -> None:
        """Change a step of an open episode that has no place on disk yet; see `Writer.amend`."""
        with self._call():
            self._writer.amend(values, env=env, t=t)

    @contextlib.contextmanager
    def _inserting(self, n: int) -> Iterator[None]:
        self._check()
        if self._limiter is not None:
            self._limiter.await_insert(n)
        self._appendable.wait()
        if not self._idle.is_set():
            # Give way to a batch once: two threads that run Python all the time would each wait for the other.
            self._idle.wait(_YIELD_S)
        try:
            yield
        except BaseException:
            if self._limiter is not None:
                self._limiter.cancel_insert(n)
            raise
        self._n_unpublished += n
        if self._n_unpublished >= _PUBLISH_ROWS:
            self._publish_if_free()
        if self._waiting:
            with self._changed:
                self._changed.notify_all()
        if self._sampler not in (0, threading.get_ident()):
            time.sleep(0)  # lets go of the interpreter's lock, which a thread that samples may be waiting for

    def _publish_if_free(self) -> None:
        """Take up what was appended, so that limits hold also while nobody samples."""
        if self._source.lock.acquire(blocking=False):
            try:
                self._n_unpublished = 0
                self._source.publish(may_commit=False)
            finally:
                self._source.lock.release()

    # ---- sampling

    def sample(
        self,
        batch_size: int,
        windows: Windows | None = None,
        *,
        out: Mapping[str, Any] | Ring | None = None,
        **which: Any,
    ) -> Any:
        """Draw a batch of windows: uniformly, or by priority if the buffer has priorities.

        Args:
            batch_size: How many.
            windows: Which, and what comes with them; by default what the buffer was made with.
            out: Memory to write into; see `Reader.sample`.
            which: ``where``, ``recent_steps``, ``recent_episodes``, ``recent_fraction``, ``prioritised``,
                ``relabel``: see `Reader.sample`.
        """
        self._check()
        check_positive("batch_size", batch_size)
        windows = self.options.sample if windows is None else windows
        self._admit(batch_size)
        self._idle.clear()
        self._sampler = threading.get_ident()
        try:
            return self._drawn(batch_size, windows, out, which)
        except BaseException:
            self._n_sampled -= batch_size
            if self._limiter is not None:
                self._limiter.cancel_sample(batch_size)
            raise
        finally:
            self._idle.set()

    def _admit(self, batch_size: int) -> None:
        """Count a batch, once it may be drawn."""
        if self._limiter is not None:
            self._limiter.await_sample(batch_size)
        self._n_sampled += batch_size

    def _drawn(self, batch_size: int, windows: Windows, out: Any, which: Mapping[str, Any]) -> Any:
        for _ in range(_REDRAWS):
            try:
                return self._reader.sample(batch_size, windows, out=out, **which)
            except SnapshotExpiredError:  # another session has evicted it meanwhile
                self.refresh()
                self._n_redrawn += 1
        return self._reader.sample(batch_size, windows, out=out, **which)

    def batches(
        self, batch_size: int, windows: Windows | None = None, *, prefetch: int = 0, **which: Any
    ) -> BatchIterator:
        """An endless iterator over batches, with some prepared in the background; see `Reader.batches`.

        Checkpoints keep where it is. After `resume`, the first iterator that is asked for goes on where the first
        one was, the second where the second was.
        """
        self._check()
        windows = self.options.sample if windows is None else windows
        with self._source.lock:  # others may sample, ask for iterators, take a checkpoint
            counter = self._reader._rng.counter
            iterator = self._reader.batches(batch_size, windows, prefetch=prefetch, admit=self._admit, **which)
            if self._saved_iterators:
                self._source.publish()
                iterator.load_state_dict(as_tensors(self._saved_iterators.pop(0)))
                self._reader._rng.counter = counter  # it was begun before, when a number was taken for it
            self._iterators = [*(ref for ref in self._iterators if ref() is not None), weakref.ref(iterator)]
        return iterator

    def epoch(self, batch_size: int, windows: Windows | None = None, **options: Any) -> BatchIterator:
        """An iterator over every window once; see `Reader.epoch`."""
        self._check()
        return self._reader.epoch(batch_size, self.options.sample if windows is None else windows, **options)

    def sample_episodes(self, batch_size: int, **options: Any) -> Any:
        """Whole episodes, padded to the longest; see `Reader.sample_episodes`."""
        self._check()
        return self._reader.sample_episodes(batch_size, **options)

    def at(self, index: torch.Tensor, windows: Windows | None = None, **options: Any) -> Any:
        """The windows that a batch's ``index`` names; see `Reader.at`."""
        self._check()
        return self._reader.at(index, self.options.sample if windows is None else windows, **options)

    def update_priorities(self, index: torch.Tensor, priority: torch.Tensor, windows: Windows | None = None) -> int:
        """Set priorities of steps that a batch's ``index`` names; see `Reader.update_priorities`."""
        self._check()
        return self._reader.update_priorities(index, priority, windows)

    def add_column(self, name: str, field: Field, *, fill: float = 0) -> None:
        """Keep a value for every step, computed after collection; see `Reader.add_column`. Checkpoints hold it."""
        self._check()
        self._reader.add_column(name, field, fill=fill)

    def write_column(
        self, name: str, index: torch.Tensor, values: torch.Tensor, windows: Windows | None = None
    ) -> int:
        """Set a column's values at steps that a batch's ``index`` names; see `Reader.write_column`.

        `flush` makes them durable.
        """
        self._check()
        return self._reader.write_column(name, index, values, windows)

    def write_all(self, name: str, values: Any) -> int:
        """Set a column's values of all steps, in the order of `read_all_in_order`; returns how many those are."""
        self._check()
        return self._reader.write_all(name, values)

    def read_all_in_order(self, **options: Any) -> BatchIterator:
        """An iterator over all steps, a block at a time; see `Reader.read_all_in_order`."""
        self._check()
        return self._reader.read_all_in_order(**options)

    @property
    def policy_version(self) -> int | None:
        """The version of the policy that collects now; None: not kept."""
        return self._version

    @policy_version.setter
    def policy_version(self, version: int) -> None:
        """Note it with every step from now on; batches hold ``policy_version``, -1 where it was not kept yet."""
        self._check()
        if not isinstance(version, int) or isinstance(version, bool) or not 0 <= version < 1 << 62:
            raise ValueError(f"policy_version: expected an integer of at least 0, got {version!r}")
        if self._version is not None and version < self._version:
            raise ValueError(f"policy_version: expected at least {self._version}, got {version}")
        with self._source.lock:
            self._source.publish()
            self._keep_versions(version)
            self._reader.follow_columns()  # what came before has the version from before
            self._version = version

    def _keep_versions(self, version: int) -> None:
        if self._version is None:
            self._version = version
            self._reader.add_column(VERSION, Field("int64"), fill=-1, of_new=lambda: self._version or 0)

    def remove_below(self, version: int) -> int:
        """Evict all steps that an older policy collected, and say how many; costs as much as there are steps."""
        self._check()
        with self._source.lock:
            self._source.publish(waits=True)
            if self._version is None:
                raise ValueError("no policy versions are kept; set policy_version before collecting")
            return self._remove(self._reader.column(VERSION) < version)

    def evict(
        self,
        n_episodes: int | None = None,
        *,
        where: Where | None = None,
        keys: Iterable[EpisodeKey] | None = None,
    ) -> int:
        """Evict episodes, chosen in one of three ways. Returns how many steps went.

        Args:
            n_episodes: So many of the oldest, but for those that are open.
            where: Those that are committed and that this function of the episode table says True for; of those that
                are open, the steps they have.
            keys: These, if they are here; of those that are open, the steps they have.
        """
        if sum(choice is not None for choice in (n_episodes, where, keys)) != 1:
            raise ValueError("evict: say one of n_episodes, where and keys")
        if n_episodes is not None:
            check_positive("n_episodes", n_episodes)
        self._check()
        with self._source.lock:
            self._source.publish(waits=True)
            if n_episodes is not None:
                entries = self._retainer.oldest(n_episodes)
            elif where is not None:
                first = self._source.index.first
                entries = np.flatnonzero(self._source.mask(where)[first:]) + first
            else:
                entries = self._source.entries_of(keys or ())
            return self._removed(self._retainer.drop_episodes(entries))

    def clear(self) -> int:
        """Evict everything; episodes that are open go on. Returns how many steps went."""
        self._check()
        with self._source.lock:
            self._source.publish(waits=True)
            return self._remove(np.ones(self._source.index.n_steps, bool))

    def _remove(self, chosen: Array) -> int:
        return self._removed(self._retainer.drop_where(chosen))

    def _removed(self, n: int) -> int:
        self._reader.follow_priorities()
        self._reader.follow_columns()
        self._tell_marks()
        self._has_removed = True
        return n

    def set_priorities(self, **options: Any) -> None:
        """Change options of the priorities; see `Reader.set_priorities`."""
        self._check()
        self._reader.set_priorities(**options)
        if self.options.priorities is not None:
            self.options = replace(self.options, priorities=replace(self.options.priorities, **options))

    # ---- readiness

    def is_ready(self, *, min_steps: int = 1, min_episodes: int = 0) -> bool:
        """Whether so much can be sampled already."""
        self._check()
        with self._source.lock:
            self._source.publish()
            index = self._source.index
            return index.n_steps >= min_steps and index.n_episodes >= min_episodes

    def wait_ready(self, *, min_steps: int = 1, min_episodes: int = 0, timeout_s: float | None = None) -> None:
        """Wait until other threads have appended so much.

        Raises:
            TimeoutError: They have not.
        """
        until = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            self._waiting += 1
            try:
                while not self.is_ready(min_steps=min_steps, min_episodes=min_episodes):
                    left = None if until is None else until - time.monotonic()
                    if left is not None and left <= 0:
                        raise self._not_ready(min_steps, min_episodes, timeout_s)
                    self._changed.wait(_POLL_S if left is None else min(left, _POLL_S))
            finally:
                self._waiting -= 1

    async def ready(self, *, min_steps: int = 1, min_episodes: int = 0, timeout_s: float | None = None) -> None:
        """The same for coroutines: other tasks go on meanwhile."""
        until = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while not self.is_ready(min_steps=min_steps, min_episodes=min_episodes):
            left = until - time.monotonic()
            if left <= 0:
                raise self._not_ready(min_steps, min_episodes, timeout_s)
            await asyncio.sleep(min(left, _POLL_S))

    def _not_ready(self, min_steps: int, min_episodes: int, timeout_s: float | None) -> TimeoutError:
        return TimeoutError(
            f"waited {timeout_s} s for {min_steps} steps in {min_episodes} episodes; there are {self.n_steps} in"
            f" {self.n_episodes}"
        )

    # ---- what there is

    @property
    def n_steps(self) -> int:
        """Steps that can be sampled (transitions; final observations do not count)."""
        self._check()
        with self._source.lock:
            self._source.publish()
            return self._source.index.n_steps

    @property
    def n_episodes(self) -> int:
        self._check()
        with self._source.lock:
            self._source.publish()
            return self._source.index.n_episodes

    def __len__(self) -> int:
        """Number of steps."""
        return self.n_steps

    def n_windows(self, windows: Windows | None = None) -> int:
        """How many windows can be drawn."""
        return self._reader.n_windows(self.options.sample if windows is None else windows)

    @property
    def schema(self) -> Schema | None:
        return self._writer.schema or self._store.schema

    @property
    def streams(self) -> list[str]:
        """Ids of the streams, by the number that stands in a batch's ``index``."""
        return self._reader.streams

    @property
    def rank(self) -> int:
        return self._world.rank

    @property
    def world_size(self) -> int:
        return self._world.size

    @property
    def world(self) -> str:
        """Id of the set of sessions that this one belongs to; the same on all ranks."""
        return self._world.id

    @property
    def partition_report(self) -> PartitionReport | None:
        """What became of the episodes of the checkpoint that this was resumed from.

        None where there is none, or where every rank shows everything.
        """
        start = self._start
        is_whole = self.options.share == "whole" and self._world.size > 1
        if self._plan is None and start.checkpoint is not None and start.cut is not None and not is_whole:
            self._plan = plan_partitions(start.cut, start.checkpoint, self._world.size, policy=None)
        return None if self._plan is None else self._plan.report

    @property
    def stream(self) -> str:
        """Id of the stream that this session writes."""
        return self._writer.stream

    @property
    def store(self) -> Store:
        """The store, to look at episodes; refresh it to see what was committed."""
        return self._store

    @property
    def url(self) -> str:
        return self._store.url

    @property
    def reader(self) -> Reader:
        """What draws and assembles batches, for whatever the buffer has no method for."""
        return self._reader

    def statistics(self) -> dict[str, dict[str, Any]]:
        """Count, mean, std, min and max of fields over all committed steps, evicted ones included.

        Raises:
            ValueError: The buffer was made without ``statistics``.
        """
        if not self.options.statistics:
            raise ValueError(
                "this buffer keeps no statistics; make it with statistics=True, or with names of fields"
            )
        return self._statistics.result() if self._statistics is not None else {}

    def stats(self) -> dict[str, Any]:
        """Figures for loggers: sizes, evictions by cause, what is not durable yet, cache, commits."""
        self._check()
        with self._source.lock:
            self._source.publish()
            index = self._source.index
            figures = {
                "n_steps": index.n_steps,
                "n_episodes": index.n_episodes,
                "n_sampled": self._n_sampled,
                "n_redrawn": self._n_redrawn,
                "evicted": {cause: dict(counts) for cause, counts in self._retainer.evicted.items()},
                "abandoned_rows": sum(self.abandoned.values()),
                "cache": self._source.stats(),
            }
        figures["writer"] = self._writer.stats()
        figures["storage"] = self._sweeper.stats()
        if self._limiter is not None:
            figures["samples_per_insert"] = self._limiter.state_dict()
        return figures

    # ---- durability

    def flush(self, *, wait: bool = True) -> None:
        """Make everything appended, written back and evicted durable, and wait for checkpoints being written.

        Args:
            wait: Say False to begin a commit of what was appended in the background, unless one is on its way;
                what fails is raised by the next call.
        """
        if not wait:
            self._check_open()
            self._writer.begin_commit()
            return
        self._check()
        self._writer.commit()
        if self._reader.has_columns:
            with self._source.lock:
                self._source.publish()  # rows that are committed now have their values stored by row
                self._reader.save_columns(self._writer)
            self._writer.commit()
        self._forget_removed()
        self._saver.wait()

    def _forget_removed(self) -> None:
        """Let no reader be shown what somebody asked to evict, also if that came before its commit.

        What limits evict is not looked at here: when that happens must not depend on commits.
        """
        if not self._has_removed:
            return
        with self._source.lock:
            self._source.publish()
            self._tell_marks()
            self._has_removed = False
        self._sweeper.publish()

    def refresh(self) -> None:
        """Show what other writers of this session's world have committed meanwhile; costs what is new."""
        self._check()
        self._follow_others()

    def _follow_others(self) -> None:
        self._store.refresh()
        with self._source.lock:
            fresh = self._start.shown()
            self._source.follow(fresh)
            self._retainer.follow(fresh)

    def save_checkpoint(self, name: str = "checkpoint", *, wait: bool = False, keep_last: int | None = None) -> str:
        """Name the state of this moment, to resume from. No step data is copied or read.

        The cut is taken at once; it is written in the background and published when all that it needs is durable.
        If that fails, the next call on the buffer raises why, and the checkpoint before stands.

        With several ranks, all of them call this with the same name, each at its own moment. It is published when
        the parts of all are durable, by one put; if a rank fails or never calls, it is not published at all.

        Args:
            name: What to call it; a unique id is added.
            wait: Return when it is durable.
            keep_last: Afterwards keep only so many of this lineage, this one included.

        Returns:
            The checkpoint's id.
        """
        if self._world.size == 1:
            self._check()
        else:  # what failed before is raised when this rank has taken part: the others count on it
            self._check_open()
        if keep_last is not None and not (isinstance(keep_last, int) and keep_last >= 1):
            raise ValueError(f"keep_last: expected a positive number or None, got {keep_last!r}")
        return self._saver.save(name, wait=wait, keep_last=keep_last)

    def request_checkpoint(
        self, name: str = "requested", *, wait: bool = False, timeout_s: float | None = None
    ) -> str | None:
        """Ask all ranks for a checkpoint, from any one of them; they need not call anything for it.

        Each takes its cut in the background as soon as it hears of it, so the cuts are not of one moment;
        `save_checkpoint` on all ranks is for that. `trajstore.request_checkpoint` does the same from outside.
        Requests of the same moment are answered by one checkpoint, under one of their names.

        Args:
            name: What to call it; a unique id is added.
            wait: Return when it is published, with its id.
            timeout_s: How long to wait for that.
        """
        self._check()
        return self._saver.ask(name, wait=wait, timeout_s=timeout_s)

    def checkpoint_on_exit(
        self,
        *,
        signals: Iterable[int] = (signal.SIGTERM,),
        exceptions: bool = True,
        timeout_s: float = 60.0,
    ) -> None:
        """Take a checkpoint of all ranks before this process ends by a signal or an uncaught exception.

        Then it ends as it would have. Called in the main thread; `close` sets everything back.

        Args:
            signals: Which; by default the one that pre-emption sends.
            exceptions: Whether exceptions count that leave the program, or the ``with`` block of this buffer.
            timeout_s: How long the end may be put off.
        """
        self._check()
        if self._hooks is not None:
            self._hooks.remove()
        self._hooks = ExitHooks(lambda why: self._save_last(why, timeout_s), signals, exceptions)

    def _save_last(self, why: str, timeout_s: float) -> None:
        if not self._is_closed and not self._is_closing:
            _log.warning("taking a last checkpoint: %s", why)
            try:
                self._saver.ask("last", wait=True, timeout_s=timeout_s)
            except BaseException:
                self._saver.cancel()  # nobody waits for it any longer
                raise

    def _take_cut(self, name: str, keep_last: int | None, hold: Callable[[CapturedState], None]) -> CapturedState:
        """What a checkpoint of this moment holds; ``hold`` is told of it before anything can be evicted after."""
        if self._world.size > 1 and self.options.share == "whole":  # others may have evicted what is shown here
            self._follow_others()
        try:
            while (taken := self._try_cut(name, keep_last, hold)) is None:
                self._appendable.clear()  # else others might append for ever what there is no room for
                self._writer.commit()
            return taken
        finally:
            self._appendable.set()

    def _try_cut(
        self, name: str, keep_last: int | None, hold: Callable[[CapturedState], None]
    ) -> CapturedState | None:
        """The same; None if some of what was appended can't be shown before it is committed."""
        with self._source.lock, self._writer.staged(blocking=True) as staging:
            self._source.publish(may_commit=False)
            if self._source.is_behind(staging):
                return None
            wanted = unshown_rows(self._source)
            record: Future[tuple[CommitRecord | None, Mapping[str, Any]]] = Future()
            cuts, state = self._cuts(wanted), self._state()
            ticket = self._writer.cut(lambda found: self._cut_done(record, found))
            own = self._writer.stream
            taken = CapturedState(name, cuts, own, wanted.get(own, 0), state, record, ticket, keep_last)
            hold(taken)
            return taken

    def state_dict(self, *, keep_last: int | None = None) -> dict[str, str]:
        """What to keep in a checkpoint of one's own, to `resume` from: names a checkpoint that is durable by then.

        The state itself stands in the store, where it keeps what it needs from being deleted; ``keep_last`` lets
        older checkpoints of this lineage go.
        """
        return {"url": self.url, "checkpoint": self.save_checkpoint("state", wait=True, keep_last=keep_last)}

    def _cut_done(self, result: Future[Any], record: CommitRecord | None) -> None:
        # On the background thread, in order of commits: statistics are those of this very cut.
        statistics = self._statistics.state_dict() if self._statistics is not None else None
        with contextlib.suppress(InvalidStateError):  # nobody waits for it any longer
            result.set_result((record, {"statistics": statistics}))

    def _cuts(self, wanted: Mapping[str, int]) -> dict[str, StreamExtent]:
        """What is wanted of every stream but the session's own; of the wholly evicted ones nothing."""
        records = {record.id: record for record in self._source.snapshot.streams}
        cuts = {}
        for stream, cut in self._source.snapshot.cuts().items():
            first = max(cut.first, wanted.get(stream, cut.stop))
            if stream != self._writer.stream and first < cut.stop:
                cuts[stream] = replace(cut, first=first, record=None)
                if records[stream].is_sealed:  # embedded, so that resuming reads nothing of it
                    cuts[stream] = replace(cuts[stream], record=cuts[stream].of(records[stream]))
        return cuts

    def _state(self) -> dict[str, Any]:
        iterators = [i for ref in self._iterators if (i := ref()) is not None and not i.is_closed]
        for iterator in iterators:
            iterator.plan_queue_again()
        return {
            "options": to_json(self.options),
            "order": self._source.order(),
            "reader": self._reader.state_dict(),
            "retention": self._retainer.state_dict(),
            "iterators": [_without_priorities(i.state_dict()) for i in iterators] + self._saved_iterators,
            "limiter": self._limiter.state_dict() if self._limiter is not None else None,
            "counters": {
                "sampled": self._n_sampled,
                "redrawn": self._n_redrawn,
                "bytes_per_step": self._bytes_per_step,
                "policy_version": self._version,
            },
        }

    @property
    def checkpoints(self) -> list[Checkpoint]:
        """All checkpoints of the store, parents before children."""
        return checkpoints.list_checkpoints(self._storage)

    def prune_checkpoints(self, keep: int) -> list[str]:
        """Remove the oldest checkpoints of this lineage, so that ``keep`` are left; returns which went."""
        self._check()
        if not isinstance(keep, int) or keep < 1:
            raise ValueError(f"keep: expected a positive number, got {keep!r}")
        self._saver.wait()
        newest = self._saver.newest
        return prune(self._storage, newest, keep) if newest is not None else []

    def close(self) -> None:
        """Commit, end open episodes as cut, wait for checkpoints, and release everything.

        If it fails because the storage does, it may be called again; until then nothing that was appended is lost.
        """
        self._check_process()
        with self._ending:
            if not self._is_closed:
                self._close()

    def _close(self) -> None:
        if not self._writer.is_closed:
            self._writer.commit()
            self._evict_last()
        self._is_closing = True
        errors = [e for end in (self._saver.close, self._sweeper.close) if (e := _failure_of(end))]
        self._note_marks()
        self._writer.close()
        self._is_closed = True
        errors += [e for e in (_failure_of(self._world.leave),) if e]
        self._unhook()
        if self._limiter is not None:
            self._limiter.close()
        with self._source.lock:
            self._source.close()
        if errors:
            raise errors[0]

    def _evict_last(self) -> None:
        with self._source.lock:
            try:
                self._source.publish()
            except ValueError:  # `cache_bytes` has no room for what was appended, and nobody has looked before:
                if self._source.has_cache:  # whoever opens the store next applies its limits
                    raise

    def _unhook(self) -> None:
        if self._hooks is not None:
            self._hooks.remove()

    def _note_marks(self) -> None:
        """Let the last record say what is not wanted: publishing needs no time of grace, only deleting does."""
        if self._writer.is_closed or not self._retainer.n_evicted:
            return
        with self._source.lock:
            said = self._writer.first_rows
            marks = {name: max(row, said.get(name, 0)) for name, row in self._unwanted().items()}
            own = min(marks.pop(self._writer.stream, 0), self._writer.committed_rows)
            self._writer.set_view(first_row=own, first_rows={name: row for name, row in marks.items() if row})

    def _release(self) -> None:
        """End all threads, whatever becomes of what is not durable."""
        self._is_closed = self._is_closing = True
        if self._limiter is not None:
            self._limiter.close()
        self._unhook()
        self._saver.cancel()
        self._end_threads()
        _failure_of(self._world.leave)
        self._writer._release()
        with self._source.lock:
            self._source.close()

    def _end_threads(self) -> None:
        """As far as there are any, whatever they are about."""
        for name in ("_saver", "_sweeper"):
            if part := getattr(self, name, None):
                _failure_of(part.close)
        _failure_of(self._writer.discard)

    def __enter__(self) -> ReplayBuffer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if isinstance(error, Exception) and self._hooks is not None and self._hooks.handles_exceptions:
                self._hooks.save(type(error).__name__)
            self.close()
        except Exception as failure:
            self._release()
            if error is None:
                raise
            error.add_note(f"trajstore: the buffer could not be closed either: {failure}")

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else "open"
        return f"<ReplayBuffer {self.url}, stream {self.stream}, {state}>"

    @contextlib.contextmanager
    def _call(self) -> Iterator[None]:
        self._check()
        yield

    def _check_process(self) -> None:
        # Before any lock: in a forked child it may be held for ever.
        if self._pid != os.getpid():
            raise ClosedError(f"the buffer at {self.url} belongs to process {self._pid}; open one in this process")

    def _check_open(self) -> None:
        self._check_process()
        if self._is_closed:
            raise ClosedError(f"the buffer at {self.url} is closed")

    def _check(self) -> None:
        self._check_open()
        self._saver.raise_pending()
        self._sweeper.raise_pending()
        self._writer.raise_pending()

    # ---- called from elsewhere

    def _retain(self) -> None:
        """Evict what is over a limit; the assembler has just published."""
        if self._is_closing or not self._retainer.apply(time.time(), self._estimated_bytes()):
            return
        self._reader.follow_priorities()
        n_evicted = self._retainer.n_evicted
        if n_evicted - self._n_told > self._source.index.n_steps // _SWEEPS:
            self._n_told = n_evicted
            self._tell_marks()

    def _tell_marks(self) -> None:
        """Let storage go that nobody here wants: not before a checkpoint of ours that does has pinned it."""
        held = self._saver.held
        marks = {name: min(row, held.get(name, row)) for name, row in self._unwanted().items()}
        marks = {name: row for name, row in marks.items() if row}
        self._source.set_marks(marks)
        self._sweeper.want(marks)

    def _estimated_bytes(self) -> float | None:
        """What a step takes on storage, by what this session has written; None while nothing is known."""
        rows = self._writer.committed_rows
        if rows:
            self._bytes_per_step = max(1.0, self._writer.n_bytes_put / rows)
        return self._bytes_per_step

    def _unwanted(self) -> dict[str, int]:
        """By stream: rows below are wanted here no more, nor by those who wrote them."""
        marks = unshown_rows(self._source)
        for record in self._start.cut.streams if self._start.cut is not None else ():
            if marks.get(record.id, 0) >= record.rows:  # of what the checkpoint had of it nothing is left
                marks[record.id] = max(marks[record.id], self._given_up.get(record.id, 0))
        return marks

    def _pins(self) -> dict[str, int]:
        return checkpoints.pins(self._storage)

    def _records(self) -> tuple[CommitRecord, ...]:
        return Snapshot.load(self._storage, self.schema).streams

    def _observe(self, schema: Schema, rows: Mapping[str, Any]) -> None:
        if self._statistics is None:
            self._statistics = _statistics(schema, self.options, None)
        if self._statistics is not None:
            self._statistics.update(rows)


def _statistics(
    schema: Schema | None, options: ReplayOptions, state: Mapping[str, Any] | None
) -> RunningStatistics | None:
    if schema is None or not options.statistics:
        return None
    chosen = None if isinstance(options.statistics, bool) else options.statistics
    statistics = RunningStatistics(schema, fields=chosen)
    if state is not None and state["statistics"] is not None:
        statistics.load_state_dict(state["statistics"])
    return statistics


def _failure_of(call: Callable[[], None]) -> Exception | None:
    try:
        call()
    except Exception as failure:
        return failure
    return None


def _n_rows(data: Any, n_axes: int) -> int:
    """Rows of the smallest field, as far as can be told before anything is checked; for counting only."""
    smallest: int | None = None
    if not isinstance(data, Mapping):
        return 0
    for value in data.values():
        if isinstance(value, Mapping):
            n = _n_rows(value, n_axes)
        else:
            shape = getattr(value, "shape", None) or (len(value) if hasattr(value, "__len__") else 1,)
            n = 1
            for size in shape[:n_axes]:
                n *= int(size)
        smallest = n if smallest is None else min(smallest, n)
    return smallest or 0


def _without_priorities(state: dict[str, Any]) -> dict[str, Any]:
    """The state of an iterator; priorities are those of the buffer, and are kept once."""
    return state | {"draws": {name: value for name, value in state["draws"].items() if name != "priorities"}}
