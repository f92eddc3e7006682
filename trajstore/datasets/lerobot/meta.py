"""The files of a LeRobot dataset that tell what is in it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trajstore.datasets.arrow_tables import library
from trajstore.datasets.lerobot.features import Facts
from trajstore.datasets.lerobot.layout import (
    DATA_PATH,
    END_COLUMN,
    EPISODES_PATH,
    METADATA_COLUMN,
    TASKS_PATH,
)
from trajstore.datasets.unfinished import Record

_INDEX = "__index_level_0__"  # what pandas calls an index without a name


def write_meta(place: Path, facts: Facts, episodes: Sequence[Record], files_per_chunk: int) -> None:
    """Write all of ``meta`` for episodes that are in data files already."""
    _dump(place / "meta/info.json", _info(facts, episodes, files_per_chunk))
    _dump(place / "meta/stats.json", facts.statistics())
    _write(place / TASKS_PATH, _tasks(facts))
    _write(place / EPISODES_PATH, _episodes(episodes, files_per_chunk))


def _info(facts: Facts, episodes: Sequence[Record], files_per_chunk: int) -> dict[str, Any]:
    return {
        "codebase_version": "v3.0",
        "robot_type": facts.robot_type,
        "total_episodes": len(episodes),
        "total_frames": sum(record["n_steps"] for record in episodes),
        "total_tasks": len(facts.tasks),
        "chunks_size": files_per_chunk,
        "data_files_size_in_mb": 100,
        "video_files_size_in_mb": 200,
        "fps": int(facts.fps) if float(facts.fps).is_integer() else facts.fps,
        "splits": {"train": f"0:{len(episodes)}"},
        "data_path": DATA_PATH,
        "video_path": None,
        "features": facts.features(),
    }


def _tasks(facts: Facts) -> Any:
    """Tasks as the index of a frame: LeRobot looks for them there."""
    columns: list[dict[str, Any]] = [
        {"name": "task_index", "field_name": "task_index", "pandas_type": "int64", "numpy_type": "int64"},
        {"name": None, "field_name": _INDEX, "pandas_type": "unicode", "numpy_type": "object"},
    ]
    about = {"index_columns": [_INDEX], "column_indexes": [], "columns": [{**c, "metadata": None} for c in columns]}
    table = library().table({"task_index": list(facts.tasks.values()), _INDEX: list(facts.tasks)})
    return table.replace_schema_metadata({"pandas": json.dumps(about)})


def _episodes(episodes: Sequence[Record], files_per_chunk: int) -> Any:
    edges = np.cumsum([0, *(record["n_steps"] for record in episodes)])
    files = np.array([record["file"] for record in episodes])
    zeros = np.zeros(len(episodes), np.int64)
    return library().table(
        {
            "episode_index": np.arange(len(episodes)),
            "tasks": [record["tasks"] for record in episodes],
            "length": np.diff(edges),
            "data/chunk_index": files // files_per_chunk,
            "data/file_index": files % files_per_chunk,
            "dataset_from_index": edges[:-1],
            "dataset_to_index": edges[1:],
            "meta/episodes/chunk_index": zeros,
            "meta/episodes/file_index": zeros,
            END_COLUMN: [record["end"] for record in episodes],
            METADATA_COLUMN: [json.dumps(record["metadata"]) for record in episodes],
        }
    )


def _dump(path: Path, about: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(about, indent=4))


def _write(path: Path, table: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    library("pyarrow.parquet").write_table(table, path)
