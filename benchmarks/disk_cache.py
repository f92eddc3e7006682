"""How fast do windows come from a disk cache of a remote store? Against the network, and a local copy."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from _harness import Case, Report, arguments, scratch, stopwatch

import trajstore
from trajstore.storage import Place, StorageLayer, completer

LATENCY_S, BYTES_PER_S = 0.02, 200e6
BATCH, LENGTH = 256, 32
WINDOWS = trajstore.Windows(length=LENGTH)
PATIENCE_S = 120


class Distant(StorageLayer):
    """A storage whose reads take as long as over a network."""

    def _slowly(self, read: Callable[[], Any]) -> Any:
        found = read()
        time.sleep(LATENCY_S + sum(map(len, found)) / BYTES_PER_S)
        return found

    def get(self, key: str) -> bytes:
        return self.get_ranges([(key, 0, None)])[0]

    def get_into(self, key: str, buffer: bytearray) -> memoryview:
        return memoryview(self.get(key))

    def get_range(self, key: str, start: int, stop: int) -> bytes:
        return self.get_ranges([(key, start, stop)])[0]

    def get_range_into(self, key: str, start: int, stop: int, room: memoryview) -> memoryview:
        return memoryview(self.get_range(key, start, stop))

    def get_many(self, keys: Sequence[str]) -> list[bytes]:
        return self.get_ranges([(key, 0, None) for key in keys])

    def get_ranges(self, places: Sequence[Place]) -> list[bytes]:
        found: list[bytes] = self._slowly(lambda: self.inner.get_ranges(places))
        return found

    def size(self, key: str) -> int:
        time.sleep(LATENCY_S)
        return self.inner.size(key)


def fill(url: str, n_steps: int) -> None:
    rng = np.random.default_rng(0)
    schema = {"obs": trajstore.Field("float32", (64,))}
    with trajstore.create(url, schema).writer(commit_seconds=None) as writer:
        for _ in range(0, n_steps, 1000):
            writer.append_episode({"obs": rng.standard_normal((1000, 64), np.float32)}, terminated=True)


def remote(url: str, cache: trajstore.DiskCache | None) -> trajstore.Store:
    """The store, behind a network."""
    store = trajstore.open(url, disk_cache=cache)
    storage: Any = store.snapshot.storage
    counted = storage if cache is None else storage.inner
    counted.inner = Distant(counted.inner)
    storage.is_remote = counted.is_remote = True
    return store


def reader(store: trajstore.Store, cache_bytes: int) -> trajstore.Reader:
    return trajstore.Reader(store, cache_bytes=cache_bytes, host_cache_bytes=1, seed=0)


def sampled(source: trajstore.Reader, n: int, _: Path) -> float:
    with stopwatch() as watch:
        for _ in range(n):
            source.sample(BATCH, WINDOWS)
    return watch.seconds


def counts(source: trajstore.Reader) -> dict[str, int]:
    found: dict[str, int] = source.stats()["storage"]["disk_cache"]
    return found


def warmed(source: trajstore.Reader, has_whole_objects: bool) -> trajstore.Reader:
    """Sample until the disk has all that is asked for, and pages are mapped if they can be."""
    end = time.monotonic() + PATIENCE_S
    before: tuple[int, int] | None = None
    while time.monotonic() < end:
        for _ in range(10):
            source.sample(BATCH, WINDOWS)
        now = counts(source)["misses"], counts(source)["hits"] if has_whole_objects else 0
        if now == before:
            return source
        before = now
        time.sleep(0.2 if has_whole_objects else 0)
    return source


def main() -> None:
    options = arguments(__doc__)
    small = options.small
    report = Report("disk_cache", str(__doc__), small)
    n_steps, cache_bytes, n = (40_000, 1 << 20, 2) if small else (1_000_000, 8 << 20, 2)
    url = f"memory://{uuid.uuid4().hex}"
    fill(url, n_steps)
    largest = completer.MAX_BYTES
    with scratch() as directory:
        trajstore.copy(url, directory / "copy")
        disks = {name: trajstore.DiskCache(directory / name, "10GiB") for name in ("parts", "whole")}
        try:
            completer.MAX_BYTES = 0  # no object is completed
            in_parts = warmed(reader(remote(url, disks["parts"]), cache_bytes), has_whole_objects=False)
        finally:
            completer.MAX_BYTES = largest
        start = time.perf_counter()
        filling = warmed(reader(remote(url, disks["whole"]), cache_bytes), has_whole_objects=True)
        report.fact(
            "until warm",
            "sampling without a pause from an empty disk",
            seconds=time.perf_counter() - start,
            store_mb=n_steps * 256 / 1e6,
            **{f"{name}_mb": counts(filling)[name] / 1e6 for name in ("bytes_missed", "bytes_written")},
        )
        warm = warmed(reader(remote(url, disks["whole"]), cache_bytes), has_whole_objects=True)
        local = reader(trajstore.open(directory / "copy"), cache_bytes)
        plain = reader(remote(url, None), cache_bytes)
        for _ in range(60 if not small else 5):
            local.sample(BATCH, WINDOWS)
        sources = {
            "remote": ("20 ms, 200 MB/s; nothing on the disk", plain),
            "parts of objects on the disk": ("read with pread, each block checked", in_parts),
            "whole objects on the disk": ("mapped, in a new process or reader", warm),
            "after filling": ("the reader that filled the disk", filling),
            "local copy": ("mapped", local),
        }
        report.run(
            [Case(name, why, partial(sampled, source, n), n, "batch") for name, (why, source) in sources.items()],
            2 if small else 25,
            sync=False,
        )
    report.speedup("whole objects, against a local copy", "whole objects on the disk", "local copy", 0.8)
    report.speedup("after filling, against a local copy", "after filling", "local copy", 0.8)
    report.speedup("whole objects, against remote", "whole objects on the disk", "remote", None)
    report.finish(options.json)


if __name__ == "__main__":
    main()
