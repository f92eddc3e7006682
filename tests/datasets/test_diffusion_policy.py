"""Replay buffers of diffusion_policy and UMI: read in place, imported, exported; also what a crash left."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numcodecs
import numpy as np
import pytest
import zarr

import trajstore
from trajstore import Field, Schema
from trajstore.datasets.conversion import export_episodes, import_episodes
from trajstore.datasets.decompression_limit import exceeds_decoded_size
from trajstore.datasets.diffusion_policy import open_in_place, open_reader, open_writer
from trajstore.datasets.diffusion_policy import writer as diffusion_policy_writer
from trajstore.errors import (
    CorruptionError,
    DataError,
    EpisodeNotFoundError,
    FormatError,
    MissingExtraError,
    StoreNotFoundError,
)

LENGTHS = [4, 1, 9, 6]
ENDS = [4, 5, 14, 20]
DEFAULT = numcodecs.Blosc("lz4", clevel=5, shuffle=numcodecs.Blosc.NOSHUFFLE)  # what diffusion_policy takes


def data_of(n: int = 20) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {
        "action": rng.integers(0, 1 << 32, (n, 2), np.uint32).view(np.float32),  # any bits: NaN, -0.0
        "img": rng.integers(0, 256, (n, 8, 8, 3), np.uint8),
        "state": rng.normal(size=(n, 5)),
    }


def put(path: Path, name: str, values: Any, **options: Any) -> None:
    """An array as zarr 2 lays it out."""
    root = zarr.open_group(str(path), mode="a", zarr_format=2)
    options = {"chunks": (3, *np.shape(values)[1:]), "compressors": DEFAULT, "fill_value": 0} | options
    whole = {"write_empty_chunks": True}  # as zarr 2 does
    root.create_array(name, data=np.asarray(values), overwrite=True, config=whole, **options)


def resize(path: Path, name: str, n: int) -> None:
    array: Any = zarr.open_group(str(path), mode="r+", zarr_format=2)[name]
    array.resize((n, *array.shape[1:]))


def rewrite(path: Path, name: str, **changes: Any) -> None:
    """Change the metadata of an array."""
    metadata = path / name / ".zarray"
    metadata.write_text(json.dumps(json.loads(metadata.read_text()) | changes))


@pytest.fixture
def buffer(tmp_path: Path) -> Path:
    """A replay buffer as diffusion_policy has it on disk."""
    path = tmp_path / "buffer.zarr"
    for name, values in data_of().items():
        put(path, f"data/{name}", values)
    put(path, "meta/episode_ends", np.array(ENDS), compressors=None)
    return path


def packed(path: Path) -> Path:
    """The same in a zip file, as UMI has it."""
    target = path.with_suffix(".zarr.zip")
    with zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as file:
        for found in sorted(path.rglob("*")):
            if found.is_file():
                file.write(found, found.relative_to(path).as_posix())
    return target


def imported(reader: Any, url: str) -> trajstore.Store:
    import_episodes(reader, url, fsync=False, commit_seconds=None)
    reader.close()
    return trajstore.open(url)


@pytest.fixture(params=["directory", "zip"])
def either(request: pytest.FixtureRequest, buffer: Path) -> Path:
    return buffer if request.param == "directory" else packed(buffer)


# ---- in place and in ------------------------------------------------------------------------------------


def test_episodes_are_read_in_place(either: Path) -> None:
    found, data = open_in_place(either), data_of()
    assert (len(found), list(found.lengths), list(found.schema)) == (4, LENGTHS, ["action", "img", "state"])
    for i, (n, stop) in enumerate(zip(LENGTHS, ENDS, strict=True)):
        episode = found.read_episode(i)
        assert {name: values.tobytes() for name, values in episode.items()} == {
            name: values[stop - n : stop].tobytes() for name, values in data.items()
        }
    part = found.read_episode(2, fields=["state"], start=1, stop=3)
    np.testing.assert_array_equal(part["state"], data["state"][6:8])
    assert list(part) == ["state"]
    found.close()


def test_episodes_and_steps_that_are_not_there_are_refused(buffer: Path) -> None:
    found = open_in_place(buffer)
    with pytest.raises(EpisodeNotFoundError, match="has 4 episodes, numbered from 0; got 4"):
        found.read_episode(4)
    with pytest.raises(IndexError, match="episode 0 has 4 steps, got start 0 and stop 5"):
        found.read_episode(0, stop=5)


def test_a_buffer_is_imported_bit_by_bit(either: Path, url: str) -> None:
    store = imported(open_reader(either), url)
    assert list(store.episodes["length"]) == LENGTHS
    assert set(store.episodes["end"]) == {"cut"}  # nobody says how they ended
    assert store.schema is not None
    assert store.schema.reward is None
    action = store.read_episode(2)["action"]
    np.testing.assert_array_equal(action.view(np.uint32), data_of()["action"][5:14].view(np.uint32))


def test_what_else_stands_in_meta_is_kept(buffer: Path, url: str) -> None:
    put(buffer, "meta/score", np.array([0.5, 1.0, np.nan, 2.0]))
    put(buffer, "meta/camera", np.eye(3, dtype=np.float32))
    put(buffer, "meta/operator", np.array(["a", "b", "c", "d"]), compressors=None)
    table = imported(open_reader(buffer), url).episodes
    assert [table.metadata(i)["operator"] for i in range(4)] == ["a", "b", "c", "d"]
    assert table.metadata(1)["score"] == 1.0
    assert table.metadata(0)["dataset"]["meta"]["camera"]["shape"] == [3, 3]
    reader = open_reader(buffer, skip=["meta/score", "meta/camera", "img"])
    assert list(reader.read("1").metadata) == ["operator"]
    assert list(reader.schema) == ["action", "state"]


# ---- out ------------------------------------------------------------------------------------------------


def contents(path: Path) -> dict[str, Any]:
    """All arrays of a buffer, as zarr itself reads them."""
    store = zarr.storage.ZipStore(path, mode="r") if path.suffix == ".zip" else str(path)
    root = zarr.open_group(store, mode="r", zarr_format=2)
    groups: dict[str, Any] = {name: root[name] for name in ("data", "meta")}
    return {
        f"{name}/{key}": (str(array.dtype), array.shape, np.asarray(array[...]).tobytes())
        for name, group in groups.items()
        for key, array in group.arrays()
    }


@pytest.mark.parametrize("name", ["out.zarr", "out.zarr.zip"])
def test_a_buffer_goes_through_a_store_and_back_unchanged(
    name: str, buffer: Path, url: str, tmp_path: Path
) -> None:
    imported(open_reader(buffer), url)
    target = tmp_path / name
    report = export_episodes(url, open_writer(target), reread=lambda: open_reader(target))
    assert report.n_verified == 4
    got = contents(target)
    assert {key: got.pop(f"meta/{key}")[1] for key in ("terminated", "truncated")} == {
        "terminated": (4,),
        "truncated": (4,),
    }
    assert got == contents(buffer)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["buffer.zarr", name, "store"])


def store_with_finals(url: str) -> trajstore.Store:
    rng = np.random.default_rng(1)
    with trajstore.create(url, fsync=False).writer() as writer:
        for i, n in enumerate([3, 5, 2]):
            steps = {
                "observation": {
                    "image": rng.integers(0, 256, (n + (i < 2), 4, 4), np.uint8),
                    "pose": rng.normal(size=(n + (i < 2), 3)),
                },
                "action": rng.normal(size=(n, 2)).astype(np.float32),
                "reward": np.ones(n),
            }
            writer.append_episode(steps, terminated=i == 0, truncated=i == 1)
    return trajstore.open(url)


def test_groups_final_values_and_ends_find_a_place_and_come_back(url: str, tmp_path: Path) -> None:
    store, target = store_with_finals(url), tmp_path / "out.zarr"
    export_episodes(store, open_writer(target), reread=lambda: open_reader(target))
    found = contents(target)
    assert {key for key in found if key.startswith("data/")} == {
        "data/observation.image",
        "data/observation.pose",
        "data/action",
        "data/reward",
    }
    again = imported(open_reader(target), url + "-again")
    assert again.schema == trajstore.Schema(
        {
            "observation": {
                "image": trajstore.Field("uint8", (4, 4), final=True),
                "pose": trajstore.Field("float64", (3,), final=True),
            },
            "action": trajstore.Field("float32", (2,)),
            "reward": trajstore.Field("float64"),
        },
        episode={"source_key": str},
    )
    assert list(again.episodes["has_final"]) == [True, True, False]
    assert list(again.episodes["end"]) == ["terminated", "truncated", "cut"]
    for i in range(3):
        expected, got = store.read_episode(i), again.read_episode(i)
        np.testing.assert_array_equal(got["observation"]["pose"], expected["observation"]["pose"])


def test_an_exported_buffer_is_what_diffusion_policy_asks_for(url: str, tmp_path: Path) -> None:
    """Its constructor: groups data and meta of arrays alone, Zarr v2, every array as long as the last end says."""
    target = tmp_path / "out.zarr"
    export_episodes(store_with_finals(url), open_writer(target))
    root = zarr.open_group(str(target), mode="r", zarr_format=2)
    data, meta = root["data"], root["meta"]
    assert isinstance(data, zarr.Group)
    assert isinstance(meta, zarr.Group)
    assert not list(data.groups())
    assert not list(meta.groups())
    ends: Any = meta["episode_ends"]
    assert (ends.dtype, list(ends[:])) == (np.int64, [3, 8, 10])
    assert {array.shape[0] for _, array in data.arrays()} == {10}


def export_and_die(url: str, target: str, n: int) -> None:
    """Export until ``n`` episodes are written; then be killed when a part of the next is."""
    put_rows = diffusion_policy_writer.DiffusionPolicyWriter._write_rows

    def dying(self: Any, path: str, start: int, values: Any) -> None:
        put_rows(self, path, start, values)
        if len(self.written_keys()) == n and path == "data/observation.image":
            os.kill(os.getpid(), signal.SIGKILL)

    diffusion_policy_writer._BATCH_BYTES = 1  # every episode at once
    diffusion_policy_writer.DiffusionPolicyWriter._write_rows = dying  # type: ignore[method-assign]
    export_episodes(url, open_writer(target))


def test_a_killed_export_goes_on_and_is_the_same_as_one_that_was_not(url: str, tmp_path: Path) -> None:
    store, target, whole = store_with_finals(url), tmp_path / "out.zarr", tmp_path / "whole.zarr"
    for n in (0, 1, 2):
        code = f"import tests.datasets.test_diffusion_policy as t; t.export_and_die({url!r}, {str(target)!r}, {n})"
        root = str(Path(__file__).parents[2])
        died = subprocess.run([sys.executable, "-c", code], cwd=root, timeout=120, check=False)
        assert died.returncode == -signal.SIGKILL
        assert not target.exists()
    report = export_episodes(store, open_writer(target), reread=lambda: open_reader(target))
    assert (report.n_skipped, report.n_episodes) == (2, 1)
    export_episodes(store, open_writer(whole))
    assert contents(target) == contents(whole)


def test_episodes_written_together_are_the_same_as_one_by_one(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, together, alone = store_with_finals(url), tmp_path / "together.zarr", tmp_path / "alone.zarr"
    export_episodes(store, open_writer(together), where=lambda table: table["length"] != 3)
    monkeypatch.setattr(diffusion_policy_writer, "_BATCH_BYTES", 1)
    export_episodes(store, open_writer(alone), where=lambda table: table["length"] != 3)
    assert contents(alone) == contents(together)


def test_an_export_that_fails_goes_on_after_what_came_whole(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, target, flat = store_with_finals(url), tmp_path / "out.zarr", diffusion_policy_writer._rename_fields
    calls: list[Any] = []

    def failing(steps: Any) -> Any:
        calls.append(steps)
        if len(calls) == 3:
            raise DataError("no room")
        return flat(steps)

    monkeypatch.setattr(diffusion_policy_writer, "_rename_fields", failing)
    with pytest.raises(DataError, match="no room"):
        export_episodes(store, open_writer(target))
    report = export_episodes(store, open_writer(target), reread=lambda: open_reader(target))
    assert (report.n_skipped, report.n_episodes, report.n_verified) == (2, 1, 3)


def test_files_of_a_put_that_did_not_end_are_not_exported(url: str, tmp_path: Path) -> None:
    dataset_writer = open_writer(tmp_path / "out.zarr")
    left = next(tmp_path.glob("out.zarr.partial")) / "data" / "0.abc.partial"
    left.parent.mkdir(exist_ok=True)
    left.write_bytes(b"torn")
    dataset_writer.suspend()
    export_episodes(store_with_finals(url), open_writer(tmp_path / "out.zarr"))
    assert not list((tmp_path / "out.zarr").rglob("*.partial"))


# ---- what a crash left ----------------------------------------------------------------------------------


def grow_data(path: Path) -> None:
    for name in data_of():
        resize(path, f"data/{name}", 31)


def grow_some_data(path: Path) -> None:
    resize(path, "data/action", 31)


def grow_ends(path: Path) -> None:
    grow_data(path)
    resize(path, "meta/episode_ends", 5)


def move_ends(path: Path) -> None:
    os.rename(path / "meta/episode_ends", path / "meta/_temp")


def copy_no_ends(path: Path) -> None:
    move_ends(path)
    put(path, "meta/episode_ends", np.zeros(4, np.int64), compressors=None)


def copy_some_ends(path: Path) -> None:
    move_ends(path)
    put(path, "meta/episode_ends", np.array([4, 5, 14, 0]), compressors=None)


def remove_some_of_the_old_ends(path: Path) -> None:
    shutil.copytree(path / "meta/episode_ends", path / "meta/_temp")
    (path / "meta/_temp/0").unlink()


def remove_metadata_of_the_old_ends(path: Path) -> None:
    shutil.copytree(path / "meta/episode_ends", path / "meta/_temp")
    (path / "meta/_temp/.zarray").unlink()


@pytest.mark.parametrize(
    "crash",
    [
        grow_data,
        grow_some_data,
        grow_ends,
        move_ends,
        copy_no_ends,
        copy_some_ends,
        remove_some_of_the_old_ends,
        remove_metadata_of_the_old_ends,
    ],
)
def test_a_buffer_that_its_writer_died_over_is_read_as_it_was(
    crash: Callable[[Path], None], buffer: Path, url: str
) -> None:
    crash(buffer)
    store = imported(open_reader(buffer), url)
    assert list(store.episodes["length"]) == LENGTHS
    np.testing.assert_array_equal(store.read_episode(3)["state"], data_of()["state"][14:20])


def test_an_array_that_was_being_chunked_anew_is_an_error_that_says_what_to_do(buffer: Path) -> None:
    os.rename(buffer / "data/img", buffer / "data/_temp")
    with pytest.raises(
        FormatError, match=r"data/_temp is left over .* rename it to the array's name, .*skip=\['_temp'\]"
    ):
        open_in_place(buffer)
    assert list(open_in_place(buffer, skip=["_temp"]).schema) == ["action", "state"]


def test_a_first_episode_that_never_became_whole_leaves_an_empty_dataset(buffer: Path, url: str) -> None:
    put(buffer, "meta/episode_ends", np.zeros(1, np.int64), compressors=None)
    assert len(open_in_place(buffer)) == 0
    with pytest.raises(DataError, match="holds no episodes"):
        imported(open_reader(buffer), url)


# ---- what is not as it should be ------------------------------------------------------------------------


@pytest.mark.parametrize("ends", [[4, 4, 20], [4, 14, 5], [-1, 5, 20], [0, 5, 20], np.array([4, 14, 5], "u8")])
def test_ends_that_do_not_rise_are_refused(buffer: Path, ends: Any) -> None:
    put(buffer, "meta/episode_ends", np.asarray(ends), compressors=None)
    with pytest.raises(FormatError, match="meta/episode_ends: expected increasing integers"):
        open_in_place(buffer)


@pytest.mark.parametrize("ends", [np.array([4.0, 5.0]), np.ones((2, 2), np.int64)])
def test_ends_that_are_no_row_of_whole_numbers_are_refused(buffer: Path, ends: Any) -> None:
    put(buffer, "meta/episode_ends", ends, compressors=None)
    with pytest.raises(FormatError, match="meta/episode_ends: expected integers, got"):
        open_in_place(buffer)


def test_final_values_that_are_not_there_are_missed(url: str, tmp_path: Path) -> None:
    target = tmp_path / "out.zarr"
    export_episodes(store_with_finals(url), open_writer(target))
    resize(target, "meta/final_observation.pose", 1)
    with pytest.raises(FormatError, match=r"meta/final_observation.pose: expected at least the 2 rows"):
        open_in_place(target)
    shutil.rmtree(target / "meta/has_final")
    with pytest.raises(FormatError, match="expected meta/has_final with a flag for each of the 3 episodes"):
        open_in_place(target)


def test_fields_that_would_get_one_name_are_refused(url: str, tmp_path: Path) -> None:
    with trajstore.create(url).writer() as writer:
        writer.append_episode({"a": {"b": np.zeros(3)}, "a.b": np.ones(3)})
    with pytest.raises(DataError, match=r"would both be called 'a\.b'; leave one out"):
        export_episodes(url, open_writer(tmp_path / "out.zarr"))


def test_an_array_that_is_too_short_is_refused(buffer: Path) -> None:
    resize(buffer, "data/state", 19)
    with pytest.raises(FormatError, match=r"data/state: expected at least the 20 rows .* got shape \(19, 5\)"):
        open_in_place(buffer)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"compressor": {"id": "pickle"}}, "uses the codec 'pickle'; expected one of blosc"),
        ({"filters": [{"id": "pickle"}]}, "uses the codec 'pickle'"),
        ({"dtype": "|O"}, r"expected numbers or bools, got dtype '\|O'; leave it out with skip"),
        ({"dtype": "<U5"}, "expected numbers or bools, got dtype '<U5'"),
        ({"dtype": 3}, "expected numbers or bools, got dtype 3"),
        ({"shape": [1 << 50, 5]}, "claims shape .*, more than its chunks can hold"),
        ({"shape": [20, "5"]}, "expected shape of at least 0"),
        ({"shape": "20"}, "expected shape as a list"),
        ({"chunks": [0]}, "expected chunks of at least 1"),
        ({"chunks": [5]}, "can't be read"),
        ({"chunks": [1 << 40, 5]}, "claims chunks .*, more than its chunks can hold"),
        ({"filters": 5}, "expected filters as a list"),
        ({"filters": [{"id": "zlib"}]}, "uses the codec 'zlib'; expected one of delta, shuffle"),
        ({"compressor": {"id": ["blosc"]}}, "uses the codec"),
    ],
)
def test_metadata_that_is_hostile_or_can_not_be_kept_is_refused(
    changes: dict[str, Any], message: str, buffer: Path
) -> None:
    rewrite(buffer, "data/state", **changes)
    with pytest.raises((FormatError, DataError), match=f"data/state.*{message}"):
        open_in_place(buffer)
    assert len(open_in_place(buffer, skip=["state"])) == 4


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "is not JSON"), ("[]", "not the metadata"), ("9" * (1 << 20) + "9", "not the metadata")],
)
def test_a_file_that_is_no_metadata_is_refused(text: str, message: str, buffer: Path) -> None:
    (buffer / "data/state/.zarray").write_text(text)
    with pytest.raises(FormatError, match=f"data/state/.zarray is {message.removeprefix('is ')}"):
        open_in_place(buffer)


def test_a_group_among_the_arrays_is_refused(buffer: Path) -> None:
    put(buffer, "data/group/x", np.zeros(20))
    with pytest.raises(FormatError, match="data/group is not an array; leave it out with skip"):
        open_in_place(buffer)
    assert list(open_in_place(buffer, skip=["group"]).schema) == ["action", "img", "state"]


def test_arrays_of_meta_that_can_not_be_kept_are_named_and_may_be_skipped(buffer: Path) -> None:
    put(buffer, "meta/large", np.zeros((1 << 23) + 1), chunks=(1 << 23,))
    put(buffer, "meta/odd", np.zeros(4, complex))
    for name, message in (("large", "has 8388609 values"), ("odd", "expected numbers or text")):
        other = {"large": "odd", "odd": "large"}[name]
        with pytest.raises(DataError, match=rf"meta/{name}:? {message}.*skip=\['meta/{name}'\]"):
            open_in_place(buffer, skip=[f"meta/{other}"])


@pytest.mark.parametrize("name", ["image", "meta/sed", "meta/episode_ends"])
def test_a_name_to_skip_that_is_not_there_is_refused(name: str, buffer: Path) -> None:
    put(buffer, "meta/seed", np.arange(4))
    with pytest.raises(DataError, match=rf"skip '{name}': nothing has that name; expected one of .*img.*meta/seed"):
        open_in_place(buffer, skip=["action", name])
    assert not open_in_place(buffer, skip=["meta"]).meta


def test_zeros_that_are_made_small_are_no_claim(buffer: Path) -> None:
    disk = numcodecs.Blosc("zstd", clevel=5, shuffle=numcodecs.Blosc.BITSHUFFLE)
    put(buffer, "data/mask", np.zeros((20, 1 << 22), np.uint8), chunks=(1, 1 << 22), compressors=disk)
    assert open_in_place(buffer).schema["mask"].shape == (1 << 22,)


def test_a_codec_that_is_not_installed_is_named(buffer: Path) -> None:
    rewrite(buffer, "data/img", compressor={"id": "imagecodecs_jpegxl", "level": 1})
    with pytest.raises(
        MissingExtraError,
        match="data/img uses the codec 'imagecodecs_jpegxl', which needs imagecodecs: pip install imagecodecs",
    ):
        open_in_place(buffer)


def test_a_damaged_chunk_is_an_error_that_names_the_array(buffer: Path, url: str) -> None:
    (buffer / "data/img/2.0.0.0").write_bytes(b"\x00" * 40)
    with pytest.raises(CorruptionError, match="data/img: rows 5 to 14 can't be read"):
        imported(open_reader(buffer), url)


def test_other_places_are_refused_with_their_name(tmp_path: Path, buffer: Path) -> None:
    text = tmp_path / "text.zip"
    text.write_text("no zip")
    for path in (text, tmp_path, buffer / "data"):
        with pytest.raises(FormatError, match=path.name):
            open_in_place(path)
    with pytest.raises(StoreNotFoundError, match="file or directory not found"):
        open_in_place(tmp_path / "none")
    shutil.rmtree(buffer / "meta/episode_ends")
    put(buffer, "meta/other", np.zeros(3))
    with pytest.raises(FormatError, match=r"expected meta/episode_ends, got \['other'\]"):
        open_in_place(buffer)


# ---- chunks that become larger than they may -----------------------------------------------------------

N_BOMB = 1 << 20


@pytest.mark.parametrize(
    "codec", [numcodecs.Zlib(), numcodecs.GZip(), numcodecs.BZ2(), numcodecs.LZMA(), numcodecs.LZ4()]
)
def test_a_chunk_that_would_become_larger_than_chunks_are_is_not_decoded(codec: Any, buffer: Path) -> None:
    for chunk in (buffer / "data/state").glob("[0-9]*"):
        chunk.write_bytes(codec.encode(bytes(N_BOMB)))
    rewrite(buffer, "data/state", compressor=codec.get_config())
    with pytest.raises(CorruptionError, match=r"data/state: rows 0 to 4 .* is damaged, or larger than"):
        open_in_place(buffer).read_episode(0)


@pytest.mark.parametrize("n_bytes", [1, 255, 256, 70_000, N_BOMB])
@pytest.mark.parametrize(
    "codec",
    [numcodecs.Blosc(), numcodecs.Zstd(), numcodecs.LZ4(), numcodecs.Zlib(), numcodecs.BZ2(), numcodecs.LZMA()],
)
def test_sizes_are_told_before_anything_is_decoded(codec: Any, n_bytes: int) -> None:
    data = bytes(codec.encode(np.random.default_rng(0).integers(0, 3, n_bytes).astype(np.uint8)))
    assert not exceeds_decoded_size(codec.codec_id, data, n_bytes)
    assert exceeds_decoded_size(codec.codec_id, data, n_bytes - 1)


@pytest.mark.parametrize("codec", ["blosc", "lz4"])
def test_a_chunk_that_does_not_say_its_size_is_taken_to_be_too_large(codec: str) -> None:
    assert exceeds_decoded_size(codec, b"abc", 10**9)
    assert exceeds_decoded_size("gzip", 2 * gzip.compress(b""), 10**9)
    assert exceeds_decoded_size("zstd", b"\x28\xb5\x2f\xfd\x00\x58", 10**9)  # a frame that does not say its size


def test_an_entry_of_a_zip_file_that_would_become_too_large_is_refused(buffer: Path, tmp_path: Path) -> None:
    target = tmp_path / "buffer.zarr.zip"
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as file:
        for path in filter(Path.is_file, buffer.rglob("*")):
            is_chunk = path.parent.name == "state" and not path.name.startswith(".")
            file.writestr(str(path.relative_to(buffer)), bytes(8 << 20) if is_chunk else path.read_bytes())
    with pytest.raises(FormatError, match="data/state has a file of 8388608 bytes, more than a chunk can take"):
        open_in_place(target)


def test_episodes_without_an_added_field_are_exported_with_its_fill(url: str, tmp_path: Path) -> None:
    stored = store_with_finals(url).schema
    assert stored is not None
    added = stored.merged(Schema({"force": Field("float32", (2,), fill=-3)}))
    store, target = trajstore.create(url, added, exist_ok=True), tmp_path / "out.zarr"
    export_episodes(store, open_writer(target), reread=lambda: open_reader(target))
    with contextlib.closing(open_reader(target)) as reader:
        assert (reader.read(reader.keys()[0]).steps["force"] == -3).all()
