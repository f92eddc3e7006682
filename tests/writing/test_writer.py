"""Appending in every form, and what readers then see."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest
import torch

import trajstore
import trajstore.writing.commit_pipeline
import trajstore.writing.staging
from tests.support.faulty import BlockPuts, FailWhile, FaultyStorage, broken, real_storage
from trajstore import EpisodeKey, Field, Handle, Schema
from trajstore.format.commit_record import CommitRecord
from trajstore.schema import Array


def steps(n: int, offset: int = 0) -> dict[str, Any]:
    """n steps whose values say where they belong."""
    x = np.arange(offset, offset + n, dtype=np.float32)
    return {"observation": {"state": np.stack([x, -x], 1)}, "action": x.astype(np.int64), "reward": x}


def one(value: float) -> dict[str, Any]:
    return {"observation": {"state": np.array([value, -value], np.float32)}, "action": int(value), "reward": value}


SCHEMA = Schema(
    {
        "observation": {"state": Field("float32", (2,), final=True, chunk_rows=4)},
        "action": Field("int64", chunk_rows=4),
        "reward": Field("float32", chunk_rows=4),
    }
)


def final(value: float) -> dict[str, Any]:
    return {"observation": {"state": np.array([value, -value], np.float32)}}


def state(episode: dict[str, Any]) -> Array:
    values: Array = episode["observation"]["state"][:, 0]
    return values


def test_the_example_of_the_readme_works_on_every_backend(place: Any) -> None:
    store = trajstore.create(place.url, **place.kwargs)
    frames = np.zeros((6, 8, 8), np.uint8)
    with store.writer("rank0") as writer:
        writer.append_episode(
            {"observation": {"pixels": frames, "state": np.zeros((6, 2), np.float32)}, "action": np.zeros(5)},
            terminated=True,
            metadata={"task": "open door"},
        )
        batch = {"pixels": np.ones((16, 8, 8), np.uint8), "state": np.zeros((16, 2), np.float32)}
        writer.append({"observation": batch, "action": np.zeros(16)}, envs=range(16))
        last = {"pixels": np.full((8, 8), 2, np.uint8), "state": np.zeros(2, np.float32)}
        writer.end_episode(env=3, truncated=True, final={"observation": last})
        writer.commit()
        assert len(trajstore.open(place.url, **place.kwargs)) == 17
    table = trajstore.open(place.url, **place.kwargs).episodes
    assert table["end"].tolist() == ["terminated"] + ["cut"] * 3 + ["truncated"] + ["cut"] * 12
    assert table["length"].tolist() == [5] + [1] * 16
    assert table.row(0)["metadata"] == {"task": "open door"}
    ended = trajstore.open(place.url, **place.kwargs).read_episode(4)
    assert ended["observation"]["pixels"][:, 0, 0].tolist() == [1, 2]
    assert len(ended["action"]) == 1


def test_an_episode_reads_back_as_it_was_written(url: str) -> None:
    store = trajstore.create(url, SCHEMA)
    data = steps(11)
    data["observation"] = {"state": np.random.default_rng(0).normal(size=(12, 2)).astype(np.float32)}
    with store.writer() as writer:
        key = writer.append_episode(data, terminated=True)
    store.refresh()
    read = store.read_episode(key)
    assert read["observation"]["state"].tobytes() == data["observation"]["state"].tobytes()
    assert read["action"].tobytes() == data["action"].tobytes()
    assert store.episodes.row(0)["return"] == 55.0


def test_a_slice_of_an_episode_reads_only_what_is_asked(url: str) -> None:
    store = trajstore.create(url, SCHEMA)
    with store.writer() as writer:
        writer.append_episode(
            {**steps(10), "observation": {"state": steps(11)["observation"]["state"]}}, truncated=True
        )
    store.refresh()
    part = store.read_episode(0, fields=["observation"], start=3, stop=6)
    assert list(part) == ["observation"]
    assert state(part).tolist() == [3, 4, 5]
    assert state(store.read_episode(0, start=8)).tolist() == [8, 9, 10]  # the final value comes with the end
    with pytest.raises(KeyError, match="no field 'pixels'; there are observation/state, action, reward"):
        store.read_episode(0, fields=["pixels"])
    with pytest.raises(IndexError, match="steps 3 to 11, but it has 10"):
        store.read_episode(0, start=3, stop=11)


def test_interleaved_environments_are_stored_episode_by_episode(url: str) -> None:
    store = trajstore.create(url, SCHEMA)
    with store.writer() as writer:
        for t in range(6):
            batch = {"observation": {"state": np.full((3, 2), t, np.float32)}, "action": np.arange(3),
                     "reward": np.ones(3, np.float32)}  # fmt: skip
            writer.append(batch, envs=range(3))
    store.refresh()
    for env in range(3):
        assert store.read_episode(env)["action"].tolist() == [env] * 6
        assert len(store.episodes.spans(env)) == 1


def test_an_episode_open_across_commits_reads_as_one(url: str) -> None:
    store = trajstore.create(url, SCHEMA)
    with store.writer() as writer:
        for value in range(9):
            writer.append(one(value))
            if value % 4 == 3:
                writer.commit()
        writer.end_episode(terminated=True, final=final(9))
    store.refresh()
    assert state(store.read_episode(0)).tolist() == list(range(10))
    assert len(store.episodes.spans(0)) == 3
    assert store.episodes.row(0)["return"] == 36.0


def test_an_end_after_the_last_commit_is_a_span_of_no_rows(url: str) -> None:
    store = trajstore.create(url, SCHEMA)
    writer = store.writer()
    writer.append(one(1))
    writer.commit()
    assert store.refresh().episodes.row(0)["end"] == "open"
    writer.end_episode(terminated=True, metadata={"why": "fell"})
    writer.commit()
    row = store.refresh().episodes.row(0)
    assert (row["end"], row["length"], row["metadata"]) == ("terminated", 1, {"why": "fell"})
    writer.close()


def test_a_rollout_block_ends_episodes_inside(url: str) -> None:
    store = trajstore.create(url, SCHEMA)
    n_times, n_envs = 5, 2
    value = np.arange(n_times * n_envs, dtype=np.float32).reshape(n_times, n_envs)
    block = {
        "observation": {"state": np.stack([value, -value], -1)},
        "action": value.astype(np.int64),
        "reward": value,
    }
    terminated, truncated = np.zeros((n_times, n_envs), bool), np.zeros((n_times, n_envs), bool)
    terminated[1, 0] = truncated[3, 1] = True
    finals = {"observation": {"state": np.stack([value + 100, -value], -1)}}
    with store.writer() as writer:
        handles = writer.append_rollout(block, terminated=terminated, truncated=truncated, final=finals)
    store.refresh()
    assert handles.episode.tolist() == [[0, 1], [0, 1], [2, 1], [2, 1], [2, 3]]
    assert handles.t.tolist() == [[0, 0], [1, 1], [0, 2], [1, 3], [2, 0]]
    assert [state(store.read_episode(i)).tolist() for i in range(4)] == [
        [0, 2, 102],
        [1, 3, 5, 7, 107],
        [4, 6, 8],
        [9],
    ]
    assert store.episodes["end"].tolist() == ["terminated", "truncated", "cut", "cut"]


def test_rollouts_continue_open_episodes(url: str) -> None:
    store = trajstore.create(url, SCHEMA)
    with store.writer() as writer:
        for offset in (0, 3):
            block = {path: {"state": v["state"][:, None]} if isinstance(v, dict) else v[:, None]
                     for path, v in steps(3, offset).items()}  # fmt: skip
            handles = writer.append_rollout(block, envs=[7])
    store.refresh()
    assert handles.t[:, 0].tolist() == [3, 4, 5]
    assert state(store.read_episode(0)).tolist() == [0, 1, 2, 3, 4, 5]
    assert store.episodes["env"].tolist() == [7]


@pytest.mark.parametrize("buffer_bytes", [80, 250, 1000])
def test_an_episode_larger_than_the_buffer_is_stored_whole(url: str, buffer_bytes: int) -> None:
    store = trajstore.create(url, SCHEMA)
    with store.writer(buffer_bytes=buffer_bytes) as writer:
        writer.append_episode(steps(50), terminated=True)
    store.refresh()
    assert state(store.read_episode(0)).tolist() == list(range(50))


def test_a_rollout_larger_than_the_buffer_is_refused_whole(url: str) -> None:
    store = trajstore.create(url, SCHEMA)
    value = np.arange(40, dtype=np.float32).reshape(40, 1)
    block = {
        "observation": {"state": np.stack([value, -value], -1)},
        "action": value.astype(np.int64),
        "reward": value,
    }
    with store.writer(buffer_bytes=1000) as writer:
        with pytest.raises(
            trajstore.DataError, match=r"one call appends up to 40 rows, .* takes 7 at a time; raise buffer"
        ):
            writer.append_rollout(block)
        assert writer.stats()["steps"] == 0


def test_flags_end_episodes_in_the_same_call(url: str) -> None:
    store = trajstore.create(url, SCHEMA)
    with store.writer() as writer:
        batch = {"observation": {"state": np.zeros((2, 2), np.float32)}, "action": np.zeros(2, np.int64),
                 "reward": np.ones(2, np.float32)}  # fmt: skip
        finals = {"observation": {"state": np.full((2, 2), 5, np.float32)}}
        writer.append(
            batch, envs=[4, 9], terminated=np.array([True, False]), truncated=np.array([True, False]), final=finals
        )
        writer.append(batch, envs=[4, 9], truncated=torch.tensor([False, True]))
        writer.append(one(3), env=4, truncated=True, final=final(8))
    table = store.refresh().episodes
    assert table["env"].tolist() == [4, 9, 4]
    assert table["end"].tolist() == ["terminated", "truncated", "truncated"]
    assert table["has_final"].tolist() == [True, False, True]
    assert table["length"].tolist() == [1, 2, 2]


def test_torch_tensors_and_python_numbers_are_taken_as_they_are(url: str) -> None:
    schema = Schema({"a": Field("bfloat16", (2,)), "b": Field("float32"), "c": Field("bool"), "d": Field("uint8")})
    store = trajstore.create(url, schema)
    with store.writer() as writer:
        a = torch.tensor([1.5, float("nan")], dtype=torch.bfloat16)
        writer.append({"a": a, "b": 0.5, "c": True, "d": 255})
        writer.append({"a": a, "b": torch.tensor(2.0), "c": np.True_, "d": np.uint8(3)})
    store.refresh()
    read = store.read_episode(0)
    assert read["a"].dtype == np.float32
    assert read["a"][0, 0] == 1.5
    assert np.isnan(read["a"][0, 1])
    assert (read["b"].tolist(), read["c"].tolist(), read["d"].tolist()) == ([0.5, 2.0], [True, True], [255, 3])


def test_the_caller_may_reuse_its_arrays_at_once(url: str) -> None:
    store = trajstore.create(url, SCHEMA)
    data = steps(20)
    with store.writer() as writer:
        writer.append_episode(data, terminated=True)
        for array in (data["observation"]["state"], data["action"], data["reward"]):
            array[:] = 99
    store.refresh()
    assert state(store.read_episode(0)).tolist() == list(range(20))


def test_handles_are_known_at_once_and_stay(url: str) -> None:
    store = trajstore.create(url, SCHEMA)
    with store.writer("w") as writer:
        first = writer.append(one(0), env=5)
        writer.append_episode(steps(3), terminated=True, env=1)
        second = writer.append(one(1), env=5)
        assert first == Handle(writer.stream, 0, 0)
        assert second == Handle(writer.stream, 0, 1)
        key = writer.end_episode(env=5, truncated=True)
    store.refresh()
    assert key == EpisodeKey(writer.stream, 0)
    assert store.read_episode(key)["action"].tolist() == [0, 1]
    assert store.episodes.key(store.episodes.find(key)) == key


def test_inferred_finals_come_from_lengths(url: str) -> None:
    store = trajstore.create(url)
    with store.writer() as writer:
        writer.append_episode({"obs": np.zeros((4, 2)), "action": np.zeros(3)}, terminated=True)
        writer.append_episode({"obs": np.zeros((3, 2)), "action": np.zeros(3)}, truncated=True)
    assert store.refresh().schema == Schema({"obs": Field("float64", (2,), final=True), "action": Field("float64")})
    assert store.episodes["has_final"].tolist() == [True, False]
    assert store.episodes["length"].tolist() == [3, 3]


def test_inferred_finals_may_still_come_until_the_first_commit(url: str) -> None:
    store = trajstore.create(url)
    with store.writer() as writer:
        writer.append({"obs": np.zeros(2), "action": 1})
        writer.end_episode(truncated=True, final={"obs": np.ones(2)})
        writer.commit()
        with pytest.raises(
            trajstore.DataError, match="final: expected a final value of 'obs', got one of 'action'"
        ):
            writer.append({"obs": np.zeros(2), "action": 1}, truncated=True, final={"action": 2})
    assert store.refresh().schema.final_fields == ("obs",)


def test_a_first_final_after_a_commit_is_stored_for_fields_named_like_observations(url: str) -> None:
    store = trajstore.create(url)
    with store.writer() as writer:
        writer.append({"obs": {"a": np.zeros(2)}, "action": 1})
        writer.commit()
        writer.end_episode(truncated=True, final={"obs": {"a": np.ones(2)}})
    store.refresh()
    assert store.read_episode(0)["obs"]["a"].tolist() == [[0, 0], [1, 1]]


def test_a_first_final_of_another_field_after_a_commit_is_refused_with_the_way_out(url: str) -> None:
    store = trajstore.create(url)
    with store.writer() as writer:
        writer.append({"state": np.zeros(2), "action": 1})
        writer.commit()
        message = (
            r"final: expected a final value of no field, got one of 'state'.*final=True.*pass final= with every"
        )
        with pytest.raises(trajstore.DataError, match=message):
            writer.end_episode(truncated=True, final={"state": np.ones(2)})
        writer.end_episode(truncated=True)


def test_final_values_may_come_with_every_step(url: str) -> None:
    store = trajstore.create(url)
    with store.writer() as writer:
        for t in range(3):
            writer.append({"state": np.array(t), "action": t}, truncated=t == 2, final={"state": np.array(t + 1)})
            writer.commit()  # the first step has fixed which fields have a final value
    store.refresh()
    assert store.read_episode(0)["state"].tolist() == [0, 1, 2, 3]
    assert store.episodes["has_final"].tolist() == [True]


def test_an_episode_that_ends_with_neither_flag_is_cut(url: str) -> None:
    store = trajstore.create(url)
    with store.writer() as writer:
        for env in range(2):
            writer.append({"obs": np.zeros(2), "action": 1}, env=env)
        writer.end_episode(0, final={"obs": np.ones(2)})
        writer.end_episode(1)
    store.refresh()
    assert store.episodes["end"].tolist() == ["cut", "cut"]
    assert store.episodes["has_final"].tolist() == [True, False]


def test_evidence_of_other_final_values_goes_before_names(url: str) -> None:
    store = trajstore.create(url)
    with store.writer() as writer:
        writer.append({"obs": np.zeros(2), "goal": 1, "action": 1})
        writer.end_episode(truncated=True, final={"obs": np.ones(2), "goal": 2})
    assert store.refresh().schema.final_fields == ("obs", "goal")


def test_a_store_of_observations_alone_has_no_final_value_by_name(url: str) -> None:
    store = trajstore.create(url)
    with store.writer() as writer:
        writer.append_episode({"obs": np.zeros((3, 2))}, truncated=True)
    store.refresh()
    assert store.episodes["length"].tolist() == [3]


def test_data_that_is_refused_defines_no_schema(url: str) -> None:
    store = trajstore.create(url)
    with store.writer() as writer:
        with pytest.raises(trajstore.DataError, match="expected the same number of rows"):
            writer.append_episode({"a": np.zeros(3), "b": np.zeros(9, np.float32)})
        assert writer.schema is None
        writer.append_episode({"c": np.zeros(3, np.int16)}, terminated=True)
    assert list(store.refresh().schema or ()) == ["c"]


def test_an_aborted_episode_keeps_what_was_committed(url: str) -> None:
    store = trajstore.create(url, SCHEMA)
    with store.writer() as writer:
        writer.append(one(0))
        writer.commit()
        writer.append(one(1))
        writer.abort_episode()
        writer.append(one(2))
        writer.abort_episode()
        assert writer.stats()["dropped_steps"] == 2
    table = store.refresh().episodes
    assert table["end"].tolist() == ["aborted", "aborted"]
    assert table["length"].tolist() == [1, 0]
    assert state(store.read_episode(0)).tolist() == [0]


def test_a_step_can_be_amended_until_it_is_placed(url: str) -> None:
    store = trajstore.create(url, SCHEMA)
    with store.writer() as writer:
        for value in range(3):
            writer.append(one(value))
        writer.amend({"action": 70})
        writer.amend({"action": 50}, t=0)
        writer.commit()
        with pytest.raises(trajstore.StepPlacedError, match="step 2 of env 0 is committed"):
            writer.amend({"action": 1})
        writer.append(one(3))
        writer.amend({"action": 30})
    store.refresh()
    assert store.read_episode(0)["action"].tolist() == [50, 1, 70, 30]


def test_rewards_that_arrive_with_observations_are_not_earned_at_reset(url: str) -> None:
    schema = Schema(
        {"obs": Field("float32", final=True), "reward": Field("float32", final=True), "action": Field("int64")},
        reward_alignment="observation",
    )
    store = trajstore.create(url, schema)
    with store.writer() as writer:
        data = {
            "obs": np.zeros(4, np.float32),
            "reward": np.array([9, 1, 2, 3], np.float32),
            "action": np.zeros(3, np.int64),
        }
        writer.append_episode(data, terminated=True)
        for value in (9.0, 1.0):
            writer.append({"obs": 0.0, "reward": value, "action": 0})
            writer.commit()
        writer.end_episode(truncated=True, final={"obs": 0.0, "reward": 5.0})
    assert store.refresh().episodes["return"].tolist() == [6.0, 6.0]


def test_many_environments_at_once(url: str) -> None:
    store = trajstore.create(url, fsync=False)
    n_envs, rng = 2000, np.random.default_rng(0)
    lengths = np.zeros(n_envs, int)
    with store.writer() as writer:
        for _ in range(5):
            ends = rng.random(n_envs) < 0.2
            writer.append({"x": np.arange(n_envs)}, envs=range(n_envs), terminated=ends)
            lengths += 1
        assert writer.stats()["steps"] == 5 * n_envs
    table = store.refresh().episodes
    assert table["length"].sum() == 5 * n_envs
    assert (np.bincount(table["env"], weights=table["length"]) == 5).all()


def test_threads_append_while_another_commits(url: str) -> None:
    store = trajstore.create(url, SCHEMA, fsync=False)
    with store.writer(buffer_bytes=4000) as writer:

        def append(env: int) -> None:
            for value in range(200):
                writer.append(one(value), env=env)

        threads = [threading.Thread(target=append, args=(env,)) for env in range(4)]
        for thread in threads:
            thread.start()
        for _ in range(20):
            writer.commit()
        for thread in threads:
            thread.join()
    store.refresh()
    for i in range(4):
        assert state(store.read_episode(i)).tolist() == list(range(200))


def test_nothing_appended_leaves_nothing(url: str) -> None:
    store = trajstore.create(url)
    with store.writer() as writer:
        writer.commit()
    assert store.refresh().streams == ()
    assert len(store) == 0


def test_options_are_checked() -> None:
    store = trajstore.create("memory://options")
    for bad in (
        {"commit_steps": 0}, {"commit_steps": 1e2}, {"commit_seconds": -1}, {"buffer_bytes": "4 apples"},
        {"rank": -1}, {"rank": True}, {"world_size": 1 << 63},
    ):  # fmt: skip
        with pytest.raises(ValueError, match=next(iter(bad))):
            store.writer(**bad)
    with pytest.raises(trajstore.SchemaError, match="writer name"):
        store.writer("../x")


@pytest.mark.parametrize("method", ["reserve", "add_row"])
def test_an_interrupt_in_the_middle_of_an_append_tears_nothing(
    url: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = trajstore.create(url, SCHEMA)
    writer = store.writer(commit_seconds=None)
    writer.append_episode(steps(3), terminated=True)
    writer.commit()
    writer.append(one(7))

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(trajstore.writing.staging.Staging, method, interrupted)
    with pytest.raises(KeyboardInterrupt):
        writer.append(one(8), terminated=method == "reserve")  # a step that ends an episode is checked in full
    monkeypatch.undo()
    with pytest.raises(trajstore.ClosedError, match="is being closed; call close"):
        writer.append(one(9))
    writer.close()
    table = store.refresh().episodes
    assert table["end"].tolist() == ["terminated"]
    assert state(store.read_episode(0)).tolist() == [0, 1, 2]


def test_a_writer_whose_close_failed_takes_nothing_more(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = trajstore.create(url, SCHEMA)
    writer = store.writer(commit_seconds=None)
    writer.append(one(0))
    monkeypatch.setattr(
        trajstore.writing.commit_pipeline.CommitPipeline,
        "seal",
        lambda _: (_ for _ in ()).throw(trajstore.StorageError("no")),
    )
    with pytest.raises(trajstore.StorageError):
        writer.close()
    with pytest.raises(trajstore.ClosedError):
        writer.append(one(1))
    monkeypatch.undo()
    writer.close()
    assert store.refresh().streams[0].is_sealed
    assert store.episodes["length"].tolist() == [1]


def test_commits_by_time_may_be_as_rare_as_one_likes(url: str) -> None:
    with trajstore.create(url, SCHEMA).writer(commit_seconds=float("inf")) as writer:
        writer.append(one(0))
        writer.commit()


@pytest.mark.parametrize("name", ["row_start", "present", "source", "text_stop", "end"])
def test_episode_columns_may_not_be_named_like_ours(name: str) -> None:
    with pytest.raises(trajstore.SchemaError, match="is taken by the episode table"):
        Schema({"x": Field("bool")}, episode={name: int})


def test_keys_of_metadata_are_strings_at_any_depth(url: str) -> None:
    with trajstore.create(url, SCHEMA).writer() as writer:
        with pytest.raises(trajstore.DataError, match="metadata: expected strings as keys, got 1"):
            writer.append_episode(steps(2), terminated=True, metadata={"a": [{"b": {1: 2}}]})
        with pytest.raises(trajstore.DataError, match="16777217 is out of range for float32"):
            writer.append({**one(0), "reward": (1 << 24) + 1})
        with pytest.raises(trajstore.DataError, match="would lose its mask"):
            writer.append({**one(0), "reward": np.ma.masked_array(np.float32(1), True)})
        with pytest.raises(trajstore.DataError, match="expected a mapping of field names to values, got list"):
            writer.append([1, 2])  # type: ignore[arg-type]


def test_places_without_atomic_puts_are_refused() -> None:
    with pytest.raises(ValueError, match=r"sftp://: .* puts are not known to be atomic"):
        trajstore.create("sftp://host/x")


# ---- cuts ---------------------------------------------------------------------------------------


def test_capture_passes_the_record_of_exactly_the_steps_appended_before(url: str) -> None:
    store = trajstore.create(url, SCHEMA, fsync=False)
    turn, n, is_over = threading.Lock(), 0, threading.Event()
    expected: list[int] = []
    captured: list[tuple[int, int, str]] = []

    def append() -> None:
        nonlocal n
        while not is_over.is_set():
            with turn:
                writer.append(one(n), env=n % 3, terminated=n % 7 == 0)
                n += 1

    def hear(record: CommitRecord | None) -> None:
        assert record is not None
        captured.append((record.rows, record.commit, threading.current_thread().name))

    with store.writer(buffer_bytes=4000, commit_steps=5, commit_seconds=None) as writer:
        writer.append(one(0))
        n += 1
        thread = threading.Thread(target=append)
        thread.start()
        tickets = []
        for _ in range(50):
            while n <= (expected or [0])[-1]:
                time.sleep(0.0001)
            with turn:
                expected.append(n)
                tickets.append(writer.capture_record(hear))
        is_over.set()
        thread.join()
        writer.wait(tickets[-1])
        assert len(captured) == len(expected)
    assert [rows for rows, _, _ in captured] == expected
    assert [commit for _, commit, _ in captured] == sorted(commit for _, commit, _ in captured)
    assert {name for _, _, name in captured} == {"trajstore-commit"}


def test_capture_with_nothing_staged_passes_the_newest_record(url: str) -> None:
    store = trajstore.create(url)
    captured: list[CommitRecord | None] = []
    with store.writer(commit_seconds=None) as writer:
        writer.wait(writer.capture_record(captured.append))
        writer.append(one(0))
        writer.commit()
        assert [writer.wait(writer.capture_record(captured.append)) for _ in range(2)] == [None, None]
        assert writer.record is not None
    assert captured[0] is None
    assert [record.commit for record in captured[1:] if record] == [1, 1]
    assert store.refresh().streams[0].commit == 2  # the end of the open episode


def test_capture_before_the_first_commit_passes_no_record_even_if_one_follows_at_once(url: str) -> None:
    store = trajstore.create(url, SCHEMA)
    captured: list[CommitRecord | None] = []
    with store.writer(commit_seconds=None) as writer:
        gate = threading.Event()
        writer.capture_record(lambda _: gate.wait(60) and None)  # holds the background up
        writer.capture_record(captured.append)
        writer.append(one(0))
        writer.capture_record(captured.append)
        gate.set()
    assert [record and record.rows for record in captured] == [None, 1]


def test_capture_calls_back_once_its_commit_succeeds(url: str) -> None:
    trajstore.create(url, SCHEMA, fsync=False)
    plan = FailWhile()
    writer = trajstore.Store(FaultyStorage(real_storage(url), plan), url, None).writer(commit_seconds=None)
    captured: list[CommitRecord | None] = []
    plan.error = broken
    writer.append(one(0))
    ticket = writer.capture_record(captured.append)
    with pytest.raises(trajstore.StorageError):
        writer.wait(ticket)
    assert captured == []
    plan.error = None
    writer.append(one(1))
    writer.wait(ticket)
    writer.close()
    assert [record.rows for record in captured if record] == [1]


def test_a_failure_of_the_callback_is_raised_once_by_the_next_call_and_blocks_nothing(url: str) -> None:
    store = trajstore.create(url, SCHEMA)

    def fail(_: object) -> None:
        raise LookupError("the callback failed")

    writer = store.writer(commit_seconds=None)
    writer.append(one(0))
    writer.wait(writer.capture_record(fail))  # others wait as well, so it is not raised there
    with pytest.raises(LookupError, match="the callback failed"):
        writer.commit()
    assert store.refresh().streams[0].rows == 1
    writer.append(one(1))
    writer.wait(writer.capture_record(fail))
    with pytest.raises(LookupError, match="the callback failed"):
        writer.append(one(2))
    writer.append(one(2))
    writer.commit()
    assert store.refresh().streams[0].rows == 3
    writer.capture_record(fail)
    with pytest.raises(LookupError, match="the callback failed"):
        writer.close()
    assert store.refresh().streams[0].is_sealed
    writer.close()


class FailingListener:
    """A listener that fails at the first commit."""

    def __init__(self) -> None:
        self.n_rows: list[int] = []

    def handed_off(self, staging: Any) -> None: ...

    def amended(self, episode: int, t: int, values: Any) -> None: ...

    def dropped(self) -> None: ...

    def committed(self, spans: Array) -> bool:
        self.n_rows.append(int(spans[:, 4].max()))
        if len(self.n_rows) == 1:
            raise RuntimeError("not now")
        return False


def test_a_commit_after_which_the_listener_failed_is_not_made_twice(url: str) -> None:
    store = trajstore.create(url, SCHEMA)
    writer, listener, captured = store.writer(commit_seconds=None), FailingListener(), []
    writer.set_append_listener(listener)
    writer.append_episode(steps(5), terminated=True)
    ticket = writer.capture_record(lambda record: captured.append(record and record.rows))
    with pytest.raises(RuntimeError, match="not now"):
        writer.wait(ticket)
    writer.wait(ticket)
    assert (listener.n_rows, captured) == ([5, 5], [5])
    writer.close()
    assert [record.rows for record in store.refresh().streams] == [5]
    assert state(store.read_episode(0)).tolist() == list(range(5))


class ReadingListener(FailingListener):
    """A listener that keeps reading the rows of every staging, without copying them."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Array] = []

    def handed_off(self, staging: Any) -> None:
        self.seen.append(staging.columns["action"][: staging.n])

    def committed(self, spans: Array) -> bool:
        return True


