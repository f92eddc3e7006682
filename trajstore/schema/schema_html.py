"""Sections of HTML about the fields and the episode columns of a schema."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Any

from trajstore.html_blocks import MAX_ROWS, Section, count, facts, size, table


def fields_section(schema: Mapping[str, Any], row_bytes: Mapping[str, int], *, is_open: bool = False) -> Section:
    """The fields of a step.

    Args:
        schema: As `Schema.to_json` gives it.
        row_bytes: Bytes of one value, by field.
        is_open: Whether it is shown unfolded.
    """
    headings = ["field", "dtype", "shape", "final", ">bytes a step", "declared"]
    fields = schema["fields"]
    rows = [_cells(schema, path, spec, row_bytes[path]) for path, spec in islice(fields.items(), MAX_ROWS)]
    summary = f"{count(len(fields), 'field')}, {size(sum(row_bytes.values()))} a step"
    return Section("Fields", summary, table(headings, rows, len(fields)), is_open)


def columns_section(schema: Mapping[str, Any]) -> Section:
    """The columns that an episode may have."""
    columns = schema["episode"]
    return Section("Episode columns", count(len(columns), "column"), facts(columns.items()) if columns else "")


def _cells(schema: Mapping[str, Any], path: str, spec: Mapping[str, Any], n_bytes: int) -> list[str]:
    reward = f" (reward, with the {schema['reward_alignment']})" if path == schema["reward"] else ""
    shape = " x ".join(map(str, spec["shape"])) or "scalar"
    return [path + reward, spec["dtype"], shape, "yes" if spec["final"] else "", f"{n_bytes:,}", _declared(spec)]


def _declared(spec: Mapping[str, Any]) -> str:
    """What the schema says about storage; the rest is chosen by writers."""
    names = {
        "codec": "codec {}",
        "chunk_rows": "{} rows a chunk",
        "shard_rows": "{} rows a shard",
        "fill": "fill {}",
    }
    return ", ".join(form.format(spec[name]) for name, form in names.items() if spec.get(name) is not None)
