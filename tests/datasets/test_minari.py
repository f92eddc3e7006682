import json
import shutil

import h5py
import numpy as np
import pytest
from gymnasium import spaces

import trajstore
from trajstore.datasets.conversion import export_episodes, import_episodes
from trajstore.datasets.interfaces import Episode
from trajstore.datasets.minari import open_reader, open_writer
from trajstore.errors import (
    DataError,
    EpisodeNotFoundError,
    FormatError,
    StoreExistsError,
    StoreNotFoundError,
)

minari = pytest.importorskip("minari")
from minari.data_collector import EpisodeBuffer  # noqa: E402
from minari.serialization import serialize_space  # noqa: E402

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*is set to None:UserWarning", "ignore:env_spec is None:UserWarning"
)

FORMATS = ("hdf5", "arrow", "parquet")
PLAIN = spaces.Box(-np.inf, np.inf, (3,), np.float32)
NESTED = spaces.Dict(
    {
        "pos": PLAIN,
        "pair": spaces.Tuple([spaces.Discrete(9), spaces.Box(-1, 1, (2, 2), np.float64)]),
        "bits": spaces.MultiBinary(4),
    }
)


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    return tmp_path


def plain_episode(n, rng, ends=(True, False), **options):
    flags = [[False] * (n - 1) + [end] for end in ends]
    return EpisodeBuffer(
        observations=rng.normal(size=(n + 1, 3)).astype(np.float32),
        actions=rng.integers(0, 5, n),
        rewards=list(rng.normal(size=n)),
        terminations=flags[0],
        truncations=flags[1],
        **options,
    )


def made(root, episodes, *, observation_space=PLAIN, action_space=None, name="made-v0", **options):
    minari.create_dataset_from_buffers(
        name,
        episodes,
        observation_space=observation_space,
        action_space=action_space or spaces.Discrete(5),
        algorithm_name="none",
        author="trajstore",
        author_email="nobody@example.org",
        code_permalink="https://example.org",
        **options,
    )
    return root / name


def to_json_value(root, lengths=(4, 2, 3), **options):
    rng = np.random.default_rng(0)
    return made(root, [plain_episode(n, rng) for n in lengths], **options)


def read_all(reader):
    return [reader.read(key) for key in list(reader.keys())]


def theirs(name):
    return list(minari.load_dataset(name).iterate_episodes())


# ---- into a store


@pytest.mark.parametrize("kind", FORMATS)
def test_episodes_are_those_that_minari_gives(root, kind):
    path = to_json_value(root, data_format=kind)
    mine = read_all(open_reader(path))
    for ours, their in zip(mine, theirs("made-v0"), strict=True):
        assert np.array_equal(ours.steps["observation"], their.observations)
        assert np.array_equal(ours.steps["action"], their.actions)
        assert np.array_equal(ours.steps["reward"], their.rewards)
        assert len(ours.steps["observation"]) == len(ours.steps["action"]) + 1


@pytest.mark.parametrize("kind", FORMATS)
def test_an_import_is_verified_bit_by_bit(root, kind):
    report = import_episodes(open_reader(to_json_value(root, data_format=kind)), root / "store")
    assert (report.n_episodes, report.n_steps, report.n_verified) == (3, 9, 3)
    store = trajstore.open(root / "store")
    assert store.schema.final_fields == ("observation",)
    assert store.episodes["return"].tolist() == [pytest.approx(sum(e.rewards)) for e in theirs("made-v0")]


@pytest.mark.parametrize("kind", FORMATS)
def test_spaces_within_spaces_become_groups(root, kind):
    n = 3
    observations = {
        "pos": np.arange(3 * (n + 1), dtype=np.float32).reshape(-1, 3),
        "pair": (np.arange(n + 1), np.linspace(-1, 1, 4 * (n + 1)).reshape(-1, 2, 2)),
        "bits": np.eye(4, dtype=np.int8),
    }
    episode = EpisodeBuffer(
        observations=observations,
        actions=(np.arange(n), np.ones((n, 2), np.float32)),
        rewards=[0.0] * n,
        terminations=[False] * n,
        truncations=[False] * n,
    )
    action_space = spaces.Tuple([spaces.Discrete(5), spaces.Box(0, 1, (2,), np.float32)])
    path = made(root, [episode], observation_space=NESTED, action_space=action_space, data_format=kind)
    reader = open_reader(path)
    assert {path for path in reader.schema if path.startswith("action")} == {"action/0", "action/1"}
    assert set(reader.schema.final_fields) == {
        f"observation/{name}" for name in ("bits", "pair/0", "pair/1", "pos")
    }
    found = reader.read(reader.keys()[0])
    assert np.array_equal(found.steps["observation"]["pair"]["1"], observations["pair"][1])
    assert np.array_equal(found.steps["observation"]["bits"], observations["bits"])
    assert np.array_equal(found.steps["action"]["0"], np.arange(n))
    assert (found.terminated, found.truncated) == (False, False)
    assert import_episodes(reader, root / "store").n_verified == 1


