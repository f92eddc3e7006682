"""RLinf's replay buffer of trajectories over trajstore: the same calls and the same batches."""

from __future__ import annotations

import contextlib
import os
import pathlib
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Unpack

import torch

from trajstore.arguments import check_positive
from trajstore.compat.options import check_options
from trajstore.compat.private_store import free_private_store, free_with_buffer, private_url
from trajstore.compat.rlinf.checkpoint_layouts import Layout, checked_layout
from trajstore.compat.rlinf.checkpoint_methods import CheckpointMethods
from trajstore.compat.rlinf.checkpoint_reference import FILE as REFERENCE_FILE
from trajstore.compat.rlinf.directory_index import is_rlinf_directory
from trajstore.compat.rlinf.options import (
    BufferOptionsDict,
    checked_format,
    default_buffer_bytes,
    take_former_names,
)
from trajstore.compat.rlinf.stored_trajectories import StoredTrajectories, ledger_of
from trajstore.compat.rlinf.trajectory import Trajectory, check_consistent
from trajstore.compat.rlinf.trajectory_appender import append_trajectory, encode_all
from trajstore.compat.rlinf.trajectory_encoding import EncodedTrajectory, to_rlinf_batch, transition_windows
from trajstore.compat.rlinf.trajectory_ledger import TrajectoryLedger, is_leftover
from trajstore.distributed.rank_group import torch_ranks
from trajstore.errors import ClosedError, DataError, NotReadyError, StoreNotFoundError
from trajstore.replay.buffer import ReplayBuffer as Buffer
from trajstore.sampling.rng import rank_seed
from trajstore.schema import Schema
from trajstore.store.store import open as open_store

_OWN_OPTIONS = {
    "capacity": "it keeps whole trajectories; say how many with sample_window_size",
    "sample": "single transitions are drawn",
}

Path = str | os.PathLike[str]


