"""The actors of a buffer that is a service of Ray: each has one rank of it, and answers writers and learners."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import secrets
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, cast

import numpy as np
import ray
import torch
from ray.exceptions import ActorUnavailableError, RayActorError, RayTaskError

from trajstore.errors import ClosedError, DataError, RankError, StorageError
from trajstore.ray.rollout_blocks import Op
from trajstore.ray.shared_memory import Layout, Share, serve
from trajstore.replay.buffer import ReplayBuffer
from trajstore.replay.options import ReplayOptions, check_options
from trajstore.sampling.draws import DrawScope, first_recent
from trajstore.sampling.outputs import Ring, flat_outputs
from trajstore.sampling.prioritised_draws import PrioritySampler
from trajstore.sampling.windows import Windows
from trajstore.schema import Array, Schema

_log = logging.getLogger(__name__)
GROUPS = {"sample": 1, "append": 1, "flush": 4, "update": 1, "control": 2}
_MAX_FUNCTIONS = 256
F = TypeVar("F", bound=Callable[..., Any])


def _in(group: str, *, again: bool) -> Callable[[F], F]:
    """Which threads carry a method out, and whether Ray may send a call again to an actor that was restarted."""
    decorate: Any = ray.method(concurrency_group=group, max_task_retries=-1 if again else 0)
    return cast(Callable[[F], F], decorate)


@dataclass(frozen=True)
class Spec:
    """What the actors of one service have in common; handles carry it."""

    url: str
    n_actors: int
    schema: Schema | None
    storage_options: Mapping[str, Any] | None = field(repr=False)
    fsync: bool
    options: Mapping[str, Any]
    checkpoint: str | None = None
    as_tensordict: bool = False

    @property
    def settled(self) -> ReplayOptions:
        return check_options(ReplayOptions(), self.options)


def _open_partition(spec: Spec, rank: int, is_restart: bool) -> ReplayBuffer:
    """The buffer of one actor: new, resumed from a checkpoint, or again after the actor died."""
    place: dict[str, Any] = {"storage_options": spec.storage_options, "fsync": spec.fsync}
    # Through the store, also if there is but one: so it can be found again by an actor that is restarted.
    options = {**spec.options, "rank": rank, "world_size": spec.n_actors, "through": "store"}
    if is_restart:
        with contextlib.suppress(RankError):  # it died before it had begun
            return ReplayBuffer.rejoin(spec.url, **place, **options)
    if spec.checkpoint is not None:
        return ReplayBuffer.resume(spec.url, spec.checkpoint, **place, **options)
    return ReplayBuffer(spec.url, schema=spec.schema, **place, **options)


@dataclass(frozen=True)
class Piece:
    """What an actor answers to a sample call: arrays by flat key, which Ray maps without a copy.

    Attributes:
        arrays: The values; bits, where they are bfloat16.
        bfloat16: Which of them are.
        actor: Rank and incarnation as one number.
        share: What the next draw is in proportion to.
    """

    arrays: dict[str, Array]
    bfloat16: tuple[str, ...]
    actor: int
    share: Share


@dataclass(frozen=True)
class Shared:
    """A function that calls name again and again: actors keep it by its key, so that it stays one function."""

    key: str
    ref: Any


def _to_wire(flat: Mapping[str, torch.Tensor]) -> tuple[dict[str, Array], tuple[str, ...]]:
    odd = tuple(key for key, value in flat.items() if value.dtype == torch.bfloat16)
    plain = {key: (value.view(torch.int16) if key in odd else value).cpu() for key, value in flat.items()}
    return {key: value.contiguous().numpy() for key, value in plain.items()}, odd


class _Writable:
    """Shows a read-only array as one that may be written: torch warns of others.

    Ray maps its memory for writing as well, and an answer belongs to the one who asked, so nothing is harmed.
    """

    def __init__(self, array: Array) -> None:
        self._array = array  # keeps Ray's memory as long as the view lives
        interface = array.__array_interface__
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}


def to_tensors(piece: Piece) -> dict[str, torch.Tensor]:
    flat = {key: _to_tensor(array) for key, array in piece.arrays.items()}
    return flat | {key: flat[key].view(torch.bfloat16) for key in piece.bfloat16}


def _to_tensor(array: Array) -> torch.Tensor:
    return torch.from_numpy(array if array.flags.writeable or not array.size else np.asarray(_Writable(array)))


def get(ref: Any, timeout_s: float | None = None) -> Any:
    """What a call returned; what it raised is raised as it was there."""
    try:
        return ray.get(ref, timeout=timeout_s)
    except RayTaskError as failure:
        raise failure.cause from failure
    except ActorUnavailableError as failure:
        raise StorageError(f"an actor of the buffer is being started again; try again: {failure}") from failure
    except RayActorError as failure:
        raise ClosedError(f"an actor of the buffer is gone, and is not started again: {failure}") from failure


def _share(buffer: ReplayBuffer, windows: Windows, which: Mapping[str, Any]) -> Share:
    """What a draw from this partition would be in proportion to."""
    names = ("where", "recent_steps", "recent_episodes", "recent_fraction")
    among = DrawScope(**{name: which[name] for name in names if name in which})
    source, sampler = buffer.reader._source, buffer.reader._priorities
    with source.lock:
        source.publish()
        if not source.index.n_steps:
            return Share()
        kind = source.kind(windows, among.where)
        if sampler is not None and which.get("prioritised", True):
            return _mass(sampler, windows, among)
        total = float(kind.starts.total)
        if not among.is_recent:
            return Share(((1.0, total), (0.0, 0.0)))
        fraction = among.recent_fraction
        return Share(((fraction, total - first_recent(kind, among)), (1 - fraction, total)))


def _mass(sampler: PrioritySampler, windows: Windows, among: DrawScope) -> Share:
    """The sum of (p + eps)^alpha over what can be drawn, on one scale for all partitions."""
    mass, options, fraction = sampler.mass(windows, among), sampler.options, among.recent_fraction
    if mass is None:
        return Share()
    parts = (1 - options.uniform, mass.total), (options.uniform, float(mass.n_windows))
    if among.is_recent:
        parts = (fraction, mass.recent), (1 - fraction, mass.total)
    is_by_buffer = options.normalize == "buffer" and not among.is_recent
    least = mass.least if is_by_buffer else math.inf
    return Share(parts, least, options.beta_at(sampler.n_batches), is_by_buffer)


@dataclass
class _Inbox:
    """What came from one writer: which block is next, which are durable, and its environments here."""

    next: int
    is_anew: bool = False  # there were blocks before, which are lost or in other environments
    durable: int = 0
    envs: dict[int, int] = field(default_factory=dict)


Outcome = Literal["taken", "gap", "stale", "later"]


class Partition:
    """The actor: one rank of the buffer. Appends, samples and updates run beside each other, in threads."""

    def __init__(self, spec: Spec, rank: int) -> None:
        self._spec, self._rank = spec, rank
        self._incarnation = secrets.randbits(48)
        self._opening = threading.Lock()
        self._opened: ReplayBuffer | None = None
        self._is_restart = _was_restarted()
        if self._is_restart:
            with contextlib.suppress(Exception):  # an error here would be the end; the next call tries again
                self.open()
        self._inboxes: dict[str, _Inbox] = {}
        self._n_envs = self._n_writers = 0
        self._marked_at = time.monotonic()
        self._functions: dict[str, Any] = {}
        self._ring = Ring(1)

    @_in("control", again=True)
    def open(self) -> None:
        """Open the buffer, if it is not open; with several ranks, when all do."""
        with self._opening:
            if self._opened is None:
                self._opened = _open_partition(self._spec, self._rank, self._is_restart)

    @property
    def _buffer(self) -> ReplayBuffer:
        if self._opened is None:
            self.open()
        assert self._opened is not None
        return self._opened

    @_in("control", again=True)
    def spec(self) -> Spec:
        return self._spec

    @_in("control", again=True)
    def incarnation(self) -> int:
        """Another number after every restart."""
        return self._incarnation

    @_in("control", again=True)
    def next_writer(self) -> int:
        self._n_writers += 1
        return self._n_writers - 1

    # ---- appending

    @_in("append", again=False)
    def append(
        self, writer: str, incarnation: int, first: int, number: int, ops: Sequence[Op]
    ) -> tuple[Outcome, int, StorageError | None]:
        """Take the next block of a writer, once.

        Returns:
            What became of it; below which number all blocks are durable; what failed, where nothing of the block
            was taken because the storage does.
        """
        if incarnation != self._incarnation:
            return "stale", 0, None
        inbox = self._inboxes.setdefault(writer, _Inbox(first, is_anew=first > 0))
        if number > inbox.next:  # one before it failed: nothing is to be joined to an episode with a hole
            return "gap", inbox.durable, None
        if number == inbox.next:
            failure = self._apply(inbox, ops)
            if failure is not None:
                return "later", inbox.durable, failure
            inbox.next += 1
            self._mark()
        return "taken", inbox.durable, None

    def _apply(self, inbox: _Inbox, ops: Sequence[Op]) -> StorageError | None:
        for i, (verb, given) in enumerate(ops):
            try:
                self._apply_one(inbox, verb, given)
            except StorageError as failure:
                if i == 0:
                    return failure
                raise
        return None

    def _apply_one(self, inbox: _Inbox, verb: str, given: Mapping[str, Any]) -> None:
        envs = given["envs"]
        if verb in ("end_episode", "abort_episode") and inbox.is_anew and envs[0] not in inbox.envs:
            return  # its steps came before, and the episode reads as cut
        mapped = [self._env(inbox, env) for env in envs]
        which: Any = {"envs": mapped} if verb == "extend" else {"env": mapped[0]}
        getattr(self._buffer, verb)(**which, **{name: value for name, value in given.items() if name != "envs"})

    def _env(self, inbox: _Inbox, env: int) -> int:
        """The environment of the buffer for one of a writer: never the same for two."""
        if env not in inbox.envs:
            inbox.envs[env] = self._n_envs
            self._n_envs += 1
        return inbox.envs[env]

    def _mark(self) -> None:
        """Now and then note what is durable, so that writers know what they could lose."""
        every = self._buffer.options.commit_seconds
        if every is None or time.monotonic() - self._marked_at < every:
            return
        self._marked_at = time.monotonic()
        taken = [(inbox, inbox.next) for inbox in self._inboxes.values()]
        try:
            self._buffer.session.writer.capture_record(lambda record: _set_durable(taken))
        except StorageError as failure:  # the block is taken; flush tries again, and raises it if it lasts
            _log.warning("a commit failed: %s", failure)

    @_in("flush", again=True)
    def flush(self) -> int:
        taken = [(inbox, inbox.next) for inbox in list(self._inboxes.values())]
        self._buffer.flush()
        _set_durable(taken)
        return self._incarnation

    @_in("control", again=True)
    def received(self, writer: str, first: int) -> tuple[int, int]:
        """Which incarnation this is, and the number of the block that the writer is to send next."""
        return self._incarnation, self._inboxes.get(writer, _Inbox(first)).next

    @_in("control", again=True)
    def forget(self, writer: str) -> None:
        """A writer is closed; its environments are not used again, an episode left open in one stays so."""
        self._inboxes.pop(writer, None)

    # ---- sampling

    @_in("sample", again=True)
    def sample(self, n: int, windows: Windows | None, which: Mapping[str, Any], with_share: bool) -> Piece:
        which = self._settled(which)
        # What a call returns is copied by Ray before its thread has another, so the memory is used again.
        flat = flat_outputs(self._buffer.sample(n, windows, out=self._ring, **which))
        arrays, odd = _to_wire(flat)
        return Piece(arrays, odd, self._name, self._share_of(windows, which) if with_share else Share())

    @property
    def _name(self) -> int:
        return self._incarnation * self._spec.n_actors + self._rank

    def _share_of(self, windows: Windows | None, which: Mapping[str, Any]) -> Share:
        return _share(self._buffer, windows or self._buffer.options.sample, which)

    @_in("control", again=True)
    def serve(
        self, address: str, layout: Layout, windows: Windows | None, which: Mapping[str, Any], with_share: bool
    ) -> bool:
        """Answer a learner over a line from now on; False if it is not on this machine."""
        settled = self._settled(which)
        is_direct = self._buffer.options.device == "cpu"

        def fill(out: dict[str, torch.Tensor] | None) -> tuple[int, Share]:
            if out is not None:
                given = out if is_direct else None
                _write(self._buffer.sample(len(out["index"]), windows, out=given, **settled), out)
            return self._name, self._share_of(windows, settled) if with_share else Share()

        return serve(address, self._rank, layout, fill)

    def _settled(self, which: Mapping[str, Any]) -> dict[str, Any]:
        return {name: self._function(v) if isinstance(v, Shared) else v for name, v in which.items()}

    def _function(self, shared: Shared) -> Any:
        if shared.key not in self._functions:
            self._functions[shared.key] = ray.get(shared.ref)
            if len(self._functions) > _MAX_FUNCTIONS:
                self._functions.pop(next(iter(self._functions)))
        return self._functions[shared.key]

    @_in("control", again=True)
    def share(self, windows: Windows | None, which: Mapping[str, Any]) -> Share:
        return self._share_of(windows, self._settled(which))

    @_in("update", again=False)
    def update_priorities(self, incarnation: int, index: Array, priority: Array, windows: Windows | None) -> int:
        """Set priorities; those of a batch from before a restart are all ignored, its numbers mean nothing here."""
        if incarnation != self._incarnation:
            return len(index)
        tensors = torch.tensor(index), torch.tensor(priority)
        return self._buffer.update_priorities(*tensors, windows)

    # ---- all the rest

    @_in("control", again=True)
    def figures(self) -> tuple[int, int]:
        return self._buffer.n_steps, self._buffer.n_episodes

    @_in("control", again=True)
    def stats(self) -> dict[str, Any]:
        return self._buffer.stats() | {"rank": self._rank, "pid": os.getpid(), "incarnation": self._incarnation}

    @_in("control", again=True)
    def call(self, name: str, given: Mapping[str, Any]) -> Any:
        """A method of the buffer that may run twice."""
        return getattr(self._buffer, name)(**given)

    @_in("flush", again=False)
    def save_checkpoint(self, name: str, keep_last: int | None) -> str:
        return self._buffer.save_checkpoint(name, wait=True, keep_last=keep_last)

    @_in("flush", again=True)
    def close(self) -> None:
        self._buffer.close()


def _write(batch: Any, out: Mapping[str, torch.Tensor]) -> None:
    """Copy what is not where it is wanted already.

    Raises:
        DataError: Other things are wanted.
    """
    flat = flat_outputs(batch)
    if flat.keys() != out.keys():
        raise DataError(f"batch: expected {sorted(out)}, got {sorted(flat)}")
    for key, value in flat.items():
        if value.data_ptr() != out[key].data_ptr():
            out[key].copy_(value)


def _was_restarted() -> bool:
    with warnings.catch_warnings():  # Ray's own property asks for what Ray has deprecated
        warnings.simplefilter("ignore")
        return bool(ray.get_runtime_context().was_current_actor_reconstructed)


def _set_durable(taken: Iterable[tuple[_Inbox, int]]) -> None:
    for inbox, number in taken:
        inbox.durable = max(inbox.durable, number)
