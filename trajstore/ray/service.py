"""A buffer as a service of Ray actors: collectors append, learners sample, all of one store.

Every actor holds one rank of a `ReplayBuffer` and with it a partition of the experience. What is committed lies in
the store, so an actor that dies is started again by Ray and shows what its partition had.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import ray
import torch

from trajstore.arguments import check_positive, parse_bytes
from trajstore.errors import DataError, StoreNotFoundError
from trajstore.format.handles import Handle, Handles
from trajstore.ray.actor import GROUPS, Partition, Spec, get
from trajstore.ray.learner import Flat, Learner
from trajstore.ray.writer import RayWriter
from trajstore.replay.options import ReplayOptions, check_options
from trajstore.sampling.outputs import to_batch
from trajstore.sampling.windows import Windows
from trajstore.schema import Schema
from trajstore.store.store import Url
from trajstore.writing.validation import Step

__all__ = ["RayReplayBuffer", "RayWriter"]

_NAMES = "trajstore-buffer"
_BLOCK_BYTES = 4 << 20
_BLOCK_STEPS = 256
_POLL_S = 0.05


def _start_actors(spec: Spec, name: str | None, actor_options: Mapping[str, Any]) -> tuple[Any, ...]:
    options = {"max_restarts": -1, "num_cpus": 1, **actor_options}
    remote: Any = ray.remote  # whose types do not know all of its options
    cls = remote(concurrency_groups=GROUPS)(Partition)
    actors = []
    for rank in range(spec.n_actors):
        named = {"name": _actor_name(name, rank)} if name is not None else {}
        actors.append(cls.options(**options, **named).remote(spec, rank))
    opening = [actor.open.remote() for actor in actors]
    try:
        while opening:  # the first that fails is the one that says why
            done, opening = ray.wait(opening)
            get(done)
    except BaseException:
        for actor in actors:
            ray.kill(actor)
        raise
    return tuple(actors)


def _actor_name(name: str, rank: int) -> str:
    return f"{_NAMES}/{name}/{rank}"


class RayReplayBuffer:
    """A handle of a buffer that lives in Ray actors; small, and may be passed to any task or actor.

    ```
    buffer = RayReplayBuffer.start("runs/7", n_actors=2, capacity=1_000_000, sample=Windows(length=32))
    with buffer.writer() as writer:  # on a collector
        writer.append({"observation": obs, "reward": reward}, envs=range(16), terminated=terminated)
    for batch in buffer.batches(256, prefetch=2):  # on a learner
        buffer.update_priorities(batch, td_error)
    ```

    Every actor holds a partition of the experience: what came from the writers that append to it. A batch is drawn
    from the union: each of its windows from an actor that is chosen in proportion to the windows that it has. Its
    arrays are mapped from Ray's memory, without a copy where one actor gave all of it. A batch holds what one of
    `ReplayBuffer.sample` does, and ``actor``, which says whose ``index`` each row is.

    With priorities, an actor is chosen in proportion to the sum of (p + eps)^alpha over its windows (by ``rank``:
    of (1 / rank)^alpha, ranks within a partition), and for a part ``uniform`` in proportion to its windows.
    Probabilities and weights are those of the whole draw: the chance of the actor times that of the window there.
    The largest priority, which new steps get, is that of the partition.

    Restrictions apply within partitions: ``recent_steps`` and ``recent_episodes`` are divided evenly among them,
    and the part ``recent_fraction`` holds for what each gives. ``samples_per_insert`` paces each actor for itself.

    An actor that dies is started again by Ray and shows what was committed. Its priorities are those of the last
    checkpoint, later steps are as new, and updates for batches from before are ignored. Calls that read are sent
    again by themselves.

    Args:
        actors: By rank.
        spec: What they have in common.
    """

    def __init__(self, actors: Sequence[Any], spec: Spec) -> None:
        self._actors, self._spec = tuple(actors), spec
        settled = spec.settled
        self._block_bytes = min(_BLOCK_BYTES, parse_bytes(settled.buffer_bytes, "buffer_bytes") // 4)
        self._learner = Learner(self._actors, settled.seed)
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
        actor_options: Mapping[str, Any] | None = None,
        **buffer_options: Any,
    ) -> RayReplayBuffer:
        """Start the actors, and return when the buffer is open; Ray is to be running (`ray.init`).

        Args:
            url: Of the store, as all actors reach it: on several machines an object store or a shared directory.
            n_actors: Over how many actors the experience is spread.
            name: To find the service by, with `connect`.
            schema: The fields; None: those of the store, or read off the first data.
            storage_options: Options for fsspec's filesystem; never stored or shown.
            fsync: Whether commits to a local directory survive a power cut.
            actor_options: For Ray: resources, ``lifetime="detached"``, ``scheduling_strategy``, ...
            buffer_options: As for `ReplayBuffer`, for every actor: so ``capacity`` and ``cache_bytes`` are each's.
        """
        return cls._start(url, n_actors, name, schema, storage_options, fsync, actor_options, buffer_options, None)

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
        actor_options: Mapping[str, Any] | None = None,
        **changes: Any,
    ) -> RayReplayBuffer:
        """Start the actors from a checkpoint, with any number of them; see `start` and `ReplayBuffer.resume`."""
        return cls._start(url, n_actors, name, None, storage_options, fsync, actor_options, changes, checkpoint)

    @classmethod
    def _start(
        cls,
        url: Url,
        n_actors: int,
        name: str | None,
        schema: Schema | None,
        storage_options: Mapping[str, Any] | None,
        fsync: bool,
        actor_options: Mapping[str, Any] | None,
        options: Mapping[str, Any],
        checkpoint: str | None,
    ) -> RayReplayBuffer:
        check_positive("n_actors", n_actors)
        check_options(ReplayOptions(), options)  # refuses what there is not, before anything is started
        if options.get("share") == "whole":
            raise ValueError("share='whole': every actor would have all of it; the service has partitions")
        as_tensordict = bool(options.get("as_tensordict"))
        spec = Spec(
            os.fspath(url),
            n_actors,
            schema,
            storage_options,
            fsync,
            {**options, "as_tensordict": False},
            checkpoint,
            as_tensordict,
        )
        return cls(_start_actors(spec, name, actor_options or {}), spec)

    @classmethod
    def connect(cls, name: str, *, namespace: str | None = None) -> RayReplayBuffer:
        """A handle of a service that was started with a name.

        Raises:
            StoreNotFoundError: There is no such service.
        """
        find: Any = ray.get_actor
        try:
            first = find(_actor_name(name, 0), namespace)
            spec: Spec = get(first.spec.remote())
            return cls(
                [first, *(find(_actor_name(name, rank), namespace) for rank in range(1, spec.n_actors))], spec
            )
        except ValueError as error:
            raise StoreNotFoundError(
                f"no buffer named {name!r} runs in this namespace; start it with RayReplayBuffer.start(name=...)"
            ) from error

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
            actor: Which actor to append to; None: one after the other.
            block_steps: Send when so many steps are gathered.
            block_bytes: Or so many bytes; 4 MiB, or less where the buffer is small.
            block_s: Or when, at a call, the oldest has waited so long.
            in_flight: Blocks that may be on their way; then calls wait.
        """
        number = get(self._actors[0].next_writer.remote()) if actor is None else actor
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
        """The writer of this handle in this process, made when it is first needed."""
        with self._lock:
            if self._writer is None:
                self._writer = self.writer()
            return self._writer

    def append(self, step: Step, **options: Any) -> Handle | Handles:
        """Append with a writer of this handle; see `RayWriter.append`."""
        return self._own_writer.append(step, **options)

    def extend(self, data: Step, **options: Any) -> Handles:
        """Append with a writer of this handle; see `RayWriter.extend`."""
        return self._own_writer.extend(data, **options)

    def add_episode(self, data: Step, **options: Any) -> None:
        """Append with a writer of this handle; see `RayWriter.add_episode`."""
        self._own_writer.add_episode(data, **options)

    def end_episode(self, env: int = 0, **options: Any) -> None:
        """End an episode of this handle's writer; see `RayWriter.end_episode`."""
        self._own_writer.end_episode(env, **options)

    def abort_episode(self, env: int = 0) -> None:
        """Give up an episode of this handle's writer; see `RayWriter.abort_episode`."""
        self._own_writer.abort_episode(env)

    def flush(self) -> int:
        """Make durable what this handle appended, and what other writers' blocks that have arrived hold.

        Returns:
            How many steps of this handle's own may be lost since the last flush; 0 unless an actor died.
        """
        n_lost = self._writer.flush() if self._writer is not None else 0
        self._all("flush")
        return n_lost

    # ---- sampling

    def sample(self, batch_size: int, windows: Windows | None = None, **which: Any) -> Any:
        """Draw a batch from the union of the partitions; see `ReplayBuffer.sample` for what ``which`` may be.

        With several actors, they are asked first how much each has. Rows of one actor stand together.
        """
        return self._batch(self._learner.sample(batch_size, windows, which))

    def batches(
        self, batch_size: int, windows: Windows | None = None, *, prefetch: int = 2, **which: Any
    ) -> Generator[Any, None, None]:
        """An endless iterator over batches, with ``prefetch`` asked for ahead; its ``close`` frees what it has.

        With several actors, how much each has is known from the newest batch that came, so it may be as old as
        ``prefetch`` + 1 batches.
        """
        return self._iterate(self._learner.batches(batch_size, windows, prefetch, which))

    def _iterate(self, batches: Generator[Flat, None, None]) -> Generator[Any, None, None]:
        with contextlib.closing(batches):
            while True:
                yield self._batch(next(batches))

    def _batch(self, flat: Flat) -> Any:
        return to_batch(flat, self._spec.as_tensordict)

    def update_priorities(
        self, batch: Any, priority: torch.Tensor, windows: Windows | None = None, *, wait: bool = True
    ) -> int:
        """Send priorities back to where windows came from; see `ReplayBuffer.update_priorities`.

        Args:
            batch: A batch, or its ``actor`` and ``index`` as one tensor ``[batch, 4]``.
            priority: ``[batch]``, or ``[batch, length]``.
            windows: What was sampled, where its stride is not 1.
            wait: Until they are set; otherwise a failure is raised by one of the next calls of this.

        Returns:
            How many were ignored, because their steps were evicted or their actor was restarted since; 0 if it does
            not wait.
        """
        return self._learner.update_priorities(*_named(batch), priority, windows, wait=wait)

    # ---- all the rest

    def _all(self, method: str, *given: Any) -> list[Any]:
        """Call all actors at once; raises the first failure when all have answered."""
        refs = [getattr(actor, method).remote(*given) for actor in self._actors]
        ray.wait(refs, num_returns=len(refs), fetch_local=False)
        return [get(ref) for ref in refs]

    @property
    def n_steps(self) -> int:
        return sum(n_steps for n_steps, _ in self._all("figures"))

    @property
    def n_episodes(self) -> int:
        return sum(n_episodes for _, n_episodes in self._all("figures"))

    def __len__(self) -> int:
        """Number of steps."""
        return self.n_steps

    def n_windows(self, windows: Windows | None = None) -> int:
        """How many windows can be drawn."""
        return sum(self._all("call", "n_windows", {"windows": windows}))

    def is_ready(self, *, min_steps: int = 1, min_episodes: int = 0) -> bool:
        """Whether so much can be sampled already, all actors together."""
        figures = self._all("figures")
        n_steps, n_episodes = (sum(figure[i] for figure in figures) for i in range(2))
        return bool(n_steps >= min_steps and n_episodes >= min_episodes)

    def wait_ready(self, *, min_steps: int = 1, min_episodes: int = 0, timeout_s: float | None = None) -> None:
        """Wait until collectors have appended so much.

        Raises:
            TimeoutError: They have not.
        """
        until = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while not self.is_ready(min_steps=min_steps, min_episodes=min_episodes):
            if time.monotonic() >= until:
                raise TimeoutError(f"waited {timeout_s} s for {min_steps} steps in {min_episodes} episodes")
            time.sleep(_POLL_S)

    def save_checkpoint(self, name: str = "checkpoint", *, keep_last: int | None = None) -> str:
        """Name the state of this moment in all actors; returns its id when it is durable.

        Blocks that writers have not sent yet, or that are on their way, are in it or not: flush first.

        Raises:
            Exception: What failed, in whichever actor; then there is no such checkpoint.
        """
        ids: list[str] = self._all("save_checkpoint", name, keep_last)
        return ids[0]

    def stats(self) -> list[dict[str, Any]]:
        """Figures of every actor, by rank; see `ReplayBuffer.stats`."""
        return self._all("stats")

    def close(self) -> None:
        """Flush, close the buffers, and end the actors."""
        if self._writer is not None:
            self._writer.close()
        self._learner.close()
        self._all("close")
        for actor in self._actors:
            ray.kill(actor)

    def __enter__(self) -> RayReplayBuffer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<RayReplayBuffer {self.url}, {self.n_actors} actors>"


def _named(batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    if not isinstance(batch, torch.Tensor):
        return batch["actor"].cpu(), batch["index"].cpu()
    if batch.dim() != 2 or batch.shape[1] != 4 or batch.dtype != torch.int64:
        raise DataError(
            f"batch: expected one, or int64 of shape (batch, 4), got {batch.dtype} of shape {tuple(batch.shape)}"
        )
    return batch[:, 0].cpu(), batch[:, 1:].cpu()
