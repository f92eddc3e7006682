"""The example of several ranks: killed on two, continued on three and on one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import trajstore

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.mark.slow
def test_two_ranks_are_killed_and_three_and_then_one_go_on(tmp_path: Path) -> None:
    sys.path.insert(0, str(SCRIPTS))
    try:
        import ddp_example
    finally:
        sys.path.remove(str(SCRIPTS))
    two, three, one = ddp_example.run(tmp_path)
    assert [row["n_ranks"] for row in (two, three, one)] == [2, 3, 1]
    assert three["from"] >= two["saved"]  # one more may have been published than the ranks lived to tell
    assert one["from"] == three["saved"]
    # All that the last checkpoint held, and nothing twice; dealt out evenly.
    assert sum(three["taken_over"]) == two["n_steps"] > 0 or three["from"] > two["saved"]
    assert sum(one["taken_over"]) == three["n_steps"] > two["n_steps"]
    assert three["dropped"] == one["dropped"] == 0
    assert one["n_steps"] > three["n_steps"]
    store = trajstore.open(tmp_path / "store", at="latest")
    plan = trajstore.redistribute(tmp_path / "store", world_size=3)
    steps = [counts["steps"] for counts in plan.report.ranks]
    assert sum(steps) == one["n_steps"]
    assert max(steps) - min(steps) <= plan.report.longest
    assert {record.rank for record in store.streams} >= {0, 1, 2}
