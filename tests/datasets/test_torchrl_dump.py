import json
import shutil
import sys

import numpy as np
import pytest
import torch
from tensordict import NonTensorStack, TensorDict

import trajstore
from trajstore.datasets.conversion import export_episodes, import_episodes
from trajstore.datasets.interfaces import Episode
from trajstore.datasets.torchrl import open_reader, open_writer
from trajstore.errors import DataError, EpisodeNotFoundError, FormatError, SchemaError, StoreExistsError

pytest.importorskip("torchrl")
from torchrl.data import LazyMemmapStorage, LazyTensorStorage, ReplayBuffer, TensorDictReplayBuffer


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    """TorchRL reports every storage that it makes."""
    monkeypatch.setattr("torchrl._utils.logger.disabled", True)


def rollout(lengths, first=0, ends=None):
    """Steps of whole episodes, one after another; observations count on from ``first`` and never repeat."""
    parts, start = [], first
    for i, n in enumerate(lengths):
        seen = torch.arange(start, start + n + 1, dtype=torch.float32)[:, None] + torch.tensor([0.0, 0.25, 0.5])
        end = (ends or ["terminated"] * len(lengths))[i]
        flags = {name: torch.zeros(n, 1, dtype=torch.bool) for name in ("done", "terminated", "truncated")}
        if end != "cut":
            flags[end][-1] = flags["done"][-1] = True
        after = {"obs": seen[1:].clone(), "reward": torch.arange(n, dtype=torch.float32)[:, None], **flags}
        step = {
            "obs": seen[:-1].clone(),
            "action": torch.arange(start, start + n),
            **{name: torch.zeros(n, 1, dtype=torch.bool) for name in flags},
            "next": TensorDict(after, [n]),
        }
        parts.append(TensorDict(step, [n]))
        start += n + 1
    return torch.cat(parts)


def dump(tmp_path, *blocks, storage=None, kind=TensorDictReplayBuffer, size=100):
    buffer = kind(storage=LazyTensorStorage(size) if storage is None else storage, batch_size=4)
    for block in blocks:
        buffer.extend(block)
    buffer.dumps(tmp_path / "dump")
    return tmp_path / "dump"


def with_ids(block, ids):
    return block.set(("collector", "traj_ids"), torch.as_tensor(ids))


def episodes(reader):
    return [reader.read(key) for key in list(reader.keys())]


def test_a_dump_becomes_episodes_with_final_observations(tmp_path):
    path = dump(tmp_path, rollout([3, 2, 4], ends=["terminated", "truncated", "cut"]))
    found = episodes(open_reader(path))
    assert [(e.terminated, e.truncated) for e in found] == [(True, False), (False, True), (False, False)]
    assert [len(e.steps["action"]) for e in found] == [3, 2, 4]
    assert found[1].steps["obs"][:, 0].tolist() == [4, 5, 6]
    assert found[0].steps["reward"].tolist() == [0, 1, 2]


def test_the_schema_has_observations_once_and_none_of_the_flags(tmp_path):
    schema = open_reader(dump(tmp_path, rollout([3]))).schema
    assert list(schema) == ["obs", "action", "reward"]
    assert schema.final_fields == ("obs",)
    assert schema.reward == "reward"
    assert schema["reward"].shape == ()


@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage])
def test_an_import_is_verified_bit_by_bit(tmp_path, storage):
    path = dump(tmp_path, rollout([3, 2, 4]), storage=storage(20))
    report = import_episodes(open_reader(path), tmp_path / "store")
    assert (report.n_episodes, report.n_steps, report.n_verified) == (3, 9, 3)
    store = trajstore.open(tmp_path / "store")
    assert store.read_episode(2)["obs"][-1].tolist() == [11.0, 11.25, 11.5]
    assert store.episodes["return"].tolist() == [3.0, 1.0, 6.0]


def test_a_ring_is_read_from_its_oldest_step(tmp_path):
    path = dump(tmp_path, rollout([3, 3, 3]), rollout([2, 3], first=100), size=10)
    found = episodes(open_reader(path))
    assert [e.steps["action"].tolist() for e in found] == [[5, 6], [8, 9, 10], [100, 101], [103, 104, 105]]


