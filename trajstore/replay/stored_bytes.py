"""How many bytes the steps that a buffer shows take on the storage, from the sizes of the stored objects."""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from trajstore.format.array_layout import ArrayLayout
from trajstore.format.commit_record import CommitRecord
from trajstore.format.step_bytes import GrownObjects, StepBytes
from trajstore.sampling.index.episode_index import EpisodeIndex
from trajstore.schema import Array
from trajstore.storage import Storage
from trajstore.store.snapshot import Snapshot
from trajstore.writing.writer import Writer

_OBJECT_NAME = re.compile(r"c\.(0|[1-9][0-9]{0,17})(\.0)*\Z")


class StoredBytes:
    """Sizes of the step objects of the streams that a buffer shows.

    Those of the session's own stream are known from its commits. Those of other streams are measured: a stream that
    is met for the first time by one listing for each field, later only its new objects.

    Args:
        storage: Storage of the store.
        writer: The session's writer.
    """

    def __init__(self, storage: Storage, writer: Writer) -> None:
        self._storage = storage
        self._writer = writer
        self._others: dict[str, StepBytes] = {}
        self._folders: dict[str, str] = {}  # by stream: where its objects were measured
        self._last_sizes: dict[str, int] = {}  # by folder: size of the last object that was measured
        self._measuring = threading.Lock()

    def measure(self, snapshot: Snapshot) -> None:
        """Measure the streams of other sessions that have grown; waits for the storage."""
        with self._measuring:
            for record in snapshot.streams:
                known = self._others.get(record.id, StepBytes())
                if self._folders.setdefault(record.id, record.folder) != record.folder:  # it was packed
                    known, self._folders[record.id] = StepBytes(), record.folder
                if record.id != self._writer.stream and record.rows > known.rows:
                    known.add(self._new_objects(record, known.rows))
                    self._others = {**self._others, record.id: known}

    def _new_objects(self, record: CommitRecord, start: int) -> list[GrownObjects]:
        """The step objects that hold the rows from ``start`` on; of the first one only what is new to it."""
        arrays = []
        for path, layout in record.layouts.items():
            if path.startswith("steps/"):
                folder = f"{record.folder}/{path}"
                n = layout.shard_rows or layout.chunk_rows
                numbers = range(start // n, -(-record.rows // n))
                sizes = self._looked_up(folder, layout, numbers) if start else self._listed(folder)
                arrays.append(GrownObjects.whole(layout, sizes, start, record.rows))
                known, self._last_sizes[folder] = self._last_sizes.get(folder, 0), int(arrays[-1].n_bytes[-1])
                if start % n:
                    arrays[-1].n_bytes[0] -= known
        return arrays

    def _listed(self, folder: str) -> dict[int, int]:
        found = {key.rpartition("/")[2]: size for key, size in self._storage.tree_sizes(folder).items()}
        return {int(match[1]): size for name, size in found.items() if (match := _OBJECT_NAME.match(name))}

    def _looked_up(self, folder: str, layout: ArrayLayout, numbers: range) -> dict[int, int]:
        keys = [f"{folder}/{layout.chunk_key(number * layout.chunks_per_shard)}" for number in numbers]
        return dict(zip(numbers, self._storage.map(self._size, keys), strict=True))

    def _size(self, key: str) -> int:
        try:
            return self._storage.size(key)
        except FileNotFoundError:  # deleted since
            return 0

    def curves(self) -> dict[str, StepBytes]:
        """The measured streams, by id."""
        return {**self._others, self._writer.stream: self._writer.step_bytes}

    def total(self, n_placed: int) -> float:
        """Bytes of all objects of the measured streams; of the session's own stream those of its first rows."""
        own = self._writer.step_bytes
        n_bytes = own.total if n_placed >= own.rows else float(own.at(np.array([n_placed]))[0])
        return n_bytes + sum(other.total for other in self._others.values())

    def knows(self, snapshot: Snapshot) -> bool:
        """Whether all other streams of a snapshot were measured."""
        ids = {record.id for record in snapshot.streams if record.rows} - {self._writer.stream}
        return ids <= self._others.keys()

    def of(self, index: EpisodeIndex) -> ShownBytes:
        """Bytes of the steps that an index shows; steps that are not committed take none. Reads all spans."""
        return ShownBytes.measured(index, self.curves())


@dataclass(frozen=True, slots=True)
class ShownBytes:
    """Bytes of the logical rows of an index.

    Attributes:
        logical: First logical row of each span.
        row: First row of each span, counted through all streams.
        is_stored: Whether the rows of each span are committed.
        before: Bytes of the spans before each span, and one more element: the bytes of all.
        curve: Rows, counted through all streams, and the bytes up to each of them.
    """

    logical: Array
    row: Array
    is_stored: Array
    before: Array
    curve: tuple[Array, Array]

    @staticmethod
    def measured(index: EpisodeIndex, curves: Mapping[str, StepBytes]) -> ShownBytes:
        logical, n, row, source = index.shown_spans()
        first, curve = _joined(index.numbers, curves)
        row, is_stored = row + first[source], first[source] >= 0
        n_bytes = np.interp(row + n, *curve) - np.interp(row, *curve)
        before = np.append(0, np.cumsum(np.where(is_stored, n_bytes, 0)))
        return ShownBytes(logical, row, is_stored, before, curve)

    @property
    def total(self) -> float:
        return float(self.before[-1])

    def up_to(self, logical: Array) -> Array:
        """Bytes of all logical rows before each of these."""
        if not len(self.logical):
            return np.zeros(len(logical))
        span = np.searchsorted(self.logical, logical, side="right").clip(1) - 1
        row = self.row[span]
        inside = np.interp(row + logical - self.logical[span], *self.curve) - np.interp(row, *self.curve)
        found: Array = self.before[span] + np.where(self.is_stored[span], inside, 0)
        return found


def _joined(numbers: Mapping[str, int], curves: Mapping[str, StepBytes]) -> tuple[Array, tuple[Array, Array]]:
    """One curve for all streams, one after the other, and by source the row in it where each stream begins.

    The row is -1 for live rows and for streams that were not measured.
    """
    first, rows, n_bytes = np.full(len(numbers) + 1, -1), [np.zeros(1)], [np.zeros(1)]
    row, total = 1, 0.0
    for name, number in numbers.items():
        if name in curves:
            first[number + 1] = row
            x, y = curves[name].points()
            rows.append(x + row)
            n_bytes.append(y + total)
            row, total = row + int(x[-1]) + 1, total + float(y[-1])
    return first, (np.concatenate(rows), np.concatenate(n_bytes))
