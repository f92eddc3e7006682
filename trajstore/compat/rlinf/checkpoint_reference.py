"""Checkpoints that refer to a store: a small JSON file with the place of the store and the id of its checkpoint.

The file may be damaged or hostile: its size is checked before it is parsed, every value is checked, and nothing in
it is executed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trajstore.credentials import credential_in, without_credentials
from trajstore.errors import CheckpointNotFoundError, DataError, FormatError, StoreNotFoundError
from trajstore.format.json_values import parse_count, parse_id
from trajstore.storage import open_storage
from trajstore.storage.atomic_files import replace_text
from trajstore.store import checkpoints

Url = str | os.PathLike[str]

FILE = "trajstore_checkpoint.json"
_FORMAT = "trajstore-rlinf-checkpoint"
_MAX_BYTES = 1 << 16
_MAX_PLACE_CHARACTERS = 4096


@dataclass(frozen=True, slots=True)
class CheckpointReference:
    """A checkpoint of a store.

    Attributes:
        path: The directory of the file.
        checkpoint: Id of the checkpoint; None: nothing was ever added to the buffer.
        n_trajectories: The number of trajectories held: the newest ones of the checkpoint. It may show older ones
            that were evicted before, because they share chunks with others.
        places: Where the store is, tried in this order: URLs, absolute paths, or paths relative to ``path``.
    """

    path: str
    checkpoint: str | None = None
    n_trajectories: int = 0
    places: tuple[str, ...] = ()

    @classmethod
    def read(cls, path: Url, storage_options: Mapping[str, Any] | None) -> CheckpointReference | None:
        """Return the reference in a directory; None if there is no such file.

        Raises:
            FormatError: The file is not a reference.
        """
        text = os.fspath(path)
        storage = open_storage(path, storage_options)
        try:
            if (size := storage.size(FILE)) > _MAX_BYTES:
                raise FormatError(f"{text}/{FILE}: expected at most {_MAX_BYTES} bytes, got {size}")
            data = storage.get(FILE)
        except (FileNotFoundError, NotADirectoryError):
            return None
        try:
            return cls(text, *_parse(json.loads(data)))
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise FormatError(f"{text}/{FILE}: not a reference to a checkpoint: {error!s:.200}") from error

    def write(self, storage_options: Mapping[str, Any] | None) -> None:
        """Write the file, atomically; creates the directory if necessary.

        Raises:
            DataError: The URL of a store holds a credential, which would be stored.
        """
        if (found := credential_in(" ".join(self.places))) is not None:
            raise DataError(
                f"{without_credentials(self.path)}: the URL of the store holds {found}, which would be stored; pass"
                " credentials in storage_options"
            )
        content = {
            "format": _FORMAT,
            "version": 1,
            "checkpoint": self.checkpoint,
            "trajectories": self.n_trajectories,
            "stores": list(self.places),
        }
        text = json.dumps(content, indent=1)
        if "://" in self.path:
            open_storage(self.path, storage_options).put(FILE, text.encode())
        else:
            Path(self.path).mkdir(parents=True, exist_ok=True)
            replace_text(Path(self.path) / FILE, text)

    def locate(self, options_for: Callable[[str], Mapping[str, Any] | None]) -> str:
        """Return the URL of the store that holds the checkpoint.

        Args:
            options_for: Returns the storage options for a URL.

        Raises:
            StoreNotFoundError: No place holds a store with this checkpoint.
        """
        assert self.checkpoint is not None
        tried = []
        for place in self.places:
            url = place if "://" in place or os.path.isabs(place) else joined(self.path, place)
            try:
                if checkpoints.find(open_storage(url, options_for(url)), self.checkpoint).id == self.checkpoint:
                    return url
            except (StoreNotFoundError, CheckpointNotFoundError, FileNotFoundError):
                pass
            tried.append(url)
        raise StoreNotFoundError(
            f"{self.path}: refers to checkpoint '{self.checkpoint}' of a store at {' or '.join(tried)}, which does"
            " not exist. Move the store back; checkpoints that need no store are saved with layout='copy'"
        )


def _parse(data: Any) -> tuple[str | None, int, tuple[str, ...]]:
    if data["format"] != _FORMAT:
        raise ValueError(f"expected the format {_FORMAT!r}, got {data['format']!r:.80}")
    if type(data["version"]) is not int or data["version"] != 1:
        raise ValueError(f"has version {data['version']!r:.40}, this trajstore reads version 1; upgrade trajstore")
    if data["checkpoint"] is None:
        return None, 0, ()
    if not isinstance(data["stores"], list) or not data["stores"]:
        raise ValueError(f"stores: expected a list of places, got {data['stores']!r:.80}")
    places = tuple(_parse_place(place) for place in data["stores"])
    return parse_id(data["checkpoint"]), parse_count(data["trajectories"]), places


def _parse_place(place: object) -> str:
    # A chained URL ("simplecache::http://...") could reach anything that fsspec knows.
    if not isinstance(place, str) or not place.isprintable() or "::" in place:
        raise ValueError(f"stores: expected paths and URLs, got {place!r:.80}")
    if not 0 < len(place) <= _MAX_PLACE_CHARACTERS:
        raise ValueError(f"stores: expected 1 to {_MAX_PLACE_CHARACTERS} characters, got {len(place)}")
    # Makes no request. A web server could be anyone's, and RLinf's checkpoints are never written to one.
    if "://" in place and open_storage(place).is_read_only:
        raise ValueError(f"stores: {place!r:.80}: no checkpoint is there, because puts are not known to be atomic")
    return place


def scheme(url: str) -> str:
    """Return the scheme of a URL; ``file`` for a path."""
    return url.partition("://")[0] if "://" in url else "file"


def joined(path: str, name: str) -> str:
    """Return the place ``name`` relative to a directory or URL."""
    return f"{path.rstrip('/')}/{name}" if "://" in path else os.path.normpath(os.path.join(path, name))
