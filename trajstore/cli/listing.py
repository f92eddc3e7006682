"""The command ``ls``: list the episodes of a store."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

from trajstore.cli.exit_codes import FINE, UsageError, damage_of_a_store, usage_errors
from trajstore.cli.output import Facts, format_count, format_time, make_table, print_facts, printable
from trajstore.cli.parameters import AsJson, At, Option, StorageOptions, Url
from trajstore.cli.stores import open_snapshot
from trajstore.inspection.episode_columns import FREE_PREFIX, ROW
from trajstore.inspection.episode_queries import EpisodePage, EpisodeQueries
from trajstore.schema import Array

if TYPE_CHECKING:
    from rich.console import Console

_ALWAYS = (ROW, "episode", "length", "return", "end", "time")
# Shown if they differ between episodes, or are true.
_IF_USED = ("is_evicted", "is_abandoned", "stream", "env", "has_final", "is_headless")
_FLAGS = ("is_evicted", "is_abandoned", "is_headless")
_MAX_TEXT = 40  # characters of a cell
_MIN_METADATA = 16  # characters for metadata that are cut to fit
_GAP = 2  # spaces between columns
_NUMERIC = "iuf"


def list_episodes(
    url: Url,
    where: Annotated[
        str, Option("--where", "Only episodes that match, such as 'return > 100 and end == terminated'.", "FILTER")
    ] = "",
    sort: Annotated[
        str, Option("--sort", "Columns to sort by, such as -return,length; '-' sorts downwards.", "COLUMNS")
    ] = "",
    limit: Annotated[int, Option("--limit", "Episodes to list at most; 0: all.")] = 40,
    offset: Annotated[int, Option("--offset", "Matching episodes to skip.")] = 0,
    columns: Annotated[
        str | None, Option("--columns", "Columns to show, such as row,return,task,metadata.seed.", "COLUMNS")
    ] = None,
    evicted: Annotated[bool, Option("--evicted", "Also list evicted and abandoned episodes.")] = False,
    at: At = None,
    storage_option: StorageOptions = None,
    as_json: AsJson = False,
) -> int:
    """List episodes: filtered, sorted, and a page at a time.

    A filter compares columns with numbers, text, dates or each other, and joins comparisons by and, or, not and
    brackets. It may also ask whether text contains "...", whether a column is in (a, b), and whether it is null.
    """
    snapshot = open_snapshot(url, storage_option, at)
    with usage_errors(), damage_of_a_store():
        table = snapshot.history(abandoned=True) if evicted else snapshot.episodes
        queries = EpisodeQueries(table)
        by = [name.strip().removeprefix("-") for name in sort.split(",") if name.strip()]
        names = _chosen_columns(queries, columns, by)
        page = queries.page(where=where, sort=sort, offset=offset, limit=limit or None)
        shown = {name: _values(page, name) for name in names}
    facts: Facts = {
        "url": snapshot.storage.display,
        "n_episodes": page.n_episodes,
        "n_matching": page.n_matching,
        "offset": page.offset,
        "episodes": [dict(zip(shown, row, strict=True)) for row in zip(*shown.values(), strict=True)],
    }
    first = names if columns is not None else [*dict.fromkeys((*_ALWAYS, *by))]
    print_facts(facts, lambda console, f: _print_page(console, f, first, is_chosen=columns is not None), as_json)
    return FINE


def _chosen_columns(queries: EpisodeQueries, columns: str | None, by: Sequence[str]) -> list[str]:
    known = queries.columns
    if columns is None:
        return [*dict.fromkeys((ROW, *known.table.columns, *(name for name in by if name in known)))]
    names = [name.strip() for name in columns.split(",") if name.strip()]
    if not names:
        raise UsageError(f"--columns: expected columns separated by commas, got {columns!r:.80}")
    for name in names:
        if name not in known and name != "metadata":
            raise known.unknown(name)
    return list(dict.fromkeys(names))


def _values(page: EpisodePage, name: str) -> list[Any]:
    """A column of a page in values that JSON can hold; None where an episode has no value."""
    if name == ROW and ROW not in page.table.columns:
        return [int(row) for row in page.rows]
    if name.startswith(FREE_PREFIX) and name not in page.table.columns:
        return [metadata.get(name.removeprefix(FREE_PREFIX)) for metadata in page.table["metadata"]]
    values: Array = page.table[name]
    return list(values.tolist())


def _print_page(console: "Console", facts: Facts, first: Sequence[str], *, is_chosen: bool) -> None:
    episodes = facts["episodes"]
    if not episodes:
        n = facts["n_episodes"]
        reason = "match" if n and facts["n_matching"] == 0 else "are left at this offset"
        console.print(f"None of {format_count(n, 'episode')} {reason}." if n else "No episodes yet.")
        return
    names = list(episodes[0]) if is_chosen else _worth_showing(episodes, first)
    cells = {name: [format_value(name, episode[name]) for episode in episodes] for name in names}
    fitting = cells if is_chosen else _fitting(cells, console.width)
    texts = [name for name in fitting if not _is_number(name, episodes)]
    headings = (printable(name) if name in texts else ">" + printable(name) for name in fitting)
    out = make_table(_title(facts), *headings)
    for row in zip(*fitting.values(), strict=True):
        out.add_row(*row)
    console.print(out)
    if left_out := [name for name in names if name not in fitting]:
        console.print(f"Not shown: {printable(', '.join(left_out))}; see --columns and --json", soft_wrap=True)
    if (next_ := facts["offset"] + len(episodes)) < facts["n_matching"]:
        console.print(f"{facts['n_matching'] - next_:,} more; --offset {next_} continues")


def _title(facts: Facts) -> str:
    first, n = facts["offset"], len(facts["episodes"])
    of = f"{facts['n_matching']:,}"
    if facts["n_matching"] < facts["n_episodes"]:
        of += f" that match, of {facts['n_episodes']:,}"
    return f"Episodes {first:,} to {first + n - 1:,} of {of}" if n < facts["n_matching"] else f"Episodes: {of}"


def _worth_showing(episodes: Sequence[Mapping[str, Any]], first: Sequence[str]) -> list[str]:
    """The first columns, those that say something about these episodes, and those that users declared."""
    fixed = {*first, *_IF_USED}
    used = [
        name
        for name in _IF_USED
        if name not in first
        and name in episodes[0]
        and (len({str(e[name]) for e in episodes}) > 1 or _is_flagged(name, episodes))
    ]
    others = [
        name for name in episodes[0] if name not in fixed and any(e[name] not in (None, {}) for e in episodes)
    ]
    return [
        *first,
        *used,
        *(name for name in others if name != "metadata"),
        *("metadata" in others) * ["metadata"],
    ]


def _is_flagged(name: str, episodes: Sequence[Mapping[str, Any]]) -> bool:
    return name in _FLAGS and any(e[name] for e in episodes)


def _is_number(name: str, episodes: Sequence[Mapping[str, Any]]) -> bool:
    kinds = {type(e[name]) for e in episodes} - {type(None)}
    return name != "time" and bool(kinds) and kinds <= {int, float}


def _fitting(cells: Mapping[str, Sequence[str]], width: int) -> dict[str, Sequence[str]]:
    """As many of the columns as fit, in their order; metadata are cut to the room that is left."""
    fitting: dict[str, Sequence[str]] = {}
    used = _GAP
    for name, values in cells.items():
        needed, room = max(len(name), *map(len, values)), width - used - _GAP
        if name == "metadata" and needed > room >= _MIN_METADATA:
            values = [text if len(text) <= room else f"{text[: room - 1]}…" for text in values]
            needed = room
        if needed <= room:
            fitting[name] = values
            used += needed + _GAP
    return fitting or dict(list(cells.items())[:1])


def format_value(name: str, value: Any) -> str:
    """Return one value of an episode as short text."""
    if value is None:
        return ""
    if name == "time":
        return format_time(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return "" if np.isnan(value) else f"{value:.6g}"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, Mapping):
        value = ", ".join(f"{key}: {format_value('', inner)}" for key, inner in value.items())
    text = printable(value)
    return text if len(text) <= _MAX_TEXT or name == "stream" else f"{text[: _MAX_TEXT - 1]}…"
