"""Makes rlinf.zip with RLinf's own replay buffer. Run where RLinf is installed: python make_rlinf.py"""

import shutil
import tempfile
from pathlib import Path

import torch
from rlinf.data.embodied_io_struct import Trajectory
from rlinf.data.replay_buffer import TrajectoryReplayBuffer


def trajectory(number: int, n_steps: int, n_envs: int) -> Trajectory:
    """Rewards tell which step of which environment of which trajectory a row is of."""
    t, env = torch.meshgrid(torch.arange(n_steps), torch.arange(n_envs), indexing="ij")
    name = (number * 10_000 + t * 100 + env).float()[..., None]
    states = torch.cat([name, name[-1:] + 100]).repeat(1, 1, 3)
    flags = {
        f: torch.zeros(n_steps + 1, n_envs, 1, dtype=torch.bool) for f in ("terminations", "truncations", "dones")
    }
    flags["dones"][-1] = flags["terminations"][-1] = True
    return Trajectory(
        max_episode_length=n_steps,
        actions=name.repeat(1, 1, 2),
        rewards=name.clone(),
        prev_values=torch.cat([name, name[-1:] + 100]) / 2,
        versions=torch.full_like(name, number),
        curr_obs={"states": states[:-1].clone()},
        next_obs={"states": states[1:].clone()},
        forward_inputs={"action": name.clone()},
        **flags,
    )


with tempfile.TemporaryDirectory() as directory:
    buffer = TrajectoryReplayBuffer(auto_save=True, auto_save_path=f"{directory}/rlinf", trajectory_format="pt")
    buffer.add_trajectories([trajectory(number, 3 + number, 2) for number in range(3)])
    buffer.close()
    shutil.make_archive(str(Path(__file__).parent / "rlinf"), "zip", directory)
