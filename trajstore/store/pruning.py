"""Removes what a store no longer needs: old checkpoints, abandoned streams, and what dead processes have left."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trajstore.arguments import check_positive
from trajstore.errors import CheckpointNotFoundError
from trajstore.format.checkpoint_record import Checkpoint
from trajstore.format.commit_record import CommitRecord
from trajstore.format.ids import is_stream_id
from trajstore.format.marks import Marks
from trajstore.format.packed_streams import replaced_copies, shown_records, unfinished_copies
from trajstore.store import checkpoints
from trajstore.store.evicting import publish_and_sweep
from trajstore.store.garbage_collection import is_needed
from trajstore.store.living_sessions import IDLE_S, living_streams
from trajstore.store.packing import remove_replaced
from trajstore.store.store import Store, Url
from trajstore.store.store import open as open_store
from trajstore.writing.stream_appender import remove_stream

_CHUNK = re.compile(r"c\.(0|[1-9][0-9]{0,17})(\.0)*\Z")


@dataclass(frozen=True, slots=True)
class Prunable:
    """Something that is not needed.

    Attributes:
        kind: What it is, such as ``checkpoint`` or ``temporary files``.
        name: Which one: an id, or where it lies.
        n_objects: Number of its objects.
        n_bytes: Their size.
    """

    kind: str
    name: str
    n_objects: int
    n_bytes: int


@dataclass(frozen=True, slots=True)
class PruneReport:
    """What `prune` removed, or would remove.

    Attributes:
        url: The store, without credentials.
        removed: What is not needed any more.
        kept: Why other things that were asked for stay.
        is_dry_run: Whether nothing was changed.
    """

    url: str
    removed: tuple[Prunable, ...]
    kept: tuple[str, ...]
    is_dry_run: bool

    @property
    def n_bytes(self) -> int:
        return sum(one.n_bytes for one in self.removed)


def prune(
    url: Url,
    *,
    keep_last: int | None = None,
    names: Collection[str] = (),
    abandoned: bool = False,
    dry_run: bool = False,
    idle_s: float = IDLE_S,
    grace_s: float = 10.0,
    storage_options: Mapping[str, Any] | None = None,
    fsync: bool = True,
) -> PruneReport:
    """Remove what a store no longer needs.

    Always: originals that packed streams replace, evicted rows that are still stored, remains of checkpoints and
    packed streams that were never completed, streams without steps that say nothing about others, and what writers
    that died have left (temporary files, objects of commits that were never completed). On request: checkpoints,
    and streams that later sessions have abandoned as a whole.

    While a session writes the store, only what such a session would remove itself is removed, and ``kept`` says so.
    An interrupted call leaves a store that is whole; prune again.

    Args:
        url: URL of the store.
        keep_last: Remove all checkpoints but this many, the newest.
        names: Remove the checkpoints of these names or ids.
        abandoned: Remove streams of which the newest session and its ancestors have nothing. Their episodes are
            lost for good, unless a checkpoint lists them.
        dry_run: Only say what would be removed.
        idle_s: A stream that was not closed counts as being written if its last commit is younger.
        grace_s: Seconds that readers have to finish with what is removed.
        storage_options: As in `open`.
        fsync: As in `open`.

    Raises:
        CheckpointNotFoundError: No checkpoint has one of the names.
        ValueError: ``keep_last`` is not positive.
    """
    if keep_last is not None:
        check_positive("keep_last", keep_last)
    store = open_store(url, storage_options=storage_options, fsync=fsync)
    pruning = _Pruning(store, abandoned=abandoned, idle_s=idle_s)
    pruning.choose_checkpoints(keep_last, names)
    report = pruning.report(is_dry_run=dry_run)
    if not dry_run:
        pruning.run(grace_s)
    return report


class _Pruning:
    """What one call removes."""

    def __init__(self, store: Store, *, abandoned: bool, idle_s: float) -> None:
        self._store, self._storage = store, store.snapshot.storage
        self._stored = {record.id: record for record in store.snapshot.stored}
        self._records = shown_records(self._stored.values())
        self._living = living_streams(self._stored.values(), idle_s)
        self._checkpoints: list[Checkpoint] = []
        self._kept: list[str] = []
        self._takes_abandoned = abandoned

    def choose_checkpoints(self, keep_last: int | None, names: Collection[str]) -> None:
        existing = checkpoints.list_checkpoints(self._storage)
        for name in names:
            if not any(name in (c.id, c.name) for c in existing):
                known = ", ".join(c.name for c in existing) or "none"
                raise CheckpointNotFoundError(
                    f"{self._storage.display}: no checkpoint {name!r:.200}; the store has {known}"
                )
        last = existing[-keep_last:] if keep_last is not None else existing
        self._checkpoints = [c for c in existing if c not in last or c.id in names or c.name in names]

    def report(self, *, is_dry_run: bool) -> PruneReport:
        removed = [one for one in self._found() if one.n_objects]
        return PruneReport(self._storage.display, tuple(removed), tuple(self._kept), is_dry_run)

    def run(self, grace_s: float) -> None:
        storage = self._storage
        for checkpoint in self._checkpoints:
            checkpoints.remove(storage, checkpoint.id)
        checkpoints.remove_incomplete(storage)
        remove_replaced(storage, grace_s)
        abandoned = {record.id: record.rows for record in self._abandoned()}
        dead = tuple(r.id for r in self._abandoned() if not r.is_sealed)
        if abandoned or any(one.n_objects for one in self._evicted(())):
            publish_and_sweep(self._store, abandoned, grace_s, dead=dead)
        if not self._living:
            for record in self._empty():
                remove_stream(storage, record.id)
            for _, _, keys in self._leftovers():
                storage.delete(list(keys))

    # ---- what is found

    def _found(self) -> Iterator[Prunable]:
        for checkpoint in self._checkpoints:
            yield self._tree("checkpoint", checkpoint.id, f"checkpoints/{checkpoint.id}")
        unused = replaced_copies(self._stored.values()) | unfinished_copies(self._stored.values())
        for id_ in sorted(unused):
            yield self._tree("replaced stream", id_, f"streams/{id_}")
        gone = {record.id for record in self._abandoned()}
        for id_ in sorted(gone):
            folder = next(record.folder for record in self._records if record.id == id_)
            yield self._tree("abandoned stream", id_, folder)
        yield from self._evicted(gone)
        if self._living:
            self._kept.append(f"empty streams and leftovers: stream '{self._living[0].id}' seems to be written now")
            return
        for record in self._empty():
            yield self._tree("empty stream", record.id, record.folder)
        for kind, name, keys in self._leftovers():
            yield Prunable(kind, name, len(keys), sum(keys.values()))

    def _tree(self, kind: str, name: str, prefix: str) -> Prunable:
        sizes = self._storage.tree_sizes(prefix)
        return Prunable(kind, name, len(sizes), sum(sizes.values()))

    def _pins(self) -> Marks:
        """The rows that checkpoints keep once the chosen ones are gone."""
        chosen = {checkpoint.id for checkpoint in self._checkpoints}
        pinned = Marks()
        for checkpoint in checkpoints.list_checkpoints(self._storage):
            if checkpoint.id not in chosen:
                pinned = pinned.merged(Marks.pinned_by(checkpoint))
        return pinned

    def _abandoned(self) -> list[CommitRecord]:
        """Streams to remove because the newest lineage has nothing of them."""
        if not self._takes_abandoned or self._living:
            return []
        lineage, pins = self._store.snapshot.lineage, self._pins()
        found = [r for r in self._records if r.rows and lineage.is_abandoned(r.id) and r.id not in pins]
        return [record for record in found if record.replaces is None]

    def _evicted(self, gone: Collection[str]) -> Iterator[Prunable]:
        """Objects of rows that are evicted and pinned by no checkpoint."""
        wanted, pins = Marks.wanted(self._records), self._pins()
        for record in self._records:
            limit = min(wanted[record.id], record.rows)
            limit = min(limit, pins.get(record.id, limit))
            if limit and record.id not in gone:
                sizes = self._objects(record, lambda layout, number, limit=limit: (number + 1) * layout <= limit)  # type: ignore[misc]
                steps = {key: n for key, n in sizes.items() if key.startswith(f"{record.folder}/steps/")}
                yield Prunable("evicted rows", record.id, len(steps), sum(steps.values()))

    def _objects(self, record: CommitRecord, chosen: Callable[[int, int], bool]) -> dict[str, int]:
        """Sizes of the chunk objects that are chosen by the rows in an object and its number, by key."""
        found = {}
        for key, size in self._storage.tree_sizes(record.folder).items():
            path, _, name = key.removeprefix(f"{record.folder}/").rpartition("/")
            layout, match = record.layouts.get(path), _CHUNK.match(name)
            if layout is not None and match and chosen(layout.object_rows, int(match[1])):
                found[key] = size
        return found

    def _empty(self) -> list[CommitRecord]:
        """Streams without rows that say nothing about others."""
        kept, empty = list(self._stored.values()), []
        pins = self._pins()
        for record in self._records:
            is_over = record.is_sealed and not record.rows and not record.columns and record.location is None
            if is_over and record.id not in pins and not is_needed(record, kept):
                empty.append(record)
                kept.remove(self._stored[record.id])
        return empty

    def _leftovers(self) -> list[tuple[str, str, dict[str, int]]]:
        """What dead writers left: kind, place, and sizes by key."""
        scratch = self._storage.tree_sizes("scratch")
        scratch.pop("scratch/zarr.json", None)
        found = [("temporary files", "scratch", scratch)] if scratch else []
        found += [
            ("removed stream", name, self._storage.tree_sizes(f"streams/{name}")) for name in self._without_record()
        ]
        dead = {stream for record in self._records for stream in record.view.dead}
        # A writer that only seems to be dead may be about to publish what it has put.
        over = [record for record in self._records if record.is_sealed or record.id in dead]
        found += [("unfinished commit", record.id, self._past_the_end(record)) for record in over]
        return found

    def _past_the_end(self, record: CommitRecord) -> dict[str, int]:
        found = {}
        for key, size in self._objects(record, lambda layout, number: True).items():
            path, _, name = key.removeprefix(f"{record.folder}/").rpartition("/")
            start = int(name.split(".")[1]) * record.layouts[path].object_rows
            if start >= record.length(path):
                found[key] = size
        return found

    def _without_record(self) -> Sequence[str]:
        """Streams whose removal was interrupted: others say that their rows are evicted or packed."""
        names = [name for name in self._storage.list_names("streams") if is_stream_id(name)]
        marked = {stream for record in self._stored.values() for stream in record.view.first_rows}
        packed = {r.replaces.stream for r in self._stored.values() if r.replaces is not None}
        return [name for name in names if name not in self._stored and name in marked | packed]
