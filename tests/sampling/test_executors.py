"""All executors give the same batches, bit by bit: with tensor operations, which is the reference, and compiled."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import trajstore
from trajstore import Priorities, Reader, ReplayBuffer, Ring, Schema, Windows
from trajstore.sampling.batches import compiled_executor
from trajstore.sampling.batches.outputs import flat_outputs
from trajstore.testing import strategies

REFERENCE: dict[str, Any] = {"compiled": False}
PARTS = "compiled, in parts"
# Options of readers and buffers. In parts: as a batch is made that is large, by several threads.
EXECUTORS: dict[str, dict[str, Any]] = {"compiled": {"compiled": True}, PARTS: {"compiled": True}}
SMALL, LARGE = 2_000, 8 << 20  # bytes of a cache that holds a few chunks, and of one that holds everything
BATCHES = settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])

each_executor = pytest.mark.parametrize("options", EXECUTORS.values(), ids=EXECUTORS)
Outcome = Any
Side = Reader | ReplayBuffer


@pytest.fixture(autouse=True)
def _parts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make every batch in parts of a few windows, by three threads, if the test is to compare these."""
    if PARTS not in request.node.name:
        yield
        return
    n_threads = torch.get_num_threads()
    torch.set_num_threads(3)
    monkeypatch.setattr(compiled_executor, "_MANY_BYTES", 1)
    monkeypatch.setattr(compiled_executor, "_PART_ROWS", 8)
    yield
    torch.set_num_threads(n_threads)


# ---- what is compared


def outcome_of(action: Callable[[], Any]) -> Outcome:
    """What a call returned, in a form that can be compared bit by bit; or the error that it raised."""
    try:
        found = action()
    except (ValueError, KeyError, RuntimeError) as error:
        return type(error)
    batches = found if isinstance(found, list) else [found]
    return [[bits_of(key, value) for key, value in flat_outputs(batch).items()] for batch in batches]


def bits_of(key: str, value: torch.Tensor) -> tuple[str, torch.dtype, torch.Size, bytes]:
    if key.startswith(("n_step/", "priority/")) and value.is_floating_point():
        value = torch.where(value.isnan(), torch.nan, value)  # which NaN a sum of two of them is depends on the CPU
    return key, value.dtype, value.shape, value.cpu().contiguous().view(torch.uint8).numpy().tobytes()


def compare(sides: list[Side], action: Callable[[Side], Any]) -> Outcome:
    """Do the same with the reference and the other side; returns what came, which must be the same."""
    expected, found = (outcome_of(lambda side=side: action(side)) for side in sides)  # type: ignore[misc]
    if isinstance(expected, type) or isinstance(found, type):
        assert found == expected
        return expected
    assert len(found) == len(expected)
    for mine, other in zip(found, expected, strict=True):
        assert [part[:3] for part in mine] == [part[:3] for part in other]  # keys in order, dtypes, shapes
        assert [part[0] for part, same in zip(mine, other, strict=True) if part != same] == []
    return expected


# ---- what is drawn


@st.composite
def kinds(draw: st.DrawFn, schema: Schema, *, has_priorities: bool) -> Windows:
    """Windows of every kind that may fit a schema."""
    boundaries = ["strict", "pad_right", "short", "cross", *([] if has_priorities else ["pad_left", "pad_both"])]
    boundary = draw(st.sampled_from(boundaries))
    paths = st.lists(st.sampled_from(list(schema)), unique=True, min_size=1, max_size=3)
    steps = st.lists(st.integers(-3, 3), min_size=1, max_size=3)
    has_reward = schema.reward is not None and int(np.prod(schema[schema.reward].shape)) == 1
    is_single = draw(st.integers(0, 2)) == 0
    return Windows(
        length=1 if is_single else draw(st.integers(1, 4)),
        burn_in=0 if is_single else draw(st.integers(0, 2)),
        bootstrap=0 if is_single else draw(st.integers(0, 2)),
        stride=draw(st.integers(1, 3)),
        boundary=boundary,
        strict_context=boundary == "strict" and draw(st.booleans()),
        pad=draw(st.sampled_from(["repeat", "zero", 1])),
        weight="window" if has_priorities else draw(st.sampled_from(["window", "window", "step", "episode"])),
        fields=draw(st.none() | paths),
        offsets=draw(st.just({}) | st.dictionaries(st.sampled_from(list(schema)), steps, max_size=2)),
        next_fields=draw(st.just(()) | paths | st.just("final") if schema.final_fields else st.just(()) | paths),
        n_step=draw(st.sampled_from([None, 1, 2, 5, (1, 4)])) if has_reward else None,
        gamma=draw(st.sampled_from([0.0, 0.9, 1.0])),
        squeeze=is_single and draw(st.booleans()),
        provenance=draw(st.booleans()),
    )


