"""The keyword options of `trajstore.compat.alf.ReplayBuffer.resume`."""

from __future__ import annotations

import torch

from trajstore.compat.options import ReplayOptionsDict


class ResumeOptionsDict(ReplayOptionsDict, total=False):
    """Options of the constructor that `resume` accepts too; `trajstore.compat.alf.ReplayBuffer` describes them."""

    num_earliest_frames_ignored: int
    prioritized_sampling: bool
    initial_priority: float
    recent_data_steps: int
    recent_data_ratio: float
    with_replacement: bool
    device: str | torch.device
    allow_multiprocess: bool
    keep_episodic_info: bool | None
    record_episodic_return: bool
    default_return: float
    gamma: float
    reward_clip: tuple[float, float] | None
    enable_checkpoint: bool
    seed: int
