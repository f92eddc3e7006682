"""Which windows of the union may be drawn, as learners tell actors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from trajstore.sampling.batches.batch_assembler import Where
from trajstore.sampling.draws import DrawScope
from trajstore.sampling.hindsight import Hindsight


@dataclass(frozen=True)
class SharedFunction:
    """A function or object in Ray's object store. Actors keep it by its key, so that all calls get the same one."""

    key: str
    ref: Any


@dataclass(frozen=True)
class DrawRestrictions:
    """Arguments of `ReplayBuffer.sample` that say which windows are drawn, and how; see there.

    On the way to actors, ``where`` and ``relabel`` are `SharedFunction`; then restrictions are hashable.
    """

    where: Where | SharedFunction | None = None
    recent_steps: int | None = None
    recent_episodes: int | None = None
    recent_fraction: float = 1.0
    prioritised: bool = True
    relabel: Hindsight | SharedFunction | None = None

    def with_functions(self, exchange: Callable[[Any], Any]) -> DrawRestrictions:
        """The same with ``where`` and ``relabel`` exchanged, unless they are None."""
        where = None if self.where is None else exchange(self.where)
        relabel = None if self.relabel is None else exchange(self.relabel)
        return replace(self, where=where, relabel=relabel)

    def keywords(self) -> dict[str, Any]:
        """Keyword arguments for `ReplayBuffer.sample`."""
        return {
            "where": self.where,
            "recent_steps": self.recent_steps,
            "recent_episodes": self.recent_episodes,
            "recent_fraction": self.recent_fraction,
            "prioritised": self.prioritised,
            "relabel": self.relabel,
        }

    def scope(self) -> DrawScope:
        """The restrictions as the sampler of an actor knows them; ``where`` must be a function."""
        where: Any = self.where
        return DrawScope(where, self.recent_steps, self.recent_episodes, self.recent_fraction)
