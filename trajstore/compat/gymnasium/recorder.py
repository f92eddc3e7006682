"""Wrappers that record Gymnasium environments with a writer or a buffer.

Row t of an episode holds observation t, the action taken there, and the reward and info that the step returned. The
observation after the last step is the episode's final one. Episodes end as the environment says.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Unpack

import numpy as np

from trajstore.errors import DataError, MissingExtraError
from trajstore.schema import Array, Schema, nest

try:
    import gymnasium
    from gymnasium.error import ResetNeeded
    from gymnasium.vector import AsyncVectorEnv, AutoresetMode, VectorEnv, VectorWrapper

    from trajstore.compat.gymnasium.episode_recording import (
        EpisodeRecording,
        Metadata,
        OnReset,
        StepWriter,
        VectorStep,
    )
    from trajstore.compat.gymnasium.field_values import FieldValues, Info, bool_per_env, replace_rows, spread
    from trajstore.compat.gymnasium.recorded_fields import AnyEnv, FieldOptions, recorded_fields
except ImportError as error:
    raise MissingExtraError(
        "trajstore.compat.gymnasium needs gymnasium 1.1 or newer: pip install 'gymnasium>=1.1'"
    ) from error

__all__ = ["FieldOptions", "Recorder", "VectorRecorder", "schema_of"]


def schema_of(env: AnyEnv, *, episode: Mapping[str, Any] | None = None, **fields: Unpack[FieldOptions]) -> Schema:
    """Return the schema of the data that a recorder stores.

    Args:
        env: The environment, single or vector.
        episode: Columns of the episode table, as for `trajstore.Schema`.
        fields: See `FieldOptions`; give the recorder the same.

    Raises:
        SchemaError: A space has no fixed dtype and shape, or two fields have the same name.
    """
    recorded = recorded_fields(env, **fields)
    return Schema(nest(recorded.fields), episode=episode, reward=recorded.reward)


class Recorder(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Records a single environment; its methods return what the environment returned.

    ``step`` appends to the writer. If the writer fails, ``step`` raises its error, and the next call repeats the
    append before the environment takes another step. So no recorded episode has a gap.

    Args:
        env: The environment. It must not reset itself: put wrappers that do so around the recorder.
        writer: The writer or buffer. It is not closed with the environment.
        env_number: Number of this environment in the writer; must be unique among the recorders of a writer.
        metadata: Metadata of every episode, or a function that returns it, given the info of the last step.
        on_reset: What happens to an episode that is open when ``reset`` or ``close`` is called. ``"truncate"``: it
            ends as truncated, with the newest observation as its final one; ``"abort"``: it is aborted.
        fields: See `FieldOptions`.

    Raises:
        ResetNeeded: By ``step``, if no episode is running: before the first reset, after an end, or after a step
            that failed.
        DataError: By ``step``, if an action does not match its space; the environment does not see the action.
    """

    def __init__(
        self,
        env: gymnasium.Env[Any, Any],
        writer: StepWriter,
        *,
        env_number: int = 0,
        metadata: Metadata | None = None,
        on_reset: OnReset = "truncate",
        **fields: Unpack[FieldOptions],
    ) -> None:
        super().__init__(env)
        self._fields = recorded_fields(env, **fields)
        self._recording = EpisodeRecording(writer, range(env_number, env_number + 1), metadata, on_reset)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        mask = np.ones(1, bool)
        self._recording.before_reset(mask)
        observation, info = self.env.reset(seed=seed, options=options)
        self._recording.after_reset(mask, self._observed(observation, info))
        return observation, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        self._recording.check_ready()
        values = self._fields.space_values(self._fields.action, action, ())
        with self._recording.stepping():
            observation, reward, terminated, truncated, info = self.env.step(action)
            values |= self._fields.reward_values(reward, ()) | self._fields.info_values(info, is_final=False)
            following = self._observed(observation, info)
            ends = (
                bool_per_env("terminated", np.array([terminated]), 1),
                bool_per_env("truncated", np.array([truncated]), 1),
            )
            step = VectorStep(np.ones(1, bool), _as_rows(values), following, following, *ends, lambda _: info)
            self._recording.record(step, needs_reset=step.ended)
        return observation, reward, terminated, truncated, info

    def close(self) -> None:
        """End an open episode according to ``on_reset``, and close the environment."""
        try:
            self._recording.stop()
        finally:
            super().close()

    def _observed(self, observation: Any, info: Info) -> FieldValues:
        fields = self._fields
        values = fields.space_values(fields.observation, observation, ())
        return _as_rows(values | fields.info_values(info, is_final=True))


