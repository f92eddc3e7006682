"""Named cuts across streams, with the state of the session that took them.

A checkpoint holds no step data. It is put in two steps: first its record, marked incomplete, which pins the rows
that it lists against eviction and which readers ignore; then its arrays; then the record again, complete.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import numpy as np

from trajstore.errors import (
    AmbiguousCheckpointError,
    CheckpointNotFoundError,
    ConflictError,
    CorruptionError,
    DataError,
    FormatError,
    SchemaError,
    StorageError,
)
from trajstore.format.argument_checks import check_count
from trajstore.format.array_layout import ArrayLayout
from trajstore.format.checkpoint_record import Checkpoint, StreamExtent, checkpoint_to_bytes, parse_checkpoint
from trajstore.format.ids import is_stream_id, new_id
from trajstore.format.zarr_json import GROUP, to_json_bytes
from trajstore.schema import check_name
from trajstore.storage import ABSENT, Put, Storage
from trajstore.store import state_codec as states
from trajstore.store.state_codec import StoredArray

__all__ = [
    "LATEST",
    "PENDING_S",
    "Checkpoint",
    "StreamExtent",
    "find",
    "lineage",
    "list_checkpoints",
    "new_checkpoint",
    "new_checkpoint_id",
    "parts_of",
    "pins",
    "place_of",
    "publish",
    "read_state",
    "remove",
    "remove_incomplete",
    "save",
    "save_part",
    "stored_objects",
    "withdraw",
]

PENDING_S = 3600.0  # so long an incomplete checkpoint is taken for one that is being put
LATEST = "latest"
_MAX_TREE_BYTES = 1 << 20  # of a state's JSON in the record; a longer one is an array
_TREE = "tree"


def new_checkpoint_id(name: str) -> str:
    """A new id for a checkpoint of this name."""
    if check_name(name, "checkpoint name") == LATEST:
        raise SchemaError(f"checkpoint name '{LATEST}' stands for the newest one; choose another")
    return new_id(name)


def new_checkpoint(
    checkpoint_id: str,
    name: str,
    *,
    parent: str | None = None,
    world: str | None = None,
    streams: Mapping[str, StreamExtent],
    n_ranks: int | None = None,
) -> Checkpoint:
    """A checkpoint to `save`, of this moment."""
    return Checkpoint(checkpoint_id, name, time.time(), parent, world, streams, n_ranks=n_ranks)


# ---- saving ------------------------------------------------------------------------------------------------


def save(
    storage: Storage, checkpoint: Checkpoint, state: Any, *, check: Callable[[], None] | None = None
) -> Checkpoint:
    """Put a checkpoint, all or nothing; returns it as readers see it. Whatever fails, it may be saved again.

    Args:
        storage: Where the store is.
        checkpoint: What to put; `new_checkpoint_id` makes its id.
        state: A tree of mappings with text as keys, lists, tuples, numbers, text, bools, None, arrays and tensors.
            Its arrays are read while they are put, so nobody may change them meanwhile.
        check: Called when the rows are pinned: raises if a mark has passed them already.

    Raises:
        DataError: The state or the checkpoint can't be stored.
        ConflictError: There is another checkpoint of this id, or somebody removed this one meanwhile.
    """
    checkpoint = replace(checkpoint, ancestors=_ancestors(storage, checkpoint))
    return _Saving.of(storage, checkpoint, state, place_of(checkpoint.id)).save(check)


def save_part(
    storage: Storage, whole: Checkpoint, rank: int, state: Any, *, check: Callable[[], None] | None = None
) -> None:
    """Put one rank's part of a checkpoint: durable when this returns, and part of nothing until `publish`.

    Args:
        storage: Where the store is.
        whole: The checkpoint with what this rank wants of each stream, and how many ranks take it.
        rank: Whose part this is.
        state: As for `save`.
        check: The same.

    Raises:
        DataError: The state can't be stored.
        ConflictError: There is a complete checkpoint of this id.
    """
    saving = _Saving.of(storage, replace(whole, n_ranks=None), state, place_of(whole.id, rank))
    pin = checkpoint_to_bytes(
        replace(whole, streams={}, is_complete=False, pinned_at=time.time()), {"arrays": 0}, None
    )
    groups = {_key(whole.id): pin, f"{place_of(whole.id)}/ranks/zarr.json": to_json_bytes(GROUP)}
    storage.map(lambda key: storage.put_once(key, groups[key]), list(groups))
    saving.save(check)


def publish(storage: Storage, whole: Checkpoint) -> Checkpoint:
    """Make a checkpoint out of the parts of all ranks, which are durable: one put; returns it as readers see it.

    Args:
        storage: Where the store is.
        whole: With what any rank wants of each stream.

    Raises:
        ConflictError: Somebody has removed it meanwhile, or there is another of this id.
    """
    reads: list[Callable[[], Any]] = [lambda: _ancestors(storage, whole), lambda: _read(storage, whole.id)]
    ancestors, found = storage.map(lambda read: read(), reads)
    whole = replace(whole, is_complete=True, pinned_at=None, ancestors=ancestors)
    if found is None or found.is_complete or found.world != whole.world:
        raise ConflictError(
            f"{storage.display}: checkpoint '{whole.id}' was removed, or saved by others; save it again"
        )
    try:
        data = checkpoint_to_bytes(whole, {"arrays": 0}, None)
        whole, _, _ = parse_checkpoint(data, whole.id, storage.display)
    except (TypeError, ValueError) as error:
        raise DataError(f"the checkpoint can't be stored: {error}") from error
    storage.put(_key(whole.id), data)
    return whole


@dataclass(frozen=True, slots=True)
class _Saving:
    """One checkpoint, or a rank's part of one, on its way."""

    storage: Storage
    checkpoint: Checkpoint
    place: str
    arrays: Mapping[str, StoredArray]
    pin: bytes
    whole: bytes

    @staticmethod
    def of(storage: Storage, checkpoint: Checkpoint, state: Any, place: str) -> _Saving:
        """Look at all of it before anything is put."""
        tree, arrays = states.encode(state)
        text = states.dump(tree)
        named = {str(i): array for i, array in enumerate(arrays)}
        about: dict[str, Any] = {"arrays": len(arrays)}
        if len(text) <= _MAX_TREE_BYTES:
            about["tree"] = tree
        else:
            named[_TREE] = StoredArray.of(np.frombuffer(text, np.uint8), "uint8")
        checkpoint = replace(checkpoint, is_complete=True, pinned_at=None)
        pin = replace(checkpoint, is_complete=False, pinned_at=time.time())
        try:
            whole = checkpoint_to_bytes(checkpoint, about, _nodes(named))
            checkpoint, _, nodes = parse_checkpoint(whole, checkpoint.id, storage.display)
        except (TypeError, ValueError) as error:
            raise DataError(f"the checkpoint can't be stored: {error}") from error
        # Nodes that a walker finds must be in the consolidated metadata, so they are there from the beginning.
        return _Saving(storage, checkpoint, place, named, checkpoint_to_bytes(pin, {"arrays": 0}, nodes), whole)

    def save(self, check: Callable[[], None] | None) -> Checkpoint:
        try:
            self.put(check)
        except BaseException:
            with contextlib.suppress(StorageError):  # it is incomplete, so nobody sees what is left
                self.withdraw()
            raise
        return self.checkpoint

    @property
    def key(self) -> str:
        return f"{self.place}/zarr.json"

    def put(self, check: Callable[[], None] | None) -> None:
        started = time.monotonic()
        version = self._put_pin()
        if version is None:
            return
        if check is not None:
            check()
        self._put_arrays()
        if check is not None and time.monotonic() - started > PENDING_S / 2:
            check()  # the pin is about to expire, so marks may pass it
        # Where puts don't compare versions, look: a record without its arrays would be damage.
        with contextlib.suppress(FileNotFoundError):
            if self.storage.get(self.key) == self.pin:
                self.storage.put(self.key, self.whole, version)
                return
        raise ConflictError(f"{self._name()} was removed while it was being saved; save it again")

    def withdraw(self) -> None:
        """Remove what this has put; a complete checkpoint that was there before stays."""
        try:
            found = self.storage.get(self.key)
        except FileNotFoundError:
            found = self.pin
        if found in (self.pin, self.whole) or not self._is_complete(found):
            _remove(self.storage, self.checkpoint.id, self.place)

    def _put_pin(self) -> str | None:
        """From here on the rows are kept. None if an earlier try has put all of it, unheard."""
        try:
            return self.storage.put(self.key, self.pin, ABSENT)
        except FileExistsError:
            found = self.storage.get(self.key)
        if found == self.whole:
            return None
        if self._is_complete(found) and self._is_whole():
            raise ConflictError(f"{self._name()} exists already")
        _remove(self.storage, self.checkpoint.id, self.place)  # what a try before has left
        return self.storage.put(self.key, self.pin, ABSENT)

    def _is_whole(self) -> bool:
        """Whether readers see what is there: a part that belongs to nothing yet is its rank's own."""
        found = _read(self.storage, self.checkpoint.id)
        return found is not None and found.is_complete

    def _put_arrays(self) -> None:
        # A group before what is in it, an array before its chunks: none is ever there without its zarr.json.
        if not self.arrays:
            return
        prefix = f"{self.place}/state"
        self.storage.put(f"{prefix}/zarr.json", to_json_bytes(GROUP))
        nodes = {
            f"{prefix}/{name}/zarr.json": to_json_bytes(array.metadata()) for name, array in self.arrays.items()
        }
        self.storage.put_many([Put(key, lambda data=data: data) for key, data in nodes.items()])  # type: ignore[misc]
        self.storage.put_many(
            [put for name, array in self.arrays.items() for put in array.puts(f"{prefix}/{name}")]
        )

    def _is_complete(self, found: bytes) -> bool:
        return parse_checkpoint(found, self.checkpoint.id, self.storage.display)[0].is_complete

    def _name(self) -> str:
        return f"{self.storage.display}: checkpoint '{self.checkpoint.id}'"


