"""Faults of a network and of a service, on each kind of service and by each transport."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator

import numpy as np
import pytest

import trajstore
from tests.conftest import Place
from tests.support.proxy import (
    INTERNAL,
    LOSE,
    RESET,
    TOO_MANY,
    TRUNCATE,
    UNAVAILABLE,
    Answer,
    Proxy,
    Slow,
    every,
    first,
    none,
)
from tests.support.servers.process import Server
from trajstore import Field
from trajstore.errors import StorageError
from trajstore.storage import Storage, open_storage
from trajstore.storage.retry import RetryPolicy
from trajstore.store.verify import verify

PATHS = [(kind, transport) for kind in ("s3", "gcs", "azure") for transport in ("obstore", "fsspec")]
EXPIRED = {
    "s3": [Answer(400, "ExpiredToken")],
    "gcs": [Answer(401, "AuthenticationRequired")],
    "azure": [Answer(401, "InvalidAuthenticationInfo"), Answer(403, "AuthenticationFailed")],
}
IS_LONG = bool(os.environ.get("TRAJSTORE_ALL_SERVER_TESTS"))
FAULTS = (UNAVAILABLE, INTERNAL, TOO_MANY, RESET, LOSE, TRUNCATE, Slow(0.05))
SCHEMA = {"obs": Field("float32", (4,)), "action": Field("int64")}


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RetryPolicy, "pause_s", lambda policy, n_tries: 0.01)


@pytest.fixture(params=PATHS, ids="-".join)
def path(request: pytest.FixtureRequest) -> tuple[str, str]:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def proxy(path: tuple[str, str], server: Callable[[str], Server]) -> Iterator[Proxy]:
    with contextlib.closing(Proxy(server(path[0]).endpoint)) as proxy:
        yield proxy


@pytest.fixture
def place(path: tuple[str, str], proxy: Proxy, server: Callable[[str], Server]) -> Place:
    kind, transport = path
    options = {**server(kind).options_at(proxy.endpoint), "transport": transport}
    return Place(server(kind).new_url(), options)


@pytest.fixture
def storage(place: Place) -> Storage:
    return open_storage(place.url, place.options)


def test_passing_faults_are_survived(proxy: Proxy, storage: Storage) -> None:
    data = os.urandom(1000)
    calls: list[tuple[Callable[[], object], object]] = [
        (lambda: storage.put("p/key", data) and None, None),
        (lambda: storage.get("p/key"), data),
        (lambda: storage.get_range("p/key", 10, 500), data[10:500]),
        (lambda: storage.get_many(["p/key", "p/key"]), [data, data]),
        (lambda: storage.size("p/key"), 1000),
        (lambda: storage.list_names("p"), ["key"]),
        (lambda: storage.tree_sizes("p"), {"p/key": 1000}),
        (lambda: storage.delete(["p/key"]), None),
    ]
    storage.put("p/key", b"")
    # Each fault meets another call; the long form has each fault at each call.
    for turn in range(len(FAULTS) if IS_LONG else 1):
        for (call, expected), fault in zip(calls, (FAULTS * 3)[turn:], strict=False):
            proxy.faults.clear()
            proxy.plan = first(2, fault)
            assert call() == expected, fault
            assert proxy.faults[fault] > 0
    proxy.plan = none
    assert storage.list_names("p") == []


# Azure's signatures cover the range, so a proxy can't take it away.
@pytest.mark.parametrize("path", PATHS[:4], ids="-".join)
def test_a_server_that_sends_whole_objects_for_ranges_is_named_at_once(proxy: Proxy, storage: Storage) -> None:
    storage.put("key", bytes(range(200)))
    proxy.ignores_ranges = True
    for places in ([("key", 10, 20)], [("key", 1, 5), ("key", 9, 99)]):
        proxy.forget()
        with pytest.raises(StorageError, match="does not answer requests for ranges"):
            storage.get_ranges(places)
        assert len(proxy.requests) <= 4


# test_s3.py has the same for S3.
@pytest.mark.parametrize("path", PATHS if IS_LONG else PATHS[2:], ids="-".join)
def test_a_commit_whose_answers_were_lost_is_not_doubled(proxy: Proxy, place: Place) -> None:
    with trajstore.create(place.url, SCHEMA, **place.kwargs).writer(commit_seconds=None) as writer:
        proxy.plan = every(2, LOSE, "PUT")
        for i in range(3):
            writer.append_episode({"obs": np.full((9, 4), i, np.float32), "action": np.arange(9) + i})
            writer.commit()
    assert proxy.faults[LOSE] >= 6
    proxy.plan = none
    store = trajstore.open(place.url, **place.kwargs)
    assert [int(store.read_episode(i)["action"][0]) for i in range(len(store))] == [0, 1, 2]
    assert store.snapshot.n_rows == 27
    assert verify(place.url, **place.kwargs).problems == []


def test_an_answer_that_does_not_begin_in_time_is_asked_for_again(proxy: Proxy, place: Place) -> None:
    storage = open_storage(place.url, {**place.options, "request_s": 0.4, "retry_s": 20})
    storage.put("key", b"data")
    proxy.forget()
    proxy.plan = first(1, Slow(2.5), "GET")
    assert storage.get("key") == b"data"
    assert len(proxy.requests) >= 2


def test_expired_credentials_are_said_at_once(proxy: Proxy, storage: Storage, path: tuple[str, str]) -> None:
    storage.put("key", b"data")
    for answer in EXPIRED[path[0]]:
        proxy.forget()
        proxy.plan = first(1000, answer)
        with pytest.raises(StorageError, match=r"credentials have expired .* storage_options"):
            storage.get("key")
        assert proxy.count()["GET"] <= 2  # once more, where the client may find new ones
