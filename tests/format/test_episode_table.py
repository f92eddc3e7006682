"""The episode table: columns, metadata, returns, and how spans are joined."""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import trajstore
from trajstore import DataError, EpisodeKey, EpisodeNotFoundError, Field, Schema, Store, Writer
from trajstore.format.episode_table import EpisodeTable
from trajstore.format.spans import END_LABELS, Spans, VisibleSpans, float_columns, int_columns
from trajstore.testing import strategies as ours

COLUMNS = Schema(
    {"x": Field("int32")}, episode={"success": bool, "seed": int, "level": float, "task": str}, reward=None
)
VALUES: dict[str, Any] = {"success": True, "seed": -(1 << 63), "level": 0.1, "task": "lève-toi ☂"}

NewStore = Callable[[Schema], Store]


@pytest.fixture
def new_store() -> NewStore:
    return lambda schema: trajstore.create(f"memory://episodes-{uuid.uuid4().hex}", schema)


def add(writer: Writer, metadata: dict[str, Any] | None = None, n: int = 2, **how: Any) -> EpisodeKey:
    data = {"x": np.arange(n, dtype=np.int32)}
    return writer.append_episode(data, metadata=metadata, **(how or {"terminated": True}))


def table_of(store: Store, *metadata: dict[str, Any] | None) -> EpisodeTable:
    """The table of a store after one episode with each of these metadata."""
    with store.writer() as writer:
        for values in metadata:
            add(writer, values)
    return store.refresh().episodes


# ---- declared columns ----------------------------------------------------------------------------------


def test_declared_columns_come_back_with_their_types(new_store: NewStore) -> None:
    table = table_of(new_store(COLUMNS), VALUES)
    assert {name: table[name][0] for name in VALUES} == VALUES
    assert [table[name].dtype for name in VALUES] == [bool, np.int64, np.float64, object]
    assert {name: table.row(0)[name] for name in VALUES} == VALUES
    assert table.row(0)["success"] is True


def test_absent_values_are_masked_or_none(new_store: NewStore) -> None:
    table = table_of(new_store(COLUMNS), VALUES, None, {"seed": 0}, {"seed": None})
    for name in ("success", "seed", "level"):
        assert isinstance(table[name], np.ma.MaskedArray)
    assert np.ma.getmaskarray(table["seed"]).tolist() == [False, True, False, True]
    assert np.ma.getmaskarray(table["level"]).tolist() == [False, True, True, True]
    assert table["task"].tolist() == [VALUES["task"], None, None, None]
    assert {name: table.row(1)[name] for name in VALUES} == dict.fromkeys(VALUES)


def test_zero_false_and_empty_are_not_absent(new_store: NewStore) -> None:
    values = {"success": False, "seed": 0, "level": 0.0, "task": ""}
    row = table_of(new_store(COLUMNS), values).row(0)
    assert {name: row[name] for name in values} == values


def test_an_int_fits_a_float_column_and_numpy_scalars_fit_theirs(new_store: NewStore) -> None:
    row = table_of(new_store(COLUMNS), {"level": 3, "seed": np.int16(4), "success": np.bool_(True)}).row(0)
    assert (row["level"], row["seed"], row["success"]) == (3.0, 4, True)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("success", 1, "episode column 'success': expected bool, got int 1"),
        ("success", "yes", "episode column 'success': expected bool, got str 'yes'"),
        ("seed", 1.0, "episode column 'seed': expected int64, got float 1.0"),
        ("seed", True, "episode column 'seed': expected int64, got bool True"),
        ("seed", 1 << 63, "episode column 'seed': 9223372036854775808 is out of range for int64"),
        ("level", "1", "episode column 'level': expected float64, got str '1'"),
        ("level", False, "episode column 'level': expected float64, got bool False"),
        ("task", 1, "episode column 'task': expected str, got int 1"),
        ("task", b"x", "episode column 'task': expected str, got bytes b'x'"),
    ],
)
def test_values_of_another_type_are_refused(new_store: NewStore, name: str, value: Any, message: str) -> None:
    store = new_store(COLUMNS)
    with store.writer() as writer:
        with pytest.raises(DataError) as caught:
            add(writer, {name: value})
        assert str(caught.value) == message
    assert len(store.refresh().episodes) == 0


def test_an_int_too_large_for_a_float_column_is_refused(new_store: NewStore) -> None:
    with new_store(COLUMNS).writer() as writer, pytest.raises(DataError, match="level"):
        add(writer, {"level": 10**400})


