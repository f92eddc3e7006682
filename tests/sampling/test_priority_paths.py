"""Compiled loops and tensor operations do the same for prioritised sampling, whatever happens in between."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trajstore import Linear, Priorities, ReplayBuffer, Windows
from trajstore.errors import DataError
from trajstore.sampling.compiled.priority_loops import checked_values
from trajstore.sampling.compiled.step_table_loops import addresses_of
from trajstore.sampling.draws import DrawScope
from trajstore.sampling.priorities.compiled_priorities import DrawnArrays
from trajstore.sampling.priorities.priority_sampler import PrioritySampler
from trajstore.sampling.priorities.priority_tree import PriorityTree
from trajstore.sampling.rng import CounterRng

_numbers = itertools.count()

OPTIONS = [
    Priorities(),
    Priorities(alpha=0.0, beta=Linear(0.2, 1.0, 5), normalize="buffer"),
    Priorities(alpha=1.0, stratified=True, duplicates="max"),
    Priorities(alpha=0.5, eps=0.0, normalize="buffer", stratified=True, initial=0.5),
    Priorities(uniform=0.25, normalize="buffer", duplicates="max"),
    Priorities(max_uses=40),
    Priorities(kind="rank", rank_every=3),
    Priorities(over="max"),
    Priorities(over="mean", duplicates="max"),
    Priorities(over=0.3, normalize="buffer"),
]
WINDOWS = [
    (Windows(), Windows.transitions()),
    (Windows(length=3), Windows(n_step=(1, 3))),
    (Windows(length=2, burn_in=1, strict_context=True), Windows(length=4, boundary="short")),
    (Windows(length=3, boundary="pad_right"), Windows(length=2, boundary="cross")),
]


class Twins:
    """Buffers that do the same: with compiled loops, without those of priorities, and without any."""

    def __init__(self, options: Priorities, windows: tuple[Windows, ...], seed: int) -> None:
        self.buffers = [
            ReplayBuffer(
                f"memory://twins-{next(_numbers)}",
                priorities=options,
                capacity=120,
                seed=seed,
                commit_seconds=None,
                compiled=compiled,
            )
            for compiled in (True, True, False)
        ]
        sampler = self.samplers[1]
        sampler._compiled = sampler.steps._kernels = None
        self.windows, self.options, self.rng = windows, options, np.random.default_rng(seed)
        self.seen: list[np.ndarray[Any, Any]] = []

    @property
    def samplers(self) -> list[PrioritySampler]:
        found = [buffer.reader.priority_sampler for buffer in self.buffers]
        assert all(sampler is not None for sampler in found)
        return found  # type: ignore[return-value]

    def all(self, act: Any) -> Any:
        """Do something with every buffer: the results, or the types and messages of the errors, are the same."""
        results, errors = [], []
        for buffer in self.buffers:
            try:
                results.append(act(buffer))
            except (DataError, ValueError) as error:
                errors.append((type(error), str(error)))
        assert not (results and errors), errors
        assert len({*errors}) <= 1
        if errors:
            return None
        for other in results[1:]:
            _assert_same(results[0], other)
        return results[0]

    def append(self) -> None:
        n = int(self.rng.integers(1, 4))
        envs = self.rng.choice(4, n, replace=False).tolist()
        ends = self.rng.random((2, n)) < 0.08
        steps = {"observation": self.rng.random((n, 2)).astype(np.float32), "reward": np.ones(n, np.float32)}
        for buffer in self.buffers:
            buffer.append(steps, envs=envs, terminated=ends[0], truncated=ends[1] & ~ends[0], autoreset="disabled")

    def add_episode(self) -> None:
        n = int(self.rng.integers(1, 12))
        steps = {"observation": self.rng.random((n, 2)).astype(np.float32), "reward": np.ones(n, np.float32)}
        for buffer in self.buffers:
            buffer.add_episode(steps, env=7, terminated=True)

    def sample(self) -> None:
        windows = self.windows[int(self.rng.integers(len(self.windows)))]
        n = int(self.rng.integers(1, 40))
        batch = self.all(lambda buffer: buffer.sample(n, windows))
        if batch is not None:
            self.seen = [*self.seen[-6:], batch["index"].numpy().copy()]

    def update(self) -> None:
        """Update steps of old batches: some are evicted, some come twice, and some values are 0."""
        if not self.seen:
            return
        index = np.concatenate(self.seen)
        index = index[self.rng.integers(0, len(index), int(self.rng.integers(1, 30)))]
        values = (self.rng.random(len(index)) * 10.0 ** self.rng.integers(-3, 3)).astype(np.float32)
        values[self.rng.random(len(index)) < 0.15] = 0.0
        kind = int(self.rng.integers(6))
        if kind == 0:
            values[int(self.rng.integers(len(values)))] = self.rng.choice([np.nan, -1.0, np.inf])
        if kind == 1:
            index[int(self.rng.integers(len(index)))] += self.rng.choice([10_000, -10_000], 3)
        if kind == 2:
            values[int(self.rng.integers(len(values)))] = 1e6  # another scale, and back
        given: Any = (
            torch.from_numpy(values) if kind % 2 else values.astype(np.float64 if kind == 4 else np.float32)
        )
        self.all(lambda buffer: buffer.update_priorities(index, given))

    def check(self) -> None:
        """All columns, counts and masses are the same."""
        samplers = self.samplers
        for sampler in samplers:
            sampler.follow()
        facts = [_facts(sampler) for sampler in samplers]
        for other in facts[1:]:
            _assert_same(facts[0], other)
        for key, tree in samplers[0]._trees.items():
            for sampler in samplers[1:]:
                _assert_same(_masses(tree, sampler), _masses(sampler._trees[key], sampler))


def _facts(sampler: PrioritySampler) -> dict[str, Any]:
    steps, masses = sampler.steps, sampler._masses.state_dict()
    columns = {name: c.values[: steps.size].numpy() for name, c in steps.columns.items()}
    dirty = {name: c.dirty[: steps.size] for name, c in steps.columns.items()}
    state = sampler.state_dict()
    return {
        "columns": columns,
        "dirty": dirty,
        "largest": sampler.priority_column.largest,
        "counts": (sampler.n_ignored, sampler.n_batches),
        "masses": {name: value for name, value in masses.items() if name != "ranks"},
        "places": {name: state["steps"][name] for name in ("stream", "episode", "home", "limit", "known")},
    }


def _masses(tree: PriorityTree, sampler: PrioritySampler) -> torch.Tensor:
    tree.follow(sampler._masses)
    return tree._tree.get(torch.arange(tree._tree.n))


def _assert_same(one: Any, other: Any) -> None:
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for name in one:
            _assert_same(one[name], other[name])
    elif isinstance(one, torch.Tensor | np.ndarray):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
    else:
        assert one == other


@pytest.fixture
def closing() -> Iterator[list[ReplayBuffer]]:
    buffers: list[ReplayBuffer] = []
    yield buffers
    for buffer in buffers:
        buffer.close()


@pytest.mark.parametrize("number", range(len(OPTIONS)))
@pytest.mark.parametrize("kind", range(len(WINDOWS)))
def test_all_paths_draw_update_and_keep_the_same(number: int, kind: int, closing: list[ReplayBuffer]) -> None:
    options, windows = OPTIONS[number], WINDOWS[kind]
    if options.over != "start":
        windows = tuple(w for w in windows if w.boundary != "cross")
    twins = Twins(options, windows, seed=17 * number + kind)
    closing += twins.buffers
    acts = [twins.append] * 6 + [twins.add_episode, twins.sample, twins.sample, twins.update, twins.update]
    twins.add_episode()
    for i in range(90):
        acts[int(twins.rng.integers(len(acts)))]()
        if i % 30 == 13:
            for buffer in twins.buffers:
                buffer.flush()
        if i % 9 == 0:
            twins.check()
    twins.check()
    assert twins.samplers[0].n_batches > 5


def test_steps_that_are_appended_one_by_one_need_no_search_for_what_has_changed(
    closing: list[ReplayBuffer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Open episodes that get longer are taken up by compiled loops alone."""
    buffer = ReplayBuffer(f"memory://twins-{next(_numbers)}", priorities=Priorities(), commit_seconds=None)
    closing.append(buffer)
    step = {"observation": np.zeros(2, np.float32), "reward": np.float32(0)}
    for _ in range(20):
        buffer.append(step)
    batch = buffer.sample(8, Windows())
    sampler = buffer.reader.priority_sampler
    assert sampler is not None
    monkeypatch.setattr(sampler.steps, "_follow_all", None)
    monkeypatch.setattr(PriorityTree, "_follow_growth", None)
    monkeypatch.setattr(PriorityTree, "update_steps", None)
    monkeypatch.setattr(sampler, "_checked_update", None)
    for _ in range(5):
        buffer.append(step)
        batch = buffer.sample(8, Windows())
        assert buffer.update_priorities(batch["index"], torch.rand(8)) == 0
    assert len(buffer.priorities()) == 25


