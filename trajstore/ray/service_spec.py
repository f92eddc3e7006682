"""The options that all actors of a service share, and how an actor opens its buffer."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trajstore.arguments import check_positive
from trajstore.errors import RankError, StoreNotFoundError
from trajstore.replay.buffer import ReplayBuffer
from trajstore.replay.options import PartitionChanges, ReplayOptions, check_options
from trajstore.schema import Schema
from trajstore.storage import DiskCache
from trajstore.store.store import Url


@dataclass(frozen=True)
class ServiceSpec:
    """The options of a service; handles carry it to other processes.

    Attributes:
        url: URL of the store.
        n_actors: Number of actors.
        schema: The fields; None: those of the store, or inferred from the first data.
        storage_options: Options for fsspec's filesystem; never shown.
        fsync: Whether commits to a local directory survive a power cut.
        disk_cache: Where actors keep what they read of a remote store.
        options: Options of every actor's buffer.
        checkpoint: Name or id of the checkpoint that the service continues; None: it does not.
        as_tensordict: Whether handles return batches as TensorDicts; actors do not.
    """

    url: str
    n_actors: int
    schema: Schema | None
    storage_options: Mapping[str, Any] | None = field(repr=False)
    fsync: bool
    disk_cache: DiskCache | None
    options: PartitionChanges
    checkpoint: str | None = None
    as_tensordict: bool = False

    @staticmethod
    def of(
        url: Url,
        n_actors: int,
        schema: Schema | None,
        storage_options: Mapping[str, Any] | None,
        fsync: bool,
        disk_cache: DiskCache | None,
        options: PartitionChanges,
        checkpoint: str | None,
    ) -> ServiceSpec:
        """Check the options that a service is started with.

        Raises:
            TypeError: An option does not exist, or has the wrong type.
            ValueError: A value is out of range, or makes no sense for a service.
        """
        check_positive("n_actors", n_actors)
        check_options(ReplayOptions(), options)
        if options.get("share") == "whole":
            raise ValueError("share='whole': every actor would have all of it; the service has partitions")
        as_tensordict = bool(options.get("as_tensordict"))
        plain: PartitionChanges = {**options, "as_tensordict": False}
        return ServiceSpec(
            *(os.fspath(url), n_actors, schema, storage_options, fsync, disk_cache),
            *(plain, checkpoint, as_tensordict),
        )

    @property
    def replay_options(self) -> ReplayOptions:
        """All options of an actor's buffer, with defaults for those that are not given."""
        return check_options(ReplayOptions(), self.options)


def open_partition(spec: ServiceSpec, rank: int, *, is_restart: bool) -> ReplayBuffer:
    """Open the buffer of one actor.

    A new actor creates it, or resumes it from the checkpoint of the spec. An actor that Ray has restarted takes the
    place of its rank again, unless it died before it had joined.
    """
    place: dict[str, Any] = {
        "storage_options": spec.storage_options,
        "fsync": spec.fsync,
        "disk_cache": spec.disk_cache,
    }
    # Ranks meet through the store even if there is only one, so that a restarted actor can find its world.
    options: dict[str, Any] = {**spec.options, "rank": rank, "world_size": spec.n_actors, "through": "store"}
    if is_restart:
        with contextlib.suppress(
            RankError, StoreNotFoundError
        ):  # it died before it had joined, or created the store
            return ReplayBuffer.rejoin(spec.url, **place, **options)
    if spec.checkpoint is not None:
        return ReplayBuffer.resume(spec.url, spec.checkpoint, **place, **options)
    return ReplayBuffer(spec.url, schema=spec.schema, **place, **options)
