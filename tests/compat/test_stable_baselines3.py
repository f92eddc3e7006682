"""Batches for Stable-Baselines3."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import trajstore
from trajstore import DataError, Reader, Windows
from trajstore.compat.stable_baselines3 import replay_samples


@pytest.fixture
def reader() -> Reader:
    store = trajstore.create(f"memory://sb3-{np.random.default_rng().integers(1 << 60)}")
    with store.writer() as writer:
        for kind in ("terminated", "truncated"):
            data = {
                "observation": np.arange(6, dtype=np.float32)[:, None],
                "action": np.arange(5),
                "reward": np.ones(5, np.float32),
            }
            writer.append_episode(data, **{kind: True})
    store.refresh()
    return Reader(store)


def test_transitions_have_their_fields_and_only_termination_is_an_end(reader: Reader) -> None:
    batch = reader.sample(64, Windows.transitions())
    samples = replay_samples(batch)
    assert samples._fields == ("observations", "actions", "next_observations", "dones", "rewards", "discounts")
    assert samples.actions.shape == samples.dones.shape == samples.rewards.shape == (64, 1)
    assert torch.equal(samples.next_observations, samples.observations + 1)
    last, first_episode = samples.actions[:, 0] == 4, batch["index"][:, 1] == 0
    assert torch.equal(samples.dones[:, 0] > 0, last & first_episode)
    assert samples.discounts is None
    assert samples.observations.data_ptr() == batch["observation"].data_ptr()


def test_n_step_returns_come_with_their_discounts(reader: Reader) -> None:
    batch = reader.sample(64, Windows.transitions(n_step=3, gamma=0.5))
    samples = replay_samples(batch)
    assert torch.equal(samples.rewards[:, 0], batch["n_step"]["return"])
    assert samples.discounts is not None
    assert torch.equal(samples.discounts[:, 0], batch["n_step"]["discount"])


def test_other_batches_are_refused(reader: Reader) -> None:
    with pytest.raises(DataError, match="expected transitions"):
        replay_samples(reader.sample(4, Windows(length=2)))
    with pytest.raises(DataError, match="expected single transitions"):
        replay_samples(reader.sample(4, Windows(length=2, next_fields="final")))
    with pytest.raises(DataError, match="with 'obs'"):
        replay_samples(reader.sample(4, Windows.transitions()), observation="obs")
