"""Real processes, killed with SIGKILL at random moments: what they reported as committed exists.

Run as a script, this file is the nursery: it imports trajstore once and forks a child for every line on its
standard input, so that a life starts in milliseconds. Children report on the nursery's standard output.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

import trajstore
from trajstore import EpisodeKey, Field, Schema, Store, StoreNotFoundError, Writer

SCHEMA = Schema(
    {
        "observation": Field("float32", (3,), final=True, chunk_rows=32),
        "action": Field("int64", chunk_rows=16, shard_rows=64),
        "reward": Field("float32", chunk_rows=16),
    }
)
N_KILLS = 60
N_CREATE_KILLS = 25
ENVS = [1, 2, 3, 4]  # stepped together; env 0 is stepped alone, env 5 gets whole episodes

Arrays = dict[str, Any]


def some_steps(rng: np.random.Generator, *lead: int, n_final: int = 0) -> Arrays:
    observed = (lead[0] + n_final, *lead[1:]) if lead else lead
    return {
        "observation": rng.normal(size=(*observed, 3)).astype(np.float32),
        "action": np.asarray(rng.integers(0, 1 << 60, size=lead)),
        "reward": np.asarray(rng.normal(size=lead), np.float32),
    }


def operations(seed: int) -> Iterator[tuple[str, Arrays, Any]]:
    """What a life does, for ever; the parent replays it from the seed."""
    rng = np.random.default_rng(seed)
    while True:
        for _ in range(int(rng.integers(1, 6))):
            kind = rng.choice(["episode", "step", "steps"])
            if kind == "episode":
                yield "episode", some_steps(rng, int(rng.integers(1, 40)), n_final=1), None
            elif kind == "step":
                yield "step", some_steps(rng), bool(rng.random() < 0.1)
            else:
                yield "steps", some_steps(rng, len(ENVS)), rng.random(len(ENVS)) < 0.1
        yield "commit", {}, None


class Model:
    """The same operations on lists: what a reader must see after each commit."""

    def __init__(self) -> None:
        self.episodes: list[Arrays] = []
        self.ends: list[str] = []
        self._open: dict[int, int] = {}

    def apply(self, kind: str, data: Arrays, flags: Any) -> None:
        if kind == "episode":
            self.episodes.append(data)
            self.ends.append("terminated")
        elif kind == "step":
            self._step(0, {name: value[None] for name, value in data.items()}, flags)
        elif kind == "steps":
            for lane, env in enumerate(ENVS):
                self._step(env, {name: value[lane : lane + 1] for name, value in data.items()}, flags[lane])

    def _step(self, env: int, row: Arrays, is_terminated: bool) -> None:
        if env not in self._open:
            self._open[env] = len(self.episodes)
            self.episodes.append({name: value[:0] for name, value in row.items()})
            self.ends.append("open")
        i = self._open[env]
        self.episodes[i] = {name: np.concatenate([old, row[name]]) for name, old in self.episodes[i].items()}
        if is_terminated:
            self.ends[self._open.pop(env)] = "terminated"


def model_after(seed: int, n_commits: int) -> Model:
    model = Model()
    stream = operations(seed)
    for _ in range(n_commits):
        for kind, data, flags in itertools.takewhile(lambda operation: operation[0] != "commit", stream):
            model.apply(kind, data, flags)
    return model


def apply(writer: Writer, kind: str, data: Arrays, flags: Any) -> None:
    if kind == "episode":
        writer.append_episode(data, terminated=True, env=5)
    elif kind == "step":
        writer.append(data, terminated=flags)
    elif kind == "steps":
        writer.append(data, envs=ENVS, terminated=flags)
    else:
        writer.commit()


# ---- the children -------------------------------------------------------------------------------


def live(url: str, seed: int) -> None:
    """Write until killed, and say so after every commit that returned."""
    writer = trajstore.open(url, fsync=seed % 4 == 0).writer("life", commit_seconds=None)
    say("stream", writer.stream)
    n_commits = 0
    for kind, data, flags in operations(seed):
        apply(writer, kind, data, flags)
        if kind == "commit":
            n_commits += 1
            say("commit", n_commits)


def outlive(url: str, seed: int) -> None:
    """Commit twice, with a stop by hand before the second commit."""
    writer = trajstore.open(url, fsync=False).writer("twin", commit_seconds=None)
    stream = operations(seed)
    for n_commits in (1, 2):
        for kind, data, flags in itertools.takewhile(lambda operation: operation[0] != "commit", stream):
            apply(writer, kind, data, flags)
        if n_commits == 2:
            say("stopping", writer.stream)
            os.kill(os.getpid(), signal.SIGSTOP)
        writer.commit()
        say("commit", n_commits)


def create_many(folder: str, _: int) -> None:
    for i in itertools.count():
        trajstore.create(f"{folder}/{i}", SCHEMA if i % 2 else None, fsync=i % 3 == 0)
        say("created", i)


def say(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def nursery() -> None:
    for line in sys.stdin:
        name, url, seed = line.rstrip("\n").split("\t")
        child = os.fork()
        if child == 0:
            {"live": live, "outlive": outlive, "create_many": create_many}[name](url, int(seed))
            os._exit(0)
        say("born", child)
        os.waitpid(child, 0)
        say("gone", child)


# ---- the parent ---------------------------------------------------------------------------------


class Nursery:
    """Starts lives one at a time and hears their reports."""

    def __init__(self) -> None:
        paths = [str(Path(trajstore.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": environment}
        self._process = subprocess.Popen([sys.executable, __file__], **pipes)
        self.child = 0

    def start(self, name: str, url: str, seed: int) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{name}\t{url}\t{seed}\n")
        self._process.stdin.flush()
        # The child may speak before the nursery does; nothing is lost, only the order is free.
        self._heard: list[list[str]] = []
        self.child = int(self.hear("born"))

    def hear(self, word: str) -> str:
        """The next report that starts with ``word``; others are kept."""
        for i, words in enumerate(self._heard):
            if words[0] == word:
                return self._heard.pop(i)[1]
        assert self._process.stdout is not None
        for line in self._process.stdout:
            words = line.split()
            if words[0] == word:
                return words[1]
            self._heard.append(words)
        raise AssertionError(f"the nursery ended before it said {word!r}")

    def kill(self) -> list[list[str]]:
        """SIGKILL the child; return all of its reports that were not read yet."""
        os.kill(self.child, signal.SIGKILL)
        self.hear("gone")
        self.child = 0
        return self._heard

    def end(self) -> None:
        if self.child:
            os.kill(self.child, signal.SIGKILL)
        assert self._process.stdin is not None
        self._process.stdin.close()
        for _ in self._process.stdout or ():
            pass
        self._process.wait(30)
        if self._process.stdout is not None:
            self._process.stdout.close()


@pytest.fixture(scope="module")
def lives() -> Iterator[Nursery]:
    home = Nursery()
    yield home
    home.end()


def assert_shows(store: Store, stream: str, model: Model) -> None:
    """Every episode of the stream, bit by bit, and no other."""
    table = store.episodes
    mine = np.flatnonzero(table["stream"] == stream)
    assert [str(end) for end in table["end"][mine]] == model.ends
    for i, expected in zip(mine, model.episodes, strict=True):
        found = store.read_episode(int(i))
        assert {name: value.tobytes() for name, value in found.items()} == {
            name: value.tobytes() for name, value in expected.items()
        }


def assert_shows_a_commit(store: Store, stream: str, seed: int, n_reported: int) -> None:
    """The stream shows its last reported commit, or the one in flight."""
    record = next((r for r in store.streams if r.id == stream), None)
    n_shown = record.commit if record is not None else 0
    assert n_shown in (n_reported, n_reported + 1)
    assert_shows(store, stream, model_after(seed, n_shown))


def walk(store: Store) -> None:
    """Plain zarr walks it all, and a stream's group shows the committed shapes; a warning is an error here."""
    nodes = dict(store.zarr_group().members(max_depth=None))
    for record in store.streams:
        group = nodes[f"streams/{record.id}"]
        assert isinstance(group, zarr.Group)
        for path in record.layouts:
            assert group[path].shape[0] == record.length(path)


