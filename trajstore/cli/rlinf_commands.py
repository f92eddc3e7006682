"""Commands for directories of RLinf's: load and sample once, merge, split, into a store and out of it."""

from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

from trajstore.cli.command import (
    FINE,
    Argument,
    AsJson,
    Facts,
    Option,
    Pairs,
    Url,
    UsageError,
    progress_bar,
    resumable,
    show,
    storage_options,
    usage,
)

if TYPE_CHECKING:
    from rich.console import Console

    from trajstore.compat.rlinf.buffer import TrajectoryReplayBuffer
    from trajstore.compat.rlinf.merge_split import How, Target

Source = Annotated[str, Option("--source-path", "Where the directory is, or those of all ranks.", "PATH")]
Save = Annotated[str, Option("--save-path", "Where nothing is yet.", "PATH")]
HowTo = Annotated[
    str, Option("--how", "copy the files, link them, or move them: then the source has them no more.", "HOW")
]
Copy = Annotated[bool, Option("--copy", "The same as --how copy.")]
DryRun = Annotated[bool, Option("--dry-run", "Only say what would be done.")]
Verify = Annotated[bool, Option("--verify/--no-verify", "Read every trajectory back and compare.")]
Trusted = Annotated[bool, Option("--trusted", "Load pickles too. They can run any code: only your own files.")]


def sample(
    load_path: Annotated[str, Option("--load-path", "The directory, or a store of trajectories.", "PATH")],
    num_chunks: Annotated[int, Option("--num-chunks", "Transitions to draw.")] = 4,
    sample_window_size: Annotated[
        int, Option("--sample-window-size", "Draw from so many of the newest trajectories; 0: from all.")
    ] = 10,
    cache_size: Annotated[int, Option("--cache-size", "Accepted, and without a meaning.")] = 5,
    enable_cache: Annotated[bool, Option("--enable-cache", "Accepted, and without a meaning.")] = False,
    trusted: Trusted = False,
    storage_option: Pairs = None,
    as_json: AsJson = False,
) -> int:
    """Load trajectories, sample once, and show keys, shapes and dtypes of the batch."""
    from trajstore.compat.rlinf.buffer import TrajectoryReplayBuffer
    from trajstore.compat.rlinf.field_paths import to_paths

    with usage(FileNotFoundError):
        buffer = TrajectoryReplayBuffer(sample_window_size=sample_window_size)
        try:
            if options := storage_options(storage_option):
                _load_store(buffer, load_path, options)
            else:
                buffer.load_checkpoint(load_path, trusted=trusted)
            batch = to_paths(buffer.sample(num_chunks))
            facts = {**buffer.get_stats(), "batch": {path: _described(leaf) for path, leaf in batch.items()}}
        finally:
            buffer.close()
    show(facts, _show_batch, as_json)
    return FINE