def test_the_oldest_episode_of_a_ring_that_was_overwritten_may_be_headless(tmp_path):
    path = dump(tmp_path, rollout([3, 3, 3]), rollout([2, 3], first=100), size=10)
    first, *others = episodes(open_reader(path))
    assert first.metadata == {"headless": True}
    assert first.steps["obs"][:, 0].tolist() == [5, 6, 7]
    assert all(e.metadata == {} for e in others)


def test_a_ring_that_is_just_full_has_no_headless_episode(tmp_path):
    path = dump(tmp_path, rollout([3, 2]), size=5)
    assert [e.metadata for e in episodes(open_reader(path))] == [{}, {}]


def test_environments_side_by_side_are_lanes(tmp_path):
    block = torch.stack([rollout([2, 3]), rollout([4, 1], first=50)])  # [B, T] as collectors give it
    path = dump(tmp_path, block, storage=LazyTensorStorage(20, ndim=2), kind=ReplayBuffer)
    found = episodes(open_reader(path))
    assert [(e.metadata["lane"], e.steps["action"].tolist()) for e in found] == [
        (0, [0, 1]), (1, [50, 51, 52, 53]), (0, [3, 4, 5]), (1, [55])
    ]  # fmt: skip


def test_lanes_of_a_ring_that_was_overwritten_are_read_from_the_oldest_row(tmp_path):
    blocks = [torch.stack([rollout([3], first=k), rollout([3], first=k + 100)]) for k in (0, 10, 20)]
    path = dump(tmp_path, *blocks, storage=LazyTensorStorage(14, ndim=2), kind=ReplayBuffer)  # 7 rows for 9
    found = episodes(open_reader(path))
    assert [e.steps["action"].tolist() for e in found] == [
        [2], [102], [10, 11, 12], [110, 111, 112], [20, 21, 22], [120, 121, 122]
    ]  # fmt: skip
    assert [e.metadata.get("headless", False) for e in found] == [True, True, False, False, False, False]


def test_trajectory_ids_part_episodes_that_were_cut(tmp_path):
    block = with_ids(rollout([3, 2], ends=["cut", "cut"]), [7, 7, 7, 9, 9])
    found = episodes(open_reader(dump(tmp_path, block)))
    assert [(e.metadata["traj_id"], len(e.steps["action"])) for e in found] == [(7, 3), (9, 2)]


def test_rollouts_one_after_another_are_joined_by_trajectory(tmp_path):
    mine, theirs = rollout([6]), rollout([6], first=50)
    block = torch.cat([mine[:3], theirs[:3], mine[3:], theirs[3:]])
    path = dump(tmp_path, with_ids(block, [1] * 3 + [2] * 3 + [1] * 3 + [2] * 3))
    found = episodes(open_reader(path))
    assert [e.steps["action"].tolist() for e in found] == [[0, 1, 2, 3, 4, 5], [50, 51, 52, 53, 54, 55]]
    assert [e.terminated for e in found] == [True, True]


def test_any_rollout_of_a_ring_that_was_overwritten_may_be_headless(tmp_path):
    mine, theirs = rollout([6, 2]), rollout([6, 2], first=50)
    ids = [1] * 3 + [2] * 3 + [1] * 3 + [3] * 2 + [2] * 3 + [4] * 2
    block = torch.cat([mine[:3], theirs[:3], mine[3:], theirs[3:]])
    found = episodes(open_reader(dump(tmp_path, with_ids(block, ids), size=14)))
    assert [(e.metadata["traj_id"], e.metadata.get("headless", False)) for e in found] == [
        (1, True), (2, True), (3, False), (4, False)
    ]  # fmt: skip


def test_trajectories_of_one_number_that_do_not_go_on_stay_apart(tmp_path):
    block = torch.cat([rollout([2], ends=["cut"]), rollout([2], first=50), rollout([2], first=70)])
    found = episodes(open_reader(dump(tmp_path, with_ids(block, [1, 1, 2, 2, 1, 1]))))
    assert [e.steps["action"].tolist() for e in found] == [[0, 1], [50, 51], [70, 71]]


