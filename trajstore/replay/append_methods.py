"""The methods of a buffer that append steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from trajstore.format.handles import EpisodeKey, Handle, Handles
from trajstore.replay.appending import count_steps
from trajstore.replay.session import Session
from trajstore.writing.append_calls import Envs
from trajstore.writing.autoreset import Autoreset, as_envs
from trajstore.writing.open_episodes import Flags
from trajstore.writing.validation import Step


class AppendMethods:
    """Each method checks the buffer, keeps the pace, and calls the writer."""

    _session: Session

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
        """Append one step of one environment, or of several at once.

        ```
        next_observation, reward, terminated, truncated, infos = envs.step(action)  # a vector environment
        step = {"observation": observation, "action": action, "reward": reward}
        final = {"observation": next_observation}  # stored where an episode ends
        buffer.append(step, envs=envs, terminated=terminated, truncated=truncated, final=final)
        ```

        See `Writer.append` for the arguments.
        """
        session = self._session
        if envs is None:  # the common case, without a context manager
            session.check()
            session.appending.begin(1)
            try:
                handle = session.writer.append(
                    step,
                    env=env,
                    terminated=terminated,
                    truncated=truncated,
                    final=final,
                    metadata=metadata,
                    autoreset=autoreset,
                )
            except BaseException:
                session.appending.cancel(1)
                raise
            session.appending.end(1)
            return handle
        numbers, mode = as_envs(envs, autoreset)
        several: Any = numbers if hasattr(numbers, "__len__") else list(numbers)
        envs, n = several, len(several)
        session.check()
        with session.appending.inserting(n) as insert:
            handles = session.writer.append(
                step,
                env=env,
                envs=envs,
                terminated=terminated,
                truncated=truncated,
                final=final,
                metadata=metadata,
                autoreset=mode,
            )
            if mode == "next_step":
                insert.n = int(np.count_nonzero(np.asarray(handles.episode) >= 0))
        return handles

    def add_episode(
        self,
        data: Step,
        *,
        terminated: bool = False,
        truncated: bool = False,
        env: int = 0,
        metadata: Mapping[str, Any] | None = None,
    ) -> EpisodeKey:
        """Append a whole episode of T steps; see `Writer.append_episode`."""
        session = self._session
        session.check()
        with session.appending.inserting(count_steps(data, 1)):
            return session.writer.append_episode(
                data, terminated=terminated, truncated=truncated, env=env, metadata=metadata
            )

    def extend(
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
        """Append a ``[T, B]`` block: T steps of B environments; see `Writer.append_rollout`."""
        session = self._session
        session.check()
        with session.appending.inserting(count_steps(data, 2)) as insert:
            handles = session.writer.append_rollout(
                data,
                envs=envs,
                terminated=terminated,
                truncated=truncated,
                final=final,
                metadata=metadata,
                autoreset=autoreset,
            )
            insert.n = int((handles.episode >= 0).sum())
        return handles

    def end_episode(
        self,
        env: int = 0,
        *,
        terminated: bool = False,
        truncated: bool = False,
        final: Step | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> EpisodeKey:
        """End the open episode of an environment; see `Writer.end_episode`."""
        self._session.check()
        return self._session.writer.end_episode(
            env, terminated=terminated, truncated=truncated, final=final, metadata=metadata
        )

    def abort_episode(self, env: int = 0) -> EpisodeKey:
        """Give up the open episode of an environment; its steps are no longer sampled."""
        self._session.check()
        return self._session.writer.abort_episode(env)

    def cut_episodes(self, envs: Envs | None = None) -> int:
        """End open episodes as cut, because you reset the environments; see `Writer.cut_episodes`."""
        self._session.check()
        return self._session.writer.cut_episodes(envs)

    def amend(self, values: Step, *, env: int = 0, t: int | None = None) -> None:
        """Change a step of an open episode that has no place on disk yet; see `Writer.amend`."""
        self._session.check()
        self._session.writer.amend(values, env=env, t=t)
