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
PIPE_WIDTH = 140  # columns, where the output is no terminal

Event = dict[str, Any]


class DemoError(Exception):
    """The run did not show what it should."""


# ---- showing -------------------------------------------------------------------------------------------------


class Show:
    """Says what happens: with a bar where there is a terminal, in plain lines elsewhere."""

    def __init__(self, console: Console, plan: Plan) -> None:
        self.console, self.plan = console, plan
        words = "{task.fields[said]}"
        columns = (TextColumn(" "), BarColumn(18), TextColumn(words), TimeElapsedColumn())
        self._progress = Progress(*columns, console=console, disable=not console.is_terminal, transient=True)
        self._task = self._progress.add_task("", total=plan.n_steps, said="starting")
        self._newest: Event | None = None
        self._means: list[str] = []  # of greedy episodes, since the last checkpoint

    def heading(self, number: int, text: str) -> None:
        self.console.print(f"\n[bold]{number}  {text}[/bold]")

    def line(self, text: str) -> None:
        self.console.print(f"   {text}")

    @contextlib.contextmanager
    def bar(self) -> Iterator[None]:
        with self._progress:
            yield

    def take(self, event: Event) -> None:
        kind = event["event"]
        if kind in ("progress", "finished"):
            self._newest = event
            self._progress.update(self._task, completed=event["step"], said=figures(event))
        elif kind in ("evaluated", "confirmed"):
            self._means.append(f"{event['mean']:.0f}")
        elif kind == "checkpoint":
            self._say_saved(event)

    def _say_saved(self, event: Event) -> None:
        greedy = f"greedy {', then '.join(self._means)}; saved [cyan]{event['id']}[/cyan]"
        now = f" | {figures(self._newest)}" if self._newest and not self.console.is_terminal else ""
        self.line(f"step {event['step']:>6,}: {greedy} ({event['seconds']:.2f} s){now}")
        self._means = []


def figures(event: Event) -> str:
    """The newest figures in one line."""
    mean = "-" if event["return"] is None else f"{event['return']:.0f}"
    rates = f"{event['steps_per_s']:,.0f} steps/s, {event['updates_per_s']:,.0f} batches/s"
    return f"return {mean}, loss {event['loss']:.3f}, {rates}"


# ---- processes -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def started(words: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    """A process that is gone at the end, whatever happens."""
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
    """A run: its processes, what they told, and how large the store was meanwhile."""

    def __init__(self, plan: Plan, files: Files, show: Show) -> None:
        self.plan, self.files, self.show = plan, files, show
        self.sessions: list[list[Event]] = []
        self.sizes: list[tuple[int, int, int]] = []  # step, bytes on disk, bytes of what the buffer holds
        self._row_bytes = 0

    @property
    def finished(self) -> Event:
        return self.sessions[-1][-1]

    def first_session(self) -> None:
        """Train; until the end, or until the plan says to kill it.

        Raises:
            DemoError: The process failed.
        """
        with started(command(self.plan, self.files, is_resumed=False)) as process:
            self.show.heading(1, f"Training in a process of its own (pid {process.pid})")
            self._say_plan()
            is_killed = self._follow(process, self.plan.kill_at)
        if not is_killed:
            self._check_ended(process)
            return
        if process.returncode != -signal.SIGKILL:
            raise DemoError(f"the process was to end by signal 9, it ended with {process.returncode}")
        self.show.heading(2, f"kill -9 {process.pid}, in the middle of everything")
        self._look_at_the_remains()

    def second_session(self) -> None:
        """Resume from the newest pair of checkpoints, and train on.

        Raises:
            DemoError: The process failed.
        """
        with started(command(self.plan, self.files, is_resumed=True)) as process:
            self.show.heading(3, f"Resuming in a new process (pid {process.pid})")
            self._follow(process, None)
        self._check_ended(process)

    def _follow(self, process: subprocess.Popen[str], kill_at: int | None) -> bool:
        """Show what a process tells until it ends, or kill it at a step; says which."""
        told: list[Event] = []
        self.sessions.append(told)
        with self.show.bar():
            for event in events_of(process):
                told.append(event)
                if event["event"] == "resumed":
                    self._say_resumed(event)
                self.show.take(event)
                self._measure(event)
                if kill_at is not None and event["event"] == "progress" and event["step"] >= kill_at:
                    process.send_signal(signal.SIGKILL)
                    process.wait()
                    return True
        process.wait()
        return False

    def _say_plan(self) -> None:
        plan, line = self.plan, self.show.line
        line(f"{plan.n_envs} environments fill a prioritised buffer of {plan.capacity:,} steps, each with its")
        line(f"state, {HEIGHT} x {WIDTH} frame, action and reward. greedy: mean return of {plan.n_greedy}")
        line("episodes without exploring; return: that of the newest with it.")

    def _check_ended(self, process: subprocess.Popen[str]) -> None:
        told = self.sessions[-1]
        if process.returncode != 0 or not told or told[-1]["event"] != "finished":
            raise DemoError(f"training ended with {process.returncode}; what went wrong stands above")

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

    def _look_at_the_remains(self) -> None:
        store = trajstore.open(self.files.store)
        last = max(event["step"] for event in self.sessions[0] if "step" in event)
        self.show.line(f"It had told of step {last:,} and had no chance to tidy up.")
        self.show.line(f"The store opens: {len(store):,} episodes, {len(store.checkpoints)} checkpoints.")
        self.sizes = [size for size in self.sizes if size[0] <= last]

    def _say_resumed(self, event: Event) -> None:
        line = self.show.line
        line(f"Buffer and agent of [cyan]{event['checkpoint']}[/cyan] are back ({event['seconds']:.2f} s).")
        line(f"The buffer holds {event['n_steps']:,} steps. {event['abandoned']:,} rows committed later are never")
        line("mixed in, and go when their stream is evicted. The environments start anew:")
        line("episodes that were open at the checkpoint read as cut.")
        if event["digest"] == event["expected"]:
            line(f"[green]The next {N_PROOF} batches, their errors and the weights after them are as[/green]")
            line(f"[green]before the kill, bit by bit (sha256 {event['digest'][:12]}).[/green]")

    # ---- the outcome

    @property
    def is_exact(self) -> bool | None:
        """Whether the resumed process went on as the killed one had; None: nothing was resumed."""
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
    """Bytes of all files below; files and directories that go meanwhile count nothing."""
    total = 0
    for where, _, names in os.walk(directory):  # passes over directories that it does not find any more
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += os.path.getsize(os.path.join(where, name))
    return total


