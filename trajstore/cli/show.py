"""The command ``show``: one episode with its metadata, its fields and its frames."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from trajstore.cli.exit_codes import FINE, UsageError, damage_of_a_store, usage_errors
from trajstore.cli.frames import check_target, save_frames
from trajstore.cli.listing import format_value
from trajstore.cli.output import (
    Facts,
    format_count,
    format_dtype,
    format_time,
    make_table,
    print_facts,
    printable,
    progress_bar,
)
from trajstore.cli.parameters import Argument, AsJson, At, Option, StorageOptions, Url
from trajstore.cli.sparklines import sparkline
from trajstore.cli.stores import open_snapshot
from trajstore.errors import EpisodeNotFoundError
from trajstore.format.handles import EpisodeKey
from trajstore.inspection.downsampling import EpisodeSeries, episode_series
from trajstore.inspection.field_statistics import field_statistics
from trajstore.inspection.frames import frame_fields, is_frame, pictures
from trajstore.store.snapshot import Snapshot

if TYPE_CHECKING:
    from rich.console import Console

_N_POINTS = 256  # of each series, enough for any terminal
_MAX_COMPONENTS = 8  # of a field that are drawn
_MAX_BYTES = "256MiB"  # that are decoded for the figures
_KNOWN = {
    *("stream", "episode", "env", "length", "end", "return", "has_final", "is_headless", "time", "metadata"),
    *("url", "row", "n_rows", "spans", "fields", "columns", "frames"),
}


def show(
    url: Url,
    episode: Annotated[
        str, Argument("Its row in `ls`, negative from the end, or its key STREAM/NUMBER.", "EPISODE")
    ],
    fields: Annotated[str | None, Option("--fields", "Fields or groups to show, such as a,b/c.", "FIELDS")] = None,
    frames: Annotated[
        str | None,
        Option("--frames", "Save the frames: a file that ends in .gif, or a directory for PNGs.", "PATH"),
    ] = None,
    frame_field: Annotated[
        str | None, Option("--frame-field", "The field of the frames, if there are several.")
    ] = None,
    every: Annotated[int, Option("--every", "Save one frame of this many.")] = 1,
    fps: Annotated[float, Option("--fps", "Frames a second of a GIF.")] = 30.0,
    at: At = None,
    storage_option: StorageOptions = None,
    as_json: AsJson = False,
) -> int:
    """Show an episode: its metadata, the values of its fields as figures and small plots, and where it is stored.

    An EPISODE that begins with a minus must follow --, as in: trajstore show URL -- -1.
    """
    snapshot = open_snapshot(url, storage_option, at)
    with usage_errors(OSError), damage_of_a_store():
        row = find_episode(snapshot, episode)
        facts = _episode_facts(snapshot, row, fields.split(",") if fields else None)
        if frames is not None:
            facts["frames"] = _save(snapshot, row, Path(frames), frame_field, every, fps)
    print_facts(facts, _print_episode, as_json)
    return FINE


def find_episode(snapshot: Snapshot, text: str) -> int:
    """The row of an episode that is named by its row, or by its stream and number.

    A stream may be named by a part of its id that no other stream has at its start or end.

    Raises:
        EpisodeNotFoundError: No episode, or no single stream, has this name.
    """
    table = snapshot.episodes
    stream, slash, number = text.rpartition("/")
    try:
        i = int(number)
    except ValueError:
        raise UsageError(f"EPISODE: expected a row or STREAM/NUMBER, got {text!r:.80}") from None
    if not slash:
        table.key(i)  # raises if there is no such row
        return i % len(table)
    names = [name for name in snapshot.names if name == stream]
    names = names or [
        name for name in snapshot.names if stream and (name.startswith(stream) or name.endswith(stream))
    ]
    if len(names) != 1:
        found = "several streams begin or end" if names else "no stream begins or ends"
        raise EpisodeNotFoundError(f"{found} with '{stream:.80}'; `info` lists the streams")
    return table.find(EpisodeKey(names[0], i))


def _episode_facts(snapshot: Snapshot, row: int, fields: list[str] | None) -> Facts:
    table, schema = snapshot.episodes, snapshot.schema
    assert schema is not None  # there is an episode
    values = table.row(row)
    statistics = field_statistics(snapshot, fields, max_bytes=_MAX_BYTES, episodes=[row])
    derived = [] if fields is not None else list(snapshot.columns.names)
    names = snapshot.names
    shown = []
    for path, found in statistics.items():
        spec = schema[path]
        facts: Facts = {"field": path, "dtype": spec.dtype, "shape": list(spec.shape), "is_frame": is_frame(spec)}
        facts |= {"n_values": found.n_total_rows, "n_read": found.n_rows, "n_nan": found.n_nan}
        facts |= {"n_infinite": found.n_infinite, "min": found.minimum, "mean": found.mean, "max": found.maximum}
        shown.append(facts | {"series": _series(snapshot, row, path, found.n_components)})
    return {
        "url": snapshot.storage.display,
        "row": row,
        **values,
        "n_rows": table.n_rows(row),
        "spans": [
            {"stream": names[s.source], "t_start": s.t_start, "row_start": s.row_start, "row_stop": s.row_stop}
            for s in table.spans(row)
        ],
        "fields": shown,
        "columns": [{"column": name, "series": _series(snapshot, row, name, 1)} for name in derived],
    }


def _series(snapshot: Snapshot, row: int, path: str, n_components: int) -> list[Facts]:
    """Shortened series of a field's components, if it has few."""
    if n_components > _MAX_COMPONENTS:
        return []
    found: EpisodeSeries = episode_series(snapshot, row, path, n_points=_N_POINTS, max_components=_MAX_COMPONENTS)
    return [
        {
            "component": component,
            "n_steps": found.n_steps,
            "steps": one.steps.tolist(),
            "values": one.values.tolist(),
        }
        for component, one in zip(found.components, found.series, strict=True)
    ]


