"""A replay buffer that takes and returns TorchRL's data format (TED) and stores every observation once."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Unpack

import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data.replay_buffers import Sequence

from trajstore.arguments import parse_bytes
from trajstore.compat.options import ReplayOptionsDict, check_options
from trajstore.compat.private_store import free_private_store, free_with_buffer, private_url
from trajstore.compat.torchrl.ted import Block, assemble, differs, parse
from trajstore.errors import DataError
from trajstore.replay.buffer import ReplayBuffer as Buffer
from trajstore.replay.session_start import Exist
from trajstore.sampling.priorities.priority_options import Priorities
from trajstore.sampling.windows import Boundary, Windows
from trajstore.schema import flatten, nest
from trajstore.writing.staging import staged_rows
from trajstore.writing.validation import StepValidator

_BOUNDARIES: dict[str, Boundary] = {"pad": "pad_right", "stop": "short", "include_reset": "cross"}
_MASKS = {"valid": "validity_mask", "learn": "learning_mask"}
_OWN_OPTIONS = {
    "capacity": "say how many steps to keep with max_size",
    "sample": "say what is drawn with sample_unit",
    "priorities": "draw by priority with alpha and beta",
    "as_tensordict": "batches are always TensorDicts",
}


class ReplayBuffer:
    """A `trajstore.ReplayBuffer` that takes and returns TensorDicts in TorchRL's format (TED).

    Handles (``index``, ``[batch, 3]``) identify rows and are never reused, so a late priority update cannot reach
    another row. Use it as a context manager, or `close` it.

    Args:
        url: A directory or object store; None: rows are kept compressed in RAM.
        max_size: Steps to keep; the oldest are evicted first. None: all steps.
        batch_size: Default batch size of `sample`.
        sample_unit: What is drawn: None for single transitions, `trajstore.Windows`, or TorchRL's `Sequence`.
            Windows come as ``[batch, window]``, with ``learning_mask`` and ``validity_mask``; their options
            ``n_step``, ``offsets`` and ``provenance`` are refused.
        alpha: Draw by priority, with this exponent; None: uniformly.
        beta: Exponent of the weights, or a function of the number of batches so far.
        priority_key: The key that `update_tensordict_priority` reads.
        seed: Seed of the draws.
        device: Device of batches and of the cache of decoded steps.
        exist: What to do with steps of earlier runs, as for `trajstore.ReplayBuffer`: ``"join"`` (the default,
            with a warning), ``"resume"`` or ``"fail"``.
        options: Further options of `trajstore.ReplayBuffer`.

    Attributes:
        memory: The underlying `trajstore.ReplayBuffer`.
    """

    def __init__(
        self,
        url: str | os.PathLike[str] | None = None,
        max_size: int | None = None,
        *,
        batch_size: int | None = None,
        sample_unit: Windows | Sequence | None = None,
        alpha: float | None = None,
        beta: float | Callable[[int], float] = 0.4,
        priority_key: str = "td_error",
        seed: int = 0,
        device: str | torch.device = "cpu",
        exist: Exist | None = None,
        **options: Unpack[ReplayOptionsDict],
    ) -> None:
        check_options(type(self).__init__, options, _OWN_OPTIONS)
        self.batch_size, self.priority_key = batch_size, priority_key
        self._windows = _windows(sample_unit)
        self._private_url = private_url("torchrl") if url is None else None
        self.memory = Buffer(
            os.fspath(url) if url is not None else str(self._private_url),
            capacity=max_size,
            sample=self._windows,
            priorities=None if alpha is None else Priorities(alpha=alpha, beta=beta),
            seed=seed,
            device=str(device),
            exist=exist,
            **options,
        )
        if self._private_url is not None:
            free_with_buffer(self.memory, self._private_url)
        # Of the last row of every lane: the fields under 'next', [B, ...], and whether its episode is still open.
        self._last_next: dict[str, torch.Tensor] = {}
        self._open = torch.zeros(0, dtype=torch.bool)

    # ---- writing

    def extend(self, data: TensorDictBase) -> torch.Tensor:
        """Append rows of TED, ``[T]`` or ``[B, T]`` as collectors return them; lanes continue their open episodes.

        If the first row of a lane differs from ``next`` of the lane's last row, it begins an episode, and the open
        episode ends as truncated.

        Returns:
            Handles of the rows, ``[T, 3]`` or ``[B, T, 3]``.

        Raises:
            DataError: Within a trajectory, ``next`` of a row differs from the following row; or keys differ from
                earlier rows; or there are too many rows for ``buffer_bytes``. Nothing was changed.
        """
        block = parse(data)
        if not block.terminated.numel():
            return torch.empty((*data.batch_size, 3), dtype=torch.int64)
        steps, finals = (
            nest({path: value.transpose(0, 1) for path, value in columns.items()})
            for columns in (block.steps, block.finals)
        )
        if interrupted := self._interrupted_lanes(block):
            self._check_block(steps, finals, block)
            self._end_episodes(interrupted)
        ends = block.terminated | block.truncated
        handles = self.memory.extend(
            steps,
            terminated=block.terminated.T.numpy(),
            truncated=block.truncated.T.numpy(),
            final=finals or None,
        )
        self._last_next = {path: value[:, -1].clone() for path, value in block.finals.items()}
        self._open = ~ends[:, -1]
        stream = self.memory.streams.index(handles.stream)
        episode, t = (torch.from_numpy(x).T for x in (handles.episode, handles.t))
        index = torch.stack([torch.full_like(t, stream), episode, t], -1)
        return index if data.batch_dims == 2 else index[0]

    def add(self, data: TensorDictBase) -> torch.Tensor:
        """Append one row of one lane; returns its handle, ``[3]``."""
        return self.extend(data.unsqueeze(0))[0]

    def _interrupted_lanes(self, block: Block) -> list[int]:
        """Return the lanes whose open episodes the block does not continue."""
        n_lanes = len(block.terminated)
        continues = torch.zeros(len(self._open), dtype=torch.bool)
        continues[:n_lanes] = True
        for path, last in self._last_next.items():
            first = block.steps[path][:, :1] if path in block.steps else None
            n = min(n_lanes, len(last))
            if first is None or first.shape[2:] != last.shape[1:] or first.dtype != last.dtype:
                raise DataError(f"key {path!r}: expected dtype and shape as before, at the root and under 'next'")
            continues[:n] &= ~differs(first[:n], last[:n, None]).cpu()[:, 0]
        interrupted: list[int] = (self._open & ~continues).nonzero()[:, 0].tolist()
        return interrupted

    def _check_block(self, steps: dict[str, Any], finals: dict[str, Any], block: Block) -> None:
        """Refuse a block that `memory` would refuse, before an episode is ended, which cannot be undone."""
        ends = block.terminated | block.truncated
        validator, lead = StepValidator(self.memory.schema), tuple(ends.T.shape)
        validator.steps(steps, lead, finals or None)
        validator.finals(finals or None, lead)
        n_rows = ends.numel() + (int(ends.sum()) if finals else 0)
        assert self.memory.schema is not None  # there are open episodes
        buffer_bytes = parse_bytes(self.memory.options.buffer_bytes, "buffer_bytes")
        max_rows = staged_rows(buffer_bytes, self.memory.schema.row_bytes)
        if n_rows > max_rows:
            raise DataError(f"extend: expected at most {max_rows} rows, got {n_rows}; raise buffer_bytes")

    def _end_episodes(self, lanes: list[int]) -> None:
        for lane in lanes:
            final = nest({path: last[lane] for path, last in self._last_next.items()})
            self.memory.end_episode(lane, truncated=True, final=final or None)
            self._open[lane] = False

    # ---- sampling

    def sample(self, batch_size: int | None = None) -> TensorDict:
        """Draw a batch as TED, with ``index`` and, if drawn by priority, ``priority_weight``."""
        size = self.batch_size if batch_size is None else batch_size
        if size is None:
            raise ValueError("batch_size: expected a number, here or in the constructor, got None")
        return self._to_ted(self.memory.sample(size))

    def __iter__(self) -> Iterator[TensorDict]:
        while True:
            yield self.sample()

    def _to_ted(self, batch: Mapping[str, Any]) -> TensorDict:
        after = flatten(batch["next"]) if "next" in batch else {}
        apart = {"next", "index", "priority", "is_first", "is_last", "is_final", "terminated", "truncated", *_MASKS}
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
        """Set the priorities of a batch's rows to ``priority_key``.

        The priority of a window is the largest of its steps that are valid and learned from.
        """
        if self.memory.options.priorities is None:
            raise ValueError("this buffer has no priorities; create it with alpha=")
        index, priority = data["index"], data[self.priority_key].abs()
        priority = priority.reshape(*data.batch_size, -1).amax(-1)
        if not self._windows.squeeze:
            learned = data["validity_mask"] & data["learning_mask"]
            index, priority = index[:, 0], priority.where(learned, 0).amax(1)
        self.update_priority(index, priority)

    def update_priority(self, index: torch.Tensor, priority: torch.Tensor) -> int:
        """Set priorities by handle; returns how many of the rows were evicted."""
        # A priority of 0 would mean that the row is never drawn again, which a TD error of 0 does not mean.
        return self.memory.update_priorities(index, priority.float().clamp(min=torch.finfo(torch.float32).tiny))

    # ---- durability

    def __len__(self) -> int:
        return len(self.memory)

    def flush(self) -> None:
        """Make all rows durable."""
        self.memory.flush()

    def close(self) -> None:
        """Make all rows durable and release everything; rows without a URL are lost."""
        self.memory.close()
        if self._private_url is not None:
            free_private_store(self._private_url)

    def __enter__(self) -> ReplayBuffer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _windows(unit: Windows | Sequence | None) -> Windows:
    if unit is None:
        return Windows.transitions()
    if isinstance(unit, Windows):
        # In TED, each pair of observations has one reward and one end, all of the same leading shape.
        if odd := [name for name in ("n_step", "offsets", "provenance") if getattr(unit, name)]:
            raise ValueError(
                f"sample_unit: TED cannot express {odd[0]}; use trajstore.ReplayBuffer, or a transform of TorchRL"
                " such as MultiStepTransform"
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
