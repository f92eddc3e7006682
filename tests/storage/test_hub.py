"""Stores on Hugging Face, read by its own client from a stand-in of its server."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trajstore
from tests.support.hub import NAME, Hub
from trajstore import Field, Reader, Windows
from trajstore.errors import StorageError, StoreNotFoundError
from trajstore.storage import open_storage, retry
from trajstore.store.verify import verify

pytest.importorskip("huggingface_hub", reason="'pip install huggingface_hub' has the client")

URL = f"hf://datasets/{NAME}"
SCHEMA = {"obs": Field("float32", (8,)), "action": Field("int64")}


def write(directory: Path, name: str) -> None:
    store = trajstore.create(directory, SCHEMA, exist_ok=True, fsync=False)
    with store.writer(name, commit_seconds=None) as writer:
        writer.append_episode({"obs": np.ones((60, 8), np.float32), "action": np.arange(60)}, terminated=True)


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    write(tmp_path, "first")
    with contextlib.closing(Hub(tmp_path)) as hub:
        yield hub


def options(hub: Hub, **more: Any) -> dict[str, Any]:
    return {"endpoint": hub.endpoint, "token": False, **more}


def test_a_store_is_read_by_the_client_of_the_hub(hub: Hub) -> None:
    store = trajstore.open(URL, storage_options=options(hub))
    np.testing.assert_array_equal(store.read_episode(0)["action"], np.arange(60))
    batch = Reader(store, seed=1, cache_bytes="1MiB").sample(8, Windows(4))
    assert (np.asarray(batch["obs"]) == 1).all()
    assert verify(URL, storage_options=options(hub)).problems == []


def test_a_refresh_sees_what_was_uploaded_later(hub: Hub) -> None:
    store = trajstore.open(URL, storage_options=options(hub))
    write(hub.directory, "second")
    store.refresh()
    assert len(store) == 2


def test_a_range_is_one_request_for_its_bytes(hub: Hub) -> None:
    data = bytes(range(250)) * 400
    (hub.directory / "object").write_bytes(data)
    storage = open_storage(URL, options(hub))
    assert storage.get_range("object", 5, 10) == data[5:10]
    assert storage.get_range("object", 99_990, 200_000) == data[99_990:]
    (hub.directory / "object").write_bytes(data * 2)
    hub.asked.clear()
    hub.bytes_sent = 0
    assert storage.get_range("object", 100_000, 100_007) == data[:7]
    assert sum(hub.asked.values()) == 1
    assert hub.bytes_sent == 7


def test_faults_are_repeated_by_one_policy(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    callers, sleep = list[str](), time.sleep

    def pause(seconds: float) -> None:
        callers.append(sys._getframe(1).f_globals["__name__"])
        sleep(min(seconds, 0.01))

    monkeypatch.setattr(time, "sleep", pause)
    store = trajstore.open(URL, storage_options=options(hub))
    for status in (429, 500, 503):
        hub.fails, hub.status = 3, status
        store.refresh()
        assert hub.fails == 0
    assert callers.count(retry.__name__) >= 3
    assert not any(name.startswith("huggingface_hub") for name in callers)


def test_a_hub_that_fails_for_good_is_given_up_by_the_options_of_the_user(hub: Hub) -> None:
    store = trajstore.open(URL, storage_options=options(hub, retry_s=0.3))
    hub.fails = 10**6
    hub.asked.clear()
    for call in (store.refresh, lambda: trajstore.open(URL, storage_options=options(hub, retry_s=0.3))):
        with pytest.raises(StorageError, match=r"gave up after \d+ s and [2-9] tries"):
            call()
    assert max(hub.asked.values()) < 20


def test_requests_of_others_are_repeated_as_they_were(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import HfFileSystem
    from huggingface_hub.utils import _http

    trajstore.open(URL, storage_options=options(hub))
    theirs = HfFileSystem(endpoint=hub.endpoint, token=False, skip_instance_cache=True)
    path = f"datasets/{NAME}"
    theirs.ls(path)
    monkeypatch.setattr(_http.time, "sleep", lambda seconds: None)
    hub.fails = 2
    assert theirs.ls(path, refresh=True)


def test_a_dataset_that_does_not_exist_is_no_store(hub: Hub) -> None:
    with pytest.raises(StoreNotFoundError):
        trajstore.open("hf://datasets/me/other", storage_options=options(hub))
