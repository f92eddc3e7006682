"""What a user types first works, or is refused at once with a message that helps."""

from __future__ import annotations

import logging
import uuid
from typing import Any

import numpy as np
import pytest
import torch

import trajstore
from trajstore import DataError, Field, ReplayBuffer, Schema, SchemaError, Windows
from trajstore.schema import RESERVED
from trajstore.store.store import create_imported


@pytest.fixture
def url() -> str:
    return f"memory://{uuid.uuid4().hex}"


def small(url: str, **options: Any) -> ReplayBuffer:
    return ReplayBuffer(url, **{"buffer_bytes": "1MB", "seed": 0} | options)


def fill(buffer: ReplayBuffer, n: int = 20) -> None:
    for t in range(n):
        buffer.append({"observation": np.array([float(t)]), "reward": 1.0}, truncated=t % 10 == 9)


# ---- options


def test_a_misspelt_option_names_the_nearest_one(url: str) -> None:
    with pytest.raises(TypeError, match=r"'capcity' \(did you mean 'capacity'\?\); the options are .*capacity, "):
        ReplayBuffer(url, capcity=5)  # type: ignore[call-arg]


def test_a_schema_may_be_a_plain_dict(url: str) -> None:
    with small(
        url, schema={"observation": {"state": Field("float32", (2,))}, "reward": Field("float32")}
    ) as buffer:
        buffer.append({"observation": {"state": np.zeros(2, np.float32)}, "reward": 0.0})
        assert buffer.schema == Schema(
            {"observation": {"state": Field("float32", (2,))}, "reward": Field("float32")}
        )
    with pytest.raises(SchemaError, match="field 'a': expected a Field"):
        trajstore.create(url + "-2", {"a": "float32"})
    with pytest.raises(TypeError, match="schema: expected a Schema or a mapping"):
        small(url + "-2", schema=["a"])


def test_another_schema_is_refused_by_name(url: str) -> None:
    trajstore.create(url, {"x": Field("float32", (3,))})
    with pytest.raises(SchemaError, match=r"x: float32 \(3,\) in the store, float32 \(4,\) in the given schema"):
        small(url, schema={"x": Field("float32", (4,))})


# ---- steps of several environments


def test_envs_may_be_the_number_of_environments(url: str) -> None:
    with small(url) as buffer:
        assert buffer.append({"x": np.zeros(3)}, envs=3).episode.tolist() == [0, 1, 2]
        assert buffer.append({"x": np.zeros(3)}, envs=np.int64(3)).t.tolist() == [1, 1, 1]
        assert buffer.extend({"x": np.zeros((2, 3))}, envs=3).t.tolist() == [[2] * 3, [3] * 3]
        with pytest.raises(DataError, match="envs: expected at least 1"):
            buffer.append({"x": np.zeros(0)}, envs=0)
        with pytest.raises(DataError, match="several environments at once go into envs="):
            buffer.append({"x": np.zeros(3)}, env=range(3))  # type: ignore[arg-type]
        with pytest.raises(DataError, match="envs: expected numbers of environments or how many"):
            buffer.append({"x": np.zeros(3)}, envs="abc")


@pytest.mark.parametrize("flags", [{}, {"truncated": np.zeros(8, bool)}, {"terminated": torch.zeros(8).bool()}])
def test_forgotten_envs_are_noticed_with_the_first_step(url: str, flags: dict[str, Any]) -> None:
    with small(url) as buffer:
        step = {"observation": np.zeros((8, 4), np.float32), "action": np.zeros(8, np.int64), "reward": np.zeros(8)}
        with pytest.raises(DataError, match=r"envs=8, or envs=envs"):
            buffer.append(step, **flags)
        buffer.append(step, envs=8, **flags)
        assert buffer.n_episodes == 8


def test_flags_of_several_environments_need_envs_also_with_a_schema(url: str) -> None:
    with small(url, schema={"x": Field("float32", (8,))}) as buffer:
        with pytest.raises(DataError, match=r"terminated: expected a bool for the step of one.*envs=8"):
            buffer.append({"x": np.zeros(8, np.float32)}, terminated=np.zeros(8, bool))
        assert buffer.n_steps == 0


def test_vectors_of_one_environment_are_no_environments(url: str) -> None:
    with small(url) as buffer:
        buffer.append({"observation": np.zeros(8), "action": np.zeros(8), "reward": 0.0})
        assert buffer.n_episodes == 1
    declared = {"observation": Field("float64", (2,)), "reward": Field("float64", (2,))}
    with small(url + "-2", schema=declared) as buffer:
        buffer.append({"observation": np.zeros(2), "reward": np.zeros(2)})
        assert buffer.n_episodes == 1


# ---- values


