"""Import the episodes of a dataset into a store, and export a store to a dataset.

Both work on one episode at a time, continue after an interruption, and can verify the result.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from trajstore.datasets.episode_arrays import count_steps
from trajstore.datasets.episode_comparison import (
    end_name,
    find_end_difference,
    find_metadata_difference,
    find_step_difference,
)
from trajstore.datasets.interfaces import DatasetReader, DatasetWriter, Episode, Progress
from trajstore.datasets.json_values import as_mapping
from trajstore.errors import CorruptionError, DataError, SchemaError, StoreExistsError, TrajstoreError
from trajstore.format.episode_table import EpisodeTable
from trajstore.format.handles import EpisodeKey
from trajstore.schema import Array, Schema, flatten, nest, selected_paths
from trajstore.store.snapshot import Snapshot
from trajstore.store.store import Store, Url, create_imported
from trajstore.store.store import open as open_store
from trajstore.writing.writer import Writer

KEY_COLUMN = "source_key"  # episode column of an imported store: the episode's name in its dataset
_DATASET_FACTS = "dataset"  # metadata of the first episode: facts about the whole dataset
_WRITER_NAME = "import"


@dataclass(frozen=True, slots=True)
class ConversionReport:
    """What a run did.

    Attributes:
        source: Where the episodes came from.
        target: Where they were written.
        n_episodes: Episodes that this run wrote.
        n_skipped: Episodes that earlier runs had written.
        n_steps: Steps of the episodes that this run wrote.
        n_verified: Episodes that were read back and found equal, including those of earlier runs.
        n_left_out: Steps that an option dropped from the episodes that this run wrote.
    """

    source: str
    target: str
    n_episodes: int
    n_skipped: int
    n_steps: int
    n_verified: int
    n_left_out: int = 0


class _ProgressCounter:
    """Reports the number of finished episodes."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress, self._total, self._n = progress, total, 0

    def add(self, n: int = 1) -> None:
        self._n += n
        if self._progress is not None:
            self._progress(self._n, self._total)


# ---- import --------------------------------------------------------------------------------------------


def import_episodes(
    reader: DatasetReader,
    url: Url,
    *,
    resume: bool = True,
    verify: bool = True,
    progress: Progress | None = None,
    storage_options: Mapping[str, Any] | None = None,
    fsync: bool = True,
    commit_steps: int | None = None,
    commit_seconds: float | None = 10.0,
    buffer_bytes: int | str = "256MiB",
) -> ConversionReport:
    """Write every episode of a dataset to a store exactly once.

    A run that was interrupted can be repeated. An episode counts as written when all of it is committed, under its
    key in the episode column ``source_key``; episodes that an earlier run wrote in part are discarded and written
    again. Memory holds two episodes and the writer's buffer. Only one run may import into a store at a time.

    Args:
        reader: The dataset. It is not closed.
        url: The store. It is created if it does not exist.
        resume: Continue an earlier import. If False, the store must not exist.
        verify: Read every episode back, including those of earlier runs, and compare it with the dataset.
        progress: Called with the episodes done and the total. With ``verify``, each episode counts twice.
        storage_options: As in `trajstore.open`.
        fsync: As in `trajstore.open`.
        commit_steps: As in `Store.writer`.
        commit_seconds: As in `Store.writer`.
        buffer_bytes: As in `Store.writer`.

    Raises:
        StoreExistsError: The store holds something else.
        DataError: The store cannot hold an episode. The episodes before it are written.
        CorruptionError: The store differs from the dataset.
    """
    keys, schema = _read_keys(reader), _add_key_column(reader.schema)
    try:
        store = create_imported(url, schema, exist_ok=resume, storage_options=storage_options, fsync=fsync)
    except SchemaError as error:
        raise StoreExistsError(f"{reader.display} can't be imported into the store: {error}") from error
    committed, unended = _find_committed(store.snapshot)
    _check_same_dataset(reader, store, keys, committed)
    counter = _ProgressCounter(progress, len(keys) * (2 if verify else 1))
    counter.add(len(committed))
    missing = [key for key in keys if key not in committed]
    n_steps = 0
    if missing or unended:
        with store.writer(
            _WRITER_NAME,
            commit_steps=commit_steps,
            commit_seconds=commit_seconds,
            buffer_bytes=buffer_bytes,
            dead=_unsealed_import_streams(store),
        ) as writer:
            written, n_steps = _append_episodes(reader, writer, missing, unended, counter)
        committed = {**committed, **written}
    _check_complete(store, len(keys))
    if verify:
        _verify_import(reader, store.snapshot, ((key, committed[key]) for key in keys), counter)
    n_verified = len(keys) if verify else 0
    return ConversionReport(reader.display, store.url, len(missing), len(keys) - len(missing), n_steps, n_verified)


