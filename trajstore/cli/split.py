"""The command ``split``: divide the episodes of a store among new stores."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

from trajstore.cli.exit_codes import FINE, UsageError, damage_of_a_store, usage_errors
from trajstore.cli.new_stores import Source, counted_bytes, parsed
from trajstore.cli.output import Facts, format_count, make_table, print_facts, printable
from trajstore.cli.parameters import Argument, AsJson, Option, StorageOptions, TargetOptions
from trajstore.cli.stores import check_url
from trajstore.inspection.episode_queries import EpisodeQueries
from trajstore.store.splitting import split
from trajstore.store.store import Store, Url
from trajstore.store.store import open as open_store

if TYPE_CHECKING:
    from rich.console import Console

_REST = "rest"


def split_store(
    source: Source,
    target: Annotated[
        list[str],
        Argument(
            "New stores, each with its share: a fraction (0.9 or 90%), a number of episodes, or 'rest'."
            " With --where, one or two stores without shares: for what matches, and for the rest.",
            "TARGET[=SHARE]...",
        ),
    ],
    where: Annotated[
        str, Option("--where", "Only episodes that match, such as 'return > 100'; as in 'ls'.", "FILTER")
    ] = "",
    seed: Annotated[int, Option("--seed", "Decides which episodes go where.")] = 0,
    storage_option: StorageOptions = None,
    target_option: TargetOptions = None,
    as_json: AsJson = False,
) -> int:
    """Split whole episodes of a store among new stores, such as one for training and one for validation.

    Episodes keep their handles, priorities and derived columns; checkpoints stay behind. The same seed and shares
    make the same parts of the same episodes.
    """
    options = parsed(storage_option, target_option)
    given = [parse_target(text) for text in target]
    hint = ", ".join(url for url, _ in given)
    with usage_errors(), damage_of_a_store(), counted_bytes(hint) as (progress, _):
        store = open_store(check_url(source), storage_options=options["storage_options"])
        parts, episodes = _shares(store, given, where)
        report = split(
            store,
            parts,
            episodes=episodes,
            seed=seed,
            target_options=options["target_options"],
            progress=progress,
        )
    print_facts({"seed": seed, "where": where or None} | asdict(report), _print_report, as_json)
    return FINE


def parse_target(text: str) -> tuple[str, str | None]:
    """Take ``URL=SHARE`` apart; the share is None if there is none."""
    url, equals, share = text.rpartition("=")
    if not equals or not (share == _REST or _is_number(share.removesuffix("%"))):
        return text, None
    return url, share


def _is_number(text: str) -> bool:
    return text.replace(".", "", 1).isascii() and text.replace(".", "", 1).isdecimal()


def _parse_share(share: str) -> float | int | None:
    if share == _REST:
        return None
    if share.endswith("%"):
        return float(share.removesuffix("%")) / 100
    return float(share) if "." in share else int(share)


def _shares(
    store: Store, given: Sequence[tuple[str, str | None]], where: str
) -> tuple[dict[Url, Any], Iterable[int] | None]:
    """The share of each new store, and the episodes to split; None for all."""
    urls = [check_url(url) for url, _ in given]
    if len(set(urls)) < len(urls):
        raise UsageError("TARGET: the new stores must have different URLs")
    matching = None
    if where:
        matching = [int(row) for row in EpisodeQueries(store.episodes).page(where=where, limit=None).rows]
    shares = [share for _, share in given]
    if all(share is not None for share in shares):
        return {url: _parse_share(share) for url, share in zip(urls, shares, strict=True) if share}, matching
    if matching is None or any(share is not None for share in shares) or len(urls) > 2:
        raise UsageError("TARGET: expected TARGET=SHARE for each, or --where and one or two targets without shares")
    chosen = set(matching)
    rest = [row for row in range(len(store)) if row not in chosen]
    return dict(zip(urls, (matching, rest), strict=False)), None


def _print_report(console: "Console", facts: Facts) -> None:
    table = make_table(f"Parts of {printable(facts['source'])}", "store", ">streams", ">episodes", ">steps")
    for part in facts["parts"]:
        counts = (f"{part[name]:,}" for name in ("n_streams", "n_episodes", "n_steps"))
        table.add_row(printable(part["url"]), *counts)
    console.print(table)
    if facts["n_left"]:
        console.print(f"{format_count(facts['n_left'], 'episode')} in none of them.")
