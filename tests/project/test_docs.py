"""README and docs: their Python runs, their links lead somewhere, and they name nobody's machine."""

from __future__ import annotations

import re
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
DOCS = [path for path in (README, *sorted((ROOT / "docs").rglob("*.md"))) if path.exists()]

NOT_RUN = "<!-- not run -->"
FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<code>.*?)^(?P=indent)```", re.M | re.S)
LINK = re.compile(r"\]\(\s*<?([^)\s>]+)|^\[[^\]\n]+\]:\s*(\S+)|(?:src|href)=\"([^\"]+)\"", re.M)
SCHEME = re.compile(r"[a-z][a-z0-9+.-]*:", re.I)
MACHINE = re.compile(r"(?<![\w~])/(?:home|root|Users|tmp|work|mnt|opt|private)/|\b[A-Z]:\\")

every_document = pytest.mark.parametrize("path", DOCS, ids=[str(path.relative_to(ROOT)) for path in DOCS])


@dataclass(frozen=True)
class Block:
    """A piece of Python in a document."""

    line: int  # of its first line of code, counted from 0
    code: str


def python_blocks(text: str) -> list[Block]:
    """The Python to run, in order; a block right after the comment `NOT_RUN` is left out."""
    return [
        Block(text.count("\n", 0, match.start("code")), textwrap.dedent(match["code"]))
        for match in FENCE.finditer(text)
        if match["language"] == "python" and not text[: match.start()].rstrip().endswith(NOT_RUN)
    ]


def run(text: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the blocks of a document one after the other, in one namespace."""
    module = ModuleType("document")
    monkeypatch.setitem(sys.modules, "document", module)  # for what looks its own module up, like dataclasses
    for block in python_blocks(text):
        # Padded, so that a traceback names the document's own line.
        exec(compile("\n" * block.line + block.code, name, "exec"), module.__dict__)


def relative_links(text: str) -> list[str]:
    prose = re.sub(r"`[^`\n]*`", "", FENCE.sub("", text))
    targets = [next(filter(None, match.groups())).partition("#")[0] for match in LINK.finditer(prose)]
    return [target for target in targets if target and not SCHEME.match(target)]


def lost_links(path: Path) -> list[str]:
    places = {link: (path.parent / link).resolve() for link in relative_links(path.read_text("utf-8"))}
    return [link for link, place in places.items() if not place.exists() or not place.is_relative_to(ROOT)]


@every_document
def test_the_python_of_a_document_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run(path.read_text("utf-8"), str(path), monkeypatch)


@every_document
def test_relative_links_lead_to_files_of_the_project(path: Path) -> None:
    assert lost_links(path) == []


@every_document
def test_a_document_names_no_place_on_anybodys_machine(path: Path) -> None:
    assert MACHINE.findall(path.read_text("utf-8")) == []


@every_document
def test_every_fence_is_closed(path: Path) -> None:
    assert "```" not in FENCE.sub("", path.read_text("utf-8"))


def test_the_readme_names_exactly_the_two_commands() -> None:
    named = set(re.findall(r"\bscripts/[\w.-]*\w", README.read_text("utf-8")))
    assert named == {"scripts/demo", "scripts/test"}


def test_the_two_commands_can_be_run() -> None:
    for name in ("demo", "test"):
        assert (ROOT / "scripts" / name).stat().st_mode & 0o111


EXAMPLE = f"""
```python
first = 1
```

{NOT_RUN}

```python
skipped = 2
```

1. A step
   ```python
   if first:
       second = first + 1
   ```

```bash
no python
```
"""


def test_blocks_run_in_order_in_one_namespace_but_for_those_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    run(EXAMPLE, "example.md", monkeypatch)
    assert sys.modules["document"].__dict__["second"] == 2
    assert "skipped" not in sys.modules["document"].__dict__


def test_a_failing_block_is_reported_at_its_line_of_the_document(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        run("# Title\n\n```python\nx = 1\nx / 0\n```\n", "example.md", monkeypatch)
    assert caught.traceback[-1].lineno == 4  # counted from 0


def test_links_in_code_and_to_elsewhere_are_not_followed() -> None:
    text = "[a](b.md#c) ![i](d/e.png) [f](https://x.org) [g](#h) `[j](k)`\n[l]: m.md\n```python\nn[0](o)\n```\n"
    assert relative_links(text) == ["b.md", "d/e.png", "m.md"]


def test_a_link_to_a_file_that_is_not_there_is_found(tmp_path: Path) -> None:
    document = tmp_path / "x.md"
    document.write_text("[gone](gone.md) [out](../..)")
    assert lost_links(document) == ["gone.md", "../.."]


@pytest.mark.parametrize("text", ["in /home/me/x", "file:///tmp/x", r"C:\Users\me"])
def test_places_on_a_machine_are_found(text: str) -> None:
    assert MACHINE.search(text)


@pytest.mark.parametrize("text", ["https://x.org/home/x", "s3://bucket/tmp/x", "runs/demo", "~/work/x"])
def test_urls_and_relative_paths_are_no_places_on_a_machine(text: str) -> None:
    assert not MACHINE.search(text)
