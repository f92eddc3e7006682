"""The examples run, and assert themselves what they learned or stored."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.warm_python import WarmPython, warm_python

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
NEEDS = {"jax_dqn": "jax", "sb3_sac": "stable_baselines3"}


@pytest.fixture(scope="module")
def python() -> Iterator[WarmPython]:
    with warm_python(*filter(find_spec, ["gymnasium"])) as python:
        yield python


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_and_reaches_what_it_asserts(python: WarmPython, path: Path, tmp_path: Path) -> None:
    pytest.importorskip(NEEDS.get(path.stem, "gymnasium"))
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    options = {"cwd": tmp_path, "env": environment, "warn": ["error::ResourceWarning"], "timeout": 900}
    done = python.run_script(path, tmp_path / "run", **options)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip(), "an example says what it did"


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_short_and_listed(path: Path) -> None:
    assert len(path.read_text().splitlines()) < 80
    assert f"[{path.name}]({path.name})" in (ROOT / "examples" / "README.md").read_text()
