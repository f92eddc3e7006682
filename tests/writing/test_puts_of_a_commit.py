"""How many objects a commit puts, and how many a stream has."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import trajstore
from tests.support.faulty import FaultyStorage, real_storage, through
from trajstore import Field, Schema

N_ENVS = 16
FIELDS = {
    "observation": Field("float32", (17,), final=True),
    "action": Field("float32", (6,)),
    "reward": Field("float32"),
    "log_prob": Field("float32"),
    "value": Field("float32"),
    "goal": Field("float32", (3,)),
}


def steps(rng: np.random.Generator) -> dict[str, np.ndarray[tuple[int, ...], np.dtype[np.float32]]]:
    return {path: rng.standard_normal((N_ENVS, *spec.shape), np.float32) for path, spec in FIELDS.items()}


def test_a_commit_of_six_fields_is_at_most_ten_puts_on_average(tmp_path: Path) -> None:
    storage, rng = FaultyStorage(real_storage(str(tmp_path / "store"))), np.random.default_rng(0)
    with through(storage):
        store = trajstore.create("store", Schema(FIELDS))
    with store.writer(commit_seconds=None) as writer:
        counts = []
        for _ in range(41):
            for _ in range(50):
                writer.append(steps(rng), envs=range(N_ENVS))
            before = storage.n_calls("put")
            writer.commit()
            counts.append(storage.n_calls("put") - before)
        # The first one creates the stream. Later most are six fields, two arrays of spans and the record; a column
        # whose object is filled, and the next one begun, takes two. All objects have a power of two of rows, so
        # that can be all columns at once.
        assert sum(counts[1:]) / len(counts[1:]) <= 10
        assert max(counts[1:]) <= 15
        assert counts[1:].count(9) >= 20


def test_a_gigabyte_of_state_would_be_two_hundred_objects(tmp_path: Path) -> None:
    """200 MB in large commits: the objects of its columns, as if it were a GB; metadata does not grow."""
    store = trajstore.create(tmp_path / "store", Schema({"state": Field("float32", (64,))}), fsync=False)
    episode = np.random.default_rng(0).standard_normal((25_000, 64), np.float32)
    with store.writer(commit_seconds=None, buffer_bytes="64MiB") as writer:
        for _ in range(32):
            writer.append_episode({"state": episode}, terminated=True)
    n_objects = len(list((tmp_path / "store").rglob("c.*")))
    assert n_objects * 1e9 / (32 * episode.nbytes) < 200
