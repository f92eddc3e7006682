"""What does the live buffer cost? Over the bare reader, beside TorchRL's, while others append, at a checkpoint."""

from __future__ import annotations

import statistics
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _harness import Case, Report, arguments, scratch, stopwatch
from windows import (
    BATCH,
    EPISODE,
    WINDOWS,
    Action,
    Data,
    case,
    narrow,
    peer_buffer,
    repeated,
    state,
    together,
    within,
)

from trajstore import Priorities, ReplayBuffer, Windows

N_ENVS = 16
ROWS = Windows()


@contextmanager
def filled(data: Data, **options: Any) -> Iterator[ReplayBuffer]:
    """A buffer in memory that holds the data, with everything in its cache."""
    url = f"memory://replay-{uuid.uuid4().hex}"
    with ReplayBuffer(url, sample=WINDOWS, cache_bytes="6GiB", commit_seconds=1.0, **options) as buffer:
        for episode in data.episodes():
            buffer.add_episode(episode, terminated=True)
        buffer.flush()
        misses, quiet = 0, 0
        while quiet < 4:
            for _ in range(16):
                buffer.sample(1024, ROWS, prioritised=False)
            found = buffer.reader.stats()["misses"]
            misses, quiet = found, quiet + 1 if found == misses else 0
        yield buffer


def steps_of(data: Data) -> dict[str, Any]:
    return {name: column[:N_ENVS] for name, column in data.columns.items()}


def appending(buffer: ReplayBuffer, data: Data) -> Action:
    """Appends one step of 16 environments; an episode has as many steps as those of the peer."""
    step, i = steps_of(data), 0
    ends = {False: np.zeros(N_ENVS, bool), True: np.ones(N_ENVS, bool)}

    def append() -> None:
        nonlocal i
        i += 1
        buffer.append(step, envs=range(N_ENVS), terminated=ends[i % EPISODE == 0])

    return append


def peer_extends(buffer: Any) -> Action:
    """The same for TorchRL; the TensorDicts are made before."""
    steps = buffer[:N_ENVS].clone()
    steps["done"] = torch.zeros_like(steps["done"])
    last = steps.clone()
    last["done"][-1] = True
    i = 0

    def extend() -> None:
        nonlocal i
        i += 1
        buffer.extend(steps if i % EPISODE else last)

    return extend


def overhead(report: Report, buffer: ReplayBuffer, n: int, rounds: int) -> None:
    ours, bare = "sample, buffer, 1 thread", "sample, reader, 1 thread"
    cases = [
        case(ours, "ReplayBuffer.sample", lambda: buffer.sample(BATCH), n),
        case(bare, "Reader.sample of the same reader", lambda: buffer.reader.sample(BATCH, WINDOWS), n),
    ]
    report.run(cases, rounds)
    within(report, "buffer over reader", ours, bare, 1.1)


def interleaved(report: Report, data: Data, buffer: ReplayBuffer, n: int, rounds: int, target: float) -> None:
    append = appending(buffer, data)
    act = together(append, lambda: buffer.sample(BATCH))
    for _ in range(100):  # memory for more steps is there from now on
        act()
    label = f"{data.n_steps:,} steps, 1 thread"
    ours, theirs = (f"append 16, sample, {who}, {label}" for who in ("ours", "TorchRL"))
    cases = [case(ours, "append of 16 environments, sample", act, n)]
    peer = peer_buffer(data, 2 * N_ENVS * n * rounds)
    if peer is not None:
        cases.append(case(theirs, "extend(16), SliceSampler", together(peer_extends(peer), peer.sample), n))
    else:
        report.notes.append("torchrl is not installed: its cases are skipped")
    report.run(cases, rounds)
    report.speedup(f"append 16, sample, {label}", ours, theirs, target)


def prioritised(report: Report, data: Data, n: int, rounds: int) -> None:
    """A whole turn of prioritised replay: no peer has one over windows of steps on disk, so no ratio."""
    with filled(data, priorities=Priorities(), capacity=data.n_steps) as buffer:
        append, error = appending(buffer, data), torch.rand(BATCH)

        def turn() -> None:
            append()
            buffer.update_priorities(buffer.sample(BATCH)["index"], error)

        for _ in range(100):
            turn()
        name = f"append 16, sample, update, evict, ours, {data.n_steps:,} steps, 1 thread"
        report.run([case(name, "full buffer: every append evicts", turn, n)], rounds)


