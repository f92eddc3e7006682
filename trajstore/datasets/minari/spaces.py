"""Parse the spaces that a Minari dataset stores as JSON, and create spaces for fields."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from trajstore.errors import DataError, FormatError
from trajstore.schema import Array, check_name, nest

_MAX_DEPTH = 16
_MIN_IMAGE_SIZE = 32  # pixels; Minari does not encode smaller images


@dataclass(frozen=True, slots=True)
class SpaceLeaf:
    """A space of values, inside the Dict and Tuple spaces that contain it.

    Attributes:
        names: The keys of Dict spaces and positions in Tuple spaces that lead to it.
        space: Its JSON.
    """

    names: tuple[str | int, ...]
    space: Mapping[str, Any]

    @property
    def shape(self) -> tuple[int, ...] | None:
        """Shape of one value; None if the space does not state it."""
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
        """Whether Minari stores its values as JPEG in a dataset with JPEG encoding."""
        shape = self.space.get("shape", ())
        return (
            self.space["type"] == "Box"
            and self.space["dtype"] == "uint8"
            and len(shape) in (2, 3)
            and min(shape[:2]) >= _MIN_IMAGE_SIZE
            and not np.any(self.space["low"])
            and bool(np.all(np.equal(self.space["high"], 255)))
        )

    def path(self, head: str, tuple_item: str = "{}") -> str:
        """Join the names with ``/``. ``tuple_item`` formats positions in Tuple spaces."""
        return "/".join([head, *(tuple_item.format(n) if isinstance(n, int) else n for n in self.names)])


def parse_space(text: object, what: str) -> list[SpaceLeaf]:
    """Return the leaves of a space.

    Raises:
        FormatError: The text is not a space.
    """
    try:
        return list(_leaves(json.loads(text) if isinstance(text, str) else None, ()))
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise FormatError(f"{what}: expected a space as Minari writes it, got {text!r:.80}: {error!r}") from error


def _leaves(space: Any, names: tuple[str | int, ...]) -> Iterator[SpaceLeaf]:
    if len(names) > _MAX_DEPTH:
        raise ValueError(f"nested deeper than {_MAX_DEPTH} levels")
    below = space.get("subspaces")
    if space["type"] == "Dict":
        for name, child in below.items():
            yield from _leaves(child, (*names, check_name(name, "name in a space")))
    elif space["type"] == "Tuple":
        for i, child in enumerate(below):
            yield from _leaves(child, (*names, i))
    else:
        yield SpaceLeaf(names, space)


def widest_space(arrays: Mapping[str, Array], head: str) -> str:
    """Return, as JSON, the widest space that holds the values of a field or of a group of fields."""
    found = nest(arrays).get(head)
    if found is None:
        raise DataError(f"field '{head}' is missing, and no group has that name")
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
