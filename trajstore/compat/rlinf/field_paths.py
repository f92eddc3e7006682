"""Nested dicts with arbitrary names as leaves by field path, and back.

Characters that a field path cannot contain are escaped: the name ``observation/image`` becomes
``observation.2f.image``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from trajstore.errors import DataError

_TO_ESCAPE = re.compile(r"[^A-Za-z0-9_-]")
_ESCAPED = re.compile(r"\.([0-9a-f]+)\.")
_BEGIN, _END = "_..", "_"  # around a name that a path could not begin or end with; other names never begin so


def to_paths(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the leaves of nested dicts by field path.

    Raises:
        DataError: A name is not a string.
    """
    found: dict[str, Any] = {}
    for name, value in tree.items():
        if not isinstance(name, str):
            raise DataError(f"name {name!r} in '{prefix}': expected a string")
        path = prefix + _escape(name)
        found |= to_paths(value, f"{path}/") if isinstance(value, Mapping) else {path: value}
    return found


def from_paths(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Undo `to_paths`."""
    tree: dict[str, Any] = {}
    for path, value in leaves.items():
        *groups, name = map(_unescape, path.split("/"))
        node = tree
        for group in groups:
            node = node.setdefault(group, {})
        node[name] = value
    return tree


def unescape_names(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested dicts with their original names, given nested dicts with the escaped names of a store."""
    return {
        _unescape(name): unescape_names(value) if isinstance(value, Mapping) else value
        for name, value in tree.items()
    }


def _escape(name: str) -> str:
    text = _TO_ESCAPE.sub(lambda match: f".{ord(match[0]):x}.", name)
    is_refused = text.startswith((".", "-", "__")) or text.endswith(".")
    return f"{_BEGIN}{text}{_END}" if is_refused else text


def _unescape(name: str) -> str:
    text = name[len(_BEGIN) : -len(_END)] if name.startswith(_BEGIN) else name
    return _ESCAPED.sub(lambda match: chr(int(match[1], 16)), text) if "." in text else text
