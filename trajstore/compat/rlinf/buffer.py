"""RLinf's replay buffer of trajectories over trajstore: the same calls, the same batches."""

from __future__ import annotations

import contextlib
import os
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from trajstore.arguments import check_positive, parse_bytes
from trajstore.compat.exit_flush import cancel_finish_at_exit, finish_at_exit
from trajstore.compat.options import check_options
from trajstore.compat.private_store import free_private_store, private_url
from trajstore.compat.rlinf.directory import (
    Directory,
    DirectoryWriter,
    check_weights_id,
    is_directory_of_rlinf,
    share_of,
)
from trajstore.compat.rlinf.ledger import Held, Ledger, is_leftover
from trajstore.compat.rlinf.rows import Rows, sampling, to_batch, to_rows
from trajstore.compat.rlinf.stored import StoredTrajectories, ledger_of
from trajstore.compat.rlinf.trajectory import Trajectory, check_alike, get_model_weights_id
from trajstore.errors import ClosedError, DataError, NotReadyError, StoreNotFoundError
from trajstore.format.handles import EpisodeKey
from trajstore.replay.buffer import ReplayBuffer as Buffer
from trajstore.sampling.rng import rank_seed
from trajstore.schema import Schema, nest
from trajstore.store.copying import copy
from trajstore.store.store import open as open_store
from trajstore.writing.staging import staged_rows

_RENAMED = {
    "storage_dir": "auto_save_path",
    "storage_format": "trajectory_format",
    "save_trajectories": "auto_save",
}
_OWN = {
    "capacity": "it keeps whole trajectories; say how many with sample_window_size",
    "sample": "single transitions are drawn",
}
_STATE = "trajstore"  # what RLinf's metadata.json has of ours

Path = str | os.PathLike[str]


