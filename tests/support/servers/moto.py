"""S3 by moto: exact in what it answers, slow (some milliseconds a request, one at a time)."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from tests.support.servers.process import Server, free_ports, new_bucket_name, running


def options_at(endpoint: str) -> dict[str, Any]:
    return {"key": "test-key", "secret": "test-secret", "client_kwargs": {"endpoint_url": endpoint}}


@contextlib.contextmanager
def start() -> Iterator[Server]:
    import s3fs

    (port,) = free_ports(1)
    endpoint = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with running(command, f"{endpoint}/moto-api/"):
        server = Server(endpoint, new_bucket_name(), "s3", options_at)
        s3fs.S3FileSystem(**server.options).mkdir(server.bucket)
        yield server
