"""Layout of one array: its chunking and codec, chunk objects from rows and back, and its Zarr metadata.

trajstore encodes and decodes chunk objects itself, because ``zarr.Array[...]`` costs about a millisecond per
chunk in event-loop and thread hops. Property tests check that zarr reads the same values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from trajstore.errors import CorruptionError, FormatError, SchemaError
from trajstore.format.blosc_blocks import MAX_BLOCK_BYTES
from trajstore.format.codec import CRC_BYTES, Codec
from trajstore.format.json_values import MAX_ROWS, parse_bounded_integer
from trajstore.schema import DTYPES, Array, Field

MAX_CHUNK_BYTES = 1 << 30
MAX_SHARD_CHUNKS = 1 << 20
WIDE_ROW_BYTES = 4096  # wider rows are frames, or as large
# A row that is not in the cache costs a whole chunk, so chunks are small. But other Zarr readers need about as long
# for a chunk as for decoding 256 KiB, and frames compress by what repeats from row to row; see decision 23.
_CHUNK_BYTES = 128 << 10
_WIDE_CHUNK_BYTES = 256 << 10
_FRAME_CHUNK_BYTES = 512 << 10
# A block decodes in a few microseconds; in shorter ones, frames compress by much less. See decision 26.
_BLOCK_BYTES = 64 << 10
_BLOCK_ROWS = 4  # at least, because rows compress by what repeats from row to row
_MAX_CHUNK_ROWS = 16384
_ABSENT = (1 << 64) - 1  # offset and size of a chunk that a shard does not hold
_MAX_CHANNELS = 16
_MIN_BLOCK_BYTES = 64  # rows of one-byte numbers of at least this size are frames or the like


def chunk_rows_for(spec: Field, *, is_compressed: bool) -> int:
    """Rows in a chunk of a field: the field's own choice, else a power of two that depends on the size of a row."""
    if spec.chunk_rows is not None:
        return spec.chunk_rows
    return rows_within(chunk_bytes_for(spec.row_bytes, is_compressed=is_compressed), spec)


def chunk_bytes_for(row_bytes: int, *, is_compressed: bool) -> int:
    """About how many bytes a chunk should have, decoded."""
    wide = _FRAME_CHUNK_BYTES if is_compressed else _WIDE_CHUNK_BYTES
    return wide if row_bytes >= WIDE_ROW_BYTES else _CHUNK_BYTES


