"""The command ``bench``: how fast this machine and this URL are, beside plain arrays in RAM."""

import importlib.util
import os
import platform
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import trajstore
from trajstore.cli.bench_cases import Bench, temporary_url
from trajstore.cli.exit_codes import FINE, UsageError, explain_interrupt, usage_errors
from trajstore.cli.output import Facts, make_table, print_facts, printable, progress_bar
from trajstore.cli.parameters import Argument, AsJson, Option, StorageOptions, parse_storage_options
from trajstore.cli.sparklines import bars
from trajstore.cli.stores import check_url
from trajstore.errors import MissingExtraError
from trajstore.storage import open_storage

if TYPE_CHECKING:
    from rich.console import Console

_MIN_SECONDS = 0.1
_BARS = ((-0.2, "#9aa5b1"), (0.2, "#2a6f97"))  # place and colour of the bars of plain RAM and of trajstore


def bench(
    url: Annotated[
        str, Argument("A directory or a prefix, where a store is made and removed. Not a store.", "URL")
    ],
    seconds: Annotated[float, Option("--seconds", "About how long to measure.", "SECONDS")] = 60.0,
    frames: Annotated[bool, Option("--frames", "Observations are frames of 84 x 84 instead of 64 floats.")] = False,
    plot: Annotated[str | None, Option("--plot", "Also draw the result to this PNG file.", "FILE.png")] = None,
    storage_option: StorageOptions = None,
    as_json: AsJson = False,
) -> int:
    """Measure appends, commits, samples and cold samples at a URL, beside plain arrays in RAM.

    Makes a store with a name of its own below the URL, and removes it at the end, also after Ctrl-C.
    """
    if not seconds >= _MIN_SECONDS:
        raise UsageError(f"--seconds: expected at least {_MIN_SECONDS:g}, got {seconds:g}")
    _check_plot(plot)
    check_url(url)
    start = time.perf_counter()
    with usage_errors(OSError), explain_interrupt(lambda: "the temporary store is removed"):
        options = parse_storage_options(storage_option)
        display = open_storage(url, options).display
        with temporary_url(url, options) as place, progress_bar("ms") as progress:

            def advance(passed: float) -> None:
                if progress is not None:
                    progress(min(round(passed * 1000), round(seconds * 1000)), round(seconds * 1000))

            measured = Bench(place, seconds, frames=frames, storage_options=options, advance=advance)
            figures = [asdict(f) | {"ratio": _ratio(f.stored, f.in_ram)} for f in measured.run()]
    facts: Facts = {
        "url": display,
        "trajstore": trajstore.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} processors",
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "frames": frames,
        "seconds": time.perf_counter() - start,
        "figures": figures,
    }
    if plot is not None:
        _draw(facts, plot)
    print_facts(facts, _print_figures, as_json)
    return FINE


def _ratio(stored: float, in_ram: float | None) -> float | None:
    return None if in_ram is None else stored / in_ram


def _check_plot(plot: str | None) -> None:
    """Refuse what would only fail after the measurement."""
    if plot is None:
        return
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingExtraError("--plot needs matplotlib: pip install 'trajstore[plot]'")
    path = Path(plot)
    if path.suffix.lower() != ".png":
        raise UsageError(f"--plot: expected a file that ends in .png, got {plot}")
    if path.exists() or not path.parent.is_dir():
        reason = "exists; choose another file, or remove it" if path.exists() else "is in no existing directory"
        raise UsageError(f"--plot: {plot} {reason}")


def _print_figures(console: "Console", facts: Facts) -> None:
    load = f", load {facts['load']:.1f}" if facts["load"] is not None else ""
    console.print(
        f"{printable(facts['url'])}: trajstore {facts['trajstore']}, {facts['machine']}{load}", soft_wrap=True
    )
    unicode = (console.encoding or "").lower().startswith("utf")
    table = make_table("", "what", "where", ">rate", "=unit", "=")
    width = max(8, min(40, console.width - 62))
    for figure in facts["figures"]:
        values = [figure["stored"], figure["in_ram"]]
        lines = bars([value for value in values if value is not None], width=width, unicode=unicode)
        table.add_row(figure["name"], "trajstore", _rate(values[0]), figure["unit"], lines[0])
        if values[1] is not None:
            table.add_row("", "plain RAM", _rate(values[1]), figure["unit"], lines[1])
    console.print(table)
    for figure in facts["figures"]:
        console.print(f"{figure['name']}: {figure['note']}.", style="dim")
    console.print(
        f"Took {facts['seconds']:.0f} s. Plain RAM keeps nothing, knows no episodes, and is lost with its process."
    )


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _draw(facts: Facts, path: str) -> None:
    """Draw the rates of each case as bars, relative to the faster of both."""
    from matplotlib.figure import Figure

    figures = facts["figures"][::-1]
    picture = Figure(figsize=(8, 1 + 0.7 * len(figures)), layout="constrained")
    axes = picture.add_subplot()
    for i, figure in enumerate(figures):
        values = {"plain RAM": figure["in_ram"], "trajstore": figure["stored"]}
        largest = max(value or 0 for value in values.values())
        for (name, value), (offset, colour) in zip(values.items(), _BARS, strict=True):
            if value:
                label = name if i == len(figures) - 1 else None
                axes.barh(i + offset, value / largest, 0.36, color=colour, label=label)
                axes.text(value / largest + 0.01, i + offset, f"{_rate(value)} {figure['unit']}", va="center")
    axes.set_yticks(range(len(figures)), [figure["name"] for figure in figures])
    axes.set_xlim(0, 1.35)
    axes.set_xticks([])
    axes.set_title(f"trajstore {facts['trajstore']} at {facts['url']}", loc="left", fontsize=10)
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    axes.legend(loc="lower right")
    picture.savefig(path, dpi=120)
