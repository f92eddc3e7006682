"""Prioritised draws: probabilities and weights against a plain float64 reference, updates, saving."""

from __future__ import annotations

import contextlib
import copy
import json
import threading
import tracemalloc
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
import zarr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import trajstore
from tests.conftest import Place
from tests.format.test_hostile_stores import edit_json, nodes_of
from tests.sampling.test_reader import Episode, legal_starts, schema
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
from trajstore import CorruptionError, DataError, FormatError, StorageError, Store, TrajstoreError, Writer
from trajstore.format.spans import VisibleSpans
from trajstore.sampling.batches.outputs import Ring
from trajstore.sampling.priorities.priority_options import Linear, Priorities
from trajstore.sampling.reader import Reader
from trajstore.sampling.windows import Windows
from trajstore.schema import Array
from trajstore.store.snapshot import Snapshot

Handle = tuple[int, int, int]  # stream number, episode, t
Rng = np.random.Generator

ENDS = ("terminated", "truncated", "")
PLAIN = Priorities(alpha=1.0, beta=1.0, eps=0.0)  # probabilities are priorities / their sum
few = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.fixture(autouse=True)
def empty_memory() -> Iterator[None]:
    """Listing a place in memory looks at all that is there, so tests leave nothing behind."""
    yield
    fsspec.filesystem("memory").store.clear()


# ---- stores ---------------------------------------------------------------------------------------------


def named(value: object) -> str:
    """What a test is called for options: those that are not the default."""
    if isinstance(value, (Windows, Priorities)):
        default = type(value)()
        names = [name for name in type(value).__slots__ if getattr(value, name) != getattr(default, name)]
        return "-".join(f"{name}={getattr(value, name)}" for name in names) or "default"
    return str(value)


def new_store(url: str | None = None, chunks: int = 4) -> Store:
    return trajstore.create(url or f"memory://priorities-{uuid.uuid4().hex}", schema((chunks,) * 3), fsync=False)


def step(t: int) -> dict[str, Any]:
    return {"obs": np.array([0, t], np.float32), "action": t, "reward": 0.0}


def steps(n: int) -> dict[str, Array]:
    return {"obs": np.zeros((n, 2), np.float32), "action": np.arange(n), "reward": np.zeros(n, np.float32)}


class Experience:
    """Writes steps of some environments whose action is their t, so that batches tell where windows start."""

    def __init__(self, writer: Writer, rng: Rng, n_envs: int = 3) -> None:
        self.writer = writer
        self._rng = rng
        self._t = [0] * n_envs

    def write(self, n: int) -> None:
        for _ in range(n):
            env = int(self._rng.integers(len(self._t)))
            end = str(self._rng.choice(["", "", "", "", *ENDS]))
            final = {"obs": np.zeros(2, np.float32)} if end and self._rng.integers(2) else None
            self.writer.append(step(self._t[env]), env=env, final=final, **({end: True} if end else {}))
            self._t[env] = 0 if end else self._t[env] + 1


def store_of(lengths: list[int], n_streams: int = 1, url: str | None = None) -> Store:
    """Terminated episodes without final rows, dealt to streams in turn, all of one environment."""
    store = new_store(url)
    for i in range(n_streams):
        with store.writer(f"w{i}", commit_seconds=None) as writer:
            for n in lengths[i::n_streams]:
                writer.append_episode(steps(n), terminated=True)
    store.refresh()
    return store


