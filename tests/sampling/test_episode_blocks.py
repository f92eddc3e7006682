"""Blocks of whole episodes: returns and advantages of a whole buffer, written back, against a plain reference."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import trajstore
from trajstore import DataError, Field, NotReadyError, Reader, ReplayBuffer, Schema, Windows
from trajstore.sampling.returns import advantages, returns_to_go

GAMMA, LAMBDA = 0.99, 0.95  # as in docs/replay.md


def new_buffer(**options: Any) -> ReplayBuffer:
    defaults: dict[str, Any] = {"cache_bytes": "64MB", "buffer_bytes": "16MB", "commit_seconds": None}
    return ReplayBuffer(f"memory://blocks-{uuid.uuid4().hex}", **defaults | options)


def step(observation: float, reward: float) -> dict[str, Any]:
    return {"observation": np.full(2, observation, np.float32), "reward": np.float32(reward)}


@dataclass
class Played:
    """One episode as the reference knows it; the value of an observation is its mean."""

    observations: list[float]  # with the final one, if it was recorded
    rewards: list[float]
    end: str = "open"
    expected: dict[str, list[float]] = field(default_factory=dict)

    @property
    def has_final(self) -> bool:
        return len(self.observations) > len(self.rewards)

    def returns(self) -> list[float]:
        found, total = [], 0.0
        for reward in reversed(self.rewards):
            total = reward + GAMMA * total
            found.append(total)
        return found[::-1]

    def advantages(self) -> list[float]:
        found, later = [], 0.0
        for t in reversed(range(len(self.rewards))):
            is_last = t == len(self.rewards) - 1
            if is_last and self.end == "terminated":
                error = self.rewards[t] - self.observations[t]
            elif is_last and not self.has_final:
                found.append(0.0)  # nothing is known of what follows; the step before bootstraps from its value
                continue
            else:
                error = self.rewards[t] + GAMMA * self.observations[t + 1] - self.observations[t]
            later = error + GAMMA * LAMBDA * later
            found.append(later)
        return found[::-1]


def play(buffer: ReplayBuffer, rng: np.random.Generator, n: int, end: str, has_final: bool, env: int) -> Played:
    """Append an episode of n steps with random observations and rewards."""
    observations = [float(np.float32(x)) for x in rng.normal(size=n + has_final)]
    played = Played(observations, [float(np.float32(x)) for x in rng.normal(size=n)], end)
    for observation, reward in zip(observations, played.rewards, strict=False):
        buffer.append(step(observation, reward), env=env)
    if end != "open":
        final = {"final": {"observation": step(observations[-1], 0)["observation"]}} if has_final else {}
        buffer.end_episode(env, **({} if end == "cut" else {end: True}), **final)
    return played


ENDS = [
    ("terminated", True),
    ("terminated", False),
    ("truncated", True),
    ("truncated", False),
    ("cut", True),
    ("cut", False),
    ("open", False),
]


def played_buffer(
    rng: np.random.Generator, lengths: list[int], **options: Any
) -> tuple[ReplayBuffer, list[Played]]:
    buffer = new_buffer(**options)
    found = []
    for i, n in enumerate(lengths):
        end, has_final = ENDS[i % len(ENDS)]
        found.append(play(buffer, rng, n, end, has_final, i))
        if i % 3 == 2:
            buffer.flush()
    return buffer, found


def recipe() -> str:
    """The code of docs/replay.md that computes returns and advantages."""
    text = (Path(__file__).parents[2] / "docs" / "replay.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (found,) = [block for block in blocks if "read_episodes_in_order()" in block]
    return str(found)


def by_episode(buffer: ReplayBuffer, name: str) -> dict[int, list[float]]:
    found: dict[int, list[float]] = {}
    for block in buffer.read_episodes_in_order():
        for (_, episode, t), value in zip(block["index"].tolist(), block[name].tolist(), strict=True):
            assert len(found.setdefault(episode, [])) == t
            found[episode].append(value)
    return found


def check_recipe(buffer: ReplayBuffer, played: list[Played]) -> None:
    exec(recipe(), {"buffer": buffer, "Field": Field, "torch": torch, "np": np})
    for name in ("return_to_go", "advantage"):
        found = by_episode(buffer, name)
        assert sorted(found) == list(range(len(played)))
        for number, episode in enumerate(played):
            expected = episode.returns() if name == "return_to_go" else episode.advantages()
            np.testing.assert_allclose(found[number], expected, rtol=1e-4, atol=1e-4)


def test_the_recipe_of_the_docs_is_right_for_every_kind_of_end() -> None:
    rng = np.random.default_rng(0)
    buffer, played = played_buffer(rng, [*rng.integers(1, 40, 33).tolist(), 1, 1, 1, 1, 1, 1, 1])
    with buffer:
        check_recipe(buffer, played)


def test_the_recipe_of_the_docs_is_right_for_episodes_of_5000_steps() -> None:
    with new_buffer() as buffer:
        rng = np.random.default_rng(1)
        ends = [("terminated", False), ("truncated", True), ("cut", False)]
        played = [play(buffer, rng, 5_000, *end, env=0) for end in ends]
        check_recipe(buffer, played)


def test_sums_do_not_run_from_one_open_episode_into_another() -> None:
    with new_buffer() as buffer:
        for t in range(3):
            rewards = np.array([1, 10], np.float32)
            buffer.append({"observation": np.full((2, 2), t, np.float32), "reward": rewards}, envs=range(2))
        (block,) = buffer.read_episodes_in_order()
        returns = returns_to_go(block["reward"], block["segment_end"], gamma=1.0)
        assert returns.tolist() == [3.0, 2.0, 1.0, 30.0, 20.0, 10.0]
        assert block["segment_end"].tolist() == [False, False, True] * 2
        assert not block["is_last"].any()
        assert block["has_next"].tolist() == [True, True, False] * 2


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("options", [{}, {"compiled": False}])
def test_blocks_hold_whole_episodes_in_the_order_of_all_steps(prefetch: int, options: dict[str, Any]) -> None:
    lengths = [3, 9, 1, 1, 25, 4, 4, 2, 11]
    buffer, played = played_buffer(np.random.default_rng(2), lengths, **options)
    with buffer:
        expected = torch.cat([block["index"] for block in buffer.read_all_in_order(block_steps=7)])
        for block_steps in (1, 4, 10, 1000):
            blocks = list(buffer.read_episodes_in_order(block_steps=block_steps, prefetch=prefetch))
            assert torch.equal(torch.cat([block["index"] for block in blocks]), expected)
            for block in blocks:
                check_block(block, played, block_steps)
            assert len(buffer.read_episodes_in_order(block_steps=block_steps)) == len(blocks)


def check_block(block: dict[str, Any], played: list[Played], block_steps: int) -> None:
    episodes, counts = np.unique(block["index"][:, 1].numpy(), return_counts=True)
    assert len(block["index"]) <= block_steps or len(episodes) == 1
    assert counts.tolist() == [len(played[i].rewards) for i in episodes]
    for i, (_, number, t) in enumerate(block["index"].tolist()):
        episode = played[number]
        is_end = t == len(episode.rewards) - 1
        is_known = not is_end or episode.has_final or episode.end == "terminated"
        assert (bool(block["segment_end"][i]), bool(block["has_next"][i])) == (is_end, is_known)
        after = min(t + 1, len(episode.observations) - 1)
        assert float(block["next"]["observation"][i, 0]) == episode.observations[after]
        assert bool(block["truncated"][i]) == (is_end and episode.end == "truncated")


def test_values_of_blocks_can_be_written_in_order() -> None:
    buffer, _ = played_buffer(np.random.default_rng(3), [5, 3, 8])
    with buffer:
        buffer.add_column("double", Field("float32"))
        buffer.write_all("double", (2 * b["reward"] for b in buffer.read_episodes_in_order(block_steps=6)))
        for block in buffer.read_episodes_in_order():
            assert torch.equal(block["double"], 2 * block["reward"])


def test_an_episode_that_takes_too_many_bytes_is_refused_before_anything_is_read() -> None:
    buffer, _ = played_buffer(np.random.default_rng(4), [5, 300, 8])
    with buffer:
        with pytest.raises(
            DataError, match=r"episode 1 .* 300 steps, which take 6000 bytes.*fields=.*max_block_bytes"
        ):
            buffer.read_episodes_in_order(max_block_bytes=5_999)
        assert [len(b["reward"]) for b in buffer.read_episodes_in_order(max_block_bytes=6_000)] == [5, 300, 8]
        (block,) = buffer.read_episodes_in_order(max_block_bytes=5_999, fields=["reward"])
        assert len(block["reward"]) == 313
        assert "next" not in block
        assert block["has_next"].sum() == 313  # two terminated episodes, and a truncated one with a final row


def test_a_buffer_without_steps_has_no_blocks() -> None:
    schema = Schema({"observation": Field("float32", (2,)), "reward": Field("float32")})
    with new_buffer(schema=schema) as buffer, pytest.raises(NotReadyError):
        buffer.read_episodes_in_order()


def test_steps_that_come_or_go_while_blocks_are_read() -> None:
    buffer, _ = played_buffer(np.random.default_rng(5), [4, 4, 4, 4, 4, 4, 4])
    with buffer:
        blocks = buffer.read_episodes_in_order(block_steps=4)
        first = next(blocks)
        buffer.evict(n_episodes=3)
        buffer.append(step(0.5, 0.25), env=6)  # the open episode grows
        rest = list(blocks)
        found = torch.cat([first["index"], *(b["index"] for b in rest)])[:, 1:].tolist()
        assert found == [[e, t] for e in (0, 3, 4, 5, 6) for t in range(4)]
        assert blocks.stats()["n_skipped"] == 8
        assert rest[-1]["segment_end"].tolist() == [False, False, False, True]
        assert rest[-1]["has_next"].all()  # the step that came shows what the last one led to
        assert float(rest[-1]["next"]["observation"][-1, 0]) == 0.5


def test_headless_episodes_keep_their_ends() -> None:
    with new_buffer(capacity=10) as buffer:
        for t in range(14):
            buffer.append(step(t, 1.0), truncated=t == 13, final={"observation": step(14, 0)["observation"]})
        (block,) = buffer.read_episodes_in_order()
        assert block["segment_end"].tolist() == [False] * (len(block["reward"]) - 1) + [True]
        assert float(block["next"]["observation"][-1, 0]) == 14.0


def test_an_iterator_over_blocks_continues_from_its_state() -> None:
    buffer, _ = played_buffer(np.random.default_rng(6), [4, 9, 2, 5, 3])
    with buffer:
        blocks = buffer.read_episodes_in_order(block_steps=5)
        next(blocks)
        state = blocks.state_dict()
        expected = [b["index"].tolist() for b in blocks]
        again = buffer.read_episodes_in_order(block_steps=100)
        again.load_state_dict(state)
        assert [b["index"].tolist() for b in again] == expected


def test_rewards_that_arrive_with_the_next_observation_come_as_next_values() -> None:
    schema = Schema(
        {"observation": Field("float32", (2,), final=True), "reward": Field("float32", final=True)},
        reward_alignment="observation",
    )
    store = trajstore.create(f"memory://blocks-{uuid.uuid4().hex}", schema)
    with store.writer() as writer:
        data = {"observation": np.zeros((4, 2), np.float32), "reward": np.array([0, 1, 2, 3], np.float32)}
        writer.append_episode(data, truncated=True)
    store.refresh()
    (block,) = Reader(store).read_episodes_in_order()
    assert block["next"]["reward"].tolist() == [1.0, 2.0, 3.0]


def advantage_cases() -> Iterator[tuple[torch.Tensor, ...]]:
    rng = torch.Generator().manual_seed(0)
    for n in (1, 2, 5, 17):
        rewards, values, after = (torch.rand(n, generator=rng, dtype=torch.float64) for _ in range(3))
        is_last = torch.zeros(n, dtype=torch.bool)
        is_last[-1] = True
        yield rewards, values, after, is_last


def test_a_step_without_a_known_successor_has_no_advantage_and_lends_its_value() -> None:
    for rewards, values, after, is_last in advantage_cases():
        none = torch.zeros_like(is_last)
        found = advantages(rewards, values, after, none, is_last, gamma=0.9, lambda_=0.8, has_next=~is_last)
        assert found[-1] == 0
        if len(rewards) > 1:
            ends = is_last.roll(-1)[:-1]
            expected = advantages(rewards[:-1], values[:-1], after[:-1], none[:-1], ends, gamma=0.9, lambda_=0.8)
            assert torch.allclose(found[:-1], expected)


def test_a_mask_of_another_shape_is_refused() -> None:
    ones = torch.ones(3)
    with pytest.raises(DataError, match=r"has_next: expected torch\.bool of shape"):
        advantages(ones, ones, ones, ones > 2, ones > 2, gamma=1, lambda_=1, has_next=torch.ones(2) > 0)


def test_fields_named_like_the_marks_of_a_block_are_refused() -> None:
    with new_buffer() as buffer:
        buffer.append({"has_next": np.float32(1), "reward": np.float32(0)})
        with pytest.raises(DataError, match="field 'has_next': blocks hold something else"):
            buffer.read_episodes_in_order()
        (block,) = buffer.read_episodes_in_order(fields=["reward"])
        assert block["has_next"].tolist() == [False]
        buffer.sample(1, Windows())
