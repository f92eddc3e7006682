"""Frames of an episode as GIF and MP4, and which fields are taken for frames."""

from __future__ import annotations

import sys
import tracemalloc
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image

import trajstore
from trajstore import DataError, EpisodeNotFoundError, Field, MissingExtraError, Schema, Store, plot
from trajstore.plot.images import as_images, image_field

N = 10  # steps; the final frame makes 11


def movie(n: int = N + 1) -> Any:
    """Frames [n, 16, 24, 3] whose brightness grows."""
    frames = np.zeros((n, 16, 24, 3), np.uint8)
    frames += (np.arange(n, dtype=np.uint8) * 20)[:, None, None, None]
    frames[:, :8, :, 0] = 255  # the upper half is red
    return frames


def one_episode(url: Any, frames: Any, **more: Any) -> Store:
    store = trajstore.create(
        url, Schema({"frames": Field("uint8", frames.shape[1:], final=True), "reward": Field("float32")})
    )
    with store.writer() as writer:
        n = len(frames) - 1
        writer.append_episode({"frames": frames, "reward": np.zeros(n, np.float32)}, terminated=True, **more)
    store.refresh()
    return store


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return one_episode(tmp_path_factory.mktemp("videos") / "s", movie())


def gif_frames(path: Path) -> tuple[list[Any], list[int]]:
    with Image.open(path) as image:
        frames, delays = [], []
        for i in range(image.n_frames):  # type: ignore[attr-defined]
            image.seek(i)
            frames.append(np.asarray(image.convert("RGB")))
            delays.append(image.info["duration"])
    return frames, delays


def mp4_frames(path: Path) -> tuple[list[Any], float]:
    with av.open(str(path)) as container:
        rate = container.streams.video[0].average_rate
        assert rate is not None
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)], float(rate)


def test_a_gif_has_every_frame_in_order_with_its_colours(store: Store, tmp_path: Path) -> None:
    path = plot.save_video(store, tmp_path / "x.gif", fps=20, size=16)
    frames, delays = gif_frames(path)
    assert len(frames) == N + 1
    assert set(delays) == {50}
    for shown, stored in zip(frames, movie(), strict=True):
        assert np.abs(shown.astype(int) - stored).max() <= 20  # a palette, not the very colours
    assert [int(frame[12, 3, 1]) for frame in frames] == sorted(int(frame[12, 3, 1]) for frame in frames)


def test_an_mp4_has_every_frame_in_order(store: Store, tmp_path: Path) -> None:
    frames, rate = mp4_frames(plot.save_video(store, tmp_path / "x.mp4", fps=12.5, size=16))
    assert (len(frames), rate) == (N + 1, 12.5)
    assert frames[0].shape == (16, 24, 3)
    assert np.abs(frames[5][12, 12].astype(int) - 100).max() < 12


def test_size_and_choice_of_frames(store: Store, tmp_path: Path) -> None:
    frames, _ = gif_frames(plot.save_video(store, tmp_path / "a.gif", start=2, stop=9, every=3))
    assert [frame.shape for frame in frames] == [(240, 360, 3)] * 3  # enlarged 15 times
    assert [round(float(frame[200, 5, 1]) / 20) for frame in frames] == [2, 5, 8]
    frames, _ = mp4_frames(plot.save_video(store, tmp_path / "a.mp4", size=(31, 17)))
    assert frames[0].shape == (18, 32, 3)  # sides are even
    frames, delays = gif_frames(plot.save_video(store, tmp_path / "b.gif", fps=30, size=8))
    assert sum(delays) == 370  # 11 thirtieths of a second: single delays are rounded, not their sum
    with pytest.raises(ValueError, match="at most 8192 pixels"):
        plot.save_video(store, tmp_path / "c.gif", size=10_000)
    assert not (tmp_path / "c.gif").exists()


def test_grey_frames_and_stacks_are_written(tmp_path: Path) -> None:
    stack = np.zeros((6, 4, 20, 20), np.uint8)
    stack[:, -1] = np.arange(6, dtype=np.uint8)[:, None, None] * 40
    frames, _ = gif_frames(plot.save_video(one_episode(tmp_path / "s", stack), tmp_path / "x.gif", size=20))
    assert [int(frame[0, 0, 0]) for frame in frames] == [0, 40, 80, 120, 160, 200]
    grey = one_episode(tmp_path / "t", stack[:, -1])
    shown, _ = mp4_frames(plot.save_video(grey, tmp_path / "x.mp4", size=20))
    assert [round(int(frame[0, 0, 0]) / 40) for frame in shown] == [0, 1, 2, 3, 4, 5]
    plot.frames(grey).figure.draw_without_rendering()


