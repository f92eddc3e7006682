"""How many requests, in how many waves: opening, refreshing, committing and a cold batch."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import trajstore
from tests.conftest import Place
from tests.support.proxy import INTERNAL, RESET, TRUNCATE, Fault, Hold, Proxy, Request
from trajstore import Field, Reader, ReplayBuffer, Schema, Windows
from trajstore.storage import Storage, open_storage

pytestmark = pytest.mark.s3

SCHEMA = Schema({"obs": Field("float32", (4,), chunk_rows=20), "action": Field("int64", chunk_rows=20)})
STEP = {"obs": np.ones(4, np.float32), "action": 1}
N_CHUNKS = 10  # of each field
SPREAD = 100_000  # bytes between ranges, so that they are not merged


@pytest.fixture(params=["obstore", "fsspec"])
def place(request: pytest.FixtureRequest, proxy: Proxy, new_place: Callable[[str], Place]) -> Place:
    place = new_place("s3")
    options = {**place.options, "client_kwargs": {"endpoint_url": proxy.endpoint}, "transport": request.param}
    return Place(place.url, options)


def write(store: trajstore.Store, name: str, n: int = 20 * N_CHUNKS) -> None:
    with store.writer(name, commit_seconds=None) as writer:
        writer.append_episode({"obs": np.ones((n, 4), np.float32), "action": np.arange(n)}, terminated=True)


def is_chunk_read(request: Request) -> bool:
    return request.kind == "GET" and "/steps/" in request.key and not request.key.endswith("zarr.json")


def is_record_read(request: Request) -> bool:
    return request.kind == "GET" and "/streams/" in request.key and request.key.endswith("zarr.json")


def test_a_cold_batch_is_one_wave(proxy: Proxy, place: Place) -> None:
    store = trajstore.create(place.url, SCHEMA, **place.kwargs)
    write(store, "w")
    store.refresh()
    readers = [Reader(store), Reader(store)]
    proxy.forget()
    readers[0].sample(256, Windows(4))
    n = sum(is_chunk_read(request) for request in proxy.requests)
    assert n == 2 * N_CHUNKS
    proxy.forget()
    proxy.gather(n, is_chunk_read)  # answered only once all of them are under way
    batch = readers[1].sample(256, Windows(4))
    assert len(batch["obs"]) == 256
    assert sum(is_chunk_read(request) for request in proxy.requests) == n


RANGES = [("spread", start, start + 100) for start in range(0, 25 * SPREAD, SPREAD)]


@pytest.fixture
def spread(place: Place, proxy: Proxy) -> Storage:
    storage = open_storage(place.url, place.options)
    storage.put("spread", np.arange(25 * SPREAD // 4, dtype=np.uint32).tobytes())
    storage.put("other", b"other")
    proxy.forget()
    return storage


def check(storage: Storage) -> None:
    whole, other, *parts = storage.get_ranges([("spread", 0, None), ("other", 1, 3), *RANGES])
    assert other == b"th"
    assert parts == [whole[start:stop] for _, start, stop in RANGES]


def test_many_ranges_of_one_object_are_one_wave(proxy: Proxy, spread: Storage) -> None:
    proxy.gather(2 + len(RANGES), lambda request: True)  # answered only once all of them are under way
    check(spread)
    assert proxy.count() == {"GET": 2 + len(RANGES)}


@pytest.mark.parametrize("fault", [INTERNAL, RESET, TRUNCATE])
def test_a_range_that_fails_is_asked_for_again(proxy: Proxy, spread: Storage, fault: Fault) -> None:
    left = [fault] * 3
    proxy.plan = lambda request: left.pop() if request.kind == "GET" and left else None
    check(spread)
    assert proxy.faults == {fault: 3}


def test_a_missing_object_is_named_among_ranges_of_others(spread: Storage) -> None:
    missing = [(f"none/{key}", start, stop) for key, start, stop in RANGES[:3]]
    with pytest.raises(FileNotFoundError, match="none/spread"):
        spread.get_ranges([*RANGES, *missing])


def test_opening_is_two_round_trips(proxy: Proxy, place: Place) -> None:
    store = trajstore.create(place.url, SCHEMA, **place.kwargs)
    for n in (1, 4):
        for i in range(len(trajstore.open(place.url, **place.kwargs).streams), n):
            write(store, f"w{i}", 20)
        # The root, the schema (and that there is no second one) and the list; then the records.
        for n_at_once, which in ((4, lambda request: not is_record_read(request)), (n, is_record_read)):
            proxy.forget()
            proxy.gather(n_at_once, which)  # answered only once all of them are under way
            trajstore.open(place.url, **place.kwargs)
            proxy.gather(1, lambda request: False)
            assert proxy.count() == {"LIST": 1, "GET": 3 + n}


def test_creating_again_is_two_round_trips_and_a_buffer_one_more(proxy: Proxy, place: Place) -> None:
    store = trajstore.create(place.url, SCHEMA, **place.kwargs)
    for i in range(3):
        write(store, f"w{i}", 20)

    def create() -> None:
        assert len(trajstore.create(place.url, SCHEMA, exist_ok=True, **place.kwargs)) == 3

    def buffer() -> None:
        ReplayBuffer(place.url, schema=SCHEMA, exist="join", **place.kwargs).close()

    def is_spans_read(request: Request) -> bool:
        return "/spans/" in request.key

    # The root, two lists, the schema (and that there is no second one); the records; two arrays of spans a stream.
    waves = [(5, lambda r: not (is_record_read(r) or is_spans_read(r))), (3, is_record_read), (6, is_spans_read)]
    for begin in (create, buffer):
        for n_at_once, which in waves:
            proxy.forget()
            proxy.gather(n_at_once, which)  # answered only once all of them are under way
            begin()
            proxy.gather(1, lambda request: False)
            assert proxy.count() == {"LIST": 2, "GET": 3 + 3 + 6}


def test_groups_of_a_new_store_are_put_while_conditions_are_probed(proxy: Proxy, place: Place) -> None:
    puts: list[Request] = []

    def is_early_put(request: Request) -> bool:
        if request.kind == "PUT":
            puts.append(request)
        return request.kind == "PUT" and len(puts) <= 3

    proxy.gather(3, is_early_put)  # answered only once all of them are under way
    trajstore.create(place.url, SCHEMA, **place.kwargs)
    assert len(puts) == 6  # two groups; a probe and its repetition; the root; the schema


def test_a_refresh_is_a_listing_and_the_records_of_streams_that_go_on(proxy: Proxy, place: Place) -> None:
    store = trajstore.create(place.url, SCHEMA, **place.kwargs)
    write(store, "sealed")
    with store.writer("open", commit_seconds=None) as writer:
        writer.append_episode({"obs": np.ones((9, 4), np.float32), "action": np.arange(9)}, terminated=True)
        writer.commit()
        store.refresh()
        proxy.forget()
        store.refresh()
        assert proxy.count() == {"LIST": 1, "GET": 1}


def test_appends_and_batches_of_new_steps_wait_for_no_put_until_the_memory_bound(
    proxy: Proxy, place: Place
) -> None:
    n_steps = 400
    options: dict[str, Any] = {"commit_steps": 10, "commit_seconds": None, "buffer_bytes": "1MiB"}
    buffer = ReplayBuffer(place.url, schema=SCHEMA, seed=0, **options, **place.kwargs)
    buffer.append(STEP)
    buffer.flush()
    proxy.plan = hold = Hold(0, "PUT")
    sampled = []

    def run() -> None:
        for _ in range(n_steps):
            buffer.append(STEP)
        sampled.append(buffer.sample(32))

    # In a thread, so that an append that waits fails the test instead of blocking it.
    running = threading.Thread(target=run, daemon=True)
    running.start()
    running.join(60)
    hold.wait()
    assert len(sampled) == 1  # all was appended, and commits had begun, but no put was answered
    assert trajstore.open(place.url, **place.kwargs).snapshot.n_rows == 1
    hold.release()
    buffer.close()
    assert trajstore.open(place.url, **place.kwargs).snapshot.n_rows == 1 + n_steps