def count_same_bytes(url: Path, n_episodes: int = 20) -> int:
    """Read the newest episodes with trajstore and with plain zarr; how many bytes were the same.

    Raises:
        DemoError: Some were not.
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
        mine = np.flatnonzero(columns["episode"] == key.episode)
        rows = np.concatenate([np.arange(columns["row_start"][k], columns["row_stop"][k]) for k in mine])
        ours = store.read_episode(key)["observation"]["pixels"]
        theirs = stream["steps/observation/pixels"].oindex[rows[: len(ours)]]
        if ours.tobytes() != theirs.tobytes():
            raise DemoError(f"episode {key.episode} of {key.stream}: zarr reads its frames differently")
        n_bytes += theirs.nbytes
    return n_bytes


# ---- the end -------------------------------------------------------------------------------------------------


def report(demo: Demo, n_same: int, seconds: float) -> Table:
    finished, plan = demo.finished, demo.plan
    stats, spent = finished["stats"], finished["seconds"]
    cache, priorities = stats["cache"], finished["priorities"]
    _, stored, decoded = demo.sizes[-1]
    n_batches = finished["updates_per_s"]
    since = "in all" if demo.is_exact is None else "since it was resumed"
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 3))
    table.add_column(style="bold")
    table.add_column()
    for name, text in {
        "return": _outcome(demo),
        "throughput": f"{finished['steps_per_s']:,.0f} environment steps/s and {n_batches:,.0f} batches/s, that is"
        f" {n_batches * plan.batch_size:,.0f} windows/s, all in one thread",
        "drawing": f"{finished['sampled_per_s']:,.0f} windows/s of the time spent in sample()",
        "time went to": ", ".join(f"{what} {100 * s / spent['all']:.0f} %" for what, s in _largest(spent)),
        "buffer": f"{stats['n_steps']:,} steps in {stats['n_episodes']:,} episodes;"
        f" {stats['evicted']['steps']['steps']:,} steps evicted, {stats['n_sampled']:,} windows drawn",
        "priorities": f"{priorities['min']:.2g} to {priorities['max']:.2g}, effective size"
        f" {priorities['effective_sample_size']:,.0f} of {priorities['n_windows']:,} windows",
        "bytes": f"{mib(stored)} on disk, checkpoints and what they keep included; the buffer's steps are"
        f" {mib(decoded)} decoded",
        "cache": f"{cache['hits']:,} hits, {cache['misses']:,} misses, {mib(cache['bytes_read'])} read from disk"
        f" {since}",
        "commits": f"{stats['writer']['commits']:,}, {stats['writer']['committed_rows']:,} rows {since};"
        f" {stats['storage']['n_chunks_deleted']:,} chunks of evicted steps deleted",
        "plain zarr": f"reads the frames of the newest episodes as trajstore does ({mib(n_same)} compared)",
        "all of it": f"{seconds:.0f} s",
    }.items():
        table.add_row(name, text)
    return table


def _outcome(demo: Demo) -> str:
    plan = demo.plan
    if plan.goal is None:
        return "a quick run, which claims nothing"
    told = [e for e in demo.sessions[-1] if e["event"] in ("evaluated", "confirmed")]
    mean = f"{told[-1]['mean']:.0f} over {plan.n_greedy} greedy episodes" if told else "no greedy episode"
    verdict = f"after {demo.finished['step']:,} steps" if demo.finished["is_reached"] else "not reached"
    return f"{mean} (goal {plan.goal:.0f}, twice in a row: {verdict})"


def _largest(seconds: dict[str, float]) -> list[tuple[str, float]]:
    parts = [(what, s) for what, s in seconds.items() if what != "all"]
    return sorted(parts, key=lambda part: -part[1])


def mib(n_bytes: int) -> str:
    return f"{n_bytes / 2**20:,.1f} MiB"


def short(path: str | Path) -> str:
    """The path as one would type it here."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith(os.pardir) else relative


