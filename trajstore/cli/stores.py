"""Open the store that a command names."""

from collections.abc import Sequence

import trajstore
from trajstore.cli.exit_codes import UsageError, usage_errors
from trajstore.cli.parameters import parse_storage_options
from trajstore.store.checkpoints import find
from trajstore.store.snapshot import Snapshot


def open_snapshot(url: str, storage_option: Sequence[str] | None, at: str | None = None) -> Snapshot:
    """Open a store, at a checkpoint if ``at`` names one."""
    with usage_errors():
        store = trajstore.open(check_url(url), storage_options=parse_storage_options(storage_option))
        if at is None:
            return store.snapshot
        storage = store.snapshot.storage
        return Snapshot.at(storage, store.schema, find(storage, at))


def check_url(url: str) -> str:
    """Return the URL.

    Raises:
        UsageError: It is in memory, where a new process finds nothing.
    """
    if url.startswith("memory:"):
        raise UsageError("memory:// stores end with their process; give a directory or an object store")
    return url
