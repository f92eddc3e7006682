"""Stores as dumps that ``rb.loads`` of TorchRL's replay buffers reads."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trajstore.datasets.fields import is_skipped, length_of, readable_arrays
from trajstore.datasets.ports import Episode, without_end
from trajstore.datasets.unfinished import Record, Unfinished
from trajstore.errors import DataError
from trajstore.schema import Array, nest
from trajstore.storage.atomic_files import sync_file

_NOTE_BYTES = 32 << 20
_OWN = ("next/done", "next/terminated", "next/truncated", "collector/traj_ids")


def open_sink(
    path: str | os.PathLike[str],
    *,
    capacity: int | None = None,
    batch_size: int | None = None,
    observations: Collection[str] | None = None,
    drop_last: bool = False,
) -> TorchRLSink:
    """Begin a dump, or go on with one that was not finished.

    Args:
        path: The directory that becomes the dump.
        capacity: Of the storage that will load it, in steps; as many as there are by default.
        batch_size: What ``rb.loads`` sets the buffer's batch size to.
        observations: Fields, or groups of them, that have a next value; by default those that have a final value
            in the first episode.
        drop_last: Leave out the last step of episodes that have no final observation, for which there is no next
            one. Otherwise they are refused.
    """
    for name, count in (("capacity", capacity), ("batch_size", batch_size)):
        if count is not None and (type(count) is not int or count < 1):
            raise DataError(f"{name}: expected a positive whole number, got {count!r}")
    about = {
        "format": "torchrl",
        "batch_size": batch_size,
        "observations": None if observations is None else sorted(observations),
        "drop_last": drop_last,
    }
    return TorchRLSink(Unfinished.begin(path, about), {**about, "capacity": capacity})


class TorchRLSink:
    """One memory map a field, appended to; its first note says which there are."""

    def __init__(self, unfinished: Unfinished, options: Mapping[str, Any]) -> None:
        self._unfinished = unfinished
        self._options = options
        self._waiting: list[Record] = []  # written, perhaps not on disk
        self._waiting_bytes = 0
        self._n_episodes = len(self._episodes)
        self._n_rows = sum(record["n_rows"] for record in self._episodes)
        self._cut_back()

    @property
    def display(self) -> str:
        return str(self._unfinished.target)

    def done(self) -> Sequence[str]:
        return [record["key"] for record in self._episodes]

    def kept(self, episode: Episode) -> Episode:
        """All of it, or all but its last step, of which nobody knows the next observation."""
        flat = readable_arrays(episode.steps)
        n_steps, observed = length_of(flat), [path for path in flat if self._has_next(path, flat)]
        without = [path for path in observed if len(flat[path]) == n_steps]
        if not without:
            return episode
        if not self._options["drop_last"]:
            raise DataError(
                f"field '{without[0]}' has no final value, so that the last step has no next one;"
                " drop_last=True leaves such steps out"
            )
        if len(observed) == len(flat):
            raise DataError("every field has a next value, so that nobody could tell steps from them; use fields=")
        return without_end(episode, {path: rows[: n_steps - (path not in observed)] for path, rows in flat.items()})

    def write(self, episode: Episode) -> None:
        entries = self._transitions(self.kept(episode))
        n_rows = len(entries["next/done"])
        self._check_layout(entries)
        self._check_capacity(self._n_rows + n_rows)
        for path, rows in entries.items():
            file = self._file(path)
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("ab") as out:
                out.write(np.ascontiguousarray(rows).data)
        self._n_rows, self._n_episodes = self._n_rows + n_rows, self._n_episodes + 1
        self._waiting.append({"key": episode.key, "n_rows": n_rows})
        self._waiting_bytes += sum(rows.nbytes for rows in entries.values())
        if self._waiting_bytes >= _NOTE_BYTES:
            self._note()

    def finish(self) -> None:
        if not self._n_rows:
            raise DataError(f"{self.display}: there are no steps to write")
        self._note()
        self._check_capacity(self._n_rows)
        capacity = self._options["capacity"] or self._n_rows
        for path, (_, _, row_bytes) in self._layout.items():
            os.truncate(self._file(path), capacity * row_bytes)
        self._describe(capacity)
        self._unfinished.publish()

    def abandon(self) -> None:
        self._note()
        self._unfinished.abandon()

    def _check_capacity(self, n_rows: int) -> None:
        capacity = self._options["capacity"]
        if capacity is not None and capacity < n_rows:
            raise DataError(f"capacity: expected at least the {n_rows} steps so far, got {capacity}")

    # ---- what is written

    def _transitions(self, episode: Episode) -> dict[str, Array]:
        """What TorchRL keeps of every step: where it begins, what was done, and what came of it."""
        flat = readable_arrays(episode.steps)
        if taken := [path for path in flat if path in _OWN]:
            raise DataError(f"field '{taken[0]}' has the name of what TorchRL keeps there itself")
        n_steps = length_of(flat)
        # A dump may have rewards at the root as well: those of the step before.
        moved = {"reward": "next/reward"} if "next/reward" not in flat else {}
        entries: dict[str, Array] = {}
        for path, rows in flat.items():
            _put(entries, moved.get(path, path), _column(rows[:n_steps]) if path in moved else rows[:n_steps])
            if self._has_next(path, flat):
                _put(entries, f"next/{path}", rows[1 : n_steps + 1])
        ends = {"terminated": episode.terminated, "truncated": _is_truncated(episode)}
        for name, is_set in {"done": any(ends.values()), **ends}.items():
            flags = np.zeros((n_steps, 1), bool)
            flags[-1:] = is_set  # of one step nothing may be left
            entries[f"next/{name}"] = flags
        entries["collector/traj_ids"] = np.full(n_steps, self._n_episodes, np.int64)
        return entries

    def _has_next(self, path: str, flat: Mapping[str, Array]) -> bool:
        named = self._options["observations"]
        if named is not None:
            return is_skipped(path, named)
        if self._layout:
            return f"next/{path}" in self._layout and path in self._layout and f"next/{path}" not in flat
        return len(flat[path]) > length_of(flat)

    # ---- files and notes

    @property
    def _layout(self) -> dict[str, tuple[str, list[int], int]]:
        """By path: dtype, shape and bytes of a row."""
        records = self._unfinished.records
        return records[0]["layout"] if records else {}

    @property
    def _episodes(self) -> list[Record]:
        return self._unfinished.records[1:]

    def _check_layout(self, entries: Mapping[str, Array]) -> None:
        layout = {path: [a.dtype.name, list(a.shape[1:]), a[:1].nbytes] for path, a in entries.items()}
        if not self._layout:
            if not len(entries["next/done"]):
                raise DataError("the first episode has no step with a next observation; export others with where=")
            nest(layout)  # refuses a field that has the name of a group
            self._unfinished.note([{"layout": layout}])
        for path in {**self._layout, **layout}:
            first, now = self._layout.get(path, [None] * 3)[:2], layout.get(path, [None] * 3)[:2]
            if first != now:
                raise DataError(f"'{path}': expected {first} as in the first episode, got {now}")

    def _file(self, path: str) -> Path:
        return self._unfinished.place / "storage" / f"{path}.memmap"

    def _note(self) -> None:
        if self._waiting:
            for path in self._layout:
                sync_file(self._file(path))
            self._unfinished.note(self._waiting)
        self._waiting, self._waiting_bytes = [], 0

    def _cut_back(self) -> None:
        """Forget what an earlier run wrote after its last note."""
        for path, (_, _, row_bytes) in self._layout.items():
            if self._file(path).exists():
                os.truncate(self._file(path), self._n_rows * row_bytes)

    def _describe(self, capacity: int) -> None:
        place = self._unfinished.place
        for path, about in _described(nest(self._layout), capacity).items():
            _dump(place / "storage" / path / "meta.json", about)
        _dump(place / "storage/storage_metadata.json", {"metadata": {}, "is_pytree": False, "len": self._n_rows})
        _dump(place / "writer/metadata.json", {"cursor": self._n_rows % capacity, "write_count": self._n_rows})
        _dump(place / "buffer_metadata.json", {"batch_size": self._options["batch_size"]})


def _put(entries: dict[str, Array], path: str, rows: Array) -> None:
    if path in entries:
        raise DataError(f"two fields would both be called '{path}' in a dump; choose others with fields=")
    entries[path] = rows


def _column(rows: Array) -> Array:
    """Rewards are columns there."""
    return rows[:, None] if rows.ndim == 1 else rows


def _is_truncated(episode: Episode) -> bool:
    return episode.truncated or episode.metadata.get("truncated") is True


def _described(entries: Mapping[str, Any], capacity: int, path: str = "") -> dict[str, dict[str, Any]]:
    """What stands in the meta.json of every directory of a storage."""
    own: dict[str, Any] = {}
    below: dict[str, dict[str, Any]] = {}
    for name, entry in entries.items():
        if isinstance(entry, Mapping):
            own[name] = {"type": "TensorDict"}
            below |= _described(entry, capacity, f"{path}{name}/")
        else:
            dtype, shape, _ = entry
            own[name] = {
                "device": "cpu", "shape": [capacity, *shape], "dtype": f"torch.{dtype}", "is_nested": False
            }  # fmt: skip
    kind = "<class 'tensordict._td.TensorDict'>"
    return {path: {**own, "shape": [capacity], "device": "cpu", "_type": kind}, **below}


def _dump(path: Path, about: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(about))