@pytest.mark.parametrize("kind", FORMATS)
def test_how_an_episode_ended_is_kept(root, kind):
    rng = np.random.default_rng(0)
    ends = [(True, False), (False, True), (False, False), (True, True)]
    path = made(root, [plain_episode(3, rng, end) for end in ends], data_format=kind)
    found = read_all(open_reader(path))
    assert [(e.terminated, e.truncated) for e in found] == ends
    assert [e.metadata.get("truncated") for e in found] == [None, None, None, True]
    import_episodes(open_reader(path), root / "store")
    assert trajstore.open(root / "store").episodes["end"].tolist() == [
        "terminated",
        "truncated",
        "cut",
        "terminated",
    ]


@pytest.mark.parametrize("kind", FORMATS)
def test_seeds_options_and_facts_of_the_dataset_are_kept(root, kind):
    rng = np.random.default_rng(0)
    episodes = [plain_episode(2, rng, seed=7, options={"start": {"x": 1.5}}), plain_episode(3, rng)]
    path = made(root, episodes, data_format=kind, description="two episodes")
    first, second = read_all(open_reader(path))
    facts = first.metadata["dataset"]["minari"]
    assert {k: v for k, v in first.metadata.items() if k != "dataset"} == {
        "id": 0, "seed": 7, "options/start/x": 1.5, "total_steps": 2
    }  # fmt: skip
    assert second.metadata == {"id": 1, "total_steps": 3}
    assert facts["description"] == "two episodes"
    assert "total_episodes" not in facts
    assert "dataset" not in open_reader(path, skip=["dataset"]).read(first.key).metadata


@pytest.mark.parametrize("kind", FORMATS)
def test_infos_are_fields(root, kind):
    rng = np.random.default_rng(0)
    infos = {"speed": rng.normal(size=(4, 2)), "lives": [3, 3, 2, 1]}
    path = made(root, [plain_episode(3, rng, infos=infos)], data_format=kind)
    reader = open_reader(path)
    found = reader.read(reader.keys()[0]).steps["info"]
    assert np.array_equal(found["speed"], infos["speed"])
    assert found["lives"].tolist() == infos["lives"]
    assert reader.schema["info/speed"].final
    assert "info/speed" not in open_reader(path, skip=["info/speed"]).schema
    for skip in (["info", "action"], ["infos", "actions"]):
        assert set(open_reader(path, skip=skip).schema) == {"observation", "reward"}
    assert "reward" not in open_reader(path, skip=["reward"]).schema


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("name", ["info/sped", "infos/sped", "observatoin", "terminations"])
def test_a_name_to_skip_that_is_not_there_is_refused(root, kind, name):
    infos = {"speed": np.ones(4), "deep": {"lives": np.ones(4)}}
    path = made(root, [plain_episode(3, np.random.default_rng(0), infos=infos)], data_format=kind)
    with pytest.raises(DataError, match=rf"skip '{name}': nothing has that name; expected one of .*speed"):
        open_reader(path, skip=["info/deep", "infos/deep/lives", "rewards", "dataset", name])


def test_infos_of_every_step_but_the_first_have_no_final_value(root):
    rng = np.random.default_rng(0)
    path = made(root, [plain_episode(3, rng, infos={"deep": {"speed": np.ones(3)}})])
    assert not open_reader(path).schema["info/deep/speed"].final


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(
    ("is_jpeg", "size"), [(True, (40, 32, 3)), (False, (40, 32, 3)), (True, (31, 40)), (True, (32, 40))]
)
def test_images_are_what_minari_decodes(root, kind, is_jpeg, size):
    n = 3
    episode = EpisodeBuffer(
        observations=np.random.default_rng(0).integers(0, 255, (n + 1, *size), np.uint8),
        actions=np.arange(n),
        rewards=[0.0] * n,
        terminations=[False] * n,
        truncations=[False, False, True],
    )
    space = spaces.Box(0, 255, size, np.uint8)
    made(root, [episode], observation_space=space, data_format=kind, jpeg_encoding=is_jpeg)
    expected = theirs("made-v0")[0].observations
    reader = open_reader(root / "made-v0")
    assert np.array_equal(reader.read(reader.keys()[0]).steps["observation"], expected)
    assert np.array_equal(expected, episode.observations) is not (is_jpeg and size[0] > 31)


