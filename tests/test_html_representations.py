"""What notebooks show of stores, tables, episodes, schemas, checkpoints and buffers."""

from __future__ import annotations

import copy
import json
import time
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trajstore
from trajstore import Checkpoint, Field, Priorities, ReplayBuffer, Schema, Store, Windows, html_blocks
from trajstore.format.commit_record import CommitRecord, StreamExtent
from trajstore.html_blocks import Section, representation
from trajstore.storage import Storage
from trajstore.store.snapshot import Snapshot
from trajstore.store.stream_reader import StreamReader
from trajstore.store.stream_view import StreamView

TAGS = {"div", "style", "span", "details", "summary", "b", "table", "thead", "tbody", "tr", "th", "td"}
EVIL = "<script>alert('x')</script><img src=x onerror=\"alert(1)\">&\x1b[31m\u202e"


class Shown(HTMLParser):
    """Checks that tags are known and balanced, and collects the text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.text = ""
        self.feed(page)
        self.close()
        assert not self.stack

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        assert tag in TAGS, tag
        assert {name for name, _ in attributes} <= {"class", "open"}
        self.stack.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += "" if self.stack[-1:] == ["style"] else f"{data}|"


def shown(thing: Any) -> str:
    page = thing._repr_html_()
    assert len(page) < 60_000
    assert "script>" not in page
    assert "\x1b" not in page
    assert "\u202e" not in page
    return Shown(page).text


def small_store(url: Any, **options: Any) -> Store:
    store = trajstore.create(url, **options)
    with store.writer() as writer:
        for i in range(12):
            data = {
                "observation": np.zeros((4, 2), np.float32),
                "action": np.zeros(3, np.int64),
                "reward": np.ones(3),
            }
            writer.append_episode(data, terminated=i < 10, truncated=i >= 10, metadata={"task": "reach", "i": i})
    store.refresh()
    return store


def test_a_store_shows_its_episodes_fields_streams_and_checkpoints(tmp_path: Path) -> None:
    store = small_store(tmp_path / "s")
    for thing in (store, store.snapshot):
        text = shown(thing)
        assert str(tmp_path) in text
        for part in ("12 episodes, 36 steps", "10 terminated, 2 truncated", "3 fields", "observation", "1 sealed"):
            assert part in text
    assert "Checkpoints| none" in shown(store)
    assert "opened at checkpoint" not in shown(store)


def test_a_table_shows_its_first_and_last_episodes(tmp_path: Path) -> None:
    table = small_store(tmp_path / "s").episodes
    text = shown(table)
    assert "First and last" in text
    for row in (0, 3, 8, 11):
        assert f"task=reach, i={row}" in text
    assert "i=5" not in text
    assert "All" in shown(table.take([2, 1]))
    assert "no episodes" in shown(table.take([]))
    assert "12 episodes" in shown(trajstore.open(tmp_path / "s").history())


def test_an_episode_is_a_dict_that_shows_itself(tmp_path: Path) -> None:
    row = small_store(tmp_path / "s").episodes.row(2)
    assert isinstance(row, dict)
    assert json.loads(json.dumps(row)) == row == copy.deepcopy(row)
    text = shown(row)
    assert "3 steps, return 3, terminated" in text
    assert "task|reach" in text


def test_a_schema_shows_its_fields_and_columns() -> None:
    schema = Schema(
        {"o": {"x": Field("uint8", (84, 84), final=True, codec="zstd:1")}, "reward": Field("float32", fill=0)},
        episode={"success": bool}, reward_alignment="observation",
    )  # fmt: skip
    text = shown(schema)
    for part in ("o/x", "84 x 84", "codec zstd:1", "reward (reward, with the observation)", "success", "bool"):
        assert part in text
    many = Schema({f"field_{i}": Field("int64") for i in range(500)})
    assert "… and 460 more" in shown(many)
    assert repr(many).endswith("  ... and 400 more\n)")


def test_a_buffer_shows_what_it_holds_and_checkpoints_are_listed(tmp_path: Path) -> None:
    buffer = ReplayBuffer(tmp_path / "b", capacity=10, priorities=Priorities(), sample=Windows(1))
    assert "not known before the first data" in shown(buffer)
    for _ in range(6):
        buffer.add_episode({"action": np.arange(3), "reward": np.ones(3)}, terminated=True)
    buffer.policy_version = 3
    assert buffer.n_steps == 10
    text = shown(buffer)
    for part in ("open, 10 steps", "capacity 10", "alpha=0.6", "policy version|3", "not committed yet", "capacity"):
        assert part in text
    buffer.save_checkpoint("first", wait=True)
    checkpoint_id = buffer.save_checkpoint("second", wait=True)
    buffer.close()
    assert "closed, 10 steps" in shown(buffer)
    store = trajstore.open(tmp_path / "b")
    assert "2 checkpoints" in shown(store.checkpoints)
    assert checkpoint_id in shown(store)
    assert "1 stream, " in shown(store.checkpoints[1])
    assert repr(store.checkpoints[1]).startswith(f"<Checkpoint {checkpoint_id}: 1 stream, ")
    assert repr(store.streams[0]).startswith(f"<CommitRecord of {store.streams[0].id}: ")
    at = trajstore.open(tmp_path / "b", at="first")
    assert f"opened at checkpoint {store.checkpoints[0].id}" in shown(at)
    assert f"at checkpoint {store.checkpoints[0].id}" in repr(at)


def test_showing_a_buffer_takes_no_error_that_waits_for_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = ReplayBuffer(tmp_path / "b", commit_seconds=None)
    buffer.add_episode({"action": np.arange(3)}, terminated=True)

    def fail(*_: Any) -> None:
        raise OSError("the disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(type(buffer.store.snapshot.storage), "put", fail)
        buffer.flush(wait=False)
        with pytest.raises(OSError, match="the disk is full"):  # noqa: PT012 - it comes from the background
            for _ in range(2000):
                shown(buffer)
                buffer.is_ready()
                time.sleep(0.005)
    buffer.close()


def test_hostile_text_is_escaped_everywhere(tmp_path: Path) -> None:
    place = tmp_path / EVIL.replace("/", "")
    store = trajstore.create(place, Schema({"reward": Field("float32")}, episode={"who": str}))
    with store.writer() as writer:
        metadata = {EVIL: EVIL, "who": EVIL, "nested": {EVIL: [EVIL]}}
        writer.append_episode({"reward": np.ones(2, np.float32)}, terminated=True, metadata=metadata)
    store.refresh()
    for thing in (store, store.snapshot, store.episodes, store.episodes.row(0)):
        assert "<script>" in shown(thing)  # as text
    extent = StreamExtent(0, 1, 1, 0)
    checkpoint = Checkpoint(EVIL, EVIL, float("nan"), EVIL, EVIL, {EVIL: extent}, ancestors=(EVIL,))
    assert "<script>" in shown(checkpoint)
    shown(type(trajstore.open(place).checkpoints)([checkpoint]))


def test_what_can_not_be_read_is_shown_as_the_error(tmp_path: Path) -> None:
    small_store(tmp_path / "s")
    (spans,) = (tmp_path / "s").glob("streams/*/spans/ints/c.*")
    data = bytearray(spans.read_bytes())
    data[-1] ^= 1
    spans.write_bytes(data)
    store = trajstore.open(tmp_path / "s")
    text = shown(store)
    assert "ChunkError: " in text
    assert "3 fields" in text  # the rest is shown
    spans.unlink()
    assert "CorruptionError: " in shown(trajstore.open(tmp_path / "s"))
    for path in sorted((tmp_path / "s").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    shown(store)


def test_damaged_metadata_is_shown_as_damage(tmp_path: Path) -> None:
    small_store(tmp_path / "s")
    (text,) = (tmp_path / "s").glob("streams/*/spans/text/c.*")
    text.write_bytes(b"\0" * len(text.read_bytes()))
    page = shown(trajstore.open(tmp_path / "s").episodes)
    assert "ChunkError: " in page
    assert "10 terminated" in page


def test_no_step_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_store(tmp_path / "s")
    read = StreamReader.read_rows

    def watched(self: StreamReader, path: str, *args: Any, **options: Any) -> Any:
        assert not path.startswith("steps/")
        return read(self, path, *args, **options)

    monkeypatch.setattr(StreamReader, "read_rows", watched)
    store = trajstore.open(tmp_path / "s")
    for thing in (store, store.snapshot, store.episodes, store.episodes.row(0)):
        shown(thing)


def test_many_streams_and_episodes_give_a_small_page(tmp_path: Path) -> None:
    store = small_store(tmp_path / "s")
    (record,) = store.streams
    storage: Storage = store.snapshot.storage
    streams = {
        (name := f"writer-{i:026d}"): StreamView(StreamReader(storage, replace(record, id=name, rows=0, spans=0)))
        for i in range(1000)
    }
    text = shown(Snapshot(storage, store.schema, streams))
    assert "1,000 streams" in text
    assert "… and 980 more" in text
    table = store.episodes.take(np.zeros(100_000, np.int64))
    assert "100,000 episodes" in shown(table)


def test_blocks_are_bounded_and_never_raise() -> None:
    def fail() -> Any:
        raise RuntimeError("<b>broken</b>")

    page = representation(
        "Thing", "x" * 10_000, fail, [fail, lambda: Section("A", "s", html_blocks.facts([("a", 1)]))]
    )
    text = Shown(page).text
    assert text.count("RuntimeError: <b>broken</b>") == 2
    assert "(10,000 characters)" in text
    assert "A" in text
    assert len(page) < 5_000
    assert html_blocks.moment(float("inf")) == "?"
    assert html_blocks.moment(0).startswith("1970-01-01 00:00 UTC, ")
    assert html_blocks.size(1536) == "1.5 KiB"
    assert isinstance(CommitRecord("a", "a", Schema({"x": Field("int8")}), {}).__repr__(), str)
