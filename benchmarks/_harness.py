"""Timing, interleaving and printing, shared by the benchmarks.

A case gets an empty directory and returns the seconds of its timed part. Cases of one comparison run alternately,
round by round, in rotating order; dirty pages are flushed before every run, so none pays for another's.
"""

from __future__ import annotations

import argparse
import atexit
import gc
import importlib.metadata
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

PACKAGES = (
    "trajstore", "numpy", "zarr", "numcodecs", "numba", "torch", "torchrl", "tensordict", "tensorstore", "s3fs",
    "cpprb", "stable_baselines3", "ray", "gymnasium", "ale-py",
)  # fmt: skip
LARGE_BYTES = 4 << 20


@dataclass(frozen=True)
class Case:
    """One thing to time: ``run`` gets an empty directory and returns seconds; ``work`` units are done in them."""

    name: str
    isolates: str
    run: Callable[[Path], float]
    work: int = 1
    unit: str = ""
    n_bytes: int = 0


@dataclass
class Stopwatch:
    seconds: float = 0.0


@contextmanager
def stopwatch() -> Iterator[Stopwatch]:
    """Time the block; garbage of what came before is collected first, none inside."""
    gc.collect()
    if not gc.get_freeze_count():
        gc.freeze()  # what was imported is not looked at again: it takes longer than most blocks
    gc.disable()
    watch, start = Stopwatch(), time.perf_counter()
    try:
        yield watch
    finally:
        watch.seconds = time.perf_counter() - start
        gc.enable()


