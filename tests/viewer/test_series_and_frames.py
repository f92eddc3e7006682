"""Series keep their extremes within bounds, and frames of any layout become images."""

from __future__ import annotations

import base64
import io

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from trajstore import DataError, Field
from trajstore.viewer import series
from trajstore.viewer.frames import MAX_PIXELS, is_frames, render
from trajstore.viewer.json_numbers import numbers, to_json
from trajstore.viewer.png import encode_png
from trajstore.viewer.series import Buckets, shortened


@given(n=st.integers(1, 400), points=st.integers(1, 60), start=st.integers(0, 50), seed=st.integers(0, 9))
def test_a_shortened_series_has_the_extremes_of_every_part(n: int, points: int, start: int, seed: int) -> None:
    values = np.random.default_rng(seed).normal(size=(start + n, 2)).astype(np.float32)
    answer = shortened(lambda a, b: values[a:b], start, start + n, (2,), 4, points)
    width, shown = answer["width"], values[start:]
    assert len(answer["lines"][0]["low"]) <= points
    for i, line in enumerate(answer["lines"]):
        parts = [shown[a : a + width, i] for a in range(0, n, width)]
        np.testing.assert_allclose(line["low"], [part.min() for part in parts], rtol=1e-6)
        if width > 1:
            np.testing.assert_allclose(line["high"], [part.max() for part in parts], rtol=1e-6)


def test_values_that_are_not_finite_leave_a_gap_and_are_counted() -> None:
    values = np.array([1, np.nan, np.inf, np.nan, -np.inf, 2], np.float32)
    whole = shortened(lambda a, b: values[a:b], 0, 6, (), 4, 100)
    assert whole["lines"] == [{"name": "", "low": [1, None, None, None, None, 2]}]
    pairs = shortened(lambda a, b: values[a:b], 0, 6, (), 4, 3)
    assert pairs["lines"] == [{"name": "", "low": [1, None, 2], "high": [1, None, 2]}]
    assert whole["n_not_finite"] == pairs["n_not_finite"] == 4


def test_an_empty_series_is_empty() -> None:
    assert shortened(lambda a, b: np.empty((b - a,)), 5, 5, (), 8, 10)["lines"] == [{"name": "", "low": []}]


def test_no_more_is_read_than_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(series, "MAX_READ_BYTES", 8000)
    read = []

    def rows(start: int, stop: int) -> np.ndarray:
        read.append((start, stop))
        return np.arange(start, stop, dtype=np.float64)

    answer = shortened(rows, 0, 1_000_000, (), 8, 100)
    assert answer["is_sampled"]
    assert sum(stop - start for start, stop in read) * 8 <= 8000
    assert answer["lines"][0]["low"] == list(range(0, 1_000_000, 10_000))


def test_long_series_are_read_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(series, "_BLOCK_BYTES", 8000)
    longest = 0

    def rows(start: int, stop: int) -> np.ndarray:
        nonlocal longest
        longest = max(longest, stop - start)
        return np.arange(start, stop, dtype=np.float64)

    answer = shortened(rows, 0, 100_000, (), 8, 200)
    assert not answer["is_sampled"]
    assert longest <= 1000
    assert answer["lines"][0]["high"][-1] == 99_999


def test_buckets_cover_the_steps_once() -> None:
    buckets = Buckets.of(3, 50, 7, 8)
    rows = [buckets.rows(first, last) for first, last in buckets.blocks(8)]
    assert [step for start, stop in rows for step in range(start, stop)] == list(range(3, 50))


def test_a_map_of_colours_has_bytes_from_least_to_greatest() -> None:
    values = np.arange(20 * 30, dtype=np.float64).reshape(20, 30)
    values[4] = np.nan
    answer = shortened(lambda a, b: values[a:b], 0, 20, (30,), 8, 100)
    colours = np.frombuffer(base64.b64decode(answer["values"]), np.uint8).reshape(30, 20)
    assert (answer["low"], answer["high"], answer["together"]) == (0, 599, 1)
    assert (colours[0, 0], colours[29, 19]) == (1, 255)
    assert not colours[:, 4].any()
    wide = shortened(lambda a, b: np.ones((b - a, 5000)), 0, 3, (5000,), 8, 100)
    assert (wide["rows"], wide["together"]) == (125, 40)


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ((16, 24), (16, 24)),
        ((16, 24, 1), (16, 24)),
        ((16, 24, 3), (16, 24, 3)),
        ((16, 24, 4), (16, 24, 4)),
        ((3, 16, 24), (16, 24, 3)),
        ((1, 16, 24), (16, 24)),
        ((4, 16, 24), (16, 96)),
        ((16, 16, 4), (16, 64)),
        ((2, 16, 24, 3), (16, 48, 3)),
        ((2, 3, 16, 24), (16, 48, 3)),
    ],
)
def test_frames_of_every_layout_are_images(shape: tuple[int, ...], size: tuple[int, ...]) -> None:
    spec = Field("uint8", shape)
    frame = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    assert is_frames(spec)
    image = render(frame, spec)
    assert np.asarray(Image.open(io.BytesIO(image.data))).shape == size
    assert image.note == ""


