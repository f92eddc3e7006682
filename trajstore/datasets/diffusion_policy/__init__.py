"""Replay buffers of diffusion_policy and UMI."""

from trajstore.datasets.diffusion_policy.sink import open_sink
from trajstore.datasets.diffusion_policy.source import DiffusionPolicySource, InPlace, open_in_place, open_source

__all__ = ["DiffusionPolicySource", "InPlace", "open_in_place", "open_sink", "open_source"]
