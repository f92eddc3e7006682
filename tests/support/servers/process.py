"""Start a server as a process of its own, wait until it answers, end it."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

START_S = 60


class NotInstalledError(Exception):
    """The server is not on this machine; the message says what would install it."""


@dataclass(frozen=True)
class Server:
    """A running server.

    Attributes:
        endpoint: Its address, ``http://127.0.0.1:PORT``.
        bucket: An empty bucket (in Azure's words a container).
        scheme: How URLs of its objects begin.
        options_at: The storage options of a client that reaches the server at an address; a proxy has another.
    """

    endpoint: str
    bucket: str
    scheme: str
    options_at: Callable[[str], dict[str, Any]]

    @property
    def options(self) -> dict[str, Any]:
        return self.options_at(self.endpoint)

    def new_url(self) -> str:
        """A place in the bucket where nothing is."""
        return f"{self.scheme}://{self.bucket}/{uuid.uuid4().hex}"


def new_bucket_name() -> str:
    return f"trajstore-{uuid.uuid4().hex[:8]}"


def free_ports(n: int) -> list[int]:
    """Ports that nobody listens on, all different."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(n)]
        for sock in sockets:
            sock.bind(("127.0.0.1", 0))
        return [int(sock.getsockname()[1]) for sock in sockets]


@contextlib.contextmanager
def running(
    command: Sequence[str], ready_url: str, *, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> Iterator[None]:
    """Run a command until the block ends; the block begins when the URL answers, with any status below 500."""
    with tempfile.TemporaryFile() as output:
        server = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=env, cwd=cwd)
        try:
            _wait_for(ready_url, server, command[0])
            yield
        except ServerEndedError as error:
            output.seek(0)
            raise RuntimeError(f"{error}; its output: {output.read()[-2000:].decode(errors='replace')}") from None
        finally:
            server.kill()  # nobody needs its data any more
            server.wait(10)


class ServerEndedError(Exception):
    """The server ended, or does not answer in time."""


def _wait_for(url: str, server: subprocess.Popen[bytes], name: str) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise ServerEndedError(f"{name} ended with {server.returncode}")
        if _answers(url):
            return
        time.sleep(0.05)
    raise ServerEndedError(f"{name} does not answer within {START_S} seconds")


def _answers(url: str) -> bool:
    try:
        urllib.request.urlopen(url, timeout=1).close()
    except urllib.error.HTTPError as error:
        return error.code < 500
    except OSError:
        return False
    return True


@contextlib.contextmanager
def scratch_directory() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="trajstore-server-"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
