"""trajstore: the replay buffer that is also an open dataset.

cli, gymnasium, ...        adapters: nothing imports them
datasets | mixing          for torch's DataLoader | batches from several sources
replay                     the live buffer: append, sample, keep a bounded amount, checkpoint, resume
saving | exiting           when checkpoints are taken | a last one before the end
merging | redistribution   what M ranks saved, for N | who gets which episodes
attending | checkpointing  checkpoints that somebody asks for | one checkpoint on its way, of all ranks
retention                  which steps go first
reader                     batches of windows: drawn, in epochs, by index
batches | derived          an iterator, with prefetch | columns written back
prioritised | draws        which windows come next
hindsight                  other goals for windows
assembler                  windows to batches
plan                       windows to rows and masks
starts | outputs           which windows there are | what batches are written into
chains | pager | windows   episodes by environment | fills the cache | what a window is
cache | index | rng        decoded chunks on the device | the episodes as tensors | random numbers
kernels                    compiled loops for the CPU
copying                    a store at another URL
store                      create, open
checkpoints | world        named cuts across streams | the ranks that write a store together
snapshot | state           an unchanging view of some commits | what a session needs to go on
writer                     append, commit
intake | pipeline | lanes  checks what comes in | staged to durable | open episodes by environment
staging | committer        steps not yet placed | the background thread
stream                     rows to chunk objects of one stream, and back
record                     the commit record
episodes                   the episode table
spans | chunks | storage   which rows are whose | codec and layout of one array | bytes at a URL
schema, errors, sizes
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
    """Import what needs torch when it is first asked for: those who only write or look need not wait for it."""
    if name not in _NEED_TORCH:
        raise AttributeError(f"module 'trajstore' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_NEED_TORCH[name]), name)
