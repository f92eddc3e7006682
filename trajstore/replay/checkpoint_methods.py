"""The methods of a buffer that save, request and prune checkpoints."""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterable

from trajstore.errors import CheckpointNotFoundError
from trajstore.format.checkpoint_record import Checkpoint
from trajstore.replay.checkpoint_lineage import prune
from trajstore.replay.exit_hooks import ExitHooks
from trajstore.replay.session import Session
from trajstore.store import checkpoints

_log = logging.getLogger(__name__)


class CheckpointMethods:
    """Each method checks the buffer and calls the session's `CheckpointSchedule`."""

    _session: Session

    def save_checkpoint(self, name: str = "checkpoint", *, wait: bool = False, keep_last: int | None = None) -> str:
        """Name the state of this moment, to resume from. No step data is copied or read.

        The state is captured at once, written in the background, and published when everything it needs is durable.
        If that fails, the next call on the buffer raises the failure, and the previous checkpoint stays valid.

        With several ranks, all of them call this with the same name, each at its own moment. The checkpoint is
        published, by one put, when the parts of all ranks are durable. If a rank fails or never calls, nothing is
        published.

        Args:
            name: Name of the checkpoint; a unique id is added.
            wait: Return when it is durable.
            keep_last: Afterwards keep only this many checkpoints of this lineage, including the new one.

        Returns:
            The checkpoint's id.
        """
        if self._session.group.size == 1:
            self._session.check()
        else:  # this rank takes part before it raises an earlier failure: the other ranks wait for it
            self._session.check_open()
        if keep_last is not None and not (isinstance(keep_last, int) and keep_last >= 1):
            raise ValueError(f"keep_last: expected a positive number or None, got {keep_last!r}")
        checkpoint_id = self._session.schedule.save(name, wait=wait, keep_last=keep_last)
        if wait:  # the checkpoint has them in its own form; this is for people and other programs
            self._session.save_values()
        return checkpoint_id

    def request_checkpoint(
        self, name: str = "requested", *, wait: bool = False, timeout_s: float | None = None
    ) -> str | None:
        """Ask all ranks for a checkpoint, from any one of them; the others need not call anything.

        Each rank captures its state in the background when it sees the request, so the ranks capture different
        moments; for one moment, call `save_checkpoint` on all ranks. `trajstore.request_checkpoint` does the same
        from outside. Requests of the same moment are answered by one checkpoint, under one of their names.

        Args:
            name: Name of the checkpoint; a unique id is added.
            wait: Return when it is published, with its id.
            timeout_s: Seconds to wait for that.
        """
        self._session.check()
        return self._session.schedule.ask(name, wait=wait, timeout_s=timeout_s)

    def checkpoint_on_exit(
        self,
        *,
        signals: Iterable[int] = (signal.SIGTERM,),
        exceptions: bool = True,
        timeout_s: float = 60.0,
    ) -> None:
        """Take a checkpoint of all ranks before this process ends by a signal or an uncaught exception.

        The process then ends as it would have. Call this in the main thread; `close` restores the handlers.

        Args:
            signals: Signals to handle; by default the one that pre-emption sends.
            exceptions: Whether to handle exceptions that leave the program, or the ``with`` block of this buffer.
            timeout_s: Seconds by which the end may be delayed.
        """
        session = self._session
        session.check()
        if session.exit_hooks is not None:
            session.exit_hooks.remove()
        # The hooks keep the buffer itself alive: else it would be closed when the program drops it, and the hooks
        # with it.
        session.exit_hooks = ExitHooks(
            lambda why: _save_last(self._session, why, timeout_s), signals, exceptions, timeout_s
        )

    def state_dict(self, *, keep_last: int | None = None) -> dict[str, str]:
        """Save a checkpoint, and return what your own checkpoint has to keep for `resume`: its URL and id.

        The state itself is in the store, where it protects the rows it needs from being deleted; ``keep_last``
        removes older checkpoints of this lineage.
        """
        return {
            "url": self._session.store.url,
            "checkpoint": self.save_checkpoint("state", wait=True, keep_last=keep_last),
        }

    @property
    def checkpoints(self) -> list[Checkpoint]:
        """All checkpoints of the store, parents before children."""
        return checkpoints.list_checkpoints(self._session.storage)

    def prune_checkpoints(self, keep: int, *, all_sessions: bool = False) -> list[str]:
        """Remove the oldest checkpoints so that ``keep`` remain; returns the removed ids.

        Steps that were kept only for these checkpoints are deleted in the background, after the grace time.

        Args:
            keep: Number of checkpoints to keep.
            all_sessions: Whether to count and remove all checkpoints of the store, whichever session saved them. By
                default those of this lineage: the checkpoints of this session, and those that it continued.

        Raises:
            CheckpointNotFoundError: The session has saved no checkpoint and continued none, but the store has some.
        """
        session = self._session
        session.check()
        if not isinstance(keep, int) or keep < 1:
            raise ValueError(f"keep: expected a positive number, got {keep!r}")
        session.schedule.wait()
        newest = session.schedule.newest
        if newest is None and not all_sessions:
            self._explain_foreign_checkpoints()
            return []
        removed = prune(session.storage, None if all_sessions else newest, keep)
        if removed:
            session.eviction.free_storage()
        elif not all_sessions:
            self._log_foreign_checkpoints(keep)
        return removed

    def _explain_foreign_checkpoints(self) -> None:
        if existing := self.checkpoints:
            raise CheckpointNotFoundError(
                f"{self._session.store.url}: this session joined the store and has saved no checkpoint yet, so none"
                f" of the {len(existing)} checkpoints is of its lineage ('{existing[-1].id}' is the newest); pass"
                " all_sessions=True to prune them, or continue one of them with ReplayBuffer.resume"
            )

    def _log_foreign_checkpoints(self, keep: int) -> None:
        if len(existing := self.checkpoints) > keep:
            _log.warning(
                "prune_checkpoints(%d) removed nothing: of the %d checkpoints of %s, some are of other sessions;"
                " pass all_sessions=True to prune them as well",
                *(keep, len(existing), self._session.store.url),
            )


def _save_last(session: Session, why: str, timeout_s: float) -> None:
    if not session.is_ending:
        _log.warning("taking a last checkpoint: %s", why)
        try:
            session.schedule.ask("last", wait=True, timeout_s=timeout_s)
        except BaseException:
            session.schedule.cancel()  # the process is about to end
            raise