def test_updates_may_be_strided_or_read_only_and_compile_nothing_new(closing: list[ReplayBuffer]) -> None:
    buffer = ReplayBuffer(f"memory://twins-{next(_numbers)}", priorities=Priorities(), commit_seconds=None)
    closing.append(buffer)
    buffer.add_episode({"reward": np.arange(9, dtype=np.float32)}, terminated=True)
    index = buffer.sample(8, Windows())["index"].numpy()
    buffer.update_priorities(index, np.ones(8, np.float32))
    n_compiled = [len(loop.signatures) for loop in (addresses_of, checked_values)]  # type: ignore[attr-defined]
    fixed, values = np.zeros((8, 6), np.int64), np.arange(16, dtype=np.float32)
    fixed[:, ::2] = index
    values.setflags(write=False)
    fixed.setflags(write=False)
    buffer.update_priorities(fixed[:, ::2], values[::2])
    buffer.update_priorities(torch.from_numpy(index.copy()), torch.arange(8.0, requires_grad=True))
    found = buffer.priorities()
    last = {int(t): float(i) for i, t in enumerate(index[:, 2])}
    assert {t: found[t] for t in last} == last
    assert n_compiled == [len(loop.signatures) for loop in (addresses_of, checked_values)]  # type: ignore[attr-defined]


