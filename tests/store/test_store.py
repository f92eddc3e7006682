"""Creating, opening, refreshing; several streams as one store."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trajstore
from trajstore import Field, Schema

SCHEMA = Schema({"x": Field("int64", chunk_rows=4)})


def episode(*values: int) -> dict[str, Any]:
    return {"x": np.array(values, np.int64)}


def test_creating_twice_is_refused_unless_asked_for(place: Any) -> None:
    trajstore.create(place.url, SCHEMA, **place.kwargs)
    with pytest.raises(trajstore.StoreExistsError, match="is already a store"):
        trajstore.create(place.url, **place.kwargs)
    again = trajstore.create(place.url, SCHEMA, exist_ok=True, **place.kwargs)
    assert again.schema == SCHEMA


def test_an_existing_store_with_another_schema_is_refused(place: Any) -> None:
    trajstore.create(place.url, SCHEMA, **place.kwargs)
    says = r"x: int64 \(\) in the store, absent in the given schema; y: absent in the store, bool"
    with pytest.raises(trajstore.SchemaError, match=f"has another schema: {says}"):
        trajstore.create(place.url, Schema({"y": Field("bool")}), exist_ok=True, **place.kwargs)


def test_opening_nothing_says_so(place: Any) -> None:
    with pytest.raises(trajstore.StoreNotFoundError, match="there is no store here"):
        trajstore.open(place.url, **place.kwargs)


def test_a_foreign_directory_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(trajstore.StoreExistsError, match="is not empty and not a store"):
        trajstore.create(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]
    with pytest.raises(trajstore.StoreNotFoundError):
        trajstore.open(tmp_path)


def test_a_newer_format_is_refused_with_advice(tmp_path: Path) -> None:
    trajstore.create(tmp_path / "s")
    root = tmp_path / "s" / "zarr.json"
    root.write_text(root.read_text().replace('"format":1', '"format":3'))
    with pytest.raises(trajstore.FormatError, match="has format 3, this trajstore reads format 1; upgrade"):
        trajstore.open(tmp_path / "s")


def test_a_store_shows_what_was_committed_when_it_was_refreshed(place: Any) -> None:
    store = trajstore.create(place.url, SCHEMA, **place.kwargs)
    reader = trajstore.open(place.url, **place.kwargs)
    with store.writer() as writer:
        writer.append_episode(episode(1, 2), terminated=True)
        writer.commit()
        assert len(reader) == 0
        reader.refresh()
        old = reader.snapshot
        writer.append_episode(episode(3), terminated=True)
        assert len(reader.refresh().episodes) == 1
        writer.commit()
        assert len(reader.refresh().episodes) == 2
        assert len(old.episodes) == 1
        assert old.read_episode(0)["x"].tolist() == [1, 2]


def test_streams_of_several_writers_read_as_one_store(place: Any) -> None:
    store = trajstore.create(place.url, SCHEMA, **place.kwargs)
    with store.writer("a", rank=0, world_size=2) as first, store.writer("b", rank=1, world_size=2) as second:
        first.append_episode(episode(1), terminated=True)
        second.append_episode(episode(2), terminated=True)
        first.append_episode(episode(3), terminated=True)
    store.refresh()
    assert [store.read_episode(i)["x"].tolist() for i in range(3)] == [[1], [3], [2]]
    assert [record.rank for record in store.streams] == [0, 1]
    assert store.episodes["stream"].tolist() == [first.stream, first.stream, second.stream]


def test_two_writers_of_one_name_both_keep_their_history(place: Any) -> None:
    store = trajstore.create(place.url, SCHEMA, **place.kwargs)
    zombie, replacement = store.writer("rank0"), store.writer("rank0")
    zombie.append_episode(episode(1), terminated=True)
    zombie.commit()
    replacement.append_episode(episode(2), terminated=True)
    replacement.close()
    zombie.append_episode(episode(3), terminated=True)
    zombie.close()
    store.refresh()
    assert sorted(store.read_episode(i)["x"].tolist() for i in range(3)) == [[1], [2], [3]]


def test_keys_do_not_shift_when_older_streams_grow(url: str) -> None:
    store = trajstore.create(url, SCHEMA)
    old = store.writer("old")
    old.append_episode(episode(1), terminated=True)
    old.commit()
    with store.writer("new") as new:
        key = new.append_episode(episode(5), terminated=True)
    assert store.refresh().episodes.find(key) == 1
    old.append_episode(episode(2), terminated=True)
    old.close()
    assert store.refresh().episodes.find(key) == 2
    assert store.read_episode(key)["x"].tolist() == [5]
    with pytest.raises(trajstore.EpisodeNotFoundError, match="no episode 9 of stream"):
        store.read_episode((old.stream, 9))
    with pytest.raises(trajstore.EpisodeNotFoundError, match="this snapshot has 3 episodes"):
        store.read_episode(3)


def test_a_writer_whose_inferred_schema_differs_is_refused_before_its_first_commit(place: Any) -> None:
    store = trajstore.create(place.url, **place.kwargs)
    first, second = store.writer("a"), store.writer("b", commit_seconds=None)
    first.append({"x": 1})
    second.append({"x": 1.0})
    first.commit()
    with pytest.raises(trajstore.SchemaError, match="has another schema"):
        second.commit()
    with pytest.raises(trajstore.SchemaError):
        second.close()
    first.close()
    assert [record.name for record in trajstore.open(place.url, **place.kwargs).streams] == ["a"]


def test_plain_zarr_sees_exactly_the_committed_rows(url: str) -> None:
    store = trajstore.create(url, SCHEMA)
    with store.writer() as writer, warnings.catch_warnings():
        warnings.simplefilter("error")
        for n in range(1, 4):
            writer.append_episode(episode(*range(5)), terminated=True)
            writer.commit()
            writer.append_episode(episode(7), terminated=True)  # staged only
            stream = store.zarr_group()["streams"][writer.stream]
            assert stream["steps/x"].shape == (6 * n - 1,)
            assert stream["steps/x"][:].tolist() == ([0, 1, 2, 3, 4, 7] * n)[:-1]


def test_importing_trajstore_loads_neither_torch_nor_zarr() -> None:
    code = "import sys, trajstore; sys.exit(any(m in sys.modules for m in ('torch', 'zarr', 'pandas', 's3fs')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_public_name_is_there_and_documented() -> None:
    for name in trajstore.__all__:
        assert getattr(trajstore, name).__doc__, name
