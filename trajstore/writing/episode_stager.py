"""Stages appended steps, rollouts and whole episodes, and the ends of episodes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from trajstore.errors import DataError, StepPlacedError
from trajstore.format.handles import EpisodeKey, Handle, Handles
from trajstore.format.spans import End, EpisodeValues, check_metadata
from trajstore.schema import Array, Schema
from trajstore.writing.autoreset import Autoreset, FinalObservations
from trajstore.writing.commit_pipeline import CommitPipeline
from trajstore.writing.open_episodes import Flags, OpenEpisodes, RolloutPositions, check_ends, end_of
from trajstore.writing.staging import EpisodeEnds
from trajstore.writing.step_form import StepForm
from trajstore.writing.validation import Step, StepValidator, leading_shape

_NO_VALUES = EpisodeValues()
_FALSE, _BOOL = np.False_, np.dtype(bool)


class EpisodeStager:
    """Checks what callers append, finds the episode and t of each step, and copies the values into the staging.

    Everything is checked before anything changes, so refused data leaves no trace. Callers hold the writer's lock.

    Args:
        stream: Id of the stream, which handles name.
        validator: Checks values against the schema.
        open_episodes: The open episode of each environment.
        pipeline: Gives the staging to fill, and commits it.
        commit_steps: Hand off once this many steps are staged; None: not by count.

    Attributes:
        stream: Id of the stream.
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
        self.stream = stream
        self._validator = validator
        self._open_episodes = open_episodes
        self._pipeline = pipeline
        self._commit_steps = commit_steps
        self._last_finals = FinalObservations()
        self._finals_of: tuple[Schema | None, bool] = None, False
        self._form, self._forms = StepForm(0), StepForm(1)
        self._form_envs = 0  # environments of the steps whose form is known

    def append_step(
        self,
        step: Step,
        env: int,
        terminated: Flags,
        truncated: Flags,
        final: Step | None,
        metadata: Mapping[str, Any] | None = None,
    ) -> Handle:
        """Append one step of one environment."""
        handle = (
            self._append_same(step, env, final) if metadata is None and _are_unset(terminated, truncated) else None
        )
        if handle is not None:
            return handle
        env = self._open_episodes.check_env(env)
        end = end_of(terminated, truncated, End.OPEN)
        rows = self._validator.steps(step, (), final)
        finals = self._validator.finals(final, ())
        if end is End.OPEN:
            finals = None  # checked, and stored only where an episode ends
        if metadata is not None and end is End.OPEN:
            raise DataError(
                "metadata: expected with the step that ends an episode, got for one that does not; pass it only"
                " where terminated or truncated is True, or to end_episode"
            )
        values = check_metadata(self._validator.schema, metadata) if metadata is not None else _NO_VALUES
        staging = self._pipeline.make_room(1 + (finals is not None), len(values.text), 1 + self._has_finals)
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
            self._end(env, end, finals is not None, values)
        self._form.learn(step, final, self._validator.schema, staging)
        self._commit_by_count()
        return Handle(self.stream, episode, t)

    def _append_same(self, step: Step, env: int, final: Step | None) -> Handle | None:
        """Append a step that has the same form as the one before and does not end its episode; None: it has not."""
        pipeline, episodes = self._pipeline, self._open_episodes
        staging = pipeline.staging
        if staging is None or not self._form.is_of(self._validator.known, staging) or type(env) is not int:
            return None
        at = staging.n
        # Room for a final row as well, as the full check wants it.
        is_full = at + 2 > staging.capacity or staging.n_text > pipeline.max_text
        if is_full or not 0 <= env < len(episodes.episode):
            return None
        episode = int(episodes.episode[env])
        if episode < 0 or not self._form.copy(step, final, at):
            return None
        t = int(episodes.t[env])
        staging.add_row(episode, env)
        episodes.t[env] = t + 1
        self.counts["steps"] += 1
        if pipeline.is_overdue or (self._commit_steps is not None and staging.n >= self._commit_steps):
            pipeline.hand_off_if_free()
        return Handle(self.stream, episode, t)

    def append_steps(
        self,
        step: Step,
        envs: Iterable[int],
        terminated: Flags,
        truncated: Flags,
        final: Step | None,
        metadata: Mapping[str, Any] | None = None,
        autoreset: Autoreset | None = None,
    ) -> Handles:
        """Append one step of each of several environments, except those that only reset themselves."""
        env = self._open_episodes.check_envs(envs)
        n = len(env)
        if metadata is None and _are_all_unset(terminated, truncated, n):
            handles = self._append_same_steps(step, env, final, autoreset)
            if handles is not None:
                return handles
        rows = self._validator.steps(step, (n,), final)
        finals = self._validator.finals(final, (n,))
        ends = check_ends(terminated, truncated, (n,))
        values = check_metadata(self._validator.schema, metadata) if metadata is not None else _NO_VALUES
        resetting = self._resetting(env, ends, autoreset)
        self._last_finals.check(env, rows, resetting, autoreset)
        self._last_finals.warn_if_unknown(ends, finals, autoreset)
        if resetting is None:
            positions = self._stage_steps(rows, env, ends, finals, values)
            if self._pipeline.staging is not None:
                self._forms.learn(step, final, self._validator.schema, self._pipeline.staging)
                self._form_envs = n
            return Handles(self.stream, positions.episode, positions.t)
        kept = np.flatnonzero(~resetting)
        of_kept = {path: value[kept] for path, value in rows.items()}
        stored = self._stage_steps(of_kept, env[kept], ends[kept], _select(finals, kept), values)
        self._open_episodes.forget_ends(env[resetting])
        return _at(kept, (n,), self.stream, stored)

    def _append_same_steps(
        self, step: Step, env: Array, final: Step | None, autoreset: Autoreset | None
    ) -> Handles | None:
        """Append steps that have the same form as those before and end no episode; None: they have not."""
        staging, n = self._pipeline.staging, len(env)
        if staging is None or n != self._form_envs or not self._forms.is_of(self._validator.known, staging):
            return None
        # Room for final rows as well, as the full check wants it.
        is_full = staging.room < 2 * n or staging.n_text > self._pipeline.max_text
        is_plain = autoreset != "next_step" or not self._open_episodes.has_ended[env].any()
        where = slice(staging.n, staging.n + n)
        if is_full or not is_plain or self._last_finals or not self._forms.copy(step, final, where):
            return None
        positions = self._open_episodes.step(env)
        staging.reserve(n)
        staging.episode[where], staging.env[where] = positions.episode, env
        self.counts["steps"] += n
        self._commit_by_count()
        return Handles(self.stream, positions.episode, positions.t)

    @property
    def _has_finals(self) -> bool:
        """Whether an episode that ends may take one row more."""
        schema = self._validator.schema
        if schema is not self._finals_of[0]:
            self._finals_of = schema, bool(schema.final_fields)
        return self._finals_of[1]

    def _resetting(self, env: Array, ends: Array, autoreset: Autoreset | None) -> Array | None:
        """Which of the environments only reset themselves in this step; None if none of them does.

        Raises:
            DataError: An episode ends in such a step.
        """
        if autoreset != "next_step" or not self._open_episodes.has_ended[env].any():
            return None
        resetting: Array = self._open_episodes.has_ended[env]
        _check_no_ends(env, ends, resetting)
        return resetting

    def _stage_steps(
        self,
        rows: dict[str, Array],
        env: Array,
        ends: Array,
        finals: dict[str, Array] | None,
        values: EpisodeValues,
    ) -> RolloutPositions:
        n, ending = len(env), np.flatnonzero(ends)
        n_rows = n + (len(ending) if finals is not None else 0)
        most = n * (1 + self._has_finals)
        staging = self._pipeline.make_room(n_rows, len(values.text) * len(ending), most)
        positions = self._open_episodes.step(env)
        staging.extend(rows, positions.episode, env)
        self.counts["steps"] += n
        if len(ending):
            ending_finals = _select(finals, ending)
            self._end_many(positions.episode[ending], env[ending], ends[ending], ending_finals, values)
            self._open_episodes.end(env[ending])
            if finals is not None:
                self._last_finals.remember(env, rows, finals, ending)
        self._commit_by_count()
        return positions

    def append_rollout(
        self,
        data: Step,
        envs: Iterable[int] | None,
        terminated: Flags,
        truncated: Flags,
        final: Step | None,
        metadata: Mapping[str, Any] | None,
        autoreset: Autoreset | None = None,
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
        resets = None
        if autoreset == "next_step":
            resets = self._open_episodes.resetting(env, ends)
            _check_no_ends(np.broadcast_to(env, shape), ends, resets)
        return self._stage_rollout(rows, env, ends, finals, values, resets)

    def _stage_rollout(
        self,
        rows: dict[str, Array],
        env: Array,
        ends: Array,
        finals: dict[str, Array] | None,
        values: EpisodeValues,
        resets: Array | None,
    ) -> Handles:
        n_ending = int((ends > 0).sum())
        kept: Any = slice(None) if resets is None else np.flatnonzero(~resets.reshape(-1))
        n_steps = ends.size if resets is None else len(kept)
        n_rows = n_steps + (n_ending if finals is not None else 0)
        staging = self._pipeline.make_room(n_rows, len(values.text) * n_ending)
        positions = self._open_episodes.block(env, ends, resets)
        envs = np.broadcast_to(env, ends.shape)
        flat = {path: column.reshape(-1, *column.shape[2:])[kept] for path, column in rows.items()}
        staging.extend(flat, positions.episode.reshape(-1)[kept], envs.reshape(-1)[kept])
        self.counts["steps"] += n_steps
        self._last_finals.forget()
        ending = np.nonzero(ends)
        if len(ending[0]):
            ending_finals = _select(finals, ending)
            self._end_many(positions.episode[ending], envs[ending], ends[ending], ending_finals, values)
        self._commit_by_count()
        if resets is None:
            return Handles(self.stream, positions.episode, positions.t)
        return Handles(self.stream, np.where(resets, -1, positions.episode), np.where(resets, -1, positions.t))

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
        self._open_episodes.has_ended[env] = False  # the next step that is appended starts an episode
        self._commit_by_count()
        return EpisodeKey(self.stream, episode)

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
        end = end_of(terminated, truncated, End.CUT)
        finals = self._validator.finals(final, ())
        values = check_metadata(self._validator.schema, metadata)
        self._pipeline.make_room(int(finals is not None), len(values.text))
        if finals is not None:
            self._stage_final(_as_rows(finals), np.array([episode]), np.array([env]))
        self._end(env, end, finals is not None, values)
        return EpisodeKey(self.stream, episode)

    def abort_episode(self, env: int) -> EpisodeKey:
        """Give up the open episode of an environment and drop its staged steps."""
        episode = self._open_episodes.open_episode(env)
        self._pipeline.fill()
        self._abort(env)
        return EpisodeKey(self.stream, episode)

    def cut_episodes(self, envs: Iterable[int] | None = None) -> int:
        """End the open episodes of these environments, or all open ones, as cut; return how many there were."""
        episodes = self._open_episodes
        env = np.arange(len(episodes.episode)) if envs is None else episodes.check_envs(envs)
        is_open = env[episodes.episode[env] >= 0]
        if len(is_open):
            self._end_many(
                episodes.episode[is_open], is_open, np.full(len(is_open), int(End.CUT)), None, _NO_VALUES
            )
            self.counts["cut_episodes"] += len(is_open)
            episodes.end(is_open)
        episodes.forget_ends(env)
        self._last_finals.forget()
        return len(is_open)

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
        return Handle(self.stream, episode, step)

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
        self._open_episodes.end(env)

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
        self._open_episodes.has_ended[env] = False

    def _commit_by_count(self) -> None:
        steps, staging = self._commit_steps, self._pipeline.staging
        is_due = steps is not None and staging is not None and staging.n >= steps
        if is_due or self._pipeline.is_overdue:
            self._pipeline.hand_off_if_free()


def _are_unset(terminated: Flags, truncated: Flags) -> bool:
    """Whether both flags say that the episode continues. By identity: 0, or an array, is no flag."""
    is_open = terminated is None or terminated is False or terminated is _FALSE
    return is_open and (truncated is None or truncated is False or truncated is _FALSE)


def _are_all_unset(terminated: Flags, truncated: Flags, n: int) -> bool:
    """Whether the flags of ``n`` environments say that all episodes continue."""
    for flags in (terminated, truncated):
        if flags is None:
            continue
        if type(flags) is not np.ndarray or flags.dtype is not _BOOL or flags.shape != (n,) or flags.any():
            return False
    return True


def _as_rows(values: dict[str, Array]) -> dict[str, Array]:
    return {path: value[None] for path, value in values.items()}


def _select(values: dict[str, Array] | None, where: Any) -> dict[str, Array] | None:
    return None if values is None else {path: value[where] for path, value in values.items()}


def _at(where: Array, shape: tuple[int, ...], stream: str, positions: RolloutPositions) -> Handles:
    """Handles of some of the steps at their places; -1 elsewhere."""
    episode, t = np.full(shape, -1), np.full(shape, -1)
    episode[where], t[where] = positions.episode, positions.t
    return Handles(stream, episode, t)


def _check_no_ends(env: Array, ends: Array, resetting: Array) -> None:
    wrong = resetting & (ends > 0)
    if wrong.any():
        raise DataError(
            f"env {env[wrong][0]}: its episode ended with the step before, so with autoreset='next_step' this step"
            " resets it, but its flags say that an episode ends; if you have reset the environments yourself, call"
            " cut_episodes() before you append their first step"
        )
