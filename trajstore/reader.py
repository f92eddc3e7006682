"""The reader: batches of windows, on the device, from the chunk cache."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from trajstore.episodes import EpisodeTable
from trajstore.errors import DataError, EpisodeNotFoundError
from trajstore.index import HAS_FINAL, MARK, OPEN, TERMINATED, TRUNCATED, EpisodeIndex
from trajstore.pager import ChunkCache, Wanted
from trajstore.rng import Counter
from trajstore.schema import Array, Schema, nest
from trajstore.sizes import parse_bytes
from trajstore.snapshot import Snapshot, selected_paths
from trajstore.starts import Draw, Starts
from trajstore.store import Store
from trajstore.windows import Windows, relative

_MAX_KINDS = 64  # of windows and restrictions whose sums are kept

Batch = dict[str, Any]
Where = Callable[[EpisodeTable], Array]


@dataclass(frozen=True, slots=True)
class _Steps:
    """Positions of a batch's steps, and what is known of them."""

    entry: torch.Tensor  # [B]
    position: torch.Tensor  # [B, T], where they were asked for
    inside: torch.Tensor  # [B, T], moved to the nearest step that exists
    exists: torch.Tensor | None  # [B, T]; None: all do
    n: torch.Tensor  # [B]: steps of the episode
    flags: torch.Tensor  # [B]


@dataclass(frozen=True, slots=True)
class _After:
    """Where the transitions of a batch's steps lead."""

    taken: torch.Tensor  # [B, T]: steps summed over; 0 where a step has no successor
    position: torch.Tensor  # [B, T]: of the next observation, moved to a row that exists
    is_terminal: torch.Tensor  # [B, T]: nothing follows, so nothing is bootstrapped


