"""Services that fail for good: each call ends with one clear error, and no client repeats what we repeat."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import trajstore
from tests.conftest import Place
from tests.support.proxy import UNAVAILABLE, Proxy, none
from tests.support.servers.process import Server
from trajstore import Field, Reader, ReplayBuffer, StorageError, Windows

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
