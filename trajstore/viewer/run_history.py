"""Sessions and checkpoints as the rows of a graph, in order of time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trajstore.format.checkpoint_record import Checkpoint
from trajstore.format.commit_record import CommitRecord
from trajstore.store.snapshot import Snapshot

MAX_NODES = 400  # rows of the graph; the oldest are left out


@dataclass(frozen=True, slots=True)
class _World:
    """The streams of sessions that write together."""

    id: str | None
    records: tuple[CommitRecord, ...]

    @property
    def created_at(self) -> float:
        return min(record.created_at for record in self.records)

    @property
    def checkpoint(self) -> str | None:
        return next((record.checkpoint for record in self.records if record.checkpoint), None)


def history(snapshot: Snapshot, checkpoints: Sequence[Checkpoint]) -> dict[str, Any]:
    """Rows of the graph, oldest first: a session where it began, a checkpoint where it was taken.

    ``world`` numbers the sets of sessions that write together. ``parent`` is the position of the row that a row
    descends from, or None. ``lane`` is the column to draw it in: a set of sessions has one, from the row that it
    descends from to its last row, and others may have it before and after. Writers that belong to no set of
    sessions share a row.
    """
    worlds = _worlds(snapshot.streams)
    numbers = _numbers(worlds, checkpoints)
    dated = [(world.created_at, 0, _session(world, snapshot, numbers)) for world in worlds]
    dated += [(c.created_at, 1, _checkpoint(c, numbers)) for c in checkpoints]
    nodes = [node for _, _, node in sorted(dated, key=lambda item: item[:2])]
    n_left_out = max(0, len(nodes) - MAX_NODES)
    nodes = nodes[n_left_out:]
    _link(nodes)
    return {"nodes": nodes, "n_lanes": _place(nodes), "n_left_out": n_left_out}


def _worlds(records: Iterable[CommitRecord]) -> list[_World]:
    by_id: dict[str | None, list[CommitRecord]] = {}
    for record in records:
        by_id.setdefault(record.world, []).append(record)
    return sorted((_World(id_, tuple(found)) for id_, found in by_id.items()), key=lambda world: world.created_at)


def _numbers(worlds: Sequence[_World], checkpoints: Sequence[Checkpoint]) -> dict[str | None, int]:
    """A number for each set of sessions; also for those of which only checkpoints are left."""
    ids = dict.fromkeys([*(world.id for world in worlds), *(c.world for c in checkpoints)])
    return {id_: number for number, id_ in enumerate(ids)}


def _session(world: _World, snapshot: Snapshot, numbers: Mapping[str | None, int]) -> dict[str, Any]:
    records = world.records
    kept = sum(snapshot.lineage.n_rows(record) for record in records)
    return {
        "kind": "session" if world.id is not None else "writers",
        "id": world.id or "",
        "world": numbers[world.id],
        "time": world.created_at,
        "committed_at": max(record.committed_at for record in records),
        "streams": len(records),
        "rows": sum(record.rows for record in records),
        "abandoned_rows": sum(record.rows for record in records) - kept,
        "is_open": any(not record.is_sealed for record in records),
        "from": world.checkpoint,
    }


def _checkpoint(checkpoint: Checkpoint, numbers: Mapping[str | None, int]) -> dict[str, Any]:
    extents = checkpoint.streams.values()
    return {
        "kind": "checkpoint",
        "id": checkpoint.id,
        "name": checkpoint.name,
        "world": numbers[checkpoint.world],
        "time": checkpoint.created_at,
        "streams": len(extents),
        "rows": sum(extent.stop - extent.first for extent in extents),
        "ranks": checkpoint.n_ranks or 1,
        "from": checkpoint.parent,
    }


def _link(nodes: Sequence[dict[str, Any]]) -> None:
    """Set ``parent`` of each row: the last row of its set of sessions, else the checkpoint that it names."""
    by_id = {node["id"]: i for i, node in enumerate(nodes) if node["kind"] == "checkpoint"}
    last: dict[int, int] = {}
    for i, node in enumerate(nodes):
        named = by_id.get(node["from"])
        node["parent"] = last.get(node["world"], named)
        last[node["world"]] = i


def _place(nodes: Sequence[dict[str, Any]]) -> int:
    """Set ``lane`` of each row to the first one that is free; returns how many there are."""
    last = {node["world"]: i for i, node in enumerate(nodes)}
    lanes: dict[int, int] = {}
    taken_until: list[int] = []  # by lane, the last row that has it
    for i, node in enumerate(nodes):
        world = node["world"]
        if world not in lanes:
            first = i if node["parent"] is None else node["parent"]
            free = (lane for lane, until in enumerate(taken_until) if until < first)
            lanes[world] = next(free, len(taken_until))
            taken_until[lanes[world] : lanes[world] + 1] = [last[world]]
        node["lane"] = lanes[world]
    return len(taken_until)
