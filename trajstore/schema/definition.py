"""The fields of a step and the columns of an episode: names, dtypes, shapes and reward alignment."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Literal

import numpy as np

from trajstore.errors import SchemaError
from trajstore.html_blocks import Section, count, representation, size
from trajstore.schema.fill_values import Fill, check_fill, fill_from_json, fill_to_json
from trajstore.schema.nesting import nest
from trajstore.schema.schema_html import columns_section, fields_section

Alignment = Literal["action", "observation"]
EpisodeType = Literal["bool", "int64", "float64", "str"]
Array = np.ndarray[Any, np.dtype[Any]]

DTYPES: frozenset[str] = frozenset(
    {"bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"}
    | {"float16", "float32", "float64", "bfloat16"}
)
_STORAGE_DTYPES = {name: np.dtype("uint16" if name == "bfloat16" else name) for name in DTYPES}
MAX_FIELDS = 1024
_MAX_SHOWN = 100  # fields in the text of a schema
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
# Names that the episode table and the span arrays use for their own columns.
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
    """Refuse a name that some backend or file system would change, or that could name something outside the store.

    Args:
        name: The name.
        what: What it is the name of, for the message.

    Raises:
        SchemaError: The name is not allowed.
    """
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
        final: Whether an episode of T steps has T + 1 values of this field (observations usually do).
        chunk_rows: Rows in a chunk; by default it depends on the size of a row, and many chunks share an object.
        shard_rows: Rows in an object that packs several chunks, a multiple of ``chunk_rows``, which it needs; by
            default a field with ``chunk_rows`` has an object for each chunk.
        codec: ``none``, ``zstd[:level]``, ``blosc-lz4[:level]`` or ``blosc-zstd[:level]``; by default each writer
            chooses by its first data, and does not compress what compresses badly.
        fill: The number that steps of streams without this field read as, in every element. A field that declares
            it can be added to an existing store. None: every stream has the field.
    """

    dtype: str
    shape: tuple[int, ...] = ()
    final: bool = field(default=False, kw_only=True)
    chunk_rows: int | None = field(default=None, kw_only=True, compare=False)
    shard_rows: int | None = field(default=None, kw_only=True, compare=False)
    codec: str | None = field(default=None, kw_only=True, compare=False)
    fill: Fill | None = field(default=None, kw_only=True, compare=False)

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
        _check_rows("chunk_rows", self.chunk_rows)
        _check_rows("shard_rows", self.shard_rows)
        if self.shard_rows is not None and (self.chunk_rows is None or self.shard_rows % self.chunk_rows):
            raise SchemaError(f"shard_rows {self.shard_rows}: expected a multiple of chunk_rows, {self.chunk_rows}")
        if self.fill is not None:
            object.__setattr__(self, "fill", check_fill(self.fill, name))

    @property
    def storage_dtype(self) -> np.dtype[Any]:
        """The dtype on disk: that of the field, except uint16 bit patterns for bfloat16."""
        return _STORAGE_DTYPES[self.dtype]

    @property
    def row_bytes(self) -> int:
        return self.storage_dtype.itemsize * math.prod(self.shape)

    def to_json(self) -> dict[str, Any]:
        described = {
            "dtype": self.dtype,
            "shape": list(self.shape),
            "final": self.final,
            "chunk_rows": self.chunk_rows,
            "codec": self.codec,
        }
        if self.shard_rows is not None:
            described["shard_rows"] = self.shard_rows
        return described if self.fill is None else described | {"fill": fill_to_json(self.fill)}


def _check_rows(name: str, rows: object) -> None:
    if rows is not None and not (isinstance(rows, int) and not isinstance(rows, bool) and 1 <= rows <= 1 << 24):
        raise SchemaError(f"{name} {rows!r}: expected an integer from 1 to {1 << 24}")


def _describe(spec: Field | None) -> str:
    if spec is None:
        return "absent"
    fill = "" if spec.fill is None else f" with fill {spec.fill}"
    return f"{spec.dtype} {spec.shape}{' with final' if spec.final else ''}{fill}"


