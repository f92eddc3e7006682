"""A process that ends without closing its buffers loses nothing that was added, and a child of it does nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import trajstore

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
CHILD = """
import multiprocessing
multiprocessing.get_context("fork").Process(target=print).start()
"""


@pytest.mark.parametrize("script", [RLINF, OBJECTRL, ALF], ids=["rlinf", "objectrl", "alf"])
@pytest.mark.parametrize("has_child", [False, True])
def test_what_was_added_is_there_when_the_process_has_ended(script: str, has_child: bool, tmp_path: Path) -> None:
    command = [sys.executable, "-c", script + CHILD * has_child, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "could not be stored" not in ended.stderr
    assert sum(record.rows for record in trajstore.open(tmp_path / "0").streams) >= 3
