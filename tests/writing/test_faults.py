"""A fault at every single storage call of a writer's life: deaths, errors and lost answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import zarr

import trajstore
from tests.conftest import Place
from tests.support.faulty import (
    DieAt,
    Died,
    FailOnce,
    FailWhile,
    FaultyStorage,
    Plan,
    broken,
    real_storage,
    through,
)
from trajstore import CorruptionError, Field, Schema, StorageError, Store, StoreNotFoundError, Writer

SCHEMA = Schema(
    {
        "observation": Field("float32", (3,), final=True, chunk_rows=4),
        "action": Field("int64", chunk_rows=2, shard_rows=8),
        "reward": Field("float32", chunk_rows=4),
    },
    episode={"success": bool},
)
# A life takes about half a second on S3 and a walk by zarr as long, so some backends get every n-th call only.
EVERY_CALL = [("local", 1), ("memory", 1), pytest.param("s3", 11, marks=pytest.mark.s3)]
EVERY_CALL_RETRIED = [("local", 1), ("memory", 1), pytest.param("s3", 17, marks=pytest.mark.s3)]
EVERY_CALL_LOCALLY = [("local", 1), ("memory", 9), pytest.param("s3", 29, marks=pytest.mark.s3)]

MakePlace = Callable[[str], Place]
State = dict[int, tuple[Any, ...]]


def steps(seed: int, *lead: int, n_final: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    observed = (lead[0] + n_final, *lead[1:]) if lead else lead
    return {
        "observation": rng.normal(size=(*observed, 3)).astype(np.float32),
        "action": np.asarray(rng.integers(0, 1 << 40, size=lead)),
        "reward": np.asarray(rng.normal(size=lead), np.float32),
    }


class Life:
    """A writer's life on a storage: the same calls with the same data every time."""

    def __init__(self, place: Place, plan: Plan, *, is_reversed: bool = False) -> None:
        self.place = place
        self.storage = FaultyStorage(real_storage(place.url, place.options), plan, is_reversed=is_reversed)
        self.n_commits = 0  # returned, close included
        self.n_failed = 0
        self.is_created = False
        self._writer: Writer | None = None

    def run(self, after_commit: Callable[[], None] = lambda: None, *, n_tries: int = 1) -> None:
        for call in self._calls():
            n_commits = self.n_commits
            self._tried(call, n_tries)
            if self.n_commits > n_commits:
                after_commit()

    def forget(self) -> None:
        """End the background thread, which would have ended with the process."""
        if self._writer is not None:
            self._writer.release()

    def _tried(self, call: Callable[[], Any], n_tries: int) -> None:
        for left in reversed(range(n_tries)):
            try:
                call()
            except StorageError:
                self.n_failed += 1
                if not left:
                    raise
            else:
                return

    def _create(self) -> None:
        with through(self.storage):
            self._store = trajstore.create(self.place.url, SCHEMA, exist_ok=True, **self.place.kwargs)
        self.is_created = True

    def _open_writer(self) -> None:
        self._writer = self._store.writer("life", commit_seconds=None)

    def _commit(self) -> None:
        assert self._writer is not None
        self._writer.commit()
        self.n_commits += 1

    def _close(self) -> None:
        assert self._writer is not None
        self._writer.close()
        self.n_commits += 1

    def _calls(self) -> Iterator[Callable[[], Any]]:
        yield self._create
        yield self._open_writer
        writer = self._writer
        assert writer is not None
        yield from (lambda t=t: writer.append(steps(t)) for t in range(3))
        yield self._commit
        yield from (lambda t=t: writer.append(steps(10 + t, 3), envs=[1, 2, 3]) for t in range(3))
        yield self._commit
        yield lambda: writer.append(steps(20))
        final = {"observation": steps(21)["observation"]}
        yield lambda: writer.end_episode(terminated=True, final=final, metadata={"success": True, "task": "reach"})
        yield self._commit
        metadata = {"success": False, "notes": ["a", {"b": 1.5}]}
        yield lambda: writer.append_episode(steps(30, 9, n_final=1), truncated=True, env=5, metadata=metadata)
        terminated = np.array([False, True, False])
        yield lambda: writer.append(steps(31, 3), envs=[1, 2, 3], terminated=terminated)
        yield lambda: writer.abort_episode(3)
        yield self._commit
        yield from (lambda t=t: writer.append(steps(40 + t), env=1) for t in range(2))
        yield lambda: writer.append(steps(43))
        yield self._commit
        yield lambda: writer.append(steps(50))
        yield self._close