def random_store(seed: int, n: int = 40, n_streams: int = 2) -> Store:
    """Interleaved episodes of all kinds, some of them open."""
    rng, store = np.random.default_rng(seed), new_store()
    for i in range(n_streams):
        writer = store.writer(f"w{i}", commit_seconds=None)
        experience = Experience(writer, rng)
        for _ in range(3):
            experience.write(n // 3)
            writer.commit()
        writer.release()  # as if it had died: what is open stays open
    store.refresh()
    return store


class Evicted(Snapshot):
    """A snapshot of which rows below some marks were evicted."""

    def __init__(self, snapshot: Snapshot, marks: dict[str, int]) -> None:
        super().__init__(snapshot.storage, snapshot.schema, snapshot._streams)
        self._marks = dict(marks)

    def parts(self) -> list[VisibleSpans]:
        names = [record.id for record in self.streams]
        return [
            replace(part, first_row=self._marks.get(name, 0))
            for name, part in zip(names, super().parts(), strict=True)
        ]


# ---- the reference --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Known:
    """An episode as the episode table shows it; steps before ``t_first`` were evicted."""

    stream: int
    episode: int
    env: int
    n: int
    end: str
    has_final: bool
    t_first: int

    def handle(self, position: int) -> Handle:
        return self.stream, self.episode, self.t_first + position


def known_episodes(reader: Reader) -> list[Known]:
    table, number = reader.snapshot.episodes, {name: i for i, name in enumerate(reader.streams)}
    columns = (table[name].tolist() for name in ("stream", "episode", "env", "length", "end", "has_final"))
    return [
        Known(number[stream], episode, env, n, end, has_final, table.spans(i)[0].t_start)
        for i, (stream, episode, env, n, end, has_final) in enumerate(zip(*columns, strict=True))
        if n > 0 and end != "aborted"
    ]


def all_steps(reader: Reader) -> list[Handle]:
    return [e.handle(p) for e in known_episodes(reader) for p in range(e.n)]


def usable(e: Known, spec: Windows) -> int:
    return e.n - (spec.needs_next and not (e.has_final or e.end == "terminated"))


def crossing_starts(e: Known, episodes: list[Known], spec: Windows) -> set[int]:
    after = [f.n for f in episodes if (f.stream, f.env) == (e.stream, e.env) and f.episode > e.episode]
    return {p for p in range(usable(e, spec)) if p + spec.reach < e.n + sum(after)}


def windows_of(reader: Reader, spec: Windows, where: Any = None) -> dict[Handle, list[Handle]]:
    """Every window by where it starts, and its steps that exist.

    One that starts before its episode counts as the one that starts with it does.
    """
    episodes = known_episodes(reader)
    found = {}
    for e in episodes:
        if where is not None and not where(e):
            continue
        as_episode = Episode(e.episode, e.n, "terminated" if e.end == "terminated" else "open", e.has_final)
        is_cross = spec.boundary == "cross"
        starts = crossing_starts(e, episodes, spec) if is_cross else legal_starts(as_episode, spec, "action")
        for start in starts:
            inside = [p for i in range(spec.length) if (p := max(start, 0) + i * spec.stride) < e.n]
            found[e.handle(start)] = [e.handle(p) for p in inside]
    return found


class Reference:
    """Priorities of steps, and what follows from them, in float64."""

    def __init__(self, reader: Reader, options: Priorities) -> None:
        self.reader, self.options = reader, options
        self.values: dict[Handle, float] = {}
        self.largest = 1.0 if options.initial == "max" else float(options.initial)
        self.follow()

    def follow(self) -> None:
        """Give what is new the initial priority."""
        initial = self.largest if self.options.initial == "max" else float(self.options.initial)
        for handle in all_steps(self.reader):
            self.values.setdefault(handle, initial)

    def update(self, handles: list[Handle], values: list[float]) -> None:
        for handle, value in zip(handles, values, strict=True):
            self.values[handle] = float(np.float32(value))
            self.largest = max(self.largest, self.values[handle])

    def mass(self, steps_: list[Handle]) -> float:
        values = np.array([self.values[handle] for handle in steps_])
        over = self.options.over
        eta = {"max": 1.0, "mean": 0.0}.get(over) if isinstance(over, str) else over
        p = values[0] if eta is None else eta * values.max() + (1 - eta) * values.mean()
        return float((p + self.options.eps) ** self.options.alpha) if p > 0 else 0.0

    def probabilities(self, spec: Windows, where: Any = None) -> dict[Handle, float]:
        """Of every window, those of priority 0 included."""
        masses = {start: self.mass(found) for start, found in windows_of(self.reader, spec, where).items()}
        total, u = sum(masses.values()), self.options.uniform
        return {s: (1 - u) * (m / total if total else 0.0) + u / len(masses) for s, m in masses.items()}

    def weights(self, drawn: list[float], every: dict[Handle, float], beta: float) -> Array:
        least = min(drawn) if self.options.normalize == "batch" else min(p for p in every.values() if p > 0)
        return (least / np.array(drawn)) ** beta


def starts_of(batch: dict[str, Any], spec: Windows) -> list[Handle]:
    """Where the windows of a batch start, also outside of their episode (the index says its first step then)."""
    if spec.boundary == "cross":  # never before an episode, and the first step may be of the one before
        return [tuple(handle) for handle in batch["index"].tolist()]
    first = batch["valid"].int().argmax(1)
    t = batch["action"].gather(1, first[:, None])[:, 0] - spec.stride * (first - spec.burn_in)
    return [(s, e, int(start)) for (s, e, _), start in zip(batch["index"].tolist(), t, strict=True)]


def check(
    reference: Reference, batch: dict[str, Any], spec: Windows, beta: float, where: Any = None
) -> list[Handle]:
    """Compare the probabilities and weights of a batch with the reference."""
    drawn, every = starts_of(batch, spec), reference.probabilities(spec, where)
    expected = [every[start] for start in drawn]  # a KeyError here is a window that does not exist
    assert min(expected) > 0
    priority = batch["priority"]
    assert priority["probability"].dtype == torch.float64
    np.testing.assert_allclose(priority["probability"].numpy(), expected, rtol=1e-6)
    np.testing.assert_allclose(priority["weight"].numpy(), reference.weights(expected, every, beta), rtol=1e-6)
    return drawn


def random_priorities(rng: Rng, *shape: int) -> torch.Tensor:
    values = rng.uniform(0.05, 5.0, shape) * (rng.random(shape) > 0.15)
    return torch.from_numpy(values.astype(np.float32))


def random_update(reader: Reader, reference: Reference, rng: Rng, n: int = 12) -> None:
    every = all_steps(reader)
    handles = [every[int(i)] for i in rng.integers(0, len(every), n)]
    values = random_priorities(rng, n)
    assert reader.update_priorities(torch.tensor(handles), values) == 0
    reference.update(handles, values.tolist())


def set_all(reader: Reader, values: dict[Handle, float]) -> None:
    reader.update_priorities(torch.tensor(list(values)), torch.tensor(list(values.values())))


# ---- probabilities and weights --------------------------------------------------------------------------

BOUNDARIES = ("strict", "pad_right", "short", "cross")


@st.composite
def specs(draw: st.DrawFn) -> Windows:
    boundary = draw(st.sampled_from(BOUNDARIES))
    return Windows(
        length=draw(st.integers(1, 4)),
        burn_in=draw(st.integers(0, 2)),
        bootstrap=draw(st.integers(0, 2)),
        stride=draw(st.integers(1, 3)),
        boundary=boundary,
        strict_context=boundary == "strict" and draw(st.booleans()),
        n_step=draw(st.sampled_from([None, 2, (1, 3)])),
    )


@st.composite
def options(draw: st.DrawFn, spec: Windows) -> Priorities:
    # What windows across episodes, and the steps of padded ones that are not learned, count is tested on its own.
    is_plain = spec.boundary != "cross" and (spec.boundary == "strict" or not spec.needs_next)
    return Priorities(
        alpha=draw(st.sampled_from([0.0, 0.6, 1.0, 1.5])),
        beta=draw(st.sampled_from([0.0, 0.4, 1.0])),
        eps=draw(st.sampled_from([0.0, 1e-6, 0.1])),
        initial=draw(st.sampled_from(["max", 0.5, 3.0])),
        over=draw(st.sampled_from(["start", "max", "mean", 0.3])) if is_plain else "start",
        normalize=draw(st.sampled_from(["batch", "buffer"])),
        stratified=draw(st.booleans()),
    )


@few
@given(st.data(), st.integers(0, 1 << 30), st.booleans())
def test_probabilities_and_weights_are_those_of_the_reference(
    data: st.DataObject, seed: int, compiled: bool
) -> None:
    spec = data.draw(specs())
    chosen = data.draw(options(spec))
    store, rng = random_store(seed), np.random.default_rng(seed)
    reader = Reader(store, priorities=chosen, seed=seed, compiled=compiled)
    reference = Reference(reader, chosen)
    assert chosen.beta_at(0) == chosen.beta
    if not windows_of(reader, spec):
        with pytest.raises(DataError, match="no such window exists"):
            reader.sample(4, spec)
        return
    for _ in range(3):
        if not sum(reference.probabilities(spec).values()):
            with pytest.raises(DataError, match="every window that could be drawn has priority 0"):
                reader.sample(8, spec)
        else:
            check(reference, reader.sample(64, spec), spec, float(chosen.beta_at(0)))
        random_update(reader, reference, rng)


@few
@given(st.data(), st.integers(0, 1 << 30))
def test_updates_of_every_step_of_windows_are_aggregated(data: st.DataObject, seed: int) -> None:
    spec = replace(data.draw(specs()), n_step=None)
    spec = replace(
        spec, boundary=data.draw(st.sampled_from(["strict", "pad_right", "short"])), strict_context=False
    )
    chosen = data.draw(options(spec))
    store, rng = random_store(seed), np.random.default_rng(seed)
    reader = Reader(store, priorities=chosen, seed=seed)
    reference = Reference(reader, chosen)
    if not windows_of(reader, spec):
        return
    for _ in range(3):
        if not sum(reference.probabilities(spec).values()):
            return
        batch = reader.sample(16, spec)
        drawn = check(reference, batch, spec, float(chosen.beta_at(0)))
        values = random_priorities(rng, 16, spec.length)
        assert reader.update_priorities(batch["index"], values, spec) == 0
        for start, row in zip(drawn, values.tolist(), strict=True):
            every = [(*start[:2], start[2] + i * spec.stride) for i in range(spec.length)]
            pairs = [(h, v) for h, v in zip(every, row, strict=True) if h in reference.values]
            reference.update([h for h, _ in pairs], [v for _, v in pairs])


@pytest.mark.parametrize("normalize", ["batch", "buffer"])
@pytest.mark.parametrize("spec", [Windows(), Windows(length=3), Windows(length=2, boundary="pad_right")], ids=named)
def test_a_uniform_part_is_in_probabilities_and_weights(normalize: Any, spec: Windows) -> None:
    chosen = Priorities(alpha=0.7, beta=0.5, uniform=0.25, normalize=normalize)
    reader = Reader(random_store(1), priorities=chosen, seed=1)
    reference, rng = Reference(reader, chosen), np.random.default_rng(1)
    for _ in range(4):
        random_update(reader, reference, rng, 30)
        check(reference, reader.sample(200, spec), spec, 0.5)


def test_a_uniform_part_draws_what_has_no_priority() -> None:
    chosen = replace(PLAIN, uniform=0.5)
    reader = Reader(store_of([6]), priorities=chosen)
    set_all(reader, {(0, 0, t): float(t == 2) for t in range(6)})
    drawn = [t for _, _, t in reader.sample(400, Windows())["index"].tolist()]
    assert set(drawn) == set(range(6))
    assert drawn.count(2) > 200


def test_a_uniform_part_can_be_switched_on_later() -> None:
    reader = Reader(store_of([6]), priorities=PLAIN)
    set_all(reader, {(0, 0, t): float(t < 2) for t in range(6)})
    reader.sample(4, Windows())
    reader.set_priorities(uniform=0.5)
    batch = reader.sample(100, Windows())
    expected = [0.5 * 0.5 * (t < 2) + 0.5 / 6 for _, _, t in batch["index"].tolist()]
    np.testing.assert_allclose(batch["priority"]["probability"], expected, rtol=1e-9)


def test_a_uniform_part_that_the_batch_cannot_hold_is_not_claimed() -> None:
    reader = Reader(store_of([4]), priorities=replace(PLAIN, uniform=0.2))
    set_all(reader, {(0, 0, t): float(t == 0) for t in range(4)})
    drawn: dict[int, int] = dict.fromkeys(range(4), 0)
    claimed = 0.0
    for _ in range(500):
        batch = reader.sample(2, Windows())
        for t in batch["index"][:, 2].tolist():
            drawn[t] += 1
        claimed = float(batch["priority"]["probability"][batch["index"][:, 2] == 0].min())
    assert abs(drawn[0] / 1000 - claimed) < 0.05


def test_weights_by_the_buffer_count_what_is_only_drawn_uniformly() -> None:
    chosen = replace(PLAIN, uniform=0.5, normalize="buffer")
    reader = Reader(store_of([4]), priorities=chosen)
    reference = Reference(reader, chosen)
    for t, value in enumerate((0.0, 1.0, 2.0, 3.0)):
        set_all(reader, {(0, 0, t): value})
        reference.update([(0, 0, t)], [value])
    check(reference, reader.sample(64, Windows()), Windows(), 1.0)


def short_ones(table: trajstore.EpisodeTable) -> Array:
    return table["length"] < 6


@pytest.mark.parametrize("normalize", ["batch", "buffer"])
@pytest.mark.parametrize("uniform", [0.0, 0.5])
def test_a_filter_leaves_the_others_out_of_the_sum(normalize: Any, uniform: float) -> None:
    chosen = Priorities(alpha=0.7, beta=0.5, uniform=uniform, normalize=normalize)
    store, rng = new_store(), np.random.default_rng(2)
    experience, spec = Experience(store.writer(commit_seconds=None), rng), Windows(length=2, boundary="pad_right")
    experience.write(20)
    experience.writer.commit()
    store.refresh()
    reader = Reader(store, priorities=chosen, seed=1)
    reference = Reference(reader, chosen)
    for _ in range(4):
        check(reference, reader.sample(100, spec, where=short_ones), spec, 0.5, lambda e: e.n < 6)
        random_update(reader, reference, rng, 30)
        check(reference, reader.sample(100, spec, where=short_ones), spec, 0.5, lambda e: e.n < 6)
        experience.write(20)
        experience.writer.commit()
        reader.refresh()
        reference.follow()
    experience.writer.release()


def recent_of(reader: Reader, spec: Windows, n_steps: int | None, n_episodes: int | None) -> set[Handle]:
    """Windows that start within the last steps or episodes, in the order of the index."""
    index, every = reader.assembler.index, windows_of(reader, spec)
    order = list(zip(index.stream.host.tolist(), index.episode.host.tolist(), strict=True))[index.first :]
    by_key = {(e.stream, e.episode): e for e in known_episodes(reader)}
    allowed = set(order[-n_episodes:]) if n_episodes else set(order)
    left, steps_ = sum(e.n for e in by_key.values()) if n_steps is None else n_steps, set()
    for key in reversed(order):
        e = by_key[key]
        steps_ |= {e.handle(p) for p in range(max(0, e.n - left), e.n)}
        # Windows that begin before their episode are recent if all of it is.
        steps_ |= {e.handle(p) for p in range(-20, 0)} if left >= e.n else set()
        left = max(0, left - e.n)
    return {start for start in every if start[:2] in allowed and start in steps_}


@pytest.mark.parametrize("fraction", [1.0, 0.5, 0.0])
@pytest.mark.parametrize("recent", [{"recent_steps": 19}, {"recent_episodes": 4}, {"recent_steps": 999}], ids=named)
@pytest.mark.parametrize(
    "spec", [Windows(), Windows(length=3, boundary="short"), Windows(length=2, boundary="cross")], ids=named
)
def test_recent_windows_have_the_probability_of_their_mixture(
    fraction: float, recent: dict[str, int], spec: Windows
) -> None:
    chosen = Priorities(alpha=0.7, beta=0.5)
    reader = Reader(random_store(3), priorities=chosen, seed=1)
    reference, rng = Reference(reader, chosen), np.random.default_rng(3)
    random_update(reader, reference, rng, 40)
    allowed = recent_of(reader, spec, recent.get("recent_steps"), recent.get("recent_episodes"))
    everywhere = reference.probabilities(spec)
    share = sum(everywhere[start] for start in allowed)
    batch = reader.sample(200, spec, recent_fraction=fraction, **recent)
    expected = [
        fraction * everywhere[s] / share * (s in allowed) + (1 - fraction) * everywhere[s]
        for s in starts_of(batch, spec)
    ]
    assert min(expected) > 0
    np.testing.assert_allclose(batch["priority"]["probability"], expected, rtol=1e-6)
    weights = (min(expected) / np.array(expected)) ** 0.5
    np.testing.assert_allclose(batch["priority"]["weight"], weights, rtol=1e-6)


@pytest.mark.parametrize("over", ["max", "mean", 0.3])
def test_a_window_across_episodes_counts_all_its_steps(over: Any) -> None:
    chosen = replace(PLAIN, over=over)
    reader, spec = Reader(store_of([2, 2]), priorities=chosen), Windows(length=2, boundary="cross")
    set_all(reader, {(0, 0, 0): 1.0, (0, 0, 1): 2.0, (0, 1, 0): 6.0, (0, 1, 1): 1.0})
    eta = {"max": 1.0, "mean": 0.0}.get(over, over)
    pairs = {(0, 0, 0): (1.0, 2.0), (0, 0, 1): (2.0, 6.0), (0, 1, 0): (6.0, 1.0)}
    mass = {start: eta * max(pair) + (1 - eta) * sum(pair) / 2 for start, pair in pairs.items()}
    batch = reader.sample(64, spec)
    expected = [mass[s] / sum(mass.values()) for s in starts_of(batch, spec)]
    np.testing.assert_allclose(batch["priority"]["probability"], expected, rtol=1e-6)


def test_steps_that_are_not_learned_from_do_not_count() -> None:
    store = new_store()
    writer = store.writer(commit_seconds=None)
    for t in range(3):
        writer.append(step(t))  # the last one has no successor
    writer.commit()
    store.refresh()
    reader = Reader(store, priorities=replace(PLAIN, over="max"))
    spec = Windows(length=2, boundary="pad_right", n_step=1)
    set_all(reader, {(0, 0, 0): 1.0, (0, 0, 1): 1.0, (0, 0, 2): 8.0})
    batch = reader.sample(64, spec)
    assert not batch["learn"][batch["index"][:, 2] == 1, 1].any()
    np.testing.assert_allclose(batch["priority"]["probability"], 0.5, rtol=1e-6)
    writer.release()


def test_one_huge_priority_that_is_gone_again_does_not_flatten_the_others() -> None:
    reader = Reader(store_of([8]), priorities=PLAIN)
    set_all(reader, {(0, 0, t): 1.0 + t for t in range(8)})
    reader.sample(2, Windows())
    set_all(reader, {(0, 0, 3): 3e38})
    reader.sample(2, Windows())
    set_all(reader, {(0, 0, 3): 4.0})
    batch = reader.sample(64, Windows())
    expected = (1.0 + batch["index"][:, 2].numpy()) / 36
    np.testing.assert_allclose(batch["priority"]["probability"], expected, rtol=1e-6)


def test_a_power_past_all_numbers_is_refused_and_nothing_changes() -> None:
    reader = Reader(store_of([4]), priorities=replace(PLAIN, alpha=20.0))
    before = drawn_probabilities(reader, Windows())
    with pytest.raises(TrajstoreError):
        set_all(reader, {(0, 0, 0): 1e30})
    assert drawn_probabilities(reader, Windows()) == before


@pytest.mark.parametrize(
    "among", [{}, {"recent_steps": 2}, {"where": lambda table: table["length"] > 3}], ids=["all", "recent", "where"]
)
def test_a_window_longer_than_every_episode_is_an_error(among: dict[str, Any]) -> None:
    reader = Reader(store_of([4, 2]), priorities=PLAIN)
    with pytest.raises(DataError, match="usable steps, so no such window exists; the longest of all has 4"):
        reader.sample(2, Windows(length=64), **among)


@pytest.mark.parametrize("boundary", ["pad_left", "pad_both"])
def test_windows_that_start_before_their_episode_are_not_drawn_by_priority(boundary: Any) -> None:
    reader = Reader(store_of([4]), priorities=PLAIN)
    with pytest.raises(ValueError, match="has no step whose priority"):
        reader.sample(2, Windows(length=2, boundary=boundary))
    assert len(reader.sample(2, Windows(length=2, boundary=boundary), prioritised=False)["index"]) == 2


def drawn_probabilities(reader: Reader, spec: Windows, n: int = 300, **among: Any) -> dict[Handle, float]:
    batch = reader.sample(n, spec, **among)
    return dict(zip(starts_of(batch, spec), batch["priority"]["probability"].tolist(), strict=True))


# ---- draws ----------------------------------------------------------------------------------------------

DRAWN_SPECS = (
    Windows(),
    Windows(length=3, burn_in=1, strict_context=True),
    Windows(length=2, boundary="pad_right", n_step=2),
    Windows(length=4, boundary="short"),
    Windows(length=3, boundary="cross"),
)


def chi_square(drawn: list[Handle], expected: dict[Handle, float]) -> float:
    """In standard deviations from what is expected of a right sampler."""
    counts = {start: 0 for start, p in expected.items() if p > 0}
    for start in drawn:
        counts[start] += 1
    n = np.array([expected[start] for start in counts]) * len(drawn)
    assert n.min() > 5
    freedom = len(n) - 1
    return float((((np.array(list(counts.values())) - n) ** 2 / n).sum() - freedom) / np.sqrt(2 * freedom))


@pytest.mark.parametrize("kind", ["independent", "stratified", "uniform", "torch", "recent"])
@pytest.mark.parametrize("spec", DRAWN_SPECS, ids=named)
def test_draws_have_the_probability_that_they_claim(spec: Windows, kind: str) -> None:
    chosen = Priorities(alpha=0.8, stratified=kind == "stratified", uniform=0.25 * (kind == "uniform"))
    store = random_store(5, 60, 1)
    reader = Reader(store, priorities=chosen, seed=17, compiled=kind != "torch")
    reference, rng = Reference(reader, chosen), np.random.default_rng(5)
    random_update(reader, reference, rng, 60)
    expected, among = reference.probabilities(spec), {"recent_steps": 30} if kind == "recent" else {}
    if kind == "recent":
        allowed = recent_of(reader, spec, 30, None)
        share = sum(expected[s] for s in allowed)
        expected = {s: expected[s] / share for s in allowed}
    drawn: list[Handle] = []
    for _ in range(8):
        drawn += starts_of(reader.sample(2000, spec, **among), spec)
    assert chi_square(drawn, expected) < 4.5  # one number for a fixed seed; mostly between -1 and 1


def test_stratified_draws_take_each_part_of_the_total_once() -> None:
    reader = Reader(store_of([64]), priorities=replace(PLAIN, stratified=True))
    for _ in range(5):
        assert reader.sample(64, Windows())["index"][:, 2].tolist() == list(range(64))


@pytest.mark.parametrize("compiled", [True, False])
def test_what_has_priority_0_is_drawn_only_after_it_got_another(compiled: bool) -> None:
    reader = Reader(store_of([5, 7]), priorities=Priorities(eps=0.5), compiled=compiled)
    set_all(reader, dict.fromkeys([(0, 1, t) for t in range(7)], 0.0))
    for stratified in (False, True):
        reader.set_priorities(stratified=stratified)
        assert {e for _, e, _ in reader.sample(500, Windows())["index"].tolist()} == {0}
    set_all(reader, {(0, 1, 3): 2.0})
    assert {(e, t) for _, e, t in reader.sample(500, Windows())["index"].tolist() if e} == {(1, 3)}


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("among", [{}, {"recent_episodes": 1}, {"where": lambda table: table["episode"] == 1}])
def test_nothing_but_priorities_of_0_is_an_error(among: dict[str, Any], compiled: bool) -> None:
    reader = Reader(store_of([5, 7]), priorities=Priorities(), compiled=compiled)
    n = 0 if not among else 1
    set_all(reader, {(0, e, t): 0.0 for e in range(n, 2) for t in range((5, 7)[e])})
    with pytest.raises(DataError, match=r"windows? that could be drawn ha(s|ve) priority 0"):
        reader.sample(4, Windows(), **among)
    set_all(reader, {(0, 1, 2): 1.0})
    assert reader.sample(4, Windows(), **among)["index"].tolist() == [[0, 1, 2]] * 4


def test_priorities_of_0_in_the_middle_of_windows_count_as_numbers() -> None:
    reader, spec = Reader(store_of([3]), priorities=replace(PLAIN, over="mean")), Windows(length=2)
    set_all(reader, {(0, 0, 0): 0.0, (0, 0, 1): 0.0, (0, 0, 2): 1.0})
    assert set(starts_of(reader.sample(20, spec), spec)) == {(0, 0, 1)}


def grown_reader(chosen: Priorities) -> tuple[Reader, Writer]:
    store = new_store()
    writer = store.writer(commit_seconds=None)
    writer.append_episode(steps(4), terminated=True)
    writer.commit()
    store.refresh()
    reader = Reader(store, priorities=chosen)
    set_all(reader, {(0, 0, 0): 0.5, (0, 0, 1): 5.0})
    set_all(reader, {(0, 0, 1): 2.0})
    writer.append_episode(steps(2), terminated=True)
    writer.commit()
    reader.refresh()
    return reader, writer


@pytest.mark.parametrize(("initial", "first", "later"), [("max", 1.0, 5.0), (0.5, 0.5, 0.5), (0.0, 0.0, 0.0)])
def test_new_steps_get_the_largest_priority_so_far_or_a_given_one(initial: Any, first: float, later: float) -> None:
    reader, writer = grown_reader(replace(PLAIN, initial=initial))
    raw = {(0, 0, 0): 0.5, (0, 0, 1): 2.0, (0, 0, 2): first, (0, 0, 3): first, (0, 1, 0): later, (0, 1, 1): later}
    found = drawn_probabilities(reader, Windows())
    assert set(found) == {start for start, p in raw.items() if p > 0}
    np.testing.assert_allclose([found[s] * sum(raw.values()) for s in found], [raw[s] for s in found], rtol=1e-9)
    writer.close()


def test_the_initial_priority_can_be_changed_for_steps_to_come() -> None:
    reader, writer = grown_reader(PLAIN)
    reader.sample(1, Windows())
    reader.set_priorities(initial=0.0)
    writer.append_episode(steps(3), terminated=True)
    writer.commit()
    reader.refresh()
    assert {e for _, e, _ in drawn_probabilities(reader, Windows())} == {0, 1}
    writer.close()


# ---- following the store --------------------------------------------------------------------------------

FOLLOWED = (
    Windows(),
    Windows(length=3),
    Windows(length=3, burn_in=1, bootstrap=1, strict_context=True),
    Windows(length=3, boundary="pad_right"),
    Windows(length=2, boundary="pad_right", n_step=2),
    Windows(length=5, boundary="short"),
    Windows(length=3, boundary="cross"),
)


def by_window(reader: Reader, spec: Windows) -> dict[Handle, float]:
    """Probabilities of all windows: half of the batch is drawn uniformly, so none is missed for long."""
    n = reader.n_windows(spec)
    found: dict[Handle, float] = {}
    for _ in range(40):
        if len(found) < n:
            found |= drawn_probabilities(reader, spec, 6 * n)
    assert len(found) == n
    return found


@pytest.mark.parametrize(("over", "compiled"), [("start", True), ("start", False), (0.3, True)])
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 1 << 30), rounds=st.lists(st.tuples(*[st.integers(0, 9)] * 4), min_size=1, max_size=6))
def test_a_reader_that_follows_equals_one_made_at_once(
    over: Any, compiled: bool, seed: int, rounds: list[tuple[int, int, int, int]]
) -> None:
    chosen, rng = Priorities(over=over, uniform=0.5, initial=2.0), np.random.default_rng(seed)
    store = new_store()
    writers = [store.writer(f"w{i}", commit_seconds=None) for i in range(2)]
    experiences = [Experience(writer, rng) for writer in writers]
    experiences[0].write(3)
    writers[0].commit()
    reader = Reader(store.refresh(), priorities=chosen, compiled=compiled)
    reference = Reference(reader, chosen)
    spec = FOLLOWED[seed % len(FOLLOWED)]
    marks: dict[str, int] = {}
    for n_first, n_second, n_evicted, n_updates in rounds:
        for experience, n in zip(experiences, (n_first, n_second), strict=True):
            experience.write(n)
            experience.writer.commit()
        snapshot = store.refresh()
        for record in snapshot.streams:
            low = marks.get(record.id, 0)
            marks[record.id] = min(record.rows, low + int(rng.integers(0, n_evicted // 2 + 1)))
        reader.assembler.follow(Evicted(snapshot, marks))
        reference.follow()
        if known_episodes(reader):
            random_update(reader, reference, rng, n_updates) if n_updates else None
        masses = {s: reference.mass(found) for s, found in windows_of(reader, spec).items()}
        if not sum(masses.values()):
            continue
        anew = Reader(Evicted(snapshot, marks), priorities=chosen)
        set_all(anew, {h: reference.values[h] for h in all_steps(anew)})
        expected, found = by_window(anew, spec), by_window(reader, spec)
        assert found.keys() == expected.keys() == masses.keys()
        np.testing.assert_allclose([found[s] for s in expected], list(expected.values()), rtol=1e-9)
    for writer in writers:
        writer.release()


def test_an_episode_that_is_taken_whole_keeps_its_priority_when_its_head_is_evicted() -> None:
    store, spec = store_of([4, 4]), Windows(length=5, boundary="short")
    reader = Reader(store, priorities=PLAIN)
    assert drawn_probabilities(reader, spec) == {(0, 0, 0): 0.5, (0, 1, 0): 0.5}
    reader.assembler.follow(Evicted(store.snapshot, {reader.streams[0]: 1}))
    assert drawn_probabilities(reader, spec) == {(0, 0, 1): 0.5, (0, 1, 0): 0.5}


@pytest.mark.parametrize("boundary", ["pad_right", "short"])
def test_padded_windows_take_in_the_steps_that_come(boundary: Any) -> None:
    store, spec = new_store(), Windows(length=3, boundary=boundary)
    writer = store.writer(commit_seconds=None)
    writer.append_episode(steps(4), terminated=True, env=1)
    for t in range(2):
        writer.append(step(t))
    writer.commit()
    store.refresh()
    chosen = replace(PLAIN, over="mean", initial=1.0)
    reader = Reader(store, priorities=chosen)
    reference = Reference(reader, chosen)
    for t in range(2, 6):
        check(reference, reader.sample(40, spec), spec, 1.0)
        newest = (0, max(e.episode for e in known_episodes(reader)), t - 1)
        set_all(reader, {newest: 2.0**t})
        reference.update([newest], [2.0**t])
        check(reference, reader.sample(40, spec), spec, 1.0)
        writer.append(step(t))
        writer.commit()
        reader.refresh()
        reference.follow()
    writer.release()


def aborted_reader() -> tuple[Reader, Writer, torch.Tensor]:
    """A reader that has drawn from an open episode which is aborted by now, and others that came since."""
    store = new_store()
    writer = store.writer(commit_seconds=None)
    for t in range(3):
        writer.append(step(t))
    writer.append_episode(steps(2), terminated=True, env=1)
    writer.commit()
    store.refresh()
    reader = Reader(store, priorities=PLAIN)
    handles = torch.tensor([[0, 0, t] for t in range(3)])
    reader.update_priorities(handles, torch.ones(3))
    reader.sample(4, Windows())
    writer.abort_episode(0)
    writer.append_episode(steps(5), terminated=True, env=2)
    writer.append(step(0))
    writer.commit()
    reader.refresh()
    return reader, writer, handles


def test_steps_of_an_aborted_episode_are_drawn_no_more() -> None:
    reader, writer, _ = aborted_reader()
    found = drawn_probabilities(reader, Windows())
    assert found.keys() == set(windows_of(reader, Windows()))
    np.testing.assert_allclose(list(found.values()), 1 / 8, rtol=1e-9)
    writer.release()


def test_an_update_to_an_aborted_episode_hits_no_other() -> None:
    reader, writer, handles = aborted_reader()
    assert reader.update_priorities(handles, torch.full((3,), 50.0)) == 3
    np.testing.assert_allclose(list(drawn_probabilities(reader, Windows()).values()), 1 / 8, rtol=1e-9)
    writer.release()


# ---- updates --------------------------------------------------------------------------------------------


def test_updates_may_come_late_and_in_any_order() -> None:
    chosen = Priorities(alpha=1.0, uniform=0.5)
    store = new_store()
    writer, rng = store.writer(commit_seconds=None), np.random.default_rng(4)
    experience, spec = Experience(writer, rng), Windows(length=2)
    experience.write(10)
    writer.commit()
    store.refresh()
    reader = Reader(store, priorities=chosen)
    reference = Reference(reader, chosen)
    waiting: list[torch.Tensor] = []
    for _ in range(12):
        waiting.append(reader.sample(8, spec)["index"])
        experience.write(8)
        writer.commit()
        reader.refresh()
        reference.follow()
        late, values = waiting.pop(int(rng.integers(len(waiting)))), random_priorities(rng, 8)
        assert reader.update_priorities(late, values) == 0
        reference.update([tuple(h) for h in late.tolist()], values.tolist())
        check(reference, reader.sample(100, spec), spec, 0.4)
    writer.release()


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize(("which", "expected"), [("last", (2.0, 1.0)), ("max", (9.0, 3.0))])
def test_of_duplicates_the_last_or_the_largest_counts(which: Any, expected: Any, compiled: bool) -> None:
    reader = Reader(store_of([2]), priorities=replace(PLAIN, duplicates=which), compiled=compiled)
    index = torch.tensor([[0, 0, 0], [0, 0, 1], [0, 0, 0], [0, 0, 1], [0, 0, 0]] * 200)
    values = torch.tensor([9.0, 3.0, 4.0, 1.0, 2.0] * 200)
    reader.sample(2, Windows())
    reader.update_priorities(index, values)
    found = drawn_probabilities(reader, Windows())
    assert found[0, 0, 0] == pytest.approx(expected[0] / sum(expected), rel=1e-9)
    windows = torch.tensor([[0, 0, 0], [0, 0, 0]])
    reader.update_priorities(windows, torch.tensor([[9.0, 1.0], [2.0, 3.0]]))
    expected = (2.0, 3.0) if which == "last" else (9.0, 3.0)
    found = drawn_probabilities(reader, Windows())
    assert found[0, 0, 0] == pytest.approx(expected[0] / sum(expected), rel=1e-9)


def test_updates_to_evicted_steps_are_ignored_counted_and_hit_no_other() -> None:
    store = store_of([4, 6, 5])
    reader = Reader(store, priorities=PLAIN)
    index, stream = torch.tensor(all_steps(reader)), reader.streams[0]
    reader.sample(4, Windows())
    reader.assembler.follow(Evicted(store.snapshot, {stream: 6}))
    values = torch.where((index[:, 1] == 0) | ((index[:, 1] == 1) & (index[:, 2] < 2)), 100.0, 1.0)
    assert reader.update_priorities(index, values) == 6
    np.testing.assert_allclose(list(drawn_probabilities(reader, Windows()).values()), 1 / 9, rtol=1e-9)
    assert reader.priority_stats(Windows())["n_ignored"] == 6
    assert reader.priority_stats(Windows())["largest"] == 1.0
    reader.assembler.follow(Evicted(store.snapshot, {stream: 15}))
    assert reader.update_priorities(index, values) == 15
    with pytest.raises(DataError):
        reader.sample(4, Windows())
    # A reader made only now never saw these episodes, which says no more of the handles than before.
    assert Reader(Evicted(store.snapshot, {stream: 10}), priorities=PLAIN).update_priorities(index, values) == 10


def test_updates_of_windows_count_only_what_was_evicted() -> None:
    store = store_of([4, 3])
    reader, spec = Reader(store, priorities=PLAIN), Windows(length=3, boundary="pad_right")
    assert reader.update_priorities(torch.tensor([[0, 0, 3], [0, 1, 2]]), torch.ones(2, 3), spec) == 0
    reader.assembler.follow(Evicted(store.snapshot, {reader.streams[0]: 2}))
    assert reader.update_priorities(torch.tensor([[0, 0, 0], [0, 0, 1]]), torch.ones(2, 3), spec) == 3
    assert reader.priority_stats(spec)["n_ignored"] == 3


def test_updates_of_windows_go_by_their_stride() -> None:
    reader, spec = Reader(store_of([6]), priorities=PLAIN), Windows(length=3, stride=2)
    reader.update_priorities(torch.tensor([[0, 0, 1]]), torch.tensor([[3.0, 4.0, 5.0]]), spec)
    found = drawn_probabilities(reader, Windows())
    assert {t: round(p * 15, 6) for (_, _, t), p in found.items()} == {0: 1, 1: 3, 2: 1, 3: 4, 4: 1, 5: 5}


GOOD = [[0, 0, 0], [1, 0, 1]]


@pytest.mark.parametrize("is_spread", [False, True])
@pytest.mark.parametrize(
    "bad",
    [[2, 0, 0], [-1, 0, 0], [0, 9, 0], [0, -1, 0], [0, 0, -1], [0, 0, 4], [0, 0, 999], [0, 1 << 62, 0],
     [1 << 62, 0, 0], [0, 0, 1 << 62], [-(1 << 63), 0, 0], [0, 0, -(1 << 63)]],
)  # fmt: skip
def test_an_index_of_no_step_is_refused_and_nothing_changes(bad: list[int], is_spread: bool) -> None:
    reader = Reader(store_of([4, 6, 5, 3], 2), priorities=PLAIN)
    before = drawn_probabilities(reader, Windows())
    priority = torch.full((3, 2), 9.0) if is_spread else torch.full((3,), 9.0)
    with pytest.raises(DataError, match=r"index \[.*\]: this reader has no such step"):
        reader.update_priorities(torch.tensor([*GOOD, bad]), priority)
    assert drawn_probabilities(reader, Windows()) == before
    assert reader.priority_stats(Windows())["n_ignored"] == 0
    assert reader.priority_stats(Windows())["largest"] == 1.0


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), -1.0, -1e-9, 1e300])
def test_a_priority_that_is_none_is_refused_by_its_place_and_nothing_changes(bad: float) -> None:
    reader = Reader(store_of([4, 6, 5, 3], 2), priorities=PLAIN)
    before, index = drawn_probabilities(reader, Windows()), torch.tensor([*GOOD, [0, 0, 1]])
    values = torch.full((3,), 9.0, dtype=torch.float64)
    values[2] = bad
    with pytest.raises(DataError, match=r"priority \[2\]: expected a finite number of at least 0, got"):
        reader.update_priorities(index, values)
    values = torch.full((3, 2), 9.0, dtype=torch.float64)
    values[1, 1] = bad
    with pytest.raises(DataError, match=r"priority \[1, 1\]: expected a finite number of at least 0, got"):
        reader.update_priorities(index, values)
    assert drawn_probabilities(reader, Windows()) == before


