"""The command ``show``: one episode with its metadata, its fields and its frames."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from trajstore.cli.exit_codes import FINE, PROBLEMS, UsageError, damage_of_a_store, usage_errors
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
from trajstore.errors import CorruptionError, EpisodeNotFoundError
from trajstore.format.handles import EpisodeKey
from trajstore.inspection.downsampling import EpisodeSeries, episode_series
from trajstore.inspection.field_statistics import field_statistics
from trajstore.plot.images import image_layout
from trajstore.schema import selected_paths
from trajstore.store.snapshot import Snapshot

if TYPE_CHECKING:
    from rich.console import Console

_N_POINTS = 256  # of each series, enough for any terminal
_MAX_COMPONENTS = 8  # of a field that are drawn
_MAX_BYTES = 256 << 20  # that are decoded for the figures
_MIN_LINE, _MAX_LINE = 8, 60  # characters of a small plot
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
        Option("--frames", "Save the frames: a file .gif or .mp4, or a directory for PNGs.", "PATH"),
    ] = None,
    frame_field: Annotated[
        str | None, Option("--frame-field", "The field of the frames, if there are several.")
    ] = None,
    every: Annotated[int, Option("--every", "Save one frame of this many.")] = 1,
    fps: Annotated[float, Option("--fps", "Frames a second of a file.")] = 30.0,
    at: At = None,
    storage_option: StorageOptions = None,
    as_json: AsJson = False,
) -> int:
    """Show an episode: its metadata, the values of its fields as figures and small plots, and where it is stored.

    What is damaged is shown as the error in its place, and the exit code is 1 then.
    """
    snapshot = open_snapshot(url, storage_option, at)
    with usage_errors(OSError), damage_of_a_store():
        row = find_episode(snapshot, episode)
        facts = _episode_facts(snapshot, row, fields.split(",") if fields else None)
        if frames is not None:
            facts["frames"] = _save(snapshot, row, Path(frames), frame_field, every, fps)
    print_facts(facts, _print_episode, as_json)
    return PROBLEMS if any("error" in one for one in facts["fields"] + facts["columns"]) else FINE


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
    paths = selected_paths(schema, fields)
    derived = [] if fields is not None else list(snapshot.columns.names)
    names = snapshot.names
    return {
        "url": snapshot.storage.display,
        "row": row,
        **values,
        "n_rows": table.n_rows(row),
        "spans": [
            {"stream": names[s.source], "t_start": s.t_start, "row_start": s.row_start, "row_stop": s.row_stop}
            for s in table.spans(row)
        ],
        "fields": [_field_facts(snapshot, row, path, _MAX_BYTES // len(paths)) for path in paths],
        "columns": [{"column": name} | _or_error(partial(_series, snapshot, row, name, 1)) for name in derived],
    }


def _field_facts(snapshot: Snapshot, row: int, path: str, max_bytes: int) -> Facts:
    """Figures and series of a field; null and ``error`` if it can't be read."""
    assert snapshot.schema is not None  # there is an episode
    spec = snapshot.schema[path]
    facts: Facts = {"field": path, "dtype": spec.dtype, "shape": list(spec.shape)}
    facts |= {"is_frame": image_layout(spec) is not None}
    facts |= dict.fromkeys(("n_values", "n_read", "n_nan", "n_infinite", "min", "mean", "max"))

    def read() -> Facts:
        found = field_statistics(snapshot, [path], max_bytes=max_bytes, episodes=[row])[path]
        figures: Facts = {"n_values": found.n_total_rows, "n_read": found.n_rows, "n_nan": found.n_nan}
        figures |= {"n_infinite": found.n_infinite}
        figures |= {"min": found.minimum, "mean": found.mean, "max": found.maximum}
        return figures | _series(snapshot, row, path, found.n_components)

    return facts | _or_error(read)


