"""One thing that looks wrong in a store."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class Severity(IntEnum):
    """How bad a finding is."""

    NOTE = 0  # may well be intended
    WARNING = 1  # costs quality of training, time or space
    ERROR = 2  # training on this data goes wrong

    @property
    def label(self) -> str:
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check found.

    Attributes:
        code: Short name of the check, which does not change.
        severity: How bad it is.
        where: The field, stream or part of the store.
        what: What was seen, with figures.
        why: Why it matters.
        advice: What to do.
    """

    code: str
    severity: Severity
    where: str
    what: str
    why: str
    advice: str


def share(part: int, whole: int) -> str:
    """A part of a whole, such as ``3 of 40 (8 %)``."""
    return f"{part:,} of {whole:,} ({part / max(1, whole):.0%})".replace("%", " %")