def test_arrays_hold_what_a_draw_returns(closing: list[ReplayBuffer]) -> None:
    buffer = ReplayBuffer(f"memory://twins-{next(_numbers)}", priorities=Priorities(), commit_seconds=None)
    closing.append(buffer)
    buffer.add_episode({"reward": np.arange(9, dtype=np.float32)}, terminated=True)
    buffer.sample(1, Windows())
    sampler = buffer.reader.priority_sampler
    assert sampler is not None
    found = sampler.draw_arrays(5, Windows(), DrawScope(), CounterRng(3))
    assert found is not None
    _, drawn = sampler.draw(5, Windows(), DrawScope(), CounterRng(3))
    assert isinstance(found[1], DrawnArrays)
    for name, values in found[1]._asdict().items():
        _assert_same(values, getattr(drawn, name))
    counter = CounterRng(3)
    assert sampler.draw_arrays(5, Windows(), DrawScope(recent_steps=4), counter) is None
    assert (counter.counter, sampler.n_batches) == (0, 3)


class Counted(TorchDispatchMode):
    """Counts operations that compute something, and refuses those that the host would have to wait for."""

    VIEWS = (
        "alias",
        "as_strided",
        "detach",
        "empty",
        "expand",
        "select",
        "slice",
        "squeeze",
        "unbind",
        "unsqueeze_",
        "view",
    )
    WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "_unique2")

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in self.WAITING, f"{func} waits for the device"
        if name not in self.VIEWS:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("normalize", "most"), [("batch", 40), ("buffer", 43)])
def test_a_draw_by_tensor_operations_takes_few_of_them_and_never_waits(
    normalize: Any, most: int, closing: list[ReplayBuffer]
) -> None:
    """In a tree of a million leaves; 14 of the operations make random numbers."""
    buffer = ReplayBuffer(
        f"memory://twins-{next(_numbers)}",
        priorities=Priorities(normalize=normalize),
        compiled=False,
        commit_seconds=None,
        buffer_bytes="32MB",
    )
    closing.append(buffer)
    for _ in range(4):
        buffer.add_episode({"reward": np.zeros(250_000, np.float32)}, terminated=True)
    sampler = buffer.reader.priority_sampler
    assert sampler is not None
    batch = buffer.sample(64, Windows())
    buffer.update_priorities(batch["index"], torch.rand(64) + 0.1)
    buffer.sample(64, Windows())
    with Counted() as counted:
        sampler.draw(64, Windows(), DrawScope(), CounterRng(1))
    assert len(counted.names) <= most, counted.names