def _save(snapshot: Snapshot, row: int, path: Path, field: str | None, every: int, fps: float) -> list[str]:
    assert snapshot.schema is not None
    known = frame_fields(snapshot.schema)
    if field is None and len(known) != 1:
        reason = f"several fields hold pictures: {', '.join(known)}; choose with --frame-field" if known else None
        raise UsageError(f"--frames: {reason or 'no field holds pictures, which are uint8 of shape (H, W[, C])'}")
    if every < 1 or fps <= 0:
        raise UsageError(f"--every and --fps: expected positive numbers, got {every} and {fps:g}")
    check_target(path)
    chosen = known[0] if field is None else field
    n = -(-snapshot.episodes.n_rows(row) // every)
    with progress_bar("frames") as progress:
        return save_frames(pictures(snapshot, row, chosen, every=every), path, fps=fps, n=n, progress=progress)


def _print_episode(console: "Console", facts: Facts) -> None:
    console.print(printable(facts["url"]))
    console.print(f"Episode {facts['row']}: {printable(facts['stream'])}/{facts['episode']}", style="bold")
    final = " and a final row" if facts["has_final"] else ""
    headless = f"; its first {facts['spans'][0]['t_start']:,} steps are evicted" if facts["is_headless"] else ""
    console.print(
        f"  {format_count(facts['length'], 'step')}{final}, {facts['end']}, return {facts['return']:,g};"
        f" env {facts['env']}, {format_time(facts['time'])} UTC{headless}"
    )
    declared = {name: value for name, value in facts.items() if name not in _KNOWN}
    for name, value in (declared | facts["metadata"]).items():
        console.print(f"  {printable(name)}: {printable(format_value('', value))}")
    rows = ", ".join(f"{s['row_start']:,}-{s['row_stop']:,}" for s in facts["spans"][:4])
    more = len(facts["spans"]) - 4
    stored = (
        f"  stored in {format_count(len(facts['spans']), 'span')}: rows {rows}{f' and {more} more' * (more > 0)}"
    )
    console.print(stored, soft_wrap=True)
    _print_fields(console, facts)
    partial = [f["field"] for f in facts["fields"] if f["n_read"] < f["n_values"]]
    if partial:
        console.print(f"Figures of a sample of the steps: {printable(', '.join(partial))}")
    if "frames" in facts:
        written = facts["frames"]
        console.print(
            f"Saved {format_count(len(written), 'file')}: {printable(', '.join(written[:1]))}", soft_wrap=True
        )
    elif pictures_ := [f["field"] for f in facts["fields"] if f["is_frame"]]:
        console.print(f"Pictures: {printable(', '.join(pictures_))}; save them with --frames")


def _print_fields(console: "Console", facts: Facts) -> None:
    rows: list[tuple[str, str, Facts | None, Facts]] = []
    for field in facts["fields"]:
        dtype, series = format_dtype(field), field["series"]
        if len(series) == 1 and not field["shape"]:
            rows.append((field["field"], dtype, series[0], field))
            continue
        rows.append((field["field"], dtype, None, field))
        rows += [(f"  [{one['component']}]", "", one, _own_figures(one)) for one in series]
    rows += [
        (column["column"], "derived", one, _own_figures(one))
        for column in facts["columns"]
        for one in column["series"]
    ]
    fixed = max(len(name) for name, *_ in rows) + max(len(dtype) for _, dtype, *_ in rows) if rows else 0
    width = max(8, min(60, console.width - fixed - 3 * 9 - 8))
    unicode = (console.encoding or "").lower().startswith("utf")
    table = make_table("", "field", "dtype", ">min", ">mean", ">max", "=over time")
    for name, dtype, one, figures in rows:
        texts = ("" if figures[key] is None else f"{figures[key]:.4g}" for key in ("min", "mean", "max"))
        table.add_row(printable(name), dtype, *texts, _line(one, figures, width, unicode))
    console.print(table)


def _line(one: Facts | None, figures: Facts, width: int, unicode: bool) -> str:
    import numpy as np

    notes = [
        f"{figures[key]:,} {name}" for key, name in (("n_nan", "NaN"), ("n_infinite", "inf")) if figures.get(key)
    ]
    note = ", ".join(notes)
    if one is None:
        return note
    steps, values = np.array(one["steps"], np.int64), np.array(one["values"], np.float64)
    line = sparkline(steps, values, one["n_steps"], width=max(4, width - len(note)), unicode=unicode)
    return f"{line} {note}".rstrip()


def _own_figures(one: Facts) -> dict[str, Any]:
    """Lowest and highest value of a series; its points have them, but not its mean."""
    finite = [value for value in one["values"] if value == value and abs(value) != float("inf")]
    return {"min": min(finite, default=None), "mean": None, "max": max(finite, default=None)}
