"""From M ranks to N: nothing lost, nothing twice, nothing copied, and the same plan on every rank."""

from __future__ import annotations

import itertools
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
import zarr
from typer.testing import CliRunner

import trajstore
from tests.support.faulty import FaultyStorage, real_storage, through
from tests.support.ranks import (
    Held,
    Recorded,
    Recorder,
    all_handles,
    check_recorded,
    check_same,
    close,
    handles,
    held,
    held_by_all,
    in_ranks,
    index_of,
    n_steps,
    placed,
    priorities,
    resume,
    save,
    saved_and_closed,
    start,
)
from trajstore import (
    CheckpointNotFoundError,
    DataError,
    EpisodeKey,
    Field,
    Handle,
    NotReadyError,
    Partitions,
    Priorities,
    RankError,
    ReplayBuffer,
    Retention,
    SamplesPerInsert,
    Schema,
    Windows,
    redistribute,
)
from trajstore.cli.app import app
from trajstore.distributed.incomplete_episodes import CAUSES
from trajstore.replay import eviction
from trajstore.sampling.rng import rank_seed
from trajstore.schema import Array
from trajstore.store import checkpoints
from trajstore.store.verify import verify

PAIRS = [(1, 1), (1, 3), (2, 1), (2, 5), (3, 2), (3, 7), (4, 3), (4, 4), (4, 6), (8, 1), (8, 8)]
POLICIES = ("steps", "episodes", "contiguous", "interleaved")
LENGTHS = (5, 3, 9, 1, 17, 20, 4, 40, 6, 6, 2, 11, 8)
NEVER_SAME = ("provenance/rank", "provenance/env")


@pytest.fixture
def where() -> Iterator[str]:
    """A fresh place in memory, which is forgotten afterwards: listing one place there looks at all."""
    name = uuid.uuid4().hex
    yield f"memory://{name}"
    objects = fsspec.filesystem("memory").store
    for key in [key for key in list(objects) if name in key]:
        objects.pop(key, None)


def recorded_by(where: str, m: int, lengths: Sequence[int] = LENGTHS, **options: Any) -> tuple[Recorder, str, Held]:
    """Episodes of m ranks, their checkpoint, and what all of them held."""
    buffers, recorder = start(where, m, **options), Recorder()
    recorder.some(buffers, lengths)
    before = held_by_all(buffers)
    return recorder, saved_and_closed(buffers), before


def given_to(plan: Partitions) -> dict[EpisodeKey, tuple[int, int]]:
    """By episode, the rank and the environment that a plan gives it to."""
    keys = zip(plan.stream.tolist(), plan.episode.tolist(), strict=True)
    places = zip(plan.rank.tolist(), plan.env.tolist(), strict=True)
    return {EpisodeKey(plan.streams[s], e): place for (s, e), place in zip(keys, places, strict=True)}


def held_at(buffers: Sequence[ReplayBuffer]) -> dict[EpisodeKey, tuple[int, int]]:
    """By episode, the rank and the environment that it has."""
    found = {}
    for buffer in buffers:
        for key, values in held(buffer).items():
            assert (values["provenance/rank"] == buffer.rank).all()
            assert len(set(values["provenance/env"].tolist())) == 1
            found[key] = buffer.rank, int(values["provenance/env"][0])
    return found


def check_windows(buffer: ReplayBuffer, recorded: Mapping[EpisodeKey, Recorded], windows: Windows) -> int:
    """Every window there is lies in its episode, has its values and masks, and comes once; returns how many."""
    parts = held(buffer)
    if not parts:
        return 0
    relative = (np.arange(windows.size) - windows.burn_in) * windows.stride
    seen = []
    batches = buffer.epoch(64, windows, shuffle=False) if buffer.n_windows(windows) else ()
    for batch in batches:
        for i, (stream, episode, t) in enumerate(handles(buffer, batch["index"])):
            seen.append(Handle(stream, episode, t))
            values, code = parts[EpisodeKey(stream, episode)], recorded[EpisodeKey(stream, episode)].code
            at = t + relative
            exists = (at >= values["t"][0]) & (at <= values["t"][-1])
            assert exists[windows.burn_in : windows.burn_in + windows.length].all()
            assert np.array_equal(batch["valid"][i].numpy(), exists)
            assert np.array_equal(batch["code"][i].numpy()[exists], code[at[exists]])
            inside = at[exists] - values["t"][0]
            for name in ("is_first", "is_last", "terminated", "truncated"):
                assert np.array_equal(batch[name][i].numpy()[exists], values[name][inside]), name
    assert len(seen) == len(set(seen))
    assert len(seen) == sum(max(0, len(v["t"]) - windows.reach) for v in parts.values())
    return len(seen)


# ---- every episode, once --------------------------------------------------------------------------


@pytest.mark.parametrize(("m", "n"), PAIRS)
def test_every_episode_is_held_once_with_all_it_had(where: str, m: int, n: int) -> None:
    recorder, checkpoint, before = recorded_by(where, m)
    assert before.keys() == recorder.episodes.keys()
    buffers = resume(where, checkpoint, n)
    after = held_by_all(buffers)
    check_recorded(after, recorder.episodes)
    check_same(before, after)
    assert sum(buffer.n_steps for buffer in buffers) == sum(LENGTHS)
    assert sum(buffer.n_episodes for buffer in buffers) == len(LENGTHS)
    close(buffers)


@pytest.mark.parametrize(
    ("m", "n", "policy"), [*((3, 5, p) for p in POLICIES), (3, 3, "steps"), (3, 3, "contiguous")]
)
def test_every_policy_gives_out_every_episode_once(where: str, m: int, n: int, policy: Any) -> None:
    _recorder, checkpoint, before = recorded_by(where, m)
    plan = redistribute(where, checkpoint=checkpoint, world_size=n, policy=policy)
    buffers = resume(where, checkpoint, n, policy=policy)
    check_same(before, held_by_all(buffers))
    assert held_at(buffers) == given_to(plan)
    counts = [len(held(buffer)) for buffer in buffers]
    steps = [buffer.n_steps for buffer in buffers]
    if policy in ("episodes", "interleaved"):
        assert max(counts) - min(counts) <= 1
    if policy in ("steps", "episodes"):
        assert max(steps) - min(steps) <= max(LENGTHS)
    for buffer in buffers:
        report = buffer.partition_report
        assert report is not None
        assert report.policy == policy
        assert [counts["episodes"] for counts in report.ranks] == [b.n_episodes for b in buffers]
        assert [counts["steps"] for counts in report.ranks] == steps
        assert report.longest == max(LENGTHS)
        assert report.n_sources == m
    close(buffers)


def test_the_plan_is_the_same_in_any_order_of_starts_and_on_every_rank(where: str) -> None:
    _, checkpoint, _ = recorded_by(where, 3)
    wanted = given_to(redistribute(where, checkpoint=checkpoint, world_size=4))
    assert given_to(redistribute(where, world_size=4)) == wanted
    assert given_to(redistribute(where, checkpoint="a", world_size=4, policy="steps", incomplete="keep")) == wanted
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]):
        buffers = resume(where, checkpoint, 4, order=order)
        assert held_at(buffers) == wanted
        assert len({str(buffer.partition_report) for buffer in buffers}) == 1
        close(buffers)
    assert given_to(redistribute(where, checkpoint=checkpoint, world_size=4)) == wanted


def test_contiguous_ranks_hold_what_arrived_one_after_the_other(where: str) -> None:
    buffers, recorder = start(where, 3), Recorder()
    keys = []
    for i in range(12):  # committed one by one, so that their times differ
        buffer = buffers[i * 7 % 3]
        keys.append(recorder.episode(buffer, 4))
        buffer.flush()
    checkpoint = saved_and_closed(buffers)
    buffers = resume(where, checkpoint, 4, policy="contiguous")
    ranks = [held_at(buffers)[key][0] for key in keys]
    assert ranks == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    close(buffers)


def test_many_redistributions_in_a_row_lose_nothing(where: str) -> None:
    recorder, checkpoint, before = recorded_by(where, 3)
    for i, n in enumerate([5, 1, 4, 2]):
        buffers = resume(where, checkpoint, n)
        check_same(before, held_by_all(buffers))
        for buffer in buffers[::2]:
            recorder.episode(buffer, 3 + i)
        before = held_by_all(buffers)
        check_recorded(before, recorder.episodes)
        assert before.keys() == recorder.episodes.keys()
        checkpoint = saved_and_closed(buffers, f"c{i}")


@pytest.mark.parametrize("n", [1, 3])
def test_final_observations_go_with_their_episodes(where: str, n: int) -> None:
    schema = Schema({"observation": Field("float32", (2,), final=True), "reward": Field("float32")})
    buffers = start(where, 2, schema=schema)
    values = {}
    for i, length in enumerate([4, 7, 1, 5]):
        observation = np.random.default_rng(i).normal(size=(length + 1, 2)).astype(np.float32)
        key = buffers[i % 2].add_episode(
            {"observation": observation, "reward": np.zeros(length, np.float32)}, truncated=True
        )
        values[key] = observation
    checkpoint = saved_and_closed(buffers)
    buffers = resume(where, checkpoint, n)
    seen = set()
    for buffer in buffers:
        if not buffer.n_steps:
            continue
        for batch in buffer.epoch(64, Windows.transitions(), shuffle=False):
            for i, handle in enumerate(handles(buffer, batch["index"])):
                known = values[EpisodeKey(handle.stream, handle.episode)]
                assert np.array_equal(batch["observation"][i].numpy(), known[handle.t])
                assert np.array_equal(batch["next"]["observation"][i].numpy(), known[handle.t + 1])
                seen.add(handle)
    assert len(seen) == 17
    close(buffers)


