"""Filters: what parses, what matches, and what is refused with which words."""

from __future__ import annotations

import sys
import tracemalloc
import uuid

import numpy as np
import pytest

import trajstore
from trajstore import DataError, Field, Schema
from trajstore.inspection import filter_syntax as syntax
from trajstore.inspection.episode_columns import EpisodeColumns
from trajstore.inspection.filters import matches

SCHEMA = Schema(
    {"x": Field("float32"), "reward": Field("float32")},
    episode={"seed": int, "task": str, "score": float, "is-good": bool},
)
ENDS = ({"terminated": True}, {"truncated": True}, {"aborted": False, "terminated": True})


@pytest.fixture(scope="module")
def columns() -> EpisodeColumns:
    """Episodes of 1 to 6 steps with returns 1 to 6."""
    store = trajstore.create(f"memory://filters-{uuid.uuid4().hex}", SCHEMA)
    with store.writer(commit_seconds=None) as writer:
        for n in range(1, 7):
            metadata = {"seed": n % 2, "task": f"pick {n}", "note": "free" if n == 3 else n}
            if n > 2:
                metadata |= {"score": n / 2, "is-good": n > 4}
            end = {"terminated": True} if n % 2 else {"truncated": True}
            data = {"x": np.zeros(n, np.float32), "reward": np.ones(n, np.float32)}
            writer.append_episode(data, metadata=metadata, **end)
    return EpisodeColumns(store.refresh().episodes)


def found(columns: EpisodeColumns, text: str) -> list[int]:
    """Lengths of the episodes that match."""
    return [int(i) + 1 for i in np.flatnonzero(matches(columns, text))]


