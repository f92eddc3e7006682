"""Clients of fsspec, made so that one try of theirs is one request: repetitions are for the retry policy alone."""

from __future__ import annotations

import asyncio
import functools
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import fsspec.asyn

from trajstore.storage.request_options import N_REQUESTS
from trajstore.storage.retry import RetryPolicy

_LOOP_DELAY_S = 5.0  # what a busy event loop may add to a request's timeout
_NAME_AT_HUB = "trajstore"
_REPEATS_AT_HUB = {
    "huggingface_hub.hf_file_system": ("http_backoff", "http_stream_backoff"),
    "huggingface_hub.hf_api": ("http_backoff",),
    "huggingface_hub.utils._pagination": ("http_backoff",),
}
_PACKAGES = {
    "s3": "s3fs",
    "s3a": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "az": "adlfs",
    "abfs": "adlfs",
    "abfss": "adlfs",
    "hf": "huggingface_hub",
    "http": "aiohttp",
    "https": "aiohttp",
}


def package_of(protocol: str) -> str | None:
    """The package that a protocol of fsspec needs; None if it is not known."""
    return _PACKAGES.get(protocol)


def one_try_options(protocol: str, options: Mapping[str, Any], policy: RetryPolicy) -> dict[str, Any]:
    """Options of a client that make one try a request, notice hung connections, and share nothing.

    Connections and retries that the user configured stay as they are.
    """
    if protocol not in _PACKAGES:
        return {"use_listings_cache": False} if protocol == "memory" else {"skip_instance_cache": True}
    # Not shared: its retries are changed, which another user would not expect.
    defaults: dict[str, Any] = {"skip_instance_cache": True}
    if protocol != "hf":  # it needs its listings
        defaults["use_listings_cache"] = False
    if protocol in ("s3", "s3a"):
        config = {
            "max_pool_connections": N_REQUESTS,  # the default allows ten requests at a time
            "retries": {"total_max_attempts": 1},
            "connect_timeout": policy.request_s,
            "read_timeout": policy.request_s,
        }
        defaults["config_kwargs"] = config | options.get("config_kwargs", {})
    if protocol in ("gs", "gcs"):
        defaults["requests_timeout"] = _timeout(policy)
    if protocol in ("http", "https"):
        defaults["client_kwargs"] = {"timeout": _timeout(policy), **options.get("client_kwargs", {})}
    return defaults


def _timeout(policy: RetryPolicy) -> Any:
    import aiohttp  # the clients that take it need it anyway

    return aiohttp.ClientTimeout(total=None, sock_connect=policy.request_s, sock_read=policy.request_s)


def make_one_try(filesystem: Any, policy: RetryPolicy) -> None:
    """Switch off the retries of a client whose instance is ours; where that is impossible, timeouts bound them."""
    for one in _with_inner(filesystem):
        if hasattr(type(one), "retries") and "s3" in one.protocol:
            one.retries = 1
        if "gs" in one.protocol and (request := getattr(type(one)._request, "__wrapped__", None)) is not None:
            one._request = functools.partial(request, one)  # without gcsfs's six tries
            _ask_less_about_buckets(one)
        if "hf" in one.protocol and (api := getattr(one, "_api", None)) is not None:
            _make_one_try_at_hub(api)
        if (pipeline := getattr(getattr(one, "service_client", None), "_pipeline", None)) is not None:
            _make_one_try_at_azure(pipeline, policy)


def _ask_less_about_buckets(filesystem: Any) -> None:
    """Have gcsfs ask Google once at a time for the kind of a bucket, and not at all about buckets elsewhere.

    It would repeat the question for a minute before each request, and go on as if there were no kinds.
    """
    kinds = getattr(sys.modules.get(type(filesystem).__module__), "BucketType", None)
    if kinds is None:  # a version, or a configuration, that does not ask
        return

    async def plain(bucket: str) -> Any:
        return kinds.NON_HIERARCHICAL

    if filesystem.on_google:
        filesystem._get_retry_config = lambda **options: None
    else:
        filesystem._get_bucket_type = plain


def _make_one_try_at_azure(pipeline: Any, policy: RetryPolicy) -> None:
    """Switch off the repetitions of azure-core, and have each of its requests end by the policy.

    It would stream the bytes of an object, and ask three times, with pauses, if they break off. So its transport
    reads them.
    """
    for one in getattr(pipeline, "_impl_policies", ()):  # its own pauses begin with 15 seconds
        if hasattr(one, "total_retries"):
            one.total_retries = 0
    timeouts = {"connection_timeout": policy.request_s, "read_timeout": policy.request_s}
    if (transport := getattr(pipeline, "_transport", None)) is not None:
        transport.send = functools.partial(_send_whole, transport.send, timeouts)


async def _send_whole(send: Callable[..., Any], timeouts: Mapping[str, float], request: Any, **options: Any) -> Any:
    return await send(request, **(dict(timeouts) | options | {"stream": False}))


def _make_one_try_at_hub(api: Any) -> None:
    """Have Hugging Face's functions that repeat requests make one try if a request is of this client of theirs.

    Its name, which is sent with each request, tells its requests from others of the process, in whatever thread.
    """
    api.library_name = _NAME_AT_HUB
    for module, names in _REPEATS_AT_HUB.items():
        for name in names:
            function = getattr(sys.modules.get(module), name, None)
            if function is not None and not hasattr(function, "repeats_for_others"):
                setattr(sys.modules[module], name, _once_if_ours(function))


def _once_if_ours(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def repeat(*args: Any, **kwargs: Any) -> Any:
        sent = {name.lower(): value for name, value in (kwargs.get("headers") or {}).items()}
        once = {"max_retries": 0} if _NAME_AT_HUB in str(sent.get("user-agent", "")) else {}
        return function(*args, **(kwargs | once))

    repeat.repeats_for_others = True  # type: ignore[attr-defined]
    return repeat


def _with_inner(filesystem: Any) -> Iterator[Any]:
    """A filesystem, and those that it reads from: of a chain of URLs."""
    for _ in range(10):
        if filesystem is None:
            return
        yield filesystem
        filesystem = getattr(filesystem, "fs", None) or getattr(getattr(filesystem, "fo", None), "fs", None)


def leave_open_at_exit(filesystem: Any) -> None:
    """Have the system close the connections of a client whose instance is ours when the process ends.

    Its own finalizers need an event loop. At exit that may have ended, which is printed as an error, and in a
    forked child it does not exist, so the child would wait for ever.
    """
    for finalizer in list(getattr(weakref.finalize, "_registry", ())):
        found = finalizer.peek()
        if found is not None and found[0] is filesystem:
            finalizer.atexit = False


def call(filesystem: Any, name: str, timeout_s: float, *args: Any, **kwargs: Any) -> Any:
    """Call a method of the filesystem; one that is asynchronous is cancelled after the timeout."""
    if not getattr(filesystem, "async_impl", False):
        return getattr(filesystem, name)(*args, **kwargs)
    function = getattr(filesystem, f"_{name}")
    limit_s = timeout_s + _LOOP_DELAY_S

    async def limited() -> Any:
        return await asyncio.wait_for(function(*args, **kwargs), limit_s)

    return fsspec.asyn.sync(filesystem.loop, limited)
