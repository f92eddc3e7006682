"""Checks of the values of fields, in a sample of rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from trajstore.format.array_layout import compressor_for
from trajstore.inspection.doctor.finding import Finding, Severity, share
from trajstore.inspection.field_statistics import FieldStatistics
from trajstore.schema import Array, Field

_ENOUGH = 50  # rows that a statement about all of them needs
_HUGE = 1e6
_PICTURE_AXES = (2, 3)
_MIN_SIDE = 8
_FITTING_RATIO = 2.5  # of a compression that is worth it
_NO_RATIO = 1.1  # of one that is not


def check_field(spec: Field, found: FieldStatistics, *, is_reward: bool) -> Iterator[Finding]:
    """Check the values of one field."""
    where = f"field '{found.path}'"
    yield from _bad_numbers(where, found, is_reward=is_reward)
    if found.n_rows >= _ENOUGH:
        yield from _constant(where, found, is_reward=is_reward)
    if found.maximum is not None and found.minimum is not None and spec.dtype.startswith(("float", "bfloat")):
        yield from _scale(where, found)
        yield from _float_pictures(where, spec, found)


def _bad_numbers(where: str, found: FieldStatistics, *, is_reward: bool) -> Iterator[Finding]:
    for n, name, code in ((found.n_nan, "NaN", "nan"), (found.n_infinite, "infinite", "infinite")):
        if not n:
            continue
        seen = share(n, found.n_values)
        if n == found.n_values:
            seen = "all values"
        yield Finding(
            code, Severity.ERROR if is_reward or n < found.n_values else Severity.WARNING, where,
            f"{seen} {'are' if n > 1 else 'is'} {name}{_of_sample(found)}",
            "one of them in a batch makes losses and weights NaN",
            "find their cause, and drop or mask these steps; a field that is not used needs no values at all",
        )  # fmt: skip


def _constant(where: str, found: FieldStatistics, *, is_reward: bool) -> Iterator[Finding]:
    if found.is_constant:
        severity = Severity.NOTE if is_reward else Severity.WARNING
        yield Finding(
            "constant-field", severity, where, f"every value is {found.minimum:g}{_of_sample(found)}",
            "it says nothing about a step, and is stored and read for each",
            "check that the right value is recorded; if it is, keep it as metadata of the episodes",
        )  # fmt: skip
        return
    n = found.n_constant or 0
    if n and found.n_components <= 1024 and found.n_nan < found.n_values:
        yield Finding(
            "constant-components", Severity.NOTE, where,
            f"{share(n, found.n_components)} components never change{_of_sample(found)}",
            "they may be parts of an observation that were never filled",
            "check them; divide by a spread only where it is not 0",
        )  # fmt: skip


def _scale(where: str, found: FieldStatistics) -> Iterator[Finding]:
    largest = max(abs(found.minimum or 0), abs(found.maximum or 0))
    if largest > _HUGE:
        yield Finding(
            "huge-values", Severity.NOTE, where, f"values reach {largest:.3g}{_of_sample(found)}",
            "networks learn badly from values of this size", "scale them; check for values that mark 'nothing'",
        )  # fmt: skip


def _float_pictures(where: str, spec: Field, found: FieldStatistics) -> Iterator[Finding]:
    assert found.minimum is not None
    assert found.maximum is not None
    is_picture = len(spec.shape) in _PICTURE_AXES and sorted(spec.shape)[-2] >= _MIN_SIDE
    if is_picture and found.minimum >= 0 and found.maximum <= 255 and spec.row_bytes >= 1024:
        yield Finding(
            "float-pictures", Severity.WARNING, where,
            f"looks like pictures in {spec.dtype}, from {found.minimum:g} to {found.maximum:g}",
            f"uint8 takes {spec.storage_dtype.itemsize} times less memory, and compresses far better",
            "store the bytes of the pictures, and scale batches on the device",
        )  # fmt: skip


def check_precision(path: str, spec: Field, rows: Array) -> Iterator[Finding]:
    """Check whether a narrower dtype would hold the values of some rows exactly."""
    if spec.dtype == "float64" and len(rows) >= _ENOUGH and np.isfinite(rows).any():
        with np.errstate(over="ignore"):
            narrow = rows.astype(np.float32).astype(np.float64)
        if np.array_equal(narrow, rows, equal_nan=True):
            yield Finding(
                "float64", Severity.NOTE, f"field '{path}'",
                f"float32 holds all {len(rows):,} sampled rows exactly",
                "float64 takes twice the memory and disk", "declare the field as float32",
            )  # fmt: skip


def check_compression(path: str, spec: Field, rows: Array, *, is_raw: bool, is_chosen: bool) -> Iterator[Finding]:
    """Check whether the choice between raw and compressed chunks fits the values of some rows.

    Args:
        path: The field.
        spec: The field.
        rows: Consecutive rows, as stored.
        is_raw: Whether it is stored without compression.
        is_chosen: Whether the schema says so, rather than the writer.
    """
    if len(rows) < _ENOUGH or rows.nbytes < 64 << 10:
        return
    codec = compressor_for(replace(spec, codec=None) if is_raw else spec, len(rows))
    ratio = rows.nbytes / len(codec.encode(rows))
    where = f"field '{path}'"
    if is_raw and ratio > _FITTING_RATIO:
        yield Finding(
            "uncompressed", Severity.WARNING if ratio > 2 * _FITTING_RATIO else Severity.NOTE, where,
            f"is stored raw, but sampled rows compress {ratio:.1f}x",
            "it takes that much more disk and, from an object store, time",
            "remove codec='none' from the schema" if is_chosen else "trajstore pack --codec FIELD=blosc-lz4:5",
        )  # fmt: skip
    elif not is_raw and ratio < _NO_RATIO:
        yield Finding(
            "incompressible", Severity.NOTE, where, f"is compressed, but sampled rows compress only {ratio:.2f}x",
            "decoding costs time for nothing", "codec='none' in the schema, or trajstore pack --codec FIELD=none",
        )  # fmt: skip


def _of_sample(found: FieldStatistics) -> str:
    return "" if found.is_complete else f", in a sample of {found.n_rows:,} of {found.n_total_rows:,} rows"
