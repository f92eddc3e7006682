"""Hooks and checkpointers of TorchRL dump and load a TrajStorage; `torch.compile` passes by its calls."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what torchrl's own imports warn of
    pytest.importorskip("torchrl")
    from torchrl.data import (
        Flat2TED,
        FlatStorageCheckpointer,
        LazyTensorStorage,
        NestedStorageCheckpointer,
        ReplayBuffer,
        TED2Flat,
        TensorDictReplayBuffer,
    )

from tensordict import TensorDict

from trajstore import DataError, Windows
from trajstore.compat.torchrl import TrajStorage, WindowSampler


@pytest.fixture
def storage() -> Iterator[TrajStorage]:
    with TrajStorage(None, 50) as storage:
        yield storage


def ted(n: int) -> TensorDict:
    """Episodes of ten steps."""
    number = torch.arange(n)
    done = (number % 10 == 9)[:, None]
    flags = {"done": done, "terminated": done, "truncated": torch.zeros_like(done)}
    none = torch.zeros_like(done)
    return TensorDict(
        {
            "observation": number.float()[:, None],
            "action": number % 4,
            "done": none,
            "terminated": none,
            "truncated": none,
            "next": {"observation": number.float()[:, None] + 1, "reward": torch.ones(n, 1), **flags},
        },
        [n],
    )


def assert_same(found: TensorDict, expected: TensorDict) -> None:
    assert set(found.keys(True, True)) == set(expected.keys(True, True))
    for key in expected.keys(True, True):
        assert torch.equal(found[key].clone(), expected[key]), key


class Hook:
    """Remembers what it was called with, and changes nothing."""

    shift: int | None = None
    is_full: bool | None = None

    def __init__(self) -> None:
        self.calls: list[tuple[Any, int | None, bool | None]] = []

    def __call__(self, data: Any, path: Path | None = None, out: Any = None) -> Any:
        self.calls.append((len(data), self.shift, self.is_full))
        return data


def test_save_and_load_hooks_are_called(storage: TrajStorage, tmp_path: Path) -> None:
    rb = ReplayBuffer(storage=storage)
    save, load = Hook(), Hook()
    rb.register_save_hook(save)
    rb.register_load_hook(load)
    rb.extend(ted(30))
    rb.dumps(tmp_path)
    assert save.calls == [(50, 30, False)]
    rb.empty()
    rb.loads(tmp_path)
    assert len(load.calls) == 1
    assert_same(rb[:], ted(30))
    assert (rb.writer._cursor, storage.next_slot) == (30, 30)


@pytest.mark.parametrize("n", [30, 50])
def test_the_compact_form_of_torchrl_is_written_and_read_by_its_hooks(n: int, tmp_path: Path) -> None:
    with TrajStorage(None, 50) as storage, TrajStorage(None, 50) as other:
        rb = ReplayBuffer(storage=storage)
        rb.register_save_hook(TED2Flat())
        rb.extend(ted(n))
        rb.dumps(tmp_path)
        found = TensorDict.load(tmp_path / "storage")
        assert len(found["observation"]) >= n + n // 10  # an observation more for every episode
        again = ReplayBuffer(storage=other)
        again.register_load_hook(Flat2TED())
        again.loads(tmp_path)
        assert_same(again[:], ted(n))
        again.extend(ted(5))
        assert len(again) == min(n + 5, 50)


@pytest.mark.parametrize("kind", [FlatStorageCheckpointer, NestedStorageCheckpointer])
def test_checkpointers_of_torchrl_may_be_given(kind: Any, tmp_path: Path) -> None:
    with TrajStorage(None, 50) as storage, TrajStorage(tmp_path / "store", 50, fsync=False) as other:
        rb = ReplayBuffer(storage=storage, checkpointer=kind())
        rb.extend(ted(50))
        rb.dumps(tmp_path / "dump")
        again = ReplayBuffer(storage=other, checkpointer=kind())
        again.loads(tmp_path / "dump")
        assert_same(again[:], ted(50))
    with TrajStorage(tmp_path / "store", 50, fsync=False) as other:
        assert_same(other[:], ted(50))


def test_a_dump_with_pickled_objects_is_not_loaded(storage: TrajStorage, tmp_path: Path) -> None:
    rb = ReplayBuffer(storage=storage)
    rb.register_load_hook(Hook())
    rb.extend(ted(10))
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "other.pickle").touch()
    with pytest.raises(DataError, match="without pickled objects"):
        storage.loads(tmp_path)
    assert len(rb) == 10


def test_hooks_need_rows(storage: TrajStorage, tmp_path: Path) -> None:
    storage.register_save_hook(Hook())
    with pytest.raises(DataError, match="expected rows, because hooks"):
        storage.dumps(tmp_path)


def test_the_state_of_another_kind_of_storage_is_refused(storage: TrajStorage) -> None:
    theirs = LazyTensorStorage(50)
    theirs.set(range(10), ted(10))
    with pytest.raises(DataError, match="expected that of a TrajStorage, got that of another storage"):
        storage.load_state_dict(theirs.state_dict())
    ReplayBuffer(storage=storage).extend(theirs[:])
    assert_same(storage[:], ted(10))


# ---- torch.compile


@pytest.fixture
def _clean_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("_clean_compiler")
@pytest.mark.filterwarnings("ignore")  # of the compiler, about graph breaks in TorchRL
@pytest.mark.parametrize("kind", ["random", "windows"])
def test_compiled_functions_may_extend_and_sample(storage: TrajStorage, kind: str) -> None:
    options = {"sampler": WindowSampler(Windows(length=4))} if kind == "windows" else {}
    rb = TensorDictReplayBuffer(storage=storage, batch_size=8, **options)

    def step(data: TensorDict) -> TensorDict:
        rb.extend(data)
        return rb.sample()

    compiled = torch.compile(step, backend="eager")
    for n in range(1, 4):
        batch = compiled(ted(20))
        assert torch.equal(batch["action"], batch["observation"][:, 0].long() % 4)
        assert len(rb) == min(20 * n, 50)


@pytest.mark.usefixtures("_clean_compiler")
@pytest.mark.filterwarnings("ignore")
def test_the_first_write_may_be_compiled(storage: TrajStorage) -> None:
    compiled = torch.compile(lambda index, data: storage.set(index, data), backend="eager")
    for first in (0, 5):
        compiled(torch.arange(5) + first, torch.arange(5) + first)
    assert storage[:].tolist() == list(range(10))
