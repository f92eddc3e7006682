"""Replay buffers of diffusion_policy and UMI."""

from trajstore.datasets.diffusion_policy.reader import (
    DiffusionPolicyReader,
    InPlaceBuffer,
    open_in_place,
    open_reader,
)
from trajstore.datasets.diffusion_policy.writer import open_writer

__all__ = ["DiffusionPolicyReader", "InPlaceBuffer", "open_in_place", "open_reader", "open_writer"]


def __dir__() -> list[str]:
    return sorted(__all__)