def test_more_ranks_than_episodes_leaves_some_empty_and_they_fill_up(where: str) -> None:
    recorder, checkpoint, before = recorded_by(where, 2, [5, 3], priorities=Priorities())
    buffers = resume(where, checkpoint, 5)
    check_same(before, held_by_all(buffers))
    empty = [buffer for buffer in buffers if not buffer.n_steps]
    assert len(empty) == 3
    for buffer in empty:
        assert buffer.n_episodes == 0
        with pytest.raises(NotReadyError):
            buffer.sample(4)
        with pytest.raises(NotReadyError):
            buffer.sample(4, prioritised=False)
        recorder.episode(buffer, 6)
        assert sorted(buffer.sample(64)["code"].unique().tolist()) == held_codes(buffer)
    checkpoint = saved_and_closed(buffers, "b")
    buffers = resume(where, checkpoint, 2)
    check_recorded(held_by_all(buffers), recorder.episodes)
    assert held_by_all(buffers).keys() == recorder.episodes.keys()
    close(buffers)


def held_codes(buffer: ReplayBuffer) -> list[int]:
    return sorted(int(code) for values in held(buffer).values() for code in values["code"])


@pytest.mark.parametrize(("m", "n"), [(1, 3), (2, 1), (3, 3), (2, 5)])
def test_a_checkpoint_of_nothing_can_be_resumed_by_any_number(where: str, m: int, n: int) -> None:
    checkpoint = saved_and_closed(start(where, m, capacity=100, priorities=Priorities(), statistics=True))
    plan = redistribute(where, checkpoint=checkpoint, world_size=n)
    assert len(plan) == 0
    assert plan.report.longest == 0
    buffers, recorder = resume(where, checkpoint, n), Recorder()
    assert [buffer.n_steps for buffer in buffers] == [0] * n
    recorder.some(buffers, [4] * (2 * n))
    check_recorded(held_by_all(buffers), recorder.episodes)
    close(buffers)


@pytest.mark.parametrize("n", [1, 2, 4])
def test_ranks_that_never_appended_count_as_well(where: str, n: int) -> None:
    buffers, recorder = start(where, 3, capacity=1000, priorities=Priorities(), statistics=True), Recorder()
    for length in (4, 9, 2):
        recorder.episode(buffers[1], length)
    before = held_by_all(buffers)
    buffers = resume(where, saved_and_closed(buffers), n)
    check_same(before, held_by_all(buffers))
    close(buffers)


def test_a_single_session_continues_as_several_and_back(where: str) -> None:
    buffers, recorder = start(where, 1, priorities=Priorities(), capacity=1000), Recorder()
    recorder.some(buffers, LENGTHS)
    buffers[0].update_priorities(buffers[0].sample(16)["index"], torch.rand(16))
    before, known = held_by_all(buffers), priorities(buffers[0])
    checkpoint = saved_and_closed(buffers)
    buffers = resume(where, checkpoint, 3)
    check_same(before, held_by_all(buffers))
    assert sum(buffer.options.capacity for buffer in buffers) == 1000  # type: ignore[misc]
    checkpoint = saved_and_closed(buffers, "b")
    (buffer,) = resume(where, checkpoint, 1)
    check_same(before, held(buffer))
    assert priorities(buffer) == known
    assert (buffer.rank, buffer.world_size) == (0, 1)
    recorder.episode(buffer, 5)
    buffer.sample(8)
    buffer.close()


def test_abandoned_steps_of_any_rank_are_never_mixed_in(where: str) -> None:
    buffers, recorder = start(where, 3), Recorder()
    recorder.some(buffers, LENGTHS)
    before = held_by_all(buffers)
    checkpoint = save(buffers)
    for buffer in buffers[1:]:
        recorder.episode(buffer, 11)
    close(buffers)
    buffers = resume(where, checkpoint, 2)
    check_same(before, held_by_all(buffers))
    for buffer in buffers:
        buffer.refresh()
        assert sum(buffer.abandoned.values()) == 22
    check_same(before, held_by_all(buffers))
    close(buffers)


def test_a_world_that_still_runs_does_not_disturb_the_one_that_went_on_without_it(where: str) -> None:
    old, recorder = start(where, 3, capacity=100, grace_s=0.0), Recorder()
    recorder.some(old, LENGTHS)
    before = held_by_all(old)
    checkpoint = save(old)
    buffers = resume(where, checkpoint, 2)
    for _ in range(4):
        recorder.some(old, [20] * 9)  # evicts all that the checkpoint holds
        for zombie in old:
            zombie.flush()
            zombie.session.collector.flush()
    for buffer in buffers:
        buffer.refresh()
    check_same(before, held_by_all(buffers))  # read for the first time, from what is stored
    later = save(buffers, "b")
    close(old)
    close(buffers)
    buffers = resume(where, later, 4)
    check_same(before, held_by_all(buffers))
    close(buffers)


# ---- where episodes come from and go to -----------------------------------------------------------


@pytest.mark.parametrize(("n_envs", "wanted"), [(None, 4), (1, 1), (3, 3), (9, 9)])
def test_episodes_are_dealt_out_among_the_environments_of_a_rank(
    where: str, n_envs: int | None, wanted: int
) -> None:
    buffers, recorder = start(where, 3), Recorder()
    lengths = np.random.default_rng(0).integers(1, 30, 40).tolist()
    recorder.some(buffers, lengths, n_envs=4)
    before = held_by_all(buffers)
    buffers = resume(where, saved_and_closed(buffers), 2, n_envs=n_envs)
    check_same(before, held_by_all(buffers))
    for buffer in buffers:
        rows = np.zeros(wanted, np.int64)
        for values in held(buffer).values():
            rows[values["provenance/env"][0]] += len(values["t"])
        assert rows.max() - rows.min() <= max(lengths)
        assert (rows > 0).all()
    close(buffers)


def test_who_recorded_an_episode_stays_known_through_many_hands(where: str) -> None:
    buffers, recorder = start(where, 3), Recorder()
    recorder.some(buffers, LENGTHS, n_envs=3)
    for i, (n, n_envs) in enumerate([(2, 2), (5, 1), (1, None), (4, 3)]):
        checkpoint = saved_and_closed(buffers, f"c{i}")
        plan = redistribute(where, checkpoint=checkpoint, world_size=n, n_envs=n_envs)
        for key, source in zip(given_to(plan), zip(plan.source_rank, plan.source_env, strict=True), strict=True):
            assert source == (recorder.episodes[key].rank, recorder.episodes[key].env)
        buffers = resume(where, checkpoint, n, n_envs=n_envs)
        assert held_at(buffers) == given_to(plan)
        for buffer in buffers:
            recorder.episode(buffer, 4, env=6)
        check_recorded(held_by_all(buffers), recorder.episodes)
        for buffer in buffers:  # what a rank appends itself stays where it was recorded
            own = {key: values for key, values in held(buffer).items() if key.stream == buffer.stream}
            assert len(own) == 1
            for values in own.values():
                assert set(values["provenance/env"].tolist()) == {6}
                assert set(values["provenance/rank"].tolist()) == {buffer.rank}
    close(buffers)


def test_with_as_many_ranks_every_episode_keeps_its_place(where: str) -> None:
    buffers, recorder = start(where, 3), Recorder()
    recorder.some(buffers, LENGTHS, n_envs=3)
    places = held_at(buffers)
    assert places == {key: (known.rank, known.env) for key, known in recorder.episodes.items()}
    buffers = resume(where, saved_and_closed(buffers), 3)
    assert held_at(buffers) == places
    report = buffers[0].partition_report
    assert report is not None
    assert [counts["steps"] for counts in report.ranks] == [buffer.n_steps for buffer in buffers]
    buffers = resume(where, saved_and_closed(buffers, "b"), 2)
    places = held_at(buffers)
    buffers = resume(where, saved_and_closed(buffers, "c"), 2)
    assert held_at(buffers) == places
    close(buffers)


def test_handles_from_before_name_the_same_steps_after(where: str) -> None:
    recorder, checkpoint, before = recorded_by(where, 3)
    buffers = resume(where, checkpoint, 4)
    found: dict[Handle, int] = {}
    for buffer in buffers:
        mine = all_handles(held(buffer))
        batch = buffer.at(index_of(buffer, mine), Windows(squeeze=True))
        assert handles(buffer, batch["index"]) == mine
        found |= dict(zip(mine, batch["code"].tolist(), strict=True))
    assert found == {
        h: int(recorder.episodes[EpisodeKey(h.stream, h.episode)].code[h.t]) for h in all_handles(before)
    }
    close(buffers)


# ---- what steps carry with them -------------------------------------------------------------------


