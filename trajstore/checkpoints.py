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

from trajstore import state as states
from trajstore.checkpoint_record import Checkpoint, parse, to_bytes
from trajstore.chunks import ArrayLayout
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
from trajstore.record import GROUP, check_count, dump_json, is_stream_id, new_id
from trajstore.schema import check_name
from trajstore.snapshot import Cut
from trajstore.state import StateArray
from trajstore.storage import ABSENT, Put, Storage

__all__ = [
    "LATEST",
    "PENDING_S",
    "Checkpoint",
    "Cut",
    "find",
    "list_checkpoints",
    "new_checkpoint",
    "new_checkpoint_id",
    "pins",
    "read_state",
    "remove",
    "remove_incomplete",
    "save",
    "stored_objects",
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
    streams: Mapping[str, Cut],
) -> Checkpoint:
    """A checkpoint to `save`, of this moment."""
    return Checkpoint(checkpoint_id, name, time.time(), parent, world, streams)


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
    saving = _Saving.of(storage, checkpoint, state)
    try:
        saving.put(check)
    except BaseException:
        with contextlib.suppress(StorageError):  # it is incomplete, so nobody sees what is left
            saving.withdraw()
        raise
    return saving.checkpoint


@dataclass(frozen=True, slots=True)
class _Saving:
    """One checkpoint on its way."""

    storage: Storage
    checkpoint: Checkpoint
    arrays: Mapping[str, StateArray]
    pin: bytes
    whole: bytes

    @staticmethod
    def of(storage: Storage, checkpoint: Checkpoint, state: Any) -> _Saving:
        """Look at all of it before anything is put."""
        tree, arrays = states.encode(state)
        text = states.dump(tree)
        named = {str(i): array for i, array in enumerate(arrays)}
        about: dict[str, Any] = {"arrays": len(arrays)}
        if len(text) <= _MAX_TREE_BYTES:
            about["tree"] = tree
        else:
            named[_TREE] = StateArray.of(np.frombuffer(text, np.uint8), "uint8")
        checkpoint = replace(
            checkpoint, is_complete=True, pinned_at=None, ancestors=_ancestors(storage, checkpoint)
        )
        pin = replace(checkpoint, is_complete=False, pinned_at=time.time())
        try:
            whole = to_bytes(checkpoint, about, _nodes(named))
            checkpoint, _, nodes = parse(whole, checkpoint.id, storage.display)
        except (TypeError, ValueError) as error:
            raise DataError(f"the checkpoint can't be stored: {error}") from error
        # Nodes that a walker finds must be in the consolidated metadata, so they are there from the beginning.
        return _Saving(storage, checkpoint, named, to_bytes(pin, {"arrays": 0}, nodes), whole)

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
            if self.storage.get(_key(self.checkpoint.id)) == self.pin:
                self.storage.put(_key(self.checkpoint.id), self.whole, version)
                return
        raise ConflictError(f"{self._name()} was removed while it was being saved; save it again")

    def withdraw(self) -> None:
        """Remove what this has put; a complete checkpoint that was there before stays."""
        try:
            found = self.storage.get(_key(self.checkpoint.id))
        except FileNotFoundError:
            found = self.pin
        if found in (self.pin, self.whole) or not self._is_complete(found):
            remove(self.storage, self.checkpoint.id)

    def _put_pin(self) -> str | None:
        """From here on the rows are kept. None if an earlier try has put all of it, unheard."""
        key = _key(self.checkpoint.id)
        try:
            return self.storage.put(key, self.pin, ABSENT)
        except FileExistsError:
            found = self.storage.get(key)
        if found == self.whole:
            return None
        if self._is_complete(found):
            raise ConflictError(f"{self._name()} exists already")
        remove(self.storage, self.checkpoint.id)  # what a try before has left
        return self.storage.put(key, self.pin, ABSENT)

    def _put_arrays(self) -> None:
        # A group before what is in it, an array before its chunks: none is ever there without its zarr.json.
        if not self.arrays:
            return
        prefix = f"checkpoints/{self.checkpoint.id}/state"
        self.storage.put(f"{prefix}/zarr.json", dump_json(GROUP))
        nodes = {f"{prefix}/{name}/zarr.json": dump_json(array.metadata()) for name, array in self.arrays.items()}
        self.storage.put_many([Put(key, lambda data=data: data) for key, data in nodes.items()])  # type: ignore[misc]
        self.storage.put_many(
            [put for name, array in self.arrays.items() for put in array.puts(f"{prefix}/{name}")]
        )

    def _is_complete(self, found: bytes) -> bool:
        return parse(found, self.checkpoint.id, self.storage.display)[0].is_complete

    def _name(self) -> str:
        return f"{self.storage.display}: checkpoint '{self.checkpoint.id}'"


def _nodes(arrays: Mapping[str, StateArray]) -> dict[str, Any]:
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
    key, prefix = _key(checkpoint_id), f"checkpoints/{checkpoint_id}"
    data = _get(storage, checkpoint_id)
    if data is not None:
        # A group without its zarr.json makes Zarr readers warn: it stays, marked, until nothing else is left.
        storage.put(key, _marked(storage, checkpoint_id, data))
        storage.delete([other for other in storage.list_tree(prefix) if other != key])
    storage.remove_tree(prefix)


