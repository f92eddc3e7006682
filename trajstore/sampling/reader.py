"""The reader: samples batches of windows from a store, on a device, through the chunk cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from trajstore.arguments import check_positive, parse_bytes
from trajstore.sampling.batch_iterator import BatchIterator
from trajstore.sampling.batches.batch_assembler import BatchAssembler, Where, WindowKind
from trajstore.sampling.batches.outputs import Batch, Ring
from trajstore.sampling.draws import DrawScope, EpochDraws, RandomDraws, StagedDraws
from trajstore.sampling.episode_blocks import EpisodeBlockDraws, block_windows
from trajstore.sampling.hindsight import Hindsight
from trajstore.sampling.index.index_entries import StepIndex, handles_of
from trajstore.sampling.priorities.prioritised_draws import PrioritisedDraws
from trajstore.sampling.priorities.priority_options import Priorities
from trajstore.sampling.reader_batches import ReaderBatches
from trajstore.sampling.rng import CounterRng
from trajstore.sampling.step_values import StepValues
from trajstore.sampling.window_starts import DrawnWindows
from trajstore.sampling.windows import Windows
from trajstore.schema import Schema
from trajstore.store.snapshot import Snapshot
from trajstore.store.store import Store, check_is_store
from trajstore.writing.writer import Writer

_REMOTE_HOST_BYTES = 1 << 30
_RESIDENT_SEGMENTS = 16  # of staged draws; one more is being loaded


class Reader(StepValues):
    """Samples batches of windows from a store.

    Thread-safe: any thread may call any method; one batch is assembled at a time.

    A reader of a store shows what is committed when it is created; `refresh` shows later commits. A reader of a
    snapshot shows that snapshot. The same seed, episodes and calls give the same batches, on every device and with
    every cache size.

    A batch is a nested dict of tensors, or a TensorDict:

    - the fields, ``[batch, window, ...]``;
    - ``valid`` (the step exists), ``learn`` (the step belongs to the loss), ``is_first``, ``is_last``,
      ``terminated`` and ``truncated``, ``[batch, window]`` each;
    - ``index``, ``[batch, 3]``: stream number, episode and t of the first learning step;
    - if requested, the ``next`` fields, and ``n_step`` with ``return``, ``discount`` (0 where the episode
      terminated) and ``n``.

    Args:
        store: The store to read, which is refreshed, or one of its snapshots.
        device: The device of batches and cache.
        cache_bytes: Limit of the memory for decoded chunks on the device. Two chunks of every field are kept even
            if they exceed it.
        host_cache_bytes: Limit of the memory for compressed chunks in RAM. By default 1 GiB for object stores and 0
            for local directories, whose files the operating system caches.
        seed: Seed of the draws.
        writer: A writer of the same store whose appended steps are shown at once, before they are committed. It
            must not have appended anything yet. Its uncommitted steps take part of the cache.
        priorities: Options of prioritised sampling; None samples uniformly. See `update_priorities`.
        as_tensordict: Return batches as TensorDicts.
        compiled: Use compiled loops on the CPU if numba is installed; batches are the same without them.
        streams: Ids of the streams that get the first stream numbers, in this order.

    Attributes:
        assembler: Reads rows into batches. For other parts of trajstore; hold its ``lock`` while using it.
        rng: The generator of the draws. For other parts of trajstore, as above.
        priority_sampler: Draws by priority; None without ``priorities``. For other parts of trajstore, as above.
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
        check_is_store(store)
        snapshot = store.refresh() if isinstance(store, Store) else store
        if host_cache_bytes is None:
            host_bytes = _REMOTE_HOST_BYTES if snapshot.storage.is_remote else 0
        else:
            host_bytes = _host_bytes(host_cache_bytes)
        self.rng = CounterRng(seed)
        budgets = parse_bytes(cache_bytes, "cache_bytes"), host_bytes
        assembler = BatchAssembler(
            snapshot, torch.device(device), *budgets, writer=writer, compiled=compiled, streams=streams
        )
        super().__init__(assembler, priorities)
        self._batches = ReaderBatches(assembler, self._columns, as_tensordict=as_tensordict)

    def refresh(self) -> None:
        """Make commits since the last refresh visible. Cost is proportional to the new data and to open episodes.

        A reader of a snapshot does not change.
        """
        with self.assembler.lock:
            if isinstance(self._store, Store):
                self.assembler.follow(self._store.refresh())

    @property
    def schema(self) -> Schema:
        """The fields of the store.

        Raises:
            NotReadyError: The store has no schema before its first data.
        """
        return self.assembler.schema

    @property
    def snapshot(self) -> Snapshot:
        """The snapshot that this reader shows."""
        return self.assembler.snapshot

    @property
    def streams(self) -> list[str]:
        """Ids of the streams; the position of an id is its stream number in a batch's ``index``."""
        with self.assembler.lock:
            return list(self.assembler.index.numbers)

    def n_windows(self, windows: Windows, *, where: Where | None = None) -> int:
        """The number of windows that can be drawn.

        With ``Windows(weight="step")`` or ``"episode"``, the number of steps or episodes instead.
        """
        with self.assembler.lock:
            self.assembler.publish()
            return self.assembler.kind(windows, where).starts.total

    def window_stats(self, windows: Windows, *, where: Where | None = None) -> dict[str, int]:
        """What can be drawn, and what is left out because the observation after a step is not known.

        Args:
            windows: Which windows.
            where: As in `sample`.

        Returns:
            ``n_windows``, as `n_windows` returns it; ``n_left_out``: last steps of episodes that were truncated or
            cut without a final observation; ``n_open``: newest steps of open episodes, whose next observation is
            still to come. The last two are 0 for windows without next values and n-step returns.
        """
        with self.assembler.lock:
            self.assembler.publish()
            starts = self.assembler.kind(windows, where).starts
            n_left_out, n_open = starts.steps_left_out()
            return {"n_windows": starts.total, "n_left_out": n_left_out, "n_open": n_open}

    # ---- batches

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
    ) -> Batch:
        """Draw a batch of windows with replacement: uniformly, or by priority if the reader has priorities.

        Prioritised batches also hold ``priority``: the ``weight`` of each window in the loss, and its
        ``probability``.

        Args:
            batch_size: The number of windows.
            windows: Which windows, and which fields.
            where: A function of the episode table that returns one bool per episode: draw only from episodes with
                True. It is called once after every refresh; pass the same function each time.
            recent_steps: Draw only windows that start within this many of the newest steps, in order of arrival.
            recent_episodes: Draw only from this many of the newest episodes, in order of arrival.
            recent_fraction: The fraction of the batch that ``recent_steps`` and ``recent_episodes`` restrict; the
                rest is drawn from all windows.
            prioritised: False draws uniformly although the reader has priorities.
            relabel: Replace the goals of some windows by achieved goals, and recompute their rewards.
            out: A batch of an earlier call with the same arguments, which is overwritten, or a ring of batches.

        Raises:
            NotReadyError: No such window exists yet.
        """
        scope = DrawScope(where, recent_steps, recent_episodes, recent_fraction)
        draws = self._draws(batch_size, windows, scope, self.rng, prioritised)
        with self.assembler.lock:
            self.assembler.publish()
            return self._batches.sample(draws, out, self._batches.relabeller(relabel, self.rng))

    def _draws(
        self, batch_size: int, windows: Windows, scope: DrawScope, rng: CounterRng, prioritised: bool
    ) -> RandomDraws | PrioritisedDraws:
        if self.priority_sampler is not None and prioritised:
            return PrioritisedDraws(self.priority_sampler, batch_size, windows, scope, rng)
        return RandomDraws(self.assembler, batch_size, windows, scope, rng)

    def at(
        self,
        index: StepIndex,
        windows: Windows,
        *,
        relabel: Hindsight | None = None,
        out: Mapping[str, Any] | Ring | None = None,
    ) -> Batch:
        """Read the windows at the steps of an earlier batch, or at other steps.

        Args:
            index: A batch; its ``index``, ``[batch, 3]``: stream number, episode and t of each window's first
                learning step; or handles that `append` returned.
            windows: Which windows, and which fields.
            relabel: As in `sample`.
            out: As in `sample`.

        Raises:
            EpisodeNotFoundError: The reader does not have an episode, or no such window starts at a step.
        """
        with self.assembler.lock:
            kind, drawn = self._with_all_steps(lambda: self._drawn_at(windows, index))
            return self._batches.make(kind, drawn, out, self._batches.relabeller(relabel, self.rng))

    def _drawn_at(self, windows: Windows, index: StepIndex) -> tuple[WindowKind, DrawnWindows]:
        kind = self.assembler.kind(windows)
        drawn = self.assembler.draw_at(kind, handles_of(index, self.assembler.index.numbers), None, is_strict=True)
        return kind, kind.starts.with_n(drawn, self.rng)

    def sample_episodes(
        self,
        batch_size: int,
        *,
        windows: Windows | None = None,
        where: Where | None = None,
        index: torch.Tensor | None = None,
    ) -> Batch:
        """Draw whole episodes uniformly, padded on the right to the longest of the batch.

        Args:
            batch_size: The number of episodes.
            windows: Fields, padding and so on; its length, stride, boundary, burn-in and bootstrap are ignored.
            where: As in `sample`.
            index: Read these episodes instead of drawing; ``[batch, 2]``: stream number and episode.

        Raises:
            NotReadyError: No episode can be drawn.
            EpisodeNotFoundError: The reader does not have an episode of ``index``.
        """
        check_positive("batch_size", batch_size)
        with self.assembler.lock:
            self.assembler.publish()
            return self._batches.whole_episodes(batch_size, windows, where, index, self.rng)

    # ---- iterators

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
        count: Callable[[int], None] | None = None,
    ) -> BatchIterator:
        """An endless iterator over batches like those of `sample`.

        The iterator has its own random number generator, so its sequence depends neither on ``prefetch`` nor on
        other calls.

        Args:
            batch_size: The number of windows in a batch.
            windows: Which windows, and which fields.
            prefetch: The number of batches to prepare in the background.
            where: As in `sample`, like the next five arguments.
            recent_steps: See there.
            recent_episodes: See there.
            recent_fraction: See there.
            prioritised: See there.
            relabel: See there.
            out: A ring of at least ``prefetch + 2`` batches to write into.
            admit: Called with the size of every batch before the iterator returns it; it may wait or raise.
            count: Called with the size of every batch that the iterator returns; it must not wait.
        """
        scope = DrawScope(where, recent_steps, recent_episodes, recent_fraction)
        with self.assembler.lock:
            rng = self.rng.fork()
            draws = self._draws(batch_size, windows, scope, rng, prioritised)
            relabeller = self._batches.relabeller(relabel, rng)
            return self._batches.iterate(draws, prefetch, out, admit, relabeller, count)

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
        """An iterator over every window once. Windows that come after this call are not included.

        Args:
            batch_size: The number of windows in a batch; the last batch may be smaller.
            windows: Which windows, and which fields.
            shuffle: Random order; otherwise order of arrival.
            drop_last: Leave out a last batch that is not full.
            prefetch: The number of batches to prepare in the background.
            where: As in `sample`.
            out: A ring of at least ``prefetch + 2`` batches to write into.
        """
        with self.assembler.lock:
            self.assembler.publish()
            rng = self.rng.fork()
            draws = EpochDraws(
                self.assembler, batch_size, windows, where, rng, shuffle=shuffle, drop_last=drop_last
            )
        return self._batches.iterate(draws, prefetch, out)

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

        Windows are drawn from the part of the store that is in the cache, while other parts are loaded in the
        background. Over a whole round every window is equally likely. The iterator's ``stats()`` report the reuse
        and the distance from uniform.

        Args:
            batch_size: The number of windows in a batch.
            windows: Which windows, and which fields.
            reuse: Draws per loaded window, on average.
            prefetch: The number of batches to prepare in the background.
            where: As in `sample`.
            out: A ring of at least ``prefetch + 2`` batches to write into.
        """
        with self.assembler.lock:
            self.assembler.publish()
            room = self.assembler.cache.room(windows.fields)
            draws = StagedDraws(
                self.assembler,
                batch_size,
                windows,
                where,
                self.rng.fork(),
                reuse=reuse,
                segment=max(1, room // (_RESIDENT_SEGMENTS + 1)),
                n_resident=_RESIDENT_SEGMENTS,
            )
        return self._batches.iterate(draws, prefetch, out)

    def read_all_in_order(
        self, *, block_steps: int = 8192, fields: Iterable[str] | None = None, prefetch: int = 0
    ) -> BatchIterator:
        """An iterator over all present steps in blocks, episode after episode in order of arrival.

        A block is a batch of single steps without the window axis: the fields, ``index``, ``is_first``,
        ``is_last``, ``terminated`` and ``truncated``, ``[n, ...]`` each. Blocks end anywhere, also inside an
        episode: for values that depend on other steps, such as returns, use `read_episodes_in_order`.

        Args:
            block_steps: The number of steps in a block; the last block may be smaller.
            fields: Fields or groups to read; all by default.
            prefetch: The number of blocks to prepare in the background.
        """
        chosen = None if fields is None else tuple(fields)
        windows = Windows(fields=chosen, squeeze=True)
        return self.epoch(block_steps, windows, shuffle=False, prefetch=prefetch)

    def read_episodes_in_order(
        self,
        *,
        block_steps: int = 8192,
        max_block_bytes: int | str = "1GiB",
        fields: Iterable[str] | None = None,
        prefetch: int = 0,
    ) -> BatchIterator:
        """An iterator over all present steps in blocks of whole episodes, in the order of `read_all_in_order`.

        A block holds what a block of `read_all_in_order` holds, and for every step, ``[n, ...]`` each:

        - ``next``: the observations after the step, as `Windows.transitions` returns them;
        - ``has_next``: whether they are known, or not needed because the step terminated its episode. It is False
          at the newest step of an open episode, and at the last step of a truncated or cut one without a final
          observation; ``next`` repeats the last observation there;
        - ``segment_end``: whether the next step of the block belongs to another episode. Sums over episodes stop
          there; unlike ``is_last`` it is also True at the newest step of an open episode.

        Steps appended after this call are left out.

        Args:
            block_steps: The most steps in a block. A longer episode forms a block of its own.
            max_block_bytes: The most bytes that the fields of a block take, next values included.
            fields: Fields or groups to read; all by default. Only these, and their next values, take memory.
            prefetch: The number of blocks to prepare in the background.

        Raises:
            NotReadyError: There are no steps.
            DataError: One episode takes more than ``max_block_bytes``.
        """
        with self.assembler.lock:
            self.assembler.publish()
            windows = block_windows(self.assembler.schema, fields)
            limit = parse_bytes(max_block_bytes, "max_block_bytes")
            draws = EpisodeBlockDraws(self.assembler, windows, block_steps, limit)
        return self._batches.iterate_blocks(draws, prefetch)

    # ---- cache

    def pin(self, index: torch.Tensor, windows: Windows) -> None:
        """Keep the chunks of these windows in the cache until `unpin`.

        Raises:
            ValueError: The chunks do not fit; nothing was pinned.
            EpisodeNotFoundError: The reader does not have an episode, or no such window starts at a step.
        """
        with self.assembler.lock:
            kind = self.assembler.kind(windows)
            drawn = self.assembler.draw_at(
                kind, handles_of(index, self.assembler.index.numbers), None, is_strict=True
            )
            self.assembler.pin(kind, kind.starts.with_n(drawn, CounterRng(0)))

    def unpin(self) -> None:
        """Let all pinned chunks be evicted from the cache again."""
        with self.assembler.lock:
            self.assembler.cache.unpin()

    def invalidate(self) -> None:
        """Empty the cache; chunks are read again when they are needed."""
        with self.assembler.lock:
            if self.assembler.has_cache:
                self.assembler.cache.invalidate()

    def resize(self, *, cache_bytes: int | str | None = None, host_cache_bytes: int | str | None = None) -> None:
        """Change the limits of the caches; chunks that no longer fit are dropped. None keeps a limit."""
        budget = None if cache_bytes is None else parse_bytes(cache_bytes, "cache_bytes")
        host_budget = None if host_cache_bytes is None else _host_bytes(host_cache_bytes)
        with self.assembler.lock:
            self.assembler.resize(budget=budget, host_budget=host_budget)

    def stats(self) -> dict[str, Any]:
        """Counters of the cache, and the memory that cache and index use.

        Of a remote store also requests and bytes, and what makes the requests (``transport``).
        """
        with self.assembler.lock:
            return self.assembler.stats() | {"storage": self.assembler.snapshot.storage.stats()}

    # ---- state

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to draw the same windows from the same store, priorities and columns included."""
        with self.assembler.lock:
            state = self.rng.state_dict() | {"columns": self._columns.state_dict()}
            if self.priority_sampler is not None:
                return state | {"priorities": self.priority_sampler.state_dict()}
            self._columns.follow()
            return state | ({"steps": self._steps.state_dict()} if self._columns else {})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`, with the same draws."""
        with self.assembler.lock:
            self.rng.load_state_dict(dict(state))
            self._columns.load_state_dict(state["columns"])
            if "steps" in state:
                self._steps.load_state_dict(state["steps"])
            if self.priority_sampler is not None and "priorities" in state:
                self.priority_sampler.load_state_dict(state["priorities"])


def _host_bytes(value: int | str) -> int:
    return 0 if value == 0 else parse_bytes(value, "host_cache_bytes")
