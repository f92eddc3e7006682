"""How ranks find each other and agree, whatever others have left behind in the store."""

from __future__ import annotations

import json
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from torch import distributed

import trajstore
from tests.conftest import Place
from tests.support.faulty import Call, FaultyStorage, Plan, broken, real_storage
from tests.support.rank_process import OPTIONS, SCHEMA
from tests.support.rank_threads import (
    HANG_S,
    AtSite,
    Open,
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
    sites,
    teams,
    through_torch,
    verified,
    walk,
)
from trajstore import (
    Field,
    FormatError,
    RankError,
    RankTimeoutError,
    ReplayBuffer,
    Schema,
    SchemaError,
    StorageError,
)
from trajstore.distributed import joining
from trajstore.distributed.joining import join_group
from trajstore.distributed.rank_group import RankGroup, check_ranks
from trajstore.distributed.rank_notes import StoreNotes, TorchNotes
from trajstore.distributed.world_records import (
    list_worlds,
    member_bytes,
    member_key,
    put_world,
    read_member,
    read_world,
    world_key,
)
from trajstore.format.zarr_json import FORMAT, GROUP, to_json_bytes

SHORT_S = 4.0  # of waits for ranks that do not come


@pytest.fixture
def team(tmp_path: Path) -> Iterator[Open]:
    with teams(tmp_path) as make:
        yield make


@pytest.fixture
def store(url: str) -> str:
    trajstore.create(url, SCHEMA, fsync=False)
    return url


def opened(url: str, rank: int, size: int, **options: Any) -> ReplayBuffer:
    return ReplayBuffer(url, rank=rank, world_size=size, **OPTIONS | options)


def joined(url: str, rank: int, size: int, timeout_s: float = HANG_S, checkpoint: str | None = None) -> RankGroup:
    return join_group(real_storage(url), rank, size, checkpoint=checkpoint, timeout_s=timeout_s)


def dead_world(url: str, size: int, *ranks: int, checkpoint: str | None = None, age_s: float = 1.0) -> str:
    """What ranks have left that took their places and died before the world was complete."""
    storage, world = real_storage(url), world_id(time.time() - age_s)
    put_world(storage, world, size, checkpoint)
    for rank in ranks:
        storage.put(member_key(world, rank), member_bytes(f"{rank:032x}", {}))
    return world


def world_id(at_s: float) -> str:
    number = (int(at_s * 1000) << 80) | int.from_bytes(np.random.default_rng().bytes(10), "big")
    digits = "0123456789abcdefghijklmnopqrstuv"
    return "world-" + "".join(digits[number >> shift & 31] for shift in range(125, -1, -5))


def assert_usable(url: str, size: int = 2) -> None:
    """Ranks that come now find each other, and can take a checkpoint."""
    team = open_team(size, url)
    try:
        team.fill()
        id_ = team.saved("usable")
        assert published(url)[-1].id == id_
    finally:
        team.end()


# ---- notes ---------------------------------------------------------------------------------------------------


def store_notes(url: str, n: int) -> list[Any]:
    return [StoreNotes(real_storage(url), "world-" + "0" * 26, rank, f"{rank:032x}") for rank in range(n)]


def torch_notes(url: str, n: int) -> list[Any]:
    shared = distributed.HashStore()
    return [TorchNotes(shared, rank) for rank in range(n)]


NOTES = pytest.mark.parametrize("make", [store_notes, torch_notes], ids=["store", "torch"])


@NOTES
def test_a_note_is_seen_by_all_and_replaced_by_a_later_one(store: str, make: Callable[..., list[Any]]) -> None:
    notes = make(store, 3)
    assert notes[0].read(range(3), "k") == {}
    notes[1].post("k", {"a": [1, None, "é"]})
    notes[2].post("k", 0)
    assert [one.read(range(3), "k") for one in notes] == [{1: {"a": [1, None, "é"]}, 2: 0}] * 3
    notes[1].post("k", "new")
    assert notes[0].read([1], "k") == {1: "new"}
    assert notes[0].read([1], "other") == {}


