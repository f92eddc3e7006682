import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

import trajstore
from trajstore.datasets.conversion import export_episodes, import_episodes
from trajstore.datasets.interfaces import Episode
from trajstore.datasets.lerobot import open_reader, open_writer
from trajstore.datasets.lerobot import writer as lerobot_writer
from trajstore.errors import (
    DataError,
    EpisodeNotFoundError,
    FormatError,
    MissingExtraError,
    SchemaError,
    StoreExistsError,
    StoreNotFoundError,
)

pa = pytest.importorskip("pyarrow")
import pyarrow.parquet as pq  # noqa: E402

MADE = Path(__file__).parents[1] / "data" / "lerobot_v3"  # by LeRobot's own library: see make_lerobot.py there
LENGTHS = (7, 5, 6)


@pytest.fixture
def dataset(tmp_path):
    return Path(shutil.copytree(MADE, tmp_path / "dataset"))


def made_episodes():
    """What make_lerobot.py told LeRobot to record."""
    rng = np.random.default_rng(0)
    for n in LENGTHS:
        frames = [(rng.normal(size=3).astype(np.float32), rng.normal(size=2).astype(np.float32)) for _ in range(n)]
        yield np.stack([state for state, _ in frames]), np.stack([action for _, action in frames])


def edit(path, change):
    about = json.loads(path.read_text())
    change(about)
    path.write_text(json.dumps(about))


def edit_table(path, **columns):
    table = pq.read_table(path)
    for name, values in columns.items():
        table = table.set_column(table.column_names.index(name), name, pa.array(values))
    pq.write_table(table, path)


def read_all(reader):
    return [reader.read(key) for key in list(reader.keys())]


# ---- into a store


def test_steps_are_those_that_lerobot_recorded():
    for episode, (state, action) in zip(read_all(open_reader(MADE)), made_episodes(), strict=True):
        n = len(state)
        assert np.array_equal(episode.steps["observation"]["state"], state)
        assert np.array_equal(episode.steps["action"], action)
        assert np.array_equal(episode.steps["observation"]["grid"][:, 0, 0], np.arange(n))
        assert episode.steps["next"]["reward"].tolist() == [t / 4 for t in range(n)]
        assert episode.steps["next"]["done"].tolist() == [False] * (n - 1) + [True]


def test_the_schema_has_groups_for_dots_and_no_numbers_of_rows():
    schema = open_reader(MADE).schema
    assert {path: (field.dtype, field.shape) for path, field in schema.fields.items()} == {
        "observation/state": ("float32", (3,)),
        "observation/grid": ("int64", (2, 3)),
        "observation/images/wrist": ("uint8", (16, 12, 3)),
        "observation/images/top": ("uint8", (64, 64, 3)),
        "action": ("float32", (2,)),
        "next/reward": ("float32", ()),
        "next/done": ("bool", ()),
        "timestamp": ("float32", ()),
        "task_index": ("int64", ()),
    }
    assert schema.reward == "next/reward"
    assert schema.final_fields == ()


def test_images_are_decoded_as_they_were():
    for episode in read_all(open_reader(MADE, videos=False)):
        for t, image in enumerate(episode.steps["observation"]["images"]["wrist"]):
            assert (image == (t, 2 * t, 255 - t)).all()


def test_frames_of_a_video_belong_to_their_steps():
    for episode in read_all(open_reader(MADE)):
        bars = episode.steps["observation"]["images"]["top"][:, 32, :, 0] > 100  # lossy: a bar as wide as told
        assert bars.sum(axis=1).tolist() == [2 * t + 2 for t in range(len(bars))]


def test_videos_can_be_left_out():
    assert "observation/images/top" not in open_reader(MADE, videos=False).schema


def test_features_can_be_left_out_by_either_name():
    for name in ("observation.images", "observation/images"):
        assert not [path for path in open_reader(MADE, skip=[name]).schema if "images" in path]


def test_a_name_to_skip_that_is_not_there_is_refused():
    with pytest.raises(
        DataError, match=r"skip 'observation.image': nothing has that name; expected one of .*images.top"
    ):
        open_reader(MADE, skip=["observation.state", "observation.image"])


