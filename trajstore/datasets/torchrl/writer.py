"""Write dumps that ``rb.loads`` of TorchRL's replay buffers reads."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trajstore.datasets.episode_arrays import count_steps, readable_arrays
from trajstore.datasets.interfaces import Episode, cut_before_end
from trajstore.datasets.partial_output import PartialOutput, Record
from trajstore.datasets.skip_names import is_skipped
from trajstore.errors import DataError
from trajstore.schema import Array, nest
from trajstore.storage.atomic_files import sync_file

_SYNC_BYTES = 32 << 20  # episodes are synced and recorded after this many bytes; a kill loses the others
_RESERVED = ("next/done", "next/terminated", "next/truncated", "collector/traj_ids")


def open_writer(
    path: str | os.PathLike[str],
    *,
    capacity: int | None = None,
    batch_size: int | None = None,
    observations: Collection[str] | None = None,
    drop_last: bool = False,
) -> TorchRLWriter:
    """Start a dump, or continue an unfinished one.

    Args:
        path: The directory of the dump.
        capacity: Capacity, in steps, of the storage that will load the dump. By default the number of steps.
        batch_size: ``rb.loads`` sets the buffer's batch size to this.
        observations: Fields, or groups of fields, that have a next value. By default those that have a final value
            in the first episode.
        drop_last: Leave out the last step of episodes without a final observation, because it has no next
            observation. Otherwise such episodes are refused.

    Raises:
        DataError: ``capacity`` or ``batch_size`` is not a positive integer.
    """
    for name, count in (("capacity", capacity), ("batch_size", batch_size)):
        if count is not None and (type(count) is not int or count < 1):
            raise DataError(f"{name}: expected a positive integer, got {count!r}")
    about = {
        "format": "torchrl",
        "batch_size": batch_size,
        "observations": None if observations is None else sorted(observations),
        "drop_last": drop_last,
    }
    return TorchRLWriter(PartialOutput.begin(path, about), {**about, "capacity": capacity})


class TorchRLWriter:
    """Appends to one memory map per entry. The first journal record lists the entries."""

    def __init__(self, output: PartialOutput, options: Mapping[str, Any]) -> None:
        self._output = output
        self._options = options
        self._pending: list[Record] = []  # records of episodes that are written, but not synced to disk
        self._pending_bytes = 0
        self._n_episodes = len(self._episodes)
        self._n_rows = sum(record["n_rows"] for record in self._episodes)
        self._truncate_files()

    @property
    def display(self) -> str:
        return str(self._output.target)

    def written_keys(self) -> Sequence[str]:
        return [record["key"] for record in self._episodes]

    def trim(self, episode: Episode) -> Episode:
        """Return the episode, or if a field lacks its final value, the episode without its last step."""
        flat = readable_arrays(episode.steps)
        n_steps, observed = count_steps(flat), [path for path in flat if self._has_next(path, flat)]
        without = [path for path in observed if len(flat[path]) == n_steps]
        if not without:
            return episode
        if not self._options["drop_last"]:
            raise DataError(
                f"field '{without[0]}' has no final value, so the last step has no next observation;"
                " drop_last=True leaves such steps out"
            )
        if len(observed) == len(flat):
            raise DataError(
                "every field has a next value, so the number of steps is ambiguous; add a field with fields="
            )
        return cut_before_end(
            episode, {path: rows[: n_steps - (path not in observed)] for path, rows in flat.items()}
        )

    def write(self, episode: Episode) -> None:
        entries = self._transitions(self.trim(episode))
        n_rows = len(entries["next/done"])
        self._check_same_entries(entries)
        self._check_capacity(self._n_rows + n_rows)
        for path, rows in entries.items():
            file = self._file(path)
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("ab") as out:
                out.write(np.ascontiguousarray(rows).data)
        self._n_rows, self._n_episodes = self._n_rows + n_rows, self._n_episodes + 1
        self._pending.append({"key": episode.key, "n_rows": n_rows})
        self._pending_bytes += sum(rows.nbytes for rows in entries.values())
        if self._pending_bytes >= _SYNC_BYTES:
            self._sync()

    def finish(self) -> None:
        if not self._n_rows:
            raise DataError(f"{self.display}: no steps to write")
        self._sync()
        self._check_capacity(self._n_rows)
        capacity = self._options["capacity"] or self._n_rows
        for path, (_, _, row_bytes) in self._entry_types.items():
            os.truncate(self._file(path), capacity * row_bytes)
        self._write_descriptions(capacity)
        self._output.publish()

    def suspend(self) -> None:
        self._sync()
        self._output.suspend()

    def _check_capacity(self, n_rows: int) -> None:
        capacity = self._options["capacity"]
        if capacity is not None and capacity < n_rows:
            raise DataError(f"capacity: expected at least the {n_rows} steps so far, got {capacity}")

    # ---- entries

    def _transitions(self, episode: Episode) -> dict[str, Array]:
        """Return TorchRL's entries for every step: observation, action and next observation."""
        flat = readable_arrays(episode.steps)
        if taken := [path for path in flat if path in _RESERVED]:
            raise DataError(f"field '{taken[0]}' has the name of an entry that TorchRL writes itself")
        n_steps = count_steps(flat)
        # A dump may also have rewards at the root: those of the step before.
        moved = {"reward": "next/reward"} if "next/reward" not in flat else {}
        entries: dict[str, Array] = {}
        for path, rows in flat.items():
            _add_entry(
                entries,
                moved.get(path, path),
                _add_reward_axis(rows[:n_steps]) if path in moved else rows[:n_steps],
            )
            if self._has_next(path, flat):
                _add_entry(entries, f"next/{path}", rows[1 : n_steps + 1])
        ends = {"terminated": episode.terminated, "truncated": _is_truncated(episode)}
        for name, is_set in {"done": any(ends.values()), **ends}.items():
            flags = np.zeros((n_steps, 1), bool)
            flags[-1:] = is_set  # a slice, because no step may be left
            entries[f"next/{name}"] = flags
        entries["collector/traj_ids"] = np.full(n_steps, self._n_episodes, np.int64)
        return entries

    def _has_next(self, path: str, flat: Mapping[str, Array]) -> bool:
        named = self._options["observations"]
        if named is not None:
            return is_skipped(path, named)
        if self._entry_types:
            return f"next/{path}" in self._entry_types and path in self._entry_types and f"next/{path}" not in flat
        return len(flat[path]) > count_steps(flat)

    # ---- files and journal

    @property
    def _entry_types(self) -> dict[str, tuple[str, list[int], int]]:
        """Dtype, shape and bytes per row of each entry, by path."""
        records = self._output.records
        return records[0]["layout"] if records else {}

    @property
    def _episodes(self) -> list[Record]:
        return self._output.records[1:]

    def _check_same_entries(self, entries: Mapping[str, Array]) -> None:
        types = {path: [a.dtype.name, list(a.shape[1:]), a[:1].nbytes] for path, a in entries.items()}
        if not self._entry_types:
            if not len(entries["next/done"]):
                raise DataError("the first episode has no step with a next observation; leave it out with where=")
            nest(types)  # refuses a field that has the name of a group
            self._output.add_records([{"layout": types}])
        for path in {**self._entry_types, **types}:
            first, now = self._entry_types.get(path, [None] * 3)[:2], types.get(path, [None] * 3)[:2]
            if first != now:
                raise DataError(f"'{path}': expected {first} as in the first episode, got {now}")

    def _file(self, path: str) -> Path:
        return self._output.directory / "storage" / f"{path}.memmap"

    def _sync(self) -> None:
        if self._pending:
            for path in self._entry_types:
                sync_file(self._file(path))
            self._output.add_records(self._pending)
        self._pending, self._pending_bytes = [], 0

    def _truncate_files(self) -> None:
        """Remove rows that an earlier run wrote after its last journal record."""
        for path, (_, _, row_bytes) in self._entry_types.items():
            if self._file(path).exists():
                os.truncate(self._file(path), self._n_rows * row_bytes)

    def _write_descriptions(self, capacity: int) -> None:
        place = self._output.directory
        for path, about in _descriptions(nest(self._entry_types), capacity).items():
            _write_json(place / "storage" / path / "meta.json", about)
        _write_json(
            place / "storage/storage_metadata.json", {"metadata": {}, "is_pytree": False, "len": self._n_rows}
        )
        _write_json(
            place / "writer/metadata.json", {"cursor": self._n_rows % capacity, "write_count": self._n_rows}
        )
        _write_json(place / "buffer_metadata.json", {"batch_size": self._options["batch_size"]})


