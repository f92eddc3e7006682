"""Checkpoints that all ranks take together: the same one everywhere, or none, whatever fails and whenever."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest
from torch import distributed

import trajstore
from tests.support.faulty import Call, Died, FaultyStorage, Plan, broken, real_storage
from tests.support.rank_threads import (
    HANG_S,
    OPTIONS,
    AtSite,
    Open,
    Outcome,
    Site,
    Team,
    add,
    all_well,
    begin,
    buffer_threads,
    contents,
    ended,
    open_team,
    outcomes,
    own_storage,
    published,
    shown,
    sites,
    teams,
    through_torch,
    verified,
    walk,
)
from trajstore import CheckpointNotFoundError, RankError, RankTimeoutError, ReplayBuffer, StorageError
from trajstore.replay.checkpoint_schedule import CheckpointSchedule
from trajstore.store import checkpoints
from trajstore.store.verify import verify

T = TypeVar("T")
N = 3
RANKS = pytest.mark.parametrize("k", range(N))


@pytest.fixture
def team(tmp_path: Path) -> Iterator[Open]:
    with teams(tmp_path) as make:
        yield make


def expected(team: Team, n_episodes: int | None = None) -> dict[int, list[int]]:
    """What a checkpoint shows that was taken after n episodes of every rank."""
    n = team.n if n_episodes is None else n_episodes
    return {
        rank: [1_000_000 * rank + 1000 * e + t for e in range(1, n + 1) for t in range(5)]
        for rank in range(team.size)
    }


MISSED_S = 1.5  # of waits for ranks that do not come; those that do are faster, also on a busy machine


def eventually(what: Callable[[], T]) -> T:
    until = time.monotonic() + HANG_S
    while not (found := what()):
        assert time.monotonic() < until, "it never came to that"
        time.sleep(0.01)
    return found


def raised(buffer: ReplayBuffer) -> Exception:
    """What the next calls raise, at some time."""

    def failure() -> Exception | None:
        try:
            buffer.stats()
        except Exception as error:
            return error
        return None

    return eventually(failure)


class Dead(Plan):
    """No call has an effect, nor returns."""

    def before(self, call: Call) -> None:
        raise Died(str(call))


class Broken(Plan):
    """Calls on some keys fail."""

    def __init__(self, part: str, actions: Sequence[str] = ("put",)) -> None:
        self.part, self.actions = part, actions

    def before(self, call: Call) -> None:
        if self.part in call.key and call.action in self.actions:
            raise broken()


class BrokenAfter(Broken):
    """Calls on some keys fail, but not before an event has happened."""

    def __init__(self, part: str, event: threading.Event) -> None:
        super().__init__(part)
        self.event = event

    def before(self, call: Call) -> None:
        if self.part in call.key:
            assert self.event.wait(HANG_S), "the event did not happen"
        super().before(call)


class Gate(Plan):
    """A call waits until it is let go."""

    def __init__(self, site: Site) -> None:
        self.reached, self.gate = threading.Event(), threading.Event()
        self._at = AtSite(site, False, broken)

    def before(self, call: Call) -> None:
        try:
            self._at.before(call)
        except StorageError:
            self.reached.set()
            assert self.gate.wait(HANG_S), "the gate was not opened"


# ---- asked for -----------------------------------------------------------------------------------------------


def by_rank(k: int) -> Callable[[Team], None]:
    return lambda team: team.buffers[k].request_checkpoint("asked") and None


def from_outside(team: Team) -> None:
    assert trajstore.request_checkpoint(team.url, "asked") == team.buffers[0].world


WAYS = {**{f"rank {k}": by_rank(k) for k in range(N)}, "outside": from_outside}


@pytest.mark.parametrize("ask", list(WAYS.values()), ids=list(WAYS))
@pytest.mark.parametrize("through", ["store", "torch"])
def test_a_requested_checkpoint_is_the_same_one_on_all_ranks(
    tmp_path: Path, ask: Callable[[Team], None], through: str, team: Open
) -> None:
    if through == "torch":
        with through_torch(distributed.HashStore()):
            one = team(N)
    else:
        one = team(N)
    one.fill()
    ask(one)
    found = eventually(lambda: published(one.url))
    eventually(lambda: {buffer.session.schedule.newest for buffer in one.buffers} == {found[0].id})
    assert [(c.name, c.n_ranks, c.parent) for c in found] == [("asked", N, None)]
    assert contents(one.url, "asked") == expected(one)
    assert set(found[0].streams) == {buffer.stream for buffer in one.buffers}


@RANKS
def test_a_rank_that_asks_and_waits_gets_the_id(team: Open, k: int) -> None:
    one = team(N)
    one.fill()
    id_ = one.buffers[k].request_checkpoint("asked", wait=True, timeout_s=HANG_S)
    assert [c.id for c in published(one.url)] == [id_]
    assert contents(one.url, "latest") == expected(one)


def test_all_ranks_that_ask_at_once_are_answered_by_published_checkpoints(team: Open) -> None:
    one = team(N)
    one.fill()
    ids = all_well(N, lambda k: one.buffers[k].request_checkpoint("asked", wait=True, timeout_s=HANG_S))
    assert set(ids) <= {c.id for c in published(one.url)}
    assert_linear(one.url)


def test_the_clock_takes_checkpoints_of_all_ranks_and_keeps_the_last(team: Open) -> None:
    one = team(N, checkpoint_seconds=0.1, keep_checkpoints=2)
    one.fill()
    seen: set[str] = set()

    def several() -> bool:
        seen.update(c.id for c in published(one.url))
        return len(seen) >= 5

    eventually(several)
    one.close()
    left = published(one.url)
    assert len(left) == 2
    assert {c.name for c in left} == {"periodic"}
    assert left[1].parent == left[0].id
    assert contents(one.url, "latest") == expected(one)


def test_a_rank_that_starts_late_takes_part_in_an_earlier_announcement(
    team: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, is_announced = CheckpointSchedule.start, threading.Event()

    def late(saver: CheckpointSchedule, **options: Any) -> None:
        assert saver._group.is_leader or is_announced.wait(HANG_S)
        start(saver, **options)
        if saver._group.is_leader:
            saver.ask("early", wait=False, timeout_s=None)
            eventually(lambda: saver._group.read("announce"))
            is_announced.set()

    monkeypatch.setattr(CheckpointSchedule, "start", late)
    one = team(2, rank_timeout_s=HANG_S)
    found = eventually(lambda: published(one.url) or (one.buffers[0].stats() and None))
    assert [c.name for c in found] == ["early"]


def test_a_single_session_with_attend_s_answers_requests_from_outside(url: str) -> None:
    with ReplayBuffer(url, **OPTIONS | {"attend_s": 0.02}) as buffer:
        add(buffer, 0, 1)
        trajstore.request_checkpoint(url, "asked")
        found = eventually(lambda: published(url))
        assert [(c.name, c.n_ranks) for c in found] == [("asked", None)]


@RANKS
@pytest.mark.parametrize("through", ["store", "torch"])
def test_a_request_with_a_dead_rank_publishes_nothing_and_names_it(team: Open, k: int, through: str) -> None:
    if through == "torch":
        with through_torch(distributed.HashStore()):
            one = team(N)
    else:
        one = team(N)
    one.fill()
    base = one.saved("base")
    one.set_timeout(MISSED_S)
    one.fill()
    one.plan(k, Dead())
    eventually(lambda: _is_dead(one.buffers[k]))
    asks = (k + 1) % N
    with pytest.raises(RankError, match=rf"\brank {k}\b"):
        one.buffers[asks].request_checkpoint("asked", wait=True, timeout_s=HANG_S if k else 1.5)
    if k:
        other = next(rank for rank in range(N) if rank not in (k, asks))
        failure = raised(one.buffers[other])
        assert isinstance(failure, RankError)
        assert f"rank {k}" in str(failure)
    assert [c.id for c in published(one.url)] == [base]
    assert contents(one.url, "latest") == expected(one, 1)


def _is_dead(buffer: ReplayBuffer) -> bool:
    """Its thread that checks for requests has ended, or reads nothing from the store that could end it."""
    requests = buffer.session.schedule._requests
    assert requests is not None
    return requests._has_ended or requests._group.notes.__class__.__name__ == "TorchNotes"


@RANKS
def test_a_request_with_a_rank_that_is_stuck_publishes_nothing_and_the_next_one_succeeds(
    team: Open, k: int
) -> None:
    one = team(N)
    one.fill()
    base = one.saved("base")
    one.set_timeout(MISSED_S)
    with one.buffers[k].reader.assembler.lock:  # in the middle of a batch, say
        with pytest.raises(RankError, match=rf"\brank {k}\b"):
            one.buffers[(k + 1) % N].request_checkpoint("asked", wait=True, timeout_s=HANG_S if k else 1.5)
        assert [c.id for c in published(one.url)] == [base]
    for buffer in one.buffers:
        requests = buffer.session.schedule._requests
        assert requests is not None
        eventually(lambda requests=requests: requests._concluded)  # the failed one has come to its end everywhere
        _forget(buffer)
    one.set_timeout(HANG_S)
    one.fill()

    def again() -> str | None:
        try:
            return one.buffers[(k + 1) % N].request_checkpoint("asked", wait=True, timeout_s=HANG_S)
        except RankError:  # the one before, on its way to its end
            return None

    id_ = eventually(again)
    assert published(one.url)[-1].id == id_
    assert_linear(one.url)


def _forget(buffer: ReplayBuffer) -> None:
    with contextlib.suppress(RankError, StorageError):
        buffer.stats()


# ---- called for ----------------------------------------------------------------------------------------------


@RANKS
def test_a_rank_that_never_calls_is_named_and_nothing_is_published(team: Open, k: int) -> None:
    one = team(N)
    one.fill()
    base = one.saved("base")
    one.fill()
    one.set_timeout(MISSED_S)
    failed = one.save("a", ranks=[rank for rank in range(N) if rank != k])
    for failure in failed.values():
        assert isinstance(failure, RankError)
        assert f"rank {k}" in str(failure)
    assert [c.id for c in published(one.url)] == [base]
    assert contents(one.url, "latest") == expected(one, 1)


@RANKS
def test_after_a_rank_has_missed_one_the_next_checkpoint_of_that_name_succeeds(team: Open, k: int) -> None:
    one = team(N)
    one.fill()
    one.set_timeout(0.3)
    one.save("a", ranks=[rank for rank in range(N) if rank != k])
    one.set_timeout(HANG_S)
    id_ = one.saved("a")
    assert published(one.url)[-1].id == id_
    assert contents(one.url, "latest") == expected(one)


@RANKS
def test_a_rank_that_calls_with_another_name_is_named_and_nothing_is_published(team: Open, k: int) -> None:
    one = team(N)
    one.fill()
    base = one.saved("base")
    one.fill()
    one.set_timeout(MISSED_S)
    failed = outcomes(N, lambda rank: one.buffers[rank].save_checkpoint("b" if rank == k else "a", wait=True))
    for rank, failure in failed.items():
        assert isinstance(failure, RankError), failed
        if rank != k:
            assert f"rank {k}" in str(failure)
    assert [c.id for c in published(one.url)] == [base]
    one.set_timeout(HANG_S)
    for name in ("c", "a", "b"):
        id_ = one.saved(name)
        assert published(one.url)[-1].id == id_


@RANKS
def test_a_rank_whose_storage_fails_is_named_and_the_next_one_succeeds(team: Open, k: int) -> None:
    one = team(N)
    one.fill()
    base = one.saved("base")
    one.fill()
    one.plan(k, Broken("checkpoints/"))
    failed = one.save("a")
    assert isinstance(failed[k], StorageError), failed
    for rank in range(N):
        if rank != k:
            assert isinstance(failed[rank], RankError)
            assert f"rank {k}" in str(failed[rank])
            assert not isinstance(failed[rank], RankTimeoutError)  # it was informed, and did not have to wait
    assert [c.id for c in published(one.url)] == [base]
    one.plan(k, None)
    one.fill()
    assert one.saved("a") != failed[k]
    assert contents(one.url, "latest") == expected(one)


@pytest.mark.parametrize("n_failures", [1, 2])
@pytest.mark.parametrize("is_first", [True, False])
def test_a_rank_that_comes_after_rank_0_has_failed_takes_part_in_the_same_checkpoint(
    team: Open, is_first: bool, n_failures: int
) -> None:
    one = team(N)
    one.fill()
    if not is_first:
        one.saved("base")
    one.plan(0, Broken("checkpoints/"))
    for _ in range(n_failures):
        assert isinstance(one.save("a", [0])[0], StorageError)
    one.plan(0, None)
    for _ in range(n_failures):
        for rank, outcome in one.save("a", range(1, N)).items():
            assert isinstance(outcome, RankError), (rank, outcome)
            assert not isinstance(outcome, RankTimeoutError)  # rank 0 has not begun the next one
            assert "rank 0" in str(outcome)
    assert not _incomplete(one.url)
    one.fill()
    one.saved("a")
    assert contents(one.url, "latest") == expected(one)


@pytest.mark.parametrize("k", range(1, N))
def test_a_rank_whose_part_was_removed_because_rank_0_failed_says_why(team: Open, k: int) -> None:
    one = team(N)
    one.fill()
    base = one.saved("base")
    one.fill()
    gate = Gate(Site("get", f"checkpoints/a/ranks/{k}/zarr.json", 0))
    one.plan(k, gate)
    one.plan(0, BrokenAfter("checkpoints/a", gate.reached))
    begun = begin(N, lambda rank: one.buffers[rank].save_checkpoint("a", wait=True))
    assert gate.reached.wait(HANG_S)  # its part is being saved
    eventually(lambda: begun[0].done() and not _incomplete(one.url))  # rank 0 has failed and removed everything
    gate.gate.set()
    failed = ended(begun)
    assert isinstance(failed[k], RankError), failed
    assert "rank 0" in str(failed[k])
    assert [c.id for c in published(one.url)] == [base]


def test_a_checkpoint_of_a_rank_with_nothing_appended_is_whole(team: Open) -> None:
    one = team(N)
    one.saved("empty")
    assert published(one.url)[0].streams == {}
    add(one.buffers[1], 1, 1)
    one.saved("one")
    wanted = [1_001_000 + t for t in range(5)]
    assert contents(one.url, "latest") == {1: wanted}
    one.close()
    again = team(N, one.url, resume="latest")
    assert [shown(buffer) for buffer in again.buffers] == [[], wanted, []]


# ---- two phases ----------------------------------------------------------------------------------------------


@RANKS
def test_a_checkpoint_is_invisible_until_the_parts_of_all_ranks_are_durable(team: Open, k: int) -> None:
    one = team(N)
    one.fill()
    base = one.saved("base")
    one.fill()
    gate = Gate(Site("put", f"checkpoints/a/ranks/{k}/zarr.json", 1))
    one.plan(k, gate)
    begun = begin(N, lambda rank: one.buffers[rank].save_checkpoint("a", wait=True))
    assert gate.reached.wait(HANG_S)
    storage = real_storage(one.url)
    others = [rank for rank in range(N) if rank != k]
    eventually(lambda: all(_part_is_complete(one.url, rank) for rank in others))
    for _ in range(5):
        assert [c.id for c in published(one.url)] == [base]
        assert checkpoints.find(storage, "latest").id == base
        with pytest.raises(CheckpointNotFoundError):
            checkpoints.find(storage, "a")
        with pytest.raises(CheckpointNotFoundError):
            checkpoints.find(storage, _incomplete(one.url)[0])
        time.sleep(0.02)
    assert not any(future.done() for future in begun.values())
    pinned = checkpoints.pins(storage)
    assert set(pinned) == {buffer.stream for buffer in one.buffers}
    gate.gate.set()
    found = ended(begun)
    assert len(set(found.values())) == 1
    assert checkpoints.find(storage, "latest").id == found[0]
    assert contents(one.url, "latest") == expected(one)


def _incomplete(url: str) -> list[str]:
    there = {c.id for c in published(url)}
    return [n for n in real_storage(url).list_names("checkpoints") if n != "zarr.json" and n not in there]


def _part_is_complete(url: str, rank: int) -> bool:
    storage = real_storage(url)
    for id_ in _incomplete(url):
        try:
            data = storage.get(f"checkpoints/{id_}/ranks/{rank}/zarr.json")
        except FileNotFoundError:
            return False
        return b'"complete":true' in data
    return False


@RANKS
def test_rows_that_a_part_on_its_way_wants_are_not_deleted_by_sweeps_of_other_ranks(team: Open, k: int) -> None:
    one = team(N)
    for _ in range(4):
        one.fill()
    base = one.saved("base")
    one.close()
    wanted = expected(one)
    again = team(N, one.url, resume="latest", grace_s=0.0)
    gate = Gate(Site("put", f"checkpoints/a/ranks/{k}/zarr.json", 1))
    again.plan(k, gate)
    begun = begin(N, lambda rank: again.buffers[rank].save_checkpoint("a", wait=True))
    assert gate.reached.wait(HANG_S)
    eventually(lambda: all(_part_is_complete(one.url, rank) for rank in range(N) if rank != k))
    checkpoints.remove(real_storage(one.url), base)
    for buffer in again.buffers:
        buffer.clear()
        buffer.session.collector.flush()
    gate.gate.set()
    found = ended(begun)
    assert [c.id for c in published(one.url)] == [found[0]]
    assert contents(one.url, "latest") == wanted
    for buffer in again.buffers:
        buffer.session.collector.flush()
    assert contents(one.url, "latest") == wanted
    verified(one.url)


def test_rows_that_a_part_of_a_world_before_wants_are_kept_while_it_may_still_be_saved(team: Open) -> None:
    """Only the pins of parts keep them: no session that lives wants these rows."""
    one = team(2)
    for _ in range(4):
        one.fill()
    base = one.saved("base")
    gate = Gate(Site("put", "checkpoints/a/ranks/1/zarr.json", 1))
    one.plan(1, gate)
    begun = begin(2, lambda rank: one.buffers[rank].save_checkpoint("a", wait=True))
    assert gate.reached.wait(HANG_S)
    eventually(lambda: _part_is_complete(one.url, 0))
    newer = team(2, one.url, resume="base", grace_s=0.0)
    checkpoints.remove(real_storage(one.url), base)
    for buffer in newer.buffers:
        buffer.clear()
    for buffer in newer.buffers:
        buffer.session.collector.flush()
    gate.gate.set()
    found = ended(begun)
    assert len(set(found.values())) == 1, found
    assert contents(one.url, found[0]) == expected(one)


# ---- an outcome that does not reach the other ranks ----------------------------------------------------------


def test_what_a_leader_published_before_it_died_counts_as_saved_for_all_others(team: Open) -> None:
    one = team(N)
    one.fill()
    base = one.saved("base")
    one.fill()
    one.set_timeout(MISSED_S)
    one.plan(0, AtSite(Site("put", "checkpoints/a/zarr.json", 1), True, Died, is_death=True))
    found = one.save("a")
    assert isinstance(found[0], Died)
    assert found[1] == found[2]
    assert [c.id for c in published(one.url)] == [base, found[1]]
    assert {buffer.session.schedule.newest for buffer in one.buffers[1:]} == {found[1]}
    assert contents(one.url, "latest") == expected(one)


def test_a_requested_one_that_a_leader_published_before_it_died_counts_as_saved(team: Open) -> None:
    one = team(N)
    one.fill()
    one.set_timeout(MISSED_S)
    one.plan(0, AtSite(Site("put", "checkpoints/asked/zarr.json", 1), True, Died, is_death=True))
    id_ = one.buffers[2].request_checkpoint("asked", wait=True, timeout_s=HANG_S)
    assert [c.id for c in published(one.url)] == [id_]
    eventually(lambda: one.buffers[1].session.schedule.newest == id_)


def test_ranks_that_hear_late_of_an_outcome_hear_of_it_all_the_same(team: Open) -> None:
    """The leader is at the next checkpoint while another rank has not looked yet."""
    one = team(2, rank_timeout_s=10 * HANG_S, attend_s=60.0)
    one.fill()
    first = Gate(Site("get", "worlds/world/0/zarr.json", 0))
    one.saved("warm")
    slow = begin([1], lambda _: one.buffers[1].save_checkpoint("a", wait=True))
    eventually(lambda: _part_is_complete(one.url, 1))
    one.plan(1, first)
    assert first.reached.wait(HANG_S)
    id_ = one.buffers[0].save_checkpoint("a", wait=True)
    begun = begin([0], lambda _: one.buffers[0].save_checkpoint("b", wait=True))
    eventually(lambda: _part_is_complete(one.url, 0))
    time.sleep(0.1)
    first.gate.set()
    assert ended(slow)[1] == id_
    second = one.save("b", ranks=[1])
    assert ended(begun)[0] == second[1]
    assert [c.name for c in published(one.url)] == ["warm", "a", "b"]


def test_a_part_that_comes_after_the_leader_gave_up_leaves_nothing_that_disturbs(team: Open) -> None:
    one = team(2)
    one.fill()
    base = one.saved("base")
    one.fill()
    one.set_timeout(MISSED_S)
    gate = Gate(Site("put", "checkpoints/a/ranks/1/zarr.json", 0))
    one.plan(1, gate)
    slow = begin([1], lambda _: one.buffers[1].save_checkpoint("a", wait=True))
    assert gate.reached.wait(HANG_S)
    failed = one.save("a", ranks=[0])
    assert isinstance(failed[0], RankTimeoutError)
    gate.gate.set()
    late = ended(slow)[1]
    assert isinstance(late, (RankError, StorageError)), late
    assert [c.id for c in published(one.url)] == [base]
    walk(one.url)
    checkpoints.remove_incomplete(real_storage(one.url), pending_s=0.0)
    assert _incomplete(one.url) == []
    verified(one.url)


# ---- lineage -------------------------------------------------------------------------------------------------


def assert_linear(url: str) -> None:
    """One chain without branches: each descends from the one before, and the last is the latest."""
    found = published(url)
    assert [c.parent for c in found[1:]] == [c.id for c in found[:-1]]
    if found:
        assert checkpoints.find(real_storage(url), "latest").id == found[-1].id


@pytest.mark.parametrize("through", ["store", "torch"])
def test_called_and_requested_checkpoints_side_by_side_never_deadlock_and_stay_one_chain(
    team: Open, through: str
) -> None:
    if through == "torch":
        with through_torch(distributed.HashStore()):
            one = team(N)
    else:
        one = team(N)
    one.fill()
    stop = threading.Event()

    def ask(k: int) -> list[str]:
        ids = []
        while not stop.is_set():
            id_ = one.buffers[k].request_checkpoint(f"asked{k}", wait=True, timeout_s=HANG_S)
            assert id_ is not None
            ids.append(id_)
        return ids

    asking = begin([1, 2], ask)
    called = [one.saved(f"called{i % 2}") for i in range(8)]
    stop.set()
    asked = ended(asking)
    assert all(isinstance(ids, list) for ids in asked.values()), asked
    there = {c.id for c in published(one.url)}
    assert {*called, *asked[1], *asked[2]} <= there
    assert_linear(one.url)


def test_checkpoints_in_the_background_of_all_ranks_come_one_after_the_other(team: Open) -> None:
    one = team(N)
    ids = []
    for _ in range(6):
        one.fill()
        ids.append(all_well(N, lambda rank: one.buffers[rank].save_checkpoint("a")))
    all_well(N, lambda rank: one.buffers[rank].flush())
    assert [c.id for c in published(one.url)] == [each[0] for each in ids]
    assert all(len(set(each)) == 1 for each in ids)
    for n, each in enumerate(ids, 1):
        assert contents(one.url, each[0]) == expected(one, n)
    assert_linear(one.url)


def test_a_resumed_world_continues_the_chain(team: Open) -> None:
    one = team(N)
    one.fill()
    one.saved("a")
    one.buffers[1].request_checkpoint("b", wait=True, timeout_s=HANG_S)
    one.close()
    again = team(N, one.url, resume="latest")
    again.buffers[2].request_checkpoint("c", wait=True, timeout_s=HANG_S)
    again.saved("d")
    assert [c.name for c in published(one.url)] == ["a", "b", "c", "d"]
    assert_linear(one.url)


def test_keep_last_prunes_once_by_the_leader(team: Open) -> None:
    one = team(N)
    one.fill()
    for _ in range(3):
        one.saved("a")
    for storage in one.storages:
        storage.calls.clear()
    id_ = one.saved("a", keep_last=2)
    assert [c.id for c in published(one.url)][-1] == id_
    assert len(published(one.url)) == 2
    removing = [storage.n_calls("remove_tree", "checkpoints/") for storage in one.storages]
    assert removing == [2, 0, 0]
    assert_linear(one.url)
    verified(one.url)


@pytest.mark.parametrize("is_after", [False, True], ids=["before", "after"])
def test_an_error_while_old_ones_are_pruned_leaves_the_new_one(team: Open, is_after: bool) -> None:
    """It is already published, and others are removed: withdrawing it would leave none."""
    one = team(2)
    one.fill()
    one.saved("a")
    one.saved("b")
    clean = AtSite(None, is_after, broken)
    one.plan(0, clean)
    one.saved("c", keep_last=1)
    pruning = [site for site in sites(clean) if site.key.startswith("checkpoints/b") or site.action == "list_names"]
    assert pruning
    for site in pruning:
        one.saved("b")
        plan = AtSite(site, is_after, broken)
        one.plan(0, plan)
        one.fill()
        found = one.save("c", keep_last=1)
        one.plan(0, None)
        if plan.has_failed:
            latest = checkpoints.find(real_storage(one.url), "latest")
            assert latest.name in ("b", "c"), (site, found)
            assert contents(one.url, latest.id) in (expected(one), expected(one, one.n - 1))
            if latest.name == "b":
                assert not any(isinstance(outcome, str) for outcome in found.values()), (site, found)


@pytest.mark.parametrize("is_after", [False, True], ids=["before", "after"])
def test_a_death_while_old_ones_are_pruned_leaves_none_that_is_never_pruned(team: Open, is_after: bool) -> None:
    one = team(2, attend_s=60.0)
    one.fill()
    for name in "abcd":
        one.saved(name)
    one.set_timeout(MISSED_S)
    one.plan(0, AtSite(Site("remove_tree", "checkpoints/c", 0), is_after, Died, is_death=True))
    one.save("e", keep_last=2)
    assert checkpoints.find(real_storage(one.url), "latest").name == "e"
    again = team(2, one.url, resume="latest")
    id_ = again.saved("f", keep_last=2)
    assert [c.name for c in published(one.url)] == ["e", "f"]
    assert published(one.url)[-1].id == id_


# ---- faults --------------------------------------------------------------------------------------------------


def trial(team: Team, name: str, rank: int, plan: AtSite) -> dict[int, Outcome]:
    team.fill()
    team.plan(rank, plan)
    try:
        return team.save(name)
    finally:
        team.plan(rank, None)


def check_trial(team: Team, found: dict[int, Outcome], base: str, what: Any) -> str:
    """The last one whole, or the new one whole; whoever says that it is there, or is not, is right. The latest."""
    there = published(team.url)
    new = [c for c in there if c.id not in team_known(team)]
    assert len(new) <= 1, (what, new)
    latest = checkpoints.find(real_storage(team.url), "latest")
    if new:
        assert latest.id == new[0].id, (what, found)
        assert contents(team.url, latest.id) == expected(team), what
    else:
        assert latest.id == base, (what, found)
        assert contents(team.url, latest.id) == expected(team, team_known(team)[base]), what
    for outcome in found.values():
        if isinstance(outcome, str):
            assert new, (what, found)
            assert outcome == latest.id, (what, found)
        elif isinstance(outcome, RankError) and "is not published" in str(outcome):
            assert not new, (what, found)
    team_known(team).update({c.id: team.n for c in new})
    return latest.id


_known: dict[str, dict[str, int]] = {}


def team_known(team: Team) -> dict[str, int]:
    """By id, after how many episodes of every rank a checkpoint was taken."""
    return _known.setdefault(team.url, {})


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("is_after", [False, True], ids=["before", "after"])
def test_an_error_at_any_call_leaves_the_last_or_the_new_one_and_the_next_one_succeeds(
    team: Open, rank: int, is_after: bool
) -> None:
    one = team(2, attend_s=60.0)
    one.fill()
    base = one.saved("base")
    team_known(one)[base] = one.n
    clean = AtSite(None, is_after, broken)
    assert isinstance(trial(one, "a", rank, clean)[0], str)
    base = one.saved("a")
    team_known(one).update({c.id: one.n for c in published(one.url)[1:]})
    one.set_timeout(3.0)
    for site in sites(clean):
        plan = AtSite(site, is_after, broken)
        found = trial(one, "a", rank, plan)
        base = check_trial(one, found, base, site)
        if not plan.has_failed:
            assert all(isinstance(outcome, str) for outcome in found.values()), (site, found)
        next_one = one.save("a")
        assert all(isinstance(outcome, str) for outcome in next_one.values()), (site, found, next_one)
        base = next_one[0]
        team_known(one)[base] = one.n
        assert contents(one.url, "latest") == expected(one), site
        one.buffers[0].prune_checkpoints(2)
    checkpoints.remove_incomplete(real_storage(one.url), pending_s=0.0)
    assert _incomplete(one.url) == []
    assert_linear(one.url)
    one.close()
    walk(one.url)
    verified(one.url)
    again = team(2, one.url, resume="latest")
    assert {rank: shown(buffer) for rank, buffer in enumerate(again.buffers)} == expected(one)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("is_after", [False, True], ids=["before", "after"])
def test_a_death_at_any_call_leaves_the_last_or_the_new_one_whole(
    tmp_path: Path, team: Open, rank: int, is_after: bool
) -> None:
    one = team(2, attend_s=60.0)
    one.fill()
    one.saved("base")
    clean = AtSite(None, is_after, Died, is_death=True)
    trial(one, "a", rank, clean)

    def die(numbered: tuple[int, Site]) -> None:
        number, site = numbered
        _die(str(tmp_path / f"dead{number}"), rank, AtSite(site, is_after, Died, is_death=True))

    # After a read is what before the next call is.
    chosen = [site for site in sites(clean) if not is_after or site.action in ("put", "delete", "remove_tree")]
    with ThreadPoolExecutor(6) as threads:
        list(threads.map(die, enumerate(chosen)))


def _die(url: str, rank: int, plan: AtSite) -> None:
    one = open_team(2, url, attend_s=60.0)
    try:
        one.fill()
        base = one.saved("base")
        team_known(one)[base] = one.n
        one.set_timeout(0.3)
        found = _trial_of_the_dead(one, rank, plan)
        latest = check_trial(one, found, base, plan.site)
        n = team_known(one)[latest]
    finally:
        outcomes([r for r in range(2) if r != rank], lambda r: one.buffers[r]._release())
    _check_reopened(url, latest, expected(one, n), plan.site)
    one.end()


def _trial_of_the_dead(team: Team, rank: int, plan: AtSite) -> dict[int, Outcome]:
    team.fill()
    team.plan(rank, plan)
    return team.save("a")


def _check_reopened(url: str, latest: str, wanted: dict[int, list[int]], what: Any) -> None:
    walk(url)
    left = _incomplete(url)
    report = verify(url)
    assert not report.problems, (what, report.problems)
    assert all(any(id_ in str(note) for note in report.notes) for id_ in left), (what, left, report.notes)
    again = open_team(2, url, resume="latest")
    try:
        assert {r: shown(buffer) for r, buffer in enumerate(again.buffers)} == wanted, what
        assert {buffer.session.schedule.newest for buffer in again.buffers} == {latest}
        id_ = again.saved("next")
        checkpoints.remove_incomplete(real_storage(url))  # too young
        assert set(_incomplete(url)) == set(left), what
        checkpoints.remove_incomplete(real_storage(url), pending_s=0.0)
        assert _incomplete(url) == [], what
        assert published(url)[-1].id == id_
        walk(url)
    finally:
        again.end()


@pytest.mark.parametrize("site_n", [0, 1], ids=["pin", "publication"])
@pytest.mark.parametrize("is_after", [False, True], ids=["before", "after"])
def test_an_outage_of_the_leader_that_begins_while_it_publishes_leaves_one_chain(
    team: Open, site_n: int, is_after: bool
) -> None:
    """All calls fail from then on, those too that would take back what was put; then the storage works again."""
    one = team(2, attend_s=60.0)
    one.fill()
    base = one.saved("base")
    one.set_timeout(MISSED_S)
    plan = AtSite(Site("put", "checkpoints/a/zarr.json", site_n), is_after, broken, is_death=False)
    outage = _Outage(plan)
    one.fill()
    one.plan(0, outage)
    found = one.save("a")
    one.plan(0, None)
    assert outage.has_begun
    latest = checkpoints.find(real_storage(one.url), "latest")
    assert latest.id == base or contents(one.url, latest.id) == expected(one)
    one.set_timeout(HANG_S)
    one.fill()
    outcomes(2, lambda rank: _forget(one.buffers[rank]))
    id_ = one.saved("b")
    assert checkpoints.find(real_storage(one.url), "latest").id == id_, found
    assert_linear(one.url)


class _Outage(Plan):
    def __init__(self, first: AtSite) -> None:
        self.first, self.has_begun = first, False

    def before(self, call: Call) -> None:
        if self.has_begun:
            raise broken()
        try:
            self.first.before(call)
        except StorageError:
            self.has_begun = True
            raise

    def after(self, call: Call) -> None:
        try:
            self.first.after(call)
        except StorageError:
            self.has_begun = True
            raise


# ---- leaving -------------------------------------------------------------------------------------------------


@RANKS
def test_a_rank_that_closed_is_not_waited_for_in_vain(team: Open, k: int) -> None:
    one = team(N, rank_timeout_s=10 * HANG_S)
    one.fill()
    base = one.saved("base")
    one.buffers[k].close()
    failed = one.save("a", ranks=[rank for rank in range(N) if rank != k])
    for failure in failed.values():
        assert isinstance(failure, RankError), failed
        assert not isinstance(failure, RankTimeoutError)
        assert f"rank {k}" in str(failure)
        assert "closed" in str(failure)
    assert [c.id for c in published(one.url)] == [base]
    one.close()
    assert not _threads_of(one)


@RANKS
def test_a_request_after_a_rank_has_closed_says_so_at_once(team: Open, k: int) -> None:
    one = team(N, rank_timeout_s=10 * HANG_S)
    one.fill()
    one.buffers[k].close()
    with pytest.raises(RankError, match=rf"rank {k}\b.*(closed|left)") as caught:
        one.buffers[(k + 1) % N].request_checkpoint("asked", wait=True, timeout_s=HANG_S)
    assert not isinstance(caught.value, RankTimeoutError)
    assert published(one.url) == []
    one.close()


def test_a_leader_announces_nothing_any_more_once_a_rank_has_closed(team: Open) -> None:
    one = team(2, checkpoint_seconds=0.05, rank_timeout_s=10 * HANG_S)
    one.fill()
    eventually(lambda: published(one.url))
    one.buffers[1].close()
    time.sleep(0.2)
    leader = one.buffers[0].session.schedule._requests
    assert leader is not None
    eventually(lambda: leader._concluded[-1][0].number == leader._last_number)
    n = len(published(one.url))
    outcomes([0], lambda _: _forget(one.buffers[0]))  # of one that was on its way when it closed
    time.sleep(0.3)
    assert len(published(one.url)) == n
    one.buffers[0].stats()
    assert _incomplete(one.url) == []
    one.buffers[0].close()
    assert_linear(one.url)


def test_all_ranks_close_while_requests_are_under_way(team: Open) -> None:
    for _ in range(3):
        one = team(N)
        one.fill()
        for buffer in one.buffers:
            buffer.request_checkpoint("asked")
        found = outcomes(N, lambda rank, one=one: one.buffers[rank].close())
        for failure in found.values():
            assert failure is None or isinstance(failure, RankError), found
        assert not _threads_of(one)
        assert_linear(one.url)
        assert all(contents(one.url, c.id) == expected(one) for c in published(one.url))


@pytest.mark.parametrize("k", [0, 1])
def test_closing_with_a_failure_that_was_not_raised_yet_ends_all_threads(team: Open, k: int) -> None:
    one = team(2)
    assert "trajstore-checkpoint-requests" in {thread.name for thread in buffer_threads()}
    one.fill()
    one.plan(k, Broken("checkpoints/"))
    all_well(2, lambda rank: one.buffers[rank].save_checkpoint("a"))
    eventually(lambda: not any(buffer.session.schedule._called.held for buffer in one.buffers))
    one.plan(k, None)
    found = outcomes(2, lambda rank: one.buffers[rank].close())
    assert all(isinstance(failure, (RankError, StorageError)) for failure in found.values()), found
    one.close()
    assert not _threads_of(one)


def _threads_of(team: Team) -> list[str]:
    """Threads that buffers have not ended."""
    requests = [buffer.session.schedule._requests for buffer in team.buffers]
    return [r._thread.name for r in requests if r is not None and r._thread.is_alive()]


def test_closing_makes_checkpoints_in_the_background_durable_first(team: Open) -> None:
    one = team(N)
    one.fill()
    ids = all_well(N, lambda rank: one.buffers[rank].save_checkpoint("a"))
    all_well(N, lambda rank: one.buffers[rank].close())
    assert {c.id for c in published(one.url)} == set(ids)
    assert contents(one.url, "latest") == expected(one)


# ---- cost ----------------------------------------------------------------------------------------------------


class Waves(FaultyStorage):
    """Counts round trips: of what goes out together, those of the item that takes most."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.waves: list[str] = []
        self._mine = threading.local()

    def map(self, function: Callable[[Any], T], items: Sequence[Any]) -> list[T]:
        outer, longest = self._made(), []

        def alone(item: Any) -> T:
            nonlocal longest
            self._mine.made = made = []
            try:
                return function(item)
            finally:
                longest = max(longest, made, key=len)

        try:
            return super().map(alone, items)
        finally:
            self._mine.made = outer
            outer.extend(longest)

    def delete(self, keys: Sequence[str]) -> None:
        self.map(lambda key: super(Waves, self).delete([key]), list(keys))

    def _made(self) -> list[str]:
        return getattr(self._mine, "made", self.waves)

    def _call(self, action: str, key: str, effect: Callable[[], T]) -> T:
        self._made().append(f"{action} {key}")
        return super()._call(action, key, effect)


