"""The notebooks run from top to bottom, and are kept without outputs."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
EXPLORE, FOLLOW = "explore_a_store.ipynb", "follow_a_run.ipynb"
IDS = [path.stem for path in NOTEBOOKS]

every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=IDS)
# Warnings of the machinery that starts kernels are not ours.
lenient = pytest.mark.filterwarnings("default")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a quick run of the demo."""
    out = tmp_path_factory.mktemp("runs") / "demo"
    command = [sys.executable, str(ROOT / "scripts" / "demo.py"), "--quick", "--directory", str(out)]
    subprocess.run(command, check=True, timeout=300, stdout=subprocess.DEVNULL)
    return out


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Notebooks and scripts in a directory of their own; kernels keep their files beside them."""
    for name in ("notebooks", "scripts"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "TMPDIR"):
        (tmp_path / name).mkdir()
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.delenv("TRAJSTORE_DEMO", raising=False)
    return tmp_path


def executed(path: Path, directory: Path | None = None) -> Any:
    notebook = nbformat.read(path, as_version=4)
    where = {"metadata": {"path": str(directory or path.parent)}}
    NotebookClient(notebook, timeout=300, kernel_name="python3", resources=where).execute()
    return notebook


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def outputs(notebook: Any, kind: str) -> list[str]:
    found = [output.get("data", {}) for cell in code_cells(notebook) for output in cell.outputs]
    return [data[kind] for data in found if kind in data]


def printed(notebook: Any) -> str:
    streams = [o for cell in code_cells(notebook) for o in cell.outputs if o.output_type == "stream"]
    return "".join(stream.text for stream in streams)


def test_there_are_notebooks() -> None:
    assert [path.name for path in NOTEBOOKS] == [EXPLORE, FOLLOW]


@every_notebook
def test_a_notebook_is_kept_without_outputs(path: Path) -> None:
    for cell in code_cells(nbformat.read(path, as_version=4)):
        assert cell.outputs == []
        assert cell.execution_count is None


@every_notebook
def test_a_notebook_is_valid_and_names_no_machine(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert set(notebook.metadata) <= {"kernelspec", "language_info"}
    assert notebook.metadata.kernelspec.name == "python3"


@lenient
def test_a_store_is_explored_that_the_demo_recorded(
    recorded: Path, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAJSTORE_DEMO", str(recorded / "store"))
    notebook = executed(copy / "notebooks" / EXPLORE)
    assert f"<Store {recorded / 'store'}" in "".join(outputs(notebook, "text/plain"))
    assert len(outputs(notebook, "image/png")) >= 4


@lenient
def test_the_demos_store_is_looked_for_in_its_usual_place(recorded: Path, copy: Path) -> None:
    shutil.copytree(recorded, copy / "runs" / "demo")
    assert "recorded a small one" not in printed(executed(copy / "notebooks" / EXPLORE))


@lenient
def test_where_there_is_no_store_one_is_recorded_and_nothing_left(copy: Path) -> None:
    shown = printed(executed(copy / "notebooks" / EXPLORE))
    assert "recorded a small one" in shown
    assert "same bytes: True" in shown
    assert list((copy / "TMPDIR").glob("*/small")) == []  # torch leaves an empty directory of its own


@lenient
@pytest.mark.parametrize("place", ["", "scripts", "TMPDIR/elsewhere"])
def test_a_notebook_runs_from_any_directory(recorded: Path, copy: Path, place: str) -> None:
    (copy / place).mkdir(exist_ok=True)
    shutil.copytree(recorded, copy / "runs" / "demo")
    notebook = executed(copy / "notebooks" / EXPLORE, copy / place)
    assert f"<Store {copy / 'runs' / 'demo' / 'store'}" in "".join(outputs(notebook, "text/plain"))


@lenient
def test_a_notebook_runs_outside_the_project(
    copy: Path, tmp_path_factory: pytest.TempPathFactory, recorded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store is looked for where trajstore is imported from."""
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    shutil.move(copy / "notebooks" / EXPLORE, elsewhere)
    shutil.copytree(recorded, copy / "runs" / "demo")
    (copy / "trajstore").symlink_to(ROOT / "trajstore")
    monkeypatch.setenv("PYTHONPATH", str(copy))
    notebook = executed(elsewhere / EXPLORE)
    assert f"<Store {copy / 'runs' / 'demo' / 'store'}" in "".join(outputs(notebook, "text/plain"))
    assert "same bytes: True" in printed(notebook)


@lenient
def test_a_run_is_resumed_and_followed_and_nothing_left(copy: Path) -> None:
    notebook = executed(copy / "notebooks" / FOLLOW)
    shown = printed(notebook)
    assert "same batch: True" in shown
    assert "same bytes: True" in shown
    assert len(outputs(notebook, "image/png")) >= 8
    assert list((copy / "TMPDIR").glob("*/run")) == []  # torch leaves an empty directory of its own
