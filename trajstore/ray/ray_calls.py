"""Results of calls of actors, with errors as the actor raised them."""

from __future__ import annotations

from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayTaskError

from trajstore.errors import ClosedError, StorageError


def get_result(ref: Any) -> Any:
    """Wait for the result of a call, or of a list of calls.

    Raises:
        StorageError: The actor is being restarted.
        ClosedError: The actor is dead and is not restarted.
        BaseException: The error that the call raised in the actor.
    """
    try:
        return ray.get(ref)
    except RayTaskError as failure:
        raise failure.cause from failure
    except ActorUnavailableError as failure:
        raise StorageError(f"an actor of the buffer is being started again; try again: {failure}") from failure
    except RayActorError as failure:
        raise ClosedError(f"an actor of the buffer is gone, and is not started again: {failure}") from failure
