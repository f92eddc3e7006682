"""Calls of a writer that are not sent yet, gathered into one block."""

from __future__ import annotations

import time
from typing import Any

from trajstore.ray.rollout_blocks import (
    BufferCall,
    RolloutBlock,
    add_time_axis,
    copy_values,
    count_bytes,
    count_steps,
    end_flags,
    to_env_arrays,
)
from trajstore.schema import Array
from trajstore.writing.validation import Step


class StagedCalls:
    """Gathers calls, and stacks steps of the same environments into one call. Copies all values.

    Args:
        block_steps: A block is full at this many steps.
        block_bytes: A block is full at this many bytes.
        block_s: A block is due this many seconds after its first call.
    """

    def __init__(self, block_steps: int, block_bytes: int, block_s: float) -> None:
        self._block_steps, self._block_bytes, self._block_s = block_steps, block_bytes, block_s
        self._calls: list[BufferCall] = []
        self._rollout: RolloutBlock | None = None  # steps that are still being stacked
        self._n_steps = self._n_bytes = 0
        self._started_at = 0.0

    def add_step(self, envs: Array, is_vector: bool, step: Step, ends: Array, final: Step | None) -> None:
        """Add one step of each environment.

        Args:
            envs: The environments.
            is_vector: Whether values have a leading axis over environments; otherwise there is one environment.
            step: The values.
            ends: How the episode of each environment ends with this step, as `End`.
            final: Final values, for episodes that end.
        """
        if not self._stack(envs, is_vector, step, ends, final):
            self._add_unstacked(envs, is_vector, step, ends, final)

    def _stack(self, envs: Array, is_vector: bool, step: Step, ends: Array, final: Step | None) -> bool:
        """Copy a step into the open rollout; False if it does not consist of plain arrays."""
        n_envs = len(envs) if is_vector else None
        values, finals = to_env_arrays(step, n_envs), None if final is None else to_env_arrays(final, n_envs)
        if not values or (final is not None and finals is None):
            return False
        which: tuple[int, ...] = tuple(envs.tolist())
        if self._rollout is None or not self._rollout.fits(which, values, ends, finals):
            self.close_rollout()
            step_bytes = max(1, sum(value.nbytes for value in values.values()))
            max_steps = min(self._block_steps // len(which), self._block_bytes // step_bytes)
            self._rollout = RolloutBlock(which, values, max(1, max_steps))
        self._start_clock()
        self._rollout.add(values, ends, finals)
        self._n_steps += len(which)
        self._n_bytes += sum(value.nbytes for value in (*values.values(), *(finals or {}).values()))
        return True

    def _add_unstacked(self, envs: Array, is_vector: bool, step: Step, ends: Array, final: Step | None) -> None:
        values, finals, flags = copy_values(step), copy_values(final), end_flags(ends)
        if is_vector:
            arguments = {"data": values, "final": finals, **flags}
            with_time = {name: add_time_axis(value) for name, value in arguments.items()}
            self.add_call("extend", tuple(envs.tolist()), with_time)
        else:
            scalars = {name: bool(flag[0]) for name, flag in flags.items()}
            self.add_call("append", (int(envs[0]),), {"step": values, "final": finals, **scalars})

    def add_call(self, method: str, envs: tuple[int, ...], arguments: dict[str, Any]) -> None:
        """Add a call of the buffer; its values are not copied."""
        self.close_rollout()
        self._start_clock()
        call = BufferCall(method, {"envs": envs, **arguments})
        self._calls.append(call)
        self._n_steps += count_steps(call)
        self._n_bytes += count_bytes(arguments)

    def _start_clock(self) -> None:
        if not self._calls and not self._n_steps:
            self._started_at = time.monotonic()

    def close_rollout(self) -> None:
        """Turn the steps stacked so far into a call."""
        if self._rollout is not None and self._rollout.n_steps:
            self._calls.append(self._rollout.to_call())
        self._rollout = None

    @property
    def is_due(self) -> bool:
        """Whether the block is full, or its first call has waited long enough."""
        is_full = self._n_steps >= self._block_steps or self._n_bytes >= self._block_bytes
        return is_full or time.monotonic() - self._started_at >= self._block_s

    @property
    def has_calls(self) -> bool:
        """Whether there are calls, apart from an open rollout."""
        return bool(self._calls)

    def take(self) -> tuple[list[BufferCall], int]:
        """Remove and return all calls, and the number of steps that they append. Close the rollout first."""
        calls, n_steps = self._calls, self._n_steps
        self._calls, self._n_steps, self._n_bytes = [], 0, 0
        return calls, n_steps
