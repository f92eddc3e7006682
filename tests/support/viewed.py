"""A store to look at, and a client of the viewer."""

from __future__ import annotations

import http.client
import json
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode, urlsplit

import numpy as np

import trajstore
from trajstore import Field, Priorities, ReplayBuffer, Schema, Windows

HOSTILE = "<img src=x onerror=alert(1)></script><script>alert(2)</script>"
SCHEMA = Schema(
    {
        "observation": {
            "pixels": Field("uint8", (16, 24, 3), final=True),
            "state": Field("float32", (3,), final=True),
            "wide": Field("float32", (40,)),
        },
        "action": Field("int64"),
        "reward": Field("float32"),
    },
    episode={"success": bool, "task": str, "score": float},
)


def episode(i: int, n: int) -> dict[str, Any]:
    pixels = np.zeros((n + 1, 16, 24, 3), np.uint8)
    pixels[..., 0] = np.arange(n + 1)[:, None, None]  # the red of a frame is its step
    return {
        "observation": {
            "pixels": pixels,
            "state": np.stack([np.arange(n + 1), np.full(n + 1, i), np.zeros(n + 1)], 1).astype(np.float32),
            "wide": np.tile(np.arange(40, dtype=np.float32), (n, 1)),
        },
        "action": np.arange(n) % 4,
        "reward": np.full(n, i, np.float32),
    }


def metadata(i: int) -> dict[str, Any]:
    task = HOSTILE if i == 3 else f"task {i % 3}"
    return {"success": i % 2 == 0, "task": task, "score": i / 10, "notes": {HOSTILE: [1, 2, {"deep": HOSTILE}]}}


def fill(url: str, n_episodes: int = 60) -> trajstore.Store:
    """Episodes of 20 to 29 steps with priorities, two checkpoints, and a session that resumed the first one."""
    buffer = ReplayBuffer(
        url, schema=SCHEMA, priorities=Priorities(), sample=Windows(1), name="actor", seed=0, fsync=False
    )
    add(buffer, 0, n_episodes // 2)
    buffer.flush()
    batch = buffer.sample(64)
    buffer.update_priorities(batch["index"], np.linspace(0.5, 4, 64, dtype=np.float32))
    buffer.save_checkpoint("first", wait=True)
    add(buffer, n_episodes // 2, n_episodes // 2 + 5)
    buffer.save_checkpoint("second", wait=True)
    buffer.close()
    buffer = ReplayBuffer.resume(url, "first", fsync=False)
    add(buffer, n_episodes // 2, n_episodes)
    buffer.close()
    return trajstore.open(url)


def add(buffer: ReplayBuffer, start: int, stop: int) -> None:
    for i in range(start, stop):
        buffer.add_episode(
            episode(i, 20 + i % 10), terminated=i % 3 > 0, truncated=i % 3 == 0, metadata=metadata(i)
        )


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Client:
    """Asks a viewer with whatever headers a test wants."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        assert parts.hostname
        assert parts.port
        self.host, self.port = parts.hostname, parts.port
        self.token = parts.query.removeprefix("token=")

    def request(
        self,
        path: str,
        *,
        method: str = "GET",
        host: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> Answer:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=30)
        try:
            connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
            connection.putheader("Host", f"{self.host}:{self.port}" if host is None else host)
            for name, value in (headers or {}).items():
                connection.putheader(name, value)
            connection.endheaders()
            response = connection.getresponse()
            return Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
        finally:
            connection.close()

    def ask(self, name: str, **parameters: object) -> Answer:
        return self.request(f"/api/{name}?{urlencode(parameters)}", headers={"X-Trajstore-Token": self.token})

    def json(self, name: str, **parameters: object) -> Any:
        answer = self.ask(name, **parameters)
        assert answer.status == 200, answer.body
        return answer.json
