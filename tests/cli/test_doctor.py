"""The command ``doctor``: what it prints, and how it ends."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import trajstore
from tests.cli.test_cli import run, run_json


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("doctor") / "store"
    rng = np.random.default_rng(0)
    with trajstore.create(root, fsync=False).writer() as writer:
        for n in range(5, 40):
            data = {"observation": rng.normal(size=(n + 1, 2)), "reward": rng.random(n), "z": np.zeros(n)}
            writer.append_episode(data | {"speed": np.full(n, 3.0)}, truncated=True)
    return root


def test_findings_are_grouped_with_reason_and_advice(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trajstore.cli.output._PIPE_WIDTH", 80)
    result = run("doctor", root)
    assert (result.exit_code, result.stderr) == (0, "")
    for part in (
        "warning: episodes: none of 35 finished episodes is terminated",
        "warning: field 'z': every value is 0",
        "warning: field 'speed': every value is 3",
        "(constant-field)",
        "Looked at 35 episodes",
        "3 warnings, ",
    ):
        assert part in result.stdout, part
    assert result.stdout.count("What to do: check that the right value is recorded") == 1
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_the_same_as_json(root: Path) -> None:
    facts = run_json("doctor", root)
    assert facts["counts"]["warning"] == 3
    assert {*facts["findings"][0]} == {"code", "severity", "where", "what", "why", "advice"}


def test_strict_ends_with_1_for_warnings(root: Path) -> None:
    assert run("doctor", root, "--strict").exit_code == 1


def test_errors_end_with_1(tmp_path: Path) -> None:
    with trajstore.create(tmp_path / "store").writer() as writer:
        writer.append_episode({"reward": np.array([1, np.nan, 2])}, terminated=True)
    result = run("doctor", tmp_path / "store")
    assert (result.exit_code, "error: field 'reward'" in result.stdout) == (1, True)


def test_wrong_usage_ends_with_2(root: Path) -> None:
    result = run("doctor", root, "--max-bytes", "much")
    assert (result.exit_code, "max_bytes: expected bytes" in result.stderr) == (2, True)
