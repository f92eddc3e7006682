"""Mistakes that other replay buffers made, each as a test that this one does not make it."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import trajstore
from tests.sampling.test_reader import chi_square
from tests.support.sharding import mark, pack, read_record
from trajstore import DataError, Field, Reader, Schema, Store, Windows
from trajstore.format.commit_record import SessionView
from trajstore.sampling.rng import CounterRng
from trajstore.schema import Array
from trajstore.writing.writer import Writer

FIELDS = Schema(
    {
        "obs": Field("int64", (2,), final=True, chunk_rows=4),
        "action": Field("int64", chunk_rows=4),
        "reward": Field("float32", chunk_rows=4),
    },
    episode={"task": str},
)


def new_store(url: Any = None) -> Store:
    options = {} if url is None else {"fsync": False}
    return trajstore.create(url or f"memory://traps-{uuid.uuid4().hex}", FIELDS, **options)


def numbered(k: int, n: int, has_final: bool = False) -> dict[str, Array]:
    """Episode ``k`` of ``n`` steps: a step holds both, and earns its t."""
    obs = np.stack([np.full(n + has_final, k), np.arange(n + has_final)], 1)
    return {"obs": obs, "action": np.arange(n), "reward": np.arange(n, dtype=np.float32)}


def step(k: int, t: int) -> dict[str, Any]:
    return {"obs": np.array([k, t]), "action": t, "reward": float(t)}


def filled(*lengths: int, url: Any = None, has_final: bool = False, **end: bool) -> tuple[Store, Writer]:
    store = new_store(url)
    writer = store.writer(commit_seconds=None)
    for k, n in enumerate(lengths):
        writer.append_episode(numbered(k, n, has_final), **(end or {"terminated": True}))
    writer.commit()
    store.refresh()
    return store, writer


def check_within_episodes(batch: dict[str, Any]) -> None:
    """All steps of a window are of one episode, one after the other."""
    assert batch["obs"][..., 0].eq(batch["obs"][:, :1, 0]).all()
    assert batch["obs"][..., 1].diff(dim=1).eq(1).all()


def test_the_newest_step_is_not_turned_into_a_last_one_when_loaded(tmp_path: Path) -> None:
    """ALF and SheepRL mark the newest step of every environment as an end when a buffer is loaded."""
    _, writer = filled(url=tmp_path)
    for t in range(5):
        writer.append(step(0, t))
    writer.commit()
    batch = Reader(trajstore.open(tmp_path)).at(torch.tensor([[0, 0, 4]]), Windows())
    assert batch["obs"].tolist() == [[[0, 4]]]
    assert not (batch["is_last"] | batch["terminated"] | batch["truncated"]).any()
    writer.append(step(0, 5), terminated=True)
    writer.close()
    batch = Reader(trajstore.open(tmp_path)).sample_episodes(1)
    assert batch["is_last"].tolist() == batch["terminated"].tolist() == [[False] * 5 + [True]]
    assert not batch["truncated"].any()


def test_environments_weigh_as_much_as_they_hold() -> None:
    """ALF draws an environment first, whatever it holds, and draws nothing while one of them is too short."""
    store = new_store()
    writer = store.writer(commit_seconds=None)
    for env, n in ((0, 30), (1, 10), (2, 1)):
        writer.append_episode(numbered(env, n), terminated=True, env=env)
    writer.commit()
    store.refresh()
    reader, counts = Reader(store, seed=1), np.zeros(3)
    for _ in range(20):
        counts += torch.bincount(reader.sample(100, Windows(length=2))["obs"][:, 0, 0], minlength=3).numpy()
    assert counts[2] == 0
    assert chi_square(counts[:2], 2000 * np.array([29, 9]) / 38) < 7


def test_next_observations_are_of_the_same_episode() -> None:
    """LeRobot's memory-saving buffer takes the next row for the next state, also past an end or the seam."""
    for end in ("terminated", "truncated"):
        for has_final in (True, False):
            store, _ = filled(3, 4, 1, 5, has_final=has_final, **{end: True})
            for batch in Reader(store).epoch(4, Windows.transitions()):
                is_learned = batch["learn"] & ~batch["terminated"]
                assert batch["next"]["obs"][:, 0].eq(batch["obs"][:, 0]).all()
                after = batch["next"]["obs"][:, 1] - batch["obs"][:, 1]
                assert after[is_learned].eq(1).all()


