"""Episodes of other datasets into a store, and out of one: one at a time, resumable, verified."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from trajstore.datasets.comparing import end_of, ends_differ, metadata_differs, steps_differ
from trajstore.datasets.fields import length_of
from trajstore.datasets.plain import mapping
from trajstore.datasets.ports import Episode, Progress, Sink, Source
from trajstore.errors import CorruptionError, DataError, SchemaError, StoreExistsError, TrajstoreError
from trajstore.format.episode_table import EpisodeTable
from trajstore.format.handles import EpisodeKey
from trajstore.schema import Array, Schema, flatten, nest, selected_paths
from trajstore.store.snapshot import Snapshot
from trajstore.store.store import Store, Url, create
from trajstore.store.store import open as open_store
from trajstore.writing.writer import Writer

KEY_COLUMN = "source_key"  # of an imported store: the episode's name in its dataset
_FACTS = "dataset"  # metadata of the first episode: what holds for the dataset as a whole
_WRITER = "import"


@dataclass(frozen=True, slots=True)
class Report:
    """What a run did.

    Attributes:
        source: Where the episodes came from.
        target: Where they are now.
        n_episodes: Written by this run.
        n_skipped: That were there already.
        n_steps: Of the episodes written by this run.
        n_verified: Read back and found equal, those of earlier runs included.
        n_left_out: Steps of the episodes written by this run that an option leaves out on purpose.
    """

    source: str
    target: str
    n_episodes: int
    n_skipped: int
    n_steps: int
    n_verified: int
    n_left_out: int = 0


class _Count:
    """Tells how many episodes are done."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress, self._total, self._n = progress, total, 0

    def add(self, n: int = 1) -> None:
        self._n += n
        if self._progress is not None:
            self._progress(self._n, self._total)


# ---- into a store --------------------------------------------------------------------------------------


def import_episodes(
    source: Source,
    url: Url,
    *,
    resume: bool = True,
    verify: bool = True,
    progress: Progress | None = None,
    storage_options: Mapping[str, Any] | None = None,
    fsync: bool = True,
    **writer_options: Any,
) -> Report:
    """Write every episode of a dataset to a store, once, whatever became of earlier runs.

    An episode counts as written when it is committed whole, under its key in the episode column ``source_key``.
    What a run that died has left of another one is discarded. Memory holds two episodes and the writer's buffer.
    No two runs may import into a store at the same time.

    Args:
        source: The dataset; not closed.
        url: Of the store; created where there is none.
        resume: Go on where an earlier run stopped; otherwise the store must be new.
        verify: Read every episode back, those of earlier runs too, and compare it with the source.
        progress: Called with the episodes done and those to do; with ``verify`` each counts twice.
        storage_options: As in `trajstore.open`.
        fsync: As in `trajstore.open`.
        writer_options: As in `Store.writer`: how often to commit, how much to buffer.

    Raises:
        StoreExistsError: The store holds something else.
        DataError: An episode can't be stored; those before it are.
        CorruptionError: What is stored is not what the source has.
    """
    keys, schema = _checked_keys(source), _with_key(source.schema)
    try:
        store = create(url, schema, exist_ok=resume, storage_options=storage_options, fsync=fsync)
    except SchemaError as error:
        raise StoreExistsError(f"{source.display} can't be imported there: {error}") from error
    there, left = _committed(store.snapshot)
    _check_same(source, store, keys, there)
    count = _Count(progress, len(keys) * (2 if verify else 1))
    count.add(len(there))
    missing = [key for key in keys if key not in there]
    n_steps = 0
    if missing or left:
        with store.writer(_WRITER, dead=_unsealed(store), **writer_options) as writer:
            written, n_steps = _append(source, writer, missing, left, count)
        there = {**there, **written}
    _check_whole(store, len(keys))
    if verify:
        _verify(source, store.snapshot, ((key, there[key]) for key in keys), count)
    n_verified = len(keys) if verify else 0
    return Report(source.display, store.url, len(missing), len(keys) - len(missing), n_steps, n_verified)


def _checked_keys(source: Source) -> list[str]:
    keys = list(source.keys())
    if not keys:
        raise DataError(f"{source.display} holds no episodes")
    if len(set(keys)) < len(keys):
        raise DataError(f"{source.display} has several episodes of one name; expected each once")
    return keys


def _with_key(schema: Schema) -> Schema:
    return Schema(
        nest(schema.fields),
        episode={KEY_COLUMN: str, **schema.episode},
        reward=schema.reward,
        reward_alignment=schema.reward_alignment,
    )


def _committed(snapshot: Snapshot) -> tuple[dict[str, EpisodeKey], dict[str, list[int]]]:
    """The episodes that are there by their names, and, by stream, what is left of those that never ended."""
    table, where = snapshot.episodes, snapshot.storage.display
    there: dict[str, EpisodeKey] = {}
    left: dict[str, list[int]] = {}
    for i in range(len(table)):  # one at a time: all their text together may be large
        name, key = table.row(i)[KEY_COLUMN], table.key(i)
        if not _is_imported(key.stream):
            raise StoreExistsError(f"{where}: stream '{key.stream}' was not imported; import into a new store")
        if name is None:  # the name comes with the end
            left.setdefault(key.stream, []).append(key.episode)
        elif there.setdefault(name, key) != key:
            raise StoreExistsError(f"{where} has episode '{name}' twice; import into a new store")
    return there, left


