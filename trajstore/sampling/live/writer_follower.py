"""Shows the steps of a writer before they are committed: its reports become live rows and index entries."""

from __future__ import annotations

from collections.abc import Callable

from trajstore.errors import DataError
from trajstore.format.commit_record import CommitRecord
from trajstore.sampling.index.episode_index import EpisodeIndex
from trajstore.sampling.live.cached_rows import CachedRows
from trajstore.sampling.live.live_episodes import AppendedRows, LiveEpisodes, LiveRowChange
from trajstore.schema import Array
from trajstore.writing.staging import Staging
from trajstore.writing.writer import Writer

_SPARE_ROWS = 1 << 14  # live rows beyond what a writer buffers, because pages of environments are not always full
_MIN_LIVE_ROWS = 128


class WriterFollower:
    """Copies appended steps into the cache's live rows and shows them in the index.

    Methods are called with the assembler's lock held. They take the writer's lock while they look at its staging;
    no thread that holds the writer's lock waits for the assembler's.

    Args:
        writer: The writer to follow; it must not have appended anything.
        index: The index that shows its episodes.
        rows: The cache that holds its live rows.
        marks: Gives the first row that is not evicted, by source.

    Attributes:
        episodes: Episodes that are not committed whole.
        n_placed: Rows of the writer's stream that the index knows as committed; a few more may be durable.
        is_stopped: Whether `stop` was called.
    """

    def __init__(
        self, writer: Writer, index: EpisodeIndex, rows: CachedRows, marks: Callable[[], list[int]]
    ) -> None:
        self.episodes = LiveEpisodes(index.number_of(writer.stream), index.changes, index.growth_kernels)
        self.n_placed = 0
        self.is_stopped = False
        self._writer, self._index, self._rows, self._marks = writer, index, rows, marks
        self._record: CommitRecord | None = None  # the newest commit that the cache knows
        self._seen: tuple[Staging | None, int, int] = (None, 0, 0)  # what was staged when everything was shown
        self._is_torn = False
        self._commits_early = False  # whether the live rows take less than the writer buffers
        index.followed_stream = writer.stream
        index.rank = writer.rank or 0

    def start(self) -> None:
        """Let the writer report from now on. This can't be undone."""
        self._writer.set_append_listener(self.episodes.inbox)

    def stop(self) -> None:
        """Show nothing that the writer does from now on.

        Called before the writer is closed, which ends open episodes as cut or drops steps. Other threads may draw
        until everything is closed, and to them these episodes have not ended.
        """
        self.is_stopped = True

    @property
    def record(self) -> CommitRecord | None:
        """The writer's newest commit that is shown here."""
        return self._record

    def update(self, *, waits: bool, may_commit: bool) -> bool | None:
        """Show the steps that were appended since the last call.

        Args:
            waits: Whether to wait while another thread appends or commits; else its steps are shown later.
            may_commit: Whether the caller can commit if no live rows are free.

        Returns:
            None if there is nothing to show yet; else whether the caller has to commit and call again, because
            some steps find no free live rows before the next commit.

        Raises:
            DataError: An earlier call failed halfway.
        """
        if self._is_torn:
            raise DataError("this reader lost track of its writer in an earlier error; make a new reader")
        writer, rows, counts = self._writer, self._rows, self._writer.staged_counts
        if counts == self._seen and counts[0] is not None and not waits and self._is_idle:
            return False
        is_locked = writer.lock_staging(waits or not rows.has_cache)
        try:
            staging = writer.staging if is_locked else None
            if not rows.has_cache and not self._make_cache(staging):
                return None
            self._take(staging)
            while self.episodes.is_behind(staging) and not self.episodes.is_full:
                self._take(staging)  # the rows that found no room before have it since commits were taken
            needs_commit = may_commit and self.episodes.is_full and self.episodes.is_behind(staging)
            if self._commits_early and staging is not None and self.episodes.pages.is_half_taken:
                writer.begin_commit()  # in the background, so that live rows become free before they run out
        finally:
            if is_locked:
                writer.unlock_staging()
        self.show()
        return needs_commit

    @property
    def _is_idle(self) -> bool:
        """Whether the writer has committed and reported nothing since everything was shown."""
        is_early = self._commits_early and self.episodes.pages.is_half_taken
        return self.episodes.is_idle and self._writer.record is self._record and not is_early

    def _take(self, staging: Staging | None) -> None:
        """Take over what the writer appended, committed and amended since the last call."""
        episodes, rows = self.episodes, self._rows
        self._is_torn = True  # until everything that is taken is where it belongs
        columns = None
        if staging is not None and self._index.growth_kernels is not None and self._writer.record is self._record:
            columns = rows.cache.live_columns(staging.addresses)
        if staging is None or columns is None or not episodes.take_staged(staging, columns):
            changes = episodes.take(staging)
            rows.cache.n_live_used = episodes.pages.n_used_rows
            with rows.access():
                self._advance(self._writer.record)
                for change in changes:
                    self._apply(change)
                if episodes.pages.is_unused:
                    rows.cache.discard_live()
                    episodes.pages.n_used_rows = 0
        rows.cache.n_live_used = episodes.pages.n_used_rows
        self._is_torn = False
        self._seen = (None, 0, 0)
        if staging is not None and not (episodes.is_full and episodes.is_behind(staging)):
            self._seen = staging, staging.n, staging.n_ends

    def show(self) -> None:
        """Write changed episodes into the index."""
        n_rows = self.episodes.changed_lengths()
        if n_rows is not None:
            self._index.set_lengths(n_rows)
        elif (entries := self.episodes.changed_entries()) is not None:
            self._index.set_live(*entries)

    def show_all(self) -> None:
        """Write all live episodes into the index, which another snapshot may have rewritten."""
        self.episodes.mark_changed()
        self.show()

    def evict(self, episode: Array, t: Array) -> None:
        """Stop showing the steps of live episodes before ``t``."""
        self.episodes.evict(episode, t)
        entries = self.episodes.changed_entries()
        assert entries is not None
        self._index.set_live(*entries)

    def _advance(self, record: CommitRecord | None) -> None:
        """Let the cache know the rows that the writer has committed."""
        known = self._record
        if record is None or (known is not None and record.commit <= known.commit):
            return
        self._record, self._rows.snapshot = record, self._rows.snapshot.advanced(record)
        if record.rows > (known.rows if known is not None else 0):
            self._rows.set_sources(self._marks(), written=self._index.numbers[self._writer.stream] + 1)

    def _apply(self, change: LiveRowChange) -> None:
        if isinstance(change, AppendedRows):
            self._rows.cache.write_live(change.rows, change.values)
            return
        source = self._index.numbers[self._writer.stream] + 1
        self._rows.cache.move_live(source, change.live, change.rows, change.start, change.stop)
        self.n_placed = max(self.n_placed, change.stop)
        self._index.changes.rows_moved(change.live, change.rows)

    def _make_cache(self, staging: Staging | None) -> bool:
        """Make the cache once the staging says how many rows may be uncommitted; returns whether it was made."""
        schema = self._writer.schema or self._rows.snapshot.schema
        if schema is None or (staging is None and not self._writer.is_closed):
            return False
        capacity = staging.capacity if staging is not None else 0
        budget = self._rows.budget
        spare = min(_SPARE_ROWS, budget // 8 // max(1, schema.row_bytes))
        wanted = 2 * capacity + max(spare, capacity // 2, _MIN_LIVE_ROWS)
        n_rows = max(1, min(wanted, budget // 2 // max(1, schema.row_bytes)))  # at most half of the cache
        self._rows.make_cache(schema, n_rows, self._marks())
        self.episodes.pages.set_rows(n_rows)
        self._commits_early = n_rows < wanted
        return True
