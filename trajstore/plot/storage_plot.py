"""A plot of what takes the bytes of a store."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from trajstore.format.marks import Marks
from trajstore.plot.drawing import (
    BLUE,
    GREY,
    LIGHT,
    axes_or_new,
    bytes_text,
    finish,
    import_matplotlib,
    legend,
    plain,
    say,
)
from trajstore.plot.sources import snapshot_of
from trajstore.store.snapshot import Snapshot

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from trajstore.plot.sources import Source

_MAX_BARS = 20


def storage(data: Source, *, ax: Axes | None = None) -> Axes:
    """Draw how many bytes each field takes on storage, and decoded. Lists all objects of the streams.

    Args:
        data: A store, snapshot, buffer or reader.
        ax: Where to draw; by default a new figure, as high as it needs.
    """
    stored, decoded = _sizes(snapshot_of(data))
    names = sorted(stored, key=lambda name: -stored[name])
    if len(names) > _MAX_BARS:
        rest = names[_MAX_BARS - 1 :]
        other = f"{len(rest)} others"
        stored[other], decoded[other] = (sum(sizes.get(n, 0) for n in rest) for sizes in (stored, decoded))
        names = [*names[: _MAX_BARS - 1], other]
    ax = axes_or_new(ax, height=1.3 + 0.33 * max(2, len(names)))
    finish(ax, f"Storage: {bytes_text(sum(stored.values()))}", "bytes", "")
    if not names:
        say(ax, "nothing is stored")
        return ax
    at = np.arange(len(names))
    ax.barh(at, [decoded.get(n, 0) for n in names], 0.8, color=LIGHT, label="decoded")
    ax.barh(at, [stored[n] for n in names], 0.5, color=BLUE, label="stored")
    for i, name in enumerate(names):
        ratio = f", {decoded[name] / stored[name]:.3g} x smaller" if _is_smaller(stored, decoded, name) else ""
        end = max(stored[name], decoded.get(name, 0))
        text = f" {bytes_text(stored[name])}{ratio}"
        ax.annotate(text, (end, i), va="center", fontsize="small", color=GREY)
    ax.set_yticks(at, [plain(name) for name in names])
    ax.invert_yaxis()
    ax.margins(x=0.3)
    ticker = import_matplotlib("matplotlib.ticker")
    longest = max(*stored.values(), *decoded.values(), 1)
    ax.xaxis.set_major_locator(ticker.MultipleLocator(1 << max(0, (longest // 3).bit_length() - 1)))
    ax.xaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: bytes_text(value)))
    legend(ax)
    return ax


def _is_smaller(stored: dict[str, int], decoded: dict[str, int], name: str) -> bool:
    return bool(stored[name]) and decoded.get(name, 0) >= 1.05 * stored[name]


def _sizes(snapshot: Snapshot) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes on storage by field, spans and columns, and decoded bytes by field."""
    fields = [] if snapshot.schema is None else list(snapshot.schema)
    stored: dict[str, int] = {}
    decoded: dict[str, int] = {}
    live = Marks.wanted(snapshot.streams)
    for record in snapshot.streams:
        for key, n in snapshot.storage.tree_sizes(record.folder).items():
            name = _owner(key.removeprefix(f"{record.folder}/"), fields)
            stored[name] = stored.get(name, 0) + n
        for path, spec in record.schema.fields.items():
            n_rows = max(0, record.rows - live[record.id])
            decoded[path] = decoded.get(path, 0) + spec.row_bytes * n_rows
    return stored, decoded


def _owner(key: str, fields: list[str]) -> str:
    top, _, rest = key.partition("/")
    if top == "steps":
        path = rest.rpartition("/")[0]
        return path if path in fields else "(metadata)"
    return {"spans": "(episode table)", "columns": "(derived columns)"}.get(top, "(metadata)")