@pytest.mark.parametrize(
    ("index", "priority", "match"),
    [
        (torch.zeros(2, 3, dtype=torch.int32), torch.ones(2), r"index: expected int64 of shape \(batch, 3\)"),
        (torch.zeros(2, 2, dtype=torch.int64), torch.ones(2), r"got int64 of shape \(2, 2\)"),
        (torch.zeros(3, dtype=torch.int64), torch.ones(3), r"got int64 of shape \(3,\)"),
        (torch.zeros(2, 3, dtype=torch.int64), torch.ones(3), r"priority: expected shape \(2,\) or \(2, length\)"),
        (torch.zeros(2, 3, dtype=torch.int64), torch.ones(2, 1, 1), r"got \(2, 1, 1\)"),
        (torch.zeros(2, 3, dtype=torch.int64), torch.tensor(1.0), r"got \(\)"),
        (torch.zeros(2, 3, dtype=torch.int64), torch.ones(2, dtype=torch.int64), "expected floating point, got"),
        (torch.zeros(2, 3, dtype=torch.int64), torch.ones(2, dtype=torch.bool), "expected floating point, got"),
        (
            torch.zeros(2, 3, dtype=torch.int64),
            torch.ones(2, 3),
            r"priority: expected shape \(2, 2\), got \(2, 3\)",
        ),
    ],
)
def test_wrong_shapes_and_types_are_refused(index: torch.Tensor, priority: torch.Tensor, match: str) -> None:
    reader = Reader(store_of([4]), priorities=PLAIN)
    with pytest.raises(DataError, match=match):
        reader.update_priorities(index, priority, Windows(length=2))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_priorities_of_any_float_type_and_with_gradients_are_taken(dtype: torch.dtype) -> None:
    reader = Reader(store_of([2]), priorities=PLAIN)
    values = torch.tensor([3.0, 1.0], dtype=dtype, requires_grad=True)
    assert reader.update_priorities(torch.tensor([[0, 0, 0], [0, 0, 1]]), values) == 0
    assert drawn_probabilities(reader, Windows())[0, 0, 0] == pytest.approx(0.75)


