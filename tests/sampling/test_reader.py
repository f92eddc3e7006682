"""Windows: every value and mask of a batch against a plain reference."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import trajstore
from trajstore import Field, Schema, Store
from trajstore.sampling.reader import Reader
from trajstore.sampling.windows import Windows
from trajstore.schema import Array

Rng = np.random.Generator


@dataclass
class Episode:
    """What the reference knows of an episode: values are functions of (number, t)."""

    number: int
    n: int
    end: str
    has_final: bool

    @property
    def n_rows(self) -> int:
        return self.n + self.has_final

    def obs(self, t: int) -> list[float]:
        return [self.number, t]

    def reward(self, t: int) -> float:
        return self.number + t / 16


def schema(chunks: tuple[int, int, int], alignment: str = "action") -> Schema:
    return Schema(
        {
            "obs": Field("float32", (2,), final=True, chunk_rows=chunks[0]),
            "action": Field("int64", chunk_rows=chunks[1]),
            "reward": Field("float32", final=alignment == "observation", chunk_rows=chunks[2]),
        },
        reward_alignment=alignment,  # type: ignore[arg-type]
    )


ENDS = ("terminated", "truncated", "open")


def fill(store: Store, episodes: list[Episode], rng: Rng, n_commits: int) -> None:
    """Write the episodes step by step, interleaved over environments, with commits in between."""
    aligned = store.schema is not None and store.schema.reward_alignment == "observation"
    with_commits = set(rng.integers(0, sum(e.n for e in episodes) + 1, n_commits).tolist())
    writer = store.writer(commit_seconds=None)
    at = dict.fromkeys(range(len(episodes)), 0)
    for count in itertools.count():
        left = [i for i, e in enumerate(episodes) if at[i] < e.n]
        if count in with_commits:
            writer.commit()
        if not left:
            break
        i = int(rng.choice(left))
        episode, t = episodes[i], at[i]
        step = {"obs": np.array(episode.obs(t), np.float32), "action": t, "reward": episode.reward(t)}
        at[i] += 1
        if at[i] == episode.n and episode.end != "open":
            last: dict[str, Any] = {"obs": np.array(episode.obs(episode.n), np.float32)}
            if aligned:
                last["reward"] = episode.reward(episode.n)
            flags = {episode.end: True}
            writer.append(step, env=i, final=last if episode.has_final else None, **flags)
        else:
            writer.append(step, env=i)
    writer.commit()
    writer.release()  # as if it had died: what is open stays open


@st.composite
def layouts(draw: st.DrawFn) -> tuple[list[Episode], tuple[int, int, int], int, int]:
    n = draw(st.integers(1, 6))
    episodes = []
    for number in range(n):
        end = draw(st.sampled_from(ENDS))
        has_final = draw(st.booleans()) and end != "open"
        episodes.append(Episode(number, draw(st.integers(1, 12)), end, has_final))
    chunks = tuple(draw(st.sampled_from([1, 2, 3, 4, 8])) for _ in range(3))
    return episodes, chunks, draw(st.integers(0, 4)), draw(st.integers(0, 1 << 16))  # type: ignore[return-value]


@st.composite
def windows(draw: st.DrawFn) -> Windows:
    boundary = draw(st.sampled_from(["strict", "pad_left", "pad_right", "pad_both", "short"]))
    return Windows(
        length=draw(st.integers(1, 4)),
        burn_in=draw(st.integers(0, 2)),
        bootstrap=draw(st.integers(0, 2)),
        stride=draw(st.integers(1, 3)),
        boundary=boundary,
        strict_context=boundary == "strict" and draw(st.booleans()),
        pad=draw(st.sampled_from(["repeat", "zero", -7.0])),
        weight=draw(st.sampled_from(["window", "step", "episode"])),
        next_fields=draw(st.sampled_from([(), ("obs",)])),
        n_step=draw(st.sampled_from([None, 1, 3, (1, 3)])),
        gamma=0.5,
    )


def usable(episode: Episode, spec: Windows, alignment: str) -> int:
    has_next = episode.has_final or (episode.end == "terminated" and alignment == "action")
    return episode.n - (spec.needs_next and not has_next)


def legal_starts(episode: Episode, spec: Windows, alignment: str) -> set[int]:
    """Every start of a window in an episode, by trying all of them."""
    n = usable(episode, spec, alignment)
    found = set()
    for start in range(-20, n + 1):
        learn = [start + spec.stride * i for i in range(spec.length)]
        context = [start + spec.stride * i for i in range(-spec.burn_in, spec.length + spec.bootstrap)]
        inside = [0 <= p < n for p in learn]
        rule = {
            "strict": all(inside),
            "pad_right": n > 0 and 0 <= start < n,
            "pad_left": n > 0 and 0 <= learn[-1] < n,
            "pad_both": any(inside),
            "short": n > 0 and (all(inside) or (start == 0 and n <= spec.reach)),
        }[spec.boundary]
        if rule and not (spec.strict_context and not all(0 <= p < n for p in context)):
            found.add(start)
    return found


def check_batch(
    batch: dict[str, Any], episodes: list[Episode], spec: Windows, alignment: str
) -> list[tuple[int, int]]:
    """Compare each window with the reference; returns the (episode, first learning step) drawn."""
    drawn = []
    by_number = {e.number: e for e in episodes}
    for b in range(len(batch["index"])):
        valid = batch["valid"][b]
        some = int(torch.nonzero(valid)[0, 0])
        episode = by_number[int(batch["obs"][b, some, 0])]
        t = int(batch["action"][b, some])
        start = t - spec.stride * (some - spec.burn_in)
        drawn.append((episode.number, start))
        check_window({k: _pick(v, b) for k, v in batch.items()}, episode, start, spec, alignment)
    return drawn


def _pick(value: Any, b: int) -> Any:
    return {k: _pick(v, b) for k, v in value.items()} if isinstance(value, dict) else value[b]


def check_window(window: dict[str, Any], episode: Episode, start: int, spec: Windows, alignment: str) -> None:
    assert int(window["index"][2]) == max(start, 0)
    for j, i in enumerate(range(-spec.burn_in, spec.length + spec.bootstrap)):
        t = start + spec.stride * i
        exists = 0 <= t < episode.n
        near = min(max(t, 0), episode.n - 1)
        assert bool(window["valid"][j]) == exists
        assert bool(window["is_first"][j]) == (t == 0)
        assert bool(window["terminated"][j]) == (t == episode.n - 1 and episode.end == "terminated")
        assert bool(window["truncated"][j]) == (t == episode.n - 1 and episode.end == "truncated")
        assert bool(window["is_last"][j]) == (t == episode.n - 1 and episode.end != "open")
        is_learned = (
            exists and 0 <= i < spec.length and (not spec.needs_next or t < usable(episode, spec, alignment))
        )
        assert bool(window["learn"][j]) == is_learned
        observed = min(max(t, 0), episode.n_rows - 1) if spec.bootstrap else near
        is_final = observed == t == episode.n
        if spec.bootstrap:
            assert bool(window["is_final"][j]) == is_final
        if exists or is_final or spec.pad == "repeat":
            assert window["obs"][j].tolist() == episode.obs(observed)
        else:
            assert window["obs"][j].tolist() == [0 if spec.pad == "zero" else spec.pad] * 2
        if exists or spec.pad == "repeat":
            arrives_late = alignment == "observation"
            assert float(window["reward"][j]) == episode.reward(observed if arrives_late else near)
        if is_learned and spec.needs_next:
            check_transition(window, j, episode, t, spec, alignment)


def check_transition(
    window: dict[str, Any], j: int, episode: Episode, t: int, spec: Windows, alignment: str
) -> None:
    stop = usable(episode, spec, alignment)  # transitions start before it
    wished = int(window["n_step"]["n"][j]) if spec.n_step is not None else 1
    low, high = spec.n_range
    k = min(high, stop - t) if low == high else wished
    assert min(low, stop - t) <= k <= min(high, stop - t)
    ended = t + k == episode.n and episode.end == "terminated"
    if spec.next_fields and (t + k < episode.n_rows):
        assert window["next"]["obs"][j].tolist() == episode.obs(t + k)
    if spec.n_step is not None:
        shift = alignment == "observation"
        expected = sum(spec.gamma**i * episode.reward(t + i + shift) for i in range(k))
        assert math.isclose(float(window["n_step"]["return"][j]), expected, rel_tol=1e-5)
        assert float(window["n_step"]["discount"][j]) == (0.0 if ended else spec.gamma**k)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(layouts(), windows(), st.sampled_from(["action", "observation"]), st.sampled_from([64, 400, 1 << 20]))
def test_every_window_is_as_the_reference_says(
    layout: tuple[list[Episode], tuple[int, int, int], int, int], spec: Windows, alignment: str, cache_bytes: int
) -> None:
    episodes, chunks, n_commits, seed = layout
    url = f"memory://reader-{np.random.default_rng().integers(1 << 60)}"
    store = trajstore.create(url, schema(chunks, alignment))
    fill(store, episodes, np.random.default_rng(seed), n_commits)
    store.refresh()
    legal = {(e.number, s) for e in episodes for s in legal_starts(e, spec, alignment)}
    reader = Reader(store, cache_bytes=cache_bytes, seed=seed)
    if not legal:
        with pytest.raises(trajstore.DataError, match=r"no such window exists|no episode"):
            reader.sample(4, spec)
        return
    if spec.weight == "window":
        assert reader.n_windows(spec) == len(legal)
    drawn = check_batch(reader.sample(24, spec), episodes, spec, alignment)
    assert set(drawn) <= legal


def small_store(name: str, n_episodes: int = 40, seed: int = 0) -> tuple[Store, list[Episode]]:
    rng = np.random.default_rng(seed)
    episodes = [
        Episode(i, int(rng.integers(1, 30)), ENDS[int(rng.integers(2))], bool(rng.integers(2)))
        for i in range(n_episodes)
    ]
    store = trajstore.create(f"memory://{name}-{rng.integers(1 << 60)}", schema((4, 8, 16)), exist_ok=True)
    fill(store, episodes, rng, 10)
    store.refresh()
    return store, episodes


@pytest.mark.parametrize("cache_bytes", ["100B", "3KB", "20KB", "1MiB"])
def test_batches_do_not_depend_on_the_cache(cache_bytes: str) -> None:
    store, _ = small_store("same")
    spec = Windows(length=8, boundary="pad_both")
    reference, reader = Reader(store, seed=3), Reader(store, seed=3, cache_bytes=cache_bytes)
    for _ in range(5):
        expected, got = reference.sample(16, spec), reader.sample(16, spec)
        assert all(torch.equal(expected[key], got[key]) for key in expected)
    assert reader.stats()["cache_bytes"] <= max(3 * 2 * 16 * 8, trajstore.arguments.parse_bytes(cache_bytes, "x"))


def chi_square(counts: Array, expected: Array) -> float:
    return float(((counts - expected) ** 2 / expected).sum() / (len(counts) - 1))


@pytest.mark.parametrize("weight", ["window", "step", "episode"])
def test_draws_have_the_declared_distribution(weight: str) -> None:
    store, episodes = small_store("weights", 12, seed=5)
    spec = Windows(length=3, weight=weight)  # type: ignore[arg-type]
    legal = [(e.number, s) for e in episodes for s in sorted(legal_starts(e, spec, "action"))]
    per_episode = {e.number: sum(1 for number, _ in legal if number == e.number) for e in episodes}
    mass = {"window": lambda e: per_episode[e.number], "step": lambda e: e.n, "episode": lambda e: 1}[weight]
    total = sum(mass(e) for e in episodes if per_episode[e.number])
    by_number = {e.number: e for e in episodes}
    expected = np.array([mass(by_number[n]) / total / per_episode[n] for n, _ in legal])
    reader = Reader(store, seed=11)
    counts: dict[tuple[int, int], int] = dict.fromkeys(legal, 0)
    for _ in range(20):
        batch = reader.sample(2000, spec)
        for number, t in zip(batch["obs"][:, 0, 0].tolist(), batch["action"][:, 0].tolist(), strict=True):
            counts[int(number), t] += 1
    n = 20 * 2000
    # With a fixed seed this is one number; for a right sampler it is near 1, and past 1.5 less than once in 10^6.
    assert chi_square(np.array(list(counts.values())), expected * n) < 1.5


def test_a_reader_follows_the_store_only_when_refreshed() -> None:
    store = trajstore.create("memory://follows", schema((4, 4, 4)))
    writer = store.writer(commit_seconds=None)
    data = {"obs": np.zeros((3, 2), np.float32), "action": np.arange(3), "reward": np.zeros(3, np.float32)}
    writer.append_episode(data, terminated=True)
    writer.commit()
    store.refresh()
    reader = Reader(store)
    spec = Windows(length=2)
    assert reader.n_windows(spec) == 2
    writer.append_episode(data, terminated=True)
    writer.append({"obs": np.ones(2, np.float32), "action": 9, "reward": 0.0})
    writer.commit()
    assert reader.n_windows(spec) == 2
    reader.refresh()
    assert reader.n_windows(spec) == 4
    for _ in range(6):  # the open episode grows in a part-filled chunk that the cache has seen
        writer.append({"obs": np.ones(2, np.float32), "action": 10, "reward": 0.0})
        writer.commit()
        reader.refresh()
        batch = reader.sample(64, spec)
        assert set(batch["action"].flatten().tolist()) <= {0, 1, 2, 9, 10}
        assert set(batch["obs"].flatten().tolist()) <= {0.0, 1.0}
    assert reader.n_windows(spec) == 10


def test_state_is_resumed_exactly() -> None:
    store, _ = small_store("resume")
    spec = Windows(length=4, weight="episode", n_step=(1, 3))
    reader = Reader(store, seed=1)
    reader.sample(8, spec)
    state = reader.state_dict()
    expected = reader.sample(8, spec)
    other = Reader(store, seed=99)
    other.load_state_dict(state)
    assert torch.equal(other.sample(8, spec)["index"], expected["index"])


def test_bad_windows_are_refused() -> None:
    for bad in (
        {"length": 0},
        {"stride": 0},
        {"boundary": "loose"},
        {"weight": "x"},
        {"n_step": 0},
        {"gamma": 2.0},
    ):
        with pytest.raises(ValueError, match=next(iter(bad))):
            Windows(**bad)
    store, _ = small_store("bad")
    reader = Reader(store)
    with pytest.raises(KeyError, match="no field 'pixels'"):
        reader.sample(4, Windows(fields=("pixels",)))
    with pytest.raises(ValueError, match="batch_size: expected a positive integer, got 0"):
        reader.sample(0, Windows())
    with pytest.raises(trajstore.DataError, match=r"no episode has 64 usable steps, .* the longest of all has"):
        reader.sample(4, Windows(length=64))
    assert len(reader.sample(4, Windows())["index"]) == 4


def test_an_empty_store_says_so() -> None:
    reader = Reader(trajstore.create("memory://empty-reader"))
    with pytest.raises(trajstore.DataError, match=r"was empty when this reader was created .* call refresh\(\)"):
        reader.sample(4, Windows())


def test_only_chosen_episodes_are_drawn() -> None:
    store, episodes = small_store("where")
    reader, spec = Reader(store), Windows(length=2)

    def long(table: trajstore.EpisodeTable) -> Array:
        return table["length"] > 15

    batch = reader.sample(500, spec, where=long)
    assert {int(n) for n in batch["obs"][:, 0, 0]} == {e.number for e in episodes if e.n > 15}
    with pytest.raises(trajstore.DataError, match="no episode that the restrictions allow has 2 usable steps"):
        reader.sample(4, spec, where=lambda table: table["length"] > 1000)
    with pytest.raises(trajstore.DataError, match="where: expected 40 bools, one for each episode, got int64"):
        reader.sample(4, spec, where=lambda table: table["length"])


@given(layouts(), windows(), st.integers(1, 40))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_recent_windows_start_within_the_last_steps(layout: Any, spec: Windows, n: int) -> None:
    episodes, chunks, n_commits, seed = layout
    store = trajstore.create(f"memory://recent-{np.random.default_rng().integers(1 << 60)}", schema(chunks))
    fill(store, episodes, np.random.default_rng(seed), n_commits)
    store.refresh()
    reader = Reader(store, seed=seed)
    index = reader.assembler.index
    order = [(int(index.episode.host[i]), int(index.lengths()[i])) for i in range(index.n)]
    left, allowed = n, set()
    for episode, length in reversed(order):
        allowed |= {(episode, t) for t in range(max(0, length - left), length)} if left > 0 else set()
        left -= length
    if spec.weight != "window":
        return
    try:
        batch = reader.sample(50, spec, recent_steps=n)
    except trajstore.DataError:
        return
    for _, episode, t in batch["index"].tolist():
        assert (episode, t) in allowed or t == 0


def test_recent_episodes_are_the_last_that_arrived() -> None:
    store, _ = small_store("recent-episodes")
    reader = Reader(store)
    last = set(reader.assembler.index.episode.host[-5:].tolist())
    drawn = set(reader.sample(400, Windows(), recent_episodes=5)["index"][:, 1].tolist())
    assert drawn == last


def test_windows_can_be_asked_for_by_index() -> None:
    store, _ = small_store("at")
    reader, spec = Reader(store), Windows(length=4, n_step=2)
    batch = reader.sample(32, spec)
    again = reader.at(batch["index"], spec)
    assert torch.equal(again["obs"], batch["obs"])
    assert torch.equal(again["n_step"]["return"], batch["n_step"]["return"])
    with pytest.raises(
        trajstore.EpisodeNotFoundError, match=r"index \[0, 999, 0\]: this reader has no such episode"
    ):
        reader.at(torch.tensor([[0, 999, 0]]), spec)
    with pytest.raises(trajstore.EpisodeNotFoundError, match="no window can start at that step"):
        reader.at(torch.tensor([[0, 0, 999]]), spec)
