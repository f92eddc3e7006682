"""TorchRL's episode data (TED) as episodes that hold every observation once, and back.

A row of TED has observations at its root, and those that follow under ``next``. Within a trajectory the latter are
the root's of the next row, which is checked here bit by bit; so of those only the last of a trajectory are kept.

| key of TED                           | field                                 |
|--------------------------------------|---------------------------------------|
| at the root and under ``next``       | the same name, with a final value     |
| at the root only                     | the same name                         |
| ``next``, a reward                   | the same name                         |
| ``next``, anything else              | below ``after``                       |
| ``done``, ``terminated``, ``truncated`` | how the episode ends               |
| ``index``, which buffers add         | none                                  |
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, is_tensor_collection

from trajstore.errors import DataError
from trajstore.sampling.batch_plan import RESERVED
from trajstore.schema import flatten, nest

FLAGS = ("done", "terminated", "truncated")
_IDS = "collector/traj_ids"
_AFTER = "after"  # group of what stands under next alone
_DROPPED = {"index", *FLAGS}
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size, for the bits of others

Columns = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Block:
    """Rows of TED by lane and time.

    Attributes:
        steps: By field, ``[B, T, ...]``.
        finals: Of the fields with a final value: what follows each step, ``[B, T, ...]``.
        terminated: Where an episode ends in a terminal state, ``[B, T]``.
        truncated: Where it is stopped, or another one begins without that it ended, ``[B, T]``.
    """

    steps: Columns
    finals: Columns
    terminated: torch.Tensor
    truncated: torch.Tensor


@dataclass(frozen=True)
class TedEpisode:
    """One trajectory: what `Writer.append_episode` takes, observations with one row more than the rest.

    Attributes:
        data: By field, nested.
        n_steps: How many steps it has, whatever its fields are.
        terminated: It ended in a terminal state.
        truncated: It was stopped. With neither, the recording was cut.
    """

    data: dict[str, Any]
    n_steps: int
    terminated: bool
    truncated: bool


def ted_to_episodes(data: TensorDictBase) -> list[TedEpisode]:
    """Cut TED, ``[T]`` or ``[B, T]``, into episodes.

    One ends where ``("next", "done")`` says so, where ``("collector", "traj_ids")`` changes, and with the data. The
    key ``index``, which buffers add to what they give out, is left out.

    Raises:
        DataError: Within a trajectory, what follows a row is not what the next row holds; or a key has a name by
            which it would not come back.
    """
    return list(_episodes(parse(data)))


def parse(data: TensorDictBase) -> Block:
    """Check TED and bring it into fields; see `ted_to_episodes`."""
    if not is_tensor_collection(data) or data.batch_dims not in (1, 2) or "next" not in data.keys():  # noqa: SIM118
        raise DataError(f"expected a TensorDict [T] or [B, T] with what follows under 'next', got {_kind(data)}")
    data = data if data.batch_dims == 2 else data.unsqueeze(0)
    root, after = _columns(data.exclude("next")), _columns(data["next"])
    both = {path: root[path] for path in root if path in after and path not in FLAGS}
    only = {path: value for path, value in after.items() if path not in {*both, *FLAGS}}
    steps = {path: value for path, value in root.items() if path not in _DROPPED}
    _check_root(steps, both)
    steps |= {_field_after(path): value for path, value in only.items()}
    if taken := next((path for path in steps if path.split("/")[0] in RESERVED), None):
        raise DataError(f"key {taken!r}: batches hold something else under that name; rename or exclude it")
    terminated, truncated = _ends(after, data.batch_size)
    truncated = truncated | (_id_changes(root, truncated) & ~terminated)
    finals = {path: after[path] for path in both}
    _check(both, finals, terminated | truncated)
    return Block(steps, finals, terminated, truncated)


def _check_root(root: Columns, both: Columns) -> None:
    """See that no key at the root has a name by which it would come back under ``next``."""
    for path in root:
        if path.split("/")[0] == _AFTER or (path not in both and _is_reward(path)):
            raise DataError(f"key {path!r}: what is called so is expected under 'next' alone; rename or exclude it")


def _field_after(path: str) -> str:
    """The field of a key that stands under ``next`` alone."""
    return path if _is_reward(path) and path.split("/")[0] != _AFTER else f"{_AFTER}/{path}"


def _stands_after(path: str) -> bool:
    """Whether a field without a final value is one of those."""
    return _is_reward(path) or path.startswith(f"{_AFTER}/")


def _columns(data: TensorDictBase) -> Columns:
    keys = {key: (key,) if isinstance(key, str) else key for key in data.keys(True, True)}
    if odd := next((key for key, parts in keys.items() if any("/" in part for part in parts)), None):
        raise DataError(f"key {odd!r}: expected names without '/'")
    columns = {"/".join(parts): data[key] for key, parts in keys.items()}
    if odd := next((path for path, value in columns.items() if not isinstance(value, torch.Tensor)), None):
        raise DataError(f"key {odd!r}: expected a tensor, got {type(columns[odd]).__name__}")
    return columns


def _kind(data: Any) -> str:
    shape = f" of batch size {tuple(data.batch_size)}" if is_tensor_collection(data) else ""
    return f"{type(data).__name__}{shape}"


def _is_reward(path: str) -> bool:
    return path.split("/")[-1] == "reward"


def _ends(after: Columns, shape: torch.Size) -> tuple[torch.Tensor, torch.Tensor]:
    """Flags ``[B, T]``; what is done without that it is said why counts as terminated, as in TorchRL."""
    none = torch.zeros(shape, dtype=torch.bool)
    done, terminated, truncated = (
        _flat(after[name]).bool().any(-1).cpu() if name in after else none for name in FLAGS
    )
    return terminated | (done & ~truncated), truncated


def _id_changes(root: Columns, like: torch.Tensor) -> torch.Tensor:
    """Where the next row is of another trajectory."""
    changes = torch.zeros_like(like)
    if _IDS in root:
        ids = _flat(root[_IDS])[..., 0].cpu()
        changes[:, :-1] = ids[:, 1:] != ids[:, :-1]
    return changes


def _check(now: Columns, after: Columns, ends: torch.Tensor) -> None:
    goes_on = ~ends[:, :-1]
    for path, value in now.items():
        here, there = (f"{x.dtype} of shape {tuple(x.shape)}" for x in (value, after[path]))
        if here != there:
            raise DataError(f"key {path!r}: expected the same at the root and under 'next', got {here} and {there}")
        wrong = goes_on & differs(after[path][:, :-1], value[:, 1:]).cpu()
        if wrong.any():
            lane, t = wrong.nonzero()[0].tolist()
            raise DataError(
                f"key {path!r}, lane {lane}: expected what follows row {t} to be what row {t + 1} holds, as both"
                " are of one trajectory; mark its end in ('next', 'done') or ('collector', 'traj_ids')"
            )


def differs(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Where two tensors ``[B, T, ...]`` are not the same, bit by bit."""
    return _flat(_bits(a) != _bits(b)).any(-1)


