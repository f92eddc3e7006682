"""Evicted chunks are deleted, and rows that are live or pinned never are."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import trajstore
from tests.conftest import Place
from tests.support.faulty import Call, DieAt, Died, FailOnce, FailWhile, FaultyStorage, Plan, broken, real_storage
from tests.support.sharding import mark, read_record, rewrite
from trajstore import ClosedError, DataError, Field, Schema, SnapshotExpiredError, StorageError, Store, Writer
from trajstore.format.commit_record import CommitRecord
from trajstore.format.ids import new_id
from trajstore.format.marks import Marks
from trajstore.store.garbage_collection import GarbageCollector, check_pins

SCHEMA = Schema(
    {
        "observation": Field("float32", (3,), chunk_rows=4),
        "action": Field("int64", chunk_rows=8),
        "reward": Field("float32", chunk_rows=4, shard_rows=16),
    }
)
N_OBJECTS = {"observation": 4, "action": 8, "reward": 16}

MakePlace = Callable[[str], Place]


def steps(n: int, first: int = 0) -> dict[str, Any]:
    at = np.arange(first, first + n)
    return {
        "observation": np.repeat(at[:, None], 3, 1).astype(np.float32),
        "action": at,
        "reward": at.astype(np.float32),
    }


def forget_memory() -> None:
    """Listing a place in memory looks at all that is there, so examples leave nothing behind."""
    fsspec.filesystem("memory").store.clear()


class Session:
    """A writer and its sweeper on a storage of their own, as a process would have them."""

    def __init__(
        self,
        place: Place,
        plan: Plan | None = None,
        *,
        pins: Callable[[], Mapping[str, int]] = dict,
        grace_s: float = 0.0,
        **options: Any,
    ) -> None:
        self.place = place
        self.storage = FaultyStorage(real_storage(place.url, place.options), plan)
        self.store = Store(self.storage, place.url, place.options)
        self.writer: Writer = self.store.writer(**({"commit_seconds": None} | options))
        self.sweeper = GarbageCollector(self.storage, self.writer, grace_s=grace_s, pins=pins, records=self.records)

    def records(self) -> tuple[CommitRecord, ...]:
        return trajstore.Store(self.storage, self.place.url, self.place.options).refresh().streams

    def write(self, n: int, first: int = 0) -> None:
        self.writer.append_episode(steps(n, first), terminated=True)
        self.writer.commit()

    def close(self) -> None:
        self.sweeper.close()
        self.writer.close()

    def forget(self) -> None:
        """The process is gone."""
        self.sweeper._closing.set()
        self.writer.release()


def new_store(place: Place) -> Place:
    trajstore.create(place.url, SCHEMA, fsync=False, **place.kwargs)
    return place


def opened(place: Place) -> Store:
    return trajstore.open(place.url, fsync=False, **place.kwargs)


def sealed(place: Place, n: int, *, n_commits: int = 1, **options: Any) -> str:
    """A stream of n rows that is finished, and its id."""
    with opened(place).writer("old", commit_seconds=None, **options) as writer:
        for i in range(n_commits):
            writer.append_episode(steps(n // n_commits, i * n // n_commits), terminated=True)
            writer.commit()
    return writer.stream


def chunks(place: Place, stream: str, field: str) -> list[int]:
    """Numbers of the chunk objects of a field that are there."""
    names = real_storage(place.url, place.options).list_names(f"streams/{stream}/steps/{field}")
    return sorted(int(name.split(".")[1]) for name in names if name != "zarr.json")


def n_objects(place: Place) -> int:
    return len(real_storage(place.url, place.options).list_tree("streams"))


def expected(first: int, n: int) -> dict[str, list[int]]:
    """Chunks that are left of n rows once those that lie wholly below a row are gone."""
    return {field: list(range(first // rows, -(-n // rows))) for field, rows in N_OBJECTS.items()}


def assert_left(place: Place, stream: str, first: int, n: int) -> None:
    assert {field: chunks(place, stream, field) for field in N_OBJECTS} == expected(first, n)


def rows_by_stream(place: Place) -> dict[str, list[int]]:
    """Every row that a reader finds, read from all fields."""
    store = opened(place)
    found: dict[str, list[int]] = {}
    for i, stream in enumerate(store.episodes["stream"]):
        episode = store.read_episode(i)
        assert (episode["observation"] == episode["action"][:, None]).all()
        assert (episode["reward"] == episode["action"]).all()
        found.setdefault(str(stream), []).extend(episode["action"].tolist())
    return found


@pytest.fixture
def local(tmp_path: Path) -> Place:
    return new_store(Place(str(tmp_path / "store"), {}))


@pytest.fixture
def session(local: Place) -> Iterator[Session]:
    made = Session(local)
    yield made
    made.forget()


# ---- what is deleted ----------------------------------------------------------------------------


def test_the_disk_shrinks_to_what_is_wanted(place: Place) -> None:
    new_store(place)
    old = sealed(place, 40)
    session = Session(place)
    session.write(50, 100)
    before = n_objects(place)
    session.sweeper.want({old: 17, session.writer.stream: 33})
    session.sweeper.flush()
    assert_left(place, old, 17, 40)
    assert_left(place, session.writer.stream, 33, 50)
    n_deleted = 17 // 4 + 17 // 8 + 17 // 16 + 33 // 4 + 33 // 8 + 33 // 16
    assert n_objects(place) == before - n_deleted
    assert session.sweeper.stats()["n_chunks_deleted"] == n_deleted
    assert rows_by_stream(place) == {old: list(range(17, 40)), session.writer.stream: list(range(133, 150))}
    session.write(20, 200)
    session.close()
    assert rows_by_stream(place)[session.writer.stream] == [*range(133, 150), *range(200, 220)]


def test_marks_are_in_the_records_before_anything_is_deleted(local: Place) -> None:
    class Watch(Plan):
        def __init__(self) -> None:
            self.n_deleted = 0

        def before(self, call: Call) -> None:
            if call.action == "delete":
                self.n_deleted += 1
                assert Marks.wanted(opened(local).streams)[old] == 20

    old, watch = sealed(local, 40), Watch()
    session = Session(local, watch)
    session.sweeper.want({old: 20})
    session.sweeper.flush()
    assert watch.n_deleted == 20 // 4 + 20 // 8 + 20 // 16
    session.close()


def test_a_sweep_costs_what_is_new(session: Session) -> None:
    old = sealed(session.place, 64)
    session.write(64)
    lists, last = [], 0
    for row in (20, 20, 40, 41, 60):
        session.sweeper.want({old: row, session.writer.stream: row})
        before = len(session.storage.calls)
        session.sweeper.flush()
        calls = session.storage.calls[before:]
        n_new = sum(row // n - last // n for n in N_OBJECTS.values())
        assert sum(call.action == "delete" for call in calls) == 2 * n_new
        lists.append([call.key for call in calls if call.action == "list_names" and call.key != "streams"])
        last = row
    assert [len(keys) for keys in lists] == [3, 0, 0, 0, 0]  # the other's arrays once, its own never
    assert all(old in key for key in lists[0])


def test_nothing_is_listed_while_nothing_is_to_be_deleted(session: Session) -> None:
    for _ in range(3):
        sealed(session.place, 16)
    session.write(16)
    session.sweeper.want({session.writer.stream: 3})
    session.sweeper.flush()
    assert {call.key for call in session.storage.calls if call.action == "list_names"} == {"streams"}
    assert session.storage.n_calls("delete") == 0


def test_many_chunks_go_in_waves(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trajstore.store.garbage_collection, "_WAVE_KEYS", 3)
    waves: list[int] = []
    delete = session.storage.delete
    monkeypatch.setattr(session.storage, "delete", lambda keys: (waves.append(len(keys)), delete(keys)))
    session.write(64)
    session.sweeper.want({session.writer.stream: 64})
    session.sweeper.flush()
    assert waves == [3, 3, 3, 3, 3, 1, 3, 3, 2, 3, 1]
    assert_left(session.place, session.writer.stream, 64, 64)


def test_a_mark_past_what_is_committed_waits_for_the_commit(session: Session) -> None:
    session.write(10)
    session.writer.append_episode(steps(30, 10), terminated=True)
    session.sweeper.want({session.writer.stream: 30})
    session.sweeper.flush()
    assert_left(session.place, session.writer.stream, 10, 10)
    assert session.writer.first_rows[session.writer.stream] == 10
    session.writer.commit()
    session.sweeper.flush()
    assert_left(session.place, session.writer.stream, 30, 40)
    assert rows_by_stream(session.place) == {session.writer.stream: list(range(30, 40))}


def test_the_chunk_that_is_still_being_filled_stays(session: Session) -> None:
    session.write(6)
    session.sweeper.want({session.writer.stream: 6})
    session.sweeper.flush()
    assert_left(session.place, session.writer.stream, 6, 6)
    session.write(3, 6)
    session.write(9, 9)
    assert rows_by_stream(session.place) == {session.writer.stream: list(range(6, 18))}


@pytest.mark.parametrize("index_at_start", [True, False])
def test_a_shard_goes_once_all_its_rows_may_go(session: Session, index_at_start: bool) -> None:
    old = sealed(session.place, 64)
    rewrite(Path(session.place.url), old, chunks_per_shard=3, index_at_start=index_at_start)
    session.sweeper.want({old: 30})
    session.sweeper.flush()
    left = {field: chunks(session.place, old, field) for field in N_OBJECTS}
    assert left == {"observation": [2, 3, 4, 5], "action": [1, 2], "reward": [2, 3, 4, 5]}
    assert rows_by_stream(session.place) == {old: list(range(30, 64))}


def test_spans_and_derived_columns_stay(session: Session) -> None:
    old = sealed(session.place, 40, n_commits=8)
    session.writer.put_column("c", old, np.arange(40.0))
    session.writer.commit()
    session.sweeper.want({old: 39})
    session.sweeper.flush()
    assert opened(session.place).snapshot.column("c")[old][1].tolist() == list(range(40))
    assert rows_by_stream(session.place) == {old: [39]}


# ---- pins ---------------------------------------------------------------------------------------


def test_a_pin_keeps_chunks_until_it_goes(place: Place) -> None:
    new_store(place)
    old = sealed(place, 40)
    pins = {old: 9}
    session = Session(place, pins=lambda: dict(pins))
    session.write(40)
    pins[session.writer.stream] = 21
    for _ in range(2):
        session.sweeper.want({old: 30, session.writer.stream: 40})
        session.sweeper.flush()
        assert_left(place, old, 9, 40)
        assert_left(place, session.writer.stream, 21, 40)
    pins.clear()
    session.sweeper.flush()
    assert_left(place, old, 30, 40)
    assert_left(place, session.writer.stream, 40, 40)
    session.close()


def test_a_pinned_stream_is_not_removed_even_if_no_row_of_it_is(session: Session) -> None:
    old = sealed(session.place, 40)
    session.sweeper._pins = lambda: {old: 40}
    session.sweeper.want({old: 40})
    session.sweeper.flush()
    assert old in {record.id for record in opened(session.place).streams}
    assert_left(session.place, old, 40, 40)


def test_pins_are_asked_for_after_the_marks_are_read(session: Session) -> None:
    """So that a checkpoint put later finds all marks by which anything is deleted."""
    old, order = sealed(session.place, 40), []
    records = session.sweeper._records
    session.sweeper._pins = lambda: order.append("pins") or {}  # type: ignore[func-returns-value]
    session.sweeper._records = lambda: (order.append("records"), records())[1]
    session.sweeper.want({old: 20})
    session.sweeper.flush()
    assert order == ["records", "pins"]


def test_a_checkpoint_that_a_mark_has_passed_is_refused(session: Session) -> None:
    old = sealed(session.place, 40)
    session.sweeper.want({old: 20})
    session.sweeper.check_pins({old: 7})  # not published yet, so the checkpoint came first
    session.sweeper.flush()
    session.sweeper.check_pins({old: 20})
    with pytest.raises(
        SnapshotExpiredError, match=f"'{old}': the checkpoint needs rows from 19 on, but rows below 20"
    ):
        session.sweeper.check_pins({old: 19})
    gone = new_id("gone")
    with pytest.raises(SnapshotExpiredError, match=f"stream '{gone}' was removed"):
        check_pins({gone: 0}, session.records())


@pytest.mark.parametrize("n_before", range(12))
def test_either_the_checkpoint_is_refused_or_its_rows_stay(local: Place, n_before: int) -> None:
    """A checkpoint is put at every point of a sweep, and then checked."""
    old, pins = sealed(local, 40), dict[str, int]()
    refused: list[bool] = []

    class Checkpoint(Plan):
        def before(self, call: Call) -> None:
            if call.number == start + n_before:
                pins[old] = 5
                try:
                    check_pins({old: 5}, opened(local).streams)
                except SnapshotExpiredError:
                    refused.append(True)
                    pins.clear()
                else:
                    refused.append(False)

    start = 1 << 60
    session = Session(local, Checkpoint(), pins=lambda: dict(pins))
    session.write(3)
    start = len(session.storage.calls) + 1
    session.sweeper.want({old: 30})
    session.sweeper.flush()
    assert len(refused) == 1
    assert_left(local, old, 30 if refused[0] else 5, 40)
    session.close()


# ---- whole streams ------------------------------------------------------------------------------


def test_a_finished_stream_of_which_nothing_is_wanted_is_removed(place: Place) -> None:
    new_store(place)
    old, kept = sealed(place, 40), sealed(place, 40)
    session = Session(place)
    session.write(40)
    session.sweeper.want({old: 40, kept: 39, session.writer.stream: 40})
    session.sweeper.flush()
    assert {record.id for record in opened(place).streams} == {kept, session.writer.stream}
    assert not [key for key in real_storage(place.url, place.options).list_tree("streams") if old in key]
    assert session.sweeper.stats()["n_streams_removed"] == 1
    session.sweeper.flush()
    assert session.sweeper.stats()["n_streams_removed"] == 1
    assert rows_by_stream(place) == {kept: [39]}
    session.close()


def test_a_stream_that_may_still_grow_is_not_removed_unless_its_writer_is_dead(local: Place) -> None:
    zombie = opened(local).writer("zombie", commit_seconds=None)
    zombie.append_episode(steps(40), terminated=True)
    zombie.commit()
    session = Session(local)
    session.sweeper.want({zombie.stream: 40})
    session.sweeper.flush()
    assert_left(local, zombie.stream, 40, 40)
    assert session.sweeper.stats()["n_streams_removed"] == 0
    session.writer.set_view(dead=[zombie.stream])
    session.writer.commit()
    session.sweeper.flush()
    assert zombie.stream not in {record.id for record in opened(local).streams}
    zombie.append_episode(steps(3))
    with pytest.raises(trajstore.ConflictError, match="declared its writer dead"):
        zombie.commit()
    zombie.release()
    assert rows_by_stream(local) == {}
    session.close()


def judge_of(kind: str, place: Place, other: str) -> str:
    """A sealed stream of 8 rows whose record says something about another."""
    with opened(place).writer("judge", commit_seconds=None) as writer:
        writer.append_episode(steps(8), terminated=True)
        if kind == "column":
            writer.put_column("c", other, np.arange(8.0))
        elif kind == "first_rows":
            writer.set_view(first_rows={other: 3})
        elif kind == "discarded":
            writer.set_view(discarded={other: [0]})
        else:
            writer.set_view(dead=[other])
    return writer.stream


@pytest.mark.parametrize("kind", ["column", "first_rows", "discarded", "dead"])
def test_a_stream_whose_record_readers_of_others_go_by_stays(session: Session, kind: str) -> None:
    other = sealed(session.place, 40)
    judge = judge_of(kind, session.place, other)
    before = opened(session.place)
    session.sweeper.want({judge: 8})
    session.sweeper.flush()
    after = opened(session.place)
    assert judge in {record.id for record in after.streams}
    assert_left(session.place, judge, 8, 8)
    assert Marks.wanted(after.streams)[other] == Marks.wanted(before.streams)[other]
    assert len(after.episodes) == len(before.episodes) - 1
    assert after.snapshot.columns.names == before.snapshot.columns.names


def test_the_last_stream_of_the_newest_world_stays(local: Place) -> None:
    old = sealed(local, 40)
    last = sealed(local, 8, world="w")
    session = Session(local)
    session.writer.set_view(first_rows={old: 30})
    session.writer.wait(session.writer.publish_view())
    assert Marks.wanted(opened(local).streams)[old] == 0  # said outside of the newest world
    root = Path(local.url)
    mark(root, read_record(root, last), first_row=8)
    session.sweeper.flush()
    assert last in {record.id for record in opened(local).streams}
    assert Marks.wanted(opened(local).streams)[old] == 0
    session.close()


def test_streams_that_only_spoke_of_removed_ones_go_with_them(session: Session) -> None:
    other = sealed(session.place, 40)
    judge = judge_of("discarded", session.place, other)
    session.sweeper.want({other: 40, judge: 8})
    session.sweeper.flush()
    assert {record.id for record in opened(session.place).streams} == {session.writer.stream}


# ---- worlds -------------------------------------------------------------------------------------


def test_a_zombie_of_an_older_world_deletes_nothing_that_the_newer_wants(local: Place) -> None:
    data = sealed(local, 40)
    zombie, resumed = Session(local, world="first"), Session(local, world="second")
    resumed.sweeper.want({data: 8})
    resumed.sweeper.flush()
    zombie.sweeper.want({data: 40})
    zombie.sweeper.flush()
    assert_left(local, data, 8, 40)
    resumed.sweeper.want({data: 20})
    resumed.sweeper.flush()
    zombie.sweeper.flush()
    assert_left(local, data, 20, 40)
    zombie.close()
    resumed.close()


def test_what_another_rank_of_the_world_wants_stays(local: Place) -> None:
    data = sealed(local, 40)
    ranks = [Session(local, world="w") for _ in range(2)]
    for session, row in zip(ranks, (8, 24), strict=True):
        session.sweeper.want({data: row})
    ranks[0].sweeper.flush()
    ranks[1].sweeper.flush()
    assert_left(local, data, 8, 40)
    ranks[0].sweeper.want({data: 30})
    ranks[0].sweeper.flush()
    assert_left(local, data, 24, 40)
    for session in ranks:
        session.close()


# ---- grace and readers --------------------------------------------------------------------------


def test_a_reader_with_an_older_snapshot_learns_that_it_expired(place: Place) -> None:
    new_store(place)
    old, removed = sealed(place, 40, n_commits=2), sealed(place, 8)
    reader = opened(place)
    assert len(reader.episodes) == 3
    session = Session(place)
    session.sweeper.want({old: 20, removed: 8})
    session.sweeper.flush()
    for episode, stream in ((0, old), (2, removed)):
        with pytest.raises(SnapshotExpiredError, match=f"stream '{stream}' were evicted; refresh"):
            reader.read_episode(episode)
    assert reader.read_episode(1)["action"].tolist() == list(range(20, 40))  # what is wanted is there for all
    reader.refresh()
    assert reader.read_episode(0)["action"].tolist() == list(range(20, 40))
    session.close()


def test_during_the_grace_time_an_older_snapshot_reads_on(local: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    old = sealed(local, 40)
    session = Session(local, grace_s=7.0)
    reader = opened(local)
    graces: list[float] = []

    def wait(seconds: float) -> bool:
        graces.append(seconds)
        assert Marks.wanted(opened(local).streams)[old] == 20
        assert reader.read_episode(0)["action"].tolist() == list(range(40))
        return False

    monkeypatch.setattr(session.sweeper._closing, "wait", wait)
    session.sweeper.want({})
    with session.sweeper._condition:
        session.sweeper._wanted = Marks({old: 20})  # without the thread, which would wait as well
    session.sweeper.flush()
    assert graces == [7.0]
    with pytest.raises(SnapshotExpiredError):
        reader.read_episode(0)
    session.close()


def test_a_mark_published_during_the_grace_time_of_another_waits_for_its_own(
    local: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = sealed(local, 40)
    session, other = Session(local, grace_s=7.0), Session(local)

    def publish(_: float) -> bool:
        other.writer.append_episode(steps(40), terminated=True)
        other.writer.commit()
        other.writer.set_view(first_row=24)
        other.writer.commit()
        return False

    monkeypatch.setattr(session.sweeper._closing, "wait", publish)
    with session.sweeper._condition:
        session.sweeper._wanted = Marks({old: 20})
    session.sweeper.flush()
    assert_left(local, old, 20, 40)
    assert_left(local, other.writer.stream, 0, 40)
    monkeypatch.setattr(session.sweeper._closing, "wait", lambda _: False)
    session.sweeper.flush()
    assert_left(local, other.writer.stream, 24, 40)
    session.close()
    other.close()


# ---- crashes and failures -----------------------------------------------------------------------


class Life:
    """Two streams, then a session that gives up rows of both and of its own, in two sweeps."""

    def __init__(self, place: Place, plan: Plan) -> None:
        new_store(place)
        self.place = place
        self.marks: dict[str, int] = {}
        self.old, self.gone = sealed(place, 40), sealed(place, 12)
        self.session = Session(place, pins=lambda: {self.old: 27})
        self.session.storage.plan = plan  # from the second call on; the first has read the schema
        self.own = self.session.writer.stream

    def run(self, n_tries: int = 1) -> None:
        for call in self._calls():
            for left in reversed(range(n_tries)):
                try:
                    call()
                except StorageError:
                    if not left:
                        raise
                else:
                    break

    def _calls(self) -> Iterator[Callable[[], None]]:
        session = self.session
        session.writer.append_episode(steps(30, 100), terminated=True)
        yield session.writer.commit
        self._want({self.own: 13, self.old: 17, self.gone: 12})
        yield session.sweeper.flush
        session.writer.append_episode(steps(10, 130), terminated=True)
        yield session.writer.commit
        self._want({self.own: 29, self.old: 30})
        yield session.sweeper.flush

    def _want(self, marks: dict[str, int]) -> None:
        self.marks |= marks
        # Without the thread, so that calls have the same numbers every time.
        self.session.sweeper._wanted = self.session.sweeper._wanted.raised(marks)

    def check(self) -> None:
        """Everything at or above the marks is there, nothing that was never written."""
        store, found = opened(self.place), rows_by_stream(self.place)
        marks = Marks.wanted(store.streams)
        rows = {record.id: record.rows for record in store.streams}
        assert all(marks[stream] <= self.marks.get(stream, 0) for stream in marks)
        for stream, offset in ((self.old, 0), (self.own, 100)):
            if stream in rows:
                assert found.get(stream, []) == list(range(offset + marks[stream], offset + rows[stream]))
        assert self.old in rows
        if self.gone in rows:
            assert found.get(self.gone, []) == list(range(marks[self.gone], 12))


def n_calls(new_place: MakePlace, kind: str) -> int:
    life = Life(new_place(kind), Plan())
    life.run()
    life.check()
    assert_left(life.place, life.old, 27, 40)
    assert_left(life.place, life.own, 29, 40)
    n = len(life.session.storage.calls)
    life.session.close()
    return n


@pytest.mark.parametrize("is_after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(
    ("kind", "stride"), [("local", 11), ("memory", 2), pytest.param("s3", 61, marks=pytest.mark.s3)]
)
def test_a_death_at_any_call_leaves_what_is_wanted_and_a_later_session_frees_the_rest(
    new_place: MakePlace, kind: str, stride: int, is_after: bool
) -> None:
    for at in range(2 + is_after, n_calls(new_place, kind) + 1, stride):
        life = Life(new_place(kind), DieAt(at, is_after))
        with pytest.raises(Died):
            life.run()
        life.session.forget()
        life.check()
        heir = Session(life.place)
        heir.write(3)
        marks = Marks.wanted(opened(life.place).streams)
        heir.sweeper.flush()
        for record in opened(life.place).streams:
            for field, left in expected(marks[record.id], record.rows).items():
                stop = -(-record.rows // N_OBJECTS[field])  # what lies past the record was never committed
                assert [i for i in chunks(life.place, record.id, field) if i < stop] == left
        life.check()
        heir.close()
        forget_memory()


@pytest.mark.parametrize("is_after", [False, True], ids=["error", "lost_answer"])
@pytest.mark.parametrize(("kind", "stride"), [("local", 11), ("memory", 2)])
def test_an_error_at_any_call_is_raised_and_the_next_sweep_makes_it_good(
    new_place: MakePlace, kind: str, stride: int, is_after: bool
) -> None:
    for at in range(2 + is_after, n_calls(new_place, kind) + 1, stride):
        life = Life(new_place(kind), FailOnce(at, is_after, broken))
        life.run(n_tries=2)
        life.check()
        assert_left(life.place, life.old, 27, 40)
        assert_left(life.place, life.own, 29, 40)
        assert not [key for key in real_storage(life.place.url).list_tree("streams") if life.gone in key]
        life.session.close()
        forget_memory()


# ---- in the background --------------------------------------------------------------------------


def until(condition: Callable[[], bool]) -> None:
    for _ in range(6000):
        if condition():
            return
        threading.Event().wait(0.01)
    raise AssertionError("waited in vain")


def test_what_is_no_longer_wanted_goes_in_the_background(session: Session) -> None:
    old = sealed(session.place, 40)
    session.write(40)
    for row in range(0, 38, 3):
        session.sweeper.want({old: row, session.writer.stream: row})
        session.sweeper.want({old: 0})  # what was given up stays so
    until(lambda: session.sweeper.stats()["n_chunks_deleted"] == 2 * sum(36 // n for n in N_OBJECTS.values()))
    assert session.sweeper.stats()["marks"] == {old: 36, session.writer.stream: 36}
    session.close()
    assert_left(session.place, old, 36, 40)


def test_appending_goes_on_beside_sweeps(session: Session) -> None:
    kept = 30
    for i in range(40):
        session.writer.append_episode(steps(5, 5 * i), terminated=True)
        if i % 4 == 3:
            session.writer.commit()
            session.sweeper.want({session.writer.stream: max(0, 5 * (i + 1) - kept)})
    session.sweeper.flush()
    assert_left(session.place, session.writer.stream, 200 - kept, 200)
    assert rows_by_stream(session.place) == {session.writer.stream: list(range(200 - kept, 200))}
    session.close()


def test_a_failure_in_the_background_is_raised_once_and_overcome(
    local: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trajstore.store.garbage_collection, "_RETRY_S", 0.01)
    old, plan = sealed(local, 40), FailWhile(["delete"])
    session = Session(local, plan)
    plan.error = broken
    session.sweeper.want({old: 20})
    until(lambda: session.sweeper._failure is not None)
    with pytest.raises(StorageError):
        session.sweeper.raise_pending()
    until(lambda: session.sweeper._failure is not None)  # it was tried again by itself
    plan.error = None
    until(lambda: session.sweeper.stats()["n_sweeps"] == 1)
    session.sweeper.raise_pending()
    assert_left(local, old, 20, 40)
    session.close()


def test_close_raises_what_nobody_has_heard_of(local: Place) -> None:
    old, plan = sealed(local, 40), FailWhile(["delete"])
    session = Session(local, plan)
    plan.error = broken
    session.sweeper.want({old: 20})
    until(lambda: session.sweeper._failure is not None)
    with pytest.raises(StorageError):
        session.sweeper.close()
    session.sweeper.close()
    session.writer.close()


def test_close_does_not_wait_for_the_grace_time(local: Place) -> None:
    old = sealed(local, 40)
    session = Session(local, grace_s=3600.0)
    session.sweeper.want({old: 20})
    until(lambda: Marks.wanted(opened(local).streams)[old] == 20)
    session.close()
    assert_left(local, old, 0, 40)
    with pytest.raises(ClosedError, match="the garbage collector is closed"):
        session.sweeper.want({old: 21})


def test_a_sweeper_whose_writer_is_closed_says_so_once(session: Session) -> None:
    session.write(3)
    session.writer.close()
    session.sweeper.want({session.writer.stream: 3})
    until(lambda: session.sweeper._failure is not None)
    with pytest.raises(ClosedError):
        session.sweeper.close()
    session.sweeper.close()


def test_wishes_that_make_no_sense_are_refused(session: Session) -> None:
    with pytest.raises(DataError, match="marks: expected stream ids, got 'x'"):
        session.sweeper.want({"x": 3})
    with pytest.raises(TypeError):
        session.sweeper.want({new_id("x"): 1.5})  # type: ignore[dict-item]


def test_a_sweep_without_wishes_brings_no_stream_to_life(session: Session) -> None:
    session.sweeper.flush()
    assert opened(session.place).streams == ()


# ---- against a model ----------------------------------------------------------------------------


class World:
    """Three sessions of one world that write, give up and sweep rows of each other, under pins that come and go."""

    def __init__(self) -> None:
        self.place = new_store(Place(f"memory://{new_id('sweep')}", {}))
        self.pins: dict[str, int] = {}
        self.sessions = [Session(self.place, pins=lambda: dict(self.pins), world="w") for _ in range(3)]
        self.streams = [session.writer.stream for session in self.sessions]
        self.rows = dict.fromkeys(self.streams, 0)

    def write(self, i: int, n: int) -> None:
        stream = self.streams[i]
        self.sessions[i].write(n + 1, self.rows[stream])
        self.rows[stream] += n + 1

    def want(self, i: int, n: int) -> None:
        sweeper, stream = self.sessions[i].sweeper, self.streams[n % 3]
        sweeper._wanted = sweeper._wanted.raised({stream: min(n, self.rows[stream])})

    def pin(self, _: int, n: int) -> None:
        stream = self.streams[n % 3]
        self.pins[stream] = max(n, Marks.wanted(opened(self.place).streams).get(stream, 0))

    def unpin(self, _: int, n: int) -> None:
        self.pins.pop(self.streams[n % 3], None)

    def sweep(self, i: int, _: int) -> None:
        self.sessions[i].sweeper.flush()

    def check(self, *, is_swept: bool) -> None:
        records = opened(self.place).streams
        marks = Marks.wanted(records)
        for record in records:
            limit = min(marks[record.id], self.pins.get(record.id, 1 << 60))
            for field, left in expected(limit, record.rows).items():
                found = chunks(self.place, record.id, field)
                assert found == left if is_swept else set(found) >= set(left)
        shown = {r.id: list(range(marks[r.id], r.rows)) for r in records if marks[r.id] < r.rows}
        assert rows_by_stream(self.place) == shown


@settings(max_examples=25)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["write", "want", "pin", "unpin", "sweep"]), st.integers(0, 2), st.integers(0, 30)
        ),
        max_size=25,
    )
)
def test_what_is_left_is_what_somebody_wants(actions: list[tuple[str, int, int]]) -> None:
    world = World()
    for action, i, n in actions:
        getattr(world, action)(i, n)
        world.check(is_swept=action == "sweep")
    for session in world.sessions:
        session.forget()
    forget_memory()
