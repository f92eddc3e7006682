"""LeRobot datasets of version 3."""

from trajstore.datasets.lerobot.sink import open_sink
from trajstore.datasets.lerobot.source import LeRobotSource, open_source

__all__ = ["LeRobotSource", "open_sink", "open_source"]