def test_videos_without_a_decoder_say_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(MissingExtraError, match=r"pip install av.*videos=False"):
        open_reader(MADE)
    open_reader(MADE, videos=False)


def test_images_without_a_decoder_say_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(MissingExtraError, match="Pillow: pip install pillow"):
        open_reader(MADE, videos=False).read("0")


def test_tables_without_pyarrow_say_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtraError, match="pyarrow: pip install pyarrow"):
        open_reader(MADE)


def test_an_import_is_verified_bit_by_bit(tmp_path):
    report = import_episodes(open_reader(MADE), tmp_path / "store")
    assert (report.n_episodes, report.n_steps, report.n_verified) == (3, 18, 3)
    store = trajstore.open(tmp_path / "store")
    assert store.episodes["return"].tolist() == [sum(t / 4 for t in range(n)) for n in LENGTHS]
    assert store.episodes["task"].tolist() == ["push", "lift", None]
    assert store.episodes["end"].tolist() == ["cut"] * 3


def test_tasks_and_facts_of_the_dataset_are_kept():
    first, second, third = read_all(open_reader(MADE, videos=False))
    assert (first.metadata["task"], first.metadata["tasks"]) == ("push", {"0": "push"})
    assert second.metadata == {"task": "lift", "tasks": {"1": "lift"}}
    assert third.metadata == {"tasks": {"0": "push", "1": "lift"}}
    assert third.steps["task_index"].tolist() == [0, 0, 0, 1, 1, 1]
    assert first.metadata["dataset"]["lerobot"]["fps"] == 10
    assert "total_episodes" not in first.metadata["dataset"]["lerobot"]


def test_how_episodes_ended_can_be_told():
    assert open_reader(MADE, videos=False, end="truncated").read("0").truncated
    assert open_reader(MADE, videos=False, end="terminated").read("0").terminated
    with pytest.raises(ValueError, match="end: expected 'cut'"):
        open_reader(MADE, end="done")


def test_episodes_are_found_in_one_large_row_group(dataset):
    path = dataset / "data" / "chunk-000" / "file-000.parquet"
    pq.write_table(pq.read_table(path), path)
    assert pq.ParquetFile(path).num_row_groups == 1
    expected = read_all(open_reader(MADE, videos=False))
    reader = open_reader(dataset, videos=False)
    for key in ("2", "0", "1"):
        assert np.array_equal(reader.read(key).steps["action"], expected[int(key)].steps["action"])


def test_episodes_are_found_in_several_files(dataset):
    path = dataset / "data" / "chunk-000" / "file-000.parquet"
    table = pq.read_table(path)
    pq.write_table(table.slice(0, 12), path)
    pq.write_table(table.slice(12), path.with_name("file-001.parquet"))
    edit_table(dataset / "meta/episodes/chunk-000/file-000.parquet", **{"data/file_index": [0, 0, 1]})
    expected = read_all(open_reader(MADE, videos=False))
    for mine, their in zip(read_all(open_reader(dataset, videos=False)), expected, strict=True):
        assert np.array_equal(mine.steps["action"], their.steps["action"])


def test_channels_that_come_first_in_words_come_last_in_data(dataset):
    def turn(about):
        about["features"]["observation.images.wrist"] |= {
            "shape": [3, 16, 12],
            "names": ["channels", "height", "width"],
        }

    edit(dataset / "meta/info.json", turn)
    reader = open_reader(dataset, videos=False)
    assert reader.schema["observation/images/wrist"].shape == (16, 12, 3)
    assert reader.read("0").steps["observation"]["images"]["wrist"].shape == (7, 16, 12, 3)


class Matrices(pa.ExtensionType):
    """As Hugging Face's library registers them when it is imported."""

    def __init__(self):
        super().__init__(pa.list_(pa.list_(pa.int64())), "datasets.features.features.Array2DExtensionType")

    def __arrow_ext_serialize__(self):
        return b""

    @classmethod
    def __arrow_ext_deserialize__(cls, storage_type, serialized):
        return cls()