ENDS = ({"terminated": True}, {"truncated": True}, {})


def growth(schema: Schema, n_envs: int = 3) -> st.SearchStrategy[list[Callable[[Any], None]]]:
    """Changes of a buffer or of a writer: whole episodes, steps of environments, and ends of episodes."""
    return st.lists(_new_episode(schema) | _new_steps(schema, n_envs), min_size=1, max_size=4)


@st.composite
def _new_episode(draw: st.DrawFn, schema: Schema) -> Callable[[Any], None]:
    data, end = draw(strategies.episodes(schema, max_steps=8)), draw(st.sampled_from(ENDS))

    def add(side: Any) -> None:
        append = side.add_episode if isinstance(side, ReplayBuffer) else side.append_episode
        append(data, env=0, **end)

    return add


@st.composite
def _new_steps(draw: st.DrawFn, schema: Schema, n_envs: int) -> Callable[[Any], None]:
    env = 1 + draw(st.integers(0, n_envs - 1))
    steps = [draw(strategies.steps(schema)) for _ in range(draw(st.integers(1, 5)))]
    end = draw(st.sampled_from((None, None, *ENDS[:2])))
    needs_final = len(schema.final_fields) == len(schema)
    has_final = end is not None and bool(schema.final_fields) and (needs_final or draw(st.booleans()))
    final = draw(strategies.steps(schema, final=True)) if has_final else None

    def add(side: Any) -> None:
        for step in steps[:-1]:
            side.append(step, env=env)
        side.append(steps[-1], env=env, final=final, **(end or {}))

    return add


def restrictions(data: st.DataObject) -> dict[str, Any]:
    options: list[dict[str, Any]] = [
        {},
        {},
        {"recent_steps": 7},
        {"recent_episodes": 2, "recent_fraction": 0.5},
        {"where": even_episodes},
    ]
    return data.draw(st.sampled_from(options))


def even_episodes(episodes: Any) -> Any:
    return episodes["episode"] % 2 == 0


def read_in_every_way(data: st.DataObject, sides: list[Side], windows: Windows) -> None:
    """Compare batches that are drawn, drawn ahead, named, and of an epoch."""
    n = data.draw(st.sampled_from([1, 5, 16]))
    options = restrictions(data)
    drawn = compare(sides, lambda side: side.sample(n, windows, **options))
    if isinstance(drawn, type):
        return
    rings = {id(side): Ring(2) for side in sides}
    compare(sides, lambda side: [copied(side.sample(n, windows, out=rings[id(side)])) for _ in range(3)])
    compare(sides, lambda side: side.at(side.sample(n, windows), windows))
    if windows.weight == "window":
        compare(sides, lambda side: [copied(batch) for batch in side.epoch(7, windows)])
    prefetch = data.draw(st.sampled_from([0, 2]))
    compare(sides, lambda side: first_batches(side.batches(n, windows, prefetch=prefetch, **options)))


def copied(batch: Any) -> dict[str, torch.Tensor]:
    return {key: value.clone() for key, value in flat_outputs(batch).items()}


