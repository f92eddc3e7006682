"""ObjectRL's replay buffer over trajstore: the same calls and shapes, and the behaviour that its docs promise."""

from __future__ import annotations

import glob
import json
import os
import re
import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import torch

from trajstore.arguments import check_positive, parse_bytes
from trajstore.compat.options import SamplingOptionsDict, check_options
from trajstore.compat.private_store import free_private_store, free_with_buffer, private_url
from trajstore.errors import ClosedError, DataError, MissingExtraError, NotReadyError
from trajstore.replay.buffer import ReplayBuffer as Buffer
from trajstore.sampling.windows import Windows
from trajstore.schema import Array, Schema, flatten, nest
from trajstore.storage import open_storage
from trajstore.storage.atomic_files import replace_text
from trajstore.store.store import Store, create
from trajstore.store.store import open as open_store
from trajstore.writing.staging import staged_rows

try:
    from tensordict import TensorDict, TensorDictBase
except ImportError as error:
    raise MissingExtraError("trajstore.compat.objectrl needs tensordict: pip install tensordict") from error

_EPISODE_STEPS = 1024  # transitions per episode of the store; bounds the size of the open episode
_GROUP = "transition"  # group of all fields, so that their names cannot collide with other keys of a batch
_TRANSITIONS = Windows(squeeze=True, fields=(_GROUP,))
_BLOCK_STEPS, _BLOCK_BYTES = 8192, 1 << 25  # bounds of a block of transitions that is copied at once
_OWN_OPTIONS = {
    "capacity": "say how many transitions to keep with buffer_size",
    "sample": "single transitions are drawn",
}
_SAVED_STORE = re.compile(r"-[0-9a-f]{12}\.trajstore")

Indices = Sequence[int] | torch.Tensor | range


