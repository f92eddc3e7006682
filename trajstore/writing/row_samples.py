"""How well the rows of a first commit compress, measured on a sample."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from trajstore.format.array_layout import ArrayLayout
from trajstore.format.column_layouts import KnownRows
from trajstore.schema import Field, Schema
from trajstore.writing.commit_batch import NewRows

_SAMPLE_BYTES = 1 << 20
_LEAST_ROWS = 64
_LEAST_BYTES = 1 << 10


def sample_rows(schema: Schema, rows: Mapping[str, NewRows], known: KnownRows) -> KnownRows:
    """What the rows of a first commit tell about a stream; the same for the same rows.

    Args:
        schema: The fields.
        rows: The rows, by field.
        known: What was known before.
    """
    shares = {
        path: share for path, spec in schema.fields.items() if (share := _share(spec, rows[path])) is not None
    }
    return replace(known, n_rows=max(map(len, rows.values()), default=0), shares=shares)


def _share(spec: Field, rows: NewRows) -> float | None:
    """Bytes of a sample of rows, compressed, divided by their bytes; None if that is given or can't be told."""
    is_given = spec.chunk_rows is not None or spec.codec == "none"
    if is_given or len(rows) < _LEAST_ROWS or len(rows) * spec.row_bytes < _LEAST_BYTES:
        return None
    layout = ArrayLayout.of(spec, is_compressed=True)
    n_rows = min(len(rows), layout.chunk_rows)
    n_blocks = max(1, min(len(rows) // n_rows, _SAMPLE_BYTES // (n_rows * spec.row_bytes)))
    block = np.empty((n_rows, *layout.row_shape), layout.dtype)
    stored = 0
    for start in np.linspace(0, len(rows) - n_rows, n_blocks).astype(int).tolist():  # spread over all rows
        rows.copy_to(block, start, start + n_rows)
        stored += len(layout.encode(block))
    return stored / (n_blocks * block.nbytes)
