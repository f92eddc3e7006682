"""Filters: what parses, what matches, and what is refused with which words."""

from __future__ import annotations

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


def test_parsing_looks_nothing_up() -> None:
    tree = syntax.parse("a > 1 and not b is null")
    comparison = syntax.Comparison(">", syntax.Word("a"), syntax.Number(1))
    assert tree == syntax.All((comparison, syntax.Not(syntax.IsNull(syntax.Word("b")))))
