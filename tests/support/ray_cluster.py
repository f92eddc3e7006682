"""A small Ray, on loopback, for tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray


@contextmanager
def started(**options: Any) -> Iterator[None]:
    """Ray with four CPUs and little memory, that prints nothing; ended afterwards."""
    node = {"_node_ip_address": "127.0.0.2"} if sys.platform == "linux" else {}
    ray.init(
        num_cpus=4,
        include_dashboard=False,
        object_store_memory=200 << 20,
        configure_logging=False,
        log_to_driver=False,
        # Ray would kill actors when other test processes fill the machine's memory.
        _system_config={"memory_monitor_refresh_ms": 0},
        **node,
        **options,
    )
    yield
    ray.shutdown()