def test_a_nan_in_a_float_column_is_a_value(new_store: NewStore) -> None:
    table = table_of(new_store(COLUMNS), {"level": math.nan})
    assert math.isnan(table.row(0)["level"])
    assert not np.ma.getmaskarray(table["level"])[0]


def test_a_column_that_does_not_exist_is_named(new_store: NewStore) -> None:
    with pytest.raises(KeyError, match="no episode column 'nope'; the table has stream, episode"):
        table_of(new_store(COLUMNS), None)["nope"]


# ---- free-form metadata --------------------------------------------------------------------------------


def test_metadata_keeps_unicode_nesting_and_order(new_store: NewStore) -> None:
    metadata = {"ключ": "値 🎲\u2028", "b": [1, None, {"x": True}], "a": 0.1, "": "\0"}
    table = table_of(new_store(COLUMNS), metadata, None)
    assert table.metadata(0) == metadata
    assert list(table.metadata(0)) == list(metadata)
    assert table.metadata(1) == {}
    assert table["metadata"].tolist() == [metadata, {}]


def test_metadata_and_declared_columns_are_kept_apart(new_store: NewStore) -> None:
    table = table_of(new_store(COLUMNS), VALUES | {"note": 1})
    assert table.metadata(0) == {"note": 1}
    assert table.row(0)["task"] == VALUES["task"]


@pytest.mark.parametrize(
    "value", [object(), {1, 2}, b"x", np.zeros(2), math.nan, math.inf, [math.nan], 1j, "\ud800"]
)
def test_what_json_does_not_hold_is_refused(new_store: NewStore, value: Any) -> None:
    store = new_store(COLUMNS)
    with store.writer() as writer, pytest.raises(DataError, match=r"metadata \['v'\]: not storable as JSON"):
        add(writer, {"v": value})
    assert len(store.refresh().episodes) == 0


def test_metadata_that_holds_itself_is_refused(new_store: NewStore) -> None:
    loop: list[Any] = []
    loop.append(loop)
    with new_store(COLUMNS).writer() as writer, pytest.raises(DataError, match="not storable as JSON"):
        add(writer, {"v": loop})


def test_metadata_keys_are_strings(new_store: NewStore) -> None:
    with (
        new_store(COLUMNS).writer() as writer,
        pytest.raises(DataError, match="metadata: expected strings as keys, got 3"),
    ):
        add(writer, {3: "x"})  # type: ignore[dict-item]


def test_metadata_has_a_bound(new_store: NewStore) -> None:
    with new_store(COLUMNS).writer() as writer, pytest.raises(DataError, match=r"metadata takes .* bytes; at most"):
        add(writer, {"v": "x" * (16 << 20)})


def test_a_refused_end_leaves_the_episode_open(new_store: NewStore) -> None:
    store = new_store(COLUMNS)
    with store.writer() as writer:
        writer.append({"x": np.int32(1)})
        with pytest.raises(DataError):
            writer.end_episode(terminated=True, metadata={"v": math.nan})
        writer.end_episode(terminated=True, metadata={"seed": 3})
    row = store.refresh().episodes.row(0)
    assert (row["end"], row["length"], row["seed"]) == ("terminated", 1, 3)


@given(st.data(), ours.schemas())
@settings(deadline=None, max_examples=40)
def test_any_metadata_is_read_back(data: st.DataObject, schema: Schema) -> None:
    store = trajstore.create(f"memory://metadata-{uuid.uuid4().hex}", schema)
    given_metadata = data.draw(st.lists(ours.metadata(schema), min_size=1, max_size=3))
    with store.writer() as writer:
        for metadata in given_metadata:
            writer.append_episode(data.draw(ours.episodes(schema, max_steps=2)), metadata=metadata)
    table = store.refresh().episodes
    for i, metadata in enumerate(given_metadata):
        row = table.row(i)
        declared = {name: metadata.get(name) for name in schema.episode}
        assert repr({name: row[name] for name in declared}) == repr(
            {n: float(v) if schema.episode[n] == "float64" and v is not None else v for n, v in declared.items()}
        )
        assert row["metadata"] == {n: v for n, v in metadata.items() if n not in declared} == table.metadata(i)
        assert table["metadata"][i] == row["metadata"]


# ---- pandas --------------------------------------------------------------------------------------------


