"""The replay buffer that ALF's algorithms call."""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Unpack

import numpy as np
import torch

from trajstore.arguments import check_positive
from trajstore.compat.alf.batch_info import BatchInfo
from trajstore.compat.alf.default_device import plain_torch, to_default_device
from trajstore.compat.alf.environment_rings import EnvironmentRings
from trajstore.compat.alf.episodic_returns import EpisodicReturns, ReturnOptions, return_fields
from trajstore.compat.alf.nested_tensors import leaves_by_path, nest_of_paths, shallowest_path
from trajstore.compat.alf.options import ResumeOptionsDict
from trajstore.compat.alf.process_link import OwnerLock, ProcessLink, RemoteReplayBuffer
from trajstore.compat.alf.replay_internals import evict_dropped_steps, set_initial_priority
from trajstore.compat.alf.ring_recovery import recover_rings
from trajstore.compat.alf.step_queries import StepQueries
from trajstore.compat.alf.step_reader import StepReader, to_tensors
from trajstore.compat.alf.step_schema import (
    POSITION,
    check_field_names,
    check_same_fields,
    check_steps,
    classify_steps,
    schema_of_step,
)
from trajstore.compat.alf.window_draws import DrawOptions, WindowDraws
from trajstore.compat.options import ReplayOptionsDict, check_options
from trajstore.compat.private_store import free_private_store, free_with_buffer, private_url
from trajstore.distributed.partitions import Policy
from trajstore.errors import DataError, NotReadyError, StoreNotFoundError
from trajstore.replay.buffer import ReplayBuffer as Buffer
from trajstore.replay.options import with_ranks
from trajstore.sampling.hindsight import Hindsight
from trajstore.sampling.priorities.priority_options import Priorities
from trajstore.schema import Array, Schema, as_array, nest
from trajstore.store import checkpoints
from trajstore.store.store import Store
from trajstore.store.store import open as open_store

_EVICTION_PART = 64  # dropped steps are evicted when they reach 1 / 64 of what the rings can hold,
_MIN_EVICTION = 1024  # and at least this many
_OWN_OPTIONS = {
    "capacity": "say how many steps an environment keeps with max_length",
    "sample": "say how long windows are in get_batch",
    "priorities": "draw by priority with prioritized_sampling",
    "as_tensordict": "batches have the nesting of the experience that was added",
}
_OPEN_LATER: Any = object()  # as data_spec: `resume` opens the buffer itself
_RAW_PRIORITIES = Priorities(alpha=1.0, eps=0.0)  # the buffer only stores them; windows are drawn by `WindowDraws`


