"""Checks the chunk objects of one array."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from trajstore.errors import CorruptionError, StorageError
from trajstore.format.commit_record import CommitRecord
from trajstore.schema import Array
from trajstore.store.stream_reader import ChunkError, MissingChunkError
from trajstore.store.verify.inspection import CheckedArray, CheckedStream, Inspection, RowConsumer
from trajstore.store.verify.leftovers import note_leftover_chunks
from trajstore.store.verify.report import VerifyProblem

SPAN_ARRAYS = ("spans/ints", "spans/floats")
_WAVE_CHUNKS = 64
_WAVE_BYTES = 64 << 20


def check_array(
    inspection: Inspection, stream: CheckedStream, path: str, consume: RowConsumer | None = None
) -> bool:
    """Check the chunks of a stream's array; returns whether all are sound.

    Args:
        inspection: Takes the problems and notes.
        stream: The stream.
        path: The array.
        consume: Called with the rows of every chunk, in order, if chunks are read.
    """
    array = stream.array(path)
    is_read = not inspection.is_fast or path in SPAN_ARRAYS
    faults, names = chunk_faults(inspection, array, is_read=is_read, consume=consume)
    if faults:
        faults = _still_wrong(inspection, stream, path, faults)
    inspection.report.problems += chunk_problems(array, faults)
    if inspection.at is None:
        note_leftover_chunks(inspection, array, names)
    return not faults


def chunk_faults(
    inspection: Inspection, array: CheckedArray, *, is_read: bool, consume: RowConsumer | None = None
) -> tuple[dict[int, str], Iterable[str]]:
    """Faults of an array's chunks, by index, and the names of its objects.

    Args:
        inspection: Counts chunks and bytes.
        array: The array.
        is_read: Read and decode every chunk; otherwise compare only the sizes of objects.
        consume: As for `check_array`.
    """
    if is_read:
        return _faults_by_reading(inspection, array, consume), inspection.storage.list_names(array.prefix)
    below = inspection.storage.tree_sizes(array.prefix)
    sizes = {key.removeprefix(f"{array.prefix}/"): size for key, size in below.items()}
    return _faults_by_size(inspection, array, sizes), sizes


def chunk_problems(array: CheckedArray, faults: Mapping[int, str]) -> list[VerifyProblem]:
    """Faults of chunks as problems: neighbouring chunks with the same fault are one problem."""
    problems = []
    for first, last, what in _runs(faults):
        chunks = f"chunk {first}" if first == last else f"chunks {first} to {last}"
        rows = f"rows {array.rows(first)[0]} to {array.rows(last)[1]}"
        problems.append(VerifyProblem(f"{array.name}, {chunks} ({rows})", what))
    return problems


def _runs(faults: Mapping[int, str]) -> Iterator[tuple[int, int, str]]:
    """Runs of neighbouring chunks with the same fault: first index, last index, fault."""
    numbered = enumerate(sorted(faults.items()))
    for (_, what), run in itertools.groupby(numbered, key=lambda item: (item[1][0] - item[0], item[1][1])):
        indexes = [index for _, (index, _) in run]
        yield indexes[0], indexes[-1], what


def _faults_by_reading(inspection: Inspection, array: CheckedArray, consume: RowConsumer | None) -> dict[int, str]:
    faults: dict[int, str] = {}

    def read(index: int) -> tuple[int, Array | str | None]:
        n_bytes, found = _decoded(inspection, array, index)
        return n_bytes, found if consume is not None or isinstance(found, str) else None

    for wave in _waves(array):
        for index, (n_bytes, found) in zip(wave, inspection.storage.map(read, wave), strict=True):
            inspection.report.counts["bytes"] += n_bytes
            if isinstance(found, str):
                faults[index] = found
            if consume is not None:
                start, stop = array.rows(index)
                consume(start, stop, found[: stop - start] if isinstance(found, np.ndarray) else None)
        inspection.count_chunks(len(wave))
    return faults


def _waves(array: CheckedArray) -> Iterator[range]:
    """The chunks of an array in waves whose decoded size is bounded."""
    n = max(1, min(_WAVE_CHUNKS, _WAVE_BYTES // max(1, array.layout.chunk_bytes)))
    return (array.chunks[i : i + n] for i in range(0, len(array.chunks), n))


def _decoded(inspection: Inspection, array: CheckedArray, index: int) -> tuple[int, Array | str]:
    """The stored size of a chunk, and its rows or its fault."""
    layout = array.layout
    try:
        data = array.read(index)
        block = np.empty((layout.chunk_rows, *layout.row_shape), layout.dtype)
        layout.decode(data, block)
    except (MissingChunkError, FileNotFoundError):
        return 0, "missing"
    except ChunkError as error:
        return 0, str(error.__cause__)
    except CorruptionError as error:
        return len(data), str(error)
    except StorageError as error:
        inspection.storage.list_names("")  # raises if the whole storage fails, not only this object
        return 0, f"can't be read: {error}"
    return len(data), block


def _faults_by_size(inspection: Inspection, array: CheckedArray, sizes: Mapping[str, int]) -> dict[int, str]:
    faults: dict[int, str] = {}
    counted: set[str] = set()  # a shard holds many chunks
    for index in array.chunks:
        key = array.layout.chunk_key(index)
        if key not in sizes:
            faults[index] = "missing"
        elif fault := _size_fault(array, index, sizes[key]):
            faults[index] = fault
        counted.add(key)
    inspection.report.counts["bytes"] += sum(sizes.get(key, 0) for key in counted)
    inspection.count_chunks(len(array.chunks))
    return faults


def _size_fault(array: CheckedArray, index: int, size: int) -> str | None:
    """What is wrong with the size of an object: less or more than its codec can produce.

    A shard holds at least the committed chunks; those of a commit that was never completed may follow.
    """
    layout, per = array.layout, array.layout.chunks_per_shard
    n, n_chunks = layout.chunk_bytes, min(per, array.chunks.stop - index // per * per)
    low, high = {"none": (n, n), "blosc": (16, n + 16), "zstd": (9, n + n // 128 + 512)}[layout.codec.name]
    low, high = (low + 4) * n_chunks, (high + 4) * per
    if layout.shard_rows is not None:
        low, high = low + layout.shard_index_bytes, high + layout.shard_index_bytes
    if low <= size <= high:
        return None
    return f"has {size} bytes, expected {low}" if low == high else f"has {size} bytes, expected {low} to {high}"


def _still_wrong(
    inspection: Inspection, stream: CheckedStream, path: str, faults: dict[int, str]
) -> dict[int, str]:
    """Drop the faults of chunks that were evicted or overwritten during verification."""
    storage, layout, id_ = inspection.storage, stream.record.layouts[path], stream.record.id
    existing = set(storage.list_names("checkpoints"))
    inspection.checkpoints = [c for c in inspection.checkpoints if c.id in existing]
    found = storage.map(inspection.record_or_fault, list(inspection.records))
    newest = {record.id: record for record in found if isinstance(record, CommitRecord)}
    if id_ not in newest:
        inspection.note(stream.name, "was removed during verification")
        return {}
    if path.startswith("columns/"):
        _, target, name, _, _ = path.split("/")
        before, now = (r.columns.get(target, {}).get(name) for r in (stream.record, newest[id_]))
        return {} if before and now and now.generation > before.generation else faults
    first = inspection.wanted_rows(newest.values())[id_] if path.startswith("steps/") else 0
    return {index: what for index, what in faults.items() if (index + 1) * layout.chunk_rows > first}
