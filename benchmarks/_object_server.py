"""A small S3 server in memory on loopback, quick enough that a client is what is measured.

It runs in a process of its own, answers every request after a fixed delay, and counts requests. It checks no
signatures. It knows one bucket for every name that is asked.

There are two of them, which answer alike. `_object_server.c` takes about 10 us of a processor for a request, and is
used where a C compiler is found. The one in this file takes about 100 us, and knows no bandwidth.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote
from xml.sax.saxutils import escape

DATE = "Thu, 01 Jan 2026 00:00:00 GMT"


class Objects:
    """Bytes by path, with their entity tags."""

    def __init__(self, delay_s: float) -> None:
        self.delay_s = delay_s
        self.data: dict[str, tuple[bytes, str]] = {}
        self.counts: Counter[str] = Counter()

    def put(self, path: str, body: bytes, headers: dict[str, str]) -> tuple[int, dict[str, str], bytes]:
        existing = self.data.get(path)
        if headers.get("if-none-match") == "*" and existing is not None:
            return _failed("PreconditionFailed", 412)
        if (wanted := headers.get("if-match")) is not None and (existing is None or existing[1] != wanted):
            return _failed("NoSuchKey", 404) if existing is None else _failed("PreconditionFailed", 412)
        tag = f'"{hashlib.md5(body, usedforsecurity=False).hexdigest()}"'
        self.data[path] = (body, tag)
        return 200, {"ETag": tag}, b""

    def get(self, path: str, headers: dict[str, str]) -> tuple[int, dict[str, str], bytes]:
        if path not in self.data:
            return _failed("NoSuchKey", 404)
        body, tag = self.data[path]
        answer = {"ETag": tag, "Last-Modified": DATE}
        if (asked := headers.get("range")) is None:
            return 200, answer, body
        start, _, last = asked.removeprefix("bytes=").partition("-")
        first, stop = int(start), min(int(last) + 1 if last else len(body), len(body))
        if first >= len(body):
            return _failed("InvalidRange", 416)
        answer["Content-Range"] = f"bytes {first}-{stop - 1}/{len(body)}"
        return 206, answer, body[first:stop]

    def list(self, bucket: str, query: dict[str, list[str]]) -> tuple[int, dict[str, str], bytes]:
        prefix, delimiter = query.get("prefix", [""])[0], query.get("delimiter", [""])[0]
        start, folders, rows = len(bucket) + 2, set[str](), []
        for path in sorted(self.data):
            key = path[start:]
            if not path.startswith(f"/{bucket}/") or not key.startswith(prefix):
                continue
            head, found, _ = key[len(prefix) :].partition(delimiter) if delimiter else ("", "", "")
            if found:
                folders.add(prefix + head + delimiter)
            else:
                body, tag = self.data[path]
                rows.append(
                    f"<Contents><Key>{escape(key)}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
                    f"<ETag>{escape(tag)}</ETag><Size>{len(body)}</Size></Contents>"
                )
        common = "".join(f"<CommonPrefixes><Prefix>{escape(f)}</Prefix></CommonPrefixes>" for f in sorted(folders))
        text = (
            f"<ListBucketResult><Name>{bucket}</Name><Prefix>{escape(prefix)}</Prefix>"
            f"<KeyCount>{len(rows) + len(folders)}</KeyCount><MaxKeys>100000</MaxKeys>"
            f"<IsTruncated>false</IsTruncated>{''.join(rows)}{common}</ListBucketResult>"
        )
        return 200, {"Content-Type": "application/xml"}, text.encode()

    def delete_many(self, bucket: str, body: bytes) -> tuple[int, dict[str, str], bytes]:
        keys = [part.partition("</Key>")[0] for part in body.decode().split("<Key>")[1:]]
        for key in keys:
            self.data.pop(f"/{bucket}/{key}", None)
        done = "".join(f"<Deleted><Key>{key}</Key></Deleted>" for key in keys)
        return 200, {"Content-Type": "application/xml"}, f"<DeleteResult>{done}</DeleteResult>".encode()

    def answer(self, method: str, target: str, headers: dict[str, str], body: bytes) -> bytes:
        path, _, query_text = target.partition("?")
        path = unquote(path)
        status, answer, data = self._answer(method, path, query_text, headers, body)
        lines = [f"HTTP/1.1 {status} X", f"Content-Length: {len(data)}", *(f"{k}: {v}" for k, v in answer.items())]
        head = ("\r\n".join(lines) + "\r\n\r\n").encode()
        return head if method == "HEAD" else head + data

    def _answer(
        self, method: str, path: str, query_text: str, headers: dict[str, str], body: bytes
    ) -> tuple[int, dict[str, str], bytes]:
        if path == "/_set":
            self.delay_s = float(query_text.partition(",")[0])
            return 200, {}, b""
        if path == "/_counts":
            found, self.counts = {"cpu_s": time.process_time(), **self.counts}, Counter()
            return 200, {}, json.dumps(found).encode()
        bucket, _, key = path.lstrip("/").partition("/")
        self.counts[method if key or method == "POST" else "LIST"] += 1
        if method == "PUT" and "x-amz-copy-source" in headers:
            source = "/" + unquote(headers["x-amz-copy-source"]).lstrip("/")
            _, answer, _ = self.put(path, self.data[source][0], {})
            return 200, {}, f"<CopyObjectResult><ETag>{escape(answer['ETag'])}</ETag></CopyObjectResult>".encode()
        if method == "PUT":
            return self.put(path, body, headers)
        if method == "DELETE":
            self.data.pop(path, None)
            return 204, {}, b""
        if method == "POST":
            return self.delete_many(bucket, body)
        query = parse_qs(query_text, keep_blank_values=True)
        return self.list(bucket, query) if not key else self.get(path, headers)


def _failed(code: str, status: int) -> tuple[int, dict[str, str], bytes]:
    body = f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()
    return status, {"Content-Type": "application/xml"}, body


class Connection(asyncio.Protocol):
    """One client; requests of a connection come one after another."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._loop = asyncio.get_running_loop()
        self._pending = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._pending = self._pending + data if self._pending else data
        while (end := self._pending.find(b"\r\n\r\n")) >= 0:
            first, *lines = self._pending[:end].decode("latin-1").split("\r\n")
            headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines)}
            n = int(headers.get("content-length", 0))
            if headers.get("expect") == "100-continue" and len(self._pending) == end + 4:
                self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")  # type: ignore[attr-defined]
            if len(self._pending) < end + 4 + n:
                return
            body, self._pending = self._pending[end + 4 : end + 4 + n], self._pending[end + 4 + n :]
            method, target, _ = first.split(" ")
            answer = self._objects.answer(method, target, headers, body)
            if self._objects.delay_s and not target.startswith("/_"):
                self._loop.call_later(self._objects.delay_s, self._transport.write, answer)  # type: ignore[attr-defined]
            else:
                self._transport.write(answer)  # type: ignore[attr-defined]


