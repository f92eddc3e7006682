"""Running mean, variance and range of fields."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from trajstore.arguments import check_positive
from trajstore.errors import DataError
from trajstore.schema import Array, Field, Schema, check_value, widen_bfloat16

_BLOCK_ELEMENTS = 1 << 16  # elements that are converted to float64 at a time
_BUFFER_BYTES = 1 << 18  # of rows of one field that wait for evaluation
_BUFFER_ROWS = 128
_STATE = ("count", "n_nonfinite", "origin", "mean", "m2", "min", "max")


class RunningStatistics:
    """Count, mean, standard deviation, minimum and maximum of every field; safe to use from several threads.

    Each element of a field has statistics over all steps. A field with more than ``max_elements`` elements (an
    image) has one set of statistics over all elements and steps. Sums are float64, of differences from the first
    value and from the mean, so a large offset costs no precision. NaN and infinities are counted and otherwise
    ignored. Bools count as 0 and 1.

    Small updates are only copied and evaluated together later: one row costs one or two microseconds per field.

    Args:
        schema: What the rows hold.
        fields: Fields or groups to observe; all by default.
        max_elements: Largest field that is observed element by element.
    """

    def __init__(self, schema: Schema, *, fields: Iterable[str] | None = None, max_elements: int = 4096) -> None:
        if isinstance(fields, str):
            raise TypeError(f"fields: expected a list of names, got the string {fields!r}")
        check_positive("max_elements", max_elements)
        self._known = frozenset(schema)
        self._added = {path for path, spec in schema.fields.items() if spec.fill is not None}
        # Allocating memory for every block would cost more than the arithmetic.
        scratch = np.empty(max(_BLOCK_ELEMENTS, max_elements))
        self._moments = {
            path: _Moments(path, schema[path], max_elements, scratch) for path in _chosen(schema, fields)
        }
        self._lock = threading.Lock()

    def update(self, rows: Mapping[str, Array]) -> None:
        """Count rows, ``[n, ...]`` by field. n may differ between fields, as only some have a final value.

        bfloat16 is given as bits, as it is stored. Fields that are not observed are ignored.

        Raises:
            DataError: A field is unknown, or has another dtype or shape; the fields before it are counted.
        """
        with self._lock:
            for path, values in rows.items():
                moments = self._moments.get(path)
                if moments is not None:
                    moments.add(values)
                elif path not in self._known:
                    known = ", ".join(map(repr, sorted(self._known)))
                    raise DataError(f"no field '{path}'; the fields are {known}")

    def merge(self, other: RunningStatistics) -> None:
        """Add what another has counted.

        Raises:
            ValueError: It has other fields, or other shapes of them; nothing is changed.
        """
        self.merge_state(other.state_dict())

    def merge_state(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Add what the `state_dict` of another has counted.

        Raises:
            ValueError: It has other fields, or other shapes of them; nothing is changed.
        """
        self._load(state, _Moments.merge)

    def shared_state(self, rank: int, world_size: int) -> dict[str, dict[str, Array]]:
        """The state that one of several ranks continues with: an equal share of all counts."""
        return {path: _shared_moments(state, rank, world_size) for path, state in self.state_dict().items()}

    def state_dict(self) -> dict[str, dict[str, Array]]:
        """Everything that was counted, as arrays by field; copies."""
        with self._lock:
            return {path: moments.state() for path, moments in self._moments.items()}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Replace the counts by those of a `state_dict`.

        Raises:
            ValueError: It has other fields, or other shapes of them; nothing is changed.
        """
        self._load(state, _Moments.load)

    def _load(
        self, state: Mapping[str, Mapping[str, Any]], take: Callable[[_Moments, Mapping[str, Array]], None]
    ) -> None:
        # A field that was added to the store since then begins with nothing counted.
        if not self._moments.keys() - self._added <= state.keys() <= self._moments.keys():
            expected, got = ", ".join(self._moments), ", ".join(state)
            raise ValueError(f"state: expected statistics of {expected}, got those of {got}")
        arrays = {path: self._moments[path].checked_state(part) for path, part in state.items()}
        with self._lock:
            for path, part in arrays.items():
                take(self._moments[path], part)

    def result(self) -> dict[str, dict[str, Any]]:
        """By field: ``count``, ``mean``, ``std``, ``min``, ``max``, ``n_nonfinite`` and ``is_reduced``.

        The first six are arrays of the field's shape, or of shape () if ``is_reduced``: then they are over all
        elements, and elements are counted. The standard deviation divides by the count. Elements without a finite
        value have NaN.
        """
        with self._lock:
            return {path: moments.result() for path, moments in self._moments.items()}

    def normalizer(self, path: str, *, eps: float = 1e-8, clip: float | None = None) -> Normalizer:
        """A function that subtracts the current mean and divides by ``sqrt(variance + eps)``.

        Args:
            path: The field.
            eps: Added to the variance, so that nearly constant elements are not amplified.
            clip: The result is clipped to ``[-clip, clip]``; None: not clipped.

        Raises:
            DataError: An element has no finite value.
        """
        with self._lock:
            if path not in self._moments:
                raise KeyError(f"no field {path!r}; the fields are {', '.join(self._moments)}")
            found = self._moments[path].result()
        if not found["count"].all():
            raise DataError(f"field '{path}': no finite value was counted, so there is no mean to subtract")
        return Normalizer(path, found["mean"], np.sqrt(found["std"] ** 2 + eps), clip)


class Normalizer:
    """Shifts and scales tensors, on any device, with any leading axes; integers and flags become float32."""

    def __init__(self, path: str, mean: Array, scale: Array, clip: float | None) -> None:
        if clip is not None and not clip > 0:
            raise ValueError(f"clip: expected a number above 0, got {clip!r}")
        self._path, self._clip = path, clip
        self._mean, self._scale = mean, scale
        self._on: dict[Any, tuple[Any, Any, Any]] = {}  # by device and dtype

    def __call__(self, values: Any) -> Any:
        shape = self._mean.shape
        if shape and tuple(values.shape[-len(shape) :]) != shape:
            expected = ", ".join(map(str, shape))
            raise DataError(f"field '{self._path}': expected shape (..., {expected}), got {tuple(values.shape)}")
        # Half precision would lose the difference from the mean; it is only rounded to at the end.
        wide = values if values.element_size() >= 4 and values.is_floating_point() else values.float()
        mean, rest, scale = self._constants(wide)
        normal = ((wide - mean) - rest) / scale
        if self._clip is not None:
            normal = normal.clamp(-self._clip, self._clip)
        return normal.to(values.dtype) if values.is_floating_point() else normal

    def _constants(self, wide: Any) -> tuple[Any, Any, Any]:
        """Mean, its rounding error in float32, and scale, on the device and in the dtype of the values."""
        key = wide.device, wide.dtype
        if key not in self._on:
            mean = self._mean.astype(np.float64 if wide.element_size() == 8 else np.float32)
            rest = self._mean - mean
            self._on[key] = wide.new_tensor(mean), wide.new_tensor(rest), wide.new_tensor(self._scale)
        return self._on[key]


class _Moments:
    """The statistics of one field."""

    def __init__(self, path: str, spec: Field, max_elements: int, scratch: Array) -> None:
        self._path, self._spec, self._scratch = path, spec, scratch
        self._dtype, self._shape = spec.storage_dtype, spec.shape
        self.is_reduced = math.prod(spec.shape) > max_elements
        self._capacity = 0 if self.is_reduced else min(_BUFFER_ROWS, max(1, _BUFFER_BYTES // spec.row_bytes))
        self._waiting = np.empty((self._capacity, *spec.shape), self._dtype)
        self._n_waiting = 0
        shape = () if self.is_reduced else spec.shape
        self._count = np.zeros(shape, np.int64)
        self._n_nonfinite = np.zeros(shape, np.int64)
        self._origin = np.zeros(shape)  # the first value; the mean is relative to it
        self._mean = np.zeros(shape)
        self._m2 = np.zeros(shape)  # sum of squared differences from the mean
        self._min, self._max = _empty_range(_seen_dtype(spec), shape)

    def add(self, rows: Array) -> None:
        if (
            type(rows) is not np.ndarray
            or rows.dtype != self._dtype
            or rows.shape[1:] != self._shape
            or not rows.ndim
        ):
            rows = check_value(self._path, self._spec, rows, np.shape(rows)[:1])
        n = len(rows)
        stop = self._n_waiting + n
        if stop > self._capacity:
            self._flush()
            stop = n
        if n > self._capacity // 2:
            self._evaluate(rows)
            return
        self._waiting[stop - n : stop] = rows
        self._n_waiting = stop

    def _flush(self) -> None:
        n, self._n_waiting = self._n_waiting, 0
        if n:
            self._evaluate(self._waiting[:n])

    def _evaluate(self, rows: Array) -> None:
        if self.is_reduced:
            rows = np.ascontiguousarray(rows).reshape(-1)
        n_rows = max(1, _BLOCK_ELEMENTS // self._mean.size)
        for start in range(0, len(rows), n_rows):
            block = rows[start : start + n_rows]
            numbers = widen_bfloat16(block) if self._spec.dtype == "bfloat16" else block
            self._join(*_moments_of(numbers, self._origin, self._count, self._scratch))

    @np.errstate(over="ignore", invalid="ignore")
    def _join(
        self, count: Array, n_nonfinite: Array, origin: Array, mean: Array, m2: Array, low: Array, high: Array
    ) -> None:
        """Add the moments of further values: the update of Chan, Golub and LeVeque."""
        total = self._count + count
        share = count / np.maximum(total, 1)
        self._origin = np.where(self._count > 0, self._origin, origin)
        delta = (origin - self._origin) + (mean - self._mean)
        self._mean = self._mean + delta * share
        self._m2 = self._m2 + m2 + delta * delta * (self._count * share)
        self._count = total
        self._n_nonfinite = self._n_nonfinite + n_nonfinite
        self._min, self._max = np.minimum(self._min, low), np.maximum(self._max, high)

    def merge(self, state: Mapping[str, Array]) -> None:
        self._flush()
        self._join(*(state[name] for name in _STATE))

    def state(self) -> dict[str, Array]:
        self._flush()
        return {name: np.array(getattr(self, f"_{name}")) for name in _STATE}

    def load(self, state: Mapping[str, Array]) -> None:
        self._n_waiting = 0
        for name in _STATE:
            setattr(self, f"_{name}", np.array(state[name]))

    def checked_state(self, state: Mapping[str, Any]) -> dict[str, Array]:
        arrays = {name: np.asarray(state[name]) for name in _STATE}
        for name, array in arrays.items():
            mine = getattr(self, f"_{name}")
            if array.shape != mine.shape or array.dtype != mine.dtype:
                raise ValueError(
                    f"field '{self._path}', {name}: expected {mine.dtype} of shape {mine.shape}, got"
                    f" {array.dtype} of shape {array.shape}"
                )
        return arrays

    def result(self) -> dict[str, Any]:
        state = self.state()
        is_seen = state["count"] > 0
        found: dict[str, Any] = {"count": state["count"], "n_nonfinite": state["n_nonfinite"]}
        found["mean"] = np.where(is_seen, state["origin"] + state["mean"], np.nan)
        found["std"] = np.sqrt(np.where(is_seen, state["m2"] / np.maximum(state["count"], 1), np.nan))
        for name in ("min", "max"):
            found[name] = state[name] if is_seen.all() else np.where(is_seen, state[name], np.nan)
        return found | {"is_reduced": self.is_reduced}


@np.errstate(over="ignore", invalid="ignore")
def _moments_of(rows: Array, origin: Array, count: Array, scratch: Array) -> tuple[Array, ...]:
    """The values that `_STATE` names, of these rows; chooses the origin of elements without a count."""
    is_finite = None if rows.dtype.kind != "f" else np.isfinite(rows)
    if is_finite is not None and not is_finite.all():
        return _finite_moments_of(rows, is_finite, origin, count)
    origin = np.where(count > 0, origin, rows[0])
    apart = np.subtract(rows, origin, out=scratch[: rows.size].reshape(rows.shape))
    mean = apart.mean(0)
    apart -= mean
    n = np.full(origin.shape, len(rows))
    return n, np.zeros_like(n), origin, mean, _squares(apart), rows.min(0), rows.max(0)


def _finite_moments_of(rows: Array, is_finite: Array, origin: Array, count: Array) -> tuple[Array, ...]:
    n = is_finite.sum(0)
    first = np.take_along_axis(rows, is_finite.argmax(0)[None], 0)[0]
    origin = np.where((count > 0) | (n == 0), origin, first)
    apart = np.where(is_finite, rows - origin, 0.0)
    mean = apart.sum(0) / np.maximum(n, 1)
    apart = np.where(is_finite, apart - mean, 0.0)
    low, high = np.where(is_finite, rows, np.inf).min(0), np.where(is_finite, rows, -np.inf).max(0)
    return n, len(rows) - n, origin, mean, _squares(apart), low, high


def _squares(apart: Array) -> Array:
    total: Array = np.einsum("i...,i...->...", apart, apart)
    return total


def _seen_dtype(spec: Field) -> np.dtype[Any]:
    """The dtype of a field's minimum and maximum."""
    return np.dtype({"bfloat16": "float32", "bool": "uint8"}.get(spec.dtype, spec.dtype))


