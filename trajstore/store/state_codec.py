"""Encodes the state of a session, a tree of values and arrays, as JSON and Zarr arrays, and decodes it.

JSON values are encoded as themselves. Every other value is encoded as an object with a key that begins with ``$``;
a key of the tree that begins with ``$`` gets another ``$`` in front.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trajstore.errors import CorruptionError, DataError, FormatError
from trajstore.format.array_layout import ArrayLayout
from trajstore.schema import DTYPES, Array, Field, as_array, widen_bfloat16
from trajstore.storage import UNSEEN, Put, Storage

MAX_TEXT_BYTES = 64 << 20
_CHUNK_BYTES = 1 << 20
_MAX_CHUNK_BYTES = 16 << 20
_MAX_INLINE_BYTES = 256  # up to this size an array is stored in the JSON: as an array it costs two objects
_MAX_DEPTH = 100
_MAX_AXES = 32  # an array with more is stored flat
_MAX_SHAPE = 64  # axes of an encoded shape
_MAX_INT_BITS = 1 << 16
_WAVE_CHUNKS = 256
_FLOATS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


@dataclass(frozen=True, slots=True)
class StoredArray:
    """One array of a state as it is stored: in its own shape, or flat if its rows are wide."""

    values: Array
    layout: ArrayLayout

    @staticmethod
    def of(array: Array, dtype: str) -> StoredArray:
        """Choose a layout for an array of at least one element; ``dtype`` is ``bfloat16`` if it holds such bits."""
        if array.ndim == 0 or array[0].nbytes > _CHUNK_BYTES or array.ndim > _MAX_AXES:
            array = array.reshape(-1)
        row = Field(dtype, array.shape[1:])
        most = _CHUNK_BYTES // row.row_bytes
        n_rows = 1 << min(most.bit_length() - 1, (len(array) - 1).bit_length())
        return StoredArray(array, ArrayLayout.of(Field(dtype, array.shape[1:], chunk_rows=n_rows)))

    def metadata(self) -> dict[str, Any]:
        return self.layout.metadata(len(self.values))

    def puts(self, prefix: str) -> list[Put]:
        """Puts of its chunk objects; each chunk is encoded when it is put."""
        size = self.layout.chunk_rows
        return [
            Put(f"{prefix}/{self.layout.chunk_key(i)}", lambda i=i: self._chunk(i), UNSEEN)  # type: ignore[misc]
            for i in range(-(-len(self.values) // size))
        ]

    def _chunk(self, index: int) -> bytes:
        size = self.layout.chunk_rows
        rows = self.values[index * size : (index + 1) * size]
        if len(rows) < size:
            block = self.layout.empty_chunk()
            block[: len(rows)] = rows
            rows = block
        return self.layout.encode(np.ascontiguousarray(rows))


# ---- encoding --------------------------------------------------------------------------------------------


def encode(tree: Any) -> tuple[Any, list[StoredArray]]:
    """Encode a tree as a value that `json` can dump, and the arrays that it refers to by number.

    A tree consists of mappings with text keys (decoded as dicts), lists, tuples, numbers, text, bools, None, arrays
    and tensors (decoded as numpy arrays, bfloat16 as float32). Arrays are not copied.

    Raises:
        DataError: The tree contains another type; the message gives its path.
    """
    encoder = _Encoder()
    return encoder.value(tree, (), 0), encoder.arrays


def dump(encoded: Any) -> bytes:
    """The JSON text of an encoded tree.

    Raises:
        DataError: The text is longer than `MAX_TEXT_BYTES`.
    """
    text = json.dumps(encoded, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    if len(text) > MAX_TEXT_BYTES:
        raise DataError(
            f"state: expected at most {MAX_TEXT_BYTES} bytes without its arrays, got {len(text)}; use arrays"
        )
    return text


class _Encoder:
    def __init__(self) -> None:
        self.arrays: list[StoredArray] = []
        self._by_type: dict[type, Callable[[Any, tuple[str, ...], int], Any]] = {
            type(None): lambda value, *_: value,
            bool: lambda value, *_: value,
            int: _encoded_int,
            float: lambda value, *_: value if math.isfinite(value) else {"$float": repr(value)},
            str: _encoded_text,
            list: self._items,
            tuple: lambda value, *where: {"$tuple": self._items(value, *where)},
        }

    def value(self, value: Any, path: tuple[str, ...], depth: int) -> Any:
        if depth > _MAX_DEPTH:
            raise DataError(f"state {_shown(path)}: nested deeper than {_MAX_DEPTH} levels")
        if type(value) in self._by_type:
            return self._by_type[type(value)](value, path, depth)
        if isinstance(value, (np.ndarray, np.generic)) or hasattr(value, "detach"):
            return self._array(value, path)
        if isinstance(value, Mapping):
            return self._mapping(value, path, depth)
        raise DataError(
            f"state {_shown(path)}: expected a mapping, list, tuple, number, text, bool, None, array or tensor, got"
            f" {type(value).__name__}"
        )

    def _mapping(self, value: Mapping[Any, Any], path: tuple[str, ...], depth: int) -> dict[str, Any]:
        encoded = {}
        for key, item in value.items():
            if type(key) is not str:
                raise DataError(f"state {_shown(path)}: expected text keys, got {key!r:.80}")
            name = _encoded_text(key, path)
            encoded["$" + name if name.startswith("$") else name] = self.value(item, (*path, key), depth + 1)
        return encoded

    def _items(self, value: Sequence[Any], path: tuple[str, ...], depth: int) -> list[Any]:
        return [self.value(item, (*path, str(i)), depth + 1) for i, item in enumerate(value)]

    def _array(self, value: Any, path: tuple[str, ...]) -> dict[str, Any]:
        try:
            array, dtype = as_array("/".join(path), value)
        except DataError as error:
            raise DataError(f"state: {error}") from error
        known = {"dtype": dtype, "shape": list(array.shape)}
        array = array.astype(array.dtype.newbyteorder("="), copy=False)
        if array.nbytes <= _MAX_INLINE_BYTES:
            little = array.astype(array.dtype.newbyteorder("<"), copy=False)
            return {"$bytes": little.tobytes().hex(), **known}
        self.arrays.append(StoredArray.of(array, dtype))
        return {"$array": len(self.arrays) - 1, **known}


def _encoded_int(value: int, path: tuple[str, ...], _: int) -> Any:
    if -(1 << 63) <= value < 1 << 64:
        return value
    n_bits = value.bit_length()
    if n_bits > _MAX_INT_BITS:
        raise DataError(
            f"state {_shown(path)}: expected integers of at most {_MAX_INT_BITS} bits, got one of {n_bits}"
        )
    return {"$int": hex(value)}


def _encoded_text(value: str, path: tuple[str, ...], _: int = 0) -> str:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"state {_shown(path)}: expected valid Unicode text: {error}") from error
    return value


def _shown(path: Sequence[str]) -> str:
    return f"'{'/'.join(path)}'" if path else "(the root)"


# ---- decoding --------------------------------------------------------------------------------------------


def load(text: bytes) -> Any:
    """Parse the text that `dump` made.

    Raises:
        FormatError: The text is not JSON.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"the state is not readable as JSON: {error}") from error


