"""What a collector appended and did not send is sent at the end of the process, and when its writer is dropped."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import trajstore

pytest.importorskip("ray")

SCRIPT = """
import sys
import numpy as np
import ray
from trajstore.ray import RayReplayBuffer
ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
buffer = RayReplayBuffer.start(sys.argv[1], n_actors=1, commit_seconds=None)
writer = buffer.writer()
for i in range(7):
    writer.append({"x": np.float32(i)})
"""


@pytest.mark.slow
@pytest.mark.parametrize("end", ["", "del writer"], ids=["left", "dropped"])
def test_a_collector_that_closes_nothing_loses_nothing(end: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", SCRIPT + end, str(tmp_path / "0")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "could not be closed" not in ended.stderr
    assert sum(record.rows for record in trajstore.open(tmp_path / "0").streams) == 7
