"""Write the metadata files of a LeRobot dataset."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trajstore.datasets.arrow_tables import import_pyarrow
from trajstore.datasets.lerobot.features import DatasetFacts
from trajstore.datasets.lerobot.metadata_reader import (
    DATA_PATH,
    END_COLUMN,
    EPISODES_PATH,
    METADATA_COLUMN,
    TASKS_PATH,
)
from trajstore.datasets.partial_output import Record

_INDEX = "__index_level_0__"  # pandas' name for an unnamed index


def write_meta(place: Path, facts: DatasetFacts, episodes: Sequence[Record], files_per_chunk: int) -> None:
    """Write all files of ``meta`` for episodes whose data files are complete."""
    _write_json(place / "meta/info.json", _info(facts, episodes, files_per_chunk))
    _write_json(place / "meta/stats.json", facts.statistics())
    _write_table(place / TASKS_PATH, _tasks(facts))
    _write_table(place / EPISODES_PATH, _episodes(episodes, files_per_chunk))


def _info(facts: DatasetFacts, episodes: Sequence[Record], files_per_chunk: int) -> dict[str, Any]:
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


def _tasks(facts: DatasetFacts) -> Any:
    """Return the table of tasks. The text is the index of a pandas data frame, where LeRobot looks for it."""
    columns: list[dict[str, Any]] = [
        {"name": "task_index", "field_name": "task_index", "pandas_type": "int64", "numpy_type": "int64"},
        {"name": None, "field_name": _INDEX, "pandas_type": "unicode", "numpy_type": "object"},
    ]
    about = {"index_columns": [_INDEX], "column_indexes": [], "columns": [{**c, "metadata": None} for c in columns]}
    table = import_pyarrow().table({"task_index": list(facts.tasks.values()), _INDEX: list(facts.tasks)})
    return table.replace_schema_metadata({"pandas": json.dumps(about)})


def _episodes(episodes: Sequence[Record], files_per_chunk: int) -> Any:
    edges = np.cumsum([0, *(record["n_steps"] for record in episodes)])
    files = np.array([record["file"] for record in episodes])
    zeros = np.zeros(len(episodes), np.int64)
    return import_pyarrow().table(
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


def _write_json(path: Path, about: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(about, indent=4))


def _write_table(path: Path, table: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    import_pyarrow("pyarrow.parquet").write_table(table, path)