@NOTES
def test_a_note_that_is_taken_away_is_gone_and_may_be_taken_away_again(
    store: str, make: Callable[..., list[Any]]
) -> None:
    notes = make(store, 2)
    notes[0].post("k", 1)
    notes[0].post("other", 2)
    for _ in range(2):
        notes[0].post("k", None)
    assert notes[1].read([0], "k") == {}
    assert notes[1].read([0], "other") == {0: 2}


class HoldFirstPut(Plan):
    """The first put waits until it is let go."""

    def __init__(self) -> None:
        self.is_held = threading.Event()
        self.gate = threading.Event()

    def before(self, call: Call) -> None:
        if call.action == "put" and not self.is_held.is_set():
            self.is_held.set()
            self.gate.wait(2)  # code that makes others wait for the first put never opens it


def test_notes_that_threads_of_a_rank_post_at_the_same_time_are_all_kept(store: str) -> None:
    plan = HoldFirstPut()
    notes = StoreNotes(FaultyStorage(real_storage(store), plan), "world-" + "0" * 26, 0, "0" * 32)
    first = begin([0], lambda _: notes.post("announce", 1))
    assert plan.is_held.wait(HANG_S)
    second = begin([1], lambda _: notes.post("part", 2))
    if not second[1].done():
        time.sleep(0.1)
    plan.gate.set()
    ended(first)
    ended(second)
    reader = store_notes(store, 2)[1]
    assert reader.read([0], "announce") == {0: 1}
    assert reader.read([0], "part") == {0: 2}


def test_a_note_that_could_not_be_stored_does_not_appear_with_a_later_one(store: str) -> None:
    storage = FaultyStorage(real_storage(store))
    notes = StoreNotes(storage, "world-" + "0" * 26, 0, "0" * 32)
    key = "worlds/world/0/zarr.json"
    storage.plan = AtSite(Site("put", key, 0), is_after=False, error=broken)
    with pytest.raises(StorageError):
        notes.post("part", {"failed": "never said"})
    notes.post("announce", 1)
    found = store_notes(store, 2)[1].read([0], "announce")
    assert found == {0: 1}


@NOTES
def test_many_threads_of_all_ranks_post_and_read_at_once(store: str, make: Callable[..., list[Any]]) -> None:
    notes = make(store, 2)

    def post(i: int) -> None:
        for n in range(20):
            notes[i % 2].post(f"key-{i}", n)
            notes[1 - i % 2].read([0, 1], f"key-{i}")

    all_well(6, post)
    for i in range(6):
        assert notes[1 - i % 2].read([i % 2], f"key-{i}") == {i % 2: 19}


# ---- worlds --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rank", "size", "message"),
    [
        (0, None, "go together"),
        (None, 2, "go together"),
        (2, 2, "less than the world_size 2"),
        (-1, 2, "rank"),
        (0, 0, "world_size"),
        (True, 2, "rank"),
        (0, 2.0, "world_size"),
        ("0", 2, "rank"),
    ],
)
def test_ranks_that_can_not_be_are_refused(rank: Any, size: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_ranks(rank, size)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (1, 2, 0)])
def test_the_order_of_arrival_does_not_matter(store: str, order: tuple[int, ...]) -> None:
    gates = [threading.Event() for _ in range(4)]
    gates[0].set()

    def join_in_turn(rank: int) -> RankGroup:
        turn = order.index(rank)
        assert gates[turn].wait(HANG_S)
        threading.Timer(0.06, gates[turn + 1].set).start()
        return joined(store, rank, 3)

    groups = all_well(3, join_in_turn)
    assert len({group.id for group in groups}) == 1
    assert [group.rank for group in groups] == [0, 1, 2]
    all_well(3, lambda rank: groups[rank].agree("hello", {"same": 1}))


LEFTOVERS: dict[str, list[tuple[int, ...]]] = {
    "no rank came": [()],
    "rank 0 came": [(0,)],
    "rank 1 came": [(1,)],
    "rank 1 died": [(0, 2)],
    "all but rank 0": [(1, 2)],
    "many of all kinds": [(0,), (1,), (1, 2), (), (0, 1), (0, 2)],
}


