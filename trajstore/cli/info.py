"""The command ``info``: show what a store holds."""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

import numpy as np

from trajstore.cli.checkpoints import checkpoint_facts, print_checkpoints
from trajstore.cli.exit_codes import FINE, damage_of_a_store
from trajstore.cli.output import (
    MAX_LISTED,
    Facts,
    format_age,
    format_bytes,
    format_count,
    format_dtype,
    format_time,
    make_table,
    print_facts,
    printable,
)
from trajstore.cli.parameters import AsJson, At, Option, StorageOptions, Url
from trajstore.cli.stores import open_snapshot
from trajstore.format.codec import Codec
from trajstore.format.commit_record import CommitRecord
from trajstore.format.marks import Marks
from trajstore.format.packed_streams import replaced_copies
from trajstore.format.zarr_json import parse_json, trajstore_attributes
from trajstore.schema import Array
from trajstore.store.checkpoints import list_checkpoints
from trajstore.store.snapshot import Snapshot

if TYPE_CHECKING:
    from rich.console import Console

_WIDE = 120  # columns of a terminal that has room for times, not only dates
_LONG_ID = 40  # characters; shorter ids stay on one line


def info(
    url: Url,
    at: At = None,
    sizes: Annotated[bool, Option("--sizes", "Also list all objects, and show the size of each field.")] = False,
    storage_option: StorageOptions = None,
    as_json: AsJson = False,
) -> int:
    """Show what a store holds: schema, streams, episodes, checkpoints, derived columns.

    Reads records and span tables, but no steps.
    """
    snapshot = open_snapshot(url, storage_option, at)
    with damage_of_a_store():
        facts = _store_facts(snapshot, with_sizes=sizes)
    told_above = ("transport", "transport_reason")
    counted = {name: figure for name, figure in snapshot.storage.stats().items() if name not in told_above}
    if counted:
        facts["traffic"] = counted
    print_facts(facts, print_info, as_json)
    return FINE


def _store_facts(snapshot: Snapshot, *, with_sizes: bool) -> Facts:
    storage = snapshot.storage
    root = trajstore_attributes(parse_json(storage.get("zarr.json"), storage.display), "store", storage.display)
    live = Marks.wanted(snapshot.streams)
    return {
        "url": storage.display,
        "transport": {"name": storage.transport, "reason": storage.transport_reason} if storage.is_remote else None,
        "format": root["format"],
        "id": root.get("id"),
        "created_at": root.get("created_at"),
        "schema": _schema_facts(snapshot, live, with_sizes),
        "streams": [_stream_facts(record, live[record.id], snapshot) for record in snapshot.streams],
        "replaced_streams": sorted(replaced_copies(snapshot.stored)),
        "episodes": _episode_facts(snapshot),
        "checkpoints": [checkpoint_facts(c) for c in list_checkpoints(storage)],
        "columns": [
            {"name": name, "target": target, "stream": record.id} | state.to_json()
            for record in snapshot.streams
            for target, named in record.columns.items()
            for name, state in named.items()
        ],
    }


def _schema_facts(snapshot: Snapshot, live: Mapping[str, int], with_sizes: bool) -> Facts | None:
    schema = snapshot.schema
    if schema is None:
        return None
    fields = []
    for path, spec in schema.fields.items():
        holding = [record for record in snapshot.streams if path in record.schema.fields]
        layouts = {record.layouts[f"steps/{path}"] for record in holding}
        facts = {"field": path, "dtype": spec.dtype, "shape": list(spec.shape), "final": spec.final}
        facts["chunk_rows"] = sorted({layout.chunk_rows for layout in layouts})
        facts["object_rows"] = sorted({layout.object_rows for layout in layouts})
        facts["codec"] = sorted({_codec_name(layout.codec) for layout in layouts})
        if with_sizes:
            keys = [f"{record.folder}/steps/{path}" for record in holding]
            facts["stored_bytes"] = sum(sum(snapshot.storage.tree_sizes(key).values()) for key in keys)
            facts["decoded_bytes"] = spec.row_bytes * sum(r.rows - live[r.id] for r in holding)
        fields.append(facts)
    return {
        "fields": fields,
        "episode": dict(schema.episode),
        "reward": schema.reward,
        "reward_alignment": schema.reward_alignment,
    }


