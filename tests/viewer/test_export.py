"""A page in one file: bounded, complete where it says so, and never in the place of another file."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import trajstore
from tests.support.viewed import HOSTILE, fill
from trajstore.viewer import export, export_page


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> trajstore.Store:
    return fill(str(tmp_path_factory.mktemp("exported") / "store"), 20)


def data_of(page: Path) -> dict[str, Any]:
    text = page.read_text("utf-8").partition('id="data">')[2].partition("</script>")[0]
    found: dict[str, Any] = json.loads(text)
    return found


def test_the_file_has_the_overview_the_table_and_some_episodes(store: trajstore.Store, tmp_path: Path) -> None:
    note = export_page(store, tmp_path / "page.html")
    data = data_of(tmp_path / "page.html")
    assert data["note"] == note
    assert "lists 20 of 20 episodes. 8 have series" in note
    assert len(data["table"]["rows"]) == 20
    names = Counter(name.partition("?")[0] for name in data["answers"])
    once = dict.fromkeys(("facts", "plots", "streams", "storage", "history"), 1)
    assert names == once | {"episode": 8, "series": 8 * 4, "column": 8}
    assert all(20 < len(frames) <= 24 for frames in data["frames"].values())
    assert all(
        frame[1].startswith("data:image/png;base64,") for frames in data["frames"].values() for frame in frames
    )


def test_markup_in_a_store_is_no_markup_in_the_file(store: trajstore.Store, tmp_path: Path) -> None:
    export_page(store, tmp_path / "page.html", episodes=[3])
    page = (tmp_path / "page.html").read_text("utf-8")
    assert HOSTILE not in page
    assert "<img" not in page
    assert HOSTILE in [row["task"] for row in data_of(tmp_path / "page.html")["table"]["rows"]]
    assert page.count("<script") == page.count("</script>")


def test_the_file_is_as_small_as_asked(store: trajstore.Store, tmp_path: Path) -> None:
    export_page(store, tmp_path / "page.html")
    limit = (tmp_path / "page.html").stat().st_size + 50_000  # 64 KiB are kept for notes
    note = export_page(store, tmp_path / "page.html", max_bytes=limit, exist_ok=True)
    assert (tmp_path / "page.html").stat().st_size <= limit
    assert "did not fit" in note
    with pytest.raises(trajstore.DataError, match=r"max_bytes: the overview and the table take"):
        export_page(store, tmp_path / "other.html", max_bytes=1000)
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


def test_a_long_table_is_cut_and_says_so(
    store: trajstore.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "MAX_ROWS", 7)
    assert "lists 7 of 20 episodes" in export_page(store, tmp_path / "page.html", episodes=[])
    assert len(data_of(tmp_path / "page.html")["table"]["rows"]) == 7


def test_an_existing_file_stays_unless_it_may_be_replaced(store: trajstore.Store, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text("mine")
    with pytest.raises(trajstore.DataError, match="exists already"):
        export_page(store, page)
    assert page.read_text() == "mine"
    export_page(store, page, episodes=[], exist_ok=True)
    assert page.stat().st_size > 10_000


def test_an_unknown_episode_is_refused(store: trajstore.Store, tmp_path: Path) -> None:
    with pytest.raises(trajstore.EpisodeNotFoundError):
        export_page(store, tmp_path / "page.html", episodes=[20])
    with pytest.raises(trajstore.EpisodeNotFoundError):
        export_page(store, tmp_path / "page.html", episodes=[("nobody-0", 1)])
    assert not list(tmp_path.iterdir())


def test_damage_is_in_the_file_where_the_series_would_be(tmp_path: Path) -> None:
    store = fill(str(tmp_path / "store"), 8)
    for path in (tmp_path / "store" / "streams").glob("*/steps/reward/c*"):
        path.write_bytes(path.read_bytes()[:-1] + b"\0")
    export_page(store, tmp_path / "page.html", episodes=[1])
    answers = data_of(tmp_path / "page.html")["answers"]
    (reward,) = [answer for name, answer in answers.items() if name.endswith("path=reward")]
    assert reward["kind"] == "damaged"


def test_an_empty_store_can_be_written(tmp_path: Path) -> None:
    store = trajstore.create(tmp_path / "store")
    assert "lists 0 of 0 episodes" in export_page(store, tmp_path / "page.html")
