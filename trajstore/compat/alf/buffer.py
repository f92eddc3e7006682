"""The replay buffer that ALF's algorithms call."""

from __future__ import annotations

import enum
import functools
import os
import threading
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import torch

from trajstore.arguments import check_positive
from trajstore.compat.alf import nests
from trajstore.compat.alf.draws import Draws, Sampling
from trajstore.compat.alf.inside import begin_priorities, keep_column, random_numbers, sweep, unused_position
from trajstore.compat.alf.rows import Rows, Steps
from trajstore.compat.exit_flush import end_with_process, has_ended
from trajstore.compat.options import check_options
from trajstore.compat.private_store import forget, private_url
from trajstore.distributed.partitions import Policy
from trajstore.errors import DataError, NotReadyError, StoreNotFoundError
from trajstore.replay.buffer import ReplayBuffer as Buffer
from trajstore.replay.options import with_ranks
from trajstore.sampling.batch_plan import RESERVED
from trajstore.sampling.hindsight import Hindsight
from trajstore.sampling.priority_options import Priorities
from trajstore.sampling.windows import Windows
from trajstore.schema import Array, Field, Schema, as_array, check_paths, check_value, flatten, nest
from trajstore.store import checkpoints
from trajstore.store.store import Store
from trajstore.store.store import open as open_store