@pytest.mark.parametrize("left", list(LEFTOVERS.values()), ids=list(LEFTOVERS))
@pytest.mark.parametrize("first", [0, 2])
def test_ranks_do_not_wait_in_the_worlds_of_earlier_launches(
    store: str, left: list[tuple[int, ...]], first: int
) -> None:
    old = [dead_world(store, 3, *ranks, age_s=100 - i) for i, ranks in enumerate(left)]
    begun = begin([first], lambda rank: joined(store, rank, 3))
    time.sleep(0.08)
    begun |= begin([rank for rank in range(3) if rank != first], lambda rank: joined(store, rank, 3))
    groups = ended(begun)
    assert all(isinstance(group, RankGroup) for group in groups.values()), groups
    assert len({group.id for group in groups.values()}) == 1
    assert groups[0].id not in old


def test_ranks_do_not_wait_in_the_world_of_a_launch_whose_clock_was_ahead(store: str) -> None:
    dead_world(store, 2, 0, age_s=-3600.0)
    groups = outcomes(2, lambda rank: joined(store, rank, 2))
    assert all(isinstance(group, RankGroup) for group in groups.values()), groups


def test_a_relaunch_right_after_a_crash_works(team: Open) -> None:
    first = team(2)
    first.fill()
    first.saved("a")
    again = team(2, first.url, resume="latest")  # the others were never closed
    assert {buffer.world for buffer in again.buffers}.isdisjoint({first.buffers[0].world})
    again.fill()
    id_ = again.saved("b")
    assert published(first.url)[-1].id == id_
    assert published(first.url)[-1].parent == published(first.url)[0].id


def test_a_complete_world_accepts_no_further_process(team: Open) -> None:
    one = team(2)
    with pytest.raises(RankTimeoutError, match=r"complete|another process of rank 1"):
        joined(one.url, 1, 2, timeout_s=SHORT_S)
    one.fill()
    one.saved("a")


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """By how many seconds the clock of ranks that join is ahead."""
    seconds = [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + seconds[0], sleep=time.sleep)
    monkeypatch.setattr(joining, "time", clock)
    return seconds


def wait_until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < until, "it never came to that"
        time.sleep(0.01)


def test_a_second_process_of_rank_1_is_named_in_the_error(store: str, ahead: list[float]) -> None:
    calls = {0: 0, 1: 1, 2: 1}
    begun = begin([1, 2], lambda i: joined(store, calls[i], 2))
    time.sleep(0.1)
    begun |= begin([0], lambda i: joined(store, 0, 2))
    wait_until(lambda: sum(future.done() for future in begun.values()) == 2)
    ahead[0] = HANG_S
    groups = ended(begun)
    assert isinstance(groups[0], RankGroup)
    failed = [groups[i] for i in (1, 2) if isinstance(groups[i], Exception)]
    assert len(failed) == 1
    assert isinstance(failed[0], RankTimeoutError)
    assert "rank 1" in str(failed[0])
    assert any(word in str(failed[0]) for word in ("another process", "complete"))


def test_a_second_process_of_rank_0_is_named_in_the_error(store: str, ahead: list[float]) -> None:
    begun = begin([0], lambda _: joined(store, 0, 2))
    wait_until(lambda: len(list_worlds(real_storage(store))) == 1)
    time.sleep(0.1)
    begun |= begin([10], lambda _: joined(store, 0, 2))
    wait_until(lambda: len(list_worlds(real_storage(store))) == 2)
    begun |= begin([1], lambda _: joined(store, 1, 2))
    wait_until(lambda: begun[1].done() and begun[10].done())
    ahead[0] = HANG_S
    groups = ended(begun)
    assert isinstance(groups[10], RankGroup)
    assert isinstance(groups[1], RankGroup)
    assert groups[1].id == groups[10].id
    assert isinstance(groups[0], RankTimeoutError)
    assert "rank 0" in str(groups[0])
    assert "twice" in str(groups[0])


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_rank_that_does_not_come_is_named_to_all_others(store: str, missing: int) -> None:
    there = [rank for rank in range(3) if rank != missing]
    before = buffer_threads()
    failed = outcomes(there, lambda rank: opened(store, rank, 3, rank_timeout_s=SHORT_S))
    for rank, failure in failed.items():
        assert isinstance(failure, RankTimeoutError), (rank, failure)
        assert f"rank {missing}" in str(failure), (rank, str(failure))
    assert buffer_threads() <= before
    assert_usable(store, 3)


