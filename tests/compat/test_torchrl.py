"""TorchRL's storages and ours do the same, through the same calls of TorchRL's replay buffers."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what torchrl's own imports warn of
    pytest.importorskip("torchrl")
    from torchrl.data import (
        LazyMemmapStorage,
        LazyTensorStorage,
        PrioritizedReplayBuffer,
        ReplayBuffer,
        ReplayBufferEnsemble,
        TensorDictMaxValueWriter,
        TensorDictPrioritizedReplayBuffer,
        TensorDictReplayBuffer,
        TensorStorage,
    )
    from torchrl.data.replay_buffers import (
        PrioritizedSampler,
        PrioritizedSliceSampler,
        SamplerWithoutReplacement,
        Sequence,
        SliceSampler,
        SliceSamplerWithoutReplacement,
        StalenessAwareSampler,
        StreamingSliceSampler,
        TensorDictRoundRobinWriter,
        traj,
    )

from tensordict import NonTensorData, TensorDict, tensorclass

import trajstore
from trajstore import ClosedError, DataError, SchemaError, StoreNotFoundError
from trajstore.compat.torchrl import TrajStorage, slot_table
from trajstore.compat.torchrl.paged_tensor import PagedTensor
from trajstore.compat.torchrl.row_structure import RowStructure

Make = Callable[..., TensorStorage]
KINDS = ("tensor", "memmap", "ours", "ours in a directory", "ours by pages")
OURS = KINDS[2:]


def transitions(n: int, first: int = 0, episode: int = 10) -> TensorDict:
    number = torch.arange(first, first + n)
    done = (number % episode == episode - 1)[:, None]
    return TensorDict(
        {
            "observation": {"state": number.float()[:, None].repeat(1, 3), "pixels": pixels(number)},
            "action": number % 4,
            "next": {
                "reward": number.float()[:, None],
                "done": done,
                "terminated": done,
                "truncated": ~done & done,
            },
        },
        batch_size=[n],
    )


def pixels(number: torch.Tensor) -> torch.Tensor:
    return (number[:, None, None] % 251 + torch.arange(64).reshape(8, 8)).to(torch.uint8)


def narrow_fields(structure: RowStructure) -> set[str]:
    return {path for path, field in structure.fields.items() if field.row_bytes <= 8}


@pytest.fixture
def make(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Makes storages of one kind."""
    made: list[Any] = []
    if request.param == "ours by pages":  # as if memory were short
        monkeypatch.setattr(slot_table, "_resident_fields", lambda structure, *_: narrow_fields(structure))

    def new(max_size: int, **options: Any) -> TensorStorage:
        kind = request.param
        if kind == "tensor":
            return LazyTensorStorage(max_size, **options)
        if kind == "memmap":
            return LazyMemmapStorage(max_size, **options)
        if kind == "ours in a directory":
            options = {"url": tmp_path / f"store{len(made)}", "fsync": False, **options}
        if kind == "ours by pages":
            options = {"cache_bytes": "16MiB", **options}
        made.append(TrajStorage(max_size=max_size, **options))
        return made[-1]

    yield new
    for storage in made:
        storage.close()


def trees_are_here() -> bool:
    """Whether TorchRL's compiled part can be loaded with this torch."""
    try:
        PrioritizedSampler(4, alpha=1.0, beta=1.0)
    except RuntimeError:
        return False
    return True


needs_trees = pytest.mark.skipif(not trees_are_here(), reason="TorchRL has no segment trees for this torch")
every_kind = pytest.mark.parametrize("make", KINDS, indirect=True)
ours = pytest.mark.parametrize("make", OURS, indirect=True)


def actual(data: TensorDict) -> TensorDict:
    """What is in it, read."""
    return data.exclude("index").clone()


def assert_same(found: TensorDict, expected: TensorDict) -> None:
    keys = {k for k in found.keys(True, True) if k != "index"}
    assert keys == set(expected.keys(True, True))
    for key in keys:
        assert torch.equal(found[key].clone(), expected[key]), key
        assert found[key].dtype == expected[key].dtype, key


# ---- the same tests for their storages and ours


@every_kind
def test_rows_come_back_as_they_were_written(make: Make) -> None:
    rb = TensorDictReplayBuffer(storage=make(500), batch_size=32)
    assert rb.extend(transitions(120)).tolist() == list(range(120))
    assert len(rb) == 120
    assert_same(rb[:], transitions(120))
    batch = rb.sample()
    assert_same(batch, transitions(500)[batch["index"]])
    assert rb.add(transitions(1, 120)[0]) == 120
    assert_same(rb[120:], transitions(1, 120))
    assert_same(rb[120], transitions(1, 120)[0])


