"""trajstore: the replay buffer that is also an open dataset.

reader                     batches of windows (not public yet), above starts, pager, windows, cache, index, rng
store                      create, open
snapshot                   an unchanging view of some commits
writer                     append, commit
intake | pipeline | lanes  checks what comes in | staged to durable | open episodes by environment
staging | committer        steps not yet placed | the background thread
stream                     rows to chunk objects of one stream, and back
record                     the commit record
episodes                   the episode table
spans | chunks | storage   which rows are whose | codec and layout of one array | bytes at a URL
schema, errors, sizes
"""

from trajstore.episodes import EpisodeKey, EpisodeTable, Handle, Handles
from trajstore.errors import (
    ClosedError,
    ConflictError,
    CorruptionError,
    DataError,
    EpisodeNotFoundError,
    FormatError,
    MissingExtraError,
    SchemaError,
    SnapshotExpiredError,
    StepPlacedError,
    StorageError,
    StoreExistsError,
    StoreNotFoundError,
    TrajstoreError,
)
from trajstore.schema import Field, Schema
from trajstore.snapshot import Snapshot
from trajstore.store import Store, create, open  # noqa: A004
from trajstore.writer import Writer, WriterOptions

__version__ = "0.1.0"

__all__ = [
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
    "MissingExtraError",
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
    "Writer",
    "WriterOptions",
    "create",
    "open",
]
