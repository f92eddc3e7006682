"""Run all checks of a store."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from trajstore.arguments import parse_bytes
from trajstore.errors import CorruptionError
from trajstore.inspection.doctor.episode_checks import Episodes, check_episodes
from trajstore.inspection.doctor.field_checks import check_compression, check_field, check_precision
from trajstore.inspection.doctor.finding import Finding, Severity, share
from trajstore.inspection.doctor.storage_checks import Stored, check_storage
from trajstore.inspection.field_statistics import field_statistics
from trajstore.inspection.row_samples import read_piece, sample_pieces
from trajstore.schema import Array
from trajstore.store.checkpoints import list_checkpoints
from trajstore.store.snapshot import Snapshot

_PROBE_BYTES = 512 << 10  # of consecutive rows, for questions about dtype and compression
_UNTOUCHED = 1000  # priorities that are equal

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Examination:
    """What the checks of a store found.

    Attributes:
        findings: The worst first.
        n_episodes: Episodes that were looked at.
        n_rows: Rows that the store shows.
        sampled_bytes: Limit of the decoded bytes of all fields.
    """

    findings: tuple[Finding, ...]
    n_episodes: int
    n_rows: int
    sampled_bytes: int

    @property
    def counts(self) -> dict[str, int]:
        """How many findings of each severity there are, the worst first."""
        return {
            severity.label: sum(f.severity == severity for f in self.findings) for severity in reversed(Severity)
        }


def examine(
    snapshot: Snapshot,
    *,
    max_bytes: int | str = "64MiB",
    now: float | None = None,
    progress: Progress | None = None,
) -> Examination:
    """Look for common mistakes in a store. Reads the episode table and a sample of the values; writes nothing.

    Args:
        snapshot: What to look at.
        max_bytes: Limit of the decoded bytes, of all fields together.
        now: UNIX seconds, for the age of commits; None: the clock.
        progress: Called with the number of fields that are checked, and of all.
    """
    limit = parse_bytes(max_bytes, "max_bytes")
    found = list(_all(snapshot, limit, time.time() if now is None else now, progress))
    found.sort(key=lambda finding: -finding.severity)
    ranges = snapshot.episodes.row_ranges
    n_rows = int((ranges.stop - ranges.start).sum())
    return Examination(tuple(found), len(snapshot.episodes), n_rows, limit)


def _all(snapshot: Snapshot, limit: int, now: float, progress: Progress | None) -> Iterator[Finding]:
    if snapshot.schema is None:
        yield Finding(
            "no-schema", Severity.NOTE, "store", "the store has no fields and no data", "there is nothing to check",
            "append a first episode, or declare a schema",
        )  # fmt: skip
        return
    yield from check_episodes(Episodes.of(snapshot.episodes, snapshot.schema))
    yield from check_storage(Stored(snapshot, list_checkpoints(snapshot.storage), now))
    paths = list(snapshot.schema)
    for i, path in enumerate(paths):
        if progress is not None:
            progress(i, len(paths))
        try:
            yield from _field(snapshot, path, limit // len(paths))
        except CorruptionError as error:
            yield _damage(path, error)
    try:
        yield from _priorities(snapshot)
    except CorruptionError as error:
        yield _damage("priority", error)


def _field(snapshot: Snapshot, path: str, limit: int) -> Iterator[Finding]:
    assert snapshot.schema is not None
    spec = snapshot.schema[path]
    found = field_statistics(snapshot, [path], max_bytes=limit)[path]
    yield from check_field(spec, found, is_reward=path == snapshot.schema.reward)
    layouts = [r.layouts[f"steps/{path}"] for r in snapshot.streams if path in r.schema.fields and r.rows]
    rows = _some_rows(snapshot, path)
    if rows is None or not layouts or spec.dtype == "bfloat16":
        return
    yield from check_precision(path, spec, rows)
    is_chosen = spec.codec is not None
    yield from check_compression(path, spec, rows, is_raw=layouts[-1].is_raw, is_chosen=is_chosen)


def _some_rows(snapshot: Snapshot, path: str) -> Array | None:
    """Consecutive rows of the longest piece of a small sample."""
    assert snapshot.schema is not None
    spec = snapshot.schema[path]
    ranges = snapshot.episodes.row_ranges
    middle = len(ranges.start) // 2
    near = slice(max(0, middle - 512), middle + 512)
    pieces = list(sample_pieces(type(ranges)(*(column[near] for column in ranges)), spec, 1 << 62))
    if not pieces:
        return None
    longest = max(pieces, key=lambda piece: piece.stop - piece.start)
    return read_piece(snapshot, path, longest)[: max(1, _PROBE_BYTES // spec.row_bytes)]


def _priorities(snapshot: Snapshot) -> Iterator[Finding]:
    if "priority" not in snapshot.columns.names:
        return
    values = [np.asarray(stored) for _, stored in snapshot.column("priority").values()]
    values = [v[~np.isnan(v)] if v.dtype.kind == "f" else v for v in values]
    n = sum(len(v) for v in values)
    first = next((v[0] for v in values if len(v)), None)
    if n >= _UNTOUCHED and all((v == first).all() for v in values):
        yield Finding(
            "equal-priorities", Severity.NOTE, "column 'priority'", f"all {n:,} priorities are {first:g}",
            "sampling by priority is uniform then", "call update_priorities after each batch",
        )  # fmt: skip
    if n_bad := sum(int(((v < 0) | np.isinf(v)).sum()) for v in values):
        yield Finding(
            "bad-priorities", Severity.ERROR, "column 'priority'",
            f"{share(n_bad, n)} priorities are negative or infinite",
            "they can't be drawn by", "check what update_priorities is given",
        )  # fmt: skip


def _damage(path: str, error: CorruptionError) -> Finding:
    return Finding(
        "damaged", Severity.ERROR, f"field '{path}'", str(error), "batches that need these rows fail",
        "trajstore verify lists all damage; restore the objects from a copy, or repair",
    )  # fmt: skip
