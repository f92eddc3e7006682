"""`import trajstore` loads what everybody needs, and nothing that takes long and only some programs need."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np

import trajstore

# Of the standard library: the first belongs to asynchronous clients, the others to packages that ask for plugins.
SLOW = {"asyncio", "importlib.metadata", "email", "multiprocessing"}


def loaded(code: str, *args: str) -> set[str]:
    """The modules that a fresh interpreter has loaded after some code."""
    program = f"import sys\n{code}\nprint(*sys.modules, sep='\\n')"
    return set(subprocess.check_output([sys.executable, "-c", program, *args], text=True).split())


def foreign(modules: set[str]) -> set[str]:
    """Packages outside the standard library."""
    return {name.partition(".")[0] for name in modules} - sys.stdlib_module_names


def test_importing_trajstore_loads_numpy_and_no_other_package() -> None:
    before, after = loaded("import numpy"), loaded("import trajstore")
    assert foreign(after) - foreign(before) == {"trajstore"}
    assert not SLOW & (after - before)


def test_only_remote_urls_need_fsspec(tmp_path: Path) -> None:
    store = trajstore.create(tmp_path / "store")
    with store.writer() as writer:
        writer.append_episode({"observation": np.zeros((3, 2), np.float32)})
    local = loaded("import trajstore; trajstore.open(sys.argv[1]).episodes", str(tmp_path / "store"))
    remote = loaded("import trajstore; trajstore.create('memory://imports')")
    assert "fsspec" not in local
    assert "asyncio" not in local
    assert "fsspec" in remote


def test_an_open_store_has_its_compressors_so_that_no_thread_imports_them_while_a_child_is_forked(
    tmp_path: Path,
) -> None:
    for call in ("create", "open"):
        modules = loaded(f"import trajstore; trajstore.{call}(sys.argv[1])", str(tmp_path / "store"))
        assert {"numcodecs.blosc", "numcodecs.zstd", "crc32c"} <= modules
