"""What ``bench`` measures: a small run in a temporary store, and the same with plain arrays in RAM."""

from __future__ import annotations

import shutil
import statistics
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import trajstore
from trajstore.errors import StoreExistsError
from trajstore.schema import Array
from trajstore.storage import LocalStorage, Storage, open_storage

EPISODE_STEPS = 1000
BATCH = 256
WINDOW = 8
_N_MADE = 64  # different episodes, which are appended again and again
_MIN_EPISODES = 16
_MAX_BYTES = 1 << 30  # of steps that are appended
_COLD_CACHE_BYTES = 1 << 20
_QUIET_BATCHES = 16  # without a miss: the cache is full

Step = dict[str, Array]


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of the comparison; larger is better.

    Attributes:
        name: What was measured.
        unit: Of both values.
        stored: With trajstore, at the URL.
        in_ram: The same with arrays in RAM; None: there is nothing like it.
        note: What the values mean, in one line.
    """

    name: str
    unit: str
    stored: float
    in_ram: float | None
    note: str


@contextmanager
def temporary_url(url: str, storage_options: dict[str, Any]) -> Iterator[str]:
    """A new location below a URL, which is removed with all that it holds.

    Raises:
        StoreExistsError: The URL holds a store, below which nothing else must lie.
    """
    parent = open_storage(url, storage_options)
    if "zarr.json" in parent.list_names(""):
        raise StoreExistsError(f"{parent.display} is a store; give a directory or a prefix beside it")
    existed = not isinstance(parent, LocalStorage) or Path(url).exists()
    place = f"{url.rstrip('/')}/trajstore-bench-{uuid.uuid4().hex[:12]}"
    storage = open_storage(place, storage_options)
    try:
        yield place
    finally:
        _remove(storage)
        if not existed and isinstance(parent, LocalStorage):
            shutil.rmtree(parent.display, ignore_errors=True)


def _remove(storage: Storage) -> None:
    if isinstance(storage, LocalStorage):
        shutil.rmtree(storage.display, ignore_errors=True)
        return
    for name in storage.list_names(""):
        storage.delete([name, *storage.list_tree(name)])


def make_episodes(*, frames: bool, seed: int = 0) -> list[Step]:
    """Episodes of made-up steps: 64 floats, or frames of 84 x 84 that change little by little."""
    rng = np.random.default_rng(seed)
    n = _N_MADE // 8 if frames else _N_MADE
    return [_episode(rng, frames=frames) for _ in range(n)]


def _episode(rng: np.random.Generator, *, frames: bool) -> Step:
    n = EPISODE_STEPS
    if frames:
        observation: Array = np.zeros((n + 1, 84, 84), np.uint8)
        for t, (y, x) in enumerate(np.cumsum(rng.integers(-2, 3, (n + 1, 2)), 0) % 76):
            observation[t, y : y + 8, x : x + 8] = 200
            observation[t, 40:44] = 80
    else:
        observation = np.cumsum(rng.normal(size=(n + 1, 64)).astype(np.float32), 0) / 30
    return {
        "observation": observation,
        "action": rng.normal(size=(n, 8)).astype(np.float32),
        "reward": rng.random(n, np.float32),
    }


class Bench:
    """Measures one thing after the other, each for a share of the time.

    Args:
        url: Where the store is made.
        seconds: In all.
        frames: Whether observations are frames.
        storage_options: As in `trajstore.open`.
        advance: Called with the seconds that have passed.
    """

    def __init__(
        self,
        url: str,
        seconds: float,
        *,
        frames: bool,
        storage_options: dict[str, Any],
        advance: Callable[[float], None],
    ) -> None:
        self._url, self._options = url, storage_options
        self._share = seconds / 8
        self._episodes = make_episodes(frames=frames)
        self._bytes = sum(array.nbytes for array in self._episodes[0].values())
        self._start = time.perf_counter()
        self._advance = advance
        self._n_appended = 0

    def run(self) -> Iterator[Figure]:
        """All measurements, each reported when it is done."""
        store = trajstore.create(f"{self._url}/data", storage_options=self._options)
        yield self._append(store)
        store.refresh()
        yield self._commit()
        yield self._step_appends()
        yield self._sample(store)
        yield self._cold_sample(store)
        yield self._read(store)

    def _append(self, store: trajstore.Store) -> Figure:
        limit = _MAX_BYTES // self._bytes
        with store.writer(commit_seconds=None) as writer:
            start = time.perf_counter()
            while self._n_appended < _MIN_EPISODES or (
                time.perf_counter() - start < self._share and self._n_appended < limit
            ):
                writer.append_episode(self._next(), terminated=True)
                self._n_appended += 1
                self._tick()
            writer.commit()
            seconds = time.perf_counter() - start
        n = self._n_appended
        ram = _RamBuffer(self._episodes[0], min(n, 64) * EPISODE_STEPS)
        ram_seconds = _median_seconds(lambda: ram.append(self._next()), self._share / 4, self._tick)
        steps = n * EPISODE_STEPS
        note = f"{steps:,} steps of {self._bytes / EPISODE_STEPS:,.0f} bytes in whole episodes, until durable"
        return Figure("append episodes", "steps/s", steps / seconds, EPISODE_STEPS / ram_seconds, note)

    def _commit(self) -> Figure:
        store = trajstore.create(f"{self._url}/commits", storage_options=self._options)
        with store.writer(commit_seconds=None) as writer:

            def commit() -> None:
                writer.append_episode(self._next(), terminated=True)
                writer.commit()

            seconds = _median_seconds(commit, self._share, self._tick)
        return Figure(
            "commit", "commits/s", 1 / seconds, None, f"{EPISODE_STEPS:,} steps each, durable when it returns"
        )

    def _step_appends(self) -> Figure:
        store = trajstore.create(f"{self._url}/steps", storage_options=self._options)
        episode = self._episodes[0]
        steps = [{name: array[t] for name, array in episode.items()} for t in range(EPISODE_STEPS)]
        n = 100
        with store.writer() as writer:

            def append() -> None:
                for step in steps[:n]:
                    writer.append(step)

            seconds = _median_seconds(append, self._share, self._tick)
        ram = _RamBuffer(episode, 64 * EPISODE_STEPS)

        def append_in_ram() -> None:
            for step in steps[:n]:
                ram.append_step(step)

        ram_seconds = _median_seconds(append_in_ram, self._share / 4, self._tick)
        note = "one call a step; durable within commit_seconds"
        return Figure("append steps", "steps/s", n / seconds, n / ram_seconds, note)

    def _sample(self, store: trajstore.Store) -> Figure:
        reader = trajstore.Reader(store, cache_bytes="4GiB", seed=0)
        seconds = self._batches(reader)
        ram = _RamBuffer(self._episodes[0], min(self._n_appended, 64) * EPISODE_STEPS)
        for _ in range(min(self._n_appended, 64)):
            ram.append(self._next())
        rng = np.random.default_rng(0)
        ram_seconds = _median_seconds(lambda: ram.sample(rng), self._share / 2, self._tick)
        note = f"{BATCH} windows of {WINDOW} steps a batch, from a cache that holds everything"
        return Figure("sample", "batches/s", 1 / seconds, 1 / ram_seconds, note)

    def _cold_sample(self, store: trajstore.Store) -> Figure:
        reader = trajstore.Reader(store, cache_bytes=_COLD_CACHE_BYTES, host_cache_bytes=0, seed=0)
        seconds = self._batches(reader)
        note = "the same with a cache of 1 MiB; local files may be in the cache of the system"
        return Figure("sample cold", "batches/s", 1 / seconds, None, note)

    def _batches(self, reader: trajstore.Reader) -> float:
        windows = trajstore.Windows(WINDOW)
        self._warm(reader, windows)
        return _median_seconds(lambda: reader.sample(BATCH, windows), self._share, self._tick)

    def _warm(self, reader: trajstore.Reader, windows: trajstore.Windows) -> None:
        """Draw until loops are compiled and the cache is full, for as long as a share at most."""
        stop, n_quiet = time.perf_counter() + self._share, 0
        while n_quiet < _QUIET_BATCHES:
            before = reader.stats()["misses"]
            reader.sample(BATCH, windows)
            self._tick()
            n_quiet = n_quiet + 1 if reader.stats()["misses"] == before else 0
            if time.perf_counter() > stop:
                break

    def _read(self, store: trajstore.Store) -> Figure:
        rows = iter(range(1 << 62))
        seconds = _median_seconds(lambda: store.read_episode(next(rows) % len(store)), self._share / 2, self._tick)
        copies = [{name: array.copy() for name, array in self._episodes[0].items()}]
        ram = _median_seconds(lambda: [array.copy() for array in copies[0].values()], self._share / 8, self._tick)
        note = f"{self._bytes / 2**20:.2f} MiB decoded each, one after the other"
        return Figure("read episodes", "episodes/s", 1 / seconds, 1 / ram, note)

    def _next(self) -> Step:
        self._episodes.append(self._episodes.pop(0))
        return self._episodes[0]

    def _tick(self) -> None:
        self._advance(time.perf_counter() - self._start)


class _RamBuffer:
    """The plain thing: a ring of numpy arrays, sampled by indexing with torch."""

    def __init__(self, like: Step, n: int) -> None:
        import torch

        self._arrays = {name: np.zeros((n, *array.shape[1:]), array.dtype) for name, array in like.items()}
        self._tensors = {name: torch.from_numpy(array) for name, array in self._arrays.items()}
        self._n, self._next = n, 0

    def append(self, episode: Step) -> None:
        if self._next + EPISODE_STEPS > self._n:
            self._next = 0
        for name, array in self._arrays.items():
            array[self._next : self._next + EPISODE_STEPS] = episode[name][:EPISODE_STEPS]
        self._next += EPISODE_STEPS

    def append_step(self, step: Step) -> None:
        for name, array in self._arrays.items():
            array[self._next] = step[name]
        self._next = (self._next + 1) % self._n

    def sample(self, rng: np.random.Generator) -> dict[str, Any]:
        import torch

        episode = rng.integers(0, self._n // EPISODE_STEPS, BATCH) * EPISODE_STEPS
        start = episode + rng.integers(0, EPISODE_STEPS - WINDOW, BATCH)
        rows = torch.from_numpy((start[:, None] + np.arange(WINDOW)).reshape(-1))
        return {
            name: tensor.index_select(0, rows).reshape(BATCH, WINDOW, *tensor.shape[1:])
            for name, tensor in self._tensors.items()
        }


def _median_seconds(action: Callable[[], object], seconds: float, tick: Callable[[], None]) -> float:
    """Median time of a call, repeated for some seconds, at least three times."""
    times: list[float] = []
    stop = time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < stop:
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
        if len(times) % 16 == 1:
            tick()
    return max(1e-9, statistics.median(times))
