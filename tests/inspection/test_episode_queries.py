"""Queries of the episode table: filter, order, page."""

from __future__ import annotations

import uuid

import numpy as np
import pytest

import trajstore
from trajstore import DataError, EpisodeNotFoundError, Field, Schema
from trajstore.format.episode_table import EpisodeTable
from trajstore.inspection.episode_queries import EpisodeQueries, query_episodes

SCHEMA = Schema({"reward": Field("float32")}, episode={"score": float, "task": str, "seed": int})
RETURNS = [3.0, 1.0, 2.0, 1.0, float("nan"), 5.0]
SCORES = [1.0, None, 3.0, 2.0, 0.0, None]


@pytest.fixture(scope="module")
def table() -> EpisodeTable:
    store = trajstore.create(f"memory://queries-{uuid.uuid4().hex}", SCHEMA)
    with store.writer(commit_seconds=None) as writer:
        for i, (value, score) in enumerate(zip(RETURNS, SCORES, strict=True)):
            metadata = {"task": "ba"[i % 2], "seed": -i, "padding": "x" * 50_000}
            metadata |= {} if score is None else {"score": score}
            writer.append_episode({"reward": np.array([value], np.float32)}, terminated=True, metadata=metadata)
    return store.refresh().episodes


@pytest.mark.parametrize(
    ("sort", "rows"),
    [
        ("", [0, 1, 2, 3, 4, 5]),
        ("return", [1, 3, 2, 0, 5, 4]),  # NaN last, equals in the table's order
        ("-return", [5, 0, 2, 1, 3, 4]),
        ("score", [4, 0, 3, 2, 1, 5]),
        ("-score", [2, 3, 0, 4, 1, 5]),
        ("task,-return", [5, 1, 3, 0, 2, 4]),
        ("-task, row", [0, 2, 4, 1, 3, 5]),
        ("seed", [5, 4, 3, 2, 1, 0]),
        ("-seed", [0, 1, 2, 3, 4, 5]),
        ("-row", [5, 4, 3, 2, 1, 0]),
        ("end,stream", [0, 1, 2, 3, 4, 5]),
        ("task,-return,-task,return" + ",task" * 100, [5, 1, 3, 0, 2, 4]),
    ],
)
def test_episodes_are_sorted_by_any_columns(table: EpisodeTable, sort: str, rows: list[int]) -> None:
    assert query_episodes(table, sort=sort).rows.tolist() == rows


def test_too_many_columns_to_sort_by_are_refused(table: EpisodeTable) -> None:
    with pytest.raises(DataError, match="sort: 17 columns; at most 16"):
        query_episodes(table, sort=",".join(f"metadata.key{i}" for i in range(17)))


def test_a_page_is_a_part_of_what_matches(table: EpisodeTable) -> None:
    queries = EpisodeQueries(table)
    page = queries.page(where="return < 4", sort="-return", offset=1, limit=2)
    assert (page.rows.tolist(), page.offset, page.n_matching, page.n_episodes) == ([2, 1], 1, 4, 6)
    assert page.table["return"].tolist() == [2.0, 1.0]
    assert queries.page(where="return < 4", sort="-return", offset=9, limit=2).rows.tolist() == []
    assert queries.page(limit=None).rows.tolist() == list(range(6))
    assert queries.page(limit=0).n_matching == 6


def test_a_page_shows_the_same_values_as_the_table(table: EpisodeTable) -> None:
    page = query_episodes(table, sort="-seed", offset=1, limit=4)
    whole = [table.row(int(i)) for i in page.rows]
    assert [str(row) for row in page.table] == [str(row) for row in whole]
    for name in table.columns:
        shown, all_ = page.table[name], table[name][page.rows]
        assert [str(value) for value in shown] == [str(value) for value in all_], name
    keys = [page.table.key(i) for i in range(4)]
    assert keys == [table.key(int(i)) for i in page.rows]
    assert [page.table.find(key) for key in keys] == [0, 1, 2, 3]
    with pytest.raises(EpisodeNotFoundError):
        page.table.find(table.key(5))


def test_rows_of_a_page_are_stored_where_the_table_says(table: EpisodeTable) -> None:
    part = table.take([4, 0])
    assert [part.spans(i) for i in (0, 1)] == [table.spans(4), table.spans(0)]
    ranges = part.row_ranges
    assert (ranges.row.tolist(), ranges.start.tolist(), ranges.stop.tolist()) == ([0, 1], [4, 0], [5, 1])


def test_an_empty_table_has_empty_pages() -> None:
    store = trajstore.create(f"memory://queries-{uuid.uuid4().hex}")
    page = query_episodes(store.episodes, where="return > 1", sort="-return,stream,end")
    assert (page.rows.tolist(), page.n_matching, page.table["end"].tolist()) == ([], 0, [])


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"sort": "lenght"}, DataError, "no episode column 'lenght'; did you mean 'length'"),
        ({"sort": "length,,end"}, DataError, "expected columns separated by commas"),
        ({"offset": -1}, ValueError, "offset: expected a count, got -1"),
        ({"limit": -1}, ValueError, "limit: expected a count, got -1"),
    ],
)
def test_a_wrong_query_is_refused(
    table: EpisodeTable, arguments: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        query_episodes(table, **arguments)  # type: ignore[arg-type]


def test_a_row_outside_the_table_is_refused(table: EpisodeTable) -> None:
    with pytest.raises(EpisodeNotFoundError):
        table.take([6])


def test_summaries_of_derived_columns_can_be_filtered_and_sorted() -> None:
    store = trajstore.create(f"memory://queries-{uuid.uuid4().hex}")
    with store.writer(commit_seconds=None) as writer:
        for n in (2, 3):
            writer.append_episode({"reward": np.ones(n, np.float32)}, terminated=True)
        writer.commit()
        stream = store.refresh().names[0]
        writer.put_column("advantage", stream, np.array([4, 4, 1, 1, 1], np.float32))
        writer.commit()
    table = store.refresh().episodes
    page = query_episodes(table, sort="advantage.mean")
    assert page.rows.tolist() == [1, 0]
    assert page.table["advantage.mean"].tolist() == [1.0, 4.0]
    assert query_episodes(table, where="advantage.sum > 5").rows.tolist() == [0]
