"""How collectors append to a buffer that is a service of Ray: in blocks, with few calls and none twice."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import uuid
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayActorError, RayTaskError

from trajstore.arguments import check_positive
from trajstore.errors import ClosedError, DataError
from trajstore.format.handles import Handle, Handles
from trajstore.format.spans import End
from trajstore.ray.actor import get
from trajstore.ray.rollout_blocks import Op, Rollout, copied, flags_of, led, n_bytes_of, n_steps_of, rows_of
from trajstore.schema import Array
from trajstore.writing.open_episodes import Flags, OpenEpisodes, check_ends, end_of
from trajstore.writing.validation import Step, leading_shape

_log = logging.getLogger(__name__)


@dataclass
class _Block:
    """Some calls that are sent together, and what came of it."""

    number: int
    ops: list[Op]
    n_steps: int
    ref: Any = None


class RayWriter:
    """Appends to a service from one collector; made by `RayReplayBuffer.writer`.

    Calls are gathered into blocks and sent without waiting for the answer; when too many are on their way, a call
    waits. What an actor refuses is raised by a later call, `flush` at the latest. All go to one actor, so episodes
    stay whole; environments are the collector's own, numbered as it likes, and never meet those of another.

    When the actor dies, open episodes read as cut, and what comes next begins new ones. What `flush` returned for
    is there. Of the rest, blocks that did not reach the actor are sent again; those that it may have had and not
    committed are not, as they could come twice: their steps are counted in ``n_lost``, which is therefore an upper
    bound, and logged.

    Attributes:
        n_lost: Steps that may be lost, because their actor died before they were known to be durable, or that were
            refused.
    """

    def __init__(self, actor: Any, *, block_steps: int, block_bytes: int, block_s: float, in_flight: int) -> None:
        check_positive("block_steps", block_steps)
        check_positive("in_flight", in_flight)
        self._actor = actor
        self._block_steps, self._block_bytes, self._block_s = block_steps, block_bytes, block_s
        self._in_flight = in_flight
        self._id, self._epoch = uuid.uuid4().hex, 0
        self._incarnation: int = get(actor.incarnation.remote())
        self._lock = threading.RLock()
        self._lanes = OpenEpisodes()  # episodes as this writer counts them
        self._rollout: Rollout | None = None
        self._ops: list[Op] = []
        self._staged_steps = self._staged_bytes = 0
        self._staged_at = 0.0
        self._number = self._first = 0  # of the next block, and of the first since episodes were begun anew
        self._sent: deque[_Block] = deque()
        self._unsure: deque[tuple[int, int]] = deque()  # number and steps of blocks not known to be durable
        self._errors: list[BaseException] = []
        self.n_lost = self._n_told = 0
        self._is_closed = False

    # ---- the verbs of a buffer

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
            Which step of which episode that is, counted by this writer: where it will stand in the store is not
            known yet, and the stream of the handle is empty.
        """
        with self._call():
            if envs is not None and env is not None:
                raise DataError("give either env or envs, not both")
            if envs is None:
                which = np.array([self._lanes.check_env(0 if env is None else env)])
                ends = np.array([int(end_of(terminated, truncated, End.OPEN))])
            else:
                which = self._lanes.check_envs(envs)
                ends = check_ends(terminated, truncated, which.shape)
            if not self._stack(which, envs is not None, step, ends, final):
                self._append_apart(which, envs is not None, step, ends, final)
            block = self._lanes.step(which)
            self._lanes.episode[which[ends != End.OPEN]] = -1
            self._send_if_full()
            if envs is not None:
                return Handles("", block.episode, block.t)
            return Handle("", int(block.episode[0]), int(block.t[0]))

    def _stack(self, envs: Array, is_many: bool, step: Step, ends: Array, final: Step | None) -> bool:
        """Copy a step into the open block; False if it is not made of plain arrays."""
        n_envs = len(envs) if is_many else None
        rows, finals = rows_of(step, n_envs), None if final is None else rows_of(final, n_envs)
        if not rows or (final is not None and finals is None):
            return False
        which: tuple[int, ...] = tuple(envs.tolist())
        if self._rollout is None or not self._rollout.fits(which, rows, ends, finals):
            self._close_rollout()
            n_bytes = max(1, sum(value.nbytes for value in rows.values()))
            n_rows = min(self._block_steps // len(which), self._block_bytes // n_bytes)
            self._rollout = Rollout(which, rows, max(1, n_rows))
        self._begin()
        self._rollout.add(rows, ends, finals)
        self._staged_steps += len(which)
        self._staged_bytes += sum(value.nbytes for value in (*rows.values(), *(finals or {}).values()))
        return True

    def _append_apart(self, envs: Array, is_many: bool, step: Step, ends: Array, final: Step | None) -> None:
        values, finals = copied(step), copied(final)
        if not is_many:
            given = {
                "step": values,
                "final": finals,
                **{name: bool(flag[0]) for name, flag in flags_of(ends).items()},
            }
            self._add("append", (int(envs[0]),), given)
        else:
            given = {"data": values, "final": finals, **flags_of(ends)}
            self._add("extend", tuple(envs.tolist()), {name: led(value) for name, value in given.items()})

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
        given = {"terminated": terminated, "truncated": truncated, "metadata": metadata}
        with self._call():
            env = self._lanes.check_env(env)
            if self._lanes.episode[env] >= 0:
                raise DataError(f"env {env} has an open episode; end it before appending a whole one")
            self._add("add_episode", (env,), {"data": copied(data), **given})
            self._send_if_full()

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
        """Append a ``[T, B]`` block of T steps of B environments; see `ReplayBuffer.extend` and `append`."""
        with self._call():
            shape = leading_shape(data, 2)
            which = self._lanes.check_envs(range(shape[1]) if envs is None else envs)
            if len(which) != shape[1]:
                raise DataError(f"rollout: {len(which)} envs, but the data has {shape[1]} columns")
            ends = check_ends(terminated, truncated, shape)
            given = {"data": copied(data), "final": copied(final), "metadata": metadata, **flags_of(ends)}
            self._add("extend", tuple(which.tolist()), given)
            block = self._lanes.block(which, ends)
            self._send_if_full()
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
        given = {"terminated": terminated, "truncated": truncated, "metadata": metadata}
        with self._call():
            self._lanes.open_episode(env)
            self._add("end_episode", (env,), {"final": copied(final), **given})
            self._lanes.episode[env] = -1

    def abort_episode(self, env: int = 0) -> None:
        """Give up the open episode of an environment; its steps are drawn no more."""
        with self._call():
            self._lanes.open_episode(env)
            self._add("abort_episode", (env,), {})
            self._lanes.episode[env] = -1

    def flush(self) -> int:
        """Send everything, and return when it is durable.

        Returns:
            How many steps may be lost that were appended since the last flush; 0 unless an actor died or refused
            some.
        """
        with self._call():
            self._send()
            self._settle(0)
            while (incarnation := get(self._actor.flush.remote())) != self._incarnation:
                self._restarted(incarnation)
            self._unsure.clear()
            self._raise()
            n_lost, self._n_told = self.n_lost - self._n_told, self.n_lost
            return n_lost

    def close(self) -> None:
        """Flush, and be done; an episode that is open stays so until the service is closed, then reads as cut."""
        if not self._is_closed:
            self.flush()
            self._is_closed = True
            self._actor.forget.remote(self._key)

    def __enter__(self) -> RayWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()

    # ---- blocks

    @contextlib.contextmanager
    def _call(self) -> Iterator[None]:
        with self._lock:
            if self._is_closed:
                raise ClosedError("this writer is closed; get another with RayReplayBuffer.writer()")
            self._raise()
            yield

    def _raise(self) -> None:
        if self._errors:
            raise self._errors.pop(0)

    @property
    def _key(self) -> str:
        return f"{self._id}.{self._epoch}"

    @property
    def _address(self) -> tuple[str, int, int]:
        return self._key, self._incarnation, self._first

    def _begin(self) -> None:
        if not self._ops and not self._staged_steps:
            self._staged_at = time.monotonic()

    def _add(self, verb: str, envs: tuple[int, ...], given: dict[str, Any]) -> None:
        self._close_rollout()
        self._begin()
        op = verb, {"envs": envs, **given}
        self._ops.append(op)
        self._staged_steps += n_steps_of(op)
        self._staged_bytes += n_bytes_of(given)

    def _close_rollout(self) -> None:
        if self._rollout is not None and self._rollout.n:
            self._ops.append(self._rollout.op())
        self._rollout = None

    def _send_if_full(self) -> None:
        is_full = self._staged_steps >= self._block_steps or self._staged_bytes >= self._block_bytes
        if is_full or time.monotonic() - self._staged_at >= self._block_s:
            self._send()

    def _send(self) -> None:
        self._close_rollout()
        if not self._ops:
            return
        self._settle(self._in_flight - 1)
        block = _Block(self._number, self._ops, self._staged_steps)
        self._ops, self._staged_steps, self._staged_bytes = [], 0, 0
        self._dispatch(block)
        self._raise()

    def _dispatch(self, block: _Block) -> None:
        block.number = self._number
        self._number += 1
        block.ref = self._actor.append.remote(*self._address, block.number, block.ops)
        self._sent.append(block)

    def _settle(self, n_left: int) -> None:
        """Wait for answers until so many blocks are on their way, and put right what went wrong."""
        while len(self._sent) > n_left:
            block = self._sent.popleft()
            outcome = self._outcome(block)
            if outcome != "taken":
                self._recover(block, outcome)
                self._raise()  # what is sent again is on its way, and may be refused again

    def _outcome(self, block: _Block) -> str:
        try:
            outcome: str
            outcome, durable, failure = ray.get(block.ref)
        except RayTaskError as error:
            error.cause.__cause__ = error
            self._errors.append(error.cause)
            self.n_lost += block.n_steps
            return "failed"
        except RayActorError:
            return "unknown"
        if failure is not None:
            self._errors.append(failure)
        if outcome == "taken":
            self._unsure.append((block.number, block.n_steps))
            while self._unsure and self._unsure[0][0] < durable:
                self._unsure.popleft()
        return outcome

    def _recover(self, block: _Block, outcome: str) -> None:
        """Find out what became of everything on its way, and send again what certainly was not taken."""
        found = [(block, outcome), *((later, self._outcome(later)) for later in self._sent)]
        self._sent.clear()
        incarnation, number = get(self._actor.received.remote(self._key, self._first))  # waits for a restart
        left = [(late, came) for late, came in found if came != "taken"]
        if incarnation != self._incarnation:
            self._unsure.extend((late.number, late.n_steps) for late, came in left if came == "unknown")
            self._restarted(incarnation)
            again = [late for late, came in left if came not in ("unknown", "failed")]
        else:
            self._unsure.extend((late.number, late.n_steps) for late, _ in left if late.number < number)
            again = [late for late, came in left if came != "failed" and late.number >= number]
            if any(came == "failed" for _, came in left):
                self._begin_anew()
            else:
                self._number = number
        for late in again:
            self._dispatch(late)

    def _restarted(self, incarnation: int) -> None:
        """The actor died: what is not known to be durable may be lost."""
        n_lost = sum(n_steps for _, n_steps in self._unsure)
        self.n_lost += n_lost
        level = logging.WARNING if n_lost else logging.INFO
        _log.log(level, "an actor of the buffer was restarted; up to %d steps of this writer are lost", n_lost)
        self._unsure.clear()
        self._incarnation = incarnation
        self._begin_anew()

    def _begin_anew(self) -> None:
        """What comes next begins new episodes, in other environments of the actor's buffer."""
        self._epoch, self._first = self._epoch + 1, self._number
