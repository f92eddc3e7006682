"""RayWriter: how a collector appends to a buffer that runs as a service of Ray actors."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any

import numpy as np

from trajstore.arguments import check_positive
from trajstore.errors import ClosedError, DataError
from trajstore.format.handles import Handle, Handles
from trajstore.format.spans import End
from trajstore.ray.block_sender import BlockSender
from trajstore.ray.rollout_blocks import copy_values, end_flags
from trajstore.ray.staged_calls import StagedCalls
from trajstore.writing.open_episodes import Flags, OpenEpisodes, check_ends, end_of
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
        self._is_closed = False
        self._lock = threading.RLock()

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
        envs: Iterable[int] | None = None,
        terminated: Flags = None,
        truncated: Flags = None,
        final: Step | None = None,
    ) -> Handle | Handles:
        """Append one step of one environment, or of several at once; see `ReplayBuffer.append`.

        Returns:
            The episode and t of each step, as this writer counts them. The stream of the handle is empty, because
            the actor decides later where a step is stored.
        """
        with self._call():
            if envs is not None and env is not None:
                raise DataError("give either env or envs, not both")
            if envs is None:
                which = np.array([self._episodes.check_env(0 if env is None else env)])
                ends = np.array([int(end_of(terminated, truncated, End.OPEN))])
            else:
                which = self._episodes.check_envs(envs)
                ends = check_ends(terminated, truncated, which.shape)
            self._staged.add_step(which, envs is not None, step, ends, final)
            block = self._episodes.step(which)
            self._episodes.episode[which[ends != End.OPEN]] = -1
            self._send_if_due()
            if envs is not None:
                return Handles("", block.episode, block.t)
            return Handle("", int(block.episode[0]), int(block.t[0]))

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
        envs: Iterable[int] | None = None,
        terminated: Flags = None,
        truncated: Flags = None,
        final: Step | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> Handles:
        """Append a ``[T, B]`` block: T steps of B environments; see `ReplayBuffer.extend` and `append`."""
        with self._call():
            shape = leading_shape(data, 2)
            which = self._episodes.check_envs(range(shape[1]) if envs is None else envs)
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
            self._episodes.episode[env] = -1

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
            self._send()
            self._sender.flush()
            n_lost, self._n_reported = self.n_lost - self._n_reported, self.n_lost
            return n_lost

    def close(self) -> None:
        """Flush, and close the writer. An open episode reads as cut once the service is closed."""
        if not self._is_closed:
            self.flush()
            self._is_closed = True
            self._sender.close()

    def __enter__(self) -> RayWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()

    @contextlib.contextmanager
    def _call(self) -> Iterator[None]:
        """Hold the lock during a call, after raising the error of an earlier one."""
        with self._lock:
            if self._is_closed:
                raise ClosedError("this writer is closed; get another with RayReplayBuffer.writer()")
            self._sender.raise_pending()
            yield

    def _send_if_due(self) -> None:
        if self._staged.is_due:
            self._send()

    def _send(self) -> None:
        self._staged.close_rollout()
        if not self._staged.has_calls:
            return
        self._sender.make_room()
        self._sender.send(*self._staged.take())
