"""What does it cost to go from M ranks to N, and what do ranks add to a checkpoint?"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import numpy as np
from _harness import Case, Report, arguments, scratch, stopwatch

import trajstore
from trajstore import Field, Priorities, ReplayBuffer, Schema
from trajstore.replay.merged_state import merged_state
from trajstore.replay.session_state import RankShare
from trajstore.storage import Storage, open_storage

T = TypeVar("T")
N_OLD = 8
SCHEMA = Schema({"observation": Field("float32", (4,)), "reward": Field("float32")})
_CALLS = ("get", "get_into", "get_range", "size", "put", "put_many", "list_names", "tree_sizes", "delete")


def on_all(n: int, action: Callable[[int], T]) -> list[T]:
    """Do something on all ranks at once."""
    with ThreadPoolExecutor(n) as threads:
        return list(threads.map(action, range(n)))


def fill(url: str | Path, n_ranks: int, n_episodes: int) -> list[ReplayBuffer]:
    """Buffers of all ranks with so many episodes in all, of one to nine steps, and a checkpoint."""
    options: dict[str, Any] = {
        "priorities": Priorities(),
        "cache_bytes": "256MiB",
        "buffer_bytes": "32MiB",
        "commit_seconds": None,
    }
    ranks: dict[str, Any] = {} if n_ranks == 1 else {"world_size": n_ranks}
    buffers = on_all(
        n_ranks,
        lambda r: ReplayBuffer(
            url,
            schema=SCHEMA,
            fsync=False,
            **options,
            **(ranks | {"rank": r} if ranks else {}),
        ),
    )
    mine, n_envs, n = n_episodes // n_ranks, min(1000, n_episodes // n_ranks), 100
    for rank, buffer in enumerate(buffers):
        generator, done = np.random.default_rng(rank), 0
        while done < mine:
            ends = generator.random((n, n_envs)) < 0.2
            data = {"observation": np.zeros((n, n_envs, 4), np.float32), "reward": np.ones((n, n_envs), np.float32)}
            buffer.extend(data, terminated=ends)
            done += int(ends.sum())
    on_all(n_ranks, lambda r: buffers[r].save_checkpoint("full", wait=True))
    return buffers


def close(buffers: Sequence[ReplayBuffer]) -> None:
    on_all(len(buffers), lambda r: buffers[r].close())


class Counted:
    """Counts calls to the storage, and those that touch steps."""

    def __init__(self) -> None:
        self.calls = dict.fromkeys(_CALLS, 0)
        self.n_steps = 0

    def __enter__(self) -> Counted:
        kind = type(open_storage("memory://none", None))
        local = type(open_storage(Path.cwd(), None))
        self._patches = [
            mock.patch.object(k, name, self._counting(k, name)) for k in {kind, local} for name in _CALLS
        ]
        for patch in self._patches:
            patch.start()
        return self

    def __exit__(self, *_: object) -> None:
        for patch in self._patches:
            patch.stop()

    def _counting(self, kind: type[Storage], name: str) -> Any:
        original = getattr(kind, name)

        def call(storage: Storage, key: Any, *args: Any, **kwargs: Any) -> Any:
            self.calls[name] += 1
            self.n_steps += isinstance(key, str) and "/steps/" in key and not key.endswith("zarr.json")
            return original(storage, key, *args, **kwargs)

        return call


def redistributing(report: Report, url: Path, n_episodes: int, n_new: int, rounds: int) -> None:
    """The plan alone, then one rank that resumes."""
    plans, resumes = [], []
    with Counted() as counted:
        for _ in range(rounds):
            with stopwatch() as watch:
                plan = trajstore.redistribute(url, world_size=n_new)
                plan.report  # noqa: B018
            plans.append(watch.seconds)
    label = f"{n_episodes:,} episodes, {N_OLD} to {n_new} ranks"
    report.add(Case(f"{label}: plan", "who gets what, and the report", lambda _: 0.0), plans)
    counts = [rank["steps"] for rank in plan.report.ranks]
    report.fact(
        f"{label}: storage calls",
        "metadata alone: no object of a step is read or written",
        **{name: n // rounds for name, n in counted.calls.items() if n},
        of_steps=counted.n_steps,
        steps_most=max(counts),
        steps_least=min(counts),
        longest=plan.report.longest,
    )
    for _ in range(rounds):
        with stopwatch() as watch, Counted() as counted:
            storage = open_storage(url, None)
            found = trajstore.open(url).checkpoints[-1]
            merged_state(storage, found, plan, SCHEMA, part=0, share=RankShare(0, n_new))
        resumes.append(watch.seconds)
        assert counted.n_steps == 0
    report.add(Case(f"{label}: state of one rank", "priorities and order of its episodes", lambda _: 0.0), resumes)


def checkpointing(report: Report, n_episodes: int, rounds: int) -> None:
    """A checkpoint of one session, and of two ranks with as much each."""
    for n_ranks in (1, 2):
        buffers = fill(f"memory://ranks-{uuid.uuid4().hex}", n_ranks, n_episodes * n_ranks)
        seconds = []
        for _ in range(rounds):
            with stopwatch() as watch:
                on_all(n_ranks, lambda r: buffers[r].save_checkpoint("again", wait=True))  # noqa: B023
            seconds.append(watch.seconds)
        with Counted() as counted:
            on_all(n_ranks, lambda r: buffers[r].save_checkpoint("again", wait=True))  # noqa: B023
        name = f"checkpoint, {n_ranks} rank{'s' if n_ranks > 1 else ''} of {n_episodes:,} episodes"
        report.add(Case(name, "until it is published, in memory", lambda _: 0.0), seconds)
        puts = counted.calls["put"]
        report.fact(
            f"{name}: storage calls",
            "of all ranks, looks for each other included",
            puts=puts,
            gets=counted.calls["get"],
        )
        close(buffers)


def main() -> None:
    args = arguments(__doc__)
    report = Report("ranks", str(__doc__), args.small)
    n_episodes, n_new, rounds = (4_000, 16, 2) if args.small else (1_000_000, 64, 5)
    with scratch() as directory:
        close(fill(directory / "store", N_OLD, n_episodes))
        redistributing(report, directory / "store", n_episodes, n_new, rounds)
    checkpointing(report, n_episodes // 20, rounds)
    median = report.cases[f"{n_episodes:,} episodes, {N_OLD} to {n_new} ranks: plan"]["median_s"]
    report.ratio("plan, seconds", median, 2, at_most=True)
    report.finish(args.json)


if __name__ == "__main__":
    main()