@pytest.mark.parametrize("kind", FORMATS)
def test_text_is_refused_and_can_be_left_out(root, kind):
    rng = np.random.default_rng(0)
    whole = plain_episode(2, rng)
    episode = EpisodeBuffer(
        observations={"mission": ["a", "b", "c"], "pos": whole.observations},
        actions=whole.actions,
        rewards=whole.rewards,
        terminations=whole.terminations,
        truncations=whole.truncations,
    )
    space = spaces.Dict({"mission": spaces.Text(5), "pos": PLAIN})
    path = made(root, [episode], observation_space=space, data_format=kind)
    with pytest.raises(DataError, match=r"skip=\['observations?/mission'\]"):
        open_reader(path).schema  # noqa: B018
    assert set(open_reader(path, skip=["observation/mission"]).schema) == {"observation/pos", "action", "reward"}


def test_a_dataset_is_found_by_its_data_directory_too(root):
    assert open_reader(to_json_value(root) / "data").keys() == ["episode_0", "episode_1", "episode_2"]


def test_episodes_come_in_the_order_of_their_numbers(root):
    assert open_reader(to_json_value(root, [1] * 12)).keys()[9:] == ["episode_9", "episode_10", "episode_11"]


def test_a_key_or_a_dataset_that_is_not_there_is_an_error(root):
    with pytest.raises(EpisodeNotFoundError, match="'episode_9'"):
        open_reader(to_json_value(root)).read("episode_9")
    with pytest.raises(StoreNotFoundError, match="expected a Minari dataset"):
        open_reader(root / "nothing")


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("total_episodes", 7, "says 7 episodes, got 3"),
        ("data_format", "zarr", "expected data of format"),
        ("observation_space", None, "observation_space: expected a space"),
        ("observation_space", '{"type": "Dict", "subspaces": {"../x": {"type": "Discrete"}}}', "expected a space"),
    ],
)
def test_metadata_that_does_not_fit_is_refused(root, name, value, problem):
    path = to_json_value(root)
    about = json.loads((path / "data" / "metadata.json").read_text())
    (path / "data" / "metadata.json").write_text(json.dumps({**about, name: value}))
    with pytest.raises(FormatError, match=problem):
        open_reader(path)


def test_observations_that_are_too_few_are_refused(root):
    path = to_json_value(root)
    with h5py.File(path / "data" / "main_data.hdf5", "a") as file:
        file["episode_1/observations"].resize(2, axis=0)
    with pytest.raises(DataError, match="episode 'episode_1': field 'observation': expected 3 rows, got 2"):
        open_reader(path).read("episode_1")


def test_an_end_before_the_last_step_is_refused(root):
    path = to_json_value(root)
    with h5py.File(path / "data" / "main_data.hdf5", "a") as file:
        file["episode_0/truncations"][1] = True
    with pytest.raises(DataError, match="truncated at step 1 of 4"):
        open_reader(path).read("episode_0")


def test_links_that_leave_the_file_are_refused(root):
    path = to_json_value(root)
    with h5py.File(path / "data" / "main_data.hdf5", "a") as file:
        del file["episode_0/actions"]
        file["episode_0/actions"] = h5py.ExternalLink("/etc/passwd", "/actions")
    with pytest.raises(FormatError, match="is a link"):
        open_reader(path).read("episode_0")


@pytest.mark.parametrize(
    ("name", "spoil", "message"),
    [
        (
            "terminations",
            lambda e: e.create_dataset("terminations", (10**11,), "?", chunks=(1000,)),
            "claims shape",
        ),
        ("terminations", lambda e: e.create_group("terminations"), "terminations: expected an array, got a group"),
        ("truncations", lambda e: e.create_dataset("truncations", data=True), "expected numbers or bools, one row"),
        (
            "truncations",
            lambda e: e.create_dataset("truncations", data=np.zeros((4, 1))),
            "expected one flag per step",
        ),
        (
            "truncations",
            lambda e: e.create_dataset("truncations", data=np.zeros(4, "S1")),
            "expected numbers or bool",
        ),
        ("rewards", lambda e: e.attrs.__setitem__("trajstore_metadata", "[" * 100_000), "is not JSON"),
    ],
)
def test_flags_and_metadata_are_held_to_what_they_should_be(root, name, spoil, message):
    path = to_json_value(root)
    with h5py.File(path / "data" / "main_data.hdf5", "a") as file:
        del file["episode_0"][name]
        spoil(file["episode_0"])
    with pytest.raises((FormatError, DataError), match=message):
        open_reader(path).read("episode_0")