def _marked(storage: Storage, checkpoint_id: str, data: bytes) -> bytes:
    """The record of a checkpoint that is being removed: incomplete, old, and of no streams."""
    try:
        nodes = parse(data, checkpoint_id, storage.display)[2]
    except FormatError:
        nodes = {}  # damaged; to remove it is what one would do
    marked = Checkpoint(checkpoint_id, checkpoint_id.rpartition("-")[0], time.time(), pinned_at=0.0)
    return to_bytes(marked, {"arrays": 0}, nodes)


def remove_incomplete(storage: Storage, *, pending_s: float = PENDING_S) -> list[str]:
    """Remove what saving left behind that did not come to its end; returns the ids.

    Args:
        storage: Where the store is.
        pending_s: Those begun less than so many seconds ago are left alone: somebody may be saving them.
    """
    stale = [c.id for c in _read_all(storage) if not c.is_complete and not _is_pending(c, pending_s)]
    for id_ in stale:
        remove(storage, id_)
    return stale


# ---- reading -----------------------------------------------------------------------------------------------


def list_checkpoints(storage: Storage) -> list[Checkpoint]:
    """Every complete checkpoint, parents before children, else by time: one listing, and one wave of reads.

    Raises:
        FormatError: One of them is damaged; the message says which.
    """
    return _by_lineage(storage, [c for c in _read_all(storage) if c.is_complete])


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
            for stream, cut in checkpoint.streams.items():
                smallest[stream] = min(cut.first, smallest.get(stream, cut.first))
    return smallest


def read_state(storage: Storage, checkpoint: Checkpoint) -> Any:
    """The state that was saved with a checkpoint; arrays and tensors as numpy arrays, bfloat16 as float32.

    Raises:
        CheckpointNotFoundError: It was removed meanwhile.
        CorruptionError: Some of it is damaged or missing.
    """
    data = _get(storage, checkpoint.id)
    what = f"{storage.display}/checkpoints/{checkpoint.id}"
    if data is not None and parse(data, checkpoint.id, storage.display)[0].is_complete:
        try:
            return _decoded_state(storage, checkpoint.id, data)
        except FormatError as error:
            raise FormatError(f"{what}: {error}") from error
        except CorruptionError:
            if _get(storage, checkpoint.id) == data:
                raise
    raise CheckpointNotFoundError(f"{what} was removed")


def stored_objects(storage: Storage, checkpoint: Checkpoint) -> tuple[bytes, Iterator[str]]:
    """The record of a checkpoint, and the keys of all other objects that it consists of.

    Raises:
        CheckpointNotFoundError: It was removed meanwhile.
    """
    data, prefix = _get(storage, checkpoint.id), f"checkpoints/{checkpoint.id}"
    if data is not None:
        found, _, nodes = parse(data, checkpoint.id, storage.display)
        if found.is_complete:
            return data, (f"{prefix}/{name}" for path, node in nodes.items() for name in _object_names(path, node))
    raise CheckpointNotFoundError(f"{storage.display}/{prefix} was removed")


def _object_names(path: str, node: Any) -> Iterator[str]:
    yield f"{path}/zarr.json"
    if node != GROUP:
        layout, rows = ArrayLayout.from_metadata(node, path)
        yield from (f"{path}/{layout.chunk_key(i)}" for i in range(-(-rows // layout.chunk_rows)))


def _decoded_state(storage: Storage, checkpoint_id: str, data: bytes) -> Any:
    _, about, nodes = parse(data, checkpoint_id, storage.display)
    try:
        n_arrays, tree = check_count(about["arrays"], "arrays"), () if "tree" in about else (_TREE,)
        names = itertools.chain(map(str, range(n_arrays)), tree)  # of which the first that is not there is the end
        layouts = {name: ArrayLayout.from_metadata(nodes[f"state/{name}"], f"state/{name}") for name in names}
    except (TypeError, LookupError, DataError) as error:
        raise FormatError(f"state is malformed: {error!r:.200}") from error
    if _TREE in layouts and layouts[_TREE][1] > states.MAX_TEXT_BYTES:
        raise FormatError(f"{layouts[_TREE][1]} bytes of state text; at most {states.MAX_TEXT_BYTES}")
    arrays = states.read_arrays(storage, f"checkpoints/{checkpoint_id}/state", layouts)
    encoded = about["tree"] if "tree" in about else states.load(arrays.pop().tobytes())
    return states.decode(encoded, arrays)


def _key(checkpoint_id: str) -> str:
    return f"checkpoints/{checkpoint_id}/zarr.json"


def _get(storage: Storage, checkpoint_id: str) -> bytes | None:
    try:
        return storage.get(_key(checkpoint_id))
    except FileNotFoundError:
        return None  # being removed, or a directory that is no checkpoint


def _read(storage: Storage, checkpoint_id: str) -> Checkpoint | None:
    data = _get(storage, checkpoint_id)
    return None if data is None else parse(data, checkpoint_id, storage.display)[0]


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
