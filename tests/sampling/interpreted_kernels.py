"""Kernels in Triton's interpreter against tensor operations, bit by bit.

`test_triton` runs this module in a process of its own, because Triton decides when it is imported whether to
interpret. By hand::

    TRITON_INTERPRET=1 python -m pytest tests/sampling/interpreted_kernels.py
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import trajstore
from tests.sampling.digests.reading import TRANSITIONS, WINDOWS
from tests.sampling.digests.stores import LENGTHS, SCHEMA, Codes, Places
from trajstore import Field, Priorities, Reader, ReplayBuffer, Ring, Schema, Windows
from trajstore.sampling.batches import triton_executor
from trajstore.sampling.batches.batch_program import BatchProgram
from trajstore.sampling.batches.outputs import flat_outputs
from trajstore.sampling.batches.torch_executor import TorchExecutor
from trajstore.sampling.batches.triton_executor import DeviceCounter, TritonExecutor, new_executor
from trajstore.sampling.priorities.sum_tree import SumTree
from trajstore.sampling.rng import CounterRng
from trajstore.sampling.triton import selection, tree_launches
from trajstore.sampling.triton.launching import counted_launches
from trajstore.sampling.window_starts import DrawnWindows

CPU = torch.device("cpu")
Flat = dict[str, torch.Tensor]
# Kinds that differ from others in numbers only are left out, because the interpreter is slow.
SIMILAR = {"of 2 steps", "of 8 steps", "with one group of fields", "with two fields", "of 3 steps, gamma 0.5"}
KINDS = {
    name: windows
    for name, windows in (WINDOWS | {f"transitions, {name}": kind for name, kind in TRANSITIONS.items()}).items()
    if windows.boundary != "cross" and name.removeprefix("transitions, ") not in SIMILAR
}


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Use kernels on the CPU, in few large programs: the interpreter takes as long for a small one."""
    torch.set_num_threads(1)
    monkeypatch.setattr(selection, "is_interpreted", True)
    monkeypatch.setattr(triton_executor, "BLOCKS", ((32, 1), (32, 32)))
    return


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Places:
    return Places(tmp_path_factory.mktemp("kernels"))


def resident(reader: Reader) -> Reader:
    """The reader, with all pages in its cache."""
    final = [path for path in reader.schema.fields if reader.schema[path].final]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selection, "is_interpreted", False)
        for windows in (Windows(), *([Windows(next_fields=final)] if final else [])):
            list(reader.epoch(256, windows))
    for _ in range(20):  # pages that no window touches are loaded some at a time
        reader.sample(1, Windows())
    assert reader.assembler.cache.resident_columns(reader.schema.fields) is not None
    return reader


@pytest.fixture(scope="module")
def steps(places: Places) -> Reader:
    """A reader of all kinds of episodes; tests do not change it."""
    return resident(Reader(places.steps, compiled=False))


def executor_of(reader: Reader, windows: Windows) -> TritonExecutor:
    executor = new_executor(reader.assembler.index, BatchProgram.of(reader.schema, windows))
    assert isinstance(executor, TritonExecutor)
    return executor


def reference(reader: Reader, windows: Windows, draw: DrawnWindows) -> Flat:
    """The batch of drawn windows, by tensor operations."""
    assembler = reader.assembler
    executor = TorchExecutor(assembler.index, BatchProgram.of(reader.schema, windows))
    plan = executor.plan(draw, assembler.kind(windows).starts)
    return executor.finish(plan, assembler.cache.gather(plan.wanted, {}))


def bits(value: torch.Tensor) -> torch.Tensor:
    return value.contiguous().view(-1).view(torch.uint8)