def _codec_name(codec: Codec) -> str:
    return (
        "none" if codec.name == "none" else f"{codec.name}{'-' if codec.cname else ''}{codec.cname}:{codec.level}"
    )


def _stream_facts(record: CommitRecord, first_row: int, snapshot: Snapshot) -> Facts:
    return {
        "id": record.id,
        "rows": record.rows,
        "first_row": first_row,
        "abandoned_rows": record.rows - snapshot.lineage.n_rows(record),
        "spans": record.spans,
        "commits": record.commit,
        "state": "packed" if record.location else "sealed" if record.is_sealed else "open",
        "created_at": record.created_at,
        "committed_at": record.committed_at,
        "rank": record.rank,
        "world_size": record.world_size,
        "world": record.world,
        "checkpoint": record.checkpoint,
        "replaces": record.replaces.to_json() if record.replaces else None,
        "packed_in": record.location,
    }


def _episode_facts(snapshot: Snapshot) -> Facts:
    table = snapshot.episodes
    lengths, returns = table["length"], table["return"].astype(np.float64)
    returns = returns[~np.isnan(returns)]
    facts: Facts = {"n_episodes": len(table), "n_steps": int(lengths.sum())}
    facts["n_evicted"], facts["n_abandoned"] = _n_unshown(snapshot)
    codes, labels = table.codes("end")
    counts = np.bincount(codes, minlength=len(labels))
    facts["ends"] = {str(labels[i]): int(counts[i]) for i in np.argsort(labels) if counts[i]}
    facts["length"] = _summarize(lengths, ("min", "median", "max"))
    facts["return"] = _summarize(returns, ("mean", "min", "max"))
    return facts


def _n_unshown(snapshot: Snapshot) -> tuple[int, int]:
    """How many episodes are evicted, and how many abandoned."""
    if not snapshot.lineage.limits and not any(Marks.wanted(snapshot.streams).values()):
        return 0, 0  # without a second table, which takes half a second for a million episodes
    history = snapshot.history(abandoned=True)
    return int((history["is_evicted"] & ~history["is_abandoned"]).sum()), int(history["is_abandoned"].sum())


def _summarize(values: Array, names: Sequence[str]) -> dict[str, float] | None:
    return {name: float(getattr(np, name)(values)) for name in names} if len(values) else None


def print_info(console: "Console", facts: Facts) -> None:
    """Print the facts of a store as tables."""
    console.print(
        f"{printable(facts['url'])}\nformat {facts['format']}, created {format_time(facts['created_at'])} UTC\n"
    )
    if (transport := facts["transport"]) is not None:
        reason = f", because {printable(transport['reason'])}" if transport["reason"] else ""
        console.print(f"Requests are made by {printable(transport['name'])}{reason}\n")
    _print_schema(console, facts["schema"])
    _print_streams(console, facts["streams"])
    if n := len(facts["replaced_streams"]):
        console.print(f"{format_count(n, 'original')} of packed streams not removed yet; see pack --wait\n")
    _print_episodes(console, facts["episodes"])
    print_checkpoints(console, facts["checkpoints"])
    if facts["columns"]:
        _print_columns(console, facts["columns"])
    if "traffic" in facts:
        _print_traffic(console, facts["traffic"])


def _print_traffic(console: "Console", traffic: Facts) -> None:
    """Print the requests that this command made to a remote store."""
    requests = ", ".join(f"{n:,} {kind}" for kind, n in traffic["requests"].items() if n)
    console.print(f"Requests of this command: {requests}; {format_bytes(traffic['bytes_read'])} read")


def _print_columns(console: "Console", columns: Sequence[Facts]) -> None:
    """Print the derived columns by name; the streams of one column are counted."""
    table = make_table("Derived columns", "column", "dtype", ">streams", ">rows", ">changes")
    newest = {(c["name"], c["target"]): c for c in columns}.values()  # of several sessions, the newest counts
    for name, dtype in sorted({(c["name"], format_dtype(c)) for c in newest}):
        same = [c for c in newest if (c["name"], format_dtype(c)) == (name, dtype)]
        rows, changes = sum(c["stop"] - c["first"] for c in same), sum(c["deltas"] for c in same)
        table.add_row(name, dtype, f"{len(same):,}", f"{rows:,}", f"{changes:,}")
    console.print(table)


