"""What a window is: which steps around a start belong to it, and which starts an episode has.

Everything here is arithmetic on positions. A position counts an episode's stored steps from 0; a window starts at
its first *learning* step, and its steps lie at ``start + stride * (-burn_in ... length + bootstrap - 1)``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args

import numpy as np
import torch

from trajstore.sampling.index_entries import HAS_FINAL, TERMINATED
from trajstore.schema import Array

Boundary = Literal["strict", "pad_left", "pad_right", "pad_both", "short", "cross"]
Weight = Literal["window", "step", "episode"]
Pad = Literal["repeat", "zero"]
A = TypeVar("A", Array, torch.Tensor)

MAX_STEPS = 1 << 30  # a window that could not be held anyway; sums of a few such numbers fit 64 bits


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True, slots=True)
class Windows:
    """Which windows to draw, and what comes with them.

    Args:
        length: Steps to learn from.
        burn_in: Steps before them, to warm up a recurrent state.
        bootstrap: Steps after them, to bootstrap from.
        stride: Distance between neighbouring steps of a window.
        boundary: What the ``length`` part does at the ends of an episode. ``strict``: it lies inside.
            ``pad_left``, ``pad_right``, ``pad_both``: it may stick out there, as long as one step is inside.
            ``short``: like strict, but an episode too short for that is taken whole and padded. ``cross``: it goes
            on into the next episode of the same environment and stream, as do burn-in and bootstrap; every refresh
            then costs in proportion to all episodes.
        strict_context: Whether burn-in and bootstrap must lie inside as well; otherwise they are padded and masked.
        pad: What stands where there is no step: the nearest one (``repeat``), zeros (``zero``) or a number.
        weight: What is drawn uniformly: a ``window``; a ``step`` (an episode in proportion to its steps, then a
            start in it); or an ``episode`` (then a start in it).
        fields: Fields or groups to read; all by default.
        offsets: Fields to stack on a further axis, with the steps to take relative to each step of the window:
            ``{"observation": (-3, -2, -1, 0)}`` for frame stacks.
        next_fields: Fields to return also as they are after the transition, under ``next``; ``"final"`` for all
            that have a value after the last step.
        n_step: Sum rewards over so many steps, or over a number drawn from an inclusive range for each window.
        gamma: Discount for ``n_step``.
        squeeze: Leave out the axis of the window; for windows of one step.
        provenance: Say also where windows come from, under ``provenance``, ``[batch]`` each: ``rank`` and ``env``
            that hold the episode now, ``source_rank`` and ``source_env`` that recorded it, how it ended (``end``: 0
            open, 1 terminated, 2 truncated, 3 cut), and whether its first steps are gone (``is_headless``).
    """

    length: int = 1
    burn_in: int = 0
    bootstrap: int = 0
    stride: int = 1
    boundary: Boundary = "strict"
    strict_context: bool = False
    pad: Pad | float = "repeat"
    weight: Weight = "window"
    fields: tuple[str, ...] | None = None
    offsets: Mapping[str, Sequence[int]] | tuple[tuple[str, tuple[int, ...]], ...] = ()
    next_fields: tuple[str, ...] | Literal["final"] = ()
    n_step: int | tuple[int, int] | None = None
    gamma: float = 0.99
    squeeze: bool = False
    provenance: bool = False

    @classmethod
    def transitions(cls, n_step: int | tuple[int, int] | None = None, gamma: float = 0.99, **more: Any) -> Windows:
        """Single transitions, without the axis of the window: fields, ``next`` fields, terminated, truncated."""
        return cls(**{"next_fields": "final", "n_step": n_step, "gamma": gamma, "squeeze": True} | more)

    def __post_init__(self) -> None:
        for name, low in (("length", 1), ("burn_in", 0), ("bootstrap", 0), ("stride", 1)):
            value = getattr(self, name)
            if not _is_int(value) or not low <= value <= MAX_STEPS:
                raise ValueError(f"{name}: expected an integer from {low} to {MAX_STEPS}, got {value!r}")
        for name, allowed in (("boundary", get_args(Boundary)), ("weight", get_args(Weight))):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}: expected one of {', '.join(allowed)}, got {getattr(self, name)!r}")
        self._check_values()
        self._settle_names()
        if self.strict_context and self.boundary != "strict":
            raise ValueError(f"strict_context goes with boundary='strict', got {self.boundary!r}")
        if self.squeeze and self.size != 1:
            raise ValueError(f"squeeze goes with windows of one step, got {self.size}")

    def _check_values(self) -> None:
        pad = self.pad in get_args(Pad) if isinstance(self.pad, str) else isinstance(self.pad, (int, float))
        if not pad:
            raise ValueError(f"pad: expected 'repeat', 'zero' or a number, got {self.pad!r}")
        n_step = (1,) if self.n_step is None else self.n_step if isinstance(self.n_step, tuple) else (self.n_step,)
        is_good = len(n_step) in (1, 2) and all(_is_int(n) and 1 <= n <= MAX_STEPS for n in n_step)
        if not is_good or n_step[0] > n_step[-1]:
            raise ValueError(f"n_step: expected a positive number or a rising pair of them, got {self.n_step!r}")
        if not isinstance(self.gamma, (int, float)) or not 0.0 <= self.gamma <= 1.0:
            raise ValueError(f"gamma: expected a number from 0 to 1, got {self.gamma!r}")

    def _settle_names(self) -> None:
        """Take lists and mappings for what are tuples here, so that windows can be compared and hashed."""
        for name in ("fields", "next_fields"):
            value = getattr(self, name)
            if isinstance(value, str) and not (name == "next_fields" and value == "final"):
                raise TypeError(f"{name}: expected a list of names, got the string {value!r}")
            if value is not None and not isinstance(value, str):
                object.__setattr__(self, name, tuple(value))
        pairs = self.offsets.items() if isinstance(self.offsets, Mapping) else self.offsets
        offsets = tuple((name, tuple(steps)) for name, steps in pairs)
        for name, steps in offsets:
            if not steps or not all(_is_int(step) and abs(step) <= MAX_STEPS for step in steps):
                raise ValueError(f"offsets of {name!r}: expected some integers up to {MAX_STEPS}, got {steps!r}")
        object.__setattr__(self, "offsets", offsets)

    @property
    def n_range(self) -> tuple[int, int]:
        """Smallest and largest n of the n-step return."""
        if isinstance(self.n_step, tuple):
            return self.n_step
        n = 1 if self.n_step is None else self.n_step
        return n, n

    @property
    def stacks(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """The offsets, as pairs."""
        assert isinstance(self.offsets, tuple)
        return self.offsets

    @property
    def size(self) -> int:
        """Steps in a window, all parts together."""
        return self.burn_in + self.length + self.bootstrap

    @property
    def reach(self) -> int:
        """Distance from the first to the last learning step."""
        return (self.length - 1) * self.stride

    @property
    def needs_next(self) -> bool:
        """Whether a learning step must have a successor to learn from."""
        return bool(self.next_fields) or self.n_step is not None

    @property
    def is_inside(self) -> bool:
        """Whether every step of every window exists, so that nothing needs padding."""
        return self.boundary == "strict" and (self.strict_context or not (self.burn_in or self.bootstrap))

    @property
    def lead(self) -> int:
        """Steps that must exist before a start."""
        return self.burn_in * self.stride if self.strict_context else 0

    def n_starts(self, n: A) -> A:
        """How many starts an episode of ``n`` usable steps has, elementwise."""
        if self.boundary == "strict":
            outside = (self.burn_in + self.bootstrap) * self.stride if self.strict_context else 0
            return (n - (self.reach + outside)).clip(0)
        if self.boundary == "short":
            whole: A = (n - self.reach).clip(1) * (n > 0)
            return whole
        if self.boundary == "pad_both":
            both: A = n + (self.length - 1) * n.clip(max=self.stride)
            return both
        return n  # cross: as far as the environment's experience goes on

    def start(self, offset: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        """The position of an episode's start number ``offset``."""
        if self.boundary == "pad_left":
            return offset - self.reach
        if self.boundary == "pad_both":
            # Starts before the episode come in groups of a stride; of each, only those that meet a step.
            group = n.clip(max=self.stride)
            n_before = (self.length - 1) * group
            before = offset.div(group, rounding_mode="floor") * self.stride + offset % group - self.reach
            return torch.where(offset < n_before, before, offset - n_before)
        return offset + self.lead


def usable_steps(lengths: A, flags: A, spec: Windows, reward_with_observation: bool) -> A:
    """Steps that a window may learn from: all, or those that have a successor where the window asks for it.

    The last step of a terminated episode needs no successor; that of an episode which was truncated or cut without
    a final row, or is still open, has none to bootstrap from. Rewards that arrive with the next observation are
    lost with it, also at termination.
    """
    if not spec.needs_next:
        return lengths
    good = HAS_FINAL if reward_with_observation else HAS_FINAL | TERMINATED
    usable: A = lengths - 1 + ((flags & good) != 0)
    return usable


def relative(spec: Windows, device: torch.device) -> torch.Tensor:
    """Positions of a window's steps relative to its start."""
    return torch.arange(-spec.burn_in, spec.length + spec.bootstrap, device=device) * spec.stride


def starts_before(spec: Windows, n: int, position: int) -> int:
    """How many of the starts of an episode of ``n`` usable steps lie before a position."""
    count = int(spec.n_starts(np.asarray(n)))
    starts = spec.start(torch.arange(count), torch.tensor(n)) if count else torch.arange(0)
    return int((starts < position).sum())
