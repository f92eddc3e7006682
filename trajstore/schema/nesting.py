"""Nested mappings of fields to and from flat ones whose keys are paths such as ``"observation/state"``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from trajstore.errors import DataError, SchemaError

_OBSERVATION_NAMES = frozenset({"observation", "observations", "obs"})


def nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Turn ``{"a/b": x}`` into ``{"a": {"b": x}}``.

    Raises:
        SchemaError: A path is both a field and a group.
    """
    nested: dict[str, Any] = {}
    for path, value in flat.items():
        if "/" not in path and path not in nested:
            nested[path] = value
            continue
        *groups, leaf = path.split("/")
        node = nested
        for group in groups:
            node = node.setdefault(group, {})
            if not isinstance(node, dict):
                raise SchemaError(f"'{path}' is inside '{group}', which is a field")
        if leaf in node:
            raise SchemaError(f"'{path}' is both a field and a group")
        node[leaf] = value
    return nested


def flatten(data: Any, prefix: str = "", into: dict[str, Any] | None = None) -> dict[str, Any]:
    """Turn nested mappings (dicts, TensorDicts) into ``{"a/b": value}``, in order.

    Args:
        data: The nested mapping.
        prefix: What all paths begin with.
        into: A mapping to add to; a new one by default.

    Raises:
        DataError: The data is not a mapping, or a name is not a string without ``/``.
    """
    if not hasattr(data, "items"):
        raise DataError(f"expected a mapping of field names to values, got {type(data).__name__}")
    flat: dict[str, Any] = {} if into is None else into
    for name, value in data.items():
        if not isinstance(name, str) or "/" in name:
            within = f" in '{prefix}'" if prefix else ""
            raise DataError(f"field name {name!r}{within}: expected a string without '/'")
        # A TensorDict is a mapping with a dtype; a pandas column has items and a dtype but is no mapping.
        if hasattr(value, "items") and (isinstance(value, Mapping) or not hasattr(value, "dtype")):
            flatten(value, f"{prefix}{name}/", flat)
        else:
            flat[prefix + name] = value
    return flat


def check_paths(expected: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Refuse missing and extra fields.

    Raises:
        DataError: Fields are missing or unexpected; the message names them.
    """
    if expected.keys() == given.keys():
        return
    missing = [p for p in expected if p not in given]
    extra = [p for p in given if p not in expected]
    way = "" if missing else "; to add a field to a store, give a schema that declares it as Field(..., fill=...)"
    raise DataError(
        f"fields: {'missing ' + ', '.join(map(repr, missing)) if missing else ''}"
        f"{'; ' if missing and extra else ''}{'unexpected ' + ', '.join(map(repr, extra)) if extra else ''};"
        f" the schema has {', '.join(map(repr, expected))}{way}"
    )


def observation_paths(paths: Iterable[str]) -> list[str]:
    """The paths that name observations: ``observation``, ``observations`` or ``obs``, and all fields inside them.

    >>> observation_paths(["obs", "action", "arm/observation/state", "obs_noise"])
    ['obs', 'arm/observation/state']
    """
    return [path for path in paths if not _OBSERVATION_NAMES.isdisjoint(path.split("/"))]
