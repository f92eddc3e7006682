"""Values of TensorDicts that are not tensors, as tensors of bytes, and back.

Text and JSON values become UTF-8 JSON, padded with zero bytes to the width of their field; JSON itself contains no
zero byte. A TensorDict without keys becomes a placeholder, so that it comes back.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from trajstore.compat.torchrl.paged_tensor import PagedTensor
from trajstore.errors import DataError
from trajstore.schema import Array

# The last name in the path of such a field; the rest of the path is the key.
JSON = "json.text"
EMPTY = "empty.td"
MARKERS = (JSON, EMPTY)

_MIN_WIDTH, _MAX_WIDTH = 64, 1 << 16  # bytes
_JSON_TYPES = (str, int, float, bool, type(None))


def encode(node: Any, what: str) -> torch.Tensor:
    """Return the values of `NonTensorData` or a `NonTensorStack` as bytes, ``[*batch, width]``.

    Args:
        node: The values.
        what: The name of their field, for errors.

    Raises:
        DataError: A value is neither text nor JSON, or is too long.
    """
    if isinstance(node, NonTensorData):
        rows = _padded([_to_json(node.data, what)], what)
        return torch.from_numpy(rows[0]).expand(*node.batch_size, -1)
    values = node.tolist()
    for _ in range(node.batch_dims - 1):
        values = [value for part in values for value in part]
    rows = _padded([_to_json(value, what) for value in values], what)
    return torch.from_numpy(rows).reshape(*node.batch_size, -1)


def _to_json(value: Any, what: str) -> bytes:
    _check_json(value, what)
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    except ValueError as error:  # NaN, infinity, half of a surrogate pair
        raise DataError(f"{what}: expected text or values that JSON can express, got {value!r:.80}") from error


def _check_json(value: Any, what: str) -> None:
    """Refuse values that JSON would change or cannot hold: tuples, arrays, keys that are not text, objects."""
    if type(value) is list:
        for item in value:
            _check_json(item, what)
    elif type(value) is dict and all(type(key) is str for key in value):
        for item in value.values():
            _check_json(item, what)
    elif type(value) not in _JSON_TYPES:
        raise DataError(
            f"{what}: expected a tensor, text or JSON values (lists, dicts with text as keys, numbers, booleans,"
            f" None), got {type(value).__name__}; other objects would need pickle, which a store does not contain"
        )


def _padded(texts: Sequence[bytes], what: str) -> Array:
    longest = max(map(len, texts), default=0)
    if longest > _MAX_WIDTH:
        raise DataError(
            f"{what}: expected at most {_MAX_WIDTH} bytes of JSON in a row, because all rows have the same width,"
            f" got {longest}; store long text elsewhere, and its number here"
        )
    width = max(_MIN_WIDTH, 1 << (longest - 1).bit_length())
    padded = bytearray(b"".join(text.ljust(width, b"\0") for text in texts))
    return np.frombuffer(padded, np.uint8).reshape(-1, width)


def widen(rows: torch.Tensor, width: int) -> torch.Tensor:
    """Return bytes, ``[..., w]``, padded to a width; wider ones as they are."""
    missing = width - rows.shape[-1]
    return torch.nn.functional.pad(rows, (0, missing)) if missing > 0 else rows


def decode(rows: torch.Tensor) -> NonTensorData | NonTensorStack:
    """Return the values of bytes ``[*batch, width]``; rows of zeros, which were never written, are None."""
    held = rows.read() if isinstance(rows, PagedTensor) else rows
    return _decoded(held.cpu().numpy(), TensorDict({}, [], device=rows.device))


def _decoded(rows: Array, empty: TensorDict) -> NonTensorData | NonTensorStack:
    if rows.ndim == 1:
        # Several times as fast as `NonTensorData(...)`, and on the device of the TensorDict that it is for.
        return NonTensorData.from_tensordict(empty.copy(), {"data": _from_json(rows.tobytes())})
    values = [_decoded(row, empty) for row in rows]
    return NonTensorStack(*values) if values else NonTensorData(None, batch_size=rows.shape[:-1])


def _from_json(text: bytes) -> Any:
    text = text.rstrip(b"\0")
    return json.loads(text) if text else None


def restore(data: TensorDict, marked: Sequence[tuple[str, ...]]) -> TensorDict:
    """Return a TensorDict with values in place of their bytes, and without placeholders.

    Args:
        data: A TensorDict; it is not changed.
        marked: The keys of its bytes and placeholders; the last name of each is a marker.
    """
    data = data.copy()
    for *key, marker in marked:
        if marker == JSON:
            data.set(tuple(key), decode(data.get((*key, JSON))))
        else:
            data.del_((*key, EMPTY))
    return data