@pytest.mark.parametrize(("m", "n"), [(1, 4), (3, 2), (2, 5), (4, 1)])
def test_priorities_are_carried_bit_by_bit(where: str, m: int, n: int) -> None:
    buffers, recorder = start(where, m, priorities=Priorities()), Recorder()
    recorder.some(buffers, LENGTHS)
    rng = np.random.default_rng(m)
    for buffer in buffers:
        known = all_handles(held(buffer))
        some = [known[i] for i in rng.choice(len(known), len(known) // 2, replace=False)]
        values = rng.lognormal(sigma=3.0, size=len(some)).astype(np.float32)
        values[::3] = 0.0
        values[1:2] = np.float32(1e-30)
        buffer.update_priorities(index_of(buffer, some), torch.from_numpy(values))
    recorder.some(buffers, [3, 4, 5])  # with the largest so far
    before = {handle: p for buffer in buffers for handle, p in priorities(buffer).items()}
    largest = max(buffer.reader.priority_sampler.priority_column.largest for buffer in buffers)
    buffers = resume(where, saved_and_closed(buffers), n)
    after = {handle: p for buffer in buffers for handle, p in priorities(buffer).items()}
    assert after == before
    for buffer in buffers:
        key = recorder.episode(buffer, 2)
        assert priorities(buffer)[Handle(*key, 1)] == largest
    again = resume(where, saved_and_closed(buffers, "b"), m)
    assert before.items() <= {h: p for buffer in again for h, p in priorities(buffer).items()}.items()
    close(again)


@pytest.mark.parametrize("length", [1, 3])
@pytest.mark.parametrize(("m", "n"), [(3, 2), (2, 4)])
def test_weights_are_those_of_a_reference_in_double_precision(where: str, m: int, n: int, length: int) -> None:
    options = Priorities(alpha=0.7, beta=0.5, eps=1e-3)
    buffers, recorder = start(where, m, priorities=options, sample=Windows(length=length)), Recorder()
    recorder.some(buffers, LENGTHS)
    for buffer in buffers:
        index = buffer.sample(20)["index"]
        buffer.update_priorities(index, torch.linspace(0.0, 9.0, 20))
    buffers = resume(where, saved_and_closed(buffers), n)
    for buffer in buffers:
        known, parts = priorities(buffer), held(buffer)
        mass = {
            Handle(*key, t): float(known[Handle(*key, t)] + 1e-3) ** 0.7 * (known[Handle(*key, t)] > 0)
            for key, values in parts.items()
            for t in values["t"].tolist()[: len(values["t"]) - (length - 1)]
        }
        total = sum(mass.values())
        batch = buffer.sample(100)
        wanted = np.array([mass[handle] / total for handle in handles(buffer, batch["index"])])
        assert np.allclose(batch["priority"]["probability"].numpy(), wanted, rtol=1e-6, atol=0)
        assert np.allclose(batch["priority"]["weight"].numpy(), (wanted.min() / wanted) ** 0.5, rtol=1e-6, atol=0)
        assert (wanted > 0).all()
    close(buffers)


def test_uses_that_are_spent_stay_spent(where: str) -> None:
    buffers, recorder = start(where, 3, priorities=Priorities(alpha=0.0, max_uses=2)), Recorder()
    recorder.some(buffers, LENGTHS)
    uses: dict[Handle, int] = dict.fromkeys(all_handles(held_by_all(buffers)), 0)
    for buffer, n in zip(buffers, (5, 20, 9), strict=True):
        for handle in handles(buffer, buffer.sample(n)["index"]):
            uses[handle] += 1
    buffers = resume(where, saved_and_closed(buffers), 2)
    for buffer in buffers:
        left = sum(2 - uses[handle] for handle in all_handles(held(buffer)))
        for handle in handles(buffer, buffer.sample(left)["index"]):
            uses[handle] += 1
        with pytest.raises((NotReadyError, DataError)):
            buffer.sample(1)
    assert set(uses.values()) == {2}
    close(buffers)


@pytest.mark.parametrize(("m", "n", "is_flushed"), [(3, 2, False), (2, 5, True), (1, 3, False), (3, 1, True)])
def test_written_columns_are_carried_by_step(where: str, m: int, n: int, is_flushed: bool) -> None:
    buffers, recorder = start(where, m), Recorder()
    recorder.some(buffers, LENGTHS)
    for buffer in buffers:
        buffer.add_column("value", Field("float32", (2,)), fill=-7)
        known = all_handles(held(buffer))[::2]
        codes = code_of(recorder, known)
        buffer.write_column(
            "value", index_of(buffer, known), torch.from_numpy(np.stack([codes, codes * 3], 1)).float()
        )
        if is_flushed:
            buffer.flush()
    recorder.some(buffers, [2, 3])
    before = held_by_all(buffers)
    assert any((values["value"] == -7).any() for values in before.values())
    buffers = resume(where, saved_and_closed(buffers), n)
    check_same(before, held_by_all(buffers))
    key = recorder.episode(buffers[-1], 2)
    assert (held(buffers[-1])[key]["value"] == -7).all()
    close(buffers)


def code_of(recorder: Recorder, known: Sequence[Handle]) -> Array:
    return np.array([recorder.episodes[EpisodeKey(h.stream, h.episode)].code[h.t] for h in known], np.float64)


@pytest.mark.parametrize(("which", "n"), [(0, 3), (1, 1), (1, 3)])
def test_columns_that_only_some_ranks_kept_have_their_fill_elsewhere(where: str, which: int, n: int) -> None:
    buffers, recorder = start(where, 2), Recorder()
    recorder.some(buffers, [3] * 6)
    buffer = buffers[which]
    buffer.add_column("value", Field("float32"), fill=-7)
    known = all_handles(held(buffer))
    buffer.write_column("value", index_of(buffer, known), torch.from_numpy(code_of(recorder, known)).float())
    buffers = resume(where, saved_and_closed(buffers), n)
    for key, values in held_by_all(buffers).items():
        code = recorder.episodes[key].code.astype(np.float32)
        wanted = code if recorder.episodes[key].rank == which else np.full(3, -7, np.float32)
        assert np.array_equal(values["value"], wanted)
    close(buffers)


@pytest.mark.parametrize(("which", "n"), [(0, 3), (1, 1), (1, 3)])
def test_versions_that_only_some_ranks_kept_are_unknown_elsewhere(where: str, which: int, n: int) -> None:
    buffers, recorder = start(where, 2), Recorder()
    buffers[which].policy_version = 3
    recorder.some(buffers, [3] * 6)
    buffers = resume(where, saved_and_closed(buffers), n)
    for key, values in held_by_all(buffers).items():
        wanted = 3 if recorder.episodes[key].rank == which else -1
        assert set(values["policy_version"].tolist()) == {wanted}
    close(buffers)


def test_policy_versions_are_those_that_collected(where: str) -> None:
    buffers, recorder = start(where, 3), Recorder()
    versions: dict[EpisodeKey, int] = {}
    for rank, buffer in enumerate(buffers):
        for version in (0, 2 + rank):
            buffer.policy_version = version
            versions[recorder.episode(buffer, 4)] = version
    checkpoint = saved_and_closed(buffers)
    for n in (2, 1, 4):
        buffers = resume(where, checkpoint, n)
        for key, values in held_by_all(buffers).items():
            assert set(values["policy_version"].tolist()) == {versions[key]}
        for buffer in buffers:
            assert buffer.policy_version == 4
            key = recorder.episode(buffer, 3)
            assert set(held(buffer)[key]["policy_version"].tolist()) == {4}
            versions[key] = 4
        checkpoint = saved_and_closed(buffers, f"c{n}")
    buffers = resume(where, checkpoint, 2)
    assert sum(buffer.remove_below(4) for buffer in buffers) == 4 * sum(v < 4 for v in versions.values())
    assert held_by_all(buffers).keys() == {key for key, version in versions.items() if version == 4}
    close(buffers)


# ---- incomplete episodes --------------------------------------------------------------------------


FATES: list[Any] = [
    "keep",
    "drop",
    "truncate",
    {"open": "drop"},
    {"headless": "truncate"},
    {"cut": "drop", "open": "truncate"},
    {"headless": "drop", "cut": "truncate"},
    {"open": "truncate", "headless": "truncate", "cut": "keep"},
]


def incomplete_episodes(where: str, **options: Any) -> tuple[Recorder, str, Held, dict[EpisodeKey, int]]:
    """Three ranks with episodes of every kind, also of several kinds at once, and who held them."""
    buffers, recorder = start(where, 3, **{"capacity": 60} | options), Recorder()
    recorder.episode(buffers[0], 30)  # loses its head
    recorder.episode(buffers[0], 20, end="truncated")
    recorder.episode(buffers[0], 15, end="cut")
    recorder.steps(buffers[0], 5, env=1)
    recorder.episode(buffers[1], 40, end="cut")  # headless and cut
    recorder.episode(buffers[1], 10)
    recorder.steps(buffers[1], 17, env=2)
    buffers[1].flush()
    recorder.steps(buffers[1], 3, env=2)
    recorder.episode(buffers[1], 6, end="cut")
    recorder.steps(buffers[2], 75)  # headless and open, and nothing else
    parts = [held(buffer) for buffer in buffers]
    assert [n_steps(part) > 50 for part in parts] == [True] * 3
    holders = {key: rank for rank, part in enumerate(parts) for key in part}
    before = held_by_all(buffers)
    return recorder, saved_and_closed(buffers), before, holders


def causes_of(key: EpisodeKey, recorder: Recorder, before: Held) -> set[str]:
    found = {recorder.episodes[key].end} & {"open", "cut"}
    return found | ({"headless"} if before[key]["t"][0] > 0 else set())


def by_cause(fate: str | Mapping[str, str]) -> dict[str, str]:
    return dict.fromkeys(CAUSES, fate) if isinstance(fate, str) else dict.fromkeys(CAUSES, "keep") | dict(fate)


def check_masks(after: Held, recorder: Recorder, before: Held, fate: Mapping[str, str]) -> None:
    """Episodes are shown as begun and ended only where they were recorded so, or truncated."""
    for key, values in after.items():
        known, is_cause = recorder.episodes[key], causes_of(key, recorder, before)
        n = len(values["t"])
        assert np.array_equal(values["t"], before[key]["t"])
        is_told = any(cause in is_cause and fate[cause] == "truncate" for cause in ("open", "cut"))
        is_begun = "headless" in is_cause and fate["headless"] == "truncate"
        at_end = [False] * (n - 1) + [True]
        assert values["is_last"].tolist() == at_end
        assert values["terminated"].tolist() == (at_end if known.end == "terminated" else [False] * n)
        assert values["truncated"].tolist() == (at_end if known.end == "truncated" or is_told else [False] * n)
        is_first = values["t"][0] == 0 or is_begun
        assert values["is_first"].tolist() == [is_first] + [False] * (n - 1)
        assert values["provenance/is_headless"].tolist() == [values["t"][0] > 0 and not is_begun] * n
        end = {"terminated": 1, "truncated": 2}.get(known.end, 2 if is_told else 3)
        assert values["provenance/end"].tolist() == [end] * n


@pytest.mark.parametrize(
    ("n", "fate"),
    [(n, fate) for i, fate in enumerate(FATES) for n in ((1, 3) if i == 2 else (2,) if i % 2 else (3,))],
    ids=str,
)
def test_incomplete_episodes_are_kept_dropped_or_truncated_as_asked(where: str, n: int, fate: Any) -> None:
    recorder, checkpoint, before, holders = incomplete_episodes(where)
    what = by_cause(fate)
    kept = {k for k in before if not any(what[c] == "drop" for c in causes_of(k, recorder, before))}
    buffers = resume(where, checkpoint, n, incomplete=fate)
    after = held_by_all(buffers)
    assert after.keys() == kept
    check_recorded(after, recorder.episodes)
    check_masks(after, recorder, before, what)
    check_counts(buffers, recorder, before, holders, what)
    windows = Windows(length=4, burn_in=2, bootstrap=1)
    for buffer in buffers:
        check_windows(buffer, recorder.episodes, windows)
    close(buffers)


def check_counts(
    buffers: Sequence[ReplayBuffer],
    recorder: Recorder,
    before: Held,
    holders: Mapping[EpisodeKey, int],
    what: Mapping[str, str],
) -> None:
    """The report says by cause and rank what a count by hand says."""
    report = buffers[0].partition_report
    assert report is not None
    kinds = {key: causes_of(key, recorder, before) for key in before}
    dropped_for = {key: next((c for c in CAUSES if c in k and what[c] == "drop"), None) for key, k in kinds.items()}
    for cause, holder in itertools.product(CAUSES, range(3)):
        mine = [key for key in before if holders[key] == holder]
        assert report.dropped[cause][holder] == counted(before, [k for k in mine if dropped_for[k] == cause])
        is_told = what[cause] == "truncate"
        told = [k for k in mine if is_told and cause in kinds[k] and dropped_for[k] is None]
        assert report.truncated[cause][holder] == counted(before, told)
    for buffer in buffers:
        mine = list(held(buffer))
        flagged = {c: counted(before, [k for k in mine if c in kinds[k]]) for c in CAUSES}
        assert report.ranks[buffer.rank] == {**counted(before, mine), **flagged}


def counted(parts: Held, keys: Sequence[EpisodeKey]) -> dict[str, int]:
    return {"episodes": len(keys), "steps": sum(len(parts[key]["t"]) for key in keys)}


@pytest.mark.parametrize(
    ("n_after", "fate"),
    [(1, "keep"), (2, "truncate"), (3, "truncate"), (1, {"open": "truncate"}), (3, {"headless": "truncate"})],
    ids=str,
)
def test_what_was_truncated_stays_so_through_further_checkpoints(where: str, n_after: int, fate: Any) -> None:
    recorder, checkpoint, before, _ = incomplete_episodes(where)
    buffers = resume(where, checkpoint, 2, incomplete=fate)
    for i, n in enumerate((2, n_after, 2)):
        buffers = resume(where, saved_and_closed(buffers, f"c{i}"), n)
        after = held_by_all(buffers)
        assert after.keys() == before.keys()
        check_masks(after, recorder, before, by_cause(fate))
    close(buffers)


def test_what_was_kept_may_be_truncated_or_dropped_by_a_later_redistribution(where: str) -> None:
    recorder, checkpoint, before, _ = incomplete_episodes(where)
    buffers = resume(where, checkpoint, 2)
    checkpoint = saved_and_closed(buffers, "b")
    buffers = resume(where, checkpoint, 3, incomplete="truncate")
    check_masks(held_by_all(buffers), recorder, before, by_cause("truncate"))
    close(buffers)
    buffers = resume(where, checkpoint, 1, incomplete="drop")
    assert held_by_all(buffers).keys() == {k for k in before if not causes_of(k, recorder, before)}
    close(buffers)


@pytest.mark.parametrize("n", [1, 3])
def test_what_was_truncated_is_complete_for_the_next_redistribution(where: str, n: int) -> None:
    recorder, checkpoint, before, _ = incomplete_episodes(where)
    buffers = resume(where, checkpoint, 2, incomplete="truncate")
    buffers = resume(where, saved_and_closed(buffers, "b"), n, incomplete="drop")
    report = buffers[0].partition_report
    assert report is not None
    assert report.total("dropped") == {"episodes": 0, "steps": 0}
    check_masks(held_by_all(buffers), recorder, before, by_cause("truncate"))
    close(buffers)


def test_a_start_set_by_truncation_is_forgotten_once_it_is_evicted(where: str) -> None:
    buffers, recorder = start(where, 2, capacity=64), Recorder()
    key = recorder.episode(buffers[0], 60)
    recorder.episode(buffers[0], 30)
    recorder.episode(buffers[1], 8)
    begun = int(held(buffers[0])[key]["t"][0])
    assert begun > 0
    (buffer,) = resume(where, saved_and_closed(buffers), 1, incomplete="truncate")
    assert held(buffer)[key]["is_first"][0]
    while held(buffer)[key]["t"][0] == begun:
        recorder.episode(buffer, 4)
    values = held(buffer)[key]
    assert not values["is_first"].any()
    assert values["provenance/is_headless"].all()
    (again,) = resume(where, saved_and_closed([buffer], "b"), 1)
    assert not held(again)[key]["is_first"].any()
    (third, fourth) = resume(where, saved_and_closed([again], "c"), 2)
    assert not held_by_all([third, fourth])[key]["is_first"].any()
    check_recorded(held_by_all([third, fourth]), recorder.episodes)
    close([third, fourth])


def test_the_sources_of_a_truncated_end_can_not_be_bootstrapped_from(where: str) -> None:
    """A step without a successor is in no window that asks for one, truncated or not."""
    buffers, recorder = start(where, 2), Recorder()
    key = recorder.steps(buffers[0], 5)
    recorder.episode(buffers[1], 5)
    checkpoint = saved_and_closed(buffers)
    for fate in ("keep", "truncate"):
        (buffer,) = resume(where, checkpoint, 1, incomplete=fate)
        seen = [
            handle.t
            for batch in buffer.epoch(16, Windows(n_step=1, squeeze=True), shuffle=False)
            for handle in handles(buffer, batch["index"])
            if EpisodeKey(handle.stream, handle.episode) == key
        ]
        assert seen == [0, 1, 2, 3]
        buffer.close()


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("is_ended", [False, True])
def test_an_episode_longer_than_the_capacity_is_still_sampled(where: str, n: int, is_ended: bool) -> None:
    windows = Windows(length=8)
    buffers, recorder = start(where, 1, capacity=64, sample=windows, commit_steps=10), Recorder()
    for i in range(200):
        recorder.step(buffers[0], truncated=is_ended and i == 199)
        if i % 37 == 0:
            buffers[0].flush()
        buffers[0].n_steps  # noqa: B018
    before = held(buffers[0])
    ((key, values),) = before.items()
    assert 60 < len(values["t"]) <= 64
    checkpoint = saved_and_closed(buffers)
    buffers = resume(where, checkpoint, n)
    after = held_by_all(buffers)
    check_same(before, after, but=(*NEVER_SAME, "is_last", "provenance/end"))
    check_recorded(after, recorder.episodes)
    (holder,) = (buffer for buffer in buffers if buffer.n_steps)
    check_windows(holder, recorder.episodes, windows)
    batch = holder.sample(32)
    first = recorder.episodes[key].code[batch["index"][:, 2].numpy()]
    assert np.array_equal(batch["code"].numpy(), first[:, None] + np.arange(8))
    assert sum(buffer.stats()["evicted"]["steps"]["steps"] for buffer in buffers) == 200 - len(values["t"])
    close(buffers)


# ---- the same again -------------------------------------------------------------------------------


def trained(where: str, m: int, **options: Any) -> tuple[Recorder, list[ReplayBuffer]]:
    """Ranks that have appended, sampled and updated priorities, each as often as its rank says."""
    buffers = start(where, m, priorities=Priorities(), sample=Windows(length=2), capacity=200, **options)
    recorder = Recorder()
    for turn in range(4):
        recorder.some(buffers, LENGTHS)
        for rank, buffer in enumerate(buffers):
            for k in range(rank + 1):
                batch = buffer.sample(8)
                rng = np.random.default_rng(100 * turn + 10 * rank + k)
                buffer.update_priorities(batch["index"], torch.from_numpy(rng.random(8)).float())
    return recorder, buffers


DRAWS: dict[str, Callable[[ReplayBuffer], Any]] = {
    "prioritised": lambda buffer: buffer.sample(16),
    "uniform": lambda buffer: buffer.sample(16, prioritised=False),
    "recent": lambda buffer: buffer.sample(16, prioritised=False, recent_steps=20),
    "recent and prioritised": lambda buffer: buffer.sample(16, recent_steps=20),
    "recent episodes": lambda buffer: buffer.sample(16, prioritised=False, recent_episodes=2),
}


def drawn(buffers: Sequence[ReplayBuffer]) -> list[dict[str, list[Handle]]]:
    """What each rank draws, in each way, three times in turn."""
    found = []
    for buffer in buffers:
        turns = [(name, handles(buffer, draw(buffer)["index"])) for _ in range(3) for name, draw in DRAWS.items()]
        found.append({name: [h for n, batch in turns if n == name for h in batch] for name in DRAWS})
    return found


@pytest.mark.parametrize(("m", "n"), [(3, 2), (1, 3), (2, 2)])
def test_two_resumes_of_one_checkpoint_draw_the_same(where: str, m: int, n: int) -> None:
    _, buffers = trained(where, m)
    checkpoint = saved_and_closed(buffers)
    streams = []
    for order in (range(n), reversed(range(n))):
        buffers = resume(where, checkpoint, n, order=list(order))
        streams.append(drawn(buffers))
        close(buffers)
    assert streams[0] == streams[1]


@pytest.mark.parametrize(("m", "prefetch"), [(2, 0), (3, 2)])
def test_with_as_many_ranks_every_rank_continues_as_if_never_interrupted(where: str, m: int, prefetch: int) -> None:
    _recorder, buffers = trained(where, m)
    iterators = [buffer.batches(8, prefetch=prefetch) for buffer in buffers]
    for rank, iterator in enumerate(iterators):
        for _ in range(rank + 2):
            next(iterator)
    save(buffers)

    def go_on(buffers: Sequence[ReplayBuffer], iterators: Sequence[Any]) -> list[Any]:
        seen: list[Any] = []
        for turn, (buffer, iterator) in itertools.product(range(3), zip(buffers, iterators, strict=True)):
            batch, other = next(iterator), buffer.sample(8)
            rng = np.random.default_rng(turn)
            buffer.update_priorities(other["index"], torch.from_numpy(rng.random(8)).float())
            for each in (batch, other):
                seen.append(handles(buffer, each["index"]))
                seen.append(each["priority"]["weight"].tolist())
        return [*seen, *drawn(buffers), *map(priorities, buffers)]

    wanted = go_on(buffers, iterators)
    for iterator in iterators:
        iterator.close()
    close(buffers)
    buffers = resume(where, "a", m)
    iterators = [buffer.batches(8, prefetch=prefetch) for buffer in buffers]
    assert go_on(buffers, iterators) == wanted
    for iterator in iterators:
        iterator.close()
    close(buffers)


def test_appends_after_an_exact_resume_are_drawn_as_they_would_have_been(where: str) -> None:
    _recorder, buffers = trained(where, 2)
    save(buffers)

    def go_on(buffers: Sequence[ReplayBuffer]) -> list[Any]:
        """By value: the streams that are written differ."""
        codes = Recorder(n=10_000)
        seen: list[Any] = []
        for turn in range(6):
            codes.some(buffers, [9, 4, 20, 3])
            for buffer in buffers:
                batch = buffer.sample(16)
                seen.append(batch["code"].tolist())
                weights = torch.linspace(0.1, 1 + turn, 16)
                buffer.update_priorities(batch["index"], weights)
            seen.append([buffer.n_steps for buffer in buffers])
        return seen

    wanted = go_on(buffers)
    close(buffers)
    buffers = resume(where, "a", 2)
    assert go_on(buffers) == wanted
    close(buffers)


@pytest.mark.parametrize("is_resumed", [False, True])
def test_ranks_with_equal_partitions_draw_different_windows(where: str, is_resumed: bool) -> None:
    buffers, recorder = start(where, 4), Recorder()
    recorder.some(buffers, [50] * 4)
    if is_resumed:
        buffers = resume(where, saved_and_closed(buffers), 2)
    draws = [tuple(buffer.sample(32)["index"][:, 2].tolist()) for buffer in buffers]
    assert len(set(draws)) == len(buffers)
    assert len({buffer.reader.rng.seed for buffer in buffers}) == len(buffers)
    close(buffers)


def test_no_rank_ever_draws_with_numbers_that_another_has_used(where: str) -> None:
    """Seed and counter decide what is drawn: of all sessions that follow each other no two share any pair."""
    used: dict[int, list[range]] = {}
    buffers, recorder = start(where, 2), Recorder()
    recorder.some(buffers, LENGTHS)
    for i, n in enumerate((3, 1, 2, 4, 1, 2)):
        for buffer in buffers:
            rng = buffer.reader.rng
            first = rng.counter
            for _ in range(buffer.rank + 1 if buffer.n_steps else 0):
                buffer.sample(5)
            mine = range(first, rng.counter)
            for other in used.setdefault(rng.seed, []):
                assert max(other.start, mine.start) >= min(other.stop, mine.stop) or not len(mine)
            used[rng.seed].append(mine)
        buffers = resume(where, saved_and_closed(buffers, f"c{i}"), n)
    assert {buffer.reader.rng.seed for buffer in buffers} == {rank_seed(3, rank, 2) for rank in range(2)}
    close(buffers)


def chosen(rng: np.random.Generator, options: Sequence[Any]) -> Any:
    return options[int(rng.integers(len(options)))]


def live_a_while(recorder: Recorder, buffers: Sequence[ReplayBuffer], rng: np.random.Generator, hop: int) -> None:
    """Append, sample, update, write, commit: whatever comes to mind, on every rank."""
    for buffer in buffers:
        buffer.policy_version = hop
        for _ in range(int(rng.integers(0, 6))):
            env = int(rng.integers(3))
            known = [r.end for k, r in recorder.episodes.items() if k.stream == buffer.stream and r.env == env]
            if rng.random() < 0.4 or "open" in known:
                recorder.steps(buffer, int(rng.integers(1, 12)), env=env)
                if rng.random() < 0.3:
                    recorder.step(buffer, env=env, truncated=True)
            else:
                end = chosen(rng, ("terminated", "truncated", "cut"))
                recorder.episode(buffer, int(rng.integers(1, 40)), env=env, end=end)
            if rng.random() < 0.3:
                buffer.flush()
        if buffer.n_steps:
            batch = buffer.sample(8, Windows())
            values = torch.from_numpy(rng.lognormal(sigma=2, size=8)).float()
            values[0] = 0.0
            buffer.update_priorities(batch["index"], values)
            buffer.write_column("value", batch["index"], values)


@pytest.mark.parametrize("seed", range(3))
def test_whatever_is_done_between_no_hop_from_world_to_world_changes_anything(where: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    options = {"capacity": 120, "priorities": Priorities(), "commit_steps": int(rng.integers(5, 40))}
    buffers, recorder = start(where, int(rng.integers(1, 5)), **options), Recorder()
    for buffer in buffers:
        buffer.add_column("value", Field("float32"), fill=-7)
    for hop in range(4):
        live_a_while(recorder, buffers, rng, hop)
        before = held_by_all(buffers)
        check_recorded(before, recorder.episodes)
        known = {handle: p for buffer in buffers for handle, p in priorities(buffer).items()}
        places, m, n = held_at(buffers), len(buffers), int(rng.integers(1, 6))
        checkpoint = saved_and_closed(buffers, f"c{hop}")
        policy = chosen(rng, (None, *POLICIES))
        buffers = resume(where, checkpoint, n, policy=policy)
        after = held_by_all(buffers)
        check_same(before, after, but=(*NEVER_SAME, "is_last", "provenance/end"))
        assert {handle: p for buffer in buffers for handle, p in priorities(buffer).items()} == known
        if m == n and policy is None:
            assert held_at(buffers) == places
        check_windows(buffers[0], recorder.episodes, Windows(length=3, burn_in=1))
        for key, known_episode in recorder.episodes.items():
            if known_episode.end == "open" and key in after:
                assert set(after[key]["provenance/end"].tolist()) == {3}
    assert verify(where).problems == []
    close(buffers)


# ---- what it costs --------------------------------------------------------------------------------


def stored_bytes(path: Path, below: str = "") -> int:
    return sum(file.stat().st_size for file in (path / below).rglob("*") if file.is_file())


def test_a_store_is_as_large_as_what_was_appended_whatever_the_capacity(tmp_path: Path) -> None:
    sizes = {}
    for n, capacity in ((20_000, 40_000), (20_000, 4_000_000), (80_000, 4_000_000)):
        path = tmp_path / f"{n}-{capacity}"
        buffers = start(str(path), 2, capacity=capacity, priorities=Priorities())
        rng = np.random.default_rng(0)
        for buffer in buffers:
            for _ in range(n // 100):
                noise = rng.normal(size=(50, 16)).astype(np.float32)
                buffer.add_episode({"observation": noise, "reward": noise[:, 0]}, truncated=True)
        saved_and_closed(buffers)
        sizes[n, capacity] = stored_bytes(path, "streams"), stored_bytes(path, "checkpoints")
    (small, small_state), (same, same_state), (large, large_state) = sizes.values()
    assert abs(same - small) < 0.01 * small + 200
    assert same_state < 1.5 * small_state, "a capacity a hundred times as large"
    assert 3.0 < large / small < 4.2  # metadata and the last chunks take the same room in both
    assert large_state < 4.2 * small_state
    assert large < 80_000 * 17 * 4 * 1.25


def test_a_plan_writes_nothing_and_reads_no_step(where: str) -> None:
    _, checkpoint, _ = recorded_by(where, 3, capacity=1000, priorities=Priorities())
    storage = FaultyStorage(real_storage(where))
    with through(storage):
        for n in (1, 2, 3, 8):
            redistribute(where, checkpoint=checkpoint, world_size=n)
        redistribute(where, world_size=2, incomplete="drop", policy="contiguous", n_envs=3)
    assert storage.calls
    assert {call.action for call in storage.calls} <= {"get", "get_range", "size", "list_names"}
    assert not [call for call in storage.calls if "/steps/" in call.key]


def is_chunk(key: str) -> bool:
    return "/steps/" in key and not key.endswith("zarr.json")


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_resuming_moves_no_step_and_reads_none(where: str, n: int) -> None:
    _recorder, checkpoint, before = recorded_by(where, 3, capacity=1000, priorities=Priorities(), statistics=True)
    objects = real_storage(where).tree_sizes("streams")
    storage = FaultyStorage(real_storage(where))
    with through(storage):
        buffers = resume(where, checkpoint, n)
        assert not [call for call in storage.calls if is_chunk(call.key)], "no step is looked at"
        check_same(before, held_by_all(buffers))
        saved_and_closed(buffers, "b")
    touched = [call for call in storage.calls if call.action in ("put", "delete", "remove_tree")]
    assert not [call for call in touched if is_chunk(call.key)]
    assert not [call for call in touched if call.key in objects and "/steps/" in call.key]
    after = real_storage(where).tree_sizes("streams")
    assert {key: after[key] for key in after if is_chunk(key)} == {k: objects[k] for k in objects if is_chunk(k)}


# ---- limits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("m", "n", "kind"),
    [(2, 3, "number"), (4, 1, "number"), (3, 2, "steps"), (1, 4, "episodes"), (2, 3, "bytes"), (2, 7, "steps")],
)
def test_limits_are_shared_out_so_that_their_sum_stays(where: str, m: int, n: int, kind: str) -> None:
    limits: dict[str, Any] = {kind: 48_000 if kind == "bytes" else 240}
    capacity: Any = 240 if kind == "number" else Retention(**limits)
    _, checkpoint, before = recorded_by(where, m, capacity=capacity)
    buffers = resume(where, checkpoint, n)
    check_same(before, held_by_all(buffers))
    assert sum(limit_of(buffer, kind) for buffer in buffers) == m * limit_of_option(capacity, kind)
    shares = [limit_of(buffer, kind) for buffer in buffers]
    assert max(shares) - min(shares) <= 1
    again = resume(where, saved_and_closed(buffers, "b"), m)
    assert sum(limit_of(buffer, kind) for buffer in again) == m * limit_of_option(capacity, kind)
    close(again)


def limit_of(buffer: ReplayBuffer, kind: str) -> int:
    return limit_of_option(buffer.options.capacity, kind)


def limit_of_option(capacity: Any, kind: str) -> int:
    return int(capacity if kind == "number" else getattr(capacity, kind))


@pytest.mark.parametrize("limits", [{"steps": 100}, {"episodes": 9}, {"bytes": 40_000}], ids=str)
def test_resuming_by_itself_evicts_nothing_however_uneven_the_parts(where: str, limits: dict[str, Any]) -> None:
    buffers, recorder = start(where, 2, capacity=Retention(**limits)), Recorder()
    recorder.episode(buffers[0], 90)
    for length in (2, 3, 1, 4):
        recorder.episode(buffers[1], length)
    for buffer in buffers:
        buffer.flush()
    before = held_by_all(buffers)
    assert before.keys() == recorder.episodes.keys()
    for i, n in enumerate((6, 6, 1, 3, 3)):
        buffers = resume(where, saved_and_closed(buffers, f"c{i}"), n)
        check_same(before, held_by_all(buffers))
        assert all(counts["steps"] == 0 for buffer in buffers for counts in buffer.stats()["evicted"].values())
    close(buffers)


def test_a_rank_that_received_more_than_its_limit_continues_as_if_never_interrupted(where: str) -> None:
    buffers, recorder = start(where, 2, capacity=100), Recorder()
    recorder.episode(buffers[0], 90)
    recorder.some(buffers, [4] * 8)
    buffers = resume(where, saved_and_closed(buffers), 5)
    save(buffers, "b")

    def go_on(buffers: Sequence[ReplayBuffer]) -> list[Any]:
        codes, seen = Recorder(n=10_000), []
        for _ in range(6):
            codes.some(buffers, [9, 4, 20, 3, 7])
            seen.append([held_codes(buffer) for buffer in buffers])
        return seen

    wanted = go_on(buffers)
    close(buffers)
    buffers = resume(where, "b", 5)
    assert go_on(buffers) == wanted
    close(buffers)


def test_a_share_of_a_limit_is_never_nothing(where: str) -> None:
    _, checkpoint, before = recorded_by(where, 1, [3, 4], capacity=Retention(episodes=2, steps=20))
    buffers = resume(where, checkpoint, 5, rank_timeout_s=5.0)
    check_same(before, held_by_all(buffers))
    for buffer in buffers:
        Recorder().episode(buffer, 2)
        assert buffer.n_steps >= 2
    close(buffers)


def test_a_share_of_a_limit_still_holds_a_window(where: str) -> None:
    windows = Windows(length=16)
    recorder, checkpoint, before = recorded_by(where, 1, [30], capacity=40, sample=windows)
    buffers = resume(where, checkpoint, 4, rank_timeout_s=5.0)
    check_same(before, held_by_all(buffers))
    for buffer in buffers:
        recorder.episode(buffer, 20)
        check_windows(buffer, recorder.episodes, windows)
        assert buffer.n_windows() > 0
    close(buffers)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that buffers take arrivals to come at; a list of one number."""
    now = [1e9]
    own = SimpleNamespace(time=lambda: now[0], monotonic=time.monotonic, sleep=time.sleep)
    monkeypatch.setattr(eviction, "time", own)
    return now


def came_at(recorder: Recorder, buffer: ReplayBuffer, n: int, clock: list[float], at: float) -> EpisodeKey:
    clock[0] = 1e9 + at
    key = recorder.episode(buffer, n)
    assert buffer.n_steps  # taken up now
    return key


@pytest.mark.parametrize(
    ("turns", "n"), [("0120120120120120", 1), ("0000000000001112", 2), ("2222201010101111", 1)]
)
def test_the_oldest_of_all_sources_go_first_after_redistribution(
    where: str, clock: list[float], turns: str, n: int
) -> None:
    buffers, recorder = start(where, 3, capacity=64), Recorder()
    keys = [came_at(recorder, buffers[int(rank)], 5, clock, i) for i, rank in enumerate(turns)]
    assert held_by_all(buffers).keys() == set(keys)
    buffers = resume(where, saved_and_closed(buffers), n)
    age = {key: i for i, key in enumerate(keys)}
    for buffer in buffers:
        mine = sorted(held(buffer), key=age.__getitem__)
        old = mine
        for i in range(30):
            came_at(recorder, buffer, 8, clock, 100 + i)
            left = held(buffer)
            old = [key for key in mine if key in left]
            # What is left of the old ones is the newest of them, and only its first may have lost steps.
            assert old == mine[len(mine) - len(old) :]
            assert all(len(left[key]["t"]) == 5 for key in old[1:])
        assert not old
    close(buffers)


def test_age_limits_hold_after_several_redistributions(where: str, clock: list[float]) -> None:
    limits = Retention(age_s=1000.0)
    buffers, recorder, born = start(where, 2, capacity=limits), Recorder(), {}
    for i, rank in enumerate("0000000011"):
        born[came_at(recorder, buffers[int(rank)], 3, clock, 10 * i)] = 10 * i
    for turn, n in enumerate((3, 2, 1)):
        buffers = resume(where, saved_and_closed(buffers, f"c{turn}"), n, policy="interleaved")
        for i in range(4 * n):
            at = 100 * (turn + 1) + 10 * i
            born[came_at(recorder, buffers[i % n if i % 2 else 0], 3, clock, at)] = at
    assert held_by_all(buffers).keys() == born.keys()
    for now in range(1000, 1500, 35):
        clock[0] = 1e9 + now
        left = held_by_all(buffers)
        for key, at in born.items():
            if at < now - 1000 - 2 * 1000 / 64:
                assert key not in left, "it is too old"
            if at > now - 1000:
                assert key in left, "it is not old enough"
    close(buffers)


def test_a_limit_given_to_resume_evicts_the_oldest_of_all_sources(where: str) -> None:
    buffers, recorder = start(where, 3), Recorder()
    keys = []
    for i in range(18):
        buffer = buffers[i * 2 % 3]
        keys.append(recorder.episode(buffer, 5))
        buffer.flush()
    (buffer,) = resume(where, saved_and_closed(buffers), 1, capacity=40)
    left = held(buffer)
    assert 35 <= n_steps(left) <= 40
    assert sorted(left, key=keys.index) == keys[-len(left) :]
    buffer.close()


def test_counts_of_evictions_and_samples_add_up_to_what_they_were(where: str) -> None:
    buffers, recorder = start(where, 3, capacity=40), Recorder()
    for i in range(30):
        recorder.episode(buffers[i % 3], 3 + i % 5)
    for buffer in buffers:
        buffer.sample(7 + buffer.rank)

    def sums(buffers: Sequence[ReplayBuffer]) -> dict[str, int]:
        stats = [buffer.stats() for buffer in buffers]
        evicted = {
            f"{c}/{k}": sum(s["evicted"][c][k] for s in stats)
            for c in stats[0]["evicted"]
            for k in ("steps", "episodes")
        }
        return evicted | {"sampled": sum(s["n_sampled"] for s in stats)}

    before = sums(buffers)
    assert before["steps/steps"] > 0
    for i, n in enumerate((2, 5, 1)):
        buffers = resume(where, saved_and_closed(buffers, f"c{i}"), n)
        assert sums(buffers) == before
    close(buffers)


@pytest.mark.parametrize("share", ["partition", "whole"])
def test_pacing_continues_with_the_same_sums(where: str, share: str) -> None:
    paces = [SamplesPerInsert(4.0, min_steps=5) for _ in range(3)]
    buffers = in_ranks(
        3,
        lambda r: ReplayBuffer(
            where, rank=r, world_size=3, samples_per_insert=paces[r], commit_seconds=None, buffer_bytes="1MiB",
            share=share, rank_timeout_s=60.0,
        ),
    )  # fmt: skip
    recorder = Recorder()
    for buffer in buffers:
        recorder.episode(buffer, 10 + buffer.rank)
        buffer.sample(3 + 2 * buffer.rank)
    sums = {"n_inserted": 33, "n_sampled": 15}
    for i, n in enumerate((2, 5, 1)):
        buffers = resume(where, saved_and_closed(buffers, f"c{i}"), n)
        counts = [buffer.stats()["samples_per_insert"] for buffer in buffers]
        assert {name: sum(c[name] for c in counts) for name in sums} == sums
    close(buffers)


@pytest.mark.parametrize(("m", "n"), [(1, 4), (4, 1), (2, 3)])
def test_pacing_is_as_far_ahead_as_it_was(where: str, m: int, n: int) -> None:
    """No rank has to catch up with what was done already."""

    def begin(rank: int) -> ReplayBuffer:
        pace = SamplesPerInsert(2.0, min_steps=100, timeout_s=5.0)
        return ReplayBuffer(where, samples_per_insert=pace, commit_seconds=None, **placed(rank, m))

    buffers, recorder = in_ranks(m, begin), Recorder()
    for buffer in buffers:
        for _ in range(11):
            recorder.episode(buffer, 10)
        buffer.sample(20)
    before = sum(difference(buffer) for buffer in buffers)
    assert before == 0
    buffers = resume(where, saved_and_closed(buffers), n)
    assert abs(sum(difference(buffer) for buffer in buffers) - before) <= 2 * n  # counts are whole
    for buffer in buffers:
        assert abs(difference(buffer)) <= 4
    close(buffers)


def difference(buffer: ReplayBuffer) -> float:
    assert buffer.options.samples_per_insert is not None
    return buffer.options.samples_per_insert.difference


@pytest.mark.parametrize("chosen", [True, ["observation"]], ids=str)
def test_statistics_of_all_ranks_together_are_those_of_all_steps(where: str, chosen: Any) -> None:
    buffers, recorder = start(where, 3, statistics=chosen), Recorder()
    recorder.some(buffers, [*LENGTHS, 90])
    for i, n in enumerate((2, 5, 1, 3)):
        buffers = resume(where, saved_and_closed(buffers, f"c{i}"), n)
        recorder.some(buffers, [7] * (i + 1))
        for buffer in buffers:
            buffer.flush()
        codes = np.concatenate([known.code for known in recorder.episodes.values()])
        wanted = np.stack([codes * 0.5, -codes], -1)
        found = [buffer.statistics()["observation"] for buffer in buffers]
        count = sum(f["count"] for f in found)
        mean = sum(f["count"] * f["mean"] for f in found) / count
        square = sum(f["count"] * (f["std"] ** 2 + f["mean"] ** 2) for f in found if np.all(f["count"] > 0)) / count
        assert np.all(count == len(codes))
        assert np.allclose(mean, wanted.mean(0))
        assert np.allclose(np.sqrt(square - mean**2), wanted.std(0))
        assert np.array_equal(np.min([f["min"] for f in found], 0), wanted.min(0))
        assert np.array_equal(np.max([f["max"] for f in found], 0), wanted.max(0))
    close(buffers)


# ---- ranks that all see everything ----------------------------------------------------------------


def shared_by_all(where: str, m: int, **options: Any) -> tuple[Recorder, list[ReplayBuffer], Held]:
    buffers, recorder = start(where, m, share="whole", **options), Recorder()
    recorder.some(buffers, LENGTHS)
    for buffer in buffers:
        buffer.flush()
    for buffer in buffers:
        buffer.refresh()
    return recorder, buffers, held(buffers[0])


@pytest.mark.parametrize(("m", "n"), [(3, 3), (3, 2), (2, 4), (3, 1), (1, 3)])
def test_ranks_that_share_the_whole_see_all_of_it_after_resuming(where: str, m: int, n: int) -> None:
    recorder, buffers, before = shared_by_all(where, m)
    assert before.keys() == recorder.episodes.keys()
    for buffer in buffers:
        check_same(before, held(buffer))
    buffers = resume(where, saved_and_closed(buffers), n)
    for buffer in buffers:
        check_same(before, held(buffer))
        recorder.episode(buffer, 4)
        buffer.flush()
    for buffer in buffers:
        buffer.refresh()
        check_recorded(held(buffer), recorder.episodes)
        assert held(buffer).keys() == recorder.episodes.keys()
        str(buffer.partition_report)
    assert len({tuple(handles(buffer, buffer.sample(64)["index"])) for buffer in buffers}) == n
    close(buffers)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_what_was_shared_can_be_dealt_out_and_the_other_way_round(where: str, n: int) -> None:
    _recorder, buffers, before = shared_by_all(where, 2, priorities=Priorities())
    buffers = resume(where, saved_and_closed(buffers), n, share="partition")
    check_same(before, held_by_all(buffers))
    buffers = resume(where, saved_and_closed(buffers, "b"), 2, share="whole")
    for buffer in buffers:
        buffer.refresh()
        check_same(before, held(buffer))
        assert sum(priorities(buffer).values()) == sum(LENGTHS)
    close(buffers)


def test_what_is_not_dealt_out_takes_no_policy(where: str) -> None:
    _, buffers, _ = shared_by_all(where, 2)
    checkpoint = saved_and_closed(buffers)
    for how in ({"policy": "episodes"}, {"incomplete": "drop"}, {"n_envs": 2}):
        with pytest.raises(ValueError, match="whole"):
            ReplayBuffer.resume(where, checkpoint, rank=0, world_size=3, **how)


# ---- the store around it --------------------------------------------------------------------------


def test_a_checkpoint_of_several_ranks_is_a_dataset_of_them_all(where: str) -> None:
    buffers, recorder = start(where, 3), Recorder()
    recorder.some(buffers, LENGTHS)
    checkpoint = save(buffers)
    recorder.some(buffers, [50] * 3)
    close(buffers)
    past = trajstore.open(where, at=checkpoint)
    table = past.episodes
    keys = [EpisodeKey(s, e) for s, e in zip(table["stream"], table["episode"].tolist(), strict=True)]
    known = {key: r for key, r in recorder.episodes.items() if len(r.code) < 50}
    assert set(keys) == known.keys()
    assert len(keys) == len(LENGTHS)
    assert table["length"].tolist() == [len(known[key].code) for key in keys]
    assert table["end"].tolist() == [known[key].end for key in keys]
    for key in keys:
        assert np.array_equal(past.read_episode(key)["code"], known[key].code)
    buffers = resume(where, checkpoint, 2)  # the same is shown of what they save
    table = trajstore.open(where, at=saved_and_closed(buffers, "b")).episodes
    assert set(map(EpisodeKey, table["stream"], table["episode"].tolist())) == set(keys)


@pytest.mark.parametrize("at", [None, "a"])
def test_a_copy_is_resumed_like_the_store_itself(tmp_path: Path, at: str | None) -> None:
    source, target = str(tmp_path / "source"), str(tmp_path / "target")
    _, checkpoint, before = recorded_by(source, 3, capacity=500, priorities=Priorities())
    buffers = resume(source, checkpoint, 2)
    wanted = held_at(buffers), drawn(buffers)
    close(buffers)
    trajstore.copy(source, target, at=at, fsync=False)
    assert verify(target).problems == []
    buffers = resume(target, checkpoint, 2)
    assert (held_at(buffers), drawn(buffers)) == wanted
    check_same(before, held_by_all(buffers))
    saved_and_closed(buffers, "b")
    assert verify(target).problems == []


def test_a_store_of_several_worlds_is_sound_and_plain_zarr_walks_it(tmp_path: Path) -> None:
    path = str(tmp_path / "store")
    recorder, checkpoint, _ = recorded_by(path, 3, capacity=60, priorities=Priorities())
    buffers = resume(path, checkpoint, 2, incomplete="truncate")
    recorder.some(buffers, LENGTHS)
    later = saved_and_closed(buffers, "b")
    for at in (None, checkpoint, later):
        report = verify(path, at=at)
        assert (report.problems, report.notes) == ([], [])
    members = dict(zarr.open_group(path, mode="r").members(max_depth=None))
    streams = {name.split("/")[1] for name in members if name.startswith("streams/") and "/" in name}
    assert {key.stream for key in recorder.episodes} <= streams
    for key, known in recorder.episodes.items():
        array = members[f"streams/{key.stream}/steps/code"]
        assert np.isin(known.code[-1:], np.asarray(array[:])).all()  # type: ignore[index]


def test_a_lost_part_of_one_rank_is_found_and_named(tmp_path: Path) -> None:
    path = tmp_path / "store"
    _, checkpoint, _ = recorded_by(str(path), 3)
    part = path / "checkpoints" / checkpoint / "ranks" / "1"
    assert part.is_dir()
    shutil.rmtree(part)
    assert verify(str(path)).problems
    with pytest.raises(trajstore.TrajstoreError):
        redistribute(str(path), checkpoint=checkpoint, world_size=2)
    with pytest.raises(trajstore.TrajstoreError):
        ReplayBuffer.resume(str(path), checkpoint)


def chunk_objects(where: str, stream: str) -> set[str]:
    return {key for key in real_storage(where).tree_sizes(f"streams/{stream}") if is_chunk(f"{stream}/{key}")}


@pytest.mark.parametrize("m", [1, 2])
def test_rows_go_when_every_rank_has_given_them_up_and_not_before(where: str, m: int) -> None:
    schema = Schema({n: Field(*kind, chunk_rows=4) for n, kind in FIELDS.items()})
    buffers, recorder = start(where, m, schema=schema, grace_s=0.0), Recorder()
    for i in range(16):
        recorder.episode(buffers[i % m], 8)
        buffers[i % m].flush()
    sources = [buffer.stream for buffer in buffers]
    checkpoint = saved_and_closed(buffers)
    before = {stream: chunk_objects(where, stream) for stream in sources}
    assert all(before.values())
    buffers = resume(where, checkpoint, 3, policy="contiguous")
    storage = real_storage(where)
    checkpoints.remove(storage, checkpoint)  # it would keep all
    parts = [held(buffer) for buffer in buffers]

    def sweep() -> None:
        for buffer in buffers:
            buffer.session.collector.flush()

    sweep()
    assert {stream: chunk_objects(where, stream) for stream in sources} == before, "a rank wants each of them"
    buffers[2].clear()  # the newest: what lies before is wanted still
    sweep()
    assert {stream: chunk_objects(where, stream) for stream in sources} == before
    buffers[0].clear()  # the oldest: no rank wants those any longer
    sweep()
    after = {stream: chunk_objects(where, stream) for stream in sources}
    assert all(after[stream] < before[stream] for stream in sources)
    buffers[1].reader.invalidate()
    check_same(parts[1], held(buffers[1]))
    check_recorded(held(buffers[1]), recorder.episodes)
    buffers[1].clear()
    sweep()
    assert not any(chunk_objects(where, stream) for stream in sources)
    assert all(buffer.n_steps == 0 for buffer in buffers)
    close(buffers)


FIELDS: dict[str, Any] = {"code": ("int64",), "observation": ("float32", (2,)), "reward": ("float32",)}


def test_what_one_rank_evicts_by_its_limit_stays_for_another(where: str) -> None:
    """Both ranks hold episodes of one stream; one continues to append until all of its part is evicted."""
    schema = Schema({n: Field(*kind, chunk_rows=4) for n, kind in FIELDS.items()})
    (buffer,), recorder = start(where, 1, schema=schema, grace_s=0.0, capacity=128), Recorder()
    recorder.some([buffer], [8] * 16)
    checkpoint = saved_and_closed([buffer])
    buffers = resume(where, checkpoint, 2, policy="interleaved")
    kept = held(buffers[1])
    for i in range(4):
        for _ in range(8):
            recorder.episode(buffers[0], 8)
        buffers[0].flush()
        in_ranks(2, lambda rank, i=i: buffers[rank].save_checkpoint(f"c{i}", wait=True, keep_last=1))  # type: ignore[misc]
        buffers[0].session.collector.flush()
    assert not held(buffers[0]).keys() & set(list(recorder.episodes)[:16]), "those from before are gone there"
    buffers[1].reader.invalidate()
    check_same(kept, held(buffers[1]))
    assert verify(where).problems == []
    buffers = resume(where, saved_and_closed(buffers, "last"), 1)
    assert kept.keys() <= held(buffers[0]).keys()
    check_recorded(held(buffers[0]), recorder.episodes)
    close(buffers)


# ---- what can't be --------------------------------------------------------------------------------


def contents(where: str) -> dict[str, int]:
    return real_storage(where).tree_sizes("")


@pytest.mark.parametrize(("m", "n"), [(3, 2), (2, 1), (1, 2)])
def test_another_number_of_ranks_has_to_resume(where: str, m: int, n: int) -> None:
    recorded_by(where, m)
    before = contents(where)
    for rank in range(n):
        with pytest.raises(RankError, match=rf"written by {m} ranks, this is one of {n}.*resume"):
            ReplayBuffer(where, **placed(rank, n))
    assert contents(where) == before


BAD_RANKS: list[tuple[dict[str, Any], str]] = [
    ({"rank": 2, "world_size": 2}, "rank: expected less than the world_size 2, got 2"),
    ({"rank": -1, "world_size": 2}, "rank: expected an integer of at least 0, got -1"),
    ({"rank": 0, "world_size": 0}, "world_size: expected an integer of at least 1, got 0"),
    ({"rank": 0.0, "world_size": 2}, "rank: expected an integer of at least 0, got 0.0"),
    ({"rank": True, "world_size": 2}, "rank: expected an integer of at least 0, got True"),
    ({"rank": 1}, "rank and world_size go together, got rank=1 and world_size=None"),
    ({"world_size": 3}, "rank and world_size go together, got rank=None and world_size=3"),
]


@pytest.mark.parametrize(("bad", "message"), BAD_RANKS, ids=str)
def test_ranks_that_can_not_be_are_refused(where: str, bad: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ReplayBuffer(where, **bad)
    assert contents(where) == {}
    recorded_by(where, 2, [3, 4])
    before = contents(where)
    with pytest.raises(ValueError, match=message):
        ReplayBuffer.resume(where, "a", **bad)
    assert contents(where) == before


BAD_HOW: list[tuple[dict[str, Any], str]] = [
    ({"policy": "fair"}, "policy: expected one of steps, episodes, contiguous, interleaved, got 'fair'"),
    ({"incomplete": "forget"}, "expected one of keep, drop, truncate, got 'forget'"),
    ({"incomplete": {"aborted": "drop"}}, "expected any of open, headless, cut, got 'aborted'"),
    ({"incomplete": {"open": "lose"}}, "incomplete, open: expected one of keep, drop, truncate, got 'lose'"),
    ({"n_envs": 0}, "n_envs"),
    ({"n_envs": -3}, "n_envs"),
]


@pytest.mark.parametrize(("bad", "message"), BAD_HOW, ids=str)
def test_a_way_to_deal_out_that_there_is_not_is_refused_at_once(
    where: str, bad: dict[str, Any], message: str
) -> None:
    recorded_by(where, 2, [3, 4])
    before = contents(where)
    for n in (1, 2, 3):
        with pytest.raises(ValueError, match=message):
            redistribute(where, world_size=n, **bad)
        with pytest.raises(ValueError, match=message):
            ReplayBuffer.resume(where, "a", **placed(0, n), **bad)  # no other rank runs, and none is waited for
    assert contents(where) == before


@pytest.mark.parametrize("n", [0, -1, 2.0, None, True])
def test_a_world_size_that_can_not_be_is_refused(where: str, n: Any) -> None:
    recorded_by(where, 1, [3])
    with pytest.raises((ValueError, TypeError), match="world_size"):
        redistribute(where, world_size=n)


def test_a_checkpoint_of_another_store_is_not_found(where: str) -> None:
    _, elsewhere, _ = recorded_by(f"{where}-other", 2, [3, 4])
    recorded_by(where, 2, [3, 4])
    before = contents(where)
    for name in (elsewhere, "b", ""):
        with pytest.raises((CheckpointNotFoundError, ValueError)):
            redistribute(where, checkpoint=name, world_size=3)
        with pytest.raises((CheckpointNotFoundError, ValueError)):
            ReplayBuffer.resume(where, name, rank=1, world_size=3)
    assert contents(where) == before


@pytest.mark.parametrize(
    "ways",
    [
        [{"policy": "steps"}, {"policy": "episodes"}],
        [{"incomplete": "drop"}, {}],
        [{"n_envs": 2}, {"n_envs": 3}],
        [{}, {"policy": "interleaved"}],
    ],
    ids=str,
)
def test_ranks_with_different_policies_get_an_error(where: str, ways: list[dict[str, Any]]) -> None:
    _, checkpoint, before = recorded_by(where, 3)

    def attempt(rank: int) -> str:
        with pytest.raises(RankError) as caught:
            ReplayBuffer.resume(where, checkpoint, rank=rank, world_size=2, rank_timeout_s=10.0, **ways[rank])
        return str(caught.value)

    assert all("need the same" in message for message in in_ranks(2, attempt))
    buffers = resume(where, checkpoint, 2)
    check_same(before, held_by_all(buffers))
    close(buffers)


def test_the_command_line_verifies_a_checkpoint_of_several_ranks(tmp_path: Path) -> None:
    path = str(tmp_path / "store")
    _, checkpoint, _ = recorded_by(path, 3, [3, 4, 5])
    for arguments in (["verify"], ["verify", "--at", checkpoint], ["verify", "--fast"], ["checkpoints"], ["info"]):
        result = CliRunner().invoke(app(), [arguments[0], path, *arguments[1:]])
        assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    "options",
    [
        [{"priorities": Priorities()}, {}],
        [{}, {"priorities": Priorities(max_uses=2)}],
        [{"capacity": 100}, {}],
        [{"statistics": True}, {}],
    ],
    ids=str,
)
def test_ranks_that_keep_different_things_get_an_error_or_can_be_redistributed(
    where: str, options: list[dict[str, Any]]
) -> None:
    def begin(rank: int) -> ReplayBuffer | RankError:
        try:
            return ReplayBuffer(
                where, rank=rank, world_size=2, rank_timeout_s=10.0, commit_seconds=None, **options[rank]
            )
        except RankError as refusal:
            return refusal

    buffers, recorder = in_ranks(2, begin), Recorder()
    made = [buffer for buffer in buffers if isinstance(buffer, ReplayBuffer)]
    assert len(made) in (0, 2), "all ranks get an error, or none"
    if not made:
        assert all("need the same" in str(buffer) for buffer in buffers)
        return
    recorder.some(made, LENGTHS)
    before = held_by_all(made)
    for i, n in enumerate((3, 1, 2)):
        made = resume(where, saved_and_closed(made, f"c{i}"), n, rank_timeout_s=10.0)
        check_same(before, held_by_all(made))
    close(made)


def test_a_cache_may_be_emptied_before_anything_was_read(where: str) -> None:
    _, checkpoint, before = recorded_by(where, 2)
    buffers = resume(where, checkpoint, 3)
    for buffer in buffers:
        buffer.reader.invalidate()
    check_same(before, held_by_all(buffers))
    for buffer in buffers:
        buffer.reader.invalidate()
    check_same(before, held_by_all(buffers))
    close(buffers)
