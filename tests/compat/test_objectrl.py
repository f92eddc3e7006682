"""ObjectRL's documented calls, and right behaviour where its buffer was wrong."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from trajstore import ClosedError, DataError, NotReadyError, StoreNotFoundError, TrajstoreError
from trajstore.compat import objectrl
from trajstore.compat.objectrl import ReplayBuffer

CPU = torch.device("cpu")


def transitions(n: int, first: int = 0) -> TensorDict:
    number = torch.arange(first, first + n)
    fields = {
        "state": number.float()[:, None].repeat(1, 3),
        "action": number % 4,
        "reward": number.float(),
        "next_state": number.float()[:, None].repeat(1, 3) + 1,
        "terminated": number % 7 == 6,
        "truncated": torch.zeros(n, dtype=torch.bool),
    }
    return TensorDict(fields, batch_size=[n])


@pytest.fixture
def made() -> Iterator[Any]:
    buffers: list[ReplayBuffer] = []

    def make(size: int, **options: Any) -> ReplayBuffer:
        buffers.append(ReplayBuffer(CPU, CPU, size, **{"cache_bytes": "64MiB", "buffer_bytes": "1MiB", **options}))
        return buffers[-1]

    yield make
    for buffer in buffers:
        buffer.close()


def rewards(batch: TensorDict) -> list[float]:
    return batch["reward"].tolist()  # type: ignore[no-any-return]


def test_the_documented_examples(made: Any) -> None:
    buffer = made(100_000)
    buffer.add(transitions(1)[0])
    buffer.add_batch(transitions(99, 1))
    assert buffer.sample_batch(64).batch_size == torch.Size([64])
    assert rewards(buffer.sample_by_index([0, 5, 9])) == [0, 5, 9]
    state, action = buffer.sample_by_index_fields([0, 5], fields=["state", "action"])
    assert state[:, 0].tolist() == [0, 5]
    assert action.tolist() == [0, 1]
    assert buffer.sample_by_index_fields([3], ["reward"]).tolist() == [3]
    assert rewards(buffer.sample_all()) == list(range(100))
    seen = [r for batch in buffer.create_epoch_iterator(batch_size=64, n_epochs=5) for r in rewards(batch)]
    assert seen == list(range(100)) * 5
    assert buffer.get_steps_and_iterator(n_epochs=10, max_iter=0, batch_size=64) == 20
    assert buffer.get_steps_and_iterator(n_epochs=0, max_iter=1, batch_size=64) == 1
    assert len(buffer) == buffer.size == buffer.data_size == 100


def test_a_batch_holds_what_was_added_with_its_dtypes(made: Any) -> None:
    buffer = made(50)
    buffer.add_batch(transitions(30))
    batch = buffer.sample_batch(200)
    number = batch["reward"].long()
    expected = transitions(30)[number]
    for key in expected.keys():  # noqa: SIM118
        assert torch.equal(batch[key], expected[key]), key
        assert batch[key].dtype == expected[key].dtype
    assert torch.equal(batch["index"], number)
    assert set(number.tolist()) == set(range(30))


def test_twelve_into_five_keeps_the_last_in_places_of_a_ring(made: Any) -> None:
    buffer = made(5)
    buffer.add_batch(transitions(12))
    assert rewards(buffer.sample_by_index(range(5))) == [10, 11, 7, 8, 9]
    assert (len(buffer), buffer.pointer) == (5, 2)
    assert rewards(buffer.sample_by_index(torch.tensor([-1, -5]))) == [9, 10]
    assert rewards(buffer.sample_all()) == [7, 8, 9, 10, 11]  # theirs began with 10


@given(st.lists(st.integers(0, 40), min_size=1, max_size=8), st.integers(1, 30))
def test_places_are_those_of_a_ring_whatever_is_added(sizes: list[int], size: int) -> None:
    buffer = ReplayBuffer(CPU, CPU, size, cache_bytes="16MiB", buffer_bytes="256KiB")
    ring: list[int] = [-1] * size
    n = 0
    for k in sizes:
        batch = transitions(k, n)
        if k == 1:
            buffer.add(batch[0])
        elif k:
            buffer.add_batch(batch)
        for number in range(n, n + k):
            ring[number % size] = number
        n += k
        assert (len(buffer), buffer.pointer) == (min(n, size), n % size)
        if n:
            assert rewards(buffer.sample_by_index(range(len(buffer)))) == ring[: len(buffer)]
            assert rewards(buffer.sample_all()) == list(range(max(0, n - size), n))
            drawn = buffer.sample_batch(8)
            assert [ring[i] for i in drawn["index"].tolist()] == rewards(drawn)
    buffer.close()


def test_every_transition_that_is_kept_is_as_likely(made: Any) -> None:
    buffer = made(200, seed=3)
    for first in range(0, 5000, 50):
        buffer.add_batch(transitions(50, first))
    counts = np.bincount(np.array(rewards(buffer.sample_batch(40_000)), int) - 4800, minlength=200)
    assert counts.sum() == 40_000
    assert ((counts - 200) ** 2 / 200).sum() < 276  # chi-square of 199 degrees: one in ten thousand


def test_episodes_of_the_store_do_not_show(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objectrl, "_EPISODE_STEPS", 4)
    buffer = made(10)
    for first in range(0, 23):
        buffer.add(transitions(1, first)[0])
    buffer.add_batch(transitions(8, 23))
    assert rewards(buffer.sample_all()) == list(range(21, 31))


def test_a_fresh_buffer_falls_back_to_random_batches_as_documented(made: Any) -> None:
    buffer = made(10)
    with pytest.raises(NotReadyError, match="the buffer is empty"):
        buffer.get_next_batch(4)
    buffer.add_batch(transitions(6))
    assert buffer.get_next_batch(4).batch_size == torch.Size([4])
    buffer.create_epoch_iterator(4)
    assert [len(buffer.get_next_batch(4)) for _ in range(2)] == [4, 2]
    with pytest.raises(StopIteration):
        buffer.get_next_batch(4)


def test_reset_forgets_data_and_iterators_and_takes_other_fields(made: Any) -> None:
    buffer = made(10)
    buffer.add_batch(transitions(6))
    buffer.create_epoch_iterator(2)
    buffer.reset(4)
    assert (len(buffer), buffer.pointer, buffer.buffer_size) == (0, 0, 4)
    batch = transitions(6, 20)
    batch["advantage"] = torch.arange(6).double()  # as PPO does
    buffer.add_batch(batch)
    assert rewards(buffer.sample_all()) == [22, 23, 24, 25]
    assert buffer.sample_all()["advantage"].tolist() == [2, 3, 4, 5]
    assert len(buffer.get_next_batch(3)) == 3  # random: there is no iterator any more


def test_resize_keeps_the_newest(made: Any) -> None:
    buffer = made(10)
    buffer.add_batch(transitions(14))
    buffer.resize(6)
    assert rewards(buffer.sample_all()) == [8, 9, 10, 11, 12, 13]
    buffer.resize(20)
    buffer.add_batch(transitions(3, 14))
    assert rewards(buffer.sample_all()) == list(range(8, 17))


def test_epochs_may_be_shuffled_and_leave_out_what_is_not_full(made: Any) -> None:
    buffer = made(50)
    buffer.add_batch(transitions(23))
    first, second = (
        [rewards(b) for b in buffer.create_epoch_iterator(5, shuffle=True, drop_last=True)] for _ in range(2)
    )
    assert first == second  # the same state, the same order
    assert [len(batch) for batch in first] == [5] * 4
    assert len({r for batch in first for r in batch}) == 20
    both = [rewards(b) for b in buffer.create_epoch_iterator(23, n_epochs=2, shuffle=True)]
    assert sorted(both[0]) == sorted(both[1]) == list(range(23))
    assert both[0] != both[1]
    assert buffer.calculate_num_batches(5) == 5


def test_what_was_saved_is_restored_data_and_all(made: Any, tmp_path: Path) -> None:
    buffer = made(8)
    buffer.add_batch(transitions(13))
    path = tmp_path / "checkpoints" / "buffer"
    buffer.save(path)
    assert (tmp_path / "checkpoints" / "buffer.metadata").exists()
    again = made(100)
    again.load(path)
    assert (len(again), again.pointer, again.buffer_size) == (8, 5, 8)
    assert torch.equal(again.sample_by_index(range(8))["state"], buffer.sample_by_index(range(8))["state"])
    for one in (buffer, again):
        one.add_batch(transitions(2, 13))
    assert rewards(again.sample_by_index(range(8))) == rewards(buffer.sample_by_index(range(8)))
    again.save(path)
    assert len(list((tmp_path / "checkpoints").glob("*.trajstore"))) == 1
    third = made(3)
    third.load(path)
    assert rewards(third.sample_all()) == list(range(7, 15))


def test_an_empty_buffer_is_saved_and_restored(made: Any, tmp_path: Path) -> None:
    made(8).save(tmp_path / "empty")
    buffer = made(3)
    buffer.add_batch(transitions(2))
    buffer.load(tmp_path / "empty")
    assert (len(buffer), buffer.buffer_size) == (0, 8)


def test_a_file_of_objectrl_itself_is_refused(made: Any, tmp_path: Path) -> None:
    torch.save({"buffer_size": 5, "data_size": 3, "pointer": 3}, tmp_path / "theirs.metadata")
    buffer = made(8)
    buffer.add_batch(transitions(2))
    with pytest.raises(DataError, match="expected a file that this class saved"):
        buffer.load(tmp_path / "theirs")
    assert rewards(buffer.sample_all()) == [0, 1]


def test_a_load_or_save_that_fails_changes_nothing(made: Any, tmp_path: Path) -> None:
    buffer = made(8)
    buffer.add_batch(transitions(3))
    buffer.save(tmp_path / "lost")
    for store in tmp_path.glob("*.trajstore"):
        shutil.rmtree(store)
    with pytest.raises(StoreNotFoundError):
        buffer.load(tmp_path / "lost")
    torch.save({"buffer_size": 5}, tmp_path / "theirs.metadata")
    with pytest.raises(DataError, match="expected a file that this class saved"):
        buffer.save(tmp_path / "theirs")
    assert not list(tmp_path.glob("*.trajstore"))
    assert rewards(buffer.sample_all()) == [0, 1, 2]


def test_bad_input_is_refused_by_name_and_changes_nothing(made: Any) -> None:
    buffer = made(8)
    buffer.add_batch(transitions(5))
    more, less = transitions(1), transitions(1)
    more["extra"] = torch.zeros(1)
    del less["reward"]
    with pytest.raises(DataError, match="extra"):
        buffer.add(more[0])
    with pytest.raises(DataError, match="reward"):
        buffer.add_batch(less)
    with pytest.raises(DataError, match="batch"):
        buffer.add_batch(transitions(1)[0])
    with pytest.raises(IndexError, match="expected -5 to 4, got 2 to 5"):
        buffer.sample_by_index([2, 5])
    with pytest.raises(KeyError, match="no field 'obs'; the fields are action, next_state, reward"):
        buffer.sample_by_index_fields([0], ["obs"])
    with pytest.raises(ValueError, match="buffer_size"):
        ReplayBuffer(CPU, CPU, 0)
    assert rewards(buffer.sample_all()) == list(range(5))


def test_draws_have_a_seed_of_their_own(made: Any) -> None:
    found = []
    for seed in (1, 1, 2):
        buffer = made(50, seed=seed)
        buffer.add_batch(transitions(50))
        torch.manual_seed(seed * 100 + len(found))
        found.append([rewards(buffer.sample_batch(16)) for _ in range(2)])
    assert found[0] == found[1] != found[2]


def test_it_may_live_in_a_directory(made: Any, tmp_path: Path) -> None:
    buffer = made(30, url=tmp_path / "run")
    buffer.add_batch(transitions(40))
    buffer.memory.flush()
    assert rewards(buffer.sample_all()) == list(range(10, 40))
    assert (tmp_path / "run" / "0" / "zarr.json").exists()


def test_a_buffer_in_memory_gives_its_memory_back_when_it_is_reset_or_closed() -> None:
    memory = fsspec.filesystem("memory")
    before = len(memory.store)
    buffer = ReplayBuffer(CPU, CPU, 100)
    for _ in range(3):
        buffer.add_batch(TensorDict({"x": torch.arange(100)}, [100]))
        buffer.memory.flush()
        assert len(memory.store) > before
        buffer.reset()
        assert len(memory.store) == before
    buffer.add_batch(TensorDict({"x": torch.arange(100)}, [100]))
    buffer.close()
    assert len(memory.store) == before


def x(n: int, first: int = 0) -> TensorDict:
    return TensorDict({"x": torch.arange(first, first + n)}, [n])


def test_batches_larger_than_the_buffer_for_appending_are_taken_saved_loaded_and_resized(tmp_path: Path) -> None:
    data = TensorDict({"image": torch.arange(600)[:, None].expand(600, 1000).to(torch.int32)}, [600])
    buffer = ReplayBuffer(CPU, CPU, 500, buffer_bytes="400KB", cache_bytes="8MB")
    buffer.add_batch(data)
    buffer.save(tmp_path / "saved")
    other = ReplayBuffer(CPU, CPU, 7, buffer_bytes="400KB", cache_bytes="8MB")
    other.load(tmp_path / "saved")
    other.resize(300)
    for made, first in ((buffer, 100), (other, 300)):
        assert made.sample_all()["image"][:, 0].tolist() == list(range(first, 600))
        made.close()


def test_sessions_at_one_url_do_not_mix(tmp_path: Path) -> None:
    for first in (0, 50, 90):
        buffer = ReplayBuffer(CPU, CPU, 100, url=tmp_path)
        assert len(buffer) == 0
        buffer.add_batch(x(10, first))
        assert set(buffer.sample_batch(200)["x"].tolist()) == set(range(first, first + 10))
        buffer.reset()
        buffer.add_batch(x(5, first + 20))
        assert set(buffer.sample_batch(200)["x"].tolist()) == set(range(first + 20, first + 25))
        buffer.close()


def test_an_epoch_goes_on_while_transitions_are_added_and_ends_when_all_is_forgotten(made: Any) -> None:
    buffer = made(100)
    buffer.add_batch(x(100))
    batches = buffer.create_epoch_iterator(10)
    assert next(batches)["x"].tolist() == list(range(10))
    buffer.add_batch(x(55, 100))
    assert next(batches)["x"].tolist() == list(range(110, 120))
    assert [batch["x"].tolist()[0] for batch in batches] == [120, 130, 140, 150, 60, 70, 80, 90]
    kept = buffer.create_epoch_iterator(10)
    next(kept)
    buffer.reset()
    buffer.add_batch(x(100))
    assert list(kept) == []


def test_a_closed_buffer_says_so(made: Any, tmp_path: Path) -> None:
    buffer = made(10)
    buffer.add_batch(x(5))
    buffer.close()
    buffer.close()
    for call in (
        lambda: buffer.add(x(1)[0]),
        lambda: buffer.add_batch(x(2)),
        lambda: buffer.sample_batch(2),
        lambda: buffer.sample_all(),
        lambda: buffer.sample_by_index([0]),
        lambda: buffer.save(tmp_path / "saved"),
        lambda: buffer.load(tmp_path / "saved"),
        lambda: buffer.reset(),
        lambda: buffer.create_epoch_iterator(2),
    ):
        with pytest.raises(ClosedError, match="the buffer is closed"):
            call()


def test_a_nested_field_may_be_called_index(made: Any) -> None:
    buffer = made(10)
    given = TensorDict({"o": TensorDict({"index": torch.arange(3)}, [3]), "index": torch.arange(3)}, [3])
    buffer.add_batch(given)
    buffer.add(given[0])
    assert buffer.sample_all()["o", "index"].tolist() == [0, 1, 2, 0]
    assert buffer.sample_by_index_fields([1], [("o", "index")]).tolist() == [1]


def test_odd_batches_and_indices_are_refused_by_name(made: Any) -> None:
    buffer = made(10)
    with pytest.raises(DataError, match="expected transitions with at least one field, got none"):
        buffer.add_batch(TensorDict({}, [3]))
    buffer.add_batch(TensorDict({"e": TensorDict({}, [3]), "x": torch.arange(3)}, [3]))
    assert len(buffer.sample_by_index([])) == 0
    for bad in (torch.tensor(3), [[0, 1]], [True, False], [1.7]):
        with pytest.raises(TypeError, match=r"indices: expected some integers \[n\]"):
            buffer.sample_by_index(bad)


def test_a_load_that_fails_while_reading_changes_nothing(made: Any, tmp_path: Path) -> None:
    buffer = made(20)
    buffer.add_batch(x(20))
    buffer.save(tmp_path / "saved")
    (store,) = tmp_path.glob("*.trajstore")
    chunk = next(store.rglob("c*.0"), None) or next(path for path in store.rglob("c.*") if path.is_file())
    chunk.write_bytes(chunk.read_bytes()[:-1] + b"?")
    other = made(7)
    other.add_batch(x(7, 50))
    with pytest.raises(TrajstoreError):
        other.load(tmp_path / "saved")
    assert (len(other), other.buffer_size, other.sample_all()["x"].tolist()) == (7, 7, list(range(50, 57)))


def test_all_dtypes_come_back_from_a_save(made: Any, tmp_path: Path) -> None:
    buffer = made(4)
    dtypes = (torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.bool)
    buffer.add_batch(TensorDict({str(dtype)[6:]: torch.tensor([0, 1, 1]).to(dtype) for dtype in dtypes}, [3]))
    before = buffer.sample_all()
    buffer.save(tmp_path / "saved")
    buffer.load(tmp_path / "saved")
    after = buffer.sample_all()
    for dtype in dtypes:
        assert after[str(dtype)[6:]].dtype is dtype
    assert (before == after).all()
    buffer.add(before.exclude("index")[0])


def test_saves_that_fail_leave_nothing_behind(made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = made(4)
    buffer.add_batch(x(4))
    buffer.save(tmp_path / "saved")
    before = sorted(path.name for path in tmp_path.iterdir())

    def failing(*_: Any) -> None:
        raise OSError("no space left")

    for place in ("trajstore.storage.atomic_files.os.replace", "trajstore.compat.objectrl.create"):
        with monkeypatch.context() as patch:
            patch.setattr(place, failing)
            with pytest.raises(OSError, match="no space left"):
                buffer.save(tmp_path / "saved")
        assert sorted(path.name for path in tmp_path.iterdir()) == before
    (tmp_path / "saved-0123456789ab.trajstore").mkdir()  # of a save that was killed
    buffer.save(tmp_path / "saved")
    assert len(list(tmp_path.iterdir())) == 2


def test_what_is_at_a_url_is_committed_by_the_clock_and_ram_is_not(made: Any, tmp_path: Path) -> None:
    assert made(10, url=tmp_path).memory.options.commit_seconds == 10
    assert made(10, url=tmp_path, commit_seconds=3).memory.options.commit_seconds == 3
    assert made(10).memory.options.commit_seconds is None


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"capacity": 10},
            "capacity: this buffer sets it itself; say how many transitions to keep with buffer_size",
        ),
        ({"sample": None}, "sample: this buffer sets it itself"),
        ({"cache_byte": 10}, r"unknown options \['cache_byte'\]; accepted are device, .* cache_bytes,"),
    ],
)
def test_options_that_are_not_taken_are_refused_at_once(made: Any, options: dict[str, Any], says: str) -> None:
    with pytest.raises(TypeError, match=says):
        made(10, **options)
