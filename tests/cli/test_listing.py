"""The commands ``ls`` and ``show``: episodes in a table, and one of them in detail."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trajstore
from tests.cli.test_cli import run, run_json
from trajstore import Field, Schema
from trajstore.cli.listing import format_value
from trajstore.cli.sparklines import bars, sparkline

SCHEMA = Schema(
    {
        "observation": {"pixels": Field("uint8", (12, 10, 3), final=True), "state": Field("float32", (3,))},
        "action": Field("int64"),
        "reward": Field("float32"),
    },
    episode={"success": bool, "task": str, "score": float},
)


def episode(n: int) -> dict[str, Any]:
    pixels = np.broadcast_to(np.arange(n + 1, dtype=np.uint8)[:, None, None, None], (n + 1, 12, 10, 3))
    state = np.stack([np.arange(n), np.zeros(n), np.full(n, np.nan)], 1).astype(np.float32)
    return {
        "observation": {"pixels": pixels, "state": state},
        "action": np.arange(n) % 3,
        "reward": np.full(n, n / 10, np.float32),
    }


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("ls") / "store"
    store = trajstore.create(root, SCHEMA, fsync=False)
    with store.writer("left", commit_seconds=None) as writer:
        for n in (4, 2, 6):
            metadata = {"task": f"walk {n}", "seed": n, "note": "\x1b[2Jgone"} | ({"score": n / 4} if n > 2 else {})
            end = {"terminated": True} if n != 2 else {"truncated": True}
            writer.append_episode(episode(n), metadata=metadata, **end)
    with store.writer("right", commit_seconds=None) as writer:
        writer.append_episode(episode(9), terminated=True, metadata={"success": True})
        writer.commit()
        writer.put_column("advantage", writer.stream, np.arange(10, dtype=np.float32))
    return root


# ---- ls ------------------------------------------------------------------------------------------------


def test_episodes_are_listed_with_what_differs_between_them(root: Path) -> None:
    result = run("ls", root)
    assert (result.exit_code, result.stderr) == (0, "")
    for part in ("Episodes: 4", "truncated", "walk 6", "8.1", "left-", "right-", "1.5"):
        assert part in result.stdout, part
    for part in ("env", "has_final", "is_headless"):  # the same everywhere
        assert part not in result.stdout


def test_episodes_are_filtered_sorted_and_paged(root: Path) -> None:
    facts = run_json("ls", root, "--where", "end == terminated", "--sort", "-return", "--limit", 1, "--offset", 1)
    assert (facts["n_episodes"], facts["n_matching"], facts["offset"]) == (4, 3, 1)
    (found,) = facts["episodes"]
    assert (found["row"], found["length"], found["task"], found["score"]) == (2, 6, "walk 6", 1.5)
    assert found["metadata"] == {"seed": 6, "note": "\x1b[2Jgone"}
    assert found["success"] is None
    text = run("ls", root, "--limit", 1).stdout
    assert "Episodes 0 to 0 of 4" in text
    assert "3 more; --offset 1 continues" in text


def test_chosen_columns_are_shown(root: Path) -> None:
    columns = "row,metadata.seed,advantage.mean,task"
    facts = run_json("ls", root, "--columns", columns, "--sort", "metadata.seed")
    assert [[e[name] for name in columns.split(",")] for e in facts["episodes"]] == [
        [1, 2, None, "walk 2"], [0, 4, None, "walk 4"], [2, 6, None, "walk 6"], [3, None, 4.0, None],
    ]  # fmt: skip


def test_the_columns_of_the_order_are_shown(root: Path) -> None:
    assert run_json("ls", root, "--sort", "-advantage.mean")["episodes"][0]["advantage.mean"] == 4.0
    assert "metadata.seed" in run("ls", root, "--sort", "metadata.seed").stdout
    assert "; did you mean 'metadata.seed'? The columns are row," in run("ls", root, "--sort", "seed").stderr


def test_what_matches_nothing_is_said(root: Path, tmp_path: Path) -> None:
    assert "None of 4 episodes match." in run("ls", root, "--where", "return > 99").stdout
    assert "None of 4 episodes are left at this offset." in run("ls", root, "--offset", 4).stdout
    trajstore.create(tmp_path / "empty")
    assert "No episodes yet." in run("ls", tmp_path / "empty").stdout


def test_evicted_episodes_are_listed_on_request(tmp_path: Path) -> None:
    store = trajstore.create(tmp_path / "store", fsync=False)
    with store.writer(commit_seconds=None) as writer:
        for n in (3, 5):
            writer.append_episode({"reward": np.ones(n, np.float32)}, terminated=True)
        writer.commit()
        writer.set_view(first_row=3)
    assert [e["length"] for e in run_json("ls", tmp_path / "store")["episodes"]] == [5]
    everything = run_json("ls", tmp_path / "store", "--evicted", "--columns", "length,is_evicted")["episodes"]
    assert everything == [{"length": 3, "is_evicted": True}, {"length": 5, "is_evicted": False}]
    assert "is_evicted" in run("ls", tmp_path / "store", "--evicted").stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--where", "retrun > 1"), "did you mean 'return'"),
        (("--sort", "size"), "no episode column 'size'"),
        (("--columns", "row,siz"), "no episode column 'siz'"),
        (("--columns", ","), "--columns: expected columns"),
        (("--limit", "-1"), "limit: expected a count, got -1"),
    ],
)
def test_a_wrong_query_is_refused_in_one_line(root: Path, arguments: tuple[str, ...], message: str) -> None:
    result = run("ls", root, *arguments)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert message in result.stderr


@pytest.mark.parametrize("command", [("ls",), ("ls", "--columns", "row,metadata.note"), ("show", "0")])
def test_a_terminal_of_80_columns_is_enough_and_is_not_steered(
    root: Path, command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trajstore.cli.output._PIPE_WIDTH", 80)
    text = run(command[0], root, *command[1:]).stdout
    assert max(map(len, text.splitlines())) <= 80
    assert ("gone" in text) == (len(command) > 1)
    assert "\x1b" not in text


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("return", 1234567.0, "1.23457e+06"),
        ("length", 1234, "1,234"),
        ("x", float("nan"), ""),
        ("x", None, ""),
        ("x", True, "yes"),
        ("time", 0.0, "1970-01-01 00:00"),
        ("x", "y" * 50, "y" * 39 + "…"),
        ("x", {"a": 1, "b": [2]}, "a: 1, b: [2]"),
    ],
)
def test_values_are_short_text(name: str, value: Any, text: str) -> None:
    assert format_value(name, value) == text


# ---- show ----------------------------------------------------------------------------------------------


def test_an_episode_is_shown_with_its_fields(root: Path) -> None:
    result = run("show", root, 0)
    assert (result.exit_code, result.stderr) == (0, "")
    for part in (
        "4 steps and a final row, terminated, return 1.6",
        "task: walk 4",
        "seed: 4",
        "rows 0-5",
        "observation/state",
        "[1]",
        "4 NaN",
        "Pictures: observation/pixels; save them with --frames",
    ):
        assert part in result.stdout, part
    assert "▁▃▆█" in result.stdout  # the first component rises


def test_an_episode_as_json_has_shortened_series(root: Path) -> None:
    facts = run_json("show", root, 3)
    assert (facts["row"], facts["length"], facts["end"], facts["success"]) == (3, 9, "terminated", True)
    fields = {field["field"]: field for field in facts["fields"]}
    action = fields["action"]
    assert (action["min"], action["max"], action["mean"], action["n_values"], action["n_nan"]) == (0, 2, 1, 9, 0)
    assert action["series"][0]["values"] == [0, 1, 2] * 3
    assert [len(fields[name]["series"]) for name in ("observation/pixels", "observation/state")] == [0, 3]
    assert fields["observation/state"]["series"][2]["values"] == [None] * 9
    assert facts["columns"][0]["series"][0]["values"] == list(range(9))
    assert facts["spans"] == [{"stream": facts["stream"], "t_start": 0, "row_start": 0, "row_stop": 10}]


def test_an_episode_is_named_by_row_or_key(root: Path) -> None:
    ids = [record.id for record in trajstore.open(root).streams]
    for name, row in (("2", 2), (f"{ids[0]}/1", 1), ("right-/0", 3), (f"{ids[1][-8:]}/0", 3)):
        assert run_json("show", root, name, "--fields", "action")["row"] == row, name
    for arguments in ((-1, "--fields", "action"), ("--fields", "action", "--", -1)):
        assert "Episode 3: right-" in run("show", root, *arguments).stdout
    assert "No such option" in run("show", root, "-x").stderr


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("4", "no episode 4"),
        ("left-/9", "no episode 9 of stream"),
        ("/0", "no stream begins or ends with ''"),
        ("x/0", "no stream begins or ends with 'x'"),
        ("first", "expected a row or STREAM/NUMBER"),
    ],
)
def test_an_episode_that_does_not_exist_is_named(root: Path, name: str, message: str) -> None:
    result = run("show", root, name)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert message in result.stderr


def test_a_damaged_field_is_shown_as_its_error_beside_the_others(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root, tmp_path / "store")
    for path in (tmp_path / "store").glob("streams/left-*/steps/action/c*"):
        path.write_bytes(path.read_bytes()[:-1])
    result = run("show", tmp_path / "store", 0, "--json")
    fields = {field["field"]: field for field in json.loads(result.stdout)["fields"]}
    assert (result.exit_code, result.stderr) == (1, "")
    assert "array 'steps/action', chunk 0" in fields["action"]["error"]
    assert (fields["action"]["mean"], fields["reward"]["max"]) == (None, pytest.approx(0.4))
    text = run("show", tmp_path / "store", 0)
    assert (text.exit_code, text.stdout.count("damaged: ")) == (1, 1)
    assert run("show", tmp_path / "store", 0, "--fields", "reward").exit_code == 0


def test_frames_are_saved_as_pictures(root: Path, tmp_path: Path) -> None:
    from PIL import Image

    facts = run_json("show", root, 0, "--frames", tmp_path / "png", "--every", 2)
    assert [Path(name).name for name in facts["frames"]] == ["000000.png", "000002.png", "000004.png"]
    with Image.open(facts["frames"][1]) as image:
        assert (image.size, image.getpixel((3, 4))) == ((10, 12), (2, 2, 2))
    (gif,) = run_json("show", root, 0, "--frames", tmp_path / "film.gif", "--fps", 10)["frames"]
    with Image.open(gif) as image:
        assert (image.n_frames, image.size, image.info["duration"]) == (5, (240, 288), 100)
    assert run("show", root, 0, "--frames", tmp_path / "film.mp4").exit_code == 0
    assert (tmp_path / "film.mp4").read_bytes()[4:8] == b"ftyp"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["film.gif", "film.mp4", "png"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--frames", "taken.gif"), "exists"),
        (("--frames", "full"), "not an empty directory"),
        (("--frames", "film.avi"), "expected a file that ends in .gif or .mp4, or a directory"),
        (("--frames", "new", "--frame-field", "action"), "does not hold pictures"),
        (("--frames", "new", "--every", "0"), "expected positive numbers"),
    ],
)
def test_frames_replace_nothing(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken.gif").write_bytes(b"mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    result = run("show", root, 0, *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr
    assert (tmp_path / "taken.gif").read_bytes() == b"mine"


def test_without_pillow_the_extra_is_named(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    result = run("show", root, 0, "--frames", tmp_path / "film.gif")
    assert (result.exit_code, "pip install 'trajstore[plot]'" in result.stderr) == (2, True)


# ---- plots of characters -------------------------------------------------------------------------------


def test_a_sparkline_shows_means_of_stretches() -> None:
    n = np.arange(8)
    assert sparkline(n, n, 8, width=8) == "▁▂▃▄▅▆▇█"
    assert sparkline(n, n, 8, width=4) == "▁▃▆█"
    assert sparkline(n, n, 8, width=20, unicode=False) == "_.-=+*%#"
    assert sparkline(n, np.full(8, 3), 8, width=4) == "▁▁▁▁"
    assert sparkline(n[:4], np.array([1, np.nan, np.inf, 2]), 4, width=4) == "▁··█"
    assert sparkline(n[:2], np.array([np.nan, np.nan]), 2, width=4) == "··"
    assert sparkline(n[:0], n[:0], 0, width=4) == ""
    assert sparkline(n[:2], np.array([False, True]), 2, width=4) == "▁█"


def test_bars_are_as_long_as_the_values() -> None:
    assert bars([4, 2, 0.25, 0], width=4) == ["████", "██", "▎", "▏"]
    assert bars([4, 2, 0], width=4, unicode=False) == ["####", "##", "#"]
    assert bars([], width=4) == []