def test_matrices_are_read_whoever_has_registered_them():
    pa.register_extension_type(Matrices())
    try:
        reader = open_reader(MADE, videos=False)
        assert isinstance(pq.read_schema(MADE / "data/chunk-000/file-000.parquet").field(1).type, Matrices)
        assert reader.schema["observation/grid"].shape == (2, 3)
        assert reader.read("1").steps["observation"]["grid"][3].tolist() == [[3, 4, 5], [6, 7, 8]]
    finally:
        pa.unregister_extension_type("datasets.features.features.Array2DExtensionType")


def test_a_dataset_that_was_not_finalized_is_refused(dataset):
    path = dataset / "data" / "chunk-000" / "file-000.parquet"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(FormatError, match="was not closed by its writer"):
        open_reader(dataset, videos=False).read("0")
    path = dataset / "meta/episodes/chunk-000/file-000.parquet"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(FormatError, match="was not closed by its writer"):
        open_reader(dataset)


def test_a_directory_without_a_dataset_is_an_error(tmp_path):
    with pytest.raises(StoreNotFoundError, match=r"info\.json is missing"):
        open_reader(tmp_path)


def test_a_key_that_is_not_there_is_an_error():
    with pytest.raises(EpisodeNotFoundError, match="'3'"):
        open_reader(MADE, videos=False).read("3")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"codebase_version": "v2.1"}, "expected a LeRobot dataset of version v3, got 'v2.1'"),
        ({"fps": 0}, "expected fps and features"),
        (
            {"features": {"action": {"dtype": "float32", "shape": [-1]}}},
            "feature 'action': expected dtype and shape",
        ),
        ({"total_episodes": 4}, "says 4 episodes, meta/episodes has 3"),
        ({"data_path": "../{chunk_index}.parquet"}, r"data_path: expected a relative path without '\.\.'"),
        ({"data_path": "/etc/passwd"}, r"data_path: expected a relative path without '\.\.'"),
        ({"data_path": "{chunk_index.__class__}"}, r"data_path: expected a relative path without '\.\.'"),
        ({"data_path": "{chunk_index:999999999999d}"}, r"data_path: expected a relative path without '\.\.'"),
        ({"data_path": "{"}, r"data_path: expected a relative path without '\.\.'"),
    ],
)
def test_what_the_dataset_says_of_itself_is_checked(dataset, change, problem):
    edit(dataset / "meta/info.json", lambda about: about.update(change))
    with pytest.raises(FormatError, match=problem):
        open_reader(dataset, videos=False).read("0")


def test_rows_of_another_episode_are_refused(dataset):
    edit_table(dataset / "data/chunk-000/file-000.parquet", index=list(range(1, 19)))
    with pytest.raises(FormatError, match="'index' of episode 0 contradicts meta/episodes"):
        open_reader(dataset, videos=False).read("0")


def test_more_rows_than_there_are_is_an_error(dataset):
    columns = {"dataset_to_index": [7, 12, 99], "length": [7, 5, 87]}
    edit_table(dataset / "meta/episodes/chunk-000/file-000.parquet", **columns)
    with pytest.raises(FormatError, match="expected at least 99 rows"):
        open_reader(dataset, videos=False).read("2")


def test_a_task_without_a_name_is_an_error(dataset):
    edit_table(dataset / "meta/tasks.parquet", task_index=[5, 6])
    with pytest.raises(FormatError, match="has task 0"):
        open_reader(dataset, videos=False).read("0")


def test_nulls_are_refused(dataset):
    edit_table(dataset / "data/chunk-000/file-000.parquet", **{"next.reward": [None] + [1.0] * 17})
    with pytest.raises(
        DataError, match=r"episode '0': field 'next/reward': expected a number in every row, got 1 null"
    ):
        open_reader(dataset, videos=False).read("0")


def test_lists_of_other_lengths_are_refused(dataset):
    ragged = [[[1, 2], [3, 4, 5, 6]]] + [[[1, 2, 3], [4, 5, 6]]] * 17
    edit_table(dataset / "data/chunk-000/file-000.parquet", **{"observation.grid": ragged})
    with pytest.raises(DataError, match=r"field 'observation/grid': expected lists of 3, got lengths \[2, 4, 3\]"):
        open_reader(dataset, videos=False).read("0")