def test_an_episode_that_is_no_group_is_refused(root):
    path = to_json_value(root)
    with h5py.File(path / "data" / "main_data.hdf5", "a") as file:
        del file["episode_0"]
        file["episode_0"] = np.zeros(4)
    with pytest.raises(FormatError, match="episode_0: expected a group, got an array"):
        open_reader(path).read("episode_0")


def test_attributes_that_can_not_be_stored_may_be_left_out(root):
    path = to_json_value(root)
    with h5py.File(path / "data" / "main_data.hdf5", "a") as file:
        file["episode_0"].attrs["where"] = file["episode_1"].ref
    with pytest.raises(DataError, match=r"'where'.*leave it out with skip"):
        open_reader(path).read("episode_0")
    assert "where" not in open_reader(path, skip=["where"]).read("episode_0").metadata


def test_an_episode_without_steps_is_refused_saying_so(root):
    path = to_json_value(root)
    with h5py.File(path / "data" / "main_data.hdf5", "a") as file:
        for name in ("terminations", "truncations"):
            del file[f"episode_0/{name}"]
            file[f"episode_0/{name}"] = np.zeros(0, bool)
    with pytest.raises(DataError, match="episode 'episode_0': the episode has no steps"):
        open_reader(path).read("episode_0")


def test_arrays_that_the_spaces_do_not_name_are_refused(root):
    path = to_json_value(root)
    with h5py.File(path / "data" / "main_data.hdf5", "a") as file:
        file["episode_0/costs"] = np.zeros(4)
    with pytest.raises(FormatError, match=r"costs.*skip=\['costs'\]"):
        open_reader(path).read("episode_0")
    assert "costs" not in open_reader(path, skip=["costs"]).read("episode_0").steps


# ---- out of a store


def test_an_export_is_read_by_minari(root):
    import_episodes(open_reader(to_json_value(root)), root / "store")
    path = root / "again-v3"
    report = export_episodes(root / "store", open_writer(path), reread=lambda: open_reader(path))
    assert report.n_verified == 3
    dataset = minari.load_dataset("again-v3")
    assert (dataset.total_episodes, dataset.total_steps, dataset.env_spec) == (3, 9, None)
    assert dataset.observation_space == PLAIN
    assert dataset.action_space == spaces.Discrete(5)
    for ours, their in zip(dataset.iterate_episodes(), theirs("made-v0"), strict=True):
        for name in ("observations", "actions", "rewards", "terminations", "truncations"):
            assert np.array_equal(getattr(ours, name), getattr(their, name)), name
    assert "again-v3" in minari.list_local_datasets()


def test_a_dataset_that_was_exported_can_be_added_to(root):
    import_episodes(open_reader(to_json_value(root)), root / "store")
    export_episodes(root / "store", open_writer(root / "again-v0"))
    dataset = minari.load_dataset("again-v0")
    dataset.update_dataset_from_buffer([plain_episode(2, np.random.default_rng(1))])
    dataset.storage.update_episodes([plain_episode(2, np.random.default_rng(2), id=0)])
    assert [len(e) for e in dataset.iterate_episodes()] == [6, 2, 3, 2]


def test_seeds_options_ends_and_infos_go_back(root):
    rng = np.random.default_rng(0)
    infos = {"deep": {"speed": rng.normal(size=(3, 2))}, "lives": np.arange(2)}
    first = plain_episode(2, rng, (True, True), seed=7, options={"start": {"x": 1.5}}, infos=infos)
    import_episodes(open_reader(made(root, [first], description="one")), root / "store")
    export_episodes(root / "store", open_writer(root / "again-v0"))
    dataset = minari.load_dataset("again-v0")
    about = next(iter(dataset.storage.get_episode_metadata([0])))
    episode = dataset[0]
    assert (about["seed"], about["options"], about["id"]) == (7, {"start": {"x": 1.5}}, 0)
    assert np.array_equal(episode.infos["deep"]["speed"], infos["deep"]["speed"])
    assert np.array_equal(episode.infos["lives"], infos["lives"])
    assert episode.truncations.tolist() == episode.terminations.tolist() == [False, True]
    assert dataset.storage.metadata["description"] == "one"