@every_kind
def test_what_comes_round_overwrites_the_oldest(make: Make) -> None:
    rb = TensorDictReplayBuffer(storage=make(50))
    for first in range(0, 130, 13):
        rb.extend(transitions(13, first))
    expected = torch.tensor([100 + i if i < 30 else 50 + i for i in range(50)])
    assert len(rb) == 50
    assert rb.storage._is_full
    assert_same(rb[:], transitions(130)[expected])
    rb.add(transitions(1, 130)[0])
    assert rb[30]["action"] == 130 % 4
    batch = rb.sample(200)
    numbers = batch["next", "reward"][:, 0].long()
    assert torch.equal(numbers % 50, batch["index"])


@every_kind
def test_a_batch_larger_than_the_storage_leaves_its_last_rows(make: Make) -> None:
    rb = TensorDictReplayBuffer(storage=make(10))
    rb.extend(transitions(25))
    assert len(rb) == 10
    assert sorted(rb[:]["next", "reward"][:, 0].tolist()) == list(range(15, 25))


INDEXES: list[Any] = [
    0,
    -1,
    slice(3, 9),
    slice(None, None, 3),
    torch.tensor([5, 1, 5]),
    torch.tensor([[0, 1], [2, 3]]),
    [2, 4],
    range(3, 6),
    torch.arange(20) % 3 == 0,
    torch.tensor(4),
]


@every_kind
@pytest.mark.parametrize("index", INDEXES, ids=str)
def test_indexes_of_all_kinds_read_the_same(make: Make, index: Any) -> None:
    storage = make(40)
    storage.set(range(20), transitions(20))
    expected = transitions(20)[list(index) if isinstance(index, range) else index]
    assert_same(storage.get(index), expected)


@every_kind
@pytest.mark.parametrize("index", [3, slice(2, 5), torch.tensor([7, 2, 9]), [1, 0, 5], range(4, 7)], ids=str)
def test_indexes_of_all_kinds_write_the_same(make: Make, index: Any) -> None:
    rb = TensorDictReplayBuffer(storage=make(40))
    rb.extend(transitions(20))
    expected = transitions(20)
    new = transitions(3, 700) if not isinstance(index, int) else transitions(1, 700)[0]
    rb[index] = new.set("index", torch.zeros(new.batch_size, dtype=torch.int64))
    expected[list(index) if isinstance(index, range) else index] = new.exclude("index")
    assert_same(rb[:], expected)
    assert len(rb) == 20


@every_kind
def test_a_key_may_stand_for_an_index(make: Make) -> None:
    rb = TensorDictReplayBuffer(storage=make(40))
    rb.extend(transitions(20))
    assert torch.equal(rb["action"].clone(), torch.arange(20) % 4)
    assert torch.equal(rb["next", "reward"].clone()[:, 0], torch.arange(20.0))
    assert torch.equal(rb.storage.get(("observation", "pixels")).clone(), pixels(torch.arange(20)))


@every_kind
def test_what_is_contained_is_what_was_written(make: Make) -> None:
    storage = make(40)
    storage.set(range(20), transitions(20))
    assert 3 in storage
    assert -20 in storage
    assert 20 not in storage
    assert storage.contains(torch.tensor([0, 19, 20])).tolist() == [True, True, False]


@every_kind
def test_several_dimensions_are_indexed_where_asked(make: Make) -> None:
    storage = make(60, ndim=2)
    rb = TensorDictReplayBuffer(storage=storage, batch_size=16, dim_extend=0)
    block = transitions(40).reshape(10, 4)
    rb.extend(block)
    assert (len(rb), storage.shape) == (40, torch.Size([10, 4]))
    batch = rb.sample()
    assert batch.batch_size == torch.Size([16])
    row, column = batch["index"].unbind(-1)
    assert torch.equal(batch["next", "reward"][:, 0], (row * 4 + column).float())
    rb.extend(transitions(40, 40).reshape(10, 4))
    assert (len(rb), storage.max_size) == (60, 60)
    assert_same(rb[:].flatten(), torch.cat([transitions(20, 60), transitions(40, 20)]))
    assert_same(storage.flatten().get(slice(0, 8)), transitions(8, 60))


@every_kind
def test_plain_tensors_and_trees_are_stored_too(make: Make) -> None:
    rb = ReplayBuffer(storage=make(30), batch_size=8)
    rb.extend(torch.arange(12.0))
    assert torch.equal(rb[:].clone(), torch.arange(12.0))
    tree = ReplayBuffer(storage=make(30), batch_size=8)
    number = torch.arange(12)
    tree.extend(({"a": number, "b": (number.float()[:, None], number.bool())}, pixels(number)))
    first, second = tree[:]
    assert torch.equal(first["a"].clone(), number)
    assert torch.equal(first["b"][0].clone(), number.float()[:, None])
    assert torch.equal(second.clone(), pixels(number))
    first, second = tree.sample()
    assert torch.equal(second, pixels(first["a"]))
    single = ReplayBuffer(storage=make(30))
    single.extend([torch.ones(2), torch.zeros(2)])
    assert single[:].tolist() == [[1, 1], [0, 0]]


