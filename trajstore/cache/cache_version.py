"""A number that says whether what was read from a cache's layout is still true."""

from __future__ import annotations


class CacheVersion:
    """Counts the changes of a cache that invalidate facts which its users keep between batches.

    These facts are the memory addresses of arenas and page tables, the set of columns, and whether a column is
    complete. Values in that memory, such as the slot of a page, may change without being counted.

    Attributes:
        number: Rises with every such change.
    """

    __slots__ = ("number",)

    def __init__(self) -> None:
        self.number = 0

    def advance(self) -> None:
        """Count a change."""
        self.number += 1
