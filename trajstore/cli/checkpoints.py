"""The commands ``checkpoints``, ``redistribute`` and ``request-checkpoint``."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import trajstore
from trajstore.cli.exit_codes import FINE, damage_of_a_store, usage_errors
from trajstore.cli.output import MAX_LISTED, Facts, format_count, format_time, make_table, print_facts, printable
from trajstore.cli.parameters import AsJson, Option, StorageOptions, Url, parse_storage_options
from trajstore.cli.stores import check_url, open_snapshot
from trajstore.store.checkpoints import Checkpoint, list_checkpoints

if TYPE_CHECKING:
    from rich.console import Console

_WIDE = 110  # columns of a terminal that has room for everything


def checkpoints(url: Url, storage_option: StorageOptions = None, as_json: AsJson = False) -> int:
    """List the checkpoints of a store, oldest first."""
    storage = open_snapshot(url, storage_option).storage
    with damage_of_a_store():
        found = list_checkpoints(storage)
    facts = {"url": storage.display, "checkpoints": [checkpoint_facts(c) for c in found]}
    print_facts(facts, lambda console, shown: print_checkpoints(console, shown["checkpoints"]), as_json)
    return FINE


def redistribute(
    url: Url,
    ranks: Annotated[int, Option("--ranks", "Number of ranks that will continue.")] = 1,
    checkpoint: Annotated[
        str, Option("--checkpoint", "The checkpoint: its name or id, or 'latest'.", "CHECKPOINT")
    ] = "latest",
    policy: Annotated[
        str, Option("--policy", "How to assign episodes: steps, episodes, contiguous or interleaved.")
    ] = "steps",
    incomplete: Annotated[
        str, Option("--incomplete", "What to do with open, headless and cut episodes: keep, drop or truncate.")
    ] = "keep",
    storage_option: StorageOptions = None,
    as_json: AsJson = False,
) -> int:
    """Show which episodes of a checkpoint each rank would get. Changes nothing, and reads no steps."""
    with usage_errors():
        plan = trajstore.redistribute(
            check_url(url),
            checkpoint=checkpoint,
            world_size=ranks,
            policy=policy,  # type: ignore[arg-type]
            incomplete=incomplete,
            storage_options=parse_storage_options(storage_option),
        )
    print_facts({"checkpoint": plan.checkpoint} | asdict(plan.report), _print_partitions, as_json)
    return FINE


def request_checkpoint(
    url: Url,
    name: Annotated[str, Option("--name", "Name of the checkpoint.")] = "requested",
    storage_option: StorageOptions = None,
    as_json: AsJson = False,
) -> int:
    """Ask the session that writes a store for a checkpoint.

    Leaves a request in the store and does not wait. The session takes the checkpoint in the background, with all
    its ranks.
    """
    with usage_errors():
        options = parse_storage_options(storage_option)
        world = trajstore.request_checkpoint(check_url(url), name, storage_options=options)
    print_facts({"name": name, "world": world}, _print_request, as_json)
    return FINE


def checkpoint_facts(checkpoint: Checkpoint) -> Facts:
    extents = checkpoint.streams.values()
    return {
        "id": checkpoint.id,
        "name": checkpoint.name,
        "created_at": checkpoint.created_at,
        "parent": checkpoint.parent,
        "ranks": checkpoint.n_ranks or 1,
        "streams": len(extents),
        "rows": sum(extent.stop - extent.first for extent in extents),
    }


def print_checkpoints(console: "Console", found: Sequence[Facts]) -> None:
    """Print a table of checkpoints, given as their facts."""
    if not found:
        console.print("No checkpoints.\n")
        return
    is_wide = console.width >= _WIDE
    ranks, parent = ((">ranks",), ("parent",)) if is_wide else ((), ())
    headings = ("=name", "=created (UTC)", *ranks, ">streams", ">rows", "id", *parent)
    table = make_table(f"Checkpoints: {len(found):,}", *headings)
    for c in found[-MAX_LISTED:]:
        counts = f"{c['ranks']:,}", f"{c['streams']:,}", f"{c['rows']:,}"
        cells = [format_time(c["created_at"]), *counts, c["id"], printable(c["parent"] or "")]
        if not is_wide:
            cells = [cells[0][5:], *cells[2:5]]  # without the year, the ranks and the parent
        table.add_row(printable(c["name"]), *cells)
    console.print(table)
    if len(found) > MAX_LISTED:
        console.print(f"and {len(found) - MAX_LISTED:,} older ones; --json lists all\n")


def _print_partitions(console: "Console", facts: Facts) -> None:
    title = f"{facts['n_sources']} -> {len(facts['ranks'])} ranks, by {facts['policy']}: {facts['checkpoint']}"
    table = make_table(title, ">rank", ">episodes", ">steps", ">open", ">headless", ">cut")
    for rank, counts in enumerate(facts["ranks"]):
        flagged = [f"{counts[cause]['episodes']:,}" for cause in ("open", "headless", "cut")]
        table.add_row(f"{rank:,}", f"{counts['episodes']:,}", f"{counts['steps']:,}", *flagged)
    console.print(table)
    for kind in ("dropped", "truncated"):
        for cause, by_rank in facts[kind].items():
            n, steps = (sum(counts[what] for counts in by_rank) for what in ("episodes", "steps"))
            if n:
                console.print(f"{kind}, {cause}: {format_count(n, 'episode')} of {format_count(steps, 'step')}")


def _print_request(console: "Console", facts: Facts) -> None:
    world, name = printable(facts["world"]), printable(facts["name"])
    console.print(f"Requested checkpoint '{name}' from '{world}'.")
