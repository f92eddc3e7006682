"""TorchRL's replay buffers over trajstore: a storage that plugs into them.

storage        what TorchRL asks of a storage
checkpointer   dumps of it
table          rows by slot: in memory as far as they fit, and in the log
log | paged    the durable side | a tensor that is read by pages
past | slots   what earlier sessions left | which row each slot holds
generations    which store of a URL counts
layout         TensorDicts and trees of tensors as fields
"""

from trajstore.errors import MissingExtraError

try:
    import torchrl as _torchrl  # noqa: F401
except ImportError as error:
    raise MissingExtraError("trajstore.compat.torchrl needs torchrl: pip install 'trajstore[torchrl]'") from error

from trajstore.compat.torchrl.checkpointer import TrajStorageCheckpointer
from trajstore.compat.torchrl.storage import TrajStorage

__all__ = ["TrajStorage", "TrajStorageCheckpointer"]
