"""Ranks as real processes: signals, exceptions and SIGKILL, through the store and through torch.distributed."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import trajstore
from tests.support.rank_process import OPTIONS, Nursery, Rank, digest, nurseries, shown
from tests.support.servers.process import free_ports
from trajstore import Checkpoint, ReplayBuffer
from trajstore.storage import open_storage
from trajstore.store.checkpoints import find, list_checkpoints

END_S = 25.0  # a process that is asked to end within a few seconds takes less


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    with nurseries(tmp_path_factory.mktemp("ranks")) as made:
        yield made


@pytest.fixture(autouse=True)
def nobody_is_left(home: Nursery) -> Iterator[None]:
    yield
    home.end_all()


Start = Callable[..., list[Rank]]


@pytest.fixture
def start(home: Nursery, url: str) -> Start:
    def begun(
        what: str | list[str], size: int, *, through: str = "store", is_awaited: bool = True, **told: Any
    ) -> list[Rank]:
        whats = [what] * size if isinstance(what, str) else what
        more = {"port": free_ports(1)[0]} if through == "torch" else {}
        ranks = [home.start(name, rank, size, url, **more, **told) for rank, name in enumerate(whats)]
        if is_awaited:
            for rank in ranks:
                rank.await_word("ready")
        return ranks

    return begun


def published(url: str) -> list[Checkpoint]:
    return list_checkpoints(open_storage(url))


def names(url: str) -> list[str]:
    return [checkpoint.name for checkpoint in published(url)]


def n_steps_at(url: str, which: str) -> int:
    store = trajstore.open(url, at=which)
    return sum(len(store.read_episode(i)["x"]) for i in range(len(store)))


THROUGH = pytest.mark.parametrize("through", ["store", "torch"])


# ---- torch.distributed ---------------------------------------------------------------------------------------


def test_rank_and_size_default_to_those_of_torch_distributed(start: Start, url: str) -> None:
    ranks = start("meet_torch", 2, through="torch", is_awaited=False)
    for number, rank in enumerate(ranks):
        rank.await_word("over")
        assert rank.await_end() == 0
        assert rank.words("default") == [[number, 2, "TorchNotes"]]
        assert rank.words("beside") == [[number, 2, "StoreNotes"]]
        assert rank.words("torch") == [[number, 2, "TorchNotes"]]
        assert rank.words("alone") == [[0, 1]]
        assert "through='torch'" in rank.words("refused")[0][0]
    for word, place in (("saved", url), ("saved beside", f"{url}-beside")):
        ids = {rank.words(word)[0][0] for rank in ranks}
        assert ids == {c.id for c in published(place)}


def test_ranks_of_a_process_group_may_try_again_after_one_could_not_begin(start: Start, url: str) -> None:
    ranks = start("retry_after_failure", 2, through="torch", is_awaited=False)
    codes = [rank.await_end() for rank in ranks]
    assert [rank.words("failed")[0][0] for rank in ranks] == ["RankTimeoutError", "SchemaError"]
    assert codes == [0, 0], [rank.errors[-600:] for rank in ranks]
    assert {rank.words("saved")[0][0] for rank in ranks} == {c.id for c in published(url)}


# ---- signals -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("through", "k", "wait"),
    [("store", 0, "sleep"), ("store", 1, "c"), ("store", 2, "lock"), ("torch", 1, "torch"), ("torch", 0, "c")],
)
def test_a_rank_that_gets_sigterm_takes_a_checkpoint_of_all_first(
    home: Nursery, url: str, through: str, k: int, wait: str
) -> None:
    more = {"port": free_ports(1)[0]} if through == "torch" else {}
    ranks = [home.start("stay", r, 3, url, wait=wait if r == k else "told", **more) for r in range(3)]
    for rank in ranks:
        rank.await_word("ready")
    ranks[k].kill(signal.SIGTERM)
    assert ranks[k].await_end() == -signal.SIGTERM
    assert names(url) == ["last"]
    assert published(url)[0].n_ranks == 3
    assert n_steps_at(url, "last") == 15
    for number, rank in enumerate(ranks):
        if number != k:  # the others live on, and end in their own time
            assert home.code(rank.key) is None
            rank.stop()
            assert rank.await_end(END_S) == 0, rank.errors
            assert rank.words("closed")


@THROUGH
def test_ranks_that_all_get_sigterm_at_once_all_end_with_a_checkpoint(start: Start, url: str, through: str) -> None:
    ranks = start("stay", 3, through=through, wait="sleep", exit_s=12.0, options={"rank_timeout_s": 12.0})
    for rank in ranks:
        rank.kill(signal.SIGTERM)
    assert [rank.await_end(END_S) for rank in ranks] == [-signal.SIGTERM] * 3
    found = published(url)
    assert found
    assert {checkpoint.name for checkpoint in found} == {"last"}
    assert n_steps_at(url, "latest") == 15


def test_a_handler_that_was_set_before_still_runs(start: Start, url: str) -> None:
    ranks = start("stay", 2, handler=True, wait="sleep")
    ranks[1].kill(signal.SIGTERM)
    assert ranks[1].await_end() == 7
    assert ranks[1].words("handler ran")
    assert names(url) == ["last"]


@pytest.mark.parametrize("what", ["stay", "fail", "fail_inside"])
@pytest.mark.parametrize("dead", [0, 1])
def test_the_end_is_not_put_off_for_a_dead_rank(start: Start, url: str, what: str, dead: int) -> None:
    told = {"exit_s": 1.0, "options": {"rank_timeout_s": 600.0}}
    ranks = start(what, 2, wait="sleep", **told)
    ranks[dead].kill()
    ranks[dead].await_end()
    left = ranks[1 - dead]
    if what == "stay":
        left.kill(signal.SIGTERM)
    else:
        left.stop()
    assert left.await_end(END_S) == (-signal.SIGTERM if what == "stay" else 1)
    assert names(url) == []
    if what != "stay":
        assert "LookupError: on purpose" in left.errors


def test_a_single_session_whose_main_thread_is_stuck_ends_in_time(start: Start, url: str) -> None:
    (rank,) = start("stuck_inside", 1, exit_s=1.0)
    rank.await_word("stuck")
    rank.kill(signal.SIGTERM)
    assert rank.await_end(END_S) == -signal.SIGTERM


@pytest.mark.parametrize("options", [{}, {"attend_s": 0.05}], ids=["alone", "attending"])
def test_a_single_session_takes_a_last_checkpoint(start: Start, url: str, options: dict[str, Any]) -> None:
    (rank,) = start("stay", 1, wait="c", options=options | {"attend_s": options.get("attend_s")})
    rank.kill(signal.SIGTERM)
    assert rank.await_end() == -signal.SIGTERM
    assert names(url) == ["last"]
    assert n_steps_at(url, "last") == 5


def test_a_buffer_that_was_closed_on_another_thread_does_not_swallow_signals(start: Start) -> None:
    (rank,) = start("close_elsewhere", 1)
    rank.await_word("closed")
    rank.kill(signal.SIGTERM)
    assert rank.await_end(END_S) == -signal.SIGTERM


def test_two_buffers_of_a_process_both_take_a_last_checkpoint(start: Start, url: str) -> None:
    (rank,) = start("two_buffers", 1)
    rank.await_word("both")
    rank.kill(signal.SIGTERM)
    assert rank.await_end(END_S) == -signal.SIGTERM
    assert names(url) == ["last"]
    assert names(f"{url}-other") == ["last"]


# ---- exceptions ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "k", "through"),
    [("fail", 0, "store"), ("fail", 1, "torch"), ("fail_inside", 1, "store"), ("fail_inside", 0, "torch")],
)
def test_an_uncaught_exception_takes_a_checkpoint_of_all_first(
    start: Start, home: Nursery, url: str, what: str, k: int, through: str
) -> None:
    ranks = start([what if r == k else "stay" for r in range(2)], 2, through=through)
    ranks[k].stop()
    assert ranks[k].await_end() == 1
    assert names(url) == ["last"]
    assert n_steps_at(url, "last") == 10
    assert "Traceback" in ranks[k].errors
    assert "LookupError: on purpose" in ranks[k].errors
    assert home.code(ranks[1 - k].key) is None
    ranks[1 - k].stop()
    assert ranks[1 - k].await_end(END_S) == 0


def test_a_hook_for_exceptions_that_was_set_before_still_runs(start: Start, url: str) -> None:
    ranks = start(["fail", "stay"], 2, hook=True)
    ranks[0].stop()
    assert ranks[0].await_end() == 1
    assert ranks[0].words("hook ran") == [["LookupError"]]
    assert names(url) == ["last"]


# ---- in this process -----------------------------------------------------------------------------------------


def set_in_this_process() -> tuple[Any, ...]:
    wakeup = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(wakeup)
    return signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGUSR1), sys.excepthook, wakeup


def test_closing_sets_back_all_that_was_set(url: str) -> None:
    before = set_in_this_process()
    buffer = ReplayBuffer(url, **OPTIONS)
    for _ in range(2):  # the second replaces the first
        buffer.checkpoint_on_exit(signals=(signal.SIGTERM, signal.SIGUSR1))
    assert set_in_this_process() != before
    buffer.close()
    assert set_in_this_process() == before
    deadline = time.monotonic() + 120
    while "trajstore-exit" in {thread.name for thread in threading.enumerate()}:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_hooks_that_are_removed_give_back_their_descriptors(url: str) -> None:
    buffer = ReplayBuffer(url, **OPTIONS)

    def n_descriptors() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    buffer.checkpoint_on_exit()
    before = n_descriptors()
    for _ in range(5):
        buffer.checkpoint_on_exit()
    buffer.close()
    deadline = time.monotonic() + 120
    while n_descriptors() > before:
        assert time.monotonic() < deadline, "descriptors are left open"
        time.sleep(0.01)


def test_hooks_are_refused_outside_the_main_thread(url: str) -> None:
    failures: list[BaseException] = []

    def hook(buffer: ReplayBuffer) -> None:
        try:
            buffer.checkpoint_on_exit()
        except RuntimeError as failure:
            failures.append(failure)

    before = set_in_this_process()
    with ReplayBuffer(url, **OPTIONS) as buffer:
        thread = threading.Thread(target=hook, args=(buffer,))
        thread.start()
        thread.join()
    assert "main thread" in str(failures[0])
    assert set_in_this_process() == before


def test_an_exception_that_leaves_the_block_is_raised_as_it_is(url: str) -> None:
    def fail() -> None:
        with ReplayBuffer(url, **OPTIONS) as buffer:
            buffer.add_episode({"x": np.arange(3), "reward": np.ones(3, np.float32)}, terminated=True)
            buffer.checkpoint_on_exit()
            raise LookupError("on purpose")

    with pytest.raises(LookupError, match="on purpose"):
        fail()
    assert names(url) == ["last"]


# ---- SIGKILL -------------------------------------------------------------------------------------------------


def held_at(ranks: list[Rank], id_: str) -> list[str]:
    """By rank, what it wrote down at the cut of a checkpoint."""
    return [{id_: held for id_, held, _ in rank.words("cut")}[id_] for rank in ranks]


@THROUGH
def test_ranks_that_are_killed_at_random_go_on_from_a_published_checkpoint(
    start: Start, url: str, through: str
) -> None:
    rng = np.random.default_rng(len(through))
    options = {"checkpoint_seconds": 0.04, "keep_checkpoints": 3, "rank_timeout_s": 30.0}
    known: set[str] = set()
    for life in range(5):
        ranks = start("work", 2, through=through, options=options)
        deadline = time.monotonic() + 80
        while not ({c.id for c in published(url)} - known) and life:
            assert time.monotonic() < deadline, [rank.where()[-6000:] for rank in ranks]
            time.sleep(0.01)
        time.sleep(float(rng.uniform(0.0, 0.2)))
        first = ranks[life % 2]
        first.kill()
        time.sleep(float(rng.uniform(0.0, 0.05)))
        ranks[1 - life % 2].kill()
        assert [rank.await_end() for rank in ranks] == [-signal.SIGKILL] * 2
        there = published(url)
        assert [c.parent for c in there[1:]] == [c.id for c in there[:-1]]
        if not there:
            continue
        latest = find(open_storage(url), "latest")
        if latest.id not in known:
            _check_resumed(url, held_at(ranks, latest.id))
        known |= {c.id for c in there}
    assert len(known) > 3


def _check_resumed(url: str, wanted: list[str]) -> None:
    """All ranks hold what they wrote down at the cut."""
    found: dict[int, str] = {}

    def resumed(rank: int) -> None:
        changes = {"checkpoint_seconds": None, "attend_s": 60.0, "rank_timeout_s": 30.0, "through": "store"}
        with ReplayBuffer.resume(url, "latest", rank=rank, world_size=2, fsync=False, **changes) as buffer:
            found[rank] = digest(shown(buffer))

    threads = [threading.Thread(target=resumed, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [found.get(rank) for rank in range(2)] == wanted