def test_text_is_refused_and_can_be_left_out(dataset):
    edit(dataset / "meta/info.json", lambda about: about["features"].update(note={"dtype": "string", "shape": [1]}))
    path = dataset / "data/chunk-000/file-000.parquet"
    pq.write_table(pq.read_table(path).append_column("note", pa.array(["x"] * 18)), path)
    with pytest.raises(DataError, match=r"feature 'note': expected numbers or bools, got string.*skip=\['note'\]"):
        open_reader(dataset, videos=False).schema  # noqa: B018
    assert "note" not in open_reader(dataset, videos=False, skip=["note"]).schema


def test_a_name_that_can_not_be_a_field_is_refused(dataset):
    edit(
        dataset / "meta/info.json",
        lambda about: about["features"].update({"a b": {"dtype": "int64", "shape": [1]}}),
    )
    with pytest.raises(SchemaError, match="'a b'"):
        open_reader(dataset, videos=False)
    open_reader(dataset, videos=False, skip=["a b"])


def test_a_video_that_is_too_short_is_refused(dataset):
    columns = {"videos/observation.images.top/from_timestamp": [0.0, 0.7, 1.5]}
    edit_table(dataset / "meta/episodes/chunk-000/file-000.parquet", **columns)
    with pytest.raises(FormatError, match=r"expected 6 frames from 1\.500 s on, got none at 1\.800 s"):
        open_reader(dataset).read("2")


def test_a_video_that_is_none_is_refused(dataset):
    path = next(dataset.rglob("*.mp4"))
    path.write_bytes(b"nothing")
    with pytest.raises(FormatError, match="can't be decoded"):
        open_reader(dataset).read("0")
    path.unlink()
    with pytest.raises(StoreNotFoundError, match=r"mp4 is missing"):
        open_reader(dataset).read("0")


def test_an_image_of_another_size_is_refused(dataset):
    def widen(about):
        about["features"]["observation.images.wrist"]["shape"] = [16, 13, 3]

    edit(dataset / "meta/info.json", widen)
    with pytest.raises(FormatError, match="image 0: expected 13 x 16 pixels"):
        open_reader(dataset, videos=False).read("0")


# ---- out of a store


def test_what_was_imported_goes_back_the_same(tmp_path):
    import_episodes(open_reader(MADE), tmp_path / "store")
    path = tmp_path / "again"
    report = export_episodes(tmp_path / "store", open_writer(path), reread=lambda: open_reader(path))
    assert report.n_verified == 3
    mine, their = (json.loads((root / "meta/info.json").read_text()) for root in (path, MADE))
    mine["features"]["observation.images.top"] = their["features"]["observation.images.top"]  # is images now
    assert {**mine, "video_path": their["video_path"]} == their
    tables = [pq.read_table(root / "data/chunk-000/file-000.parquet").to_pydict() for root in (path, MADE)]
    for name in set(tables[1]) - {"observation.images.wrist"}:
        assert tables[0][name] == tables[1][name], name
    tasks = [pq.read_table(root / "meta/tasks.parquet").to_pydict() for root in (path, MADE)]
    assert tasks[0] == tasks[1]


def test_statistics_are_those_of_the_data(tmp_path):
    import_episodes(open_reader(MADE, videos=False), tmp_path / "store")
    export_episodes(tmp_path / "store", open_writer(tmp_path / "again"))
    mine, their = (json.loads((root / "meta/stats.json").read_text()) for root in (tmp_path / "again", MADE))
    for name in ("observation.state", "action", "next.reward"):
        for kind in ("min", "max", "mean", "std", "count"):
            assert mine[name][kind] == pytest.approx(their[name][kind]), (name, kind)
    wrist = "observation.images.wrist"
    assert np.allclose(mine[wrist]["mean"], their[wrist]["mean"])
    assert np.shape(mine[wrist]["std"]) == (3, 1, 1)


