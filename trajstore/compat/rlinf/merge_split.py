"""Merges and splits RLinf's directories file by file; nothing is decoded, and sources are never left broken."""

from __future__ import annotations

import contextlib
import filecmp
import os
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trajstore.compat.rlinf.directory import Directory, DirectoryEntry
from trajstore.compat.rlinf.directory_index import (
    INDEX,
    LEGACY_INDEX,
    METADATA,
    local_path,
    share_of,
    write_index,
)
from trajstore.errors import CorruptionError, DataError, FormatError
from trajstore.storage.atomic_files import replace_whole

How = Literal["copy", "move", "link"]
Progress = Callable[[int, int], None]  # number of files done, number of all files

_RANK = re.compile(r"rank_(\d+)")


@dataclass(frozen=True, slots=True)
class Target:
    """A directory to create, with the trajectories that it receives; they are numbered from 0 in this order."""

    path: Path
    entries: tuple[DirectoryEntry, ...]
    seed: int | None

    @property
    def n_samples(self) -> int:
        return sum(int(entry.info.get("num_samples", 0)) for entry in self.entries)

    def file_name(self, number: int) -> str:
        """Return the new file name of a trajectory."""
        old = self.entries[number]
        return f"trajectory_{number}_{old.info['model_weights_id']}{old.path.suffix}"

    def write_index(self) -> None:
        index = {n: {**entry.info, "trajectory_id": n} for n, entry in enumerate(self.entries)}
        metadata = {
            "trajectory_format": _format(self.entries),
            "size": len(index),
            "total_samples": self.n_samples,
            "trajectory_counter": len(index),
            "seed": self.seed,
        }
        write_index(self.path, metadata, index)

    def remove(self) -> None:
        """Delete the files that were created for it."""
        for name in (INDEX, METADATA, *(self.file_name(number) for number in range(len(self.entries)))):
            (self.path / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self.path.rmdir()


def merge(
    source_path: str | os.PathLike[str],
    save_path: str | os.PathLike[str],
    *,
    how: How = "copy",
    dry_run: bool = False,
    progress: Progress | None = None,
) -> list[Target]:
    """Merge the directories of all ranks (``rank_0``, ``rank_1``, ...) into one, interleaved by trajectory id.

    Args:
        source_path: The directory that contains those of the ranks.
        save_path: The directory to create; it must be empty or not exist.
        how: ``copy`` the files, hard-``link`` them (in one file system), or ``move`` them, which deletes the
            sources at the end.
        dry_run: Change nothing; only return the result.
        progress: Called after every file.

    Returns:
        The directories that were, or would be, created.

    Raises:
        FileNotFoundError: There is no directory of a rank.
        FileExistsError: ``save_path`` is not empty.
    """
    root, target_path = local_path(source_path), local_path(save_path)
    ranks_found = [(int(match[1]), path) for path in root.iterdir() if (match := _RANK.fullmatch(path.name))]
    if not ranks_found:
        raise FileNotFoundError(f"{root}: expected directories rank_0, rank_1, ..., found none")
    ranks = [Directory(path) for _, path in sorted(ranks_found)]
    by_id = sorted(
        ((entry.id, rank, entry) for rank, directory in enumerate(ranks) for entry in directory.complete()),
        key=lambda item: item[:2],
    )
    entries = tuple(entry for _, _, entry in by_id)
    target = Target(target_path, entries, ranks[0].metadata.get("seed"))
    _create_all([target], ranks, how, dry_run, progress)
    return [target]


def split(
    source_path: str | os.PathLike[str],
    save_path: str | os.PathLike[str],
    *,
    count: int | None = None,
    parts: int | None = None,
    fractions: Sequence[float] | None = None,
    how: How = "copy",
    dry_run: bool = False,
    progress: Progress | None = None,
) -> list[Target]:
    """Split a directory into smaller ones. Give exactly one of ``count``, ``parts`` and ``fractions``.

    Args:
        source_path: The directory.
        save_path: The directory to create; it must be empty or not exist.
        count: Put the first ``count`` trajectories into ``save_path``.
        parts: Put all trajectories into ``rank_0``, ``rank_1``, ... below ``save_path``, in blocks of even size.
        fractions: Put the trajectories into ``part_0``, ``part_1``, ... below ``save_path``, in blocks of these
            fractions of all.
        how: As for `merge`. Moved trajectories are removed from the source, which remains a valid directory.
        dry_run: Change nothing; only return the result.
        progress: Called after every file.

    Returns:
        The directories that were, or would be, created.

    Raises:
        FileExistsError: A directory to create is not empty.
    """
    source, root = Directory(source_path), local_path(save_path)
    entries, seed = source.complete(), source.metadata.get("seed")
    if sum(option is not None for option in (count, parts, fractions)) != 1:
        raise ValueError("split: give exactly one of count, parts and fractions")
    if count is not None:
        if not 1 <= count <= len(entries):
            raise ValueError(f"count: expected 1 to {len(entries)}, the trajectories of {source.path}, got {count}")
        targets = [Target(root, tuple(entries[:count]), seed)]
    elif parts is not None:
        if not 1 <= parts <= len(entries):
            raise ValueError(f"parts: expected 1 to {len(entries)}, the trajectories of {source.path}, got {parts}")
        blocks = [share_of(entries, rank, parts) for rank in range(parts)]
        targets = [Target(root / f"rank_{rank}", tuple(block), seed) for rank, block in enumerate(blocks)]
    else:
        assert fractions is not None
        stops = _stops(fractions, len(entries))
        bounds = zip([0, *stops], stops, strict=False)
        targets = [Target(root / f"part_{i}", tuple(entries[a:b]), seed) for i, (a, b) in enumerate(bounds)]
    _create_all(targets, [source], how, dry_run, progress)
    return targets


def _stops(fractions: Sequence[float], n: int) -> list[int]:
    total = sum(fractions)
    if not fractions or min(fractions) <= 0 or not 0 < total <= 1 + 1e-9:
        raise ValueError(f"fractions: expected positive numbers that add up to at most 1, got {list(fractions)}")
    sums = [sum(fractions[: i + 1]) for i in range(len(fractions))]
    return [min(n, round(part * n)) for part in sums]


def _format(entries: Sequence[DirectoryEntry]) -> str:
    formats = {entry.path.suffix.removeprefix(".") for entry in entries}
    if len(formats) > 1:
        raise FormatError(f"trajectories: expected one format, got several formats ({', '.join(sorted(formats))})")
    return next(iter(formats), "pt")


def _create_all(
    targets: Sequence[Target], sources: Sequence[Directory], how: How, dry_run: bool, progress: Progress | None
) -> None:
    if how not in ("copy", "move", "link"):
        raise ValueError(f"how: expected 'copy', 'move' or 'link', got {how!r}")
    for target in targets:
        _format(target.entries)
        _check_free(target.path, sources)
    if dry_run:
        return
    try:
        _fill(targets, "copy" if how == "copy" else "link", progress)
    except BaseException:
        for target in targets:
            target.remove()
        raise
    if how == "move":
        moved = {entry.path for target in targets for entry in target.entries}
        for source in sources:
            _remove_from_source(source, moved)


def _fill(targets: Sequence[Target], how: str, progress: Progress | None) -> None:
    n_files, n_done = sum(len(target.entries) for target in targets), 0
    for target in targets:
        target.path.mkdir(parents=True, exist_ok=True)
        for number, entry in enumerate(target.entries):
            _place_file(entry.path, target.path / target.file_name(number), how)
            n_done += 1
            if progress is not None:
                progress(n_done, n_files)
        target.write_index()
        _verify(target)


def _check_free(path: Path, sources: Sequence[Directory]) -> None:
    if path.exists() and any(path.iterdir()):
        raise FileExistsError(f"{path}: expected an empty or new directory, found one with files")
    if any(path.resolve() == source.path.resolve() for source in sources):
        raise DataError(f"{path}: expected another directory than the source")


def _place_file(old: Path, new: Path, how: str) -> None:
    if how == "link":
        try:
            return os.link(old, new)
        except OSError:  # another file system, or one without hard links
            pass
    return replace_whole(new, lambda temporary: shutil.copyfile(old, temporary))


def _verify(target: Target) -> None:
    """Read the new directory and compare its files with the source's."""
    created = Directory(target.path)
    if created.missing or created.is_rebuilt or len(created.entries) != len(target.entries):
        raise CorruptionError(f"{target.path}: differs from the files that were written; the source is unchanged")
    for entry, old in zip(created.entries, target.entries, strict=True):
        if not os.path.samefile(entry.path, old.path) and not filecmp.cmp(entry.path, old.path, shallow=False):
            raise CorruptionError(f"{entry.path}: differs from {old.path}; the source is unchanged")


def _remove_from_source(source: Directory, moved: set[Path]) -> None:
    """Remove moved trajectories from a source: first from its index, then from the disk."""
    rest = {entry.id: entry.info for entry in source.entries if entry.path not in moved}
    if rest:
        samples = sum(int(info.get("num_samples", 0)) for info in rest.values())
        metadata: dict[str, Any] = {**source.metadata, "size": len(rest), "total_samples": samples}
        write_index(source.path, metadata, rest)
        (source.path / LEGACY_INDEX).unlink(missing_ok=True)
    else:
        for name in (INDEX, LEGACY_INDEX, METADATA):
            (source.path / name).unlink(missing_ok=True)
    for entry in source.entries:
        if entry.path in moved:
            entry.path.unlink(missing_ok=True)
