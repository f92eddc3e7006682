"""Cases of mixtures, of datasets for torch's DataLoader, and of the buffers of other libraries."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from tensordict import TensorDict
from torch.utils.data import DataLoader

from tests.sampling.digests.digest import Batch, flat
from tests.sampling.digests.live import OPTIONS as BUFFER
from tests.sampling.digests.live import SMALL, Session
from tests.sampling.digests.reading import is_even, priorities_of
from tests.sampling.digests.stores import LENGTHS, SCHEMA, Case, Codes, Places, Runs, simple
from trajstore import (
    BatchDataset,
    Hindsight,
    Linear,
    Mixture,
    Priorities,
    Reader,
    ReplayBuffer,
    Snapshot,
    WindowDataset,
    Windows,
)
from trajstore.compat import alf, objectrl, rlinf

# ---- mixtures

READERS: dict[str, dict[str, Any]] = {
    "large caches": {},
    "small caches": {"cache_bytes": 1},
    "without compiled loops": {"compiled": False},
}
Mix = Callable[[dict[str, Reader]], Iterator[Batch]]


def _mixed_runs(mix: Mix, options: dict[str, Any], places: Places) -> Runs:
    """Sources of one stream each, so that stream numbers are always 0."""
    stores = {name: simple(places.fresh(), first=1000 * i) for i, name in enumerate(("demo", "online", "old"))}
    for way, more in READERS.items():
        readers = {name: Reader(store, seed=i, **options | more) for i, (name, store) in enumerate(stores.items())}
        yield way, [flat(batch) for batch in mix(readers)]


def mixed(mix: Mix, **options: Any) -> Case:
    return functools.partial(_mixed_runs, mix, options)


def _even(readers: dict[str, Reader]) -> Iterator[Batch]:
    mixture = Mixture(readers)
    for n in (7, 8, 1, 20):
        yield mixture.sample(n, Windows(length=3))


def _weighted(readers: dict[str, Reader]) -> Iterator[Batch]:
    share, sources = Linear(0.5, 0.1, 4), list(readers.values())
    weighted: dict[str, Any] = {
        "demo": (sources[0], share),
        "online": (sources[1], lambda n: 1 - share(n)),
        "old": (sources[2], 0.1),
    }
    mixture = Mixture(weighted, shuffle=True, seed=5)
    for n in (9, 16, 5, 33, 16):
        yield mixture.sample(n, Windows.transitions(n_step=2))


def _at_random(readers: dict[str, Reader]) -> Iterator[Batch]:
    mixture = Mixture(readers, exact=False, seed=7, fields=("reward", "action"))
    for n in (9, 30):
        yield mixture.sample(n, Windows(length=2, fields=("reward", "action")))


def _by_priority(readers: dict[str, Reader]) -> Iterator[Batch]:
    mixture = Mixture(readers, shuffle=True)
    for _ in range(4):
        batch = mixture.sample(13, Windows(length=2))
        mixture.update_priorities(batch, priorities_of(batch["index"]) + batch["source"])
        yield batch


def _after_a_state(readers: dict[str, Reader]) -> Iterator[Batch]:
    mixture = Mixture(readers, seed=9, shuffle=True)
    yield mixture.sample(10, Windows())
    state, states = mixture.state_dict(), [reader.state_dict() for reader in readers.values()]
    yield mixture.sample(10, Windows())
    mixture.load_state_dict(state)
    for reader, saved in zip(readers.values(), states, strict=True):
        reader.load_state_dict(saved)
    yield mixture.sample(10, Windows())


def _mixed_with_a_buffer(places: Places) -> Runs:
    """A buffer beside a reader; it is empty at first."""
    demo = simple(places.fresh())
    for cache in ("8MiB", SMALL):
        with ReplayBuffer(places.fresh(), schema=SCHEMA, **BUFFER | {"cache_bytes": cache}) as buffer:
            mixture = Mixture({"demo": Reader(demo, seed=1), "online": (buffer, 2.0)}, when_empty="others")
            found, session = [flat(mixture.sample(9, Windows(length=2)))], Session(buffer, Codes(5000))
            for i, n in enumerate(LENGTHS[3:]):
                session.add(n + 1, i)
                found.append(flat(mixture.sample(9, Windows(length=2))))
            yield f"cache {cache}", found


MIXTURES: dict[str, Case] = {
    "even": mixed(_even),
    "weights on a schedule, shuffled": mixed(_weighted),
    "sources at random, some fields": mixed(_at_random),
    "by priority": mixed(_by_priority, priorities=Priorities()),
    "after a state": mixed(_after_a_state),
    "with a buffer": _mixed_with_a_buffer,
}

# ---- datasets

Load = Callable[[Snapshot, int | str], Iterator[Batch]]


def _loaded_runs(load: Load, places: Places) -> Runs:
    snapshot = simple(places.fresh()).snapshot
    for cache in ("8MiB", 1):
        yield f"cache {cache}", [flat(batch) for batch in load(snapshot, cache)]


def loaded(load: Load) -> Case:
    return functools.partial(_loaded_runs, load)


def _random_batches(snapshot: Snapshot, cache: int | str) -> Iterator[Batch]:
    dataset = BatchDataset(snapshot, 6, Windows(length=3), seed=4, cache_bytes=cache)
    for _ in range(2):
        batches = iter(dataset)
        yield from (next(batches) for _ in range(4))


def _epochs(snapshot: Snapshot, cache: int | str) -> Iterator[Batch]:
    dataset = BatchDataset(snapshot, 20, Windows(length=2), epoch=True, seed=4, cache_bytes=cache)
    yield from DataLoader(dataset, batch_size=None)
    dataset.set_epoch(5)
    yield from DataLoader(dataset, batch_size=None)


def _epoch_in_order(snapshot: Snapshot, cache: int | str) -> Iterator[Batch]:
    windows = Windows.transitions(n_step=2)
    yield from BatchDataset(
        snapshot, 16, windows, epoch=True, shuffle=False, drop_last=True, where=is_even, cache_bytes=cache
    )


def _single_windows(snapshot: Snapshot, cache: int | str) -> Iterator[Batch]:
    dataset = WindowDataset(snapshot, Windows(length=3, boundary="pad_right"), cache_bytes=cache)
    yield {"length": len(dataset)}
    yield from (dataset[0], dataset[-1], dataset.batch(torch.tensor([5, 3, 40])))
    yield from DataLoader(dataset, batch_size=7, sampler=range(0, len(dataset), 3))


DATASETS: dict[str, Case] = {
    "random batches": loaded(_random_batches),
    "epochs": loaded(_epochs),
    "an epoch in order": loaded(_epoch_in_order),
    "single windows": loaded(_single_windows),
}

# ---- the buffers of other libraries

COMPAT: dict[str, dict[str, Any]] = {
    "a large cache": {"cache_bytes": "8MiB", "buffer_bytes": "64KiB"},
    "without compiled loops": {"cache_bytes": "8MiB", "buffer_bytes": "64KiB", "compiled": False},
}
CPU = torch.device("cpu")


def _transitions(n: int, first: int = 0) -> TensorDict:
    number = torch.arange(first, first + n)
    state = number.float()[:, None].repeat(1, 3)
    fields = {
        "state": state,
        "action": number % 4,
        "reward": number.float() / 4,
        "next_state": state + 1,
        "terminated": number % 7 == 6,
        "truncated": torch.zeros(n, dtype=torch.bool),
    }
    return TensorDict(fields, batch_size=[n])


def _objectrl(places: Places) -> Runs:
    for way, options in COMPAT.items():
        buffer = objectrl.ReplayBuffer(CPU, CPU, 50, seed=3, **options)
        found = []
        for first in range(0, 80, 16):
            buffer.add_batch(_transitions(15, first))
            buffer.add(_transitions(1, first + 15)[0])
            found.append(flat(buffer.sample_batch(9)))
        found += [flat(buffer.sample_by_index([0, 7, -1])), flat(buffer.sample_all())]
        found += [flat(batch) for batch in buffer.create_epoch_iterator(batch_size=16, n_epochs=2, shuffle=True)]
        buffer.close()
        yield way, found


def _trajectory(number: int, n_steps: int = 6, n_envs: int = 2) -> rlinf.Trajectory:
    t, env = torch.meshgrid(torch.arange(n_steps), torch.arange(n_envs), indexing="ij")
    name = (number * 1000 + t * 10 + env).float()[..., None]
    state = torch.cat([name, name + 0.25], -1)
    flags: dict[str, Any] = {
        flag: torch.arange((n_steps + 1) * n_envs).reshape(n_steps + 1, n_envs, 1) % 5 == 4
        for flag in ("terminations", "truncations", "dones")
    }
    after = torch.cat([state[1:], state[-1:] + 0.5])
    return rlinf.Trajectory(
        max_episode_length=8,
        actions=name.repeat(1, 1, 4),
        rewards=name / 4,
        curr_obs={"states": state},
        next_obs={"states": after},
        **flags,
    )


def _rlinf(window: int, places: Places) -> Runs:
    for way, options in COMPAT.items():
        buffer = rlinf.TrajectoryReplayBuffer(seed=1234, sample_window_size=window, **options)
        found = []
        for i in range(4):
            buffer.add_trajectories([_trajectory(3 * i + j) for j in range(3)])
            found += [flat(buffer.sample(num_chunks=16)), flat(buffer.sample_chunks(5))]
        buffer.close()
        yield way, found


def _experience(t: int, n_envs: int) -> dict[str, Any]:
    env, kinds = torch.arange(n_envs), alf.StepType
    place = (t + env) % 7  # rows begin and end at different times
    step_type = torch.where(place == 0, int(kinds.FIRST), torch.where(place == 6, int(kinds.LAST), int(kinds.MID)))
    achieved = torch.stack([(t + env) % 4, env], 1).float()
    return {
        "step_type": step_type.int(),
        "reward": torch.full((n_envs,), t / 4),
        "discount": (place != 6).float(),
        "observation": {"achieved_goal": achieved, "desired_goal": achieved + 50},
        "action": torch.full((n_envs,), t),
        "env_id": env,
    }


def _alf_batch(drawn: tuple[Any, alf.BatchInfo]) -> Batch:
    batch, info = drawn
    more = {"env_ids": info.env_ids, "positions": info.positions}
    weights: dict[str, Any] = (
        {} if isinstance(info.importance_weights, tuple) else {"importance_weights": info.importance_weights}
    )
    return flat({"batch": batch, **more, **weights})


def _goal_reward(achieved: torch.Tensor, goal: torch.Tensor) -> torch.Tensor:
    return (achieved == goal).all(-1).float() - 1


RELABEL = Hindsight(
    "future", reward=_goal_reward, goal="observation/desired_goal", achieved="observation/achieved_goal"
)


def _alf_draws(buffer: alf.ReplayBuffer, first: int, prioritized: bool) -> Iterator[Batch]:
    for t in range(first, first + 25):
        buffer.add_batch(_experience(t, 3), env_ids=torch.arange(3))
        if t % 5 == 4:
            batch, info = buffer.get_batch(8, 3)
            yield _alf_batch((batch, info))
            if prioritized:
                buffer.update_priority(info.env_ids, info.positions, (info.positions % 5 + 1).float() / 4)
    yield _alf_batch(buffer.get_batch(8, 2, relabel=RELABEL))


def _alf(options: dict[str, Any], places: Places) -> Runs:
    prioritized = bool(options.get("prioritized_sampling"))
    for way, more in COMPAT.items():
        buffer = alf.ReplayBuffer(None, 3, 32, seed=3, **options | more)
        found = [*_alf_draws(buffer, 0, prioritized), *_alf_draws(buffer, 25, prioritized)]
        found += [flat(buffer.gather_all()[0])]
        buffer.close()
        yield way, found


def _alf_resumed(places: Places) -> Runs:
    for is_interrupted in (False, True):
        url = places.fresh()
        buffer = alf.ReplayBuffer(
            None, 3, 32, url=url, seed=3, prioritized_sampling=True, **COMPAT["a large cache"]
        )
        found = list(_alf_draws(buffer, 0, True))
        buffer.save_checkpoint("a", wait=True)
        if is_interrupted:
            buffer.close()
            buffer = alf.ReplayBuffer.resume(url, num_environments=3, max_length=32, prioritized_sampling=True)
        found += [_alf_batch(buffer.get_batch(n, 2)) for n in (4, 9)]
        buffer.close()
        yield f"interrupted {is_interrupted}", found


DROP_INS: dict[str, Case] = {
    "ObjectRL": _objectrl,
    "RLinf, all trajectories": functools.partial(_rlinf, 100),
    "RLinf, the newest 5 trajectories": functools.partial(_rlinf, 5),
    "ALF": functools.partial(_alf, {}),
    "ALF by priority": functools.partial(_alf, {"prioritized_sampling": True}),
    "ALF without replacement": functools.partial(_alf, {"with_replacement": False}),
    "ALF, recent steps": functools.partial(_alf, {"recent_data_steps": 8, "recent_data_ratio": 0.5}),
    "ALF, resumed": _alf_resumed,
}

CASES: dict[str, Case] = {
    **{f"mixture: {name}": case for name, case in MIXTURES.items()},
    **{f"dataset: {name}": case for name, case in DATASETS.items()},
    **{f"compat: {name}": case for name, case in DROP_INS.items()},
}
