"""Ranks as processes of their own. Run as a script this is the nursery: it imports everything once and forks them.

Every line on its standard input is a birth: what to live, with which arguments, and where to report. It says which
process was born, and how each one ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import hashlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import distributed

import trajstore
from trajstore import CheckpointNotFoundError, Field, ReplayBuffer, Schema, Windows
from trajstore.replay.checkpoint_schedule import CheckpointSchedule

SCHEMA = Schema({"x": Field("int64", chunk_rows=8), "reward": Field("float32", chunk_rows=8)})
OPTIONS: dict[str, Any] = {
    "schema": SCHEMA,
    "sample": Windows(length=2),
    "commit_seconds": None,
    "cache_bytes": "8MB",
    "buffer_bytes": "256KB",
    "rank_timeout_s": 30.0,
    "attend_s": 0.02,
    "fsync": False,
}
LIFE_S = 90.0  # no process lives longer, whatever becomes of its test


def digest(steps: Iterable[int]) -> str:
    return hashlib.blake2b(np.sort(np.fromiter(steps, np.int64)).tobytes(), digest_size=8).hexdigest()


def shown(buffer: ReplayBuffer) -> list[int]:
    found: list[int] = []
    if buffer.n_steps:
        for batch in buffer.epoch(256, Windows(squeeze=True), shuffle=False):
            found.extend(batch["x"].tolist())
    return sorted(found)


# ---- lives ---------------------------------------------------------------------------------------------------


class Life:
    """One rank: what it was told, and what it reports."""

    def __init__(self, out: str, rank: int, size: int, url: str, **told: Any) -> None:
        self.rank, self.size, self.url, self.told = rank, size, url, told
        self._out, self._stop = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_APPEND), Path(out).with_suffix(".stop")
        self.held: list[int] = []
        self.appending = threading.Lock()

    def say(self, word: str, *more: Any) -> None:
        os.write(self._out, json.dumps([word, *more]).encode() + b"\n")

    def is_told_to_stop(self) -> bool:
        return self._stop.exists()

    def meet(self) -> None:
        """Become part of a process group, if told so."""
        if "port" in self.told:
            address = f"tcp://127.0.0.1:{self.told['port']}"
            distributed.init_process_group("gloo", init_method=address, rank=self.rank, world_size=self.size)

    def opened(self, **options: Any) -> ReplayBuffer:
        given = {**self.told.get("options", {}), **options}
        if "port" not in self.told and self.size > 1:
            given |= {"rank": self.rank, "world_size": self.size}
        with self.appending, self._noted_cuts():
            buffer = self._opened(given)
            self.held = shown(buffer)
        return buffer

    def _opened(self, given: dict[str, Any]) -> ReplayBuffer:
        try:
            resumed = {name: value for name, value in given.items() if name != "schema"}
            return ReplayBuffer.resume(self.url, "latest", fsync=False, **resumed)
        except (trajstore.StoreNotFoundError, CheckpointNotFoundError):
            return ReplayBuffer(self.url, **OPTIONS | given)

    @contextlib.contextmanager
    def _noted_cuts(self) -> Iterator[None]:
        """Buffers opened inside write down what they hold at every cut that somebody asks for."""
        take = CheckpointSchedule._save_requested

        def noted(saver: CheckpointSchedule, name: str, id_: str) -> Any:
            with self.appending:  # also held while the buffer is opened, so what it holds is known
                self.say("cut", id_, digest(self.held), len(self.held))
                return take(saver, name, id_)

        CheckpointSchedule._save_requested = noted  # type: ignore[method-assign]
        try:
            yield
        finally:
            CheckpointSchedule._save_requested = take  # type: ignore[method-assign]

    def append(self, buffer: ReplayBuffer, n: int = 5) -> None:
        start = 1_000_000 * self.rank + len(self.held)
        x = np.arange(start, start + n)
        with self.appending:
            buffer.add_episode({"x": x, "reward": np.ones(n, np.float32)}, terminated=True)
            self.held.extend(x.tolist())


def wait_in_sleep(life: Life) -> None:
    time.sleep(LIFE_S)


def wait_in_a_lock(life: Life) -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire(timeout=LIFE_S)


def wait_in_c(life: Life) -> None:
    """A call that no signal interrupts, and in which no Python runs."""
    mutex = ctypes.create_string_buffer(64)
    library = ctypes.CDLL(None)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)


def wait_in_torch(life: Life) -> None:
    distributed.recv(torch.zeros(1), src=(life.rank + 1) % life.size)


def wait_until_told(life: Life) -> None:
    until = time.monotonic() + LIFE_S
    while not life.is_told_to_stop() and time.monotonic() < until:
        time.sleep(0.02)


WAITS = {
    "sleep": wait_in_sleep,
    "lock": wait_in_a_lock,
    "c": wait_in_c,
    "torch": wait_in_torch,
    "told": wait_until_told,
}


def begin(life: Life) -> ReplayBuffer:
    """What most lives begin with."""
    life.meet()
    if life.told.get("handler"):
        signal.signal(signal.SIGTERM, lambda *_: (life.say("handler ran"), os._exit(7)))
    if life.told.get("hook"):
        sys.excepthook = lambda kind, *_: life.say("hook ran", kind.__name__)
    buffer = life.opened()
    life.append(buffer)
    if life.told.get("on_exit", True):
        buffer.checkpoint_on_exit(timeout_s=life.told.get("exit_s", 30.0))
    life.say("ready", buffer.rank, buffer.world_size, buffer.world)
    return buffer


def stay(life: Life) -> None:
    """Wait in some way; close when told."""
    buffer = begin(life)
    WAITS[life.told.get("wait", "told")](life)
    try:
        buffer.close()
    except trajstore.TrajstoreError as failure:
        life.say("close failed", str(failure))
    life.say("closed")


def fail(life: Life) -> None:
    """An exception that nobody catches, once told."""
    begin(life)
    wait_until_told(life)
    raise LookupError("on purpose")


def fail_inside(life: Life) -> None:
    with begin(life):
        wait_until_told(life)
        raise LookupError("on purpose")


def work(life: Life) -> None:
    """Append until killed; the clock takes checkpoints."""
    life.meet()
    buffer = life.opened()
    life.say("ready", buffer.rank, buffer.world_size, buffer.world)
    for _ in range(2000):
        life.append(buffer)
        if buffer.n_steps > 2:
            buffer.sample(4)
        time.sleep(0.002)


def close_elsewhere(life: Life) -> None:
    """Close the buffer on another thread than the one that set the handlers."""
    buffer = begin(life)
    closing = threading.Thread(target=buffer.close)
    closing.start()
    closing.join()
    life.say("closed")
    wait_in_sleep(life)


def two_buffers(life: Life) -> None:
    """Two buffers in one process, both with a last checkpoint."""
    first = begin(life)
    other = ReplayBuffer(life.url + "-other", **OPTIONS)
    life.append(other)
    other.checkpoint_on_exit(timeout_s=30.0)
    life.say("both", first.world)
    wait_in_sleep(life)


def stuck_inside(life: Life) -> None:
    """The main thread is stuck in the middle of a change, with the buffer's lock."""
    buffer = begin(life)
    with buffer.reader.assembler.lock:
        life.say("stuck")
        wait_in_sleep(life)


