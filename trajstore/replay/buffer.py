"""The live buffer that a trainer holds: append while you train, sample, get killed, resume exactly."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Unpack

import numpy as np
import torch

from trajstore.arguments import check_positive, names_options
from trajstore.distributed.partition_report import PartitionReport
from trajstore.distributed.partitions import Policy
from trajstore.distributed.redistribution import plan_partitions
from trajstore.format.handles import EpisodeKey
from trajstore.replay.append_methods import AppendMethods
from trajstore.replay.buffer_html import BufferHtml
from trajstore.replay.checkpoint_methods import CheckpointMethods
from trajstore.replay.options import OptionChanges, RejoinChanges, ReplayOptions, check_options, with_ranks
from trajstore.replay.pacing import SamplesPerInsert
from trajstore.replay.retention import Retention
from trajstore.replay.sample_methods import SampleMethods
from trajstore.replay.session import Session, open_session
from trajstore.replay.session_start import (
    Exist,
    RedistributionOptions,
    SessionStart,
    check_exist,
    start_at,
    start_rejoined,
    start_resumed,
)
from trajstore.replay.storage_report import StorageReport, make_report
from trajstore.sampling.batches.batch_assembler import Where
from trajstore.sampling.priorities.priority_options import Priorities
from trajstore.sampling.reader import Reader
from trajstore.sampling.windows import Windows
from trajstore.schema import Schema
from trajstore.storage import DiskCache
from trajstore.store.store import Store, Url, create
from trajstore.store.store import open as open_store

_WINDOWS = Windows()


class ReplayBuffer(AppendMethods, SampleMethods, CheckpointMethods, BufferHtml):
    """Appends, keeps, samples and checkpoints experience at a URL; safe to use from several threads.

    An appended step can be sampled at once, also while its episode is open. It is encoded and stored in the
    background, and durable after `flush` or a background commit. Steps above ``capacity`` are evicted, oldest
    first. Use the buffer as a context manager, or `close` it. A buffer that is dropped unclosed, or left open at a
    normal end of the process, is closed then; Python shows a `ResourceWarning` if these are enabled.

    ```
    buffer = ReplayBuffer("runs/7", capacity=1_000_000, sample=Windows(length=32), seed=0)
    buffer.append({"observation": obs, "action": action, "reward": reward}, env=0, terminated=False)
    batch = buffer.sample(256)
    buffer.save_checkpoint("step-1000")
    buffer = ReplayBuffer.resume("runs/7", "latest")  # after a crash: continues with the very next batch
    ```

    Args:
        url: A path, or an fsspec URL of memory, S3, GCS or Azure.
        exist: What to do if the store holds steps or checkpoints of earlier sessions. ``"join"``: all of it can be
            sampled; this is the default, and logged as a warning unless it is given. ``"resume"``: continue from
            the latest checkpoint as `resume` does, with the options given here; join if there is none. ``"fail"``:
            raise `StoreExistsError`.
        schema: The fields: a `Schema`, or a nested mapping of names to `Field`. None: those of the store, or
            inferred from the first data.
        capacity: The number of steps to keep, or a `Retention`; None: everything.
        device: Where batches and the cache live.
        cache_bytes: Bound of the memory for decoded chunks on the device, including steps not yet committed.
        host_cache_bytes: Bound of the memory for compressed chunks in RAM; see `Reader`.
        sample: The windows that `sample` draws by default.
        priorities: Draw by priority.
        samples_per_insert: Makes appends and samples wait for each other; see `SamplesPerInsert`.
        statistics: Keep running statistics of all fields, or of the named ones; see `statistics`.
        seed: Seed of the draws.
        name: Name of the stream that this session writes.
        commit_steps: Commit in the background after this many staged steps; None: not by count.
        commit_seconds: Commit in the background at least this often; None: not by time.
        buffer_bytes: Bound of the memory for steps that are appended and not yet durable.
        grace_s: Seconds that evicted steps stay on storage, for readers that still use them.
        rank: Rank of this session among those that write the store together. By default the rank in
            torch.distributed, where that is in use. With several ranks, the constructor waits for all of them.
        world_size: Number of ranks; goes with ``rank``.
        share: ``"partition"``: a rank samples what it has appended, and its part of what it resumed from.
            ``"whole"``: it samples everything; `refresh` shows what other ranks have committed.
        rank_timeout_s: Seconds to wait for another rank before an error names it.
        through: How ranks reach each other: ``"torch"`` (torch.distributed) or ``"store"`` (notes in the store). By
            default torch.distributed, where it has the same ranks.
        attend_s: Seconds between checks for checkpoint requests; see `request_checkpoint`. By default 1 with
            several ranks; a single session does not check.
        checkpoint_seconds: Take a checkpoint of all ranks in the background this often; None: never.
        keep_checkpoints: Number of requested and timed checkpoints to keep; None: all.
        pack: Rewrite streams of sessions that have ended as few large objects, in the background; see `pack`.
        as_tensordict: Return batches as TensorDicts.
        compiled: Use compiled loops on the CPU; the batches are the same without.
        storage_options: Options for fsspec's filesystem (credentials, endpoints); never stored or shown.
        fsync: Whether commits to a local directory survive a power cut.
        disk_cache: Where objects of a remote store are kept on a local disk, once they were read.
    """

    @names_options
    def __init__(
        self,
        url: Url,
        *,
        exist: Exist | None = None,
        schema: Schema | Mapping[str, Any] | None = None,
        capacity: int | Retention | None = None,
        device: str | torch.device = "cpu",
        cache_bytes: int | str = "1GiB",
        host_cache_bytes: int | str | None = None,
        sample: Windows = _WINDOWS,
        priorities: Priorities | None = None,
        samples_per_insert: SamplesPerInsert | None = None,
        statistics: bool | Sequence[str] = False,
        seed: int = 0,
        name: str = "buffer",
        commit_steps: int | None = None,
        commit_seconds: float | None = 10.0,
        buffer_bytes: int | str = "64MiB",
        grace_s: float = 10.0,
        rank: int | None = None,
        world_size: int | None = None,
        share: Literal["partition", "whole"] = "partition",
        rank_timeout_s: float = 300.0,
        through: Literal["torch", "store"] | None = None,
        attend_s: float | None = None,
        checkpoint_seconds: float | None = None,
        keep_checkpoints: int | None = None,
        pack: bool = False,
        as_tensordict: bool = False,
        compiled: bool = True,
        storage_options: Mapping[str, Any] | None = None,
        fsync: bool = True,
        disk_cache: DiskCache | None = None,
    ) -> None:
        given: OptionChanges = {
            "capacity": capacity,
            "device": device,
            "cache_bytes": cache_bytes,
            "host_cache_bytes": host_cache_bytes,
            "sample": sample,
            "priorities": priorities,
            "samples_per_insert": samples_per_insert,
            "statistics": statistics,
            "seed": seed,
            "name": name,
            "commit_steps": commit_steps,
            "commit_seconds": commit_seconds,
            "buffer_bytes": buffer_bytes,
            "grace_s": grace_s,
            "rank": rank,
            "world_size": world_size,
            "share": share,
            "rank_timeout_s": rank_timeout_s,
            "through": through,
            "attend_s": attend_s,
            "checkpoint_seconds": checkpoint_seconds,
            "keep_checkpoints": keep_checkpoints,
            "pack": pack,
            "as_tensordict": as_tensordict,
            "compiled": compiled,
        }
        options = check_options(ReplayOptions(), with_ranks(given))
        check_exist(exist)
        store = create(
            url, schema, storage_options=storage_options, exist_ok=True, fsync=fsync, disk_cache=disk_cache
        )
        self._begin(start_at(store, options, given, exist))

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
        disk_cache: DiskCache | None = None,
        **changes: Unpack[OptionChanges],
    ) -> ReplayBuffer:
        """Continue from a checkpoint, in a new session: the next batch is the one that would have come.

        The buffer shows what the checkpoint holds and what this session appends. Rows that another session wrote
        after the checkpoint stay readable in the store; they are `abandoned` here and never sampled. Episodes that
        were open read as cut.

        With another number of ranks than saved the checkpoint (``rank`` and ``world_size``, or those of
        torch.distributed), whole episodes are redistributed without copying any; `partition_report` says which rank
        received what. Limits are scaled so that their sum over the ranks stays the same. Limits never evict
        episodes received in a redistribution, unless ``capacity`` is given.

        Args:
            url: URL of the store.
            checkpoint: Name or id of a checkpoint, "latest", or the result of `state_dict`.
            policy: How to redistribute episodes, see `redistribute`. By default they stay where they are if the
                number of ranks is the same, and are balanced by steps otherwise.
            incomplete: What happens to open, headless and cut episodes; see `redistribute`.
            n_envs: Environments of each rank; see `redistribute`.
            storage_options: As for the constructor; never stored.
            fsync: As for the constructor.
            disk_cache: As for the constructor.
            changes: Options of the constructor that differ from those of the session that saved the checkpoint. A
                lower limit evicts; another device or cache size does not change any batch.

        Raises:
            CheckpointNotFoundError: There is no such checkpoint.
            AmbiguousCheckpointError: "latest" could be one of several, of different lineages.
        """
        store = open_store(url, storage_options=storage_options, fsync=fsync, disk_cache=disk_cache)
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
        disk_cache: DiskCache | None = None,
        **changes: Unpack[RejoinChanges],
    ) -> ReplayBuffer:
        """Take the place of a rank that died alone, while the other ranks continue.

        The buffer shows all committed steps of that rank's partition; episodes that it left open read as cut.
        Priorities, columns and counters are those of the last checkpoint of the world; later steps get the values
        of new steps. This works for ranks that reach each other through the store: a process group of
        torch.distributed does not survive the death of a rank.

        Args:
            url: URL of the store.
            rank: The rank to replace.
            world_size: Number of ranks.
            world: Id of the world; by default the newest one that has such a rank.
            storage_options: As for the constructor; never stored.
            fsync: As for the constructor.
            disk_cache: As for the constructor.
            changes: Options of the constructor that differ from those of the last checkpoint; all options, if there
                is no checkpoint.

        Raises:
            RankError: There is no such world.
        """
        store = open_store(url, storage_options=storage_options, fsync=fsync, disk_cache=disk_cache)
        buffer = cls.__new__(cls)
        buffer._begin(start_rejoined(store, world, {**changes, "rank": rank, "world_size": world_size}))
        return buffer

    def _begin(self, start: SessionStart) -> None:
        self._session: Session = open_session(start)
        self._session.register(self)
        self._plan = start.plan
        self.abandoned: dict[str, int] = start.abandoned
        self._n_joined = self._session.reader.assembler.index.n_steps if start.checkpoint is None else 0

    @property
    def options(self) -> ReplayOptions:
        """What the buffer was made with."""
        return self._session.options

    # ---- evictions by call

    def remove_below(self, version: int) -> int:
        """Evict all steps that an older policy collected; returns how many. Looks at every step."""
        session = self._session
        with session.up_to_date(waits=True):
            return session.eviction.evict_steps(session.versions.older_than(version))

    def evict(
        self,
        n_episodes: int | None = None,
        *,
        where: Where | None = None,
        keys: Iterable[EpisodeKey] | None = None,
    ) -> int:
        """Evict episodes, chosen in exactly one of three ways; returns the number of evicted steps.

        An open episode loses the steps that it has so far, and continues.

        Args:
            n_episodes: This many of the oldest episodes that have ended.
            where: Committed episodes for which this function of the episode table returns True.
            keys: These episodes, if the buffer has them.
        """
        if sum(choice is not None for choice in (n_episodes, where, keys)) != 1:
            raise ValueError("evict: give exactly one of n_episodes, where and keys")
        if n_episodes is not None:
            check_positive("n_episodes", n_episodes)
        with self._session.up_to_date(waits=True):
            return self._session.eviction.evict_episodes(n_episodes, where, keys)

    def clear(self) -> int:
        """Evict all steps; open episodes continue. Returns the number of evicted steps."""
        with self._session.up_to_date(waits=True) as assembler:
            return self._session.eviction.evict_steps(np.ones(assembler.index.n_steps, bool))

    # ---- readiness

    def is_ready(self, *, min_steps: int = 1, min_episodes: int = 0) -> bool:
        """Whether the buffer has this many steps and episodes, and a window that `sample` can draw from them."""
        return self._session.readiness.is_ready(min_steps, min_episodes)

    def wait_ready(self, *, min_steps: int = 1, min_episodes: int = 0, timeout_s: float | None = None) -> None:
        """Block until other threads have appended this many steps and episodes.

        Raises:
            TimeoutError: They have not, after ``timeout_s`` seconds.
        """
        self._session.readiness.wait(min_steps, min_episodes, timeout_s)

    async def ready(self, *, min_steps: int = 1, min_episodes: int = 0, timeout_s: float | None = None) -> None:
        """Like `wait_ready`, for coroutines: the event loop keeps running.

        Raises:
            TimeoutError: The buffer is not ready after ``timeout_s`` seconds.
        """
        await self._session.readiness.wait_async(min_steps, min_episodes, timeout_s)

    # ---- what the buffer holds

    @property
    def n_steps(self) -> int:
        """Number of steps that can be sampled (transitions; final observations do not count)."""
        return self._session.count()[0]

    @property
    def n_episodes(self) -> int:
        """Number of episodes that can be sampled, open ones included."""
        return self._session.count()[1]

    def __len__(self) -> int:
        """Number of steps."""
        return self.n_steps

    @property
    def schema(self) -> Schema | None:
        """The fields; None before the first data, in a store without a declared schema."""
        return self._session.schema

    @property
    def streams(self) -> list[str]:
        """Ids of the streams; their positions are the stream numbers in a batch's ``index``."""
        return self._session.reader.streams

    @property
    def rank(self) -> int:
        return self._session.group.rank

    @property
    def world_size(self) -> int:
        return self._session.group.size

    @property
    def world(self) -> str:
        """Id of the set of sessions that this one belongs to; the same on all ranks."""
        return self._session.group.id

    @property
    def partition_report(self) -> PartitionReport | None:
        """Where the episodes of the resumed checkpoint went.

        None if the buffer resumed no checkpoint, or if every rank shows everything.
        """
        start, group = self._session.start, self._session.group
        is_whole = self.options.share == "whole" and group.size > 1
        shown = start.shown_by_checkpoint
        if self._plan is None and start.checkpoint is not None and shown is not None and not is_whole:
            self._plan = plan_partitions(shown, start.checkpoint, group.size, policy=None)
        return None if self._plan is None else self._plan.report

    @property
    def stream(self) -> str:
        """Id of the stream that this session writes."""
        return self._session.writer.stream

    @property
    def store(self) -> Store:
        """The store, to look at episodes; `Store.refresh` shows later commits."""
        return self._session.store

    @property
    def url(self) -> str:
        return self._session.store.url

    @property
    def reader(self) -> Reader:
        """Draws and assembles the batches; has methods that the buffer itself lacks."""
        return self._session.reader

    @property
    def session(self) -> Session:
        """The buffer's parts, for code that extends trajstore; not a stable interface."""
        return self._session

    def statistics(self) -> dict[str, dict[str, Any]]:
        """Count, mean, std, min and max of fields over all committed steps, including evicted ones.

        Raises:
            ValueError: The buffer was made without ``statistics``.
        """
        return self._session.statistics.result()

    def stats(self) -> dict[str, Any]:
        """Figures for loggers: sizes, evictions by cause, steps not yet durable, cache, commits.

        ``["storage"]["step_bytes"]`` are the bytes of the committed steps that can be sampled; None if other
        sessions wrote some of them and no limit counts bytes. `storage_report` says what else takes bytes, and why.
        ``["packing"]`` counts streams packed and their objects. A remote store adds its ``requests`` by kind and
        bytes of this process, what its ``disk_cache`` holds, and its ``transport`` with the reason.
        """
        session = self._session
        with session.up_to_date() as assembler:
            figures = {
                "n_steps": assembler.index.n_steps,
                "n_episodes": assembler.index.n_episodes,
                "n_sampled": session.drawing.n_sampled,
                "n_redrawn": session.drawing.n_redrawn,
                "evicted": session.eviction.counts,
                "joined_steps": self._n_joined,
                "abandoned_rows": sum(self.abandoned.values()),
                "cache": assembler.stats(),
            }
            step_bytes = session.step_bytes()
        figures["writer"] = session.writer.stats()
        figures["storage"] = {"step_bytes": step_bytes, **session.collector.stats(), **session.storage.stats()}
        packing = {"packing": session.packing.stats()} if session.packing is not None else {}
        pace = {"samples_per_insert": session.pace.state_dict()} if session.pace is not None else {}
        return figures | packing | pace

    def storage_report(self) -> StorageReport:
        """What takes how many bytes on storage, and why. Lists all objects of the store."""
        self._session.check()
        return make_report(self._session.storage, self._session.reader.assembler, self.world)

    # ---- durability

    def flush(self, *, wait: bool = True) -> None:
        """Make appended, written-back and evicted steps durable, and wait for checkpoints being written.

        Args:
            wait: False: only begin a commit in the background, unless one is under way. The next call raises its
                failure.
        """
        if wait:
            self._session.flush()
        else:
            self._session.check_open()
            self._session.writer.begin_commit()

    def refresh(self) -> None:
        """Make commits of other writers of this world visible. The cost is proportional to the new data."""
        self._session.refresh()

    # ---- the end

    def close(self) -> None:
        """Commit, end open episodes as cut, wait for checkpoints, and free memory and threads.

        If the storage fails, this raises and may be called again; until then no appended step is lost.
        """
        self._session.close()

    def _release(self) -> None:
        """End all threads; steps that are not durable are lost."""
        self._session.release()

    def __enter__(self) -> ReplayBuffer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            hooks = self._session.exit_hooks
            if isinstance(error, Exception) and hooks is not None and hooks.handles_exceptions:
                hooks.save(type(error).__name__)
            self.close()
        except Exception as failure:
            self._release()
            if error is None:
                raise
            error.add_note(f"trajstore: the buffer could not be closed either: {failure}")

    def __repr__(self) -> str:
        state = "closed" if self._session.is_closed else "open"
        return f"<ReplayBuffer {self.url}, stream {self.stream}, {state}>"
