"""A TrajStorage takes text and JSON, TensorDicts without tensors, and elements of several dimensions."""

from __future__ import annotations

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
        LazyTensorStorage,
        ReplayBuffer,
        ReplayBufferEnsemble,
        TensorDictReplayBuffer,
    )

from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict, tensorclass

from trajstore import DataError
from trajstore.compat.torchrl import TrajStorage, slot_table

Make = Callable[..., TrajStorage]


@pytest.fixture(params=["in memory", "by pages"])
def make(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Makes storages that keep all fields in memory, or only narrow ones."""
    made: list[TrajStorage] = []
    if request.param == "by pages":
        monkeypatch.setattr(
            slot_table,
            "_resident_fields",
            lambda structure, *_: {path for path, field in structure.fields.items() if field.row_bytes <= 8},
        )

    def new(max_size: int, **options: Any) -> TrajStorage:
        made.append(TrajStorage(max_size=max_size, **options))
        return made[-1]

    yield new
    for storage in made:
        storage.close()


def block(n_envs: int, n_steps: int) -> TensorDict:
    number = torch.arange(n_envs * n_steps).reshape(n_envs, n_steps)
    wide = number[..., None].float().repeat(1, 1, 16)
    return TensorDict({"number": number, "wide": wide}, [n_envs, n_steps])


# ---- several dimensions


def test_everything_is_read_and_written_in_order_where_a_buffer_has_two_dimensions(make: Make) -> None:
    rb = TensorDictReplayBuffer(storage=make(12, ndim=2))
    rb.extend(block(2, 6))
    everything = rb.read_all_in_order()
    assert torch.equal(everything["number"].clone(), block(2, 6)["number"])
    everything["target"] = everything["number"] + 1
    rb.write_all(everything)
    assert torch.equal(rb[:]["target"].clone(), block(2, 6)["number"] + 1)
    assert torch.equal(rb[:]["wide"].clone(), block(2, 6)["wide"])


def test_only_the_first_entries_are_written_where_an_end_is_given(make: Make) -> None:
    rb = TensorDictReplayBuffer(storage=make(30, ndim=2))  # it is not full: TorchRL's own storage refuses this
    rb.extend(block(2, 6))
    first = rb.read_all_in_order(end=1)
    first["number"] = first["number"] + 100
    first["target"] = first["number"] + 1
    rb.write_all(first, end=1)
    assert rb[:]["number"].tolist() == [[*range(100, 106)], [*range(6, 12)]]
    assert rb[:]["target"].tolist() == [[*range(101, 107)], [0] * 6]
    assert len(rb) == 12


def test_what_was_read_may_be_written_back_where_it_was_or_elsewhere(make: Make) -> None:
    rb = TensorDictReplayBuffer(storage=make(10))
    rb.extend(TensorDict({"number": torch.arange(6)}, [6]))
    rb.write_all(rb.read_all_in_order())  # views of the storage's own memory
    rb[:4] = rb[2:]
    assert rb[:]["number"].tolist() == [2, 3, 4, 5, 4, 5]
    rb.extend(rb[:2])
    assert rb[:]["number"].tolist() == [2, 3, 4, 5, 4, 5, 2, 3]


@pytest.mark.parametrize(
    "index",
    [
        (0, slice(1, 2)),
        (slice(None), slice(0, 1)),
        (torch.tensor([3, 0, 3]), torch.tensor([1, 0, 0])),
        (-1, 0),
        (torch.tensor([True, False, True, False, False]), 1),
        ([1, 2], slice(None)),
    ],
    ids=str,
)
def test_elements_are_written_at_indexes_of_all_kinds(make: Make, index: Any) -> None:
    storage, theirs = make(10, ndim=2), LazyTensorStorage(10, ndim=2)
    for one in (storage, theirs):
        one.set(range(5), block(5, 2))
        value = block(5, 2)[index].clone()
        value["number"] = value["number"] + 100
        one[index] = value
    found, expected = storage[:].clone(), theirs[:5]
    assert torch.equal(found["number"], expected["number"])
    assert torch.equal(found["wide"], expected["wide"])


def test_elements_that_do_not_fit_are_refused_and_change_nothing(make: Make) -> None:
    storage = make(10, ndim=2)
    storage.set(range(5), block(5, 2))
    with pytest.raises(DataError, match="expected at most 2 parts"):
        storage[0, 0, 0] = TensorDict({"number": torch.tensor(1)}, [])
    with pytest.raises(DataError, match=r"'number': expected torch.int64 as before, got torch.float32"):
        storage[0, 0] = TensorDict({"number": torch.tensor(1.0)}, [])
    with pytest.raises(DataError, match=r"'wide': expected shape \(16,\) as before, got \(3,\)"):
        storage[0, 0] = TensorDict({"wide": torch.ones(3)}, [])
    with pytest.raises(DataError, match=r"'number': expected values for shape \(5,\), got \(3,\)"):
        storage[:, 0] = TensorDict({"number": torch.ones(3, dtype=torch.int64)}, [3])
    with pytest.raises(IndexError, match="expected -5 to 4, got 5 to 5"):
        storage[5, 0] = TensorDict({"number": torch.tensor(1)}, [])
    with pytest.raises(DataError, match="expected integers, slices or a mask"):
        storage[..., 0] = TensorDict({"number": torch.tensor(1)}, [])
    assert torch.equal(storage[:]["number"].clone(), block(5, 2)["number"])


# ---- text and JSON


def with_text(n: int, first: int = 0) -> TensorDict:
    texts = [f"prompt {i}: grüße" for i in range(first, first + n)]
    info = [{"id": i, "tags": ["a", None, 1.5, True]} for i in range(first, first + n)]
    values = NonTensorStack(*[NonTensorData(value) for value in info])
    return TensorDict(
        {"number": torch.arange(first, first + n), "text": NonTensorStack(*texts), "next": {"info": values}}, [n]
    )


def check_text(data: TensorDict) -> None:
    numbers = data["number"].tolist()
    assert list(data["text"]) == [f"prompt {i}: grüße" for i in numbers]
    assert [one["id"] for one in data["next", "info"]] == numbers
    assert data["next", "info"][0]["tags"] == ["a", None, 1.5, True]


def test_text_and_json_come_back_with_their_rows(make: Make) -> None:
    rb = ReplayBuffer(storage=make(20), batch_size=16)
    rb.extend(with_text(12))
    check_text(rb[:])
    check_text(rb.sample())
    assert rb[3]["text"] == "prompt 3: grüße"
    rb.extend(with_text(12, 12))  # goes round
    check_text(rb[:])
    rb.add(with_text(1, 24)[0])
    check_text(rb[3:7])
    rb[0] = with_text(1, 50)[0]
    assert rb[0]["next", "info"] == {"id": 50, "tags": ["a", None, 1.5, True]}


def test_text_survives_a_restart_and_a_dump(tmp_path: Path) -> None:
    with TrajStorage(tmp_path / "store", 20, fsync=False) as storage:
        ReplayBuffer(storage=storage).extend(with_text(12))
        storage.dumps(tmp_path / "dump")
        state = storage.state_dict()
    with TrajStorage(tmp_path / "store", 20, fsync=False) as storage:
        check_text(storage[:])
    with TrajStorage(None, 20) as storage:
        storage.loads(tmp_path / "dump")
        check_text(storage[:])
    with TrajStorage(None, 20) as storage:
        storage.load_state_dict(state)
        check_text(storage[:])


def test_longer_text_than_before_is_stored_too(make: Make) -> None:
    rb = ReplayBuffer(storage=make(20))
    rb.extend(with_text(5))
    long = "long" * 1000
    rb.extend(with_text(5, 5).set("text", NonTensorData(long, batch_size=[5])))
    check_text(rb[:5])
    assert list(rb[5:]["text"]) == [long] * 5
    rb.extend(with_text(5, 10))
    check_text(rb[10:])


def test_a_value_for_all_rows_is_that_of_each_row(make: Make) -> None:
    rb = ReplayBuffer(storage=make(20), batch_size=4)
    rb.extend(TensorDict({"number": torch.arange(4), "task": "push"}, [4]))
    rb.extend(TensorDict({"number": torch.arange(4), "task": "pull"}, [4]))
    assert list(rb[2:6]["task"]) == ["push", "push", "pull", "pull"]


def test_new_text_keys_are_none_in_rows_that_lack_them(make: Make) -> None:
    rb = ReplayBuffer(storage=make(20))
    rb.extend(TensorDict({"number": torch.arange(4)}, [4]))
    rb[:2] = TensorDict({"number": torch.arange(2), "text": NonTensorStack("a", "b")}, [2])
    assert list(rb[:]["text"]) == ["a", "b", None, None]


def test_text_of_two_dimensions_is_stored_too(make: Make) -> None:
    texts = [[f"{i} {j}" for j in range(2)] for i in range(3)]
    rows = TensorDict({"number": torch.arange(6).reshape(3, 2), "text": NonTensorStack.from_list(texts)}, [3, 2])
    storage = make(20, ndim=2)
    storage.set(range(3), rows)
    assert storage[:]["text"] == texts
    assert storage[1, 0]["text"] == "1 0"
    storage[1, 0] = TensorDict({"text": "x" * 100}, [])
    assert storage[:]["text"] == [["0 0", "0 1"], ["x" * 100, "1 1"], ["2 0", "2 1"]]


@tensorclass
class Answer:
    tokens: torch.Tensor
    text: str


def test_tensorclasses_keep_their_text(make: Make) -> None:
    rb = ReplayBuffer(storage=make(20), batch_size=4)
    answers = [Answer(tokens=torch.full((3,), i), text=f"answer {i}", batch_size=[]) for i in range(6)]
    rb.extend(torch.stack(answers))
    batch = rb.sample()
    assert isinstance(batch, Answer)
    assert list(batch.text) == [f"answer {i}" for i in batch.tokens[:, 0].tolist()]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ((1, 2), "got tuple"),
        ({1: "a"}, "got dict"),
        (object(), "got object"),
        (float("nan"), "that JSON can express"),
        ("\ud800", "that JSON can express"),
        ("x" * 70_000, "at most 65536 bytes"),
        ([{"deep": {1}}], "got set"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_values_that_json_would_change_are_refused_when_they_come(make: Make, value: Any, message: str) -> None:
    rb = ReplayBuffer(storage=make(20))
    with pytest.raises(DataError, match=f"field 'odd': expected .*{message}"):
        rb.extend(TensorDict({"number": torch.arange(2), "odd": NonTensorData(value, batch_size=[2])}, [2]))
    assert len(rb) == 0


# ---- ragged rows


def test_rows_of_several_shapes_are_refused_by_name(make: Make) -> None:
    rb = ReplayBuffer(storage=make(20))
    ragged = LazyStackedTensorDict(*[TensorDict({"a": {"b": torch.ones(n)}}, []) for n in (2, 3)])
    with pytest.raises(DataError, match=r"field 'a/b': expected rows of one shape, got several; .* pad the rows"):
        rb.extend(ragged)
    ones = torch.ones(2)
    some = LazyStackedTensorDict(TensorDict({"a": ones}), TensorDict({"a": ones, "b": ones}))
    with pytest.raises(DataError, match="field 'b': expected in all rows, only some have it"):
        rb.extend(some)
    nested = torch.nested.nested_tensor([ones, torch.ones(3)], layout=torch.jagged)
    with pytest.raises(DataError, match="field 'a': expected rows of one shape, got a nested tensor"):
        rb.extend(TensorDict({"a": nested}, [2]))
    rb.storage.resume(rb)
    rb.extend(LazyStackedTensorDict(*[TensorDict({"a": torch.full((2,), n)}) for n in range(3)]))
    assert rb[:]["a"].clone().tolist() == [[0, 0], [1, 1], [2, 2]]


# ---- TensorDicts without tensors


def test_tensordicts_without_tensors_are_counted_and_drawn(make: Make, tmp_path: Path) -> None:
    rb = ReplayBuffer(storage=make(20), batch_size=4)
    rb.extend(TensorDict({}, [6]))
    assert len(rb) == 6
    batch = rb.sample()
    assert (list(batch.keys()), batch.batch_size) == ([], torch.Size([4]))
    assert rb[:].batch_size == torch.Size([6])
    rb.dumps(tmp_path)
    again = ReplayBuffer(storage=make(20))
    again.loads(tmp_path)
    assert again[:].batch_size == torch.Size([6])


def test_ensembles_draw_from_buffers_without_tensors(make: Make) -> None:
    members = [ReplayBuffer(storage=make(20)) for _ in range(2)]
    for member in members:
        member.extend(TensorDict({}, [6]))
    ensemble = ReplayBufferEnsemble(*members, sample_from_all=True, batch_size=8)
    assert ensemble.sample().batch_size == torch.Size([2, 4])


def test_a_nested_tensordict_without_tensors_comes_back(make: Make) -> None:
    rb = ReplayBuffer(storage=make(20), batch_size=4)
    rb.extend(TensorDict({"number": torch.arange(6), "nothing": TensorDict({}, [6])}, [6]))
    for data in (rb[:], rb.sample(), rb[2]):
        assert set(data.keys()) == {"number", "nothing"}
        assert data["nothing"].is_empty()
        assert data["nothing"].batch_size == data.batch_size


def test_keys_that_name_such_fields_in_a_store_are_refused(make: Make) -> None:
    with pytest.raises(DataError, match="expected keys without '/', and not"):
        ReplayBuffer(storage=make(20)).extend(TensorDict({"a": {"json.text": torch.arange(6)}}, [6]))
