"""Steps of the same form as the step before are copied without a full check: with the same results and errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import trajstore
from trajstore import Field, Schema, Store
from trajstore.errors import DataError
from trajstore.writing.step_form import StepForm
from trajstore.writing.validation import StepValidator

SCHEMA = Schema(
    {
        "observation": {"state": Field("float32", (2,), final=True), "frame": Field("uint8", (1, 2), final=True)},
        "action": Field("int64"),
        "small": Field("int8"),
        "reward": Field("float32"),
        "half": Field("float16"),
        "is_done": Field("bool"),
    }
)


def new_store(schema: Schema | None = SCHEMA) -> Store:
    return trajstore.create(f"memory://form-{np.random.default_rng().integers(1 << 60)}", schema)


def good_step(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        "observation": {"state": rng.random(2, np.float32), "frame": rng.integers(0, 256, (1, 2), np.uint8)},
        "action": int(rng.integers(-(1 << 62), 1 << 62)),
        "small": np.int8(rng.integers(-128, 128)),
        "reward": float(rng.normal()),
        "half": np.asarray(rng.normal(), np.float16),
        "is_done": bool(rng.random() < 0.5),
    }


NUMBERS = st.sampled_from(
    [
        *(0, 1, -1, 127, 128, -129, 2049, 1 << 24, (1 << 24) + 1, 1 << 53, 1 << 63, 1 << 70, -(1 << 63)),
        *(0.5, -0.0, float("nan"), float("inf"), 65504.0, 65519.0, 65520.0, 3.4028235e38, 3.5e38, 1e-46, 1e308),
        *(True, False, np.True_, np.float32(2.5), np.float64(2.5), np.int64(3), np.int8(3), np.float16(1.5)),
        *(np.zeros((), np.float32), np.zeros((), ">f4"), np.zeros(1, np.float32), np.zeros((), np.int8)),
        *(None, "text", [1.0], {"deep": 1}, torch.tensor(1.5), torch.tensor(3)),
    ]
)
STATES = st.sampled_from(
    [
        *(np.ones(2, np.float32), np.ones(2), np.ones(3, np.float32), np.ones((2, 1), np.float32), [1.0, 2.0]),
        *(np.arange(4, dtype=np.float32)[::2], np.ones(2, ">f4"), torch.ones(2), np.ma.masked_array(np.ones(2))),
    ]
)
CHANGES = st.one_of(
    st.tuples(st.just("set"), st.sampled_from(["action", "small", "reward", "half", "is_done"]), NUMBERS),
    st.tuples(st.just("state"), STATES),
    st.tuples(st.just("drop"), st.sampled_from(["action", "observation"])),
    st.tuples(st.just("add"), st.sampled_from(["more", "a/b"])),
    st.tuples(st.just("flat"), st.just(0)),
)
FLAGS = st.sampled_from([None, False, True, np.False_, np.True_, 0, 1, np.zeros(2, bool), "no"])
FINALS = st.sampled_from(["none", "none", "good", "shape", "missing", "torch", "number"])


@st.composite
def calls(draw: st.DrawFn) -> dict[str, Any]:
    step = good_step(draw(st.integers(0, 1000)))
    if draw(st.integers(0, 2)) == 0:
        change: Any = draw(CHANGES)
        if change[0] == "set":
            step[change[1]] = change[2]
        elif change[0] == "state":
            step["observation"]["state"] = change[1]
        elif change[0] == "drop":
            del step[change[1]]
        elif change[0] == "add":
            step[change[1]] = 1.0
        else:
            step["observation"] = step["observation"]["state"]
    call: dict[str, Any] = {
        "step": step,
        "env": draw(st.sampled_from([0, 0, 0, 1, np.int64(1), None, True, -1, 1.5])),
    }
    for name in ("terminated", "truncated"):
        call[name] = draw(FLAGS) if draw(st.integers(0, 3)) == 0 else None
    call["final"] = make_final(draw(FINALS))
    return call


def make_final(kind: str) -> Any:
    final = {"observation": {"state": np.full(2, 7, np.float32), "frame": np.full((1, 2), 7, np.uint8)}}
    if kind == "none":
        return None
    if kind == "shape":
        final["observation"]["state"] = np.ones(3, np.float32)
    elif kind == "missing":
        del final["observation"]["frame"]
    elif kind == "torch":
        final["observation"]["state"] = torch.ones(2)  # type: ignore[assignment]
    elif kind == "number":
        final["observation"] = 1  # type: ignore[assignment]
    return final


def run(script: list[dict[str, Any]], *, with_forms: bool, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Any:
    """Append all steps; returns handles and errors, staged values after each call, and what was committed."""
    store, results = new_store(options.pop("schema", SCHEMA)), []
    with monkeypatch.context() as patch:
        if not with_forms:
            patch.setattr(StepForm, "is_of", lambda *_: False)
        with store.writer("w", commit_seconds=None, **options) as writer:
            for call in script:
                try:
                    result: Any = [np.asarray(part).tolist() for part in writer.append(**call)[1:]]
                except (DataError, TypeError, ValueError) as error:
                    result = type(error), str(error)
                with writer.locked_staging(blocking=True) as staging:
                    state = (staging.n, staging.n_ends, staging.ends().tolist()) if staging is not None else None
                counts = {
                    k: v for k, v in writer.stats().items() if "episodes" in k or k in ("steps", "dropped_steps")
                }
                # Background commits take a staging sooner or later.
                results.append((result, counts, state if "commit_steps" not in options else None))
    snapshot = store.refresh()
    episodes = [snapshot.read_episode(i) for i in range(len(snapshot.episodes))] if snapshot.schema else []
    return results, [flat_bytes(episode) for episode in episodes]


def flat_bytes(node: Any) -> Any:
    if isinstance(node, dict):
        return {name: flat_bytes(value) for name, value in node.items()}
    return np.asarray(node).tobytes() if isinstance(node, np.ndarray) else repr(node)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    script=st.lists(calls(), min_size=2, max_size=12),
    options=st.sampled_from([{}, {"commit_steps": 3}, {"buffer_bytes": 700}, {"schema": None}]),
)
def test_forms_change_neither_values_nor_handles_nor_errors(
    script: list[dict[str, Any]], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = run(script, with_forms=False, monkeypatch=monkeypatch, **dict(options))
    found = run(script, with_forms=True, monkeypatch=monkeypatch, **dict(options))
    assert found == expected


VECTOR_FLAGS = st.sampled_from(["none", "none", "none", "unset", "some", "shape", "ints", "list"])


@st.composite
def vector_calls(draw: st.DrawFn) -> dict[str, Any]:
    n, seed = draw(st.sampled_from([2, 2, 2, 3])), draw(st.integers(0, 1000))
    rng = np.random.default_rng(seed)
    state = rng.random((n, 2), np.float32)
    step: dict[str, Any] = {
        "obs": {"state": state},
        "reward": rng.random(n, np.float32),
        "flag": rng.random(n) < 0.5,
    }
    change = draw(st.sampled_from(["", "", "", "", "dtype", "rows", "torch", "missing", "number"]))
    if change == "dtype":
        step["reward"] = step["reward"].astype(np.float64)
    elif change == "rows":
        step["reward"] = np.append(step["reward"], np.float32(0))
    elif change == "torch":
        step["obs"] = {"state": torch.from_numpy(state)}
    elif change == "missing":
        del step["flag"]
    elif change == "number":
        step["reward"] = 1.0
    call: dict[str, Any] = {
        "step": step,
        "envs": draw(st.sampled_from([range(n), n, list(range(n)), range(1, n + 1)])),
    }
    made = {"none": None, "unset": np.zeros(n, bool), "some": rng.random(n) < 0.5, "shape": np.zeros(n + 1, bool)}
    made |= {"ints": np.zeros(n, np.int64), "list": [False] * n}
    call["terminated"], call["truncated"] = made[draw(VECTOR_FLAGS)], made[draw(VECTOR_FLAGS)]
    finals = {"none": None, "good": {"obs": {"state": state + 1}}, "bad": {"obs": {"state": state[:1]}}}
    call["final"] = finals[draw(st.sampled_from(["none", "good", "good", "bad"]))]
    call["autoreset"] = draw(st.sampled_from([None, None, "same_step", "next_step", "disabled"]))
    return call


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    script=st.lists(vector_calls(), min_size=2, max_size=12),
    options=st.sampled_from([{}, {"commit_steps": 5}, {"buffer_bytes": 1000}]),
)
def test_forms_of_several_environments_change_nothing(
    script: list[dict[str, Any]], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = {
        "obs": {"state": Field("float32", (2,), final=True)},
        "reward": Field("float32"),
        "flag": Field("bool"),
    }
    expected = run(script, with_forms=False, monkeypatch=monkeypatch, schema=Schema(fields), **options)
    found = run(script, with_forms=True, monkeypatch=monkeypatch, schema=Schema(fields), **options)
    for i, (one, other) in enumerate(zip(found[0], expected[0], strict=True)):
        assert (i, one) == (i, other)
    assert found[1] == expected[1]


def test_steps_of_one_form_are_checked_in_full_once(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[Any] = []
    full = StepValidator.steps
    monkeypatch.setattr(StepValidator, "steps", lambda self, *a: checked.append(a) or full(self, *a))
    with new_store().writer("w", commit_seconds=None) as writer:
        for i in range(20):
            assert writer.append(good_step(i), terminated=False, truncated=np.False_).t == i
    assert len(checked) == 1


def test_a_program_whose_steps_all_differ_does_not_learn_each_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    learned: list[Any] = []
    read = StepForm._read
    monkeypatch.setattr(StepForm, "_read", lambda self, *a: learned.append(a) or read(self, *a))
    with new_store().writer("w", commit_seconds=None) as writer:
        for i in range(200):
            writer.append(good_step(i) | {"action": [1, np.int64(1)][i % 2]})
    assert len(learned) < 20
