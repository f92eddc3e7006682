"""The writer beside its background thread: failures, bounds, threads, and input that is refused."""

from __future__ import annotations

import errno
import resource
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import trajstore
from tests.support.faulty import (
    BlockPuts,
    FailWhile,
    FaultyStorage,
    Plan,
    broken,
    no_access,
    no_space,
    real_storage,
    server_error,
)
from trajstore import (
    ClosedError,
    DataError,
    EpisodeKey,
    EpisodeNotFoundError,
    Field,
    Handle,
    Handles,
    Schema,
    StepPlacedError,
    StorageError,
    Store,
    Writer,
)
from trajstore.writing.staging import ROW_OVERHEAD_BYTES

SCHEMA = Schema(
    {
        "observation": Field("float32", (4,), final=True),
        "action": Field("int64"),
        "reward": Field("float32"),
    },
    episode={"success": bool},
)
ROWS = 8  # what each of the two stagings holds in the tests of a small buffer
SMALL_BUFFER = 2 * ROWS * (SCHEMA.row_bytes + ROW_OVERHEAD_BYTES)

OpenWriter = Callable[..., Writer]


def step(i: int) -> dict[str, Any]:
    """Every field of step ``i`` says i, so that a torn row shows."""
    return {"observation": np.full(4, i, np.float32), "action": i, "reward": float(i)}


def steps(*numbers: int, n_final: int = 0) -> dict[str, Any]:
    at = np.array(numbers)
    observed = np.append(at, [at[-1] + 1] * n_final).astype(np.float32)
    return {"observation": np.repeat(observed[:, None], 4, 1), "action": at, "reward": at.astype(np.float32)}


def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)


def has_failed(writer: Writer) -> bool:
    """Whether the background has a failure that no call has raised yet."""
    return writer._pipeline._commit_thread._unraised is not None


def append_while(writer: Writer, numbers: range) -> tuple[list[int], int]:
    """Append steps one by one; returns those that were accepted, and how many calls raised."""
    accepted = []
    for i in numbers:
        try:
            writer.append(step(i))
        except StorageError:
            continue
        accepted.append(i)
    return accepted, len(numbers) - len(accepted)


def rows_of(url: str) -> list[int]:
    """The number of every visible step, by episode and time; every field of a step must agree on it."""
    store = trajstore.open(url)
    found: list[int] = []
    for i in range(len(store)):
        episode = store.read_episode(i)
        n = len(episode["action"])
        assert (episode["observation"][:n] == episode["action"][:, None]).all()
        assert (episode["reward"] == episode["action"]).all()
        found += episode["action"].tolist()
    return found


@pytest.fixture
def open_writer(url: str) -> Iterator[OpenWriter]:
    """Opens writers on a store at ``url`` that fail as a plan says; ends their threads at the end."""
    writers: list[tuple[Writer, Plan]] = []

    def make(plan: Plan | None = None, schema: Schema | None = SCHEMA, **options: Any) -> Writer:
        trajstore.create(url, schema, exist_ok=True, fsync=False)
        plan = plan or Plan()
        store = Store(FaultyStorage(real_storage(url), plan), url, None)
        writer = store.writer(**({"commit_seconds": None} | options))
        writers.append((writer, plan))
        return writer

    yield make
    for writer, plan in writers:
        if isinstance(plan, FailWhile):
            plan.error = None
        if isinstance(plan, BlockPuts):
            plan.gate.set()
        writer.close()


def failing(error: Callable[[], Exception] = broken) -> FailWhile:
    plan = FailWhile()
    plan.error = error
    return plan


# ---- failures in the background -----------------------------------------------------------------


@pytest.mark.parametrize("error", [no_space, no_access, server_error], ids=["ENOSPC", "EACCES", "500"])
def test_a_background_failure_is_raised_once_by_the_next_call(
    open_writer: OpenWriter, error: Callable[[], Exception]
) -> None:
    writer = open_writer(failing(error), commit_steps=4)
    append_while(writer, range(4))
    until(lambda: has_failed(writer))
    with pytest.raises(StorageError, match=str(error())):
        writer.append(step(4))
    assert append_while(writer, range(4, 7)) == ([4, 5, 6], 0)


