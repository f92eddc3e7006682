"""Stores as LeRobot datasets of version 3, without videos."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from trajstore.datasets.arrow_tables import library
from trajstore.datasets.comparing import end_of
from trajstore.datasets.fields import length_of, readable_arrays
from trajstore.datasets.lerobot.features import Facts, as_column, name_of
from trajstore.datasets.lerobot.layout import BOOKKEEPING, DATA_PATH
from trajstore.datasets.lerobot.meta import write_meta
from trajstore.datasets.ports import Episode
from trajstore.datasets.unfinished import Record, Unfinished
from trajstore.errors import DataError
from trajstore.schema import Array, nest
from trajstore.storage.atomic_files import sync_file

_FILE_BYTES = 100 << 20  # of rows in memory, of one file
_FILES_PER_CHUNK = 1000
_OWN = ("timestamp", "task_index")


def open_sink(
    path: str | os.PathLike[str],
    *,
    fps: float | None = None,
    task: str | None = None,
    robot_type: str | None = None,
    drop_final: bool = False,
) -> LeRobotSink:
    """Begin a dataset, or go on with one that was not finished.

    Args:
        path: Its directory.
        fps: Steps a second. By default that of the dataset that the store was imported from.
        task: What was to be done, in episodes that have no ``task`` of their own.
        robot_type: Kept in the dataset.
        drop_final: Leave out final observations, for which there is no place. Otherwise they are refused.
    """
    library("pyarrow.parquet")
    given = {"fps": fps, "task": task, "robot_type": robot_type, "drop_final": drop_final}
    return LeRobotSink(Unfinished.begin(path, {"format": "lerobot", **given}), given)


class LeRobotSink:
    """Files of whole episodes, which are noted when their file is closed: an open one has no end yet."""

    def __init__(self, unfinished: Unfinished, options: Mapping[str, Any]) -> None:
        self._unfinished = unfinished
        self._options = options
        self._writer: Any = None
        self._waiting: list[Record] = []  # in the file that is open
        self._waiting_bytes = 0
        self._is_torn = False  # an interrupt may have left a part of an episode in it
        self._n_episodes = len(self._episodes)
        self._n_rows = sum(record["n_steps"] for record in self._episodes)
        self._n_files = 1 + max((record["file"] for record in self._episodes), default=-1)
        states = [record["facts"] for record in unfinished.records if "facts" in record]
        self._facts = Facts.from_json(states[-1]) if states else None

    @property
    def display(self) -> str:
        return str(self._unfinished.target)

    def done(self) -> Sequence[str]:
        return [record["key"] for record in self._episodes]

    def kept(self, episode: Episode) -> Episode:
        """All of it but final values."""
        arrays = readable_arrays(episode.steps)
        n_steps = length_of(arrays)
        final = [path for path, rows in arrays.items() if len(rows) > n_steps]
        if not final:
            return episode
        if not self._options["drop_final"]:
            raise DataError(
                f"field '{final[0]}' has a final value, for which there is no place; drop_final=True leaves it out"
            )
        return replace(episode, steps=nest({path: rows[:n_steps] for path, rows in arrays.items()}))

    def write(self, episode: Episode) -> None:
        arrays = readable_arrays(self.kept(episode).steps)
        _check_names(arrays)
        facts = self._facts_of(arrays, episode.metadata)
        facts.check(arrays)
        tasks = self._tasks_of(arrays, episode.metadata)
        n_steps = length_of(arrays)
        table = self._table(arrays, tasks, n_steps)
        writer, self._is_torn = self._open(table.schema), True
        writer.write_table(table)
        self._is_torn = False
        facts.count(arrays)
        self._n_rows, self._n_episodes = self._n_rows + n_steps, self._n_episodes + 1
        self._waiting.append(
            {
                "key": episode.key,
                "n_steps": n_steps,
                "file": self._n_files,
                "tasks": list(dict.fromkeys(tasks)),
                "end": end_of(episode),
                "metadata": {k: v for k, v in episode.metadata.items() if k not in ("task", "tasks", "dataset")},
            }
        )
        self._waiting_bytes += table.nbytes
        if self._waiting_bytes >= _FILE_BYTES:
            self._close()

    def finish(self) -> None:
        self._close()
        if self._facts is None:
            raise DataError(f"{self.display}: there are no episodes to write")
        write_meta(self._unfinished.place, self._facts, self._episodes, _FILES_PER_CHUNK)
        self._unfinished.publish()

    def abandon(self) -> None:
        self._close()
        self._unfinished.abandon()

    # ---- what is written

    def _tasks_of(self, arrays: Mapping[str, Array], metadata: Mapping[str, Any]) -> list[str]:
        """The task of every step."""
        n_steps, known = length_of(arrays), metadata.get("tasks")
        if "task_index" in arrays:
            numbers = [str(n) for n in arrays["task_index"].tolist()]
            if not isinstance(known, Mapping) or not set(numbers) <= known.keys():
                raise DataError(
                    "field 'task_index': metadata 'tasks' does not name them; leave it out with fields="
                )
            return [known[number] for number in numbers]
        task = metadata.get("task", self._options["task"])
        if not isinstance(task, str):
            raise DataError("there is no task; say what was to be done with task=")
        return [task] * n_steps

    def _table(self, arrays: Mapping[str, Array], tasks: Sequence[str], n_steps: int) -> Any:
        assert self._facts is not None
        frame = np.arange(n_steps)
        numbers = [self._facts.tasks.setdefault(task, len(self._facts.tasks)) for task in tasks]
        times = arrays.get("timestamp", (frame / self._facts.fps).astype(np.float32))
        columns = {name_of(path): as_column(rows) for path, rows in arrays.items() if path not in _OWN}
        columns |= {
            "timestamp": as_column(times),
            "frame_index": as_column(frame),
            "episode_index": as_column(np.full(n_steps, self._n_episodes)),
            "index": as_column(self._n_rows + frame),
            "task_index": as_column(np.array(numbers, np.int64)),
        }
        return library().table(columns)

    # ---- files and notes

    @property
    def _episodes(self) -> list[Record]:
        return [record for record in self._unfinished.records if "key" in record]

    def _facts_of(self, arrays: Mapping[str, Array], metadata: Mapping[str, Any]) -> Facts:
        if self._facts is None:
            self._facts = Facts.of(arrays, self._options, metadata)
        return self._facts

    def _open(self, schema: Any) -> Any:
        if self._writer is None:
            path = self._path()
            path.parent.mkdir(parents=True, exist_ok=True)
            self._writer = library("pyarrow.parquet").ParquetWriter(path, schema, compression="snappy")
        return self._writer

    def _path(self) -> Path:
        chunk, file = divmod(self._n_files, _FILES_PER_CHUNK)
        return self._unfinished.place / DATA_PATH.format(chunk_index=chunk, file_index=file)

    def _close(self) -> None:
        if self._writer is None:
            return
        self._writer.close()
        if self._is_torn:
            return
        sync_file(self._path())
        assert self._facts is not None
        self._unfinished.note([*self._waiting, {"facts": self._facts.to_json()}])
        self._writer, self._waiting, self._waiting_bytes = None, [], 0
        self._n_files += 1


def _check_names(paths: Iterable[str]) -> None:
    if taken := [path for path in paths if path in BOOKKEEPING]:
        raise DataError(
            f"field '{taken[0]}' has the name of what LeRobot keeps there itself; leave it out with fields="
        )