def _empty_range(dtype: np.dtype[Any], shape: tuple[int, ...]) -> tuple[Array, Array]:
    """A minimum and a maximum that any value replaces."""
    if dtype.kind == "f":
        return np.full(shape, np.inf, dtype), np.full(shape, -np.inf, dtype)
    return np.full(shape, np.iinfo(dtype).max, dtype), np.full(shape, np.iinfo(dtype).min, dtype)


def _chosen(schema: Schema, fields: Iterable[str] | None) -> list[str]:
    if fields is None:
        return list(schema)
    names = list(fields)
    found = {name: [path for path in schema if path == name or path.startswith(f"{name}/")] for name in names}
    lost = [name for name, paths in found.items() if not paths]
    if lost:
        raise KeyError(f"no field {lost[0]!r}; the fields are {', '.join(schema)}")
    return list(dict.fromkeys(path for paths in found.values() for path in paths))


def _shared_moments(moments: Mapping[str, Array], rank: int, world_size: int) -> dict[str, Array]:
    count = moments["count"]
    own, nonfinite = (a // world_size + (rank < a % world_size) for a in (count, moments["n_nonfinite"]))
    m2 = moments["m2"] * (own / np.maximum(count, 1))
    return {**moments, "count": own, "n_nonfinite": nonfinite, "m2": m2}


class ObservedStatistics:
    """The statistics of a buffer; they begin once the schema is known.

    Args:
        schema: Schema of the store; None while it is not known.
        chosen: False: none are kept. True: of all fields. Else the names of fields or groups.
        saved: The state of a checkpoint to continue from.
    """

    def __init__(
        self, schema: Schema | None, chosen: bool | tuple[str, ...], saved: Mapping[str, Any] | None
    ) -> None:
        self._chosen = chosen
        self._running = self._begin(schema) if schema is not None else None
        if self._running is not None and saved is not None:
            self._running.load_state_dict(saved)

    def _begin(self, schema: Schema) -> RunningStatistics | None:
        if not self._chosen:
            return None
        return RunningStatistics(schema, fields=None if isinstance(self._chosen, bool) else self._chosen)

    def update(self, schema: Schema, rows: Mapping[str, Array]) -> None:
        """Count committed rows; called by the commit thread."""
        if self._running is None:
            self._running = self._begin(schema)
        if self._running is not None:
            self._running.update(rows)

    def state_dict(self) -> dict[str, dict[str, Array]] | None:
        return self._running.state_dict() if self._running is not None else None

    def result(self) -> dict[str, dict[str, Any]]:
        """See `RunningStatistics.result`; empty before the first commit.

        Raises:
            ValueError: No statistics are kept.
        """
        if not self._chosen:
            raise ValueError(
                "this buffer keeps no statistics; make it with statistics=True, or with names of fields"
            )
        return self._running.result() if self._running is not None else {}
