"""A proxy on loopback in front of an object store (S3, GCS, Azure): counts requests, and fails or slows some.

As a program it is a network of its own, in a process of its own, for measurements; it writes its address::

    python tests/support/proxy.py http://127.0.0.1:9000 --latency-ms 20 --megabytes-per-second 100 --faults 0.05
"""

from __future__ import annotations

import argparse
import http.client
import random
import socket
import struct
import threading
import time
from collections import Counter, deque
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
        """PUT for what makes an object, LIST for what lists, else the method."""
        url = urlsplit(self.path)
        query = parse_qs(url.query, keep_blank_values=True)
        if self.method == "GET":
            is_gcs = url.path.startswith("/storage/v1/b/") and url.path.endswith("/o")
            return "LIST" if is_gcs or "list-type" in query or query.get("comp") == ["list"] else "GET"
        # GCS creates an object by POST.
        return "PUT" if self.method == "POST" and url.path.startswith("/upload/") else self.method

    @property
    def key(self) -> str:
        """The object within the bucket."""
        return unquote(urlsplit(self.path).path).lstrip("/").partition("/")[2]


@dataclass(frozen=True)
class Answer:
    """An error that the proxy gives by itself; the server does not hear of the request.

    GCS and Azure tell errors by their status alone; the body is S3's.
    """

    status: int
    code: str
    message: str = "Please try again."

    @property
    def body(self) -> bytes:
        return f"<Error><Code>{self.code}</Code><Message>{self.message}</Message></Error>".encode()


@dataclass(frozen=True)
class Slow:
    """The first byte of the answer comes so much later."""

    seconds: float


UNAVAILABLE = Answer(503, "ServiceUnavailable")
INTERNAL = Answer(500, "InternalError")
TOO_MANY = Answer(429, "SlowDown")
LOSE = "the server acts, and the client never hears of it"
RESET = "the connection breaks before the server hears of the request"
TRUNCATE = "the server acts, and the connection breaks in the middle of its answer"

Fault = Answer | Slow | str | None
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


def weather(rate: float, seed: int = 0, faults: tuple[Fault, ...] = ()) -> Plan:
    """One of the faults for this part of the requests, each as likely as the others; by default all there are."""
    chances, lock = random.Random(seed), threading.Lock()
    kinds = faults or (UNAVAILABLE, INTERNAL, TOO_MANY, LOSE, RESET, TRUNCATE, Slow(0.5))

    def plan(request: Request) -> Fault:
        with lock:
            return chances.choice(kinds) if chances.random() < rate else None

    return plan


class Hold:
    """A plan that lets so many requests of these kinds pass, and holds back those after them until `release`."""

    def __init__(self, n: int, *kinds: str) -> None:
        self._n, self._kinds = n, kinds
        self._lock = threading.Lock()
        self._holds, self._released = threading.Event(), threading.Event()
        self._then: Fault = None

    def __call__(self, request: Request) -> Fault:
        with self._lock:
            if self._kinds and request.kind not in self._kinds:
                return None
            self._n -= 1
            if self._n >= 0:
                return None
        self._holds.set()
        self._released.wait(WAIT_S)
        return self._then

    def wait(self) -> None:
        """Until one is held back."""
        if not self._holds.wait(WAIT_S):
            raise TimeoutError(f"no request was held back within {WAIT_S} seconds")

    def release(self, fault: Fault = None) -> None:
        """Do this to what is held back, and to what still comes."""
        self._then = fault
        self._released.set()