def kill_one_life(lives: Nursery, url: str, seed: int, seconds: float) -> tuple[str, int]:
    """One life that ends by SIGKILL so long after it opened its writer; returns its stream and commits."""
    lives.start("live", url, seed)
    stream = lives.hear("stream")
    time.sleep(seconds)
    reports = lives.kill()
    return stream, max((int(words[1]) for words in reports if words[0] == "commit"), default=0)


def test_nothing_reported_is_lost_however_often_a_writer_is_killed(lives: Nursery, tmp_path: Path) -> None:
    url, rng = str(tmp_path / "store"), np.random.default_rng(7)
    trajstore.create(url, SCHEMA)
    reported: dict[str, tuple[int, int]] = {}
    total, patience = 0, 1.0  # on a busy machine, lives last longer until enough of them commit
    for seed in range(N_KILLS):
        stream, n_commits = kill_one_life(lives, url, seed, patience * float(rng.uniform(0.005, 0.150)))
        reported[stream] = (seed, n_commits)
        total += n_commits
        patience = min(40.0, patience * 1.5) if total <= 2 * seed else max(1.0, patience / 1.5)
        store = trajstore.open(url)
        assert_shows_a_commit(store, stream, seed, n_commits)
        if seed % 10 == 9:
            walk(store)
    assert {record.id for record in store.streams} <= reported.keys()
    for stream, (seed, n_commits) in reported.items():
        assert_shows_a_commit(store, stream, seed, n_commits)
    assert total > N_KILLS


