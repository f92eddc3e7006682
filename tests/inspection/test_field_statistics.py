"""Statistics of fields: exact if all rows are read, from evenly spread rows otherwise."""

from __future__ import annotations

import uuid

import numpy as np
import pytest
import torch

import trajstore
from trajstore import CorruptionError, Field, Schema
from trajstore.inspection.field_statistics import field_statistics

SCHEMA = Schema(
    {
        "obs": {"state": Field("float32", (3,), final=True), "frame": Field("uint8", (4, 4))},
        "action": Field("int64"),
        "reward": Field("bfloat16"),
        "mask": Field("bool"),
    }
)


def episode(n: int, rng: np.random.Generator) -> dict[str, object]:
    state = rng.normal(size=(n + 1, 3)).astype(np.float32)
    state[:, 1] = 7
    return {
        "obs": {"state": state, "frame": np.full((n, 4, 4), 255, np.uint8)},
        "action": rng.integers(0, 5, n),
        "reward": torch.ones(n, dtype=torch.bfloat16),
        "mask": np.arange(n) == 0,
    }


@pytest.fixture(scope="module")
def store() -> trajstore.Store:
    store = trajstore.create(f"memory://statistics-{uuid.uuid4().hex}", SCHEMA)
    rng = np.random.default_rng(0)
    with store.writer(commit_seconds=None) as writer:
        for n in (5, 1, 40, 3):
            writer.append_episode(episode(n, rng), terminated=True)
            writer.commit()
    store.refresh()
    return store


def test_all_rows_are_summarised_if_they_fit(store: trajstore.Store) -> None:
    found = field_statistics(store.snapshot)
    assert list(found) == list(SCHEMA)
    state = np.concatenate([store.read_episode(i)["obs"]["state"] for i in range(4)])
    s = found["obs/state"]
    assert (s.n_rows, s.n_total_rows, s.n_values, s.n_components, s.n_constant) == (53, 53, 159, 3, 1)
    assert s.is_complete
    assert (s.minimum, s.maximum) == (float(state.min()), float(state.max()))
    np.testing.assert_allclose([s.mean, s.std], [state.mean(dtype=float), state.std(dtype=float)])
    assert (found["reward"].n_rows, found["reward"].mean, found["reward"].is_constant) == (49, 1.0, True)
    assert (found["obs/frame"].is_constant, found["obs/frame"].n_constant) == (True, 16)
    assert (found["mask"].n_zero, found["mask"].n_values) == (45, 49)
    assert not found["action"].is_constant


def test_filler_of_final_rows_is_no_value(store: trajstore.Store) -> None:
    assert field_statistics(store.snapshot, ["obs/frame"])["obs/frame"].minimum == 255


def test_few_bytes_read_rows_from_everywhere(store: trajstore.Store) -> None:
    s = field_statistics(store.snapshot, ["action"], max_bytes=80)["action"]
    assert (s.n_rows, s.n_total_rows, s.is_complete) == (10, 49, False)
    assert field_statistics(store.snapshot, ["action"], max_bytes=80)["action"] == s


def test_nans_and_infinities_are_counted() -> None:
    store = trajstore.create(f"memory://statistics-{uuid.uuid4().hex}")
    values = np.array([np.nan, np.inf, -np.inf, 2, 4], np.float32)
    with store.writer() as writer:
        writer.append_episode({"x": values, "y": np.full(5, np.nan, np.float32)}, terminated=True)
    found = field_statistics(store.refresh())
    x, y = found["x"], found["y"]
    assert (x.n_nan, x.n_infinite, x.minimum, x.maximum, x.mean, x.std) == (1, 2, 2.0, 4.0, 3.0, 1.0)
    assert (y.n_nan, y.minimum, y.mean, y.is_constant, y.n_constant) == (5, None, None, False, 1)


def test_chosen_episodes_are_summarised_alone(store: trajstore.Store) -> None:
    assert field_statistics(store.snapshot, ["action"], episodes=[2])["action"].n_total_rows == 40
    assert field_statistics(store.snapshot, ["obs"], episodes=[])["obs/state"].n_rows == 0


def test_evicted_and_aborted_episodes_are_left_out() -> None:
    store = trajstore.create(f"memory://statistics-{uuid.uuid4().hex}", Schema({"x": Field("int32", chunk_rows=2)}))
    with store.writer(commit_seconds=None) as writer:
        keys = [writer.append_episode({"x": np.full(4, i, np.int32)}, terminated=True) for i in range(6)]
        writer.commit()
        writer.set_view(first_row=8, discarded={keys[0].stream: [3]})
    x = field_statistics(store.refresh())["x"]
    assert (x.n_rows, x.minimum, x.maximum, x.mean) == (12, 2.0, 5.0, (2 + 4 + 5) / 3)


def test_a_store_without_fields_has_no_statistics() -> None:
    snapshot = trajstore.create(f"memory://statistics-{uuid.uuid4().hex}").snapshot
    assert field_statistics(snapshot) == {}
    with pytest.raises(KeyError, match="no fields yet"):
        field_statistics(snapshot, ["x"])


def test_a_missing_chunk_is_corruption(store: trajstore.Store) -> None:
    copy = trajstore.create(f"memory://statistics-{uuid.uuid4().hex}", Schema({"x": Field("int32", chunk_rows=2)}))
    with copy.writer() as writer:
        writer.append_episode({"x": np.arange(8, dtype=np.int32)}, terminated=True)
    snapshot = copy.refresh()
    snapshot.storage.delete([f"streams/{snapshot.names[0]}/steps/x/c.1"])
    with pytest.raises(CorruptionError):
        field_statistics(snapshot)
