"""How many objects is a store of state, before and after packing, and what does packing take?"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
from _harness import Case, Report, arguments, forget_pages, scratch, stopwatch

import trajstore

SCHEMA = trajstore.Schema(
    {
        "observation": trajstore.Field("float32", (64,)),
        "action": trajstore.Field("float32", (8,)),
        "reward": trajstore.Field("float32"),
    }
)
STEP_BYTES = 4 * (64 + 8 + 1)
EPISODE = 1000
N_READ = 1000  # episodes
COMMIT = 20  # episodes between two commits
PACK = """
import json, resource, sys, time, trajstore
start = time.perf_counter()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
report = trajstore.pack(sys.argv[1], wait=True, grace_s=0)
seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps({"seconds": seconds, "before_mb": before / 1024, "peak_mb": after / 1024}))
assert len(report.packed) == 1
"""


def episode(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        path: rng.standard_normal((EPISODE, *spec.shape), np.float32).cumsum(0, dtype=np.float32)
        for path, spec in SCHEMA.fields.items()
    }


def fill(directory: Path, n_bytes: int) -> float:
    """Write steps of that many bytes, in one session; returns the seconds of it."""
    episodes = [episode(seed) for seed in range(COMMIT)]
    with stopwatch() as watch, trajstore.create(directory, SCHEMA).writer(commit_seconds=None) as writer:
        for i in range(max(1, n_bytes // (STEP_BYTES * EPISODE))):
            writer.append_episode(episodes[i % COMMIT], terminated=True)
            if i % COMMIT == COMMIT - 1:
                writer.commit()
    return watch.seconds


def n_objects(directory: Path) -> int:
    return sum(path.is_file() for path in (directory / "streams").rglob("*"))


def total_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in (directory / "streams").rglob("*") if path.is_file())


def packed_in_a_process(directory: Path) -> dict[str, float]:
    run = subprocess.run([sys.executable, "-c", PACK, str(directory)], check=True, capture_output=True)
    found: dict[str, float] = json.loads(run.stdout)
    return found


def read_in_order(directory: Path) -> float:
    """Seconds to read the first episodes in order, from disk."""
    forget_pages(directory)
    store = trajstore.open(directory)
    with stopwatch() as watch:
        for i in range(min(N_READ, len(store))):
            store.read_episode(i)
    return watch.seconds


def main() -> None:
    args = arguments(__doc__)
    report = Report("pack", "what is a store of state before and after packing?", args.small)
    n_bytes = 80_000_000 if args.small else 10_000_000_000
    with scratch() as directory:
        path = directory / "store"
        written = fill(path, n_bytes)
        before, stored = n_objects(path), total_bytes(path)
        unpacked = read_in_order(path)
        made = packed_in_a_process(path)
        after = n_objects(path)
        packed = read_in_order(path)
        n_read = min(N_READ, n_bytes // (STEP_BYTES * EPISODE)) * STEP_BYTES * EPISODE
    label = f"{n_bytes / 1e9:g} GB of state"
    for name, isolates, seconds, size in (
        ("written", "one session, a commit every 20,000 steps", written, n_bytes),
        ("packed", "read, checked, written and synced; the original is removed", made["seconds"], n_bytes),
        ("read in order, cold, not packed", "read_episode of the first 1,000 episodes", unpacked, n_read),
        ("read in order, cold, packed", "read_episode of the first 1,000 episodes", packed, n_read),
    ):
        report.add(Case(f"state, {name}", isolates, lambda _: 0.0, n_bytes=size), [seconds])
    report.fact("state: objects", "files below streams/", before=before, after=after, stored_mb=stored / 1e6)
    report.fact("state: memory of pack", "peak of its process", **{k: made[k] for k in ("before_mb", "peak_mb")})
    report.ratio(f"{label}: objects before", before, None if args.small else 2000, at_most=True)
    report.ratio(f"{label}: objects after", after, None if args.small else 200, at_most=True)
    report.ratio(f"{label}: MB of memory more than at the start", made["peak_mb"] - made["before_mb"] + 1e-9, None)
    report.finish(args.json)


if __name__ == "__main__":
    main()
