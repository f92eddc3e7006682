"""Runs all checks of a store in order.

Damage stops nothing: checks that depend on a damaged object are skipped, all others still run. Harmless leftovers,
such as objects of a commit that was never completed, are noted. Writers may continue during the verification; what
they may have changed is read again before it is reported as a problem.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from trajstore.storage import open_storage
from trajstore.store.checkpoints import find
from trajstore.store.store import Store
from trajstore.store.verify.checkpoints import check_states, read_complete_checkpoints, records_shown
from trajstore.store.verify.inspection import Inspection, Progress
from trajstore.store.verify.report import VerifyReport
from trajstore.store.verify.store_objects import check_groups, check_root, check_schemas, read_records
from trajstore.store.verify.streams import check_streams


def verify(
    store: Store | str | os.PathLike[str],
    *,
    fast: bool = False,
    progress: Progress | None = None,
    at: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> VerifyReport:
    """Check every object that a reader relies on, and report all problems.

    Memory is bounded by one wave of chunks and the span table of one stream.

    Args:
        store: A store, or its URL. By URL, a store that is too damaged to be opened can be checked as well.
        fast: Read only records and span tables; of all other chunks check presence and size.
        progress: Called after every wave with the number of chunks checked so far and the total.
        at: Check only what this checkpoint shows: its name, its id, or ``"latest"``.
        storage_options: Options for fsspec's filesystem, if ``store`` is a URL.

    Raises:
        StoreNotFoundError: The location holds no store.
        FormatError: The location holds something else, or a store of a newer format.
        CheckpointNotFoundError: The store has no such checkpoint.
        StorageError: The storage stopped answering.
    """
    storage = store.snapshot.storage if isinstance(store, Store) else open_storage(store, storage_options)
    storage = storage.source  # what is stored is checked, not copies of it
    inspection = Inspection(storage, fast, progress, VerifyReport(storage.display))
    check_root(inspection)
    check_groups(inspection)
    if at is None:
        inspection.records = read_records(inspection)
        inspection.checkpoints = read_complete_checkpoints(inspection)
        for checkpoint in inspection.checkpoints:
            records_shown(inspection, checkpoint)
    else:
        inspection.at = find(storage, at)
        inspection.checkpoints = [inspection.at]
        inspection.records = records_shown(inspection, inspection.at)
    check_schemas(inspection)
    check_streams(inspection)
    check_states(inspection)
    return inspection.report
