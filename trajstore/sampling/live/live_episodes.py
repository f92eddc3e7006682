"""Episodes of a writer that is followed, from the first append until they are committed whole.

Steps that are not committed yet lie in the live rows of the cache, where they can be sampled. Each environment
fills one page of live rows after the other. Once rows are committed, the index refers to them in the stream.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType

import numpy as np

from trajstore.format.spans import End, expand_counts
from trajstore.sampling.index.change_log import ChangeLog
from trajstore.sampling.index.index_entries import LIVE, IndexEntries
from trajstore.sampling.live.integer_table import IntegerTable
from trajstore.sampling.live.live_entries import live_entries
from trajstore.sampling.live.live_pages import LivePages
from trajstore.sampling.live.writer_inbox import Amendment, StagedBlock, WriterInbox
from trajstore.schema import Array
from trajstore.writing.staging import Staging

# Of an episode: the rows from "committed" to "live" lie in live rows. Its next row goes to the live row "next", and
# "room" more rows fit into its page. Steps before "floor" were evicted.
_COLUMNS = (
    *("episode", "env", "n_rows", "end", "has_final", "ended_at", "committed", "live", "next", "room"),
    "floor",
)
_N_ROWS, _LIVE, _NEXT, _ROOM, _FLOOR = map(_COLUMNS.index, ("n_rows", "live", "next", "room", "floor"))
_NO_STOP = 1 << 62  # the stop of a span that continues up to the next span of its episode
_EMPTY = np.empty(0, np.int64)


@dataclass(slots=True)
class AppendedRows:
    """Values to copy into live rows of the cache, by field."""

    values: Mapping[str, Array]
    rows: Array


@dataclass(slots=True)
class PlacedRows:
    """Live rows, and the rows of the stream that a commit gave to their steps.

    The commit placed the rows of the stream from ``start`` to ``stop``; some of them may never have been live.
    """

    live: Array
    rows: Array
    start: int
    stop: int


LiveRowChange = AppendedRows | PlacedRows


class LiveEpisodes:
    """Follows a writer: which of its episodes are not committed whole, and where their rows lie.

    The writer's threads report to the `inbox`. Everything else is called with the assembler's lock held.

    Args:
        stream: Number of the writer's stream in the index.
        changes: Records aborted episodes and released live rows.
        kernels: Compiled loops, for caches on the CPU.

    Attributes:
        inbox: Receives the reports of the writer.
        pages: Pages of live rows.
        keeps_arrivals: Whether to remember the order in which rows arrive, for `take_arrivals`.
    """

    def __init__(self, stream: int, changes: ChangeLog, kernels: ModuleType | None = None) -> None:
        self.inbox = WriterInbox()
        self._kernels = kernels
        self._n_reports = 0  # reports of the writer that are processed
        self._counts = np.zeros(3, np.int64)  # output of a compiled loop
        self.pages = LivePages(changes)
        self._changes = changes
        self.keeps_arrivals = False
        self._stream = stream
        self._episodes = IntegerTable(_COLUMNS)  # in order of episode number
        # In order of time within each episode. Live rows of an episode may stop ("stop") before its next span
        # begins: rows that were committed before the reader saw them never get live rows.
        self._spans = IntegerTable(("episode", "t", "source", "row", "stop"))
        self._n_ended = 0
        self._n_free_when_full = -1  # number of free pages when there were too few for the new rows
        self._is_changed = True
        self._is_longer = False  # growing episodes got longer; without `_is_changed`, nothing else changed
        self._growing = np.empty(0, np.int64)  # positions of the growing episodes that `changed_entries` returned
        self._arrivals: list[Array] = []  # episodes of rows, in order of arrival
        self._aborted: list[Array] = []  # episodes aborted since arrivals were last taken

    # ---- processing reports

    def take(self, staging: Staging | None) -> list[LiveRowChange]:
        """Process everything that was appended since the last call.

        Args:
            staging: The staging being filled, if the caller holds the writer's lock; else None.

        Returns:
            Changes that the caller must apply to the cache's live rows, in this order.
        """
        reports = self.inbox.take()
        self._n_reports = -1
        changes: list[LiveRowChange] = []
        n_done = 0
        try:
            for block, values in reports.blocks:
                if not self._add_block(block, values, changes):
                    break
                n_done += 1
        finally:
            self.inbox.end_reading()
        # Amendments come before rows move into the stream. Rows that are still staged hold amended values already.
        changes += [rows for change in reports.amendments if (rows := self._amend(change)) is not None]
        changes += [self._place(spans) for spans in reports.commits if len(spans)]
        with self.inbox.lock:
            self.inbox.remove_blocks(n_done)
            if staging is not None and n_done == len(reports.blocks):
                self._add_staged(staging, changes)
            if self.inbox.take_drop():
                self._drop_uncommitted()
        if n_done == len(reports.blocks):
            self._n_reports = reports.n_reports
        return changes

    def take_staged(self, staging: Staging, columns: Array) -> bool:
        """Process what was appended since the last call in one compiled loop, which also copies the rows.

        Args:
            staging: The staging being filled; the caller holds the writer's lock.
            columns: Where rows are copied from and to; see `ChunkCache.live_columns`.

        Returns:
            False, with nothing changed, if there is something that only `take` can process.
        """
        inbox, table, spans, pages, kernels = self.inbox, self._episodes, self._spans, self.pages, self._kernels
        if inbox.n_reports != self._n_reports or kernels is None or staging.any_dropped or self.is_full:
            return False
        first, stop = inbox.n_rows, staging.n
        n, has_ends = stop - first, staging.n_ends > inbox.n_ends
        if n:
            facts = table.reserve(n), table.n, spans.reserve(n), spans.n, pages.free, pages.n_free, pages.page_rows
            if not kernels.add_rows(staging.episode, staging.env, first, stop, *facts, columns, self._counts):
                return False
            n_episodes, n_pages, n_evicted = self._counts.tolist()
            table.n, spans.n = table.n + n_episodes, spans.n + n_pages
            if n_pages:
                pages.take(n_pages)  # the loop has used them in this order
            if self.keeps_arrivals:
                self._arrivals.append(staging.episode[first:stop].copy())
            self._is_longer = True
            self._is_changed = self._is_changed or bool(n_episodes or n_pages or n_evicted)
        if has_ends:
            self._end_episodes(staging.ends(inbox.n_ends))
            self._is_changed = True
        inbox.mark_processed(stop, staging.n_ends - inbox.n_ends)
        return True

    @property
    def is_idle(self) -> bool:
        """Whether the writer has reported nothing since everything was processed; staged rows are no reports."""
        return self.inbox.n_reports == self._n_reports

    @property
    def is_full(self) -> bool:
        """Whether there were too few free pages for new rows, and none has been released since."""
        return self._n_free_when_full == self.pages.n_free

    def is_behind(self, staging: Staging | None) -> bool:
        """Whether some appended rows were not processed, because no live rows are free until the next commit."""
        return self.inbox.is_behind(staging)

    def _add_staged(self, staging: Staging, changes: list[LiveRowChange]) -> None:
        inbox = self.inbox
        new, has_ends = inbox.new_rows(staging), inbox.has_new_ends(staging)
        if (new.start == new.stop and not has_ends) or self.is_full:
            return
        if not has_ends and not staging.any_dropped:
            add = self._add_row if new.stop == new.start + 1 else self._add_row_each
            if add(staging, new, changes):
                inbox.mark_processed(staging.n)
                return
        block = inbox.block_of(staging)
        if self._add_block(block, block.values, changes):
            inbox.mark_processed(staging.n, len(block.ends))

    def _drop_uncommitted(self) -> None:
        """Remove rows that never became durable; episodes that lost some, and open ones, end as cut."""
        table = self._episodes
        is_short = table["committed"] < table["n_rows"]
        self._trim_live_spans(np.zeros(table.n, np.int64))
        live = self._spans["source"] == LIVE
        self.pages.release(self._spans["row"][live])
        self._spans.keep(~live)
        table["n_rows"][is_short], table["has_final"][is_short] = table["committed"][is_short], 0
        is_open = table["end"] == End.OPEN
        table["end"][is_short | is_open] = End.CUT
        table["ended_at"][is_open] = self._n_ended + np.arange(int(is_open.sum()))
        self._n_ended += int(is_open.sum())
        self._is_changed = True

    def _add_row(self, staging: Staging, new: slice, changes: list[LiveRowChange]) -> bool:
        """Add a single row of an episode that has room in its page: the common case, far cheaper than a block."""
        table, row = self._episodes, new.start
        slot = int(np.searchsorted(table["episode"], staging.episode[row]))
        if slot == table.n or table["episode"][slot] != staging.episode[row]:
            return False
        values = table.data[:, slot]
        if not values[_ROOM]:
            return False
        rows = {path: column[new] for path, column in staging.columns.items()}
        changes.append(AppendedRows(rows, values[_NEXT : _NEXT + 1].copy()))
        if self.keeps_arrivals:
            self._arrivals.append(staging.episode[new].copy())
        self._is_changed = self._is_changed or bool(
            values[_FLOOR] >= values[_N_ROWS]
        )  # all earlier steps are evicted
        values[[_N_ROWS, _LIVE, _NEXT]] += 1
        values[_ROOM] -= 1
        self._is_longer = True
        return True

    def _add_row_each(self, staging: Staging, new: slice, changes: list[LiveRowChange]) -> bool:
        """Add one row to each of several episodes that have room in their pages: one step of many environments."""
        table = self._episodes
        episode = staging.episode[new]
        if len(episode) > table.n:
            return False
        slot = np.searchsorted(table["episode"], episode)
        if slot.max() == table.n or (table["episode"][slot] != episode).any():
            return False
        values = table.data[:, slot]
        if not values[_ROOM].all() or len(np.unique(slot)) < len(slot):
            return False
        rows = {path: column[new] for path, column in staging.columns.items()}
        changes.append(AppendedRows(rows, values[_NEXT].copy()))
        if self.keeps_arrivals:
            self._arrivals.append(episode.copy())
        self._is_changed = self._is_changed or bool((values[_FLOOR] >= values[_N_ROWS]).any())
        values[[_N_ROWS, _LIVE, _NEXT]] += 1
        values[_ROOM] -= 1
        table.data[:, slot] = values
        self._is_longer = True
        return True

    def _add_block(self, block: StagedBlock, values: dict[str, Array] | None, changes: list[LiveRowChange]) -> bool:
        """Copy the rows of a block; returns False and does nothing if too few pages are free.

        ``values`` are None if the rows are durable: they get no live rows, because the stream has them.
        """
        order = np.argsort(block.episode, kind="stable")
        ids, first, count = np.unique(block.episode[order], return_index=True, return_counts=True)
        is_new = ids > (self._episodes["episode"][-1] if self._episodes.n else -1)
        at = np.searchsorted(self._episodes["episode"], ids) if self._episodes.n else np.zeros(len(ids), np.int64)
        room = np.zeros(len(ids), np.int64)
        room[~is_new] = self._episodes["room"][at[~is_new]]
        n_pages = -(-np.maximum(count - room, 0) // self.pages.page_rows)
        if values is not None and int(n_pages.sum()) > self.pages.n_free:
            self._n_free_when_full = self.pages.n_free
            return False
        if is_new.any():
            env = block.env[order[first]]
            self._episodes.append(ids[is_new], env[is_new], 0, int(End.OPEN), 0, -1, 0, 0, 0, 0, 0)
        slot = np.searchsorted(self._episodes["episode"], ids)
        if values is not None and len(order):
            rows = self._allocate(ids, slot, count, n_pages)
            changes.append(AppendedRows({path: column[order] for path, column in values.items()}, rows))
            self._episodes["live"][slot] = self._episodes["n_rows"][slot] + count
        elif len(order):
            self._episodes["room"][slot] = 0  # the rows lie in the stream; later ones begin another page
            self._stop_live_spans(ids, self._episodes["n_rows"][slot])
        was_evicted = (self._episodes["floor"][slot] >= self._episodes["n_rows"][slot]).any()
        self._episodes["n_rows"][slot] += count
        if self.keeps_arrivals:
            self._arrivals.append(block.episode)
        self._end_episodes(block.ends)
        if values is None or is_new.any() or was_evicted or n_pages.any() or len(block.ends):
            self._is_changed = True
        else:
            self._is_longer = True
        return True

    def _end_episodes(self, ends: Array) -> None:
        if not len(ends):
            return
        slot, is_known = self._find(ends[:, 1])
        ends = ends[is_known]
        self._episodes["end"][slot], self._episodes["has_final"][slot] = ends[:, 3], ends[:, 4]
        self._episodes["ended_at"][slot] = self._n_ended + np.arange(len(slot))
        self._n_ended += len(slot)
        if (ends[:, 3] == End.ABORTED).any():
            self._changes.steps_removed()
            if self.keeps_arrivals:
                self._aborted.append(ends[ends[:, 3] == End.ABORTED, 1])
            self._remove(self._episodes["end"] == End.ABORTED)

    def _find(self, episode: Array) -> tuple[Array, Array]:
        """Positions of the episodes that are known here, and a mask that says which ones these are."""
        slot = np.searchsorted(self._episodes["episode"], episode)
        is_known = slot < self._episodes.n
        is_known[is_known] = self._episodes["episode"][slot[is_known]] == episode[is_known]
        return slot[is_known], is_known

    def _remove(self, chosen: Array) -> None:
        """Forget episodes and release their live rows."""
        ids = self._episodes["episode"][chosen]
        spans = np.isin(self._spans["episode"], ids)
        self.pages.release(self._spans["row"][spans & (self._spans["source"] == LIVE)])
        self._spans.keep(~spans)
        self._episodes.keep(~chosen)

    def _amend(self, change: Amendment) -> AppendedRows | None:
        """The amended values and their live row; None if the step has no live row."""
        spans, table, episode, t = self._spans, self._episodes, change.episode, change.t
        slot = int(np.searchsorted(table["episode"], episode))
        if slot == table.n or table["episode"][slot] != episode or t >= table["live"][slot]:
            return None
        mine = np.flatnonzero((spans["episode"] == episode) & (spans["source"] == LIVE) & (spans["t"] <= t))
        if not len(mine):
            return None
        span = mine[np.argmax(spans["t"][mine])]
        if t >= spans["stop"][span]:
            return None
        row = spans["row"][span] + t - spans["t"][span]
        return AppendedRows({path: np.asarray(v)[None] for path, v in change.values.items()}, np.array([row]))

    # ---- live rows

    def _allocate(self, ids: Array, slot: Array, count: Array, n_pages: Array) -> Array:
        """Live rows for ``count`` more rows of each episode: first the room in its page, then new pages."""
        table, page_rows = self._episodes, self.pages.page_rows
        n = int(n_pages.sum())
        pages = self.pages.take(n)
        room, next_row = table["room"][slot], table["next"][slot]
        owner, i = expand_counts(count)
        beyond = i - room[owner]
        first_page = np.cumsum(n_pages) - n_pages
        page = pages[np.minimum(first_page[owner] + np.maximum(beyond, 0) // page_rows, max(n - 1, 0))] if n else 0
        rows: Array = np.where(beyond < 0, next_row[owner] + i, page * page_rows + beyond % page_rows)
        if n:
            page_owner, k = expand_counts(n_pages)
            t = (table["n_rows"][slot] + room)[page_owner] + k * page_rows
            self._spans.append(ids[page_owner], t, LIVE, pages * page_rows, _NO_STOP)
        last = np.cumsum(count) - 1
        table["next"][slot] = rows[last] + 1
        table["room"][slot] = np.where(n_pages > 0, room + n_pages * page_rows - count, room - count)
        return rows

    def _stop_live_spans(self, ids: Array, t: Array) -> None:
        """Let the last live span of each episode end at ``t``."""
        spans = self._spans
        mine = np.flatnonzero(
            (spans["source"] == LIVE) & (spans["stop"] == _NO_STOP) & np.isin(spans["episode"], ids)
        )
        spans["stop"][mine] = t[np.searchsorted(ids, spans["episode"][mine])]

    def _place(self, spans: Array) -> PlacedRows:
        """Note that a commit placed the rows of these spans in the stream; they need no live rows."""
        start, stop = int(spans[0, 3]), int(spans[-1, 4])
        spans = spans[spans[:, 4] > spans[:, 3]]
        slot, is_known = self._find(spans[:, 0])
        spans, table = spans[is_known], self._episodes
        table["committed"][slot] = spans[:, 2] + spans[:, 4] - spans[:, 3]
        t_to_row = np.zeros(table.n, np.int64)
        t_to_row[slot] = spans[:, 3] - spans[:, 2]
        live, rows = self._trim_live_spans(t_to_row)
        if len(spans):
            self._spans.append(spans[:, 0], spans[:, 2], self._stream + 1, spans[:, 3], _NO_STOP)
        self._is_changed = True
        return PlacedRows(live, rows, start, stop)

    def _trim_live_spans(self, t_to_row: Array) -> tuple[Array, Array]:
        """Take committed rows off the live spans; returns these live rows, and their rows in the stream.

        ``t_to_row`` is added to a step's t to get its row, for each episode.
        """
        spans, table = self._spans, self._episodes
        live = np.flatnonzero(spans["source"] == LIVE)
        live = live[np.lexsort((spans["t"][live], spans["episode"][live]))]
        episode, t = spans["episode"][live], spans["t"][live]
        slot = np.searchsorted(table["episode"], episode)
        stop = table["live"][slot]
        is_followed = np.flatnonzero(episode[1:] == episode[:-1])  # by another live span of the same episode
        stop[is_followed] = np.minimum(stop[is_followed], t[is_followed + 1])
        stop = np.minimum(stop, spans["stop"][live])
        committed = table["committed"][slot]
        is_done = stop <= committed
        n_committed = np.clip(committed - t, 0, stop - t)
        row = spans["row"][live]
        owner, i = expand_counts(n_committed)
        moved = row[owner] + i, (t + t_to_row[slot])[owner] + i
        spans["t"][live], spans["row"][live] = t + n_committed, row + n_committed
        is_last = np.ones(len(live), bool)
        is_last[is_followed] = False
        table["room"][slot[is_done & is_last]] = 0  # its page is released: the episode continues in another
        self.pages.release(row[is_done])
        keep = np.ones(spans.n, bool)
        keep[live[is_done]] = False
        spans.keep(keep)
        return moved

    # ---- arrivals and evictions

    def take_arrivals(self) -> Array:
        """The episode of each row processed since the last call, in order of arrival."""
        parts, self._arrivals = self._arrivals, []
        arrived = parts[0] if len(parts) == 1 else np.concatenate([_EMPTY, *parts])
        aborted, self._aborted = self._aborted, []
        # The writer may have dropped rows of aborted episodes before they arrived, so none of their rows count.
        return arrived[~np.isin(arrived, np.concatenate(aborted))] if aborted else arrived

    @property
    def uncommitted(self) -> Array:
        """Numbers of the episodes that are open or not committed whole."""
        return self._episodes["episode"]

    def evict(self, episode: Array, t: Array) -> None:
        """Leave out the steps of these episodes before ``t``."""
        slot, is_known = self._find(episode)
        floor = self._episodes["floor"]
        floor[slot] = np.maximum(floor[slot], np.minimum(t[is_known], self._episodes["n_rows"][slot]))
        self._is_changed = True

    # ---- entries for the index

    def mark_changed(self) -> None:
        """Make the next `changed_entries` return everything, because the index was rewritten from older entries."""
        self._is_changed = True

    def changed_lengths(self) -> Array | None:
        """Number of rows of each growing episode; None unless they got longer and nothing else changed."""
        if self._is_changed or not self._is_longer:
            return None
        self._is_longer = False
        n_rows: Array = (self._episodes["n_rows"] - self._episodes["floor"])[self._growing]
        return n_rows

    def changed_entries(self) -> tuple[IndexEntries, IndexEntries, IndexEntries] | None:
        """Entries of episodes that are committed whole, that ended, and that grow; None if nothing changed.

        Episodes that are committed whole are returned once and then forgotten here.
        """
        if not self._is_changed:
            return None
        self._is_changed = self._is_longer = False
        table = self._episodes
        ended = np.flatnonzero(table["end"] != End.OPEN)
        ended = ended[np.argsort(table["ended_at"][ended], kind="stable")]
        is_placed = table["committed"][ended] == table["n_rows"][ended]
        # In order of their ends, even if later ones became durable first: the order must not depend on the disk.
        n_placed = len(ended) if is_placed.all() else int(np.argmin(is_placed))
        growing = np.flatnonzero(table["end"] == End.OPEN)
        has_steps = table["n_rows"] - table["has_final"] > table["floor"]
        shown = [slots[has_steps[slots]] for slots in (ended[:n_placed], ended[n_placed:], growing)]
        entries = live_entries(table, self._spans, np.concatenate(shown), self._stream, self._kernels)
        placed, rest, growing_entries = entries.split(len(shown[0]), len(shown[0]) + len(shown[1]))
        is_done = np.zeros(table.n, bool)
        is_done[ended[:n_placed]] = True
        if n_placed:
            self._remove(is_done)
        growing = np.flatnonzero(table["end"] == End.OPEN)
        self._growing = growing[(table["n_rows"] - table["floor"])[growing] > 0]
        return placed, rest, growing_entries
