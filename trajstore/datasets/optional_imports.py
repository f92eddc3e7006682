"""Import libraries that only some formats need."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from trajstore.errors import MissingExtraError


def import_optional(module: str, message: str) -> Any:
    """Import a module on first use.

    Raises:
        MissingExtraError: It is not installed. ``message`` says what needs it and how to install it.
    """
    try:
        return import_module(module)
    except ImportError as error:
        raise MissingExtraError(message) from error
