"""The Arrow or Parquet files of a Minari dataset: a directory an episode."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trajstore.datasets.arrow_tables import library, rows_of, whole
from trajstore.datasets.fields import is_skipped
from trajstore.datasets.images import decoded
from trajstore.datasets.json_files import load_object
from trajstore.datasets.minari.files import ENDS, HEADS, Raw
from trajstore.datasets.minari.spaces import Part
from trajstore.errors import DataError, FormatError
from trajstore.schema import Array, check_name, flatten

_EPISODE = re.compile(r"(0|[1-9][0-9]{0,17})\Z")


class TableEpisodes:
    """Implements `Episodes`. Columns have T + 1 rows; the last one counts for observations and infos alone."""

    def __init__(
        self,
        place: Path,
        kind: str,
        parts: Mapping[str, Sequence[Part]],
        is_jpeg: bool,
        skip: Collection[str],
    ) -> None:
        self._place = place
        self._kind = kind
        self._parts = parts
        self._is_jpeg = is_jpeg
        self._skip = skip

    def keys(self) -> Sequence[str]:
        return sorted((p.name for p in self._place.iterdir() if _EPISODE.match(p.name)), key=int)

    def names(self, key: str) -> Iterator[str]:
        yield from (part.path(head) for head in HEADS for part in self._parts[head])
        yield "reward"
        schema = self._opened(self._place / key).schema
        if "infos" in schema.names:
            yield from _info_names("info", schema.field("infos").type)

    def read(self, key: str) -> Raw:
        batch = self._batch(self._place / key)
        fields = dict(self._fields(batch))
        if "infos" in batch.schema.names and not is_skipped("info", self._skip):
            fields |= self._infos("info", batch.column("infos"))
        if not is_skipped("reward", self._skip):
            fields["reward"] = rows_of("rewards", batch.column("rewards"), ())[:-1]
        ends = {ours: rows_of(theirs, batch.column(theirs), ())[:-1] for theirs, ours in ENDS.items()}
        about = load_object(self._place / key / "metadata.json")
        options = about.pop("options", None) or {}  # in HDF5 they are flat
        return Raw(fields, ends, {**about, **flatten({"options": options})})

    def close(self) -> None:
        """Nothing is held open."""

    def _batch(self, directory: Path) -> Any:
        """The rows of an episode."""
        try:
            return self._opened(directory).to_table().combine_chunks()
        except (library().ArrowInvalid, OSError) as error:
            raise FormatError(f"{directory} can't be read as {self._kind}: {error}") from error

    def _opened(self, directory: Path) -> Any:
        """The files of an episode; no rows are read."""
        files = sorted(str(p) for p in directory.iterdir() if p.suffix == f".{self._kind}" and p.is_file())
        if not files:
            raise FormatError(f"{directory}: expected a file of format {self._kind}, got none")
        try:
            return library("pyarrow.dataset").dataset(files, format=self._kind)
        except (library().ArrowInvalid, OSError) as error:
            raise FormatError(f"{directory} can't be read as {self._kind}: {error}") from error

    def _fields(self, batch: Any) -> Iterator[tuple[str, Array]]:
        for head, theirs in HEADS.items():
            for part in self._parts[head]:
                path = part.path(head)
                if is_skipped(path, self._skip):
                    continue
                column = whole(batch.column(theirs))
                for name in part.names:
                    column = column.field(str(name))
                rows = self._rows(path, part, column)
                yield path, rows if head == "observation" else rows[:-1]

    def _rows(self, path: str, part: Part, column: Any) -> Array:
        if self._is_jpeg and part.is_image:
            return decoded(path, (image.as_py() for image in column), part.shape or (), "JPEG")
        if part.shape is None:
            raise DataError(
                f"field '{path}': {part.space['type']} can't be stored; leave it out with skip=['{path}']"
            )
        return rows_of(f"field '{path}'", column, part.shape)

    def _infos(self, path: str, column: Any) -> dict[str, Array]:
        column = whole(column)
        found: dict[str, Array] = {}
        for i, field in enumerate(column.type):
            name = f"{path}/{check_name(field.name, 'info')}"
            if is_skipped(name, self._skip):
                continue
            if library().types.is_struct(field.type):
                found |= self._infos(name, column.field(i))
            else:
                found[name] = self._info(name, field, column.field(i))
        return found

    def _info(self, name: str, field: Any, column: Any) -> Array:
        shape = (field.metadata or {}).get(b"shape")
        try:
            size = tuple(int(n) for n in shape.split(b",") if n) if shape is not None else _list_shape(column)
            return rows_of(f"field '{name}'", column, size)
        except (DataError, ValueError) as error:
            raise DataError(f"field '{name}': {error}; leave it out with skip=['{name}']") from error


def _info_names(path: str, kind: Any) -> Iterator[str]:
    """Groups and fields of a column of infos, by the names that they get."""
    for field in kind:
        yield f"{path}/{field.name}"
        if library().types.is_struct(field.type):
            yield from _info_names(f"{path}/{field.name}", field.type)


def _list_shape(column: Any) -> tuple[int, ...]:
    return (column.type.list_size,) if library().types.is_fixed_size_list(column.type) else ()