def assert_same(got: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    assert got.keys() == expected.keys()
    for key, value in expected.items():
        assert (got[key].shape, got[key].dtype) == (value.shape, value.dtype), key
        assert torch.equal(bits(got[key]), bits(value)), key


def check(reader: Reader, windows: Windows, sizes: tuple[int, ...] = (17,), low: int = 0) -> None:
    """Batches of several sizes, one after the other, are those of the reference; launches are counted."""
    executor, kind = executor_of(reader, windows), reader.assembler.kind(windows)
    rng, other = CounterRng(3, 7), CounterRng(3, 7)
    for n in sizes:
        with counted_launches() as names:
            got = executor.run(reader.assembler.cache, kind.starts, (n, rng, low), {})
        assert got is not None
        assert_same(got, reference(reader, windows, kind.starts.draw(n, other, low)))
        assert rng.state_dict() == other.state_dict()
        extra = ["sum_rewards"] * (windows.n_step is not None) + ["provenance"] * windows.provenance
        assert names == ["frame", "gather", *extra]
        assert len(names) <= 4


# ---- windows of every kind


@pytest.mark.parametrize("name", KINDS)
def test_a_batch_has_the_bits_of_tensor_operations(name: str, steps: Reader) -> None:
    check(steps, KINDS[name], (9,))


OFFSETS = st.lists(st.integers(-4, 4), min_size=1, max_size=3)


@st.composite
def kinds(draw: st.DrawFn) -> Windows:
    """Windows with any options that go together."""
    boundary = draw(st.sampled_from(("strict", "pad_left", "pad_right", "pad_both", "short")))
    low, more = draw(st.integers(1, 6)), draw(st.integers(0, 3))
    stacked = draw(st.sampled_from(((), ("observation",), ("observation/pixels", "action"))))
    return Windows(
        length=draw(st.integers(1, 5)),
        burn_in=draw(st.integers(0, 2)),
        bootstrap=draw(st.integers(0, 2)),
        stride=draw(st.integers(1, 3)),
        boundary=boundary,
        strict_context=boundary == "strict" and draw(st.booleans()),
        pad=draw(st.sampled_from(("repeat", "zero", 5))),
        weight=draw(st.sampled_from(("window", "step", "episode"))),
        fields=draw(st.sampled_from((None, ("reward",), ("observation", "action"), ()))),
        offsets={name: draw(OFFSETS) for name in stacked},
        next_fields=draw(st.sampled_from(((), ("observation/state",), ("reward", "observation/pixels")))),
        n_step=draw(st.sampled_from((None, low, (low, low + more)))),
        provenance=draw(st.booleans()),
    )


@settings(max_examples=12, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
@given(windows=kinds())
def test_windows_with_any_options_have_the_same_bits(steps: Reader, windows: Windows) -> None:
    if steps.n_windows(windows):
        check(steps, windows, (5,))


def test_a_batch_without_fields_has_masks(steps: Reader) -> None:
    windows = Windows(length=2, fields=())
    check(steps, windows, (3,))
    kind, rng = steps.assembler.kind(windows), CounterRng(3)
    counter = DeviceCounter(rng, CPU)
    executor_of(steps, windows).run(steps.assembler.cache, kind.starts, (3, counter, 0), {})
    assert counter.counter.tolist() == [3]


def test_programs_of_the_grid_share_a_batch(steps: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_executor, "BLOCKS", ((4, 1), (2, 4)))
    reader = steps
    check(reader, Windows(length=6, burn_in=2, boundary="pad_both", pad="zero", n_step=(1, 3)), (5, 3, 1))
    check(reader, Windows.transitions(n_step=2, provenance=True), (5, 1))


def test_draws_may_begin_at_a_later_window(steps: Reader) -> None:
    reader = steps
    check(reader, Windows(length=3), (9,), low=60)
    check(reader, Windows(length=3, weight="step"), (9,), low=30)


@pytest.mark.parametrize("n_step", [1, 5, (2, 9)])
def test_rewards_that_come_with_the_next_observation_are_summed(n_step: Any, places: Places) -> None:
    check(resident(Reader(places.late_rewards, compiled=False)), Windows.transitions(n_step=n_step), (11,))


def test_windows_that_cross_episodes_are_left_to_tensor_operations(steps: Reader, places: Places) -> None:
    reader = steps
    windows = WINDOWS["with n-step returns across episodes"]
    executor, kind, rng = executor_of(reader, windows), reader.assembler.kind(windows), CounterRng(1)
    assert executor.run(reader.assembler.cache, kind.starts, (4, rng, 0), {}) is None
    assert rng.counter == 0
    with counted_launches() as names:
        batch = flat_outputs(reader.sample(8, windows))
    assert not names
    assert batch.keys() == flat_outputs(Reader(places.steps).sample(8, windows)).keys()


# ---- columns

ODD: dict[str, Field] = {
    "one": Field("bool", chunk_rows=5),
    "three": Field("uint8", (3,), chunk_rows=7),
    "five": Field("int8", (5,), chunk_rows=3),
    "short": Field("uint16", (3,), chunk_rows=4),
    "half": Field("float16", (2,), chunk_rows=6),
    "brain": Field("bfloat16", (3,), chunk_rows=6),
    "word": Field("uint32", chunk_rows=9),
    "long": Field("uint64", (3,), chunk_rows=4),
    "double": Field("float64", (2,), chunk_rows=5),
    "wide": Field("float32", (4, 3), final=True, chunk_rows=8),
}


def odd_values(n: int, first: int, n_final: int = 0) -> dict[str, Any]:
    code = np.arange(first, first + n)
    values = {
        path: (code.reshape(-1, *(1,) * len(field.shape)) + np.zeros((1, *field.shape), np.int64)) % 120
        for path, field in ODD.items()
    }
    found = {path: value.astype(ODD[path].storage_dtype) for path, value in values.items()}
    found["brain"] = values["brain"].astype(ml_dtypes.bfloat16)
    wide = np.arange((n + n_final) * 12).reshape(-1, 4, 3) + first
    return found | {"wide": wide.astype(np.float32)}


def odd_reader() -> Reader:
    """A reader of rows of all sizes and dtypes, whose pages do not lie in the slots of their own numbers."""
    store = trajstore.create(f"memory://odd-{uuid.uuid4().hex}", Schema(ODD))
    writers = [store.writer(name, commit_seconds=None) for name in ("alpha", "beta")]
    for writer in writers:
        writer.append_episode(odd_values(9, 0, 1), terminated=True)
        writer.commit()
    reader = Reader(store, compiled=False)
    for i in range(4):  # the first stream outgrows its range of pages
        writers[0].append_episode(odd_values(11, 20 * i, 1), truncated=True)
        writers[0].commit()
        reader.refresh()
    for writer in writers:
        writer.close()
    return resident(reader)


@pytest.mark.parametrize("pad", ["repeat", "zero", 1])
def test_rows_of_all_sizes_and_dtypes_are_copied_and_padded(pad: Any) -> None:
    reader = odd_reader()
    columns = reader.assembler.cache.resident_columns(ODD)
    assert columns is not None
    assert not any(column.table.is_direct for column in columns)
    check(reader, Windows(length=4, burn_in=1, boundary="pad_both", pad=pad), (12, 2))
    check(reader, Windows.transitions(fields=["wide", "one"], offsets={"three": (-2, 0)}, pad=pad), (5,))


def test_large_rows_take_several_tiles() -> None:
    fields = {"frame": Field("uint8", (50, 41, 3), chunk_rows=3), "wide": Field("float32", (1024,), chunk_rows=2)}
    store = trajstore.create(f"memory://large-{uuid.uuid4().hex}", Schema(fields))
    rng = np.random.default_rng(0)
    with store.writer(commit_seconds=None) as writer:
        for n in (5, 9):
            frames = rng.integers(0, 256, (n, 50, 41, 3), np.uint8)
            writer.append_episode({"frame": frames, "wide": rng.random((n, 1024), np.float32)}, terminated=True)
    check(
        resident(Reader(store.refresh(), compiled=False)), Windows(length=2, boundary="pad_right", pad="zero"), (3,)
    )


REWARDS = ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
REWARDS = (*REWARDS, "float16", "bfloat16", "float32", "float64")


def random_rewards(rng: np.random.Generator, n: int, dtype: str) -> Any:
    if dtype == "bool":
        return rng.random(n) < 0.5
    if "float" in dtype:
        rewards = (rng.standard_normal(n) * 1000).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
        rewards[::5] = -0.0
        return rewards
    info = np.iinfo(dtype)
    return rng.integers(info.min, info.max, n, info.dtype)


@pytest.mark.parametrize("dtype", REWARDS)
def test_rewards_of_every_dtype_are_summed_in_the_same_order(dtype: str) -> None:
    field = Field(dtype, chunk_rows=6)
    store = trajstore.create(f"memory://rewards-{uuid.uuid4().hex}", Schema({"x": Field("int8"), "reward": field}))
    rng = np.random.default_rng(1)
    with store.writer(commit_seconds=None) as writer:
        for n in (3, 14, 30):
            rewards = random_rewards(rng, n, dtype)
            writer.append_episode({"x": np.zeros(n, np.int8), "reward": rewards}, terminated=n == 14)
    reader = resident(Reader(store.refresh(), compiled=False))
    for n_step in (1, 2, 3, 4, 6, 11) if dtype == "float32" else (7,):
        check(reader, Windows(length=2, n_step=n_step, boundary="pad_right"), (13,))


def test_tables_follow_columns_that_move(places: Places) -> None:
    reader = resident(Reader(places.steps, compiled=False, cache_bytes="1MiB"))
    windows, cache = Windows(length=3), reader.assembler.cache
    executor, kind = executor_of(reader, windows), reader.assembler.kind(windows)
    for i in range(3):
        got = executor.run(cache, kind.starts, (4, CounterRng(i), 0), {})
        assert got is not None
        assert_same(got, reference(reader, windows, kind.starts.draw(4, CounterRng(i))))
        before = [column.arena._memory for column in cache._columns.values()]  # held, so that addresses are new
        for column, memory in zip(cache._columns.values(), before, strict=True):
            column.arena.resize(len(memory), [range(len(memory))], 0, 0)
            memory.view(-1).view(torch.uint8).fill_(99)


def test_a_batch_that_is_not_resident_is_made_in_another_way(places: Places) -> None:
    reader = Reader(places.steps, compiled=False)
    windows = Windows(length=3)
    executor, kind, rng = executor_of(reader, windows), reader.assembler.kind(windows), CounterRng(1)
    assert executor.run(reader.assembler.cache, kind.starts, (4, rng, 0), {}) is None
    assert rng.counter == 0
    resident(reader)
    assert executor.run(reader.assembler.cache, kind.starts, (4, rng, 0), {}) is not None


# ---- given windows, outputs, counters


def test_given_windows_become_a_batch_with_their_weights(steps: Reader) -> None:
    reader = steps
    for windows in (Windows(length=5, boundary="short", n_step=(1, 4)), Windows.transitions(provenance=True)):
        kind = reader.assembler.kind(windows)
        draw = kind.starts.draw(9, CounterRng(5))
        weights = torch.rand(9), torch.rand(9, dtype=torch.float64)
        drawn = DrawnWindows(draw.entry, draw.start, draw.n, weights[1], weights[0])
        executor = executor_of(reader, windows)
        got = executor.run(reader.assembler.cache, kind.starts, drawn, {})
        assert got is not None
        assert_same(got, reference(reader, windows, drawn))
        outs = {key: torch.zeros_like(value) for key, value in got.items()}
        again = executor.run(reader.assembler.cache, kind.starts, drawn, outs)
        assert again is not None
        assert_same(again, got)
        assert all(again[key] is out for key, out in outs.items())


def test_the_memory_of_an_earlier_batch_is_written_to_directly(steps: Reader) -> None:
    reader = steps
    windows = Windows.transitions(n_step=2)
    executor, kind, cache = executor_of(reader, windows), reader.assembler.kind(windows), reader.assembler.cache
    first = executor.run(cache, kind.starts, (6, CounterRng(1), 0), {})
    assert first is not None
    addresses = {key: value.data_ptr() for key, value in first.items()}
    second = executor.run(cache, kind.starts, (6, CounterRng(2), 0), first)
    assert second is not None
    assert {key: value.data_ptr() for key, value in second.items()} == addresses
    assert_same(second, reference(reader, windows, kind.starts.draw(6, CounterRng(2))))
    with pytest.raises(ValueError, match=r"out 'observation/state': expected torch.float32 of shape \(5, 3\)"):
        executor.run(cache, kind.starts, (5, CounterRng(2), 0), first)


def test_a_counter_on_the_device_draws_the_next_batch_each_time(steps: Reader) -> None:
    reader = steps
    windows = Windows(length=2, weight="episode", n_step=(1, 3))
    executor, kind = executor_of(reader, windows), reader.assembler.kind(windows)
    rng = CounterRng(4, 11)
    counter = DeviceCounter(rng, CPU)
    for _ in range(3):
        got = executor.run(reader.assembler.cache, kind.starts, (5, counter, 0), {})
        assert got is not None
        assert_same(got, reference(reader, windows, kind.starts.draw(5, rng)))
        assert counter.counter.tolist() == [rng.counter]


def test_a_plan_says_the_same(places: Places) -> None:
    reader = Reader(places.steps, compiled=False)
    for name in ("with burn-in and bootstrap", "with padded frame stacks", "with n-step returns of 1 to 5 steps"):
        windows = WINDOWS[name]
        kind, index = reader.assembler.kind(windows), reader.assembler.index
        draw = kind.starts.draw(7, CounterRng(2))
        program = BatchProgram.of(reader.schema, windows)
        with counted_launches() as names:
            got = executor_of(reader, windows).plan(draw, kind.starts)
        assert names == ["frame"]
        expected = TorchExecutor(index, program).plan(draw, kind.starts)
        assert_same(got.known, expected.known)
        assert list(got.known) == list(expected.known)
        assert_same(got.positions, expected.positions)
        assert_same(got.exists, expected.exists)
        assert got.wanted.keys() == expected.wanted.keys()
        for key, rows in expected.wanted.items():
            assert got.wanted[key].path == rows.path
            assert torch.equal(got.wanted[key].row, rows.row)
            assert torch.equal(got.wanted[key].source, rows.source.expand(rows.row.shape))
        assert (got.targets is None) == (expected.targets is None)
        if got.targets is not None and expected.targets is not None:
            assert torch.equal(got.targets.n_steps, expected.targets.n_steps)
            assert torch.equal(got.targets.is_terminal, expected.targets.is_terminal)


# ---- readers and buffers


def test_readers_return_the_same_batches_with_kernels(places: Places) -> None:
    windows = Windows(length=4, burn_in=1, boundary="pad_right", n_step=2)
    readers = [Reader(places.steps, seed=5, compiled=compiled, cache_bytes=4096) for compiled in (True, False)]
    ring = Ring(1)
    for _ in range(2):
        assert_same(*(flat_outputs(reader.sample(6, windows)) for reader in readers))
        assert_same(*(flat_outputs(reader.sample(6, windows, out=ring)) for reader in readers))
    with counted_launches() as names:
        list(readers[1].epoch(64, windows))
    assert set(names) == {"frame"}


def test_live_rows_and_evicted_steps_are_no_obstacle(tmp_path: Path) -> None:
    options: dict[str, Any] = {"commit_seconds": None, "buffer_bytes": "64KiB", "fsync": False}
    codes = Codes()
    with ReplayBuffer(tmp_path, schema=SCHEMA, capacity=40, compiled=False, **options) as buffer:
        reader = buffer._session.reader
        for i, n in enumerate(LENGTHS):
            buffer.add_episode(codes.rows(n, 1), terminated=i % 2 == 0, truncated=i % 2 == 1, env=i % 2)
            for _ in range(3):
                buffer.append(codes.step(), env=7)
            if i % 4 == 3:
                buffer.flush()
            if i in (2, 5, 8):
                resident(reader)
                check(reader, Windows(length=2, burn_in=1, provenance=True), (9,))
                check(reader, Windows.transitions(n_step=2), (9,))


def test_prioritised_batches_are_the_same_with_kernels(places: Places) -> None:
    priorities = Priorities(normalize="buffer", stratified=True)
    readers = [Reader(places.steps, seed=5, compiled=c, priorities=priorities) for c in (True, False)]
    for i in range(3):
        expected, got = (reader.sample(8, Windows.transitions()) for reader in readers)
        assert torch.equal(got["index"], expected["index"])
        assert torch.allclose(got["priority"]["weight"], expected["priority"]["weight"])
        for reader in readers:
            reader.update_priorities(expected["index"], torch.arange(8) % 3 + i + 0.5)


# ---- the sum tree


def trees(masses: torch.Tensor, **options: Any) -> tuple[SumTree, SumTree]:
    """A tree with kernels, and one with tensor operations."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selection, "is_interpreted", True)
        ours = SumTree(CPU, compiled=False, **options)
        patch.setattr(selection, "is_interpreted", False)
        theirs = SumTree(CPU, compiled=False, **options)
    for tree in (ours, theirs):
        tree.rebuild(masses)
    return ours, theirs


@pytest.mark.parametrize("n", [1, 17, 300, 70_000])
def test_a_tree_is_drawn_from_and_changed_in_one_launch_each(n: int) -> None:
    rng = np.random.default_rng(n)
    for largest in (3, 1 << 40):
        masses = torch.from_numpy(rng.integers(0, largest, n) * (rng.random(n) < 0.5))
        masses[n // 2] = 1
        ours, theirs = trees(masses, with_min=True)
        index = torch.from_numpy(rng.integers(0, n, 70))  # some occur more than once
        mass = torch.from_numpy(rng.integers(0, largest, 70) * (rng.random(70) < 0.7))
        mass[-1] = largest
        with counted_launches() as names:
            ours.put(index, mass)
            theirs.put(index, mass)
            for stratified in (False, True):
                got = ours.draw(90, CounterRng(n, 5), stratified=stratified)
                expected = theirs.draw(90, CounterRng(n, 5), stratified=stratified)
                assert torch.equal(got[0], expected[0])
                assert torch.equal(got[1], expected[1])
        assert names == ["put", "draw", "draw"]
        assert torch.equal(ours._sums, theirs._sums)
        assert torch.equal(ours._mins, theirs._mins)
        total = int(ours.total)
        x = torch.tensor([0, total - 1, total // 2, total // 3])
        assert torch.equal(ours.find(x), theirs.find(x))


def test_many_masses_are_put_with_tensor_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    from trajstore.sampling.priorities import sum_tree

    assert sum_tree.MAX_PUT == tree_launches.MAX_PUT
    monkeypatch.setattr(sum_tree, "MAX_PUT", 8)
    ours, theirs = trees(torch.arange(100))
    with counted_launches() as names:
        for n in (8, 9):
            for tree in (ours, theirs):
                tree.put(torch.arange(n) * 3 % 7, torch.arange(n) + 1)
    assert names == ["put"]
    assert torch.equal(ours._sums, theirs._sums)


def test_empty_calls_launch_nothing() -> None:
    ours, _ = trees(torch.arange(5))
    none = torch.empty(0, dtype=torch.int64)
    with counted_launches() as names:
        ours.put(none, none)
        assert len(ours.draw(0, CounterRng(1))[0]) == len(ours.find(none)) == 0
    assert not names


def test_sample_runs_kernels_only(steps: Reader, places: Places) -> None:
    for windows, n in ((Windows(length=4), 2), (Windows.transitions(n_step=2), 3)):
        steps.rng = CounterRng(9)
        with counted_launches() as names:
            got = flat_outputs(steps.sample(6, windows))
        assert len(names) == n
        assert_same(got, flat_outputs(Reader(places.steps, seed=9).sample(6, windows)))
        with counted_launches() as names:
            ring = Ring(2)
            for _ in range(3):
                steps.sample(6, windows, out=ring)
        assert names == (["frame", "gather"] + ["sum_rewards"] * (n == 3)) * 3
