"""The live buffer: what it does, what it refuses, and how it fails."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np

from trajstore import Field, ReplayBuffer, Schema

SCHEMA = Schema(
    {
        "obs": Field("float32", (3,), final=True, chunk_rows=16),
        "action": Field("int64", chunk_rows=64),
        "reward": Field("float32", chunk_rows=64),
    }
)
SMALL: dict[str, Any] = {"commit_seconds": None, "buffer_bytes": "64KB", "cache_bytes": "8MB", "grace_s": 0.0}


def new_buffer(url: str, **options: Any) -> ReplayBuffer:
    return ReplayBuffer(url, fsync=False, **({"schema": SCHEMA} | SMALL | options))


def resumed(url: str, checkpoint: str = "latest", **options: Any) -> ReplayBuffer:
    return ReplayBuffer.resume(url, checkpoint, fsync=False, **options)


def crash(buffer: ReplayBuffer) -> None:
    """End the threads of a buffer; nothing that is staged is written, nobody seals the stream."""
    with contextlib.suppress(Exception):
        buffer._sweeper.close()
    buffer._writer._release()
    buffer._checkpointer.cancel()
    buffer._checkpointer._threads.shutdown(wait=True)
