"""Recording what Gymnasium environments do, into anything with the verbs of a writer.

Row t of an episode holds observation t, the action taken there, and the reward and the info that came of it; the
observation after the last step is the episode's final one. How an episode ended is what the environment said.
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

    from trajstore.compat.gymnasium.recording import Metadata, Moved, OnReset, Recording, Writes
    from trajstore.compat.gymnasium.spaces import (
        AnyEnv,
        FieldOptions,
        Flat,
        Info,
        flags,
        layout_of,
        patched,
        spread,
    )
except ImportError as error:
    raise MissingExtraError(
        "trajstore.compat.gymnasium needs gymnasium 1.1 or newer: pip install 'trajstore[gymnasium]'"
    ) from error

__all__ = ["FieldOptions", "Recorder", "VectorRecorder", "schema_of"]


def schema_of(env: AnyEnv, *, episode: Mapping[str, Any] | None = None, **fields: Unpack[FieldOptions]) -> Schema:
    """The schema of what recorders store of an environment, single or vector.

    Args:
        env: The environment.
        episode: Columns of an episode, as for `trajstore.Schema`.
        fields: See `FieldOptions`; the same as for the recorder.

    Raises:
        SchemaError: A space has no fixed dtype and shape, or two fields have the same name.
    """
    layout = layout_of(env, **fields)
    return Schema(nest(layout.fields), episode=episode, reward=layout.reward)


class Recorder(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Records a single environment; what it returns is what the environment returned.

    Appending happens inside ``step``. Where the writer fails, the step raises what happened; the append is tried
    again by the next call, before the environment moves, so that no recorded episode has a hole.

    Args:
        env: The environment. Not one that resets itself: put such wrappers around the recorder.
        writer: Where to record. It is not closed with the environment.
        env_number: Number of this environment in the writer; every recorder of a writer needs one of its own.
        metadata: Of every episode; a function gets the info of its last step.
        on_reset: What becomes of an episode that is open when ``reset`` or ``close`` is called. ``"truncate"``: it
            ends as truncated, with the newest observation as its final one; ``"abort"``: it is aborted.
        fields: See `FieldOptions`.

    Raises:
        ResetNeeded: By ``step``, where no episode is going on: before the first reset, after an end, or after a
            step that failed.
        DataError: By ``step``, for an action that does not fit its space, before the environment sees it.
    """

    def __init__(
        self,
        env: gymnasium.Env[Any, Any],
        writer: Writes,
        *,
        env_number: int = 0,
        metadata: Metadata | None = None,
        on_reset: OnReset = "truncate",
        **fields: Unpack[FieldOptions],
    ) -> None:
        super().__init__(env)
        self._layout = layout_of(env, **fields)
        self._recording = Recording(writer, range(env_number, env_number + 1), metadata, on_reset)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        everywhere = np.ones(1, bool)
        self._recording.leave(everywhere)
        observation, info = self.env.reset(seed=seed, options=options)
        self._recording.begin(everywhere, self._observed(observation, info))
        return observation, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        self._recording.check_ready()
        values = self._layout.flat(self._layout.action, action, ())
        with self._recording.moving():
            observation, reward, terminated, truncated, info = self.env.step(action)
            values |= self._layout.earned(reward, ()) | self._layout.info(info, is_final=False)
            following = self._observed(observation, info)
            ends = flags("terminated", np.array([terminated]), 1), flags("truncated", np.array([truncated]), 1)
            moved = Moved(np.ones(1, bool), _as_rows(values), following, following, *ends, lambda _: info)
            self._recording.move(moved, needs_reset=moved.ended)
        return observation, reward, terminated, truncated, info

    def close(self) -> None:
        """End an open episode as ``on_reset`` says, and close the environment."""
        try:
            self._recording.stop()
        finally:
            super().close()

    def _observed(self, observation: Any, info: Info) -> Flat:
        layout = self._layout
        return _as_rows(layout.flat(layout.observation, observation, ()) | layout.info(info, is_final=True))


