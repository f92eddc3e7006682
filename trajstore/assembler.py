"""Windows to batches: one index, one cache, and what is kept for every kind of window that was asked for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from trajstore.cpu import kernels_for
from trajstore.episodes import EpisodeTable
from trajstore.errors import CorruptionError, DataError, EpisodeNotFoundError
from trajstore.index import EpisodeIndex
from trajstore.outputs import check_outputs
from trajstore.pager import ChunkCache
from trajstore.plan import WHOLE, Plan, Planner
from trajstore.schema import Array, Schema
from trajstore.snapshot import Snapshot
from trajstore.starts import Draw, Starts
from trajstore.stream import ChunkError, MissingChunkError
from trajstore.windows import Windows

_MAX_KINDS = 64  # whose sums are kept
_SHOWN = 5

Where = Callable[[EpisodeTable], Array]


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of window among some of the episodes: which there are, and how they become batches."""

    windows: Windows
    starts: Starts
    planner: Planner

    def plan(self, draw: Draw) -> Plan:
        return self.planner.plan(draw, self.starts)


class Assembler:
    """Follows snapshots, plans batches and carries plans out.

    Methods are called with ``lock`` held; one batch is assembled at a time, so nothing that it needs is evicted
    under it.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        device: torch.device,
        budget: int,
        host_budget: int,
        *,
        live_rows: int = 0,
        compiled: bool = True,
    ) -> None:
        self.lock = threading.RLock()
        self.device = device
        self.kernels = kernels_for(device, compiled)
        self.index = EpisodeIndex(device, self.kernels)
        self.budget, self.host_budget = budget, host_budget
        self._live_rows = live_rows
        self._cache: ChunkCache | None = None
        self._kinds: dict[tuple[Windows, Where | None], Kind] = {}
        self.follow(snapshot)

    def follow(self, snapshot: Snapshot) -> None:
        """Show what a newer snapshot shows; costs what is new and what is open."""
        self.snapshot = snapshot
        if snapshot.schema is None:
            return
        if self._cache is None:
            self._cache = ChunkCache(
                snapshot.schema,
                self.device,
                self.budget,
                self.host_budget,
                snapshot.storage,
                live_rows=self._live_rows,
                kernels=self.kernels,
            )
        self.index.update(snapshot)
        readers = {reader.record.id: reader for reader in snapshot.readers}
        self._cache.set_sources([readers.get(name) for name in self.index.numbers])

    @property
    def schema(self) -> Schema:
        if self.snapshot.schema is None:
            raise DataError(f"{self.snapshot!r} is empty: nothing is committed, so there is nothing to read")
        return self.snapshot.schema

    @property
    def cache(self) -> ChunkCache:
        assert self.schema is not None
        assert self._cache is not None
        return self._cache

    def kind(self, windows: Windows, where: Where | None = None) -> Kind:
        """What is kept for a kind of window, up to date."""
        kind = self._kinds.get((windows, where))
        if kind is None:
            kind = self._kinds[windows, where] = self.new_kind(windows, where)
            if len(self._kinds) > _MAX_KINDS:  # whoever passes a new function each time
                self._kinds.pop(next(iter(self._kinds)))
        kind.starts.update()
        return kind

    def new_kind(self, windows: Windows, where: Where | None = None) -> Kind:
        with_observation = self.schema.reward_alignment == "observation"
        mask = None if where is None else lambda: self._mask(where)
        starts = Starts(self.index, windows, with_observation, mask, self.kernels)
        return Kind(windows, starts, Planner(self.index, self.schema, windows, self.kernels))

    def _mask(self, where: Where) -> Array:
        """Which index entries a function of the episode table chooses."""
        table = self.snapshot.episodes
        chosen = np.asarray(where(table))
        if chosen.dtype != bool or chosen.shape != (len(table),):
            raise DataError(
                f"where: expected {len(table)} bools, one an episode, got {chosen.dtype} of shape {chosen.shape}"
            )
        numbers = np.array([self.index.numbers[name] for name in self.snapshot.names], np.int64)
        stream = numbers[table.stream_positions[chosen]] if len(table) else numbers[:0]
        entry = self.index.find(stream, table["episode"][chosen])
        mask = np.zeros(self.index.n, bool)
        mask[entry[entry >= 0]] = True
        return mask

    def no_windows(self, windows: Windows, condition: str) -> DataError:
        """Why nothing can be drawn."""
        lengths = self.index.lengths()
        if not len(lengths):
            return DataError(f"{self.snapshot!r} has no episode to draw from")
        outside = (windows.burn_in + windows.bootstrap) * windows.stride if windows.strict_context else 0
        needed = 1 + outside + (windows.reach if windows.boundary in ("strict", "cross") else 0)
        return DataError(
            f"no episode {condition}has {needed} usable steps, so no such window exists; the longest of all has"
            f" {lengths.max()}"
        )

    def draw_at(self, kind: Kind, handles: Array, n: torch.Tensor | None, is_strict: bool) -> Draw:
        """The windows of given handles (stream number, episode, t).

        Raises:
            EpisodeNotFoundError: An episode is not here, or no window may start there (where ``is_strict``).
        """
        entry = self.index.find(handles[:, 0], handles[:, 1])
        if (entry < 0).any():
            lost = handles[np.flatnonzero(entry < 0)[0]].tolist()
            raise EpisodeNotFoundError(f"index {lost}: this reader has no such episode")
        start = handles[:, 2] - self.index.t_base.host[entry]
        on_device = torch.from_numpy(entry).to(self.device)
        if is_strict:
            usable = kind.starts.usable(on_device).cpu().numpy()
            bad = (start < 0) | (start >= usable)
            if bad.any():
                lost = handles[np.flatnonzero(bad)[0]].tolist()
                raise EpisodeNotFoundError(f"index {lost}: no window can start at that step")
        return Draw(on_device, torch.from_numpy(start).to(self.device), n)

    def carry_out(self, kind: Kind, plan: Plan, outs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Read what a plan wants and make the flat batch; ``outs`` is written where it has a key.

        Raises:
            CorruptionError: A chunk is damaged or lost; names the episodes in it.
            SnapshotExpiredError: It was evicted.
        """
        if outs:
            outs = _opened(outs, kind.windows)
            check_outputs(outs, self.cache.shapes(plan.wanted) | plan.shapes())
        try:
            values = self.cache.gather(plan.wanted, outs)
        except ChunkError as error:
            raise self._explained(error) from error
        flat = kind.planner.finish(plan, values)
        for key in outs.keys() & flat.keys():
            if flat[key].data_ptr() != outs[key].data_ptr():
                flat[key] = outs[key].copy_(flat[key].view(outs[key].shape)).view(flat[key].shape)
        return flat

    def _explained(self, error: ChunkError) -> Exception:
        """The error with the episodes that it takes away."""
        if isinstance(error, MissingChunkError):
            reason = self.snapshot.reason(error, error.stop - 1)
            if not isinstance(reason, CorruptionError):
                return reason
        index, source = self.index, self.index.numbers[error.stream] + 1
        rows = index.span_row.host  # of evicted spans, which lie in no chunk that is asked for, anything
        ends = rows + np.diff(np.append(index.span_logical.host, index.n_rows))
        spans = np.flatnonzero((index.span_source.host == source) & (rows < error.stop) & (ends > error.start))
        entries = np.unique(np.searchsorted(index.logical.host, index.span_logical.host[spans], side="right") - 1)
        episodes = index.episode.host[entries].tolist()
        more = f" and {len(episodes) - _SHOWN} more" if len(episodes) > _SHOWN else ""
        return CorruptionError(f"{error}; it holds steps of episodes {episodes[:_SHOWN]}{more}")

    def stats(self) -> dict[str, Any]:
        cache = self._cache
        figures = asdict(cache.stats) if cache else {}
        return figures | {
            "cache_bytes": cache.nbytes if cache else 0,
            "host_cache_bytes": cache.tier.nbytes if cache else 0,
            "index_bytes": self.index.nbytes,
            "n_episodes": self.index.n - self.index.first,
            "n_spans": self.index.span_row.n,
            "is_compiled": self.kernels is not None,
        }


def _opened(outs: Mapping[str, torch.Tensor], windows: Windows) -> dict[str, torch.Tensor]:
    """Outputs with the axis of the window, which squeezed batches lack."""
    kept = {key: out for key, out in outs.items() if key != "n_step/return"}  # rewards are not read into their sum
    if not windows.squeeze:
        return kept
    return {key: out if key in WHOLE else out.unsqueeze(1) for key, out in kept.items()}
