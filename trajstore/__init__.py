"""trajstore: the replay buffer that is also an open dataset.

`ReplayBuffer` appends, samples and checkpoints experience at a URL. `create` and `open` give a `Store`, whose
writers append and whose snapshots are read; `Reader` samples batches of `Windows` from it.

- The live buffer: `ReplayBuffer`, `Retention`, `SamplesPerInsert`, `redistribute`, `request_checkpoint`.
- Stores: `create`, `open`, `copy`, `merge`, `split`, `pack`, `repair`, `Store`, `Snapshot`, `EpisodeTable`,
  `Writer`, `Schema`, `Field`, `Checkpoint`, `DiskCache`, `estimate_cost`, `Cost`, `Prices`.
- Sampling: `Reader`, `Windows`, `Batch`, `Priorities`, `Linear`, `Hindsight`, `Mixture`, `Ring`, `BatchDataset`,
  `WindowDataset`.
- Errors: all are a `TrajstoreError`.
- `trajstore.compat`: drop-ins for other libraries; `trajstore.datasets`: importers and exporters;
  `trajstore.logging`: figures for TensorBoard and others; `trajstore.plot`: plots; `trajstore.ray`: the buffer on
  many machines; `trajstore.testing`: tools for your tests; `trajstore.viewer`: a store as a web page.

These are the names that change only with a line in CHANGELOG.md. The other packages are described in
docs/architecture.md.
"""

from typing import TYPE_CHECKING, Any

from trajstore.cost import Cost, Prices, estimate_cost
from trajstore.distributed.checkpoint_requests import request_checkpoint
from trajstore.errors import (
    AmbiguousCheckpointError,
    CheckpointNotFoundError,
    ClosedError,
    ConflictError,
    CorruptionError,
    DataError,
    EpisodeNotFoundError,
    FormatError,
    MissingExtraError,
    NotReadyError,
    PacingError,
    RankError,
    RankTimeoutError,
    SchemaError,
    SnapshotExpiredError,
    StepPlacedError,
    StorageError,
    StoreExistsError,
    StoreNotFoundError,
    TrajstoreError,
    UnknownFormatError,
)
from trajstore.format.episode_table import EpisodeTable
from trajstore.format.handles import EpisodeKey, Handle, Handles
from trajstore.schema import Field, Schema
from trajstore.storage import DiskCache
from trajstore.store.checkpoints import Checkpoint
from trajstore.store.copying import copy
from trajstore.store.merging import merge
from trajstore.store.packing import pack
from trajstore.store.snapshot import Snapshot
from trajstore.store.store import Store, create, open  # noqa: A004
from trajstore.writing.options import WriterOptions
from trajstore.writing.writer import Writer

if TYPE_CHECKING:
    from trajstore import compat as compat
    from trajstore import datasets as datasets
    from trajstore import logging as logging
    from trajstore import plot as plot
    from trajstore import ray as ray
    from trajstore import testing as testing
    from trajstore import viewer as viewer
    from trajstore.distributed.partition_report import PartitionReport
    from trajstore.distributed.partitions import Partitions
    from trajstore.distributed.redistribution import redistribute
    from trajstore.replay.buffer import ReplayBuffer
    from trajstore.replay.pacing import SamplesPerInsert
    from trajstore.replay.retention import Retention
    from trajstore.replay.storage_report import StorageReport
    from trajstore.sampling.batches.outputs import Batch, Ring
    from trajstore.sampling.hindsight import Hindsight
    from trajstore.sampling.mixture import Mixture
    from trajstore.sampling.priorities.priority_options import Linear, Priorities
    from trajstore.sampling.reader import Reader
    from trajstore.sampling.torch_datasets import BatchDataset, WindowDataset
    from trajstore.sampling.windows import Windows
    from trajstore.store.repair import repair
    from trajstore.store.splitting import split

__version__ = "0.1.0"

__all__ = [
    "AmbiguousCheckpointError",
    "Batch",
    "BatchDataset",
    "Checkpoint",
    "CheckpointNotFoundError",
    "ClosedError",
    "ConflictError",
    "CorruptionError",
    "Cost",
    "DataError",
    "DiskCache",
    "EpisodeKey",
    "EpisodeNotFoundError",
    "EpisodeTable",
    "Field",
    "FormatError",
    "Handle",
    "Handles",
    "Hindsight",
    "Linear",
    "MissingExtraError",
    "Mixture",
    "NotReadyError",
    "PacingError",
    "PartitionReport",
    "Partitions",
    "Prices",
    "Priorities",
    "RankError",
    "RankTimeoutError",
    "Reader",
    "ReplayBuffer",
    "Retention",
    "Ring",
    "SamplesPerInsert",
    "Schema",
    "SchemaError",
    "Snapshot",
    "SnapshotExpiredError",
    "StepPlacedError",
    "StorageError",
    "StorageReport",
    "Store",
    "StoreExistsError",
    "StoreNotFoundError",
    "TrajstoreError",
    "UnknownFormatError",
    "WindowDataset",
    "Windows",
    "Writer",
    "WriterOptions",
    "copy",
    "create",
    "estimate_cost",
    "merge",
    "open",
    "pack",
    "redistribute",
    "repair",
    "request_checkpoint",
    "split",
]

_LATER = {
    "Batch": "trajstore.sampling.batches.outputs",
    "BatchDataset": "trajstore.sampling.torch_datasets",
    "Hindsight": "trajstore.sampling.hindsight",
    "Linear": "trajstore.sampling.priorities.priority_options",
    "Mixture": "trajstore.sampling.mixture",
    "PartitionReport": "trajstore.distributed.partition_report",
    "Partitions": "trajstore.distributed.partitions",
    "Priorities": "trajstore.sampling.priorities.priority_options",
    "Reader": "trajstore.sampling.reader",
    "ReplayBuffer": "trajstore.replay.buffer",
    "Retention": "trajstore.replay.retention",
    "Ring": "trajstore.sampling.batches.outputs",
    "SamplesPerInsert": "trajstore.replay.pacing",
    "StorageReport": "trajstore.replay.storage_report",
    "WindowDataset": "trajstore.sampling.torch_datasets",
    "Windows": "trajstore.sampling.windows",
    "redistribute": "trajstore.distributed.redistribution",
    "repair": "trajstore.store.repair",
    "split": "trajstore.store.splitting",
}


_PACKAGES = ("compat", "datasets", "logging", "plot", "ray", "testing", "viewer")


def __getattr__(name: str) -> Any:
    """Import names that need torch, or are rarely used, at their first use: others need not wait for them."""
    from importlib import import_module

    if name in _PACKAGES:
        return import_module(f"trajstore.{name}")
    if name not in _LATER:
        raise AttributeError(f"module 'trajstore' has no attribute {name!r}")
    return getattr(import_module(_LATER[name]), name)


def __dir__() -> list[str]:
    return sorted((*__all__, *_PACKAGES, "__doc__", "__version__"))