def _nodes(arrays: Mapping[str, StoredArray]) -> dict[str, Any]:
    nodes = {f"state/{name}": array.metadata() for name, array in arrays.items()}
    return {"state": GROUP, **nodes} if nodes else {}


def _ancestors(storage: Storage, checkpoint: Checkpoint) -> tuple[str, ...]:
    """Whom the parent descends from: so the lineage is known also when some of it is removed."""
    if checkpoint.parent is None or not is_stream_id(checkpoint.parent):
        return ()
    parent = _read(storage, checkpoint.parent)
    if parent is None:
        return ()
    there = set(storage.list_names("checkpoints"))
    return tuple(id_ for id_ in (*parent.ancestors, parent.parent) if id_ in there and id_ is not None)


def remove(storage: Storage, checkpoint_id: str) -> None:
    """Remove a checkpoint, complete or not: gone at once for readers, then its objects. Again is fine."""
    if not is_stream_id(checkpoint_id):
        raise ValueError(f"{checkpoint_id!r:.80} is not the id of a checkpoint")
    _remove(storage, checkpoint_id, place_of(checkpoint_id))


def withdraw(storage: Storage, checkpoint_id: str) -> None:
    """Remove what there is of a checkpoint that will not be published; one that was stays."""
    found = _read(storage, checkpoint_id)
    if found is None or not found.is_complete:
        remove(storage, checkpoint_id)


