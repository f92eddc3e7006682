"""Cases of readers: windows of every kind, filters, iterators, hindsight, columns, priorities."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

import trajstore
from tests.sampling.digests.digest import Batch, flat, numbered
from tests.sampling.digests.stores import SCHEMA, Case, Codes, Places, Runs, simple
from trajstore import EpisodeTable, Field, Hindsight, Linear, Priorities, Reader, Ring, Snapshot, Windows

Read = Callable[[Reader, int], list[Batch]]  # of the reader and how many batches to prepare ahead
Index = torch.Tensor

# The batches are the same with every cache, with and without compiled loops and prefetch.
WAYS: dict[str, tuple[dict[str, Any], int]] = {
    "a large cache": ({}, 0),
    "a small cache, with prefetch": ({"cache_bytes": 1}, 2),
    "a small cache, without compiled loops": ({"cache_bytes": 2048, "compiled": False}, 1),
}
STATE = ("observation/state", "reward")


def _runs(read: Read, store: str, options: Mapping[str, Any], places: Places) -> Runs:
    snapshot: Snapshot = getattr(places, store)
    for way, (more, prefetch) in WAYS.items():
        reader = Reader(snapshot, **{"seed": 3} | dict(options) | more)
        batches = read(reader, prefetch)
        yield way, [numbered(batch, reader.streams, sorted(reader.streams)) for batch in batches]


def reading(read: Read, *, store: str = "steps", **options: Any) -> Case:
    """A case that reads a store in several ways."""
    return functools.partial(_runs, read, store, options)


def sampled(windows: Windows, sizes: Sequence[int] = (5, 17, 1), **which: Any) -> Read:
    """Some batches of one kind."""
    return lambda reader, _: [reader.sample(n, windows, **which) for n in sizes]


# ---- windows

WINDOWS: dict[str, Windows] = {
    "of one step": Windows(),
    "of 2 steps": Windows(length=2),
    "of 8 steps": Windows(length=8),
    "of 25 steps": Windows(length=25),
    "with burn-in": Windows(length=4, burn_in=3),
    "with bootstrap": Windows(length=4, bootstrap=2),
    "with burn-in and bootstrap": Windows(length=5, burn_in=3, bootstrap=2),
    "with strict context": Windows(length=3, burn_in=2, bootstrap=2, strict_context=True),
    "with stride": Windows(length=4, stride=3),
    "with stride and context": Windows(length=3, stride=2, burn_in=2, bootstrap=1),
    "padded left": Windows(length=6, boundary="pad_left"),
    "padded left with stride": Windows(length=4, stride=3, boundary="pad_left"),
    "padded right": Windows(length=6, boundary="pad_right"),
    "padded right with burn-in": Windows(length=6, burn_in=2, boundary="pad_right"),
    "padded on both sides": Windows(length=6, boundary="pad_both"),
    "padded on both sides with stride": Windows(length=5, stride=4, boundary="pad_both"),
    "short where episodes are": Windows(length=10, boundary="short"),
    "short with context": Windows(length=6, burn_in=1, bootstrap=1, boundary="short"),
    "across episodes": Windows(length=6, boundary="cross"),
    "across episodes with context and stride": Windows(
        length=4, stride=2, burn_in=2, bootstrap=2, boundary="cross"
    ),
    "padded with zeros": Windows(length=6, burn_in=2, boundary="pad_both", pad="zero"),
    "padded with a number": Windows(length=6, boundary="pad_right", pad=7),
    "by step": Windows(length=3, weight="step"),
    "by episode": Windows(length=3, weight="episode"),
    "padded, by episode": Windows(length=4, weight="episode", boundary="pad_right"),
    "padded, by step": Windows(length=4, weight="step", boundary="pad_both"),
    "with one group of fields": Windows(length=3, fields=("observation",)),
    "with two fields": Windows(length=3, fields=STATE),
    "with frame stacks": Windows(length=2, offsets={"observation": (-3, -2, -1, 0)}),
    "with frame stacks and actions ahead": Windows(
        fields=("action", "reward"), offsets={"observation/pixels": (-5, 0), "action": range(6)}
    ),
    "with padded frame stacks": Windows(
        length=4, boundary="pad_both", pad="zero", offsets={"observation/state": (-1, 0)}
    ),
    "with next fields": Windows(length=3, next_fields=("observation/state",)),
    "with all next fields": Windows(length=3, next_fields="final"),
    "with n-step returns": Windows(length=4, n_step=3),
    "with n-step returns of 1 to 5 steps": Windows(length=4, n_step=(1, 5), gamma=0.9),
    "with n-step returns, padded": Windows(length=5, n_step=4, boundary="pad_right"),
    "with n-step returns, strided": Windows(length=3, stride=2, burn_in=1, n_step=2),
    "with n-step returns across episodes": Windows(length=5, n_step=3, boundary="cross"),
    "without the axis of the window": Windows(squeeze=True),
    "with provenance": Windows(length=2, provenance=True),
}
TRANSITIONS: dict[str, Windows] = {
    "plain": Windows.transitions(),
    "of 1 step": Windows.transitions(n_step=1),
    "of 3 steps": Windows.transitions(n_step=3),
    "of 3 steps, gamma 0.5": Windows.transitions(n_step=3, gamma=0.5),
    "of 3 steps, gamma 1": Windows.transitions(n_step=3, gamma=1.0),
    "of 1 to 6 steps": Windows.transitions(n_step=(1, 6)),
    "with two fields": Windows.transitions(n_step=2, fields=STATE),
    "by episode": Windows.transitions(weight="episode"),
    "with frame stacks": Windows.transitions(offsets={"observation/pixels": (-2, -1, 0)}),
}


# ---- which windows


def is_even(table: EpisodeTable) -> Any:
    return table["policy_version"] % 2 == 0


def is_long(table: EpisodeTable) -> Any:
    return table["length"] >= 9


def _epoch(windows: Windows, size: int, **options: Any) -> Read:
    return lambda reader, prefetch: list(reader.epoch(size, windows, prefetch=prefetch, **options))


def _epochs_one_after_the_other(reader: Reader, prefetch: int) -> list[Batch]:
    epochs = [reader.epoch(64, Windows(length=4, fields=STATE), prefetch=prefetch) for _ in range(2)]
    return [batch for epoch in epochs for batch in epoch]


def _iterated(windows: Windows, size: int = 7, n: int = 5, **options: Any) -> Read:
    def read(reader: Reader, prefetch: int) -> list[Batch]:
        with reader.batches(size, windows, prefetch=prefetch, **options) as batches:
            return list(itertools.islice(batches, n))

    return read


def _iterated_in_turn(reader: Reader, prefetch: int) -> list[Batch]:
    """Two iterators and single batches do not disturb each other."""
    short, long = Windows(length=2), Windows(length=7, boundary="pad_right")
    with reader.batches(4, short, prefetch=prefetch) as one, reader.batches(6, long) as other:
        return [b for _ in range(3) for b in (next(one), reader.sample(3, Windows(length=3)), next(other))]


def _into_rings(reader: Reader, prefetch: int) -> list[Batch]:
    ring = Ring(prefetch + 2)
    with reader.batches(6, Windows(length=3), prefetch=prefetch, out=ring) as batches:
        found = [flat(next(batches)) for _ in range(5)]
    memory = reader.sample(4, Windows(length=2))
    kept = flat(memory)
    return [*found, kept, flat(reader.sample(4, Windows(length=2), out=memory))]


def _iterator_resumed(reader: Reader, prefetch: int) -> list[Batch]:
    """The batches after a state, from another iterator that takes it."""
    windows = Windows(length=3, n_step=(1, 3))
    with reader.batches(5, windows, prefetch=prefetch) as batches:
        found = [next(batches), next(batches)]
        state = batches.state_dict()
    with reader.batches(5, windows, prefetch=prefetch) as batches:
        batches.load_state_dict(state)
        return [*found, next(batches), next(batches)]


def _epoch_resumed(reader: Reader, prefetch: int) -> list[Batch]:
    windows = Windows(length=4, fields=STATE)
    first = reader.epoch(50, windows, prefetch=prefetch)
    found = [next(first)]
    state = first.state_dict()
    first.close()
    second = reader.epoch(50, windows, prefetch=prefetch)
    second.load_state_dict(state)
    return [*found, *second]


def _reader_resumed(reader: Reader, _: int) -> list[Batch]:
    windows = Windows.transitions(n_step=(1, 4))
    reader.sample(9, windows)
    state = reader.state_dict()
    expected = reader.sample(9, windows)
    reader.sample(100, windows)
    reader.load_state_dict(state)
    return [expected, reader.sample(9, windows)]


def _at(reader: Reader, _: int) -> list[Batch]:
    index = reader.sample(12, Windows(length=4))["index"]
    kinds = (Windows(length=4, burn_in=2), Windows(length=2, n_step=(1, 3)), Windows(squeeze=True))
    return [reader.at(index, windows) for windows in kinds]


def _whole_episodes(reader: Reader, _: int) -> list[Batch]:
    index = reader.sample(4, Windows())["index"][:, :2]
    return [
        reader.sample_episodes(5),
        reader.sample_episodes(6, windows=Windows(fields=STATE, pad="zero", n_step=2), where=is_even),
        reader.sample_episodes(4, index=index),
    ]


def _all_in_order(reader: Reader, prefetch: int) -> list[Batch]:
    blocks = list(reader.read_all_in_order(block_steps=64, prefetch=prefetch))
    return [*blocks, *reader.read_all_in_order(fields=["reward"])]


def _kinds_in_turn(reader: Reader, _: int) -> list[Batch]:
    kinds = (Windows(length=3), Windows.transitions(n_step=2), Windows(length=5, boundary="cross"))
    return [reader.sample(n, windows) for n in (4, 9) for windows in kinds]


def _staged(reuse: float) -> Read:
    def read(reader: Reader, prefetch: int) -> list[Batch]:
        with reader.staged(8, Windows(length=2), reuse=reuse, prefetch=prefetch) as batches:
            return list(itertools.islice(batches, 12))

    return read


def _staged_runs(reuse: float, places: Places) -> Runs:
    """What is resident depends on the size of the cache, so that is the same here."""
    for prefetch, compiled in ((0, True), (2, True), (1, False)):
        reader = Reader(places.steps, seed=3, cache_bytes=12_000, compiled=compiled)
        batches = _staged(reuse)(reader, prefetch)
        yield f"prefetch {prefetch}", [numbered(b, reader.streams, sorted(reader.streams)) for b in batches]


def _followed(places: Places) -> Runs:
    """A reader that follows commits of other writers, refresh by refresh."""
    for way, (options, _) in WAYS.items():
        store, codes = trajstore.create(places.fresh(), SCHEMA), Codes()
        with store.writer("alpha", commit_seconds=None) as one, store.writer("beta", commit_seconds=None) as two:
            reader, found = Reader(store, seed=3, **options), []
            for i in range(4):
                for t in range(6):
                    one.append(codes.step(), env=0, terminated=t == 2 and i % 2 == 1)
                    two.append(codes.step(), env=t % 2)
                one.commit()
                two.commit()
                reader.refresh()
                found += [reader.sample(5, Windows(length=3)), reader.sample(4, Windows(length=2), recent_steps=9)]
            created = [one.stream, two.stream]
            yield way, [numbered(batch, reader.streams, created) for batch in found]


def _copies(places: Places) -> Runs:
    """A store, a copy of it at another URL, and the store as it is opened again: the same batches."""
    url, other = places.fresh(), places.fresh()
    store = simple(url)
    trajstore.copy(url, other)
    for way, each in (
        ("the store", store),
        ("a copy", trajstore.open(other)),
        ("opened again", trajstore.open(url)),
    ):
        reader = Reader(each, seed=5)
        yield way, [reader.sample(11, Windows(length=4)), reader.sample(6, Windows.transitions(n_step=2))]


WHICH: dict[str, Read] = {
    "where one column says so": sampled(Windows(length=2), where=is_even),
    "where episodes are long": sampled(Windows(length=5, burn_in=2), where=is_long),
    "where, transitions": sampled(Windows.transitions(n_step=3), where=is_even),
    "of recent steps": sampled(Windows(length=2), recent_steps=30),
    "of recent episodes": sampled(Windows(length=3), recent_episodes=4),
    "of recent steps and all": sampled(Windows(length=3), recent_steps=25, recent_fraction=0.25),
    "of recent long episodes": sampled(Windows(length=3), recent_episodes=12, where=is_long),
    "of recent steps, padded": sampled(Windows(length=4, boundary="pad_both"), recent_steps=20),
    "of kinds in turn": _kinds_in_turn,
    "of large batches": sampled(Windows(length=3, fields=STATE), (300,)),
    "of whole episodes": _whole_episodes,
    "by index": _at,
    "of a reader that was resumed": _reader_resumed,
    "in order": _all_in_order,
}
ITERATORS: dict[str, Read] = {
    "batches": _iterated(Windows(length=4)),
    "batches of transitions": _iterated(Windows.transitions(n_step=(1, 3)), 16),
    "batches where": _iterated(Windows(length=2), where=is_even),
    "batches of recent steps": _iterated(Windows(length=2), recent_steps=40, recent_fraction=0.5),
    "iterators in turn": _iterated_in_turn,
    "into rings": _into_rings,
    "batches after a state": _iterator_resumed,
    "an epoch": _epoch(Windows(length=4, fields=STATE), 60),
    "an epoch in order": _epoch(Windows(length=4, fields=STATE), 60, shuffle=False),
    "an epoch without the last batch": _epoch(Windows(length=6, boundary="pad_right"), 64, drop_last=True),
    "an epoch where": _epoch(Windows.transitions(n_step=(1, 3)), 32, where=is_even),
    "an epoch of windows padded on both sides": _epoch(
        Windows(length=3, stride=2, boundary="pad_both", fields=STATE), 100
    ),
    "two epochs": _epochs_one_after_the_other,
    "an epoch after a state": _epoch_resumed,
}

# ---- hindsight


def reward(achieved: torch.Tensor, goal: torch.Tensor) -> torch.Tensor:
    return (achieved == goal).all(-1).float() * 2 - 1


def reached(achieved: torch.Tensor, goal: torch.Tensor) -> torch.Tensor:
    return (achieved == goal).all(-1)


def _relabelled(relabel: Hindsight, windows: Windows) -> Read:
    return sampled(windows, relabel=relabel)


def _relabelled_batches(reader: Reader, prefetch: int) -> list[Batch]:
    relabel = Hindsight("future", fraction=0.5, reward=reward)
    index = reader.sample(6, Windows(length=2))["index"]
    iterated = _iterated(Windows.transitions(n_step=2), 9, 4, relabel=relabel)(reader, prefetch)
    return [*iterated, reader.at(index, Windows(length=2), relabel=relabel)]


ONE, THREE = Windows.transitions(), Windows.transitions(n_step=3)
HINDSIGHT: dict[str, Read] = {
    "future": _relabelled(Hindsight("future", reward=reward), ONE),
    "future, three steps": _relabelled(Hindsight("future", reward=reward), THREE),
    "future, nearer ones more": _relabelled(Hindsight("future", reward=reward, geometric=0.3), ONE),
    "final": _relabelled(Hindsight("final", reward=reward), THREE),
    "episode": _relabelled(Hindsight("episode", fraction=0.6, reward=reward), ONE),
    "random": _relabelled(Hindsight("random", fraction=1.0, reward=reward), ONE),
    "terminated where reached": _relabelled(Hindsight("future", reward=reward, terminated=reached), THREE),
    "padded windows": _relabelled(
        Hindsight("future", reward=reward), Windows(length=4, burn_in=1, boundary="pad_both")
    ),
    "windows with stride": _relabelled(Hindsight("episode", reward=reward), Windows(length=3, stride=2)),
    "without rewards": _relabelled(
        Hindsight("future"), Windows(length=2, fields=("achieved_goal", "desired_goal"))
    ),
    "iterated and by index": _relabelled_batches,
}

# ---- columns


def _code(index: Index) -> torch.Tensor:
    """A number that follows from where a step is; exact in float32."""
    return (index[:, 0] * 5000 + index[:, 1] * 50 + index[:, 2]).float()


def _with_columns(reader: Reader, _: int) -> list[Batch]:
    reader.add_column("advantage", Field("float32"), fill=-1)
    reader.add_column("label", Field("int64", (2,)))
    found = [reader.sample(5, Windows(length=3))]
    windows = Windows(length=3, stride=2)
    index = reader.sample(20, windows)["index"]
    reader.write_column("advantage", index, _code(index)[:, None] + torch.arange(3.0), windows)
    found += [reader.sample(9, Windows(length=4, burn_in=1))]
    n = reader.n_windows(Windows())
    reader.write_all("label", torch.arange(2 * n).reshape(n, 2))
    found += [reader.sample(9, Windows.transitions(n_step=2)), {"column": reader.column("advantage")}]
    return [*found, reader.at(index, Windows(length=2, fields=("reward",)))]


# ---- priorities


def priorities_of(index: Index) -> torch.Tensor:
    """Priorities of steps, exact in every format: quarters from 1/4 to 11/4."""
    return ((index[:, 0] * 5 + index[:, 1] * 7 + index[:, 2] * 3) % 11 + 1).float() / 4


def _updated(windows: Windows, n: int = 4, **which: Any) -> Read:
    """Batches with updates between them; stream numbers follow the names."""

    def read(reader: Reader, _: int) -> list[Batch]:
        found = []
        for i in range(n):
            found.append(reader.sample(8 + i, windows, **which))
            index = found[-1]["index"]
            reader.update_priorities(index, priorities_of(index) + i)
        return found

    return read


def _updated_by_step(reader: Reader, _: int) -> list[Batch]:
    """All learning steps of windows are updated, late ones and duplicates too."""
    windows, found = Windows(length=4, stride=2), []
    for i in range(4):
        found.append(reader.sample(10, windows))
        first = found[0]["index"]
        for index in (found[-1]["index"], first):
            reader.update_priorities(index, priorities_of(index)[:, None] * torch.tensor([1, 2, 0.5, i]), windows)
    return found


def _kinds_by_priority(reader: Reader, _: int) -> list[Batch]:
    """One set of priorities serves several kinds of windows, and filters."""
    kinds = (Windows(length=3), Windows.transitions(n_step=3), Windows(length=5, boundary="pad_right"))
    found = []
    for windows, where in itertools.product(kinds, (None, is_even)):
        found.append(reader.sample(7, windows, where=where))
        reader.update_priorities(found[-1]["index"], priorities_of(found[-1]["index"]))
    return found


def _changed_options(reader: Reader, _: int) -> list[Batch]:
    windows = Windows(length=2)
    found = _updated(windows, 2)(reader, 0)
    reader.set_priorities(alpha=1.0, beta=1.0)
    found += _updated(windows, 2)(reader, 0)
    return [*found, reader.sample(9, windows, prioritised=False)]


def _some_are_0(reader: Reader, _: int) -> list[Batch]:
    index = reader.sample(60, Windows(), prioritised=False)["index"]
    reader.update_priorities(index, (index[:, 2] % 2).float() * 3)
    return _updated(Windows(length=2))(reader, 0)


def _iterated_by_priority(reader: Reader, prefetch: int) -> list[Batch]:
    index = reader.sample(50, Windows())["index"]
    reader.update_priorities(index, priorities_of(index))
    return _iterated(Windows(length=3), 9, 4)(reader, prefetch)


def _resumed_by_priority(reader: Reader, _: int) -> list[Batch]:
    found = _updated(Windows(length=3), 2)(reader, 0)
    state = reader.state_dict()
    expected = reader.sample(9, Windows(length=3))
    index = expected["index"]
    reader.update_priorities(index, priorities_of(index) * 9)
    reader.sample(9, Windows(length=3))
    reader.load_state_dict(state)
    return [*found, expected, reader.sample(9, Windows(length=3))]


_PAIRS, _BY_TWO = Windows(length=2), _updated(Windows(length=2))
PRIORITIES: dict[str, tuple[Priorities, Read]] = {
    "as they are by default": (Priorities(), _BY_TWO),
    "alpha 0": (Priorities(alpha=0.0), _BY_TWO),
    "alpha 1, beta 1": (Priorities(alpha=1.0, beta=1.0), _BY_TWO),
    "beta 0": (Priorities(beta=0.0), _BY_TWO),
    "beta on a schedule": (Priorities(alpha=0.8, beta=Linear(0.2, 1.0, 3)), _BY_TWO),
    "a large eps": (Priorities(eps=0.5), _BY_TWO),
    "an initial number": (Priorities(initial=0.25), _BY_TWO),
    "the maximum of windows": (Priorities(over="max"), _updated(Windows(length=4))),
    "the mean of windows": (Priorities(over="mean"), _updated(Windows(length=4, boundary="pad_right"))),
    "maximum and mean": (Priorities(over=0.9), _updated(Windows(length=4, stride=2))),
    "normalized by the buffer": (Priorities(normalize="buffer"), _BY_TWO),
    "the largest of duplicates": (Priorities(duplicates="max"), _updated_by_step),
    "the last of duplicates": (Priorities(duplicates="last", over="mean"), _updated_by_step),
    "by rank": (Priorities(kind="rank", rank_every=2), _BY_TWO),
    "stratified": (Priorities(stratified=True), _BY_TWO),
    "with a uniform part": (Priorities(uniform=0.25), _BY_TWO),
    "each window twice at most": (Priorities(alpha=0.0, max_uses=2), _updated(_PAIRS, 8)),
    "each transition once, by priority": (Priorities(max_uses=1), _updated(Windows.transitions(), 6)),
    "where": (Priorities(), _updated(_PAIRS, where=is_even)),
    "of recent steps": (Priorities(), _updated(_PAIRS, recent_steps=40, recent_fraction=0.5)),
    "of recent steps only": (Priorities(normalize="buffer"), _updated(_PAIRS, recent_steps=40)),
    "across episodes": (Priorities(over="max"), _updated(Windows(length=4, boundary="cross"))),
    "short windows": (Priorities(), _updated(Windows(length=6, boundary="short"))),
    "several kinds of windows": (Priorities(), _kinds_by_priority),
    "changed options": (Priorities(), _changed_options),
    "some are 0": (Priorities(), _some_are_0),
    "iterated": (Priorities(), _iterated_by_priority),
    "after a state": (Priorities(beta=Linear(0.0, 1.0, 6)), _resumed_by_priority),
}


def _saved_priorities(places: Places) -> Runs:
    """Priorities that a writer stored, found by a reader that is made later."""
    for compiled in (True, False):
        store = simple(places.fresh())
        reader = Reader(store, priorities=Priorities(), seed=3, compiled=compiled)
        found = _BY_TWO(reader, 0)
        with store.writer("learner") as writer:
            reader.save_priorities(writer)
        store.refresh()
        again = Reader(store, priorities=Priorities(), seed=4, compiled=compiled)
        created = [*reader.streams, *(name for name in again.streams if name not in reader.streams)]
        found = [numbered(batch, reader.streams, created) for batch in found]
        yield f"compiled {compiled}", [*found, numbered(again.sample(30, _PAIRS), again.streams, created)]


SEEDS = (0, 1, -1, 1 << 63, 12345678901234567890)
CASES: dict[str, Case] = {
    **{f"windows {name}": reading(sampled(windows)) for name, windows in WINDOWS.items()},
    **{f"transitions {name}": reading(sampled(windows)) for name, windows in TRANSITIONS.items()},
    **{
        f"rewards with observations, {windows.size} steps, n {windows.n_step}": reading(
            sampled(windows), store="late_rewards"
        )
        for windows in (Windows(length=3, n_step=2), THREE, Windows.transitions())
    },
    **{f"windows {name}": reading(read) for name, read in WHICH.items()},
    **{f"iterators: {name}": reading(read) for name, read in ITERATORS.items()},
    **{f"staged, reuse {reuse:g}": functools.partial(_staged_runs, reuse) for reuse in (1.0, 0.5)},
    **{f"hindsight: {name}": reading(read, store="goals") for name, read in HINDSIGHT.items()},
    **{f"seed {seed}": reading(sampled(Windows(length=2)), seed=seed) for seed in SEEDS},
    **{f"priorities: {name}": reading(read, priorities=p) for name, (p, read) in PRIORITIES.items()},
    "columns written back": reading(_with_columns),
    "priorities: hindsight": reading(
        sampled(THREE, relabel=Hindsight(reward=reward)), store="goals", priorities=Priorities()
    ),
    "priorities: stored and found": _saved_priorities,
    "tensordicts": reading(sampled(Windows(length=3, n_step=2)), as_tensordict=True),
    "a reader that follows writers": _followed,
    "copies": _copies,
}
