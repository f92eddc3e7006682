"""Batches as a reader returns them: with derived columns and relabelled goals, as dicts or TensorDicts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from trajstore.sampling.batch_iterator import BatchIterator
from trajstore.sampling.batches.batch_assembler import BatchAssembler, Where, WindowKind
from trajstore.sampling.batches.outputs import Batch, Ring, flat_outputs, to_batch
from trajstore.sampling.draws import Draws, RandomDraws
from trajstore.sampling.episode_blocks import EpisodeBlockDraws, with_segment_marks
from trajstore.sampling.hindsight import Hindsight
from trajstore.sampling.index.index_entries import handles_of
from trajstore.sampling.priorities.prioritised_draws import PrioritisedDraws
from trajstore.sampling.relabelling import Relabeller
from trajstore.sampling.rng import CounterRng
from trajstore.sampling.step_columns.derived_columns import DerivedColumns
from trajstore.sampling.window_starts import DrawnWindows
from trajstore.sampling.windows import Windows


class ReaderBatches:
    """Turns drawn windows into batches for a caller, or sequences of draws into iterators.

    Not thread-safe: call methods with the assembler's lock held; only `iterate` does not need it.
    """

    def __init__(self, assembler: BatchAssembler, columns: DerivedColumns, *, as_tensordict: bool) -> None:
        self._assembler, self._columns, self._as_tensordict = assembler, columns, as_tensordict
        self._last_relabeller: Relabeller | None = None

    def relabeller(self, options: Hindsight | None, rng: CounterRng) -> Relabeller | None:
        """The relabeller for some options; the last one is reused, because its tables are costly to make."""
        if options is None:
            return None
        last = self._last_relabeller
        if last is None or last.options != options or last.rng is not rng:
            last = self._last_relabeller = Relabeller(self._assembler, options, rng)
        return last

    def make(
        self,
        kind: WindowKind,
        drawn: DrawnWindows,
        out: Mapping[str, Any] | Ring | None = None,
        relabeller: Relabeller | None = None,
    ) -> Batch:
        """Read drawn windows into a new batch, or into the memory of ``out``."""
        slot, outs = self._outputs(out, kind, len(drawn.entry))
        flat = self._run(kind, drawn, outs) if relabeller is None else None
        if flat is None:
            flat = self._assembler.read_batch(kind, self._columns.plan(kind, drawn, relabeller), outs)
        return self._finished(flat, out, slot)

    def _outputs(
        self, out: Mapping[str, Any] | Ring | None, kind: WindowKind, n: int
    ) -> tuple[int, Mapping[str, torch.Tensor]]:
        """The slot of a ring, and the memory to write a batch into, by flat key."""
        if not isinstance(out, Ring):
            return 0, flat_outputs(out)
        slot = out.reserve()
        return slot, out.take(slot, (kind.windows, n))

    def _finished(self, flat: dict[str, torch.Tensor], out: Mapping[str, Any] | Ring | None, slot: int) -> Batch:
        if isinstance(out, Ring):
            out.give(slot, flat)
        batch: Batch = to_batch(flat, self._as_tensordict)
        return batch

    def sample(
        self,
        draws: RandomDraws | PrioritisedDraws,
        out: Mapping[str, Any] | Ring | None = None,
        relabeller: Relabeller | None = None,
    ) -> Batch:
        """Draw and read a batch: in one call, if it is drawn uniformly and everything is resident."""
        single = draws.single_draw() if isinstance(draws, RandomDraws) and relabeller is None else None
        if single is not None:
            slot, outs = self._outputs(out, single[0], single[1][0])
            if (flat := self._run(*single, outs)) is not None:
                return self._finished(flat, out, slot)
            if isinstance(out, Ring):
                out.give_back(slot)
        drawn = draws.draw()
        assert drawn is not None
        return self.make(*drawn, out, relabeller)

    def iterate(
        self,
        draws: Draws | PrioritisedDraws,
        prefetch: int,
        ring: Ring | None,
        admit: Callable[[int], None] | None = None,
        relabeller: Relabeller | None = None,
        count: Callable[[int], None] | None = None,
    ) -> BatchIterator:
        """An iterator over the batches of a sequence of draws."""
        return BatchIterator(
            self._assembler,
            draws,
            prefetch=prefetch,
            ring=ring,
            as_tensordict=self._as_tensordict,
            admit=admit,
            count=count,
            plan=lambda kind, drawn, goals: self._columns.plan(kind, drawn, relabeller, goals),
            run=self._run if relabeller is None else None,
        )

    def _run(
        self, kind: WindowKind, drawn: DrawnWindows | tuple[int, CounterRng, int], outs: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor] | None:
        """A flat batch in one go; None if it needs derived columns, or rows that are not resident."""
        return None if self._columns else self._assembler.run_batch(kind, drawn, outs)

    def iterate_blocks(self, draws: EpisodeBlockDraws, prefetch: int) -> BatchIterator:
        """An iterator over blocks of whole episodes, with the marks that sums over episodes need."""
        assembler, columns = self._assembler, self._columns
        return BatchIterator(
            assembler,
            draws,
            prefetch=prefetch,
            as_tensordict=self._as_tensordict,
            plan=lambda kind, drawn, _: with_segment_marks(columns.plan(kind, drawn, None), assembler, drawn),
        )

    def whole_episodes(
        self,
        batch_size: int,
        windows: Windows | None,
        where: Where | None,
        index: torch.Tensor | None,
        rng: CounterRng,
    ) -> Batch:
        """Whole episodes, drawn uniformly or named by ``index``, padded to the longest; see `Reader`.

        Raises:
            NotReadyError: No episode can be drawn.
            EpisodeNotFoundError: ``index`` names an episode that the reader does not have.
        """
        base = replace(windows or Windows(), boundary="pad_right", weight="episode", burn_in=0, bootstrap=0)
        base = replace(base, length=1, stride=1, squeeze=False, strict_context=False)
        assembler = self._assembler
        kind = assembler.kind(base, where)
        if not kind.starts.total:
            raise assembler.no_windows(base, "that the restrictions allow " if where else "")
        entry = kind.starts.draw(batch_size, rng).entry
        if index is not None:
            handles = torch.cat([index.cpu(), torch.zeros((len(index), 1), dtype=torch.int64)], 1)
            entry = assembler.draw_at(
                kind, handles_of(handles, assembler.index.numbers), None, is_strict=False
            ).entry
        lengths = torch.from_numpy(assembler.index.lengths())[entry.cpu()]
        whole = assembler.new_kind(replace(base, length=int(lengths.max())), where)
        drawn = DrawnWindows(entry, torch.zeros_like(entry))
        return self.make(whole, whole.starts.with_n(drawn, rng))
