"""RLinf's replay buffer, trajectories, builder, datasets and directories, over trajstore.

datasets                endless batches for a DataLoader
directory_transfer      imports directories into a store, and exports them
buffer                  `TrajectoryReplayBuffer`
options                 its keyword options
checkpoint_source       opens the checkpoints that it loads
trajectory_appender     checks, encodes and appends trajectories
stored_trajectories     reads whole trajectories back from a store
trajectory_encoding     how a trajectory is stored as episodes
trajectory_ledger       which trajectories a buffer holds
merge_split             merges and splits directories, file by file
directory               reads a directory of RLinf's files
directory_writer        writes one
directory_index         its file names, index and metadata
builder                 builds a trajectory step by step
trajectory              the trajectory itself
field_paths             nested dicts with arbitrary names as field paths
priority_store          keeps the items of the newest policy versions
"""

from trajstore.compat.rlinf.buffer import TrajectoryReplayBuffer
from trajstore.compat.rlinf.builder import ChunkStepResult, EmbodiedTrajectoryBuilder
from trajstore.compat.rlinf.datasets import (
    PreloadReplayBufferDataset,
    ReplayBufferDataset,
    concat_batch,
    replay_buffer_collate_fn,
)
from trajstore.compat.rlinf.directory import Directory
from trajstore.compat.rlinf.directory_transfer import export_directory, import_directory
from trajstore.compat.rlinf.merge_split import merge, split
from trajstore.compat.rlinf.priority_store import PriorityStore
from trajstore.compat.rlinf.trajectory import Trajectory, convert_trajectories_to_batch, get_model_weights_id

EmbodiedRolloutResult = EmbodiedTrajectoryBuilder  # its name in RLinf 0.3

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


def __dir__() -> list[str]:
    return sorted(__all__)