@tensorclass  # type: ignore[untyped-decorator]
class Transition:
    action: torch.Tensor
    reward: torch.Tensor


@every_kind
def test_tensorclasses_come_back_as_what_they_are(make: Make) -> None:
    rb = ReplayBuffer(storage=make(30), batch_size=8)
    number = torch.arange(12)
    rb.extend(Transition(action=number, reward=number.float(), batch_size=[12]))
    batch = rb.sample()
    assert isinstance(batch, Transition)
    assert torch.equal(batch.action.float(), batch.reward)


DTYPES = (torch.bool, torch.uint8, torch.int16, torch.int32, torch.float16, torch.bfloat16, torch.float64)


@every_kind
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes_stay(make: Make, dtype: torch.dtype) -> None:
    rb = ReplayBuffer(storage=make(30))
    data = TensorDict({"x": (torch.arange(24) % 2).to(dtype), "y": torch.zeros(24, 8, 8)}, batch_size=[24])
    rb.extend(data)
    found = rb[torch.arange(24)]["x"]
    assert found.dtype == dtype
    assert torch.equal(found.float(), (torch.arange(24) % 2).float())


@pytest.mark.filterwarnings("ignore:Loading the storage on an uninitialized TensorDict")
@every_kind
def test_state_dicts_restore_rows_and_the_cursor(make: Make) -> None:
    rb = TensorDictReplayBuffer(storage=make(30), batch_size=4)
    rb.extend(transitions(40))
    again = TensorDictReplayBuffer(storage=make(30), batch_size=4)
    again.load_state_dict(rb.state_dict())
    assert_same(again[:], actual(rb[:]))
    for one in (rb, again):
        one.extend(transitions(5, 40))
    assert_same(again[:], actual(rb[:]))
    again.load_state_dict(rb.state_dict())  # over what is there
    assert len(again) == 30


@every_kind
def test_dumps_restore_rows_and_the_cursor(make: Make, tmp_path: Path) -> None:
    rb = TensorDictReplayBuffer(storage=make(30), batch_size=4)
    rb.extend(transitions(40))
    rb.dumps(tmp_path / "dump")
    again = TensorDictReplayBuffer(storage=make(30), batch_size=4)
    again.loads(tmp_path / "dump")
    assert_same(again[:], actual(rb[:]))
    for one in (rb, again):
        one.extend(transitions(5, 40))
    assert_same(again[:], actual(rb[:]))


@every_kind
def test_an_emptied_buffer_holds_nothing_and_starts_over(make: Make) -> None:
    rb = TensorDictReplayBuffer(storage=make(30), batch_size=4)
    for first in (0, 100, 200):
        rb.extend(transitions(20, first))
        assert rb.sample()["next", "reward"].min() >= first
        assert_same(rb[:], transitions(20, first))
        rb.empty()
        assert len(rb) == 0


@pytest.mark.parametrize("make", [kind for kind in KINDS if kind != "memmap"], indirect=True)  # theirs is locked
def test_the_documented_example_of_all_in_order(make: Make) -> None:
    rb = TensorDictReplayBuffer(storage=make(10))
    assert rb.extend(TensorDict({"obs": torch.arange(3)}, [3])).tolist() == [0, 1, 2]
    data = rb.read_all_in_order()
    assert (data == rb[:]).all()
    data["target"] = data["obs"] + 1
    rb.write_all(data)
    assert (rb[:] == data).all()
    rb.extend(TensorDict({"obs": torch.arange(3), "target": torch.arange(3)}, [3]))
    assert rb[:]["target"].tolist() == [1, 2, 3, 0, 1, 2]
    rb.write_all(rb.read_all_in_order(2).clone().zero_(), 2)
    assert rb[:]["obs"].tolist() == [0, 0, 2, 0, 1, 2]


@every_kind
def test_max_value_writers_keep_the_best(make: Make) -> None:
    rb = TensorDictReplayBuffer(storage=make(10), writer=TensorDictMaxValueWriter(rank_key=("next", "reward")))
    order = torch.randperm(200, generator=torch.Generator().manual_seed(0))
    for chosen in order.split(20):
        rb.extend(transitions(200)[chosen])
    assert sorted(rb[:]["next", "reward"][:, 0].tolist()) == list(range(190, 200))


