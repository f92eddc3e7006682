"""A limit in bytes counts what the storage really holds, and never evicts more than it has to."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.replay.test_buffer import crash
from trajstore import Field, ReplayBuffer, Retention, Schema

OPTIONS: dict[str, Any] = {
    "buffer_bytes": "16MB",
    "cache_bytes": "64MB",
    "commit_seconds": None,
    "fsync": False,
    "grace_s": 3600.0,  # nothing is deleted, so that the test can weigh evicted rows as well
}


def rows(n: int) -> dict[str, Any]:
    return {"obs": np.zeros((n, 4), np.float32), "action": np.zeros(n, np.int64), "reward": np.ones(n, np.float32)}


def object_sizes(url: str, stream: str, path: str) -> dict[int, int]:
    folder = Path(url, "streams", stream, path)
    return {int(file.name.split(".")[1]): file.stat().st_size for file in folder.glob("c.*")}


def weighed(url: str, buffer: ReplayBuffer) -> tuple[float, float]:
    """Bytes of the committed rows that are shown, from the files alone, and of the largest file of each field."""
    buffer.flush()
    with buffer.session.up_to_date(waits=True) as assembler:
        _, counts, starts, sources = assembler.index.shown_spans()
        names = list(assembler.index.numbers)
        records = {record.id: record for record in assembler.snapshot.streams}
    total = slack = 0.0
    for number in set(sources.tolist()) - {0}:
        record = records[names[number - 1]]
        mine = sources == number
        shown = np.concatenate([np.arange(s, s + n) for s, n in zip(starts[mine], counts[mine], strict=True)])
        for path, layout in record.layouts.items():
            if path.startswith("steps/"):
                sizes = object_sizes(url, record.id, path)
                n_rows = {i: min(record.rows, (i + 1) * layout.object_rows) - i * layout.object_rows for i in sizes}
                chunks, n_shown = np.unique(shown // layout.object_rows, return_counts=True)
                total += sum(
                    sizes[i] * n / n_rows[i] for i, n in zip(chunks.tolist(), n_shown.tolist(), strict=True)
                )
                slack += max(sizes.values())
    return total, slack


def test_a_resumed_session_weighs_old_steps_by_their_own_objects(url: str) -> None:
    with ReplayBuffer(url, capacity=Retention(bytes="20MB"), **OPTIONS) as buffer:
        for _ in range(72):
            buffer.add_episode(rows(1000), terminated=True)
        buffer.save_checkpoint("a", wait=True)
    with ReplayBuffer.resume(url, fsync=False) as buffer:
        buffer.add_episode(rows(8), terminated=True)
        buffer.flush()
        assert buffer.n_steps == 72_008
    with ReplayBuffer(url, capacity=Retention(bytes="20MB"), **OPTIONS) as buffer:
        buffer.add_episode(rows(8), terminated=True)
        buffer.flush()
        assert buffer.n_steps == 72_016


def test_a_first_commit_of_one_step_says_nothing_about_later_steps(url: str) -> None:
    with ReplayBuffer(url, capacity=Retention(bytes="1MB"), **OPTIONS) as buffer:
        buffer.append({name: values[0] for name, values in rows(1).items()})
        buffer.flush()
        for _ in range(4):
            buffer.extend({name: values[:, None] for name, values in rows(1000).items()})
        assert buffer.n_steps == 4001
        buffer.flush()
        assert buffer.n_steps == 4001


def test_steps_that_are_not_committed_do_not_count(url: str) -> None:
    schema = Schema({"x": Field("uint8", (1000,), chunk_rows=4)})
    with ReplayBuffer(url, schema=schema, capacity=Retention(bytes=10_000), **OPTIONS) as buffer:
        noise = np.random.default_rng(0).integers(0, 256, (50, 1000), np.uint8)
        buffer.add_episode({"x": noise}, terminated=True)
        assert buffer.n_steps == 50
        buffer.flush()
        assert 7 <= buffer.n_steps <= 9
        assert 9_000 < buffer.stats()["storage"]["step_bytes"] <= 10_000


def test_old_steps_of_another_density_are_weighed_as_they_are(url: str) -> None:
    """First 100 steps of noise, then 900 of nothing: a mean over the stream would evict most of them."""
    schema = Schema({"x": Field("uint8", (1000,), chunk_rows=4)})
    with ReplayBuffer(url, schema=schema, **OPTIONS) as buffer:
        noise = np.random.default_rng(0).integers(0, 256, (100, 1000), np.uint8)
        buffer.add_episode({"x": noise}, terminated=True)
        buffer.add_episode({"x": np.zeros((900, 1000), np.uint8)}, terminated=True)
    with ReplayBuffer(url, capacity=Retention(bytes=50_000), **OPTIONS) as buffer:
        buffer.append({"x": np.zeros(1000, np.uint8)})
        buffer.flush()
        total, slack = weighed(url, buffer)
        assert 50_000 - 50_000 // 256 - slack <= total <= 50_000
        assert 920 < buffer.n_steps < 960


def test_final_values_count_with_the_steps_they_follow(url: str) -> None:
    schema = Schema({"x": Field("uint8", (1000,), chunk_rows=4, final=True)})
    rng = np.random.default_rng(0)
    with ReplayBuffer(url, schema=schema, capacity=Retention(bytes=40_000), **OPTIONS) as buffer:
        for _ in range(60):
            noise = rng.integers(0, 256, (2, 1000), np.uint8)
            buffer.append({"x": noise[0]}, terminated=True, final={"x": noise[1]})
            buffer.flush()
        total, slack = weighed(url, buffer)
        assert 40_000 - 40_000 // 256 - slack <= total <= 40_000
        assert 17 <= buffer.n_steps <= 20


def random_values(rng: np.random.Generator, schema: Schema, lead: tuple[int, ...]) -> dict[str, Any]:
    """Values of a random density, so that they compress more or less well."""
    density = rng.random()
    found = {}
    for name, spec in schema.fields.items():
        shape = (*lead, *spec.shape)
        found[name] = np.where(rng.random(shape) < density, rng.integers(0, 100, shape), 0).astype(spec.dtype)
    return found


def resumed(url: str, buffer: ReplayBuffer, *, crashes: bool) -> ReplayBuffer:
    checkpoint = buffer.save_checkpoint("c", wait=True)
    end = partial(crash, buffer) if crashes else buffer.close
    end()
    return ReplayBuffer.resume(url, checkpoint, fsync=False)


SCHEMAS = st.lists(
    st.tuples(
        st.sampled_from(["uint8", "float32", "int64"]),
        st.sampled_from([1, 3, 40, 400]),
        st.sampled_from([None, 1, 4, 32, 100]),
    ),
    min_size=1,
    max_size=3,
)
ACTIONS = st.lists(
    st.tuples(st.sampled_from(["episode", "block", "flush", "resume", "join", "evict"]), st.integers(1, 60)),
    min_size=5,
    max_size=20,
)


@given(fields=SCHEMAS, actions=ACTIONS, limit=st.sampled_from([3_000, 20_000, 100_000]), seed=st.integers(0, 99))
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
def test_no_more_is_evicted_than_the_limit_demands(
    tmp_path_factory: Any, fields: list[Any], actions: list[Any], limit: int, seed: int
) -> None:
    """Whatever the fields, their compression and the commits: kept bytes stay just below the limit."""
    url = str(tmp_path_factory.mktemp("store"))
    specs = {f"f{i}": Field(dtype, (n,), chunk_rows=rows) for i, (dtype, n, rows) in enumerate(fields)}
    schema, rng = Schema(specs), np.random.default_rng(seed)
    capacity, known = Retention(bytes=limit), 0
    buffer = ReplayBuffer(url, schema=schema, capacity=capacity, **OPTIONS)
    try:
        for action, n in actions:
            if action == "episode":
                buffer.add_episode(random_values(rng, schema, (n,)), terminated=True)
            elif action == "block":
                buffer.extend(
                    random_values(rng, schema, (n, 3)), truncated=np.repeat(np.arange(n)[:, None] == n - 1, 3, 1)
                )
            elif action == "flush":
                buffer.flush()
            elif action == "evict":
                buffer.evict(n_episodes=1)
                known = n_evicted(buffer)
            elif action == "resume":
                buffer = resumed(url, buffer, crashes=n % 2 == 0)
            else:
                buffer.close()
                buffer, known = ReplayBuffer(url, capacity=capacity, **OPTIONS), 0
            if action != "episode":
                check(url, buffer, limit, known)
        check(url, buffer, limit, known)
    finally:
        crash(buffer)


def n_evicted(buffer: ReplayBuffer) -> int:
    """Steps that the limit has evicted."""
    return int(buffer.stats()["evicted"]["bytes"]["steps"])


def check(url: str, buffer: ReplayBuffer, limit: int, known: int) -> None:
    total, slack = weighed(url, buffer)
    assert total <= limit + slack
    if n_evicted(buffer) > known:  # since then, only the limit has evicted: it left what it may
        assert total >= limit - limit / 256 - slack
    assert buffer.stats()["storage"]["step_bytes"] <= limit


def test_streams_of_other_sessions_are_weighed_as_they_grow(url: str) -> None:
    schema = Schema({"x": Field("uint8", (1000,), chunk_rows=4)})
    rng = np.random.default_rng(0)
    with ReplayBuffer(url, schema=schema, name="other", **OPTIONS) as other:
        other.add_episode({"x": rng.integers(0, 256, (5, 1000), np.uint8)}, terminated=True)
        other.flush()
        with ReplayBuffer(url, capacity=Retention(bytes=30_000), **OPTIONS) as buffer:
            for _ in range(10):
                other.add_episode({"x": rng.integers(0, 256, (5, 1000), np.uint8)}, terminated=True)
                other.flush()
                buffer.refresh()
            assert 26 <= buffer.n_steps <= 29
            total, slack = weighed(url, buffer)
            assert 30_000 - 30_000 // 256 - slack <= total <= 30_000 + slack


def test_a_few_steps_of_many_raw_columns_are_not_evicted_for_the_zeros_behind_them(url: str) -> None:
    """A raw chunk is stored whole: 20 columns take 2.5 MB for the first step, of which its values are 1 KB."""
    fields = {f"field_{i}": Field("float32", (16,)) for i in range(20)}
    step = {path: np.zeros(16, np.float32) for path in fields}
    with ReplayBuffer(url, schema=Schema(fields), capacity=Retention(bytes="1MB"), **OPTIONS) as buffer:
        for t in range(50):
            buffer.append(step, terminated=t % 10 == 9)
            if t % 7 == 0:
                buffer.flush()
        buffer.flush()
        assert buffer.n_steps == 50
        buffer.save_checkpoint("a", wait=True)
    with ReplayBuffer.resume(url, fsync=False) as buffer:
        buffer.append(step, terminated=True)
        buffer.flush()
        assert buffer.n_steps == 51
        for _ in range(400):
            buffer.add_episode({path: np.zeros((10, 16), np.float32) for path in fields}, terminated=True)
        buffer.flush()
        assert 500 < buffer.n_steps < 1000  # 1 MB of 1,280 bytes each, and an object of slack