def test_another_world_size_is_named_in_the_error(store: str) -> None:
    before = buffer_threads()
    failed = outcomes(2, lambda rank: opened(store, rank, 2 + rank, rank_timeout_s=SHORT_S))
    assert isinstance(failed[0], RankTimeoutError)
    assert "rank 1 of 2" in str(failed[0])
    assert isinstance(failed[1], RankTimeoutError)
    assert "has 2 ranks" in str(failed[1])
    assert "expects 3" in str(failed[1])
    assert buffer_threads() <= before
    assert_usable(store)


@pytest.mark.parametrize(
    ("name", "values"), [("seed", [1, 2]), ("share", ["partition", "whole"])], ids=["seed", "share"]
)
@pytest.mark.parametrize("through", ["store", "torch"])
def test_ranks_that_differ_get_an_error_that_names_the_rank_and_the_option(
    store: str, name: str, values: list[Any], through: str
) -> None:
    before = buffer_threads()

    def make(rank: int) -> ReplayBuffer:
        return opened(store, rank, 3, rank_timeout_s=HANG_S, **{name: values[rank == 2]})

    failed = _failing(through, 3, make)
    for failure in failed.values():
        assert isinstance(failure, RankError)
        assert "rank 2" in str(failure)
        assert name in str(failure)
        assert repr(values[0]) in str(failure)
        assert repr(values[1]) in str(failure)
    assert buffer_threads() <= before
    assert_usable(store)


def _failing(through: str, n: int, make: Callable[[int], Any]) -> dict[int, Any]:
    if through == "store":
        return outcomes(n, make)
    with through_torch(distributed.HashStore()):
        return outcomes(n, make)


def test_ranks_with_another_schema_get_an_error_that_names_the_field(url: str) -> None:
    before = buffer_threads()
    schemas = [SCHEMA, Schema({"x": Field("int32"), "reward": Field("float32")})]
    failed = outcomes(2, lambda rank: opened(url, rank, 2, rank_timeout_s=SHORT_S, schema=schemas[rank]))
    kinds = {type(failure) for failure in failed.values()}
    assert kinds == {SchemaError, RankTimeoutError}, failed
    for rank, failure in failed.items():
        expected = "x: int" if isinstance(failure, SchemaError) else f"rank {1 - rank}"
        assert expected in str(failure)
    assert buffer_threads() <= before


@pytest.mark.parametrize("through", ["store", "torch"])
def test_ranks_that_continue_different_checkpoints_get_an_error_that_names_them(team: Open, through: str) -> None:
    one = team(2)
    one.fill()
    ids = [one.saved(name) for name in "ab"]
    one.close()
    before = buffer_threads()

    def resumed(rank: int) -> ReplayBuffer:
        return ReplayBuffer.resume(one.url, "ab"[rank], rank=rank, world_size=2, rank_timeout_s=SHORT_S)

    failed = _failing(through, 2, resumed)
    assert [isinstance(failure, RankError) for failure in failed.values()] == [True, True]
    assert "rank 1" in str(failed[0])
    assert "checkpoint" in str(failed[1])
    assert all(id_ in str(failed[1]) for id_ in ids)
    assert buffer_threads() <= before
    again = team(2, one.url, resume="latest")
    assert {buffer.n_steps for buffer in again.buffers} == {5}


