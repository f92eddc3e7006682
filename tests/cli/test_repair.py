"""The command that salvages a damaged store."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.cli.test_cli import run, run_json
from tests.store.test_verify import Made, build, flip
from trajstore.store.verify import verify


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return build(tmp_path_factory.mktemp("repair") / "store")


def test_repair_says_what_is_damaged_and_what_was_lost(template: Made, tmp_path: Path) -> None:
    root = tmp_path / "store"
    shutil.copytree(template.root, root)
    flip(root / "streams" / template.first / "steps/f/c.2.0")
    (root / "zarr.json").write_bytes(b"\x1b[31m")
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    result = run("repair", root, tmp_path / "new")
    assert result.exit_code == 1, result.stderr
    assert "array 'steps/f', rows 8 to 12: " in result.stdout
    assert "mended: zarr.json: " in result.stdout
    assert f"shortened episode: {template.first}/1: to 1 step, 6 lost" in result.stdout
    assert f"lost checkpoint: {template.checkpoint}: " in result.stdout
    assert "Lost what is listed above; kept 2 streams, 4 episodes, 16 steps" in result.stdout
    assert "\x1b" not in result.stdout
    assert verify(tmp_path / "new").is_clean
    assert {path: path.read_bytes() for path in root.rglob("*") if path.is_file()} == before
    facts = run_json("repair", root, tmp_path / "other")
    assert (facts["has_losses"], facts["shortened"][0]["n_lost"]) == (True, 6)
    again = run("repair", root, tmp_path / "new")
    assert (again.exit_code, "already a store" in again.stderr) == (2, True)


def test_a_whole_store_is_copied_and_exits_with_0(template: Made, tmp_path: Path) -> None:
    result = run("repair", template.root, tmp_path / "new")
    assert result.exit_code == 0, result.stderr
    assert "Nothing was lost; kept 2 streams, 4 episodes, 22 steps" in result.stdout
    result = run("repair", tmp_path / "nothing", tmp_path / "newer", "--json")
    assert (result.exit_code, "no store here" in result.stderr) == (2, True)
    assert json.loads(run("repair", template.root, tmp_path / "x", "--no-check", "--json").stdout)["mended"] == []