def test_a_killed_writer_leaves_its_open_episodes_open(lives: Nursery, tmp_path: Path) -> None:
    url = str(tmp_path / "store")
    trajstore.create(url, SCHEMA)
    lives.start("live", url, 1)
    stream = lives.hear("stream")
    until_commit = iter(lambda: lives.hear("commit"), "8")
    assert len(list(until_commit)) == 7
    lives.kill()
    store = trajstore.open(url)
    ends = store.episodes["end"][store.episodes["stream"] == stream]
    assert ("open" in ends, "cut" in ends, store.streams[0].is_sealed) == (True, False, False)


def test_a_writer_that_outlives_its_replacement_does_no_harm(lives: Nursery, tmp_path: Path) -> None:
    url = str(tmp_path / "store")
    store = trajstore.create(url, SCHEMA, fsync=False)
    lives.start("outlive", url, 5)
    zombie = lives.hear("stopping")
    with store.writer("twin", commit_seconds=None) as replacement:
        for kind, data, flags in itertools.islice(operations(6), 30):
            apply(replacement, kind, data, flags)
    expected = contents(trajstore.open(url), replacement.stream)
    assert_shows(trajstore.open(url), zombie, model_after(5, 1))
    os.kill(lives.child, signal.SIGCONT)
    lives.hear("gone")
    lives.child = 0
    store = trajstore.open(url)
    assert_shows(store, zombie, model_after(5, 2))
    assert contents(store, replacement.stream) == expected


def contents(store: Store, stream: str) -> dict[EpisodeKey, dict[str, bytes]]:
    keys = [store.episodes.key(i) for i in range(len(store)) if store.episodes.key(i).stream == stream]
    return {key: {name: value.tobytes() for name, value in store.read_episode(key).items()} for key in keys}


def test_a_kill_inside_create_leaves_a_store_or_a_place_for_one(lives: Nursery, tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    for life in range(N_CREATE_KILLS):
        folder = tmp_path / str(life)
        folder.mkdir()
        lives.start("create_many", str(folder), life)
        lives.hear("created")
        time.sleep(float(rng.uniform(0.001, 0.020)))
        created = {words[1] for words in lives.kill() if words[0] == "created"} | {"0"}
        for place in sorted(folder.iterdir()):
            assert_usable(str(place), must_exist=place.name in created)


def assert_usable(url: str, *, must_exist: bool) -> None:
    try:
        store = trajstore.open(url, fsync=False)
    except StoreNotFoundError:
        assert not must_exist
        store = trajstore.create(url, SCHEMA, fsync=False)
    if must_exist:
        return
    data = some_steps(np.random.default_rng(0), 4, n_final=1)
    with store.writer("first", commit_seconds=None) as writer:
        key = writer.append_episode(data, terminated=True)
    store.refresh()
    walk(store)
    assert store.read_episode(key)["action"].tobytes() == data["action"].tobytes()


if __name__ == "__main__":
    nursery()
