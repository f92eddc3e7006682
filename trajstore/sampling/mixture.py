"""Batches from several sources at once, in fractions that are kept exactly."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

import torch

from trajstore.arguments import check_positive
from trajstore.errors import DataError, NotReadyError, SchemaError
from trajstore.sampling.outputs import Ring, check_outputs, flat_outputs
from trajstore.sampling.rng import CounterRng
from trajstore.schema import Schema, nest

Weight = float | Callable[[int], float]
WhenEmpty = Literal["error", "others"]
Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]

_CPU = torch.device("cpu")
_SOURCE = "source"


class BatchSource(Protocol):
    """What can be mixed: a reader, a buffer, or anything else that gives batches."""

    @property
    def schema(self) -> Schema | None: ...

    @property
    def sample(self) -> Callable[..., Any]: ...


@dataclass(frozen=True, slots=True)
class _Part:
    """Windows that one source gave."""

    position: int
    name: str
    flat: dict[str, torch.Tensor]
    n: int


class Mixture:
    """Samples from several readers or buffers; safe to use from several threads, one batch at a time.

    A batch is that of the sources, joined along the first axis, source by source, and ``source``, ``[batch]``:
    the position of each window's source in `names`. ``index`` counts streams by source, so only the two together
    name a step; `update_priorities` takes them apart again.

    Args:
        sources: Sources by name, each with a weight where all are not alike: ``(source, weight)``. A weight is a
            number, or a function of the number of batches so far such as `Linear`; only their ratios count.
        seed: Of the draws made here; sources have their own.
        exact: Every batch is divided in proportion to the weights, and what that leaves over or short in one is
            made up for in the next ones. Otherwise the source of every window is drawn at random.
        when_empty: What happens where a source has nothing to draw from: an ``error``, or its share goes to the
            ``others`` for as long as that lasts; it is not made up for later.
        fields: Fields or groups to mix, where sources have others that are not alike; all by default.
        shuffle: Put the windows of a batch in random order, rather than source by source.

    Raises:
        SchemaError: The fields of the sources differ. Episode columns, and which fields have a final value, may.
    """

    def __init__(
        self,
        sources: Mapping[str, BatchSource | tuple[BatchSource, Weight]],
        *,
        seed: int = 0,
        exact: bool = True,
        when_empty: WhenEmpty = "error",
        fields: Iterable[str] | None = None,
        shuffle: bool = False,
    ) -> None:
        if not sources:
            raise ValueError("sources: expected at least one, got none")
        if when_empty not in get_args(WhenEmpty):
            raise ValueError(f"when_empty: expected one of {', '.join(get_args(WhenEmpty))}, got {when_empty!r}")
        if isinstance(fields, str):
            raise TypeError(f"fields: expected a list of names, got the string {fields!r}")
        pairs = [pair if isinstance(pair, tuple) else (pair, 1.0) for pair in sources.values()]
        self.names: tuple[str, ...] = tuple(sources)
        self._sources: list[Any] = [source for source, _ in pairs]
        self._weights: list[Weight] = [weight for _, weight in pairs]
        self._exact, self._when_empty, self._shuffle = exact, when_empty, shuffle
        self._fields = None if fields is None else tuple(fields)
        self._rng = CounterRng(seed)
        self._n_batches = 0
        self._counts = [0] * len(pairs)
        self._carry = [0.0] * len(pairs)  # windows that each source is owed; without `exact` all 0
        self._was_empty = [False] * len(pairs)
        self._lock = threading.Lock()
        self._weights_at(0)
        self._is_checked = self._check_schemas()

    @property
    def sources(self) -> dict[str, Any]:
        """The sources by name."""
        return dict(zip(self.names, self._sources, strict=True))

    def sample(
        self, batch_size: int, *args: Any, out: Mapping[str, Any] | Ring | None = None, **kwargs: Any
    ) -> Any:
        """One batch of exactly this size; further arguments go to the ``sample`` of every source.

        If it fails, nothing here has changed, though sources that had been asked already have drawn.

        Args:
            batch_size: How many windows.
            args: For the sources.
            out: A batch of an earlier call with the same arguments, to be overwritten, or a ring of them.
            kwargs: For the sources.

        Raises:
            NotReadyError: A source has nothing to draw from; with ``when_empty="others"``: none has.
        """
        check_positive("batch_size", batch_size)
        with self._lock:
            self._is_checked = self._is_checked or self._check_schemas()
            turn = _Turn(self, batch_size, args, kwargs)
            batch = self._joined(turn, out)
            turn.settle()
            return batch

    def _joined(self, turn: _Turn, out: Mapping[str, Any] | Ring | None) -> Any:
        parts = sorted(turn.parts, key=lambda part: part.position)
        shapes = _common_shapes(parts)
        slot = out.reserve() if isinstance(out, Ring) else 0
        outs = out.take(slot, tuple(shapes.items())) if isinstance(out, Ring) else flat_outputs(out)
        check_outputs(outs, shapes)
        rows = turn.rng.bits(turn.n, _CPU).argsort(stable=True) if self._shuffle else None
        flat = _join(parts, shapes, rows, outs)
        if isinstance(out, Ring):
            out.give(slot, flat)
        return nest(flat) if turn.kind is dict else turn.kind(nest(flat), batch_size=[turn.n])

    def update_priorities(
        self,
        index: torch.Tensor | Mapping[str, Any],
        priority: torch.Tensor,
        *,
        source: torch.Tensor | None = None,
        windows: Any = None,
    ) -> int:
        """Set priorities of steps that a batch names: each source gets its own part.

        Args:
            index: The batch, or its ``index`` together with ``source``.
            priority: ``[batch]`` or ``[batch, length]``, as the sources take it; finite and at least 0.
            source: The batch's ``source``.
            windows: What was sampled, where the sources have to be told.

        Returns:
            How many were ignored because their steps were evicted meanwhile.

        Raises:
            DataError: Something does not fit, and nothing was changed; or a source refuses an index, and then
                those of the sources before it have been set.
        """
        step, source = (index, source) if isinstance(index, torch.Tensor) else (index["index"], index[_SOURCE])
        if source is None:
            raise TypeError("update_priorities: an index does not tell its source; pass source= or the whole batch")
        self._check_update(step, source, priority)
        more = () if windows is None else (windows,)
        n_ignored = 0
        for position, (name, each) in enumerate(zip(self.names, self._sources, strict=True)):
            rows = (source == position).nonzero().squeeze(1)
            if len(rows):
                mine = step[rows.to(step.device)], priority[rows.to(priority.device)]
                n_ignored += _named(name, each.update_priorities, *mine, *more) or 0
        return n_ignored

    def _check_update(self, index: torch.Tensor, source: torch.Tensor, priority: torch.Tensor) -> None:
        n = len(index)
        if source.shape != (n,) or source.dtype != torch.int64 or not priority.dim() or len(priority) != n:
            raise DataError(
                f"expected int64 source of shape ({n},) and priority of shape ({n}, ...), as long as the index; got"
                f" {source.dtype} of shape {tuple(source.shape)} and shape {tuple(priority.shape)}"
            )
        strange = source[(source < 0) | (source >= len(self.names))]
        if len(strange):
            raise DataError(f"source {int(strange[0])}: this mixture has {len(self.names)}: {_listed(self.names)}")
        wrong = priority[~(torch.isfinite(priority) & (priority >= 0))]
        if len(wrong):
            raise DataError(f"priority: expected finite numbers of at least 0, got {float(wrong[0])}")

    def stats(self) -> dict[str, Any]:
        """Batches so far, windows drawn from each source, and the fractions of the next batch."""
        with self._lock:
            weights = self._weights_at(self._n_batches)
            return {
                "n_batches": self._n_batches,
                "counts": dict(zip(self.names, self._counts, strict=True)),
                "fractions": {name: w / sum(weights) for name, w in zip(self.names, weights, strict=True)},
            }

    def state_dict(self) -> dict[str, Any]:
        """What it takes to go on dividing batches alike; the sources have a state of their own."""
        with self._lock:
            return {
                "names": list(self.names),
                "n_batches": self._n_batches,
                "counts": list(self._counts),
                "carry": list(self._carry),
                "was_empty": list(self._was_empty),
                "rng": self._rng.state_dict(),
            }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave.

        Raises:
            ValueError: It is of a mixture of other sources; nothing was changed.
        """
        if tuple(state["names"]) != self.names:
            raise ValueError(f"state of sources {_listed(state['names'])}, here are {_listed(self.names)}")
        with self._lock:
            self._n_batches = int(state["n_batches"])
            self._counts = [int(n) for n in state["counts"]]
            self._carry = [float(owed) for owed in state["carry"]]
            self._was_empty = [bool(flag) for flag in state["was_empty"]]
            self._rng.load_state_dict(dict(state["rng"]))

    def _weights_at(self, n_batches: int) -> list[float]:
        """The weights of the batch after so many."""
        weights = [float(w(n_batches) if callable(w) else w) for w in self._weights]
        for name, weight in zip(self.names, weights, strict=True):
            if not (math.isfinite(weight) and weight >= 0):
                raise ValueError(f"weight of {name!r} after {n_batches} batches: expected >= 0, got {weight}")
        if not sum(weights) > 0:
            raise ValueError(f"weights after {n_batches} batches: expected one above 0, all are 0")
        return weights

    def _check_schemas(self) -> bool:
        """Refuse sources that differ; returns whether all schemas were known."""
        known = {
            name: schema for name, schema in zip(self.names, self._schemas(), strict=True) if schema is not None
        }
        shown = {name: _shown(schema, self._fields) for name, schema in known.items()}
        if not shown:
            return False
        first, *others = shown
        differences = [
            f"{first!r} and {name!r}: {'; '.join(found)}"
            for name in others
            if (found := shown[first].differences(shown[name]))
        ]
        if differences:
            raise SchemaError(f"sources differ (fields= names those to mix): {' / '.join(differences)}")
        self._check_names(list(shown[first]), len(shown) == len(self.names))
        return len(shown) == len(self.names)

    def _check_names(self, paths: Sequence[str], is_all: bool) -> None:
        for name in self._fields or () if is_all else ():
            if not any(_is_below(path, name) for path in paths):
                raise SchemaError(f"fields: no source has {name!r}; they have {_listed(paths)}")
        if any(_is_below(path, _SOURCE) for path in paths):
            raise SchemaError(
                f"field {_SOURCE!r}: batches of a mixture call something else so; leave it out with fields="
            )

    def _schemas(self) -> list[Schema | None]:
        return [_schema_of(source) for source in self._sources]


