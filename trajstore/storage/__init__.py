"""Objects (bytes under a key) at a URL. The only package that imports fsspec and obstore.

Keys are relative paths with ``/``. A put is atomic (readers see the old bytes or the new, never a mix)
and durable when it returns. Threads may share a storage; it may be forked and pickled.

What only remote storages need is imported at its first use: a program with local stores does not wait for fsspec.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trajstore.storage.disk_cache import DiskCache, DiskCachedStorage
from trajstore.storage.file_maps import FileMap
from trajstore.storage.interface import ABSENT, ANY, OWN, UNSEEN, Data, Place, Put, Storage
from trajstore.storage.layers import CountedStorage, StorageLayer
from trajstore.storage.local import LocalStorage
from trajstore.storage.request_options import OWN_OPTIONS, client_options

if TYPE_CHECKING:
    from trajstore.storage.obstore_storage import ObstoreStorage
    from trajstore.storage.read_only import ReadOnlyStorage
    from trajstore.storage.remote import FsspecStorage
    from trajstore.storage.service import ServiceStorage

# Protocols for which one put is one request that replaces the whole object.
_ATOMIC = frozenset({"memory", "s3", "s3a", "gs", "gcs", "az", "abfs", "abfss"})
# Protocols that stores are read from; chains of URLs (`::`) are, too.
_READ_ONLY = frozenset({"http", "https", "hf", "zip"})
_REMOTE = {
    "FsspecStorage": "remote",
    "ObstoreStorage": "obstore_storage",
    "ReadOnlyStorage": "read_only",
    "ServiceStorage": "service",
}

__all__ = [
    "ABSENT",
    "ANY",
    "OWN",
    "OWN_OPTIONS",
    "UNSEEN",
    "CountedStorage",
    "Data",
    "DiskCache",
    "DiskCachedStorage",
    "FileMap",
    "FsspecStorage",
    "LocalStorage",
    "ObstoreStorage",
    "Place",
    "Put",
    "ReadOnlyStorage",
    "ServiceStorage",
    "Storage",
    "StorageLayer",
    "client_options",
    "open_storage",
]


def __getattr__(name: str) -> Any:
    if name not in _REMOTE:
        raise AttributeError(f"module 'trajstore.storage' has no attribute {name!r}")
    return getattr(import_module(f"trajstore.storage.{_REMOTE[name]}"), name)


def open_storage(
    url: str | os.PathLike[str],
    options: Mapping[str, Any] | None = None,
    *,
    fsync: bool = True,
    disk_cache: DiskCache | None = None,
) -> Storage:
    """The storage at a URL. Makes no request and creates no file.

    Args:
        url: A path, or an fsspec URL of memory, S3, GCS or Azure; for reading also of a web server (``https://``),
            Hugging Face (``hf://``), a zip file (``zip://::https://...``) or another chain of URLs.
        options: Arguments of fsspec's filesystem for that URL (credentials, endpoints), which also obstore is told,
            and of this library: ``transport`` (``"auto"``, ``"obstore"`` or ``"fsspec"``), ``filesystem`` (a
            filesystem of fsspec that makes the requests), ``retry_s`` (seconds until a failing call gives up, 60),
            ``request_s`` (seconds until a request without progress counts as failed, 15), and ``hedge_s`` (seconds
            until bytes that have not come are asked for a second time; never by default).
        fsync: Whether local puts survive a power cut; without it they survive only a crash of the process.
        disk_cache: Where objects of a remote store are kept on a local disk; None: nowhere.

    Raises:
        ValueError: Puts at the URL are not known to be atomic, it lacks ``//``, or an option of this library has an
            impossible value.
        TypeError: ``url`` is neither text nor a path, or ``options`` are given for a local directory.
    """
    if not isinstance(url, (str, os.PathLike)):
        raise TypeError(f"url: expected a path or a URL, such as 'runs/walker' or 'memory://run', got {url!r:.80}")
    if disk_cache is not None and not isinstance(disk_cache, DiskCache):
        raise TypeError(
            f"disk_cache: expected a trajstore.DiskCache(directory, budget_bytes), got {disk_cache!r:.80}"
        )
    text = os.fspath(url)
    protocol, path = _split_protocol(text)
    start, colon, rest = text.partition(":")
    if colon and start in _ATOMIC and not rest.startswith("//"):
        raise ValueError(
            f"url: expected {start}://..., got {start}:...; for a directory of that name, write ./{start}:..."
        )
    if protocol in (None, "file", "local"):
        if options:
            raise TypeError(f"{text}: a local directory takes no storage options, got {sorted(options)}")
        return LocalStorage(Path(path).expanduser().absolute(), fsync=fsync)
    storage = CountedStorage(_open_remote(text, protocol, options or {}))
    return storage if disk_cache is None else DiskCachedStorage(storage, disk_cache)


def _split_protocol(url: str) -> tuple[str | None, str]:
    """The protocol of a URL, as fsspec sees it, and what follows; None for a path."""
    protocol, separator, rest = url.partition("://")
    if separator and len(protocol) > 1:
        return protocol, rest
    return ("data", url.removeprefix("data:")) if url.startswith("data:") else (None, url)


def _open_remote(url: str, protocol: str, options: Mapping[str, Any]) -> Storage:
    if protocol in _READ_ONLY or "::" in url:
        from trajstore.storage.read_only import open_read_only

        return open_read_only(url, options)
    if protocol in _ATOMIC:
        from trajstore.storage.connecting import connect

        return connect(url, options)
    raise ValueError(
        f"{protocol}://: no store can be used there, because puts are not known to be atomic; use a directory"
        f" or one of {', '.join(sorted(_ATOMIC))}; to read a store, also one of"
        f" {', '.join(sorted(_READ_ONLY))}. A store that lies elsewhere must be copied first"
    )