@pytest.mark.parametrize("error", [no_space, no_access, server_error], ids=["ENOSPC", "EACCES", "500"])
def test_commit_tries_again_and_nothing_is_lost_or_doubled(
    open_writer: OpenWriter, url: str, error: Callable[[], Exception]
) -> None:
    plan = failing(error)
    writer = open_writer(plan)
    append_while(writer, range(5))
    for _ in range(3):
        with pytest.raises(StorageError, match=str(error())):
            writer.commit()
    plan.error = None
    writer.append(step(5))
    writer.commit()
    assert rows_of(url) == list(range(6))


def test_a_failed_commit_shows_nothing(open_writer: OpenWriter, url: str) -> None:
    plan = FailWhile()
    writer = open_writer(plan)
    writer.append(step(0))
    writer.commit()
    writer.append(step(1))
    plan.error = broken
    with pytest.raises(StorageError):
        writer.commit()
    assert rows_of(url) == [0]


def test_an_append_that_raised_left_nothing_behind(open_writer: OpenWriter, url: str) -> None:
    plan = failing()
    writer = open_writer(plan, commit_steps=4)
    accepted, _ = append_while(writer, range(20))
    plan.error = None
    writer.commit()
    assert rows_of(url) == accepted


def test_appends_continue_after_a_failure_until_the_buffer_is_full(open_writer: OpenWriter) -> None:
    writer = open_writer(failing(), commit_steps=4)
    append_while(writer, range(4))
    until(lambda: has_failed(writer))
    _, n_raised = append_while(writer, range(4, 40))
    assert n_raised == 1


def test_a_full_buffer_refuses_more_until_the_storage_recovers(open_writer: OpenWriter, url: str) -> None:
    plan = failing()
    writer = open_writer(plan, buffer_bytes=SMALL_BUFFER)
    accepted, _ = append_while(writer, range(5 * ROWS))
    assert len(accepted) <= 2 * ROWS
    plan.error = None
    more, n_raised = append_while(writer, range(100, 120))
    writer.commit()
    assert (rows_of(url), n_raised) == (accepted + more, 0)


def test_an_episode_that_did_not_fit_leaves_no_trace(open_writer: OpenWriter, url: str) -> None:
    plan = failing()
    writer = open_writer(plan, buffer_bytes=SMALL_BUFFER)
    accepted, _ = append_while(writer, range(5 * ROWS))
    with pytest.raises(StorageError):
        writer.append_episode(steps(*range(200, 206)), terminated=True, env=1)
    plan.error = None
    writer.close()
    assert (rows_of(url), len(trajstore.open(url))) == (accepted, 1)