class VectorRecorder(VectorWrapper):
    """Records a vector environment, in every autoreset mode; its methods return what the environment returned.

    One call appends the steps of all environments. The step in which an environment resets itself does not belong
    to an episode and is not recorded. See `Recorder` for failures of the writer.

    Args:
        envs: The environments.
        writer: The writer or buffer. It is not closed with the environments.
        first_env: Number of the first environment in the writer; the others follow.
        metadata: Metadata of every episode, or a function that returns it, given the info of the last step in the
            form of a single environment.
        on_reset: What happens to episodes that are open when ``reset`` or ``close`` is called; see `Recorder`.
        fields: See `FieldOptions`.

    Raises:
        ValueError: ``envs.metadata["autoreset_mode"]`` is missing.
        ResetNeeded: By ``step``, if an environment has no running episode and does not reset itself.
        DataError: By ``step``, if actions do not match their space; the environments do not see the actions.
    """

    def __init__(
        self,
        envs: VectorEnv[Any, Any, Any],
        writer: StepWriter,
        *,
        first_env: int = 0,
        metadata: Metadata | None = None,
        on_reset: OnReset = "truncate",
        **fields: Unpack[FieldOptions],
    ) -> None:
        # Check the arguments first: some versions of gymnasium close the environments of a half-made wrapper.
        recorded, mode = recorded_fields(envs, **fields), _autoreset_mode(envs)
        recording = EpisodeRecording(writer, range(first_env, first_env + envs.num_envs), metadata, on_reset)
        super().__init__(envs)
        self._fields, self._mode, self._recording = recorded, mode, recording
        self._is_resetting = np.zeros(envs.num_envs, bool)  # the next step resets these and ignores their actions

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset all environments, or those of ``options["reset_mask"]``."""
        mask = self._reset_mask(options)
        self._refuse_second_reset(mask)
        self._recording.before_reset(mask)
        observations, infos = self.env.reset(seed=seed, options=options)
        self._recording.after_reset(mask, self._observed(observations, infos, mask))
        self._is_resetting[mask] = False
        return observations, infos

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        self._recording.check_ready()
        values = self._fields.space_values(self._fields.action, actions, (self.num_envs,))
        with self._recording.stepping():
            observations, rewards, terminated, truncated, infos = self.env.step(actions)
            step = self._step_of(values, observations, rewards, terminated, truncated, infos)
            self._is_resetting = step.ended if self._mode is AutoresetMode.NEXT_STEP else self._is_resetting
            is_manual = self._mode is AutoresetMode.DISABLED
            self._recording.record(step, needs_reset=step.ended & is_manual)
        return observations, rewards, terminated, truncated, infos

    def close(self, **kwargs: Any) -> None:
        """End open episodes according to ``on_reset``, and close the environments."""
        try:
            self._recording.stop()
        finally:
            super().close(**kwargs)

    def _step_of(
        self, values: FieldValues, observations: Any, rewards: Any, terminated: Any, truncated: Any, infos: Info
    ) -> VectorStep:
        n, fields, is_step = self.num_envs, self._fields, ~self._is_resetting
        ends = bool_per_env("terminated", terminated, n), bool_per_env("truncated", truncated, n)
        # These environments were reset within the step and return the first observation of their next episode.
        is_reset = (ends[0] | ends[1]) & (self._mode is AutoresetMode.SAME_STEP)
        values |= fields.reward_values(rewards, (n,)) | fields.info_rows(infos, is_step & ~is_reset, is_final=False)
        following = final = self._observed(observations, infos, np.ones(n, bool))
        if is_reset.any():
            final_infos = infos.get("final_info", {})
            values = replace_rows(values, fields.info_rows(final_infos, is_reset, is_final=False), is_reset)
            final = replace_rows(following, self._final(infos, final_infos, is_reset), is_reset)
        return VectorStep(is_step, values, following, final, *ends, partial(_info_of, infos, n))

    def _observed(self, observations: Any, infos: Info, mask: Array) -> FieldValues:
        """Return the observations of all environments, and the final info fields where ``mask`` is set."""
        fields = self._fields
        values = fields.space_values(fields.observation, observations, (self.num_envs,))
        return values | fields.info_rows(infos, mask, is_final=True)

    def _final(self, infos: Info, final_infos: Info, ended: Array) -> FieldValues:
        """Return the last observations of environments that were reset within the step.

        ``final_obs`` holds either one object per environment, or rows of all environments.
        """
        fields, given = self._fields, infos.get("final_obs")
        is_given = infos.get("_final_obs", ended)
        if given is None or not np.all(is_given[ended]):
            raise DataError("final_obs: expected in infos for every environment that ended; its mode is SAME_STEP")
        if isinstance(given, np.ndarray) and given.dtype.kind == "O":
            rows = [fields.space_values(fields.observation, given[i], ()) for i in np.flatnonzero(ended)]
            values = {path: spread(np.stack([row[path] for row in rows]), ended) for path in rows[0]}
        else:
            values = fields.space_values(fields.observation, given, (self.num_envs,))
        return values | fields.info_rows(final_infos, ended, is_final=True)

    def _reset_mask(self, options: Mapping[str, Any] | None) -> Array:
        if options is None or "reset_mask" not in options:
            return np.ones(self.num_envs, bool)
        return bool_per_env("options['reset_mask']", options["reset_mask"], self.num_envs)

    def _refuse_second_reset(self, mask: Array) -> None:
        # Without shared memory, gymnasium's workers forget that they were reset, and reset again in the next step
        # (as of 1.4). Nothing that they return shows it, so a transition across that reset would be recorded.
        envs = self.unwrapped
        if isinstance(envs, AsyncVectorEnv) and not envs.shared_memory and (self._is_resetting & mask).any():
            raise ResetNeeded(
                "reset: AsyncVectorEnv(shared_memory=False) would reset environments that just ended a second time;"
                " step once more before the reset, or use shared_memory=True"
            )


def _autoreset_mode(envs: VectorEnv[Any, Any, Any]) -> AutoresetMode:
    mode = envs.metadata.get("autoreset_mode")
    if mode is None:
        raise ValueError(f"{envs}: expected metadata['autoreset_mode'], which says when it resets, got none")
    return AutoresetMode(mode)


def _info_of(infos: Info, n: int, i: int) -> dict[str, Any]:
    """Return the info of one of n environments; if it was reset within the step, the info of before the reset."""
    info = _pick(infos, n, i)
    info.pop("final_obs", None)
    last: dict[str, Any] = info.pop("final_info", {})
    return info | last


def _pick(infos: Info, n: int, i: int) -> dict[str, Any]:
    values = {name: value for name, value in infos.items() if not (name.startswith("_") and name[1:] in infos)}
    return {
        name: _pick(value, n, i) if isinstance(value, Mapping) else _element(value, n, i)
        for name, value in values.items()
        if f"_{name}" not in infos or infos[f"_{name}"][i]
    }


def _element(value: Any, n: int, i: int) -> Any:
    is_row = isinstance(value, (np.ndarray, list, tuple)) and len(value) == n
    element = value[i] if is_row else value
    return element.item() if isinstance(element, np.generic) else element


def _as_rows(values: FieldValues) -> FieldValues:
    return {path: value[None] for path, value in values.items()}
