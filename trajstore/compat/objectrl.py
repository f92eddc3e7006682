"""ObjectRL's replay buffer over trajstore: the same calls, the same shapes, and what its documentation promises."""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trajstore.compat.private import forget, private_url
from trajstore.errors import DataError, MissingExtraError, NotReadyError
from trajstore.replay import ReplayBuffer as Buffer
from trajstore.schema import Array
from trajstore.sizes import check_positive
from trajstore.store import create
from trajstore.store import open as open_store
from trajstore.windows import Windows

try:
    from tensordict import TensorDict, TensorDictBase
except ImportError as error:
    raise MissingExtraError(
        "trajstore.compat.objectrl needs tensordict: pip install 'trajstore[tensordict]'"
    ) from error

_EPISODE = 1024  # steps that stand together, so that what is still growing stays small
_FIELD = "transition"  # keeps fields apart from what batches hold besides
_ROWS = Windows(squeeze=True, fields=(_FIELD,))
_BLOCK = 8192

Indices = Sequence[int] | torch.Tensor | range


class ReplayBuffer:
    """A ring of so many transitions, sampled uniformly with replacement.

    As documented by ObjectRL, but for what was broken there: `sample_by_index_fields` works, `sample_all` is in
    order of time, `get_next_batch` falls back to random batches on a fresh buffer, `reset` forgets iterators,
    `load` restores the data, a transition with other fields is refused, and draws have a seed of their own.

    Args:
        device: Where batches go.
        storing_device: Where decoded transitions are kept.
        buffer_size: How many are kept; the oldest go first.
        print_gc_warning: Accepted, and without a meaning here.
        url: A directory or object store to keep them at; by default compressed in RAM.
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
        check_positive("buffer_size", buffer_size)
        self.device, self.storing_device = torch.device(device), torch.device(storing_device)
        self.buffer_size = buffer_size
        self._is_private = url is None
        self._url = private_url("objectrl") if url is None else os.fspath(url)
        self._seed, self._options = seed, options
        self._n_resets = self._n_added = self._first_place = 0
        self._iterator: Iterator[Any] | None = None
        self._buffer: Buffer | None = None

    # ---- adding

    @property
    def memory(self) -> Buffer:
        """The buffer behind, for whatever this face has no method for."""
        if self._buffer is None:
            # Evictions are made in bulk, so a little more is kept than can be drawn.
            capacity = self.buffer_size + self.buffer_size // 128 + 2
            options = {"commit_seconds": None, **self._options}
            self._buffer = Buffer(
                f"{self._url}/{self._n_resets}",
                capacity=capacity,
                device=str(self.storing_device),
                sample=_ROWS,
                seed=self._seed + self._n_resets,
                **options,
            )
        return self._buffer

    def reset(self, buffer_size: int | None = None) -> None:
        """Forget everything, iterators included, and take another size if one is given; fields may differ then."""
        if buffer_size is not None:
            check_positive("buffer_size", buffer_size)
            self.buffer_size = buffer_size
        self.close()
        self._n_resets, self._n_added, self._iterator = self._n_resets + 1, 0, None
        self._first_place = 0

    def resize(self, buffer_size: int) -> None:
        """Keep another number of transitions from now on: the newest that there are stay."""
        check_positive("buffer_size", buffer_size)
        kept = list(_blocks(self, buffer_size)) if len(self) else []
        self.reset(buffer_size)
        for block in kept:
            self._extend(block)

    def close(self) -> None:
        """Release memory and threads; what is at a URL stays there."""
        if self._buffer is not None:
            self._buffer.close()
            self._buffer = None
            if self._is_private:
                forget(self._url)

    def add(self, experience: TensorDictBase) -> None:
        """Add one transition.

        Raises:
            DataError: It has other fields than those before, or other shapes or dtypes; nothing was added.
        """
        is_last = (self._n_added + 1) % _EPISODE == 0
        self.memory.append({_FIELD: _plain(experience)}, env=0, truncated=is_last)
        self._n_added += 1

    def add_batch(self, batch: TensorDictBase) -> None:
        """Add transitions ``[n, ...]`` in this order; of more than `buffer_size` the last ones stay."""
        if not batch.batch_size:
            raise DataError(f"add_batch: expected a batch of transitions, got batch_size {tuple(batch.batch_size)}")
        for start in range(0, batch.batch_size[0], _BLOCK):
            self._extend(_plain(batch[start : start + _BLOCK]))

    def _extend(self, rows: Mapping[str, Any]) -> None:
        n = _n_rows(rows)
        number = self._n_added + np.arange(n) + 1
        self.memory.extend({_FIELD: _with_axis(rows)}, envs=[0], truncated=(number % _EPISODE == 0)[:, None])
        self._n_added += n

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
        place = np.asarray(torch.as_tensor(indices if not isinstance(indices, range) else list(indices)), np.int64)
        n = self.data_size
        if len(place) and not (-n <= place.min() and place.max() < n):
            raise IndexError(f"indices: expected {-n} to {n - 1}, got {int(place.min())} to {int(place.max())}")
        return self._at(self._numbers(np.where(place < 0, place + n, place)))

    def sample_by_index_fields(
        self, indices: Indices, fields: Sequence[str]
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Some fields of them: a tensor for one field, a tuple for several."""
        batch = self.sample_by_index(indices)
        if missing := [name for name in fields if name not in batch.keys()]:  # noqa: SIM118 - a TensorDict
            known = ", ".join(sorted(str(key) for key in batch.keys() if key != "index"))  # noqa: SIM118
            raise KeyError(f"no field {missing[0]!r}; there are {known}")
        found = tuple(batch[name] for name in fields)
        return found[0] if len(found) == 1 else found

    def sample_all(self) -> TensorDict:
        """All transitions, oldest first."""
        if not self._n_added:
            raise NotReadyError("the buffer is empty: add transitions before sampling")
        return self._at(np.arange(self._n_added - self.data_size, self._n_added))

    def _numbers(self, place: Array) -> Array:
        """How many were added before the newest transition at each place."""
        newest = self._n_added - 1
        number: Array = newest - (newest + self._first_place - place) % self.buffer_size
        return number

    def _at(self, number: Array) -> TensorDict:
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

        Args:
            batch_size: Of a batch; the last one of an epoch may be smaller.
            n_epochs: How many times.
            shuffle: In another random order each time.
            drop_last: Leave out a batch that is not full.
        """
        check_positive("batch_size", batch_size)
        numbers = self._numbers(np.arange(self.data_size))
        self._iterator = self._epochs(numbers, batch_size, n_epochs, shuffle, drop_last)
        return self._iterator

    def _epochs(
        self, numbers: Array, batch_size: int, n_epochs: int, shuffle: bool, drop_last: bool
    ) -> Iterator[TensorDict]:
        generator = np.random.default_rng([self._seed, self._n_added])
        for _ in range(n_epochs):
            order = generator.permutation(numbers) if shuffle else numbers
            for start in range(0, len(order), batch_size):
                chosen = order[start : start + batch_size]
                if len(chosen) == batch_size or not drop_last:
                    yield self._at(chosen)

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
        metadata = Path(f"{os.fspath(path)}.metadata")
        metadata.parent.mkdir(parents=True, exist_ok=True)
        place = f"{metadata.stem}-{uuid.uuid4().hex[:12]}.trajstore"
        old = _known(metadata).get("store") if metadata.exists() else None  # refuses to replace a file of others
        if len(self):
            with create(metadata.parent / place).writer(commit_seconds=None) as writer:
                for block in _blocks(self, self.data_size):
                    writer.append_episode({_FIELD: block})
        about = {"buffer_size": self.buffer_size, "data_size": len(self), "pointer": self.pointer, "store": place}
        temporary = metadata.with_name(f"{metadata.name}.{uuid.uuid4().hex[:8]}")
        temporary.write_text(json.dumps(about))
        os.replace(temporary, metadata)
        if isinstance(old, str) and old.endswith(".trajstore") and "/" not in old:
            shutil.rmtree(metadata.parent / old, ignore_errors=True)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Go on with what `save` wrote: size, transitions and the place of the next one.

        Raises:
            DataError: The file holds no data: it is one of ObjectRL's own.
        """
        metadata = Path(f"{os.fspath(path)}.metadata")
        about = _known(metadata)
        counts = [about.get(name) for name in ("buffer_size", "data_size", "pointer")]
        is_ours = isinstance(about.get("store"), str) and "/" not in about["store"]
        if not is_ours or not all(type(n) is int and n >= 0 for n in counts):
            raise DataError(f"{metadata}: expected what this class saves; a file of ObjectRL's own holds no data")
        buffer_size, data_size, pointer = (int(n) for n in counts if n is not None)
        store = open_store(metadata.parent / about["store"]) if data_size else ()  # before anything is forgotten
        self.reset(buffer_size)
        # Places are counted from the one that the oldest had.
        self._first_place = (pointer - data_size) % self.buffer_size
        for i in range(len(store)):
            self._extend(store.read_episode(i)[_FIELD])  # type: ignore[union-attr]


