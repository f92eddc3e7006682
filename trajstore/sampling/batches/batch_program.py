"""What a batch of one kind of window consists of: which rows of which columns go to which output.

A program is made once for a schema and a kind of window. The executors carry it out, batch after batch, and give
bit by bit the same: `torch_executor` with tensor operations on any device, which is the reference, and
`compiled_executor` with compiled loops on the CPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from trajstore.errors import DataError
from trajstore.sampling.index.index_entries import HAS_FINAL, TERMINATED
from trajstore.sampling.windows import Windows
from trajstore.schema import RESERVED, Field, Schema, observation_paths, selected_paths

MASKS = ("valid", "learn", "is_first", "is_last", "terminated", "truncated")
FINAL_MASK = "is_final"  # in batches whose windows have bootstrap steps
N_STEP = ("n_step/return", "n_step/discount", "n_step/n")
PER_WINDOW_KEYS = frozenset(  # keys of a batch with one value for each window, not for each of its steps
    (
        *("index", "priority/weight", "priority/probability"),
        *("hindsight/relabelled", "hindsight/goal_index"),
        *(f"provenance/{name}" for name in ("rank", "env", "source_rank", "source_env", "end", "is_headless")),
    )
)
_BFLOAT16_MAX = 3.3895313892515355e38

Origin = Literal["step", "observed", "reached"]


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Outputs that are read from the same rows.

    Row ``k`` of step ``j`` lies at the position ``origin + offsets[k]`` of the episode, moved to the nearest row
    that it may come from: at least 0, and at most the last step, or the last row if the group ``reaches_final``.

    Attributes:
        fields: Paths of fields, by output key.
        origin: The position that offsets count from: ``step``, the step itself or the nearest step that exists;
            ``observed``, the same, but the final row follows the last step; or ``reached``, where the transition of
            the step leads.
        offsets: Distances from the origin; ``(0,)`` for a group that is not stacked.
        is_stacked: Whether outputs have an axis for the offsets.
        reaches_final: Whether rows may be the final row of the episode.
        is_padded: Whether rows that do not exist are padded. A row exists if its origin exists and it was not
            moved. A row that was moved exists as well if its origin is ``reached`` and it lies at most there: a
            next observation that was not recorded repeats the last one.
    """

    fields: Mapping[str, str]
    origin: Origin
    offsets: tuple[int, ...] = (0,)
    is_stacked: bool = False
    reaches_final: bool = False
    is_padded: bool = False


@dataclass(frozen=True, slots=True)
class NStep:
    """How rewards are summed: group number ``group`` holds the next ``n`` rewards of each step.

    Attributes:
        group: The group of the rewards. It has one field, under the key ``n_step/return``.
        gamma: Powers of the discount factor, from 0 to the largest number of steps, in float32.
    """

    group: int
    gamma: torch.Tensor


@dataclass(frozen=True, slots=True)
class BatchProgram:
    """Everything that batches of one kind have in common.

    Attributes:
        windows: The kind of window.
        groups: The rows to read.
        n_step: The sums of rewards; None if there are none.
        leads_on: Flags of episodes, one of which the episode must have for its last step to have a successor.
    """

    windows: Windows
    groups: tuple[RowGroup, ...]
    n_step: NStep | None
    leads_on: int

    @classmethod
    def of(cls, schema: Schema, windows: Windows) -> BatchProgram:
        """Make the program of a kind of window.

        Raises:
            DataError: The windows ask for something that the schema does not have, or can not hold.
        """
        _check(schema, windows)
        groups = tuple(_field_groups(schema, windows) + _next_groups(schema, windows))
        n_step = None
        if windows.n_step is not None:
            assert schema.reward is not None
            shift, most = int(schema.reward_alignment == "observation"), windows.n_range[1]
            rewards = RowGroup(
                {"n_step/return": schema.reward},
                "step",
                tuple(range(shift, shift + most)),
                is_stacked=True,
                reaches_final=True,
            )
            groups = *groups, rewards
            n_step = NStep(len(groups) - 1, torch.pow(windows.gamma, torch.arange(most + 1)))
        leads_on = HAS_FINAL if schema.reward_alignment == "observation" else HAS_FINAL | TERMINATED
        return cls(windows, groups, n_step, leads_on)

    @property
    def most_steps(self) -> int:
        """The largest number of rewards that a step sums; 0 if it sums none."""
        return 0 if self.n_step is None else self.windows.n_range[1]

    @property
    def has_final_mask(self) -> bool:
        """Whether batches have the mask ``is_final``."""
        return self.windows.bootstrap > 0


