"""Options of a writer, checked when they are made."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from trajstore.arguments import parse_bytes
from trajstore.format.argument_checks import check_stream_ids
from trajstore.format.commit_record import StreamExtent
from trajstore.format.ids import is_stream_id

_MAX_WORLD_CHARACTERS = 256


@dataclass(frozen=True, slots=True)
class WriterOptions:
    """How a writer behaves.

    Args:
        commit_steps: Commit in the background after this many staged steps; None: not by count.
        commit_seconds: The most seconds between background commits; None: not by time.
        buffer_bytes: Bound of the memory for appended steps that are not yet durable. When half of it is full, a
            background commit starts; when all of it is full, appends wait.
        rank: Rank of this writer, recorded with the stream.
        world_size: Number of ranks, recorded with the stream.
        world: Id of the set of sessions that this session writes with; None: it writes alone.
        checkpoint: Id of the checkpoint that this set of sessions started from.
        dead: Ids of streams whose writers this session declares dead; their open episodes read as cut.
        continues: What this set of sessions shows of each older stream, if it started from a checkpoint.
    """

    commit_steps: int | None = None
    commit_seconds: float | None = 10.0
    buffer_bytes: int | str = "256MiB"
    rank: int | None = None
    world_size: int | None = None
    world: str | None = None
    checkpoint: str | None = None
    dead: Collection[str] = ()
    continues: Mapping[str, StreamExtent] | None = None

    def __post_init__(self) -> None:
        for name, low in (("commit_steps", 1), ("rank", 0), ("world_size", 0)):
            value = getattr(self, name)
            if value is not None and not (type(value) is int and low <= value < 1 << 62):
                raise ValueError(f"{name}: expected an integer of at least {low} or None, got {value!r}")
        seconds = self.commit_seconds
        if seconds is not None and (isinstance(seconds, (bool, str)) or not seconds > 0):
            raise ValueError(f"commit_seconds: expected a positive number or None, got {self.commit_seconds!r}")
        parse_bytes(self.buffer_bytes, "buffer_bytes")
        self._check_lineage()

    @property
    def recorded(self) -> dict[str, Any]:
        """The options that a stream's record repeats."""
        return {name: getattr(self, name) for name in ("rank", "world_size", "world", "checkpoint", "continues")}

    def _check_lineage(self) -> None:
        if self.world is not None and not _is_printable(self.world):
            raise ValueError(
                f"world: expected text of 1 to {_MAX_WORLD_CHARACTERS} characters or None, got {self.world!r:.80}"
            )
        # Ids of checkpoints and of streams have the same form.
        if self.checkpoint is not None and not (isinstance(self.checkpoint, str) and is_stream_id(self.checkpoint)):
            raise ValueError(f"checkpoint: expected the id of a checkpoint or None, got {self.checkpoint!r:.80}")
        check_stream_ids(self.dead, "dead")


def _is_printable(value: object) -> bool:
    return isinstance(value, str) and 1 <= len(value) <= _MAX_WORLD_CHARACTERS and value.isprintable()
