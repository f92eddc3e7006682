"""Makes tests/data/lerobot_v3 with LeRobot's own library (0.4.4): python make_lerobot.py <directory>."""

import sys
from pathlib import Path

import numpy as np
from lerobot.datasets.lerobot_dataset import LeRobotDataset

FEATURES = {
    "observation.state": {"dtype": "float32", "shape": (3,), "names": ["x", "y", "z"]},
    "observation.grid": {"dtype": "int64", "shape": (2, 3), "names": None},
    "observation.images.wrist": {"dtype": "image", "shape": (16, 12, 3), "names": ["height", "width", "channels"]},
    "observation.images.top": {"dtype": "video", "shape": (64, 64, 3), "names": ["height", "width", "channels"]},
    "action": {"dtype": "float32", "shape": (2,), "names": ["dx", "dy"]},
    "next.reward": {"dtype": "float32", "shape": (1,), "names": None},
    "next.done": {"dtype": "bool", "shape": (1,), "names": None},
}


def frame(rng: np.random.Generator, t: int, is_last: bool, task: str) -> dict:
    top = np.zeros((64, 64, 3), np.uint8)
    top[:, : 2 * t + 2] = 200  # a bar that grows: each frame is told from its neighbours after lossy coding
    return {
        "observation.state": rng.normal(size=3).astype(np.float32),
        "observation.grid": np.arange(6, dtype=np.int64).reshape(2, 3) + t,
        "observation.images.wrist": np.full((16, 12, 3), (t, 2 * t, 255 - t), np.uint8),
        "observation.images.top": top,
        "action": rng.normal(size=2).astype(np.float32),
        "next.reward": np.array([t / 4], np.float32),
        "next.done": np.array([is_last]),
        "task": task,
    }


def main(root: Path) -> None:
    rng = np.random.default_rng(0)
    dataset = LeRobotDataset.create("trajstore/small", fps=10, features=FEATURES, root=root, vcodec="h264")
    for n_steps, tasks in ((7, ["push"]), (5, ["lift"]), (6, ["push", "lift"])):
        for t in range(n_steps):
            dataset.add_frame(frame(rng, t, t == n_steps - 1, tasks[t * len(tasks) // n_steps]))
        dataset.save_episode()
    dataset.finalize()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
