"""Small plots made of characters: lines of blocks, and bars."""

from collections.abc import Sequence

import numpy as np

from trajstore.schema import Array

_BLOCKS = "▁▂▃▄▅▆▇█"
_ASCII = "_.-=+*%#"
_PARTS = " ▏▎▍▌▋▊▉"  # of a character, by eighths
NOTHING = "·"  # where there is no number


def sparkline(positions: Array, values: Array, n_positions: int, *, width: int, unicode: bool = True) -> str:
    """Return a series as a line of blocks, each as high as the mean of its stretch.

    Args:
        positions: Where the values are, from 0 to ``n_positions`` - 1.
        values: Numbers or truth values; NaN and infinities are left out.
        n_positions: Length of the series.
        width: Characters of the line; fewer if the series is shorter.
        unicode: Whether the terminal shows block characters.
    """
    width = min(width, n_positions)
    numbers = values.astype(np.float64)
    is_finite = np.isfinite(numbers)
    place = (positions * width // max(1, n_positions))[is_finite]
    count = np.bincount(place, minlength=width)
    with np.errstate(all="ignore"):
        means = np.bincount(place, weights=numbers[is_finite], minlength=width) / count
        low, high = np.nanmin(means, initial=np.inf), np.nanmax(means, initial=-np.inf)
        level = (means - low) / (high - low) if high > low else np.where(count, 0.0, np.nan)
    marks = _BLOCKS if unicode else _ASCII
    return "".join(
        marks[min(len(marks) - 1, int(x * len(marks)))] if np.isfinite(x) else (NOTHING if unicode else " ")
        for x in level
    )


def bars(values: Sequence[float], *, width: int, unicode: bool = True) -> list[str]:
    """Return a horizontal bar for each value; the largest one is ``width`` characters long."""
    largest = max(values, default=0.0)
    out = []
    for value in values:
        eighths = round(max(0.0, value) / largest * width * 8) if largest > 0 else 0
        if unicode:
            out.append(("█" * (eighths // 8) + _PARTS[eighths % 8]).rstrip() or "▏")
        else:
            out.append("#" * max(1, round(eighths / 8)))
    return out
