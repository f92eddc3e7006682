"""A storage and samplers for TorchRL's replay buffers, and a buffer that takes and returns TorchRL's data format.

buffer              `ReplayBuffer`: the live buffer with TorchRL's data format
ted                 TorchRL's episode data (TED) as episodes, and back
samplers            samplers for TorchRL's buffers
storage             `TrajStorage`: a storage for TorchRL's buffers
shared_storage      `SharedTrajStorage`: the same storage in another process
storage_server      carries out what other processes ask for
messages            what they send each other
checkpointer        writes and reads dumps of it
foreign_dumps       dumps in the layouts of TorchRL's checkpointers
slot_table          rows by slot: in memory as far as they fit, and in the log
row_log             the append-only log of rows in a store
paged_tensor        a tensor that reads its rows from the log
element_writing     writes at an index of several dimensions
non_tensor          text, JSON and TensorDicts without tensors, as bytes
earlier_sessions    finds the newest rows of earlier sessions
slot_map            which row of the log each slot holds
store_generations   which store below a URL is the current one
slot_indexing       TorchRL's indices as slots
row_structure       TensorDicts and trees of tensors as fields
options             keyword options of the log's writer
"""

from trajstore.errors import MissingExtraError

try:
    import torchrl as _torchrl  # noqa: F401
except ImportError as error:
    raise MissingExtraError("trajstore.compat.torchrl needs torchrl: pip install torchrl") from error

from trajstore.compat.torchrl.buffer import ReplayBuffer
from trajstore.compat.torchrl.checkpointer import TrajStorageCheckpointer
from trajstore.compat.torchrl.samplers import PrioritisedSampler, WindowSampler
from trajstore.compat.torchrl.shared_storage import SharedTrajStorage
from trajstore.compat.torchrl.storage import TrajStorage
from trajstore.compat.torchrl.ted import TedEpisode, episodes_to_ted, ted_to_episodes

__all__ = [
    "PrioritisedSampler",
    "ReplayBuffer",
    "SharedTrajStorage",
    "TedEpisode",
    "TrajStorage",
    "TrajStorageCheckpointer",
    "WindowSampler",
    "episodes_to_ted",
    "ted_to_episodes",
]


def __dir__() -> list[str]:
    return sorted(__all__)
