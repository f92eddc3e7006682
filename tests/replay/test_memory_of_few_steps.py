"""A buffer that holds few steps takes little memory, whatever sizes it was made with.

Each case runs in a process of its own, which says how much memory it has more than before it made the buffer.
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.warm_python import WarmPython, warm_python

MIB = 1 << 20
STEP_BYTES = 4 * MIB  # all steps together
EPISODE_STEPS = 50
# Two copies of the steps, of which one is not committed yet, and the part-filled chunk of each field: as rows that
# the writer appends to, and as a page that is decoded.
CHUNK_BYTES = 256 << 10
SLACK_BYTES = 8 * MIB  # the index, threads, and what the allocator does not give back


def step(kind: str) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    if kind == "state":
        return {
            "observation": rng.random(64, np.float32),
            "action": np.zeros(4, np.float32),
            "reward": np.float32(1),
        }
    if kind == "frames":
        return {"observation": rng.integers(0, 255, (84, 84), np.uint8), "action": np.int64(1)}
    return {f"field{i}": rng.random(4, np.float32) for i in range(40)}


def bound(kind: str) -> int:
    return 2 * STEP_BYTES + (2 * 40 * CHUNK_BYTES if kind == "many fields" else 0) + SLACK_BYTES


MEASURE = f"""
import json, sys
from pathlib import Path
from {__name__} import STEP_BYTES, growth
root, kind, options = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
growth(str(root / "first"), kind, options, 100_000)  # imports and compiles what is needed
print(json.dumps(growth(str(root / "measured"), kind, options, STEP_BYTES)))
"""


@pytest.fixture(scope="module")
def python() -> Iterator[WarmPython]:
    with warm_python(__name__) as python:
        yield python


def resident_bytes() -> int:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) << 10
    raise AssertionError("/proc/self/status has no VmRSS")


def growth(url: str, kind: str, options: dict[str, Any], n_bytes: int) -> dict[str, int]:
    """Fill a buffer, commit and sample; returns by how much memory has grown at each point."""
    from trajstore import ReplayBuffer, Windows

    one = step(kind)
    n = n_bytes // sum(np.asarray(value).nbytes for value in one.values())
    episode = {name: np.stack([value] * EPISODE_STEPS) for name, value in one.items()}
    before, found = resident_bytes(), dict[str, int]()

    def note(name: str) -> None:
        found[name] = resident_bytes() - before

    with ReplayBuffer(url, fsync=False, commit_seconds=None, **options) as buffer:
        for _ in range(-(-n // EPISODE_STEPS)):
            buffer.add_episode(episode, terminated=True)
        note("appended")
        for _ in range(20):
            buffer.sample(256, Windows(1))
        note("sampled")
        buffer.flush()
        for _ in range(20):
            buffer.sample(256, Windows(1))
        note("committed and sampled")
    note("closed")
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("state", {}),
        ("frames", {}),
        ("many fields", {}),
        ("state", {"cache_bytes": "64MiB"}),
        ("frames", {"buffer_bytes": "256MiB"}),
        ("state", {"buffer_bytes": "4MiB"}),
    ],
)
def test_few_steps_take_little_memory(
    python: WarmPython, tmp_path: Path, kind: str, options: dict[str, Any]
) -> None:
    result = python.run_code(MEASURE, tmp_path, kind, json.dumps(options), timeout=600)
    assert result.returncode == 0, result.stderr
    found, most = json.loads(result.stdout), bound(kind)
    assert not {name: n for name, n in found.items() if n > most}, f"at most {most} bytes"