class ReplayBuffer:
    """A ring of transitions, sampled uniformly with replacement; for use by one thread.

    It does what ObjectRL's documentation says, also where ObjectRL's code does not: `sample_by_index_fields` works,
    `sample_all` is in order of time, `get_next_batch` falls back to random batches on a fresh buffer, `reset` ends
    iterators, `load` restores the data, and transitions with other fields are refused. Draws have their own seed.

    A *place* is an index in the ring, 0 to ``buffer_size`` - 1.

    Args:
        device: Device of the batches.
        storing_device: Device of the cache of decoded transitions.
        buffer_size: Transitions to keep; the oldest are evicted first.
        print_gc_warning: Accepted and ignored.
        url: A directory or object store. Each session and each `reset` uses a new store below it: ``<url>/0``,
            ``<url>/1``, ... By default transitions are kept compressed in RAM.
        seed: Seed of the draws.
        options: Further options of `trajstore.ReplayBuffer`: ``cache_bytes``, ``buffer_bytes``, ...
    """

    def __init__(
        self,
        device: torch.device | str,
        storing_device: torch.device | str,
        buffer_size: int,
        print_gc_warning: bool = False,
        *,
        url: str | os.PathLike[str] | None = None,
        seed: int = 0,
        **options: Unpack[SamplingOptionsDict],
    ) -> None:
        check_options(type(self).__init__, options, _OWN_OPTIONS)
        check_positive("buffer_size", buffer_size)
        self.device, self.storing_device = torch.device(device), torch.device(storing_device)
        self.buffer_size = buffer_size
        self._is_private = url is None
        self._url = private_url("objectrl") if url is None else os.fspath(url)
        # A private store has no other readers, and its commits make nothing durable.
        defaults: dict[str, Any] = {"commit_seconds": None, "grace_s": 0.0} if url is None else {}
        self._seed, self._options = seed, {**defaults, **options}
        self._n_resets = self._n_added = 0
        self._first_place = 0  # place of the first transition; after `load` it may not be 0
        self._iterator: Iterator[Any] | None = None
        self._buffer: Buffer | None = None
        self._is_closed = False
        stores = [] if url is None else _existing_stores(self._url, options.get("storage_options"))
        self._store_number = max(stores, default=-1)

    # ---- adding

    @property
    def memory(self) -> Buffer:
        """The underlying `trajstore.ReplayBuffer`.

        Raises:
            ClosedError: This buffer is closed.
        """
        self._check_open()
        if self._buffer is None:
            self._buffer = self._create(self.buffer_size)
        return self._buffer

    def _create(self, buffer_size: int, schema: Schema | None = None) -> Buffer:
        """Create a buffer with a new store, so that the transitions of sessions are not mixed."""
        self._store_number += 1
        buffer = Buffer(
            f"{self._url}/{self._store_number}",
            schema=schema,
            capacity=buffer_size + buffer_size // 128 + 2,  # evictions happen in bulk, so keep some more
            device=str(self.storing_device),
            sample=_TRANSITIONS,
            seed=self._seed + self._n_resets,
            **self._options,
        )
        if self._is_private:
            free_with_buffer(buffer, buffer.url)
        return buffer

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError("the buffer is closed")

    def reset(self, buffer_size: int | None = None) -> None:
        """Remove all transitions, end iterators, and set a new size if one is given. New fields may follow."""
        self._check_open()
        if buffer_size is not None:
            check_positive("buffer_size", buffer_size)
            self.buffer_size = buffer_size
        self._release()
        self._n_resets, self._n_added, self._iterator = self._n_resets + 1, 0, None
        self._first_place = 0

    def resize(self, buffer_size: int) -> None:
        """Change the number of transitions to keep; the newest ones stay."""
        check_positive("buffer_size", buffer_size)
        n = min(len(self), buffer_size)
        schema = self.memory.schema if n else None
        self._refill(buffer_size, schema, _blocks(self, n) if n else ())

    def _refill(self, buffer_size: int, schema: Schema | None, blocks: Iterable[Mapping[str, Any]]) -> None:
        """Replace the transitions by those of some blocks; if that fails, nothing is changed."""
        new, n_new = self._create(buffer_size, schema), 0
        try:
            for block in blocks:
                n_new = _extend(new, block, n_new)
        except BaseException:
            new.close()
            raise
        self.reset(buffer_size)
        self._buffer, self._n_added = new, n_new

    def close(self) -> None:
        """Release memory and threads; data at a URL stays there."""
        self._release()
        self._is_closed = True
        if self._is_private:
            free_private_store(self._url)

    def _release(self) -> None:
        if self._buffer is not None:
            url = self._buffer.url
            self._buffer.close()
            self._buffer = None
            if self._is_private:
                free_private_store(url)

    def add(self, experience: TensorDictBase) -> None:
        """Add one transition.

        Raises:
            DataError: Its fields, shapes or dtypes differ from earlier transitions; nothing was added.
        """
        is_last = (self._n_added + 1) % _EPISODE_STEPS == 0
        self.memory.append({_GROUP: _to_dict(_without_index(experience))}, env=0, truncated=is_last)
        self._n_added += 1

    def add_batch(self, batch: TensorDictBase) -> None:
        """Add transitions ``[n, ...]`` in order; if there are more than `buffer_size`, the last ones stay.

        Raises:
            DataError: The data is not a batch, has no fields, or differs from earlier transitions.
        """
        if not batch.batch_size:
            raise DataError(f"add_batch: expected a batch of transitions, got batch_size {tuple(batch.batch_size)}")
        rows = _to_dict(_without_index(batch))
        if not flatten(rows):
            raise DataError("add_batch: expected transitions with at least one field, got none")
        self._n_added = _extend(self.memory, rows, self._n_added)

    # ---- contents

    @property
    def data_size(self) -> int:
        return min(self._n_added, self.buffer_size)

    @property
    def pointer(self) -> int:
        """The place of the next transition."""
        return (self._first_place + self._n_added) % self.buffer_size

    @property
    def size(self) -> int:
        return self.data_size

    def __len__(self) -> int:
        return self.data_size

    # ---- sampling

    def sample_batch(self, batch_size: int) -> TensorDict:
        """Draw transitions uniformly, with replacement; ``index`` holds their places.

        Raises:
            NotReadyError: The buffer is empty.
        """
        if not self._n_added:
            raise NotReadyError("the buffer is empty: add transitions before sampling")
        recent = self.buffer_size if self._n_added > self.buffer_size else None
        batch = self.memory.sample(batch_size, recent_steps=recent)
        return self._to_batch(batch)

    sample_random = sample_batch

    def sample_by_index(self, indices: Indices) -> TensorDict:
        """Return the transitions at places 0 to `size` - 1, as in ``index``; negative places count from the end.

        Raises:
            IndexError: A place does not exist.
        """
        place, n = _place_array(indices), self.data_size
        if len(place) and not (-n <= place.min() and place.max() < n):
            raise IndexError(f"indices: expected {-n} to {n - 1}, got {int(place.min())} to {int(place.max())}")
        return self._read(self._newest_numbers(np.where(place < 0, place + n, place)))

    def sample_by_index_fields(
        self, indices: Indices, fields: Sequence[str]
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Return fields of the transitions at places: a tensor for one field, a tuple of tensors for several.

        Raises:
            KeyError: A field does not exist.
        """
        batch = self.sample_by_index(indices)
        if missing := [name for name in fields if name not in batch.keys(include_nested=True)]:
            known = ", ".join(sorted(str(key) for key in batch.keys() if key != "index"))  # noqa: SIM118
            raise KeyError(f"no field {missing[0]!r}; the fields are {known}")
        found = tuple(batch[name] for name in fields)
        return found[0] if len(found) == 1 else found

    def sample_all(self) -> TensorDict:
        """Return all transitions, oldest first."""
        if not self._n_added:
            raise NotReadyError("the buffer is empty: add transitions before sampling")
        return self._read(np.arange(self._n_added - self.data_size, self._n_added))

    def _newest_numbers(self, place: Array) -> Array:
        """Return the number of the transition that is at each place now; numbers count all added transitions."""
        newest = self._n_added - 1
        number: Array = newest - (newest + self._first_place - place) % self.buffer_size
        return number

    def _read(self, number: Array) -> TensorDict:
        """Return the transitions with these numbers."""
        if not len(number):
            return self.sample_by_index([0])[:0]
        stream = self.memory.streams.index(self.memory.stream)
        handles = np.stack([np.full(len(number), stream), number // _EPISODE_STEPS, number % _EPISODE_STEPS], 1)
        return self._to_batch(self.memory.at(torch.from_numpy(handles.astype(np.int64))))

    def _to_batch(self, batch: Mapping[str, Any]) -> TensorDict:
        handle = batch["index"]
        place = (self._first_place + handle[:, 1] * _EPISODE_STEPS + handle[:, 2]) % self.buffer_size
        fields = {**batch[_GROUP], "index": place}
        return TensorDict(fields, batch_size=[len(place)], device=self.storing_device).to(self.device)

    # ---- epochs

    def create_epoch_iterator(
        self, batch_size: int, n_epochs: int = 1, *, shuffle: bool = False, drop_last: bool = False
    ) -> Iterator[TensorDict]:
        """Return an iterator over all current transitions in order of places; `get_next_batch` uses it too.

        If a transition was evicted before its turn, the one that took its place comes instead. `reset` ends the
        iterator.

        Args:
            batch_size: Size of a batch; the last one of an epoch may be smaller.
            n_epochs: Number of epochs.
            shuffle: Use another random order in each epoch.
            drop_last: Leave out the last batch of an epoch if it is not full.
        """
        check_positive("batch_size", batch_size)
        self._check_open()
        numbers = self._newest_numbers(np.arange(self.data_size))
        self._iterator = self._epochs(numbers, batch_size, n_epochs, shuffle, drop_last)
        return self._iterator

    def _epochs(
        self, numbers: Array, batch_size: int, n_epochs: int, shuffle: bool, drop_last: bool
    ) -> Iterator[TensorDict]:
        generator, n_resets = np.random.default_rng([self._seed, self._n_added]), self._n_resets
        for _ in range(n_epochs):
            order = generator.permutation(numbers) if shuffle else numbers
            for start in range(0, len(order), batch_size):
                if n_resets != self._n_resets:
                    return
                chosen = order[start : start + batch_size]
                if len(chosen) == batch_size or not drop_last:
                    yield self._read(self._held_or_successor(chosen))

    def _held_or_successor(self, number: Array) -> Array:
        """Return the numbers; for evicted transitions, those of the transitions that took their places."""
        is_held = number > self._n_added - 1 - self.buffer_size
        return np.where(is_held, number, self._newest_numbers((self._first_place + number) % self.buffer_size))

    def get_next_batch(self, batch_size: int) -> TensorDict:
        """Return the next batch of the epoch iterator; without an iterator, a random batch.

        Raises:
            StopIteration: The iterator is at its end.
        """
        return self.sample_batch(batch_size) if self._iterator is None else next(self._iterator)

    def calculate_num_batches(self, batch_size: int) -> int:
        """Return the number of batches of an epoch, including a last one that is not full."""
        check_positive("batch_size", batch_size)
        return -(-self.data_size // batch_size)

    def get_steps_and_iterator(self, n_epochs: int, max_iter: int, batch_size: int) -> int:
        """Return how many batches to learn from, and create the iterator for them.

        With ``n_epochs`` of 0 or less, there is no iterator, and the number is ``max_iter``.
        """
        if n_epochs <= 0:
            self._iterator = None
            return max_iter
        self.create_epoch_iterator(batch_size, n_epochs)
        return n_epochs * self.calculate_num_batches(batch_size)

    # ---- files

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write ``<path>.metadata`` and beside it a store with all transitions; if that fails, nothing is changed.

        Raises:
            DataError: The metadata file exists and was not written by this class.
        """
        self._check_open()
        metadata = Path(f"{os.fspath(path)}.metadata")
        metadata.parent.mkdir(parents=True, exist_ok=True)
        if metadata.exists():
            _read_metadata(metadata)  # refuses to replace a file that this class did not write
        store_name = f"{metadata.stem}-{uuid.uuid4().hex[:12]}.trajstore"
        counts = {"buffer_size": self.buffer_size, "data_size": len(self), "pointer": self.pointer}
        try:
            if len(self):
                with create(metadata.parent / store_name, self.memory.schema).writer(commit_seconds=None) as writer:
                    for block in _blocks(self, self.data_size):
                        writer.append_episode({_GROUP: block})
            replace_text(metadata, json.dumps({**counts, "store": store_name}))
        except BaseException:
            shutil.rmtree(metadata.parent / store_name, ignore_errors=True)
            raise
        for other in metadata.parent.glob(f"{glob.escape(metadata.stem)}-*.trajstore"):
            if other.name != store_name and _SAVED_STORE.fullmatch(other.name.removeprefix(metadata.stem)):
                shutil.rmtree(other, ignore_errors=True)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Restore what `save` wrote: the size, the transitions and the place of the next one.

        Raises:
            DataError: The file was not written by this class; ObjectRL's own files hold no transitions.
        """
        self._check_open()
        metadata = Path(f"{os.fspath(path)}.metadata")
        saved = _read_metadata(metadata)
        counts = [saved.get(name) for name in ("buffer_size", "data_size", "pointer")]
        is_ours = isinstance(saved.get("store"), str) and "/" not in saved["store"]
        if not is_ours or not all(type(n) is int and n >= 0 for n in counts):
            raise DataError(f"{metadata}: expected a file that this class saved; ObjectRL's own files hold no data")
        buffer_size, data_size, pointer = (int(n) for n in counts if n is not None)
        if data_size:
            store = open_store(metadata.parent / saved["store"])
            self._refill(buffer_size, store.schema, (_read_block(store, i) for i in range(len(store))))
        else:
            self.reset(buffer_size)
        # The oldest transition keeps its place.
        self._first_place = (pointer - data_size) % self.buffer_size


def _read_metadata(path: Path) -> dict[str, Any]:
    try:
        metadata = json.loads(path.read_text())
    except (UnicodeDecodeError, ValueError) as error:
        raise DataError(f"{path}: expected a file that this class saved: {error!r:.200}") from error
    return metadata if isinstance(metadata, dict) else {}


def _existing_stores(url: str, storage_options: Mapping[str, Any] | None) -> list[int]:
    """Return the numbers of the stores that earlier sessions created below a URL."""
    return [int(name) for name in open_storage(url, storage_options).list_names("") if name.isdecimal()]


def _without_index(data: TensorDictBase) -> TensorDictBase:
    """Remove the places that a batch of this buffer contains; they are not stored."""
    return data.exclude("index") if "index" in data.keys() else data  # noqa: SIM118 - a TensorDict


def _to_dict(data: TensorDictBase) -> dict[str, Any]:
    """Return a TensorDict as nested dicts of detached tensors."""
    return {k: _to_dict(v) if isinstance(v, TensorDictBase) else v.detach() for k, v in data.items()}


def _place_array(indices: Indices) -> Array:
    place = torch.as_tensor(list(indices) if isinstance(indices, range) else indices)
    if place.ndim == 1 and not place.numel():
        return np.empty(0, np.int64)
    if place.ndim != 1 or place.dtype in (torch.bool, torch.float32, torch.float64):
        raise TypeError(f"indices: expected some integers [n], got {place.dtype} of shape {tuple(place.shape)}")
    return place.cpu().numpy().astype(np.int64)


def _extend(buffer: Buffer, rows: Mapping[str, Any], n_before: int) -> int:
    """Append transitions ``[n, ...]`` in blocks.

    Args:
        buffer: The buffer.
        rows: The transitions.
        n_before: Number of transitions that were added before.

    Returns:
        The number of transitions added in total.
    """
    flat = flatten(rows)
    n = len(next(iter(flat.values())))
    row_bytes = sum(leaf[:1].nbytes for leaf in flat.values())
    block = staged_rows(parse_bytes(buffer.options.buffer_bytes, "buffer_bytes"), row_bytes)
    for start in range(0, n, block):
        part = nest({path: leaf[start : start + block, None] for path, leaf in flat.items()})
        number = n_before + start + np.arange(min(block, n - start)) + 1
        buffer.extend({_GROUP: part}, envs=[0], truncated=(number % _EPISODE_STEPS == 0)[:, None])
    return n_before + n


def _read_block(store: Store, i: int) -> dict[str, Any]:
    """Read one block of transitions, which is an episode of a saved store."""
    assert store.schema is not None
    found = {path: torch.from_numpy(leaf) for path, leaf in flatten(store.read_episode(i)).items()}
    for path, leaf in found.items():
        if store.schema[path].dtype == "bfloat16":  # numpy does not have it
            found[path] = leaf.to(torch.bfloat16)
    steps: dict[str, Any] = nest(found)[_GROUP]
    return steps


def _blocks(buffer: ReplayBuffer, n: int) -> Iterator[dict[str, Any]]:
    """Yield the newest ``n`` transitions, oldest first, in blocks."""
    stop, schema = buffer._n_added, buffer.memory.schema
    assert schema is not None
    size = max(1, min(_BLOCK_STEPS, _BLOCK_BYTES // schema.row_bytes))
    for start in range(stop - n, stop, size):
        yield _to_dict(_without_index(buffer._read(np.arange(start, min(start + size, stop))).cpu()))
