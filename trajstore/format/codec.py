"""Compression and checksums of chunks.

Functions import numcodecs and crc32c, so a program that only asks for names of trajstore does not wait for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from trajstore.errors import CorruptionError, FormatError, SchemaError
from trajstore.format.blosc_blocks import MAX_BLOCK_BYTES, encode_blocks
from trajstore.format.json_values import parse_bounded_integer
from trajstore.schema import Array

CRC_BYTES = 4
_CRC_RESIDUE = 0x48674BC7  # the checksum of any data that ends in its own checksum; checking it needs no copy
_SHUFFLES = {"noshuffle": 0, "shuffle": 1, "bitshuffle": 2}
_BLOSC_NAMES = ("lz4", "lz4hc", "blosclz", "zstd", "snappy", "zlib")


def load_compressors() -> None:
    """Import the compressors before threads use them: a child that is forked during an import can't import them."""
    import crc32c  # noqa: F401
    import numcodecs.blosc
    import numcodecs.zstd  # noqa: F401


def crc32c(data: bytes | memoryview) -> int:
    """CRC-32C of the data; releases the GIL unless the data is small."""
    import crc32c as package

    checksum: int = package.crc32c(data)
    return checksum


def is_intact(data: bytes | memoryview) -> bool:
    """Whether data that ends in its own checksum matches it."""
    return len(data) >= CRC_BYTES and crc32c(data) == _CRC_RESIDUE


@dataclass(frozen=True, slots=True)
class Codec:
    """The compressor of an array's chunks; a ``crc32c`` checksum always follows the compressed bytes."""

    name: str  # none | zstd | blosc
    level: int = 0
    cname: str = ""
    shuffle: str = "noshuffle"
    blocksize: int = 0
    typesize: int = 0  # bytes of one element for blosc's shuffle; 0: the size of the dtype

    @staticmethod
    def parse(text: str) -> Codec:
        """Parse ``none``, ``zstd[:level]``, ``blosc-lz4[:level]`` or ``blosc-zstd[:level]``.

        Raises:
            SchemaError: The text is none of these.
        """
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
        """The compressor as Zarr metadata: a list of one codec, or of none."""
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
        """Parse what `metadata` gives.

        Raises:
            FormatError: The codec is not one that trajstore reads, or a value is out of range.
        """
        if not codecs:
            return Codec("none")
        (codec,) = codecs
        configuration = codec.get("configuration", {})
        if codec["name"] == "zstd":
            return Codec("zstd", parse_bounded_integer(configuration["level"], -(1 << 20), 22))
        if codec["name"] != "blosc" or configuration["cname"] not in _BLOSC_NAMES:
            raise FormatError(f"codec {codec!r} is not one that trajstore reads: zstd, blosc")
        return Codec(
            "blosc",
            parse_bounded_integer(configuration["clevel"], 0, 9),
            configuration["cname"],
            configuration["shuffle"] if configuration["shuffle"] in _SHUFFLES else _no_shuffle(configuration),
            parse_bounded_integer(configuration["blocksize"], 0, 1 << 31),
            parse_bounded_integer(configuration["typesize"], 1, 255),
        )

    @property
    def has_blocks(self) -> bool:
        """Whether chunks consist of small blocks of zstd, each of which can be decoded alone."""
        is_zstd = self.name == "blosc" and self.cname == "zstd" and self.shuffle != "bitshuffle"
        return is_zstd and 0 < self.blocksize <= MAX_BLOCK_BYTES

    def encode(self, chunk: Array) -> bytes:
        """Compress a C-contiguous array and append the checksum."""
        body = self._compress(chunk)
        return b"".join((body, crc32c(body).to_bytes(CRC_BYTES, "little")))

    @property
    def _writes_blocks(self) -> bool:
        return self.has_blocks and self.shuffle == "noshuffle" and self.level == 1

    def _compress(self, chunk: Array) -> bytes | memoryview:
        import numcodecs.blosc
        import numcodecs.zstd

        if self.name == "zstd":
            return bytes(numcodecs.zstd.compress(chunk, self.level))
        if self.name == "blosc":
            if self._writes_blocks and self.blocksize < chunk.nbytes:
                return encode_blocks(memoryview(chunk.reshape(-1).view(np.uint8)), self.blocksize)  # type: ignore[arg-type]
            name, shuffle, typesize = self.cname.encode(), _SHUFFLES[self.shuffle], self.typesize or None
            return bytes(numcodecs.blosc.compress(chunk, name, self.level, shuffle, self.blocksize, typesize))
        return memoryview(chunk.reshape(-1).view(np.uint8))  # type: ignore[arg-type]

    def decode(self, data: bytes | memoryview, out: Array) -> None:
        """Check the checksum and decompress into a contiguous array, filling all of it.

        Raises:
            CorruptionError: The data is damaged, or its size is not that of ``out``.
        """
        self.check(data, out.nbytes)
        try:
            self._decompress(memoryview(data)[:-CRC_BYTES], out)
        except (ValueError, RuntimeError, IndexError) as error:
            raise CorruptionError(f"can't be decoded: {error}") from error

    def check(self, data: bytes | memoryview, expected: int) -> None:
        """Refuse data whose checksum does not match, or that does not declare ``expected`` decoded bytes.

        Raises:
            CorruptionError: It is damaged.
        """
        if not is_intact(data):
            raise CorruptionError("checksum does not match")
        self.check_size(data, expected)

    def check_size(self, data: bytes | memoryview, expected: int) -> None:
        """Refuse data whose header does not declare ``expected`` decoded bytes.

        Raises:
            CorruptionError: It declares another size.
        """
        size = self._decoded_bytes(memoryview(data)[:-CRC_BYTES])
        if size != expected:
            raise CorruptionError(f"holds {size} bytes, expected {expected}")

    def _decoded_bytes(self, body: memoryview) -> int:
        if self.name == "blosc":
            return blosc_content_bytes(body)
        return zstd_content_bytes(body) if self.name == "zstd" else len(body)

    def _decompress(self, body: memoryview, out: Array) -> None:
        if self.name == "blosc":
            import numcodecs.blosc

            numcodecs.blosc.decompress(body, out)
        elif self.name == "zstd":
            import numcodecs.zstd

            numcodecs.zstd.decompress(body, out)
        else:
            out.reshape(-1).view(np.uint8)[:] = np.frombuffer(body, np.uint8)


def _no_shuffle(configuration: Mapping[str, Any]) -> str:
    raise FormatError(f"blosc shuffle {configuration['shuffle']!r}: expected one of {', '.join(_SHUFFLES)}")


def blosc_content_bytes(buffer: memoryview) -> int:
    """Decoded size that a blosc header declares, or -1 if the header does not fit the buffer.

    blosc trusts the sizes in its header, so callers check them before they call blosc.
    """
    if len(buffer) < 16 or int.from_bytes(buffer[12:16], "little") != len(buffer):
        return -1
    return int.from_bytes(buffer[4:8], "little")


def zstd_content_bytes(frame: memoryview) -> int:
    """Decoded size that a zstd frame header declares, or -1 if it declares none."""
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