class TrajectoryReplayBuffer:
    """Keeps trajectories, and samples transitions of the newest of them, uniformly and with replacement.

    Safe to use from several threads. With ``auto_save`` a commit behind begins with every `add_trajectories`,
    unless the one before is not finished yet, and at least every ``commit_seconds``; `flush` and `close` wait until
    everything is durable. A buffer with the same ``auto_save_path`` goes on with it.

    Args:
        seed: Of the draws; None for another one every time. Ranks of torch.distributed draw differently.
        enable_cache: Accepted, and without a meaning: what was decoded stays within ``cache_bytes``.
        cache_size: The same.
        sample_window_size: Sample from so many of the newest trajectories; 0: from all.
        auto_save: Keep every trajectory at ``auto_save_path``; else only those of the window, in RAM.
        auto_save_path: A directory, or the URL of an object store.
        trajectory_format: Of checkpoints: ``pt``, files that RLinf reads, or ``zarr``, a copy of the store.
        device: Where batches go.
        options: Further ones of `trajstore.ReplayBuffer`: ``cache_bytes``, ``buffer_bytes``, ``commit_seconds``,
            ...; and the names that RLinf had before: ``storage_dir``, ``storage_format``, ``save_trajectories``.
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
        device: torch.device | str = "cpu",
        **options: Any,
    ) -> None:
        given: dict[str, Any] = {
            "auto_save": auto_save,
            "auto_save_path": auto_save_path,
            "trajectory_format": trajectory_format,
        }
        given |= _of_old_names(options)
        check_options(type(self).__init__, options, _OWN)
        if given["auto_save"] and not given["auto_save_path"]:
            raise ValueError("auto_save_path: expected a directory or a URL to keep trajectories at, got none")
        if (
            isinstance(sample_window_size, bool)
            or not isinstance(sample_window_size, int)
            or sample_window_size < 0
        ):
            raise ValueError(f"sample_window_size: expected 0 or a positive integer, got {sample_window_size!r}")
        self.seed = int.from_bytes(os.urandom(7)) if seed is None else seed
        self.sample_window_size, self.auto_save = sample_window_size, bool(given["auto_save"])
        self.trajectory_format = _checked_format(given["trajectory_format"])
        self.device = torch.device(device)
        self._url = os.fspath(given["auto_save_path"]) if self.auto_save else private_url("rlinf")
        self._options: dict[str, Any] = {"grace_s": 10.0 if self.auto_save else 0.0, **options}
        self._lock = threading.RLock()
        self._ledger = Ledger()
        self._memory: Buffer | None = None
        self._is_closed = self._is_apart = False
        self._n_sessions = 0  # that wrote the store before
        self._draws_before: dict[str, int] = {}
        if self.auto_save:
            self._reopen()
            finish_at_exit(self, TrajectoryReplayBuffer.flush)

    def _reopen(self) -> None:
        """Go on with what is there."""
        if "://" not in self._url and is_directory_of_rlinf(self._url):
            raise DataError(
                f"auto_save_path: {self._url} holds files of RLinf's own; load_checkpoint() them into a buffer "
                "with another auto_save_path"
            )
        try:
            store = open_store(self._url, storage_options=self._own_options)
        except StoreNotFoundError:
            return
        if store.schema is not None:
            self._ledger = ledger_of(store)
            self._n_sessions = len(store.streams)
            memory = self._open(store.schema)
            if self._ledger.has_leftovers:
                memory.evict(where=is_leftover)

    def _open(self, schema: Schema) -> Buffer:
        self._check()
        if self._memory is None:
            # Ranks have stores of their own here, as they have with RLinf: none waits for others.
            self._memory = Buffer(
                self._url,
                schema=schema,
                sample=sampling(schema),
                device=str(self.device),
                seed=self._own_seed(*_rank()),
                **{"rank": 0, "world_size": 1, **self._options},
            )
            self._go_on(self._draws_before)
        return self._memory

    def _own_seed(self, rank: int, ranks: int) -> int:
        seed = rank_seed(self.seed, rank, ranks)
        seed = rank_seed(seed, self._n_sessions, 1 + self._n_sessions)  # what was drawn before comes not again
        return rank_seed(seed, 1, 2) if self._is_apart else seed

    def draw_apart(self) -> None:
        """Draw other numbers than a buffer of the same seed does; said before the first batch."""
        with self._lock:
            if self._is_apart:
                return
            self._is_apart = True
            if self._draws().get("seed") == self._own_seed(*_rank()):  # of a checkpoint that drew apart before
                return
            self._draws_before = {}
            if self._memory is not None:
                self._go_on({"seed": self._own_seed(*_rank()), "counter": 0})

    @property
    def memory(self) -> Buffer:
        """The buffer behind, for whatever this face has no method for.

        Raises:
            NotReadyError: Nothing was added yet, so it is not known what it holds.
        """
        self._check()
        if self._memory is None:
            raise NotReadyError("Cannot sample from an empty buffer: add trajectories first")
        return self._memory

    def _check(self) -> None:
        if self._is_closed:
            raise ClosedError("the buffer is closed")

    # ---- adding

    def add_trajectories(self, trajectories: Iterable[Any]) -> None:
        """Add trajectories: objects or mappings with the fields of `Trajectory`. Their tensors are copied.

        Raises:
            DataError: One does not fit those before, or is not alike in itself; none was added.
        """
        if not isinstance(trajectories, Iterable) or isinstance(trajectories, Mapping):
            raise TypeError(f"expected a list of trajectories, got a {type(trajectories).__name__}")
        given = [Trajectory.of(item, f"trajectory {i}") for i, item in enumerate(trajectories)]
        check_alike(given)
        with self._lock:
            rows = self._checked(given)
            for item in rows:
                self._add(self._ledger.counter, item)
            self._leave_window()
            if self.auto_save and rows:  # trajectories are large and rare: they may as well be committed at once
                self.memory.flush(wait=False)

    def add_numbered(self, number: int, trajectory: Any) -> None:
        """Add a trajectory under a number of its own, as when it comes from elsewhere.

        Raises:
            DataError: It does not fit those before, or the number is taken; it was not added.
        """
        given = Trajectory.of(trajectory, f"trajectory {number}")
        check_alike([given])
        with self._lock:
            if number < self._ledger.counter and number in self._ledger.ids:
                raise DataError(f"trajectory {number}: there is one of that number")
            self._add(number, self._checked([given])[0])
            self._leave_window()

    def _checked(self, trajectories: Sequence[Trajectory]) -> list[Rows]:
        """Trajectories as rows, all of one schema."""
        self._check()
        rows = [to_rows(trajectory) for trajectory in trajectories]
        schema = self._memory.schema if self._memory is not None else None
        for number, item in enumerate(rows):
            own = item.schema
            schema = schema or own
            if differences := schema.differences(own):
                raise DataError(f"trajectory {number} does not fit those before: {'; '.join(differences)}")
            check_weights_id(item.metadata["model_weights_id"], f"trajectory {number}")
            if not item.metadata["model_weights_id"]:
                item.metadata["model_weights_id"] = get_model_weights_id(trajectories[number].versions)
        return rows

    def _add(self, number: int, rows: Rows) -> None:
        memory = self._open(rows.schema)
        n_steps, n_envs = rows.ends.shape
        n_rows = staged_rows(parse_bytes(memory.options.buffer_bytes, "buffer_bytes"), rows.schema.row_bytes)
        size = max(1, n_rows // (2 * n_envs))  # each step may bring a final row
        episodes: list[int] = []
        try:
            for block in rows.blocks(size):
                handles = memory.extend(
                    nest(block.steps),
                    terminated=block.is_terminal.numpy(),
                    truncated=block.ends.numpy(),
                    final=nest(block.final) or None,
                    metadata={"trajectory": number, "serial": self._ledger.serial, **block.metadata},
                )
                episodes += [int(handles.episode.min()), int(handles.episode.max())]
        except BaseException:
            self._ledger.serial += 1
            if episodes:  # part of it is there
                parts = range(min(episodes), max(episodes) + 1)
                with contextlib.suppress(ClosedError):
                    memory.evict(keys=[EpisodeKey(memory.stream, episode) for episode in parts])
            raise
        first, last = min(episodes), max(episodes)
        self._ledger.push(Held(number, memory.stream, first, last - first + 1, n_steps * n_envs))

    def _leave_window(self) -> None:
        """Without `auto_save`, forget what left the window."""
        n = len(self._ledger) - self.sample_window_size
        if not self.auto_save and self.sample_window_size and n > 0:
            self.memory.evict(self._ledger.drop(n))

    # ---- sampling

    def sample(self, num_chunks: int = 0) -> dict[str, Any]:
        """Draw so many transitions from the window; each row of the batch is one.

        Raises:
            NotReadyError: There are none.
        """
        return self.sample_chunks(num_chunks)

    def sample_chunks(self, num_chunks: int) -> dict[str, Any]:
        """The same."""
        check_positive("num_chunks", num_chunks)
        while True:
            with self._lock:
                memory, held, window = self.memory, len(self._ledger), self.sample_window_size
                if not held:
                    raise NotReadyError("Cannot sample from an empty buffer: add trajectories first")
                recent = self._ledger.n_episodes(window) if 0 < window < held else None
            with self._unless_replaced(memory):
                return to_batch(memory.sample(num_chunks, recent_episodes=recent))

    @contextlib.contextmanager
    def _unless_replaced(self, memory: Buffer) -> Iterator[None]:
        """Ignore that a buffer is closed if another thread has put it out of use by `clear`."""
        try:
            yield
        except ClosedError:
            with self._lock:
                if self._is_closed or self._memory is memory:
                    raise

    # ---- what there is

    @property
    def size(self) -> int:
        """How many trajectories are held."""
        with self._lock:
            return len(self._ledger)

    def __len__(self) -> int:
        return self.size

    @property
    def total_samples(self) -> int:
        """How many transitions are held."""
        with self._lock:
            return self._ledger.n_samples

    @property
    def trajectory_ids(self) -> list[int]:
        """Numbers of the trajectories that are held, oldest first."""
        with self._lock:
            return [int(number) for number in self._ledger.ids]

    def is_ready(self, min_size: int) -> bool:
        """Whether so many trajectories are held.

        Raises:
            ValueError: So many never will be.
        """
        if not self.auto_save and 0 < self.sample_window_size < min_size:
            raise ValueError(
                f"min_size: {min_size} trajectories are never held at once; without auto_save only the window of "
                f"{self.sample_window_size} is kept. One trajectory may hold many transitions"
            )
        return self.size >= min_size

    async def is_ready_async(self, min_size: int) -> bool:
        """The same."""
        return self.is_ready(min_size)

    def get_stats(self) -> dict[str, int]:
        """Trajectories and transitions held, and how many trajectories can be sampled."""
        with self._lock:
            window = self.sample_window_size or self.size
            return {
                "num_trajectories": self.size,
                "total_samples": self.total_samples,
                "cache_size": min(self.size, window),
            }

    def get_trajectory(self, number: int) -> Trajectory:
        """A trajectory as it was added, tensors on the CPU.

        Raises:
            KeyError: It is not held.
        """
        with self._lock:
            held = self._ledger[self._ledger.find(number)]
            self.memory.flush()
            return StoredTrajectories(self.memory.store, self.memory, [held]).load(number)

    # ---- checkpoints

    def save_checkpoint(self, save_path: Path) -> None:
        """Save every trajectory held, and where the draws are; what was saved there before is written only once.

        With ``trajectory_format="pt"`` as a directory that RLinf loads too; with ``"zarr"`` as a store, where
        nothing is yet: hard links in the same file system.
        """
        with self._lock:
            if self.trajectory_format == "zarr":
                self.memory.flush()
                copy(
                    self._url,
                    save_path,
                    storage_options=self._own_options,
                    target_options=self._options_of(save_path),
                )
                return
            writer = DirectoryWriter(save_path, {"seed": self.seed, _STATE: self._draws()})
            held = {item.id: item for item in self._ledger}
            if held:
                self.memory.flush()
                source = StoredTrajectories(self.memory.store, self.memory, held.values())
                writer.write_all({number: item.key for number, item in held.items()}, source.load)
            writer.finish()

    def _draws(self) -> dict[str, int]:
        state = self._memory.reader.state_dict() if self._memory is not None else {}
        return {name: state[name] for name in ("seed", "counter") if name in state}

    def load_checkpoint(
        self,
        load_path: Path,
        is_distributed: bool = False,
        local_rank: int = 0,
        world_size: int = 1,
        *,
        trusted: bool = False,
    ) -> None:
        """Hold what a checkpoint holds, in place of what was held: one of RLinf's, or of this class.

        Args:
            load_path: The directory.
            is_distributed: Take a share of it only: contiguous blocks of trajectories, the first ranks one more.
            local_rank: Whose share.
            world_size: Of how many.
            trusted: Whether to load pickled trajectories; see `Directory`.

        Raises:
            StoreNotFoundError: There is none.
            FormatError: It can't be read; what was held still is, unless a later file is at fault.
        """
        rank, ranks = (local_rank, world_size) if is_distributed else (0, 1)
        share_of((), rank, ranks)
        with self._lock:
            self._check()
            if self._is_own(load_path):
                if ranks > 1:
                    raise DataError(
                        f"{os.fspath(load_path)}: is this buffer's own store, of which it holds everything"
                    )
                return
            source = self._source(load_path, trusted)
            chosen = share_of(source.numbers, rank, ranks)
            if not self.auto_save and self.sample_window_size:
                chosen = chosen[-self.sample_window_size :]  # the others would leave at once
            first = self._first_of(source, chosen)
            self.clear()
            for number in chosen:
                self.add_numbered(number, first if number == chosen[0] else source.load(number))
            if self._memory is not None:  # ranks go on with draws of their own
                self._go_on({"seed": self._own_seed(rank, ranks), "counter": 0} if ranks > 1 else source.draws)

    def _source(self, path: Path, trusted: bool) -> _Directory | StoredTrajectories:
        if is_directory_of_rlinf(path):
            return _Directory(path, trusted)
        try:
            return StoredTrajectories.open(path, self._options_of(path))
        except StoreNotFoundError as error:
            raise StoreNotFoundError(f"{os.fspath(path)}: neither files of RLinf's nor a store are here") from error

    @property
    def _own_options(self) -> Any:
        return self._options.get("storage_options")

    def _options_of(self, path: Path) -> Any:
        """The storage options, for another place of the same storage."""
        return self._own_options if _scheme(os.fspath(path)) == _scheme(self._url) else None

    def _is_own(self, path: Path) -> bool:
        own, other = (text.removeprefix("file://").rstrip("/") for text in (self._url, os.fspath(path)))
        return own == other or ("://" not in own + other and os.path.realpath(own) == os.path.realpath(other))

    def _first_of(self, source: _Directory | StoredTrajectories, chosen: Sequence[int]) -> Trajectory | None:
        """The first trajectory, which must be such that it can be stored: before anything is forgotten."""
        if not chosen:
            return None
        first = source.load(chosen[0])
        check_alike([first])
        if self.auto_save:
            self._checked([first])
        return first

    def _go_on(self, draws: Any) -> None:
        """Go on with the draws of a checkpoint, if it has them."""
        reader = self.memory.reader
        if isinstance(draws, dict) and all(type(draws.get(name)) is int for name in ("seed", "counter")):
            reader.load_state_dict({**reader.state_dict(), "seed": draws["seed"], "counter": draws["counter"]})

    # ---- the end

    def clear(self) -> None:
        """Hold nothing any more, on disk neither; numbers begin at 0 again.

        A buffer in RAM may hold other fields after that.
        """
        with self._lock:
            self._ledger = self._ledger.cleared()
            if self._memory is None:
                return
            if self.auto_save:
                self._memory.flush()  # what is evicted before its commit could come back
                self._memory.clear()
                self._memory.flush()
            else:
                self._draws_before = self._draws()
                self._memory.close()
                free_private_store(self._url)
                self._memory, self._url = None, private_url("rlinf")

    def clear_cache(self) -> None:
        """Forget what was decoded; the trajectories stay."""
        memory = self._memory
        if memory is not None:
            with self._unless_replaced(memory):
                memory.reader.invalidate()

    def flush(self) -> None:
        """Make durable what was added; raises what went wrong behind."""
        memory = self._memory
        if memory is not None:
            with self._unless_replaced(memory):
                memory.flush()

    def close(self, wait: bool = True) -> None:
        """Make durable what was added and release everything; raises what went wrong behind.

        Args:
            wait: Accepted; it is always waited for.
        """
        with self._lock:
            self._is_closed = True
            cancel_finish_at_exit(self)
            if self._memory is not None:
                self._memory.close()
                self._memory = None
                if not self.auto_save:
                    free_private_store(self._url)


class _Directory:
    """A checkpoint in RLinf's files."""

    def __init__(self, path: Path, trusted: bool) -> None:
        self._directory = Directory(path, trusted=trusted)
        self._entries = {entry.id: entry for entry in self._directory.entries}
        self.numbers = list(self._entries)
        self.draws = self._directory.metadata.get(_STATE)
        if missing := self._directory.missing:
            warnings.warn(
                f"{os.fspath(path)}: {len(missing)} of {len(missing) + len(self.numbers)} trajectories are listed "
                f"and have no file: {missing[:5]}",
                stacklevel=3,
            )

    def load(self, number: int) -> Trajectory:
        return self._directory.load(self._entries[number])


def _of_old_names(options: dict[str, Any]) -> dict[str, Any]:
    """Take RLinf's former names out of the options."""
    found = {}
    for old, new in _RENAMED.items():
        if old in options:
            warnings.warn(f"{old} is now called {new}", DeprecationWarning, stacklevel=3)
            found[new] = options.pop(old)
    if "auto_save_path" in found:
        found.setdefault("auto_save", True)
    return found


def _scheme(url: str) -> str:
    return url.partition("://")[0] if "://" in url else "file"


def _checked_format(name: str) -> str:
    if name == "pkl":
        raise ValueError("trajectory_format: a pickle can run any code when it is loaded; use 'pt' or 'zarr'")
    if name not in ("pt", "zarr"):
        raise ValueError(f"trajectory_format: expected 'pt' or 'zarr', got {name!r}")
    return name


def _rank() -> tuple[int, int]:
    """Of torch.distributed, where it is in use: rank and number of ranks."""
    is_used = torch.distributed.is_available() and torch.distributed.is_initialized()
    return (torch.distributed.get_rank(), torch.distributed.get_world_size()) if is_used else (0, 1)