def _or_error(read: Callable[[], Facts]) -> Facts:
    """What is read, or the damage that keeps it from being read."""
    try:
        with damage_of_a_store():
            return read()
    except CorruptionError as error:
        return {"series": [], "error": str(error)}


def _series(snapshot: Snapshot, row: int, path: str, n_components: int) -> Facts:
    """Shortened series of a field's components, if it has few."""
    if n_components > _MAX_COMPONENTS:
        return {"series": []}
    found: EpisodeSeries = episode_series(snapshot, row, path, n_points=_N_POINTS, max_components=_MAX_COMPONENTS)
    series = [
        {
            "component": component,
            "n_steps": found.n_steps,
            "steps": one.steps.tolist(),
            "values": one.values.tolist(),
        }
        for component, one in zip(found.components, found.series, strict=True)
    ]
    return {"series": series}


def _save(snapshot: Snapshot, row: int, path: Path, field: str | None, every: int, fps: float) -> list[str]:
    assert snapshot.schema is not None
    known = [name for name, spec in snapshot.schema.fields.items() if image_layout(spec) is not None]
    if field is None and len(known) != 1:
        reason = f"several fields hold pictures: {', '.join(known)}; choose with --frame-field" if known else None
        raise UsageError(f"--frames: {reason or 'no field holds pictures, which are uint8 of shape (H, W[, C])'}")
    if field is not None and field not in known:
        raise UsageError(
            f"--frame-field: '{field:.80}' does not hold pictures; fields that do: {', '.join(known) or 'none'}"
        )
    if every < 1 or fps <= 0:
        raise UsageError(f"--every and --fps: expected positive numbers, got {every} and {fps:g}")
    check_target(path)
    chosen = known[0] if field is None else field
    with progress_bar("frames") as progress:
        return save_frames(snapshot, row, chosen, path, fps=fps, every=every, progress=progress)


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
    for one in facts["fields"] + facts["columns"]:
        if "error" in one:
            console.print(f"damaged: {printable(one['error'])}", style="red", soft_wrap=True)
    sampled = [f["field"] for f in facts["fields"] if "error" not in f and f["n_read"] < f["n_values"]]
    if sampled:
        console.print(f"Figures of a sample of the steps: {printable(', '.join(sampled))}")
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
    rows += [(column["column"], "derived", None, column) for column in facts["columns"] if "error" in column]
    headings = ("field", "dtype", "min", "mean", "max")
    cells = [
        (printable(name), dtype, *("" if f.get(key) is None else f"{f[key]:.4g}" for key in headings[2:]))
        for name, dtype, _, f in rows
    ]
    fixed = sum(max(map(len, column)) for column in zip(headings, *cells, strict=True))
    unicode = (console.encoding or "").lower().startswith("utf")
    width = max(_MIN_LINE, min(_MAX_LINE, console.width - fixed - 13))  # 13: the gaps between columns
    table = make_table("", *headings[:2], *(f">{name}" for name in headings[2:]), "=over time")
    for row, (_, _, one, figures) in zip(cells, rows, strict=True):
        table.add_row(*row, _line(one, figures, width, unicode))
    console.print(table)


def _line(one: Facts | None, figures: Facts, width: int, unicode: bool) -> str:
    import numpy as np

    notes = [
        f"{figures[key]:,} {name}" for key, name in (("n_nan", "NaN"), ("n_infinite", "inf")) if figures.get(key)
    ]
    note = ", ".join(notes)
    if one is None:
        return "damaged" if "error" in figures else note
    steps, values = np.array(one["steps"], np.int64), np.array(one["values"], np.float64)
    line = sparkline(steps, values, one["n_steps"], width=max(4, width - len(note)), unicode=unicode)
    return f"{line} {note}".rstrip()


def _own_figures(one: Facts) -> dict[str, Any]:
    """Lowest and highest value of a series; its points have them, but not its mean."""
    finite = [value for value in one["values"] if value == value and abs(value) != float("inf")]
    return {"min": min(finite, default=None), "mean": None, "max": max(finite, default=None)}
