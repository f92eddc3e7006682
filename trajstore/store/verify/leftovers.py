"""Notes objects that no record names. They do no harm: readers ignore them."""

from __future__ import annotations

import re
from collections.abc import Iterable

from trajstore.format.commit_record import CommitRecord
from trajstore.store.verify.inspection import CheckedArray, CheckedStream, Inspection

_CHUNK = re.compile(r"c\.(0|[1-9]\d{0,17})(\.0)*")


def note_unnamed_nodes(inspection: Inspection, stream: CheckedStream, record: CommitRecord) -> None:
    """Note names below a stream's groups that its newest record does not name."""
    paths = record.nodes().keys()
    for group in ("", *(path for path in paths if path not in record.layouts)):
        prefix = f"{group}/" if group else ""
        known = {path.removeprefix(prefix).split("/")[0] for path in paths if path.startswith(prefix)}
        names = inspection.storage.list_names(f"streams/{record.id}/{group}".rstrip("/"))
        for name in sorted(set(names) - known - {"zarr.json"}):
            inspection.note(stream.name, f"'{prefix}{name}' is not named by the record; readers ignore it")


def note_leftover_chunks(inspection: Inspection, array: CheckedArray, names: Iterable[str]) -> None:
    """Note objects of an array that are not chunks, lie past its end, or hold only evicted rows."""
    layout = array.layout
    n_past = n_below = 0
    for name in set(names) - {"zarr.json"}:
        found = _CHUNK.fullmatch(name)
        index = int(found[1]) * layout.chunks_per_shard if found else 0
        if not found or name != layout.chunk_key(index):
            inspection.note(array.name, f"'{name}' is not a chunk; readers ignore it")
        elif index * layout.chunk_rows >= array.length:
            n_past += 1
        elif (index + layout.chunks_per_shard) * layout.chunk_rows <= array.first_row:
            n_below += 1
    if n_past:
        is_column = "/columns/" in array.prefix
        origin = "older generations" if is_column else "an unfinished commit"
        inspection.note(array.name, f"objects past its {array.length} rows, of {origin}: {n_past}")
    if n_below:
        inspection.note(array.name, f"objects below row {array.first_row}, evicted and not deleted yet: {n_below}")
