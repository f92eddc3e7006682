"""What a step holds: named fields of fixed dtype and shape, and how an episode is laid out in time."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from trajstore.errors import DataError, SchemaError

Alignment = Literal["action", "observation"]
EpisodeType = Literal["bool", "int64", "float64", "str"]
Array = np.ndarray[Any, np.dtype[Any]]

DTYPES: frozenset[str] = frozenset(
    {"bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"}
    | {"float16", "float32", "float64", "bfloat16"}
)
_STORAGE_DTYPES = {name: np.dtype("uint16" if name == "bfloat16" else name) for name in DTYPES}
MAX_FIELDS = 1024
MAX_AXES = 32
MAX_ROW_BYTES = 1 << 30
MAX_EPISODE_COLUMNS = 48
MAX_METADATA_BYTES = 16 << 20

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,63}\Z")
_WINDOWS_DEVICES = re.compile(r"(con|prn|aux|nul|com[0-9]|lpt[0-9])(\.|\Z)", re.IGNORECASE)
_EPISODE_TYPES: dict[Any, EpisodeType] = {
    bool: "bool", int: "int64", float: "float64", str: "str",
    "bool": "bool", "int64": "int64", "float64": "float64", "str": "str",
}  # fmt: skip
# What the episode table and the span arrays call their own columns.
_TABLE_COLUMNS = frozenset(
    [
        "stream",
        "episode",
        "env",
        "length",
        "end",
        "return",
        "has_final",
        "is_headless",
        "time",
        "metadata",
        "t_start",
        "row_start",
        "row_stop",
        "present",
        "text_start",
        "text_stop",
        "source",
        "n_evicted",
    ]
)


def check_name(name: object, what: str) -> str:
    """Refuse a name that some backend or file system would mangle, or that could leave the store."""
    if not isinstance(name, str) or not _NAME.match(name):
        raise SchemaError(
            f"{what} {name!r}: expected 1 to 64 of the characters A-Z a-z 0-9 _ . - not starting with . or -"
        )
    if name.endswith(".") or name.startswith("__") or name == "zarr.json" or _WINDOWS_DEVICES.match(name):
        raise SchemaError(f"{what} {name!r} is reserved by Zarr or by a file system; choose another")
    return name


@dataclass(frozen=True, slots=True)
class Field:
    """One named part of every step.

    Args:
        dtype: ``bool``, ``int8`` to ``uint64``, ``float16`` to ``float64``, or ``bfloat16``.
        shape: Shape of one step's value; ``()`` for a scalar.
        final: Whether an episode of T transitions has T + 1 values of it (observations usually do).
        chunk_rows: Rows in a chunk; by default chosen from the size of a row.
        codec: ``none``, ``zstd[:level]``, ``blosc-lz4[:level]`` or ``blosc-zstd[:level]``; by default by dtype.
    """

    dtype: str
    shape: tuple[int, ...] = ()
    final: bool = field(default=False, kw_only=True)
    chunk_rows: int | None = field(default=None, kw_only=True, compare=False)
    codec: str | None = field(default=None, kw_only=True, compare=False)

    def __post_init__(self) -> None:
        name = _dtype_name(self.dtype)
        object.__setattr__(self, "dtype", name)
        if name not in DTYPES:
            raise SchemaError(f"dtype {name!r} can't be stored; expected one of {', '.join(sorted(DTYPES))}")
        if not isinstance(self.shape, Iterable):
            raise SchemaError(f"shape {self.shape!r}: expected a tuple of integers")
        shape = tuple(self.shape)
        if len(shape) > MAX_AXES or not all(
            isinstance(n, (int, np.integer)) and not isinstance(n, bool) and n > 0 for n in shape
        ):
            raise SchemaError(f"shape {self.shape!r}: expected at most {MAX_AXES} positive integers")
        object.__setattr__(self, "shape", tuple(int(n) for n in shape))
        if self.row_bytes > MAX_ROW_BYTES:
            raise SchemaError(f"one step of shape {shape} takes {self.row_bytes} bytes; at most {MAX_ROW_BYTES}")
        rows = self.chunk_rows
        if rows is not None and not (isinstance(rows, int) and not isinstance(rows, bool) and 1 <= rows <= 1 << 24):
            raise SchemaError(f"chunk_rows {rows!r}: expected an integer from 1 to {1 << 24}")

    @property
    def storage_dtype(self) -> np.dtype[Any]:
        """The dtype on disk: that of the field, but uint16 bit patterns for bfloat16."""
        return _STORAGE_DTYPES[self.dtype]

    @property
    def row_bytes(self) -> int:
        return self.storage_dtype.itemsize * math.prod(self.shape)

    def to_json(self) -> dict[str, Any]:
        return {
            "dtype": self.dtype,
            "shape": list(self.shape),
            "final": self.final,
            "chunk_rows": self.chunk_rows,
            "codec": self.codec,
        }


def _describe(spec: Field | None) -> str:
    return f"{spec.dtype} {spec.shape}{' with final' if spec.final else ''}" if spec else "absent"


def _dtype_name(dtype: Any) -> str:
    """The name of a dtype given as text, numpy or torch dtype, or Python type."""
    if isinstance(dtype, str):
        return dtype
    text = str(dtype)
    if text.startswith("torch."):
        return text.removeprefix("torch.")
    try:
        return str(np.dtype(dtype).name)
    except TypeError:
        raise SchemaError(
            f"dtype {dtype!r}: expected a name such as 'float32', or a numpy or torch dtype"
        ) from None


class Schema:
    """The fields of a step and the columns of an episode; immutable.

    Args:
        fields: Nested mapping of names to `Field`; nesting becomes groups on disk.
        episode: Columns that every episode may carry, by name: ``bool``, ``int``, ``float`` or ``str``.
            Anything else goes into an episode's free-form metadata.
        reward: Path of the field that holds the reward, or None.
        reward_alignment: ``"action"``: step t holds the reward that action t earned (the default).
            ``"observation"``: step t holds the reward that arrived together with observation t.

    >>> schema = Schema({"observation": Field("float32", (4,), final=True), "action": Field("int64"),
    ...                  "reward": Field("float32")})
    >>> list(schema)
    ['observation', 'action', 'reward']
    """

    def __init__(
        self,
        fields: Mapping[str, Any],
        *,
        episode: Mapping[str, Any] | None = None,
        reward: str | None = "reward",
        reward_alignment: Alignment = "action",
    ) -> None:
        self.fields: dict[str, Field] = dict(_walk_fields(fields, ""))
        self.episode: dict[str, EpisodeType] = _episode_columns(episode or {})
        if not 1 <= len(self.fields) <= MAX_FIELDS:
            raise SchemaError(f"a schema has 1 to {MAX_FIELDS} fields, got {len(self.fields)}")
        if reward_alignment not in ("action", "observation"):
            raise SchemaError(f"reward_alignment {reward_alignment!r}: expected 'action' or 'observation'")
        if reward not in (None, "reward", *self.fields):
            raise SchemaError(f"reward {reward!r}: expected one of the fields {', '.join(self.fields)}")
        self.reward = reward if reward in self.fields else None
        self.reward_alignment: Alignment = reward_alignment

    def __iter__(self) -> Iterator[str]:
        return iter(self.fields)

    def __len__(self) -> int:
        return len(self.fields)

    def __getitem__(self, path: str) -> Field:
        return self.fields[path]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Schema) and not self.differences(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        lines = (
            f"  {p}: {f.dtype}{list(f.shape) if f.shape else ''}{' +final' if f.final else ''}"
            for p, f in self.fields.items()
        )
        return "Schema(\n" + "\n".join(lines) + "\n)"

    @property
    def row_bytes(self) -> int:
        return sum(f.row_bytes for f in self.fields.values())

    @property
    def final_fields(self) -> tuple[str, ...]:
        return tuple(p for p, f in self.fields.items() if f.final)

    def differences(self, other: Schema) -> list[str]:
        """Say, field by field, what another schema has differently; empty when data may be mixed."""
        found = [
            f"{path}: {_describe(self.fields.get(path))} here, {_describe(other.fields.get(path))} there"
            for path in {**self.fields, **other.fields}
            if self.fields.get(path) != other.fields.get(path)
        ]
        if list(self.episode.items()) != list(other.episode.items()):  # their order counts: it numbers bits on disk
            found.append(f"episode: {self.episode} here, {other.episode} there")
        for name in ("reward", "reward_alignment"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                found.append(f"{name}: {mine!r} here, {theirs!r} there")
        return found

    def with_final(self, paths: set[str]) -> Schema:
        """A copy in which exactly these fields have a final value."""
        copy = object.__new__(Schema)
        copy.__dict__.update(self.__dict__)
        copy.fields = {p: replace(f, final=p in paths) for p, f in self.fields.items()}
        return copy

    def to_json(self) -> dict[str, Any]:
        return {
            "fields": {path: f.to_json() for path, f in self.fields.items()},
            "episode": dict(self.episode),
            "reward": self.reward,
            "reward_alignment": self.reward_alignment,
        }

    @staticmethod
    def from_json(data: object) -> Schema:
        """Read back what `to_json` made, trusting nothing in it."""
        try:
            fields = {path: Field(**_field_kwargs(f)) for path, f in data["fields"].items()}  # type: ignore[index]
            return Schema(
                nest(fields),
                episode=data["episode"],  # type: ignore[index]
                reward=data["reward"],  # type: ignore[index]
                reward_alignment=data["reward_alignment"],  # type: ignore[index]
            )
        except (TypeError, KeyError, AttributeError, ValueError) as error:
            raise SchemaError(f"stored schema is not readable: {error}") from error


def _field_kwargs(data: Mapping[str, Any]) -> dict[str, Any]:
    shape = data["shape"]
    if not isinstance(shape, list) or len(shape) > 32 or not isinstance(data["final"], bool):
        raise SchemaError(f"shape {shape!r} or final {data['final']!r} is malformed")
    return {
        "dtype": data["dtype"],
        "shape": tuple(shape),
        "final": data["final"],
        "chunk_rows": data.get("chunk_rows"),
        "codec": data.get("codec"),
    }


def _walk_fields(fields: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Field]]:
    if not isinstance(fields, Mapping) or not fields:
        what = f"field '{prefix[:-1]}': expected a Field or a" if prefix else "fields: expected a"
        raise SchemaError(f"{what} non-empty mapping of Fields, got {fields!r}")
    _check_case(fields, prefix)
    for name, value in fields.items():
        path = prefix + check_name(name, f"field name in '{prefix}'" if prefix else "field name")
        if isinstance(value, Field):
            yield path, value
        elif path.count("/") >= 16:
            raise SchemaError(f"field '{path}': nested deeper than 16 levels")
        else:
            yield from _walk_fields(value, path + "/")


def _check_case(names: Mapping[str, Any], prefix: str) -> None:
    folded: dict[str, str] = {}
    for name in names:
        twin = folded.setdefault(str(name).casefold(), name)
        if twin != name:
            raise SchemaError(f"fields '{prefix}{twin}' and '{prefix}{name}' differ only in case")


def _episode_columns(columns: Mapping[str, Any]) -> dict[str, EpisodeType]:
    if len(columns) > MAX_EPISODE_COLUMNS:
        raise SchemaError(f"at most {MAX_EPISODE_COLUMNS} episode columns, got {len(columns)}")
    known: dict[str, EpisodeType] = {}
    for name, kind in columns.items():
        if check_name(name, "episode column") in _TABLE_COLUMNS:
            raise SchemaError(f"episode column {name!r} is taken by the episode table; choose another")
        if kind not in _EPISODE_TYPES:
            raise SchemaError(f"episode column {name!r}: expected bool, int, float or str, got {kind!r}")
        known[name] = _EPISODE_TYPES[kind]
    return known


def nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Turn ``{"a/b": x}`` into ``{"a": {"b": x}}``."""
    nested: dict[str, Any] = {}
    for path, value in flat.items():
        *groups, leaf = path.split("/")
        node = nested
        for group in groups:
            node = node.setdefault(group, {})
            if not isinstance(node, dict):
                raise SchemaError(f"'{path}' lies below '{group}', which is a field")
        if leaf in node:
            raise SchemaError(f"'{path}' is both a field and a group")
        node[leaf] = value
    return nested


