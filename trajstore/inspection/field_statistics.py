"""What the values of a field look like, from a sample of its rows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from trajstore.arguments import parse_bytes
from trajstore.inspection.row_samples import read_piece, sample_pieces
from trajstore.schema import Array, selected_paths
from trajstore.store.snapshot import Snapshot

_MAX_COMPONENTS = 4096  # of a value, whose lowest and highest values are followed one by one


@dataclass(frozen=True, slots=True)
class FieldStatistics:
    """Values of a field.

    Attributes:
        path: The field.
        n_rows: Rows that were read.
        n_total_rows: Rows that the snapshot shows.
        n_values: Single numbers in the rows that were read.
        n_nan: NaNs among them.
        n_infinite: Infinities among them.
        n_zero: Zeros among them.
        minimum: The lowest finite value; None: there is none.
        maximum: The highest one.
        mean: Their mean.
        std: Their standard deviation.
        n_constant: Components with the same value in every row; None: too many components to follow.
        n_components: Components of one value of the field.
    """

    path: str
    n_rows: int
    n_total_rows: int
    n_values: int
    n_nan: int
    n_infinite: int
    n_zero: int
    minimum: float | None
    maximum: float | None
    mean: float | None
    std: float | None
    n_constant: int | None
    n_components: int

    @property
    def is_complete(self) -> bool:
        """Whether all rows were read."""
        return self.n_rows == self.n_total_rows

    @property
    def is_constant(self) -> bool:
        """Whether every number of every row that was read is the same."""
        return self.n_values > 0 and not self.n_nan and self.minimum == self.maximum and not self.n_infinite


def field_statistics(
    snapshot: Snapshot,
    fields: Iterable[str] | None = None,
    *,
    max_bytes: int | str = "64MiB",
    episodes: Iterable[int] | None = None,
) -> dict[str, FieldStatistics]:
    """Summarise the values of fields.

    Reads all rows of a field if they take no more than its share of ``max_bytes``; otherwise rows from many places,
    spread evenly. The same rows each time.

    Args:
        snapshot: What to read.
        fields: Paths of fields, or names of groups; all by default.
        max_bytes: Limit of the decoded bytes, of all fields together.
        episodes: Rows of the episode table to take values from; all by default.

    Raises:
        KeyError: A field does not exist.
        SnapshotExpiredError: Rows were evicted since the snapshot was made; refresh the store.
        CorruptionError: A chunk is damaged or missing.
    """
    if snapshot.schema is None:
        if fields is not None and (asked := list(fields)):
            raise KeyError(f"no field {asked[0]!r:.80}: the store has no fields yet")
        return {}
    paths = selected_paths(snapshot.schema, fields)
    budget = parse_bytes(max_bytes, "max_bytes") // max(1, len(paths))
    table = snapshot.episodes if episodes is None else snapshot.episodes.take(list(episodes))
    ranges = table.row_ranges
    n_rows = int((ranges.stop - ranges.start).sum())
    n_steps = n_rows - int(ranges.ends_in_final.sum())
    found = {}
    for path in paths:
        spec = snapshot.schema[path]
        running = _Running(int(np.prod(spec.shape, dtype=np.int64)))
        for piece in sample_pieces(ranges, spec, budget):
            running.add(read_piece(snapshot, path, piece))
        found[path] = running.result(path, n_rows if spec.final else n_steps)
    return found


class _Running:
    """Statistics of blocks of rows."""

    def __init__(self, n_components: int) -> None:
        self._n_components = n_components
        self._n_rows = self._n_nan = self._n_infinite = self._n_zero = 0
        self._n_finite, self._mean, self._squares = 0, 0.0, 0.0  # of finite values, by Welford's method
        self._lowest, self._highest = np.inf, -np.inf
        is_followed = n_components <= _MAX_COMPONENTS
        self._first: Array | None = None  # the first row
        self._varies = np.zeros(n_components, bool) if is_followed else None

    def add(self, rows: Array) -> None:
        if not len(rows):
            return
        self._n_rows += len(rows)
        flat = rows.reshape(len(rows), -1)
        self._follow(flat)
        self._n_zero += flat.size - int(np.count_nonzero(flat))
        finite = flat.reshape(-1)
        if flat.dtype.kind == "f":
            self._n_nan += int(np.isnan(flat).sum())
            self._n_infinite += int(np.isinf(flat).sum())
            finite = flat[np.isfinite(flat)]
        if len(finite):
            self._join(finite)

    def _follow(self, flat: Array) -> None:
        if self._first is None:
            self._first = flat[0].copy()
        if self._varies is not None:
            is_same = flat == self._first
            if flat.dtype.kind == "f":
                is_same |= np.isnan(flat) & np.isnan(self._first)
            self._varies |= ~is_same.all(0)

    def _join(self, finite: Array) -> None:
        # Sums in float64; numpy sums in blocks, so a constant has a spread of nearly 0.
        n, mean = len(finite), float(finite.mean(dtype=np.float64))
        squares = float(finite.var(dtype=np.float64)) * n
        total = self._n_finite + n
        distance = mean - self._mean
        self._mean += distance * n / total
        self._squares += squares + distance**2 * self._n_finite * n / total
        self._n_finite = total
        self._lowest = min(self._lowest, float(finite.min()))
        self._highest = max(self._highest, float(finite.max()))

    def result(self, path: str, n_total_rows: int) -> FieldStatistics:
        has_values = self._n_finite > 0
        is_followed = self._varies is not None
        return FieldStatistics(
            path=path,
            n_rows=self._n_rows,
            n_total_rows=n_total_rows,
            n_values=self._n_rows * self._n_components,
            n_nan=self._n_nan,
            n_infinite=self._n_infinite,
            n_zero=self._n_zero,
            minimum=self._lowest if has_values else None,
            maximum=self._highest if has_values else None,
            mean=self._mean if has_values else None,
            std=float(np.sqrt(self._squares / self._n_finite)) if has_values else None,
            n_constant=int((~self._varies).sum()) if is_followed and self._n_rows else None,  # type: ignore[operator]
            n_components=self._n_components,
        )
