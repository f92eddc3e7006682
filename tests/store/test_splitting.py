"""Splitting: whole episodes under their handles, all that belongs to them, and the same parts for the same seed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trajstore
from tests.conftest import Place
from tests.store.test_checkpoints import SCHEMA, shown, steps
from tests.store.test_merging import build, closed
from tests.support.faulty import DieAt, Died, FaultyStorage
from tests.support.sharding import mark, read_record
from trajstore.errors import CorruptionError, DataError, EpisodeNotFoundError, StoreExistsError, StoreNotFoundError
from trajstore.store import splitting
from trajstore.store.merging import merge
from trajstore.store.packing import pack
from trajstore.store.splitting import share_counts, split
from trajstore.store.verify import verify

MakePlace = Callable[[str], Place]


def many(url: str, n: int = 40) -> trajstore.Store:
    """Episodes of two interleaved environments in two streams, with metadata and columns."""
    store = trajstore.create(url, SCHEMA, fsync=False)
    for name in ("a", "b"):
        with store.writer(name, commit_seconds=None) as writer:
            for i in range(n // 2):
                n_final = i % 2
                writer.append_episode(
                    steps(3 + i % 7, i, n_final=n_final), terminated=True, metadata={"task": f"{name}{i}", "i": i}
                )
                if i % 5 == 4:
                    writer.commit()
            writer.commit()
            rows = read_rows(store, writer.stream)
            writer.put_column("priority", writer.stream, np.arange(2, rows, dtype=np.float32), first=2)
    store.refresh()
    return store


def read_rows(store: trajstore.Store, stream: str) -> int:
    return next(record.rows for record in store.refresh().streams if record.id == stream)


def columns(store: trajstore.Store) -> dict[Any, bytes]:
    table = store.episodes
    read = [store.read_episode(i, columns=True) for i in range(len(table))]
    return {table.key(i): values["priority"].tobytes() for i, values in enumerate(read)}


@pytest.mark.parametrize(("from_", "to"), [("local", "local"), ("memory", "memory")])
def test_parts_hold_each_episode_once_with_all_that_belongs_to_it(
    new_place: MakePlace, from_: str, to: str
) -> None:
    source = many(new_place(from_).url)
    urls = [new_place(to).url for _ in range(3)]
    report = split(source, dict(zip(urls, (0.7, 0.2, 0.1), strict=True)), fsync=False)
    assert [part.n_episodes for part in report.parts] == [28, 8, 4]
    assert report.n_left == 0
    found: dict[Any, Any] = {}
    found_columns: dict[Any, bytes] = {}
    for url, part in zip(urls, report.parts, strict=True):
        assert verify(url).problems == []
        store = trajstore.open(url)
        view = shown(store)
        assert len(view) == part.n_episodes == len(store)
        assert not found.keys() & view.keys()
        found |= view
        found_columns |= columns(store)
        rows = {row["stream"]: row["metadata"] for row in store.episodes}
        assert all("i" in metadata for metadata in rows.values())
    assert found == shown(source)
    assert found_columns == columns(source)
    returns = {source.episodes.key(i): row["return"] for i, row in enumerate(source.episodes)}
    for row in trajstore.open(urls[0]).episodes:
        assert row["return"] == returns[row["stream"], row["episode"]]
    whole = new_place(to).url
    assert sum(len(one.renamed) for one in merge(whole, urls, fsync=False).sources) == 4
    assert len(trajstore.open(whole)) == 40
    assert verify(whole).problems == []


def test_the_seed_decides_and_nothing_else(new_place: MakePlace) -> None:
    source = many(new_place("memory").url, 20)
    keys = []
    for seed in (0, 0, 1):
        url = new_place("memory").url
        split(source, {url: 0.5}, seed=seed)
        keys.append(set(shown(trajstore.open(url))))
    assert keys[0] == keys[1] != keys[2]


def test_headless_and_open_episodes_keep_their_handles(new_place: MakePlace) -> None:
    a, b, c = (new_place("local").url for _ in range(3))
    store = build(a, 1)
    old = store.streams[0].id
    mark(Path(a), read_record(Path(a), old), first_row=4)
    store = trajstore.open(a)
    split(store, {b: 2, c: None}, fsync=False)
    assert verify(b).problems == []
    assert verify(c).problems == []
    parts = shown(trajstore.open(b)) | shown(trajstore.open(c))
    assert parts == closed(shown(store))
    (headless,) = (row for url in (b, c) for row in trajstore.open(url).episodes if row["is_headless"])
    assert (headless["stream"], headless["episode"], headless["length"]) == (old, 0, 5)
    one = trajstore.open(b if any(r["is_headless"] for r in trajstore.open(b).episodes) else c)
    extent = one.episodes.spans(one.episodes.find(trajstore.EpisodeKey(old, 0)))
    assert extent[0].t_start == 4


def test_packed_streams_and_missing_fields_are_split(new_place: MakePlace) -> None:
    a, b, c = (new_place("local").url for _ in range(3))
    with trajstore.create(a, {"x": trajstore.Field("int64")}, fsync=False).writer(commit_seconds=None) as writer:
        for i in range(10):
            writer.append_episode({"x": np.arange(16) + i}, terminated=True)
            writer.commit()
    assert pack(a, wait=True, grace_s=0, codecs={"x": "zstd:1"}).packed
    more = {"x": trajstore.Field("int64"), "speed": trajstore.Field("float32", fill=2.0)}
    with trajstore.create(a, more, exist_ok=True).writer() as writer:
        writer.append_episode({"x": np.arange(4), "speed": np.ones(4, np.float32)}, terminated=True)
    store = trajstore.open(a)
    split(store, {b: 5, c: None}, fsync=False)
    found = {}
    for url in (b, c):
        assert verify(url).problems == []
        found |= shown_arrays(trajstore.open(url))
    assert found == shown_arrays(store)


def shown_arrays(store: trajstore.Store) -> dict[Any, Any]:
    return {
        store.episodes.key(i): {name: values.tolist() for name, values in store.read_episode(i).items()}
        for i in range(len(store))
    }


def test_episodes_can_be_listed_by_row_and_key(new_place: MakePlace) -> None:
    source = many(new_place("memory").url, 10)
    a, b = new_place("memory").url, new_place("memory").url
    keys = [source.episodes.key(i) for i in range(10)]
    report = split(source.url, {a: [0, 3], b: [keys[5], -1]})
    assert report.n_left == 6
    assert list(shown(trajstore.open(a))) == [keys[0], keys[3]]
    assert list(shown(trajstore.open(b))) == [keys[5], keys[9]]
    c = new_place("memory").url
    split(source, {c: 1.0}, episodes=keys[:3])
    assert list(shown(trajstore.open(c))) == keys[:3]
    d = new_place("memory").url
    with pytest.raises(DataError, match="is in two of them"):
        split(source, {d: [0, 1], d + "x": [1]})
    with pytest.raises(EpisodeNotFoundError):
        split(source, {d: [10]})
    with pytest.raises(StoreNotFoundError):
        trajstore.open(d)


@pytest.mark.parametrize(
    ("shares", "n", "counts"),
    [
        ([0.9, 0.1], 10, [9, 1]),
        ([1 / 3, 1 / 3, 1 / 3], 10, [3, 4, 3]),
        ([0.5], 3, [2]),
        ([2, None], 7, [2, 5]),
        ([0.5, 3], 10, [5, 3]),
        ([0.0, 1.0], 4, [0, 4]),
    ],
)
def test_shares_become_numbers_of_episodes(shares: list[Any], n: int, counts: list[int]) -> None:
    assert share_counts(shares, n) == counts


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        ([0.9, 0.2], "add up to 1.1"),
        ([None, None], "only one"),
        ([8, 3], "at most 10 episodes"),
        ([-1], "expected fractions"),
        ([True], "expected fractions"),
        ([1.5], "expected fractions"),
    ],
)
def test_shares_that_can_not_be_are_refused(shares: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        share_counts(shares, 10)


def test_a_part_may_be_empty_and_an_existing_store_is_refused(new_place: MakePlace) -> None:
    source = many(new_place("memory").url, 10)
    a, b = new_place("memory").url, new_place("memory").url
    split(source, {a: 0, b: None})
    assert len(trajstore.open(a)) == 0
    assert trajstore.open(a).schema == SCHEMA
    with pytest.raises(StoreExistsError):
        split(source, {new_place("memory").url: 1, a: 1})


def test_damage_is_found_and_no_store_appears(new_place: MakePlace) -> None:
    a, b = new_place("local").url, new_place("local").url
    build(a, 1)
    next(Path(a).glob("streams/mid-*/steps/reward/c.0")).unlink()
    with pytest.raises(CorruptionError):
        split(a, {b: 1.0})
    with pytest.raises(StoreNotFoundError):
        trajstore.open(b)


def test_a_split_that_dies_anywhere_leaves_no_store_and_can_be_given_again(
    new_place: MakePlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = many(new_place("memory").url, 10)
    real = splitting.open_storage
    urls = [new_place("memory").url, new_place("memory").url]

    def through(at: int) -> list[FaultyStorage]:
        made = [FaultyStorage(real(url), DieAt(at, is_after=False)) for url in urls]
        by_url = dict(zip(urls, made, strict=True))
        monkeypatch.setattr(splitting, "open_storage", lambda url, *_, **__: by_url[url])
        return made

    counting = through(10_000)
    split(source, {urls[0]: 0.5, urls[1]: None})
    n_calls = min(len(storage.calls) for storage in counting)
    urls = [new_place("memory").url, new_place("memory").url]
    for at in range(2, n_calls - 6, 11):
        through(at)
        with pytest.raises(Died):
            split(source, {urls[0]: 0.5, urls[1]: None})
        for url in urls:
            with pytest.raises(StoreNotFoundError):
                trajstore.open(url)
    monkeypatch.setattr(splitting, "open_storage", real)
    split(source, {urls[0]: 0.5, urls[1]: None})
    assert shown(trajstore.open(urls[0])) | shown(trajstore.open(urls[1])) == shown(source)