def test_a_trajectory_that_has_ended_does_not_go_on(tmp_path):
    block = torch.cat([rollout([2]), rollout([2], first=50), rollout([2], first=2)])  # begins where the first ended
    found = episodes(open_reader(dump(tmp_path, with_ids(block, [1, 1, 2, 2, 1, 1]))))
    assert [len(e.steps["action"]) for e in found] == [2, 2, 2]


def test_lanes_may_have_more_room_than_the_storage_was_asked_for(tmp_path):
    block = torch.stack([rollout([5, 3]), rollout([4, 4], first=50)])
    path = dump(tmp_path, block, storage=LazyTensorStorage(15, ndim=2), kind=ReplayBuffer)
    assert json.loads((path / "storage" / "meta.json").read_text())["shape"] == [8, 2]
    assert sum(len(e.steps["action"]) for e in episodes(open_reader(path))) == 16


def test_next_observations_that_do_not_follow_are_refused_naming_the_step(tmp_path):
    block = rollout([5])
    block["next", "obs"][2] += 1
    reader = open_reader(dump(tmp_path, block))
    with pytest.raises(
        DataError, match=r"'0': 'next/obs' of step 2 differs from 'obs' of the following step.*keep_next=True"
    ):
        reader.read("0")


def test_next_observations_that_do_not_follow_can_be_kept(tmp_path):
    block = rollout([5])
    block["next", "obs"][2] += 1
    path = dump(tmp_path, block)
    import_episodes(open_reader(path, keep_next=True), tmp_path / "store")
    store = trajstore.open(tmp_path / "store")
    assert list(store.schema) == ["obs", "action", "next/obs", "reward"]
    assert np.array_equal(store.read_episode(0)["next"]["obs"], block["next", "obs"].numpy())


def test_flags_that_contradict_each_other_are_refused(tmp_path):
    block = rollout([3])
    block["next", "terminated"][-1] = False
    with pytest.raises(DataError, match="'next/done' is set at the last step, but neither"):
        open_reader(dump(tmp_path, block)).read("0")


def test_an_end_at_the_start_of_a_step_is_refused(tmp_path):
    block = rollout([3])
    block["done"][1] = True
    path = dump(tmp_path, block)
    with pytest.raises(DataError, match=r"'done' is set at the start of a step.*skip=\['done'\]"):
        open_reader(path).read("0")
    open_reader(path, skip=["index", "done"]).read("0")


@pytest.mark.parametrize(
    ("left_out", "ends"),
    [
        (["terminated", "truncated"], [(True, False), (True, False)]),
        (["terminated"], [(True, False), (False, True)]),
        (["done"], [(True, False), (False, True)]),
    ],
)
def test_flags_that_are_missing_follow_from_the_others(tmp_path, left_out, ends):
    block = rollout([3, 2], ends=["terminated", "truncated"]).exclude(*(("next", name) for name in left_out))
    found = episodes(open_reader(dump(tmp_path, block)))
    assert [(e.terminated, e.truncated) for e in found] == ends


def test_negative_zero_is_not_zero_and_nan_is_itself(tmp_path):
    block = rollout([4])
    block["obs"][1] = block["next", "obs"][0] = float("nan")
    block["obs"][2], block["next", "obs"][1] = 0.0, 0.0
    open_reader(dump(tmp_path, block.clone())).read("0")
    block["next", "obs"][1] = -0.0
    with pytest.raises(DataError, match="step 1"):
        open_reader(dump(tmp_path, block)).read("0")


def test_bfloat16_is_kept(tmp_path):
    block = rollout([3])
    block["obs"], block["next", "obs"] = block["obs"].bfloat16(), block["next", "obs"].bfloat16()
    reader = open_reader(dump(tmp_path, block))
    assert reader.schema["obs"].dtype == "bfloat16"
    assert import_episodes(reader, tmp_path / "store").n_verified == 1


