"""Who gets which episodes: arithmetic on lengths alone, and a report that says what the arithmetic did."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from trajstore.distributed import partitions
from trajstore.distributed.incomplete_episodes import CAUSES, fates_by_cause, masks_by_cause
from trajstore.distributed.partition_report import PartitionReport
from trajstore.distributed.partitions import Partitions, assign_episodes, least_loaded
from trajstore.format.spans import End
from trajstore.sampling.compiled.selection import compiled_loops
from trajstore.sampling.index.index_entries import GONE
from trajstore.schema import Array

POLICIES = ("steps", "episodes", "contiguous", "interleaved")
SIZES = st.integers(1, 9)
LENGTHS = st.one_of(
    st.lists(st.integers(1, 60), max_size=80),
    st.lists(st.sampled_from([7, 8]), max_size=80),  # many that are as long as each other
    st.builds(lambda n, giant: [giant, *[3] * n], st.integers(0, 40), st.integers(100, 1 << 40)),
)


def loads(lengths: Array, rank: Array, n: int) -> Array:
    """Steps by rank, added up as integers."""
    sums = np.zeros(n, np.int64)
    np.add.at(sums, rank, lengths)
    return sums


# ---- dealing out ----------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
@given(lengths=LENGTHS, n=SIZES)
def test_every_episode_goes_to_exactly_one_rank_that_exists(policy: Any, lengths: list[int], n: int) -> None:
    rank = assign_episodes(np.array(lengths, np.int64), n, policy)
    assert rank.shape == (len(lengths),)
    assert np.issubdtype(rank.dtype, np.integer)
    assert ((rank >= 0) & (rank < n)).all()


@pytest.mark.parametrize("policy", POLICIES)
@given(lengths=LENGTHS, n=SIZES)
def test_the_split_depends_on_nothing_but_lengths(policy: Any, lengths: list[int], n: int) -> None:
    given_lengths = np.array(lengths, np.int64)
    first = assign_episodes(given_lengths, n, policy)
    assert np.array_equal(given_lengths, lengths), "what was given is left as it was"
    assert np.array_equal(first, assign_episodes(given_lengths.copy(), n, policy))
    assert np.array_equal(
        first,
        assign_episodes(np.array(lengths, np.int32 if max(lengths, default=0) < 1 << 31 else np.int64), n, policy),
    )


@given(lengths=LENGTHS, n=SIZES)
@example(lengths=[], n=4)
@example(lengths=[5], n=8)
@example(lengths=[1 << 50, 1, 1, 1], n=3)
def test_ranks_differ_in_steps_by_at_most_the_longest_episode(lengths: list[int], n: int) -> None:
    given_lengths = np.array(lengths, np.int64)
    sums = loads(given_lengths, assign_episodes(given_lengths, n, "steps"), n)
    assert sums.sum() == given_lengths.sum()
    assert sums.max() - sums.min() <= given_lengths.max(initial=0)


@given(length=st.integers(1, 1 << 40), n_episodes=st.integers(0, 60), n=SIZES)
def test_episodes_as_long_as_each_other_are_spread_evenly_by_steps(length: int, n_episodes: int, n: int) -> None:
    rank = assign_episodes(np.full(n_episodes, length), n, "steps")
    counts = np.bincount(rank, minlength=n)
    assert counts.max() - counts.min() <= 1


@given(n_small=st.integers(0, 50), n=st.integers(2, 9))
def test_a_giant_has_a_rank_of_its_own_as_long_as_the_others_have_less(n_small: int, n: int) -> None:
    lengths = np.array([2] * n_small + [1000])
    rank = assign_episodes(lengths, n, "steps")
    assert (rank[:-1] != rank[-1]).all()


@pytest.mark.parametrize("policy", ["episodes", "interleaved"])
@given(lengths=LENGTHS, n=SIZES)
def test_numbers_of_episodes_differ_by_at_most_one(policy: Any, lengths: list[int], n: int) -> None:
    counts = np.bincount(assign_episodes(np.array(lengths, np.int64), n, policy), minlength=n)
    assert counts.max() - counts.min() <= 1


@given(lengths=LENGTHS, n=SIZES)
def test_by_episodes_steps_differ_by_at_most_the_longest_too(lengths: list[int], n: int) -> None:
    """Dealt by length there and back, every round makes up for the one before."""
    given_lengths = np.array(lengths, np.int64)
    sums = loads(given_lengths, assign_episodes(given_lengths, n, "episodes"), n)
    assert sums.max() - sums.min() <= given_lengths.max(initial=0)


@given(lengths=LENGTHS, n=SIZES)
def test_interleaved_ranks_take_turns_in_order_of_arrival(lengths: list[int], n: int) -> None:
    assert assign_episodes(np.array(lengths, np.int64), n, "interleaved").tolist() == [
        i % n for i in range(len(lengths))
    ]


@given(lengths=LENGTHS, n=SIZES)
def test_contiguous_ranks_hold_blocks_in_order_of_arrival(lengths: list[int], n: int) -> None:
    given_lengths = np.array(lengths, np.int64)
    rank = assign_episodes(given_lengths, n, "contiguous")
    assert (np.diff(rank) >= 0).all()
    sums = loads(given_lengths, rank, n)
    # Each cut lies where an equal part ends, give or take half an episode.
    fair = given_lengths.sum() / n
    assert (np.abs(np.cumsum(sums) - fair * np.arange(1, n + 1)) <= given_lengths.max(initial=0) / 2 + 1).all()


@given(lengths=st.lists(st.integers(0, 30), min_size=1, max_size=40), n=SIZES)
def test_episodes_without_steps_are_dealt_out_as_well(lengths: list[int], n: int) -> None:
    for policy in POLICIES:
        rank = assign_episodes(np.array(lengths), n, policy)  # type: ignore[arg-type]
        assert len(rank) == len(lengths)
        assert ((rank >= 0) & (rank < n)).all()


@given(
    lengths=st.lists(st.integers(0, 1 << 45), max_size=120),
    n=st.integers(1, 40),
)
def test_the_compiled_loop_and_the_heap_do_the_same(lengths: list[int], n: int) -> None:
    kernels = compiled_loops(torch.device("cpu"), True, "partition_loops")
    if kernels is None:
        pytest.skip("there are no compiled loops here")
    given_lengths = np.array(lengths, np.int64)
    assert np.array_equal(kernels.least_loaded(given_lengths, n), least_loaded(given_lengths, n))


def test_with_very_many_ranks_the_split_is_the_same_as_with_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = np.random.default_rng(0).integers(1, 100, 9000)
    n = partitions._MAX_BINS_OF_LOOP + 1
    by_heap = assign_episodes(lengths, n)
    monkeypatch.setattr(partitions, "_MAX_BINS_OF_LOOP", n)
    assert np.array_equal(assign_episodes(lengths, n), by_heap)


def test_without_compiled_loops_the_split_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = np.random.default_rng(1).integers(1, 50, 500)
    compiled = assign_episodes(lengths, 7)
    monkeypatch.setattr(partitions, "compiled_loops", lambda *_: None)
    assert np.array_equal(assign_episodes(lengths, 7), compiled)


@pytest.mark.parametrize("policy", ["", "step", "STEPS", None, 3])
def test_an_unknown_policy_is_refused_by_name(policy: Any) -> None:
    with pytest.raises(ValueError, match=r"policy: expected one of steps, episodes, contiguous, interleaved, got"):
        assign_episodes(np.array([1, 2]), 2, policy)


# ---- fates ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("fate", ["keep", "drop", "truncate"])
def test_one_word_is_for_all_causes(fate: str) -> None:
    assert fates_by_cause(fate) == dict.fromkeys(CAUSES, fate)


def test_causes_that_are_not_named_are_kept() -> None:
    assert fates_by_cause({"cut": "drop"}) == {"open": "keep", "headless": "keep", "cut": "drop"}
    assert fates_by_cause({}) == dict.fromkeys(CAUSES, "keep")


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("forget", "incomplete, open: expected one of keep, drop, truncate, got 'forget'"),
        ("", "expected one of keep, drop, truncate, got ''"),
        ({"headless": "cut"}, "incomplete, headless: expected one of keep, drop, truncate, got 'cut'"),
        ({"aborted": "drop"}, "incomplete: expected any of open, headless, cut, got 'aborted'"),
        ({"open": None}, "incomplete, open: expected one of keep, drop, truncate, got None"),
    ],
)
def test_unknown_fates_and_causes_are_refused_by_name(bad: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fates_by_cause(bad)


def test_an_episode_may_be_incomplete_for_several_causes() -> None:
    ends = np.array([End.OPEN, End.CUT, End.TERMINATED, End.TRUNCATED, End.TERMINATED])
    found = masks_by_cause(ends, np.array([3, 0, 2, 0, 6]), np.array([GONE, GONE, GONE, GONE, 6]))
    assert {name: mask.tolist() for name, mask in found.items()} == {
        "open": [True, False, False, False, False],
        "headless": [True, False, True, False, False],  # the last one is shown as begun where its steps do
        "cut": [False, True, False, False, False],
    }


# ---- the report -----------------------------------------------------------------------------------


@st.composite
def plans(draw: st.DrawFn) -> Partitions:
    """Any partition that could be, made without a store."""
    n = draw(st.integers(0, 30))
    n_old, n_new = draw(SIZES), draw(SIZES)
    length = np.array(draw(st.lists(st.integers(1, 50), min_size=n, max_size=n)), np.int64)
    end = np.array(draw(st.lists(st.integers(0, 3), min_size=n, max_size=n)), np.int64)
    t = np.array(draw(st.lists(st.sampled_from([0, 0, 4]), min_size=n, max_size=n)), np.int64)
    holder = np.array(draw(st.lists(st.integers(0, n_old - 1), min_size=n, max_size=n)), np.int64)
    words = st.sampled_from(["keep", "drop", "truncate"])
    what = draw(st.fixed_dictionaries(dict.fromkeys(CAUSES, words)))
    begin = np.array(draw(st.lists(st.sampled_from([4, GONE]), min_size=n, max_size=n)), np.int64)
    is_cause = masks_by_cause(end, t, begin)
    dropped = np.zeros(n, bool)
    for cause in CAUSES:
        dropped |= is_cause[cause] & (what[cause] == "drop")
    rank = np.full(n, -1)
    rank[~dropped] = assign_episodes(length[~dropped], n_new)
    zeros = np.zeros(n, np.int64)
    return Partitions(
        checkpoint="c",
        world_size=n_new,
        policy="steps",
        incomplete=what,
        streams=("s",),
        stream=zeros,
        episode=np.arange(n),
        t=t,
        length=length,
        end=end,
        holder=holder,
        source_rank=holder,
        source_env=zeros,
        flags=zeros,
        begin=begin,
        rank=rank,
        env=zeros,
        n_sources=n_old,
        is_cause=is_cause,
    )


def counted(rows: list[int], plan: Partitions) -> dict[str, int]:
    return {"episodes": len(rows), "steps": sum(int(plan.length[i]) for i in rows)}


@settings(max_examples=60)
@given(plan=plans())
def test_the_report_says_what_a_count_by_hand_says(plan: Partitions) -> None:
    report = plan.report
    everything = range(len(plan))
    assert len(report.ranks) == plan.world_size
    for rank, counts in enumerate(report.ranks):
        mine = [i for i in everything if plan.rank[i] == rank]
        assert np.array_equal(plan.of(rank), mine)
        wanted: dict[str, Any] = counted(mine, plan)
        wanted |= {c: counted([i for i in mine if plan.is_cause[c][i]], plan) for c in CAUSES}
        assert counts == wanted
    kept = [int(plan.length[i]) for i in everything if plan.rank[i] >= 0]
    assert report.longest == max(kept, default=0)
    for cause in CAUSES:
        for holder in range(plan.n_sources):
            theirs = [i for i in everything if plan.holder[i] == holder and plan.is_cause[cause][i]]
            shown = [i for i in theirs if plan.rank[i] >= 0 and plan.incomplete[cause] == "truncate"]
            assert report.truncated[cause][holder] == counted(shown, plan)


@settings(max_examples=60)
@given(plan=plans())
def test_what_is_dropped_is_counted_once_and_all_adds_up(plan: Partitions) -> None:
    report = plan.report
    dropped = report.total("dropped")
    assert dropped == counted(np.flatnonzero(plan.rank < 0).tolist(), plan)
    assert dropped["episodes"] + sum(c["episodes"] for c in report.ranks) == len(plan)
    assert dropped["steps"] + sum(c["steps"] for c in report.ranks) == int(plan.length.sum())
    assert dropped == {
        what: sum(report.total("dropped", cause)[what] for cause in CAUSES) for what in ("episodes", "steps")
    }
    for cause in CAUSES:
        if plan.incomplete[cause] != "drop":
            assert report.total("dropped", cause) == {"episodes": 0, "steps": 0}


@given(plan=plans())
def test_the_report_as_text_names_every_rank_and_whatever_was_left_out(plan: Partitions) -> None:
    report = plan.report
    text = str(report)
    assert f"{plan.n_sources} -> {plan.world_size} ranks" in text
    for rank, counts in enumerate(report.ranks):
        assert f"rank {rank}: {counts['episodes']} episodes, {counts['steps']} steps" in text
    for cause in CAUSES:
        assert (f"dropped, {cause}:" in text) == (report.total("dropped", cause)["episodes"] > 0)


@given(plan=plans())
def test_the_table_has_a_row_for_every_episode(plan: Partitions) -> None:
    frame = plan.to_pandas()
    assert len(frame) == len(plan)
    assert frame["rank"].tolist() == plan.rank.tolist()
    assert frame["end"].tolist() == [End(end).label for end in plan.end]
    assert isinstance(plan.report, PartitionReport)
