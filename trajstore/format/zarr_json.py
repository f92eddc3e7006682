"""The ``zarr.json`` of a group: its JSON text, trajstore's attributes in it, and the checksum."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from trajstore.errors import FormatError, UnknownFormatError
from trajstore.format.codec import crc32c

FORMAT = 1
GROUP: dict[str, Any] = {"zarr_format": 3, "node_type": "group", "attributes": {}}
MAX_RECORD_BYTES = 64 << 20


def to_json_bytes(data: Mapping[str, Any]) -> bytes:
    return json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def group_bytes(own: Mapping[str, Any]) -> bytes:
    """The ``zarr.json`` of a group that has only these trajstore attributes."""
    return to_json_bytes(GROUP | {"attributes": {"trajstore": own}})


def parse_json(data: bytes, what: str) -> dict[str, Any]:
    """Parse a ``zarr.json``.

    Raises:
        FormatError: It is not a JSON object, or larger than `MAX_RECORD_BYTES`.
    """
    if len(data) > MAX_RECORD_BYTES:
        raise FormatError(f"{what}: {len(data)} bytes of metadata; at most {MAX_RECORD_BYTES}")
    try:
        parsed = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{what}: not readable as JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise FormatError(f"{what}: expected a JSON object, got {type(parsed).__name__}")
    return parsed


_CHECKSUM = re.compile(rb'"crc32c": ?"([0-9a-f]{8})"')
NO_CHECKSUM = "00000000"


def with_checksum(data: Mapping[str, Any]) -> bytes:
    """A ``zarr.json`` whose first ``"crc32c"`` holds the checksum of the text with zeros in its place."""
    text = to_json_bytes(data)
    found = _CHECKSUM.search(text)
    assert found is not None
    return text[: found.start(1)] + f"{crc32c(text):08x}".encode() + text[found.end(1) :]


def check_checksum(text: bytes, what: str) -> None:
    """Refuse a ``zarr.json`` that changed since it was written.

    Raises:
        FormatError: It has no checksum, or its checksum does not match.
    """
    found = _CHECKSUM.search(text)
    if found is None:
        raise FormatError(f"{what} has no checksum")
    blank = text[: found.start(1)] + NO_CHECKSUM.encode() + text[found.end(1) :]
    if found.group(1) != f"{crc32c(blank):08x}".encode():
        raise FormatError(f"{what} is damaged: its checksum does not match")


def trajstore_attributes(data: Mapping[str, Any], kind: str, what: str) -> dict[str, Any]:
    """The ``trajstore`` attributes of a group.

    Raises:
        FormatError: It has none, or they are of another kind.
        UnknownFormatError: They are of a format that this version does not read.
    """
    attributes = data.get("attributes")
    own = attributes.get("trajstore") if isinstance(attributes, dict) else None
    if not isinstance(own, dict) or data.get("node_type") != "group":
        raise FormatError(f"{what} is not part of a trajstore store")
    if own.get("format") != FORMAT:
        raise UnknownFormatError(
            f"{what} has format {own.get('format')!r}, this trajstore reads format {FORMAT}; upgrade trajstore"
        )
    if own.get("kind") != kind:
        raise FormatError(f"{what}: expected a {kind}, got {own.get('kind')!r}")
    return own