def rows_within(n_bytes: int, spec: Field) -> int:
    """The largest power of two of rows that take at most ``n_bytes``, at least 1 and at most 16,384."""
    rows = min(_MAX_CHUNK_ROWS, max(1, n_bytes // spec.row_bytes))
    return 1 << (rows.bit_length() - 1)


def compressor_for(spec: Field, chunk_rows: int) -> Codec:
    """The compressor of a field: the field's own choice, else the one that measured best for its dtype.

    One-byte types use zstd, because frames repeat from row to row. Where a short last axis holds channels or
    stacked frames, blosc's shuffle separates them first, in one block as large as the chunk. Other wide rows lie in
    blocks of a few rows, so that a single row can be read without decoding the whole chunk. Wider types use
    blosc-lz4.
    """
    if spec.codec is not None:
        return Codec.parse(spec.codec)
    if spec.dtype == "uint8" and len(spec.shape) >= 2 and 2 <= spec.shape[-1] <= _MAX_CHANNELS:
        return Codec("blosc", 1, "zstd", "shuffle", chunk_rows * spec.row_bytes, spec.shape[-1])
    if spec.storage_dtype.itemsize > 1:
        return Codec.parse("blosc-lz4:5")
    block_rows = max(_BLOCK_ROWS, rows_within(_BLOCK_BYTES, spec))
    if (
        spec.row_bytes >= WIDE_ROW_BYTES
        and block_rows < chunk_rows
        and block_rows * spec.row_bytes <= MAX_BLOCK_BYTES
    ):
        return Codec("blosc", 1, "zstd", "noshuffle", block_rows * spec.row_bytes, 1)
    return Codec.parse("zstd:1")


def is_compressible(spec: Field) -> bool:
    """Whether a field is worth compressing, as far as its dtype and shape tell.

    Floats rarely are: the last bits of measurements are noise. Integers are mostly small, and frames repeat. Short
    rows of one-byte integers (discrete actions) take too little room to matter.
    """
    if spec.dtype in ("bfloat16", "bool"):
        return spec.dtype == "bool"
    if spec.storage_dtype.itemsize == 1:
        return spec.row_bytes >= _MIN_BLOCK_BYTES
    return spec.storage_dtype.kind != "f"


@dataclass(frozen=True, slots=True)
class ArrayLayout:
    """Everything about an array except its length: dtype, shape of a row, chunking and codec."""

    dtype: np.dtype[Any]
    row_shape: tuple[int, ...]
    chunk_rows: int
    codec: Codec
    attributes: tuple[tuple[str, Any], ...] = ()
    shard_rows: int | None = None  # rows in a shard object; None when every chunk is its own object
    index_at_start: bool = True
    dimensions: tuple[str, ...] | None = None  # names of the axes, for other programs; None: not named

    @staticmethod
    def of(spec: Field, *, is_compressed: bool | None = None, shard_rows: int | None = None) -> ArrayLayout:
        """The layout of a field's column: the field's own choices, else measured defaults.

        Args:
            spec: The field.
            is_compressed: Whether to compress it, if the field does not say; None: decide by dtype and shape.
                A field that declares its chunks is always compressed, unless it says otherwise.
            shard_rows: Rows in a shard, if the field itself does not say; None: every chunk is its own object.
        """
        attributes = (("trajstore_dtype", "bfloat16"),) if spec.dtype == "bfloat16" else ()
        if spec.codec is not None or spec.chunk_rows is not None:
            is_compressed = spec.codec != "none"
        elif is_compressed is None:
            is_compressed = is_compressible(spec)
        rows = chunk_rows_for(spec, is_compressed=is_compressed)
        codec = compressor_for(spec, rows) if is_compressed else Codec("none")
        if spec.chunk_rows is not None:
            shard_rows = spec.shard_rows
        layout = ArrayLayout(spec.storage_dtype, spec.shape, rows, codec, attributes, shard_rows)
        layout.check()
        return layout

    def check(self) -> None:
        """Refuse a chunk of more than `MAX_CHUNK_BYTES`, and a shard of more than `MAX_SHARD_CHUNKS`.

        Raises:
            SchemaError: It is larger.
        """
        if self.chunks_per_shard > MAX_SHARD_CHUNKS:
            raise SchemaError(f"a shard has {self.chunks_per_shard} chunks, at most {MAX_SHARD_CHUNKS}")
        if self.chunk_bytes > MAX_CHUNK_BYTES:
            raise SchemaError(
                f"a chunk takes {self.chunk_bytes} bytes, at most {MAX_CHUNK_BYTES}; lower chunk_rows"
            )

    @property
    def row_bytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.row_shape)

    @property
    def chunk_bytes(self) -> int:
        return self.row_bytes * self.chunk_rows

    @property
    def is_raw(self) -> bool:
        """Whether chunks are stored as they are, so that rows can be read without decoding."""
        return self.codec.name == "none"

    @property
    def has_blocks(self) -> bool:
        """Whether single rows can be read by decoding one small block of a chunk, and are wide enough for it."""
        return self.codec.has_blocks and self.row_bytes >= WIDE_ROW_BYTES

    @property
    def object_rows(self) -> int:
        """Rows in one object: in a shard, or in a chunk if the array is not sharded."""
        return self.shard_rows or self.chunk_rows

    @property
    def max_encoded_bytes(self) -> int:
        """The most bytes that an encoded chunk can have; raw chunks have exactly as many."""
        return self.chunk_bytes + CRC_BYTES if self.is_raw else 2 * self.chunk_bytes + 4096

    def padding_bytes(self, n_rows: int) -> int:
        """Bytes of the zeros that fill up the last chunk of so many rows; 0 if they are compressed away."""
        return -n_rows % self.chunk_rows * self.row_bytes if self.is_raw else 0

    def empty_chunk(self) -> Array:
        return np.zeros((self.chunk_rows, *self.row_shape), self.dtype)

    def chunk_key(self, index: int) -> str:
        """Name of the object that holds chunk ``index``: the chunk, or its shard if the array is sharded."""
        if self.shard_rows is not None:
            index = index // self.chunks_per_shard
        return ".".join(("c", str(index), *("0" for _ in self.row_shape)))

    @property
    def chunks_per_shard(self) -> int:
        return 1 if self.shard_rows is None else self.shard_rows // self.chunk_rows

    def encode(self, chunk: Array) -> bytes:
        return self.codec.encode(chunk)

    def decode(self, data: bytes | memoryview, out: Array) -> None:
        self.codec.decode(data, out)

    def decode_new(self, data: bytes | memoryview) -> Array:
        """Decode into a new array, allocated only if the data declares the size of a chunk."""
        self.codec.check_size(data, self.chunk_bytes)
        chunk = np.empty((self.chunk_rows, *self.row_shape), self.dtype)
        self.codec.decode(data, chunk)
        return chunk

    @property
    def shard_index_bytes(self) -> int:
        return 16 * self.chunks_per_shard + CRC_BYTES

    def decode_shard_index(self, data: bytes | memoryview) -> Array:
        """The (offset, size) pairs of a shard's chunks, after a check of the index's checksum."""
        out = np.empty((self.chunks_per_shard, 2), np.uint64)
        Codec("none").decode(data, out)
        return out

    def check_place(self, start: int, size: int, object_bytes: int = 1 << 62) -> None:
        """Refuse a place of a chunk in an object that no chunk can have.

        Raises:
            CorruptionError: It is too large, ends behind the object, or has another size than raw chunks have.
        """
        is_wrong = size != self.max_encoded_bytes if self.is_raw else size > self.max_encoded_bytes
        if is_wrong or start + size > object_bytes:
            raise CorruptionError(f"it has {size} bytes at byte {start} of its object, which is impossible")

    def encode_shard_index(self, sizes: Sequence[int | None]) -> bytes:
        """The index of a shard whose first chunks have these sizes and lie one after the other.

        Chunks of size None are absent, and so are those after the last one.
        """
        index = np.full((self.chunks_per_shard, 2), _ABSENT, "<u8")
        present = [i for i, size in enumerate(sizes) if size is not None]
        found = np.array([size for size in sizes if size is not None], np.int64)
        index[present, 1] = found
        index[present, 0] = np.cumsum(found) - found + (self.shard_index_bytes if self.index_at_start else 0)
        return Codec("none").encode(index)

    def metadata(self, rows: int) -> dict[str, Any]:
        """The array's ``zarr.json``, as a dict."""
        inner = [self._bytes_codec(), *self.codec.metadata(self.dtype.itemsize), {"name": "crc32c"}]
        chunk_shape = [self.chunk_rows, *self.row_shape]
        codecs = inner
        if self.shard_rows is not None:
            codecs = [self._sharding_codec(chunk_shape, inner)]
            chunk_shape = [self.shard_rows, *self.row_shape]
        named = {} if self.dimensions is None else {"dimension_names": list(self.dimensions)}
        return {
            "zarr_format": 3,
            "node_type": "array",
            "shape": [rows, *self.row_shape],
            "data_type": self.dtype.name,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk_shape}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
            "fill_value": {"b": False, "f": 0.0}.get(self.dtype.kind, 0),
            "codecs": codecs,
            "attributes": dict(self.attributes),
            "storage_transformers": [],
        } | named

    def with_axes(self, rows: str, prefix: str) -> ArrayLayout:
        """The same with named axes: ``rows``, then ``<prefix>:0``, ``<prefix>:1`` and so on.

        No field has a colon in its name. An axis with the name of a field would be taken for its coordinate.
        """
        axes = (f"{prefix}:{i}" for i in range(len(self.row_shape)))
        return replace(self, dimensions=(rows, *axes))

    def _bytes_codec(self) -> dict[str, Any]:
        if self.dtype.itemsize == 1:
            return {"name": "bytes"}
        return {"name": "bytes", "configuration": {"endian": "little"}}

    def _sharding_codec(self, chunk_shape: list[int], inner: list[dict[str, Any]]) -> dict[str, Any]:
        index_codecs = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
        return {
            "name": "sharding_indexed",
            "configuration": {
                "chunk_shape": chunk_shape,
                "codecs": inner,
                "index_codecs": index_codecs,
                "index_location": "start" if self.index_at_start else "end",
            },
        }

    @staticmethod
    def from_metadata(data: object, path: str) -> tuple[ArrayLayout, int]:
        """Parse an array's metadata, which may be hostile: the layout and the number of rows.

        Raises:
            FormatError: It is malformed, too large, or uses a feature that format 1 does not have.
        """
        try:
            layout, rows = _parse_array(data)
            layout.check()
        except FormatError as error:
            raise FormatError(f"array '{path}': {error}") from error
        except (TypeError, LookupError, AttributeError, ValueError, OverflowError) as error:
            raise FormatError(f"array '{path}': metadata is malformed: {error!r}") from error
        return layout, rows


