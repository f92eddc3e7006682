"""What a store shows by default: what the newest session and its ancestors hold, and the rest on request."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import trajstore
from trajstore import EpisodeNotFoundError, ReplayBuffer, Retention, Windows
from trajstore.cli.app import app
from trajstore.store.verify import verify

WINDOWS = Windows(1)


def episode(i: int, n: int = 4) -> dict[str, Any]:
    return {"action": np.arange(n) + 100 * i, "reward": np.full(n, float(i))}


def add(buffer: ReplayBuffer, *numbers: int) -> None:
    for i in numbers:
        buffer.add_episode(episode(i), terminated=True, metadata={"number": i})
    buffer.flush()


def numbers(table: Any) -> list[int]:
    return [row["metadata"]["number"] for row in table]


def run_that_was_killed(url: str, **options: Any) -> ReplayBuffer:
    """Episodes 0 and 1, a checkpoint, episodes 2 and 3, a crash; then the checkpoint is resumed."""
    buffer = ReplayBuffer(url, **options)
    add(buffer, 0, 1)
    buffer.save_checkpoint("one", wait=True)
    add(buffer, 2, 3)
    buffer._release()
    again = ReplayBuffer.resume(url, "one")
    add(again, 4)
    return again


@pytest.fixture
def url(tmp_path: Path) -> str:
    return str(tmp_path / "store")


def test_a_store_shows_what_the_run_holds(url: str) -> None:
    again = run_that_was_killed(url)
    n_steps = again.stats()["n_steps"]
    for store in (trajstore.open(url), again.store):
        store.refresh()
        assert numbers(store.episodes) == [0, 1, 4]
        assert int(store.episodes["length"].sum()) == n_steps
    again.close()
    assert numbers(trajstore.open(url).episodes) == [0, 1, 4]


def test_readers_copies_and_sampled_batches_agree(url: str, tmp_path: Path) -> None:
    again = run_that_was_killed(url)
    again.close()
    for store in (trajstore.open(url), trajstore.copy(url, str(tmp_path / "copy"))):
        reader = trajstore.Reader(store)
        batch = reader.sample(256, WINDOWS)
        assert set((batch["action"] // 100).flatten().tolist()) == {0, 1, 4}
        assert reader.n_windows(WINDOWS) == 12
        assert verify(store).is_clean


def test_abandoned_episodes_come_on_request_and_say_so(url: str) -> None:
    run_that_was_killed(url).close()
    store = trajstore.open(url)
    table = store.history(abandoned=True)
    assert dict(zip(numbers(table), table["is_abandoned"].tolist(), strict=True)) == {
        0: False, 1: False, 2: True, 3: True, 4: False,
    }  # fmt: skip
    assert numbers(store.history()) == [0, 1, 4]
    frame = table.to_pandas()
    assert frame[frame.is_abandoned]["return"].tolist() == [8.0, 12.0]
    lost = table.key(numbers(table).index(3))
    with pytest.raises(EpisodeNotFoundError):
        store.read_episode(lost)
    assert store.snapshot.with_abandoned().read_episode(lost)["action"].tolist() == [300, 301, 302, 303]


def test_a_checkpoint_may_be_pruned_and_its_lineage_stays(url: str) -> None:
    again = run_that_was_killed(url)
    again.save_checkpoint("two", keep_last=1, wait=True)
    assert [c.name for c in trajstore.open(url).checkpoints] == ["two"]
    again.close()
    assert numbers(trajstore.open(url).episodes) == [0, 1, 4]


def test_a_session_that_joins_continues_the_newest_lineage(url: str) -> None:
    run_that_was_killed(url).close()
    with ReplayBuffer(url) as joined:
        assert joined.stats()["n_steps"] == 12
        add(joined, 5)
        joined.save_checkpoint("joined", wait=True)
        assert joined.stats()["n_steps"] == 16
    assert numbers(trajstore.open(url).episodes) == [0, 1, 4, 5]
    assert numbers(trajstore.open(url, at="joined").episodes) == [0, 1, 4, 5]
    with ReplayBuffer.resume(url, "joined") as resumed:
        assert resumed.stats()["n_steps"] == 16
    assert numbers(trajstore.open(url).episodes) == [0, 1, 4, 5]


def test_an_older_checkpoint_begins_another_lineage_and_brings_its_rows_back(url: str) -> None:
    buffer = ReplayBuffer(url)
    for i in range(3):
        add(buffer, i)
        buffer.save_checkpoint(f"at-{i}", wait=True)
    buffer.close()
    with ReplayBuffer.resume(url, "at-0") as second:
        add(second, 10)
    assert numbers(trajstore.open(url).episodes) == [0, 10]
    with ReplayBuffer.resume(url, "at-1") as third:
        add(third, 20)
    assert numbers(trajstore.open(url).episodes) == [0, 1, 20]
    everything = trajstore.open(url).history(abandoned=True)
    assert sorted(numbers(everything)) == [0, 1, 2, 10, 20]


def test_writers_that_never_resumed_anything_are_all_shown(url: str) -> None:
    run_that_was_killed(url).close()
    store = trajstore.open(url)
    with store.writer("import") as writer:
        writer.append_episode(episode(7), terminated=True, metadata={"number": 7})
    assert numbers(trajstore.open(url).episodes) == [0, 1, 4, 7]


def test_a_reader_follows_when_a_session_resumes(url: str) -> None:
    buffer = ReplayBuffer(url)
    add(buffer, 0, 1)
    buffer.save_checkpoint("one", wait=True)
    add(buffer, 2)
    buffer._release()
    reader = trajstore.Reader(trajstore.open(url))
    assert reader.n_windows(WINDOWS) == 12
    with ReplayBuffer.resume(url, "one") as again:
        add(again, 4, 5)
        reader.refresh()
        assert reader.n_windows(WINDOWS) == 16
        batch = reader.sample(256, WINDOWS)
        assert set((batch["action"] // 100).flatten().tolist()) == {0, 1, 4, 5}


def test_a_session_keeps_its_own_view_when_another_resumes_beside_it(url: str) -> None:
    first = ReplayBuffer(url)
    add(first, 0)
    first.save_checkpoint("one", wait=True)
    add(first, 1)
    with ReplayBuffer.resume(url, "one") as other:
        add(other, 2)
        first.refresh()
        assert set((first.sample(64, WINDOWS)["action"] // 100).flatten().tolist()) >= {0, 1}
        first.save_checkpoint("own", wait=True)
    first.close()
    assert {0, 1} <= set(numbers(trajstore.open(url, at="own").episodes))


def test_an_episode_open_at_the_checkpoint_is_shown_as_cut_there(url: str) -> None:
    buffer = ReplayBuffer(url)
    for t in range(3):
        buffer.append({"action": t, "reward": 1.0})
    buffer.save_checkpoint("one", wait=True)
    for t in range(3, 9):
        buffer.append({"action": t, "reward": 1.0})
    buffer.flush()
    buffer._release()
    ReplayBuffer.resume(url, "one").close()
    store = trajstore.open(url)
    (row,) = store.episodes
    assert (row["length"], row["end"], row["return"]) == (3, "cut", 3.0)
    table = store.history(abandoned=True)
    assert table["length"].tolist() == [3, 6]
    assert table["is_abandoned"].tolist() == [False, True]


def test_a_learning_curve_of_the_whole_run_is_one_line(url: str) -> None:
    buffer = ReplayBuffer(url, capacity=Retention(episodes=3), grace_s=0.0)
    for i in range(40):
        add(buffer, i)
    buffer.save_checkpoint("one", wait=True)
    add(buffer, 40)
    buffer._release()
    with ReplayBuffer.resume(url, "one") as again:
        for i in range(50, 60):
            add(again, i)
    store = trajstore.open(url)
    assert len(store) == 3
    curve = store.history().to_pandas().plot  # noqa: F841 - pandas draws it
    table = store.history()
    assert numbers(table) == [*range(40), *range(50, 60)]
    assert table["return"].tolist() == [4.0 * i for i in numbers(table)]
    assert table["length"].tolist() == [4] * 50
    assert table["is_evicted"].sum() == 47
    assert not table["is_abandoned"].any()
    assert table.row(0)["is_evicted"] is True


def test_streams_evicted_before_the_checkpoint_count_as_evicted(url: str) -> None:
    with ReplayBuffer(url, capacity=Retention(episodes=2)) as first:
        add(first, 0, 1)
    with ReplayBuffer(url, capacity=Retention(episodes=2), grace_s=1e6) as second:
        add(second, 2, 3, 4)
        second.save_checkpoint("one", wait=True)
    with ReplayBuffer.resume(url, "one") as third:
        add(third, 5)
    table = trajstore.open(url).history(abandoned=True)
    assert numbers(table) == [0, 1, 2, 3, 4, 5]
    assert not table["is_abandoned"].any()


def test_info_counts_what_the_run_holds(url: str) -> None:
    run_that_was_killed(url).close()
    shown = CliRunner().invoke(app(), ["info", url, "--json"])
    assert shown.exit_code == 0
    facts = json.loads(shown.stdout)
    assert (facts["episodes"]["n_episodes"], facts["episodes"]["n_steps"]) == (3, 12)
    assert (facts["episodes"]["n_abandoned"], facts["episodes"]["n_evicted"]) == (2, 0)
    assert [s["abandoned_rows"] for s in facts["streams"]] == [8, 0]


def test_a_record_without_the_new_attribute_leaves_nothing_out(url: str) -> None:
    store = trajstore.create(url)
    with store.writer("a", world="w1") as writer:
        writer.append_episode(episode(0), terminated=True, metadata={"number": 0})
    with store.writer("b", world="w2", checkpoint="one-00000000000000000000000000") as writer:
        writer.append_episode(episode(1), terminated=True, metadata={"number": 1})
    assert numbers(store.refresh().episodes) == [0, 1]
