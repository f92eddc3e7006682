"""Facts and plots of the whole store, computed from its records and span tables."""

from __future__ import annotations

from typing import Any

import numpy as np

from trajstore.format.codec import Codec
from trajstore.format.commit_record import CommitRecord
from trajstore.format.marks import Marks
from trajstore.format.zarr_json import parse_json, trajstore_attributes
from trajstore.schema import Array
from trajstore.store.snapshot import Snapshot
from trajstore.viewer.frames import is_frames
from trajstore.viewer.live_view import read_root

Facts = dict[str, Any]

BUCKETS = 240  # points of a plot over all episodes
BARS = 40  # of a histogram
_EXACT = 2.0**53  # integers below it are exact as floats
MAX_STREAMS = 200  # listed, and measured for the storage by field


def facts(snapshot: Snapshot) -> Facts:
    """What the store is and holds."""
    storage = snapshot.storage
    root = trajstore_attributes(parse_json(read_root(snapshot), storage.display), "store", storage.display)
    table = snapshot.episodes
    streams = snapshot.streams
    return {
        "url": storage.display,
        "format": root["format"],
        "id": str(root.get("id")),
        "created_at": root.get("created_at"),
        "committed_at": max((r.committed_at for r in streams), default=None),
        "n_streams": len(streams),
        "n_open_streams": sum(not r.is_sealed for r in streams),
        "n_episodes": len(table),
        "n_steps": int(table["length"].sum()),
        "n_rows": snapshot.n_rows,
        "fields": _fields(snapshot),
        "episode_columns": dict(snapshot.schema.episode) if snapshot.schema else {},
        "columns": _derived_columns(snapshot),
    }


def _fields(snapshot: Snapshot) -> list[Facts]:
    if snapshot.schema is None:
        return []
    described = []
    for path, spec in snapshot.schema.fields.items():
        layouts = {r.layouts[f"steps/{path}"] for r in snapshot.streams if path in r.schema.fields}
        described.append(
            {
                "field": path,
                "dtype": spec.dtype,
                "shape": list(spec.shape),
                "final": spec.final,
                "is_frames": is_frames(spec),
                "chunk_rows": sorted({layout.chunk_rows for layout in layouts}),
                "codecs": sorted({_codec_name(layout.codec) for layout in layouts}),
            }
        )
    return described


def _codec_name(codec: Codec) -> str:
    return "none" if codec.name == "none" else f"{codec.name} {codec.cname}:{codec.level}".replace(" :", ":")


def _derived_columns(snapshot: Snapshot) -> list[Facts]:
    columns = snapshot.columns
    found = []
    for name in columns.names:
        states = columns.states(name).values()
        kinds = sorted({(state.dtype, state.shape) for state in states})
        rows = sum(state.stop - state.first for state in states)
        found.append(
            {"name": name, "dtype": kinds[0][0], "shape": list(kinds[0][1]), "streams": len(states), "rows": rows}
        )
    return found


def streams(snapshot: Snapshot) -> Facts:
    """The newest streams, newest first, and how many there are."""
    live = Marks.wanted(snapshot.streams)
    newest = snapshot.streams[::-1][:MAX_STREAMS]
    return {
        "n_streams": len(snapshot.streams),
        "streams": [_stream(record, live[record.id], snapshot) for record in newest],
    }


def _stream(record: CommitRecord, first_row: int, snapshot: Snapshot) -> Facts:
    return {
        "id": record.id,
        "rows": record.rows,
        "evicted_rows": first_row,
        "abandoned_rows": record.rows - snapshot.lineage.n_rows(record),
        "commits": record.commit,
        "state": "packed" if record.location else "sealed" if record.is_sealed else "open",
        "created_at": record.created_at,
        "committed_at": record.committed_at,
        "rank": record.rank,
        "world_size": record.world_size,
    }