def some_store(root, **fields):
    store = trajstore.create(root / "store")
    with store.writer() as writer:
        for n in (3, 5):
            steps = {
                "observation": {
                    "image": np.full((n + 1, 36, 40, 3), n, np.uint8),
                    "state": (np.ones((n + 1, 2), np.float32)),
                },
                "action": np.arange(n, dtype=np.int64),
                "reward": np.ones(n, np.float32),
                **{name: np.ones(n, dtype) for name, dtype in fields.items()},
            }
            writer.append_episode(steps, truncated=True, metadata={"task": {"name": "x"}, "score": 0.5})
    return root / "store"


def test_a_store_of_our_own_gets_the_widest_spaces(root):
    path = root / "group" / "own-v1"
    dataset_writer = open_writer(path, dataset_id="group/own-v1")
    export_episodes(some_store(root), dataset_writer, reread=lambda: open_reader(path))
    dataset = minari.load_dataset("group/own-v1")
    assert dataset.observation_space["image"] == spaces.Box(0, 255, (36, 40, 3), np.uint8)
    assert dataset.observation_space["state"].dtype == np.float32
    assert dataset.action_space.shape == ()
    assert dataset[1].observations["image"].shape == (6, 36, 40, 3)
    assert (dataset[1].observations["image"] == 5).all()
    assert dataset[0].truncations.tolist() == [False, False, True]


def test_metadata_of_a_store_come_back(root):
    export_episodes(some_store(root), open_writer(root / "own-v0"))
    found = open_reader(root / "own-v0").read("episode_0").metadata
    assert (found["task"], found["score"]) == ({"name": "x"}, 0.5)


def test_text_that_hdf5_would_cut_off_comes_back(root):
    dataset_writer = open_writer(root / "own-v0")
    steps = {"observation": np.zeros((3, 2), np.float32), "action": np.zeros(2, np.int64), "reward": np.zeros(2)}
    dataset_writer.write(Episode("a", steps, terminated=True, metadata={"note": "a\0b", "plain": "c"}))
    dataset_writer.finish()
    found = open_reader(root / "own-v0").read("episode_0").metadata
    assert (found["note"], found["plain"]) == ("a\0b", "c")


def test_other_fields_stand_among_the_infos_and_come_back_by_their_names(root):
    path = root / "own-v0"
    store = some_store(root, log_prob=np.float32, is_expert=bool)
    report = export_episodes(store, open_writer(path), reread=lambda: open_reader(path))
    assert report.n_verified == 2
    assert minari.load_dataset("own-v0")[0].infos["is_expert"].dtype == bool


def test_spaces_and_the_environment_can_be_given(root):
    import gymnasium

    spec = gymnasium.spec("CartPole-v1").to_json()
    dataset_writer = open_writer(
        root / "own-v0", action_space=serialize_space(spaces.Discrete(6)), env_spec=json.loads(spec)
    )
    export_episodes(some_store(root), dataset_writer)
    dataset = minari.load_dataset("own-v0")
    assert dataset.action_space == spaces.Discrete(6)
    assert dataset.env_spec.id == "CartPole-v1"


def test_metadata_that_hdf5_can_not_hold_are_refused(root):
    given = episode("a", 3, 4)
    with pytest.raises(DataError, match="metadata 'seed' can't be stored as an HDF5 attribute"):
        open_writer(root / "own-v0").write(Episode("a", given.steps, metadata={"seed": 2**70}))


def test_spaces_with_other_parts_than_the_fields_are_refused(root):
    dataset_writer = open_writer(root / "own-v0", observation_space=serialize_space(PLAIN))
    with pytest.raises(DataError, match="observation_space does not have the same parts"):
        export_episodes(some_store(root), dataset_writer)


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint16", "float16", "float64", "int64"])
def test_observations_of_every_kind_are_read_by_minari(root, dtype):
    observation = np.ones((4, 2), dtype)
    dataset_writer = open_writer(root / "kinds-v0")
    dataset_writer.write(
        Episode("a", {"observation": observation, "action": np.zeros((3, 1)), "reward": np.zeros(3)})
    )
    dataset_writer.finish()
    assert minari.load_dataset("kinds-v0")[0].observations.dtype == dtype