def _parse_array(data: Any) -> tuple[ArrayLayout, int]:
    shape, chunk_shape = data["shape"], data["chunk_grid"]["configuration"]["chunk_shape"]
    if data["zarr_format"] != 3 or data["node_type"] != "array" or data["chunk_grid"]["name"] != "regular":
        raise FormatError("expected a Zarr v3 array on a regular grid")
    if not 1 <= len(shape) <= 33 or len(chunk_shape) != len(shape) or chunk_shape[1:] != shape[1:]:
        raise FormatError(f"shape {shape!r:.80} in chunks of {chunk_shape!r:.80}: expected chunks along rows only")
    if data["chunk_key_encoding"] != {"name": "default", "configuration": {"separator": "."}}:
        raise FormatError(f"chunk key encoding {data['chunk_key_encoding']!r:.80}: expected default with '.'")
    if data["data_type"] not in DTYPES - {"bfloat16"} or data["fill_value"] not in (0, 0.0, False):
        raise FormatError(
            f"data type {data['data_type']!r:.40}, fill value {data['fill_value']!r:.40}: expected a supported type"
            " and a fill value of 0"
        )
    attributes = data.get("attributes", {})
    layout = ArrayLayout(
        np.dtype(data["data_type"]),
        tuple(parse_bounded_integer(n, 1, MAX_CHUNK_BYTES) for n in shape[1:]),
        parse_bounded_integer(chunk_shape[0], 1, MAX_CHUNK_BYTES),
        Codec("none"),
        tuple(attributes.items()),
        dimensions=_parse_dimensions(data.get("dimension_names"), len(shape)),
    )
    return _with_codecs(layout, data["codecs"]), parse_bounded_integer(shape[0], 0, MAX_ROWS)


