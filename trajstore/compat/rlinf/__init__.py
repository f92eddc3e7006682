"""RLinf's replay buffer, trajectories, builder, datasets and directories, over trajstore."""

from trajstore.compat.rlinf.buffer import TrajectoryReplayBuffer
from trajstore.compat.rlinf.trajectory import Trajectory, convert_trajectories_to_batch, get_model_weights_id

__all__ = [
    "Trajectory",
    "TrajectoryReplayBuffer",
    "convert_trajectories_to_batch",
    "get_model_weights_id",
]
