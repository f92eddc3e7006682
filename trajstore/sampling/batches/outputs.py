"""Batches as nested dicts or TensorDicts, and output memory that batches reuse."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import torch

from trajstore.arguments import check_positive
from trajstore.errors import MissingExtraError
from trajstore.schema import nest

Batch = dict[str, Any]
"""A batch of windows: tensors ``[batch, window, ...]`` by name, nested as fields are; `Reader` lists the keys.

With ``as_tensordict=True`` it is a TensorDict, which has the same keys.
"""


class Ring:
    """Output memory for ``n`` batches, reused in turn.

    By default every batch is allocated, and the first write to new memory takes several times as long as the copy
    itself. With a ring, passed as ``out=``, batches are written into the same ``n`` sets of tensors:

    ```python
    ring = Ring(2)
    first = reader.sample(256, windows, out=ring)
    second = reader.sample(256, windows, out=ring)  # the third batch will overwrite the first
    ```

    A batch stays valid while ``n - 1`` later batches are requested with the same ring; the next one overwrites it.
    With ``n=2`` you may use the current batch and the one before it. On a GPU, memory is overwritten in stream
    order: work that you enqueued on the current stream before the request still reads the old values.

    Memory is allocated with the first ``n`` batches. Use one ring for each kind of batch: a batch of another size
    or with other `Windows` frees the memory and allocates it again.

    Args:
        n: How many batches the ring holds.
    """

    def __init__(self, n: int = 2) -> None:
        check_positive("n", n)
        self._batches: list[dict[str, torch.Tensor]] = [{} for _ in range(n)]
        self._next = 0
        self._unused: deque[int] = deque()  # reserved before, for batches that were not delivered
        self._kind: object = None

    def __len__(self) -> int:
        return len(self._batches)

    def reserve(self) -> int:
        """Return the slot of the next batch. A batch that is assembled again keeps its slot."""
        if self._unused:
            return self._unused.popleft()
        slot, self._next = self._next, (self._next + 1) % len(self._batches)
        return slot

    def give_back(self, slot: int) -> None:
        """Return a reserved slot whose batch is not delivered; the next batch gets it.

        Without this, a ring would come round to batches that are in use.
        """
        self._unused.append(slot)

    def take(self, slot: int, kind: object) -> dict[str, torch.Tensor]:
        """Return the tensors of a slot by flat key; empty until `give` has stored the slot's first batch.

        ``kind`` identifies the size and kind of batch; if it differs from the last one, all memory is freed.
        """
        if kind != self._kind:
            self._batches, self._kind = [{} for _ in self._batches], kind
        return self._batches[slot]

    def give(self, slot: int, flat: Mapping[str, torch.Tensor]) -> None:
        """Store the tensors of a slot's batch, to be overwritten in its next turn."""
        self._batches[slot] = dict(flat)


def flat_outputs(out: Mapping[str, Any] | None, prefix: str = "") -> dict[str, torch.Tensor]:
    """Return the tensors of a nested batch by flat key, such as ``next/observation``; empty for None."""
    flat: dict[str, torch.Tensor] = {}
    if out is None:
        return flat
    for name, value in out.items():
        if isinstance(value, torch.Tensor):
            flat[prefix + name] = value
        else:
            flat |= flat_outputs(value, f"{prefix}{name}/")
    return flat


def check_outputs(
    outs: Mapping[str, torch.Tensor], shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
) -> None:
    """Check that output tensors fit a batch. Keys without an output tensor are not checked.

    Raises:
        ValueError: A tensor has another shape or dtype, or is not contiguous.
    """
    for key, (shape, dtype) in shapes.items():
        out = outs.get(key)
        if out is None:
            continue
        if out.shape != shape or out.dtype != dtype or not out.is_contiguous():
            order = "" if out.is_contiguous() else ", not contiguous"
            raise ValueError(
                f"out '{key}': expected {dtype} of shape {tuple(shape)}, got {out.dtype} of"
                f" shape {tuple(out.shape)}{order}"
            )


def to_batch(flat: Mapping[str, torch.Tensor], as_tensordict: bool) -> Any:
    """Return a flat batch as a nested dict, or as a TensorDict.

    Raises:
        MissingExtraError: A TensorDict is requested and tensordict is not installed.
    """
    nested = nest(dict(flat))
    if not as_tensordict:
        return nested
    try:
        from tensordict import TensorDict
    except ImportError as error:
        raise MissingExtraError("as_tensordict needs tensordict: pip install tensordict") from error
    return TensorDict(nested, batch_size=[len(flat["index"])])