def test_an_update_of_nothing_changes_nothing() -> None:
    reader = Reader(store_of([4]), priorities=PLAIN)
    reader.sample(1, Windows())
    assert reader.update_priorities(torch.zeros(0, 3, dtype=torch.int64), torch.zeros(0)) == 0
    assert reader.update_priorities(torch.zeros(0, 3, dtype=torch.int64), torch.zeros(0, 2)) == 0
    assert len(drawn_probabilities(reader, Windows())) == 4


def test_an_update_in_an_empty_store_is_refused() -> None:
    reader = Reader(trajstore.create(f"memory://{uuid.uuid4().hex}"), priorities=PLAIN)
    with pytest.raises(DataError, match="this reader has no such step"):
        reader.update_priorities(torch.zeros(1, 3, dtype=torch.int64), torch.ones(1))


def test_priorities_need_a_reader_that_has_them() -> None:
    reader = Reader(store_of([4]))
    for call in (
        lambda: reader.update_priorities(torch.zeros(1, 3, dtype=torch.int64), torch.ones(1)),
        lambda: reader.set_priorities(alpha=1.0),
        lambda: reader.priority_stats(Windows()),
    ):
        with pytest.raises(ValueError, match="this reader has no priorities"):
            call()
    assert "priority" not in reader.sample(2, Windows())


