"""Filter, sort and page the episodes of a table."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from trajstore.errors import DataError
from trajstore.format.episode_table import EpisodeTable
from trajstore.inspection.episode_columns import EpisodeColumns
from trajstore.inspection.filters import matches
from trajstore.schema import Array

MAX_SORT_KEYS = 16  # columns; each takes memory for all episodes
_KEPT_ORDERS = 4  # of different queries, 8 bytes an episode each


@dataclass(frozen=True, slots=True)
class EpisodePage:
    """Some of the episodes that match a query, in its order.

    Attributes:
        table: These episodes as a table, whose columns cost what the page is long.
        rows: Their positions in the whole table.
        offset: Matching episodes before this page.
        n_matching: All that match.
        n_episodes: All of the table.
    """

    table: EpisodeTable
    rows: Array
    offset: int
    n_matching: int
    n_episodes: int


class EpisodeQueries:
    """Answers queries about one episode table, and keeps columns and orders for the next query.

    A million episodes are filtered, sorted and paged in a fraction of a second. Only columns of text (``str``
    columns and free metadata) take seconds at that size, because they are read and parsed, once.

    Args:
        table: The episode table, of a snapshot or its history.
    """

    def __init__(self, table: EpisodeTable) -> None:
        self.columns = EpisodeColumns(table)
        self._orders: OrderedDict[tuple[str, str], Array] = OrderedDict()

    def page(self, *, where: str = "", sort: str = "", offset: int = 0, limit: int | None = 50) -> EpisodePage:
        """Some of the episodes that match a filter.

        Args:
            where: A filter, as in ``"return > 100 and end == terminated"``; see `filter_syntax`. Empty: all.
            sort: Columns, separated by commas, the most important first; ``-`` before a column sorts downwards.
                Episodes without a value come last. Empty, and among equals: the order of the table.
            offset: How many matching episodes to skip.
            limit: How many to return at most; None: all.

        Raises:
            DataError: The filter is malformed, a column does not exist, or there are more than 16 to sort by.
            ValueError: ``offset`` or ``limit`` is negative.
        """
        for name, value in (("offset", offset), ("limit", limit)):
            if value is not None and value < 0:
                raise ValueError(f"{name}: expected a count, got {value}")
        order = self.order(where=where, sort=sort)
        rows = order[offset : None if limit is None else offset + limit]
        table = self.columns.table
        return EpisodePage(table.take(rows), rows, min(offset, len(order)), len(order), len(table))

    def order(self, *, where: str = "", sort: str = "") -> Array:
        """Positions of all episodes that match a filter, in order; arguments as for `page`."""
        key = where.strip(), sort.strip()
        if key not in self._orders:
            self._orders[key] = self._find(*key)
            if len(self._orders) > _KEPT_ORDERS:
                self._orders.popitem(last=False)
        self._orders.move_to_end(key)
        return self._orders[key]

    def _find(self, where: str, sort: str) -> Array:
        keys: dict[str, bool] = {}
        for part in sort.split(",") if sort else ():
            name, is_downwards = _parse_sort_key(part)
            keys.setdefault(name, is_downwards)  # a column that comes again changes nothing
        if len(keys) > MAX_SORT_KEYS:
            raise DataError(f"sort: {len(keys):,} columns; at most {MAX_SORT_KEYS}")
        columns = [
            (self.columns[name], is_downwards) for name, is_downwards in keys.items()
        ]  # raises before any work
        chosen = np.flatnonzero(matches(self.columns, where))
        levels: list[Array] = []
        for column, is_downwards in columns:
            is_missing, values = (key[chosen] for key in column.sort_keys())
            levels += [is_missing, _reversed(values) if is_downwards else values]
        useful = [level for level in levels if level.dtype != bool or level.any()]
        if len(useful) == 1:
            return chosen[np.argsort(useful[0], kind="stable")]
        return chosen[np.lexsort(useful[::-1])] if useful else chosen


def query_episodes(
    table: EpisodeTable, *, where: str = "", sort: str = "", offset: int = 0, limit: int | None = 50
) -> EpisodePage:
    """Filter, sort and page a table once; see `EpisodeQueries.page`."""
    return EpisodeQueries(table).page(where=where, sort=sort, offset=offset, limit=limit)


def _parse_sort_key(text: str) -> tuple[str, bool]:
    name = text.strip()
    if not name.lstrip("-"):
        raise DataError(f"sort: expected columns separated by commas, got {text!r:.80}")
    return name.removeprefix("-"), name.startswith("-")


def _reversed(values: Array) -> Array:
    """Values in the opposite order: the complement of integers, which can't overflow, or the negative."""
    return -values if values.dtype.kind == "f" else ~values
