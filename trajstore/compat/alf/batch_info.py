"""What `ReplayBuffer.get_batch` returns beside the batch."""

from __future__ import annotations

from typing import Any, NamedTuple


class BatchInfo(NamedTuple):
    """Where the windows of a batch come from. A field that does not apply is ``()``.

    Attributes:
        env_ids: The environment of each window, ``[B]``.
        positions: The position of each window's first step, ``[B]``. Environment and position identify a step
            permanently.
        importance_weights: With priorities, ``[B]``: the priority of each window divided by the mean of all
            priorities that are not 0.
        replay_buffer: The buffer that the windows come from.
        discounted_return: With ``record_episodic_return``, ``[B]``: the return of each window's first step.
        valid: From `gather_all`, ``[B, T]``: whether the step exists.
    """

    env_ids: Any = ()
    positions: Any = ()
    importance_weights: Any = ()
    replay_buffer: Any = ()
    discounted_return: Any = ()
    valid: Any = ()