def test_a_reader_with_priorities_can_draw_uniformly() -> None:
    reader = Reader(store_of([8]), priorities=PLAIN)
    set_all(reader, {(0, 0, t): float(t == 0) for t in range(8)})
    batch = reader.sample(300, Windows(), prioritised=False)
    assert "priority" not in batch
    assert len(set(batch["index"][:, 2].tolist())) == 8
    with pytest.raises(ValueError, match="weight='episode': priorities decide which windows are drawn"):
        reader.sample(4, Windows(weight="episode"))


@pytest.mark.parametrize(
    ("bad", "match"),
    [
        ({"alpha": -1.0}, "alpha"), ({"alpha": float("nan")}, "alpha"), ({"alpha": float("inf")}, "alpha"),
        ({"beta": -0.1}, "beta"), ({"eps": -1e-9}, "eps"), ({"uniform": 1.1}, "uniform"),
        ({"initial": "min"}, "initial"), ({"initial": -1.0}, "initial"), ({"over": "sum"}, "over"),
        ({"over": 1.5}, "over"), ({"normalize": "all"}, "normalize"), ({"duplicates": "first"}, "duplicates"),
        ({"kind": "ranked"}, "kind"), ({"rank_every": 0}, "rank_every"), ({"alpha": True}, "alpha"),
    ],
)  # fmt: skip
def test_bad_options_are_refused(bad: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        Priorities(**bad)
    reader = Reader(store_of([4]), priorities=PLAIN)
    before = drawn_probabilities(reader, Windows())
    with pytest.raises(ValueError, match=match):
        reader.set_priorities(**bad)
    assert drawn_probabilities(reader, Windows()) == before


@pytest.mark.usefixtures("lock_order")
def test_updates_from_another_thread_while_sampling() -> None:
    store = random_store(6, 60)
    reader = Reader(store, priorities=PLAIN)
    everything = torch.tensor(all_steps(reader))
    stop, errors = threading.Event(), []

    def update() -> None:
        rng = np.random.default_rng(7)
        try:
            while not stop.is_set():
                chosen = everything[torch.from_numpy(rng.integers(0, len(everything), 32))]
                reader.update_priorities(chosen, torch.from_numpy(rng.uniform(0.1, 3.0, 32)))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=update) for _ in range(2)]
    for thread in threads:
        thread.start()
    specs_ = (Windows(), Windows(length=2, boundary="pad_right"))
    for i in range(150):
        batch = reader.sample(32, specs_[i % 2])
        assert (batch["priority"]["probability"] > 0).all()
    stop.set()
    for thread in threads:
        thread.join(120)
    assert not errors
    set_all(reader, dict.fromkeys(map(tuple, everything.tolist()), 2.0))
    found = drawn_probabilities(reader, Windows(), 2000)
    np.testing.assert_allclose(list(found.values()), 1 / len(everything), rtol=1e-9)


# ---- options that change --------------------------------------------------------------------------------


def test_a_changed_alpha_counts_for_all_windows() -> None:
    reader = Reader(random_store(8), priorities=Priorities(alpha=0.6))
    reference, rng = Reference(reader, Priorities(alpha=0.6)), np.random.default_rng(8)
    random_update(reader, reference, rng, 40)
    for alpha in (0.6, 1.5, 0.0, 1.0):
        reader.set_priorities(alpha=alpha, beta=0.7)
        reference.options = replace(reference.options, alpha=alpha)
        random_update(reader, reference, rng, 5)
        for spec in DRAWN_SPECS[:4]:
            check(reference, reader.sample(64, spec), spec, 0.7)


def test_other_options_count_from_the_next_batch_on() -> None:
    reader = Reader(random_store(8), priorities=PLAIN)
    reference, rng, spec = Reference(reader, PLAIN), np.random.default_rng(8), Windows(length=3)
    random_update(reader, reference, rng, 40)
    for change in ({"over": "mean"}, {"normalize": "buffer"}, {"eps": 0.5}, {"beta": 0.3}, {"uniform": 0.5}):
        reader.set_priorities(**change)
        reference.options = replace(reference.options, **change)
        check(reference, reader.sample(64, spec), spec, reference.options.beta_at(0))
    reader.set_priorities(duplicates="max")
    handle = reader.sample(1, spec)["index"]
    reader.update_priorities(handle.repeat(2, 1), torch.tensor([4.0, 1.0]))
    reference.update([tuple(handle[0].tolist())], [4.0])
    check(reference, reader.sample(64, spec), spec, 0.3)


def test_uses_are_limited_from_the_moment_that_a_limit_is_set() -> None:
    reader = Reader(store_of([10]), priorities=Priorities(alpha=0.0))
    reader.sample(30, Windows())  # before the limit: not counted
    reader.set_priorities(max_uses=2)
    index = torch.cat([reader.sample(10, Windows())["index"] for _ in range(2)])
    assert sorted(index[:, 2].tolist()) == sorted([*range(10), *range(10)])
    with pytest.raises(DataError, match="drawn as often as allowed"):
        reader.sample(1, Windows())


