"""Stores of every released format stay readable: one of each is kept in ``tests/stores``."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr

import trajstore
from trajstore import Field, Priorities, ReplayBuffer, Schema, Store, Windows

STORES = Path(__file__).parents[1] / "stores"
SCHEMA = Schema(
    {
        "observation": {
            "frame": Field("uint8", (6, 5), final=True, chunk_rows=4),
            "state": Field("float32", (3,), final=True, chunk_rows=8),
        },
        "latent": Field("bfloat16", (2,), chunk_rows=4),
        "action": Field("int64", chunk_rows=8, codec="zstd:3"),
        "reward": Field("float64", chunk_rows=8, codec="none"),
        "flag": Field("bool", chunk_rows=8),
    },
    episode={"success": bool, "seed": int, "score": float, "task": str},
)
LENGTHS = (7, 12, 3)


def episode(number: int, n: int, n_final: int) -> dict[str, Any]:
    """Values that any later version can make again."""
    t = np.arange(n) + 100 * number
    o = np.arange(n + n_final) + 100 * number
    latent = (t[:, None] + np.array([0.5, -0.5])).astype(np.float32).view(np.uint32) >> 16
    return {
        "observation": {
            "frame": np.repeat((o % 256).astype(np.uint8), 30).reshape(-1, 6, 5),
            "state": np.stack([o, -o, o / 4], 1).astype(np.float32),
        },
        "latent": latent.astype(np.uint16),
        "action": t * 1_000_000_007,
        "reward": t / 8,
        "flag": t % 3 == 0,
    }


def write(url: Path) -> None:
    """Write the kept store: ``python -c "from tests.format.test_kept_stores import *; write(Path('x'))"``."""
    import ml_dtypes

    def ours(data: dict[str, Any]) -> dict[str, Any]:
        return data | {"latent": data["latent"].view(ml_dtypes.bfloat16)}

    store = trajstore.create(url, SCHEMA)
    with store.writer("first", rank=0, world_size=2) as writer:
        metadata = {"success": True, "seed": 17, "score": 0.25, "task": "öffne die Tür", "free": [1, {"a": None}]}
        writer.append_episode(ours(episode(0, LENGTHS[0], 1)), terminated=True, metadata=metadata)
        writer.commit()
        data = ours(episode(1, LENGTHS[1], 1))
        for t in range(LENGTHS[1]):
            step = {path: v[t] for path, v in data.items() if path != "observation"}
            writer.append({**step, "observation": {p: v[t] for p, v in data["observation"].items()}}, env=3)
            if t == 5:
                writer.commit()
        last = {p: v[-1] for p, v in data["observation"].items()}
        writer.end_episode(env=3, truncated=True, final={"observation": last}, metadata={"success": False})
    crashed = store.writer("second", rank=1, world_size=2)
    crashed.append_rollout(_as_rollout(ours(episode(2, LENGTHS[2], 0))), envs=[8])
    crashed.commit()
    crashed.release()


def _as_rollout(data: dict[str, Any]) -> dict[str, Any]:
    return {k: _as_rollout(v) if isinstance(v, dict) else v[:, None] for k, v in data.items()}


@pytest.fixture
def kept(tmp_path: Path) -> Store:
    with zipfile.ZipFile(STORES / "format-1.zip") as archive:
        archive.extractall(tmp_path)
    return trajstore.open(tmp_path / "store")


def test_format_1_has_its_schema_and_episodes(kept: Store) -> None:
    assert kept.schema == SCHEMA
    table = kept.episodes
    assert table["length"].tolist() == list(LENGTHS)
    assert table["end"].tolist() == ["terminated", "truncated", "open"]
    assert table["env"].tolist() == [0, 3, 8]
    assert [record.rank for record in kept.streams] == [0, 1]
    first, second = table.row(0), table.row(1)
    assert (first["success"], first["seed"], first["score"], first["task"]) == (True, 17, 0.25, "öffne die Tür")
    assert first["metadata"] == {"free": [1, {"a": None}]}
    assert (second["success"], second["seed"], second["task"]) == (False, None, None)


@pytest.mark.parametrize("number", range(3))
def test_format_1_reads_bit_by_bit(kept: Store, number: int) -> None:
    expected = episode(number, LENGTHS[number], number < 2)
    read = kept.read_episode(number)
    assert read["observation"]["frame"].tobytes() == expected["observation"]["frame"].tobytes()
    assert read["observation"]["state"].tobytes() == expected["observation"]["state"].tobytes()
    assert (read["latent"].view(np.uint32) >> 16).astype(np.uint16).tobytes() == expected["latent"].tobytes()
    for path in ("action", "reward", "flag"):
        assert read[path].tobytes() == expected[path].tobytes()
    assert kept.episodes.row(number)["return"] == expected["reward"].sum()


def test_format_1_is_what_this_version_writes(tmp_path: Path, kept: Store) -> None:
    """A change of format must be meant: new stores have the attributes and arrays of the kept one."""
    write(tmp_path / "new")
    new = trajstore.open(tmp_path / "new")
    for old, fresh in zip(kept.streams, new.streams, strict=True):
        group, other = kept.zarr_group()["streams"][old.id], new.zarr_group()["streams"][fresh.id]
        ours, theirs = dict(group.attrs["trajstore"]), dict(other.attrs["trajstore"])
        assert ours.keys() == theirs.keys()
        for key in ("format", "kind", "schema", "rows", "spans", "text_bytes", "commit", "sealed", "view"):
            assert ours[key] == theirs[key], key
        assert metadata_of(group) == metadata_of(other)


def metadata_of(group: zarr.Group) -> dict[str, Any]:
    """The metadata of all nodes, without the names of axes, which the kept store does not have yet."""
    return {path: without_names(node.metadata.to_dict()) for path, node in group.members(None)}


def without_names(about: Any) -> Any:
    if isinstance(about, dict):
        return {key: without_names(value) for key, value in about.items() if key != "dimension_names"}
    return about


# ---- a checkpoint of several ranks ---------------------------------------------------------------------------


def write_ranks(url: Path) -> None:
    """Write the store of two ranks that is kept: one has an open episode, priorities are what `priority` says."""
    from concurrent.futures import ThreadPoolExecutor

    def run(rank: int) -> None:
        options: dict[str, Any] = {"priorities": Priorities(), "seed": 5, "commit_seconds": None}
        with ReplayBuffer(url, rank=rank, world_size=2, sample=Windows(length=2), **options) as buffer:
            for number, n in enumerate((4, 9, 6)):
                buffer.add_episode({"x": np.full(n, 10 * rank + number, np.float32)}, terminated=True, env=number)
            buffer.append({"x": np.float32(10 * rank + 3)}, env=5)
            for block in buffer.read_all_in_order():
                buffer.update_priorities(block["index"], priority(block["x"], block["index"]))
            buffer.save_checkpoint("kept", wait=True)

    with ThreadPoolExecutor(2) as ranks:
        list(ranks.map(run, range(2)))


def priority(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return x * 0.5 + index[:, 2] * 0.125


@pytest.mark.parametrize("n_ranks", [1, 2, 3])
def test_a_checkpoint_of_two_ranks_of_format_1_is_resumed_by_any_number(tmp_path: Path, n_ranks: int) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with zipfile.ZipFile(STORES / "format-1-ranks.zip") as archive:
        archive.extractall(tmp_path)

    def run(rank: int) -> list[tuple[float, int]]:
        found = []
        with ReplayBuffer.resume(tmp_path / "store", "kept", rank=rank, world_size=n_ranks) as buffer:
            sampler = buffer.reader.priority_sampler
            assert sampler is not None
            for block in buffer.read_all_in_order():
                address = sampler.steps.addresses_of(block["index"].numpy())
                stored = torch.from_numpy(sampler.priority_column.get(address))
                assert torch.equal(stored, priority(block["x"], block["index"]))
                found += list(zip(block["x"].tolist(), block["index"][:, 2].tolist(), strict=True))
        return found

    with ThreadPoolExecutor(n_ranks) as ranks:
        steps = [step for found in ranks.map(run, range(n_ranks)) for step in found]
    lengths = {10 * rank + number: n for rank in range(2) for number, n in enumerate((4, 9, 6, 1))}
    assert sorted(steps) == sorted((float(x), t) for x, n in lengths.items() for t in range(n))
