"""Digests of batches: exact content by hash, computed floats by a few numbers that are compared with a tolerance.

A digest has one entry for each path of a batch, over all batches of a case: a text with dtype, shapes and a hash,
or, for numbers that another CPU may round differently, a mapping with sums and the first values.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

Batch = Any  # a nested mapping of tensors, or a TensorDict
Digest = dict[str, Any]

COMPUTED = ("/n_step/return", "/n_step/discount", "/priority/", "/importance_weights")
RTOL, ATOL = 1e-5, 1e-7
_N_FIRST = 4


def flat(tree: Any, prefix: str = "") -> dict[str, torch.Tensor]:
    """The tensors of a nest by path."""
    if hasattr(tree, "items"):
        parts = [flat(value, f"{prefix}/{name}" if prefix else str(name)) for name, value in tree.items()]
        return {path: value for part in parts for path, value in part.items()}
    return {prefix: torch.as_tensor(tree).detach().clone()}


def numbered(batch: Batch, streams: Sequence[str], created: Sequence[str]) -> dict[str, torch.Tensor]:
    """A batch by path, in which streams have their number in the order of creation."""
    values = flat(batch)
    number = torch.tensor([*(created.index(name) for name in streams), -1])  # -1 stays: it names no stream
    for path in values.keys() & {"index", "hindsight/goal_index"}:
        values[path][:, 0] = number[values[path][:, 0]]
    return values


def without(batch: Batch, *paths: str) -> dict[str, torch.Tensor]:
    return {path: value for path, value in flat(batch).items() if path not in paths}


def digest(batches: Iterable[Batch]) -> Digest:
    """The digest of some batches, one entry a path."""
    by_path: dict[str, list[torch.Tensor]] = {}
    for batch in batches:
        for path, value in flat(batch).items():
            by_path.setdefault(path, []).append(value)
    return {path: _entry(path, by_path[path]) for path in sorted(by_path)}


def _entry(path: str, values: Sequence[torch.Tensor]) -> Any:
    is_computed = any(name in f"/{path}" for name in COMPUTED) and values[0].is_floating_point()
    return _numbers(values) if is_computed else f"{_shapes(values)} {_hash(values)}"


def _shapes(values: Sequence[torch.Tensor]) -> str:
    """Dtypes and shapes, equal neighbours counted."""
    each = [f"{str(v.dtype).removeprefix('torch.')}[{','.join(map(str, v.shape))}]" for v in values]
    runs = [(name, len(list(same))) for name, same in itertools.groupby(each)]
    return " ".join(name if n == 1 else f"{n}*{name}" for name, n in runs)


def _hash(values: Sequence[torch.Tensor]) -> str:
    found = hashlib.sha256()
    for value in values:
        found.update(_shapes([value]).encode())
        found.update(value.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:24]


def _numbers(values: Sequence[torch.Tensor]) -> dict[str, Any]:
    """Sums that notice another value and another order, and the first values."""
    joined = torch.cat([value.reshape(-1).to(torch.float64) for value in values])
    place = torch.arange(1, len(joined) + 1, dtype=torch.float64) / max(1, len(joined))
    return {
        "shapes": _shapes(values),
        "sum": _rounded(joined.sum()),
        "sum_by_place": _rounded((joined * place).sum()),
        "first": [_rounded(value) for value in joined[:_N_FIRST]],
    }


def _rounded(value: torch.Tensor) -> float:
    return float(f"{float(value):.8g}")


def differences(found: Digest, expected: Digest) -> list[str]:
    """What differs, a line for each path."""
    lines = [f"{path}: is not there" for path in sorted(expected.keys() - found.keys())]
    lines += [f"{path}: was not there" for path in sorted(found.keys() - expected.keys())]
    common = sorted(found.keys() & expected.keys())
    return lines + [f"{p}: {found[p]}, was {expected[p]}" for p in common if not _is_same(found[p], expected[p])]


def _is_same(found: Any, expected: Any) -> bool:
    if not isinstance(found, Mapping) or not isinstance(expected, Mapping):
        return bool(found == expected)
    pairs = [(found[name], expected[name]) for name in ("sum", "sum_by_place")]
    pairs += zip(found["first"], expected["first"], strict=False)
    return found["shapes"] == expected["shapes"] and all(_is_close(*pair) for pair in pairs)


def _is_close(found: float, expected: float) -> bool:
    return math.isclose(found, expected, rel_tol=RTOL, abs_tol=ATOL)
