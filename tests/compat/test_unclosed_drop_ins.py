"""A process that ends without closing its buffers loses nothing that was added, and a child of it does nothing."""

from __future__ import annotations

import gc
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from tensordict import TensorDict

import trajstore
from tests.support.warm_python import WarmPython, warm_python
from trajstore.compat.torchrl import TrajStorage

pytestmark = pytest.mark.closes_dropped

RLINF = """
import sys, torch
from trajstore.compat.rlinf import Trajectory, TrajectoryReplayBuffer
options = {"commit_steps": None, "commit_seconds": None}
buffer = TrajectoryReplayBuffer(auto_save=True, auto_save_path=sys.argv[1] + "/0", **options)
x = torch.zeros(3, 1, 1)
buffer.add_trajectories([Trajectory(actions=x, rewards=x, curr_obs={"s": x}, next_obs={"s": x})])
"""
OBJECTRL = """
import sys, torch
from tensordict import TensorDict
from trajstore.compat.objectrl import ReplayBuffer
buffer = ReplayBuffer("cpu", "cpu", 10, url=sys.argv[1], commit_seconds=None)
buffer.add_batch(TensorDict({"x": torch.zeros(3)}, [3]))
"""
ALF = """
import sys, torch
from trajstore.compat.alf import ReplayBuffer
buffer = ReplayBuffer(None, 3, 10, url=sys.argv[1] + "/0", commit_seconds=None)
buffer.add_batch({"step_type": torch.zeros(3, dtype=torch.int32), "x": torch.zeros(3)})
"""
TORCHRL = """
import sys, torch
from tensordict import TensorDict
from trajstore.compat.torchrl import TrajStorage
storage = TrajStorage(sys.argv[1], max_size=10, commit_seconds=None)
storage.set(range(3), TensorDict({"x": torch.zeros(3)}, [3]))
storage.get(0)["x"]
storage._storage["x"] += 1  # a change in place, which only the end of the storage logs
"""
CHILD = """
import multiprocessing
multiprocessing.get_context("fork").Process(target=print).start()
"""


@pytest.fixture(scope="module")
def python() -> Iterator[WarmPython]:
    with warm_python("tensordict") as python:
        yield python


@pytest.mark.parametrize("script", [RLINF, OBJECTRL, ALF], ids=["rlinf", "objectrl", "alf"])
@pytest.mark.parametrize("end", ["", CHILD, "del buffer"], ids=["left", "with_child", "dropped"])
def test_what_was_added_is_there_when_the_process_has_ended(
    python: WarmPython, script: str, end: str, tmp_path: Path
) -> None:
    ended = python.run_code(script + end, tmp_path, timeout=300)
    ended.check_returncode()
    assert not [text for text in ("could not", "schedule new futures") if text in ended.stderr]
    assert sum(record.rows for record in trajstore.open(tmp_path / "0").streams) >= 3


@pytest.mark.parametrize("end", ["", "del storage"], ids=["left", "dropped"])
def test_rows_of_a_storage_are_there_with_their_changes_in_place(end: str, tmp_path: Path) -> None:
    # Not forked: what Triton writes about modules that a fork does not take down would be found in its errors.
    command = [sys.executable, "-c", TORCHRL + end, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert ended.stderr == ""
    with TrajStorage(str(tmp_path), max_size=10) as storage:
        assert storage.get(slice(0, 3))["x"].tolist() == [1, 1, 1]


def test_rows_in_ram_are_freed_with_their_storage_in_silence() -> None:
    before = set(MemoryFileSystem.store)
    storage = TrajStorage(max_size=10)
    storage.set(range(3), TensorDict({"x": torch.zeros(3)}, [3]))
    storage.flush()
    assert set(MemoryFileSystem.store) - before
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del storage
        gc.collect()
    until = time.monotonic() + 120
    while set(MemoryFileSystem.store) - before:
        assert time.monotonic() < until
        time.sleep(0.01)
