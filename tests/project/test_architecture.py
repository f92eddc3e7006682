"""The architecture page, the layer contracts and the code agree; modules and classes stay small."""

from __future__ import annotations

import ast
import functools
import importlib
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "trajstore"
PAGE = ROOT / "docs" / "architecture.md"
MAX_LINES, MAX_METHODS = 500, 40
# Names of other libraries that begin with an underscore and have no public counterpart.
FOREIGN = {
    "_asdict",
    "_current_frames",
    "_cursor",
    "_empty",
    "_fields",
    "_get_default_store",
    "_is_full",
    "_last_cursor_index",
    "_make_wrapper_subclass",
    "_mutation_revision",
    "_register_atexit",
    "_schema",
    "_version",
}


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def contracts() -> list[dict[str, Any]]:
    with (ROOT / "pyproject.toml").open("rb") as file:
        found: list[dict[str, Any]] = tomllib.load(file)["tool"]["importlinter"]["contracts"]
    return found


def layers_of(container: str) -> list[set[str]]:
    """The modules of each layer, top first, of the contract for a package."""
    (contract,) = [c for c in contracts() if c.get("containers") == [container]]
    assert contract["exhaustive"]
    return [set(map(str.strip, layer.split("|"))) for layer in contract["layers"]]


def section(title: str) -> str:
    text = PAGE.read_text("utf-8")
    return re.split(r"^## ", text[text.index(f"## {title}") + 3 :], flags=re.M)[0]


def drawn_layers() -> list[set[str]]:
    """The map of the page: one indented line for each layer, with the packages before two spaces."""
    lines = [line.strip() for line in section("Packages").splitlines() if line.startswith("    ")]
    return [set(map(str.strip, line.split("  ")[0].split("|"))) for line in lines]


def named_in(title: str) -> list[str]:
    return re.findall(r"`(trajstore\.[\w.]+)`", section(title))


def resolve(name: str) -> object:
    """The module, class, function or attribute of a dotted name."""
    parts = name.split(".")
    for n in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:n]))
        except ModuleNotFoundError:
            continue
        return functools.reduce(getattr, parts[n:], found)
    raise ModuleNotFoundError(name)


def private_accesses(path: Path) -> Iterator[str]:
    """Uses of ``x._y`` where the module itself defines no ``_y``."""
    tree = ast.parse(path.read_text("utf-8"))
    nodes = list(ast.walk(tree))
    own = {n.name for n in nodes if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))}
    own |= {n.attr for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)}
    own |= {n.target.id for n in nodes if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}
    for node in nodes:
        if isinstance(node, ast.Attribute) and re.match(r"_[^_]", node.attr) and node.attr not in own | FOREIGN:
            is_own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            if not is_own:
                yield f"{path.relative_to(ROOT)}:{node.lineno} {ast.unparse(node)}"
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("trajstore"):
            yield from (f"{path.relative_to(ROOT)}:{node.lineno} {a.name}" for a in node.names if a.name[0] == "_")


def test_the_map_of_the_page_is_the_contract_of_the_packages() -> None:
    assert drawn_layers() == layers_of("trajstore")[1:]  # without __main__


@pytest.mark.parametrize("package", sorted(p.parent.name for p in PACKAGE.glob("*/__init__.py")))
def test_every_package_has_a_contract_for_its_own_modules(package: str) -> None:
    listed = set().union(*layers_of(f"trajstore.{package}"))
    there = {p.stem for p in (PACKAGE / package).glob("*.py")} | {
        p.parent.name for p in (PACKAGE / package).glob("*/__init__.py")
    }
    assert listed == there - {"__init__"}


@pytest.mark.parametrize("title", ["The life of a step", "A checkpoint and a resume", "Where to look"])
def test_every_name_on_the_way_exists(title: str) -> None:
    names = named_in(title)
    assert len(names) >= 6
    for name in names:
        resolve(name)


HOOKS = {
    "__del__": r"def __del__",
    "weakref.finalize": r"weakref\.finalize\(",
    "atexit.register": r"\batexit\.register\(",
    "threading._register_atexit": r"_register_atexit\(",
    "os.register_at_fork": r"register_at_fork\(",
    "signal.signal": r"signal\.signal\(",
    "signal.set_wakeup_fd": r"set_wakeup_fd\(",
    "sys.excepthook": r"sys\.excepthook = |, sys\.excepthook =",
}


def test_every_finalizer_and_exit_hook_is_in_the_table() -> None:
    """So that none is added without the rule in mind: no I/O, no waiting, no locks."""
    rows = re.findall(r"^\| `(trajstore\.[\w.]+)` \| ([^|]+) \|", section("Unclosed objects"), flags=re.M)
    listed = {(resolve(name), kind) for name, kinds in rows for kind in re.findall(r"`([^`]+)`", kinds)}
    listed = {(getattr(place, "__module__", None) or place.__name__, kind) for place, kind in listed}  # type: ignore[attr-defined]
    found = set()
    for path in modules():
        text = path.read_text("utf-8")
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        found |= {(module, kind) for kind, pattern in HOOKS.items() if re.search(pattern, text)}
    assert found == listed


def test_no_module_is_long() -> None:
    lengths = {str(p.relative_to(ROOT)): len(p.read_text("utf-8").splitlines()) for p in modules()}
    assert not {path: n for path, n in lengths.items() if n > MAX_LINES}


def test_no_class_has_many_methods() -> None:
    counts = {
        f"{path.relative_to(ROOT)}:{node.name}": sum(
            isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef)) for n in node.body
        )
        for path in modules()
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.ClassDef) and not node.name.endswith("Conformance")  # a suite of tests
    }
    assert not {name: n for name, n in counts.items() if n > MAX_METHODS}


def test_no_module_uses_private_names_of_another() -> None:
    assert not [use for path in modules() for use in private_accesses(path)]
