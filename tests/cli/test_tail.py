"""The command ``tail``: readings of a store that is being written, and how it ends."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trajstore
from tests.cli.test_cli import ROOT, run, run_json
from trajstore.inspection import readings
from trajstore.inspection.readings import Watch, rates
from trajstore.store.checkpoints import Checkpoint, new_checkpoint_id, save


def add(writer: trajstore.Writer, lengths: list[int], **end: bool) -> None:
    for n in lengths:
        data = {"observation": np.zeros((n + 1, 2)), "reward": np.full(n, 0.5)}
        writer.append_episode(data, **(end or {"terminated": True}))
    writer.commit()


def test_readings_follow_the_commits_of_a_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.0]
    monkeypatch.setattr(readings.time, "time", lambda: clock[0])
    store = trajstore.create(tmp_path / "store", fsync=False)
    watch = Watch(trajstore.open(tmp_path / "store"), with_bytes=True)
    empty = watch.read()
    assert (empty.n_rows, empty.n_finished, empty.idle_s, empty.checkpoint) == (0, 0, None, None)
    with store.writer(commit_seconds=None) as writer:
        add(writer, [4, 2])
        first = watch.read()
        assert (first.n_rows, first.n_written, first.n_finished, first.n_commits) == (8, 8, 2, 1)
        assert (first.returns.tolist(), first.lengths.tolist()) == ([2, 1], [4, 2])
        assert first.open_streams == (writer.stream,)
        saved = Checkpoint(new_checkpoint_id("half"), "half", 990.0, streams=store.refresh().cuts())
        save(store.snapshot.storage, saved, {})
        add(writer, [7], truncated=True)
        writer.set_view(first_row=5)
        writer.commit()
        clock[0] += 2
        second = watch.read()
        assert (second.n_rows, second.n_written, second.checkpoint) == (11, 16, ("half", 990.0))
        assert second.lengths.tolist() == [4, 2, 7]
        assert second.stored_bytes is not None
        assert first.stored_bytes is not None
        found = rates(first, second)
        assert found is not None
        assert (found.rows, found.episodes) == (4.0, 0.5)
        assert found.stored_bytes == (second.stored_bytes - first.stored_bytes) / 2
    assert watch.read().open_streams == ()
    assert rates(second, second) is None


def test_only_the_last_episodes_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readings, "N_RECENT", 3)
    store = trajstore.create(tmp_path / "store", fsync=False)
    with store.writer(commit_seconds=None) as writer:
        add(writer, [1, 2, 3, 4, 5])
    reading = Watch(store, with_bytes=False).read()
    assert (reading.n_finished, reading.lengths.tolist(), reading.stored_bytes) == (5, [3, 4, 5], None)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    with trajstore.create(tmp_path / "store", fsync=False).writer(commit_seconds=None) as writer:
        add(writer, [5, 9, 30])
    return tmp_path / "store"


def test_one_reading_is_shown(root: Path) -> None:
    result = run("tail", root, "--once", "--disk")
    assert (result.exit_code, result.stderr) == (0, "")
    for part in (
        "no session is writing",
        "rows         47",
        "3 finished",
        "KiB",
        "mean 7.333, from 2.5 to 15",
        "▁▂█",
    ):
        assert part in result.stdout, part
    facts = run_json("tail", root, "--once")
    assert (facts["rows"], facts["recent_lengths"], facts["rates"], facts["stored_bytes"]) == (
        47,
        [5, 9, 30],
        None,
        None,
    )


def test_an_empty_store_is_followed_too(tmp_path: Path) -> None:
    trajstore.create(tmp_path / "store")
    result = run("tail", tmp_path / "store", "--once")
    assert (result.exit_code, "last commit never" in result.stdout) == (0, True)


def interrupt_after(n: int) -> Callable[[float], None]:
    left = [n]

    def sleep(seconds: float) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt

    return sleep


def test_readings_come_line_by_line_until_it_is_interrupted(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trajstore.cli.tail.time.sleep", interrupt_after(2))
    result = run("tail", root, "--interval", 5)
    assert (result.exit_code, result.stderr) == (0, "")
    assert len(result.stdout.splitlines()) == 3
    assert result.stdout.startswith("47 rows, 3 episodes, return 7.333, last commit ")
    monkeypatch.setattr("trajstore.cli.tail.time.sleep", interrupt_after(1))
    lines = run("tail", root, "--json").stdout.splitlines()
    parsed: list[dict[str, Any]] = [json.loads(line) for line in lines]
    assert [one["rates"] is None for one in parsed] == [True, False]


def test_a_terminal_is_updated_in_place(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trajstore.cli.tail.time.sleep", interrupt_after(1))
    monkeypatch.setattr("trajstore.cli.tail._is_terminal", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    text = run("tail", root).stdout
    assert "now," in text or "rows         47" in text


def test_ctrl_c_ends_it_with_0(root: Path) -> None:
    command = [sys.executable, "-m", "trajstore", "tail", str(root), "--interval", "60"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("47 rows")
        time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")


@pytest.mark.parametrize("interval", ["0", "nan"])
def test_an_interval_that_is_too_short_is_refused(root: Path, interval: str) -> None:
    result = run("tail", root, "--interval", interval)
    assert (result.exit_code, "expected at least 0.1 s" in result.stderr) == (2, True)


def test_a_closed_pipe_ends_a_command_in_silence(root: Path) -> None:
    code = (
        "import sys, os; from trajstore.cli.app import main; sys.argv = ['trajstore', 'ls', sys.argv[1], '--json'];"
        "r, w = os.pipe(); os.close(r); os.dup2(w, 1); main()"
    )
    command = [sys.executable, "-c", code, str(root)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
