"""How much is kept, and which steps go first: in order of arrival, whatever the disk does meanwhile."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from trajstore.arguments import check_positive, parse_bytes
from trajstore.format.spans import expand_counts
from trajstore.sampling.batch_assembler import BatchAssembler
from trajstore.sampling.episode_numbers import EpisodeNumberMap
from trajstore.sampling.index_entries import GONE, OPEN
from trajstore.schema import Array
from trajstore.store.snapshot import Snapshot

_PAGE_ROWS = 1024  # steps of one environment after the other leave together within so many that arrived
PART = 256  # an eviction frees one part in so many of a limit, so that its cost is spread over many appends
_AGES = 64  # a step may outlive an age limit by one part in so many
_MANY_ARRIVALS = 4096
_MANY_EPISODES = 1 << 17
_AT_ONCE = 4096  # arrivals looked at in one go
CAUSES = ("steps", "episodes", "bytes", "age", "removed")


@dataclass(frozen=True, slots=True)
class Retention:
    """What a buffer keeps; where several limits are given, all of them hold.

    The oldest go first, in order of arrival. An episode may lose its first steps (it is *headless* then) and keep
    the others. A limit on episodes takes away whole episodes that ended, oldest end first.

    Args:
        steps: At most so many steps (transitions; final observations do not count).
        episodes: At most so many episodes.
        bytes: At most so many bytes on storage, estimated from what a step has taken so far.
        age_s: Nothing older than so many seconds, counted from when steps are first taken up, by a batch or another
            look at the buffer.
        per_stream: Limits for the steps of each stream on its own.
    """

    steps: int | None = None
    episodes: int | None = None
    bytes: int | str | None = None
    age_s: float | None = None
    per_stream: Retention | None = None

    def __post_init__(self) -> None:
        for name in ("steps", "episodes"):
            if getattr(self, name) is not None:
                check_positive(name, getattr(self, name))
        if self.bytes is not None:
            parse_bytes(self.bytes, "bytes")
        if self.age_s is not None and not (isinstance(self.age_s, (int, float)) and 0 < self.age_s < math.inf):
            raise ValueError(f"age_s: expected a positive number of seconds, got {self.age_s!r}")
        if self.per_stream is not None and self.per_stream != Retention(steps=self.per_stream.steps):
            raise ValueError(f"per_stream: expected Retention(steps=...), got {self.per_stream!r}")

    @property
    def is_limited(self) -> bool:
        return self != Retention()

    @staticmethod
    def of(capacity: int | Retention | None) -> Retention:
        """A number is one of steps."""
        if isinstance(capacity, Retention):
            return capacity
        if capacity is not None and (not isinstance(capacity, int) or isinstance(capacity, bool) or capacity < 1):
            raise ValueError(f"capacity: expected a positive integer, a Retention or None, got {capacity!r}")
        return Retention(steps=capacity)


class _Queue:
    """Arrivals of one stream, oldest first: order, episode, first t, rows and time."""

    def __init__(self) -> None:
        self._data = np.empty((5, 64))
        self._first = self._stop = 0
        self.enough = _MANY_ARRIVALS  # with more it is looked which are left

    def __len__(self) -> int:
        return self._stop - self._first

    def push(self, items: Array) -> None:
        n = items.shape[1]
        if self._stop + n > self._data.shape[1]:
            kept = self._data[:, self._first : self._stop]
            grown = np.empty((5, max(64, 2 * (kept.shape[1] + n))))
            grown[:, : kept.shape[1]] = kept
            self._data, self._first, self._stop = grown, 0, kept.shape[1]
        self._data[:, self._stop : self._stop + n] = items
        self._stop += n

    def items(self, n: int | None = None) -> Array:
        """The oldest ones; float64 holds their numbers exactly up to 2**53."""
        stop = self._stop if n is None else min(self._stop, self._first + n)
        return self._data[:, self._first : stop]

    def drop(self, n: int) -> None:
        self._first += n

    def keep(self, chosen: Array) -> None:
        self._data = self.items()[:, chosen]
        self._first, self._stop = 0, self._data.shape[1]
        self.enough = 2 * self._stop + _MANY_ARRIVALS

    @property
    def first_order(self) -> float:
        return float(self._data[0, self._first]) if len(self) else math.inf


class Evictor:
    """Applies a `Retention` to what an assembler shows. Methods are called with its lock held.

    What goes is decided by the order in which steps arrived, so that it is the same however they were committed;
    rows that are on storage go later, once nothing before them is wanted (`unshown_rows`).
    """

    def __init__(self, source: BatchAssembler, options: Retention) -> None:
        self.options = options
        self._least_steps = self._least_episodes = 0  # that a limit leaves in any case
        self._source = source
        self._queues: dict[int, _Queue] = {}  # by stream number
        self._n_arrived: dict[
            int, EpisodeNumberMap
        ] = {}  # by stream: rows of its episodes that pages were turned with
        self._page: list[Array] = []  # stream and episode of the rows of the page that is not complete
        self._n_paged = self._order = 0
        self._page_time = 0.0
        self._seen: dict[str, int] = {}  # spans of streams that are in the queues
        self._counted: dict[int, int] = {}  # by stream: its steps when its own limit was looked at
        self._unchecked: dict[int, int] = {}  # by stream: rows that came since
        self.evicted = {cause: {"steps": 0, "episodes": 0} for cause in CAUSES}
        limits = [o.steps for o in (options, options.per_stream) if o is not None and o.steps is not None]
        self._page_rows = max(1, min(_PAGE_ROWS, min(limits, default=_PAGE_ROWS * 64) // 64))
        if options.is_limited:
            source.keep_arrivals()

    # ---- arrivals

    def follow(self, snapshot: Snapshot) -> None:
        """Take in the spans of other streams that a snapshot shows and that were not there before."""
        if not self.options.is_limited or snapshot.schema is None:
            return
        index, blocks = self._source.index, []
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
            for number in np.unique(items[0]).astype(int).tolist():
                self._came(number, int(items[3, items[0] == number].sum()))
            self._enqueue(items[:, np.argsort(items[4], kind="stable")])

    def _came(self, number: int, n: int) -> None:
        self._unchecked[number] = self._unchecked.get(number, 0) + n

    def _enqueue(self, items: Array) -> None:
        order = self._order + np.arange(items.shape[1])
        self._order += items.shape[1]
        for number in np.unique(items[0]).astype(int).tolist():
            mine = items[0] == number
            queue = self._queues.setdefault(number, _Queue())
            queue.push(np.concatenate([order[None, mine], items[1:, mine]]))
            if len(queue) > queue.enough:  # many may have gone otherwise than by their age
                start, stop = self._left(number, *queue.items()[1:4].astype(np.int64))
                queue.keep(stop > start)

    def _arrive(self, episodes: Array, now: float) -> None:
        if not self._n_paged:
            self._page_time = now
        number = self._source.index.numbers[self._source.index.followed_stream]
        self._page.append(np.stack([np.full(len(episodes), number), episodes]))
        self._n_paged += len(episodes)
        self._came(number, len(episodes))
        if self._n_paged >= self._page_rows:
            self._turn_pages(now, partial=False)

    def _turn_pages(self, now: float, partial: bool) -> None:
        """Enqueue complete pages: what each environment got in one of them, one after the other."""
        rows = np.concatenate(self._page, 1)
        n = rows.shape[1] if partial else rows.shape[1] - rows.shape[1] % self._page_rows
        self._page, self._n_paged = [rows[:, n:]], rows.shape[1] - n
        page = np.arange(n) // self._page_rows
        (_, stream, episode), count = np.unique(
            np.concatenate([page[None], rows[:, :n]]), axis=1, return_counts=True
        )
        t = np.empty(len(count), np.int64)
        for number in np.unique(stream).tolist():
            mine = np.flatnonzero(stream == number)
            arrived = self._n_arrived.setdefault(number, EpisodeNumberMap(default=0))
            t[mine] = _first_t(arrived, episode[mine], count[mine])
            if len(arrived) > _MANY_EPISODES + 4 * len(self._source.uncommitted_episodes):
                # Only episodes that may go on need to be known.
                paged = np.concatenate([part[1][part[0] == number] for part in self._page])
                arrived.keep(np.append(self._source.uncommitted_episodes, paged))
        self._enqueue(np.stack([stream, episode, t, count, np.full(len(count), now)]).astype(np.float64))

    # ---- evictions

    def apply(self, now: float, bytes_per_step: float | None) -> bool:
        """Evict what is over a limit; called after the assembler has published. Says whether anything went.

        ``bytes_per_step`` is None while nothing is known of what a step takes.
        """
        if not self.options.is_limited:
            return False
        self._turn_due(now)
        arrived = self._source.take_arrivals()
        if len(arrived):
            self._arrive(arrived, now)
        before = self.n_evicted
        options, index = self.options, self._source.index
        if options.steps is not None:
            self._shrink("steps", max(options.steps, self._least_steps), index.n_steps)
        if options.bytes is not None and bytes_per_step is not None:
            limit = int(parse_bytes(options.bytes, "bytes") / bytes_per_step)
            self._shrink("bytes", max(limit, self._least_steps), index.n_steps)
        if options.per_stream is not None and options.per_stream.steps is not None:
            self._shrink_streams(options.per_stream.steps)
        if options.episodes is not None:
            self._drop_episodes(max(options.episodes, self._least_episodes))
        self._drop_old(now)
        return self.n_evicted > before

    @property
    def n_evicted(self) -> int:
        """Steps that were evicted so far, for any cause."""
        return sum(counts["steps"] for counts in self.evicted.values())

    def _shrink(self, cause: str, limit: int, n: int, only: int | None = None) -> None:
        if n <= limit:
            return
        need = n - limit + limit // PART
        while need > 0:
            gone = self._evict_oldest(cause, need, only)
            if gone is None:
                return
            need -= gone

    def _evict_oldest(self, cause: str, need: int, only: int | None) -> int | None:
        """Evict some of the oldest steps, up to ``need``; says how many, or None where there are no more."""
        queues = [(q.first_order, number) for number, q in self._queues.items() if only in (None, number)]
        order, number = min(queues, default=(math.inf, -1))
        if order == math.inf:
            if not self._n_paged:
                return None
            self._turn_pages(self._page_time, partial=True)
            return 0
        until = min((o for o, other in queues if other != number), default=math.inf)
        items = self._queues[number].items(_AT_ONCE)
        items = items[:, items[0] < until]
        episode, t, n = (items[i].astype(np.int64) for i in (1, 2, 3))
        start, stop = self._left(number, episode, t, n)
        sums = np.cumsum((stop - start).clip(0))
        k = int(np.searchsorted(sums, need))  # this one is left in part, those before go whole
        floor = t + n
        if k < len(sums):
            floor[k] = int(stop[k]) - (int(sums[k]) - need)
        popped = min(k + 1, len(sums))
        self._raise_floors(cause, number, episode[:popped], floor[:popped])
        self._queues[number].drop(k)
        return min(need, int(sums[-1]))

    def _left(self, number: int, episode: Array, t: Array, n: Array) -> tuple[Array, Array]:
        """Which steps of arrivals are still here, from and to; a final row is none."""
        index = self._source.index
        if not index.n:
            return t, t
        entry = index.find(np.full(len(episode), number), episode)
        base = np.where(entry >= 0, index.t_base.host[entry], GONE)
        stop = np.where(entry >= 0, base + index.lengths_of(entry), 0)
        return np.maximum(t, base), np.minimum(t + n, stop)

    def _raise_floors(self, cause: str, number: int, episode: Array, floor: Array) -> None:
        distinct, where = np.unique(episode, return_inverse=True)
        floors = np.zeros(len(distinct), np.int64)
        np.maximum.at(floors, where, floor)
        self._evict(cause, np.full(len(distinct), number), distinct, floors)

    def _evict(self, cause: str, stream: Array, episode: Array, floor: Array) -> None:
        index, counts = self._source.index, self.evicted[cause]
        before = index.n_steps, index.n_episodes
        self._source.evict(stream, episode, floor)
        counts["steps"] += before[0] - index.n_steps
        counts["episodes"] += before[1] - index.n_episodes

    def _shrink_streams(self, limit: int) -> None:
        """Count the steps of streams that may be over the limit, by what came since they were counted last."""
        index = self._source.index
        for number in [s for s, n in self._unchecked.items() if self._counted.get(s, 0) + n > limit]:
            mine = np.flatnonzero(index.stream.host[index.first : index.n] == number) + index.first
            n = int(index.lengths_of(mine).sum())
            self._shrink("steps", limit, n, number)
            self._counted[number] = n if n <= limit else limit - limit // PART
            self._unchecked[number] = 0

    def _drop_episodes(self, limit: int) -> None:
        index = self._source.index
        if index.n_episodes <= limit:
            return
        self._drop("episodes", self.oldest(index.n_episodes - limit + limit // PART))

    def oldest(self, n: int) -> Array:
        """Entries of those of the oldest ``n`` episodes that ended, in order of their ends."""
        index = self._source.index
        entry = np.arange(index.first, min(index.n, index.first + n))
        ended: Array = entry[(index.flags.host[entry] & OPEN) == 0]
        return ended

    def _drop(self, cause: str, entry: Array) -> None:
        """Evict episodes; of those that are open, what there is."""
        index = self._source.index
        handles = index.stream.host[entry].astype(np.int64), index.episode.host[entry].copy()
        is_open = (index.flags.host[entry] & OPEN) != 0
        floor = np.where(is_open, index.t_base.host[entry] + index.lengths_of(entry), GONE)
        self._evict(cause, *handles, floor)

    def drop_episodes(self, entry: Array) -> int:
        """Evict episodes; of those that are open, what there is. Returns how many steps went."""
        before = self.n_evicted
        self._drop("removed", entry)
        return self.n_evicted - before

    def drop_where(self, chosen: Array) -> int:
        """Evict the steps that are chosen, in order of the index, and those before them in their episodes."""
        index = self._source.index
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
            self._evict("removed", stream, episode, np.where(is_over, GONE, floor))
        return self.n_evicted - before

    def _turn_due(self, now: float) -> None:
        """Where age counts, what has arrived together is not held back for others that may come much later."""
        is_aged = self.options.age_s is not None and self._page_time < now - self.options.age_s / _AGES
        if is_aged and self._n_paged:
            self._turn_pages(self._page_time, partial=True)

    def _drop_old(self, now: float) -> None:
        if self.options.age_s is not None:
            self._turn_due(now)
            self._drop_before(now - self.options.age_s)

    def _drop_before(self, time: float) -> None:
        for number, queue in self._queues.items():
            while len(queue):
                items = queue.items(_AT_ONCE)
                old = int(np.searchsorted(np.maximum.accumulate(items[4]), time))  # clocks of ranks may differ
                if not old:
                    break
                episode, t, n = (items[i, :old].astype(np.int64) for i in (1, 2, 3))
                self._raise_floors("age", number, episode, t + n)
                queue.drop(old)

    # ---- state

    def state_dict(self) -> dict[str, Any]:
        """What has arrived and is still here, in order."""
        page = np.concatenate([np.empty((2, 0), np.int64), *self._page], 1)
        return {
            "streams": list(self._source.index.numbers),
            "queues": {str(number): queue.items().copy() for number, queue in self._queues.items()},
            "page": page,
            "page_arrived": np.array([self._arrived(*pair) for pair in page.T.tolist()], np.int64),
            "is_limited": self.options.is_limited,
            "page_time": self._page_time,
            "order": self._order,
            "evicted": {cause: dict(counts) for cause, counts in self.evicted.items()},
            "least": [self._least_steps, self._least_episodes],
        }

    def _arrived(self, stream: int, episode: int) -> int:
        known = self._n_arrived.get(stream)
        return int(known.get(np.array([episode]))[0]) if known is not None else 0

    def load_state_dict(self, state: Mapping[str, Any], seen: Mapping[str, int] | None = None) -> None:
        """Go on as another session would have gone on; the stream that it wrote is one of the others here.

        ``seen`` says how many spans of each stream the state knows; by default all that there are.
        """
        number = np.array([self._source.index.numbers.get(name, -1) for name in state["streams"]], np.int64)
        self.evicted |= {cause: dict(counts) for cause, counts in state["evicted"].items()}
        self._least_steps, self._least_episodes = map(int, state.get("least", (0, 0)))
        if not self.options.is_limited:
            return
        if not state["is_limited"]:
            return  # what arrived was not kept: it goes in the order of its rows
        there = {record.id: record.spans for record in self._source.snapshot.streams}
        self._seen = there if seen is None else dict(seen)
        self._order, self._queues = int(state["order"]), {}
        for name, items in state["queues"].items():
            self._queues[int(number[int(name)])] = queue = _Queue()
            queue.push(np.asarray(items))
        self._page_time = float(state["page_time"])
        stream, episode = np.asarray(state["page"])
        stream = number[stream]
        self._page, self._n_paged = [np.stack([stream, episode])], len(stream)
        for n in np.unique(stream).tolist():
            self._n_arrived[n] = EpisodeNumberMap(default=0)
            self._n_arrived[n].put(episode[stream == n], np.asarray(state["page_arrived"])[stream == n])
        self._unchecked = dict.fromkeys(self._queues, GONE)  # a limit may be a new one


def _first_t(arrived: EpisodeNumberMap, episode: Array, count: Array) -> Array:
    """The t at which rows of episodes begin, in order of arrival; takes note of them."""
    order = np.argsort(episode, kind="stable")
    ids, counts = episode[order], count[order]
    first = np.flatnonzero(np.append(True, np.diff(ids) != 0))
    before = np.cumsum(counts) - counts
    within = before - np.repeat(before[first], np.diff(np.append(first, len(ids))))
    t = np.empty(len(order), np.int64)
    t[order] = arrived.get(ids) + within
    arrived.put(ids[first], arrived.get(ids[first]) + np.add.reduceat(counts, first))
    return t


def unshown_rows(source: BatchAssembler) -> dict[str, int]:
    """By stream that holds rows: rows below are not shown any more, and never will be again; looks at all spans."""
    found = source.index.first_shown_rows()
    n_rows = {record.id: record.rows for record in source.snapshot.streams}
    if (
        source.index.followed_stream in n_rows
    ):  # rows that are committed, but not yet known to be: their steps are live
        n_rows[source.index.followed_stream] = source.n_placed
    return {name: min(row, n_rows[name]) for name, row in found.items() if name in n_rows}
