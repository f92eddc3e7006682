"""Two stores are compared: what only one has, and what differs."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trajstore
from trajstore import EpisodeKey, Field, Schema, Store
from trajstore.inspection import differences
from trajstore.inspection.differences import Change, Differences, compare

SCHEMA = Schema(
    {"obs": {"x": Field("float32", (2,), final=True)}, "reward": Field("bfloat16"), "a": Field("int64")},
    episode={"task": str, "seed": int},
    reward="reward",
)


def episode(n: int, fill: int = 1) -> dict[str, Any]:
    import torch

    x = np.arange(2 * n + 2, dtype=np.float32).reshape(n + 1, 2)
    x[0] = np.nan
    return {"obs": {"x": x}, "reward": torch.ones(n, dtype=torch.bfloat16), "a": np.full(n, fill)}


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("differences") / "store"
    store = trajstore.create(root, SCHEMA, fsync=False)
    with store.writer("w", commit_seconds=None) as writer:
        for n in (3, 1, 7, 2):
            writer.append_episode(episode(n), terminated=True, metadata={"task": "a", "seed": n, "free": n})
        writer.commit()
        writer.put_column("advantage", writer.stream, np.arange(17, dtype=np.float32))
    return root


@pytest.fixture
def stores(template: Path, tmp_path: Path) -> tuple[Store, Path]:
    shutil.copytree(template, tmp_path / "copy")
    return trajstore.open(template), tmp_path / "copy"


def compared(first: Store, second: Path | Store, **how: Any) -> Differences:
    other = second if isinstance(second, Store) else trajstore.open(second)
    return compare(first.snapshot, other.snapshot, **how)


@pytest.mark.parametrize("deep", [False, True])
def test_a_copy_does_not_differ(stores: tuple[Store, Path], deep: bool) -> None:
    found = compared(*stores, deep=deep)
    assert found.is_empty
    assert (found.n_equal, found.n_changed, found.is_deep) == (4, 0, deep)
    assert found.n_bytes == (17 * 8 + 13 * (4 + 8) if deep else 0)  # 4 bytes: bfloat16 is compared as float32


def test_what_was_appended_is_in_the_second_only(stores: tuple[Store, Path]) -> None:
    first, copy = stores
    with trajstore.open(copy, fsync=False).writer("more") as writer:
        key = writer.append_episode(episode(2), truncated=True)
    found = compared(first, copy)
    assert (found.n_equal, found.n_only_first, found.n_only_second, found.only_second) == (4, 0, 1, (key,))
    assert [(s.id, s.kind) for s in found.streams] == [(key.stream, "only in the second")]
    back = compared(trajstore.open(copy), first)
    assert (back.only_first, back.streams[0].kind) == ((key,), "only in the first")


def rewrite(root: Path, **changed: Any) -> EpisodeKey:
    """Write the same stream again, with another third episode."""
    (stream,) = [record.id for record in trajstore.open(root).streams]
    other = root.parent / "other"
    store = trajstore.create(other, SCHEMA, fsync=False)
    with store.writer("w", commit_seconds=None) as writer:
        for i, n in enumerate((3, 1, 7, 2)):
            metadata = {"task": "a", "seed": n, "free": n}
            fill = 1
            end = {"terminated": True}
            if i == 2:
                metadata |= changed.get("metadata", {})
                n, fill, end = changed.get("n", n), changed.get("fill", fill), changed.get("end", end)
            writer.append_episode(episode(n, fill), metadata=metadata, **end)
    (record,) = store.refresh().streams
    data = (other / "streams" / record.id / "zarr.json").read_bytes()
    shutil.rmtree(root / "streams" / stream)
    shutil.copytree(other / "streams" / record.id, root / "streams" / stream)
    from dataclasses import replace

    from trajstore.format.commit_record import CommitRecord

    renamed = replace(CommitRecord.from_bytes(data, record.id, ""), id=stream)
    (root / "streams" / stream / "zarr.json").write_bytes(renamed.to_bytes())
    return EpisodeKey(stream, 2)


def test_changed_values_of_an_episode_are_listed(stores: tuple[Store, Path]) -> None:
    first, copy = stores
    key = rewrite(copy, end={"truncated": True}, metadata={"seed": 8})
    found = compared(first, copy)
    assert [(e.key, e.changes) for e in found.changed] == [
        (key, (Change("end", "terminated", "truncated"), Change("seed", 7, 8)))
    ]
    assert (found.n_equal, found.n_changed, found.columns) == (3, 1, ("'advantage' only in the first",))


def test_text_and_bytes_are_compared_if_deep(stores: tuple[Store, Path]) -> None:
    first, copy = stores
    key = rewrite(copy, fill=5, metadata={"task": "b", "free": None})
    assert compared(first, copy).n_changed == 0
    (changed,) = compared(first, copy, deep=True).changed
    assert (changed.key, changed.fields) == (key, ("a",))
    assert [(c.name, c.first, c.second) for c in changed.changes] == [
        ("task", "a", "b"), ("metadata", {"free": 7}, {"free": None}),
    ]  # fmt: skip


def test_episodes_that_lie_in_other_rows_are_compared_one_by_one(stores: tuple[Store, Path]) -> None:
    first, copy = stores
    key = rewrite(copy, n=6)
    found = compared(first, copy, deep=True)
    (changed,) = found.changed
    assert changed.key == key
    assert [(c.name, c.first, c.second) for c in changed.changes] == [("length", 7, 6)]
    assert changed.fields == ("obs/x", "reward", "a")
    assert found.n_equal == 3  # the last one lies in other rows, with the same values


def test_columns_are_compared_if_deep(stores: tuple[Store, Path]) -> None:
    first, copy = stores
    with trajstore.open(copy, fsync=False).writer("more") as writer:
        stream = first.streams[0].id
        writer.put_column("advantage", stream, np.zeros(17, np.float32))
        writer.put_column("value", stream, np.zeros(17, np.float32))
    assert compared(first, copy).columns == ("'value' only in the second",)
    found = compared(first, copy, deep=True).columns
    assert found == ("'value' only in the second", f"'advantage' has other values for {stream}")


def test_packed_and_checkpointed_stores_show_the_same_episodes(template: Path, tmp_path: Path) -> None:
    root = tmp_path / "packed"
    shutil.copytree(template, root)
    trajstore.pack(root, chunk_bytes="1KiB", wait=True, grace_s=0)
    found = compared(trajstore.open(template), root, deep=True)
    assert (found.n_equal, found.n_changed, found.schema) == (4, 0, ())
    assert [(c.name, c.first, c.second) for c in found.streams[0].changes] == [("state", "sealed", "packed")]


def test_schemas_without_common_fields_and_empty_stores_are_compared(template: Path, tmp_path: Path) -> None:
    empty = trajstore.create(tmp_path / "empty")
    assert compare(empty.snapshot, empty.snapshot, deep=True).is_empty
    found = compared(trajstore.open(template), empty, deep=True)
    assert (found.schema, found.n_only_first) == (("only the first has fields",), 4)
    assert compared(empty, template).schema == ("only the second has fields",)
    other = trajstore.create(tmp_path / "other", {"z": Field("int8")})
    assert "z: absent in the first" in " ".join(compared(trajstore.open(template), other).schema)


def test_only_the_first_differences_are_listed_but_all_are_counted(
    template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(differences, "MAX_LISTED", 2)
    found = compared(trajstore.open(template), trajstore.create(tmp_path / "empty", SCHEMA))
    assert (found.n_only_first, len(found.only_first)) == (4, 2)
    assert compare(
        trajstore.open(template).snapshot, trajstore.open(template).snapshot, checkpoints=(["a"], ["b"])
    ).checkpoints == (("a",), ("b",))