def meet_torch(life: Life) -> None:
    """Rank and size by torch.distributed; and what is refused beside it."""
    life.meet()
    default = life.opened()
    life.append(default)
    life.say("default", default.rank, default.world_size, type(default.session.group.notes).__name__)
    life.say("saved", default.save_checkpoint("a", wait=True))
    beside = ReplayBuffer(life.url + "-beside", **OPTIONS | {"through": "store"})
    life.say("beside", beside.rank, beside.world_size, type(beside.session.group.notes).__name__)
    life.say("saved beside", beside.save_checkpoint("a", wait=True))
    by_torch = ReplayBuffer(life.url + "-torch", **OPTIONS | {"through": "torch"})
    life.say("torch", by_torch.rank, by_torch.world_size, type(by_torch.session.group.notes).__name__)
    try:
        ReplayBuffer(life.url + "-x", rank=0, world_size=5, **OPTIONS | {"through": "torch"})
    except ValueError as failure:
        life.say("refused", str(failure))
    alone = ReplayBuffer(f"{life.url}-alone-{life.rank}", rank=0, world_size=1, **OPTIONS)
    life.say("alone", alone.rank, alone.world_size)
    for buffer in (alone, by_torch, beside, default):
        buffer.close()
    distributed.barrier()
    life.say("over")


