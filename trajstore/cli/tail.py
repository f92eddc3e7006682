"""The command ``tail``: follow what a running session commits."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated

import numpy as np

import trajstore
from trajstore.cli.exit_codes import FINE, UsageError, damage_of_a_store, usage_errors
from trajstore.cli.output import (
    Facts,
    format_age,
    format_bytes,
    format_count,
    format_rate,
    print_facts,
    printable,
    write_json_line,
)
from trajstore.cli.parameters import AsJson, Option, StorageOptions, Url, parse_storage_options
from trajstore.cli.sparklines import sparkline
from trajstore.cli.stores import check_url
from trajstore.inspection.readings import Rates, Reading, Watch, rates

if TYPE_CHECKING:
    from rich.console import Console

_MIN_INTERVAL_S = 0.1


def tail(
    url: Url,
    interval: Annotated[float, Option("--interval", "Seconds between two readings.", "SECONDS")] = 2.0,
    once: Annotated[bool, Option("--once", "Take one reading and exit.")] = False,
    disk: Annotated[
        bool, Option("--disk", "Also sum up the bytes of all objects, which lists them at every reading.")
    ] = False,
    storage_option: StorageOptions = None,
    as_json: AsJson = False,
) -> int:
    """Follow a store while sessions write to it: rates, returns, time since the last commit, checkpoints.

    Shows what commits show: sessions publish neither how fast they sample nor their caches (`buffer.stats()` has
    both). Ends with Ctrl-C. With --json, prints one line for each reading.
    """
    if not interval >= _MIN_INTERVAL_S:
        raise UsageError(f"--interval: expected at least {_MIN_INTERVAL_S:g} s, got {interval:g}")
    with usage_errors():
        store = trajstore.open(check_url(url), storage_options=parse_storage_options(storage_option))
    with damage_of_a_store():
        readings = _readings(Watch(store, with_bytes=disk), 0.0 if once else interval)
        if once:
            print_facts(_facts(store.url, next(readings)), _print_reading, as_json)
            return FINE
        with contextlib.suppress(KeyboardInterrupt), _display(as_json) as show:
            for found in readings:
                show(_facts(store.url, found))
    return FINE


_Found = tuple[Reading, Rates | None, Rates | None]


def _readings(watch: Watch, interval: float) -> Iterator[_Found]:
    """Readings, each with the rates since the one before and since the first."""
    first = before = watch.read()
    yield first, None, None
    while interval:
        time.sleep(interval)
        now = watch.read()
        yield now, rates(before, now), rates(first, now)
        before = now


@contextlib.contextmanager
def _display(as_json: bool) -> Iterator[Callable[[Facts], None]]:
    """Show readings: in place in a terminal, below each other elsewhere."""
    if as_json:
        yield write_json_line
        return
    if not _is_terminal():
        yield _write_line
        return
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console(highlight=False, markup=False, emoji=False)
    with Live(console=console, auto_refresh=False) as live:
        yield lambda facts: live.update(Text("\n".join(_lines(facts, console.width)) + "\n"), refresh=True)


def _facts(url: str, found: _Found) -> Facts:
    reading, now, overall = found
    return {
        "url": url,
        "at": reading.at,
        "streams": reading.n_streams,
        "open_streams": list(reading.open_streams),
        "rows": reading.n_rows,
        "rows_written": reading.n_written,
        "episodes_finished": reading.n_finished,
        "commits": reading.n_commits,
        "seconds_since_commit": reading.idle_s,
        "recent_returns": reading.returns.tolist(),
        "recent_lengths": reading.lengths.tolist(),
        "checkpoint": None if reading.checkpoint is None else reading.checkpoint[0],
        "seconds_since_checkpoint": None if reading.checkpoint is None else reading.at - reading.checkpoint[1],
        "stored_bytes": reading.stored_bytes,
        "rates": _rate_facts(now),
        "mean_rates": _rate_facts(overall),
    }


def _rate_facts(found: Rates | None) -> Facts | None:
    if found is None:
        return None
    return {
        "rows": found.rows,
        "episodes": found.episodes,
        "commits": found.commits,
        "stored_bytes": found.stored_bytes,
    }


def _print_reading(console: "Console", facts: Facts) -> None:
    for line in _lines(facts, console.width):
        console.print(line)


def _is_terminal() -> bool:
    return sys.stdout.isatty()


def _write_line(facts: Facts) -> None:
    sys.stdout.write(_line(facts) + "\n")
    sys.stdout.flush()


def _line(facts: Facts) -> str:
    """A reading in one line."""
    now = facts["rates"]
    rate = f" ({format_rate(now['rows'], 'rows')})" if now else ""
    returns = f", return {_mean(facts['recent_returns'])}" if facts["recent_returns"] else ""
    rows, episodes = format_count(facts["rows"], "row"), format_count(facts["episodes_finished"], "episode")
    return f"{rows}{rate}, {episodes}{returns}, last commit {_ago(facts['seconds_since_commit'])}"


def _lines(facts: Facts, width: int) -> list[str]:
    now, mean = facts["rates"], facts["mean_rates"]
    n_open, n = len(facts["open_streams"]), facts["streams"]
    state = f"{n_open:,} of {format_count(n, 'stream')} open" if n_open else "no session is writing"
    lines = [printable(facts["url"]), f"  state        {state}; last commit {_ago(facts['seconds_since_commit'])}"]
    evicted = facts["rows_written"] - facts["rows"]
    gone = f", {evicted:,} evicted" if evicted else ""
    lines.append(f"  rows         {facts['rows']:,}{gone}{_rates(now, mean, 'rows', 'rows')}")
    lines.append(
        f"  episodes     {facts['episodes_finished']:,} finished{_rates(now, mean, 'episodes', 'episodes')}"
    )
    lines.append(f"  commits      {facts['commits']:,}{_rates(now, mean, 'commits', 'commits')}")
    if facts["stored_bytes"] is not None:
        lines.append(
            f"  disk         {format_bytes(facts['stored_bytes'])}{_rates(now, mean, 'stored_bytes', 'bytes')}"
        )
    for name in ("returns", "lengths"):
        values = facts[f"recent_{name}"]
        if values:
            lines += _curve(name, values, width)
    if facts["checkpoint"] is not None:
        lines.append(f"  checkpoint   {printable(facts['checkpoint'])}, {_ago(facts['seconds_since_checkpoint'])}")
    return lines


def _curve(name: str, values: list[float], width: int) -> list[str]:
    numbers = np.array(values, np.float64)
    line = sparkline(np.arange(len(numbers)), numbers, len(numbers), width=max(8, width - 17))
    finite = numbers[np.isfinite(numbers)]
    figures = f"mean {finite.mean():.4g}, from {finite.min():.4g} to {finite.max():.4g}" if len(finite) else "none"
    return [f"  {name:12} {figures}, of the last {len(values):,}", f"  {'':12} {line}"]


def _rates(now: Facts | None, mean: Facts | None, key: str, unit: str) -> str:
    if now is None or mean is None or now[key] is None:
        return ""
    return f"; {format_rate(now[key], unit)} now, {format_rate(mean[key], unit)} on average"


def _mean(values: list[float]) -> str:
    numbers = np.array(values, np.float64)
    finite = numbers[np.isfinite(numbers)]
    return f"{finite.mean():.4g}" if len(finite) else "?"


def _ago(seconds: float | None) -> str:
    return "never" if seconds is None else f"{format_age(seconds)} ago"