def episode(key, n_steps, n_observed, **ends):
    return Episode(
        key,
        {
            "observation": np.arange(n_observed, dtype=np.float32),
            "action": np.arange(n_steps),
            "reward": np.zeros(n_steps),
        },
        **ends,
    )


def test_an_episode_without_a_final_observation_is_refused(root):
    with pytest.raises(DataError, match=r"no final observation; drop_last=True"):
        open_writer(root / "own-v0").write(episode("a", 3, 3))


def test_the_last_step_of_an_episode_without_a_final_observation_can_be_left_out(root):
    dataset_writer = open_writer(root / "own-v0", drop_last=True)
    dataset_writer.write(episode("a", 3, 3, truncated=True))
    dataset_writer.write(episode("b", 3, 4, truncated=True))
    dataset_writer.finish()
    first, second = theirs("own-v0")
    assert first.observations.tolist() == [0, 1, 2]
    assert first.truncations.tolist() == [False, False]
    assert second.truncations.tolist() == [False, False, True]


def test_steps_that_are_left_out_on_purpose_are_counted_and_the_others_verified(root):
    url, target = str(root / "store"), root / "own-v0"
    with trajstore.create(url).writer() as writer:
        for n_observed in (4, 5):
            steps = {"observation": np.arange(n_observed), "action": np.arange(4), "reward": np.ones(4)}
            writer.append_episode(steps, terminated=True)
    report = export_episodes(url, open_writer(target, drop_last=True), reread=lambda: open_reader(target))
    assert (report.n_episodes, report.n_steps, report.n_left_out, report.n_verified) == (2, 7, 1, 2)
    assert [e.terminated for e in read_all(open_reader(target))] == [False, True]


def test_an_export_that_was_abandoned_is_gone_on_with(root):
    dataset_writer = open_writer(root / "own-v0")
    dataset_writer.write(episode("a", 3, 4))
    dataset_writer.suspend()
    assert not (root / "own-v0").exists()
    dataset_writer = open_writer(root / "own-v0")
    assert dataset_writer.written_keys() == ["a"]
    dataset_writer.write(episode("b", 2, 3))
    dataset_writer.finish()
    assert [len(e) for e in theirs("own-v0")] == [3, 2]
    assert sorted(p.name for p in root.iterdir()) == ["own-v0"]
    assert sorted(p.name for p in (root / "own-v0").rglob("*")) == ["data", "main_data.hdf5", "metadata.json"]


def test_a_part_that_a_kill_has_left_half_is_written_again(root):
    dataset_writer = open_writer(root / "own-v0")
    dataset_writer.write(episode("a", 3, 4))
    part = next((root / "own-v0.partial" / "parts").iterdir())
    shutil.copy(part, part.with_name("00000001.hdf5"))
    part.with_name("00000001.hdf5").write_bytes(part.read_bytes()[:1000])
    dataset_writer = open_writer(root / "own-v0")
    dataset_writer.write(episode("b", 2, 3))
    dataset_writer.finish()
    assert [len(e) for e in theirs("own-v0")] == [3, 2]


def interrupt(*_):
    raise KeyboardInterrupt


@pytest.mark.parametrize("killed", ["sync_tree", "os.replace"])
def test_an_export_that_was_killed_at_its_end_is_finished_by_the_next_run(root, monkeypatch, killed):
    dataset_writer = open_writer(root / "own-v0")
    dataset_writer.write(episode("a", 3, 4))
    with monkeypatch.context() as patch:
        patch.setattr(f"trajstore.datasets.partial_output.{killed}", interrupt)
        with pytest.raises(KeyboardInterrupt):
            dataset_writer.finish()
    open_writer(root / "own-v0").finish()
    assert [len(e) for e in theirs("own-v0")] == [3]
    assert sorted(p.name for p in root.iterdir()) == ["own-v0"]


def test_a_place_or_a_name_that_can_not_be_is_refused(root):
    with pytest.raises(DataError, match="dataset_id: expected a name such as"):
        open_writer(root / "nameless")
    (root / "own-v0").mkdir()
    with pytest.raises(StoreExistsError, match="already exists"):
        open_writer(root / "own-v0")


def test_a_store_without_actions_is_refused(root):
    with pytest.raises(DataError, match="expected fields observation, action and reward, got observation"):
        open_writer(root / "own-v0").write(Episode("a", {"observation": np.zeros(3)}))
