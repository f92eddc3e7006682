"""Ranks on threads of this process whose storage is watched, slowed down or broken one rank at a time."""

from __future__ import annotations

import contextlib
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from torch import distributed

import trajstore
import trajstore.distributed.checkpoint_requests
import trajstore.replay.session_start
import trajstore.store.store
from tests.support.faulty import Call, Died, FaultyStorage, Plan, real_storage
from tests.support.rank_process import OPTIONS
from trajstore import Checkpoint, ReplayBuffer, Windows
from trajstore.distributed.rank_group import RankGroup, single_rank
from trajstore.distributed.rank_notes import TorchNotes
from trajstore.distributed.world_records import put_world
from trajstore.format.ids import new_id
from trajstore.storage import Storage
from trajstore.store.checkpoints import list_checkpoints
from trajstore.store.verify import VerifyReport, verify

HANG_S = 60.0  # no test waits longer for anything: then it is a deadlock
Outcome = Any  # what a call returned, or the exception that it raised


def begin(ranks: int | Iterable[int], call: Callable[[int], Any]) -> dict[int, Future[Any]]:
    """Call a function of the rank on a thread each; threads start in the order in which ranks are named."""
    order = list(range(ranks)) if isinstance(ranks, int) else list(ranks)
    threads = ThreadPoolExecutor(len(order), thread_name_prefix="test-rank")
    futures = {rank: threads.submit(call, rank) for rank in order}
    threads.shutdown(wait=False)
    return futures


def ended(futures: Mapping[int, Future[Any]]) -> dict[int, Outcome]:
    """What came of it, by rank: exceptions as values."""
    return {rank: future.exception(HANG_S) or future.result() for rank, future in futures.items()}


def outcomes(ranks: int | Iterable[int], call: Callable[[int], Any]) -> dict[int, Outcome]:
    return ended(begin(ranks, call))


def all_well(ranks: int | Iterable[int], call: Callable[[int], Any]) -> list[Any]:
    """What every rank returned, by rank; raises what the first of them raised."""
    found = outcomes(ranks, call)
    for outcome in found.values():
        if isinstance(outcome, BaseException):
            raise outcome
    return [found[rank] for rank in sorted(found)]


class _Storages(threading.local):
    mine: Storage | None = None


_storages = _Storages()


@contextlib.contextmanager
def own_storage(storage: Storage | None) -> Iterator[None]:
    """Let whatever this thread opens go through this storage."""
    _storages.mine = storage
    try:
        yield
    finally:
        _storages.mine = None


