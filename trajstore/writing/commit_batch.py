"""The data of one commit: new rows, spans, text, changes of derived columns, and the session's view."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from trajstore.format.commit_record import SessionView
from trajstore.schema import Array


@dataclass(frozen=True, slots=True)
class NewRows:
    """New rows of one array: the rows of ``source``, in the given ``order`` if there is one."""

    source: Array
    order: Array | None = None

    def __len__(self) -> int:
        return len(self.source if self.order is None else self.order)

    def copy_to(self, out: Array, start: int, stop: int) -> None:
        """Copy the new rows ``[start, stop)`` to ``out``."""
        if self.order is None:
            out[:] = self.source[start:stop]
        else:
            # mode="clip" writes straight into out; "raise" would go through a buffer.
            np.take(self.source, self.order[start:stop], axis=0, out=out, mode="clip")

    def to_array(self) -> Array:
        """All new rows: ``source`` itself where no order is given, else a copy."""
        return self.source if self.order is None else self.source[self.order]


@dataclass(frozen=True, slots=True)
class DerivedColumnChange:
    """Values of a derived column: a new generation from row ``first`` on, or new values of single rows."""

    target: str
    name: str
    values: Array
    first: int = 0
    rows: Array | None = None  # None: a new generation


@dataclass(slots=True)
class CommitBatch:
    """Everything that one commit adds to a stream. Committing the same batch again writes the same bytes."""

    rows: Mapping[str, NewRows]  # by field path
    span_ints: Array
    span_floats: Array
    text: bytes
    committed_at: float
    columns: Sequence[DerivedColumnChange] = ()
    first_row: int | None = None  # first row of the stream that is still wanted; None: unchanged
    view: SessionView | None = None  # decisions about other streams; None: unchanged

    @property
    def n_rows(self) -> int:
        return len(next(iter(self.rows.values()))) if self.rows else 0
