"""Chooses what makes the requests to an object store: obstore where it can, else fsspec."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Mapping
from typing import Any

from trajstore.credentials import secrets_of, without_credentials
from trajstore.storage.obstore_options import UnmappedError, obstore_client
from trajstore.storage.obstore_storage import ObstoreStorage
from trajstore.storage.remote import FsspecStorage
from trajstore.storage.retry import RetryPolicy
from trajstore.storage.service import ServiceOptions, ServiceStorage

_log = logging.getLogger(__name__)

_TRANSPORTS = ("auto", "obstore", "fsspec")
OWN_OPTIONS = frozenset({"transport", "filesystem", "retry_s", "request_s", "hedge_s"})


def client_options(options: Mapping[str, Any] | None) -> dict[str, Any]:
    """The storage options that are for the client, without those of this library."""
    return {name: value for name, value in (options or {}).items() if name not in OWN_OPTIONS}


def connect(url: str, options: Mapping[str, Any]) -> ServiceStorage:
    """The storage at a URL of an object store, or of fsspec's memory. Makes no request.

    Raises:
        ValueError: An option of this library has an impossible value, or obstore is required and can't be used.
    """
    service, theirs = _service_options(options), client_options(options)
    transport, filesystem = options.get("transport", "auto"), options.get("filesystem")
    if transport not in _TRANSPORTS:
        raise ValueError(
            f"storage_options: transport: expected one of {', '.join(_TRANSPORTS)}, got {transport!r:.40}"
        )
    if filesystem is not None:
        return _given(url, filesystem, transport, theirs, service)
    if url.startswith("memory:") or transport == "fsspec":
        return _fsspec(url, theirs, service, "asked for by the option transport")
    try:
        if importlib.util.find_spec("obstore") is None:
            raise UnmappedError("obstore is not installed")
        client = obstore_client(url, theirs)
    except UnmappedError as error:
        if transport == "obstore":
            raise ValueError(f"{without_credentials(url)}: transport 'obstore' can't be used: {error}") from None
        _log.info("%s: requests are made by fsspec: %s", without_credentials(url), error)
        return _fsspec(url, theirs, service, str(error))
    return ObstoreStorage(url, theirs, client, service, _fsspec_in_child)


def _fsspec(url: str, options: dict[str, Any], service: ServiceOptions, reason: str) -> FsspecStorage:
    storage = FsspecStorage(url, options, service)
    storage.transport_reason = reason if storage.is_remote else ""
    return storage


def _fsspec_in_child(url: str, options: dict[str, Any], service: ServiceOptions) -> ServiceStorage:
    return _fsspec(url, options, service, "obstore does not work in a forked child")


def _given(
    url: str, filesystem: Any, transport: str, options: dict[str, Any], service: ServiceOptions
) -> FsspecStorage:
    if transport == "obstore" or options:
        names = sorted({*options, *(["transport"] if transport == "obstore" else [])})
        raise ValueError(f"storage_options: filesystem is complete in itself, so drop {', '.join(names)}")
    storage = FsspecStorage(url, {}, service, filesystem)
    storage.transport_reason = "a filesystem was handed in"
    storage.add_secrets(secrets_of("", getattr(filesystem, "storage_options", {})))
    return storage


def _service_options(options: Mapping[str, Any]) -> ServiceOptions:
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
