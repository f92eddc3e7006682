"""The command ``sample``: draw batches of a store, and show their contents and the time they took."""

import statistics
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

import trajstore
from trajstore.cli.exit_codes import FINE, UsageError, usage_errors
from trajstore.cli.output import Facts, format_bytes, format_count, format_seconds, make_table, print_facts
from trajstore.cli.parameters import AsJson, At, DiskCacheOption, Option, StorageOptions, Url
from trajstore.cli.stores import open_snapshot
from trajstore.schema import flatten

if TYPE_CHECKING:
    from rich.console import Console


def sample(
    url: Url,
    batch: Annotated[int, Option("--batch", "Windows per batch.")] = 256,
    window: Annotated[int, Option("--window", "Steps per window.")] = 32,
    n: Annotated[int, Option("--n", "Number of batches.")] = 5,
    device: Annotated[str, Option("--device", "Device of the batches and the cache.")] = "cpu",
    cache_bytes: Annotated[str, Option("--cache-bytes", "Memory for decoded chunks.")] = "1GiB",
    seed: Annotated[int, Option("--seed", "Seed of the random draws.")] = 0,
    fields: Annotated[
        str | None, Option("--fields", "Fields or groups to read, such as a,b/c; by default all.")
    ] = None,
    boundary: Annotated[
        str,
        Option(
            "--boundary", "Windows at the ends of episodes: strict, pad_left, pad_right, pad_both, short or cross."
        ),
    ] = "strict",
    n_step: Annotated[int | None, Option("--n-step", "Also sum the rewards over this many steps.")] = None,
    at: At = None,
    disk_cache: DiskCacheOption = None,
    storage_option: StorageOptions = None,
    as_json: AsJson = False,
) -> int:
    """Open a store, draw some batches of windows, and show what they hold and how long they took."""
    names = tuple(fields.split(",")) if fields else None
    with usage_errors():
        windows = trajstore.Windows(window, boundary=boundary, fields=names, n_step=n_step)  # type: ignore[arg-type]
    if n < 1:
        raise UsageError(f"--n: expected at least 1, got {n}")
    start = time.perf_counter()
    snapshot = open_snapshot(url, storage_option, at, disk_cache)
    with usage_errors(RuntimeError, AssertionError):  # torch raises these for devices that do not exist
        reader = trajstore.Reader(snapshot, device=device, cache_bytes=cache_bytes, seed=seed)
    facts = _measure(reader, batch, windows, n, start)
    print_facts({"url": snapshot.storage.display} | facts, _print_sample, as_json)
    return FINE


def _measure(reader: Any, batch_size: int, windows: Any, n: int, start: float) -> Facts:
    seconds = [time.perf_counter() - start]
    with usage_errors():
        batch = reader.sample(batch_size, windows)
        _wait_for(batch)
    seconds.append(time.perf_counter() - start - seconds[0])
    for _ in range(n - 1):
        before = time.perf_counter()
        batch = reader.sample(batch_size, windows)
        _wait_for(batch)
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


def _wait_for(batch: Mapping[str, Any]) -> None:
    """Wait until a batch is computed: some devices work asynchronously."""
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


def _print_sample(console: "Console", facts: Facts) -> None:
    title = f"Last batch, of {facts['n_windows']:,} windows"
    table = make_table(title, "key", "shape", "dtype", ">min", ">max", ">mean")
    for t in facts["batch"]:
        figures = (f"{t[name]:.6g}" if name in t else "" for name in ("min", "max", "mean"))
        table.add_row(t["key"], "x".join(map(str, t["shape"])), t["dtype"], *figures)
    console.print(table)
    opening, first, median = (format_seconds(facts["seconds"][k]) for k in ("open", "first_batch", "median_batch"))
    console.print(
        f"Opened in {opening}, first batch in {first}, then {median} each:"
        f" {facts['steps_per_second']:,.0f} steps per second"
    )
    cache = facts["cache"]
    console.print(_cache_line(cache))
    read, decoded = cache["bytes_read"], cache["bytes_decoded"]
    ratio = f", compressed {decoded / read:.1f}x" if read else ""
    console.print(f"Read {format_bytes(read)}, decoded {format_bytes(decoded)}{ratio}")


def _cache_line(cache: Facts) -> str:
    """Describe the cache. Hits are only counted if something was evicted: a complete cache needs no lookups."""
    if not cache["evictions"]:
        return f"Cache: everything fits; {format_count(cache['misses'], 'chunk')} read, none of them twice"
    return f"Cache: {cache['hits']:,} hits, {cache['misses']:,} misses, {cache['evictions']:,} evictions"
