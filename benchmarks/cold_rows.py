"""How fast are rows read that no cache holds? Random transitions of a store with a cache of one percent.

Against TorchRL's memory-mapped storage: with all files in the page cache of the system, and, where a control group
can limit the memory of a process, with memory for the process (700 MB) and a third of our data.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import _peers as peers
import numpy as np
import torch
from _atari import frames
from _comparison import Run, Target, summary
from _harness import Report, arguments, forget_pages, scratch, tree_bytes
from _peers import OURS, TORCHRL, Actions
from rich.console import Console

from trajstore import ReplayBuffer, Windows

BATCH = 256
MEMMAP = "TorchRL memmap"
TRANSITIONS = Windows.transitions()
CACHE_SHARE = 100  # the cache holds one part in so many
GROUPS = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
BASE_BYTES = 700 << 20  # that a process takes with all packages imported
MAX_S, MAX_CHILD_S = 20, 150  # for the batches of a process with little memory, and for all of it


def state_columns(n_steps: int) -> dict[str, Any]:
    return peers.steps_of(n_steps).transitions


def frame_columns(n_steps: int) -> dict[str, Any]:
    """Real frames of one Atari game, in episodes of 1,000 steps; repeated if there are many."""
    n_played = min(n_steps, 20_000)
    played = frames("Breakout", n_played + 1)
    rows = np.arange(n_steps) % n_played
    done = np.zeros(n_steps, bool)
    done[999::1000] = done[-1] = True
    columns = {"observation": played[rows], "next": played[rows + 1], "done": done}
    return columns | {"action": (rows % 4).astype(np.int64), "reward": np.zeros(n_steps, np.float32)}


def write_ours(path: Path, columns: dict[str, Any]) -> None:
    """Store the transitions as episodes, each observation once."""
    stops = np.flatnonzero(columns["done"]) + 1
    with ReplayBuffer(path, exist="fail") as buffer:
        for start, stop in zip(np.append(0, stops[:-1]).tolist(), stops.tolist(), strict=True):
            final = columns["next"][stop - 1 : stop]
            episode = {"observation": np.concatenate([columns["observation"][start:stop], final])}
            episode |= {key: columns[key][start:stop] for key in ("action", "reward")}
            buffer.add_episode(episode, terminated=True)


@contextmanager
def opened(path: Path, n_bytes: int) -> Iterator[ReplayBuffer]:
    with ReplayBuffer(path, exist="join", cache_bytes=max(n_bytes // CACHE_SHARE, 1 << 18)) as buffer:
        yield buffer


def settle(buffer: ReplayBuffer, at_most: int = 4000) -> int:
    """Draw until nothing is read for the first time any longer; returns the number of batches."""
    read = -1
    for n in range(0, at_most, 100):
        for _ in range(100):
            buffer.sample(BATCH, TRANSITIONS)
        before, read = read, buffer.reader.stats()["bytes_read"]
        if read == before:
            return n
    return at_most


def fact(run: Run, name: str, value: float) -> None:
    what, _, isolates = name.partition(": ")
    run.report.fact(name, what, **{isolates.replace(" ", "_"): round(value, 3)})


def warm(run: Run, name: str, columns: dict[str, Any], target: float | None) -> None:
    """Files in the page cache, cache of one percent: the steady state, and the first batches of a new buffer."""
    n_bytes = sum(column.nbytes for key, column in columns.items() if key not in ("next", "done"))
    with scratch() as directory:
        write_ours(directory / "store", columns)
        stored = tree_bytes(directory / "store")
        actions: Actions = {}
        if run.has(TORCHRL):
            storage = peers.torchrl_storage(columns, directory / "memmap")
            actions[MEMMAP] = partial(peers.torchrl_forms(storage)[TORCHRL].sample, BATCH)
            fact(run, f"{name}: bytes of the memmap over ours", tree_bytes(directory / "memmap") / stored)
        n_objects = sum(len(names) for _, _, names in os.walk(directory / "store"))
        fact(run, f"{name}: objects for each GB", n_objects / (n_bytes / 1e9))
        with opened(directory / "store", n_bytes) as buffer:
            start = time.perf_counter()
            for _ in range(20):
                buffer.sample(BATCH, TRANSITIONS)
            fact(run, f"{name}: ms a batch of the first 20", (time.perf_counter() - start) / 20 * 1e3)
            fact(run, f"{name}: batches until every chunk was checked", settle(buffer))
            ours = {OURS: partial(buffer.sample, BATCH, TRANSITIONS)}
            run.compare(f"{BATCH} {name}, warm", ours | actions, [Target(MEMMAP, target, at_most=True)])


# ---- more data than memory


def memory_group(n_bytes: int) -> Path | None:
    """A new control group whose processes get so much memory, page cache included; None if there is no right to."""
    for root in GROUPS:
        group = root / f"trajstore-bench-{os.getpid()}"
        limit = "memory.limit_in_bytes" if root.name == "memory" else "memory.max"
        try:
            group.mkdir()
            (group / limit).write_text(str(n_bytes))
        except OSError:
            if group.exists():
                group.rmdir()
        else:
            return group
    return None


def limited(run: Run, n_steps: int) -> None:
    """A process that may use a third of the data's bytes as memory, for each of the two."""
    with scratch() as directory:
        columns = state_columns(n_steps)
        write_ours(directory / "store", columns)
        if run.has(TORCHRL):
            peers.as_tensordict(columns).memmap(directory / "memmap")
        n_bytes = tree_bytes(directory / "store")
        del columns
        gc.collect()
        group = memory_group(BASE_BYTES + n_bytes // 3)
        if group is None:
            run.report.notes.append("no control group could be made: reads with little memory were not measured")
            return
        try:
            forget_pages(directory)  # what the group reads then counts as its memory
            for who in (OURS, MEMMAP) if run.has(TORCHRL) else (OURS,):
                found = in_group(group, who, directory)
                if found is None:
                    run.report.notes.append(
                        f"with little memory, {who} took more than {MAX_CHILD_S} s: not measured"
                    )
                    continue
                fact(run, f"{BATCH} transitions, memory for a third of our bytes, {who}: batches", found["n"])
                fact(run, f"{BATCH} transitions, memory for a third of our bytes, {who}: ms", found["ms"])
                fact(run, f"{BATCH} transitions, memory for a third of our bytes, {who}: MB read", found["mb"])
        finally:
            remove(group)


def remove(group: Path) -> None:
    """Remove a control group; for a moment after its last process ended, it is still in use."""
    for _ in range(100):
        try:
            group.rmdir()
        except OSError:
            time.sleep(0.1)
        else:
            return


def in_group(group: Path, who: str, directory: Path) -> dict[str, float] | None:
    """What a process in the group measures; None if it does not end, as on a busy machine."""
    command = [sys.executable, __file__, "--child", who, str(directory), str(group)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=MAX_CHILD_S)
    except subprocess.TimeoutExpired:
        return None
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def read_mb() -> float:
    """What this process had read from the disk, page faults included."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes")) / 1e6


def child(who: str, directory: Path, group: Path, n_batches: int = 20) -> None:
    """Draw batches with little memory, and print how long one took."""
    (group / "cgroup.procs").write_text(str(os.getpid()))
    torch.set_num_threads(1)
    if who == OURS:
        buffer = ReplayBuffer(directory / "store", exist="join", cache_bytes=32 << 20)
        draw = partial(buffer.sample, BATCH, TRANSITIONS)
    else:
        from tensordict import TensorDict
        from torchrl.data import LazyMemmapStorage, TensorDictReplayBuffer

        data = TensorDict.load_memmap(directory / "memmap")
        storage = LazyMemmapStorage(len(data))
        storage._storage, storage._len, storage.initialized = data, len(data), True
        draw = partial(TensorDictReplayBuffer(storage=storage).sample, BATCH)
    timed(draw, n_batches)  # until the memory is full
    before = read_mb()
    times = timed(draw, n_batches)
    found = {"ms": float(np.median(times)) * 1e3, "mb": (read_mb() - before) / len(times), "n": len(times)}
    print(json.dumps(found))


def timed(draw: Callable[[], object], n_batches: int) -> list[float]:
    """Seconds of each batch; fewer of them if they take long."""
    times: list[float] = []
    while len(times) < n_batches and sum(times) < MAX_S:
        start = time.perf_counter()
        draw()
        times.append(time.perf_counter() - start)
    return times


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, help="of state; a million unless given, 0 for none")
    parser.add_argument("--frames", type=int, help="of 84x84 bytes; 100,000 unless given, 0 for none")
    parser.add_argument("--limited-steps", type=int, help="of state, with little memory; 4 million, 0 for none")
    parser.add_argument("--rounds", type=int, help="that every case runs for; 7 unless given")


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        who, directory, group = sys.argv[2:]
        child(who, Path(directory), Path(group))
        return
    args = arguments(__doc__, add_options)
    sizes = (4_000, 600, 4_000) if args.small else (1_000_000, 100_000, 4_000_000)
    given = (args.steps, args.frames, args.limited_steps)
    n_state, n_frames, n_limited = (n if n is not None else size for n, size in zip(given, sizes, strict=True))
    report = Report("cold_rows", str(__doc__), args.small)
    rounds = args.rounds or (1 if args.small else 7)
    run = Run(report, n_state, rounds, (1,), turn_s=0.0 if args.small else 0.05)
    if n_state:
        warm(run, "state transitions", state_columns(n_state), 2.0)
    if n_frames:
        warm(run, "frame transitions", frame_columns(n_frames), 1.0)
    if n_limited and not args.small:
        limited(run, n_limited)
    report.notes.append(
        f"a cache of one part in {CACHE_SHARE}; frames are Breakout's, at most 20,000 different ones"
    )
    report.finish(args.json)
    Console(width=None if sys.stdout.isatty() else 150).print(summary(run, "ms a batch, medians", "per_unit_us"))


if __name__ == "__main__":
    main()
