"""A storage for TorchRL's replay buffers that keeps its rows in a store: durable, compressed, at any URL."""

from __future__ import annotations

import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, Unpack

import numpy as np
import torch
from tensordict import is_tensorclass
from torchrl.data import TensorDictMaxValueWriter, TensorStorage

from trajstore.arguments import check_positive, parse_bytes
from trajstore.compat.exit_flush import cancel_finish_at_exit, finish_at_exit
from trajstore.compat.private_store import free_private_store, private_url
from trajstore.compat.torchrl.checkpointer import TrajStorageCheckpointer
from trajstore.compat.torchrl.options import WriterOptionsDict
from trajstore.compat.torchrl.row_log import RowLog
from trajstore.compat.torchrl.row_structure import Leaves, RowStructure, from_leaves, stack_items
from trajstore.compat.torchrl.slot_indexing import (
    is_row_list,
    is_single,
    rows_of,
    slots_of,
    with_index,
    without_new_index,
)
from trajstore.compat.torchrl.slot_table import SlotTable
from trajstore.compat.torchrl.store_generations import StoreGenerations
from trajstore.errors import ClosedError, DataError
from trajstore.schema import Array
from trajstore.store.store import Store


class TrajStorage(TensorStorage):  # type: ignore[misc]
    """Rows of a TorchRL replay buffer, in memory as far as they fit a budget, and in a store at a URL.

    Use it in place of a `LazyTensorStorage`. Every write is appended to a log, which is compressed and committed in
    the background. A storage opened later at the same URL holds the rows of the last commit. If all fields fit into
    ``cache_bytes``, they are kept in memory by slot. Otherwise only narrow fields are; the others are read from the
    log through a cache of decoded chunks.

    Only one process may use a URL at a time. Call `close` at the end, or use the storage as a context manager;
    otherwise it is closed when the process ends.

    Args:
        url: A directory, or an fsspec URL of memory, S3, GCS or Azure. None: rows are kept compressed in RAM until
            `close`.
        max_size: Number of rows to keep, over all dimensions.
        ndim: Number of dimensions that are indexed; see `LazyTensorStorage`.
        device: Device of the rows in memory and of batches.
        cache_bytes: Bound of that memory.
        grace_s: Seconds that overwritten rows stay on storage, for other readers of the store.
        storage_options: Options for fsspec's filesystem; never stored.
        fsync: Whether commits to a local directory survive a power cut.
        options: Options of the writer: ``commit_steps``, ``commit_seconds``, ``buffer_bytes``.

    Attributes:
        table: The rows by slot; None while the storage has no fields.

    Raises:
        DataError: The store at the URL holds more slots, or is a store of episodes.
    """

    _default_checkpointer = TrajStorageCheckpointer
    shared_init = False

    def __init__(
        self,
        url: str | os.PathLike[str] | None = None,
        max_size: int = 1_000_000,
        *,
        ndim: int = 1,
        device: torch.device | str = "cpu",
        cache_bytes: int | str = "1GiB",
        grace_s: float = 10.0,
        storage_options: Mapping[str, Any] | None = None,
        fsync: bool = True,
        **options: Unpack[WriterOptionsDict],
    ) -> None:
        if isinstance(url, int):
            raise TypeError(f"url: expected a path, a URL or None, got {url}; give a size as max_size={url}")
        check_positive("max_size", max_size)
        super().__init__(None, max_size, device=device, ndim=ndim)
        root = private_url("torchrl") if url is None else url
        self._private_url = str(root) if url is None else None
        self._generations = StoreGenerations(root, storage_options, fsync)
        self._cache_bytes = parse_bytes(cache_bytes, "cache_bytes")
        self._grace_s, self._options = grace_s, options
        self._lock = threading.RLock()
        self.table: SlotTable | None = None
        self._class: Any = None  # the tensorclass of batches; None: they are TensorDicts
        self._finalizer: weakref.finalize[..., Any] | None = None
        self._is_closed = self._has_refused = False
        self._reopen()

    def _reopen(self) -> None:
        store = self._generations.open()
        structure = RowStructure.of_store(store.schema) if store is not None else None
        if store is None or structure is None:
            return
        table = self._make_table(store, structure)
        self._use(table)
        if table.log.oldest:
            self._replace_store(structure, table.copy_to)

    def _make_table(self, store: Store, structure: RowStructure) -> SlotTable:
        return SlotTable(
            store,
            structure,
            self._n_slots(structure),
            self._cache_bytes,
            self.device,
            grace_s=self._grace_s,
            options=self._options,
        )

    def _n_slots(self, structure: RowStructure) -> int:
        return -(-self.max_size // structure.lanes(self.ndim).numel())

    def _use(self, table: SlotTable) -> None:
        """Make the rows of a table those of the storage."""
        if self._finalizer is not None:
            self._finalizer.detach()
        self._finalizer = weakref.finalize(self, _finish, table.log, self._generations, self._private_url)
        self._finalizer.atexit = False
        finish_at_exit(self, TrajStorage.close)
        self.table, self._storage = table, from_leaves(table.leaves)
        self.max_size = table.n_slots * self._n_lanes
        self.__dict__.pop("_total_shape_value", None)
        self.initialized = True
        self._update_len()
        self._set_last_cursor(table.log.cursor if table.log.cursor >= 0 else None)

    def _update_len(self) -> None:
        """Set the length; rows after the first empty slot do not count until that slot is written."""
        assert self.table is not None
        self._len = self.table.log.slot_map.n_filled * self._n_lanes

    @property
    def _n_lanes(self) -> int:
        """Number of elements per slot."""
        return self.table.structure.lanes(self.ndim).numel() if self.table is not None else 1

    # ---- writing

    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
        """Write rows to slots, in the log and, for resident fields, in memory.

        With ``set_cursor=False``, rows may bring new keys, which are zero in all other rows; that copies the store
        once.

        Raises:
            DataError: A field is missing, is new, or has another dtype or shape than before; nothing was written.
        """
        with self._lock:
            self._check_open()
            self._generations.finish_advance()
            self._log_changes()
            try:
                data = stack_items(data) if isinstance(data, list) else data
                rows = rows_of(data, single=is_single(cursor))
                rows, slots, structure = self._checked(rows, cursor, in_turn=set_cursor)
            except DataError as error:
                if not set_cursor:
                    raise
                self._has_refused = True
                raise DataError(f"{error}; then call storage.resume(buffer), as its writer has moved on") from error
            table = self._table_with(structure)
            table.write(slots, rows, in_turn=set_cursor)
            self._class = type(data) if is_tensorclass(data) else None
            if set_cursor:
                self._set_last_cursor(cursor)
                self._update_len()
                self._warn_of_gap(slots)
        super()._bump_mutation_revision()

    def _warn_of_gap(self, slots: Array) -> None:
        assert self.table is not None
        n_filled = self.table.log.slot_map.n_filled
        if self._has_refused and len(slots) and slots.min() > n_filled:
            self._has_refused = False  # warn once
            warnings.warn(
                f"rows from slot {slots.min()} on do not count while slot {n_filled} is empty, because rows were"
                " refused; call storage.resume(buffer)",
                stacklevel=3,
            )

    def _checked(self, rows: Leaves, cursor: Any, *, in_turn: bool) -> tuple[Leaves, Array, RowStructure]:
        """Return the rows to write, their slots, and the structure that the table must have."""
        table, n_rows = self.table, len(next(iter(rows.values())))
        rows = rows if table is None else without_new_index(rows, table.structure)
        if table is not None and rows.keys() <= table.leaves.keys():
            structure = table.structure
        else:
            if in_turn and table is not None and table.log.slot_map.n_live:
                table.structure.check_known(rows)
            new = RowStructure.of(rows)
            structure = new if table is None else table.structure.with_fields(new)
        slots = slots_of(cursor, self._n_slots(structure), n_rows)
        rows = with_index(rows, slots, structure)
        if table is not None and not in_turn:  # existing rows keep the fields that are not given
            missing = [path for path in table.leaves if path not in rows]
            rows |= table.select(torch.from_numpy(slots), missing)
        structure.check(rows)
        return rows, slots, structure

    def _table_with(self, structure: RowStructure) -> SlotTable:
        """Return the table, after adding the fields that it lacks."""
        table = self.table
        if table is None:
            self._replace_store(structure, lambda new: None)
        elif len(structure.fields) > len(table.leaves):
            self._replace_store(structure, table.copy_to)
        assert self.table is not None
        return self.table

    def _replace_store(self, structure: RowStructure, fill: Callable[[SlotTable], None]) -> None:
        """Fill a new store, then use it instead of the current one; a crash before that keeps the current one."""
        new = self._make_table(self._generations.create_next(structure.schema), structure)
        try:
            fill(new)
            new.log.flush()
        except BaseException:
            new.log.discard()  # `create_next` removes the incomplete store
            raise
        old = self.table
        self._use(new)
        if old is not None:
            old.log.discard()  # the new store holds all its rows
        self._generations.advance()  # last: if it fails, the storage works, and the next call tries again

    def _empty(self) -> None:
        with self._lock:
            self._check_open()
            if self.table is not None:
                self.table.log.clear()
            self._set_last_cursor(None)
            super()._empty()

    # ---- changes in place

    def _bump_mutation_revision(self) -> None:
        """Log changes in place; TorchRL calls this after it changed rows in memory."""
        with self._lock:
            self._log_changes()
        super()._bump_mutation_revision()

    def _log_changes(self) -> None:
        if self.table is not None:
            self.table.log_changes()

    def _apply_conditional_patch(self, index: torch.Tensor, patch: Mapping[Any, torch.Tensor]) -> None:
        coordinates = tuple(index.unbind(-1)) if index.ndim > 1 else (index,)
        with self._lock:
            assert self.table is not None  # TorchRL checked the patch against it
            self._log_changes()
            self.table.patch(coordinates, {self.table.structure.path(key): value for key, value in patch.items()})
        super()._bump_mutation_revision()

    # ---- reading

    def get(self, index: Any) -> Any:
        """Return rows at an index, or all values of a key; paged fields are read when they are used or indexed."""
        table = self.table
        if table is not None and self.ndim == 1 and is_row_list(index, len(self)):
            data = from_leaves(table.select(index))  # several times as fast as indexing if rows are wide
        else:
            data = super().get(index)
        return data if self._class is None else self._class.from_tensordict(data)

    def flatten(self) -> TensorStorage:
        """Return a storage of one dimension; if this one has several, with a copy of the rows in memory."""
        return self if self.ndim == 1 else super().flatten()

    # ---- continuing and closing

    @property
    def next_slot(self) -> int:
        """The slot after the last one that a writer wrote in its turn."""
        cursor = self._last_cursor_index
        return 0 if cursor is None or self.table is None else (cursor + 1) % self.table.n_slots

    def resume(self, buffer: Any) -> None:
        """Set a buffer's writer to continue after the last row, or at an empty slot before it."""
        writer, self._has_refused = buffer.writer, False
        if not isinstance(writer, TensorDictMaxValueWriter):
            n_filled = self.table.log.slot_map.n_filled if self.table is not None else 0
            writer._cursor = min(self.next_slot, n_filled)
            return
        writer._empty()
        for i in range(len(self)):
            writer.get_insert_index(self.get(i))  # the writer records the value of each row, in order of the slots

    def flush(self) -> None:
        """Make all rows durable."""
        with self._lock:
            self._check_open()
            self._generations.finish_advance()
            self._log_changes()
            if self.table is not None:
                self.table.log.flush()

    def close(self) -> None:
        """Make all rows durable and release everything; rows without a URL are lost. A second call does nothing."""
        with self._lock:
            if self.table is not None and not self._is_closed:
                self._log_changes()
                _finish(self.table.log, self._generations, self._private_url)
            self._is_closed = True
            cancel_finish_at_exit(self)

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError("the storage is closed; open a new one at its URL")

    def stats(self) -> dict[str, Any]:
        """Return figures of the log: rows in it, rows that slots hold, commits, deletions."""
        return self.table.log.stats() if self.table is not None else {}

    def state_dict(self) -> dict[str, Any]:
        """Return copies of all rows in memory; `dumps` writes them to a store instead."""
        n = len(self) // self._n_lanes
        leaves = self.table.rows(np.arange(n)) if self.table is not None and n else {}
        n_slots = self.table.n_slots if self.table is not None else 0
        return {"_storage": leaves, "_len": len(self), "_cursor": self._last_cursor_index, "_n_slots": n_slots}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Replace all rows by those of a state.

        Raises:
            DataError: The state has too many rows, or fills a ring of another size; nothing was changed.
        """
        leaves = state_dict["_storage"]
        n = len(next(iter(leaves.values()), ()))
        parts = [(np.arange(n), leaves)] if n else []
        self.load_rows(RowStructure.of(leaves), parts, n, state_dict["_cursor"], state_dict["_n_slots"])

    def load_rows(
        self,
        structure: RowStructure,
        parts: Iterable[tuple[Array, Leaves]],
        n_rows: int,
        cursor: int | None,
        n_slots: int,
    ) -> None:
        """Replace all rows.

        Args:
            structure: The fields of the rows.
            parts: Slots and rows, block by block.
            n_rows: Number of slots up to the last one that holds a row.
            cursor: The slot that a writer wrote last in its turn.
            n_slots: Number of slots of the storage that the rows come from.

        Raises:
            DataError: There are too many rows, or they fill a ring of another size; nothing was changed.
        """
        with self._lock:
            self._check_open()
            if not n_rows:
                self._empty()
                return
            self._check_size(n_rows, n_slots, structure)

            def fill(table: SlotTable) -> None:
                table.log.cursor = -1 if cursor is None else cursor
                for slots, rows in parts:
                    table.write(slots, rows)

            self._replace_store(structure, fill)
        super()._bump_mutation_revision()

    def _check_size(self, n_rows: int, n_slots: int, structure: RowStructure) -> None:
        n_lanes = structure.lanes(self.ndim).numel()
        if n_rows * n_lanes > self.max_size:
            raise DataError(
                f"max_size: expected at least the {n_rows * n_lanes} rows that are loaded, got {self.max_size}"
            )
        # TorchRL takes the rows of a ring with room to be in order of time; those of a full ring are not. And the
        # writer's cursor and the samplers' priorities, which are loaded next, go by slots.
        size = self._n_slots(structure)
        if n_slots != size and n_rows in (n_slots, size):
            raise DataError(
                f"max_size: expected {n_slots * n_lanes}, the size that the rows come from, because they fill a"
                f" ring, got {self.max_size}; to enlarge a storage, close it and open it with a larger max_size"
            )

    def __enter__(self) -> TrajStorage:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "a TrajStorage belongs to its process and cannot be pickled; let collectors send their data to that"
            " process"
        )


def _finish(log: RowLog, generations: StoreGenerations, private_url: str | None) -> None:
    if private_url is None:
        log.close()
        generations.finish_advance()
        return
    log.discard()
    free_private_store(private_url)