def state_of(store: Store) -> State:
    """Everything that a reader sees, but times and the stream's id."""
    state: State = {}
    for i, row in enumerate(store.episodes):
        arrays = {path: (a.dtype, a.shape, a.tobytes()) for path, a in store.read_episode(i).items()}
        shown = {name: value for name, value in row.items() if name not in ("stream", "time")}
        state[row["episode"]] = (shown, arrays)
    return state


def open_again(place: Place) -> Store:
    return trajstore.open(place.url, fsync=False, **place.kwargs)


def walk(store: Store) -> None:
    """Plain zarr sees the whole hierarchy (a warning is an error here) and the very rows that we read."""
    root = store.zarr_group()
    nodes = dict(root.members(max_depth=None))
    for record in store.streams:
        group = nodes[f"streams/{record.id}"]
        assert isinstance(group, zarr.Group)
        for path in record.layouts:
            assert group[path].shape[0] == record.length(path)
    for i, row in enumerate(store.episodes):
        column = nodes[f"streams/{row['stream']}"]["steps/observation"]
        parts = [column[span.row_start : span.row_stop] for span in store.episodes.spans(i)]
        ours = store.read_episode(i)["observation"]
        assert b"".join(part.tobytes() for part in parts) == ours.tobytes()


def write_more(place: Place) -> None:
    """A new writer works in the same store, and changes nothing that exists."""
    before = keyed_state(open_again(place))
    with open_again(place).writer("next", commit_seconds=None) as writer:
        key = writer.append_episode(steps(99, 6, n_final=1), terminated=True)
    store = open_again(place)
    assert {key: keyed_state(store)[key] for key in before} == before
    np.testing.assert_array_equal(store.read_episode(key)["observation"], steps(99, 6, n_final=1)["observation"])


def keyed_state(store: Store) -> dict[Any, Any]:
    return {
        store.episodes.key(i): {path: a.tobytes() for path, a in store.read_episode(i).items()}
        for i in range(len(store))
    }


def states_without_faults(place: Place) -> tuple[list[State], int]:
    """What is visible after each commit, and the number of storage calls that it took."""
    life, states = Life(place, Plan()), [State()]
    life.run(lambda: states.append(state_of(open_again(place))))
    return states, len(life.storage.calls)


def recovered(life: Life) -> Store:
    """The store after a death; a death inside create may have left none, and then it can be created."""
    try:
        return open_again(life.place)
    except StoreNotFoundError:
        assert not life.is_created
        return trajstore.create(life.place.url, SCHEMA, fsync=False, **life.place.kwargs)


def die(place: Place, plan: Plan, states: list[State], *, is_reversed: bool = False) -> None:
    life = Life(place, plan, is_reversed=is_reversed)
    with pytest.raises(Died):
        life.run()
    life.forget()
    store = recovered(life)
    assert state_of(store) in states[life.n_commits : life.n_commits + 2], f"{plan}: {life.storage.calls[-1]}"


def test_the_scenario_rewrites_tails_and_fills_chunks(new_place: MakePlace) -> None:
    place = new_place("local")
    life = Life(place, Plan())
    life.run()
    (record,) = open_again(place).streams
    first_chunk = f"streams/{record.id}/steps/action/c.0"
    assert sum(call.key == first_chunk for call in life.storage.calls) > 1
    assert record.rows > 4 * 4


