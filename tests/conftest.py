"""Fixtures: places to put a store, on every kind of backend that runs on this machine."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import settings

from tests.support.lock_order import LockOrder, traced_locks
from trajstore import unclosed

# In CI the same examples every time; elsewhere new ones, so that bugs are found by whoever can mend them.
settings.register_profile("ci", derandomize=True, deadline=None)
settings.register_profile("dev", deadline=None)
settings.load_profile("ci" if os.environ.get("CI") else "dev")

os.environ.setdefault("AWS_EC2_METADATA_DISABLED", "true")
os.environ.setdefault("AWS_DEFAULT_REGION", "us-east-1")

collect_ignore_glob = ["data/*"]  # made with libraries that are not installed here

_MUCH = 1 << 30  # bytes; a process of tests that grew by so many looks for what nobody holds any more
_held = [0]  # when it looked last


def _resident_bytes() -> int:
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except FileNotFoundError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture(autouse=True)
def _bounded_memory() -> Iterator[None]:
    """Collect cycles once they hold much: their arrays are large and few, so nothing else would."""
    yield
    if _resident_bytes() > _held[0] + _MUCH:
        gc.collect()
        with contextlib.suppress(OSError, AttributeError):  # only glibc has it: threads leave free memory behind
            ctypes.CDLL("libc.so.6").malloc_trim(0)
        _held[0] = _resident_bytes()


@pytest.fixture
def lock_order() -> Iterator[LockOrder]:
    """Fail a test whose threads take locks against `LOCK_ORDER`."""
    with traced_locks() as order:
        yield order


@pytest.fixture(autouse=True)
def _empty_memory() -> Iterator[None]:
    """Give back what a test left in ``memory://``: every listing there looks at all of it."""
    before, dirs = set(MemoryFileSystem.store), list(MemoryFileSystem.pseudo_dirs)
    yield
    for key in [key for key in list(MemoryFileSystem.store) if key not in before]:
        MemoryFileSystem.store.pop(key, None)
    MemoryFileSystem.pseudo_dirs[:] = dirs


# A buffer that a test drops stands for one whose process was killed: it is not closed in the background, but
# released when the test has ended. Tests marked `closes_dropped` see what a program sees.
_mark_dropped = unclosed.Registration._mark_dropped
_closes_dropped = [False]
_dropped: list[unclosed.Registration] = []


def _note_dropped(registration: unclosed.Registration) -> None:
    _mark_dropped(registration) if _closes_dropped[0] else _dropped.append(registration)


unclosed.Registration._mark_dropped = _note_dropped  # type: ignore[method-assign]


@pytest.fixture(autouse=True)
def _release_dropped(request: pytest.FixtureRequest) -> Iterator[None]:
    """Free the threads and the memory of what a test dropped."""
    _closes_dropped[0] = request.node.get_closest_marker("closes_dropped") is not None
    yield
    _closes_dropped[0] = False
    while _dropped:
        registration = _dropped.pop()
        registration.end()
        # In a thread: the storage of a test may never answer.
        thread = threading.Thread(target=_release, args=(registration,), daemon=True)
        thread.start()
        thread.join(10)


def _release(registration: unclosed.Registration) -> None:
    owner: Any = getattr(registration._close, "__self__", None)
    with contextlib.suppress(Exception):
        if hasattr(owner, "release"):
            owner.release()
        elif getattr(owner, "_table", None) is not None:  # of a TrajStorage
            owner._table.log._collector._closing.set()
            owner._table.log._writer.release()


# Files that take longest, the longest first. Workers take whole files: one that began last would end alone.
_LONG = [
    "ray/test_service.py",
    "project/test_benchmarks.py",
    "writing/test_faults.py",
    "store/test_packing.py",
    "project/test_notebooks.py",
    "storage/test_power_loss.py",
    "distributed/test_collective_checkpoints.py",
    "project/test_examples.py",
    "store/test_garbage_collection.py",
    "sampling/test_triton.py",
    "test_unclosed.py",
    "cli/test_warm_up.py",
    "replay/test_memory_of_few_steps.py",
    "sampling/test_priorities.py",
    "project/test_demo.py",
    "ray/test_unclosed_writer.py",
    "ray/test_ray_data.py",
    "distributed/test_collective_processes.py",
    "distributed/test_ddp_example.py",
    "compat/test_torchrl_log.py",
    "replay/test_buffer_model.py",
    "compat/test_unclosed_drop_ins.py",
]
_PLACES = {Path(__file__).parent / name: place for place, name in enumerate(_LONG)}
_LAST = Path(__file__).parent / "project/test_typed_api.py"  # uses what mypy keeps, when scripts/test ran it beside


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take longest. Needs ``--no-loadscope-reorder`` where files are shared out."""
    items.sort(key=lambda item: (item.path == _LAST, _PLACES.get(item.path, len(_PLACES))))


def pytest_collection_finish() -> None:
    """Look for garbage only in what tests make: modules and thousands of tests take longer than most tests."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    """Leave open what tests left open."""
    gc.unfreeze()
    for registration in list(unclosed._registries[-1]._open):
        registration.end()


BACKENDS = ["local", "memory", pytest.param("s3", marks=pytest.mark.s3)]


@dataclass(frozen=True)
class Place:
    """Where a store may be created."""

    url: str
    options: dict[str, Any]

    @property
    def kwargs(self) -> dict[str, Any]:
        return {"storage_options": self.options} if self.options else {}


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    """A real S3 server (moto's) on loopback, ended with the session."""
    port = free_port()
    endpoint = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait_for(endpoint, server)
        yield endpoint
    finally:
        server.terminate()
        server.wait(30)


def _wait_for(endpoint: str, server: subprocess.Popen[bytes]) -> None:
    for _ in range(300):
        if server.poll() is not None:
            raise RuntimeError(f"the S3 server ended with {server.returncode}")
        try:
            urllib.request.urlopen(f"{endpoint}/moto-api/", timeout=1).close()
        except OSError:
            time.sleep(0.1)
        else:
            return
    raise RuntimeError("the S3 server does not answer")


def s3_options(endpoint: str) -> dict[str, Any]:
    return {"key": "test-key", "secret": "test-secret", "client_kwargs": {"endpoint_url": endpoint}}


@pytest.fixture(scope="session")
def s3_bucket(s3_endpoint: str) -> str:
    import s3fs

    bucket = f"trajstore-{uuid.uuid4().hex[:8]}"
    s3fs.S3FileSystem(**s3_options(s3_endpoint)).mkdir(bucket)
    return bucket


@pytest.fixture
def new_place(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str], Place]:
    """Makes fresh places by kind: local, memory or s3."""

    def make(kind: str) -> Place:
        name = uuid.uuid4().hex
        if kind == "local":
            return Place(str(tmp_path / name), {})
        if kind == "memory":
            return Place(f"memory://{name}", {})
        bucket, endpoint = request.getfixturevalue("s3_bucket"), request.getfixturevalue("s3_endpoint")
        return Place(f"s3://{bucket}/{name}", s3_options(endpoint))

    return make


@pytest.fixture(params=BACKENDS)
def place(request: pytest.FixtureRequest, new_place: Callable[[str], Place]) -> Place:
    """A fresh place on each backend in turn."""
    return new_place(request.param)


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A fresh local place, for tests of what does not depend on the backend."""
    return str(tmp_path / "store")


@pytest.fixture(autouse=True, scope="module")
def forget_memory_stores() -> Iterator[None]:
    """Listing a place in memory looks at all that is there, so a module leaves nothing behind."""
    yield
    fsspec.filesystem("memory").store.clear()
