"""The command ``bench``: it measures, leaves nothing behind, and replaces nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

import trajstore
from tests.cli.test_cli import run, run_json
from trajstore.cli import bench_cases


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_cases, "EPISODE_STEPS", 50)
    monkeypatch.setattr(bench_cases, "BATCH", 8)


@pytest.mark.usefixtures("small")
def test_everything_is_measured_and_removed(tmp_path: Path) -> None:
    facts = run_json("bench", tmp_path / "new", "--seconds", 0.1)
    figures = {figure["name"]: figure for figure in facts["figures"]}
    names = ["append episodes", "commit", "append steps", "sample", "sample cold", "read episodes"]
    assert list(figures) == names
    assert all(figure["stored"] > 0 for figure in figures.values())
    assert [name for name in names if figures[name]["ratio"] is None] == ["commit", "sample cold"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("small")
def test_bars_and_a_plot_are_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trajstore.cli.output._PIPE_WIDTH", 80)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").touch()
    result = run("bench", ".", "--seconds", 0.1, "--frames", "--plot", "bench.png")
    assert (result.exit_code, result.stderr) == (0, "")
    assert "plain RAM" in result.stdout
    assert "█" in result.stdout
    assert max(map(len, result.stdout.splitlines()[2:])) <= 80
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bench.png", "mine"]


@pytest.mark.usefixtures("small")
def test_an_interrupted_run_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(bench_cases.Bench, "_sample", interrupt)
    result = run("bench", tmp_path, "--seconds", 0.1)
    assert (result.exit_code, result.stdout) == (130, "")
    assert result.stderr == "trajstore: interrupted; the temporary store is removed\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--seconds", "0"), "--seconds: expected at least 0.1"),
        (("--plot", "x.pdf"), "ends in .png"),
        (("--plot", "taken.png"), "exists"),
        (("--plot", "nowhere/x.png"), "in no existing directory"),
    ],
)
def test_wrong_usage_is_refused_before_it_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken.png").touch()
    result = run("bench", ".", *arguments)
    assert (result.exit_code, message in result.stderr, result.stderr.count("\n")) == (2, True, 1)


def test_nothing_is_written_below_a_store(tmp_path: Path) -> None:
    trajstore.create(tmp_path / "store")
    before = sorted(tmp_path.rglob("*"))
    result = run("bench", tmp_path / "store")
    assert (result.exit_code, "give a directory or a prefix beside it" in result.stderr) == (2, True)
    assert sorted(tmp_path.rglob("*")) == before