def test_an_integer_as_the_first_reward_does_not_fix_the_type(url: str) -> None:
    with small(url) as buffer:
        buffer.append({"reward": 0, "count": 0})
        buffer.append({"reward": 0.5, "count": 1}, terminated=True)
        assert buffer.schema is not None
        assert [field.dtype for field in buffer.schema.fields.values()] == ["float64", "int64"]


def test_a_type_that_was_inferred_says_so(url: str) -> None:
    with small(url) as buffer:
        buffer.append({"reward": np.int64(0)})
        with pytest.raises(DataError, match=r"expected int64.*inferred from the first data.*schema="):
            buffer.append({"reward": 0.5})


def test_metadata_may_come_with_the_last_step(url: str) -> None:
    with small(url) as buffer:
        buffer.append({"x": 0.0})
        with pytest.raises(DataError, match="metadata: expected with the step that ends an episode"):
            buffer.append({"x": 1.0}, metadata={"success": True})
        buffer.append({"x": 1.0}, terminated=True, metadata={"success": True})
        ends = np.array([False, True])
        buffer.append({"x": np.zeros(2)}, envs=2, terminated=ends, metadata={"success": False})
        with pytest.raises(DataError, match="metadata"):
            buffer.append({"x": np.zeros(2)}, envs=2, terminated=ends, metadata={"success": object()})
    rows = trajstore.open(url).episodes
    assert [metadata.get("success") for metadata in rows["metadata"]] == [True, None, False]


# ---- names


@pytest.mark.parametrize("name", sorted(RESERVED))
def test_names_that_batches_use_are_refused_with_the_first_step(url: str, name: str) -> None:
    with small(url) as buffer:
        for step in ({name: 1.0, "x": 1.0}, {name: {"deep": 1.0}, "x": 1.0}):
            with pytest.raises(SchemaError, match=rf"field '{name}.*batches use the name '{name}'.*(rename|pass)"):
                buffer.append(step)
        buffer.append({"x": {name: 1.0}}, terminated=True)  # it may stand deeper
        assert buffer.sample(1)["x"][name].shape == (1, 1)
    with pytest.raises(SchemaError, match=f"field '{name}'"):
        trajstore.create(url + "-2", {name: Field("float32")})
    with pytest.raises(SchemaError, match=f"field '{name}'"):
        small(url + "-3", schema={name: Field("float32")})


def test_every_name_that_a_batch_adds_is_reserved(url: str) -> None:
    options = {"priorities": trajstore.Priorities(alpha=0.5), "sample": Windows(length=2, n_step=2)}
    with small(url, **options) as buffer:
        for t in range(4):
            step = {"observation": np.zeros((1, 2)), "reward": np.zeros(1)}
            buffer.append(step, envs=1, truncated=np.array([t == 3]), final={"observation": np.zeros((1, 2))})
        found = set(buffer.sample(2)) | set(buffer.sample(2, Windows.transitions()))
    assert found - {"observation", "reward"} <= RESERVED


def test_older_stores_with_such_names_are_read_written_and_sampled_without_them(url: str) -> None:
    fields = Schema({"valid": Field("bool"), "x": Field("float64")})
    store = create_imported(url, fields)
    with store.writer() as writer:
        writer.append_episode({"valid": np.ones(3, bool), "x": np.arange(3.0)}, terminated=True)
    again = trajstore.create(url, fields, exist_ok=True)
    assert again.read_episode(0)["valid"].all()
    with pytest.raises(SchemaError, match=r"field 'valid'.*sample=Windows\(fields=\['x'\]\)"):
        small(url)
    with small(url, sample=Windows(fields=["x"])) as buffer:
        buffer.append({"valid": True, "x": 1.0})
        assert set(buffer.sample(4)) >= {"x", "valid"}


# ---- an existing store


def test_joining_an_existing_store_is_said_once(url: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "trajstore")
    with small(url) as buffer:
        fill(buffer)
        assert buffer.stats()["joined_steps"] == 0
    assert not [record for record in caplog.records if "earlier sessions" in record.message]
    with small(url) as buffer:
        assert buffer.stats()["joined_steps"] == buffer.n_steps == 20
    (said,) = [record for record in caplog.records if "earlier sessions" in record.message]
    assert said.levelno == logging.WARNING
    assert "20 rows of 1 earlier sessions" in said.message
    assert "exist=" in said.message
    with small(url, exist="join"):
        pass
    assert [r.levelno for r in caplog.records if "earlier sessions" in r.message][1:] == [logging.INFO]


def test_a_store_with_steps_may_be_refused(url: str) -> None:
    with small(url, exist="fail") as buffer:
        fill(buffer)
    with pytest.raises(FileExistsError, match=r"20 rows of earlier sessions; choose another URL.*exist='join'"):
        small(url, exist="fail")
    with pytest.raises(ValueError, match="exist: expected 'join', 'resume' or 'fail', got 'new'"):
        small(url, exist="new")
    assert trajstore.open(url).episodes["length"].sum() == 20