def beside(report: Report, data: Data, buffer: ReplayBuffer, n: int, rounds: int) -> None:
    """Sampling while another thread appends as fast as it can, against sampling alone."""
    alone, both = "sample, alone, 1 thread", "sample, beside a thread that appends flat out"
    counts: list[int] = []
    cases = [
        case(alone, "ReplayBuffer.sample", lambda: buffer.sample(BATCH), n),
        Case(both, "16 environments a call, no pause", _with_appender(buffer, data, n, counts), n, "batch"),
    ]
    report.run(cases, rounds)
    within(report, "sampling beside appending", both, alone, 1.5)
    report.fact("appended beside sampling", "steps a second", steps_per_s=statistics.median(counts))


def _with_appender(buffer: ReplayBuffer, data: Data, n: int, counts: list[int]) -> Callable[[Path], float]:
    def run(directory: Path) -> float:
        append, is_over, n_calls = appending(buffer, data), threading.Event(), 0

        def work() -> None:
            nonlocal n_calls
            while not is_over.is_set():
                append()
                n_calls += 1

        thread = threading.Thread(target=work)
        thread.start()
        try:
            seconds = repeated(lambda: buffer.sample(BATCH), n)(directory)
        finally:
            is_over.set()
            thread.join()
        counts.append(int(n_calls * N_ENVS / seconds))
        return seconds

    return run


def checkpoints(report: Report, n_bytes: int, rounds: int) -> None:
    """The cut of a large buffer on disk: how long training waits, and how long until it is durable."""
    frames = np.random.default_rng(0).integers(0, 255, (64, 84, 84, 4), np.uint8)
    frames[:, 20:] = 0  # so that writing ten gigabytes does not take all day
    n_steps = n_bytes // frames[0].nbytes
    with scratch() as directory:
        options = {"cache_bytes": "2GiB", "buffer_bytes": "256MiB", "priorities": Priorities(), "fsync": False}
        with ReplayBuffer(directory / "store", **options) as buffer:
            for _ in range(n_steps // 640):
                episode = {"obs": np.tile(frames, (10, 1, 1, 1)), "reward": np.zeros(640, np.float32)}
                buffer.add_episode(episode, terminated=True)
            buffer.flush()
            buffer.sample(BATCH, Windows(fields=["reward"]))
            cuts, wholes = [], []
            for i in range(rounds):
                buffer.add_episode({"obs": frames, "reward": np.zeros(64, np.float32)}, terminated=True)
                with stopwatch() as watch:
                    buffer.save_checkpoint(f"cut-{i}")
                    cuts.append(time.perf_counter())
                cuts[-1] = watch.seconds
                start = time.perf_counter()
                buffer.flush()
                wholes.append(watch.seconds + time.perf_counter() - start)
            stored = sum(
                path.stat().st_size for path in (directory / "store" / "checkpoints").rglob("*") if path.is_file()
            )
    report.fact(
        f"checkpoint of {n_steps:,} steps",
        "training waits for the cut; the rest happens behind",
        decoded_gb=n_bytes / 1e9,
        cut_ms=statistics.median(cuts) * 1e3,
        durable_ms=statistics.median(wholes) * 1e3,
        stored_kb=stored / rounds / 1e3,
    )
    report.ratio(
        "cut of a checkpoint, ms", statistics.median(cuts) * 1e3, 100, at_most=True, fastest=min(cuts) * 1e3
    )


def main() -> None:
    args = arguments(__doc__)
    report = Report("replay", str(__doc__), args.small)
    torch.set_num_threads(1)
    n_steps, n, rounds = (20_000, 10, 3) if args.small else (1_000_000, 200, 9)
    data = state(n_steps)
    with filled(data) as buffer:
        overhead(report, buffer, n, rounds)
        interleaved(report, data, buffer, n, rounds, 10)
        beside(report, data, buffer, n, rounds)
    prioritised(report, data, n, rounds)
    if not args.small:
        many = narrow(50_000_000)
        with filled(many) as buffer:
            interleaved(report, many, buffer, 20, 5, 50)
    checkpoints(report, 1 << 26 if args.small else 10_000_000_000, 3 if args.small else 5)
    report.finish(args.json)


if __name__ == "__main__":
    main()