def flatten(data: Any, prefix: str = "", into: dict[str, Any] | None = None) -> dict[str, Any]:
    """Turn nested mappings (dicts, TensorDicts) into ``{"a/b": value}``, in order."""
    if not hasattr(data, "items"):
        raise DataError(f"expected a mapping of field names to values, got {type(data).__name__}")
    flat: dict[str, Any] = {} if into is None else into
    for name, value in data.items():
        if not isinstance(name, str) or "/" in name:
            within = f" in '{prefix}'" if prefix else ""
            raise DataError(f"field name {name!r}{within}: expected a string without '/'")
        # A TensorDict is a mapping and has a dtype; a column of pandas has items and is none.
        if hasattr(value, "items") and (isinstance(value, Mapping) or not hasattr(value, "dtype")):
            flatten(value, f"{prefix}{name}/", flat)
        else:
            flat[prefix + name] = value
    return flat


def as_array(path: str, value: Any) -> tuple[Array, str]:
    """View arrays, tensors and Python numbers as numpy, with the dtype's name; bfloat16 comes as its bits."""
    if type(value) is np.ndarray:
        array = value
    elif hasattr(value, "detach"):
        return _from_torch(path, value)
    else:
        array = _from_other(path, value)
    name = array.dtype.name
    if name not in DTYPES:
        raise DataError(f"field '{path}': dtype {name} can't be stored (from {type(value).__name__})")
    return (array.view(np.uint16), name) if name == "bfloat16" else (array, name)