def test_a_staging_that_is_still_read_is_not_filled_again(url: str) -> None:
    listener = ReadingListener()
    with trajstore.create(url, SCHEMA).writer(commit_seconds=None) as writer:
        writer.set_append_listener(listener)
        for n in range(6):
            writer.append_episode({**steps(5), "action": np.full(5, n)}, terminated=True)
            writer.commit()
    assert [rows.tolist() for rows in listener.seen] == [[n] * 5 for n in range(6)]


def test_capture_needs_a_callback(url: str) -> None:
    with (
        trajstore.create(url, SCHEMA).writer() as writer,
        pytest.raises(TypeError, match="done: expected a function that takes the record"),
    ):
        writer.capture_record(None)  # type: ignore[arg-type]


def test_capture_does_not_wait_for_the_disk_unless_both_stagings_are_full(url: str) -> None:
    trajstore.create(url, SCHEMA, fsync=False)
    plan = BlockPuts()
    writer = trajstore.Store(FaultyStorage(real_storage(url), plan), url, None).writer(commit_seconds=None)
    captured: list[int] = []
    writer.append(one(0))
    writer.capture_record(
        lambda record: captured.append(record.rows if record else 0)
    )  # returns although puts are held up
    assert plan.reached.wait(60)
    writer.append(one(1))
    second = threading.Thread(
        target=lambda: writer.capture_record(lambda record: captured.append(record.rows if record else 0)),
        daemon=True,
    )
    second.start()
    second.join(0.2)
    assert second.is_alive()  # the first is not on disk yet, and there are two stagings
    assert captured == []
    plan.gate.set()
    second.join(60)
    writer.close()
    assert captured == [1, 2]


