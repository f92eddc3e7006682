"""The live buffer with a face that users of TorchRL know: TED in and out, observations stored once."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data.replay_buffers import Sequence

from trajstore.compat.options import check_options
from trajstore.compat.private_store import forget, private_url
from trajstore.compat.torchrl.ted import Block, assemble, differs, parse
from trajstore.errors import DataError
from trajstore.replay.buffer import ReplayBuffer as Buffer
from trajstore.sampling.priority_options import Priorities
from trajstore.sampling.windows import Boundary, Windows
from trajstore.schema import flatten, nest
from trajstore.writing.validation import StepValidator

_BOUNDARIES: dict[str, Boundary] = {"pad": "pad_right", "stop": "short", "include_reset": "cross"}
_MASKS = {"valid": "validity_mask", "learn": "learning_mask"}
_OWN = {
    "capacity": "say how many steps to keep with max_size",
    "sample": "say what is drawn with sample_unit",
    "priorities": "draw by priority with alpha and beta",
    "as_tensordict": "batches always are TensorDicts",
}


class ReplayBuffer:
    """A `trajstore.ReplayBuffer` that takes and gives TensorDicts in TorchRL's format (TED).

    Rows are known by handles (``index``, ``[batch, 3]``), which are never used again: an update of priorities that
    comes late can't hit another row. Use it as a context manager, or `close` it.

    Args:
        url: A directory or object store; None: compressed in RAM.
        max_size: Steps to keep; the oldest go first.
        batch_size: Of `sample`, unless it is told otherwise.
        sample_unit: What is drawn: None for single transitions, `trajstore.Windows`, or TorchRL's `Sequence`.
            Windows come as ``[batch, window]``, with ``learning_mask`` and ``validity_mask``; of their options
            ``n_step``, ``offsets`` and ``provenance`` are refused.
        alpha: Draw by priority, with this exponent; None: uniformly.
        beta: Exponent of the weights, or a function of the number of batches so far.
        priority_key: What `update_tensordict_priority` reads.
        seed: Of the draws.
        options: Further ones of `trajstore.ReplayBuffer`.
    """

    def __init__(
        self,
        url: str | os.PathLike[str] | None = None,
        max_size: int | None = None,
        *,
        batch_size: int | None = None,
        sample_unit: Windows | Sequence | None = None,
        alpha: float | None = None,
        beta: Any = 0.4,
        priority_key: str = "td_error",
        seed: int = 0,
        **options: Any,
    ) -> None:
        check_options(type(self).__init__, options, _OWN)
        self.batch_size, self.priority_key = batch_size, priority_key
        self._windows = _windows(sample_unit)
        self._private_url = private_url("torchrl") if url is None else None
        self.memory = Buffer(
            os.fspath(url) if url is not None else str(self._private_url),
            capacity=max_size,
            sample=self._windows,
            priorities=None if alpha is None else Priorities(alpha=alpha, beta=beta),
            seed=seed,
            **options,
        )
        self._last: dict[str, torch.Tensor] = {}  # by field: what follows the last row of every lane, [B, ...]
        self._open = torch.zeros(0, dtype=torch.bool)  # lanes whose last row did not end its episode

    # ---- writing

    def extend(self, data: TensorDictBase) -> torch.Tensor:
        """Append rows of TED, ``[T]`` or ``[B, T]`` as collectors give them; lanes go on where they were.

        A lane whose first row does not hold what followed its last one begins an episode; the one before counts as
        truncated then.

        Returns:
            Handles of the rows, ``[T, 3]`` or ``[B, T, 3]``.

        Raises:
            DataError: Within a trajectory, what follows a row is not what the next row holds, keys are not those of
                the rows before, or there are too many rows for ``buffer_bytes``; nothing was changed.
        """
        block = parse(data)
        if not block.terminated.numel():
            return torch.empty((*data.batch_size, 3), dtype=torch.int64)
        steps, finals = (
            nest({path: value.transpose(0, 1) for path, value in columns.items()})
            for columns in (block.steps, block.finals)
        )
        if left := self._lanes_left(block):
            self._check_block(steps, finals, block)
            self._end(left)
        ends = block.terminated | block.truncated
        handles = self.memory.extend(
            steps,
            terminated=block.terminated.T.numpy(),
            truncated=block.truncated.T.numpy(),
            final=finals or None,
        )
        self._last = {path: value[:, -1].clone() for path, value in block.finals.items()}
        self._open = ~ends[:, -1]
        stream = self.memory.streams.index(handles.stream)
        episode, t = (torch.from_numpy(x).T for x in (handles.episode, handles.t))
        index = torch.stack([torch.full_like(t, stream), episode, t], -1)
        return index if data.batch_dims == 2 else index[0]

    def add(self, data: TensorDictBase) -> torch.Tensor:
        """Append one row of one lane; returns its handle."""
        return self.extend(data.unsqueeze(0))[0]

    def _lanes_left(self, block: Block) -> list[int]:
        """Lanes whose open episodes do not go on."""
        n_lanes = len(block.terminated)
        goes_on = torch.zeros(len(self._open), dtype=torch.bool)
        goes_on[:n_lanes] = True
        for path, last in self._last.items():
            first = block.steps[path][:, :1] if path in block.steps else None
            n = min(n_lanes, len(last))
            if first is None or first.shape[2:] != last.shape[1:] or first.dtype != last.dtype:
                raise DataError(f"key {path!r}: expected it as before, at the root and under 'next'")
            goes_on[:n] &= ~differs(first[:n], last[:n, None]).cpu()[:, 0]
        left: list[int] = (self._open & ~goes_on).nonzero()[:, 0].tolist()
        return left

    def _check_block(self, steps: dict[str, Any], finals: dict[str, Any], block: Block) -> None:
        """Refuse what the memory would refuse, before anything that it could not undo is done."""
        ends = block.terminated | block.truncated
        intake, lead = StepValidator(self.memory.schema), tuple(ends.T.shape)
        intake.steps(steps, lead, finals or None)
        intake.finals(finals or None, lead)
        n_rows = ends.numel() + (int(ends.sum()) if finals else 0)
        with self.memory.session.writer.locked_staging(blocking=True) as staging:
            if staging is not None and n_rows > staging.capacity:
                raise DataError(
                    f"extend: expected at most {staging.capacity} rows, got {n_rows}; raise buffer_bytes"
                )

    def _end(self, lanes: list[int]) -> None:
        for lane in lanes:
            final = nest({path: last[lane] for path, last in self._last.items()})
            self.memory.end_episode(lane, truncated=True, final=final or None)
            self._open[lane] = False

    # ---- sampling

    def sample(self, batch_size: int | None = None) -> TensorDict:
        """Draw a batch, as TED, with ``index`` and, by priority, ``priority_weight``."""
        size = self.batch_size if batch_size is None else batch_size
        if size is None:
            raise ValueError("batch_size: expected one, here or when the buffer is made")
        return self._given(self.memory.sample(size))

    def __iter__(self) -> Iterator[TensorDict]:
        while True:
            yield self.sample()

    def _given(self, batch: Mapping[str, Any]) -> TensorDict:
        after = flatten(batch["next"]) if "next" in batch else {}
        apart = {"next", "index", "priority", "is_first", "is_last", "terminated", "truncated", *_MASKS}
        steps = flatten({name: value for name, value in batch.items() if name not in apart})
        ted = assemble(steps, after, batch["terminated"].unsqueeze(-1), batch["truncated"].unsqueeze(-1))
        if not self._windows.squeeze:
            for name, mask in _MASKS.items():
                ted[mask] = batch[name]
        index = batch["index"]
        ted["index"] = index if self._windows.squeeze else index[:, None].expand(*ted.batch_size, 3)
        if "priority" in batch:
            weight = batch["priority"]["weight"]
            ted["priority_weight"] = weight if self._windows.squeeze else weight[:, None].expand(ted.batch_size)
        return ted

    def update_tensordict_priority(self, data: TensorDictBase) -> None:
        """Set the priorities of what was drawn to ``priority_key``; of windows, to the largest of valid steps."""
        if self.memory.options.priorities is None:
            raise ValueError("this buffer has no priorities; make it with alpha=")
        index, priority = data["index"], data[self.priority_key].abs()
        priority = priority.reshape(*data.batch_size, -1).amax(-1)
        if not self._windows.squeeze:
            learned = data["validity_mask"] & data["learning_mask"]
            index, priority = index[:, 0], priority.where(learned, 0).amax(1)
        self.update_priority(index, priority)

    def update_priority(self, index: torch.Tensor, priority: torch.Tensor) -> int:
        """Set priorities by handle; returns how many rows were gone."""
        # Exactly 0 would mean never again, which no TD error means.
        return self.memory.update_priorities(index, priority.float().clamp(min=torch.finfo(torch.float32).tiny))

    # ---- the rest

    def __len__(self) -> int:
        return len(self.memory)

    def flush(self) -> None:
        """Make everything durable."""
        self.memory.flush()

    def close(self) -> None:
        """Make everything durable and release it; what is in RAM only is gone."""
        self.memory.close()
        if self._private_url is not None:
            forget(self._private_url)

    def __enter__(self) -> ReplayBuffer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _windows(unit: Windows | Sequence | None) -> Windows:
    if unit is None:
        return Windows.transitions()
    if isinstance(unit, Windows):
        # TED has one reward and one end for each pair of observations, of one shape.
        if odd := [name for name in ("n_step", "offsets", "provenance") if getattr(unit, name)]:
            raise ValueError(
                f"sample_unit: {odd[0]} has no place in TED; use trajstore.ReplayBuffer, or a transform of"
                " TorchRL's such as MultiStepTransform"
            )
        return replace(unit, next_fields=unit.next_fields or "final")
    return Windows(
        length=unit.length,
        burn_in=unit.burn_in,
        bootstrap=unit.bootstrap,
        stride=unit.dilation,
        boundary=_BOUNDARIES[unit.episode_boundary],
        next_fields="final",
    )
