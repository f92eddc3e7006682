"""Which fields hold pictures, and their values one by one."""

from __future__ import annotations

import uuid

import numpy as np
import pytest

import trajstore
from trajstore import DataError, Field, Schema
from trajstore.inspection import frames
from trajstore.inspection.frames import as_pictures, frame_fields, is_frame, pictures


@pytest.mark.parametrize(
    ("spec", "is_picture"),
    [
        (Field("uint8", (84, 84)), True),
        (Field("uint8", (64, 48, 3)), True),
        (Field("uint8", (1, 64, 48)), True),
        (Field("uint8", (64, 48, 1)), True),
        (Field("uint8", (4, 84, 84)), True),
        (Field("uint8", (5, 84, 84)), False),
        (Field("uint8", (4, 4)), False),
        (Field("uint8", (84, 3)), False),
        (Field("uint8", (84,)), False),
        (Field("float32", (84, 84)), False),
    ],
)
def test_bytes_with_two_long_sides_are_pictures(spec: Field, is_picture: bool) -> None:
    assert is_frame(spec) == is_picture


@pytest.mark.parametrize(
    ("shape", "shown"),
    [
        ((5, 12, 10), (5, 12, 10)),
        ((5, 12, 10, 3), (5, 12, 10, 3)),
        ((5, 12, 10, 1), (5, 12, 10)),
        ((5, 3, 12, 10), (5, 12, 10, 3)),
        ((5, 1, 12, 10), (5, 12, 10)),
    ],
)
def test_channels_come_last(shape: tuple[int, ...], shown: tuple[int, ...]) -> None:
    assert as_pictures(np.zeros(shape, np.uint8)).shape == shown


def test_the_pictures_of_an_episode_come_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    schema = Schema({"a": {"pixels": Field("uint8", (8, 8), final=True)}, "reward": Field("float32")})
    store = trajstore.create(f"memory://frames-{uuid.uuid4().hex}", schema)
    with store.writer() as writer:
        for n in (3, 10):
            pixels = np.zeros((n + 1, 8, 8), np.uint8) + np.arange(n + 1, dtype=np.uint8)[:, None, None]
            writer.append_episode({"a": {"pixels": pixels}, "reward": np.zeros(n, np.float32)}, terminated=True)
    snapshot = store.refresh()
    assert frame_fields(schema) == ["a/pixels"]
    monkeypatch.setattr(frames, "_BLOCK_BYTES", 200)

    def steps(**how: int) -> list[int]:
        found = list(pictures(snapshot, 1, "a/pixels", **how))
        assert all((picture == t).all() for t, picture in found)
        return [t for t, _ in found]

    assert steps() == list(range(11))
    assert steps(start=2, stop=7, every=2) == [2, 4, 6]
    assert steps(every=5) == [0, 5, 10]
    with pytest.raises(DataError, match="does not hold pictures; fields that do: a/pixels"):
        list(pictures(snapshot, 1, "reward"))
