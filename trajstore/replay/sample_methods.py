"""The methods of a buffer that draw batches, update priorities and write columns back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Unpack

import torch
from numpy.typing import ArrayLike

from trajstore.arguments import check_positive
from trajstore.replay.session import Session
from trajstore.sampling.batch_iterator import BatchIterator
from trajstore.sampling.batches.batch_assembler import Where
from trajstore.sampling.batches.outputs import Batch, Ring
from trajstore.sampling.hindsight import Hindsight
from trajstore.sampling.index.index_entries import StepIndex
from trajstore.sampling.priorities.priority_options import PriorityChanges
from trajstore.sampling.windows import Windows
from trajstore.schema import Array, Field


class SampleMethods:
    """Each method checks the buffer and calls the reader, with the buffer's own windows by default."""

    _session: Session

    def _windows(self, windows: Windows | None) -> Windows:
        return self._session.options.sample if windows is None else windows

    def sample(
        self,
        batch_size: int,
        windows: Windows | None = None,
        *,
        where: Where | None = None,
        recent_steps: int | None = None,
        recent_episodes: int | None = None,
        recent_fraction: float = 1.0,
        prioritised: bool = True,
        relabel: Hindsight | None = None,
        out: Mapping[str, Any] | Ring | None = None,
    ) -> Batch:
        """Draw a batch of windows: uniformly, or by priority if the buffer has priorities.

        Args:
            batch_size: Number of windows.
            windows: Which windows, and what comes with them; by default those that the buffer was made with.
            where: Draw only from episodes for which this function of the episode table returns True.
            recent_steps: Draw only windows that start within this many of the newest steps.
            recent_episodes: Draw only from this many of the newest episodes.
            recent_fraction: The part of the batch to which the two limits apply.
            prioritised: False: draw uniformly, although the buffer has priorities.
            relabel: Give some windows goals that were achieved, and the rewards that go with them.
            out: Memory to write into: a batch of an earlier call with the same arguments, or a `Ring`.
        """
        session = self._session
        session.check()
        check_positive("batch_size", batch_size)
        chosen, reader = self._windows(windows), session.reader
        return session.drawing.sample(
            batch_size,
            lambda: reader.sample(
                batch_size,
                chosen,
                where=where,
                recent_steps=recent_steps,
                recent_episodes=recent_episodes,
                recent_fraction=recent_fraction,
                prioritised=prioritised,
                relabel=relabel,
                out=out,
            ),
        )

    def batches(
        self,
        batch_size: int,
        windows: Windows | None = None,
        *,
        prefetch: int = 0,
        where: Where | None = None,
        recent_steps: int | None = None,
        recent_episodes: int | None = None,
        recent_fraction: float = 1.0,
        prioritised: bool = True,
        relabel: Hindsight | None = None,
        out: Ring | None = None,
    ) -> BatchIterator:
        """An endless iterator over batches, ``prefetch`` of them prepared in the background; see `Reader.batches`.

        Checkpoints keep its position. After `resume`, the first iterator that you create continues the first one of
        the earlier session, the second continues the second, and so on.
        """
        session = self._session
        session.check()
        iterator = session.drawing.iterate(
            lambda: session.reader.batches(
                batch_size,
                self._windows(windows),
                prefetch=prefetch,
                where=where,
                recent_steps=recent_steps,
                recent_episodes=recent_episodes,
                recent_fraction=recent_fraction,
                prioritised=prioritised,
                relabel=relabel,
                out=out,
                admit=session.drawing.admit if session.drawing.is_paced else None,
                count=None if session.drawing.is_paced else session.drawing.count,
            )
        )
        iterator.owner = self  # a buffer that only its iterators refer to stays open
        return iterator

    def epoch(
        self,
        batch_size: int,
        windows: Windows | None = None,
        *,
        shuffle: bool = True,
        drop_last: bool = False,
        prefetch: int = 0,
        where: Where | None = None,
        out: Ring | None = None,
    ) -> BatchIterator:
        """An iterator over every window once; see `Reader.epoch`."""
        self._session.check()
        iterator = self._session.reader.epoch(
            batch_size,
            self._windows(windows),
            shuffle=shuffle,
            drop_last=drop_last,
            prefetch=prefetch,
            where=where,
            out=out,
        )
        iterator.owner = self
        return iterator

    def sample_episodes(
        self,
        batch_size: int,
        *,
        windows: Windows | None = None,
        where: Where | None = None,
        index: torch.Tensor | None = None,
    ) -> Batch:
        """Whole episodes, padded to the longest; see `Reader.sample_episodes`."""
        self._session.check()
        return self._session.reader.sample_episodes(batch_size, windows=windows, where=where, index=index)

    def at(
        self,
        index: StepIndex,
        windows: Windows | None = None,
        *,
        relabel: Hindsight | None = None,
        out: Mapping[str, Any] | Ring | None = None,
    ) -> Batch:
        """The windows at the steps of a batch, or at others; see `Reader.at`."""
        self._session.check()
        return self._session.reader.at(index, self._windows(windows), relabel=relabel, out=out)

    def n_windows(self, windows: Windows | None = None, *, where: Where | None = None) -> int:
        """The number of windows that can be drawn; see `Reader.n_windows`."""
        return self._session.reader.n_windows(self._windows(windows), where=where)

    def window_stats(self, windows: Windows | None = None) -> dict[str, int]:
        """What can be drawn, and how many steps are left out; see `Reader.window_stats`."""
        self._session.check()
        return self._session.reader.window_stats(self._windows(windows))

    # ---- priorities and columns

    def update_priorities(self, index: StepIndex, priority: ArrayLike, windows: Windows | None = None) -> int:
        """Set the priorities of the steps of a batch, or of other steps; see `Reader.update_priorities`."""
        self._session.check()
        return self._session.reader.update_priorities(index, priority, windows)

    def priorities(self, index: torch.Tensor | None = None) -> Array:
        """The priorities of steps; see `Reader.priorities`. `flush` stores them for `Snapshot.read_episode`."""
        self._session.check()
        return self._session.reader.priorities(index)

    def set_priorities(self, **changes: Unpack[PriorityChanges]) -> None:
        """Change options of `Priorities`; see `Reader.set_priorities`. Checkpoints keep the changed options."""
        session = self._session
        session.check()
        session.reader.set_priorities(**changes)
        if session.options.priorities is not None:
            changed = replace(session.options.priorities, **changes)
            session.options = replace(session.options, priorities=changed)

    def add_column(self, name: str, field: Field | str = "float32", *, fill: float = 0) -> None:
        """Keep a value for every step, computed after collection; see `Reader.add_column`. Checkpoints hold it."""
        self._session.check()
        self._session.reader.add_column(name, field, fill=fill)

    def write_column(
        self, name: str, index: StepIndex, values: torch.Tensor | Array, windows: Windows | None = None
    ) -> int:
        """Set a column's values at the steps of a batch, or at others; see `Reader.write_column`.

        `flush` makes them durable.
        """
        self._session.check()
        return self._session.reader.write_column(name, index, values, windows)

    def write_all(self, name: str, values: Any) -> None:
        """Set a column's values for all steps, in the order of `read_all_in_order`."""
        self._session.check()
        self._session.reader.write_all(name, values)

    def column(self, name: str) -> Array:
        """A column's values of all steps, in the order of `read_all_in_order`; a copy on the host."""
        self._session.check()
        return self._session.reader.column(name)

    def read_all_in_order(
        self, *, block_steps: int = 8192, fields: Iterable[str] | None = None, prefetch: int = 0
    ) -> BatchIterator:
        """An iterator over all steps, one block at a time; see `Reader.read_all_in_order`."""
        self._session.check()
        return self._session.reader.read_all_in_order(block_steps=block_steps, fields=fields, prefetch=prefetch)

    def read_episodes_in_order(
        self,
        *,
        block_steps: int = 8192,
        max_block_bytes: int | str = "1GiB",
        fields: Iterable[str] | None = None,
        prefetch: int = 0,
    ) -> BatchIterator:
        """An iterator over all steps in blocks of whole episodes; see `Reader.read_episodes_in_order`."""
        self._session.check()
        return self._session.reader.read_episodes_in_order(
            block_steps=block_steps, max_block_bytes=max_block_bytes, fields=fields, prefetch=prefetch
        )

    @property
    def policy_version(self) -> int | None:
        """The version of the policy that collects now; None: not recorded.

        Setting it records the version with every step appended from now on. Batches then hold ``policy_version``,
        with -1 for earlier steps.
        """
        return self._session.versions.current

    @policy_version.setter
    def policy_version(self, version: int) -> None:
        session, assembler = self._session, self._session.reader.assembler
        session.check()
        session.versions.check(version)
        with assembler.lock:
            assembler.publish()
            session.versions.set(version)
