"""The storage of a dump of TorchRL: one memory map an entry, described by JSON."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from trajstore.datasets.fields import check_skip, field_of, is_skipped
from trajstore.datasets.json_files import load_object
from trajstore.errors import DataError, FormatError
from trajstore.schema import Array, check_name

OWN_INDEX = "index"  # what a buffer may add to every step: its place in the ring
_MAX_DEPTH = 16
# Others keep their parts elsewhere, some of them pickled.
_PLAIN_TENSORDICT = re.compile(r"<class '[a-z_.]+\.TensorDict'>\Z")


@dataclass(frozen=True)
class Leaf:
    """One entry of the storage.

    Attributes:
        path: Its place among nested entries, with ``/`` between names.
        file: The memory map.
        dtype: Name of its dtype.
        batch: Slots and lanes.
        shape: Of one step's value.
    """

    path: str
    file: Path
    dtype: str
    batch: tuple[int, int]
    shape: tuple[int, ...]

    def rows(self, slots: Array, lane: int) -> Array:
        """Copies of some rows of one lane; bfloat16 as its bits."""
        return np.asarray(self._map[slots, lane])

    def given(self, rows: Array) -> Any:
        """Rows with the dtype that they stand for."""
        if self.dtype != "bfloat16":
            return rows
        import torch

        return torch.from_numpy(rows).view(torch.bfloat16)

    def is_like(self, other: Leaf) -> bool:
        return (self.dtype, self.shape) == (other.dtype, other.shape)

    def check_scalar(self) -> None:
        if math.prod(self.shape) != 1:
            raise DataError(f"{self.file}: '{self.path}': expected one value a step, got shape {self.shape}")

    def check_file(self) -> None:
        n_bytes = self._storage_dtype.itemsize * math.prod((*self.batch, *self.shape))
        got = self.file.stat().st_size if self.file.is_file() else None
        if got != n_bytes:
            raise FormatError(
                f"{self.file}: expected {n_bytes} bytes as {self.file.parent.name}/meta.json says, got {got}"
            )

    @cached_property
    def _map(self) -> Array:
        return np.memmap(self.file, self._storage_dtype, "r", shape=(*self.batch, *self.shape))

    @property
    def _storage_dtype(self) -> np.dtype[Any]:
        return field_of(self.path, self.dtype, self.shape).storage_dtype


@dataclass(frozen=True, slots=True)
class Ring:
    """In which order the slots were written.

    Attributes:
        n_slots: Places along time.
        n_lanes: Environments side by side.
        n_rows: Slots that are filled.
        first: The slot of the oldest row.
        is_overwritten: Whether there were older ones.
    """

    n_slots: int
    n_lanes: int
    n_rows: int
    first: int
    is_overwritten: bool

    def slots(self, start: int, stop: int) -> Array:
        """Slots of rows that are counted from the oldest."""
        return (self.first + np.arange(start, stop)) % self.n_slots


def load_leaves(storage: Path, skip: Collection[str]) -> dict[str, Leaf]:
    """The entries, by path; each with a file of the size that it must have."""
    root = _tensordict(storage, "")
    batch = _batch(storage, root)
    entries = dict(_walk(storage, "", root, batch, skip))
    check_skip(str(storage), [name for name in skip if name != OWN_INDEX], entries)
    leaves = {path: leaf for path, leaf in entries.items() if leaf is not None}
    for leaf in leaves.values():
        leaf.check_file()
    return leaves


def _walk(
    place: Path, prefix: str, entries: dict[str, Any], batch: tuple[int, ...], skip: Collection[str]
) -> Iterator[tuple[str, Leaf | None]]:
    """Entries by path; None for what is left out, at which nobody looks."""
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
            yield from _walk(place / name, f"{path}/", _tensordict(place / name, path), batch, skip)


def _leaf(file: Path, path: str, about: dict[str, Any], batch: tuple[int, ...]) -> Leaf:
    shape, dtype = about.get("shape"), about.get("dtype")
    if not _is_shape(shape) or not isinstance(dtype, str) or about.get("is_nested"):
        raise FormatError(
            f"{file}: expected dtype and shape of a plain tensor, got {about!r:.200}; skip=['{path}']"
        )
    if tuple(shape[: len(batch)]) != batch:
        raise FormatError(f"{file}: expected a shape that begins with {batch}, got {shape}")
    field = field_of(path, dtype.removeprefix("torch."), tuple(shape[len(batch) :]))
    return Leaf(path, file, field.dtype, (batch[0], math.prod(batch[1:])), field.shape)


def _tensordict(place: Path, path: str) -> dict[str, Any]:
    about = load_object(place / "meta.json")
    kind = about.get("_type")
    if not isinstance(kind, str) or not _PLAIN_TENSORDICT.match(kind):
        # What is not a tensor may be pickled, and loading a pickle runs code.
        raise FormatError(
            f"{place}: expected a TensorDict of tensors, got {kind!r:.80}; leave it out with skip=['{path}']"
        )
    return about


def _batch(storage: Path, root: dict[str, Any]) -> tuple[int, ...]:
    shape = root.get("shape")
    if not _is_shape(shape) or not shape:
        raise FormatError(f"{storage}: expected a shape of slots, or slots and environments, got {shape!r:.80}")
    return tuple(shape)


def load_ring(dump: Path, cursor: int | None) -> Ring:
    storage = dump / "storage"
    n_slots, *lanes = _batch(storage, _tensordict(storage, ""))
    n_lanes = math.prod(lanes)
    n_values = _count(load_object(storage / "storage_metadata.json"), "len", storage)
    n_rows = -(-n_values // n_lanes)
    writer = load_object(dump / "writer" / "metadata.json") if cursor is None else {"cursor": cursor}
    cursor = _count(writer, "cursor", dump / "writer")
    n_written = writer.get("write_count")
    is_full = n_rows == n_slots
    if n_rows > n_slots or cursor != (cursor % n_slots if is_full else n_rows):
        raise FormatError(
            f"{storage}: {n_values} values in {n_slots} slots of {n_lanes} and a cursor of {cursor} do not fit;"
            " expected a storage along time, of one environment or several side by side"
        )
    is_overwritten = is_full and (not isinstance(n_written, int) or n_written > n_slots)
    return Ring(n_slots, n_lanes, n_rows, cursor if is_full else 0, is_overwritten)


def _count(about: dict[str, Any], name: str, place: Path) -> int:
    value = about.get(name)
    if type(value) is not int or value < 0:
        raise FormatError(f"{place}: expected a count '{name}', got {value!r:.80}; a writer in rounds states it")
    return value


def _is_shape(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(n) is int and n > 0 for n in value)