def _read_keys(reader: DatasetReader) -> list[str]:
    keys = list(reader.keys())
    if not keys:
        raise DataError(f"{reader.display} holds no episodes")
    if len(set(keys)) < len(keys):
        raise DataError(f"{reader.display} has several episodes with the same name; expected every name once")
    return keys


def _add_key_column(schema: Schema) -> Schema:
    return Schema(
        nest(schema.fields),
        episode={KEY_COLUMN: str, **schema.episode},
        reward=schema.reward,
        reward_alignment=schema.reward_alignment,
    )


def _find_committed(snapshot: Snapshot) -> tuple[dict[str, EpisodeKey], dict[str, list[int]]]:
    """Return the complete episodes by name, and the numbers of incomplete episodes by stream."""
    table, where = snapshot.episodes, snapshot.storage.display
    committed: dict[str, EpisodeKey] = {}
    unended: dict[str, list[int]] = {}
    for i in range(len(table)):  # one row at a time: the metadata of all episodes together may be large
        name, key = table.row(i)[KEY_COLUMN], table.key(i)
        if not _is_import_stream(key.stream):
            raise StoreExistsError(
                f"{where}: stream '{key.stream}' was not written by an import; import into a new store"
            )
        if name is None:  # an episode gets its name when it ends
            unended.setdefault(key.stream, []).append(key.episode)
        elif committed.setdefault(name, key) != key:
            raise StoreExistsError(f"{where} has episode '{name}' twice; import into a new store")
    return committed, unended


def _check_same_dataset(
    reader: DatasetReader, store: Store, keys: Sequence[str], committed: Mapping[str, EpisodeKey]
) -> None:
    """Refuse a store of a different dataset, by its episode names and its first and last episode."""
    known = set(keys)
    others = [name for name in committed if name not in known]
    if others:
        raise StoreExistsError(
            f"{store.url} has episode '{others[0]}', which {reader.display} does not have;"
            " import into another store"
        )
    if committed:
        first, *_, last = (*committed, *committed)
        ends = {name: committed[name] for name in (first, last)}
        try:
            _verify_import(reader, store.snapshot, ends.items(), _ProgressCounter(None, 0))
        except CorruptionError as error:
            raise StoreExistsError(f"{store.url} holds a different dataset, or is damaged: {error}") from error


def _unsealed_import_streams(store: Store) -> list[str]:
    return [record.id for record in store.streams if _is_import_stream(record.id) and not record.is_sealed]


def _is_import_stream(stream: str) -> bool:
    return stream.rpartition("-")[0] == _WRITER_NAME


def _append_episodes(
    reader: DatasetReader,
    writer: Writer,
    missing: Sequence[str],
    unended: Mapping[str, Sequence[int]],
    counter: _ProgressCounter,
) -> tuple[dict[str, EpisodeKey], int]:
    """Write episodes; return their keys in the store and their total number of steps."""
    if unended:
        writer.set_view(discarded=unended)
        writer.wait(writer.publish_view())
    written: dict[str, EpisodeKey] = {}
    try:
        for name in missing:
            written[name] = _append_episode(reader, writer, name)
            counter.add()
    except BaseException:
        # Keep the complete episodes: leaving the writer by an exception would discard them.
        with contextlib.suppress(TrajstoreError):
            writer.commit()
        raise
    return written, writer.stats()["steps"]


def _append_episode(reader: DatasetReader, writer: Writer, name: str) -> EpisodeKey:
    episode = reader.read(name)
    try:
        return writer.append_episode(
            episode.steps,
            terminated=episode.terminated,
            truncated=episode.truncated,
            metadata={**episode.metadata, KEY_COLUMN: name},
        )
    except DataError as error:
        raise DataError(f"{reader.display}: episode '{name}': {error}") from error


