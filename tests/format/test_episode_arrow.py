"""The episode table as an Arrow table and as a Parquet file."""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import trajstore
from trajstore import Field, MissingExtraError, Priorities, ReplayBuffer, Schema, Store, Windows

DECLARED = {"success": bool, "level": int, "score": float, "task": str}
METADATA = [
    {"success": True, "level": 3, "score": 0.5, "task": "reach", "note": "ä", "pair": [1, 2]},
    None,
    {"success": False, "task": None, "level": -(2**62)},
]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = trajstore.create(tmp_path / "s", Schema({"reward": Field("float32")}, episode=DECLARED))
    for _ in range(2):
        with store.writer("actor") as writer:
            for i, metadata in enumerate(METADATA):
                data = {"reward": np.ones(i + 1, np.float32)}
                writer.append_episode(data, terminated=i != 1, truncated=i == 1, metadata=metadata)
    store.refresh()
    return store


def test_columns_have_the_types_that_other_programs_expect(store: Store) -> None:
    table = store.episodes.to_arrow()
    assert tuple(table.column_names) == store.episodes.columns
    text = pa.dictionary(pa.int32(), pa.string())
    expected = {
        "stream": text, "end": text, "episode": pa.int64(), "length": pa.int64(), "return": pa.float64(),
        "has_final": pa.bool_(), "time": pa.timestamp("us", tz="UTC"), "success": pa.bool_(), "level": pa.int64(),
        "score": pa.float64(), "task": pa.string(), "metadata": pa.string(),
    }  # fmt: skip
    assert {name: table.schema.field(name).type for name in expected} == expected


def test_values_are_those_of_the_rows(store: Store) -> None:
    rows, table = store.episodes.to_arrow().to_pylist(), store.episodes
    for i, row in enumerate(rows):
        known = table.row(i)
        assert row.pop("time") == datetime.fromtimestamp(round(known.pop("time") * 1e6) / 1e6, UTC)
        metadata, known_metadata = row.pop("metadata"), known.pop("metadata")
        assert (None if metadata is None else json.loads(metadata)) == (known_metadata or None)
        assert row == known
    assert [row["level"] for row in rows[:3]] == [3, None, -(2**62)]


def test_a_parquet_file_holds_the_same_and_replaces_an_old_one(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "episodes.parquet"
    path.write_bytes(b"old")
    store.episodes.to_parquet(path)
    assert pq.read_table(path).equals(store.episodes.to_arrow())
    assert [p.name for p in tmp_path.iterdir() if p.is_file()] == ["episodes.parquet"]


def test_an_empty_table_has_the_same_types(tmp_path: Path) -> None:
    empty = trajstore.create(tmp_path / "e", Schema({"reward": Field("float32")}, episode=DECLARED)).episodes
    empty.to_parquet(tmp_path / "e.parquet")
    table = pq.read_table(tmp_path / "e.parquet")
    assert table.num_rows == 0
    assert table.schema.field("success").type == pa.bool_()
    assert table.schema.field("task").type == pa.string()
    assert trajstore.create("memory://without").episodes.to_arrow().num_rows == 0


def test_history_parts_of_a_table_and_summaries_are_written_too(tmp_path: Path) -> None:
    with ReplayBuffer(tmp_path / "b", priorities=Priorities(), sample=Windows(1)) as buffer:
        for _ in range(3):
            buffer.add_episode({"reward": np.ones(2)}, terminated=True)
    table = trajstore.open(tmp_path / "b").episodes
    assert table.to_arrow(derived=True)["priority.sum"].to_pylist() == [2.0, 2.0, 2.0]
    assert table.take([2, 0]).to_arrow()["episode"].to_pylist() == [2, 0]
    history = trajstore.open(tmp_path / "b").history().to_arrow()
    assert history.schema.field("is_evicted").type == pa.bool_()


def test_half_a_surrogate_pair_does_no_harm(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = json.loads('{"task": "\\ud800", "\\udc00": 1}')
    monkeypatch.setattr("trajstore.format.episode_table._parse_text", lambda data: broken)
    row = store.episodes.to_arrow().to_pylist()[0]
    assert row["task"] == "?"
    assert json.loads(row["metadata"]) == {"?": 1}


def test_a_missing_pyarrow_is_named_with_its_extra(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'trajstore\[parquet\]'"):
        store.episodes.to_parquet(tmp_path / "x.parquet")
    assert not (tmp_path / "x.parquet").exists()