def _print_schema(console: "Console", schema: Facts | None) -> None:
    if schema is None:
        console.print("No schema yet: no fields are declared, and nothing is committed.\n")
        return
    with_sizes = "stored_bytes" in schema["fields"][0]
    sizes = (">stored", ">decoded", ">ratio") if with_sizes else ()
    has_room = not with_sizes or console.width >= _WIDE - 20
    layout = ("final", ">chunk rows", "codec") if has_room else ()
    table = make_table("Schema", "field", "dtype", *layout, *sizes)
    for field in schema["fields"]:
        cells = [field["field"], format_dtype(field)]
        if has_room:
            cells += ["yes" if field["final"] else "", ", ".join(map(str, field["chunk_rows"]))]
            cells.append(", ".join(field["codec"]))
        if with_sizes:
            stored, decoded = field["stored_bytes"], field["decoded_bytes"]
            cells += [format_bytes(stored), format_bytes(decoded), f"{decoded / stored:.1f}x" if stored else ""]
        table.add_row(*cells)
    console.print(table)
    columns = ", ".join(f"{name} ({kind})" for name, kind in schema["episode"].items())
    if columns:
        console.print(f"Episode columns: {columns}")
    if schema["reward"]:
        console.print(f"Reward: {schema['reward']}, with the {schema['reward_alignment']}")
    console.print()


def _print_streams(console: "Console", streams: Sequence[Facts]) -> None:
    if not streams:
        console.print("No streams yet.\n")
        return
    # Show these columns only if a stream uses them, so that lines fit a terminal.
    optional = {
        ">first row": lambda s: f"{s['first_row']:,}" if s["first_row"] else "",
        ">abandoned": lambda s: f"{s['abandoned_rows']:,}" if s["abandoned_rows"] else "",
        ">rank": _format_rank,
    }
    extra = {heading: cell for heading, cell in optional.items() if any(cell(s) for s in streams)}
    is_wide = console.width >= _WIDE
    mark = "=" if is_wide and max(len(s["id"]) for s in streams) <= _LONG_ID else ""
    times = ("=created (UTC)", ">last commit") if is_wide else (">idle",)
    columns = (f"{mark}stream", ">rows", ">spans", ">commits", "=state", *times)
    table = make_table(f"Streams: {len(streams):,}", *columns, *extra)
    for s in streams[-MAX_LISTED:]:
        age = format_age(time.time() - s["committed_at"])
        times = (format_time(s["created_at"]), f"{age} ago") if is_wide else (age,)
        counts = (f"{s[name]:,}" for name in ("rows", "spans", "commits"))
        table.add_row(s["id"], *counts, s["state"], *times, *(cell(s) for cell in extra.values()))
    console.print(table)
    if len(streams) > MAX_LISTED:
        console.print(f"and {len(streams) - MAX_LISTED:,} older ones; --json lists all\n")
    _print_lineage(console, streams)


def _print_lineage(console: "Console", streams: Sequence[Facts]) -> None:
    """Print which sets of sessions ("worlds") wrote the streams, and which checkpoints they started from."""
    sets = Counter((s["world"], s["checkpoint"]) for s in streams)
    if set(sets) == {(None, None)}:
        return
    table = make_table("Worlds", "world", "from checkpoint", ">streams")
    for (world, checkpoint), n in sets.items():
        table.add_row(printable(world or ""), printable(checkpoint or ""), f"{n:,}")
    console.print(table)


def _format_rank(stream: Facts) -> str:
    if stream["rank"] is None:
        return ""
    return f"{stream['rank']}/{stream['world_size']}" if stream["world_size"] else str(stream["rank"])


def _print_episodes(console: "Console", episodes: Facts) -> None:
    console.print("Episodes", style="bold")
    ends = ", ".join(f"{n:,} {end}" for end, n in episodes["ends"].items())
    console.print(
        f"  {format_count(episodes['n_episodes'], 'episode')}{': ' if ends else ''}{ends}; "
        + format_count(episodes["n_steps"], "step")
    )
    others = [f"{episodes[f'n_{kind}']:,} {kind}" for kind in ("evicted", "abandoned") if episodes[f"n_{kind}"]]
    if others:
        console.print(f"  not counted: {', '.join(others)}")
    for name in ("length", "return"):
        if episodes[name]:
            console.print(f"  {name}: " + ", ".join(f"{kind} {value:,g}" for kind, value in episodes[name].items()))
    console.print()
