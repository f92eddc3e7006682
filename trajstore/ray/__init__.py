"""The buffer on many machines, with Ray: a service of actors, and stores as datasets (`trajstore.ray.data`).

service          the handle that collectors and learners hold
learner | writer draws over all actors | blocks of steps on their way to one
actor            one partition of the experience
blocks | lines   what writers send | batches between processes of one machine
data             episodes as a dataset, and datasets as episodes
"""

from trajstore.errors import MissingExtraError

try:
    import ray  # noqa: F401
except ImportError as error:
    raise MissingExtraError("trajstore.ray needs ray 2.40 or newer: pip install 'trajstore[ray]'") from error

from trajstore.ray.service import RayReplayBuffer
from trajstore.ray.writer import RayWriter

__all__ = ["RayReplayBuffer", "RayWriter"]
