"""The JSON that commands print is what docs/cli_json.md says."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_cli import ROOT, damage, root, run, template  # noqa: F401 - fixtures
from trajstore.cli.app import COMMANDS

TEXT = (ROOT / "docs" / "cli_json.md").read_text("utf-8")
SECTIONS = dict(re.findall(r"^## ([\w-]+)\n(.*?)(?=^## |\Z)", TEXT, re.M | re.S))
NAMED_BY_USERS = {
    *("ends", "episode_columns", "metadata", "left", "marks", "renamed", "lost_streams", "lost_checkpoints"),
}  # objects whose keys are ids and other names
DECLARED = {"success", "task"}  # columns of the episodes of this store


def keys(value: Any) -> Iterator[str]:
    """All keys of a document, at any depth."""
    if isinstance(value, list):
        for one in value:
            yield from keys(one)
    if isinstance(value, dict):
        for key, inner in value.items():
            yield key
            if key not in NAMED_BY_USERS:
                yield from keys(inner)


def words(text: str) -> set[str]:
    return {word for code in re.findall(r"`([^`\n]+)`", text) for word in re.findall(r"\w+", code)}


@pytest.mark.parametrize(
    "command",
    [
        "info STORE --sizes",
        "ls STORE --evicted",
        "show STORE 0",
        "tail STORE --once --disk",
        "checkpoints STORE",
        "verify STORE",
        "doctor STORE",
        "diff STORE COPY",
        "copy STORE NEW",
        "repair STORE NEW",
        "merge NEW STORE COPY",
        "split COPY NEW=0.5",
        "pack STORE --dry-run --chunk-bytes 4KiB",
        "evict COPY --steps 10",
        "prune COPY --name half --dry-run",
    ],
)
def test_every_key_is_documented(command: str, root: Path, template: Path, tmp_path: Path) -> None:  # noqa: F811
    name = command.split()[0]
    damage(root)
    places = {"STORE": root, "COPY": template, "NEW": tmp_path / "new"}
    arguments = [re.sub("STORE|COPY|NEW", lambda match: str(places[match[0]]), one) for one in command.split()]
    result = run(*arguments, "--json")
    document = json.loads(result.stdout)  # one document and nothing else
    section = SECTIONS[name] + ("`row`" if name == "ls" else "") + (SECTIONS["ls"] if name == "show" else "")
    section += SECTIONS["checkpoints"] if name == "info" else ""
    assert {*keys(document)} - words(section) - DECLARED == set()
    first_cells = "".join(re.findall(r"^\| ([^|]*) \|", SECTIONS[name], re.M))
    assert words(first_cells) - {*document} <= {"traffic", "frames", "success"}


def test_every_command_has_its_documents_described() -> None:
    others = words(SECTIONS["Others"])
    for name in COMMANDS:
        assert name in SECTIONS or {*name.split("-")} <= others, name
