"""Options of hindsight relabelling: goals that were achieved in place of those that were desired."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, get_args

import torch

Strategy = Literal["future", "final", "episode", "random"]
Outcome = Callable[[Any, Any], torch.Tensor]  # of achieved goals and goals: a tensor, or a nested dict for a group

GOAL_INDEX = "hindsight/goal_index"  # flat key of a batch: handles of the steps that new goals come from
_MIN_GEOMETRIC = 1e-4  # the table of distances then takes 3 MB


@dataclass(frozen=True, slots=True)
class Hindsight:
    """Options of hindsight relabelling: which windows get another goal, which goal, and what follows from it.

    A window has one goal at all of its steps. Only the batch changes; stored data stay as they are. A window is
    relabelled only if everything that follows from the new goal is known. The last step of an episode without a
    final row led to an observation that was not stored, so windows with that step keep their goal. Immutable, so
    safe to share between threads.

    Args:
        strategy: The row whose achieved goal becomes the new goal. ``"future"``: a row after the window's first
            learning step, in the same episode, the final row included. ``"final"``: the last row of the episode.
            ``"episode"``: any row of the episode. ``"random"``: any step of any episode.
        fraction: The probability that a window is relabelled.
        goal: The field that holds the goal, or a group of fields.
        achieved: The field that holds the achieved goal, of the same dtype and shape, or a group of such fields.
        reward: A function of n achieved goals and n goals, ``[n, ...]`` each (nested dicts of tensors for groups),
            that returns n rewards of the reward field's dtype. The achieved goal is that of the observation which
            the rewarded step led to. The function is also called for windows that keep their goal, and possibly on
            another thread. Required if batches hold rewards.
        terminated: A function of the same arguments that returns n bools: True where the episode terminates. It
            replaces the stored ``terminated``, also in n-step returns. None keeps the stored values.
        geometric: With ``"future"``, draw the distance to the goal from the geometric distribution with this
            parameter (for example ``1 - gamma``), truncated at the end of the episode, instead of uniformly.

    Raises:
        ValueError: An option is out of range.
        TypeError: An option has the wrong type.
    """

    strategy: Strategy = "future"
    _: KW_ONLY
    fraction: float = 0.8
    goal: str = "desired_goal"
    achieved: str = "achieved_goal"
    reward: Outcome | None = None
    terminated: Outcome | None = None
    geometric: float | None = None

    def __post_init__(self) -> None:
        if self.strategy not in get_args(Strategy):
            raise ValueError(f"strategy: expected one of {', '.join(get_args(Strategy))}, got {self.strategy!r}")
        if not _is_number(self.fraction, 0.0):
            raise ValueError(f"fraction: expected a number from 0 to 1, got {self.fraction!r}")
        for name in ("goal", "achieved"):
            if not isinstance(getattr(self, name), str):
                raise TypeError(f"{name}: expected the name of a field or group, got {getattr(self, name)!r}")
        for name in ("reward", "terminated"):
            if getattr(self, name) is not None and not callable(getattr(self, name)):
                raise TypeError(f"{name}: expected a function, got {getattr(self, name)!r}")
        self._check_geometric()

    def _check_geometric(self) -> None:
        if self.geometric is None:
            return
        if not _is_number(self.geometric, _MIN_GEOMETRIC):
            raise ValueError(f"geometric: expected a number from {_MIN_GEOMETRIC} to 1, got {self.geometric!r}")
        if self.strategy != "future":
            raise ValueError(f"geometric goes with strategy='future', got {self.strategy!r}")


def _is_number(value: object, low: float) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= 1.0
