"""What the viewer says about a store: whole, growing, evicted and damaged."""

from __future__ import annotations

import io
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import trajstore
from tests.support.viewed import SCHEMA, Client, episode, fill, metadata
from trajstore import Field, ReplayBuffer, Schema
from trajstore.storage import Storage
from trajstore.store.checkpoints import list_checkpoints
from trajstore.viewer import Viewer, live_view

N = 60


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    with Viewer(fill(str(tmp_path_factory.mktemp("viewed") / "store"), N)) as viewer:
        yield Client(viewer.url)


def key(client: Client, row: int = 0, **asked: Any) -> dict[str, Any]:
    found = client.json("episodes", start=row, n=1, **asked)["rows"][0]
    return {"stream": found["stream"], "episode": found["episode"]}


def test_facts_say_what_the_store_holds(client: Client) -> None:
    facts = client.json("facts")
    assert (facts["n_episodes"], facts["n_streams"], facts["n_open_streams"]) == (N, 2, 0)
    assert facts["n_steps"] == sum(20 + i % 10 for i in range(N))
    assert {f["field"]: f["is_frames"] for f in facts["fields"]} == {
        "observation/pixels": True, "observation/state": False, "observation/wide": False,
        "action": False, "reward": False,
    }  # fmt: skip
    assert [c["name"] for c in facts["columns"]] == ["priority"]


def test_plots_have_every_episode_in_some_bucket(client: Client) -> None:
    plots = client.json("plots")
    assert plots["episodes"][-1] == N
    assert plots["steps"][-1] == client.json("facts")["n_steps"]
    assert sum(map(sum, plots["ends"].values())) == N
    for histogram in plots["histograms"].values():
        assert sum(histogram["counts"]) == N


def test_storage_names_every_field(client: Client) -> None:
    storage = client.json("storage")
    assert {f["field"] for f in storage["fields"]} == set(SCHEMA)
    assert all(f["stored_bytes"] > 0 for f in storage["fields"])


def test_the_history_shows_where_a_session_left_another(client: Client) -> None:
    nodes = client.json("history")["nodes"]
    names = [node.get("name", node["kind"]) for node in nodes]
    assert names == ["session", "first", "second", "session"]
    assert [node["parent"] for node in nodes] == [None, 0, 1, 1]
    assert len({node["lane"] for node in nodes}) == 2
    assert [node.get("abandoned_rows", 0) > 0 for node in nodes] == [True, False, False, False]


def test_sessions_after_each_other_share_lanes(tmp_path: Path) -> None:
    url = str(tmp_path / "store")
    buffer = ReplayBuffer(url, schema={"x": Field("float32")}, fsync=False)
    for i in range(4):
        buffer.add_episode({"x": np.zeros(3, np.float32)}, terminated=True)
        name = buffer.save_checkpoint(f"c{i}", wait=True)
        buffer.close()
        buffer = ReplayBuffer.resume(url, name, fsync=False)
    buffer.close()
    with Viewer(trajstore.open(url)) as viewer:
        history = Client(viewer.url).json("history")
    assert [node["world"] for node in history["nodes"]] == [0, 0, 1, 1, 2, 2, 3, 3, 4]
    assert [node["lane"] for node in history["nodes"]] == [0, 0, 1, 1, 0, 0, 1, 1, 0]
    assert history["n_lanes"] == 2


