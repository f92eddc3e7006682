"""Training through a faulty network, and many processes on one bucket: nothing is lost, doubled or stuck.

Short by default. ``TRAJSTORE_WEATHER_S`` and ``TRAJSTORE_LOAD_S`` in the environment give them more seconds; the
first then runs by each transport, and the second on each kind of server.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator

import pytest

import trajstore
from tests.conftest import Place
from tests.support import numbered
from tests.support.numbered import LENGTH, SCHEMA, Target, assert_episodes, assert_windows, episode
from tests.support.proxy import INTERNAL, LOSE, RESET, TOO_MANY, TRUNCATE, UNAVAILABLE, Proxy, Slow, weather
from tests.support.servers.process import Server
from trajstore import ReplayBuffer, Windows
from trajstore.store.verify import verify

_log = logging.getLogger(__name__)  # the figures; --log-cli-level=INFO shows them

WEATHER_S = float(os.environ.get("TRAJSTORE_WEATHER_S", "0"))
LOAD_S = float(os.environ.get("TRAJSTORE_LOAD_S", "4"))
FAULTS = (UNAVAILABLE, INTERNAL, TOO_MANY, LOSE, RESET, TRUNCATE, Slow(0.3))
N_ROUNDS = 6
TRANSPORTS = ("obstore", "fsspec") if "TRAJSTORE_WEATHER_S" in os.environ else ("auto",)


@pytest.fixture
def proxy(kind: str, server: Callable[[str], Server]) -> Iterator[Proxy]:
    proxy = Proxy(server(kind).endpoint)
    yield proxy
    proxy.close()


@pytest.mark.timeout(600 + WEATHER_S)
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("kind", ["s3", "gcs", "azure"])
def test_a_training_loop_in_bad_weather_loses_and_doubles_nothing(
    kind: str, transport: str, proxy: Proxy, server: Callable[[str], Server]
) -> None:
    url = server(kind).new_url()
    options = {**server(kind).options_at(proxy.endpoint), "transport": transport}
    proxy.latency_s, proxy.bytes_per_s = 0.002, 50e6
    sure, chance = iter(FAULTS), weather(0.05, 5, FAULTS)
    # Every fault at least once, early; more by chance.
    proxy.plan = lambda request: next(sure, None) if len(proxy.requests) % 8 == 7 else chance(request)
    end, number = time.monotonic() + WEATHER_S, 0
    with ReplayBuffer(
        url,
        schema=SCHEMA,
        storage_options=options,
        sample=Windows(length=LENGTH),
        cache_bytes="1MiB",
        commit_seconds=None,
    ) as buffer:
        while number < 4 * N_ROUNDS or time.monotonic() < end:
            for number in range(number, number + 4):  # noqa: B020
                buffer.add_episode(episode(0, number), terminated=True)
            number += 1
            buffer.flush()
            for _ in range(4):
                assert_windows(buffer.sample(32))
        buffer.save_checkpoint("end", wait=True)
        expected = buffer.sample(32)
    with ReplayBuffer.resume(url, storage_options=options) as again:
        assert (again.sample(32)["index"] == expected["index"]).all()
    _log.info(
        f"{kind} by {transport}: {number} episodes, {len(proxy.requests)} requests, {sum(proxy.faults.values())} of"
        " them failed"
    )
    assert proxy.faults.keys() >= set(FAULTS)
    clear = server(kind).options
    assert assert_episodes(trajstore.open(url, storage_options=clear)) == {0: number}
    assert verify(url, storage_options=clear).problems == []


@pytest.mark.timeout(600 + LOAD_S)
@pytest.mark.parametrize(
    "kind", ["seaweedfs", *(["s3", "gcs", "azure"] if "TRAJSTORE_LOAD_S" in os.environ else [])]
)
def test_many_readers_and_writers_on_one_bucket_see_only_what_was_written(
    kind: str, new_place: Callable[[str], Place]
) -> None:
    place = new_place(kind)
    trajstore.create(place.url, SCHEMA, **place.kwargs)
    target = Target(place.url, place.options)
    writers = [(numbered.write_for, target, name, LOAD_S) for name in range(4)]
    readers = [(numbered.read_for, target, seed, LOAD_S) for seed in range(8)]
    counts = numbered.call_all(*writers, *readers)
    n_episodes, n_windows = sum(counts[:4]), sum(counts[4:])
    _log.info("%s: %s episodes written, %s windows read in %s s", kind, n_episodes, n_windows, LOAD_S)
    assert assert_episodes(target.open()) == dict(enumerate(counts[:4]))
    assert min(counts) > 0
    assert verify(place.url, **place.kwargs).problems == []
