"""The spaces of a Minari dataset, as the JSON that it keeps of them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from trajstore.errors import DataError, FormatError
from trajstore.schema import Array, check_name, nest

_MAX_DEPTH = 16
_MIN_IMAGE = 32  # smaller ones are not encoded


@dataclass(frozen=True, slots=True)
class Part:
    """A space that holds values: those that are made of others are taken apart.

    Attributes:
        names: What leads to it: the keys of Dict spaces, and the places in Tuple spaces.
        space: Its JSON.
    """

    names: tuple[str | int, ...]
    space: Mapping[str, Any]

    @property
    def shape(self) -> tuple[int, ...] | None:
        """Of one value; None where the space does not say."""
        kind = self.space["type"]
        if kind == "Box":
            return tuple(self.space["shape"])
        if kind == "MultiBinary":
            n = self.space["n"]
            return tuple(n) if isinstance(n, list) else (n,)
        if kind == "MultiDiscrete":
            return tuple(np.shape(self.space["nvec"]))
        return () if kind == "Discrete" else None

    @property
    def is_image(self) -> bool:
        """Whether Minari stores its values as JPEG, if it was asked to."""
        shape = self.space.get("shape", ())
        return (
            self.space["type"] == "Box"
            and self.space["dtype"] == "uint8"
            and len(shape) in (2, 3)
            and min(shape[:2]) >= _MIN_IMAGE
            and not np.any(self.space["low"])
            and bool(np.all(np.equal(self.space["high"], 255)))
        )

    def path(self, head: str, place: str = "{}") -> str:
        """Names joined with ``/``; places in tuples are written as ``place`` says."""
        return "/".join([head, *(place.format(n) if isinstance(n, int) else n for n in self.names)])


def parse(text: object, what: str) -> list[Part]:
    """The parts of a space.

    Raises:
        FormatError: It is none.
    """
    try:
        return list(_parts(json.loads(text) if isinstance(text, str) else None, ()))
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise FormatError(f"{what}: expected a space as Minari writes it, got {text!r:.80}: {error!r}") from error


def _parts(space: Any, names: tuple[str | int, ...]) -> Iterator[Part]:
    if len(names) > _MAX_DEPTH:
        raise ValueError(f"nested deeper than {_MAX_DEPTH} levels")
    below = space.get("subspaces")
    if space["type"] == "Dict":
        for name, child in below.items():
            yield from _parts(child, (*names, check_name(name, "name in a space")))
    elif space["type"] == "Tuple":
        for i, child in enumerate(below):
            yield from _parts(child, (*names, i))
    else:
        yield Part(names, space)


def derived(arrays: Mapping[str, Array], head: str) -> str:
    """The widest space that holds the values of a field, or of a group of fields, as JSON."""
    found = nest(arrays).get(head)
    if found is None:
        raise DataError(f"there is no field '{head}', and none below it; say what takes its place")
    return json.dumps(_space(found))


def _space(node: Any) -> dict[str, Any]:
    if not isinstance(node, Mapping):
        return _box(node)
    if list(node) == [str(i) for i in range(len(node))]:
        return {"type": "Tuple", "subspaces": [_space(child) for child in node.values()]}
    return {"type": "Dict", "subspaces": {name: _space(child) for name, child in node.items()}}


def _box(rows: Array) -> dict[str, Any]:
    dtype, shape = rows.dtype, rows.shape[1:]
    if dtype.kind == "f":
        low, high = -np.inf, np.inf
    else:
        low, high = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    bounds = {name: np.full(shape, value, dtype).tolist() for name, value in (("low", low), ("high", high))}
    return {"type": "Box", "dtype": dtype.name, "shape": list(shape), **bounds}
