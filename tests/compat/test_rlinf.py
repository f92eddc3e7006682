"""RLinf's replay buffer over trajstore: the same calls and batches, and what is broken there works."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import pickle  # noqa: TID251 - to write what must not be loaded
import shutil
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import trajstore
from tests.replay.test_buffer import crash
from tests.support.faulty import FailWhile, FaultyStorage, real_storage, server_error, through
from trajstore import ClosedError, DataError, FormatError, NotReadyError, StorageError, StoreNotFoundError
from trajstore.compat.rlinf import (
    ChunkStepResult,
    Directory,
    EmbodiedTrajectoryBuilder,
    PreloadReplayBufferDataset,
    PriorityStore,
    ReplayBufferDataset,
    Trajectory,
    TrajectoryReplayBuffer,
    concat_batch,
    convert_trajectories_to_batch,
    get_model_weights_id,
    replay_buffer_collate_fn,
)
from trajstore.compat.rlinf.checkpoint_layouts import Layout
from trajstore.compat.rlinf.trajectory import FLAGS
from trajstore.schema import flatten
from trajstore.store.verify import verify

NO_VERSIONS = "e58eb380-d5b9-5265-a382-0fc33930cf3e"


def trajectory(
    number: int = 0, n_steps: int = 6, n_envs: int = 2, epochs: int = 1, breaks: tuple[int, ...] = (), **more: Any
) -> Trajectory:
    """A trajectory; observations, rewards and actions tell which step of which environment of which one they are.

    ``breaks`` are steps after which the environment was reset.
    """
    t, env = torch.meshgrid(torch.arange(n_steps), torch.arange(n_envs), indexing="ij")
    name = (number * 10_000 + t * 100 + env).float()[..., None]
    state = torch.cat([name, name + 0.25], -1)
    after = torch.cat([state[1:], state[-1:] + 0.5])
    for step in breaks:
        after[step] = -state[step]
    generator = torch.Generator().manual_seed(number)
    flags = {f: torch.rand(n_steps + epochs, n_envs, 1, generator=generator) < 0.3 for f in FLAGS}
    image = (state.sum(-1)[..., None, None, None] % 251).to(torch.uint8).expand(-1, -1, 2, 2, 3)
    seen = (after.sum(-1)[..., None, None, None] % 251).to(torch.uint8).expand(-1, -1, 2, 2, 3)
    return Trajectory(
        **{
            "max_episode_length": 8,
            "actions": name.repeat(1, 1, 4) + torch.arange(4),
            "rewards": name.clone(),
            "prev_values": torch.rand(n_steps + epochs, n_envs, 1, generator=generator),
            "forward_inputs": {"action": name.clone(), "tokens": {"ids": name.long()}},
            "curr_obs": {"states": state, "main_images": image},
            "next_obs": {"states": after, "main_images": seen},
            **flags,
            **more,
        }
    )


def same(mine: Trajectory, others: Trajectory) -> None:
    assert mine.leaves.keys() == others.leaves.keys()
    for path, leaf in mine.leaves.items():
        other = others.leaves[path]
        assert leaf.dtype == other.dtype, path
        assert torch.equal(leaf, other), path
    assert mine.max_episode_length == others.max_episode_length


def numbers(batch: dict[str, Any]) -> Counter[int]:
    """Which trajectories the rows of a batch are of."""
    return Counter((batch["rewards"][:, 0] // 10_000).long().tolist())


def check_rows(batch: dict[str, Any], given: dict[int, Trajectory]) -> None:
    """Every row is a step of one of the trajectories, in every field."""
    for row, name in enumerate(batch["rewards"][:, 0].long().tolist()):
        whole = given[name // 10_000].aligned().leaves
        t, env = name % 10_000 // 100, name % 100
        for path, leaf in flat(batch).items():
            assert torch.equal(leaf[row], whole[path][t, env]), path


def flat(batch: dict[str, Any]) -> dict[str, torch.Tensor]:
    return flatten(batch)


@pytest.fixture
def saved(tmp_path: Path) -> dict[str, Any]:
    return {"auto_save": True, "auto_save_path": str(tmp_path / "saved"), "fsync": False}


# ---- as documented -------------------------------------------------------------------------------------


def test_the_tutorial_runs_as_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "path" / "to"
    trajectories = [trajectory(i) for i in range(12)]

    buffer = TrajectoryReplayBuffer(
        seed=1234,
        enable_cache=True,
        cache_size=5,
        sample_window_size=100,
        auto_save=True,
        auto_save_path=f"{root}/buffer",
        trajectory_format="pt",
    )
    buffer.add_trajectories(trajectories)
    batch = buffer.sample(num_chunks=256)
    assert all(len(leaf) == 256 for leaf in flat(batch).values())
    buffer.save_checkpoint(f"{root}/ckpt")
    buffer.load_checkpoint(
        load_path=f"{root}/ckpt",
        is_distributed=True,
        local_rank=0,
        world_size=4,
    )
    assert buffer.trajectory_ids == [0, 1, 2]
    assert [path.name for path in (root / "ckpt").iterdir()] == ["trajstore_checkpoint.json"]
    buffer.clear_cache()
    buffer.clear()
    assert len(buffer) == 0
    buffer.close()


def test_the_former_tutorial_runs_as_it_stands(tmp_path: Path) -> None:
    root = tmp_path / "path" / "to"
    with pytest.warns(DeprecationWarning, match="is now called") as notes:
        buffer = TrajectoryReplayBuffer(
            seed=1234,
            storage_dir=f"{root}/buffer",
            enable_cache=True,
            cache_size=5,
            storage_format="pt",
            sample_window_size=100,
            save_trajectories=True,
        )
    assert {str(note.message) for note in notes} == {
        "storage_dir is now called auto_save_path",
        "storage_format is now called trajectory_format",
        "save_trajectories is now called auto_save",
    }
    buffer.add_trajectories([trajectory(i) for i in range(8)])
    assert len(buffer.sample(num_chunks=256)["rewards"]) == 256
    buffer.save_checkpoint(f"{root}/ckpt")
    buffer.load_checkpoint(
        f"{root}/ckpt",
        is_distributed=True,
        local_rank=0,
        world_size=4,
    )
    assert buffer.trajectory_ids == [0, 1]
    buffer.close()


def test_a_batch_has_the_keys_shapes_and_dtypes_of_rlinf() -> None:
    versions = torch.zeros(6, 2, 1)
    one = trajectory(
        versions=versions, prev_logprobs=torch.zeros(6, 2, 4), intervene_flags=torch.zeros(6, 2, 4).bool()
    )
    buffer = TrajectoryReplayBuffer()
    buffer.add_trajectories([one])
    batch = buffer.sample(5)
    assert {path: (tuple(leaf.shape), leaf.dtype) for path, leaf in flat(batch).items()} == {
        "actions": ((5, 4), torch.float32),
        "intervene_flags": ((5, 4), torch.bool),
        "rewards": ((5, 1), torch.float32),
        "terminations": ((5, 1), torch.bool),
        "truncations": ((5, 1), torch.bool),
        "dones": ((5, 1), torch.bool),
        "prev_logprobs": ((5, 4), torch.float32),
        "prev_values": ((5, 1), torch.float32),
        "versions": ((5, 1), torch.float32),
        "forward_inputs/action": ((5, 1), torch.float32),
        "forward_inputs/tokens/ids": ((5, 1), torch.int64),
        "curr_obs/states": ((5, 2), torch.float32),
        "curr_obs/main_images": ((5, 2, 2, 3), torch.uint8),
        "next_obs/states": ((5, 2), torch.float32),
        "next_obs/main_images": ((5, 2, 2, 3), torch.uint8),
    }
    buffer.close()


@pytest.mark.parametrize("epochs", [0, 1, 2, 3])
def test_rows_of_a_batch_are_steps_of_trajectories_with_flags_after_and_values_before_them(epochs: int) -> None:
    given = {n: trajectory(n, epochs=epochs, breaks=(1, 4)) for n in range(4)}
    buffer = TrajectoryReplayBuffer()
    buffer.add_trajectories(list(given.values()))
    check_rows(buffer.sample(300), given)
    buffer.close()


def test_what_is_given_may_be_an_object_a_mapping_or_arrays() -> None:
    @dataclass
    class Theirs:
        rewards: Any
        actions: Any
        curr_obs: Any
        prev_values: Any = None

    t = trajectory()
    buffer = TrajectoryReplayBuffer()
    buffer.add_trajectories([Theirs(t.rewards, t.actions, {"states": t.curr_obs["states"]})])
    buffer.add_trajectories(
        [{"rewards": t.rewards, "actions": t.actions.numpy(), "curr_obs": {"states": t.curr_obs["states"]}}]
    )
    buffer.add_trajectories(
        [SimpleNamespace(rewards=t.rewards.numpy(), actions=t.actions, curr_obs={"states": t.curr_obs["states"]})]
    )
    assert buffer.get_stats() == {"num_trajectories": 3, "total_samples": 36, "cache_size": 3}
    same(buffer.get_trajectory(0), buffer.get_trajectory(2))
    buffer.close()


def test_readiness_counts_trajectories_also_for_those_who_await_it() -> None:
    buffer = TrajectoryReplayBuffer(sample_window_size=5)
    assert not buffer.is_ready(1)
    buffer.add_trajectories([trajectory(i) for i in range(2)])
    assert buffer.is_ready(2)
    assert asyncio.run(buffer.is_ready_async(2))
    assert not buffer.is_ready(3)
    buffer.close()


# ---- what is stored ------------------------------------------------------------------------------------


@given(
    st.lists(
        st.tuples(
            st.integers(1, 4), st.integers(1, 3), st.integers(0, 2), st.sets(st.integers(0, 11)), st.booleans()
        ),
        min_size=1,
        max_size=4,
    ),
    st.booleans(),
)
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
def test_trajectories_come_back_bit_by_bit(shapes: list[Any], has_next: bool) -> None:
    given = []
    for number, (length, n_envs, epochs, breaks, is_odd) in enumerate(shapes):
        n_steps = length * max(epochs, 1)
        one = trajectory(number, n_steps, n_envs, epochs, tuple(b for b in breaks if b < n_steps))
        if not has_next:
            one.next_obs = {}
        elif is_odd:
            one.curr_obs["states"][0, 0, 0], one.next_obs["states"][-1, -1, 0] = float("nan"), -0.0
        given.append(one)
    buffer = TrajectoryReplayBuffer(sample_window_size=0)
    buffer.add_trajectories(given)
    for number, one in enumerate(given):
        found = buffer.get_trajectory(number)
        assert found.leaves.keys() == one.leaves.keys()
        for path, leaf in one.leaves.items():
            assert leaf.numpy().tobytes() == found.leaves[path].numpy().tobytes(), path
    buffer.close()


def test_observations_are_stored_once_where_they_follow_each_other() -> None:
    buffer = TrajectoryReplayBuffer()
    buffer.add_trajectories([trajectory(0, n_steps=6, n_envs=2), trajectory(1, n_steps=6, n_envs=2, breaks=(2,))])
    buffer.flush()
    table = buffer.memory.store.refresh().episodes
    assert Counter(table["trajectory"].tolist()) == {0: 2, 1: 4}
    assert sorted(table["length"].tolist()) == [3, 3, 3, 3, 6, 6]
    assert table["has_final"].all()
    rows = sum(stream.rows for stream in buffer.memory.store.streams)
    assert rows == 24 + 6  # a row for every step, and one for every end
    buffer.close()


def test_what_only_one_of_the_observations_has_is_kept_apart() -> None:
    one = trajectory()
    one.curr_obs["only"], one.next_obs["also"] = torch.ones(6, 2, 1), torch.zeros(6, 2, 3)
    one.next_obs["main_images"] = one.next_obs["main_images"].float()
    buffer = TrajectoryReplayBuffer()
    buffer.add_trajectories([one])
    same(buffer.get_trajectory(0), one)
    batch = buffer.sample(3)
    assert set(batch["curr_obs"]) == {"states", "main_images", "only"}
    assert batch["curr_obs"]["main_images"].dtype is torch.uint8
    assert batch["next_obs"]["main_images"].dtype is torch.float32
    buffer.close()


def test_a_trajectory_larger_than_the_buffer_for_appending_is_taken_in_parts() -> None:
    given = {n: trajectory(n, n_steps=60, n_envs=3, breaks=(7, 30)) for n in range(3)}
    buffer = TrajectoryReplayBuffer(buffer_bytes="16KiB")
    buffer.add_trajectories(list(given.values()))
    for number, one in given.items():
        same(buffer.get_trajectory(number), one)
    check_rows(buffer.sample(200), given)
    buffer.close()


def test_a_saved_buffer_is_readable_with_plain_zarr(saved: dict[str, Any]) -> None:
    import zarr

    buffer = TrajectoryReplayBuffer(**saved)
    buffer.add_trajectories([trajectory(3)])
    buffer.close()
    group = zarr.open_group(saved["auto_save_path"], mode="r")
    (stream,) = group["streams"].groups()
    rewards = np.asarray(stream[1]["steps/rewards"])  # type: ignore[index]
    assert set(rewards[:, 0]) >= {30_000.0, 30_501.0}


# ---- the window ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_saved", [False, True])
def test_the_newest_trajectories_are_sampled_uniformly_over_transitions(
    is_saved: bool, saved: dict[str, Any]
) -> None:
    buffer = TrajectoryReplayBuffer(sample_window_size=3, **(saved if is_saved else {}))
    for number in range(10):
        buffer.add_trajectories([trajectory(number, n_steps=2 * number + 2, breaks=(1,))])
        found = numbers(buffer.sample(200))
        assert set(found) <= {number, number - 1, number - 2}
    counts = numbers(buffer.sample(20_000))
    sizes = {7: 16, 8: 18, 9: 20}
    for number, n_steps in sizes.items():
        assert counts[number] == pytest.approx(20_000 * n_steps / 54, rel=0.1)
    assert len(buffer) == (10 if is_saved else 3)
    buffer.close()


def test_a_window_of_nothing_is_everything_also_in_memory() -> None:
    buffer = TrajectoryReplayBuffer(enable_cache=False, sample_window_size=0, auto_save=False)
    buffer.add_trajectories([trajectory(n) for n in range(30)])
    assert set(numbers(buffer.sample(3000))) == set(range(30))
    buffer.close()


def test_a_batch_is_never_smaller_than_asked_for() -> None:
    buffer = TrajectoryReplayBuffer()
    buffer.add_trajectories([trajectory(n_steps=1, n_envs=3)])
    assert len(buffer.sample(100)["rewards"]) == 100
    buffer.close()


def test_what_left_the_window_of_a_buffer_in_memory_is_not_counted_and_takes_no_room() -> None:
    buffer = TrajectoryReplayBuffer(sample_window_size=3)
    memory = fsspec.filesystem("memory")
    for number in range(60):
        buffer.add_trajectories([trajectory(number)])
        if number % 10 == 9:
            buffer.flush()
    assert (len(buffer), buffer.size, buffer.total_samples) == (3, 3, 36)
    assert buffer.trajectory_ids == [57, 58, 59]
    with pytest.raises(ValueError, match=r"min_size: 4 trajectories are never held at once.*window of 3"):
        buffer.is_ready(4)
    with pytest.raises(KeyError, match="no trajectory 2; the buffer holds 3 trajectories"):
        buffer.get_trajectory(2)
    url = buffer._url
    assert memory.find(url)
    buffer.close()
    assert not memory.exists(url.removeprefix("memory://"))


def test_many_small_trajectories_cost_no_more_the_more_there_are() -> None:
    buffer = TrajectoryReplayBuffer(sample_window_size=100)
    one = trajectory(n_steps=1, n_envs=1)
    buffer.add_trajectories([one] * 600)
    assert len(buffer) == 100
    assert buffer.trajectory_ids == list(range(500, 600))
    buffer.close()


# ---- draws ---------------------------------------------------------------------------------------------


def test_no_global_generator_is_touched() -> None:
    torch.manual_seed(5)
    np.random.seed(5)
    before = torch.get_rng_state(), np.random.get_state()[1].copy()  # type: ignore[index]
    buffer = TrajectoryReplayBuffer()
    buffer.add_trajectories([trajectory()])
    buffer.sample(10)
    buffer.close()
    assert torch.equal(before[0], torch.get_rng_state())
    assert (before[1] == np.random.get_state()[1]).all()  # type: ignore[index]


def test_the_same_seed_gives_the_same_batches_and_none_gives_others() -> None:
    def draws(seed: int | None) -> torch.Tensor:
        buffer = TrajectoryReplayBuffer(seed)
        buffer.add_trajectories([trajectory(n) for n in range(3)])
        found = buffer.sample(50)["rewards"]
        buffer.close()
        return found

    assert torch.equal(draws(7), draws(7))
    assert not torch.equal(draws(7), draws(8))
    assert not torch.equal(draws(None), draws(None))


@pytest.mark.parametrize("layout", ["copy", "rlinf"])
def test_a_checkpoint_goes_on_with_the_next_batch(tmp_path: Path, layout: Layout) -> None:
    first = TrajectoryReplayBuffer(7, checkpoint_layout=layout)
    first.add_trajectories([trajectory(n) for n in range(3)])
    seen = first.sample(50)["rewards"]
    first.save_checkpoint(tmp_path / "ckpt")
    second = TrajectoryReplayBuffer(7)
    second.load_checkpoint(tmp_path / "ckpt")
    found = second.sample(50)["rewards"]
    assert torch.equal(found, first.sample(50)["rewards"])
    assert not torch.equal(found, seen), "the draws were repeated"
    first.close()
    second.close()


def test_ranks_and_demonstrations_draw_apart_although_they_have_one_seed(tmp_path: Path) -> None:
    source = TrajectoryReplayBuffer()
    source.add_trajectories([trajectory(n % 2) for n in range(4)])
    source.save_checkpoint(tmp_path / "ckpt")
    draws = []
    for rank in range(2):
        buffer = TrajectoryReplayBuffer()
        buffer.load_checkpoint(tmp_path / "ckpt", is_distributed=True, local_rank=rank, world_size=2)
        draws.append(buffer.sample(60)["rewards"])
        buffer.close()
    assert not torch.equal(*draws)
    both = [TrajectoryReplayBuffer() for _ in range(2)]
    for buffer in both:
        buffer.add_trajectories([trajectory(n) for n in range(3)])
    batch = next(iter(ReplayBufferDataset(both[0], both[1], 80, 1, 1)))
    assert not torch.equal(batch["rewards"][:40], batch["rewards"][40:])
    for buffer in (source, *both):
        buffer.close()


# ---- durability ----------------------------------------------------------------------------------------


def test_a_saved_buffer_is_gone_on_with_and_nothing_is_overwritten(saved: dict[str, Any]) -> None:
    given = {n: trajectory(n, breaks=(3,)) for n in range(7)}
    for part in (range(5), range(5, 7)):
        buffer = TrajectoryReplayBuffer(**saved)
        assert buffer.trajectory_ids == list(range(part.start))
        buffer.add_trajectories([given[n] for n in part])
        buffer.close()
    buffer = TrajectoryReplayBuffer(sample_window_size=3, **saved)
    assert (buffer.trajectory_ids, buffer.total_samples) == (list(range(7)), 7 * 12)
    for number, one in given.items():
        same(buffer.get_trajectory(number), one)
    assert set(numbers(buffer.sample(500))) == {4, 5, 6}
    buffer.close()


WRITER = """
import sys
from tests.compat.test_rlinf import trajectory
from trajstore.compat.rlinf import TrajectoryReplayBuffer
options = {"fsync": False, "commit_seconds": 0.01, "buffer_bytes": "64KiB"}
buffer = TrajectoryReplayBuffer(auto_save=True, auto_save_path=sys.argv[1], **options)
number = len(buffer)
while True:
    buffer.add_trajectories([trajectory(number, n_steps=90, breaks=(5,))])
    number += 1
    print(number, flush=True)
