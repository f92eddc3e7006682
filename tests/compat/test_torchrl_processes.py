"""A buffer around a TrajStorage is used by several processes, which all see the same rows."""

from __future__ import annotations

import contextlib
import copy
import multiprocessing
import pickle  # noqa: TID251 - of objects, by the user
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what torchrl's own imports warn of
    pytest.importorskip("torchrl")
    from torchrl.data import ReplayBuffer, TensorDictReplayBuffer
    from torchrl.data.replay_buffers import Sequence, SliceSampler

from tensordict import NonTensorStack, TensorDict

from trajstore import ClosedError, DataError
from trajstore.compat.torchrl import PrioritisedSampler, SharedTrajStorage, TrajStorage

SPAWN = multiprocessing.get_context("spawn")
TIMEOUT_S = 300


def rows(n: int, first: int = 0, worker: int = 0) -> TensorDict:
    number = torch.arange(first, first + n)
    done = (number % 10 == 9)[:, None]
    wide = number[:, None].float().repeat(1, 8)
    workers = torch.full((n,), worker)
    return TensorDict({"number": number, "worker": workers, "wide": wide, "next": {"done": done}}, [n])


class Worker:
    """A spawned process that runs functions of this module; starting one takes seconds."""

    def __init__(self, *arguments: Any) -> None:
        self._here, there = SPAWN.Pipe()
        self.process = SPAWN.Process(target=work, args=(there, arguments))
        self.process.start()
        there.close()

    def start(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Run a function; without arguments, with those that the process was started with."""
        self._here.send((function, arguments))

    def result(self) -> Any:
        """Wait for the result of a function, or raise its error."""
        assert self._here.poll(TIMEOUT_S), "no answer"
        found = self._here.recv()
        if isinstance(found, Exception):
            raise found
        return found

    def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        self.start(function, *arguments)
        return self.result()

    def end(self) -> None:
        self._here.close()
        self.process.join(TIMEOUT_S)
        assert self.process.exitcode == 0


def work(there: Any, arguments: tuple[Any, ...]) -> None:
    warnings.simplefilter("ignore")
    with contextlib.suppress(EOFError):
        while True:
            function, others = there.recv()
            try:
                there.send(function(*(others or arguments)))
            except Exception as error:
                there.send(error)


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    worker = Worker()
    yield worker
    worker.end()


@pytest.fixture(params=["a directory", "memory", "RAM"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TrajStorage]:
    url = {"a directory": tmp_path / "store", "memory": f"memory://processes-{id(request)}", "RAM": None}
    with TrajStorage(url[request.param], 100, fsync=False) as storage:
        yield storage


# ---- collectors and learners


def collect(rb: ReplayBuffer, worker: int, n: int) -> list[list[int]]:
    places = []
    for i in range(n):
        index = rb.extend(rows(4, 4 * i, worker))
        assert torch.equal(rb[index]["number"].clone(), torch.arange(4 * i, 4 * i + 4))
        places.append(index.tolist())
    return places


def test_several_processes_extend_and_sample_one_buffer(tmp_path: Path) -> None:
    with TrajStorage(tmp_path, 100, fsync=False) as storage:
        rb = ReplayBuffer(storage=storage, batch_size=16).share()
        workers = [Worker(rb, number, 4) for number in range(2)]
        for one in workers:
            one.start(collect)  # the first row comes from any of them
        places = [place for one in workers for group in one.result() for place in group]
        assert sorted(places) == list(range(32))
        assert (len(rb), rb.write_count) == (32, 32)
        held = rb[:]
        for number in range(2):
            assert sorted(held["number"][held["worker"] == number].tolist()) == list(range(16))
        rb.extend(rows(8, 200))
        assert workers[0].run(learn_first) == (40, True, True)
        assert (int(rb[0]["number"]), rb.sample().batch_size) == (77, torch.Size([16]))
        rb.extend(rows(65))  # goes round
        assert (len(rb), storage.next_slot) == (100, 5)
        for one in workers:
            one.end()
    with TrajStorage(tmp_path, 100, fsync=False) as storage:
        assert len(storage) == 100


def learn(rb: ReplayBuffer) -> tuple[int, bool, bool]:
    batch = rb.sample()
    is_same = torch.equal(batch["wide"][:, 0].long(), batch["number"])
    rb[0] = rows(1, 77)[0]
    return len(rb), is_same, isinstance(rb.storage, SharedTrajStorage)


def learn_first(rb: ReplayBuffer, *_: int) -> tuple[int, bool, bool]:
    return learn(rb)


def test_a_learner_in_another_process_samples_and_writes_what_the_first_sees_at_once(
    storage: TrajStorage, worker: Worker
) -> None:
    rb = TensorDictReplayBuffer(storage=storage, batch_size=16)
    rb.extend(rows(40))
    revision = storage._mutation_revision
    assert worker.run(learn, rb) == (40, True, True)
    assert int(rb[0]["number"]) == 77
    assert storage._mutation_revision > revision  # samplers that cached episodes notice


def last_rows(rb: ReplayBuffer) -> list[int]:
    return [len(rb), int(rb[-1]["number"]), *rb[len(rb) - 2 :]["number"].clone().tolist()]


def test_what_the_first_process_writes_is_seen_in_others_at_once(storage: TrajStorage, worker: Worker) -> None:
    rb = ReplayBuffer(storage=storage)
    rb.extend(rows(40))
    worker.run(remember, rb)
    assert worker.run(last_rows_of_remembered, None) == [40, 39, 38, 39]
    rb.extend(rows(40, 40))
    assert worker.run(last_rows_of_remembered, None) == [80, 79, 78, 79]


REMEMBERED: list[Any] = []


def remember(rb: ReplayBuffer) -> None:
    REMEMBERED[:] = [rb]


def last_rows_of_remembered(_: None) -> list[int]:
    return last_rows(REMEMBERED[0])


def draw_slices(rb: ReplayBuffer) -> tuple[list[int], bool]:
    batch = rb.sample()
    steps = batch["number"].reshape(-1, 5).diff(dim=1)
    return list(batch.batch_size), bool((steps == 1).all())


@pytest.mark.parametrize("kind", ["slices", "sequences"])
def test_samplers_of_slices_work_in_other_processes(kind: str, worker: Worker) -> None:
    with TrajStorage(None, 100) as storage:
        options: dict[str, Any] = (
            {"sampler": SliceSampler(slice_len=5), "batch_size": 20}
            if kind == "slices"
            else {"sample_unit": Sequence(length=5, episode_boundary="stop"), "batch_size": 4}
        )
        rb = TensorDictReplayBuffer(storage=storage, **options)
        rb.extend(rows(60))
        shape, is_contiguous = worker.run(draw_slices, rb)
        assert shape == [20] or kind == "sequences"
        assert is_contiguous or kind == "sequences"


def write_text(rb: ReplayBuffer) -> list[str]:
    rb.extend(TensorDict({"number": torch.arange(3, 5), "text": NonTensorStack("d" * 100, "e")}, [2]))
    rb.add(TensorDict({"number": torch.tensor(5), "text": "f"}, []))
    return list(rb[:]["text"]) + list(rb[torch.tensor([4, 0])]["text"])


def test_text_goes_between_processes(worker: Worker) -> None:
    with TrajStorage(None, 100) as storage:
        rb = ReplayBuffer(storage=storage)
        rb.extend(TensorDict({"number": torch.arange(3), "text": NonTensorStack("a", "b", "c")}, [3]))
        texts = ["a", "b", "c", "d" * 100, "e", "f"]
        assert worker.run(write_text, rb) == [*texts, "e", "a"]
        assert list(rb[:]["text"]) == texts


def write_elements(rb: ReplayBuffer) -> list[list[int]]:
    first = rb.read_all_in_order(end=1).clone()
    first["number"] = first["number"] + 100
    rb.write_all(first, end=1)
    found: list[list[int]] = rb[:]["number"].clone().tolist()
    return found


def test_buffers_of_two_dimensions_are_used_by_several_processes(worker: Worker) -> None:
    with TrajStorage(None, 100, ndim=2) as storage:
        rb = TensorDictReplayBuffer(storage=storage)
        rb.extend(TensorDict({"number": torch.arange(6).reshape(2, 3)}, [2, 3]))
        expected = [[100, 101, 102], [3, 4, 5]]
        assert worker.run(write_elements, rb) == expected
        assert rb[:]["number"].tolist() == expected


def write_badly(rb: ReplayBuffer) -> list[int]:
    with pytest.raises(DataError, match="'wide' is missing"):
        rb.extend(rows(2).exclude("wide"))
    rb.storage.resume(rb)
    with pytest.raises(DataError, match="cannot be changed in place"):
        rb[:]["number"].zero_()
    return [*rb.extend(rows(2)).tolist(), rb.storage.next_slot]


def test_rows_that_the_first_process_refuses_are_refused_in_others(storage: TrajStorage, worker: Worker) -> None:
    rb = ReplayBuffer(storage=storage)
    rb.extend(rows(10))
    assert worker.run(write_badly, rb) == [10, 11, 12]


def empty_and_dump(rb: ReplayBuffer, path: Path) -> int:
    rb.storage.dumps(path)
    rb.empty()
    n = len(rb)
    rb.storage.loads(path)
    rb.storage.flush()
    rb.storage.close()
    return n


def test_dumps_and_durability_are_asked_for_in_any_process(tmp_path: Path, worker: Worker) -> None:
    with TrajStorage(tmp_path / "store", 100, fsync=False, commit_seconds=None) as storage:
        rb = ReplayBuffer(storage=storage)
        rb.extend(rows(10))
        assert worker.run(empty_and_dump, rb, tmp_path / "dump") == 0
        assert rb[:]["number"].tolist() == list(range(10))


# ---- what a pickle holds


def test_a_pickle_opened_in_its_own_process_is_the_same_storage() -> None:
    with TrajStorage(None, 100) as storage:
        rb = TensorDictReplayBuffer(
            storage=storage, sampler=PrioritisedSampler(100, alpha=1.0, beta=1.0), batch_size=8
        )
        rb.extend(rows(10))
        again = pickle.loads(pickle.dumps(rb))
        assert again.storage is storage
        again.extend(rows(10, 10))
        assert len(rb) == 20
        assert again.sample().batch_size == rb.sample().batch_size
        with pytest.raises(TypeError, match="cannot be copied; open another one"):
            copy.deepcopy(storage)


def test_a_pickle_holds_no_options_of_the_filesystem(tmp_path: Path) -> None:
    url, options = f"memory://options-{tmp_path.name}", {"secret": "hidden"}
    with TrajStorage(url, 10, storage_options=options) as storage:
        assert b"hidden" not in pickle.dumps(storage)


def write_remembered(_: None) -> str:
    with pytest.raises(ClosedError) as failed:
        REMEMBERED[0].extend(rows(2))
    return str(failed.value)


def test_a_storage_that_was_closed_is_closed_for_all(worker: Worker) -> None:
    storage = TrajStorage(None, 100)
    storage.set(range(2), rows(2))
    worker.run(remember, ReplayBuffer(storage=storage))
    assert worker.run(last_rows_of_remembered, None) == [2, 1, 0, 1]
    data = pickle.dumps(storage)
    storage.close()
    assert "the storage is closed" in worker.run(write_remembered, None)
    with pytest.raises(ClosedError, match="the storage is closed"):
        pickle.dumps(storage)
    with pytest.raises(ClosedError, match="does not answer: it has closed the storage, or has ended"):
        len(pickle.loads(data))


def test_a_forked_process_is_refused_and_told_to_spawn(tmp_path: Path) -> None:
    fork = multiprocessing.get_context("fork")
    with TrajStorage(tmp_path, 100, fsync=False) as storage:
        storage.set(range(2), rows(2))
        here, there = fork.Pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # forking beside threads is what is tested
            process = fork.Process(target=use_forked, args=(there, storage))
            process.start()
        assert here.poll(TIMEOUT_S)
        assert here.recv() == 2
        process.join(TIMEOUT_S)
        assert len(storage) == 2


def use_forked(there: Any, storage: TrajStorage) -> None:
    n_refused = 0
    for use in (lambda: storage.set(range(2), rows(2)), lambda: storage.get(0)):
        try:
            use()
        except ClosedError as error:
            n_refused += "start processes with the method 'spawn'" in str(error)
    there.send(n_refused)
