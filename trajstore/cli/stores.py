"""Open the store that a command names."""

from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import trajstore
from trajstore.cli.exit_codes import UsageError, damage_of_a_store, usage_errors
from trajstore.cli.parameters import parse_disk_cache, parse_storage_options
from trajstore.errors import FormatError, StoreNotFoundError
from trajstore.storage import open_storage
from trajstore.store.checkpoints import find
from trajstore.store.snapshot import Snapshot
from trajstore.store.store import check_root

_MAX_LOOKED_AT = 1000  # entries of a directory that is no store


def open_snapshot(
    url: str, storage_option: Sequence[str] | None, at: str | None = None, disk_cache: str | None = None
) -> Snapshot:
    """Open a store, at a checkpoint if ``at`` names one; ``disk_cache`` as `parse_disk_cache` takes it."""
    with usage_errors():
        options = parse_storage_options(storage_option)
        try:
            store = trajstore.open(check_url(url), storage_options=options, disk_cache=parse_disk_cache(disk_cache))
        except StoreNotFoundError as error:
            raise StoreNotFoundError(f"{error}{_stores_below(url)}") from None
        except FormatError:
            check_root(open_storage(url, options))  # raises if this is no store that this version reads
            with damage_of_a_store():
                raise
        with damage_of_a_store():
            storage = store.snapshot.storage
            return store.snapshot if at is None else Snapshot.at(storage, store.schema, find(storage, at))


def _stores_below(url: str) -> str:
    """A hint if stores stand in this directory, as if a directory of runs was named."""
    place = Path(url)
    if not place.is_dir():
        return ""
    looked_at = islice(place.iterdir(), _MAX_LOOKED_AT)
    names = sorted(one.name for one in looked_at if (one / "zarr.json").is_file() and (one / "streams").is_dir())
    return f"; it holds the stores {', '.join(names[:10])}{', ...' * (len(names) > 10)}" if names else ""


def check_url(url: str) -> str:
    """Return the URL.

    Raises:
        UsageError: It is in memory, where a new process finds nothing.
    """
    if url.startswith("memory:"):
        raise UsageError("memory:// stores end with their process; give a directory or an object store")
    return url
