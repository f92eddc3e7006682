"""The replay buffer that ALF's algorithms call."""

from __future__ import annotations

import enum
import math
import os
import threading
import uuid
from collections.abc import Mapping
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import torch

from trajstore import checkpoints
from trajstore.compat.alf import nests
from trajstore.compat.alf.inside import evict, random_numbers
from trajstore.compat.alf.prioritised import PrioritisedDraws
from trajstore.compat.alf.rows import Rows, Steps
from trajstore.errors import DataError, NotReadyError
from trajstore.hindsight import Hindsight
from trajstore.partitions import Policy
from trajstore.priorities import Priorities
from trajstore.replay import ReplayBuffer as Buffer
from trajstore.replay_options import with_ranks
from trajstore.schema import Array, Field, Schema, as_array, check_paths, checked, flatten, nest
from trajstore.sizes import check_positive
from trajstore.store import open as open_store
from trajstore.windows import Windows

_POSITION = "row_position"  # the field that keeps positions
_SWEEP = 64  # steps that rows gave up go when they are so large a part of all
_LEAST_SWEEP = 1024
_BLOCK = 8192
_PRIORITIES = Priorities(alpha=1.0, eps=0.0)  # raw ones: what is drawn, and the weights, are made here


class StepType(enum.IntEnum):
    """Where in its episode a step stands."""

    FIRST = 0
    MID = 1
    LAST = 2


class BatchInfo(NamedTuple):
    """Where windows come from, ``[B]`` each; ``()`` where it was not asked for.

    Attributes:
        env_ids: Their rows.
        positions: Of their first steps; with the row a name for ever.
        importance_weights: With priorities, that of a window relative to the mean of all that are not 0.
        replay_buffer: The buffer they are from.
        valid: Of `gather_all`, ``[B, T]``: the step exists.
    """

    env_ids: Any = ()
    positions: Any = ()
    importance_weights: Any = ()
    replay_buffer: Any = ()
    valid: Any = ()


