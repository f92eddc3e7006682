"""The notebooks run from top to bottom, and are kept with outputs that are small and name no machine."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest

import trajstore
from scripts import run_notebooks
from scripts.run_notebooks import MAX_BYTES, MAX_TOTAL, METADATA, problems

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = run_notebooks.all_notebooks()
EXPLORE, FOLLOW, S3 = "2_what_is_in_this_store", "3_a_run_seen_from_its_buffer", "7_a_store_on_s3"
N_PICTURES = {
    "1_quickstart": 1,
    EXPLORE: 4,
    FOLLOW: 8,
    "4_analysis_by_policy_version": 4,
    "5_from_other_data_to_a_policy": 4,
    "6_sizing_chunks_codecs_and_cache": 6,
    S3: 2,
}
# What a notebook has to show when it is run.
SHOWS = {
    "1_quickstart": ["same next batch: True"],
    EXPLORE: ["recorded a small one", "same bytes: True"],
    FOLLOW: ["same batch: True", "same bytes: True"],
    S3: ["same next batch: True", "StorageError", "shows the secret: False"],
}

every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])
# Warnings of the machinery that starts kernels are not ours.
lenient = pytest.mark.filterwarnings("default")


def notebook_at(path: Path) -> Any:
    return nbformat.read(path, as_version=4)


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def outputs(notebook: Any, kind: str) -> list[str]:
    found = [output.get("data", {}) for cell in code_cells(notebook) for output in cell.outputs]
    return [data[kind] for data in found if kind in data]


def printed(notebook: Any) -> str:
    streams = [o for cell in code_cells(notebook) for o in cell.outputs if o.output_type == "stream"]
    return "".join(stream.text for stream in streams)


def kinds(notebook: Any) -> list[list[str]]:
    """What each cell puts out."""
    return [[o.get("name") or sorted(o.data)[0] for o in cell.outputs] for cell in code_cells(notebook)]


# ---- what is kept


def test_there_are_notebooks_and_the_readme_lists_them() -> None:
    assert [path.stem for path in NOTEBOOKS] == list(N_PICTURES)
    readme = (ROOT / "notebooks" / "README.md").read_text("utf-8")
    titles = {
        path.name: notebook_at(path).cells[0].source.partition("\n")[0].removeprefix("# ") for path in NOTEBOOKS
    }
    assert re.findall(r"^\| \[(.+?)\]\((.+?)\)", readme, re.M) == [(title, name) for name, title in titles.items()]


@every_notebook
def test_a_notebook_is_kept_with_outputs_that_are_small_and_name_no_machine(path: Path) -> None:
    notebook = notebook_at(path)
    assert list(problems(notebook, path.stat().st_size)) == [], "python scripts/run_notebooks.py writes them"
    assert len(outputs(notebook, "image/png")) >= N_PICTURES[path.stem]


def test_all_notebooks_together_are_small() -> None:
    assert sum(path.stat().st_size for path in NOTEBOOKS) < MAX_TOTAL


@every_notebook
def test_a_notebook_is_valid_and_says_where_to_read_on(path: Path) -> None:
    notebook = notebook_at(path)
    nbformat.validate(notebook)
    assert notebook.metadata == METADATA
    assert notebook.cells[0].source.startswith("# ")
    assert "## Where to read on" in notebook.cells[-1].source
    for link in re.findall(r"\]\(([^):]+?)(?:#[^)]*)?\)", "".join(cell.source for cell in notebook.cells)):
        assert (path.parent / link).exists(), link


# ---- running them


@lenient
@every_notebook
def test_a_notebook_runs_shows_what_is_kept_and_leaves_nothing(path: Path, tmp_path: Path) -> None:
    notebook = run_notebooks.executed(path, tmp_path, run_notebooks.variables_of(tmp_path))
    run_notebooks.tidy(notebook, run_notebooks.Cleaner(tmp_path))
    assert list(problems(notebook, path.stat().st_size)) == []
    assert kinds(notebook) == kinds(notebook_at(path))
    for text in SHOWS.get(path.stem, []):
        assert text in printed(notebook)
    left = [found for found in (tmp_path / "TMPDIR").glob("*/*") if found.name not in (".ipynb_checkpoints",)]
    assert left == []  # torch leaves an empty directory of its own


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a quick run of the demo."""
    out = tmp_path_factory.mktemp("runs") / "demo"
    command = [sys.executable, str(ROOT / "scripts" / "demo.py"), "--quick", "--directory", str(out)]
    subprocess.run(command, check=True, timeout=300, stdout=subprocess.DEVNULL)
    return out


