"""Batches of several sources joined into one batch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from trajstore.errors import DataError

SOURCE = "source"  # key of a joined batch: the position of the source of each window
Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]


@dataclass(frozen=True, slots=True)
class BatchPart:
    """Windows that one source returned."""

    position: int  # of the source
    name: str  # of the source
    flat: dict[str, torch.Tensor]  # the batch, by flat key
    n: int


def joined_shapes(parts: Sequence[BatchPart]) -> Shapes:
    """Shape and dtype of every tensor of the joined batch, by flat key.

    Raises:
        DataError: The parts have different keys, shapes, dtypes or devices.
    """
    n = sum(part.n for part in parts)
    first = parts[0]
    for part in parts:
        _check_keys(first, part)
        for key, value in part.flat.items():
            _check_alike(first, part, key, value)
    shapes: Shapes = {key: ((n, *value.shape[1:]), value.dtype) for key, value in first.flat.items()}
    return shapes | {SOURCE: ((n,), torch.int64)}


def _check_keys(first: BatchPart, part: BatchPart) -> None:
    if part.flat.keys() != first.flat.keys():
        missing = [key for key in first.flat if key not in part.flat]
        extra = [key for key in part.flat if key not in first.flat]
        lacks = [f"{a.name!r} lacks {listed(keys)}" for a, keys in ((part, missing), (first, extra)) if keys]
        uniform = "; prioritised=False draws uniformly from all" if _has_priorities(missing + extra) else ""
        raise DataError(f"batches differ: {', '.join(lacks)}{uniform}")
    if SOURCE in part.flat:
        raise DataError(f"source {part.name!r}: its batches have {SOURCE!r} already; mixtures can't be nested")


def _has_priorities(keys: Iterable[str]) -> bool:
    return any(key.startswith("priority/") for key in keys)


def _check_alike(first: BatchPart, part: BatchPart, key: str, value: torch.Tensor) -> None:
    model = first.flat[key]
    expected = (part.n, *model.shape[1:])
    if value.shape != expected or value.dtype != model.dtype or value.device != model.device:
        raise DataError(
            f"source {part.name!r}, {key!r}: expected {model.dtype} of shape {expected} on {model.device}, got"
            f" {value.dtype} of shape {tuple(value.shape)} on {value.device}"
        )


def join(
    parts: Sequence[BatchPart], shapes: Shapes, rows: torch.Tensor | None, outs: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Join parts along the first axis.

    Args:
        parts: The parts, in order.
        shapes: Their `joined_shapes`.
        rows: The row of the joined batch for each window; None keeps the order of the parts.
        outs: Tensors to write into, by flat key; other tensors are new, or those of the only part.
    """
    device = next(iter(parts[0].flat.values())).device
    if rows is not None:
        rows = rows.to(device, non_blocking=True)
    flat: dict[str, torch.Tensor] = {}
    for key, (shape, dtype) in shapes.items():
        values = [part.flat[key] if key != SOURCE else _positions(part, device) for part in parts]
        if len(values) == 1 and rows is None and key not in outs:
            flat[key] = values[0]
            continue
        joined = outs[key] if key in outs else torch.empty(shape, dtype=dtype, device=device)
        if rows is None:
            torch.cat(values, out=joined)
        else:
            _scatter(values, rows, joined)
        flat[key] = joined
    return flat


def _scatter(values: Sequence[torch.Tensor], rows: torch.Tensor, joined: torch.Tensor) -> None:
    start = 0
    for value in values:
        joined.index_copy_(0, rows[start : start + len(value)], value)
        start += len(value)


def _positions(part: BatchPart, device: torch.device) -> torch.Tensor:
    return torch.full((part.n,), part.position, dtype=torch.int64, device=device)


def listed(names: Iterable[str]) -> str:
    """Names as they are shown in messages."""
    return ", ".join(map(repr, names)) or "nothing"
