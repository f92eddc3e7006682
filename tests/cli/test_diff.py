"""The command ``diff``: what it prints, and how it ends."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

import trajstore
from tests.cli.test_cli import run, run_json
from trajstore.store.checkpoints import Checkpoint, new_checkpoint_id, save


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("diff") / "store"
    store = trajstore.create(root, fsync=False)
    with store.writer(commit_seconds=None) as writer:
        for name in ("one", "two"):
            for n in range(3, 16):
                writer.append_episode({"x": np.arange(n), "reward": np.ones(n)}, terminated=True)
            writer.commit()
            saved = Checkpoint(new_checkpoint_id(name), name, 1e9, streams=store.refresh().cuts())
            save(store.snapshot.storage, saved, {})
    return root


def test_a_store_and_its_copy_do_not_differ(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root, tmp_path / "copy")
    result = run("diff", root, tmp_path / "copy")
    assert (result.exit_code, result.stderr) == (0, "")
    assert "Nothing differs; steps and text were not read, see --deep." in result.stdout
    deep = run("diff", root, tmp_path / "copy", "--deep")
    assert (deep.exit_code, "Nothing differs." in deep.stdout) == (0, True)
    assert "of steps, decoded, in each." in deep.stdout


def test_two_checkpoints_are_compared(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trajstore.cli.output._PIPE_WIDTH", 80)
    result = run("diff", root, "--at", "one", "--other-at", "two")
    assert (result.exit_code, result.stderr) == (1, "")
    for part in (
        "store at one",
        "rows 117 -> 234",
        "13 equal, 0 changed, 0 only in the first, 13 only in the second",
        "and 3 more; --json lists up to 1,000",
        "They differ",
    ):
        assert part in result.stdout, part
    assert max(map(len, result.stdout.splitlines())) <= max(80, len(str(root)) + 20)
    facts = run_json("diff", root, "--at", "one")
    assert (facts["is_equal"], facts["n_only_second"], len(facts["only_second"])) == (False, 13, 13)
    assert facts["only_second"][0]["episode"] == 13


def test_changed_bytes_schemas_and_checkpoints_are_shown(root: Path, tmp_path: Path) -> None:
    other = trajstore.create(tmp_path / "other", {"x": trajstore.Field("float32")}, fsync=False)
    with other.writer() as writer:
        writer.append_episode({"x": np.zeros(3, np.float32)}, terminated=True)
    text = run("diff", root, tmp_path / "other").stdout
    for part in ("int64", "2 checkpoints only here", "26 only in the first, 1 only in the second"):
        assert part in text, part


def test_damage_ends_with_one_line(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root, tmp_path / "copy")
    for path in (tmp_path / "copy").glob("streams/*/steps/x/c*"):
        path.write_bytes(path.read_bytes()[:-1])
    assert run("diff", root, tmp_path / "copy").exit_code == 0
    result = run("diff", root, tmp_path / "copy", "--deep")
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (1, "", 1)


def test_the_same_view_twice_is_refused(root: Path) -> None:
    result = run("diff", root)
    assert (result.exit_code, "give another store, or two checkpoints" in result.stderr) == (2, True)
