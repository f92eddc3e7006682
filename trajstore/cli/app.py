"""The command line: look at a store, sample it once, verify it, plan and ask for checkpoints.

Commands are plain functions that return an exit code: 0 fine, 1 the store has problems, 2 the command could not
do its work, 130 somebody interrupted it. `main` dresses them for typer, which like rich is imported only then;
without them it says what to install.
"""

import contextlib
import importlib.util
import inspect
import operator
import statistics
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Union, get_args, get_type_hints

import numpy as np

import trajstore
from trajstore.cli.command import (
    FAILED,
    FINE,
    INTERRUPTED,
    PROBLEMS,
    Argument,
    AsJson,
    Facts,
    Option,
    Pairs,
    Url,
    UsageError,
    counted,
    progress_bar,
    show,
    storage_options,
    usage,
)
from trajstore.cli.dataset_commands import Shell, add_commands
from trajstore.cli.rlinf_commands import RLINF_COMMANDS
from trajstore.errors import CorruptionError, TrajstoreError
from trajstore.format.codec import Codec
from trajstore.format.commit_record import CommitRecord
from trajstore.format.marks import Marks
from trajstore.format.zarr_json import parse_json, trajstore_attributes
from trajstore.schema import Array, flatten
from trajstore.store.checkpoints import Checkpoint, find, list_checkpoints
from trajstore.store.snapshot import Snapshot
from trajstore.store.verify import verify

if TYPE_CHECKING:
    import typer
    from rich.console import Console
    from rich.table import Table

_MAX_LISTED = 40  # streams or checkpoints in a table
_WIDE = 120  # columns of a terminal in which times have room, not only dates
_LONG_ID = 40  # characters; ids up to here stay on one line
_MIN_SECRET = 3  # shorter ones hide nothing, and would take whole messages with them


At = Annotated[str | None, Option("--at", "The store as of this checkpoint: name, id or latest.", "CHECKPOINT")]
# ---- commands ------------------------------------------------------------------------------------------


def info(
    url: Url,
    at: At = None,
    sizes: Annotated[bool, Option("--sizes", "List all objects too, and say what each field takes.")] = False,
    storage_option: Pairs = None,
    as_json: AsJson = False,
) -> int:
    """Show what a store holds: schema, streams, episodes, checkpoints, derived columns.

    Reads records and span tables, no steps.
    """
    show(_store_facts(_open(url, storage_option, at), with_sizes=sizes), _show_info, as_json)
    return FINE


def sample(
    url: Url,
    batch: Annotated[int, Option("--batch", "Windows in a batch.")] = 256,
    window: Annotated[int, Option("--window", "Steps in a window.")] = 32,
    n: Annotated[int, Option("--n", "Batches to draw.")] = 5,
    device: Annotated[str, Option("--device", "Where the batches and the cache live.")] = "cpu",
    cache_bytes: Annotated[str, Option("--cache-bytes", "Memory for decoded chunks.")] = "1GiB",
    seed: Annotated[int, Option("--seed", "Of the draws.")] = 0,
    fields: Annotated[str | None, Option("--fields", "Fields or groups to read: a,b/c; all by default.")] = None,
    boundary: Annotated[
        str, Option("--boundary", "At the ends of episodes: strict, pad_left, pad_right, pad_both, short, cross.")
    ] = "strict",
    n_step: Annotated[int | None, Option("--n-step", "Sum rewards over so many steps, too.")] = None,
    at: At = None,
    storage_option: Pairs = None,
    as_json: AsJson = False,
) -> int:
    """Load a store, draw some batches of windows, and show what is in them and how long it took."""
    names = tuple(fields.split(",")) if fields else None
    with usage():
        windows = trajstore.Windows(window, boundary=boundary, fields=names, n_step=n_step)  # type: ignore[arg-type]
    if n < 1:
        raise UsageError(f"--n: expected at least 1, got {n}")
    start = time.perf_counter()
    snapshot = _open(url, storage_option, at)
    with usage(RuntimeError, AssertionError):  # torch's, where there is no such device
        reader = trajstore.Reader(snapshot, device=device, cache_bytes=cache_bytes, seed=seed)
    facts = _sample_facts(reader, batch, windows, n, start)
    show({"url": snapshot.storage.display} | facts, _show_sample, as_json)
    return FINE


