"""TorchRL's data (TensorDicts, tensors, trees of tensors) as named fields of a store, and back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDict, is_tensor_collection
from tensordict.utils import is_non_tensor, unravel_key

from trajstore.compat.torchrl.non_tensor import EMPTY, JSON, MARKERS, encode, widen
from trajstore.errors import DataError, SchemaError
from trajstore.schema import Field, Schema, nest

# The field with a row's slot, the cursor, the epoch (how often the storage was emptied), and the number of slots.
HEADER = "slot"
_HEADER_FIELD = Field("int64", (4,))
_TENSOR, _TREE, TENSORDICT = "tensor", "tree", "td"
_RAGGED = "the fields of a store have fixed shapes: pad the rows, or use TorchRL's LazyStackStorage"

Leaves = dict[str, torch.Tensor]


@dataclass(frozen=True)
class RowStructure:
    """The fields of a row, whose names also say how the fields are nested.

    ``tensor`` is a single tensor, ``td<n>/...`` a TensorDict with n batch dimensions, and ``tree/...`` a tree of
    tuples (``t.0``), lists (``l.0``) and dicts (``m.key``) of tensors. In a TensorDict, text and JSON values and
    TensorDicts without keys are fields whose last name is a marker; see `non_tensor`.
    """

    fields: Mapping[str, Field]

    @classmethod
    def of(cls, rows: Leaves) -> RowStructure:
        """Return the structure of rows, given by field, ``[n, ...]`` each."""
        return cls({path: _field(leaf) for path, leaf in rows.items()})

    @classmethod
    def of_store(cls, schema: Schema | None) -> RowStructure | None:
        """Return the structure of the rows of a store; None while the store has no schema.

        Raises:
            SchemaError: The store was not written by a `TrajStorage`.
        """
        if schema is None:
            return None
        fields = {path: field for path, field in schema.fields.items() if path != HEADER}
        root = next(iter(fields), "").split("/")[0]
        if schema.fields.get(HEADER) != _HEADER_FIELD or not root.startswith((_TENSOR, _TREE, TENSORDICT)):
            raise SchemaError(
                f"expected a store that TrajStorage has written, found one with fields {list(fields)}"
            )
        return cls(fields)

    @property
    def schema(self) -> Schema:
        return Schema({HEADER: _HEADER_FIELD, **nest(self.fields)})

    @property
    def row_bytes(self) -> int:
        return sum(field.row_bytes for field in self.fields.values())

    def lanes(self, ndim: int) -> torch.Size:
        """Return the leading dimensions that the fields of a row share, if a storage has ``ndim`` dimensions.

        The dimension of the slots is counted in ``ndim`` and is not part of the result.

        Raises:
            DataError: The fields do not share them.
        """
        shapes = {torch.Size(field.shape[: ndim - 1]) for field in self.fields.values()}
        if len(shapes) > 1 or len(lanes := shapes.pop()) < ndim - 1:
            raise DataError(f"ndim={ndim}: expected fields that share their first {ndim} dimensions")
        return lanes

    def with_fields(self, other: RowStructure) -> RowStructure:
        """Return a structure with the fields of both; for common names, with the fields of this one."""
        return RowStructure({**other.fields, **self.fields})

    @cached_property
    def marked(self) -> list[tuple[str, ...]]:
        """The keys of fields that are not tensors of the user; the last name of each is a marker."""
        return marked_keys(self.fields)

    def fitted(self, rows: Leaves) -> tuple[RowStructure, Leaves]:
        """Return rows whose text has the width of its field, and a structure that is wide enough for it."""
        texts = [path for path in rows if path.endswith(f"/{JSON}") and path in self.fields]
        if not texts:
            return self, rows
        widths = {path: max(rows[path].shape[-1], self.fields[path].shape[-1]) for path in texts}
        wider = {
            path: Field("uint8", (*self.fields[path].shape[:-1], width))
            for path, width in widths.items()
            if width > self.fields[path].shape[-1]
        }
        structure = RowStructure({**self.fields, **wider}) if wider else self
        return structure, rows | {path: widen(rows[path], width) for path, width in widths.items()}

    def path(self, key: Any) -> str:
        """Return the field of a key of a TensorDict."""
        root = next(iter(self.fields)).split("/")[0]
        parts = unravel_key(key)
        return "/".join([root, parts] if isinstance(parts, str) else [root, *parts])

    def check_known(self, rows: Leaves) -> None:
        """Check that rows have no new fields.

        Raises:
            DataError: A field is new.
        """
        if new := [path for path in rows if path not in self.fields]:
            raise DataError(
                f"expected the fields of earlier rows, {describe_field(new[0])} is new; to add it, write all rows"
                " again: buffer[:] = data"
            )

    def check(self, rows: Leaves) -> None:
        """Check that rows have exactly these fields, with their dtypes and shapes.

        Raises:
            DataError: A field is missing or differs.
        """
        if missing := [path for path in self.fields if path not in rows]:
            raise DataError(f"expected the fields of earlier rows, {describe_field(missing[0])} is missing")
        for path, leaf in rows.items():
            field = self.fields[path]
            if leaf.shape[1:] != field.shape or leaf.dtype != torch_dtype(field):
                expected, got = (
                    f"{field.dtype} of shape {field.shape}",
                    f"{leaf.dtype} of shape {tuple(leaf.shape[1:])}",
                )
                raise DataError(f"{describe_field(path)}: expected {expected} as before, got {got}")


def _field(rows: torch.Tensor) -> Field:
    return Field(str(rows.dtype).removeprefix("torch."), tuple(rows.shape[1:]))


def marked_keys(paths: Iterable[str]) -> list[tuple[str, ...]]:
    """Return the keys of those fields whose last name is a marker."""
    keys = (tuple(path.split("/")[1:]) for path in paths if path.endswith(MARKERS))
    return [key for key in keys if key and key[-1] in MARKERS]


def describe_field(path: str) -> str:
    """Return how an error names a field: by the name that the user knows."""
    for marker in MARKERS:
        path = path.removesuffix(f"/{marker}")
    return f"field {path.partition('/')[2] or path!r}"


def to_leaves(data: Any) -> Leaves:
    """Return the tensors of some rows by field, detached.

    Raises:
        DataError: The data contains no tensor, or a value that cannot be stored, or rows of different shapes.
    """
    if isinstance(data, torch.Tensor):
        return dict(_walk(data, _TENSOR))
    is_collection = is_tensor_collection(data)
    root = f"{TENSORDICT}{data.batch_dims}" if is_collection else _TREE
    leaves = dict(_walk(data, root))
    if not leaves:
        raise DataError(f"expected tensors, got {type(data).__name__} without any")
    return leaves


def _walk(node: Any, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(node, torch.Tensor):
        if node.is_nested:
            raise DataError(f"{describe_field(path)}: expected rows of one shape, got a nested tensor; {_RAGGED}")
        yield path, node.detach()
        return
    is_collection = path.startswith(TENSORDICT) and is_tensor_collection(node)
    if is_collection and is_non_tensor(node):
        yield f"{path}/{JSON}", encode(node, describe_field(path))
        return
    children = list(_children(node, path, is_collection=is_collection))
    for name, child in children:
        if "/" in name or name in MARKERS:
            raise DataError(f"{describe_field(path)}: expected keys without '/', and not {MARKERS}, got {name!r}")
        yield from _walk(child, f"{path}/{name}")
    if is_collection and not children:
        yield f"{path}/{EMPTY}", torch.zeros(node.batch_size, dtype=torch.uint8)


def _children(node: Any, path: str, *, is_collection: bool) -> Iterator[tuple[str, Any]]:
    if is_collection:
        items = _lazy_items(node, path) if isinstance(node, LazyStackedTensorDict) else node.items()
        yield from ((str(key), child) for key, child in items)
    elif isinstance(node, dict):
        yield from ((f"m.{key}", child) for key, child in node.items())
    elif isinstance(node, (tuple, list)):
        yield from ((f"{type(node).__name__[0]}.{i}", child) for i, child in enumerate(node))
    else:
        raise DataError(
            f"{describe_field(path)}: expected a tensor, got {type(node).__name__}; text and JSON values are stored"
            " in TensorDicts"
        )


def _lazy_items(node: LazyStackedTensorDict, path: str) -> Iterator[tuple[str, Any]]:
    """Yield the items of a lazy stack; refuse keys that only some rows have, which it would not show."""
    everywhere = set(node.keys())
    for part in node.tensordicts:
        if odd := next((key for key in part.keys() if key not in everywhere), None):  # noqa: SIM118 - a TensorDict
            name = describe_field(f"{path}/{odd}")
            raise DataError(f"{name}: expected in all rows, only some have it; {_RAGGED}")
    for key in node.keys():  # noqa: SIM118
        try:
            yield key, node.get(key)
        except RuntimeError as error:
            raise DataError(
                f"{describe_field(f'{path}/{key}')}: expected rows of one shape, got several; {_RAGGED}"
            ) from error


def from_leaves(leaves: Mapping[str, torch.Tensor]) -> Any:
    """Return the TensorDict, tensor or tree that these fields belong to."""
    root = next(iter(leaves)).split("/")[0]
    if root == _TENSOR:
        return leaves[_TENSOR]
    nested = nest(leaves)[root]
    if root == _TREE:
        return _tree(nested)
    n = int(root.removeprefix(TENSORDICT))
    first = next(iter(leaves.values()))
    return TensorDict(nested, batch_size=first.shape[:n], device=first.device)


def _tree(node: Any) -> Any:
    if not isinstance(node, dict):
        return node
    container = next(iter(node))[0]
    children = {name[2:]: _tree(child) for name, child in node.items()}
    if container == "m":
        return children
    ordered = [children[str(i)] for i in range(len(children))]
    return tuple(ordered) if container == "t" else ordered


def stack_items(items: list[Any]) -> Any:
    """Return rows from a list of single items; TorchRL takes each item of a list as one row.

    Raises:
        DataError: The items differ in structure.
    """
    if is_tensor_collection(items[0]):
        return torch.stack(items)
    each = [to_leaves(item) for item in items]
    if any(one.keys() != each[0].keys() for one in each):
        raise DataError("list of items: expected one structure, got several; give a tuple for a tree of batches")
    return from_leaves({path: torch.stack([one[path] for one in each]) for path in each[0]})


def torch_dtype(field: Field) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, field.dtype)
    return dtype