def test_to_pandas_has_nullable_columns_and_categories(new_store: NewStore) -> None:
    frame = table_of(new_store(COLUMNS), VALUES, None).to_pandas()
    dtypes = {name: str(dtype).replace("str", "object") for name, dtype in frame.dtypes.items()}  # pandas 3: str
    assert dtypes == {
        "stream": "category", "episode": "int64", "env": "int64", "length": "int64", "end": "category",
        "return": "float64", "has_final": "bool", "is_headless": "bool", "time": "datetime64[ns, UTC]",
        "success": "boolean", "seed": "Int64", "level": "Float64", "task": "object",
    }  # fmt: skip
    assert frame.loc[1, ["success", "seed", "level"]].isna().all()
    assert frame["seed"][1] is pd.NA
    assert frame["seed"][0] == VALUES["seed"]


def test_to_pandas_of_an_empty_store_has_all_columns(new_store: NewStore) -> None:
    frame = new_store(COLUMNS).episodes.to_pandas()
    assert len(frame) == 0
    assert [*frame, "metadata"] == list(new_store(COLUMNS).episodes.columns)


def test_the_times_of_a_frame_are_datetimes(new_store: NewStore) -> None:
    table = table_of(new_store(COLUMNS), VALUES)
    (time,) = table.to_pandas()["time"]
    assert time.tzname() == "UTC"
    assert time.timestamp() == pytest.approx(table["time"][0], abs=1e-3)


def test_undeclared_metadata_become_columns(new_store: NewStore) -> None:
    free = {"a": 1, "b": 0.5, "c": "x", "d": True, "mixed": 1, "list": [1, 2], "length": 7, "big": 1 << 70}
    frame = table_of(new_store(COLUMNS), free, {"a": 2, "b": 1, "mixed": "text", "nested": {}}, None).to_pandas()
    assert "metadata" not in frame
    kinds = {name: str(frame[name].dtype) for name in ("a", "b", "d", "metadata.length")}
    assert kinds == {"a": "Int64", "b": "Float64", "d": "boolean", "metadata.length": "Int64"}
    assert frame["a"].tolist() == [1, 2, pd.NA]
    assert frame["b"].tolist()[:2] == [0.5, 1.0]
    assert frame["c"][0] == "x"
    assert frame["metadata.length"][0] == 7
    assert frame["length"].tolist() == [2, 2, 2]
    assert [frame["mixed"][0], frame["mixed"][1]] == ["1", '"text"']
    assert (frame["list"][0], frame["nested"][1], frame["big"][0]) == ("[1, 2]", "{}", str(1 << 70))
    assert frame["list"].isna().tolist() == [False, True, True]


@pytest.mark.parametrize(
    "metadata", [[], [None], [{}, None], [{"a": {}}, {"a": [], "b": {"c": {}}}], [{"a": 1}, {"a": "x"}]]
)
def test_a_frame_can_be_written_to_parquet(
    new_store: NewStore, metadata: list[dict[str, Any] | None], tmp_path: Path
) -> None:
    frame = table_of(new_store(COLUMNS), *metadata).to_pandas()
    frame.to_parquet(tmp_path / "episodes.parquet")
    found = pd.read_parquet(tmp_path / "episodes.parquet")
    assert list(found) == list(frame)
    assert found["time"].tolist() == frame["time"].tolist()
    for name in found:
        assert found[name].dropna().astype(str).tolist() == frame[name].dropna().astype(str).tolist()


# ---- finding episodes ----------------------------------------------------------------------------------


def test_keys_and_rows_are_found_both_ways(new_store: NewStore) -> None:
    store = new_store(COLUMNS)
    with store.writer("a") as first, store.writer("b") as second:
        keys = [add(writer) for writer in (first, second, first, second, first)]
    table = store.refresh().episodes
    assert {table.find(key) for key in keys} == set(range(5))
    assert all(table.key(table.find(key)) == key for key in keys)
    assert table.key(-1) == table.key(4)


def test_an_episode_that_is_not_there_is_not_found(new_store: NewStore) -> None:
    store = new_store(COLUMNS)
    with store.writer() as writer:
        key = add(writer)
    table = store.refresh().episodes
    for missing in (EpisodeKey(key.stream, 1), EpisodeKey(key.stream, -1), EpisodeKey("other", 0)):
        with pytest.raises(EpisodeNotFoundError, match="this snapshot has no episode"):
            table.find(missing)


