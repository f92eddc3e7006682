"""Parameters of commands: their descriptions for the command line, and storage options.

A command is a plain function that returns an exit code. Annotations describe its parameters, so that commands can
be defined without importing typer.
"""

import contextlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from trajstore.cli.exit_codes import UsageError
from trajstore.storage import DiskCache

_MIN_SECRET_LENGTH = 3  # replacing shorter texts would make messages unreadable


@dataclass(frozen=True)
class Argument:
    """A positional argument."""

    help: str
    metavar: str = "URL"


@dataclass(frozen=True)
class Option:
    """A named option."""

    name: str
    help: str
    metavar: str | None = None


Url = Annotated[str, Argument("The store: a directory, or a URL such as s3://bucket/..., gs://... or az://...")]
At = Annotated[
    str | None, Option("--at", "Show the store at this checkpoint: its name or id, or 'latest'.", "CHECKPOINT")
]
StorageOptions = Annotated[
    list[str] | None,
    Option(
        "--storage-option",
        "Option of the storage backend, such as client_kwargs.endpoint_url=... or anon=true. May be repeated. "
        "Values are never printed. Other users may see them in the list of processes, so pass credentials through "
        "the environment.",
        "KEY=VALUE",
    ),
]
TargetOptions = Annotated[
    list[str] | None,
    Option("--target-option", "As --storage-option, for the new store.", "KEY=VALUE"),
]
DiskCacheOption = Annotated[
    str | None,
    Option(
        "--disk-cache",
        "Keep what is read of a remote store in this local directory, within so many bytes; such as "
        "/local/nvme,200GiB.",
        "DIRECTORY,BYTES",
    ),
]
AsJson = Annotated[bool, Option("--json", "Print one JSON document instead of tables.")]


def parse_disk_cache(text: str | None) -> DiskCache | None:
    """Parse ``DIRECTORY,BYTES``.

    Raises:
        UsageError: The text is malformed.
    """
    if not text:
        return None
    directory, comma, n_bytes = text.rpartition(",")
    try:
        if not comma or not directory:
            raise ValueError("expected DIRECTORY,BYTES")
        return DiskCache(directory, int(n_bytes) if n_bytes.isdecimal() else n_bytes)
    except ValueError as error:
        raise UsageError(f"--disk-cache: {error}, got {text!r:.80}") from error


def parse_storage_options(pairs: Sequence[str] | None) -> dict[str, Any]:
    """Parse ``KEY=VALUE`` texts.

    Dots in a key make nested options. JSON objects, lists, ``true``, ``false`` and ``null`` are parsed; any other
    value is text.

    Raises:
        UsageError: A text is malformed. The message does not repeat it, because it may be a secret.
    """
    options: dict[str, Any] = {}
    for pair in pairs or ():
        key, equals, text = pair.partition("=")
        if not equals or not all(key.split(".")):
            raise UsageError("--storage-option: expected KEY=VALUE")
        *groups, name = key.split(".")
        inner = options
        for group in groups:
            inner = inner.setdefault(group, {})
            if not isinstance(inner, dict):
                raise UsageError(f"--storage-option: {group!r} is given both as a value and as a group")
        inner[name] = _parse_value(text)
    return options


def _parse_value(text: str) -> Any:
    if text in ("true", "false", "null") or text[:1] in ("{", "["):
        try:
            return json.loads(text)
        except ValueError:
            raise UsageError("--storage-option: expected JSON after a bracket or brace") from None
    return text  # even if it looks like a number: an access key may


def find_secrets(pairs: Iterable[str]) -> set[str]:
    """Return all texts in storage options, which must not appear in messages."""

    def leaves(value: Any) -> Iterator[str]:
        if isinstance(value, str):
            yield value
        for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            yield from leaves(inner)

    found = {pair.partition("=")[2] or pair for pair in pairs}
    with contextlib.suppress(UsageError):
        found.update(leaves(parse_storage_options(list(pairs))))
    return {secret for secret in found if len(secret) >= _MIN_SECRET_LENGTH} - {"true", "false", "null"}