# ---- what lies on the storage -------------------------------------------------------------------


def chunk_bytes(url: str, stream: str) -> int:
    sizes = real_storage(url).tree_sizes(f"streams/{stream}")
    parts = {key: key.split("/") for key in sizes}
    return sum(sizes[key] for key, part in parts.items() if part[2] == "steps" and part[-1] != "zarr.json")


@pytest.mark.parametrize("seed", range(3))
def test_the_bytes_of_steps_are_those_on_the_storage(url: str, seed: int) -> None:
    trajstore.create(url, SCHEMA, fsync=False)
    plan = FailWhile()
    store = trajstore.Store(FaultyStorage(real_storage(url), plan), url, None)
    rng = np.random.default_rng(seed)
    writer = store.writer(commit_seconds=None)
    assert (writer.step_bytes.total, writer.committed_rows) == (0, 0)
    n_rows = 0
    for i in range(12):
        n = int(rng.integers(1, 11))
        writer.append_episode(steps(n, int(rng.integers(0, 1000))), terminated=True, metadata={"i": i})
        plan.error = broken if i % 3 == 1 else None
        if plan.error:
            with pytest.raises(trajstore.StorageError):
                writer.commit()
            plan.error = None
        writer.put_column("c", writer.stream, rng.normal(size=50))
        writer.commit()
        n_rows += n
        assert (writer.step_bytes.total, writer.committed_rows) == (chunk_bytes(url, writer.stream), n_rows)
    writer.close()
    assert writer.step_bytes.total == chunk_bytes(url, writer.stream)


