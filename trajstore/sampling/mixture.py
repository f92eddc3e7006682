"""A mixture: batches from several readers or buffers at once, in fractions that are kept exactly."""

from __future__ import annotations

import inspect
import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, Protocol, get_args

import torch

from trajstore.arguments import check_positive
from trajstore.errors import DataError, NotReadyError, SchemaError
from trajstore.sampling.apportionment import apportion, draw_counts
from trajstore.sampling.batches.batch_assembler import Where
from trajstore.sampling.batches.outputs import Batch, Ring, check_outputs, flat_outputs
from trajstore.sampling.hindsight import Hindsight
from trajstore.sampling.joined_batches import SOURCE, BatchPart, join, joined_shapes, listed
from trajstore.sampling.rng import CounterRng
from trajstore.sampling.windows import Windows
from trajstore.schema import Array, Field, Schema, nest
from trajstore.store.snapshot import Snapshot
from trajstore.store.store import Store

Weight = float | Callable[[int], float]
WhenEmpty = Literal["error", "others"]

_CPU = torch.device("cpu")


class BatchSource(Protocol):
    """Anything that a `Mixture` can mix: a reader, a buffer, or another object that returns batches.

    ``schema`` may raise `NotReadyError` while there is no data to define one.
    """

    @property
    def schema(self) -> Schema | None: ...

    @property
    def sample(self) -> Callable[..., Any]: ...


