"""The commands ``evict`` and ``prune``, which remove parts of a store."""

from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

from trajstore.cli.exit_codes import FINE, UNCONFIRMED, UsageError, explain_interrupt, usage_errors
from trajstore.cli.output import (
    MAX_LISTED,
    Facts,
    format_bytes,
    format_count,
    make_table,
    print_facts,
    printable,
)
from trajstore.cli.parameters import AsJson, Option, StorageOptions, Url, parse_storage_options
from trajstore.cli.stores import check_url
from trajstore.store.evicting import EvictReport, evict
from trajstore.store.living_sessions import IDLE_S
from trajstore.store.pruning import PruneReport, prune

if TYPE_CHECKING:
    from rich.console import Console

Yes = Annotated[bool, Option("--yes", "Do it. Without, the command only says what it would do, and exits with 3.")]
DryRun = Annotated[bool, Option("--dry-run", "Only say what would be done, and exit with 0.")]
Idle = Annotated[
    float, Option("--idle-s", "A session that did not close counts as dead after so many seconds.", "SECONDS")
]
Grace = Annotated[float, Option("--grace-s", "Seconds that readers have to finish with what goes.", "SECONDS")]
_UNITS = {"s": 1, "min": 60, "h": 3600, "d": 86400}


def evict_steps(
    url: Url,
    steps: Annotated[int | None, Option("--steps", "Keep at most so many steps.")] = None,
    episodes: Annotated[int | None, Option("--episodes", "Keep at most so many episodes.")] = None,
    size: Annotated[str | None, Option("--bytes", "Keep at most so many bytes, such as 50GiB.", "SIZE")] = None,
    age: Annotated[str | None, Option("--age", "Keep steps that are younger, such as 12h or 7d.", "AGE")] = None,
    yes: Yes = False,
    dry_run: DryRun = False,
    idle_s: Idle = IDLE_S,
    grace_s: Grace = 10.0,
    storage_option: StorageOptions = None,
    as_json: AsJson = False,
) -> int:
    """Evict the oldest steps of a store that nobody is writing, until it keeps the limits.

    Rows that checkpoints list stay stored until these are removed, see 'prune'. A running buffer applies limits
    itself, so the command refuses a store that a session seems to write.
    """
    if steps is None and episodes is None and size is None and age is None:
        raise UsageError("evict: give at least one limit: --steps, --episodes, --bytes or --age")
    options = parse_storage_options(storage_option)

    def run(is_dry_run: bool) -> EvictReport:
        return evict(
            check_url(url),
            steps=steps,
            episodes=episodes,
            bytes=size,
            age_s=None if age is None else parse_age(age),
            dry_run=is_dry_run,
            idle_s=idle_s,
            grace_s=grace_s,
            storage_options=options,
        )

    hint = "what was evicted by then is hidden; 'trajstore prune' frees its storage"
    return _confirmed(run, "evict", hint, _print_evicted, yes=yes, dry_run=dry_run, as_json=as_json)


def prune_store(
    url: Url,
    keep_last: Annotated[
        int | None, Option("--keep-last", "Remove all checkpoints but so many, the newest.")
    ] = None,
    name: Annotated[
        list[str] | None, Option("--name", "Remove the checkpoints of this name or id. May be repeated.", "NAME")
    ] = None,
    abandoned: Annotated[
        bool, Option("--abandoned", "Remove streams that later sessions have abandoned as a whole.")
    ] = False,
    yes: Yes = False,
    dry_run: DryRun = False,
    idle_s: Idle = IDLE_S,
    grace_s: Grace = 10.0,
    storage_option: StorageOptions = None,
    as_json: AsJson = False,
) -> int:
    """Remove what a store no longer needs: leftovers, replaced originals, evicted rows; checkpoints if you say so.

    While a session writes the store, leftovers stay.
    """
    options = parse_storage_options(storage_option)

    def run(is_dry_run: bool) -> PruneReport:
        return prune(
            check_url(url),
            keep_last=keep_last,
            names=name or (),
            abandoned=abandoned,
            dry_run=is_dry_run,
            idle_s=idle_s,
            grace_s=grace_s,
            storage_options=options,
        )

    hint = "the store is whole; the same command removes the rest"
    return _confirmed(run, "prune", hint, _print_pruned, yes=yes, dry_run=dry_run, as_json=as_json)


