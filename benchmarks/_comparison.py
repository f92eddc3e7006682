"""Cases of a loop run alternately with each number of threads, and what came out: ratios, targets, CPU time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import _peers as peers
import torch
from _harness import Case, Report, stopwatch, waited_s
from _peers import CPPRB, ISOLATES, OURS, SB3, TORCHRL, Actions, Steps
from rich.table import Table
from windows import threads, within

BUSY = 0.1  # part of the time that threads wait for a processor, from which on the figures say little


@dataclass(frozen=True)
class Target:
    """How many times faster than a peer, or at most how many times as long; None: only recorded."""

    peer: str
    value: float | None = None
    at_most: bool = False


@dataclass
class Run:
    """What a loop gets: where to report, and how large and how often to run."""

    report: Report
    n_steps: int
    rounds: int
    threads: Sequence[int]
    turn_s: float  # that one round of a case takes, about
    n_envs: int = 2048
    n_drawn: int = 32_768
    lacking: set[str] = field(default_factory=set)
    steps: Steps | None = None
    cpu_s: dict[str, list[float]] = field(default_factory=dict)  # of the thread that calls, by case and round
    waited: float = 0.0  # the largest part of the time, of any loop
    seen: dict[str, dict[str, str]] = field(default_factory=dict)  # case by loop and by who ran it

    def compare(self, loop: str, actions: Actions, targets: Sequence[Target]) -> None:
        """Time what each does for one batch, alternately, with each number of threads."""
        for count in self.threads:
            with threads(count) as label:
                names = {who: f"{loop}, {who}, {label}" for who in actions}
                cases = [self.case(names[who], ISOLATES[who], action) for who, action in actions.items()]
                self.run_cases(cases)
                self.seen[f"{loop}, {label}"] = names
                for target in targets:
                    if target.peer in actions:
                        self._ratio(f"{loop}, {{}} {target.peer}, {label}", names, target)

    def case(self, name: str, isolates: str, action: peers.Action, n_turns: int = 1) -> Case:
        """As many calls a round as take ``turn_s``, or a multiple of it."""
        for _ in range(3):  # the first calls may be slow, and would make a round too short
            action()
        start, n = time.perf_counter(), 0
        while n < 3 or (time.perf_counter() - start < n_turns * self.turn_s and n < 500 * n_turns):
            action()
            n += 1
        return Case(name, isolates, partial(self.timed, name, action, n), n, "batch")

    def timed(self, name: str, action: peers.Action, n: int, directory: Path) -> float:
        """The seconds of ``n`` calls; each result lives until the next is there, as a training loop has it."""
        kept = action()
        with stopwatch() as watch:
            start = time.thread_time()
            for _ in range(n):
                kept = action()
            self.cpu_s.setdefault(name, []).append((time.thread_time() - start) / n)
        del kept
        return watch.seconds

    def run_cases(self, cases: Sequence[Case]) -> None:
        """Run them alternately, and keep what part of the time threads waited for a processor others used."""
        waited, start = waited_s(), time.perf_counter()
        self.report.run(cases, self.rounds, sync=False)
        seconds = sum(value - waited.get(thread, 0.0) for thread, value in waited_s().items())
        share = seconds / (time.perf_counter() - start)
        self.waited = max(self.waited, share)
        for case in cases:
            entry = self.report.cases[case.name]
            entry["waited_share"] = share
            if torch.get_num_threads() == 1 and case.name in self.cpu_s:
                entry["cpu_us"] = statistics.median(self.cpu_s[case.name]) * 1e6

    def _ratio(self, name: str, names: dict[str, str], target: Target) -> None:
        ours, peer = names[OURS], names[target.peer]
        if target.at_most:
            within(self.report, name := name.format("over"), ours, peer, target.value)
        else:
            self.report.speedup(name := name.format("against"), ours, peer, target.value)
        self.also(name, ours, peer, target.at_most)

    def also(self, name: str, ours: str, peer: str | None, at_most: bool) -> None:
        """Add to a ratio what it is in CPU time, which others disturb less, and whether they did."""
        case, ratio = self.report.cases[ours], self.report.ratios[name]
        ratio["is_busy"] = case["waited_share"] > BUSY
        if "cpu_us" in case:
            other = self.report.cases[peer]["cpu_us"] if peer else 1.0
            ratio["cpu"] = case["cpu_us"] / other if at_most else other / case["cpu_us"]

    def shared_steps(self) -> Steps:
        """The same ones for all loops."""
        if self.steps is None:
            self.steps = peers.steps_of(self.n_steps)
        return self.steps

    def has(self, name: str) -> bool:
        """Whether a peer is installed; a note says so where it is not."""
        found = {TORCHRL: peers.has_torchrl, CPPRB: peers.has_cpprb, SB3: peers.has_sb3}[name]()
        if not found and name not in self.lacking:
            self.report.notes.append(f"{name} is not installed: its cases are skipped")
            self.lacking.add(name)
        return found


def summary(run: Run, title: str, key: str) -> Table:
    """One line a loop, as in the page of benchmarks."""
    lines = {loop: {who: run.report.cases[case] for who, case in names.items()} for loop, names in run.seen.items()}
    everyone = list(dict.fromkeys(who for cases in lines.values() for who in cases))
    table = Table(title=title)
    for name in ("loop", *everyone, "waited"):
        table.add_column(name, justify="left" if name == "loop" else "right")
    for loop, cases in lines.items():
        if key in cases[OURS]:
            values = [f"{cases[who][key] / 1e3:.3g}" if who in cases else "" for who in everyone]
            table.add_row(loop, *values, f"{cases[OURS]['waited_share']:.0%}")
    return table
