"""Train an agent from a replay buffer on disk, kill it half-way, resume it exactly, and reach the goal."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from _cartpole import HEIGHT, TASK, WIDTH
from _plan import N_PROOF, Files, Plan, command, plan_of
from _plots import Run, plot_buffer, plot_learning
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import trajstore

ROOT = Path(__file__).resolve().parent.parent
N_STEPS, QUICK_STEPS, LEAST_STEPS = 40_000, 1_600, 800
FAILED = 1
PIPE_WIDTH = 140  # columns if the output is not a terminal

Event = dict[str, Any]


class DemoError(Exception):
    """The run did not behave as expected."""


# ---- output --------------------------------------------------------------------------------------------------


class Show:
    """Prints the events of a run: with a progress bar in a terminal, as plain lines elsewhere."""

    def __init__(self, console: Console, plan: Plan) -> None:
        self.console, self.plan = console, plan
        template = "{task.fields[text]}"
        columns = (TextColumn(" "), BarColumn(18), TextColumn(template), TimeElapsedColumn())
        self._progress = Progress(*columns, console=console, disable=not console.is_terminal, transient=True)
        self._task = self._progress.add_task("", total=plan.n_steps, text="starting")
        self._newest: Event | None = None
        self._means: list[str] = []  # mean returns of greedy episodes since the last checkpoint

    def heading(self, number: int, text: str) -> None:
        self.console.print(f"\n[bold]{number}  {text}[/bold]")

    def line(self, text: str) -> None:
        self.console.print(f"   {text}")

    @contextlib.contextmanager
    def bar(self) -> Iterator[None]:
        with self._progress:
            yield

    def show_event(self, event: Event) -> None:
        kind = event["event"]
        if kind in ("progress", "finished"):
            self._newest = event
            self._progress.update(self._task, completed=event["step"], text=figures(event))
        elif kind in ("evaluated", "confirmed"):
            self._means.append(f"{event['mean']:.0f}")
        elif kind == "checkpoint":
            self._print_checkpoint(event)

    def _print_checkpoint(self, event: Event) -> None:
        greedy = f"greedy {', then '.join(self._means)}; saved [cyan]{event['id']}[/cyan]"
        now = f" | {figures(self._newest)}" if self._newest and not self.console.is_terminal else ""
        self.line(f"step {event['step']:>6,}: {greedy} ({event['seconds']:.2f} s){now}")
        self._means = []


def figures(event: Event) -> str:
    """Return the newest figures in one line."""
    mean = "-" if event["return"] is None else f"{event['return']:.0f}"
    rates = f"{event['steps_per_s']:,.0f} steps/s, {event['updates_per_s']:,.0f} batches/s"
    return f"return {mean}, loss {event['loss']:.3f}, {rates}"


# ---- processes -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def started(words: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    """Start a process, and end it when the block is left."""
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def events_of(process: subprocess.Popen[str]) -> Iterator[Event]:
    assert process.stdout is not None
    for line in process.stdout:
        with contextlib.suppress(json.JSONDecodeError):  # a line that the kill cut off
            yield json.loads(line)


class Demo:
    """A run: its processes, the events they reported, and the size of the store over time."""

    def __init__(self, plan: Plan, files: Files, show: Show) -> None:
        self.plan, self.files, self.show = plan, files, show
        self.sessions: list[list[Event]] = []
        self.sizes: list[tuple[int, int, int]] = []  # step, bytes on disk, bytes of what the buffer holds
        self._row_bytes = 0

    @property
    def finished(self) -> Event:
        return self.sessions[-1][-1]

    def first_session(self) -> None:
        """Train to the end, or until the plan says to kill the process.

        Raises:
            DemoError: The process failed.
        """
        with started(command(self.plan, self.files, is_resumed=False)) as process:
            self.show.heading(1, f"Training in a separate process (pid {process.pid})")
            self._print_plan()
            is_killed = self._follow(process, self.plan.kill_at)
        if not is_killed:
            self._check_ended(process)
            return
        if process.returncode != -signal.SIGKILL:
            raise DemoError(f"expected the process to end by signal 9, got exit code {process.returncode}")
        self.show.heading(2, f"kill -9 {process.pid}, in the middle of everything")
        self._inspect_after_kill()

    def second_session(self) -> None:
        """Resume from the newest pair of checkpoints, and continue training.

        Raises:
            DemoError: The process failed.
        """
        with started(command(self.plan, self.files, is_resumed=True)) as process:
            self.show.heading(3, f"Resuming in a new process (pid {process.pid})")
            self._follow(process, None)
        self._check_ended(process)

    def _follow(self, process: subprocess.Popen[str], kill_at: int | None) -> bool:
        """Show the events of a process until it ends, or kill it at a step; return whether it was killed."""
        events: list[Event] = []
        self.sessions.append(events)
        with self.show.bar():
            for event in events_of(process):
                events.append(event)
                if event["event"] == "resumed":
                    self._print_resumed(event)
                self.show.show_event(event)
                self._measure(event)
                if kill_at is not None and event["event"] == "progress" and event["step"] >= kill_at:
                    process.send_signal(signal.SIGKILL)
                    process.wait()
                    return True
        process.wait()
        return False

    def _print_plan(self) -> None:
        plan, line = self.plan, self.show.line
        line(f"{plan.n_envs} environments fill a prioritised buffer of {plan.capacity:,} steps, each with its")
        line(f"state, {HEIGHT} x {WIDTH} frame, action and reward. greedy: mean return of {plan.n_greedy}")
        line("episodes without exploration; return: mean return of the newest episodes with it.")

    def _check_ended(self, process: subprocess.Popen[str]) -> None:
        events = self.sessions[-1]
        if process.returncode != 0 or not events or events[-1]["event"] != "finished":
            raise DemoError(f"training ended with exit code {process.returncode}; see the error above")

    def _measure(self, event: Event) -> None:
        if event["event"] not in ("checkpoint", "finished"):
            return
        if not self._row_bytes:
            schema = trajstore.open(self.files.store).schema
            assert schema is not None
            self._row_bytes = schema.row_bytes
        held = [e["n_steps"] for e in self.sessions[-1] if "n_steps" in e]
        if held:
            self.sizes.append((event["step"], stored_bytes(self.files.store), held[-1] * self._row_bytes))

    def _inspect_after_kill(self) -> None:
        store = trajstore.open(self.files.store)
        last = max(event["step"] for event in self.sessions[0] if "step" in event)
        self.show.line(f"Its last report was of step {last:,}. It could not clean up.")
        self.show.line(f"The store opens: {len(store):,} episodes, {len(store.checkpoints)} checkpoints.")
        self.sizes = [size for size in self.sizes if size[0] <= last]

    def _print_resumed(self, event: Event) -> None:
        line = self.show.line
        line(f"Buffer and agent of [cyan]{event['checkpoint']}[/cyan] are back ({event['seconds']:.2f} s).")
        line(f"The buffer holds {event['n_steps']:,} steps. {event['abandoned']:,} rows committed later are never")
        line("mixed in, and are deleted when their stream is evicted. The environments restart:")
        line("episodes that were open at the checkpoint end as cut.")
        if event["digest"] == event["expected"]:
            line(f"[green]The next {N_PROOF} batches, their errors and the weights after them equal those[/green]")
            line(f"[green]before the kill, bit by bit (sha256 {event['digest'][:12]}).[/green]")

    # ---- outcome

    @property
    def is_exact(self) -> bool | None:
        """Whether the resumed process repeated the updates of the killed one; None if nothing was resumed."""
        resumed = [e for session in self.sessions for e in session if e["event"] == "resumed"]
        return all(e["digest"] == e["expected"] for e in resumed) if resumed else None

    def problems(self) -> list[str]:
        found = []
        if self.is_exact is False:
            found.append(f"the {N_PROOF} updates after resuming differ from those before the kill")
        if self.plan.kill_at is not None and self.is_exact is None:
            found.append("nothing was resumed")
        if self.plan.goal is not None and not self.finished["is_reached"]:
            found.append(
                f"a mean return of {self.plan.goal:.0f} was not reached within {self.plan.n_steps:,} steps"
            )
        return found


# ---- reading back --------------------------------------------------------------------------------------------


def stored_bytes(directory: Path) -> int:
    """Return the bytes of all files in a directory. Files that are deleted while it runs do not count."""
    total = 0
    for where, _, names in os.walk(directory):  # ignores directories that have been deleted
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += os.path.getsize(os.path.join(where, name))
    return total


def count_same_bytes(url: Path, n_episodes: int = 20) -> int:
    """Read the newest episodes with trajstore and with plain zarr; return the number of equal bytes.

    Raises:
        DemoError: Some bytes differ.
    """
    store, group = trajstore.open(url), zarr.open_group(str(url), mode="r")
    n_bytes = 0
    for i in range(max(len(store) - n_episodes, 0), len(store)):
        key, row = store.episodes.key(i), store.episodes.row(i)
        if row["is_headless"]:
            continue
        stream: Any = group[f"streams/{key.stream}"]
        spans = stream["spans/ints"]
        columns = dict(zip(spans.attrs["columns"], spans[:].T, strict=True))
        spans_of_episode = np.flatnonzero(columns["episode"] == key.episode)
        rows = np.concatenate(
            [np.arange(columns["row_start"][k], columns["row_stop"][k]) for k in spans_of_episode]
        )
        expected = store.read_episode(key)["observation"]["pixels"]
        got = stream["steps/observation/pixels"].oindex[rows[: len(expected)]]
        if expected.tobytes() != got.tobytes():
            raise DemoError(f"episode {key.episode} of {key.stream}: zarr reads its frames differently")
        n_bytes += got.nbytes
    return n_bytes


# ---- report --------------------------------------------------------------------------------------------------


def report(demo: Demo, n_same: int, seconds: float) -> Table:
    finished, plan = demo.finished, demo.plan
    stats, spent = finished["stats"], finished["seconds"]
    cache, priorities = stats["cache"], finished["priorities"]
    _, stored, decoded = demo.sizes[-1]
    n_batches = finished["updates_per_s"]
    since = "in total" if demo.is_exact is None else "since the resume"
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 3))
    table.add_column(style="bold")
    table.add_column()
    for name, text in {
        "return": _outcome(demo),
        "throughput": f"{finished['steps_per_s']:,.0f} environment steps/s and {n_batches:,.0f} batches/s, which is"
        f" {n_batches * plan.batch_size:,.0f} windows/s, all in one thread",
        "drawing": f"{finished['sampled_per_s']:,.0f} windows per second of sample()",
        "time spent": ", ".join(f"{what} {100 * s / spent['all']:.0f} %" for what, s in _largest(spent)),
        "buffer": f"{stats['n_steps']:,} steps in {stats['n_episodes']:,} episodes;"
        f" {stats['evicted']['steps']['steps']:,} steps evicted, {stats['n_sampled']:,} windows drawn",
        "priorities": f"{priorities['min']:.2g} to {priorities['max']:.2g}, effective size"
        f" {priorities['effective_sample_size']:,.0f} of {priorities['n_windows']:,} windows",
        "bytes": f"{mib(stored)} on disk, including checkpoints and the rows they keep; the buffer's steps are"
        f" {mib(decoded)} decoded",
        "cache": f"{cache['hits']:,} hits, {cache['misses']:,} misses, {mib(cache['bytes_read'])} read from disk"
        f" {since}",
        "commits": f"{stats['writer']['commits']:,}, {stats['writer']['committed_rows']:,} rows {since};"
        f" {stats['storage']['n_chunks_deleted']:,} chunks of evicted steps deleted",
        "plain zarr": f"reads the frames of the newest episodes as trajstore does ({mib(n_same)} compared)",
        "total time": f"{seconds:.0f} s",
    }.items():
        table.add_row(name, text)
    return table


def _outcome(demo: Demo) -> str:
    plan = demo.plan
    if plan.goal is None:
        return "not evaluated in a quick run"
    evaluated = [e for e in demo.sessions[-1] if e["event"] in ("evaluated", "confirmed")]
    mean = f"{evaluated[-1]['mean']:.0f} over {plan.n_greedy} greedy episodes" if evaluated else "no greedy episode"
    verdict = f"after {demo.finished['step']:,} steps" if demo.finished["is_reached"] else "not reached"
    return f"{mean} (goal {plan.goal:.0f}, twice in a row: {verdict})"


def _largest(seconds: dict[str, float]) -> list[tuple[str, float]]:
    parts = [(what, s) for what, s in seconds.items() if what != "all"]
    return sorted(parts, key=lambda part: -part[1])


def mib(n_bytes: int) -> str:
    return f"{n_bytes / 2**20:,.1f} MiB"


def short(path: str | Path) -> str:
    """Return the path relative to the current directory if it is inside it."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith(os.pardir) else relative


