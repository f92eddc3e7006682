"""Layout and codec of one array."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trajstore import CorruptionError, Field, FormatError, SchemaError
from trajstore.format.array_layout import (
    MAX_CHUNK_BYTES,
    ArrayLayout,
    chunk_rows_for,
    compressor_for,
    is_compressible,
)
from trajstore.format.codec import Codec, blosc_content_bytes, zstd_content_bytes
from trajstore.schema import as_array
from trajstore.testing import strategies as ours

PIXELS = Field("uint8", (84, 84))


# ---- rows in a chunk -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "is_compressed", "rows"),
    [
        (PIXELS, True, 64),  # 512 KiB over 7056 bytes, rounded down to a power of two
        (PIXELS, False, 32),  # 256 KiB
        (Field("uint8", (210, 160, 3)), True, 4),
        (Field("uint8", (210, 160, 3)), False, 2),
        (Field("float32", (64,)), True, 512),  # 128 KiB over 256 bytes
        (Field("float32", (64,)), False, 512),
        (Field("float32"), False, 16384),
        (Field("bool"), True, 16384),
        (Field("uint8", (1 << 22,)), True, 1),
    ],
)
def test_rows_in_a_chunk_follow_from_the_size_of_a_row(spec: Field, is_compressed: bool, rows: int) -> None:
    assert chunk_rows_for(spec, is_compressed=is_compressed) == rows


def test_rows_in_a_chunk_may_be_given() -> None:
    assert chunk_rows_for(Field("float32", chunk_rows=3), is_compressed=True) == 3


@given(ours.fields(), st.booleans())
def test_rows_in_a_chunk_are_a_power_of_two_and_its_bytes_bounded(spec: Field, is_compressed: bool) -> None:
    free = Field(spec.dtype, spec.shape)
    rows = chunk_rows_for(free, is_compressed=is_compressed)
    assert rows & (rows - 1) == 0
    assert rows * free.row_bytes <= 512 << 10


# ---- codecs --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "codec"),
    [
        ("none", Codec("none")),
        ("zstd", Codec("zstd", 1)),
        ("zstd:22", Codec("zstd", 22)),
        ("zstd:-7", Codec("zstd", -7)),
        ("blosc-lz4", Codec("blosc", 5, "lz4", "shuffle")),
        ("blosc-lz4:0", Codec("blosc", 0, "lz4", "shuffle")),
        ("blosc-zstd", Codec("blosc", 3, "zstd", "shuffle")),
        ("blosc-zstd:9", Codec("blosc", 9, "zstd", "shuffle")),
    ],
)
def test_codecs_are_read_from_text(text: str, codec: Codec) -> None:
    assert Codec.parse(text) == codec


@pytest.mark.parametrize(
    "text",
    ["", "gzip", "none:1", "zstd:23", "zstd:-8", "blosc", "blosc-lz4:10", "blosc-lz4:-1", "blosc-gzip", "ZSTD"],
)
def test_text_that_is_no_codec_is_refused(text: str) -> None:
    with pytest.raises(SchemaError, match=f"codec '{text}': expected none, zstd"):
        Codec.parse(text)


def test_a_level_is_a_number() -> None:
    with pytest.raises(SchemaError, match="codec 'zstd:fast': level 'fast' is not a number"):
        Codec.parse("zstd:fast")


@pytest.mark.parametrize(("dtype", "codec"), [("uint8", "zstd:1"), ("bool", "zstd:1"), ("float32", "blosc-lz4:5")])
def test_the_codec_follows_from_the_dtype(dtype: str, codec: str) -> None:
    assert compressor_for(Field(dtype, (84, 84)), 8) == Codec.parse(codec)


def test_wide_rows_of_bytes_lie_in_blocks_of_a_few_rows() -> None:
    assert compressor_for(Field("uint8", (84, 84)), 64) == Codec("blosc", 1, "zstd", "noshuffle", 8 * 84 * 84, 1)
    assert compressor_for(Field("uint8", (224, 224)), 8).blocksize == 4 * 224 * 224
    assert compressor_for(Field("uint8", (63, 64)), 128) == Codec.parse("zstd:1")
    assert compressor_for(Field("uint8", (84, 84), codec="zstd:3"), 64) == Codec.parse("zstd:3")


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (Field("float32", (64,)), False),
        (Field("float64"), False),
        (Field("bfloat16", (8,)), False),
        (Field("int64"), True),
        (Field("uint16", (84, 84)), True),
        (Field("bool"), True),
        (Field("uint8", (84, 84)), True),
        (Field("uint8", (64,)), True),
        (Field("uint8", (63,)), False),
        (Field("int8"), False),
    ],
)
def test_dtype_and_shape_tell_what_is_worth_compressing(spec: Field, expected: bool) -> None:
    assert is_compressible(spec) is expected
    assert (ArrayLayout.of(spec).codec.name != "none") is expected


def test_a_field_with_a_codec_or_with_chunks_of_its_own_gets_what_it_declares() -> None:
    for is_compressed in (None, True, False):
        for codec in ("none", "zstd:3"):
            layout = ArrayLayout.of(Field("float32", (64,), codec=codec), is_compressed=is_compressed)
            assert layout.codec == Codec.parse(codec)
        layout = ArrayLayout.of(Field("float32", chunk_rows=4), is_compressed=is_compressed, shard_rows=8)
        assert (layout.codec, layout.chunk_rows, layout.shard_rows) == (Codec.parse("blosc-lz4"), 4, None)
    assert ArrayLayout.of(Field("float32", chunk_rows=4, shard_rows=12)).shard_rows == 12


def test_channels_of_frames_are_taken_apart() -> None:
    codec = compressor_for(Field("uint8", (84, 84, 4)), 32)
    assert codec == Codec("blosc", 1, "zstd", "shuffle", 32 * 84 * 84 * 4, 4)
    layout = ArrayLayout.of(Field("uint8", (6, 5, 3), chunk_rows=4))
    block = np.random.default_rng(0).integers(0, 9, (4, 6, 5, 3)).astype(np.uint8)
    assert (layout.decode_new(layout.encode(block)) == block).all()
    assert ArrayLayout.from_metadata(layout.metadata(7), "x")[0] == layout


@st.composite
def blocks(draw: st.DrawFn) -> tuple[ArrayLayout, Any]:
    spec = draw(ours.fields())
    layout = ArrayLayout.of(spec)
    return layout, as_array("", draw(ours.values(spec, (layout.chunk_rows,))))[0]


@given(blocks())
@settings(deadline=None)
def test_encoding_and_decoding_give_back_every_bit(case: tuple[ArrayLayout, Any]) -> None:
    layout, block = case
    out = np.full_like(block, 1)
    layout.decode(layout.encode(np.ascontiguousarray(block)), out)
    assert out.tobytes() == block.tobytes()


@given(blocks())
@settings(deadline=None)
def test_encoding_the_same_rows_gives_the_same_bytes(case: tuple[ArrayLayout, Any]) -> None:
    layout, block = case
    assert layout.encode(np.ascontiguousarray(block)) == layout.encode(block.copy())


@given(blocks(), st.data())
@settings(deadline=None)
def test_any_flipped_bit_is_seen(case: tuple[ArrayLayout, Any], data: st.DataObject) -> None:
    layout, block = case
    encoded = bytearray(layout.encode(np.ascontiguousarray(block)))
    bit = data.draw(st.integers(0, 8 * len(encoded) - 1))
    encoded[bit // 8] ^= 1 << bit % 8
    with pytest.raises(CorruptionError, match="checksum does not match"):
        layout.decode(bytes(encoded), np.empty_like(block))


@given(st.binary(max_size=200), st.sampled_from(ours.CODECS))
@settings(deadline=None)
def test_noise_is_corruption(noise: bytes, codec: str) -> None:
    with pytest.raises(CorruptionError):
        Codec.parse(codec).decode(noise, np.empty(64, np.uint8))


@pytest.mark.parametrize("codec", ours.CODECS)
@pytest.mark.parametrize("n", [0, 63, 65, 640])
def test_a_block_of_another_size_is_corruption(codec: str, n: int) -> None:
    encoded = Codec.parse(codec).encode(np.zeros(n, np.uint8))
    with pytest.raises(CorruptionError, match=f"holds {n} bytes, expected 64"):
        Codec.parse(codec).decode(encoded, np.empty(64, np.uint8))


@pytest.mark.parametrize("codec", ["zstd:1", "zstd:19", "zstd:-5"])
@pytest.mark.parametrize("n", [0, 1, 255, 256, 65_791, 65_792, 1 << 20])
def test_the_size_in_a_zstd_header_is_found(codec: str, n: int) -> None:
    frame = Codec.parse(codec).encode(np.zeros(n, np.uint8))[:-4]
    assert zstd_content_bytes(memoryview(frame)) == n


@pytest.mark.parametrize("n", [0, 1, 255, 1 << 20])
def test_the_size_in_a_blosc_header_is_found(n: int) -> None:
    buffer = Codec.parse("blosc-lz4").encode(np.zeros(n, np.uint8))[:-4]
    assert blosc_content_bytes(memoryview(buffer)) == n
    assert blosc_content_bytes(memoryview(buffer + b"\0")) == -1


@pytest.mark.parametrize("read", [zstd_content_bytes, blosc_content_bytes])
@pytest.mark.parametrize("data", [b"", b"\0" * 5, b"\x28\xb5\x2f\xfd", b"\x28\xb5\x2f\xfd\0\0"])
def test_a_header_that_is_none_declares_no_size(read: Any, data: bytes) -> None:
    assert read(memoryview(data)) == -1


# ---- layouts -------------------------------------------------------------------------------------------


@given(ours.fields(), st.integers(0, 1 << 40), st.none() | st.integers(1, 8), st.booleans())
@settings(deadline=None)
def test_a_layout_survives_its_metadata(
    spec: Field, rows: int, chunks_per_shard: int | None, index_at_start: bool
) -> None:
    flat = ArrayLayout.of(spec)
    layout = ArrayLayout(
        flat.dtype,
        flat.row_shape,
        flat.chunk_rows,
        flat.codec,
        flat.attributes,
        chunks_per_shard and flat.chunk_rows * chunks_per_shard,
        index_at_start if chunks_per_shard else True,
    )
    assert ArrayLayout.from_metadata(layout.metadata(rows), "x") == (layout, rows)


def test_chunk_keys_name_chunks_and_shards() -> None:
    flat = ArrayLayout(np.dtype("uint8"), (84, 84), 4, Codec("none"))
    assert flat.chunk_key(5) == "c.5.0.0"
    sharded = ArrayLayout(np.dtype("uint8"), (), 4, Codec("none"), (), 12)
    assert [sharded.chunk_key(i) for i in (0, 2, 3, 6)] == ["c.0", "c.0", "c.1", "c.2"]


def test_a_chunk_has_at_most_a_gibibyte() -> None:
    with pytest.raises(SchemaError, match=f"at most {MAX_CHUNK_BYTES}; lower chunk_rows"):
        ArrayLayout.of(Field("uint8", (1 << 20,), chunk_rows=1025))


def test_bfloat16_is_uint16_with_an_attribute() -> None:
    metadata = ArrayLayout.of(Field("bfloat16")).metadata(1)
    assert (metadata["data_type"], metadata["attributes"]) == ("uint16", {"trajstore_dtype": "bfloat16"})


def test_every_array_has_a_checksum_last() -> None:
    for codec in ours.CODECS:
        assert ArrayLayout.of(Field("int32", codec=codec)).metadata(0)["codecs"][-1] == {"name": "crc32c"}


def good() -> dict[str, Any]:
    return ArrayLayout.of(Field("int32", (2,), chunk_rows=4)).metadata(9)


def sharding(**configuration: Any) -> list[dict[str, Any]]:
    layout = ArrayLayout(np.dtype("int32"), (2,), 2, Codec("none"), (), 4)
    codec = layout.metadata(9)["codecs"][0]
    codec["configuration"].update(configuration)
    return [codec]


@pytest.mark.parametrize(
    "change",
    [
        {"zarr_format": 2},
        {"node_type": "group"},
        {"shape": []},
        {"shape": [9]},
        {"shape": [9, 3]},
        {"shape": [-1, 2]},
        {"shape": [9.0, 2]},
        {"shape": [True, 2]},
        {"shape": [1 << 63, 2]},
        {"shape": None},
        {"data_type": "complex64"},
        {"data_type": "bfloat16"},
        {"data_type": []},
        {"fill_value": 1},
        {"fill_value": "NaN"},
        {"chunk_grid": {"name": "rectilinear", "configuration": {"chunk_shape": [4, 2]}}},
        {"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [0, 2]}}},
        {"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [4, 1]}}},
        {"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [1 << 29, 2]}}},
        {"chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}}},
        {"chunk_key_encoding": {"name": "v2"}},
        {"codecs": []},
        {"codecs": ""},
        {"codecs": [{}]},
        {"codecs": [{"name": "bytes", "configuration": {"endian": "little"}}]},
        {"codecs": [{"name": "bytes", "configuration": {"endian": "big"}}, {"name": "crc32c"}]},
        {
            "codecs": [
                {"name": "bytes", "configuration": {"endian": "little"}},
                {"name": "gzip"},
                {"name": "crc32c"},
            ]
        },
        {"codecs": sharding(chunk_shape=[3, 2])},
        {"codecs": sharding(chunk_shape=[2, 1])},
        {"codecs": sharding(chunk_shape=[0, 2])},
        {"codecs": sharding(chunk_shape=[])},
        {"codecs": sharding(index_location="middle")},
        {"codecs": sharding(index_codecs=[{"name": "bytes"}])},
        {"codecs": sharding(codecs=[])},
        {"codecs": sharding(codecs=sharding())},
        {"attributes": None},
    ],
)
def test_metadata_outside_the_format_is_refused(change: dict[str, Any]) -> None:
    ArrayLayout.from_metadata(good(), "x")
    with pytest.raises(FormatError, match="array 'x'"):
        ArrayLayout.from_metadata(good() | change, "x")


@pytest.mark.parametrize("data", [None, [], {}, "x", 3])
def test_what_is_no_metadata_is_refused(data: Any) -> None:
    with pytest.raises(FormatError, match="array 'x'"):
        ArrayLayout.from_metadata(data, "x")
