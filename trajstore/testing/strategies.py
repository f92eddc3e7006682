"""Hypothesis strategies for schemas, and for data that fit a schema.

Values cover all bit patterns of their dtype: NaNs with different bits, infinities, signed zeros and extremes.

Example:
    @given(st.data())
    def test_round_trip(data):
        schema = data.draw(strategies.schemas())
        episode = data.draw(strategies.episodes(schema))
        ...
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from trajstore.schema import DTYPES, Array, Field, Schema, nest

CODECS = ("none", "zstd", "zstd:-3", "zstd:3", "blosc-lz4", "blosc-lz4:1", "blosc-zstd", "blosc-zstd:5")
_EPISODE_NAMES = ("success", "seed", "level", "task")
_EPISODE_TYPES = ("bool", "int64", "float64", "str")
_INT64 = st.integers(-(1 << 63), (1 << 63) - 1)


def fields(*, final: bool | None = None) -> st.SearchStrategy[Field]:
    """Fields of every dtype and codec, with 0 to 3 axes and small chunks, some of them in shards.

    Args:
        final: Whether the fields have a final value; None draws either.
    """
    return st.builds(
        _field,
        st.sampled_from(sorted(DTYPES)),
        st.lists(st.integers(1, 3), max_size=3).map(tuple),
        st.sampled_from((1, 2, 4, 8)),
        st.sampled_from((None, 1, 2, 4)),
        final=st.booleans() if final is None else st.just(final),
        codec=st.none() | st.sampled_from(CODECS),
    )


def _field(
    dtype: str, shape: tuple[int, ...], chunk_rows: int, shard_chunks: int | None, *, final: bool, codec: str | None
) -> Field:
    shard_rows = None if shard_chunks is None else chunk_rows * shard_chunks
    return Field(dtype, shape, final=final, chunk_rows=chunk_rows, shard_rows=shard_rows, codec=codec)


@st.composite
def schemas(draw: st.DrawFn, *, max_fields: int = 4) -> Schema:
    """Schemas with 1 to ``max_fields`` fields, some of them nested or final, with and without a reward.

    At least one field has no final value, so episodes can be written with and without one.
    """
    flat = {"action": draw(fields(final=False))}
    names = ("observation/pixels", "observation/state", "deep/er/still", "reward", "x.y-z_0", "observation/s.0")
    for name in draw(st.lists(st.sampled_from(names), unique=True, max_size=max_fields - 1)):
        flat[name] = draw(_rewards() if name == "reward" else fields())
    kinds = draw(st.lists(st.sampled_from(_EPISODE_TYPES), max_size=len(_EPISODE_NAMES)))
    return Schema(
        nest(flat),
        episode=dict(zip(_EPISODE_NAMES, kinds, strict=False)),
        reward_alignment=draw(st.sampled_from(("action", "observation"))),
    )


def _rewards() -> st.SearchStrategy[Field]:
    shapes = st.sampled_from(((), (), (1,), (2,)))
    return st.builds(
        Field, st.sampled_from(("float32", "float64", "int16", "bfloat16")), shapes, final=st.booleans()
    )


@st.composite
def values(draw: st.DrawFn, spec: Field, lead: tuple[int, ...] = ()) -> Any:
    """Arrays of shape ``lead + spec.shape`` for a field; torch tensors for bfloat16, which NumPy does not have.

    ``lead`` gives leading axes, such as ``(n_steps,)``.
    """
    rng = np.random.default_rng(draw(st.integers(0, (1 << 32) - 1)))
    kind = draw(st.sampled_from(("bits", "special", "zeros")))
    shape = lead + spec.shape
    bits = _random_special(rng, spec, shape) if kind == "special" else _random_bits(rng, spec, shape)
    if kind == "zeros":
        bits[...] = 0
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16) if spec.dtype == "bfloat16" else bits


def _random_bits(rng: np.random.Generator, spec: Field, shape: tuple[int, ...]) -> Array:
    dtype = spec.storage_dtype
    if dtype.kind == "b":
        return rng.integers(0, 2, shape).astype(bool)
    count = int(np.prod(shape, dtype=np.int64))
    return np.frombuffer(rng.bytes(count * dtype.itemsize), dtype).reshape(shape).copy()


def _random_special(rng: np.random.Generator, spec: Field, shape: tuple[int, ...]) -> Array:
    return np.asarray(rng.choice(_special_values(spec), shape))


def _special_values(spec: Field) -> Array:
    """Return values that are easily changed by mistake: signed zeros, infinities, different NaNs, extremes."""
    dtype = spec.storage_dtype
    if dtype.kind == "b":
        return np.array([False, True])
    if spec.dtype == "bfloat16":
        return np.array([0, 0x8000, 0x7F80, 0xFF80, 0x7FC1, 0xFFC0, 0x7F81, 0x3F80], np.uint16)
    if dtype.kind == "f":
        bits = np.array([np.nan, -np.nan], dtype).view(f"u{dtype.itemsize}")
        numbers = np.array([0.0, -0.0, np.inf, -np.inf, 1.5, np.finfo(dtype).max, np.finfo(dtype).tiny], dtype)
        return np.concatenate([numbers, bits.view(dtype), (bits + 1).view(dtype)])
    info = np.iinfo(dtype)
    return np.array([info.min, info.max, 0, 1], dtype)


@st.composite
def episodes(draw: st.DrawFn, schema: Schema, *, max_steps: int = 20) -> dict[str, Any]:
    """Nested arrays of one episode, in the form of `Writer.append_episode`, with or without the final row."""
    n_steps = draw(st.integers(1, max_steps))
    is_final_required = len(schema.final_fields) == len(schema)
    has_final = bool(schema.final_fields) and (is_final_required or draw(st.booleans()))
    return nest(
        {path: draw(values(spec, (n_steps + (spec.final and has_final),))) for path, spec in schema.fields.items()}
    )


@st.composite
def steps(draw: st.DrawFn, schema: Schema, lead: tuple[int, ...] = (), *, final: bool = False) -> dict[str, Any]:
    """Nested values of steps with the leading axes ``lead``.

    With ``final``, only the fields that have a final value.
    """
    chosen = schema.final_fields if final else tuple(schema)
    return nest({path: draw(values(schema[path], lead)) for path in chosen})


def json_values() -> st.SearchStrategy[Any]:
    """Values that JSON stores and returns unchanged."""
    scalars = st.none() | st.booleans() | st.integers(-(1 << 53), 1 << 53) | st.floats(-1e9, 1e9) | _texts()
    return st.recursive(
        scalars,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_texts(), inner, max_size=3),
        max_leaves=5,
    )


def _texts() -> st.SearchStrategy[str]:
    return st.text(st.characters(codec="utf-8"), max_size=8)


@st.composite
def metadata(draw: st.DrawFn, schema: Schema) -> dict[str, Any]:
    """Metadata of an episode: values of some declared columns, and JSON values under other names."""
    by_type: dict[str, st.SearchStrategy[Any]] = {
        "bool": st.booleans(),
        "int64": _INT64,
        "float64": st.floats() | st.integers(-1000, 1000),
        "str": _texts(),
    }
    declared = {
        name: draw(st.none() | by_type[kind]) for name, kind in schema.episode.items() if draw(st.booleans())
    }
    free = draw(st.dictionaries(_texts().map("free-{}".format), json_values(), max_size=2))
    return declared | free
