"""A learner's side of sampling: decides how much each actor gives, and joins the parts into batches."""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import ray
import torch
from ray.exceptions import RayActorError, RayTaskError

from trajstore.arguments import check_positive
from trajstore.errors import DataError, NotReadyError
from trajstore.ray.batch_memory import BatchLayout
from trajstore.ray.batch_parts import (
    BatchRequest,
    FlatBatch,
    PendingBatch,
    ReceivedPart,
    RequestedPart,
    join_parts,
    weigh_whole_draw,
)
from trajstore.ray.direct_connections import ActorConnections, ConnectionLostError
from trajstore.ray.draw_restrictions import DrawRestrictions, SharedFunction
from trajstore.ray.draw_weights import ONLY_ACTOR, DrawWeight, actor_probabilities
from trajstore.ray.ray_calls import get_result
from trajstore.ray.sample_reply import SampleReply
from trajstore.sampling.rng import CounterRng
from trajstore.sampling.windows import Windows
from trajstore.schema import Array

_MAX_REDRAWS = 8
_MAX_KINDS = 8  # kinds of batches whose layouts and connections are kept
_MAX_UPDATES_PER_ACTOR = 2  # updates of priorities that are not waited for
_MAX_FUNCTIONS = 64
_CPU = torch.device("cpu")


