"""Nests (ALF's nested structures of tensors) as leaves by path, and back.

A nest consists of dicts, named tuples, dataclasses and lists; ``()`` is an empty nest.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from trajstore.errors import DataError


def leaves_by_path(nest: Any, prefix: str = "") -> dict[str, Any]:
    """Return the leaves of a nest by path: ``{"time_step/reward": ...}``."""
    parts = _parts(nest)
    if parts is None:
        return {prefix[:-1]: nest}
    return {
        path: leaf
        for name, part in parts.items()
        for path, leaf in leaves_by_path(part, f"{prefix}{name}/").items()
    }


def rebuild_nest(form: Any, leaf_at: Callable[[str], Any], prefix: str = "") -> Any:
    """Return a nest structured like ``form``, whose leaf at each path is ``leaf_at(path)``."""
    parts = _parts(form)
    if parts is None:
        return leaf_at(prefix[:-1])
    return _like(form, {name: rebuild_nest(part, leaf_at, f"{prefix}{name}/") for name, part in parts.items()})


def map_leaves(nest: Any, function: Callable[[Any], Any]) -> Any:
    """Return a nest of the same structure with ``function`` applied to each leaf."""
    leaves = leaves_by_path(nest)
    return rebuild_nest(nest, lambda path: function(leaves[path]))


def nest_of_paths(nest: Any) -> Any:
    """Return a nest of the same structure whose leaves are their own paths."""
    return rebuild_nest(nest, lambda path: path)


def part_at(nest: Any, path: str) -> Any:
    """Return the leaf or nest at a path; the empty path is the whole nest.

    A name may also be a property of a named tuple or dataclass: ALF's experience has the fields of its time step.

    Raises:
        KeyError: The nest has no such path.
    """
    for name in path.split("/") if path else ():
        parts = _parts(nest) or {}
        if name in parts:
            nest = parts[name]
        elif isinstance(getattr(type(nest), name, None), property):
            nest = getattr(nest, name)
        else:
            raise KeyError(f"no field {path!r}; the fields at this level are {', '.join(parts) or 'none'}")
    return nest


def shallowest_path(paths: Iterable[str], name: str) -> str | None:
    """Return the least nested path whose last part is ``name``: ``time_step/reward`` for ``reward``."""
    found = [path for path in paths if path.rpartition("/")[2] == name]
    return min(found, key=lambda path: path.count("/"), default=None)


def _parts(nest: Any) -> dict[str, Any] | None:
    """Return the parts of a nest by name, or None for a leaf."""
    if isinstance(nest, Mapping):
        return dict(nest)
    if isinstance(nest, (tuple, list)):
        names = getattr(nest, "_fields", None) or [str(i) for i in range(len(nest))]
        return dict(zip(names, nest, strict=True))
    if dataclasses.is_dataclass(nest) and not hasattr(nest, "dtype"):  # a spec is a leaf, even as a dataclass
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
