"""Names that batches use for other things than fields. New stores have no such fields; older ones may."""

from __future__ import annotations

from collections.abc import Iterable

from trajstore.errors import SchemaError

_FLAG = "pass it as {name}= of append; batches then have it"
_NEXT = "the next observation of a step is read from the following step; pass that of the last step as final="
# By name, what to do instead of storing a field of that name.
_INSTEAD = {
    "terminated": _FLAG,
    "truncated": _FLAG,
    "next": _NEXT,
} | dict.fromkeys(
    ("valid", "learn", "is_first", "is_last", "is_final", "index", "n_step", "priority", "hindsight", "provenance"),
    "rename it",
)
RESERVED = frozenset(_INSTEAD)


def has_reserved(paths: Iterable[str]) -> bool:
    """Whether a field has the name of something else in a batch."""
    return any(path.partition("/")[0] in RESERVED for path in paths)


def check_not_reserved(paths: Iterable[str]) -> None:
    """Refuse fields that have the name of something else in a batch.

    Raises:
        SchemaError: There is such a field.
    """
    for path in paths:
        name = path.partition("/")[0]
        if name in _INSTEAD:
            instead = _INSTEAD[name].format(name=name)
            raise SchemaError(f"field '{path}': batches use the name {name!r} for something else; {instead}")
