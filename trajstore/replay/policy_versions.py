"""The version of the policy that collected each step, kept as a column in memory."""

from __future__ import annotations

from trajstore.sampling.reader import Reader
from trajstore.schema import Array, Field

COLUMN = "policy_version"


class PolicyVersions:
    """Adds the column when a version is first set. Methods are called with the assembler's lock held."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self.current: int | None = None

    def restore(self, version: int) -> None:
        """Begin with the version of a checkpoint, before the column's values are loaded."""
        if self.current is None:
            self.current = version
            self._reader.add_column(COLUMN, Field("int64"), fill=-1, of_new=lambda: self.current or 0)

    def set(self, version: int) -> None:
        """Record this version with all steps appended from now on; the assembler has just published."""
        self.restore(version)
        self._reader.follow_columns()  # earlier steps keep the earlier version
        self.current = version

    def check(self, version: int) -> None:
        """Refuse a version that is no number, or older than the current one."""
        if not isinstance(version, int) or isinstance(version, bool) or not 0 <= version < 1 << 62:
            raise ValueError(f"policy_version: expected an integer of at least 0, got {version!r}")
        if self.current is not None and version < self.current:
            raise ValueError(f"policy_version: expected at least {self.current}, got {version}")

    def older_than(self, version: int) -> Array:
        """A bool for each step, in index order: whether an older policy collected it."""
        if self.current is None:
            raise ValueError("no policy versions are recorded; set policy_version before collecting")
        older: Array = self._reader.column(COLUMN) < version
        return older
