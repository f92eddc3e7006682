"""The keyword options of `TrajStorage` that go to the writer of its log."""

from __future__ import annotations

from typing import TypedDict


class WriterOptionsDict(TypedDict, total=False):
    """Options of `trajstore.Writer`.

    Attributes:
        commit_steps: Commit in the background after this many staged rows.
        commit_seconds: Commit in the background at least this often.
        buffer_bytes: Bound of the memory for rows that are not durable yet; by default at most 64 MiB.
    """

    commit_steps: int | None
    commit_seconds: float | None
    buffer_bytes: int | str
