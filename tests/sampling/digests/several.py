"""Cases of several ranks: who gets which episodes of a checkpoint, and the first batches of each rank."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from tests.sampling.digests.digest import Batch, numbered
from tests.sampling.digests.stores import ENDS, LENGTHS, SCHEMA, Case, Codes, Places, Runs
from trajstore import Partitions, Priorities, ReplayBuffer, Windows, redistribute

T = TypeVar("T")
OPTIONS: dict[str, Any] = {
    "commit_seconds": None,
    "cache_bytes": "8MiB",
    "buffer_bytes": "64KiB",
    "rank_timeout_s": 60.0,
    "fsync": False,
    "seed": 3,
}
EVERY_STEP = Windows(squeeze=True, provenance=True, fields=("observation/state",))
PLAN = ("episode", "t", "length", "end", "holder", "source_rank", "source_env", "rank", "env")


def in_ranks(ranks: Sequence[int], call: Callable[[int], T]) -> list[T]:
    """Call a function of the rank on a thread each, started in this order; results by rank."""
    with ThreadPoolExecutor(len(ranks)) as threads:
        futures = {rank: threads.submit(call, rank) for rank in ranks}
        return [futures[rank].result() for rank in sorted(ranks)]


def _placed(rank: int, n: int) -> dict[str, Any]:
    return {"rank": rank, "world_size": n} if n > 1 else {}


def _started(url: str, n: int, **options: Any) -> list[ReplayBuffer]:
    return in_ranks(range(n), lambda rank: ReplayBuffer(url, **OPTIONS | _placed(rank, n) | options))


def _resumed(
    url: str, checkpoint: str, n: int, order: Sequence[int] | None = None, **how: Any
) -> list[ReplayBuffer]:
    return in_ranks(
        order or range(n),
        lambda rank: ReplayBuffer.resume(url, checkpoint, fsync=False, **how, **_placed(rank, n)),
    )


def _close(buffers: Sequence[ReplayBuffer]) -> None:
    in_ranks(range(len(buffers)), lambda rank: buffers[rank].close())


def _fill(buffers: Sequence[ReplayBuffer], codes: Codes) -> None:
    """Episodes of all lengths and ends in turn, and an open one on every rank."""
    for i, n in enumerate(LENGTHS * 2):
        end, n_final = ENDS[i % len(ENDS)]
        buffers[i % len(buffers)].add_episode(codes.rows(n, n_final), **end, env=i // len(buffers) % 2)
    for buffer in buffers:
        for _ in range(5):
            buffer.append(codes.step(), env=0)


def _update(buffer: ReplayBuffer) -> None:
    batch = buffer.sample(12, Windows(length=1))
    state = batch["observation"]["state"][:, 0]
    buffer.update_priorities(batch["index"], state[:, 1] + 0.5)


def _saved(buffers: Sequence[ReplayBuffer]) -> str:
    """One checkpoint of all ranks, which end then."""
    checkpoints = in_ranks(range(len(buffers)), lambda rank: buffers[rank].save_checkpoint("a", wait=True))
    _close(buffers)
    return checkpoints[0]


def _plan(plan: Partitions, created: Sequence[str]) -> Batch:
    number = [created.index(name) for name in plan.streams]
    return {"stream": [number[i] for i in plan.stream], **{name: getattr(plan, name) for name in PLAN}}


def _batches(buffer: ReplayBuffer, created: Sequence[str]) -> list[Batch]:
    """All that a rank holds, in order, and the first batches that it draws."""
    found = list(buffer.epoch(512, EVERY_STEP, shuffle=False))
    found += [buffer.sample(n, Windows(length=2, boundary="pad_right")) for n in (6, 11)]
    found += [buffer.sample(5, Windows.transitions(n_step=3), recent_steps=20)]
    found += [buffer.sample(5, Windows(length=4, boundary="cross"))]
    return [{f"rank {buffer.rank}": numbered(batch, buffer.streams, created)} for batch in found]


def _runs(m: int, n: int, options: dict[str, Any], how: dict[str, Any], places: Places) -> Runs:
    url, codes = places.fresh(), Codes()
    before = _started(url, m, schema=SCHEMA, **options)
    created = [buffer.stream for buffer in before]
    _fill(before, codes)
    if "priorities" in options:
        in_ranks(range(m), lambda rank: _update(before[rank]))
    checkpoint = _saved(before)
    plan = redistribute(url, checkpoint=checkpoint, world_size=n, **{"policy": "steps"} | how)
    for order in (range(n), range(n)[::-1]):
        after = _resumed(url, checkpoint, n, order, **how)
        every = [*created, *(buffer.stream for buffer in after)]
        found = [batch for buffer in after for batch in _batches(buffer, every)]
        _close(after)
        yield f"ranks start in the order {list(order)}", [{"plan": _plan(plan, created)}, *found]


def redistributed(m: int, n: int, how: dict[str, Any] | None = None, **options: Any) -> Case:
    return functools.partial(_runs, m, n, options, how or {})


def _sampled_and_updated(buffer: ReplayBuffer, created: Sequence[str]) -> list[Batch]:
    batch = buffer.sample(9, Windows(length=2))
    buffer.update_priorities(batch["index"], batch["observation"]["state"][:, 0, 1] + 0.5)
    found = [batch, buffer.sample(9, Windows(length=2))]
    return [{f"rank {buffer.rank}": numbered(each, buffer.streams, created)} for each in found]


def _same_ranks(places: Places) -> Runs:
    """Three ranks that continue as they were, interrupted and not."""
    for is_interrupted in (False, True):
        url = places.fresh()
        buffers = _started(url, 3, schema=SCHEMA, priorities=Priorities())
        created = [buffer.stream for buffer in buffers]
        _fill(buffers, Codes())
        if is_interrupted:
            buffers = _resumed(url, _saved(buffers), 3)
            created += [buffer.stream for buffer in buffers]
        found = [batch for buffer in buffers for batch in _sampled_and_updated(buffer, created)]
        _close(buffers)
        yield f"interrupted {is_interrupted}", found


PAIRS = ((1, 2), (2, 3), (4, 2), (3, 1))
POLICIES = ("steps", "episodes", "contiguous", "interleaved")
INCOMPLETE = {"open": "truncate", "headless": "keep", "cut": "drop"}
CASES: dict[str, Case] = {
    **{f"ranks: from {m} to {n}": redistributed(m, n) for m, n in PAIRS},
    **{f"ranks: from 2 to 3 by {policy}": redistributed(2, 3, {"policy": policy}) for policy in POLICIES},
    "ranks: from 2 to 3, incomplete ones dropped": redistributed(2, 3, {"incomplete": "drop"}),
    "ranks: from 2 to 3, incomplete ones by cause": redistributed(2, 3, {"incomplete": INCOMPLETE}),
    "ranks: from 2 to 3 with a capacity": redistributed(2, 3, capacity=60),
    "ranks: from 4 to 2 with priorities": redistributed(4, 2, priorities=Priorities(over="max")),
    "ranks: as many as before": _same_ranks,
}