"""


def test_a_killed_writer_leaves_whole_trajectories_and_a_buffer_that_goes_on(tmp_path: Path) -> None:
    path = str(tmp_path / "saved")
    n_before = 0
    for patience in (5, 40, 90):
        process = subprocess.Popen([sys.executable, "-c", WRITER, path], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        for _ in range(patience):
            assert process.stdout.readline()
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        buffer = TrajectoryReplayBuffer(sample_window_size=0, auto_save=True, auto_save_path=path, fsync=False)
        n = len(buffer)
        assert n >= n_before
        assert buffer.trajectory_ids == list(range(n))
        assert buffer.memory.n_steps == buffer.total_samples, "parts of trajectories are left"
        if n:
            for number in (0, n // 2, n - 1):
                same(buffer.get_trajectory(number), trajectory(number, n_steps=90, breaks=(5,)))
            given = {number: trajectory(number, n_steps=90, breaks=(5,)) for number in range(n + 1)}
            check_rows(buffer.sample(100), given)
        buffer.close()
        n_before = n
    assert n_before, "nothing was committed before any of the kills"
    assert verify(path).problems == []


def test_writes_that_fail_behind_are_reported(tmp_path: Path) -> None:
    plan = FailWhile()
    with through(FaultyStorage(real_storage(str(tmp_path / "saved")), plan)):
        behind = {"commit_seconds": None, "commit_steps": None}
        buffer = TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path / "saved", **behind)
        buffer.add_trajectories([trajectory(0)])
        plan.error = server_error
        with pytest.raises(StorageError):
            buffer.flush()
        plan.error = None
        buffer.add_trajectories([trajectory(1)])
        buffer.close()
    again = TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path / "saved")
    assert again.trajectory_ids == [0, 1]
    again.close()


def test_callers_may_change_their_tensors_at_once() -> None:
    one, kept = trajectory(), trajectory()
    buffer = TrajectoryReplayBuffer()
    buffer.add_trajectories([one])
    for leaf in one.leaves.values():
        if leaf.is_contiguous():
            leaf.zero_()
    same(buffer.get_trajectory(0), kept)
    buffer.close()


def test_samples_and_additions_from_several_threads_never_mix_rows() -> None:
    buffer = TrajectoryReplayBuffer(sample_window_size=4)
    given = {n: trajectory(n, n_steps=4) for n in range(400)}
    buffer.add_trajectories([given[0]])
    errors: list[BaseException] = []
    stop = threading.Event()

    def read() -> None:
        try:
            while not stop.is_set():
                check_rows(buffer.sample(16), given)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for number in range(1, 150):
        buffer.add_trajectories([given[number]])
    stop.set()
    for thread in threads:
        thread.join()
    assert errors == []
    buffer.close()


# ---- checkpoints ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_saved", [False, True])
def test_a_checkpoint_holds_all_that_is_held_whether_sampled_or_not(
    is_saved: bool, saved: dict[str, Any], tmp_path: Path
) -> None:
    given = {n: trajectory(n, epochs=2, n_steps=6, breaks=(2,)) for n in range(5)}
    buffer = TrajectoryReplayBuffer(sample_window_size=5, **(saved if is_saved else {}))
    buffer.add_trajectories(list(given.values()))
    buffer.save_checkpoint(tmp_path / "ckpt", layout="rlinf")
    buffer.close()
    found = Directory(tmp_path / "ckpt")
    assert [entry.id for entry in found.entries] == [0, 1, 2, 3, 4]
    assert not found.missing
    for entry in found.entries:
        same(found.load(entry), given[entry.id])
    second = TrajectoryReplayBuffer()
    second.load_checkpoint(tmp_path / "ckpt")
    assert (second.trajectory_ids, second.total_samples) == (list(range(5)), 60)
    check_rows(second.sample(200), given)
    second.add_trajectories([trajectory(5)])
    assert second.trajectory_ids[-1] == 5
    second.close()


def test_files_are_as_rlinf_reads_them(tmp_path: Path) -> None:
    buffer = TrajectoryReplayBuffer(seed=99, checkpoint_layout="rlinf")
    one = trajectory(0, n_steps=8, versions=torch.full((8, 2, 1), 3.0))
    buffer.add_trajectories([one])
    buffer.save_checkpoint(tmp_path)
    buffer.close()
    weights = get_model_weights_id(one.versions)
    metadata = json.loads((tmp_path / "metadata.json").read_text())
    index = json.loads((tmp_path / "trajectory_index.json").read_text())
    counts = {"size": 1, "total_samples": 16, "trajectory_counter": 1}
    assert {**metadata, "trajectory_format": "pt", "seed": 99, **counts} == metadata
    info = index["trajectory_index"]["0"]
    assert index["trajectory_id_list"] == [0]
    known = {"num_samples": 16, "trajectory_id": 0, "max_episode_length": 8, "shape": [8, 2, 1]}
    assert {**info, **known, "model_weights_id": weights} == info
    data = torch.load(tmp_path / f"trajectory_0_{weights}.pt", weights_only=True)
    assert data["dones"].shape == (9, 2, 1)
    assert data["prev_values"].shape == (9, 2, 1)
    assert "intervene_flags" not in data
    assert get_model_weights_id(None) == NO_VERSIONS


def test_a_checkpoint_saved_again_writes_only_what_is_new(tmp_path: Path) -> None:
    buffer = TrajectoryReplayBuffer(sample_window_size=4, checkpoint_layout="rlinf")
    buffer.add_trajectories([trajectory(n) for n in range(4)])
    buffer.save_checkpoint(tmp_path)
    before = {path.name: path.stat().st_ino for path in tmp_path.glob("*.pt")}
    buffer.add_trajectories([trajectory(4)])
    buffer.save_checkpoint(tmp_path)
    after = {path.name: path.stat().st_ino for path in tmp_path.glob("*.pt")}
    assert sorted(name.split("_")[1] for name in after) == ["1", "2", "3", "4"]
    assert all(after[name] == before[name] for name in before.keys() & after.keys())
    buffer.clear()
    buffer.add_trajectories([trajectory(9)])
    buffer.save_checkpoint(tmp_path)
    (entry,) = Directory(tmp_path).entries
    same(Directory(tmp_path).load(entry), trajectory(9))
    buffer.close()


@pytest.mark.parametrize(("total", "ranks"), [(10, 4), (3, 4), (8, 2), (5, 1)])
def test_ranks_load_contiguous_blocks_the_first_ones_one_more(total: int, ranks: int, tmp_path: Path) -> None:
    source = TrajectoryReplayBuffer()
    source.add_trajectories([trajectory(n) for n in range(total)])
    source.save_checkpoint(tmp_path)
    shares = []
    for rank in range(ranks):
        buffer = TrajectoryReplayBuffer()
        buffer.load_checkpoint(tmp_path, is_distributed=True, local_rank=rank, world_size=ranks)
        shares.append(buffer.trajectory_ids)
        assert buffer.total_samples == 12 * len(buffer)
        buffer.close()
    assert [number for share in shares for number in share] == list(range(total))
    assert [len(share) for share in shares] == [total // ranks + (rank < total % ranks) for rank in range(ranks)]
    for bad in (-1, ranks):
        with pytest.raises(ValueError, match=f"local_rank: expected 0 to {ranks - 1}, got {bad}"):
            source.load_checkpoint(tmp_path, is_distributed=True, local_rank=bad, world_size=ranks)
    assert len(source) == total, "a call that was refused changed something"
    source.close()


def test_loading_into_a_buffer_that_was_used_replaces_what_it_held(tmp_path: Path) -> None:
    source = TrajectoryReplayBuffer()
    source.add_trajectories([trajectory(n) for n in range(2)])
    source.save_checkpoint(tmp_path)
    buffer = TrajectoryReplayBuffer(sample_window_size=2)
    buffer.add_trajectories([trajectory(n) for n in range(50, 57)])
    buffer.sample(5)
    buffer.load_checkpoint(tmp_path)
    assert set(numbers(buffer.sample(100))) == {0, 1}
    buffer.load_checkpoint(tmp_path)
    assert len(buffer) == 2, "loaded twice"
    source.close()
    buffer.close()


def test_trajectories_without_rewards_are_kept(tmp_path: Path) -> None:
    one = trajectory(rewards=None, prev_values=None)
    buffer = TrajectoryReplayBuffer()
    buffer.add_trajectories([one])
    buffer.save_checkpoint(tmp_path)
    assert "rewards" not in buffer.sample(3)
    second = TrajectoryReplayBuffer()
    second.load_checkpoint(tmp_path)
    same(second.get_trajectory(0), one)
    buffer.close()
    second.close()


def test_clearing_the_cache_leaves_a_buffer_that_works(saved: dict[str, Any]) -> None:
    buffer = TrajectoryReplayBuffer(**saved)
    buffer.add_trajectories([trajectory(0)])
    buffer.clear_cache()
    buffer.add_trajectories([trajectory(1)])
    assert set(numbers(buffer.sample(50))) == {0, 1}
    buffer.clear()
    assert (len(buffer), buffer.total_samples) == (0, 0)
    with pytest.raises(NotReadyError, match="Cannot sample from an empty buffer"):
        buffer.sample(1)
    buffer.add_trajectories([trajectory(2)])
    assert buffer.trajectory_ids == [0]
    assert set(numbers(buffer.sample(50))) == {2}
    buffer.close()
    with pytest.raises(ClosedError):
        buffer.add_trajectories([trajectory(3)])
    again = TrajectoryReplayBuffer(**saved)
    assert again.trajectory_ids == [0]
    same(again.get_trajectory(0), trajectory(2))
    again.close()


# ---- bad input -----------------------------------------------------------------------------------------


def without(one: Trajectory, name: str) -> Trajectory:
    setattr(one, name, None)
    return one


BAD: list[tuple[Any, str]] = [
    (
        lambda: trajectory(versions=torch.zeros(6, 2, 1)),
        "1 does not match earlier ones: versions: absent in earlier ones",
    ),
    (
        lambda: trajectory(curr_obs={1: torch.zeros(6, 2, 1), "1": torch.zeros(6, 2, 1)}),
        "names that differ as text",
    ),
    (
        lambda: without(trajectory(), "rewards"),
        "1 does not match earlier ones: rewards: float32 .* in earlier ones, absent",
    ),
    (
        lambda: trajectory(rewards=torch.zeros(6, 2, 1).double()),
        "rewards: float32 .1,. in earlier ones, float64 .1,. in this one",
    ),
    (
        lambda: trajectory(actions=torch.zeros(6, 2, 5)),
        "actions: float32 .4,. in earlier ones, float32 .5,. in this one",
    ),
    (
        lambda: trajectory(dones=torch.zeros(10, 2, 1) > 0),
        "1, dones: expected 6 rows or one extra row for each of several equal epochs",
    ),
    (lambda: trajectory(dones=torch.zeros(8, 2, 1) > 0), "1, flags: expected the same number of rows for each"),
    (
        lambda: trajectory(prev_values=torch.zeros(5, 2, 1)),
        "1, prev_values: expected 6 rows or one extra row for each",
    ),
    (lambda: trajectory(rewards=torch.zeros(6, 3, 1)), "1, rewards: expected 2 environments, got 3"),
    (lambda: trajectory(n_steps=6, actions=torch.zeros(5, 2, 4)), "expected 5 rows"),
    (lambda: trajectory(rewards=torch.zeros(6)), r"1, rewards: expected a tensor \[T, B, ...\], got shape"),
    (lambda: {"rewards": torch.zeros(6, 2, 1), "colour": 3}, "1: unknown field 'colour'"),
    (
        lambda: trajectory(curr_obs={"task_descriptions": ["pick"]}),
        "1, curr_obs/task_descriptions: expected tensors",
    ),
    (lambda: Trajectory(), "expected a field with a row for every step"),
]


@pytest.mark.parametrize(("bad", "message"), BAD)
def test_a_trajectory_that_does_not_fit_is_refused_with_all_that_came_with_it(bad: Any, message: str) -> None:
    buffer = TrajectoryReplayBuffer()
    buffer.add_trajectories([trajectory(0)])
    before = buffer.get_stats()
    with pytest.raises(DataError, match=message):
        buffer.add_trajectories([trajectory(1), bad()])
    assert buffer.get_stats() == before
    assert set(numbers(buffer.sample(100))) == {0}
    buffer.add_trajectories([trajectory(2)])
    assert buffer.trajectory_ids == [0, 1]
    buffer.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"auto_save": True}, "auto_save_path: expected a directory or a URL"),
        ({"trajectory_format": "pkl"}, "trajectory_format: a pickle can run any code"),
        ({"trajectory_format": "h5"}, "trajectory_format: expected 'pt', got 'h5'"),
        (
            {"trajectory_format": "zarr"},
            "trajectory_format: expected 'pt', got 'zarr'; use checkpoint_layout='copy'",
        ),
        ({"checkpoint_layout": "pt"}, "layout: expected one of reference, copy, rlinf, got 'pt'"),
        ({"checkpoint_layout": "reference"}, "layout: 'reference' needs a store that outlives the process"),
        ({"sample_window_size": -1}, "sample_window_size: expected 0 or a positive integer, got -1"),
        ({"sample_window_size": 2.5}, "sample_window_size: expected 0 or a positive integer, got 2.5"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrajectoryReplayBuffer(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"capacity": 50}, "capacity: this buffer sets it itself; .* with sample_window_size"),
        ({"sample": None}, "sample: this buffer sets it itself"),
        ({"windw": 3}, r"unknown options \['windw'\]; accepted are .* sample_window_size, .* cache_bytes,"),
    ],
)
def test_options_that_are_not_taken_are_refused_at_once(options: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        TrajectoryReplayBuffer(**options)


def test_what_is_no_list_and_what_is_no_checkpoint_is_said(tmp_path: Path) -> None:
    buffer = TrajectoryReplayBuffer()
    for one in (trajectory(), {"actions": torch.zeros(3, 1, 1)}):
        with pytest.raises(TypeError, match=f"expected a list of trajectories, got a {type(one).__name__}"):
            buffer.add_trajectories(one)  # type: ignore[arg-type]
    with pytest.raises(StoreNotFoundError, match="nowhere: expected RLinf's files or a store, found neither"):
        buffer.load_checkpoint(tmp_path / "nowhere")
    buffer.close()


def test_an_empty_buffer_says_so() -> None:
    buffer = TrajectoryReplayBuffer()
    for call in (lambda: buffer.sample(4), lambda: buffer.sample_chunks(4)):
        with pytest.raises(NotReadyError, match="Cannot sample from an empty buffer"):
            call()
    buffer.add_trajectories([])
    assert len(buffer) == 0
    with pytest.raises(ValueError, match="num_chunks: expected a positive integer, got 0"):
        buffer.sample()
    buffer.close()
    buffer.close()


def test_a_place_of_other_things_is_not_written_to(tmp_path: Path) -> None:
    source = TrajectoryReplayBuffer()
    source.add_trajectories([trajectory()])
    source.save_checkpoint(tmp_path / "theirs", layout="rlinf")
    with pytest.raises(DataError, match="holds RLinf's own files; load them with load_checkpoint"):
        TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path / "theirs")
    with trajstore.create(tmp_path / "other").writer() as writer:
        writer.append_episode({"x": np.zeros(3)})
    with pytest.raises(DataError, match="expected a store of RLinf's trajectories, found a store of other data"):
        TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path / "other")
    with pytest.raises(DataError, match="expected a store of RLinf's trajectories, found a store of other data"):
        source.load_checkpoint(tmp_path / "other")
    with pytest.raises(trajstore.StoreNotFoundError):
        source.load_checkpoint(tmp_path / "nowhere")
    assert len(source) == 1
    source.close()


# ---- directories ---------------------------------------------------------------------------------------


def rlinf_directory(path: Path, given: dict[int, Trajectory], index: str = "trajectory_index.json") -> None:
    """A directory as RLinf writes it."""
    path.mkdir(parents=True)
    entries = {}
    for number, one in given.items():
        data = {n: v for n, v in vars(one).items() if v is not None and v != {}}
        data["model_weights_id"] = NO_VERSIONS
        torch.save(data, path / f"trajectory_{number}_{NO_VERSIONS}.pt")
        n_steps, n_envs = one.shape
        entries[str(number)] = {"num_samples": n_steps * n_envs, "trajectory_id": number, "max_episode_length": 8,
                                "shape": [n_steps, n_envs, 1], "model_weights_id": NO_VERSIONS}  # fmt: skip
    samples = sum(entry["num_samples"] for entry in entries.values())
    about = {"trajectory_format": "pt", "size": len(given), "total_samples": samples,
             "trajectory_counter": max(given, default=-1) + 1, "seed": 1234}  # fmt: skip
    (path / "metadata.json").write_text(json.dumps(about))
    (path / index).write_text(json.dumps({"trajectory_index": entries, "trajectory_id_list": list(given)}))


@pytest.mark.parametrize("index", ["trajectory_index.json", "trajector_index.json"])
def test_directories_of_rlinf_are_loaded_with_either_spelling_of_the_index(tmp_path: Path, index: str) -> None:
    given = {n: trajectory(n, epochs=2) for n in (0, 3, 4)}
    rlinf_directory(tmp_path / "d", given, index)
    buffer = TrajectoryReplayBuffer()
    buffer.load_checkpoint(tmp_path / "d")
    assert buffer.trajectory_ids == [0, 3, 4]
    for number, one in given.items():
        same(buffer.get_trajectory(number), one)
    buffer.add_trajectories([trajectory(5)])
    assert buffer.trajectory_ids[-1] == 5
    buffer.close()


def test_what_rlinf_itself_saved_is_loaded(tmp_path: Path) -> None:
    shutil.unpack_archive(Path(__file__).parents[1] / "data" / "rlinf.zip", tmp_path)
    buffer = TrajectoryReplayBuffer()
    buffer.load_checkpoint(tmp_path / "rlinf")
    assert (buffer.trajectory_ids, buffer.total_samples) == ([0, 1, 2], 2 * (3 + 4 + 5))
    for number in range(3):
        one = buffer.get_trajectory(number)
        assert one.shape == (3 + number, 2)
        assert one.dones is not None
        assert one.dones[..., 0].tolist() == [[False] * 2] * (3 + number) + [[True] * 2]
    batch = buffer.sample(500)
    name = batch["rewards"]
    assert torch.equal(batch["curr_obs"]["states"], name.repeat(1, 3))
    assert torch.equal(batch["next_obs"]["states"], name.repeat(1, 3) + 100)
    assert torch.equal(batch["prev_values"], name / 2)
    assert torch.equal(batch["versions"], name // 10_000)
    assert torch.equal(batch["dones"], name % 10_000 // 100 == 2 + name // 10_000)
    buffer.save_checkpoint(tmp_path / "again", layout="rlinf")
    assert [entry.id for entry in Directory(tmp_path / "again").entries] == [0, 1, 2]
    buffer.close()


@pytest.mark.parametrize("torn", ["", '{"trajectory_index": {"0": {"num_sam', None])
def test_a_torn_index_is_rebuilt_from_the_files(tmp_path: Path, torn: str | None) -> None:
    given = {n: trajectory(n) for n in range(12)}
    rlinf_directory(tmp_path / "d", given)
    for name in ("trajectory_index.json", "metadata.json"):
        path = tmp_path / "d" / name
        path.write_text(torn) if torn is not None else path.unlink()
    if torn is None:
        (tmp_path / "d" / "metadata.json").write_text("{}")
    buffer = TrajectoryReplayBuffer()
    buffer.load_checkpoint(tmp_path / "d")
    assert buffer.trajectory_ids == list(range(12))
    same(buffer.get_trajectory(11), given[11])
    buffer.close()


def test_trajectories_that_are_listed_and_have_no_file_are_named(tmp_path: Path) -> None:
    rlinf_directory(tmp_path / "d", {n: trajectory(n) for n in range(6)})
    for number in (0, 1):
        (tmp_path / "d" / f"trajectory_{number}_{NO_VERSIONS}.pt").unlink()
    buffer = TrajectoryReplayBuffer()
    with pytest.warns(UserWarning, match=r"2 of 6 trajectories are listed and have no file: \[0, 1\]"):
        buffer.load_checkpoint(tmp_path / "d")
    assert buffer.trajectory_ids == [2, 3, 4, 5]
    assert buffer.total_samples == 48
    buffer.close()


class Bomb:
    def __reduce__(self) -> Any:
        return exec, ("import builtins; builtins.trajstore_was_here = True",)


def test_nothing_in_a_directory_runs_code(tmp_path: Path) -> None:
    rlinf_directory(tmp_path / "d", {0: trajectory(0)})
    torch.save({"rewards": Bomb()}, tmp_path / "d" / f"trajectory_0_{NO_VERSIONS}.pt")
    buffer = TrajectoryReplayBuffer()
    with pytest.raises(FormatError, match="damaged, or contains other objects than tensors"):
        buffer.load_checkpoint(tmp_path / "d")
    import builtins

    assert not hasattr(builtins, "trajstore_was_here")
    buffer.close()


def test_pickles_are_loaded_only_if_they_are_trusted(tmp_path: Path) -> None:
    rlinf_directory(tmp_path / "d", {0: trajectory(0)})
    path = tmp_path / "d" / f"trajectory_0_{NO_VERSIONS}.pt"
    data = torch.load(path, weights_only=True)
    path.with_suffix(".pkl").write_bytes(pickle.dumps(data))
    path.unlink()
    buffer = TrajectoryReplayBuffer()
    with pytest.raises(FormatError, match="a pickle can run any code; if you made this file, give trusted=True"):
        buffer.load_checkpoint(tmp_path / "d")
    buffer.load_checkpoint(tmp_path / "d", trusted=True)
    same(buffer.get_trajectory(0), trajectory(0))
    buffer.close()


def test_names_in_an_index_cannot_lead_out_of_the_directory(tmp_path: Path) -> None:
    rlinf_directory(tmp_path / "d", {0: trajectory(0)})
    path = tmp_path / "d" / "trajectory_index.json"
    path.write_text(path.read_text().replace(NO_VERSIONS, "../../etc/passwd"))
    with pytest.raises(FormatError, match=r"has the model_weights_id '../../etc/passwd'"):
        Directory(tmp_path / "d")


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    rlinf_directory(tmp_path / "d", {0: trajectory(0)})
    path = tmp_path / "d" / f"trajectory_0_{NO_VERSIONS}.pt"
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(FormatError, match=f"trajectory_0_{NO_VERSIONS}.pt: damaged"):
        TrajectoryReplayBuffer().load_checkpoint(tmp_path / "d")


# ---- interventions, builder, datasets, priorities ------------------------------------------------------


@pytest.mark.parametrize("epochs", [0, 1, 2, 3])
@pytest.mark.parametrize("mode", ["any", "all"])
def test_interventions_are_extracted_with_their_own_flags_values_and_versions(mode: Any, epochs: int) -> None:
    flags = torch.zeros(6, 2, 4, dtype=torch.bool)
    flags[1, 0], flags[2, 0, 0], flags[4, 1, 3] = True, True, True
    one = trajectory(epochs=epochs, intervene_flags=flags, versions=torch.arange(12.0).reshape(6, 2, 1))
    found = one.extract_intervene_traj(mode)
    whole = one.aligned()
    rows = {"any": [([1, 2], 0), ([4], 1)], "all": [([1], 0)]}[mode]
    assert found is not None
    assert len(found) == len(rows)
    for part, (steps, env) in zip(found, rows, strict=True):
        assert part.shape == (len(steps), 1)
        for path, leaf in part.leaves.items():
            assert torch.equal(leaf[:, 0], whole.leaves[path][steps, env]), path
    demos = TrajectoryReplayBuffer()
    demos.add_trajectories(found)
    demos.add_trajectories([one])
    assert len(demos) == len(found) + 1
    assert trajectory(intervene_flags=torch.zeros(6, 2, 4)).extract_intervene_traj(mode) is None
    assert trajectory().extract_intervene_traj(mode) is None
    with pytest.raises(ValueError, match="mode: expected 'any' or 'all', got 'some'"):
        one.extract_intervene_traj("some")  # type: ignore[arg-type]
    demos.close()


def test_a_trajectory_is_built_step_by_step_and_its_last_step_amended() -> None:
    builder = EmbodiedTrajectoryBuilder(max_episode_length=8)
    with pytest.raises(DataError, match="expected at least one step, got none"):
        builder.to_trajectory()
    builder.append_step_result(ChunkStepResult(dones=torch.zeros(3, 1).bool()))
    for t in range(4):
        actions, rewards = torch.full((3, 4), float(t)), torch.full((3, 2), float(t))
        builder.append_step_result({"actions": actions, "rewards": rewards, "dones": torch.zeros(3, 1) > 0})
        observation = {"states": torch.full((3, 2), float(t)), "task_descriptions": ["a", "b", "c"]}
        with pytest.warns(UserWarning, match="curr_obs/task_descriptions: list") if t == 0 else nullcontext():
            builder.append_transitions(observation, {"states": torch.full((3, 2), t + 1.0)})
        if t == 1:
            builder.update_last_actions(torch.full((3, 4), -9.0), torch.tensor([[1, 0], [0, 0], [1, 1]]))
        if t == 2:
            builder.mark_last_step_with_intervene_flags(torch.tensor([False, True, False]))
    one = builder.to_trajectory()
    assert one.shape == (4, 3)
    assert one.dones is not None
    assert one.dones.shape == (5, 3, 1)
    assert one.actions is not None
    assert one.actions[1].tolist() == [[-9, -9, 1, 1], [1, 1, 1, 1], [-9, -9, -9, -9]]
    assert one.intervene_flags is not None
    assert one.intervene_flags.any(-1).tolist() == [[0, 0, 0], [1, 0, 1], [0, 1, 0], [0, 0, 0]]
    assert [part.shape for part in builder.to_splited_trajectories(2)] == [(4, 2), (4, 1)]
    parts = builder.to_splited_trajectories_by_sizes([1, 2])
    assert torch.equal(torch.cat([p.actions for p in parts if p.actions is not None], 1), one.actions)
    assert convert_trajectories_to_batch(parts)["curr_obs"]["states"].shape == (4, 3, 2)
    with pytest.raises(ValueError, match="sizes: expected positive numbers that add up to 3"):
        builder.to_splited_trajectories_by_sizes([1, 1])
    with pytest.raises(DataError, match="intervene_flags: expected"):
        builder.update_last_actions(torch.zeros(3, 4), torch.zeros(3, 3))
    with pytest.raises(DataError, match=r"rewards: expected torch.float32"):
        builder.append_step_result({"rewards": torch.zeros(3, 1)})
    with pytest.raises(DataError, match="unknown field 'reward'"):
        builder.append_step_result({"reward": torch.zeros(3, 1)})
    builder.clear()
    builder.append_step_result({"rewards": torch.zeros(2, 1)})
    assert builder.to_trajectory().shape == (1, 2)


def test_trajectories_of_other_fields_make_no_batch() -> None:
    with pytest.raises(DataError, match="trajectory 1: 'rewards' is in this one or in the first, not in both"):
        convert_trajectories_to_batch([trajectory(), without(trajectory(), "rewards")])


def full(number: int, n: int = 3) -> TrajectoryReplayBuffer:
    buffer = TrajectoryReplayBuffer()
    buffer.add_trajectories([trajectory(number + i) for i in range(n)])
    return buffer


@pytest.mark.parametrize("kind", [ReplayBufferDataset, PreloadReplayBufferDataset])
def test_half_of_every_batch_comes_from_the_demonstrations(kind: Any) -> None:
    replay, demos = full(0), full(50)
    dataset = kind(replay, demos, 9, 1, 1, prefetch_size=2)
    loader = torch.utils.data.DataLoader(dataset, batch_size=1, num_workers=0, collate_fn=replay_buffer_collate_fn)
    batches = iter(loader)
    for _ in range(4):
        found = numbers(next(batches))
        assert sum(found.values()) == 9
        assert sum(n for number, n in found.items() if number >= 50) == 4
    dataset.close()
    alone = kind(replay, None, 7, 1, 1)
    assert len(next(iter(alone))["rewards"]) == 7
    alone.close()
    replay.close()
    demos.close()


@pytest.mark.parametrize("kind", [ReplayBufferDataset, PreloadReplayBufferDataset])
def test_a_dataset_waits_until_there_is_enough(kind: Any) -> None:
    replay = full(0, 1)
    dataset = kind(replay, None, 4, 3, 0)
    later = threading.Timer(0.2, lambda: replay.add_trajectories([trajectory(1), trajectory(2)]))
    later.start()
    next(iter(dataset))
    assert len(replay) == 3
    dataset.close()
    dataset.close()
    kind(replay, None, 4, 3, 0).close()  # before it was iterated
    assert list(dataset) == []
    replay.close()


def test_what_goes_wrong_in_the_preloading_thread_is_raised() -> None:
    replay = full(0)
    dataset = PreloadReplayBufferDataset(replay, None, 4, 1, 0, prefetch_size=1)
    batches = iter(dataset)
    next(batches)
    replay.close()
    with pytest.raises(ClosedError):
        list(itertools.islice(batches, 10))
    with pytest.raises(ClosedError):
        next(iter(dataset))
    dataset.close()


def test_batches_of_other_fields_are_not_joined() -> None:
    with pytest.raises(DataError, match="'b' is only in the second of the two"):
        concat_batch({"a": torch.zeros(2)}, {"a": torch.zeros(2), "b": torch.zeros(2)})


def test_the_priority_store_keeps_the_newest_versions() -> None:
    store = PriorityStore(3)
    assert all(store.add((version, version + 0.5), f"v{version}") for version in (5, 1, 3))
    assert not store.add((0, 9.0), "older than all")
    assert store.add((1, 1.5), "as old as the oldest, and newer here")
    assert store.add((4, 4), "v4")
    assert len(store) == 3
    assert store.topn(2) == ["v5", "v4"]
    assert store.topn(9) == ["v5", "v4", "v3"]
    third = {"ratio": 1 / 3}
    assert store.get_metric() == {3: third, 4: third, 5: third, "discarded_unused": 3}
    assert store.remove_below(5) == 2
    assert store.get_metric() == {5: {"ratio": 1.0}, "discarded_unused": 3}
    store.add((6, 6), "v6")
    assert store.remove_below(7) == 2
    assert store.get_metric() == {"discarded_unused": 4}
    store.add((1, 1.5), trajectory(n_steps=4, n_envs=1, versions=torch.tensor([1, 1, 2, 1]).reshape(4, 1, 1)))
    assert store.get_metric() == {1: {"ratio": 0.75}, 2: {"ratio": 0.25}, "discarded_unused": 4}
    with pytest.raises(ValueError, match="maxsize: expected a positive integer, got 0"):
        PriorityStore(0)


# ---- a place that is used again ------------------------------------------------------------------------


def saved_at(path: Path, first: int, n: int = 3) -> None:
    buffer = TrajectoryReplayBuffer(checkpoint_layout="rlinf")
    buffer.add_trajectories([trajectory(first + i) for i in range(n)])
    buffer.save_checkpoint(path)
    buffer.close()


def held_at(path: Path) -> list[int]:
    buffer = TrajectoryReplayBuffer(checkpoint_layout="rlinf")
    buffer.load_checkpoint(path)
    found = [buffer.get_trajectory(number) for number in buffer.trajectory_ids]
    buffer.close()
    return [int(one.rewards[0, 0, 0]) // 10_000 for one in found if one.rewards is not None]


def test_a_checkpoint_saved_over_another_has_its_own_files(tmp_path: Path) -> None:
    for first in (0, 10, 20):
        saved_at(tmp_path, first)
        assert held_at(tmp_path) == [first, first + 1, first + 2]
        assert len(list(tmp_path.glob("*.pt"))) == 3
    buffer = TrajectoryReplayBuffer(checkpoint_layout="rlinf")
    for _ in range(2):
        buffer.load_checkpoint(tmp_path)
        buffer.save_checkpoint(tmp_path)
        assert held_at(tmp_path) == [20, 21, 22]
    buffer.close()


@pytest.mark.parametrize("fails_at", range(5))
def test_a_checkpoint_that_fails_leaves_the_one_before(
    tmp_path: Path, fails_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved_at(tmp_path, 0)
    calls = []

    def failing(old: Any, new: Any, put: Any = os.replace) -> None:
        if len(calls) == fails_at:
            raise OSError("no space left")
        calls.append(new)
        put(old, new)

    buffer = TrajectoryReplayBuffer(checkpoint_layout="rlinf")
    buffer.add_trajectories([trajectory(10 + i) for i in range(3)])
    buffer.flush()
    monkeypatch.setattr("trajstore.storage.atomic_files.os.replace", failing)
    with pytest.raises(OSError, match="no space left"):  # at one of three files, the index and the metadata
        buffer.save_checkpoint(tmp_path)
    monkeypatch.undo()
    assert held_at(tmp_path) == ([10, 11, 12] if fails_at == 4 else [0, 1, 2])
    buffer.save_checkpoint(tmp_path)
    assert held_at(tmp_path) == [10, 11, 12]
    buffer.close()


def test_a_load_that_can_not_be_leaves_what_is_held(saved: dict[str, Any], tmp_path: Path) -> None:
    other = TrajectoryReplayBuffer()
    other.add_trajectories([trajectory(prev_values=None)])
    other.save_checkpoint(tmp_path / "other")
    rlinf_directory(tmp_path / "damaged", {0: trajectory(0)})
    (tmp_path / "damaged" / f"trajectory_0_{NO_VERSIONS}.pt").write_bytes(b"nothing")
    buffer = TrajectoryReplayBuffer(**saved)
    buffer.add_trajectories([trajectory(n) for n in range(5)])
    for path in ("other", "damaged"):
        with pytest.raises((DataError, FormatError)):
            buffer.load_checkpoint(tmp_path / path)
        assert buffer.trajectory_ids == [0, 1, 2, 3, 4]
    buffer.close()
    in_memory = TrajectoryReplayBuffer()
    in_memory.add_trajectories([trajectory(0)])
    in_memory.load_checkpoint(tmp_path / "other")  # nothing on disk has the old fields
    assert "prev_values" not in in_memory.sample(3)
    in_memory.close()
    other.close()


def test_a_buffer_that_loads_its_own_store_holds_what_it_held(saved: dict[str, Any]) -> None:
    buffer = TrajectoryReplayBuffer(**saved)
    buffer.add_trajectories([trajectory(n) for n in range(3)])
    buffer.load_checkpoint(saved["auto_save_path"])
    assert buffer.trajectory_ids == [0, 1, 2]
    with pytest.raises(DataError, match="is this buffer's own store"):
        buffer.load_checkpoint(saved["auto_save_path"] + "/", True, 0, 2)
    with pytest.raises(DataError, match="is a store; write RLinf's files to another directory"):
        buffer.save_checkpoint(saved["auto_save_path"], layout="rlinf")
    with pytest.raises(ValueError, match="expected a local directory for RLinf's files; only stores"):
        buffer.save_checkpoint("s3://bucket/checkpoint", layout="rlinf")
    buffer.close()
    again = TrajectoryReplayBuffer(**saved)
    assert again.trajectory_ids == [0, 1, 2]
    again.close()


def test_what_was_cleared_does_not_come_back_after_a_crash(saved: dict[str, Any]) -> None:
    buffer = TrajectoryReplayBuffer(**saved, commit_seconds=None)
    for first in (0, 20):
        buffer.add_trajectories([trajectory(first + i) for i in range(2)])
        buffer.clear()
    buffer.add_trajectories([trajectory(7)])
    buffer.flush()
    crash(buffer.memory)
    again = TrajectoryReplayBuffer(**saved)
    assert again.trajectory_ids == [0]
    same(again.get_trajectory(0), trajectory(7))
    again.close()


def test_a_store_as_a_checkpoint_holds_only_the_window(tmp_path: Path) -> None:
    buffer = TrajectoryReplayBuffer(sample_window_size=2, checkpoint_layout="copy")
    buffer.add_trajectories([trajectory(n) for n in range(5)])
    buffer.save_checkpoint(tmp_path / "ckpt")
    buffer.close()
    assert held_at(tmp_path / "ckpt") == [3, 4]


def test_an_addition_that_fails_half_way_leaves_nothing(
    saved: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {n: trajectory(n, n_steps=90, breaks=(40,)) for n in range(3)}
    buffer = TrajectoryReplayBuffer(**saved, buffer_bytes=40_000)
    buffer.add_trajectories([given[0]])
    extend, calls = buffer.memory.extend, []

    def failing(*args: Any, **more: Any) -> Any:
        calls.append(args)
        if len(calls) == 2:
            raise StorageError("the storage is down")
        return extend(*args, **more)

    monkeypatch.setattr(buffer.memory, "extend", failing)
    with pytest.raises(StorageError, match="the storage is down"):
        buffer.add_trajectories([given[1]])
    monkeypatch.undo()
    assert len(calls) == 2
    assert set(numbers(buffer.sample(500))) == {0}
    buffer.add_trajectories([given[1], given[2]])
    check_rows(buffer.sample(500), given)
    buffer.close()
    again = TrajectoryReplayBuffer(sample_window_size=2, **saved)
    assert again.trajectory_ids == [0, 1, 2]
    for number, one in given.items():
        same(again.get_trajectory(number), one)
    assert set(numbers(again.sample(500))) == {1, 2}
    again.close()


def test_names_of_any_characters_are_kept(tmp_path: Path) -> None:
    plain = ("observation/image", "observation/state", "a.b c", "plain", "x.2f.y")
    names = (*plain, "\u00e9", "_\u00e9", "(left) cam", "cam (left)", "-x", "__x", ".x", "..x", "_..x")
    inputs = {name: torch.full((6, 2, 1), float(i)) for i, name in enumerate(names)}
    one = trajectory(forward_inputs={**inputs, "deep": {"a/b": inputs["plain"]}})
    buffer = TrajectoryReplayBuffer()
    buffer.add_trajectories([one])
    found = buffer.sample(3)["forward_inputs"]
    assert set(found) == {*names, "deep"}
    assert [found[name][0].item() for name in names] == list(range(len(names)))
    assert set(found["deep"]) == {"a/b"}
    buffer.save_checkpoint(tmp_path)
    buffer.load_checkpoint(tmp_path)
    again = buffer.get_trajectory(0)
    same(again, one)
    assert again.forward_inputs.keys() == one.forward_inputs.keys()
    batch = concat_batch(buffer.sample(2), buffer.sample(3))
    assert len(batch["forward_inputs"]["observation/image"]) == 5
    buffer.close()


def test_the_action_that_is_learned_from_is_the_one_that_a_human_took() -> None:
    builder = EmbodiedTrajectoryBuilder()
    for t in range(2):
        given = {"action": torch.full((2, 4), float(t)), "model_action": torch.full((2, 4), float(t))}
        builder.append_step_result({"actions": torch.full((2, 4), float(t)), "forward_inputs": given})
    builder.update_last_actions(torch.full((2, 4), -9.0), torch.tensor([True, False]))
    one = builder.to_trajectory()
    assert one.actions is not None
    assert torch.equal(one.forward_inputs["action"], one.actions)
    assert one.actions[1].tolist() == [[-9.0] * 4, [1.0] * 4]
    assert "model_action" not in one.forward_inputs


def test_a_listed_trajectory_is_not_replaced_by_another_file_of_its_number(tmp_path: Path) -> None:
    rlinf_directory(tmp_path / "d", {n: trajectory(n) for n in range(2)})
    path = tmp_path / "d" / f"trajectory_1_{NO_VERSIONS}.pt"
    path.rename(path.with_name("trajectory_1_other.pt"))
    assert Directory(tmp_path / "d").missing == [1]
    path.with_name("trajectory_1_other.pt").rename(path.with_name(f"trajectory_1_{NO_VERSIONS}_7.pt"))
    assert Directory(tmp_path / "d").missing == []


def test_what_a_save_that_was_killed_has_left_goes_with_the_next(tmp_path: Path) -> None:
    for name in (
        "trajectory_0_x-0123abcd.pt",
        ".trajectory_0_x.pt.0123abcd",
        ".metadata.json.0123abcd",
        "notes.txt",
    ):
        (tmp_path / name).write_text("left")
    saved_at(tmp_path, 0)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {f"trajectory_{n}_{NO_VERSIONS}.pt" for n in range(3)} | {
        "metadata.json", "trajectory_index.json", "notes.txt",
    }  # fmt: skip


def test_an_id_of_weights_that_no_file_could_have_is_refused_at_once() -> None:
    buffer = TrajectoryReplayBuffer()
    with pytest.raises(DataError, match="trajectory 0, model_weights_id: expected letters"):
        buffer.add_trajectories([trajectory(model_weights_id="a/b")])
    buffer.close()


def test_a_store_that_is_opened_again_draws_other_batches(saved: dict[str, Any]) -> None:
    drawn = []
    for number in range(3):
        buffer = TrajectoryReplayBuffer(7, sample_window_size=1, **saved)
        buffer.add_trajectories([trajectory(number, n_steps=90)])
        drawn.append(buffer.sample(60)["rewards"] % 10_000)
        buffer.close()
    assert not any(torch.equal(drawn[i], drawn[j]) for i, j in ((0, 1), (0, 2), (1, 2)))


def test_demonstrations_that_were_loaded_go_on_where_they_were(tmp_path: Path) -> None:
    demos, replay = full(50), full(0)
    ReplayBufferDataset(replay, demos, 40, 1, 1)
    first = demos.sample(20)["rewards"]
    demos.save_checkpoint(tmp_path)
    expected = demos.sample(20)["rewards"]
    again = TrajectoryReplayBuffer()
    again.load_checkpoint(tmp_path)
    ReplayBufferDataset(replay, again, 40, 1, 1)
    found = again.sample(20)["rewards"]
    assert torch.equal(found, expected)
    assert not torch.equal(found, first)
    for buffer in (demos, again, replay):
        buffer.close()


# ---- beside other threads


def elsewhere(work: Callable[[], object]) -> None:
    """Do something in another thread, and wait for it."""
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


@pytest.mark.parametrize("is_filled_again", [False, True])
def test_sampling_beside_a_clear_draws_what_is_held_then(
    monkeypatch: pytest.MonkeyPatch, is_filled_again: bool
) -> None:
    buffer = full(0)
    sample = buffer.memory.sample

    def cleared(*given: Any, **named: Any) -> Any:
        elsewhere(buffer.clear)
        if is_filled_again:
            elsewhere(lambda: buffer.add_trajectories([trajectory(7)]))
        return sample(*given, **named)

    monkeypatch.setattr(buffer.memory, "sample", cleared)
    if is_filled_again:
        assert set(numbers(buffer.sample(20))) == {7}
    else:
        with pytest.raises(NotReadyError, match="Cannot sample from an empty buffer"):
            buffer.sample(20)
    buffer.close()
    with pytest.raises(ClosedError):
        buffer.sample(20)


def test_a_flush_beside_a_clear_is_none_of_a_closed_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = full(0)
    flush = buffer.memory.flush

    def cleared() -> None:
        elsewhere(buffer.clear)
        flush()

    monkeypatch.setattr(buffer.memory, "flush", cleared)
    buffer.flush()
    buffer.clear_cache()
    assert len(buffer) == 0
    buffer.close()


@pytest.mark.parametrize("is_filled_again", [False, True])
def test_a_dataset_whose_buffer_is_cleared_waits_until_it_is_ready_again(
    monkeypatch: pytest.MonkeyPatch, is_filled_again: bool
) -> None:
    buffer = full(0)
    dataset = ReplayBufferDataset(buffer, None, 8, 1, 0)
    sample, waited = buffer.sample, []

    def cleared(n: int) -> Any:
        monkeypatch.setattr(buffer, "sample", sample)
        buffer.clear()
        with contextlib.suppress(NotReadyError):
            sample(n)
        if is_filled_again:
            buffer.add_trajectories([trajectory(7)])
        raise NotReadyError("there was nothing at that moment")

    def look(seconds: float) -> None:
        waited.append(seconds)
        buffer.add_trajectories([trajectory(8)])

    monkeypatch.setattr(buffer, "sample", cleared)
    monkeypatch.setattr(dataset._is_closed, "wait", look)
    assert set(numbers(next(iter(dataset)))) == {7 if is_filled_again else 8}
    assert len(waited) == (0 if is_filled_again else 1)
    dataset.close()
    buffer.close()


@pytest.mark.parametrize("look", [len, lambda b: b.total_samples, lambda b: b.is_ready(100)])
def test_counts_are_not_read_in_the_middle_of_a_change(look: Callable[[TrajectoryReplayBuffer], int]) -> None:
    buffer, seen = full(0), []
    expected, ledger = look(buffer), buffer._ledger
    reader = threading.Thread(target=lambda: seen.append(look(buffer)))
    with buffer._lock:  # as add_trajectories does
        ledger._stop += 100
        ledger._n_samples += 100
        reader.start()
        reader.join(0.2)  # time to read what it must not
        ledger._stop -= 100
        ledger._n_samples -= 100
    reader.join()
    assert seen == [expected]
    buffer.close()


def test_a_commit_begins_with_every_trajectory(saved: dict[str, Any]) -> None:
    buffer = TrajectoryReplayBuffer(**saved, commit_seconds=None)
    buffer.add_trajectories([trajectory(0)])
    writer = buffer.memory.session.writer
    writer.wait(writer._pipeline._commit_thread.n_submitted)  # nothing is handed off by this
    assert trajstore.open(saved["auto_save_path"]).episodes["length"].sum() == buffer.total_samples
    buffer.close()
