"""What a window holds: crossing episodes, stacks, transitions, padding, dtypes, and what is refused."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import trajstore
from tests.sampling.test_reader import (
    Episode,
    chi_square,
    fill,
    layouts,
    legal_starts,
    schema,
    small_store,
    usable,
    windows,
)
from tests.sampling.test_reader import check_transition as check_transition_of
from trajstore import DataError, Field, Schema, Store
from trajstore.sampling.batches.outputs import flat_outputs
from trajstore.sampling.reader import Reader
from trajstore.sampling.windows import Windows
from trajstore.schema import DTYPES, Array
from trajstore.store.store import create_imported

SLOW = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def fresh_url() -> str:
    return f"memory://windows-{uuid.uuid4().hex}"


def recorded(fields: dict[str, Any], *episodes: dict[str, Any], **options: Any) -> Store:
    """A store of these whole episodes, all of them terminated, in one stream."""
    store = create_imported(fresh_url(), Schema(fields, **options))
    with store.writer(commit_seconds=None) as writer:
        for data in episodes:
            writer.append_episode(data, terminated=True)
    store.refresh()
    return store


def numbered(*lengths: int, chunk_rows: int = 4) -> Store:
    """Episodes of these lengths; a step holds its episode's number and its t."""
    fields = {"obs": Field("float32", (2,), chunk_rows=chunk_rows), "action": Field("int64", chunk_rows=chunk_rows)}
    return recorded(fields, *(_numbered(k, n) for k, n in enumerate(lengths)))


def _numbered(k: int, n: int) -> dict[str, Array]:
    obs = np.stack([np.full(n, k), np.arange(n)], 1).astype(np.float32)
    return {"obs": obs, "action": np.arange(n)}


# ---- crossing episodes ---------------------------------------------------------------------------------


@dataclass
class Lane:
    """What one environment of one writer experienced, episode after episode."""

    episodes: list[Episode]
    handles: dict[tuple[int, int], tuple[str, int, int]] = field(default_factory=dict)

    @property
    def steps(self) -> list[tuple[Episode, int]]:
        return [(episode, t) for episode in self.episodes for t in range(episode.n)]


@st.composite
def lanes(draw: st.DrawFn) -> tuple[list[list[Lane]], tuple[int, int, int], int]:
    """One to two writers with one to three environments of one to four episodes; only the last may be open."""
    number, writers = 0, []
    for _ in range(draw(st.integers(1, 2))):
        found = []
        for _ in range(draw(st.integers(1, 3))):
            episodes = []
            n = draw(st.integers(1, 4))
            for k in range(n):
                end = draw(st.sampled_from(["terminated", "truncated", *(["open"] if k == n - 1 else [])]))
                has_final = draw(st.booleans()) and end != "open"
                episodes.append(Episode(number, draw(st.integers(1, 5)), end, has_final))
                number += 1
            found.append(Lane(episodes))
        writers.append(found)
    chunks = tuple(draw(st.sampled_from([1, 2, 3, 8])) for _ in range(3))
    return writers, chunks, draw(st.integers(0, 1 << 16))  # type: ignore[return-value]


def record_lanes(store: Store, lanes: list[Lane], rng: np.random.Generator) -> None:
    """Write the lanes step by step, environments interleaved, with commits in between."""
    writer = store.writer(commit_seconds=None)
    left = [lane.steps for lane in lanes]
    while any(left):
        env = int(rng.choice([i for i, steps in enumerate(left) if steps]))
        episode, t = left[env].pop(0)
        step = {"obs": np.array(episode.obs(t), np.float32), "action": t, "reward": episode.reward(t)}
        ends: dict[str, Any] = {}
        if t == episode.n - 1 and episode.end != "open":
            ends = {episode.end: True}
            if episode.has_final:
                ends["final"] = {"obs": np.array(episode.obs(episode.n), np.float32)}
        handle = writer.append(step, env=env, **ends)
        lanes[env].handles[episode.number, t] = tuple(handle)  # type: ignore[assignment]
        if rng.random() < 0.15:
            writer.commit()
    writer.commit()
    writer.release()  # as if it had died: what is open stays open


@st.composite
def crossing(draw: st.DrawFn) -> Windows:
    return Windows(
        length=draw(st.integers(1, 5)),
        burn_in=draw(st.integers(0, 3)),
        bootstrap=draw(st.integers(0, 3)),
        stride=draw(st.integers(1, 3)),
        boundary="cross",
        pad=draw(st.sampled_from(["repeat", "zero", -7.0])),
        weight=draw(st.sampled_from(["window", "step", "episode"])),
        next_fields=draw(st.sampled_from([(), ("obs",)])),
        n_step=draw(st.sampled_from([None, 1, 3, (1, 3)])),
        gamma=0.5,
    )


def crossing_starts(lane: Lane, spec: Windows) -> set[int]:
    steps = lane.steps
    return {
        p
        for p, (episode, t) in enumerate(steps)
        if t < usable(episode, spec, "action") and p + spec.reach < len(steps)
    }


