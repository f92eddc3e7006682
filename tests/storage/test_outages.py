"""Services that fail for good: each call ends with one clear error, and no client repeats what we repeat."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import trajstore
from tests.conftest import Place
from tests.support.proxy import TRUNCATE, UNAVAILABLE, Fault, Hold, Proxy, Request, first, none
from tests.support.servers.process import Server
from trajstore import Field, Reader, ReplayBuffer, StorageError, Windows
from trajstore.storage import Storage, open_storage
from trajstore.storage.fsspec_client import make_one_try
from trajstore.storage.retry import RetryPolicy

SCHEMA = {"obs": Field("float32", (4,)), "action": Field("int64")}
N_OBJECTS = 4  # of a commit: obs, action, and two of the spans
RETRY_S = 0.3
MOST_TRIES = 5  # of one request in this time: pauses are 0.05 s at least and grow; gcsfs alone makes six


PATHS = [("s3", "obstore"), ("gcs", "fsspec"), ("gcs", "obstore"), ("azure", "fsspec"), ("azure", "obstore")]


@pytest.fixture(params=PATHS, ids="-".join)
def outage(
    request: pytest.FixtureRequest, server: Callable[[str], Server], new_place: Callable[[str], Place]
) -> Iterator[tuple[Proxy, Place]]:
    kind, transport = request.param
    url = new_place(kind).url  # skips if there is no server
    proxy = Proxy(server(kind).endpoint)
    options = {**server(kind).options_at(proxy.endpoint), "transport": transport}
    yield proxy, Place(url, {**options, "retry_s": RETRY_S, "request_s": 30})
    proxy.close()


def step(n: int) -> dict[str, Any]:
    return {"obs": np.full(4, n, np.float32), "action": np.int64(n)}


def test_each_call_ends_with_one_error_and_few_tries(outage: tuple[Proxy, Place]) -> None:
    proxy, place = outage
    buffer = ReplayBuffer(place.url, schema=SCHEMA, commit_seconds=None, **place.kwargs)
    for n in range(20):
        buffer.append(step(n))
    buffer.flush()
    cold = Reader(trajstore.open(place.url, **place.kwargs))
    buffer.append(step(20))
    calls: dict[str, Callable[[], object]] = {
        "open": lambda: trajstore.open(place.url, **place.kwargs),
        "sample": lambda: cold.sample(4, Windows(2)),
        "commit": buffer.flush,
        "checkpoint": lambda: buffer.save_checkpoint("c", wait=True),
    }
    for name, call in calls.items():
        proxy.forget()
        proxy.plan = lambda request: UNAVAILABLE
        with pytest.raises(StorageError, match="gave up after") as caught:
            call()
        assert str(caught.value).count("gave up after") == 1, name
        tries = Counter((request.method, request.path.partition("?")[0]) for request in proxy.requests)
        if uploads := [where for where in tries if where[0] == "POST"]:  # GCS names the object in the body
            tries[uploads[0]] = -(-tries[uploads[0]] // N_OBJECTS)
        # What a wave of fsspec could not read is asked again by itself, and then by the decoder, which names it.
        assert 0 < max(tries.values()) <= MOST_TRIES + 2 * (name == "sample"), (name, tries)
    proxy.plan = none
    buffer.save_checkpoint("c", wait=True)
    buffer.close()
    assert trajstore.open(place.url, at="c", **place.kwargs).snapshot.n_rows == 21


@pytest.fixture
def proxy(kind: str, server: Callable[[str], Server]) -> Iterator[Proxy]:
    with contextlib.closing(Proxy(server(kind).endpoint)) as proxy:
        yield proxy


def by_fsspec(server: Server, proxy: Proxy, retry_s: float, request_s: float) -> Storage:
    options = {"transport": "fsspec", "retry_s": retry_s, "request_s": request_s}
    return open_storage(server.new_url(), {**server.options_at(proxy.endpoint), **options})


@pytest.mark.parametrize("kind", ["s3", "gcs", "azure"])
def test_a_body_that_breaks_off_is_asked_for_again_by_the_policy_alone(
    kind: str, proxy: Proxy, server: Callable[[str], Server], caplog: pytest.LogCaptureFixture
) -> None:
    """Azure's client used to ask three times, with pauses of a second, for each try of the policy."""
    storage = by_fsspec(server(kind), proxy, 30, 30)
    storage.put("key", bytes(10_000))
    proxy.forget()
    proxy.plan = first(2, TRUNCATE)
    with caplog.at_level(logging.WARNING, "trajstore"):
        assert storage.get("key") == bytes(10_000)
    assert len(proxy.requests) == 3
    assert len([record for record in caplog.records if "will be retried" in record.message]) == 2


