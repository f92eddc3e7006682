"""What do draws by priority and updates of priorities cost, beside other sum trees and in a very large one?"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _harness import Case, Report, arguments, scratch, stopwatch

import trajstore
from trajstore.sampling.priorities.sum_tree import SumTree
from trajstore.sampling.rng import CounterRng

BATCH = 256
BETA = 0.4
CPU = torch.device("cpu")
Step = Callable[[int], Any]  # draw a batch, then change the priorities of what was drawn; gets the count of steps
THREADS = torch.get_num_threads()  # torch's default


def mass(n: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(1, 1 << 20, (n,), generator=torch.Generator().manual_seed(seed))


def ours(n: int, **options: Any) -> Step:
    tree, rng, new = SumTree(CPU, **options), CounterRng(1), [mass(BATCH, seed) for seed in range(16)]
    tree.rebuild(mass(n))

    def step(i: int) -> None:
        leaf, _ = tree.draw(BATCH, rng)
        tree.put(leaf, new[i % 16])

    return step


def store_of(n: int, path: str) -> trajstore.Store:
    """Episodes of a thousand steps of one byte: the least that is gathered."""
    store = trajstore.create(path, trajstore.Schema({"byte": trajstore.Field("uint8")}))
    with store.writer(buffer_bytes="256MB") as writer:
        for _ in range(n // 1000):
            writer.append_episode({"byte": np.zeros(1000, np.uint8)}, terminated=True)
    store.refresh()
    return store


def whole(n: int) -> Step:
    """All that a trainer calls: windows drawn and read, weights, and updates by handle."""
    reader = trajstore.Reader(store_of(n, f"memory://priorities-{n}"), priorities=trajstore.Priorities())
    new, windows = [torch.rand(BATCH) for _ in range(16)], trajstore.Windows()

    def step(i: int) -> None:
        batch = reader.sample(BATCH, windows)
        reader.update_priorities(batch["index"], new[i % 16])

    return step


def saving(report: Report, n: int) -> None:
    """How long all priorities take to the disk and back, and a batch of them to the disk."""
    with scratch() as path:
        store = store_of(n, str(path / "store"))
        reader, windows = trajstore.Reader(store, priorities=trajstore.Priorities()), trajstore.Windows()
        index = reader.sample(BATCH, windows)["index"]
        with store.writer("learner", commit_seconds=None) as writer:
            with stopwatch() as save:
                reader.save_priorities(writer)
                writer.commit()
            reader.update_priorities(index, torch.rand(len(index)))
            with stopwatch() as again:
                reader.save_priorities(writer)
                writer.commit()
        with stopwatch() as load:
            store.refresh().column("priority")
    figures = {"save_s": save.seconds, "load_s": load.seconds, "save_a_batch_s": again.seconds}
    report.fact(f"{n:,} priorities", "fsynced", **figures)
    report.ratio("save and load, seconds", save.seconds + load.seconds, 0.5, at_most=True)


def ours_weighted(n: int) -> Step:
    """As the peers do: weights for importance sampling too, relative to the largest."""
    tree, rng, new = SumTree(CPU, with_min=True), CounterRng(1), [mass(BATCH, seed) for seed in range(16)]
    tree.rebuild(mass(n))

    def step(i: int) -> torch.Tensor:
        leaf, drawn = tree.draw(BATCH, rng)
        tree.put(leaf, new[i % 16])
        return (drawn / tree.smallest) ** -BETA

    return step


def cpprb(n: int) -> Step:
    """One byte a transition: the least that ``sample`` gathers."""
    from cpprb import PrioritizedReplayBuffer

    buffer = PrioritizedReplayBuffer(n, {"byte": {"dtype": np.uint8}}, alpha=1.0)
    priorities, new = (
        mass(n).numpy().astype(np.float32),
        [mass(BATCH, s).numpy().astype(np.float32) for s in range(16)],
    )
    for i in range(0, n, 10_000):
        part = priorities[i : i + 10_000]
        buffer.add(byte=np.zeros(len(part), np.uint8), priorities=part)

    def step(i: int) -> None:
        batch = buffer.sample(BATCH, beta=BETA)
        buffer.update_priorities(batch["indexes"], new[i % 16])

    return step


def torchrl(n: int) -> Step:
    from torchrl._torchrl import SumSegmentTreeFp32  # noqa: F401  (where it can't be loaded, the sampler can't draw)
    from torchrl.data import LazyTensorStorage
    from torchrl.data.replay_buffers.samplers import PrioritizedSampler

    storage, sampler = LazyTensorStorage(n), PrioritizedSampler(n, alpha=1.0, beta=BETA)
    storage.set(torch.arange(n), torch.zeros(n, dtype=torch.uint8))
    sampler.update_priority(torch.arange(n), mass(n).float())
    new = [mass(BATCH, seed).float() for seed in range(16)]

    def step(i: int) -> None:
        index, _ = sampler.sample(storage, BATCH)
        sampler.update_priority(index, new[i % 16])

    return step


def case(name: str, isolates: str, step: Step, n_steps: int, n_threads: int = 1) -> Case:
    def run(_: Path) -> float:
        torch.set_num_threads(n_threads)
        for i in range(n_steps // 4):  # bring back to the caches what other cases drove out
            step(i)
        with stopwatch() as watch:
            for i in range(n_steps):
                step(i)
        return watch.seconds

    return Case(name, isolates, run, n_steps, "draw+put")


def our_cases(n: int, large: int, n_steps: int) -> list[Case]:
    compiled = ours(n)
    cases = [
        case(f"compiled, {n:,} leaves", "draw 256 and put 256", compiled, n_steps),
        case(f"compiled, {n:,} leaves, weights", "with minima and weights, as peers", ours_weighted(n), n_steps),
        case(f"compiled, {large:,} leaves", "a tree that no cache holds", ours(large), n_steps),
        case(f"reader, {n:,} steps", "sample and update_priorities, everything included", whole(n), n_steps),
    ]
    for n_threads in sorted({1, THREADS}):
        name = f"tensor operations, {n:,} leaves, torch threads {n_threads}"
        cases.append(case(name, "as on a GPU", ours(n, compiled=False), n_steps, n_threads))
    name = f"tensor operations, {large:,} leaves, torch threads 1"
    return [*cases, case(name, "as on a GPU", ours(large, compiled=False), n_steps)]


def peer_cases(report: Report, n: int, n_steps: int) -> list[Case]:
    cases = []
    for name, make, isolates in (
        ("cpprb", cpprb, "sample 256 and update_priorities"),
        ("TorchRL", torchrl, "sampler's sample 256 and update_priority"),
    ):
        try:
            cases.append(case(f"{name}, {n:,} leaves", isolates, make(n), n_steps))
        except ImportError:
            report.notes.append(f"{name} or its compiled extension can't be imported: its case is skipped")
    return cases


def growth(report: Report, slow: str, fast: str, name: str) -> None:
    """How many times the one takes as long as the other; at most twice is wanted."""
    seconds = {case: report.cases[case]["seconds"] for case in (slow, fast)}
    median, fastest = (of(seconds[slow]) / of(seconds[fast]) for of in (statistics.median, min))
    report.ratio(name, median, 2, at_most=True, fastest=fastest)


def main() -> None:
    args = arguments(__doc__)
    report = Report("priorities", "what do draws by priority and updates of priorities cost?", args.small)
    n, large, n_steps, rounds = (10_000, 100_000, 20, 2) if args.small else (1_000_000, 100_000_000, 200, 15)
    report.run(our_cases(n, large, n_steps) + peer_cases(report, n, n_steps), rounds)
    leaves, many = f"{n:,} leaves", f"{large:,} leaves"
    for peer in ("cpprb", "TorchRL"):
        report.speedup(f"against {peer}", f"compiled, {leaves}", f"{peer}, {leaves}", 1.0)
        report.speedup(f"reader against {peer}", f"reader, {n:,} steps", f"{peer}, {leaves}", 1.0)
        report.speedup(f"against {peer}, weights", f"compiled, {leaves}, weights", f"{peer}, {leaves}", 1.0)
    tensors = "tensor operations, {}, torch threads 1"
    growth(report, tensors.format(leaves), f"compiled, {leaves}", "tensor operations over compiled")
    growth(report, f"compiled, {many}", f"compiled, {leaves}", f"{many} over {n:,}, compiled")
    growth(report, tensors.format(many), tensors.format(leaves), f"{many} over {n:,}, tensor operations")
    saving(report, 10 * n)
    report.notes.append(f"one torch thread except where said; torch's default here is {THREADS}")
    report.notes.append("peers: their sample also computes weights, cpprb's gathers one byte a transition too")
    report.finish(args.json)


if __name__ == "__main__":
    main()
