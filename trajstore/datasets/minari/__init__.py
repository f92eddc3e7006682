"""Minari datasets."""

from trajstore.datasets.minari.reader import MinariReader, open_reader
from trajstore.datasets.minari.writer import open_writer

__all__ = ["MinariReader", "open_reader", "open_writer"]


def __dir__() -> list[str]:
    return sorted(__all__)
