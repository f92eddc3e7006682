"""HDF5 files of robomimic and D4RL: what is in them comes as it is, or not at all; and goes back."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import trajstore
from trajstore.datasets import d4rl, hdf5_output, robomimic
from trajstore.datasets.conversion import export_episodes, import_episodes
from trajstore.errors import (
    DataError,
    FormatError,
    MissingExtraError,
    StoreExistsError,
    StoreNotFoundError,
    TrajstoreError,
)

Arrays = dict[str, Any]
ENV_ARGS = json.dumps({"env_name": "Lift", "type": 1, "env_kwargs": {"robots": ["Panda"]}})


def noise(seed: int, *shape: int) -> Any:
    """Any bits at all: NaN, infinities, -0.0."""
    return np.random.default_rng(seed).integers(0, 1 << 32, shape, np.uint32).view(np.float32)


# ---- robomimic -----------------------------------------------------------------------------------------


def demo_of(n: int, seed: int) -> Arrays:
    rng = np.random.default_rng(seed)
    eef, image = noise(seed, n + 1, 3), rng.integers(0, 256, (n + 1, 4, 4, 3), np.uint8)
    return {
        "obs/robot0_eef_pos": eef[:-1],
        "obs/agentview_image": image[:-1],
        "next_obs/robot0_eef_pos": eef[1:],
        "next_obs/agentview_image": image[1:],
        "actions": rng.normal(size=(n, 7)),
        "rewards": rng.normal(size=n),
        "dones": np.eye(n, dtype=np.int64)[-1] * (seed % 2),
        "states": rng.normal(size=(n, 11)),
    }


@pytest.fixture
def demos(tmp_path: Path) -> Path:
    """A file of 12 demonstrations as robomimic lays it out; demo_10 comes after demo_9."""
    path = tmp_path / "demos.hdf5"
    with h5py.File(path, "w") as file:
        data = file.create_group("data")
        data.attrs["env_args"], data.attrs["total"] = ENV_ARGS, sum(5 + i for i in range(12))
        for i in range(12):
            demo = data.create_group(f"demo_{i}")
            demo.attrs["num_samples"], demo.attrs["model_file"] = 5 + i, f"<mujoco model='{i}'/>" * 5000
            for name, values in demo_of(5 + i, i).items():
                demo.create_dataset(name, data=values, compression="gzip" if "image" in name else None)
        file["mask/train"] = np.array([f"demo_{i}" for i in range(9)], "S")
        file["mask/valid"] = np.array([b"demo_9", b"demo_10", b"demo_11"])
        file["mask/none"] = np.array([], "S1")
    return path


def imported(reader: Any, url: str) -> trajstore.Store:
    import_episodes(reader, url, fsync=False, commit_seconds=None)
    reader.close()
    return trajstore.open(url)


def test_demonstrations_come_bit_by_bit_with_observations_once(demos: Path, url: str) -> None:
    store = imported(robomimic.open_reader(demos), url)
    assert list(store.episodes["source_key"]) == [f"demo_{i}" for i in range(12)]
    assert set(store.schema or ()) == {
        "observation/robot0_eef_pos",
        "observation/agentview_image",
        "action",
        "reward",
        "dones",
        "states",
    }
    for i in range(12):
        expected, got = demo_of(5 + i, i), store.read_episode(i)
        eef = got["observation"]["robot0_eef_pos"].view(np.uint32)
        np.testing.assert_array_equal(eef[:-1], expected["obs/robot0_eef_pos"].view(np.uint32))
        np.testing.assert_array_equal(eef[1:], expected["next_obs/robot0_eef_pos"].view(np.uint32))
        np.testing.assert_array_equal(got["states"], expected["states"])
        assert got["action"].dtype == np.float64
        assert store.episodes.row(i)["end"] == ("terminated" if i % 2 else "cut")


def test_masks_attributes_and_env_args_are_kept(demos: Path, url: str) -> None:
    table = imported(robomimic.open_reader(demos), url).episodes
    assert [table.metadata(i)["masks"] for i in (0, 8, 9)] == [["train"], ["train"], ["valid"]]
    assert table.metadata(3)["attributes"] == {"model_file": "<mujoco model='3'/>" * 5000}
    assert table.metadata(0)["dataset"] == {
        "attributes": {"env_args": ENV_ARGS},
        "masks": ["none", "train", "valid"],
    }
    assert "dataset" not in table.metadata(1)


def test_what_is_skipped_is_left_out(demos: Path, url: str) -> None:
    skip = ["states", "obs/agentview_image", "model_file", "mask/train", "demo_11"]
    store = imported(robomimic.open_reader(demos, skip=skip), url)
    assert set(store.schema or ()) == {"observation/robot0_eef_pos", "action", "reward", "dones"}
    assert store.episodes.metadata(1) == {}
    assert len(store) == 11


@pytest.mark.parametrize("name", ["reward", "obs/eef", "mask/trains", "demo_12345", "data"])
def test_a_name_to_skip_that_is_not_there_is_refused(name: str, demos: Path) -> None:
    with pytest.raises(DataError, match=rf"skip '{name}': nothing has that name; expected one of .*rewards"):
        robomimic.open_reader(demos, skip=["rewards", name])


def test_a_name_to_skip_may_be_of_some_demonstrations_only(demos: Path) -> None:
    with h5py.File(demos, "r+") as file:
        last = file["data"][max(file["data"])]
        last["extra"], last.attrs["note"] = np.zeros(3), "x"
    robomimic.open_reader(demos, skip=["extra", "note", "obs", "obs/robot0_eef_pos"]).close()


def test_a_next_observation_that_is_another_is_refused_with_its_step_or_kept(demos: Path, url: str) -> None:
    with h5py.File(demos, "r+") as file:
        file["data/demo_2/next_obs/robot0_eef_pos"][3] = 7
        other = file["data/demo_2/next_obs/robot0_eef_pos"][()]
    with pytest.raises(DataError, match=r"demo_2: 'next_obs/robot0_eef_pos' of step 3 .*keep_next=True"):
        imported(robomimic.open_reader(demos), url)
    store = imported(robomimic.open_reader(demos, keep_next=True), url + "-kept")
    np.testing.assert_array_equal(store.read_episode(2)["next_observation"]["robot0_eef_pos"], other)
    assert store.schema is not None
    assert not store.schema.final_fields


def test_next_observations_of_another_dtype_are_refused(demos: Path, url: str) -> None:
    with h5py.File(demos, "r+") as file:
        values = file["data/demo_0/next_obs/robot0_eef_pos"][()].view(np.int32)
        del file["data/demo_0/next_obs/robot0_eef_pos"]
        file["data/demo_0/next_obs/robot0_eef_pos"] = values
    with pytest.raises(DataError, match=r"demo_0: 'next_obs/robot0_eef_pos': expected float32 .* got int32"):
        imported(robomimic.open_reader(demos), url)


def test_a_file_goes_through_a_store_and_back_unchanged(demos: Path, url: str, tmp_path: Path) -> None:
    imported(robomimic.open_reader(demos), url)
    target = tmp_path / "out.hdf5"
    report = export_episodes(url, robomimic.open_writer(target), reread=lambda: robomimic.open_reader(target))
    assert report.n_verified == 12
    assert contents(target) == contents(demos)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["demos.hdf5", "out.hdf5", "store"]


def contents(path: Path) -> dict[str, Any]:
    """All arrays and attributes of a file, but for those of ours."""
    found: dict[str, Any] = {}

    def visit(name: str, node: Any) -> None:
        found.update({f"{name}@{key}": value for key, value in node.attrs.items() if key != "trajstore"})
        if isinstance(node, h5py.Dataset):
            found[name] = (node.dtype.kind, node.shape, np.asarray(node[()]).tobytes())

    with h5py.File(path, "r") as file:
        file.visititems(visit)
    return found


def simple_store(url: str) -> trajstore.Store:
    """As a user of Gymnasium has it: no robomimic near."""
    with trajstore.create(url, fsync=False).writer() as writer:
        for i in range(3):
            steps = {
                "observation": noise(i, 6 + i, 4),
                "action": np.arange(5 + i),
                "reward": np.arange(5.0 + i),
                "info": {"speed": noise(i + 9, 5 + i)},
            }
            writer.append_episode(steps, terminated=i == 0, truncated=i == 1, metadata={"task": f"t{i}"})
    return trajstore.open(url)


def test_a_store_of_ours_becomes_a_file_of_robomimics(url: str, tmp_path: Path) -> None:
    store, target = simple_store(url), tmp_path / "out.hdf5"
    export_episodes(store, robomimic.open_writer(target), reread=lambda: robomimic.open_reader(target))
    with h5py.File(target, "r") as file:
        assert set(file["data/demo_0"]) == {"obs", "next_obs", "actions", "rewards", "dones", "info"}
        assert set(file["data/demo_0/obs"]) == {"flat"}
        assert [list(file[f"data/demo_{i}/dones"]) for i in range(2)] == [[0, 0, 0, 0, 1], [0] * 6]
        assert (file["data"].attrs["total"], file["data/demo_2"].attrs["num_samples"]) == (18, 7)
    again = imported(robomimic.open_reader(target), url + "-again")
    assert list(again.episodes["end"]) == ["terminated", "truncated", "cut"]
    assert again.episodes.metadata(1) == {"task": "t1"}


def test_a_final_value_that_is_no_observation_has_no_place(url: str, tmp_path: Path) -> None:
    with trajstore.create(url).writer() as writer:
        writer.append_episode({"state": np.zeros((4, 2)), "action": np.zeros(3)})
    with pytest.raises(DataError, match="'state' has a final value, which the format cannot hold"):
        export_episodes(url, robomimic.open_writer(tmp_path / "out.hdf5"))
    target = tmp_path / "less.hdf5"
    export_episodes(url, robomimic.open_writer(target), fields=["action"])
    assert set(contents(target)) >= {"data/demo_0/actions", "data/demo_0/dones"}


# ---- D4RL ----------------------------------------------------------------------------------------------


def flat_arrays(lengths: list[int], *, with_next: bool = True) -> Arrays:
    """Episodes end by turns terminated and by timeout; the last is cut."""
    rng, n = np.random.default_rng(0), sum(lengths)
    observations = [noise(i, length + 1, 3) for i, length in enumerate(lengths)]
    terminals, timeouts = np.zeros(n, bool), np.zeros(n, bool)
    for i, stop in enumerate(np.cumsum(lengths)[:-1]):
        (timeouts if i % 2 else terminals)[stop - 1] = True
    arrays = {
        "observations": np.concatenate([o[:-1] for o in observations]),
        "actions": rng.normal(size=(n, 2)).astype(np.float32),
        "rewards": rng.normal(size=n).astype(np.float32),
        "terminals": terminals,
        "timeouts": timeouts,
        "infos/qpos": rng.normal(size=(n, 5)),
    }
    later = {"next_observations": np.concatenate([o[1:] for o in observations])}
    return arrays | later if with_next else arrays


def write_flat(path: Path, arrays: Arrays) -> Path:
    with h5py.File(path, "w") as file:
        for name, values in arrays.items():
            file[name] = values
        file["metadata/algorithm"] = "SAC"
        file["metadata/policy/fc0/weight"] = noise(99, 4, 4)
    return path


LENGTHS = [4, 7, 1, 9, 3]


@pytest.mark.parametrize("with_next", [True, False])
def test_episodes_are_cut_where_the_flags_say(tmp_path: Path, url: str, with_next: bool) -> None:
    arrays = flat_arrays(LENGTHS, with_next=with_next)
    store = imported(d4rl.open_reader(write_flat(tmp_path / "d.hdf5", arrays)), url)
    assert list(store.episodes["length"]) == LENGTHS
    assert list(store.episodes["end"]) == ["terminated", "truncated", "terminated", "truncated", "cut"]
    assert set(store.episodes["has_final"]) == {with_next}
    stop = 0
    for i, n in enumerate(LENGTHS):
        start, stop, got = stop, stop + n, store.read_episode(i)
        observations = got["observation"][:n].view(np.uint32)
        np.testing.assert_array_equal(observations, arrays["observations"][start:stop].view(np.uint32))
        np.testing.assert_array_equal(got["infos"]["qpos"], arrays["infos/qpos"][start:stop])


def test_a_flat_file_goes_through_a_store_and_back_unchanged(tmp_path: Path, url: str) -> None:
    arrays = flat_arrays(LENGTHS)
    arrays["timeouts"][3] = True  # as well as its terminal
    path, target = write_flat(tmp_path / "d.hdf5", arrays), tmp_path / "out.hdf5"
    imported(d4rl.open_reader(path), url)
    export_episodes(url, d4rl.open_writer(target), reread=lambda: d4rl.open_reader(target))
    assert contents(target) == contents(path)


def test_flags_are_found_across_the_blocks_they_are_read_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(d4rl, "_FLAGS_PER_READ", 4)
    reader = d4rl.open_reader(write_flat(tmp_path / "d.hdf5", flat_arrays(LENGTHS)))
    assert [len(reader.read(str(i)).steps["reward"]) for i in range(5)] == LENGTHS
    reader.close()


def test_old_files_without_timeouts_are_cut_by_length(tmp_path: Path, url: str) -> None:
    arrays = flat_arrays([5, 5, 2], with_next=False)
    del arrays["timeouts"]
    reader = d4rl.open_reader(write_flat(tmp_path / "d.hdf5", arrays), max_episode_steps=5)
    store = imported(reader, url)
    assert list(store.episodes["length"]) == [5, 5, 2]
    assert list(store.episodes["end"]) == ["terminated", "truncated", "cut"]


def test_old_files_without_timeouts_are_refused_until_somebody_says_where_episodes_end(tmp_path: Path) -> None:
    arrays = flat_arrays([5, 5, 2], with_next=False)
    del arrays["timeouts"]
    path = write_flat(tmp_path / "d.hdf5", arrays)
    with pytest.raises(
        DataError, match=r"d.hdf5 has no 'timeouts'.*: give the environment's max_episode_steps, or 0 if"
    ):
        d4rl.open_reader(path)
    reader = d4rl.open_reader(path, max_episode_steps=0)
    assert [len(reader.read(key).steps["reward"]) for key in "01"] == [5, 7]
    assert not reader.read("1").truncated
    reader.close()


@pytest.mark.parametrize("n", [-1, "5", True])
def test_a_length_that_is_none_is_refused(n: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="max_episode_steps: expected a number of steps"):
        d4rl.open_reader(write_flat(tmp_path / "d.hdf5", flat_arrays(LENGTHS)), max_episode_steps=n)


@pytest.mark.parametrize("name", ["terminals", "timeouts", "metadata"])
def test_a_field_that_flat_files_have_no_place_for_is_refused(name: str, url: str, tmp_path: Path) -> None:
    with trajstore.create(url).writer() as writer:
        writer.append_episode({"action": np.zeros(3), name: np.ones(3)})
    with pytest.raises(DataError, match=f"field '{name}' has a name that D4RL files use for something else"):
        export_episodes(url, d4rl.open_writer(tmp_path / "out.hdf5"))


def test_metadata_that_others_gave_the_same_names_are_kept_or_refused(url: str, tmp_path: Path) -> None:
    steps, target = {"action": np.zeros(3)}, tmp_path / "out.hdf5"
    with trajstore.create(url).writer() as writer:
        writer.append_episode(steps, metadata={"masks": 3, "dataset": {"masks": "x", "env_spec": {"id": "a"}}})
        writer.append_episode(steps, metadata={"dataset": "mine", "attributes": {"scale": 0.5}})
    export_episodes(url, robomimic.open_writer(target), reread=lambda: robomimic.open_reader(target))
    reader = robomimic.open_reader(target)
    assert reader.read("demo_0").metadata["masks"] == 3
    assert reader.read("demo_0").metadata["dataset"]["env_spec"] == {"id": "a"}
    assert reader.read("demo_1").metadata == {"attributes": {"scale": 0.5}, "dataset": "mine"}
    reader.close()
    export_episodes(url, d4rl.open_writer(tmp_path / "flat.hdf5"))
    with trajstore.create(url + "-odd").writer() as writer:
        writer.append_episode(steps, metadata={"attributes": {"odd": {"a": None}}})
    with pytest.raises(DataError, match="attribute 'odd': HDF5 can't hold"):
        export_episodes(url + "-odd", robomimic.open_writer(tmp_path / "odd.hdf5"))


def test_a_name_to_skip_that_a_flat_file_has_not_is_refused(tmp_path: Path) -> None:
    path = write_flat(tmp_path / "d.hdf5", flat_arrays(LENGTHS))
    with pytest.raises(DataError, match=r"skip 'timeout': nothing has that name; expected one of .*timeouts"):
        d4rl.open_reader(path, skip=["timeout"])


def test_arrays_of_another_length_are_named_and_may_be_skipped(tmp_path: Path, url: str) -> None:
    arrays = flat_arrays(LENGTHS) | {"extra/odd": np.zeros(3)}
    path = write_flat(tmp_path / "d.hdf5", arrays)
    with pytest.raises(
        DataError, match=r"/extra/odd: expected 24 rows, one per step, got 3; .*skip=\['extra/odd'\]"
    ):
        d4rl.open_reader(path)
    assert len(imported(d4rl.open_reader(path, skip=["extra"]), url)) == 5


def test_episodes_with_and_without_a_final_observation_do_not_go_into_one_flat_file(
    url: str, tmp_path: Path
) -> None:
    with trajstore.create(url).writer() as writer:
        for n in (4, 3):
            writer.append_episode({"observation": np.zeros((n, 2)), "action": np.zeros(3)})
    with pytest.raises(DataError, match=r"'next_observations': expected .* as in the first episode"):
        export_episodes(url, d4rl.open_writer(tmp_path / "out.hdf5"))
    chosen = tmp_path / "chosen.hdf5"
    export_episodes(url, d4rl.open_writer(chosen), where=lambda table: table["has_final"])
    assert len(contents(chosen)["terminals"][1]) == 1


def peak_of_a_million_rows(directory: str) -> int:
    """Import a flat file of a million rows, 100 MB of observations; how far memory rose."""
    from tests.replay.test_memory import status_bytes

    path = Path(directory) / "million.hdf5"
    with h5py.File(path, "w") as file:
        observations = file.create_dataset("observations", (1_000_000, 25), np.float32)
        for start in range(0, 1_000_000, 50_000):
            observations[start : start + 50_000] = noise(start, 50_000, 25)
        file["rewards"] = np.zeros(1_000_000, np.float32)
        file["terminals"], file["timeouts"] = np.arange(1, 1_000_001) % 1000 == 0, np.zeros(1_000_000, bool)
    first = d4rl.open_reader(path)
    first.read("0")
    first.close()
    before = status_bytes("VmRSS")
    reader = d4rl.open_reader(path)
    options = {"fsync": False, "commit_seconds": None, "buffer_bytes": "8MiB"}
    assert import_episodes(reader, f"{directory}/store", **options).n_verified == 1000
    reader.close()
    return status_bytes("VmHWM") - before


@pytest.mark.slow
def test_a_million_rows_are_never_in_memory_at_once(tmp_path: Path) -> None:
    assert int(in_process(f"peak_of_a_million_rows({str(tmp_path)!r})").stdout) < 64 << 20


def in_process(call: str) -> subprocess.CompletedProcess[str]:
    code = f"import tests.datasets.test_hdf5 as t; print(t.{call})"
    root = str(Path(__file__).parents[2])
    return subprocess.run(
        [sys.executable, "-c", code], cwd=root, timeout=300, check=False, capture_output=True, text=True
    )


# ---- exports that are killed ---------------------------------------------------------------------------


def export_and_die(kind: str, url: str, target: str, n: int) -> None:
    """Export until ``n`` episodes are written; then be killed in the middle of the next."""
    module = {"robomimic": robomimic, "d4rl": d4rl}[kind]
    fill = module._write_group

    def dying(group: Any, *arguments: Any) -> None:
        fill(group, *arguments)
        if len(dataset_writer.written_keys()) == n:
            os.kill(os.getpid(), signal.SIGKILL)

    if kind == "robomimic":
        hdf5_output._FILE_BYTES = 1  # every episode in a separate temporary file
    else:
        hdf5_output._FILE_SECONDS = 0.0  # the same
    module._write_group = dying  # type: ignore[attr-defined]
    dataset_writer = module.open_writer(target)  # type: ignore[attr-defined]
    export_episodes(url, dataset_writer)


@pytest.mark.parametrize("kind", ["robomimic", "d4rl"])
def test_a_killed_export_goes_on_and_is_the_same_as_one_that_was_not(kind: str, url: str, tmp_path: Path) -> None:
    module: Any = {"robomimic": robomimic, "d4rl": d4rl}[kind]
    store, target = simple_store(url), tmp_path / "out.hdf5"
    for n in (1, 2):
        died = in_process(f"export_and_die({kind!r}, {url!r}, {str(target)!r}, {n})")
        assert died.returncode == -signal.SIGKILL, died.stderr
        assert not target.exists()
    report = export_episodes(store, module.open_writer(target), reread=lambda: module.open_reader(target))
    assert (report.n_skipped, report.n_episodes, report.n_verified) == (2, 1, 3)
    whole = tmp_path / "whole.hdf5"
    export_episodes(store, module.open_writer(whole))
    assert contents(target) == contents(whole)


@pytest.mark.parametrize("module", [robomimic, d4rl])
def test_an_export_that_fails_goes_on_after_what_came_whole(
    module: Any, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, target, fill = simple_store(url), tmp_path / "out.hdf5", module._write_group

    def failing(group: Any, *arguments: Any) -> None:
        fill(group, *arguments)
        if group.name == "/2":
            raise DataError("no room")

    monkeypatch.setattr(module, "_write_group", failing)
    with pytest.raises(DataError, match="no room"):
        export_episodes(store, module.open_writer(target))
    monkeypatch.undo()
    report = export_episodes(store, module.open_writer(target), reread=lambda: module.open_reader(target))
    assert (report.n_skipped, report.n_episodes, report.n_verified) == (2, 1, 3)


@pytest.mark.parametrize("module", [robomimic, d4rl])
def test_an_export_does_not_replace_what_is_there(module: Any, url: str, tmp_path: Path) -> None:
    target = tmp_path / "out.hdf5"
    target.write_bytes(b"mine")
    with pytest.raises(StoreExistsError, match="already exists"):
        module.open_writer(target)
    assert target.read_bytes() == b"mine"


# ---- files that are not what they should be ------------------------------------------------------------


def with_external_link(file: Any) -> None:
    file["data/demo_0/secret"] = h5py.ExternalLink("other.hdf5", "/x")


def with_soft_link(file: Any) -> None:
    file["data/demo_0/secret"] = h5py.SoftLink("/data/demo_1/actions")


def with_external_storage(file: Any) -> None:
    file["data/demo_0"].create_dataset("secret", (5,), np.uint8, external=[("/etc/passwd", 0, 5)])


def with_virtual_array(file: Any) -> None:
    layout = h5py.VirtualLayout((5,), np.uint8)
    layout[:] = h5py.VirtualSource("other.hdf5", "x", (5,))
    file["data/demo_0"].create_virtual_dataset("secret", layout)


def with_a_circle_of_links(file: Any) -> None:
    file["data/demo_0/secret"] = h5py.SoftLink("/data/demo_0/secret")


def with_a_type(file: Any) -> None:
    file["data/demo_0/secret"] = np.dtype("f4")


def with_strings(file: Any) -> None:
    file["data/demo_0/secret"] = np.array(["a"] * 5, object)


def with_a_scalar(file: Any) -> None:
    file["data/demo_0/secret"] = 1.0


def with_pairs(file: Any) -> None:
    file["data/demo_0/secret"] = np.zeros(5, [("a", "f4"), ("b", "i4")])


def with_a_claim(file: Any) -> None:
    file["data/demo_0"].create_dataset("secret", (5, 1 << 44), np.uint8, chunks=(1, 1 << 20))


def with_a_circle(file: Any) -> None:
    file["data/demo_0/secret"] = file["data/demo_0"]


def with_many_paths_to_few_groups(file: Any) -> None:
    group = file.create_group("data/demo_0/secret")
    for _ in range(12):
        below = group.create_group("0")
        for name in "12345":
            group[name] = below
        group = below


def with_two_names(file: Any) -> None:
    file["data/demo_0/secret"] = file["data/demo_0/actions"]


def with_many_claims(file: Any) -> None:
    for i in range(100):
        file["data/demo_0"].create_dataset(f"secret/{i}", (5, 10_000_000), np.uint8, chunks=(1, 1 << 20))


def with_a_name_in_no_encoding(file: Any) -> None:
    file["data/demo_0/secret/x"] = np.zeros(5)
    file["data/demo_0/secret"][b"na\xffme"] = np.zeros(5)


def with_another_length(file: Any) -> None:
    file["data/demo_0/secret"] = np.zeros(4)


def with_an_odd_name(file: Any) -> None:
    file["data/demo_0/secret name"] = np.zeros(5)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (with_external_link, "'secret' is a link"),
        (with_soft_link, "'secret' is a link"),
        (with_a_circle_of_links, "'secret' is a link"),
        (with_a_type, "/data/demo_0/secret: expected a group or an array, got Datatype"),
        (with_external_storage, "/data/demo_0/secret is stored in other files"),
        (with_virtual_array, "/data/demo_0/secret is stored in other files"),
        (with_strings, r"/data/demo_0/secret: expected numbers or bools.*skip=\['secret'\]"),
        (with_a_scalar, r"/data/demo_0/secret: expected numbers or bools.*skip=\['secret'\]"),
        (with_pairs, r"/data/demo_0/secret: expected numbers or bools.*skip=\['secret'\]"),
        (with_a_claim, "/data/demo_0/secret claims shape"),
        (with_a_circle, "has two names"),
        (with_many_paths_to_few_groups, "has two names"),
        (with_two_names, r"has two names, 'actions' and 'secret'"),
        (with_many_claims, "/data/demo_0: arrays claim .* bytes, more than a file of this size can hold"),
        (with_a_name_in_no_encoding, r"/data/demo_0/secret: expected names in UTF-8, got b'na\\xffme'"),
        (with_another_length, r"/data/demo_0/secret: expected 5 rows, one per step, got 4.*skip=\['secret'\]"),
        (with_an_odd_name, "demos.hdf5: /data: field name 'secret name'.*leave it out with skip"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_can_not_be_read_safely_or_kept_whole_is_refused(
    spoil: Callable[[Any], None], message: str, demos: Path, url: str
) -> None:
    with h5py.File(demos, "r+") as file:
        spoil(file)
    with pytest.raises((FormatError, DataError, trajstore.SchemaError), match=message):
        imported(robomimic.open_reader(demos), url)
    name = "secret name" if spoil is with_an_odd_name else "secret"
    assert imported(robomimic.open_reader(demos, skip=[name]), url + "-skipped")


@pytest.mark.parametrize("open_reader", [robomimic.open_reader, d4rl.open_reader])
def test_other_files_are_refused_with_their_name(open_reader: Callable[[Path], Any], tmp_path: Path) -> None:
    text, other, torn = tmp_path / "text.hdf5", tmp_path / "other.hdf5", tmp_path / "torn.hdf5"
    text.write_text("no HDF5")
    with h5py.File(other, "w") as file:
        file["x"] = np.zeros(1000)
    torn.write_bytes(other.read_bytes()[:-200])
    for path in (text, other, torn):
        with pytest.raises((FormatError, DataError), match=path.name):
            open_reader(path)
    with pytest.raises(StoreNotFoundError, match="file not found"):
        open_reader(tmp_path / "none.hdf5")


def test_without_h5py_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "h5py", None)
    for open_one in (robomimic.open_reader, robomimic.open_writer, d4rl.open_reader, d4rl.open_writer):
        with pytest.raises(MissingExtraError, match="pip install h5py"):
            open_one(tmp_path / "x.hdf5")
    assert not list(tmp_path.iterdir())


def test_a_damaged_chunk_is_an_error_that_names_it(demos: Path, url: str) -> None:
    with h5py.File(demos, "r") as file:
        chunk = file["data/demo_4/obs/agentview_image"].id.get_chunk_info(0)
    data = bytearray(demos.read_bytes())
    data[chunk.byte_offset : chunk.byte_offset + chunk.size] = bytes(chunk.size)
    demos.write_bytes(data)
    with pytest.raises(FormatError, match="/data/demo_4/obs/agentview_image: rows 0 to 9 can't be read"):
        imported(robomimic.open_reader(demos), url)


def test_a_mask_of_demonstrations_that_are_not_there_is_refused(demos: Path) -> None:
    with h5py.File(demos, "r+") as file:
        file["mask/odd"] = np.array([b"demo_77"])
    with pytest.raises(FormatError, match=r"lists 'demo_77', which does not exist; .*skip=\['mask/odd'\]"):
        robomimic.open_reader(demos)
    robomimic.open_reader(demos, skip=["mask/odd"]).close()


def test_what_is_no_step_is_not_read_from_other_files_either(demos: Path, tmp_path: Path) -> None:
    with h5py.File(demos, "r+") as file:
        file["mask"].create_dataset("secret", (2,), "S4", external=[("/etc/passwd", 0, 8)])
    with pytest.raises(FormatError, match="/mask/secret is stored in other files"):
        robomimic.open_reader(demos)
    path = write_flat(tmp_path / "d.hdf5", flat_arrays(LENGTHS))
    with h5py.File(path, "r+") as file:
        file["metadata"].create_dataset("secret", (1 << 40,), np.uint8, chunks=(1 << 20,))
    with pytest.raises(
        DataError, match=r"/metadata/secret: [0-9]+ values are too many for metadata; .* skip=\['metadata/secret'\]"
    ):
        d4rl.open_reader(path)
    d4rl.open_reader(path, skip=["metadata/secret"]).close()
    with h5py.File(path, "r+") as file:
        del file["metadata"]
        file["metadata"] = h5py.ExternalLink("other.hdf5", "/x")
    with pytest.raises(FormatError, match="'metadata' is a link"):
        d4rl.open_reader(path)


@pytest.mark.parametrize(
    "value",
    [
        "text",
        "",
        3,
        0.5,
        True,
        np.nan,
        np.int32(3),
        np.float32(0.1),
        noise(3, 2, 2),
        np.array([], np.int8),
        ["a", "b"],
    ],
    ids=repr,
)
def test_attributes_go_through_a_store_and_back_as_they_are(value: Any, demos: Path, url: str) -> None:
    with h5py.File(demos, "r+") as file:
        file["data/demo_1"].attrs["more"] = value
    imported(robomimic.open_reader(demos), url)
    target = demos.with_name("out.hdf5")
    export_episodes(url, robomimic.open_writer(target))
    with h5py.File(demos) as before, h5py.File(target) as after:
        mine, theirs = (np.asarray(file["data/demo_1"].attrs["more"]) for file in (before, after))
    assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
    assert mine.tobytes() == theirs.tobytes() or list(mine) == list(theirs)  # text lies elsewhere


@pytest.mark.parametrize("value", [b"\xff", h5py.Empty("f4"), np.array([["a"], ["b"]], object), 1 + 2j])
def test_an_attribute_that_can_not_be_kept_is_named_and_may_be_skipped(value: Any, demos: Path, url: str) -> None:
    with h5py.File(demos, "r+") as file:
        file["data/demo_1"].attrs["more"] = value
    with pytest.raises(DataError, match=r"/data/demo_1: 'more': expected text.*skip"):
        imported(robomimic.open_reader(demos), url)
    imported(robomimic.open_reader(demos, skip=["more"]), url + "-skipped")


@pytest.mark.parametrize("values", [np.arange(3), np.zeros(0)])
def test_a_mask_that_lists_no_names_is_refused(values: Any, demos: Path) -> None:
    with h5py.File(demos, "r+") as file:
        file["mask/odd"] = values
    with pytest.raises(FormatError, match="/mask/odd: expected names of demonstrations"):
        robomimic.open_reader(demos)


def test_big_endian_arrays_come_with_the_same_values(demos: Path, url: str) -> None:
    with h5py.File(demos, "r+") as file:
        for demo in file["data"].values():
            demo["force"] = np.arange(len(demo["actions"]), dtype=">f8")
    np.testing.assert_array_equal(imported(robomimic.open_reader(demos), url).read_episode(0)["force"], range(5))


def test_an_attribute_that_claims_to_be_ours_is_checked(demos: Path, url: str) -> None:
    for text in ("[", "[]", '{"metadata": 3}'):
        with h5py.File(demos, "r+") as file:
            file["data/demo_0"].attrs["trajstore"] = text
        with pytest.raises(TrajstoreError, match="attribute 'trajstore'"):
            imported(robomimic.open_reader(demos), url)
