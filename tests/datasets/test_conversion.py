"""Imports and exports: every episode is written once, whatever happens on the way, and bit by bit."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import zarr
from typer.testing import CliRunner, Result

import trajstore
from tests.conftest import Place
from tests.replay.test_memory import status_bytes
from tests.support.faulty import DieAt, Died, FailOnce, FaultyStorage, no_space, real_storage, through
from trajstore import Field, Schema
from trajstore.cli import app as cli
from trajstore.datasets import conversion
from trajstore.datasets.conversion import KEY_COLUMN, ConversionReport, export_episodes, import_episodes
from trajstore.datasets.formats import FORMATS, Format
from trajstore.datasets.interfaces import Episode
from trajstore.errors import CorruptionError, DataError, StorageError, StoreExistsError
from trajstore.schema import flatten
from trajstore.store.verify import verify

MIB = 1 << 20
SCHEMA = Schema(
    {
        "observation": {"state": Field("float32", (3,), final=True), "image": Field("uint8", (4, 4), final=True)},
        "action": Field("int64"),
        "reward": Field("float64"),
    },
    episode={"success": bool},
)


class Made:
    """A dataset of noise; the i-th episode depends on the seed and on i alone."""

    schema = SCHEMA

    def __init__(self, n: int, *, seed: int = 0, n_steps: int = 7) -> None:
        self.display = f"made {seed}"
        self.n_read = 0
        self._n, self._seed, self._n_steps = n, seed, n_steps

    def keys(self) -> Sequence[str]:
        return [f"episode {i}" for i in range(self._n)]

    def read(self, key: str) -> Episode:
        i = int(key.split()[1])
        self.n_read += 1
        rng = np.random.default_rng([self._seed, i])
        n = self._n_steps + i % 3
        steps = {
            "observation": {
                "state": rng.integers(0, 1 << 32, (n + 1, 3), np.uint32).view(np.float32),  # any bits: NaN, -0.0
                "image": rng.integers(0, 256, (n + 1, 4, 4), np.uint8),
            },
            "action": rng.integers(0, 9, n),
            "reward": rng.normal(size=n),
        }
        metadata = {"success": i % 2 == 0, "note": ("a", i)} | ({"dataset": {"robot": "x"}} if i == 0 else {})
        return Episode(key, steps, terminated=i % 3 == 0, truncated=i % 3 == 1, metadata=metadata)

    def close(self) -> None:
        pass


class Kept:
    """A dataset in memory, to write to; it may be read back."""

    schema = SCHEMA
    display = "kept"

    def __init__(self, done: Sequence[Episode] = (), *, fail_at: int | None = None) -> None:
        self.episodes = list(done)
        self.is_finished = self.is_abandoned = False
        self._fail_at = fail_at

    def written_keys(self) -> Sequence[str]:
        return [episode.key for episode in self.episodes]

    def trim(self, episode: Episode) -> Episode:
        return episode

    def write(self, episode: Episode) -> None:
        if len(self.episodes) == self._fail_at:
            raise DataError("field 'action': no place for it")
        self.episodes.append(episode)

    def finish(self) -> None:
        self.is_finished = True

    def suspend(self) -> None:
        self.is_abandoned = True

    def keys(self) -> Sequence[str]:
        return self.written_keys()

    def read(self, key: str) -> Episode:
        return next(episode for episode in self.episodes if episode.key == key)

    def close(self) -> None:
        pass


def imported(reader: Any, url: str, **options: Any) -> ConversionReport:
    return import_episodes(reader, url, **{"fsync": False, "commit_seconds": None} | options)


def names(url: str) -> list[str]:
    return list(trajstore.open(url).episodes[KEY_COLUMN])


# ---- into a store --------------------------------------------------------------------------------------


def test_every_episode_comes_bit_by_bit_with_its_end_and_metadata(place: Place) -> None:
    reader = Made(7)
    report = imported(reader, place.url, **place.kwargs)
    assert (report.n_episodes, report.n_skipped, report.n_verified) == (7, 0, 7)
    store = trajstore.open(place.url, **place.kwargs)
    assert report.n_steps == int(store.episodes["length"].sum()) == 55
    for i, key in enumerate(reader.keys()):
        expected, got = reader.read(key), store.read_episode(i)
        state = expected.steps["observation"]["state"]
        np.testing.assert_array_equal(got["observation"]["state"].view(np.uint32), state.view(np.uint32))
        np.testing.assert_array_equal(got["reward"], expected.steps["reward"])
        row = store.episodes.row(i)
        assert (row[KEY_COLUMN], row["success"], row["metadata"]["note"]) == (key, i % 2 == 0, ["a", i])
        assert row["end"] == ("terminated", "truncated", "cut")[i % 3]


def test_progress_counts_what_is_written_and_what_is_verified(url: str) -> None:
    told: list[tuple[int, int]] = []
    imported(Made(3), url, progress=lambda done, total: told.append((done, total)))
    assert told == [(0, 6), (1, 6), (2, 6), (3, 6), (4, 6), (5, 6), (6, 6)]


def test_a_second_run_writes_nothing(url: str) -> None:
    imported(Made(5), url)
    report = imported(Made(5), url)
    assert (report.n_episodes, report.n_skipped, report.n_steps, report.n_verified) == (0, 5, 0, 5)
    assert len(trajstore.open(url).streams) == 1


def test_a_dataset_that_has_grown_is_gone_on_with(url: str) -> None:
    imported(Made(3), url)
    assert imported(Made(5), url).n_episodes == 2
    assert names(url) == Made(5).keys()


def test_without_resume_a_store_must_be_new(url: str) -> None:
    imported(Made(2), url)
    with pytest.raises(StoreExistsError, match="is already a store"):
        imported(Made(2), url, resume=False)


def test_an_episode_that_can_not_be_stored_is_named_and_those_before_are_kept(url: str) -> None:
    class Odd(Made):
        def read(self, key: str) -> Episode:
            episode = super().read(key)
            wrong = {**episode.steps, "action": np.zeros(2, np.float32)}
            return Episode(key, wrong) if key == "episode 2" else episode

    with pytest.raises(DataError, match=r"made 0: episode 'episode 2': .*action"):
        imported(Odd(4), url)
    assert names(url) == ["episode 0", "episode 1"]
    assert imported(Made(4), url).n_skipped == 2


def test_an_empty_dataset_is_refused_and_no_store_is_made(url: str) -> None:
    with pytest.raises(DataError, match="holds no episodes"):
        imported(Made(0), url)
    assert not Path(url).exists()


def test_several_episodes_of_one_name_are_refused(url: str) -> None:
    class Twice(Made):
        def keys(self) -> Sequence[str]:
            return ["episode 0", "episode 0"]

    with pytest.raises(DataError, match="several episodes with the same name"):
        imported(Twice(1), url)


@pytest.mark.parametrize("other", [Made(2, seed=1), Made(2, n_steps=9)], ids=["values", "lengths"])
def test_a_store_of_another_dataset_with_the_same_names_is_refused(url: str, other: Made) -> None:
    imported(Made(2), url)
    with pytest.raises(StoreExistsError, match="a different dataset"):
        imported(other, url, verify=False)


def test_a_store_with_episodes_that_the_dataset_has_not_is_refused(url: str) -> None:
    imported(Made(3), url)
    with pytest.raises(StoreExistsError, match="has episode 'episode 2', which made 0 does not have"):
        imported(Made(2), url)


def test_a_store_of_another_schema_is_refused(url: str) -> None:
    with trajstore.create(url).writer() as writer:
        writer.append_episode({"action": np.zeros(3)})
    with pytest.raises(StoreExistsError, match="another schema"):
        imported(Made(2), url)


def test_a_store_that_somebody_else_writes_to_is_refused_and_left_as_it_is(url: str) -> None:
    imported(Made(3), url)
    with trajstore.open(url).writer("mine", commit_seconds=None) as writer:
        writer.append_episode(Made(1).read("episode 0").steps)
        writer.commit()
        with pytest.raises(StoreExistsError, match=r"stream 'mine-.*' was not written by an import"):
            imported(Made(4), url)
    assert len(trajstore.open(url)) == 4


def flip(url: str, field: str) -> None:
    """Change a value of the first episode in the store, checksums and all."""
    stream = trajstore.open(url).streams[0].id
    array: Any = zarr.open_group(url, mode="r+", zarr_format=3)[f"streams/{stream}/steps/{field}"]
    array[4] = np.asarray(array[4]) + 1


@pytest.mark.parametrize("field", ["observation/image", "action", "reward"])
def test_verification_finds_a_value_that_is_another_and_names_it(url: str, field: str) -> None:
    class Other(Made):
        def read(self, key: str) -> Episode:
            if key == "episode 0" and self.n_read == 3:  # the second pass begins
                flip(url, field)
            return super().read(key)

    with pytest.raises(CorruptionError, match=rf"episode 'episode 0' of made 0: field '{field}': step 4 differs"):
        imported(Other(3), url)


def test_verification_finds_another_end_and_other_metadata(url: str) -> None:
    class Changed(Made):
        terminated, note = True, ["a", 0]

        def read(self, key: str) -> Episode:
            episode = super().read(key)
            if key != "episode 0":
                return episode
            metadata = {**episode.metadata, "note": self.note}
            return Episode(key, episode.steps, terminated=self.terminated, metadata=metadata)

    imported(Changed(2), url)
    reader = Changed(2)
    reader.terminated = False
    with pytest.raises(StoreExistsError, match="expected the episode to end cut, got terminated"):
        imported(reader, url)
    reader.terminated, reader.note = True, ["b"]
    with pytest.raises(StoreExistsError, match="metadata 'note'"):
        imported(reader, url)


def test_two_runs_at_the_same_time_are_found(url: str) -> None:
    class Joined(Made):
        def read(self, key: str) -> Episode:
            if key == "episode 2":
                imported(Made(3), url)
            return super().read(key)

    with pytest.raises(
        CorruptionError, match="expected the 3 episodes of the dataset, got 6; is another import writing"
    ):
        imported(Joined(3), url)


# ---- killed, and faults --------------------------------------------------------------------------------


def import_and_die(url: str, at: int) -> None:
    """Import until an episode is read and more than before is committed; then be killed."""

    class Deadly(Made):
        def read(self, key: str) -> Episode:
            while key == f"episode {at}" and n_committed(url) <= before:
                time.sleep(0.01)
            if key == f"episode {at}":
                os.kill(os.getpid(), signal.SIGKILL)
            return super().read(key)

    before = n_committed(url)
    imported(Deadly(12), url, commit_steps=1)


def n_committed(url: str) -> int:
    return len(trajstore.open(url)) if Path(url).exists() else 0


def in_process(call: str) -> subprocess.CompletedProcess[str]:
    code = f"import tests.datasets.test_conversion as t; print(t.{call})"
    root = str(Path(__file__).parents[2])
    return subprocess.run(
        [sys.executable, "-c", code], cwd=root, timeout=300, check=False, capture_output=True, text=True
    )


def test_a_killed_import_goes_on_with_no_episode_lost_or_twice(url: str) -> None:
    for at in (2, 6, 10):
        assert in_process(f"import_and_die({url!r}, {at})").returncode == -signal.SIGKILL
    before = n_committed(url)
    report = imported(Made(12), url)
    assert 2 < before < 12
    assert (report.n_skipped, report.n_episodes, report.n_verified) == (before, 12 - before, 12)
    assert sorted(names(url)) == sorted(Made(12).keys())
    streams = trajstore.open(url).streams
    assert {r.id for r in streams if not r.is_sealed} == set(streams[-1].view.dead)  # nobody waits for them


def test_a_part_of_an_episode_is_discarded_and_the_episode_written_again(url: str) -> None:
    """The buffer takes a tenth of an episode, so that parts of it are committed before its end."""
    reader, small = Made(3, n_steps=2000), {"buffer_bytes": 64 << 10}
    died = FaultyStorage(real_storage(url), DieAt(n_calls_of_an_import(url + "-whole", reader, small) // 2, True))
    with through(died), pytest.raises(Died):
        imported(reader, url, **small)
    assert names(url).count(None) == 1
    assert imported(reader, url, **small).n_verified == 3
    assert sorted(names(url)) == reader.keys()
    assert verify(url).is_clean


def n_calls_of_an_import(url: str, reader: Made, options: dict[str, int]) -> int:
    storage = FaultyStorage(real_storage(url))
    with through(storage):
        imported(reader, url, verify=False, **options)
    return len(storage.calls)


def test_whatever_call_a_run_dies_at_the_next_one_completes_it(tmp_path: Path) -> None:
    often = {"commit_steps": 5}
    for number in range(1, n_calls_of_an_import(str(tmp_path / "whole"), Made(4), often) + 1, 3):
        url = str(tmp_path / f"died-{number}")
        dying = FaultyStorage(real_storage(url), DieAt(number, is_after=number % 2 == 0))
        with through(dying), pytest.raises(Died):
            imported(Made(4), url, **often)
        imported(Made(4), url)
        assert sorted(names(url)) == Made(4).keys(), number


def test_a_storage_that_fails_once_is_reported_and_the_next_run_completes(tmp_path: Path) -> None:
    often = {"commit_steps": 5}
    for number in range(2, n_calls_of_an_import(str(tmp_path / "whole"), Made(4), often) + 1, 5):
        url = str(tmp_path / f"failed-{number}")
        with through(FaultyStorage(real_storage(url), FailOnce(number, False, no_space))):
            try:
                imported(Made(4), url, **often)
            except StorageError:
                imported(Made(4), url)
        assert sorted(names(url)) == Made(4).keys(), number


# ---- memory --------------------------------------------------------------------------------------------

BIG = Schema({"frame": Field("uint8", (256, 256), final=True), "action": Field("int64")})
BIG_STEPS = 128  # 8 MiB an episode
BUFFER_BYTES = 32 * MIB


class Big:
    """Episodes of 8 MiB of noise."""

    schema, display = BIG, "big"

    def __init__(self, n: int) -> None:
        self._n = n

    def keys(self) -> Sequence[str]:
        return [str(i) for i in range(self._n)]

    def read(self, key: str) -> Episode:
        frames = np.random.default_rng(int(key)).integers(0, 256, (BIG_STEPS + 1, 256, 256), np.uint8)
        return Episode(key, {"frame": frames, "action": np.arange(BIG_STEPS)})

    def close(self) -> None:
        pass


class Forgetful(Kept):
    """A dataset writer that only keeps the names."""

    def write(self, episode: Episode) -> None:
        self.episodes.append(Episode(episode.key, {}))


def peak_of_import(url: str) -> int:
    imported(Big(1), url + "-first", buffer_bytes=BUFFER_BYTES)
    before = status_bytes("VmRSS")
    imported(Big(60), url, buffer_bytes=BUFFER_BYTES)
    export_episodes(url, Forgetful())
    return status_bytes("VmHWM") - before


@pytest.mark.slow
def test_half_a_gigabyte_goes_through_in_the_memory_of_a_few_episodes(url: str) -> None:
    done = in_process(f"peak_of_import({url!r})")
    assert done.returncode == 0, done.stderr
    # The buffer; two episodes, with what comparing them takes; the threads that encode.
    assert int(done.stdout) < BUFFER_BYTES + 6 * 8 * MIB + 40 * MIB


# ---- out of a store ------------------------------------------------------------------------------------


@pytest.fixture
def store(url: str) -> trajstore.Store:
    imported(Made(6), url)
    return trajstore.open(url)


def test_an_export_hands_over_what_was_imported(store: trajstore.Store) -> None:
    kept = Kept()
    report = export_episodes(store, kept, reread=lambda: kept)
    assert (report.n_episodes, report.n_verified, kept.is_finished) == (6, 6, True)
    assert [episode.key for episode in kept.episodes] == [f"{store.streams[0].id}/{i}" for i in range(6)]
    for episode, key in zip(kept.episodes, Made(6).keys(), strict=True):
        expected = Made(6).read(key)
        np.testing.assert_array_equal(episode.steps["observation"]["image"], expected.steps["observation"]["image"])
        assert (episode.terminated, episode.truncated) == (expected.terminated, expected.truncated)
        assert episode.metadata[KEY_COLUMN] == key


def test_an_export_takes_the_episodes_that_a_function_chooses(store: trajstore.Store) -> None:
    kept = Kept()
    export_episodes(store, kept, where=lambda table: table["end"] == "truncated")
    assert [episode.metadata[KEY_COLUMN] for episode in kept.episodes] == ["episode 1", "episode 4"]
    with pytest.raises(DataError, match="no episodes with steps that match"):
        export_episodes(store, Kept(), where=lambda table: table["length"] > 100)


def test_an_export_of_fields_that_all_have_final_values_is_refused(store: trajstore.Store) -> None:
    with pytest.raises(DataError, match="the number of steps is ambiguous"):
        export_episodes(store, Kept(), fields=["observation"])
    kept = Kept()
    export_episodes(store, kept, fields=["observation/state", "action"], reread=lambda: kept)
    assert [sorted(flatten(episode.steps)) for episode in kept.episodes] == [["action", "observation/state"]] * 6


def test_what_holds_for_the_dataset_comes_with_the_first_episode_of_an_export(store: trajstore.Store) -> None:
    kept = Kept()
    export_episodes(store, kept, where=lambda table: table["end"] == "truncated")
    assert [episode.metadata.get("dataset") for episode in kept.episodes] == [{"robot": "x"}, None]


def test_an_export_that_fails_is_kept_and_gone_on_with(store: trajstore.Store) -> None:
    kept = Kept(fail_at=2)
    with pytest.raises(DataError, match=r"kept: episode 'import-.*/2': field 'action'"):
        export_episodes(store, kept)
    assert (kept.is_abandoned, kept.is_finished) == (True, False)
    again = Kept(kept.episodes)
    report = export_episodes(store, again, reread=lambda: again)
    assert (report.n_skipped, report.n_episodes, report.n_verified) == (2, 4, 6)


def test_a_dataset_writer_that_fails_to_suspend_does_not_hide_the_first_error(store: trajstore.Store) -> None:
    class Broken(Kept):
        def suspend(self) -> None:
            raise OSError("disk full")

    with pytest.raises(DataError, match="no place for it") as caught:
        export_episodes(store, Broken(fail_at=0))
    assert caught.value.__notes__ == ["trajstore: the written episodes could not be kept: disk full"]


def test_what_is_left_of_another_export_is_not_gone_on_with(store: trajstore.Store) -> None:
    kept = Kept([Episode("another/0", {})])
    with pytest.raises(DataError, match="of an unfinished export next to it hold other episodes; remove them"):
        export_episodes(store, kept)
    assert kept.is_abandoned


def changed(episode: Episode) -> Iterator[Episode]:
    yield Episode(episode.key, {**episode.steps, "action": episode.steps["action"] + 1}, episode.terminated)
    yield Episode(episode.key, {k: v for k, v in episode.steps.items() if k != "reward"}, episode.terminated)
    yield Episode(episode.key, episode.steps, truncated=True)


@pytest.mark.parametrize(
    ("n", "message"), [(0, "field 'action': step 0 differs"), (1, "'reward' is missing"), (2, "got truncated")]
)
def test_an_export_that_reads_back_otherwise_is_found(store: trajstore.Store, n: int, message: str) -> None:
    kept = Kept()
    export_episodes(store, kept)
    wrong = Kept([list(changed(kept.episodes[0]))[n], *kept.episodes[1:]])
    with pytest.raises(CorruptionError, match=message):
        export_episodes(store, Kept(), reread=lambda: wrong)
    with pytest.raises(CorruptionError, match="expected 6 episodes, got 5"):
        export_episodes(store, Kept(), reread=lambda: Kept(kept.episodes[:5]))


def test_an_open_episode_is_exported_as_far_as_it_is_committed(url: str) -> None:
    writer = trajstore.create(url).writer(commit_seconds=None)
    writer.append({"action": 1})
    writer.commit()
    kept = Kept()
    export_episodes(url, kept)
    assert [episode.key for episode in kept.episodes] == [f"{writer.stream}/0/1"]
    writer.append({"action": 2})
    writer.close()
    with pytest.raises(
        DataError, match="of an unfinished export next to it hold other episodes"
    ):  # it has grown meanwhile
        export_episodes(url, Kept(kept.episodes))


# ---- commands ------------------------------------------------------------------------------------------


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli.app(), [str(argument) for argument in arguments])


@pytest.fixture
def flat(tmp_path: Path) -> Path:
    """A file as D4RL has it, of two episodes."""
    path = tmp_path / "flat.hdf5"
    with h5py.File(path, "w") as file:
        file["observations"], file["rewards"] = np.arange(30.0).reshape(10, 3), np.ones(10, np.float32)
        file["terminals"], file["timeouts"] = np.arange(10) == 4, np.zeros(10, bool)
    return path


def test_a_dataset_is_imported_and_exported_by_command(flat: Path, url: str, tmp_path: Path) -> None:
    result = run("import", "d4rl", flat, url)
    assert (result.exit_code, result.stderr) == (0, "")
    assert "2 episodes of 10 steps" in result.stdout
    assert "Verified: 2 episodes, equal bit by bit." in result.stdout
    target = tmp_path / "out.hdf5"
    report = json.loads(run("export", "d4rl", url, target, "--fields", "observation", "--json").stdout)
    assert report == {
        "source": url,
        "target": str(target),
        "n_episodes": 2,
        "n_skipped": 0,
        "n_steps": 10,
        "n_verified": 2,
        "n_left_out": 0,
    }
    with h5py.File(target) as file:
        assert set(file) == {"observations", "terminals", "timeouts"}


def test_options_of_a_format_are_given_by_name(flat: Path, url: str) -> None:
    result = run("import", "d4rl", flat, url, "--skip", "rewards", "--option", "max_episode_steps=3", "--no-verify")
    assert result.exit_code == 0, result.stderr
    store = trajstore.open(url)
    assert list(store.episodes["length"]) == [3, 2, 3, 2]
    assert list(store.schema or ()) == ["observation"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--option", "speed=3"], "option 'speed': expected one of skip, keep_next, max_episode_steps"),
        (["--option", "speed"], "--option: expected NAME=VALUE, got 'speed'"),
        (["--skip", "terminals"], "expected arrays of steps and 'terminals'"),
        (["--skip", "reward"], "skip 'reward': nothing has that name; expected one of observations"),
        (
            ["--skip", "timeouts"],
            "no 'timeouts', so it does not say where time limits ended episodes: give the environment's max_",
        ),
        (["--option", "skip=terminals"], "expected arrays of steps and 'terminals'"),
        (["--option", "skip=5"], "option 'skip': expected a name, or a list of names as JSON, got 5"),
        (["--option", "max_episode_steps=abc"], "max_episode_steps"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(flat: Path, url: str, arguments: list[str], message: str) -> None:
    result = run("import", "d4rl", flat, url, *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["d4rl", "--fields", "nosuch"], "no field 'nosuch'; there are observation, reward"),
        (["torchrl", "--option", "capacity=abc"], "capacity: expected a positive integer, got 'abc'"),
        (["torchrl", "--option", "observations=3"], "option 'observations': expected a name"),
        (["lerobot", "--option", "fps=fast"], "fps"),
        (["torchrl", "--option", "observations=observation"], "; --option drop_last=true leaves such steps out"),
    ],
)
def test_what_is_wrong_with_an_export_is_said_in_one_line(
    flat: Path, url: str, arguments: list[str], message: str, tmp_path: Path
) -> None:
    assert run("import", "d4rl", flat, url).exit_code == 0
    kind, *options = arguments
    result = run("export", kind, url, tmp_path / "out", *options)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("name", FORMATS)
def test_an_export_that_wrote_no_episode_leaves_nothing_behind(name: str, tmp_path: Path) -> None:
    url, out = tmp_path / "store", tmp_path / "out"
    trajstore.create(url, SCHEMA)
    result = run("export", name, url, out / "own-v0")
    assert (result.exit_code, "has no episodes with steps that match" in result.stderr) == (2, True)
    assert list(out.iterdir()) == []


@pytest.fixture
def interrupt_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Have somebody press Ctrl-C after so many episodes."""

    def press(n: int) -> None:
        original = conversion._ProgressCounter.add

        def add(self: Any, by: int = 1) -> None:
            original(self, by)
            if self._n == n:
                signal.raise_signal(signal.SIGINT)

        monkeypatch.setattr(conversion._ProgressCounter, "add", add)

    return press


