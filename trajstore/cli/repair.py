"""The command ``repair``: salvage what is intact in a damaged store."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

from trajstore.cli.exit_codes import FINE, PROBLEMS, usage_errors
from trajstore.cli.new_stores import Source, Target, counted_bytes, parsed
from trajstore.cli.output import MAX_LISTED, Facts, format_count, print_facts, printable
from trajstore.cli.parameters import AsJson, Option, StorageOptions, TargetOptions
from trajstore.cli.stores import check_url
from trajstore.store.repair import repair

if TYPE_CHECKING:
    from rich.console import Console


def repair_store(
    source: Source,
    target: Target,
    check: Annotated[bool, Option("--check/--no-check", "Verify the new store before it becomes one.")] = True,
    storage_option: StorageOptions = None,
    target_option: TargetOptions = None,
    as_json: AsJson = False,
) -> int:
    """Make a new store of everything that is intact in a damaged one, and say what was lost.

    The damaged store is only read. Exits with 1 if anything was lost.
    """
    with usage_errors(), counted_bytes(target) as (progress, _):
        options = parsed(storage_option, target_option)
        report = repair(check_url(source), check_url(target), check=check, progress=progress, **options)
    print_facts({"has_losses": report.has_losses} | asdict(report), _print_report, as_json)
    return PROBLEMS if report.has_losses else FINE


def _print_report(console: "Console", facts: Facts) -> None:
    _print_lines(console, "damaged", [f"{one['where']}: {one['what']}" for one in facts["damages"]], "dim")
    _print_lines(console, "mended", facts["mended"], "green")
    losses = {
        "lost stream": [f"{id_}: {why}" for id_, why in facts["lost_streams"].items()],
        "lost episode": [
            f"{one['stream']}/{one['episode']}: {format_count(one['n_steps'], 'step')}"
            for one in facts["lost_episodes"]
        ],
        "shortened episode": [
            f"{one['stream']}/{one['episode']}: to {format_count(one['n_steps'], 'step')}, {one['n_lost']:,} lost"
            for one in facts["shortened"]
        ],
        "lost metadata": [f"{stream}/{episode}" for stream, episode in facts["lost_metadata"]],
        "lost column": [f"'{name}' of stream {stream}" for stream, name in facts["lost_columns"]],
        "lost checkpoint": [f"{id_}: {why}" for id_, why in facts["lost_checkpoints"].items()],
    }
    for label, lines in losses.items():
        _print_lines(console, label, lines, "red")
    counts = ", ".join(format_count(facts[f"n_{noun}s"], noun) for noun in ("stream", "episode", "step"))
    verdict = "Lost what is listed above; kept" if facts["has_losses"] else "Nothing was lost; kept"
    style = "bold red" if facts["has_losses"] else "bold green"
    console.print(f"{verdict} {counts}: {printable(facts['url'])}", style=style, soft_wrap=True)


def _print_lines(console: "Console", label: str, lines: Sequence[str], style: str) -> None:
    for line in lines[:MAX_LISTED]:
        console.print(f"{label}: {printable(line)}", style=style, soft_wrap=True)
    if len(lines) > MAX_LISTED:
        console.print(f"{label}: and {len(lines) - MAX_LISTED:,} more; --json lists all", style=style)
