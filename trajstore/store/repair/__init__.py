"""Salvages what is intact in a damaged store into a new one. `repair` is the whole public part."""

from trajstore.store.repair.repairing import repair
from trajstore.store.repair.report import Damage, LostEpisode, RepairReport, ShortenedEpisode

__all__ = ["Damage", "LostEpisode", "RepairReport", "ShortenedEpisode", "repair"]
