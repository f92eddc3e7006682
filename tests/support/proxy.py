"""A proxy on loopback in front of an S3 server: counts requests, and fails, loses or holds back some."""

from __future__ import annotations

import http.client
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

WAIT_S = 120


@dataclass(frozen=True)
class Request:
    """What a client asked."""

    method: str
    path: str
    authorization: str

    @property
    def kind(self) -> str:
        """The method, or LIST for a GET that lists."""
        is_list = self.method == "GET" and "list-type" in parse_qs(urlsplit(self.path).query)
        return "LIST" if is_list else self.method

    @property
    def key(self) -> str:
        """The object within the bucket."""
        return unquote(urlsplit(self.path).path).lstrip("/").partition("/")[2]


@dataclass(frozen=True)
class Answer:
    """An error that the proxy gives by itself; the server does not hear of the request."""

    status: int
    code: str
    message: str = "Please try again."

    @property
    def body(self) -> bytes:
        return f"<Error><Code>{self.code}</Code><Message>{self.message}</Message></Error>".encode()


UNAVAILABLE = Answer(503, "ServiceUnavailable")
LOSE = "the server acts, and the client never hears of it"
TRUNCATE = "the answer ends in the middle of its body"

Fault = Answer | str | None
Plan = Callable[[Request], Fault]


def none(request: Request) -> Fault:
    return None


def first(n: int, fault: Fault, *kinds: str) -> Plan:
    """The fault for the next ``n`` requests, of these kinds if any are named."""
    left = [n]
    lock = threading.Lock()

    def plan(request: Request) -> Fault:
        with lock:
            if left[0] == 0 or (kinds and request.kind not in kinds):
                return None
            left[0] -= 1
            return fault

    return plan


def every(n: int, fault: Fault, *kinds: str) -> Plan:
    """The fault for one request in ``n``, of these kinds if any are named."""
    count = [0]
    lock = threading.Lock()

    def plan(request: Request) -> Fault:
        with lock:
            count[0] += not kinds or request.kind in kinds
            return fault if (not kinds or request.kind in kinds) and count[0] % n == 0 else None

    return plan


def either(*plans: Plan) -> Plan:
    def plan(request: Request) -> Fault:
        faults = [plan(request) for plan in plans]
        return next((fault for fault in faults if fault is not None), None)

    return plan


class Proxy:
    """Runs in threads of this process until closed.

    Attributes:
        plan: What to do with each request; may be replaced at any time.
        requests: Everything that was asked since `forget`.
        ignores_conditions: Whether the server behind it never sees conditions on puts.
    """

    def __init__(self, upstream: str) -> None:
        self.plan: Plan = none
        self.requests: list[Request] = []
        self.ignores_conditions = False
        self.upstream = urlsplit(upstream).netloc
        self._gate: threading.Barrier | None = None
        self._gated: Callable[[Request], bool] = lambda request: False
        handler = type("Handler", (_Handler,), {"proxy": self})
        self._server = _Server(("127.0.0.1", 0), handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def forget(self) -> None:
        self.requests = []

    def count(self) -> Counter[str]:
        """Number of requests by kind."""
        return Counter(request.kind for request in self.requests)

    def gather(self, n: int, which: Callable[[Request], bool]) -> None:
        """Hold back such requests until ``n`` of them are under way; fewer are answered with an error."""
        self._gate, self._gated = threading.Barrier(n), which

    def fault_for(self, request: Request) -> Fault:
        self.requests.append(request)
        if self._gate is not None and self._gated(request):
            try:
                self._gate.wait(WAIT_S)
            except threading.BrokenBarrierError:
                return Answer(400, "InvalidRequest", "came alone")
        return self.plan(request)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(WAIT_S)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up is no news."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    proxy: Proxy

    def _handle(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        request = Request(self.command, self.path, self.headers.get("Authorization", ""))
        fault = self.proxy.fault_for(request)
        if isinstance(fault, Answer):
            self._answer(fault.status, {"Content-Type": "application/xml"}, fault.body)
            return
        status, headers, data = self._forward(body)
        if fault == LOSE:
            self.close_connection = True
        else:
            self._answer(status, headers, data, n_bytes=len(data) // 2 if fault == TRUNCATE else None)

    do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = _handle  # noqa: N815

    def _forward(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection(self.proxy.upstream, timeout=WAIT_S)
        hidden = {"expect", "connection"}
        hidden |= {"if-match", "if-none-match"} if self.proxy.ignores_conditions else set()
        headers = {k: v for k, v in self.headers.items() if k.lower() not in hidden}
        try:
            connection.request(self.command, self.path, body, headers)
            response = connection.getresponse()
            return response.status, dict(response.getheaders()), response.read()
        finally:
            connection.close()

    def _answer(self, status: int, headers: dict[str, str], body: bytes, n_bytes: int | None = None) -> None:
        self.send_response_only(status)
        hop_by_hop = ("connection", "transfer-encoding", "content-length")
        for name, value in headers.items():
            if name.lower() not in hop_by_hop:
                self.send_header(name, value)
        length = headers.get("Content-Length", "0") if self.command == "HEAD" else str(len(body))
        self.send_header("Content-Length", length)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[:n_bytes])
        self.close_connection = self.close_connection or n_bytes is not None
