"""The error tree, sorted by what a caller would do about it.

Every error is also the builtin exception a caller would expect, so code that knows nothing of
trajstore still catches it.
"""


class TrajstoreError(Exception):
    """Root of every error that trajstore raises on purpose."""


class StoreNotFoundError(TrajstoreError, FileNotFoundError):
    """There is no store at the URL: check the URL, or create one."""


class StoreExistsError(TrajstoreError, FileExistsError):
    """The URL is taken: open it instead, or choose another."""


class FormatError(TrajstoreError, ValueError):
    """What lies at the URL is not a store this version reads: foreign, newer, or hostile metadata."""


class CorruptionError(TrajstoreError, ValueError):
    """A committed object is damaged or missing: restore it from a copy."""


class SchemaError(TrajstoreError, ValueError):
    """A schema is invalid, or two schemas that must agree do not."""


class DataError(TrajstoreError, ValueError):
    """Data handed in does not fit; nothing was stored."""


class NotReadyError(DataError, LookupError):
    """There is nothing to draw from yet: wait for more data, or ask for other windows."""


class EpisodeNotFoundError(TrajstoreError, LookupError):
    """No such episode, or no open episode in that environment."""


class CheckpointNotFoundError(TrajstoreError, LookupError):
    """No such checkpoint: the message lists those that there are."""


class AmbiguousCheckpointError(TrajstoreError, LookupError):
    """Several checkpoints could be meant: name one of those that the message lists."""


class StepPlacedError(TrajstoreError, RuntimeError):
    """The step has its final place on disk and can't be amended any more."""


class ClosedError(TrajstoreError, RuntimeError):
    """The writer is closed, or belongs to another process: open a new one."""


class StorageError(TrajstoreError, OSError):
    """The storage failed: what is committed is safe; try again when it works."""


class ConflictError(StorageError):
    """Somebody else wrote an object that belongs to this writer alone."""


class SnapshotExpiredError(TrajstoreError, LookupError):
    """Rows that this snapshot shows were evicted meanwhile: refresh."""


class RankError(TrajstoreError, RuntimeError):
    """Another rank failed, disagrees, or is not who it should be: the message names it; nothing was published."""


class RankTimeoutError(RankError, TimeoutError):
    """A rank did not answer in time: see whether it is still alive."""


class MissingExtraError(TrajstoreError, ImportError):
    """An optional dependency is not installed: the message says which extra to install."""
