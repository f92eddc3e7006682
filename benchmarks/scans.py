"""How fast is a scan of a store far away, and from a disk whose pages are not in memory?"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from _harness import Case, Report, arguments, forget_pages, scratch, stopwatch
from misses import LATENCY_S, URL, Remote, remote, sealed, walks

import trajstore
from trajstore.store.read_ahead import ReadAhead
from trajstore.store.stream_reader import StreamReader

CACHE, NO_TIER = "64MiB", 1
EPISODE_STEPS = 1000
Scan = Callable[[trajstore.Store], None]


def episodes(n_steps: int) -> Iterator[dict[str, Any]]:
    for obs in walks(n_steps // EPISODE_STEPS, EPISODE_STEPS):
        action, reward = np.zeros((len(obs), 8), np.float32), obs[:, 0].copy()
        yield {"obs": obs, "action": action, "reward": reward}


def reader_of(store: trajstore.Store) -> trajstore.Reader:
    return trajstore.Reader(store, cache_bytes=CACHE, host_cache_bytes=NO_TIER)


def read_episodes(store: trajstore.Store) -> None:
    snapshot = store.snapshot
    for i in range(len(snapshot.episodes)):
        snapshot.read_episode(i)


def read_blocks(store: trajstore.Store, prefetch: int = 0) -> None:
    for _ in reader_of(store).read_all_in_order(block_steps=2048, prefetch=prefetch):
        pass


def read_epoch(store: trajstore.Store) -> None:
    for _ in reader_of(store).epoch(256, trajstore.Windows(32), shuffle=False):
        pass


SCANS: dict[str, Scan] = {
    "read_episode, one after the other": read_episodes,
    "read_all_in_order": read_blocks,
    "read_all_in_order, prefetch=2": partial(read_blocks, prefetch=2),
    "epoch of windows in order": read_epoch,
}


@contextmanager
def nothing_ahead() -> Iterator[None]:
    with mock.patch.object(ReadAhead, "request", return_value=None):
        yield


class InFlight:
    """The most fetches ahead that were under way at once."""

    def __init__(self) -> None:
        self.most = self._now = 0
        self._lock = threading.Lock()

    @contextmanager
    def counted(self) -> Iterator[None]:
        real = StreamReader.read_chunks

        def read_chunks(*args: Any) -> Any:
            with self._lock:
                self._now += 1
                self.most = max(self.most, self._now)
            try:
                return real(*args)
            finally:
                with self._lock:
                    self._now -= 1

        with mock.patch.object(StreamReader, "read_chunks", read_chunks):
            yield


def far(place: Remote, options: dict[str, Any], scan: Scan, latency: float) -> float:
    """Seconds of a scan with a latency that holds only meanwhile."""
    store = trajstore.open(URL, storage_options=options)
    _ = store.episodes
    place.tell(f"latency/{latency}")
    with stopwatch() as watch:
        scan(store)
    place.tell("latency/0")
    return watch.seconds


def far_scans(report: Report, n_steps: int, rounds: int) -> None:
    os.environ.setdefault("AWS_EC2_METADATA_DISABLED", "true")
    os.environ.setdefault("AWS_DEFAULT_REGION", "us-east-1")
    import s3fs

    with remote() as place:
        near, options = (place.options(endpoint) for endpoint in (place.near, place.far))
        s3fs.S3FileSystem(**near).mkdir("bench")
        sealed(URL, episodes(n_steps), storage_options=near)
        n_bytes = n_steps * (64 + 8 + 1) * 4
        for name, scan in SCANS.items():
            ahead = partial(far, place, options, scan)

            def behind(latency: float, ahead: Callable[[float], float] = ahead) -> float:
                with nothing_ahead():
                    return ahead(latency)

            place.tell("latency/0")
            for run in (ahead, behind):  # the proxy knows every answer from now on
                run(0)
            place.tell("latency/0")
            in_flight = InFlight()
            with in_flight.counted():
                scan(trajstore.open(URL, storage_options=options))
            report.fact(f"{name}: requests", "at most at once", ahead=in_flight.most, requests=place.tell("count"))
            with nothing_ahead():
                place.tell("latency/0")
                scan(trajstore.open(URL, storage_options=options))
            report.fact(f"{name}: requests before", "nothing read ahead", requests=place.tell("count"))
            cases = [
                Case(f"{name}, 20 ms", "read ahead", lambda _, run=ahead: run(LATENCY_S), n_bytes=n_bytes),
                Case(f"{name}, 20 ms, not ahead", "the same, nothing read ahead",
                     lambda _, run=behind: run(LATENCY_S), n_bytes=n_bytes),
                Case(f"{name}, 0 ms", "the same without latency: what it could reach",
                     lambda _, run=ahead: run(0), n_bytes=n_bytes),
            ]  # fmt: skip
            report.run(cases, rounds)
            report.speedup(f"{name}, against nothing ahead", f"{name}, 20 ms", f"{name}, 20 ms, not ahead", 2)
            slow, ideal = (report.cases[f"{name}, {ms} ms"]["median_s"] for ms in (20, 0))
            report.ratio(f"{name}, 20 ms against 0 ms", slow / ideal, 1.5, at_most=True)


def near_scans(report: Report, directory: Path, n_steps: int, rounds: int) -> None:
    """From a local directory: pages cold and warm."""
    sealed(directory, episodes(n_steps), fsync=False)
    n_bytes = n_steps * (64 + 8 + 1) * 4

    def timed(scan: Scan, is_cold: bool) -> float:
        store = trajstore.open(directory)
        _ = store.episodes
        if is_cold:
            forget_pages(directory)
        with stopwatch() as watch:
            scan(store)
        return watch.seconds

    cases = [
        Case(f"{name}, local, {state}", "pages " + state,
             lambda _, scan=scan, is_cold=state == "cold": timed(scan, is_cold), n_bytes=n_bytes)
        for name, scan in SCANS.items() for state in ("cold", "warm")
    ]  # fmt: skip
    report.run(cases, rounds)
    for name in SCANS:
        cold, warm = (report.cases[f"{name}, local, {state}"]["median_s"] for state in ("cold", "warm"))
        report.ratio(f"{name}, local, cold against warm", cold / warm, None)


def main() -> None:
    args = arguments(__doc__)
    report = Report("scans", "how fast is a scan of a store far away, or of cold pages?", args.small)
    n_steps, rounds = (5_000, 1) if args.small else (100_000, 3)
    far_scans(report, n_steps, rounds)
    with scratch() as directory:
        near_scans(report, directory / "store", n_steps, rounds)
    report.finish(args.json)


if __name__ == "__main__":
    main()