def round_trips(url: str, n: int, tmp_path: Path) -> list[list[str]]:
    """By rank, what a second checkpoint takes, without what is looked for again and again."""
    storages = [Waves(real_storage(url)) for _ in range(n)]

    def opened(rank: int) -> ReplayBuffer:
        placed = {"rank": rank, "world_size": n} if n > 1 else {}
        with own_storage(storages[rank]):
            return ReplayBuffer(url, **OPTIONS | {"attend_s": 1000.0} | placed)

    team = Team(url, all_well(n, opened), storages)
    try:
        team.fill()
        team.saved("a")
        for storage in storages:
            storage.waves.clear()
        team.fill()
        team.saved("a")
        return [list(storage.waves) for storage in storages]
    finally:
        team.end()


def test_a_collective_checkpoint_takes_two_round_trips_more_than_a_single_one(team: Open, tmp_path: Path) -> None:
    single = round_trips(str(tmp_path / "single"), 1, tmp_path)[0]
    with through_torch(distributed.HashStore()):
        ranks = round_trips(str(tmp_path / "many"), 3, tmp_path)
    for rank, waves in enumerate(ranks):
        assert not [wave for wave in waves if "worlds/" in wave]
        assert len(waves) <= len(single) + 2, (rank, len(waves) - len(single), single, waves)
    assert [len(waves) - len(single) for waves in ranks] == [2, -1, -1]  # the leader's part, and the publication


def test_notes_in_the_store_take_two_puts_of_the_leader_and_one_of_the_others(team: Open, tmp_path: Path) -> None:
    with through_torch(distributed.HashStore()):
        by_torch = round_trips(str(tmp_path / "torch"), 3, tmp_path)
    ranks = round_trips(str(tmp_path / "many"), 3, tmp_path)
    for rank, waves in enumerate(ranks):
        notes = [wave for wave in waves if wave.startswith("put worlds/")]
        looks = [wave for wave in waves if wave.startswith("get worlds/")]
        assert len(notes) == (2 if rank == 0 else 1), notes
        assert looks  # at least one; as many as it takes the slowest rank to come
        assert len(waves) - len(notes) - len(looks) == len(by_torch[rank])
