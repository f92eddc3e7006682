"""A small S3 server in memory on loopback, quick enough that a client is what is measured.

It runs in a process of its own, answers every request after a fixed delay, and counts requests. It checks no
signatures. It knows one bucket for every name that is asked.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import subprocess
import sys
import urllib.request
from collections import Counter
from collections.abc import Iterator
from urllib.parse import parse_qs, unquote
from xml.sax.saxutils import escape

DATE = "Thu, 01 Jan 2026 00:00:00 GMT"


class Objects:
    """Bytes by path, with their entity tags."""

    def __init__(self) -> None:
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
        if path == "/_counts":
            text, self.counts = repr(dict(self.counts)), Counter()
            return 200, {}, text.encode()
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

    def __init__(self, objects: Objects, delay_s: float) -> None:
        self._objects, self._delay_s = objects, delay_s
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
            if self._delay_s and target != "/_counts":
                self._loop.call_later(self._delay_s, self._transport.write, answer)  # type: ignore[attr-defined]
            else:
                self._transport.write(answer)  # type: ignore[attr-defined]


async def _serve(delay_s: float) -> None:
    objects = Objects()
    server = await asyncio.get_running_loop().create_server(
        lambda: Connection(objects, delay_s), "127.0.0.1", 0, backlog=1024
    )
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


@contextlib.contextmanager
def object_server(delay_s: float = 0.0) -> Iterator[str]:
    """The endpoint of a server that answers after this delay, in a process of its own."""
    command = [sys.executable, __file__, "--delay", str(delay_s)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(server.stdout.readline())}"
        finally:
            server.kill()


def counts(endpoint: str) -> dict[str, int]:
    """Requests by kind since the last call."""
    with urllib.request.urlopen(f"{endpoint}/_counts") as answer:
        pairs = answer.read().decode().strip("{}").split(", ")
    return {k.strip("'"): int(v) for k, v in (p.split(": ") for p in pairs if p)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--delay", type=float, default=0.0)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(parser.parse_args().delay))