def _check_complete(store: Store, n: int) -> None:
    if len(store.refresh().episodes) != n:
        raise CorruptionError(
            f"{store.url}: expected the {n} episodes of the dataset, got {len(store)};"
            " is another import writing to the store?"
        )


def _verify_import(
    reader: DatasetReader, snapshot: Snapshot, episodes: Iterable[tuple[str, EpisodeKey]], counter: _ProgressCounter
) -> None:
    """Compare episodes of the store, given as (name, key in the store), with those of the dataset."""
    schema = snapshot.schema
    assert schema is not None  # import_episodes created the store with a schema
    for name, key in episodes:
        expected, got = reader.read(name), read_stored_episode(snapshot, snapshot.episodes.find(key))
        difference = (
            find_step_difference(expected.steps, got.steps)
            or find_end_difference(expected, got)
            or find_metadata_difference(schema, {**expected.metadata, KEY_COLUMN: name}, got.metadata)
        )
        if difference:
            raise CorruptionError(f"{snapshot.storage.display}: episode '{name}' of {reader.display}: {difference}")
        counter.add()


# ---- export --------------------------------------------------------------------------------------------


def export_episodes(
    store: Store | Url,
    writer: DatasetWriter,
    *,
    where: Callable[[EpisodeTable], Array] | None = None,
    fields: Collection[str] | None = None,
    reread: Callable[[], DatasetReader] | None = None,
    progress: Progress | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> ConversionReport:
    """Write episodes of a store to a dataset of another library, in the order of the episode table.

    A run that was interrupted can be repeated, and continues. Open episodes are written up to their last committed
    step. Memory holds one episode (two while verifying), and what the writer collects before it writes.

    Args:
        store: The store, as opened or last refreshed, or its URL.
        writer: The dataset. It is finished; if the run fails, its episodes are kept for the next run.
        where: Takes the episode table and returns a bool per episode; only episodes with True are written.
        fields: Paths of fields or groups to write; by default all.
        reread: Opens the finished dataset. If given, every episode is read back and compared with what the writer
            should have kept of it. Fields that only the dataset has are ignored, and so are metadata.
        progress: Called with the episodes done and the total. With ``reread``, each episode counts twice.
        storage_options: As in `trajstore.open`, if ``store`` is a URL.

    Raises:
        DataError: The format cannot hold an episode. The dataset does not appear.
        CorruptionError: The dataset differs from the store. It stays under its name.
    """
    try:
        opened = store if isinstance(store, Store) else open_store(store, storage_options=storage_options)
        selection = _Selection(opened.snapshot, _select_rows(opened.episodes, where), fields)
        selection.check(opened.url)
        n = len(selection.rows)
        counter = _ProgressCounter(progress, n if reread is None else 2 * n)
        n_skipped = _count_written(writer, selection)
        counter.add(n_skipped)
        n_steps = _write(writer, selection, n_skipped, counter)
        writer.finish()
    except BaseException as error:
        _suspend(writer, error)
        raise
    if reread is not None:
        with contextlib.closing(reread()) as reader:
            _verify_export(reader, writer, selection, counter)
    n_left_out = int(opened.episodes["length"][selection.rows[n_skipped:]].sum()) - n_steps
    n_verified = 0 if reread is None else n
    return ConversionReport(opened.url, writer.display, n - n_skipped, n_skipped, n_steps, n_verified, n_left_out)


def _suspend(writer: DatasetWriter, error: BaseException) -> None:
    try:
        writer.suspend()
    except Exception as failure:  # raise the first error, with this one as a note
        error.add_note(f"trajstore: the written episodes could not be kept: {failure}")


def read_stored_episode(snapshot: Snapshot, i: int, fields: Collection[str] | None = None) -> Episode:
    """Read row ``i`` of the episode table and its steps. The key of an ended episode never changes."""
    row = snapshot.episodes.row(i)
    declared = {name: row[name] for name in snapshot.schema.episode} if snapshot.schema else {}
    metadata = {name: value for name, value in declared.items() if value is not None} | row["metadata"]
    is_terminated, is_truncated = row["end"] == "terminated", row["end"] == "truncated"
    return Episode(
        _episode_name(row), snapshot.read_episode(i, fields=fields), is_terminated, is_truncated, metadata
    )


def _episode_name(row: Mapping[str, Any]) -> str:
    # An open episode may have more steps in the next run. Its length makes it a different episode then.
    length = f"/{row['length']}" if row["end"] == "open" else ""
    return f"{row['stream']}/{row['episode']}{length}"


@dataclass(frozen=True, slots=True)
class _Selection:
    """The part of a store that is exported."""

    snapshot: Snapshot
    rows: list[int]  # of the episode table
    fields: Collection[str] | None

    def check(self, url: str) -> None:
        """Refuse a selection that no format can hold."""
        if not self.rows:
            raise DataError(f"{url} has no episodes with steps that match")
        schema = self.snapshot.schema
        assert schema is not None  # a store with episodes has a schema
        try:
            paths = selected_paths(schema, self.fields)
        except KeyError as error:
            raise DataError(f"{url}: {error.args[0]}") from error
        if all(schema[path].final for path in paths):
            raise DataError(f"{url}: all selected fields have final values, so the number of steps is ambiguous")

    def episode(self, n: int) -> Episode:
        """Read the ``n``-th episode. The first one also gets the facts about the whole dataset."""
        episode = read_stored_episode(self.snapshot, self.rows[n], self.fields)
        facts = as_mapping(self.snapshot.episodes.metadata(0).get(_DATASET_FACTS)) if n == 0 else {}
        return replace(episode, metadata={**episode.metadata, _DATASET_FACTS: facts}) if facts else episode


def _select_rows(table: EpisodeTable, where: Callable[[EpisodeTable], Array] | None) -> list[int]:
    has_steps = np.asarray(table["length"]) > 0
    chosen = has_steps if where is None else has_steps & np.asarray(where(table), bool)
    return [int(i) for i in np.flatnonzero(chosen)]


def _count_written(writer: DatasetWriter, selection: _Selection) -> int:
    written, table = list(writer.written_keys()), selection.snapshot.episodes
    if written != [_episode_name(table.row(i)) for i in selection.rows[: len(written)]]:
        raise DataError(
            f"{writer.display}: the files of an unfinished export next to it hold other episodes; remove them"
        )
    return len(written)


def _write(writer: DatasetWriter, selection: _Selection, n_skipped: int, counter: _ProgressCounter) -> int:
    """Write the episodes from number ``n_skipped`` on; return the number of steps written."""
    n_steps = 0
    for n in range(n_skipped, len(selection.rows)):
        episode = selection.episode(n)
        try:
            kept = writer.trim(episode)
            writer.write(kept)
        except DataError as error:
            raise DataError(f"{writer.display}: episode '{episode.key}': {error}") from error
        n_steps += _count_episode_steps(kept)
        counter.add()
    return n_steps


def _count_episode_steps(episode: Episode) -> int:
    return count_steps(flatten(episode.steps))


def _verify_export(
    reader: DatasetReader, writer: DatasetWriter, selection: _Selection, counter: _ProgressCounter
) -> None:
    """Compare the episodes of a dataset with what the writer should have kept, in order."""
    keys, numbers = reader.keys(), _find_nonempty(writer, selection)
    counter.add(len(selection.rows) - len(numbers))
    if len(keys) != len(numbers):
        raise CorruptionError(f"{reader.display}: expected {len(numbers)} episodes, got {len(keys)}")
    for n, key in zip(numbers, keys, strict=True):
        expected, got = writer.trim(selection.episode(n)), reader.read(key)
        is_ended = end_name(got) != "cut"  # some formats do not store ends
        difference = find_step_difference(expected.steps, got.steps) or (
            find_end_difference(expected, got) if is_ended else None
        )
        if difference:
            raise CorruptionError(f"{reader.display}: episode '{key}': {difference}")
        counter.add()


def _find_nonempty(writer: DatasetWriter, selection: _Selection) -> list[int]:
    """Return the numbers of the episodes that have steps in the dataset: a writer may drop the only step of one."""
    lengths = selection.snapshot.episodes["length"][selection.rows]
    return [
        n
        for n, length in enumerate(lengths)
        if length > 1 or _count_episode_steps(writer.trim(selection.episode(n)))
    ]
