"""Minari datasets."""

from trajstore.datasets.minari.sink import open_sink
from trajstore.datasets.minari.source import MinariSource, open_source

__all__ = ["MinariSource", "open_sink", "open_source"]
