"""GCS by gcp-storage-emulator, with what the emulator lacks (`gcs_process`, `gcs_xml`)."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.support.servers.process import NotInstalledError, Server, free_ports, new_bucket_name, running


def options_at(endpoint: str) -> dict[str, Any]:
    return {"token": "anon", "endpoint_url": endpoint, "project": "test-project"}


@contextlib.contextmanager
def start() -> Iterator[Server]:
    if find_spec("gcp_storage_emulator") is None or find_spec("gcsfs") is None:
        raise NotInstalledError("'pip install gcsfs gcp-storage-emulator' installs it")
    (port,) = free_ports(1)
    endpoint, bucket = f"http://127.0.0.1:{port}", new_bucket_name()
    command = [sys.executable, "-m", "tests.support.servers.gcs_process", str(port), bucket]
    with running(command, endpoint, cwd=Path(__file__).parents[3]):
        yield Server(endpoint, bucket, "gs", options_at)
