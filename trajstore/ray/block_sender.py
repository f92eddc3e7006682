"""Sends a writer's blocks to its actor, and finds out what became of them when the actor fails or dies."""

from __future__ import annotations

import logging
import uuid
from collections import deque
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from trajstore.ray.ray_calls import get_result
from trajstore.ray.rollout_blocks import BufferCall

_log = logging.getLogger(__name__)


@dataclass
class _SentBlock:
    """Calls that are sent together.

    Attributes:
        number: Number of the block; increases by one from block to block.
        calls: The calls.
        n_steps: Number of steps that they append.
        ref: The call of the actor.
    """

    number: int
    calls: list[BufferCall]
    n_steps: int
    ref: Any = None


class BlockSender:
    """Sends blocks in order without waiting for the answers, and never lets one be applied twice.

    When the actor dies, blocks that did not reach it are sent again. Blocks that it may have applied and not made
    durable are not: they could be stored twice. Their steps are counted in ``n_lost``.

    Args:
        actor: Where the blocks go.
        max_in_flight: Number of blocks that may be unanswered.

    Attributes:
        n_lost: Steps that may be lost or were refused; an upper bound.
    """

    def __init__(self, actor: Any, max_in_flight: int) -> None:
        self._actor = actor
        self._max_in_flight = max_in_flight
        self._id, self._epoch = uuid.uuid4().hex, 0
        self._incarnation: int = get_result(actor.incarnation.remote())
        self._next_number = 0
        self._first_number = 0  # of the first block of this epoch
        self._in_flight: deque[_SentBlock] = deque()
        self._unconfirmed: deque[tuple[int, int]] = deque()  # number and steps of blocks not known to be durable
        self._errors: list[BaseException] = []
        self.n_lost = 0

    @property
    def _key(self) -> str:
        """The name that the actor knows this writer by; a new epoch is a new writer for it."""
        return f"{self._id}.{self._epoch}"

    @property
    def is_settled(self) -> bool:
        """Whether all blocks that were sent are durable or counted as lost, and no error is left to raise."""
        return not (self._in_flight or self._unconfirmed or self._errors)

    def raise_pending(self) -> None:
        """Raise the oldest error that the actor answered with, once."""
        if self._errors:
            raise self._errors.pop(0)

    def make_room(self) -> None:
        """Wait until one more block may be sent."""
        self._await_answers(self._max_in_flight - 1)

    def send(self, calls: list[BufferCall], n_steps: int) -> None:
        """Send a block; call `make_room` first."""
        self._dispatch(_SentBlock(self._next_number, calls, n_steps))
        self.raise_pending()

    def flush(self) -> None:
        """Return when all blocks that were sent are durable, or counted as lost."""
        self._await_answers(0)
        while (incarnation := get_result(self._actor.flush.remote())) != self._incarnation:
            self._count_losses(incarnation)
        self._unconfirmed.clear()
        self.raise_pending()

    def close(self) -> None:
        """Let the actor forget this writer."""
        self._actor.forget.remote(self._key)

    def _dispatch(self, block: _SentBlock) -> None:
        block.number = self._next_number
        self._next_number += 1
        block.ref = self._actor.append.remote(
            self._key, self._incarnation, self._first_number, block.number, block.calls
        )
        self._in_flight.append(block)

    def _await_answers(self, n_left: int) -> None:
        """Wait for answers until at most ``n_left`` blocks are unanswered; recover if a block was not applied."""
        while len(self._in_flight) > n_left:
            block = self._in_flight.popleft()
            outcome = self._await_outcome(block)
            if outcome != "applied":
                self._recover(block, outcome)
                self.raise_pending()  # before the next round: blocks that were sent again may be refused again

    def _await_outcome(self, block: _SentBlock) -> str:
        """What happened to a block: as the actor says, or ``failed`` (refused), or ``unknown`` (the actor died)."""
        try:
            outcome: str
            outcome, n_durable, failure = ray.get(block.ref)
        except RayTaskError as error:
            error.cause.__cause__ = error
            self._errors.append(error.cause)
            self.n_lost += block.n_steps
            return "failed"
        except RayActorError:
            return "unknown"
        if failure is not None:
            self._errors.append(failure)
        if outcome == "applied":
            self._unconfirmed.append((block.number, block.n_steps))
            while self._unconfirmed and self._unconfirmed[0][0] < n_durable:
                self._unconfirmed.popleft()
        return outcome

    def _recover(self, block: _SentBlock, outcome: str) -> None:
        """Wait for all answers, and send again the blocks that were certainly not applied."""
        outcomes = [(block, outcome), *((later, self._await_outcome(later)) for later in self._in_flight)]
        self._in_flight.clear()
        # Waits for the actor if it is being restarted.
        incarnation, next_number = get_result(self._actor.next_block.remote(self._key, self._first_number))
        unresolved = [(late, came) for late, came in outcomes if came != "applied"]
        if incarnation != self._incarnation:
            self._unconfirmed.extend((late.number, late.n_steps) for late, came in unresolved if came == "unknown")
            self._count_losses(incarnation)
            to_send = [late for late, came in unresolved if came not in ("unknown", "failed")]
        else:
            applied = [late for late, _ in unresolved if late.number < next_number]  # only the answer was lost
            self._unconfirmed.extend((late.number, late.n_steps) for late in applied)
            to_send = [late for late, came in unresolved if came != "failed" and late.number >= next_number]
            if any(came == "failed" for _, came in unresolved):
                self._begin_epoch()
            else:
                self._next_number = next_number
        for late in to_send:
            self._dispatch(late)

    def _count_losses(self, incarnation: int) -> None:
        """The actor was restarted: blocks that are not known to be durable may be lost."""
        n_lost = sum(n_steps for _, n_steps in self._unconfirmed)
        self.n_lost += n_lost
        level = logging.WARNING if n_lost else logging.INFO
        _log.log(level, "an actor of the buffer was restarted; up to %d steps of this writer are lost", n_lost)
        self._unconfirmed.clear()
        self._incarnation = incarnation
        self._begin_epoch()

    def _begin_epoch(self) -> None:
        """Let following blocks begin new episodes, in other environments of the actor's buffer."""
        self._epoch, self._first_number = self._epoch + 1, self._next_number