def parse_age(text: str) -> float:
    """Parse a number of seconds, or a number with one of the units s, min, h and d.

    Raises:
        UsageError: The text is something else.
    """
    number = text.rstrip("abcdefghijklmnopqrstuvwxyz")
    unit = _UNITS.get(text[len(number) :] or "s")
    try:
        if unit is None:
            raise ValueError(text)
        return float(number) * unit
    except ValueError:
        raise UsageError(f"--age: expected a number with s, min, h or d, such as 12h, got {text!r:.40}") from None


def _confirmed(
    run: Callable[[bool], EvictReport | PruneReport],
    verb: str,
    hint: str,
    print_text: Callable[["Console", Facts], None],
    *,
    yes: bool,
    dry_run: bool,
    as_json: bool,
) -> int:
    """Do it if the caller said yes; otherwise only say what would be done."""
    is_dry_run = dry_run or not yes
    with usage_errors(), explain_interrupt(lambda: hint):
        report = run(is_dry_run)
    facts: Facts = asdict(report)
    is_refused = is_dry_run and not dry_run and _removes_something(report)

    def print_all(console: "Console", shown: Facts) -> None:
        console.print(printable(shown["url"]), soft_wrap=True)
        print_text(console, shown)
        if is_refused:
            console.print(f"Nothing was changed. To {verb}, give --yes.", style="bold")

    print_facts(facts, print_all, as_json)
    return UNCONFIRMED if is_refused else FINE


def _removes_something(report: EvictReport | PruneReport) -> bool:
    return bool(report.removed if isinstance(report, PruneReport) else report.n_steps or report.n_episodes)


def _print_evicted(console: "Console", facts: Facts) -> None:
    verb = "would be evicted" if facts["is_dry_run"] else "evicted"
    steps, episodes = format_count(facts["n_steps"], "step"), format_count(facts["n_episodes"], "episode")
    if not facts["n_steps"] and not facts["n_episodes"]:
        console.print("Nothing to evict: the store keeps the limits.")
        return
    console.print(f"{steps}, about {format_bytes(facts['n_bytes'])}, {verb}: {episodes} as a whole,")
    console.print(f"and the beginning of {format_count(facts['n_headless'], 'other')}.")
    if not facts["is_dry_run"]:
        chunks = format_count(facts["n_chunks_deleted"], "object")
        console.print(f"Deleted {chunks} and {format_count(facts['n_streams_removed'], 'whole stream')};")
        console.print("objects with rows that stay, or that a checkpoint lists, are kept.")


def _print_pruned(console: "Console", facts: Facts) -> None:
    removed = facts["removed"]
    if removed:
        title = "What would be removed" if facts["is_dry_run"] else "Removed"
        table = make_table(title, "what", "which", ">objects", ">size")
        for one in removed[:MAX_LISTED]:
            counts = f"{one['n_objects']:,}", format_bytes(one["n_bytes"])
            table.add_row(one["kind"], printable(one["name"]), *counts)
        console.print(table)
        if len(removed) > MAX_LISTED:
            console.print(f"and {len(removed) - MAX_LISTED:,} more; --json lists all")
    for reason in facts["kept"]:
        console.print(f"kept: {printable(reason)}", style="dim", soft_wrap=True)
    n_objects, n_bytes = (sum(one[name] for one in removed) for name in ("n_objects", "n_bytes"))
    console.print(
        f"{format_count(n_objects, 'object')}, {format_bytes(n_bytes)}." if removed else "Nothing to prune."
    )