def _differ(own: Field | None, other: Field | None, filled: bool) -> bool:
    if own is None or other is None:
        present = own or other
        return not filled or present is None or present.fill is None
    fills = {str(spec.fill) for spec in (own, other) if spec.fill is not None}  # as text: NaN equals NaN
    return own != other or (filled and len(fills) > 1)


def _dtype_name(dtype: Any) -> str:
    """The name of a dtype given as text, as a numpy or torch dtype, or as a Python type."""
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
        episode: Columns that every episode may have a value for, by name: ``bool``, ``int``, ``float`` or ``str``.
            Other values of an episode are kept as free-form metadata.
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
        self.fields: dict[str, Field] = dict(_iter_fields(fields, ""))
        self.episode: dict[str, EpisodeType] = _check_episode_columns(episode or {})
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
            f"{'' if f.fill is None else f' fill {f.fill}'}"
            for p, f in self.fields.items()
        )
        shown = list(islice(lines, _MAX_SHOWN))
        more = [f"  ... and {len(self) - len(shown)} more"] if len(self) > len(shown) else []
        return "Schema(\n" + "\n".join([*shown, *more]) + "\n)"

    def _repr_html_(self) -> str:
        return representation(
            "Schema", "", lambda: f"{count(len(self), 'field')}, {size(self.row_bytes)} a step", [
                lambda: self.fields_section(is_open=True),
                lambda: columns_section(self.to_json()),
            ],
        )  # fmt: skip

    def fields_section(self, *, is_open: bool = False) -> Section:
        """The fields as a section of HTML."""
        sizes = {path: spec.row_bytes for path, spec in self.fields.items()}
        return fields_section(self.to_json(), sizes, is_open=is_open)

    @property
    def row_bytes(self) -> int:
        return sum(f.row_bytes for f in self.fields.values())

    @property
    def final_fields(self) -> tuple[str, ...]:
        return tuple(p for p, f in self.fields.items() if f.final)

    def differences(
        self, other: Schema, mine: str = "the first", theirs: str = "the second", *, filled: bool = False
    ) -> list[str]:
        """Describe each difference from another schema; empty if a store may hold data of both.

        Args:
            other: The other schema.
            mine: What to call the owner of this schema.
            theirs: What to call the owner of the other one.
            filled: Leave out fields that only one of them has and that declare a ``fill``.
        """
        found = [
            f"{path}: {_describe(self.fields.get(path))} in {mine}, {_describe(other.fields.get(path))} in {theirs}"
            for path in {**self.fields, **other.fields}
            if _differ(self.fields.get(path), other.fields.get(path), filled)
        ]
        if list(self.episode.items()) != list(other.episode.items()):  # the order matters: it numbers bits on disk
            found.append(f"episode: {self.episode} in {mine}, {other.episode} in {theirs}")
        for name in ("reward", "reward_alignment"):
            own, foreign = getattr(self, name), getattr(other, name)
            if own != foreign:
                found.append(f"{name}: {own!r} in {mine}, {foreign!r} in {theirs}")
        return found

    def with_final(self, paths: set[str]) -> Schema:
        """A copy of the schema in which exactly these fields have a final value."""
        return self._with_fields({p: replace(f, final=p in paths) for p, f in self.fields.items()})

    def only(self, paths: Collection[str]) -> Schema:
        """A copy of the schema with these fields alone."""
        return self._with_fields({p: f for p, f in self.fields.items() if p in paths})

    def merged(self, other: Schema) -> Schema:
        """The schema with the fields that only another one has as well.

        Raises:
            SchemaError: Names of the two can't stand in one schema.
        """
        if self.fields.keys() >= other.fields.keys():
            return self
        fields = nest(self.fields | {p: f for p, f in other.fields.items() if p not in self.fields})
        return Schema(fields, episode=self.episode, reward=self.reward, reward_alignment=self.reward_alignment)

    def _with_fields(self, fields: dict[str, Field]) -> Schema:
        copy = object.__new__(Schema)
        copy.__dict__.update(self.__dict__)
        copy.fields = fields
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
        """Parse what `to_json` made; the data may be damaged or hostile.

        Raises:
            SchemaError: It is malformed, or not a valid schema.
        """
        try:
            fields = {path: Field(**_field_arguments(f)) for path, f in data["fields"].items()}  # type: ignore[index]
            return Schema(
                nest(fields),
                episode=data["episode"],  # type: ignore[index]
                reward=data["reward"],  # type: ignore[index]
                reward_alignment=data["reward_alignment"],  # type: ignore[index]
            )
        except (TypeError, KeyError, AttributeError, ValueError) as error:
            raise SchemaError(f"the stored schema is malformed: {error}") from error