def test_frames_are_not_stacked_across_a_truncated_episode() -> None:
    """Dopamine looks for terminal steps alone when it stacks frames, so stacks reach past a time limit."""
    store, _ = filled(3, 3, 3, truncated=True)
    for batch in Reader(store).epoch(4, Windows(offsets={"obs": (-3, -2, -1, 0)})):
        assert batch["obs"][..., 0].eq(batch["index"][:, 1, None, None]).all()


def test_an_episode_that_was_only_truncated_ends_there() -> None:
    """TorchRL finds episodes by one end key; with `terminated` for it, a truncated one runs into the next."""
    store, _ = filled(3, 3, 3, truncated=True)
    reader = Reader(store)
    for batch in reader.epoch(4, Windows(length=2)):
        check_within_episodes(batch)
    assert reader.n_windows(Windows(length=3)) == 3
    with pytest.raises(DataError, match="no episode has 4 usable steps"):
        reader.sample(4, Windows(length=4))


def test_windows_do_not_straddle_episodes_that_were_written_in_turns() -> None:
    """TorchRL's slices are runs of rows, so several writers that extend one storage in turns mix trajectories."""
    store = new_store()
    writers = [store.writer(f"w{i}", commit_seconds=None) for i in range(2)]
    for t in range(9):
        for i, writer in enumerate(writers):
            for env in range(3):
                writer.append(step(10 * i + env, t), env=env)
            if t % 4 == 0:
                writer.commit()
    for writer in writers:
        writer.commit()
    store.refresh()
    reader = Reader(store)
    for batch in reader.epoch(7, Windows(length=4)):
        check_within_episodes(batch)
    assert reader.n_windows(Windows(length=4)) == 6 * 6


@pytest.mark.parametrize("weight", ["window", "step", "episode"])
def test_a_batch_has_the_size_that_was_asked_for(weight: Any) -> None:
    """TorchRL #2947: slices of short episodes made batches shorter than asked."""
    store, _ = filled(1, 2, 3, 50)
    reader = Reader(store)
    for boundary in ("strict", "short", "pad_left", "pad_right", "pad_both"):
        for size in (1, 7, 300):
            batch = reader.sample(size, Windows(length=3, boundary=boundary, weight=weight))  # type: ignore[arg-type]
            assert batch["obs"].shape == (size, 3, 2)


@pytest.mark.parametrize("n", [7, 8, 9, 15, 16, 17])
def test_nothing_breaks_when_something_is_exactly_full(n: int) -> None:
    """TorchRL #1969 and Flashbax #67 were right before and after the buffer was full, and wrong just then."""
    store, writer = filled()
    reader = Reader(store, cache_bytes=4 * 4 * (16 + 8 + 4))  # four chunks of each field: sixteen rows
    for t in range(n):
        writer.append(step(0, t))
        writer.commit()
        reader.refresh()
        assert reader.n_windows(Windows()) == t + 1
        found = torch.cat([batch["obs"][:, 0] for batch in reader.epoch(5, Windows(), shuffle=False)])
        assert found.tolist() == [[0, i] for i in range(t + 1)]


def test_lengths_are_right_after_loading(tmp_path: Path) -> None:
    """Stable-Baselines3 #1542: episode lengths were wrong in a buffer that had been saved and loaded."""
    lengths = (3, 1, 7, 4)
    _, writer = filled(*lengths, url=tmp_path, has_final=True)
    writer.close()
    reader = Reader(trajstore.open(tmp_path))
    batch = reader.sample_episodes(4, index=torch.tensor([[0, k] for k in range(4)]))
    assert batch["valid"].sum(1).tolist() == list(lengths)
    assert trajstore.open(tmp_path).episodes["length"].tolist() == list(lengths)


