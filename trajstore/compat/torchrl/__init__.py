"""TorchRL's replay buffers over trajstore: a storage and samplers for them, and a buffer with their face.

buffer         the live buffer with TorchRL's face
samplers       our draws in TorchRL's buffers
ted            TorchRL's episode data as episodes, and back
storage        what TorchRL asks of a storage
checkpointer   dumps of it
table          rows by slot: in memory as far as they fit, and in the log
log | paged    the durable side | a tensor that is read by pages
past | slots   what earlier sessions left | which row each slot holds
generations    which store of a URL counts
indexing       what an index names
layout         TensorDicts and trees of tensors as fields
"""

from trajstore.errors import MissingExtraError

try:
    import torchrl as _torchrl  # noqa: F401
except ImportError as error:
    raise MissingExtraError("trajstore.compat.torchrl needs torchrl: pip install 'trajstore[torchrl]'") from error

from trajstore.compat.torchrl.buffer import ReplayBuffer
from trajstore.compat.torchrl.checkpointer import TrajStorageCheckpointer
from trajstore.compat.torchrl.samplers import PrioritisedSampler, WindowSampler
from trajstore.compat.torchrl.storage import TrajStorage
from trajstore.compat.torchrl.ted import TedEpisode, episodes_to_ted, ted_to_episodes

__all__ = [
    "PrioritisedSampler",
    "ReplayBuffer",
    "TedEpisode",
    "TrajStorage",
    "TrajStorageCheckpointer",
    "WindowSampler",
    "episodes_to_ted",
    "ted_to_episodes",
]