@needs_trees
@every_kind
def test_priorities_draw_what_they_name(make: Make) -> None:
    rb = TensorDictPrioritizedReplayBuffer(alpha=1.0, beta=1.0, storage=make(40), batch_size=16)
    data = transitions(30).set("td_error", torch.full((30,), 1e-9))
    data["td_error"][7] = 1e9
    rb.extend(data)
    batch = rb.sample()
    assert set(batch["index"].tolist()) == {7}
    batch["td_error"] = torch.full((16,), 1e-9)
    batch["td_error"][:] = 0.0
    rb.update_tensordict_priority(batch)
    assert "priority_weight" in batch.keys() or "_weight" in batch.keys()  # noqa: SIM118
    plain = PrioritizedReplayBuffer(alpha=0.7, beta=0.9, storage=make(40), batch_size=16)
    plain.extend(transitions(30))
    _, info = plain.sample(return_info=True)
    plain.update_priority(info["index"], torch.rand(16))
    assert len(plain.sample()) == 16


SLICES: dict[str, Callable[[], Any]] = {
    "slices": lambda: SliceSampler(slice_len=5, end_key=("next", "done")),
    "slices, cached": lambda: SliceSampler(slice_len=5, end_key=("next", "done"), cache_values=True),
    "slices by number": lambda: SliceSampler(num_slices=2, traj_key="episode"),
    "without replacement": lambda: SliceSamplerWithoutReplacement(slice_len=5, end_key=("next", "done")),
    "streaming": lambda: StreamingSliceSampler(slice_len=5, end_key=("next", "done")),
}


if trees_are_here():
    SLICES["by priority"] = lambda: PrioritizedSliceSampler(
        max_capacity=64, alpha=0.5, beta=0.5, slice_len=5, end_key=("next", "done")
    )


