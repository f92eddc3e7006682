"""Decode images that datasets store as JPEG or PNG, and encode PNGs."""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import Any

import numpy as np

from trajstore.datasets.optional_imports import import_optional
from trajstore.errors import FormatError
from trajstore.schema import Array


def import_pillow() -> Any:
    return import_optional("PIL.Image", "encoded images need Pillow: pip install pillow")


def decode_images(path: str, images: Iterable[Any], shape: tuple[int, ...], image_format: str) -> Array:
    """Decode images of one size to uint8 of shape ``[n, height, width]`` or ``[n, height, width, channels]``.

    Args:
        path: Path of the field, for messages.
        images: The bytes of each image.
        shape: Expected shape of every image, checked before an image is decoded.
        image_format: ``JPEG`` or ``PNG``; no other decoder is tried.

    Raises:
        FormatError: An image cannot be decoded, or has another shape or dtype.
    """
    return np.stack(
        [_decode_image(f"field '{path}', image {i}", data, shape, image_format) for i, data in enumerate(images)]
    )


def _decode_image(what: str, data: Any, shape: tuple[int, ...], image_format: str) -> Array:
    try:
        with import_pillow().open(io.BytesIO(bytes(data)), formats=[image_format]) as image:
            height, width = shape[:2]
            if image.size != (width, height):
                raise FormatError(f"{what}: expected {width} x {height} pixels, got {image.size}")
            pixels = np.asarray(image)
    except (OSError, SyntaxError, TypeError) as error:
        raise FormatError(f"{what} is not a {image_format}: {error}") from error
    pixels = pixels[:, :, None] if shape[2:] == (1,) and pixels.ndim == 2 else pixels
    if pixels.dtype != np.uint8 or pixels.shape != shape:
        raise FormatError(f"{what}: expected uint8 of shape {shape}, got {pixels.dtype} of shape {pixels.shape}")
    return pixels


def encode_png(image: Array) -> bytes:
    """Encode an image of shape ``[height, width]`` or ``[height, width, channels]`` as PNG, without loss."""
    pixels = image[:, :, 0] if image.shape[2:] == (1,) else image
    out = io.BytesIO()
    import_pillow().fromarray(pixels).save(out, format="PNG")
    return out.getvalue()
