"""The steps that the loops are run on, and the buffers that are used for them today.

A function of a peer returns what to call for a batch, by the peer's name; nothing where it is not installed.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

OURS, BARE = "ours", "bare"
TORCHRL, PLAIN, MEMMAP = "TorchRL", "TorchRL plain", "TorchRL memmap"
SEQUENCE, MULTI_STEP = "TorchRL Sequence", "TorchRL n-step"
CPPRB, SB3 = "cpprb", "SB3"
ISOLATES = {
    OURS: "ReplayBuffer",
    BARE: "index_select, rows chosen before",
    TORCHRL: "TensorDictReplayBuffer, RAM",
    PLAIN: "ReplayBuffer, RAM, no index",
    MEMMAP: "TensorDictReplayBuffer, memmap",
    SEQUENCE: "sample_unit=Sequence, plain",
    MULTI_STEP: "MultiStepTransform, plain",
    CPPRB: "its arrays as tensors",
    SB3: "tensors",
}
STATE, ACTION = 64, 8
ALPHA, BETA, GAMMA, N_STEP = 0.6, 0.4, 0.99, 3
EPISODE = 200  # steps that appended episodes have
Array = np.ndarray[Any, np.dtype[Any]]
Action = Callable[[], Any]
Actions = dict[str, Action]


@dataclass(frozen=True)
class Steps:
    """Episodes one after the other; one of n steps has n + 1 observations, whose first numbers count up.

    So it can be seen in a batch whether a row follows another one.
    """

    observations: Array
    fields: dict[str, Array]
    stops: Array

    @property
    def n_steps(self) -> int:
        return int(self.stops[-1])

    @cached_property
    def rows(self) -> Array:
        """Where the observation of each step is; that after it is in the next row."""
        lengths = np.diff(self.stops, prepend=0)
        return np.arange(self.n_steps) + np.repeat(np.arange(len(lengths)), lengths)

    @cached_property
    def done(self) -> Array:
        done = np.zeros(self.n_steps, bool)
        done[self.stops - 1] = True
        return done

    @property
    def n_bytes(self) -> int:
        return self.observations.nbytes + sum(column.nbytes for column in self.fields.values())

    def episodes(self) -> Iterator[dict[str, Array]]:
        start = 0
        for i, stop in enumerate(self.stops.tolist()):
            observation = self.observations[start + i : stop + i + 1]
            yield {"observation": observation, **{k: v[start:stop] for k, v in self.fields.items()}}
            start = stop

    @cached_property
    def transitions(self) -> dict[str, Array]:
        """As buffers of transitions store them: every observation twice."""
        following = self.observations[self.rows + 1]
        return {"observation": self.observations[self.rows], "next": following, "done": self.done, **self.fields}

    def step(self) -> dict[str, Any]:
        return {"observation": self.observations[0], **{k: v[0] for k, v in self.fields.items()}}


def steps_of(n_steps: int, n_fields: int = 3, width: int = STATE) -> Steps:
    """Observations, actions and rewards, and further fields of one number each; all float32."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(EPISODE, 9 * EPISODE + 1, n_steps // EPISODE)
    stops = np.cumsum(lengths)
    stops = np.append(stops[stops < n_steps - EPISODE], n_steps)
    observations = rng.standard_normal((n_steps + len(stops), width), np.float32)
    observations[:, 0] = np.arange(len(observations))
    shapes = {"action": (n_steps, ACTION), "reward": (n_steps,)}
    shapes |= {f"field_{i}": (n_steps,) for i in range(3, n_fields)}
    fields = {name: rng.standard_normal(shapes[name], np.float32) for name in list(shapes)[: n_fields - 1]}
    return Steps(observations, fields, stops)


def assert_follows(observation: torch.Tensor, following: torch.Tensor, at_most: int = 1, who: str = "") -> None:
    """That the one comes at most so many steps after the other, in the same episode."""
    distance = following[..., 0] - observation[..., 0]
    follow = (distance >= 1) & (distance <= at_most)
    assert bool(follow.all()), f"{who}: rows that do not follow each other, {distance[~follow]} steps apart"


def assert_shapes(batch: Any, shapes: dict[Any, tuple[int, ...]]) -> None:
    for name, shape in shapes.items():
        found = tuple(batch[name].shape)
        assert found == shape, f"{name}: expected {shape}, got {found}"


def turns(*actions: Action) -> Action:
    """All of them; the result is that of the last."""

    def run() -> Any:
        result = None
        for action in actions:
            result = action()
        return result

    return run


def every(n: int, usually: Action, at_times: Action) -> Action:
    """The one, and at every n-th call the other."""
    i = 0

    def run() -> None:
        nonlocal i
        i += 1
        (at_times if i % n == 0 else usually)()

    return run


# bare: torch's gather out of plain tensors