def test_what_is_not_a_tensor_is_refused_and_can_be_left_out(tmp_path):
    block = rollout([3]).set("note", NonTensorStack("a", "b", "c"))
    path = dump(tmp_path, block)
    with pytest.raises(FormatError, match=r"note: expected a TensorDict of tensors.*skip=\['note'\]"):
        open_reader(path)
    assert "note" not in open_reader(path, skip=["index", "note"]).schema


def test_a_name_to_skip_that_is_not_there_is_refused(tmp_path):
    path = dump(tmp_path, rollout([3]))
    with pytest.raises(
        DataError, match=r"skip 'next/rewards': nothing has that name; expected one of .*next/reward"
    ):
        open_reader(path, skip=["index", "next/rewards"])


def test_no_pickle_is_opened(tmp_path):
    path = dump(tmp_path, rollout([3]))
    assert (path / "prefetch.pkl").exists()
    opened = []
    sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" else None)
    reader = open_reader(path)
    reader.read("0")
    opened = [name for name in opened if str(path) in name]
    assert opened
    assert not [name for name in opened if name.endswith((".pkl", ".pickle", ".t", ".pt"))]


def test_the_place_in_the_ring_is_kept_when_asked_for(tmp_path):
    path = dump(tmp_path, rollout([3]))
    assert open_reader(path, skip=()).read("0").steps["index"].tolist() == [0, 1, 2]


def test_a_file_that_is_too_short_is_refused(tmp_path):
    path = dump(tmp_path, rollout([3]))
    file = path / "storage" / "next" / "obs.memmap"
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(FormatError, match=r"next/obs.memmap: expected 1200 bytes"):
        open_reader(path)


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("writer/metadata.json", {"cursor": 1}, "are inconsistent"),
        ("writer/metadata.json", {"data": []}, "expected a count 'cursor'"),
        ("storage/storage_metadata.json", {"len": -1}, "expected a count 'len'"),
        ("storage/storage_metadata.json", {"len": 10**9}, "are inconsistent"),
        ("storage/storage_metadata.json", [], "expected an object"),
    ],
)
def test_what_the_dump_says_of_itself_is_checked(tmp_path, name, value, problem):
    path = dump(tmp_path, rollout([3]))
    (path / name).write_text(json.dumps(value))
    with pytest.raises(FormatError, match=problem):
        open_reader(path)


def test_a_name_that_leaves_the_directory_is_refused(tmp_path):
    path = dump(tmp_path, rollout([3]))
    about = json.loads((path / "storage" / "meta.json").read_text())
    about["../../secret"] = about.pop("obs")
    (path / "storage" / "meta.json").write_text(json.dumps(about))
    with pytest.raises(SchemaError, match="secret"):
        open_reader(path)


def test_slices_in_the_slots_of_a_storage_are_refused(tmp_path):
    block = torch.stack([rollout([3]), rollout([3], first=50)])
    with pytest.raises(FormatError, match="are inconsistent"):
        open_reader(dump(tmp_path, block, kind=ReplayBuffer))


def test_a_dump_that_does_not_say_where_episodes_end_is_refused(tmp_path):
    block = rollout([3]).exclude("next")
    with pytest.raises(DataError, match="expected 'next/done' or 'collector/traj_ids'"):
        open_reader(dump(tmp_path, block))


def test_a_key_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(EpisodeNotFoundError, match="'7'"):
        open_reader(dump(tmp_path, rollout([3]))).read("7")


# ---- out of a store


def store_of(tmp_path, *, ends=("terminated", "truncated", "cut"), n_steps=4):
    store = trajstore.create(tmp_path / "store")
    with store.writer() as writer:
        for i, end in enumerate(ends):
            steps = {
                "observation": {"state": np.arange(n_steps + 1, dtype=np.float32)[:, None] + 100 * i},
                "action": np.arange(n_steps, dtype=np.int64) + 10 * i,
                "reward": np.ones(n_steps, np.float32),
            }
            writer.append_episode(steps, terminated=end == "terminated", truncated=end == "truncated")
    return trajstore.open(tmp_path / "store")