async def _serve(delay_s: float) -> None:
    objects = Objects(delay_s)
    server = await asyncio.get_running_loop().create_server(
        lambda: Connection(objects), "127.0.0.1", 0, backlog=1024
    )
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


@dataclass(frozen=True)
class ObjectServer:
    """A running server.

    Attributes:
        endpoint: Its address.
        is_compiled: Whether it is the fast one.
    """

    endpoint: str
    is_compiled: bool

    def _ask(self, target: str) -> bytes:
        with urllib.request.urlopen(self.endpoint + target) as answer:
            body: bytes = answer.read()
        return body

    def set(self, latency_s: float, bytes_per_s: float = 0.0, most_kept: float = 1e18) -> None:
        """Change the latency, and the bandwidth that all connections share; 0: without limit.

        Objects of more bytes than ``most_kept`` are received, but the compiled server keeps them empty.
        """
        self._ask(f"/_set?{latency_s},{bytes_per_s},{most_kept}")

    def counts(self) -> dict[str, float]:
        """Requests by kind since the last call, and ``cpu_s``: seconds of CPU that the server has used in all."""
        found: dict[str, float] = json.loads(self._ask("/_counts"))
        return found

    def options(self, transport: str = "auto") -> dict[str, Any]:
        """Storage options that reach it."""
        return {
            "key": "a",
            "secret": "b",
            "client_kwargs": {"endpoint_url": self.endpoint, "region_name": "us-east-1"},
            "transport": transport,
        }


@contextlib.contextmanager
def object_server(latency_s: float = 0.0) -> Iterator[ObjectServer]:
    """A server that answers after this latency, in a process of its own."""
    with tempfile.TemporaryDirectory() as directory:
        compiled = _compiled(Path(directory))
        command = [compiled] if compiled else [sys.executable, __file__]
        with subprocess.Popen([*command, str(latency_s)], stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            try:
                port = int(server.stdout.readline())
                yield ObjectServer(f"http://127.0.0.1:{port}", compiled is not None)
            finally:
                server.kill()


def _compiled(directory: Path) -> str | None:
    """The path of the fast server; None without a C compiler, or on a system that it does not know."""
    compiler, program = shutil.which("cc"), str(directory / "server")
    if compiler is None:
        return None
    source = Path(__file__).with_suffix(".c")
    made = subprocess.run([compiler, "-O2", "-o", program, str(source)], capture_output=True, check=False)
    return program if made.returncode == 0 else None


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(float(sys.argv[1])))