def _from_other(path: str, value: Any) -> Array:
    if isinstance(value, np.ma.MaskedArray):
        raise DataError(f"field '{path}': a masked array would lose its mask; fill it first")
    try:
        return np.asarray(value)
    except ValueError as error:
        raise DataError(f"field '{path}': no array can be made of this {type(value).__name__}: {error}") from error


def _from_torch(path: str, tensor: Any) -> tuple[Array, str]:
    tensor = tensor.detach().cpu()
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise DataError(f"field '{path}': dtype {name} can't be stored (from {type(tensor).__name__})")
    if name == "bfloat16":
        # A tensor came in, so torch is loaded; importing it here would make every user wait for it.
        signed: Array = tensor.contiguous().view(sys.modules["torch"].int16).numpy()
        return signed.view(np.uint16), name
    try:
        return tensor.numpy(), name
    except (TypeError, RuntimeError) as error:
        raise DataError(f"field '{path}': this tensor has no plain array: {error}") from error


def from_scalar(path: str, spec: Field, value: bool | int | float) -> Array:
    """A Python number as the field's dtype; refused unless it keeps its value (floats: its range)."""
    kind = "f" if spec.dtype == "bfloat16" else spec.storage_dtype.kind
    kinds = "b" if isinstance(value, bool) else "iuf" if isinstance(value, int) else "f"
    if kind not in kinds or spec.shape:
        raise _mismatch(path, spec, (), type(value).__name__, ())
    try:
        return _cast_scalar(spec, value)
    except (OverflowError, ValueError) as error:
        raise DataError(f"field '{path}': {value!r} is out of range for {spec.dtype}") from error


