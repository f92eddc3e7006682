"""RayWriter: how a collector appends to a buffer that runs as a service of Ray actors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any

import numpy as np

from trajstore.arguments import check_positive
from trajstore.errors import ClosedError, DataError
from trajstore.format.handles import Handle, Handles
from trajstore.format.spans import End
from trajstore.ray.block_sender import BlockSender
from trajstore.ray.outbox import Outbox
from trajstore.ray.rollout_blocks import copy_values, end_flags
from trajstore.ray.staged_calls import StagedCalls
from trajstore.schema import Array, flatten, nest
from trajstore.writing.append_calls import Envs
from trajstore.writing.autoreset import Autoreset, as_envs
from trajstore.writing.open_episodes import Flags, OpenEpisodes, RolloutPositions, check_ends, end_of
from trajstore.writing.validation import Step, leading_shape


class RayWriter:
    """Appends to a service from one collector; created by `RayReplayBuffer.writer`. Threads may share it.

    Calls are gathered into blocks, which are sent without waiting for the answer; when too many blocks are
    unanswered, a call waits. An error of the actor is raised by a later call, `flush` at the latest. All blocks go
    to one actor, so episodes stay whole. The collector numbers its environments; writers never share one.

    When the actor dies, open episodes read as cut, and later steps begin new ones. Steps that `flush` has returned
    for are safe. Of the others, blocks that did not reach the actor are sent again. Blocks that it may have had and
    not committed are not sent again, as they could be stored twice: their steps are counted in `n_lost` and logged.

    Args:
        actor: The actor.
        block_steps: Send a block at this many steps.
        block_bytes: Send a block at this many bytes.
        block_s: Send a block at the first call this many seconds after its first step.
        in_flight: Number of blocks that may be unanswered.
    """

    def __init__(self, actor: Any, *, block_steps: int, block_bytes: int, block_s: float, in_flight: int) -> None:
        check_positive("block_steps", block_steps)
        check_positive("in_flight", in_flight)
        self._sender = BlockSender(actor, in_flight)
        self._staged = StagedCalls(block_steps, block_bytes, block_s)
        self._episodes = OpenEpisodes()  # as this writer counts them
        self._n_reported = 0  # lost steps that flush has returned
        self._outbox = Outbox(self._sender, self._staged)
        self._lock = self._outbox.lock
        self._outbox.register(self, f"RayWriter to {actor!r}")

    @property
    def n_lost(self) -> int:
        """Steps that may be lost: the actor refused them, or died before they were known to be durable.

        It is an upper bound: some of these steps may have been committed.
        """
        return self._sender.n_lost

    def append(
        self,
        step: Step,
        *,
        env: int | None = None,
        envs: Envs | None = None,
        terminated: Flags = None,
        truncated: Flags = None,
        final: Step | None = None,
        autoreset: Autoreset | None = None,
    ) -> Handle | Handles:
        """Append one step of one environment, or of several at once; see `ReplayBuffer.append`.

        Returns:
            The episode and t of each step, as this writer counts them; -1 where an environment only reset itself
            and nothing is stored. The stream of the handle is empty, because
            the actor decides later where a step is stored.
        """
        with self._call():
            if envs is not None and env is not None:
                raise DataError("give either env or envs, not both")
            if envs is not None:
                return self._append_steps(step, *as_envs(envs, autoreset), terminated, truncated, final)
            which = np.array([self._episodes.check_env(0 if env is None else env)])
            ends = np.array([int(end_of(terminated, truncated, End.OPEN))])
            block = self._add_step(which, step, ends, final, is_vector=False)
            return Handle("", int(block.episode[0]), int(block.t[0]))

    def _append_steps(
        self,
        step: Step,
        envs: Iterable[int],
        mode: Autoreset | None,
        terminated: Flags,
        truncated: Flags,
        final: Step | None,
    ) -> Handles:
        which = self._episodes.check_envs(envs)
        ends = check_ends(terminated, truncated, which.shape)
        resetting = self._episodes.has_ended[which] if mode == "next_step" else np.zeros(len(which), bool)
        if not resetting.any():
            block = self._add_step(which, step, ends, final)
            return Handles("", block.episode, block.t)
        kept = np.flatnonzero(~resetting)
        episode, t = np.full(len(which), -1), np.full(len(which), -1)
        if len(kept):
            block = self._add_step(which[kept], _rows(step, kept), ends[kept], _rows(final, kept))
            episode[kept], t[kept] = block.episode, block.t
        self._episodes.forget_ends(which[resetting])
        return Handles("", episode, t)

    def _add_step(
        self, which: Array, step: Step, ends: Array, final: Step | None, *, is_vector: bool = True
    ) -> RolloutPositions:
        self._staged.add_step(which, is_vector, step, ends, final)
        block = self._episodes.step(which)
        self._episodes.end(which[ends != End.OPEN])
        self._send_if_due()
        return block

    def add_episode(
        self,
        data: Step,
        *,
        terminated: bool = False,
        truncated: bool = False,
        env: int = 0,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        """Append a whole episode; see `ReplayBuffer.add_episode`."""
        arguments = {"terminated": terminated, "truncated": truncated, "metadata": metadata}
        with self._call():
            env = self._episodes.check_env(env)
            if self._episodes.episode[env] >= 0:
                raise DataError(f"env {env} has an open episode; end it before appending a whole one")
            self._staged.add_call("add_episode", (env,), {"data": copy_values(data), **arguments})
            self._send_if_due()

    def extend(
        self,
        data: Step,
        *,
        envs: Envs | None = None,
        terminated: Flags = None,
        truncated: Flags = None,
        final: Step | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> Handles:
        """Append a ``[T, B]`` block: T steps of B environments; see `ReplayBuffer.extend` and `append`.

        Steps in which environments reset themselves must not be in the block.
        """
        with self._call():
            shape = leading_shape(data, 2)
            numbers, mode = (range(shape[1]), None) if envs is None else as_envs(envs)
            if mode == "next_step":
                raise DataError("extend: the block would hold steps that reset environments; use append instead")
            which = self._episodes.check_envs(numbers)
            if len(which) != shape[1]:
                raise DataError(f"rollout: {len(which)} envs, but the data has {shape[1]} columns")
            ends = check_ends(terminated, truncated, shape)
            arguments = {
                "data": copy_values(data),
                "final": copy_values(final),
                "metadata": metadata,
                **end_flags(ends),
            }
            self._staged.add_call("extend", tuple(which.tolist()), arguments)
            block = self._episodes.block(which, ends)
            self._send_if_due()
            return Handles("", block.episode, block.t)

    def end_episode(
        self,
        env: int = 0,
        *,
        terminated: bool = False,
        truncated: bool = False,
        final: Step | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        """End the open episode of an environment; see `ReplayBuffer.end_episode`."""
        arguments = {"terminated": terminated, "truncated": truncated, "metadata": metadata}
        with self._call():
            self._episodes.open_episode(env)
            self._staged.add_call("end_episode", (env,), {"final": copy_values(final), **arguments})
            self._episodes.end(env)

    def abort_episode(self, env: int = 0) -> None:
        """Give up the open episode of an environment; its steps are no longer sampled."""
        with self._call():
            self._episodes.open_episode(env)
            self._staged.add_call("abort_episode", (env,), {})
            self._episodes.episode[env] = -1

    def flush(self) -> int:
        """Send everything, and return when it is durable.

        Returns:
            The number of steps appended since the last flush that may be lost; 0 unless the actor died or refused
            some.
        """
        with self._call():
            self._outbox.flush()
            n_lost, self._n_reported = self.n_lost - self._n_reported, self.n_lost
            return n_lost

    def close(self) -> None:
        """Flush, and close the writer. An open episode reads as cut once the service is closed."""
        self._outbox.close()

    def __enter__(self) -> RayWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._outbox.abandon()

    @contextlib.contextmanager
    def _call(self) -> Iterator[None]:
        """Hold the lock during a call, after raising the error of an earlier one."""
        with self._lock:
            if self._outbox.is_closed:
                raise ClosedError("this writer is closed; get another with RayReplayBuffer.writer()")
            self._sender.raise_pending()
            yield

    def _send_if_due(self) -> None:
        if self._staged.is_due:
            self._outbox.send()


def _rows(values: Step | None, where: Array) -> Any:
    """The rows of some environments of nested values."""
    if values is None:
        return None
    flat = {
        path: value if hasattr(value, "shape") else np.asarray(value) for path, value in flatten(values).items()
    }
    return nest({path: value[where] for path, value in flat.items()})