@pytest.mark.parametrize("is_after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(("kind", "stride"), EVERY_CALL)
def test_a_death_at_any_call_leaves_the_state_of_a_commit(
    new_place: MakePlace, kind: str, stride: int, is_after: bool
) -> None:
    states, n_calls = states_without_faults(new_place(kind))
    for at in range(1, n_calls + 1, stride):
        die(new_place(kind), DieAt(at, is_after), states)


@pytest.mark.parametrize("is_after", [False, True], ids=["before", "after"])
def test_a_death_in_a_wave_that_runs_backwards_leaves_the_state_of_a_commit(
    new_place: MakePlace, is_after: bool
) -> None:
    states, n_calls = states_without_faults(new_place("memory"))
    for at in range(1, n_calls + 1):
        die(new_place("memory"), DieAt(at, is_after), states, is_reversed=True)


@pytest.mark.parametrize("is_reversed", [False, True], ids=["forwards", "backwards"])
@pytest.mark.parametrize(("kind", "stride"), EVERY_CALL_LOCALLY)
def test_plain_zarr_walks_what_a_death_leaves(
    new_place: MakePlace, kind: str, stride: int, is_reversed: bool
) -> None:
    states, n_calls = states_without_faults(new_place(kind))
    for at in range(1, n_calls + 1, stride):
        place = new_place(kind)
        die(place, DieAt(at, True), states, is_reversed=is_reversed)
        walk(open_again(place))


@pytest.mark.parametrize(("kind", "stride"), EVERY_CALL_LOCALLY)
def test_a_new_writer_works_after_a_death_at_any_call(new_place: MakePlace, kind: str, stride: int) -> None:
    states, n_calls = states_without_faults(new_place(kind))
    for at in range(1, n_calls + 1, stride):
        place = new_place(kind)
        die(place, DieAt(at, True), states)
        write_more(place)
        walk(open_again(place))


@pytest.mark.parametrize("is_after", [False, True], ids=["error", "lost_answer"])
@pytest.mark.parametrize(("kind", "stride"), EVERY_CALL_RETRIED)
def test_an_error_at_any_call_surfaces_once_and_the_same_call_again_makes_it_good(
    new_place: MakePlace, kind: str, stride: int, is_after: bool
) -> None:
    states, n_calls = states_without_faults(new_place(kind))
    for at in range(1, n_calls + 1, stride):
        life = Life(new_place(kind), FailOnce(at, is_after, broken))
        found = [State()]
        life.run(lambda place=life.place, found=found: found.append(state_of(open_again(place))), n_tries=2)
        assert (life.n_failed, found == states) == (1, True), life.storage.calls[at - 1]


def test_a_failed_read_raises_and_the_store_is_usable_afterwards(place: Place) -> None:
    Life(place, Plan()).run()
    plan = FailWhile(["get"])
    with through(FaultyStorage(real_storage(place.url, place.options), plan)):
        store = open_again(place)
    expected = state_of(open_again(place))
    plan.error = broken
    with pytest.raises(StorageError, match="Input/output error"):
        store.read_episode(0)
    plan.error = None
    assert state_of(store) == expected


def test_a_failed_refresh_raises_and_keeps_what_was_shown(place: Place) -> None:
    Life(place, Plan()).run()
    plan = FailWhile(["get", "list_names"])
    with through(FaultyStorage(real_storage(place.url, place.options), plan)):
        store = open_again(place)
    expected = state_of(store)
    plan.error = broken
    with pytest.raises(StorageError, match="Input/output error"):
        store.refresh()
    plan.error = None
    assert state_of(store) == expected


def test_a_chunk_that_is_gone_raises_and_the_other_episodes_stay_readable(place: Place) -> None:
    Life(place, Plan()).run()
    expected = state_of(open_again(place))
    store = open_again(place)  # has no chunk in memory
    chunk = f"streams/{store.streams[0].id}/steps/action/c.0"
    real_storage(place.url, place.options).delete([chunk])
    with pytest.raises(CorruptionError, match=r"steps/action.*chunk [0-3] \(rows .* is missing"):
        store.read_episode(0)
    assert store.read_episode(5)["action"].tobytes() == expected[5][1]["action"][2]