def test_pandas_finds_the_tasks_where_lerobot_looks_for_them(tmp_path):
    pd = pytest.importorskip("pandas")
    import_episodes(open_reader(MADE, videos=False), tmp_path / "store")
    export_episodes(tmp_path / "store", open_writer(tmp_path / "again"))
    tasks = pd.read_parquet(tmp_path / "again/meta/tasks.parquet")
    assert tasks.index.tolist() == ["push", "lift"]
    assert tasks["task_index"].tolist() == [0, 1]


def test_an_export_is_read_by_lerobot(tmp_path):
    lerobot = pytest.importorskip("lerobot.datasets.lerobot_dataset", exc_type=ImportError)
    import_episodes(open_reader(MADE, videos=False), tmp_path / "store")
    export_episodes(tmp_path / "store", open_writer(tmp_path / "again"))
    found = lerobot.LeRobotDataset("trajstore/again", root=tmp_path / "again")
    assert (found.num_episodes, found.num_frames) == (3, 18)
    assert found[13]["task"] == "push"
    assert np.array_equal(found[7]["action"].numpy(), next(a for i, (_, a) in enumerate(made_episodes()) if i)[0])


def some_store(tmp_path, *, has_final=False):
    store = trajstore.create(tmp_path / "store")
    with store.writer() as writer:
        for i, n in enumerate((3, 5)):
            steps = {
                "observation": {
                    "state": np.ones((n + has_final, 2), np.float32) * i,
                    "column": np.arange(n + has_final, dtype=np.int16)[:, None],
                    "flags": np.ones((n + has_final, 2, 3, 2), bool),
                },
                "action": np.arange(n, dtype=np.int64),
                "reward": np.ones(n, np.float32),
            }
            writer.append_episode(steps, truncated=True, terminated=i == 1, metadata={"score": [i, 0.5]})
    return tmp_path / "store"


def test_a_store_of_our_own_comes_back_the_same(tmp_path):
    path = tmp_path / "own"
    dataset_writer = open_writer(path, fps=50, task="walk", robot_type="biped")
    report = export_episodes(some_store(tmp_path), dataset_writer, reread=lambda: open_reader(path))
    assert report.n_verified == 2
    first, second = read_all(open_reader(path))
    assert (first.truncated, second.terminated) == (True, True)
    assert (first.metadata["score"], first.metadata["task"]) == ([0, 0.5], "walk")
    assert second.steps["timestamp"].tolist() == [np.float32(t / 50) for t in range(5)]
    assert first.metadata["dataset"]["lerobot"]["robot_type"] == "biped"


def test_final_observations_are_refused_and_can_be_left_out(tmp_path):
    store = some_store(tmp_path, has_final=True)
    with pytest.raises(DataError, match=r"field 'observation/state' has a final value.*drop_final=True"):
        export_episodes(store, open_writer(tmp_path / "own", fps=10, task="walk"))
    dataset_writer = open_writer(
        tmp_path / "own", fps=10, task="walk", drop_final=True
    )  # which the refused one does not hinder
    report = export_episodes(store, dataset_writer, reread=lambda: open_reader(tmp_path / "own"))
    assert (report.n_steps, report.n_left_out, report.n_verified) == (8, 0, 2)
    assert [len(e.steps["observation"]["state"]) for e in read_all(open_reader(tmp_path / "own"))] == [3, 5]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"task": "walk"}, "fps: expected"),
        ({"fps": 10}, "the episode has no task"),
        ({"fps": -1, "task": "x"}, "fps"),
    ],
)
def test_what_the_store_does_not_know_must_be_said(tmp_path, options, problem):
    with pytest.raises(DataError, match=problem):
        export_episodes(some_store(tmp_path), open_writer(tmp_path / "own", **options))


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"index": np.zeros(3)}, "'index' has the name"),
        ({"timestamp": np.zeros(3)}, "LeRobot's is float32, got float64"),
        ({"task_index": np.zeros(3, np.int64)}, "metadata 'tasks' lacks some of its tasks"),
        ({"a.b": np.zeros(3)}, "LeRobot uses dots for groups"),
        ({"deep": np.zeros((3, 1, 1, 1, 1, 1, 1))}, "at most 5 axes"),
    ],
)
def test_fields_that_have_no_place_there_are_refused(tmp_path, fields, problem):
    episode = Episode("a", {"action": np.zeros(3), **fields})
    with pytest.raises(DataError, match=problem) as caught:
        open_writer(tmp_path / "own", fps=10, task="walk").write(episode)
    assert "leave it out with fields=" in str(caught.value)


