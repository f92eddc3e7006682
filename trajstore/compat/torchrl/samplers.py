"""Samplers for TorchRL's buffers: uniform draws of windows, and draws by priority with exact sums."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torchrl.data import find_start_stop_traj
from torchrl.data.replay_buffers import PrioritizedSampler, Sampler

from trajstore.errors import DataError, NotReadyError
from trajstore.sampling.priorities.sum_tree import NO_POSITIVE_MASS, SumTree
from trajstore.sampling.windows import Windows, relative_positions

Key = str | tuple[str, ...]
_MAX_TOTAL = 1 << 61  # of all masses
_WITHOUT_EFFECT = (  # options of `Windows` that do not affect which rows are chosen
    "n_step",
    "fields",
    "offsets",
    "next_fields",
    "provenance",
    "weight",
    "pad",
)


class WindowSampler(Sampler):  # type: ignore[misc]
    """Draws windows that lie within episodes; all windows are equally likely, rather than all episodes.

    Batches are flat, ``[batch * window]`` rows, as with TorchRL's `SliceSampler`; ``batch_size`` of the buffer
    counts rows. ``validity_mask`` says which rows are not padding, ``learning_mask`` which are neither burn-in nor
    bootstrap.

    Args:
        windows: Length, burn-in, bootstrap, stride and boundary (not ``cross``). Other options are refused, because
            a sampler only chooses rows.
        end_key: Key of the rows' flag that an episode ends.
        traj_key: Key of the rows' episode id; if given, ``end_key`` is not used.
        seed: Seed of the draws, unless the buffer has a generator.
    """

    def __init__(
        self, windows: Windows, *, end_key: Key = ("next", "done"), traj_key: Key | None = None, seed: int = 0
    ) -> None:
        if windows.boundary == "cross":
            raise ValueError("boundary: expected windows that stay within episodes, got 'cross'")
        if odd := [name for name in _WITHOUT_EFFECT if getattr(windows, name) != getattr(Windows(), name)]:
            raise ValueError(
                f"windows: WindowSampler only chooses rows, so {', '.join(odd)} would have no effect; use"
                " trajstore.ReplayBuffer, or a transform of TorchRL such as MultiStepTransform"
            )
        self._windows, self._end_key, self._traj_key = windows, end_key, traj_key
        self._own_rng = torch.Generator().manual_seed(seed)
        self._found: tuple[Any, int, tuple[torch.Tensor, ...]] | None = None

    def sample(self, storage: Any, batch_size: int) -> tuple[Any, dict[Any, torch.Tensor]]:
        size = self._windows.size
        if batch_size % size:
            raise DataError(f"batch_size: expected a multiple of the {size} rows of a window, got {batch_size}")
        first, lengths, lanes, starts = self._episodes(storage)
        if not len(starts) or not int(starts[-1]):
            raise NotReadyError(f"no episode has a window of {self._windows.length} steps; write more rows first")
        drawn = torch.randint(int(starts[-1]), (batch_size // size,), generator=self._rng or self._own_rng)
        episode = torch.searchsorted(starts, drawn, right=True)
        offset = drawn - torch.where(episode > 0, starts[episode - 1], 0)
        start = self._windows.start(offset, lengths[episode])
        steps = relative_positions(self._windows, start.device)
        position = start[:, None] + steps
        inside = position.clamp(min=0).minimum(lengths[episode, None] - 1)
        time = (first[episode, None] + inside) % storage.shape[0]
        learns = (steps >= 0) & (steps <= self._windows.reach)
        info = {
            "validity_mask": (position == inside).flatten(),
            "learning_mask": learns.repeat(len(drawn)),
        }
        others = [lane[episode].repeat_interleave(size) for lane in lanes.T]
        return (time.flatten(), *others) if others else time.flatten(), info

    def _episodes(self, storage: Any) -> tuple[torch.Tensor, ...]:
        """Return first rows, lengths, lanes and running sums of window starts of all episodes.

        They are computed again only when the storage has changed.
        """
        revision = storage._mutation_revision
        if self._found is None or self._found[0] is not storage or self._found[1] != revision:
            self._found = storage, revision, self._find(storage) if len(storage) else (torch.empty(0),) * 4
        return self._found[2]

    def _find(self, storage: Any) -> tuple[torch.Tensor, ...]:
        values = storage[:][self._end_key if self._traj_key is None else self._traj_key].clone()
        values = values.reshape(storage.shape)
        which = {"end": values.bool()} if self._traj_key is None else {"trajectory": values}
        start, _, lengths = find_start_stop_traj(
            **which, at_capacity=storage._is_full, cursor=storage._last_cursor_index
        )
        starts = self._windows.n_starts(lengths).cumsum(0)
        return start[:, 0].cpu(), lengths.cpu(), start[:, 1:].cpu(), starts.cpu()

    def _empty(self) -> None:
        self._found = None

    def state_dict(self) -> dict[str, Any]:
        return {"rng": self._own_rng.get_state()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._own_rng.set_state(state_dict["rng"])

    def dumps(self, path: str | os.PathLike[str]) -> None:
        Path(path).mkdir(exist_ok=True)
        np.save(Path(path) / "rng.npy", self._own_rng.get_state().numpy(), allow_pickle=False)

    def loads(self, path: str | os.PathLike[str]) -> None:
        self._own_rng.set_state(torch.from_numpy(np.load(Path(path) / "rng.npy", allow_pickle=False)))


class PrioritisedSampler(PrioritizedSampler):  # type: ignore[misc]
    """Draws in proportion to ``(priority + eps) ** alpha``, with exact sums.

    It replaces TorchRL's `PrioritizedSampler` and does not need the compiled part of TorchRL. Sums do not drift, a
    row of priority 0 is never drawn if eps is 0, and raw priorities are kept, so ``alpha`` may change at any time.
    The sampler has its own generator.

    Args:
        max_capacity: Number of rows that the storage may hold.
        alpha: Exponent of the priorities.
        beta: Exponent of the weights that correct the bias.
        eps: Added to priorities.
        reduction: How several priorities of a row become one: ``max``, ``min``, ``median`` or ``mean``.
        seed: Seed of the draws, unless the buffer has a generator.
    """

    def __init__(
        self,
        max_capacity: int,
        alpha: float,
        beta: float,
        eps: float = 1e-8,
        reduction: str = "max",
        *,
        seed: int = 0,
    ) -> None:
        self._own_rng = torch.Generator().manual_seed(seed)
        super().__init__(max_capacity, alpha, beta, eps, reduction=reduction, device="cpu")

    def _init(self) -> None:
        self._raw = torch.full((self._max_capacity,), -1.0, dtype=torch.float64)  # below 0: the slot holds no row
        self._top = 1.0  # the largest mass before scaling; in the tree masses are integers
        self._largest = 1.0
        self._sum_tree = SumTree(torch.device("cpu"), with_min=True)
        self._sum_tree.resize(self._max_capacity)

    _empty = _init

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def default_priority(self) -> float:
        """The priority of new rows: the largest so far."""
        return self._largest

    @property
    def alpha(self) -> float:
        return float(self._alpha)

    @alpha.setter
    def alpha(self, value: float) -> None:
        if value < 0:
            raise ValueError(f"alpha: expected a number of at least 0, got {value}")
        self._alpha = value
        self._rebuild()

    def _rebuild(self) -> None:
        masses = self._masses(self._raw.clamp(min=0))
        self._top = max(float(masses[self._raw >= 0].amax()) if (self._raw >= 0).any() else 1.0, 1e-300)
        self._sum_tree.rebuild(self._whole(masses).where(self._raw >= 0, 0))

    def _masses(self, priority: torch.Tensor) -> torch.Tensor:
        masses: torch.Tensor = (priority + self._eps).pow(self._alpha)
        return masses

    def _whole(self, masses: torch.Tensor) -> torch.Tensor:
        scaled = (masses * (_MAX_TOTAL / self._max_capacity / self._top)).to(torch.int64)
        whole: torch.Tensor = scaled.clamp(min=1).where(masses > 0, 0)
        return whole

    def sample(self, storage: Any, batch_size: int) -> tuple[Any, dict[str, torch.Tensor]]:
        total = int(self._sum_tree.total)
        if not total:
            raise NotReadyError("no row can be drawn; write rows with priorities above 0")
        drawn = torch.randint(total, (batch_size,), generator=self._rng or self._own_rng)
        index = self._sum_tree.find(drawn)
        smallest = int(self._sum_tree.smallest)
        assert smallest != NO_POSITIVE_MASS  # because the total is positive
        weight = (self._sum_tree.get(index).double() / smallest).pow(-self._beta).float()
        places = torch.unravel_index(index, storage.shape) if storage.ndim > 1 else index
        return places, {"priority_weight": weight}

    def update_priority(self, index: Any, priority: Any, *, storage: Any = None) -> None:
        """Set priorities of slots; slots below 0, of rows that were not written, are ignored.

        Raises:
            DataError: A priority is below 0 or not finite; nothing was changed.
        """
        slots = _slots(index, storage)
        values = torch.as_tensor(priority).detach().cpu().double().reshape(-1).expand(len(slots))
        slots, values = slots[slots >= 0], values[slots >= 0]
        if not bool((values.isfinite() & (values >= 0)).all()):
            raise DataError("priority: expected finite numbers of at least 0")
        if len(slots):
            self._largest = max(self._largest, float(values.amax()))
            self._set(slots, values)

    def _set(self, slots: torch.Tensor, values: torch.Tensor) -> None:
        self._raw[slots] = values
        values = self._raw[slots]  # if a slot is named twice, one of its values counts
        masses = self._masses(values)
        if float(masses.amax()) > self._top:
            self._rebuild()
        else:
            self._sum_tree.put(slots, self._whole(masses))

    def add(self, index: Any) -> None:
        pass  # TorchRL calls `mark_update` after this

    extend = add

    def state_dict(self) -> dict[str, Any]:
        numbers = {"alpha": self._alpha, "beta": self._beta, "eps": self._eps, "largest": self._largest}
        return {**numbers, "priority": self._raw.clone(), "rng": self._own_rng.get_state()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a saved state.

        Raises:
            DataError: The state has priorities of slots that this sampler does not have.
        """
        priority = torch.as_tensor(state_dict["priority"])
        if len(priority) > self._max_capacity and bool((priority[self._max_capacity :] >= 0).any()):
            raise DataError(f"max_capacity: expected at least {len(priority)}, got {self._max_capacity}")
        self._init()
        n = min(len(priority), self._max_capacity)
        self._raw[:n] = priority[:n]
        self._alpha, self._beta, self._eps = (state_dict[name] for name in ("alpha", "beta", "eps"))
        self._largest = state_dict["largest"]
        self._own_rng.set_state(torch.as_tensor(state_dict["rng"]))
        self._rebuild()

    def dumps(self, path: str | os.PathLike[str]) -> None:
        Path(path).mkdir(exist_ok=True)
        state = self.state_dict()
        for name in ("priority", "rng"):
            np.save(Path(path) / f"{name}.npy", state.pop(name).numpy(), allow_pickle=False)
        (Path(path) / "sampler_metadata.json").write_text(json.dumps(state))

    def loads(self, path: str | os.PathLike[str]) -> None:
        state = json.loads((Path(path) / "sampler_metadata.json").read_text())
        arrays = {name: np.load(Path(path) / f"{name}.npy", allow_pickle=False) for name in ("priority", "rng")}
        self.load_state_dict(state | {name: torch.from_numpy(array) for name, array in arrays.items()})


def _slots(index: Any, storage: Any) -> torch.Tensor:
    """Return flat slot numbers, counted over all dimensions of the storage."""
    if isinstance(index, tuple):
        index = torch.stack([torch.as_tensor(part) for part in index], -1)
    slots: torch.Tensor = torch.as_tensor(index, dtype=torch.int64).cpu()
    if storage is None or storage.ndim == 1:
        return slots.reshape(-1)
    first, *others = slots.reshape(-1, storage.ndim).unbind(-1)
    for size, place in zip(storage.shape[1:], others, strict=True):
        first = first * size + place
    return first