def first_batches(batches: Any) -> list[dict[str, torch.Tensor]]:
    with batches:
        return [copied(batch) for batch in itertools.islice(batches, 3)]


# ---- the tests


@each_executor
@BATCHES
@given(data=st.data())
def test_batches_of_a_store_are_the_same(options: dict[str, Any], data: st.DataObject) -> None:
    schema = data.draw(strategies.schemas())
    store = trajstore.create(f"memory://executors-{uuid.uuid4().hex}", schema)
    for _ in range(data.draw(st.integers(1, 2))):
        writer = store.writer(commit_seconds=None)
        for _ in range(data.draw(st.integers(1, 3))):
            for change in data.draw(growth(schema)):
                change(writer)
            writer.commit()
        writer.release()  # as if it had died: open episodes stay open
    store.refresh()
    priorities = data.draw(st.none() | st.builds(Priorities, over=st.sampled_from(["start", "max"])))
    common: dict[str, Any] = {
        "priorities": priorities,
        "cache_bytes": data.draw(st.sampled_from([SMALL, LARGE])),
        "seed": data.draw(st.integers(0, 1 << 32)),
    }
    sides: list[Side] = [Reader(store, **common, **executor) for executor in (REFERENCE, options)]
    for _ in range(3):
        read_in_every_way(data, sides, data.draw(kinds(schema, has_priorities=priorities is not None)))


@each_executor
@BATCHES
@given(data=st.data())
def test_batches_of_a_buffer_are_the_same(options: dict[str, Any], data: st.DataObject) -> None:
    """Rows are live or committed, episodes grow, and a limit takes steps off the front."""
    schema = data.draw(strategies.schemas(max_fields=3))
    priorities = data.draw(st.none() | st.just(Priorities()))
    common: dict[str, Any] = {
        "schema": schema,
        "capacity": data.draw(st.sampled_from([None, 12, 30])),
        "priorities": priorities,
        "cache_bytes": LARGE,
        "buffer_bytes": "64KiB",
        "commit_seconds": None,
        "seed": data.draw(st.integers(0, 1 << 32)),
    }
    urls = [f"memory://executors-{uuid.uuid4().hex}" for _ in range(2)]
    buffers = [
        ReplayBuffer(url, **common, **executor) for url, executor in zip(urls, (REFERENCE, options), strict=True)
    ]
    try:
        for _ in range(data.draw(st.integers(2, 4))):
            for change in data.draw(growth(schema)):
                for buffer in buffers:
                    change(buffer)
            if data.draw(st.booleans()):
                for buffer in buffers:
                    buffer.flush()
            windows = data.draw(kinds(schema, has_priorities=priorities is not None))
            read_in_every_way(data, list(buffers), windows)
            if priorities is not None:
                update_some(buffers, data.draw(st.integers(0, 1 << 32)))
    finally:
        for buffer in buffers:
            buffer.close()


def update_some(buffers: list[ReplayBuffer], seed: int) -> None:
    values = np.random.default_rng(seed).uniform(0.0, 3.0, 6).astype(np.float32)
    found = [outcome_of(lambda buffer=buffer: buffer.sample(6)) for buffer in buffers]  # type: ignore[misc]
    if isinstance(found[0], type):
        assert found[0] == found[1]
        return
    for buffer in buffers:
        buffer.update_priorities(buffer.sample(6, prioritised=False)["index"], values)


@each_executor
def test_the_test_tells_batches_apart(options: dict[str, Any]) -> None:
    store = trajstore.create(f"memory://executors-{uuid.uuid4().hex}", Schema({"x": trajstore.Field("int64")}))
    with store.writer() as writer:
        writer.append_episode({"x": np.arange(50)}, terminated=True)
    store.refresh()
    sides: list[Side] = [Reader(store, seed=seed, **options) for seed in (1, 2)]
    with pytest.raises(AssertionError):
        compare(sides, lambda side: side.sample(8, Windows()))