def test_a_writer_whose_stream_was_removed_does_not_bring_it_back(place: Any) -> None:
    store = trajstore.create(place.url, SCHEMA, **place.kwargs)
    storage = real_storage(place.url, place.options)
    for call in ("commit", "publish_view", "close"):
        writer = store.writer(commit_seconds=None)
        writer.append_episode(steps(6))
        writer.commit()
        storage.remove_tree(f"streams/{writer.stream}")
        if call == "publish_view":
            writer.set_view(first_row=3)
        else:
            writer.append_episode(steps(6))
        with pytest.raises(trajstore.ConflictError, match="was removed by a session that declared its writer dead"):
            writer.close() if call == "close" else writer.commit()
        writer.release()
        assert store.refresh().streams == ()
        assert storage.list_tree("streams") == ["streams/zarr.json"]


def test_nested_tensordicts_are_taken_as_nested_mappings_are(url: str) -> None:
    tensordict = pytest.importorskip("tensordict")
    given = {"o": {"x": {"y": torch.arange(3)}}, "reward": torch.zeros(3)}
    store = trajstore.create(url)
    with store.writer() as writer:
        writer.append_episode(tensordict.TensorDict(given, [3]))
    assert store.refresh().read_episode(0)["o"]["x"]["y"].tolist() == [0, 1, 2]
