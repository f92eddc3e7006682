"""Files that were replaced are freed behind the back of whoever replaced them, and never pile up."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import pytest

from trajstore.storage import open_storage, replaced_files
from trajstore.storage.replaced_files import ReplacedFiles

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems free files when they are replaced")


def held(directory: Path) -> int:
    """Files of a directory that have no name any more, but are open in this process."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue
        found += target.startswith(str(directory)) and target.endswith("(deleted)")
    return found


def replace_all(files: ReplacedFiles, directory: Path, n: int) -> None:
    for i in range(n):
        (directory / f"{i}").write_text("old")
        (directory / "new").write_text("new")
        files.replace(f"{directory}/new", f"{directory}/{i}")


def test_replaced_files_are_held_until_they_are_freed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = ReplacedFiles()
    replace_all(files, tmp_path, 5)
    assert {(tmp_path / f"{i}").read_text() for i in range(5)} == {"new"}
    assert held(tmp_path) == 5
    closers, is_done, close = set[str](), threading.Event(), os.close

    def noted_close(descriptor: int) -> None:
        close(descriptor)
        closers.add(threading.current_thread().name)
        if not held(tmp_path):
            is_done.set()

    monkeypatch.setattr(os, "close", noted_close)
    with files.freed_later():
        pass
    assert is_done.wait(30)
    assert threading.current_thread().name not in closers


def test_a_file_that_is_new_replaces_none(tmp_path: Path) -> None:
    (tmp_path / "new").write_text("new")
    files = ReplacedFiles()
    files.replace(f"{tmp_path}/new", f"{tmp_path}/other")
    assert (tmp_path / "other").read_text() == "new"
    assert held(tmp_path) == 0


def test_only_so_many_files_are_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replaced_files, "MAX_HELD", 3)
    replace_all(ReplacedFiles(), tmp_path, 5)
    assert held(tmp_path) == 3


def test_a_child_process_does_not_keep_what_its_parent_frees(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))
    files: ReplacedFiles = storage._replaced  # type: ignore[attr-defined]
    replace_all(files, tmp_path, 3)
    child = os.fork()
    if child == 0:
        os._exit(held(tmp_path))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert held(tmp_path) == 3
    files.close_in_child()  # as the child did
    assert held(tmp_path) == 0