def test_an_import_that_is_interrupted_says_how_to_go_on(flat: Path, url: str, interrupt_at: Any) -> None:
    interrupt_at(1)
    result = run("import", "d4rl", flat, url)
    assert (result.exit_code, result.stdout) == (130, "")
    assert result.stderr == "trajstore: interrupted; the same command continues where this one stopped\n"


@pytest.mark.parametrize(
    ("n", "message"),
    [
        (0, "nothing was written"),
        (1, "the same command continues where this one stopped ({0}.partial, {0}.journal)"),
        (3, "{0} is complete, but was not fully verified; to export and verify it again, remove it"),
    ],
)
def test_an_export_that_is_interrupted_says_what_it_left(
    n: int, message: str, flat: Path, url: str, tmp_path: Path, interrupt_at: Any
) -> None:
    assert run("import", "d4rl", flat, url).exit_code == 0
    interrupt_at(n)
    result = run("export", "d4rl", url, tmp_path / "out.hdf5")
    assert (result.exit_code, result.stdout) == (130, "")
    assert result.stderr == f"trajstore: interrupted; {message.format(tmp_path / 'out.hdf5')}\n"
    left = sorted(path.name for path in tmp_path.glob("out.hdf5*"))
    assert left == {0: [], 1: ["out.hdf5.journal", "out.hdf5.partial"], 3: ["out.hdf5"]}[n]


def test_a_store_that_differs_from_its_dataset_has_a_problem(flat: Path, url: str) -> None:
    arguments = ("import", "d4rl", flat, url, "--option", "max_episode_steps=3")
    assert run(*arguments).exit_code == 0
    flip(url, "reward")
    result = run(*arguments)
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert "episode '1'" in result.stderr
    assert "field 'reward': step 1 differs" in result.stderr


@pytest.mark.parametrize(("name", "kind"), FORMATS.items())
def test_every_format_can_be_opened_by_name(name: str, kind: Format) -> None:
    module = importlib.import_module(kind.module)
    assert "skip" in inspect.signature(module.open_reader).parameters
    assert callable(module.open_writer)
    for verb in ("import", "export"):
        assert run(verb, name, "--help").exit_code == 0