class TrajectoryReplayBuffer(CheckpointMethods):
    """Keeps trajectories, and samples transitions of the newest of them uniformly, with replacement.

    Safe to use from several threads. With ``auto_save``, every `add_trajectories` starts a background commit unless
    one is running, and a commit starts at least every ``commit_seconds``. `flush` and `close` wait until everything
    is durable. A buffer with the same ``auto_save_path`` continues with the stored trajectories.

    Args:
        seed: Seed of the draws; None: a random seed. Ranks of torch.distributed draw differently.
        enable_cache: Accepted and ignored: decoded data is cached within ``cache_bytes``.
        cache_size: Accepted and ignored.
        sample_window_size: Sample from this many of the newest trajectories; 0: from all.
        auto_save: Keep every trajectory at ``auto_save_path``. Otherwise only those of the window are kept, in RAM.
        auto_save_path: A directory, or the URL of an object store.
        trajectory_format: Format of the files that the checkpoint layout ``"rlinf"`` writes: ``pt``.
        checkpoint_layout: What `save_checkpoint` writes; see there. By default ``"reference"`` with ``auto_save``,
            and ``"copy"`` without.
        device: Device of the batches.
        options: Further options of `trajstore.ReplayBuffer`: ``cache_bytes``, ``buffer_bytes``, ``commit_seconds``,
            ...; and RLinf's former names ``storage_dir``, ``storage_format`` and ``save_trajectories``.
    """

    def __init__(
        self,
        seed: int | None = 1234,
        enable_cache: bool = True,
        cache_size: int = 5,
        sample_window_size: int = 100,
        auto_save: bool = False,
        auto_save_path: Path = "",
        trajectory_format: str = "pt",
        *,
        checkpoint_layout: Layout | None = None,
        device: torch.device | str = "cpu",
        **options: Unpack[BufferOptionsDict],
    ) -> None:
        passed_options: dict[str, Any] = {**options}
        saving: dict[str, Any] = {
            "auto_save": auto_save,
            "auto_save_path": auto_save_path,
            "trajectory_format": trajectory_format,
        }
        saving |= take_former_names(passed_options)
        check_options(type(self).__init__, passed_options, _OWN_OPTIONS)
        if saving["auto_save"] and not saving["auto_save_path"]:
            raise ValueError("auto_save_path: expected a directory or a URL for the trajectories, got none")
        if (
            isinstance(sample_window_size, bool)
            or not isinstance(sample_window_size, int)
            or sample_window_size < 0
        ):
            raise ValueError(f"sample_window_size: expected 0 or a positive integer, got {sample_window_size!r}")
        self.seed = int.from_bytes(os.urandom(7)) if seed is None else seed
        self.sample_window_size, self.auto_save = sample_window_size, bool(saving["auto_save"])
        self.trajectory_format = checked_format(saving["trajectory_format"])
        self.checkpoint_layout = checked_layout(checkpoint_layout, self.auto_save)
        self.device = torch.device(device)
        self._url = os.fspath(saving["auto_save_path"]) if self.auto_save else private_url("rlinf")
        self._options: dict[str, Any] = {"grace_s": 10.0 if self.auto_save else 0.0, **passed_options}
        self._lock = threading.RLock()
        self._ledger = TrajectoryLedger()
        self._memory: Buffer | None = None
        self._is_closed = False
        self._draws_apart = False  # see `draw_apart`
        self._n_earlier_sessions = 0  # of the store
        self._saved_draws: dict[str, int] = {}  # state of the draws from before `clear`
        if self.auto_save:
            self._open_existing()

    def _open_existing(self) -> None:
        """Continue with the trajectories of an existing store, and evict incomplete ones."""
        if "://" not in self._url and is_rlinf_directory(self._url):
            raise DataError(
                f"auto_save_path: {self._url} holds RLinf's own files; load them with load_checkpoint() into a "
                "buffer with another auto_save_path"
            )
        if "://" not in self._url and (pathlib.Path(self._url) / REFERENCE_FILE).exists():
            raise DataError(
                f"auto_save_path: {self._url} holds a checkpoint; load it with load_checkpoint() into a buffer "
                "with another auto_save_path"
            )
        try:
            store = open_store(self._url, storage_options=self._storage_options)
        except StoreNotFoundError:
            return
        if store.schema is not None:
            self._ledger = ledger_of(store)
            self._n_earlier_sessions = len(store.streams)
            memory = self._open(store.schema)
            if self._ledger.has_leftovers:
                memory.evict(where=is_leftover)

    def _open(self, schema: Schema) -> Buffer:
        self._check_open()
        if self._memory is None:
            self._memory = Buffer(
                self._url,
                schema=schema,
                seed=self._draw_seed(*_torch_ranks()),
                **self._session_options(schema),
            )
            if not self.auto_save:
                free_with_buffer(self._memory, self._url)
            self._restore_draws(self._saved_draws)
        return self._memory

    def _session_options(self, schema: Schema) -> dict[str, Any]:
        # As with RLinf, every rank has its own store: no rank waits for others.
        fixed = {"sample": transition_windows(schema), "device": str(self.device), "rank": 0, "world_size": 1}
        return {**fixed, **default_buffer_bytes(schema, self._options), **self._options}

    def _draw_seed(self, rank: int, n_ranks: int) -> int:
        seed = rank_seed(self.seed, rank, n_ranks)
        seed = rank_seed(seed, self._n_earlier_sessions, 1 + self._n_earlier_sessions)  # do not repeat their draws
        return rank_seed(seed, 1, 2) if self._draws_apart else seed

    def draw_apart(self) -> None:
        """Draw other numbers than a buffer with the same seed; call it before the first batch."""
        with self._lock:
            if self._draws_apart:
                return
            self._draws_apart = True
            if self._draw_state().get("seed") == self._draw_seed(*_torch_ranks()):  # a checkpoint did this before
                return
            self._saved_draws = {}
            if self._memory is not None:
                self._restore_draws({"seed": self._draw_seed(*_torch_ranks()), "counter": 0})

    @property
    def memory(self) -> Buffer:
        """The underlying `trajstore.ReplayBuffer`.

        Raises:
            NotReadyError: It does not exist yet, because no trajectory was added and so the fields are not known.
        """
        self._check_open()
        if self._memory is None:
            raise NotReadyError("Cannot sample from an empty buffer: add trajectories first")
        return self._memory

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError("the buffer is closed")

    # ---- adding

    def add_trajectories(self, trajectories: Iterable[Any]) -> None:
        """Add trajectories: objects or mappings with the fields of `Trajectory`. Their tensors are copied.

        Raises:
            DataError: A trajectory does not match earlier ones, or its own fields do not match; none was added.
        """
        if not isinstance(trajectories, Iterable) or isinstance(trajectories, Mapping):
            raise TypeError(f"expected a list of trajectories, got a {type(trajectories).__name__}")
        given = [Trajectory.of(item, f"trajectory {i}") for i, item in enumerate(trajectories)]
        check_consistent(given)
        with self._lock:
            encoded = self._encode(given)
            for item in encoded:
                self._append(self._ledger.counter, item)
            self._evict_outside_window()
            if self.auto_save and encoded:  # trajectories are large and rare, so commit at once
                self.memory.flush(wait=False)

    def add_numbered(self, number: int, trajectory: Any) -> None:
        """Add a trajectory under a given number, as when it is imported.

        Raises:
            DataError: It does not match earlier ones, or the number exists; it was not added.
        """
        given = Trajectory.of(trajectory, f"trajectory {number}")
        check_consistent([given])
        with self._lock:
            if number < self._ledger.counter and number in self._ledger.ids:
                raise DataError(f"trajectory {number}: the buffer already holds a trajectory with this number")
            self._append(number, self._encode([given])[0])
            self._evict_outside_window()

    def _encode(self, trajectories: Sequence[Trajectory]) -> list[EncodedTrajectory]:
        self._check_open()
        return encode_all(trajectories, self._memory.schema if self._memory is not None else None)

    def _append(self, number: int, encoded: EncodedTrajectory) -> None:
        memory = self._open(encoded.schema)
        try:
            entry = append_trajectory(memory, encoded, number, self._ledger.serial)
        except BaseException:
            self._ledger.serial += 1  # a part of it may be stored under this serial
            raise
        self._ledger.push(entry)

    def _evict_outside_window(self) -> None:
        """Without `auto_save`, evict the trajectories that left the window."""
        n = len(self._ledger) - self.sample_window_size
        if not self.auto_save and self.sample_window_size and n > 0:
            self.memory.evict(self._ledger.drop(n))

    # ---- sampling

    def sample(self, num_chunks: int = 0) -> dict[str, Any]:
        """Draw ``num_chunks`` transitions from the window; each row of the batch is one transition.

        Raises:
            NotReadyError: The buffer is empty.
        """
        return self.sample_chunks(num_chunks)

    def sample_chunks(self, num_chunks: int) -> dict[str, Any]:
        """Do the same as `sample`."""
        check_positive("num_chunks", num_chunks)
        while True:
            with self._lock:
                memory, n_held, window = self.memory, len(self._ledger), self.sample_window_size
                if not n_held:
                    raise NotReadyError("Cannot sample from an empty buffer: add trajectories first")
                recent = self._ledger.n_episodes(window) if 0 < window < n_held else None
            with self._unless_replaced(memory):
                return to_rlinf_batch(memory.sample(num_chunks, recent_episodes=recent))

    @contextlib.contextmanager
    def _unless_replaced(self, memory: Buffer) -> Iterator[None]:
        """Ignore that ``memory`` is closed if another thread replaced it by `clear`."""
        try:
            yield
        except ClosedError:
            with self._lock:
                if self._is_closed or self._memory is memory:
                    raise

    # ---- contents

    @property
    def size(self) -> int:
        """The number of trajectories held."""
        with self._lock:
            return len(self._ledger)

    def __len__(self) -> int:
        return self.size

    @property
    def total_samples(self) -> int:
        """The number of transitions held."""
        with self._lock:
            return self._ledger.n_samples

    @property
    def trajectory_ids(self) -> list[int]:
        """The numbers of the trajectories held, oldest first."""
        with self._lock:
            return [int(number) for number in self._ledger.ids]

    def is_ready(self, min_size: int) -> bool:
        """Return whether at least ``min_size`` trajectories are held.

        Raises:
            ValueError: The buffer can never hold that many.
        """
        if not self.auto_save and 0 < self.sample_window_size < min_size:
            raise ValueError(
                f"min_size: {min_size} trajectories are never held at once; without auto_save only the window of "
                f"{self.sample_window_size} is kept. One trajectory may hold many transitions"
            )
        return self.size >= min_size

    async def is_ready_async(self, min_size: int) -> bool:
        """Do the same as `is_ready`."""
        return self.is_ready(min_size)

    def get_stats(self) -> dict[str, int]:
        """Return the numbers of trajectories and transitions held, and of trajectories that can be sampled."""
        with self._lock:
            window = self.sample_window_size or self.size
            return {
                "num_trajectories": self.size,
                "total_samples": self.total_samples,
                "cache_size": min(self.size, window),
            }

    def get_trajectory(self, number: int) -> Trajectory:
        """Return a trajectory as it was added, tensors on the CPU.

        Raises:
            KeyError: It is not held.
        """
        with self._lock:
            entry = self._ledger[self._ledger.find(number)]
            self.memory.flush()
            self.memory.store.refresh()
            return StoredTrajectories(self.memory.store, self.memory, [entry]).load(number)

    # ---- clearing and closing

    def clear(self) -> None:
        """Remove all trajectories, also from ``auto_save_path``; numbers begin at 0 again.

        A buffer in RAM accepts other fields after that.
        """
        with self._lock:
            self._ledger = self._ledger.cleared()
            if self._memory is None:
                return
            if self.auto_save:
                self._memory.flush()  # episodes evicted before their commit could come back
                self._memory.clear()
                self._memory.flush()
            else:
                self._saved_draws = self._draw_state()
                self._memory.close()
                free_private_store(self._url)
                self._memory, self._url = None, private_url("rlinf")

    def clear_cache(self) -> None:
        """Drop decoded data from the cache; the trajectories stay."""
        memory = self._memory
        if memory is not None:
            with self._unless_replaced(memory):
                memory.reader.invalidate()

    def flush(self) -> None:
        """Make all added trajectories durable; raises the error of a failed background commit."""
        memory = self._memory
        if memory is not None:
            with self._unless_replaced(memory):
                memory.flush()

    def close(self, wait: bool = True) -> None:
        """Make all added trajectories durable and release everything; raises the error of a failed commit.

        Args:
            wait: Accepted and ignored: the call always waits.
        """
        with self._lock:
            self._is_closed = True
            if self._memory is not None:
                self._memory.close()
                self._memory = None
                if not self.auto_save:
                    free_private_store(self._url)


def _torch_ranks() -> tuple[int, int]:
    """Return rank and number of ranks of torch.distributed; (0, 1) if it is not in use."""
    return torch_ranks() or (0, 1)
