"""Evicts the oldest steps above the limits of a buffer, in order of arrival, whatever the disk does."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from trajstore.arguments import parse_bytes
from trajstore.format.spans import expand_counts
from trajstore.replay.arrival_queue import ArrivalBlock, ArrivalQueue, by_number, count_in_blocks, first_t
from trajstore.replay.retention import PART, Retention
from trajstore.replay.stored_bytes import ShownBytes, StoredBytes
from trajstore.sampling.batches.batch_assembler import BatchAssembler
from trajstore.sampling.index.episode_numbers import EpisodeNumberMap
from trajstore.sampling.index.index_entries import GONE, HAS_FINAL, OPEN
from trajstore.schema import Array
from trajstore.store.snapshot import Snapshot

_BLOCK_ROWS = 1024  # within a block of arrivals, the steps of one environment are evicted together


_AGE_PARTS = 64  # a step may outlive an age limit by 1/64 of it


_MANY_EPISODES = 1 << 17  # episodes above which ended ones are forgotten


_AT_ONCE, _MOST_AT_ONCE = 4096, 1 << 16  # arrivals examined at a time


CAUSES = ("steps", "episodes", "bytes", "age", "removed")


class LimitEvictor:
    """Applies a `Retention` to the steps that an assembler shows. Methods are called with its lock held.

    The order in which steps arrived decides which are evicted, so the result does not depend on commits. Rows on
    storage are freed later, once no row before them is wanted (`unshown_rows`).
    """

    def __init__(self, assembler: BatchAssembler, options: Retention, stored: StoredBytes) -> None:
        self.options = options
        self._stored = stored
        self._bytes_shown = self._bytes_total = 0.0  # bytes of shown steps and of all objects, when last counted
        self._least_steps = self._least_episodes = 0  # limits never evict below these
        self._assembler = assembler
        self._queues: dict[int, ArrivalQueue] = {}  # by stream number
        self._n_arrived: dict[int, EpisodeNumberMap] = {}  # by stream: rows of its episodes in full blocks
        self._block = ArrivalBlock()  # rows of the block that is not full
        self._order = 0
        self._block_time = 0.0
        self._seen: dict[str, int] = {}  # by stream: number of spans in the queues
        self._n_evicted = 0  # steps evicted here
        self._counted: dict[int, int] = {}  # by stream: its steps when its limit was last checked
        self._unchecked: dict[int, int] = {}  # by stream: rows that arrived since
        self.evicted = {cause: {"steps": 0, "episodes": 0} for cause in CAUSES}
        limits = [o.steps for o in (options, options.per_stream) if o is not None and o.steps is not None]
        self._block_rows = max(1, min(_BLOCK_ROWS, min(limits, default=_BLOCK_ROWS * 64) // 64))
        if options.is_limited:
            assembler.keep_arrivals()

    # ---- arrivals

    def follow(self, snapshot: Snapshot) -> None:
        """Queue the spans of other streams that a snapshot shows for the first time."""
        if not self.options.is_limited or snapshot.schema is None:
            return
        index, blocks = self._assembler.index, []
        for record, part in zip(snapshot.streams, snapshot.parts(), strict=True):
            if record.id == index.followed_stream:
                continue
            spans, times = part.spans.ints, part.spans.floats[:, 1]
            fresh = slice(self._seen.get(record.id, 0), None)
            self._seen[record.id] = len(spans)
            n = (spans[:, 4] - spans[:, 3])[fresh]
            stream = np.full(len(n), index.numbers[snapshot.names[part.stream]])
            blocks.append(np.stack([stream, spans[fresh, 0], spans[fresh, 2], n, times[fresh]])[:, n > 0])
        if blocks:
            items = np.concatenate(blocks, 1)
            for number, mine in by_number(items[0]):
                self._note_arrived(int(number), int(items[3, mine].sum()))
            self._enqueue(items[:, np.argsort(items[4], kind="stable")])

    def _note_arrived(self, number: int, n: int) -> None:
        self._unchecked[number] = self._unchecked.get(number, 0) + n

    def _enqueue(self, items: Array) -> None:
        order = self._order + np.arange(items.shape[1])
        self._order += items.shape[1]
        for number, mine in by_number(items[0]):
            queue = self._queues.setdefault(int(number), ArrivalQueue())
            queue.push(order[mine], items[1:, mine])
            if len(queue) > queue.enough:  # many may have been evicted for other reasons than their age
                start, stop = self._left(int(number), *queue.items()[1:4].astype(np.int64))
                queue.keep(stop > start)

    def _arrive(self, episodes: Array, now: float) -> None:
        if not len(self._block):
            self._block_time = now
        number = self._assembler.index.numbers[self._assembler.index.followed_stream]
        self._block.add(number, episodes)
        self._note_arrived(number, len(episodes))
        if len(self._block) >= self._block_rows:
            self._queue_blocks(now, partial=False)

    def _queue_blocks(self, now: float, partial: bool) -> None:
        """Queue full blocks: in each of them, the rows of one environment after the other."""
        n = len(self._block)
        rows = self._block.take(n if partial else n - n % self._block_rows)
        stream, episode, count = count_in_blocks(rows[0], rows[1], self._block_rows)
        t = np.empty(len(count), np.int64)
        for number, mine in by_number(stream):
            arrived = self._n_arrived.setdefault(int(number), EpisodeNumberMap(default=0))
            t[mine] = first_t(arrived, episode[mine], count[mine])
            if len(arrived) > _MANY_EPISODES + 4 * len(self._assembler.uncommitted_episodes):
                # Only episodes that may grow need to be known.
                arrived.keep(np.append(self._assembler.uncommitted_episodes, self._block.episodes(int(number))))
        items = np.empty((5, len(count)))
        items[0], items[1], items[2], items[3], items[4] = stream, episode, t, count, now
        self._enqueue(items)

    # ---- evictions

    def apply(self, now: float) -> bool:
        """Evict what exceeds a limit, after the assembler has published; returns whether anything was evicted."""
        if not self.options.is_limited:
            return False
        self._queue_aged_block(now)
        arrived = self._assembler.take_arrivals()
        if len(arrived):
            self._arrive(arrived, now)
        before = self._n_evicted
        options, index = self.options, self._assembler.index
        if options.steps is not None:
            self._evict_above("steps", max(options.steps, self._least_steps), index.n_steps)
        if options.bytes is not None:
            self._evict_bytes(parse_bytes(options.bytes, "bytes"))
        if options.per_stream is not None and options.per_stream.steps is not None:
            self._evict_from_streams(options.per_stream.steps)
        if options.episodes is not None:
            self._evict_episodes(max(options.episodes, self._least_episodes))
        self._evict_aged(now)
        return self._n_evicted > before

    @property
    def n_evicted(self) -> int:
        """Steps evicted so far, for any cause."""
        return sum(counts["steps"] for counts in self.evicted.values())

    def _evict_above(self, cause: str, limit: int, n: int, only: int | None = None) -> None:
        if n > limit:
            self._evict_steps(cause, n - limit + limit // PART, only)

    def _evict_steps(self, cause: str, need: int, only: int | None = None) -> None:
        while need > 0:
            gone = self._evict_oldest(cause, need, only)
            if gone is None:
                return
            need -= gone

    def _evict_oldest(self, cause: str, need: int, only: int | None) -> int | None:
        """Evict up to ``need`` of the oldest steps; returns how many, or None if none are left."""
        queues = [(q.first_order, number) for number, q in self._queues.items() if only in (None, number)]
        order, number = min(queues, default=(math.inf, -1))
        if order == math.inf:
            if not len(self._block):
                return None
            self._queue_blocks(self._block_time, partial=True)
            return 0
        until = min((o for o, other in queues if other != number), default=math.inf)
        # One more than needed: of the first, all steps may be evicted already.
        items = self._queues[number].items(min(max(need + 1, _AT_ONCE), _MOST_AT_ONCE))
        if until < math.inf:
            items = items[:, : int(np.searchsorted(items[0], until))]
        episode, t, n = (items[i].astype(np.int64) for i in (1, 2, 3))
        start, stop = self._left(number, episode, t, n)
        sums = np.cumsum((stop - start).clip(0))
        k = int(np.searchsorted(sums, need))  # this arrival is evicted in part, those before it as a whole
        floor = t + n
        if k < len(sums):
            floor[k] = int(stop[k]) - (int(sums[k]) - need)
        popped = min(k + 1, len(sums))
        self._raise_floors(cause, number, episode[:popped], floor[:popped])
        self._queues[number].drop(k)
        return min(need, int(sums[-1]))

    def _evict_bytes(self, limit: int) -> None:
        """Evict the oldest steps if the committed ones take more than ``limit`` bytes.

        The bytes are counted again only when a commit may have passed the limit.
        """
        total = self._stored.total(self._assembler.n_placed)
        if total == self._bytes_total or self._bytes_shown + total - self._bytes_total <= limit:
            return
        shown = self._stored.of(self._assembler.index)
        self._bytes_shown, self._bytes_total = shown.total, total
        if shown.total > limit:
            need = shown.total - limit + limit // PART
            n_spare = self._assembler.index.n_steps - self._least_steps
            self._evict_steps("bytes", min(self._count_oldest(shown, need), n_spare))
            self._bytes_shown -= need

    def _count_oldest(self, shown: ShownBytes, need: float) -> int:
        """How many of the oldest steps take ``need`` bytes."""
        at_once, index = _AT_ONCE, self._assembler.index
        while True:
            (number, episode, t, n), are_all = self._oldest_arrivals(at_once)
            start, stop = self._left(number, episode, t, n)
            left = np.flatnonzero(stop > start)
            entry, start, stop = index.find(number[left], episode[left]), start[left], stop[left]
            first = index.logical.host[entry] - index.t_base.host[entry]
            has_final = (first + stop == index.logical.host[entry + 1] - 1) & (index.flags.host[entry] & HAS_FINAL)
            freed = np.cumsum(shown.up_to(first + stop + has_final) - shown.up_to(first + start))
            k = int(np.searchsorted(np.maximum.accumulate(freed), need))
            if k < len(freed):
                rest = need - float(freed[k - 1]) if k else need
                steps = np.arange(1, int(stop[k] - start[k]) + 1)
                within = shown.up_to(int(first[k] + start[k]) + steps) - shown.up_to(first[k : k + 1] + start[k])
                return int((stop - start)[:k].sum()) + 1 + int(np.searchsorted(within[:-1], rest))
            if not are_all:
                at_once *= 4
            elif len(self._block):
                self._queue_blocks(self._block_time, partial=True)
            else:
                return int((stop - start).sum())

    def _oldest_arrivals(self, n: int) -> tuple[Array, bool]:
        """Stream, episode, first t and rows of the oldest arrivals in order, and whether these are all of them.

        Looks at up to ``n`` arrivals of each stream.
        """
        found, until = [np.empty((6, 0))], math.inf
        for number, queue in self._queues.items():
            items = queue.items(n)
            found.append(np.concatenate([np.full((1, items.shape[1]), number), items]))
            if items.shape[1] < len(queue):
                until = min(until, float(items[0, -1]))
        items = np.concatenate(found, 1)
        items = items[:, items[1] <= until]
        items = items[:, np.argsort(items[1], kind="stable")]
        return items[[0, 2, 3, 4]].astype(np.int64), until == math.inf

    def _left(self, number: int | Array, episode: Array, t: Array, n: Array) -> tuple[Array, Array]:
        """The steps of arrivals that are still shown, as start and stop; a final row is not a step."""
        index = self._assembler.index
        if not index.n:
            return t, t
        entry = index.find(np.broadcast_to(number, len(episode)), episode)
        base = np.where(entry >= 0, index.t_base.host[entry], GONE)
        stop = np.where(entry >= 0, base + index.lengths_of(entry), 0)
        return np.maximum(t, base), np.minimum(t + n, stop)

    def _raise_floors(self, cause: str, number: int, episode: Array, floor: Array) -> None:
        distinct, where = np.unique(episode, return_inverse=True)
        floors = np.zeros(len(distinct), np.int64)
        np.maximum.at(floors, where, floor)
        self.evict(cause, np.full(len(distinct), number), distinct, floors)

    def evict(self, cause: str, stream: Array, episode: Array, floor: Array) -> None:
        index, counts = self._assembler.index, self.evicted[cause]
        before = index.n_steps, index.n_episodes
        self._assembler.evict(stream, episode, floor)
        self._n_evicted += before[0] - index.n_steps
        counts["steps"] += before[0] - index.n_steps
        counts["episodes"] += before[1] - index.n_episodes

    def _evict_from_streams(self, limit: int) -> None:
        """Evict from streams above their limit; counts only streams that may have passed it since."""
        index = self._assembler.index
        for number in [s for s, n in self._unchecked.items() if self._counted.get(s, 0) + n > limit]:
            mine = np.flatnonzero(index.stream.host[index.first : index.n] == number) + index.first
            n = int(index.lengths_of(mine).sum())
            self._evict_above("steps", limit, n, number)
            self._counted[number] = n if n <= limit else limit - limit // PART
            self._unchecked[number] = 0

    def _evict_episodes(self, limit: int) -> None:
        index = self._assembler.index
        if index.n_episodes <= limit:
            return
        self._evict_entries("episodes", self.oldest(index.n_episodes - limit + limit // PART))

    def oldest(self, n: int) -> Array:
        """Entries of the oldest ``n`` episodes, without those that are open."""
        index = self._assembler.index
        entry = np.arange(index.first, min(index.n, index.first + n))
        ended: Array = entry[(index.flags.host[entry] & OPEN) == 0]
        return ended

    def _evict_entries(self, cause: str, entry: Array) -> None:
        """Evict episodes; an open one loses the steps that it has."""
        index = self._assembler.index
        handles = index.stream.host[entry].astype(np.int64), index.episode.host[entry].copy()
        is_open = (index.flags.host[entry] & OPEN) != 0
        floor = np.where(is_open, index.t_base.host[entry] + index.lengths_of(entry), GONE)
        self.evict(cause, *handles, floor)

    def evict_entries(self, entry: Array) -> int:
        """Evict episodes; an open one loses the steps that it has. Returns the number of evicted steps."""
        before = self.n_evicted
        self._evict_entries("removed", entry)
        return self.n_evicted - before

    def evict_where(self, chosen: Array) -> int:
        """Evict the chosen steps (a bool for each, in index order) and those before them in their episodes."""
        index = self._assembler.index
        entry = np.arange(index.first, index.n)
        lengths = index.lengths(index.first, index.n)
        owner, position = expand_counts(lengths)
        last = np.zeros(len(entry), np.int64)
        np.maximum.at(last, owner[chosen], position[chosen] + 1)
        hit = np.flatnonzero(last)
        before = self.n_evicted
        if len(hit):
            stream, episode = index.stream.host[entry[hit]].astype(np.int64), index.episode.host[entry[hit]].copy()
            floor = index.t_base.host[entry[hit]] + last[hit]
            is_over = (last[hit] == lengths[hit]) & ((index.flags.host[entry[hit]] & OPEN) == 0)
            self.evict("removed", stream, episode, np.where(is_over, GONE, floor))
        return self.n_evicted - before

    def _queue_aged_block(self, now: float) -> None:
        """With an age limit, queue a block before it is full if its rows have waited long enough."""
        is_aged = self.options.age_s is not None and self._block_time < now - self.options.age_s / _AGE_PARTS
        if is_aged and len(self._block):
            self._queue_blocks(self._block_time, partial=True)

    def _evict_aged(self, now: float) -> None:
        if self.options.age_s is not None:
            self._queue_aged_block(now)
            self._evict_before(now - self.options.age_s)

    def _evict_before(self, time: float) -> None:
        for number, queue in self._queues.items():
            while len(queue):
                items = queue.items(_AT_ONCE)
                old = int(np.searchsorted(np.maximum.accumulate(items[4]), time))  # the clocks of ranks may differ
                if not old:
                    break
                episode, t, n = (items[i, :old].astype(np.int64) for i in (1, 2, 3))
                self._raise_floors("age", number, episode, t + n)
                queue.drop(old)

    # ---- state

    def state_dict(self) -> dict[str, Any]:
        """The arrivals that are still shown, in order, and the counts."""
        block = self._block.rows().copy()
        return {
            "streams": list(self._assembler.index.numbers),
            "queues": {str(number): queue.items().copy() for number, queue in self._queues.items()},
            "page": block,
            "page_arrived": np.array([self._arrived(*pair) for pair in block.T.tolist()], np.int64),
            "is_limited": self.options.is_limited,
            "page_time": self._block_time,
            "order": self._order,
            "evicted": {cause: dict(counts) for cause, counts in self.evicted.items()},
            "least": [self._least_steps, self._least_episodes],
        }

    def _arrived(self, stream: int, episode: int) -> int:
        known = self._n_arrived.get(stream)
        return int(known.get(np.array([episode]))[0]) if known is not None else 0

    def load_state_dict(self, state: Mapping[str, Any], known_spans: Mapping[str, int] | None = None) -> None:
        """Continue the state of another session; the stream that it wrote is one of the other streams here.

        ``known_spans`` is the number of spans of each stream that the state knows; by default all of them.
        """
        number = np.array([self._assembler.index.numbers.get(name, -1) for name in state["streams"]], np.int64)
        self.evicted |= {cause: dict(counts) for cause, counts in state["evicted"].items()}
        self._least_steps, self._least_episodes = map(int, state.get("least", (0, 0)))
        if not self.options.is_limited:
            return
        if not state["is_limited"]:
            return  # that session kept no arrivals: its steps are evicted in the order of their rows
        there = {record.id: record.spans for record in self._assembler.snapshot.streams}
        self._seen = there if known_spans is None else dict(known_spans)
        self._order, self._queues = int(state["order"]), {}
        for name, items in state["queues"].items():
            self._queues[int(number[int(name)])] = queue = ArrivalQueue()
            queue.push(np.asarray(items)[0], np.asarray(items)[1:])
        self._block_time = float(state["page_time"])
        stream, episode = np.asarray(state["page"])
        stream = number[stream]
        self._block = ArrivalBlock()
        self._block.add(stream, episode)
        for n in np.unique(stream).tolist():
            self._n_arrived[n] = EpisodeNumberMap(default=0)
            self._n_arrived[n].put(episode[stream == n], np.asarray(state["page_arrived"])[stream == n])
        self._unchecked = dict.fromkeys(self._queues, GONE)  # the limit may be a new one


def unshown_rows(assembler: BatchAssembler) -> dict[str, int]:
    """By stream: the first row that is still shown; no row below it will be shown again. Looks at all spans."""
    found = assembler.index.first_shown_rows()
    n_rows = {record.id: record.rows for record in assembler.snapshot.streams}
    if assembler.index.followed_stream in n_rows:  # newer committed rows are still live rows here
        n_rows[assembler.index.followed_stream] = assembler.n_placed
    return {name: min(row, n_rows[name]) for name, row in found.items() if name in n_rows}
