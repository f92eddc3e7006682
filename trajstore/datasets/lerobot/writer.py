"""Write LeRobot datasets of version 3, without videos."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from trajstore.datasets.arrow_tables import import_pyarrow
from trajstore.datasets.episode_arrays import count_steps, readable_arrays
from trajstore.datasets.episode_comparison import end_name
from trajstore.datasets.interfaces import Episode
from trajstore.datasets.lerobot.features import DatasetFacts, feature_name, to_arrow_column
from trajstore.datasets.lerobot.metadata_reader import DATA_PATH, INDEX_COLUMNS
from trajstore.datasets.lerobot.metadata_writer import write_meta
from trajstore.datasets.partial_output import PartialOutput, Record
from trajstore.errors import DataError
from trajstore.schema import Array, nest
from trajstore.storage.atomic_files import sync_file

_FILE_BYTES = 100 << 20  # a data file is closed at this size of its rows in memory
_FILES_PER_CHUNK = 1000
_REQUIRED_COLUMNS = ("timestamp", "task_index")  # written even if the store has no such field


def open_writer(
    path: str | os.PathLike[str],
    *,
    fps: float | None = None,
    task: str | None = None,
    robot_type: str | None = None,
    drop_final: bool = False,
) -> LeRobotWriter:
    """Start a dataset, or continue an unfinished one.

    Args:
        path: Its directory.
        fps: Steps per second. By default that of the dataset that the store was imported from.
        task: Task of episodes that have no ``task`` in their metadata.
        robot_type: Text for ``info.json``.
        drop_final: Leave out final observations, which LeRobot cannot hold. Otherwise they are refused.

    Raises:
        MissingExtraError: pyarrow is not installed.
    """
    import_pyarrow("pyarrow.parquet")
    options = {"fps": fps, "task": task, "robot_type": robot_type, "drop_final": drop_final}
    return LeRobotWriter(PartialOutput.begin(path, {"format": "lerobot", **options}), options)


class LeRobotWriter:
    """Writes data files of complete episodes.

    The journal lists episodes when their file is closed: a Parquet file that is still open cannot be read.
    """

    def __init__(self, output: PartialOutput, options: Mapping[str, Any]) -> None:
        self._output = output
        self._options = options
        self._writer: Any = None
        self._pending: list[Record] = []  # journal records of the episodes in the open file
        self._pending_bytes = 0
        self._is_torn = False  # the open file may hold a part of an episode, after an interrupt
        self._n_episodes = len(self._episodes)
        self._n_rows = sum(record["n_steps"] for record in self._episodes)
        self._n_files = 1 + max((record["file"] for record in self._episodes), default=-1)
        states = [record["facts"] for record in output.records if "facts" in record]
        self._facts = DatasetFacts.from_json(states[-1]) if states else None

    @property
    def display(self) -> str:
        return str(self._output.target)

    def written_keys(self) -> Sequence[str]:
        return [record["key"] for record in self._episodes]

    def trim(self, episode: Episode) -> Episode:
        """Return the episode without final values."""
        arrays = readable_arrays(episode.steps)
        n_steps = count_steps(arrays)
        final = [path for path, rows in arrays.items() if len(rows) > n_steps]
        if not final:
            return episode
        if not self._options["drop_final"]:
            raise DataError(
                f"field '{final[0]}' has a final value, which LeRobot cannot hold; drop_final=True leaves it out"
            )
        return replace(episode, steps=nest({path: rows[:n_steps] for path, rows in arrays.items()}))

    def write(self, episode: Episode) -> None:
        arrays = readable_arrays(self.trim(episode).steps)
        _check_names(arrays)
        facts = self._get_facts(arrays, episode.metadata)
        facts.check_same_fields(arrays)
        tasks = self._tasks_of(arrays, episode.metadata)
        n_steps = count_steps(arrays)
        table = self._table(arrays, tasks, n_steps)
        writer, self._is_torn = self._open_file(table.schema), True
        writer.write_table(table)
        self._is_torn = False
        facts.update_statistics(arrays)
        self._n_rows, self._n_episodes = self._n_rows + n_steps, self._n_episodes + 1
        self._pending.append(
            {
                "key": episode.key,
                "n_steps": n_steps,
                "file": self._n_files,
                "tasks": list(dict.fromkeys(tasks)),
                "end": end_name(episode),
                "metadata": {k: v for k, v in episode.metadata.items() if k not in ("task", "tasks", "dataset")},
            }
        )
        self._pending_bytes += table.nbytes
        if self._pending_bytes >= _FILE_BYTES:
            self._close_file()

    def finish(self) -> None:
        self._close_file()
        if self._facts is None:
            raise DataError(f"{self.display}: no episodes to write")
        write_meta(self._output.directory, self._facts, self._episodes, _FILES_PER_CHUNK)
        self._output.publish()

    def suspend(self) -> None:
        self._close_file()
        self._output.suspend()

    # ---- rows

    def _tasks_of(self, arrays: Mapping[str, Array], metadata: Mapping[str, Any]) -> list[str]:
        """Return the task of every step."""
        n_steps, texts = count_steps(arrays), metadata.get("tasks")
        if "task_index" in arrays:
            numbers = [str(n) for n in arrays["task_index"].tolist()]
            if not isinstance(texts, Mapping) or not set(numbers) <= texts.keys():
                raise DataError(
                    "field 'task_index': metadata 'tasks' lacks some of its tasks; leave it out with fields="
                )
            return [texts[number] for number in numbers]
        task = metadata.get("task", self._options["task"])
        if not isinstance(task, str):
            raise DataError("the episode has no task; give one with task=")
        return [task] * n_steps

    def _table(self, arrays: Mapping[str, Array], tasks: Sequence[str], n_steps: int) -> Any:
        assert self._facts is not None
        frame = np.arange(n_steps)
        numbers = [self._facts.tasks.setdefault(task, len(self._facts.tasks)) for task in tasks]
        times = arrays.get("timestamp", (frame / self._facts.fps).astype(np.float32))
        columns = {
            feature_name(path): to_arrow_column(rows)
            for path, rows in arrays.items()
            if path not in _REQUIRED_COLUMNS
        }
        columns |= {
            "timestamp": to_arrow_column(times),
            "frame_index": to_arrow_column(frame),
            "episode_index": to_arrow_column(np.full(n_steps, self._n_episodes)),
            "index": to_arrow_column(self._n_rows + frame),
            "task_index": to_arrow_column(np.array(numbers, np.int64)),
        }
        return import_pyarrow().table(columns)

    # ---- files and journal

    @property
    def _episodes(self) -> list[Record]:
        return [record for record in self._output.records if "key" in record]

    def _get_facts(self, arrays: Mapping[str, Array], metadata: Mapping[str, Any]) -> DatasetFacts:
        if self._facts is None:
            self._facts = DatasetFacts.of(arrays, self._options, metadata)
        return self._facts

    def _open_file(self, schema: Any) -> Any:
        if self._writer is None:
            path = self._path()
            path.parent.mkdir(parents=True, exist_ok=True)
            self._writer = import_pyarrow("pyarrow.parquet").ParquetWriter(path, schema, compression="snappy")
        return self._writer

    def _path(self) -> Path:
        chunk, file = divmod(self._n_files, _FILES_PER_CHUNK)
        return self._output.directory / DATA_PATH.format(chunk_index=chunk, file_index=file)

    def _close_file(self) -> None:
        if self._writer is None:
            return
        self._writer.close()
        if self._is_torn:
            return
        sync_file(self._path())
        assert self._facts is not None
        self._output.add_records([*self._pending, {"facts": self._facts.to_json()}])
        self._writer, self._pending, self._pending_bytes = None, [], 0
        self._n_files += 1


def _check_names(paths: Iterable[str]) -> None:
    if taken := [path for path in paths if path in INDEX_COLUMNS]:
        raise DataError(
            f"field '{taken[0]}' has the name of a column that LeRobot writes itself; leave it out with fields="
        )