def test_ranks_of_different_stores_get_an_error(tmp_path: Path) -> None:
    urls = [str(tmp_path / name) for name in "ab"]
    before = buffer_threads()
    failed = outcomes(2, lambda rank: opened(urls[rank], rank, 2, rank_timeout_s=SHORT_S))
    assert [type(failure) for failure in failed.values()] == [RankTimeoutError] * 2
    assert "rank 1" in str(failed[0])
    assert "rank 0" in str(failed[1])
    with through_torch(distributed.HashStore()):
        failed = outcomes(2, lambda rank: opened(urls[rank], rank, 2, rank_timeout_s=HANG_S))
    for failure in failed.values():
        assert isinstance(failure, RankError)
        assert "rank 1" in str(failure)
        assert "store" in str(failure)
    assert buffer_threads() <= before


def test_a_rank_whose_storage_fails_while_it_enters_is_named_and_leaves_no_threads(team: Open, store: str) -> None:
    before = buffer_threads()
    storages = [FaultyStorage(real_storage(store)) for _ in range(2)]
    storages[1].plan = AtSite(Site("put", "streams/buffer/zarr.json", 0), is_after=False, error=broken)

    def make(rank: int) -> ReplayBuffer:
        with own_storage(storages[rank]):
            return opened(store, rank, 2, rank_timeout_s=HANG_S)

    failed = outcomes(2, make)
    assert isinstance(failed[0], RankError), failed
    assert "rank 1" in str(failed[0])
    assert isinstance(failed[1], StorageError), failed
    assert buffer_threads() <= before
    assert_usable(store)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("is_after", [False, True], ids=["before", "after"])
def test_a_storage_error_at_any_call_of_joining_leaves_no_threads_and_a_store_that_opens(
    tmp_path: Path, team: Open, rank: int, is_after: bool
) -> None:
    before = buffer_threads()
    clean = AtSite(None, is_after, broken)
    assert set(_entered(str(tmp_path / "clean"), rank, clean, HANG_S).values()) == {"well"}

    def enter(numbered: tuple[int, Site]) -> None:
        number, site = numbered
        found = _entered(str(tmp_path / f"store{number}"), rank, AtSite(site, is_after, broken))
        for outcome in found.values():
            assert isinstance(outcome, (RankError, StorageError, str)), (site, found)

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(enter, enumerate(sites(clean))))
    assert buffer_threads() <= before
    assert_usable(str(tmp_path / "store0"))


def _entered(url: str, rank: int, plan: Plan, timeout_s: float = 1.0) -> dict[int, Any]:
    trajstore.create(url, SCHEMA, fsync=False)
    storages = [FaultyStorage(real_storage(url)) for _ in range(2)]
    storages[rank].plan = plan

    def enter_and_leave(mine: int) -> str:
        with own_storage(storages[mine]):
            buffer = opened(url, mine, 2, rank_timeout_s=timeout_s)
            storages[mine].plan = Plan()
            buffer.close()
            return "well"

    return outcomes(2, enter_and_leave)


def test_torch_is_refused_as_a_way_where_it_is_not_in_use(url: str) -> None:
    for rank, size in ((0, 1), (0, 2)):
        with pytest.raises(ValueError, match=r"through='torch'.*torch.distributed has"):
            opened(url, rank, size, through="torch", rank_timeout_s=SHORT_S)
    with pytest.raises(ValueError, match="through"):
        opened(url, 0, 2, through="carrier pigeon")


def test_a_note_of_a_rank_that_disagrees_is_shortened_in_the_error(store: str) -> None:
    notes = torch_notes(store, 2)
    groups = [RankGroup("w", rank, 2, notes[rank], HANG_S) for rank in range(2)]
    failed = outcomes(2, lambda rank: groups[rank].agree("hello", {"thing": str(rank) * 100_000}))
    for failure in failed.values():
        assert isinstance(failure, RankError)
        assert len(str(failure)) < 1000


