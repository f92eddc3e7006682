"""Saves a buffer as a checkpoint that refers to its store, or as one that holds a copy of it."""

from __future__ import annotations

import os
import re
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from trajstore.compat.rlinf.checkpoint_reference import CheckpointReference, Url, joined, scheme
from trajstore.compat.rlinf.directory_index import is_rlinf_directory
from trajstore.errors import DataError, StoreNotFoundError
from trajstore.replay.buffer import ReplayBuffer
from trajstore.storage import open_storage
from trajstore.store import checkpoints
from trajstore.store.copying import copy
from trajstore.store.store import check_root

Layout = Literal["reference", "copy", "rlinf"]
Options = Mapping[str, Any] | None

_NAME = "rlinf"  # of the checkpoints in the store
_COPY = re.compile(r"store-[0-9a-f]{12}")


def checked_layout(layout: str | None, is_stored: bool) -> Layout:
    """Return the layout of checkpoints, by default the one that copies least.

    Args:
        layout: The layout that was asked for, if any.
        is_stored: Whether the trajectories are in a store that other processes can open.

    Raises:
        ValueError: There is no such layout, or the buffer cannot have it.
    """
    if layout is None:
        return "reference" if is_stored else "copy"
    if layout not in get_args(Layout):
        raise ValueError(f"layout: expected one of {', '.join(get_args(Layout))}, got {layout!r}")
    if layout == "reference" and not is_stored:
        raise ValueError(
            "layout: 'reference' needs a store that outlives the process; without auto_save the trajectories are in"
            " RAM: use 'copy', or auto_save=True with an auto_save_path"
        )
    return layout  # type: ignore[return-value]


def save_reference(memory: ReplayBuffer | None, n_held: int, path: Url, path_options: Options) -> None:
    """Save a checkpoint in the store of a buffer, and a file that refers to it. No step data is copied or read.

    Args:
        memory: The buffer; None: nothing was ever added.
        n_held: The number of trajectories that it holds.
        path: Directory for the file.
        path_options: Storage options for ``path``.
    """
    directory = _checked_target(path, path_options)
    if memory is None:
        CheckpointReference(directory).write(path_options)
        return
    checkpoint = memory.save_checkpoint(_NAME, wait=True)
    CheckpointReference(directory, checkpoint, n_held, _places(memory.url, directory)).write(path_options)


def _places(url: str, directory: str) -> tuple[str, ...]:
    """Return where a store is found from a directory: its URL, and the way from one to the other."""
    if scheme(url) != "file":
        return (url,)
    store = os.path.abspath(url.removeprefix("file://"))
    if scheme(directory) != "file":
        return (store,)
    # The relative path finds the store after both were moved together.
    return store, os.path.relpath(os.path.realpath(store), os.path.realpath(directory))


def save_copy(
    memory: ReplayBuffer | None, n_held: int, path: Url, store_options: Options, path_options: Options
) -> None:
    """Copy the store of a buffer into a directory, and write a file that refers to the copy.

    An earlier copy in the directory is removed once the new one is complete.

    Args:
        memory: The buffer; None: nothing was ever added.
        n_held: The number of trajectories that it holds.
        path: The directory.
        store_options: Storage options of the buffer's store.
        path_options: Storage options for ``path``.
    """
    directory, name = _checked_target(path, path_options), f"store-{uuid.uuid4().hex[:12]}"
    if memory is None:
        CheckpointReference(directory).write(path_options)
    else:
        checkpoint = memory.save_checkpoint(_NAME, wait=True)
        try:
            copy_checkpoint(memory.url, joined(directory, name), checkpoint, store_options, path_options)
        finally:
            checkpoints.remove(memory.session.storage, checkpoint)  # it would keep evicted steps from being freed
        CheckpointReference(directory, checkpoint, n_held, (name,)).write(path_options)
    _remove_copies(directory, path_options, kept=name)


def copy_checkpoint(url: str, target: str, checkpoint: str, url_options: Options, target_options: Options) -> None:
    """Copy what a checkpoint shows to another place, chunk by chunk; by hard links where possible."""
    copy(url, target, at=checkpoint, storage_options=url_options, target_options=target_options)


def _checked_target(path: Url, options: Options) -> str:
    """Return the directory of a new checkpoint, as text.

    Raises:
        DataError: It holds a store or RLinf's files, which a checkpoint beside them would hide.
    """
    text = os.fspath(path).removeprefix("file://")
    try:
        check_root(open_storage(text, options))
    except StoreNotFoundError:
        pass
    else:
        raise DataError(f"{text}: is a store; save to another directory, whose checkpoint will refer to the store")
    if "://" not in text and is_rlinf_directory(text):
        raise DataError(
            f"{text}: holds RLinf's files; save to another directory, or write such files with layout='rlinf'"
        )
    return text


def _remove_copies(directory: str, options: Options, *, kept: str) -> None:
    """Remove earlier copies, including those of killed processes."""
    if "://" not in directory:
        for name in os.listdir(directory):
            if name != kept and _COPY.fullmatch(name):
                shutil.rmtree(Path(directory) / name)
        return
    storage = open_storage(directory, options)
    for name in storage.list_names(""):
        if name != kept and _COPY.fullmatch(name):
            storage.remove_tree(name)
