"""TorchRL's data (TensorDicts, tensors, trees of tensors) as named fields of a store, and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict, is_tensor_collection
from tensordict.utils import is_non_tensor, unravel_key

from trajstore.errors import DataError, SchemaError
from trajstore.schema import Field, Schema, nest

# The field with a row's slot, the cursor, the epoch (how often the storage was emptied), and the number of slots.
HEADER = "slot"
_HEADER_FIELD = Field("int64", (4,))
_TENSOR, _TREE, TENSORDICT = "tensor", "tree", "td"

Leaves = dict[str, torch.Tensor]


@dataclass(frozen=True)
class RowStructure:
    """The fields of a row, whose names also say how the fields are nested.

    ``tensor`` is a single tensor, ``td<n>/...`` a TensorDict with n batch dimensions, and ``tree/...`` a tree of
    tuples (``t.0``), lists (``l.0``) and dicts (``m.key``) of tensors.
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


def describe_field(path: str) -> str:
    """Return how an error names a field: by the name that the user knows."""
    return f"field {path.partition('/')[2] or path!r}"


def to_leaves(data: Any) -> Leaves:
    """Return the tensors of some rows by field, detached.

    Raises:
        DataError: The data contains no tensor, or a value that is not a tensor.
    """
    if isinstance(data, torch.Tensor):
        return {_TENSOR: data.detach()}
    is_collection = is_tensor_collection(data)
    root = f"{TENSORDICT}{data.batch_dims}" if is_collection else _TREE
    leaves = dict(_walk(data, root))
    if not leaves:
        raise DataError(f"expected tensors, got {type(data).__name__} without any")
    return leaves


def _walk(node: Any, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(node, torch.Tensor):
        yield path, node.detach()
        return
    for name, child in _children(node, path):
        if "/" in name:
            raise DataError(f"{describe_field(path)}: expected keys without '/', got {name!r}")
        yield from _walk(child, f"{path}/{name}")


def _children(node: Any, path: str) -> Iterator[tuple[str, Any]]:
    if is_tensor_collection(node) and not is_non_tensor(node) and path.startswith(TENSORDICT):
        yield from ((str(key), child) for key, child in node.items())
    elif isinstance(node, dict):
        yield from ((f"m.{key}", child) for key, child in node.items())
    elif isinstance(node, (tuple, list)):
        yield from ((f"{type(node).__name__[0]}.{i}", child) for i, child in enumerate(node))
    else:
        raise DataError(
            f"{describe_field(path)}: expected a tensor, got {type(node).__name__}; stores hold tensors"
        )


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
