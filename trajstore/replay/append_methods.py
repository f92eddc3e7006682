"""The methods of a buffer that append steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from trajstore.format.handles import EpisodeKey, Handle, Handles
from trajstore.replay.appending import count_steps
from trajstore.replay.session import Session
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
        envs: Iterable[int] | None = None,
        terminated: Flags = None,
        truncated: Flags = None,
        final: Step | None = None,
    ) -> Handle | Handles:
        """Append one step of one environment, or of several at once; see `Writer.append`."""
        envs = envs if envs is None or hasattr(envs, "__len__") else list(envs)
        n = 1 if envs is None else len(envs)  # type: ignore[arg-type]
        session = self._session
        session.check()
        with session.appending.inserting(n):
            return session.writer.append(
                step, env=env, envs=envs, terminated=terminated, truncated=truncated, final=final
            )

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
        envs: Iterable[int] | None = None,
        terminated: Flags = None,
        truncated: Flags = None,
        final: Step | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> Handles:
        """Append a ``[T, B]`` block: T steps of B environments; see `Writer.append_rollout`."""
        session = self._session
        session.check()
        with session.appending.inserting(count_steps(data, 2)):
            return session.writer.append_rollout(
                data, envs=envs, terminated=terminated, truncated=truncated, final=final, metadata=metadata
            )

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

    def amend(self, values: Step, *, env: int = 0, t: int | None = None) -> None:
        """Change a step of an open episode that has no place on disk yet; see `Writer.amend`."""
        self._session.check()
        self._session.writer.amend(values, env=env, t=t)