def next_steps(files: Files, plots: Sequence[Path]) -> str:
    where, bin_ = short(files.store), Path(sys.executable).parent
    longest = int(np.argmax(trajstore.open(files.store).episodes["length"]))
    return f"""
Store:    {where}
Plots:    {", ".join(short(plot) for plot in plots)}

Inspect it:

  {short(bin_ / "trajstore")} info {where}
  {short(bin_ / "trajstore")} verify {where}

or with {short(sys.executable)}:

  import trajstore
  store = trajstore.open({where!r})
  store.episodes.to_pandas()  # one row per episode
  store.read_episode({longest}, fields=["action"], stop=10)  # a few steps of one field
  buffer = trajstore.ReplayBuffer.resume({where!r}, "latest")  # continue

  import zarr  # the same store, without trajstore
  zarr.open_group({where!r}, mode="r").tree()

Or open notebooks/2_what_is_in_this_store.ipynb, with TRAJSTORE_DEMO={files.store.resolve()}"""


# ---- command line --------------------------------------------------------------------------------------------


def find_free(path: Path) -> Path:
    """Return the path, or the first of path-2, path-3, ... that does not exist or is empty."""
    path = path.resolve()
    names = itertools.chain([path], (path.with_name(f"{path.name}-{n}") for n in itertools.count(2)))
    return next(p for p in names if not p.exists() or (p.is_dir() and not any(p.iterdir())))


