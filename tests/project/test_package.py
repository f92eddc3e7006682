"""Wheel and sdist hold what they should, and an environment that has only the wheel works."""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path
from typing import Any

import pytest
import yaml

import trajstore

pytest.importorskip("hatchling")
pytest.importorskip("build")

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "trajstore"
with (ROOT / "pyproject.toml").open("rb") as _file:
    PROJECT: dict[str, Any] = tomllib.load(_file)["project"]
FOR_WORK_ON_TRAJSTORE = {"dev", "bench", "demo", "notebook", "docs"}
# Libraries that trajstore uses import these: fsspec for a kind of URL, torch for TensorBoard.
USED_BY_OTHERS = {"s3fs", "gcsfs", "adlfs", "huggingface-hub", "aiohttp", "tensorboard"}


def normal(requirement: str) -> str:
    """The name of the distribution that a requirement names."""
    name = re.match(r"[\w.-]+", requirement)
    assert name, requirement
    return re.sub(r"[-_.]+", "-", name[0]).lower()


def git_files() -> set[str] | None:
    """All files of the repository that are not ignored; None without git."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout.decode()
    except (OSError, subprocess.CalledProcessError):
        return None
    return {name for name in listed.split("\0") if name and (ROOT / name).is_file()}


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the sdist, and the wheel that was built from the sdist."""
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    (path,) = dist.glob("*.whl")
    return path


def test_the_wheel_holds_exactly_the_package_with_its_files_that_are_not_python(wheel: Path) -> None:
    names = [name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name]
    found = {
        p.relative_to(ROOT).as_posix() for p in PACKAGE.rglob("*") if p.is_file() and "__pycache__" not in p.parts
    }
    assert sorted(names) == sorted(found & (git_files() or found))
    assert "trajstore/py.typed" in names