def _cast_scalar(spec: Field, value: bool | int | float) -> Array:
    with np.errstate(over="ignore"):
        array = np.asarray(value).astype(np.float32) if spec.dtype == "bfloat16" else np.asarray(value)
        if spec.dtype == "bfloat16":
            cast = round_to_bfloat16(array)
            is_finite = bool(np.isfinite(widen_bfloat16(cast)))
        elif spec.storage_dtype.kind == "f":
            cast = array.astype(spec.storage_dtype)
            is_finite = bool(np.isfinite(cast))
        else:
            return np.asarray(value, spec.storage_dtype)
    if math.isfinite(value) and not is_finite:
        raise OverflowError
    if isinstance(value, int) and int(widen_bfloat16(cast) if spec.dtype == "bfloat16" else cast) != value:
        raise OverflowError
    return cast


def round_to_bfloat16(values: Array) -> Array:
    """Bits of the nearest bfloat16 (ties to even) of float32 values; NaN stays NaN."""
    flat = np.ascontiguousarray(values, np.float32).reshape(-1)
    bits = flat.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(flat), (bits >> 16) | 0x40, rounded).astype(np.uint16).reshape(np.shape(values))


def widen_bfloat16(bits: Array) -> Array:
    """Exact float32 values of bfloat16 bit patterns."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _mismatch(path: str, spec: Field, lead: tuple[Any, ...], dtype: str, shape: tuple[int, ...]) -> DataError:
    expected = f"({', '.join(str(n) for n in (*lead, *spec.shape))})"
    return DataError(
        f"field '{path}': expected {spec.dtype} of shape {expected}, "
        f"got {dtype} of shape ({', '.join(map(str, shape))})"
    )


def check_value(path: str, spec: Field, value: Any, lead: tuple[int, ...]) -> Array:
    """The value as an array of exactly ``lead + field shape`` in storage dtype, or a DataError.

    Args:
        path: The field's path, for the message.
        spec: What the field expects.
        value: Array, tensor, or Python number where ``lead`` is empty.
        lead: Leading lengths expected.
    """
    if type(value) is np.ndarray and value.dtype == spec.storage_dtype and value.shape == lead + spec.shape:
        if spec.dtype != "bfloat16":  # the common case, without looking at names
            return value
    elif not lead and isinstance(value, (bool, int, float)):
        return from_scalar(path, spec, value)
    array, name = as_array(path, value)
    if name != spec.dtype or array.shape != lead + spec.shape or not array.dtype.isnative:
        came = name if array.dtype.isnative else f"byte-swapped {name}"
        raise _mismatch(path, spec, lead, came, array.shape)
    return array


def check_paths(expected: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Refuse missing and extra fields, naming them."""
    if expected.keys() == given.keys():
        return
    missing = [p for p in expected if p not in given]
    extra = [p for p in given if p not in expected]
    raise DataError(
        f"fields: {'missing ' + ', '.join(map(repr, missing)) if missing else ''}"
        f"{'; ' if missing and extra else ''}{'unexpected ' + ', '.join(map(repr, extra)) if extra else ''};"
        f" the schema has {', '.join(map(repr, expected))}"
    )


def infer_schema(flat: Mapping[str, Any], n_lead: int) -> Schema:
    """Read the schema off example data whose leaves have ``n_lead`` leading axes.

    Python numbers become bool, int64 or float64, which hold any of them exactly.
    """
    if not flat:
        raise DataError("no fields given")
    fields: dict[str, Field] = {}
    for path, value in flat.items():
        array, name = as_array(path, value)
        if array.ndim < n_lead:
            raise DataError(f"field '{path}': expected at least {n_lead} leading axes, got shape {array.shape}")
        fields[path] = Field(name, array.shape[n_lead:])
    return Schema(nest(fields))


def selected_paths(schema: Schema, fields: Iterable[str] | None) -> list[str]:
    """Paths of the fields that these names, of fields or groups, stand for; all of them for None."""
    if fields is None:
        return list(schema)
    if isinstance(fields, str):
        raise TypeError(f"fields: expected a list of names, got the string {fields!r}")
    chosen: list[str] = []
    for name in fields:
        found = [path for path in schema if path == name or path.startswith(f"{name}/")]
        if not found:
            raise KeyError(f"no field {name!r}; there are {', '.join(schema)}")
        chosen += [path for path in found if path not in chosen]
    return chosen