def _check_same(source: Source, store: Store, keys: Sequence[str], there: Mapping[str, EpisodeKey]) -> None:
    """Refuse a store of another dataset: by its names, and by the first and the last episode that it has."""
    known = set(keys)
    others = [name for name in there if name not in known]
    if others:
        raise StoreExistsError(
            f"{store.url} has episode '{others[0]}', {source.display} has not; choose another place"
        )
    if there:
        first, *_, last = (*there, *there)
        ends = {name: there[name] for name in (first, last)}
        try:
            _verify(source, store.snapshot, ends.items(), _Count(None, 0))
        except CorruptionError as error:
            raise StoreExistsError(f"{store.url} holds another dataset, or is damaged: {error}") from error


def _unsealed(store: Store) -> list[str]:
    return [record.id for record in store.streams if _is_imported(record.id) and not record.is_sealed]


def _is_imported(stream: str) -> bool:
    return stream.rpartition("-")[0] == _WRITER


def _append(
    source: Source, writer: Writer, missing: Sequence[str], left: Mapping[str, Sequence[int]], count: _Count
) -> tuple[dict[str, EpisodeKey], int]:
    """Write episodes; their places and how many steps they have."""
    if left:
        writer.set_view(discarded=left)
        writer.wait(writer.publish_view())
    written: dict[str, EpisodeKey] = {}
    try:
        for name in missing:
            written[name] = _append_one(source, writer, name)
            count.add()
    except BaseException:
        # What came whole need not be read again; leaving the writer by an exception would drop it.
        with contextlib.suppress(TrajstoreError):
            writer.commit()
        raise
    return written, writer.stats()["steps"]


def _append_one(source: Source, writer: Writer, name: str) -> EpisodeKey:
    episode = source.read(name)
    try:
        return writer.append_episode(
            episode.steps,
            terminated=episode.terminated,
            truncated=episode.truncated,
            metadata={**episode.metadata, KEY_COLUMN: name},
        )
    except DataError as error:
        raise DataError(f"{source.display}: episode '{name}': {error}") from error


def _check_whole(store: Store, n: int) -> None:
    if len(store.refresh().episodes) != n:
        raise CorruptionError(
            f"{store.url}: expected the {n} episodes of the source, got {len(store)}; does another run write there?"
        )


def _verify(source: Source, snapshot: Snapshot, places: Iterable[tuple[str, EpisodeKey]], count: _Count) -> None:
    """Compare episodes of the store with those of the source."""
    schema = snapshot.schema
    assert schema is not None  # create was given one
    for name, key in places:
        expected, got = source.read(name), stored_episode(snapshot, snapshot.episodes.find(key))
        difference = (
            steps_differ(expected.steps, got.steps)
            or ends_differ(expected, got)
            or metadata_differs(schema, {**expected.metadata, KEY_COLUMN: name}, got.metadata)
        )
        if difference:
            raise CorruptionError(f"{snapshot.storage.display}: episode '{name}' of {source.display}: {difference}")
        count.add()


# ---- out of a store ------------------------------------------------------------------------------------


