"""``trajstore warm-up`` compiles everything ahead of time: no batch of a later process compiles anything."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("numba")

# Draws the pinned batches, every sixth kind, and prints the loops that had to be compiled.
BATCHES = """
import json, tempfile
from pathlib import Path
from tests.sampling.test_digests import CASES, Places
from trajstore.sampling.compiled.jit import LOOPS

with tempfile.TemporaryDirectory() as root:
    for name in list(CASES)[::6]:
        list(CASES[name](Places(Path(root))))
print(json.dumps([loop.__name__ for loop in LOOPS if loop.stats.cache_misses]))
"""


def run(kept_in: Path, *command: str) -> tuple[int, Any, str]:
    result = subprocess.run(
        [sys.executable, *command],
        env=os.environ | {"NUMBA_CACHE_DIR": str(kept_in)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    return result.returncode, json.loads(result.stdout or "null"), result.stderr


WARM_UP = ("-m", "trajstore", "warm-up", "--json")


def test_after_a_warm_up_no_batch_compiles_anything(tmp_path: Path) -> None:
    code, facts, error = run(tmp_path, *WARM_UP)
    assert (code, error) == (0, "")
    assert facts["n_compiled"] >= facts["n_loops"] > 10
    assert facts["kept_in"].startswith(str(tmp_path))
    assert facts["missed"] == [], "loops that no use in trajstore.cli.warm_up calls; add one"
    assert run(tmp_path, "-c", BATCHES)[:2] == (0, [])
    code, again, error = run(tmp_path, *WARM_UP)
    assert (code, error) == (0, "")
    assert (again["n_compiled"], again["kept_in"], again["missed"]) == (0, facts["kept_in"], [])


def test_a_warm_up_fails_at_once_if_the_code_cannot_be_kept(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    code, facts, error = run(tmp_path / "file", *WARM_UP)
    assert (code, facts["kept_in"], error) == (2, None, "")
    assert 0 < facts["n_compiled"] < 5 < facts["n_loops"]
    assert facts["missed"] == []


@pytest.mark.parametrize(
    ("facts", "line"),
    [
        ({"n_loops": 0}, "Nothing to compile: numba is not installed, so batches are made with tensor operations."),
        ({"n_compiled": 0}, "Nothing to compile: the code of all loops is kept in /d; checked in 2.00 s."),
        ({}, "Compiled 7 loops in 2.00 s, kept in /d."),
        ({"kept_in": None}, "Stopped after 7 loops: no directory can be written"),
        ({"missed": ["a.b"]}, "Not compiled, because nothing here uses them: a.b."),
    ],
)
def test_the_output_says_what_was_done(facts: dict[str, Any], line: str) -> None:
    from rich.console import Console

    from trajstore.cli.warm_up import _print_warm_up

    console = Console(width=400, record=True, file=io.StringIO())
    _print_warm_up(console, {"n_loops": 8, "n_compiled": 7, "kept_in": "/d", "missed": [], "seconds": 2.0} | facts)
    assert line in console.export_text()