def select(encoded: Any, keys: Iterable[str]) -> tuple[Any, list[str]]:
    """Select keys of an encoded mapping; returns them and the numbers of the arrays that they refer to.

    Raises:
        FormatError: The encoded value is not a mapping.
    """
    if not isinstance(encoded, dict):
        raise FormatError(f"the state: expected a mapping, got {encoded!r:.80}")
    chosen = {key: encoded[key] for key in keys if key in encoded}
    return chosen, _array_numbers(chosen, 0)


def decode(encoded: Any, arrays: Mapping[str, Array]) -> Any:
    """Decode a tree that `encode` made; arrays become numpy arrays.

    Args:
        encoded: The encoded tree.
        arrays: The arrays as stored, by number and in order.

    Raises:
        FormatError: The tree is malformed.
    """
    decoder = _Decoder(arrays)
    tree = decoder.value(encoded, 0)
    if decoder.n_used != len(arrays):
        raise FormatError(f"the state refers to {decoder.n_used} of its {len(arrays)} arrays")
    return tree


def _array_numbers(encoded: Any, depth: int) -> list[str]:
    """The numbers of the arrays that an encoded tree refers to."""
    _check_depth(depth)
    if isinstance(encoded, list):
        return [number for item in encoded for number in _array_numbers(item, depth + 1)]
    if not isinstance(encoded, dict):
        return []
    if "$array" in encoded:
        return [str(encoded["$array"])]
    return [number for item in encoded.values() for number in _array_numbers(item, depth + 1)]


class _Decoder:
    def __init__(self, arrays: Mapping[str, Array]) -> None:
        self.n_used = 0
        self._names = list(arrays)
        self._arrays = arrays
        self._special: dict[str, Callable[[Any, int], Any]] = {
            "$tuple": lambda data, depth: tuple(self._items(data["$tuple"], depth)),
            "$float": lambda data, _: _FLOATS[data["$float"]],
            "$int": lambda data, _: _decoded_int(data["$int"]),
            "$bytes": lambda data, _: _in_shape(data, _from_hex(data)),
            "$array": lambda data, _: self._array(data),
        }

    def value(self, encoded: Any, depth: int) -> Any:
        _check_depth(depth)
        if isinstance(encoded, list):
            return self._items(encoded, depth)
        if not isinstance(encoded, dict):
            return encoded
        special = next((key for key in encoded if key[:1] == "$" and key[1:2] != "$"), None)
        if special is None:
            return {
                key[1:] if key.startswith("$") else key: self.value(item, depth + 1)
                for key, item in encoded.items()
            }
        try:
            return self._special[special](encoded, depth)
        except (LookupError, TypeError, ValueError, OverflowError) as error:
            if isinstance(error, (FormatError, CorruptionError)):
                raise
            raise FormatError(f"the state has a malformed {special!r:.40}: {error!r:.200}") from error

    def _items(self, encoded: Any, depth: int) -> list[Any]:
        if not isinstance(encoded, list):
            raise FormatError(f"the state: expected a list, got {encoded!r:.80}")
        return [self.value(item, depth + 1) for item in encoded]

    def _array(self, encoded: dict[str, Any]) -> Array:
        # Each array is used once and in order, so a short text can't request one array a million times.
        number = encoded["$array"]
        expected = self._names[self.n_used] if self.n_used < len(self._names) else str(self.n_used)
        if type(number) is not int or str(number) != expected:
            raise FormatError(f"the state refers to array {number!r:.40}, expected {expected}")
        self.n_used += 1
        return _in_shape(encoded, self._arrays[expected])


