"""Series are shortened without losing a peak."""

from __future__ import annotations

import uuid

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import trajstore
from trajstore import DataError, Field, Schema
from trajstore.inspection import downsampling
from trajstore.inspection.downsampling import downsample, episode_series


@given(st.lists(st.one_of(st.floats(-5, 5), st.just(float("nan"))), max_size=300), st.integers(4, 40))
@settings(max_examples=100, deadline=None)
def test_extremes_and_ends_are_kept(values: list[float], n_points: int) -> None:
    array = np.array(values, np.float64)
    series = downsample(array, n_points)
    assert len(series.steps) <= max(n_points, 0)
    assert (np.diff(series.steps) > 0).all()
    np.testing.assert_array_equal(series.values, array[series.steps])
    if values:
        assert (series.steps[0], series.steps[-1]) == (0, len(values) - 1)
    if not np.isnan(array).all():
        assert np.nanmin(series.values) == np.nanmin(array)
        assert np.nanmax(series.values) == np.nanmax(array)


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int64", "float16", "float32"])
def test_every_stretch_keeps_its_lowest_and_its_highest_value(dtype: str) -> None:
    values = np.random.default_rng(0).integers(0, 2, 1000).astype(dtype)
    values[317] = 1
    series = downsample(values, 12)
    for start in range(0, 1000, 200):
        inside = series.values[(series.steps >= start) & (series.steps < start + 200)]
        assert {*inside.tolist()} == {0, 1}
    assert series.values.dtype == values.dtype


def test_infinities_are_extremes() -> None:
    values = np.zeros(100)
    values[[30, 60]] = np.inf, -np.inf
    assert {30, 60} <= {*downsample(values, 6).steps.tolist()}


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(DataError, match="one axis"):
        downsample(np.zeros((3, 2)), 10)
    with pytest.raises(DataError, match="at least 4"):
        downsample(np.zeros(3), 3)


@pytest.fixture(scope="module")
def store() -> trajstore.Store:
    schema = Schema({"obs": {"state": Field("float32", (2, 3), final=True)}, "reward": Field("bfloat16")})
    store = trajstore.create(f"memory://series-{uuid.uuid4().hex}", schema)
    states = np.random.default_rng(0).normal(size=(501, 2, 3)).astype(np.float32)
    with store.writer(commit_seconds=None) as writer:
        writer.append_episode(
            {"obs": {"state": states}, "reward": torch.ones(500, dtype=torch.bfloat16)}, terminated=True
        )
        writer.commit()
        writer.put_column("advantage", store.refresh().names[0], np.arange(501, dtype=np.float32))
        writer.commit()
    store.refresh()
    return store


@pytest.mark.parametrize("block_bytes", [8 << 20, 1000])
def test_an_episode_is_shortened_block_by_block(
    store: trajstore.Store, monkeypatch: pytest.MonkeyPatch, block_bytes: int
) -> None:
    monkeypatch.setattr(downsampling, "_BLOCK_BYTES", block_bytes)
    found = episode_series(store.snapshot, 0, "obs/state", n_points=50, components=(4, 0))
    assert (found.n_steps, found.components, found.n_components) == (501, (4, 0), 6)
    states = store.read_episode(0)["obs"]["state"].reshape(501, 6)
    for component, series in zip((4, 0), found.series, strict=True):
        whole = states[:, component]
        assert len(series.steps) <= 50
        np.testing.assert_array_equal(series.values, whole[series.steps])
        assert (series.steps[0], series.steps[-1]) == (0, 500)
        assert (series.values.min(), series.values.max()) == (whole.min(), whole.max())


def test_derived_columns_and_bfloat16_have_series(store: trajstore.Store) -> None:
    key = store.episodes.key(0)
    advantage = episode_series(store.snapshot, key, "advantage", n_points=10)
    assert (advantage.n_steps, advantage.series[0].values[-1]) == (500, 499)
    reward = episode_series(store.snapshot, key, "reward", n_points=10)
    assert (reward.n_steps, reward.series[0].values.tolist()) == (500, [1.0] * len(reward.series[0].steps))


def test_only_the_first_components_are_read_by_default(store: trajstore.Store) -> None:
    assert episode_series(store.snapshot, 0, "obs/state", max_components=2).components == (0, 1)


def test_what_does_not_exist_is_named(store: trajstore.Store) -> None:
    with pytest.raises(DataError, match="no field or derived column 'obs'"):
        episode_series(store.snapshot, 0, "obs")
    with pytest.raises(DataError, match="no component 6; it has 6"):
        episode_series(store.snapshot, 0, "obs/state", components=(6,))