def test_a_rank_that_closes_while_others_still_wait_for_a_note_of_it_is_not_waited_for(store: str) -> None:
    notes = store_notes(store, 2)
    groups = [RankGroup("w", rank, 2, notes[rank], HANG_S * 10) for rank in range(2)]
    begun = begin([0], lambda _: groups[0].gather("part", 1))
    groups[1].leave()
    failure = ended(begun)[0]
    assert isinstance(failure, RankError)
    assert not isinstance(failure, RankTimeoutError)
    assert "rank 1" in str(failure)
    assert "closed" in str(failure)


# ---- what stands below worlds/ -------------------------------------------------------------------------------


def group(own: Any) -> bytes:
    return to_json_bytes(GROUP | {"attributes": {"trajstore": own}})


def member(notes: Any, nonce: Any = "0" * 32) -> bytes:
    return group({"format": FORMAT, "kind": "member", "nonce": nonce, "notes": notes})


WORLD: dict[str, Any] = {"format": FORMAT, "kind": "world", "size": 2, "checkpoint": None, "created_at": 0.0}
HOSTILE_WORLDS = {
    "empty": b"",
    "not JSON": b"\x80\x04\x95cposix\nsystem\n",
    "a list": b"[]",
    "deep": b'{"attributes":' + b"[" * 200_000 + b"]" * 200_000 + b"}",
    "a long number": b'{"attributes":' + b"9" * 100_000 + b"}",
    "another kind": group({**WORLD, "kind": "store"}),
    "another format": group({**WORLD, "format": 99}),
    "no size": group({k: v for k, v in WORLD.items() if k != "size"}),
    "a text as size": group({**WORLD, "size": "2"}),
    "no time": group({**WORLD, "created_at": None}),
}
HOSTILE_MEMBERS = {
    "empty": b"",
    "not JSON": b"\x80\x04\x95cposix\nsystem\n",
    "an array": to_json_bytes({"zarr_format": 3, "node_type": "array", "attributes": {}}),
    "no notes": group({"format": FORMAT, "kind": "member", "nonce": "0"}),
    "notes that are a list": member([]),
    "a number as nonce": member({}, 7),
    "members that are a number": member({"members": 5}),
    "members that are a text": member({"members": "0" * 64}),
    "members that are a mapping": member({"members": {"0": 1}}),
    "members that are numbers": member({"members": [1, 2]}),
}


@pytest.mark.parametrize("data", list(HOSTILE_WORLDS.values()), ids=list(HOSTILE_WORLDS))
def test_a_hostile_world_is_refused(store: str, data: bytes) -> None:
    world = world_id(time.time())
    real_storage(store).put(world_key(world), data)
    with pytest.raises(FormatError, match=world):
        read_world(real_storage(store), world)
    with pytest.raises(FormatError, match=world):
        joined(store, 1, 2, timeout_s=SHORT_S)
    trajstore.open(store)


@pytest.mark.parametrize("data", list(HOSTILE_MEMBERS.values()), ids=list(HOSTILE_MEMBERS))
def test_a_hostile_rank_0_is_refused(store: str, data: bytes) -> None:
    world = dead_world(store, 2, age_s=0.0)
    real_storage(store).put(member_key(world, 0), data)
    with pytest.raises(FormatError, match=world):
        joined(store, 1, 2, timeout_s=SHORT_S)


def test_a_hostile_rank_1_is_refused_by_rank_0(store: str) -> None:
    begun = begin([0], lambda _: joined(store, 0, 2))
    while not list_worlds(real_storage(store)):
        time.sleep(0.01)
    world = list_worlds(real_storage(store))[0]
    real_storage(store).put(member_key(world, 1), b"{}")
    failure = ended(begun)[0]
    assert isinstance(failure, FormatError)
    assert f"{world}/1" in str(failure)


def test_names_below_worlds_that_are_no_ids_are_passed_over(store: str) -> None:
    storage = real_storage(store)
    for name in ("..x", "world-", "world-" + "z" * 26, "world", "x" * 200):
        storage.put(f"worlds/{name}/zarr.json", b"nonsense")
    assert list_worlds(storage) == []
    assert_usable(store)