def test_an_export_is_read_by_torchrl(tmp_path):
    export_episodes(store_of(tmp_path), open_writer(tmp_path / "dump", batch_size=5))
    buffer = TensorDictReplayBuffer(storage=LazyMemmapStorage(12), batch_size=2)
    buffer.loads(tmp_path / "dump")
    data = buffer[:]
    assert len(buffer) == 12
    assert buffer.batch_size == 5
    assert data["observation", "state"][:, 0].tolist() == [0, 1, 2, 3, 100, 101, 102, 103, 200, 201, 202, 203]
    assert data["next", "observation", "state"][:, 0].tolist() == [
        1,
        2,
        3,
        4,
        101,
        102,
        103,
        104,
        201,
        202,
        203,
        204,
    ]
    assert data["next", "reward"].shape == (12, 1)
    assert torch.nonzero(data["next", "terminated"])[:, 0].tolist() == [3]
    assert torch.nonzero(data["next", "truncated"])[:, 0].tolist() == [7]
    assert torch.nonzero(data["next", "done"])[:, 0].tolist() == [3, 7]
    assert data["collector", "traj_ids"].tolist() == [0] * 4 + [1] * 4 + [2] * 4


def test_a_buffer_with_more_room_goes_on_after_an_export(tmp_path):
    export_episodes(store_of(tmp_path), open_writer(tmp_path / "dump", capacity=20))
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(20), batch_size=2)
    buffer.loads(tmp_path / "dump")
    assert len(buffer) == 12
    buffer.extend(buffer[:3].exclude("index").clone())
    assert len(buffer) == 15
    assert buffer[12:15]["action"].tolist() == [0, 1, 2]


def test_a_capacity_that_is_too_small_is_refused(tmp_path):
    with pytest.raises(DataError, match="at least the 8 steps so far, got 5"):
        export_episodes(store_of(tmp_path), open_writer(tmp_path / "dump", capacity=5))
    report = export_episodes(
        tmp_path / "store", open_writer(tmp_path / "dump", capacity=12)
    )  # goes on with another
    assert (report.n_skipped, report.n_episodes) == (1, 2)


@pytest.mark.parametrize("options", [{"capacity": "abc"}, {"capacity": 0}, {"batch_size": 2.5}])
def test_counts_that_are_none_are_refused_before_anything_is_written(options, tmp_path):
    with pytest.raises(DataError, match="expected a positive integer"):
        open_writer(tmp_path / "dump", **options)
    assert not list(tmp_path.iterdir())


def test_rewards_at_the_root_and_of_the_next_step_come_back_both(tmp_path):
    number = torch.arange(6.0)[:, None]
    done = (number == 2) | (number == 5)
    after = {"observation": number + 1, "reward": number + 10, "done": done, "terminated": done}
    data = TensorDict({"observation": number, "reward": number + 9, "next": after}, batch_size=[6])
    buffer = TensorDictReplayBuffer(storage=LazyMemmapStorage(6), batch_size=2)
    buffer.extend(data.clone())
    buffer.dumps(tmp_path / "dump")
    import_episodes(open_reader(tmp_path / "dump"), tmp_path / "store")
    again = tmp_path / "again"
    report = export_episodes(tmp_path / "store", open_writer(again), reread=lambda: open_reader(again))
    assert report.n_verified == 2
    other = TensorDictReplayBuffer(storage=LazyTensorStorage(6), batch_size=2)
    other.loads(again)
    for key in ("observation", "reward", ("next", "observation"), ("next", "reward")):
        assert torch.equal(other[:][key], data[key]), key


def test_fields_that_would_get_one_place_are_refused(tmp_path):
    observation = np.arange(6, dtype=np.float32).reshape(3, 2)
    steps = {"observation": observation, "action": np.zeros(2), "next": {"observation": observation[1:]}}
    with pytest.raises(DataError, match="two fields would both be called 'next/observation'"):
        open_writer(tmp_path / "dump").write(Episode("a", steps))