def _remove(storage: Storage, checkpoint_id: str, prefix: str) -> None:
    key = f"{prefix}/zarr.json"
    data = _get(storage, key)
    if data is not None:
        # A group without its zarr.json makes Zarr readers warn: it stays, marked, until nothing else is left.
        storage.put(key, _marked(storage, checkpoint_id, data))
        storage.delete([other for other in storage.list_tree(prefix) if other != key])
    storage.remove_tree(prefix)


def _marked(storage: Storage, checkpoint_id: str, data: bytes) -> bytes:
    """The record of a checkpoint that is being removed: incomplete, old, and of no streams."""
    n_ranks: int | None = None
    try:
        known, _, nodes = parse_checkpoint(data, checkpoint_id, storage.display)
        n_ranks = known.n_ranks
    except FormatError:
        nodes = {}  # damaged; to remove it is what one would do
    name = checkpoint_id.rpartition("-")[0]
    marked = Checkpoint(checkpoint_id, name, time.time(), pinned_at=0.0, n_ranks=n_ranks)
    return checkpoint_to_bytes(marked, {"arrays": 0}, nodes if n_ranks is None else None)


def remove_incomplete(storage: Storage, *, pending_s: float = PENDING_S) -> list[str]:
    """Remove what saving left behind that did not come to its end; returns the ids.

    Args:
        storage: Where the store is.
        pending_s: Those begun less than so many seconds ago are left alone: somebody may be saving them.
    """
    found = {c.id: c for c in _read_all(storage)}
    stale = [c.id for c in found.values() if not c.is_complete and not _is_pending(c, pending_s)]
    lost = [name for name in storage.list_names("checkpoints") if is_stream_id(name) and name not in found]
    stale += [name for name in lost if not _has_young_parts(storage, name, pending_s)]
    for id_ in stale:
        remove(storage, id_)
    return stale