@every_kind
@pytest.mark.parametrize("name", SLICES)
def test_slices_lie_within_episodes(make: Make, name: str) -> None:
    rb = TensorDictReplayBuffer(storage=make(64), sampler=SLICES[name](), batch_size=10)
    for first in (0, 30, 60, 90):
        data = transitions(30, first)
        rb.extend(data.set("episode", torch.arange(first, first + 30) // 10))
        number = rb.sample()["next", "reward"][:, 0].reshape(-1, 5).long()
        assert (number.diff(dim=1) == 1).all()
        assert (number // 10 == number[:, :1] // 10).all()
        assert int(number.min()) >= max(0, first + 30 - 64)


@every_kind
@pytest.mark.parametrize("boundary", ["pad", "stop", "include_reset"])
def test_sequences_have_their_masks(make: Make, boundary: str) -> None:
    unit = Sequence(length=4, burn_in=2, bootstrap=1, episode_boundary=boundary)
    rb = TensorDictReplayBuffer(storage=make(64), sample_unit=unit, batch_size=8)
    for first in (0, 50):
        rb.extend(transitions(50, first))
    batch = rb.sample()
    number = batch["next", "reward"][:, 0].reshape(8, 7)
    valid = batch["validity_mask"].reshape(8, 7)
    assert ((number.diff(dim=1) == 1) | ~(valid[:, 1:] & valid[:, :-1])).all()
    assert batch["learning_mask"].reshape(8, 7)[0].tolist() == [False] * 2 + [True] * 4 + [False]


@every_kind
def test_other_samplers_of_theirs_work(make: Make) -> None:
    once = TensorDictReplayBuffer(storage=make(40), sampler=SamplerWithoutReplacement(), batch_size=10)
    once.extend(transitions(40))
    seen = torch.cat([once.sample()["index"] for _ in range(4)])
    assert sorted(seen.tolist()) == list(range(40))
    stale = TensorDictReplayBuffer(storage=make(40), sampler=StalenessAwareSampler(max_staleness=3), batch_size=10)
    stale.extend(transitions(30).set("policy_version", torch.arange(30)))
    stale._sampler.consumer_version = 30
    assert stale.sample()["index"].min() >= 27
    used_up = TensorDictReplayBuffer(storage=make(40), consume_after_n_samples=1, batch_size=10)
    used_up.extend(transitions(20))
    drawn = torch.cat([used_up.sample()["index"] for _ in range(2)])
    assert sorted(drawn.tolist()) == list(range(20))
    used_up.extend(transitions(15, 20))
    assert used_up.sample()["next", "reward"].min() >= 20


@every_kind
def test_transforms_work_both_ways(make: Make) -> None:
    from torchrl.envs import Compose, DoubleToFloat, RenameTransform

    rb = TensorDictReplayBuffer(storage=make(40), batch_size=6)
    rb.append_transform(Compose(RenameTransform(["action"], ["move"]), DoubleToFloat(in_keys=[("next", "reward")])))
    rb.extend(transitions(20))
    batch = rb.sample()
    assert torch.equal(batch["move"], batch["index"] % 4)


@every_kind
def test_batches_may_be_prefetched(make: Make) -> None:
    rb = TensorDictReplayBuffer(storage=make(100), batch_size=16, prefetch=3)
    rb.extend(transitions(60))
    for first in range(60, 200, 10):
        batch = rb.sample()
        assert torch.equal(batch["observation", "pixels"], pixels(batch["next", "reward"][:, 0].long()))
        rb.extend(transitions(10, first))


@every_kind
def test_ensembles_draw_from_several(make: Make) -> None:
    members = [TensorDictReplayBuffer(storage=make(40), batch_size=8) for _ in range(2)]
    for i, member in enumerate(members):
        member.extend(transitions(30, 100 * i))
    both = ReplayBufferEnsemble(*members, sample_from_all=True, batch_size=8)
    batch = both.sample()
    reward = batch["next", "reward"][..., 0]
    assert reward.shape == (2, 4)
    assert (reward[0] < 30).all()
    assert (reward[1] >= 100).all()


@every_kind
def test_trajectories_are_queried(make: Make) -> None:
    rb = TensorDictReplayBuffer(storage=make(64), batch_size=8)
    rb.extend(transitions(60).set("episode", torch.arange(60) // 10))
    found = rb.query(traj.reward.sum() > 400, trajectory_key="episode")
    assert len(found) == 2


@every_kind
def test_late_updates_meet_only_the_row_that_was_meant(make: Make) -> None:
    writer = TensorDictRoundRobinWriter(track_generations=True)
    rb = TensorDictReplayBuffer(storage=make(20), writer=writer, batch_size=20)
    rb.extend(transitions(20))
    batch = rb.sample()
    rb.extend(transitions(10, 20))
    late = rb.update_if_present(
        index=batch["index"], generation=batch["index_generation"], patch={"action": torch.full((20,), 9)}
    )
    assert late.updated is not None
    assert (rb[:]["action"][:10] != 9).all()
    assert set(rb[:]["action"][10:].tolist()) <= {9, 0, 1, 2, 3}
    assert 9 in rb[:]["action"][10:]


@every_kind
def test_values_are_set_in_place(make: Make) -> None:
    rb = TensorDictReplayBuffer(storage=make(20))
    rb.extend(transitions(15))
    rb.set_at_("action", torch.tensor([9, 9]), torch.tensor([3, 5]))
    assert rb[:]["action"][[3, 5]].tolist() == [9, 9]
    rb.set_("action", torch.zeros(15, dtype=torch.int64))
    assert not rb[:]["action"].any()
    rb.update_({"action": torch.ones(15, dtype=torch.int64)})
    assert rb[:]["action"].all()


# ---- ours


@ours
def test_a_storage_that_is_closed_and_opened_again_goes_on(make: Make, tmp_path: Path) -> None:
    options = {"url": tmp_path / "run"}
    with make(50, **options) as storage:
        rb = TensorDictReplayBuffer(storage=storage)
        rb.extend(transitions(70))
        rb[3] = transitions(1, 500)[0].set("index", torch.tensor(3))
        rb.set_at_("action", torch.tensor([9]), torch.tensor([4]))
        expected = actual(rb[:])
    with make(50, **options) as again:
        assert (len(again), again.next_slot) == (50, 20)
        assert_same(again[:], expected)
        rb = TensorDictReplayBuffer(storage=again)
        again.resume(rb)
        rb.extend(transitions(5, 70))
        expected[20:25] = transitions(5, 70)
        assert_same(rb[:], expected)
    with make(60, **options) as larger:  # in order of time, as rows are in a ring that is not full
        assert_same(larger[:], torch.cat([expected[25:], expected[:25]]))
        assert larger.next_slot == 50
    with pytest.raises(DataError, match="max_size: expected at least the 50 slots"):
        make(40, **options)


@ours
def test_no_slice_goes_from_the_newest_row_of_a_ring_to_its_oldest_where_it_becomes_larger(
    make: Make, tmp_path: Path
) -> None:
    def numbered(start: int, stop: int) -> TensorDict:
        number, never = torch.arange(start, stop), torch.zeros(stop - start, 1, dtype=torch.bool)
        return TensorDict({"number": number, "next": {"done": never}}, batch_size=[len(number)])

    with make(20, url=tmp_path / "run") as storage:
        rb = TensorDictReplayBuffer(storage=storage)
        rb.extend(numbered(0, 18))
        rb.extend(numbered(18, 30))
    for n_slots, stop in ((40, 30), (40, 35), (80, 60)):
        with make(n_slots, url=tmp_path / "run") as storage:
            sampler = SliceSampler(slice_len=4, end_key=("next", "done"))
            rb = TensorDictReplayBuffer(storage=storage, sampler=sampler, batch_size=400)
            storage.resume(rb)
            if (written := int(rb[:]["number"].max()) + 1) < stop:
                rb.extend(numbered(written, stop))
            assert (rb.sample()["number"].reshape(-1, 4).diff(dim=1) == 1).all()
            newest = torch.arange(stop - len(rb), stop)
            assert torch.equal(rb.read_all_in_order()["number"], newest)


@ours
def test_a_full_ring_loads_into_one_of_its_size_only(make: Make, tmp_path: Path) -> None:
    full, half = make(20), make(20)
    full.set(range(20), transitions(20))
    half.set(range(10), transitions(10))
    for i, (storage, other) in enumerate([(full, make(30)), (half, make(10))]):
        storage.dumps(tmp_path / str(i))
        loads = (
            lambda storage=storage, other=other: other.load_state_dict(storage.state_dict()),
            lambda i=i, other=other: other.loads(tmp_path / str(i)),
        )
        for load in loads:
            with pytest.raises(DataError, match="max_size: expected 20, the size that the rows come from"):
                load()
        assert len(other) == 0
        same = make(20)
        same.loads(tmp_path / str(i))
        assert_same(same[:], actual(storage[:]))


@ours
@pytest.mark.parametrize("first", ["add", "extend"])
def test_max_value_writers_may_add_and_extend(make: Make, first: str) -> None:
    storage = make(10)
    rb = TensorDictReplayBuffer(
        storage=storage, writer=TensorDictMaxValueWriter(rank_key=("next", "reward")), batch_size=4
    )
    for way in (first, "add", "extend", "add", "extend"):
        if way == "add":
            rb.add(transitions(1, len(rb))[0])
        else:
            rb.extend(transitions(2, len(rb)))
    assert_same(rb[:].exclude("index"), transitions(len(rb)))
    assert rb[:].get("index", torch.arange(len(rb))).tolist() == list(range(len(rb)))


@ours
def test_rows_past_one_that_was_never_written_do_not_count(make: Make, tmp_path: Path) -> None:
    options = {"url": tmp_path / "run"}
    with make(10, **options) as storage:
        rb = TensorDictReplayBuffer(storage=storage)
        rb.extend(transitions(3))
        rb[-1] = transitions(1, 900)[0]  # slot 9
        rb.extend(transitions(1, 3))
        assert_same(rb[:], transitions(4))
    with make(10, **options) as storage:
        assert (len(storage), storage.next_slot) == (4, 4)
        rb = TensorDictReplayBuffer(storage=storage)
        storage.resume(rb)
        rb.extend(transitions(5, 4))
        assert_same(rb[:], torch.cat([transitions(9), transitions(1, 900)]))


@ours
def test_no_rows_can_be_read_too(make: Make) -> None:
    storage = make(20)
    storage.set(range(10), transitions(10))
    for none in (torch.arange(0), slice(3, 3), torch.zeros(10, dtype=torch.bool)):
        assert_same(storage[none], transitions(0))


def test_what_is_too_little_memory_is_said_at_once_and_what_would_be_enough() -> None:
    wide = TensorDict({"wide": torch.zeros(20, 5000)}, batch_size=[20])
    with (
        TrajStorage(max_size=10_000, cache_bytes="1MiB") as storage,
        pytest.raises(ValueError, match=r"cache_bytes: expected at least 13701888, .* got 1048576"),
    ):
        storage.set(range(20), wide)
    with TrajStorage(max_size=10_000, cache_bytes=13701888) as storage:
        for first in range(0, 400, 20):
            storage.set(range(first, first + 20), wide)
            assert storage[torch.arange(first)]["wide"].shape == (first, 5000)
    narrow = TensorDict({"number": torch.arange(5000)}, batch_size=[5000])
    with TrajStorage(max_size=10_000, buffer_bytes="16KB") as storage:  # less than one call brings
        storage.set(range(5000), narrow)
        assert torch.equal(storage[:]["number"], narrow["number"])


@ours
def test_max_value_writers_go_on_too(make: Make, tmp_path: Path) -> None:
    for first in (0, 1000):
        with make(10, url=tmp_path / "run") as storage:
            rb = TensorDictReplayBuffer(
                storage=storage, writer=TensorDictMaxValueWriter(rank_key=("next", "reward"))
            )
            storage.resume(rb)
            rb.extend(transitions(6, first))
            rb.extend(transitions(6, first + 500))
            rb.extend(transitions(3, 100))
            found = sorted(rb[:]["next", "reward"][:, 0].tolist())
    assert found == sorted([*range(1000, 1006), *range(1500, 1506)])[-10:]


@ours
@pytest.mark.parametrize("kind", ["tensor", "tree"])
def test_trees_are_found_again_as_they_were(make: Make, kind: str, tmp_path: Path) -> None:
    number = torch.arange(12)
    data: Any = number if kind == "tensor" else ({"a": number, "b": [number.float()[:, None]]}, pixels(number))
    with make(20, url=tmp_path / "run") as storage:
        storage.set(range(12), data)
    with make(20, url=tmp_path / "run") as again:
        found = again[:]
        if kind == "tensor":
            assert torch.equal(found.clone(), number)
            return
        assert isinstance(found, tuple)
        assert torch.equal(found[0]["b"][0].clone(), number.float()[:, None])
        assert torch.equal(found[1].clone(), pixels(number))


@ours
def test_a_dump_fits_a_storage_of_another_size_or_is_refused(make: Make, tmp_path: Path) -> None:
    storage = make(30)
    storage.set(range(25), transitions(25))
    storage.dumps(tmp_path / "dump")
    storage.set(range(3), transitions(3, 100))
    storage.dumps(tmp_path / "dump")  # in its place
    larger, smaller = make(100), make(20)
    larger.loads(tmp_path / "dump")
    assert_same(larger[:], actual(storage[:]))
    smaller.set(range(5), transitions(5, 900))
    for load in (lambda: smaller.loads(tmp_path / "dump"), lambda: smaller.load_state_dict(storage.state_dict())):
        with pytest.raises(DataError, match="max_size: expected at least the 25 rows that are loaded, got 20"):
            load()
    assert_same(smaller[:], transitions(5, 900))
    assert not list((tmp_path / "dump").rglob("*.pkl"))
    with pytest.raises(StoreNotFoundError, match="expected a dump of a TrajStorage"):
        larger.loads(tmp_path / "nowhere")
    assert len(larger) == 25
    empty = make(10)
    empty.dumps(tmp_path / "empty")
    larger.loads(tmp_path / "empty")
    assert len(larger) == 0


@ours
def test_bad_rows_are_refused_by_name_and_change_nothing(make: Make) -> None:
    storage = make(30)
    storage.set(range(10), transitions(10))
    less, other, wide = (transitions(2) for _ in range(3))
    del less["action"]
    other["action"] = other["action"].int()
    wide["next", "reward"] = torch.zeros(2, 2)
    with pytest.raises(DataError, match="'action' is missing"):
        storage.set(range(2), less)
    with pytest.raises(DataError, match=r"'action': expected int64 of shape \(\) as before, got torch.int32"):
        storage.set(range(2), other)
    with pytest.raises(DataError, match=r"'next/reward': expected float32 of shape \(1,\)"):
        storage.set(range(2), wide)
    with pytest.raises(DataError, match="expected as many slots as rows, got 3 slots and 2 rows"):
        storage.set(range(3), transitions(2))
    with pytest.raises(DataError, match="index: expected one, as only whole rows are written"):
        storage.set((0, 1), transitions(2))
    with pytest.raises(DataError, match="'text' is new"):
        storage.set(range(2), transitions(2).set("text", NonTensorData("x", batch_size=[2])))
    with pytest.raises(DataError, match="expected a tensor, got str"):
        storage.set(0, {"a": "text"})
    more = transitions(2).set("more", torch.ones(2))
    with pytest.raises(DataError, match="expected as many slots as rows"):
        storage[slice(None)] = more
    with pytest.raises(DataError, match="'action': expected int64"):
        storage[slice(0, 2)] = more.set("action", other["action"])
    assert len(storage) == 10
    assert_same(storage[:], transitions(10))
    storage = make(30)
    with pytest.raises(DataError, match="expected as many slots as rows"):
        storage.set(range(3), more)
    storage.set(range(10), transitions(10))  # nothing is left of what was refused
    assert_same(storage[:], transitions(10))


def test_a_store_that_no_storage_wrote_is_refused(tmp_path: Path) -> None:
    with trajstore.create(tmp_path / "0").writer() as writer:
        writer.append_episode({"observation": torch.zeros(3, 2)})
    with pytest.raises(SchemaError, match="expected a store that TrajStorage has written"):
        TrajStorage(tmp_path, 10)


def test_a_store_of_episodes_is_no_place_for_a_storage(tmp_path: Path) -> None:
    with trajstore.create(tmp_path / "run").writer() as writer:
        writer.append_episode({"observation": torch.zeros(3, 2)})
    with pytest.raises(DataError, match=r"run: is itself a store of episodes.* give it another URL"):
        TrajStorage(tmp_path / "run", 10)
    with pytest.raises(TypeError, match=r"url: expected a path.*, got 1000; give a size as max_size=1000"):
        TrajStorage(1000)  # type: ignore[arg-type]


@ours
def test_rows_with_new_keys_are_refused_where_they_are_added(make: Make) -> None:
    storage = make(30)
    rb = TensorDictReplayBuffer(storage=storage)
    rb.extend(transitions(10))
    with pytest.raises(DataError, match=r"field 'more' is new; .* then call storage.resume\(buffer\)"):
        rb.extend(transitions(3, 10).set("more", torch.ones(3)))
    with pytest.warns(UserWarning, match="rows from slot 13 on do not count while slot 10 is empty"):
        rb.extend(transitions(3, 900))
    storage.resume(rb)
    rb.extend(transitions(3, 10))
    assert_same(rb[:], torch.cat([transitions(13), transitions(3, 900)]))
    rb.empty()
    rb.extend(transitions(3).set("more", torch.ones(3)))  # nothing is held that lacks it
    assert rb[:]["more"].tolist() == [1, 1, 1]


def test_a_storage_is_used_until_it_is_closed_and_cannot_be_copied() -> None:
    storage = TrajStorage(max_size=10)
    with pytest.raises(TypeError, match="cannot be copied"):
        copy.deepcopy(storage)
    storage.set(range(2), transitions(2))
    storage.close()
    storage.close()
    with pytest.raises(ClosedError, match="the storage is closed"):
        storage.set(range(2), transitions(2))
    with pytest.raises(ValueError, match="max_size"):
        TrajStorage(max_size=0)


# ---- pages


def test_what_does_not_fit_is_read_by_pages_and_narrow_fields_are_not(tmp_path: Path) -> None:
    with TrajStorage(tmp_path, 4000, cache_bytes=8_000_000, fsync=False) as storage:
        for first in range(0, 6000, 500):
            data = transitions(500, first).exclude(("observation", "pixels"))
            data["observation", "frame"] = torch.full((500, 4096), 1, dtype=torch.uint8) * (first // 500)
            storage.set(torch.arange(first, first + 500) % 4000, data)
        paged = {path for path, leaf in storage.table.leaves.items() if isinstance(leaf, PagedTensor)}
        assert paged == {"td1/observation/frame"}
        whole = storage[:]
        assert isinstance(whole["observation", "frame"], PagedTensor)  # not read yet
        assert not isinstance(whole["next", "done"], PagedTensor)
        index = torch.randint(4000, (256,), generator=torch.Generator().manual_seed(0))
        batch = storage.get(index)
        assert not isinstance(batch["observation", "frame"], PagedTensor)
        assert torch.equal(batch["observation", "frame"][:, 0].long(), batch["next", "reward"][:, 0].long() // 500)
        assert storage.table.log._reader.stats()["cache_bytes"] <= 8_000_000
    with TrajStorage(tmp_path, 4000, cache_bytes=8_000_000, fsync=False) as again:
        found = again.get(index)
        assert torch.equal(found["observation", "frame"], batch["observation", "frame"])


def test_pages_are_read_for_whatever_is_done_with_them_and_never_changed() -> None:
    rows = torch.arange(60.0).reshape(20, 3)
    asked: list[int] = []

    def read(slots: torch.Tensor) -> torch.Tensor:
        asked.append(len(slots))
        return rows[slots]

    paged = PagedTensor(read, range(20), (3,), torch.float32, torch.device("cpu"))
    part = paged[4:16:2][1:]
    assert (part.shape, asked) == ((5, 3), [])
    assert torch.equal(part + 0, rows[6:16:2])
    assert torch.equal(paged[-1], rows[-1])
    assert torch.equal(paged[torch.tensor([3, -1])], rows[[3, -1]])
    assert torch.equal(paged[torch.tensor([3, 3, 5]), torch.tensor([0, 1, 2])], rows[[3, 3, 5], [0, 1, 2]])
    assert torch.equal(paged[torch.arange(20) > 17], rows[18:])
    assert torch.equal(paged.index_select(0, torch.tensor([1])), rows[1:2])
    assert asked == [5, 1, 2, 2, 2, 1]
    assert torch.equal(paged[:, 1], rows[:, 1])
    assert torch.equal(torch.stack([paged, paged]), torch.stack([rows, rows]))
    assert (paged == rows).all()
    assert "PagedTensor" in repr(paged)
    with pytest.raises(IndexError, match="expected -20 to 19, got 20 to 20"):
        paged[torch.tensor([20])]
    with pytest.raises(DataError, match="cannot be changed in place"):
        paged.zero_()


def test_options_of_the_writer_are_checked_before_the_first_rows(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"unknown options: 'size' \(did you mean 'max_size'\?\)"):
        TrajStorage(tmp_path / "storage", size=100)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="commit_steps: expected an integer"):
        TrajStorage(tmp_path / "storage", commit_steps=0)
