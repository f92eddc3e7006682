"""Peak memory of writing and reading, and what opening a store reads.

Each job runs in a fresh process, which says how far its peak rose above where it began.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import trajstore
from tests.support.faulty import FaultyStorage, real_storage, through
from trajstore import Field, Schema

MIB = 1 << 20
FRAME = (84, 84, 4)
FRAME_BYTES = 84 * 84 * 4
EPISODE_STEPS = 500
EPISODE_BYTES = EPISODE_STEPS * FRAME_BYTES  # 14 MB
SCHEMA = Schema(
    {"frame": Field("uint8", FRAME), "action": Field("int64"), "reward": Field("float32")},
)
BUFFER_BYTES = 64 * MIB

# One chunk of frames is at most 1 MiB. A thread that encodes or decodes holds the block, the compressed bytes and
# up to two copies of them (with checksum, on the way to the file): four chunks each, in four threads.
N_THREADS, CHUNK_BYTES = 4, MIB
THREADS_BYTES = N_THREADS * 4 * CHUNK_BYTES
# What the allocator keeps of all that, the interpreter's own growth, and what imports on first use bring.
SLACK_BYTES = 24 * MIB

# Two stagings of half a buffer each, the tail chunk of each column and the one that follows it, the threads.
APPEND_BOUND = BUFFER_BYTES + 2 * len(SCHEMA) * CHUNK_BYTES + THREADS_BYTES + SLACK_BYTES
# The episode that is read, the one read before it (still held by the loop), and the threads.
READ_BOUND = 2 * EPISODE_BYTES + THREADS_BYTES + SLACK_BYTES


def status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    raise AssertionError(f"/proc/self/status has no {name}")


def some_episodes(n: int) -> Iterator[dict[str, np.ndarray]]:
    """Episodes of noise, which no codec makes smaller, all cut from one block of it."""
    rng = np.random.default_rng(0)
    noise = rng.integers(0, 256, (EPISODE_STEPS + n, *FRAME), np.uint8)
    for i in range(n):
        yield {
            "frame": noise[i : i + EPISODE_STEPS],
            "action": np.arange(EPISODE_STEPS),
            "reward": np.ones(EPISODE_STEPS, np.float32),
        }


def write(url: str, n: int) -> int:
    """Append ``n`` episodes through a small buffer; returns how far memory rose after the first commit."""
    store = trajstore.create(url, SCHEMA, fsync=False)
    with store.writer(buffer_bytes=BUFFER_BYTES, commit_seconds=None) as writer:
        for i, episode in enumerate(some_episodes(n)):
            if i == 0:
                writer.append_episode({name: values[:1] for name, values in episode.items()}, terminated=True)
                writer.commit()
                before = status_bytes("VmRSS")
            writer.append_episode(episode, terminated=True)
    return status_bytes("VmHWM") - before


def write_steps(url: str, n: int) -> int:
    """The same, step by step in two environments at once, so that rows are sorted when they are placed."""
    store = trajstore.create(url, SCHEMA, fsync=False)
    with store.writer(buffer_bytes=BUFFER_BYTES, commit_seconds=None) as writer:
        for i, episode in enumerate(some_episodes(n)):
            if i == 0:
                writer.append_episode({name: values[:1] for name, values in episode.items()}, terminated=True)
                writer.commit()
                before = status_bytes("VmRSS")
            for t in range(0, EPISODE_STEPS, 2):
                writer.append({name: values[t : t + 2] for name, values in episode.items()}, envs=[0, 1])
    return status_bytes("VmHWM") - before


def read(url: str, n: int) -> int:
    """Read every episode one after the other; returns how far memory rose after the first, short one."""
    store = trajstore.open(url)
    assert len(store) == n + 1
    store.read_episode(0)
    before = status_bytes("VmRSS")
    total = 0
    for i in range(1, n + 1):
        total += store.read_episode(i)["frame"].nbytes
    assert total == n * EPISODE_BYTES
    return status_bytes("VmHWM") - before


def run(job: str, url: str, n: int) -> int:
    """Do a job in a process of its own; returns the bytes it reports."""
    root = str(Path(__file__).parents[2])
    command = [sys.executable, "-c", f"from tests.replay.test_memory import {job}; print({job}({url!r}, {n}))"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.slow
def test_appending_a_gigabyte_stays_within_the_buffer(url: str) -> None:
    assert run("write", url, 1_000_000_000 // EPISODE_BYTES + 1) < APPEND_BOUND


@pytest.mark.slow
def test_appending_step_by_step_stays_within_the_buffer(url: str) -> None:
    assert run("write_steps", url, 300_000_000 // EPISODE_BYTES + 1) < APPEND_BOUND


@pytest.mark.slow
def test_reading_episode_by_episode_holds_only_the_episode(url: str) -> None:
    n = 500_000_000 // EPISODE_BYTES + 1
    run("write", url, n)
    assert run("read", url, n) < READ_BOUND


def store_of_many_streams(url: str, n_streams: int, n_episodes: int) -> None:
    schema = Schema({"observation": Field("float32", (8,)), "action": Field("int64")})
    store = trajstore.create(url, schema, fsync=False)
    data = {"observation": np.ones((3, 8), np.float32), "action": np.arange(3)}
    for _ in range(n_streams):
        with store.writer(commit_seconds=None) as writer:
            for i in range(n_episodes):
                writer.append_episode(data, terminated=True, metadata={"i": i})


def test_opening_reads_one_record_a_stream_and_nothing_else(url: str) -> None:
    store_of_many_streams(url, 12, 40)
    storage = FaultyStorage(real_storage(url))
    with through(storage):
        trajstore.open(url)
    records = storage.n_calls("get", "streams/")
    root_and_schema = 3  # the root, the schema, and whether fields were added to it
    assert (records, storage.n_calls("get"), storage.n_calls("list_names")) == (12, 12 + root_and_schema, 1)


def test_the_episode_table_is_read_from_the_spans_alone(url: str) -> None:
    store_of_many_streams(url, 12, 40)
    storage = FaultyStorage(real_storage(url))
    with through(storage):
        store = trajstore.open(url)
        assert (len(store), int(store.episodes["length"].sum())) == (480, 1440)
    assert storage.n_calls("get", "/steps/") == storage.n_calls("get_range") == 0
    assert storage.n_calls("get", "/spans/") == 2 * 12


def test_a_refresh_reads_nothing_of_streams_that_are_finished(url: str) -> None:
    store_of_many_streams(url, 12, 2)
    storage = FaultyStorage(real_storage(url))
    with through(storage):
        store = trajstore.open(url)
    n_gets = storage.n_calls("get")
    store.refresh()
    assert storage.n_calls("get") == n_gets