def _parse_dimensions(names: Any, n_axes: int) -> tuple[str, ...] | None:
    if names is None:
        return None
    is_valid = isinstance(names, list) and len(names) == n_axes and all(isinstance(name, str) for name in names)
    if not is_valid:
        raise FormatError(f"dimension names {names!r:.80}: expected {n_axes} texts")
    return tuple(names)


def _with_codecs(layout: ArrayLayout, codecs: list[dict[str, Any]]) -> ArrayLayout:
    if [codec["name"] for codec in codecs] == ["sharding_indexed"]:
        return _with_sharding(layout, codecs[0]["configuration"])
    names = [codec["name"] for codec in codecs]
    if names[0] != "bytes" or names[-1] != "crc32c" or len(names) > 3:
        raise FormatError(f"codecs {names!r:.80}: expected bytes, at most one compressor, crc32c")
    if layout.dtype.itemsize > 1 and codecs[0]["configuration"] != {"endian": "little"}:
        raise FormatError("expected little-endian bytes")
    codec = Codec.from_metadata(codecs[1:-1])
    if codec.typesize == layout.dtype.itemsize:
        codec = replace(codec, typesize=0)
    return replace(layout, codec=codec)


def _with_sharding(layout: ArrayLayout, configuration: dict[str, Any]) -> ArrayLayout:
    inner = parse_bounded_integer(configuration["chunk_shape"][0], 1, MAX_CHUNK_BYTES)
    if configuration["chunk_shape"][1:] != list(layout.row_shape) or layout.chunk_rows % inner:
        raise FormatError(f"inner chunks {configuration['chunk_shape']!r:.80} do not divide the shard along rows")
    if layout.chunk_rows // inner > MAX_SHARD_CHUNKS:
        raise FormatError(f"a shard has {layout.chunk_rows // inner} chunks, expected at most {MAX_SHARD_CHUNKS}")
    if [codec["name"] for codec in configuration["index_codecs"]] != ["bytes", "crc32c"]:
        raise FormatError("expected a shard index of bytes and crc32c")
    location = configuration.get("index_location", "end")
    if location not in ("start", "end"):
        raise FormatError(f"shard index location {location!r:.40}: expected 'start' or 'end'")
    sharded = replace(layout, shard_rows=layout.chunk_rows, chunk_rows=inner, index_at_start=location == "start")
    if any(codec["name"] == "sharding_indexed" for codec in configuration["codecs"]):
        raise FormatError("expected chunks inside a shard, got another shard")
    return _with_codecs(sharded, configuration["codecs"])