def check_crossing(window: dict[str, Any], lane: Lane, start: int, spec: Windows, streams: list[str]) -> None:
    steps = lane.steps
    stream, episode, t = window["index"].tolist()
    first, t_first = steps[start]
    assert (streams[stream], episode, t) == lane.handles[first.number, t_first]
    for j, i in enumerate(range(-spec.burn_in, spec.length + spec.bootstrap)):
        place = start + spec.stride * i
        exists = 0 <= place < len(steps)
        near, t = steps[min(max(place, 0), len(steps) - 1)]
        is_end = exists and t == near.n - 1
        assert bool(window["valid"][j]) == exists
        assert bool(window["is_first"][j]) == (exists and t == 0)
        assert bool(window["is_last"][j]) == (is_end and near.end != "open")
        assert bool(window["terminated"][j]) == (is_end and near.end == "terminated")
        assert bool(window["truncated"][j]) == (is_end and near.end == "truncated")
        learned = exists and 0 <= i < spec.length
        learned = learned and (not spec.needs_next or t < usable(near, spec, "action"))
        assert bool(window["learn"][j]) == learned
        padded = [0.0 if spec.pad == "zero" else spec.pad] * 2
        beyond = place - len(steps) + 1  # steps past the end of the last episode
        is_final = beyond == 1 and near.has_final and spec.bootstrap > 0
        row = t + (near.has_final and beyond > 0 and spec.bootstrap > 0)
        shown = near.obs(row) if exists or is_final or spec.pad == "repeat" else padded
        assert window["obs"][j].tolist() == shown
        if spec.bootstrap:
            assert bool(window["is_final"][j]) == is_final
        if learned and spec.needs_next:
            check_transition_of(window, j, near, t, spec, "action")


def picked(value: Any, b: int) -> Any:
    return {k: picked(v, b) for k, v in value.items()} if isinstance(value, dict) else value[b]


@SLOW
@given(lanes(), crossing(), st.booleans(), st.sampled_from([64, 1 << 20]))
def test_windows_cross_into_the_same_environments_next_episode_only(
    layout: Any, spec: Windows, compiled: bool, cache_bytes: int
) -> None:
    writers, chunks, seed = layout
    store = trajstore.create(fresh_url(), schema(chunks))
    for found in writers:
        record_lanes(store, found, np.random.default_rng(seed))
    store.refresh()
    every = [lane for found in writers for lane in found]
    place_of = {(e.number, t): (lane, p) for lane in every for p, (e, t) in enumerate(lane.steps)}
    legal = {(id(lane), p) for lane in every for p in crossing_starts(lane, spec)}
    reader = Reader(store, seed=seed, compiled=compiled, cache_bytes=cache_bytes)
    if not legal:
        with pytest.raises(DataError, match="no such window exists"):
            reader.sample(4, spec)
        return
    if spec.weight == "window":
        assert reader.n_windows(spec) == len(legal)
    batch = reader.sample(24, spec)
    for b in range(24):
        first = spec.burn_in  # in this mode the first learning step always exists
        lane, start = place_of[int(batch["obs"][b, first, 0]), int(batch["action"][b, first])]
        assert (id(lane), start) in legal
        check_crossing(picked(batch, b), lane, start, spec, reader.streams)


def test_crossing_windows_follow_the_store() -> None:
    store = trajstore.create(fresh_url(), schema((2, 2, 2)))
    writer = store.writer(commit_seconds=None)
    step = {"obs": np.zeros(2, np.float32), "action": 0, "reward": 0.0}
    spec = Windows(length=3, boundary="cross")
    reader = Reader(store)
    for count in range(1, 8):
        writer.append(step, terminated=count % 2 == 0)
        writer.commit()
        reader.refresh()
        assert reader.n_windows(spec) == max(0, count - 2)
    assert reader.sample(16, spec)["valid"].all()
    writer.discard()


# ---- stacks --------------------------------------------------------------------------------------------


@SLOW
@given(
    layouts(),
    windows(),
    st.lists(st.integers(-4, 4), min_size=1, max_size=4),
    st.lists(st.integers(0, 5), min_size=1, max_size=3),
    st.booleans(),
)
def test_stacks_are_clamped_within_the_episode(
    layout: Any, spec: Windows, frames: list[int], ahead: list[int], compiled: bool
) -> None:
    episodes, chunks, n_commits, seed = layout
    spec = replace(spec, offsets={"obs": frames, "action": tuple(ahead)}, fields=("reward",))
    store = trajstore.create(fresh_url(), schema(chunks))
    fill(store, episodes, np.random.default_rng(seed), n_commits)
    store.refresh()
    if not any(legal_starts(e, spec, "action") for e in episodes):
        return
    batch = Reader(store, seed=seed, compiled=compiled).sample(16, spec)
    assert batch["obs"].shape == (16, spec.size, len(frames), 2)
    assert batch["action"].shape == (16, spec.size, len(ahead))
    by_number = {e.number: e for e in episodes}
    for b, j in torch.nonzero(batch["valid"]).tolist():
        episode = by_number[int(batch["reward"][b, j])]
        t = round(16 * float(batch["reward"][b, j] - episode.number))
        for k, offset in enumerate(frames):
            near = min(max(t + offset, 0), episode.n - 1 + episode.has_final)
            is_real = near == t + offset or spec.pad == "repeat"
            padded = [0.0 if spec.pad == "zero" else spec.pad] * 2
            assert batch["obs"][b, j, k].tolist() == (episode.obs(near) if is_real else padded)
        for k, offset in enumerate(ahead):
            near = min(t + offset, episode.n - 1)
            is_real = near == t + offset or spec.pad == "repeat"
            assert batch["action"][b, j, k] == (near if is_real else 0 if spec.pad == "zero" else spec.pad)