@pytest.mark.parametrize("i", [1, -2, 10**20])
def test_a_row_that_is_not_there_is_not_found(new_store: NewStore, i: int) -> None:
    table = table_of(new_store(COLUMNS), None)
    for ask in (table.key, table.row, table.spans, table.n_rows, table.has_final, table.metadata):
        with pytest.raises(EpisodeNotFoundError, match=f"no episode {i}: this snapshot has 1 episodes"):
            ask(i)


@pytest.mark.parametrize(
    ("how", "end"),
    [({"terminated": True}, "terminated"), ({"truncated": True}, "truncated"), ({"terminated": False}, "cut")],
)
def test_the_end_is_what_was_said(new_store: NewStore, how: dict[str, Any], end: str) -> None:
    store = new_store(COLUMNS)
    with store.writer() as writer:
        add(writer, **how)
    assert store.refresh().episodes["end"].tolist() == [end]


# ---- returns -------------------------------------------------------------------------------------------


def rewards(alignment: str, spec: Field | None = None) -> Schema:
    return Schema({"reward": spec or Field("float32")}, reward_alignment=alignment)  # type: ignore[arg-type]


def returns_of(store: Store, values: list[float], commit_after: set[int] = frozenset()) -> float:  # type: ignore[assignment]
    """The return of one episode of these rewards, committed after some of its steps."""
    with store.writer(commit_seconds=None) as writer:
        for t, value in enumerate(values):
            writer.append({"reward": value})
            if t in commit_after:
                writer.commit()
        writer.end_episode(terminated=True)
    return float(store.refresh().episodes["return"][0])


@pytest.mark.parametrize(("alignment", "expected"), [("action", 15.0), ("observation", 14.0)])
@pytest.mark.parametrize("commit_after", [set(), {0}, {1}, {0, 1, 2, 3}, {3}])
def test_the_return_is_the_sum_over_all_spans(
    new_store: NewStore, alignment: str, expected: float, commit_after: set[int]
) -> None:
    assert returns_of(new_store(rewards(alignment)), [1, 2, 4, 8], commit_after) == expected


@pytest.mark.parametrize("first", [math.nan, math.inf, 3e38])
def test_the_reward_before_the_first_action_does_not_touch_the_return(new_store: NewStore, first: float) -> None:
    assert returns_of(new_store(rewards("observation")), [first, 2, 4, 8]) == 14.0


def test_rewards_that_are_not_finite_make_such_a_return_and_no_warning(new_store: NewStore) -> None:
    assert math.isnan(returns_of(new_store(rewards("action")), [math.inf, -math.inf]))
    assert returns_of(new_store(rewards("action")), [math.inf, 1.0]) == math.inf
    assert returns_of(new_store(rewards("action", Field("float64"))), [1e308, 1e308]) == math.inf


@pytest.mark.parametrize("dtype", ["int8", "uint64", "float16", "float64"])
def test_rewards_are_summed_in_float64(new_store: NewStore, dtype: str) -> None:
    values = [100, 100, 100, 100] if dtype == "int8" else [40_000, 40_000]
    number = float if dtype.startswith("float") else int
    assert returns_of(new_store(rewards("action", Field(dtype))), [number(v) for v in values]) == sum(values)


@pytest.mark.parametrize("spec", [Field("bool"), Field("bfloat16"), Field("float32", (2,))])
def test_without_a_scalar_reward_there_is_no_return(new_store: NewStore, spec: Field) -> None:
    store = new_store(Schema({"reward": spec, "x": Field("int8")}))
    with store.writer() as writer:
        writer.append(
            {"reward": True if spec.dtype == "bool" else 1.0 if not spec.shape else np.ones(2, "f4"), "x": 1}
        )
    assert np.isnan(store.refresh().episodes["return"]).all()


def test_the_filler_of_a_final_row_adds_nothing(new_store: NewStore) -> None:
    store = new_store(Schema({"reward": Field("float32"), "o": Field("float32", final=True)}))
    with store.writer() as writer:
        writer.append_episode({"reward": np.ones(3, np.float32), "o": np.zeros(4, np.float32)}, terminated=True)
    row = store.refresh().episodes.row(0)
    assert (row["return"], row["length"], row["has_final"]) == (3.0, 3, True)


def test_returns_of_interleaved_environments_are_their_own(new_store: NewStore) -> None:
    store = new_store(rewards("action"))
    with store.writer(commit_seconds=None) as writer:
        for t in range(4):
            writer.append({"reward": np.array([1, 10, 100], np.float32)}, envs=[0, 1, 2])
            if t % 2:
                writer.commit()
    assert store.refresh().episodes["return"].tolist() == [4.0, 40.0, 400.0]


