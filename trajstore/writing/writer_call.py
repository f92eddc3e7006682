"""What surrounds each call of a writer that changes something."""

from __future__ import annotations

import logging
from types import TracebackType

from trajstore.errors import TrajstoreError
from trajstore.writing.commit_pipeline import CommitPipeline
from trajstore.writing.episode_stager import EpisodeStager
from trajstore.writing.lifecycle import WriterLifecycle
from trajstore.writing.validation import StepValidator

_log = logging.getLogger(__name__)

_REFUSALS = (TrajstoreError, ValueError, TypeError, LookupError, OSError)  # raised before anything was changed


class WriterCall:
    """A context that raises a pending failure, and undoes a schema inferred from data that is then refused.

    Entered with the writer's lock held. One object serves all calls of a writer, because appending a single step is
    to cost next to nothing. Calls do not nest.

    Args:
        lifecycle: Says whether the writer is open.
        validator: Learns a schema from the first data.
        pipeline: Has failures of the background.
        stager: Drops staged steps after an interrupt.
        raises_pending: Whether to raise failures of the background; helper threads leave them to the writer's user.
    """

    def __init__(
        self,
        lifecycle: WriterLifecycle,
        validator: StepValidator,
        pipeline: CommitPipeline,
        stager: EpisodeStager,
        *,
        raises_pending: bool,
    ) -> None:
        self._lifecycle = lifecycle
        self._validator = validator
        self._pipeline = pipeline
        self._stager = stager
        self._raises_pending = raises_pending

    def __enter__(self) -> None:
        self._lifecycle.check_open()
        if self._raises_pending:
            self._pipeline.raise_pending()
        self._validator.begin_attempt()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._undo(error)
        if self._validator.known is None:
            self._pipeline.reset()

    def _undo(self, error: BaseException) -> None:
        self._validator.undo_attempt(error)
        if not isinstance(error, _REFUSALS):
            # Ctrl-C may have come in the middle of a change, so staged steps may be torn.
            self._lifecycle.is_ending = True
            self._stager.drop()
            n_dropped = self._stager.counts["dropped_steps"]
            _log.warning(
                "stream %s: %d uncommitted steps are dropped by an interrupt", self._stager.stream, n_dropped
            )