def _has_young_parts(storage: Storage, checkpoint_id: str, pending_s: float) -> bool:
    """Whether parts of a checkpoint that has no record were begun not long ago."""
    parts = _parts_there(storage, checkpoint_id)
    return any(time.time() - part.created_at < pending_s for part in parts)


# ---- reading -----------------------------------------------------------------------------------------------


def list_checkpoints(storage: Storage) -> list[Checkpoint]:
    """Every complete checkpoint, parents before children, else by time: one listing, and one wave of reads.

    Raises:
        FormatError: One of them is damaged; the message says which.
    """
    return _by_lineage(storage, [c for c in _read_all(storage) if c.is_complete])


def lineage(storage: Storage, checkpoint_id: str) -> list[Checkpoint]:
    """A checkpoint and all that it descends from, oldest first, as far as they are there."""
    there = list_checkpoints(storage)
    by_id = {c.id: c for c in there}
    if checkpoint_id not in by_id:
        return []
    known = {checkpoint_id, *_lineage(by_id, by_id[checkpoint_id])}
    return [c for c in there if c.id in known]


def find(storage: Storage, which: str) -> Checkpoint:
    """The checkpoint of this id or name, or the ``"latest"``.

    Of several of one name it is the one that descends from all others; the latest is the only one that none
    descends from.

    Raises:
        CheckpointNotFoundError: There is none.
        AmbiguousCheckpointError: There are several, of which none descends from the others.
    """
    if is_stream_id(which):
        found = _read(storage, which)
        if found is not None and found.is_complete:
            return found
    there = list_checkpoints(storage)
    matching = there if which == LATEST else [c for c in there if which in (c.id, c.name)]
    if not matching:
        known = f"there are {_listed(there)}" if there else "there are none"
        raise CheckpointNotFoundError(f"{storage.display}: no checkpoint {which!r:.200}; {known}")
    by_id = {c.id: c for c in there}
    older = {id_ for c in matching for id_ in _lineage(by_id, c)}
    newest = [c for c in matching if c.id not in older]
    if len(newest) > 1:
        raise AmbiguousCheckpointError(
            f"{storage.display}: checkpoint {which!r:.200} could be any of {_listed(newest)}; give the id of one"
        )
    return newest[0]


def pins(storage: Storage, *, pending_s: float = PENDING_S) -> dict[str, int]:
    """By stream, the smallest row that any checkpoint wants; every stream that one lists is named.

    Args:
        storage: Where the store is.
        pending_s: Incomplete checkpoints count if they were begun less than so many seconds ago.
    """
    smallest: dict[str, int] = {}
    for checkpoint in _read_all(storage):
        if checkpoint.is_complete or _is_pending(checkpoint, pending_s):
            for wanting in (checkpoint, *_begun_parts(storage, checkpoint)):
                for stream, cut in wanting.streams.items():
                    smallest[stream] = min(cut.first, smallest.get(stream, cut.first))
    return smallest


def _begun_parts(storage: Storage, checkpoint: Checkpoint) -> list[Checkpoint]:
    """The parts that there are of a checkpoint that ranks are saving: until it is whole, each pins its own rows."""
    return [] if checkpoint.is_complete or checkpoint.n_ranks is None else _parts_there(storage, checkpoint.id)


