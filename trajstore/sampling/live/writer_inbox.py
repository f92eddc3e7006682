"""Reports of a writer's threads, kept until the reader processes them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from trajstore.schema import Array
from trajstore.writing.staging import Staging

_NO_ENDS = np.empty((0, 5), np.int64)


@dataclass(slots=True)
class StagedBlock:
    """Rows of a staging that the reader has not processed, and the episode ends among them.

    ``values`` are views of the staging where possible. They become None once the rows are durable: the staging may
    then be reused, and the reader finds the rows in the stream.
    """

    episode: Array
    env: Array
    ends: Array
    values: dict[str, Array] | None


@dataclass(frozen=True, slots=True)
class Amendment:
    """New values of a step that was appended before."""

    episode: int
    t: int
    values: dict[str, Array]


@dataclass(frozen=True, slots=True)
class Reports:
    """Reports of a writer since the reader last took them.

    ``blocks`` are paired with the values they had at one moment, under the inbox's lock. ``n_reports`` is the
    number of reports of all times up to that moment.
    """

    blocks: list[tuple[StagedBlock, dict[str, Array] | None]]
    commits: list[Array]
    amendments: list[Amendment]
    n_reports: int


class WriterInbox:
    """Takes reports from the writer's threads. Safe to use from several threads.

    The writer calls `handed_off`, `committed`, `amended` and `dropped`; the reader calls everything else.

    Attributes:
        n_reports: Number of reports so far. The writer's lock keeps all but commits from being added.
        n_rows, n_ends: Rows and ends of the staging being filled that the reader has processed.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.blocks: deque[StagedBlock] = deque()  # handed off, not processed by the reader
        self._in_flight: deque[StagedBlock] = deque()  # handed off, not durable
        self._commits: list[Array] = []
        self._amendments: list[Amendment] = []
        self.n_reports = self.n_rows = self.n_ends = 0
        self._is_dropped = False
        self._is_reading = False  # the reader may be copying from values that `take` returned

    # ---- called by the writer

    def handed_off(self, staging: Staging) -> None:
        """Remember the rows that the reader has not processed, without copying them."""
        with self.lock:
            block = self.block_of(staging)
            self.blocks.append(block)
            self._in_flight.append(block)
            self.n_rows = self.n_ends = 0
            self.n_reports += 1

    def committed(self, spans: Array) -> bool:
        """Note that the rows of the oldest block in flight are durable and can be read from the stream.

        Returns:
            Whether the reader may still be copying from their staging.
        """
        with self.lock:
            self._commits.append(spans[:, :7].copy())
            self.n_reports += 1
            self._in_flight.popleft().values = None
            return self._is_reading

    def amended(self, episode: int, t: int, values: Mapping[str, Array]) -> None:
        """Note new values of a step that was appended before."""
        with self.lock:
            copied = {path: np.array(value) for path, value in values.items()}
            self._amendments.append(Amendment(episode, t, copied))
            self.n_reports += 1

    def dropped(self) -> None:
        """Note that the staged rows are lost: only blocks in flight become durable, and nothing follows them."""
        with self.lock:
            self._is_dropped = True
            self.n_reports += 1

    # ---- called by the reader

    def take(self) -> Reports:
        """Take commits and amendments out; blocks stay until `remove_blocks`.

        Call `end_reading` once no values of the blocks are used any longer.
        """
        with self.lock:
            self._is_reading = any(block.values is not None for block in self.blocks)
            blocks = [(block, block.values) for block in self.blocks]
            commits, self._commits = self._commits, []
            amendments, self._amendments = self._amendments, []
            n_reports = self.n_reports
        return Reports(blocks, commits, amendments, n_reports)

    def end_reading(self) -> None:
        """Note that the reader has copied the values of the blocks that it took."""
        with self.lock:
            self._is_reading = False

    def remove_blocks(self, n: int) -> None:
        """Remove the oldest ``n`` blocks, which the reader has processed. Called with the lock held."""
        for _ in range(n):
            self.blocks.popleft()

    def block_of(self, staging: Staging) -> StagedBlock:
        """Rows and ends of a staging that the reader has not processed. Called with the lock held.

        The values are views where possible. Those of the staging being filled are valid while the writer's lock is
        held, those of one that was handed off until it is durable.
        """
        new = slice(self.n_rows, staging.n)
        kept = np.flatnonzero(~staging.dropped[new]) + self.n_rows if staging.any_dropped else new
        values = {path: column[kept] for path, column in staging.columns.items()}
        episode, env = staging.episode[kept].copy(), staging.env[kept].copy()
        ends = staging.ends(self.n_ends) if staging.n_ends > self.n_ends else _NO_ENDS
        return StagedBlock(episode, env, ends, values)

    def new_rows(self, staging: Staging) -> slice:
        """The rows of a staging that the reader has not processed."""
        return slice(self.n_rows, staging.n)

    def has_new_ends(self, staging: Staging) -> bool:
        """Whether a staging holds ends of episodes that the reader has not processed."""
        return staging.n_ends > self.n_ends

    def mark_processed(self, n_rows: int, n_ends: int = 0) -> None:
        """Note that the reader has processed the first ``n_rows`` rows of the staging, and ``n_ends`` more ends."""
        self.n_rows, self.n_ends = n_rows, self.n_ends + n_ends

    def take_drop(self) -> bool:
        """Whether staged rows were dropped and nothing is in flight any longer; says so once. Lock held."""
        if self._is_dropped and not self._in_flight:
            self._is_dropped = False
            return True
        return False

    def is_behind(self, staging: Staging | None) -> bool:
        """Whether the reader has not processed everything that was handed off or lies in ``staging``."""
        with self.lock:
            if staging is None:
                return bool(self.blocks)
            return bool(self.blocks) or staging.n > self.n_rows or staging.n_ends > self.n_ends
