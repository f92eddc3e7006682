"""Plots of a run: how the agent learned, and what the buffer did."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from _cartpole import TASK, Array
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

BLUE, RED, GREEN, GREY, LIGHT, BLACK = "#2a6f97", "#c8553d", "#5a7d7c", "#8a8a8a", "#d9d9d9", "#222222"
COLOURS = {"terminated": RED, "truncated": BLUE}

Events = Sequence[dict[str, Any]]


class Run:
    """The events that the processes reported, in order.

    `killed_at` and `resumed_at` are the steps of the last kill and of the checkpoint it was resumed from, if any.
    """

    def __init__(self, sessions: Sequence[Events]) -> None:
        self.sessions = sessions
        events = [event for session in sessions for event in session]
        resumed = [event["step"] for event in events if event["event"] == "resumed"]
        self.resumed_at: int | None = resumed[-1] if resumed else None
        before = [e["step"] for e in sessions[0] if "step" in e]
        self.killed_at: int | None = max(before, default=0) if resumed else None

    def of(self, *names: str, is_lost: bool = False) -> list[dict[str, Any]]:
        """Return the events that belong to the run; with ``is_lost``, those between the checkpoint and the kill."""
        stop = np.inf if self.resumed_at is None else self.resumed_at
        found = [e for e in self.sessions[0] if e["event"] in names and (e["step"] > stop) == is_lost]
        later = [e for session in self.sessions[1:] for e in session if e["event"] in names]
        return found if is_lost else found + later

    def ended(self, *, is_lost: bool = False) -> list[dict[str, Any]]:
        """Return the episodes that ended while training; one event may report several."""
        stop = np.inf if self.resumed_at is None else self.resumed_at
        first = [x for e in self.sessions[0] for x in e.get("ended", ()) if (x["step"] > stop) == is_lost]
        later = [x for session in self.sessions[1:] for e in session for x in e.get("ended", ())]
        return first if is_lost else first + later


# ---- learning ------------------------------------------------------------------------------------------------


def plot_learning(run: Run, goal: float | None, path: Path) -> None:
    figure = Figure(figsize=(11, 5.6), layout="constrained")
    axes = figure.subplots()
    _draw_episodes(axes, run)
    _draw_evaluations(axes, run)
    if goal is not None:
        axes.axhline(goal, color=GREEN, linewidth=1.2, linestyle="--")
        axes.annotate(
            f"goal: {goal:.0f}", (0.004, goal), (0, -4), xycoords=("axes fraction", "data"),
            textcoords="offset points", va="top", color=GREEN,
        )  # fmt: skip
    for saved in run.of("checkpoint"):
        axes.plot(saved["step"], -14, "^", color=BLACK, markersize=6, clip_on=False)
    axes.plot([], [], "^", color=BLACK, markersize=6, linestyle="", label="checkpoint")
    axes.set(ylim=(-24, 545), ylabel="return")
    axes.set_title(f"{TASK}, learned from a buffer on disk", loc="left", pad=22)
    _finish(axes, run, with_words=True)
    figure.legend(frameon=False, loc="outside lower center", ncols=5)
    figure.savefig(path, dpi=130)


def _draw_episodes(axes: Any, run: Run) -> None:
    for end, colour in COLOURS.items():
        episodes = [e for e in run.ended() if e["end"] == end]
        points = [e["step"] for e in episodes], [e["return"] for e in episodes]
        if episodes:
            axes.scatter(*points, s=16, alpha=0.55, linewidths=0, color=colour, label=f"exploring, {end}")
    lost = run.ended(is_lost=True)
    if lost:
        points = [e["step"] for e in lost], [e["return"] for e in lost]
        axes.scatter(*points, s=16, marker="x", linewidths=0.8, color=GREY, label="lost with the kill")


def _draw_evaluations(axes: Any, run: Run) -> None:
    lost, kept = run.of("evaluated", is_lost=True), run.of("evaluated")
    before = [e for e in kept if lost and e["step"] <= lost[0]["step"]][-1:]
    axes.plot(
        [e["step"] for e in before + lost], [e["mean"] for e in before + lost], ":", color=GREY, linewidth=1.5
    )
    axes.plot(
        [e["step"] for e in kept], [e["mean"] for e in kept], "o-", color=BLACK, linewidth=1.8, markersize=4,
        label="greedy, mean",
    )  # fmt: skip


# ---- the buffer ----------------------------------------------------------------------------------------------


def plot_buffer(
    run: Run, sizes: Sequence[tuple[int, int, int]], path: Path, *, capacity: int, bin_updates: int
) -> None:
    """Plot four views of a buffer.

    Args:
        run: The events.
        sizes: (step, bytes on disk, decoded bytes of the buffer's steps) at some steps.
        path: The PNG to write.
        capacity: Capacity of the buffer, in steps.
        bin_updates: Bin size of the draw statistics, in updates.
    """
    figure = Figure(figsize=(12, 8.6), layout="constrained")
    (kept, drawn), (mass, disk) = figure.subplots(2, 2)
    _draw_kept(kept, run, capacity)
    _draw_drawn(figure, drawn, run, bin_updates)
    _draw_mass(mass, run.of("finished")[-1]["priorities"])
    _draw_disk(disk, run, sizes)
    figure.savefig(path, dpi=130)


def _draw_kept(axes: Any, run: Run, capacity: int) -> None:
    events = run.of("progress", "finished")
    steps, evicted, held = np.array([(e["step"], e["evicted"]["steps"], e["n_steps"]) for e in events]).T
    axes.stackplot(steps, evicted, held, colors=[LIGHT, GREEN], labels=["evicted", "in the buffer"])
    axes.set_title(f"Where the steps are (capacity {capacity:,})", loc="left")
    axes.set(ylabel="steps", ylim=(0, None))
    axes.yaxis.set_major_formatter(_thousands)
    _finish(axes, run)
    axes.legend(frameon=False, loc="upper left")


def _draw_drawn(figure: Any, axes: Any, run: Run, bin_updates: int) -> None:
    shares = drawn_shares(run.of("progress", "finished"))
    edges = np.arange(len(shares) + 1) * bin_updates
    shown = np.ma.masked_equal(shares.T, 0)
    mesh = axes.pcolormesh(edges, edges, shown, cmap="viridis", norm=LogNorm(), rasterized=True)
    figure.colorbar(mesh, ax=axes, label="share of the draws then", format=FuncFormatter(_percent), pad=0.02)
    axes.set_title("Which steps were drawn, and when", loc="left")
    axes.set(xlabel="when: updates so far", ylabel="what: collected after this many updates")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(_thousands)
    axes.annotate("newest", (0.44, 0.52), xycoords="axes fraction", ha="right", color=GREY)
    axes.annotate("evicted", (0.97, 0.04), xycoords="axes fraction", ha="right", color=GREY)
    axes.spines[["top", "right"]].set_visible(False)


def drawn_shares(events: Events) -> Array:
    """Return shares ``[when, what]`` in bins of updates: of the draws at one time, by the time of collection."""
    counted = np.array([entry for event in events for entry in event["drawn"]]).reshape(-1, 3)
    n = int(counted[:, :2].max(initial=0)) + 1
    counts = np.zeros((n, n))
    np.add.at(counts, (counted[:, 0], counted[:, 1]), counted[:, 2])
    totals = counts.sum(1, keepdims=True)
    shares: Array = np.divide(counts, totals, out=np.zeros_like(counts), where=totals > 0)
    return shares


def _draw_mass(axes: Any, priorities: dict[str, Any]) -> None:
    mass = np.array(priorities["mass_by_age"])
    n = len(mass)
    axes.bar(np.arange(n) + 0.5, mass, width=0.9, color=GREEN, label="by priority")
    axes.axhline(1 / n, color=BLACK, linewidth=1, linestyle="--", label="uniform")
    axes.set_title("Chance to be drawn, by age, at the end", loc="left")
    axes.set(xlabel="steps in the buffer, oldest to newest", ylabel="share of the draws", xlim=(0, n))
    axes.set_ylim(0, 1.3 * max(mass.max(), 1 / n))
    axes.set_xticks([0, n], ["oldest", "newest"])
    axes.yaxis.set_major_formatter(FuncFormatter(_percent))
    axes.legend(frameon=False, loc="upper left", ncols=2)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_disk(axes: Any, run: Run, sizes: Sequence[tuple[int, int, int]]) -> None:
    steps, stored, decoded = np.array(sizes, float).reshape(-1, 3).T
    axes.plot(steps, decoded / 2**20, "o-", color=GREEN, markersize=4, label="contents of the buffer, decoded")
    axes.plot(steps, stored / 2**20, "o-", color=BLUE, markersize=4, label="the whole store, on disk")
    axes.set_title("Bytes (log scale)", loc="left")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} MiB"))
    axes.margins(y=0.25)
    _finish(axes, run)
    axes.legend(loc="lower right", framealpha=0.9, edgecolor="none")


# ---- parts ---------------------------------------------------------------------------------------------------


def _finish(axes: Any, run: Run, *, with_words: bool = False) -> None:
    last = max(e["step"] for e in run.of("finished"))
    axes.set(xlabel="environment steps", xlim=(0, 1.01 * last))
    axes.xaxis.set_major_formatter(_thousands)
    axes.spines[["top", "right"]].set_visible(False)
    if run.killed_at is None or run.resumed_at is None:
        return
    axes.axvspan(run.resumed_at, run.killed_at, color=RED, alpha=0.10, linewidth=0)
    for at, style in ((run.killed_at, "-"), (run.resumed_at, ":")):
        axes.axvline(at, color=RED, linewidth=1, linestyle=style)
    if with_words:
        _write_above(axes, run.killed_at, " killed (SIGKILL)", "left")
        _write_above(axes, run.resumed_at, "resumed from here ", "right")


def _write_above(axes: Any, at: float, words: str, side: str) -> None:
    axes.annotate(
        words, (at, 1.0), (0, 3), xycoords=("data", "axes fraction"), textcoords="offset points",
        ha=side, color=RED, fontsize=9,
    )  # fmt: skip


def _percent(value: float, _: Any) -> str:
    return f"{value:.0%}" if value >= 0.01 or value == 0 else f"{value:.1%}"


_thousands = FuncFormatter(lambda value, _: f"{value:,.0f}")
