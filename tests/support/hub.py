"""A stand-in on loopback for the part of Hugging Face's Hub that its filesystem reads, of one dataset."""

from __future__ import annotations

import json
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

NAME = "me/walker"
_SHA = "0" * 40


class Hub:
    """Serves a directory as the dataset ``me/walker`` until closed.

    Attributes:
        fails: So many requests are answered with this ``status``.
        status: See ``fails``.
        asked: How many requests there were, by path.
        names: What clients called themselves.
        bytes_sent: Bytes of files.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.fails, self.status = 0, 503
        self.asked: Counter[str] = Counter()
        self.names: set[str] = set()
        self.bytes_sent = 0
        self._lock = threading.Lock()
        handler = type("Handler", (_Handler,), {"hub": self})
        self._server = _Server(("127.0.0.1", 0), handler)
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, path: str, name: str) -> tuple[int, bytes, dict[str, str]]:
        url = urlsplit(path)
        with self._lock:
            self.asked[url.path] += 1
            self.names.add(name)
            if self.fails:
                self.fails -= 1
                return self.status, b"", {}
        about, tree, file = f"/api/datasets/{NAME}", "/tree/main", f"/datasets/{NAME}/resolve/main/"
        where = unquote(url.path)
        if where.startswith(file):
            return self._file(self.directory / where.removeprefix(file))
        if where.startswith(f"{about}{tree}"):
            recursive = parse_qs(url.query).get("recursive", [""])[0].lower() in ("true", "1")
            return self._tree(where.removeprefix(f"{about}{tree}").strip("/"), recursive)
        if where in (about, f"{about}/revision/main"):
            return 200, json.dumps({"id": NAME, "sha": _SHA, "private": False}).encode(), {}
        return 404, b"{}", {"X-Error-Code": "RepoNotFound"}

    def _file(self, path: Path) -> tuple[int, bytes, dict[str, str]]:
        if not path.is_file():
            return 404, b"", {"X-Error-Code": "EntryNotFound"}
        return 200, path.read_bytes(), {"ETag": '"x"', "X-Repo-Commit": _SHA}

    def _tree(self, folder: str, recursive: bool) -> tuple[int, bytes, dict[str, str]]:
        root = self.directory / folder
        if not root.is_dir():
            return 404, b"{}", {"X-Error-Code": "EntryNotFound"}
        found = sorted(root.rglob("*") if recursive else root.iterdir())
        return 200, json.dumps([self._entry(path) for path in found]).encode(), {}

    def _entry(self, path: Path) -> dict[str, Any]:
        kind = "directory" if path.is_dir() else "file"
        size = 0 if path.is_dir() else path.stat().st_size
        return {"type": kind, "path": str(path.relative_to(self.directory)), "size": size, "oid": _SHA}


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1
    hub: Hub

    def do_GET(self) -> None:
        status, body, headers = self.hub.answer(self.path, self.headers.get("User-Agent", ""))
        wanted = self.headers.get("Range")
        if status == 200 and wanted:
            start, _, last = wanted.removeprefix("bytes=").partition("-")
            stop = int(last) + 1 if last else len(body)
            headers = {**headers, "Content-Range": f"bytes {start}-{min(stop, len(body)) - 1}/{len(body)}"}
            status, body = 206, body[int(start) : stop]
        if "/resolve/" in self.path:
            self.hub.bytes_sent += len(body)
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **headers}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        pass
