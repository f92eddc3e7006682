"""Starts the actors of a service, and finds those of a running one by its name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ray

from trajstore.errors import StoreNotFoundError
from trajstore.ray.actor import CONCURRENCY_GROUPS, PartitionActor
from trajstore.ray.ray_calls import get_result
from trajstore.ray.service_spec import ServiceSpec

_NAME_PREFIX = "trajstore-buffer"


def start_actors(spec: ServiceSpec, name: str | None, actor_options: Mapping[str, Any]) -> tuple[Any, ...]:
    """Start the actors of a service, and return when all have opened their buffers; if one fails, all are ended.

    Args:
        spec: The options that the actors share.
        name: Name of the service; None: it has none.
        actor_options: Options for Ray.
    """
    options = {"max_restarts": -1, "num_cpus": 1, **actor_options}
    remote: Any = ray.remote  # its types lack some of its options
    actor_class = remote(concurrency_groups=CONCURRENCY_GROUPS)(PartitionActor)
    actors = []
    for rank in range(spec.n_actors):
        named = {"name": _actor_name(name, rank)} if name is not None else {}
        actors.append(actor_class.options(**options, **named).remote(spec, rank))
    opening = [actor.open.remote() for actor in actors]
    try:
        while opening:  # in order of completion: the first failure has the reason, later ones follow from it
            done, opening = ray.wait(opening)
            get_result(done)
    except BaseException:
        for actor in actors:
            ray.kill(actor)
        raise
    return tuple(actors)


def find_service(name: str, namespace: str | None) -> tuple[list[Any], ServiceSpec]:
    """The actors of a running service, by rank, and their options.

    Raises:
        StoreNotFoundError: No service has this name.
    """
    find: Any = ray.get_actor
    try:
        first = find(_actor_name(name, 0), namespace)
        spec: ServiceSpec = get_result(first.spec.remote())
        return [first, *(find(_actor_name(name, rank), namespace) for rank in range(1, spec.n_actors))], spec
    except ValueError as error:
        raise StoreNotFoundError(
            f"no buffer named {name!r} runs in this namespace; start it with RayReplayBuffer.start(name=...)"
        ) from error


def _actor_name(name: str, rank: int) -> str:
    return f"{_NAME_PREFIX}/{name}/{rank}"