def test_the_metadata_say_what_the_project_says(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = Parser().parsestr(archive.read(name).decode())
        assert any(name.endswith("licenses/LICENSE") for name in archive.namelist())
        (scripts,) = [name for name in archive.namelist() if name.endswith("entry_points.txt")]
        assert "trajstore = trajstore.cli.app:main" in archive.read(scripts).decode()
    assert metadata["Name"] == "trajstore"
    assert metadata["Version"] == trajstore.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == PROJECT["requires-python"]
    assert set(metadata.get_all("Provides-Extra") or ()) == set(PROJECT["optional-dependencies"])
    text = str(metadata.get_payload())
    assert text.startswith("# trajstore")


def test_the_sdist_holds_every_file_of_the_repository_and_no_other(dist: Path) -> None:
    (path,) = dist.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        members = [member for member in archive.getmembers() if member.isfile()]
    names = {member.name.partition("/")[2] for member in members} - {"PKG-INFO"}
    expected = git_files()
    if expected is None:
        pytest.skip("no git: what belongs to the repository is not known")
    assert names == expected


# In an environment of its own, with the dependencies of this one but without its trajstore.
PROGRAM = """
import pathlib, sys
import numpy as np
import trajstore
from trajstore import ReplayBuffer, Windows

home = pathlib.Path(sys.prefix).resolve()
assert (pathlib.Path(trajstore.__file__).parent / "py.typed").exists()
with ReplayBuffer("run", cache_bytes="16MB", buffer_bytes="16MB", compiled=False, seed=0) as buffer:
    buffer.add_episode({"observation": np.zeros((21, 3), np.float32), "reward": np.ones(20)}, terminated=True)
    assert buffer.sample(4, Windows.transitions())["next"]["observation"].shape == (4, 3)
assert trajstore.open("run").read_episode(0)["observation"].shape == (21, 3)
loaded = [module for name, module in sys.modules.items() if name.split(".")[0] == "trajstore"]
assert len(loaded) > 100
for module in loaded:
    assert home in pathlib.Path(module.__file__).resolve().parents, module.__file__
"""


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment into which pip installed the wheel, beside which it sees the dependencies that are here."""
    home = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True, timeout=120)
    pip = [sys.executable, "-m", "pip", "--python", str(home / "bin" / "python"), "--disable-pip-version-check"]
    install = ["install", "--quiet", "--no-index", "--no-deps", "--no-compile", str(wheel)]
    subprocess.run([*pip, *install], check=True, timeout=300)
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    # Directories that a .pth file names are searched, but their own .pth files, as those of editable installs, not.
    (home / "lib" / version / "site-packages" / "here.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return home


def test_the_installed_wheel_writes_reads_and_samples_a_store(environment: Path, tmp_path: Path) -> None:
    command = [str(environment / "bin" / "python"), "-I", "-c", PROGRAM]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_the_installed_command_runs(environment: Path, tmp_path: Path) -> None:
    command = [str(environment / "bin" / "trajstore"), "--version"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, f"trajstore {trajstore.__version__}\n"), done.stderr


# ---- requirements


@functools.cache
def imported() -> frozenset[str]:
    """Top-level names of other packages that trajstore imports anywhere, also late or by name."""
    found: set[str] = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            found |= names_of(node)
    return frozenset(found - sys.stdlib_module_names - {"trajstore", "__future__"})


def names_of(node: ast.AST) -> set[str]:
    if isinstance(node, ast.Import):
        return {alias.name.split(".")[0] for alias in node.names}
    if isinstance(node, ast.ImportFrom):
        return {(node.module or "").split(".")[0]}
    if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
        called = ast.unparse(node.func).rpartition(".")[2]
        text = node.args[0].value
        if called in ("import_module", "import_optional", "import_pyarrow", "_import") and isinstance(text, str):
            return {text.split(".")[0]}
    return set()


@functools.cache
def distributions() -> dict[str, set[str]]:
    """The distributions that have a top-level name, by that name."""
    found = importlib.metadata.packages_distributions()
    return {name: {normal(one) for one in names} for name, names in found.items()}


def required(extras: set[str]) -> set[str]:
    """Names of the distributions that the project requires with these extras."""
    return {normal(one) for one in [*PROJECT["dependencies"], *requirements(extras)]}


def requirements(extras: set[str]) -> set[str]:
    """Requirements of extras, and of the extras that these name."""
    lists: dict[str, list[str]] = PROJECT["optional-dependencies"]
    found = {one for extra in extras for one in lists[extra]}
    own = {one for one in found if one.startswith("trajstore[")}
    below = {extra.strip() for one in own for extra in one.partition("[")[2].rstrip("]").split(",")}
    return (found - own) | (requirements(below) if below else set())


def users_extras() -> set[str]:
    return set(PROJECT["optional-dependencies"]) - FOR_WORK_ON_TRAJSTORE


def test_everything_that_is_imported_is_required_by_the_project_or_an_extra() -> None:
    known, declared = distributions(), required(users_extras())
    declared |= {"llvmlite", "botocore"}  # come with numba and s3fs
    declared |= {"imagecodecs"}  # an error asks for it, where a dataset has images in JPEG XL
    missing = {name for name in imported() if not known.get(name, {normal(name)}) & declared}
    assert missing == set()


def test_everything_that_an_extra_requires_is_used() -> None:
    known = distributions()
    used = {one for name in imported() for one in known.get(name, {normal(name)})}
    assert required(users_extras()) - used - USED_BY_OTHERS == set()


def test_every_extra_that_is_named_anywhere_exists() -> None:
    texts = [*PACKAGE.rglob("*.py"), *(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    named = {
        extra.strip()
        for path in texts
        for names in re.findall(r"trajstore\[([\w, -]+)\]", path.read_text("utf-8"))
        for extra in names.split(",")
    }
    assert named <= set(PROJECT["optional-dependencies"])
    listed = (ROOT / "README.md").read_text("utf-8").partition("(extras:")[2].partition("\n")[0]
    assert users_extras() - {"testing"} <= set(re.findall(r"`(\w+)`", listed))


def test_the_development_environment_has_every_extra() -> None:
    untested = {"huggingface-hub"}  # fsspec uses it, and it needs a hub
    installed = {normal(one) for one in requirements({"dev"})} | untested
    assert {normal(one) for one in requirements(users_extras())} <= installed


def test_the_citation_names_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert citation["cff-version"] == "1.2.0"
    assert {"message", "title", "authors"} <= set(citation)
    assert citation["version"] == trajstore.__version__
    assert citation["license"] == PROJECT["license"]


# ---- versions of Python

PARSE = """
import ast, pathlib, sys, warnings
warnings.simplefilter("error")
for path in sorted(pathlib.Path(sys.argv[1]).rglob("*.py")):
    ast.parse(path.read_text("utf-8"), str(path))
print(*sys.version_info[:2], sep=".")
"""


def minor_version(name: str) -> int:
    found = re.match(r"3\.(\d+)", name)
    return int(found[1]) if found else 0


def test_later_versions_of_python_on_this_machine_read_the_code() -> None:
    """The tests run with one version. Others may have no torch, so only their grammar and warnings are checked."""
    beside = Path(sys.base_prefix).parent.glob("3.*/bin/python")
    found = {str(path) for path in beside if minor_version(path.parents[1].name) > sys.version_info[1]}
    found |= {path for minor in range(12, 20) if (path := shutil.which(f"/usr/bin/python3.{minor}"))}
    if not found:
        pytest.skip("this machine has no later version of Python")
    for python in sorted(found):
        done = subprocess.run([python, "-c", PARSE, str(PACKAGE)], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, f"{python}: {done.stderr}"