def test_resuming_shows_everything_once(tmp_path: Path) -> None:
    """DreamerV3 #103: a resumed run read the stored episodes a second time."""
    _, writer = filled(3, 4, url=tmp_path)
    writer.close()
    store = trajstore.open(tmp_path)
    reader = Reader(store)
    reader.refresh()
    reader.refresh()
    with store.writer() as again:
        again.append_episode(numbered(2, 5), terminated=True)
    reader.refresh()
    assert reader.n_windows(Windows()) == 12
    found = [tuple(s) for batch in reader.epoch(5, Windows()) for s in batch["obs"][:, 0].tolist()]
    assert sorted(found) == [(k, t) for k, n in enumerate((3, 4, 5)) for t in range(n)]


def forget(root: Path, view: SessionView) -> None:
    """What a later session says about older streams."""
    writer = trajstore.open(root, fsync=False).writer("session")
    writer.append(step(0, 0))
    writer.abort_episode()
    writer.close()
    own = {**view.discarded, writer.stream: (0,)}
    mark(root, read_record(root, writer.stream), view=SessionView(view.first_rows, own, view.dead))


@pytest.mark.parametrize("kind", ["first rows", "discarded"])
def test_an_episode_is_found_by_name_also_after_a_gap(tmp_path: Path, kind: str) -> None:
    """LeRobot looks episodes up by position, so that removing one makes every later name mean another."""
    store, writer = filled(4, 4, 4, 4, url=tmp_path)
    writer.close()
    store.refresh()
    reader = Reader(store)
    stream = writer.stream
    forget(
        tmp_path,
        SessionView(first_rows={stream: 4}) if kind == "first rows" else SessionView(discarded={stream: (0,)}),
    )
    reader.refresh()
    batch = reader.at(torch.tensor([[0, 2, 1], [0, 3, 0], [0, 1, 3]]), Windows())
    assert batch["obs"][:, 0].tolist() == [[2, 1], [3, 0], [1, 3]]
    assert batch["index"].tolist() == [[0, 2, 1], [0, 3, 0], [0, 1, 3]]
    with pytest.raises(trajstore.EpisodeNotFoundError, match="this reader has no such episode"):
        reader.at(torch.tensor([[0, 0, 0]]), Windows())
    found = torch.cat([b["obs"][:, 0, 0] for b in reader.epoch(5, Windows())])
    assert found.bincount().tolist() == [0, 4, 4, 4]


def test_steps_are_counted_in_64_bits() -> None:
    """Flashbax's Vault counts rows in 32 bits, which end at two thousand million."""
    store, _ = filled(3, 4)
    reader = Reader(store)
    index, starts = reader.assembler.index, reader.assembler.kind(Windows()).starts
    for counts in (index.logical, index.step_sums, index.span_logical, index.span_row, index.t_base, index.episode):
        assert counts.host.dtype == np.int64
    assert starts.sums.dtype == np.int64
    drawn = CounterRng(1).below(1000, 1 << 41, torch.device("cpu"))
    assert drawn.min() >= 0
    assert (1 << 40) < drawn.max() < (1 << 41)
    spec = Windows(length=3, boundary="pad_both", stride=2)
    start = spec.start(torch.tensor([1 << 40]), torch.tensor([1 << 41]))
    assert start.item() == (1 << 40) - 4


def test_opening_again_wipes_nothing(tmp_path: Path) -> None:
    """cpprb opens its memory maps with a mode that empties them; memmap-replay-buffer overwrites by default."""
    _, writer = filled(3, 4, url=tmp_path)
    writer.close()
    for _ in range(2):
        store = trajstore.create(tmp_path, FIELDS, exist_ok=True, fsync=False)
        with store.writer():
            pass
        assert Reader(trajstore.open(tmp_path)).n_windows(Windows()) == 7
    with pytest.raises(trajstore.StoreExistsError):
        trajstore.create(tmp_path, FIELDS)