def parse_count(text: str, least: int = 0) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"expected a number from {least}, got {text!r}")
    return int(text)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/demo",
        description=f"An agent learns {TASK} from a prioritised replay buffer on disk, in a process that is killed "
        "half-way with SIGKILL. A new process resumes buffer and agent from the newest checkpoint, shows that it "
        "continues exactly like the first one, and trains until the agent reaches its goal. Exits with 1 if the "
        "goal is not reached or anything differs.",
        epilog="Without options this takes a minute or two and writes the store and two plots to runs/demo.",
    )
    parser.add_argument(
        "--directory",
        type=Path,
        default=ROOT / "runs" / "demo",
        metavar="DIR",
        help="directory for store, agent and plots; if it exists, DIR-2, DIR-3, ... (default: runs/demo)",
    )
    parser.add_argument(
        "--seed", type=parse_count, default=0, metavar="N", help="seed of everything random (default: 0)"
    )
    parser.add_argument(
        "--steps",
        type=lambda text: parse_count(text, LEAST_STEPS),
        metavar="N",
        help=f"maximum number of environment steps (default: {N_STEPS:,}; quick: {QUICK_STEPS:,})",
    )
    parser.add_argument("--no-kill", action="store_true", help="let the first process train to the end")
    parser.add_argument("--quick", action="store_true", help="take a few seconds, and do not check the return")
    return parser.parse_args(argv)