def test_what_was_exported_comes_back_the_same(tmp_path):
    path = tmp_path / "dump"
    report = export_episodes(store_of(tmp_path), open_writer(path), reread=lambda: open_reader(path))
    assert report.n_verified == 3
    assert [(e.terminated, e.truncated) for e in episodes(open_reader(path))] == [
        (True, False), (False, True), (False, False)
    ]  # fmt: skip


def test_what_was_imported_goes_back_the_same(tmp_path):
    block = rollout([3, 2, 4], ends=["terminated", "truncated", "cut"])
    path = dump(tmp_path, block)
    import_episodes(open_reader(path), tmp_path / "store")
    export_episodes(tmp_path / "store", open_writer(tmp_path / "again"))
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(9), batch_size=2)
    buffer.loads(tmp_path / "again")
    for key in ("obs", "action", ("next", "obs"), ("next", "reward"), ("next", "done"), ("next", "truncated")):
        assert torch.equal(buffer[:][key], block[key]), key


def test_both_ends_of_an_episode_go_back(tmp_path):
    block = rollout([3])
    block["next", "truncated"][-1] = True
    import_episodes(open_reader(dump(tmp_path, block)), tmp_path / "store")
    export_episodes(tmp_path / "store", open_writer(tmp_path / "again"))
    last = open_reader(tmp_path / "again").read("0")
    assert (last.terminated, last.truncated) == (True, True)


def episode(key, n_steps, n_observed, **ends):
    steps = {"obs": np.arange(n_observed, dtype=np.float32), "action": np.arange(n_steps, dtype=np.int64)}
    return Episode(key, steps, **ends)


def test_an_episode_without_a_final_observation_is_refused(tmp_path):
    dataset_writer = open_writer(tmp_path / "dump")
    dataset_writer.write(episode("a", 3, 4))
    with pytest.raises(DataError, match=r"field 'obs' has no final value.*drop_last=True"):
        dataset_writer.write(episode("b", 3, 3))


def test_the_last_step_of_an_episode_without_a_final_observation_can_be_left_out(tmp_path):
    dataset_writer = open_writer(tmp_path / "dump", observations=["obs"], drop_last=True)
    dataset_writer.write(episode("a", 3, 3, terminated=True))
    dataset_writer.write(episode("b", 3, 4, terminated=True))
    dataset_writer.finish()
    found = episodes(open_reader(tmp_path / "dump"))
    assert [len(e.steps["action"]) for e in found] == [2, 3]
    assert [e.terminated for e in found] == [False, True]


def test_steps_that_are_left_out_on_purpose_are_counted_and_the_others_verified(tmp_path):
    url, target = str(tmp_path / "store"), tmp_path / "dump"
    with trajstore.create(url).writer() as writer:
        for n_steps, n_observed in ((4, 5), (1, 1), (4, 4)):
            writer.append_episode({"obs": np.arange(n_observed), "action": np.arange(n_steps)}, terminated=True)
    report = export_episodes(url, open_writer(target, drop_last=True), reread=lambda: open_reader(target))
    assert (report.n_episodes, report.n_steps, report.n_left_out, report.n_verified) == (3, 7, 2, 3)
    assert [e.terminated for e in episodes(open_reader(target))] == [True, False]


def test_a_step_of_which_every_field_has_a_next_value_can_not_be_left_out(tmp_path):
    dataset_writer = open_writer(tmp_path / "dump", observations=["obs", "action"], drop_last=True)
    with pytest.raises(DataError, match="the number of steps is ambiguous"):
        dataset_writer.write(episode("a", 3, 3))


def test_an_export_that_was_abandoned_is_gone_on_with(tmp_path):
    dataset_writer = open_writer(tmp_path / "dump")
    dataset_writer.write(episode("a", 3, 4, terminated=True))
    dataset_writer.suspend()
    assert not (tmp_path / "dump").exists()
    dataset_writer = open_writer(tmp_path / "dump")
    assert dataset_writer.written_keys() == ["a"]
    dataset_writer.write(episode("b", 2, 3, truncated=True))
    dataset_writer.finish()
    assert [len(e.steps["action"]) for e in episodes(open_reader(tmp_path / "dump"))] == [3, 2]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["dump"]


