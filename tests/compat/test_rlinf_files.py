"""Directories of RLinf's merged, split, imported and exported: nothing lost, no source broken."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import trajstore.compat.rlinf.merge_split as merge_split
from tests.compat.test_rlinf import NO_VERSIONS, rlinf_directory, same, trajectory
from trajstore import CorruptionError, DataError, FormatError
from trajstore.cli.app import app
from trajstore.compat.rlinf import (
    Directory,
    Trajectory,
    TrajectoryReplayBuffer,
    export_directory,
    import_directory,
    merge,
    split,
)


def content(path: Path) -> list[Trajectory]:
    directory = Directory(path)
    assert not directory.missing
    return [directory.load(entry) for entry in directory.entries]


def first_rewards(path: Path) -> list[float]:
    """Tells which trajectories there are, in order."""
    return [float(one.rewards[0, 0, 0]) / 10_000 for one in content(path) if one.rewards is not None]


@pytest.fixture
def ranks(tmp_path: Path) -> Path:
    """Of four ranks, with ids that are in some of them only."""
    root = tmp_path / "ranks"
    for rank, ids in {0: (0, 1, 5), 2: (0, 1), 10: (1, 2, 5), 1: (0,)}.items():
        rlinf_directory(root / f"rank_{rank}", {n: trajectory(rank * 100 + n) for n in ids})
    return root


@pytest.fixture
def single(tmp_path: Path) -> Path:
    rlinf_directory(tmp_path / "single", {n: trajectory(n) for n in (0, 1, 2, 4, 7, 8, 9)})
    return tmp_path / "single"


# ---- merging -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["copy", "link", "move"])
def test_ranks_are_interleaved_by_trajectory_id_in_natural_order(ranks: Path, tmp_path: Path, how: Any) -> None:
    (target,) = merge(ranks, tmp_path / "merged", how=how)
    assert first_rewards(tmp_path / "merged") == [0, 100, 200, 1, 201, 1001, 1002, 5, 1005]
    assert target.n_samples == 9 * 12
    metadata = json.loads((tmp_path / "merged" / "metadata.json").read_text())
    assert metadata == {
        "trajectory_format": "pt",
        "size": 9,
        "total_samples": 108,
        "trajectory_counter": 9,
        "seed": 1234,
    }
    index = json.loads((tmp_path / "merged" / "trajectory_index.json").read_text())
    assert index["trajectory_id_list"] == list(range(9))
    assert [entry["trajectory_id"] for entry in index["trajectory_index"].values()] == list(range(9))
    if how == "move":
        assert not any(path.is_file() for path in ranks.rglob("*"))
    else:
        assert first_rewards(ranks / "rank_10") == [1001, 1002, 1005]


def test_what_is_listed_and_has_no_file_does_not_stop_a_merge(ranks: Path, tmp_path: Path) -> None:
    (ranks / "rank_2" / f"trajectory_0_{NO_VERSIONS}.pt").unlink()
    merge(ranks, tmp_path / "merged", how="move")
    assert first_rewards(tmp_path / "merged") == [0, 100, 1, 201, 1001, 1002, 5, 1005]


def test_directories_with_a_torn_index_are_merged_by_their_files(ranks: Path, tmp_path: Path) -> None:
    (ranks / "rank_0" / "trajectory_index.json").write_text('{"traj')
    (target,) = merge(ranks, tmp_path / "merged")
    assert (len(target.entries), target.n_samples) == (9, 108)
    buffer = TrajectoryReplayBuffer()
    buffer.load_checkpoint(tmp_path / "merged")
    assert buffer.total_samples == 108
    buffer.close()


# ---- splitting -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["copy", "link", "move"])
def test_the_first_ones_are_split_off(single: Path, tmp_path: Path, how: Any) -> None:
    split(single, tmp_path / "first", count=3, how=how)
    assert first_rewards(tmp_path / "first") == [0, 1, 2]
    assert [entry.id for entry in Directory(tmp_path / "first").entries] == [0, 1, 2]
    left = [4, 7, 8, 9] if how == "move" else [0, 1, 2, 4, 7, 8, 9]
    assert first_rewards(single) == left
    assert json.loads((single / "metadata.json").read_text())["size"] == len(left)
    buffer = TrajectoryReplayBuffer()
    buffer.load_checkpoint(single)
    assert buffer.trajectory_ids == left
    buffer.close()


def test_even_parts_are_as_ranks_load_them(single: Path, tmp_path: Path) -> None:
    split(single, tmp_path / "parts", parts=3)
    found = [first_rewards(tmp_path / "parts" / f"rank_{rank}") for rank in range(3)]
    assert found == [[0, 1, 2], [4, 7], [8, 9]]
    merge(tmp_path / "parts", tmp_path / "again")
    assert sorted(first_rewards(tmp_path / "again")) == [0, 1, 2, 4, 7, 8, 9]


def test_fractions_are_parts_of_the_whole(single: Path, tmp_path: Path) -> None:
    split(single, tmp_path / "parts", fractions=[0.7, 0.3])
    assert [len(content(tmp_path / "parts" / f"part_{i}")) for i in range(2)] == [5, 2]
    split(single, tmp_path / "half", fractions=[0.5])
    assert len(content(tmp_path / "half" / "part_0")) == 4


def test_a_dry_run_changes_nothing(single: Path, ranks: Path, tmp_path: Path) -> None:
    before = sorted(str(path) for path in tmp_path.rglob("*"))
    (target,) = split(single, tmp_path / "first", count=3, how="move", dry_run=True)
    assert (target.path, len(target.entries)) == (tmp_path / "first", 3)
    merge(ranks, tmp_path / "merged", how="move", dry_run=True)
    assert sorted(str(path) for path in tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "give exactly one of count, parts and fractions"),
        ({"count": 2, "parts": 2}, "give exactly one of count, parts and fractions"),
        ({"count": 0}, "count: expected 1 to 7, .* got 0"),
        ({"count": 8}, "count: expected 1 to 7, .* got 8"),
        ({"parts": 9}, "parts: expected 1 to 7, .* got 9"),
        ({"fractions": [0.5, 0.6]}, "fractions: expected positive numbers that add up to at most 1"),
        ({"fractions": [0.5, -0.1]}, "fractions: expected positive numbers"),
        ({"count": 1, "how": "steal"}, "how: expected 'copy', 'move' or 'link', got 'steal'"),
    ],
)
def test_splits_that_make_no_sense_are_refused(single: Path, tmp_path: Path, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        split(single, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_a_place_that_is_taken_is_left_alone(single: Path, ranks: Path, tmp_path: Path) -> None:
    for target in (single, ranks):
        with pytest.raises(FileExistsError, match="expected an empty or new directory, found one with files"):
            split(single, target, count=2, how="move")
    assert len(content(single)) == 7
    with pytest.raises(FileNotFoundError, match="expected directories rank_0"):
        merge(single, tmp_path / "merged")
    (ranks / "rank_0" / f"trajectory_0_{NO_VERSIONS}.pt").rename(
        ranks / "rank_0" / f"trajectory_0_{NO_VERSIONS}.pkl"
    )
    with pytest.raises(FormatError, match=r"trajectories: expected one format, got several formats \(pkl, pt\)"):
        merge(ranks, tmp_path / "merged")


@pytest.mark.parametrize("how", ["copy", "link", "move"])
@pytest.mark.parametrize("fails_at", [0, 3, 8])
def test_a_transfer_that_fails_leaves_the_source_whole_and_nothing_else(
    ranks: Path, tmp_path: Path, how: Any, fails_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, calls = merge_split._place_file, []

    def failing(*args: Any) -> None:
        if len(calls) == fails_at:
            raise OSError("no space left")
        calls.append(args)
        place(*args)

    monkeypatch.setattr(merge_split, "_place_file", failing)
    with pytest.raises(OSError, match="no space left"):
        merge(ranks, tmp_path / "merged", how=how)
    assert not (tmp_path / "merged").exists()
    assert [len(content(path)) for path in sorted(ranks.iterdir())] == [3, 1, 3, 2]


def test_a_copy_that_went_wrong_is_found(single: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flipping(old: Path, new: Path) -> None:
        data = bytearray(old.read_bytes())
        data[-300] ^= 1
        Path(new).write_bytes(data)

    monkeypatch.setattr(shutil, "copyfile", flipping)
    with pytest.raises(CorruptionError, match=r"differs from .*; the source is unchanged"):
        split(single, tmp_path / "out", count=2)
    assert not (tmp_path / "out").exists()


# ---- into a store and out of it ------------------------------------------------------------------------


def test_a_directory_goes_into_a_store_and_out_again(single: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    report = import_directory(single, tmp_path / "store", progress=lambda *at: seen.append(at))
    assert (report.n_trajectories, report.n_skipped, report.n_verified, report.missing) == (7, 0, 7, ())
    assert seen == [(n, 14) for n in range(1, 15)]
    again = import_directory(single, tmp_path / "store")
    assert (again.n_trajectories, again.n_skipped, again.n_verified) == (0, 7, 7)
    report = export_directory(tmp_path / "store", tmp_path / "out")
    assert (report.n_trajectories, report.n_verified) == (7, 7)
    for mine, theirs in zip(content(tmp_path / "out"), content(single), strict=True):
        same(mine, theirs)
    assert [entry.id for entry in Directory(tmp_path / "out").entries] == [0, 1, 2, 4, 7, 8, 9]
    assert export_directory(tmp_path / "store", tmp_path / "out").n_trajectories == 0
    buffer = TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path / "store")
    assert buffer.trajectory_ids == [0, 1, 2, 4, 7, 8, 9]
    buffer.close()


IMPORTER = """
import sys
from trajstore.compat.rlinf import import_directory
import_directory(sys.argv[1], sys.argv[2], verify=False, progress=lambda done, total: print(done, flush=True))
"""


def test_an_import_that_was_killed_is_gone_on_with(tmp_path: Path) -> None:
    given = {n: trajectory(n, n_steps=400, breaks=(5,)) for n in range(30)}
    rlinf_directory(tmp_path / "source", given)
    arguments = [sys.executable, "-c", IMPORTER, str(tmp_path / "source"), str(tmp_path / "store")]
    for patience in (8, 20):
        process = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        for _ in range(patience):
            process.stdout.readline()
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
    report = import_directory(tmp_path / "source", tmp_path / "store")
    assert (report.n_trajectories + report.n_skipped, report.n_verified) == (30, 30)
    buffer = TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path / "store", sample_window_size=0)
    assert buffer.memory.n_steps == 30 * 800, "something is there twice, or lost"
    buffer.close()


def test_a_store_of_another_source_is_not_mixed_with(single: Path, tmp_path: Path) -> None:
    rlinf_directory(tmp_path / "other", {3: trajectory(3)})
    import_directory(tmp_path / "other", tmp_path / "store")
    with pytest.raises(DataError, match=r"holds trajectory 3, which .*single lacks"):
        import_directory(single, tmp_path / "store")
    rlinf_directory(tmp_path / "same-number", {3: trajectory(4)})
    with pytest.raises(CorruptionError, match=r"trajectory 3, .*: the copy differs from the original"):
        import_directory(tmp_path / "same-number", tmp_path / "store")


# ---- commands ------------------------------------------------------------------------------------------


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app(), list(arguments))


def test_the_commands_of_the_tutorial_run(ranks: Path, tmp_path: Path) -> None:
    merged, part = str(tmp_path / "merged"), str(tmp_path / "split")
    done = run("rlinf", "merge", "--source-path", str(ranks), "--save-path", merged, "--copy")
    assert done.exit_code == 0, done.output
    assert "9 trajectories, 108 samples, created and verified" in done.output
    done = run("rlinf", "split", "--source-path", merged, "--save-path", part, "--split-count", "3", "--copy")
    assert done.exit_code == 0, done.output
    assert first_rewards(Path(part)) == [0, 100, 200]
    done = run(
        "rlinf", "sample", "--load-path", merged, "--num-chunks", "1024", "--cache-size", "10", "--enable-cache"
    )
    assert done.exit_code == 0, done.output
    for words in (("actions", "[1024, 4]", "float32"), ("curr_obs/main_images", "[1024, 2, 2, 3]", "uint8")):
        assert any(all(word in line for word in words) for line in done.output.splitlines()), done.output


def test_commands_print_json(single: Path, tmp_path: Path) -> None:
    store, out = str(tmp_path / "store"), str(tmp_path / "out")
    for arguments in (("import", str(single), store), ("export", store, out)):
        done = run("rlinf", *arguments, "--json")
        assert done.exit_code == 0, done.output
        assert json.loads(done.stdout)["n_verified"] == 7
    done = run("rlinf", "sample", "--load-path", store, "--json")
    assert json.loads(done.stdout)["batch"]["rewards"] == {"shape": [4, 1], "dtype": "float32"}
    done = run(
        "rlinf", "split", "--source-path", out, "--save-path", store + "x", "--parts", "2", "--dry-run", "--json"
    )
    assert json.loads(done.stdout)["made"][1]["trajectories"] == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("merge", "--source-path", "{single}", "--save-path", "{tmp}/m"), "expected directories rank_0"),
        (("merge", "--source-path", "{tmp}/nowhere", "--save-path", "{tmp}/m"), "nowhere"),
        (
            ("split", "--source-path", "{single}", "--save-path", "{tmp}/m"),
            "give exactly one of count, parts and fractions",
        ),
        (("split", "--source-path", "{single}", "--split-count", "1"), "--save-path: expected a path"),
        (("split", "--source-path", "{single}", "--save-path", "{tmp}/m", "--fractions", "a"), "could not convert"),
        (("merge", "--save-path", "{tmp}/m", "--copy", "--how", "move"), "contradict each other"),
        (("sample", "--load-path", "{tmp}/nowhere"), "expected RLinf's files or a store, found neither"),
        (("sample", "--load-path", "{single}", "--num-chunks", "0"), "num_chunks: expected a positive integer"),
        (("import", "{tmp}/nowhere", "{tmp}/store"), "expected a directory of trajectories, found none"),
    ],
)
def test_commands_say_in_one_line_what_is_wrong(
    arguments: tuple[str, ...], message: str, single: Path, tmp_path: Path
) -> None:
    done = run("rlinf", *(part.format(single=single, tmp=tmp_path) for part in arguments))
    assert done.exit_code == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not os.path.exists(tmp_path / "m")