@lenient
def test_a_store_is_explored_that_the_demo_recorded(recorded: Path, tmp_path: Path) -> None:
    variables = run_notebooks.variables_of(tmp_path) | {"TRAJSTORE_DEMO": str(recorded / "store")}
    notebook = run_notebooks.executed(ROOT / "notebooks" / f"{EXPLORE}.ipynb", tmp_path, variables)
    assert f"<Store {recorded / 'store'}" in "".join(outputs(notebook, "text/plain"))
    assert len(outputs(notebook, "image/png")) >= 4
    assert "recorded a small one" not in printed(notebook)
    assert "same bytes: True" in printed(notebook)


# ---- cells by themselves


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with the scripts, and no pictures that block."""
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "notebooks").mkdir()
    plt = pytest.importorskip("matplotlib.pyplot")
    monkeypatch.setattr(plt, "show", lambda: plt.close("all"))
    monkeypatch.delenv("TRAJSTORE_DEMO", raising=False)
    return tmp_path


def run_cells(name: str, n_cells: int | None = None) -> dict[str, Any]:
    """Run the first cells of a notebook in this process."""
    namespace: dict[str, Any] = {}
    for cell in code_cells(notebook_at(ROOT / "notebooks" / f"{name}.ipynb"))[:n_cells]:
        exec(compile(cell.source, name, "exec"), namespace)
    return namespace


@pytest.mark.parametrize("place", ["notebooks", "", "scripts", "TMPDIR/elsewhere"])
def test_the_demos_store_is_found_from_any_directory_of_the_project(
    recorded: Path, copy: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (copy / place).mkdir(exist_ok=True, parents=True)
    monkeypatch.chdir(copy / place)
    shutil.copytree(recorded, copy / "runs" / "demo")
    found = run_cells(EXPLORE, 2)["store"]
    assert repr(found).startswith(f"<Store {copy / 'runs' / 'demo' / 'store'}")


def test_outside_the_project_the_demos_store_is_looked_for_where_trajstore_is_imported_from(
    recorded: Path, copy: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    monkeypatch.setattr(trajstore, "__file__", str(copy / "trajstore" / "__init__.py"))
    shutil.copytree(recorded, copy / "runs" / "demo")
    found = run_cells(EXPLORE, 2)["store"]
    assert repr(found).startswith(f"<Store {copy / 'runs' / 'demo' / 'store'}")


def test_without_moto_the_notebook_about_s3_says_so_and_runs_in_memory(
    copy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "moto.server", None)
    namespace = run_cells(S3)
    shown = capsys.readouterr().out
    assert "moto is not installed" in shown
    assert "same next batch: True" in shown
    assert namespace["url"].startswith("memory://")
    namespace["directory"].cleanup()


# ---- the script


@lenient
def test_the_script_keeps_outputs_without_paths_dates_and_ids(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.ipynb"
    code = [
        "import tempfile, pathlib, trajstore\ndirectory = tempfile.TemporaryDirectory()\nprint('a')",
        "place = str(pathlib.Path(directory.name) / 'run')\nprint(place, 'file://' + place, trajstore.__file__)",
        "print('2031-05-06 07:08:09, 2031-05-06 07:08 UTC, 3 hours ago')\n'buffer-01k7quvk9gf5nqjnd0kqo1hi6v'",
    ]
    path.write_text(nbformat.writes(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in code])))
    monkeypatch.setattr(run_notebooks, "NOTEBOOKS", tmp_path)
    assert run_notebooks.main(["a"]) == 0
    notebook = notebook_at(path)
    assert printed(notebook) == ("a\nrun run trajstore/__init__.py\n2026-01-01 00:00, 2026-01-01 00:00 UTC\n")
    assert outputs(notebook, "text/plain") == [f"'buffer-{1:026d}'"]
    assert notebook.metadata == METADATA
    assert all(cell.metadata == {} for cell in notebook.cells)
    with pytest.raises(SystemExit, match=r"no such notebook: b\.ipynb; there are a"):
        run_notebooks.main(["b"])


@pytest.mark.parametrize(
    ("output", "problem"),
    [
        (nbformat.v4.new_output("error", ename="KeyError", evalue="'x'"), "KeyError: 'x'"),
        (nbformat.v4.new_output("stream", name="stderr", text="UserWarning"), "warnings or errors are shown"),
        (nbformat.v4.new_output("stream", text="in /home/me/run"), "names a place on a machine"),
        (nbformat.v4.new_output("display_data", {"text/html": "<b>file:///tmp/run</b>"}), "names a place"),
        (nbformat.v4.new_output("stream", text="x" * MAX_BYTES), f"at most {MAX_BYTES:,}"),
        (None, "has no outputs"),
    ],
)
def test_outputs_that_may_not_be_kept_are_named(output: Any, problem: str) -> None:
    cell = nbformat.v4.new_code_cell("x", execution_count=1, outputs=[output] if output else [])
    notebook = nbformat.v4.new_notebook(cells=[cell])
    (found,) = problems(notebook, len(nbformat.writes(notebook)))
    assert problem in found
    cell.execution_count = 2
    assert any("was not run from top to bottom" in text for text in problems(notebook, 0))
