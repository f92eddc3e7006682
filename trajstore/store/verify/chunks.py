"""Checks the chunk objects of one array."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any, Protocol, TypeVar

from trajstore.format.commit_record import CommitRecord
from trajstore.schema import Array
from trajstore.store.verify.decoding import decoded_pieces
from trajstore.store.verify.inspection import CheckedArray, CheckedStream, Inspection
from trajstore.store.verify.leftovers import note_leftover_chunks
from trajstore.store.verify.report import VerifyProblem

SPAN_ARRAYS = ("spans/ints", "spans/floats")
T = TypeVar("T")


class ChunkSums(Protocol[T]):
    """Something that is summed over the rows of an array, chunk by chunk."""

    def of_chunk(self, start: int, stop: int, block: Array | None) -> T:
        """What rows ``[start, stop)``, those of one chunk, add; called in threads. None: the chunk is damaged."""

    def add(self, found: T) -> None:
        """Add what was found in a chunk; called for one chunk after the other, in order."""


def check_array(
    inspection: Inspection, stream: CheckedStream, path: str, sums: ChunkSums[Any] | None = None
) -> bool:
    """Check the chunks of a stream's array; returns whether all are sound.

    Args:
        inspection: Takes the problems and notes.
        stream: The stream.
        path: The array.
        sums: What is summed over the rows of all chunks, if they are read.
    """
    array = stream.array(path)
    is_read = not inspection.is_fast or path in SPAN_ARRAYS
    faults, names = chunk_faults(inspection, array, is_read=is_read, sums=sums)
    if faults:
        faults = _still_wrong(inspection, stream, path, faults)
    inspection.report.problems += chunk_problems(array, faults)
    if inspection.at is None:
        note_leftover_chunks(inspection, array, names)
    return not faults


def chunk_faults(
    inspection: Inspection, array: CheckedArray, *, is_read: bool, sums: ChunkSums[Any] | None = None
) -> tuple[dict[int, str], Iterable[str]]:
    """Faults of an array's chunks, by index, and the names of its objects.

    Args:
        inspection: Counts chunks and bytes.
        array: The array.
        is_read: Read and decode every chunk; otherwise compare only the sizes of objects.
        sums: As for `check_array`.
    """
    if is_read:
        return _faults_by_reading(inspection, array, sums), inspection.storage.list_names(array.prefix)
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


def _faults_by_reading(inspection: Inspection, array: CheckedArray, sums: ChunkSums[Any] | None) -> dict[int, str]:
    faults: dict[int, str] = {}
    visit = None if sums is None else partial(_of_chunk, array, sums)
    for piece in decoded_pieces(inspection.storage, array.source, visit):
        inspection.report.counts["bytes"] += piece.n_bytes
        faults.update(piece.faults)
        for found in piece.results:
            assert sums is not None
            sums.add(found)
        inspection.count_chunks(len(piece.chunks))
    return faults


def _of_chunk(array: CheckedArray, sums: ChunkSums[T], index: int, block: Array | None) -> T:
    start, stop = array.rows(index)
    return sums.of_chunk(start, stop, None if block is None else block[: stop - start])


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
