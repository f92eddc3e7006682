"""Nested structures of tensors as ALF has them: dicts, named tuples, dataclasses, lists; ``()`` holds nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from trajstore.errors import DataError


def flat(nest: Any, prefix: str = "") -> dict[str, Any]:
    """The leaves of a nest by path: ``{"time_step/reward": ...}``."""
    parts = _parts(nest)
    if parts is None:
        return {prefix[:-1]: nest}
    return {path: leaf for name, part in parts.items() for path, leaf in flat(part, f"{prefix}{name}/").items()}


def rebuilt(form: Any, leaf: Callable[[str], Any], prefix: str = "") -> Any:
    """A nest like ``form``, with the leaf that a function gives for each path."""
    parts = _parts(form)
    if parts is None:
        return leaf(prefix[:-1])
    return _like(form, {name: rebuilt(part, leaf, f"{prefix}{name}/") for name, part in parts.items()})


def mapped(nest: Any, function: Callable[[Any], Any]) -> Any:
    """A nest with what a function makes of each leaf."""
    leaves = flat(nest)
    return rebuilt(nest, lambda path: function(leaves[path]))


def part_of(nest: Any, path: str) -> Any:
    """What lies at a path, a leaf or a nest.

    Raises:
        KeyError: Nothing does.
    """
    for name in path.split("/"):
        parts = _parts(nest) or {}
        if name not in parts:
            raise KeyError(f"no field {path!r}; here there are {', '.join(parts) or 'none'}")
        nest = parts[name]
    return nest


def leaf_path(paths: Iterable[str], name: str) -> str | None:
    """The path of the leaf of this name that is nested least, as ``time_step/reward`` for ``reward``."""
    found = [path for path in paths if path.rpartition("/")[2] == name]
    return min(found, key=lambda path: path.count("/"), default=None)


def _parts(nest: Any) -> dict[str, Any] | None:
    """The parts of a nest by name; None of a leaf."""
    if isinstance(nest, Mapping):
        return dict(nest)
    if isinstance(nest, (tuple, list)):
        names = getattr(nest, "_fields", None) or [str(i) for i in range(len(nest))]
        return dict(zip(names, nest, strict=True))
    if dataclasses.is_dataclass(nest) and not hasattr(nest, "dtype"):  # a spec is a leaf, however it is made
        return {field.name: getattr(nest, field.name) for field in dataclasses.fields(nest)}
    if nest is None or isinstance(nest, type):
        raise DataError(f"expected nested tensors, got {nest!r}")
    return None


def _like(form: Any, parts: dict[str, Any]) -> Any:
    if isinstance(form, Mapping):
        return parts
    if dataclasses.is_dataclass(form):
        return dataclasses.replace(form, **parts)  # type: ignore[type-var]
    if hasattr(form, "_fields"):
        return type(form)(**parts)
    return type(form)(parts.values())
