"""The sum tree against a list of Python integers, in both paths."""

from __future__ import annotations

import bisect
import copy
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from trajstore.errors import DataError
from trajstore.sampling.compiled import sum_tree_loops as sumtree_kernels
from trajstore.sampling.priorities import sum_tree as sumtree
from trajstore.sampling.priorities.sum_tree import NO_POSITIVE_MASS, SumTree
from trajstore.sampling.rng import HALF_SHIFTS, CounterRng

CPU = torch.device("cpu")
LIMIT = 1 << 62
both_paths = pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "torch"])

# Zeros are common, as are masses too large for a float.
masses = st.one_of(st.just(0), st.integers(0, 3), st.integers(0, 1 << 52))


def spread(n: int, some: list[int], seed: int) -> list[int]:
    """Many masses from a few, which is much faster than to generate them one by one."""
    return np.array(some)[np.random.default_rng(seed).integers(0, len(some), n)].tolist()


mass_lists = st.builds(spread, st.integers(0, 600), st.lists(masses, min_size=1, max_size=20), st.integers(0, 99))


@pytest.fixture(scope="module", autouse=True)
def _steps_down() -> Iterator[None]:
    """Let tensor operations start at a level of 32 nodes, so that small trees have levels below it too.

    They are too small for several threads, which would only wait for each other on a busy machine.
    """
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sumtree, "_SCANNED", 32)
        yield
    torch.set_num_threads(n_threads)


def ints(values: Any) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.int64)


def tree_of(values: list[int], compiled: bool, **options: Any) -> SumTree:
    tree = SumTree(CPU, compiled=compiled, **options)
    tree.rebuild(ints(values))
    return tree


def edges(values: list[int]) -> list[int]:
    """The first and the last number of every leaf that has any."""
    stops = list(accumulate(values))
    inside = [(stop - value, stop - 1) for value, stop in zip(values, stops, strict=True) if value]
    return [x for pair in inside for x in pair]


def found(values: list[int], numbers: list[int]) -> list[int]:
    stops = list(accumulate(values))
    return [bisect.bisect_right(stops, x) for x in numbers]