def export_episodes(
    store: Store | Url,
    sink: Sink,
    *,
    where: Callable[[EpisodeTable], Array] | None = None,
    fields: Collection[str] | None = None,
    reread: Callable[[], Source] | None = None,
    progress: Progress | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Report:
    """Write episodes of a store to a dataset of another library, in the order of the episode table.

    A run that was stopped is gone on with. Open episodes are written as far as they are committed. Memory holds one
    episode, two while it is read back, and what the sink gathers before it writes.

    Args:
        store: The store, as it was opened or last refreshed, or where it is.
        sink: The dataset; finished, or kept for the next run where this one fails.
        where: Only episodes that this function of the episode table says True for.
        fields: Paths or names of groups to write; all by default.
        reread: Opens the finished dataset: every episode is read back and compared with what was to be written of
            it. Fields that the other library asks for and the store has not are not looked at, nor are metadata.
        progress: Called with the episodes done and those to do; with ``reread`` each counts twice.
        storage_options: As in `trajstore.open`, where ``store`` is a URL.

    Raises:
        DataError: An episode has no place in the other format; nothing appears under the dataset's name.
        CorruptionError: What was written, and stays under the dataset's name, is not what the store has.
    """
    try:
        opened = store if isinstance(store, Store) else open_store(store, storage_options=storage_options)
        chosen = _Chosen(opened.snapshot, _rows(opened.episodes, where), fields)
        chosen.check(opened.url)
        n = len(chosen.rows)
        count = _Count(progress, n if reread is None else 2 * n)
        n_skipped = _n_done(sink, chosen)
        count.add(n_skipped)
        n_steps = _write(sink, chosen, n_skipped, count)
        sink.finish()
    except BaseException as error:
        _abandon(sink, error)
        raise
    if reread is not None:
        with contextlib.closing(reread()) as source:
            _compare(source, sink, chosen, count)
    n_left_out = int(opened.episodes["length"][chosen.rows[n_skipped:]].sum()) - n_steps
    n_verified = 0 if reread is None else n
    return Report(opened.url, sink.display, n - n_skipped, n_skipped, n_steps, n_verified, n_left_out)


def _abandon(sink: Sink, error: BaseException) -> None:
    try:
        sink.abandon()
    except Exception as failure:  # what went wrong first matters more; this travels with it
        error.add_note(f"trajstore: what was written could not be kept either: {failure}")


def stored_episode(snapshot: Snapshot, i: int, fields: Collection[str] | None = None) -> Episode:
    """Row ``i`` of the episode table and its steps; the key is valid for ever."""
    row = snapshot.episodes.row(i)
    declared = {name: row[name] for name in snapshot.schema.episode} if snapshot.schema else {}
    metadata = {name: value for name, value in declared.items() if value is not None} | row["metadata"]
    is_terminated, is_truncated = row["end"] == "terminated", row["end"] == "truncated"
    return Episode(_name(row), snapshot.read_episode(i, fields=fields), is_terminated, is_truncated, metadata)


def _name(row: Mapping[str, Any]) -> str:
    # An open episode may have more steps at the next visit, and is then another one.
    length = f"/{row['length']}" if row["end"] == "open" else ""
    return f"{row['stream']}/{row['episode']}{length}"


@dataclass(frozen=True, slots=True)
class _Chosen:
    """What is exported of a store."""

    snapshot: Snapshot
    rows: list[int]  # of the episode table
    fields: Collection[str] | None

    def check(self, url: str) -> None:
        """Refuse what no sink could make sense of."""
        if not self.rows:
            raise DataError(f"{url} has no such episodes")
        schema = self.snapshot.schema
        assert schema is not None  # there are episodes
        try:
            paths = selected_paths(schema, self.fields)
        except KeyError as error:
            raise DataError(f"{url}: {error.args[0]}") from error
        if all(schema[path].final for path in paths):
            raise DataError(f"{url}: every field chosen has final values, so nobody could tell steps from them")

    def episode(self, n: int) -> Episode:
        """The ``n``-th; with the first comes what holds for the dataset as a whole."""
        episode = stored_episode(self.snapshot, self.rows[n], self.fields)
        facts = mapping(self.snapshot.episodes.metadata(0).get(_FACTS)) if n == 0 else {}
        return replace(episode, metadata={**episode.metadata, _FACTS: facts}) if facts else episode


def _rows(table: EpisodeTable, where: Callable[[EpisodeTable], Array] | None) -> list[int]:
    has_steps = np.asarray(table["length"]) > 0
    chosen = has_steps if where is None else has_steps & np.asarray(where(table), bool)
    return [int(i) for i in np.flatnonzero(chosen)]


def _n_done(sink: Sink, chosen: _Chosen) -> int:
    done, table = list(sink.done()), chosen.snapshot.episodes
    if done != [_name(table.row(i)) for i in chosen.rows[: len(done)]]:
        raise DataError(f"{sink.display}: what an earlier run has left beside it is of another export; remove it")
    return len(done)


def _write(sink: Sink, chosen: _Chosen, n_skipped: int, count: _Count) -> int:
    """Write episodes; how many steps of them there are now."""
    n_steps = 0
    for n in range(n_skipped, len(chosen.rows)):
        episode = chosen.episode(n)
        try:
            kept = sink.kept(episode)
            sink.write(kept)
        except DataError as error:
            raise DataError(f"{sink.display}: episode '{episode.key}': {error}") from error
        n_steps += _n_steps(kept)
        count.add()
    return n_steps


def _n_steps(episode: Episode) -> int:
    return length_of(flatten(episode.steps))


def _compare(source: Source, sink: Sink, chosen: _Chosen, count: _Count) -> None:
    """Compare episodes of a dataset with what was to be written of those of the store, in their order."""
    keys, numbers = source.keys(), _not_empty(sink, chosen)
    count.add(len(chosen.rows) - len(numbers))
    if len(keys) != len(numbers):
        raise CorruptionError(f"{source.display}: expected {len(numbers)} episodes, got {len(keys)}")
    for n, key in zip(numbers, keys, strict=True):
        expected, got = sink.kept(chosen.episode(n)), source.read(key)
        is_ended = end_of(got) != "cut"  # not every format knows ends
        difference = steps_differ(expected.steps, got.steps) or (ends_differ(expected, got) if is_ended else None)
        if difference:
            raise CorruptionError(f"{source.display}: episode '{key}': {difference}")
        count.add()


def _not_empty(sink: Sink, chosen: _Chosen) -> list[int]:
    """Numbers of the episodes of which something was written: of a single step nothing may be left."""
    lengths = chosen.snapshot.episodes["length"][chosen.rows]
    return [n for n, length in enumerate(lengths) if length > 1 or _n_steps(sink.kept(chosen.episode(n)))]
