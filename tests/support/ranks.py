"""Several ranks of one store, each on a thread of this process, and what they hold as plain values to compare."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch

from trajstore import EpisodeKey, Handle, NotReadyError, ReplayBuffer, Windows
from trajstore.schema import Array

T = TypeVar("T")
OPTIONS: dict[str, Any] = {
    "commit_seconds": None,
    "cache_bytes": "8MiB",
    "buffer_bytes": "1MiB",
    "rank_timeout_s": 60.0,
    "fsync": False,
    "seed": 3,
}
EVERY_STEP = Windows(squeeze=True, provenance=True)


def in_ranks(ranks: int | Iterable[int], function: Callable[[int], T]) -> list[T]:
    """Call a function of the rank on a thread each, since many calls wait for the other ranks; results in order.

    Threads are started in the order in which ranks are named.
    """
    order = list(range(ranks)) if isinstance(ranks, int) else list(ranks)
    with ThreadPoolExecutor(len(order)) as threads:
        futures = {rank: threads.submit(function, rank) for rank in order}
        return [futures[rank].result() for rank in sorted(order)]


def start(url: str, n: int, **options: Any) -> list[ReplayBuffer]:
    """Begin with n ranks; one alone is told nothing of ranks."""
    return in_ranks(n, lambda rank: ReplayBuffer(url, **OPTIONS | placed(rank, n) | options))


def resume(
    url: str, checkpoint: str, n: int, *, order: Sequence[int] | None = None, **options: Any
) -> list[ReplayBuffer]:
    """Go on with n ranks, which start in an order."""
    return in_ranks(
        order or n,
        lambda rank: ReplayBuffer.resume(url, checkpoint, **{"fsync": False} | placed(rank, n) | options),
    )


def placed(rank: int, n: int) -> dict[str, Any]:
    return {"rank": rank, "world_size": n} if n > 1 else {}


def save(buffers: Sequence[ReplayBuffer], name: str = "a") -> str:
    """One checkpoint of all ranks; its id."""
    ids = in_ranks(len(buffers), lambda rank: buffers[rank].save_checkpoint(name, wait=True))
    assert len(set(ids)) == 1
    return ids[0]


def close(buffers: Sequence[ReplayBuffer]) -> None:
    in_ranks(len(buffers), lambda rank: buffers[rank].close())


def saved_and_closed(buffers: Sequence[ReplayBuffer], name: str = "a") -> str:
    checkpoint = save(buffers, name)
    close(buffers)
    return checkpoint


# ---- what was recorded


@dataclass
class Recorded:
    """An episode as it was recorded, whatever became of it since."""

    rank: int
    env: int
    code: Array  # a number for each step that no other step has
    end: str


@dataclass
class Recorder:
    """Appends episodes whose every step is told apart by its value, and remembers all of them."""

    episodes: dict[EpisodeKey, Recorded] = field(default_factory=dict)
    n: int = 0

    def codes(self, n: int) -> Array:
        self.n += n
        return np.arange(self.n - n, self.n)

    def episode(self, buffer: ReplayBuffer, n: int, *, env: int = 0, end: str = "terminated") -> EpisodeKey:
        """Add a whole episode of n steps; ``end`` is terminated, truncated or cut."""
        code = self.codes(n)
        key = buffer.add_episode(
            step_of(code), env=env, terminated=end == "terminated", truncated=end == "truncated"
        )
        self.episodes[key] = Recorded(buffer.rank, env, code, end)
        return key

    def step(self, buffer: ReplayBuffer, *, env: int = 0, truncated: bool = False) -> Handle:
        """Append one step to an environment's open episode."""
        code = self.codes(1)
        step = {name: value[0] for name, value in step_of(code).items()}
        handle = buffer.append(step, env=env, truncated=truncated)
        assert isinstance(handle, Handle)
        known = self.episodes.setdefault(
            EpisodeKey(handle.stream, handle.episode), Recorded(buffer.rank, env, code[:0], "open")
        )
        known.code = np.append(known.code, code)
        known.end = "truncated" if truncated else "open"
        return handle

    def steps(self, buffer: ReplayBuffer, n: int, *, env: int = 0) -> EpisodeKey:
        for _ in range(n):
            handle = self.step(buffer, env=env)
        return EpisodeKey(handle.stream, handle.episode)

    def some(self, buffers: Sequence[ReplayBuffer], lengths: Sequence[int], n_envs: int = 2) -> None:
        """Episodes of these lengths in turn to all ranks, the environments of a rank in turn."""
        for i, n in enumerate(lengths):
            end = ("terminated", "truncated")[i % 2]
            self.episode(buffers[i % len(buffers)], n, env=i // len(buffers) % n_envs, end=end)


def step_of(code: Array) -> dict[str, Array]:
    return {
        "code": code.astype(np.int64),
        "observation": np.stack([code * 0.5, -code], -1).astype(np.float32),
        "reward": (code % 7).astype(np.float32),
    }


# ---- what there is


Held = dict[EpisodeKey, dict[str, Array]]


def held(buffer: ReplayBuffer) -> Held:
    """All that a buffer shows, by episode: t, values, masks and provenance of its steps, in order."""
    blocks = []
    try:
        for batch in buffer.epoch(512, EVERY_STEP, shuffle=False):
            flat = {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}
            flat |= {f"provenance/{name}": value for name, value in batch.get("provenance", {}).items()}
            blocks.append({name: value.numpy().copy() for name, value in flat.items()})
    except NotReadyError:
        assert buffer.n_steps == 0
        return {}
    columns = {name: np.concatenate([block[name] for block in blocks]) for name in blocks[0]} if blocks else {}
    return _by_episode(columns, buffer.streams) if columns else {}


def _by_episode(columns: Mapping[str, Array], streams: Sequence[str]) -> Held:
    found: Held = {}
    stream, episode, t = columns["index"].T
    for number, which in sorted(set(zip(stream.tolist(), episode.tolist(), strict=True))):
        mine = np.flatnonzero((stream == number) & (episode == which))
        assert (np.diff(mine) == 1).all(), "the steps of an episode stand together"
        assert (np.diff(t[mine]) == 1).all(), "in order, without gaps"
        values = {name: column[mine] for name, column in columns.items() if name != "index"}
        found[EpisodeKey(streams[number], which)] = values | {"t": t[mine]}
    return found


def union(parts: Iterable[Held]) -> Held:
    """What several ranks hold; nobody holds what another does."""
    whole: Held = {}
    for part in parts:
        assert not whole.keys() & part.keys(), "an episode is held twice"
        whole |= part
    return whole


def held_by_all(buffers: Sequence[ReplayBuffer]) -> Held:
    return union(held(buffer) for buffer in buffers)


def n_steps(parts: Held) -> int:
    return sum(len(values["t"]) for values in parts.values())


def check_same(one: Held, other: Held, *, but: Iterable[str] = ("provenance/rank", "provenance/env")) -> None:
    """The same episodes, from the same steps on, with the same values, masks and origins."""
    assert one.keys() == other.keys()
    for key, values in one.items():
        assert values.keys() == other[key].keys()
        for name in values.keys() - set(but):
            assert np.array_equal(values[name], other[key][name]), (key, name)


def check_recorded(parts: Held, recorded: Mapping[EpisodeKey, Recorded]) -> None:
    """Every step has the values it was recorded with, and says who recorded it."""
    for key, values in parts.items():
        known = recorded[key]
        wanted = step_of(known.code[values["t"]])
        for name, column in wanted.items():
            assert np.array_equal(values[name], column), (key, name)
        assert (values["provenance/source_rank"] == known.rank).all()
        assert (values["provenance/source_env"] == known.env).all()


def handles(buffer: ReplayBuffer, index: torch.Tensor) -> list[Handle]:
    """What a batch's index names, whatever numbers streams have."""
    streams = buffer.streams
    return [Handle(streams[stream], episode, t) for stream, episode, t in index.tolist()]


def index_of(buffer: ReplayBuffer, which: Iterable[Handle]) -> torch.Tensor:
    streams = buffer.streams
    rows = [(streams.index(handle.stream), handle.episode, handle.t) for handle in which]
    return torch.tensor(rows, dtype=torch.int64).reshape(-1, 3)


def all_handles(parts: Held) -> list[Handle]:
    return [Handle(*key, t) for key, values in parts.items() for t in values["t"].tolist()]


def priorities(buffer: ReplayBuffer) -> dict[Handle, float]:
    """The raw priority of every step, bit by bit."""
    known = all_handles(held(buffer))
    sampler = buffer.reader.priority_sampler
    sampler.follow()  # `held` has taken up what was appended
    address = sampler.steps.addresses_of(index_of(buffer, known).numpy())
    assert (address >= 0).all()
    return dict(zip(known, sampler.priority_column.get(address).tolist(), strict=True))
