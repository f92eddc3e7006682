"""TED in and out, the buffer with TorchRL's face, our samplers in TorchRL's buffers, and collectors that write."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what torchrl's own imports warn of
    pytest.importorskip("torchrl")
    from torchrl.collectors import Collector
    from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer, TensorStorage
    from torchrl.data.replay_buffers import Sequence, SliceSampler
    from torchrl.envs import GymEnv, SerialEnv

from tensordict import TensorDict

import trajstore
from trajstore import DataError, NotReadyError, Windows
from trajstore.compat.torchrl import (
    PrioritisedSampler,
    ReplayBuffer,
    TrajStorage,
    WindowSampler,
    episodes_to_ted,
    ted_to_episodes,
)

OPTIONS: dict[str, Any] = {"cache_bytes": "64MiB", "buffer_bytes": "1MiB"}


def ted(ends: list[str], first: int = 0) -> TensorDict:
    """Rows of one lane; each says how it ends: ``.``, ``terminated``, ``truncated`` or ``both``."""
    n = len(ends)
    number = torch.arange(first, first + n).float()
    terminated = torch.tensor([end in ("terminated", "both") for end in ends])[:, None]
    truncated = torch.tensor([end in ("truncated", "both") for end in ends])[:, None]
    done = terminated | truncated
    begins = torch.tensor([True] + [end != "." for end in ends[:-1]])
    # What follows the last row of an episode is a row that is nowhere else.
    after = torch.where(done[:, 0], -number, number + 1)
    root = torch.where(begins & (torch.arange(n) > 0), number + 0.5, number)
    root[0] = number[0]
    after[:-1] = torch.where(done[:-1, 0], after[:-1], root[1:])
    none = torch.zeros(n, 1, dtype=torch.bool)
    return TensorDict(
        {
            "observation": {"state": root[:, None].repeat(1, 3), "nan": torch.full((n,), float("nan"))},
            "action": number.long() % 4,
            "done": none,
            "terminated": none,
            "truncated": none,
            "next": {
                "observation": {"state": after[:, None].repeat(1, 3), "nan": torch.full((n,), float("nan"))},
                "reward": number[:, None],
                "info": number.double(),
                "done": done,
                "terminated": terminated,
                "truncated": truncated,
            },
        },
        batch_size=[n],
    )


ENDS = st.lists(st.sampled_from([".", ".", ".", "terminated", "truncated", "both"]), min_size=1, max_size=30)


def assert_same(found: TensorDict, expected: TensorDict) -> None:
    assert set(found.keys(True, True)) == set(expected.keys(True, True))
    assert found.batch_size == expected.batch_size
    for key in expected.keys(True, True):
        assert torch.equal(found[key].nan_to_num(7), expected[key].nan_to_num(7)), key
        assert found[key].dtype == expected[key].dtype, key


# ---- TED


@given(ENDS)
def test_ted_comes_back_as_it_went_in(ends: list[str]) -> None:
    data = ted(ends)
    episodes = ted_to_episodes(data)
    assert_same(episodes_to_ted(episodes), data)
    n_ends = sum(end != "." for end in ends)
    assert len(episodes) == n_ends + (ends[-1] == ".")
    n_rows = sum(len(episode.data["observation"]["state"]) for episode in episodes)
    assert n_rows == len(ends) + len(episodes)  # each observation once, and the last of every episode
    for episode in episodes[: n_ends if ends[-1] == "." else None]:
        assert episode.terminated or episode.truncated


def test_lanes_are_cut_one_by_one() -> None:
    data = torch.stack([ted(["."] * 4 + ["terminated"]), ted([".", "truncated", ".", ".", "."], 100)])
    episodes = ted_to_episodes(data)
    assert [len(episode.data["action"]) for episode in episodes] == [5, 2, 3]
    assert [(episode.terminated, episode.truncated) for episode in episodes] == [
        (True, False),
        (False, True),
        (False, False),
    ]


def test_ted_that_contradicts_itself_is_refused_by_name() -> None:
    data = ted(["."] * 6)
    data["next", "observation", "state"][3, 1] += 1
    with pytest.raises(DataError, match=r"'observation/state', lane 0: expected 'next' of row 3 to equal row"):
        ted_to_episodes(data)
    data["collector"] = TensorDict({"traj_ids": torch.tensor([0, 0, 0, 0, 1, 1])}, batch_size=[6])
    episodes = ted_to_episodes(data)
    found = [(len(episode.data["action"]), episode.terminated, episode.truncated) for episode in episodes]
    assert found == [(4, False, True), (2, False, False)]
    with pytest.raises(DataError, match="expected a TensorDict"):
        ted_to_episodes(data.exclude("next"))
    with pytest.raises(DataError, match="batches use this name for something else"):
        ted_to_episodes(ted(["."] * 3).set("valid", torch.ones(3)))


@pytest.mark.parametrize("other", [torch.zeros(5), torch.zeros(5, 1, dtype=torch.float64)])
def test_a_key_that_differs_in_kind_under_next_is_refused_by_name(other: torch.Tensor) -> None:
    data = ted([".", ".", ".", ".", "terminated"])
    data["reward"] = other
    with pytest.raises(DataError, match="key 'reward': expected the same at the root and under 'next', got"):
        ted_to_episodes(data)


def test_ted_of_observations_alone_comes_back_too() -> None:
    data = ted([".", ".", "terminated", ".", "."]).exclude("action", ("next", "reward"), ("next", "info"))
    assert_same(episodes_to_ted(ted_to_episodes(data)), data)


def test_what_follows_may_have_any_name() -> None:
    data = ted([".", ".", "terminated", "."])
    data["next", "after"] = TensorDict({"z": torch.rand(4), "reward": torch.rand(4)}, batch_size=[4])
    data["next", "team"] = TensorDict({"reward": torch.rand(4)}, batch_size=[4])
    assert_same(episodes_to_ted(ted_to_episodes(data)), data)


@pytest.mark.parametrize("key", ["a/b", ("after", "z"), ("previous", "reward"), "reward"])
def test_keys_that_would_not_come_back_are_refused_by_name(key: Any) -> None:
    data = ted(["."] * 4)
    data[key] = torch.rand(4)
    data = data.exclude(("next", "reward"))
    with pytest.raises(DataError, match="key '" + ("/".join(key) if isinstance(key, tuple) else key)):
        ted_to_episodes(data)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float8_e4m3fn])
def test_ted_of_other_numbers_is_compared_bit_by_bit(dtype: torch.dtype) -> None:
    values = torch.tensor([float("nan"), 1.0, 2.0, 3.0, 4.0]).to(dtype)
    data = ted(["."] * 4)
    data["more"], data["next", "more"] = values[:-1].clone(), values[1:].clone()
    episode = ted_to_episodes(data)[0]
    assert torch.equal(episode.data["more"].view(torch.uint8), values.view(torch.uint8))
    data["next", "more"][1] = values[0]
    with pytest.raises(DataError, match="'more', lane 0: expected 'next' of row 1"):
        ted_to_episodes(data)


def test_no_rows_are_no_episodes(url: str) -> None:
    two = torch.stack([ted(["."] * 6), ted(["."] * 6, 100)])
    assert ted_to_episodes(two[:, :0]) == ted_to_episodes(two[:0]) == ted_to_episodes(two[0, :0]) == []
    with ReplayBuffer(url, 1000, **OPTIONS) as buffer:
        for part in (two[:, :3], two[:, 3:3], two[:0]):
            assert buffer.extend(part).shape == (*part.batch_size, 3)
        assert buffer.extend(two[:, 3:])[..., 2].tolist() == [[3, 4, 5]] * 2


def test_episodes_of_a_store_are_ted_too(url: str) -> None:
    with trajstore.create(url).writer() as writer:
        for episode in ted_to_episodes(ted([".", ".", "terminated", ".", "truncated"])):
            writer.append_episode(episode.data, terminated=episode.terminated, truncated=episode.truncated)
    store = trajstore.open(url)
    assert store.episodes["return"].tolist() == [3.0, 7.0]
    assert store.episodes["end"].tolist() == ["terminated", "truncated"]


# ---- the buffer with TorchRL's face


def rows_by_reward(data: TensorDict) -> dict[float, TensorDict]:
    return {float(row["next", "reward"]): row for row in data}


def check_rows(batch: TensorDict, written: TensorDict) -> None:
    """See that rows, found by their reward, are as they were written."""
    expected = rows_by_reward(written)
    for row in batch.reshape(-1):
        found = row.exclude("index", "priority_weight", "validity_mask", "learning_mask")
        assert_same(found, expected[float(row["next", "reward"])])


def test_transitions_come_as_ted(url: str) -> None:
    ends = ([*["."] * 6, "terminated", *["."] * 4, "truncated"]) * 4
    data = ted(ends)
    with ReplayBuffer(url, 1000, batch_size=200, **OPTIONS) as buffer:
        index = buffer.extend(data)
        assert index.shape == (len(ends), 3)
        batch = buffer.sample()
        assert batch.batch_size == torch.Size([200])
        check_rows(batch, data)
        assert len(buffer) == len(ends)
        found = {tuple(i): float(r) for i, r in zip(batch["index"].tolist(), batch["next", "reward"], strict=True)}
        expected = {tuple(i): float(r) for i, r in zip(index.tolist(), data["next", "reward"], strict=True)}
        assert found == expected  # all of them were drawn
    rows = trajstore.open(url)
    assert sum(len(rows.read_episode(i)["observation"]["state"]) for i in range(len(rows))) == len(ends) + 8


def test_lanes_go_on_where_they_were(url: str) -> None:
    whole = torch.stack([ted(["."] * 20), ted([*["."] * 12, "truncated", *["."] * 7], 100)])
    with ReplayBuffer(url, 1000, **OPTIONS) as buffer:
        for start in range(0, 20, 5):
            buffer.extend(whole[:, start : start + 5])
        assert buffer.memory.n_episodes == 3
        check_rows(buffer.sample(64), whole.reshape(-1))
        broken = ted(["."] * 5, 500).unsqueeze(0).expand(2, 5).clone()
        buffer.extend(broken)  # begins another episode without a flag
        assert buffer.memory.n_episodes == 5
        for key in ("done", "truncated"):
            whole["next", key][:, -1] = True
        check_rows(buffer.sample(256), torch.cat([whole.reshape(-1), broken[0]]))


def wrong_dtype(data: TensorDict) -> TensorDict:
    return data.set("action", data["action"].int())


def no_action(data: TensorDict) -> TensorDict:
    return data.exclude("action")


def one_final_less(data: TensorDict) -> TensorDict:
    return data.exclude(("next", "observation", "nan"))


def too_many(data: TensorDict) -> TensorDict:
    return torch.stack([ted(["."] * 20_000, 500)] * 2)


@pytest.mark.parametrize("spoilt", [wrong_dtype, no_action, one_final_less, too_many])
def test_an_extend_that_is_refused_changes_nothing(spoilt: Callable[[TensorDict], TensorDict], url: str) -> None:
    whole = torch.stack([ted(["."] * 6), ted(["."] * 6, 100)])
    other = torch.stack([ted(["."] * 3, 500), ted(["."] * 3, 600)])  # does not continue the lanes
    with ReplayBuffer(url, **{**OPTIONS, "buffer_bytes": "1MB"}) as buffer:
        buffer.extend(whole[:, :3])
        with pytest.raises(DataError):
            buffer.extend(spoilt(other))
        found = buffer.extend(whole[:, 3:])
        assert found[..., 1:].tolist() == [[[lane, t] for t in (3, 4, 5)] for lane in (0, 1)]


def test_single_rows_may_be_added(url: str) -> None:
    data = ted([*["."] * 7, "terminated"])
    with ReplayBuffer(url, 1000, **OPTIONS) as buffer:
        handles = torch.stack([buffer.add(row) for row in data])
        assert handles[:, 2].tolist() == list(range(8))
        check_rows(buffer.sample(50), data)


@pytest.mark.parametrize(
    "unit", [Windows(length=4, boundary="pad_right"), Sequence(length=4, episode_boundary="pad")]
)
def test_windows_have_their_masks(unit: Any, url: str) -> None:
    data = ted(([*["."] * 9, "terminated"]) * 5)
    with ReplayBuffer(url, 1000, sample_unit=unit, batch_size=64, **OPTIONS) as buffer:
        buffer.extend(data)
        batch = buffer.sample()
        assert batch.batch_size == torch.Size([64, 4])
        valid = batch["validity_mask"]
        assert 0 < int((~valid).sum()) < valid.numel() / 2
        assert torch.equal(batch["learning_mask"], valid)  # what is padded is not learned from
        check_rows(batch[valid], data)


@pytest.mark.parametrize(
    ("name", "unit"),
    [
        ("n_step", Windows.transitions(n_step=3)),
        ("n_step", Windows(length=2, n_step=3)),
        ("offsets", Windows(length=2, offsets={"observation": (-1, 0)})),
        ("provenance", Windows(length=2, provenance=True)),
    ],
)
def test_windows_that_have_no_place_in_ted_are_refused(name: str, unit: Windows, url: str) -> None:
    with pytest.raises(ValueError, match=f"sample_unit: TED cannot express {name}"):
        ReplayBuffer(url, 1000, sample_unit=unit)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"capacity": 10}, "capacity: this buffer sets it itself; say how many steps to keep with max_size"),
        ({"sample": Windows()}, "sample: this buffer sets it itself; say what is drawn with sample_unit"),
        ({"batchsize": 3}, r"unknown options \['batchsize'\]; accepted are url, max_size, batch_size,"),
    ],
)
def test_options_that_are_not_taken_are_refused_at_once(options: dict[str, Any], says: str, url: str) -> None:
    with pytest.raises(TypeError, match=says):
        ReplayBuffer(url, **options)


def test_priorities_are_those_of_the_rows_that_were_drawn(url: str) -> None:
    data = ted(([*["."] * 9, "terminated"]) * 5)
    with ReplayBuffer(url, 1000, batch_size=32, alpha=1.0, beta=1.0, **OPTIONS) as buffer:
        index = buffer.extend(data)
        buffer.update_priority(index, torch.full((50,), 1e-6))
        buffer.update_priority(index[7:8], torch.tensor([1e6]))
        batch = buffer.sample()
        assert set(batch["next", "reward"].flatten().tolist()) == {7.0}
        assert batch["priority_weight"].shape == (32,)
        batch["td_error"] = torch.zeros(32, 1)
        buffer.update_tensordict_priority(batch)
        assert len(set(buffer.sample()["next", "reward"].flatten().tolist())) > 3


def test_a_buffer_without_priorities_says_so(url: str) -> None:
    with ReplayBuffer(url, 1000, batch_size=4, **OPTIONS) as buffer:
        buffer.extend(ted([".", "terminated"]))
        with pytest.raises(ValueError, match="this buffer has no priorities; create it with alpha="):
            buffer.update_tensordict_priority(buffer.sample())


def test_windows_get_the_largest_priority_of_what_was_learned(url: str) -> None:
    data = ted(([*["."] * 9, "terminated"]) * 2)
    with ReplayBuffer(url, 1000, batch_size=16, alpha=1.0, sample_unit=Windows(length=2), **OPTIONS) as buffer:
        buffer.extend(data)
        for _ in range(20):
            batch = buffer.sample()
            batch["td_error"] = torch.where(batch["next", "reward"] == 5, 1e9, 1e-9)
            buffer.update_tensordict_priority(batch)
        first = buffer.sample()["next", "reward"][:, 0].flatten().tolist()
        assert set(first) <= {4.0, 5.0}


# ---- our samplers in their buffers


@pytest.fixture(params=["theirs", "ours"])
def storage(request: pytest.FixtureRequest) -> Iterator[TensorStorage]:
    if request.param == "theirs":
        yield LazyTensorStorage(60)
        return
    with TrajStorage(max_size=60) as ours:
        yield ours


def episodes_of(lengths: list[int]) -> TensorDict:
    number = torch.arange(sum(lengths))
    ends = torch.tensor(lengths).cumsum(0) - 1
    done = torch.zeros(len(number), 1, dtype=torch.bool)
    done[ends] = True
    episode = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return TensorDict({"number": number, "episode": episode, "next": {"done": done}}, batch_size=[len(number)])


@pytest.mark.parametrize("traj_key", [None, "episode"])
def test_every_window_is_as_likely(storage: TensorStorage, traj_key: Any) -> None:
    sampler = WindowSampler(Windows(length=4), traj_key=traj_key, seed=1)
    rb = TensorDictReplayBuffer(storage=storage, sampler=sampler, batch_size=4000)
    rb.extend(episodes_of([4, 20, 3, 8]))
    drawn: Counter[int] = Counter()
    for _ in range(6):
        number = rb.sample()["number"].reshape(-1, 4)
        assert (number.diff(dim=1) == 1).all()
        drawn.update(number[:, 0].tolist())
    expected = {0, *range(4, 21), *range(27, 32)}
    assert set(drawn) == expected
    mean = 6000 / len(expected)
    assert sum((n - mean) ** 2 / mean for n in drawn.values()) < 51  # chi-square of 22 degrees: one in two thousand


def test_windows_follow_the_ring_and_are_padded_where_asked(storage: TensorStorage) -> None:
    windows = Windows(length=3, burn_in=1, boundary="pad_right")
    rb = TensorDictReplayBuffer(storage=storage, sampler=WindowSampler(windows), batch_size=400)
    rb.extend(episodes_of([50]))
    rb.extend(episodes_of([30]).apply(lambda x: x + 100 if x.dtype == torch.int64 else x))
    batch = rb.sample()
    number, valid = (batch[key].reshape(100, 4) for key in ("number", "validity_mask"))
    assert (number.diff(dim=1)[valid[:, 1:] & valid[:, :-1]] == 1).all()
    assert (number.diff(dim=1)[~(valid[:, 1:] & valid[:, :-1])] == 0).all()
    assert batch["learning_mask"].reshape(100, 4)[0].tolist() == [False, True, True, True]
    assert set((number // 100).flatten().tolist()) == {0, 1}
    assert number.min() >= 20  # what came before was overwritten
    with pytest.raises(DataError, match="multiple of the 4 rows"):
        rb._sampler.sample(rb.storage, 5)


def test_no_window_is_an_error_that_says_so() -> None:
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(60), sampler=WindowSampler(Windows(length=9)), batch_size=9
    )
    rb.extend(episodes_of([4, 4]))
    with pytest.raises(NotReadyError, match="no episode has a window of 9 steps"):
        rb.sample()
    with pytest.raises(ValueError, match="cross"):
        WindowSampler(Windows(length=2, boundary="cross"))


@pytest.mark.parametrize(
    "option",
    [
        {"n_step": 3},
        {"fields": ("observation",)},
        {"offsets": {"observation": (-1, 0)}},
        {"next_fields": ("observation",)},
        {"provenance": True},
        {"weight": "episode"},
        {"pad": "zero"},
    ],
)
def test_windows_of_which_a_sampler_could_not_give_all_are_refused(option: dict[str, Any]) -> None:
    with pytest.raises(
        ValueError, match=f"WindowSampler only chooses rows, so {next(iter(option))} would have no effect"
    ):
        WindowSampler(Windows(length=4, **option))


def test_draws_by_priority_are_in_proportion(storage: TensorStorage) -> None:
    sampler = PrioritisedSampler(60, alpha=0.5, beta=1.0, eps=0.0, seed=2)
    rb = TensorDictReplayBuffer(storage=storage, sampler=sampler, batch_size=20_000)
    data = episodes_of([4]).set("td_error", torch.tensor([0.0, 1.0, 4.0, 9.0]))
    rb.extend(data)
    batch = rb.sample()
    counts = torch.bincount(batch["number"], minlength=4)
    assert counts[0] == 0  # a priority of 0 is never drawn
    assert ((counts[1:] / 20_000 - torch.tensor([1, 2, 3]) / 6).abs() < 0.015).all()
    expected = torch.tensor([0, 1.0, 1 / 2, 1 / 3])[batch["number"]]
    assert torch.allclose(batch["priority_weight"], expected)
    sampler.alpha = 0.0
    counts = torch.bincount(rb.sample()["number"], minlength=4)
    assert (counts / 20_000 > 0.23).all()
    sampler.alpha = 1.0
    batch["td_error"] = torch.where(batch["number"] == 2, 100.0, 0.0)
    rb.update_tensordict_priority(batch)
    assert set(rb.sample()["number"].tolist()) == {2}
    rb.extend(episodes_of([1]).set("td_error", torch.ones(1)))
    with pytest.raises(DataError, match="priority"):
        rb.update_priority(torch.tensor([1]), torch.tensor([float("nan")]))


def test_new_rows_get_the_largest_priority_and_states_are_kept(tmp_path: Path) -> None:
    def make() -> TensorDictReplayBuffer:
        sampler = PrioritisedSampler(60, alpha=1.0, beta=0.5)
        return TensorDictReplayBuffer(storage=LazyTensorStorage(60), sampler=sampler, batch_size=64)

    rb = make()
    rb.extend(episodes_of([10]))
    rb.update_priority(torch.arange(10), torch.full((10,), 1e-9))
    rb.update_priority(torch.tensor([3]), torch.tensor([50.0]))
    rb.extend(episodes_of([1]))  # at slot 10
    assert set(rb.sample()["index"].tolist()) == {3, 10}
    rb.dumps(tmp_path / "dump")
    again = make()
    again.loads(tmp_path / "dump")
    third = make()
    third.load_state_dict(rb.state_dict())
    expected = rb.sample()["index"].tolist()
    assert again.sample()["index"].tolist() == third.sample()["index"].tolist() == expected
    rb.empty()
    with pytest.raises(NotReadyError, match="no row can be drawn"):
        rb.sample()


# ---- collectors


@pytest.mark.parametrize("n_envs", [1, 2])
def test_collectors_write_into_the_storage(n_envs: int, tmp_path: Path) -> None:
    env = SerialEnv(n_envs, lambda: GymEnv("CartPole-v1")) if n_envs > 1 else GymEnv("CartPole-v1")
    sampler = SliceSampler(slice_len=5, traj_key=("collector", "traj_ids"))
    storage = TrajStorage(tmp_path, 200, ndim=1 if n_envs == 1 else 2, fsync=False)
    rb = TensorDictReplayBuffer(storage=storage, sampler=sampler, batch_size=20)
    collector = Collector(env, None, frames_per_batch=60, total_frames=240, replay_buffer=rb)
    for _ in collector:
        assert rb.sample()["observation"].shape == (20, 4)
    collector.shutdown()
    assert len(rb) == 200
    kept = storage[:].clone()
    storage.close()
    with TrajStorage(tmp_path, 200, ndim=storage.ndim, fsync=False) as again:
        assert torch.equal(again[:]["observation"], kept["observation"])


def test_what_collectors_give_goes_into_the_buffer(url: str) -> None:
    env = SerialEnv(2, lambda: GymEnv("CartPole-v1"))
    collector = Collector(env, None, frames_per_batch=60, total_frames=240)
    with ReplayBuffer(url, 1000, batch_size=128, **OPTIONS) as buffer:
        written = []
        for data in collector:
            buffer.extend(data)
            written.append(data.reshape(-1).clone())
        collector.shutdown()
        batch, rows = buffer.sample(), torch.cat(written)
        assert len(buffer) == 240
        where = (rows["observation"][None] == batch["observation"][:, None]).all(-1).float().argmax(1)
        assert torch.equal(rows["next", "observation"][where], batch["next", "observation"])
        assert torch.equal(rows["next", "terminated"][where], batch["next", "terminated"])
        assert torch.equal(rows["action"][where], batch["action"])


def test_rows_of_an_earlier_run_may_be_refused(tmp_path: Path) -> None:
    with ReplayBuffer(tmp_path / "run", exist="fail") as buffer:
        buffer.extend(ted(["terminated"]))
    with pytest.raises(trajstore.StoreExistsError, match="rows of earlier sessions"):
        ReplayBuffer(tmp_path / "run", exist="fail")
