"""Writes figures to TensorBoard's event files."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from os import PathLike
from typing import Any, Protocol

from trajstore.arguments import check_positive
from trajstore.errors import ClosedError, MissingExtraError
from trajstore.logging.flat_stats import flatten


class StatsSource(Protocol):
    """What has figures: a buffer, a reader, a mixture."""

    def stats(self) -> Any: ...


class ScalarWriter(Protocol):
    """The part of ``torch.utils.tensorboard.SummaryWriter`` that is used."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int, /) -> object: ...

    def flush(self) -> object: ...


class TensorBoardLogger:
    """Writes the figures of a buffer to TensorBoard every few steps or seconds.

    Call it once in every pass of the training loop; a call that is not due takes about a microsecond.

    ```
    with TensorBoardLogger(buffer, "runs/walker/log", every_steps=1_000) as logger:
        for t in range(n_steps):
            ...
            logger(t)
    ```

    For one thread. Needs the extra ``tensorboard``, unless ``to`` is a writer.
    """

    def __init__(
        self,
        source: StatsSource,
        to: str | PathLike[str] | ScalarWriter,
        *,
        every_steps: int | None = None,
        every_seconds: float | None = None,
        prefix: str = "replay",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin a log.

        Args:
            source: What is logged: a `trajstore.ReplayBuffer`, `trajstore.Reader`, `trajstore.Mixture`, or anything
                else that has a method ``stats``.
            to: A directory for event files, or a ``SummaryWriter`` of yours, which `close` leaves open.
            every_steps: Log as soon as this many steps have passed since the last log.
            every_seconds: Log as soon as this many seconds have passed. With both, whichever comes first; with
                neither, every 10 seconds.
            prefix: Begins the name of every figure.
            clock: Returns seconds; for tests.

        Raises:
            MissingExtraError: TensorBoard is not installed, and ``to`` is a directory.
            ValueError: ``every_steps`` or ``every_seconds`` is not positive.
        """
        if every_steps is not None:
            check_positive("every_steps", every_steps)
        if every_seconds is not None and not every_seconds > 0:
            raise ValueError(f"every_seconds: expected more than 0 seconds, got {every_seconds!r}")
        if every_steps is None and every_seconds is None:
            every_seconds = 10.0
        self._source, self._prefix, self._clock = source, prefix, clock
        self._every_steps, self._every_seconds = every_steps, every_seconds
        self._is_own = isinstance(to, (str, PathLike))
        self._writer: Any = _open_writer(to) if isinstance(to, (str, PathLike)) else to
        self._last: tuple[int, float] | None = None  # step and time of the last log
        self._newest = 0

    def __call__(self, step: int, values: Mapping[str, float] | None = None) -> bool:
        """Log if it is due; returns whether it was.

        Args:
            step: The step of the training loop.
            values: Further numbers by name, such as losses, logged beside the figures, without the prefix.
        """
        self._newest = step
        if self._last is not None and not self._is_due(step, self._last):
            return False
        self.log(step, values)
        return True

    def log(self, step: int, values: Mapping[str, float] | None = None) -> None:
        """Log now; the arguments are those of a call.

        Raises:
            ClosedError: The logger is closed.
        """
        if self._writer is None:
            raise ClosedError("this TensorBoardLogger is closed; create another one")
        for name, number in (flatten(self._source.stats(), prefix=self._prefix) | dict(values or {})).items():
            self._writer.add_scalar(name, float(number), step)
        self._last, self._newest = (step, self._clock()), step

    def close(self) -> None:
        """Log the newest step, unless it was logged, and finish the event file; may be called again.

        Close the logger before its source: a closed buffer has no figures.
        """
        try:
            if self._writer is not None and self._last is not None and self._last[0] != self._newest:
                self.log(self._newest)
        finally:
            self._finish()

    def __enter__(self) -> TensorBoardLogger:
        return self

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
        """Close; after an exception, which may have closed the source, nothing more is logged."""
        self.close() if kind is None else self._finish()

    def _finish(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close() if self._is_own else writer.flush()

    def _is_due(self, step: int, last: tuple[int, float]) -> bool:
        # A step before the last one: the loop resumed from a checkpoint, or counts from the start again.
        if self._every_steps is not None and not 0 <= step - last[0] < self._every_steps:
            return True
        return self._every_seconds is not None and self._clock() - last[1] >= self._every_seconds


def _open_writer(directory: str | PathLike[str]) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise MissingExtraError(
            "TensorBoardLogger needs TensorBoard: pip install 'trajstore[tensorboard]'"
        ) from error
    return SummaryWriter(log_dir=str(directory))
