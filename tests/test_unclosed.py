"""What a program leaves open is stored when the process ends, and when it is dropped; finalizers only mark."""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import trajstore
from tests.support.warm_python import WarmPython, warm_python
from trajstore import unclosed
from trajstore.background_pool import BackgroundPool
from trajstore.unclosed import Registration

pytestmark = pytest.mark.closes_dropped

BEGIN = """
import gc, os, sys, threading, time
import numpy as np
import trajstore
options = {"commit_steps": None, "commit_seconds": None}
step = lambda i: {"x": np.float32(i)}
buffer = trajstore.ReplayBuffer(sys.argv[1] + "/buffer", **options)
writer = trajstore.create(sys.argv[1] + "/writer").writer(**options)
for i in range(7):
    buffer.append(step(i))
    writer.append(step(i))
"""
STUCK = """
from trajstore.storage.local import LocalStorage
put_many = LocalStorage.put_many
def fail(self, puts):
    if "/buffer" in self.display:
        {what}
    return put_many(self, puts)
LocalStorage.put_many = fail
"""


_python: list[WarmPython] = []


@pytest.fixture(scope="module", autouse=True)
def python() -> Iterator[None]:
    with warm_python() as python:
        _python.append(python)
        yield
        _python.clear()


def run(code: str, path: Path) -> subprocess.CompletedProcess[str]:
    return _python[0].run_code(BEGIN + textwrap.dedent(code), path, timeout=300)