class VectorRecorder(VectorWrapper):
    """Records a vector environment, in every mode of autoreset; what it returns is what the environment returned.

    All environments are appended in one call. The step by which an environment resets itself is no step of an
    episode and is not recorded. See `Recorder` for failures of the writer.

    Args:
        envs: The environments.
        writer: Where to record. It is not closed with the environments.
        first_env: Number of the first environment in the writer; the others follow.
        metadata: Of every episode; a function gets the info of its last step, as a single environment has it.
        on_reset: What becomes of episodes that are open when ``reset`` or ``close`` is called; see `Recorder`.
        fields: See `FieldOptions`.

    Raises:
        ValueError: ``envs.metadata["autoreset_mode"]`` is missing.
        ResetNeeded: By ``step``, where an environment has no episode going on and does not reset itself.
        DataError: By ``step``, for actions that do not fit their space, before the environments see them.
    """

    def __init__(
        self,
        envs: VectorEnv[Any, Any, Any],
        writer: Writes,
        *,
        first_env: int = 0,
        metadata: Metadata | None = None,
        on_reset: OnReset = "truncate",
        **fields: Unpack[FieldOptions],
    ) -> None:
        # What is refused is refused first: some versions of gymnasium close whatever they find half made.
        layout, mode = layout_of(envs, **fields), _autoreset_mode(envs)
        recording = Recording(writer, range(first_env, first_env + envs.num_envs), metadata, on_reset)
        super().__init__(envs)
        self._layout, self._mode, self._recording = layout, mode, recording
        self._is_resetting = np.zeros(envs.num_envs, bool)  # the next step resets these, whatever their action

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset all environments, or those of ``options["reset_mask"]``."""
        mask = self._reset_mask(options)
        self._refuse_second_reset(mask)
        self._recording.leave(mask)
        observations, infos = self.env.reset(seed=seed, options=options)
        self._recording.begin(mask, self._observed(observations, infos, mask))
        self._is_resetting[mask] = False
        return observations, infos

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        self._recording.check_ready()
        values = self._layout.flat(self._layout.action, actions, (self.num_envs,))
        with self._recording.moving():
            observations, rewards, terminated, truncated, infos = self.env.step(actions)
            moved = self._moved(values, observations, rewards, terminated, truncated, infos)
            self._is_resetting = moved.ended if self._mode is AutoresetMode.NEXT_STEP else self._is_resetting
            is_manual = self._mode is AutoresetMode.DISABLED
            self._recording.move(moved, needs_reset=moved.ended & is_manual)
        return observations, rewards, terminated, truncated, infos

    def close(self, **kwargs: Any) -> None:
        """End open episodes as ``on_reset`` says, and close the environments."""
        try:
            self._recording.stop()
        finally:
            super().close(**kwargs)

    def _moved(
        self, values: Flat, observations: Any, rewards: Any, terminated: Any, truncated: Any, infos: Info
    ) -> Moved:
        n, layout, where = self.num_envs, self._layout, ~self._is_resetting
        ends = flags("terminated", terminated, n), flags("truncated", truncated, n)
        is_next = (ends[0] | ends[1]) & (self._mode is AutoresetMode.SAME_STEP)  # shows the next episode already
        values |= layout.earned(rewards, (n,)) | layout.info_rows(infos, where & ~is_next, is_final=False)
        following = final = self._observed(observations, infos, np.ones(n, bool))
        if is_next.any():
            last = infos.get("final_info", {})
            values = patched(values, layout.info_rows(last, is_next, is_final=False), is_next)
            final = patched(following, self._final(infos, last, is_next), is_next)
        return Moved(where, values, following, final, *ends, partial(_info_of, infos, n))

    def _observed(self, observations: Any, infos: Info, mask: Array) -> Flat:
        """Observations of all environments; what comes of the infos, only where the mask is set."""
        layout = self._layout
        flat = layout.flat(layout.observation, observations, (self.num_envs,))
        return flat | layout.info_rows(infos, mask, is_final=True)

    def _final(self, infos: Info, last: Info, ended: Array) -> Flat:
        """What environments that reset within the step showed before: an object for each, or rows of all."""
        layout, given = self._layout, infos.get("final_obs")
        is_there = infos.get("_final_obs", ended)
        if given is None or not np.all(is_there[ended]):
            raise DataError("final_obs: expected in infos for every environment that ended; its mode is SAME_STEP")
        if isinstance(given, np.ndarray) and given.dtype.kind == "O":
            rows = [layout.flat(layout.observation, given[i], ()) for i in np.flatnonzero(ended)]
            flat = {path: spread(np.stack([row[path] for row in rows]), ended) for path in rows[0]}
        else:
            flat = layout.flat(layout.observation, given, (self.num_envs,))
        return flat | layout.info_rows(last, ended, is_final=True)

    def _reset_mask(self, options: Mapping[str, Any] | None) -> Array:
        if options is None or "reset_mask" not in options:
            return np.ones(self.num_envs, bool)
        return flags("options['reset_mask']", options["reset_mask"], self.num_envs)

    def _refuse_second_reset(self, mask: Array) -> None:
        # Without shared memory, gymnasium's workers forget that they were reset and reset again in the next step
        # (as of 1.4). Nothing they return tells, so a transition across that reset would be recorded.
        envs = self.unwrapped
        if isinstance(envs, AsyncVectorEnv) and not envs.shared_memory and (self._is_resetting & mask).any():
            raise ResetNeeded(
                "reset: AsyncVectorEnv(shared_memory=False) would reset environments that have just ended a second"
                " time; step once more before, or use shared_memory=True"
            )


def _autoreset_mode(envs: VectorEnv[Any, Any, Any]) -> AutoresetMode:
    mode = envs.metadata.get("autoreset_mode")
    if mode is None:
        raise ValueError(f"{envs}: expected metadata['autoreset_mode'] to say when it resets, got none")
    return AutoresetMode(mode)


def _info_of(infos: Info, n: int, i: int) -> dict[str, Any]:
    """The info of one of n environments; that of the step itself, where it was reset right after."""
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


def _as_rows(values: Flat) -> Flat:
    return {path: value[None] for path, value in values.items()}
