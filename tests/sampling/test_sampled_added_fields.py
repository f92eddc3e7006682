"""Windows over episodes of which some lack a field that was added later."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import trajstore
from trajstore import Field, Reader, Windows

OLD = {"obs": Field("int64", final=True, chunk_rows=6), "reward": Field("float32")}
ADDED = {
    "frame": Field("uint8", (4, 2), fill=9, final=True, chunk_rows=6),
    "score": Field("bfloat16", fill=0.5, chunk_rows=5),
    "seen": Field("bool", fill=True),
}


def episode(n: int, first: int, with_added: bool) -> dict[str, Any]:
    t = np.arange(first, first + n + 1)
    values: dict[str, Any] = {"obs": t, "reward": t[:-1].astype(np.float32)}
    if with_added:
        values["frame"] = np.repeat(t.astype(np.uint8), 8).reshape(-1, 4, 2)
        values["score"] = torch.full((n,), 2.0, dtype=torch.bfloat16)
        values["seen"] = np.zeros(n, bool)
    return values


@pytest.fixture
def store(tmp_path: Path) -> trajstore.Store:
    """Episodes 0, 2 and 4 lack the added fields. Observations are 1000 times the episode plus t."""
    url = tmp_path / "s"
    for number in range(5):
        fields = {**OLD, **ADDED} if number % 2 else OLD
        made = trajstore.create(url, fields, exist_ok=True)
        values = episode(23 + number, 1000 * number, bool(number % 2))
        with made.writer() as writer:
            writer.append_episode(values, truncated=True)
    return trajstore.open(url)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("cache_bytes", [1 << 22, 700])
@pytest.mark.parametrize("host_cache_bytes", [0, 1 << 20])
def test_windows_hold_values_or_the_fill(
    store: trajstore.Store, compiled: bool, cache_bytes: int, host_cache_bytes: int
) -> None:
    reader = Reader(store, seed=3, cache_bytes=cache_bytes, host_cache_bytes=host_cache_bytes, compiled=compiled)
    for _ in range(3):
        batch = reader.sample(40, Windows(3, next_fields=("obs", "frame")))
        obs, frame, after = batch["obs"], batch["frame"], batch["next"]
        has_it = obs // 1000 % 2 == 1
        assert has_it.any()
        assert not has_it.all()
        assert (frame[~has_it] == 9).all()
        assert (after["frame"][~has_it] == 9).all()
        assert (frame[has_it][:, 3, 1] == obs[has_it] % 256).all()
        assert (after["frame"][has_it][:, 0, 0] == after["obs"][has_it] % 256).all()
        assert (batch["score"][~has_it] == 0.5).all()
        assert (batch["score"][has_it] == 2).all()
        assert batch["seen"][~has_it].all()
        assert not batch["seen"][has_it].any()


def test_windows_are_the_same_as_without_the_field(store: trajstore.Store, tmp_path: Path) -> None:
    old = trajstore.create(tmp_path / "s", OLD, exist_ok=True)
    with_field, without = (Reader(s, seed=5).sample(32, Windows(2)) for s in (store, old))
    assert (with_field["obs"] == without["obs"]).all()
    assert "frame" not in without


def test_a_field_that_streams_lack_costs_no_reads(store: trajstore.Store) -> None:
    old = [record.id for record in store.streams if "frame" not in record.schema.fields]
    reader = Reader(store.snapshot.only(lambda record: record.id in old), seed=1)
    batch = reader.sample(16, Windows(2, fields=("frame",)))
    assert (batch["frame"] == 9).all()
    assert reader.stats()["bytes_read"] == 0
