"""Checks of the episode table: ends, lengths, final rows, returns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from trajstore.format.episode_table import EpisodeTable
from trajstore.format.spans import End
from trajstore.inspection.doctor.finding import Finding, Severity, share
from trajstore.schema import Array, Schema

_ENOUGH = 20  # finished episodes that a statement about most of them needs
_OFTEN = 0.1
_MOST = 0.5
_OBSERVATIONS = ("obs", "state", "pixel", "image", "frame")  # parts of names of fields that hold observations


@dataclass(frozen=True, slots=True)
class Episodes:
    """Columns of the episode table that the checks need."""

    schema: Schema
    lengths: Array
    ends: Array  # numbers of `End`
    returns: Array
    has_final: Array

    @staticmethod
    def of(table: EpisodeTable, schema: Schema) -> Episodes:
        ends, _ = table.codes("end")
        return Episodes(schema, table["length"], ends, table["return"], table["has_final"])

    @property
    def is_finished(self) -> Array:
        """Which episodes ended by themselves: terminated or truncated."""
        finished: Array = (self.ends == End.TERMINATED) | (self.ends == End.TRUNCATED)
        return finished

    def count(self, end: End) -> int:
        return int((self.ends == end).sum())


def check_episodes(episodes: Episodes) -> Iterator[Finding]:
    """Run all checks of the table."""
    if not len(episodes.lengths):
        yield Finding(
            "no-episodes", Severity.NOTE, "episodes", "the store has no episodes",
            "there is nothing to sample", "append episodes, or check whether all of them are evicted: ls --evicted",
        )  # fmt: skip
        return
    for check in _CHECKS:
        yield from check(episodes)


def _short_episodes(e: Episodes) -> Iterator[Finding]:
    n_empty, n_one = int((e.lengths[e.is_finished] == 0).sum()), int((e.lengths[e.is_finished] == 1).sum())
    n = int(e.is_finished.sum())
    if n_empty:
        yield Finding(
            "empty-episodes", Severity.WARNING, "episodes", f"{share(n_empty, n)} finished episodes have no step",
            "they are counted, but can never be drawn",
            "end an episode only after a step; check what follows a reset",
        )  # fmt: skip
    if n_one and n > 1:
        severity = Severity.WARNING if n_one > _OFTEN * n else Severity.NOTE
        yield Finding(
            "one-step-episodes", severity, "episodes", f"{share(n_one, n)} finished episodes have one step",
            "no window of two steps fits in them; often the step that an environment resets in was recorded as an"
            " episode of its own",
            "check how automatic resets are handled (see autoreset in the docs of gymnasium)",
        )  # fmt: skip


def _missing_finals(e: Episodes) -> Iterator[Finding]:
    n, n_missing = int(e.is_finished.sum()), int((e.is_finished & ~e.has_final).sum())
    if not n_missing:
        return
    n_truncated = int(((e.ends == End.TRUNCATED) & ~e.has_final).sum())
    looks_like = [p for p in e.schema if any(part in p.lower() for part in _OBSERVATIONS)]
    if not e.schema.final_fields and not looks_like:
        return  # nothing here has a next value
    what = f"{share(n_missing, n)} finished episodes have no final observation"
    if n_truncated:
        what += f", {n_truncated:,} of them truncated"
    yield Finding(
        "missing-finals", Severity.WARNING, "episodes", what,
        "their last step has no next observation, so it can't be a transition; after a truncation, its value can't"
        " be bootstrapped",
        "give the observation that the last step returned: one observation more than actions, or final= of append",
    )  # fmt: skip


def _ends(e: Episodes) -> Iterator[Finding]:
    n = int(e.is_finished.sum())
    if n >= _ENOUGH and not e.count(End.TERMINATED):
        yield Finding(
            "never-terminated", Severity.WARNING, "episodes", f"none of {n:,} finished episodes is terminated",
            "values never learn that an episode can end; right only if the task ends by nothing but its time limit",
            "check that the environment's terminated flag is passed, not only the time limit",
        )  # fmt: skip
    n_cut = e.count(End.CUT)
    if n_cut > _OFTEN * len(e.ends) and n_cut > 1:
        yield Finding(
            "cut-episodes", Severity.WARNING, "episodes", f"{share(n_cut, len(e.ends))} episodes are cut",
            "their recording stopped before their end: the writer was closed or died in the middle",
            "end episodes before closing a writer, or close it less often",
        )  # fmt: skip


def _time_limits(e: Episodes) -> Iterator[Finding]:
    terminated = e.lengths[e.ends == End.TERMINATED]
    if len(terminated) < _ENOUGH or not len(e.lengths):
        return
    longest = int(e.lengths.max())
    n = int((terminated == longest).sum())
    if longest > 1 and n >= max(10, _OFTEN * len(terminated)) and not (e.lengths == terminated[0]).all():
        yield Finding(
            "time-limit-terminates", Severity.WARNING, "episodes",
            f"{share(n, len(terminated))} terminated episodes have exactly the longest length, {longest:,} steps",
            "if that is a time limit, values learn a wrong end there",
            "record time limits as truncated=True, not as terminated=True",
        )  # fmt: skip


def _returns(e: Episodes) -> Iterator[Finding]:
    if e.schema.reward is None:
        yield Finding(
            "no-reward", Severity.NOTE, "schema", "no field is known as the reward",
            "returns are missing, and n-step sums can't be made",
            "name the field 'reward', or pass Schema(..., reward=...)",
        )  # fmt: skip
        return
    returns = e.returns[e.lengths > 0]
    if n := int((~np.isfinite(returns)).sum()):
        yield Finding(
            "bad-returns", Severity.ERROR, f"field '{e.schema.reward}'",
            f"{share(n, len(returns))} episodes have a return that is not finite",
            "one NaN or infinity spoils every batch that holds it",
            "find them: ls --where 'return is null or return == inf or return == -inf'; drop them",
        )  # fmt: skip
    elif len(returns) and not returns.any():
        yield Finding(
            "zero-rewards", Severity.WARNING, f"field '{e.schema.reward}'",
            f"the return of all {len(returns):,} episodes is 0",
            "there is nothing to learn from rewards", "check that the reward is passed, and in the right field",
        )  # fmt: skip
    elif len(returns) >= _ENOUGH and (returns == returns[0]).all():
        yield Finding(
            "equal-returns", Severity.NOTE, f"field '{e.schema.reward}'",
            f"all {len(returns):,} episodes have the return {returns[0]:g}",
            "episodes can't be told apart by it", "check the reward, unless the task is like that",
        )  # fmt: skip


_CHECKS: tuple[Callable[[Episodes], Iterator[Finding]], ...] = (
    _short_episodes, _missing_finals, _ends, _time_limits, _returns,
)  # fmt: skip
