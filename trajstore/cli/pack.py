"""The command ``pack``: rewrite finished streams as few large objects."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

from trajstore.cli.exit_codes import FINE, UsageError, explain_interrupt, usage_errors
from trajstore.cli.output import Facts, format_bytes, format_count, make_table, print_facts, printable, progress_bar
from trajstore.cli.parameters import AsJson, Option, StorageOptions, Url, parse_storage_options
from trajstore.cli.stores import check_url
from trajstore.store.packing import pack

if TYPE_CHECKING:
    from rich.console import Console


def pack_store(
    url: Url,
    stream: Annotated[
        list[str] | None, Option("--stream", "Pack only this stream, by its id. May be repeated.", "ID")
    ] = None,
    shard_bytes: Annotated[
        str | None, Option("--shard-bytes", "Size of the objects, about: 128MiB by default.", "SIZE")
    ] = None,
    chunk_bytes: Annotated[
        str | None,
        Option("--chunk-bytes", "Decoded size of the chunks inside them, such as 64KiB. Packs again.", "SIZE"),
    ] = None,
    codec: Annotated[
        list[str] | None,
        Option("--codec", "Codec of a field, such as pixels=zstd:5. Packs again. May be repeated.", "FIELD=CODEC"),
    ] = None,
    dry_run: Annotated[bool, Option("--dry-run", "Only say what would be packed.")] = False,
    wait: Annotated[
        bool, Option("--wait", "Wait for the grace time, and then remove what the packed streams replace.")
    ] = False,
    grace_s: Annotated[
        float, Option("--grace-s", "Seconds that readers have to finish with the originals.", "SECONDS")
    ] = 10.0,
    storage_option: StorageOptions = None,
    as_json: AsJson = False,
) -> int:
    """Rewrite finished streams as few large objects. Others may read and write the store.

    Handles, priorities, derived columns and checkpoints stay valid. The originals are removed by the next running
    buffer, or with --wait. An interrupted command changes nothing that readers see.
    """
    with usage_errors(), explain_interrupt(), progress_bar("bytes") as progress:
        report = pack(
            check_url(url),
            streams=stream or None,
            shard_bytes=shard_bytes,
            chunk_bytes=chunk_bytes,
            codecs=_parse_codecs(codec),
            dry_run=dry_run,
            wait=wait,
            grace_s=grace_s,
            progress=progress,
            storage_options=parse_storage_options(storage_option),
        )
    print_facts(asdict(report), _print_report, as_json)
    return FINE


def _parse_codecs(pairs: Sequence[str] | None) -> dict[str, str]:
    codecs = {}
    for pair in pairs or ():
        path, equals, text = pair.partition("=")
        if not path or not equals:
            raise UsageError(f"--codec: expected FIELD=CODEC, got {pair!r}")
        codecs[path] = text
    return codecs


def _print_report(console: "Console", facts: Facts) -> None:
    packed, is_dry = facts["packed"], facts["is_dry_run"]
    console.print(printable(facts["url"]))
    if packed:
        title = "Streams that would be packed" if is_dry else "Packed streams"
        table = make_table(
            title, "stream", ">objects", ">size", ">packed objects", *(() if is_dry else (">packed size",))
        )
        for one in packed:
            sizes = () if is_dry else (format_bytes(one["n_packed_bytes"]),)
            counts = f"{one['n_objects']:,}", format_bytes(one["n_bytes"]), f"{one['n_packed_objects']:,}"
            table.add_row(one["stream"], *counts, *sizes)
        console.print(table)
    for id_, reason in facts["left"].items():
        console.print(f"left alone: {printable(id_)}: {printable(reason)}", style="dim", soft_wrap=True)
    n = sum(one["n_objects"] for one in packed)
    if is_dry:
        after = sum(one["n_packed_objects"] for one in packed)
        console.print(f"{format_count(len(packed), 'stream')} would be packed: {n:,} objects into {after:,}.")
    elif facts["removed"]:
        console.print(f"Removed: {format_count(len(facts['removed']), 'stream')} that packed ones replace.")
    elif packed:
        console.print(
            f"Packed {format_count(len(packed), 'stream')}. The originals are removed later, or with --wait."
        )
    else:
        console.print("Nothing to pack.")
