"""trajstore: the replay buffer that is also an open dataset.

`ReplayBuffer` appends, samples and checkpoints experience at a URL. `create` and `open` give a `Store`, whose
writers append and whose snapshots are read; `Reader` samples batches of `Windows` from it.

The packages, top first, each importing only from those below it: ``cli``; ``compat``, ``datasets``, ``ray`` and
``testing``; ``replay``; ``distributed``; ``sampling``; ``cache``; ``store``; ``writing``; ``format`` and
``storage``; ``schema``. docs/architecture.md describes them.
"""

from typing import TYPE_CHECKING, Any

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
    RankError,
    RankTimeoutError,
    SchemaError,
    SnapshotExpiredError,
    StepPlacedError,
    StorageError,
    StoreExistsError,
    StoreNotFoundError,
    TrajstoreError,
)
from trajstore.format.episode_table import EpisodeTable
from trajstore.format.handles import EpisodeKey, Handle, Handles
from trajstore.schema import Field, Schema
from trajstore.store.checkpoints import Checkpoint
from trajstore.store.copying import copy
from trajstore.store.snapshot import Snapshot
from trajstore.store.store import Store, create, open  # noqa: A004
from trajstore.writing.options import WriterOptions
from trajstore.writing.writer import Writer

if TYPE_CHECKING:
    from trajstore.distributed.partition_report import PartitionReport
    from trajstore.distributed.partitions import Partitions
    from trajstore.distributed.redistribution import redistribute
    from trajstore.replay.buffer import ReplayBuffer
    from trajstore.replay.pacing import SamplesPerInsert
    from trajstore.replay.retention import Retention
    from trajstore.sampling.batches.outputs import Ring
    from trajstore.sampling.hindsight import Hindsight
    from trajstore.sampling.mixture import Mixture
    from trajstore.sampling.priorities.priority_options import Linear, Priorities
    from trajstore.sampling.reader import Reader
    from trajstore.sampling.torch_datasets import BatchDataset, WindowDataset
    from trajstore.sampling.windows import Windows

__version__ = "0.1.0"

__all__ = [
    "AmbiguousCheckpointError",
    "BatchDataset",
    "Checkpoint",
    "CheckpointNotFoundError",
    "ClosedError",
    "ConflictError",
    "CorruptionError",
    "DataError",
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
    "PartitionReport",
    "Partitions",
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
    "Store",
    "StoreExistsError",
    "StoreNotFoundError",
    "TrajstoreError",
    "WindowDataset",
    "Windows",
    "Writer",
    "WriterOptions",
    "copy",
    "create",
    "open",
    "redistribute",
    "request_checkpoint",
]

_NEED_TORCH = {
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
    "WindowDataset": "trajstore.sampling.torch_datasets",
    "Windows": "trajstore.sampling.windows",
    "redistribute": "trajstore.distributed.redistribution",
}


def __getattr__(name: str) -> Any:
    """Import names that need torch at their first use: programs that only write or inspect need not wait for it."""
    if name not in _NEED_TORCH:
        raise AttributeError(f"module 'trajstore' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_NEED_TORCH[name]), name)