_POSITION = "row_position"  # the field that keeps positions
_MOVED = "row_position_now"  # the column that keeps them where rows were laid anew
_SWEEP = 64  # steps that rows gave up go when they are so large a part of all
_LEAST_SWEEP = 1024
_BLOCK = 8192
_OWN = {
    "capacity": "say how many steps a row keeps with max_length",
    "sample": "say how long windows are in get_batch",
    "priorities": "draw by priority with prioritized_sampling",
    "as_tensordict": "batches are nests as they were added",
}
_LATER: Any = object()  # a data_spec that opens nothing yet
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
        discounted_return: Always ``()``: returns are columns of the buffer behind.
        valid: Of `gather_all`, ``[B, T]``: the step exists.
    """

    env_ids: Any = ()
    positions: Any = ()
    importance_weights: Any = ()
    replay_buffer: Any = ()
    discounted_return: Any = ()
    valid: Any = ()


class ReplayBuffer:
    """A ring of steps for every environment, from which windows are drawn; safe to use from several threads.

    Experience is a nest (dicts, named tuples, dataclasses) of tensors ``[B, ...]`` with a ``step_type`` somewhere
    in it, and comes back as the same kind of nest; ``reward`` is that which arrived with the observation of the
    same step. Every window that lies in one row is as likely as every other, whatever row that is.

    Args:
        data_spec: A nest of specs (whatever has a shape and a dtype) of one step; None: as in the store that is
            there, or as the first batch is.
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
        url: A directory or object store to keep the steps at; by default compressed in RAM. A store that is there
            is gone on with, with all its steps; `resume` goes on from a checkpoint instead.
        seed: Of the draws.
        options: Further ones of `trajstore.ReplayBuffer`: ``rank``, ``world_size``, ``cache_bytes``, ...; not
            ``capacity``, ``sample``, ``priorities`` and ``as_tensordict``.

    Raises:
        DataError: What is at the URL are no steps of ALF's.
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
        check_options(type(self).__init__, options, _OWN)
        for name, value in (("num_environments", num_environments), ("max_length", max_length)):
            check_positive(name, value)
        recent = recent_data_steps, recent_data_ratio
        self._sampling = Sampling(num_earliest_frames_ignored, *recent, with_replacement, initial_priority)
        self._lock = threading.RLock()
        self._is_private = url is None
        self._url = private_url("alf") if url is None else os.fspath(url)
        self._options: dict[str, Any] = {
            "device": str(device),
            "capacity": None,  # rows have limits of their own
            "priorities": _PRIORITIES if prioritized_sampling else None,
            "as_tensordict": False,
        }
        self._given, self._seed = ({"commit_seconds": None, "grace_s": 0} if url is None else {}) | options, seed
        self._rows = Rows(num_environments, max_length)
        self._form: Any = None
        self._paths: dict[str, str | None] = {}
        self._buffer: Buffer | None = None
        self._draws: Draws | None = None
        if data_spec is None:
            self._join()
        elif data_spec is not _LATER:
            self._open(_schema_of(nests.flat(data_spec), n_lead=0))
            self._form = _paths_of(data_spec)

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

        With as many as before, rows, positions, priorities and the next batch are those that would have come; a row
        that was empty begins with a position above all others. With another number, or a ``policy``, episodes are
        dealt out to the rows anew, as `trajstore.ReplayBuffer.resume` does. No step is changed: an episode that had
        no LAST has none, and no window goes on from it into another.

        Args:
            url: Of the store.
            checkpoint: Name or id of a checkpoint, or "latest".
            num_environments: Rows of this rank.
            max_length: Steps that each row keeps; more where a row was dealt more.
            data_spec: As for the buffer itself, of the steps that are there; None: batches are nested dicts until
                the first `add_batch`.
            policy: How to deal out episodes.
            incomplete: What becomes of open, headless and cut episodes.
            options: As for the buffer itself, ``rank`` and ``world_size`` among them.

        Raises:
            DataError: The steps that are there are none of ALF's, or not as ``data_spec`` says.
        """
        buffer = cls(_LATER, num_environments, max_length, url=url, **options)
        given, store = with_ranks(buffer._given), buffer._store()
        _check_names(store.schema or ())
        if store.schema is not None and data_spec is not None:
            _check_alike(_schema_of(nests.flat(data_spec), n_lead=0), store.schema)
        found = checkpoints.find(store.snapshot.storage, checkpoint)
        is_anew = policy is not None or (found.n_ranks or 1) != (given["world_size"] or 1)
        n_envs = num_environments if is_anew else None
        how: dict[str, Any] = {"policy": policy, "incomplete": incomplete, "n_envs": n_envs}
        memory = Buffer.resume(url, found.id, **how, **buffer._options, **given)
        fates = (incomplete,) if isinstance(incomplete, str) else incomplete.values()
        buffer._enter(memory, is_anew=is_anew or "drop" in fates)
        buffer._form = None if data_spec is None else _paths_of(data_spec)
        return buffer

    def _store(self) -> Store:
        how = {name: value for name, value in self._given.items() if name in ("storage_options", "fsync")}
        return open_store(self._url, **how)

    def _join(self) -> None:
        """Go on with the steps of a store, if there is one that has any."""
        try:
            schema = None if self._is_private else self._store().schema
        except StoreNotFoundError:
            return
        if schema is not None:
            _check_names(schema)
            self._open(schema)

    def _open(self, schema: Schema) -> None:
        self._enter(Buffer(self._url, schema=schema, seed=self._seed, **self._options, **self._given))

    def _enter(self, buffer: Buffer, *, is_anew: bool = False) -> None:
        """Go on with a buffer and what it holds, which may have been dealt out to the rows anew."""
        assert buffer.schema is not None
        names = ("step_type", "discount", "env_id")
        self._paths = {name: nests.leaf_path(buffer.schema, name) for name in names}
        self._steps = Windows(squeeze=True, fields=tuple(path for path in buffer.schema if path != _POSITION))
        self._stream = buffer.streams.index(buffer.stream)
        try:
            if buffer.options.priorities is not None:
                begin_priorities(buffer, self._sampling.initial_priority)
            self._rows = self._laid(buffer, is_anew)
            self._draws = Draws(buffer, self._rows, self._sampling)
        except BaseException:
            buffer.close()
            raise
        self._buffer = buffer
        if not self._is_private:
            end_with_process(self, ReplayBuffer.flush)

    def _laid(self, buffer: Buffer, is_anew: bool) -> Rows:
        """Rows with all that a buffer holds: where it was, or where nothing ever was."""
        n, length, unused = len(self._rows), self._rows.length, unused_position(buffer)
        if not len(buffer):
            return Rows(n, length, unused)
        steps = self._recorded(buffer)
        unused = max(unused, int(steps.position.max()) + 1)
        laid = steps.laid(unused, is_anew)
        moved = laid.take(laid.position != steps.position)
        if len(moved.row):
            keep_column(buffer, _MOVED, np.stack([moved.stream, moved.episode, moved.t], 1), moved.position)
            length = max(length, int(np.bincount(moved.row).max()))  # a row keeps what it was dealt
        return Rows.of(n, length, laid, unused)

    def _recorded(self, buffer: Buffer) -> Steps:
        """All steps of a buffer, in order."""
        kind = str(self._paths["step_type"])
        windows = Windows(squeeze=True, fields=(kind, _POSITION), provenance=True)
        blocks, numbers = [], random_numbers(buffer)
        counter = numbers.counter
        for batch in buffer.epoch(_BLOCK, windows, shuffle=False):
            step_type, recorded = flatten(batch)[kind], batch[_POSITION]
            moved = batch.get(_MOVED, recorded)
            position = torch.where(moved < 0, recorded, moved)
            is_end = step_type == StepType.FIRST, step_type == StepType.LAST
            row, handles = batch["provenance"]["env"], batch["index"].unbind(1)
            blocks.append((row, *handles, recorded, position, *is_end))
        numbers.counter = counter  # the iterator took some, and nothing was drawn
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
            row, step = self._checked_rows(env_ids), nests.flat(batch)
            if self._buffer is None:
                schema = _schema_of(step, n_lead=1)
                _check_steps(schema, {**step, _POSITION: row}, len(row))  # before it decides what steps are like
                self._open(schema)
            rows = self._rows
            if rows.n_over >= max(_LEAST_SWEEP, len(rows) * rows.length // _SWEEP):
                self._sweep()  # first, since it may fail: then nothing was added
            is_first, is_last, terminated = self._kinds(step, len(row))
            step[_POSITION] = rows.stop[row]
            self._end_open(row[is_first & rows.is_open(row)], step, len(row))
            envs = range(len(rows)) if np.array_equal(row, np.arange(len(rows))) else row  # the former is known
            truncated = is_last & ~terminated
            added: Any = self.memory.append(nest(step), envs=envs, terminated=terminated, truncated=truncated)
            rows.add(row, self._stream, (added.episode, added.t), is_first, is_last)
            self._form = _paths_of(batch) if self._form is None else self._form

    def _checked_rows(self, env_ids: Any) -> Array:
        n = len(self._rows)
        row = np.arange(n) if env_ids is None else as_array("env_ids", env_ids)[0]
        if row.ndim != 1 or row.dtype.kind not in "iu" or not len(row):
            raise DataError(f"env_ids: expected some integers [B], got {row.dtype} of shape {row.shape}")
        if row.min() < 0 or row.max() >= n:
            raise DataError(f"env_ids: expected 0 to {n - 1}, got {row.min()} to {row.max()}")
        if np.bincount(row).max() > 1:
            raise DataError(f"env_ids: expected each row once, got {row.tolist()!s:.80}")
        return row.astype(np.int64)

    def _kinds(self, step: Mapping[str, Any], n: int) -> tuple[Array, Array, Array]:
        """Which steps are first, which last, and which of these terminated."""
        kind, discount = (step.get(path or "") for path in (self._paths["step_type"], self._paths["discount"]))
        kind = _one_each("step_type", () if kind is None else kind, n)
        is_last = kind == StepType.LAST
        is_over = True if discount is None else _one_each("discount", discount, n) == 0
        return kind == StepType.FIRST, is_last, is_last & is_over

    def _end_open(self, row: Array, step: Mapping[str, Any], n: int) -> None:
        """End episodes that got no LAST before the next one begins."""
        if not len(row):
            return
        schema = self.memory.schema
        assert schema is not None
        _check_steps(schema, step, n)  # before anything is changed
        for env in row.tolist():
            self.memory.end_episode(env, truncated=True)
            self._rows.end(env)  # at once: what follows may fail, and be tried again

    def _sweep(self) -> None:
        """Let the store give up what rows have given up."""
        sweep(self.memory, self._rows)

    def clear(self, env_ids: Any = None) -> None:
        """Forget all steps of some rows, or of all; their positions and open episodes go on."""
        with self._lock:
            self._rows.clear(self._checked_rows(env_ids))
            if self._draws is not None:
                if self._draws.priorities is not None:
                    self._draws.priorities.forget()
                self._sweep()

    # ---- drawing

    def get_batch(
        self, batch_size: int, batch_length: int, *, relabel: Hindsight | None = None
    ) -> tuple[Any, BatchInfo]:
        """Draw windows; they go on into the next episode of their row.

        Args:
            batch_size: How many.
            batch_length: Steps of each.
            relabel: Give some windows goals that were achieved; where one goes on into another episode, that part
                is seen by itself. Paths of fields are as ``observation/desired_goal``.

        Returns:
            A nest of tensors ``[batch_size, batch_length, ...]``, and where they come from.

        Raises:
            NotReadyError: No row has so many steps that follow each other.
        """
        check_positive("batch_size", batch_size)
        check_positive("batch_length", batch_length)
        with self._lock:
            if self._draws is None:
                raise NotReadyError("the buffer is empty: add experience before drawing from it")
            if relabel is not None and relabel.strategy in ("episode", "random") and self._rows.n_over:
                self._sweep()  # they look for goals in all that the store has
            drawn = self._draws.draw(batch_size, batch_length)
            values = self._windows(drawn.row, drawn.position, batch_length, relabel)
            env_ids, positions = self._tensors(drawn.row, drawn.position)
            weight = () if drawn.weight is None else drawn.weight
            return self._nested(values), BatchInfo(env_ids, positions, weight, self)

    def _windows(
        self, row: Array, position: Array, length: int, relabel: Hindsight | None
    ) -> dict[str, torch.Tensor]:
        """Fields of windows that start at steps, by path."""
        parts = self._rows.parts(row, position, length)
        handles = torch.from_numpy(self._rows.handles(parts.row, parts.position))
        batch = flatten(self.memory.at(handles, _inside_episodes(length, self._steps.fields), relabel=relabel))
        values = {path: batch[path] for path in self._steps.fields or ()}
        if len(parts.window) > len(row):
            to, from_ = self._tensors(*parts.joints(len(row), length))
            for path, value in values.items():
                steps = value.flatten(0, 1)
                steps.index_copy_(0, to, steps.index_select(0, from_))
                values[path] = value[: len(row)]
        return self._with_rows(values, np.repeat(row[:, None], length, 1))

    def update_priority(self, env_ids: Any, positions: Any, priorities: torch.Tensor) -> None:
        """Set the priorities of windows that start at steps; of those that rows gave up meanwhile, nothing is set.

        A priority of exactly 0 means never. Where a step is named twice, the last one counts.
        """
        with self._lock:
            if self._draws is None or self._draws.priorities is None:
                raise ValueError("this buffer has no priorities; make it with prioritized_sampling=True")
            row, position = self._places(env_ids, positions, is_strict=False)
            here = self._rows.has(row, position)
            chosen = torch.from_numpy(here).to(priorities.device)
            self._draws.priorities.update(row[here], position[here], priorities[chosen])

    @property
    def initial_priority(self) -> torch.Tensor:
        """That of new steps: the largest that there has been."""
        priorities = None if self._draws is None else self._draws.priorities
        return torch.tensor(self._sampling.initial_priority if priorities is None else priorities.initial_priority)

    # ---- finding steps

    def steps_to_episode_end(self, pos: Any, env_ids: Any) -> torch.Tensor:
        """How many steps follow in the same episode, as far as it has been recorded."""
        with self._lock:
            row, position = self._places(env_ids, pos)
            return self._tensors(self._rows.ends(row, position) - position)[0]

    def get_episode_begin_position(self, pos: Any, env_ids: Any) -> torch.Tensor:
        """Where the episodes of steps began; that step may have been given up."""
        with self._lock:
            row, position = self._places(env_ids, pos)
            return self._tensors(self._rows.begins(row, position))[0]

    def get_earliest_position(self, env_ids: Any) -> torch.Tensor:
        """The position of the oldest step that rows have."""
        with self._lock:
            return self._tensors(self._rows.first[torch.as_tensor(env_ids).cpu().numpy()])[0]

    def get_current_position(self) -> torch.Tensor:
        """By row, the position of the next step."""
        with self._lock:
            return self._tensors(self._rows.stop.copy())[0]

    def get_field(self, field_name: Any, env_ids: Any, positions: Any) -> Any:
        """Some fields of steps: a name with dots (``"observation.achieved_goal"``), or a nest of names.

        Raises:
            IndexError: There is no such step.
            KeyError: There is no such field.
        """
        with self._lock:
            row, position = self._places(env_ids, positions)
            asked = {at: name.replace(".", "/") for at, name in nests.flat(field_name).items()}
            forms = {path: nests.part_of(self._form_of_steps(), path) for path in asked.values()}
            paths = dict.fromkeys(leaf for form in forms.values() for leaf in nests.flat(form).values())
            values = self._values(row, position, tuple(paths))
            found = {path: nests.mapped(form, values.__getitem__) for path, form in forms.items()}
            return nests.rebuilt(field_name, lambda at: found[asked[at]])

    def gather_all(self, ignore_earliest_frames: bool = False) -> tuple[Any, BatchInfo]:
        """All steps of all rows, oldest first: ``[num_environments, T, ...]``, T being those of the fullest row.

        Shorter rows are filled up with zeros; ``valid`` of the info says which steps exist.
        """
        with self._lock:
            low = self._rows.first + (self._sampling.n_ignored if ignore_earliest_frames else 0)
            steps = low[:, None] + np.arange(max(0, int((self._rows.stop - low).max())))
            row = np.repeat(np.arange(len(low))[:, None], steps.shape[1], 1)
            valid = self._rows.has(row, steps)
            if not valid.any():
                raise NotReadyError("the buffer is empty: add experience first")
            values = self._values(row[valid], steps[valid])
            env_ids, positions, mask = self._tensors(np.arange(len(low)), low, valid)
            whole = {path: value.new_zeros((*mask.shape, *value.shape[1:])) for path, value in values.items()}
            for path, value in values.items():
                whole[path][mask] = value
            return self._nested(whole), BatchInfo(env_ids, positions, replay_buffer=self, valid=mask)

    @property
    def total_size(self) -> torch.Tensor:
        """Steps of all rows."""
        with self._lock:
            return torch.tensor(int(self._rows.sizes.sum()))

    @property
    def current_size(self) -> torch.Tensor:
        """Steps by row."""
        with self._lock:
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
        """Rows and positions, of one shape.

        Raises:
            IndexError: There is no such row or, where ``is_strict``, no such step.
        """
        row, position = np.broadcast_arrays(*(np.asarray(torch.as_tensor(a).cpu()) for a in (env_ids, positions)))
        row, position = row.astype(np.int64), position.astype(np.int64)
        is_row = (row >= 0) & (row < len(self._rows))
        here = is_row if not is_strict else is_row & self._rows.has(np.where(is_row, row, 0), position)
        if not here.all():
            lost = int(np.flatnonzero(~here)[0])
            env, at = int(row.flat[lost]), int(position.flat[lost])
            has = f"{self._rows.first[env]} to {self._rows.stop[env] - 1}" if is_row.flat[lost] else "none"
            raise IndexError(f"env {env}, position {at}: no such step; that row has {has}")
        return row, position

    def _values(
        self, row: Array, position: Array, fields: tuple[str, ...] | None = None
    ) -> dict[str, torch.Tensor]:
        """Fields of steps that are here, by path, with the axes of ``position`` in front."""
        windows = self._steps if fields is None else Windows(squeeze=True, fields=fields)
        paths, schema = windows.fields or (), self.memory.schema
        assert schema is not None
        if not position.size:
            empty = functools.partial(torch.empty, device=self.device)
            return {p: empty((*row.shape, *schema[p].shape), dtype=getattr(torch, schema[p].dtype)) for p in paths}
        handles = torch.from_numpy(self._rows.handles(row, position).reshape(-1, 3))
        batch = flatten(self.memory.at(handles, windows))
        shaped = {path: batch[path].reshape((*row.shape, *batch[path].shape[1:])) for path in paths}
        return self._with_rows(shaped, row)

    def _with_rows(self, values: dict[str, torch.Tensor], row: Array) -> dict[str, torch.Tensor]:
        """The same with ids of the rows that steps are in now, which may not be those that recorded them."""
        path = self._paths["env_id"]
        if path in values and values[path].shape == row.shape:
            values[path] = self._tensors(row)[0].to(values[path].dtype)
        return values

    def _form_of_steps(self) -> Any:
        """A nest of paths."""
        return nest({path: path for path in self._steps.fields or ()}) if self._form is None else self._form

    def _nested(self, values: Mapping[str, torch.Tensor]) -> Any:
        """Fields of steps as the nest that they came as."""
        return nests.rebuilt(self._form_of_steps(), values.__getitem__)

    def _tensors(self, *arrays: Array) -> tuple[torch.Tensor, ...]:
        return tuple(torch.from_numpy(np.asarray(array, order="C")).to(self.device) for array in arrays)

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
        self._forget()

    def _forget(self) -> None:
        has_ended(self)
        if self._is_private:
            forget(self._url)

    def __enter__(self) -> ReplayBuffer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._buffer is not None:
                self._buffer.__exit__(kind, error, trace)
        finally:
            self._forget()


def _check_names(paths: Iterable[str]) -> None:
    """Refuse steps that are not ALF's."""
    if missing := [name for name in ("step_type", _POSITION) if nests.leaf_path(paths, name) is None]:
        raise DataError(f"expected a field '{missing[0]}', got {', '.join(paths) or 'none'}")