def test_colours_and_rows_keep_their_places() -> None:
    frame = np.random.default_rng(0).integers(0, 256, (3, 16, 24), np.uint8)
    shown = np.asarray(Image.open(io.BytesIO(render(frame, Field("uint8", (3, 16, 24))).data)))
    assert np.array_equal(shown, np.moveaxis(frame, 0, -1))
    stack = np.random.default_rng(0).integers(0, 256, (4, 16, 24), np.uint8)
    shown = np.asarray(Image.open(io.BytesIO(render(stack, Field("uint8", (4, 16, 24))).data)))
    assert np.array_equal(shown[:, 24:48], stack[1])


@pytest.mark.parametrize("shape", [(), (3,), (4, 4), (7, 40), (40, 64, 64), (2, 2, 16, 16, 3)])
def test_other_shapes_are_no_frames(shape: tuple[int, ...]) -> None:
    assert not is_frames(Field("uint8", shape))


def test_other_dtypes_are_scaled_and_say_so() -> None:
    spec = Field("float32", (16, 16))
    frame = np.linspace(-1, 3, 256, dtype=np.float32).reshape(16, 16)
    frame[0, 1] = np.nan
    image = render(frame, spec)
    shown = np.asarray(Image.open(io.BytesIO(image.data)))
    assert (shown[0, 0], shown[0, 1], shown[-1, -1]) == (0, 0, 255)
    assert image.note == "black is -1, white is 3"
    assert render(np.full((16, 16), np.inf, np.float32), spec).note == "black is 0, white is 0"
    assert not is_frames(Field("float32", (8, 15)))


def test_a_huge_image_is_thinned_and_says_so() -> None:
    image = render(np.zeros((3000, 3000), np.uint8), Field("uint8", (3000, 3000)))
    width, height = Image.open(io.BytesIO(image.data)).size
    assert width * height <= MAX_PIXELS
    assert image.note == "one pixel of 2 in each axis"


@given(st.integers(1, 40), st.integers(1, 40), st.sampled_from([1, 3, 4]), st.integers(0, 9))
def test_png_is_what_pillow_reads(height: int, width: int, channels: int, seed: int) -> None:
    image = np.random.default_rng(seed).integers(0, 256, (height, width, channels), np.uint8)
    shown = np.asarray(Image.open(io.BytesIO(encode_png(image)))).reshape(image.shape)
    assert np.array_equal(shown, image)


def test_png_of_something_else_is_refused() -> None:
    for wrong in (
        np.zeros((3, 3)),
        np.zeros((3, 3, 2), np.uint8),
        np.zeros((0, 3), np.uint8),
        np.zeros(3, np.uint8),
    ):
        with pytest.raises(DataError, match="expected uint8 of 1, 3 or 4 channels"):
            encode_png(wrong)


def test_numbers_that_differ_little_have_more_digits() -> None:
    times = 1_795_128_791.25 + np.arange(4.0)
    assert numbers(times) == times.tolist()
    assert numbers(np.full(2, times[0])) == [times[0]] * 2
    assert numbers(np.array([0.1, 5], np.float32)) == [0.1, 5]
    assert numbers(np.array([-1.7e308, 1.7e308, np.nan])) == [-1.7e308, 1.7e308, None]


def test_json_has_no_numbers_that_json_lacks() -> None:
    odd = {"a": float("nan"), "b": [np.inf, 1.5], "c": np.array([np.nan, 2]), "d": np.int64(3), 4: "\ud800"}
    assert to_json(odd) == b'{"a":null,"b":[null,1.5],"c":[null,2.0],"d":3,"4":"\\ud800"}'
