"""How fast do windows come that miss the cache? From a disk and from S3, against zarr, tensorstore and RLinf."""

from __future__ import annotations

import asyncio
import http.client
import importlib.metadata
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zarr
from _atari import GAMES, stacked
from _harness import Case, Report, arguments, scratch, stopwatch

import trajstore

BATCH, LENGTH = 256, 32
SHARE = 10  # caches hold one part in so many
N_WARM = 2  # batches that fill the caches
NO_TIER = 1  # byte: no compressed chunk fits, so every miss is read
LATENCY_S, LONGER_S = 0.02, 0.32
STATE_BYTES = 64 * 4
URL = "s3://bench/store"
Array = np.ndarray[Any, np.dtype[Any]]
Tensors = dict[str, torch.Tensor]
Read = Callable[[Array], Array]
Run = Callable[[Path], float]


def walks(n_episodes: int, n_steps: int, seed: int = 0) -> Iterator[Array]:
    """Episodes of random walks of 64 float32."""
    rng = np.random.default_rng(seed)
    for _ in range(n_episodes):
        yield np.cumsum(rng.standard_normal((n_steps, 64), np.float32), axis=0)


def sealed(url: str | Path, episodes: Iterator[Mapping[str, Array]], **options: Any) -> trajstore.Store:
    """A store of one finished stream, so that its arrays have the same shape for everybody."""
    store = trajstore.create(url, **options)
    with store.writer(commit_seconds=None) as writer:
        for episode in episodes:
            writer.append_episode(episode, terminated=True)
    store.refresh()
    return store


def drawn(store: trajstore.Store, batch: int, n: int, seed: int = 0) -> list[Array]:
    """First rows of the windows of the next ``n`` batches that a new reader with this seed samples."""
    twin = trajstore.Reader(store, seed=seed)  # what it draws does not depend on its cache
    lengths = store.episodes["length"]
    first = np.cumsum(lengths) - lengths
    handles = [twin.sample(batch, trajstore.Windows(length=LENGTH))["index"].numpy() for _ in range(n)]
    return [first[handle[:, 1]] + handle[:, 2] for handle in handles]


def with_threads(n: int, run: Run) -> Run:
    """The same with so many threads for torch."""

    def run_with(directory: Path) -> float:
        before = torch.get_num_threads()
        torch.set_num_threads(n)
        try:
            return run(directory)
        finally:
            torch.set_num_threads(before)

    return run_with


def thread_counts() -> dict[str, int]:
    """How many threads torch gets, by how it is said: one, and what it takes by itself."""
    return {f"{n} thread{'s' * (n > 1)}": n for n in sorted({1, torch.get_num_threads()})}


@dataclass(frozen=True)
class Form:
    """A way to read windows that start at given rows."""

    isolates: str
    read: Read
    n_threads: int = 1  # of torch


def ours(reader: trajstore.Reader) -> Read:
    """Draws for itself the windows that the others are told."""
    windows = trajstore.Windows(length=LENGTH, fields=("obs",))
    return lambda starts: reader.sample(len(starts), windows)["obs"].numpy()


def one_by_one(array: Any) -> Read:
    return lambda starts: np.stack([array[i : i + LENGTH] for i in starts.tolist()])


def in_sequence(array: Any) -> Read:
    return lambda starts: np.stack([array[i : i + LENGTH].read().result() for i in starts.tolist()])


def at_once(array: Any) -> Read:
    def read(starts: Array) -> Array:
        futures = [array[i : i + LENGTH].read() for i in starts.tolist()]
        return np.stack([future.result() for future in futures])

    return read


def by_index(array: Any) -> Read:
    def read(starts: Array) -> Array:
        rows = (starts[:, None] + np.arange(LENGTH)).reshape(-1)
        found: Array = array[rows].read().result()
        return found.reshape(len(starts), LENGTH, -1)

    return read


def zarr_column(store: Any, stream: str) -> Any:
    return zarr.open_group(store, path=f"streams/{stream}", mode="r")["steps/obs"]


def tensorstore_column(directory: Path, stream: str, cache_bytes: int) -> Any:
    """Opened with a cache of its own; files are not asked again whether they changed."""
    import tensorstore

    spec = {
        "driver": "zarr3",
        "kvstore": {"driver": "file", "path": f"{directory}/streams/{stream}/steps/obs/"},
        "context": {"cache_pool": {"total_bytes_limit": cache_bytes}},
        "recheck_cached_data": "open",
        "recheck_cached_metadata": "open",
    }
    return tensorstore.open(spec, read=True).result()


