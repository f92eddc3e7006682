"""What the cases read: stores whose every step has values that no other step has."""

from __future__ import annotations

import functools
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import trajstore
from tests.sampling.digests.digest import Batch
from trajstore import Field, Schema, Snapshot, Store, Writer

Values = dict[str, Any]
Runs = Iterator[tuple[str, list[Batch]]]  # ways to come to the same batches, and what came of each


@dataclass(frozen=True)
class Places:
    """Where cases keep their stores: one directory for those that many cases read, memory for the others."""

    root: Path

    def fresh(self) -> str:
        return f"memory://digests-{uuid.uuid4().hex}"

    @property
    def steps(self) -> Snapshot:
        return _steps(self.root)

    @property
    def goals(self) -> Snapshot:
        return _goals(self.root)

    @property
    def late_rewards(self) -> Snapshot:
        return _late_rewards(self.root)


Case = Callable[[Places], Runs]

# Chunks of a few rows, so that windows cross them and a small cache can not hold all.
FIELDS: dict[str, Any] = {
    "observation": {
        "state": Field("float32", (3,), final=True, chunk_rows=16),
        "pixels": Field("uint8", (4, 4), final=True, chunk_rows=8),
    },
    "action": Field("int64", chunk_rows=32),
    "reward": Field("float32", chunk_rows=32),
}
SCHEMA = Schema(FIELDS, episode={"policy_version": int})


class Codes:
    """Gives every step a number, and values that follow from it."""

    def __init__(self, first: int = 0) -> None:
        self.n = first

    def rows(self, n: int, n_final: int = 0) -> Values:
        """The next n steps of an episode, with the observations after them where these are asked for."""
        code = np.arange(self.n, self.n + n + n_final)
        self.n += len(code)
        return _values(code, n)

    def step(self) -> Values:
        """One step of one environment."""
        return first_row(self.rows(1))

    def block(self, n: int, n_envs: int) -> Values:
        """``[T, B]`` steps; the numbers of each environment follow each other."""
        parts = [self.rows(n) for _ in range(n_envs)]
        return _stacked(parts)

    def final(self, n: int | None = None) -> Values:
        """Observations after the last step: one, or a row for each environment."""
        observed = self.rows(n or 1)["observation"]
        return {"observation": observed if n else first_row(observed)}

    def finals(self, n: int, n_envs: int) -> Values:
        """Observations after the last step, for every step of a block."""
        return {"observation": self.block(n, n_envs)["observation"]}


def _values(code: np.ndarray[Any, Any], n: int) -> Values:
    state = np.stack([code, code % 7, code / 4], 1).astype(np.float32)
    pixels = (code[:, None, None] * 5 + np.arange(16).reshape(4, 4)) % 251
    rest = code[:n]
    return {
        "observation": {"state": state, "pixels": pixels.astype(np.uint8)},
        "action": rest % 5,
        "reward": (rest * 3 % 11 / 4).astype(np.float32),
    }


def first_row(values: Mapping[str, Any]) -> Values:
    return {name: first_row(v) if isinstance(v, Mapping) else v[0] for name, v in values.items()}


def _stacked(parts: list[Values]) -> Values:
    names = parts[0].keys()
    return {
        name: _stacked([part[name] for part in parts])
        if isinstance(parts[0][name], Mapping)
        else np.stack([part[name] for part in parts], 1)
        for name in names
    }


LENGTHS = (1, 7, 2, 30, 12, 1, 5, 19, 3, 9)
ENDS: tuple[tuple[Values, int], ...] = (
    ({"terminated": True}, 1),
    ({"truncated": True}, 1),
    ({"terminated": True}, 0),
    ({"truncated": True}, 0),
    ({}, 0),  # cut
    ({}, 1),
)


def _writer(store: Store, name: str) -> Writer:
    return store.writer(name, commit_seconds=None)


def _whole_episodes(store: Store, codes: Codes) -> None:
    """Episodes of all lengths and ends, three a commit."""
    with _writer(store, "alpha") as writer:
        for i, n in enumerate(LENGTHS):
            end, n_final = ENDS[i % len(ENDS)]
            writer.append_episode(codes.rows(n, n_final), **end, env=i % 2, metadata={"policy_version": i})
            if i % 3 == 2:
                writer.commit()