def _known(path: Path) -> dict[str, Any]:
    try:
        about = json.loads(path.read_text())
    except (UnicodeDecodeError, ValueError) as error:
        raise DataError(f"{path}: not what this class saves: {error!r:.200}") from error
    return about if isinstance(about, dict) else {}


def _plain(data: TensorDictBase) -> dict[str, Any]:
    """Nested dicts of tensors."""
    return {k: _plain(v) if isinstance(v, TensorDictBase) else v.detach() for k, v in data.items() if k != "index"}


def _n_rows(rows: Mapping[str, Any]) -> int:
    first = next(iter(rows.values()))
    return _n_rows(first) if isinstance(first, Mapping) else len(first)


def _with_axis(rows: Mapping[str, Any]) -> dict[str, Any]:
    """The same ``[n, 1, ...]``: of one environment."""
    return {k: _with_axis(v) if isinstance(v, Mapping) else v[:, None] for k, v in rows.items()}


def _blocks(buffer: ReplayBuffer, n: int) -> Iterator[dict[str, Any]]:
    """The newest ``n`` transitions, oldest first, some at a time."""
    stop = buffer._n_added
    for start in range(stop - min(n, len(buffer)), stop, _BLOCK):
        yield _plain(buffer._at(np.arange(start, min(start + _BLOCK, stop))).cpu())
