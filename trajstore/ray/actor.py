"""The actors of a service: each holds one rank of the buffer, and answers writers and learners."""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import ray
import torch

from trajstore.errors import DataError, StorageError
from trajstore.ray.batch_memory import BatchLayout
from trajstore.ray.block_receiver import BlockOutcome, BlockReceiver
from trajstore.ray.direct_connections import serve_learner
from trajstore.ray.draw_restrictions import DrawRestrictions, SharedFunction
from trajstore.ray.draw_weights import DrawWeight, measure_draw_weight
from trajstore.ray.rollout_blocks import BufferCall
from trajstore.ray.sample_reply import SampleReply
from trajstore.ray.service_spec import ServiceSpec, open_partition
from trajstore.replay.buffer import ReplayBuffer
from trajstore.sampling.batches.outputs import Ring, flat_outputs
from trajstore.sampling.windows import Windows
from trajstore.schema import Array

CONCURRENCY_GROUPS = {"sample": 1, "append": 1, "flush": 4, "update": 1, "control": 2}  # threads of each
_MAX_FUNCTIONS = 256
F = TypeVar("F", bound=Callable[..., Any])


def _remote_method(group: str, *, retry: bool) -> Callable[[F], F]:
    """Declare a method that learners and writers call.

    Args:
        group: Name of the concurrency group whose threads run it.
        retry: Whether Ray repeats a call that was lost when the actor died.
    """
    decorate: Any = ray.method(concurrency_group=group, max_task_retries=-1 if retry else 0)
    return cast(Callable[[F], F], decorate)


