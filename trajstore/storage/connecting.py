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
from trajstore.storage.request_options import ServiceOptions, client_options, service_options
from trajstore.storage.service import ServiceStorage

_log = logging.getLogger(__name__)

_TRANSPORTS = ("auto", "obstore", "fsspec")
# obstore uses GCS's XML interface, which on loopback only the tests' own server has, by Google's reference.
_GCS_REASON = "obstore was never tested with Google's servers; the option transport='obstore' asks for it"


def connect(url: str, options: Mapping[str, Any]) -> ServiceStorage:
    """The storage at a URL of an object store, or of fsspec's memory. Makes no request.

    Raises:
        ValueError: An option of this library has an impossible value, or obstore is required and can't be used.
    """
    service, theirs = service_options(options), client_options(options)
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
    if client.service == "gcs" and transport == "auto":
        return _fsspec(url, theirs, service, _GCS_REASON)
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
