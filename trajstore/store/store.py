"""Creates and opens stores."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from trajstore.arguments import parse_bytes
from trajstore.errors import ClosedError, SchemaError, StoreExistsError, StoreNotFoundError
from trajstore.format.codec import load_compressors
from trajstore.format.commit_record import CommitRecord, stream_layouts
from trajstore.format.episode_table import EpisodeTable
from trajstore.format.handles import EpisodeKey
from trajstore.format.ids import new_id
from trajstore.format.lineage import continued_extents
from trajstore.format.zarr_json import (
    FORMAT,
    GROUP,
    group_bytes,
    parse_json,
    to_json_bytes,
    trajstore_attributes,
)
from trajstore.html_blocks import representation
from trajstore.schema import Schema, as_schema, check_name, check_not_reserved, has_reserved
from trajstore.storage import DiskCache, Storage, client_options, open_storage
from trajstore.store.checkpoints import Checkpoint, find, list_checkpoints
from trajstore.store.schema_objects import (
    FIRST_SCHEMAS,
    at_once,
    later_schemas,
    read_schema,
    schema_object,
    settle,
)
from trajstore.store.snapshot import Snapshot
from trajstore.store.snapshot_html import checkpoints_section, sections, summary
from trajstore.store.xarray_dataset import to_xarray
from trajstore.writing.options import WriterOptions
from trajstore.writing.writer import Writer

if TYPE_CHECKING:
    import xarray
    import zarr

_ROOT = "zarr.json"
_STREAMS = "streams/zarr.json"
_CHECKPOINTS = "checkpoints/zarr.json"
_SKELETON = {"scratch", "streams", "checkpoints"}

Url = str | os.PathLike[str]

_swapping = [threading.Lock()]  # held while a store replaces its snapshot


def _after_fork() -> None:
    _swapping[0] = threading.Lock()  # a thread of the parent may hold the old one, and would never release it


os.register_at_fork(after_in_child=_after_fork)


class Store:
    """A store at a URL: writers append to it, and snapshots of it are read.

    All reads show one `Snapshot`, made when the store was opened or last refreshed; commits made since then are not
    visible before the next `refresh`. Safe to share between threads, to fork and to pickle.
    """

    def __init__(self, storage: Storage, url: Url, storage_options: Mapping[str, Any] | None) -> None:
        self._storage = storage
        self._url = os.fspath(url)
        self._storage_options = dict(storage_options or {})
        self._snapshot = Snapshot(storage, None, {})
        self._settled: Schema | None = None  # the fields that its writers were given
        self._at: str | None = None  # id of the checkpoint that it was opened at

    def writer(
        self,
        name: str = "writer",
        *,
        commit_steps: int | None = None,
        commit_seconds: float | None = 10.0,
        buffer_bytes: int | str = "256MiB",
        rank: int | None = None,
        world_size: int | None = None,
        world: str | None = None,
        checkpoint: Checkpoint | str | None = None,
        dead: Collection[str] = (),
    ) -> Writer:
        """Open a writer. It writes its own stream, so any number of writers may write at the same time.

        Args:
            name: Name of the stream; a unique id is appended.
            commit_steps: Commit in the background after this many staged steps; None: not by count.
            commit_seconds: Commit in the background at least this often; None: not by time.
            buffer_bytes: Limit of the memory for appended steps that are not durable yet. At half of it, the writer
                commits in the background; at the limit, appends wait.
            rank: Rank of this writer, recorded with the stream.
            world_size: Number of ranks, recorded with the stream.
            world: Id of the set of sessions that this one belongs to; the marks of the newest set count.
            checkpoint: The checkpoint that this set of sessions started from, or its id. With a `Checkpoint`, the
                store shows from now on what it lists and what this set writes; see `Snapshot`.
            dead: Ids of streams whose writers this session declares dead; their open episodes are shown as cut.
        """
        if self._at is not None:
            raise ClosedError(
                f"{self.url} is opened at checkpoint '{self._at}' and is read-only; open it without at= to write"
            )
        self._storage.check_writable()
        check_name(name, "writer name")
        started_from, continues = checkpoint, None
        if isinstance(started_from, Checkpoint):
            continues = continued_extents(started_from, self._snapshot.streams)
            started_from = started_from.id
        options = WriterOptions(
            commit_steps, commit_seconds, buffer_bytes, rank, world_size, world, started_from, dead, continues
        )
        schema = self._snapshot.schema or self._known_schema()
        return Writer(self._storage, name, schema, self._settle_schema, options)

    def refresh(self) -> Snapshot:
        """Make commits since the last refresh visible. Cost is proportional to the new data.

        A store that was opened at a checkpoint keeps showing that checkpoint. If streams of it were packed and the
        originals removed, it reads the packed ones from now on.
        """
        if self._at is not None:
            self._snapshot = self._snapshot.relocated()
        while self._at is None:
            before = self._snapshot
            fresh = Snapshot.load(self._storage, before.schema or self._known_schema(), before)
            with _swapping[0]:
                if self._snapshot is before:  # otherwise another thread was faster, and may have seen newer commits
                    self._snapshot = fresh
                    return fresh
        return self._snapshot

    @property
    def checkpoints(self) -> list[Checkpoint]:
        """All complete checkpoints, parents before children; read from the storage at every access."""
        return list_checkpoints(self._storage)

    @property
    def snapshot(self) -> Snapshot:
        """The current snapshot. Keep it to continue reading the same commits after a `refresh`."""
        return self._snapshot

    @property
    def url(self) -> str:
        """URL of the store, without credentials."""
        return self._storage.display

    @property
    def schema(self) -> Schema | None:
        return self._snapshot.schema

    @property
    def streams(self) -> tuple[CommitRecord, ...]:
        return self._snapshot.streams

    @property
    def episodes(self) -> EpisodeTable:
        """The episode table: one row an episode."""
        return self._snapshot.episodes

    def history(self, *, abandoned: bool = False) -> EpisodeTable:
        """The episode table of the whole run, evicted episodes included; see `Snapshot.history`."""
        return self._snapshot.history(abandoned=abandoned)

    def __len__(self) -> int:
        """Number of episodes."""
        return len(self.episodes)

    def read_episode(
        self,
        episode: int | EpisodeKey | tuple[str, int],
        *,
        fields: Iterable[str] | None = None,
        columns: Iterable[str] | bool = False,
        start: int = 0,
        stop: int | None = None,
    ) -> dict[str, Any]:
        """Read the steps of one episode; see `Snapshot.read_episode`."""
        return self._snapshot.read_episode(episode, fields=fields, columns=columns, start=start, stop=stop)

    def to_xarray(
        self, fields: Iterable[str] | None = None, *, final: bool = False, chunk_bytes: int | str = "16MiB"
    ) -> xarray.Dataset:
        """The steps of all episodes as a lazy `xarray.Dataset`, which reads values when they are computed.

        The streams follow each other along the dimension ``step``. A variable is a dask array whose chunks hold
        whole stored chunks, so that each of these is read once; nested fields are named ``observation.state``, and
        fields named like a coordinate ``steps.t``. The coordinates ``stream`` (a position in its attribute
        ``ids``), ``episode`` (its number in the stream) and ``t`` say which step a row is; ``episode_row`` is the
        row of the episode in `episodes`, and tells episodes of different streams apart. They are lazy too.

        Args:
            fields: Paths of fields, or names of groups; all by default.
            final: Also show final rows, which hold only the last observation of an episode and filler in other
                fields. The coordinate ``is_final`` says which these are.
            chunk_bytes: About the size of a dask chunk.

        Raises:
            KeyError: A name is neither a field nor a group.
            MissingExtraError: xarray or dask is not installed.
        """
        size = parse_bytes(chunk_bytes, "chunk_bytes")
        return to_xarray(self._snapshot, fields, final=final, chunk_bytes=size)

    def zarr_group(self) -> zarr.Group:
        """Open the store as a read-only `zarr.Group`, for tools that know only Zarr."""
        import zarr  # takes half a second, and only this method needs it

        options = client_options(self._storage_options) or None
        return zarr.open_group(self._url, mode="r", zarr_format=3, storage_options=options)

    def _known_schema(self) -> Schema | None:
        return self._settled or read_schema(self._storage)

    def _settle_schema(self, schema: Schema, first: Sequence[bytes | None] | None = None) -> None:
        """Set the store's schema if it has none, or add fields to it; refuse a schema that contradicts it.

        Args:
            schema: The fields.
            first: The first schema objects, if they were just read.
        """
        stream_layouts(schema)  # raises for codecs and chunk sizes that no writer could use
        shown = self._snapshot.schema
        if shown is not None and (differences := shown.differences(schema, "the store", "the given schema")):
            raise SchemaError(f"{self.url} has another schema: {'; '.join(differences)}")
        self._settled = settle(self._storage, schema, lambda: Snapshot.load(self._storage, None).schema, first)

    def __repr__(self) -> str:
        at = f" at checkpoint {self._at}" if self._at is not None else ""
        return f"<Store {self.url}{at}: {len(self._snapshot.streams)} streams, {self._snapshot.n_rows} rows>"

    def _repr_html_(self) -> str:
        at = f", opened at checkpoint {self._at}" if self._at is not None else ""
        parts = [*sections(self._snapshot), lambda: checkpoints_section(self._storage)]
        return representation("Store", self.url, lambda: summary(self._snapshot) + at, parts)


def create(
    url: Url,
    schema: Schema | Mapping[str, Any] | None = None,
    *,
    storage_options: Mapping[str, Any] | None = None,
    exist_ok: bool = False,
    fsync: bool = True,
    disk_cache: DiskCache | None = None,
) -> Store:
    """Create an empty store.

    Args:
        url: A path, or an fsspec URL of memory, S3, GCS or Azure: ``runs/walker``, ``memory://x``, ``s3://bucket/x``.
        schema: The fields: a `Schema`, or a nested mapping of names to `Field`. None: taken from the first data,
            and fixed from then on.
        storage_options: Options for fsspec's filesystem, such as credentials and endpoints; never stored or shown.
        exist_ok: Open an existing store. A given schema must be the store's, except for fields that declare a
            ``fill``: those that the store lacks are added to it, and those that it has may be left out here.
        fsync: Whether commits to a local directory survive a power cut. Without it they survive only a crash of the
            process.
        disk_cache: Where objects of a remote store are kept on a local disk, once they were read; None: nowhere.

    Raises:
        StoreExistsError: The location already holds a store, or something else.
        SchemaError: The store has another schema, or a field has a name that batches use for something else.
    """
    fields = as_schema(schema)
    storage = open_storage(url, storage_options, fsync=fsync, disk_cache=disk_cache)
    if fields is not None and has_reserved(fields):
        known = read_schema(storage) or ()  # an older store may have such fields already
        check_not_reserved([path for path in fields if path not in known])
    return _create(storage, url, fields, storage_options, exist_ok)


def create_imported(
    url: Url,
    schema: Schema | None,
    *,
    storage_options: Mapping[str, Any] | None = None,
    exist_ok: bool = False,
    fsync: bool = True,
) -> Store:
    """Like `create`, for data of another origin: fields keep their names, also those that batches use otherwise."""
    storage = open_storage(url, storage_options, fsync=fsync)
    return _create(storage, url, schema, storage_options, exist_ok)


def _create(
    storage: Storage, url: Url, schema: Schema | None, storage_options: Mapping[str, Any] | None, exist_ok: bool
) -> Store:
    load_compressors()
    if storage.is_read_only:
        storage.check_writable()  # raises
    objects = [partial(schema_object, storage, number) for number in range(FIRST_SCHEMAS)]
    lists = [partial(storage.list_names, prefix) for prefix in ("", "streams")]
    root, names, streams, *first = at_once(storage, [partial(_root, storage), *lists, *objects])
    is_new = root is None and _make_root(storage, names, streams)
    if not (is_new or exist_ok):
        raise StoreExistsError(f"{storage.display} is already a store; open it, or pass exist_ok=True")
    if not is_new:
        _check_root(storage, root or storage.get(_ROOT))
    store = Store(storage, url, storage_options)
    if schema is not None:
        store._settle_schema(schema, first)
    if root is None:  # others may have begun since
        store.refresh()
    else:
        known = later_schemas(storage, first) if store._settled is None else [store._settled]
        store._snapshot = Snapshot.load(storage, known[-1] if known else None, names=streams)
    return store


def open(  # noqa: A001 - trajstore.open reads as it should
    url: Url,
    *,
    at: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
    fsync: bool = True,
    disk_cache: DiskCache | None = None,
) -> Store:
    """Open a store, for reading or for more writers.

    Args:
        url: A path, or an fsspec URL of memory, S3, GCS or Azure; for reading also of a web server (``https://``),
            Hugging Face (``hf://``), a zip file (``zip://::https://...``) or another chain of URLs.
        at: Name or id of a checkpoint, or ``"latest"``: show that checkpoint, read-only.
        storage_options: Options for fsspec's filesystem, such as credentials and endpoints; never stored or shown.
        fsync: Whether commits to a local directory survive a power cut. Without it they survive only a crash of the
            process.
        disk_cache: Where objects of a remote store are kept on a local disk, once they were read; None: nowhere.

    Raises:
        StoreNotFoundError: The location holds no store.
        FormatError: The location holds something else, or a store of a newer format.
        CheckpointNotFoundError: The store has no such checkpoint.
        AmbiguousCheckpointError: Several checkpoints match, and none descends from all others.
    """
    load_compressors()
    storage = open_storage(url, storage_options, fsync=fsync, disk_cache=disk_cache)
    store = Store(storage, url, storage_options)
    # What can be asked without an answer to another question is asked at once. The records come after the schema.
    objects = [partial(schema_object, storage, number) for number in range(FIRST_SCHEMAS)]
    last = partial(storage.list_names, "streams") if at is None else partial(find, storage, at)
    _, *first, found = at_once(storage, [partial(check_root, storage), *objects, last])
    schemas = later_schemas(storage, first)
    schema = schemas[-1] if schemas else None
    if at is None:
        store._snapshot = Snapshot.load(storage, schema, names=found)
    else:
        store._snapshot = Snapshot.at(storage, schema, found)
        store._at = found.id
    return store


def _make_root(storage: Storage, names: Collection[str], streams: Collection[str]) -> bool:
    """Create the root and the groups below it; returns False if the root exists.

    Args:
        storage: Storage of the store.
        names: What the location holds.
        streams: What it holds below ``streams``.

    Raises:
        StoreExistsError: The location holds something else.
    """
    if _ROOT in names:
        return False
    # The root is put last: what a crash before that leaves is not a store yet, and `create` may be called again.
    if not set(names) <= _SKELETON or not set(streams) <= {_ROOT}:
        raise StoreExistsError(f"{storage.display} is not empty and not a store; choose another location")
    return put_root(storage)


def put_root(storage: Storage) -> bool:
    """Put the groups that every store has, then the root, which makes it a store.

    Returns:
        False if a root exists already.
    """
    # The same bytes, whoever puts them.
    groups = [partial(storage.put, key, to_json_bytes(GROUP)) for key in (_STREAMS, _CHECKPOINTS)]
    at_once(storage, [storage.learn_conditions, *groups])
    return storage.put_once(_ROOT, _root_bytes())


def _root_bytes() -> bytes:
    own = {"format": FORMAT, "kind": "store", "id": new_id("store"), "created_at": time.time()}
    return group_bytes(own)


def check_root(storage: Storage) -> str:
    """Check that the location holds a store that this version can read; returns the store's id.

    Raises:
        StoreNotFoundError: The location holds no store.
        FormatError: The location holds something else, or a store of a newer format.
    """
    data = _root(storage)
    if data is None:
        raise StoreNotFoundError(f"{storage.display}: there is no store here")
    return _check_root(storage, data)


def _root(storage: Storage) -> bytes | None:
    """The bytes of the root; None if there is none."""
    try:
        return storage.get(_ROOT)
    except FileNotFoundError:
        return None


def _check_root(storage: Storage, data: bytes) -> str:
    return str(trajstore_attributes(parse_json(data, storage.display), "store", storage.display).get("id"))


def check_is_store(store: object) -> None:
    """Refuse what is neither a store nor a snapshot, such as a URL.

    Raises:
        TypeError: It is something else.
    """
    if not isinstance(store, (Store, Snapshot)):
        raise TypeError(
            f"store: expected a Store or a Snapshot, got {store!r:.80}; open a URL with trajstore.open(url)"
        )
