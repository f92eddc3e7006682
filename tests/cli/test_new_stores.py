"""The commands that make new stores: copy and merge."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import trajstore
from tests.cli.test_cli import SCHEMA, damage, episode, run, run_json
from trajstore.cli import new_stores
from trajstore.cli.app import app
from trajstore.schema import flatten
from trajstore.store.checkpoints import Checkpoint, new_checkpoint_id, save
from trajstore.store.verify import verify


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("new") / "store"
    store = trajstore.create(root, SCHEMA, fsync=False)
    with store.writer("rank0", rank=0, world_size=2, world="w0", commit_seconds=None) as writer:
        for i in range(10):
            writer.append_episode(
                episode(4 + i), terminated=True, metadata={"success": i % 2 == 0, "task": f"t{i}"}
            )
        writer.put_column("advantage", writer.stream, np.ones(len(range(10)) * 5, np.float32))
    saved = Checkpoint(new_checkpoint_id("half"), "half", 1e9, streams=store.refresh().cuts())
    save(store.snapshot.storage, saved, {"n": 1})
    with store.writer("rank1", rank=1, world_size=2, world="w0", commit_seconds=None) as writer:
        writer.append_episode(episode(60), terminated=True)
    return root


@pytest.fixture
def root(template: Path, tmp_path: Path) -> Path:
    shutil.copytree(template, tmp_path / "store")
    return tmp_path / "store"


def test_copy_says_what_it_copied_and_refuses_a_store_that_exists(template: Path, tmp_path: Path) -> None:
    facts = run_json("copy", template, tmp_path / "a")
    assert (facts["n_streams"], facts["n_episodes"], facts["n_checkpoints"]) == (2, 11, 1)
    assert facts["n_bytes"] > 1000
    assert shown_at(tmp_path / "a") == shown_at(template)
    again = run("copy", template, tmp_path / "a")
    assert again.exit_code == 2
    assert "already a store" in again.stderr
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "mine.txt").write_text("x")
    assert "not empty" in run("copy", template, tmp_path / "b").stderr
    result = run("copy", template, tmp_path / "c", "--at", "half")
    assert "Copied 1 stream, 10 episodes, 85 steps, 1 checkpoint;" in result.stdout
    assert run("copy", template, tmp_path / "d", "--at", "never").exit_code == 2


def shown_at(root: Path) -> object:
    store = trajstore.open(root)
    return [(row, repr(flatten(store.read_episode(i)))) for i, row in enumerate(store.episodes)]


def test_an_interrupted_copy_is_no_store_and_says_how_to_go_on(
    template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    for name, arguments in (("copy", [template, tmp_path / "a"]), ("merge", [tmp_path / "a", template])):
        monkeypatch.setattr(new_stores, name, interrupted)
        result = run(name, *arguments)
        assert result.exit_code == 130
        assert "is not a store yet, and the source is unchanged; the same command begins again" in result.stderr


def test_merge_tells_what_each_store_gave(template: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    with trajstore.create(other, SCHEMA, fsync=False).writer("w") as writer:
        writer.append_episode(episode(7), truncated=True)
    result = run("merge", tmp_path / "new", template, other, template)
    assert result.exit_code == 0, result.stderr
    assert "1 checkpoint left behind" in result.stdout
    assert "2 streams left out, because an earlier store has the same" in result.stdout
    assert len(trajstore.open(tmp_path / "new")) == 12
    assert verify(tmp_path / "new").is_clean
    facts = run_json("merge", tmp_path / "new2", template, other)
    assert [source["n_episodes"] for source in facts["sources"]] == [11, 1]


def test_merging_stores_of_other_fields_names_them(template: Path, tmp_path: Path) -> None:
    trajstore.create(tmp_path / "other", {"action": trajstore.Field("float32")})
    result = run("merge", tmp_path / "new", template, tmp_path / "other")
    assert result.exit_code == 2
    assert "action: int64" in result.stderr
    assert not (tmp_path / "new" / "zarr.json").exists()


def test_damage_exits_with_1(root: Path, tmp_path: Path) -> None:
    damage(root).unlink()
    for arguments in (("copy", root, tmp_path / "a"), ("merge", tmp_path / "b", root)):
        assert run(*arguments).exit_code == 1


def test_options_of_both_places_are_never_shown(template: Path, tmp_path: Path) -> None:
    option = "--target-option"
    result = run("copy", template, "s3://b/x", option, "secret=hunter22", option, "retry_s=no-hunter22")
    assert result.exit_code == 2
    assert "hunter22" not in result.stderr


def test_every_command_has_json(template: Path, tmp_path: Path) -> None:
    assert json.loads(run("copy", template, tmp_path / "a", "--json").stdout)["url"].endswith("a")
    assert app() is not None


# ---- split -----------------------------------------------------------------------------------------------


def test_split_by_shares_is_reproducible(template: Path, tmp_path: Path) -> None:
    result = run("split", template, f"{tmp_path / 'a'}=70%", f"{tmp_path / 'b'}=2", "--seed", 3)
    assert result.exit_code == 0, result.stderr
    assert "1 episode in none of them." in result.stdout
    facts = run_json("split", template, f"{tmp_path / 'c'}=0.7", f"{tmp_path / 'd'}=rest", "--seed", "3")
    assert [part["n_episodes"] for part in facts["parts"]] == [8, 3]
    assert shown_at(tmp_path / "a") == shown_at(tmp_path / "c")
    assert verify(tmp_path / "d").is_clean


def test_split_by_a_filter_divides_what_matches_from_the_rest(template: Path, tmp_path: Path) -> None:
    facts = run_json("split", template, tmp_path / "good", tmp_path / "others", "--where", "success == true")
    assert [part["n_episodes"] for part in facts["parts"]] == [5, 6]
    good = trajstore.open(tmp_path / "good")
    assert good.episodes["success"].tolist() == [True] * 5
    facts = run_json("split", template, f"{tmp_path / 'half'}=0.5", "--where", "length < 10")
    assert (facts["parts"][0]["n_episodes"], facts["n_left"]) == (3, 8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a=0.9", "b=0.2"], "add up to 1.1"),
        (["a=0.9", "b"], "expected TARGET=SHARE for each"),
        (["a"], "expected TARGET=SHARE for each"),
        (["a=1", "a=2"], "different URLs"),
        (["a=100"], "at most 11 episodes"),
        (["a", "--where", "lengh > 3"], "lengh"),
        (["memory://x=1"], "memory"),
    ],
)
def test_wrong_shares_are_refused_before_anything_is_written(
    template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run("split", template, *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert list(tmp_path.iterdir()) == []
