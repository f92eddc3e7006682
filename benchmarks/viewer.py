"""How long until a large store is shown: by the viewer, and by `trajstore info`?

Two stores: a million episodes, and one shaped like 100 GB of decoded frames: 100 streams of 1 GB. Their files are
links to those of one stream, and its frames are nearly all alike, so that it fits on any disk; the viewer lists,
opens and reads as many objects as if they were not. The second one also stands on a server that answers after
20 ms.

The first page is complete when all that a browser asks for it is answered: the page, and the answers of its panels,
which are asked for at once. The processor
seconds of the process stand beside: they change less if others use the machine.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import resource
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

import numpy as np
from _harness import Case, Report, arguments, scratch
from _object_server import ObjectServer, object_server
from open import fill

import trajstore
from trajstore import Field
from trajstore.format.commit_record import CommitRecord
from trajstore.format.ids import new_id
from trajstore.viewer import Viewer

PANELS = ("version", "facts", "plots", "streams", "storage", "history")
FRAMES = {"observation": Field("uint8", (84, 84, 4)), "state": Field("float32", (64,)), "reward": Field("float32")}
LATENCY_S = 0.02
Seconds = dict[str, list[float]]


class Client:
    """Asks a viewer; each question has a connection of its own."""

    def __init__(self, address: str) -> None:
        url = urlsplit(address)
        self._place, self._token = url.netloc, url.query.removeprefix("token=")

    def ask(self, name: str, **asked: object) -> Any:
        return json.loads(self._get(f"/api/{name}?{urlencode(asked)}"))

    def first_page(self) -> None:
        self._get(f"/?token={self._token}")
        with ThreadPoolExecutor(len(PANELS)) as threads:  # a browser asks six questions of one server at once
            list(threads.map(self.ask, PANELS))

    def _get(self, path: str) -> bytes:
        connection = http.client.HTTPConnection(self._place, timeout=600)
        try:
            connection.request("GET", path, headers={"X-Trajstore-Token": self._token})
            answer = connection.getresponse()
            body = answer.read()
        finally:
            connection.close()
        assert answer.status == 200, body
        return body


def main() -> None:
    args = arguments(__doc__, add_options)
    report = Report("viewer", "how long until a large store is shown?", args.small)
    rounds = 1 if args.small else args.rounds
    n_episodes, n_streams, n_steps = (2000, 3, 500) if args.small else (1_000_000, 100, 35_000)
    with scratch() as directory:
        fill(directory / "episodes", n_episodes, 10)
        n_objects = write_frames(directory / "frames", n_streams, n_steps)
        row_bytes = sum(field.row_bytes for field in FRAMES.values())
        large = f"{n_streams * n_steps * row_bytes / 1e9:,.0f} GB"
        report.notes.append(f"{large}: {n_streams:,} streams of {n_steps:,} steps, {n_objects:,} objects")
        for label, place in ((f"{n_episodes:,} episodes", "episodes"), (large, "frames")):
            measure(report, label, directory / place, rounds)
        if find_spec("obstore") or find_spec("s3fs"):
            remote(report, f"{large}, 20 ms", directory / "frames", rounds)
        else:
            report.notes.append("neither obstore nor s3fs is installed: nothing is read over a network")
    report.finish(args.json)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=7, help="runs of each case")


def write_frames(path: Path, n_streams: int, n_steps: int) -> int:
    """Write a store of that many streams, all with the same files; returns the number of its objects."""
    frames = np.zeros((500, 84, 84, 4), np.uint8)
    frames[:, 40, 40] = np.arange(500)[:, None] % 251
    data = {"observation": frames, "state": np.zeros((500, 64), np.float32), "reward": np.ones(500, np.float32)}
    with trajstore.create(path, FRAMES, fsync=False).writer(buffer_bytes="64MiB") as writer:
        for _ in range(n_steps // 500):
            writer.append_episode(data, terminated=True)
    (record,) = trajstore.open(path).streams
    first = path / record.folder
    for _ in range(n_streams - 1):
        link(record, first, new_id(record.name))
    return sum(len(files) for _, _, files in os.walk(path))


def link(record: CommitRecord, first: Path, name: str) -> None:
    """Make another stream of the files of the first one."""
    for source in first.rglob("*"):
        target = first.parent / name / source.relative_to(first)
        if source.is_dir():
            target.mkdir(parents=True, exist_ok=True)
        elif source != first / "zarr.json":
            target.parent.mkdir(parents=True, exist_ok=True)
            target.hardlink_to(source)
    (first.parent / name / "zarr.json").write_bytes(replace(record, id=name).to_bytes())


def measure(report: Report, label: str, store: Path, rounds: int) -> None:
    found: Seconds = {}
    for _ in range(rounds):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        timed(found, "info", lambda: command("info", store).communicate())
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        found.setdefault("info, processor", []).append(used)
        started = time.perf_counter()
        with command("view", store, "--no-browser") as process:
            assert process.stdout is not None
            client = Client(process.stdout.readline().rpartition(" at ")[2].strip())
            found.setdefault("address, from the start", []).append(time.perf_counter() - started)
            timed(found, "first page, from the address", client.first_page)
            found.setdefault("first page, from the start", []).append(time.perf_counter() - started)
            found.setdefault("first page, from the start, processor", []).append(processor_seconds(process.pid))
            timed(found, "first page again", client.first_page)
            pages(found, client)
            process.terminate()
    add(report, label, found)
    at_most(report, f"{label}: info, seconds", found["info"], 2)
    at_most(report, f"{label}: first page, from the address, seconds", found["first page, from the address"], 1)


def remote(report: Report, label: str, store: Path, rounds: int) -> None:
    found: Seconds = {}
    with object_server() as server:
        upload(server, store)
        server.set(LATENCY_S)
        for _ in range(rounds):
            started = time.perf_counter()
            with Viewer(trajstore.open("s3://bucket/store", storage_options=server.options())) as viewer:
                client = Client(viewer.url)
                client.first_page()
                found.setdefault("opened and first page", []).append(time.perf_counter() - started)
                timed(found, "first page again", client.first_page)
                pages(found, client)
    add(report, label, found)
    at_most(report, f"{label}: opened and first page, seconds", found["opened and first page"], 1)


def pages(found: Seconds, client: Client) -> None:
    """Open the table of episodes, sort, filter, and look at an episode."""
    timed(found, "50 episodes", lambda: client.ask("episodes"))
    timed(found, "50 episodes by length", lambda: client.ask("episodes", sort="-length,-row"))
    timed(found, "50 episodes of a filter", lambda: client.ask("episodes", filter="length > 5 and row > 9"))
    row = client.ask("episodes", n=1)["rows"][0]
    key = {"stream": row["stream"], "episode": row["episode"]}
    fields = client.ask("episode", **key)["fields"]

    def show() -> None:
        client.ask("episode", **key)
        for field in fields:
            if not field["is_frames"]:
                client.ask("series", path=field["path"], **key)

    timed(found, "an episode and its series", show)


def command(name: str, store: Path, *options: str) -> subprocess.Popen[str]:
    words = [sys.executable, "-m", "trajstore", name, str(store), *options]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def processor_seconds(pid: int) -> float:
    """Of a running process, since its start."""
    numbers = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(numbers[11]) + int(numbers[12])) / os.sysconf("SC_CLK_TCK")


def timed(found: Seconds, name: str, action: Callable[[], object]) -> None:
    start = time.perf_counter()
    action()
    found.setdefault(name, []).append(time.perf_counter() - start)


def add(report: Report, label: str, found: Seconds) -> None:
    for name, seconds in found.items():
        report.add(Case(f"{label}: {name}", "", lambda _: 0.0), seconds)


def at_most(report: Report, name: str, seconds: list[float], target: float) -> None:
    report.ratio(name, float(np.median(seconds)), target, at_most=True, fastest=min(seconds))


def upload(server: ObjectServer, store: Path) -> None:
    """Put all files of a store on the server."""
    files = [path for path in store.rglob("*") if path.is_file()]

    def put(path: Path) -> None:
        address = f"{server.endpoint}/bucket/store/{path.relative_to(store).as_posix()}"
        with urllib.request.urlopen(urllib.request.Request(address, path.read_bytes(), method="PUT")):
            pass

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(put, files))


if __name__ == "__main__":
    main()