@pytest.mark.parametrize("end", ["terminated", "truncated"])
def test_the_last_transition_of_an_episode_is_there(end: str) -> None:
    """d3rlpy drops the last transition of an episode that was truncated."""
    store, _ = filled(4, has_final=True, **{end: True})
    reader = Reader(store)
    batch = reader.at(torch.tensor([[0, 0, 3]]), Windows.transitions(n_step=2, gamma=0.5))
    assert reader.n_windows(Windows.transitions()) == 4
    assert batch["next"]["obs"].tolist() == [[0, 4]]
    assert batch["n_step"]["return"].tolist() == [3.0]
    assert batch["n_step"]["discount"].tolist() == [0.0 if end == "terminated" else 0.5]
    assert bool(batch[end])


def test_short_episodes_are_not_drawn_more_often() -> None:
    """DrQ-v2, SheepRL and TorchRL's slices draw an episode first, so windows of short ones come more often."""
    lengths = (2, 5, 40)
    store, _ = filled(*lengths)
    reader, counts = Reader(store, seed=5), np.zeros(3)
    for _ in range(20):
        counts += torch.bincount(reader.sample(200, Windows(length=2))["obs"][:, 0, 0], minlength=3).numpy()
    n = np.array(lengths) - 1
    assert chi_square(counts, 4000 * n / n.sum()) < 5


@pytest.mark.parametrize("pad", ["repeat", "zero", 0])
def test_padding_can_be_told_from_data(pad: Any) -> None:
    """diffusion_policy repeats or zeroes without a mask, and a guard value of NaN becomes 0 in images."""
    store = trajstore.create(f"memory://traps-{uuid.uuid4().hex}", Schema({"pixels": Field("uint8", (2,))}))
    with store.writer() as writer:
        writer.append_episode({"pixels": np.zeros((3, 2), np.uint8)}, terminated=True)
    store.refresh()
    reader = Reader(store)
    batch = reader.sample(50, Windows(length=3, boundary="pad_both", pad=pad))
    assert not batch["pixels"].any()
    assert batch["valid"].sum(1).unique().tolist() == [1, 2, 3]
    assert not (batch["learn"] & ~batch["valid"]).any()
    with pytest.raises(DataError, match="pad: field 'pixels' of uint8 can't hold nan"):
        reader.sample(2, Windows(length=3, boundary="pad_both", pad=float("nan")))


def test_metadata_stays_with_its_episodes_when_rows_are_copied(tmp_path: Path) -> None:
    """diffusion_policy moves an array away before it copies it, so that new chunks cost the episode table."""
    store = new_store(tmp_path)
    with store.writer() as writer:
        for k in range(4):
            writer.append_episode(numbered(k, 4), terminated=True, metadata={"task": f"t{k}"})
    store.refresh()
    reader = Reader(store)
    pack(tmp_path, writer.stream, 0, 16)
    reader.refresh()

    def second(table: trajstore.EpisodeTable) -> Array:
        return np.asarray(table["task"] == "t1")

    assert reader.sample(20, Windows(), where=second)["obs"][..., 0].eq(1).all()
    assert reader.n_windows(Windows()) == 16
    assert trajstore.open(tmp_path).episodes["task"].tolist() == ["t0", "t1", "t2", "t3"]


def test_a_store_opens_after_a_partial_append(tmp_path: Path) -> None:
    """diffusion_policy refuses to open a buffer whose arrays are of different lengths, as a crash leaves them."""
    _, writer = filled(3, 4, url=tmp_path)
    writer.close()
    stream = tmp_path / "streams" / writer.stream
    for name in ("c.2.0", "c.7.0"):  # chunks of one field that no commit names
        (stream / "steps" / "obs" / name).write_bytes(b"half a chunk")
    reader = Reader(trajstore.open(tmp_path))
    assert reader.n_windows(Windows()) == 7
    for batch in reader.epoch(3, Windows()):
        assert batch["obs"][:, 0].tolist() == batch["index"][:, 1:].tolist()


