"""Checks checkpoints: their records, the extents they list, and the arrays of their state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trajstore.errors import CheckpointNotFoundError, CorruptionError, FormatError
from trajstore.format.array_layout import ArrayLayout
from trajstore.format.checkpoint_record import Checkpoint, parse_checkpoint
from trajstore.format.commit_record import CommitRecord, StreamExtent
from trajstore.format.ids import is_stream_id
from trajstore.format.packed_streams import shown_records
from trajstore.store.checkpoints import parts_of, place_of, read_state
from trajstore.store.verify.chunks import chunk_faults, chunk_problems
from trajstore.store.verify.decoding import ChunkReader
from trajstore.store.verify.inspection import CheckedArray, Inspection, by_creation
from trajstore.store.verify.nodes import copy_fault
from trajstore.store.verify.report import VerifyProblem, without_subject

_STATE_BYTES = 256 << 20  # a state up to this size is also decoded as a whole


def read_complete_checkpoints(inspection: Inspection) -> list[Checkpoint]:
    """Read all complete checkpoints; report damaged ones, and note incomplete ones."""
    storage = inspection.storage
    names = storage.list_names("checkpoints")
    ids = [name for name in names if is_stream_id(name)]
    for name in sorted(set(names) - {"zarr.json", *ids}):
        inspection.note(f"checkpoints/{name}", "not a checkpoint; readers ignore it")
    complete = []
    found = storage.map(lambda id_: _checkpoint_or_fault(inspection, id_), ids)
    for id_, checkpoint in zip(ids, found, strict=True):
        where = f"checkpoint '{id_}'"
        if isinstance(checkpoint, str):
            inspection.problem(where, checkpoint)
        elif not checkpoint.is_complete:
            inspection.note(where, "not complete: it is being saved or removed, or that was interrupted")
        else:
            complete.append(checkpoint)
    inspection.report.counts["checkpoints"] = len(complete)
    return complete


def _checkpoint_or_fault(inspection: Inspection, id_: str) -> Checkpoint | str:
    """A checkpoint, or a description of its fault."""
    storage = inspection.storage
    try:
        return parse_checkpoint(storage.get(f"checkpoints/{id_}/zarr.json"), id_, storage.display)[0]
    except FileNotFoundError:
        return "its record is missing, so it can't be read"
    except FormatError as error:
        return without_subject(error, f"{storage.display}/checkpoints/{id_}")


def records_shown(inspection: Inspection, checkpoint: Checkpoint) -> dict[str, CommitRecord]:
    """The records of a checkpoint's streams, cut to its extents; reports streams that do not fit them."""
    records: dict[str, CommitRecord] = {}
    for stream, extent in checkpoint.streams.items():
        newest = _newest_record(inspection, stream, extent)
        where = f"checkpoint '{checkpoint.id}', stream '{stream}'"
        if isinstance(newest, str):
            inspection.problem(where, f"its commit record: {newest}")
            continue
        try:
            shown = extent.truncate(newest)
            records[shown.as_stored().id] = shown.as_stored()
            is_same_copy = extent.record is not None and extent.record.folder == shown.folder
            if is_same_copy and extent.record is not None and extent.record.layouts != shown.layouts:
                inspection.problem(where, "its copy of the commit record describes other arrays")
        except CorruptionError as error:
            inspection.problem(where, without_subject(error, f"stream '{stream}'"))
    return by_creation(records)


def _newest_record(inspection: Inspection, stream: str, extent: StreamExtent) -> CommitRecord | str:
    """The record of the stored stream that an extent names, or of the copy that replaced it; or its fault."""
    place = stream if extent.record is None else extent.record.as_stored().id
    found = inspection.records.get(place) or inspection.record_or_fault(place)
    if isinstance(found, CommitRecord):
        return found if place == stream else found.shown()
    names = [name for name in inspection.storage.list_names("streams") if is_stream_id(name)]
    others = inspection.storage.map(inspection.record_or_fault, names)
    copies = shown_records(other for other in others if isinstance(other, CommitRecord))
    return next((copy for copy in copies if copy.id == stream and copy.location), found)


def check_states(inspection: Inspection) -> None:
    """Check the state of every checkpoint of `Inspection.checkpoints`, of all ranks."""
    for checkpoint in inspection.checkpoints:
        for rank in parts_of(checkpoint):
            _check_part(inspection, checkpoint, rank)


def _check_part(inspection: Inspection, checkpoint: Checkpoint, rank: int | None) -> None:
    storage = inspection.storage
    place, where = place_of(checkpoint.id, rank), f"checkpoint '{checkpoint.id}'"
    where += "" if rank is None else f", part of rank {rank}"
    try:
        _, _, nodes = parse_checkpoint(storage.get(f"{place}/zarr.json"), checkpoint.id, storage.display)
        problems = _state_problems(inspection, place, where, nodes)
        if not problems and not inspection.is_fast and _state_bytes(nodes) <= _STATE_BYTES:
            read_state(storage, checkpoint, rank)
    except (FileNotFoundError, CheckpointNotFoundError):
        if rank is not None and not isinstance(_checkpoint_or_fault(inspection, checkpoint.id), str):
            inspection.problem(where, "is missing")
        else:
            inspection.note(where, "was removed during verification")
    except (FormatError, CorruptionError) as error:
        inspection.problem(where, without_subject(error, f"{storage.display}/{place}"))
    else:
        inspection.report.problems += problems


def _state_problems(
    inspection: Inspection, place: str, where: str, nodes: Mapping[str, Any]
) -> list[VerifyProblem]:
    """Problems of the groups and arrays below a checkpoint or a part."""
    problems = []
    for path, node in nodes.items():
        name = f"{where}, {node.get('node_type')} '{path}'"
        if fault := copy_fault(inspection, f"{place}/{path}/zarr.json", node):
            problems.append(VerifyProblem(f"{name}, zarr.json", fault))
        if node.get("node_type") == "array":
            layout, length = ArrayLayout.from_metadata(node, path)
            prefix = f"{place}/{path}"
            array = CheckedArray(name, prefix, layout, length, 0, _chunk_reader(inspection, prefix, layout))
            inspection.n_chunks += len(array.chunks)  # known only now
            faults, _ = chunk_faults(inspection, array, is_read=not inspection.is_fast)
            problems += chunk_problems(array, faults)
    return problems


def _chunk_reader(inspection: Inspection, prefix: str, layout: ArrayLayout) -> ChunkReader:
    return lambda index, buffer: inspection.storage.get_into(f"{prefix}/{layout.chunk_key(index)}", buffer)


def _state_bytes(nodes: Mapping[str, Any]) -> int:
    """Decoded size of the arrays of a state."""
    arrays = [ArrayLayout.from_metadata(n, path) for path, n in nodes.items() if n.get("node_type") == "array"]
    return sum(layout.row_bytes * rows for layout, rows in arrays)