@pytest.mark.parametrize("pad", ["repeat", "zero", 9.0])
def test_a_stack_of_offset_zero_is_the_field_itself(pad: Any) -> None:
    reader = Reader(numbered(3))
    at = torch.tensor([[0, 0, 1]])
    plain = Windows(length=4, burn_in=3, boundary="pad_right", pad=pad)
    stacked = replace(plain, offsets={"obs": (0,)})
    assert torch.equal(reader.at(at, stacked)["obs"][:, :, 0], reader.at(at, plain)["obs"])


def test_a_group_of_fields_is_stacked_together() -> None:
    fields = {"obs": {"a": Field("int64"), "b": Field("uint8")}, "action": Field("int64")}
    values = {"obs": {"a": np.arange(5), "b": np.arange(5, dtype=np.uint8)}, "action": np.arange(5)}
    batch = Reader(recorded(fields, values)).at(torch.tensor([[0, 0, 2]]), Windows(offsets={"obs": [-1, 0]}))
    assert batch["obs"]["a"].tolist() == [[[1, 2]]]
    assert batch["obs"]["b"].tolist() == [[[1, 2]]]
    assert batch["action"].tolist() == [[2]]


def test_stacks_do_not_reach_into_the_episode_before() -> None:
    reader = Reader(numbered(3, 3, 3))
    batch = reader.at(torch.tensor([[0, 1, 0], [0, 1, 2]]), Windows(offsets={"obs": (-2, 2)}))
    assert batch["obs"][..., 0].eq(1).all()


# ---- transitions ---------------------------------------------------------------------------------------


def test_transitions_have_no_window_axis() -> None:
    store, _ = small_store("transitions", 8)
    spec = Windows.transitions(n_step=3, gamma=0.5)
    batch = Reader(store).sample(64, spec)
    assert batch["obs"].shape == batch["next"]["obs"].shape == (64, 2)
    for key in ("reward", "action", "terminated", "truncated", "valid", "learn"):
        assert batch[key].shape == (64,)
    assert {value.shape for value in batch["n_step"].values()} == {(64,)}
    assert batch["index"].shape == (64, 3)
    assert set(batch["next"]) == {"obs"}  # the one that has a value after the last step


@SLOW
@given(layouts(), st.sampled_from([None, 1, 3]), st.sampled_from(["action", "observation"]))
def test_transitions_never_lead_into_another_episode(layout: Any, n_step: Any, alignment: str) -> None:
    episodes, chunks, n_commits, seed = layout
    store = trajstore.create(fresh_url(), schema(chunks, alignment))
    fill(store, episodes, np.random.default_rng(seed), n_commits)
    store.refresh()
    spec = Windows.transitions(n_step=n_step, gamma=0.5)
    reader = Reader(store, seed=seed)
    legal = {(e.number, t) for e in episodes for t in legal_starts(e, spec, alignment)}
    if not legal:
        with pytest.raises(DataError, match="no such window exists"):
            reader.sample(4, spec)
        return
    by_number, seen = {e.number: e for e in episodes}, set()
    for batch in reader.epoch(8, spec):
        for b in range(len(batch["index"])):
            episode, t = by_number[int(batch["obs"][b, 0])], int(batch["action"][b])
            seen.add((episode.number, t))
            window = {k: v[None] for k, v in picked(batch, b).items() if isinstance(v, torch.Tensor)}
            nested = {k: picked(batch[k], b) for k in ("next", "n_step") if k in batch}
            window |= {k: {name: value[None] for name, value in part.items()} for k, part in nested.items()}
            check_transition_of(window, 0, episode, t, spec, alignment)
            assert bool(batch["terminated"][b]) == (t == episode.n - 1 and episode.end == "terminated")
            assert bool(batch["truncated"][b]) == (t == episode.n - 1 and episode.end == "truncated")
    assert seen == legal


def test_a_drawn_n_takes_every_value_of_its_range() -> None:
    reader = Reader(numbered(*[50] * 4), seed=4)
    with pytest.raises(DataError, match="n_step: the schema has no reward field"):
        reader.sample(4, Windows(n_step=2))
    fields = {"obs": Field("float32", final=True), "reward": Field("float32")}
    data = {"obs": np.zeros(101, np.float32), "reward": np.ones(100, np.float32)}
    batch = Reader(recorded(fields, data)).sample(4000, Windows(n_step=(2, 5), gamma=1.0))
    n = batch["n_step"]["n"][batch["index"][:, 2] < 90]
    assert set(n.flatten().tolist()) == {2, 3, 4, 5}
    counts = torch.bincount(n.flatten())[2:].numpy()
    assert chi_square(counts, np.full(4, counts.sum() / 4)) < 5
    assert torch.equal(batch["n_step"]["return"], batch["n_step"]["n"].to(torch.float32))


def test_a_reward_of_several_numbers_has_no_n_step_return() -> None:
    store = recorded({"reward": Field("float32", (2,))}, {"reward": np.ones((4, 2), np.float32)})
    reader = Reader(store)
    with pytest.raises(DataError, match=r"field 'reward' has shape \(2,\), expected one number for each step"):
        reader.sample(4, Windows(n_step=2))
    assert reader.sample(4, Windows())["reward"].shape == (4, 1, 2)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int64", "float16", "float64", "bfloat16", "bool"])