class PartitionActor:
    """One rank of the buffer, as a Ray actor. Appends, samples and updates run side by side, in threads."""

    def __init__(self, spec: ServiceSpec, rank: int) -> None:
        self._spec, self._rank = spec, rank
        self._incarnation = secrets.randbits(48)
        self._opening = threading.Lock()
        self._opened: ReplayBuffer | None = None
        self._is_restart = _was_restarted()
        if self._is_restart:
            with contextlib.suppress(Exception):  # an error here would end the actor; the next call tries again
                self.open()
        self._receiver = BlockReceiver(self._buffer, self._incarnation)
        self._n_writers = 0
        self._functions: dict[str, Any] = {}
        self._ring = Ring(1)

    @_remote_method("control", retry=True)
    def open(self) -> None:
        """Open the buffer if it is not open. With several ranks it returns when all have joined."""
        with self._opening:
            if self._opened is None:
                self._opened = open_partition(self._spec, self._rank, is_restart=self._is_restart)

    def _buffer(self) -> ReplayBuffer:
        if self._opened is None:
            self.open()
        assert self._opened is not None
        return self._opened

    @_remote_method("control", retry=True)
    def spec(self) -> ServiceSpec:
        return self._spec

    @_remote_method("control", retry=True)
    def incarnation(self) -> int:
        """A random number that changes with every restart of the actor."""
        return self._incarnation

    @_remote_method("control", retry=True)
    def next_writer(self) -> int:
        """Number of the next writer; writers are spread over the actors by it."""
        self._n_writers += 1
        return self._n_writers - 1

    # ---- appending

    @_remote_method("append", retry=False)
    def append(
        self, writer: str, incarnation: int, first: int, number: int, calls: Sequence[BufferCall]
    ) -> tuple[BlockOutcome, int, StorageError | None]:
        """Apply a block of a writer; see `BlockReceiver.receive`."""
        return self._receiver.receive(writer, incarnation, first, number, calls)

    @_remote_method("flush", retry=True)
    def flush(self) -> int:
        """Make all steps durable; returns the incarnation that did it."""
        self._receiver.flush()
        return self._incarnation

    @_remote_method("control", retry=True)
    def next_block(self, writer: str, first: int) -> tuple[int, int]:
        """The incarnation, and the number of the block that the writer sends next."""
        return self._incarnation, self._receiver.next_number(writer, first)

    @_remote_method("control", retry=True)
    def forget(self, writer: str) -> None:
        """Drop a closed writer; see `BlockReceiver.forget`."""
        self._receiver.forget(writer)

    # ---- sampling

    @_remote_method("sample", retry=True)
    def sample(
        self, n: int, windows: Windows | None, restrictions: DrawRestrictions, with_weight: bool
    ) -> SampleReply:
        restrictions = self._with_own_functions(restrictions)
        # Ray copies the reply before the thread runs the next call, so the ring's memory can be used again.
        batch = self._buffer().sample(n, windows, out=self._ring, **restrictions.keywords())
        weight = self._weight(windows, restrictions) if with_weight else DrawWeight()
        return SampleReply.of(flat_outputs(batch), self._number, weight)

    @property
    def _number(self) -> int:
        """Rank and incarnation as one number, which batches carry as ``actor``."""
        return self._incarnation * self._spec.n_actors + self._rank

    def _weight(self, windows: Windows | None, restrictions: DrawRestrictions) -> DrawWeight:
        buffer = self._buffer()
        return measure_draw_weight(buffer, windows or buffer.options.sample, restrictions)

    @_remote_method("control", retry=True)
    def serve(
        self,
        address: str,
        layout: BatchLayout,
        windows: Windows | None,
        restrictions: DrawRestrictions,
        with_weight: bool,
    ) -> bool:
        """Answer a learner over a direct connection from now on; False if it is not on this machine."""
        restrictions = self._with_own_functions(restrictions)
        keywords = restrictions.keywords()
        is_direct = self._buffer().options.device == "cpu"

        def write_windows(out: dict[str, torch.Tensor] | None) -> tuple[int, DrawWeight]:
            if out is not None:
                target = out if is_direct else None
                _write(self._buffer().sample(len(out["index"]), windows, out=target, **keywords), out)
            return self._number, self._weight(windows, restrictions) if with_weight else DrawWeight()

        return serve_learner(address, self._rank, layout, write_windows)

    def _with_own_functions(self, restrictions: DrawRestrictions) -> DrawRestrictions:
        return restrictions.with_functions(lambda f: self._function(f) if isinstance(f, SharedFunction) else f)

    def _function(self, shared: SharedFunction) -> Any:
        if shared.key not in self._functions:
            self._functions[shared.key] = ray.get(shared.ref)
            if len(self._functions) > _MAX_FUNCTIONS:
                self._functions.pop(next(iter(self._functions)))
        return self._functions[shared.key]

    @_remote_method("control", retry=True)
    def draw_weight(self, windows: Windows | None, restrictions: DrawRestrictions) -> DrawWeight:
        return self._weight(windows, self._with_own_functions(restrictions))

    @_remote_method("update", retry=False)
    def update_priorities(self, incarnation: int, index: Array, priority: Array, windows: Windows | None) -> int:
        """Set priorities; returns how many were ignored.

        All are ignored if the batch is from before a restart: its stream numbers mean nothing here.
        """
        if incarnation != self._incarnation:
            return len(index)
        tensors = torch.tensor(index), torch.tensor(priority)
        return self._buffer().update_priorities(*tensors, windows)

    # ---- other calls

    @_remote_method("control", retry=True)
    def sizes(self) -> tuple[int, int]:
        """Number of steps and of episodes."""
        return self._buffer().n_steps, self._buffer().n_episodes

    @_remote_method("control", retry=True)
    def stats(self) -> dict[str, Any]:
        return self._buffer().stats() | {"rank": self._rank, "pid": os.getpid(), "incarnation": self._incarnation}

    @_remote_method("control", retry=True)
    def call_buffer(self, method: str, arguments: Mapping[str, Any]) -> Any:
        """Call a method of the buffer that does no harm if Ray calls it twice."""
        return getattr(self._buffer(), method)(**arguments)

    @_remote_method("flush", retry=False)
    def save_checkpoint(self, name: str, keep_last: int | None) -> str:
        return self._buffer().save_checkpoint(name, wait=True, keep_last=keep_last)

    @_remote_method("flush", retry=True)
    def close(self) -> None:
        self._buffer().close()


def _write(batch: Any, out: Mapping[str, torch.Tensor]) -> None:
    """Copy the tensors of a batch into ``out``, except those that already share its memory.

    Raises:
        DataError: The batch has other keys.
    """
    flat = flat_outputs(batch)
    if flat.keys() != out.keys():
        raise DataError(f"batch: expected {sorted(out)}, got {sorted(flat)}")
    for key, value in flat.items():
        if value.data_ptr() != out[key].data_ptr():
            out[key].copy_(value)


def _was_restarted() -> bool:
    with warnings.catch_warnings():  # Ray's own property uses a deprecated part of Ray
        warnings.simplefilter("ignore")
        return bool(ray.get_runtime_context().was_current_actor_reconstructed)
