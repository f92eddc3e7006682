"""What users call is typed: mypy accepts correct calls, and reports a misspelt keyword or a wrong type.

Add a `Case` to ``CASES`` for every public entry point. All calls are checked in one run of mypy, each in its own
function, so one more case costs almost nothing.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import pytest
from mypy import api

ROOT = Path(__file__).resolve().parents[2]


class Case(NamedTuple):
    """One call, and the code of the error that mypy reports for it; None: it is correct."""

    given: str  # parameters of the function that makes the call
    call: str
    error: str | None


READER = "reader: trajstore.Reader, windows: trajstore.Windows"
MIXTURE = "mixture: trajstore.Mixture, windows: trajstore.Windows"
STORE = "store: trajstore.Store, windows: trajstore.Windows"
INDEX = "reader: trajstore.Reader, index: torch.Tensor, values: torch.Tensor"

BUFFER = "buffer: trajstore.ReplayBuffer"

CASES = {
    # ReplayBuffer
    "buffer": Case(
        "", "trajstore.ReplayBuffer('memory://x', capacity=5, sample=trajstore.Windows(length=2))", None
    ),
    "buffer, misspelt": Case("", "trajstore.ReplayBuffer('memory://x', capcity=5)", "call-arg"),
    "buffer, wrong type": Case("", "trajstore.ReplayBuffer('memory://x', capacity='5')", "arg-type"),
    "resume": Case("", "trajstore.ReplayBuffer.resume('memory://x', 'latest', rank=0, cache_bytes='1GB')", None),
    "resume, misspelt": Case("", "trajstore.ReplayBuffer.resume('memory://x', cach_bytes='1GB')", "call-arg"),
    "resume, wrong type": Case("", "trajstore.ReplayBuffer.resume('memory://x', seed='0')", "arg-type"),
    "rejoin, misspelt": Case(
        "", "trajstore.ReplayBuffer.rejoin('memory://x', rank=0, world_size=2, capcity=1)", "call-arg"
    ),
    "buffer.sample": Case(BUFFER, "buffer.sample(8, recent_steps=10)['observation']", None),
    "buffer.sample, misspelt": Case(BUFFER, "buffer.sample(8, recent_step=10)", "call-arg"),
    "buffer.batches, misspelt": Case(BUFFER, "buffer.batches(8, prefech=2)", "call-arg"),
    "buffer.epoch, misspelt": Case(BUFFER, "buffer.epoch(8, shufle=True)", "call-arg"),
    "buffer.set_priorities, misspelt": Case(BUFFER, "buffer.set_priorities(alhpa=0.5)", "call-arg"),
    "buffer.append, misspelt": Case(BUFFER, "buffer.append({}, terminate=True)", "call-arg"),
    # Reader
    "reader": Case(STORE, "trajstore.Reader(store, cache_bytes='1GiB', seed=3)", None),
    "reader, misspelt": Case(STORE, "trajstore.Reader(store, cache_byte='1GiB')", "call-arg"),
    "sample": Case(READER, "reader.sample(8, windows, recent_steps=10)['observation']", None),
    "sample, misspelt": Case(READER, "reader.sample(8, windows, recent_step=10)", "call-arg"),
    "sample, wrong type": Case(READER, "reader.sample(8, windows, recent_steps='10')", "arg-type"),
    "sample, no windows": Case(READER, "reader.sample(8)", "call-arg"),
    "sample, no such method of a batch": Case(READER, "reader.sample(8, windows).batch()", "attr-defined"),
    "batches": Case(READER, "next(reader.batches(8, windows, prefetch=2))", None),
    "batches, misspelt": Case(READER, "reader.batches(8, windows, prefech=2)", "call-arg"),
    "epoch, misspelt": Case(READER, "reader.epoch(8, windows, shuffled=True)", "call-arg"),
    "staged, misspelt": Case(READER, "reader.staged(8, windows, reused=2.0)", "call-arg"),
    "sample_episodes, misspelt": Case(READER, "reader.sample_episodes(8, window=windows)", "call-arg"),
    "read_all_in_order, misspelt": Case(READER, "reader.read_all_in_order(steps=8)", "call-arg"),
    "at, misspelt": Case(
        f"{INDEX}, windows: trajstore.Windows", "reader.at(index, windows, relable=None)", "call-arg"
    ),
    "update_priorities": Case(INDEX, "reader.update_priorities(index, values) + 1", None),
    "update_priorities, misspelt": Case(INDEX, "reader.update_priorities(index, priorities=values)", "call-arg"),
    "set_priorities": Case(READER, "reader.set_priorities(alpha=0.5, max_uses=None)", None),
    "set_priorities, misspelt": Case(READER, "reader.set_priorities(alhpa=0.5)", "call-arg"),
    "set_priorities, wrong type": Case(READER, "reader.set_priorities(normalize='all')", "arg-type"),
    "add_column, misspelt": Case(READER, "reader.add_column('a', trajstore.Field('int64'), filled=1)", "call-arg"),
    "write_column": Case(INDEX, "reader.write_column('a', index, values) + 1", None),
    "write_column, misspelt": Case(INDEX, "reader.write_column('a', index, value=values)", "call-arg"),
    "resize, misspelt": Case(READER, "reader.resize(cache_byte=1)", "call-arg"),
    # Options
    "Priorities, misspelt": Case(STORE, "trajstore.Priorities(aplha=0.6)", "call-arg"),
    "Linear, wrong type": Case(STORE, "trajstore.Linear(0.4, '1.0', 100)", "arg-type"),
    "Hindsight, misspelt": Case(STORE, "trajstore.Hindsight('future', fracton=0.5)", "call-arg"),
    "Hindsight, no such strategy": Case(STORE, "trajstore.Hindsight('past')", "arg-type"),
    # Mixture
    "mixture": Case(READER, "trajstore.Mixture({'a': reader, 'b': (reader, 2.0)}, shuffle=True)", None),
    "mixture, misspelt": Case(READER, "trajstore.Mixture({'a': reader}, shufle=True)", "call-arg"),
    "mixture.sample": Case(MIXTURE, "mixture.sample(8, windows, recent_episodes=2)['source']", None),
    "mixture.sample, misspelt": Case(MIXTURE, "mixture.sample(8, windows, recent_episode=2)", "call-arg"),
    # Datasets
    "BatchDataset, misspelt": Case(STORE, "trajstore.BatchDataset(store, 8, windows, epochs=True)", "call-arg"),
    "WindowDataset, misspelt": Case(STORE, "trajstore.WindowDataset(store, windows, cache_byte=1)", "call-arg"),
    "WindowDataset, item": Case(STORE, "trajstore.WindowDataset(store, windows)[0]['observation']", None),
}


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> Mapping[int, set[str]]:
    """The codes of the errors that mypy reports, by the position of the case."""
    lines = ["import torch", "import trajstore"]
    n_before = len(lines)
    for i, case in enumerate(CASES.values()):
        lines += [f"def case_{i}({case.given}) -> None:", f"    {case.call}"]
    snippet = tmp_path_factory.mktemp("typed") / "snippet.py"
    snippet.write_text("\n".join(lines) + "\n", "utf-8")
    options = ["--config-file", str(ROOT / "pyproject.toml"), "--show-error-codes", "--hide-error-context"]
    # With the project's own cache, only the snippet is checked.
    options += ["--cache-dir", str(ROOT / ".mypy_cache")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MYPYPATH", str(ROOT))
        out, problem, _ = api.run([*options, str(snippet)])
    assert not problem, problem
    found: dict[int, set[str]] = defaultdict(set)
    for line, code in re.findall(r"snippet\.py:(\d+): error: .*\[([\w-]+)\]$", out, re.M):
        found[(int(line) - n_before - 1) // 2].add(code)
    return found


@pytest.mark.parametrize("name", CASES)
def test_mypy_reports_wrong_calls_and_no_others(name: str, reported: Mapping[int, set[str]]) -> None:
    position = list(CASES).index(name)
    expected = CASES[name].error
    assert reported.get(position, set()) == ({expected} if expected is not None else set())