def test_rewards_of_any_dtype_are_summed(dtype: str) -> None:
    bits = torch.ones(6, 1, dtype=getattr(torch, dtype))
    store = recorded({"reward": Field(dtype, (1,))}, {"reward": bits})
    batch = Reader(store).at(torch.tensor([[0, 0, 0]]), Windows(n_step=3, gamma=0.5))
    assert float(batch["n_step"]["return"]) == 1.75
    assert batch["n_step"]["return"].shape == (1, 1)


def test_without_a_final_value_and_a_name_next_fields_must_be_named() -> None:
    store = recorded(
        {"state": Field("int64"), "action": Field("int64")}, {"state": np.arange(3), "action": np.arange(3)}
    )
    message = (
        r"no chosen field has a final value or is named observation or obs; .*"
        r"Windows\.transitions\(next_fields=\('state',\)\); the chosen fields are state, action"
    )
    with pytest.raises(DataError, match=message):
        Reader(store).sample(2, Windows.transitions())
    batch = Reader(store).at(torch.tensor([[0, 0, 1], [0, 0, 2]]), Windows.transitions(next_fields=("state",)))
    assert batch["next"]["state"].tolist() == [2, 2]


@pytest.mark.parametrize("compiled", [True, False])
def test_transitions_need_no_declared_final_value(compiled: bool) -> None:
    fields = {
        "obs": {"a": Field("int64"), "b": Field("int64")},
        "action": Field("int64"),
        "reward": Field("float32"),
    }
    store = trajstore.create(fresh_url(), Schema(fields))
    ends: list[dict[str, Any]] = [{"terminated": True}, {"truncated": True}, {}]
    with store.writer() as writer:
        for i, end in enumerate(ends):
            rows = 10 * i + np.arange(3)
            data = {"obs": {"a": rows, "b": -rows}, "action": rows, "reward": np.ones(3, np.float32)}
            writer.append_episode(data, **end)
    store.refresh()
    reader, windows = Reader(store, compiled=compiled), Windows.transitions(n_step=1, gamma=0.5)
    assert reader.window_stats(windows) == {"n_windows": 7, "n_left_out": 2, "n_open": 0}
    assert reader.window_stats(Windows()) == {"n_windows": 9, "n_left_out": 0, "n_open": 0}
    (batch,) = reader.epoch(10, windows, shuffle=False)
    assert set(batch["next"]) == {"obs"}
    assert batch["obs"]["a"].tolist() == [0, 1, 2, 10, 11, 20, 21]
    assert batch["next"]["obs"]["a"].tolist() == [1, 2, 2, 11, 12, 21, 22]  # repeated where it terminated
    assert batch["next"]["obs"]["b"].tolist() == [-1, -2, -2, -11, -12, -21, -22]
    assert batch["terminated"].tolist() == [False, False, True, False, False, False, False]
    assert batch["n_step"]["discount"].tolist() == [0.5, 0.5, 0.0, 0.5, 0.5, 0.5, 0.5]


def test_declared_final_values_go_before_names() -> None:
    fields = {"state": Field("int64", final=True), "obs": Field("int64"), "action": Field("int64")}
    store = recorded(fields, {"state": np.arange(4), "obs": np.arange(3), "action": np.arange(3)})
    assert set(Reader(store).sample(2, Windows.transitions())["next"]) == {"state"}


# ---- padding and dtypes --------------------------------------------------------------------------------