def plots(snapshot: Snapshot) -> Facts:
    """Returns, lengths and ends of the episodes in order of time, and how they are distributed."""
    table = snapshot.episodes
    time, length, returns = table["time"], table["length"], table["return"].astype(np.float64)
    codes, labels = table.codes("end")
    order = np.argsort(time, kind="stable")  # quick, because streams are sorted
    edges = _edges(len(order))
    shown = np.flatnonzero(np.bincount(codes, minlength=len(labels)))
    return {
        "n_episodes": len(order),
        "episodes": edges[1:],
        "steps": np.cumsum(length[order])[edges[1:] - 1] if len(order) else np.empty(0, np.int64),
        "times": time[order][edges[1:] - 1] if len(order) else np.empty(0),
        "return": _buckets(returns[order], edges),
        "length": _buckets(length[order].astype(np.float64), edges),
        "ends": {str(labels[code]): _counts(codes[order] == code, edges) for code in shown},
        "histograms": {"return": _histogram(returns), "length": _histogram(length)},
    }


def _edges(n: int) -> Array:
    """Where the buckets of ``n`` episodes begin and end; none is empty."""
    return np.unique(np.linspace(0, n, min(n, BUCKETS) + 1).round().astype(np.int64))


def _buckets(values: Array, edges: Array) -> Facts:
    """Mean, least and greatest value of each bucket; NaN where it has none."""
    if not len(values):
        return {"mean": [], "low": [], "high": []}
    is_known = np.isfinite(values)
    starts = edges[:-1]
    n = np.add.reduceat(is_known.astype(np.int64), starts)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.add.reduceat(np.where(is_known, values, 0), starts) / n
    low = np.minimum.reduceat(np.where(is_known, values, np.inf), starts)
    high = np.maximum.reduceat(np.where(is_known, values, -np.inf), starts)
    return {"mean": mean, "low": low, "high": high}  # infinities are shown as absent


def _counts(chosen: Array, edges: Array) -> Array:
    counts: Array = np.add.reduceat(chosen.astype(np.int64), edges[:-1]) if len(chosen) else np.empty(0, np.int64)
    return counts


def _histogram(values: Array) -> Facts | None:
    known = values[np.isfinite(values)]
    if not len(known):
        return None
    low, high = float(known.min()), float(known.max())
    if not np.isfinite(high - low):
        return None
    n_bars = BARS
    is_whole = max(abs(low), abs(high)) < _EXACT and not (known % 1).any()
    if is_whole:  # a bar for the same number of integers each
        width = max(1, -(-int(high - low + 1) // BARS))
        n_bars = max(1, -(-int(high - low + 1) // width))
        high = low + n_bars * width
    counts, edges = np.histogram(known, n_bars, (low, high if high > low else low + 1))
    return {
        "low": float(edges[0]),
        "high": float(edges[-1]),
        "counts": counts,
        "median": float(np.median(known)),
        "is_whole": is_whole,  # a bar has the integers from its low end to one below its high end
    }


def storage_by_field(snapshot: Snapshot) -> Facts:
    """Bytes of the objects of each field, and what they hold decoded; of the newest `MAX_STREAMS` streams."""
    schema, measured = snapshot.schema, snapshot.streams[::-1][:MAX_STREAMS]
    live = Marks.wanted(snapshot.streams)
    stored: dict[str, int] = {}
    for sizes in snapshot.storage.map(lambda r: _sizes_by_array(snapshot, r), measured):
        for path, n_bytes in sizes.items():
            stored[path] = stored.get(path, 0) + n_bytes
    fields: list[Facts] = []
    for path, spec in (schema.fields if schema else {}).items():
        rows = sum(r.rows - live[r.id] for r in measured if path in r.schema.fields)
        n_bytes = stored.pop(f"steps/{path}", 0)
        fields.append({"field": path, "stored_bytes": n_bytes, "decoded_bytes": spec.row_bytes * rows})
    return {
        "fields": fields,
        "other_bytes": sum(stored.values()),
        "n_measured": len(measured),
        "n_streams": len(snapshot.streams),
    }


def _sizes_by_array(snapshot: Snapshot, record: CommitRecord) -> dict[str, int]:
    """Bytes of the objects below a stream's folder, by the folder that holds them."""
    sizes: dict[str, int] = {}
    for key, n_bytes in snapshot.storage.tree_sizes(record.folder).items():
        folder = key.removeprefix(f"{record.folder}/").rpartition("/")[0]
        sizes[folder] = sizes.get(folder, 0) + n_bytes
    return sizes
