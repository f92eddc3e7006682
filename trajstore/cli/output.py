"""Print the results of commands: as JSON, or as tables and text for people."""

import contextlib
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

Facts = dict[str, Any]  # the result of a command, in values that JSON can hold
Progress = Callable[[int, int], None]  # called with the number done and the total
MAX_LISTED = 40  # rows of a table of streams or checkpoints
_PIPE_WIDTH = 240  # columns if the output is not a terminal


def print_facts(facts: Facts, print_text: Callable[["Console", Facts], None], as_json: bool) -> None:
    """Print facts on stdout: as one JSON document, or with ``print_text``."""
    if as_json:
        sys.stdout.write(json.dumps(_replace_nonfinite(facts), indent=2, allow_nan=False) + "\n")
        return
    from rich.console import Console

    width = None if sys.stdout.isatty() else _PIPE_WIDTH
    print_text(Console(width=width, highlight=False, markup=False, emoji=False), facts)


def write_json_line(facts: Facts) -> None:
    """Print facts on stdout as JSON in one line, at once."""
    sys.stdout.write(json.dumps(_replace_nonfinite(facts), allow_nan=False) + "\n")
    sys.stdout.flush()


def _replace_nonfinite(value: Any) -> Any:
    """Replace NaN and infinities, which JSON does not have, by null."""
    if isinstance(value, Mapping):
        return {key: _replace_nonfinite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_replace_nonfinite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextlib.contextmanager
def progress_bar(unit: str) -> Iterator[Progress | None]:
    """Show a progress bar on stderr, and yield the function that moves it. Yield None if stderr is no terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    done = DownloadColumn(binary_units=True) if unit == "bytes" else MofNCompleteColumn()
    columns = (unit, BarColumn(None), done, TextColumn("{task.fields[rate]}"), TimeRemainingColumn())
    with Bar(*columns, console=Console(stderr=True), transient=True, expand=True) as bar:
        task = bar.add_task(unit, total=None, rate="")

        def move(n_done: int, total: int) -> None:
            bar.update(task, completed=n_done, total=total, rate=format_rate(bar.tasks[0].speed, unit))

        yield move


def format_rate(speed: float | None, unit: str) -> str:
    """Return how many a second, such as ``1,234/s`` or ``3.2 MiB/s``; empty if it is not known yet."""
    if speed is None:
        return ""
    if unit == "bytes":
        return f"{format_bytes(speed)}/s"
    return f"{speed:,.0f}/s" if speed >= 10 else f"{speed:.2g}/s"


def make_table(title: str, *columns: str) -> "Table":
    """Create a table. ``>`` before a heading aligns the column right; ``>`` and ``=`` keep cells on one line."""
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in columns:
        justify: Any = "right" if column[0] == ">" else "left"
        table.add_column(column.lstrip(">="), justify=justify, overflow="fold", no_wrap=column[0] in ">=")
    return table


def printable(text: object) -> str:
    """Replace control characters: text from a store must not control the terminal."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in str(text))


def format_count(n: int, noun: str) -> str:
    """Return a number and its noun, such as ``1 step`` or ``2,000 steps``."""
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


def format_dtype(field: Facts) -> str:
    shape = f"[{','.join(map(str, field['shape']))}]" if field["shape"] else ""
    return f"{field['dtype']}{shape}"


def format_time(seconds: float | None) -> str:
    """Return seconds since 1970 as date and minute in UTC; ``?`` for values that are no time."""
    try:
        return datetime.fromtimestamp(float(seconds or 0), UTC).strftime("%Y-%m-%d %H:%M")
    except (OverflowError, ValueError, OSError):
        return "?"


def format_age(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0, seconds):.0f} s"


def format_seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.3g} ms"


def format_bytes(n: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n < 1024:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:.1f} TiB"