def merge(
    source_path: Source = ".",
    save_path: Save = "",
    how: HowTo = "copy",
    copy: Copy = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> int:
    """Make one directory of those of all ranks, interleaved by trajectory id."""
    from trajstore.compat.rlinf import merge_split

    def work(progress: Any) -> list["Target"]:
        return merge_split.merge(source_path, save_path, how=_how(how, copy), dry_run=dry_run, progress=progress)

    return _transferred(work, save_path, dry_run, as_json)


def split(
    source_path: Source = ".",
    save_path: Save = "",
    split_count: Annotated[int | None, Option("--split-count", "Take the first so many trajectories.")] = None,
    parts: Annotated[int | None, Option("--parts", "Make so many even parts: rank_0, rank_1, ...")] = None,
    fractions: Annotated[
        str | None, Option("--fractions", "Make parts of these sizes: 0.8,0.2 gives part_0 and part_1.")
    ] = None,
    how: HowTo = "copy",
    copy: Copy = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> int:
    """Make smaller directories of one: the first N trajectories, even parts, or fractions."""
    from trajstore.compat.rlinf import merge_split

    def work(progress: Any) -> list["Target"]:
        sizes = [float(part) for part in fractions.split(",")] if fractions else None
        which: dict[str, Any] = {"count": split_count, "parts": parts, "fractions": sizes}
        return merge_split.split(
            source_path, save_path, how=_how(how, copy), dry_run=dry_run, progress=progress, **which
        )

    return _transferred(work, save_path, dry_run, as_json)


def import_(
    source: Annotated[str, Argument("The directory.", "SOURCE")],
    url: Url,
    trusted: Trusted = False,
    verify: Verify = True,
    storage_option: Pairs = None,
    as_json: AsJson = False,
) -> int:
    """Write a directory to a store; goes on where an earlier run stopped."""
    from trajstore.compat.rlinf.directory_transfer import import_directory

    options = storage_options(storage_option)
    with resumable(), usage(FileNotFoundError), progress_bar("trajectories") as progress:
        report = import_directory(
            source, url, trusted=trusted, verify=verify, progress=progress, storage_options=options
        )
    show({"source": source, "target": url, **asdict(report)}, _show_report, as_json)
    return FINE


def export(
    url: Url,
    target: Annotated[str, Argument("The directory.", "TARGET")],
    verify: Verify = True,
    storage_option: Pairs = None,
    as_json: AsJson = False,
) -> int:
    """Write a store of trajectories as a directory that RLinf loads; goes on where an earlier run stopped."""
    from trajstore.compat.rlinf.directory_transfer import export_directory

    options = storage_options(storage_option)
    with resumable(), usage(), progress_bar("trajectories") as progress:
        report = export_directory(url, target, verify=verify, progress=progress, storage_options=options)
    show({"source": url, "target": target, **asdict(report)}, _show_report, as_json)
    return FINE


RLINF_COMMANDS: dict[str, Callable[..., int]] = {
    "sample": sample,
    "merge": merge,
    "split": split,
    "import": import_,
    "export": export,
}


def _load_store(buffer: "TrajectoryReplayBuffer", url: str, options: dict[str, Any]) -> None:
    """Load the newest trajectories of a store that is reached by options of its own."""
    from trajstore.compat.rlinf.stored_trajectories import StoredTrajectories

    stored = StoredTrajectories.open(url, options)
    for number in stored.numbers[-buffer.sample_window_size :]:
        buffer.add_numbered(number, stored.load(number))


def _how(how: str, copy: bool) -> "How":
    if copy and how != "copy":
        raise UsageError(f"--copy and --how {how} contradict each other")
    return how  # type: ignore[return-value]


def _transferred(work: Callable[[Any], list["Target"]], save_path: str, dry_run: bool, as_json: bool) -> int:
    if not save_path:
        raise UsageError("--save-path: expected a path")
    with usage(FileNotFoundError, FileExistsError), progress_bar("files") as progress:
        targets = work(progress)
    made = [{"path": str(t.path), "trajectories": len(t.entries), "samples": t.n_samples} for t in targets]
    show({"dry_run": dry_run, "made": made}, _show_made, as_json)
    return FINE


def _described(leaf: Any) -> dict[str, Any]:
    return {"shape": list(leaf.shape), "dtype": str(leaf.dtype).removeprefix("torch.")}


def _show_batch(console: "Console", facts: Facts) -> None:
    from rich.table import Table

    console.print(f"{facts['num_trajectories']:,} trajectories of {facts['total_samples']:,} transitions")
    table = Table("key", "shape", "dtype")
    for path, leaf in facts["batch"].items():
        table.add_row(path, str(leaf["shape"]), leaf["dtype"])
    console.print(table)


def _show_made(console: "Console", facts: Facts) -> None:
    verb = "would be made" if facts["dry_run"] else "made and verified"
    for made in facts["made"]:
        console.print(f"{made['path']}: {made['trajectories']:,} trajectories, {made['samples']:,} samples, {verb}")


def _show_report(console: "Console", facts: Facts) -> None:
    console.print(f"{facts['n_trajectories']:,} trajectories: {facts['source']} -> {facts['target']}")
    if facts["n_skipped"]:
        console.print(f"{facts['n_skipped']:,} were there already.")
    if facts["missing"]:
        console.print(f"{len(facts['missing']):,} are listed and have no file.")
    if facts["n_verified"]:
        console.print(f"{facts['n_verified']:,} were read back: all are equal, bit by bit.")
