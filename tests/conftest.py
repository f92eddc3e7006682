"""Fixtures: places to put a store, on every kind of backend that runs on this machine."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import os
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import settings

from tests.support.lock_order import LockOrder, traced_locks
from tests.support.servers import azurite, gcs, moto, seaweedfs
from tests.support.servers.process import NotInstalledError, Server
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
    "storage/test_servers.py",
    "storage/test_end_to_end.py",
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


# By the kind of place. Each starts when a test first asks for it and ends with the session.
SERVERS: dict[str, Callable[[], AbstractContextManager[Server]]] = {
    "s3": moto.start,
    "seaweedfs": seaweedfs.start,
    "gcs": gcs.start,
    "azure": azurite.start,
}


@pytest.fixture(scope="session")
def server() -> Iterator[Callable[[str], Server]]:
    """Real servers on loopback by kind; a test is skipped where its server is not installed."""
    with contextlib.ExitStack() as stack:

        @functools.cache
        def start(kind: str) -> Server | str:
            try:
                return stack.enter_context(SERVERS[kind]())
            except NotInstalledError as error:
                return f"no server for {kind}: {error}"

        def get(kind: str) -> Server:
            started = start(kind)
            if isinstance(started, str):
                pytest.skip(started)
            return started

        yield get


@pytest.fixture(scope="session")
def s3_endpoint(server: Callable[[str], Server]) -> str:
    return server("s3").endpoint


@pytest.fixture(scope="session")
def s3_bucket(server: Callable[[str], Server]) -> str:
    return server("s3").bucket


@pytest.fixture
def new_place(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str], Place]:
    """Makes fresh places by kind: local, memory, or that of a server."""

    def make(kind: str) -> Place:
        name = uuid.uuid4().hex
        if kind == "local":
            return Place(str(tmp_path / name), {})
        if kind == "memory":
            return Place(f"memory://{name}", {})
        server = request.getfixturevalue("server")(kind)
        return Place(server.new_url(), server.options)

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
