"""Episodes whose values say which step of which episode of which writer they are, and processes that use them.

What a reader gets can so be checked without knowing what was written. The functions are importable, so that a
process of any kind can run them.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

import trajstore
from trajstore import Batch, Field, Reader, Schema, Store, Windows, Writer

LENGTH = 3  # of the windows
CHILD_S = 300
SCHEMA = Schema(
    {
        "observation": Field("float32", (3,), final=True),
        "pixels": Field("uint8", (8, 8)),
        "action": Field("int64"),
    }
)


def n_steps(writer: int, number: int) -> int:
    return LENGTH + (writer * 7 + number * 3) % 10


def pixels(writer: Any, number: Any, t: Any) -> Any:
    """An image of each step; the arguments have any shape."""
    first = np.asarray(writer * 31 + number * 17 + t * 5, np.int64)[..., None, None]
    return ((np.arange(64).reshape(8, 8) * 7 + first) % 256).astype(np.uint8)


def episode(writer: int, number: int) -> dict[str, Any]:
    n = n_steps(writer, number)
    t = np.arange(n + 1, dtype=np.float32)
    observation = np.stack([np.full_like(t, writer), np.full_like(t, number), t], axis=1)
    action = writer * 10**9 + number * 1000 + np.arange(n)
    return {"observation": observation, "pixels": pixels(writer, number, np.arange(n)), "action": action}


def assert_windows(batch: Batch) -> None:
    """Every window of the batch is one that was written, from its first byte to its last."""
    observation = np.asarray(batch["observation"], dtype=np.int64)
    writer, number, t = (observation[..., i] for i in range(3))
    assert observation.shape[1] == LENGTH
    assert (writer == writer[:, :1]).all()
    assert (number == number[:, :1]).all()
    assert (t == t[:, :1] + np.arange(LENGTH)).all()
    assert (t[:, -1] < LENGTH + (writer[:, -1] * 7 + number[:, -1] * 3) % 10).all()
    assert np.array_equal(batch["action"], writer * 10**9 + number * 1000 + t)
    assert np.array_equal(batch["pixels"], pixels(writer, number, t))


def assert_episodes(store: Store) -> dict[int, int]:
    """Every episode is as written, those of each writer are the first so many, each once; returns how many."""
    seen: dict[int, list[int]] = {}
    for i in range(len(store.episodes)):
        read = store.read_episode(i)
        writer, number = (int(value) for value in read["observation"][0, :2])
        written = episode(writer, number)
        assert read.keys() == written.keys()
        assert all(np.array_equal(read[name], written[name]) for name in written), (writer, number)
        seen.setdefault(writer, []).append(number)
    for writer, numbers in seen.items():
        assert sorted(numbers) == list(range(len(numbers))), f"writer {writer}: {sorted(numbers)}"
    return {writer: len(numbers) for writer, numbers in seen.items()}


def append(writer: Writer, number: int, name: int) -> None:
    writer.append_episode(episode(name, number), terminated=True)


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + CHILD_S
    while not is_so():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


# ---- processes -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    """A store on a server, as a process is told of it."""

    url: str
    options: Mapping[str, Any]

    def open(self) -> Store:
        return trajstore.open(self.url, storage_options=self.options)


def write_for(target: Target, name: int, seconds: float) -> int:
    """Append and commit, for so long after the first commit; returns how many episodes were committed."""
    end, number = None, 0
    with target.open().writer(f"writer{name}", commit_seconds=None) as writer:
        while end is None or time.monotonic() < end:
            for _ in range(4):
                append(writer, number, name)
                number += 1
            writer.commit()
            end = end or time.monotonic() + seconds
    return number


def write_forever(target: Target, name: int, counted: Any) -> None:
    """The same until killed; the shared value counts the episodes whose commit was answered."""
    with target.open().writer(f"writer{name}", commit_seconds=None) as writer:
        while True:
            append(writer, counted.value, name)
            writer.commit()
            counted.value += 1


def read_for(target: Target, seed: int, seconds: float) -> int:
    """Refresh and sample, for so long after the first batch; returns how many windows there were, all right."""
    end, n_windows = None, 0
    reader = Reader(target.open(), cache_bytes="1MiB", host_cache_bytes=0, seed=seed)
    while end is None or time.monotonic() < end:
        reader.refresh()
        if reader.n_windows(Windows(length=LENGTH)) == 0:
            time.sleep(0.05)
            continue
        batch = reader.sample(64, Windows(length=LENGTH))
        assert_windows(batch)
        n_windows += len(batch["action"])
        end = end or time.monotonic() + seconds
    return n_windows


def _context() -> Any:
    """Processes that are forked from one that has imported what takes long, and has no threads: not obstore."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.numbered", "numba", "zarr", "gcsfs"])
    return context


def start(function: Callable[..., Any], *args: Any) -> Any:
    """Run a function in a process of its own, and return the process."""
    process = _context().Process(target=function, args=args, daemon=True)
    process.start()
    return process


def shared_count() -> Any:
    return _context().Value("q", 0)


def call_all(*calls: tuple[Any, ...]) -> list[Any]:
    """What functions return that run at once, each in a process of its own; the first error is raised."""
    ends, processes = [], []
    for function, *args in calls:
        here, there = _context().Pipe(duplex=False)
        processes.append(start(_answer, there, function, args))
        there.close()
        ends.append(here)
    deadline = time.monotonic() + CHILD_S
    try:
        return [_result_of(end, deadline) for end in ends]
    finally:
        for process in processes:
            process.kill()
            process.join()


def _result_of(end: Any, deadline: float) -> Any:
    if not end.poll(max(0, deadline - time.monotonic())):
        raise TimeoutError(f"a process hangs: no result after {CHILD_S} seconds")
    result, error = end.recv()
    if error is not None:
        raise AssertionError(error)
    return result


def _answer(there: Any, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        there.send((function(*args), None))
    except BaseException as error:
        there.send((None, f"{function.__name__}: {error!r}"))
        raise