def test_what_was_recorded_is_there_after_the_process_ended(tmp_path: Path) -> None:
    """Minari's collector keeps episodes in a temporary directory that goes with it."""
    script = (
        "import sys, numpy as np, trajstore\n"
        "writer = trajstore.create(sys.argv[1], fsync=False).writer()\n"
        "writer.append_episode({'x': np.arange(5)}, terminated=True)\n"
        "writer.commit()\n"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "store")], check=True, timeout=120)
    batch = Reader(trajstore.open(tmp_path / "store")).sample_episodes(1)
    assert batch["x"].tolist() == [[0, 1, 2, 3, 4]]


def changed_bytes(root: Path, before: dict[Path, bytes]) -> int:
    """Bytes of files that are new or different, and take note of them."""
    after = {file: file.read_bytes() for file in root.rglob("*") if file.is_file()}
    changed = sum(len(data) for file, data in after.items() if before.get(file) != data)
    before.clear()
    before.update(after)
    return changed


def test_what_a_commit_writes_does_not_grow_with_the_store(tmp_path: Path) -> None:
    """RLinf, Minari and LeRobot write an index of all episodes again with every one that is added."""
    store = new_store(tmp_path)
    writer = store.writer(commit_seconds=None)
    files: dict[Path, bytes] = {}
    written = []
    for n in (10, 4096, 4096):
        for k in range(n):
            writer.append_episode(numbered(k, 1), terminated=True, metadata={"task": f"{k % 7}"})
        writer.commit()
        changed_bytes(tmp_path, files)
        writer.append_episode(numbered(0, 1), terminated=True)
        writer.commit()
        written.append(changed_bytes(tmp_path, files))
    writer.close()
    assert written[-1] < 1.5 * written[0] + 4096


def child(store: Store, answers: Any) -> None:
    reader = Reader(store, cache_bytes=1000)
    with reader.batches(64, Windows(), prefetch=2) as batches:
        for _ in range(5):
            batch = next(batches)
            answers.put(batch["obs"][:, 0].tolist() == batch["index"][:, 1:].tolist())


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_can_sample(tmp_path: Path) -> None:
    """zarrs-python #171 and tensorstore #192: pools that were made before a fork never answer after it."""
    store, writer = filled(*[40] * 20, url=tmp_path)
    writer.close()
    store.refresh()
    reader = Reader(store, cache_bytes=1000)
    batches = reader.batches(64, Windows(), prefetch=2)
    next(batches)
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    process = context.Process(target=child, args=(store, answers))
    process.start()
    try:
        assert [answers.get(timeout=60) for _ in range(5)] == [True] * 5
    finally:
        process.join(60)
        process.kill()
    assert len(next(batches)["index"]) == 64
    batches.close()


def test_where_no_window_exists_none_is_drawn() -> None:
    """In a buffer like Flashbax's (RTRRL #57) an empty set of legal starts gives slot 0, again and again."""
    store, writer = filled(3, 3)
    reader = Reader(store)
    for draw in (
        lambda: reader.sample(4, Windows(length=4)),
        lambda: next(reader.batches(4, Windows(length=4))),
        lambda: reader.epoch(4, Windows(length=4)),
        lambda: reader.staged(4, Windows(length=4)),
        lambda: reader.sample(4, Windows(), where=lambda table: table["length"] > 3),
        lambda: reader.sample_episodes(4, where=lambda table: table["length"] > 3),
    ):
        with pytest.raises(DataError, match="so no such window exists"):
            draw()
    writer.append_episode(numbered(2, 4), terminated=True)
    writer.commit()
    reader.refresh()
    assert reader.sample(4, Windows(length=4))["obs"][..., 0].eq(2).all()
