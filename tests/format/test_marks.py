"""Marks: how they combine, which rows are live, and that no history of sessions shows deleted rows."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trajstore.format.commit_record import CommitRecord, SessionView
from trajstore.format.ids import new_id
from trajstore.format.marks import Marks, newest_world
from trajstore.schema import Field, Schema

SCHEMA = Schema({"x": Field("int64")})
IDS = [new_id(name) for name in "abcde"]
A, B, C, D, E = IDS


def record(stream: str, created_at: float, world: str | None = None, **known: Any) -> CommitRecord:
    return CommitRecord(stream, stream[0], SCHEMA, {}, rows=99, created_at=created_at, world=world, **known)


def view(dead: tuple[str, ...] = (), **first_rows: int) -> SessionView:
    return SessionView({IDS["abcde".index(name)]: row for name, row in first_rows.items()}, dead=dead)


# ---- combining ----------------------------------------------------------------------------------


def test_marks_are_an_immutable_mapping() -> None:
    rows = {A: 1}
    marks = Marks(rows)
    rows[A] = 2
    assert (marks, dict(marks), len(marks), marks.get(B, 7)) == ({A: 1}, {A: 1}, 1, 7)
    assert repr(marks) == f"Marks({{'{A}': 1}})"
    with pytest.raises(TypeError):
        marks[A] = 3  # type: ignore[index]
    with pytest.raises(KeyError):
        marks[B]


rows_by_stream = st.dictionaries(st.sampled_from(IDS), st.integers(0, 20))


@given(rows_by_stream, rows_by_stream)
def test_combinations_take_the_smaller_or_the_larger_mark(one: dict[str, int], other: dict[str, int]) -> None:
    both, marks = one.keys() & other.keys(), Marks(one)
    smaller, larger = ({s: pick(one[s], other[s]) for s in both} for pick in (min, max))
    assert marks.lowered(other) == one | smaller
    assert marks.merged(other) == one | other | smaller
    assert marks.raised(other) == one | other | larger
    assert marks.only(other) == {s: one[s] for s in both}
    assert marks == one


# ---- live rows ----------------------------------------------------------------------------------


def first_live_row(stream: str, records: list[CommitRecord]) -> int:
    """The table of section 6 of the format, line by line."""
    by_id = {r.id: r for r in records}
    own = by_id[stream].first_row
    worlds = sorted((r.created_at, r.world) for r in records if r.world is not None)
    if not worlds:
        named = [r.view.first_rows[stream] for r in records if stream in r.view.first_rows]
        return max(own, min(named)) if named else own
    newest = worlds[-1][1]
    dead = {s for r in records if r.world == newest for s in r.view.dead}
    living = [r for r in records if r.world == newest and r.id not in dead]
    if by_id[stream] in living:
        return own
    speaking = [r for r in living if by_id[stream].world != newest or stream in r.view.dead]
    named = [r.view.first_rows[stream] for r in speaking if stream in r.view.first_rows]
    return min(named) if named else own


@st.composite
def stored_records(draw: st.DrawFn) -> list[CommitRecord]:
    streams = draw(st.lists(st.sampled_from(IDS), min_size=1, max_size=5, unique=True))
    worlds = draw(st.sampled_from([[None], [None, "u"], ["u", "v"], [None, "u", "v"]]))
    records = []
    for number, stream in enumerate(streams):
        others = [other for other in IDS if other != stream]
        named = draw(st.dictionaries(st.sampled_from(others), st.integers(0, 20)))
        dead = draw(st.lists(st.sampled_from(others), unique=True, max_size=2))
        known = {"first_row": draw(st.integers(0, 20)), "view": SessionView(named, dead=tuple(dead))}
        records.append(record(stream, float(number), draw(st.sampled_from(worlds)), **known))
    return draw(st.permutations(records))


@given(stored_records())
def test_live_rows_are_those_of_the_table(records: list[CommitRecord]) -> None:
    assert Marks.wanted(records) == {r.id: first_live_row(r.id, records) for r in records}


def test_a_living_session_decides_alone_about_its_own_stream() -> None:
    own = record(A, 1.0, "w", first_row=50)
    behind = record(B, 2.0, "w", view=view(a=20))  # has seen less of the stream; rows below 50 may be deleted
    ahead = record(C, 3.0, "w", view=view(a=70))  # has given up rows that the writer of the stream still wants
    assert Marks.wanted([own, behind])[A] == 50
    assert Marks.wanted([own, ahead])[A] == 50
    assert Marks.wanted([own, behind, ahead])[A] == 50


def test_a_stream_that_no_living_session_names_keeps_its_own_mark() -> None:
    abandoned = record(A, 1.0, "old", first_row=50)  # written after the checkpoint that the newest world began from
    assert Marks.wanted([abandoned, record(B, 2.0, "new", view=view(c=3))])[A] == 50
    assert Marks.wanted([record(A, 1.0, None, first_row=50), record(B, 2.0, "new")])[A] == 50


def test_a_resumed_session_may_want_rows_that_the_one_before_had_given_up() -> None:
    before = record(A, 1.0, "old", first_row=50)
    assert Marks.wanted([before, record(B, 2.0, "new", view=view(a=20))])[A] == 20


def test_a_rank_that_came_back_decides_about_its_former_stream() -> None:
    former = record(A, 1.0, "w", first_row=50, view=view(c=9))
    back = record(B, 2.0, "w", view=view((A,), a=20, c=30))
    assert Marks.wanted([former, back, record(C, 0.0, "old")]) == {A: 20, B: 0, C: 30}
    other = record(D, 3.0, "w", view=view(a=10, c=40))  # has not heard of what the former session gave up
    assert Marks.wanted([former, back, other, record(C, 0.0, "old")]) == {A: 20, B: 0, C: 30, D: 0}


def test_without_worlds_the_smallest_mark_counts_but_none_goes_back() -> None:
    old = record(A, 1.0, first_row=5)
    assert Marks.wanted([old, record(B, 2.0, view=view(a=7)), record(C, 3.0, view=view(a=9))])[A] == 7
    assert Marks.wanted([old, record(B, 2.0, view=view(a=3))])[A] == 5


def test_the_newest_world_is_that_of_the_record_created_last() -> None:
    assert newest_world([]) is None
    assert newest_world([record(A, 1.0), record(B, 2.0)]) is None
    assert newest_world([record(A, 3.0), record(B, 2.0, "v"), record(C, 1.0, "u")]) == "v"


# ---- histories of sessions ----------------------------------------------------------------------


@dataclass(slots=True)
class History:
    """Sessions that come and go, as those of replay buffers do, and the rows that were deleted.

    Ranks show only their own streams, or those of all ranks; they may die and come back. Sessions give up rows of
    streams that they have named from the start, or that ranks show to all.
    """

    is_shared: bool
    records: dict[str, CommitRecord] = field(default_factory=dict)
    deleted: dict[str, int] = field(default_factory=dict)  # by stream: rows below are deleted
    checkpoints: list[dict[str, int]] = field(default_factory=list)  # by stream: the first row
    ranks: list[str] = field(default_factory=list)  # streams of the running sessions of the newest world
    n_worlds: int = 0

    def live(self) -> Marks:
        return Marks.wanted(list(self.records.values()))

    def launch(self, n: int, which: int) -> None:
        """Begin a world from a checkpoint, or from all streams; ranks wait until all have published their marks."""
        kept = self.checkpoints[which % len(self.checkpoints)] if self.checkpoints and which % 2 else None
        marks = {stream: row for stream, row in self.live().items() if row or kept is None}
        self.n_worlds += 1
        self.ranks = [self._open(marks | (kept or {}), tuple(kept or ())) for _ in range(1 + n % 3)]

    def write(self, n: int, which: int) -> None:
        stream = self.ranks[which % len(self.ranks)]
        self.records[stream] = replace(self.records[stream], rows=self.records[stream].rows + n)

    def evict(self, n: int, which: int) -> None:
        """A session of any world gives up rows of its own stream."""
        stream = list(self.records)[which % len(self.records)]
        known = self.records[stream]
        self.records[stream] = replace(known, first_row=max(known.first_row, min(n, known.rows)))

    def evict_of_another(self, n: int, which: int) -> None:
        """A session of any world gives up rows of another session's stream that it shows."""
        streams = list(self.records)
        session, stream = streams[which % len(streams)], streams[which // len(streams) % len(streams)]
        row, known = min(n, self.records[stream].rows), self.records[session]
        is_of_the_world = known.world == self.records[stream].world
        if stream != session and row and (stream in known.view.first_rows or (self.is_shared and is_of_the_world)):
            marks = dict(Marks(known.view.first_rows).raised({stream: row}))
            self.records[session] = replace(known, view=replace(known.view, first_rows=marks))

    def sweep(self, n: int, which: int) -> None:
        pins = Marks()
        for checkpoint in self.checkpoints:
            pins = pins.merged(checkpoint)
        free = {s: min(row, self.records[s].rows) for s, row in self.live().lowered(pins).items()}
        self.deleted = dict(Marks(self.deleted).raised(free))

    def save(self, n: int, which: int) -> None:
        self.checkpoints.append({s: row for s, row in self.live().items() if row < self.records[s].rows})

    def remove(self, n: int, which: int) -> None:
        if self.checkpoints:
            del self.checkpoints[which % len(self.checkpoints)]

    def come_back(self, n: int, which: int) -> None:
        """A rank dies, and another session takes its place, from the newest checkpoint if one exists."""
        stream = self.ranks.pop(which % len(self.ranks))
        kept = self.checkpoints[-1] if self.checkpoints else {}
        self.ranks.append(self._open({**self.live(), **kept}, (stream, *self.records[stream].view.dead)))

    def _open(self, marks: dict[str, int], dead: tuple[str, ...]) -> str:
        stream, world = new_id("s"), f"w{self.n_worlds}"
        known = record(stream, float(len(self.records)), world, view=SessionView(marks, dead=dead))
        self.records[stream] = replace(known, rows=0)
        return stream

    def check(self) -> None:
        live = self.live()
        assert all(row <= live[stream] for stream, row in self.deleted.items()), "a deleted row is shown"
        assert all(live[s] <= self.records[s].first_row for s in self.ranks), "its writer wants a hidden row"
        of_world = {r.id for r in self.records.values() if r.world == f"w{self.n_worlds}"}
        for stream in live.keys() - of_world:
            wanted = [r.view.first_rows.get(stream, live[stream]) for r in map(self.records.get, self.ranks) if r]
            assert live[stream] <= min(wanted), "a running session wants a hidden row"


ACTIONS = [
    "launch",
    "write",
    "evict",
    "evict_of_another",
    "evict_of_another",
    "sweep",
    "save",
    "remove",
    "come_back",
]


@settings(max_examples=400)
@given(
    st.booleans(),
    st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 20), st.integers(0, 99)), min_size=25, max_size=40),
)
def test_no_history_shows_deleted_rows_or_hides_wanted_ones(
    is_shared: bool, steps: list[tuple[str, int, int]]
) -> None:
    history = History(is_shared)
    history.launch(2, 0)
    for stream in range(3):
        history.write(20, stream)
    for action, n, which in steps:
        getattr(history, action)(n, which)
        history.check()
