"""A storage for TorchRL's replay buffers whose rows live in a store: durable, compressed, at any URL."""

from __future__ import annotations

import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any

import numpy as np
import torch
from tensordict import is_tensorclass
from torchrl.data import TensorDictMaxValueWriter, TensorStorage

from trajstore.arguments import check_positive, parse_bytes
from trajstore.compat.exit_flush import cancel_finish_at_exit, finish_at_exit
from trajstore.compat.private_store import free_private_store, private_url
from trajstore.compat.torchrl.checkpointer import TrajStorageCheckpointer
from trajstore.compat.torchrl.generations import Generations
from trajstore.compat.torchrl.indexing import is_one, is_plain, rows_of, slots_of, with_index, without_new_index
from trajstore.compat.torchrl.layout import Layout, Leaves, from_leaves, stacked
from trajstore.compat.torchrl.log import Log
from trajstore.compat.torchrl.table import Table
from trajstore.errors import ClosedError, DataError
from trajstore.schema import Array
from trajstore.store.store import Store


class TrajStorage(TensorStorage):  # type: ignore[misc]
    """Rows of a replay buffer of TorchRL, in memory as far as they fit a budget, and in a store at a URL.

    It goes wherever a `LazyTensorStorage` goes. Every write is appended to a log, which is compressed and committed
    in the background; a storage that is opened at the same URL later finds the rows of the last commit. All fields
    are kept in memory by slot if they fit ``cache_bytes``; else the narrow ones are, and others are read by pages.

    One process uses a URL at a time. `close` it at the end, or use it as a context manager; otherwise it is closed
    when the process ends.

    Args:
        url: A directory, or an fsspec URL of memory, S3, GCS or Azure; None: compressed in RAM, until it is closed.
        max_size: Rows to keep, all dimensions together.
        ndim: Dimensions that are indexed; see `LazyTensorStorage`.
        device: Where rows are kept in memory and given out.
        cache_bytes: Bound of that memory.
        grace_s: How long rows that were overwritten stay on storage, for others who read the store.
        storage_options: Options for fsspec's filesystem; never stored.
        fsync: Whether commits to a local directory survive a power cut.
        options: Of the writer: ``commit_steps``, ``commit_seconds``, ``buffer_bytes``.

    Raises:
        DataError: The store at the URL holds more slots, or is one of episodes.
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
        **options: Any,
    ) -> None:
        if isinstance(url, int):
            raise TypeError(f"url: expected a path, a URL or None, got {url}; a size is given as max_size={url}")
        check_positive("max_size", max_size)
        super().__init__(None, max_size, device=device, ndim=ndim)
        place = private_url("torchrl") if url is None else url
        self._private_url = str(place) if url is None else None
        self._generations = Generations(place, storage_options, fsync)
        self._cache_bytes = parse_bytes(cache_bytes, "cache_bytes")
        self._grace_s, self._options = grace_s, options
        self._lock = threading.RLock()
        self.table: Table | None = None
        self._class: Any = None  # of what is given out, where it is no TensorDict
        self._finalizer: weakref.finalize[..., Any] | None = None
        self._is_closed = self._has_refused = False
        self._reopen()

    def _reopen(self) -> None:
        store = self._generations.open()
        layout = Layout.of_store(store.schema) if store is not None else None
        if store is None or layout is None:
            return
        table = self._make_table(store, layout)
        self._show(table)
        if table.log.oldest:
            self._renew(layout, table.copy_to)

    def _make_table(self, store: Store, layout: Layout) -> Table:
        return Table(
            store,
            layout,
            self._n_slots(layout),
            self._cache_bytes,
            self.device,
            grace_s=self._grace_s,
            options=self._options,
        )

    def _n_slots(self, layout: Layout) -> int:
        return -(-self.max_size // layout.lanes(self.ndim).numel())

    def _show(self, table: Table) -> None:
        """From now on, rows are those of this table."""
        if self._finalizer is not None:
            self._finalizer.detach()
        self._finalizer = weakref.finalize(self, _finish, table.log, self._generations, self._private_url)
        self._finalizer.atexit = False
        finish_at_exit(self, TrajStorage.close)
        self.table, self._storage = table, from_leaves(table.leaves)
        self.max_size = table.n_slots * self._n_lanes
        self.__dict__.pop("_total_shape_value", None)
        self.initialized = True
        self._count()
        self._set_last_cursor(table.log.cursor if table.log.cursor >= 0 else None)

    def _count(self) -> None:
        """Rows past the first slot that holds nothing do not count until it is written."""
        assert self.table is not None
        self._len = self.table.log.slots.n_filled * self._n_lanes

    @property
    def _n_lanes(self) -> int:
        """Elements in a slot."""
        return self.table.layout.lanes(self.ndim).numel() if self.table is not None else 1

    # ---- writing

    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
        """Write rows at slots: to the log, and to memory where they are kept there.

        What is written over (``set_cursor=False``) may bring new keys, with zeros in other rows; that copies the
        store once.

        Raises:
            DataError: Fields are missing, new, or of another dtype or shape than before; nothing was written.
        """
        with self._lock:
            self._check_open()
            self._generations.settle()
            self._log_changes()
            try:
                data = stacked(data) if isinstance(data, list) else data
                rows = rows_of(data, is_one=is_one(cursor))
                rows, slots, layout = self._checked(rows, cursor, in_turn=set_cursor)
            except DataError as error:
                if not set_cursor:
                    raise
                self._has_refused = True
                raise DataError(f"{error}; then call storage.resume(buffer), as its writer has moved on") from error
            table = self._table_of(layout)
            table.write(slots, rows, in_turn=set_cursor)
            self._class = type(data) if is_tensorclass(data) else None
            if set_cursor:
                self._set_last_cursor(cursor)
                self._count()
                self._warn_of_hole(slots)
        super()._bump_mutation_revision()

    def _warn_of_hole(self, slots: Array) -> None:
        assert self.table is not None
        n_filled = self.table.log.slots.n_filled
        if self._has_refused and len(slots) and slots.min() > n_filled:
            self._has_refused = False  # once is enough
            warnings.warn(
                f"rows from slot {slots.min()} on do not count while slot {n_filled} holds none, since rows were"
                " refused; call storage.resume(buffer)",
                stacklevel=3,
            )

    def _checked(self, rows: Leaves, cursor: Any, *, in_turn: bool) -> tuple[Leaves, Array, Layout]:
        """Rows as they are written, where, and the layout that there must be then."""
        table, n_rows = self.table, len(next(iter(rows.values())))
        rows = rows if table is None else without_new_index(rows, table.layout)
        if table is not None and rows.keys() <= table.leaves.keys():
            layout = table.layout
        else:
            if in_turn and table is not None and table.log.slots.n_live:
                table.layout.check_known(rows)
            layout = Layout.of(rows) if table is None else table.layout.with_fields(Layout.of(rows))
        slots = slots_of(cursor, self._n_slots(layout), n_rows)
        rows = with_index(rows, slots, layout)
        if table is not None and not in_turn:  # what is written over keeps the fields that it is not given
            missing = [path for path in table.leaves if path not in rows]
            rows |= table.select(torch.from_numpy(slots), missing)
        layout.check(rows)
        return rows, slots, layout

    def _table_of(self, layout: Layout) -> Table:
        """The table, with all fields of a layout."""
        table = self.table
        if table is None:
            self._renew(layout, lambda new: None)
        elif len(layout.fields) > len(table.leaves):
            self._renew(layout, table.copy_to)
        assert self.table is not None
        return self.table

    def _renew(self, layout: Layout, fill: Callable[[Table], None]) -> None:
        """Go on in a store of its own, once it is filled; a crash before that leaves the old one."""
        new = self._make_table(self._generations.create_next(layout.schema), layout)
        try:
            fill(new)
            new.log.flush()
        except BaseException:
            new.log.discard()  # what is left of its store is removed before the next one is made
            raise
        old = self.table
        self._show(new)
        if old is not None:
            old.log.discard()  # the new one holds all of it
        self._generations.advance()  # last: where it fails, this goes on, and the next call tries it again

    def _empty(self) -> None:
        with self._lock:
            self._check_open()
            if self.table is not None:
                self.table.log.clear()
            self._set_last_cursor(None)
            super()._empty()

    # ---- changes in place

    def _bump_mutation_revision(self) -> None:
        """Called by TorchRL also after it has changed rows in memory."""
        with self._lock:
            self._log_changes()
        super()._bump_mutation_revision()

    def _log_changes(self) -> None:
        if self.table is not None:
            self.table.log_changes()

    def _apply_conditional_patch(self, index: torch.Tensor, patch: Mapping[Any, torch.Tensor]) -> None:
        coordinates = tuple(index.unbind(-1)) if index.ndim > 1 else (index,)
        with self._lock:
            assert self.table is not None  # the patch was checked against it
            self._log_changes()
            self.table.patch(coordinates, {self.table.layout.path(key): value for key, value in patch.items()})
        super()._bump_mutation_revision()

    # ---- reading

    def get(self, index: Any) -> Any:
        """Rows at an index, or all values of a key; what is read by pages is read when it is used or indexed."""
        table = self.table
        if table is not None and self.ndim == 1 and is_plain(index, len(self)):
            data = from_leaves(table.select(index))  # several times as fast as indexing, where rows are wide
        else:
            data = super().get(index)
        return data if self._class is None else self._class.from_tensordict(data)

    def flatten(self) -> TensorStorage:
        """The rows, one dimension only, in memory."""
        return self if self.ndim == 1 else super().flatten()

    # ---- going on

    @property
    def next_slot(self) -> int:
        """The slot after the one that was written last in turn."""
        cursor = self._last_cursor_index
        return 0 if cursor is None or self.table is None else (cursor + 1) % self.table.n_slots

    def resume(self, buffer: Any) -> None:
        """Let the writer of a buffer go on behind what was written last, or at a slot before that holds nothing."""
        writer, self._has_refused = buffer.writer, False
        if not isinstance(writer, TensorDictMaxValueWriter):
            n_filled = self.table.log.slots.n_filled if self.table is not None else 0
            writer._cursor = min(self.next_slot, n_filled)
            return
        writer._empty()
        for i in range(len(self)):
            writer.get_insert_index(self.get(i))  # takes up how good each is, in order of the slots

    def flush(self) -> None:
        """Make everything durable."""
        with self._lock:
            self._check_open()
            self._generations.settle()
            self._log_changes()
            if self.table is not None:
                self.table.log.flush()

    def close(self) -> None:
        """Make everything durable and release it; without a URL, forget it. May be called again."""
        with self._lock:
            if self.table is not None and not self._is_closed:
                self._log_changes()
                _finish(self.table.log, self._generations, self._private_url)
            self._is_closed = True
            cancel_finish_at_exit(self)

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError("the storage is closed; open another at its URL")

    def stats(self) -> dict[str, Any]:
        """Figures of the log: rows in it, rows that slots hold, commits, deletions."""
        return self.table.log.stats() if self.table is not None else {}

    def state_dict(self) -> dict[str, Any]:
        """All rows, in memory; `dumps` writes them to a store instead."""
        n = len(self) // self._n_lanes
        leaves = self.table.rows(np.arange(n)) if self.table is not None and n else {}
        n_slots = self.table.n_slots if self.table is not None else 0
        return {"_storage": leaves, "_len": len(self), "_cursor": self._last_cursor_index, "_n_slots": n_slots}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Hold what the state says, and nothing else.

        Raises:
            DataError: It holds more rows than there is room for, or fills a ring of another size; nothing was
                changed.
        """
        leaves = state_dict["_storage"]
        n = len(next(iter(leaves.values()), ()))
        parts = [(np.arange(n), leaves)] if n else []
        self.load_rows(Layout.of(leaves), parts, n, state_dict["_cursor"], state_dict["_n_slots"])

    def load_rows(
        self,
        layout: Layout,
        parts: Iterable[tuple[Array, Leaves]],
        n_rows: int,
        cursor: int | None,
        n_slots: int,
    ) -> None:
        """Hold these rows, by slot, and nothing else.

        Args:
            layout: Of the rows.
            parts: Slots and rows, some at a time.
            n_rows: How many slots there are up to the last that holds a row.
            cursor: The slot that was written last in turn.
            n_slots: How many there were where they come from.

        Raises:
            DataError: They are more than there is room for, or fill a ring of another size; nothing was changed.
        """
        with self._lock:
            self._check_open()
            if not n_rows:
                self._empty()
                return
            self._check_room(n_rows, n_slots, layout)

            def fill(table: Table) -> None:
                table.log.cursor = -1 if cursor is None else cursor
                for slots, rows in parts:
                    table.write(slots, rows)

            self._renew(layout, fill)
        super()._bump_mutation_revision()

    def _check_room(self, n_rows: int, n_slots: int, layout: Layout) -> None:
        n_lanes = layout.lanes(self.ndim).numel()
        if n_rows * n_lanes > self.max_size:
            raise DataError(
                f"max_size: expected at least the {n_rows * n_lanes} rows that are loaded, got {self.max_size}"
            )
        # Rows in a ring that is full are not in order of time, as they are taken to be in one that is not; and what
        # is loaded next, a writer's cursor and samplers' priorities, goes by slots.
        size = self._n_slots(layout)
        if n_slots != size and n_rows in (n_slots, size):
            raise DataError(
                f"max_size: expected {n_slots * n_lanes}, as where the rows come from, since they fill a ring,"
                f" got {self.max_size}; a storage that was closed may be opened again with a larger one"
            )

    def __enter__(self) -> TrajStorage:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "a TrajStorage belongs to its process and can't be pickled; let collectors hand their data to the"
            " process that has it"
        )


def _finish(log: Log, generations: Generations, private_url: str | None) -> None:
    if private_url is None:
        log.close()
        generations.settle()
        return
    log.discard()
    free_private_store(private_url)
