"""The ``skip`` option of dataset readers: names of arrays, groups and attributes that are not imported."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from trajstore.errors import DataError

_MAX_LISTED = 40  # names in a message


def is_skipped(path: str, skip: Collection[str]) -> bool:
    """Return whether ``skip`` names the path, or a group that contains it."""
    return any(path == name or path.startswith(f"{name}/") for name in skip)


def check_skip(
    display: str, skip: Collection[str], existing: Iterable[str], normalize: Callable[[str], str] = str
) -> None:
    """Refuse a name in ``skip`` that the dataset does not have.

    A misspelled name would import the data that the user wanted to leave out.

    Args:
        display: Where the dataset is, for messages.
        skip: Paths or groups to leave out.
        existing: Paths that can be left out. The contents of a skipped group may be missing. Consumed only until
            every name is found.
        normalize: Maps different spellings of a name to one.

    Raises:
        DataError: A name does not exist; the message lists names that do.
    """
    groups = [f"{normalize(name)}/" for name in skip]
    not_found = [name for name in skip if not normalize(name).startswith(tuple(groups))]
    seen: dict[str, None] = {}
    for path in existing if not_found else ():
        seen[path] = None
        not_found = [name for name in not_found if not is_skipped(normalize(path), [normalize(name)])]
        if not not_found:
            return
    if not_found:
        names = ", ".join([*list(seen)[:_MAX_LISTED], *(["..."] if len(seen) > _MAX_LISTED else [])])
        raise DataError(f"{display}: skip '{not_found[0]}': nothing has that name; expected one of {names}")
