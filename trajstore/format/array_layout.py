"""Layout and codec of one array: rows to chunk objects and back, and its Zarr metadata.

The only module that knows numcodecs. It reads and writes chunk objects directly, because
``zarr.Array[...]`` costs a millisecond a chunk in event-loop and thread hops; property tests hold
the two together.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from trajstore.errors import FormatError, SchemaError
from trajstore.format.codec import _CRC_BYTES, Codec, bounded_integer
from trajstore.schema import DTYPES, Array, Field

MAX_CHUNK_BYTES = 1 << 30
MAX_ROWS = 1 << 62
_NARROW_CHUNK_BYTES = 256 << 10
_WIDE_CHUNK_BYTES = 1 << 20
_WIDE_ROW_BYTES = 4096
_MAX_CHUNK_ROWS = 16384
_MAX_CHANNELS = 16


def chunk_rows_for(spec: Field, commit_steps: int | None) -> int:
    """Rows in a chunk of a field: a power of two, by the size of a row and what a commit adds.

    A chunk much larger than a commit would be rewritten at every commit, so it holds at most 16 of them.
    """
    if spec.chunk_rows is not None:
        return spec.chunk_rows
    target = _WIDE_CHUNK_BYTES if spec.row_bytes >= _WIDE_ROW_BYTES else _NARROW_CHUNK_BYTES
    rows = min(_MAX_CHUNK_ROWS, max(1, target // max(1, spec.row_bytes)))
    if commit_steps is not None:
        rows = min(rows, 16 * commit_steps)
    return 1 << (rows.bit_length() - 1)


def codec_for(spec: Field, chunk_rows: int) -> Codec:
    """The codec of a field: its own choice, else by measurement.

    Bytes get zstd, because frames repeat from row to row; where a short last axis holds channels or stacked frames
    they are taken apart first, with blosc's shuffle in one block as large as the chunk. Wider types get blosc-lz4.
    """
    if spec.codec is not None:
        return Codec.parse(spec.codec)
    if spec.dtype == "uint8" and len(spec.shape) >= 2 and 2 <= spec.shape[-1] <= _MAX_CHANNELS:
        return Codec("blosc", 1, "zstd", "shuffle", chunk_rows * spec.row_bytes, spec.shape[-1])
    return Codec.parse("zstd:1" if spec.storage_dtype.itemsize == 1 else "blosc-lz4:5")


@dataclass(frozen=True, slots=True)
class ArrayLayout:
    """Everything about an array but its length: dtype, shape of a row, chunking and codec."""

    dtype: np.dtype[Any]
    row_shape: tuple[int, ...]
    chunk_rows: int
    codec: Codec
    attributes: tuple[tuple[str, Any], ...] = ()
    shard_rows: int | None = None  # rows in a shard object; None when every chunk is its own object
    index_at_start: bool = True

    @staticmethod
    def of(spec: Field, commit_steps: int | None = None) -> ArrayLayout:
        """The layout of a field's column: its own overrides, else defaults from measurement."""
        attributes = (("trajstore_dtype", "bfloat16"),) if spec.dtype == "bfloat16" else ()
        rows = chunk_rows_for(spec, commit_steps)
        layout = ArrayLayout(spec.storage_dtype, spec.shape, rows, codec_for(spec, rows), attributes)
        layout.check()
        return layout

    def check(self) -> None:
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

    def empty_chunk(self) -> Array:
        return np.zeros((self.chunk_rows, *self.row_shape), self.dtype)

    def chunk_key(self, index: int) -> str:
        """Name of the object that holds chunk ``index`` (of its shard, when the array is sharded)."""
        if self.shard_rows is not None:
            index = index // self.chunks_per_shard
        return ".".join(("c", str(index), *("0" for _ in self.row_shape)))

    @property
    def chunks_per_shard(self) -> int:
        return 1 if self.shard_rows is None else self.shard_rows // self.chunk_rows

    def encode(self, block: Array) -> bytes:
        return self.codec.encode(block)

    def decode(self, data: bytes | memoryview, out: Array) -> None:
        self.codec.decode(data, out)

    def decode_new(self, data: bytes | memoryview) -> Array:
        """Decode into a new block, allocated once the data says that it holds one."""
        self.codec.check_size(data, self.chunk_bytes)
        block = np.empty((self.chunk_rows, *self.row_shape), self.dtype)
        self.codec.decode(data, block)
        return block

    @property
    def shard_index_bytes(self) -> int:
        return 16 * self.chunks_per_shard + _CRC_BYTES

    def decode_shard_index(self, data: bytes) -> Array:
        """The (offset, size) pairs of a shard's chunks, checked."""
        out = np.empty((self.chunks_per_shard, 2), np.uint64)
        Codec("none").decode(data, out)
        return out

    def metadata(self, rows: int) -> dict[str, Any]:
        """The array's ``zarr.json``, as a dict."""
        inner = [self._bytes_codec(), *self.codec.metadata(self.dtype.itemsize), {"name": "crc32c"}]
        chunk_shape = [self.chunk_rows, *self.row_shape]
        codecs = inner
        if self.shard_rows is not None:
            codecs = [self._sharding_codec(chunk_shape, inner)]
            chunk_shape = [self.shard_rows, *self.row_shape]
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
        }

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
        """Read an array's metadata, trusting nothing: the layout and the number of rows.

        Raises:
            FormatError: It is malformed, absurd in size, or uses a feature format 1 does not.
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
        raise FormatError(f"data type {data['data_type']!r:.40} or fill value {data['fill_value']!r:.40}")
    attributes = data.get("attributes", {})
    layout = ArrayLayout(
        np.dtype(data["data_type"]),
        tuple(bounded_integer(n, 1, MAX_CHUNK_BYTES) for n in shape[1:]),
        bounded_integer(chunk_shape[0], 1, MAX_CHUNK_BYTES),
        Codec("none"),
        tuple(attributes.items()),
    )
    return _with_codecs(layout, data["codecs"]), bounded_integer(shape[0], 0, MAX_ROWS)


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
    inner = bounded_integer(configuration["chunk_shape"][0], 1, MAX_CHUNK_BYTES)
    if configuration["chunk_shape"][1:] != list(layout.row_shape) or layout.chunk_rows % inner:
        raise FormatError(f"inner chunks {configuration['chunk_shape']!r:.80} do not divide the shard along rows")
    if layout.chunk_rows // inner > 1 << 20:
        raise FormatError(f"{layout.chunk_rows // inner} chunks in a shard; at most {1 << 20}")
    if [codec["name"] for codec in configuration["index_codecs"]] != ["bytes", "crc32c"]:
        raise FormatError("expected a shard index of bytes and crc32c")
    location = configuration.get("index_location", "end")
    if location not in ("start", "end"):
        raise FormatError(f"shard index location {location!r:.40}")
    sharded = replace(layout, shard_rows=layout.chunk_rows, chunk_rows=inner, index_at_start=location == "start")
    if any(codec["name"] == "sharding_indexed" for codec in configuration["codecs"]):
        raise FormatError("shards within shards")
    return _with_codecs(sharded, configuration["codecs"])