def bits_of(rng: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Any values of a dtype, all bit patterns among them."""
    if dtype == "bool":
        return torch.from_numpy(rng.integers(0, 2, shape).astype(bool))
    size = torch.empty(0, dtype=getattr(torch, dtype)).itemsize
    raw = rng.integers(0, 256, (*shape, size), np.uint8)
    return torch.from_numpy(raw).view(getattr(torch, dtype)).reshape(shape)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("cache_bytes", [64, 1 << 20])
def test_every_dtype_comes_back_bit_by_bit(compiled: bool, cache_bytes: int) -> None:
    rng = np.random.default_rng(3)
    fields = {dtype: Field(dtype, (3,), chunk_rows=3) for dtype in sorted(DTYPES)}
    fields |= {f"{dtype}_scalar": Field(dtype, chunk_rows=2) for dtype in sorted(DTYPES)}
    data = {name: bits_of(rng, f.dtype, (20, *f.shape)) for name, f in fields.items()}
    reader = Reader(recorded(fields, data), compiled=compiled, cache_bytes=cache_bytes)
    spec = Windows(length=4)
    ring = trajstore.Ring(2)
    for _ in range(4):
        batch = reader.sample(8, spec, out=ring)
        for name in fields:
            expected = torch.stack([data[name][t : t + 4] for t in batch["index"][:, 2].tolist()])
            assert batch[name].dtype == expected.dtype
            assert torch.equal(batch[name].view(torch.uint8), expected.contiguous().view(torch.uint8)), name
    assert (reader.stats()["n_parts"] > 0) == (cache_bytes == 64)


PADS = [
    ("uint8", 255),
    ("uint16", 65535),
    ("uint32", 4_000_000_000),
    ("uint64", (1 << 64) - 1024),
    ("int8", -128),
    ("int64", -(1 << 40)),
    ("bool", 1),
    ("bfloat16", -3.0),
    ("float16", 0.5),
    ("float64", 0.1),
]


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize(("dtype", "pad"), PADS)
def test_padding_holds_the_value_in_every_dtype(dtype: str, pad: float, compiled: bool) -> None:
    one = torch.zeros(2, 3, dtype=getattr(torch, dtype))
    store = recorded({"x": Field(dtype, (3,))}, {"x": one})
    spec = Windows(length=3, burn_in=1, boundary="pad_right", pad=pad)
    batch = Reader(store, compiled=compiled).at(torch.tensor([[0, 0, 1]]), spec)
    assert batch["valid"].tolist() == [[True, True, False, False]]
    filled = batch["x"][0, 2:].flatten().tolist()
    assert filled == [torch.tensor(pad, dtype=getattr(torch, dtype)).item() if "float" in dtype else pad] * 6
    assert batch["x"][0, :2].flatten().tolist() == [0] * 6


def test_padding_of_one_field_does_not_depend_on_another() -> None:
    fields = {"a": Field("uint16"), "b": Field("float32"), "c": Field("uint32"), "d": Field("int64")}
    data = {name: torch.zeros(1, dtype=getattr(torch, f.dtype)) for name, f in fields.items()}
    batch = Reader(recorded(fields, data)).sample(1, Windows(length=2, boundary="pad_right", pad=40_000))
    assert {name: batch[name][0, 1].item() for name in fields} == dict.fromkeys(fields, 40_000)


@pytest.mark.parametrize(
    ("dtype", "pad"),
    [
        ("uint8", -1),
        ("uint8", 256),
        ("uint16", 65536),
        ("int8", 128),
        ("int64", 0.5),
        ("bool", 2),
        ("uint8", float("nan")),
        ("int32", float("inf")),
        ("float16", 1e6),
        ("float32", 1e39),
    ],
)
def test_a_padding_value_that_a_field_cant_hold_is_refused(dtype: str, pad: float) -> None:
    store = recorded({"x": Field(dtype)}, {"x": torch.zeros(2, dtype=getattr(torch, dtype))})
    reader = Reader(store)
    with pytest.raises(DataError, match=f"pad: field 'x' of {dtype} can't hold"):
        reader.sample(2, Windows(length=3, boundary="pad_right", pad=pad))
    assert len(reader.sample(2, Windows())["x"]) == 2


@pytest.mark.parametrize("pad", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_floats_may_be_padded_with_anything(dtype: str, pad: float) -> None:
    store = recorded({"x": Field(dtype)}, {"x": torch.zeros(1, dtype=getattr(torch, dtype))})
    batch = Reader(store).sample(1, Windows(length=2, boundary="pad_right", pad=pad))
    assert str(batch["x"][0, 1].item()) == str(pad)


def test_stacks_are_checked_like_other_fields() -> None:
    fields = {"obs": Field("float32"), "u": Field("uint8"), "valid": Field("float32")}
    data = {name: torch.zeros(3, dtype=getattr(torch, f.dtype)) for name, f in fields.items()}
    reader = Reader(recorded(fields, data))
    with pytest.raises(DataError, match="pad: field 'u' of uint8 can't hold 300"):
        reader.sample(2, Windows(fields=("obs",), offsets={"u": (-1, 0)}, pad=300))
    with pytest.raises(DataError, match="field 'valid': batches hold something else under that name"):
        reader.sample(2, Windows(fields=("obs",), offsets={"valid": (-1, 0)}))


@pytest.mark.parametrize("name", ["valid", "learn", "is_first", "is_last", "terminated", "truncated", "index"])
def test_a_field_that_is_named_like_a_mask_is_refused(name: str) -> None:
    reader = Reader(
        recorded({name: Field("bool"), "x": Field("int64")}, {name: np.ones(3, bool), "x": np.arange(3)})
    )
    with pytest.raises(
        DataError, match=f"field '{name}': batches hold something else under that name; leave it out"
    ):
        reader.sample(2, Windows())
    assert reader.sample(2, Windows(fields=["x"]))[name].shape[0] == 2


@pytest.mark.parametrize("name", ["next", "n_step"])
def test_a_group_that_is_named_like_a_part_of_the_batch_is_refused(name: str) -> None:
    reader = Reader(recorded({name: {"x": Field("int64")}}, {name: {"x": np.arange(3)}}))
    with pytest.raises(DataError, match=f"field '{name}/x'"):
        reader.sample(2, Windows())


# ---- the same with and without compiled loops ----------------------------------------------------------


@st.composite
def any_windows(draw: st.DrawFn) -> Windows:
    spec = draw(st.one_of(windows(), crossing()))
    frames = draw(st.lists(st.integers(-3, 3), max_size=3))
    return replace(spec, offsets={"obs": tuple(frames)} if frames else ())


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(layouts(), any_windows(), st.sampled_from([64, 400, 1 << 20]), st.sampled_from(["action", "observation"]))
def test_compiled_loops_change_nothing(layout: Any, spec: Windows, cache_bytes: int, alignment: str) -> None:
    episodes, chunks, n_commits, seed = layout
    store = trajstore.create(fresh_url(), schema(chunks, alignment))
    fill(store, episodes, np.random.default_rng(seed), n_commits)
    store.refresh()
    fast = Reader(store, seed=seed, cache_bytes=cache_bytes)
    plain = Reader(store, seed=seed, compiled=False)
    assert fast.stats()["is_compiled"]
    assert not plain.stats()["is_compiled"]
    assert fast.n_windows(spec) == plain.n_windows(spec)
    if not fast.n_windows(spec):
        return
    for options in ({}, {"recent_steps": 9}, {"recent_episodes": 2, "recent_fraction": 0.5}):
        drawn = []
        for reader in (fast, plain):
            try:
                drawn.append(flat_outputs(reader.sample(12, spec, **options)))
            except DataError as error:
                drawn.append(str(error))
        assert_same(*drawn)
    if spec.weight == "window":
        for expected, got in zip(plain.epoch(5, spec), fast.epoch(5, spec), strict=True):
            assert_same(flat_outputs(expected), flat_outputs(got))


def assert_same(expected: Any, got: Any) -> None:
    """Two flat batches are alike bit by bit, or two errors in every word."""
    if isinstance(expected, str):
        assert expected == got
        return
    assert expected.keys() == got.keys()
    for key, value in expected.items():
        assert value.dtype == got[key].dtype, key
        assert torch.equal(value, got[key]), key


# ---- which windows -------------------------------------------------------------------------------------


def test_a_part_of_the_batch_is_recent() -> None:
    reader = Reader(numbered(*[20] * 50), seed=2)
    batch = reader.sample(200, Windows(), recent_episodes=2, recent_fraction=0.25)
    episodes = batch["index"][:, 1]
    assert episodes[:50].ge(48).all()
    assert episodes[50:].lt(48).sum() > 120
    counts = np.zeros(50)
    for _ in range(40):
        drawn = reader.sample(200, Windows(), recent_episodes=2, recent_fraction=0.25)["index"][:, 1]
        counts += torch.bincount(drawn, minlength=50).numpy()
    expected = np.full(50, 8000 * 0.75 / 50) + np.r_[np.zeros(48), np.full(2, 1000)]
    assert chi_square(counts, expected) < 2


def test_a_recent_part_of_nothing_is_everything() -> None:
    reader = Reader(numbered(*[20] * 50), seed=2)
    batch = reader.sample(500, Windows(), recent_steps=20, recent_fraction=0.0)
    assert len(batch["index"][:, 1].unique()) > 40
    assert reader.sample(50, Windows(), recent_steps=20)["index"][:, 1].eq(49).all()
    assert len(reader.sample(500, Windows(), recent_steps=10**9)["index"][:, 1].unique()) > 40


def test_whole_episodes_are_padded_to_the_longest() -> None:
    lengths = (3, 7, 1, 5)
    reader = Reader(numbered(*lengths), seed=1)
    counts = np.zeros(4)
    for _ in range(50):
        batch = reader.sample_episodes(40, windows=Windows(pad="zero"))
        episodes = batch["index"][:, 1].tolist()
        counts += np.bincount(episodes, minlength=4)
        assert batch["obs"].shape[:2] == (40, max(lengths[e] for e in episodes))
        for b, e in enumerate(episodes):
            n = lengths[e]
            assert batch["valid"][b].tolist() == [t < n for t in range(batch["valid"].shape[1])]
            assert batch["obs"][b, :n].tolist() == [[e, t] for t in range(n)]
            assert not batch["obs"][b, n:].any()
            assert batch["terminated"][b].nonzero().flatten().tolist() == [n - 1]
    assert chi_square(counts, np.full(4, 500)) < 4


def test_whole_episodes_by_index() -> None:
    reader = Reader(numbered(3, 7, 1, 5))
    batch = reader.sample_episodes(2, index=torch.tensor([[0, 3], [0, 0]]))
    assert batch["index"].tolist() == [[0, 3, 0], [0, 0, 0]]
    assert batch["valid"].sum(1).tolist() == [5, 3]
    with pytest.raises(trajstore.EpisodeNotFoundError, match="this reader has no such episode"):
        reader.sample_episodes(1, index=torch.tensor([[0, 4]]))
    with pytest.raises(trajstore.EpisodeNotFoundError, match="this reader has no such episode"):
        reader.sample_episodes(1, index=torch.tensor([[1, 0]]))
    chosen = reader.sample_episodes(64, where=lambda table: table["length"] > 4)
    assert set(chosen["index"][:, 1].tolist()) == {1, 3}
    with pytest.raises(DataError, match="no episode that the restrictions allow"):
        reader.sample_episodes(4, where=lambda table: table["length"] > 40)


def test_whole_episodes_come_with_returns() -> None:
    store, episodes = small_store("whole", 10)
    batch = Reader(store).sample_episodes(20, windows=Windows(n_step=2, gamma=0.5, next_fields=("obs",)))
    by_number = {e.number: e for e in episodes}
    spec = Windows(n_step=2, gamma=0.5, next_fields=("obs",))
    for b in range(20):
        episode = by_number[int(batch["obs"][b, 0, 0])]
        for t in range(usable(episode, spec, "action")):
            check_transition_of(picked(batch, b), t, episode, t, spec, "action")


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize(
    ("spec", "t", "is_legal"),
    [
        (Windows(length=3), 1, True),
        (Windows(length=3), 2, False),
        (Windows(length=2, stride=2), 2, False),
        (Windows(length=2, burn_in=2, strict_context=True), 2, True),
        (Windows(length=2, burn_in=2, strict_context=True), 1, False),
        (Windows(length=1, bootstrap=2, strict_context=True), 2, False),
        (Windows(length=3, boundary="pad_right"), 3, True),
        (Windows(length=3, boundary="short"), 2, False),
        (Windows(length=9, boundary="short"), 0, True),
        (Windows(length=9, boundary="short"), 1, False),
        (Windows(length=8, boundary="cross"), 3, False),
        (Windows(length=5, boundary="cross"), 3, True),
    ],
)
def test_only_windows_that_exist_can_be_asked_for(compiled: bool, spec: Windows, t: int, is_legal: bool) -> None:
    """The second of three episodes of four steps, each in the same environment."""
    reader, at = Reader(numbered(4, 4, 4), compiled=compiled), torch.tensor([[0, 1, t]])
    if is_legal:
        batch = reader.at(at, spec)
        assert batch["obs"][0, spec.burn_in].tolist() == [1, t]
        return
    with pytest.raises(trajstore.EpisodeNotFoundError, match="no window can start at that step"):
        reader.at(at, spec)


@SLOW
@given(layouts(), any_windows(), st.booleans())
def test_every_drawn_window_is_found_again_by_its_index(layout: Any, spec: Windows, compiled: bool) -> None:
    episodes, chunks, n_commits, seed = layout
    spec = replace(spec, n_step=2)  # a drawn n is drawn again
    store = trajstore.create(fresh_url(), schema(chunks))
    fill(store, episodes, np.random.default_rng(seed), n_commits)
    store.refresh()
    reader = Reader(store, seed=seed, compiled=compiled)
    if spec.boundary in ("pad_left", "pad_both") or not reader.n_windows(spec):
        return  # there, several windows have the same first existing step
    batch = reader.sample(16, spec)
    assert_same(flat_outputs(batch), flat_outputs(reader.at(batch["index"], spec)))


# ---- arguments -----------------------------------------------------------------------------------------


def test_lists_and_mappings_are_as_good_as_tuples() -> None:
    a = Windows(fields=["obs"], offsets={"action": [0, 1]}, next_fields=["obs"])
    b = Windows(fields=("obs",), offsets=(("action", (0, 1)),), next_fields=("obs",))
    assert a == b
    assert hash(a) == hash(b)


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"length": 0}, ValueError, "length: expected an integer from 1 to 1073741824, got 0"),
    ({"length": -3}, ValueError, "length: expected an integer"),
    ({"length": 1.5}, ValueError, r"length: expected an integer from 1 to \d+, got 1.5"),
    ({"length": True}, ValueError, "length: expected an integer"),
    ({"length": 1 << 31}, ValueError, "length: expected an integer"),
    ({"burn_in": -1}, ValueError, "burn_in: expected an integer from 0"),
    ({"bootstrap": -1}, ValueError, "bootstrap: expected an integer from 0"),
    ({"stride": 0}, ValueError, "stride: expected an integer from 1"),
    ({"boundary": "loose"}, ValueError, "boundary: expected one of strict, pad_left, .*, got 'loose'"),
    ({"weight": "x"}, ValueError, "weight: expected one of window, step, episode, got 'x'"),
    ({"pad": "edge"}, ValueError, "pad: expected 'repeat', 'zero' or a number, got 'edge'"),
    ({"pad": None}, ValueError, "pad: expected 'repeat', 'zero' or a number, got None"),
    ({"n_step": 0}, ValueError, "n_step: expected a positive integer or a rising pair of them, got 0"),
    ({"n_step": (3, 2)}, ValueError, r"n_step: expected .* got \(3, 2\)"),
    ({"n_step": (1, 2, 3)}, ValueError, "n_step: expected"),
    ({"n_step": ()}, ValueError, "n_step: expected"),
    ({"n_step": [1, 2]}, ValueError, "n_step: expected"),
    ({"gamma": 2.0}, ValueError, "gamma: expected a number from 0 to 1, got 2.0"),
    ({"gamma": float("nan")}, ValueError, "gamma: expected a number from 0 to 1, got nan"),
    ({"fields": "obs"}, TypeError, "fields: expected a list of names, got the string 'obs'"),
    ({"next_fields": "obs"}, TypeError, "next_fields: expected a list of names, got the string 'obs'"),
    ({"offsets": {"obs": ()}}, ValueError, "offsets of 'obs': expected at least one integer, of at most"),
    ({"offsets": {"obs": (0.5,)}}, ValueError, "offsets of 'obs': expected at least one integer, of at most"),
    (
        {"offsets": {"obs": (1 << 40,)}},
        ValueError,
        "offsets of 'obs': expected at least one integer, of at most 1073741824",
    ),
    (
        {"offsets": 4},
        TypeError,
        r"offsets: expected a mapping of fields .* \{'observation': \(-3, -2, -1, 0\)\}, got 4",
    ),
    ({"offsets": "obs"}, TypeError, "offsets: expected a mapping of fields to the steps to stack.* got 'obs'"),
    ({"offsets": {"obs": 4}}, TypeError, r"offsets of 'obs': expected a list of steps, such as range\(-3, 1\).* 4"),
    ({"offsets": {"obs": "4"}}, TypeError, "offsets of 'obs': expected a list of steps"),
    ({"strict_context": True, "boundary": "short"}, ValueError, "strict_context needs boundary='strict'"),
    ({"squeeze": True, "length": 2}, ValueError, "squeeze needs windows of one step, got 2 steps"),
]


@pytest.mark.parametrize(("arguments", "error", "message"), BAD)
def test_bad_windows_are_refused_with_the_reason(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        Windows(**arguments)


def ask(reader: Reader, **options: Any) -> Any:
    return reader.sample(4, Windows(), **options)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda r: r.sample(-1, Windows()), ValueError, "batch_size: expected a positive integer, got -1"),
        (lambda r: r.sample(2.0, Windows()), ValueError, "batch_size: expected a positive integer, got 2.0"),
        (lambda r: ask(r, recent_steps=0), ValueError, "recent_steps: expected a positive integer, got 0"),
        (lambda r: ask(r, recent_episodes=-1), ValueError, "recent_episodes: expected a positive integer"),
        (lambda r: ask(r, recent_fraction=0.5), ValueError, "recent_fraction needs recent_steps or"),
        (lambda r: ask(r, recent_steps=1, recent_fraction=1.5), ValueError, "recent_fraction: expected a number"),
        (lambda r: r.sample_episodes(0), ValueError, "batch_size: expected a positive integer, got 0"),
        (lambda r: r.sample(4, Windows(next_fields=["x"])), KeyError, "no field 'x'; there are obs, action"),
        (lambda r: r.sample(4, Windows(offsets={"x": [0]})), KeyError, "no field 'x'; there are obs, action"),
        (lambda r: r.at(torch.zeros(2, 2), Windows()), DataError, r"index: expected int64 of shape \(batch, 3\)"),
        (lambda r: r.at(torch.zeros(3, dtype=torch.int64), Windows()), DataError, "index: expected int64 of shape"),
        (lambda r: r.at(torch.tensor([[0, 0, -1]]), Windows()), trajstore.EpisodeNotFoundError, "no window can"),
        (lambda r: r.at(torch.tensor([[-1, 0, 0]]), Windows()), trajstore.EpisodeNotFoundError, "no such episode"),
        (lambda r: r.at(torch.tensor([[0, -1, 0]]), Windows()), trajstore.EpisodeNotFoundError, "no such episode"),
        (lambda r: r.staged(4, Windows(), reuse=0), ValueError, "reuse: expected a positive number, got 0"),
        (lambda r: r.staged(4, Windows(weight="step")), ValueError, "weight='step': staged draws"),
        (lambda r: r.epoch(4, Windows(weight="step")), ValueError, "weight='step': an epoch holds every window"),
        (lambda r: r.epoch(4, Windows(length=99)), DataError, "no episode has 99 usable steps"),
        (lambda r: r.epoch(0, Windows()), ValueError, "batch_size: expected a positive integer, got 0"),
        (lambda r: r.batches(4, Windows(), prefetch=-1), ValueError, "prefetch: expected 0 or a positive integer"),
        (
            lambda r: r.sample(4, Windows(length=2), where=lambda t: t["length"] < 0),
            DataError,
            "restrictions allow",
        ),
        (lambda r: r.resize(cache_bytes=-1), ValueError, "cache_bytes"),
    ],
)
def test_bad_calls_are_refused_and_the_reader_goes_on(call: Any, error: type[Exception], message: str) -> None:
    reader = Reader(numbered(5, 6))
    with pytest.raises(error, match=message):
        call(reader)
    assert len(reader.sample(4, Windows(length=2))["index"]) == 4


def test_the_error_says_that_a_step_lacks_its_successor() -> None:
    store = trajstore.create(fresh_url(), Schema({"obs": Field("int64"), "action": Field("int64")}))
    writer = store.writer(commit_seconds=None)
    writer.append({"obs": 1, "action": 1})
    writer.commit()
    store.refresh()
    message = (
        "no episode has 1 usable step, so no such window exists; the longest of all has 0; a step is usable if"
    )
    with pytest.raises(trajstore.NotReadyError, match=message):
        Reader(store).sample(1, Windows.transitions())
    assert Reader(store).window_stats(Windows.transitions()) == {"n_windows": 0, "n_left_out": 0, "n_open": 1}
    writer.discard()


def test_a_filter_whose_windows_are_too_long_says_so() -> None:
    reader = Reader(numbered(5, 60))
    with pytest.raises(DataError, match=r"no episode that the restrictions allow has 6 usable steps, .* has 60"):
        reader.sample(4, Windows(length=6), where=lambda table: table["length"] < 10)


def test_an_empty_choice_of_fields_gives_masks_alone() -> None:
    batch = Reader(numbered(5)).sample(3, Windows(fields=(), length=2))
    assert set(batch) == {"valid", "learn", "is_first", "is_last", "terminated", "truncated", "index"}


def test_only_asked_fields_are_read() -> None:
    store = numbered(*[40] * 10)
    reader = Reader(store)
    reader.sample(100, Windows(fields=["action"]))
    assert set(reader.sample(4, Windows(fields=["action"]))) >= {"action", "valid"}
    columns = reader.assembler.cache._columns
    assert columns["action"].table.n_resident > 0
    assert columns["obs"].table.n_resident == 0
