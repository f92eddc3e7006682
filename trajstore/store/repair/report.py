"""What a repair found, kept and lost."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Damage:
    """One damaged object, or a part of one."""

    where: str
    what: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


@dataclass(frozen=True, slots=True)
class LostEpisode:
    """An episode of which no step could be kept.

    Attributes:
        stream: Its stream, as in its key.
        episode: Its number there.
        n_steps: Steps that it had, as far as the span table still tells.
    """

    stream: str
    episode: int
    n_steps: int


@dataclass(frozen=True, slots=True)
class ShortenedEpisode:
    """An episode that was cut before its first damaged step.

    Attributes:
        stream: Its stream, as in its key.
        episode: Its number there.
        n_steps: Steps that it has now.
        n_lost: Steps that it had after them, as far as the span table still tells.
    """

    stream: str
    episode: int
    n_steps: int
    n_lost: int


@dataclass(slots=True)
class RepairReport:
    """The result of `repair`.

    Attributes:
        source: URL of the damaged store, without credentials.
        url: URL of the repaired store.
        n_streams: Streams of the repaired store.
        n_episodes: Episodes that it shows.
        n_steps: Steps of these.
        damages: Everything that is damaged in the source, by object.
        mended: What was damaged and is whole again, because other objects say the same.
        lost_streams: By stream id: why nothing of it could be kept.
        lost_episodes: Episodes of which no step could be kept.
        shortened: Episodes that end before their first damaged step; they are marked as `cut`.
        lost_metadata: Keys of episodes whose text (metadata and text columns) was lost.
        lost_columns: Derived columns that were lost: the stream that they belong to, and the name.
        lost_checkpoints: By checkpoint id: why it could not be kept.
    """

    source: str
    url: str
    n_streams: int = 0
    n_episodes: int = 0
    n_steps: int = 0
    damages: list[Damage] = field(default_factory=list)
    mended: list[str] = field(default_factory=list)
    lost_streams: dict[str, str] = field(default_factory=dict)
    lost_episodes: list[LostEpisode] = field(default_factory=list)
    shortened: list[ShortenedEpisode] = field(default_factory=list)
    lost_metadata: list[tuple[str, int]] = field(default_factory=list)
    lost_columns: list[tuple[str, str]] = field(default_factory=list)
    lost_checkpoints: dict[str, str] = field(default_factory=dict)

    @property
    def has_losses(self) -> bool:
        """Whether anything was lost that the undamaged store had."""
        losses = (
            self.lost_streams,
            self.lost_episodes,
            self.shortened,
            self.lost_metadata,
            self.lost_columns,
            self.lost_checkpoints,
        )
        return any(losses)
