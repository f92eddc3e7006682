"""The examples run, and assert themselves what they learned or stored."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
NEEDS = {"jax_dqn": "jax", "sb3_sac": "stable_baselines3"}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_and_reaches_what_it_asserts(path: Path, tmp_path: Path) -> None:
    pytest.importorskip(NEEDS.get(path.stem, "gymnasium"))
    command = [sys.executable, "-W", "error::ResourceWarning", str(path), str(tmp_path / "run")]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip(), "an example says what it did"


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_short_and_listed(path: Path) -> None:
    assert len(path.read_text().splitlines()) < 80
    assert f"[{path.name}]({path.name})" in (ROOT / "examples" / "README.md").read_text()
