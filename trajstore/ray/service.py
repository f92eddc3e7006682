"""RayReplayBuffer: a buffer as a service of Ray actors. Collectors append, learners sample, all from one store.

Every actor holds one rank of a `ReplayBuffer`, and with it a partition of the experience. Committed steps are in
the store, so Ray can restart an actor that died: it shows again what was committed of its partition.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import Any, Unpack

import ray
import torch

from trajstore.arguments import parse_bytes
from trajstore.errors import DataError
from trajstore.format.handles import Handle, Handles
from trajstore.ray.batch_parts import FlatBatch
from trajstore.ray.draw_restrictions import DrawRestrictions
from trajstore.ray.ray_calls import get_result
from trajstore.ray.service_spec import ServiceSpec
from trajstore.ray.service_start import find_service, start_actors
from trajstore.ray.union_sampler import UnionSampler
from trajstore.ray.writer import RayWriter
from trajstore.replay.options import PartitionChanges
from trajstore.sampling.batches.batch_assembler import Where
from trajstore.sampling.batches.outputs import to_batch
from trajstore.sampling.hindsight import Hindsight
from trajstore.sampling.windows import Windows
from trajstore.schema import Schema
from trajstore.storage import DiskCache
from trajstore.store.store import Url
from trajstore.writing.open_episodes import Flags
from trajstore.writing.validation import Step

__all__ = ["RayReplayBuffer", "RayWriter"]

_BLOCK_BYTES = 4 << 20
_BLOCK_STEPS = 256
_POLL_S = 0.05


class RayReplayBuffer:
    """A handle of a buffer that runs in Ray actors. It is small, and can be passed to any task or actor.

    ```
    buffer = RayReplayBuffer.start("runs/7", n_actors=2, capacity=1_000_000, sample=Windows(length=32))
    with buffer.writer() as writer:  # on a collector
        writer.append({"observation": obs, "reward": reward}, envs=range(16), terminated=terminated)
    for batch in buffer.batches(256, prefetch=2):  # on a learner
        buffer.update_priorities(batch, td_error)
    ```

    Every actor holds a partition of the experience: the steps of the writers that append to it. A batch is drawn
    from the union of the partitions: each window from an actor that is chosen in proportion to the number of its
    windows. The arrays of a batch are mapped from Ray's memory, without a copy if one actor gave all of it. A batch
    holds what a batch of `ReplayBuffer.sample` does, and ``actor``: the actor whose ``index`` each row has.

    With priorities, an actor is chosen in proportion to the sum of (p + eps)^alpha over its windows (with ``rank``:
    of (1 / rank)^alpha, with ranks inside the partition), and for the part ``uniform`` in proportion to the number
    of its windows. Probabilities and weights are those of the whole draw: the probability of the actor times that
    of the window in the actor. New steps get the largest priority of their partition.

    Restrictions apply inside partitions: ``recent_steps`` and ``recent_episodes`` are divided evenly among them,
    and ``recent_fraction`` holds for the windows that each actor gives. ``samples_per_insert`` paces each actor
    alone.

    Ray restarts an actor that died; it shows what was committed. Its priorities are those of the last checkpoint,
    later steps have the priority of new steps, and updates for batches from before the restart are ignored. Calls
    that read are repeated automatically.

    Args:
        actors: By rank.
        spec: The options that all actors share.
    """

    def __init__(self, actors: Sequence[Any], spec: ServiceSpec) -> None:
        self._actors, self._spec = tuple(actors), spec
        options = spec.replay_options
        self._block_bytes = min(_BLOCK_BYTES, parse_bytes(options.buffer_bytes, "buffer_bytes") // 4)
        self._sampler = UnionSampler(self._actors, options.seed)
        self._writer: RayWriter | None = None
        self._lock = threading.RLock()

    @classmethod
    def start(
        cls,
        url: Url,
        *,
        n_actors: int = 1,
        name: str | None = None,
        schema: Schema | None = None,
        storage_options: Mapping[str, Any] | None = None,
        fsync: bool = True,
        disk_cache: DiskCache | None = None,
        actor_options: Mapping[str, Any] | None = None,
        **buffer_options: Unpack[PartitionChanges],
    ) -> RayReplayBuffer:
        """Start the actors, and return when the buffer is open. Ray must be running (`ray.init`).

        Args:
            url: URL of the store, as all actors reach it: on several machines an object store or a shared
                directory.
            n_actors: Number of actors that the experience is spread over.
            name: Name of the service, for `connect`.
            schema: The fields; None: those of the store, or inferred from the first data.
            storage_options: Options for fsspec's filesystem; never stored or shown.
            fsync: Whether commits to a local directory survive a power cut.
            disk_cache: Where the actors of a machine keep what they read of a remote store, on a local disk.
            actor_options: Options for Ray: resources, ``lifetime="detached"``, ``scheduling_strategy``, ...
            buffer_options: Options of `ReplayBuffer`. They apply to each actor: ``capacity`` and ``cache_bytes``
                are those of one actor.
        """
        spec = ServiceSpec.of(url, n_actors, schema, storage_options, fsync, disk_cache, buffer_options, None)
        return cls(start_actors(spec, name, actor_options or {}), spec)

    @classmethod
    def resume(
        cls,
        url: Url,
        checkpoint: str = "latest",
        *,
        n_actors: int = 1,
        name: str | None = None,
        storage_options: Mapping[str, Any] | None = None,
        fsync: bool = True,
        disk_cache: DiskCache | None = None,
        actor_options: Mapping[str, Any] | None = None,
        **changes: Unpack[PartitionChanges],
    ) -> RayReplayBuffer:
        """Start the actors from a checkpoint, with any number of actors; see `start` and `ReplayBuffer.resume`.

        Args:
            url: URL of the store.
            checkpoint: Name or id of a checkpoint, or "latest".
            n_actors: As for `start`; need not be the number that saved the checkpoint.
            name: As for `start`.
            storage_options: As for `start`.
            fsync: As for `start`.
            disk_cache: As for `start`.
            actor_options: As for `start`.
            changes: Options that differ from those of the session that saved the checkpoint.
        """
        spec = ServiceSpec.of(url, n_actors, None, storage_options, fsync, disk_cache, changes, checkpoint)
        return cls(start_actors(spec, name, actor_options or {}), spec)

    @classmethod
    def connect(cls, name: str, *, namespace: str | None = None) -> RayReplayBuffer:
        """A handle of a service that was started with a name.

        Raises:
            StoreNotFoundError: No service has this name.
        """
        return cls(*find_service(name, namespace))

    def __reduce__(self) -> tuple[Any, ...]:
        return RayReplayBuffer, (self._actors, self._spec)

    @property
    def n_actors(self) -> int:
        return len(self._actors)

    @property
    def url(self) -> str:
        return self._spec.url

    # ---- appending

    def writer(
        self,
        *,
        actor: int | None = None,
        block_steps: int = _BLOCK_STEPS,
        block_bytes: int | str | None = None,
        block_s: float = 1.0,
        in_flight: int = 4,
    ) -> RayWriter:
        """A writer for one collector.

        Args:
            actor: Rank of the actor to append to; None: writers are spread evenly over the actors.
            block_steps: Send a block of steps when it has this many steps,
            block_bytes: or this many bytes (by default 4 MiB, or less if the buffer is small),
            block_s: or, at a call, when its first step has waited for this many seconds.
            in_flight: Number of blocks that may be unanswered; then calls wait.
        """
        number = get_result(self._actors[0].next_writer.remote()) if actor is None else actor
        n_bytes = self._block_bytes if block_bytes is None else parse_bytes(block_bytes, "block_bytes")
        return RayWriter(
            self._actors[number % self.n_actors],
            block_steps=block_steps,
            block_bytes=n_bytes,
            block_s=block_s,
            in_flight=in_flight,
        )

    @property
    def _own_writer(self) -> RayWriter:
        """The writer of this handle in this process, created when it is first used."""
        with self._lock:
            if self._writer is None:
                self._writer = self.writer()
            return self._writer

    def append(
        self,
        step: Step,
        *,
        env: int | None = None,
        envs: Iterable[int] | None = None,
        terminated: Flags = None,
        truncated: Flags = None,
        final: Step | None = None,
    ) -> Handle | Handles:
        """Append with the writer of this handle; see `RayWriter.append`."""
        return self._own_writer.append(
            step, env=env, envs=envs, terminated=terminated, truncated=truncated, final=final
        )

    def extend(
        self,
        data: Step,
        *,
        envs: Iterable[int] | None = None,
        terminated: Flags = None,
        truncated: Flags = None,
        final: Step | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> Handles:
        """Append with the writer of this handle; see `RayWriter.extend`."""
        return self._own_writer.extend(
            data, envs=envs, terminated=terminated, truncated=truncated, final=final, metadata=metadata
        )

    def add_episode(
        self,
        data: Step,
        *,
        terminated: bool = False,
        truncated: bool = False,
        env: int = 0,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        """Append with the writer of this handle; see `RayWriter.add_episode`."""
        self._own_writer.add_episode(data, terminated=terminated, truncated=truncated, env=env, metadata=metadata)

    def end_episode(
        self,
        env: int = 0,
        *,
        terminated: bool = False,
        truncated: bool = False,
        final: Step | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        """End an episode of the writer of this handle; see `RayWriter.end_episode`."""
        self._own_writer.end_episode(
            env, terminated=terminated, truncated=truncated, final=final, metadata=metadata
        )

    def abort_episode(self, env: int = 0) -> None:
        """Give up an episode of the writer of this handle; see `RayWriter.abort_episode`."""
        self._own_writer.abort_episode(env)

    def flush(self) -> int:
        """Make durable all steps of this handle, and all blocks of other writers that have arrived.

        Returns:
            The number of steps of this handle since its last flush that may be lost; 0 unless an actor died.
        """
        n_lost = self._writer.flush() if self._writer is not None else 0
        self._call_all("flush")
        return n_lost

    # ---- sampling

    def sample(
        self,
        batch_size: int,
        windows: Windows | None = None,
        *,
        where: Where | None = None,
        recent_steps: int | None = None,
        recent_episodes: int | None = None,
        recent_fraction: float = 1.0,
        prioritised: bool = True,
        relabel: Hindsight | None = None,
    ) -> Any:
        """Draw a batch from the union of the partitions; see `ReplayBuffer.sample`.

        With several actors, all are first asked how much they have. Rows of one actor are next to each other.

        Args:
            batch_size: Number of windows.
            windows: Which windows, and what comes with them; by default those that the buffer was made with.
            where: Draw only from episodes for which this function of the episode table returns True.
            recent_steps: Draw only windows that start within this many of the newest steps, over all actors.
            recent_episodes: Draw only from this many of the newest episodes, over all actors.
            recent_fraction: The part of the batch to which the two limits apply.
            prioritised: False: draw uniformly, although the buffer has priorities.
            relabel: Give some windows goals that were achieved, and the rewards that go with them.
        """
        restrictions = DrawRestrictions(where, recent_steps, recent_episodes, recent_fraction, prioritised, relabel)
        return self._to_batch(self._sampler.sample(batch_size, windows, restrictions))

    def batches(
        self,
        batch_size: int,
        windows: Windows | None = None,
        *,
        prefetch: int = 2,
        where: Where | None = None,
        recent_steps: int | None = None,
        recent_episodes: int | None = None,
        recent_fraction: float = 1.0,
        prioritised: bool = True,
        relabel: Hindsight | None = None,
    ) -> Generator[Any, None, None]:
        """An endless iterator over batches; ``prefetch`` of them are requested ahead. See `sample`.

        Its ``close`` frees its connections and memory. With several actors, how much each has is known from the
        newest batch received, so it may be ``prefetch`` + 1 batches old.
        """
        restrictions = DrawRestrictions(where, recent_steps, recent_episodes, recent_fraction, prioritised, relabel)
        return self._iterate(self._sampler.batches(batch_size, windows, prefetch, restrictions))

    def _iterate(self, batches: Generator[FlatBatch, None, None]) -> Generator[Any, None, None]:
        with contextlib.closing(batches):
            while True:
                yield self._to_batch(next(batches))

    def _to_batch(self, flat: FlatBatch) -> Any:
        return to_batch(flat, self._spec.as_tensordict)

    def update_priorities(
        self, batch: Any, priority: torch.Tensor, windows: Windows | None = None, *, wait: bool = True
    ) -> int:
        """Send priorities back to the actors that gave the windows; see `ReplayBuffer.update_priorities`.

        Args:
            batch: A batch, or its ``actor`` and ``index`` as one tensor ``[batch, 4]``.
            priority: ``[batch]``, or ``[batch, length]``.
            windows: The windows that were sampled, if their stride is not 1.
            wait: Return when the priorities are set. Otherwise a later call of this method raises failures.

        Returns:
            The number of priorities that were ignored, because their steps were evicted or their actor was
            restarted since; 0 without ``wait``.
        """
        return self._sampler.update_priorities(*_window_names(batch), priority, windows, wait=wait)

    # ---- other methods

    def _call_all(self, method: str, *arguments: Any) -> list[Any]:
        """Call all actors at the same time; raises the first failure after all have answered."""
        refs = [getattr(actor, method).remote(*arguments) for actor in self._actors]
        ray.wait(refs, num_returns=len(refs), fetch_local=False)
        return [get_result(ref) for ref in refs]

    @property
    def n_steps(self) -> int:
        return sum(n_steps for n_steps, _ in self._call_all("sizes"))

    @property
    def n_episodes(self) -> int:
        return sum(n_episodes for _, n_episodes in self._call_all("sizes"))

    def __len__(self) -> int:
        """Number of steps."""
        return self.n_steps

    def n_windows(self, windows: Windows | None = None) -> int:
        """The number of windows that can be drawn."""
        return sum(self._call_all("call_buffer", "n_windows", {"windows": windows}))

    def is_ready(self, *, min_steps: int = 1, min_episodes: int = 0) -> bool:
        """Whether the actors together have this many steps and episodes."""
        sizes = self._call_all("sizes")
        n_steps, n_episodes = (sum(size[i] for size in sizes) for i in range(2))
        return bool(n_steps >= min_steps and n_episodes >= min_episodes)

    def wait_ready(self, *, min_steps: int = 1, min_episodes: int = 0, timeout_s: float | None = None) -> None:
        """Wait until collectors have appended this many steps and episodes.

        Raises:
            TimeoutError: They have not within ``timeout_s``.
        """
        until = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while not self.is_ready(min_steps=min_steps, min_episodes=min_episodes):
            if time.monotonic() >= until:
                raise TimeoutError(f"waited {timeout_s} s for {min_steps} steps in {min_episodes} episodes")
            time.sleep(_POLL_S)

    def save_checkpoint(self, name: str = "checkpoint", *, keep_last: int | None = None) -> str:
        """Save a checkpoint of all actors; returns its id when it is durable.

        Blocks that a writer has not sent yet, or that are still on their way, may be missing from it: flush first.

        Args:
            name: Name of the checkpoint.
            keep_last: Number of checkpoints to keep; see `ReplayBuffer.save_checkpoint`.

        Raises:
            Exception: The failure of an actor; then the checkpoint does not exist.
        """
        ids: list[str] = self._call_all("save_checkpoint", name, keep_last)
        return ids[0]

    def stats(self) -> list[dict[str, Any]]:
        """Statistics of every actor, by rank; see `ReplayBuffer.stats`."""
        return self._call_all("stats")

    def close(self) -> None:
        """Flush, close the buffers, and end the actors."""
        if self._writer is not None:
            self._writer.close()
        self._sampler.close()
        self._call_all("close")
        for actor in self._actors:
            ray.kill(actor)

    def __enter__(self) -> RayReplayBuffer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<RayReplayBuffer {self.url}, {self.n_actors} actors>"


def _window_names(batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The actors and indices that name the windows of a batch."""
    if not isinstance(batch, torch.Tensor):
        return batch["actor"].cpu(), batch["index"].cpu()
    if batch.dim() != 2 or batch.shape[1] != 4 or batch.dtype != torch.int64:
        raise DataError(
            "batch: expected a batch, or int64 of shape (batch, 4),"
            f" got {batch.dtype} of shape {tuple(batch.shape)}"
        )
    return batch[:, 0].cpu(), batch[:, 1:].cpu()
