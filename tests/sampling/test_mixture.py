"""Mixtures: exact fractions, empty sources, joined batches, priorities, exact resume."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import trajstore
from trajstore import DataError, Field, Linear, Priorities, Ring, Schema, SchemaError, Store, Windows
from trajstore.errors import NotReadyError
from trajstore.sampling.apportionment import apportion
from trajstore.sampling.mixture import Mixture
from trajstore.sampling.reader import Reader

PLAIN = Schema({"x": Field("float32", (2,))})


class Fake:
    """A source that gives numbers of its own, and remembers what it was asked for."""

    def __init__(self, value: float = 0.0, schema: Schema | None = PLAIN, **more: torch.Tensor) -> None:
        self.value, self.more = value, more
        self._schema = schema
        self.asked: list[int] = []
        self.updates: list[tuple[Any, ...]] = []
        self.is_empty = False

    @property
    def schema(self) -> Schema | None:
        if self._schema is None:
            raise NotReadyError("no schema yet")
        return self._schema

    def sample(self, batch_size: int, *args: Any, **kwargs: Any) -> dict[str, Any]:
        if self.is_empty:
            raise NotReadyError("nothing here")
        start = sum(self.asked)
        self.asked.append(batch_size)
        batch = {"x": torch.full((batch_size, 2), self.value), "more": dict(self.more)}
        index = torch.arange(start, start + batch_size)
        return batch | {"index": torch.stack([torch.zeros_like(index), torch.zeros_like(index), index], 1)}

    def update_priorities(self, *args: Any) -> int:
        self.updates.append(args)
        return 1


def fakes(n: int) -> list[Fake]:
    return [Fake(float(i)) for i in range(n)]


def counts_of(batch: dict[str, Any], n: int) -> list[int]:
    return torch.bincount(batch["source"], minlength=n).tolist()


def filled(name: str, value: float, schema: Schema | None = None, n: int = 30) -> Store:
    """A store in memory whose observations all have one value."""
    store = trajstore.create(f"memory://mixing-{name}-{next(_numbers)}", schema)
    fields: dict[str, Any] = {
        "observation": np.full((n + 1, 3), value, np.float32),
        "action": np.arange(n),
        "reward": np.full(n, value, np.float32),
    }
    with store.writer() as writer:
        writer.append_episode(fields, truncated=True)
    store.refresh()
    return store


_numbers = itertools.count()


# ---- fractions ----------------------------------------------------------------------------------------------

weights = st.lists(st.floats(0.001, 10), min_size=1, max_size=5)


@given(weights, st.lists(st.integers(1, 40), min_size=1, max_size=40))
def test_counts_stay_within_a_few_windows_of_the_exact_fractions(each: list[float], sizes: list[int]) -> None:
    sources = fakes(len(each))
    mixture = Mixture({str(i): pair for i, pair in enumerate(zip(sources, each, strict=True))})
    totals = np.zeros(len(each))
    for n_batches, size in enumerate(sizes, 1):
        batch = mixture.sample(size)
        assert len(batch["x"]) == len(batch["index"]) == len(batch["source"]) == size
        totals += counts_of(batch, len(each))
        wanted = sum(sizes[:n_batches]) * np.array(each) / sum(each)
        assert np.abs(totals - wanted).max() < len(each)
    assert list(mixture.stats()["counts"].values()) == totals.tolist()


def test_odd_batches_alternate_so_that_halves_are_exact() -> None:
    mixture = Mixture({"a": Fake(), "b": Fake()})
    assert [counts_of(mixture.sample(5), 2) for _ in range(4)] == [[3, 2], [2, 3], [3, 2], [2, 3]]


def test_a_batch_of_one_goes_round_by_weight() -> None:
    mixture = Mixture({"a": (Fake(), 3), "b": (Fake(), 1)})
    got = [int(mixture.sample(1)["source"]) for _ in range(400)]
    assert got.count(1) == 100
    assert all(1 in got[i : i + 8] for i in range(392))


@given(
    st.integers(1, 100),
    st.lists(st.floats(-3, 30), min_size=1, max_size=5),
    st.lists(st.integers(0, 5), min_size=5, max_size=5),
)
def test_apportioned_numbers_have_the_sum_and_keep_what_is_settled(
    n: int, shares: list[float], settled: list[int]
) -> None:
    at_least = settled[: len(shares)]
    n = max(n, sum(at_least))
    counts = apportion(n, dict(enumerate(shares)), at_least)
    assert sum(counts) == n
    assert all(count >= least for count, least in zip(counts, at_least, strict=True))


def test_weights_follow_their_schedules_exactly() -> None:
    demo = Linear(0.5, 0.1, 100)
    mixture = Mixture({"demo": (Fake(), demo), "online": (Fake(), lambda n: 1 - demo(n))})
    got = [counts_of(mixture.sample(64), 2)[0] for _ in range(200)]
    assert got[0] == 32
    assert set(got[101:]) == {6, 7}  # 6.4
    for n in range(1, 201):
        assert abs(sum(got[:n]) - 64 * sum(demo(i) for i in range(n))) <= 0.5 + 1e-9
    assert mixture.stats()["fractions"]["demo"] == pytest.approx(0.1)


def test_a_source_of_weight_0_is_not_asked() -> None:
    never = Fake()
    never.is_empty = True
    ends = Linear(0.3, 0.0, 2)
    mixture = Mixture({"a": (Fake(), 0.4), "b": (Fake(), 0.3), "ends": (Fake(), ends), "never": (never, 0)})
    got = [int(mixture.sample(1)["source"]) for _ in range(50)]
    assert got[:2] == [0, 1]  # so the third is owed more than the others when its weight comes to 0
    assert set(got[2:]) == {0, 1}


def test_drawn_sources_have_the_fractions_on_average_only() -> None:
    mixture = Mixture({"a": (Fake(), 0.25), "b": (Fake(), 0.75)}, exact=False, seed=3)
    got = [counts_of(mixture.sample(100), 2)[0] for _ in range(400)]
    mean, deviation = np.mean(got), np.std(got)
    assert abs(mean - 25) < 4 * math.sqrt(100 * 0.25 * 0.75 / 400)
    assert deviation == pytest.approx(math.sqrt(100 * 0.25 * 0.75), rel=0.2)


@pytest.mark.parametrize("weight", [-1.0, math.nan, math.inf, lambda n: -1.0])
def test_weights_are_finite_and_not_negative(weight: Any) -> None:
    with pytest.raises(ValueError, match="weight of 'a' after 0 batches"):
        Mixture({"a": (Fake(), weight)})


def test_some_weight_is_above_0() -> None:
    with pytest.raises(ValueError, match="all are 0"):
        Mixture({"a": (Fake(), 0), "b": (Fake(), 0)})
    mixture = Mixture({"a": (Fake(), Linear(1, 0, 1))})
    mixture.sample(2)
    with pytest.raises(ValueError, match="weights after 1 batches"):
        mixture.sample(2)


# ---- empty sources ------------------------------------------------------------------------------------------


def test_an_empty_source_is_an_error_that_names_it_and_changes_nothing() -> None:
    full, empty = Fake(), Fake()
    empty.is_empty = True
    mixture = Mixture({"full": full, "empty": empty}, exact=False)
    before = mixture.state_dict()
    with pytest.raises(NotReadyError, match="source 'empty': nothing here"):
        mixture.sample(8)
    assert mixture.state_dict() == before


@pytest.mark.parametrize("exact", [True, False])
def test_the_share_of_an_empty_source_goes_to_the_others(exact: bool) -> None:
    a, b, c = fakes(3)
    c.is_empty = True
    mixture = Mixture({"a": (a, 1), "b": (b, 3), "c": (c, 4)}, exact=exact, when_empty="others")
    for _ in range(50):
        assert counts_of(mixture.sample(7), 3)[2] == 0
    totals = mixture.stats()["counts"]
    assert totals["a"] + totals["b"] == 350
    assert totals["a"] == pytest.approx(87.5, abs=1 if exact else 4 * math.sqrt(350 * 3 / 16))
    c.is_empty = False
    later = [counts_of(mixture.sample(80), 3) for _ in range(20)]
    if exact:
        assert later[5:] == [[10, 30, 40]] * 15  # nothing is made up for
    assert sum(got[2] for got in later) == pytest.approx(800, abs=1 if exact else 4 * math.sqrt(400))


def test_a_source_that_stays_empty_costs_no_second_call_to_the_others() -> None:
    a, b = fakes(2)
    b.is_empty = True
    mixture = Mixture({"a": a, "b": b}, when_empty="others")
    for _ in range(4):
        mixture.sample(10)
    assert a.asked == [5, 5, 10, 10, 10]
    resumed = Mixture({"a": a, "b": b}, when_empty="others")
    resumed.load_state_dict(mixture.state_dict())
    resumed.sample(10)
    assert a.asked[5:] == [10]


def test_windows_stand_source_by_source_whichever_was_asked_first() -> None:
    a, b = fakes(2)
    b.is_empty = True
    mixture = Mixture({"a": a, "b": b}, when_empty="others")
    mixture.sample(10)
    b.is_empty = False
    assert mixture.sample(10)["source"].tolist() == [0] * 5 + [1] * 5


def test_windows_given_before_a_source_was_found_empty_are_kept() -> None:
    a, b = fakes(2)
    b.is_empty = True
    batch = Mixture({"a": a, "b": b}, when_empty="others").sample(10)
    assert batch["index"][:, 2].tolist() == list(range(10))


def test_when_all_are_empty_the_error_names_all() -> None:
    a, b = fakes(2)
    a.is_empty = b.is_empty = True
    with pytest.raises(NotReadyError, match="'a': nothing here; 'b': nothing here"):
        Mixture({"a": a, "b": b}, when_empty="others").sample(4)


def test_other_errors_of_a_source_are_not_taken_for_emptiness() -> None:
    reader = Reader(filled("a", 1.0))
    mixture = Mixture({"a": reader, "b": Reader(filled("b", 1.0))}, when_empty="others")
    with pytest.raises(DataError, match="pad: field") as caught:
        mixture.sample(4, Windows(length=40, boundary="pad_right", pad=0.5))
    assert not isinstance(caught.value, NotReadyError)


def test_readers_of_empty_stores_and_of_short_episodes_are_empty() -> None:
    empty, short, good = (
        Reader(trajstore.create(f"memory://mixing-empty-{next(_numbers)}")),
        Reader(filled("short", 1.0, n=3)),
        Reader(filled("good", 2.0)),
    )
    mixture = Mixture({"empty": empty, "short": short, "good": good}, when_empty="others")
    batch = mixture.sample(9, Windows(length=5))
    assert counts_of(batch, 3) == [0, 0, 9]
    with pytest.raises(NotReadyError, match=r"source 'empty': .* was empty"):
        Mixture({"empty": empty, "good": good}).sample(9, Windows(length=5))
    with pytest.raises(NotReadyError, match="source 'short': no episode has 5 usable steps"):
        Mixture({"short": short, "good": good}).sample(9, Windows(length=5))


# ---- batches ------------------------------------------------------------------------------------------------


def test_windows_carry_the_position_of_their_source() -> None:
    readers = {"demo": (Reader(filled("demo", 1.0)), 1.0), "online": (Reader(filled("online", 2.0)), 3.0)}
    mixture = Mixture(readers)
    batch = mixture.sample(16, Windows(length=4, n_step=2))
    assert mixture.names == ("demo", "online")
    assert batch["observation"].shape == (16, 4, 3)
    assert batch["source"].tolist() == [0] * 4 + [1] * 12
    assert batch["source"].dtype == torch.int64
    expected = (batch["source"] + 1.0)[:, None, None].expand(16, 4, 3)
    assert torch.equal(batch["observation"], expected)
    assert batch["n_step"]["return"].shape == (16, 4)


def test_every_window_is_what_its_source_gives() -> None:
    stores = filled("a", 1.0), filled("b", 2.0)
    windows = Windows.transitions(n_step=2)
    mixture = Mixture({name: Reader(store, seed=5) for name, store in zip("ab", stores, strict=True)}, shuffle=True)
    batch = mixture.sample(20, windows)
    for position, store in enumerate(stores):
        rows = (batch["source"] == position).nonzero().squeeze(1)
        again = Reader(store).at(batch["index"][rows], windows)
        assert torch.equal(batch["next"]["observation"][rows], again["next"]["observation"])
        assert torch.equal(batch["action"][rows], again["action"])


def test_shuffling_moves_whole_windows_and_depends_on_the_seed_only() -> None:
    def draw(seed: int, shuffle: bool) -> dict[str, Any]:
        sources = {"a": Fake(0.0), "b": Fake(1.0)}
        batch: dict[str, Any] = Mixture(sources, shuffle=shuffle, seed=seed).sample(64)
        return batch

    plain, first, again, other = draw(0, False), draw(0, True), draw(0, True), draw(1, True)
    assert not torch.equal(first["source"], plain["source"])
    assert torch.equal(first["source"], again["source"])
    assert not torch.equal(first["source"], other["source"])
    assert torch.equal(first["x"][:, 0], first["source"].float())
    keys = sorted(zip(first["source"].tolist(), first["index"][:, 2].tolist(), strict=True))
    assert keys == sorted(zip(plain["source"].tolist(), plain["index"][:, 2].tolist(), strict=True))


def test_batches_of_tensordicts_are_joined_to_a_tensordict() -> None:
    tensordict = pytest.importorskip("tensordict")
    readers = {name: Reader(filled(name, 1.0), as_tensordict=True) for name in "ab"}
    batch = Mixture(readers).sample(7, Windows.transitions())
    assert isinstance(batch, tensordict.TensorDict)
    assert batch.batch_size == (7,)
    assert batch["next", "observation"].shape == (7, 3)
    assert batch["source"].shape == (7,)


@pytest.mark.parametrize("shuffle", [True, False])
def test_output_memory_is_used_again(shuffle: bool) -> None:
    def new() -> Mixture:
        return Mixture({"a": Fake(0.0), "b": (Fake(1.0), 2)}, shuffle=shuffle)

    fresh, reusing, ringed = new(), new(), new()
    ring = Ring(2)
    out = reusing.sample(8)
    first = ringed.sample(8, out=ring)
    fresh.sample(8)
    for _ in range(3):
        expected, overwritten, from_ring = fresh.sample(8), reusing.sample(8, out=out), ringed.sample(8, out=ring)
        assert overwritten["x"].data_ptr() == out["x"].data_ptr()
        for key in ("x", "index", "source"):
            assert torch.equal(expected[key], overwritten[key])
            assert torch.equal(expected[key], from_ring[key])
    assert ringed.sample(8, out=ring)["x"].data_ptr() == first["x"].data_ptr()
    with pytest.raises(ValueError, match="out 'x': expected"):
        reusing.sample(9, out=out)


def test_a_batch_from_one_source_alone_is_not_copied() -> None:
    source = Fake()
    given_: list[torch.Tensor] = []
    sample: Callable[..., dict[str, Any]] = source.sample

    def remembered(n: int) -> dict[str, Any]:
        batch = sample(n)
        given_.append(batch["x"])
        return batch

    source.sample = remembered  # type: ignore[method-assign]
    batch = Mixture({"a": source, "b": (Fake(), 0)}).sample(4)
    assert batch["x"].data_ptr() == given_[0].data_ptr()


class Odd(Fake):
    """Gives batches that are not like those of others."""

    def __init__(self, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        super().__init__()
        self.change = change

    def sample(self, batch_size: int, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return self.change(super().sample(batch_size, *args, **kwargs))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: b | {"x": b["x"][1:]}, r"source 'odd', 'x': expected torch.float32 of shape \(4, 2\).*\(3, 2\)"),
        (lambda b: b | {"x": b["x"][:, :1]}, r"source 'odd', 'x': expected .*got torch.float32 of shape \(4, 1\)"),
        (lambda b: b | {"x": b["x"].double()}, "source 'odd', 'x': .* got torch.float64"),
        (lambda b: b | {"x": b["x"].to("meta")}, "source 'odd', 'x': .* on meta"),
        (lambda b: {"index": b["index"], "y": b["x"]}, "'odd' lacks 'x', 'a' lacks 'y'"),
    ],
)
def test_batches_that_do_not_fit_together_are_refused(
    change: Callable[[dict[str, Any]], dict[str, Any]], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        Mixture({"a": Fake(), "odd": Odd(change)}).sample(8)


def test_mixtures_are_not_nested() -> None:
    odd = Odd(lambda b: b | {"source": b["index"][:, 0]})
    with pytest.raises(DataError, match="mixtures can't be nested"):
        Mixture({"odd": odd}).sample(3)


def test_arguments_go_to_every_source() -> None:
    seen: list[tuple[Any, ...]] = []

    class Listening(Fake):
        def sample(self, batch_size: int, *args: Any, **kwargs: Any) -> dict[str, Any]:
            seen.append((args, kwargs))
            return super().sample(batch_size)

    Mixture({"a": Listening(), "b": Listening()}).sample(4, "windows", where="there")
    assert seen == [(("windows",), {"where": "there"})] * 2


def test_a_batch_has_a_positive_size() -> None:
    with pytest.raises(ValueError, match="batch_size: expected a positive integer, got 0"):
        Mixture({"a": Fake()}).sample(0)


# ---- schemas ------------------------------------------------------------------------------------------------

FULL = {"a": Field("float32", (2,)), "b": Field("int64"), "reward": Field("float32")}


def test_schemas_that_differ_are_refused_with_every_difference() -> None:
    other = Schema({"a": Field("float64", (3,)), "c": Field("int64"), "reward": Field("float32")})
    third = Schema(FULL, reward_alignment="observation")
    with pytest.raises(SchemaError) as caught:
        Mixture({"x": Fake(0, Schema(FULL)), "y": Fake(0, other), "z": Fake(0, third)})
    for part in (
        "'x' and 'y': a: float32 (2,) in 'x', float64 (3,) in 'y'",
        "b: int64 () in 'x', absent in 'y'",
        "c: absent in 'x', int64 () in 'y'",
        "'x' and 'z': reward_alignment: 'action' in 'x', 'observation' in 'z'",
    ):
        assert part in str(caught.value)


def test_what_batches_do_not_show_may_differ() -> None:
    other = {**FULL, "a": Field("float32", (2,), final=True, chunk_rows=8)}
    Mixture({"x": Fake(0, Schema(FULL)), "y": Fake(0, Schema(other, episode={"task": str}))})


def test_only_common_fields_are_mixed_where_that_is_asked_for() -> None:
    schema = Schema(
        {
            "observation": Field("float32", (3,), final=True),
            "extra": {"depth": Field("float32", final=True)},
            "action": Field("int64"),
        }
    )
    store = trajstore.create(f"memory://mixing-extra-{next(_numbers)}", schema)
    with store.writer() as writer:
        rows = {"observation": np.ones((9, 3), np.float32), "extra": {"depth": np.ones(9, np.float32)}}
        writer.append_episode({**rows, "action": np.arange(8)}, truncated=True)
    store.refresh()
    sources = {"demo": Reader(store), "online": Reader(filled("online", 2.0))}
    with pytest.raises(
        SchemaError, match=r"extra/depth: float32 .* in 'demo', absent in 'online'.*reward: absent in 'demo'"
    ):
        Mixture(sources)
    batch = Mixture(sources, fields=["observation", "action"]).sample(6, Windows.transitions())
    assert "extra" not in batch
    assert "reward" not in batch
    assert list(batch["next"]) == ["observation"]
    with pytest.raises(SchemaError, match="fields: no source has 'lost'"):
        Mixture(sources, fields=["observation", "lost"])


def test_a_schema_that_is_not_known_yet_is_checked_once_it_is() -> None:
    late = Fake(0, None)
    late.is_empty = True
    mixture = Mixture({"a": Fake(), "late": late}, when_empty="others")
    mixture.sample(4)
    late._schema = Schema({"x": Field("int64")})
    with pytest.raises(SchemaError, match="'a' and 'late': x: float32"):
        mixture.sample(4)


def test_a_field_called_source_is_refused() -> None:
    schema = Schema({"source": {"id": Field("int64")}, "x": Field("float32", (2,))})
    with pytest.raises(SchemaError, match="field 'source'"):
        Mixture({"a": Fake(0, schema)})
    Mixture({"a": Fake(0, schema)}, fields=["x"])


@pytest.mark.parametrize(
    ("sources", "options", "error"),
    [
        ({}, {}, ValueError),
        ({"a": Fake()}, {"when_empty": "wait"}, ValueError),
        ({"a": Fake()}, {"fields": "x"}, TypeError),
    ],
)
def test_bad_options_are_refused(sources: Any, options: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="expected"):
        Mixture(sources, **options)


# ---- priorities ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by_index", [True, False])
def test_every_source_gets_its_own_priorities(by_index: bool) -> None:
    sources = fakes(3)
    mixture = Mixture({name: (s, s.value + 1) for name, s in zip("abc", sources, strict=True)}, shuffle=True)
    batch = mixture.sample(12)
    priority = batch["source"] * 100.0 + batch["index"][:, 2]
    if by_index:
        assert mixture.update_priorities(batch["index"], priority, source=batch["source"]) == 3
    else:
        assert mixture.update_priorities(batch, priority, windows="w") == 3
    for i, source in enumerate(sources):
        (index, given_, *more) = source.updates[0]
        assert len(index) == (i + 1) * 2
        assert torch.equal(given_, i * 100.0 + index[:, 2])
        assert more == ([] if by_index else ["w"])


def test_a_source_without_windows_in_the_batch_gets_no_update() -> None:
    a, b = fakes(2)
    mixture = Mixture({"a": a, "b": (b, 0)})
    mixture.update_priorities(mixture.sample(3), torch.ones(3, 4))
    assert len(a.updates) == 1
    assert b.updates == []


def test_priorities_of_readers_change_what_is_drawn() -> None:
    options = Priorities(alpha=1.0, eps=0.0)
    readers = {name: Reader(filled(name, v), priorities=options) for name, v in (("a", 1.0), ("b", 2.0))}
    mixture, windows = Mixture(readers), Windows(length=2)
    seen = [mixture.sample(64, windows) for _ in range(8)]
    for batch in seen:
        is_chosen = batch["index"][:, 2] == batch["source"] + 3  # step 3 of one, step 4 of the other
        assert mixture.update_priorities(batch, is_chosen.float()) == 0
    batch = mixture.sample(64, windows)
    assert torch.equal(batch["index"][:, 2], batch["source"] + 3)
    assert batch["priority"]["weight"].shape == (64,)


def test_bad_priorities_are_refused_before_any_source_is_changed() -> None:
    a, b = fakes(2)
    mixture = Mixture({"a": a, "b": b})
    batch = mixture.sample(4)
    good = torch.ones(4)
    for priority, source, message in (
        (torch.tensor([1, 1, 1, math.nan]), batch["source"], "finite numbers of at least 0, got nan"),
        (torch.tensor([1.0, 1, 1, -2]), batch["source"], "got -2.0"),
        (good[:3], batch["source"], r"priority of shape \(4, ...\)"),
        (good, batch["source"][:3], r"source of shape \(4,\)"),
        (good, batch["source"].int(), "got torch.int32"),
        (good, batch["source"] + 1, "source 2: this mixture has 2: 'a', 'b'"),
    ):
        with pytest.raises(DataError, match=message):
            mixture.update_priorities(batch["index"], priority, source=source)
    with pytest.raises(TypeError, match="pass source="):
        mixture.update_priorities(batch["index"], good)
    assert a.updates == b.updates == []


def test_a_source_that_refuses_an_index_is_named() -> None:
    reader = Reader(filled("a", 1.0), priorities=Priorities())
    index = torch.tensor([[0, 0, 999]])
    with pytest.raises(DataError, match="source 'demo': index"):
        Mixture({"demo": reader}).update_priorities(index, torch.ones(1), source=torch.zeros(1, dtype=torch.int64))


# ---- resume -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("exact", [True, False])
def test_a_resumed_mixture_goes_on_exactly(exact: bool) -> None:
    def new() -> tuple[Mixture, list[Fake]]:
        sources = fakes(3)
        named = {"a": (sources[0], Linear(1, 3, 10)), "b": (sources[1], 0.7), "c": (sources[2], 0.4)}
        return Mixture(named, exact=exact, shuffle=True, when_empty="others", seed=9), sources

    (first, sources), (second, others) = new(), new()
    sources[2].is_empty = others[2].is_empty = True
    for _ in range(7):
        first.sample(11)
    state = first.state_dict()
    second.load_state_dict(state)
    sources[2].is_empty = others[2].is_empty = False
    for _ in range(7):
        assert torch.equal(first.sample(11)["source"], second.sample(11)["source"])
    assert first.stats() == second.stats()
    assert state["n_batches"] == 7


def test_a_state_of_other_sources_is_refused() -> None:
    mixture = Mixture({"a": Fake(), "b": Fake()})
    with pytest.raises(ValueError, match="state of a mixture of 'b', 'a'; this mixture has 'a', 'b'"):
        mixture.load_state_dict(mixture.state_dict() | {"names": ["b", "a"]})
