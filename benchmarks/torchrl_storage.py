"""What does it cost TorchRL's buffers to have a durable storage? TrajStorage beside theirs, in the same buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from _atari import GAMES, stacked
from _harness import Case, Report, arguments, scratch, stopwatch
from tensordict import TensorDict
from torchrl.data import LazyMemmapStorage, LazyTensorStorage, TensorDictReplayBuffer
from torchrl.data.replay_buffers import RandomSampler, SliceSampler
from windows import case, thread_counts, threads, within

from trajstore.compat.torchrl import TrajStorage

BATCH = 256
EPISODE = 200
OURS, RAM, MEMMAP = "TrajStorage", "LazyTensorStorage", "LazyMemmapStorage"

Buffers = dict[str, TensorDictReplayBuffer]


def state(n: int) -> TensorDict:
    """Transitions of a control task."""
    done = (torch.arange(n) % EPISODE == EPISODE - 1)[:, None]
    return with_ends(
        {"observation": torch.randn(n, 17)}, {"observation": torch.randn(n, 17)}, torch.randn(n, 6), done
    )


def pixels(n: int) -> TensorDict:
    """Transitions of real Atari frames, stacked."""
    frames = torch.cat([torch.from_numpy(stacked(game, n // 4)) for game in GAMES[:4]])
    done = (torch.arange(len(frames)) % EPISODE == EPISODE - 1)[:, None]
    action = torch.zeros(len(frames), dtype=torch.int64)
    return with_ends({"pixels": frames}, {"pixels": frames.roll(-1, 0)}, action, done)


def with_ends(now: dict[str, Any], after: dict[str, Any], action: torch.Tensor, done: torch.Tensor) -> TensorDict:
    n = len(done)
    ends = {"reward": torch.randn(n, 1), "done": done, "terminated": done, "truncated": torch.zeros_like(done)}
    return TensorDict({**now, "action": action, "next": {**after, **ends}}, batch_size=[n])


def make_storage(kind: str, n: int, directory: Path, **options: Any) -> Any:
    if kind == OURS:
        return TrajStorage(directory / "store", n, cache_bytes=options.pop("cache_bytes", "8GiB"), **options)
    return LazyTensorStorage(n) if kind == RAM else LazyMemmapStorage(n, scratch_dir=directory / "memmap")


@contextmanager
def filled(data: TensorDict, sampler: Callable[[], Any], kinds: tuple[str, ...]) -> Iterator[Buffers]:
    """A full buffer with each storage."""
    with ExitStack() as stack:
        buffers = {}
        for kind in kinds:
            storage = make_storage(kind, len(data), stack.enter_context(scratch()))
            if kind == OURS:
                stack.enter_context(storage)
            buffers[kind] = TensorDictReplayBuffer(storage=storage, sampler=sampler(), batch_size=BATCH)
            buffers[kind].extend(data.clone())
        yield buffers


def compared(
    report: Report,
    what: str,
    actions: dict[str, Callable[[], object]],
    n: int,
    rounds: int,
    target: float | None = None,
) -> None:
    """Time an action with every storage, alternately; ours may take so many times what theirs in RAM takes."""
    for count in thread_counts() if target is not None else [1]:
        with threads(count) as label:
            cases = [case(f"{what}, {kind}, {label}", "", action, n) for kind, action in actions.items()]
            report.run(cases, rounds)
            if target is not None:
                ours, theirs = (f"{what}, {kind}, {label}" for kind in (OURS, RAM))
                within(report, f"{what}, over {RAM}, {label}", ours, theirs, target)


def sampling(report: Report, what: str, data: TensorDict, n: int, rounds: int, target: float) -> None:
    with filled(data, RandomSampler, (OURS, RAM, MEMMAP)) as buffers:
        compared(report, f"sample {BATCH}, {what}", {k: rb.sample for k, rb in buffers.items()}, n, rounds, target)


def slices(report: Report, data: TensorDict, n: int, rounds: int) -> None:
    with filled(data, lambda: SliceSampler(slice_len=16, end_key=("next", "done")), (OURS, RAM)) as buffers:
        rows = data[:16].clone()

        def extend_and_sample(buffer: TensorDictReplayBuffer) -> Callable[[], object]:
            def act() -> object:
                buffer.extend(rows)
                return buffer.sample()

            return act

        actions = {kind: extend_and_sample(buffer) for kind, buffer in buffers.items()}
        compared(report, "extend 16, sample 16 slices, state", actions, n, rounds)


def writing(report: Report, data: TensorDict, n: int, rounds: int) -> None:
    rows, row = data[:16].clone(), data[0].clone()
    with filled(data, RandomSampler, (OURS, RAM, MEMMAP)) as buffers:
        extend = {k: lambda rb=rb: rb.extend(rows) for k, rb in buffers.items()}
        compared(report, "extend 16, state", extend, n, rounds)
        add = {k: lambda rb=rb: rb.add(row) for k, rb in buffers.items()}
        compared(report, "add, state", add, n, rounds)


def fill(kind: str, data: TensorDict, **options: Any) -> Callable[[Path], float]:
    def run(directory: Path) -> float:
        rows = data.clone()
        storage = make_storage(kind, len(data), directory, **options)
        buffer = TensorDictReplayBuffer(storage=storage)
        with stopwatch() as watch:
            for part in rows.split(1000):
                buffer.extend(part)
            if kind == OURS:
                storage.flush()
        if kind == OURS:
            storage.close()
        return watch.seconds

    return run


def filling(report: Report, what: str, data: TensorDict, rounds: int) -> None:
    names = [f"first fill, {what}, {kind}" for kind in (OURS, RAM, MEMMAP)]
    work = {"work": len(data), "unit": "row"}
    report.run(
        [
            Case(names[0], "by 1,000 rows; ours on disk and fsynced at the end", fill(OURS, data), **work),
            *(
                Case(name, "", fill(kind, data), **work)
                for name, kind in zip(names[1:], (RAM, MEMMAP), strict=True)
            ),
        ],
        rounds,
    )


def paging(report: Report, data: TensorDict, n: int, rounds: int) -> None:
    """Frames that do not fit the budget: a quarter of them does."""
    with scratch() as directory, threads(1) as label:
        n_bytes = sum(leaf.numel() * leaf.element_size() for leaf in data.values(True, True))
        with make_storage(OURS, len(data), directory, cache_bytes=max(n_bytes // 4, 32_000_000)) as storage:
            buffer = TensorDictReplayBuffer(storage=storage, batch_size=BATCH)
            buffer.extend(data.clone())
            storage.flush()
            name = f"sample {BATCH}, pixels by pages, {label}"
            report.run([case(name, "memory for a quarter of the rows", buffer.sample, n)], rounds)


def main() -> None:
    args = arguments(__doc__)
    report = Report("torchrl_storage", str(__doc__), args.small)
    n_state, n_pixels, n, rounds = (5_000, 1_600, 5, 3) if args.small else (1_000_000, 8_000, 200, 9)
    rows, frames = state(n_state), pixels(n_pixels)
    sampling(report, "state", rows, n, rounds, 1.5)
    sampling(report, "pixels", frames, max(5, n // 10), rounds, 1.0)
    slices(report, rows[: n_state // 10], n, rounds)
    writing(report, rows[: n_state // 10], n, rounds)
    filling(report, "state", rows[: n_state // 10], min(rounds, 5))
    filling(report, "pixels", frames, min(rounds, 5))
    paging(report, frames, max(5, n // 20), rounds)
    report.finish(args.json)


if __name__ == "__main__":
    main()
