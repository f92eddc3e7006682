"""What TorchRL stores (TensorDicts, tensors, trees of tensors) as named fields of a store, and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict, is_tensor_collection
from tensordict.utils import is_non_tensor, unravel_key

from trajstore.errors import DataError, SchemaError
from trajstore.schema import Field, Schema, nest

HEADER = "slot"  # of a row: its slot, the last slot written in turn, how often the storage was emptied, its slots
_HEADER_FIELD = Field("int64", (4,))
_TENSOR, _TREE, TENSORDICT = "tensor", "tree", "td"

Leaves = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Layout:
    """The fields of a row, and what they are put together to.

    Field names tell the structure: ``tensor`` is a bare tensor, ``td<n>/...`` a TensorDict of n batch dimensions,
    ``tree/...`` tuples (``t.0``), lists (``l.0``) and dicts (``m.key``) of tensors.
    """

    fields: Mapping[str, Field]

    @classmethod
    def of(cls, rows: Leaves) -> Layout:
        """Of rows by field, ``[n, ...]`` each."""
        return cls({path: _field(leaf) for path, leaf in rows.items()})

    @classmethod
    def of_store(cls, schema: Schema | None) -> Layout | None:
        """Of a store that this package has written; None while it has no fields.

        Raises:
            SchemaError: Somebody else has written it.
        """
        if schema is None:
            return None
        fields = {path: field for path, field in schema.fields.items() if path != HEADER}
        root = next(iter(fields), "").split("/")[0]
        if schema.fields.get(HEADER) != _HEADER_FIELD or not root.startswith((_TENSOR, _TREE, TENSORDICT)):
            raise SchemaError(f"expected a store that TrajStorage has written, found one of fields {list(fields)}")
        return cls(fields)

    @property
    def schema(self) -> Schema:
        return Schema({HEADER: _HEADER_FIELD, **nest(self.fields)})

    @property
    def row_bytes(self) -> int:
        return sum(field.row_bytes for field in self.fields.values())

    def lanes(self, ndim: int) -> torch.Size:
        """What the fields of a row begin with, where so many dimensions are indexed, that of the rows included.

        Raises:
            DataError: They do not begin alike.
        """
        shapes = {torch.Size(field.shape[: ndim - 1]) for field in self.fields.values()}
        if len(shapes) > 1 or len(lanes := shapes.pop()) < ndim - 1:
            raise DataError(f"ndim={ndim}: expected fields that share their first {ndim} dimensions")
        return lanes

    def with_fields(self, other: Layout) -> Layout:
        """With fields of another that are not here."""
        return Layout({**other.fields, **self.fields})

    def path(self, key: Any) -> str:
        """The field of a key of a TensorDict."""
        root = next(iter(self.fields)).split("/")[0]
        parts = unravel_key(key)
        return "/".join([root, parts] if isinstance(parts, str) else [root, *parts])

    def check_known(self, rows: Leaves) -> None:
        """See that rows have no other fields.

        Raises:
            DataError: They have.
        """
        if new := [path for path in rows if path not in self.fields]:
            raise DataError(
                f"expected the fields of the rows before, {shown(new[0])} is new; to add it to them, write over all"
                " rows that are held: buffer[:] = data"
            )

    def check(self, rows: Leaves) -> None:
        """See that rows have these fields, as they are.

        Raises:
            DataError: They have not.
        """
        if missing := [path for path in self.fields if path not in rows]:
            raise DataError(f"expected the fields of the rows before, {shown(missing[0])} is missing")
        for path, leaf in rows.items():
            field = self.fields[path]
            if leaf.shape[1:] != field.shape or leaf.dtype != torch_dtype(field):
                expected, got = (
                    f"{field.dtype} of shape {field.shape}",
                    f"{leaf.dtype} of shape {tuple(leaf.shape[1:])}",
                )
                raise DataError(f"{shown(path)}: expected {expected} as before, got {got}")


def _field(rows: torch.Tensor) -> Field:
    return Field(str(rows.dtype).removeprefix("torch."), tuple(rows.shape[1:]))


def shown(path: str) -> str:
    """A field as its user knows it."""
    return f"field {path.partition('/')[2] or path!r}"


def to_leaves(data: Any) -> Leaves:
    """All tensors of some rows, by field.

    Raises:
        DataError: There is something that is no tensor.
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
            raise DataError(f"{shown(path)}: expected keys without '/', got {name!r}")
        yield from _walk(child, f"{path}/{name}")


def _children(node: Any, path: str) -> Iterator[tuple[str, Any]]:
    if is_tensor_collection(node) and not is_non_tensor(node) and path.startswith(TENSORDICT):
        yield from ((str(key), child) for key, child in node.items())
    elif isinstance(node, dict):
        yield from ((f"m.{key}", child) for key, child in node.items())
    elif isinstance(node, (tuple, list)):
        yield from ((f"{type(node).__name__[0]}.{i}", child) for i, child in enumerate(node))
    else:
        raise DataError(f"{shown(path)}: expected a tensor, got {type(node).__name__}; a store holds tensors only")


def from_leaves(leaves: Mapping[str, torch.Tensor]) -> Any:
    """The structure that these fields belong to."""
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
    kind = next(iter(node))[0]
    children = {name[2:]: _tree(child) for name, child in node.items()}
    if kind == "m":
        return children
    ordered = [children[str(i)] for i in range(len(children))]
    return tuple(ordered) if kind == "t" else ordered


def stacked(items: list[Any]) -> Any:
    """Rows from a list of single items, which TorchRL takes for one row each."""
    if is_tensor_collection(items[0]):
        return torch.stack(items)
    each = [to_leaves(item) for item in items]
    if any(one.keys() != each[0].keys() for one in each):
        raise DataError("expected items of one structure in the list; give a tuple for a tree of batches")
    return from_leaves({path: torch.stack([one[path] for one in each]) for path in each[0]})


def torch_dtype(field: Field) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, field.dtype)
    return dtype
