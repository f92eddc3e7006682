"""The HTML and the text of episodes and of episode tables."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np

from trajstore.html_blocks import Section, count, facts, moment, representation, table
from trajstore.schema import Array

_SHOWN = 4  # episodes from each end of a table
_MAX_COLUMNS = 16
_MAX_JSON = 4000


class Episodes(Protocol):
    """What these functions need of an episode table."""

    @property
    def columns(self) -> tuple[str, ...]: ...
    @property
    def summaries(self) -> tuple[str, ...]: ...
    def __len__(self) -> int: ...
    def __getitem__(self, name: str) -> Array: ...
    def codes(self, name: str) -> tuple[Array, Array]: ...
    def take(self, rows: Sequence[int]) -> Episodes: ...


class EpisodeRow(dict[str, Any]):
    """One episode of a table as a dict, which notebooks show as a table."""

    def _repr_html_(self) -> str:
        names = [name for name in self if name != "metadata"]
        metadata = self.get("metadata") or {}
        title = f"{self.get('episode')} of {self.get('stream')}"
        return representation(
            "Episode", title, partial(_row_summary, self), [
                lambda: Section("Columns", "", facts((n, _shown(n, self[n])) for n in names), is_open=True),
                lambda: Section("Metadata", count(len(metadata), "key"), _metadata(metadata)),
            ],
        )  # fmt: skip


def _row_summary(row: dict[str, Any]) -> str:
    state = ", evicted" if row.get("is_evicted") else ""
    state += ", abandoned" if row.get("is_abandoned") else ""
    state += ", its first steps are evicted" if row.get("is_headless") else ""
    return f"{count(row['length'], 'step')}, return {row['return']:.6g}, {row['end']}{state}"


def _metadata(metadata: dict[str, Any]) -> str:
    return facts((name, _as_json(value)) for name, value in metadata.items()) if metadata else ""


def _as_json(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)[:_MAX_JSON]


def _shown(name: str, value: Any) -> str:
    """A value of a column, as people read it."""
    if value is None or value is np.ma.masked:
        return "—"
    if name == "time":
        return moment(float(value))
    if isinstance(value, dict):
        return ", ".join(f"{key}={_as_json(inner)}" for key, inner in value.items())
    if isinstance(value, (float, np.floating)):
        return f"{value:.6g}"
    return str(value)


def table_html(episodes: Episodes, schema_columns: Sequence[str]) -> str:
    """The HTML of an episode table: what all episodes have in common, and the first and last of them."""
    return representation(
        "EpisodeTable", "", lambda: table_summary(episodes), [
            lambda: statistics_section(episodes),
            lambda: _first_and_last(episodes, schema_columns),
            lambda: _columns_section(episodes),
        ],
    )  # fmt: skip


def table_summary(episodes: Episodes) -> str:
    return f"{count(len(episodes), 'episode')}, {count(int(episodes['length'].sum()), 'step')}"


def statistics_section(episodes: Episodes) -> Section:
    """Lengths, returns and ends of all episodes."""
    summary = table_summary(episodes)
    if not len(episodes):
        return Section("Episodes", summary)
    codes, labels = episodes.codes("end")
    numbers = np.bincount(codes, minlength=len(labels))
    ends = ", ".join(f"{n:,} {label}" for label, n in zip(labels.tolist(), numbers.tolist(), strict=True) if n)
    times, headless = episodes["time"], int(episodes["is_headless"].sum())
    pairs = [
        ("ended", ends),
        ("length", _five_numbers(episodes["length"])),
        ("return", _five_numbers(episodes["return"])),
        ("first", moment(float(times.min()))),
        ("last", moment(float(times.max()))),
        ("headless", f"{headless:,}, whose first steps are evicted" if headless else None),
    ]
    return Section("Episodes", summary, facts(pairs), is_open=True)


def _five_numbers(values: Array) -> str:
    known = values[np.isfinite(values)]
    if not len(known):
        return "none"
    missing = f"; {len(values) - len(known):,} without" if len(known) < len(values) else ""
    return (
        f"{known.min():,.6g} to {known.max():,.6g}, median {float(np.median(known)):,.6g},"
        f" mean {float(known.mean()):,.6g}{missing}"
    )


def _first_and_last(episodes: Episodes, declared: Sequence[str]) -> Section:
    n = len(episodes)
    rows = list(range(n)) if n <= 2 * _SHOWN else [*range(_SHOWN), *range(n - _SHOWN, n)]
    names = ["episode", "length", "return", "end", "time", *declared, "metadata"][:_MAX_COLUMNS]
    title = "All" if n <= 2 * _SHOWN else "First and last"
    if not n:
        return Section("All", "no episodes")
    part = episodes.take(rows)
    columns: list[Callable[[int], str]] = [partial(_cell, name, part[name]) for name in names]
    cells = [[f"{row:,}", *(cell(i) for cell in columns)] for i, row in enumerate(rows)]
    if n > 2 * _SHOWN:
        cells.insert(_SHOWN, ["…"] * (1 + len(names)))
    headings = [">row", *(f">{name}" if name in ("episode", "length", "return") else name for name in names)]
    return Section(title, "", table(headings, cells), is_open=True)


def _cell(name: str, column: Array, i: int) -> str:
    return _shown(name, column[i])


def _columns_section(episodes: Episodes) -> Section:
    names = (*episodes.columns, *episodes.summaries)
    return Section("Columns", f"{len(names)}", facts([("columns", ", ".join(names))]))
