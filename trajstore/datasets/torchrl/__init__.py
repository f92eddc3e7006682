"""Dumps of TorchRL's replay buffers."""

from trajstore.datasets.torchrl.reader import TorchRLReader, open_reader
from trajstore.datasets.torchrl.writer import open_writer

__all__ = ["TorchRLReader", "open_reader", "open_writer"]


def __dir__() -> list[str]:
    return sorted(__all__)