class ReplayBuffer:
    """A ring of steps for every environment, from which windows are drawn; safe to use from several threads.

    Experience is a nest (dicts, named tuples, dataclasses) of tensors ``[B, ...]`` with a ``step_type`` somewhere in
    it, and comes back as the same kind of nest; ``reward`` is that which arrived with the observation of the same
    step. Every window that lies in one row is as likely as every other, whatever row that is.

    Args:
        data_spec: A nest of specs (whatever has a shape and a dtype) of one step; None: as the first batch is.
        num_environments: Rows.
        max_length: Steps that each row keeps.
        num_earliest_frames_ignored: Windows do not start at so many of a row's oldest steps.
        prioritized_sampling: Draw by priority.
        initial_priority: Of new steps, unless there has been a larger one.
        recent_data_steps: How many of the newest windows of each row are recent.
        recent_data_ratio: The part of a batch that is drawn from recent windows.
        with_replacement: Draw independently; else windows are spread evenly, none twice unless there are too few.
        device: Where batches and what is kept decoded live.
        keep_episodic_info: Accepted: it is always kept.
        url: A directory or object store to keep the steps at; by default compressed in RAM.
        seed: Of the draws.
        options: Further ones of `trajstore.ReplayBuffer`: ``rank``, ``world_size``, ``cache_bytes``, ...
    """

    def __init__(
        self,
        data_spec: Any,
        num_environments: int,
        max_length: int = 1024,
        num_earliest_frames_ignored: int = 0,
        prioritized_sampling: bool = False,
        initial_priority: float = 1.0,
        recent_data_steps: int = 1,
        recent_data_ratio: float = 0.0,
        with_replacement: bool = False,
        device: str | torch.device = "cpu",
        keep_episodic_info: bool | None = None,
        *,
        url: str | os.PathLike[str] | None = None,
        seed: int = 0,
        **options: Any,
    ) -> None:
        for name, value in (("num_environments", num_environments), ("max_length", max_length)):
            check_positive(name, value)
        if not 0.0 <= recent_data_ratio <= 1.0:
            raise ValueError(f"recent_data_ratio: expected a number from 0 to 1, got {recent_data_ratio!r}")
        check_positive("recent_data_steps", recent_data_steps)
        self._lock = threading.RLock()
        self._n_ignored, self._initial_priority = num_earliest_frames_ignored, initial_priority
        self._recent = recent_data_steps, recent_data_ratio
        self._is_stratified = not with_replacement
        self._url = f"memory://alf-{uuid.uuid4().hex}" if url is None else os.fspath(url)
        self._options = {
            "device": str(device),
            "capacity": None,  # rows have limits of their own
            "priorities": _PRIORITIES if prioritized_sampling else None,
            "as_tensordict": False,
        }
        self._given, self._seed = ({"commit_seconds": None} if url is None else {}) | options, seed
        self._rows = Rows(num_environments, max_length)
        self._form: Any = None
        self._paths: dict[str, str | None] = {}
        self._buffer: Buffer | None = None
        self._priorities: PrioritisedDraws | None = None
        if data_spec is not None:
            self._open(data_spec, n_lead=0)

    @classmethod
    def resume(
        cls,
        url: str | os.PathLike[str],
        checkpoint: str = "latest",
        *,
        num_environments: int,
        max_length: int = 1024,
        data_spec: Any = None,
        policy: Policy | None = None,
        incomplete: str | Mapping[str, str] = "keep",
        **options: Any,
    ) -> ReplayBuffer:
        """Go on from a checkpoint, with any number of ranks.

        With as many as before, rows, positions, priorities and the next batch are those that would have come. With
        another number, or a ``policy``, episodes are dealt out to the rows anew: see `trajstore.ReplayBuffer.resume`.
        No step is changed: an episode that had no LAST has none, and windows do not go on from it into another.

        Args:
            url: Of the store.
            checkpoint: Name or id of a checkpoint, or "latest".
            num_environments: Rows of this rank.
            max_length: Steps that each row keeps; more where a row was dealt more.
            data_spec: As for the buffer itself; None: batches are nested dicts until the first `add_batch`.
            policy: How to deal out episodes.
            incomplete: What becomes of open, headless and cut episodes.
            options: As for the buffer itself, ``rank`` and ``world_size`` among them.
        """
        buffer = cls(None, num_environments, max_length, url=url, **options)
        given = with_ranks(buffer._given)
        store = open_store(url, **{k: v for k, v in given.items() if k in ("storage_options", "fsync")})
        found = checkpoints.find(store.snapshot.storage, checkpoint)
        is_anew = policy is not None or (found.n_ranks or 1) != (given["world_size"] or 1)
        n_envs = num_environments if is_anew else None
        how = {"policy": policy, "incomplete": incomplete, "n_envs": n_envs}
        buffer._enter(Buffer.resume(url, found.id, **how, **buffer._options, **given))
        if data_spec is not None:
            buffer._form = nests.rebuilt(data_spec, lambda path: path)
        return buffer

    def _open(self, example: Any, n_lead: int) -> None:
        """Make the buffer for steps like this one, whose leaves have so many leading axes."""
        leaves = nests.flat(example)
        fields = {path: Field(leaf.dtype, tuple(leaf.shape)[n_lead:]) for path, leaf in leaves.items()}
        if _POSITION in fields:
            raise DataError(f"field '{_POSITION}' holds positions here; call it something else")
        reward = nests.leaf_path(fields, "reward")
        schema = Schema(nest(fields | {_POSITION: Field("int64")}), reward=reward, reward_alignment="observation")
        self._enter(Buffer(self._url, schema=schema, seed=self._seed, **self._options, **self._given))
        self._form = nests.rebuilt(example, lambda path: path)

    def _enter(self, buffer: Buffer) -> None:
        """Go on with a buffer and what it holds."""
        assert buffer.schema is not None
        names = ("step_type", "discount", "env_id")
        self._paths = {name: nests.leaf_path(buffer.schema.fields, name) for name in names}
        if self._paths["step_type"] is None:
            raise DataError(f"expected a field 'step_type', got {', '.join(buffer.schema)}")
        self._fields = tuple(path for path in buffer.schema if path != _POSITION)
        self._buffer, self._stream = buffer, buffer.streams.index(buffer.stream)
        if len(buffer):
            self._rows = Rows.of(len(self._rows), self._rows.length, self._recorded(buffer))
        if buffer.options.priorities is not None:
            self._priorities = PrioritisedDraws(buffer, self._rows, self._initial_priority)

    def _recorded(self, buffer: Buffer) -> Steps:
        """All steps of a buffer, in order."""
        kind = str(self._paths["step_type"])
        windows = Windows(squeeze=True, fields=(kind, _POSITION), provenance=True)
        blocks = []
        for batch in buffer.epoch(_BLOCK, windows, shuffle=False):
            made, step_type = batch["provenance"], flatten(batch)[kind]
            is_own = (made["rank"] == made["source_rank"]) & (made["env"] == made["source_env"])
            is_end = step_type == StepType.FIRST, step_type == StepType.LAST
            blocks.append((made["env"], *batch["index"].unbind(1), batch[_POSITION], is_own, *is_end))
        steps = Steps(*(torch.cat(column).cpu().numpy() for column in zip(*blocks, strict=True)))
        if steps.row.max() >= len(self._rows):
            raise DataError(
                f"num_environments: {len(self._rows)} rows, but what was saved has {steps.row.max() + 1}; give a"
                " policy to deal the episodes out anew"
            )
        return steps

    # ---- adding

    @property
    def memory(self) -> Buffer:
        """The buffer behind, for whatever this face has no method for."""
        if self._buffer is None:
            raise NotReadyError("the buffer is empty: add experience first, or give a data_spec")
        return self._buffer

    def add_batch(self, batch: Any, env_ids: Any = None, blocking: bool = False) -> None:
        """Add one step to each of some rows.

        FIRST begins an episode, and ends one that was not ended as truncated; LAST ends one: as terminated where
        ``discount`` is 0 or missing, as truncated else.

        Args:
            batch: A nest of tensors ``[B, ...]``.
            env_ids: The rows, ``[B]``, each at most once; None: all of them.
            blocking: Accepted, as long as it is False: a full row gives up its oldest step.

        Raises:
            DataError: Something is not as in the batches before; nothing was added.
        """
        if blocking:
            raise ValueError("blocking: rows give up their oldest steps, so there is nothing to wait for")
        with self._lock:
            if self._buffer is None:
                self._open(batch, n_lead=1)
            if self._form is None:
                self._form = nests.rebuilt(batch, lambda path: path)
            rows, row, step = self._rows, self._checked_rows(env_ids), nests.flat(batch)
            is_first, is_last, terminated = self._kinds(step, len(row))
            step[_POSITION] = rows.stop[row]
            self._end_open(row[is_first & rows.is_open(row)], step, len(row))
            ends = {"terminated": terminated, "truncated": is_last & ~terminated}
            added: Any = self.memory.append(nest(step), envs=row, **ends)
            rows.add(row, self._stream, (added.episode, added.t), is_first, is_last)
            if rows.n_over >= max(_LEAST_SWEEP, len(rows) * rows.length // _SWEEP):
                self._sweep()

    def _checked_rows(self, env_ids: Any) -> Array:
        n = len(self._rows)
        row = np.arange(n) if env_ids is None else as_array("env_ids", env_ids)[0]
        if row.ndim != 1 or row.dtype.kind not in "iu" or not len(row):
            raise DataError(f"env_ids: expected some integers [B], got {row.dtype} of shape {row.shape}")
        if row.min() < 0 or row.max() >= n:
            raise DataError(f"env_ids: expected 0 to {n - 1}, got {row.min()} to {row.max()}")
        return row.astype(np.int64)

    def _kinds(self, step: Mapping[str, Any], n: int) -> tuple[Array, Array, Array]:
        """Which steps are first, which last, and which of these terminated."""
        kind, discount = (step.get(path or "") for path in (self._paths["step_type"], self._paths["discount"]))
        kind = as_array("step_type", () if kind is None else kind)[0]
        if kind.shape != (n,):
            raise DataError(f"step_type: expected one for each of {n} rows, got shape {kind.shape}")
        is_last = kind == StepType.LAST
        is_over = True if discount is None else as_array("discount", discount)[0] == 0
        return kind == StepType.FIRST, is_last, is_last & is_over

    def _end_open(self, row: Array, step: Mapping[str, Any], n: int) -> None:
        """End episodes that got no LAST before the next one begins."""
        if not len(row):
            return
        schema = self.memory.schema
        assert schema is not None
        check_paths(schema.fields, step)  # before anything is changed
        for path, field in schema.fields.items():
            checked(path, field, step[path], (n,))
        for env in row.tolist():
            self.memory.end_episode(env, truncated=True)

    def _sweep(self) -> None:
        """Let the store give up what rows have given up."""
        evict(self.memory, *self._rows.forget())

    def clear(self, env_ids: Any = None) -> None:
        """Forget all steps of some rows, or of all; their positions and open episodes go on."""
        with self._lock:
            self._rows.clear(self._checked_rows(env_ids))
            if self._buffer is not None:
                self._sweep()
            if self._priorities is not None:
                self._priorities.forget()

    # ---- drawing

    def get_batch(
        self, batch_size: int, batch_length: int, *, relabel: Hindsight | None = None
    ) -> tuple[Any, BatchInfo]:
        """Draw windows; they go on into the next episode of their row.

        Args:
            batch_size: How many.
            batch_length: Steps of each.
            relabel: Give some windows goals that were achieved later in their episode, up to its end; paths of
                fields are as ``observation/desired_goal``.

        Returns:
            A nest of tensors ``[batch_size, batch_length, ...]``, and where they come from.

        Raises:
            NotReadyError: No row has so many steps in a row.
        """
        check_positive("batch_size", batch_size)
        check_positive("batch_length", batch_length)
        with self._lock:
            row, position, weight = self._draw(batch_size, batch_length)
            steps = position[:, None] + np.arange(batch_length)
            values = self._values(np.broadcast_to(row[:, None], steps.shape), steps)
            if relabel is not None:
                values = self._relabelled(values, row, position, batch_length, relabel)
            env_ids, positions = self._tensors(row, position)
            return self._nested(values), BatchInfo(env_ids, positions, weight, self)

    def _draw(self, n: int, length: int) -> tuple[Array, Array, Any]:
        """Rows and positions, the recent ones first, and weights where there are priorities."""
        low = self._rows.first + self._n_ignored
        n_recent = self._n_recent(n, length)
        recent = np.maximum(low, self._rows.stop - length + 1 - self._recent[0])
        parts = [self._uniform(n_recent, length, recent)] if n_recent else []
        if n_recent < n or self._priorities is not None:
            draw = self._uniform if self._priorities is None else self._by_priority
            parts.append(draw(n - n_recent, length, low))
        row, position = (np.concatenate(column) for column in zip(*parts, strict=True))
        if self._priorities is None:
            return row, position, ()
        weight = self._priorities.weights(row, position, length) * (1 - n_recent / n)
        if n_recent:  # what is recent could come either way
            of_recent = self._rows.starts(length, recent).total
            share = n_recent / n * self._priorities.n_positive(length) / of_recent
            weight = weight + torch.from_numpy((position >= recent[row]) * share).to(weight.device)
        return row, position, weight.to(torch.float32)

    def _n_recent(self, n: int, length: int) -> int:
        """How many windows are to be recent ones, where an even draw would not give as many."""
        steps, ratio = self._recent
        windows = float(self._rows.sizes.mean()) - (length - 1 + self._n_ignored)
        return math.ceil(n * ratio) if windows * ratio > steps else 0

    def _uniform(self, n: int, length: int, low: Array) -> tuple[Array, Array]:
        starts, device = self._rows.starts(length, low), torch.device("cpu")
        if not starts.total:
            longest = self._rows.sizes.max()
            raise NotReadyError(f"no row has {length} steps that follow each other; the longest row has {longest}")
        numbers = random_numbers(self.memory)
        if not self._is_stratified:
            return starts.at(numbers.below(n, starts.total, device).numpy())
        part = (torch.arange(n) + numbers.uniform(n, device)) / n
        return starts.at((part * starts.total).to(torch.int64).clamp_(max=starts.total - 1).numpy())

    def _by_priority(self, n: int, length: int, low: Array) -> tuple[Array, Array]:
        assert self._priorities is not None
        return self._priorities.draw(n, length, low, self._is_stratified)

    def _relabelled(
        self, values: dict[str, torch.Tensor], row: Array, position: Array, length: int, relabel: Hindsight
    ) -> dict[str, torch.Tensor]:
        """The same with other goals, as far as the episode goes in which a window starts."""
        windows = Windows(length=length, boundary="pad_right", fields=self._fields)
        handles = torch.from_numpy(self._rows.handles(row, position))
        batch = flatten(self.memory.at(handles, windows, relabel=relabel))
        found = {}
        for path, value in values.items():
            valid = batch["valid"].reshape(*batch["valid"].shape, *(1,) * (value.dim() - 2))
            found[path] = torch.where(valid, batch[path], value)
        return self._with_rows(found, np.broadcast_to(row[:, None], (len(row), length)))

    def update_priority(self, env_ids: Any, positions: Any, priorities: torch.Tensor) -> None:
        """Set the priorities of windows that start at steps; of those that rows gave up meanwhile, nothing is set.

        A priority of exactly 0 means never. Where a step is named twice, the last one counts.
        """
        with self._lock:
            if self._priorities is None:
                raise ValueError("this buffer has no priorities; make it with prioritized_sampling=True")
            row, position = self._places(env_ids, positions, is_strict=False)
            here = self._rows.has(row, position)
            chosen = torch.from_numpy(here).to(priorities.device)
            self._priorities.update(row[here], position[here], priorities.reshape(-1)[chosen])

    @property
    def initial_priority(self) -> torch.Tensor:
        """That of new steps: the largest that there has been."""
        if self._priorities is None:
            return torch.tensor(self._initial_priority)
        return torch.tensor(self._priorities.initial_priority)

    # ---- finding steps

    def steps_to_episode_end(self, pos: Any, env_ids: Any) -> torch.Tensor:
        """How many steps follow in the same episode, as far as it has been recorded."""
        with self._lock:
            row, position = self._places(env_ids, pos)
            return self._tensors(self._rows.ends(row, position) - position)[0].reshape(np.shape(pos))

    def get_episode_begin_position(self, pos: Any, env_ids: Any) -> torch.Tensor:
        """Where the episodes of steps began; that step may have been given up."""
        with self._lock:
            row, position = self._places(env_ids, pos)
            return self._tensors(self._rows.begins(row, position))[0].reshape(np.shape(pos))

    def get_earliest_position(self, env_ids: Any) -> torch.Tensor:
        """The position of the oldest step that rows have."""
        return self._tensors(self._rows.first[np.asarray(env_ids)])[0]

    def get_current_position(self) -> torch.Tensor:
        """By row, the position of the next step."""
        return self._tensors(self._rows.stop.copy())[0]

    def get_field(self, field_name: Any, env_ids: Any, positions: Any) -> Any:
        """Some fields of steps: a name with dots (``"observation.achieved_goal"``), or a nest of names.

        Raises:
            IndexError: There is no such step.
            KeyError: There is no such field.
        """
        with self._lock:
            shape = np.broadcast_shapes(np.shape(env_ids), np.shape(positions))
            row, position = self._places(env_ids, positions)
            names = {name: name.replace(".", "/") for name in nests.flat(field_name).values()}
            forms = {name: nests.part_of(self._shape_of_steps(), path) for name, path in names.items()}
            paths = [path for form in forms.values() for path in nests.flat(form).values()]
            values = self._values(row.reshape(shape), position.reshape(shape), tuple(dict.fromkeys(paths)))
            found = {name: self._nested(values, form) for name, form in forms.items()}
            asked = nests.flat(field_name)
            return nests.rebuilt(field_name, lambda path: found[asked[path]])

    def gather_all(self, ignore_earliest_frames: bool = False) -> tuple[Any, BatchInfo]:
        """All steps of all rows, oldest first: ``[num_environments, T, ...]``, T being those of the fullest row.

        Shorter rows are filled up with zeros; ``valid`` of the info says which steps exist.
        """
        with self._lock:
            low = self._rows.first + (self._n_ignored if ignore_earliest_frames else 0)
            steps = low[:, None] + np.arange(max(0, int((self._rows.stop - low).max())))
            row = np.broadcast_to(np.arange(len(low))[:, None], steps.shape)
            valid = self._rows.has(row, steps)
            if not valid.any():
                raise NotReadyError("the buffer is empty: add experience first")
            values = self._values(row[valid], steps[valid])
            env_ids, positions, mask = self._tensors(np.arange(len(low)), low, valid)
            whole = {path: value.new_zeros((*mask.shape, *value.shape[1:])) for path, value in values.items()}
            for path, value in values.items():
                whole[path][mask] = value
            return self._nested(whole), BatchInfo(env_ids, positions, (), self, mask)

    @property
    def total_size(self) -> torch.Tensor:
        """Steps of all rows."""
        return torch.tensor(int(self._rows.sizes.sum()))

    @property
    def current_size(self) -> torch.Tensor:
        """Steps by row."""
        return self._tensors(self._rows.sizes)[0]

    @property
    def num_environments(self) -> int:
        return len(self._rows)

    @property
    def max_length(self) -> int:
        """Steps that a row keeps; after resuming with fewer ranks maybe more than was asked for."""
        return self._rows.length

    @property
    def device(self) -> str:
        return str(self._options["device"])

    def _places(self, env_ids: Any, positions: Any, *, is_strict: bool = True) -> tuple[Array, Array]:
        """Rows and positions, flat.

        Raises:
            IndexError: There is no such row or, where ``is_strict``, no such step.
        """
        row, position = np.broadcast_arrays(*(np.asarray(torch.as_tensor(a).cpu()) for a in (env_ids, positions)))
        row, position = row.astype(np.int64).ravel(), position.astype(np.int64).ravel()
        is_row = (row >= 0) & (row < len(self._rows))
        here = is_row if not is_strict else is_row & self._rows.has(np.where(is_row, row, 0), position)
        if not here.all():
            lost = int(np.flatnonzero(~here)[0])
            has = f"{self._rows.first[row[lost]]} to {self._rows.stop[row[lost]] - 1}" if is_row[lost] else "none"
            raise IndexError(f"env {row[lost]}, position {position[lost]}: no such step; that row has {has}")
        return row, position

    def _values(
        self, row: Array, position: Array, fields: tuple[str, ...] | None = None
    ) -> dict[str, torch.Tensor]:
        """Fields of steps that are here, by path, with the axes of ``position`` in front."""
        windows = Windows(squeeze=True, fields=fields or self._fields)
        batch = flatten(
            self.memory.at(torch.from_numpy(self._rows.handles(row.ravel(), position.ravel())), windows)
        )
        shaped = {
            path: batch[path].reshape(*position.shape, *batch[path].shape[1:]) for path in windows.fields or ()
        }
        return self._with_rows(shaped, row)

    def _with_rows(self, values: dict[str, torch.Tensor], row: Array) -> dict[str, torch.Tensor]:
        """The same with ids of the rows that steps are in now, which may not be those that recorded them."""
        path = self._paths["env_id"]
        if path in values and values[path].shape == row.shape:
            values[path] = self._tensors(row)[0].to(values[path].dtype)
        return values

    def _shape_of_steps(self) -> Any:
        """A nest of paths."""
        return nest({path: path for path in self._fields}) if self._form is None else self._form

    def _nested(self, values: Mapping[str, torch.Tensor], form: Any = None) -> Any:
        form = self._shape_of_steps() if form is None else form
        paths = nests.flat(form)
        return nests.rebuilt(form, lambda path: values[paths[path]])

    def _tensors(self, *arrays: Array) -> tuple[torch.Tensor, ...]:
        return tuple(torch.from_numpy(np.ascontiguousarray(array)).to(self.device) for array in arrays)

    # ---- durability

    def save_checkpoint(self, name: str = "checkpoint", *, wait: bool = False, keep_last: int | None = None) -> str:
        """Name the state of this moment, of all ranks or none; see `trajstore.ReplayBuffer.save_checkpoint`."""
        with self._lock:
            buffer = self.memory
            self._sweep()
        return buffer.save_checkpoint(name, wait=wait, keep_last=keep_last)

    def flush(self) -> None:
        """Make everything that was added durable."""
        self.memory.flush()

    def close(self) -> None:
        """Release memory and threads; what is at a URL stays there."""
        if self._buffer is not None:
            self._buffer.close()

    def __enter__(self) -> ReplayBuffer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._buffer is not None:
            self._buffer.__exit__(kind, error, trace)
