"""The tables of facts that tensor operations read follow the index, and compute only what is new."""

from __future__ import annotations

import uuid
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trajstore import Field, ReplayBuffer, Schema, Windows
from trajstore.sampling.index import episode_facts
from trajstore.sampling.index.episode_facts import EpisodeFacts
from trajstore.sampling.index.episode_index import EpisodeIndex

SCHEMA = Schema({"x": Field("int64", final=True, chunk_rows=4), "action": Field("int64", chunk_rows=8)})
OPTIONS: dict[str, Any] = {"commit_seconds": None, "buffer_bytes": "64KiB", "cache_bytes": "8MiB"}
ENDS = ({}, {}, {"terminated": True}, {"truncated": True})


def new_buffer(capacity: int | None) -> ReplayBuffer:
    url = f"memory://facts-{uuid.uuid4().hex}"
    return ReplayBuffer(url, schema=SCHEMA, capacity=capacity, compiled=False, **OPTIONS)


def index_of(buffer: ReplayBuffer) -> EpisodeIndex:
    with buffer.reader.assembler.lock:
        buffer.reader.assembler.publish()
        return buffer.reader.assembler.index


def assert_up_to_date(index: EpisodeIndex) -> None:
    """Compare the tables with new ones; rows of entries and spans that were evicted do not matter."""
    new, changes = EpisodeFacts(torch.device("cpu")), index.changes
    assert torch.equal(index.facts()[index.first :], new.of_entries(index, changes, 0)[index.first :])
    if index.n:
        entry = torch.arange(index.first, index.n)
        position = torch.stack([torch.zeros_like(entry), torch.from_numpy(index.lengths(index.first)) - 1], 1)
        found, span = index.rows(entry, position), _span_of(index, entry, position)
        row = index.span_row.host[span] + index.logical.host[entry.numpy()][:, None] + position.numpy()
        assert np.array_equal(found.row.numpy(), row - index.span_logical.host[span])
        source = np.broadcast_to(found.source.numpy(), span.shape)
        assert np.array_equal(source, index.span_source.host[span])


def _span_of(index: EpisodeIndex, entry: torch.Tensor, position: torch.Tensor) -> np.ndarray[Any, Any]:
    logical = index.logical.host[entry.numpy()][:, None] + position.numpy()
    return np.searchsorted(index.span_logical.host, logical, side="right") - 1


@given(
    st.sampled_from([None, 10, 25]),
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 6), st.sampled_from(ENDS), st.booleans()), max_size=25),
)
@settings(max_examples=30)
def test_tables_follow_the_index(capacity: int | None, changes: list[Any]) -> None:
    buffer = new_buffer(capacity)
    try:
        for env, n, end, is_flushed in changes:
            for t in range(n):
                buffer.append({"x": t, "action": t}, env=env, **(end if t == n - 1 else {}))
            if is_flushed:
                buffer.flush()
            assert_up_to_date(index_of(buffer))
    finally:
        buffer.close()


def test_only_new_and_open_episodes_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = new_buffer(None)
    for _ in range(200):
        buffer.add_episode({"x": np.arange(4), "action": np.arange(3)}, terminated=True)
    buffer.flush()
    buffer.sample(4, Windows())
    computed: list[int] = []
    original = episode_facts._entry_facts

    def recorded(index: Any, start: int, stop: int) -> Any:
        computed.append(stop - start)
        return original(index, start, stop)

    monkeypatch.setattr(episode_facts, "_entry_facts", recorded)
    for t in range(5):
        buffer.append({"x": t, "action": t})
        buffer.sample(4, Windows())
    assert len(computed) == 5
    assert max(computed) == 1
    buffer.close()
