"""The doctor: each mistake is found where it was made, and a store without mistakes has no findings."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import trajstore
from trajstore import Field, Schema, Store, Writer
from trajstore.inspection.doctor.examination import Examination, examine
from trajstore.inspection.doctor.finding import Finding, Severity, share
from trajstore.store.snapshot import Snapshot

RNG = np.random.default_rng(0)


def new_store(schema: Schema | None = None) -> Store:
    return trajstore.create(f"memory://doctor-{uuid.uuid4().hex}", schema)


def episode(n: int, **changed: Any) -> dict[str, Any]:
    data = {
        "observation": RNG.normal(size=(n + 1, 3)).astype(np.float32),
        "action": RNG.integers(0, 4, n),
        "reward": RNG.normal(size=n).astype(np.float32),
    }
    return data | changed


def store_of(fill: Callable[[Writer], object], schema: Schema | None = None, **options: Any) -> Store:
    store = new_store(schema)
    with store.writer(commit_seconds=None, **options) as writer:
        fill(writer)
    store.refresh()
    return store


def examined(store: Store, **how: Any) -> dict[str, Finding]:
    found = examine(store.refresh(), **how).findings
    assert len({f.code for f in found}) == len(found), [f.code for f in found]
    return {finding.code: finding for finding in found}


def add(writer: Writer, lengths: Sequence[int], end: str = "terminated", **changed: Any) -> None:
    for n in lengths:
        writer.append_episode(episode(n, **{k: v(n) for k, v in changed.items()}), **{end: True})


LENGTHS = [5 + i % 17 for i in range(40)]


def healthy(writer: Writer) -> None:
    add(writer, LENGTHS)
    add(writer, [30] * 5, "truncated")


def test_a_healthy_store_has_no_findings() -> None:
    store = store_of(healthy)
    found = examine(store.snapshot)
    assert found.findings == ()
    assert (found.n_episodes, found.counts) == (45, {"error": 0, "warning": 0, "note": 0})


def test_stores_without_data_are_said_to_be_empty() -> None:
    assert list(examined(new_store())) == ["no-schema"]
    assert list(examined(new_store(Schema({"reward": Field("float32")})))) == ["no-episodes"]


# ---- episodes ------------------------------------------------------------------------------------------


def test_short_episodes_are_found() -> None:
    found = examined(store_of(lambda w: (add(w, LENGTHS), add(w, [1] * 10))))
    assert found["one-step-episodes"].what == "10 of 50 (20 %) finished episodes have one step"
    assert found["one-step-episodes"].severity == Severity.WARNING
    few = examined(store_of(lambda w: (add(w, LENGTHS), add(w, [1]))))
    assert few["one-step-episodes"].severity == Severity.NOTE


def test_missing_finals_are_found() -> None:
    def fill(writer: Writer) -> None:
        healthy(writer)
        for n in (4, 5):
            data = episode(n)
            writer.append_episode(data | {"observation": data["observation"][:n]}, truncated=True)

    finding = examined(store_of(fill))["missing-finals"]
    assert finding.what == "2 of 47 (4 %) finished episodes have no final observation, 2 of them truncated"


def test_episodes_that_never_terminate_are_found() -> None:
    assert list(examined(store_of(lambda w: add(w, LENGTHS, "truncated")))) == ["never-terminated"]
    assert not examined(store_of(lambda w: add(w, LENGTHS[:10], "truncated")))  # too few to say


def test_time_limits_recorded_as_ends_are_found() -> None:
    found = examined(store_of(lambda w: (add(w, LENGTHS), add(w, [200] * 12))))
    assert "exactly the longest length, 200 steps" in found["time-limit-terminates"].what


def test_cut_episodes_are_found() -> None:
    def fill(writer: Writer) -> None:
        add(writer, LENGTHS[:6])
        for env in range(4):
            writer.append({"observation": np.zeros(3, np.float32), "action": 1, "reward": np.float32(1)}, env=env)

    schema = Schema(
        {"observation": Field("float32", (3,), final=True), "action": Field("int64"), "reward": Field("float32")}
    )
    assert "4 of 10 (40 %) episodes are cut" in examined(store_of(fill, schema))["cut-episodes"].what


@pytest.mark.parametrize(
    ("value", "code", "severity"),
    [
        (0.0, "zero-rewards", Severity.WARNING),
        (np.nan, "bad-returns", Severity.ERROR),
        (np.inf, "bad-returns", Severity.ERROR),
    ],
)
def test_returns_that_teach_nothing_are_found(value: float, code: str, severity: Severity) -> None:
    store = store_of(lambda w: add(w, LENGTHS, reward=lambda n: np.full(n, value, np.float32)))
    assert examined(store)[code].severity == severity


def test_a_store_without_a_reward_is_noted() -> None:
    store = store_of(lambda w: [w.append_episode({"x": RNG.normal(size=9)}, terminated=True) for _ in range(5)])
    assert "no-reward" in examined(store)


# ---- fields --------------------------------------------------------------------------------------------


def with_one(value: float) -> Callable[[int], Any]:
    def make(n: int) -> Any:
        values = RNG.normal(size=(n + 1, 3)).astype(np.float32)
        values[0, 0] = value
        return values

    return make


@pytest.mark.parametrize(
    ("make", "code", "severity"),
    [
        (with_one(np.nan), "nan", Severity.ERROR),
        (with_one(-np.inf), "infinite", Severity.ERROR),
        (with_one(1e9), "huge-values", Severity.NOTE),
        (lambda n: np.full((n + 1, 3), np.nan, np.float32), "nan", Severity.WARNING),
        (lambda n: np.ones((n + 1, 3), np.float32), "constant-field", Severity.WARNING),
        (lambda n: RNG.normal(size=(n + 1, 3)) * [0, 1, 1], "constant-components", Severity.NOTE),
        (lambda n: RNG.normal(size=(n + 1, 3)).astype(np.float32).astype(np.float64), "float64", Severity.NOTE),
        (lambda n: RNG.random((n + 1, 32, 32), np.float32), "float-pictures", Severity.WARNING),
    ],
)
def test_suspicious_values_are_found(make: Callable[[int], Any], code: str, severity: Severity) -> None:
    found = examined(store_of(lambda w: add(w, LENGTHS, observation=make)))
    assert list(found) == [code]
    assert (found[code].severity, found[code].where) == (severity, "field 'observation'")


def test_a_sample_is_said_to_be_one() -> None:
    found = examined(store_of(lambda w: add(w, LENGTHS, action=lambda n: np.zeros(n, np.int64))), max_bytes=3 * 800)
    assert found["constant-field"].what == "every value is 0, in a sample of 64 of 487 rows"


@pytest.mark.parametrize(
    ("codec", "values", "code"),
    [
        ("none", np.tile(np.arange(100, dtype=np.uint8), (2000, 1)) % 7 + 1, "uncompressed"),
        ("zstd:1", RNG.integers(0, 256, (2000, 100), np.uint8), "incompressible"),
    ],
)
def test_codecs_that_do_not_fit_are_found(codec: str, values: Any, code: str) -> None:
    schema = Schema({"x": Field("uint8", (100,), codec=codec), "reward": Field("float32")})
    values[::2] //= 2
    reward = RNG.random(2000, np.float32)
    store = store_of(lambda w: w.append_episode({"x": values, "reward": reward}, terminated=True), schema)
    assert list(examined(store)) == [code]


def test_damage_is_a_finding() -> None:
    store = store_of(healthy)
    storage, stream = store.snapshot.storage, store.snapshot.names[0]
    for key in storage.tree_sizes(f"streams/{stream}/steps/action"):
        if not key.endswith("zarr.json"):
            storage.put(key, storage.get(key)[:-1])
    found = examined(store)
    assert (found["damaged"].severity, found["damaged"].where) == (Severity.ERROR, "field 'action'")


# ---- storage -------------------------------------------------------------------------------------------


def test_streams_of_dead_writers_are_found() -> None:
    store = new_store()
    writer = store.writer(commit_seconds=None)
    add(writer, LENGTHS)
    writer.commit()
    try:
        assert not examined(store)
        (record,) = store.refresh().streams
        later = examined(store, now=record.committed_at + 5000)
        assert later["open-stream"].what == "is open, but had no commit for 83 minutes"
        with store.writer(dead=[record.id]) as heir:
            add(heir, [5])
        assert "open-stream" not in examined(store, now=record.committed_at + 5000)
    finally:
        writer.close()


def test_ranks_that_wrote_little_are_found() -> None:
    store = new_store()
    for rank, n in ((0, 3000), (1, 100)):
        with store.writer("r", rank=rank, world_size=2, world="w", commit_seconds=None) as writer:
            add(writer, [n // 2, n - n // 2])
    assert examined(store)["unbalanced-ranks"].what == "rank 1 wrote 102 rows, another rank 3,002"


def test_tiny_commits_and_many_spans_are_found() -> None:
    schema = Schema({"observation": Field("float32", (3,)), "action": Field("int64"), "reward": Field("float32")})

    def fill(writer: Writer) -> None:
        for t in range(240):
            data = {
                "observation": RNG.normal(size=3).astype(np.float32),
                "action": t % 4,
                "reward": np.float32(t % 7),
            }
            writer.append(data, terminated=t % 48 == 47)
            if t % 4 == 3:
                writer.commit()

    found = examined(store_of(fill, schema))
    assert found["tiny-commits"].what == "60 commits of 4 rows, 0.1 KiB each"
    assert found["many-spans"].what == "an episode lies in 12.0 spans of 4 rows, on average"


def test_chunks_of_the_wrong_size_are_found() -> None:
    large = Schema({"x": Field("float32", (1024,), chunk_rows=4096), "reward": Field("float32")})

    def add_one(writer: Writer) -> None:
        x = RNG.random((4, 1024), np.float32)
        writer.append_episode({"x": x, "reward": RNG.random(4, np.float32)}, terminated=True)

    assert "4,096 rows, 16 MiB decoded" in examined(store_of(add_one, large))["large-chunks"].what
    small = Schema({"x": Field("int32", chunk_rows=2), "reward": Field("float32")})

    def add_many(writer: Writer) -> None:
        x = np.arange(2100, dtype=np.int32)
        writer.append_episode({"x": x, "reward": RNG.random(2100, np.float32)}, terminated=True)

    assert "1,050 chunks of 2 rows" in examined(store_of(add_many, small))["small-chunks"].what


def test_many_small_streams_and_many_objects_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    store = store_of(healthy)
    (record,) = store.snapshot.streams
    copies = tuple(replace(record, id=f"{record.id}{i}", rows=900) for i in range(300))
    monkeypatch.setattr(Snapshot, "streams", copies)
    assert examined_codes(store) >= {"many-streams"}
    wide = tuple(replace(one, rows=500_000_000) for one in copies)
    monkeypatch.setattr(Snapshot, "streams", wide)
    assert examined_codes(store) >= {"many-objects"}


def examined_codes(store: Store) -> set[str]:
    return {finding.code for finding in examine(store.snapshot).findings}


def test_untouched_and_impossible_priorities_are_found() -> None:
    def priorities(values: Any) -> Store:
        def fill(writer: Writer) -> None:
            add(writer, [600, 599])
            writer.commit()
            writer.put_column("priority", writer.stream, np.asarray(values, np.float32))

        return store_of(fill)

    assert list(examined(priorities(np.ones(1201)))) == ["equal-priorities"]
    assert list(examined(priorities(np.arange(1201)))) == []
    bad = examined(priorities(np.arange(1201) - 1))["bad-priorities"]
    assert (bad.severity, bad.what) == (Severity.ERROR, "1 of 1,201 (0 %) priorities are negative or infinite")


def test_findings_come_worst_first() -> None:
    def fill(writer: Writer) -> None:
        add(
            writer, LENGTHS, "truncated", observation=with_one(1e9), reward=lambda n: np.full(n, np.nan, np.float32)
        )

    found: Examination = examine(store_of(fill).snapshot)
    severities = [finding.severity for finding in found.findings]
    assert severities == sorted(severities, reverse=True)
    assert found.counts["error"] >= 1


def test_shares_are_shown_with_percent() -> None:
    assert share(3, 40) == "3 of 40 (8 %)"
    assert share(0, 0) == "0 of 0 (0 %)"