def _interleaved(store: Store, codes: Codes) -> None:
    """Three environments step by step, committed in the middle of episodes; one episode is aborted."""
    lengths = (4, 11, 23)
    with _writer(store, "beta") as writer:
        for t in range(46):
            is_last = np.array([t % n == n - 1 for n in lengths])
            writer.append(
                first_row(codes.block(1, 3)),
                envs=range(3),
                terminated=is_last & (t % 2 == 0),
                truncated=is_last,
                final=codes.final(3),
            )
            if t == 20:
                writer.abort_episode(env=0)
            if t % 9 == 8:
                writer.commit()


def _blocks_and_open(store: Store, codes: Codes) -> Snapshot:
    """Blocks of two environments, the last episodes of which have no end in the snapshot."""
    writer = _writer(store, "gamma")
    for i in range(3):
        ends = np.zeros((10, 2), bool)
        ends[3 + i, 0] = ends[7 - 2 * i, 1] = True
        writer.append_rollout(
            codes.block(10, 2), terminated=ends & (i == 1), truncated=ends, final=codes.finals(10, 2)
        )
        writer.commit()
    snapshot = store.refresh()
    writer.close()
    return snapshot


def record(url: str, first: int = 0) -> Snapshot:
    """The store that most cases read: three streams, all kinds of episodes."""
    store, codes = trajstore.create(url, SCHEMA, fsync=False), Codes(first)
    _whole_episodes(store, codes)
    _interleaved(store, codes)
    return _blocks_and_open(store, codes)


@functools.cache
def _steps(root: Path) -> Snapshot:
    return record(str(root / "steps"))


def simple(url: str, lengths: tuple[int, ...] = LENGTHS, first: int = 0) -> Store:
    """A store of one stream with whole episodes."""
    store, codes = trajstore.create(url, SCHEMA, fsync=False), Codes(first)
    with _writer(store, "only") as writer:
        for i, n in enumerate(lengths):
            end, n_final = ENDS[i % len(ENDS)]
            writer.append_episode(codes.rows(n, n_final), **end, metadata={"policy_version": i})
    store.refresh()
    return store


@functools.cache
def _goals(root: Path) -> Snapshot:
    """Episodes with goals on a line of whole numbers, so that rewards are exact; the last one has no final row."""
    goal = Field("float32", (2,), final=True, chunk_rows=16)
    rest = {"action": Field("int64"), "reward": Field("float32")}
    store = trajstore.create(
        root / "goals", Schema({"achieved_goal": goal, "desired_goal": goal} | rest), fsync=False
    )
    with _writer(store, "alpha") as writer:
        for i, n in enumerate((6, 15, 1, 24, 9)):
            has_final = i != 4
            writer.append_episode(goal_rows(i, n, n + has_final), terminated=i % 2 == 0, truncated=i % 2 == 1)
            writer.commit()
    return store.refresh()


def goal_rows(number: int, n: int, n_observed: int) -> Values:
    t = np.arange(n_observed)
    achieved = np.stack([t * (number + 1) % 5, np.full(n_observed, number)], 1).astype(np.float32)
    desired = np.full((n_observed, 2), 100 + number, np.float32)
    return {
        "achieved_goal": achieved,
        "desired_goal": desired,
        "action": t[:n] + 100 * number,
        "reward": np.full(n, -1, np.float32),
    }


@functools.cache
def _late_rewards(root: Path) -> Snapshot:
    """Rewards that arrive with the next observation."""
    fields = {
        "observation": Field("float32", (3,), final=True, chunk_rows=8),
        "reward": Field("float32", final=True, chunk_rows=8),
    }
    store = trajstore.create(root / "late", Schema(fields, reward_alignment="observation"), fsync=False)
    codes = Codes()
    with _writer(store, "alpha") as writer:
        for i, n in enumerate(LENGTHS):
            end, n_final = ENDS[i % len(ENDS)]
            rows = codes.rows(n + n_final)
            writer.append_episode({"observation": rows["observation"]["state"], "reward": rows["reward"]}, **end)
    return store.refresh()
