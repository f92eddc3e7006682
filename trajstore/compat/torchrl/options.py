"""The keyword options of `TrajStorage` that go to the writer of its log."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, TypedDict

from trajstore.arguments import unknown_options
from trajstore.writing.options import WriterOptions


class WriterOptionsDict(TypedDict, total=False):
    """Options of `trajstore.Writer`.

    Attributes:
        commit_steps: Commit in the background after this many staged rows.
        commit_seconds: Commit in the background at least this often.
        buffer_bytes: Bound of the memory for rows that are not durable yet; by default at most 64 MiB.
    """

    commit_steps: int | None
    commit_seconds: float | None
    buffer_bytes: int | str


def check_writer_options(storage: type, options: Mapping[str, Any]) -> None:
    """Check the options of a storage's writer, which is made with the first rows.

    Raises:
        TypeError: The storage takes no option of this name.
        ValueError: An option has a wrong value.
    """
    if unknown := options.keys() - WriterOptionsDict.__annotations__.keys():
        parameters = inspect.signature(storage).parameters.values()
        named = {parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD}
        raise unknown_options(unknown, named | WriterOptionsDict.__annotations__.keys())
    WriterOptions(**options)
