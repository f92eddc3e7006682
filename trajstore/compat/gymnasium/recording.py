"""The episodes of several environments as they go on, and the calls that tell a writer of them."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
from gymnasium.error import ResetNeeded

from trajstore.compat.gymnasium.spaces import Flat, patched
from trajstore.errors import ClosedError, DataError, EpisodeNotFoundError
from trajstore.schema import Array, nest

Metadata: TypeAlias = Mapping[str, Any] | Callable[[dict[str, Any]], Mapping[str, Any] | None]
OnReset: TypeAlias = Literal["truncate", "abort"]


class Writes(Protocol):
    """What a recorder calls; `trajstore.Writer` has it."""

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
class Moved:
    """One step of n environments; arrays have a row for each.

    Attributes:
        where: Which have moved at all, rather than reset themselves.
        values: Action, reward and what else belongs to the step.
        following: What is observed now.
        final: What was observed at the end of the step, where it ended an episode.
        terminated: As the environments said.
        truncated: The same.
        info_of: Of one of them.
    """

    where: Array
    values: Flat
    following: Flat
    final: Flat
    terminated: Array
    truncated: Array
    info_of: Callable[[int], dict[str, Any]]

    @property
    def ended(self) -> Array:
        ended: Array = self.terminated | self.truncated
        return ended


class Recording:
    """The episodes of n environments as they go on, and the calls that tell a writer of them.

    Calls are made in order. One that fails stays first in line and is tried again by `flush`.
    """

    def __init__(self, writer: Writes, envs: range, metadata: Metadata | None, on_reset: OnReset) -> None:
        if on_reset not in ("truncate", "abort"):
            raise ValueError(f"on_reset: expected 'truncate' or 'abort', got {on_reset!r}")
        n = len(envs)
        self._writer = writer
        self._envs = envs
        self._metadata = metadata
        self._on_reset = on_reset
        self._calls: deque[Callable[[], object]] = deque()
        self._now: Flat = {}  # what is observed now, where `_is_known`
        self._t = np.zeros(n, np.int64)  # steps of the episode so far; it is open if there are any
        self._episode = np.full(n, -1)  # its number in the writer, as told by the last append
        self._needs_reset = np.ones(n, bool)
        self._is_known = np.zeros(n, bool)
        self._is_foreign = np.ones(n, bool)  # never reset here: what is open there is somebody else's
        self._is_shared = False  # somebody else ends or appends to episodes of these environments
        self._info_of: Callable[[int], dict[str, Any]] = _no_info

    def check_ready(self) -> None:
        """Raise unless a step can be taken and recorded; the environments have not moved yet."""
        self.flush()
        if self._needs_reset.any():
            which = ", ".join(str(self._envs[i]) for i in _where(self._needs_reset))
            raise ResetNeeded(f"step: no episode is going on in env {which}; call reset first")

    @contextlib.contextmanager
    def moving(self) -> Iterator[None]:
        """Around a step: if it does not come to its end, nobody knows what the environments show."""
        self._needs_reset[:], self._is_known[:] = True, False
        yield
        self.flush()

    def move(self, moved: Moved, needs_reset: Array) -> None:
        """Record a step; afterwards some environments may not take another without a reset."""
        ended = moved.ended & moved.where
        ends = [] if self._metadata is None else [self._end_of(moved, i) for i in _where(ended)]
        if moved.where.any():
            self._calls.append(self._append_of(moved, ended))
        self._calls.extend(ends)
        self._t[moved.where] += 1
        self._t[ended] = 0
        self._now, self._info_of = moved.following, moved.info_of
        self._is_known[:], self._needs_reset = True, needs_reset.copy()

    def _append_of(self, moved: Moved, ended: Array) -> Callable[[], object]:
        is_all = bool(moved.where.all())
        where: Any = slice(None) if is_all else moved.where
        options: dict[str, Any] = {"envs": self._envs if is_all else np.array(self._envs)[where]}
        if self._metadata is None and ended.any():
            options |= {"terminated": moved.terminated[where], "truncated": moved.truncated[where]}
        # Where the first data defines the schema, it must say which fields have a final value before any is needed.
        if "terminated" in options or getattr(self._writer, "schema", None) is None:
            options["final"] = nest({path: rows[where] for path, rows in moved.final.items()})
        step = nest({path: rows[where] for path, rows in (self._now | moved.values).items()})
        return partial(self._append, step, options, where, self._t[where].copy())

    def _append(self, step: Mapping[str, Any], options: dict[str, Any], where: Any, t: Array) -> None:
        handles = self._writer.append(step, **options)
        goes_on = handles.episode == self._episode[where]
        self._is_shared |= bool(((handles.t != t) | (goes_on != (t > 0))).any())
        self._episode[where] = handles.episode

    def _end_of(self, moved: Moved, i: int) -> Callable[[], object]:
        return partial(
            self._writer.end_episode,
            self._envs[i],
            terminated=bool(moved.terminated[i]),
            truncated=bool(moved.truncated[i]),
            final=_row(moved.final, i),
            metadata=self._metadata_of(moved.info_of(i)),
        )

    def _metadata_of(self, info: dict[str, Any]) -> Mapping[str, Any] | None:
        return self._metadata(info) if callable(self._metadata) else self._metadata

    def leave(self, mask: Array) -> None:
        """Before a reset: if it fails, another is needed."""
        self.flush()
        self._needs_reset[mask] = True

    def begin(self, mask: Array, now: Flat) -> None:
        """After a reset of some environments; ends the episodes it interrupted."""
        self._end_open(mask)
        self._now = patched(self._now, now, mask) if self._now else now
        self._is_known[mask], self._needs_reset[mask] = True, False
        self.flush()

    def stop(self) -> None:
        """Nothing more is recorded, until a reset."""
        self._needs_reset[:] = True
        self._end_open(~self._is_foreign)
        try:
            self.flush()
        except ClosedError:  # the writer was closed before, and has kept what was open as cut
            self._calls.clear()

    def _end_open(self, mask: Array) -> None:
        interrupted = [self._interrupt(i) for i in _where(mask & (self._t > 0))]
        foreign = [partial(_if_open, self._interrupt(i)) for i in _where(mask & self._is_foreign)]
        self._calls.extend([*interrupted, *foreign])
        self._t[mask], self._is_foreign[mask] = 0, False

    def _interrupt(self, i: int) -> Callable[[], object]:
        if self._on_reset == "abort":
            return partial(self._writer.abort_episode, self._envs[i])
        final = _row(self._now, i) if self._is_known[i] else None
        metadata = None if self._is_foreign[i] else self._metadata_of(self._info_of(i))
        return partial(self._writer.end_episode, self._envs[i], truncated=True, final=final, metadata=metadata)

    def flush(self) -> None:
        while self._calls:
            self._calls[0]()
            self._calls.popleft()
        if self._is_shared:
            raise DataError(
                f"env {self._envs[0]} to {self._envs[-1]}: somebody else ends or appends episodes there;"
                " every recorder of a writer needs environment numbers of its own"
            )


def _where(mask: Array) -> list[int]:
    found: list[int] = np.flatnonzero(mask).tolist()
    return found


def _no_info(_: int) -> dict[str, Any]:
    return {}


def _if_open(end: Callable[[], object]) -> None:
    with contextlib.suppress(EpisodeNotFoundError):
        end()


def _row(values: Flat, i: int) -> dict[str, Any]:
    return nest({path: value[i] for path, value in values.items()})