class ReplayBuffer(StepQueries):
    """A ring of steps per environment, from which windows are drawn; safe to use from several threads.

    Experience is a nest (dicts, named tuples, dataclasses) of tensors ``[B, ...]`` that contains a ``step_type``.
    Batches have the same nesting. ``reward`` is the reward that arrived with the observation of the same step. All
    windows of consecutive steps are equally likely, across all environments.

    Args:
        data_spec: A nest of specs (objects with a shape and a dtype) of one step. None: the fields of the existing
            store, or of the first batch.
        num_environments: Number of environments.
        max_length: Steps to keep per environment.
        num_earliest_frames_ignored: Windows do not start at this many of the oldest steps of an environment.
        prioritized_sampling: Draw by priority.
        initial_priority: Priority of new steps, until a larger one is set.
        recent_data_steps: How many of the newest windows of each environment count as recent.
        recent_data_ratio: The part of a batch that is drawn from recent windows.
        with_replacement: Draw windows independently. Otherwise they are spread evenly, and none comes twice unless
            there are too few.
        device: The device of the cache of decoded steps, and of batches unless torch has another default device
            than the CPU.
        allow_multiprocess: Processes that get this buffer from this one, by fork or as an argument, may call
            `add_batch`; the steps are added here.
        keep_episodic_info: Accepted and ignored: it is always kept.
        record_episodic_return: Batches come with the discounted return of each window's first step, as
            ``discounted_return`` of the info. It is known once a step with discount 0 follows in the episode.
        default_return: The return of steps whose return is not known.
        gamma: The discount per step of returns.
        reward_clip: The smallest and the largest reward that count for returns; None: all rewards as they are.
        enable_checkpoint: Must be False: ALF's checkpoints do not contain this buffer; call `save_checkpoint`.
        url: A directory or object store for the steps; by default they are kept compressed in RAM. An existing
            store is opened and continued with all its steps. `resume` continues from a checkpoint instead.
        seed: Seed of the draws.
        options: Further options of `trajstore.ReplayBuffer`: ``rank``, ``world_size``, ``cache_bytes``, ...; not
            ``capacity``, ``sample``, ``priorities`` and ``as_tensordict``.

    Raises:
        DataError: The store at the URL does not hold steps of ALF.
    """

    def __init__(
        self,
        data_spec: Any,
        num_environments: int,
        max_length: int = 1024,
        num_earliest_frames_ignored: int = 0,
        prioritized_sampling: bool = False,
        initial_priority: float = 1.0,
        recent_data_steps: int = 1,
        recent_data_ratio: float = 0.0,
        with_replacement: bool = False,
        device: str | torch.device = "cpu",
        allow_multiprocess: bool = False,
        keep_episodic_info: bool | None = None,
        record_episodic_return: bool = False,
        default_return: float = -1000.0,
        gamma: float = 0.99,
        reward_clip: tuple[float, float] | None = None,
        enable_checkpoint: bool = False,
        *,
        url: str | os.PathLike[str] | None = None,
        seed: int = 0,
        **options: Unpack[ReplayOptionsDict],
    ) -> None:
        check_options(type(self).__init__, options, _OWN_OPTIONS)
        for name, value in (("num_environments", num_environments), ("max_length", max_length)):
            check_positive(name, value)
        if enable_checkpoint:
            raise ValueError(
                "enable_checkpoint: expected False, got True; ALF's checkpoints do not contain this buffer. Give a"
                " url and call save_checkpoint, and ReplayBuffer.resume to continue"
            )
        recent = recent_data_steps, recent_data_ratio
        self._draw_options = DrawOptions(num_earliest_frames_ignored, *recent, with_replacement, initial_priority)
        return_options = ReturnOptions(default_return, gamma, reward_clip)
        self._return_options = return_options if record_episodic_return else None
        self._returns: EpisodicReturns | None = None
        self._name = str(options.get("name", "ReplayBuffer"))  # ALF's data transformers read it for summaries
        self._lock = OwnerLock()
        self._is_private = url is None
        self._url = private_url("alf") if url is None else os.fspath(url)
        self._own_options: dict[str, Any] = {
            "device": str(device),
            "capacity": None,  # the rings limit the steps
            "priorities": _RAW_PRIORITIES if prioritized_sampling else None,
            "as_tensordict": False,
        }
        defaults: dict[str, Any] = {"commit_seconds": None, "grace_s": 0} if url is None else {}
        self._passed_options, self._seed = {**defaults, **options}, seed
        self._rings = EnvironmentRings(num_environments, max_length)
        self._buffer: Buffer | None = None
        self._draws: WindowDraws | None = None
        self._reader: StepReader | None = None
        self._link: ProcessLink | None = None
        with plain_torch():
            if data_spec is None:
                self._open_existing()
            elif data_spec is not _OPEN_LATER:
                self._open(schema_of_step(leaves_by_path(data_spec), n_leading_axes=0))
                self._steps.form = nest_of_paths(data_spec)
        if allow_multiprocess and data_spec is not _OPEN_LATER:
            self._link = ProcessLink(self.add_batch)

    @classmethod
    def resume(
        cls,
        url: str | os.PathLike[str],
        checkpoint: str = "latest",
        *,
        num_environments: int,
        max_length: int = 1024,
        data_spec: Any = None,
        policy: Policy | None = None,
        incomplete: str | Mapping[str, str] = "keep",
        **options: Unpack[ResumeOptionsDict],
    ) -> ReplayBuffer:
        """Continue from a checkpoint, with any number of ranks.

        With the same number of ranks, the environments, positions, priorities and the next batch are those that
        would have come. An environment that was empty begins at a position above all others. With another number of
        ranks, or with a ``policy``, episodes are redistributed to the environments, as
        `trajstore.ReplayBuffer.resume` does. No step is changed: an episode without a LAST stays without one, and
        no window continues from it into another episode.

        Args:
            url: URL of the store.
            checkpoint: Name or id of a checkpoint, or "latest".
            num_environments: Number of environments of this rank.
            max_length: Steps to keep per environment; more if an environment received more in a redistribution.
            data_spec: As for the constructor; must match the stored steps. None: batches are nested dicts until the
                first `add_batch`.
            policy: How to redistribute episodes.
            incomplete: What happens to open, headless and cut episodes.
            options: Options of the constructor, ``rank`` and ``world_size`` among them.

        Raises:
            DataError: The stored steps are not those of ALF, or do not match ``data_spec``.
        """
        buffer = cls(_OPEN_LATER, num_environments, max_length, url=url, **options)
        passed_options, store = with_ranks(buffer._passed_options), buffer._open_store()
        check_field_names(store.schema or ())
        buffer._find_return_fields(store.schema)
        if store.schema is not None and data_spec is not None:
            check_same_fields(schema_of_step(leaves_by_path(data_spec), n_leading_axes=0), store.schema)
        found = checkpoints.find(store.snapshot.storage, checkpoint)
        is_redistributed = policy is not None or (found.n_ranks or 1) != (passed_options["world_size"] or 1)
        n_envs = num_environments if is_redistributed else None
        how: dict[str, Any] = {"policy": policy, "incomplete": incomplete, "n_envs": n_envs}
        form = None if data_spec is None else nest_of_paths(data_spec)
        treatments = (incomplete,) if isinstance(incomplete, str) else incomplete.values()
        with plain_torch():
            memory = Buffer.resume(url, found.id, **how, **buffer._own_options, **passed_options)
            buffer._attach(memory, form, redistributed=is_redistributed or "drop" in treatments)
        if options.get("allow_multiprocess", False):
            buffer._link = ProcessLink(buffer.add_batch)
        return buffer

    def _open_store(self) -> Store:
        given = {k: value for k, value in self._passed_options.items() if k in ("storage_options", "fsync")}
        return open_store(self._url, **given)

    def _open_existing(self) -> None:
        """Continue with the steps of an existing store; does nothing if there is no store or it has no fields."""
        try:
            schema = None if self._is_private else self._open_store().schema
        except StoreNotFoundError:
            return
        if schema is not None:
            check_field_names(schema)
            self._open(schema)

    def _find_return_fields(self, schema: Schema | None) -> None:
        if self._return_options is not None and schema is not None:
            self._return_fields = return_fields(schema)

    def _open(self, schema: Schema) -> None:
        self._find_return_fields(schema)
        options = {**self._own_options, **self._passed_options}
        self._attach(Buffer(self._url, schema=schema, seed=self._seed, **options))

    def _attach(self, buffer: Buffer, form: Any = None, *, redistributed: bool = False) -> None:
        """Use a buffer and the steps that it holds; closes the buffer if that fails."""
        assert buffer.schema is not None
        self._step_type = str(shallowest_path(buffer.schema, "step_type"))
        self._discount = shallowest_path(buffer.schema, "discount")
        self._stream = buffer.streams.index(buffer.stream)
        n_envs, length = len(self._rings), self._rings.length
        try:
            if buffer.options.priorities is not None:
                set_initial_priority(buffer, self._draw_options.initial_priority)
            self._rings = recover_rings(buffer, self._step_type, n_envs, length, redistributed=redistributed)
            self._draws = WindowDraws(buffer, self._rings, self._draw_options)
        except BaseException:
            buffer.close()
            raise
        self._reader = StepReader(buffer, self._rings, self.device)
        self._reader.form = form
        if self._return_options is not None:
            self._returns = EpisodicReturns(self._rings, self._return_options)
            self._returns.recover(self._reader, self._return_fields)
        self._buffer = buffer
        if self._is_private:
            free_with_buffer(buffer, self._url)

    # ---- adding

    @property
    def memory(self) -> Buffer:
        """The underlying `trajstore.ReplayBuffer`.

        Raises:
            NotReadyError: It does not exist yet, because the fields of a step are not known.
        """
        if self._buffer is None:
            raise NotReadyError("the buffer is empty: add experience first, or give a data_spec")
        return self._buffer

    def add_batch(self, batch: Any, env_ids: Any = None, blocking: bool = False) -> None:
        """Add one step to each of some environments.

        FIRST begins an episode; if the environment's episode is still open, that one ends as truncated. LAST ends
        an episode: as terminated if ``discount`` is 0 or missing, otherwise as truncated.

        Args:
            batch: A nest of tensors ``[B, ...]``.
            env_ids: The environments, ``[B]``, each at most once; None: all of them.
            blocking: Must be False: a full ring drops its oldest step.

        Raises:
            DataError: The batch differs from earlier batches; nothing was added.
        """
        if blocking:
            raise ValueError(
                "blocking: expected False, got True; full rings drop their oldest steps, so no call waits"
            )
        if self._link is not None and self._link.is_remote:
            self._link.add_batch(batch, env_ids)
            return
        with self._lock:
            env, step = self._checked_envs(env_ids), leaves_by_path(batch)
            if self._buffer is None:
                schema = schema_of_step(step, n_leading_axes=1)
                check_steps(schema, {**step, POSITION: env}, len(env))  # a bad first batch must not fix the fields
                self._open(schema)
            rings = self._rings
            if rings.n_dropped >= max(_MIN_EVICTION, len(rings) * rings.length // _EVICTION_PART):
                self._evict_dropped()  # first, because it may fail: then nothing was added
            is_first, is_last, terminated = classify_steps(step, self._step_type, self._discount, len(env))
            step[POSITION] = rings.stop[env]
            self._end_open(env[is_first & rings.is_open(env)], step, len(env))
            is_all = np.array_equal(env, np.arange(len(rings)))
            envs = range(len(rings)) if is_all else env  # `append` checks an equal range only once
            truncated = is_last & ~terminated
            added: Any = self.memory.append(
                nest(step), envs=envs, terminated=terminated, truncated=truncated, autoreset="disabled"
            )
            rings.add(env, self._stream, (added.episode, added.t), is_first, is_last)
            if self._returns is not None:
                self._returns.add(env, *(step[path] for path in self._return_fields))
            if self._steps.form is None:
                self._steps.form = nest_of_paths(batch)

    def _checked_envs(self, env_ids: Any) -> Array:
        n = len(self._rings)
        env = np.arange(n) if env_ids is None else as_array("env_ids", env_ids)[0]
        if env.ndim != 1 or env.dtype.kind not in "iu" or not len(env):
            raise DataError(f"env_ids: expected some integers [B], got {env.dtype} of shape {env.shape}")
        if env.min() < 0 or env.max() >= n:
            raise DataError(f"env_ids: expected 0 to {n - 1}, got {env.min()} to {env.max()}")
        if np.bincount(env).max() > 1:
            raise DataError(f"env_ids: expected each environment once, got {env.tolist()!s:.80}")
        return env.astype(np.int64)

    def _end_open(self, envs: Array, step: Mapping[str, Any], n_envs: int) -> None:
        """End episodes without a LAST, because a FIRST follows."""
        if not len(envs):
            return
        schema = self.memory.schema
        assert schema is not None
        check_steps(schema, step, n_envs)  # before anything is changed
        for env in envs.tolist():
            self.memory.end_episode(env, truncated=True)
            self._rings.end_episode(env)  # at once, because a later call may fail and `add_batch` be called again

    def _evict_dropped(self) -> None:
        evict_dropped_steps(self.memory, self._rings)

    def clear(self, env_ids: Any = None) -> None:
        """Remove all steps of some environments, or of all; their positions and open episodes continue."""
        with self._lock:
            self._rings.clear(self._checked_envs(env_ids))
            if self._draws is not None:
                if self._draws.prioritised is not None:
                    self._draws.prioritised.discard_trees()
                self._evict_dropped()

    def dequeue(self, env_ids: Any = None, n: int = 1, blocking: bool = False) -> Any:
        """Remove the oldest steps of some environments, and return them.

        A checkpoint does not have them. A store that is opened without a checkpoint may still have them.

        Args:
            env_ids: The environments, ``[B]``, each at most once; None: all of them.
            n: Steps of each environment.
            blocking: Must be False: a call that finds too few steps raises `NotReadyError`.

        Returns:
            A nest of tensors ``[B, n, ...]``, oldest first.

        Raises:
            NotReadyError: An environment has fewer steps; nothing was removed.
        """
        check_positive("n", n)
        if n > self.max_length:
            raise ValueError(
                f"n: expected up to {self.max_length} steps, got {n}; call more often, or set max_length"
            )
        if blocking:
            raise ValueError("blocking: expected False, got True; catch NotReadyError and call again to wait")
        with self._lock:
            env, rings = self._checked_envs(env_ids), self._rings
            fewest = int(env[rings.sizes[env].argmin()])
            if rings.sizes[fewest] < n:
                raise NotReadyError(
                    f"dequeue: expected {n} steps in each environment, env {fewest} has {rings.sizes[fewest]}; add"
                    " experience first"
                )
            position = rings.first[env][:, None] + np.arange(n)
            batch = self._steps.nested(self._steps.values(np.repeat(env[:, None], n, 1), position))
            rings.drop_oldest(env, n)
            if self._draws is not None and self._draws.prioritised is not None:
                self._draws.prioritised.discard_trees()
        return to_default_device(batch)

    # ---- drawing

    def get_batch(
        self, batch_size: int, batch_length: int, *, relabel: Hindsight | None = None
    ) -> tuple[Any, BatchInfo]:
        """Draw windows; a window may continue into the next episode of its environment.

        Args:
            batch_size: Number of windows.
            batch_length: Steps per window.
            relabel: Replace goals of some windows by achieved goals. Where a window continues into another episode,
                that part is relabelled by itself. Paths of fields are written as ``observation/desired_goal``.

        Returns:
            A nest of tensors ``[batch_size, batch_length, ...]``, and where the windows come from.

        Raises:
            NotReadyError: No environment has that many consecutive steps.
        """
        check_positive("batch_size", batch_size)
        check_positive("batch_length", batch_length)
        with self._lock:
            if self._draws is None:
                raise NotReadyError("the buffer is empty: add experience before drawing from it")
            if relabel is not None and relabel.strategy in ("episode", "random") and self._rings.n_dropped:
                self._evict_dropped()  # these strategies take goals from all steps in the store
            drawn = self._draws.draw(batch_size, batch_length)
            values = self._steps.windows(drawn.env, drawn.position, batch_length, relabel)
            env_ids, positions = to_tensors(self.device, drawn.env, drawn.position)
            weight = () if drawn.weight is None else drawn.weight
            returns: Any = ()
            if self._returns is not None:
                returns = to_tensors(self.device, self._returns.at(drawn.env, drawn.position))[0]
            batch = self._steps.nested(values)
        env_ids, positions, weight, returns = to_default_device((env_ids, positions, weight, returns))
        return to_default_device(batch), BatchInfo(env_ids, positions, weight, self, returns)

    def update_priority(self, env_ids: Any, positions: Any, priorities: torch.Tensor) -> None:
        """Set the priorities of windows by their first steps; steps that were dropped are ignored.

        A window of priority 0 is never drawn. If a step is named twice, the last priority counts.

        Raises:
            ValueError: The buffer was created without ``prioritized_sampling``.
        """
        with self._lock:
            if self._draws is None or self._draws.prioritised is None:
                raise ValueError("this buffer has no priorities; create it with prioritized_sampling=True")
            env, position = self._checked_steps(env_ids, positions, must_exist=False)
            is_held = self._rings.has(env, position)
            chosen = torch.from_numpy(is_held).to(priorities.device)
            self._draws.prioritised.update_priorities(env[is_held], position[is_held], priorities[chosen])

    @property
    def initial_priority(self) -> torch.Tensor:
        """The priority of new steps: the largest so far."""
        prioritised = None if self._draws is None else self._draws.prioritised
        return torch.tensor(
            self._draw_options.initial_priority if prioritised is None else prioritised.initial_priority
        )

    # ---- durability

    def save_checkpoint(self, name: str = "checkpoint", *, wait: bool = False, keep_last: int | None = None) -> str:
        """Save the state of all ranks or of none under a name; see `trajstore.ReplayBuffer.save_checkpoint`."""
        with self._lock:
            buffer = self.memory
            self._evict_dropped()
        return buffer.save_checkpoint(name, wait=wait, keep_last=keep_last)

    def flush(self) -> None:
        """Make all added steps durable."""
        self.memory.flush()

    def close(self) -> None:
        """Release memory and threads; data at a URL stays there."""
        if self._link is not None:
            self._link.close()
        if self._buffer is not None:
            self._buffer.close()
        self._free()

    def __reduce__(self) -> tuple[type[RemoteReplayBuffer], tuple[str, bytes]]:
        if self._link is None:
            raise TypeError(
                "a replay buffer cannot be sent to another process; create it with allow_multiprocess=True to add"
                " experience there"
            )
        return RemoteReplayBuffer, (self._link.address, self._link.key)

    def _free(self) -> None:
        if self._is_private:
            free_private_store(self._url)

    def __enter__(self) -> ReplayBuffer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._link is not None:
            self._link.close()
        try:
            if self._buffer is not None:
                self._buffer.__exit__(kind, error, trace)
        finally:
            self._free()
