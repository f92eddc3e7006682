"""Running statistics against two passes in float64, however the rows are divided."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trajstore import DataError, Field, Schema
from trajstore.replay.statistics import RunningStatistics
from trajstore.schema import Array, round_to_bfloat16, widen_bfloat16

FLOATS = ["float16", "float32", "float64"]
INTS = ["int8", "int64", "uint8", "uint32", "uint64"]


def of(dtype: str, shape: tuple[int, ...] = (), **options: Any) -> RunningStatistics:
    return RunningStatistics(Schema({"x": Field(dtype, shape)}), **options)


def result(statistics: RunningStatistics, path: str = "x") -> dict[str, Any]:
    return statistics.result()[path]


def assert_matches(found: dict[str, Any], rows: Array, *, rtol: float = 1e-12) -> None:
    """What was found is what two passes over all finite rows give, element by element."""
    wide = rows.astype(np.float64)
    flat = wide.reshape(len(wide), -1)
    for i, column in enumerate(flat.T):
        finite = column[np.isfinite(column)]
        exact = rows.reshape(len(rows), -1)[:, i][np.isfinite(column)]
        assert found["count"].reshape(-1)[i] == len(finite)
        assert found["n_nonfinite"].reshape(-1)[i] == len(column) - len(finite)
        if len(finite):
            spread = float(np.ptp(finite))
            mean = finite[0] + (finite - finite[0]).mean()
            tiny = np.abs(finite).max() * 1e-15 + spread * rtol
            assert found["mean"].reshape(-1)[i] == pytest.approx(mean, rel=1e-14, abs=tiny)
            assert found["std"].reshape(-1)[i] == pytest.approx((finite - mean).std(), rel=1e-10, abs=tiny)
            assert found["min"].reshape(-1)[i] == exact.min()
            assert found["max"].reshape(-1)[i] == exact.max()
        else:
            assert all(np.isnan(found[name].reshape(-1)[i]) for name in ("mean", "std", "min", "max"))


def parts_of(n: int, cuts: Sequence[int]) -> list[slice]:
    edges = [0, *sorted(min(cut, n) for cut in cuts), n]
    return [slice(a, b) for a, b in itertools.pairwise(edges)]


@st.composite
def divided(draw: st.DrawFn) -> tuple[Array, list[slice]]:
    """Rows around an offset that may be large, with or without holes, and where to divide them."""
    n = draw(st.integers(1, 300))
    shape = draw(st.sampled_from([(), (3,), (2, 2)]))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    rows = rng.normal(draw(st.sampled_from([0.0, 1e3, -1e9])), draw(st.sampled_from([1e-3, 1.0])), (n, *shape))
    if draw(st.booleans()):
        rows[rng.random(rows.shape) < draw(st.sampled_from([0.1, 0.9]))] = draw(
            st.sampled_from([np.nan, np.inf, -np.inf])
        )
    return rows, parts_of(n, draw(st.lists(st.integers(0, 300), max_size=8)))


@given(divided())
def test_any_division_of_rows_gives_what_two_passes_give(case: tuple[Array, list[slice]]) -> None:
    rows, parts = case
    statistics = of("float64", rows.shape[1:])
    for part in parts:
        statistics.update({"x": rows[part]})
    assert_matches(result(statistics), rows, rtol=1e-9)


@given(divided())
def test_merged_parts_give_what_the_whole_gives(case: tuple[Array, list[slice]]) -> None:
    rows, parts = case
    whole = of("float64", rows.shape[1:])
    for part in parts:
        other = of("float64", rows.shape[1:])
        other.update({"x": rows[part]})
        whole.merge(other)
    assert_matches(result(whole), rows, rtol=1e-9)


def test_single_rows_and_many_at_once_count_alike() -> None:
    rows = np.random.default_rng(0).normal(5, 2, (1000, 4)).astype(np.float32)
    one_by_one, at_once = of("float32", (4,)), of("float32", (4,))
    for i in range(len(rows)):
        one_by_one.update({"x": rows[i : i + 1]})
    at_once.update({"x": rows})
    assert_matches(result(one_by_one), rows)
    assert_matches(result(at_once), rows)


@pytest.mark.parametrize("offset", [1e6, 1e9, 1e12])
def test_a_large_offset_costs_no_digits_of_the_deviation(offset: float) -> None:
    rng = np.random.default_rng(1)
    rows = offset + rng.integers(-8, 9, 20_000) / 1024.0  # exact in float64
    statistics = of("float64")
    for start in range(0, len(rows), 37):
        statistics.update({"x": rows[start : start + 37]})
    reference = (rows - offset).std()
    assert float(result(statistics)["std"]) == pytest.approx(reference, rel=1e-9)
    assert float(result(statistics)["mean"]) - offset == pytest.approx((rows - offset).mean(), abs=offset * 4e-16)


@pytest.mark.parametrize("dtype", FLOATS + INTS)
def test_every_dtype_is_counted_with_its_exact_range(dtype: str) -> None:
    rng = np.random.default_rng(2)
    if dtype in FLOATS:
        rows = rng.normal(0, 100, (257, 2)).astype(dtype)
    else:
        info = np.iinfo(dtype)
        rows = rng.integers(info.min, info.max, (257, 2), dtype=dtype, endpoint=True)
        rows[0] = info.min, info.max
    statistics = of(dtype, (2,))
    for part in parts_of(len(rows), [1, 2, 3, 100]):
        statistics.update({"x": rows[part]})
    found = result(statistics)
    assert_matches(found, rows, rtol=1e-9)
    assert found["min"].dtype == found["max"].dtype == np.dtype(dtype)


def test_flags_count_as_0_and_1() -> None:
    statistics = of("bool")
    statistics.update({"x": np.array([True, False, False, False])})
    found = result(statistics)
    assert (found["mean"], found["min"], found["max"]) == (0.25, 0, 1)


def test_bfloat16_is_counted_by_its_value_not_by_its_bits() -> None:
    bits = round_to_bfloat16(np.linspace(-3, 3, 50, dtype=np.float32))
    statistics = of("bfloat16")
    statistics.update({"x": bits})
    assert_matches(result(statistics), widen_bfloat16(bits))


def test_a_field_without_a_final_value_has_fewer_rows() -> None:
    statistics = RunningStatistics(
        Schema({"observation": Field("float32", final=True), "reward": Field("float32")})
    )
    statistics.update({"observation": np.ones(3, np.float32), "reward": np.ones(3, np.float32)})
    statistics.update({"observation": np.ones(1, np.float32)})
    assert int(statistics.result()["observation"]["count"]) == 4
    assert int(statistics.result()["reward"]["count"]) == 3


def test_images_are_reduced_over_all_elements_and_the_result_says_so() -> None:
    rows = np.random.default_rng(3).integers(0, 256, (30, 72, 72), dtype=np.uint8)  # more than a block
    statistics = RunningStatistics(Schema({"x": Field("uint8", (72, 72)), "y": Field("uint8", (64, 64))}))
    statistics.update({"x": rows[:1], "y": rows[:1, :64, :64].copy()})
    statistics.update({"x": rows[1:][:, ::-1]})
    found = result(statistics)
    assert found["is_reduced"]
    assert not statistics.result()["y"]["is_reduced"]
    assert statistics.result()["y"]["mean"].shape == (64, 64)
    assert_matches(found, rows.reshape(-1, 1))


def test_only_the_chosen_fields_are_looked_at() -> None:
    schema = Schema({"a": {"b": Field("float32"), "c": Field("float32")}, "d": Field("float32")})
    statistics = RunningStatistics(schema, fields=["a"])
    statistics.update({"a/b": np.ones(1, np.float32), "d": np.ones(1, np.float32)})
    assert list(statistics.result()) == ["a/b", "a/c"]
    with pytest.raises(KeyError, match="no field 'e'"):
        RunningStatistics(schema, fields=["e"])
    with pytest.raises(TypeError, match="the string 'a'"):
        RunningStatistics(schema, fields="a")


@pytest.mark.parametrize("rows", [np.ones((2, 3)), np.ones((2, 4), np.float32), np.float32(1.0)])
def test_rows_of_another_dtype_or_shape_are_refused(rows: Any) -> None:
    statistics = of("float32", (3,))
    with pytest.raises(DataError, match="field 'x': expected float32"):
        statistics.update({"x": rows})
    assert not result(statistics)["count"].any()


def test_an_unknown_field_is_refused() -> None:
    with pytest.raises(DataError, match="field 'y'"):
        of("float32").update({"y": np.ones(1, np.float32)})


def test_what_was_handed_in_may_be_changed_afterwards() -> None:
    statistics, rows = of("float32"), np.ones(1, np.float32)
    statistics.update({"x": rows})
    rows[:] = 7
    assert result(statistics)["max"] == 1


def test_values_whose_squares_overflow_warn_nobody() -> None:
    statistics = of("float64")
    for value in (1e200, -1e200, 1e308, -1e308):
        statistics.update({"x": np.full(100, value)})
    assert result(statistics)["max"] == 1e308


def test_a_state_goes_on_exactly_where_it_was_taken() -> None:
    rows = np.random.default_rng(4).normal(size=(300, 2))
    first, second = of("float64", (2,)), of("float64", (2,))
    second.update({"x": np.full((5, 2), 9.0)})  # to be forgotten
    first.update({"x": rows[:10]})
    second.load_state_dict(first.state_dict())
    for statistics in (first, second):
        statistics.update({"x": rows[10:17]})
        statistics.update({"x": rows[17:]})
    for name, value in result(first).items():
        np.testing.assert_array_equal(value, result(second)[name])
    assert_matches(result(second), rows)


def test_a_state_is_a_copy_of_plain_arrays() -> None:
    statistics = of("int64")
    statistics.update({"x": np.arange(5)})
    state = statistics.state_dict()
    assert all(type(value) is np.ndarray for value in state["x"].values())
    state["x"]["mean"][...] = 100
    assert result(statistics)["mean"] == 2


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (of("float32", (3,)), "of shape \\(2,\\), got"),
        (of("float64", (2,), max_elements=1), "got .* of shape \\(\\)"),
        (of("float64", (2,)), "min: expected float32"),
        (RunningStatistics(Schema({"y": Field("float32", (2,))})), "expected statistics of x, got those of y"),
    ],
)
def test_other_fields_or_shapes_are_not_merged(other: RunningStatistics, message: str) -> None:
    mine = of("float32", (2,))
    with pytest.raises(ValueError, match=message):
        mine.merge(other)
    with pytest.raises(ValueError, match=message):
        mine.load_state_dict(other.state_dict())


def test_merging_with_itself_counts_everything_twice() -> None:
    statistics, rows = of("float64"), np.arange(5.0)
    statistics.update({"x": rows})
    statistics.merge(statistics)
    assert_matches(result(statistics), np.tile(rows, 2))


def test_threads_lose_no_rows() -> None:
    statistics, rows = of("float64"), np.arange(3.0)

    def add() -> None:
        for _ in range(500):
            statistics.update({"x": rows})

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert_matches(result(statistics), np.tile(rows, 2000))


# ---- normalizers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_normalised_values_have_mean_0_and_deviation_1(dtype: torch.dtype) -> None:
    rows = np.random.default_rng(5).normal([3, -1], [0.5, 2], (2000, 2))
    statistics = of("float64", (2,))
    statistics.update({"x": rows})
    normal = statistics.normalizer("x")(torch.from_numpy(rows).to(dtype).reshape(50, 40, 2))
    assert normal.dtype == dtype
    assert normal.shape == (50, 40, 2)
    flat = normal.double().reshape(-1, 2)
    tolerance = {torch.float64: 1e-7, torch.float32: 1e-5}.get(dtype, 0.02)
    if dtype == torch.float64:
        exact = (rows - rows.mean(0)) / np.sqrt(rows.var(0) + 1e-8)
        np.testing.assert_allclose(flat.numpy(), exact, rtol=1e-10, atol=1e-12)
    assert torch.allclose(flat.mean(0), torch.zeros(2).double(), atol=tolerance)
    assert torch.allclose(flat.std(0, correction=0), torch.ones(2).double(), atol=tolerance)


def test_an_offset_that_float32_barely_holds_is_subtracted_exactly() -> None:
    rows = (1e6 + np.arange(0, 64) / 16).astype(np.float32)  # exact; its mean is not
    statistics = of("float32")
    statistics.update({"x": np.append(rows, np.float32(1e6 + 1 / 16))})
    wide = np.append(rows, np.float32(1e6 + 1 / 16)).astype(np.float64)
    normal = statistics.normalizer("x", eps=0.0)(torch.from_numpy(rows))
    np.testing.assert_allclose(normal.numpy(), (rows - wide.mean()) / wide.std(), atol=1e-6)


def test_integers_and_flags_become_float32_and_images_are_scaled_as_a_whole() -> None:
    rows = np.random.default_rng(6).integers(0, 256, (4, 80, 80), dtype=np.uint8)
    statistics = of("uint8", (80, 80))
    statistics.update({"x": rows})
    normal = statistics.normalizer("x")(torch.from_numpy(rows))
    assert normal.dtype == torch.float32
    assert float(normal.mean()) == pytest.approx(0, abs=1e-4)
    flags = of("bool")
    flags.update({"x": np.array([True, False])})
    assert flags.normalizer("x")(torch.tensor([True, False])).tolist() == pytest.approx([1, -1], abs=1e-6)


def test_a_constant_is_normalised_to_0_and_clipping_bounds_the_rest() -> None:
    statistics = of("float32")
    statistics.update({"x": np.full(10, 3, np.float32)})
    normal = statistics.normalizer("x", clip=5.0)(torch.tensor([3.0, 4.0, -4.0]))
    assert normal.tolist() == [0.0, 5.0, -5.0]


def test_a_normalizer_stays_as_it_was_made() -> None:
    statistics = of("float32")
    statistics.update({"x": np.array([-1, 1], np.float32)})
    normalizer = statistics.normalizer("x")
    statistics.update({"x": np.full(100, 50, np.float32)})
    assert normalizer(torch.tensor(1.0)).item() == pytest.approx(1.0)


def test_a_normalizer_works_where_no_memory_is() -> None:
    statistics = of("float32", (2,))
    statistics.update({"x": np.ones((2, 2), np.float32)})
    assert statistics.normalizer("x")(torch.empty(5, 2, device="meta")).shape == (5, 2)


def test_what_can_not_be_normalised_is_refused() -> None:
    statistics = of("float32", (2,))
    statistics.update({"x": np.array([[1, np.nan]], np.float32)})
    with pytest.raises(DataError, match="no finite value was counted"):
        statistics.normalizer("x")
    statistics.update({"x": np.ones((1, 2), np.float32)})
    with pytest.raises(DataError, match=r"expected shape \(..., 2\), got \(2, 3\)"):
        statistics.normalizer("x")(torch.ones(2, 3))
    with pytest.raises(KeyError, match="no field 'y'"):
        statistics.normalizer("y")
    with pytest.raises(ValueError, match="clip: expected"):
        statistics.normalizer("x", clip=0.0)
