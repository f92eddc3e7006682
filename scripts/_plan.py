"""The plan and the files of a run, shared by the process that trains and the process that starts it."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import trajstore

N_PROOF = 3  # updates after a checkpoint that a resumed session must repeat bit by bit
N_KEPT = 3  # pairs of checkpoints that are kept
LEARNER = Path(__file__).resolve().with_name("_learner.py")


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run does. Counts are in environment steps unless they say otherwise."""

    seed: int
    n_steps: int  # maximum
    least_steps: int  # before it may end because the goal is reached
    kill_at: int | None
    goal: float | None  # mean return of greedy episodes; None: no goal
    n_envs: int = 16
    batch_size: int = 128
    n_updates: int = 4  # for each step of all environments
    n_greedy: int = 20  # episodes of an evaluation

    @property
    def capacity(self) -> int:
        return self.n_steps // 4

    @property
    def save_every(self) -> int:
        """Steps between two evaluations and checkpoints."""
        return self.n_steps // 20

    @property
    def warm_up(self) -> int:
        """Steps before the first update."""
        return self.n_steps // 40

    @property
    def bin_updates(self) -> int:
        """Bin size, in updates, of the statistics about which steps were drawn when."""
        return max(1, self.n_updates * self.n_steps // self.n_envs // 100)

    def noise(self, step: int) -> float:
        """Share of random actions: falls from 1 to 0.2 over the first sixth of the run."""
        return max(0.2, 1 - 0.8 * step / (self.n_steps / 6))

    def rate(self, step: int) -> float:
        """Factor of the learning rate: falls from 1 to 0.1 over the first half of the run."""
        return max(0.1, 1 - 0.9 * step / (self.n_steps / 2))


def plan_of(seed: int, n_steps: int, *, is_killed: bool = True, is_quick: bool = False) -> Plan:
    # Kill it between two checkpoints, so that some steps are lost.
    kill_at = int(0.28 * n_steps) if is_killed else None
    if is_quick:
        return Plan(seed, n_steps, n_steps, kill_at, None, n_envs=8, batch_size=32, n_updates=1, n_greedy=4)
    return Plan(seed, n_steps, n_steps // 2, kill_at, 475.0)


# ---- files of a run ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Files:
    """The files of a run."""

    directory: Path

    @property
    def store(self) -> Path:
        return self.directory / "store"

    def agent(self, checkpoint: str) -> Path:
        return self.directory / "agent" / f"{checkpoint}.pt"

    def proof(self, checkpoint: str) -> Path:
        return self.directory / "agent" / f"{checkpoint}.json"

    def has_pair(self, checkpoint: str) -> bool:
        return self.agent(checkpoint).exists() and self.proof(checkpoint).exists()

    def newest_pair(self) -> str:
        """Return the id of the newest buffer checkpoint that was saved together with the agent.

        Raises:
            FileNotFoundError: There is none.
        """
        for checkpoint in reversed(trajstore.open(self.store).checkpoints):
            if self.has_pair(checkpoint.id):
                return checkpoint.id
        raise FileNotFoundError(f"{self.directory}: no checkpoint has both a buffer and an agent")

    def drop_all_but(self, checkpoints: set[str]) -> None:
        for path in (self.directory / "agent").iterdir():
            if path.name.partition(".")[0] not in checkpoints:
                path.unlink()


def command(plan: Plan, files: Files, *, is_resumed: bool) -> list[str]:
    """Return the command that starts the process that trains."""
    words = [sys.executable, str(LEARNER), str(files.directory), json.dumps(asdict(plan))]
    return words + ["--resume"] * is_resumed
