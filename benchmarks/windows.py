"""How fast do windows come that are resident? Against a bare gather of the same bytes and TorchRL's slices."""

from __future__ import annotations

import logging
import statistics
import uuid
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import numpy as np
import torch
from _atari import GAMES, stacked
from _harness import Case, Report, arguments, stopwatch

import trajstore
from trajstore.format.spans import SPAN_FLOATS, SPAN_INTS, End, Spans, VisibleSpans
from trajstore.sampling.compiled.selection import compiled_loops
from trajstore.sampling.index.episode_index import EpisodeIndex
from trajstore.sampling.index.snapshot_follower import SnapshotFollower
from trajstore.sampling.rng import CounterRng
from trajstore.sampling.window_starts import WindowStarts

BATCH, LENGTH = 256, 32
WINDOWS = trajstore.Windows(length=LENGTH)
ROWS = trajstore.Windows(length=1)
N_ENVS = N_DRAWN = 4096
EPISODE = 200  # steps that the appended episodes have
Array = np.ndarray[Any, np.dtype[Any]]
Action = Callable[[], object]


@dataclass(frozen=True)
class Data:
    """Columns of all episodes, one after the other, and where each stops."""

    columns: dict[str, Array]
    stops: Array

    @property
    def n_steps(self) -> int:
        return int(self.stops[-1])

    @property
    def row_bytes(self) -> int:
        return sum(column[0].nbytes for column in self.columns.values())

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        return {name: torch.from_numpy(column) for name, column in self.columns.items()}

    def episodes(self) -> Iterator[dict[str, Array]]:
        start = 0
        for stop in self.stops.tolist():
            yield {name: column[start:stop] for name, column in self.columns.items()}
            start = stop