def run_fresh(code: str, path: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """The same where nothing was imported before."""
    command = [sys.executable, *options, "-c", BEGIN + textwrap.dedent(code), str(path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def stored(path: Path, name: str) -> list[int]:
    store = trajstore.open(path / name)
    assert all(record.is_sealed for record in store.streams)
    return [int(x) for i in range(len(store)) for x in store.read_episode(i)["x"]]


def wait_for(is_done: Callable[[], bool]) -> None:
    until = time.monotonic() + 120
    while not is_done():
        assert time.monotonic() < until
        time.sleep(0.01)


# ---- the end of the process


@pytest.mark.parametrize(
    ("end", "code", "last_line"),
    [
        ("", 0, ""),
        ("sys.exit(3)", 3, ""),
        ("raise ValueError('mine')", 1, "ValueError: mine"),
        ("raise KeyboardInterrupt", 130, "KeyboardInterrupt"),
        ("del buffer, writer", 0, ""),
        ("buffer.me, writer.me = buffer, writer; del buffer, writer", 0, ""),
        ("threading.Thread(target=threading.Event().wait, daemon=True).start()", 0, ""),
        ("from concurrent.futures import ThreadPoolExecutor as P; pool = P(2); pool.submit(print).result()", 0, ""),
        ("batches = buffer.batches(2, prefetch=2); next(batches)", 0, ""),
        ("import atexit; atexit.register(buffer.close)", 0, ""),
    ],
)
def test_a_script_that_closes_nothing_loses_nothing(end: str, code: int, last_line: str, tmp_path: Path) -> None:
    ended = run(end, tmp_path)
    assert ended.returncode in (code, -2 if code == 130 else code), ended.stderr
    assert (ended.stderr.strip().splitlines() or [""])[-1] == last_line
    assert stored(tmp_path, "buffer") == stored(tmp_path, "writer") == list(range(7))


def test_open_episodes_are_cut_as_by_close(tmp_path: Path) -> None:
    run_fresh("", tmp_path)
    assert trajstore.open(tmp_path / "buffer").episodes["end"].tolist() == ["cut"]


def test_what_a_with_statement_drops_stays_dropped(tmp_path: Path) -> None:
    ended = run("with writer:\n    raise ValueError", tmp_path)
    assert ended.returncode == 1
    assert len(trajstore.open(tmp_path / "writer")) == 0


@pytest.mark.parametrize(
    "worker",
    [
        "threading.Thread(target=work).start()",
        "from concurrent.futures import ThreadPoolExecutor as P; pool = P(1); pool.submit(work)",
    ],
    ids=["thread", "pool"],
)
def test_threads_that_outlive_the_main_thread_append_until_they_end(worker: str, tmp_path: Path) -> None:
    code = f"""
    def work():
        end = time.monotonic() + 2
        while time.monotonic() < end:  # the main thread ends before
            time.sleep(0.1)
        for i in range(7, 10):
            buffer.append(step(i))
    {worker}
    """
    ended = run(code, tmp_path)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert stored(tmp_path, "buffer") == list(range(10))


def test_daemon_threads_that_still_append_do_not_keep_the_process_from_ending(tmp_path: Path) -> None:
    code = """
    import itertools
    def work():
        for i in itertools.count(7):
            try:
                buffer.append(step(i))
            except trajstore.ClosedError:
                return
    threading.Thread(target=work, daemon=True).start()
    """
    ended = run(code, tmp_path)
    assert (ended.returncode, ended.stderr) == (0, "")
    found = stored(tmp_path, "buffer")
    assert found == list(range(len(found)))
    assert len(found) >= 7


def test_a_forked_child_leaves_the_data_to_its_parent(tmp_path: Path) -> None:
    code = """
    pid = os.fork()
    if not pid:
        del buffer, writer
        gc.collect()
        sys.exit(5)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 5
    """
    ended = run_fresh(code, tmp_path, "-W", "error")
    assert ended.returncode == 0, ended.stderr
    assert stored(tmp_path, "buffer") == stored(tmp_path, "writer") == list(range(7))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_children_of_multiprocessing_store_what_they_appended(method: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(f"""
        import multiprocessing, sys
        import numpy as np
        import trajstore
        kept = []
        def child(url):
            kept.append(trajstore.ReplayBuffer(url, commit_seconds=None))
            kept[0].append({{"x": np.float32(1)}})
        if __name__ == "__main__":
            parent = trajstore.ReplayBuffer(sys.argv[1] + "/parent", commit_seconds=None)
            parent.append({{"x": np.float32(0)}})
            process = multiprocessing.get_context("{method}").Process(target=child, args=(sys.argv[1] + "/child",))
            process.start()
            process.join()
            sys.exit(process.exitcode)
        """)
    )
    ended = _python[0].run_script(script, tmp_path, timeout=300)
    assert ended.returncode == 0
    assert not [text for text in ("could not be closed", "schedule new futures") if text in ended.stderr]
    assert (stored(tmp_path, "parent"), stored(tmp_path, "child")) == ([0], [1])


def test_a_storage_that_fails_at_the_end_is_named_and_the_others_are_stored(tmp_path: Path) -> None:
    ended = run(STUCK.format(what="raise OSError('the disk is gone')"), tmp_path)
    assert ended.returncode == 0
    (line,) = [line for line in ended.stderr.splitlines() if "could not be closed" in line]
    assert f"ReplayBuffer at {tmp_path}/buffer could not be closed when the process ended" in line
    assert "OSError: the disk is gone" in line
    assert "schedule new futures" not in ended.stderr
    assert stored(tmp_path, "writer") == list(range(7))


def test_a_storage_that_does_not_answer_delays_the_end_by_a_bound(tmp_path: Path) -> None:
    code = "trajstore.unclosed.EXIT_S = 4.0\n" + STUCK.format(what="threading.Event().wait()")
    ended = run("import trajstore.unclosed\n" + code, tmp_path)
    assert ended.returncode == 0
    name = f"ReplayBuffer at {tmp_path}/buffer"
    assert ended.stderr == (
        f"{name} was not closed in time when the process ended (at most 4 s), so its last steps may not be stored\n"
    )


def test_a_failure_in_the_background_does_not_keep_the_end_from_storing(tmp_path: Path) -> None:
    code = (
        "failures = [OSError('for a moment')]\n"
        + STUCK.format(what="\n        if failures:\n            raise failures.pop()")
        + "buffer.flush(wait=False)\nwhile failures:\n    time.sleep(0.01)\n"
    )
    ended = run(code, tmp_path)
    assert ended.returncode == 0
    assert "could not be closed" not in ended.stderr
    assert stored(tmp_path, "buffer") == list(range(7))


def test_an_interrupt_while_a_thread_starts_does_not_keep_the_process_from_ending(tmp_path: Path) -> None:
    """Python's pools lose such a thread, and then wait for it for ever."""
    code = """
    start = threading.Thread.start
    def start_and_interrupt(self):
        start(self)
        if self.name.startswith("trajstore-io"):
            threading.Thread.start = start
            raise KeyboardInterrupt
    threading.Thread.start = start_and_interrupt
    storage = buffer.store.snapshot.storage
    try:
        storage.map(abs, [1, 2])
    except KeyboardInterrupt:
        print("interrupted")
    """
    ended = run(code, tmp_path)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "interrupted\n", "")
    assert stored(tmp_path, "buffer") == list(range(7))


def test_warnings_name_what_was_left_open_if_they_are_enabled(tmp_path: Path) -> None:
    ended = run_fresh("", tmp_path, "-W", "always::ResourceWarning")
    lines = [line for line in ended.stderr.splitlines() if "was left open" in line]
    assert [f"ReplayBuffer at {tmp_path}/buffer was left open" in line for line in lines] == [False, True]
    assert f"Writer of {tmp_path}/writer was left open; call close(), or use it in a with statement" in lines[0]


# ---- dropped objects


def test_a_dropped_buffer_warns_and_is_stored(tmp_path: Path) -> None:
    buffer = trajstore.ReplayBuffer(tmp_path / "0", commit_seconds=None)
    buffer.append({"x": np.float32(3)})
    session = buffer.session
    with pytest.warns(ResourceWarning, match=f"ReplayBuffer at {tmp_path}/0 was dropped unclosed; call close"):
        del buffer
    wait_for(lambda: session.is_closed)
    assert stored(tmp_path, "0") == [3]


def test_a_dropped_writer_warns_and_is_stored(tmp_path: Path) -> None:
    writer = trajstore.create(tmp_path / "0").writer(commit_seconds=None)
    writer.append({"x": np.float32(3)})
    stream = writer._open
    with pytest.warns(ResourceWarning, match=f"Writer of {tmp_path}/0 was dropped unclosed"):
        del writer
    wait_for(lambda: stream.lifecycle.is_closed and stream.registration is None)
    wait_for(lambda: stored(tmp_path, "0") == [3])


def test_closed_objects_are_dropped_in_silence(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with trajstore.ReplayBuffer(tmp_path / "0") as buffer:
            buffer.append({"x": np.float32(3)})
        writer = buffer.store.writer()
        writer.close()
        del buffer, writer
        gc.collect()


def test_a_buffer_stays_open_while_an_iterator_over_it_is_used(tmp_path: Path) -> None:
    buffer = trajstore.ReplayBuffer(tmp_path / "0")
    buffer.append({"x": np.float32(3)})
    session, batches = buffer.session, buffer.batches(4, prefetch=2)
    del buffer
    gc.collect()
    assert next(batches)["x"].flatten().tolist() == [3] * 4
    assert not session.is_closed
    batches.close()
    with pytest.warns(ResourceWarning, match="was dropped unclosed"):
        del batches
    wait_for(lambda: session.is_closed)


COLLECT_ON_OWN_COMMIT_THREAD = """
from trajstore.writing.stream_appender import StreamAppender
commit, dropped, collected = StreamAppender.commit, threading.Event(), threading.Event()
def commit_and_collect(self, batch):
    if threading.current_thread().name == "trajstore-commit" and not collected.is_set():
        dropped.wait()
        gc.collect()
        collected.set()
    return commit(self, batch)
buffer.close()
writer.close()
gc.collect()
gc.disable()
options = {"commit_steps": None, "commit_seconds": 0.2}
StreamAppender.commit = commit_and_collect
%s
thing.me = thing
del thing
dropped.set()
sys.exit(0 if collected.wait(100) else "the commit thread waits for itself")
"""
MAKE = {
    "buffer": "thing = trajstore.ReplayBuffer(sys.argv[1] + '/0', **options); thing.append(step(1))",
    "writer": "thing = trajstore.create(sys.argv[1] + '/0').writer(**options); thing.append(step(1))",
    "torchrl": """
import torch
from tensordict import TensorDict
from trajstore.compat.torchrl import TrajStorage
thing = TrajStorage(sys.argv[1] + '/0', max_size=10, **options)
dropped.set()  # the first set commits by itself
thing.set(range(3), TensorDict({'x': torch.zeros(3)}, [3]))
dropped.clear()
collected.clear()
thing.set(range(3), TensorDict({'x': torch.ones(3)}, [3]))
""",
}


@pytest.mark.parametrize("kind", MAKE)
def test_what_is_collected_on_its_own_commit_thread_does_not_stop_it(kind: str, tmp_path: Path) -> None:
    ended = run(COLLECT_ON_OWN_COMMIT_THREAD % MAKE[kind], tmp_path)
    assert (ended.returncode, ended.stderr) == (0, "")
    store = tmp_path / "0" / "1" if kind == "torchrl" else tmp_path / "0"
    assert sum(record.rows for record in trajstore.open(store).streams) == (6 if kind == "torchrl" else 1)


def test_a_finalizer_waits_for_no_lock(tmp_path: Path) -> None:
    """With every lock of the buffer, of its writer and of the registry held by another thread, it still returns."""
    buffer = trajstore.ReplayBuffer(tmp_path / "0")
    session, registry = buffer.session, unclosed._registries[-1]
    locks = [session._ending, session.reader.assembler.lock, session.writer._lock, registry._lock]
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        for lock in locks:
            lock.acquire()
        held.set()
        release.wait()
        for lock in reversed(locks):
            lock.release()

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait()
    try:
        with pytest.warns(ResourceWarning):
            del buffer
        assert not session.is_closed
    finally:
        release.set()
        holder.join()
    wait_for(lambda: session.is_closed)


def test_a_private_store_is_freed_in_silence() -> None:
    class Face:
        pass

    freed, face, closed = threading.Event(), Face(), []
    registration = Registration(face, lambda: closed.append(1), lambda: None, "a private thing")
    registration.make_private(freed.set)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del face
    assert freed.wait(120)
    registration.end()
    assert closed == [1]


def test_a_pool_ends_its_threads_when_it_is_dropped() -> None:
    pool = BackgroundPool(2, "test-pool")
    assert pool.submit(pow, 2, 3).result() == 8
    threads = list(pool._threads)
    del pool
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
