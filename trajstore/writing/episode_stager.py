"""Stages appended steps, rollouts and whole episodes, and the ends of episodes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from trajstore.errors import DataError, StepPlacedError
from trajstore.format.handles import EpisodeKey, Handle, Handles
from trajstore.format.spans import End, EpisodeValues, check_metadata
from trajstore.schema import Array
from trajstore.writing.commit_pipeline import CommitPipeline
from trajstore.writing.open_episodes import Flags, OpenEpisodes, check_ends, end_of
from trajstore.writing.staging import EpisodeEnds
from trajstore.writing.validation import Step, StepValidator, leading_shape

_NO_VALUES = EpisodeValues()


class EpisodeStager:
    """Checks what callers append, finds the episode and t of each step, and copies the values into the staging.

    Everything is checked before anything changes, so refused data leaves no trace. Callers hold the writer's lock.

    Args:
        stream: Id of the stream, for handles.
        validator: Checks values against the schema.
        open_episodes: The open episode of each environment.
        pipeline: Gives the staging to fill, and commits it.
        commit_steps: Hand off once this many steps are staged; None: not by count.

    Attributes:
        counts: Steps appended and dropped, episodes aborted and cut.
    """

    def __init__(
        self,
        stream: str,
        validator: StepValidator,
        open_episodes: OpenEpisodes,
        pipeline: CommitPipeline,
        commit_steps: int | None,
    ) -> None:
        self.counts = dict.fromkeys(("steps", "dropped_steps", "aborted_episodes", "cut_episodes"), 0)
        self._stream = stream
        self._validator = validator
        self._open_episodes = open_episodes
        self._pipeline = pipeline
        self._commit_steps = commit_steps

    def append_step(self, step: Step, env: int, terminated: Flags, truncated: Flags, final: Step | None) -> Handle:
        """Append one step of one environment."""
        rows = self._validator.steps(step, (), final)
        env = self._open_episodes.check_env(env)
        end = end_of(terminated, truncated, End.OPEN)
        finals = self._validator.finals(final, ())
        if finals is not None and end is End.OPEN:
            raise DataError("final: given for a step that does not end its episode")
        staging = self._pipeline.make_room(1 + (finals is not None))
        if self._open_episodes.episode[env] < 0:
            self._open_episodes.start_one(env)
        at = staging.reserve(1).start
        for path, value in rows.items():
            staging.columns[path][at] = value
        episode, t = int(self._open_episodes.episode[env]), int(self._open_episodes.t[env])
        staging.episode[at], staging.env[at] = episode, env
        self._open_episodes.t[env] = t + 1
        self.counts["steps"] += 1
        if finals is not None:
            self._stage_final(_as_rows(finals), np.array([episode]), np.array([env]))
        if end is not End.OPEN:
            self._end(env, end, finals is not None, _NO_VALUES)
        self._commit_by_count()
        return Handle(self._stream, episode, t)

    def append_steps(
        self, step: Step, envs: Iterable[int], terminated: Flags, truncated: Flags, final: Step | None
    ) -> Handles:
        """Append one step of each of several environments."""
        env = self._open_episodes.check_envs(envs)
        n = len(env)
        rows = self._validator.steps(step, (n,), final)
        finals = self._validator.finals(final, (n,))
        ends = check_ends(terminated, truncated, (n,))
        ending = np.flatnonzero(ends)
        staging = self._pipeline.make_room(n + (len(ending) if finals is not None else 0))
        positions = self._open_episodes.step(env)
        staging.extend(rows, positions.episode, env)
        self.counts["steps"] += n
        if len(ending):
            ending_finals = _select(finals, ending)
            self._end_many(positions.episode[ending], env[ending], ends[ending], ending_finals, _NO_VALUES)
            self._open_episodes.episode[env[ending]] = -1
        self._commit_by_count()
        return Handles(self._stream, positions.episode, positions.t)

    def append_rollout(
        self,
        data: Step,
        envs: Iterable[int] | None,
        terminated: Flags,
        truncated: Flags,
        final: Step | None,
        metadata: Mapping[str, Any] | None,
    ) -> Handles:
        """Append a ``[T, B]`` block of steps, whole or not at all."""
        shape = leading_shape(data, 2)
        env = self._open_episodes.check_envs(range(shape[1]) if envs is None else envs)
        if len(env) != shape[1]:
            raise DataError(f"rollout: {len(env)} envs, but the data has {shape[1]} columns")
        rows = self._validator.steps(data, shape, final)
        finals = self._validator.finals(final, shape)
        values = check_metadata(self._validator.schema, metadata)
        ends = check_ends(terminated, truncated, shape)
        return self._stage_rollout(rows, env, ends, finals, values)

    def _stage_rollout(
        self,
        rows: dict[str, Array],
        env: Array,
        ends: Array,
        finals: dict[str, Array] | None,
        values: EpisodeValues,
    ) -> Handles:
        n_ending = int((ends > 0).sum())
        n_rows = ends.size + (n_ending if finals is not None else 0)
        staging = self._pipeline.make_room(n_rows, len(values.text) * n_ending)
        positions = self._open_episodes.block(env, ends)
        envs = np.broadcast_to(env, ends.shape)
        flat = {path: column.reshape(-1, *column.shape[2:]) for path, column in rows.items()}
        staging.extend(flat, positions.episode.reshape(-1), envs.reshape(-1))
        self.counts["steps"] += ends.size
        ending = np.nonzero(ends)
        if len(ending[0]):
            ending_finals = _select(finals, ending)
            self._end_many(positions.episode[ending], envs[ending], ends[ending], ending_finals, values)
        self._commit_by_count()
        return Handles(self._stream, positions.episode, positions.t)

    def append_episode(
        self, data: Step, env: int, terminated: bool, truncated: bool, metadata: Mapping[str, Any] | None
    ) -> EpisodeKey:
        """Append a whole episode, in several parts if it is larger than a staging."""
        end = end_of(terminated, truncated, End.CUT)
        rows, n_steps, has_final = self._validator.episode(data)
        values = check_metadata(self._validator.schema, metadata)
        env = self._open_episodes.check_env(env)
        if self._open_episodes.episode[env] >= 0:
            raise DataError(f"env {env} has an open episode; end it before appending a whole one")
        n = n_steps + has_final
        self._pipeline.make_room(min(n, self._pipeline.fill().capacity), len(values.text))
        episode = self._open_episodes.start_one(env)
        try:
            self._stage_episode(rows, env, episode, n)
        except BaseException:  # part of an episode larger than the buffer may be on disk already
            self._abort(env)
            raise
        self.counts["steps"] += n_steps
        self._end(env, end, has_final, values)
        self._commit_by_count()
        return EpisodeKey(self._stream, episode)

    def _stage_episode(self, rows: dict[str, Array], env: int, episode: int, n: int) -> None:
        """Stage ``n`` rows of one episode, in as many parts as the buffer needs."""
        done = 0
        while done < n:
            staging = self._pipeline.make_room(min(n - done, self._pipeline.fill().capacity))
            part = min(n - done, staging.room)
            where = staging.reserve(part)
            for path, values in rows.items():
                new = values[done : done + part]
                column = staging.columns[path][where]
                column[: len(new)] = new
                column[len(new) :] = 0  # the final row of a field without a final value
            staging.episode[where], staging.env[where] = episode, env
            self._open_episodes.t[env] += part
            done += part

    def end_episode(
        self,
        env: int,
        terminated: bool,
        truncated: bool,
        final: Step | None,
        metadata: Mapping[str, Any] | None,
    ) -> EpisodeKey:
        """End the open episode of an environment."""
        episode = self._open_episodes.open_episode(env)
        end = end_of(terminated, truncated, End.OPEN)
        if end is End.OPEN:
            raise DataError("end_episode: expected terminated=True or truncated=True")
        finals = self._validator.finals(final, ())
        values = check_metadata(self._validator.schema, metadata)
        self._pipeline.make_room(int(finals is not None), len(values.text))
        if finals is not None:
            self._stage_final(_as_rows(finals), np.array([episode]), np.array([env]))
        self._end(env, end, finals is not None, values)
        return EpisodeKey(self._stream, episode)

    def abort_episode(self, env: int) -> EpisodeKey:
        """Give up the open episode of an environment and drop its staged steps."""
        episode = self._open_episodes.open_episode(env)
        self._pipeline.fill()
        self._abort(env)
        return EpisodeKey(self._stream, episode)

    def cut_open_episodes(self) -> int:
        """End all open episodes as cut; return how many there were."""
        open_envs = self._open_episodes.open_envs()
        if open_envs:
            self._pipeline.fill()
            self.counts["cut_episodes"] += len(open_envs)
        for env in open_envs:
            self._end(env, End.CUT, False, _NO_VALUES)
        return len(open_envs)

    def amend(self, values: Step, env: int, t: int | None) -> Handle:
        """Replace values of a staged step of an open episode."""
        episode = self._open_episodes.open_episode(env)
        n = int(self._open_episodes.t[env])
        step = n - 1 if t is None else t
        if not isinstance(step, (int, np.integer)) or not 0 <= step < n:
            raise DataError(f"t: the open episode of env {env} has steps 0 to {n - 1}, got {t!r}")
        rows = self._validator.amendment(values)
        staging = self._pipeline.fill()
        row = staging.find(episode, step - int(self._open_episodes.placed[env]))
        if row is None:
            raise StepPlacedError(
                f"step {step} of env {env} is committed; only steps appended since can be amended"
            )
        for path, value in rows.items():
            staging.columns[path][row] = value
        if self._pipeline.listener is not None:
            self._pipeline.listener.amended(episode, int(step), rows)
        return Handle(self._stream, episode, step)

    def drop(self) -> None:
        """Drop everything that is staged."""
        self.counts["dropped_steps"] += self._pipeline.drop()

    def _stage_final(self, finals: dict[str, Array], episode: Array, env: Array) -> None:
        """Stage the final row of these episodes; fields without a final value hold zeros there."""
        staging = self._pipeline.fill()
        staging.extend({path: finals.get(path, np.zeros(())) for path in staging.columns}, episode, env)

    def _end(self, env: int, end: End, has_final: bool, values: EpisodeValues) -> None:
        episode = int(self._open_episodes.episode[env])
        self._pipeline.fill().end(EpisodeEnds(1, episode, int(env), end, has_final, values))
        self._open_episodes.episode[env] = -1

    def _end_many(
        self, episode: Array, env: Array, ends: Array, finals: dict[str, Array] | None, values: EpisodeValues
    ) -> None:
        if finals is not None:
            self._stage_final(finals, episode, env)
        self._pipeline.fill().end(EpisodeEnds(len(episode), episode, env, ends, finals is not None, values))

    def _abort(self, env: int) -> None:
        self.counts["dropped_steps"] += self._pipeline.fill().drop(int(self._open_episodes.episode[env]))
        self.counts["aborted_episodes"] += 1
        self._end(env, End.ABORTED, False, _NO_VALUES)

    def _commit_by_count(self) -> None:
        steps, staging = self._commit_steps, self._pipeline.staging
        is_due = steps is not None and staging is not None and staging.n >= steps
        if is_due or self._pipeline.is_overdue:
            self._pipeline.hand_off_if_free()


def _as_rows(values: dict[str, Array]) -> dict[str, Array]:
    return {path: value[None] for path, value in values.items()}


def _select(values: dict[str, Array] | None, where: Any) -> dict[str, Array] | None:
    return None if values is None else {path: value[where] for path, value in values.items()}
