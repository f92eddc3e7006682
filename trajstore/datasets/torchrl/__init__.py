"""Dumps of TorchRL's replay buffers."""

from trajstore.datasets.torchrl.dump import TorchRLDump, open_source
from trajstore.datasets.torchrl.sink import open_sink

__all__ = ["TorchRLDump", "open_sink", "open_source"]
