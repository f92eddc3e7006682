"""What do requests to an object store cost, and how long does work take there, beside a local directory?

The server is `_object_server`, on loopback, with a latency and a bandwidth.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from _harness import Case, Report, Stopwatch, arguments, scratch, stopwatch
from _object_server import ObjectServer, object_server

import trajstore
from trajstore import Field, Reader, Schema, Windows
from trajstore.storage import Put, Storage, open_storage

URL = "s3://bucket/run"
STEP_S, PREFETCH = 0.03, 4  # of the training loop
SPREAD = 100_000  # bytes between ranges, so that they are not merged


def raw_store(server: ObjectServer) -> Any:
    from obstore.store import S3Store

    return S3Store(
        "bucket",
        endpoint=server.endpoint,
        region="us-east-1",
        access_key_id="a",
        secret_access_key="b",
        client_options={"allow_http": True},
        retry_config={"max_retries": 0, "retry_timeout": timedelta(seconds=60)},
    )


def raw_wave(server: ObjectServer, n: int) -> Callable[[], object]:
    """The limit: obstore itself, called from as many threads as there are requests."""
    import obstore

    store, threads = raw_store(server), ThreadPoolExecutor(256)
    return lambda: list(threads.map(lambda i: obstore.get(store, f"run/k{i}").bytes(), range(n)))


def raw_ranges(server: ObjectServer, n: int) -> Callable[[], object]:
    """The limit for ranges of one object: ten of them a call."""
    import obstore

    store, threads = raw_store(server), ThreadPoolExecutor(256)

    def ten(first: int) -> object:
        starts = [i * SPREAD for i in range(first, min(n, first + 10))]
        return obstore.get_ranges(store, "run/large", starts=starts, lengths=[700] * len(starts), coalesce=0)

    return lambda: list(threads.map(ten, range(0, n, 10)))


def wave(storage: Storage, n: int) -> Callable[[], object]:
    return lambda: storage.get_many([f"k{i}" for i in range(n)])


def ranges(storage: Storage, n: int) -> Callable[[], object]:
    return lambda: storage.get_ranges([("large", i * SPREAD, i * SPREAD + 700) for i in range(n)])


def measure(report: Report, name: str, isolates: str, call: Callable[[], object], rounds: int, n: int) -> None:
    call()  # connects
    seconds, cpu = [], []
    for _ in range(rounds):
        with stopwatch() as watch:
            start = time.process_time()
            call()
            cpu.append((time.process_time() - start) / n)
        seconds.append(watch.seconds)
    report.add(Case(name, isolates, lambda _: 0.0), seconds)
    report.notes.append(f"{name}: {sorted(cpu)[len(cpu) // 2] * 1e6:.0f} us of this process's CPU a request")


def transports(report: Report, label: str, server: ObjectServer, rounds: int, n: int) -> None:
    fsspec = open_storage(URL, server.options("fsspec"))
    fsspec.put_many([Put(f"k{i}", lambda: bytes(700)) for i in range(n)])
    fsspec.put("large", bytes(n * SPREAD))
    if find_spec("obstore") is None:
        report.notes.append("obstore is not installed: its cases are skipped")
    else:
        ours = open_storage(URL, server.options("obstore"))
        measure(report, f"{label}: {n} reads, raw obstore", "256 threads", raw_wave(server, n), rounds, n)
        measure(report, f"{label}: {n} reads, obstore", "one wave", wave(ours, n), rounds, n)
        measure(report, f"{label}: {n} ranges, raw obstore", "ten a call", raw_ranges(server, n), rounds, n)
        measure(report, f"{label}: {n} ranges, obstore", "one wave", ranges(ours, n), rounds, n)
    measure(report, f"{label}: {n} reads, fsspec", "one wave", wave(fsspec, n), rounds, n)


# ---- the work of a program, beside the same on a local directory


@dataclass(frozen=True)
class Place:
    """Where the stores are: a local directory, or the server with this latency and bandwidth."""

    name: str
    latency_s: float = 0.0
    bytes_per_s: float = 0.0
    is_local: bool = False


LOCAL = Place("local", is_local=True)
FAR = [
    Place("1 ms", 0.001),
    Place("20 ms", 0.02),
    Place("100 ms", 0.1),
    Place("20 ms, 100 MB/s", 0.02, 100e6),
]
STORES = {
    "store": Schema({"obs": Field("float32", (64,)), "action": Field("int64")}),
    "chunks": Schema({"obs": Field("float32", (64,), chunk_rows=256), "action": Field("int64", chunk_rows=256)}),
}
EPISODE_STEPS = 1000


class Work:
    """What is timed. Each method returns the seconds of one run at the place that was entered."""

    def __init__(self, server: ObjectServer, directory: Path, n_steps: int) -> None:
        self._server = server
        self._directory = directory
        self._n_new = 0
        self.n_steps = n_steps
        self._rng = np.random.default_rng(0)
        self.place = LOCAL
        self.cpu_s = 0.0  # of this process, in what was timed last

    @contextmanager
    def _timed(self) -> Iterator[Stopwatch]:
        with stopwatch() as watch:
            start = time.process_time()
            yield watch
            self.cpu_s = time.process_time() - start

    def enter(self, place: Place) -> None:
        self.place = place
        if not place.is_local:
            self._server.set(place.latency_s, place.bytes_per_s)

    def fill(self) -> None:
        """Write the stores that are read, here and there."""
        self._server.set(0)
        for name, schema in STORES.items():
            where = f"s3://bucket/{name}", self._server.options()
            with trajstore.create(where[0], schema, storage_options=where[1]).writer() as writer:
                for _ in range(self.n_steps // EPISODE_STEPS):
                    writer.append_episode(self._episode(EPISODE_STEPS), terminated=True)
            trajstore.copy(where[0], self._directory / name, storage_options=where[1])

    def _episode(self, n: int) -> dict[str, Any]:
        return {"obs": self._rng.normal(size=(n, 64)).astype("f4"), "action": self._rng.integers(0, 18, n)}

    def _at(self, name: str) -> tuple[Any, dict[str, Any]]:
        if self.place.is_local:
            return self._directory / name, {}
        return f"s3://bucket/{name}", {"storage_options": self._server.options()}

    def store(self, name: str = "store", **more: Any) -> trajstore.Store:
        url, options = self._at(name)
        return trajstore.open(url, **options, **more)

    def open(self) -> float:
        with self._timed() as watch:
            self.store()
        return watch.seconds

    def cold_batch(self, name: str = "store") -> float:
        reader = Reader(self.store(name))
        with self._timed() as watch:
            reader.sample(256, Windows(8))
        return watch.seconds

    def cold_batch_of_chunks(self) -> float:
        return self.cold_batch("chunks")

    def epoch(self) -> float:
        reader = Reader(self.store(), cache_bytes="16MiB", host_cache_bytes=0)
        with self._timed() as watch:
            for _ in reader.epoch(256, Windows(32), shuffle=False):
                pass
        return watch.seconds

    def _new_store(self) -> trajstore.Store:
        self._n_new += 1
        url, options = self._at(f"new-{self._n_new}")
        return trajstore.create(url, STORES["store"], **options)

    def commit(self) -> float:
        """The second commit of a stream; the first one also makes the stream."""
        with self._new_store().writer(commit_seconds=None) as writer:
            for _ in range(2):
                writer.append_episode(self._episode(3500), terminated=True)
                with self._timed() as watch:
                    writer.commit()
        return watch.seconds

    def append(self) -> float:
        """Append with a commit every second in the background, until all is durable."""
        writer, episode = self._new_store().writer(commit_seconds=1.0), self._episode(EPISODE_STEPS)
        with self._timed() as watch:
            for _ in range(self.n_steps // EPISODE_STEPS):
                writer.append_episode(episode, terminated=True)
            writer.close()
        return watch.seconds


WORKS: dict[str, tuple[str, Callable[[Work], float]]] = {
    "open": ("the whole call", Work.open),
    "commit": ("3,500 steps, the second of a stream", Work.commit),
    "cold batch of 256 windows": ("nothing in the cache, 8 steps each", Work.cold_batch),
    "cold batch, an object for each chunk": ("the same, with chunk_rows=256", Work.cold_batch_of_chunks),
    "epoch in order": ("windows of 32, cache 16 MiB", Work.epoch),
    "append": ("whole episodes, until durable", Work.append),
}


def operations(report: Report, work: Work, rounds: int, far: Sequence[Place]) -> None:
    seconds: dict[tuple[str, str], list[float]] = {(w, p.name): [] for w in WORKS for p in [LOCAL, *far]}
    cpu: dict[tuple[str, str], list[float]] = {key: [] for key in seconds}
    for i in range(rounds + 1):
        for place in [LOCAL, *far]:
            work.enter(place)
            for name, (_, run) in WORKS.items():
                taken = run(work)
                if i:  # the first round connects
                    seconds[name, place.name].append(taken)
                    cpu[name, place.name].append(work.cpu_s)
    for (name, place_name), taken in seconds.items():
        report.add(Case(f"{place_name}: {name}", WORKS[name][0], lambda _: 0.0), taken)
        used = statistics.median(cpu[name, place_name]), min(cpu[name, place_name])
        report.notes.append(f"{place_name}: {name}: {used[0] * 1e3:.1f} ms of CPU, at least {used[1] * 1e3:.1f}")
    compare(report, seconds, far)


def compare(report: Report, seconds: Mapping[tuple[str, str], list[float]], far: Sequence[Place]) -> None:
    for name in WORKS:
        local = seconds[name, LOCAL.name]
        for place in far:
            there = seconds[name, place.name]
            value = statistics.median(there) / statistics.median(local)
            report.ratio(f"{name}, {place.name} / local", value, None, fastest=min(there) / min(local))
    for name, most in (("open", 4), ("commit", 3), ("cold batch of 256 windows", 3)):
        there = seconds[name, "20 ms"]
        value = statistics.median(there) / 0.02
        report.ratio(f"{name}, round trips of 20 ms", value, most, at_most=True, fastest=min(there) / 0.02)


# ---- puts


def puts(report: Report, server: ObjectServer, n_bytes: float) -> None:
    """Write state with the default options; large objects are received and thrown away."""
    server.set(0.0, 0.0, 1 << 20)
    fields = {"obs": Field("float32", (64,)), "action": Field("float32", (8,)), "reward": Field("float32")}
    rng = np.random.default_rng(0)
    steps = {
        path: rng.normal(size=(100, EPISODE_STEPS, *field.shape)).astype("f4") for path, field in fields.items()
    }
    per_episode = sum(values[0].nbytes for values in steps.values())
    store = trajstore.create("s3://bucket/puts", fields, storage_options=server.options())
    before, n = store.snapshot.storage.stats(), int(n_bytes / per_episode) + 1
    with stopwatch() as watch, store.writer() as writer:
        for i in range(n):
            writer.append_episode({path: values[i % 100] for path, values in steps.items()}, terminated=True)
    after = store.snapshot.storage.stats()
    found = after["requests"]["put"] - before["requests"]["put"]
    written = after["bytes_written"] - before["bytes_written"]
    appended = n * per_episode
    report.fact(
        "puts", "state, default options", appended_gb=appended / 1e9, puts=found, written_gb=written / 1e9,
        mb_per_s=appended / watch.seconds / 1e6,
    )  # fmt: skip
    report.ratio("puts for 10 GB of state", found * 10e9 / appended, 2000, at_most=True)


# ---- training


def trained(reader: Reader, batch: int, length: int, n: int, step_s: float) -> float:
    """Batches a second of a loop whose step takes a fixed time, in which the processor is free."""
    batches = iter(reader.batches(batch, Windows(length), prefetch=PREFETCH))
    for _ in range(n // 4 + PREFETCH):
        next(batches)
        time.sleep(step_s)
    start = time.perf_counter()
    for _ in range(n):
        next(batches)
        time.sleep(step_s)
    return n / (time.perf_counter() - start)


def training(report: Report, work: Work, disk_directory: Path, places: Sequence[Place], small: bool) -> None:
    """A cache of a tenth of the store, and no compressed chunks in RAM."""
    n, step_s = (4, 0.001) if small else (60, STEP_S)
    for batch, length in ((16, 64), (256, 8)):
        rates: dict[str, float] = {}
        for place in (LOCAL, *places):
            work.enter(place)
            for disk in (None,) if place.is_local else (None, trajstore.DiskCache(disk_directory, "1GiB")):
                name = place.name + ("" if disk is None else ", disk cache")
                reader = Reader(
                    work.store(disk_cache=disk), cache_bytes=work.n_steps * 264 // 10, host_cache_bytes=0, seed=0
                )
                if disk is not None:
                    for _ in reader.epoch(256, Windows(8), shuffle=False):  # from now on the disk has all
                        pass
                before = reader.stats()
                rates[name] = trained(reader, batch, length, n, step_s)
                after, sampled = reader.stats(), n + n // 4 + 2 * PREFETCH
                report.fact(
                    f"training, {batch} windows of {length}, {name}",
                    f"steps of {step_s * 1e3:.0f} ms, prefetch {PREFETCH}",
                    batches_per_s=rates[name],
                    share_of_local=rates[name] / rates[LOCAL.name],
                    mb_a_batch=(after["bytes_read"] - before["bytes_read"]) / sampled / 1e6,
                )
        for name, rate in rates.items():
            if name != LOCAL.name:
                label = f"training, {batch} windows of {length}, {name} / local"
                report.ratio(label, rate / rates[LOCAL.name], 0.8)


def main() -> None:
    args = arguments(__doc__)
    report = Report("object_store", "what do requests to an object store cost?", args.small)
    rounds, n, n_steps = (1, 20, 4_000) if args.small else (7, 223, 200_000)
    for delay_s in (0.0, 0.02):
        with object_server(delay_s) as server:
            transports(report, f"{delay_s * 1e3:.0f} ms", server, rounds, n)
    with object_server() as server, scratch() as directory:
        far = [place for place in FAR if server.is_compiled or not place.bytes_per_s]
        far = [place for place in far if place.latency_s == 0.02 or not args.small]
        work = Work(server, directory, n_steps)
        work.fill()
        operations(report, work, rounds, far)
        training(report, work, directory / "disk", [place for place in far if place.latency_s == 0.02], args.small)
    with object_server() as server:
        puts(report, server, 40e6 if args.small or not server.is_compiled else 10e9)
    report.finish(args.json)


if __name__ == "__main__":
    main()
