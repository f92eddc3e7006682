"""Images that datasets keep encoded, as arrays."""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import Any

import numpy as np

from trajstore.datasets.libraries import needed
from trajstore.errors import FormatError
from trajstore.schema import Array


def library() -> Any:
    """Pillow."""
    return needed(
        "PIL.Image", "encoded images need Pillow: pip install 'trajstore[lerobot]' or 'trajstore[minari]'"
    )


def decoded(path: str, images: Iterable[Any], shape: tuple[int, ...], kind: str) -> Array:
    """Images of one size, ``[n, height, width]`` or with channels last.

    Args:
        path: Of the field, for messages.
        images: The bytes of each.
        shape: That all must have; looked at before an image is decoded.
        kind: ``JPEG`` or ``PNG``; nothing else is tried.
    """
    return np.stack([_decoded(f"field '{path}', image {i}", data, shape, kind) for i, data in enumerate(images)])


def _decoded(what: str, data: Any, shape: tuple[int, ...], kind: str) -> Array:
    try:
        with library().open(io.BytesIO(bytes(data)), formats=[kind]) as image:
            height, width = shape[:2]
            if image.size != (width, height):
                raise FormatError(f"{what}: expected {width} x {height} pixels, got {image.size}")
            pixels = np.asarray(image)
    except (OSError, SyntaxError, TypeError) as error:
        raise FormatError(f"{what} is not a {kind}: {error}") from error
    pixels = pixels[:, :, None] if shape[2:] == (1,) and pixels.ndim == 2 else pixels
    if pixels.dtype != np.uint8 or pixels.shape != shape:
        raise FormatError(f"{what}: expected uint8 of shape {shape}, got {pixels.dtype} of shape {pixels.shape}")
    return pixels


def encoded(image: Array) -> bytes:
    """A PNG, which loses nothing."""
    pixels = image[:, :, 0] if image.shape[2:] == (1,) else image
    out = io.BytesIO()
    library().fromarray(pixels).save(out, format="PNG")
    return out.getvalue()
