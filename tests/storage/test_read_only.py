"""Stores on web servers, dataset hubs and in zip files: they are read like others, and not written."""

from __future__ import annotations

import functools
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem

import trajstore
from tests.cli.test_cli import run
from trajstore import DiskCache, Field, Reader, Windows
from trajstore.errors import StorageError, StoreNotFoundError
from trajstore.storage import open_storage
from trajstore.storage.fsspec_connection import FsspecConnection
from trajstore.store.verify import verify

SCHEMA = {"obs": Field("float32", (8,)), "action": Field("int64")}


class Handler(SimpleHTTPRequestHandler):
    """A web server with or without indexes of directories and byte ranges."""

    has_index = True
    has_ranges = True
    fails = 0

    def list_directory(self, path: Any) -> Any:
        if self.has_index:
            return super().list_directory(path)
        self.send_error(404)
        return None

    def do_GET(self) -> None:
        if type(self).fails:
            type(self).fails -= 1
            self.send_error(503)
            return
        wanted, path = self.headers.get("Range"), Path(self.translate_path(self.path))
        if not (wanted and self.has_ranges and path.is_file()):
            super().do_GET()
            return
        start, _, last = wanted.removeprefix("bytes=").partition("-")
        data = path.read_bytes()
        part = data[int(start) : int(last) + 1 if last else None]
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {start}-{int(start) + len(part) - 1}/{len(data)}")
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        self.wfile.write(part)

    def do_HEAD(self) -> None:
        super().do_HEAD()

    def end_headers(self) -> None:
        if self.has_ranges:
            self.send_header("Accept-Ranges", "bytes")
        super().end_headers()

    def log_message(self, *args: Any) -> None:
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64  # as many as connect at once; a fuller queue drops them for seconds


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    path = tmp_path / "web" / "store"
    rng = np.random.default_rng(0)
    with trajstore.create(path, SCHEMA, fsync=False).writer(commit_seconds=None) as writer:
        for _ in range(5):
            writer.append_episode({"obs": rng.normal(size=(60, 8)).astype(np.float32), "action": np.arange(60)})
    return path


@pytest.fixture
def serve(directory: Path) -> Iterator[Callable[..., str]]:
    servers = []

    def start(**settings: Any) -> str:
        handler = type("Handler", (Handler,), settings)
        server = Server(("127.0.0.1", 0), functools.partial(handler, directory=str(directory.parent)))
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def make_zip(directory: Path, target: Path) -> Path:
    with zipfile.ZipFile(target, "w") as archive:
        for path in sorted(directory.rglob("*")):
            if path.is_file():
                archive.write(path, path.relative_to(directory))
    return target


class HubFileSystem(MemoryFileSystem):
    """Stands for Hugging Face's filesystem: paths are datasets/<user>/<name>/..."""

    protocol = "hf"
    store: dict[str, Any] = {}  # noqa: RUF012
    pseudo_dirs = [""]  # noqa: RUF012

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.replace("hf://", "memory://", 1))


@pytest.fixture(params=["http", "http without ranges", "zip", "zip on http", "simplecache", "hf"])
def place(
    request: pytest.FixtureRequest, directory: Path, serve: Callable[..., str], tmp_path: Path
) -> Iterator[str]:
    kind = request.param
    if kind.startswith("http"):
        yield f"{serve(has_ranges=kind == 'http')}/store"
    elif kind == "zip":
        yield f"zip://::{make_zip(directory, tmp_path / 's.zip')}"
    elif kind == "zip on http":
        make_zip(directory, directory.parent / "s.zip")
        yield f"zip://::{serve()}/s.zip"
    elif kind == "simplecache":
        yield f"simplecache::file://{directory}"
    else:
        fsspec.register_implementation("hf", HubFileSystem, clobber=True)
        HubFileSystem().put(str(directory), "hf://datasets/me/walker", recursive=True)
        yield "hf://datasets/me/walker"
        HubFileSystem.store.clear()
        HubFileSystem.pseudo_dirs[:] = [""]
        sys.modules["fsspec.registry"].__dict__["_registry"].pop("hf")


def assert_same(store: trajstore.Store, directory: Path) -> None:
    original = trajstore.open(directory)
    assert len(store) == len(original) == 5
    for i in range(5):
        for name, values in original.read_episode(i).items():
            np.testing.assert_array_equal(store.read_episode(i)[name], values)


def test_a_store_is_read_as_if_it_were_local(place: str, directory: Path) -> None:
    store = trajstore.open(place)
    assert_same(store, directory)
    batch = Reader(store, seed=1, cache_bytes="1MiB").sample(8, Windows(4))
    expected = Reader(trajstore.open(directory), seed=1).sample(8, Windows(4))
    np.testing.assert_array_equal(batch["obs"].numpy(), expected["obs"].numpy())
    assert verify(place).problems == []
    assert store.snapshot.storage.stats()["requests"]["get"] > 0


