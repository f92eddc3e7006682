"""Marks: by stream, the first row that is still wanted. Rows below a mark are evicted."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence

from trajstore.format.checkpoint_record import Checkpoint
from trajstore.format.commit_record import CommitRecord


class Marks(Mapping[str, int]):
    """By stream id, the first row that is still wanted; immutable.

    A stream that is not named has no mark. The methods that combine marks return a new value.
    """

    __slots__ = ("_rows",)

    def __init__(self, rows: Mapping[str, int] | None = None) -> None:
        self._rows = dict(rows or {})

    @staticmethod
    def wanted(records: Sequence[CommitRecord]) -> Marks:
        """The first wanted row of each stream, according to the records of all sessions.

        Living sessions are those of the newest world that no session of that world declares dead. A living session
        decides alone about its own stream, and a rank that came back about its former stream, which it has declared
        dead. About streams of older worlds the living sessions that name them decide together: the smallest of
        their marks counts. If none decides, the stream's own mark stays.

        If no record has a world, the larger of a stream's own mark and the smallest mark of any session counts.

        Rows of a stream that replaces a part of another are evicted with the rows that they stand for.

        Args:
            records: The records of all streams as readers show them; see `packed_streams.shown_records`.
        """
        wanted = Marks._of_sessions(records)
        replaced = [(record.id, record.replaces) for record in records if record.replaces is not None]
        parts = {id_: wanted.get(part.stream, 0) - part.start for id_, part in replaced}
        return wanted.raised(parts) if parts else wanted

    @staticmethod
    def _of_sessions(records: Sequence[CommitRecord]) -> Marks:
        own = Marks({record.id: record.first_row for record in records})
        world = newest_world(records)
        if world is None:
            return own.raised(_smallest_view_marks(records).only(own))
        of_world = [record for record in records if record.world == world]
        dead = {stream for record in of_world for stream in record.view.dead}
        living = [record for record in of_world if record.id not in dead]
        # Other sessions of its world have no say about a stream: a lower mark of a session that is behind would
        # show rows that are deleted already, a higher one would hide rows that the writer still wants.
        not_theirs = {record.id for record in of_world}
        decided = _smallest_view_marks(living, not_theirs).only(own)
        return Marks({**own, **decided, **{record.id: record.first_row for record in living}})

    @staticmethod
    def pinned_by(checkpoint: Checkpoint) -> Marks:
        """The first row of each stream that a checkpoint shows, and so keeps from being deleted."""
        return Marks({stream: extent.first for stream, extent in checkpoint.streams.items()})

    def only(self, streams: Iterable[str]) -> Marks:
        """The marks of some streams."""
        return Marks({stream: self._rows[stream] for stream in streams if stream in self._rows})

    def lowered(self, other: Mapping[str, int]) -> Marks:
        """These streams, each with the smaller of its marks here and in ``other``."""
        return Marks({stream: min(row, other.get(stream, row)) for stream, row in self._rows.items()})

    def merged(self, other: Mapping[str, int]) -> Marks:
        """The streams of both, each with the smaller mark."""
        return Marks({**other, **self.lowered(other)})

    def raised(self, other: Mapping[str, int]) -> Marks:
        """The streams of both, each with the larger mark."""
        return Marks({**self._rows, **{stream: max(row, self.get(stream, row)) for stream, row in other.items()}})

    def __getitem__(self, stream: str) -> int:
        return self._rows[stream]

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __repr__(self) -> str:
        return f"Marks({self._rows!r})"


def newest_world(records: Iterable[CommitRecord]) -> str | None:
    """The world of the record that was created last among those that have one; None if none has."""
    newest = max((r for r in records if r.world is not None), key=lambda r: r.created_at, default=None)
    return None if newest is None else newest.world


def _smallest_view_marks(records: Iterable[CommitRecord], only_if_dead: Container[str] = ()) -> Marks:
    """By stream, the smallest mark that any of these sessions has set for a stream of another session.

    For streams in ``only_if_dead``, only sessions count that declare the stream dead.
    """
    marks: dict[str, int] = {}
    for record in records:
        for stream, row in record.view.first_rows.items():
            if stream not in only_if_dead or stream in record.view.dead:
                marks[stream] = min(row, marks.get(stream, row))
    return Marks(marks)
