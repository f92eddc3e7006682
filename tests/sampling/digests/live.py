"""Cases of live buffers: appends, limits and checkpoints between batches, whenever commits happen."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.sampling.digests.digest import Batch, flat, numbered, without
from tests.sampling.digests.reading import priorities_of, reward
from tests.sampling.digests.stores import ENDS, LENGTHS, SCHEMA, Case, Codes, Places, Runs, first_row, goal_rows
from trajstore import (
    EpisodeTable,
    Field,
    Hindsight,
    Linear,
    Priorities,
    ReplayBuffer,
    Retention,
    SamplesPerInsert,
    Schema,
    Windows,
)

OPTIONS: dict[str, Any] = {
    "commit_seconds": None,
    "cache_bytes": "8MiB",
    "buffer_bytes": "64KiB",
    "fsync": False,
    "seed": 3,
}
SMALL = 80_000  # bytes of a cache that has room for the buffer and little else


@dataclass
class Session:
    """A buffer, the steps that come next, and iterators that a resumed session asks for again."""

    buffer: ReplayBuffer
    codes: Codes
    flush_every: int = 0
    n_pauses: int = 0
    iterators: list[Any] = field(default_factory=list)

    def pause(self) -> None:
        """A moment at which some sessions flush."""
        self.n_pauses += 1
        if self.flush_every and self.n_pauses % self.flush_every == 0:
            self.buffer.flush()

    def add(self, n: int, number: int = 0, **more: Any) -> None:
        end, n_final = ENDS[number % len(ENDS)]
        self.buffer.add_episode(self.codes.rows(n, n_final), **end, **more)
        self.pause()

    def step(self, *, env: int = 0, **end: Any) -> None:
        self.buffer.append(self.codes.step(), env=env, **end)
        self.pause()

    def iterator(self, number: int, size: int, windows: Windows, prefetch: int) -> Iterator[Batch]:
        """The iterator of a number; they are asked for in the order of their numbers."""
        if number == len(self.iterators):
            self.iterators.append(self.buffer.batches(size, windows, prefetch=prefetch))
        found: Iterator[Batch] = self.iterators[number]
        return found

    def close(self) -> None:
        for iterator in self.iterators:
            iterator.close()
        self.buffer.close()


Script = Callable[[Session], Iterator[Batch]]

# When what was appended becomes durable, and what is kept in memory, changes no batch.
WAYS: dict[str, tuple[int, dict[str, Any]]] = {
    "never flushed": (0, {}),
    "flushed at every call, with a small cache": (1, {"cache_bytes": SMALL}),
    "committed behind, without compiled loops": (0, {"commit_steps": 7, "compiled": False}),
}


def _runs(script: Script, options: dict[str, Any], make: Callable[[], dict[str, Any]], places: Places) -> Runs:
    for way, (flush_every, more) in WAYS.items():
        buffer = ReplayBuffer(places.fresh(), **{"schema": SCHEMA} | OPTIONS | options | make() | more)
        session = Session(buffer, Codes(), flush_every)
        batches = [flat(batch) for batch in script(session)]
        yield way, [numbered(batch, buffer.streams, [buffer.stream]) for batch in batches]
        session.close()


def living(script: Script, make: Callable[[], dict[str, Any]] = dict, **options: Any) -> Case:
    """A case that appends and samples, with commits at different moments; ``make`` makes options for each run."""
    return functools.partial(_runs, script, options, make)


# ---- appending


def _one_environment(session: Session) -> Iterator[Batch]:
    for t in range(40):
        session.step(terminated=t in (3, 4, 17), truncated=t == 30)
        if t % 4 == 3:
            yield session.buffer.sample(5, Windows(length=2))
            yield session.buffer.sample(3, Windows(length=4, boundary="pad_right"), recent_steps=6)


def _many_environments(session: Session) -> Iterator[Batch]:
    lengths = np.array([4, 7, 11])
    for t in range(30):
        is_last = t % lengths == lengths - 1
        step, final = first_row(session.codes.block(1, 3)), session.codes.final(3)
        session.buffer.append(
            step, envs=range(3), truncated=is_last, terminated=is_last & (t % 2 == 1), final=final
        )
        session.pause()
        if t % 3 == 2:
            yield session.buffer.sample(6, Windows.transitions(n_step=(1, 3)))


def _blocks(session: Session) -> Iterator[Batch]:
    for i in range(5):
        ends = np.zeros((8, 2), bool)
        ends[i, 0] = ends[7 - i, 1] = True
        session.buffer.extend(session.codes.block(8, 2), truncated=ends, final=session.codes.finals(8, 2))
        session.pause()
        yield session.buffer.sample(7, Windows(length=3, burn_in=2))
        yield session.buffer.sample(4, Windows(length=5, boundary="cross"))


def _episodes(session: Session) -> Iterator[Batch]:
    for i, n in enumerate(LENGTHS):
        session.add(n, i, env=i % 3)
        yield session.buffer.sample(6, Windows(length=2, boundary="short", n_step=2))
    yield session.buffer.sample_episodes(4)
    yield from session.buffer.epoch(16, Windows(length=3))


def _ended_and_aborted(session: Session) -> Iterator[Batch]:
    buffer = session.buffer
    for i in range(8):
        for t in range(6):
            session.step(env=t % 2)
        yield buffer.sample(6, Windows(length=2))
        if i % 4 == 3:
            buffer.abort_episode(env=0)
        else:
            buffer.end_episode(env=i % 2, truncated=True, final=session.codes.final())
        yield buffer.sample(6, Windows.transitions())


# ---- limits


def _past_the_limit(session: Session) -> Iterator[Batch]:
    for i, n in enumerate(LENGTHS * 2):
        session.add(n, i, env=i % 2)
        yield session.buffer.sample(5, Windows(length=2, boundary="short"))
    yield from session.buffer.epoch(8, Windows(), shuffle=False)


def _steps_past_the_limit(session: Session) -> Iterator[Batch]:
    """Long open episodes lose their first steps."""
    for t in range(90):
        session.step(env=t % 2, truncated=t % 40 == 39)
        if t % 6 == 5:
            yield session.buffer.sample(5, Windows(length=3, burn_in=1, provenance=True))


def is_old(table: EpisodeTable) -> Any:
    return table["length"] == 7


def _evicted_and_cleared(session: Session) -> Iterator[Batch]:
    buffer = session.buffer
    for i, n in enumerate(LENGTHS):
        session.add(n, i)
    buffer.flush()
    ways: list[Callable[[], int]] = [lambda: buffer.evict(2), lambda: buffer.evict(where=is_old), buffer.clear]
    for evict in ways:
        yield buffer.sample(9, Windows(length=1))
        evict()
        session.add(4)
    yield buffer.sample(9, Windows(length=2))


def _versions(session: Session) -> Iterator[Batch]:
    for version in range(6):
        session.buffer.policy_version = version
        session.add(6 + version, version)
        if version % 2:
            session.buffer.remove_below(version - 2)
        yield session.buffer.sample(6, Windows(length=2))


# ---- priorities and columns


def _with_updates(session: Session) -> Iterator[Batch]:
    buffer, before = session.buffer, None
    for i, n in enumerate(LENGTHS * 2):
        session.add(n, i)
        batch = buffer.sample(6, Windows(length=1) if i % 3 else Windows.transitions())
        buffer.update_priorities(batch["index"], priorities_of(batch["index"]))
        if before is not None:  # also late, of steps that may be gone
            buffer.update_priorities(before, priorities_of(before) * 2)
        before = batch["index"]
        yield batch


def _used_up(session: Session) -> Iterator[Batch]:
    for i in range(6):
        session.add(8, i)
        yield session.buffer.sample(7, Windows(length=1))


def _columns(session: Session) -> Iterator[Batch]:
    buffer = session.buffer
    buffer.add_column("value", Field("float32"), fill=-1)
    for i, n in enumerate(LENGTHS):
        session.add(n, i)
        batch = buffer.sample(6, Windows(length=1))
        buffer.write_column("value", batch["index"], (batch["index"][:, 1] * 100 + batch["index"][:, 2]).float())
        yield buffer.sample(6, Windows(length=2, boundary="pad_right"))
    for block in buffer.read_all_in_order(block_steps=16):
        buffer.write_column("value", block["index"], block["observation"]["state"][:, 0])
    yield buffer.sample(9, Windows(length=2, boundary="pad_left"))


# ---- iterators, pacing


def _iterated(session: Session) -> Iterator[Batch]:
    """Batches that are planned ahead while steps come and go."""
    session.add(12)
    first = session.iterator(0, 5, Windows(length=2), 2)
    second = session.iterator(1, 4, Windows(length=1, n_step=(1, 3)), 0)
    for i, n in enumerate(LENGTHS):
        session.add(n + 2, i)
        yield from (next(first), next(second), session.buffer.sample(3, Windows(length=1)))


def _paced(session: Session) -> Iterator[Batch]:
    for t in range(40):
        session.step(terminated=t % 9 == 8)
        if t >= 8:
            yield session.buffer.sample(2, Windows(length=2))


def _pace() -> dict[str, Any]:
    return {"samples_per_insert": SamplesPerInsert(2.0, min_steps=8, timeout_s=20)}


def _hindsight(session: Session) -> Iterator[Batch]:
    """Goals of episodes that are still open."""
    relabel, buffer = Hindsight("future", reward=reward), session.buffer
    for number in range(3):
        rows = goal_rows(number, 9, 10)
        for t in range(9):
            buffer.append({name: value[t] for name, value in rows.items()})
            session.pause()
            if t % 2:
                yield buffer.sample(5, Windows.transitions(n_step=2), relabel=relabel)
        final = {name: rows[name][9] for name in ("achieved_goal", "desired_goal")}
        buffer.end_episode(truncated=True, final=final)
        yield buffer.sample(5, Windows(length=2), relabel=relabel)


def _goal_schema() -> dict[str, Any]:
    goal = Field("float32", (2,), final=True)
    fields = {"achieved_goal": goal, "desired_goal": goal, "action": Field("int64"), "reward": Field("float32")}
    return {"schema": Schema(fields)}


LIVE: dict[str, Case] = {
    "one environment": living(_one_environment),
    "many environments": living(_many_environments),
    "blocks": living(_blocks),
    "episodes": living(_episodes),
    "episodes are ended and aborted": living(_ended_and_aborted),
    "a capacity of 40 steps": living(_past_the_limit, capacity=40),
    "a capacity of 40 steps, open episodes": living(_steps_past_the_limit, capacity=40),
    "a limit of 5 episodes": living(_past_the_limit, capacity=Retention(episodes=5)),
    "limits of steps and episodes": living(_past_the_limit, capacity=Retention(steps=50, episodes=6)),
    "a limit of each stream": living(_past_the_limit, capacity=Retention(per_stream=Retention(steps=30))),
    "evicted and cleared": living(_evicted_and_cleared),
    "policy versions": living(_versions),
    "priorities": living(_with_updates, priorities=Priorities(beta=Linear(0.4, 1.0, 15))),
    "priorities with a capacity": living(_with_updates, capacity=40, priorities=Priorities(over="max")),
    "each step twice at most": living(_used_up, priorities=Priorities(alpha=0.0, max_uses=2)),
    "columns": living(_columns, capacity=60),
    "iterators": living(_iterated, capacity=45),
    "samples per insert": living(_paced, _pace),
    "hindsight": living(_hindsight, _goal_schema),
}

# ---- checkpoints

Phase = Callable[[Session], Iterator[Batch]]


def _resumed(session: Session, url: str, checkpoint: str, **changes: Any) -> Session:
    session.close()
    return Session(ReplayBuffer.resume(url, checkpoint, fsync=False, **changes), session.codes)


def _phases(phases: Sequence[Phase], options: dict[str, Any], drops: tuple[str, ...], places: Places) -> Runs:
    """Phases of a run with a checkpoint after each: in one session, and with a session for each phase."""
    for way, changes in RESUMING.items():
        url = places.fresh()
        session, found = Session(ReplayBuffer(url, schema=SCHEMA, **OPTIONS | options), Codes()), []
        created = [session.buffer.stream]
        for i, phase in enumerate(phases):
            batches = [numbered(batch, session.buffer.streams, created) for batch in phase(session)]
            found += [without(batch, *drops) for batch in batches]
            checkpoint = session.buffer.save_checkpoint(f"phase{i}", wait=True)
            if changes is not None:
                session = _resumed(session, url, checkpoint, **changes)
                created.append(session.buffer.stream)
        session.close()
        yield way, found


RESUMING: dict[str, dict[str, Any] | None] = {
    "uninterrupted": None,
    "resumed": {},
    "resumed with another cache, without compiled loops": {"cache_bytes": SMALL, "compiled": False},
}


def resuming(*phases: Phase, drops: tuple[str, ...] = (), **options: Any) -> Case:
    """A case with checkpoints; steps that are appended after one have another stream, so they drop the index."""
    return functools.partial(_phases, phases, options, drops)


def _filled(session: Session) -> Iterator[Batch]:
    for i, n in enumerate(LENGTHS):
        session.add(n, i)
        yield session.buffer.sample(4, Windows(length=1))


def _sampled(session: Session) -> Iterator[Batch]:
    for size in (5, 9):
        yield session.buffer.sample(size, Windows(length=2, n_step=(1, 3)))
        yield session.buffer.sample(size, Windows(length=3), recent_steps=20, recent_fraction=0.5)


def _consumed(session: Session) -> Iterator[Batch]:
    for size in (5, 9):
        yield session.buffer.sample(size, Windows(length=1))


def _sampled_and_updated(session: Session) -> Iterator[Batch]:
    for _ in range(3):
        batch = session.buffer.sample(7, Windows(length=2, boundary="pad_right"))
        session.buffer.update_priorities(batch["index"], batch["observation"]["state"][:, 0, 1] + 0.5)
        yield batch


def _taken(session: Session) -> Iterator[Batch]:
    first = session.iterator(0, 5, Windows(length=2), 2)
    second = session.iterator(1, 6, Windows.transitions(), 0)
    yield from itertools.chain(itertools.islice(first, 3), itertools.islice(second, 2))
    yield session.buffer.sample(3, Windows(length=1))


def _valued(session: Session) -> Iterator[Batch]:
    buffer = session.buffer
    if buffer.policy_version is None:
        buffer.policy_version = 1
        buffer.add_column("value", Field("float32"))
    batch = buffer.sample(9, Windows(length=1))
    buffer.write_column("value", batch["index"], batch["observation"]["state"][:, 0, 0] / 2)
    yield buffer.sample(9, Windows(length=3))


_BETA = Priorities(beta=Linear(0.4, 1.0, 8))
CHECKPOINTS: dict[str, Case] = {
    "sampled": resuming(_filled, _sampled, _sampled),
    "sampled, one step after the other": resuming(
        _filled, _sampled, sample=Windows(length=2), capacity=35, priorities=Priorities(stratified=True)
    ),
    "appended": resuming(_filled, _filled, _sampled, drops=("index",), capacity=50),
    "priorities": resuming(_filled, _sampled_and_updated, _sampled_and_updated, priorities=_BETA),
    "priorities, appended": resuming(
        _filled, _sampled_and_updated, _filled, _sampled, drops=("index",), priorities=_BETA, capacity=60
    ),
    "used up": resuming(_filled, _consumed, _consumed, priorities=Priorities(alpha=0.0, max_uses=6)),
    "iterators with prefetch": resuming(_filled, _taken, _taken, _taken),
    "iterators with prefetch by priority": resuming(_filled, _taken, _taken, priorities=Priorities()),
    "iterators while steps are evicted": resuming(_filled, _taken, _filled, _taken, drops=("index",), capacity=40),
    "columns and versions": resuming(_filled, _valued, _valued),
}


def _amended(places: Places) -> Runs:
    """Steps that are amended before a flush gives them a place."""
    for flush_every in (0, 1, 4):
        with ReplayBuffer(places.fresh(), schema=SCHEMA, **OPTIONS) as buffer:
            session, found = Session(buffer, Codes(), flush_every), []
            for t in range(20):
                buffer.append(session.codes.step(), terminated=False)
                found.append(flat(buffer.sample(4, Windows(length=1))))
                buffer.amend({"action": 100 + t})
                found.append(flat(buffer.sample(4, Windows(length=1))))
                session.pause()
            yield f"flushed every {flush_every}", found


def _joined(places: Places) -> Runs:
    """A store that one session left, and another joins."""
    for flush in (False, True):
        url = places.fresh()
        codes = Codes()
        with ReplayBuffer(url, schema=SCHEMA, name="first", **OPTIONS) as first:
            session = Session(first, codes, int(flush))
            found = [numbered(batch, first.streams, [first.stream]) for batch in _filled(session)]
        with ReplayBuffer(url, name="second", **OPTIONS) as second:
            session = Session(second, codes, int(flush))
            created = [first.stream, second.stream]
            found += [numbered(batch, second.streams, created) for batch in _filled(session)]
        yield f"flushed {flush}", found


CASES: dict[str, Case] = {
    **{f"buffer: {name}": case for name, case in LIVE.items()},
    **{f"resumed: {name}": case for name, case in CHECKPOINTS.items()},
    "buffer: a store that is there": _joined,
    "buffer: steps are amended": _amended,
}
