"""Chunks of blosc in blocks that can be decoded alone: the container is written here, and its header checked.

A container has a header of 16 bytes, the start of each block, and the blocks, each behind its size.
"""

from __future__ import annotations

import struct

from trajstore.errors import CorruptionError

# Larger blocks do not stay in the processor's cache while rows are copied out of them.
MAX_BLOCK_BYTES = 1 << 20
# At this level zstd does not entropy-code literals. Short blocks then decode in three quarters of the time, and are
# a tenth larger. blosc itself can't ask for it, but reads any frame of zstd.
_LEVEL = -1
_HEADER = struct.Struct("<BBBBIII")
_VERSION, _ZSTD_VERSION, _ZSTD = 2, 1, 4
_BITSHUFFLED, _UNSPLIT = 4, 16  # flags; the upper three bits name the compressor


def encode_blocks(chunk: memoryview, block_bytes: int) -> bytes:
    """Compress bytes, which are not shuffled, in blocks."""
    blocks = [_encode(chunk[start : start + block_bytes]) for start in range(0, len(chunk), block_bytes)]
    starts, at = [], _HEADER.size + 4 * len(blocks)
    for block in blocks:
        starts.append(at)
        at += 4 + len(block)
    flags = _ZSTD << 5 | _UNSPLIT
    parts: list[bytes | memoryview] = [_HEADER.pack(_VERSION, _ZSTD_VERSION, flags, 1, len(chunk), block_bytes, at)]
    parts.append(struct.pack(f"<{len(starts)}I", *starts))
    for block in blocks:
        parts += (len(block).to_bytes(4, "little"), block)
    return b"".join(parts)


def _encode(block: memoryview) -> bytes | memoryview:
    import numcodecs.zstd

    frame = bytes(numcodecs.zstd.compress(block, _LEVEL))
    return frame if len(frame) < len(block) else block  # a block of its own size is not compressed


def check_blocks(data: memoryview) -> int:
    """Check the header of a container that ends with its checksum; returns the decoded size of its blocks.

    Raises:
        CorruptionError: It does not consist of blocks of zstd that can be decoded alone.
    """
    header: tuple[int, ...] = _HEADER.unpack_from(data)
    kind, _, flags, _, n_decoded, n_block, n_encoded = header
    is_known = kind == _VERSION and flags >> 5 == _ZSTD and not flags & _BITSHUFFLED
    fits = 0 < n_block <= min(n_decoded, MAX_BLOCK_BYTES) and n_encoded + 4 == len(data)
    if not is_known or not fits or _HEADER.size + 4 * -(-n_decoded // n_block) > n_encoded:
        raise CorruptionError(f"its header {bytes(data[: _HEADER.size]).hex()} does not name blocks of zstd")
    return n_block
