"""Stores, snapshots and writers across real processes: forked, spawned, and many at once."""

from __future__ import annotations

import contextlib
import multiprocessing
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trajstore
from tests.conftest import Place
from trajstore import Field, Schema, Snapshot, Store, Writer
from trajstore.errors import ClosedError

CHILD_S = 180
BARRIER_S = 90  # shorter, so that a child left alone by one that failed says so
KINDS = ["local", pytest.param("s3", marks=pytest.mark.s3)]
METHODS = ["fork", "spawn"]
SCHEMA = Schema({"observation": Field("float32", (3,), final=True), "action": Field("int64")})
N_WRITERS, N_EPISODES = 4, 10

any_process = pytest.mark.parametrize("method", METHODS)
shared_backend = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """A spawned child finds this module by its name."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1]))


class ChildError(Exception):
    """What a child process raised, or that it hangs."""


def call(method: str, function: Callable[..., Any], *args: Any) -> Any:
    """What the function returns in a child process."""
    context: Any = multiprocessing.get_context(method)
    here, there = context.Pipe(duplex=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forking beside threads is what is tested
        child = context.Process(target=answer, args=(there, function, args))
        child.start()
    there.close()
    try:
        result, error = here.recv() if here.poll(CHILD_S) else (None, "it hangs")
    finally:
        child.kill()
        child.join()
        child.close()
        here.close()
    if error is not None:
        raise ChildError(f"{function.__name__}: {error}")
    return result


def answer(there: Any, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        there.send((function(*args), None))
    except Exception as error:
        there.send((None, repr(error)))


def call_at_once(*calls: tuple[Any, ...]) -> list[Any]:
    """The same in several forked children at the same time; each gets a common barrier as its first argument."""
    start = multiprocessing.get_context("fork").Barrier(len(calls), timeout=BARRIER_S)
    with ThreadPoolExecutor(len(calls)) as threads:
        running = [threads.submit(call, "fork", function, start, *args) for function, *args in calls]
    if errors := [str(future.exception()) for future in running if future.exception()]:
        pytest.fail("; ".join(errors))
    return [future.result() for future in running]


def episode(writer: int, number: int) -> dict[str, Any]:
    n = 3 + (writer * 7 + number * 3) % 10
    t = np.arange(n + 1, dtype=np.float32)
    observation = np.stack([np.full_like(t, writer), np.full_like(t, number), t], axis=1)
    return {"observation": observation, "action": np.arange(n) * 1000 + writer * 100 + number}


def is_same(read: dict[str, Any], written: dict[str, Any]) -> bool:
    return read.keys() == written.keys() and all(np.array_equal(read[name], written[name]) for name in written)


def read_all(shown: Store | Snapshot) -> list[dict[str, Any]]:
    return [shown.read_episode(i) for i in range(len(shown.episodes))]


def refresh_and_read_all(store: Store) -> list[dict[str, Any]]:
    store.refresh()
    return read_all(store)


def write_one(store: Store, number: int) -> str:
    with store.writer("child") as writer:
        writer.append_episode(episode(0, number), terminated=True)
        return writer.stream


@pytest.fixture
def place(kind: str, new_place: Callable[[str], Place]) -> Place:
    return new_place(kind)


@pytest.fixture
def grown(place: Place) -> Store:
    """A store that shows two episodes and has been used, while a third was committed meanwhile."""
    store = trajstore.create(place.url, SCHEMA, **place.kwargs)
    with store.writer(commit_seconds=None) as writer:
        writer.append_episode(episode(0, 0), terminated=True)
        writer.append_episode(episode(0, 1), terminated=True)
        writer.commit()
        store.refresh()
        assert len(read_all(store)) == 2
        writer.append_episode(episode(0, 2), terminated=True)
    return store


# ---- one store, another process ------------------------------------------------------------------------


@shared_backend
@any_process
def test_a_child_reads_the_very_snapshot_of_its_parent(grown: Store, method: str) -> None:
    for shown in (grown, grown.snapshot):
        read = call(method, read_all, shown)
        assert len(read) == 2
        assert all(is_same(read[i], episode(0, i)) for i in range(2))


@shared_backend
@any_process
def test_a_snapshot_that_nobody_has_read_yet_is_read_by_a_child(grown: Store, method: str) -> None:
    grown.refresh()
    read = call(method, read_all, grown.snapshot)
    assert len(read) == 3
    assert all(is_same(read[i], episode(0, i)) for i in range(3))


@shared_backend
@any_process
def test_a_child_refreshes_without_its_parent_seeing_it(grown: Store, method: str) -> None:
    assert len(call(method, refresh_and_read_all, grown)) == 3
    assert len(grown) == 2


@shared_backend
@any_process
def test_a_child_writes_a_stream_of_its_own(grown: Store, method: str) -> None:
    stream = call(method, write_one, grown, 7)
    grown.refresh()
    assert is_same(grown.read_episode((stream, 0)), episode(0, 7))
    assert len(grown) == 4


# ---- a writer belongs to its process -------------------------------------------------------------------

ACTIONS: dict[str, Callable[[Writer], object]] = {
    "append": lambda writer: writer.append({"observation": np.zeros(3, np.float32), "action": 1}),
    "append_episode": lambda writer: writer.append_episode(episode(0, 1), terminated=True, env=1),
    "commit": lambda writer: writer.commit(),
    "close": lambda writer: writer.close(),
    "discard": lambda writer: writer.discard(),
    "leaving its block": lambda writer: contextlib.ExitStack().enter_context(writer).__exit__(None, None, None),
}


def refuses(writer: Writer) -> dict[str, str]:
    refused = {}
    for name, action in ACTIONS.items():
        try:
            action(writer)
        except ClosedError as error:
            refused[name] = str(error)
    return refused


@shared_backend
def test_a_writer_refuses_to_work_in_a_forked_child_and_goes_on_in_its_parent(place: Place) -> None:
    store = trajstore.create(place.url, SCHEMA, **place.kwargs)
    with store.writer(commit_seconds=None) as writer:
        writer.append_episode(episode(0, 0), terminated=True)
        writer.commit()
        writer.append_episode(episode(0, 1), terminated=True)  # staged while the child is born
        refused = call("fork", refuses, writer)
        assert refused.keys() == ACTIONS.keys()
        assert all(writer.stream in message for message in refused.values())
        writer.append_episode(episode(0, 2), terminated=True)
    store.refresh()
    assert len(store) == 3
    assert all(is_same(store.read_episode(i), episode(0, i)) for i in range(3))
    assert store.streams[0].is_sealed


def test_the_end_of_a_forked_child_commits_nothing(url: str) -> None:
    store = trajstore.create(url, SCHEMA)
    with store.writer(commit_seconds=None) as writer:
        writer.append_episode(episode(0, 0), terminated=True)
        assert call("fork", lambda: "alive") == "alive"
        assert len(store.refresh().episodes) == 0


# ---- many processes at once ----------------------------------------------------------------------------


def write_many(start: Any, url: str, number: int) -> str:
    """Episodes step by step, with commits in the middle of them."""
    start.wait()
    with trajstore.open(url).writer(f"w{number}", commit_seconds=None) as writer:
        for e in range(N_EPISODES):
            data = episode(number, e)
            n = len(data["action"])
            for t in range(n):
                final = {"observation": data["observation"][n]} if t == n - 1 else None
                step = {"observation": data["observation"][t], "action": data["action"][t]}
                writer.append(step, terminated=t == n - 1, final=final)
                if t % 4 == 2:
                    writer.commit()
        return writer.stream


def watch(start: Any, url: str) -> tuple[int, list[str]]:
    """Refresh until every writer is done; how many different snapshots there were, and what was wrong."""
    store, seen, wrong = trajstore.open(url), set(), []
    start.wait()
    deadline = time.monotonic() + CHILD_S
    while time.monotonic() < deadline:
        snapshot = store.refresh()
        seen.add(tuple(record.commit for record in snapshot.streams))
        wrong += faults(snapshot)
        if sum(record.is_sealed for record in snapshot.streams) == N_WRITERS:
            break
    return len(seen), wrong


def faults(snapshot: Snapshot) -> list[str]:
    table, found = snapshot.episodes, []
    names = {record.id: int(record.name[1:]) for record in snapshot.streams}
    for i in range(len(table)):
        key = table.key(i)
        data, read = episode(names[key.stream], key.episode), snapshot.read_episode(i)
        n, end = int(table["length"][i]), table["end"][i]
        is_whole = n == len(data["action"]) and len(read["observation"]) == n + 1
        expected = {name: values[: len(read[name])] for name, values in data.items()}
        if not is_same(read, expected) or len(read["action"]) != n or (end, is_whole) not in GOOD_ENDS:
            found.append(f"{key}: {end} with {n} steps")
    return found


GOOD_ENDS = {("open", False), ("terminated", True)}


def test_readers_beside_many_writer_processes_see_whole_commits_and_in_the_end_everything(url: str) -> None:
    trajstore.create(url, SCHEMA)
    writers = [(write_many, url, number) for number in range(N_WRITERS)]
    (n_snapshots, wrong), *streams = call_at_once((watch, url), *writers)
    assert wrong == []
    assert n_snapshots > 2
    store = trajstore.open(url)
    assert sorted(record.id for record in store.streams) == sorted(streams)
    assert len(store) == N_WRITERS * N_EPISODES
    for number, stream in enumerate(streams):
        for e in range(N_EPISODES):
            assert is_same(store.read_episode((stream, e)), episode(number, e))


def create_all(start: Any, urls: list[str], options: dict[str, Any]) -> list[str]:
    outcomes = []
    for url in urls:
        start.wait()
        try:
            trajstore.create(url, SCHEMA, **options)
        except trajstore.StoreExistsError:
            outcomes.append("exists")
        else:
            outcomes.append("created")
    return outcomes


@shared_backend
def test_exactly_one_of_two_processes_creates_a_store(place: Place) -> None:
    urls = [f"{place.url}/{i}" for i in range(10)]
    outcomes = call_at_once(*[(create_all, urls, place.kwargs)] * 2)
    assert [sorted(pair) for pair in zip(*outcomes, strict=True)] == [["created", "exists"]] * 10
    for url in urls:
        assert trajstore.open(url, **place.kwargs).schema == SCHEMA


def commit_first(start: Any, urls: list[str], options: dict[str, Any], dtype: str) -> list[str]:
    """Be the first writer of every store, with a schema read off the data."""
    outcomes = []
    for url in urls:
        start.wait()
        try:
            with trajstore.open(url, **options).writer(commit_seconds=None) as writer:
                writer.append_episode({"x": np.arange(6, dtype=dtype).reshape(2, 3)}, terminated=True)
                start.wait()
                writer.commit()
        except trajstore.SchemaError as error:
            outcomes.append(f"{type(error).__name__}: {error}")
        else:
            outcomes.append("committed")
    return outcomes


@shared_backend
def test_exactly_one_of_two_differing_schemas_wins(place: Place) -> None:
    urls = [f"{place.url}/{i}" for i in range(6)]
    for url in urls:
        trajstore.create(url, **place.kwargs)
    dtypes = ["float32", "float64"]
    outcomes = call_at_once(*[(commit_first, urls, place.kwargs, dtype) for dtype in dtypes])
    for url, pair in zip(urls, zip(*outcomes, strict=True), strict=True):
        winner = pair.index("committed")
        assert pair[1 - winner].startswith("SchemaError")
        store = trajstore.open(url, **place.kwargs)
        assert store.schema is not None
        assert store.schema["x"].dtype == dtypes[winner]
        assert [store.read_episode(i)["x"].tolist() for i in range(len(store))] == [[[0, 1, 2], [3, 4, 5]]]


@shared_backend
def test_two_first_writers_of_one_schema_both_commit(place: Place) -> None:
    urls = [f"{place.url}/{i}" for i in range(3)]
    for url in urls:
        trajstore.create(url, **place.kwargs)
    outcomes = call_at_once(*[(commit_first, urls, place.kwargs, "float32")] * 2)
    assert outcomes == [["committed"] * 3] * 2
    assert [len(trajstore.open(url, **place.kwargs)) for url in urls] == [2] * 3
