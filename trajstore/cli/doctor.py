"""The command ``doctor``: look for common mistakes in a store."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

from trajstore.cli.exit_codes import FINE, PROBLEMS, damage_of_a_store, usage_errors
from trajstore.cli.output import Facts, format_bytes, format_count, print_facts, printable, progress_bar
from trajstore.cli.parameters import AsJson, At, Option, StorageOptions, Url
from trajstore.cli.stores import open_snapshot
from trajstore.inspection.doctor.examination import examine

if TYPE_CHECKING:
    from rich.console import Console

_STYLES = {"error": "bold red", "warning": "yellow", "note": "cyan"}
_SHOWN = 5  # findings of one kind


def doctor(
    url: Url,
    max_bytes: Annotated[
        str, Option("--max-bytes", "Decode at most so much of the fields, in samples.", "SIZE")
    ] = "64MiB",
    strict: Annotated[bool, Option("--strict", "Exit with 1 for warnings too, not only for errors.")] = False,
    at: At = None,
    storage_option: StorageOptions = None,
    as_json: AsJson = False,
) -> int:
    """Look for common mistakes in a store or a dataset, and say what to do about each.

    Looks at the episode table, at how data are stored, and at samples of the values. Changes nothing. Exits with 1
    if there are errors, with which training goes wrong. `verify` checks whether the store is intact.
    """
    snapshot = open_snapshot(url, storage_option, at)
    with usage_errors(), damage_of_a_store(), progress_bar("fields") as progress:
        found = examine(snapshot, max_bytes=max_bytes, progress=progress)
    facts: Facts = {
        "url": snapshot.storage.display,
        "n_episodes": found.n_episodes,
        "n_rows": found.n_rows,
        "sampled_bytes": found.sampled_bytes,
        "counts": found.counts,
        "findings": [asdict(finding) | {"severity": finding.severity.label} for finding in found.findings],
    }
    print_facts(facts, _print_findings, as_json)
    is_bad = found.counts["error"] or (strict and found.counts["warning"])
    return PROBLEMS if is_bad else FINE


def _print_findings(console: "Console", facts: Facts) -> None:
    console.print(f"{printable(facts['url'])}\n")
    by_code: dict[str, list[Facts]] = {}
    for finding in facts["findings"]:
        by_code.setdefault(finding["code"], []).append(finding)
    for findings in by_code.values():
        _print_kind(console, findings)
    looked_at = f"{format_count(facts['n_episodes'], 'episode')} and {format_count(facts['n_rows'], 'row')}"
    console.print(f"Looked at {looked_at}; values of up to {format_bytes(facts['sampled_bytes'])}.")
    counts = [format_count(n, name) for name, n in facts["counts"].items() if n]
    console.print(f"{', '.join(counts)}." if counts else "Nothing found.", style="bold")


def _print_kind(console: "Console", findings: list[Facts]) -> None:
    """Print findings of one kind together: their reason and advice are the same."""
    first = findings[0]
    for finding in findings[:_SHOWN]:
        label, where = finding["severity"], printable(finding["where"])
        console.print(f"{label}: {where}: {printable(finding['what'])}", style=_STYLES[label])
    if len(findings) > _SHOWN:
        console.print(f"  and {format_count(len(findings) - _SHOWN, 'other')} like this; --json lists all")
    from rich.padding import Padding

    for text in (f"Why it matters: {first['why']}.", f"What to do: {first['advice']}. ({first['code']})"):
        console.print(Padding(printable(text), (0, 0, 0, 2)))
    console.print()
