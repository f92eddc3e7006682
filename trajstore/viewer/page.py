"""The HTML page: one document with its styles and scripts inside, which loads nothing from anywhere."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

_SCRIPTS = (
    "dom.js",
    "formats.js",
    "source.js",
    "axes.js",
    "charts.js",
    "history_graph.js",
    "overview.js",
    "episodes.js",
    "frames.js",
    "episode.js",
    "app.js",
)
_STYLES = ("style.css",)


@dataclass(frozen=True, slots=True)
class Page:
    """A document and the Content-Security-Policy under which it runs.

    Attributes:
        html: The document.
        policy: Allows its own styles and scripts by their hashes, and nothing else.
    """

    html: bytes
    policy: str


@cache
def live_page() -> Page:
    """The page that asks a server."""
    policy = _policy(connect="'self'")
    return Page(_document("").encode(), policy)


def exported_page(data: dict[str, Any]) -> bytes:
    """The page that holds what it shows.

    Args:
        data: The answers that it has, in JSON values.
    """
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    # Nothing in a script element ends it but "</script"; and no "<!--" may begin in it.
    text = text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    policy = f'<meta http-equiv="Content-Security-Policy" content="{_policy(connect="")}">'
    return _document(f'<script type="application/json" id="data">{text}</script>', policy).encode()


def _policy(*, connect: str) -> str:
    rules = {
        "default-src": "'none'",
        "script-src": _hashes(_scripts()),
        "style-src": _hashes(_styles()),
        "img-src": "blob: data:",
        "connect-src": connect or "'none'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "require-trusted-types-for": "'script'",
    }
    if connect:
        rules["frame-ancestors"] = "'none'"  # has no effect in a document
    return "; ".join(f"{name} {value}" for name, value in rules.items())


def _hashes(parts: Sequence[str]) -> str:
    digests = (base64.b64encode(hashlib.sha256(part.encode()).digest()).decode() for part in parts)
    return " ".join(f"'sha256-{digest}'" for digest in digests)


@cache
def _scripts() -> tuple[str, ...]:
    return tuple(_asset(name) for name in _SCRIPTS)


@cache
def _styles() -> tuple[str, ...]:
    return tuple(_asset(name) for name in _STYLES)


def _asset(name: str) -> str:
    return files("trajstore.viewer").joinpath("assets", name).read_text("utf-8")


def _document(data: str, policy: str = "") -> str:
    styles = "".join(f"<style>{style}</style>" for style in _styles())
    scripts = "".join(f"<script>{script}</script>" for script in _scripts())
    page = _asset("page.html")
    for mark, text in (("policy", policy), ("styles", styles), ("data", data), ("scripts", scripts)):
        page = page.replace(f"<!-- {mark} -->", text, 1)
    return page
