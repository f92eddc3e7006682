"""The methods of a buffer that save and load checkpoints."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import Any

from trajstore.compat.private_store import private_url
from trajstore.compat.rlinf.checkpoint_layouts import (
    Layout,
    checked_layout,
    copy_checkpoint,
    save_copy,
    save_reference,
)
from trajstore.compat.rlinf.checkpoint_reference import FILE, CheckpointReference, Url, scheme
from trajstore.compat.rlinf.checkpoint_source import DRAW_STATE, DirectoryCheckpoint, open_checkpoint
from trajstore.compat.rlinf.directory_index import local_path, share_of
from trajstore.compat.rlinf.directory_writer import DirectoryWriter
from trajstore.compat.rlinf.stored_trajectories import StoredTrajectories
from trajstore.compat.rlinf.trajectory import Trajectory, check_consistent
from trajstore.compat.rlinf.trajectory_encoding import EncodedTrajectory
from trajstore.compat.rlinf.trajectory_ledger import TrajectoryLedger
from trajstore.errors import DataError, StoreExistsError
from trajstore.replay.buffer import ReplayBuffer as Buffer
from trajstore.schema import Schema
from trajstore.storage import open_storage
from trajstore.store import checkpoints


class CheckpointMethods:
    """Saves a buffer as a reference, a copy or RLinf's files, and loads each of them."""

    auto_save: bool
    checkpoint_layout: Layout
    sample_window_size: int
    seed: int
    _ledger: TrajectoryLedger
    _lock: threading.RLock
    _memory: Buffer | None
    _n_earlier_sessions: int
    _options: dict[str, Any]
    _url: str

    def save_checkpoint(self, save_path: Url, *, layout: Layout | None = None) -> None:
        """Save every trajectory held, and the state of the draws, for `load_checkpoint`.

        Returns when everything is durable.

        Args:
            save_path: Directory of the checkpoint. An earlier checkpoint of the same layout is replaced.
            layout: What to write; by default the ``checkpoint_layout`` of the buffer.

                - ``"reference"``: a small file that names a checkpoint in the store at ``auto_save_path``. No step
                  data is copied, so the store must stay where it is, or be moved together with the checkpoint.
                - ``"copy"``: a copy of the store, which needs nothing else; in the same file system, by hard links.
                - ``"rlinf"``: files that RLinf can load. Trajectories saved there before are kept as they are.

        Raises:
            DataError: The directory holds a store, or a checkpoint of another layout.
        """
        chosen = checked_layout(layout or self.checkpoint_layout, self.auto_save)
        with self._lock:
            self._check_open()
            if chosen == "reference":
                save_reference(self._memory, len(self._ledger), save_path, self._storage_options_for(save_path))
            elif chosen == "copy":
                options = self._storage_options
                save_copy(self._memory, len(self._ledger), save_path, options, self._storage_options_for(save_path))
            else:
                self._save_files(save_path)

    def _save_files(self, path: Url) -> None:
        if (local_path(path) / FILE).exists():
            raise DataError(f"{os.fspath(path)}: holds a checkpoint of another layout; save to another directory")
        writer = DirectoryWriter(path, {"seed": self.seed, DRAW_STATE: self._draw_state()})
        entries = {entry.id: entry for entry in self._ledger}
        if entries and self._memory is not None:
            self._memory.flush()
            self._memory.store.refresh()
            stored = StoredTrajectories(self._memory.store, self._memory, entries.values())
            writer.write_all({number: entry.key for number, entry in entries.items()}, stored.load)
        writer.finish()

    def _draw_state(self) -> dict[str, int]:
        state = self._memory.reader.state_dict() if self._memory is not None else {}
        return {name: state[name] for name in ("seed", "counter") if name in state}

    def load_checkpoint(
        self,
        load_path: Url,
        is_distributed: bool = False,
        local_rank: int = 0,
        world_size: int = 1,
        *,
        trusted: bool = False,
    ) -> None:
        """Replace the trajectories held by those of a checkpoint, of RLinf or of this class.

        With a reference to this buffer's own store, no step data is read; trajectories that were added after the
        checkpoint stay in the store, and are no longer held. Those of another store are copied without decoding
        them.

        Args:
            load_path: The directory of the checkpoint, or a store.
            is_distributed: Load only one rank's share: a contiguous block of trajectories; the first ranks have one
                more.
            local_rank: The rank.
            world_size: The number of ranks.
            trusted: Load pickled trajectories too; see `Directory`.

        Raises:
            StoreNotFoundError: There is no checkpoint, or the store that it refers to is missing.
            FormatError: It cannot be read; the buffer is unchanged unless a file after the first one is damaged.
        """
        rank, n_ranks = (local_rank, world_size) if is_distributed else (0, 1)
        share_of((), rank, n_ranks)  # checks the arguments
        with self._lock:
            self._check_open()
            if self._is_own_store(load_path):
                if n_ranks > 1:
                    raise DataError(
                        f"{os.fspath(load_path)}: is this buffer's own store; it already holds all of it"
                    )
                return
            reference = CheckpointReference.read(load_path, self._storage_options_for(load_path))
            if reference is not None and reference.checkpoint is None:
                self.clear()
                return
            source: DirectoryCheckpoint | StoredTrajectories
            if reference is None:
                source = open_checkpoint(load_path, trusted, self._storage_options_for(load_path))
            else:
                url = reference.locate(self._storage_options_for)
                source = StoredTrajectories.open(url, self._storage_options_for(url), at=reference.checkpoint)
                source.keep_newest(reference.n_trajectories)
            chosen = share_of(source.numbers, rank, n_ranks)
            if not self.auto_save and self.sample_window_size:
                chosen = chosen[-self.sample_window_size :]  # the others would be evicted at once
            if reference is None or not self._take(source, url, str(reference.checkpoint), chosen):
                self._load_each(source, chosen)
            if self._memory is not None:
                own_draws = {"seed": self._draw_seed(rank, n_ranks), "counter": 0}
                self._restore_draws(own_draws if n_ranks > 1 else source.draw_state)

    def _take(self, source: Any, url: str, checkpoint: str, chosen: Sequence[int]) -> bool:
        """Load all trajectories of a checkpoint without decoding them.

        Returns False and does nothing if only some of them are wanted, or if they cannot be copied to
        ``auto_save_path`` because data is there.
        """
        if len(chosen) < len(source.numbers):
            return False
        if self._is_own_store(url):
            self._resume(source, checkpoint)
            return True
        if self.auto_save and self._memory is not None:
            return False
        target = self._url if self.auto_save else private_url("rlinf")
        options = self._storage_options if self.auto_save else None
        try:
            copy_checkpoint(url, target, checkpoint, self._storage_options_for(url), options)
        except StoreExistsError:
            return False
        self.clear()
        self._url = target
        checkpoints.remove(
            open_storage(target, options), checkpoint
        )  # it would keep evicted steps from being freed
        self._open_existing()
        self._n_earlier_sessions = 0  # their draws are continued, see `_restore_draws`
        if (n_evicted := len(self._ledger) - len(chosen)) > 0 and self._memory is not None:
            self._memory.evict(self._ledger.drop(n_evicted))
        return True

    def _resume(self, source: StoredTrajectories, checkpoint: str) -> None:
        """Continue from a checkpoint of this buffer's own store."""
        schema = source.schema
        if self._memory is not None:
            self._memory.close()
            self._memory = None
        try:
            self._memory = Buffer.resume(self._url, checkpoint, **self._session_options(schema))
        except BaseException:
            self._open(schema)  # with the trajectories that were held before
            raise
        self._ledger = self._ledger.only(source.entries.values())

    def _load_each(self, source: DirectoryCheckpoint | StoredTrajectories, chosen: Sequence[int]) -> None:
        """Read the trajectories and add them, one by one."""
        first = self._load_first(source, chosen)
        self.clear()
        for number in chosen:
            self.add_numbered(number, first if number == chosen[0] else source.load(number))

    def _load_first(
        self, source: DirectoryCheckpoint | StoredTrajectories, chosen: Sequence[int]
    ) -> Trajectory | None:
        """Load and check the first trajectory, before the buffer is cleared."""
        if not chosen:
            return None
        first = source.load(chosen[0])
        check_consistent([first])
        if self.auto_save:
            self._encode([first])
        return first

    def _restore_draws(self, state: Any) -> None:
        """Continue the draws from a saved state; does nothing if the state is missing or incomplete."""
        if self._memory is None:
            return
        reader = self._memory.reader
        if isinstance(state, dict) and all(type(state.get(name)) is int for name in ("seed", "counter")):
            reader.load_state_dict({**reader.state_dict(), "seed": state["seed"], "counter": state["counter"]})

    @property
    def _storage_options(self) -> Any:
        return self._options.get("storage_options")

    def _storage_options_for(self, path: Url) -> Any:
        """Return the storage options if ``path`` is on the same kind of storage as the buffer."""
        return self._storage_options if scheme(os.fspath(path)) == scheme(self._url) else None

    def _is_own_store(self, path: Url) -> bool:
        own, other = (text.removeprefix("file://").rstrip("/") for text in (self._url, os.fspath(path)))
        return own == other or ("://" not in own + other and os.path.realpath(own) == os.path.realpath(other))

    # ---- methods of the buffer that these need

    def clear(self) -> None:
        raise NotImplementedError

    def add_numbered(self, number: int, trajectory: Any) -> None:
        raise NotImplementedError

    def _check_open(self) -> None:
        raise NotImplementedError

    def _open_existing(self) -> None:
        raise NotImplementedError

    def _open(self, schema: Schema) -> Buffer:
        raise NotImplementedError

    def _session_options(self, schema: Schema) -> dict[str, Any]:
        raise NotImplementedError

    def _encode(self, trajectories: Sequence[Trajectory]) -> list[EncodedTrajectory]:
        raise NotImplementedError

    def _draw_seed(self, rank: int, n_ranks: int) -> int:
        raise NotImplementedError
