"""What a session's record says about itself and about others: worlds, marks, dead writers."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import trajstore
from tests.conftest import Place
from tests.support.faulty import BlockPuts, FailOnce, FailWhile, FaultyStorage, Plan, broken, real_storage
from trajstore import DataError, Field, Schema, StorageError, Store, Writer
from trajstore.format.commit_record import CommitRecord, SessionView
from trajstore.format.ids import new_id
from trajstore.format.marks import Marks

SCHEMA = Schema({"action": Field("int64", chunk_rows=4), "reward": Field("float32", chunk_rows=8)})
OTHER, THIRD = new_id("other"), new_id("third")


def steps(n: int, first: int = 0) -> dict[str, Any]:
    at = np.arange(first, first + n)
    return {"action": at, "reward": at.astype(np.float32)}


def new_store(url: str, plan: Plan | None = None) -> Store:
    trajstore.create(url, SCHEMA, exist_ok=True, fsync=False)
    return Store(FaultyStorage(real_storage(url), plan), url, None)


def record_of(url: str, writer: Writer, **kwargs: Any) -> CommitRecord:
    return next(r for r in trajstore.open(url, **kwargs).streams if r.id == writer.stream)


# ---- lineage ------------------------------------------------------------------------------------


def test_a_stream_says_from_birth_which_world_it_belongs_to(place: Place) -> None:
    store = trajstore.create(place.url, SCHEMA, **place.kwargs)
    checkpoint = new_id("step-100")
    with store.writer("w", world="run-2", checkpoint=checkpoint, dead=[OTHER, THIRD, OTHER]) as writer:
        writer.wait(writer.publish_view())
        born = record_of(place.url, writer, **place.kwargs)
        assert (born.rows, born.commit, born.is_sealed) == (0, 1, False)
        writer.append_episode(steps(5), terminated=True)
    for record in (born, record_of(place.url, writer, **place.kwargs)):
        assert (record.world, record.checkpoint, record.view.dead) == ("run-2", checkpoint, (OTHER, THIRD))


def test_the_very_first_record_names_world_and_dead_writers(url: str) -> None:
    class Seen(Plan):
        def __init__(self) -> None:
            self.births: list[CommitRecord] = []

        def after(self, call: Any) -> None:
            if call.action == "put" and call.key.endswith(f"{writer.stream}/zarr.json") and not self.births:
                self.births.append(record_of(url, writer))

    plan = Seen()
    writer = new_store(url, plan).writer(world="a", dead=(OTHER,), commit_seconds=None)
    writer.append_episode(steps(3))
    writer.close()
    (birth,) = plan.births
    assert (birth.commit, birth.world, birth.view.dead) == (0, "a", (OTHER,))


def test_without_a_lineage_a_stream_says_nothing_of_it(url: str) -> None:
    with new_store(url).writer() as writer:
        writer.append_episode(steps(3))
    record = record_of(url, writer)
    assert (record.world, record.checkpoint, record.view, record.first_row) == (None, None, SessionView(), 0)


@pytest.mark.parametrize(
    "bad",
    [
        {"world": ""}, {"world": 3}, {"world": "a\nb"}, {"world": "x" * 257}, {"world": "\ud800"},
        {"checkpoint": "latest"}, {"checkpoint": 3}, {"checkpoint": "../x"},
        {"dead": OTHER}, {"dead": ["x"]}, {"dead": [3]}, {"dead": 3},
    ],
)  # fmt: skip
def test_a_lineage_that_can_not_be_is_refused(url: str, bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(bad))}: expected"):
        new_store(url).writer(**bad)


def test_episodes_of_a_writer_declared_dead_read_as_cut(url: str) -> None:
    store = new_store(url)
    zombie = store.writer("zombie", commit_seconds=None)
    zombie.append({"action": 1, "reward": 1.0})
    zombie.commit()
    assert trajstore.open(url).episodes["end"].tolist() == ["open"]
    with store.writer("next", dead=[zombie.stream]) as writer:
        writer.wait(writer.publish_view())
        assert trajstore.open(url).episodes["end"].tolist() == ["cut"]
    zombie.close()


# ---- views --------------------------------------------------------------------------------------


def test_a_view_takes_effect_with_the_next_commit_and_stays(url: str) -> None:
    writer = new_store(url).writer(commit_seconds=None)
    writer.append_episode(steps(8))
    writer.commit()
    writer.set_view(first_row=5, first_rows={OTHER: 7}, discarded={OTHER: [2, 1]}, dead=[THIRD])
    assert record_of(url, writer).first_row == 0
    writer.append_episode(steps(2))
    writer.commit()
    committed = record_of(url, writer)
    writer.append_episode(steps(2))
    writer.close()
    for record in (committed, record_of(url, writer)):
        assert record.first_row == 5
        assert record.view == SessionView({OTHER: 7}, {OTHER: (1, 2)}, (THIRD,))
    assert trajstore.open(url).episodes["length"].tolist() == [3, 2, 2]


def test_commit_publishes_a_view_of_which_nothing_else_is_new(url: str) -> None:
    writer = new_store(url).writer(commit_seconds=None)
    writer.append_episode(steps(8))
    writer.commit()
    writer.commit()
    assert record_of(url, writer).commit == 1
    writer.set_view(first_row=8)
    writer.commit()
    assert (record_of(url, writer).commit, record_of(url, writer).first_row) == (2, 8)
    writer.set_view(first_row=8)  # nothing new
    writer.close()
    assert (record_of(url, writer).commit, record_of(url, writer).is_sealed) == (2, True)


def test_decisions_add_up(url: str) -> None:
    with new_store(url).writer() as writer:
        writer.set_view(first_rows={OTHER: 3}, discarded={OTHER: [4]}, dead=[OTHER])
        writer.set_view(first_rows={THIRD: np.int64(9)}, discarded={OTHER: [1, 4], THIRD: [0]}, dead=[THIRD])
        writer.set_view(first_rows={OTHER: 3})
        assert writer.first_rows == {OTHER: 3, THIRD: 9, writer.stream: 0}
        writer.append_episode(steps(1))
    view = record_of(url, writer).view
    assert view == SessionView({OTHER: 3, THIRD: 9}, {OTHER: (1, 4), THIRD: (0,)}, (OTHER, THIRD))


def test_marks_never_go_back(url: str) -> None:
    with new_store(url).writer(commit_seconds=None) as writer:
        writer.append_episode(steps(8))
        writer.commit()
        writer.set_view(first_row=5, first_rows={OTHER: 7})
        with pytest.raises(
            ValueError, match=f"'{writer.stream}': its first row is 5 already and can't go back to 4"
        ):
            writer.set_view(first_row=4, first_rows={OTHER: 8})
        with pytest.raises(ValueError, match=f"'{OTHER}': its first row is 7 already and can't go back to 6"):
            writer.set_view(first_row=6, first_rows={THIRD: 8, OTHER: 6})
        assert writer.first_rows == {OTHER: 7, writer.stream: 5}  # nothing of it was taken


def test_a_first_row_past_what_is_committed_is_refused(url: str) -> None:
    with new_store(url).writer(commit_seconds=None) as writer:
        with pytest.raises(DataError, match="first_row: expected at most the 0 rows committed, got 1"):
            writer.set_view(first_row=1)
        writer.append_episode(steps(8))
        with pytest.raises(DataError, match="at most the 0 rows"):
            writer.set_view(first_row=1)
        writer.commit()
        writer.append_episode(steps(8))
        with pytest.raises(DataError, match="at most the 8 rows committed, got 9"):
            writer.set_view(first_row=9)
        writer.set_view(first_row=8)


@pytest.mark.parametrize(
    "bad",
    [
        {"first_row": -1}, {"first_row": 1.0}, {"first_row": True}, {"first_rows": {"x": 1}},
        {"first_rows": {OTHER: -1}}, {"first_rows": {OTHER: "1"}}, {"first_rows": {OTHER: 1 << 63}},
        {"discarded": {"x": [1]}}, {"discarded": {OTHER: [-1]}}, {"discarded": {OTHER: [None]}}, {"dead": OTHER},
        {"dead": ["x"]},
    ],
)  # fmt: skip
def test_a_view_of_what_can_not_be_is_refused(url: str, bad: dict[str, Any]) -> None:
    with new_store(url).writer(commit_seconds=None) as writer:
        with pytest.raises(DataError, match="expected"):
            writer.set_view(**bad)
        assert writer.first_rows == {writer.stream: 0}


def test_a_writers_own_stream_is_neither_among_the_others_nor_dead(url: str) -> None:
    with new_store(url).writer() as writer:
        with pytest.raises(DataError, match="is the writer's own; give first_row"):
            writer.set_view(first_rows={writer.stream: 0})
        with pytest.raises(DataError, match=r"dead: stream .* is the writer's own"):
            writer.set_view(dead=[writer.stream])
        writer.set_view(discarded={writer.stream: [0]})
        writer.append_episode(steps(3))
    assert len(trajstore.open(url)) == 0


# ---- publishing a view --------------------------------------------------------------------------


def test_publishing_a_view_leaves_staged_steps_alone(url: str) -> None:
    writer = new_store(url).writer(commit_seconds=None)
    writer.append_episode(steps(4))
    writer.commit()
    writer.append({"action": 9, "reward": 9.0})
    writer.set_view(first_rows={OTHER: 1})
    writer.wait(writer.publish_view())
    record = record_of(url, writer)
    assert (record.commit, record.rows, record.view.first_rows) == (2, 4, {OTHER: 1})
    assert writer.stats()["staged_rows"] == 1
    writer.amend({"action": 10})  # it has no place yet
    writer.wait(writer.publish_view())  # nothing new, so nothing is put
    assert record_of(url, writer).commit == 2
    writer.close()
    assert trajstore.open(url).read_episode(1)["action"].tolist() == [10]


def test_publishing_a_view_of_a_stream_not_yet_born_takes_what_is_staged(url: str) -> None:
    writer = new_store(url).writer(commit_seconds=None)
    writer.append({"action": 9, "reward": 9.0})
    writer.set_view(first_rows={OTHER: 1})
    writer.wait(writer.publish_view())
    record = record_of(url, writer)
    assert (record.commit, record.rows, record.view.first_rows) == (1, 1, {OTHER: 1})
    writer.close()


def test_a_view_can_not_be_published_without_a_schema(url: str) -> None:
    store = trajstore.create(url)
    with store.writer(commit_seconds=None) as writer:
        writer.set_view(first_rows={OTHER: 1})
        with pytest.raises(DataError, match="publish_view: the store has no schema yet"):
            writer.publish_view()
        writer.append({"x": 1})
        writer.wait(writer.publish_view())
        assert record_of(url, writer).view.first_rows == {OTHER: 1}


def test_a_view_that_nobody_published_brings_no_stream_to_life(url: str) -> None:
    with new_store(url).writer(commit_seconds=None) as writer:
        writer.set_view(first_rows={OTHER: 1})
        writer.commit()
    assert trajstore.open(url).streams == ()


def test_views_and_steps_are_published_in_the_order_they_were_asked_for(url: str) -> None:
    plan = BlockPuts()
    store = new_store(url)
    plan.gate.set()
    writer = Store(FaultyStorage(real_storage(url), plan), url, None).writer(commit_seconds=None)
    writer.append_episode(steps(4))
    writer.commit()
    plan.gate.clear()
    writer.append_episode(steps(3))
    seen: list[CommitRecord | None] = []
    writer.capture_record(seen.append)
    for row in (1, 2):
        writer.set_view(first_row=row)
        writer.publish_view()
        writer.capture_record(seen.append)
    writer.append_episode(steps(2))
    plan.gate.set()
    writer.close()
    assert [(r.commit, r.rows, r.first_row) for r in seen if r] == [(2, 7, 0), (3, 7, 1), (4, 7, 2)]
    assert (store.refresh().streams[0].commit, store.streams[0].rows) == (5, 9)


@pytest.mark.parametrize("is_after", [False, True], ids=["error", "lost_answer"])
def test_a_view_that_could_not_be_published_is_tried_again(url: str, is_after: bool) -> None:
    plan = FailWhile()
    store = new_store(url, plan)
    writer = store.writer(commit_seconds=None)
    writer.append_episode(steps(4))
    writer.commit()
    writer.set_view(first_row=3)
    storage = store._storage
    assert isinstance(storage, FaultyStorage)
    at = len(storage.calls) + 2  # the put, after a look whether the record is there
    storage.plan = FailOnce(at, is_after, broken)
    ticket = writer.publish_view()
    with pytest.raises(StorageError):
        writer.wait(ticket)
    assert storage.calls[at - 1].action == "put"
    writer.wait(ticket)
    record = record_of(url, writer)
    assert (record.commit, record.first_row) == (2, 3)
    writer.close()


def test_a_failed_publication_is_raised_by_the_writers_next_call(url: str) -> None:
    plan = FailWhile()
    writer = new_store(url, plan).writer(commit_seconds=None)
    writer.append_episode(steps(4))
    writer.commit()
    plan.error = broken
    writer.set_view(first_row=3)
    ticket = writer.publish_view()
    while not plan.n_failed:
        threading.Event().wait(0.001)
    while writer._pipeline._commit_thread._unraised is None:
        threading.Event().wait(0.001)
    writer.set_view(first_row=4)  # what helpers call raises nothing that is for the writer's user
    assert writer.publish_view() > ticket
    with pytest.raises(StorageError):
        writer.append_episode(steps(1))
    plan.error = None
    writer.append_episode(steps(1))
    writer.close()
    assert (record_of(url, writer).first_row, record_of(url, writer).rows) == (4, 5)


def test_leaving_a_block_by_an_exception_forgets_a_view_that_was_not_published(url: str) -> None:
    def fail() -> None:
        with new_store(url).writer("w", commit_seconds=None) as writer:
            writer.append_episode(steps(4))
            writer.commit()
            writer.set_view(first_row=4)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    (record,) = trajstore.open(url).streams
    assert (record.first_row, record.is_sealed) == (0, True)


def test_tickets_that_were_never_given_are_refused(url: str) -> None:
    with new_store(url).writer() as writer:
        writer.wait(0)
        with pytest.raises(ValueError, match="ticket: expected 0 to 0, got 7"):
            writer.wait(7)


# ---- whose marks count --------------------------------------------------------------------------


def test_marks_survive_reopening_and_hide_rows(place: Place) -> None:
    store = trajstore.create(place.url, SCHEMA, **place.kwargs)
    with store.writer("old") as old:
        old.append_episode(steps(10))
    with store.writer("new") as new:
        new.append_episode(steps(6, 100))
        new.commit()
        new.set_view(first_row=2, first_rows={old.stream: 7})
        new.wait(new.publish_view())
        found = trajstore.open(place.url, **place.kwargs)
        assert [found.read_episode(i)["action"].tolist() for i in range(2)] == [[7, 8, 9], [102, 103, 104, 105]]
    found = trajstore.open(place.url, **place.kwargs)
    assert [found.read_episode(i)["action"].tolist() for i in range(2)] == [[7, 8, 9], [102, 103, 104, 105]]
    assert found.episodes["is_headless"].tolist() == [True, True]


def test_of_two_worlds_the_marks_of_the_newer_count(url: str) -> None:
    store = new_store(url)
    with store.writer("data") as data:
        data.append_episode(steps(12))
    zombie = store.writer("rank0", world="first", commit_seconds=None)
    zombie.set_view(first_rows={data.stream: 10})
    zombie.wait(zombie.publish_view())
    assert Marks.wanted(store.refresh().streams)[data.stream] == 10
    # A resumed run starts further back; the zombie goes on, but what it says counts no more.
    with store.writer("rank0", world="second") as resumed:
        resumed.set_view(first_rows={data.stream: 4})
        resumed.wait(resumed.publish_view())
        assert Marks.wanted(store.refresh().streams)[data.stream] == 4
        zombie.set_view(first_rows={data.stream: 12})
        zombie.wait(zombie.publish_view())
        assert Marks.wanted(store.refresh().streams)[data.stream] == 4
        assert store.read_episode(0)["action"].tolist() == list(range(4, 12))
    zombie.close()
    assert Marks.wanted(store.refresh().streams)[data.stream] == 4


def test_what_an_older_world_still_wanted_counts_no_more(url: str) -> None:
    store = new_store(url)
    with store.writer("data") as data:
        data.append_episode(steps(12))
    with store.writer("rank0", world="first") as old, store.writer("alone") as alone:
        for writer in (old, alone):
            writer.set_view(first_rows={data.stream: 2})
            writer.wait(writer.publish_view())
    with store.writer("rank0", world="second") as new:
        new.set_view(first_rows={data.stream: 9})
        new.wait(new.publish_view())
    assert Marks.wanted(store.refresh().streams)[data.stream] == 9
    assert store.read_episode(0)["action"].tolist() == [9, 10, 11]


def test_within_a_world_the_smallest_mark_counts(url: str) -> None:
    store = new_store(url)
    with store.writer("data") as data:
        data.append_episode(steps(12))
    with store.writer("rank0", world="w") as a, store.writer("rank1", world="w") as b:
        for writer, row in ((a, 9), (b, 5)):
            writer.set_view(first_rows={data.stream: row})
            writer.wait(writer.publish_view())
        assert Marks.wanted(store.refresh().streams)[data.stream] == 5


marks = st.dictionaries(st.sampled_from([OTHER, THIRD]), st.integers(0, 99))


@given(st.lists(marks, max_size=6))
def test_a_view_holds_the_newest_of_each_mark_or_refuses(changes: list[dict[str, int]]) -> None:
    view, expected = SessionView(), dict[str, int]()
    for change in changes:
        goes_back = any(row < expected.get(stream, 0) for stream, row in change.items())
        if goes_back:
            with pytest.raises(ValueError, match="can't go back"):
                view.advanced(change)
        else:
            view, expected = view.advanced(change), expected | change
        assert view.first_rows == expected