def test_a_schedule_goes_by_the_batches_so_far() -> None:
    schedule = Linear(0.0, 1.0, 4)
    assert [schedule(n) for n in (0, 1, 4, 9)] == [0.0, 0.25, 1.0, 1.0]
    chosen = replace(PLAIN, beta=schedule)
    reader = Reader(random_store(9), priorities=chosen)
    reference, rng = Reference(reader, chosen), np.random.default_rng(9)
    random_update(reader, reference, rng, 40)
    for n in range(7):
        check(reference, reader.sample(64, Windows()), Windows(), schedule(n))
    reader.set_priorities(beta=lambda n: -1.0)
    with pytest.raises(ValueError, match="beta"):
        reader.sample(4, Windows())


def ranked(values: dict[Handle, float], alpha: float) -> dict[Handle, float]:
    order = sorted((h for h, v in values.items() if v > 0), key=lambda h: -values[h])
    masses = {handle: (1 / (i + 1)) ** alpha for i, handle in enumerate(order)}
    return {handle: m / sum(masses.values()) for handle, m in masses.items()}


@pytest.mark.parametrize("compiled", [True, False])
def test_ranks_decide_once_they_are_taken_anew(compiled: bool) -> None:
    chosen = Priorities(kind="rank", alpha=0.7, rank_every=3)
    reader = Reader(store_of([9, 4, 6], 2), priorities=chosen, seed=2, compiled=compiled)
    handles, rng = all_steps(reader), np.random.default_rng(2)
    for _ in range(3):
        values = dict(zip(handles, (rng.permutation(len(handles)) / 2.0).tolist(), strict=True))  # one is 0
        set_all(reader, values)
        for _ in range(3):
            reader.sample(1, Windows())
        batch = reader.sample(3000, Windows())
        expected, drawn = ranked(values, 0.7), starts_of(batch, Windows())
        np.testing.assert_allclose(batch["priority"]["probability"], [expected[s] for s in drawn], rtol=1e-6)
        assert chi_square(drawn, expected) < 4.5
        reader.sample(1, Windows())
        reader.sample(1, Windows())


def test_ranks_are_not_taken_by_rows_that_no_window_starts_at() -> None:
    store = new_store()
    with store.writer(commit_seconds=None) as writer:
        for n in (3, 4, 2):
            data = steps(n) | {"obs": np.zeros((n + 1, 2), np.float32)}
            writer.append_episode(data, terminated=True)
    store.refresh()
    reader = Reader(store, priorities=Priorities(kind="rank", alpha=1.0))
    reader.assembler.follow(Evicted(store.snapshot, {reader.streams[0]: 4}))
    values = {h: 0.1 + 0.05 * i for i, h in enumerate(all_steps(reader))}  # below the initial 1 of all other rows
    set_all(reader, values)
    found, expected = drawn_probabilities(reader, Windows(), 1000), ranked(values, 1.0)
    assert found == pytest.approx(expected, rel=1e-6)


# ---- resuming, prefetching, both paths ------------------------------------------------------------------


@pytest.mark.parametrize("chosen", [PLAIN, Priorities(beta=Linear(0, 1, 9)), Priorities(kind="rank", rank_every=3)])
def test_a_reader_that_resumes_draws_the_same(chosen: Priorities) -> None:
    store, rng = random_store(10), np.random.default_rng(10)
    reader, spec = Reader(store, priorities=chosen, seed=5), Windows(length=2, n_step=(1, 3))
    reference = Reference(reader, chosen)
    for _ in range(5):
        random_update(reader, reference, rng, 20)
        reader.sample(8, spec)
    set_all(reader, {all_steps(reader)[0]: 60.0})
    set_all(reader, {all_steps(reader)[0]: 3.0})
    reader.sample(8, spec)
    with store.writer("saved", commit_seconds=None) as writer:
        reader.save_priorities(writer)
    state = copy.deepcopy(reader.state_dict())
    again = Reader(trajstore.open(store.url), priorities=chosen, seed=99)
    again.load_state_dict(state)
    for i in range(10):
        expected, got = reader.sample(8, spec), again.sample(8, spec)
        assert_same(expected, got)
        for one in (reader, again):
            one.update_priorities(expected["index"], torch.linspace(0.1, 4 + i, 8))