def test_a_trainer_that_resumes_needs_one_line(url: str) -> None:
    buffer = small(url, exist="resume", capacity=100, sample=Windows(length=2))
    fill(buffer)
    buffer.sample(4)
    buffer.save_checkpoint("a", wait=True)
    wanted = buffer.sample(16)["index"]
    fill(buffer)
    buffer.close()
    with small(url, exist="resume", capacity=100, sample=Windows(length=2)) as again:
        assert again.n_steps == 20  # what came after the checkpoint is abandoned
        assert torch.equal(again.sample(16)["index"], wanted)
        assert again.stats()["joined_steps"] == 0


def test_the_options_of_a_resume_are_those_that_are_given(url: str) -> None:
    with small(url, capacity=100) as buffer:
        fill(buffer)
        buffer.save_checkpoint("a", wait=True)
    with small(url, exist="resume", capacity=10) as again:
        assert again.options.capacity == 10
        assert again.n_steps <= 10


def test_without_a_checkpoint_a_resume_joins(url: str) -> None:
    with small(url, exist="resume") as buffer:
        fill(buffer)
    with small(url, exist="resume") as again:
        assert again.n_steps == again.stats()["joined_steps"] == 20


# ---- things that are something else


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (1_000_000, TypeError, r"url: expected a path or a URL, such as 'runs/walker' .*, got 1000000"),
        ("memory:walker", ValueError, r"url: expected memory://..., got memory:...; for a directory of that name"),
        ("s3:bucket/run", ValueError, r"url: expected s3://..., got s3:..."),
    ],
)
def test_a_place_that_is_no_url_is_refused(given: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ReplayBuffer(given)


def test_seconds_as_text_are_refused(url: str) -> None:
    with pytest.raises(ValueError, match="commit_seconds: expected a positive number or None, got '10'"):
        ReplayBuffer(url, commit_seconds="10")  # type: ignore[arg-type]


def test_a_flag_in_the_place_of_an_environment_is_refused(url: str) -> None:
    with small(url) as buffer:
        buffer.append({"observation": np.zeros(1), "reward": 1.0})
        with pytest.raises(DataError, match="env: expected the number of an environment, got True; pass flags by"):
            buffer.end_episode(True)


def test_metadata_of_a_step_in_the_middle_says_where_it_belongs(url: str) -> None:
    with small(url) as buffer, pytest.raises(DataError, match="pass it only where terminated or truncated is True"):
        buffer.append({"observation": np.zeros(1), "reward": 1.0}, metadata={"success": True})


def test_text_as_a_field_says_where_text_belongs(url: str) -> None:
    with small(url) as buffer, pytest.raises(DataError, match="text is stored by episode: pass it as metadata="):
        buffer.append({"observation": np.zeros(1), "task": "walk"})


def test_a_final_value_of_an_unknown_field_lists_the_fields(url: str) -> None:
    step = {"observation": np.zeros(1), "reward": 1.0}
    with (
        small(url) as buffer,
        pytest.raises(DataError, match="final: no field 'obs'; the fields are"),
    ):
        buffer.append(step, terminated=True, final={"obs": np.zeros(1)})


def test_the_table_says_where_undeclared_metadata_is(url: str) -> None:
    with small(url) as buffer:
        step = {"observation": np.zeros(1), "reward": 1.0}
        buffer.append(step, terminated=True, metadata={"success": True})
        with pytest.raises(KeyError, match=r"no episode column 'success'.* are in 'metadata', a dict for"):
            buffer.sample(1, where=lambda table: table["success"])
        buffer.sample(1, where=lambda table: [values["success"] for values in table["metadata"]])


def test_a_column_and_a_field_of_the_same_name_are_refused_with_the_first_step(url: str) -> None:
    with small(url) as buffer:
        buffer.add_column("advantage")
        buffer.policy_version = 3
        for name in ("advantage", "policy_version"):
            with pytest.raises(DataError, match=f"field '{name}': there is a column '{name}'"):
                buffer.append({"observation": np.zeros(1), name: 1.0})
        buffer.append({"observation": np.zeros(1), "reward": 1.0})
        assert buffer.sample(2)["policy_version"].tolist() == [[3], [3]]
    assert len(trajstore.open(url)) == 1


def test_ends_without_final_values_and_autoreset_are_mentioned_once(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    step, ends = {"observation": np.zeros((2, 1)), "reward": np.ones(2)}, np.array([True, False])
    with caplog.at_level(logging.WARNING), small(url) as buffer:
        buffer.append(step, envs=2)
        buffer.append(step, envs=2, terminated=ends, autoreset="same_step")
        assert "reset themselves" not in caplog.text
        buffer.append(step, envs=2, terminated=ends)
        buffer.append(step, envs=2, terminated=ends)
    assert caplog.text.count("append does not know when they reset themselves") == 1
