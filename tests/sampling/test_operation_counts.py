"""How many tensor operations a batch takes without compiled loops: each is a kernel launch on a GPU."""

from __future__ import annotations

import uuid
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import trajstore
from trajstore import Field, Priorities, Reader, Schema, Windows

# They launch nothing: they look at memory in another way, or allocate it.
NOT_WORKING = {
    *("view", "_unsafe_view", "_reshape_alias", "slice", "select", "expand", "unsqueeze", "squeeze", "detach"),
    *("alias", "as_strided", "unbind", "t", "transpose", "permute", "lift_fresh", "split", "empty"),
}
SCHEMA = Schema(
    {
        "observation": Field("float32", (4,), final=True, chunk_rows=16),
        "action": Field("int64", chunk_rows=32),
        "reward": Field("float32", chunk_rows=64),
    }
)
TRANSITIONS, N_STEP = Windows.transitions(), Windows.transitions(n_step=3)


class Operations(TorchDispatchMode):
    """Records the working operations, with the shapes of their tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, list[torch.Size]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name not in NOT_WORKING:
            tensors = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
            self.seen.append((str(func), [tensor.shape for tensor in tensors]))
        return func(*args, **(kwargs or {}))


def resident_reader(*, in_parts: bool, **options: Any) -> Reader:
    """A reader of 12 episodes of 40 steps whose columns are resident; ``in_parts``: each episode is two spans."""
    store = trajstore.create(f"memory://operations-{uuid.uuid4().hex}", SCHEMA)
    steps = {
        "observation": np.zeros((40, 4), np.float32),
        "action": np.arange(40),
        "reward": np.ones(40, np.float32),
    }
    with store.writer(commit_seconds=None) as writer:
        if in_parts:
            for t in range(40):
                for env in range(12):
                    writer.append({name: value[t] for name, value in steps.items()}, env=env)
                if t == 20:
                    writer.commit()
            for env in range(12):
                writer.end_episode(env, terminated=True)
        else:
            for _ in range(12):
                writer.append_episode(steps, terminated=True)
    store.refresh()
    reader = Reader(store, compiled=False, **options)
    for windows in (Windows(), TRANSITIONS):
        list(reader.epoch(64, windows))
    assert reader.assembler.index.is_simple != in_parts
    return reader


def operations(reader: Reader, windows: Windows, **options: Any) -> list[tuple[str, list[torch.Size]]]:
    reader.sample(16, windows, **options)  # sums are made when a kind of window is first asked for
    with Operations() as mode:
        reader.sample(16, windows, **options)
    return mode.seen


def test_views_and_allocations_are_not_counted() -> None:
    x = torch.arange(6)
    with Operations() as mode:
        x.view(2, 3)[:, None].expand(2, 4, 3).unbind(0)
        torch.empty(3)
    assert not mode.seen
    with Operations() as mode:
        x + x.view(2, 3).t().reshape(-1)
    assert len(mode.seen) == 2


@pytest.mark.parametrize("in_parts", [False, True])
@pytest.mark.parametrize(
    ("windows", "most"),
    [
        (Windows(32), 40),
        (Windows(8, burn_in=2, bootstrap=3), 40),
        (TRANSITIONS, 40),
        (Windows(8, offsets={"observation": (-2, -1, 0)}), 42),
        (Windows(8, boundary="pad_both", pad="zero"), 52),
        (Windows(8, boundary="cross"), 50),
        (N_STEP, 60),
    ],
)
def test_a_batch_takes_few_operations(windows: Windows, most: int, in_parts: bool) -> None:
    seen = operations(resident_reader(in_parts=in_parts), windows)
    assert len(seen) <= most, seen


@pytest.mark.parametrize("in_parts", [False, True])
def test_planning_and_reading_leave_room_for_a_prioritised_draw(in_parts: bool) -> None:
    """Prioritised transitions take at most 60 operations, the draw of them at most 35."""
    reader = resident_reader(in_parts=in_parts, priorities=Priorities())
    index = reader.sample(16, TRANSITIONS)["index"]
    with Operations() as mode:
        reader.at(index, TRANSITIONS)
    n_without_draw = len(mode.seen)
    assert n_without_draw <= 35, mode.seen
    seen = operations(reader, TRANSITIONS)
    assert len(seen) - n_without_draw <= 35, seen
    assert len(seen) <= 60, seen


@pytest.mark.parametrize("in_parts", [False, True])
@pytest.mark.parametrize("windows", [Windows(32), TRANSITIONS, N_STEP, Windows(8, boundary="pad_both", pad="zero")])
def test_every_batch_is_made_by_the_same_operations(windows: Windows, in_parts: bool) -> None:
    """So that a graph of them can be captured: shapes and operations do not depend on what is drawn."""
    reader = resident_reader(in_parts=in_parts)
    assert operations(reader, windows) == operations(reader, windows)