class UnionSampler:
    """Draws batches from the union of all partitions. Safe to use from several threads; they take turns.

    Args:
        actors: By rank.
        seed: Seed of the random numbers that split batches among actors.
    """

    def __init__(self, actors: Sequence[Any], seed: int) -> None:
        self._actors = actors
        self._rng = CounterRng(seed)
        self._layouts: dict[BatchRequest, BatchLayout] = {}
        self._connections: dict[BatchRequest, ActorConnections] = {}
        # By id of the function; holding the function keeps its id from being reused.
        self._shared_functions: dict[int, tuple[Any, SharedFunction]] = {}
        self._updates: deque[tuple[Any, int]] = deque()  # calls that are not waited for, and their priorities
        self._lock = threading.RLock()

    def sample(self, n_windows: int, windows: Windows | None, restrictions: DrawRestrictions) -> FlatBatch:
        """Draw one batch, with the actors' weights of this moment."""
        request = self._request(n_windows, windows, restrictions)
        n_redraws = _MAX_REDRAWS if len(self._actors) > 1 else 0
        with self._lock:
            while True:
                connections = self._kept_connections(request)
                pending = self._send(request, self._weights(request, connections), connections)
                try:
                    return self._receive(pending)
                except NotReadyError:  # a partition may have lost its last window since it reported its weight
                    if not n_redraws:
                        raise
                    n_redraws -= 1

    def _kept_connections(self, request: BatchRequest) -> ActorConnections | None:
        connections = self._connections.get(request)
        if connections is None or connections.is_lost:
            connections = self._connect(request)
            if connections is not None:
                self._connections[request] = connections
                _drop_oldest(self._connections)
        return connections

    def batches(
        self, n_windows: int, windows: Windows | None, prefetch: int, restrictions: DrawRestrictions
    ) -> Generator[FlatBatch, None, None]:
        """An endless iterator over batches; ``prefetch`` of them are requested ahead."""
        if not isinstance(prefetch, int) or prefetch < 0:
            raise ValueError(f"prefetch: expected a number of batches, at least 0, got {prefetch!r}")
        return self._iterate(self._request(n_windows, windows, restrictions), prefetch)

    def _iterate(self, request: BatchRequest, prefetch: int) -> Generator[FlatBatch, None, None]:
        connections: ActorConnections | None = None
        weights = self._weights(request)
        pending: deque[PendingBatch] = deque()
        try:
            while True:
                if connections is None or connections.is_lost:
                    connections = self._connect(request)
                while len(pending) <= prefetch:
                    pending.append(self._send(request, weights, connections))
                try:
                    flat = self._receive(pending[0])
                except NotReadyError:
                    weights = self._weights(request)  # raises if no actor has a window
                    _close(connections)
                    pending.clear()
                    continue
                weights = pending.popleft().weights
                yield flat
                del flat  # frees its memory for the next batch, unless the caller holds it
        finally:
            _close(connections)

    def _request(self, n_windows: int, windows: Windows | None, restrictions: DrawRestrictions) -> BatchRequest:
        limits = {}
        for name in ("recent_steps", "recent_episodes"):
            if (limit := getattr(restrictions, name)) is not None:
                check_positive(name, limit)
                limits[name] = -(-limit // len(self._actors))
        restrictions = replace(restrictions, **limits).with_functions(self._share_function)
        return BatchRequest(n_windows, windows, restrictions)

    def _share_function(self, function: Any) -> SharedFunction:
        with self._lock:
            if id(function) not in self._shared_functions:
                shared = SharedFunction(uuid.uuid4().hex, ray.put(function))
                self._shared_functions[id(function)] = function, shared
                if len(self._shared_functions) > _MAX_FUNCTIONS:
                    self._shared_functions.pop(next(iter(self._shared_functions)))
            return self._shared_functions[id(function)][1]

    # ---- sending requests

    def _weights(self, request: BatchRequest, connections: ActorConnections | None = None) -> list[DrawWeight]:
        """Ask all actors for their draw weights; a single actor is not asked."""
        if len(self._actors) == 1:
            return [ONLY_ACTOR]
        if connections is not None and len(connections.by_rank) == len(self._actors):
            with contextlib.suppress(ConnectionLostError):
                return connections.weights()
            connections.close()  # answers of other actors may still be on their way
        refs = [actor.draw_weight.remote(request.windows, request.restrictions) for actor in self._actors]
        return [get_result(ref) for ref in refs]

    def _connect(self, request: BatchRequest) -> ActorConnections | None:
        """Connect to the actors on this machine.

        Returns:
            The connections; None if no actor is on this machine, or no batch of this kind was received before, so
            that its layout is not known.
        """
        layout = self._layouts.get(request)
        if layout is None or not ActorConnections.are_possible():
            return None
        connections = ActorConnections(layout)
        arguments = layout, request.windows, request.restrictions, len(self._actors) > 1
        connections.connect(
            lambda address: sum(get_result([a.serve.remote(address, *arguments) for a in self._actors]))
        )
        return connections if connections.by_rank and not connections.is_lost else None

    def _send(
        self, request: BatchRequest, weights: Sequence[DrawWeight], connections: ActorConnections | None
    ) -> PendingBatch:
        """Request a batch from the actors."""
        probabilities = actor_probabilities(weights)
        lease = connections.lease_memory() if connections is not None else None
        pending = PendingBatch(request, probabilities, list(weights), connections, lease)
        start = 0
        for rank, count in enumerate(self._split(request.n_windows, probabilities)):
            if count:
                part = RequestedPart(rank, start, start + count)
                pending.parts.append(part)
                self._send_part(pending, part)
            start += count
        return pending

    def _split(self, n_windows: int, probabilities: Array) -> list[int]:
        """How many windows of a batch each actor gives: a multinomial draw."""
        if len(probabilities) == 1:
            return [n_windows]
        with self._lock:
            numbers = self._rng.uniform(n_windows, _CPU)
        rank = np.searchsorted(np.cumsum(probabilities)[:-1], numbers.numpy(), side="right")
        return [int(count) for count in np.bincount(rank, minlength=len(probabilities))]

    def _send_part(self, pending: PendingBatch, part: RequestedPart) -> None:
        connection = pending.connections.by_rank.get(part.rank) if pending.connections is not None else None
        if connection is not None and pending.lease is not None:
            with contextlib.suppress(ConnectionLostError):
                connection.request_windows(pending.lease.memory, part.start, part.stop)
                return
        self._call_sample(pending, part)

    def _call_sample(self, pending: PendingBatch, part: RequestedPart) -> None:
        """Request a part through Ray."""
        request = pending.request
        arguments = part.n_windows, request.windows, request.restrictions, len(self._actors) > 1
        part.ref = self._actors[part.rank].sample.remote(*arguments)

    # ---- receiving batches

    def _receive(self, pending: PendingBatch) -> FlatBatch:
        """Wait for all parts of a batch and join them."""
        layout = pending.connections.layout if pending.connections is not None else None
        whole = pending.lease.tensors(layout) if pending.lease is not None and layout is not None else {}
        parts = [self._receive_part(pending, part, whole) for part in pending.parts]
        if any(part.lost_connection for part in parts):  # that actor may still write into the memory
            whole = {}
            self._layouts.pop(pending.request, None)
        flat = join_parts(whole, pending.parts, [part.tensors for part in parts])
        self._remember(pending, parts, flat)
        counts = torch.tensor([part.n_windows for part in pending.parts])
        flat["actor"] = torch.tensor([part.actor for part in parts]).repeat_interleave(counts)
        if len(self._actors) > 1 and "priority/probability" in flat:
            weigh_whole_draw(flat, pending, counts)
        return flat

    def _remember(self, pending: PendingBatch, parts: Sequence[ReceivedPart], flat: FlatBatch) -> None:
        """Keep what the next batch needs: the actors' draw weights, and the layout of such batches."""
        if len(self._actors) > 1:
            for requested, received in zip(pending.parts, parts, strict=True):
                pending.weights[requested.rank] = received.weight
        if pending.request not in self._layouts:
            if "actor" in flat:
                raise DataError(
                    "batch: field 'actor' has the name of the key that says which actor gave a window; leave it out"
                )
            self._layouts[pending.request] = BatchLayout.of(flat, pending.request.n_windows)
            _drop_oldest(self._layouts)

    def _receive_part(self, pending: PendingBatch, part: RequestedPart, whole: FlatBatch) -> ReceivedPart:
        """Wait for a part, over the direct connection or, if that is lost, through Ray."""
        lost_connection = False
        if part.ref is None:
            assert pending.connections is not None
            try:
                actor, weight = pending.connections.by_rank[part.rank].receive_answer()
                tensors = {key: value[part.start : part.stop] for key, value in whole.items()}
                return ReceivedPart(actor, weight, tensors)
            except ConnectionLostError:
                lost_connection = True
                self._call_sample(pending, part)
        reply: SampleReply = get_result(part.ref)
        return ReceivedPart(reply.actor, reply.weight, reply.tensors(), lost_connection)

    # ---- priorities

    def update_priorities(
        self,
        actor: torch.Tensor,
        index: torch.Tensor,
        priority: torch.Tensor,
        windows: Windows | None,
        *,
        wait: bool,
    ) -> int:
        """Send priorities to the actors that gave the windows.

        Returns:
            How many were ignored; 0 without ``wait``.
        """
        for number in np.unique(actor.numpy()).tolist():
            of = actor == number
            arrays = index[of].numpy(), priority.detach()[of.to(priority.device)].cpu().numpy()
            incarnation, rank = divmod(number, len(self._actors))
            ref = self._actors[rank].update_priorities.remote(incarnation, *arrays, windows)
            self._updates.append((ref, int(of.sum())))
        n_ignored = 0
        while self._updates and (wait or len(self._updates) > _MAX_UPDATES_PER_ACTOR * len(self._actors)):
            n_ignored += _count_ignored(*self._updates.popleft())
        return n_ignored if wait else 0

    def close(self) -> None:
        """Close the direct connections."""
        with self._lock:
            for connections in self._connections.values():
                connections.close()
            self._connections.clear()


def _close(connections: ActorConnections | None) -> None:
    if connections is not None:
        connections.close()


def _drop_oldest(kept: dict[BatchRequest, Any]) -> None:
    if len(kept) > _MAX_KINDS:
        oldest = kept.pop(next(iter(kept)))
        if isinstance(oldest, ActorConnections):
            oldest.close()


def _count_ignored(ref: Any, n_priorities: int) -> int:
    """How many priorities of an update were ignored: all of them if the actor died with the call."""
    try:
        return int(ray.get(ref))
    except RayTaskError as failure:
        raise failure.cause from failure
    except RayActorError:
        return n_priorities