def test_a_store_is_copied_from_there(place: str, directory: Path, tmp_path: Path) -> None:
    assert_same(trajstore.copy(place, tmp_path / "copy", fsync=False), directory)


def test_the_command_line_reads_there(place: str) -> None:
    result = run("info", place)
    assert result.exit_code == 0
    assert "Requests of this command" in result.stdout
    assert run("verify", place).exit_code == 0


def test_the_disk_cache_works_there(place: str, directory: Path, tmp_path: Path) -> None:
    options = DiskCache(tmp_path / "disk", "10MB")
    for _ in range(2):
        store = trajstore.open(place, disk_cache=options)
        assert_same(store, directory)
    assert store.snapshot.storage.stats()["disk_cache"]["misses"] == 0


def test_whatever_writes_is_refused_at_once(place: str, directory: Path) -> None:
    store = trajstore.open(place)
    actions: list[Callable[[], object]] = [
        store.writer,
        lambda: trajstore.ReplayBuffer(place, schema=SCHEMA),
        lambda: trajstore.create(place, SCHEMA),
        lambda: trajstore.pack(place),
        lambda: trajstore.copy(directory, place),
        lambda: open_storage(place).put("x", b""),
        lambda: open_storage(place).delete(["x"]),
        lambda: open_storage(place).remove_tree("streams"),
    ]
    for action in actions:
        with pytest.raises(StorageError, match=r"read-only; copy the store .* trajstore.copy"):
            action()


def test_where_nothing_is_there_is_no_store(serve: Callable[..., str], tmp_path: Path) -> None:
    make_zip(tmp_path / "empty", tmp_path / "empty.zip")
    for url in (f"{serve()}/other", f"zip://::{tmp_path}/empty.zip"):
        with pytest.raises(StoreNotFoundError, match="no store here"):
            trajstore.open(url)


def test_a_server_without_indexes_is_named_and_the_way_out(serve: Callable[..., str]) -> None:
    with pytest.raises(StorageError, match=r"shows no index .* zip"):
        trajstore.open(f"{serve(has_index=False)}/store")


def test_temporary_faults_are_repeated(serve: Callable[..., str], directory: Path) -> None:
    assert_same(trajstore.open(f"{serve(fails=3)}/store"), directory)


def test_a_server_that_fails_for_good_is_given_up_by_the_options_of_the_user(serve: Callable[..., str]) -> None:
    for url in (f"{serve(fails=10**6)}/store?token=abcdef", f"zip://::{serve(fails=10**6)}/s.zip?token=abcdef"):
        with pytest.raises(StorageError, match=r"gave up after \d+ s and [2-9] tries") as caught:
            trajstore.open(url, storage_options={"retry_s": 0.3, "request_s": 5})
        assert "abcdef" not in str(caught.value)


def test_options_that_can_have_no_effect_there_are_refused() -> None:
    for name, value in {"transport": "obstore", "hedge_s": 1, "filesystem": object()}.items():
        with pytest.raises(ValueError, match=f"{name}: only for object stores"):
            open_storage("https://h/x", {name: value})
    assert open_storage("https://h/x", {"transport": "fsspec"}).transport == "fsspec"
    with pytest.raises(ValueError, match="retry_s: expected seconds above 0"):
        open_storage("https://h/x", {"retry_s": -1})


def test_secrets_in_urls_are_not_shown() -> None:
    for url in ("https://me:hunter2@h/x?sig=abcdef", "zip://::https://me:hunter2@h/x.zip?sig=abcdef"):
        storage = open_storage(url)
        assert "hunter2" not in repr(storage)
        assert "abcdef" not in storage.display
        with pytest.raises(StorageError) as caught:
            storage.put("x", b"")
        assert "hunter2" not in str(caught.value)


def test_places_that_can_neither_be_read_nor_written_are_refused() -> None:
    with pytest.raises(ValueError, match=r"ftp://.*also one of hf, http, https, zip"):
        open_storage("ftp://host/x")


def test_a_size_that_the_server_does_not_say_is_that_of_the_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: dict[str, Any] = {"info": {"size": None}, "cat_file": b"12345"}
    monkeypatch.setattr(FsspecConnection, "call", lambda at, name, timeout_s, *args, **options: answers[name])
    assert open_storage("http://127.0.0.1:1/x", {}).size("key") == 5


def test_only_what_lies_in_a_directory_is_listed_of_its_index(monkeypatch: pytest.MonkeyPatch) -> None:
    links = ["a", "streams/", "?C=N;O=D", "streams/s", "../other", "/elsewhere"]

    def call(at: FsspecConnection, name: str, timeout_s: float, *args: Any, **options: Any) -> list[str]:
        if name == "ls":
            return [f"http://127.0.0.1:1/x/{link}" for link in links] + ["http://127.0.0.1:1/beside"]
        raise FileNotFoundError

    monkeypatch.setattr(FsspecConnection, "call", call)
    assert open_storage("http://127.0.0.1:1/x", {}).list_names("") == ["a", "streams"]