def forms(store: trajstore.Store, directory: Path, cache_bytes: int) -> dict[str, Form]:
    """Everybody's ways to read windows of the observations."""
    found, isolates = {}, "sample: chunks read, decoded and cached"
    for label, n in thread_counts().items():
        reader = trajstore.Reader(store, cache_bytes=cache_bytes, host_cache_bytes=NO_TIER, seed=0)
        found[f"ours, {label}"] = Form(isolates, ours(reader), n)
    reader = trajstore.Reader(store, cache_bytes=cache_bytes, seed=0)
    found["ours, chunks in RAM, 1 thread"] = Form("the same with all compressed chunks in RAM", ours(reader))
    stream = store.streams[0].id
    one = one_by_one(zarr_column(str(directory), stream))
    found["zarr"] = Form("zarr-python, one read a window, no cache", one)
    if find_spec("tensorstore"):
        kinds = {"in sequence": (in_sequence, "one read a window, one after another"),
                 "at once": (at_once, "one read a window, all at once"),
                 "index array": (by_index, "one read of all rows")}  # fmt: skip
        for name, (form, isolates) in kinds.items():
            column = tensorstore_column(directory, stream, cache_bytes)
            found[f"tensorstore, {name}"] = Form(isolates, form(column))
    return found


def going_on(read: Read, batches: Sequence[Array], n: int) -> Run:
    """The seconds of the next ``n`` batches: every run goes on where the last ended."""
    left = iter(batches)

    def run(directory: Path) -> float:
        with stopwatch() as watch:
            for _ in range(n):
                read(next(left))
        return watch.seconds

    return run


def check_alike(reads: Sequence[Read], batches: Sequence[Array]) -> None:
    """Everybody reads the same; fills the caches as well."""
    for starts in batches:
        first, *rest = (read(starts) for read in reads)
        if not all(np.array_equal(first, other) for other in rest):
            raise AssertionError("the readers do not read the same")