@pytest.mark.parametrize("n_zeros", [8, 15], ids=["a hundred million", "a thousand million million"])
def test_a_world_of_absurd_size_allocates_nothing(store: str, n_zeros: int) -> None:
    world = world_id(time.time())
    real_storage(store).put(world_key(world), group({**WORLD, "size": 10**n_zeros, "joined": True}))
    tracemalloc.start()
    with pytest.raises(RankTimeoutError, match=f"has {10**n_zeros} ranks"):
        joined(store, 1, 2, timeout_s=SHORT_S)
    trajstore.request_checkpoint(store)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 << 20


HOSTILE_NOTES: dict[str, dict[str, Any]] = {
    "an announcement that is a number": {"announce": 5},
    "an announcement without an id": {"announce": {"n": 1, "name": "a", "answers": [0, 0]}},
    "an announcement with a path": {"announce": {"n": 1, "id": "../../x", "name": "a", "answers": [0, 0]}},
    "an announcement of another name": {
        "announce": {"n": 1, "id": "b-" + "0" * 26, "name": "a", "answers": [0, 0]}
    },
    "an announcement with a huge number": {
        "announce": {"n": "9" * 400, "id": "a-" + "0" * 26, "name": "a", "answers": [0, 0]}
    },
    "an announcement without answers": {"announce": {"n": 1, "id": "a-" + "0" * 26, "name": "a", "answers": []}},
}


@pytest.mark.parametrize("notes", list(HOSTILE_NOTES.values()), ids=list(HOSTILE_NOTES))
def test_a_hostile_announcement_is_refused_by_the_ranks_that_read_it(team: Open, notes: dict[str, Any]) -> None:
    one = team(2)
    one.set_timeout(1.0)
    one.fill()
    storage, world = real_storage(one.url), one.buffers[0].world
    nonce = read_member(storage, world, 0)
    assert nonce is not None
    storage.put(member_key(world, 0), member_bytes(nonce["nonce"], notes))
    assert isinstance(_first_failure(one.buffers[1]), FormatError)
    assert published(one.url) == []


@pytest.mark.parametrize("request_note", [5, {"n": "x"}, {"n": 1}, {"n": 1, "name": "../x"}, {"n": 1, "name": 7}])
def test_a_hostile_request_of_a_rank_is_refused_by_rank_0(team: Open, request_note: Any) -> None:
    one = team(2)
    one.set_timeout(1.0)
    one.fill()
    storage, world = real_storage(one.url), one.buffers[0].world
    nonce = read_member(storage, world, 1)
    assert nonce is not None
    storage.put(member_key(world, 1), member_bytes(nonce["nonce"], {"request": request_note}))
    assert isinstance(_first_failure(one.buffers[0]), FormatError)
    assert published(one.url) == []


@pytest.mark.parametrize(
    "data",
    [b"", b"[]", group({"format": FORMAT, "kind": "request"})]
    + [
        group({"format": FORMAT, "kind": "request", "nonce": "n", "name": name})
        for name in ("../x", 5, "", "x" * 300)
    ],
)
def test_a_hostile_request_from_outside_is_refused(team: Open, data: bytes) -> None:
    one = team(2)
    one.fill()
    real_storage(one.url).put(f"worlds/{one.buffers[0].world}/request/zarr.json", data)
    failure = _first_failure(one.buffers[0])
    assert isinstance(failure, ValueError)  # FormatError, or SchemaError for a name
    assert isinstance(failure, trajstore.TrajstoreError)
    id_ = one.saved("a")
    assert published(one.url)[-1].id == id_


def _first_failure(buffer: ReplayBuffer) -> Exception:
    """What the next calls on a buffer raise, at some time."""
    until = time.monotonic() + HANG_S
    while time.monotonic() < until:
        try:
            buffer.stats()
        except Exception as failure:
            return failure
        time.sleep(0.01)
    raise AssertionError("nothing was raised")