class Mixture:
    """Samples from several readers or buffers as if they were one.

    Thread-safe if its sources are: any thread may call any method; one batch is made at a time.

    A batch joins the batches of the sources along the first axis, source by source. It also holds ``source``,
    ``[batch]``: the position of each window's source in `names`. Stream numbers in ``index`` are those of the
    source, so a step is named by ``index`` and ``source`` together.

    Args:
        sources: Sources by name; each is a source of weight 1, or a pair ``(source, weight)``. A weight is a number
            or a function of the number of batches so far, such as `Linear`. Only ratios of weights count.
        seed: Seed of the draws made by the mixture; sources have their own.
        exact: Divide every batch in proportion to the weights, and carry remainders over to later batches.
            False draws the source of every window at random.
        when_empty: If a source has no window to draw: ``"error"`` raises `NotReadyError`; ``"others"`` divides its
            share among the other sources as long as it is empty, and does not make up for it later.
        fields: Fields or groups to mix, if the sources differ in others; all by default.
        cast: Dtypes of fields, such as ``{"observation": "float32"}``, for sources that store a field with
            different dtypes: every batch is converted to these.
        shuffle: Put the windows of a batch in random order, rather than source by source.

    Raises:
        SchemaError: The fields of the sources differ. Episode columns, and which fields have a final value, may
            differ.
        ValueError: An option is out of range.

    Attributes:
        names: The names of the sources.
    """

    def __init__(
        self,
        sources: Mapping[str, BatchSource | tuple[BatchSource, Weight]],
        *,
        seed: int = 0,
        exact: bool = True,
        when_empty: WhenEmpty = "error",
        fields: Iterable[str] | None = None,
        cast: Mapping[str, str] | None = None,
        shuffle: bool = False,
    ) -> None:
        if not isinstance(sources, Mapping):
            raise TypeError(f"sources: expected a dict of readers or buffers by name, got {type(sources).__name__}")
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
        self._cast = {path: Field(dtype) for path, dtype in (cast or {}).items()}
        for name, source in zip(self.names, self._sources, strict=True):
            _check_source(name, source)
        self._without_default = [n for n, source in self.sources.items() if _requires_windows(source)]
        self._rng = CounterRng(seed)
        self._n_batches = 0
        self._counts = [0] * len(pairs)
        self._carry = [0.0] * len(pairs)  # windows that each source is owed; all 0 if not `exact`
        self._was_empty = [False] * len(pairs)
        self._lock = threading.Lock()
        self._weights_at(0)
        self._is_checked = self._check_schemas()

    @property
    def sources(self) -> dict[str, Any]:
        """The sources by name."""
        return dict(zip(self.names, self._sources, strict=True))

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
        """Draw one batch of exactly this size.

        Arguments other than ``batch_size`` and ``out`` are passed on to the ``sample`` of every source, if they
        differ from their defaults. If the call fails, the mixture is unchanged, but some sources may have drawn.

        Args:
            batch_size: The number of windows.
            windows: Which windows; readers require it, buffers have a default.
            where: As in `Reader.sample`, like the next five arguments.
            recent_steps: See there.
            recent_episodes: See there.
            recent_fraction: See there.
            prioritised: See there.
            relabel: See there.
            out: A batch of an earlier call with the same arguments, which is overwritten, or a ring of batches.

        Raises:
            NotReadyError: A source has no window to draw; with ``when_empty="others"``: no source has one.
            DataError: The batches of the sources can't be joined.
        """
        check_positive("batch_size", batch_size)
        args = () if windows is None else (windows,)
        if windows is None and self._without_default:
            name = self._without_default[0]
            raise TypeError(f"windows: source {name!r} has no default, as readers; pass windows=Windows(...)")
        options: dict[str, Any] = {}
        if where is not None:
            options["where"] = where
        if recent_steps is not None:
            options["recent_steps"] = recent_steps
        if recent_episodes is not None:
            options["recent_episodes"] = recent_episodes
        if recent_fraction != 1.0:
            options["recent_fraction"] = recent_fraction
        if not prioritised:
            options["prioritised"] = False
        if relabel is not None:
            options["relabel"] = relabel
        with self._lock:
            self._is_checked = self._is_checked or self._check_schemas()
            collected = _Collection(self, batch_size, args, options)
            batch = self._joined(collected, out)
            collected.commit()
            return batch

    def _joined(self, collected: _Collection, out: Mapping[str, Any] | Ring | None) -> Batch:
        parts = sorted(collected.parts, key=lambda part: part.position)
        shapes = joined_shapes(parts)
        slot = out.reserve() if isinstance(out, Ring) else 0
        outs = out.take(slot, tuple(shapes.items())) if isinstance(out, Ring) else flat_outputs(out)
        check_outputs(outs, shapes)
        n = collected.n
        rows = collected.rng.bits(n, _CPU).argsort(stable=True) if self._shuffle else None
        flat = join(parts, shapes, rows, outs)
        if isinstance(out, Ring):
            out.give(slot, flat)
        batch: Batch = nest(flat)
        if collected.batch_type is not dict:
            batch = collected.batch_type(batch, batch_size=[n])
        return batch

    def update_priorities(
        self,
        index: torch.Tensor | Mapping[str, Any],
        priority: torch.Tensor | Array,
        *,
        source: torch.Tensor | None = None,
        windows: Windows | None = None,
    ) -> int:
        """Set priorities of the steps of a batch: each source gets its part.

        Args:
            index: The batch, or its ``index`` together with ``source``.
            priority: ``[batch]`` or ``[batch, length]``, as the sources take it; finite and at least 0.
            source: The batch's ``source``.
            windows: The sampled windows; needed if their stride is not 1.

        Returns:
            The number of values ignored because their steps were evicted.

        Raises:
            DataError: Shapes or values are wrong; nothing was changed. Or a source refuses an index; the updates of
                the sources before it have been made.
        """
        step, source = (index, source) if isinstance(index, torch.Tensor) else (index["index"], index[SOURCE])
        priority = torch.as_tensor(priority)
        if source is None:
            raise TypeError("update_priorities: an index does not tell its source; pass source= or the whole batch")
        self._check_update(step, source, priority)
        more = () if windows is None else (windows,)
        n_ignored = 0
        for position, (name, each) in enumerate(zip(self.names, self._sources, strict=True)):
            rows = (source == position).nonzero().squeeze(1)
            if len(rows):
                part = step[rows.to(step.device)], priority[rows.to(priority.device)]
                n_ignored += _call_source(name, each.update_priorities, *part, *more) or 0
        return n_ignored

    def _check_update(self, index: torch.Tensor, source: torch.Tensor, priority: torch.Tensor) -> None:
        n = len(index)
        if source.shape != (n,) or source.dtype != torch.int64 or not priority.dim() or len(priority) != n:
            raise DataError(
                f"expected int64 source of shape ({n},) and priority of shape ({n}, ...), as long as the index; got"
                f" {source.dtype} of shape {tuple(source.shape)} and shape {tuple(priority.shape)}"
            )
        unknown = source[(source < 0) | (source >= len(self.names))]
        if len(unknown):
            raise DataError(f"source {int(unknown[0])}: this mixture has {len(self.names)}: {listed(self.names)}")
        wrong = priority[~(torch.isfinite(priority) & (priority >= 0))]
        if len(wrong):
            raise DataError(f"priority: expected finite numbers of at least 0, got {float(wrong[0])}")

    def stats(self) -> dict[str, Any]:
        """The number of batches, the windows drawn from each source, and the fractions of the next batch."""
        with self._lock:
            weights = self._weights_at(self._n_batches)
            return {
                "n_batches": self._n_batches,
                "counts": dict(zip(self.names, self._counts, strict=True)),
                "fractions": {name: w / sum(weights) for name, w in zip(self.names, weights, strict=True)},
            }

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue dividing batches in the same way; sources have their own state."""
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
        """Continue from a `state_dict`.

        Raises:
            ValueError: The state is that of a mixture of other sources; nothing was changed.
        """
        if tuple(state["names"]) != self.names:
            raise ValueError(
                f"state of a mixture of {listed(state['names'])}; this mixture has {listed(self.names)}"
            )
        with self._lock:
            self._n_batches = int(state["n_batches"])
            self._counts = [int(n) for n in state["counts"]]
            self._carry = [float(owed) for owed in state["carry"]]
            self._was_empty = [bool(flag) for flag in state["was_empty"]]
            self._rng.load_state_dict(dict(state["rng"]))

    def _weights_at(self, n_batches: int) -> list[float]:
        """The weights of the batch that follows ``n_batches`` others."""
        weights = [float(w(n_batches) if callable(w) else w) for w in self._weights]
        for name, weight in zip(self.names, weights, strict=True):
            if not (math.isfinite(weight) and weight >= 0):
                raise ValueError(f"weight of {name!r} after {n_batches} batches: expected >= 0, got {weight}")
        if not sum(weights) > 0:
            raise ValueError(f"weights after {n_batches} batches: expected one above 0, all are 0")
        return weights

    def _check_schemas(self) -> bool:
        """Check that sources have the same fields; returns whether all schemas are known.

        Raises:
            SchemaError: They differ; the message lists every difference.
        """
        known = {
            name: schema for name, schema in zip(self.names, self._schemas(), strict=True) if schema is not None
        }
        mixed = {name: _mixed_schema(schema, self._fields, self._cast) for name, schema in known.items()}
        if not mixed:
            return False
        first, *others = mixed
        differences = [
            f"{first!r} and {name!r}: {'; '.join(found)}"
            for name in others
            if (found := mixed[first].differences(mixed[name], repr(first), repr(name)))
        ]
        if differences:
            raise SchemaError(
                f"sources differ: {' / '.join(differences)}. Pass fields= to mix only some fields, or cast= to"
                " convert dtypes, such as cast={'observation': 'float32'}"
            )
        self._check_names(list(mixed[first]), len(mixed) == len(self.names))
        if unknown := [path for path in self._cast if path not in mixed[first]]:
            raise SchemaError(f"cast: no source has {unknown[0]!r}; they have {listed(mixed[first])}")
        return len(mixed) == len(self.names)

    def _check_names(self, paths: Sequence[str], is_all: bool) -> None:
        for name in self._fields or () if is_all else ():
            if not any(_is_below(path, name) for path in paths):
                raise SchemaError(f"fields: no source has {name!r}; they have {listed(paths)}")
        if any(_is_below(path, SOURCE) for path in paths):
            raise SchemaError(
                f"field {SOURCE!r}: batches of a mixture use this key for the source of each window; leave the"
                " field out with fields="
            )

    def _schemas(self) -> list[Schema | None]:
        return [_schema_of(source) for source in self._sources]


class _Collection:
    """The parts of one batch, collected from the sources. The mixture changes only in `commit`."""

    def __init__(self, mixture: Mixture, n: int, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        self._mixture, self.n = mixture, n
        self._args, self._options = args, options
        self.rng = CounterRng(mixture._rng.seed, mixture._rng.counter)
        self.parts: list[BatchPart] = []
        self.batch_type: Any = dict
        self._weights = mixture._weights_at(mixture._n_batches)
        self._wanted: dict[int, float] = {}
        self._empty: dict[int, NotReadyError] = {}
        self._counts = self._divided([0] * len(self._weights))
        while not self._collect():
            # The counts of the other sources stay; the share of the empty source is divided among them.
            self._counts = self._divided([0 if i in self._empty else n for i, n in enumerate(self._counts)])

    def _divided(self, at_least: list[int]) -> list[int]:
        """The number of windows that each source gives, none below ``at_least``."""
        weights = {i: w for i, w in enumerate(self._weights) if w > 0 and i not in self._empty}
        if not weights:
            raise self._all_empty()
        if not self._mixture._exact:
            return draw_counts(self.n - sum(at_least), weights, at_least, self.rng)
        total = sum(weights.values())
        self._wanted = {i: self.n * w / total + self._mixture._carry[i] for i, w in weights.items()}
        return apportion(self.n, self._wanted, at_least)

    def _all_empty(self) -> NotReadyError:
        names = self._mixture.names
        reasons = "; ".join(f"{names[i]!r}: {error}" for i, error in self._empty.items())
        return NotReadyError(f"no source with a weight above 0 has anything to draw from: {reasons}")

    def _collect(self) -> bool:
        """Ask every source for the windows that are missing; returns False as soon as one is empty."""
        collected = [0] * len(self._counts)
        for part in self.parts:
            collected[part.position] += part.n
        # Sources that were empty last time come first: then no source has to be asked twice.
        for i in sorted(range(len(collected)), key=lambda i: not self._mixture._was_empty[i]):
            if self._counts[i] > collected[i] and not self._sample(i, self._counts[i] - collected[i]):
                return False
        return True

    def _sample(self, position: int, n: int) -> bool:
        """Take windows from one source; returns False if it is empty and others give its share."""
        name, source = self._mixture.names[position], self._mixture._sources[position]
        try:
            batch = source.sample(n, *self._args, **self._options)
        except NotReadyError as error:
            if self._mixture._when_empty == "error":
                raise NotReadyError(f"source {name!r}: {error}") from error
            self._empty[position] = error
            return False
        self.batch_type = dict if isinstance(batch, dict) else type(batch)
        flat = _without_other_fields(flat_outputs(batch), _schema_of(source), self._mixture._fields)
        flat = _cast_fields(flat, self._mixture._cast)
        self.parts.append(BatchPart(position, name, flat, n))
        return True

    def commit(self) -> None:
        """Count the batch, and carry remainders over."""
        mixture = self._mixture
        mixture._rng.counter = self.rng.counter
        mixture._n_batches += 1
        for i, n in enumerate(self._counts):
            mixture._counts[i] += n
            if n or i in self._empty:
                mixture._was_empty[i] = i in self._empty
        for i, wanted in self._wanted.items():
            mixture._carry[i] = wanted - self._counts[i]


def _schema_of(source: Any) -> Schema | None:
    """The schema of a source; None while it has no data to define one."""
    try:
        schema: Schema | None = source.schema
    except NotReadyError:
        return None
    return schema


def _check_source(name: str, source: Any) -> None:
    if isinstance(source, Store | Snapshot):
        raise TypeError(f"source {name!r}: expected a reader or a buffer, got a store; pass Reader(store)")
    # By `dir`: the schema itself may not be known yet, and then raises an error.
    if not {"sample", "schema"} <= set(dir(source)):
        raise TypeError(f"source {name!r}: expected a reader or a buffer, got {type(source).__name__}")


def _requires_windows(source: Any) -> bool:
    windows = inspect.signature(source.sample).parameters.get("windows")
    return windows is not None and windows.default is windows.empty


def _cast_fields(flat: dict[str, torch.Tensor], cast: Mapping[str, Field]) -> dict[str, torch.Tensor]:
    """A batch with some fields, and their next values, converted to other dtypes."""
    if not cast:
        return flat
    chosen = {key: cast[key.removeprefix("next/")] for key in flat if key.removeprefix("next/") in cast}
    return flat | {key: flat[key].to(getattr(torch, field.dtype)) for key, field in chosen.items()}


def _mixed_schema(schema: Schema, fields: tuple[str, ...] | None, cast: Mapping[str, Field]) -> Schema:
    """The part of a schema that sources must share: the mixed fields, without final values and episode columns."""
    mixed = schema.with_final(set())
    mixed.episode = {}
    mixed.fields = {p: replace(f, dtype=cast[p].dtype) if p in cast else f for p, f in mixed.fields.items()}
    if fields is not None:
        mixed.fields = {p: f for p, f in mixed.fields.items() if any(_is_below(p, name) for name in fields)}
    if mixed.reward not in mixed.fields:
        mixed.reward, mixed.reward_alignment = None, "action"
    return mixed


def _without_other_fields(
    flat: dict[str, torch.Tensor], schema: Schema | None, fields: tuple[str, ...] | None
) -> dict[str, torch.Tensor]:
    """A batch without the fields that are not mixed."""
    if fields is None or schema is None:
        return flat
    left_out = {path for path in schema if not any(_is_below(path, name) for name in fields)}
    return {key: value for key, value in flat.items() if key.removeprefix("next/") not in left_out}


def _is_below(path: str, name: str) -> bool:
    return path == name or path.startswith(f"{name}/")


def _call_source(name: str, call: Callable[..., Any], *args: Any) -> Any:
    """Call a method of a source; an error names the source."""
    try:
        return call(*args)
    except DataError as error:
        raise DataError(f"source {name!r}: {error}") from error
