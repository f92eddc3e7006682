"""ObjectRL's replay buffer over trajstore: the same calls, the same shapes, and what its documentation promises."""

from __future__ import annotations

import glob
import json
import os
import re
import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trajstore.arguments import check_positive, parse_bytes
from trajstore.compat.exit_flush import cancel_finish_at_exit, finish_at_exit
from trajstore.compat.options import check_options
from trajstore.compat.private_store import free_private_store, private_url
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
    raise MissingExtraError(
        "trajstore.compat.objectrl needs tensordict: pip install 'trajstore[tensordict]'"
    ) from error

_EPISODE = 1024  # steps that stand together, so that what is still growing stays small
_FIELD = "transition"  # keeps fields apart from what batches hold besides
_ROWS = Windows(squeeze=True, fields=(_FIELD,))
_BLOCK, _BLOCK_BYTES = 8192, 1 << 25
_OWN = {"capacity": "say how many transitions to keep with buffer_size", "sample": "single transitions are drawn"}
_SAVED = re.compile(r"-[0-9a-f]{12}\.trajstore")

Indices = Sequence[int] | torch.Tensor | range


class ReplayBuffer:
    """A ring of so many transitions, sampled uniformly with replacement; for one thread.

    As documented by ObjectRL, but for what was broken there: `sample_by_index_fields` works, `sample_all` is in
    order of time, `get_next_batch` falls back to random batches on a fresh buffer, `reset` forgets iterators,
    `load` restores the data, a transition with other fields is refused, and draws have a seed of their own.

    Args:
        device: Where batches go.
        storing_device: Where decoded transitions are kept.
        buffer_size: How many are kept; the oldest go first.
        print_gc_warning: Accepted, and without a meaning here.
        url: A directory or object store to keep them at, each session and each `reset` in a store of its own below
            it: ``<url>/0``, ``<url>/1``, ...; by default compressed in RAM.
        seed: Of the draws.
        options: Further ones of `trajstore.ReplayBuffer`: ``cache_bytes``, ``buffer_bytes``, ...
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
        **options: Any,
    ) -> None:
        check_options(type(self).__init__, options, _OWN)
        check_positive("buffer_size", buffer_size)
        self.device, self.storing_device = torch.device(device), torch.device(storing_device)
        self.buffer_size = buffer_size
        self._is_private = url is None
        self._url = private_url("objectrl") if url is None else os.fspath(url)
        # What is in RAM nobody else reads, and no commit saves it.
        defaults: dict[str, Any] = {"commit_seconds": None, "grace_s": 0.0} if url is None else {}
        self._seed, self._options = seed, defaults | options
        self._n_resets = self._n_added = self._first_place = 0
        self._iterator: Iterator[Any] | None = None
        self._buffer: Buffer | None = None
        self._is_closed = False
        if url is not None:
            finish_at_exit(self, _flush)
        self._place = -1 if url is None else max(_places(self._url, options.get("storage_options")), default=-1)

    # ---- adding

    @property
    def memory(self) -> Buffer:
        """The buffer behind, for whatever this face has no method for.

        Raises:
            ClosedError: This one is closed.
        """
        self._check()
        if self._buffer is None:
            self._buffer = self._made(self.buffer_size)
        return self._buffer

    def _made(self, buffer_size: int, schema: Schema | None = None) -> Buffer:
        """A buffer at a place of its own: sessions do not mix."""
        self._place += 1
        return Buffer(
            f"{self._url}/{self._place}",
            schema=schema,
            capacity=buffer_size + buffer_size // 128 + 2,  # evictions are made in bulk
            device=str(self.storing_device),
            sample=_ROWS,
            seed=self._seed + self._n_resets,
            **self._options,
        )

    def _check(self) -> None:
        if self._is_closed:
            raise ClosedError("the buffer is closed")

    def reset(self, buffer_size: int | None = None) -> None:
        """Forget everything, iterators included, and take another size if one is given; fields may differ then."""
        self._check()
        if buffer_size is not None:
            check_positive("buffer_size", buffer_size)
            self.buffer_size = buffer_size
        self._release()
        self._n_resets, self._n_added, self._iterator = self._n_resets + 1, 0, None
        self._first_place = 0

    def resize(self, buffer_size: int) -> None:
        """Keep another number of transitions from now on: the newest that there are stay."""
        check_positive("buffer_size", buffer_size)
        n = min(len(self), buffer_size)
        schema = self.memory.schema if n else None
        self._refill(buffer_size, schema, _blocks(self, n) if n else ())

    def _refill(self, buffer_size: int, schema: Schema | None, blocks: Iterable[Mapping[str, Any]]) -> None:
        """Go on with a buffer that holds these transitions; if that fails, with the one that there is."""
        new, n_new = self._made(buffer_size, schema), 0
        try:
            for block in blocks:
                n_new = _extend(new, block, n_new)
        except BaseException:
            new.close()
            raise
        self.reset(buffer_size)
        self._buffer, self._n_added = new, n_new

    def close(self) -> None:
        """Release memory and threads; what is at a URL stays there."""
        self._release()
        self._is_closed = True
        cancel_finish_at_exit(self)
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
            DataError: It has other fields than those before, or other shapes or dtypes; nothing was added.
        """
        is_last = (self._n_added + 1) % _EPISODE == 0
        self.memory.append({_FIELD: _plain(_without_places(experience))}, env=0, truncated=is_last)
        self._n_added += 1

    def add_batch(self, batch: TensorDictBase) -> None:
        """Add transitions ``[n, ...]`` in this order; of more than `buffer_size` the last ones stay."""
        if not batch.batch_size:
            raise DataError(f"add_batch: expected a batch of transitions, got batch_size {tuple(batch.batch_size)}")
        rows = _plain(_without_places(batch))
        if not flatten(rows):
            raise DataError("add_batch: expected transitions with some fields, got none")
        self._n_added = _extend(self.memory, rows, self._n_added)

    # ---- what there is

    @property
    def data_size(self) -> int:
        return min(self._n_added, self.buffer_size)

    @property
    def pointer(self) -> int:
        """The place that the next transition takes."""
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
            NotReadyError: There are none.
        """
        if not self._n_added:
            raise NotReadyError("the buffer is empty: add transitions before sampling")
        recent = self.buffer_size if self._n_added > self.buffer_size else None
        batch = self.memory.sample(batch_size, recent_steps=recent)
        return self._given(batch)

    sample_random = sample_batch

    def sample_by_index(self, indices: Indices) -> TensorDict:
        """The transitions at places 0 to `size` - 1, as `sample_batch` names them; below 0 they count from the end.

        Raises:
            IndexError: There is no such place.
        """
        place, n = _checked_places(indices), self.data_size
        if len(place) and not (-n <= place.min() and place.max() < n):
            raise IndexError(f"indices: expected {-n} to {n - 1}, got {int(place.min())} to {int(place.max())}")
        return self._at(self._numbers(np.where(place < 0, place + n, place)))

    def sample_by_index_fields(
        self, indices: Indices, fields: Sequence[str]
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Some fields of them: a tensor for one field, a tuple for several."""
        batch = self.sample_by_index(indices)
        if missing := [name for name in fields if name not in batch.keys(include_nested=True)]:
            known = ", ".join(sorted(str(key) for key in batch.keys() if key != "index"))  # noqa: SIM118
            raise KeyError(f"no field {missing[0]!r}; there are {known}")
        found = tuple(batch[name] for name in fields)
        return found[0] if len(found) == 1 else found

    def sample_all(self) -> TensorDict:
        """All transitions, oldest first."""
        if not self._n_added:
            raise NotReadyError("the buffer is empty: add transitions before sampling")
        return self._at(np.arange(self._n_added - self.data_size, self._n_added))

    def _numbers(self, place: Array, wanted: Array | None = None) -> Array:
        """How many were added before the newest transition at each place, or before those wanted that are here."""
        newest = self._n_added - 1
        number: Array = newest - (newest + self._first_place - place) % self.buffer_size
        return number if wanted is None else np.where(wanted > newest - self.buffer_size, wanted, number)

    def _at(self, number: Array) -> TensorDict:
        if not len(number):
            return self.sample_by_index([0])[:0]
        stream = self.memory.streams.index(self.memory.stream)
        handles = np.stack([np.full(len(number), stream), number // _EPISODE, number % _EPISODE], 1)
        return self._given(self.memory.at(torch.from_numpy(handles.astype(np.int64))))

    def _given(self, batch: Mapping[str, Any]) -> TensorDict:
        handle = batch["index"]
        place = (self._first_place + handle[:, 1] * _EPISODE + handle[:, 2]) % self.buffer_size
        fields = {**batch[_FIELD], "index": place}
        return TensorDict(fields, batch_size=[len(place)], device=self.storing_device).to(self.device)

    # ---- epochs

    def create_epoch_iterator(
        self, batch_size: int, n_epochs: int = 1, *, shuffle: bool = False, drop_last: bool = False
    ) -> Iterator[TensorDict]:
        """Batches over all that is there now, place after place, so many times; `get_next_batch` takes from it.

        A transition that is gone when its turn comes is replaced by the one that took its place. `reset` ends it.

        Args:
            batch_size: Of a batch; the last one of an epoch may be smaller.
            n_epochs: How many times.
            shuffle: In another random order each time.
            drop_last: Leave out a batch that is not full.
        """
        check_positive("batch_size", batch_size)
        self._check()
        numbers = self._numbers(np.arange(self.data_size))
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
                    yield self._at(self._numbers((self._first_place + chosen) % self.buffer_size, chosen))

    def get_next_batch(self, batch_size: int) -> TensorDict:
        """The next batch of the iterator; a random one where there is no iterator.

        Raises:
            StopIteration: The iterator is at its end.
        """
        return self.sample_batch(batch_size) if self._iterator is None else next(self._iterator)

    def calculate_num_batches(self, batch_size: int) -> int:
        """Batches of an epoch, a last one that is not full included."""
        check_positive("batch_size", batch_size)
        return -(-self.data_size // batch_size)

    def get_steps_and_iterator(self, n_epochs: int, max_iter: int, batch_size: int) -> int:
        """How many batches to learn from: of so many epochs, for which an iterator is made; or ``max_iter``."""
        if n_epochs <= 0:
            self._iterator = None
            return max_iter
        self.create_epoch_iterator(batch_size, n_epochs)
        return n_epochs * self.calculate_num_batches(batch_size)

    # ---- files

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write ``<path>.metadata`` and, beside it, a store with all transitions; whole, or as before."""
        self._check()
        metadata = Path(f"{os.fspath(path)}.metadata")
        metadata.parent.mkdir(parents=True, exist_ok=True)
        if metadata.exists():
            _known(metadata)  # refuses to replace a file of others
        place = f"{metadata.stem}-{uuid.uuid4().hex[:12]}.trajstore"
        about = {"buffer_size": self.buffer_size, "data_size": len(self), "pointer": self.pointer, "store": place}
        try:
            if len(self):
                with create(metadata.parent / place, self.memory.schema).writer(commit_seconds=None) as writer:
                    for block in _blocks(self, self.data_size):
                        writer.append_episode({_FIELD: block})
            replace_text(metadata, json.dumps(about))
        except BaseException:
            shutil.rmtree(metadata.parent / place, ignore_errors=True)
            raise
        for other in metadata.parent.glob(f"{glob.escape(metadata.stem)}-*.trajstore"):
            if other.name != place and _SAVED.fullmatch(other.name.removeprefix(metadata.stem)):
                shutil.rmtree(other, ignore_errors=True)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Go on with what `save` wrote: size, transitions and the place of the next one.

        Raises:
            DataError: The file holds no data: it is one of ObjectRL's own.
        """
        self._check()
        metadata = Path(f"{os.fspath(path)}.metadata")
        about = _known(metadata)
        counts = [about.get(name) for name in ("buffer_size", "data_size", "pointer")]
        is_ours = isinstance(about.get("store"), str) and "/" not in about["store"]
        if not is_ours or not all(type(n) is int and n >= 0 for n in counts):
            raise DataError(f"{metadata}: expected what this class saves; a file of ObjectRL's own holds no data")
        buffer_size, data_size, pointer = (int(n) for n in counts if n is not None)
        if data_size:
            store = open_store(metadata.parent / about["store"])
            self._refill(buffer_size, store.schema, (_tensors(store, i) for i in range(len(store))))
        else:
            self.reset(buffer_size)
        # Places are counted from the one that the oldest had.
        self._first_place = (pointer - data_size) % self.buffer_size


def _flush(buffer: ReplayBuffer) -> None:
    if buffer._buffer is not None:
        buffer._buffer.flush()


def _known(path: Path) -> dict[str, Any]:
    try:
        about = json.loads(path.read_text())
    except (UnicodeDecodeError, ValueError) as error:
        raise DataError(f"{path}: not what this class saves: {error!r:.200}") from error
    return about if isinstance(about, dict) else {}


def _places(url: str, storage_options: Mapping[str, Any] | None) -> list[int]:
    """Numbers of the stores that sessions before have left below a URL."""
    return [int(name) for name in open_storage(url, storage_options).list_names("") if name.isdecimal()]


def _without_places(data: TensorDictBase) -> TensorDictBase:
    """What is to be stored: places that a batch came with are not."""
    return data.exclude("index") if "index" in data.keys() else data  # noqa: SIM118 - a TensorDict


def _plain(data: TensorDictBase) -> dict[str, Any]:
    """Nested dicts of tensors."""
    return {k: _plain(v) if isinstance(v, TensorDictBase) else v.detach() for k, v in data.items()}


def _checked_places(indices: Indices) -> Array:
    place = torch.as_tensor(list(indices) if isinstance(indices, range) else indices)
    if place.ndim == 1 and not place.numel():
        return np.empty(0, np.int64)
    if place.ndim != 1 or place.dtype in (torch.bool, torch.float32, torch.float64):
        raise TypeError(f"indices: expected some integers [n], got {place.dtype} of shape {tuple(place.shape)}")
    return place.cpu().numpy().astype(np.int64)


def _extend(buffer: Buffer, rows: Mapping[str, Any], n_before: int) -> int:
    """Append transitions ``[n, ...]`` after so many others, some at a time; returns how many there are then."""
    flat = flatten(rows)
    n = len(next(iter(flat.values())))
    row_bytes = sum(leaf[:1].nbytes for leaf in flat.values())
    block = staged_rows(parse_bytes(buffer.options.buffer_bytes, "buffer_bytes"), row_bytes)
    for start in range(0, n, block):
        part = nest({path: leaf[start : start + block, None] for path, leaf in flat.items()})
        number = n_before + start + np.arange(min(block, n - start)) + 1
        buffer.extend({_FIELD: part}, envs=[0], truncated=(number % _EPISODE == 0)[:, None])
    return n_before + n


def _tensors(store: Store, i: int) -> dict[str, Any]:
    """An episode of a saved store; numpy has no bfloat16."""
    assert store.schema is not None
    found = {path: torch.from_numpy(leaf) for path, leaf in flatten(store.read_episode(i)).items()}
    for path, leaf in found.items():
        if store.schema[path].dtype == "bfloat16":
            found[path] = leaf.to(torch.bfloat16)
    steps: dict[str, Any] = nest(found)[_FIELD]
    return steps


def _blocks(buffer: ReplayBuffer, n: int) -> Iterator[dict[str, Any]]:
    """The newest ``n`` transitions, oldest first, some at a time."""
    stop, schema = buffer._n_added, buffer.memory.schema
    assert schema is not None
    size = max(1, min(_BLOCK, _BLOCK_BYTES // schema.row_bytes))
    for start in range(stop - n, stop, size):
        yield _plain(_without_places(buffer._at(np.arange(start, min(start + size, stop))).cpu()))
