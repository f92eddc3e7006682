"""The storage options of this library, beside those of the client: how requests are made and how long repeated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trajstore.storage.retry import RetryPolicy

N_REQUESTS = 256  # under way at a time: a batch is one wave
OWN_OPTIONS = frozenset({"transport", "filesystem", "retry_s", "request_s", "hedge_s"})


@dataclass(frozen=True)
class ServiceOptions:
    """How requests are made, whatever makes them.

    Attributes:
        retries: How long failing requests are repeated.
        hedge_s: Ask again for bytes that have not come after this many seconds, and take the answer that comes
            first. None: never.
    """

    retries: RetryPolicy = field(default_factory=RetryPolicy)
    hedge_s: float | None = None


def client_options(options: Mapping[str, Any] | None) -> dict[str, Any]:
    """The storage options that are for the client, without those of this library."""
    return {name: value for name, value in (options or {}).items() if name not in OWN_OPTIONS}


def service_options(options: Mapping[str, Any]) -> ServiceOptions:
    """How requests are made, by the options of this library.

    Raises:
        ValueError: One of them has an impossible value.
    """
    policy = RetryPolicy()
    total_s = _seconds(options, "retry_s", policy.total_s)
    request_s = _seconds(options, "request_s", min(policy.request_s, total_s))
    hedge_s = _seconds(options, "hedge_s", 0.0) if options.get("hedge_s") is not None else None
    return ServiceOptions(RetryPolicy(total_s=total_s, request_s=request_s), hedge_s)


def _seconds(options: Mapping[str, Any], name: str, default: float) -> float:
    value = options.get(name, default)
    try:
        seconds = float(value)  # a command line passes text
    except (TypeError, ValueError):
        seconds = -1.0
    if isinstance(value, bool) or not 0.0 < seconds < 1e6:
        raise ValueError(f"storage_options: {name}: expected seconds above 0, got {value!r:.40}")
    return seconds