def expected_numbers(n: int, rng: CounterRng, total: int, stratified: bool) -> list[int]:
    """The numbers that a draw looks up, in integers of any size."""
    fractions = [(bits % (1 << 64)) >> 2 for bits in rng.bits(n, CPU).tolist()]
    if not stratified:
        return [(fraction * total) >> 62 for fraction in fractions]
    parts = [(total * i // n, total * (i + 1) // n) for i in range(n)]
    return [low + (fraction * (high - low) >> 62) for fraction, (low, high) in zip(fractions, parts, strict=True)]


def assert_is(tree: SumTree, values: list[int]) -> None:
    """Everything that the tree says is what the list says."""
    assert tree.n == len(values)
    assert tree.get(torch.arange(len(values))).tolist() == values
    assert tree.total.item() == sum(values)
    assert tree.n_positive.item() == sum(value > 0 for value in values)
    assert tree.smallest.item() == min((value for value in values if value), default=NO_POSITIVE_MASS)
    if values:
        assert tree.find(ints(edges(values))).tolist() == found(values, edges(values))


def changed(values: list[int], index: list[int], mass: list[int]) -> list[int]:
    values = values.copy()
    for i, value in zip(index, mass, strict=True):
        values[i] = value
    return values


# ---- changing and finding ------------------------------------------------------------------------------


@both_paths
@given(values=mass_lists)
def test_every_number_is_found_in_the_leaf_that_holds_it(compiled: bool, values: list[int]) -> None:
    assert_is(tree_of(values, compiled, with_min=True), values)


@both_paths
@given(data=st.data(), values=mass_lists.filter(len))
def test_put_sets_masses_and_the_last_of_several_counts(
    compiled: bool, data: st.DataObject, values: list[int]
) -> None:
    tree = tree_of(values, compiled, with_min=True)
    some = st.integers(0, min(len(values) - 1, data.draw(st.sampled_from((2, 600)), label="highest")))
    index = data.draw(st.lists(some, max_size=40), label="index")
    mass = data.draw(st.lists(masses, min_size=len(index), max_size=len(index)), label="mass")
    tree.put(ints(index), ints(mass))
    assert_is(tree, changed(values, index, mass))


@both_paths
@given(data=st.data(), values=mass_lists)
def test_put_range_sets_consecutive_masses(compiled: bool, data: st.DataObject, values: list[int]) -> None:
    tree = tree_of(values, compiled, with_min=True)
    start = data.draw(st.integers(0, len(values)), label="start")
    mass = data.draw(st.lists(masses, max_size=len(values) - start), label="mass")
    tree.put_range(start, ints(mass))
    assert_is(tree, values[:start] + mass + values[start + len(mass) :])


@both_paths
@given(values=mass_lists, sizes=st.lists(st.integers(0, 5000), max_size=5))
def test_resize_adds_zeros_and_drops_the_end(compiled: bool, values: list[int], sizes: list[int]) -> None:
    tree = tree_of(values, compiled, with_min=True)
    for n in sizes:
        tree.resize(n)
        values = (values + [0] * n)[:n]
        assert_is(tree, values)


@both_paths
def test_strided_tensors_are_taken_as_they_are(compiled: bool) -> None:
    tree = tree_of([1, 2, 3, 4], compiled, with_min=True)
    tree.put(torch.arange(4)[::2], ints([5, 9, 6, 9])[::2])
    assert_is(tree, [5, 2, 6, 4])
    tree.put_range(1, ints([7, 9, 8, 9])[::2])
    assert_is(tree, [5, 7, 8, 4])
    assert tree.find(torch.arange(24)[4::2]).tolist() == found([5, 7, 8, 4], list(range(4, 24, 2)))


@both_paths
def test_large_trees_are_found_level_by_level(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sumtree, "_SCANNED", 4096)
    rng = np.random.default_rng(5)
    values = rng.integers(0, 1 << 40, 100_003) * (rng.random(100_003) < 0.3)
    tree = SumTree(CPU, compiled=compiled)
    tree.rebuild(torch.from_numpy(values))
    index, mass = rng.integers(0, len(values), 5000), rng.integers(0, 1 << 40, 5000)
    tree.put(torch.from_numpy(index), torch.from_numpy(mass))
    for i, value in zip(index, mass, strict=True):
        values[i] = value
    stops = np.cumsum(values)
    assert tree.total.item() == stops[-1]
    x = np.concatenate([stops[values > 0] - 1, (stops - values)[values > 0], rng.integers(0, stops[-1], 3000)])
    assert np.array_equal(tree.find(torch.from_numpy(x)), np.searchsorted(stops, x, side="right"))


@both_paths
def test_appending_one_by_one_copies_only_now_and_then(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    copied = []
    move = SumTree._move
    monkeypatch.setattr(
        SumTree, "_move", lambda self, n, capacity: (copied.append(self.n), move(self, n, capacity))
    )
    tree = SumTree(CPU, compiled=compiled, with_min=True)
    for i in range(5000):
        tree.resize(i + 1)
        tree.put_range(i, ints([i]))
    assert_is(tree, list(range(5000)))
    assert sum(copied) < 6 * 5000
    for i in range(5000, 0, -1):
        tree.resize(i - 1)
    assert sum(copied) < 12 * 5000
    assert tree.nbytes < 1000


@both_paths
@pytest.mark.parametrize(("with_min", "bytes_per_leaf"), [(False, 8.6), (True, 9.2)])
def test_a_tree_takes_hardly_more_than_its_masses(compiled: bool, with_min: bool, bytes_per_leaf: float) -> None:
    tree = SumTree(CPU, compiled=compiled, with_min=with_min)
    tree.rebuild(torch.ones(100_000, dtype=torch.int64))
    assert 8 * 100_000 <= tree.nbytes <= bytes_per_leaf * 100_000


@both_paths
def test_totals_do_not_change_after_they_were_asked_for(compiled: bool) -> None:
    tree = tree_of([1, 2, 3], compiled, with_min=True)
    before = tree.total, tree.n_positive, tree.smallest, tree.get(ints([0]))
    tree.rebuild(ints([5, 5, 5, 5]))
    assert [int(b) for b in before] == [6, 3, 1, 1]


@both_paths
def test_a_copy_is_a_tree_of_its_own(compiled: bool) -> None:
    tree = tree_of([1, 2, 3], compiled, with_min=True)
    other = copy.deepcopy(tree)
    other.put(ints([0]), ints([9]))
    assert_is(tree, [1, 2, 3])
    assert_is(other, [9, 2, 3])
    assert other.draw(8, CounterRng(1))[1].tolist() == other.get(other.draw(8, CounterRng(1))[0]).tolist()


# ---- drawing -------------------------------------------------------------------------------------------


@given(
    values=mass_lists.filter(sum),
    n=st.integers(0, 300),
    seed=st.integers(0, (1 << 64) - 1),
    stratified=st.booleans(),
)
def test_both_paths_draw_what_integer_arithmetic_says(
    values: list[int], n: int, seed: int, stratified: bool
) -> None:
    leaf = found(values, expected_numbers(n, CounterRng(seed, 7), sum(values), stratified))
    for compiled in (True, False):
        rng = CounterRng(seed, 7)
        got = tree_of(values, compiled).draw(n, rng, stratified=stratified)
        assert got[0].tolist() == leaf
        assert got[1].tolist() == [values[i] for i in leaf]
        assert rng.state_dict() == {"seed": seed, "counter": 7 + n}


@both_paths
@pytest.mark.parametrize("stratified", [False, True])
@pytest.mark.parametrize(
    "values",
    [
        [LIMIT],
        [LIMIT - 1],
        [0, LIMIT - 1, 0, 1, 0],
        [1] + [LIMIT // 64 - 1] * 64,
        [(1 << 55) + i for i in range(100)],
        [LIMIT // 1000] * 1000,
    ],
    ids=["2**62", "2**62 - 1", "nearly all in one", "one and many", "100 large ones", "1000 equal ones"],
)
def test_masses_near_the_limit_are_drawn_exactly(compiled: bool, stratified: bool, values: list[int]) -> None:
    tree = tree_of(values, compiled, with_min=True)
    assert_is(tree, values)
    numbers = expected_numbers(2000, CounterRng(3), sum(values), stratified)
    assert max(numbers) < sum(values)
    assert tree.draw(2000, CounterRng(3), stratified=stratified)[0].tolist() == found(values, numbers)


@given(
    bits=st.integers(-(1 << 63), (1 << 63) - 1),
    limit=st.one_of(st.integers(1, LIMIT), st.integers(0, 62).map(lambda bit: 1 << bit)),
)
def test_random_bits_are_scaled_exactly(bits: int, limit: int) -> None:
    expected = ((bits % (1 << 64)) >> 2) * limit >> 62
    halves = ints([bits]) >> ints([33, 2])[:, None] & (1 << 31) - 1
    assert sumtree._scaled(halves, ints([limit])).item() == expected
    assert sumtree_kernels._scaled(np.uint64(bits % (1 << 64)), limit) == expected


def test_a_product_in_float_would_not_do() -> None:
    """The lowest bits of large numbers are random too."""
    numbers = sumtree._scaled(CounterRng(1).halves(4000, torch.tensor(HALF_SHIFTS)), ints([LIMIT - 1])[0])
    ones = [int(((numbers >> bit) & 1).sum()) for bit in range(62)]
    assert all(1800 < n < 2200 for n in ones)  # more than six standard deviations


@both_paths
@pytest.mark.parametrize("stratified", [False, True])
def test_leaves_are_drawn_in_proportion_to_their_masses(compiled: bool, stratified: bool) -> None:
    values = [(i * i) % 23 for i in range(200)]
    n, rng = 4000, CounterRng(11)
    tree = tree_of(values, compiled)
    counts = torch.zeros(200, dtype=torch.int64)
    for _ in range(50):
        counts += torch.bincount(tree.draw(n, rng, stratified=stratified)[0], minlength=200)
    expected = torch.tensor(values) * (50 * n / sum(values))
    drawn = expected > 0
    chi_square = ((counts - expected)[drawn] ** 2 / expected[drawn]).sum().item()
    freedom = int(drawn.sum()) - 1
    assert counts[~drawn].sum() == 0
    assert chi_square < freedom + 5 * (2 * freedom) ** 0.5  # five standard deviations


@both_paths
def test_stratified_draws_take_one_from_each_part(compiled: bool) -> None:
    values = [1] * 1000
    leaf, _ = tree_of(values, compiled).draw(64, CounterRng(4), stratified=True)
    parts = [(1000 * i // 64, 1000 * (i + 1) // 64) for i in range(64)]
    assert all(low <= x < high for x, (low, high) in zip(leaf.tolist(), parts, strict=True))
    few, mass = tree_of([0, 2, 0, 1], compiled).draw(64, CounterRng(4), stratified=True)  # most parts are empty
    assert set(few.tolist()) == {1, 3}
    assert bool((mass > 0).all())


@both_paths
def test_leaves_of_mass_zero_are_never_drawn(compiled: bool) -> None:
    values = torch.zeros(20_000, dtype=torch.int64)
    values[CounterRng(2).below(30, 20_000, CPU)] = 1
    tree, rng = SumTree(CPU, compiled=compiled), CounterRng(8)
    tree.rebuild(values)
    for stratified in (False, True):
        for _ in range(20):
            leaf, mass = tree.draw(5000, rng, stratified=stratified)
            assert bool((mass == 1).all())
            assert torch.equal(values[leaf], mass)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_draws_and_changes_as_a_cpu_does() -> None:
    device = torch.device("cuda")
    ours, theirs = SumTree(CPU, with_min=True), SumTree(device, with_min=True)
    values, rngs = CounterRng(1).bits(50_000, CPU) & 0xFFFFF, (CounterRng(2), CounterRng(2))
    ours.rebuild(values)
    theirs.rebuild(values.to(device))
    for _ in range(20):
        leaf, mass = ours.draw(512, rngs[0])
        assert torch.equal(theirs.draw(512, rngs[1])[0].cpu(), leaf)
        ours.put(leaf, mass // 2)
        theirs.put(leaf.to(device), (mass // 2).to(device))
    assert theirs.smallest.item() == ours.smallest.item()
    assert theirs.n_positive.item() == ours.n_positive.item()


# ---- without waiting for the device --------------------------------------------------------------------


class NoSync(TorchDispatchMode):
    """Refuses operations whose result the host would have to wait for."""

    FORBIDDEN = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "_unique2", "unique_dim")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket.__name__ not in self.FORBIDDEN, f"{func} waits for the device"
        return func(*args, **(kwargs or {}))


def work(device: torch.device) -> None:
    """Every operation that a training loop would repeat."""
    tree, rng = SumTree(device, compiled=False, with_min=True), CounterRng(1)
    tree.resize(10_000)
    tree.put_range(5, torch.ones(9000, dtype=torch.int64, device=device))
    for stratified in (False, True):
        leaf, mass = tree.draw(64, rng, stratified=stratified)
        assert leaf.shape == mass.shape == (64,)
        tree.put(leaf, mass + 1)
    assert tree.find(leaf).shape == (64,)
    assert tree.total.shape == tree.n_positive.shape == tree.smallest.shape == ()


def test_tensor_operations_work_without_values() -> None:
    work(torch.device("meta"))
    with FakeTensorMode():
        work(CPU)


def test_tensor_operations_never_wait_for_the_device() -> None:
    with NoSync():
        work(CPU)
    with NoSync(), pytest.raises(AssertionError, match="waits for the device"):
        torch.ones(1).item()


# ---- what can't be done --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("index", "mass"), [([0, 3], [5, 5]), ([0, -1], [5, 5]), ([0, 1], [5, -1]), ([1 << 60], [1])]
)
def test_wrong_indexes_and_masses_change_nothing(index: list[int], mass: list[int]) -> None:
    tree = tree_of([1, 2, 3], True, with_min=True)
    with pytest.raises(DataError, match=r"put: expected indexes in \[0, 3\) and masses >= 0, got index"):
        tree.put(ints(index), ints(mass))
    assert_is(tree, [1, 2, 3])


@pytest.mark.parametrize(
    "change", [lambda tree: tree.put_range(1, ints([4, -1])), lambda tree: tree.rebuild(ints([4, -1]))]
)
def test_negative_masses_of_a_block_change_nothing(change: Callable[[SumTree], None]) -> None:
    tree = tree_of([1, 2, 3], True, with_min=True)
    with pytest.raises(DataError, match="expected masses >= 0, got"):
        change(tree)
    assert_is(tree, [1, 2, 3])


@pytest.mark.parametrize("index", [[0, 3], [0, -1]])
def test_torch_refuses_wrong_indexes_on_the_cpu(index: list[int]) -> None:
    tree = tree_of([1, 2, 3], False, with_min=True)
    with pytest.raises((IndexError, RuntimeError)):
        tree.put(ints(index), ints([5, 5]))
    assert_is(tree, [1, 2, 3])


@both_paths
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tree: tree.put(ints([1]), ints([1, 2])), "put: expected int64 of one dimension and one length, "),
        (lambda tree: tree.put(ints([1]), torch.ones(1)), r"put: .* got .*int64 of .*, .*float32 of shape \(1,\)"),
        (lambda tree: tree.put(ints([1])[0], ints([1])[0]), r"put: expected .* of shape \(\)"),
        (lambda tree: tree.put_range(0, torch.ones(1)), "put_range: expected int64"),
        (lambda tree: tree.put_range(2, ints([1, 2])), r"inside the 3 leaves, got \[2, 4\)"),
        (lambda tree: tree.put_range(-1, ints([1])), r"inside the 3 leaves, got \[-1, 0\)"),
        (lambda tree: tree.find(torch.ones(1)), "find: expected int64"),
        (lambda tree: tree.rebuild(torch.ones(1)), "rebuild: expected int64"),
        (lambda tree: tree.resize(-1), "resize: expected n >= 0, got -1"),
        (lambda tree: tree.smallest, "smallest: the tree was made without with_min=True"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(compiled: bool, change: Callable[[SumTree], Any], message: str) -> None:
    tree = tree_of([1, 2, 3], compiled)
    with pytest.raises(DataError, match=message):
        change(tree)
    assert tree.get(torch.arange(3)).tolist() == [1, 2, 3]


@both_paths
def test_a_tree_without_leaves_gives_none(compiled: bool) -> None:
    tree, rng = SumTree(CPU, compiled=compiled, with_min=True), CounterRng(1)
    assert_is(tree, [])
    with pytest.raises(DataError, match="draw: the tree has no leaves"):
        tree.draw(1, rng)
    with pytest.raises(DataError, match="find: the tree has no leaves"):
        tree.find(ints([0]))
    assert rng.counter == 0


def test_without_mass_compiled_loops_refuse_and_tensor_operations_give_leaves_of_mass_zero() -> None:
    rng = CounterRng(1)
    with pytest.raises(DataError, match="draw: all 40 leaves have mass 0"):
        tree_of([0] * 40, True).draw(3, rng)
    assert rng.counter == 0
    leaf, mass = tree_of([0] * 40, False).draw(3, rng)
    assert bool((leaf < 40).all())
    assert mass.tolist() == [0, 0, 0]


@both_paths
@pytest.mark.parametrize("n", [1, 15, 16, 17, 600])
def test_numbers_outside_the_total_give_some_leaf(compiled: bool, n: int) -> None:
    leaf = tree_of([3] * n, compiled).find(ints([-1, 3 * n, 3 * n + 1, LIMIT, -LIMIT]))
    assert bool(((leaf >= 0) & (leaf < n)).all())


def test_compiled_loops_stay_inside_their_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run as plain Python, which sees an index that is too large."""
    for name in ("_right_half", "_fetch", "_descend"):
        monkeypatch.setattr(sumtree_kernels, name, getattr(sumtree_kernels, name).py_func)
    monkeypatch.setattr(sumtree_kernels, "_CACHED", 0)
    for n in (1, 17, 600, 5000):
        sums, _, offsets = tree_of([3] * n, True)._arrays
        leaf, rest = np.empty(5, np.int64), np.array([0, 3 * n - 1, 3 * n, LIMIT, -LIMIT])
        sumtree_kernels.find.py_func(sums, offsets, n, leaf, rest)
        assert leaf[:2].tolist() == [0, n - 1]


# ---- numba ---------------------------------------------------------------------------------------------


def test_both_paths_have_one_layout() -> None:
    assert sumtree_kernels.BITS == sumtree.BITS


def test_numba_is_imported_only_for_compiled_loops() -> None:
    script = (
        "import sys, torch, trajstore.sampling.priorities.sum_tree as s\n"
        "s.SumTree(torch.device('cpu'), compiled=False); s.SumTree(torch.device('meta'))\n"
        "assert 'numba' not in sys.modules\n"
        "s.SumTree(torch.device('cpu'))\n"
        "assert 'numba' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_without_numba_tensor_operations_do_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = tree_of([1, 2, 3], True).draw(10, CounterRng(1))[0]
    monkeypatch.delattr("trajstore.sampling.compiled.sum_tree_loops")
    monkeypatch.setitem(sys.modules, "trajstore.sampling.compiled.sum_tree_loops", None)
    tree = tree_of([1, 2, 3], True, with_min=True)
    assert tree._kernels is None
    assert_is(tree, [1, 2, 3])
    assert torch.equal(tree.draw(10, CounterRng(1))[0], expected)


# ---- any order of operations ---------------------------------------------------------------------------


class Trees(RuleBasedStateMachine):
    """Two trees and a list go through the same operations."""

    def __init__(self) -> None:
        super().__init__()
        self.values: list[int] = []
        self.trees = [SumTree(CPU, compiled=compiled, with_min=True) for compiled in (True, False)]
        self.rngs = [CounterRng(9), CounterRng(9), CounterRng(9)]

    @rule(n=st.integers(0, 700))
    def resize(self, n: int) -> None:
        for tree in self.trees:
            tree.resize(n)
        self.values = (self.values + [0] * n)[:n]

    @rule(mass=st.lists(masses, min_size=1, max_size=100))
    def append(self, mass: list[int]) -> None:
        n = len(self.values)
        for tree in self.trees:
            tree.resize(n + len(mass))
            tree.put_range(n, ints(mass))
        self.values = self.values + mass

    @rule(mass=mass_lists)
    def rebuild(self, mass: list[int]) -> None:
        for tree in self.trees:
            tree.rebuild(ints(mass))
        self.values = mass

    @precondition(lambda self: self.values)
    @rule(data=st.data(), n=st.integers(1, 50))
    def put(self, data: st.DataObject, n: int) -> None:
        index = data.draw(st.lists(st.integers(0, len(self.values) - 1), min_size=n, max_size=n))
        mass = data.draw(st.lists(masses, min_size=n, max_size=n))
        for tree in self.trees:
            tree.put(ints(index), ints(mass))
        self.values = changed(self.values, index, mass)

    @precondition(lambda self: sum(self.values))
    @rule(n=st.integers(0, 100), stratified=st.booleans())
    def draw(self, n: int, stratified: bool) -> None:
        numbers = expected_numbers(n, self.rngs[2], sum(self.values), stratified)
        for tree, rng in zip(self.trees, self.rngs, strict=False):
            leaf, mass = tree.draw(n, rng, stratified=stratified)
            assert leaf.tolist() == found(self.values, numbers)
            assert mass.tolist() == [self.values[i] for i in leaf]
            assert rng.counter == self.rngs[2].counter

    @invariant()
    def agree(self) -> None:
        for tree in self.trees:
            assert_is(tree, self.values)


Trees.TestCase.settings = settings(max_examples=40, stateful_step_count=15, deadline=None)
TestAnyOrderOfOperations = Trees.TestCase