@pytest.mark.parametrize(
    ("shape", "layout"),
    [
        ((84, 84), "HW"), ((84, 84, 3), "HWC"), ((84, 84, 1), "HWC"), ((3, 84, 84), "CHW"), ((1, 84, 84), "CHW"),
        ((4, 84, 84), "KHW"), ((84, 84, 4), "HWK"), ((210, 160, 4), "HWC"), ((84, 84, 12), "HWK"),
        ((4, 84, 84, 3), "KHWC"), ((4, 3, 84, 84), "KCHW"), ((4,), None), ((3, 3), None), ((5, 4, 3), None),
        ((2, 2, 84, 84), None),
    ],
)  # fmt: skip
def test_the_order_of_the_axes_is_found_from_the_shape(shape: tuple[int, ...], layout: str | None) -> None:
    store = trajstore.create("memory://shapes", Schema({"x": Field("uint8", shape)}))
    if layout is None:
        with pytest.raises(DataError, match=r"field 'x' holds uint8 of shape .* name the layout"):
            image_field(store.snapshot, "x")
        return
    assert image_field(store.snapshot, None) == ("x", layout)
    images = as_images(np.zeros((2, *shape), np.uint8), layout)  # type: ignore[arg-type]
    colours = (3,) if shape[-1] == 3 or shape[layout.index("C") if "C" in layout else 0] == 3 else ()
    assert images.shape[1:3] == (shape[layout.index("H")], shape[layout.index("W")])
    assert images.shape[3:] in (colours, (4,))


def test_the_layout_can_be_named(tmp_path: Path) -> None:
    store = one_episode(tmp_path / "s", np.zeros((3, 3, 84, 84), np.uint8))
    assert image_field(store.snapshot, "frames", "KHW") == ("frames", "KHW")
    with pytest.raises(DataError, match=r"layout HWC needs uint8 .* got uint8 of shape \(3, 84, 84\)"):
        image_field(store.snapshot, None, "HWC")
    with pytest.raises(ValueError, match="expected one of HW, HWC"):
        image_field(store.snapshot, "frames", "WH")  # type: ignore[arg-type]


def test_what_can_not_be_written_is_refused_and_leaves_no_file(store: Store, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"ends in \.gif or \.mp4, got 'x\.avi'"):
        plot.save_video(store, tmp_path / "x.avi")
    with pytest.raises(ValueError, match="a GIF shows at most 50"):
        plot.save_video(store, tmp_path / "x.gif", fps=60)
    with pytest.raises(ValueError, match="fps: expected"):
        plot.save_video(store, tmp_path / "x.gif", fps=0)
    with pytest.raises(EpisodeNotFoundError):
        plot.save_video(store, tmp_path / "x.gif", 7)
    with pytest.raises(IndexError, match="start < stop <= 11"):
        plot.save_video(store, tmp_path / "x.gif", stop=12)
    with pytest.raises(DataError, match="field 'reward' holds float32"):
        plot.save_video(store, tmp_path / "x.gif", field="reward")
    assert not list(tmp_path.iterdir())


def test_a_damaged_episode_leaves_the_old_file_as_it_was(tmp_path: Path) -> None:
    store = one_episode(tmp_path / "s", movie())
    (chunk,) = (tmp_path / "s" / "streams").glob("*/steps/frames/c.*")
    data = bytearray(chunk.read_bytes())
    data[len(data) // 2] ^= 1
    chunk.write_bytes(data)
    (tmp_path / "x.gif").write_bytes(b"old")
    with pytest.raises(trajstore.CorruptionError):
        plot.save_video(store, tmp_path / "x.gif")
    assert (tmp_path / "x.gif").read_bytes() == b"old"
    assert not list(tmp_path.glob(".x-*"))


@pytest.mark.parametrize(("name", "module", "extra"), [("x.gif", "PIL", "plot"), ("x.mp4", "av", "video")])
def test_a_missing_library_is_named_with_its_extra(
    name: str, module: str, extra: str, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtraError, match=rf"trajstore\[{extra}\]"):
        plot.save_video(store, tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_memory_does_not_grow_with_the_episode(tmp_path: Path) -> None:
    frames = np.zeros((600, 256, 256), np.uint8)  # 39 MB
    store = one_episode(tmp_path / "s", frames)
    del frames
    store = trajstore.open(tmp_path / "s")
    tracemalloc.start()
    try:
        plot.save_video(store, tmp_path / "x.gif", size=32, every=20)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 36 << 20  # two blocks of 16 MiB
