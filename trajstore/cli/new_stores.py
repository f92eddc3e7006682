"""The commands ``copy`` and ``merge``, which make a new store of existing ones."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

from trajstore.cli.exit_codes import FINE, explain_interrupt, usage_errors
from trajstore.cli.output import (
    Facts,
    Progress,
    format_bytes,
    format_count,
    make_table,
    print_facts,
    printable,
    progress_bar,
)
from trajstore.cli.parameters import Argument, AsJson, At, StorageOptions, TargetOptions, parse_storage_options
from trajstore.cli.stores import check_url
from trajstore.store.copying import copy
from trajstore.store.merging import merge

if TYPE_CHECKING:
    from rich.console import Console

Source = Annotated[str, Argument("The store: a directory, or a URL.", "SOURCE")]
Target = Annotated[str, Argument("Where the new store is made: an empty location.", "TARGET")]


def copy_store(
    source: Source,
    target: Target,
    at: At = None,
    storage_option: StorageOptions = None,
    target_option: TargetOptions = None,
    as_json: AsJson = False,
) -> int:
    """Copy a store to another place. Others may write to it.

    With --at, only copies what a checkpoint shows, and that checkpoint. Chunks are not decoded. The copy becomes a
    store when everything is copied; after an interruption, give the same command again.
    """
    with usage_errors(), counted_bytes(target) as (progress, counted):
        options = parsed(storage_option, target_option)
        store = copy(check_url(source), check_url(target), at=at, progress=progress, **options)
    facts: Facts = {
        "url": store.url,
        "n_streams": len(store.streams),
        "n_episodes": len(store),
        "n_steps": int(store.episodes["length"].sum()),
        "n_checkpoints": len(store.checkpoints),
        "n_bytes": counted["bytes"],
    }
    print_facts(facts, _print_copy, as_json)
    return FINE


def merge_stores(
    target: Target,
    source: Annotated[list[str], Argument("The stores to merge.", "SOURCE...")],
    storage_option: StorageOptions = None,
    target_option: TargetOptions = None,
    as_json: AsJson = False,
) -> int:
    """Merge stores of one schema into a new store. The sources are only read.

    Episodes keep their handles, ends, final values, metadata, priorities and derived columns. Checkpoints belong to
    one run and stay behind. Chunks are not decoded.
    """
    with usage_errors(), counted_bytes(target) as (progress, _):
        sources = [check_url(url) for url in source]
        report = merge(check_url(target), sources, progress=progress, **parsed(storage_option, target_option))
    print_facts(asdict(report), _print_merge, as_json)
    return FINE


def parsed(storage_option: StorageOptions, target_option: TargetOptions) -> dict[str, Any]:
    """Keyword arguments of functions that read one place and write another."""
    return {
        "storage_options": parse_storage_options(storage_option),
        "target_options": parse_storage_options(target_option),
    }


@contextmanager
def counted_bytes(target: str) -> Iterator[tuple[Progress, Mapping[str, int]]]:
    """Show progress in bytes, and count them; says after a Ctrl-C that the target is no store yet."""
    counted = {"bytes": 0}
    with explain_interrupt(lambda: restart_hint(target)), progress_bar("bytes") as shown:

        def progress(done: int, total: int) -> None:
            counted["bytes"] = done
            if shown is not None:
                shown(done, total)

        yield progress, counted


def restart_hint(target: str) -> str:
    return f"{target} is not a store yet, and the source is unchanged; the same command begins again"


def _print_copy(console: "Console", facts: Facts) -> None:
    nouns = ("stream", "episode", "step", "checkpoint")
    counts = ", ".join(format_count(facts[f"n_{noun}s"], noun) for noun in nouns)
    console.print(f"Copied {counts}; {format_bytes(facts['n_bytes'])}: {printable(facts['url'])}", soft_wrap=True)


def _print_merge(console: "Console", facts: Facts) -> None:
    table = make_table("Merged stores", "source", ">streams", ">episodes", ">steps", ">size")
    for one in facts["sources"]:
        counts = (f"{one[name]:,}" for name in ("n_streams", "n_episodes", "n_steps"))
        table.add_row(printable(one["url"]), *counts, format_bytes(one["n_bytes"]))
    console.print(table)
    for one in facts["sources"]:
        url = printable(one["url"])
        for old, new in one["renamed"].items():
            line = f"{url}: stream {old} is now {new}: an earlier store has another stream of this id"
            console.print(line, soft_wrap=True)
        if one["repeated"]:
            n = format_count(len(one["repeated"]), "stream")
            console.print(f"{url}: {n} left out, because an earlier store has the same", soft_wrap=True)
        if one["n_checkpoints"]:
            n = format_count(one["n_checkpoints"], "checkpoint")
            console.print(f"{url}: {n} left behind: they belong to one run", soft_wrap=True)
    console.print(f"Made {printable(facts['url'])}", soft_wrap=True)
