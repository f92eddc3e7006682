"""The parts of an open writer, and how they end; they live on when the writer itself is garbage-collected."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator

from trajstore.arguments import parse_bytes
from trajstore.format.column_layouts import KnownRows
from trajstore.format.commit_record import CommitRecord, SessionView, stream_layouts
from trajstore.format.ids import new_id
from trajstore.schema import Schema
from trajstore.storage import Storage
from trajstore.unclosed import Registration
from trajstore.writing.commit_pipeline import CommitPipeline
from trajstore.writing.episode_stager import EpisodeStager
from trajstore.writing.lifecycle import WriterLifecycle
from trajstore.writing.open_episodes import OpenEpisodes
from trajstore.writing.options import WriterOptions
from trajstore.writing.stream_appender import StreamAppender
from trajstore.writing.validation import StepValidator

_log = logging.getLogger(__name__)


class OpenStream:
    """A stream that is being written. Nothing here refers to the `Writer`, which the program may drop.

    Attributes:
        id: Id of the stream.
        lifecycle, validator, open_episodes, pipeline, stager: The parts of the writer.
        registration: Has the stream closed if the program does not; None: its owner closes it.
    """

    def __init__(
        self,
        storage: Storage,
        name: str,
        schema: Schema | None,
        settle_schema: Callable[[Schema], None],
        options: WriterOptions,
    ) -> None:
        self.id = new_id(name)
        self.registration: Registration | None = None
        self._created_at = time.time()
        self._name = name
        self._storage = storage
        self._settle_schema = settle_schema
        self._options = options
        self.lifecycle = WriterLifecycle(self.id)
        self.validator = StepValidator(schema)
        self.open_episodes = OpenEpisodes()
        self.pipeline = CommitPipeline(
            parse_bytes(options.buffer_bytes, "buffer_bytes"),
            lambda: self.validator.schema,
            self._settle,
            self._make_appender,
            self.lifecycle.lock,
            options.commit_seconds,
            SessionView(dead=tuple(dict.fromkeys(options.dead))),
        )
        self.stager = EpisodeStager(
            self.id, self.validator, self.open_episodes, self.pipeline, options.commit_steps
        )

    def _settle(self) -> Schema:
        self.open_episodes.mark_placed()
        return self.validator.settle()

    def _make_appender(self, schema: Schema) -> StreamAppender:
        options = self._options
        record = CommitRecord(
            self.id,
            self._name,
            schema,
            stream_layouts(schema),
            created_at=self._created_at,
            committed_at=self._created_at,
            **options.recorded,
            view=self.pipeline.view,
        )
        known = KnownRows(
            commit_steps=options.commit_steps, buffer_bytes=parse_bytes(options.buffer_bytes, "buffer_bytes")
        )
        return StreamAppender(self._storage, record, self._settle_schema, known)

    # ---- the end

    def flush(self) -> None:
        """Make everything appended so far durable."""
        with self._last_call() as is_open:
            if not is_open:
                return
            ticket = self.pipeline.hand_off()
        self.pipeline.wait(ticket)

    def close(self) -> None:
        """Commit, mark open episodes as cut, seal the stream and release everything; callable again if it fails."""
        with self._last_call() as is_open:
            if not is_open:
                return
            if not self.lifecycle.is_ending:  # else an earlier close or an interrupt: add nothing more
                self.lifecycle.is_ending = True
                if n_cut := self.stager.cut_episodes():
                    _log.info("stream %s: %d open episodes are kept as cut", self.id, n_cut)
            self._seal()

    def discard(self) -> None:
        """Drop the steps that no commit has taken yet, and seal the stream."""
        with self._last_call() as is_open:
            if is_open:
                self.lifecycle.is_ending = True
                self.stager.drop()
                self._seal()

    def _seal(self) -> None:
        self.pipeline.wait(self.pipeline.hand_off())
        self.pipeline.seal()
        self.release()
        self.pipeline.raise_callback_failure()

    def release(self) -> None:
        """End the commit thread. Steps that are not durable are lost, and the stream stays unsealed."""
        self.lifecycle.is_closed = True
        self.leave_to_owner()
        self.pipeline.stop()

    def leave_to_owner(self) -> None:
        """Do not close the stream if it is dropped or left open, because another object does."""
        registration, self.registration = self.registration, None
        if registration is not None:
            registration.end()

    @contextlib.contextmanager
    def _last_call(self) -> Iterator[bool]:
        self.lifecycle.check_process()
        with self.lifecycle.lock:
            yield not self.lifecycle.is_closed