def assert_same(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert a.keys() == b.keys()
    for key in a:
        if isinstance(a[key], dict):
            assert_same(a[key], b[key])
        else:
            assert torch.equal(a[key], b[key]), key


@pytest.mark.parametrize("prefetch", [0, 2])
def test_batches_prepared_ahead_are_the_same(prefetch: int) -> None:
    store, spec = random_store(11), Windows(length=3, boundary="pad_right")
    chosen = Priorities(beta=Linear(0, 1, 9))
    plain, ahead = (Reader(store, priorities=chosen, seed=5) for _ in range(2))
    reference, rng = Reference(plain, chosen), np.random.default_rng(11)
    random_update(plain, reference, rng, 30)
    set_all(ahead, {h: reference.values[h] for h in all_steps(ahead)})
    first = plain.batches(8, spec)
    with ahead.batches(8, spec, prefetch=prefetch, out=Ring(prefetch + 2)) as second:
        for n in range(6):
            a, b = next(first), next(second)
            assert_same(a, b)
            check(reference, a, spec, n / 9)
        state = copy.deepcopy(second.state_dict())
        expected = [copy.deepcopy(next(second)) for _ in range(4)]
    other = Reader(store, priorities=chosen, seed=77)
    set_all(other, {h: reference.values[h] for h in all_steps(other)})
    with other.batches(8, spec, prefetch=1) as resumed:
        resumed.load_state_dict(state)
        for batch in expected:
            assert_same(batch, next(resumed))


def test_batches_go_into_memory_that_is_given() -> None:
    reader = Reader(random_store(12), priorities=PLAIN)
    for spec in (Windows(length=2), Windows.transitions()):
        out = reader.sample(8, spec)
        again = reader.sample(8, spec, out=out)
        assert again["priority"]["weight"].data_ptr() == out["priority"]["weight"].data_ptr()
        assert again["priority"]["weight"].shape == again["priority"]["probability"].shape == (8,)


@pytest.mark.parametrize("spec", DRAWN_SPECS, ids=named)
@pytest.mark.parametrize(
    "chosen",
    [
        Priorities(), Priorities(stratified=True, over="mean", normalize="buffer"), Priorities(uniform=0.3),
        Priorities(kind="rank", rank_every=2), Priorities(over=0.3, duplicates="max"),
    ],
    ids=named,
)  # fmt: skip
def test_compiled_loops_and_tensor_operations_give_the_same(spec: Windows, chosen: Priorities) -> None:
    store = new_store()
    writer, rng = store.writer(commit_seconds=None), np.random.default_rng(13)
    experience = Experience(writer, rng)
    readers: list[Reader] = []
    for among in ({}, {"recent_steps": 12}, {"where": short_ones}, {}):
        experience.write(30)
        writer.commit()
        store.refresh()
        readers = readers or [Reader(store, priorities=chosen, seed=3, compiled=c) for c in (True, False)]
        for reader in readers:
            reader.refresh()
        one, other = (reader.sample(32, spec, **among) for reader in readers)
        assert_same(one, other)
        values = random_priorities(rng, 32, spec.length) if len(among) else random_priorities(rng, 32)
        assert len({reader.update_priorities(one["index"], values, spec) for reader in readers}) == 1
    writer.release()


# ---- statistics -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", DRAWN_SPECS, ids=named)
def test_statistics_are_those_of_the_windows(spec: Windows) -> None:
    reader = Reader(random_store(14), priorities=PLAIN)
    reference, rng = Reference(reader, PLAIN), np.random.default_rng(14)
    random_update(reader, reference, rng, 50)
    stats = reader.priority_stats(spec, n_bins=5)
    every = reference.probabilities(spec)
    starts = [reference.values[found[0]] for found in windows_of(reader, spec).values()]
    assert stats["n_windows"] == len(every) == reader.n_windows(spec)
    assert (stats["min"], stats["max"]) == pytest.approx((min(starts), max(starts)))
    assert stats["mean"] == pytest.approx(np.mean(starts))
    assert stats["effective_sample_size"] == pytest.approx(1 / sum(p**2 for p in every.values()), rel=1e-6)
    assert len(stats["mass_by_age"]) == 5
    assert sum(stats["mass_by_age"]) == pytest.approx(1.0, rel=1e-6)


def test_mass_by_age_goes_from_old_to_new() -> None:
    reader = Reader(store_of([10]), priorities=PLAIN)
    set_all(reader, {(0, 0, t): float(t >= 8) for t in range(10)})
    assert reader.priority_stats(Windows(), n_bins=5)["mass_by_age"] == pytest.approx([0, 0, 0, 0, 1])


# ---- saving ---------------------------------------------------------------------------------------------


def raw_by_row(reader: Reader) -> dict[tuple[str, int], float]:
    """Raw priorities by stream and row of all steps, also of those that no window starts at."""
    reader.priority_stats(Windows())  # catches up
    table, found = reader.priority_sampler.priority_column, {}  # type: ignore[union-attr]
    for name, number in reader.assembler.index.numbers.items():
        rows, address = table.steps.rows_of(number + 1)
        values = table.get(address)
        found |= {(name, int(row)): value.tobytes() for row, value in zip(rows, values, strict=True)}
    return found


def reopened(store: Store, chosen: Priorities = PLAIN, **kwargs: Any) -> Reader:
    return Reader(trajstore.open(store.url, **kwargs), priorities=chosen)


def test_priorities_are_bit_equal_after_a_reopening(place: Place) -> None:
    store = trajstore.create(place.url, schema((4, 4, 4)), **place.kwargs)
    rng, writers = np.random.default_rng(15), [store.writer(f"w{i}", commit_seconds=None) for i in range(2)]
    for writer in writers:
        Experience(writer, rng).write(40)
        writer.commit()
    store.refresh()
    reader = Reader(store, priorities=PLAIN)
    reference = Reference(reader, PLAIN)
    random_update(reader, reference, rng, 40)
    set_all(reader, dict.fromkeys(all_steps(reader)[:3], 0.0))
    assert reader.save_priorities(writers[0]) == sum(record.rows for record in store.streams)
    writers[0].commit()
    again = Reader(trajstore.open(place.url, **place.kwargs), priorities=PLAIN)
    assert raw_by_row(again) == raw_by_row(reader)
    for writer in writers:
        writer.release()


@pytest.mark.parametrize("kind", ["memory", "local"])
def test_many_rounds_of_changes_survive(new_place: Callable[[str], Place], kind: str) -> None:
    store, rng = new_store(new_place(kind).url), np.random.default_rng(16)
    writers = [store.writer(f"w{i}", commit_seconds=None) for i in range(2)]
    experiences = [Experience(writer, rng) for writer in writers]
    for experience in experiences:
        experience.write(100)
        experience.writer.commit()
    store.refresh()
    reader = Reader(store, priorities=PLAIN)
    reference, handed = Reference(reader, PLAIN), []
    for i in range(30):
        random_update(reader, reference, rng, 8)
        if i % 3 == 0:
            experiences[i % 2].write(5)
            experiences[i % 2].writer.commit()
            reader.refresh()
            reference.follow()
        handed.append(reader.save_priorities(writers[0]))
        writers[0].commit()
        assert raw_by_row(reopened(store)) == raw_by_row(reader)
    n_rows = sum(record.rows for record in store.refresh().streams)
    assert handed[0] >= 200
    assert sorted(handed)[15] <= 8  # most of the time what has changed and no more
    assert sum(handed[1:]) < 6 * n_rows
    record = next(r for r in store.streams if r.id == writers[0].stream)
    generations = {state["priority"].generation for state in record.columns.values()}
    assert max(generations) >= 1
    for writer in writers:
        writer.release()


def test_generations_take_turns_in_two_places_and_plain_zarr_walks_them(tmp_path: Path) -> None:
    store = store_of([20], url=str(tmp_path / "s"))
    reader, writer = Reader(store, priorities=PLAIN), store.writer("p", commit_seconds=None)
    for i in range(6):
        set_all(reader, {(0, 0, t): 1.0 + i + t for t in range(20)})
        assert reader.save_priorities(writer) == 20
        writer.commit()
    column = tmp_path / "s" / "streams" / writer.stream / "columns" / reader.streams[0] / "priority"
    left = {int(path.relative_to(column).parts[0]) for path in column.rglob("*/*") if path.is_file()}
    assert left == {0, 1}
    for _ in range(2):
        root = zarr.open_group(tmp_path / "s", mode="r")
        nodes = dict(root.members(max_depth=None))
        values = nodes[f"streams/{writer.stream}/columns/{reader.streams[0]}/priority/0/values"]
        assert values[...].tolist() == [6.0 + t for t in range(20)]  # type: ignore[index, union-attr]
        writer.close()


def test_the_newest_session_wins() -> None:
    store = store_of([6])
    for i in range(3):
        reader = reopened(store)
        set_all(reader, {(0, 0, t): 10.0 * (i + 1) + t for t in range(6 - i)})
        with store.writer(f"session{i}", commit_seconds=None) as writer:
            assert reader.save_priorities(writer) == 6
        assert raw_by_row(reopened(store)) == raw_by_row(reader)
    found = [np.frombuffer(v, np.float32)[0] for v in raw_by_row(reopened(store)).values()]
    assert found == [30.0, 31.0, 32.0, 33.0, 24.0, 15.0]


def test_rows_that_came_after_the_last_save_are_new() -> None:
    store = new_store()
    writer = store.writer(commit_seconds=None)
    writer.append_episode(steps(4), terminated=True)
    writer.commit()
    store.refresh()
    reader = Reader(store, priorities=PLAIN)
    set_all(reader, {(0, 0, 0): 7.0, (0, 0, 1): 0.0})
    reader.save_priorities(writer)
    writer.append_episode(steps(2), terminated=True)
    writer.commit()
    with store.writer("other", commit_seconds=None) as other:
        other.append_episode(steps(1), terminated=True)
    found = [np.frombuffer(v, np.float32)[0] for v in raw_by_row(reopened(store)).values()]
    assert found == [7.0, 0.0, 1.0, 1.0, 7.0, 7.0, 7.0]
    writer.release()


def test_saving_again_writes_what_has_changed() -> None:
    store = store_of([500])
    reader, writer = Reader(store, priorities=PLAIN), store.writer("p", commit_seconds=None)
    assert reader.save_priorities(writer) == 500
    writer.commit()
    assert reader.save_priorities(writer) == 0
    set_all(reader, {(0, 0, t): 2.0 for t in range(10)})
    set_all(reader, {(0, 0, t): 3.0 for t in range(5, 12)})
    assert reader.save_priorities(writer) == 12
    writer.commit()
    assert raw_by_row(reopened(store)) == raw_by_row(reader)
    set_all(reader, {(0, 0, t): 4.0 for t in range(240)})
    assert reader.save_priorities(writer) == 500  # with those before more than half
    writer.close()
    assert raw_by_row(reopened(store)) == raw_by_row(reader)


def test_what_a_failed_save_took_is_saved_by_the_next(tmp_path: Path) -> None:
    plan = FailWhile()
    with through(FaultyStorage(real_storage(str(tmp_path / "s")), plan)):
        store = store_of([40, 30], 2, url=str(tmp_path / "s"))
    reader, writer = Reader(store, priorities=PLAIN), store.writer("p", commit_seconds=None)
    reader.save_priorities(writer)
    writer.commit()
    set_all(reader, {(0, 0, 0): 2.0, (1, 0, 0): 3.0})
    reader.save_priorities(writer)
    plan.error = broken
    with pytest.raises(StorageError):
        writer.commit()
    set_all(reader, {(0, 0, 1): 4.0, (1, 0, 1): 5.0})
    plan.error = None
    try:
        reader.save_priorities(writer)
    except StorageError:  # of the commit before
        reader.save_priorities(writer)
    writer.commit()
    assert raw_by_row(reopened(store)) == raw_by_row(reader)
    writer.close()


def test_what_a_closed_writer_refused_is_saved_by_the_next() -> None:
    store = store_of([40, 30], 2)
    reader, writer = Reader(store, priorities=PLAIN), store.writer("p", commit_seconds=None)
    reader.save_priorities(writer)
    writer.close()
    set_all(reader, {(0, 0, 0): 2.0, (1, 0, 0): 3.0})
    with pytest.raises(trajstore.ClosedError):
        reader.save_priorities(writer)
    with store.writer("q", commit_seconds=None) as other:
        reader.save_priorities(other)
    assert raw_by_row(reopened(store)) == raw_by_row(reader)


def test_saving_what_is_left_after_an_eviction() -> None:
    store = store_of([40, 30])
    reader, writer = Reader(store, priorities=PLAIN), store.writer("p", commit_seconds=None)
    set_all(reader, {handle: 1.5 + i for i, handle in enumerate(all_steps(reader))})
    seen = Evicted(store.snapshot, {reader.streams[0]: 45})
    reader.assembler.follow(seen)
    assert reader.save_priorities(writer) == 25
    writer.commit()
    set_all(reader, {(0, 1, 20): 9.0})
    assert reader.save_priorities(writer) == 1
    writer.close()
    again = Reader(Evicted(store.refresh(), {reader.streams[0]: 45}), priorities=PLAIN)
    assert drawn_probabilities(again, Windows(), 2000) == drawn_probabilities(reader, Windows(), 2000)


def test_a_snapshot_between_two_commits_shows_what_it_can() -> None:
    """Records are read one after the other: priorities may be newer than the rows they are of."""
    store = new_store()
    writer, saver = store.writer("a", commit_seconds=None), store.writer("b", commit_seconds=None)
    writer.append_episode(steps(4), terminated=True)
    writer.commit()
    old = store.refresh()
    writer.append_episode(steps(3), terminated=True)
    writer.commit()
    store.refresh()
    reader = Reader(store, priorities=PLAIN)
    set_all(reader, {(0, 0, t): 2.0 + t for t in range(4)})
    for n in (7, 1):  # a generation, then a change of a row that the old record does not have
        assert reader.save_priorities(saver) == n
        saver.commit()
        new = store.refresh()
        streams = {writer.stream: old._streams[writer.stream], saver.stream: new._streams[saver.stream]}
        mixed = Reader(Snapshot(new.storage, new.schema, streams), priorities=PLAIN)
        assert {t: p * 14 for (_, _, t), p in drawn_probabilities(mixed, Windows()).items()} == pytest.approx(
            {0: 2.0, 1: 3.0, 2: 4.0, 3: 5.0}
        )
        set_all(reader, {(0, 1, 2): 9.0})
    writer.close()
    saver.close()


def test_a_refresh_reads_saved_priorities_of_new_streams_alone(tmp_path: Path) -> None:
    url = str(tmp_path / "s")
    store_of([50], url=url)
    storage = FaultyStorage(real_storage(url))
    with through(storage):
        store = trajstore.open(url)
    reader, writer = Reader(store, priorities=PLAIN), store.writer("p", commit_seconds=None)
    reader.save_priorities(writer)
    writer.commit()
    for _ in range(3):
        writer.append_episode(steps(2), terminated=True)
        writer.commit()
        reader.refresh()
        reader.sample(2, Windows(fields=("action",)))
    assert storage.n_calls("get", "/columns/") == 0
    writer.close()


# ---- faults ---------------------------------------------------------------------------------------------


class SavingLife:
    """A writer that appends and saves priorities in turns, on a storage with faults."""

    def __init__(self, place: Place, plan: Plan) -> None:
        self.place = place
        self.storage = FaultyStorage(real_storage(place.url, place.options), plan)
        self.saved: list[dict[int, bytes]] = [{}]  # what each commit made durable, by row
        self.n_commits = 0
        self.n_failed = 0
        self.writer: Writer | None = None

    def run(self, n_tries: int = 1) -> None:
        with through(self.storage):
            store = trajstore.create(self.place.url, schema((4, 4, 4)), fsync=False, exist_ok=True)
        writer = self.writer = store.writer("life", commit_seconds=None)
        reader: Reader | None = None
        for i in range(5):
            writer.append_episode(steps(4), terminated=True)
            durable = self.saved[-1]
            if reader is not None:
                n = 2 if i == 2 else 4 * i
                set_all(reader, {(0, e, t): 10.0 * i + e + t / 8 for e in range(i) for t in range(4)[:n]})
                reader.save_priorities(writer)
                durable = {row: value for (_, row), value in raw_by_row(reader).items()}
            self._commit(n_tries, durable)
            store.refresh()
            reader = reader or Reader(store, priorities=replace(PLAIN, initial=0.5))
            reader.refresh()

    def _commit(self, n_tries: int, durable: dict[int, bytes]) -> None:
        self.saved.append(durable)
        for left in reversed(range(n_tries)):
            try:
                self.writer.commit()  # type: ignore[union-attr]
            except StorageError:
                self.n_failed += 1
                if not left:
                    raise
            else:
                break
        self.n_commits += 1

    def found(self) -> dict[int, bytes]:
        store = trajstore.open(self.place.url, fsync=False)
        columns = store.snapshot.columns.read("priority")
        if not columns:
            return {}
        ((first, values),) = columns.values()
        return {first + i: value.tobytes() for i, value in enumerate(values)}

    def n_rows(self) -> int:
        return sum(record.rows for record in trajstore.open(self.place.url).streams)


@pytest.fixture(scope="module")
def n_saving_calls() -> int:
    life = SavingLife(Place(f"memory://{uuid.uuid4().hex}", {}), Plan())
    life.run()
    life.writer.release()  # type: ignore[union-attr]
    assert life.found() == life.saved[-1]
    return len(life.storage.calls)


@pytest.mark.parametrize("is_after", [False, True], ids=["before", "after"])
def test_a_death_at_any_call_leaves_the_priorities_of_one_commit(n_saving_calls: int, is_after: bool) -> None:
    for at in range(1, n_saving_calls + 1):
        life = SavingLife(Place(f"memory://{uuid.uuid4().hex}", {}), DieAt(at, is_after))
        with pytest.raises(Died):
            life.run()
        if life.writer is None:
            continue
        life.writer.release()
        assert life.found() in life.saved[life.n_commits : life.n_commits + 2], life.storage.calls[at - 1]


@pytest.mark.parametrize("is_after", [False, True], ids=["error", "lost_answer"])
def test_an_error_at_any_call_while_saving_is_made_good_by_the_next_try(
    n_saving_calls: int, is_after: bool
) -> None:
    for at in range(3, n_saving_calls + 1):
        life = SavingLife(Place(f"memory://{uuid.uuid4().hex}", {}), FailOnce(at, is_after, broken))
        try:
            life.run(n_tries=2)
        except StorageError:
            assert life.writer is None or life.storage.calls[at - 1].action in ("get", "list_names", "get_range")
        else:
            assert (life.found() == life.saved[-1], life.n_rows()) == (True, 20), life.storage.calls[at - 1]
        if life.writer is not None:
            life.writer.release()


# ---- records made to harm -------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, str, str]:
    """A store with saved priorities and changes to them: its place, the stream they are of, the one they are in."""
    root = tmp_path / "s"
    store = store_of([9, 8], url=str(root))
    reader, writer = Reader(store, priorities=PLAIN), store.writer("p", commit_seconds=None)
    reader.save_priorities(writer)
    writer.commit()
    set_all(reader, {(0, 0, 1): 3.0, (0, 1, 1): 4.0})
    reader.save_priorities(writer)
    writer.close()
    return root, reader.streams[0], writer.stream


def state_in(record: Any, target: str) -> Any:
    return record["attributes"]["trajstore"]["columns"][target]["priority"]


def array_in(record: Any, target: str, name: str) -> Any:
    place = state_in(record, target)["generation"] % 2
    return nodes_of(record)[f"columns/{target}/priority/{place}/{name}"]


def claim_stop(record: Any, target: str) -> None:
    state_in(record, target)["stop"] = 1 << 40
    array_in(record, target, "values")["shape"][0] = 1 << 40


def claim_deltas(record: Any, target: str) -> None:
    state_in(record, target)["deltas"] = 1 << 40
    for name in ("delta_rows", "delta_values"):
        array_in(record, target, name)["shape"][0] = 1 << 40


def claim_first(record: Any, target: str) -> None:
    state_in(record, target).update(first=1 << 40, stop=(1 << 40) + 17)


def claim_no_deltas_and_first(record: Any, target: str) -> None:
    claim_first(record, target)
    state_in(record, target)["deltas"] = 0
    for name in ("delta_rows", "delta_values"):
        array_in(record, target, name)["shape"][0] = 0


def claim_length_only(record: Any, target: str) -> None:
    state_in(record, target)["stop"] = 1 << 40


def claim_order(record: Any, target: str) -> None:
    state_in(record, target).update(first=9, stop=3)


def claim_dtype(record: Any, target: str) -> None:
    state_in(record, target)["dtype"] = "float64"


def claim_name(record: Any, target: str) -> None:
    columns = record["attributes"]["trajstore"]["columns"][target]
    columns["../../x"] = columns.pop("priority")


def claim_target(record: Any, target: str) -> None:
    columns = record["attributes"]["trajstore"]["columns"]
    columns["../../x"] = columns.pop(target)


def claim_shape(record: Any, target: str) -> None:
    state_in(record, target)["shape"] = [1 << 40, 1 << 20]


def claim_negative(record: Any, target: str) -> None:
    state_in(record, target)["deltas"] = -1


CLAIMS = (
    claim_stop, claim_deltas, claim_first, claim_no_deltas_and_first, claim_length_only, claim_order, claim_dtype,
    claim_name, claim_target, claim_shape, claim_negative,
)  # fmt: skip


def assert_refused(root: Path) -> None:
    tracemalloc.start()
    try:
        with pytest.raises((FormatError, CorruptionError)):
            Reader(trajstore.open(root), priorities=PLAIN).sample(2, Windows())
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("claim", CLAIMS)
def test_absurd_columns_are_refused_and_allocate_nothing(
    saved: tuple[Path, str, str], claim: Callable[[Any, str], None]
) -> None:
    root, target, stream = saved
    edit_json(root / "streams" / stream / "zarr.json", lambda record: claim(record, target))
    assert_refused(root)


def put_by_hand(store: Store, target: str, values: Array, **kwargs: Any) -> None:
    writer = store.writer("hand", commit_seconds=None)
    writer._pipeline.put_column(
        trajstore.writing.commit_batch.DerivedColumnChange(target, "priority", values, **kwargs)
    )
    writer.commit()
    writer.release()


@pytest.mark.parametrize(
    "values",
    [
        np.array([1, np.nan, 2], np.float32), np.array([1, np.inf], np.float32), np.array([1, -1], np.float32),
        np.ones((3, 2), np.float32), np.ones(3, np.int64), np.ones(3, np.float64), np.ones(18, np.float32),
        np.ones(5000, np.float32),
    ],
    ids=lambda v: f"{v.dtype}{v.shape}{v.flat[-1]}",
)  # fmt: skip
def test_stored_values_that_are_no_priorities_are_refused(tmp_path: Path, values: Array) -> None:
    store = store_of([9, 8], url=str(tmp_path / "s"))
    put_by_hand(store, store.streams[0].id, values)
    assert_refused(tmp_path / "s")


@pytest.mark.parametrize("rows", [[-1], [17], [1 << 40], [0, 1 << 62]])
def test_changes_of_rows_that_do_not_exist_are_refused(tmp_path: Path, rows: list[int]) -> None:
    store = store_of([9, 8], url=str(tmp_path / "s"))
    writer, target = store.writer("hand", commit_seconds=None), store.streams[0].id
    change = trajstore.writing.commit_batch.DerivedColumnChange
    writer._pipeline.put_column(change(target, "priority", np.ones(17, np.float32)))
    values = np.ones(len(rows), np.float32)
    writer._pipeline.put_column(change(target, "priority", values, rows=np.array(rows)))
    writer.commit()
    writer.release()
    assert_refused(tmp_path / "s")


def paths(tree: Any, prefix: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    for key, value in tree.items() if isinstance(tree, dict) else ():
        yield (*prefix, key)
        yield from paths(value, (*prefix, key))


def test_any_change_to_the_state_of_columns_is_refused_or_harmless(saved: tuple[Path, str, str]) -> None:
    root, _, stream = saved
    file = root / "streams" / stream / "zarr.json"
    good = file.read_bytes()
    columns = json.loads(good)["attributes"]["trajstore"]["columns"]
    for path in paths(columns):
        for value in (None, True, -1, 1, 1 << 40, 1 << 63, 1.5, "x", "..", [], [1 << 40], {}, {"..": {}}):

            def edit(record: Any, path: tuple[Any, ...] = path, value: Any = value) -> None:
                place = record["attributes"]["trajstore"]["columns"]
                for key in path[:-1]:
                    place = place[key]
                place[path[-1]] = value

            file.write_bytes(good)
            edit_json(file, edit)
            with contextlib.suppress(TrajstoreError):
                Reader(trajstore.open(root), priorities=PLAIN).sample(2, Windows())


def test_a_resumed_reader_draws_the_same_though_ranges_moved() -> None:
    store = new_store()
    writers = [store.writer(f"w{i}", commit_seconds=None) for i in range(3)]
    for writer in writers:
        writer.append_episode(steps(5), terminated=True)
        writer.commit()
    store.refresh()
    reader, spec = Reader(store, priorities=PLAIN, seed=3), Windows()
    reader.sample(4, spec)
    writers[0].append_episode(steps(3000), terminated=True)  # outgrows its range, which moves behind the others
    writers[0].commit()
    reader.refresh()
    batch = reader.sample(64, spec)
    reader.update_priorities(batch["index"], torch.rand(64))
    reader.save_priorities(writers[1])
    writers[1].commit()
    state = reader.state_dict()
    expected = [reader.sample(16, spec)["index"] for _ in range(3)]
    other = Reader(store.refresh(), priorities=PLAIN)
    other.load_state_dict(state)
    assert all(torch.equal(other.sample(16, spec)["index"], index) for index in expected)
    for writer in writers:
        writer.close()


def test_a_priority_too_small_for_float32_does_not_become_never() -> None:
    reader = Reader(store_of([2]), priorities=replace(PLAIN, alpha=0.05))
    reader.update_priorities(torch.tensor([[0, 0, 0]]), torch.tensor([1e-60], dtype=torch.float64))
    assert {t for _, _, t in reader.sample(4000, Windows())["index"].tolist()} == {0, 1}


def test_what_a_discarded_writer_had_is_saved_by_the_next() -> None:
    store = store_of([20])
    reader = Reader(store, priorities=PLAIN)
    set_all(reader, {(0, 0, 3): 5.0})
    first = store.writer("p", commit_seconds=None)
    assert reader.save_priorities(first) == 20
    first.discard()
    with store.writer("q", commit_seconds=None) as second:
        assert reader.save_priorities(second) == 20
    assert raw_by_row(reopened(store)) == raw_by_row(reader)
