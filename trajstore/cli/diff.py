"""The command ``diff``: what differs between two stores, or two checkpoints of one."""

import contextlib
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

from trajstore.cli.exit_codes import FINE, PROBLEMS, UsageError, damage_of_a_store, usage_errors
from trajstore.cli.listing import format_value
from trajstore.cli.output import Facts, format_bytes, format_count, make_table, print_facts, printable, progress_bar
from trajstore.cli.parameters import Argument, AsJson, At, Option, StorageOptions, Url
from trajstore.cli.stores import open_snapshot
from trajstore.inspection.differences import compare
from trajstore.store.checkpoints import list_checkpoints
from trajstore.store.snapshot import Snapshot

if TYPE_CHECKING:
    from rich.console import Console

_SHOWN = 10  # episodes or streams of a kind
_SIGNS = {"only in the first": "-", "only in the second": "+", "changed": "~"}


def diff(
    url: Url,
    other: Annotated[str | None, Argument("The other store. Without it, the same store.", "[OTHER]")] = None,
    at: At = None,
    other_at: Annotated[
        str | None, Option("--other-at", "Show the other store at this checkpoint.", "CHECKPOINT")
    ] = None,
    deep: Annotated[
        bool, Option("--deep", "Also compare metadata, derived columns and the bytes of all steps.")
    ] = False,
    storage_option: StorageOptions = None,
    as_json: AsJson = False,
) -> int:
    """Compare two stores, or two checkpoints of one store: schema, streams, episodes, checkpoints.

    Episodes are matched by their keys, which copies, packed and merged stores keep. Without --deep, no steps are
    read. Exits with 1 if something differs.
    """
    if other is None and at == other_at:
        raise UsageError("diff: give another store, or two checkpoints of this one with --at and --other-at")
    first = open_snapshot(url, storage_option, at)
    second = open_snapshot(url if other is None else other, storage_option, other_at)
    with usage_errors(), damage_of_a_store():
        checkpoints = (_checkpoint_ids(first), _checkpoint_ids(second)) if other is not None else ([], [])
        with progress_bar("bytes") if deep else contextlib.nullcontext() as progress:
            found = compare(first, second, checkpoints=checkpoints, deep=deep, progress=progress)
    facts: Facts = {
        "first": {"url": first.storage.display, "at": at},
        "second": {"url": second.storage.display, "at": other_at},
        "is_equal": found.is_empty,
        **asdict(found),
    }
    for name in ("only_first", "only_second"):
        facts[name] = [key._asdict() for key in getattr(found, name)]
    facts["changed"] = [asdict(episode) | {"key": episode.key._asdict()} for episode in found.changed]
    print_facts(facts, _print_differences, as_json)
    return FINE if found.is_empty else PROBLEMS


def _checkpoint_ids(snapshot: Snapshot) -> list[str]:
    return [checkpoint.id for checkpoint in list_checkpoints(snapshot.storage)]


def _print_differences(console: "Console", facts: Facts) -> None:
    for sign, name in (("-", "first"), ("+", "second")):
        at = f" at {facts[name]['at']}" if facts[name]["at"] else ""
        console.print(f"{sign} {printable(facts[name]['url'] + at)}", soft_wrap=True)
    console.print()
    _print_texts(console, "Schema", facts["schema"])
    _print_streams(console, facts["streams"])
    _print_episodes(console, facts)
    _print_texts(console, "Derived columns", facts["columns"])
    for sign, ids in zip("-+", facts["checkpoints"], strict=True):
        _print_keys(console, sign, f"{format_count(len(ids), 'checkpoint')} only here", ids, len(ids))
    if facts["is_deep"]:
        console.print(f"Compared {format_bytes(facts['n_bytes'])} of steps, decoded, in each.")
    compared = "" if facts["is_deep"] else "; steps and text were not read, see --deep"
    verdict = "Nothing differs" if facts["is_equal"] else "They differ"
    console.print(f"{verdict}{compared}.", style="bold green" if facts["is_equal"] else "bold red")


def _print_texts(console: "Console", title: str, texts: Sequence[str]) -> None:
    if texts:
        console.print(title, style="bold")
        for text in texts:
            console.print(f"  {printable(text)}")
        console.print()


def _print_streams(console: "Console", streams: Sequence[Facts]) -> None:
    if not streams:
        return
    console.print(f"Streams: {len(streams):,} differ", style="bold")
    for stream in streams[:_SHOWN]:
        changes = ", ".join(f"{c['name']} {_pair(c)}" for c in stream["changes"])
        console.print(f"  {_SIGNS[stream['kind']]} {printable(stream['id'])}{': ' * bool(changes)}{changes}")
    _print_rest(console, len(streams))
    console.print()


def _print_episodes(console: "Console", facts: Facts) -> None:
    counts = [facts[name] for name in ("n_equal", "n_changed", "n_only_first", "n_only_second")]
    console.print("Episodes", style="bold")
    console.print("  {:,} equal, {:,} changed, {:,} only in the first, {:,} only in the second".format(*counts))
    if facts["changed"]:
        table = make_table("", "episode", "what", "first", "second")
        for episode in facts["changed"][:_SHOWN]:
            key = f"{printable(episode['key']['stream'])}/{episode['key']['episode']}"
            for change in episode["changes"]:
                values = (format_value(change["name"], change[side]) for side in ("first", "second"))
                table.add_row(key, printable(change["name"]), *values)
            if episode["fields"]:
                table.add_row(key, f"bytes of {printable(', '.join(episode['fields']))}", "", "")
        console.print(table)
        _print_rest(console, facts["n_changed"])
    for sign, name in (("-", "only_first"), ("+", "only_second")):
        keys = [f"{key['stream']}/{key['episode']}" for key in facts[name]]
        _print_keys(console, sign, "", keys, facts[f"n_{name}"])
    console.print()


def _print_keys(console: "Console", sign: str, title: str, keys: Sequence[str], n: int) -> None:
    if not n:
        return
    if title:
        console.print(f"{sign} {title}", style="bold")
    for key in keys[:_SHOWN]:
        console.print(f"  {sign} {printable(key)}")
    _print_rest(console, n)


def _print_rest(console: "Console", n: int) -> None:
    if n > _SHOWN:
        console.print(f"  and {n - _SHOWN:,} more; --json lists up to 1,000")


def _pair(change: Facts) -> str:
    first, second = (format_value(change["name"], change[side]) for side in ("first", "second"))
    return f"{first} -> {second}"
