"""How much a buffer keeps."""

from __future__ import annotations

import math
from dataclasses import dataclass

from trajstore.arguments import check_positive, parse_bytes

PART = 256  # an eviction frees 1/256 of a limit at once, which spreads its cost over many appends


@dataclass(frozen=True, slots=True)
class Retention:
    """What a buffer keeps. If several limits are given, all of them apply.

    The oldest steps are evicted first, in order of arrival. An episode may lose its first steps and keep the
    others; it is *headless* then. The limit on episodes evicts whole episodes that have ended, oldest end first.

    Args:
        steps: Maximum number of steps (transitions; final observations do not count).
        episodes: Maximum number of episodes.
        bytes: Maximum number of bytes that the committed steps take on storage, from the sizes of the stored
            objects. Checkpoints, the episode table and derived columns do not count.
        age_s: Maximum age of a step in seconds. The age counts from the first call that makes the step visible,
            such as the next `sample` or `n_steps`.
        per_stream: Limits on the steps of each stream.
    """

    steps: int | None = None
    episodes: int | None = None
    bytes: int | str | None = None
    age_s: float | None = None
    per_stream: Retention | None = None

    def __post_init__(self) -> None:
        for name in ("steps", "episodes"):
            if getattr(self, name) is not None:
                check_positive(name, getattr(self, name))
        if self.bytes is not None:
            parse_bytes(self.bytes, "bytes")
        if self.age_s is not None and not (isinstance(self.age_s, (int, float)) and 0 < self.age_s < math.inf):
            raise ValueError(f"age_s: expected a positive number of seconds, got {self.age_s!r}")
        if self.per_stream is not None and self.per_stream != Retention(steps=self.per_stream.steps):
            raise ValueError(f"per_stream: expected Retention(steps=...), got {self.per_stream!r}")

    @property
    def is_limited(self) -> bool:
        limits = self.steps, self.episodes, self.bytes, self.age_s, self.per_stream
        return any(limit is not None for limit in limits)

    @staticmethod
    def of(capacity: int | Retention | None) -> Retention:
        """Limits from the argument ``capacity``, where a number limits the steps."""
        if isinstance(capacity, Retention):
            return capacity
        if capacity is not None and (not isinstance(capacity, int) or isinstance(capacity, bool) or capacity < 1):
            raise ValueError(f"capacity: expected a positive integer, a Retention or None, got {capacity!r}")
        return Retention(steps=capacity)