def test_episodes_of_other_fields_are_refused(tmp_path):
    dataset_writer = open_writer(tmp_path / "own", fps=10, task="walk")
    dataset_writer.write(Episode("a", {"action": np.zeros(3)}))
    with pytest.raises(DataError, match=r"field 'action': expected .*float64.* got .*float32"):
        dataset_writer.write(Episode("b", {"action": np.zeros(3, np.float32)}))


def numbered(key, n, task="walk"):
    return Episode(key, {"action": np.arange(n, dtype=np.float32)}, truncated=True, metadata={"task": task})


def test_files_are_of_a_limited_size(tmp_path, monkeypatch):
    monkeypatch.setattr(lerobot_writer, "_FILE_BYTES", 200)
    monkeypatch.setattr(lerobot_writer, "_FILES_PER_CHUNK", 2)
    dataset_writer = open_writer(tmp_path / "own", fps=10)
    for i in range(5):
        dataset_writer.write(numbered(str(i), 10 + i))
    dataset_writer.finish()
    names = sorted(str(p.relative_to(tmp_path / "own/data")) for p in (tmp_path / "own/data").rglob("*.parquet"))
    assert names == [f"chunk-00{i // 2}/file-00{i % 2}.parquet" for i in range(5)]
    assert [len(e.steps["action"]) for e in read_all(open_reader(tmp_path / "own"))] == [10, 11, 12, 13, 14]


def test_an_export_that_was_abandoned_is_gone_on_with(tmp_path):
    dataset_writer = open_writer(tmp_path / "own", fps=10)
    dataset_writer.write(numbered("a", 3))
    dataset_writer.suspend()
    assert not (tmp_path / "own").exists()
    dataset_writer = open_writer(tmp_path / "own", fps=10)
    assert dataset_writer.written_keys() == ["a"]
    dataset_writer.write(numbered("b", 2, "run"))
    dataset_writer.finish()
    found = read_all(open_reader(tmp_path / "own"))
    assert [len(e.steps["action"]) for e in found] == [3, 2]
    assert [e.metadata["task"] for e in found] == ["walk", "run"]
    counted = json.loads((tmp_path / "own/meta/stats.json").read_text())["action"]
    assert (counted["count"], counted["mean"], counted["max"]) == ([5], [pytest.approx(0.8)], [2.0])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["own"]


def test_a_file_that_a_killed_export_left_open_is_written_again(tmp_path):
    dataset_writer = open_writer(tmp_path / "own", fps=10)
    dataset_writer.write(numbered("a", 3))
    dataset_writer.suspend()
    dataset_writer.write(numbered("b", 5))  # its file is never closed: as if killed here
    again = open_writer(tmp_path / "own", fps=10)
    assert again.written_keys() == ["a"]
    again.write(numbered("b", 2))
    again.finish()
    assert [len(e.steps["action"]) for e in read_all(open_reader(tmp_path / "own"))] == [3, 2]


def test_a_file_with_a_part_of_an_episode_is_written_again(tmp_path, monkeypatch):
    dataset_writer = open_writer(tmp_path / "own", fps=10)
    dataset_writer.write(numbered("a", 3))
    monkeypatch.setattr(pq.ParquetWriter, "write_table", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        dataset_writer.write(numbered("b", 2))
    dataset_writer.suspend()
    assert open_writer(tmp_path / "own", fps=10).written_keys() == []


def test_a_place_that_is_taken_is_refused(tmp_path):
    (tmp_path / "own").mkdir()
    with pytest.raises(StoreExistsError, match="already exists"):
        open_writer(tmp_path / "own")


def test_an_export_of_nothing_is_refused(tmp_path):
    with pytest.raises(DataError, match="no episodes to write"):
        open_writer(tmp_path / "own").finish()