def test_zarr_walks_a_store_with_worlds_without_a_warning(team: Open) -> None:
    one = team(3)
    one.fill()
    walk(one.url)
    one.saved("a")
    one.buffers[2].request_checkpoint("b", wait=True, timeout_s=HANG_S)
    world = trajstore.request_checkpoint(one.url, "c")
    while len(published(one.url)) < 3:
        time.sleep(0.01)
    walk(one.url)
    assert world == one.buffers[0].world
    one.close()
    walk(one.url)
    verified(one.url)


def test_a_store_with_worlds_verifies_without_a_note(team: Open) -> None:
    one = team(2)
    one.fill()
    one.saved("a")
    one.close()
    notes = [note for note in verified(one.url).notes if "worlds" in str(note)]
    assert notes == []


def test_what_worlds_of_long_ago_have_left_is_removed_but_the_last_ones_stay(store: str) -> None:
    storage = real_storage(store)
    old = [world_id(time.time() - 40 * 86400 - i) for i in range(12)]
    for world in old:
        storage.put(world_key(world), group({**WORLD, "created_at": time.time() - 40 * 86400}))
        storage.put(member_key(world, 0), member({}))
    put_world(storage, "world-" + "v" * 26, 2, None)
    assert len(list_worlds(storage)) == 8
    assert "world-" + "v" * 26 in list_worlds(storage)


@pytest.mark.s3
def test_credentials_are_never_in_what_ranks_tell_each_other(new_place: Callable[[str], Place]) -> None:
    place = new_place("s3")
    buffers = all_well(2, lambda rank: opened(place.url, rank, 2, storage_options=place.options))
    try:
        for rank, buffer in enumerate(buffers):
            add(buffer, rank, 1)
        all_well(2, lambda rank: buffers[rank].save_checkpoint("a", wait=True))
        buffers[1].request_checkpoint("b", wait=True, timeout_s=HANG_S)
        trajstore.request_checkpoint(place.url, "c", storage_options=place.options)
    finally:
        outcomes(2, lambda rank: buffers[rank].close())
    storage = real_storage(place.url, place.options)
    text = b"".join(storage.get(key) for key in storage.list_tree("worlds"))
    text += b"".join(storage.get(key) for key in storage.list_tree("checkpoints"))
    for secret in ("test-secret", "test-key", "127.0.0.1"):
        assert secret.encode() not in text


def test_a_request_from_outside_goes_to_the_ranks_that_run(team: Open) -> None:
    """A launch that failed since has left a newer world, which no rank has joined."""
    one = team(2)
    one.fill()
    outcomes([0], lambda _: joined(one.url, 0, 2, timeout_s=SHORT_S))
    assert trajstore.request_checkpoint(one.url, "outside") == one.buffers[0].world
    wait_until(lambda: bool(published(one.url)))
    assert [checkpoint.name for checkpoint in published(one.url)] == ["outside"]


def test_a_request_that_no_session_checks_for_is_an_error_that_says_what_is_needed(store: str) -> None:
    with pytest.raises(trajstore.DataError, match="attend_s"):
        trajstore.request_checkpoint(store)


def test_a_store_of_another_number_of_ranks_is_refused_but_can_be_resumed(team: Open) -> None:
    one = team(2)
    one.fill()
    one.saved("a")
    one.close()
    failed = outcomes(3, lambda rank: opened(one.url, rank, 3))
    for failure in failed.values():
        assert isinstance(failure, RankError)
        assert "2 ranks" in str(failure)
        assert "resume" in str(failure)
    with pytest.raises(RankError, match="2 ranks"):
        ReplayBuffer(one.url, **OPTIONS)
    assert sum(map(len, contents(one.url, "a").values())) == 10
    more: Team = team(3, one.url, resume="a")
    assert sum(buffer.n_steps for buffer in more.buffers) == 10


def test_json_of_a_world_says_what_the_format_says(team: Open) -> None:
    one = team(2)
    found = json.loads(real_storage(one.url).get(world_key(one.buffers[0].world)))
    own = found["attributes"]["trajstore"]
    assert own.keys() == {"format", "kind", "size", "checkpoint", "created_at", "joined"}
    assert (own["size"], own["checkpoint"], own["joined"]) == (2, None, True)
