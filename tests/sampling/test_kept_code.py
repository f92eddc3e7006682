"""Machine code of compiled loops is kept on disk: found by other processes, never wrong, never in the way."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("numba")

from trajstore.sampling.compiled import code_cache
from trajstore.sampling.compiled.code_cache import CodeCache, directories

# Calls two loops, of which one calls a third, and prints what was compiled. ``{setup}`` runs before.
PROGRAM = """
import json, sys
import numpy as np
from trajstore.sampling.compiled import code_cache, compile_times
from pathlib import Path
{setup}
from trajstore.sampling.compiled.jit import LOOPS, random_bits
from trajstore.sampling.compiled.sum_tree_loops import sum_up

assert random_bits(np.uint64(1), np.uint64(2)) == 17911839290282890590
sums = np.arange(32)
sum_up(sums, sums[:0], np.array([16, 0]), 0, 16)
assert sums[0] == sum(range(16, 32)), sums
used = [loop for loop in LOOPS if loop.signatures]
print(json.dumps({{
    "hits": sum(sum(loop.stats.cache_hits.values()) for loop in used),
    "misses": sum(sum(loop.stats.cache_misses.values()) for loop in used),
}}))
"""
SHOWS_ALL = "compile_times._SHOWN_S = -1"


def start(kept_in: Path | None, setup: str = "") -> subprocess.Popen[str]:
    environment = os.environ | ({"NUMBA_CACHE_DIR": str(kept_in)} if kept_in is not None else {})
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(setup=setup)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[dict[str, int], str]:
    out, error = process.communicate(timeout=300)
    assert process.returncode == 0, error
    return json.loads(out), error


def run(kept_in: Path | None, setup: str = "") -> tuple[dict[str, int], str]:
    return finish(start(kept_in, setup))


COMPILED, KEPT = {"hits": 0, "misses": 3}, {"hits": 2, "misses": 0}


def test_a_second_process_does_not_compile_again(tmp_path: Path) -> None:
    assert run(tmp_path)[0] == COMPILED
    assert run(tmp_path)[0] == KEPT


def test_a_message_says_once_that_loops_are_compiled_and_where_the_code_is_kept(tmp_path: Path) -> None:
    _, shown = run(tmp_path, SHOWS_ALL)
    assert shown.count("\n") == 1
    assert f"kept in {tmp_path}" in shown
    assert "python -m trajstore warm-up" in shown
    assert run(tmp_path, SHOWS_ALL)[1] == ""


def test_nothing_is_said_about_little_compiling(tmp_path: Path) -> None:
    assert run(tmp_path, "compile_times._SHOWN_S = 1e9")[1] == ""


def test_processes_that_compile_at_the_same_time_do_not_disturb_each_other(tmp_path: Path) -> None:
    for process in [start(tmp_path) for _ in range(4)]:
        counts, _ = finish(process)
        assert counts["hits"] + counts["misses"] in (2, 3)
    assert run(tmp_path)[0] == KEPT
    assert not list(tmp_path.rglob("*.tmp*"))


def test_loops_work_where_no_directory_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for _ in range(2):
        counts, shown = run(tmp_path / "file", SHOWS_ALL)
        assert counts == COMPILED
        assert shown.count("\n") == 1
        assert f"no directory can be written (tried {tmp_path / 'file'})" in shown
        assert "set NUMBA_CACHE_DIR" in shown


def test_loops_work_where_neither_the_package_nor_the_home_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    setup = f"code_cache.directories = lambda: tuple(Path({str(tmp_path)!r}, 'file', name) for name in 'ab')"
    assert run(None, setup)[0] == COMPILED


def test_loops_work_on_a_full_disk(tmp_path: Path) -> None:
    setup = f"""
def fail(self, name, data):
    raise OSError({errno.ENOSPC}, "no space left")