def _field_groups(schema: Schema, windows: Windows) -> list[RowGroup]:
    stacks = _stacks(schema, windows)
    stacked = {path for paths, _ in stacks for path in paths}
    plain = [path for path in selected_paths(schema, windows.fields) if path not in stacked]
    is_padded = not windows.is_inside
    groups = []
    for paths, has_final in _split_by_final(schema, plain) if windows.bootstrap else [(plain, False)]:
        origin: Origin = "observed" if has_final else "step"
        groups.append(RowGroup(_same_keys(paths), origin, reaches_final=has_final, is_padded=is_padded))
    for paths, offsets in stacks:
        may_reach_final = windows.bootstrap > 0 or max(offsets) > 0
        for chosen, has_final in _split_by_final(schema, paths) if may_reach_final else [(paths, False)]:
            origin = "observed" if has_final and windows.bootstrap else "step"
            groups.append(
                RowGroup(
                    _same_keys(chosen), origin, offsets, is_stacked=True, reaches_final=has_final, is_padded=True
                )
            )
    return [group for group in groups if group.fields]


def _next_groups(schema: Schema, windows: Windows) -> list[RowGroup]:
    wanted, stacks = next_paths(schema, windows), _stacks(schema, windows)
    stacked = {path for paths, _ in stacks for path in paths}
    groups = [
        RowGroup({f"next/{path}": path for path in paths}, "reached", reaches_final=has_final)
        for paths, has_final in _split_by_final(schema, [path for path in wanted if path not in stacked])
    ]
    for paths, offsets in stacks:
        for chosen, has_final in _split_by_final(schema, [path for path in wanted if path in paths]):
            keys = {f"next/{path}": path for path in chosen}
            groups.append(
                RowGroup(keys, "reached", offsets, is_stacked=True, reaches_final=has_final, is_padded=True)
            )
    return groups


def _stacks(schema: Schema, windows: Windows) -> list[tuple[list[str], tuple[int, ...]]]:
    """The fields of each stack, and its offsets; a field that is stacked twice belongs to the last one."""
    found = [(selected_paths(schema, [name]), steps) for name, steps in windows.stacks]
    last = {path: i for i, (paths, _) in enumerate(found) for path in paths}
    return [([path for path in paths if last[path] == i], steps) for i, (paths, steps) in enumerate(found)]


def _same_keys(paths: Iterable[str]) -> dict[str, str]:
    return {path: path for path in paths}


def _split_by_final(schema: Schema, paths: Iterable[str]) -> list[tuple[list[str], bool]]:
    """The fields without and those with a final value, where there are any."""
    split: tuple[list[str], list[str]] = ([], [])
    for path in paths:
        split[schema[path].final].append(path)
    return [(found, bool(i)) for i, found in enumerate(split) if found]


def next_paths(schema: Schema, windows: Windows) -> list[str]:
    """Paths of the fields that a batch also holds as they are after the transition.

    Raises:
        DataError: The windows name none, and it can not be guessed which fields are observations.
    """
    if windows.next_fields != "final":
        return selected_paths(schema, windows.next_fields)
    names = None if windows.fields is None else (*windows.fields, *(name for name, _ in windows.stacks))
    chosen = selected_paths(schema, names)
    found = [path for path in chosen if schema[path].final] or observation_paths(chosen)
    if not found:
        example = next((path for path in chosen if path not in ("action", schema.reward)), "state")
        raise DataError(
            "next_fields='final': no chosen field has a final value or is named observation or obs; name the fields"
            f" whose next values you want, as in Windows.transitions(next_fields=({example!r},)); the chosen fields"
            f" are {', '.join(chosen) or 'none'}"
        )
    return found


def _check(schema: Schema, windows: Windows) -> None:
    stacked = [path for name, _ in windows.stacks for path in selected_paths(schema, [name])]
    for path in {*selected_paths(schema, windows.fields), *stacked}:
        if path.split("/")[0] in RESERVED:
            raise DataError(
                f"field '{path}': batches hold something else under that name; leave it out with fields="
            )
        if isinstance(windows.pad, (int, float)):
            _check_pad(path, schema[path], windows.pad)
    if windows.n_step is not None:
        if schema.reward is None:
            raise DataError("n_step: the schema has no reward field")
        if math.prod(schema[schema.reward].shape) != 1:
            shape = schema[schema.reward].shape
            raise DataError(f"n_step: field '{schema.reward}' has shape {shape}, expected one number for each step")


def _check_pad(path: str, field: Field, pad: float) -> None:
    """Check that the field's dtype can represent the padding value.

    Raises:
        DataError: It can not.
    """
    kind = field.storage_dtype.kind
    low, high = (0, 1) if kind == "b" else (-math.inf, math.inf)
    if kind in "iu":
        low, high = np.iinfo(field.storage_dtype).min, np.iinfo(field.storage_dtype).max
    is_float = kind == "f" or field.dtype == "bfloat16"
    if is_float and math.isfinite(pad):
        largest = _BFLOAT16_MAX if field.dtype == "bfloat16" else float(np.finfo(field.storage_dtype).max)
        if abs(pad) > largest:
            raise DataError(f"pad: field '{path}' of {field.dtype} can't hold {pad!r}")
    if not is_float and not (float(pad).is_integer() and low <= pad <= high):
        raise DataError(f"pad: field '{path}' of {field.dtype} can't hold {pad!r}")
