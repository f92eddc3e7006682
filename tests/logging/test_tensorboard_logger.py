"""The logger writes event files that TensorBoard reads."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trajstore import ReplayBuffer
from trajstore.errors import ClosedError, MissingExtraError
from trajstore.logging import TensorBoardLogger, flatten

pytest.importorskip("tensorboard")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Counter:
    """A source whose only figure counts the calls."""

    n = 0

    def stats(self) -> dict[str, Any]:
        self.n += 1
        return {"calls": self.n}


class Record:
    """A writer of scalars that is not ours."""

    def __init__(self) -> None:
        self.scalars: list[tuple[str, float, int]] = []
        self.n_flushed = 0

    def add_scalar(self, tag: str, scalar_value: float, global_step: int, /) -> None:
        self.scalars.append((tag, scalar_value, global_step))

    def flush(self) -> None:
        self.n_flushed += 1

    @property
    def steps(self) -> list[int]:
        return [step for _, _, step in self.scalars]


def read_events(directory: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory)).Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_event_files_hold_the_figures_of_the_buffer_by_step(url: str, tmp_path: Path) -> None:
    with ReplayBuffer(url, cache_bytes="16MB", buffer_bytes="16MB", seed=0) as buffer:
        with TensorBoardLogger(buffer, tmp_path / "log", every_steps=10) as logger:
            for t in range(25):
                buffer.append({"observation": np.zeros(3, np.float32)}, terminated=t % 5 == 4)
                logger(t, {"loss": t / 2})
        names = {f"replay/{name}" for name in flatten(buffer.stats())}
    events = read_events(tmp_path / "log")
    assert set(events) == names | {"loss"}
    assert events["replay/n_steps"] == [(0, 1), (10, 11), (20, 21), (24, 25)]
    assert events["loss"] == [(0, 0), (10, 5), (20, 10)]


def test_a_call_that_is_not_due_asks_for_no_figures() -> None:
    source, record = Counter(), Record()
    logger = TensorBoardLogger(source, record, every_steps=3, prefix="")
    assert [logger(t) for t in range(5)] == [True, False, False, True, False]
    assert source.n == 2
    assert record.scalars == [("calls", 1, 0), ("calls", 2, 3)]


def test_time_and_steps_are_due_whichever_comes_first() -> None:
    clock, record = Clock(), Record()
    logger = TensorBoardLogger(Counter(), record, every_steps=100, every_seconds=5, clock=clock)
    for t, clock.now in ((0, 0), (50, 4.9), (60, 5.0), (150, 6), (161, 7), (170, 11.9), (171, 12.1)):
        logger(t)
    assert record.steps == [0, 60, 161, 171]


def test_it_logs_every_ten_seconds_by_default() -> None:
    clock, record = Clock(), Record()
    logger = TensorBoardLogger(Counter(), record, clock=clock)
    for t in range(25):
        clock.now = float(t)
        logger(t)
    assert record.steps == [0, 10, 20]


def test_a_loop_that_continues_at_an_earlier_step_is_logged_from_there() -> None:
    record = Record()
    logger = TensorBoardLogger(Counter(), record, every_steps=10)
    for t in (100, 40, 45, 50):
        logger(t)
    assert record.steps == [100, 40, 50]


def test_closing_logs_the_newest_step_once_and_leaves_a_writer_of_yours_open() -> None:
    record = Record()
    logger = TensorBoardLogger(Counter(), record, every_steps=10)
    logger(0)
    logger(4)
    logger.close()
    logger.close()
    assert (record.steps, record.n_flushed) == ([0, 4], 1)
    with pytest.raises(ClosedError, match="create another"):
        logger.log(5)


def test_after_an_exception_nothing_more_is_logged() -> None:
    record = Record()

    def loop() -> None:
        with TensorBoardLogger(Counter(), record, every_steps=10) as logger:
            logger(0)
            logger(4)
            raise KeyError

    with pytest.raises(KeyError):
        loop()
    assert (record.steps, record.n_flushed) == ([0], 1)


@pytest.mark.parametrize("wrong", [{"every_steps": 0}, {"every_seconds": 0.0}, {"every_seconds": float("nan")}])
def test_periods_are_positive(wrong: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        TensorBoardLogger(Counter(), tmp_path / "log", **wrong)
    assert not (tmp_path / "log").exists()


def test_without_tensorboard_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'trajstore\[tensorboard\]'"):
        TensorBoardLogger(Counter(), tmp_path)
    TensorBoardLogger(Counter(), Record())
