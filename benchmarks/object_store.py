"""What do requests to an object store cost, and how many round trips are an open, a commit and a cold batch?

The server is `_object_server`, on loopback, with a delay before each answer.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from importlib.util import find_spec
from typing import Any

import numpy as np
from _harness import Case, Report, arguments, stopwatch
from _object_server import ObjectServer, object_server

import trajstore
from trajstore import Field, Reader, Schema, Windows
from trajstore.storage import Put, Storage, open_storage

SCHEMA = Schema({"obs": Field("float32", (64,), chunk_rows=256), "action": Field("int64", chunk_rows=256)})
URL = "s3://bucket/run"
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
    return lambda: list(threads.map(lambda i: obstore.get(store, f"run/k{i}").bytes().to_bytes(), range(n)))


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


def operations(report: Report, label: str, server: ObjectServer, rounds: int, n_steps: int) -> None:
    where = {"storage_options": server.options()}
    store = trajstore.create("s3://bucket/store", SCHEMA, **where)
    rng = np.random.default_rng(0)
    times: dict[str, list[float]] = {"commit": [], "open": [], "refresh": [], "cold batch of 256 windows": []}
    with store.writer(commit_seconds=None) as writer:
        for _ in range(rounds + 1):
            data = {"obs": rng.normal(size=(n_steps, 64)).astype("f4"), "action": np.arange(n_steps)}
            writer.append_episode(data, terminated=True)
            with stopwatch() as watch:
                writer.commit()
            times["commit"].append(watch.seconds)
    del times["commit"][0]  # makes the stream
    Reader(trajstore.open("s3://bucket/store", **where)).sample(1, Windows(8))
    for _ in range(rounds):
        with stopwatch() as watch:
            opened = trajstore.open("s3://bucket/store", **where)
        times["open"].append(watch.seconds)
        with stopwatch() as watch:
            opened.refresh()
        times["refresh"].append(watch.seconds)
        reader = Reader(store if len(store) else opened)
        with stopwatch() as watch:
            reader.sample(256, Windows(8))
        times["cold batch of 256 windows"].append(watch.seconds)
        gc.collect()
    for name, seconds in times.items():
        report.add(Case(f"{label}: {name}", "seconds of the whole call", lambda _: 0.0), seconds)


def main() -> None:
    args = arguments(__doc__)
    report = Report("object_store", "what do requests to an object store cost?", args.small)
    rounds, n, n_steps = (2, 20, 1000) if args.small else (7, 223, 3500)
    for delay_s in (0.0, 0.02):
        label = f"{delay_s * 1e3:.0f} ms"
        with object_server(delay_s) as server:
            transports(report, label, server, rounds, n)
        with object_server(delay_s) as server:
            operations(report, label, server, rounds, n_steps)
    for name, round_trips in (("open", 4), ("commit", 3), ("cold batch of 256 windows", 3)):
        median = report.cases[f"20 ms: {name}"]["median_s"]
        report.ratio(f"{name}, round trips of 20 ms", median / 0.02, round_trips, at_most=True)
    report.finish(args.json)


if __name__ == "__main__":
    main()
