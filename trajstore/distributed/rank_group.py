"""The ranks that write one store together, as one of them sees the group: notes, waiting, agreement."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from trajstore.distributed.rank_notes import LocalNotes, RankNotes
from trajstore.errors import ClosedError, RankError, RankTimeoutError
from trajstore.format.ids import new_id

FIRST_POLL_S = 0.002  # the first pause between two reads of notes; later pauses are twice as long each


@dataclass(slots=True)
class RankGroup:
    """One rank's view of all ranks that write a store together.

    Attributes:
        id: Id of the world, as recorded with streams and checkpoints.
        rank: The rank of this process.
        size: Number of ranks.
        notes: Where the ranks leave notes for each other.
        timeout_s: How long to wait for another rank, in seconds.
        is_closing: Set when this rank closes its buffer; then it stops waiting for other ranks.
    """

    id: str
    rank: int
    size: int
    notes: RankNotes
    timeout_s: float
    is_closing: threading.Event = field(default_factory=threading.Event)

    @property
    def is_leader(self) -> bool:
        return self.rank == 0

    def post(self, key: str, note: Any) -> None:
        """Leave a note, or remove it (None)."""
        self.notes.post(key, note)

    def read(self, key: str, rank: int = 0) -> Any:
        """A rank's current note; None if it has none."""
        return self.notes.read([rank], key).get(rank)

    def gather(self, key: str, note: Any) -> list[Any]:
        """Leave a note, wait for those of all other ranks, and return all of them by rank.

        Raises:
            RankTimeoutError: A rank left none in time.
        """
        self.post(key, note)
        return self.await_notes(key, range(self.size))

    def await_notes(self, key: str, ranks: Iterable[int], what: str | None = None) -> list[Any]:
        """Wait until these ranks have left a note; returns the notes in the order of ``ranks``.

        Args:
            key: Key of the notes.
            ranks: The ranks to wait for.
            what: What the notes are about, for error messages; by default the key.

        Raises:
            RankTimeoutError: Some ranks left no note in time; names them.
            RankError: A rank closed its buffer before it left a note; names it.
            ClosedError: This rank's buffer was closed during the wait.
        """
        wanted, what = list(ranks), what or key
        found: dict[int, Any] = {}
        until, pause = time.monotonic() + self.timeout_s, FIRST_POLL_S
        while True:
            found |= self.notes.read([rank for rank in wanted if rank not in found], key)
            missing = [rank for rank in wanted if rank not in found]
            if not missing:
                return [found[rank] for rank in wanted]
            if pause >= self.notes.poll_s:  # asked for less often than the notes: it costs another read
                self._check_none_left(missing, what)
            self._check_time(until, missing, what)
            if self.is_closing.wait(pause) or not threading.main_thread().is_alive():
                raise ClosedError(f"the buffer was closed while it waited for {rank_names(missing)}")
            pause = min(2 * pause, self.notes.poll_s)

    def _check_none_left(self, ranks: list[int], what: str) -> None:
        if left := self.ranks_that_left(ranks):
            raise RankError(f"{rank_names(left)} of {self.size} closed the buffer before that ({what})")

    def _check_time(self, until: float, missing: list[int], what: str) -> None:
        if time.monotonic() > until:
            raise RankTimeoutError(
                f"{rank_names(missing)} of {self.size} did not answer within {self.timeout_s:g} s ({what}):"
                " not running, or stuck"
            )

    def leave(self) -> None:
        """Leave a note that this rank has closed its buffer, so that other ranks do not wait for it."""
        if self.size > 1:
            self.post("left", True)

    def ranks_that_left(self, ranks: Iterable[int] | None = None) -> list[int]:
        """Which of some ranks (None: of all) have closed their buffers."""
        if self.size == 1:
            return []
        return sorted(self.notes.read(range(self.size) if ranks is None else ranks, "left"))

    def agree(self, key: str, facts: Mapping[str, Any]) -> None:
        """Check that all ranks have the same facts; a rank for which a fact is None has no say in it.

        Raises:
            RankError: A rank differs; names it, the fact and both values.
            RankTimeoutError: A rank did not answer in time.
        """
        notes = self.gather(key, {name: fact for name, fact in facts.items() if fact is not None})
        for name in sorted({name for note in notes for name in note}):
            known = [(rank, note[name]) for rank, note in enumerate(notes) if name in note]
            for rank, fact in known:
                if fact != known[0][1]:
                    raise RankError(
                        f"rank {rank} has {name} {fact!r:.200}, rank {known[0][0]} has {known[0][1]!r:.200}; all"
                        " ranks of a world need the same"
                    )


def rank_names(ranks: Iterable[int]) -> str:
    listed = [str(rank) for rank in ranks]
    return f"rank{'s' if len(listed) > 1 else ''} {', '.join(listed)}"


def check_ranks(rank: int | None, world_size: int | None) -> None:
    """Check a rank and a number of ranks; both may be None.

    Raises:
        ValueError: Only one is None, one is not an integer in range, or the rank is not below the number of ranks.
    """
    if (rank is None) != (world_size is None):
        raise ValueError(f"rank and world_size go together, got rank={rank!r} and world_size={world_size!r}")
    if rank is None or world_size is None:
        return
    for name, value, low in (("world_size", world_size, 1), ("rank", rank, 0)):
        if not isinstance(value, int) or isinstance(value, bool) or value < low:
            raise ValueError(f"{name}: expected an integer of at least {low}, got {value!r}")
    if rank >= world_size:
        raise ValueError(f"rank: expected less than the world_size {world_size}, got {rank}")


def torch_ranks() -> tuple[int, int] | None:
    """This process's rank and the number of processes in torch.distributed; None if it is not in use."""
    from torch import distributed

    if not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed.get_rank(), distributed.get_world_size()


def single_rank(rank: int = 0) -> RankGroup:
    """The group of a session that writes alone."""
    return RankGroup(new_id("world"), rank, 1, LocalNotes(), 0.0)