def _parts_there(storage: Storage, checkpoint_id: str) -> list[Checkpoint]:
    names = [name for name in storage.list_names(f"{place_of(checkpoint_id)}/ranks") if name.isdecimal()]
    found = storage.map(lambda name: _get(storage, f"{place_of(checkpoint_id, int(name))}/zarr.json"), names)
    return [parse_checkpoint(data, checkpoint_id, storage.display)[0] for data in found if data is not None]


def read_state(
    storage: Storage, checkpoint: Checkpoint, rank: int | None = None, keys: Iterable[str] | None = None
) -> Any:
    """The state that was saved with a checkpoint; arrays and tensors as numpy arrays, bfloat16 as float32.

    Args:
        storage: Where the store is.
        checkpoint: Which.
        rank: Whose, where several ranks saved it.
        keys: Read only what the state has under these.

    Raises:
        CheckpointNotFoundError: It was removed meanwhile.
        CorruptionError: Some of it is damaged or missing.
    """
    place = place_of(checkpoint.id, rank if checkpoint.n_ranks is not None else None)
    data, what = _get(storage, f"{place}/zarr.json"), f"{storage.display}/{place}"
    if data is not None and parse_checkpoint(data, checkpoint.id, storage.display)[0].is_complete:
        try:
            return _decoded_state(storage, checkpoint.id, place, data, keys)
        except FormatError as error:
            raise FormatError(f"{what}: {error}") from error
        except CorruptionError:
            if _get(storage, f"{place}/zarr.json") == data:
                raise
    elif data is None and checkpoint.n_ranks is not None and _get(storage, _key(checkpoint.id)) is not None:
        raise CorruptionError(f"{what} is missing")
    raise CheckpointNotFoundError(f"{what} was removed")


def parts_of(checkpoint: Checkpoint) -> list[int | None]:
    """The ranks that have a part of a checkpoint; [None] where there was a single session."""
    return [None] if checkpoint.n_ranks is None else list(range(checkpoint.n_ranks))


def stored_objects(storage: Storage, checkpoint: Checkpoint) -> tuple[bytes, Iterator[str]]:
    """The record of a checkpoint, and the keys of all other objects that it consists of.

    Raises:
        CheckpointNotFoundError: It was removed meanwhile.
    """
    data = _get(storage, _key(checkpoint.id))
    if data is not None and parse_checkpoint(data, checkpoint.id, storage.display)[0].is_complete:
        return data, itertools.chain.from_iterable(
            _part_objects(storage, checkpoint, rank) for rank in parts_of(checkpoint)
        )
    raise CheckpointNotFoundError(f"{storage.display}/{place_of(checkpoint.id)} was removed")


def _part_objects(storage: Storage, checkpoint: Checkpoint, rank: int | None) -> Iterator[str]:
    place = place_of(checkpoint.id, rank)
    data = storage.get(f"{place}/zarr.json")
    if rank is not None:
        yield f"{place_of(checkpoint.id)}/ranks/zarr.json"
        yield f"{place}/zarr.json"
    nodes = parse_checkpoint(data, checkpoint.id, storage.display)[2]
    yield from (f"{place}/{name}" for path, node in nodes.items() for name in _object_names(path, node))


