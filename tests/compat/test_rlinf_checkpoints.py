"""Checkpoints of RLinf's buffer: references to its store, copies of it, and RLinf's files."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import trajstore
from tests.compat.test_rlinf import check_rows, same, trajectory
from trajstore import DataError, FormatError, StoreNotFoundError
from trajstore.compat.rlinf import (
    Directory,
    PreloadReplayBufferDataset,
    ReplayBufferDataset,
    Trajectory,
    TrajectoryReplayBuffer,
)
from trajstore.compat.rlinf.trajectory_encoding import encode

REFERENCE = "trajstore_checkpoint.json"


def stored(path: Path, **more: Any) -> TrajectoryReplayBuffer:
    return TrajectoryReplayBuffer(7, auto_save=True, auto_save_path=path, fsync=False, **more)


def in_ram(**more: Any) -> TrajectoryReplayBuffer:
    return TrajectoryReplayBuffer(7, **more)


def tree(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}


def check_held(buffer: TrajectoryReplayBuffer, given: dict[int, Trajectory]) -> None:
    """The buffer holds exactly these trajectories, by number."""
    assert buffer.trajectory_ids == list(given)
    for number, one in given.items():
        same(buffer.get_trajectory(number), one)


# ---- references


def test_a_checkpoint_of_a_stored_buffer_is_one_small_file_and_no_step_is_copied(tmp_path: Path) -> None:
    buffer = stored(tmp_path / "store")
    buffer.add_trajectories([trajectory(n) for n in range(3)])
    buffer.flush()
    before = {path for path in tree(tmp_path / "store") if "/steps/" in path}
    buffer.save_checkpoint(tmp_path / "run" / "ckpt")
    assert list(tree(tmp_path / "run")) == [f"ckpt/{REFERENCE}"]
    assert {path for path in tree(tmp_path / "store") if "/steps/" in path} == before
    found = json.loads((tmp_path / "run" / "ckpt" / REFERENCE).read_text())
    assert found["stores"] == [str(tmp_path / "store"), "../../store"]
    assert found["checkpoint"] in [checkpoint.id for checkpoint in buffer.memory.checkpoints]
    buffer.close()


def test_the_same_buffer_returns_to_its_checkpoint_and_draws_the_next_batch_again(tmp_path: Path) -> None:
    given = {n: trajectory(n, breaks=(1,)) for n in range(3)}
    buffer = stored(tmp_path / "store")
    buffer.add_trajectories(list(given.values()))
    buffer.sample(10)
    buffer.save_checkpoint(tmp_path / "ckpt")
    expected = buffer.sample(50)["rewards"]
    buffer.add_trajectories([trajectory(8)])
    buffer.load_checkpoint(tmp_path / "ckpt")
    check_held(buffer, given)
    assert torch.equal(buffer.sample(50)["rewards"], expected)
    buffer.add_trajectories([trajectory(3)])
    check_held(buffer, {**given, 3: trajectory(3)})
    buffer.close()


def test_a_new_process_continues_a_checkpoint_in_its_own_store_without_reading_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {n: trajectory(n) for n in range(3)}
    buffer = stored(tmp_path / "store")
    buffer.add_trajectories(list(given.values()))
    buffer.save_checkpoint(tmp_path / "ckpt")
    expected = buffer.sample(50)["rewards"]
    buffer.add_trajectories([trajectory(9)])
    buffer.close()
    buffer = stored(tmp_path / "store")
    assert len(buffer) == 4
    with monkeypatch.context() as patch:
        patch.setattr(
            "trajstore.compat.rlinf.stored_trajectories.StoredTrajectories.load",
            lambda *_: pytest.fail("a trajectory was read"),
        )
        buffer.load_checkpoint(tmp_path / "ckpt")
    assert torch.equal(buffer.sample(50)["rewards"], expected)
    check_held(buffer, given)
    buffer.save_checkpoint(tmp_path / "next")
    buffer.close()
    other = in_ram()
    other.load_checkpoint(tmp_path / "next")
    check_held(other, given)
    other.close()


def test_a_checkpoint_still_holds_what_was_cleared_since(tmp_path: Path) -> None:
    given = {n: trajectory(n) for n in range(3)}
    buffer = stored(tmp_path / "store", grace_s=0.0)
    buffer.add_trajectories(list(given.values()))
    buffer.save_checkpoint(tmp_path / "ckpt")
    buffer.clear()
    buffer.add_trajectories([trajectory(7)])
    buffer.flush()
    buffer.load_checkpoint(tmp_path / "ckpt")
    check_held(buffer, given)
    buffer.close()


def test_ranks_load_their_share_of_a_reference(tmp_path: Path) -> None:
    source = stored(tmp_path / "store")
    source.add_trajectories([trajectory(n) for n in range(5)])
    source.save_checkpoint(tmp_path / "ckpt")
    source.close()
    for rank, share in enumerate(([0, 1, 2], [3, 4])):
        buffer = stored(tmp_path / f"rank_{rank}")
        buffer.load_checkpoint(tmp_path / "ckpt", is_distributed=True, local_rank=rank, world_size=2)
        check_held(buffer, {n: trajectory(n) for n in share})
        buffer.close()


@pytest.mark.parametrize("is_stored", [False, True])
def test_a_reference_to_another_store_is_copied_without_decoding(
    is_stored: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {n: trajectory(n, breaks=(3,)) for n in range(4)}
    source = stored(tmp_path / "store")
    source.add_trajectories(list(given.values()))
    source.save_checkpoint(tmp_path / "ckpt")
    expected = source.sample(50)["rewards"]
    source.add_trajectories([trajectory(9)])
    source.close()
    before = tree(tmp_path / "store")
    buffer = stored(tmp_path / "own") if is_stored else in_ram()
    with monkeypatch.context() as patch:
        patch.setattr(
            "trajstore.compat.rlinf.stored_trajectories.StoredTrajectories.load",
            lambda *_: pytest.fail("a trajectory was read"),
        )
        buffer.load_checkpoint(tmp_path / "ckpt")
    assert torch.equal(buffer.sample(50)["rewards"], expected)
    check_held(buffer, given)
    assert tree(tmp_path / "store") == before
    shutil.rmtree(tmp_path / "store")
    check_rows(buffer.sample(50), given)
    buffer.close()
    if is_stored:
        again = stored(tmp_path / "own")
        check_held(again, given)
        again.close()


def test_a_stored_buffer_with_data_replaces_it_by_a_reference_to_another_store(tmp_path: Path) -> None:
    given = {n: trajectory(n) for n in range(2)}
    source = stored(tmp_path / "store")
    source.add_trajectories(list(given.values()))
    source.save_checkpoint(tmp_path / "ckpt")
    buffer = stored(tmp_path / "own")
    buffer.add_trajectories([trajectory(n) for n in range(10, 13)])
    buffer.load_checkpoint(tmp_path / "ckpt")
    check_held(buffer, given)
    for one in (source, buffer):
        one.close()
    again = stored(tmp_path / "own")
    check_held(again, given)
    again.close()


def test_a_store_and_its_checkpoint_may_be_moved_together(tmp_path: Path) -> None:
    given = {n: trajectory(n) for n in range(2)}
    buffer = stored(tmp_path / "run" / "store")
    buffer.add_trajectories(list(given.values()))
    buffer.save_checkpoint(tmp_path / "run" / "step_1" / "ckpt")
    buffer.close()
    os.rename(tmp_path / "run", tmp_path / "moved")
    buffer = stored(tmp_path / "moved" / "store")
    buffer.add_trajectories([trajectory(5)])
    buffer.load_checkpoint(tmp_path / "moved" / "step_1" / "ckpt")
    check_held(buffer, given)
    buffer.close()


def test_a_reference_whose_store_is_gone_says_which_and_the_buffer_stays(tmp_path: Path) -> None:
    buffer = stored(tmp_path / "store")
    buffer.add_trajectories([trajectory(0)])
    buffer.save_checkpoint(tmp_path / "ckpt")
    buffer.close()
    shutil.rmtree(tmp_path / "store")
    other = in_ram()
    other.add_trajectories([trajectory(4)])
    with pytest.raises(StoreNotFoundError, match=r"ckpt: refers to checkpoint 'rlinf-.*/store or .*layout='copy'"):
        other.load_checkpoint(tmp_path / "ckpt")
    check_held(other, {0: trajectory(4)})
    other.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "else"}, "expected the format 'trajstore-rlinf-checkpoint', got 'else'"),
        ({"version": 2}, "has version 2, this trajstore reads version 1"),
        ({"checkpoint": "../x"}, "expected an id of a stream or checkpoint"),
        ({"trajectories": -1}, "expected a count, got -1"),
        ({"stores": []}, "stores: expected a list of places"),
        ({"stores": [3]}, "stores: expected paths and URLs, got 3"),
        ({"stores": ["simplecache::http://host/x"]}, "stores: expected paths and URLs"),
        ({"stores": ["http://host/x"]}, "puts are not known to be atomic"),
        ({"stores": ["x" * 5000]}, "stores: expected 1 to 4096 characters, got 5000"),
    ],
)
def test_a_hostile_reference_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    buffer = stored(tmp_path / "store")
    buffer.add_trajectories([trajectory(0)])
    buffer.save_checkpoint(tmp_path / "ckpt")
    path = tmp_path / "ckpt" / REFERENCE
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(FormatError, match=message):
        buffer.load_checkpoint(tmp_path / "ckpt")
    assert len(buffer) == 1
    buffer.close()


@pytest.mark.parametrize("content", [b"", b"[]", b'{"format": "tr', b"\xff\xfe", b" " * 70_000])
def test_a_damaged_reference_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / REFERENCE).write_bytes(content)
    buffer = in_ram()
    with pytest.raises(FormatError, match=r"not a reference to a checkpoint|expected at most 65536 bytes"):
        buffer.load_checkpoint(tmp_path)
    buffer.close()


# ---- copies


def test_a_copy_needs_nothing_else_and_the_next_one_replaces_it(tmp_path: Path) -> None:
    given = {n: trajectory(n) for n in range(3)}
    buffer = in_ram(sample_window_size=3)
    buffer.add_trajectories([trajectory(9), *given.values()])  # the first one leaves the window
    for _ in range(2):
        buffer.save_checkpoint(tmp_path / "ckpt")
        assert len(os.listdir(tmp_path / "ckpt")) == 2
    expected = buffer.sample(50)["rewards"]
    buffer.close()
    os.rename(tmp_path / "ckpt", tmp_path / "moved")
    for again in (in_ram(sample_window_size=3), in_ram(sample_window_size=0), stored(tmp_path / "own")):
        again.load_checkpoint(tmp_path / "moved")
        assert torch.equal(again.sample(50)["rewards"], expected)
        check_held(again, {n + 1: one for n, one in given.items()})
        again.close()


def test_a_copy_of_a_stored_buffer_survives_the_store(tmp_path: Path) -> None:
    given = {n: trajectory(n) for n in range(3)}
    buffer = stored(tmp_path / "store", checkpoint_layout="copy")
    buffer.add_trajectories(list(given.values()))
    buffer.save_checkpoint(tmp_path / "ckpt")
    buffer.close()
    shutil.rmtree(tmp_path / "store")
    again = in_ram()
    again.load_checkpoint(tmp_path / "ckpt")
    check_held(again, given)
    again.close()


def test_evicted_trajectories_are_freed_although_checkpoints_were_saved_and_loaded(tmp_path: Path) -> None:
    buffer = in_ram(sample_window_size=2)
    for n in range(3):
        buffer.add_trajectories([trajectory(n)])
        buffer.save_checkpoint(tmp_path / "ckpt")
    assert buffer.memory.checkpoints == []
    buffer.load_checkpoint(tmp_path / "ckpt")
    assert buffer.memory.checkpoints == []
    check_held(buffer, {n: trajectory(n) for n in (1, 2)})
    buffer.close()


def test_an_empty_buffer_is_saved_and_loaded(tmp_path: Path) -> None:
    for number, empty in enumerate((in_ram(), stored(tmp_path / "store"))):
        empty.save_checkpoint(tmp_path / f"ckpt_{number}")
        empty.close()
        buffer = in_ram()
        buffer.add_trajectories([trajectory(0)])
        buffer.load_checkpoint(tmp_path / f"ckpt_{number}")
        assert len(buffer) == 0
        buffer.close()


# ---- directories that hold something else


def test_a_checkpoint_is_not_written_where_it_would_hide_something_else(tmp_path: Path) -> None:
    buffer = stored(tmp_path / "store")
    buffer.add_trajectories([trajectory(0)])
    buffer.save_checkpoint(tmp_path / "files", layout="rlinf")
    assert [entry.id for entry in Directory(tmp_path / "files").entries] == [0]
    buffer.save_checkpoint(tmp_path / "ckpt")
    with pytest.raises(
        DataError, match="store: is a store; save to another directory, whose checkpoint will refer"
    ):
        buffer.save_checkpoint(tmp_path / "store")
    with pytest.raises(DataError, match="files: holds RLinf's files; save to another directory"):
        buffer.save_checkpoint(tmp_path / "files")
    with pytest.raises(DataError, match="ckpt: holds a checkpoint of another layout"):
        buffer.save_checkpoint(tmp_path / "ckpt", layout="rlinf")
    with pytest.raises(ValueError, match="layout: expected one of reference, copy, rlinf, got 'zarr'"):
        buffer.save_checkpoint(tmp_path / "new", layout="zarr")  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"auto_save_path: .*ckpt holds a checkpoint; load it with load_checkpoint"):
        stored(tmp_path / "ckpt")
    buffer.close()


def test_checkpoints_may_be_at_a_url(tmp_path: Path) -> None:
    given = {n: trajectory(n) for n in range(2)}
    buffer = in_ram()
    buffer.add_trajectories(list(given.values()))
    url = f"memory://rlinf-checkpoints-{os.getpid()}/ckpt"
    for _ in range(2):
        buffer.save_checkpoint(url)
    buffer.close()
    again = in_ram()
    again.load_checkpoint(url)
    check_held(again, given)
    again.close()


# ---- how trajectories are stored


def test_frames_have_a_codec_that_noise_does_not_slow_down(tmp_path: Path) -> None:
    import zarr

    frames = torch.randint(0, 255, (6, 2, 48, 48, 3), dtype=torch.uint8)
    one = trajectory(curr_obs={"frames": frames, "states": torch.zeros(6, 2, 3)})
    buffer = stored(tmp_path / "store")
    buffer.add_trajectories([one])
    same(buffer.get_trajectory(0), one)
    buffer.close()
    steps = next(iter(zarr.open_group(tmp_path / "store", mode="r")["streams"].groups()))[1]["steps"]  # type: ignore[union-attr]
    array = steps["curr_obs/frames"]
    (sharding,) = array.metadata.codecs
    assert {"name": "zstd", "configuration": {"level": -1, "checksum": False}} in [
        codec.to_dict() for codec in sharding.codecs
    ]
    assert array[:].any()


def test_blocks_fill_the_buffer_with_steps_and_the_final_rows_that_they_need() -> None:
    encoded = encode(trajectory(n_steps=40, n_envs=3, breaks=(7, 8, 9, 30)))
    for n_rows in (1, 6, 7, 20, 60, 1000):
        blocks = list(encoded.blocks(n_rows))
        assert sum(len(block.ends) for block in blocks) == 40
        assert all(block.ends[-1].all() for block in blocks)
        rows = [block.ends.numel() + int(block.ends.sum()) for block in blocks]
        assert all(n <= n_rows or len(block.ends) == 1 for n, block in zip(rows, blocks, strict=True))
    assert len(list(encoded.blocks(60))) == 3  # 120 steps and 12 + 3 final rows
    assert len(list(encoded.blocks(1000))) == 1


def test_large_rows_are_buffered_in_whole_trajectories_where_the_cache_has_room() -> None:
    frames = torch.zeros(2, 1, 224, 224, 3, dtype=torch.uint8)
    for options, expected in (
        ({}, 256 << 20),
        ({"cache_bytes": "400MiB"}, 100 << 20),
        ({"buffer_bytes": 5 << 20}, 5 << 20),
    ):
        buffer = in_ram(**options)
        buffer.add_trajectories([{"rewards": torch.zeros(2, 1, 1), "curr_obs": {"frames": frames}}])
        assert buffer.memory.options.buffer_bytes == expected
        assert buffer.sample(3)["curr_obs"]["frames"].shape == (3, 224, 224, 3)
        buffer.close()
    small = in_ram()
    small.add_trajectories([trajectory()])
    assert small.memory.options.buffer_bytes == 64 << 20
    small.close()


# ---- datasets


def test_datasets_refuse_keywords_that_rlinf_does_not_have() -> None:
    buffer = in_ram()
    buffer.add_trajectories([trajectory(0)])
    with pytest.raises(TypeError, match="unexpected keyword argument 'demo_ratio'"):
        ReplayBufferDataset(buffer, None, 4, 1, 0, demo_ratio=0.3)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="unexpected keyword argument 'prefetch'"):
        PreloadReplayBufferDataset(buffer, None, 4, 1, 0, prefetch=3)  # type: ignore[call-arg]
    for kind in (ReplayBufferDataset, PreloadReplayBufferDataset):  # RLinf's workers give it to both
        dataset = kind(buffer, None, 4, 1, 0, prefetch_size=2)
        assert len(next(iter(dataset))["rewards"]) == 4
        dataset.close()
    buffer.close()


def test_the_store_of_a_reference_is_a_store_like_any_other(tmp_path: Path) -> None:
    buffer = stored(tmp_path / "store")
    buffer.add_trajectories([trajectory(0)])
    buffer.save_checkpoint(tmp_path / "ckpt")
    buffer.add_trajectories([trajectory(1)])
    buffer.close()
    found = json.loads((tmp_path / "ckpt" / REFERENCE).read_text())
    assert len(trajstore.open(tmp_path / "store", at=found["checkpoint"]).episodes) == 2
