"""Checks ``zarr.json`` objects: what a group or array says about itself against what a record says about it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trajstore.errors import FormatError
from trajstore.format.array_layout import ArrayLayout
from trajstore.format.commit_record import CommitRecord
from trajstore.format.zarr_json import parse_json
from trajstore.store.verify.inspection import CheckedStream, Inspection
from trajstore.store.verify.report import without_subject

_GROUP_KEYS = frozenset({"zarr_format", "node_type", "attributes", "consolidated_metadata"})


def group_fault(node: Mapping[str, Any]) -> str | None:
    """What is wrong with the metadata of a group; None if nothing."""
    is_group = node.get("zarr_format") == 3 and node.get("node_type") == "group"
    if is_group and set(node) <= _GROUP_KEYS and isinstance(node.get("attributes", {}), dict):
        return None
    return "not a Zarr v3 group"


def scratch_fault(node: Mapping[str, Any]) -> str | None:
    """What is wrong with the metadata of the scratch directory; None if nothing."""
    try:
        is_empty = node["node_type"] == "array" and node["zarr_format"] == 3 and node["shape"] == [0]
    except KeyError:
        is_empty = False
    return None if is_empty else "not a Zarr v3 array of no elements"


def copy_fault(inspection: Inspection, key: str, expected: Mapping[str, Any]) -> str | None:
    """What is wrong with a node that must equal what the record says about it; None if nothing."""
    try:
        node = parse_json(inspection.storage.get(key), key)
    except FileNotFoundError:
        return "missing"
    except FormatError as error:
        return without_subject(error, key)
    return None if node == expected else "differs from what the record says"


def check_nodes(inspection: Inspection, stream: CheckedStream) -> CommitRecord | None:
    """Compare every group and array of a stream with its newest record.

    Returns:
        The newest record; None if it was removed or damaged since it was first read.
    """
    storage = inspection.storage
    try:
        data = storage.get(stream.record.key)  # the newest: no node may be ahead of it
        record = CommitRecord.from_bytes(data, stream.record.id, storage.display)
    except (FileNotFoundError, FormatError):
        inspection.problem(f"{stream.name}, commit record", "was removed or damaged during verification")
        return None
    nodes = parse_json(data, stream.name)["consolidated_metadata"]["metadata"]
    paths = list(record.nodes())

    def fault_of(path: str) -> tuple[str, bool] | None:
        return _node_fault(inspection, record, path, nodes.get(path))

    for path, fault in zip(paths, storage.map(fault_of, paths), strict=True):
        kind = "array" if path in record.layouts else "group"
        where = f"{stream.name}, {kind} '{path}', zarr.json"
        if fault is not None:
            what, is_problem = fault
            (inspection.problem if is_problem else inspection.note)(where, what)
    return record


def _node_fault(inspection: Inspection, record: CommitRecord, path: str, expected: Any) -> tuple[str, bool] | None:
    """What is wrong with a node, and whether it is a problem; None if nothing is wrong."""
    try:
        own = parse_json(inspection.storage.get(f"streams/{record.id}/{path}/zarr.json"), path)
    except FileNotFoundError:
        if _may_be_missing(record, path):
            return "not written yet; its writer is about to write it, or died", False
        return "missing", True
    except FormatError as error:
        return without_subject(error, path), True
    if path not in record.layouts:
        fault = group_fault(own)
        return (fault, True) if fault else None
    fault = _array_fault(own, expected, record, path)
    if fault is None:
        return None
    if record.is_sealed:
        return fault, True
    return _fault_after_commits(inspection, record, path, own, expected, fault)


def _may_be_missing(record: CommitRecord, path: str) -> bool:
    """Whether the writer puts this node only after the record that names it, and no rows depend on it yet."""
    below = (p for p in record.layouts if p == path or p.startswith(f"{path}/"))
    is_new = record.commit == 0 or path.startswith("columns")
    return is_new and not record.is_sealed and not any(record.length(p) for p in below)


def _fault_after_commits(
    inspection: Inspection, record: CommitRecord, path: str, own: dict[str, Any], expected: Any, fault: str
) -> tuple[str, bool] | None:
    """Check an array again with the newest record: its writer may have committed since ``record`` was read."""
    newest = inspection.record_or_fault(record.id)
    if isinstance(newest, str):
        return f"{fault}; its commit record: {newest}", True
    if newest.is_sealed:
        return _node_fault(inspection, newest, path, expected)
    still_wrong = _array_fault(own, expected, newest, path)
    return (still_wrong, True) if still_wrong else None


def _array_fault(own: dict[str, Any], expected: Any, record: CommitRecord, path: str) -> str | None:
    """What is wrong with an array's own metadata, given what the record says about it."""
    try:
        _, rows = ArrayLayout.from_metadata(own, path)
    except FormatError as error:
        return without_subject(error, f"array '{path}'")
    wrong = [key for key in sorted({*own, *expected} - {"shape"}) if own.get(key) != expected.get(key)]
    if path.startswith("steps/") and not record.is_sealed and not record.rows:
        # The first rows choose the layout. A writer that died in that commit has put this, but not its record.
        wrong = [key for key in wrong if key not in ("chunk_grid", "codecs")]
    if wrong or own["shape"][1:] != expected["shape"][1:]:
        return f"differs from what the commit record says of it: {', '.join(wrong or ['shape'])}"
    committed = record.length(path)
    if rows > committed or (record.is_sealed and rows != committed):
        return f"shows {rows} rows, the {'sealed ' if record.is_sealed else ''}record {committed}"
    return None
