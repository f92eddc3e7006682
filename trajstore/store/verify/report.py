"""What a verification reports: problems, notes and counts."""

from __future__ import annotations

from dataclasses import dataclass, field

_COUNTED = ("streams", "rows", "spans", "episodes", "checkpoints", "chunks", "bytes")


@dataclass(frozen=True, slots=True)
class VerifyProblem:
    """An object that a reader relies on is damaged, missing or contradicts another one."""

    where: str
    what: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


@dataclass(frozen=True, slots=True)
class VerifyNote:
    """A harmless leftover, or something in progress."""

    where: str
    what: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


@dataclass(slots=True)
class VerifyReport:
    """The result of `verify`.

    Attributes:
        url: URL of the store, without credentials.
        problems: Everything that is wrong; empty for a healthy store.
        notes: Harmless leftovers.
        counts: How many streams, rows, spans, episodes, checkpoints, chunks and bytes were checked.
    """

    url: str
    problems: list[VerifyProblem] = field(default_factory=list)
    notes: list[VerifyNote] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_COUNTED, 0))

    @property
    def is_clean(self) -> bool:
        """Whether no problem was found."""
        return not self.problems


def without_subject(error: Exception, subject: str) -> str:
    """The text of an error without the name that it begins with."""
    return str(error).removeprefix(subject).removeprefix(":").strip()
