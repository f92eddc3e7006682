"""The reader: batches of windows, on the device, from the chunk cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch

from trajstore.arguments import check_positive, parse_bytes
from trajstore.errors import DataError, EpisodeNotFoundError
from trajstore.sampling.batch_assembler import BatchAssembler, Where, WindowKind
from trajstore.sampling.batch_iterator import BatchIterator
from trajstore.sampling.derived_columns import DerivedColumns
from trajstore.sampling.draws import Draws, DrawScope, EpochDraws, RandomDraws, StagedDraws
from trajstore.sampling.hindsight import Hindsight, Relabeller
from trajstore.sampling.index_entries import handles_of
from trajstore.sampling.outputs import Ring, flat_outputs, to_batch
from trajstore.sampling.prioritised_draws import PrioritisedDraws, PrioritySampler
from trajstore.sampling.priority_options import Priorities
from trajstore.sampling.rng import CounterRng
from trajstore.sampling.step_table import StepTable
from trajstore.sampling.window_starts import DrawnWindows
from trajstore.sampling.windows import Windows
from trajstore.schema import Field, Schema
from trajstore.store.snapshot import Snapshot
from trajstore.store.store import Store
from trajstore.writing.writer import Writer

_REMOTE_HOST_BYTES = 1 << 30

_T = TypeVar("_T")


class Reader:
    """Samples windows of a store; safe to use from several threads, one batch at a time.

    It shows the episodes of the snapshot that it was made or last refreshed with. Same seed, same episodes, same
    calls: same batches, on every device and with every cache size.

    A batch is a nested dict: the fields as ``[batch, window, ...]``; ``valid`` (the step exists), ``learn`` (it
    belongs to the loss), ``is_first``, ``is_last``, ``terminated``, ``truncated``, all ``[batch, window]``;
    ``index``, ``[batch, 3]``: stream number, episode and t of the first learning step; where asked for, ``next``
    fields and ``n_step`` with ``return``, ``discount`` (0 where it terminated) and ``n``.

    Args:
        store: The store to read, or one of its snapshots.
        device: Where batches and the cache live.
        cache_bytes: Bound of the memory for decoded chunks on the device; at least two chunks of every field stay.
        host_cache_bytes: Bound of the memory for compressed chunks in RAM. By default 1 GiB for object stores, and
            none for local directories, whose files the operating system keeps in RAM as it is.
        seed: Of the draws.
        writer: Show also what this writer of the same store appends, at once and before it is committed. It has
            appended nothing yet. Its buffer takes its part of the cache.
        priorities: Draw by priority, and keep priorities; see `update_priorities`.
        as_tensordict: Give batches as TensorDicts.
        compiled: Use compiled loops on the CPU, where numba is installed; the batches are the same without.
        streams: Ids of streams that get the first numbers, in this order, in a batch's ``index``.
    """

    def __init__(
        self,
        store: Store | Snapshot,
        *,
        device: str | torch.device = "cpu",
        cache_bytes: int | str = "1GiB",
        host_cache_bytes: int | str | None = None,
        seed: int = 0,
        writer: Writer | None = None,
        priorities: Priorities | None = None,
        as_tensordict: bool = False,
        compiled: bool = True,
        streams: Sequence[str] = (),
    ) -> None:
        self._store = store
        snapshot = store.snapshot if isinstance(store, Store) else store
        if host_cache_bytes is None:
            host_bytes = _REMOTE_HOST_BYTES if snapshot.storage.is_remote else 0
        else:
            host_bytes = _host_bytes(host_cache_bytes)
        self._rng = CounterRng(seed)
        self._as_tensordict = as_tensordict
        budget = parse_bytes(cache_bytes, "cache_bytes")
        budgets = budget, host_bytes
        self._source = BatchAssembler(
            snapshot, torch.device(device), *budgets, writer=writer, compiled=compiled, streams=streams
        )
        self._steps = StepTable(self._source.index)
        self._derived = DerivedColumns(self._source, self._steps)
        self._last_relabeller: Relabeller | None = None
        self._priorities = (
            PrioritySampler(self._source, priorities, self._steps) if priorities is not None else None
        )

    @property
    def assembler(self) -> BatchAssembler:
        """Plans and reads the batches, for code that extends trajstore; not a stable interface."""
        return self._source

    @property
    def rng(self) -> CounterRng:
        """The random numbers of the draws; checkpoints keep its position."""
        return self._rng

    def refresh(self) -> None:
        """Show what has been committed meanwhile; costs what is new and what is open."""
        with self._source.lock:
            if isinstance(self._store, Store):
                self._source.follow(self._store.refresh())

    @property
    def schema(self) -> Schema:
        return self._source.schema

    @property
    def snapshot(self) -> Snapshot:
        """What this reader shows."""
        return self._source.snapshot

    @property
    def streams(self) -> list[str]:
        """Ids of the streams, by the number that stands in a batch's ``index``."""
        with self._source.lock:
            return list(self._source.index.numbers)

    def n_windows(self, windows: Windows, *, where: Where | None = None) -> int:
        """How many windows can be drawn (with weights: steps or episodes that a draw is uniform over)."""
        with self._source.lock:
            self._source.publish()
            return self._source.kind(windows, where).starts.total

    def sample(
        self,
        batch_size: int,
        windows: Windows,
        *,
        where: Where | None = None,
        recent_steps: int | None = None,
        recent_episodes: int | None = None,
        recent_fraction: float = 1.0,
        prioritised: bool = True,
        relabel: Hindsight | None = None,
        out: Mapping[str, Any] | Ring | None = None,
    ) -> Any:
        """Draw windows with replacement: uniformly, or by priority if the reader has priorities.

        Prioritised batches hold ``priority``: the ``weight`` of each window in the loss, and its ``probability``.

        Args:
            batch_size: How many.
            windows: Which, and what comes with them.
            where: Only from episodes that this function of the episode table says True for (an array of bools).
                Keep one function and pass it again: it is asked once after every refresh.
            recent_steps: Only windows that start within the last so many steps, in order of arrival.
            recent_episodes: Only from the last so many episodes, in order of arrival.
            recent_fraction: The part of the batch for which that holds; the rest comes from everywhere.
            prioritised: Say False to draw uniformly from a reader with priorities.
            relabel: Give some windows goals that were achieved, and the rewards that go with them.
            out: A batch of an earlier call with the same arguments, to be overwritten, or a ring of them.
        """
        among = DrawScope(where, recent_steps, recent_episodes, recent_fraction)
        draws = self._draws(batch_size, windows, among, self._rng, prioritised)
        with self._source.lock:
            self._source.publish()
            drawn = draws.draw()
            assert drawn is not None
            return self._batch(*drawn, out, self._relabeller(relabel, self._rng))

    def _draws(
        self, batch_size: int, windows: Windows, among: DrawScope, rng: CounterRng, prioritised: bool
    ) -> RandomDraws | PrioritisedDraws:
        if self._priorities is not None and prioritised:
            return PrioritisedDraws(self._priorities, batch_size, windows, among, rng)
        return RandomDraws(self._source, batch_size, windows, among, rng)

    def update_priorities(self, index: torch.Tensor, priority: torch.Tensor, windows: Windows | None = None) -> int:
        """Set priorities of steps that a batch's ``index`` names.

        Args:
            index: ``[batch, 3]``, as it came; also late, from another thread and in any order.
            priority: ``[batch]`` for the steps named, or ``[batch, length]`` for all learning steps of the windows;
                finite and at least 0. Those past the end of an episode do not count.
            windows: What was sampled, where its stride is not 1.

        Returns:
            How many were ignored because their steps were evicted meanwhile.

        Raises:
            DataError: An index is of no step here, or a priority is not finite or below 0; nothing was changed.
        """
        with self._source.lock:
            return self._knowing_all(lambda: self._sampler.update(index, priority, windows))

    def _knowing_all(self, act: Callable[[], _T]) -> _T:
        """Do what takes handles of steps, which are valid from the moment that these are appended."""
        self._source.publish()
        try:
            return act()
        except (DataError, EpisodeNotFoundError):  # perhaps of steps that came while another thread appends
            self._source.publish(waits=True)
            return act()

    def save_priorities(self, writer: Writer) -> int:
        """Hand the priorities that have changed to a writer of the same store; its next commit makes them durable.

        A reader made later, with priorities, finds them bit by bit. Keep one writer for this: the first time all
        values are written, then what has changed. Returns how many values were handed over.
        """
        with self._source.lock:
            return self._sampler.save(writer)

    def follow_priorities(self) -> None:
        """Keep up with steps that came and went, also if nobody samples."""
        if self._priorities is not None:
            with self._source.lock:
                self._priorities.follow()

    def set_priorities(self, **options: Any) -> None:
        """Change options of the priorities: ``alpha`` makes all masses anew, ``beta`` costs nothing."""
        with self._source.lock:
            self._sampler.configure(**options)

    def priority_stats(self, windows: Windows, *, where: Where | None = None, n_bins: int = 20) -> dict[str, Any]:
        """Figures over the windows that can be drawn: priorities, effective sample size, mass by age.

        Costs in proportion to all of them.
        """
        with self._source.lock:
            return self._sampler.stats(windows, where, n_bins)

    def add_column(
        self, name: str, field: Field, *, fill: float = 0, of_new: Callable[[], float] | None = None
    ) -> None:
        """Keep one more value for every step, computed after collection; batches hold it as ``name``.

        It is kept in memory on the device, of every step that is here. Where the store has such a column
        (`save_columns`), its values are read; other steps, and new ones, have ``fill``.

        Args:
            name: Of the column, here and in the store.
            field: Its dtype and shape.
            fill: The value of steps that got none yet.
            of_new: Gives the value of steps that come later, when they are first seen; ``fill`` by default.

        Raises:
            DataError: The name is taken.
            CorruptionError: The store has a column of that name and another dtype or shape.
        """
        with self._source.lock:
            self._source.publish()
            self._derived.add(name, field, fill, of_new)

    def write_column(
        self, name: str, index: torch.Tensor, values: torch.Tensor, windows: Windows | None = None
    ) -> int:
        """Set a column's values at steps that a batch's ``index`` names; batches drawn from now on hold them.

        Args:
            name: Of the column.
            index: ``[batch, 3]``, as it came; also late.
            values: ``[batch, ...]`` for the steps named, or ``[batch, length, ...]`` for all learning steps.
            windows: What was sampled, where its stride is not 1.

        Returns:
            How many were ignored because their steps were evicted meanwhile.
        """
        with self._source.lock:
            stride = 1 if windows is None else windows.stride
            return self._knowing_all(lambda: self._derived.write(name, index, values, stride))

    def write_all(self, name: str, values: Any) -> int:
        """Set a column's values of all steps, in the order of `read_all_in_order`; returns how many those are.

        Args:
            name: Of the column.
            values: An array or tensor, or an iterator over blocks of them.
        """
        with self._source.lock:
            return self._derived.write_all(name, [values] if hasattr(values, "dtype") else values)

    def column(self, name: str) -> Any:
        """A column's values of all steps, in the order of `read_all_in_order`, as an array."""
        with self._source.lock:
            return self._derived.column(name)

    def follow_columns(self) -> None:
        """Give values to steps that came since."""
        with self._source.lock:
            self._derived.follow()

    def read_all_in_order(
        self, *, block_steps: int = 8192, fields: Iterable[str] | None = None, prefetch: int = 0
    ) -> BatchIterator:
        """An iterator over all steps there are now, episode after episode in order of arrival, a block at a time.

        Blocks are batches of single steps, without the axis of the window: the fields, ``index``, ``is_first``,
        ``is_last``, ``terminated`` and ``truncated``, ``[n, ...]`` each.
        """
        chosen = None if fields is None else tuple(fields)
        windows = Windows(fields=chosen, squeeze=True)
        return self.epoch(block_steps, windows, shuffle=False, prefetch=prefetch)

    @property
    def has_columns(self) -> bool:
        return bool(self._derived)

    def save_columns(self, writer: Writer) -> None:
        """Hand the columns' values that have changed to a writer of the same store, for its next commit."""
        with self._source.lock:
            self._derived.save(writer)

    @property
    def _sampler(self) -> PrioritySampler:
        if self._priorities is None:
            raise ValueError("this reader has no priorities; make it with priorities=Priorities(...)")
        return self._priorities

    def at(
        self,
        index: torch.Tensor,
        windows: Windows,
        *,
        relabel: Hindsight | None = None,
        out: Mapping[str, Any] | Ring | None = None,
    ) -> Any:
        """The windows at given indices, as a batch's ``index`` holds them.

        Raises:
            EpisodeNotFoundError: An episode is not here, or has no window that starts at that step.
        """
        with self._source.lock:
            kind, draw = self._knowing_all(lambda: self._drawn_at(windows, index))
            return self._batch(kind, draw, out, self._relabeller(relabel, self._rng))

    def _drawn_at(self, windows: Windows, index: torch.Tensor) -> tuple[WindowKind, DrawnWindows]:
        kind = self._source.kind(windows)
        draw = self._source.draw_at(kind, handles_of(index), None, is_strict=True)
        return kind, kind.starts.with_n(draw, self._rng)

    def _relabeller(self, options: Hindsight | None, rng: CounterRng) -> Relabeller | None:
        if options is None:
            return None
        last = self._last_relabeller  # tables that it has made serve the next batch as well
        if last is None or last.options != options or last.rng is not rng:
            last = self._last_relabeller = Relabeller(self._source, options, rng)
        return last

    def _batch(
        self,
        kind: Any,
        draw: DrawnWindows,
        out: Mapping[str, Any] | Ring | None = None,
        relabeller: Relabeller | None = None,
    ) -> Any:
        plan = self._derived.plan(kind, draw, relabeller)
        if not isinstance(out, Ring):
            flat = self._source.read_batch(kind, plan, flat_outputs(out))
            return to_batch(flat, self._as_tensordict)
        slot = out.reserve()
        flat = self._source.read_batch(kind, plan, out.take(slot, (kind.windows, len(draw.entry))))
        out.give(slot, flat)
        return to_batch(flat, self._as_tensordict)

    def sample_episodes(
        self,
        batch_size: int,
        *,
        windows: Windows | None = None,
        where: Where | None = None,
        index: torch.Tensor | None = None,
    ) -> Any:
        """Whole episodes, drawn uniformly, padded at the right to the longest of the batch.

        Args:
            batch_size: How many.
            windows: Fields, padding and so on; its length and boundary do not count.
            where: Only from episodes that this function of the episode table says True for.
            index: Not drawn but these, as ``[batch, 2]``: stream number and episode.
        """
        check_positive("batch_size", batch_size)
        base = replace(windows or Windows(), boundary="pad_right", weight="episode", burn_in=0, bootstrap=0)
        base = replace(base, length=1, stride=1, squeeze=False, strict_context=False)
        with self._source.lock:
            self._source.publish()
            kind = self._source.kind(base, where)
            if not kind.starts.total:
                raise self._source.no_windows(base, "that the restrictions allow " if where else "")
            entry = kind.starts.draw(batch_size, self._rng).entry
            if index is not None:
                handles = torch.cat([index.cpu(), torch.zeros((len(index), 1), dtype=torch.int64)], 1)
                entry = self._source.draw_at(kind, handles_of(handles), None, is_strict=False).entry
            lengths = torch.from_numpy(self._source.index.lengths())[entry.cpu()]
            whole = self._source.new_kind(replace(base, length=int(lengths.max())), where)
            return self._batch(whole, whole.starts.with_n(DrawnWindows(entry, torch.zeros_like(entry)), self._rng))

    def batches(
        self,
        batch_size: int,
        windows: Windows,
        *,
        prefetch: int = 0,
        where: Where | None = None,
        recent_steps: int | None = None,
        recent_episodes: int | None = None,
        recent_fraction: float = 1.0,
        prioritised: bool = True,
        relabel: Hindsight | None = None,
        out: Ring | None = None,
        admit: Callable[[int], None] | None = None,
    ) -> BatchIterator:
        """An endless iterator over batches as `sample` gives them, with ``prefetch`` prepared in the background.

        It draws from a generator of its own, so that its sequence depends neither on ``prefetch`` nor on what else
        is sampled. ``admit`` is called with the size of every batch before it is given out, and may wait or raise.
        """
        among = DrawScope(where, recent_steps, recent_episodes, recent_fraction)
        with self._source.lock:
            rng = self._rng.fork()
            draws = self._draws(batch_size, windows, among, rng, prioritised)
            return self._iterate(draws, prefetch, out, admit, self._relabeller(relabel, rng))

    def epoch(
        self,
        batch_size: int,
        windows: Windows,
        *,
        shuffle: bool = True,
        drop_last: bool = False,
        prefetch: int = 0,
        where: Where | None = None,
        out: Ring | None = None,
    ) -> BatchIterator:
        """An iterator over every window once: those there are now, whatever is committed meanwhile.

        Args:
            batch_size: Windows in a batch; the last one may be smaller.
            windows: Which, and what comes with them.
            shuffle: In random order; else in order of arrival.
            drop_last: Leave out a last batch that is not full.
            prefetch: Batches to prepare in the background.
            where: Only from episodes that this function of the episode table says True for.
            out: A ring of output memory.
        """
        with self._source.lock:
            self._source.publish()
            draws = EpochDraws(
                self._source, batch_size, windows, where, self._rng.fork(), shuffle=shuffle, drop_last=drop_last
            )
        return self._iterate(draws, prefetch, out)

    def staged(
        self,
        batch_size: int,
        windows: Windows,
        *,
        reuse: float = 1.0,
        prefetch: int = 0,
        where: Where | None = None,
        out: Ring | None = None,
    ) -> BatchIterator:
        """An endless iterator for stores far larger than the cache. **Not uniform at any one moment**.

        Windows come from the part of the store that is resident, and other parts rotate in in the background. Over
        a whole round every window is equally likely; ``stats()`` tells the reuse and the distance from uniform.

        Args:
            batch_size: Windows in a batch.
            windows: Which, and what comes with them.
            reuse: Draws for every window that is loaded, on average.
            prefetch: Batches to prepare in the background.
            where: Only from episodes that this function of the episode table says True for.
            out: A ring of output memory.
        """
        with self._source.lock:
            self._source.publish()
            room = self._source.cache.room(windows.fields)
            segment = max(1, room // (_SEGMENTS + 1))
            draws = StagedDraws(
                self._source,
                batch_size,
                windows,
                where,
                self._rng.fork(),
                reuse=reuse,
                segment=segment,
                n_resident=_SEGMENTS,
            )
        return self._iterate(draws, prefetch, out)

    def _iterate(
        self,
        draws: Draws | PrioritisedDraws,
        prefetch: int,
        ring: Ring | None,
        admit: Callable[[int], None] | None = None,
        relabeller: Relabeller | None = None,
    ) -> BatchIterator:
        return BatchIterator(
            self._source,
            draws,
            prefetch=prefetch,
            ring=ring,
            as_tensordict=self._as_tensordict,
            admit=admit,
            plan=lambda kind, draw, goals: self._derived.plan(kind, draw, relabeller, goals),
        )

    def pin(self, index: torch.Tensor, windows: Windows) -> None:
        """Keep the chunks of these windows in the cache until `unpin`.

        Raises:
            ValueError: They do not fit; nothing is pinned.
        """
        with self._source.lock:
            kind = self._source.kind(windows)
            draw = self._source.draw_at(kind, handles_of(index), None, is_strict=True)
            self._source.pin(kind, kind.starts.with_n(draw, CounterRng(0)))

    def unpin(self) -> None:
        with self._source.lock:
            self._source.cache.unpin()

    def invalidate(self) -> None:
        """Drop everything that was read; it is read again when it is asked for."""
        with self._source.lock:
            if self._source.has_cache:
                self._source.cache.invalidate()

    def resize(self, *, cache_bytes: int | str | None = None, host_cache_bytes: int | str | None = None) -> None:
        """Change the bounds of the caches; what does not fit any more is dropped."""
        budget = None if cache_bytes is None else parse_bytes(cache_bytes, "cache_bytes")
        host_budget = None if host_cache_bytes is None else _host_bytes(host_cache_bytes)
        with self._source.lock:
            self._source.resize(budget=budget, host_budget=host_budget)

    def state_dict(self) -> dict[str, Any]:
        """What it takes to go on drawing the same windows from the same store, priorities included."""
        with self._source.lock:
            state = self._rng.state_dict() | {"columns": self._derived.state_dict()}
            if self._priorities is not None:
                return state | {"priorities": self._priorities.state_dict()}
            self._derived.follow()
            return state | ({"steps": self._steps.state_dict()} if self._derived else {})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        with self._source.lock:
            self._rng.load_state_dict(dict(state))
            self._derived.load_state_dict(state["columns"])
            if "steps" in state:
                self._steps.load_state_dict(state["steps"])
            if self._priorities is not None and "priorities" in state:
                self._priorities.load_state_dict(state["priorities"])

    def stats(self) -> dict[str, Any]:
        """What the cache has done so far, and what it and the index take."""
        with self._source.lock:
            return self._source.stats()


_SEGMENTS = 16  # of staged draws that are resident at a time; one more is on its way


def _host_bytes(value: int | str) -> int:
    return 0 if value == 0 else parse_bytes(value, "host_cache_bytes")
