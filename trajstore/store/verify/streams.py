"""Checks streams one by one: nodes, chunks, spans, returns, texts, derived columns and episodes."""

from __future__ import annotations

from trajstore.store.stream_reader import StreamReader
from trajstore.store.verify.chunks import SPAN_ARRAYS, check_array
from trajstore.store.verify.derived_columns import check_derived_columns
from trajstore.store.verify.episodes import check_episodes
from trajstore.store.verify.inspection import CheckedStream, Inspection
from trajstore.store.verify.leftovers import note_unnamed_nodes
from trajstore.store.verify.nodes import check_nodes
from trajstore.store.verify.returns import ReturnCheck
from trajstore.store.verify.spans import check_spans, check_texts


def check_streams(inspection: Inspection) -> None:
    """Check every stream of `Inspection.records`, and the episodes that they hold together."""
    streams = _checked_streams(inspection)
    inspection.n_chunks = sum(len(s.array(path).chunks) for s in streams for path in s.record.layouts)
    by_shown: dict[str, list[CheckedStream]] = {}
    for stream in streams:
        by_shown.setdefault(stream.record.shown_as, []).append(stream)
    for shown_as, members in by_shown.items():
        for stream in members:
            _check_stream(inspection, stream)
        check_episodes(inspection, shown_as, members)
        for stream in members:
            stream.spans = None  # frees the memory for the next stream


def _checked_streams(inspection: Inspection) -> list[CheckedStream]:
    records = list(inspection.records.values())
    wanted = inspection.wanted_rows(records)
    hidden: dict[str, tuple[tuple[int, int], ...]] = {}
    for record in records:
        if replaces := record.replaces:
            hidden[replaces.stream] = (*hidden.get(replaces.stream, ()), (replaces.start, replaces.stop))
    return [
        CheckedStream(r, StreamReader(inspection.storage, r), min(r.rows, wanted[r.id]), hidden.get(r.id, ()))
        for r in records
    ]


def _check_stream(inspection: Inspection, stream: CheckedStream) -> None:
    counts = inspection.report.counts
    counts["rows"] += stream.record.rows
    counts["spans"] += stream.record.spans
    newest = check_nodes(inspection, stream)
    if newest is not None and inspection.at is None:
        note_unnamed_nodes(inspection, stream, newest)
    are_sound = [check_array(inspection, stream, path) for path in SPAN_ARRAYS]
    if all(are_sound):
        check_spans(inspection, stream)
    _check_steps(inspection, stream)
    check_array(inspection, stream, "spans/text")
    if stream.spans is not None and not inspection.is_fast:
        check_texts(inspection, stream)
    check_derived_columns(inspection, stream)


def _check_steps(inspection: Inspection, stream: CheckedStream) -> None:
    returns = ReturnCheck(stream) if stream.spans is not None and not inspection.is_fast else None
    reward = f"steps/{stream.record.schema.reward}"
    for path in stream.record.layouts:
        if path.startswith("steps/"):
            check_array(inspection, stream, path, returns if path == reward else None)
    if returns is not None:
        inspection.problems_of_one_kind([*returns.faults()], stream.name)
