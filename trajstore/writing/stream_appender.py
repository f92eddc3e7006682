"""Rows to chunk objects of one stream and back, and the order in which they are published."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from trajstore.errors import ConflictError, FormatError
from trajstore.format.array_layout import ArrayLayout
from trajstore.format.commit_record import CommitRecord, DerivedColumnState, DerivedColumnStates, SessionView
from trajstore.format.zarr_json import to_json_bytes
from trajstore.schema import Array, Schema
from trajstore.storage import ABSENT, ANY, OWN, UNSEEN, Put, Storage


@dataclass(frozen=True, slots=True)
class NewRows:
    """New rows of one array: ``source`` as it is, or its rows in another order."""

    source: Array
    order: Array | None = None

    def __len__(self) -> int:
        return len(self.source if self.order is None else self.order)

    def take(self, start: int, stop: int, out: Array) -> None:
        if self.order is None:
            out[:] = self.source[start:stop]
        else:
            # mode="clip" writes straight into out; "raise" would go through a buffer.
            np.take(self.source, self.order[start:stop], axis=0, out=out, mode="clip")


class _Column:
    """The growing end of one array: how many rows are committed and the part-filled last chunk."""

    def __init__(self, path: str, key_prefix: str, layout: ArrayLayout) -> None:
        self.path = path
        self.rows = 0
        self._prefix = key_prefix
        self._layout = layout
        self._tail: Array | None = None  # holds the rows past the last full chunk, zeros after them
        self._next_tail: Array | None = None
        self._tail_version = ANY
        self._tail_bytes = 0
        self._put_bytes: dict[int, int] = {}  # size of each object of the last wave, by chunk

    def puts(self, new: NewRows, expect: str) -> list[Put]:
        """The chunk objects that change when ``new`` is appended. Asking again gives the same bytes.

        ``expect`` is for chunks that begin with new rows.
        """
        size, stop = self._layout.chunk_rows, self.rows + len(new)
        self._next_tail, self._put_bytes = self._tail, {}
        chunks = range(self.rows // size, -(-stop // size))
        return [self._measured(index, self._put(index, new, stop, expect)) for index in chunks]

    def _measured(self, index: int, put: Put) -> Put:
        sizes = self._put_bytes

        def make() -> bytes:
            data = put.make()
            sizes[index] = len(data)
            return data

        return replace(put, make=make)

    def _put(self, index: int, new: NewRows, stop: int, expect: str) -> Put:
        size = self._layout.chunk_rows
        low, high = max(self.rows, index * size), min(stop, (index + 1) * size)
        source = (low - self.rows, high - self.rows)
        key = f"{self._prefix}/{self._layout.chunk_key(index)}"
        is_full = high == (index + 1) * size
        if low > index * size:  # extends the part-filled chunk, which is on disk already
            assert self._tail is not None
            self._next_tail = None if is_full else self._tail
            return Put(key, self._filled(self._tail, low - index * size, new, source), self._tail_version)
        if is_full and new.order is None:
            block = new.source[slice(*source)]
            return Put(key, lambda: self._layout.encode(np.ascontiguousarray(block)), expect)
        if is_full:
            return Put(key, lambda: self._filled(self._layout.empty_chunk(), 0, new, source)(), expect)
        self._next_tail = self._layout.empty_chunk()
        return Put(key, self._filled(self._next_tail, 0, new, source), expect)

    def _filled(self, block: Array, at: int, new: NewRows, source: tuple[int, int]) -> Callable[[], bytes]:
        def make() -> bytes:
            # Rows past the committed ones may be overwritten any number of times: a retry writes the same.
            new.take(*source, block[at : at + source[1] - source[0]])
            return self._layout.encode(block)

        return make

    def advance(self, n: int, versions: Mapping[str, str]) -> int:
        """Take over the state after ``n`` appended rows became durable; returns by how many bytes it grew."""
        self.rows += n
        grown = sum(self._put_bytes.values()) - self._tail_bytes  # the tail before was replaced
        last, n_tail = divmod(self.rows, self._layout.chunk_rows)
        if not n_tail:
            self._tail, self._tail_version, self._tail_bytes = None, ANY, 0
            return grown
        self._tail, self._tail_bytes = self._next_tail, self._put_bytes[last]
        key = f"{self._prefix}/{self._layout.chunk_key(last)}"
        self._tail_version = versions.get(key, self._tail_version)
        return grown


@dataclass(slots=True)
class CommitBatch:
    """What one commit adds to a stream. Made once; committing it again writes the same bytes."""

    rows: Mapping[str, NewRows]  # by field path
    span_ints: Array
    span_floats: Array
    text: bytes
    committed_at: float
    columns: Sequence[DerivedColumnChange] = ()
    first_row: int | None = None  # of the stream itself; None: as before
    view: SessionView | None = None  # what is decided about others; None: as before

    @property
    def n_rows(self) -> int:
        return len(next(iter(self.rows.values()))) if self.rows else 0


@dataclass(frozen=True, slots=True)
class DerivedColumnChange:
    """Values of a derived column: a new generation from row ``first`` on, or changes of single rows."""

    target: str
    name: str
    values: Array
    first: int = 0
    rows: Array | None = None  # None: a new generation


class StreamAppender:
    """Appends batches to one stream. Not thread-safe: one thread commits.

    After any failure, `commit` with the same batch may be called again, as often as it takes.

    Attributes:
        record: The newest record.
        n_bytes: Size of the stream's step and span objects, without what was evicted since.
    """

    def __init__(self, storage: Storage, record: CommitRecord, settle_schema: Callable[[Schema], None]) -> None:
        self.record = record
        self.n_bytes = 0
        self._storage = storage
        self._settle_schema = settle_schema
        self._record_version = ABSENT
        self._is_born = False
        self._tried: CommitBatch | None = None  # the batch of the last commit, failed or not
        self._settled: dict[str, dict[str, DerivedColumnState]] = {}  # derived columns after it
        self._with_nodes: set[str] = set()  # columns whose nodes were put
        self._are_announced = False
        self._columns = {
            path: _Column(path, f"streams/{record.id}/{path}", layout) for path, layout in record.layouts.items()
        }

    def commit(self, batch: CommitBatch) -> None:
        """Write the batch's chunks, then publish them all at once by replacing the commit record."""
        self._be_born()
        if self._tried is not batch:  # a second try goes on with the arrays of the first
            self._are_announced = False
        if not self._are_announced:
            self._announce_columns(batch)
            self._settled = self._settle_columns(batch)
            self._are_announced = True
        columns, new = self._settled, self._new_rows(batch)
        # A second try may find the first one's record published after all: then readers are looking.
        expect = OWN if self._tried is batch else UNSEEN
        self._tried = batch
        puts = [
            put
            for path, rows in new.items()
            # Places of columns are used again, and read by those who have an older record.
            for put in self._columns[path].puts(rows, ANY if path.startswith("columns/") else expect)
        ]
        # Chunks first, record last: until the record names them no reader looks at the new rows,
        # so a crash here leaves garbage past the end, never a torn episode.
        with self._explained():
            versions = self._storage.put_many(puts)
        record = replace(
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
        self._publish(record)
        for path, rows in new.items():
            grown = self._columns[path].advance(len(rows), versions)
            self.n_bytes += 0 if path.startswith("columns/") else grown

    def _settle_columns(self, batch: CommitBatch) -> dict[str, dict[str, DerivedColumnState]]:
        """The state of all derived columns after a batch; arrays of a new generation begin anew."""
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
                self._columns[path] = _Column(path, f"streams/{self.record.id}/{path}", layouts[path])
        return columns

    def _announce_columns(self, batch: CommitBatch) -> None:
        """Publish columns that are new, empty, then the nodes of their arrays: none is there without its record."""
        columns = {target: dict(named) for target, named in self.record.columns.items()}
        for change in batch.columns:
            old = columns.setdefault(change.target, {}).get(change.name)
            dtype, shape = str(change.values.dtype), change.values.shape[1:]
            if old is None or (change.rows is None and (old.dtype, old.shape) != (dtype, shape)):
                generation = old.generation + 1 if old else 0
                columns[change.target][change.name] = DerivedColumnState(generation, dtype, shape, 0, 0, 0)
        if columns != self.record.columns:
            self._publish(replace(self.record, columns=columns, layouts=self._layouts(columns)))
        # By kind as well: what is put again with another dtype has other nodes.
        new = {
            f"{c.target}/{c.name} {c.values.dtype} {c.values.shape[1:]}" for c in batch.columns
        } - self._with_nodes
        if new:
            self._storage.put_many(self._column_nodes())
            self._with_nodes |= new

    def _layouts(self, columns: DerivedColumnStates) -> dict[str, ArrayLayout]:
        layouts = {path: layout for path, layout in self.record.layouts.items() if not path.startswith("columns/")}
        for target, named in columns.items():
            for name, state in named.items():
                layouts |= state.layouts(target, name)
        return layouts

    def _column_nodes(self) -> list[Put]:
        """Metadata of the arrays of columns, for whoever opens them by their own path."""
        return [
            Put(f"streams/{self.record.id}/{path}/zarr.json", lambda node=node: to_json_bytes(node))  # type: ignore[misc]
            for path, node in self.record.nodes().items()
            if path.split("/")[0] == "columns"
        ]

    def seal(self) -> None:
        """Declare the stream finished, and give its arrays their final shapes of their own.

        From here on an array opened by its own path, or by tensorstore, shows all rows.
        """
        if not self._is_born or self.record.is_sealed:
            return
        self._check_presence(is_certain=False)
        self._put_nodes()
        self._publish(replace(self.record, is_sealed=True))

    def _be_born(self) -> None:
        """Publish an empty record, then the nodes it names: a stream is never visible without its record."""
        if self._is_born:
            return
        self._settle_schema(self.record.schema)
        self._publish(self.record)
        self._put_nodes()
        self._is_born = True

    def _put_nodes(self) -> None:
        prefix = f"streams/{self.record.id}"

        def put(path: str, data: bytes) -> Put:
            return Put(f"{prefix}/{path}/zarr.json", lambda: data)

        self._storage.put_many([put(path, to_json_bytes(node)) for path, node in self.record.nodes().items()])

    def _publish(self, record: CommitRecord) -> None:
        self._check_presence(is_certain=False)
        try:
            with self._explained():
                self._record_version = self._storage.put(record.key, record.to_bytes(), self._record_version)
        except FileExistsError:
            self._accept_own_record(record)
        self.record = record

    def _accept_own_record(self, record: CommitRecord) -> None:
        # The first put may have gone through although its answer was lost.
        if self._storage.get(record.key) != record.to_bytes():
            raise FormatError(f"{self._storage.display}/{record.key} exists already") from None
        self._record_version = ANY

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Say so where a put was refused because the stream was removed."""
        try:
            yield
        except ConflictError:
            self._check_presence(is_certain=True)
            raise

    def _check_presence(self, *, is_certain: bool) -> None:
        """Refuse to go on with a stream that was removed by a session that took its writer for dead.

        To put the record again would show rows whose objects are gone. A put that compares versions refuses that
        by itself, so then it is looked at only to be certain.
        """
        if not self._is_born or not (is_certain or self._record_version == ANY):
            return
        try:
            self._storage.size(self.record.key)
        except FileNotFoundError:
            remove_stream(self._storage, self.record.id)  # what this commit has put already
            raise ConflictError(
                f"{self._storage.display}: stream '{self.record.id}' was removed by a session that declared its"
                " writer dead; open another writer"
            ) from None

    def _new_rows(self, batch: CommitBatch) -> dict[str, NewRows]:
        new = {f"steps/{path}": rows for path, rows in batch.rows.items()}
        new["spans/ints"] = NewRows(batch.span_ints)
        new["spans/floats"] = NewRows(batch.span_floats)
        new["spans/text"] = NewRows(np.frombuffer(batch.text, np.uint8))
        for change in batch.columns:
            state = self._settled[change.target][change.name]
            values, delta_rows, delta_values = state.paths(change.target, change.name)
            if change.rows is None:
                new[values] = NewRows(change.values)
            else:
                new |= {delta_rows: NewRows(change.rows), delta_values: NewRows(change.values)}
        return {path: rows for path, rows in new.items() if len(rows)}


def empty_record(
    stream_id: str,
    name: str,
    schema: Schema,
    layouts: Mapping[str, ArrayLayout],
    created_at: float,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    world: str | None = None,
    checkpoint: str | None = None,
    view: SessionView | None = None,
) -> CommitRecord:
    """The record of a stream that holds nothing yet."""
    return CommitRecord(
        stream_id,
        name,
        schema,
        layouts,
        created_at=created_at,
        committed_at=created_at,
        rank=rank,
        world_size=world_size,
        world=world,
        checkpoint=checkpoint,
        view=view or SessionView(),
    )


def remove_stream(storage: Storage, stream: str) -> None:
    """Remove all of a stream, its record first."""
    storage.remove_tree(f"streams/{stream}")
