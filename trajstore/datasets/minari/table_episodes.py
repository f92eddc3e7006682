"""Read the Arrow or Parquet files of a Minari dataset: one directory per episode."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trajstore.datasets.arrow_tables import as_single_array, column_rows, import_pyarrow
from trajstore.datasets.images import decode_images
from trajstore.datasets.json_files import load_json_object
from trajstore.datasets.minari.raw_episodes import ENDS, HEADS, RawEpisode
from trajstore.datasets.minari.spaces import SpaceLeaf
from trajstore.datasets.skip_names import is_skipped
from trajstore.errors import DataError, FormatError
from trajstore.schema import Array, check_name, flatten

_EPISODE = re.compile(r"(0|[1-9][0-9]{0,17})\Z")


class TableEpisodes:
    """Implements `MinariEpisodes`. Columns have T + 1 rows; the last one only counts for observations and infos."""

    def __init__(
        self,
        place: Path,
        kind: str,
        leaves: Mapping[str, Sequence[SpaceLeaf]],
        is_jpeg: bool,
        skip: Collection[str],
    ) -> None:
        self._place = place
        self._kind = kind
        self._leaves = leaves
        self._is_jpeg = is_jpeg
        self._skip = skip

    def keys(self) -> Sequence[str]:
        return sorted((p.name for p in self._place.iterdir() if _EPISODE.match(p.name)), key=int)

    def names(self, key: str) -> Iterator[str]:
        yield from (leaf.path(head) for head in HEADS for leaf in self._leaves[head])
        yield "reward"
        schema = self._open_files(self._place / key).schema
        if "infos" in schema.names:
            yield from _info_names("info", schema.field("infos").type)

    def read(self, key: str) -> RawEpisode:
        batch = self._read_table(self._place / key)
        fields = dict(self._fields(batch))
        if "infos" in batch.schema.names and not is_skipped("info", self._skip):
            fields |= self._infos("info", batch.column("infos"))
        if not is_skipped("reward", self._skip):
            fields["reward"] = column_rows("rewards", batch.column("rewards"), ())[:-1]
        ends = {
            in_store: column_rows(in_dataset, batch.column(in_dataset), ())[:-1]
            for in_dataset, in_store in ENDS.items()
        }
        about = load_json_object(self._place / key / "metadata.json")
        options = about.pop("options", None) or {}  # flattened as in Minari's HDF5 files
        return RawEpisode(fields, ends, {**about, **flatten({"options": options})})

    def close(self) -> None:
        """Do nothing: no file is kept open."""

    def _read_table(self, directory: Path) -> Any:
        """Read the rows of an episode."""
        try:
            return self._open_files(directory).to_table().combine_chunks()
        except (import_pyarrow().ArrowInvalid, OSError) as error:
            raise FormatError(f"{directory} can't be read as {self._kind}: {error}") from error

    def _open_files(self, directory: Path) -> Any:
        """Open the files of an episode; no rows are read."""
        files = sorted(str(p) for p in directory.iterdir() if p.suffix == f".{self._kind}" and p.is_file())
        if not files:
            raise FormatError(f"{directory}: expected a file of format {self._kind}, got none")
        try:
            return import_pyarrow("pyarrow.dataset").dataset(files, format=self._kind)
        except (import_pyarrow().ArrowInvalid, OSError) as error:
            raise FormatError(f"{directory} can't be read as {self._kind}: {error}") from error

    def _fields(self, batch: Any) -> Iterator[tuple[str, Array]]:
        for head, in_dataset in HEADS.items():
            for leaf in self._leaves[head]:
                path = leaf.path(head)
                if is_skipped(path, self._skip):
                    continue
                column = as_single_array(batch.column(in_dataset))
                for name in leaf.names:
                    column = column.field(str(name))
                rows = self._rows(path, leaf, column)
                yield path, rows if head == "observation" else rows[:-1]

    def _rows(self, path: str, leaf: SpaceLeaf, column: Any) -> Array:
        if self._is_jpeg and leaf.is_image:
            return decode_images(path, (image.as_py() for image in column), leaf.shape or (), "JPEG")
        if leaf.shape is None:
            raise DataError(
                f"field '{path}': {leaf.space['type']} can't be stored; leave it out with skip=['{path}']"
            )
        return column_rows(f"field '{path}'", column, leaf.shape)

    def _infos(self, path: str, column: Any) -> dict[str, Array]:
        column = as_single_array(column)
        found: dict[str, Array] = {}
        for i, field in enumerate(column.type):
            name = f"{path}/{check_name(field.name, 'info')}"
            if is_skipped(name, self._skip):
                continue
            if import_pyarrow().types.is_struct(field.type):
                found |= self._infos(name, column.field(i))
            else:
                found[name] = self._info(name, field, column.field(i))
        return found

    def _info(self, name: str, field: Any, column: Any) -> Array:
        shape = (field.metadata or {}).get(b"shape")
        try:
            size = tuple(int(n) for n in shape.split(b",") if n) if shape is not None else _list_shape(column)
            return column_rows(f"field '{name}'", column, size)
        except (DataError, ValueError) as error:
            raise DataError(f"field '{name}': {error}; leave it out with skip=['{name}']") from error


def _info_names(path: str, kind: Any) -> Iterator[str]:
    """Yield the groups and fields of a column of infos, by their paths in the store."""
    for field in kind:
        yield f"{path}/{field.name}"
        if import_pyarrow().types.is_struct(field.type):
            yield from _info_names(f"{path}/{field.name}", field.type)


def _list_shape(column: Any) -> tuple[int, ...]:
    return (column.type.list_size,) if import_pyarrow().types.is_fixed_size_list(column.type) else ()