@pytest.mark.parametrize(
    ("text", "lengths"),
    [
        ("", [1, 2, 3, 4, 5, 6]),
        ("return > 4", [5, 6]),
        ("4 < return", [5, 6]),
        ("2 <= length < 4", [2, 3]),
        ("length=3", [3]),
        ("length != 3 and return <= 4", [1, 2, 4]),
        ("end == terminated", [1, 3, 5]),
        ("end == 'terminated' and not length < 3", [3, 5]),
        ("length == 1 or length == 2 and end == terminated", [1]),
        ("(length == 1 or length == 3) and end == terminated", [1, 3]),
        ("length in (2, 4, 17)", [2, 4]),
        ("length not in (2, 4)", [1, 3, 5, 6]),
        ("length in (2.0, 4.5, 1e999, " + "9" * 290 + ", 2)", [2]),
        ("score in (2, 2.5, inf)", [4, 5]),
        ("score in (1.5, " + "9" * 290 + ")", [3]),
        ("score == " + "9" * 290, []),
        ("length in (2, score)", [2]),
        ("task in ('pick 2', 5, \"pick 6\")", [2, 6]),
        ("is-good in (true, 7)", [5, 6]),
        ("time in (2020-01-01, 5)", []),
        ("end in (truncated, aborted)", [2, 4, 6]),
        ("task contains 'PICK 2'", [2]),
        ('task == "pick 6"', [6]),
        ("task > 'pick 4'", [5, 6]),
        ("score is null", [1, 2]),
        ("score is not null and score > 2", [5, 6]),
        ("score != 2", [3, 5, 6]),  # an absent value satisfies nothing
        ("not score == 2", [1, 2, 3, 5, 6]),
        ("is-good", [5, 6]),
        ("is-good == false", [3, 4]),
        ("`is-good` == true", [5, 6]),
        ("seed == 1", [1, 3, 5]),
        ("score == length", []),
        ("length > score", [3, 4, 5, 6]),
        ("has_final or row < 1", [1]),
        ("metadata.note == free", [3]),
        ("metadata.note == 5", [5]),
        ("metadata.other is null", [1, 2, 3, 4, 5, 6]),
        ("time > 2020-01-01 and time < 2100-01-01T10:30", [1, 2, 3, 4, 5, 6]),
        ("return < inf and return > -inf", [1, 2, 3, 4, 5, 6]),
        ("length > 99999999999999999999999999", []),
        ("length > -1e3", [1, 2, 3, 4, 5, 6]),
    ],
)
def test_a_filter_finds_the_episodes_that_it_describes(
    columns: EpisodeColumns, text: str, lengths: list[int]
) -> None:
    assert found(columns, text) == lengths


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("retrun > 3", "no episode column 'retrun'; did you mean 'return'"),
        ("`nothing` > 3", "no episode column 'nothing'"),
        ("return >", "expected a column or a value, got the end"),
        ("return > 3 4", "expected 'and', 'or' or the end, got '4' at character 12"),
        ("(return > 3", "expected '\\)'"),
        ("length in 3", "expected '\\('"),
        ("length is 3", "expected 'null'"),
        ("3 < 4", "a column on one side"),
        ("3", "expected a comparison"),
        ("length", "'length' is no truth value"),
        ("return == 'a lot'", "'return' holds numbers"),
        ("end == terminatd", "'end' is one of open, terminated"),
        ("end in (open, terminatd)", "'end' is one of open, terminated"),
        ("length in (2, 'a')", "'length' holds numbers"),
        ("length == " + "9" * 5000, "a number of 5,000 digits"),
        ("end == length", "can't be compared"),
        ("length contains 3", "needs a column of text"),
        ("time > yesterday", "expected seconds or a date"),
        ("return > 3; import os", "can't read '; import os'"),
        ("return > __import__('os')", "no episode column '__import__'|expected 'and'"),
        ("return > 'open", "can't read"),
        ("((" * 60 + "length", "nested deeper"),
        ("length > 1 and " * 1000 + "length", "characters; at most"),
    ],
)
def test_a_filter_that_is_wrong_is_refused_with_the_reason(
    columns: EpisodeColumns, text: str, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        matches(columns, text)


def test_a_nan_satisfies_no_comparison_and_is_null() -> None:
    store = trajstore.create(f"memory://filters-{uuid.uuid4().hex}")
    with store.writer(commit_seconds=None) as writer:
        for value in (np.nan, 1.0):
            writer.append_episode({"reward": np.array([value], np.float32)}, terminated=True)
    columns = EpisodeColumns(store.refresh().episodes)
    assert found(columns, "return is null") == [1]
    assert found(columns, "return != 5") == [2]


@pytest.fixture(scope="module")
def many() -> EpisodeColumns:
    """Of 20,000 episodes of one step."""
    store = trajstore.create(f"memory://filters-{uuid.uuid4().hex}")
    with store.writer(commit_seconds=None) as writer:
        steps = {"reward": np.arange(20_000, dtype=np.float32)[None]}
        writer.append_rollout(steps, terminated=np.ones((1, 20_000), bool))
    return EpisodeColumns(store.refresh().episodes)


@pytest.mark.parametrize(
    "text", [" or ".join(["length == 3"] * 600), f"not length in ({', '.join(map(str, range(2, 1500)))})"]
)
def test_a_long_filter_takes_memory_for_one_condition_at_a_time(many: EpisodeColumns, text: str) -> None:
    matches(many, "length == 1")
    tracemalloc.start()
    try:
        assert matches(many, text).sum() == (0 if "or" in text else 20_000)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 40 * len(many.table)


def test_columns_of_free_metadata_are_not_all_kept(many: EpisodeColumns) -> None:
    for i in range(40):
        assert matches(many, f"metadata.key{i} is null").all()
    kept = sum(sys.getsizeof(column.values) for column in many._columns.values())
    assert kept < 20 * 8 * len(many.table)


def test_parsing_looks_nothing_up() -> None:
    tree = syntax.parse("a > 1 and not b is null")
    comparison = syntax.Comparison(">", syntax.Word("a"), syntax.Number(1))
    assert tree == syntax.All((comparison, syntax.Not(syntax.IsNull(syntax.Word("b")))))