def _flat(x: torch.Tensor) -> torch.Tensor:
    """With one axis behind those of lanes and time."""
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
    """Put episodes one after the other as TED, ``[T]``; what `ted_to_episodes` cut comes back bit by bit.

    Flags have the shape ``[T, 1]``. Those at the root are those of the row before, so they are not set.

    Raises:
        DataError: A field has neither a row for every step nor one more.
    """
    parts = [_ted(episode) for episode in episodes]
    if not parts:
        raise DataError("expected at least one episode")
    return torch.cat(parts)


def _ted(episode: TedEpisode) -> TensorDict:
    columns = {path: torch.as_tensor(value) for path, value in flatten(episode.data).items()}
    n = episode.n_steps
    if odd := next((path for path, value in columns.items() if len(value) not in (n, n + 1)), None):
        raise DataError(f"field {odd!r}: expected {n} rows, or one more, got {len(columns[odd])}")
    has_final = {path for path, value in columns.items() if len(value) == n + 1}
    root = {path: value[:n] for path, value in columns.items()}
    after = {path: columns[path][1:] for path in has_final}
    last = torch.zeros(n, 1, dtype=torch.bool)
    last[-1] = True
    return assemble(root, after, last & episode.terminated, last & episode.truncated)


def assemble(steps: Columns, after: Columns, terminated: torch.Tensor, truncated: torch.Tensor) -> TensorDict:
    """TED from fields and what follows them, all with the leading axes of the flags but their last one."""
    none = torch.zeros_like(terminated)
    follows = {path: value for path, value in steps.items() if path not in after and _stands_after(path)}
    root = {path: value for path, value in steps.items() if path not in follows}
    next_ = {path.removeprefix(f"{_AFTER}/"): value for path, value in follows.items()} | after
    next_ |= {"done": terminated | truncated, "terminated": terminated, "truncated": truncated}
    root |= dict.fromkeys(FLAGS, none)
    lead = terminated.shape[:-1]
    return TensorDict({**nest(root), "next": nest(next_)}, batch_size=lead, device=terminated.device)
