"""Read the storage of a TorchRL dump: one memory map per entry, described by JSON."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from trajstore.datasets.episode_arrays import make_field
from trajstore.datasets.json_files import load_json_object
from trajstore.datasets.skip_names import check_skip, is_skipped
from trajstore.errors import DataError, FormatError
from trajstore.schema import Array, check_name

RING_INDEX = "index"  # entry that a buffer may add to every step: its slot in the ring
_MAX_DEPTH = 16
# Other classes store their entries elsewhere, some of them pickled.
_PLAIN_TENSORDICT = re.compile(r"<class '[a-z_.]+\.TensorDict'>\Z")


@dataclass(frozen=True)
class Leaf:
    """One entry of the storage.

    Attributes:
        path: Its path among nested entries, with ``/`` between names.
        file: The memory map.
        dtype: Name of its dtype.
        batch: Number of slots, and number of environments side by side ("lanes").
        shape: Shape of the value of one step.
    """

    path: str
    file: Path
    dtype: str
    batch: tuple[int, int]
    shape: tuple[int, ...]

    def rows(self, slots: Array, lane: int) -> Array:
        """Copy the rows of these slots of one lane; bfloat16 as uint16 bits."""
        return np.asarray(self._map[slots, lane])

    def with_dtype(self, rows: Array) -> Any:
        """Return rows in the entry's dtype; bfloat16 becomes a torch tensor."""
        if self.dtype != "bfloat16":
            return rows
        import torch

        return torch.from_numpy(rows).view(torch.bfloat16)

    def has_same_type(self, other: Leaf) -> bool:
        return (self.dtype, self.shape) == (other.dtype, other.shape)

    def check_scalar(self) -> None:
        if math.prod(self.shape) != 1:
            raise DataError(f"{self.file}: '{self.path}': expected one value per step, got shape {self.shape}")

    def check_file(self) -> None:
        n_bytes = self._storage_dtype.itemsize * math.prod((*self.batch, *self.shape))
        got = self.file.stat().st_size if self.file.is_file() else None
        if got != n_bytes:
            raise FormatError(
                f"{self.file}: expected {n_bytes} bytes according to {self.file.parent.name}/meta.json, got {got}"
            )

    @cached_property
    def _map(self) -> Array:
        return np.memmap(self.file, self._storage_dtype, "r", shape=(*self.batch, *self.shape))

    @property
    def _storage_dtype(self) -> np.dtype[Any]:
        return make_field(self.path, self.dtype, self.shape).storage_dtype


@dataclass(frozen=True, slots=True)
class Ring:
    """The order in which the slots of the storage were written.

    Attributes:
        n_slots: Slots along time.
        n_lanes: Environments side by side.
        n_rows: Filled slots.
        first: The slot of the oldest row.
        is_overwritten: Whether older rows were overwritten.
    """

    n_slots: int
    n_lanes: int
    n_rows: int
    first: int
    is_overwritten: bool

    def slots(self, start: int, stop: int) -> Array:
        """Return the slots of rows that are counted from the oldest."""
        return (self.first + np.arange(start, stop)) % self.n_slots


def load_leaves(storage: Path, skip: Collection[str]) -> dict[str, Leaf]:
    """Return the entries by path, after checking that each file has the size that it must have."""
    root = _load_tensordict(storage, "")
    batch_shape = _batch_shape(storage, root)
    entries = dict(_walk(storage, "", root, batch_shape, skip))
    check_skip(str(storage), [name for name in skip if name != RING_INDEX], entries)
    leaves = {path: leaf for path, leaf in entries.items() if leaf is not None}
    for leaf in leaves.values():
        leaf.check_file()
    return leaves


def _walk(
    place: Path, prefix: str, entries: dict[str, Any], batch: tuple[int, ...], skip: Collection[str]
) -> Iterator[tuple[str, Leaf | None]]:
    """Yield entries by path. The entry is None if it is skipped; skipped entries are not opened."""
    for name, about in entries.items():
        path = f"{prefix}{name}"
        if not isinstance(about, dict):
            continue
        if is_skipped(path, skip):
            yield path, None
            continue
        check_name(name, f"{place}: entry")
        if "type" not in about:
            yield path, _leaf(place / f"{name}.memmap", path, about, batch)
        elif path.count("/") < _MAX_DEPTH:
            yield from _walk(place / name, f"{path}/", _load_tensordict(place / name, path), batch, skip)


def _leaf(file: Path, path: str, about: dict[str, Any], batch: tuple[int, ...]) -> Leaf:
    shape, dtype = about.get("shape"), about.get("dtype")
    if not _is_shape(shape) or not isinstance(dtype, str) or about.get("is_nested"):
        raise FormatError(
            f"{file}: expected dtype and shape of a plain tensor, got {about!r:.200};"
            f" leave it out with skip=['{path}']"
        )
    if tuple(shape[: len(batch)]) != batch:
        raise FormatError(f"{file}: expected a shape that begins with {batch}, got {shape}")
    field = make_field(path, dtype.removeprefix("torch."), tuple(shape[len(batch) :]))
    return Leaf(path, file, field.dtype, (batch[0], math.prod(batch[1:])), field.shape)


def _load_tensordict(place: Path, path: str) -> dict[str, Any]:
    about = load_json_object(place / "meta.json")
    kind = about.get("_type")
    if not isinstance(kind, str) or not _PLAIN_TENSORDICT.match(kind):
        # Other entries may be pickled, and loading a pickle executes code.
        raise FormatError(
            f"{place}: expected a TensorDict of tensors, got {kind!r:.80}; leave it out with skip=['{path}']"
        )
    return about


def _batch_shape(storage: Path, root: dict[str, Any]) -> tuple[int, ...]:
    shape = root.get("shape")
    if not _is_shape(shape) or not shape:
        raise FormatError(f"{storage}: expected a shape [slots] or [slots, environments], got {shape!r:.80}")
    return tuple(shape)


def load_ring(dump: Path, cursor: int | None) -> Ring:
    """Read the order of the slots. ``cursor`` is the next slot to write, for dumps that do not state it."""
    storage = dump / "storage"
    n_slots, *lanes = _batch_shape(storage, _load_tensordict(storage, ""))
    n_lanes = math.prod(lanes)
    n_values = _check_count(load_json_object(storage / "storage_metadata.json"), "len", storage)
    n_rows = -(-n_values // n_lanes)
    writer = load_json_object(dump / "writer" / "metadata.json") if cursor is None else {"cursor": cursor}
    cursor = _check_count(writer, "cursor", dump / "writer")
    n_written = writer.get("write_count")
    is_full = n_rows == n_slots
    if n_rows > n_slots or cursor != (cursor % n_slots if is_full else n_rows):
        raise FormatError(
            f"{storage}: {n_values} values, {n_slots} slots of {n_lanes} and a cursor of {cursor} are inconsistent;"
            " expected a storage along time, of one environment or several side by side"
        )
    is_overwritten = is_full and (not isinstance(n_written, int) or n_written > n_slots)
    return Ring(n_slots, n_lanes, n_rows, cursor if is_full else 0, is_overwritten)


def _check_count(about: dict[str, Any], name: str, place: Path) -> int:
    value = about.get(name)
    if type(value) is not int or value < 0:
        raise FormatError(f"{place}: expected a count '{name}', got {value!r:.80}; a round-robin writer states it")
    return value


def _is_shape(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(n) is int and n > 0 for n in value)