class Reader:
    """Samples windows of a store; safe to use from several threads, one batch at a time.

    It shows the episodes of the snapshot that it was made or last refreshed with. Same seed, same episodes, same
    calls: same batches, on every device and with every cache size.

    Args:
        store: The store to read, or one of its snapshots.
        device: Where batches and the cache live.
        cache_bytes: Bound of the memory for decoded chunks on the device.
        host_cache_bytes: Bound of the memory for compressed chunks in RAM.
        seed: Of the draws.
    """

    def __init__(
        self,
        store: Store | Snapshot,
        *,
        device: str | torch.device = "cpu",
        cache_bytes: int | str = "1GiB",
        host_cache_bytes: int | str = "1GiB",
        seed: int = 0,
    ) -> None:
        self._store = store
        self._device = torch.device(device)
        self._snapshot = store.snapshot if isinstance(store, Store) else store
        self._budgets = parse_bytes(cache_bytes, "cache_bytes"), parse_bytes(host_cache_bytes, "host_cache_bytes")
        self._lock = threading.RLock()
        self._rng = Counter(seed)
        self._index = EpisodeIndex(self._device)
        self._starts: dict[tuple[Windows, Where | None], Starts] = {}
        self._relative: dict[Windows, torch.Tensor] = {}  # positions of a window's steps from its start
        self._is_learning: dict[Windows, torch.Tensor] = {}  # which of them belong to the length part
        self._cache: ChunkCache | None = None
        self._follow(self._snapshot)

    def refresh(self) -> None:
        """Show what has been committed meanwhile; costs what is new."""
        with self._lock:
            if isinstance(self._store, Store):
                self._follow(self._store.refresh())

    def _follow(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        if snapshot.schema is None:
            return
        if self._cache is None:
            self._cache = ChunkCache(snapshot.schema, self._device, *self._budgets, snapshot.storage)
        self._index.update(snapshot)
        readers = {reader.record.id: reader for reader in snapshot.readers}
        self._cache.set_sources([readers.get(name) for name in self._index.numbers])

    @property
    def schema(self) -> Schema:
        if self._snapshot.schema is None:
            raise DataError(f"{self._snapshot!r} is empty: nothing is committed, so there is nothing to read")
        return self._snapshot.schema

    def n_windows(self, windows: Windows) -> int:
        """How many windows can be drawn (with weights: steps or episodes that a draw is uniform over)."""
        with self._lock:
            return self._starts_of(windows).total

    def sample(
        self,
        batch_size: int,
        windows: Windows,
        *,
        where: Where | None = None,
        recent_steps: int | None = None,
        recent_episodes: int | None = None,
        out: Mapping[str, Any] | None = None,
    ) -> Batch:
        """Draw windows uniformly, with replacement.

        Args:
            batch_size: How many.
            windows: Which, and what comes with them.
            where: Only from episodes that this function of the episode table says True for (an array of bools).
                Keep one function and pass it again: it is asked once after every refresh.
            recent_steps: Only windows that start within the last so many steps, in order of arrival.
            recent_episodes: Only from the last so many episodes, in order of arrival.
            out: A batch of an earlier call with the same arguments, to be overwritten.

        Returns:
            A nested dict: the fields as ``[batch, window, ...]``; ``valid`` (the step exists), ``learn`` (it
            belongs to the loss), ``is_first``, ``is_last``, ``terminated``, ``truncated``, all ``[batch, window]``;
            ``index``, ``[batch, 3]``: stream number, episode and t of the first learning step; where asked for,
            ``next`` fields and ``n_step`` with ``return``, ``discount`` (0 where it terminated) and ``n``.
        """
        if not isinstance(batch_size, int) or isinstance(batch_size, bool) or batch_size < 1:
            raise ValueError(f"batch_size: expected a positive integer, got {batch_size!r}")
        for name, value in (("recent_steps", recent_steps), ("recent_episodes", recent_episodes)):
            if value is not None and value < 1:
                raise ValueError(f"{name}: expected a positive number or None, got {value!r}")
        with self._lock:
            starts = self._starts_of(windows, where)
            low = 0
            if recent_steps is not None:
                low = starts.of_recent_steps(recent_steps)
            if recent_episodes is not None:
                low = max(low, starts.of_recent_episodes(recent_episodes))
            if starts.total <= low:
                raise self._no_windows(windows, "that the restrictions allow " if low or where else "")
            return self._assemble(starts.draw(batch_size, self._rng, low), windows, out or {})

    def at(self, index: torch.Tensor, windows: Windows, *, out: Mapping[str, Any] | None = None) -> Batch:
        """The windows at given indices, as a batch's ``index`` holds them.

        Raises:
            EpisodeNotFoundError: An episode is not here, or has no window that starts at that step.
        """
        with self._lock:
            starts = self._starts_of(windows)
            handles = index.cpu().numpy()
            if handles.ndim != 2 or handles.shape[1] != 3:
                raise ValueError(f"index: expected shape (batch, 3), got {tuple(handles.shape)}")
            entry = self._index.find(handles[:, 0], handles[:, 1])
            if (entry < 0).any():
                lost = handles[np.flatnonzero(entry < 0)[0]].tolist()
                raise EpisodeNotFoundError(f"index {lost}: this reader has no such episode")
            start = handles[:, 2] - self._index.t_base.host[entry]
            usable = starts.usable(torch.from_numpy(entry).to(self._device)).cpu().numpy()
            bad = (start < 0) | (start >= usable)
            if bad.any():
                lost = handles[np.flatnonzero(bad)[0]].tolist()
                raise EpisodeNotFoundError(f"index {lost}: no window can start at that step")
            draw = Draw(torch.from_numpy(entry).to(self._device), torch.from_numpy(start).to(self._device))
            return self._assemble(draw, windows, out or {})

    def _mask(self, where: Where) -> Array:
        """Which index entries a function of the episode table chooses."""
        table = self._snapshot.episodes
        chosen = np.asarray(where(table))
        if chosen.dtype != bool or chosen.shape != (len(table),):
            raise DataError(
                f"where: expected {len(table)} bools, one an episode, got {chosen.dtype} of shape {chosen.shape}"
            )
        numbers = np.array([self._index.numbers[name] for name in self._snapshot.names], np.int64)
        stream = numbers[table.stream_positions[chosen]] if len(table) else numbers[:0]
        entry = self._index.find(stream, table["episode"][chosen])
        mask = np.zeros(self._index.n, bool)
        mask[entry[entry >= 0]] = True
        return mask

    def _starts_of(self, windows: Windows, where: Where | None = None) -> Starts:
        starts = self._starts.get((windows, where))
        if starts is None:
            self._check_fields(windows)
            with_observation = self.schema.reward_alignment == "observation"
            mask = None if where is None else lambda: self._mask(where)
            starts = self._starts[windows, where] = Starts(self._index, windows, with_observation, mask)
            if len(self._starts) > _MAX_KINDS:
                self._starts.pop(next(iter(self._starts)))  # whoever passes a new function each time
            steps = self._relative[windows] = relative(windows, self._device)
            self._is_learning[windows] = (steps >= 0) & (steps <= windows.reach)
        starts.update()
        return starts

    def _check_fields(self, windows: Windows) -> None:
        selected_paths(self.schema, windows.fields)
        selected_paths(self.schema, [name for name, _ in windows.offsets])
        selected_paths(self.schema, windows.next_fields)
        if windows.n_step is not None and self.schema.reward is None:
            raise DataError("n_step: the schema has no reward field")

    def _no_windows(self, windows: Windows, condition: str) -> DataError:
        lengths = self._index.lengths()
        if not len(lengths):
            return DataError(f"{self._snapshot!r} has no episode to draw from")
        needed = (
            windows.reach + 1 + windows.lead + (windows.bootstrap * windows.stride if windows.strict_context else 0)
        )
        return DataError(
            f"no episode {condition}has {needed} usable steps, so no such window exists; the longest of all has"
            f" {lengths.max()}"
        )

    def _assemble(self, draw: Draw, windows: Windows, out: Mapping[str, Any]) -> Batch:
        assert self._cache is not None
        steps = self._steps(draw, windows)
        after = self._after(steps, windows) if windows.needs_next else None
        wanted, masks = self._wanted(steps, after, windows)
        values = self._cache.gather(wanted, _flat_tensors(out))
        _pad(values, masks, windows)
        extra = self._n_step(values, after, windows) if after is not None else {}
        batch: Batch = nest(values)
        batch.update(extra)
        batch.update(self._masks(steps, after, windows))
        index = self._index
        t = index.t_base.device[draw.entry] + draw.start.clamp(min=0)
        handle = (index.stream.device[draw.entry].to(torch.int64), index.episode.device[draw.entry], t)
        batch["index"] = torch.stack(handle, 1)
        return batch

    def _steps(self, draw: Draw, windows: Windows) -> _Steps:
        logical, flags = self._index.logical.device, self._index.flags.device[draw.entry]
        n = logical[draw.entry + 1] - logical[draw.entry] - (flags & HAS_FINAL)
        position = draw.start[:, None] + self._relative[windows]
        if windows.is_inside:
            return _Steps(draw.entry, position, position, None, n, flags)
        last = (n - 1)[:, None]
        inside = torch.minimum(position.clamp(min=0), last)
        return _Steps(draw.entry, position, inside, inside == position, n, flags)

    def _after(self, steps: _Steps, windows: Windows) -> _After:
        """Where each step's transition leads: n steps on, or to where the episode stops before."""
        low, high = windows.n_range
        n = torch.full((len(steps.entry), 1), low, device=self._device)
        if high > low:
            n = n + self._rng.below(len(steps.entry), high - low + 1, self._device)[:, None]
        good = HAS_FINAL if self.schema.reward_alignment == "observation" else HAS_FINAL | TERMINATED
        has_end = (steps.flags & good) != 0
        stop = (steps.n - 1 + has_end.to(steps.n.dtype))[:, None]
        taken = torch.minimum(n, stop - steps.inside).clamp(min=0)
        position = steps.inside + taken
        reached_end = position == steps.n[:, None]
        is_terminal = reached_end & ((steps.flags & TERMINATED) != 0)[:, None]
        last_row = (steps.n - 1 + (steps.flags & HAS_FINAL))[:, None]
        return _After(taken, torch.minimum(position, last_row), is_terminal)

    def _wanted(
        self, steps: _Steps, after: _After | None, windows: Windows
    ) -> tuple[dict[str, Wanted], dict[str, torch.Tensor]]:
        """The rows to read by output key, and for keys that need padding the steps that exist."""
        wanted: dict[str, Wanted] = {}
        masks: dict[str, torch.Tensor] = {}
        rows = self._index.rows(steps.entry, steps.inside)
        for path in selected_paths(self.schema, windows.fields):
            wanted[path] = Wanted(path, rows.source, rows.row)
            if steps.exists is not None:
                masks[path] = steps.exists
        for name, offsets in windows.offsets:
            position = steps.inside[..., None] + torch.tensor(offsets, device=self._device)
            inside = torch.minimum(position.clamp(min=0), (steps.n - 1)[:, None, None])
            stacked = self._index.rows(steps.entry, inside)
            for path in selected_paths(self.schema, (name,)):
                wanted[path] = Wanted(path, stacked.source, stacked.row)
                masks[path] = inside == position
        if after is not None:
            rows = self._index.rows(steps.entry, after.position)
            for path in selected_paths(self.schema, windows.next_fields):
                wanted[f"next/{path}"] = Wanted(path, rows.source, rows.row)
            if windows.n_step is not None:
                wanted["n_step/return"] = self._rewards(steps, windows)
        return wanted, masks

    def _rewards(self, steps: _Steps, windows: Windows) -> Wanted:
        """The rewards of the next n transitions of each step, as far as they exist."""
        assert self.schema.reward is not None
        shift = int(self.schema.reward_alignment == "observation")
        ahead = torch.arange(shift, shift + windows.n_range[1], device=self._device)
        last_row = (steps.n - 1 + (steps.flags & HAS_FINAL))[:, None, None]
        rows = self._index.rows(steps.entry, torch.minimum(steps.inside[..., None] + ahead, last_row))
        return Wanted(self.schema.reward, rows.source, rows.row)

    def _n_step(self, values: dict[str, torch.Tensor], after: _After, windows: Windows) -> Batch:
        if windows.n_step is None:
            return {}
        rewards = values.pop("n_step/return")
        rewards = rewards.reshape(*after.taken.shape, -1).to(torch.float32)
        power = torch.arange(rewards.shape[-1], device=self._device)
        weight = torch.pow(windows.gamma, power) * (power < after.taken[..., None])
        discount = torch.pow(windows.gamma, after.taken).masked_fill(after.is_terminal, 0.0)
        return {"n_step": {"return": (rewards * weight).sum(-1), "discount": discount, "n": after.taken}}

    def _masks(self, steps: _Steps, after: _After | None, windows: Windows) -> Batch:
        exists = steps.exists
        if exists is None:
            exists = torch.ones_like(steps.position, dtype=torch.bool)
        learn = exists & self._is_learning[windows]
        if after is not None:
            learn &= after.taken > 0
        # How the episode ended, where its last step is, else 0.
        end = (steps.flags + MARK)[:, None] * (steps.position == (steps.n - 1)[:, None])
        return {
            "valid": exists,
            "learn": learn,
            "is_first": steps.position == -self._index.t_base.device[steps.entry][:, None],
            "is_last": (end & (MARK | OPEN)) == MARK,
            "terminated": (end & TERMINATED) != 0,
            "truncated": (end & TRUNCATED) != 0,
        }

    def state_dict(self) -> dict[str, Any]:
        """What it takes to go on drawing the same windows."""
        with self._lock:
            return self._rng.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        with self._lock:
            self._rng.load_state_dict(dict(state))

    def stats(self) -> dict[str, Any]:
        """What the cache has done so far, and what it and the index take."""
        with self._lock:
            cache = self._cache
            figures = asdict(cache.stats) if cache else {}
            return figures | {
                "cache_bytes": cache.nbytes if cache else 0,
                "host_cache_bytes": cache.tier.nbytes if cache else 0,
                "index_bytes": self._index.nbytes,
                "n_episodes": self._index.n,
            }


def _pad(values: dict[str, torch.Tensor], masks: Mapping[str, torch.Tensor], windows: Windows) -> None:
    """Overwrite steps that do not exist, unless they repeat the nearest."""
    if windows.pad == "repeat":
        return
    fill = 0.0 if windows.pad == "zero" else float(windows.pad)
    for key, exists in masks.items():
        absent = ~exists.reshape(*exists.shape, *(1,) * (values[key].dim() - exists.dim()))
        values[key].masked_fill_(absent, fill)


def _flat_tensors(out: Mapping[str, Any], prefix: str = "") -> dict[str, torch.Tensor]:
    flat: dict[str, torch.Tensor] = {}
    for name, value in out.items():
        if isinstance(value, Mapping):
            flat |= _flat_tensors(value, f"{prefix}{name}/")
        else:
            flat[prefix + name] = value
    return flat
