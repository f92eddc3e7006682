"""What a window is: which steps belong to it, and where it may start in an episode.

Everything here is arithmetic on positions. A position counts the stored steps of an episode from 0. A window starts
at its first *learning* step; its steps lie at ``start + stride * (-burn_in ... length + bootstrap - 1)``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar, get_args

import numpy as np
import torch

from trajstore.sampling.index.index_entries import HAS_FINAL, TERMINATED
from trajstore.schema import Array

Boundary = Literal["strict", "pad_left", "pad_right", "pad_both", "short", "cross"]
Weight = Literal["window", "step", "episode"]
Pad = Literal["repeat", "zero"]
A = TypeVar("A", Array, torch.Tensor)

MAX_STEPS = 1 << 30  # longer windows would not fit in memory, and sums of a few such numbers fit in 64 bits


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True, slots=True)
class Windows:
    """Describes the windows that a batch consists of, and what the batch holds for each of them.

    A window is a fixed number of steps of one episode: ``burn_in`` steps, then ``length`` steps to learn from, then
    ``bootstrap`` steps. Batches have the shape ``[batch, burn_in + length + bootstrap, *field shape]``. Windows are
    immutable and hashable; equal ones share what a reader computes for them.

    ```python
    Windows(length=32, burn_in=8, bootstrap=5)  # sequences for a recurrent network
    Windows.transitions(n_step=3)  # single transitions with 3-step returns
    Windows(offsets={"observation": (-3, -2, -1, 0)}, fields=["action", "reward"])  # stacks of four frames
    ```

    Args:
        length: Number of steps to learn from. Only these are True in the batch's ``learn`` mask.
        burn_in: Number of steps before them, to warm up a recurrent state.
        bootstrap: Number of steps after them, to bootstrap from. After the last step of an episode comes its final
            row, if it has one: fields with a final value hold it there, and the batch's ``is_final`` mask, which
            only windows with ``bootstrap`` have, is True. ``valid`` is False, because no step follows.
        stride: Distance between neighbouring steps of a window.
        boundary: Where the learning steps may lie at the ends of an episode.

            - ``strict``: all inside the episode.
            - ``pad_left``, ``pad_right``, ``pad_both``: at least one inside; the others may lie before the start,
              after the end, or either. Missing steps are padded.
            - ``short``: all inside; an episode that is too short for that has one window, which starts at its first
              step and is padded at the end.
            - ``cross``: windows, burn-in and bootstrap included, continue in the next episode of the same
              environment and stream. Every refresh then costs time proportional to the number of all episodes.
        strict_context: Whether burn-in and bootstrap steps must lie inside the episode, too. If False, missing ones
            are padded and masked. True requires ``boundary="strict"``.
        pad: The values of steps that do not exist: those of the nearest step (``repeat``), zeros (``zero``), or a
            number. They are False in the batch's ``valid`` mask.
        weight: What a draw is uniform over: every ``window``; every ``step`` (draws an episode in proportion to its
            steps, then one of its windows); or every ``episode`` (then one of its windows).
        fields: Fields or groups of fields to read; None for all.
        offsets: Fields to stack along a new axis after the window axis, and which steps to stack, relative to each
            step of the window. Stacks never leave the episode, whose final row belongs to it.
        next_fields: Fields to return also with their values after the transition, under ``next``; stacked fields
            are stacked there as well. ``"final"`` stands for all chosen fields that have a final value or, if none
            has, for those named ``observation`` or ``obs`` and the fields inside them. Where an episode terminated
            and has no final row, the last value is repeated.
        n_step: Number of steps over which to sum rewards, or an inclusive range ``(low, high)`` from which the
            number is drawn for each window. None for no n-step return.
        gamma: Discount factor of the n-step return.
        squeeze: Whether to drop the window axis; only for windows of one step.
        provenance: Whether to return where each window comes from, under ``provenance``, ``[batch]`` each: ``rank``
            and ``env`` that hold the episode now, ``source_rank`` and ``source_env`` that recorded it, ``end`` (how
            it ended: 0 open, 1 terminated, 2 truncated, 3 cut), and ``is_headless`` (its first steps are gone).

    Raises:
        ValueError: A number is out of range, a choice is unknown, or two options contradict each other.
        TypeError: ``fields`` or ``next_fields`` is a string instead of a list of names, or ``offsets`` is no
            mapping of fields to lists of steps.
    """

    length: int = 1
    burn_in: int = 0
    bootstrap: int = 0
    stride: int = 1
    boundary: Boundary = "strict"
    strict_context: bool = False
    pad: Pad | float = "repeat"
    weight: Weight = "window"
    fields: Sequence[str] | None = None
    offsets: Mapping[str, Sequence[int]] | tuple[tuple[str, tuple[int, ...]], ...] = ()
    next_fields: Sequence[str] | Literal["final"] = ()
    n_step: int | tuple[int, int] | None = None
    gamma: float = 0.99
    squeeze: bool = False
    provenance: bool = False

    @classmethod
    def transitions(
        cls,
        n_step: int | tuple[int, int] | None = None,
        gamma: float = 0.99,
        *,
        length: int = 1,
        burn_in: int = 0,
        bootstrap: int = 0,
        stride: int = 1,
        boundary: Boundary = "strict",
        strict_context: bool = False,
        pad: Pad | float = "repeat",
        weight: Weight = "window",
        fields: Sequence[str] | None = None,
        offsets: Mapping[str, Sequence[int]] | tuple[tuple[str, tuple[int, ...]], ...] = (),
        next_fields: Sequence[str] | Literal["final"] = "final",
        squeeze: bool = True,
        provenance: bool = False,
    ) -> Windows:
        """Describe single transitions: fields, ``next`` fields, terminated and truncated, without a window axis.

        The parameters are those of `Windows`. The defaults differ in two: ``next_fields`` is ``"final"`` and
        ``squeeze`` is True.

        Transitions need the observation after them. The last step of a truncated or cut episode without a final
        row, and the newest step of an open one, are therefore not drawn; `Reader.window_stats` counts them.
        """
        return cls(
            length=length,
            burn_in=burn_in,
            bootstrap=bootstrap,
            stride=stride,
            boundary=boundary,
            strict_context=strict_context,
            pad=pad,
            weight=weight,
            fields=fields,
            offsets=offsets,
            next_fields=next_fields,
            n_step=n_step,
            gamma=gamma,
            squeeze=squeeze,
            provenance=provenance,
        )

    def __post_init__(self) -> None:
        for name, low in (("length", 1), ("burn_in", 0), ("bootstrap", 0), ("stride", 1)):
            value = getattr(self, name)
            if not _is_int(value) or not low <= value <= MAX_STEPS:
                raise ValueError(f"{name}: expected an integer from {low} to {MAX_STEPS}, got {value!r}")
        for name, allowed in (("boundary", get_args(Boundary)), ("weight", get_args(Weight))):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}: expected one of {', '.join(allowed)}, got {getattr(self, name)!r}")
        self._check_values()
        self._make_hashable()
        if self.strict_context and self.boundary != "strict":
            raise ValueError(f"strict_context needs boundary='strict', got {self.boundary!r}")
        if self.squeeze and self.size != 1:
            raise ValueError(f"squeeze needs windows of one step, got {self.size} steps")

    def _check_values(self) -> None:
        is_pad = self.pad in get_args(Pad) if isinstance(self.pad, str) else isinstance(self.pad, (int, float))
        if not is_pad:
            raise ValueError(f"pad: expected 'repeat', 'zero' or a number, got {self.pad!r}")
        n_step = (1,) if self.n_step is None else self.n_step if isinstance(self.n_step, tuple) else (self.n_step,)
        is_valid = len(n_step) in (1, 2) and all(_is_int(n) and 1 <= n <= MAX_STEPS for n in n_step)
        if not is_valid or n_step[0] > n_step[-1]:
            raise ValueError(f"n_step: expected a positive integer or a rising pair of them, got {self.n_step!r}")
        if not isinstance(self.gamma, (int, float)) or not 0.0 <= self.gamma <= 1.0:
            raise ValueError(f"gamma: expected a number from 0 to 1, got {self.gamma!r}")

    def _make_hashable(self) -> None:
        """Replace lists and mappings by tuples, so that equal windows have equal hashes."""
        for name in ("fields", "next_fields"):
            value = getattr(self, name)
            if isinstance(value, str) and not (name == "next_fields" and value == "final"):
                raise TypeError(f"{name}: expected a list of names, got the string {value!r}")
            if value is not None and not isinstance(value, str):
                object.__setattr__(self, name, tuple(value))
        object.__setattr__(self, "offsets", _checked_offsets(self.offsets))

    @property
    def n_range(self) -> tuple[int, int]:
        """Smallest and largest number of steps of the n-step return; ``(1, 1)`` if there is none."""
        if isinstance(self.n_step, tuple):
            return self.n_step
        n = 1 if self.n_step is None else self.n_step
        return n, n

    @property
    def stacks(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """``offsets`` as pairs of a field and its offsets."""
        assert isinstance(self.offsets, tuple)
        return self.offsets

    @property
    def size(self) -> int:
        """Number of steps in a window, burn-in and bootstrap included."""
        return self.burn_in + self.length + self.bootstrap

    @property
    def reach(self) -> int:
        """Distance from the first to the last learning step."""
        return (self.length - 1) * self.stride

    @property
    def needs_next(self) -> bool:
        """Whether a step needs a successor to be learned from."""
        return bool(self.next_fields) or self.n_step is not None

    @property
    def is_inside(self) -> bool:
        """Whether every step of every window exists, so that nothing is padded."""
        return self.boundary == "strict" and (self.strict_context or not (self.burn_in or self.bootstrap))

    @property
    def lead(self) -> int:
        """Number of steps that must exist before a window's start."""
        return self.burn_in * self.stride if self.strict_context else 0

    @property
    def start_arithmetic(self) -> tuple[int, int, int] | None:
        """What `n_starts` computes, for the loop ``sum_starts``: shape, reach and stride. None for "cross"."""
        if self.boundary == "strict":
            context = (self.burn_in + self.bootstrap) * self.stride if self.strict_context else 0
            return 0, self.reach + context, 1
        by_boundary = {"short": (1, self.reach, 1), "pad_both": (2, self.length - 1, self.stride), "cross": None}
        return by_boundary.get(self.boundary, (0, 0, 1))

    def n_starts(self, n: A) -> A:
        """Return how many windows start in an episode of ``n`` usable steps, elementwise."""
        if self.boundary == "strict":
            context = (self.burn_in + self.bootstrap) * self.stride if self.strict_context else 0
            return (n - (self.reach + context)).clip(0)
        if self.boundary == "short":
            whole: A = (n - self.reach).clip(1) * (n > 0)
            return whole
        if self.boundary == "pad_both":
            both: A = n + (self.length - 1) * n.clip(max=self.stride)
            return both
        return n  # for "cross" an upper bound: `WindowStarts` takes away the starts at the end of a chain

    def start(self, offset: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        """Return the position where window number ``offset`` of an episode of ``n`` usable steps starts."""
        if self.boundary == "pad_left":
            return offset - self.reach
        if self.boundary == "pad_both":
            # Starts before the episode come in groups of a stride. Of each group, only those count that hit a step.
            group = n.clip(max=self.stride)
            n_before = (self.length - 1) * group
            before = offset.div(group, rounding_mode="floor") * self.stride + offset % group - self.reach
            return torch.where(offset < n_before, before, offset - n_before)
        return offset + self.lead


def _checked_offsets(offsets: object) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """``offsets`` as pairs of a field and its offsets.

    Raises:
        TypeError: It is not a mapping, or an entry is not a list of numbers.
        ValueError: A list is empty, or holds something else than integers.
    """
    pairs = offsets.items() if isinstance(offsets, Mapping) else offsets
    if not isinstance(pairs, Iterable) or isinstance(pairs, str):
        raise TypeError(
            "offsets: expected a mapping of fields to the steps to stack, such as"
            f" {{'observation': (-3, -2, -1, 0)}}, got {offsets!r}"
        )
    checked = []
    for name, steps in pairs:
        if not isinstance(steps, Iterable) or isinstance(steps, str):
            raise TypeError(
                f"offsets of {name!r}: expected a list of steps, such as range(-3, 1) for the newest four, got"
                f" {steps!r}"
            )
        numbers = tuple(steps)
        if not numbers or not all(_is_int(step) and abs(step) <= MAX_STEPS for step in numbers):
            raise ValueError(
                f"offsets of {name!r}: expected at least one integer, of at most {MAX_STEPS}, got {numbers!r}"
            )
        checked.append((name, numbers))
    return tuple(checked)


def usable_steps(lengths: A, flags: A, windows: Windows, reward_with_observation: bool) -> A:
    """Return how many steps of episodes a window may learn from: all, or those with a successor if it needs one.

    The last step of a terminated episode needs no successor. The last step of an episode that is open, or that was
    truncated or cut without a final row, has nothing to bootstrap from. Rewards that arrive with the next
    observation are lost if that was not recorded, also at termination.

    Args:
        lengths: By episode: its steps.
        flags: By episode: its flags in the index.
        windows: The kind of window.
        reward_with_observation: Whether the reward of a step's action is stored with the next observation.
    """
    if not windows.needs_next:
        return lengths
    usable: A = lengths - 1 + ((flags & leading_flags(reward_with_observation)) != 0)
    return usable


def leading_flags(reward_with_observation: bool) -> int:
    """Flags of episodes whose last step a window may learn from, although it needs a successor."""
    return HAS_FINAL if reward_with_observation else HAS_FINAL | TERMINATED


def relative_positions(windows: Windows, device: torch.device) -> torch.Tensor:
    """Return the positions of a window's steps relative to its start."""
    return torch.arange(-windows.burn_in, windows.length + windows.bootstrap, device=device) * windows.stride


def starts_before(windows: Windows, n: int, position: int) -> int:
    """Return how many windows of an episode of ``n`` usable steps start before a position."""
    count = int(windows.n_starts(np.asarray(n)))
    starts = windows.start(torch.arange(count), torch.tensor(n)) if count else torch.arange(0)
    return int((starts < position).sum())