def _check_depth(depth: int) -> None:
    if depth > 2 * _MAX_DEPTH + 2:  # a tuple is an object and a list
        raise FormatError("the state is nested too deeply")


def _dtype(encoded: Mapping[str, Any]) -> str:
    dtype = encoded["dtype"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise FormatError(f"the state has an array of {dtype!r:.40}, which is not a known dtype")
    return dtype


def _shape(encoded: Mapping[str, Any]) -> tuple[int, ...]:
    shape = encoded["shape"]
    is_list = isinstance(shape, list) and len(shape) <= _MAX_SHAPE
    if not is_list or not all(type(n) is int and 0 <= n < 1 << 62 for n in shape):
        raise FormatError(f"the state has an array of shape {shape!r:.80}, which is invalid")
    return tuple(shape)


def _decoded_int(text: Any) -> int:
    if not isinstance(text, str) or len(text) > _MAX_INT_BITS // 4 + 4:
        raise FormatError(f"the state has an invalid integer {text!r:.80}")
    return int(text, 16)


def _from_hex(encoded: Mapping[str, Any]) -> Array:
    data = bytes.fromhex(encoded["$bytes"])
    stored = Field(_dtype(encoded)).storage_dtype
    return np.frombuffer(data, stored.newbyteorder("<")).astype(stored)


def _in_shape(encoded: Mapping[str, Any], stored: Array) -> Array:
    """A stored array in its original shape; bfloat16 becomes float32."""
    dtype, shape = _dtype(encoded), _shape(encoded)
    if math.prod(shape) != stored.size or Field(dtype).storage_dtype != stored.dtype:
        values = f"{stored.size} values of {stored.dtype}"
        raise FormatError(f"the state has {values} for {dtype} of shape {shape!r:.80}")
    return (widen_bfloat16(stored) if dtype == "bfloat16" else stored).reshape(shape)


# ---- stored arrays ---------------------------------------------------------------------------------------


def read_arrays(storage: Storage, prefix: str, layouts: Mapping[str, tuple[ArrayLayout, int]]) -> list[Array]:
    """Read arrays below a key prefix, in one listing and waves of concurrent reads.

    Args:
        storage: Storage of the store.
        prefix: Key prefix.
        layouts: Layout and number of rows of each array, by name.

    Raises:
        CorruptionError: A chunk is missing or damaged. Memory is allocated only if all chunks exist.
        FormatError: An array is sharded, or its chunks are larger than 16 MiB.
    """
    _check_presence(storage, prefix, layouts)
    arrays = {name: np.empty((rows, *layout.row_shape), layout.dtype) for name, (layout, rows) in layouts.items()}
    chunks = [(name, i) for name, (layout, rows) in layouts.items() for i in range(-(-rows // layout.chunk_rows))]

    def read(chunk: tuple[str, int]) -> None:
        name, index = chunk
        layout = layouts[name][0]
        key = f"{prefix}/{name}/{layout.chunk_key(index)}"
        try:
            block = layout.decode_new(storage.get(key))
        except FileNotFoundError as error:
            raise CorruptionError(f"{storage.display}/{key} is missing") from error
        except CorruptionError as error:
            raise CorruptionError(f"{storage.display}/{key}: {error}") from error
        rows = arrays[name][index * layout.chunk_rows : (index + 1) * layout.chunk_rows]
        rows[...] = block[: len(rows)]

    for wave in range(0, len(chunks), _WAVE_CHUNKS):
        storage.map(read, chunks[wave : wave + _WAVE_CHUNKS])
    return list(arrays.values())


def _check_presence(storage: Storage, prefix: str, layouts: Mapping[str, tuple[ArrayLayout, int]]) -> None:
    """Check that every chunk exists: metadata gives their number, and memory is allocated by it."""
    existing = storage.tree_sizes(prefix) if layouts else {}
    for name, (layout, rows) in layouts.items():
        if layout.shard_rows is not None or layout.chunk_bytes > _MAX_CHUNK_BYTES:
            where = f"{storage.display}/{prefix}/{name}"
            raise FormatError(f"{where}: expected chunks of at most {_MAX_CHUNK_BYTES} bytes, not in shards")
        for i in range(-(-rows // layout.chunk_rows)):
            key = f"{prefix}/{name}/{layout.chunk_key(i)}"
            if key not in existing:
                raise CorruptionError(f"{storage.display}/{key} is missing")