@contextlib.contextmanager
def storages_by_thread() -> Iterator[None]:
    """Inside the block, what a thread opens goes through its own storage, if it has one."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (trajstore.store.store, trajstore.distributed.checkpoint_requests):
            real = module.open_storage
            patch.setattr(
                module, "open_storage", lambda *args, real=real, **kwargs: _storages.mine or real(*args, **kwargs)
            )
        yield


@dataclass
class Team:
    """Ranks that write a store together, each with a storage of its own.

    Closing gives up what does not end by itself.
    """

    url: str
    buffers: list[ReplayBuffer]
    storages: list[FaultyStorage]
    n: int = 0

    @property
    def size(self) -> int:
        return len(self.buffers)

    def fill(self, n_steps: int = 5) -> None:
        """One more episode on every rank, that is told apart from all others."""
        self.n += 1
        for rank, buffer in enumerate(self.buffers):
            add(buffer, rank, self.n, n_steps)

    def save(self, name: str = "a", ranks: int | Iterable[int] | None = None, **options: Any) -> dict[int, Outcome]:
        """All ranks call for a checkpoint; what came of it, by rank."""
        return outcomes(
            self.size if ranks is None else ranks,
            lambda rank: self.buffers[rank].save_checkpoint(name, wait=True, **options),
        )

    def saved(self, name: str = "a", **options: Any) -> str:
        """The same, and all goes well; its id."""
        found = self.save(name, **options)
        assert len(set(map(repr, found.values()))) == 1, found
        assert isinstance(found[0], str), found
        return found[0]

    def set_timeout(self, seconds: float) -> None:
        for buffer in self.buffers:
            buffer.session.group.timeout_s = seconds

    def plan(self, rank: int, plan: Plan | None) -> None:
        self.storages[rank].plan = plan or Plan()

    def close(self) -> None:
        outcomes(self.size, lambda rank: self.buffers[rank].close())

    def end(self) -> None:
        """End all threads, whatever state it is in."""
        for rank in range(self.size):
            self.plan(rank, None)
        outcomes(self.size, lambda rank: self.buffers[rank]._release())


def add(buffer: ReplayBuffer, rank: int, number: int, n_steps: int = 5) -> None:
    x = np.arange(n_steps) + 1000 * number + 1_000_000 * rank
    buffer.add_episode({"x": x, "reward": np.ones(n_steps, np.float32)}, terminated=True)


Open = Callable[..., Team]


@contextlib.contextmanager
def teams(root: Path) -> Iterator[Open]:
    """Opens ranks, which are ended with the block."""
    made: list[Team] = []

    def make(n: int = 3, url: str | None = None, **options: Any) -> Team:
        url = str(root / f"store{len(made)}") if url is None else url
        made.append(open_team(n, url, **options))
        return made[-1]

    with storages_by_thread():
        yield make
        for one in made:
            one.end()


def open_team(
    n: int, url: str, *, resume: str | None = None, order: Sequence[int] | None = None, **options: Any
) -> Team:
    storages = [FaultyStorage(real_storage(url)) for _ in range(n)]

    def opened(rank: int) -> ReplayBuffer:
        with own_storage(storages[rank]):
            if resume is not None:
                changes = {"rank_timeout_s": 30.0, **options}
                return ReplayBuffer.resume(url, resume, rank=rank, world_size=n, **changes)
            return ReplayBuffer(url, rank=rank, world_size=n, **OPTIONS | options)

    return Team(url, all_well(order or n, opened), storages)


# ---- through torch's store


@contextlib.contextmanager
def through_torch(store: Any) -> Iterator[None]:
    """Let ranks on threads of this process meet through a store of torch.distributed."""
    ids: dict[int, str] = {}
    lock = threading.Lock()

    def join(
        storage: Storage, rank: int, size: int, *, checkpoint: str | None, timeout_s: float, **_: Any
    ) -> RankGroup:
        if size == 1:
            return single_rank(rank)
        group = RankGroup("", rank, size, TorchNotes(distributed.PrefixStore("world", store), rank), timeout_s)
        with lock:
            group.id = ids.setdefault(size, new_id("world"))
        if rank == 0:
            put_world(storage, group.id, size, checkpoint)
        return group

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trajstore.replay.session_start, "join_group", join)
        yield


# ---- what there is


def published(url: str) -> list[Checkpoint]:
    return list_checkpoints(real_storage(url))


def contents(url: str, which: str) -> dict[int, list[int]]:
    """By rank, the steps that a checkpoint shows."""
    store = trajstore.open(url, at=which, fsync=False)
    ranks = {record.id: record.rank for record in store.streams}
    found: dict[int, list[int]] = {}
    for i, row in enumerate(store.episodes):
        found.setdefault(ranks[row["stream"]] or 0, []).extend(store.read_episode(i)["x"].tolist())
    return {rank: sorted(steps) for rank, steps in found.items()}


def shown(buffer: ReplayBuffer) -> list[int]:
    """The steps that a buffer holds."""
    found: list[int] = []
    if buffer.n_steps:
        for batch in buffer.epoch(256, Windows(squeeze=True), shuffle=False):
            found.extend(batch["x"].tolist())
    return sorted(found)


def walk(url: str) -> None:
    """Plain zarr sees the whole hierarchy; a warning is an error here."""
    dict(zarr.open_group(url, mode="r", zarr_format=3).members(max_depth=None))


def verified(url: str) -> VerifyReport:
    report = verify(url)
    assert not report.problems, report.problems
    return report


def buffer_threads() -> set[threading.Thread]:
    """The threads that buffers need; a storage keeps its own for the next wave."""
    alive = threading.enumerate()
    shared = ("trajstore-io", "trajstore-free", "trajstore-close")  # do not belong to one buffer
    return {t for t in alive if t.name.startswith("trajstore-") and not t.name.startswith(shared)}


# ---- faults at calls that are told apart by what they do

_IDS = re.compile(r"[a-z0-9]+-[0-9a-v]{26}")


@dataclass(frozen=True, order=True)
class Site:
    """The n-th call of a kind, counted from 0."""

    action: str
    key: str
    n: int


def kind_of(call: Call) -> tuple[str, str]:
    return call.action, _IDS.sub(lambda found: found[0].rpartition("-")[0], call.key)


@dataclass
class AtSite(Plan):
    """Fails at a site: once, or (``is_death``) from then on; before or after the call has had its effect."""

    site: Site | None
    is_after: bool
    error: Callable[[], BaseException]
    is_death: bool = False
    seen: Counter[tuple[str, str]] = field(default_factory=Counter)
    is_dead: bool = False
    has_failed: bool = False
    lock: Any = field(default_factory=threading.Lock)
    chosen: set[int] = field(default_factory=set)

    def before(self, call: Call) -> None:
        if self.is_dead:
            raise Died(str(call)) if self.is_death else self.error()
        with self.lock:
            kind = kind_of(call)
            n = self.seen[kind]
            self.seen[kind] += 1
            is_it = self.site == Site(*kind, n)
        if is_it:
            self.has_failed = True
            if not self.is_after:
                self._fail()
            self.chosen.add(call.number)

    def after(self, call: Call) -> None:
        if call.number in self.chosen:
            self._fail()

    def _fail(self) -> None:
        self.is_dead = self.is_death
        raise self.error()


def sites(plan: AtSite) -> list[Site]:
    """All calls that were made; of those that look for notes of others, again and again, the first."""
    found = []
    for (action, key), n in plan.seen.items():
        is_poll = action == "get" and key.startswith("worlds/")
        found += [Site(action, key, i) for i in range(1 if is_poll else n)]
    return sorted(found)
