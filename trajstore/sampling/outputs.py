"""Batches as users see them: nested dicts or TensorDicts, fresh or written into memory that is used again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from trajstore.arguments import check_positive
from trajstore.errors import MissingExtraError
from trajstore.schema import nest

Batch = dict[str, Any]


class Ring:
    """Output memory that ``n`` batches share in turn.

    Pass it as ``out=``. A batch is valid until ``n - 1`` further ones were made with the same ring; then its memory
    is written again. On a GPU that happens in stream order, so work that was enqueued on the current stream before
    is done by then. Each ring serves one kind of batch; another size or kind gets new memory.
    """

    def __init__(self, n: int = 2) -> None:
        check_positive("n", n)
        self._batches: list[dict[str, torch.Tensor]] = [{} for _ in range(n)]
        self._next = 0
        self._kind: object = None

    def __len__(self) -> int:
        return len(self._batches)

    def reserve(self) -> int:
        """The place of the next batch, however often that is made."""
        slot, self._next = self._next, (self._next + 1) % len(self._batches)
        return slot

    def take(self, slot: int, kind: object) -> dict[str, torch.Tensor]:
        """The memory of a place, by flat key; empty the first time round, to be filled by `give`."""
        if kind != self._kind:
            self._batches, self._kind = [{} for _ in self._batches], kind
        return self._batches[slot]

    def give(self, slot: int, flat: Mapping[str, torch.Tensor]) -> None:
        self._batches[slot] = dict(flat)


def flat_outputs(out: Mapping[str, Any] | None, prefix: str = "") -> dict[str, torch.Tensor]:
    """The tensors of an earlier batch, by flat key."""
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
    """Refuse output tensors that the batch does not fit; what is not given is made fresh.

    Raises:
        ValueError: One has another shape or dtype, or is not contiguous.
    """
    for key, (shape, dtype) in shapes.items():
        given = outs.get(key)
        if given is None:
            continue
        if given.shape != shape or given.dtype != dtype or not given.is_contiguous():
            layout = "" if given.is_contiguous() else ", not contiguous"
            raise ValueError(
                f"out '{key}': expected {dtype} of shape {tuple(shape)}, got {given.dtype} of"
                f" shape {tuple(given.shape)}{layout}"
            )


def to_batch(flat: Mapping[str, torch.Tensor], as_tensordict: bool) -> Any:
    """A nested dict, or a TensorDict."""
    nested = nest(dict(flat))
    if not as_tensordict:
        return nested
    try:
        from tensordict import TensorDict
    except ImportError as error:
        raise MissingExtraError("as_tensordict needs tensordict: pip install 'trajstore[tensordict]'") from error
    return TensorDict(nested, batch_size=[len(flat["index"])])
