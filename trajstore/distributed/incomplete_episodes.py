"""Episodes that are incomplete: for which causes, and what a redistribution does with them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

from trajstore.format.spans import End
from trajstore.schema import Array

Fate = Literal["keep", "drop", "truncate"]
CAUSES = ("open", "headless", "cut")


def fates_by_cause(incomplete: str | Mapping[str, str]) -> dict[str, str]:
    """The fate of incomplete episodes for every cause, from one fate for all or from fates by cause.

    Causes that are not given are kept.

    Raises:
        ValueError: A cause or a fate does not exist.
    """
    given = dict.fromkeys(CAUSES, incomplete) if isinstance(incomplete, str) else dict(incomplete)
    if unknown := given.keys() - set(CAUSES):
        raise ValueError(f"incomplete: expected any of {', '.join(CAUSES)}, got {', '.join(map(repr, unknown))}")
    for cause, fate in given.items():
        if fate not in get_args(Fate):
            raise ValueError(f"incomplete, {cause}: expected one of {', '.join(get_args(Fate))}, got {fate!r}")
    return dict.fromkeys(CAUSES, "keep") | given


def masks_by_cause(end: Array, t: Array, begin: Array | None = None) -> dict[str, Array]:
    """Which episodes are incomplete for each cause; an episode may be so for several.

    Args:
        end: How each episode ended, as `End`.
        t: The first step that each episode still has.
        begin: The step that an earlier redistribution made the first of each episode. An episode that starts there
            is not headless.
    """
    is_headless = t > 0 if begin is None else (t > 0) & (t != begin)
    return {"open": end == End.OPEN, "headless": is_headless, "cut": end == End.CUT}
