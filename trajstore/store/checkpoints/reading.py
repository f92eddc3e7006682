"""Reads the state that was saved with a checkpoint, and names the objects that hold it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

from trajstore.errors import CheckpointNotFoundError, CorruptionError, DataError, FormatError
from trajstore.format.argument_checks import check_count
from trajstore.format.array_layout import ArrayLayout
from trajstore.format.checkpoint_record import Checkpoint, parse_checkpoint
from trajstore.format.zarr_json import GROUP
from trajstore.storage import Storage
from trajstore.store import state_codec
from trajstore.store.checkpoints.objects import parts_of, place_of, read_object, record_key

STATE_TREE = "tree"  # name of the array that holds a long state's JSON


def read_state(
    storage: Storage, checkpoint: Checkpoint, rank: int | None = None, keys: Iterable[str] | None = None
) -> Any:
    """Read the state that was saved with a checkpoint; arrays and tensors as numpy arrays, bfloat16 as float32.

    Args:
        storage: Storage of the store.
        checkpoint: The checkpoint to read.
        rank: The rank whose part to read; ignored if a single session saved the checkpoint.
        keys: Read only these keys of the state; all by default.

    Raises:
        CheckpointNotFoundError: It was removed.
        CorruptionError: Some of it is damaged or missing.
    """
    place = place_of(checkpoint.id, rank if checkpoint.n_ranks is not None else None)
    data, where = read_object(storage, f"{place}/zarr.json"), f"{storage.display}/{place}"
    if data is not None and parse_checkpoint(data, checkpoint.id, storage.display)[0].is_complete:
        try:
            return _decoded_state(storage, checkpoint.id, place, data, keys)
        except FormatError as error:
            raise FormatError(f"{where}: {error}") from error
        except CorruptionError:
            if read_object(storage, f"{place}/zarr.json") == data:  # otherwise it was removed while it was read
                raise
    elif data is None and checkpoint.n_ranks is not None and _has_record(storage, checkpoint.id):
        raise CorruptionError(f"{where} is missing")
    raise CheckpointNotFoundError(f"{where} was removed")


def stored_objects(storage: Storage, checkpoint: Checkpoint) -> tuple[bytes, Iterator[str]]:
    """The bytes of a checkpoint's record, and the keys of all its other objects.

    Raises:
        CheckpointNotFoundError: It was removed.
    """
    data = read_object(storage, record_key(checkpoint.id))
    if data is not None and parse_checkpoint(data, checkpoint.id, storage.display)[0].is_complete:
        return data, itertools.chain.from_iterable(
            _part_keys(storage, checkpoint, rank) for rank in parts_of(checkpoint)
        )
    raise CheckpointNotFoundError(f"{storage.display}/{place_of(checkpoint.id)} was removed")


def _has_record(storage: Storage, checkpoint_id: str) -> bool:
    return read_object(storage, record_key(checkpoint_id)) is not None


def _part_keys(storage: Storage, checkpoint: Checkpoint, rank: int | None) -> Iterator[str]:
    place = place_of(checkpoint.id, rank)
    data = storage.get(f"{place}/zarr.json")
    if rank is not None:
        yield f"{place_of(checkpoint.id)}/ranks/zarr.json"
        yield f"{place}/zarr.json"
    nodes = parse_checkpoint(data, checkpoint.id, storage.display)[2]
    yield from (f"{place}/{name}" for path, node in nodes.items() for name in _node_objects(path, node))


def _node_objects(path: str, node: Any) -> Iterator[str]:
    yield f"{path}/zarr.json"
    if node != GROUP:
        layout, rows = ArrayLayout.from_metadata(node, path)
        yield from (f"{path}/{layout.chunk_key(i)}" for i in range(-(-rows // layout.chunk_rows)))


def _decoded_state(
    storage: Storage, checkpoint_id: str, place: str, data: bytes, keys: Iterable[str] | None
) -> Any:
    _, description, nodes = parse_checkpoint(data, checkpoint_id, storage.display)
    layouts = _state_layouts(description, nodes)
    encoded = description.get("tree")
    if STATE_TREE in layouts:
        text = state_codec.read_arrays(storage, f"{place}/state", {STATE_TREE: layouts.pop(STATE_TREE)})[0]
        encoded = state_codec.load(text.tobytes())
    if keys is not None:
        encoded, used = state_codec.select(encoded, keys)
        layouts = {name: layouts[name] for name in used if name in layouts}
    arrays = state_codec.read_arrays(storage, f"{place}/state", layouts)
    return state_codec.decode(encoded, dict(zip(layouts, arrays, strict=True)))


def _state_layouts(description: dict[str, Any], nodes: dict[str, Any]) -> dict[str, tuple[ArrayLayout, int]]:
    """Layout and length of the arrays of a state, by name."""
    try:
        n_arrays = check_count(description["arrays"], "arrays")
        tree = () if "tree" in description else (STATE_TREE,)
        # The first missing array ends the loop, so a huge count in the record costs nothing.
        names = itertools.chain(map(str, range(n_arrays)), tree)
        layouts = {name: ArrayLayout.from_metadata(nodes[f"state/{name}"], f"state/{name}") for name in names}
    except (TypeError, LookupError, DataError) as error:
        raise FormatError(f"state is malformed: {error!r:.200}") from error
    if STATE_TREE in layouts and layouts[STATE_TREE][1] > state_codec.MAX_TEXT_BYTES:
        raise FormatError(f"{layouts[STATE_TREE][1]} bytes of state text; at most {state_codec.MAX_TEXT_BYTES}")
    return layouts
