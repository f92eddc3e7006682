"""A storage for TorchRL's replay buffers that keeps its rows in a store: durable, compressed, at any URL."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, Unpack

import numpy as np
import torch
from tensordict import is_tensorclass
from torchrl.data import TensorDictMaxValueWriter, TensorStorage

from trajstore.arguments import check_positive, parse_bytes
from trajstore.compat.private_store import private_url
from trajstore.compat.torchrl.checkpointer import TrajStorageCheckpointer
from trajstore.compat.torchrl.element_writing import rows_with_elements
from trajstore.compat.torchrl.foreign_dumps import dump_with, load_with
from trajstore.compat.torchrl.non_tensor import restore
from trajstore.compat.torchrl.open_table import OpenTable
from trajstore.compat.torchrl.options import WriterOptionsDict, check_writer_options
from trajstore.compat.torchrl.row_structure import Leaves, RowStructure, from_leaves, stack_items
from trajstore.compat.torchrl.shared_storage import attach, shared_counters
from trajstore.compat.torchrl.slot_indexing import (
    check_size,
    is_row_list,
    is_single,
    rows_of,
    slots_of,
    warn_of_gap,
    with_index,
    without_new_index,
)
from trajstore.compat.torchrl.slot_table import SlotTable
from trajstore.compat.torchrl.storage_server import StorageServer
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

    Only one process may open a URL at a time. Pickled, a storage stands for itself: in another process it is a
    `SharedTrajStorage`, whose calls the process that opened the URL carries out. Call `close` at the end, or use
    the storage as a context manager; otherwise it is closed when the process ends.

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
        table_version: How often the table was replaced.
        data_class: The tensorclass of batches; None: they are TensorDicts.

    Raises:
        DataError: The store at the URL holds more slots, or is a store of episodes.
    """

    _default_checkpointer = TrajStorageCheckpointer
    shared_init = True  # collectors need not write a row first

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
        check_writer_options(TrajStorage, options)
        super().__init__(None, max_size, device=device, ndim=ndim)
        root = private_url("torchrl") if url is None else url
        self._private_url = str(root) if url is None else None
        self._generations = StoreGenerations(root, storage_options, fsync)
        self._cache_bytes = parse_bytes(cache_bytes, "cache_bytes")
        self._grace_s, self._options = grace_s, options
        self._open = OpenTable(self._generations, self._private_url)
        self._lock = self._open.lock
        self.table: SlotTable | None = None
        self.data_class: Any = None
        self._has_refused = False
        self._pid, self.table_version = os.getpid(), 0
        self._server: StorageServer | None = None
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
        self._open.use(table, self)
        self.table, self._storage = table, from_leaves(table.leaves)
        self.max_size = table.n_slots * self._n_lanes
        # TorchRL would set the length when it computes this, while another thread may be writing.
        self.__dict__["_total_shape_value"] = torch.Size([table.n_slots, *table.structure.lanes(self.ndim)])
        self.initialized = True
        self.table_version += 1
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

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
        """Write rows to slots, in the log and, for resident fields, in memory.

        With ``set_cursor=False``, rows may bring new keys, which are zero in all other rows; that copies the store
        once.

        Raises:
            DataError: A field is missing, is new, or has another dtype or shape than before; nothing was written.
        """
        self.check_usable()
        with self._lock:
            self.check_usable()
            self._generations.finish_advance()
            self._log_changes()
            try:
                data = stack_items(data) if isinstance(data, list) else data
                if self.table is not None and isinstance(cursor, tuple) and len(cursor) > 1 and not set_cursor:
                    rows, cursor = rows_with_elements(self.table, cursor, data, self.ndim)
                else:
                    rows = rows_of(data, single=is_single(cursor))
                rows, slots, structure = self._checked(rows, cursor, in_turn=set_cursor)
            except DataError as error:
                if not set_cursor:
                    raise
                self._has_refused = True
                raise DataError(f"{error}; then call storage.resume(buffer), as its writer has moved on") from error
            table = self._table_with(structure)
            table.write(slots, rows, in_turn=set_cursor)
            self.data_class = type(data) if is_tensorclass(data) else None
            if set_cursor:
                self._set_last_cursor(cursor)
                self._update_len()
                if self._has_refused and len(slots) and slots.min() > (n_filled := table.log.slot_map.n_filled):
                    self._has_refused = False  # warn once
                    warn_of_gap(slots, n_filled)
        super()._bump_mutation_revision()

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
        structure, rows = structure.fitted(rows)
        structure.check(rows)
        return rows, slots, structure

    def _table_with(self, structure: RowStructure) -> SlotTable:
        """Return the table, after adding the fields that it lacks and widening text."""
        table = self.table
        if table is None:
            self._replace_store(structure, lambda new: None)
        elif structure is not table.structure:
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
            self.check_usable()
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
        assert self.table is not None  # TorchRL checked the patch against it
        self.patch(coordinates, {self.table.structure.path(key): value for key, value in patch.items()})

    def patch(self, index: tuple[torch.Tensor, ...], values: Leaves) -> None:
        """Change elements of some fields."""
        with self._lock:
            self.check_usable()
            assert self.table is not None
            self._log_changes()
            self.table.patch(index, values)
        super()._bump_mutation_revision()

    # ---- reading

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def get(self, index: Any) -> Any:
        """Return rows at an index, or all values of a key; paged fields are read when they are used or indexed."""
        self._check_process()
        table = self.table
        if table is not None and self.ndim == 1 and is_row_list(index, len(self)):
            data = from_leaves(table.select(index))  # several times as fast as indexing if rows are wide
        else:
            data = super().get(index)
        if table is not None and table.structure.marked:
            data = restore(data, table.structure.marked)
        return self.as_data_class(data)

    def as_data_class(self, data: Any) -> Any:
        """Return a TensorDict as the tensorclass that was written last, if one was."""
        return data if self.data_class is None else self.data_class.from_tensordict(data)

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
        writer = buffer.writer
        if not isinstance(writer, TensorDictMaxValueWriter):
            writer._cursor = self.resume_slot()
            return
        self._has_refused = False
        writer._empty()
        for i in range(len(self)):
            writer.get_insert_index(self.get(i))  # the writer records the value of each row, in order of the slots

    def resume_slot(self) -> int:
        """Return the slot where a writer has to continue."""
        self._has_refused = False
        n_filled = self.table.log.slot_map.n_filled if self.table is not None else 0
        return min(self.next_slot, n_filled)

    def flush(self) -> None:
        """Make all rows durable."""
        with self._lock:
            self.check_usable()
            self._open.flush()

    def close(self) -> None:
        """Make all rows durable and release everything; rows without a URL are lost. A second call does nothing."""
        self._open.close()
        if self._server is not None:
            self._server.close()

    def check_usable(self) -> None:
        """Check that the storage is open, and belongs to this process.

        Raises:
            ClosedError: It is closed, or this process was forked from the one that opened it.
        """
        self._check_process()
        if self._open.is_closed:
            raise ClosedError("the storage is closed; open a new one at its URL")

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            raise ClosedError(
                f"the storage was opened by process {self._pid}, from which this one was forked; start processes"
                " with the method 'spawn', as TorchRL does, and give them the buffer as an argument"
            )

    def stats(self) -> dict[str, Any]:
        """Return figures of the log: rows in it, rows that slots hold, commits, deletions."""
        return self.table.log.stats() if self.table is not None else {}

    def dumps(self, path: str | os.PathLike[str]) -> None:
        """Write all rows to a dump, with the storage's checkpointer."""
        is_own = isinstance(self.checkpointer, TrajStorageCheckpointer)
        self.checkpointer.dumps(self, path) if is_own else dump_with(self.checkpointer, self, path)

    def loads(self, path: str | os.PathLike[str]) -> None:
        """Replace all rows by those of a dump, with the storage's checkpointer."""
        is_own = isinstance(self.checkpointer, TrajStorageCheckpointer)
        self.checkpointer.loads(self, path) if is_own else load_with(self.checkpointer, self, path)

    def state_dict(self) -> dict[str, Any]:
        """Return copies of all rows in memory; `dumps` writes them to a store instead."""
        n = len(self) // self._n_lanes
        leaves = self.table.rows(np.arange(n)) if self.table is not None and n else {}
        n_slots = self.table.n_slots if self.table is not None else 0
        return {"_storage": leaves, "_len": len(self), "_cursor": self._last_cursor_index, "_n_slots": n_slots}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Replace all rows by those of a state.

        Raises:
            DataError: The state has too many rows, or fills a ring of another size, or is that of another kind of
                storage; nothing was changed.
        """
        if "_cursor" not in state_dict:
            raise DataError(
                "state_dict: expected that of a TrajStorage, got that of another storage; load it into such a"
                " storage, and extend this one with its rows: buffer.extend(other[:])"
            )
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
            self.check_usable()
            if not n_rows:
                self._empty()
                return
            check_size(n_rows, n_slots, self._n_slots(structure), structure.lanes(self.ndim).numel())

            def fill(table: SlotTable) -> None:
                table.log.cursor = -1 if cursor is None else cursor
                for slots, rows in parts:
                    table.write(slots, rows)

            self._replace_store(structure, fill)
        super()._bump_mutation_revision()

    def __enter__(self) -> TrajStorage:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- other processes

    @property
    def counters(self) -> list[int]:
        """Length, revision and cursor, which other processes cannot see if memory is not shared with them."""
        cursor = self._last_cursor_index
        return [self._len, self._mutation_revision, -1 if cursor is None else cursor]

    def __reduce__(self) -> Any:
        """Pickle where to find this storage: another process uses it through this one."""
        self.check_usable()
        with self._lock:
            self._server = self._server or StorageServer(self)
        options = {name: getattr(self, name) for name in ("max_size", "ndim", "device", "data_class")}
        return attach, (self._server.address, options, shared_counters(self)), list(self._attached_entities)

    def __setstate__(self, attached: list[Any]) -> None:
        for buffer in attached:
            self.attach(buffer)

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("a TrajStorage cannot be copied; open another one, and load a dump of this one")
