"""The errors that trajstore raises, one for each thing that a caller could do about them.

Every error is also the builtin exception that a caller would expect, so code that does not know trajstore
still catches it.
"""


class TrajstoreError(Exception):
    """Base class of all errors that trajstore raises on purpose."""


class StoreNotFoundError(TrajstoreError, FileNotFoundError):
    """No store exists at the URL. Check the URL, or create a store."""


class StoreExistsError(TrajstoreError, FileExistsError):
    """A store exists at the URL already. Open it, or choose another URL."""


class FormatError(TrajstoreError, ValueError):
    """The objects at the URL are not a store that this version reads: foreign, newer, or hostile metadata."""


class UnknownFormatError(FormatError):
    """A store, or a part of it, has a format that this version does not read. Upgrade trajstore."""


class CorruptionError(TrajstoreError, ValueError):
    """A committed object is damaged or missing. Restore it from a copy."""


class SchemaError(TrajstoreError, ValueError):
    """A schema is invalid, or two schemas that must be equal differ."""


class DataError(TrajstoreError, ValueError):
    """An argument or appended data is not as expected. Nothing was stored."""


class NotReadyError(DataError, LookupError):
    """No window can be sampled yet. Wait for more data, or ask for other windows."""


class EpisodeNotFoundError(TrajstoreError, LookupError):
    """The episode does not exist, or the environment has no open episode."""


class CheckpointNotFoundError(TrajstoreError, LookupError):
    """The checkpoint does not exist. The message lists those that exist."""


class AmbiguousCheckpointError(TrajstoreError, LookupError):
    """Several checkpoints match. Name one of those that the message lists."""


class StepPlacedError(TrajstoreError, RuntimeError):
    """A commit has given the step its place on disk, so it can no longer be amended."""


class ClosedError(TrajstoreError, RuntimeError):
    """The object is closed, or belongs to another process. Open a new one."""


class PacingError(TrajstoreError, RuntimeError):
    """No other thread can make the calls that this one would wait for. The message says how many are missing."""


class StorageError(TrajstoreError, OSError):
    """The storage failed. Committed data is safe; try again when the storage works."""


class ConflictError(StorageError):
    """Another process changed or removed an object that only this writer may write."""


class SnapshotExpiredError(TrajstoreError, LookupError):
    """Rows that this snapshot shows were evicted after it was taken. Refresh."""


class RankError(TrajstoreError, RuntimeError):
    """Another rank failed, disagrees, or is not the expected one. The message names it; nothing was published."""


class RankTimeoutError(RankError, TimeoutError):
    """A rank did not answer in time. Check whether it is still running."""


class MissingExtraError(TrajstoreError, ImportError):
    """An optional dependency is not installed. The message says which extra to install."""