code_cache._CodeFiles._save_data = fail
"""
    assert run(tmp_path, setup)[0] == COMPILED
    assert run(tmp_path)[0] == COMPILED


def test_code_that_others_keep_is_used_where_only_they_can_write(tmp_path: Path) -> None:
    image, home = tmp_path / "image", tmp_path / "home"
    both = f"code_cache.directories = lambda: (Path({str(image)!r}), Path({str(home)!r}))"
    assert run(None, both)[0] == COMPILED
    next(image.glob("sum_tree_loops.sum_up-*")).unlink()
    locked = f"""{both}
save = code_cache._CodeFiles.save
def save_elsewhere(self, key, data):
    if self._directory == Path({str(image)!r}):
        raise PermissionError("read-only")
    save(self, key, data)
code_cache._CodeFiles.save = save_elsewhere
"""
    assert run(None, locked)[0] == {"hits": 2, "misses": 1}
    assert [path.name.split("-")[0] for path in home.iterdir()] == ["sum_tree_loops.sum_up"]
    assert run(None, locked)[0] == KEPT


def test_damaged_files_are_replaced(tmp_path: Path) -> None:
    run(tmp_path)
    for path, damage in zip(sorted(tmp_path.rglob("*.nbc")), ("empty", "shortened", "overwritten"), strict=True):
        data = path.read_bytes()
        path.write_bytes({"empty": b"", "shortened": data[:-100], "overwritten": b"\x80\x05garbage"}[damage])
    assert run(tmp_path)[0] == COMPILED
    assert run(tmp_path)[0] == KEPT


# ---- what code depends on


def copied_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    package = tmp_path / "compiled"
    shutil.copytree(Path(code_cache.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(code_cache, "__file__", str(package / "code_cache.py"))
    return package


def test_code_is_kept_apart_for_other_sources_and_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = directories.__wrapped__
    package = copied_sources(tmp_path, monkeypatch)
    before = {path.name for path in found()}
    assert len(before) == 1
    monkeypatch.setattr("numba.__version__", "0.1")
    assert not before & {path.name for path in found()}
    monkeypatch.undo()
    monkeypatch.setattr(code_cache, "__file__", str(package / "code_cache.py"))
    assert before == {path.name for path in found()}
    with (package / "jit.py").open("a") as file:  # other modules call its loops
        file.write("\n")
    assert not before & {path.name for path in found()}


def test_code_is_kept_in_the_package_or_in_the_cache_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("numba.config.CACHE_DIR", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    beside, of_user = directories.__wrapped__()
    assert beside.parent == Path(code_cache.__file__).parent / "__pycache__"
    if sys.platform == "linux":
        assert of_user.parent == tmp_path / "trajstore"
        monkeypatch.setenv("XDG_CACHE_HOME", "~nobody-of-this-name/.cache")  # as where no home is known
        assert directories.__wrapped__() == (beside,)


def test_no_code_is_kept_of_a_package_without_source_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_cache, "__file__", "/somewhere/archive.zip/code_cache.py")
    assert directories.__wrapped__() == ()


LIMIT = 3


def _inner(x: int) -> int:
    return x + LIMIT


class _Loop:
    """Looks like a compiled loop."""

    py_func = staticmethod(_inner)


inner = _Loop()


def outer(x: int) -> Any:
    return inner.py_func(x)


def test_code_depends_on_constants_of_the_loops_that_it_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    class Codegen:
        def magic_tuple(self) -> tuple[str, ...]:
            return ("cpu",)

    def key() -> Any:
        return CodeCache(outer)._index_key((), Codegen())

    before = key()
    assert key() == before
    monkeypatch.setitem(globals(), "LIMIT", 4)
    assert key() != before


def test_directories_of_old_versions_are_removed(tmp_path: Path) -> None:
    for i in range(30):
        (tmp_path / f"trajstore-{i}").mkdir()
        os.utime(tmp_path / f"trajstore-{i}", (i, i))
    (tmp_path / "other").mkdir()
    current = tmp_path / "trajstore-new"
    files = code_cache._CodeFiles(current, "loop")
    files.save("key", [1, 2])
    assert files.load("key") == [1, 2]
    kept = {path.name for path in tmp_path.iterdir()}
    assert kept == {"other", "trajstore-new"} | {f"trajstore-{i}" for i in range(14, 30)}
