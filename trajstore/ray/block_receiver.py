"""An actor's side of appending: applies the blocks of all writers to the actor's buffer, each block once."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from trajstore.errors import StorageError
from trajstore.ray.rollout_blocks import BufferCall
from trajstore.replay.buffer import ReplayBuffer

_log = logging.getLogger(__name__)

BlockOutcome = Literal["applied", "gap", "stale", "retry"]


@dataclass
class _WriterProgress:
    """How far the blocks of one writer have come.

    Attributes:
        next_number: Number of the next block.
        has_earlier_blocks: The writer has sent blocks before; they are lost, or in other environments.
        n_durable: All blocks with lower numbers are durable.
        envs: From the writer's environments to those of the buffer.
    """

    next_number: int
    has_earlier_blocks: bool = False
    n_durable: int = 0
    envs: dict[int, int] = field(default_factory=dict)


class BlockReceiver:
    """Applies the blocks of writers in order, and knows which of them are durable.

    Args:
        buffer: Returns the buffer; opens it if necessary.
        incarnation: Number of this start of the actor.
    """

    def __init__(self, buffer: Callable[[], ReplayBuffer], incarnation: int) -> None:
        self._buffer = buffer
        self._incarnation = incarnation
        self._progress: dict[str, _WriterProgress] = {}
        self._n_envs = 0
        self._noted_at = time.monotonic()  # when durable blocks were noted last

    def receive(
        self, writer: str, incarnation: int, first: int, number: int, calls: Sequence[BufferCall]
    ) -> tuple[BlockOutcome, int, StorageError | None]:
        """Apply a block of a writer, unless it was applied before.

        Args:
            writer: Key of the writer.
            incarnation: Number of the actor's start that the block was sent to.
            first: Number of the first block that the writer has sent under this key.
            number: Number of this block.
            calls: The block.

        Returns:
            What happened: ``applied`` (now or before), ``gap`` (an earlier block is missing), ``stale`` (sent to an
            earlier start of the actor) or ``retry`` (the storage failed, nothing was applied); below which number
            all blocks are durable; and the error, for ``retry``.
        """
        if incarnation != self._incarnation:
            return "stale", 0, None
        progress = self._progress.setdefault(writer, _WriterProgress(first, has_earlier_blocks=first > 0))
        if number > progress.next_number:  # one before it failed: episodes must not have holes
            return "gap", progress.n_durable, None
        if number == progress.next_number:
            failure = self._apply(progress, calls)
            if failure is not None:
                return "retry", progress.n_durable, failure
            progress.next_number += 1
            self._note_durable_blocks()
        return "applied", progress.n_durable, None

    def _apply(self, progress: _WriterProgress, calls: Sequence[BufferCall]) -> StorageError | None:
        """Make the calls; returns the error if already the first one failed for the storage."""
        for i, call in enumerate(calls):
            try:
                self._apply_call(progress, call)
            except StorageError as failure:
                if i == 0:
                    return failure
                raise
        return None

    def _apply_call(self, progress: _WriterProgress, call: BufferCall) -> None:
        method, arguments = call
        envs = arguments["envs"]
        is_end = method in ("end_episode", "abort_episode")
        if is_end and progress.has_earlier_blocks and envs[0] not in progress.envs:
            return  # its steps were in an earlier block, and the episode reads as cut
        mapped = [self._env(progress, env) for env in envs]
        placed: dict[str, Any] = {"envs": mapped} if method == "extend" else {"env": mapped[0]}
        rest = {name: value for name, value in arguments.items() if name != "envs"}
        getattr(self._buffer(), method)(**placed, **rest)

    def _env(self, progress: _WriterProgress, env: int) -> int:
        """The buffer's environment for one of a writer; no two writers share one."""
        if env not in progress.envs:
            progress.envs[env] = self._n_envs
            self._n_envs += 1
        return progress.envs[env]

    def _note_durable_blocks(self) -> None:
        """Commit every ``commit_seconds`` and note which blocks are then durable, so that writers know it."""
        every = self._buffer().options.commit_seconds
        if every is None or time.monotonic() - self._noted_at < every:
            return
        self._noted_at = time.monotonic()
        applied = self._applied_blocks()
        try:
            self._buffer().session.writer.capture_record(lambda record: _set_durable(applied))
        except StorageError as failure:  # the block is applied; flush tries again, and raises it if it persists
            _log.warning("a commit failed: %s", failure)

    def _applied_blocks(self) -> list[tuple[_WriterProgress, int]]:
        return [(progress, progress.next_number) for progress in list(self._progress.values())]

    def flush(self) -> None:
        """Make all applied blocks durable."""
        applied = self._applied_blocks()
        self._buffer().flush()
        _set_durable(applied)

    def next_number(self, writer: str, first: int) -> int:
        """The number of the block that a writer sends next; ``first`` if none has arrived under this key."""
        return self._progress.get(writer, _WriterProgress(first)).next_number

    def forget(self, writer: str) -> None:
        """Drop a closed writer. Its environments are not used again; an episode left open in one stays open."""
        self._progress.pop(writer, None)


def _set_durable(applied: Iterable[tuple[_WriterProgress, int]]) -> None:
    for progress, number in applied:
        progress.n_durable = max(progress.n_durable, number)
