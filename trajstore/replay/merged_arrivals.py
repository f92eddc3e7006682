"""How the arrival queues that several ranks saved become those of one rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from trajstore.replay.session_state import RankShare
from trajstore.sampling.index.episode_lookup import EpisodeFinder
from trajstore.sampling.reader_state import stream_numbers
from trajstore.schema import Array

# Rows of an array of arrivals: each column is one arrival of some rows of an episode.
_TIME, _ORDER, _STREAM, _EPISODE, _T, _ROWS, _HOLDER = range(7)


class ArrivalsMerge:
    """Collects the arrivals of chosen episodes from the states of several `LimitEvictor` objects.

    Args:
        streams: Ids of streams; ``stream`` names them by position.
        stream, episode: The chosen episodes.
    """

    def __init__(self, streams: Sequence[str], stream: Array, episode: Array) -> None:
        self._streams = list(streams)
        self._stream, self._episode = stream, episode
        self._arrivals: list[Array] = [np.empty((7, 0))]
        self._others: list[dict[str, Any]] = []  # the small rest of each state

    def add(self, state: Mapping[str, Any], held: Array, holder: int) -> None:
        """Add the arrivals of those chosen episodes (``held``, by position) that an old rank had."""
        self._others.append({name: state[name] for name in ("is_limited", "page_time", "evicted")})
        arrivals = np.concatenate([np.empty((6, 0)), *self._queued(state), *self._waiting(state)], 1)
        finder = EpisodeFinder(self._stream[held], self._episode[held])
        is_held = finder.find(arrivals[_STREAM].astype(np.int64), arrivals[_EPISODE].astype(np.int64)) >= 0
        kept = arrivals[:, is_held]
        self._arrivals.append(np.concatenate([kept, np.full((1, kept.shape[1]), float(holder))]))

    def _queued(self, state: Mapping[str, Any]) -> list[Array]:
        """Arrivals in the queues, which hold order, episode, first t, rows and time."""
        numbers = stream_numbers(self._streams, state["streams"])
        blocks = []
        for name, items in state["queues"].items():
            items = np.asarray(items, np.float64)
            stream = np.full(items.shape[1], numbers[int(name)])
            blocks.append(np.stack([items[4], items[0], stream, *items[1:4]]))
        return blocks

    def _waiting(self, state: Mapping[str, Any]) -> list[Array]:
        """Arrivals in the last block, which is not full and therefore not in the queues."""
        numbers = stream_numbers(self._streams, state["streams"])
        rows = np.asarray(state["page"], np.int64)
        if not rows.shape[1]:
            return []
        pairs, first, count = np.unique(rows, axis=1, return_index=True, return_counts=True)
        t = np.asarray(state["page_arrived"])[first]
        order = float(state["order"]) + first
        time = np.full(len(first), float(state["page_time"]))
        return [np.stack([time, order, numbers[pairs[0]], pairs[1], t, count]).astype(np.float64)]

    def result(self, share: RankShare, n_steps: int, n_episodes: int) -> dict[str, Any]:
        """The state of the `LimitEvictor` of a rank that receives the chosen episodes.

        Args:
            share: Share of the counts over all ranks.
            n_steps: Steps that the rank receives; limits never evict below this number.
            n_episodes: Episodes that the rank receives; the same holds for them.
        """
        arrived = np.concatenate(self._arrivals, 1)
        arrived = arrived[:, np.lexsort((arrived[_ORDER], arrived[_HOLDER], arrived[_TIME]))]
        stream = arrived[_STREAM].astype(np.int64)
        order = np.arange(arrived.shape[1])
        items = np.stack([order, *arrived[_EPISODE : _ROWS + 1], arrived[_TIME]])
        causes = self._others[0]["evicted"]
        evicted = {cause: share.of_sums([other["evicted"][cause] for other in self._others]) for cause in causes}
        return {
            "streams": self._streams,
            "queues": {str(n): items[:, stream == n] for n in np.unique(stream).tolist()},
            "page": np.empty((2, 0), np.int64),
            "page_arrived": np.empty(0, np.int64),
            "is_limited": all(other["is_limited"] for other in self._others),
            "page_time": max(float(other["page_time"]) for other in self._others),
            "order": len(order),
            "evicted": evicted,
            "least": [n_steps, n_episodes],
        }