def verify_store(
    url: Url,
    at: At = None,
    fast: Annotated[bool, Option("--fast", "Of steps, text and columns see only that they are there.")] = False,
    storage_option: Pairs = None,
    as_json: AsJson = False,
) -> int:
    """Check everything that a reader relies on, and report all problems.

    Looks at every record, span table and chunk with its checksum, and compares returns with rewards. What is left
    over, such as temporary files, is noted. Ends with 1 if there are problems.
    """
    with usage(), progress_bar("chunks") as progress:
        options = storage_options(storage_option)
        report = verify(_checked(url), fast=fast, at=at, progress=progress, storage_options=options)
    show({"fast": fast, "is_clean": report.is_clean} | asdict(report), _show_report, as_json)
    return FINE if report.is_clean else PROBLEMS


def checkpoints(url: Url, storage_option: Pairs = None, as_json: AsJson = False) -> int:
    """List the checkpoints of a store, oldest first."""
    storage = _open(url, storage_option).storage
    facts = {"url": storage.display, "checkpoints": [_checkpoint_facts(c) for c in list_checkpoints(storage)]}
    show(facts, lambda console, known: _show_checkpoints(console, known["checkpoints"]), as_json)
    return FINE


def redistribute(
    url: Url,
    ranks: Annotated[int, Option("--ranks", "How many ranks are to go on.")] = 1,
    checkpoint: Annotated[
        str, Option("--checkpoint", "Of which checkpoint: name, id or latest.", "CHECKPOINT")
    ] = "latest",
    policy: Annotated[
        str, Option("--policy", "How to deal out episodes: steps, episodes, contiguous, interleaved.")
    ] = "steps",
    incomplete: Annotated[
        str, Option("--incomplete", "What becomes of open, headless and cut episodes: keep, drop, truncate.")
    ] = "keep",
    storage_option: Pairs = None,
    as_json: AsJson = False,
) -> int:
    """Show which episodes of a checkpoint so many ranks would get; changes nothing, reads no steps."""
    with usage():
        plan = trajstore.redistribute(
            _checked(url),
            checkpoint=checkpoint,
            world_size=ranks,
            policy=policy,  # type: ignore[arg-type]
            incomplete=incomplete,
            storage_options=storage_options(storage_option),
        )
    show({"checkpoint": plan.checkpoint} | asdict(plan.report), _show_partitions, as_json)
    return FINE


def request_checkpoint(
    url: Url,
    name: Annotated[str, Option("--name", "What to call it.")] = "requested",
    storage_option: Pairs = None,
    as_json: AsJson = False,
) -> int:
    """Ask the session that writes a store for a checkpoint; it takes it in the background, with all its ranks.

    Leaves a note in the store, and does not wait.
    """
    with usage():
        options = storage_options(storage_option)
        world = trajstore.request_checkpoint(_checked(url), name, storage_options=options)
    show({"name": name, "world": world}, _show_request, as_json)
    return FINE


COMMANDS: dict[str, Callable[..., int]] = {
    "info": info,
    "sample": sample,
    "verify": verify_store,
    "checkpoints": checkpoints,
    "redistribute": redistribute,
    "request-checkpoint": request_checkpoint,
}


# ---- the store -----------------------------------------------------------------------------------------


def _open(url: str, pairs: Sequence[str] | None, at: str | None = None) -> Snapshot:
    with usage():
        store = trajstore.open(_checked(url), storage_options=storage_options(pairs))
        if at is None:
            return store.snapshot
        storage = store.snapshot.storage
        return Snapshot.at(storage, store.schema, find(storage, at))