class Proxy:
    """Runs in threads of this process until closed.

    Attributes:
        plan: What to do with each request; may be replaced at any time.
        latency_s: How much longer every answer takes.
        bytes_per_s: The bandwidth that all connections share, each way; None: unlimited.
        requests: Everything that was asked since `forget`.
        faults: How many of each fault there were.
        ignores_conditions: Whether the server behind it never sees conditions on puts.
        ignores_ranges: Whether the server behind it never sees which bytes are wanted.
    """

    def __init__(self, upstream: str) -> None:
        self.plan: Plan = none
        self.latency_s = 0.0
        self.bytes_per_s: float | None = None
        self.faults: Counter[Fault] = Counter()
        self._lock = threading.Lock()
        self._free_at = {"up": 0.0, "down": 0.0}
        self.requests: list[Request] | deque[Request] = []
        self.ignores_conditions = False
        self.ignores_ranges = False
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
        fault = self.plan(request)
        if fault is not None:
            with self._lock:
                self.faults[fault] += 1
        return fault

    def pass_bytes(self, n: int, way: str) -> None:
        """Wait as long as the line needs for so many bytes, after those before them."""
        if self.bytes_per_s is None:
            return
        with self._lock:
            self._free_at[way] = end = max(self._free_at[way], time.monotonic()) + n / self.bytes_per_s
        time.sleep(max(0.0, end - time.monotonic()))

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

    # One write an answer: of two, the second waits for the client to acknowledge the first.
    wbufsize = -1
    disable_nagle_algorithm = True

    def _handle(self) -> None:
        body = self._body()
        self.proxy.pass_bytes(len(body), "up")
        request = Request(self.command, self.path, self.headers.get("Authorization", ""))
        fault = self.proxy.fault_for(request)
        time.sleep(self.proxy.latency_s + (fault.seconds if isinstance(fault, Slow) else 0.0))
        if isinstance(fault, Answer):
            self._answer(fault.status, {"Content-Type": "application/xml"}, fault.body)
            return
        if fault == RESET:
            self._hang_up()
            return
        status, headers, data = self._forward(body)
        self.proxy.pass_bytes(len(data), "down")
        if fault == LOSE:
            self.close_connection = True
        elif fault == TRUNCATE:
            self._answer(status, headers, data, len(data) // 2)
            self.close_connection = True
        else:
            self._answer(status, headers, data)

    do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = do_PATCH = _handle  # noqa: N815

    def handle_expect_100(self) -> bool:
        is_expected = super().handle_expect_100()
        self.wfile.flush()
        return is_expected

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while size := int(self.rfile.readline().partition(b";")[0], 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _hang_up(self) -> None:
        # Closing a socket that does not linger resets the connection.
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True

    def _forward(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection(self.proxy.upstream, timeout=WAIT_S)
        hidden = {"expect", "connection", "transfer-encoding"}
        hidden |= {"if-match", "if-none-match"} if self.proxy.ignores_conditions else set()
        hidden |= {"range", "x-ms-range"} if self.proxy.ignores_ranges else set()
        headers = {k: v for k, v in self.headers.items() if k.lower() not in hidden}
        try:
            connection.request(self.command, self.path, body, headers)
            response = connection.getresponse()
            return response.status, dict(response.getheaders()), response.read()
        finally:
            connection.close()

    def _answer(self, status: int, headers: dict[str, str], body: bytes, stop: int | None = None) -> None:
        self.send_response_only(status)
        hop_by_hop = ("connection", "transfer-encoding", "content-length")
        for name, value in headers.items():
            if name.lower() not in hop_by_hop:
                self.send_header(name, value)
        said = next((value for name, value in headers.items() if name.lower() == "content-length"), "0")
        length = said if self.command == "HEAD" else str(len(body))
        self.send_header("Content-Length", length)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[:stop])


def main() -> None:
    parser = argparse.ArgumentParser(description="A slow and faulty network in front of an object store.")
    parser.add_argument("upstream", help="address of the server, http://HOST:PORT")
    parser.add_argument("--latency-ms", type=float, default=0.0, help="how much longer every answer takes")
    parser.add_argument("--megabytes-per-second", type=float, help="bandwidth that all connections share, each way")
    parser.add_argument("--faults", type=float, default=0.0, help="part of the requests that fail or are slow")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    proxy = Proxy(given.upstream)
    proxy.latency_s = given.latency_ms / 1000
    proxy.bytes_per_s = given.megabytes_per_second and given.megabytes_per_second * 1e6
    proxy.plan = weather(given.faults, given.seed)
    proxy.requests = deque(maxlen=0)  # a long measurement does not keep them
    print(proxy.endpoint, flush=True)  # noqa: T201
    threading.Event().wait()


if __name__ == "__main__":
    main()