def _add_entry(entries: dict[str, Array], path: str, rows: Array) -> None:
    if path in entries:
        raise DataError(f"two fields would both be called '{path}' in the dump; leave one out with fields=")
    entries[path] = rows


def _add_reward_axis(rows: Array) -> Array:
    """Add the axis of length 1 that TorchRL's rewards have."""
    return rows[:, None] if rows.ndim == 1 else rows


def _is_truncated(episode: Episode) -> bool:
    return episode.truncated or episode.metadata.get("truncated") is True


def _descriptions(entries: Mapping[str, Any], capacity: int, path: str = "") -> dict[str, dict[str, Any]]:
    """Return the contents of meta.json for every directory of the storage."""
    own: dict[str, Any] = {}
    below: dict[str, dict[str, Any]] = {}
    for name, entry in entries.items():
        if isinstance(entry, Mapping):
            own[name] = {"type": "TensorDict"}
            below |= _descriptions(entry, capacity, f"{path}{name}/")
        else:
            dtype, shape, _ = entry
            own[name] = {
                "device": "cpu", "shape": [capacity, *shape], "dtype": f"torch.{dtype}", "is_nested": False
            }  # fmt: skip
    kind = "<class 'tensordict._td.TensorDict'>"
    return {path: {**own, "shape": [capacity], "device": "cpu", "_type": kind}, **below}


def _write_json(path: Path, about: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(about))