def _checked(url: str) -> str:
    if url.startswith("memory:"):
        raise UsageError("memory:// is gone with the process that made it; give a directory or an object store")
    return url


def _secrets(pairs: Iterable[str]) -> set[str]:
    """All text given in options, longest parts first to be cut out of messages."""

    def leaves(value: Any) -> Iterator[str]:
        if isinstance(value, str):
            yield value
        for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            yield from leaves(inner)

    found = {pair.partition("=")[2] or pair for pair in pairs}
    with contextlib.suppress(UsageError):
        found.update(leaves(storage_options(list(pairs))))
    return {secret for secret in found if len(secret) >= _MIN_SECRET} - {"true", "false", "null"}


# ---- facts: plain values, as --json prints them --------------------------------------------------------


def _store_facts(snapshot: Snapshot, *, with_sizes: bool) -> Facts:
    storage = snapshot.storage
    root = trajstore_attributes(parse_json(storage.get("zarr.json"), storage.display), "store", storage.display)
    live = Marks.live(snapshot.streams)
    return {
        "url": storage.display,
        "format": root["format"],
        "id": root.get("id"),
        "created_at": root.get("created_at"),
        "schema": _schema_facts(snapshot, live, with_sizes),
        "streams": [_stream_facts(record, live[record.id]) for record in snapshot.streams],
        "episodes": _episode_facts(snapshot),
        "checkpoints": [_checkpoint_facts(c) for c in list_checkpoints(storage)],
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
        layouts = {record.layouts[f"steps/{path}"] for record in snapshot.streams}
        facts = {"field": path, "dtype": spec.dtype, "shape": list(spec.shape), "final": spec.final}
        facts["chunk_rows"] = sorted({layout.chunk_rows for layout in layouts})
        facts["codec"] = sorted({_codec_name(layout.codec) for layout in layouts})
        if with_sizes:
            keys = [f"streams/{record.id}/steps/{path}" for record in snapshot.streams]
            facts["stored_bytes"] = sum(sum(snapshot.storage.tree_sizes(key).values()) for key in keys)
            facts["decoded_bytes"] = spec.row_bytes * sum(r.rows - live[r.id] for r in snapshot.streams)
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


def _stream_facts(record: CommitRecord, first_row: int) -> Facts:
    return {
        "id": record.id,
        "rows": record.rows,
        "first_row": first_row,
        "spans": record.spans,
        "commits": record.commit,
        "state": "sealed" if record.is_sealed else "open",
        "created_at": record.created_at,
        "committed_at": record.committed_at,
        "rank": record.rank,
        "world_size": record.world_size,
        "world": record.world,
        "checkpoint": record.checkpoint,
        "replaces": record.replaces.to_json() if record.replaces else None,
    }


def _episode_facts(snapshot: Snapshot) -> Facts:
    table = snapshot.episodes
    lengths, ends, returns = table["length"], table["end"], table["return"].astype(np.float64)
    returns = returns[~np.isnan(returns)]
    facts: Facts = {"n_episodes": len(table), "n_steps": int(lengths.sum())}
    facts["ends"] = {str(end): int((ends == end).sum()) for end in sorted(set(ends))}
    facts["length"] = _figures(lengths, ("min", "median", "max"))
    facts["return"] = _figures(returns, ("mean", "min", "max"))
    return facts


def _figures(values: Array, names: Sequence[str]) -> dict[str, float] | None:
    return {name: float(getattr(np, name)(values)) for name in names} if len(values) else None


def _checkpoint_facts(checkpoint: Checkpoint) -> Facts:
    cuts = checkpoint.streams.values()
    return {
        "id": checkpoint.id,
        "name": checkpoint.name,
        "created_at": checkpoint.created_at,
        "parent": checkpoint.parent,
        "ranks": checkpoint.n_ranks or 1,
        "streams": len(cuts),
        "rows": sum(cut.stop - cut.first for cut in cuts),
    }


def _sample_facts(reader: Any, batch_size: int, windows: Any, n: int, start: float) -> Facts:
    seconds = [time.perf_counter() - start]
    with usage():
        batch = reader.sample(batch_size, windows)
        _wait(batch)
    seconds.append(time.perf_counter() - start - seconds[0])
    for _ in range(n - 1):
        before = time.perf_counter()
        batch = reader.sample(batch_size, windows)
        _wait(batch)
        seconds.append(time.perf_counter() - before)
    median = statistics.median(seconds[2:] or seconds[1:])
    stats = reader.stats()
    return {
        "n_windows": reader.n_windows(windows),
        "batch": [_tensor_facts(key, value) for key, value in flatten(batch).items()],
        "seconds": {"open": seconds[0], "first_batch": seconds[1], "median_batch": median},
        "steps_per_second": batch_size * windows.size / median,
        "cache": {name: stats[name] for name in ("hits", "misses", "evictions", "bytes_read", "bytes_decoded")},
    }


def _wait(batch: Mapping[str, Any]) -> None:
    """Until a batch is there: on some devices what makes it is only on its way."""
    for value in flatten(batch).values():
        value.reshape(-1)[:1].cpu()


def _tensor_facts(key: str, tensor: Any) -> Facts:
    dtype = str(tensor.dtype).removeprefix("torch.")
    values = (tensor.float() if dtype == "bfloat16" else tensor).cpu().numpy()
    facts: Facts = {"key": key, "shape": list(values.shape), "dtype": dtype}
    if values.size:
        mean = values.mean(dtype=np.float64)
        facts |= {"min": float(values.min()), "max": float(values.max()), "mean": float(mean)}
    return facts


# ---- output --------------------------------------------------------------------------------------------


def _table(title: str, *columns: str) -> "Table":
    """A table; columns marked ``>`` hold numbers, which like those marked ``=`` are never broken."""
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in columns:
        justify: Any = "right" if column[0] == ">" else "left"
        table.add_column(column.lstrip(">="), justify=justify, overflow="fold", no_wrap=column[0] in ">=")
    return table


def _plain(text: object) -> str:
    """Text from a store, without what could steer a terminal."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in str(text))


def _show_info(console: "Console", facts: Facts) -> None:
    console.print(f"{_plain(facts['url'])}\nformat {facts['format']}, created {_time(facts['created_at'])} UTC\n")
    _show_schema(console, facts["schema"])
    _show_streams(console, facts["streams"])
    _show_episodes(console, facts["episodes"])
    _show_checkpoints(console, facts["checkpoints"])
    if facts["columns"]:
        _show_columns(console, facts["columns"])


def _show_columns(console: "Console", columns: Sequence[Facts]) -> None:
    """Derived columns by name; each stream may have one."""
    table = _table("Derived columns", "column", "dtype", ">streams", ">rows", ">changes")
    for name, dtype in sorted({(c["name"], _dtype(c)) for c in columns}):
        same = [c for c in columns if (c["name"], _dtype(c)) == (name, dtype)]
        rows, changes = sum(c["stop"] - c["first"] for c in same), sum(c["deltas"] for c in same)
        table.add_row(name, dtype, f"{len({c['target'] for c in same}):,}", f"{rows:,}", f"{changes:,}")
    console.print(table)


def _show_schema(console: "Console", schema: Facts | None) -> None:
    if schema is None:
        console.print("No schema yet: nothing is declared or committed.\n")
        return
    with_sizes = "stored_bytes" in schema["fields"][0]
    sizes = (">stored", ">decoded", ">ratio") if with_sizes else ()
    table = _table("Schema", "field", "dtype", "final", ">chunk rows", "codec", *sizes)
    for f in schema["fields"]:
        chunks, codecs = ", ".join(map(str, f["chunk_rows"])), ", ".join(f["codec"])
        cells = [f["field"], _dtype(f), "yes" if f["final"] else "", chunks, codecs]
        if with_sizes:
            stored, decoded = f["stored_bytes"], f["decoded_bytes"]
            cells += [_bytes(stored), _bytes(decoded), f"{decoded / stored:.1f}x" if stored else ""]
        table.add_row(*cells)
    console.print(table)
    columns = ", ".join(f"{name} ({kind})" for name, kind in schema["episode"].items())
    if columns:
        console.print(f"Episode columns: {columns}")
    if schema["reward"]:
        console.print(f"Reward: {schema['reward']}, with the {schema['reward_alignment']}")
    console.print()


def _show_streams(console: "Console", streams: Sequence[Facts]) -> None:
    if not streams:
        console.print("No streams yet.\n")
        return
    # Most stores use few of these, and a line should fit a terminal.
    optional = {">first row": lambda s: f"{s['first_row']:,}" if s["first_row"] else "", ">rank": _rank}
    extra = {heading: cell for heading, cell in optional.items() if any(cell(s) for s in streams)}
    mark = "=" if max(len(s["id"]) for s in streams) <= _LONG_ID else ""
    is_wide = console.width >= _WIDE
    created = "=created (UTC)" if is_wide else "=created"
    columns = (
        f"{mark}stream",
        ">rows",
        ">spans",
        ">commits",
        "=state",
        created,
        ">last commit" if is_wide else ">idle",
    )
    table = _table(f"Streams: {len(streams):,}", *columns, *extra)
    for s in streams[-_MAX_LISTED:]:
        when, age = _time(s["created_at"]), _age(time.time() - s["committed_at"])
        times = (when, f"{age} ago") if is_wide else (when[:10], age)
        counts = (f"{s[name]:,}" for name in ("rows", "spans", "commits"))
        table.add_row(s["id"], *counts, s["state"], *times, *(cell(s) for cell in extra.values()))
    console.print(table)
    if len(streams) > _MAX_LISTED:
        console.print(f"and {len(streams) - _MAX_LISTED:,} older ones; --json lists all\n")
    _show_lineage(console, streams)


def _show_lineage(console: "Console", streams: Sequence[Facts]) -> None:
    """Which sets of sessions wrote the streams, and which checkpoints those started from."""
    sets = Counter((s["world"], s["checkpoint"]) for s in streams)
    if set(sets) == {(None, None)}:
        return
    table = _table("Worlds", "world", "from checkpoint", ">streams")
    for (world, checkpoint), n in sets.items():
        table.add_row(_plain(world or ""), _plain(checkpoint or ""), f"{n:,}")
    console.print(table)


def _rank(stream: Facts) -> str:
    if stream["rank"] is None:
        return ""
    return f"{stream['rank']}/{stream['world_size']}" if stream["world_size"] else str(stream["rank"])


def _show_episodes(console: "Console", episodes: Facts) -> None:
    console.print("Episodes", style="bold")
    ends = ", ".join(f"{n:,} {end}" for end, n in episodes["ends"].items())
    console.print(
        f"  {counted(episodes['n_episodes'], 'episode')}{': ' if ends else ''}{ends}; "
        + counted(episodes["n_steps"], "step")
    )
    for name in ("length", "return"):
        if episodes[name]:
            console.print(f"  {name}: " + ", ".join(f"{kind} {value:,g}" for kind, value in episodes[name].items()))
    console.print()


def _show_checkpoints(console: "Console", found: Sequence[Facts]) -> None:
    if not found:
        console.print("No checkpoints.\n")
        return
    table = _table(
        f"Checkpoints: {len(found):,}", "=name", "=created (UTC)", ">ranks", ">streams", ">rows", "id", "parent"
    )
    for c in found[-_MAX_LISTED:]:
        counts = f"{c['ranks']:,}", f"{c['streams']:,}", f"{c['rows']:,}"
        table.add_row(_plain(c["name"]), _time(c["created_at"]), *counts, c["id"], _plain(c["parent"] or ""))
    console.print(table)
    if len(found) > _MAX_LISTED:
        console.print(f"and {len(found) - _MAX_LISTED:,} older ones; --json lists all\n")


def _show_partitions(console: "Console", facts: Facts) -> None:
    title = f"{facts['n_sources']} -> {len(facts['ranks'])} ranks, by {facts['policy']}: {facts['checkpoint']}"
    table = _table(title, ">rank", ">episodes", ">steps", ">open", ">headless", ">cut")
    for rank, counts in enumerate(facts["ranks"]):
        flagged = [f"{counts[cause]['episodes']:,}" for cause in ("open", "headless", "cut")]
        table.add_row(f"{rank:,}", f"{counts['episodes']:,}", f"{counts['steps']:,}", *flagged)
    console.print(table)
    for kind in ("dropped", "truncated"):
        for cause, by_rank in facts[kind].items():
            n, steps = (sum(counts[what] for counts in by_rank) for what in ("episodes", "steps"))
            if n:
                console.print(f"{kind}, {cause}: {counted(n, 'episode')} of {counted(steps, 'step')}")


def _show_request(console: "Console", facts: Facts) -> None:
    console.print(f"Asked '{_plain(facts['world'])}' for a checkpoint '{_plain(facts['name'])}'.")


def _show_sample(console: "Console", facts: Facts) -> None:
    table = _table(
        f"Last batch, of {facts['n_windows']:,} windows", "key", "shape", "dtype", ">min", ">max", ">mean"
    )
    for t in facts["batch"]:
        figures = (f"{t[name]:.6g}" if name in t else "" for name in ("min", "max", "mean"))
        table.add_row(t["key"], "x".join(map(str, t["shape"])), t["dtype"], *figures)
    console.print(table)
    seconds, cache = facts["seconds"], facts["cache"]
    console.print(
        f"Opened in {_seconds(seconds['open'])}, first batch in {_seconds(seconds['first_batch'])}", end=""
    )
    console.print(
        f", then {_seconds(seconds['median_batch'])} each: {facts['steps_per_second']:,.0f} steps a second"
    )
    console.print(_cache_line(cache))
    read, decoded = cache["bytes_read"], cache["bytes_decoded"]
    ratio = f", compressed {decoded / read:.1f}x" if read else ""
    console.print(f"Read {_bytes(read)}, decoded {_bytes(decoded)}{ratio}")


def _cache_line(cache: Facts) -> str:
    """Hits are counted only where something had to go: of a store that fits nothing is looked for twice."""
    if not cache["evictions"]:
        return f"Cache: everything fits; {counted(cache['misses'], 'chunk')} read, none of them twice"
    return f"Cache: {cache['hits']:,} hits, {cache['misses']:,} misses, {cache['evictions']:,} evictions"


def _show_report(console: "Console", facts: Facts) -> None:
    console.print(_plain(facts["url"]))
    for found, style in ((facts["problems"], "red"), (facts["notes"], "dim")):
        for item in found:
            label = "problem" if style == "red" else "note"
            console.print(f"{label}: {_plain(item['where'])}: {_plain(item['what'])}", style=style, soft_wrap=True)
    counts = facts["counts"]
    looked = ", ".join(counted(counts[f"{noun}s"], noun) for noun in ("stream", "episode", "row", "chunk"))
    console.print(f"Checked {looked}; {_bytes(counts['bytes'])} {'there, not read' if facts['fast'] else 'read'}.")
    n = len(facts["problems"])
    verdict = f"{counted(n, 'problem')}." if n else "No problems."
    console.print(verdict, style="bold red" if n else "bold green")


def _dtype(field: Facts) -> str:
    return f"{field['dtype']}{list(field['shape']) if field['shape'] else ''}"


def _time(seconds: float | None) -> str:
    try:
        return datetime.fromtimestamp(float(seconds or 0), UTC).strftime("%Y-%m-%d %H:%M")
    except (OverflowError, ValueError, OSError):
        return "?"


def _age(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0, seconds):.0f} s"


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.3g} ms"


def _bytes(n: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n < 1024:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:.1f} TiB"


# ---- typer ---------------------------------------------------------------------------------------------


def main() -> None:
    """Run the command that the arguments ask for; ends the process with its exit code."""
    missing = [name for name in ("typer", "rich") if importlib.util.find_spec(name) is None]
    if missing:
        _complain(f"the command line needs {' and '.join(missing)}: pip install 'trajstore[cli]'")
        raise SystemExit(FAILED)
    app()()


def app() -> "typer.Typer":
    """All commands, as typer runs them."""
    import typer

    # Pretty tracebacks show local variables, and with them credentials.
    made = typer.Typer(
        name="trajstore",
        help="Look at stores of trajectories, sample them, verify them.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    made.callback()(_root())
    for name, command in COMMANDS.items():
        made.command(name)(_dressed(command, name))
    rlinf = typer.Typer(help="Directories of trajectories as RLinf has them.", no_args_is_help=True)
    for name, command in RLINF_COMMANDS.items():
        rlinf.command(name)(_dressed(command, name))
    made.add_typer(rlinf, name="rlinf")
    add_commands(made, Shell(_exit_code))
    return made


def _root() -> Callable[..., None]:
    """What comes before any command."""
    import typer

    def show_version(is_asked: bool) -> None:
        if is_asked:
            sys.stdout.write(f"trajstore {trajstore.__version__}\n")
            raise typer.Exit(FINE)

    option = typer.Option("--version", help="Show the version and exit.", is_eager=True, callback=show_version)

    def root(version: Annotated[bool, option] = False) -> None:
        del version  # shown already

    return root


def _dressed(command: Callable[..., int], name: str) -> Callable[..., None]:
    """A command with typer's descriptions of its parameters, that turns what it raises into an exit code."""
    import typer

    def run(**arguments: Any) -> None:
        raise typer.Exit(_exit_code(command, arguments))

    hints = get_type_hints(command, include_extras=True)
    parameters = [
        p.replace(annotation=Annotated[_kind(hints[p.name].__origin__), _described(hints[p.name].__metadata__[0])])
        for p in inspect.signature(command).parameters.values()
    ]
    run.__name__, run.__doc__ = name, command.__doc__
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run


def _kind(hint: Any) -> Any:
    """A type as typer takes it: its older versions know optional ones only by their long name."""
    return operator.getitem(Union, get_args(hint)) if isinstance(hint, UnionType) else hint


def _described(what: Argument | Option) -> Any:
    import typer

    if isinstance(what, Argument):
        return typer.Argument(help=what.help, metavar=what.metavar, show_default=False)
    return typer.Option(what.name, help=what.help, metavar=what.metavar)


def _exit_code(command: Callable[..., int], arguments: Mapping[str, Any]) -> int:
    """Run a command; what goes wrong is said in one line on stderr, without what was given as storage options."""
    secrets = _secrets(arguments.get("storage_option") or ())
    try:
        return command(**arguments)
    except (TrajstoreError, UsageError) as error:
        _complain(str(error), secrets)
        return PROBLEMS if isinstance(error, CorruptionError) else FAILED
    except KeyboardInterrupt as interrupt:
        _complain("; ".join(["interrupted", *map(str, interrupt.args)]), secrets)
        return INTERRUPTED
    except Exception:
        _complain(traceback.format_exc(), secrets, is_one_line=False)
        return FAILED


def _complain(message: str, secrets: Iterable[str] = (), *, is_one_line: bool = True) -> None:
    for secret in sorted(secrets, key=len, reverse=True):
        message = message.replace(secret, "***")
    if is_one_line:
        message = "trajstore: " + _plain(" ".join(message.split()))
    sys.stderr.write(message.rstrip() + "\n")


if __name__ == "__main__":
    main()
