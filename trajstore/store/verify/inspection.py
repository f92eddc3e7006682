"""What all checks share: the store, its records and checkpoints, and the report."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from trajstore.errors import FormatError
from trajstore.format.array_layout import ArrayLayout
from trajstore.format.checkpoint_record import Checkpoint
from trajstore.format.commit_record import CommitRecord
from trajstore.format.marks import Marks
from trajstore.format.packed_streams import shown_records, stream_of
from trajstore.schema import Array
from trajstore.storage import Storage
from trajstore.store.stream_reader import StreamReader
from trajstore.store.verify.decoding import ChunkReader, ChunkSource, PieceReader
from trajstore.store.verify.report import VerifyNote, VerifyProblem, VerifyReport, without_subject

Progress = Callable[[int, int], None]  # chunks checked so far, chunks in total

NO_RECORD = "missing, so the stream can't be read"
_MAX_LISTED = 20  # problems of one kind in one stream; the others are only counted


@dataclass(slots=True)
class Inspection:
    """One verification in progress.

    Attributes:
        is_fast: Check only the presence and size of chunks that are not span tables.
        at: Check only what this checkpoint shows; None for the whole store.
        records: Commit records of the streams to check, by id, oldest first.
        checkpoints: The complete checkpoints to check.
        n_chunks: Number of chunks to check, as far as it is known, for `progress`.
    """

    storage: Storage
    is_fast: bool
    progress: Progress | None
    report: VerifyReport
    at: Checkpoint | None = None
    records: dict[str, CommitRecord] = field(default_factory=dict)
    checkpoints: list[Checkpoint] = field(default_factory=list)
    n_chunks: int = 0

    def problem(self, where: str, what: str) -> None:
        self.report.problems.append(VerifyProblem(where, what))

    def note(self, where: str, what: str) -> None:
        self.report.notes.append(VerifyNote(where, what))

    def problems_of_one_kind(self, problems: Sequence[tuple[str, str]], where: str) -> None:
        """Report the first problems one by one, and the others as a number at ``where``."""
        for place, what in problems[:_MAX_LISTED]:
            self.problem(place, what)
        if len(problems) > _MAX_LISTED:
            self.problem(where, f"{len(problems) - _MAX_LISTED} more of the same kind: {problems[0][1]}, ...")

    def count_chunks(self, n: int) -> None:
        """Count checked chunks, and report progress."""
        self.report.counts["chunks"] += n
        if self.progress is not None and n:
            self.progress(self.report.counts["chunks"], self.n_chunks)

    def newest_record(self, stream: str) -> CommitRecord:
        """Read a stream's commit record as it is now.

        Raises:
            FileNotFoundError: The stream has no record.
            FormatError: The record is damaged.
        """
        data = self.storage.get(f"streams/{stream}/zarr.json")
        return CommitRecord.from_bytes(data, stream, self.storage.display)

    def record_or_fault(self, stream: str) -> CommitRecord | str:
        """A stream's commit record as it is now, or a description of its fault."""
        try:
            return self.newest_record(stream)
        except FileNotFoundError:
            return NO_RECORD
        except FormatError as error:
            return without_subject(error, f"{self.storage.display}/streams/{stream}")

    def wanted_rows(self, records: Iterable[CommitRecord]) -> Marks:
        """The first row of each stored stream that is live or pinned by a checkpoint."""
        stored = {record.id: record for record in records}
        wanted = Marks.wanted(shown_records(stored.values()))
        for checkpoint in self.checkpoints:
            wanted = wanted.lowered(Marks.pinned_by(checkpoint))
        return Marks({id_: wanted.get(stream_of(record, stored), 0) for id_, record in stored.items()})


@dataclass(frozen=True, slots=True)
class CheckedArray:
    """One array whose chunks are checked.

    Attributes:
        name: Names the array in the report.
        prefix: Key prefix of its objects.
        first_row: Rows below it are evicted.
        read: Reads one chunk, still encoded.
        read_piece: As in `ChunkSource`.
    """

    name: str
    prefix: str
    layout: ArrayLayout
    length: int
    first_row: int
    read: ChunkReader
    read_piece: PieceReader | None = None

    @property
    def chunks(self) -> range:
        """Indexes of the chunks that must exist."""
        stop = -(-self.length // self.layout.chunk_rows)
        return range(self.first_row // self.layout.chunk_rows if self.first_row < self.length else stop, stop)

    @property
    def source(self) -> ChunkSource:
        return ChunkSource(self.layout, self.chunks, self.read, self.read_piece)

    def rows(self, index: int) -> tuple[int, int]:
        """The committed rows of a chunk, half-open."""
        size = self.layout.chunk_rows
        return index * size, min(self.length, (index + 1) * size)


@dataclass(slots=True)
class CheckedStream:
    """One stream that is checked.

    Attributes:
        first_row: Rows below it are neither live nor pinned.
        hidden: Row ranges that other streams replace.
        spans: Ints and floats of its span table, once they have passed their checks.
    """

    record: CommitRecord
    reader: StreamReader
    first_row: int
    hidden: tuple[tuple[int, int], ...]
    spans: tuple[Array, Array] | None = None

    @property
    def name(self) -> str:
        return f"stream '{self.record.id}'"

    def array(self, path: str) -> CheckedArray:
        layout = self.record.layouts[path]
        return CheckedArray(
            f"{self.name}, array '{path}'",
            f"streams/{self.record.id}/{path}",
            layout,
            self.record.length(path),
            self.first_row if path.startswith("steps/") else 0,
            lambda index, buffer: self.reader.chunk(path, index, buffer),
            None if layout.shard_rows is None else lambda piece, room: self.reader.read_unmapped(path, piece, room),
        )


def by_creation(records: Mapping[str, CommitRecord]) -> dict[str, CommitRecord]:
    """Sort records: oldest stream first."""
    return dict(sorted(records.items(), key=lambda item: (item[1].created_at, item[0])))