# ---- joining spans, against a reference in plain loops -------------------------------------------------

NO_COLUMNS = Schema({"x": Field("int8")})


@dataclass
class Piece:
    """One span, as a plain value."""

    episode: int
    t_start: int
    row_start: int
    row_stop: int
    end: int
    has_final: int


@dataclass
class Part:
    """The spans of one stream, and what a view does to them."""

    pieces: list[Piece]
    first_row: int
    is_finished: bool
    discarded: frozenset[int]


@st.composite
def parts(draw: st.DrawFn) -> Part:
    """Episodes cut into spans and shuffled together as commits would, rows without gaps."""
    # Only an end may come without rows.
    spans = st.builds(
        lambda sizes, last: [*sizes, last], st.lists(st.integers(1, 4), max_size=2), st.integers(0, 4)
    )
    sizes = draw(st.lists(spans, max_size=5))
    ends = [draw(st.integers(0, 4)) for _ in sizes]
    turns = draw(st.permutations([n for n, spans in enumerate(sizes) for _ in spans]))
    pieces, row, done = [], 0, [0] * len(sizes)
    t = [0] * len(sizes)
    for n in turns:
        size, is_last = sizes[n][done[n]], done[n] == len(sizes[n]) - 1
        end = ends[n] if is_last else 0
        pieces.append(Piece(n, t[n], row, row + size, end, int(is_last and end in (1, 2) and size > 0)))
        row, t[n], done[n] = row + size, t[n] + size, done[n] + 1
    chosen = draw(st.frozensets(st.integers(0, 4), max_size=2))
    return Part(pieces, draw(st.integers(0, row)), draw(st.booleans()), chosen)


def table_from(found: list[Part]) -> EpisodeTable:
    blocks = []
    for i, part in enumerate(found):
        ints = np.zeros((len(part.pieces), len(int_columns(NO_COLUMNS))), np.int64)
        for k, p in enumerate(part.pieces):
            ints[k, :7] = p.episode, 10 * i + p.episode, p.t_start, p.row_start, p.row_stop, p.end, p.has_final
        floats = np.zeros((len(ints), len(float_columns(NO_COLUMNS))))
        columns = (int_columns(NO_COLUMNS), float_columns(NO_COLUMNS))
        blocks.append(
            VisibleSpans(
                i, i, Spans(ints, floats), columns, part.first_row, part.is_finished, discarded=part.discarded
            )
        )
    names = [f"s{i}" for i in range(len(found))]
    return EpisodeTable(names, blocks, NO_COLUMNS, lambda *_: b"")


def reference(found: list[Part]) -> list[dict[str, Any]]:
    """One dict an episode, by looking at every row."""
    shown = []
    for i, part in enumerate(found):
        for episode in sorted({p.episode for p in part.pieces} - part.discarded):
            mine = [p for p in part.pieces if p.episode == episode]
            rows = [(p.t_start + k, p.row_start + k) for p in mine for k in range(p.row_stop - p.row_start)]
            live = [(t, row) for t, row in rows if row >= part.first_row]
            if rows and not live:
                continue
            end = END_LABELS[mine[-1].end]
            shown.append(
                {
                    "key": (f"s{i}", episode),
                    "env": 10 * i + episode,
                    "end": "cut" if end == "open" and part.is_finished else end,
                    "length": len(live) - mine[-1].has_final,
                    "is_headless": len(live) < len(rows),
                    "rows": live,
                }
            )
    return shown


def seen(table: EpisodeTable) -> list[dict[str, Any]]:
    return [
        {
            "key": tuple(table.key(i)),
            "env": int(table["env"][i]),
            "end": table["end"][i],
            "length": int(table["length"][i]),
            "is_headless": bool(table["is_headless"][i]),
            "rows": [
                (s.t_start + k, s.row_start + k) for s in table.spans(i) for k in range(s.row_stop - s.row_start)
            ],
        }
        for i in range(len(table))
    ]


@given(st.lists(parts(), max_size=3))
@settings(deadline=None, max_examples=300)
def test_joining_spans_is_what_plain_loops_find(found: list[Part]) -> None:
    table = table_from(found)
    assert seen(table) == reference(found)
    assert [table.find(table.key(i)) for i in range(len(table))] == list(range(len(table)))
