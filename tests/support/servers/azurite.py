"""Azure's blob storage by azurite, which Microsoft publishes for tests."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.support.servers.process import NotInstalledError, Server, free_ports, new_bucket_name, running

# The account and the key are azurite's own, published with it.
_ACCOUNT = "devstoreaccount1"
_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
_COMMAND = Path(__file__).parent / "node_modules" / ".bin" / "azurite-blob"
_BEFORE = Path(__file__).parent / "azurite_keeps_extents.cjs"


def connection_string(endpoint: str) -> str:
    account = f"AccountName={_ACCOUNT};AccountKey={_KEY}"
    return f"DefaultEndpointsProtocol=http;{account};BlobEndpoint={endpoint}/{_ACCOUNT};"


def options_at(endpoint: str) -> dict[str, Any]:
    return {"connection_string": connection_string(endpoint)}


@contextlib.contextmanager
def start() -> Iterator[Server]:
    node = shutil.which("node")
    if not _COMMAND.exists() or node is None:
        raise NotInstalledError("'scripts/setup dev' installs it if npm is on the path")
    if find_spec("adlfs") is None:
        raise NotInstalledError("adlfs is not installed; 'pip install adlfs' installs it")
    from azure.storage.blob import BlobServiceClient

    (port,) = free_ports(1)
    endpoint, bucket = f"http://127.0.0.1:{port}", new_bucket_name()
    flags = ["--silent", "--disableTelemetry", "--skipApiVersionCheck", "--inMemoryPersistence"]
    command = [node, "--require", str(_BEFORE), str(_COMMAND), *flags]
    with running([*command, "--blobHost", "127.0.0.1", "--blobPort", str(port)], endpoint):
        with BlobServiceClient.from_connection_string(connection_string(endpoint)) as client:
            client.create_container(bucket)
        yield Server(endpoint, bucket, "abfs", options_at)
