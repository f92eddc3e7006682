"""Layout and codec of one array: rows to chunk objects and back, and its Zarr metadata.

The only module that knows numcodecs. It reads and writes chunk objects directly, because
``zarr.Array[...]`` costs a millisecond a chunk in event-loop and thread hops; property tests hold
the two together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import crc32c as crc32c_package
import numcodecs.blosc
import numcodecs.zstd
import numpy as np

from trajstore.errors import CorruptionError, FormatError, SchemaError
from trajstore.schema import DTYPES, Array, Field

MAX_CHUNK_BYTES = 1 << 30
MAX_ROWS = 1 << 62
_NARROW_CHUNK_BYTES = 256 << 10
_WIDE_CHUNK_BYTES = 1 << 20
_WIDE_ROW_BYTES = 4096
_MAX_CHUNK_ROWS = 16384
_MAX_CHANNELS = 16
_CRC_BYTES = 4
_CRC_RESIDUE = 0x48674BC7  # the checksum of anything that ends in its own checksum: checks it without a copy
_SHUFFLES = {"noshuffle": 0, "shuffle": 1, "bitshuffle": 2}
_BLOSC_NAMES = ("lz4", "lz4hc", "blosclz", "zstd", "snappy", "zlib")


def crc32c(data: bytes | memoryview) -> int:
    """CRC-32C; releases the GIL for all but small data."""
    checksum: int = crc32c_package.crc32c(data)
    return checksum


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
class Codec:
    """How the bytes of a chunk are compressed; ``crc32c`` always follows."""

    name: str  # none | zstd | blosc
    level: int = 0
    cname: str = ""
    shuffle: str = "noshuffle"
    blocksize: int = 0
    typesize: int = 0  # what blosc's shuffle takes for one element; 0: the size of the dtype

    @staticmethod
    def parse(text: str) -> Codec:
        """Read ``none``, ``zstd[:level]``, ``blosc-lz4[:level]`` or ``blosc-zstd[:level]``."""
        if not isinstance(text, str):
            raise SchemaError(f"codec {text!r}: expected text such as 'zstd:1'")
        name, _, level = text.partition(":")
        try:
            number = int(level) if level else {"zstd": 1, "blosc-lz4": 5, "blosc-zstd": 3}.get(name, 0)
        except ValueError:
            raise SchemaError(f"codec {text!r}: level {level!r} is not a number") from None
        if name == "none" and not level:
            return Codec("none")
        if name == "zstd" and -7 <= number <= 22:
            return Codec("zstd", number)
        if name in ("blosc-lz4", "blosc-zstd") and 0 <= number <= 9:
            return Codec("blosc", number, name.removeprefix("blosc-"), "shuffle")
        raise SchemaError(f"codec {text!r}: expected none, zstd[:level], blosc-lz4[:level] or blosc-zstd[:level]")

    def metadata(self, itemsize: int) -> list[dict[str, Any]]:
        if self.name == "none":
            return []
        if self.name == "zstd":
            return [{"name": "zstd", "configuration": {"level": self.level, "checksum": False}}]
        configuration = {
            "typesize": self.typesize or itemsize,
            "cname": self.cname,
            "clevel": self.level,
            "shuffle": self.shuffle,
            "blocksize": self.blocksize,
        }
        return [{"name": "blosc", "configuration": configuration}]

    @staticmethod
    def from_metadata(codecs: list[dict[str, Any]]) -> Codec:
        if not codecs:
            return Codec("none")
        (codec,) = codecs
        configuration = codec.get("configuration", {})
        if codec["name"] == "zstd":
            return Codec("zstd", _integer(configuration["level"], -(1 << 20), 22))
        if codec["name"] != "blosc" or configuration["cname"] not in _BLOSC_NAMES:
            raise FormatError(f"codec {codec!r} is not one that trajstore reads: zstd, blosc")
        return Codec(
            "blosc",
            _integer(configuration["clevel"], 0, 9),
            configuration["cname"],
            configuration["shuffle"] if configuration["shuffle"] in _SHUFFLES else _no_shuffle(configuration),
            _integer(configuration["blocksize"], 0, 1 << 31),
            _integer(configuration["typesize"], 1, 255),
        )

    def encode(self, block: Array) -> bytes:
        """Compress a C-contiguous block and append its checksum."""
        body = self._compress(block)
        return body + crc32c(body).to_bytes(_CRC_BYTES, "little")

    def _compress(self, block: Array) -> bytes:
        if self.name == "zstd":
            return bytes(numcodecs.zstd.compress(block, self.level))
        if self.name == "blosc":
            name, shuffle, typesize = self.cname.encode(), _SHUFFLES[self.shuffle], self.typesize or None
            return bytes(numcodecs.blosc.compress(block, name, self.level, shuffle, self.blocksize, typesize))
        return block.tobytes()

    def decode(self, data: bytes | memoryview, out: Array) -> None:
        """Check the checksum and decompress into a contiguous block, filling all of it.

        Raises:
            CorruptionError: The data is damaged or does not hold exactly one block.
        """
        if len(data) < _CRC_BYTES or crc32c(data) != _CRC_RESIDUE:
            raise CorruptionError("checksum does not match")
        self.check_size(data, out.nbytes)
        try:
            self._decompress(memoryview(data)[:-_CRC_BYTES], out)
        except (ValueError, RuntimeError, IndexError) as error:
            raise CorruptionError(f"can't be decoded: {error}") from error

    def check_size(self, data: bytes | memoryview, expected: int) -> None:
        """Refuse data that does not claim to hold so many bytes."""
        size = self._decoded_bytes(memoryview(data)[:-_CRC_BYTES])
        if size != expected:
            raise CorruptionError(f"holds {size} bytes, expected {expected}")

    def _decoded_bytes(self, body: memoryview) -> int:
        if self.name == "blosc":
            return blosc_content_bytes(body)
        return zstd_content_bytes(body) if self.name == "zstd" else len(body)

    def _decompress(self, body: memoryview, out: Array) -> None:
        if self.name == "blosc":
            numcodecs.blosc.decompress(body, out)
        elif self.name == "zstd":
            numcodecs.zstd.decompress(body, out)
        else:
            out.reshape(-1).view(np.uint8)[:] = np.frombuffer(body, np.uint8)


def _no_shuffle(configuration: Mapping[str, Any]) -> str:
    raise FormatError(f"blosc shuffle {configuration['shuffle']!r}: expected one of {', '.join(_SHUFFLES)}")


def blosc_content_bytes(buffer: memoryview) -> int:
    """Size that a blosc header declares for its content, or -1 where the header does not fit the buffer.

    blosc trusts the sizes in its header, so they are checked before it sees them.
    """
    if len(buffer) < 16 or int.from_bytes(buffer[12:16], "little") != len(buffer):
        return -1
    return int.from_bytes(buffer[4:8], "little")


def zstd_content_bytes(frame: memoryview) -> int:
    """Size that a zstd frame header declares for its content, or -1 where it declares none."""
    if len(frame) < 6 or bytes(frame[:4]) != b"\x28\xb5\x2f\xfd":
        return -1
    descriptor = frame[4]
    flag, single_segment = descriptor >> 6, bool(descriptor & 0x20)
    if flag == 0 and not single_segment:
        return -1
    start = 5 + (not single_segment) + (0, 1, 2, 4)[descriptor & 3]
    width = (1, 2, 4, 8)[flag]
    size = int.from_bytes(frame[start : start + width], "little")
    return size + 256 if flag == 1 else size


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


def _integer(value: object, low: int, high: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise FormatError(f"expected an integer from {low} to {high}, got {value!r:.80}")
    return value


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
        tuple(_integer(n, 1, MAX_CHUNK_BYTES) for n in shape[1:]),
        _integer(chunk_shape[0], 1, MAX_CHUNK_BYTES),
        Codec("none"),
        tuple(attributes.items()),
    )
    return _with_codecs(layout, data["codecs"]), _integer(shape[0], 0, MAX_ROWS)


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
    inner = _integer(configuration["chunk_shape"][0], 1, MAX_CHUNK_BYTES)
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
