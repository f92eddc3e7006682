"""Directories of RLinf's merged and split, file by file: nothing is decoded, and no source is left broken."""

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

from trajstore.compat.rlinf.directory import (
    INDEX,
    LEGACY_INDEX,
    METADATA,
    Directory,
    Entry,
    local_path,
    share_of,
    write_index,
)
from trajstore.errors import CorruptionError, DataError, FormatError
from trajstore.storage.atomic_files import replace_whole

How = Literal["copy", "move", "link"]
Progress = Callable[[int, int], None]  # files done, files in all

_RANK = re.compile(r"rank_(\d+)")


@dataclass(frozen=True, slots=True)
class Target:
    """A directory to be made: the trajectories that it gets, in order; they are numbered from 0."""

    path: Path
    entries: tuple[Entry, ...]
    seed: int | None

    @property
    def n_samples(self) -> int:
        return sum(int(entry.info.get("num_samples", 0)) for entry in self.entries)

    def name(self, number: int) -> str:
        old = self.entries[number]
        return f"trajectory_{number}_{old.info['model_weights_id']}{old.path.suffix}"

    def put_index(self) -> None:
        index = {n: {**entry.info, "trajectory_id": n} for n, entry in enumerate(self.entries)}
        about = {
            "trajectory_format": _format(self.entries),
            "size": len(index),
            "total_samples": self.n_samples,
            "trajectory_counter": len(index),
            "seed": self.seed,
        }
        write_index(self.path, about, index)

    def remove(self) -> None:
        """Take away what was made of it."""
        for name in (INDEX, METADATA, *(self.name(number) for number in range(len(self.entries)))):
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
    """Make one directory of those of all ranks (``rank_0``, ``rank_1``, ...), interleaved by trajectory id.

    Args:
        source_path: Where the ranks are.
        save_path: Where nothing is.
        how: ``copy`` files, ``link`` them (one file system), or ``move`` them: then the sources are gone.
        dry_run: Only say what would be done.
        progress: Called after every file.

    Returns:
        What was made, or would be.
    """
    root, target_path = local_path(source_path), local_path(save_path)
    found = [(int(match[1]), path) for path in root.iterdir() if (match := _RANK.fullmatch(path.name))]
    if not found:
        raise FileNotFoundError(f"{root}: expected directories rank_0, rank_1, ..., found none")
    ranks = [Directory(path) for _, path in sorted(found)]
    by_id = sorted(
        ((entry.id, rank, entry) for rank, directory in enumerate(ranks) for entry in directory.complete()),
        key=lambda item: item[:2],
    )
    entries = tuple(entry for _, _, entry in by_id)
    target = Target(target_path, entries, ranks[0].metadata.get("seed"))
    _carry_out([target], ranks, how, dry_run, progress)
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
    """Make smaller directories of one. Say one of ``count``, ``parts`` and ``fractions``.

    Args:
        source_path: The directory.
        save_path: Where nothing is.
        count: The first so many trajectories go to ``save_path``.
        parts: All go to ``rank_0``, ``rank_1``, ... there, in blocks as even as can be.
        fractions: All go to ``part_0``, ``part_1``, ... there, in blocks of these parts of the whole.
        how: As for `merge`. What is moved is no longer in the source, which goes on without it.
        dry_run: Only say what would be done.
        progress: Called after every file.

    Returns:
        What was made, or would be.
    """
    source, root = Directory(source_path), local_path(save_path)
    entries, seed = source.complete(), source.metadata.get("seed")
    if sum(option is not None for option in (count, parts, fractions)) != 1:
        raise ValueError("split: say one of count, parts and fractions")
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
    _carry_out(targets, [source], how, dry_run, progress)
    return targets


def _stops(fractions: Sequence[float], n: int) -> list[int]:
    total = sum(fractions)
    if not fractions or min(fractions) <= 0 or not 0 < total <= 1 + 1e-9:
        raise ValueError(f"fractions: expected positive numbers that add up to at most 1, got {list(fractions)}")
    sums = [sum(fractions[: i + 1]) for i in range(len(fractions))]
    return [min(n, round(part * n)) for part in sums]


def _format(entries: Sequence[Entry]) -> str:
    kinds = {entry.path.suffix.removeprefix(".") for entry in entries}
    if len(kinds) > 1:
        raise FormatError(f"trajectories are of several formats ({', '.join(sorted(kinds))}); expected one")
    return next(iter(kinds), "pt")


def _carry_out(
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
            _release(source, moved)


def _fill(targets: Sequence[Target], how: str, progress: Progress | None) -> None:
    n_files, n_done = sum(len(target.entries) for target in targets), 0
    for target in targets:
        target.path.mkdir(parents=True, exist_ok=True)
        for number, entry in enumerate(target.entries):
            _place(entry.path, target.path / target.name(number), how)
            n_done += 1
            if progress is not None:
                progress(n_done, n_files)
        target.put_index()
        _verify(target)


def _check_free(path: Path, sources: Sequence[Directory]) -> None:
    if path.exists() and any(path.iterdir()):
        raise FileExistsError(f"{path}: expected a place where nothing is; it holds something")
    if any(path.resolve() == source.path.resolve() for source in sources):
        raise DataError(f"{path}: is the source itself")


def _place(old: Path, new: Path, how: str) -> None:
    if how == "link":
        try:
            return os.link(old, new)
        except OSError:  # another file system, or one without links
            pass
    return replace_whole(new, lambda temporary: shutil.copyfile(old, temporary))


def _verify(target: Target) -> None:
    """Read the new directory as anybody would, and compare its files with those they came from."""
    made = Directory(target.path)
    if made.missing or made.is_rebuilt or len(made.entries) != len(target.entries):
        raise CorruptionError(f"{target.path}: is not what was written; the source is as it was")
    for entry, old in zip(made.entries, target.entries, strict=True):
        if not os.path.samefile(entry.path, old.path) and not filecmp.cmp(entry.path, old.path, shallow=False):
            raise CorruptionError(f"{entry.path}: differs from {old.path}; the source is as it was")


def _release(source: Directory, moved: set[Path]) -> None:
    """Take what was moved out of a source: first out of its index, then from the disk."""
    rest = {entry.id: entry.info for entry in source.entries if entry.path not in moved}
    if rest:
        samples = sum(int(info.get("num_samples", 0)) for info in rest.values())
        about: dict[str, Any] = {**source.metadata, "size": len(rest), "total_samples": samples}
        write_index(source.path, about, rest)
        (source.path / LEGACY_INDEX).unlink(missing_ok=True)
    else:
        for name in (INDEX, LEGACY_INDEX, METADATA):
            (source.path / name).unlink(missing_ok=True)
    for entry in source.entries:
        if entry.path in moved:
            entry.path.unlink(missing_ok=True)
