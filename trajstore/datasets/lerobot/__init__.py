"""LeRobot datasets of version 3."""

from trajstore.datasets.lerobot.reader import LeRobotReader, open_reader
from trajstore.datasets.lerobot.writer import open_writer

__all__ = ["LeRobotReader", "open_reader", "open_writer"]


def __dir__() -> list[str]:
    return sorted(__all__)
