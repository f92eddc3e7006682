"""Libraries that only some formats need."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from trajstore.errors import MissingExtraError


def needed(module: str, why: str) -> Any:
    """A module that is imported when it is first needed.

    Raises:
        MissingExtraError: It is not installed; ``why`` says what for, and how to get it.
    """
    try:
        return import_module(module)
    except ImportError as error:
        raise MissingExtraError(why) from error
