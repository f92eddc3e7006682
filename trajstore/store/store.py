"""Creating and opening stores."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from trajstore.errors import ClosedError, FormatError, SchemaError, StoreExistsError, StoreNotFoundError
from trajstore.format.commit_record import CommitRecord, stream_layouts
from trajstore.format.episode_table import EpisodeTable
from trajstore.format.handles import EpisodeKey
from trajstore.format.ids import new_id
from trajstore.format.zarr_json import (
    FORMAT,
    GROUP,
    check_checksum,
    group_bytes,
    parse_json,
    to_json_bytes,
    trajstore_attributes,
    with_checksum,
)
from trajstore.schema import Schema, check_name
from trajstore.storage import Storage, open_storage
from trajstore.store.checkpoints import Checkpoint, find, list_checkpoints
from trajstore.store.snapshot import Snapshot
from trajstore.writing.options import WriterOptions
from trajstore.writing.writer import Writer

if TYPE_CHECKING:
    import zarr

_ROOT = "zarr.json"
_SCHEMA = "schema/zarr.json"
_STREAMS = "streams/zarr.json"
_CHECKPOINTS = "checkpoints/zarr.json"
_SKELETON = {"scratch", "streams", "checkpoints"}

Url = str | os.PathLike[str]

_swapping = [threading.Lock()]  # held for the moment in which a snapshot takes the place of another


def _after_fork() -> None:
    _swapping[0] = threading.Lock()  # whoever held it is not here to release it


os.register_at_fork(after_in_child=_after_fork)


class Store:
    """A store at a URL: writers append to it, snapshots of it are read.

    Reads show one `Snapshot`, that of the last `refresh`; a store opened while others write stays as it is until
    then. Safe to share between threads, to fork and to pickle.
    """

    def __init__(self, storage: Storage, url: Url, storage_options: Mapping[str, Any] | None) -> None:
        self._storage = storage
        self._url = os.fspath(url)
        self._storage_options = dict(storage_options or {})
        self._snapshot = Snapshot(storage, None, {})
        self._at: str | None = None  # the checkpoint that it shows, for good

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
        checkpoint: str | None = None,
        dead: Collection[str] = (),
    ) -> Writer:
        """A writer with a stream of its own; any number may write at the same time, under any names.

        Args:
            name: What to call the stream; a unique id is added.
            commit_steps: Commit in the background whenever this many steps are staged; None: not by count.
            commit_seconds: Commit in the background at least this often; None: not by time.
            buffer_bytes: Bound of the memory for steps that are appended and not yet durable; reaching half of
                it commits in the background, reaching all of it makes appends wait.
            rank: Rank of this writer, recorded with the stream.
            world_size: Number of ranks, recorded with the stream.
            world: Name of the set of sessions that this one belongs to; the marks of the newest set count.
            checkpoint: Id of the checkpoint that this set of sessions started from.
            dead: Ids of streams whose writers this session declares dead; their open episodes read as cut.
        """
        if self._at is not None:
            raise ClosedError(
                f"{self.url} is opened at checkpoint '{self._at}' and never changes; open it without at= to write"
            )
        check_name(name, "writer name")
        options = WriterOptions(
            commit_steps, commit_seconds, buffer_bytes, rank, world_size, world, checkpoint, dead
        )
        schema = self._snapshot.schema or read_schema(self._storage)
        return Writer(self._storage, name, schema, self._settle_schema, options)

    def refresh(self) -> Snapshot:
        """Show what has been committed meanwhile; costs what is new, not what is there.

        A store that was opened at a checkpoint goes on showing that.
        """
        while self._at is None:
            before = self._snapshot
            fresh = Snapshot.load(self._storage, before.schema or read_schema(self._storage), before)
            with _swapping[0]:
                if self._snapshot is before:  # else another thread was faster: what it saw must not be undone
                    self._snapshot = fresh
                    return fresh
        return self._snapshot

    @property
    def checkpoints(self) -> list[Checkpoint]:
        """Every complete checkpoint as it is now, parents before children; reads them anew."""
        return list_checkpoints(self._storage)

    @property
    def snapshot(self) -> Snapshot:
        """What the store shows now; keep it to go on reading the same."""
        return self._snapshot

    @property
    def url(self) -> str:
        """Where the store is, without credentials."""
        return self._storage.display

    @property
    def schema(self) -> Schema | None:
        return self._snapshot.schema

    @property
    def streams(self) -> tuple[CommitRecord, ...]:
        return self._snapshot.streams

    @property
    def episodes(self) -> EpisodeTable:
        """One row an episode; see `EpisodeTable`."""
        return self._snapshot.episodes

    def __len__(self) -> int:
        """Number of episodes."""
        return len(self.episodes)

    def read_episode(
        self,
        episode: int | EpisodeKey | tuple[str, int],
        *,
        fields: Iterable[str] | None = None,
        start: int = 0,
        stop: int | None = None,
    ) -> dict[str, Any]:
        """See `Snapshot.read_episode`."""
        return self._snapshot.read_episode(episode, fields=fields, start=start, stop=stop)

    def zarr_group(self) -> zarr.Group:
        """The store as a plain read-only zarr group, for tools that know only Zarr."""
        import zarr  # half a second to import; only this needs it

        return zarr.open_group(self._url, mode="r", zarr_format=3, storage_options=self._storage_options or None)

    def _settle_schema(self, schema: Schema) -> None:
        """Make this the store's schema if it has none; refuse one that differs from what it has."""
        stream_layouts(schema)  # refuses codecs and chunk sizes that no writer could use
        if self._storage.put_once(_SCHEMA, _schema_bytes(schema)):
            return
        settled = read_schema(self._storage)
        if settled is not None and (differences := settled.differences(schema)):
            raise SchemaError(f"{self.url} has another schema: {'; '.join(differences)}")

    def __repr__(self) -> str:
        return f"<Store {self.url}: {len(self._snapshot.streams)} streams, {self._snapshot.n_rows} rows>"