def next_steps(files: Files, pictures: Sequence[Path]) -> str:
    where, bin_ = short(files.store), Path(sys.executable).parent
    longest = int(np.argmax(trajstore.open(files.store).episodes["length"]))
    return f"""
Store:    {where}
Pictures: {", ".join(short(picture) for picture in pictures)}

Look at it:

  {short(bin_ / "trajstore")} info {where}
  {short(bin_ / "trajstore")} verify {where}

or with {short(sys.executable)}:

  import trajstore
  store = trajstore.open({where!r})
  store.episodes.to_pandas()  # one row an episode
  store.read_episode({longest}, fields=["action"], stop=10)  # a few steps of one field
  buffer = trajstore.ReplayBuffer.resume({where!r}, "latest")  # go on

  import zarr  # the same store, without trajstore
  zarr.open_group({where!r}, mode="r").tree()

Or open notebooks/explore_a_store.ipynb, with TRAJSTORE_DEMO={files.store.resolve()}"""


# ---- the command ---------------------------------------------------------------------------------------------


def fresh(path: Path) -> Path:
    """The path, or the first of path-2, path-3, ... at which there is nothing yet."""
    path = path.resolve()
    names = itertools.chain([path], (path.with_name(f"{path.name}-{n}") for n in itertools.count(2)))
    return next(p for p in names if not p.exists() or (p.is_dir() and not any(p.iterdir())))


def natural(text: str, least: int = 0) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"expected a number from {least}, got {text!r}")
    return int(text)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/demo",
        description=f"An agent learns {TASK} from a prioritised replay buffer on disk, in a process that is killed "
        "half-way with SIGKILL. A new process resumes buffer and agent from the newest checkpoint, shows that it "
        "goes on exactly as the first one did, and learns on until the agent reaches its goal. Ends with 1 if it "
        "does not, or if anything differs.",
        epilog="Without options this takes a minute or two and leaves the store and two pictures in runs/demo.",
    )
    parser.add_argument(
        "--directory",
        type=Path,
        default=ROOT / "runs" / "demo",
        metavar="DIR",
        help="where store, agent and pictures go; if it is taken, DIR-2, DIR-3, ... (default: runs/demo)",
    )
    parser.add_argument("--seed", type=natural, default=0, metavar="N", help="of everything (default: 0)")
    parser.add_argument(
        "--steps",
        type=lambda text: natural(text, LEAST_STEPS),
        metavar="N",
        help=f"environment steps, at the most (default: {N_STEPS:,}; quick: {QUICK_STEPS:,})",
    )
    parser.add_argument("--no-kill", action="store_true", help="let the first process train to the end")
    parser.add_argument("--quick", action="store_true", help="a few seconds, without a claim on the return")
    return parser.parse_args(argv)


def run(args: argparse.Namespace, console: Console) -> int:
    start = time.perf_counter()
    n_steps = args.steps or (QUICK_STEPS if args.quick else N_STEPS)
    plan = plan_of(args.seed, n_steps, is_killed=not args.no_kill, is_quick=args.quick)
    files = Files(fresh(args.directory))
    files.directory.mkdir(parents=True, exist_ok=True)
    demo = Demo(plan, files, Show(console, plan))
    console.print(f"[bold]trajstore[/bold]: learning {TASK} from a replay buffer at {short(files.store)}")
    demo.first_session()
    if plan.kill_at is not None:
        demo.second_session()
    n_same = count_same_bytes(files.store)
    pictures = [files.directory / name for name in ("learning.png", "buffer.png")]
    told = Run(demo.sessions)
    plot_learning(told, plan.goal, pictures[0])
    plot_buffer(told, demo.sizes, pictures[1], capacity=plan.capacity, bin_updates=plan.bin_updates)
    demo.show.heading(2 if args.no_kill else 4, "What came of it")
    console.print(report(demo, n_same, time.perf_counter() - start))
    console.print(next_steps(files, pictures), markup=False)
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
