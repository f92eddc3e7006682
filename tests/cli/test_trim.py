"""The commands that remove parts of a store: nothing goes without --yes."""

from __future__ import annotations

from pathlib import Path

import pytest

import trajstore
from tests.cli.test_cli import run
from tests.store.test_checkpoints import saved, steps
from tests.store.test_trimming import fill, lengths
from tests.support.faulty import real_storage
from trajstore.cli import trim
from trajstore.cli.trim import parse_age


@pytest.fixture
def root(tmp_path: Path) -> str:
    url = str(tmp_path / "store")
    fill(url)
    saved(real_storage(url), "old")
    saved(real_storage(url), "new")
    return url


def contents(root: str) -> dict[str, int]:
    return real_storage(root).tree_sizes("")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["evict", "--steps", "80"], "80 steps, about "),
        (["prune", "--keep-last", "1"], "checkpoint"),
    ],
)
def test_without_yes_nothing_goes_and_the_plan_is_shown(root: str, arguments: list[str], said: str) -> None:
    command, *options = arguments
    before = contents(root)
    result = run(command, root, *options)
    assert result.exit_code == 3, result.stderr
    assert said in result.stdout
    assert f"Nothing was changed. To {command}, give --yes." in result.stdout
    assert run(command, root, *options, "--dry-run").exit_code == 0
    assert run(command, root, *options, "--json").exit_code == 3
    assert contents(root) == before
    result = run(command, root, *options, "--yes", "--grace-s", "0")
    assert result.exit_code == 0, result.stderr
    assert contents(root) != before
    again = run(command, root, *options)
    assert (again.exit_code, "Nothing to" in again.stdout, "--yes" in again.stdout) == (0, True, False)


def test_evict_keeps_the_limit_and_prune_frees_what_checkpoints_held(root: str) -> None:
    result = run("evict", root, "--episodes", 5, "--yes", "--grace-s", 0)
    assert "Deleted 0 objects and 0 whole streams;" in result.stdout  # the checkpoints list them
    assert lengths(root) == [8] * 5
    result = run("prune", root, "--name", "old", "--name", "new", "--yes", "--grace-s", 0)
    assert "evicted rows" in result.stdout
    assert trajstore.open(root).checkpoints == []


def test_a_live_session_is_named(root: str) -> None:
    writer = trajstore.open(root, fsync=False).writer("live", commit_seconds=None)
    writer.append_episode(steps(3, 1), terminated=True)
    writer.commit()
    result = run("evict", root, "--steps", 3, "--yes")
    assert result.exit_code == 2
    assert "stream 'live-" in result.stderr
    assert "seems to be written" in result.stderr
    assert "kept: empty streams and leftovers: stream 'live-" in run("prune", root, "--dry-run").stdout
    writer.release()


def test_an_interrupted_command_says_what_holds(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(trim, "evict", interrupted)
    monkeypatch.setattr(trim, "prune", interrupted)
    assert "is hidden; 'trajstore prune' frees its storage" in run("evict", root, "--steps", 1).stderr
    assert "the same command removes the rest" in run("prune", root).stderr


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("1.5h", 5400), ("7d", 604800), ("2min", 120), ("3s", 3)]
)
def test_ages_have_units(text: str, seconds: float) -> None:
    assert parse_age(text) == seconds


@pytest.mark.parametrize("text", ["", "h", "3w", "soon", "1e5x"])
def test_other_ages_are_refused(root: str, text: str) -> None:
    result = run("evict", root, "--age", text, "--yes")
    assert (result.exit_code, "--age" in result.stderr or "limit" in result.stderr) == (2, True)
