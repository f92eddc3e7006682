"""Nested dicts under any names, as paths that a store takes: ``observation/image`` is ``observation.2f.image``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from trajstore.errors import DataError

_ODD = re.compile(r"[^A-Za-z0-9_-]")
_ESCAPED = re.compile(r"\.([0-9a-f]+)\.")
_BEGIN, _END = "_..", "_"  # around a name that paths could not begin or end with; no other begins so


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The leaves of nested dicts by path; characters that paths do not have are written as their number."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        if not isinstance(name, str):
            raise DataError(f"name {name!r} in '{prefix}': expected a string")
        path = prefix + _written(name)
        found |= flat(value, f"{path}/") if isinstance(value, Mapping) else {path: value}
    return found


def nested(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """What `flat` was made from."""
    tree: dict[str, Any] = {}
    for path, value in leaves.items():
        *groups, name = map(_shown, path.split("/"))
        node = tree
        for group in groups:
            node = node.setdefault(group, {})
        node[name] = value
    return tree


def shown(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Nested dicts of a store, under the names that they had."""
    return {_shown(name): shown(value) if isinstance(value, Mapping) else value for name, value in tree.items()}


def _written(name: str) -> str:
    text = _ODD.sub(lambda match: f".{ord(match[0]):x}.", name)
    is_refused = text.startswith((".", "-", "__")) or text.endswith(".")
    return f"{_BEGIN}{text}{_END}" if is_refused else text


def _shown(name: str) -> str:
    text = name[len(_BEGIN) : -len(_END)] if name.startswith(_BEGIN) else name
    return _ESCAPED.sub(lambda match: chr(int(match[1], 16)), text) if "." in text else text