def uniform_windows(report: Report, directory: Path, n_steps: int, n: int, rounds: int) -> None:
    store = sealed(directory, ({"obs": obs} for obs in walks(n_steps // 1000, 1000)), fsync=False)
    batches, n_bytes = drawn(store, BATCH, N_WARM + n * rounds), n * BATCH * LENGTH * STATE_BYTES
    found = forms(store, directory, n_steps * STATE_BYTES // SHARE)
    check_alike([form.read for form in found.values()], batches[:N_WARM])
    cases = []
    for name, form in found.items():
        run = with_threads(form.n_threads, going_on(form.read, batches[N_WARM:], n))
        cases.append(Case(f"windows, {name}", form.isolates, run, n, "batch", n_bytes))
    report.run(cases, rounds)
    for label in thread_counts():
        for peer, target in (("zarr", 12), ("tensorstore, in sequence", 3), ("tensorstore, index array", 1)):
            name = f"windows, against {peer}, {label}"
            report.speedup(name, f"windows, ours, {label}", f"windows, {peer}", target)


class TrajectoryFiles:
    """RLinf's disk path, rebuilt from how it is described: own code, without the loops over rows that it has.

    One file a trajectory, holding every field as ``[T, B, ...]`` and next observations in full. A batch draws
    transitions uniformly; every distinct trajectory that is not among the newest, which are kept in RAM, is loaded
    whole, flattened and joined to the others, and the drawn rows are taken from that. Nothing loaded is kept.
    """

    def __init__(self, directory: Path, n_cached: int, seed: int = 0) -> None:
        directory.mkdir()
        self._directory = directory
        self._n_cached = n_cached
        self._cached: dict[int, Tensors] = {}
        self._sizes: list[int] = []
        self._generator = torch.Generator().manual_seed(seed)

    def add(self, episode: Mapping[str, Array]) -> None:
        """Save a trajectory of one environment; ``obs`` has a row more than the others."""
        obs, action, reward = (torch.from_numpy(episode[name])[:, None] for name in ("obs", "action", "reward"))
        fields = {"curr_obs": obs[:-1].clone(), "next_obs": obs[1:].clone(), "actions": action.clone()}
        fields["rewards"] = reward[..., None].clone()
        fields |= {name: torch.zeros(len(obs), 1, 1).bool() for name in ("terminations", "truncations", "dones")}
        number = len(self._sizes)
        torch.save(fields, self._path(number))
        self._sizes.append(len(reward))
        self._cached[number] = _flat(fields)
        self._cached.pop(number - self._n_cached, None)

    def _path(self, number: int) -> Path:
        return self._directory / f"trajectory_{number}.pt"

    def sample(self, n: int) -> Tensors:
        sizes = torch.tensor(self._sizes)
        stops = sizes.cumsum(0)
        number = torch.randint(int(stops[-1]), (n,), generator=self._generator)
        trajectory = torch.bucketize(number, stops, right=True)
        distinct, which = trajectory.unique(return_inverse=True)
        parts = [self._load(i) for i in distinct.tolist()]
        before = sizes[distinct].cumsum(0) - sizes[distinct]
        rows = before[which] + number - (stops - sizes)[trajectory]
        return {name: torch.cat([part[name] for part in parts]).index_select(0, rows) for name in parts[0]}

    def _load(self, number: int) -> Tensors:
        cached = self._cached.get(number)
        return _flat(torch.load(self._path(number))) if cached is None else cached


def _flat(fields: Tensors) -> Tensors:
    """``[T, B, ...]`` as ``[T * B, ...]``; flags lose the row before the first step."""
    n = len(fields["actions"])
    return {name: value[len(value) - n :].flatten(0, 1) for name, value in fields.items()}


@dataclass(frozen=True)
class Experience:
    """Observations of episodes, one more than there are steps."""

    kind: str
    obs: Sequence[Array]

    def episodes(self) -> Iterator[dict[str, Array]]:
        for obs in self.obs:
            n = len(obs) - 1
            yield {"obs": obs, "action": np.zeros((n, 8), np.float32), "reward": np.zeros(n, np.float32)}

    def schema(self, chunk_rows: int | None) -> trajstore.Schema:
        obs = self.obs[0]
        return trajstore.Schema(
            {
                "obs": trajstore.Field(str(obs.dtype), obs.shape[1:], final=True, chunk_rows=chunk_rows),
                "action": trajstore.Field("float32", (8,)),
                "reward": trajstore.Field("float32"),
            }
        )

    @property
    def n_bytes(self) -> int:
        return sum(column.nbytes for episode in self.episodes() for column in episode.values())


def state_experience(n_episodes: int) -> Experience:
    return Experience("state", list(walks(n_episodes, 201)))


def pixel_experience(n_episodes: int) -> Experience:
    """Real Atari frames, stacked, of four games."""
    n = n_episodes // 4
    return Experience("pixel", [obs for game in GAMES[:4] for obs in np.split(stacked(game, n * 101), n)])


def repeated(action: Callable[[], object], n: int) -> Run:
    def run(directory: Path) -> float:
        with stopwatch() as watch:
            for _ in range(n):
                action()
        return watch.seconds

    return run


def transitions(report: Report, directory: Path, data: Experience, chunk_rows: int, n: int, rounds: int) -> None:
    """Steps with their next observation; chunks as they are by default, and smaller ones."""
    windows = trajstore.Windows(length=1, next_fields=("obs",))
    cases = []
    for rows in (None, chunk_rows):
        store = sealed(directory / f"store-{rows}", data.episodes(), schema=data.schema(rows), fsync=False)
        reader = trajstore.Reader(store, cache_bytes=data.n_bytes // SHARE, host_cache_bytes=NO_TIER, seed=0)
        run = repeated(partial(reader.sample, BATCH, windows), n)
        name = f"{data.kind} transitions, ours" + (f", {rows} rows a chunk" if rows else "")
        cases.append(Case(name, "sample, next observations from the next row", with_threads(1, run), n, "batch"))
    files = TrajectoryFiles(directory / "files", len(data.obs) // SHARE)
    for episode in data.episodes():
        files.add(episode)
    theirs = f"{data.kind} transitions, RLinf's path"
    run = with_threads(1, repeated(lambda: files.sample(BATCH), 1))
    cases.append(Case(theirs, "a reconstruction: trajectories loaded whole", run, 1, "batch"))
    for case in cases:
        case.run(directory)  # fills the caches
    report.run(cases, rounds)
    for case in cases[:-1]:
        report.speedup(f"{case.name}, against RLinf's path", case.name, theirs, 50)


SERVER = """
import threading
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
threading.Event().wait()
"""


class Distance:
    """An HTTP proxy that answers late: ``latency`` seconds after a request came.

    It remembers what the server answered to reads, so that the server's own time does not count. It runs in a
    process of its own; reads of ``/-/latency/<seconds>`` and ``/-/count`` are for itself.
    """

    def __init__(self, upstream: str) -> None:
        self._upstream = upstream
        self._latency = 0.0
        self._count = 0
        self._answers: dict[tuple[str, ...], bytes] = {}

    async def serve(self) -> None:
        server = await asyncio.start_server(self._talk, "127.0.0.1", 0)
        print(server.sockets[0].getsockname()[1], flush=True)
        await server.serve_forever()

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                due = time.monotonic() + self._latency
                answer = await self._answer(head)
                await asyncio.sleep(due - time.monotonic())
                writer.write(answer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()  # the client has gone

    async def _answer(self, head: str) -> bytes:
        first, *lines = head.rstrip().split("\r\n")
        method, path, _ = first.split(" ")
        if path.startswith("/-/"):
            return self._own(path)
        self._count += 1
        headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
        key = (method, path, headers.get("range", ""))
        if key not in self._answers:
            self._answers[key] = await asyncio.to_thread(self._ask, method, path, headers)
        return self._answers[key]

    def _own(self, path: str) -> bytes:
        if path.startswith("/-/latency/"):
            self._latency, self._count = float(path.rpartition("/")[2]), 0
        body = str(self._count).encode()
        return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)

    def _ask(self, method: str, path: str, headers: dict[str, str]) -> bytes:
        connection = http.client.HTTPConnection(self._upstream, timeout=30)
        try:
            connection.request(method, path, headers=headers)
            response = connection.getresponse()
            body = response.read()
        finally:
            connection.close()
        length = response.getheader("Content-Length", "0") if method == "HEAD" else str(len(body))
        dropped = ("content-length", "transfer-encoding", "connection")
        kept = [f"{name}: {value}" for name, value in response.getheaders() if name.lower() not in dropped]
        lines = [f"HTTP/1.1 {response.status} {response.reason}", *kept, f"Content-Length: {length}", "", ""]
        return "\r\n".join(lines).encode("latin-1") + body


@dataclass(frozen=True)
class Remote:
    """An S3 server on loopback, and the same at a distance."""

    near: str
    far: str

    def options(self, endpoint: str) -> dict[str, Any]:
        return {"key": "key", "secret": "secret", "client_kwargs": {"endpoint_url": endpoint}}

    def tell(self, path: str) -> int:
        with urllib.request.urlopen(f"{self.far}/-/{path}", timeout=30) as answer:
            return int(answer.read())


@contextmanager
def process(*command: str) -> Iterator[subprocess.Popen[str]]:
    """A Python process that ends with the block."""
    started = [sys.executable, *command]
    running = subprocess.Popen(started, text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        yield running
    finally:
        running.terminate()
        running.wait(30)


@contextmanager
def remote() -> Iterator[Remote]:
    """moto's server and a proxy in front of it, each in a process of its own."""
    with process("-c", SERVER) as server:
        upstream = f"127.0.0.1:{first_line(server)}"
        with process(__file__, "--proxy", upstream) as proxy:
            yield Remote(f"http://{upstream}", f"http://127.0.0.1:{first_line(proxy)}")


def first_line(running: subprocess.Popen[str]) -> str:
    assert running.stdout is not None
    return running.stdout.readline().strip()


@dataclass(frozen=True)
class Far:
    """A store at a distance, and the first rows of the windows of every round."""

    place: Remote
    store: trajstore.Store
    starts: list[Array]

    def sampled(self, seed: int) -> Read:
        """By a reader that has nothing yet; its cache holds more than a batch."""
        return ours(trajstore.Reader(self.store, cache_bytes="1GiB", host_cache_bytes=NO_TIER, seed=seed))

    def case(self, name: str, isolates: str, form: Callable[[int], Read], latency: float) -> Case:
        """One batch a round, with a latency that holds only meanwhile."""
        rounds = iter(range(len(self.starts)))

        def run(directory: Path) -> float:
            i = next(rounds)
            read = form(i)
            self.place.tell(f"latency/{latency}")
            with stopwatch() as watch:
                read(self.starts[i])
            self.place.tell("latency/0")
            return watch.seconds

        return Case(name, isolates, with_threads(1, run), 1, "batch")

    def n_requests(self, read: Read) -> int:
        self.place.tell("latency/0")  # counts from here
        read(self.starts[0])
        return self.place.tell("count")


@contextmanager
def far_store(n_steps: int, batch: int, rounds: int) -> Iterator[tuple[Far, Any]]:
    """A store in S3, and its observations as zarr opens them."""
    os.environ.setdefault("AWS_EC2_METADATA_DISABLED", "true")
    os.environ.setdefault("AWS_DEFAULT_REGION", "us-east-1")
    import s3fs

    with remote() as place:
        near, far = (place.options(endpoint) for endpoint in (place.near, place.far))
        s3fs.S3FileSystem(**near).mkdir("bench")
        sealed(URL, ({"obs": obs} for obs in walks(n_steps // 1000, 1000)), storage_options=near)
        store = trajstore.open(URL, storage_options=far)
        column = zarr_column(zarr.storage.FsspecStore.from_url(URL, far, read_only=True), store.streams[0].id)
        starts = [drawn(store, batch, 1, seed)[0] for seed in range(rounds)]
        one_by_one(column)(np.arange(0, n_steps - LENGTH, LENGTH))  # the proxy knows every answer from now on
        yield Far(place, store, starts), column


def far_windows(report: Report, n_steps: int, batch: int, rounds: int) -> None:
    with far_store(n_steps, batch, rounds) as (far, column):
        check_alike([far.sampled(0), one_by_one(column)], far.starts[:1])
        isolates = f"sample of {batch} windows, nothing cached"
        cases = [
            far.case("S3, ours, 20 ms", isolates, far.sampled, LATENCY_S),
            far.case("S3, ours, 320 ms", isolates, far.sampled, LONGER_S),
            far.case("S3, zarr, 20 ms", "FsspecStore, one read a window", lambda _: one_by_one(column), LATENCY_S),
        ]
        report.run(cases, rounds)
        for name, read in {"ours": far.sampled(0), "zarr": one_by_one(column)}.items():
            report.fact(f"S3, {name}: requests", f"for a batch of {batch}", requests=far.n_requests(read))
    slow, fast = (report.cases[f"S3, ours, {latency} ms"]["median_s"] for latency in (320, 20))
    report.speedup("S3, against zarr", "S3, ours, 20 ms", "S3, zarr, 20 ms", 20)
    report.ratio("S3, round trips", (slow - fast) / (LONGER_S - LATENCY_S), 4, at_most=True)


def main() -> None:
    if sys.argv[1:2] == ["--proxy"]:
        asyncio.run(Distance(sys.argv[2]).serve())
        return
    args = arguments(__doc__)
    report = Report("misses", "how fast do windows come that miss the cache?", args.small)
    n, rounds = (1, 1) if args.small else (3, 7)
    with scratch() as directory:
        uniform_windows(report, directory / "store", 20_000 if args.small else 1_500_000, n, rounds)
    with scratch() as directory:
        transitions(report, directory, state_experience(20 if args.small else 2000), 64, n, rounds)
    with scratch() as directory:
        transitions(report, directory, pixel_experience(8 if args.small else 200), 2, n, rounds)
    if find_spec("moto") and find_spec("s3fs"):
        far_windows(report, *((10_000, 8, 1) if args.small else (400_000, BATCH, 3)))
    else:
        report.notes.append("moto or s3fs is not installed: the S3 cases are skipped")
    if find_spec("tensorstore"):
        report.notes.append(f"tensorstore {importlib.metadata.version('tensorstore')}")
    else:
        report.notes.append("tensorstore is not installed: its cases are skipped")
    report.notes.append("caches of a tenth of the column for ours and tensorstore; files in the page cache")
    report.notes.append("round trips: how much longer a batch takes, over how much longer an answer takes")
    report.finish(args.json)


if __name__ == "__main__":
    main()
