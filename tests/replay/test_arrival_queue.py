"""Arrivals are counted and ordered as plain Python does it."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from trajstore.replay.arrival_queue import ArrivalBlock, ArrivalQueue, count_in_blocks, first_t
from trajstore.replay.retention import Retention
from trajstore.sampling.index.episode_numbers import EpisodeNumberMap


@pytest.mark.parametrize("scale", [1, 1 << 50])
@pytest.mark.parametrize("n_streams", [1, 3])
@pytest.mark.parametrize("n", [1, 7, 64])
def test_rows_are_counted_by_block_stream_and_episode(scale: int, n_streams: int, n: int) -> None:
    rng = np.random.default_rng(n)
    stream, episode = rng.integers(0, n_streams, n) * 1000, rng.integers(0, 9, n) * scale
    pairs = zip(stream.tolist(), episode.tolist(), strict=True)
    expected = Counter((i // 10, *pair) for i, pair in enumerate(pairs))
    found = count_in_blocks(stream, episode, 10)
    assert list(zip(*(a.tolist() for a in found), strict=True)) == [
        (s, e, count) for (_, s, e), count in sorted(expected.items())
    ]


@pytest.mark.parametrize("episodes", [[3, 5, 9], [3, 5, 3, 9, 5, 3]])
def test_rows_of_an_episode_follow_those_that_arrived_before(episodes: list[int]) -> None:
    arrived, expected = EpisodeNumberMap(default=0), Counter({5: 4})
    arrived.put(np.array([5]), np.array([4]))
    count, t = list(range(1, len(episodes) + 1)), []
    for episode, n in zip(episodes, count, strict=True):
        t.append(expected[episode])
        expected[episode] += n
    assert first_t(arrived, np.array(episodes), np.array(count)).tolist() == t
    assert arrived.get(np.array([3, 5, 9])).tolist() == [expected[e] for e in (3, 5, 9)]


def test_a_queue_of_constant_length_takes_no_more_memory_however_many_arrivals_pass() -> None:
    queue, sizes = ArrivalQueue(), set()
    for i in range(2000):
        queue.push(np.arange(10) + 10 * i, np.full((4, 10), float(i)))
        if i >= 20:
            queue.drop(10)
            memory = queue.items().base
            assert memory is not None
            sizes.add(memory.nbytes)
        assert (queue.items()[0] == np.arange(10 * (i + 1) - len(queue), 10 * (i + 1))).all()
        assert (queue.items()[1:] == queue.items()[0] // 10).all()
    assert max(sizes) <= 5 * 8 * 4 * 210


def test_a_block_gives_its_oldest_rows() -> None:
    block = ArrivalBlock()
    block.add(1, np.arange(100))
    block.add(np.array([2, 1]), np.array([7, 8]))
    assert block.take(99).tolist() == [[1] * 99, list(range(99))]
    assert block.rows().tolist() == [[1, 2, 1], [99, 7, 8]]
    assert (block.episodes(1).tolist(), len(block)) == ([99, 8], 3)


def test_any_limit_limits() -> None:
    assert not Retention().is_limited
    for limits in ({"steps": 1}, {"episodes": 1}, {"bytes": 1}, {"age_s": 1}, {"per_stream": Retention(steps=1)}):
        assert Retention(**limits).is_limited
