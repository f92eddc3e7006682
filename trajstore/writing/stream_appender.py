"""Appends commit batches to one stream and publishes each of them with one atomic put of the commit record."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from trajstore.errors import ConflictError, FormatError, SchemaError
from trajstore.format.array_layout import ArrayLayout
from trajstore.format.column_layouts import KnownRows
from trajstore.format.commit_record import CommitRecord, DerivedColumnState, DerivedColumnStates, stream_layouts
from trajstore.format.step_bytes import StepBytes
from trajstore.format.zarr_json import to_json_bytes
from trajstore.schema import Schema
from trajstore.storage import ABSENT, ANY, OWN, UNSEEN, Put, Storage
from trajstore.writing.array_appender import ArrayAppender
from trajstore.writing.commit_batch import CommitBatch, NewRows
from trajstore.writing.row_samples import sample_rows


class StreamAppender:
    """Appends batches to one stream. Not thread-safe: one thread commits.

    After any failure, `commit` may be called again with the same batch, any number of times.

    Attributes:
        record: The newest record.
        step_bytes: Sizes of the stream's step objects.
    """

    def __init__(
        self,
        storage: Storage,
        record: CommitRecord,
        settle_schema: Callable[[Schema], None],
        known: KnownRows | None = None,
    ) -> None:
        self.record = record
        self.step_bytes = StepBytes()
        self._storage = storage
        self._settle_schema = settle_schema
        self._known = known or KnownRows()  # about rows, before there are any
        self._record_version = ABSENT
        self._is_created = False  # whether the stream exists in the storage
        self._are_nodes_put = False  # whether the metadata of its groups and arrays is what the record says
        self._are_layouts_chosen = False  # by the first rows
        self._tried: CommitBatch | None = None  # the batch of the last commit, failed or not
        self._column_states: dict[str, dict[str, DerivedColumnState]] = {}  # derived columns after that batch
        self._columns_with_nodes: set[str] = set()  # derived columns whose array metadata was put
        self._are_columns_announced = False  # for the batch of the last commit
        self._arrays = {path: self._new_appender(path, layout) for path, layout in record.layouts.items()}

    def _new_appender(self, path: str, layout: ArrayLayout) -> ArrayAppender:
        return ArrayAppender(f"streams/{self.record.id}/{path}", layout)

    def commit(self, batch: CommitBatch) -> None:
        """Write the batch's chunks, then publish them all at once by replacing the commit record."""
        if batch.n_rows and not self._are_layouts_chosen:
            self._choose_layouts(batch)
        self._create_stream()
        if self._tried is not batch:  # a retry continues with the arrays of the first try
            self._are_columns_announced = False
        if not self._are_columns_announced:
            self._announce_columns(batch)
            self._column_states = self._advance_columns(batch)
            self._are_columns_announced = True
        columns, new = self._column_states, self._new_rows(batch)
        # A retry may find that the first try published its record after all: then readers use these objects.
        expect = OWN if self._tried is batch else UNSEEN
        self._tried = batch
        puts = [
            put
            for path, rows in new.items()
            # Arrays of derived columns reuse their keys, and readers with an older record still read them.
            for put in self._arrays[path].puts(rows, ANY if path.startswith("columns/") else expect)
        ]
        # Chunks first, record last: until the record names them no reader looks at the new rows,
        # so a crash here leaves garbage past the end, never a torn episode.
        with self._removal_explained():
            versions = self._storage.put_many(puts)
        self._publish(self._next_record(batch, columns))
        grown = {path: self._arrays[path].advance(len(rows), versions) for path, rows in new.items()}
        if steps := [objects for path, objects in grown.items() if path.startswith("steps/")]:
            self.step_bytes.add(steps)

    def _choose_layouts(self, batch: CommitBatch) -> None:
        """Choose the layouts of the steps by the first rows; a stream without rows may have been published."""
        schema = self.record.schema
        chosen = stream_layouts(schema, sample_rows(schema, batch.rows, self._known))
        changed = {path: layout for path, layout in chosen.items() if layout != self.record.layouts[path]}
        if changed:
            self.record = replace(self.record, layouts={**self.record.layouts, **changed})
            self._arrays |= {path: self._new_appender(path, layout) for path, layout in changed.items()}
            self._are_nodes_put = False
        self._are_layouts_chosen = True

    def _next_record(self, batch: CommitBatch, columns: DerivedColumnStates) -> CommitRecord:
        return replace(
            self.record,
            rows=self.record.rows + batch.n_rows,
            spans=self.record.spans + len(batch.span_ints),
            text_bytes=self.record.text_bytes + len(batch.text),
            commit=self.record.commit + 1,
            committed_at=batch.committed_at,
            first_row=self.record.first_row if batch.first_row is None else batch.first_row,
            view=self.record.view if batch.view is None else batch.view,
            columns=columns,
            layouts=self._layouts(columns),
        )

    def _advance_columns(self, batch: CommitBatch) -> dict[str, dict[str, DerivedColumnState]]:
        """The states of all derived columns after a batch. Arrays of a new generation start empty."""
        columns = {target: dict(named) for target, named in self.record.columns.items()}
        for change in batch.columns:
            named = columns[change.target]
            old, n = named[change.name], len(change.values)
            if change.rows is not None:
                named[change.name] = replace(old, deltas=old.deltas + n)
                continue
            generation = old.generation + 1
            state = replace(old, generation=generation, first=change.first, stop=change.first + n, deltas=0)
            named[change.name] = state
            layouts = state.layouts(change.target, change.name)
            for path in state.paths(change.target, change.name):
                self._arrays[path] = self._new_appender(path, layouts[path])
        return columns

    def _announce_columns(self, batch: CommitBatch) -> None:
        """Publish new derived columns as empty, then put the metadata of their arrays.

        No array exists in the storage before the record names it.
        """
        columns = {target: dict(named) for target, named in self.record.columns.items()}
        for change in batch.columns:
            old = columns.setdefault(change.target, {}).get(change.name)
            dtype, shape = str(change.values.dtype), change.values.shape[1:]
            if old is None or (change.rows is None and (old.dtype, old.shape) != (dtype, shape)):
                generation = old.generation + 1 if old else 0
                columns[change.target][change.name] = DerivedColumnState(generation, dtype, shape, 0, 0, 0)
        if columns != self.record.columns:
            self._publish(replace(self.record, columns=columns, layouts=self._layouts(columns)))
        # By dtype and shape as well: a column that is put again with another dtype has other metadata.
        new = {
            f"{c.target}/{c.name} {c.values.dtype} {c.values.shape[1:]}" for c in batch.columns
        } - self._columns_with_nodes
        if new:
            self._storage.put_many(self._node_puts("columns"))
            self._columns_with_nodes |= new

    def _layouts(self, columns: DerivedColumnStates) -> dict[str, ArrayLayout]:
        layouts = {path: layout for path, layout in self.record.layouts.items() if not path.startswith("columns/")}
        for target, named in columns.items():
            for name, state in named.items():
                layouts |= state.layouts(target, name)
        return layouts

    def seal(self) -> None:
        """Declare the stream finished, and put the final shape of each array into its own metadata.

        Afterwards an array that is opened by its own path, or by tensorstore, shows all rows.
        """
        if not self._is_created or self.record.is_sealed:
            return
        self._check_presence(is_certain=False)
        self._storage.put_many(self._node_puts())
        self._publish(replace(self.record, is_sealed=True))

    def _create_stream(self) -> None:
        """Publish an empty record, then the nodes it names: a stream is never visible without its record.

        The nodes of a stream without rows are put again if its first rows changed the layouts.
        """
        if self._is_created and self._are_nodes_put:
            return
        if not self._is_created:
            self._settle_schema(self.record.schema)
            self._publish(self.record)
            if self._storage.is_remote:
                self._confirm_schema()
        self._storage.put_many(self._node_puts())
        self._is_created = self._are_nodes_put = True

    def _confirm_schema(self) -> None:
        """Withdraw the empty stream if the store got another schema just before it was published.

        That happens only where the server ignores conditions on puts and several processes create the store.
        """
        try:
            self._settle_schema(self.record.schema)
        except SchemaError:
            self._storage.delete([self.record.key])
            self._record_version = ABSENT
            raise

    def _node_puts(self, group: str | None = None) -> list[Put]:
        """Metadata of the groups and arrays below the stream, or only of those in one group."""
        return [
            Put(f"streams/{self.record.id}/{path}/zarr.json", lambda node=node: to_json_bytes(node))  # type: ignore[misc]
            for path, node in self.record.nodes().items()
            if group is None or path.split("/")[0] == group
        ]

    def _publish(self, record: CommitRecord) -> None:
        self._check_presence(is_certain=False)
        try:
            with self._removal_explained():
                self._record_version = self._storage.put(record.key, record.to_bytes(), self._record_version)
        except FileExistsError:
            self._accept_own_record(record)
        self.record = record

    def _accept_own_record(self, record: CommitRecord) -> None:
        # The first put may have succeeded although its answer was lost.
        if self._storage.get(record.key) != record.to_bytes():
            raise FormatError(f"{self._storage.display}/{record.key} exists already") from None
        self._record_version = ANY

    @contextlib.contextmanager
    def _removal_explained(self) -> Iterator[None]:
        """Raise a clearer error where a put was refused because the stream was removed."""
        try:
            yield
        except ConflictError:
            self._check_presence(is_certain=True)
            raise

    def _check_presence(self, *, is_certain: bool) -> None:
        """Raise if a session that declared this writer dead removed the stream.

        Putting the record again would show rows whose objects are deleted. A put that compares versions refuses
        this by itself, so then the storage is asked only if ``is_certain``.
        """
        if not self._is_created or not (is_certain or self._record_version == ANY):
            return
        try:
            self._storage.size(self.record.key)
        except FileNotFoundError:
            remove_stream(self._storage, self.record.id)  # removes what this commit has already put
            raise ConflictError(
                f"{self._storage.display}: stream '{self.record.id}' was removed by a session that declared its"
                " writer dead; open another writer"
            ) from None

    def _new_rows(self, batch: CommitBatch) -> dict[str, NewRows]:
        """The rows that a batch adds to each array, by path; arrays that do not grow are left out."""
        new = {f"steps/{path}": rows for path, rows in batch.rows.items()}
        new["spans/ints"] = NewRows(batch.span_ints)
        new["spans/floats"] = NewRows(batch.span_floats)
        new["spans/text"] = NewRows(np.frombuffer(batch.text, np.uint8))
        for change in batch.columns:
            state = self._column_states[change.target][change.name]
            values, delta_rows, delta_values = state.paths(change.target, change.name)
            if change.rows is None:
                new[values] = NewRows(change.values)
            else:
                new |= {delta_rows: NewRows(change.rows), delta_values: NewRows(change.values)}
        return {path: rows for path, rows in new.items() if len(rows)}


def remove_stream(storage: Storage, stream: str) -> None:
    """Remove all objects of a stream, its record first."""
    storage.remove_tree(f"streams/{stream}")
