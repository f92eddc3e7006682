"""The methods of a writer that append steps and episodes, and end episodes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from trajstore.errors import DataError
from trajstore.format.handles import EpisodeKey, Handle, Handles
from trajstore.writing.autoreset import Autoreset, as_envs
from trajstore.writing.episode_stager import EpisodeStager
from trajstore.writing.lifecycle import WriterLifecycle
from trajstore.writing.open_episodes import Flags
from trajstore.writing.validation import Step

Envs = Iterable[int] | int | Any  # numbers, how many, or a vector environment


class AppendCalls:
    """Each method takes the writer's lock and calls the stager."""

    _stager: EpisodeStager
    _lifecycle: WriterLifecycle
    _call: AbstractContextManager[None]

    def append(
        self,
        step: Step,
        *,
        env: int | None = None,
        envs: Envs | None = None,
        terminated: Flags = None,
        truncated: Flags = None,
        final: Step | None = None,
        metadata: Mapping[str, Any] | None = None,
        autoreset: Autoreset | None = None,
    ) -> Handle | Handles:
        """Append one step of one environment, or of several at once; starts an episode where none is open.

        Args:
            step: Values by field; with ``envs``, each with a leading axis over them. Copied.
            env: The environment (0 if neither is given).
            envs: Several environments: their numbers (each at most once), how many there are, or the vector
                environment that returned the values, whose ``metadata["autoreset_mode"]`` says when it resets.
            terminated: Whether the episode ends with this step; with ``envs``, one flag each.
            truncated: The same, for time limits and the like. Where both are set, terminated counts.
            final: Final values (next observations); with ``envs``, a row for each environment. They are stored
                where an episode ends here, so they may be passed with every step.
            metadata: As for `append_episode`, for every episode that ends with this step.
            autoreset: When the environments of ``envs`` reset themselves. ``"next_step"``: the step after an end
                resets an environment, so it is not stored; ``"same_step"``: the step that ends an episode does;
                ``"disabled"``: they do not. By default as a vector environment says; see docs/gymnasium.md.

        Returns:
            The handle of the step, or the handles of all of them; episode and t are -1 where nothing was stored,
            because the environment reset itself.
        """
        with self._lifecycle.own_lock(), self._call:
            if envs is None:
                if autoreset is not None:
                    raise DataError("autoreset: expected together with envs=")
                return self._stager.append_step(
                    step, 0 if env is None else env, terminated, truncated, final, metadata
                )
            if env is not None:
                raise DataError("give either env or envs, not both")
            numbers, mode = as_envs(envs, autoreset)
            return self._stager.append_steps(step, numbers, terminated, truncated, final, metadata, mode)

    def append_episode(
        self,
        data: Step,
        *,
        terminated: bool = False,
        truncated: bool = False,
        env: int = 0,
        metadata: Mapping[str, Any] | None = None,
    ) -> EpisodeKey:
        """Append a whole episode of T steps.

        Args:
            data: Arrays of T rows by field; fields with a final value may have T + 1, all of them or none. Copied.
            terminated: It ended in a terminal state.
            truncated: It was stopped from outside. With neither, the recording was cut.
            env: The environment it was recorded in; must have no open episode.
            metadata: Values of declared episode columns, and anything else that JSON can hold.

        Returns:
            The episode's key, valid for ever.
        """
        with self._lifecycle.own_lock(), self._call:
            return self._stager.append_episode(data, env, terminated, truncated, metadata)

    def append_rollout(
        self,
        data: Step,
        *,
        envs: Envs | None = None,
        terminated: Flags = None,
        truncated: Flags = None,
        final: Step | None = None,
        metadata: Mapping[str, Any] | None = None,
        autoreset: Autoreset | None = None,
    ) -> Handles:
        """Append a block of T steps of B environments; episodes may end anywhere in it.

        The block is stored whole or not at all, so it must fit half of ``buffer_bytes``.

        Args:
            data: Arrays ``[T, B, ...]`` by field. Copied.
            envs: The B environments, as for `append`; 0 to B - 1 by default.
            terminated: Flags ``[T, B]``: the episode ends with that step; the next step starts another.
            truncated: The same; where both are set, terminated counts.
            final: Arrays ``[T, B, ...]`` of final values; only those of steps that end an episode are stored.
            metadata: As for `append_episode`, for every episode that ends in the block.
            autoreset: As for `append`: with ``"next_step"``, steps that follow an end are not stored.

        Returns:
            Handles with arrays ``[T, B]``; -1 where nothing was stored.
        """
        with self._lifecycle.own_lock(), self._call:
            numbers, mode = as_envs(envs, autoreset)
            return self._stager.append_rollout(data, numbers, terminated, truncated, final, metadata, mode)

    def end_episode(
        self,
        env: int = 0,
        *,
        terminated: bool = False,
        truncated: bool = False,
        final: Step | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> EpisodeKey:
        """End the open episode of an environment.

        Args:
            env: Which environment.
            terminated: It ended in a terminal state.
            truncated: It was stopped from outside. With neither, the recording was cut.
            final: Final values of the fields that have one.
            metadata: Values of declared episode columns, and anything else that JSON can hold.
        """
        with self._lifecycle.own_lock(), self._call:
            return self._stager.end_episode(env, terminated, truncated, final, metadata)

    def abort_episode(self, env: int = 0) -> EpisodeKey:
        """Give up the open episode of an environment. Its placed steps stay readable, marked aborted."""
        with self._lifecycle.own_lock(), self._call:
            return self._stager.abort_episode(env)

    def cut_episodes(self, envs: Envs | None = None) -> int:
        """End open episodes as cut, because you reset the environments; returns how many there were.

        Also says that the next step of each environment is a first step, even if it ended last with
        ``autoreset="next_step"``.

        Args:
            envs: The environments, as for `append`; all of them by default.
        """
        with self._lifecycle.own_lock(), self._call:
            return self._stager.cut_episodes(None if envs is None else as_envs(envs, "disabled")[0])

    def amend(self, values: Step, *, env: int = 0, t: int | None = None) -> Handle:
        """Replace values of a step that is not placed yet (a human took over and acted differently).

        Args:
            values: The fields to replace.
            env: The environment, which must have an open episode.
            t: Which step of the open episode; the newest by default.

        Raises:
            StepPlacedError: A commit has given the step its place on disk.
        """
        with self._lifecycle.own_lock(), self._call:
            return self._stager.amend(values, env, t)