def retry_after_failure(life: Life) -> None:
    """One rank can't even begin, the others wait in vain; then all try again in the same process group."""
    life.meet()
    other = Schema({"x": Field("int32"), "reward": Field("float32")})
    trajstore.create(life.url, SCHEMA, exist_ok=True, fsync=False)
    distributed.barrier()
    try:
        schema = other if life.rank == 1 else SCHEMA
        ReplayBuffer(life.url, **OPTIONS | {"schema": schema, "rank_timeout_s": 1.0})
    except trajstore.TrajstoreError as failure:
        life.say("failed", type(failure).__name__, str(failure))
    distributed.barrier()
    buffer = ReplayBuffer(life.url, **OPTIONS | {"rank_timeout_s": 5.0})
    life.append(buffer)
    life.say("saved", buffer.save_checkpoint("a", wait=True))
    buffer.close()
    distributed.barrier()


LIVES: dict[str, Callable[[Life], None]] = {
    f.__name__: f
    for f in (
        stay,
        fail,
        fail_inside,
        work,
        close_elsewhere,
        two_buffers,
        stuck_inside,
        meet_torch,
        retry_after_failure,
    )
}


# ---- the nursery ---------------------------------------------------------------------------------------------


def warm_up() -> None:
    torch.set_num_threads(1)
    with ReplayBuffer("memory://warm", **OPTIONS) as buffer:
        buffer.add_episode({"x": np.arange(5), "reward": np.ones(5, np.float32)}, terminated=True)
        buffer.sample(2)
        shown(buffer)


def nursery() -> dict[str, Any] | None:
    """Fork whom it is told to; returns, in the child, what to live."""
    warm_up()
    report({"event": "ready"})
    waiting = b""
    while True:
        if select.select([0], [], [], 0.01)[0]:
            data = os.read(0, 1 << 16)
            if not data:
                return None
            waiting += data
        *lines, waiting = waiting.split(b"\n")
        for line in lines:
            told: dict[str, Any] = json.loads(line)
            child = os.fork()
            if child == 0:
                return told
            report({"event": "born", "key": told["key"], "pid": child})
        _report_ends()


def _report_ends() -> None:
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            report({"event": "ended", "pid": ended[0], "code": os.waitstatus_to_exitcode(ended[1])})


def report(event: dict[str, Any]) -> None:
    os.write(1, json.dumps(event).encode() + b"\n")


