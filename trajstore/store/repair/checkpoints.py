"""Keeps the checkpoints of which everything is intact."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from trajstore.errors import CorruptionError, FormatError
from trajstore.format.array_layout import ArrayLayout
from trajstore.format.checkpoint_record import Checkpoint, parse_checkpoint
from trajstore.format.ids import is_stream_id
from trajstore.format.zarr_json import GROUP, check_checksum, to_json_bytes
from trajstore.storage import Storage
from trajstore.store.checkpoints import parts_of, place_of
from trajstore.store.repair.objects import StoredArray, salvage
from trajstore.store.repair.report import Damage, RepairReport
from trajstore.store.repair.streams import RepairedStream


class CheckpointRepair:
    """The checkpoints of a damaged store.

    Attributes:
        found: The complete ones whose records are intact.
    """

    def __init__(self, source: Storage, target: Storage, report: RepairReport, tell: Callable[[int], None]) -> None:
        self._source, self._target, self._report, self._tell = source, target, report, tell
        names = [name for name in source.list_names("checkpoints") if is_stream_id(name)]
        read = zip(names, source.map(self._read, names), strict=True)
        self.found: list[Checkpoint] = []
        for name, checkpoint in read:
            if isinstance(checkpoint, str):
                report.damages.append(Damage(f"checkpoint '{name}'", checkpoint))
                report.lost_checkpoints[name] = checkpoint
            elif checkpoint is not None and checkpoint.is_complete:
                self.found.append(checkpoint)

    def _read(self, name: str) -> Checkpoint | str | None:
        """A checkpoint, or its fault; None if nothing but a removal was interrupted."""
        try:
            return parse_checkpoint(self._source.get(f"checkpoints/{name}/zarr.json"), name, "")[0]
        except FileNotFoundError:
            return "its record is missing"
        except FormatError as error:
            return str(error).removeprefix(f"/checkpoints/{name}").lstrip(": ")

    def run(self, streams: Mapping[str, RepairedStream]) -> list[Checkpoint]:
        """Put the checkpoints that are intact; returns them."""
        kept = []
        for checkpoint in self.found:
            fault = self._fault(checkpoint, streams) or self._copy(checkpoint)
            if fault is None:
                kept.append(checkpoint)
            else:
                self._report.lost_checkpoints[checkpoint.id] = fault
                self._target.remove_tree(place_of(checkpoint.id))
        return kept

    def _fault(self, checkpoint: Checkpoint, streams: Mapping[str, RepairedStream]) -> str | None:
        for stream, extent in checkpoint.streams.items():
            if stream not in streams:
                return f"stream '{stream}' is lost"
            if fault := streams[stream].fault_for(extent):
                return f"stream '{stream}': {fault}"
        return None

    def _copy(self, checkpoint: Checkpoint) -> str | None:
        """Put the objects of a checkpoint, the record last; returns what is wrong with them."""
        try:
            for rank in parts_of(checkpoint):
                self._copy_part(checkpoint, rank)
            if checkpoint.n_ranks is not None:
                self._target.put(f"{place_of(checkpoint.id)}/ranks/zarr.json", to_json_bytes(GROUP))
                key = f"{place_of(checkpoint.id)}/zarr.json"
                self._target.put(key, self._source.get(key))
        except (FileNotFoundError, FormatError, CorruptionError) as error:
            what = "the part of a rank is missing" if isinstance(error, FileNotFoundError) else str(error)
            self._report.damages.append(Damage(f"checkpoint '{checkpoint.id}'", what))
            return what
        return None

    def _copy_part(self, checkpoint: Checkpoint, rank: int | None) -> None:
        place = place_of(checkpoint.id, rank)
        data = self._source.get(f"{place}/zarr.json")
        check_checksum(data, "its record")
        nodes = parse_checkpoint(data, checkpoint.id, self._source.display)[2]
        for path, node in nodes.items():
            if node != GROUP:
                self._copy_array(f"{place}/{path}", path, node)
            self._target.put(f"{place}/{path}/zarr.json", to_json_bytes(node))
        self._target.put(f"{place}/zarr.json", data)

    def _copy_array(self, prefix: str, path: str, node: Any) -> None:
        layout, n_rows = ArrayLayout.from_metadata(node, path)
        array = StoredArray(prefix, layout, n_rows)
        damage = salvage(self._source, array, self._target, prefix, report=self._tell)
        if damage:
            start, stop, what = damage.ranges()[0]
            raise CorruptionError(f"array '{path}' of its state, rows {start} to {stop}: {what}")