def stops_of(n_steps: int, seed: int = 0) -> Array:
    """Ends of episodes of 200 to 1,800 steps that take up ``n_steps`` together."""
    lengths = np.random.default_rng(seed).integers(200, 1801, n_steps // 200)
    stops = np.cumsum(lengths)
    return np.append(stops[stops < n_steps - 200], n_steps)


def state(n_steps: int) -> Data:
    """64 numbers, 8 actions and a reward, all float32."""
    rng = np.random.default_rng(0)
    columns = {
        "obs": rng.standard_normal((n_steps, 64), np.float32),
        "action": rng.standard_normal((n_steps, 8), np.float32),
        "reward": rng.standard_normal(n_steps, np.float32),
    }
    return Data(columns, stops_of(n_steps))


def narrow(n_steps: int) -> Data:
    """Four numbers a step, so that many steps fit into memory."""
    obs = np.random.default_rng(0).standard_normal((n_steps, 4), np.float32)
    return Data({"obs": obs}, stops_of(n_steps))


def pixels(n_steps: int) -> Data:
    """Real Atari frames, stacked, of four games."""
    obs = np.concatenate([stacked(game, n_steps // 4) for game in GAMES[:4]])
    return Data({"obs": obs}, stops_of(len(obs)))


@contextmanager
def written(data: Data) -> Iterator[tuple[trajstore.Store, trajstore.Writer]]:
    """A store in memory that holds the data, and the writer that wrote it and may go on."""
    name = f"windows-{uuid.uuid4().hex}"
    store = trajstore.create(f"memory://{name}")
    with store.writer(commit_seconds=None) as writer:
        for episode in data.episodes():
            writer.append_episode(episode, terminated=True)
        writer.commit()
        store.refresh()
        yield store, writer
    fsspec.filesystem("memory").rm(f"/{name}", recursive=True)


def resident(store: trajstore.Store, writer: trajstore.Writer | None = None) -> trajstore.Reader:
    """A reader whose cache holds everything: drawn from until nothing is missing any more."""
    reader = trajstore.Reader(store, writer=writer, cache_bytes="6GiB", seed=0)
    misses, quiet = 0, 0
    while quiet < 4:
        for _ in range(16):
            reader.sample(1024, ROWS)
        found = reader.stats()["misses"]
        misses, quiet = found, quiet + 1 if found == misses else 0
    return reader


def peer_buffer(data: Data, spare: int) -> Any:
    """TorchRL's buffer of the same steps, or None where it is not installed.

    Of its forms the fastest: storage in RAM, plain ReplayBuffer, ends given by a flag, index of episodes cached.
    """
    if not find_spec("torchrl"):
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about a C++ extension that storages do not use
        from tensordict import TensorDict
        from torchrl.data import LazyTensorStorage, ReplayBuffer, SliceSampler
    logging.getLogger("torchrl").setLevel(logging.WARNING)
    done = torch.zeros(data.n_steps, 1, dtype=torch.bool)
    done[torch.from_numpy(data.stops - 1)] = True
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(data.n_steps + spare),
        sampler=SliceSampler(slice_len=LENGTH, end_key="done", cache_values=True),
        batch_size=BATCH * LENGTH,
    )
    buffer.extend(TensorDict(data.tensors | {"done": done}, [data.n_steps]))
    return buffer


def peer_adds(buffer: Any) -> Action:
    """Adds one step to TorchRL's buffer; the TensorDicts are made before."""
    step = buffer[0].clone()
    last = step.clone()
    last["done"] = torch.ones_like(last["done"])
    i = 0

    def add() -> None:
        nonlocal i
        i += 1
        buffer.add(step if i % EPISODE else last)

    return add


def bare(data: Data, n: int) -> Action:
    """index_select of as many rows in the same pattern; other rows every time, chosen beforehand."""
    columns, rows = data.tensors, row_patterns(data, n)
    i = 0

    def gather() -> dict[str, torch.Tensor]:
        nonlocal i
        i += 1
        index = rows[i % n]
        return {name: torch.index_select(column, 0, index) for name, column in columns.items()}

    return gather


def bare_out(data: Data, n: int) -> Action:
    """The same into tensors that are there already."""
    columns, rows = data.tensors, row_patterns(data, n)
    outs = {name: column.new_empty((BATCH * LENGTH, *column.shape[1:])) for name, column in columns.items()}
    i = 0

    def gather() -> dict[str, torch.Tensor]:
        nonlocal i
        i += 1
        for name, column in columns.items():
            torch.index_select(column, 0, rows[i % n], out=outs[name])
        return outs

    return gather


def row_patterns(data: Data, n: int) -> list[torch.Tensor]:
    """Rows of ``n`` batches of windows."""
    generator = torch.Generator().manual_seed(0)
    starts = [torch.randint(data.n_steps - LENGTH, (BATCH, 1), generator=generator) for _ in range(n)]
    return [(start + torch.arange(LENGTH)).view(-1) for start in starts]


def reusing(reader: trajstore.Reader) -> Action:
    """Samples into the batch of the call before."""
    batch = reader.sample(BATCH, WINDOWS)

    def sample() -> object:
        nonlocal batch
        batch = reader.sample(BATCH, WINDOWS, out=batch)
        return batch

    return sample


def repeated(action: Action, n: int) -> Callable[[Path], float]:
    """The seconds of ``n`` calls; each result lives until the next is there, as a training loop has it."""

    def run(directory: Path) -> float:
        kept = action()
        with stopwatch() as watch:
            for _ in range(n):
                kept = action()
        del kept
        return watch.seconds

    return run


def after(before: Action, action: Action, n: int) -> Callable[[Path], float]:
    """The seconds of ``n`` calls, not counting that of ``before`` ahead of each."""

    def run(directory: Path) -> float:
        seconds = 0.0
        for _ in range(n):
            before()
            with stopwatch() as watch:
                action()
            seconds += watch.seconds
        return seconds

    return run


def together(*actions: Action) -> Action:
    def run() -> None:
        for action in actions:
            action()

    return run


def case(name: str, isolates: str, action: Action, n: int, n_bytes: int = 0) -> Case:
    return Case(name, isolates, repeated(action, n), n, "batch", n_bytes * n)


@contextmanager
def threads(n: int) -> Iterator[str]:
    """Let torch use so many threads; gives their count in words."""
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield f"{n} thread{'s' * (n > 1)}"
    finally:
        torch.set_num_threads(before)


def thread_counts() -> list[int]:
    return sorted({1, torch.get_num_threads()})


def within(report: Report, name: str, ours: str, bound: str, target: float | None) -> None:
    """How many times the bound ours takes."""
    found = []
    for of in (statistics.median, min):
        a, b = (of(report.cases[key]["seconds"]) / report.cases[key].get("work", 1) for key in (ours, bound))
        found.append(a / b)
    report.ratio(name, found[0], target, at_most=True, fastest=found[1])


def state_windows(report: Report, data: Data, reader: trajstore.Reader, n: int, rounds: int) -> None:
    buffer, n_bytes = peer_buffer(data, 0), data.row_bytes * BATCH * LENGTH
    for count in thread_counts():
        with threads(count) as label:
            ours, gather, theirs = (f"state, {who}, {label}" for who in ("ours", "index_select", "TorchRL"))
            cases = [
                case(ours, "sample, new tensors, masks, index", lambda: reader.sample(BATCH, WINDOWS), n, n_bytes),
                case(gather, "the gather alone, rows chosen before", bare(data, n), n, n_bytes),
            ]
            if buffer is not None:
                cases.append(case(theirs, "SliceSampler, RAM, cached index", buffer.sample, n, n_bytes))
            report.run(cases, rounds)
            report.speedup(f"state, against TorchRL, {label}", ours, theirs, 5)
            within(report, f"state, over index_select, {label}", ours, gather, 1.5)


def stepping(writer: trajstore.Writer, data: Data) -> Action:
    """Appends one step, which the reader that follows the writer shows at once."""
    step = {name: column[0] for name, column in data.columns.items()}
    i = 0

    def append() -> None:
        nonlocal i
        i += 1
        writer.append(step, terminated=i % EPISODE == 0)

    return append


def seeing(reader: trajstore.Reader) -> Action:
    return together(reader.refresh, lambda: reader.sample(BATCH, WINDOWS))


def growing(report: Report, data: Data, store: trajstore.Store, n: int, rounds: int, target: float) -> None:
    """One step appended between batches, and seen at once; behind, steps are committed every second."""
    buffer = peer_buffer(data, 2 * n * rounds * len(thread_counts()))
    with store.writer("live", commit_seconds=1.0, buffer_bytes="64MB") as writer:
        _growing(report, data, resident(store, writer), stepping(writer, data), buffer, n, rounds, target)


def _growing(
    report: Report,
    data: Data,
    reader: trajstore.Reader,
    append: Action,
    buffer: Any,
    n: int,
    rounds: int,
    target: float,
) -> None:
    def see() -> None:
        reader.sample(BATCH, WINDOWS)

    for _ in range(100):  # memory for more steps is there from now on
        together(append, see)()
    for count in thread_counts():
        with threads(count) as label:
            label = f"{data.n_steps:,} steps, {label}"
            ours, theirs = (f"append between, {who}, {label}" for who in ("ours", "TorchRL"))
            cases = [case(ours, "append, sample", together(append, see), n)]
            if buffer is not None:
                theirs_do = together(peer_adds(buffer), buffer.sample)
                cases.append(case(theirs, "add, SliceSampler", theirs_do, n))
            report.run(cases, rounds)
            report.speedup(f"append between, {label}", ours, theirs, target)


def pixel_windows(report: Report, data: Data, reader: trajstore.Reader, n: int, rounds: int) -> None:
    buffer, n_bytes = peer_buffer(data, 0), data.row_bytes * BATCH * LENGTH
    for count in thread_counts():
        with threads(count) as label:
            into, fresh, gather, theirs = (
                f"pixels, {who}, {label}" for who in ("ours, out=", "ours", "index_select, out=", "TorchRL")
            )
            cases = [
                case(into, "sample into the batch before", reusing(reader), n, n_bytes),
                case(fresh, "sample, new tensors", lambda: reader.sample(BATCH, WINDOWS), n, n_bytes),
                case(gather, "the gather alone, rows chosen before", bare_out(data, n), n, n_bytes),
            ]
            if buffer is not None:
                cases.append(case(theirs, "SliceSampler, RAM, cached index", buffer.sample, n, n_bytes))
            report.run(cases, rounds)
            report.speedup(f"pixels, out=, against TorchRL, {label}", into, theirs, 10)
            report.speedup(f"pixels, against TorchRL, {label}", fresh, theirs, 1.5)
            within(report, f"pixels, out=, over index_select(out=), {label}", into, gather, 1.2)


def index_of(n_episodes: int, n_steps: int) -> EpisodeIndex:
    """The episode index of a store that nobody wrote: one span an episode, all in one stream.

    A billion steps can't be stored for this, so the index is shown spans without them.
    """
    lengths = np.random.default_rng(0).integers(n_steps // 2, 3 * n_steps // 2, n_episodes)
    stops = np.cumsum(lengths)
    values = {"episode": np.arange(n_episodes), "row_start": stops - lengths, "row_stop": stops}
    values["end"] = np.full(n_episodes, End.TERMINATED)
    ints = np.zeros((n_episodes, len(SPAN_INTS)), np.int64)
    for name, column in values.items():
        ints[:, SPAN_INTS.index(name)] = column
    spans = Spans(ints, np.zeros((n_episodes, len(SPAN_FLOATS))))
    part = VisibleSpans(0, 0, spans, (SPAN_INTS, SPAN_FLOATS), first_row=0, is_finished=True)
    index = EpisodeIndex(torch.device("cpu"))
    SnapshotFollower(index).follow(
        SimpleNamespace(names=("none",), streams=(SimpleNamespace(id="none", rank=None),), parts=lambda: [part])
    )
    return index


def draws(report: Report, sizes: tuple[int, int], n: int, rounds: int) -> None:
    cases = []
    for n_episodes in sizes:
        index, label = index_of(n_episodes, 1000), f"{n_episodes:,} episodes of 1,000 steps"
        starts = WindowStarts(index, WINDOWS, False, kernels=compiled_loops(index.device, compiled=True))
        starts.update()
        draw = partial(starts.draw, N_DRAWN, CounterRng(0))
        cases.append(case(f"draw, {label}", f"{N_DRAWN:,} windows drawn, nothing read", draw, n))
        spans = index.span_nbytes
        each = {"bytes_an_episode": (index.nbytes - spans) / n_episodes, "bytes_a_span": spans / n_episodes}
        report.fact(f"index, {label}", "one span each", index_mb=index.nbytes / 1e6, **each)
    report.run(cases, rounds)
    with_few, with_many = (c.name for c in cases)
    within(report, f"draw, {sizes[1]:,} episodes over {sizes[0]:,}", with_many, with_few, 5)


def environments(report: Report, n_envs: int, n_spans: int, n: int, rounds: int) -> None:
    """Batches from a store with that many episodes open, of several spans each."""
    rng = np.random.default_rng(0)
    block = {"obs": rng.standard_normal((LENGTH, n_envs, 8), np.float32), "reward": np.ones((LENGTH, n_envs), "f4")}
    label = f"{n_envs:,} open environments, {n_spans} span{'s' * (n_spans > 1)} each"
    name = f"windows-{uuid.uuid4().hex}"
    store = trajstore.create(f"memory://{name}")
    with store.writer(commit_seconds=None, buffer_bytes="1GiB") as writer:
        for _ in range(n_spans):
            writer.append_rollout(block)
            writer.commit()
        store.refresh()
        reader = resident(store)
        report.run([case(f"{label}: sample", "every window in open episodes",
                         lambda: reader.sample(BATCH, WINDOWS), n)], rounds)  # fmt: skip
        stats = reader.stats()
        index_bytes, spans = stats["index_bytes"], stats["span_bytes"]
        each = {"bytes_an_episode": (index_bytes - spans) / n_envs, "bytes_a_span": spans / n_envs / n_spans}
        report.fact(f"{label}: index", "of open episodes", index_mb=index_bytes / 1e6, **each)
        step = {key: column[0] for key, column in block.items()}
        append = together(lambda: writer.append(step, envs=range(n_envs)), writer.commit)
        run = after(append, seeing(reader), 3)
        report.run(
            [Case(f"{label}: a step seen", "refresh and sample, without the commit", run, 3, "batch")], rounds
        )
    fsspec.filesystem("memory").rm(f"/{name}", recursive=True)


def main() -> None:
    args = arguments(__doc__)
    report = Report("windows", "how fast do resident windows come?", args.small)
    n, rounds = (2, 1) if args.small else (50, 7)
    n_state, n_narrow, n_frames = (20_000, 40_000, 400) if args.small else (1_000_000, 50_000_000, 20_000)
    data = state(n_state)
    with written(data) as (store, _):
        reader = resident(store)
        state_windows(report, data, reader, n, rounds)
        growing(report, data, store, min(n, 20), rounds, 10)
    data = pixels(n_frames)
    with written(data) as (store, _):
        pixel_windows(report, data, resident(store), 1 if args.small else 3, rounds)
    data = narrow(n_narrow)
    with written(data) as (store, _):
        growing(report, data, store, min(n, 5), min(rounds, 3), 50)
    with threads(1):
        draws(report, (10, 1000) if args.small else (1000, 1_000_000), n, rounds)
        for n_spans in (1, 4):
            environments(report, 64 if args.small else N_ENVS, n_spans, n, rounds)
    report.notes.append("state and narrow rows are random numbers, frames are real; stores in memory, all resident")
    report.notes.append("an appended step is seen at once; commits, every second, are to memory")
    report.notes.append("draws and open environments: 1 thread")
    if not find_spec("torchrl"):
        report.notes.append("torchrl is not installed: its cases are skipped")
    report.finish(args.json)


if __name__ == "__main__":
    main()
