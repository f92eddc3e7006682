"""The buffer on many machines, with Ray: a service of actors, and stores as datasets (`trajstore.ray.data`).

service              RayReplayBuffer, the handle that collectors and learners hold
union_sampler        a learner's side: batches drawn over all actors
writer               RayWriter, a collector's side: appends to one actor
service_start        starts actors, and finds those of a running service
actor                one actor: one rank of the buffer
block_sender         sends a writer's blocks; finds out what became of them when an actor dies
staged_calls         calls of a writer that are not sent yet
block_receiver       an actor's side: applies each block once
rollout_blocks       steps of several environments stacked into one block
service_spec         the options that all actors share, and how an actor opens its buffer
batch_parts          the parts of a batch that actors give, and how they are joined
direct_connections   sockets between a learner and actors on the same machine
batch_memory         memory for batches that a learner shares with actors
sample_reply         a batch as Ray transports it
draw_weights         how much an actor has of what batches are drawn in proportion to
draw_restrictions    which windows may be drawn
ray_calls            results of calls, with the errors as they were raised
data                 episodes as a dataset, and datasets as episodes
episode_source       reads the episodes of a store for Ray Data
episode_sink         writes rows of Ray Data as episodes
"""

from trajstore.errors import MissingExtraError

try:
    import ray  # noqa: F401
except ImportError as error:
    raise MissingExtraError("trajstore.ray needs ray 2.40 or newer: pip install 'ray[data]>=2.40'") from error

from trajstore.ray.service import RayReplayBuffer
from trajstore.ray.writer import RayWriter

__all__ = ["RayReplayBuffer", "RayWriter"]


def __dir__() -> list[str]:
    return sorted(__all__)
