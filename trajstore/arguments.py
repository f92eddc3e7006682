"""Checks of arguments that many entry points take: names of options, sizes in bytes, positive integers."""

from __future__ import annotations

import difflib
import functools
import inspect
import re
from collections.abc import Callable, Iterable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
          "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}  # fmt: skip


def parse_bytes(value: int | str, name: str) -> int:
    """A positive number of bytes from an int or from text such as ``"4GiB"`` or ``"500MB"``.

    Args:
        value: The size.
        name: Name of the argument, for the message.

    Raises:
        ValueError: It is not a positive size.

    >>> parse_bytes("4KiB", "cache_bytes")
    4096
    """
    if isinstance(value, str):
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value)
        if not found or found.group(2).upper() not in _UNITS:
            raise ValueError(f"{name}: expected bytes as an int or like '4GiB', got {value!r}")
        value = int(float(found.group(1)) * _UNITS[found.group(2).upper()])
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ValueError(f"{name}: expected a positive number of bytes, got {value!r}")
    return value


def check_positive(name: str, value: object) -> None:
    """Refuse a value that is not a positive integer.

    Raises:
        ValueError: It is something else; the message gives the argument's ``name``.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name}: expected a positive integer, got {value!r}")


def unknown_options(unknown: Iterable[str], known: Iterable[str]) -> TypeError:
    """The error for options that do not exist; it names the nearest ones, and all of them."""
    names = sorted(known)
    guesses = [(name, difflib.get_close_matches(name, names, 1)) for name in sorted(unknown)]
    asked = ", ".join(f"{name!r}{f' (did you mean {near[0]!r}?)' if near else ''}" for name, near in guesses)
    return TypeError(f"unknown options: {asked}; the options are {', '.join(names)}")


def names_options(function: Callable[P, R]) -> Callable[P, R]:
    """Let a function that gets an unknown keyword argument name those that it takes."""
    parameters = inspect.signature(function).parameters.values()
    known = {parameter.name for parameter in parameters if parameter.kind is not parameter.POSITIONAL_ONLY}

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        if unknown := kwargs.keys() - known:
            raise unknown_options(unknown, known - {"self"})
        return function(*args, **kwargs)

    return checked