def _schema_of(leaves: Mapping[str, Any], n_lead: int) -> Schema:
    """That of steps like this one, whose leaves have so many leading axes.

    Raises:
        DataError: No steps can be like that.
    """
    fields = {path: Field(leaf.dtype, tuple(leaf.shape)[n_lead:]) for path, leaf in leaves.items()}
    for path in fields:
        if path.partition("/")[0] in {*RESERVED, _POSITION, _MOVED}:
            raise DataError(f"field '{path}': something else has that name in the store or in batches; rename it")
    fields[_POSITION] = Field("int64")
    _check_names(fields)
    for leaf in ("step_type", "discount"):
        at = nests.leaf_path(fields, leaf)
        if at is not None and fields[at].shape:
            raise DataError(f"field '{at}': expected one number for each row, got shape {fields[at].shape}")
    return Schema(nest(fields), reward=nests.leaf_path(fields, "reward"), reward_alignment="observation")


def _check_alike(given: Schema, stored: Schema) -> None:
    """Refuse a spec of other steps than those that are there."""
    check_paths(stored.fields, given.fields)
    for path, field in stored.fields.items():
        if (field.dtype, field.shape) != (given[path].dtype, given[path].shape):
            raise DataError(
                f"data_spec, field '{path}': expected {field.dtype} of shape {field.shape}, as in the store, got"
                f" {given[path].dtype} of shape {given[path].shape}"
            )


def _check_steps(schema: Schema, step: Mapping[str, Any], n: int) -> None:
    """Refuse a batch that could not be appended."""
    check_paths(schema.fields, step)
    for path, field in schema.fields.items():
        check_value(path, field, step[path], (n,))


def _one_each(name: str, value: Any, n: int) -> Array:
    array = as_array(name, value)[0]
    if array.shape != (n,):
        raise DataError(f"{name}: expected one for each of {n} rows, got shape {array.shape}")
    return array


def _paths_of(nest: Any) -> Any:
    """A nest with the path of each leaf in its place."""
    return nests.rebuilt(nest, lambda path: path)


@functools.lru_cache(64)
def _inside_episodes(length: int, fields: tuple[str, ...] | None) -> Windows:
    """Windows as far as the episode goes that they start in."""
    return Windows(length=length, boundary="pad_right", fields=fields)
