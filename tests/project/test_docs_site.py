"""The documentation site is built without a warning, loads nothing from elsewhere, and shows everything."""

from __future__ import annotations

import html
import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import trajstore

pytest.importorskip("mkdocs")
pytest.importorskip("material")
pytest.importorskip("mkdocstrings")

from scripts import docs_site
from tests.project.test_public_names import WITH_NAMES

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
CODE = re.compile(r"<(pre|code|script|style|svg)\b.*?</\1>", re.S)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site. With ``--quiet``, mkdocs would see no warnings, and ``--strict`` would mean nothing."""
    directory = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(directory)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    return directory


def read(site: Path, page: str) -> str:
    return (site / page / "index.html").read_text("utf-8")


def pages(site: Path) -> dict[str, str]:
    return {str(path.relative_to(site)): path.read_text("utf-8") for path in sorted(site.rglob("*.html"))}


def test_every_page_of_the_docs_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text("utf-8").partition("\nnav:")[2]
    named = set(re.findall(r"[\w/]+\.md", navigation))
    documents = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    unnamed = {name for name in documents - named if not re.match(r"decisions/\d", name)}
    assert not unnamed, "add these to nav in mkdocs.yml"


def test_a_page_loads_nothing_from_elsewhere(site: Path) -> None:
    loads = re.compile(r"<(?:script|img|iframe|source|link)\b[^>]*?\b(?:src|href)=\"?((?:https?:)?//[^\s\">]+)")
    for name, text in pages(site).items():
        assert loads.findall(text) == [], name
    for path in (*site.rglob("*.css"), *site.rglob("*.js")):
        text = path.read_text("utf-8")
        assert re.findall(r"@import[^;]*//|url\(\"?(?:https?:)?//", text) == [], path


def test_no_markdown_is_left_in_a_page(site: Path) -> None:
    for name, text in pages(site).items():
        prose = html.unescape(re.sub(r"<[^>]+>", "", CODE.sub("", text)))
        assert "```" not in prose, name
        assert ":::" not in prose, name
        assert not re.search(r"^\s*\|[ -]*\|", prose, re.M), name
        assert not re.search(r"<p>(?:[^<]|<(?!/p>))*?\n[-*] ", text), name
        assert not re.search(r"\]\([\w./#-]+\)", prose), name


def test_the_reference_of_the_command_line_has_every_command(site: Path) -> None:
    import typer.main

    from trajstore.cli.app import app

    text = read(site, "reference/cli")
    for name, command in typer.main.get_command(app()).commands.items():  # type: ignore[attr-defined]
        names = [f"{name} {below}" for below in getattr(command, "commands", {})] or [name]
        for one in names:
            assert f"trajstore {one} [OPTIONS]" in html.unescape(text), one
    assert "<code>--storage-option KEY=VALUE</code>" in text


def test_the_reference_of_python_has_every_public_name_with_its_types(site: Path) -> None:
    text = "".join(read(site, f"reference/{name}") for name in (*docs_site.API, "errors"))
    for name in trajstore.__all__:
        assert f'id="trajstore.{name}"' in text, name
    for package in WITH_NAMES:
        for name in importlib.import_module(package).__all__:
            assert f'id="{package}.{name}"' in text, f"{package}.{name}"
    for name in ("ReplayBuffer.append", "Snapshot.read_episode", "plot.overview", "logging.flatten"):
        assert f'id="trajstore.{name}"' in text, name
    assert re.search(r"buffer_bytes.*?int.*?str", text, re.S)


def test_pictures_are_in_their_page_and_described(site: Path) -> None:
    text = read(site, "concepts")
    names = re.findall(r"\(pictures/(.*?\.svg)\)", (DOCS / "concepts.md").read_text("utf-8"))
    assert len(names) == text.count('<svg class="picture"') == text.count("<desc>") >= 3
    assert sorted(names) == sorted(path.name for path in (DOCS / "pictures").glob("*.svg"))


def test_examples_and_notebooks_can_be_read_on_the_site(site: Path) -> None:
    assert 'href="td3_vector.py"' in read(site, "examples")
    assert (site / "examples/td3_vector.py").read_text() == (ROOT / "examples/td3_vector.py").read_text()
    for path in docs_site.notebooks():
        page = read(site, f"notebooks/{path.stem}")
        assert "<code>" in page
        assert 'src="data:image/png' in page
        assert f'href="{path.stem}/"' in read(site, "notebooks").replace("../notebooks/", "")
        assert "data:image" not in (site / f"notebooks/{path.stem}.md").read_text("utf-8")


def test_llms_txt_lists_pages_that_exist(site: Path) -> None:
    text = (site / "llms.txt").read_text("utf-8")
    listed = re.findall(r"^- \[[^\]]+\]\(([^)]+)\)", text, re.M)
    assert text.startswith("# trajstore\n\n> ")
    assert len(listed) > 30
    assert [name for name in listed if not (site / name).is_file()] == []
    assert "replay.md" in listed
    assert (site / "replay.md").read_text("utf-8") in (site / "llms-full.txt").read_text("utf-8")


# ---- what the hooks do


@pytest.mark.parametrize(
    ("link", "page", "turned"),
    [
        ("docs/replay.md#statistics", "index.md", "replay.md#statistics"),
        ("CHANGELOG.md", "index.md", "changelog.md"),
        ("../README.md#more", "lerobot.md", "index.md#more"),
        ("../examples/td3_vector.py", "cleanrl.md", "examples/td3_vector.py"),
        ("../notebooks/1_quickstart.ipynb", "reading.md", "notebooks/1_quickstart.md"),
        ("td3_vector.py", "examples/index.md", "td3_vector.py"),
        ("../format.md", "decisions/017-marks-of-a-stream.md", "../format.md"),
        ("001-one-stream-per-writer.md", "decisions/README.md", "001-one-stream-per-writer.md"),
        ("../docs/reading.md", "notebooks/1_quickstart.md", "../reading.md"),
        ("1_quickstart.ipynb", "notebooks/index.md", "1_quickstart.md"),
        ("#here", "index.md", "#here"),
        ("https://x.org/README.md", "index.md", "https://x.org/README.md"),
    ],
)
def test_a_link_of_the_forge_becomes_one_of_the_site(link: str, page: str, turned: str) -> None:
    assert docs_site.turned_link(link, page) == turned


def test_a_list_gets_the_blank_line_that_it_needs_but_code_is_left_alone() -> None:
    fence = "```\nx\n- y\n```\n"
    assert docs_site.outside_code(f"A\n- b\n- c\n{fence}", docs_site.with_blank_lines) == f"A\n\n- b\n- c\n{fence}"


def test_a_notebook_becomes_a_page_with_its_outputs(tmp_path: Path) -> None:
    outputs = '[{"output_type": "stream", "text": ["1\\n"]}, {"data": {"image/png": "iVBO"}, "output_type": "x"}]'
    code = f'{{"cell_type": "code", "source": ["print(1)"], "outputs": {outputs}}}'
    path = tmp_path / "a.ipynb"
    path.write_text(f'{{"cells": [{{"cell_type": "markdown", "source": ["# A\\n", "b"]}}, {code}]}}')
    page = docs_site.notebook_page(path)
    assert page.startswith("# A\nb\n\n```python\nprint(1)\n```\n\n```text\n1\n```\n\n<img")
    assert docs_site.notebook_page(path, is_rich=False) == "# A\nb\n\n```python\nprint(1)\n```\n\n```text\n1\n```\n"


def test_a_table_of_a_notebook_is_a_table_on_the_page_and_text_for_language_models(tmp_path: Path) -> None:
    data = {"text/html": ["<table>\n", "\n", "</table>"], "text/plain": ["a  b"]}
    cell = {"cell_type": "code", "source": ["table"], "outputs": [{"output_type": "execute_result", "data": data}]}
    path = tmp_path / "a.ipynb"
    path.write_text(json.dumps({"cells": [cell]}))
    assert '<div class="output"><table>\n</table></div>' in docs_site.notebook_page(path)
    assert "```text\na  b\n```" in docs_site.notebook_page(path, is_rich=False)
