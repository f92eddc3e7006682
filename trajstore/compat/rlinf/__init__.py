"""RLinf's replay buffer, trajectories, builder, datasets and directories, over trajstore."""

from trajstore.compat.rlinf.buffer import TrajectoryReplayBuffer
from trajstore.compat.rlinf.builder import ChunkStepResult, EmbodiedTrajectoryBuilder
from trajstore.compat.rlinf.datasets import (
    PreloadReplayBufferDataset,
    ReplayBufferDataset,
    concat_batch,
    replay_buffer_collate_fn,
)
from trajstore.compat.rlinf.directory import Directory
from trajstore.compat.rlinf.merging import merge, split
from trajstore.compat.rlinf.priority_store import PriorityStore
from trajstore.compat.rlinf.trajectory import Trajectory, convert_trajectories_to_batch, get_model_weights_id
from trajstore.compat.rlinf.transfer import export_directory, import_directory

EmbodiedRolloutResult = EmbodiedTrajectoryBuilder  # as RLinf 0.3 calls it

__all__ = [
    "ChunkStepResult",
    "Directory",
    "EmbodiedRolloutResult",
    "EmbodiedTrajectoryBuilder",
    "PreloadReplayBufferDataset",
    "PriorityStore",
    "ReplayBufferDataset",
    "Trajectory",
    "TrajectoryReplayBuffer",
    "concat_batch",
    "convert_trajectories_to_batch",
    "export_directory",
    "get_model_weights_id",
    "import_directory",
    "merge",
    "replay_buffer_collate_fn",
    "split",
]
