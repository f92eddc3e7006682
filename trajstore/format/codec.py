"""How the bytes of a chunk are compressed and checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import crc32c as crc32c_package
import numcodecs.blosc
import numcodecs.zstd
import numpy as np

from trajstore.errors import CorruptionError, FormatError, SchemaError
from trajstore.schema import Array

_CRC_BYTES = 4
_CRC_RESIDUE = 0x48674BC7  # the checksum of anything that ends in its own checksum: checks it without a copy
_SHUFFLES = {"noshuffle": 0, "shuffle": 1, "bitshuffle": 2}
_BLOSC_NAMES = ("lz4", "lz4hc", "blosclz", "zstd", "snappy", "zlib")


def crc32c(data: bytes | memoryview) -> int:
    """CRC-32C; releases the GIL for all but small data."""
    checksum: int = crc32c_package.crc32c(data)
    return checksum


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
            return Codec("zstd", bounded_integer(configuration["level"], -(1 << 20), 22))
        if codec["name"] != "blosc" or configuration["cname"] not in _BLOSC_NAMES:
            raise FormatError(f"codec {codec!r} is not one that trajstore reads: zstd, blosc")
        return Codec(
            "blosc",
            bounded_integer(configuration["clevel"], 0, 9),
            configuration["cname"],
            configuration["shuffle"] if configuration["shuffle"] in _SHUFFLES else _no_shuffle(configuration),
            bounded_integer(configuration["blocksize"], 0, 1 << 31),
            bounded_integer(configuration["typesize"], 1, 255),
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


def bounded_integer(value: object, low: int, high: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise FormatError(f"expected an integer from {low} to {high}, got {value!r:.80}")
    return value
