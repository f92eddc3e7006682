"""Converts TorchRL's episode data (TED) to episodes that hold every observation once, and back.

A row of TED has the observation of a step at its root and the following one under ``next``. Within a trajectory,
``next`` of a row equals the root of the following row; this is checked bit by bit. So only the last ``next`` of a
trajectory is stored.

| key of TED                              | field                                     |
|-----------------------------------------|-------------------------------------------|
| at the root and under ``next``          | the same name, with a final value         |
| at the root only                        | the same name                             |
| under ``next`` only, a reward           | the same name                             |
| under ``next`` only, any other key      | the same name, in the group ``after``     |
| ``done``, ``terminated``, ``truncated`` | not a field: they say how an episode ends |
| ``index``, which buffers add            | not stored                                |
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, is_tensor_collection

from trajstore.errors import DataError
from trajstore.schema import RESERVED, flatten, nest

FLAGS = ("done", "terminated", "truncated")
_IDS = "collector/traj_ids"
_AFTER = "after"  # group of the keys that are only under next
_DROPPED = {"index", *FLAGS}
_INTEGERS = {
    1: torch.int8,
    2: torch.int16,
    4: torch.int32,
    8: torch.int64,
}  # by size, to compare bits

Columns = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Block:
    """Rows of TED by lane and time; a lane is one environment of the data.

    Attributes:
        steps: Fields, ``[B, T, ...]``.
        finals: For fields with a final value, the value after each step, ``[B, T, ...]``.
        terminated: Whether an episode ends in a terminal state, ``[B, T]``.
        truncated: Whether an episode is stopped, or another one follows although it did not end, ``[B, T]``.
    """

    steps: Columns
    finals: Columns
    terminated: torch.Tensor
    truncated: torch.Tensor


@dataclass(frozen=True)
class TedEpisode:
    """One trajectory in the form that `Writer.append_episode` takes.

    Attributes:
        data: Nested fields; fields with a final value have ``n_steps`` + 1 rows, others ``n_steps``.
        n_steps: Number of steps.
        terminated: It ended in a terminal state.
        truncated: It was stopped. If it is neither terminated nor truncated, the recording was cut.
    """

    data: dict[str, Any]
    n_steps: int
    terminated: bool
    truncated: bool


def ted_to_episodes(data: TensorDictBase) -> list[TedEpisode]:
    """Divide TED, ``[T]`` or ``[B, T]``, into episodes.

    An episode ends where ``("next", "done")`` is set, where ``("collector", "traj_ids")`` changes, and at the end
    of the data. The key ``index``, which buffers add to batches, is left out.

    Raises:
        DataError: Within a trajectory, ``next`` of a row differs from the root of the following row; or a key has a
            name under which it could not be restored.
    """
    return list(_episodes(parse(data)))


def parse(data: TensorDictBase) -> Block:
    """Check TED and convert it to fields; see `ted_to_episodes`."""
    if not is_tensor_collection(data) or data.batch_dims not in (1, 2) or "next" not in data.keys():  # noqa: SIM118
        raise DataError(f"expected a TensorDict [T] or [B, T] with a key 'next', got {_describe(data)}")
    data = data if data.batch_dims == 2 else data.unsqueeze(0)
    root, after = _columns(data.exclude("next")), _columns(data["next"])
    both = {path: root[path] for path in root if path in after and path not in FLAGS}
    only = {path: value for path, value in after.items() if path not in {*both, *FLAGS}}
    steps = {path: value for path, value in root.items() if path not in _DROPPED}
    _check_root(steps, both)
    steps |= {_field_after(path): value for path, value in only.items()}
    if reserved := next((path for path in steps if path.split("/")[0] in RESERVED), None):
        raise DataError(f"key {reserved!r}: batches use this name for something else; rename or exclude it")
    terminated, truncated = _ends(after, data.batch_size)
    truncated = truncated | (_id_changes(root, truncated) & ~terminated)
    finals = {path: after[path] for path in both}
    _check_consistent(both, finals, terminated | truncated)
    return Block(steps, finals, terminated, truncated)


def _check_root(root: Columns, both: Columns) -> None:
    """Refuse a key at the root that would be restored under ``next``."""
    for path in root:
        if path.split("/")[0] == _AFTER or (path not in both and _is_reward(path)):
            raise DataError(f"key {path!r}: expected this name only under 'next'; rename or exclude it")


def _field_after(path: str) -> str:
    """Return the field of a key that is only under ``next``."""
    return path if _is_reward(path) and path.split("/")[0] != _AFTER else f"{_AFTER}/{path}"


def _belongs_to_next(path: str) -> bool:
    """Return whether a field without a final value was only under ``next``."""
    return _is_reward(path) or path.startswith(f"{_AFTER}/")


def _columns(data: TensorDictBase) -> Columns:
    keys = {key: (key,) if isinstance(key, str) else key for key in data.keys(True, True)}
    if odd := next((key for key, parts in keys.items() if any("/" in part for part in parts)), None):
        raise DataError(f"key {odd!r}: expected names without '/'")
    columns = {"/".join(parts): data[key] for key, parts in keys.items()}
    if odd := next((path for path, value in columns.items() if not isinstance(value, torch.Tensor)), None):
        raise DataError(f"key {odd!r}: expected a tensor, got {type(columns[odd]).__name__}")
    return columns


def _describe(data: Any) -> str:
    shape = f" of batch size {tuple(data.batch_size)}" if is_tensor_collection(data) else ""
    return f"{type(data).__name__}{shape}"


def _is_reward(path: str) -> bool:
    return path.split("/")[-1] == "reward"


def _ends(after: Columns, shape: torch.Size) -> tuple[torch.Tensor, torch.Tensor]:
    """Return terminated and truncated, ``[B, T]``; ``done`` alone counts as terminated, as in TorchRL."""
    none = torch.zeros(shape, dtype=torch.bool)
    done, terminated, truncated = (
        _flat(after[name]).bool().any(-1).cpu() if name in after else none for name in FLAGS
    )
    return terminated | (done & ~truncated), truncated


def _id_changes(root: Columns, like: torch.Tensor) -> torch.Tensor:
    """Return where the following row belongs to another trajectory."""
    changes = torch.zeros_like(like)
    if _IDS in root:
        ids = _flat(root[_IDS])[..., 0].cpu()
        changes[:, :-1] = ids[:, 1:] != ids[:, :-1]
    return changes


def _check_consistent(root: Columns, after: Columns, ends: torch.Tensor) -> None:
    """Check that within a trajectory, what follows a row is at the root of the next row."""
    continues = ~ends[:, :-1]
    for path, value in root.items():
        here, there = (f"{x.dtype} of shape {tuple(x.shape)}" for x in (value, after[path]))
        if here != there:
            raise DataError(f"key {path!r}: expected the same at the root and under 'next', got {here} and {there}")
        wrong = continues & differs(after[path][:, :-1], value[:, 1:]).cpu()
        if wrong.any():
            lane, t = wrong.nonzero()[0].tolist()
            raise DataError(
                f"key {path!r}, lane {lane}: expected 'next' of row {t} to equal row {t + 1}, as both are of one"
                " trajectory; if it ends there, set ('next', 'done') or ('collector', 'traj_ids')"
            )


def differs(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return where two tensors ``[B, T, ...]`` differ, bit by bit."""
    return _flat(_bits(a) != _bits(b)).any(-1)