def _object_names(path: str, node: Any) -> Iterator[str]:
    yield f"{path}/zarr.json"
    if node != GROUP:
        layout, rows = ArrayLayout.from_metadata(node, path)
        yield from (f"{path}/{layout.chunk_key(i)}" for i in range(-(-rows // layout.chunk_rows)))


def _decoded_state(
    storage: Storage, checkpoint_id: str, place: str, data: bytes, keys: Iterable[str] | None
) -> Any:
    _, about, nodes = parse_checkpoint(data, checkpoint_id, storage.display)
    try:
        n_arrays, tree = check_count(about["arrays"], "arrays"), () if "tree" in about else (_TREE,)
        names = itertools.chain(map(str, range(n_arrays)), tree)  # of which the first that is not there is the end
        layouts = {name: ArrayLayout.from_metadata(nodes[f"state/{name}"], f"state/{name}") for name in names}
    except (TypeError, LookupError, DataError) as error:
        raise FormatError(f"state is malformed: {error!r:.200}") from error
    if _TREE in layouts and layouts[_TREE][1] > states.MAX_TEXT_BYTES:
        raise FormatError(f"{layouts[_TREE][1]} bytes of state text; at most {states.MAX_TEXT_BYTES}")
    encoded = about.get("tree")
    if _TREE in layouts:
        text = states.read_arrays(storage, f"{place}/state", {_TREE: layouts.pop(_TREE)})[0]
        encoded = states.load(text.tobytes())
    if keys is not None:
        encoded, names_used = states.select(encoded, keys)
        layouts = {name: layouts[name] for name in names_used if name in layouts}
    arrays = states.read_arrays(storage, f"{place}/state", layouts)
    return states.decode(encoded, dict(zip(layouts, arrays, strict=True)))


def place_of(checkpoint_id: str, rank: int | None = None) -> str:
    """Where a checkpoint is, or a rank's part of it."""
    return f"checkpoints/{checkpoint_id}" + ("" if rank is None else f"/ranks/{rank}")


def _key(checkpoint_id: str) -> str:
    return f"{place_of(checkpoint_id)}/zarr.json"


def _get(storage: Storage, key: str) -> bytes | None:
    try:
        return storage.get(key)
    except FileNotFoundError:
        return None  # being removed, or a directory that is no checkpoint


def _read(storage: Storage, checkpoint_id: str) -> Checkpoint | None:
    data = _get(storage, _key(checkpoint_id))
    return None if data is None else parse_checkpoint(data, checkpoint_id, storage.display)[0]


def _read_all(storage: Storage) -> list[Checkpoint]:
    names = [name for name in storage.list_names("checkpoints") if is_stream_id(name)]
    found = storage.map(lambda name: _read(storage, name), names)
    return [checkpoint for checkpoint in found if checkpoint is not None]


def _is_pending(checkpoint: Checkpoint, pending_s: float) -> bool:
    return checkpoint.pinned_at is not None and time.time() - checkpoint.pinned_at < pending_s


# ---- lineage -----------------------------------------------------------------------------------------------


def _parents(by_id: Mapping[str, Checkpoint], checkpoint: Checkpoint) -> set[str]:
    return {id_ for id_ in (*checkpoint.ancestors, checkpoint.parent) if id_ is not None and id_ in by_id}


def _lineage(by_id: Mapping[str, Checkpoint], checkpoint: Checkpoint) -> set[str]:
    """Ids of all that a checkpoint descends from."""
    known: set[str] = set()
    ahead = _parents(by_id, checkpoint)
    while ahead:
        known |= ahead
        ahead = {id_ for other in ahead for id_ in _parents(by_id, by_id[other])} - known
    return known


def _by_lineage(storage: Storage, checkpoints: Sequence[Checkpoint]) -> list[Checkpoint]:
    by_id = {c.id: c for c in checkpoints}
    waits_for = {c.id: _parents(by_id, c) for c in checkpoints}
    children: dict[str, list[str]] = {}
    for id_, parents in waits_for.items():
        for parent in parents:
            children.setdefault(parent, []).append(id_)
    ready = [(c.created_at, c.id) for c in checkpoints if not waits_for[c.id]]
    heapq.heapify(ready)
    ordered = []
    while ready:
        _, id_ = heapq.heappop(ready)
        ordered.append(by_id[id_])
        for child in children.get(id_, ()):
            waits_for[child].remove(id_)
            if not waits_for[child]:
                heapq.heappush(ready, (by_id[child].created_at, child))
    if len(ordered) < len(checkpoints):
        circle = sorted(by_id.keys() - {c.id for c in ordered})
        raise FormatError(f"{storage.display}: checkpoints descend from themselves: {', '.join(circle)}")
    return ordered


def _listed(checkpoints: Iterable[Checkpoint]) -> str:
    return ", ".join(f"'{c.name}' of {_shown_time(c.created_at)} (id {c.id})" for c in checkpoints)


def _shown_time(seconds: float) -> str:
    try:
        return datetime.fromtimestamp(seconds, UTC).isoformat(sep=" ", timespec="seconds")
    except (ValueError, OverflowError, OSError):
        return f"{seconds} s"
