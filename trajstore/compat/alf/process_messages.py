"""What processes send each other to add experience: bytes that hold numbers and text, and never code."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from trajstore import errors
from trajstore.schema import as_array, nest

_HEADER_SIZE = 8  # bytes that hold the length of the header
_ENV_IDS = ""  # in place of a path
_ERRORS = {kind.__name__: kind for kind in vars(errors).values() if isinstance(kind, type)} | {
    kind.__name__: kind for kind in (IndexError, KeyError, TypeError, ValueError)
}


def encode_batch(leaves: Mapping[str, Any], env_ids: Any, blocking: bool) -> bytes:
    """Return a batch, as fields by path, and the other arguments of ``add_batch`` as bytes.

    Raises:
        DataError: A field cannot be stored.
    """
    values = dict(leaves) if env_ids is None else {**leaves, _ENV_IDS: env_ids}
    arrays = {path: as_array(path or "env_ids", value) for path, value in values.items()}
    fields = [(path, array.dtype.str, array.shape, name) for path, (array, name) in arrays.items()]
    header = json.dumps({"fields": fields, "blocking": bool(blocking)}).encode()
    parts = (np.ascontiguousarray(array).tobytes() for array, _ in arrays.values())
    return b"".join([len(header).to_bytes(_HEADER_SIZE, "little"), header, *parts])


def decode_batch(message: bytes) -> tuple[Any, Any, bool]:
    """Return the arguments of ``add_batch``: the batch as nested dicts, the environments, and ``blocking``."""
    offset = _HEADER_SIZE + int.from_bytes(message[:_HEADER_SIZE], "little")
    header, values = json.loads(message[_HEADER_SIZE:offset]), {}
    for path, dtype, shape, name in header["fields"]:
        array = np.frombuffer(message, dtype, math.prod(shape), offset).reshape(shape).copy()
        offset += array.nbytes
        values[path] = torch.from_numpy(array).view(torch.bfloat16) if name == "bfloat16" else array
    env_ids = values.pop(_ENV_IDS, None)
    return nest(values), env_ids, header["blocking"]


def encode_error(error: Exception | None) -> bytes:
    """Return an error, or that there was none, as bytes."""
    if error is None:
        return b"null"
    name, text = type(error).__name__, str(error.args[0] if len(error.args) == 1 else error)
    return json.dumps([name, text] if name in _ERRORS else [RuntimeError.__name__, f"{name}: {text}"]).encode()


def decode_error(message: bytes) -> Exception | None:
    """Return the error of `encode_error`; a kind that is not known comes as a `RuntimeError`."""
    found = json.loads(message)
    return None if found is None else _ERRORS.get(found[0], RuntimeError)(found[1])