def _flat(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor with exactly one axis after those of lanes and time."""
    return x.flatten(2) if x.dim() > 2 else x[..., None]


def _bits(x: torch.Tensor) -> torch.Tensor:
    x = torch.view_as_real(x) if x.is_complex() else x
    return x.contiguous().view(_INTEGERS[x.element_size()]) if x.is_floating_point() else x


def _episodes(block: Block) -> Iterator[TedEpisode]:
    ends = block.terminated | block.truncated
    ends[:, -1:] = True
    for lane in range(len(ends)):
        start = 0
        for last in ends[lane].nonzero()[:, 0].tolist():
            rows = {path: value[lane, start : last + 1] for path, value in block.steps.items()}
            rows |= {p: torch.cat([rows[p], v[lane, last : last + 1]]) for p, v in block.finals.items()}
            flags = bool(block.terminated[lane, last]), bool(block.truncated[lane, last])
            yield TedEpisode(nest(rows), last + 1 - start, *flags)
            start = last + 1


def episodes_to_ted(episodes: Iterable[TedEpisode]) -> TensorDict:
    """Concatenate episodes as TED, ``[T]``; episodes of `ted_to_episodes` are restored bit by bit.

    Flags have the shape ``[T, 1]``. The flags at the root are never set, because they are those of the row before.

    Raises:
        DataError: There are no episodes, or a field has neither ``n_steps`` nor ``n_steps`` + 1 rows.
    """
    parts = [_ted(episode) for episode in episodes]
    if not parts:
        raise DataError("episodes: expected at least one, got none")
    return torch.cat(parts)


def _ted(episode: TedEpisode) -> TensorDict:
    columns = {path: torch.as_tensor(value) for path, value in flatten(episode.data).items()}
    n = episode.n_steps
    if odd := next((path for path, value in columns.items() if len(value) not in (n, n + 1)), None):
        raise DataError(f"field {odd!r}: expected {n} or {n + 1} rows, got {len(columns[odd])}")
    has_final = {path for path, value in columns.items() if len(value) == n + 1}
    root = {path: value[:n] for path, value in columns.items()}
    after = {path: columns[path][1:] for path in has_final}
    last = torch.zeros(n, 1, dtype=torch.bool)
    last[-1] = True
    return assemble(root, after, last & episode.terminated, last & episode.truncated)


def assemble(steps: Columns, after: Columns, terminated: torch.Tensor, truncated: torch.Tensor) -> TensorDict:
    """Return TED.

    Args:
        steps: Fields, ``[..., *field]``.
        after: The values after each step, for fields that have them.
        terminated: Flags, ``[..., 1]``.
        truncated: Flags, ``[..., 1]``.
    """
    none = torch.zeros_like(terminated)
    follows = {path: value for path, value in steps.items() if path not in after and _belongs_to_next(path)}
    root = {path: value for path, value in steps.items() if path not in follows}
    next_ = {path.removeprefix(f"{_AFTER}/"): value for path, value in follows.items()} | after
    next_ |= {"done": terminated | truncated, "terminated": terminated, "truncated": truncated}
    root |= dict.fromkeys(FLAGS, none)
    lead = terminated.shape[:-1]
    return TensorDict({**nest(root), "next": nest(next_)}, batch_size=lead, device=terminated.device)
