"""What only a terminal shows: progress bars with rates, and completion by the shell."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.cli.test_cli import ROOT, run
from trajstore.cli import output
from trajstore.cli.output import format_rate, progress_bar


@pytest.mark.parametrize(
    ("speed", "unit", "text"),
    [
        (None, "chunks", ""),
        (0.123, "chunks", "0.12/s"),
        (12345.6, "chunks", "12,346/s"),
        (3 << 20, "bytes", "3.0 MiB/s"),
    ],
)
def test_a_rate_has_its_unit(speed: float | None, unit: str, text: str) -> None:
    assert format_rate(speed, unit) == text


@pytest.mark.parametrize("unit", ["bytes", "chunks"])
def test_a_progress_bar_shows_the_rate_and_the_time_left(unit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    monkeypatch.setattr(output.sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(output.sys.stderr, "write", written.append)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    with progress_bar(unit) as progress:
        assert progress is not None
        for done in range(0, 5000, 500):
            progress(done, 5000)
    shown = "".join(written)
    assert "/s" in shown
    assert ("4.4/4.9 KiB" if unit == "bytes" else "4500/5000") in shown


def test_without_a_terminal_there_is_no_progress_bar() -> None:
    with progress_bar("chunks") as progress:
        assert progress is None


def test_bash_completes_commands_and_options() -> None:
    def completed(words: str, position: int) -> list[str]:
        asked = {"_TRAJSTORE_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(position)}
        code = "from trajstore.cli.app import app; app()(prog_name='trajstore')"
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | asked,
            capture_output=True,
            text=True,
            cwd=ROOT,
            timeout=60,
            check=False,
        )
        return done.stdout.split()

    assert completed("trajstore ch", 1) == ["checkpoints"]
    assert completed("trajstore info --si", 2) == ["--sizes"]


def test_the_script_for_a_shell_is_shown() -> None:
    result = run("--show-completion", "bash")
    assert result.exit_code == 0
    assert "_COMPLETE=complete_bash" in result.stdout