@contextmanager
def scratch() -> Iterator[Path]:
    """A directory that goes when the block ends; TMPDIR chooses the disk."""
    path = Path(tempfile.mkdtemp(prefix="trajstore-bench-"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@dataclass
class Report:
    """What a benchmark found: printed as tables, written as JSON."""

    benchmark: str
    question: str
    small: bool
    cases: dict[str, dict[str, Any]] = field(default_factory=dict)
    ratios: dict[str, dict[str, Any]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def run(self, cases: Sequence[Case], rounds: int, *, sync: bool = True) -> None:
        """Run the cases alternately, ``rounds`` times each; ``sync=False`` for cases that do not use the disk."""
        seconds: dict[str, list[float]] = {case.name: [] for case in cases}
        for i in range(rounds):
            for j in range(len(cases)):
                case = cases[(i + j) % len(cases)]
                directory = Path(tempfile.mkdtemp(prefix="trajstore-bench-"))
                atexit.register(shutil.rmtree, directory, ignore_errors=True)
                if sync:
                    os.sync()
                seconds[case.name].append(case.run(directory))
                _remove_large_files(directory)
        for case in cases:
            self.add(case, seconds[case.name])

    def add(self, case: Case, seconds: Sequence[float]) -> None:
        median = statistics.median(seconds)
        entry: dict[str, Any] = {
            "isolates": case.isolates,
            "rounds": len(seconds),
            "seconds": list(seconds),
            "median_s": median,
        }
        if case.unit:
            entry |= {"work": case.work, "unit": case.unit, "per_unit_us": median / case.work * 1e6}
        if case.n_bytes:
            entry["mb_per_s"] = case.n_bytes / median / 1e6
        self.cases[case.name] = entry

    def fact(self, name: str, isolates: str, **values: Any) -> None:
        """A case that measures something other than time."""
        self.cases[name] = {"isolates": isolates, **values}

    def ratio(
        self, name: str, value: float, target: float | None, *, at_most: bool = False, fastest: float | None = None
    ) -> None:
        """A ratio and what it should reach: at least the target, or at most; without one it is only recorded.

        ``fastest`` is the same ratio from the fastest rounds: what is left when nothing else uses the machine.
        """
        met = None if target is None else value <= target if at_most else value >= target
        self.ratios[name] = {
            "value": value, "fastest": fastest, "target": target, "at_most": at_most, "met": met
        }  # fmt: skip

    def speedup(self, name: str, ours: str, peer: str, target: float | None) -> None:
        """How many times faster ours is per unit of work; nothing where the peer did not run."""
        if peer in self.cases:
            median, fastest = (self._cost(peer, of) / self._cost(ours, of) for of in (statistics.median, min))
            self.ratio(name, median, target, fastest=fastest)

    def _cost(self, name: str, of: Callable[[list[float]], float]) -> float:
        case = self.cases[name]
        return of(case["seconds"]) / case.get("work", 1)

    def to_json(self) -> dict[str, Any]:
        return {
            "benchmark": self.benchmark,
            "question": self.question,
            "small": self.small,
            "environment": environment(),
            "cases": self.cases,
            "ratios": self.ratios,
            "notes": self.notes,
        }

    def finish(self, path: Path | None) -> None:
        """Print everything, and write the JSON where asked."""
        console = Console(width=None if sys.stdout.isatty() else 150)
        console.print(f"\n[bold]{self.benchmark}[/]: {self.question}")
        console.print(", ".join(f"{k} {v}" for k, v in environment().items()), style="dim", highlight=False)
        timed = {n: c for n, c in self.cases.items() if "median_s" in c}
        if timed:
            console.print(_timed_table(timed))
        if facts := {n: c for n, c in self.cases.items() if "median_s" not in c}:
            console.print(_fact_table(facts))
        if self.ratios:
            console.print(_ratio_table(self.ratios))
        for note in self.notes:
            console.print(f"note: {note}", highlight=False)
        if path is not None:
            path.write_text(json.dumps(self.to_json(), indent=1) + "\n")


def _remove_large_files(directory: Path) -> None:
    """Free the space, but keep the many small files until the process ends.

    ext4 does not reuse an inode for minutes after its file is deleted and passes over it one by one until then, so
    deleting thousands of files would slow down whoever creates files next.
    """
    for path in directory.rglob("*"):
        if path.is_file() and path.stat().st_size > LARGE_BYTES:
            path.unlink()


def _timed_table(cases: dict[str, dict[str, Any]]) -> Table:
    table = Table(title="median over interleaved rounds")
    for name in ("case", "isolates", "median", "fastest", "slowest", "rounds", "each", "MB/s"):
        table.add_column(name, justify="left" if name in ("case", "isolates") else "right")
    for name, case in cases.items():
        each = f"{case['per_unit_us']:,.2f} µs/{case['unit']}" if "unit" in case else ""
        speed = f"{case['mb_per_s']:,.0f}" if "mb_per_s" in case else ""
        times = [shown_time(s) for s in (case["median_s"], min(case["seconds"]), max(case["seconds"]))]
        table.add_row(name, case["isolates"], *times, str(case["rounds"]), each, speed)
    return table


def _fact_table(cases: dict[str, dict[str, Any]]) -> Table:
    columns = list(dict.fromkeys(key for case in cases.values() for key in case if key != "isolates"))
    table = Table()
    for name in ("case", "isolates", *columns):
        table.add_column(name, justify="left" if name in ("case", "isolates") else "right")
    for name, case in cases.items():
        table.add_row(name, case["isolates"], *(shown(case.get(column)) for column in columns))
    return table


def _ratio_table(ratios: dict[str, dict[str, Any]]) -> Table:
    table, has_cpu = Table(title="ratios"), any("cpu" in ratio for ratio in ratios.values())
    for name in ("ratio", "of medians", "of fastest", *["of CPU time"] * has_cpu, "target", ""):
        table.add_column(name, justify="left" if name == "ratio" else "right")
    for name, ratio in ratios.items():
        target = f"{'at most' if ratio['at_most'] else 'at least'} {shown(ratio['target'])}"
        verdict = "[green]met[/]" if ratio["met"] else "[red]missed[/]"
        if ratio["target"] is None:
            target, verdict = "", "recorded"
        if ratio.get("is_busy"):
            verdict += " while busy"
        cpu = [shown(ratio.get("cpu"))] * has_cpu
        table.add_row(name, shown(ratio["value"]), shown(ratio["fastest"]), *cpu, target, verdict)
    return table


def shown(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def shown_time(seconds: float) -> str:
    return f"{seconds:.3f} s" if seconds >= 1 else f"{seconds * 1e3:.2f} ms"


def waited_s() -> dict[str, float]:
    """Seconds that each thread of this process has waited for a processor, where the system says."""
    waited = {}
    for path in Path("/proc/self/task").glob("*/schedstat"):
        try:
            waited[path.parent.name] = int(path.read_text().split()[1]) / 1e9
        except OSError:  # the thread has ended
            continue
    return waited


def environment() -> dict[str, Any]:
    """Versions, threads and the disk: what a figure depends on."""
    facts: dict[str, Any] = {"python": platform.python_version(), "cpus": os.cpu_count()}
    facts["load"] = round(os.getloadavg()[0], 2)
    if torch := sys.modules.get("torch"):
        facts["torch threads"] = torch.get_num_threads()
    facts["local I/O threads"] = _local_threads()
    facts["filesystem"] = filesystem(Path(tempfile.gettempdir()))
    return facts | {name: version for name in PACKAGES if (version := _version(name))}


def _local_threads() -> int:
    import trajstore.storage

    return trajstore.storage.LocalStorage.n_threads


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def filesystem(path: Path) -> str:
    """Type and mount point of the file system below a path, where the system says."""
    mounts = Path("/proc/mounts")
    if not mounts.exists():
        return platform.system()
    found = [line.split()[1:3] for line in mounts.read_text().splitlines()]
    below = [m for m in found if path.resolve().is_relative_to(m[0])]
    mount, kind = max(below, key=lambda m: len(m[0]))
    return f"{kind} at {mount}"


def forget_pages(directory: Path) -> None:
    """Drop the files' clean pages from the page cache, as far as the system does so when asked."""
    os.sync()
    for path in directory.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def tree_bytes(path: Path) -> int:
    """Bytes of all files below a directory."""
    return sum(f.stat().st_size for f in path.rglob("*") if f.is_file())


def arguments(
    description: str | None, add_options: Callable[[argparse.ArgumentParser], None] | None = None
) -> argparse.Namespace:
    """``--small`` for a run of seconds that shows only that it works, ``--json`` for a file to write."""
    parser = argparse.ArgumentParser(description=description)
    if add_options is not None:
        add_options(parser)
    parser.add_argument("--small", action="store_true", help="a quick run whose figures mean nothing")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    return parser.parse_args()