def run(args: argparse.Namespace, console: Console) -> int:
    start = time.perf_counter()
    n_steps = args.steps or (QUICK_STEPS if args.quick else N_STEPS)
    plan = plan_of(args.seed, n_steps, is_killed=not args.no_kill, is_quick=args.quick)
    files = Files(find_free(args.directory))
    files.directory.mkdir(parents=True, exist_ok=True)
    demo = Demo(plan, files, Show(console, plan))
    console.print(f"[bold]trajstore[/bold]: learning {TASK} from a replay buffer at {short(files.store)}")
    demo.first_session()
    if plan.kill_at is not None:
        demo.second_session()
    n_same = count_same_bytes(files.store)
    plots = [files.directory / name for name in ("learning.png", "buffer.png")]
    reported = Run(demo.sessions)
    plot_learning(reported, plan.goal, plots[0])
    plot_buffer(reported, demo.sizes, plots[1], capacity=plan.capacity, bin_updates=plan.bin_updates)
    demo.show.heading(2 if args.no_kill else 4, "Results")
    console.print(report(demo, n_same, time.perf_counter() - start))
    console.print(next_steps(files, plots), markup=False)
    for problem in demo.problems():
        console.print(f"[bold red]FAILED: {problem}[/bold red]")
    return FAILED if demo.problems() else 0


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    is_terminal = sys.stdout.isatty()
    console = Console(highlight=False, soft_wrap=not is_terminal, width=None if is_terminal else PIPE_WIDTH)
    try:
        return run(args, console)
    except (DemoError, trajstore.TrajstoreError) as error:
        print(f"scripts/demo: {error}", file=sys.stderr)
        return FAILED


if __name__ == "__main__":
    sys.exit(main())