def test_a_rollout_that_did_not_fit_can_be_appended_again_after_a_failure(
    open_writer: OpenWriter, url: str
) -> None:
    plan = failing()
    writer = open_writer(plan, buffer_bytes=SMALL_BUFFER)
    accepted, _ = append_while(writer, range(5 * ROWS))
    rollout = {
        name: values.reshape(ROWS // 2, 2, *values.shape[1:])
        for name, values in steps(*range(100, 100 + ROWS)).items()
    }
    with pytest.raises(StorageError):
        writer.append_rollout(rollout, envs=[1, 2])
    plan.error = None
    writer.append_rollout(rollout, envs=[1, 2])
    writer.close()
    assert sorted(unaborted_rows(url)) == [*accepted, *range(100, 100 + ROWS)]


def test_an_episode_larger_than_the_buffer_can_be_appended_again_after_a_failure(
    open_writer: OpenWriter, url: str
) -> None:
    plan = failing()
    writer = open_writer(plan, buffer_bytes=SMALL_BUFFER)
    with pytest.raises(StorageError):
        writer.append_episode(steps(*range(5 * ROWS)), terminated=True)
    plan.error = None
    writer.append_episode(steps(*range(5 * ROWS)), terminated=True)
    writer.close()
    assert unaborted_rows(url) == list(range(5 * ROWS))


def unaborted_rows(url: str) -> list[int]:
    store = trajstore.open(url)
    kept = [i for i, end in enumerate(store.episodes["end"]) if end != "aborted"]
    return [int(a) for i in kept for a in store.read_episode(i)["action"]]


def test_close_raises_while_the_storage_fails_and_can_be_called_again(open_writer: OpenWriter, url: str) -> None:
    plan = failing()
    writer = open_writer(plan)
    append_while(writer, range(3))
    for _ in range(2):
        with pytest.raises(StorageError):
            writer.close()
    assert not writer.is_closed
    plan.error = None
    writer.close()
    assert (rows_of(url), writer.stats()["cut_episodes"]) == ([0, 1, 2], 1)


def test_a_seal_that_fails_can_be_closed_again(open_writer: OpenWriter, url: str) -> None:
    plan = FailWhile()
    writer = open_writer(plan)
    writer.append_episode(steps(0, 1, 2), terminated=True)
    writer.commit()
    plan.error = broken
    with pytest.raises(StorageError):
        writer.close()
    plan.error = None
    writer.close()
    assert [record.is_sealed for record in trajstore.open(url).streams] == [True]


def test_a_failure_just_before_commit_waits_is_not_left_for_a_later_call(
    open_writer: OpenWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = failing()
    writer = open_writer(plan)
    wait = writer._pipeline.wait

    def wait_late(ticket: int) -> None:
        until(lambda: has_failed(writer))
        plan.error = None
        wait(ticket)

    monkeypatch.setattr(writer._pipeline, "wait", wait_late)
    writer.append(step(0))
    try:
        writer.commit()
    except StorageError:
        plan.error = None  # raised by the call that failed: then it is no later call's business either
    writer.append(step(1))


def test_a_commit_by_time_beside_a_full_pipeline_does_not_wait_for_itself(
    open_writer: OpenWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The background thread decides to commit by time; before it has the lock, a job is submitted."""
    writer = open_writer(commit_seconds=0.05, commit_steps=2)
    ticking, go = threading.Event(), threading.Event()
    tick = writer._pipeline._commit_thread._tick

    def late_tick() -> None:
        ticking.set()
        assert go.wait(60)
        tick()

    monkeypatch.setattr(writer._pipeline._commit_thread, "_tick", late_tick)
    assert ticking.wait(60)
    append_while(writer, range(3))  # two are handed over, one is staged
    go.set()
    committer = writer._pipeline._commit_thread
    try:
        until(lambda: not committer._jobs)
    except AssertionError:
        with committer._condition:  # let the thread that waits for itself go, so that the writer can be closed
            committer._n_done += 10
            committer._condition.notify_all()
        raise


def test_a_failed_commit_is_tried_again_by_time_alone(
    open_writer: OpenWriter, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    plan = failing()
    writer = open_writer(plan, commit_seconds=0.05)
    writer.append(step(0))
    until(lambda: plan.n_failed > 0)
    plan.error = None
    until(lambda: rows_of(url) == [0])
    until(lambda: not has_failed(writer))
    writer.append(step(1))  # overcome before anybody asked, so nothing is raised
    assert "a background commit failed and will be retried" in caplog.text


def test_a_file_too_large_for_the_file_system_raises_and_is_kept_for_the_next_commit(url: str) -> None:
    data = {"frame": np.random.default_rng(0).integers(0, 256, (4, 1 << 20), np.uint8)}
    schema = Schema({"frame": Field("uint8", (1 << 20,), chunk_rows=4)})
    writer = trajstore.create(url, schema, fsync=False).writer(commit_seconds=None)
    key = writer.append_episode(data, terminated=True)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with pytest.raises(StorageError) as caught:
            writer.commit()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    writer.close()
    assert caught.value.errno == errno.EFBIG
    np.testing.assert_array_equal(trajstore.open(url).read_episode(key)["frame"], data["frame"])


# ---- leaving a with block -----------------------------------------------------------------------


def leave_by(error: BaseException, writer: Writer, *, n_committed: int = 0) -> None:
    """Leave a block by ``error`` after committed steps and three more steps, one of them of another env."""
    with writer:
        append_while(writer, range(n_committed))
        if n_committed:
            writer.commit()
        writer.append_episode(steps(10, 11), terminated=True, env=1)
        writer.append(step(n_committed), terminated=True)
        raise error


@pytest.mark.parametrize("kind", [KeyError, KeyboardInterrupt])
def test_an_exception_drops_what_came_after_the_last_commit(
    open_writer: OpenWriter, url: str, kind: type[BaseException]
) -> None:
    with pytest.raises(kind):
        leave_by(kind("mine"), open_writer(), n_committed=3)
    store = trajstore.open(url)
    assert (rows_of(url), list(store.episodes["end"]), store.streams[0].is_sealed) == ([0, 1, 2], ["cut"], True)


def test_an_exception_that_leaves_the_block_is_the_very_same_outside(open_writer: OpenWriter) -> None:
    error = KeyError("mine")
    with pytest.raises(KeyError) as caught:
        leave_by(error, open_writer(), n_committed=3)
    assert caught.value is error
    assert not hasattr(error, "__notes__")


def test_an_exception_before_the_first_commit_leaves_no_stream(open_writer: OpenWriter, url: str) -> None:
    with pytest.raises(KeyError):
        leave_by(KeyError(), open_writer())
    assert trajstore.open(url).streams == ()


def test_what_an_exception_dropped_is_counted_and_logged(
    open_writer: OpenWriter, caplog: pytest.LogCaptureFixture
) -> None:
    writer = open_writer()
    with pytest.raises(KeyError), caplog.at_level("WARNING"):
        leave_by(KeyError(), writer, n_committed=4)
    assert writer.stats()["dropped_steps"] == 3
    assert sum("3 steps that no commit had taken were dropped" in r.getMessage() for r in caplog.records) == 1


def test_an_exception_carries_a_note_where_the_discard_failed(open_writer: OpenWriter, url: str) -> None:
    error, writer = RuntimeError("mine"), open_writer(failing(no_space))
    writer.append(step(0))
    with pytest.raises(StorageError):
        writer.commit()
    with pytest.raises(RuntimeError, match="mine") as caught:
        leave_by(error, writer)
    assert caught.value is error
    assert ["No space left" in note for note in error.__notes__] == [True]
    assert (rows_of(url), writer.is_closed) == ([], True)


def test_leaving_normally_keeps_open_episodes_as_cut_and_counts_them(open_writer: OpenWriter, url: str) -> None:
    with open_writer() as writer:
        writer.append(steps(0, 1, 2), envs=[0, 1, 2])
        writer.end_episode(1, terminated=True)
    assert list(trajstore.open(url).episodes["end"]) == ["cut", "terminated", "cut"]
    assert writer.stats()["cut_episodes"] == 2


def test_leaving_normally_raises_what_the_storage_refused(open_writer: OpenWriter) -> None:
    with pytest.raises(StorageError, match="No space left"), open_writer(failing(no_space)) as writer:
        writer.append(step(0))
    assert writer.is_closed


# ---- background commits, and bounds -------------------------------------------------------------


@pytest.mark.parametrize("options", [{"commit_steps": 4}, {"commit_seconds": 0.02}], ids=["steps", "seconds"])
def test_commits_happen_without_a_call(open_writer: OpenWriter, url: str, options: dict[str, Any]) -> None:
    writer = open_writer(**options)
    append_while(writer, range(4))
    store = trajstore.open(url)
    until(lambda: store.refresh().n_rows == 4)
    assert rows_of(url) == [0, 1, 2, 3]


def test_half_a_buffer_is_committed_without_a_call(open_writer: OpenWriter, url: str) -> None:
    writer = open_writer(buffer_bytes=SMALL_BUFFER)
    append_while(writer, range(ROWS + 1))
    store = trajstore.open(url)
    until(lambda: store.refresh().n_rows > 0)
    assert rows_of(url) == list(range(store.snapshot.n_rows))


@pytest.mark.usefixtures("lock_order")
def test_appends_wait_while_the_storage_is_slow_and_both_stagings_are_full(
    open_writer: OpenWriter, url: str
) -> None:
    plan, accepted = BlockPuts(), []
    writer = open_writer(plan, buffer_bytes=SMALL_BUFFER)

    def append_all() -> None:
        for i in range(5 * ROWS):
            writer.append(step(i))
            accepted.append(i)

    appending = threading.Thread(target=append_all, daemon=True)
    appending.start()
    assert plan.reached.wait(60)
    until(lambda: len(accepted) >= ROWS)
    appending.join(0.3)
    assert appending.is_alive()
    assert ROWS <= len(accepted) <= 2 * ROWS
    plan.gate.set()
    appending.join(60)
    writer.commit()
    assert rows_of(url) == list(range(5 * ROWS))


def staged_bytes(writer: Writer) -> int:
    pipeline = writer._pipeline
    stagings = [pipeline.staging, *(job.staging for job in pipeline._commit_thread._jobs), *pipeline._free]
    arrays = [a for s in stagings if s for a in (*s.columns.values(), s.episode, s.env, s.dropped)]
    return sum(array.nbytes for array in arrays)


def test_staged_bytes_stay_within_the_buffer(open_writer: OpenWriter) -> None:
    writer = open_writer(failing(), buffer_bytes=1 << 16)
    append_while(writer, range(4000))
    assert 1 << 15 < staged_bytes(writer) <= 1 << 16


# ---- threads ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("lock_order")
def test_threads_append_to_their_own_envs_while_another_commits(open_writer: OpenWriter, url: str) -> None:
    writer, n_threads, n_steps = open_writer(), 4, 300
    is_done = threading.Event()

    def append_all(env: int) -> None:
        for t in range(n_steps):
            writer.append(step(1000 * env + t), env=env)

    def commit_all() -> None:
        while not is_done.is_set():
            writer.commit()

    threads = [threading.Thread(target=append_all, args=(env,)) for env in range(n_threads)]
    committing = threading.Thread(target=commit_all)
    for thread in (*threads, committing):
        thread.start()
    for thread in threads:
        thread.join()
    is_done.set()
    committing.join()
    writer.close()
    assert sorted(rows_of(url)) == sorted(1000 * env + t for env in range(n_threads) for t in range(n_steps))
    assert writer.stats()["commits"] > 1


@pytest.mark.usefixtures("lock_order")
def test_steps_of_an_env_stay_in_order_while_another_thread_commits(open_writer: OpenWriter, url: str) -> None:
    writer = open_writer(commit_steps=3)
    threads = [
        threading.Thread(target=lambda env=env: [writer.append(step(t), env=env) for t in range(200)])
        for env in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    writer.close()
    store = trajstore.open(url)
    assert [store.read_episode(i)["action"].tolist() for i in range(3)] == [list(range(200))] * 3


# ---- after close, amending, aborting, handles ---------------------------------------------------

CALLS: dict[str, Callable[[Writer], Any]] = {
    "append": lambda w: w.append(step(0)),
    "append_episode": lambda w: w.append_episode(steps(0, 1)),
    "append_rollout": lambda w: w.append_rollout({k: v[:, None] for k, v in steps(0, 1).items()}),
    "end_episode": lambda w: w.end_episode(terminated=True),
    "abort_episode": lambda w: w.abort_episode(),
    "amend": lambda w: w.amend({"action": 1}),
    "commit": lambda w: w.commit(),
}


@pytest.mark.parametrize("name", CALLS)
def test_every_call_after_close_raises(open_writer: OpenWriter, name: str) -> None:
    writer = open_writer()
    writer.close()
    with pytest.raises(ClosedError, match=f"{writer.stream}.*closed"):
        CALLS[name](writer)


def test_close_may_be_called_twice(open_writer: OpenWriter, url: str) -> None:
    writer = open_writer()
    writer.append(step(0))
    writer.close()
    writer.close()
    assert rows_of(url) == [0]


def test_amend_replaces_the_newest_step_before_it_is_committed(open_writer: OpenWriter, url: str) -> None:
    writer = open_writer()
    append_while(writer, range(3))
    assert writer.amend(step(7)) == Handle(writer.stream, 0, 2)
    writer.commit()
    assert rows_of(url) == [0, 1, 7]


def test_amend_replaces_an_earlier_step_and_only_the_fields_given(open_writer: OpenWriter, url: str) -> None:
    writer = open_writer()
    writer.append(steps(0, 10), envs=[0, 1])
    writer.append(steps(1, 11), envs=[0, 1])
    assert writer.amend({"action": 99}, env=1, t=0) == Handle(writer.stream, 1, 0)
    writer.commit()
    store = trajstore.open(url)
    assert [store.read_episode(i)["action"].tolist() for i in range(2)] == [[0, 1], [99, 11]]
    assert store.read_episode(1)["reward"].tolist() == [10, 11]


def test_amend_after_a_commit_raises_and_changes_nothing(open_writer: OpenWriter, url: str) -> None:
    writer = open_writer()
    append_while(writer, range(2))
    writer.commit()
    writer.append(step(2))
    with pytest.raises(StepPlacedError, match="step 1 of env 0 is committed"):
        writer.amend(step(9), t=1)
    writer.amend(step(8), t=2)
    writer.commit()
    assert rows_of(url) == [0, 1, 8]


def test_aborting_before_a_commit_drops_the_steps(open_writer: OpenWriter, url: str) -> None:
    writer = open_writer()
    append_while(writer, range(3))
    key = writer.abort_episode()
    writer.append(step(5))
    writer.commit()
    episodes = trajstore.open(url).episodes
    assert (list(episodes["end"]), list(episodes["length"])) == (["aborted", "open"], [0, 1])
    assert (episodes.key(0), rows_of(url), writer.stats()["dropped_steps"]) == (key, [5], 3)


def test_aborting_after_a_commit_keeps_what_was_placed(open_writer: OpenWriter, url: str) -> None:
    writer = open_writer()
    append_while(writer, range(3))
    writer.commit()
    writer.append(step(3))
    writer.abort_episode()
    writer.commit()
    assert (rows_of(url), list(trajstore.open(url).episodes["end"])) == ([0, 1, 2], ["aborted"])


def value_at(store: Store, stream: str, episode: int, t: int) -> int:
    return int(store.read_episode(EpisodeKey(stream, episode), start=t, stop=t + 1, fields=["action"])["action"][0])


def test_handles_of_single_steps_are_valid_from_the_moment_of_append(open_writer: OpenWriter, url: str) -> None:
    writer = open_writer(commit_steps=3)
    handles = [writer.append(step(i), env=i % 2, terminated=i % 5 == 4) for i in range(20)]
    writer.commit()
    store = trajstore.open(url)
    assert [value_at(store, *handle) for handle in handles if isinstance(handle, Handle)] == list(range(20))


def test_handles_of_blocks_are_valid_from_the_moment_of_append(open_writer: OpenWriter, url: str) -> None:
    writer = open_writer()
    data = {name: values.reshape(6, 2, *values.shape[1:]) for name, values in steps(*range(12)).items()}
    terminated = np.arange(12).reshape(6, 2) % 5 == 4
    handles: Handles = writer.append_rollout(data, terminated=terminated)
    writer.commit()
    store = trajstore.open(url)
    found = [
        value_at(store, handles.stream, int(episode), int(t))
        for episode, t in zip(handles.episode.flat, handles.t.flat, strict=True)
    ]
    assert found == list(range(12))


def test_the_key_of_a_whole_episode_is_valid_from_the_moment_of_append(open_writer: OpenWriter, url: str) -> None:
    writer = open_writer()
    keys = [writer.append_episode(steps(i, i + 1, n_final=1), terminated=True, env=i) for i in (5, 0, 3)]
    writer.commit()
    store = trajstore.open(url)
    assert [store.read_episode(key)["action"].tolist() for key in keys] == [[5, 6], [0, 1], [3, 4]]


# ---- bad input ----------------------------------------------------------------------------------

BadCall = tuple[Callable[[Writer], Any], type[Exception], str]

BAD_CALLS: dict[str, BadCall] = {
    "wrong dtype": (
        lambda w: w.append(step(1) | {"observation": np.zeros(4)}),
        DataError,
        r"'observation': expected float32 of shape \(4\), got float64 of shape \(4\)",
    ),
    "float for an integer": (
        lambda w: w.append(step(1) | {"action": 1.5}),
        DataError,
        r"'action': expected int64 of shape \(\), got float",
    ),
    "wrong shape": (
        lambda w: w.append(step(1) | {"observation": np.zeros(3, np.float32)}),
        DataError,
        r"'observation': expected float32 of shape \(4\), got float32 of shape \(3\)",
    ),
    "too few envs' values": (
        lambda w: w.append(steps(1, 2), envs=[1, 2, 3]),
        DataError,
        r"'observation': expected float32 of shape \(3, 4\), got float32 of shape \(2, 4\)",
    ),
    "nested list of unequal lengths": (
        lambda w: w.append(step(1) | {"observation": [[1.0], [1.0, 2.0]]}),
        DataError,
        "'observation'",
    ),
    "no array at all": (
        lambda w: w.append(step(1) | {"observation": None}),
        DataError,
        "'observation': .*object.*NoneType",
    ),
    "missing field": (
        lambda w: w.append({"action": 1, "reward": 0.0}),
        DataError,
        "missing 'observation'.*the schema has 'observation', 'action', 'reward'",
    ),
    "extra field": (
        lambda w: w.append(step(1) | {"bonus": 1}),
        DataError,
        "unexpected 'bonus'.*the schema has 'observation', 'action', 'reward'",
    ),
    "ragged lengths": (
        lambda w: w.append_episode(
            steps(1, 2, 3) | {"action": np.arange(1), "reward": steps(1, 2)["reward"]}, env=1
        ),
        DataError,
        "same number of rows in every field.*observation: 3, action: 1, reward: 2",
    ),
    "two final values": (
        lambda w: w.append_episode(steps(1, 2, 3, n_final=2), env=1),
        DataError,
        "same number of rows in every field.*observation: 5, action: 3",
    ),
    "zero-length episode": (
        lambda w: w.append_episode({name: values[:0] for name, values in steps(1).items()}, env=1),
        DataError,
        "expected at least one step, got none",
    ),
    "episode where one is open": (
        lambda w: w.append_episode(steps(1, 2)),
        DataError,
        "env 0 has an open episode",
    ),
    "ending an env that has no episode": (
        lambda w: w.end_episode(7, terminated=True),
        EpisodeNotFoundError,
        "env 7 has no open episode",
    ),
    "aborting an env that has no episode": (
        lambda w: w.abort_episode(7),
        EpisodeNotFoundError,
        "env 7 has no open episode",
    ),
    "flag that is no bool": (
        lambda w: w.append(step(1), terminated=1),
        DataError,
        "terminated: expected a bool, got int",
    ),
    "flags of another shape": (
        lambda w: w.append(steps(1, 2), envs=[1, 2], terminated=np.array([True])),
        DataError,
        r"terminated: expected bool of shape \(2,\), got bool of shape \(1,\)",
    ),
    "final of another shape, of a step that does not end": (
        lambda w: w.append(step(1), final={"observation": np.zeros(5, np.float32)}),
        DataError,
        r"'observation': expected float32 of shape \(4\), got float32 of shape \(5\)",
    ),
    "final of a field without one": (
        lambda w: w.append(step(1), terminated=True, final={"action": 1}),
        DataError,
        "final: expected a final value of 'observation', got one of 'action'",
    ),
    "final of another shape": (
        lambda w: w.end_episode(terminated=True, final={"observation": np.zeros(5, np.float32)}),
        DataError,
        r"'observation': expected float32 of shape \(4\), got float32 of shape \(5\)",
    ),
    "env twice": (
        lambda w: w.append(steps(1, 2, 3), envs=[1, 2, 2]),
        DataError,
        r"envs: .*\b2\b.*twice|envs: .*twice.*\b2\b",
    ),
    "env out of range": (
        lambda w: w.append(step(1), env=-1),
        DataError,
        "env: expected a number from 0 to .*, got -1",
    ),
    "one of envs out of range": (
        lambda w: w.append(steps(1, 2), envs=[1, -3]),
        DataError,
        "envs: expected numbers from 0 to .*, got -3",
    ),
    "env and envs": (
        lambda w: w.append(steps(1, 2), env=0, envs=[1, 2]),
        DataError,
        "either env or envs",
    ),
    "rollout of one axis": (
        lambda w: w.append_rollout({"observation": np.zeros(4, np.float32), "action": 1, "reward": 0.0}),
        DataError,
        "'observation': expected 2 leading axes",
    ),
    "metadata that is not JSON": (
        lambda w: w.append_episode(steps(1, 2), env=1, metadata={"callback": len}),
        DataError,
        "metadata .*callback.*not storable as JSON.*builtin_function",
    ),
    "declared column of another type": (
        lambda w: w.append_episode(steps(1, 2), env=1, metadata={"success": "yes"}),
        DataError,
        "'success': expected bool, got str 'yes'",
    ),
    "one call larger than the buffer": (
        lambda w: w.append({k: np.repeat(v, 99, 0) for k, v in steps(1).items()}, envs=range(99)),
        DataError,
        f"up to 198 rows.*{SMALL_BUFFER}",
    ),
    "amending a step that is not there": (
        lambda w: w.amend({"action": 1}, t=5),
        DataError,
        "env 0 has steps 0 to 0, got 5",
    ),
    "amending a field that is not there": (
        lambda w: w.amend({"bonus": 1}),
        DataError,
        "unexpected 'bonus'",
    ),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_input_is_refused_by_name_and_changes_nothing(open_writer: OpenWriter, url: str, name: str) -> None:
    call, kind, message = BAD_CALLS[name]
    writer = open_writer(buffer_bytes=SMALL_BUFFER)
    writer.append(step(0))
    before = writer.stats()
    with pytest.raises(kind, match=message):
        call(writer)
    assert writer.stats() == before
    writer.append(step(1), terminated=True)
    writer.close()
    assert (rows_of(url), list(trajstore.open(url).episodes["end"])) == ([0, 1], ["terminated"])


def test_final_values_without_a_declared_field_are_refused(open_writer: OpenWriter, url: str) -> None:
    writer = open_writer(schema=Schema({"action": Field("int64")}))
    with pytest.raises(
        DataError, match=r"final: expected a final value of no field, got one of 'action'.*final=True"
    ):
        writer.append({"action": 0}, terminated=True, final={"action": 1})
    writer.append({"action": 5})
    writer.commit()
    assert trajstore.open(url).read_episode(0)["action"].tolist() == [5]


NEEDS_SCHEMA = {
    "wrong dtype", "float for an integer", "wrong shape", "too few envs' values", "missing field", "extra field",
    "episode where one is open", "final of a field without one", "declared column of another type",
}  # fmt: skip


@pytest.mark.parametrize("name", [name for name in BAD_CALLS if name not in NEEDS_SCHEMA])
def test_bad_input_as_the_very_first_call_leaves_no_schema_behind(
    open_writer: OpenWriter, url: str, name: str
) -> None:
    writer = open_writer(schema=None, buffer_bytes=SMALL_BUFFER)
    before = writer.stats()
    with pytest.raises((DataError, EpisodeNotFoundError)):
        BAD_CALLS[name][0](writer)
    assert (writer.stats(), writer.schema) == (before, None)
    key = writer.append_episode({"other": np.arange(6, dtype=np.int16).reshape(3, 2)}, terminated=True)
    writer.close()
    store = trajstore.open(url)
    assert (len(store), store.read_episode(key)["other"].tolist()) == (1, [[0, 1], [2, 3], [4, 5]])


def test_nan_and_infinities_are_stored_as_they_are(open_writer: OpenWriter, url: str) -> None:
    strange = np.array([np.nan, np.inf, -np.inf, -0.0], np.float32)
    writer = open_writer()
    writer.append({"observation": strange, "action": 0, "reward": float("nan")})
    writer.commit()
    episode = trajstore.open(url).read_episode(0)
    assert episode["observation"].tobytes() == strange.tobytes()
    assert np.isnan(episode["reward"]).all()


def test_a_reader_waits_for_a_thread_that_has_the_lock_for_a_moment_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trajstore.writing.lifecycle._BRIEF_S", 60.0)  # a moment may be long on a busy machine
    writer = trajstore.create("memory://brief").writer(commit_seconds=None)
    writer.append({"x": np.float32(1)})
    inside, done = threading.Event(), threading.Event()

    def brief() -> None:
        with writer._lifecycle.briefly(), writer._lock:
            inside.set()
            done.wait(0.02)

    thread = threading.Thread(target=brief)
    thread.start()
    inside.wait()
    with writer.locked_staging() as staging:  # else a batch would miss what was appended, now and then
        assert staging is not None
        assert staging.n == 1
    thread.join()
    writer.discard()
