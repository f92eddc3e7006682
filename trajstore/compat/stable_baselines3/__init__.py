"""Replay for Stable-Baselines3: buffers for ``replay_buffer_class=``, and batches in its form.

`ReplayBuffer` and `HerReplayBuffer` need Stable-Baselines3; `replay_samples` does not.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from trajstore.compat.stable_baselines3.samples import ReplaySamples, replay_samples

if TYPE_CHECKING:
    from trajstore.compat.stable_baselines3.buffer import ReplayBuffer
    from trajstore.compat.stable_baselines3.her import HerReplayBuffer

__all__ = ["HerReplayBuffer", "ReplayBuffer", "ReplaySamples", "replay_samples"]

_LAZY = {"ReplayBuffer": "buffer", "HerReplayBuffer": "her"}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
