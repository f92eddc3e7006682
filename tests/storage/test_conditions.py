"""Servers that ignore conditions on puts: of several creators one wins, and schema and streams never contradict."""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest

import trajstore
from tests.support.proxy import Proxy, Request
from tests.support.servers.moto import options_at
from trajstore import Field, Schema
from trajstore.storage import open_storage, service
from trajstore.store.verify import verify

pytestmark = pytest.mark.s3
Place = tuple[str, dict[str, Any]]


@pytest.fixture
def proxy(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    proxy = Proxy(s3_endpoint)
    proxy.ignores_conditions = True
    monkeypatch.setattr(service, "SETTLE_S", 0.5)
    yield proxy
    proxy.close()


@pytest.fixture
def place(proxy: Proxy, s3_bucket: str) -> Place:
    return f"s3://{s3_bucket}/{uuid.uuid4().hex}", options_at(proxy.endpoint)


def schema(n: int) -> Schema:
    return Schema({"x": Field("float32", (n,))})


def one_step(n: int) -> dict[str, np.ndarray]:
    return {"x": np.zeros(n, np.float32)}


def open_at(place: Place) -> trajstore.Store:
    return trajstore.open(place[0], storage_options=place[1])


def test_an_object_is_put_once_and_the_server_is_named_once(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    storage = open_storage(place[0], place[1])
    with caplog.at_level(logging.WARNING, "trajstore"):
        assert storage.put_once("a/one", b"mine")
        assert not storage.put_once("a/one", b"other")
        assert storage.put_once("a/two", b"mine")
    assert storage.get("a/one") == b"mine"
    assert not storage.is_exclusive
    assert sum(r.getMessage().count("ignores conditions") for r in caplog.records) == 1


def test_a_server_that_heeds_conditions_is_known_as_such(s3_endpoint: str, s3_bucket: str) -> None:
    storage = open_storage(f"s3://{s3_bucket}/{uuid.uuid4().hex}", options_at(s3_endpoint))
    assert storage.put_once("one", b"mine")
    assert not storage.put_once("one", b"mine too")
    assert storage.is_exclusive


def gather_puts(proxy: Proxy, n: int, key: str) -> None:
    """Let the first n puts of an object arrive before any of them is answered."""
    came, lock = [0], threading.Lock()

    def is_first_put(request: Request) -> bool:
        if request.kind != "PUT" or request.key.partition("/")[2] != key:
            return False
        with lock:
            came[0] += 1
            return came[0] <= n

    proxy.gather(n, is_first_put)


def call_at_once(function: Callable[[int], None], arguments: Iterable[int]) -> None:
    threads = [threading.Thread(target=function, args=(i,)) for i in arguments]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)


@pytest.mark.parametrize("key", ["zarr.json", "schema/zarr.json"])
def test_of_several_creators_with_different_schemas_one_wins(place: Place, proxy: Proxy, key: str) -> None:
    n = 4
    gather_puts(proxy, n, key)
    outcomes: dict[int, Any] = {}

    def create(i: int) -> None:
        try:
            store = trajstore.create(place[0], schema(i), storage_options=place[1], exist_ok=key != "zarr.json")
            with store.writer() as writer:
                writer.append(one_step(i), terminated=True)
        except (trajstore.SchemaError, trajstore.StoreExistsError) as error:
            outcomes[i] = error
        else:
            outcomes[i] = None

    call_at_once(create, range(1, n + 1))
    winners = [i for i, outcome in outcomes.items() if outcome is None]
    assert len(outcomes) == n
    assert len(winners) == 1, outcomes
    store = open_at(place)
    assert store.schema == schema(winners[0])
    assert len(store) == 1


def test_a_creator_that_comes_late_puts_the_schema_of_the_streams_back(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = trajstore.create(place[0], storage_options=place[1])
    late = open_at(place)
    with first.writer() as writer:
        writer.append(one_step(3), terminated=True)
    # The late one looked for the schema before the first put it, and puts its own afterwards.
    read = trajstore.store.schema_objects.read_schemas
    monkeypatch.setattr(service.ServiceStorage, "_exists", lambda self, key: False)
    monkeypatch.setattr(trajstore.store.store, "read_schema", lambda storage: None)
    late_writer = late.writer()
    monkeypatch.setattr(trajstore.store.schema_objects, "read_schemas", _empty_once(read))
    late_writer.append(one_step(5), terminated=True)
    with pytest.raises(trajstore.SchemaError, match="has another schema"):
        late_writer.commit()
    late_writer.release()
    monkeypatch.undo()
    store = open_at(place)
    assert store.schema is not None
    assert store.schema["x"].shape == (3,)
    assert len(store) == 1


def _empty_once(read: Any) -> Any:
    answers: list[list[Schema]] = [[]]
    return lambda storage: answers.pop() if answers else read(storage)


def test_a_writer_whose_schema_was_replaced_withdraws_its_stream(place: Place) -> None:
    store = trajstore.create(place[0], storage_options=place[1])
    writer = store.writer()
    writer.append(one_step(3), terminated=True)
    storage = open_storage(place[0], place[1]).source
    real_put = service.ServiceStorage.put

    def put(self: Any, key: str, data: bytes, expect: str = "*") -> str:
        if key == f"streams/{writer.stream}/zarr.json":
            # Another creator's schema arrives just before the stream is published.
            real_put(storage, "schema/zarr.json", trajstore.store.schema_objects.schema_bytes(schema(5)))
        return real_put(self, key, data, expect)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(service.ServiceStorage, "put", put)
        with pytest.raises(trajstore.SchemaError, match="has another schema"):
            writer.commit()
    writer.release()
    other = open_at(place)
    assert other.schema == schema(5)
    assert len(other.streams) == 0
    with other.writer() as more:
        more.append(one_step(5), terminated=True)
    assert len(open_at(place)) == 1


@pytest.mark.parametrize("is_same_field", [True, False], ids=["one field", "several fields"])
def test_fields_that_are_added_at_once_never_contradict_each_other(
    place: Place, proxy: Proxy, is_same_field: bool
) -> None:
    trajstore.create(place[0], schema(1), storage_options=place[1])
    n = 3
    gather_puts(proxy, n, "schema/1/zarr.json")
    outcomes: dict[int, Any] = {}

    def add(i: int) -> None:
        name = "y" if is_same_field else f"y{i}"
        fields = {"x": Field("float32", (1,)), name: Field("float32", (i,), fill=i)}
        try:
            store = trajstore.create(place[0], fields, storage_options=place[1], exist_ok=True)
            with store.writer() as writer:
                writer.append({**one_step(1), name: np.zeros(i, np.float32)}, terminated=True)
        except trajstore.SchemaError as error:
            outcomes[i] = error
        else:
            outcomes[i] = None

    call_at_once(add, range(1, n + 1))
    winners = [i for i, outcome in outcomes.items() if outcome is None]
    assert len(outcomes) == n
    assert len(winners) == (1 if is_same_field else n), outcomes
    store = open_at(place)
    assert len(store) == len(winners)
    assert store.schema is not None
    if is_same_field:
        assert store.schema["y"].shape == (winners[0],)
    else:
        assert {*store.schema} == {"x", "y1", "y2", "y3"}


def test_an_object_left_by_a_creator_that_died_is_no_damage(place: Place) -> None:
    store = trajstore.create(place[0], schema(2), storage_options=place[1])
    with store.writer() as writer:
        writer.append(one_step(2), terminated=True)
    open_storage(place[0], place[1]).put("scratch/probe-left", b"{}")
    assert verify(place[0], storage_options=place[1]).problems == []
