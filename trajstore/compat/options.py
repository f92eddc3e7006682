"""Options that faces hand on to the buffer behind: checked when a face is made, not when it is first used."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from typing import Any

from trajstore.replay.options import ReplayOptions

_OF_STORES = {"storage_options", "fsync"}


def check_options(face: Callable[..., Any], given: Iterable[str], own: Mapping[str, str]) -> None:
    """Refuse what a face sets itself, and what is no option at all.

    Args:
        face: The constructor; an error names its parameters too.
        given: Names of further options, for `trajstore.ReplayBuffer`.
        own: Those that the face sets itself, with what to do instead.

    Raises:
        TypeError: One is not taken.
    """
    for name in given:
        if name in own:
            raise TypeError(f"{name}: this buffer sets it itself; {own[name]}")
    parameters = inspect.signature(face).parameters.values()
    mine = [p.name for p in parameters if p.kind is not p.VAR_KEYWORD and p.name != "self"]
    others = {f.name for f in fields(ReplayOptions)} | _OF_STORES
    others -= {*own, *mine}
    if unknown := sorted(set(given) - others):
        raise TypeError(
            f"unknown options {unknown}; there are {', '.join(mine)}, and of trajstore.ReplayBuffer"
            f" {', '.join(sorted(others))}"
        )
