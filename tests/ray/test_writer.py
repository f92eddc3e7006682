"""What a collector's writer stages, without any actor."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from trajstore import DataError

pytest.importorskip("ray")
from trajstore.ray import writer as module


class StubSender:
    """Keeps the blocks that a writer sends."""

    def __init__(self, *_: Any) -> None:
        self.n_lost = 0
        self.sent: list[Any] = []

    def raise_pending(self) -> None: ...

    def make_room(self) -> None: ...

    def send(self, *calls: Any) -> None:
        self.sent.append(calls)


@pytest.fixture
def writer(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(module, "BlockSender", StubSender)
    return module.RayWriter(None, block_steps=1000, block_bytes=1 << 20, block_s=1e9, in_flight=1)


def test_steps_that_reset_an_environment_are_not_sent(writer: Any) -> None:
    ends = [np.array([True, False]), np.zeros(2, bool), np.zeros(2, bool)]
    options: dict[str, Any] = {"envs": 2, "autoreset": "next_step"}
    found = [
        writer.append({"x": np.array([t, 10.0 + t])}, truncated=end, final={"x": np.zeros(2)}, **options)
        for t, end in enumerate(ends)
    ]
    assert [handles.t.tolist() for handles in found] == [[0, 0], [-1, 1], [0, 2]]
    assert [handles.episode.tolist() for handles in found] == [[0, 1], [-1, 1], [2, 1]]
    writer._outbox.send()
    assert writer._staged.has_calls is False
    assert len(writer._sender.sent) == 1


def test_a_block_with_steps_that_reset_is_refused(writer: Any) -> None:
    class Envs:
        num_envs = 2
        metadata = {"autoreset_mode": "NextStep"}  # noqa: RUF012

    with pytest.raises(DataError, match="extend: the block would hold steps that reset"):
        writer.extend({"x": np.zeros((3, 2))}, envs=Envs())
    with pytest.raises(DataError, match="envs: expected numbers"):
        writer.append({"x": np.zeros(2)}, envs=object())
