"""The table of episodes: filtered, sorted and paged."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from trajstore.errors import CorruptionError
from trajstore.format.episode_table import EpisodeTable
from trajstore.inspection.episode_queries import EpisodeQueries
from trajstore.schema import Array

MAX_PAGE = 200  # rows of an answer
MAX_TEXT = 500  # characters of a cell


class EpisodeList:
    """Pages of an episode table. Thread-safe.

    Args:
        table: The table.
    """

    def __init__(self, table: EpisodeTable) -> None:
        self._queries = EpisodeQueries(table)
        self._asking = threading.Lock()  # queries keep columns and orders for each other
        self._columns = [name for name in table.columns if name != "metadata"]

    def page(self, *, where: str = "", sort: str = "", start: int = 0, n: int = 50) -> dict[str, Any]:
        """Rows ``[start, start + n)`` of the episodes that match, at most `MAX_PAGE`.

        Args:
            where: A filter; see `trajstore.inspection.filter_syntax`.
            sort: A column; ``-`` before it sorts downwards.
            start: How many matching episodes to skip.
            n: How many rows to give.

        Raises:
            DataError: The filter is malformed, or a column does not exist.
        """
        with self._asking:
            page = self._queries.page(where=where, sort=sort, offset=start, limit=min(n, MAX_PAGE))
        damaged: dict[str, str] = {}
        columns = [_read(page.table, name, damaged) for name in self._columns]
        return {
            "n_episodes": page.n_episodes,
            "n_found": page.n_matching,
            "start": page.offset,
            "columns": self._columns,
            "damaged": damaged,
            "rows": [dict(zip(self._columns, values, strict=True)) for values in zip(*columns, strict=True)],
        }


def _read(table: EpisodeTable, name: str, damaged: dict[str, str]) -> list[Any]:
    """The cells of a column; None, with the reason in ``damaged``, if it can't be read."""
    try:
        return _cells(table[name])
    except CorruptionError as error:
        damaged[name] = str(error)
        return [None] * len(table)


def _cells(column: Array) -> list[Any]:
    values = column.tolist()  # None where a masked column has no value
    if column.dtype == np.object_:
        return [value[:MAX_TEXT] if isinstance(value, str) else value for value in values]
    return list(values)
