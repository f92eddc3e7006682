"""Checks the span table of one stream, and the text of its spans."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from trajstore.errors import CorruptionError
from trajstore.format.commit_record import CommitRecord
from trajstore.format.spans import MAX_ENV, End
from trajstore.schema import MAX_METADATA_BYTES, Array, Schema
from trajstore.store.verify.chunks import SPAN_ARRAYS
from trajstore.store.verify.inspection import CheckedStream, Inspection

_TEXT_BYTES = 1 << 20  # text read at a time


def span_name(ints: Array, i: np.integer[Any] | int) -> str:
    return f"episode {ints[i, 0]}, span {i} (rows {ints[i, 3]} to {ints[i, 4]})"


def check_spans(inspection: Inspection, stream: CheckedStream) -> None:
    """Check the values of a stream's span table; sets `CheckedStream.spans` if they are sound."""
    record = stream.record
    try:
        ints, floats = (stream.reader.read_rows(path, 0, record.spans) for path in SPAN_ARRAYS)
    except CorruptionError as error:
        inspection.problem(f"{stream.name}, spans", f"changed during verification: {error}")
        return
    faults = [
        (f"{stream.name}, {span_name(ints, i)}", what)
        for mask, what in _span_faults(ints, floats, record)
        for i in np.flatnonzero(mask)
    ]
    last = int(ints[-1, 4]) if len(ints) else 0
    if last != record.rows:
        faults.append((f"{stream.name}, spans", f"end at row {last}, the record says {record.rows}"))
    inspection.problems_of_one_kind(faults, stream.name)
    if not faults:
        stream.spans = ints, floats


def _span_faults(ints: Array, floats: Array, record: CommitRecord) -> list[tuple[Array, str]]:
    """For each kind of fault, a mask of the spans that have it."""
    episode, env, t_start, start, stop, end, has_final, present, text_stop = ints[:, :9].T
    after_text = np.concatenate([[0], text_stop[:-1]])[: len(ints)]
    after_rows = np.concatenate([[0], stop[:-1]])[: len(ints)]
    return [
        (
            (episode < 0) | (t_start < 0) | (env < 0) | (env >= MAX_ENV),
            "has an episode, step or environment out of range",
        ),
        ((start < 0) | (start > stop) | (stop > record.rows), f"has rows outside the {record.rows} of its stream"),
        (start < after_rows, "begins before the previous span ends"),
        ((end < 0) | (end >= len(End)), f"has an end other than 0 to {len(End) - 1}"),
        ((has_final < 0) | (has_final > 1) | (has_final > stop - start), "has an invalid number of final rows"),
        (
            (present < 0) | (present >> len(record.schema.episode) != 0),
            "has columns that are not in the schema",
        ),
        ((text_stop < after_text) | (text_stop > record.text_bytes), f"has text past {record.text_bytes} bytes"),
        (~np.isfinite(floats[:, 1]), "has a time that is not finite"),
    ]


def check_texts(inspection: Inspection, stream: CheckedStream) -> None:
    """Check the text of every span of a stream whose span table is sound."""
    assert stream.spans is not None
    ints, schema = stream.spans[0], stream.record.schema
    stop = ints[:, 8]
    start = np.concatenate([[0], stop[:-1]])
    faults: list[tuple[str, str]] = []
    for group in _text_groups(start, stop):
        low, high = int(start[group[0]]), int(stop[group[-1]])
        try:
            data = stream.reader.read_text(low, high)
        except CorruptionError:
            continue  # a damaged chunk, already reported
        for i in group:
            text = data[start[i] - low : stop[i] - low]
            if fault := _text_fault(text, int(ints[i, 7]), schema):
                faults.append((f"{stream.name}, {span_name(ints, i)}", fault))
    inspection.problems_of_one_kind(faults, stream.name)


def _text_groups(start: Array, stop: Array) -> Iterator[list[int]]:
    """Indexes of the spans that have text, in groups that are read together."""
    group: list[int] = []
    for i in np.flatnonzero(stop > start):
        if group and stop[i] - start[group[0]] > _TEXT_BYTES:
            yield group
            group = []
        group.append(int(i))
    if group:
        yield group


def _text_fault(text: bytes, present: int, schema: Schema) -> str | None:
    if len(text) > MAX_METADATA_BYTES:
        return f"has {len(text)} bytes of text; at most {MAX_METADATA_BYTES}"
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        return f"has text that is not JSON: {error}"
    if not isinstance(values, dict):
        return f"has text that is a {type(values).__name__}, expected an object"
    for bit, (name, kind) in enumerate(schema.episode.items()):
        if kind == "str" and present >> bit & 1 and not isinstance(values.get(name), str):
            return f"has no text for the episode column '{name}'"
    return None