def test_times_and_whole_numbers_are_exact(client: Client) -> None:
    plots = client.json("plots")
    rows = client.json("episodes", n=200)["rows"]
    assert plots["times"] == pytest.approx(sorted(row["time"] for row in rows), rel=0, abs=0.01)
    lengths = plots["histograms"]["length"]
    assert (lengths["is_whole"], lengths["low"], lengths["high"], len(lengths["counts"])) == (True, 20, 30, 10)
    assert lengths["counts"] == [N // 10] * 10


def test_the_table_is_filtered_sorted_and_paged(client: Client) -> None:
    answer = client.json("episodes", filter="return >= 1000 and end == terminated", sort="-return", start=2, n=3)
    returns = [i * (20 + i % 10) for i in range(N) if i % 3]
    wanted = sorted((r for r in returns if r >= 1000), reverse=True)
    assert [row["return"] for row in answer["rows"]] == wanted[2:5]
    assert (answer["n_found"], answer["n_episodes"]) == (len(wanted), N)


def test_a_filter_that_cannot_be_read_is_explained(client: Client) -> None:
    answer = client.ask("episodes", filter="retrun > 3")
    assert answer.status == 400
    assert answer.json["kind"] == "question"
    assert "did you mean 'return'" in answer.json["error"]


def test_an_episode_says_what_it_has(client: Client) -> None:
    facts = client.json("episode", **key(client, 7))
    assert facts["row"]["metadata"] == {"notes": metadata(7)["notes"]}
    assert (facts["n_steps"], facts["first_step"], facts["position"]) == (27, 0, 7)
    assert {f["path"]: f["n"] for f in facts["fields"]}["observation/state"] == 28
    assert facts["previous"] == list(key(client, 6).values())
    assert client.json("episode", **key(client, 0))["previous"] is None


def test_a_series_has_every_value_if_there_is_room(client: Client) -> None:
    answer = client.json("series", path="observation/state", **key(client, 7))
    assert (answer["kind"], answer["width"]) == ("lines", 1)
    assert [line["low"] for line in answer["lines"]] == [list(range(28)), [7] * 28, [0] * 28]


def test_a_part_of_a_series_can_be_asked_for(client: Client) -> None:
    answer = client.json("series", path="action", start=3, stop=9, points=2, **key(client, 7))
    assert (answer["start"], answer["stop"], answer["width"]) == (3, 9, 3)
    assert answer["lines"][0]["low"] == [0, 0]
    assert answer["lines"][0]["high"] == [3, 3]


def test_many_components_are_a_map(client: Client) -> None:
    answer = client.json("series", path="observation/wide", **key(client))
    assert (answer["kind"], answer["rows"], answer["low"], answer["high"]) == ("map", 40, 0, 39)


def test_derived_columns_are_series(client: Client) -> None:
    answer = client.json("column", path="priority", **key(client))
    assert len(answer["lines"][0]["low"]) == 20
    assert all(value > 0 for value in answer["lines"][0]["low"])


def test_frames_are_images_of_their_step(client: Client) -> None:
    for step in (0, 5, 27):  # the last one is the final observation
        answer = client.ask("frame", path="observation/pixels", step=step, **key(client, 7))
        image = np.asarray(Image.open(io.BytesIO(answer.body)))
        assert image.shape == (16, 24, 3)
        assert image[0, 0].tolist() == [step, 0, 0]
    assert client.ask("frame", path="observation/pixels", step=28, **key(client, 7)).status == 404


def test_values_of_a_step_are_exact(client: Client) -> None:
    values = client.json("values", step=4, **key(client, 7))
    assert values["action"] == [0]
    assert values["observation/state"] == [4, 7, 0]
    assert "observation/pixels" not in values


def test_an_unknown_episode_is_missing(client: Client) -> None:
    answer = client.ask("episode", stream="actor-0123", episode=5)
    assert (answer.status, answer.json["kind"]) == (404, "missing")


def test_an_empty_store_is_shown(url: str) -> None:
    with Viewer(trajstore.create(url)) as viewer:
        client = Client(viewer.url)
        assert client.json("facts")["n_episodes"] == 0
        assert client.json("plots")["histograms"] == {"return": None, "length": None}
        assert client.json("episodes")["rows"] == []
        assert client.json("streams") == {"n_streams": 0, "streams": []}
        assert client.json("history")["nodes"] == []
        assert client.json("storage")["fields"] == []
        assert client.json("version")["committed_at"] is None


def test_commits_of_a_running_writer_are_seen(url: str) -> None:
    store = trajstore.create(url, SCHEMA, fsync=False)
    with Viewer(trajstore.open(url)) as viewer, store.writer(commit_seconds=None) as writer:
        client = Client(viewer.url)
        view = viewer.view
        view.refresh_s = 0
        before = client.json("version")["number"]
        assert client.json("version")["number"] == before  # nothing happened
        writer.append_episode(episode(1, 20), terminated=True)
        writer.commit()
        after = client.json("version")
        assert after["number"] == before + 1
        assert after["n_open_streams"] == 1
        assert client.json("facts")["n_episodes"] == 1


def test_new_checkpoints_are_seen_and_known_ones_are_read_once(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = []

    def counted(storage: Storage) -> list[trajstore.Checkpoint]:
        reads.append(storage.display)
        return list_checkpoints(storage)

    monkeypatch.setattr(live_view, "list_checkpoints", counted)
    with ReplayBuffer(url, schema=SCHEMA, commit_seconds=None, fsync=False) as buffer:
        buffer.add_episode(episode(1, 20), terminated=True)
        buffer.flush()
        with Viewer(trajstore.open(url)) as viewer:
            client = Client(viewer.url)
            viewer.view.refresh_s = 0
            for name in ("one", "two"):
                buffer.save_checkpoint(name, wait=True)
                client.json("version")
                for _ in range(3):
                    shown = [node["name"] for node in client.json("history")["nodes"] if "name" in node]
                assert shown[-1] == name
    assert len(reads) == 2


def test_storage_is_not_asked_more_often_than_allowed(url: str) -> None:
    store = trajstore.create(url, SCHEMA, fsync=False)
    with Viewer(trajstore.open(url)) as viewer, store.writer(commit_seconds=None) as writer:
        client = Client(viewer.url)
        viewer.view.refresh_s = 3600
        writer.append_episode(episode(1, 20), terminated=True)
        writer.commit()
        assert client.json("version")["number"] == 1
        assert client.json("facts")["n_episodes"] == 0


def test_evicted_rows_are_said_to_be_gone_and_the_next_answer_is_new(url: str) -> None:
    schema = Schema({"x": Field("float32", (64,), chunk_rows=4)})
    with trajstore.create(url, schema, fsync=False).writer(commit_seconds=None) as writer:
        for i in range(3):
            writer.append_episode({"x": np.full((20, 64), i, np.float32)}, terminated=True)
        writer.commit()
        with Viewer(trajstore.open(url)) as viewer:
            client = Client(viewer.url)
            viewer.view.refresh_s = 3600
            old = key(client, 0)
            writer.set_view(first_row=20)  # evicts the first episode
            writer.wait(writer.publish_view())
            for path in Path(url).glob("streams/*/steps/x/c.0.0"):
                path.unlink()
            answer = client.ask("series", path="x", **old)
            assert (answer.status, answer.json["kind"]) == (409, "expired")
            assert client.ask("episode", **old).status == 404  # the snapshot was replaced
            assert client.json("facts")["n_episodes"] == 2


def test_a_damaged_chunk_is_named_where_its_series_would_be(tmp_path: Path) -> None:
    url = tmp_path / "store"
    with Viewer(fill(str(url), 8)) as viewer:
        client = Client(viewer.url)
        for path in (url / "streams").glob("*/steps/reward/c*"):
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 0xFF
            path.write_bytes(data)
        answer = client.ask("series", path="reward", **key(client, 2))
        assert (answer.status, answer.json["kind"]) == (422, "damaged")
        assert "reward" in answer.json["error"]
        assert client.ask("series", path="action", **key(client, 2)).status == 200


def test_a_damaged_column_of_episodes_leaves_the_others(tmp_path: Path) -> None:
    url = tmp_path / "store"
    with Viewer(fill(str(url), 8)) as viewer:
        client = Client(viewer.url)
        for path in (url / "streams").glob("*/spans/text/c*"):
            path.write_bytes(b"\0" * path.stat().st_size)
        answer = client.json("episodes")
        assert "spans/text" in answer["damaged"]["task"]
        assert [(row["task"], row["score"]) for row in answer["rows"]] == [(None, i / 10) for i in range(8)]
        facts = client.json("episode", **key(client, 3))
        assert facts["damaged"].keys() == {"task", "metadata"}
        assert (facts["row"]["score"], facts["row"]["task"], facts["row"]["metadata"]) == (0.3, None, {})
        assert client.ask("series", path="reward", **key(client, 3)).status == 200


def test_a_store_that_is_removed_is_said_to_be_gone(tmp_path: Path) -> None:
    url = tmp_path / "store"
    with Viewer(fill(str(url), 8)) as viewer:
        client = Client(viewer.url)
        viewer.view.refresh_s = 0
        n = client.json("plots")["n_episodes"]
        shutil.rmtree(url)
        assert "the store was removed or moved" in client.json("version")["problem"]
        assert client.json("plots")["n_episodes"] == n


def test_large_results_are_not_all_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_view, "_KEPT_BYTES", 1000)
    moment = live_view.Moment(1, trajstore.create("memory://viewed-kept").snapshot, ())
    computed = []

    def compute(name: str) -> np.ndarray:
        computed.append(name)
        return np.zeros(60)

    for name in ("a", "b", "b", "c", "c", "a"):  # 480 bytes each
        moment.keep(name, lambda name=name: compute(name))
    assert computed == ["a", "b", "c", "a"]


def test_a_checkpoint_is_shown_as_it_was(tmp_path: Path) -> None:
    url = str(tmp_path / "store")
    fill(url, 20)
    with Viewer(trajstore.open(url, at="second")) as viewer:
        assert Client(viewer.url).json("facts")["n_episodes"] == 15


def test_a_storage_that_fails_leaves_the_last_view(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with Viewer(fill(url, 8)) as viewer:
        client = Client(viewer.url)
        viewer.view.refresh_s = 0

        def fail(*_: object) -> None:
            raise trajstore.StorageError("the network is down")

        monkeypatch.setattr(trajstore.Store, "refresh", fail)
        assert client.json("version")["problem"] == "the network is down"
        assert client.json("facts")["n_episodes"] == 8