def create(
    url: Url,
    schema: Schema | None = None,
    *,
    storage_options: Mapping[str, Any] | None = None,
    exist_ok: bool = False,
    fsync: bool = True,
) -> Store:
    """Create an empty store.

    Args:
        url: A path, or an fsspec URL of memory, S3, GCS or Azure: ``runs/walker``, ``memory://x``, ``s3://bucket/x``.
        schema: The fields; None: read off the first data and then fixed.
        storage_options: Options for fsspec's filesystem (credentials, endpoints); never stored or shown.
        exist_ok: Open the store instead, if there is one; its schema must be the same.
        fsync: Whether commits to a local directory survive a power cut; without it, only a crash of the process.

    Raises:
        StoreExistsError: There is a store already, or the directory holds something else.
    """
    storage = open_storage(url, storage_options, fsync=fsync)
    if not _make_root(storage) and not exist_ok:
        raise StoreExistsError(f"{storage.display} is a store already; open it, or pass exist_ok=True")
    check_root(storage)
    store = Store(storage, url, storage_options)
    if schema is not None:
        store._settle_schema(schema)
    store.refresh()
    return store


def open(  # noqa: A001 - trajstore.open reads as it should
    url: Url, *, at: str | None = None, storage_options: Mapping[str, Any] | None = None, fsync: bool = True
) -> Store:
    """Open a store, for reading or for more writers.

    Args:
        url: A path, or an fsspec URL of memory, S3, GCS or Azure.
        at: Name or id of a checkpoint, or ``"latest"``: show what was there then, for good; read only.
        storage_options: Options for fsspec's filesystem (credentials, endpoints); never stored or shown.
        fsync: Whether commits to a local directory survive a power cut; without it, only a crash of the process.

    Raises:
        StoreNotFoundError: There is no store.
        FormatError: What is there is not a store, or one of a newer format.
        CheckpointNotFoundError: There is no such checkpoint.
        AmbiguousCheckpointError: There are several, of which none descends from the others.
    """
    storage = open_storage(url, storage_options, fsync=fsync)
    check_root(storage)
    store = Store(storage, url, storage_options)
    if at is None:
        store.refresh()
    else:
        checkpoint = find(storage, at)
        store._snapshot = Snapshot.at(storage, read_schema(storage), checkpoint)
        store._at = checkpoint.id
    return store


def _make_root(storage: Storage) -> bool:
    """Create the root and the groups below it; False if there is a root already."""
    names = storage.list_names("")
    if _ROOT in names:
        return False
    # The root comes last: what a crash before it leaves is not a store yet, and may be created again.
    if not set(names) <= _SKELETON or not set(storage.list_names("streams")) <= {_ROOT}:
        raise StoreExistsError(f"{storage.display} is not empty and not a store; choose another place")
    return put_root(storage)


def put_root(storage: Storage) -> bool:
    """Put the groups that every store has and then, which makes it one, the root; False if there is one already."""
    for key in (_STREAMS, _CHECKPOINTS):
        storage.put_once(key, to_json_bytes(GROUP))
    return storage.put_once(_ROOT, _root_bytes())


def _root_bytes() -> bytes:
    own = {"format": FORMAT, "kind": "store", "id": new_id("store"), "created_at": time.time()}
    return group_bytes(own)


def _schema_bytes(schema: Schema) -> bytes:
    own = {"format": FORMAT, "kind": "schema", "crc32c": "00000000", "schema": schema.to_json()}
    return with_checksum(GROUP | {"attributes": {"trajstore": own}})


def check_root(storage: Storage) -> str:
    """See that there is a store, of a format that this version reads; returns its id."""
    try:
        data = storage.get(_ROOT)
    except FileNotFoundError:
        raise StoreNotFoundError(f"{storage.display}: there is no store here") from None
    return str(trajstore_attributes(parse_json(data, storage.display), "store", storage.display).get("id"))


def read_schema(storage: Storage) -> Schema | None:
    """The schema that the store has settled on; None while it has none."""
    try:
        data = storage.get(_SCHEMA)
    except FileNotFoundError:
        return None
    what = f"{storage.display}/schema"
    own = trajstore_attributes(parse_json(data, what), "schema", what)
    check_checksum(data, what)
    try:
        return Schema.from_json(own.get("schema"))
    except SchemaError as error:
        raise FormatError(f"{what}: {error}") from error
