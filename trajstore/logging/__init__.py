"""Hands the figures of ``stats()`` to loggers.

- `flatten`: nested figures as one flat dict of numbers, which W&B, MLflow and others take as it is.
- `TensorBoardLogger`: writes them to TensorBoard every few steps or seconds (extra ``tensorboard``).

torch and TensorBoard are imported when a `TensorBoardLogger` is created for a directory, not before.
"""

from trajstore.logging.flat_stats import flatten
from trajstore.logging.tensorboard_logger import TensorBoardLogger

__all__ = ["TensorBoardLogger", "flatten"]


def __dir__() -> list[str]:
    return sorted(__all__)
