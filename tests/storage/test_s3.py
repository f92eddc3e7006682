"""S3 through a proxy that fails, loses answers, counts and listens: nothing is lost, doubled or leaked."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import fsspec
import numpy as np
import pytest
import s3fs

import trajstore
from tests.conftest import Place
from tests.storage.test_storage import in_child
from tests.support.proxy import (
    LOSE,
    TRUNCATE,
    UNAVAILABLE,
    Answer,
    Fault,
    Proxy,
    Request,
    Slow,
    either,
    every,
    first,
    none,
)
from trajstore import Field, Schema
from trajstore.errors import ConflictError, StorageError
from trajstore.storage import ABSENT, Put, Storage, client_options, open_storage
from trajstore.storage.retry import RetryPolicy

pytestmark = pytest.mark.s3

KEY, SECRET, TOKEN = "AKIA0LOOPBACK0KEY", "s3cr3t/of+nobody", "t0ken-of-nobody"
CONFLICT = Answer(409, "ConditionalRequestConflict", "A conflicting operation is under way.")
SCHEMA = Schema(
    {
        "observation": Field("float32", (3,), final=True),
        "pixels": Field("uint8", (4, 4)),
        "action": Field("int64"),
        "reward": Field("float32"),
    },
    reward="reward",
)


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RetryPolicy, "pause_s", lambda policy, n_tries: 0.01)


@pytest.fixture(params=["obstore", "fsspec"])
def behind(request: pytest.FixtureRequest, proxy: Proxy, new_place: Callable[[str], Place]) -> Place:
    """A fresh place that is reached through the proxy, by each transport in turn."""
    options = {
        "key": KEY,
        "secret": SECRET,
        "token": TOKEN,
        "client_kwargs": {"endpoint_url": proxy.endpoint},
        "transport": request.param,
    }
    return Place(new_place("s3").url, options)


@pytest.fixture
def impatient(behind: Place) -> Place:
    """The same place, where a call gives up soon."""
    return Place(behind.url, {**behind.options, "retry_s": 0.3, "request_s": 30})


@pytest.fixture
def storage(behind: Place) -> Storage:
    return open_storage(behind.url, behind.options)


def episode(seed: int, n: int = 20) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        "observation": rng.normal(size=(n + 1, 3)).astype(np.float32),
        "pixels": rng.integers(0, 256, (n, 4, 4), dtype=np.uint8),
        "action": rng.integers(0, 9, n),
        "reward": rng.normal(size=n).astype(np.float32),
    }


def assert_equal(read: dict[str, Any], written: dict[str, Any]) -> None:
    assert read.keys() == written.keys()
    for name, values in written.items():
        np.testing.assert_array_equal(read[name], values)


# ---- faults --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("expect", [None, ABSENT])
def test_a_put_through_passing_faults_succeeds(proxy: Proxy, storage: Storage, expect: str | None) -> None:
    proxy.plan = first(3, UNAVAILABLE)
    storage.put("key", b"data", *([expect] if expect else []))
    assert storage.get("key") == b"data"


def test_reads_through_passing_faults_succeed(proxy: Proxy, storage: Storage) -> None:
    storage.put("p/key", b"data")
    reads: list[tuple[Callable[[], object], object]] = [
        (lambda: storage.get("p/key"), b"data"),
        (lambda: storage.get_range("p/key", 1, 3), b"at"),
        (lambda: storage.get_many(["p/key", "p/key"]), [b"data", b"data"]),
        (lambda: storage.list_names("p"), ["key"]),
        (lambda: storage.size("p/key"), 4),
    ]
    for read, expected in reads:
        proxy.plan = first(3, UNAVAILABLE)
        assert read() == expected


def test_a_put_whose_answer_was_lost_succeeds(proxy: Proxy, storage: Storage) -> None:
    proxy.plan = first(1, LOSE, "PUT")
    version = storage.put("key", b"one")
    assert storage.put("key", b"two", version) != version
    assert storage.get("key") == b"two"


def test_an_exclusive_put_whose_answer_was_lost_succeeds(proxy: Proxy, storage: Storage) -> None:
    proxy.plan = first(1, LOSE, "PUT")
    version = storage.put("key", b"one", ABSENT)
    storage.put("key", b"two", version)
    assert storage.get("key") == b"two"


def test_a_put_on_a_version_whose_answer_was_lost_succeeds(proxy: Proxy, storage: Storage) -> None:
    version = storage.put("key", b"one")
    proxy.plan = first(1, LOSE, "PUT")
    version = storage.put("key", b"two", version)
    storage.put("key", b"three", version)
    assert storage.get("key") == b"three"


def test_a_put_on_a_stale_version_is_a_conflict_and_changes_nothing(storage: Storage) -> None:
    stale = storage.put("key", b"one")
    storage.put("key", b"two", stale)
    with pytest.raises(ConflictError, match="key"):
        storage.put("key", b"three", stale)
    assert storage.get("key") == b"two"


def test_a_conflict_is_known_at_the_first_answer(proxy: Proxy, storage: Storage) -> None:
    stale = storage.put("key", b"one")
    storage.put("key", b"two", stale)
    proxy.forget()
    with pytest.raises(StorageError):
        storage.put("key", b"three", stale)
    assert proxy.count()["PUT"] == 1


def test_a_put_on_a_version_of_an_object_that_is_gone_is_a_conflict(storage: Storage) -> None:
    version = storage.put("key", b"one")
    storage.delete(["key"])
    with pytest.raises(ConflictError, match="key"):
        storage.put("key", b"two", version)


def test_an_exclusive_put_on_an_existing_key_changes_nothing(storage: Storage) -> None:
    storage.put("key", b"one")
    with pytest.raises(FileExistsError):
        storage.put("key", b"two", ABSENT)
    assert storage.get("key") == b"one"


def test_an_exclusive_put_that_met_another_under_way_is_asked_again(proxy: Proxy, storage: Storage) -> None:
    proxy.plan = first(1, CONFLICT, "PUT")
    storage.put("key", b"one", ABSENT)
    assert storage.get("key") == b"one"


def test_a_put_on_a_version_that_met_another_under_way_is_asked_again(proxy: Proxy, storage: Storage) -> None:
    version = storage.put("key", b"one")
    proxy.plan = first(1, CONFLICT, "PUT")
    storage.put("key", b"two", version)
    assert storage.get("key") == b"two"


@pytest.mark.slow
def test_a_large_object_is_put_on_its_version_like_any_other(storage: Storage) -> None:
    large = bytes(101 << 20)
    stale = storage.put("key", large)
    storage.put("key", b"short", stale)
    with pytest.raises(ConflictError):
        storage.put("key", large, stale)
    assert storage.get("key") == b"short"


@pytest.mark.slow
def test_a_large_object_is_read_in_one_request_so_that_it_is_never_a_mix(proxy: Proxy, storage: Storage) -> None:
    storage.put("key", bytes(60 << 20))
    proxy.forget()
    assert len(storage.get("key")) == 60 << 20
    assert proxy.count()["GET"] == 1


@pytest.mark.parametrize("fault", [UNAVAILABLE, LOSE])
def test_patience_ends_in_an_error_that_names_the_url_and_what_was_tried(
    proxy: Proxy, impatient: Place, fault: Answer | str
) -> None:
    storage = open_storage(impatient.url, impatient.options)
    storage.list_names("")  # connects
    proxy.plan = first(1000, fault)
    with pytest.raises(StorageError, match=rf"{impatient.url}/a/key: gave up after \d+ s and \d+ tr") as caught:
        storage.put("a/key", b"data")
    said = int(str(caught.value).partition(" tr")[0].rpartition(" ")[2])
    # Neither client repeats by itself; only aiohttp sends what met a closed connection again, on a new one.
    is_again = fault == LOSE and impatient.options["transport"] == "fsspec"
    assert said <= proxy.count()["PUT"] <= said * (2 if is_again else 1)


def test_a_wave_to_a_server_that_fails_gives_up_once(proxy: Proxy, impatient: Place) -> None:
    storage = open_storage(impatient.url, impatient.options)
    proxy.plan = first(10_000, UNAVAILABLE)
    with pytest.raises(StorageError, match="gave up"):
        storage.get("a")
    proxy.forget()
    with pytest.raises(StorageError, match=r" 1 try[: ]"):
        storage.get("b")
    assert proxy.count() == {"GET": 1}


def test_a_truncated_answer_is_asked_again(proxy: Proxy, storage: Storage) -> None:
    storage.put("key", bytes(1000))
    proxy.forget()
    proxy.plan = first(1, TRUNCATE, "GET")
    assert storage.get("key") == bytes(1000)
    assert proxy.count() == {"GET": 2}


def test_expired_credentials_are_said_at_once(proxy: Proxy, storage: Storage) -> None:
    proxy.plan = first(1000, Answer(400, "ExpiredToken"))
    with pytest.raises(StorageError, match=r"credentials have expired .* storage_options"):
        storage.get("key")
    assert proxy.count()["GET"] <= 2  # once more, where the client may find new ones


def test_bytes_that_are_late_are_asked_for_again(proxy: Proxy, behind: Place) -> None:
    hedged = open_storage(behind.url, {**behind.options, "hedge_s": 0.05})
    hedged.put("key", b"data")
    released = threading.Event()
    seen = []

    def hold_first(request: Request) -> None:
        seen.append(request)
        if len(seen) == 1:
            released.wait(60)

    proxy.plan = hold_first
    try:
        assert hedged.get("key") == b"data"
    finally:
        released.set()


def test_an_error_of_one_of_two_requests_is_not_the_answer(proxy: Proxy, behind: Place) -> None:
    hedged = open_storage(behind.url, {**behind.options, "hedge_s": 0.05})
    hedged.put("key", b"data")
    has_second = threading.Event()

    def plan(request: Request) -> Fault:
        if len(proxy.requests) == 1:
            has_second.wait(60)
            return UNAVAILABLE
        has_second.set()
        return Slow(0.5)

    proxy.forget()
    proxy.plan = plan
    assert hedged.get("key") == b"data"
    assert len(proxy.requests) == 2


@pytest.mark.parametrize("expect", [None, ABSENT])
def test_a_bucket_that_does_not_exist_is_no_conflict_and_nothing_to_wait_for(
    impatient: Place, expect: str | None
) -> None:
    storage = open_storage("s3://nobody-made-this-bucket/x", impatient.options)
    with pytest.raises(StorageError, match="can't write") as caught:
        storage.put("key", b"data", *([expect] if expect else []))
    assert not isinstance(caught.value, ConflictError)
    assert "gave up" not in str(caught.value)


def test_ranges_that_lie_close_together_are_one_request(proxy: Proxy, storage: Storage) -> None:
    data = bytes(range(250)) * 8
    storage.put("a", data)
    storage.put("b", data)
    proxy.forget()
    places = [("b", 100, 200), ("a", 1000, 1100), ("a", 0, 10), ("a", 5, 20), ("b", 0, None)]
    assert storage.get_ranges(places) == [data[start:stop] for _, start, stop in places]
    assert proxy.count() == {"GET": 3}


def test_what_is_forbidden_is_not_asked_again(proxy: Proxy, storage: Storage) -> None:
    proxy.plan = first(1000, Answer(403, "AccessDenied"))
    with pytest.raises(StorageError, match="key"):
        storage.put("key", b"data")
    assert proxy.count()["PUT"] == 1


def test_every_way_in_reports_an_unreachable_server_as_a_storage_error(proxy: Proxy, impatient: Place) -> None:
    proxy.plan = first(10_000, UNAVAILABLE)
    for enter in (trajstore.create, trajstore.open):
        with pytest.raises(StorageError, match=impatient.url):
            enter(impatient.url, **impatient.kwargs)


def test_a_bucket_that_does_not_exist_is_named(behind: Place) -> None:
    with pytest.raises(StorageError, match="s3://no-such-bucket/x"):
        trajstore.create("s3://no-such-bucket/x", **behind.kwargs)


def test_a_whole_session_through_a_flaky_network_loses_nothing(proxy: Proxy, behind: Place) -> None:
    proxy.plan = either(every(7, UNAVAILABLE), every(11, LOSE, "PUT"))
    store = trajstore.create(behind.url, SCHEMA, **behind.kwargs)
    with store.writer(commit_seconds=None) as writer:
        for seed in range(12):
            writer.append_episode(episode(seed, 5 + seed), terminated=True)
            if seed % 2:
                writer.commit()
    reader = trajstore.open(behind.url, **behind.kwargs)
    assert len(reader) == 12
    assert reader.streams[0].is_sealed
    for seed in range(12):
        assert_equal(reader.read_episode(seed), episode(seed, 5 + seed))


def test_a_commit_that_ran_out_of_patience_succeeds_later(proxy: Proxy, impatient: Place) -> None:
    store = trajstore.create(impatient.url, SCHEMA, **impatient.kwargs)
    with store.writer(commit_seconds=None) as writer:
        writer.append_episode(episode(0), terminated=True)
        writer.commit()
        writer.append_episode(episode(1), terminated=True)
        proxy.plan = first(10_000, LOSE, "PUT")  # every put succeeds, and its answer is lost
        with pytest.raises(StorageError):
            writer.commit()
        proxy.plan = none
        writer.append_episode(episode(2), terminated=True)
    store.refresh()
    for seed in range(3):
        assert_equal(store.read_episode(seed), episode(seed))


# ---- costs ---------------------------------------------------------------------------------------------


def test_a_get_is_one_request(proxy: Proxy, storage: Storage) -> None:
    storage.put("key", b"data")
    proxy.forget()
    storage.get("key")
    assert proxy.count() == {"GET": 1}


def test_a_wave_of_gets_is_one_request_an_object(proxy: Proxy, storage: Storage) -> None:
    storage.put_many([Put(f"k{i}", lambda: b"data") for i in range(6)])
    proxy.forget()
    storage.get_many([f"k{i}" for i in range(6)])
    assert proxy.count() == {"GET": 6}


def test_a_wave_of_gets_is_under_way_at_once(proxy: Proxy, storage: Storage) -> None:
    storage.put_many([Put(f"k{i}", lambda: b"data") for i in range(6)])
    proxy.gather(6, lambda request: request.kind == "GET")
    assert storage.get_many([f"k{i}" for i in range(6)]) == [b"data"] * 6


def test_a_later_commit_is_a_put_an_array_and_one_for_the_record(proxy: Proxy, behind: Place) -> None:
    store = trajstore.create(behind.url, SCHEMA, **behind.kwargs)
    with store.writer(commit_seconds=None) as writer:
        for seed in range(2):
            proxy.forget()
            writer.append_episode(episode(seed), terminated=True)
            writer.commit()
        n_fields, n_span_arrays = 4, 2
        assert proxy.count() == {"PUT": n_fields + n_span_arrays + 1}


def test_a_later_commit_is_two_waves(proxy: Proxy, behind: Place) -> None:
    store = trajstore.create(behind.url, SCHEMA, **behind.kwargs)
    with store.writer(commit_seconds=None) as writer:
        writer.append_episode(episode(0), terminated=True)
        writer.commit()
        proxy.forget()
        proxy.gather(6, is_chunk)
        writer.append_episode(episode(1), terminated=True)
        writer.commit()
        assert [is_chunk(request) for request in proxy.requests] == [True] * 6 + [False]


def is_chunk(request: Request) -> bool:
    return request.kind == "PUT" and not request.key.endswith("zarr.json")


@pytest.mark.parametrize("n_streams", [0, 1, 3])
def test_opening_costs_one_listing_and_a_get_a_stream(proxy: Proxy, behind: Place, n_streams: int) -> None:
    store = trajstore.create(behind.url, SCHEMA, **behind.kwargs)
    for i in range(n_streams):
        with store.writer(f"w{i}") as writer:
            writer.append_episode(episode(i), terminated=True)
    proxy.forget()
    trajstore.open(behind.url, **behind.kwargs)
    count = proxy.count()
    assert set(count) == {"GET", "LIST"}
    assert count["LIST"] == 1
    assert count["GET"] <= 3 + n_streams


def test_a_refresh_asks_nothing_about_sealed_streams(proxy: Proxy, behind: Place) -> None:
    store = trajstore.create(behind.url, SCHEMA, **behind.kwargs)
    for i in range(3):
        with store.writer(f"w{i}") as writer:
            writer.append_episode(episode(i), terminated=True)
    store.refresh()
    proxy.forget()
    store.refresh()
    assert proxy.count() == {"LIST": 1}


# ---- zombies, forks, credentials -----------------------------------------------------------------------


def test_two_writers_of_one_name_at_once_keep_both_streams_whole(behind: Place) -> None:
    trajstore.create(behind.url, SCHEMA, **behind.kwargs)

    def write(seeds: range) -> str:
        with trajstore.open(behind.url, **behind.kwargs).writer("actor", commit_seconds=None) as writer:
            for seed in seeds:
                writer.append_episode(episode(seed), terminated=True)
                writer.commit()
            return writer.stream

    with ThreadPoolExecutor(2) as threads:
        old, new = threads.map(write, [range(5), range(5, 10)])
    store = trajstore.open(behind.url, **behind.kwargs)
    for seed in range(10):
        assert_equal(store.read_episode((old if seed < 5 else new, seed % 5)), episode(seed))
    assert len(store) == 10


def test_a_child_forked_while_a_thread_connects_can_read(
    storage: Storage, behind: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage.put("key", b"data")
    options = {**behind.options, "transport": "fsspec"}  # obstore connects without Python
    fresh, real = open_storage(behind.url, options), fsspec.core.url_to_fs
    is_inside, is_over, main = threading.Event(), threading.Event(), threading.get_ident()

    def wait(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != main and not is_over.is_set():
            is_inside.set()
            is_over.wait(240)
        return real(*args, **kwargs)

    monkeypatch.setattr(fsspec.core, "url_to_fs", wait)
    with ThreadPoolExecutor(1) as threads:
        slow = threads.submit(fresh.get, "key")
        assert is_inside.wait(30)
        try:
            answer = in_child(lambda: fresh.get("key"))
        except EOFError:
            answer = "the child hangs"
        finally:
            is_over.set()
        assert slow.result() == b"data"
    assert answer == b"data"


def test_a_child_leaves_the_connections_of_its_parent_alone(behind: Place) -> None:
    storage = open_storage(behind.url, {**behind.options, "retry_s": 0.3, "request_s": 5})
    storage.put("key", b"data")
    assert in_child(lambda: storage.get("key")) == b"data"
    assert storage.get("key") == b"data"


def shown(error: BaseException | None) -> str:
    """Everything that printing or logging an error and what it came from could show."""
    texts = []
    seen: set[int] = set()
    pending = [error]
    while pending:
        one = pending.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            texts += [str(one), repr(one), repr(one.args), *getattr(one, "__notes__", [])]
            pending += [one.__cause__, one.__context__]
    return "\n".join(texts)


def assert_secret(text: str) -> None:
    assert KEY not in text
    assert SECRET not in text
    assert TOKEN not in text


def test_no_repr_shows_credentials(behind: Place, storage: Storage) -> None:
    store = trajstore.create(behind.url, SCHEMA, **behind.kwargs)
    with store.writer() as writer:
        assert_secret(f"{store!r} {store} {store.url} {store.snapshot!r} {storage!r} {storage} {writer!r}")
        assert_secret(f"{storage.display} {store.streams!r}")


@pytest.mark.parametrize("status", [403, 400, 503])
def test_no_error_shows_credentials_even_if_the_server_quotes_them(
    proxy: Proxy, impatient: Place, caplog: pytest.LogCaptureFixture, status: int
) -> None:
    quoting = Answer(status, "SignatureDoesNotMatch", f"{KEY} with {SECRET} and {TOKEN} is not known here")
    actions: list[Callable[[Storage], object]] = [
        lambda storage: storage.put("key", b"data"),
        lambda storage: storage.get("key"),
        lambda storage: storage.list_names("p"),
        lambda storage: storage.delete(["key"]),
        lambda storage: trajstore.open(impatient.url, **impatient.kwargs),
    ]
    proxy.plan = first(10_000, quoting)
    storage = open_storage(impatient.url, impatient.options)
    with caplog.at_level(logging.DEBUG, "trajstore"):
        for action in actions:
            with pytest.raises(StorageError) as caught:
                action(storage)
            assert_secret(shown(caught.value))
    assert_secret("\n".join(r.getMessage() for r in caplog.records if r.name.startswith("trajstore")))


def test_no_log_and_no_object_holds_credentials(
    proxy: Proxy, behind: Place, caplog: pytest.LogCaptureFixture
) -> None:
    proxy.plan = every(9, UNAVAILABLE)
    with caplog.at_level(logging.DEBUG, "trajstore"):
        store = trajstore.create(behind.url, SCHEMA, **behind.kwargs)
        with store.writer(commit_seconds=None) as writer:
            writer.append_episode(episode(0), terminated=True, metadata={"note": "x"})
    logged = [r.getMessage() for r in caplog.records if r.name.startswith("trajstore")]
    assert logged
    assert_secret("\n".join(logged))
    proxy.plan = none
    objects = list(stored(behind))
    assert len(objects) > 10
    for data in objects:
        assert_secret(data.decode("latin-1"))


def stored(place: Place) -> Iterator[bytes]:
    fs = s3fs.S3FileSystem(**client_options(place.options))
    for path in fs.find(place.url):
        yield fs.cat_file(path)


def test_the_user_and_password_of_a_url_are_not_shown() -> None:
    storage = open_storage("s3://user:password@bucket/store")
    assert storage.display == "s3://bucket/store"
    assert "password" not in f"{storage!r} {storage.display}"


@pytest.mark.parametrize("enter", [trajstore.create, trajstore.open])
def test_an_error_at_a_url_with_a_password_does_not_show_it(enter: Callable[[str], object]) -> None:
    with pytest.raises(ValueError, match=r"ftp://: .* puts are not known to be atomic") as caught:
        enter("ftp://user:pa55word@127.0.0.1:1/store")
    assert "pa55word" not in shown(caught.value)
