"""The command ``verify``: check a store and report all problems."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

from trajstore.cli.exit_codes import FINE, PROBLEMS, usage_errors
from trajstore.cli.output import Facts, format_bytes, format_count, print_facts, printable, progress_bar
from trajstore.cli.parameters import AsJson, At, Option, StorageOptions, Url, parse_storage_options
from trajstore.cli.stores import check_url
from trajstore.store.verify import verify

if TYPE_CHECKING:
    from rich.console import Console


def verify_store(
    url: Url,
    at: At = None,
    fast: Annotated[
        bool, Option("--fast", "Only check that the objects of steps, text and columns exist; do not read them.")
    ] = False,
    storage_option: StorageOptions = None,
    as_json: AsJson = False,
) -> int:
    """Check everything that readers rely on, and report all problems.

    Reads every record, span table and chunk, checks their checksums, and compares returns with rewards. Leftovers
    such as temporary files are listed as notes. Exits with 1 if there are problems.
    """
    with usage_errors(), progress_bar("chunks") as progress:
        options = parse_storage_options(storage_option)
        report = verify(check_url(url), fast=fast, at=at, progress=progress, storage_options=options)
    print_facts({"fast": fast, "is_clean": report.is_clean} | asdict(report), _print_report, as_json)
    return FINE if report.is_clean else PROBLEMS


def _print_report(console: "Console", facts: Facts) -> None:
    console.print(printable(facts["url"]))
    for found, style in ((facts["problems"], "red"), (facts["notes"], "dim")):
        for item in found:
            label = "problem" if style == "red" else "note"
            line = f"{label}: {printable(item['where'])}: {printable(item['what'])}"
            console.print(line, style=style, soft_wrap=True)
    counts = facts["counts"]
    checked = ", ".join(format_count(counts[f"{noun}s"], noun) for noun in ("stream", "episode", "row", "chunk"))
    console.print(f"Checked {checked}; {format_bytes(counts['bytes'])} {'not read' if facts['fast'] else 'read'}.")
    n = len(facts["problems"])
    verdict = f"{format_count(n, 'problem')}." if n else "No problems."
    console.print(verdict, style="bold red" if n else "bold green")