def test_what_a_killed_export_wrote_after_its_last_note_is_written_again(tmp_path):
    dataset_writer = open_writer(tmp_path / "dump")
    dataset_writer.write(episode("a", 3, 4, terminated=True))
    dataset_writer.suspend()
    dataset_writer.write(
        Episode("b", {"obs": np.full(3, 9, np.float32), "action": np.full(2, 9)})
    )  # no note: as if killed
    dataset_writer = open_writer(tmp_path / "dump")
    assert dataset_writer.written_keys() == ["a"]
    dataset_writer.write(episode("b", 2, 3, truncated=True))
    dataset_writer.finish()
    found = episodes(open_reader(tmp_path / "dump"))
    assert [e.steps["action"].tolist() for e in found] == [[0, 1, 2], [0, 1]]


def test_a_line_of_the_journal_that_was_torn_does_not_count(tmp_path):
    dataset_writer = open_writer(tmp_path / "dump")
    dataset_writer.write(episode("a", 3, 4, terminated=True))
    dataset_writer.suspend()
    with (tmp_path / "dump.journal").open("ab") as journal:
        journal.write(b'{"key": "b", "n_ro')
    dataset_writer = open_writer(tmp_path / "dump")
    assert dataset_writer.written_keys() == ["a"]
    dataset_writer.write(episode("b", 2, 3))
    dataset_writer.suspend()
    assert open_writer(tmp_path / "dump").written_keys() == ["a", "b"]


def test_an_export_is_not_gone_on_with_other_options(tmp_path):
    dataset_writer = open_writer(tmp_path / "dump")
    dataset_writer.write(episode("a", 3, 4))
    dataset_writer.suspend()
    both = rf"remove it and {tmp_path / 'dump'}\.journal to start over"
    with pytest.raises(DataError, match=rf"dump\.partial was .*: drop_last was false and is true; .*{both}"):
        open_writer(tmp_path / "dump", drop_last=True)


@pytest.mark.parametrize("journal", [None, "", "[]\n", '{"key": "a"}\n'])
def test_what_no_export_has_left_is_not_touched(tmp_path, journal):
    (tmp_path / "dump.partial").mkdir()
    (tmp_path / "dump.partial/mine").touch()
    if journal is not None:
        (tmp_path / "dump.journal").write_text(journal)
    with pytest.raises(StoreExistsError, match="is not from an unfinished export"):
        open_writer(tmp_path / "dump")
    assert (tmp_path / "dump.partial/mine").exists()


def test_an_export_that_was_killed_before_its_first_episode_binds_nobody(tmp_path):
    open_writer(tmp_path / "dump")
    dataset_writer = open_writer(tmp_path / "dump", drop_last=True)
    dataset_writer.write(episode("a", 3, 4))
    dataset_writer.finish()
    assert len(episodes(open_reader(tmp_path / "dump"))) == 1


def test_a_place_that_is_taken_is_refused(tmp_path):
    (tmp_path / "dump").mkdir()
    with pytest.raises(StoreExistsError, match="already exists"):
        open_writer(tmp_path / "dump")
    shutil.move(tmp_path / "dump", tmp_path / "dump.partial")
    with pytest.raises(StoreExistsError, match="not from an unfinished export"):
        open_writer(tmp_path / "dump")


def test_episodes_of_other_fields_are_refused(tmp_path):
    dataset_writer = open_writer(tmp_path / "dump")
    dataset_writer.write(episode("a", 3, 4))
    with pytest.raises(DataError, match=r"'action': expected .*int64.*got .*int32"):
        dataset_writer.write(Episode("b", {"obs": np.zeros(3, np.float32), "action": np.zeros(2, np.int32)}))
    with pytest.raises(SchemaError, match="collector"):
        open_writer(tmp_path / "other").write(Episode("b", {"collector": np.zeros(2)}))
    with pytest.raises(DataError, match="'next/done' has the name"):
        dataset_writer.write(Episode("b", {"next": {"done": np.zeros(2, bool)}}))
