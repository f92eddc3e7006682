"""Programs of a warm Python begin and end as in a process of their own."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.warm_python import WarmPython, warm_python


@pytest.fixture(scope="module")
def python() -> Iterator[WarmPython]:
    with warm_python() as python:
        yield python


def test_a_program_has_its_arguments_directory_environment_and_nothing_else(
    python: WarmPython, tmp_path: Path
) -> None:
    code = """if True:
        names = set(globals())
        import os, sys, threading
        assert not [name for name in names if not name.startswith("__")]
        assert (__name__, sys.argv[1:], os.environ["MINE"]) == ("__main__", ["a", "b c"], "1")
        assert "HOME" not in os.environ
        assert threading.active_count() == 1
        assert sys.stdin.read() == ""
        print(os.getcwd(), os.getpid())
        print("warned", file=sys.stderr)
    """
    done = python.run_code(code, "a", "b c", timeout=60, cwd=tmp_path, env={"MINE": "1"})
    assert (done.returncode, done.stderr) == (0, "warned\n")
    where, pid = done.stdout.split()
    assert (where, int(pid) == os.getpid()) == (str(tmp_path), False)


@pytest.mark.parametrize(
    ("code", "code_at_end", "last_line"),
    [
        ("raise SystemExit(3)", 3, ""),
        ("raise ValueError('mine')", 1, "ValueError: mine"),
        ("import os; os.kill(os.getpid(), 9)", -9, ""),
        ("import atexit; atexit.register(print, 'at exit'); raise SystemExit('said')", 1, "said"),
    ],
)
def test_a_program_ends_as_it_says(python: WarmPython, code: str, code_at_end: int, last_line: str) -> None:
    done = python.run_code(code, timeout=60)
    assert (done.returncode, (done.stderr.splitlines() or [""])[-1]) == (code_at_end, last_line)
    assert ("at exit" in done.stdout) == ("at exit" in code)


def test_a_script_knows_its_file_and_imports_what_lies_beside_it(python: WarmPython, tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("value = 7")
    (tmp_path / "script.py").write_text(
        "import beside\nprint(__file__, beside.value)\nimport warnings\nwarnings.warn('x')"
    )
    done = python.run_script(tmp_path / "script.py", timeout=60, warn=["error::UserWarning"])
    assert done.stdout.split() == [str(tmp_path / "script.py"), "7"]
    assert (done.returncode, done.stderr.splitlines()[-1]) == (1, "UserWarning: x")


def test_a_program_that_does_not_end_is_killed() -> None:
    with warm_python() as python, pytest.raises(subprocess.TimeoutExpired):
        python.run_code("import time; time.sleep(600)", timeout=0.5)
