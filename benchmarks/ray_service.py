"""What does the Ray service cost? Pixel batches of actors, beside those of this process and TorchRL's service."""

from __future__ import annotations

import logging
import os
import uuid
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from _harness import Case, Report, arguments, scratch, stopwatch
from windows import Data, pixels, repeated

from trajstore import ReplayBuffer, Ring, Windows

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
import ray

from trajstore.ray import RayReplayBuffer

CHUNK = 256  # steps that are sent to TorchRL's buffer at a time
PREFETCH = 2
KINDS = {
    "256 transitions": (256, Windows.transitions(fields=("obs",), next_fields=("obs",))),
    "64 windows of 32": (64, Windows(length=32, fields=("obs",))),
}


@contextmanager
def cluster(small: bool) -> Iterator[None]:
    ray.init(
        num_cpus=8,
        include_dashboard=False,
        object_store_memory=(300 if small else 1500) << 20,
        log_to_driver=False,
        logging_level="error",
        _node_ip_address="127.0.0.2",
    )
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def in_process(data: Data) -> Iterator[ReplayBuffer]:
    with ReplayBuffer(f"memory://ray-{uuid.uuid4().hex}", cache_bytes="2GiB", commit_seconds=1.0) as buffer:
        for episode in data.episodes():
            buffer.add_episode(episode, terminated=True)
        buffer.flush()
        yield buffer


@contextmanager
def service(data: Data, n_actors: int) -> Iterator[RayReplayBuffer]:
    """Episodes go to the actors in turn."""
    with (
        scratch() as directory,
        RayReplayBuffer.start(
            directory / "store", n_actors=n_actors, cache_bytes="2GiB", fsync=False, schema=None
        ) as buffer,
    ):
        with ExitStack() as stack:
            writers = [stack.enter_context(buffer.writer(actor=rank)) for rank in range(n_actors)]
            for i, episode in enumerate(data.episodes()):
                writers[i % n_actors].add_episode(episode, terminated=True)
        yield buffer


@contextmanager
def peer(data: Data, size: int, windows: Windows, prefetch: int | None) -> Iterator[Any]:
    """TorchRL's service with the same steps, in RAM; next observations stand beside them, as it has it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about a C++ extension that storages do not use
        from tensordict import TensorDict
        from torchrl.data import LazyTensorStorage, RayReplayBuffer, SliceSampler
    logging.getLogger("torchrl").setLevel(logging.WARNING)
    options: dict[str, Any] = {"batch_size": size * windows.length, "prefetch": prefetch}
    if windows.length > 1:
        options["sampler"] = partial(SliceSampler, slice_len=windows.length, end_key="done", cache_values=True)
    buffer = RayReplayBuffer(
        storage=partial(LazyTensorStorage, data.n_steps),
        remote_config={"num_cpus": 1},
        ray_init_config={},
        **options,
    )
    try:
        obs = data.tensors["obs"]
        done = torch.zeros(data.n_steps, 1, dtype=torch.bool)
        done[torch.from_numpy(data.stops - 1)] = True
        for start in range(0, data.n_steps, CHUNK):
            rows = {"obs": obs[start : start + CHUNK], "done": done[start : start + CHUNK]}
            if windows.length == 1:
                following = torch.cat([obs[start + 1 : start + CHUNK + 1], obs[:1]])[: len(rows["obs"])]
                rows["next"] = TensorDict({"obs": following}, [len(following)])
            buffer.extend(TensorDict(rows, [len(rows["obs"])]))
        yield buffer
    finally:
        buffer.close()


def iterating(make: Callable[[], Any], n: int) -> Callable[[Path], float]:
    """The seconds of ``n`` batches of an iterator that is already running."""

    def run(directory: Path) -> float:
        iterator = make()
        for _ in range(2 * PREFETCH + 2):
            kept = next(iterator)
        with stopwatch() as watch:
            for _ in range(n):
                kept = next(iterator)
        del kept
        iterator.close()
        return watch.seconds

    return run


def compare(report: Report, data: Data, kind: str, n: int, n_peer: int, rounds: int) -> None:
    size, windows = KINDS[kind]
    n_bytes = data.row_bytes * size * max(windows.length, 2)
    name = f"{kind}, {{}}".format
    with ExitStack() as stack:
        here = stack.enter_context(in_process(data))
        ring = Ring(2)
        cases = [
            Case(name("in process"), "ReplayBuffer.sample", repeated(lambda: here.sample(size, windows), n)),
            Case(
                name("in process, out="),
                "the same, into memory that is used again",
                repeated(lambda: here.sample(size, windows, out=ring), n),
            ),
        ]
        actions = [lambda: here.sample(size, windows)]
        for n_actors in (1, 2):
            buffer = stack.enter_context(service(data, n_actors))
            who = f"{n_actors} actor{'s' * (n_actors > 1)}"
            sample = partial(buffer.sample, size, windows)
            batches = partial(buffer.batches, size, windows, prefetch=PREFETCH)
            actions.append(sample)
            cases += [
                Case(name(f"{who}, sample"), "RayReplayBuffer.sample", repeated(sample, n)),
                Case(
                    name(f"{who}, batches"), f"RayReplayBuffer.batches, prefetch={PREFETCH}", iterating(batches, n)
                ),
            ]
        if find_spec("torchrl"):
            for prefetch in (None, PREFETCH):
                other = stack.enter_context(peer(data, size, windows, prefetch))
                who = "TorchRL" if prefetch is None else "TorchRL, prefetch"
                cases.append(
                    Case(
                        name(who),
                        f"its RayReplayBuffer.sample, prefetch={prefetch}",
                        repeated(other.sample, n_peer),
                    )
                )
                actions.append(other.sample)
        else:
            report.notes.append("torchrl is not installed: its cases are skipped")
        for action in actions:  # everything is in the caches from here on
            for _ in range(2 + data.n_steps // size // 4):
                action()
        report.run([_of_work(c, n_peer if "TorchRL" in c.name else n, n_bytes) for c in cases], rounds)
    published(report, kind)


def _of_work(case: Case, n: int, n_bytes: int) -> Case:
    return Case(case.name, case.isolates, case.run, n, "batch", n_bytes * n)


def published(report: Report, kind: str) -> None:
    name = f"{kind}, {{}}".format
    for who in ("1 actor", "2 actors"):
        report.speedup(name(f"{who} over in process"), name(f"{who}, batches"), name("in process"), 0.8)
        report.speedup(name(f"{who} over in process, out="), name(f"{who}, batches"), name("in process, out="), 0.8)
        report.speedup(name(f"{who} over TorchRL"), name(f"{who}, sample"), name("TorchRL"), 1.0)
        report.speedup(
            name(f"{who} over TorchRL, prefetch"), name(f"{who}, batches"), name("TorchRL, prefetch"), 1.0
        )


def main() -> None:
    args = arguments(__doc__)
    report = Report("ray_service", str(__doc__), args.small)
    torch.set_num_threads(1)
    n_steps, n, n_peer, rounds = (1_200, 4, 1, 2) if args.small else (8_000, 60, 6, 7)
    data = pixels(n_steps)
    report.notes.append("one thread in this process, one for the numbers of each actor (Ray's default for one CPU)")
    with cluster(args.small):
        for kind in list(KINDS)[: 1 if args.small else None]:  # processes take long to start
            compare(report, data, kind, n, n_peer, rounds)
    report.finish(args.json)


if __name__ == "__main__":
    main()
