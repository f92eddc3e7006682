"""Checks changes of a session's view: which rows of its own and other streams it still wants."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from trajstore.errors import DataError
from trajstore.format.argument_checks import check_count, check_mark_advances
from trajstore.format.commit_record import SessionView


def check_first_row(stream: str, old: int, new: int | None, committed_rows: int) -> int:
    """The first row of the session's own stream that it wants from now on; ``old`` if ``new`` is None.

    Raises:
        ValueError: The mark would move back.
        DataError: It is not a count, or past the committed rows.
    """
    row = old if new is None else check_count(new, "first_row")
    check_mark_advances(stream, old, row)
    if row > committed_rows:
        raise DataError(f"first_row: expected at most the {committed_rows} rows committed, got {row}")
    return row


def advance_view(
    stream: str,
    view: SessionView,
    first_rows: Mapping[str, int] | None,
    discarded: Mapping[str, Iterable[int]] | None,
    dead: Collection[str] | None,
) -> SessionView:
    """The view of the session that writes ``stream`` after further decisions about other streams.

    Raises:
        ValueError: A mark would move back.
        DataError: A value is malformed, or a decision is about the session's own stream.
    """
    advanced = view.advanced(first_rows, discarded, dead)
    if stream in advanced.first_rows:
        raise DataError(f"first_rows: stream '{stream}' is the writer's own; give first_row")
    if stream in advanced.dead:
        raise DataError(f"dead: stream '{stream}' is the writer's own")
    return advanced