@pytest.mark.parametrize("kind", ["s3", "azure"])  # gcsfs names both errors the same
def test_the_client_notices_each_request_without_an_answer(
    kind: str, proxy: Proxy, server: Callable[[str], Server]
) -> None:
    """Else the call is cancelled later; adlfs then asks something else, which took a minute more."""
    storage = by_fsspec(server(kind), proxy, 0.1, 0.2)
    storage.put("key", b"data")
    calls: list[Callable[[], object]] = [
        lambda: storage.get("key"),
        lambda: storage.size("key"),
        lambda: storage.list_names(""),
        lambda: storage.list_tree(""),
        lambda: storage.put("key", b"other"),
        lambda: storage.delete(["key"]),
    ]
    for call in calls:
        proxy.plan = held = Hold(0)
        with pytest.raises(StorageError, match="gave up after") as caught:
            call()
        held.release(UNAVAILABLE)
        assert "FSTimeoutError" not in str(caught.value)


@pytest.mark.parametrize("kind", ["gcs"])
def test_a_wave_that_fails_counts_for_the_tries_after_it(
    kind: str, proxy: Proxy, server: Callable[[str], Server]
) -> None:
    storage = by_fsspec(server(kind), proxy, 0.3, 30)

    def plan(request: Request) -> Fault:
        if len(proxy.requests) <= 2:
            time.sleep(0.4)  # the wave
        return UNAVAILABLE

    storage.put("key", b"data")
    proxy.forget()
    proxy.plan = plan
    with pytest.raises(StorageError, match="gave up after 0 s and 1 try"):
        storage.get_ranges([("key", 0, 2), ("other", 0, 2)])
    assert len(proxy.requests) == 4


@pytest.mark.parametrize("kind", ["gcs"])
def test_google_is_not_asked_about_buckets_elsewhere(
    kind: str, proxy: Proxy, server: Callable[[str], Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    import gcsfs

    asked = []

    async def ask(filesystem: Any) -> None:
        asked.append(filesystem)
        raise ConnectionError

    monkeypatch.setattr(gcsfs.GCSFileSystem, "_get_control_plane_client", ask, raising=False)
    storage = by_fsspec(server(kind), proxy, 0.3, 30)
    storage.put("key", b"data")
    assert storage.get("key") == b"data"
    assert storage.get_ranges([("key", 0, 1), ("key", 3, 4)]) == [b"d", b"a"]
    assert storage.size("key") == 4
    assert storage.list_names("") == storage.list_tree("") == ["key"]
    storage.delete(["key"])
    assert asked == []


def test_google_is_asked_about_a_bucket_once_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """gcsfs would repeat the question for a minute, before each request."""
    gcsfs = pytest.importorskip("gcsfs.extended_gcsfs", reason="this gcsfs does not ask for the kind of a bucket")
    asked = []

    async def layout(name: str, retry: Callable[..., Callable[[], Awaitable[None]]] | None, timeout: float) -> None:
        async def ask() -> None:
            asked.append(name)
            raise gcsfs.api_exceptions.ServiceUnavailable("down")

        await (ask() if retry is None else retry(ask)())

    async def client(filesystem: Any) -> Any:
        return SimpleNamespace(get_storage_layout=layout)

    monkeypatch.setattr(gcsfs.ExtendedGcsFileSystem, "_get_control_plane_client", client)
    filesystem = gcsfs.ExtendedGcsFileSystem(token="anon", asynchronous=True, skip_instance_cache=True)
    make_one_try(filesystem, RetryPolicy())
    asyncio.run(filesystem._is_zonal_bucket("bucket"))
    assert asked == ["projects/_/buckets/bucket/storageLayout"]