def patterns(n_rows: int, batch: int, length: int = 1) -> list[torch.Tensor]:
    """Rows of batches, so many that no cache of the processor holds what they refer to."""
    n = min(4096, max(32, (1 << 20) // (batch * length)))
    starts = torch.randint(n_rows - length, (n, batch, 1), generator=torch.Generator().manual_seed(0))
    return list((starts + torch.arange(length)).view(n, -1))


def bare_transitions(steps: Steps, batch: int) -> Action:
    observations, at = torch.from_numpy(steps.observations), torch.from_numpy(steps.rows)
    fields = {k: torch.from_numpy(v) for k, v in {**steps.fields, "done": steps.done}.items()}
    chosen = [(row, at[row], at[row] + 1) for row in patterns(steps.n_steps, batch)]
    i = 0

    def gather() -> dict[str, torch.Tensor]:
        nonlocal i
        i += 1
        row, here, there = chosen[i % len(chosen)]
        out = {k: torch.index_select(v, 0, row) for k, v in fields.items()}
        out["observation"] = torch.index_select(observations, 0, here)
        out["next"] = torch.index_select(observations, 0, there)
        return out

    return gather


def bare_windows(columns: dict[str, Array], batch: int, length: int) -> Action:
    tensors = {k: torch.from_numpy(v) for k, v in columns.items()}
    rows = patterns(min(len(v) for v in columns.values()), batch, length)
    i = 0

    def gather() -> dict[str, torch.Tensor]:
        nonlocal i
        i += 1
        index = rows[i % len(rows)]
        return {k: torch.index_select(v, 0, index).view(batch, length, *v.shape[1:]) for k, v in tensors.items()}

    return gather


def bare_copies(columns: dict[str, Array], n: int) -> Action:
    """Copies n rows to the start of the columns: what an append costs at least."""
    pairs = [(torch.from_numpy(v)[:n], torch.from_numpy(v[:n].copy())) for v in columns.values()]

    def copy() -> None:
        for to, rows in pairs:
            to.copy_(rows)

    return copy


# TorchRL


def has_torchrl() -> bool:
    if not find_spec("torchrl"):
        return False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about a C++ extension that most of its buffers do not use
        import torchrl.data  # noqa: F401
    logging.getLogger("torchrl").setLevel(logging.WARNING)
    return True


def as_tensordict(columns: dict[str, Array]) -> Any:
    """As TorchRL's collectors lay transitions out, with the least that a learner needs."""
    from tensordict import TensorDict

    tensors = {k: torch.from_numpy(v) for k, v in columns.items() if k not in ("next", "done", "reward")}
    after = {k: torch.from_numpy(columns[k])[:, None] for k in ("done", "reward") if k in columns}
    after |= {"observation": torch.from_numpy(columns["next"])} if "next" in columns else {}
    return TensorDict({**tensors, "next": after}, [len(columns["done"])])


def torchrl_storage(columns: dict[str, Array], directory: Path | None = None) -> Any:
    """A full storage, in RAM or in files."""
    from torchrl.data import LazyMemmapStorage, LazyTensorStorage, ReplayBuffer

    n = len(columns["done"])
    storage = LazyTensorStorage(n) if directory is None else LazyMemmapStorage(n, scratch_dir=directory)
    ReplayBuffer(storage=storage).extend(as_tensordict(columns))
    return storage


def torchrl_forms(storage: Any, **options: Callable[[], Any]) -> dict[str, Any]:
    """The buffer that its examples use, and its base class, which is faster."""
    from torchrl.data import ReplayBuffer, TensorDictReplayBuffer

    forms = {TORCHRL: TensorDictReplayBuffer, PLAIN: ReplayBuffer}
    return {
        name: form(storage=storage, **{k: make() for k, make in options.items()}) for name, form in forms.items()
    }


def torchrl_sequences(storage: Any, length: int) -> Any:
    from torchrl.data import ReplayBuffer, Sequence

    return ReplayBuffer(storage=storage, sample_unit=Sequence(length=length))


def torchrl_slices(storage: Any, length: int) -> dict[str, Any]:
    from torchrl.data import SliceSampler

    sampler = partial(SliceSampler, slice_len=length, end_key=("next", "done"), cache_values=True)
    return torchrl_forms(storage, sampler=sampler)


def torchrl_windows(storage: Any, batch: int, length: int) -> tuple[Actions, dict[str, Any]]:
    """What to call for windows, and the buffers behind."""
    buffers = torchrl_slices(storage, length)
    actions: Actions = {name: partial(buffer.sample, batch * length) for name, buffer in buffers.items()}
    sequences = torchrl_sequences(storage, length)
    return {**actions, SEQUENCE: partial(sequences.sample, batch)}, {**buffers, SEQUENCE: sequences}


def torchrl_adds(buffer: Any, one: Any) -> Action:
    """Adds a step; TensorDicts are made before."""
    last = one.clone()
    last["next", "done"] = torch.ones_like(last["next", "done"])
    return every(EPISODE, partial(buffer.add, one), partial(buffer.add, last))


def torchrl_prioritised(columns: dict[str, Array], batch: int) -> Actions:
    """Its trees are in a C++ extension, which can't be loaded beside every torch: RuntimeError then."""
    from torchrl.data import LazyTensorStorage, TensorDictPrioritizedReplayBuffer

    n, new = len(columns["done"]), torch.rand(batch)
    buffer = TensorDictPrioritizedReplayBuffer(alpha=ALPHA, beta=BETA, storage=LazyTensorStorage(n))
    buffer.extend(as_tensordict(columns))
    buffer.update_priority(torch.arange(n), torch.rand(n))

    def turn() -> Any:
        drawn = buffer.sample(batch)
        buffer.update_priority(drawn["index"], new)
        return drawn

    return {TORCHRL: turn}


def torchrl_multi_step(columns: dict[str, Array], batch: int) -> Action:
    """Adds a step, from which it makes one with the n-step return, and samples; few steps, as it fills slowly."""
    from torchrl.data import LazyTensorStorage, ReplayBuffer
    from torchrl.envs import MultiStepTransform

    transitions = as_tensordict(columns)[:50_000]
    transform = MultiStepTransform(n_steps=N_STEP, gamma=GAMMA)
    buffer = ReplayBuffer(storage=LazyTensorStorage(len(transitions)), transform=transform)
    for part in transitions.split(10_000):
        buffer.extend(part)
    one = transitions[:1].clone()
    return turns(lambda: buffer.extend(one.clone(recurse=False)), lambda: buffer.sample(batch))


# cpprb and stable-baselines3


def has_cpprb() -> bool:
    return find_spec("cpprb") is not None


def cpprb_buffer(columns: dict[str, Array], stops: Array | None = None, *, prioritised: bool = False) -> Any:
    """With ``stops`` it has n-step returns; it makes them from episodes that come one by one."""
    import cpprb

    env = {k: {"shape": v.shape[1:] or 1, "dtype": np.float32} for k, v in columns.items()}
    n, options = len(columns["done"]), {}
    if stops is not None:
        options["Nstep"] = {"size": N_STEP, "gamma": GAMMA, "rew": "reward", "next": "next"}
    if prioritised:
        buffer = cpprb.PrioritizedReplayBuffer(n, env, alpha=ALPHA, **options)
    else:
        buffer = cpprb.ReplayBuffer(n, env, **options)
    start = 0
    for stop in range(10_000, n + 10_000, 10_000) if stops is None else stops.tolist():
        buffer.add(**{k: v[start:stop] for k, v in columns.items()})
        if stops is not None:
            buffer.on_episode_end()
        start = stop
    return buffer


def cpprb_samples(buffer: Any, batch: int) -> Action:
    return lambda: {k: torch.from_numpy(v) for k, v in buffer.sample(batch).items()}


def cpprb_prioritised(columns: dict[str, Array], batch: int) -> Actions:
    buffer, new = cpprb_buffer(columns, prioritised=True), np.random.default_rng(0).random(batch, np.float32)
    n = len(columns["done"])
    for part in np.array_split(np.arange(n), max(1, n // 10_000)):
        buffer.update_priorities(part, np.random.default_rng(1).random(len(part), np.float32))

    def turn() -> dict[str, Any]:
        arrays = buffer.sample(batch, beta=BETA)
        index = arrays.pop("indexes")
        tensors = {k: torch.from_numpy(v) for k, v in arrays.items()}
        buffer.update_priorities(index, new)
        return tensors

    return {CPPRB: turn}


def cpprb_adds(buffer: Any, columns: dict[str, Array]) -> Action:
    one = {k: v[0] for k, v in columns.items()}
    add = partial(buffer.add, **one)
    return every(EPISODE, add, turns(partial(buffer.add, **{**one, "done": True}), buffer.on_episode_end))


def has_sb3() -> bool:
    return find_spec("stable_baselines3") is not None


def sb3_buffer(columns: dict[str, Array], *, n_step: bool = False) -> Any:
    """Filled through its arrays: its ``add`` takes one step a call."""
    import gymnasium as gym
    from stable_baselines3.common import buffers

    make = partial(buffers.NStepReplayBuffer, n_steps=N_STEP, gamma=GAMMA) if n_step else buffers.ReplayBuffer
    spaces = [gym.spaces.Box(-1, 1, columns[k].shape[1:], np.float32) for k in ("observation", "action")]
    buffer = make(len(columns["done"]), *spaces, device="cpu")
    names = {"observations": "observation", "next_observations": "next", "actions": "action"}
    for name, ours in {**names, "rewards": "reward", "dones": "done"}.items():
        getattr(buffer, name)[:, 0] = columns[ours]
    buffer.full = True
    return buffer


def sb3_samples(buffer: Any, batch: int) -> Action:
    return partial(buffer.sample, batch)


def sb3_adds(buffer: Any, columns: dict[str, Array]) -> Action:
    first = [columns[k][:1] for k in ("observation", "next", "action", "reward")]
    add = partial(buffer.add, *first, np.zeros(1, bool), [{}])
    return every(EPISODE, add, partial(buffer.add, *first, np.ones(1, bool), [{}]))