class _Turn:
    """One batch on its way: what every source is asked for, and gave. The mixture changes only in `settle`."""

    def __init__(self, mixture: Mixture, n: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._mixture, self.n = mixture, n
        self._args, self._kwargs = args, kwargs
        self.rng = CounterRng(mixture._rng.seed, mixture._rng.counter)
        self.parts: list[_Part] = []
        self.kind: Any = dict
        self._weights = mixture._weights_at(mixture._n_batches)
        self._wanted: dict[int, float] = {}
        self._empty: dict[int, NotReadyError] = {}
        self._counts = self._divided([0] * len(self._weights))
        while not self._filled():
            # What the others were to give stays; the share of the empty one is divided among them.
            self._counts = self._divided([0 if i in self._empty else n for i, n in enumerate(self._counts)])

    def _divided(self, at_least: list[int]) -> list[int]:
        """How many windows each source is to give, none below what is already settled."""
        live = {i: w for i, w in enumerate(self._weights) if w > 0 and i not in self._empty}
        if not live:
            raise self._none_left()
        if not self._mixture._exact:
            return _drawn(self.n - sum(at_least), live, at_least, self.rng)
        total = sum(live.values())
        self._wanted = {i: self.n * w / total + self._mixture._carry[i] for i, w in live.items()}
        return apportion(self.n, self._wanted, at_least)

    def _none_left(self) -> NotReadyError:
        names = self._mixture.names
        reasons = "; ".join(f"{names[i]!r}: {error}" for i, error in self._empty.items())
        return NotReadyError(f"no source with a weight above 0 has anything to draw from: {reasons}")

    def _filled(self) -> bool:
        """Ask every source for what it has not given yet; False as soon as one is empty."""
        given = [0] * len(self._counts)
        for part in self.parts:
            given[part.position] += part.n
        # Those that were empty last time first: nothing has to be asked for twice then.
        for i in sorted(range(len(given)), key=lambda i: not self._mixture._was_empty[i]):
            if self._counts[i] > given[i] and not self._asked(i, self._counts[i] - given[i]):
                return False
        return True

    def _asked(self, position: int, n: int) -> bool:
        name, source = self._mixture.names[position], self._mixture._sources[position]
        try:
            batch = source.sample(n, *self._args, **self._kwargs)
        except NotReadyError as error:
            if self._mixture._when_empty == "error":
                raise NotReadyError(f"source {name!r}: {error}") from error
            self._empty[position] = error
            return False
        self.kind = dict if isinstance(batch, dict) else type(batch)
        flat = _wanted_keys(flat_outputs(batch), _schema_of(source), self._mixture._fields)
        self.parts.append(_Part(position, name, flat, n))
        return True

    def settle(self) -> None:
        mixture = self._mixture
        mixture._rng.counter = self.rng.counter
        mixture._n_batches += 1
        for i, n in enumerate(self._counts):
            mixture._counts[i] += n
            if n or i in self._empty:
                mixture._was_empty[i] = i in self._empty
        for i, wanted in self._wanted.items():
            mixture._carry[i] = wanted - self._counts[i]


def apportion(n: int, wanted: Mapping[int, float], at_least: Sequence[int]) -> list[int]:
    """Whole numbers that sum to ``n``, none below ``at_least``, as close to the ``wanted`` ones as may be.

    By largest remainder; where two are alike the first gets more.

    >>> apportion(5, {0: 2.5, 1: 2.5}, [0, 0])
    [3, 2]
    """
    counts = list(at_least)
    for i, share in wanted.items():
        counts[i] = max(at_least[i], math.floor(share))
    while sum(counts) < n:
        counts[max(wanted, key=lambda i: wanted[i] - counts[i])] += 1
    while sum(counts) > n:
        counts[min((i for i in wanted if counts[i] > at_least[i]), key=lambda i: wanted[i] - counts[i])] -= 1
    return counts


def _drawn(n: int, weights: Mapping[int, float], at_least: Sequence[int], rng: CounterRng) -> list[int]:
    """How many of ``n`` windows fall to each source, drawn by weight, and what is settled already."""
    bounds = torch.tensor(list(weights.values()), dtype=torch.float64).cumsum(0)
    found = torch.searchsorted(bounds, rng.uniform(n, _CPU) * bounds[-1], right=True)
    falls = torch.bincount(found.clamp_(max=len(weights) - 1), minlength=len(weights)).tolist()
    counts = list(at_least)
    for i, more in zip(weights, falls, strict=True):
        counts[i] += more
    return counts


def _common_shapes(parts: Sequence[_Part]) -> Shapes:
    """The shapes of the joined batch; refuses parts that can't be joined."""
    n = sum(part.n for part in parts)
    first = parts[0]
    for part in parts:
        _check_keys(first, part)
        for key, value in part.flat.items():
            _check_alike(first, part, key, value)
    shapes: Shapes = {key: ((n, *value.shape[1:]), value.dtype) for key, value in first.flat.items()}
    return shapes | {_SOURCE: ((n,), torch.int64)}


def _check_keys(first: _Part, part: _Part) -> None:
    if part.flat.keys() != first.flat.keys():
        missing = [key for key in first.flat if key not in part.flat]
        extra = [key for key in part.flat if key not in first.flat]
        raise DataError(
            f"batches differ: {part.name!r} lacks {_listed(missing)}, {first.name!r} lacks {_listed(extra)}"
        )
    if _SOURCE in part.flat:
        raise DataError(f"source {part.name!r}: its batches have {_SOURCE!r} already; mixtures can't be nested")


def _check_alike(first: _Part, part: _Part, key: str, value: torch.Tensor) -> None:
    model = first.flat[key]
    expected = (part.n, *model.shape[1:])
    if value.shape != expected or value.dtype != model.dtype or value.device != model.device:
        raise DataError(
            f"source {part.name!r}, {key!r}: expected {model.dtype} of shape {expected} on {model.device}, got"
            f" {value.dtype} of shape {tuple(value.shape)} on {value.device}"
        )


def _join(
    parts: Sequence[_Part], shapes: Shapes, rows: torch.Tensor | None, outs: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The parts one after the other, or each window in its row."""
    device = next(iter(parts[0].flat.values())).device
    if rows is not None:
        rows = rows.to(device, non_blocking=True)
    flat: dict[str, torch.Tensor] = {}
    for key, (shape, dtype) in shapes.items():
        values = [part.flat[key] if key != _SOURCE else _positions(part, device) for part in parts]
        if len(values) == 1 and rows is None and key not in outs:
            flat[key] = values[0]
            continue
        joined = outs[key] if key in outs else torch.empty(shape, dtype=dtype, device=device)
        if rows is None:
            torch.cat(values, out=joined)
        else:
            _scatter(values, rows, joined)
        flat[key] = joined
    return flat


def _scatter(values: Sequence[torch.Tensor], rows: torch.Tensor, joined: torch.Tensor) -> None:
    start = 0
    for value in values:
        joined.index_copy_(0, rows[start : start + len(value)], value)
        start += len(value)


def _positions(part: _Part, device: torch.device) -> torch.Tensor:
    return torch.full((part.n,), part.position, dtype=torch.int64, device=device)


def _schema_of(source: Any) -> Schema | None:
    """Its schema; None while it has no data that would define one."""
    try:
        schema: Schema | None = source.schema
    except NotReadyError:
        return None
    return schema


def _shown(schema: Schema, fields: tuple[str, ...] | None) -> Schema:
    """The schema without what does not show in batches, or is not asked for."""
    shown = schema.with_final(set())
    shown.episode = {}
    if fields is not None:
        shown.fields = {p: f for p, f in shown.fields.items() if any(_is_below(p, name) for name in fields)}
    if shown.reward not in shown.fields:
        shown.reward, shown.reward_alignment = None, "action"
    return shown


def _wanted_keys(
    flat: dict[str, torch.Tensor], schema: Schema | None, fields: tuple[str, ...] | None
) -> dict[str, torch.Tensor]:
    """A batch without the fields that are not to be mixed."""
    if fields is None or schema is None:
        return flat
    left_out = {path for path in schema if not any(_is_below(path, name) for name in fields)}
    return {key: value for key, value in flat.items() if key.removeprefix("next/") not in left_out}


def _is_below(path: str, name: str) -> bool:
    return path == name or path.startswith(f"{name}/")


def _named(name: str, call: Callable[..., Any], *args: Any) -> Any:
    try:
        return call(*args)
    except DataError as error:
        raise DataError(f"source {name!r}: {error}") from error


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names)) or "nothing"