def as_schema(schema: Schema | Mapping[str, Any] | None) -> Schema | None:
    """A schema given as such, or as the mapping that `Schema` takes.

    Raises:
        TypeError: It is neither.
        SchemaError: The mapping is not one of names to fields.
    """
    if schema is None or isinstance(schema, Schema):
        return schema
    if not isinstance(schema, Mapping):
        raise TypeError(f"schema: expected a Schema or a mapping of names to Field, got {schema!r:.80}")
    return Schema(schema)


def _field_arguments(data: Mapping[str, Any]) -> dict[str, Any]:
    shape = data["shape"]
    if not isinstance(shape, list) or len(shape) > MAX_AXES or not isinstance(data["final"], bool):
        raise SchemaError(f"expected a list as shape and a bool as final, got {shape!r} and {data['final']!r}")
    return {
        "dtype": data["dtype"],
        "shape": tuple(shape),
        "final": data["final"],
        "chunk_rows": data.get("chunk_rows"),
        "shard_rows": data.get("shard_rows"),
        "codec": data.get("codec"),
        "fill": fill_from_json(data.get("fill")),
    }


def _iter_fields(fields: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Field]]:
    if not isinstance(fields, Mapping) or not fields:
        what = f"field '{prefix[:-1]}': expected a Field or a" if prefix else "fields: expected a"
        raise SchemaError(f"{what} non-empty mapping of Fields, got {fields!r}")
    _check_distinct_ignoring_case(fields, prefix)
    for name, value in fields.items():
        path = prefix + check_name(name, f"field name in '{prefix}'" if prefix else "field name")
        if isinstance(value, Field):
            yield path, value
        elif path.count("/") >= 16:
            raise SchemaError(f"field '{path}': nested deeper than 16 levels")
        else:
            yield from _iter_fields(value, path + "/")


def _check_distinct_ignoring_case(names: Mapping[str, Any], prefix: str) -> None:
    folded: dict[str, str] = {}
    for name in names:
        twin = folded.setdefault(str(name).casefold(), name)
        if twin != name:
            raise SchemaError(f"fields '{prefix}{twin}' and '{prefix}{name}' differ only in case")


def _check_episode_columns(columns: Mapping[str, Any]) -> dict[str, EpisodeType]:
    if len(columns) > MAX_EPISODE_COLUMNS:
        raise SchemaError(f"at most {MAX_EPISODE_COLUMNS} episode columns, got {len(columns)}")
    checked: dict[str, EpisodeType] = {}
    for name, kind in columns.items():
        if check_name(name, "episode column") in _TABLE_COLUMNS:
            raise SchemaError(f"episode column {name!r} is taken by the episode table; choose another")
        if kind not in _EPISODE_TYPES:
            raise SchemaError(f"episode column {name!r}: expected bool, int, float or str, got {kind!r}")
        checked[name] = _EPISODE_TYPES[kind]
    return checked


def selected_paths(schema: Schema, fields: Iterable[str] | None) -> list[str]:
    """Paths of the named fields, and of all fields in the named groups; every path if ``fields`` is None.

    Raises:
        KeyError: A name is neither a field nor a group.
    """
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
