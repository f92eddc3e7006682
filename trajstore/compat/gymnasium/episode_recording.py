"""The running episodes of several environments, and the calls that record them with a writer."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
from gymnasium.error import ResetNeeded

from trajstore.compat.gymnasium.field_values import FieldValues, replace_rows
from trajstore.errors import ClosedError, DataError, EpisodeNotFoundError
from trajstore.schema import Array, nest

Metadata: TypeAlias = Mapping[str, Any] | Callable[[dict[str, Any]], Mapping[str, Any] | None]
OnReset: TypeAlias = Literal["truncate", "abort"]


class StepWriter(Protocol):
    """The methods that a recorder calls; `trajstore.Writer` and `trajstore.ReplayBuffer` have them."""

    def append(
        self,
        step: Mapping[str, Any],
        *,
        envs: Any,
        terminated: Any = None,
        truncated: Any = None,
        final: Any = None,
    ) -> Any: ...

    def end_episode(
        self,
        env: int,
        *,
        terminated: bool = False,
        truncated: bool = False,
        final: Any = None,
        metadata: Any = None,
    ) -> Any: ...

    def abort_episode(self, env: int) -> Any: ...


@dataclass(frozen=True, slots=True)
class VectorStep:
    """One step of n environments; arrays have one row per environment.

    Attributes:
        is_step: Which environments took a step; the others reset themselves.
        values: Action, reward and the other values that belong to the step.
        following: The observation after the step; after a reset within the step, the first one of the next episode.
        final: The last observation of the episode, where the step ended one.
        terminated: As the environments returned it.
        truncated: As the environments returned it.
        info_of: Returns the info of one environment.
    """

    is_step: Array
    values: FieldValues
    following: FieldValues
    final: FieldValues
    terminated: Array
    truncated: Array
    info_of: Callable[[int], dict[str, Any]]

    @property
    def ended(self) -> Array:
        ended: Array = self.terminated | self.truncated
        return ended


class EpisodeRecording:
    """The running episodes of n environments, and a queue of calls to the writer.

    Calls are made in order. A call that fails stays first in the queue, and `flush` tries it again.
    """

    def __init__(self, writer: StepWriter, envs: range, metadata: Metadata | None, on_reset: OnReset) -> None:
        if on_reset not in ("truncate", "abort"):
            raise ValueError(f"on_reset: expected 'truncate' or 'abort', got {on_reset!r}")
        n = len(envs)
        self._writer = writer
        self._envs = envs
        self._metadata = metadata
        self._on_reset = on_reset
        self._calls: deque[Callable[[], object]] = deque()
        self._current: FieldValues = {}  # the newest observation, valid where `_is_known`
        self._t = np.zeros(n, np.int64)  # steps of the running episode; it is open if there are any
        self._episode = np.full(n, -1)  # its number in the writer, from the last append
        self._needs_reset = np.ones(n, bool)
        self._is_known = np.zeros(n, bool)
        self._is_foreign = np.ones(n, bool)  # never reset here: an open episode was begun by other code
        self._is_shared = False  # other code appends to or ends episodes of these environments
        self._info_of: Callable[[int], dict[str, Any]] = _no_info

    def check_ready(self) -> None:
        """Check that a step can be taken and recorded; call it before the environments take the step.

        Raises:
            ResetNeeded: An environment has no running episode.
        """
        self.flush()
        if self._needs_reset.any():
            which = ", ".join(str(self._envs[i]) for i in _indices(self._needs_reset))
            raise ResetNeeded(f"step: no episode is running in env {which}; call reset first")

    @contextlib.contextmanager
    def stepping(self) -> Iterator[None]:
        """Surround a step; if it fails, all environments need a reset, because their observations are unknown."""
        self._needs_reset[:], self._is_known[:] = True, False
        yield
        self.flush()

    def record(self, step: VectorStep, needs_reset: Array) -> None:
        """Queue a step; environments in ``needs_reset`` cannot take another step before a reset."""
        ended = step.ended & step.is_step
        ends = [] if self._metadata is None else [self._end_call(step, i) for i in _indices(ended)]
        if step.is_step.any():
            self._calls.append(self._append_call(step, ended))
        self._calls.extend(ends)
        self._t[step.is_step] += 1
        self._t[ended] = 0
        self._current, self._info_of = step.following, step.info_of
        self._is_known[:], self._needs_reset = True, needs_reset.copy()

    def _append_call(self, step: VectorStep, ended: Array) -> Callable[[], object]:
        is_all = bool(step.is_step.all())
        where: Any = slice(None) if is_all else step.is_step
        options: dict[str, Any] = {"envs": self._envs if is_all else np.array(self._envs)[where]}
        if hasattr(self._writer, "cut_episodes"):  # a Writer or a ReplayBuffer, which looks for steps of a reset
            options["autoreset"] = "disabled"  # they are left out here
        if self._metadata is None and ended.any():
            options |= {"terminated": step.terminated[where], "truncated": step.truncated[where]}
        # If the first data defines the schema, it must say which fields have a final value before one is needed.
        if "terminated" in options or getattr(self._writer, "schema", None) is None:
            options["final"] = nest({path: rows[where] for path, rows in step.final.items()})
        data = nest({path: rows[where] for path, rows in (self._current | step.values).items()})
        return partial(self._append, data, options, where, self._t[where].copy())

    def _append(self, data: Mapping[str, Any], options: dict[str, Any], where: Any, t: Array) -> None:
        handles = self._writer.append(data, **options)
        continues = handles.episode == self._episode[where]
        self._is_shared |= bool(((handles.t != t) | (continues != (t > 0))).any())
        self._episode[where] = handles.episode

    def _end_call(self, step: VectorStep, i: int) -> Callable[[], object]:
        return partial(
            self._writer.end_episode,
            self._envs[i],
            terminated=bool(step.terminated[i]),
            truncated=bool(step.truncated[i]),
            final=_row(step.final, i),
            metadata=self._metadata_of(step.info_of(i)),
        )

    def _metadata_of(self, info: dict[str, Any]) -> Mapping[str, Any] | None:
        return self._metadata(info) if callable(self._metadata) else self._metadata

    def before_reset(self, mask: Array) -> None:
        """Prepare for a reset of some environments; if the reset fails, they need another one."""
        self.flush()
        self._needs_reset[mask] = True

    def after_reset(self, mask: Array, observed: FieldValues) -> None:
        """End the episodes that a reset interrupted, and begin the next ones."""
        self._end_open(mask)
        self._current = replace_rows(self._current, observed, mask) if self._current else observed
        self._is_known[mask], self._needs_reset[mask] = True, False
        self.flush()

    def stop(self) -> None:
        """End open episodes and record nothing until a reset."""
        self._needs_reset[:] = True
        self._end_open(~self._is_foreign)
        try:
            self.flush()
        except ClosedError:  # the writer was closed before, and stored the open episodes as cut
            self._calls.clear()

    def _end_open(self, mask: Array) -> None:
        interrupted = [self._interrupt_call(i) for i in _indices(mask & (self._t > 0))]
        foreign = [partial(_if_open, self._interrupt_call(i)) for i in _indices(mask & self._is_foreign)]
        self._calls.extend([*interrupted, *foreign])
        self._t[mask], self._is_foreign[mask] = 0, False

    def _interrupt_call(self, i: int) -> Callable[[], object]:
        if self._on_reset == "abort":
            return partial(self._writer.abort_episode, self._envs[i])
        final = _row(self._current, i) if self._is_known[i] else None
        metadata = None if self._is_foreign[i] else self._metadata_of(self._info_of(i))
        return partial(self._writer.end_episode, self._envs[i], truncated=True, final=final, metadata=metadata)

    def flush(self) -> None:
        """Make the queued calls.

        Raises:
            DataError: Other code appends to or ends episodes of these environments.
        """
        while self._calls:
            self._calls[0]()
            self._calls.popleft()
        if self._is_shared:
            raise DataError(
                f"env {self._envs[0]} to {self._envs[-1]}: other code appends to or ends episodes of these"
                " environments; give every recorder of a writer its own environment numbers"
            )


def _indices(mask: Array) -> list[int]:
    found: list[int] = np.flatnonzero(mask).tolist()
    return found


def _no_info(_: int) -> dict[str, Any]:
    return {}


def _if_open(end: Callable[[], object]) -> None:
    with contextlib.suppress(EpisodeNotFoundError):
        end()


def _row(values: FieldValues, i: int) -> dict[str, Any]:
    return nest({path: value[i] for path, value in values.items()})