def live(told: dict[str, Any]) -> None:
    """In the child: nothing is left of the nursery but its memory."""
    signal.alarm(int(LIFE_S) + 30)
    faulthandler.register(signal.SIGUSR2, file=sys.__stderr__)
    errors = os.open(told["err"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for number in (1, 2):
        os.dup2(errors, number)
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    LIVES[told["what"]](Life(told["out"], **told["args"]))


# ---- whoever watches -----------------------------------------------------------------------------------------


class Rank:
    """A process as its test sees it."""

    def __init__(self, home: Nursery, key: str, root: Path) -> None:
        self._home, self.key = home, key
        self.out, self.err = root / f"{key}.log", root / f"{key}.err"

    @property
    def heard(self) -> list[list[Any]]:
        if not self.out.exists():
            return []
        lines = self.out.read_text().split("\n")[:-1]
        return [json.loads(line) for line in lines if line.endswith("]")]

    def words(self, word: str) -> list[list[Any]]:
        return [said[1:] for said in self.heard if said[0] == word]

    def await_word(self, word: str, timeout_s: float = 60.0) -> list[Any]:
        until = time.monotonic() + timeout_s
        while not (found := self.words(word)):
            code = self._home.code(self.key)
            assert code is None or self.words(word), f"ended with {code}: {self.errors[-3000:]}"
            assert time.monotonic() < until, f"never said {word!r}, but {self.heard[-3:]}; {self.errors[-2000:]}"
            time.sleep(0.01)
        return found[0]

    @property
    def errors(self) -> str:
        return self.err.read_text() if self.err.exists() else ""

    def stop(self) -> None:
        self.out.with_suffix(".stop").touch()

    def where(self) -> str:
        """What all its threads are doing, for messages."""
        self.kill(signal.SIGUSR2)
        time.sleep(0.3)
        return self.errors

    def kill(self, number: int = signal.SIGKILL) -> None:
        os.kill(self._home.pid(self.key), number)

    def await_end(self, timeout_s: float = 60.0) -> int:
        """Its return code, as of `subprocess`."""
        until = time.monotonic() + timeout_s
        while (code := self._home.code(self.key)) is None:
            assert time.monotonic() < until, f"{self.key} does not end: {self.heard[-3:]} {self.errors[-2000:]}"
            time.sleep(0.01)
        return code


class Nursery:
    """Starts ranks in milliseconds, and knows how each ended."""

    def __init__(self, root: Path) -> None:
        paths = [str(Path(trajstore.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "env": environment}
        self._process = subprocess.Popen([sys.executable, __file__], **pipes)
        self._root = root
        self._pids: dict[str, int] = {}
        self._codes: dict[int, int] = {}
        self._n = 0
        self._changed = threading.Condition()
        self._listening = threading.Thread(target=self._listen, daemon=True)
        self._listening.start()

    def start(self, what: str, rank: int, size: int, url: str, **told: Any) -> Rank:
        assert self._process.stdin is not None
        self._n += 1
        rank_ = Rank(self, f"{self._n}-{what}-{rank}", self._root)
        args = {"rank": rank, "size": size, "url": url, **told}
        order = {"key": rank_.key, "what": what, "args": args, "out": str(rank_.out), "err": str(rank_.err)}
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        self._process.stdin.flush()
        return rank_

    def pid(self, key: str) -> int:
        with self._changed:
            assert self._changed.wait_for(lambda: key in self._pids, 60)
            return self._pids[key]

    def code(self, key: str) -> int | None:
        with self._changed:
            return self._codes.get(self._pids.get(key, -1))

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            event = json.loads(line)
            with self._changed:
                if event["event"] == "born":
                    self._pids[event["key"]] = event["pid"]
                if event["event"] == "ended":
                    self._codes[event["pid"]] = event["code"]
                self._changed.notify_all()

    def end_all(self) -> None:
        """Whoever is still there is killed."""
        with self._changed:
            left = [pid for pid in self._pids.values() if pid not in self._codes]
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with self._changed:
            self._changed.wait_for(lambda: all(pid in self._codes for pid in left), 30)

    def end(self) -> None:
        self.end_all()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(30)
        self._listening.join(30)
        self._process.stdout.close()


@contextlib.contextmanager
def nurseries(root: Path) -> Iterator[Nursery]:
    home = Nursery(root)
    try:
        yield home
    finally:
        home.end()


if __name__ == "__main__":
    if (_told := nursery()) is not None:
        live(_told)
