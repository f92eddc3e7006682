"""The commands ``rlinf``: sample, merge, split, import and export directories of RLinf trajectories."""

from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

from trajstore.cli.exit_codes import FINE, UsageError, explain_interrupt, usage_errors
from trajstore.cli.output import Facts, print_facts, progress_bar
from trajstore.cli.parameters import Argument, AsJson, Option, StorageOptions, Url, parse_storage_options

if TYPE_CHECKING:
    from rich.console import Console

    from trajstore.compat.rlinf.buffer import TrajectoryReplayBuffer
    from trajstore.compat.rlinf.merge_split import How, Target

SourcePath = Annotated[
    str, Option("--source-path", "The directory, or the directory that holds those of all ranks.", "PATH")
]
SavePath = Annotated[str, Option("--save-path", "The directory to create. Must not exist.", "PATH")]
TransferMethod = Annotated[
    str, Option("--how", "copy the files, link them, or move them, which removes them from the source.", "HOW")
]
Copy = Annotated[bool, Option("--copy", "The same as --how copy.")]
DryRun = Annotated[bool, Option("--dry-run", "Show what would be created, and create nothing.")]
Verify = Annotated[bool, Option("--verify/--no-verify", "Read every trajectory back and compare it.")]
Trusted = Annotated[
    bool, Option("--trusted", "Also load pickles. A pickle can run any code, so use this for your own files only.")
]


def sample(
    load_path: Annotated[str, Option("--load-path", "The directory, or a store of trajectories.", "PATH")],
    num_chunks: Annotated[int, Option("--num-chunks", "Number of transitions to draw.")] = 4,
    sample_window_size: Annotated[
        int, Option("--sample-window-size", "Draw from this many of the newest trajectories; 0 draws from all.")
    ] = 10,
    cache_size: Annotated[int, Option("--cache-size", "Accepted for compatibility; has no effect.")] = 5,
    enable_cache: Annotated[bool, Option("--enable-cache", "Accepted for compatibility; has no effect.")] = False,
    trusted: Trusted = False,
    storage_option: StorageOptions = None,
    as_json: AsJson = False,
) -> int:
    """Load trajectories, sample once, and show keys, shapes and dtypes of the batch."""
    from trajstore.compat.rlinf.buffer import TrajectoryReplayBuffer
    from trajstore.compat.rlinf.field_paths import to_paths

    with usage_errors(FileNotFoundError):
        buffer = TrajectoryReplayBuffer(sample_window_size=sample_window_size)
        try:
            if options := parse_storage_options(storage_option):
                _load_store(buffer, load_path, options)
            else:
                buffer.load_checkpoint(load_path, trusted=trusted)
            batch = to_paths(buffer.sample(num_chunks))
            facts = {**buffer.get_stats(), "batch": {path: _describe_tensor(leaf) for path, leaf in batch.items()}}
        finally:
            buffer.close()
    print_facts(facts, _print_batch, as_json)
    return FINE


def merge(
    source_path: SourcePath = ".",
    save_path: SavePath = "",
    how: TransferMethod = "copy",
    copy: Copy = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> int:
    """Merge the directories of all ranks into one, interleaved by trajectory id."""
    from trajstore.compat.rlinf import merge_split

    def work(progress: Any) -> list["Target"]:
        return merge_split.merge(
            source_path, save_path, how=_check_method(how, copy), dry_run=dry_run, progress=progress
        )

    return _run_transfer(work, save_path, dry_run, as_json)


def split(
    source_path: SourcePath = ".",
    save_path: SavePath = "",
    split_count: Annotated[
        int | None, Option("--split-count", "Take only this many trajectories, the first ones.")
    ] = None,
    parts: Annotated[
        int | None, Option("--parts", "Create this many parts of equal size: rank_0, rank_1, ...")
    ] = None,
    fractions: Annotated[
        str | None, Option("--fractions", "Create parts of these fractions: 0.8,0.2 creates part_0 and part_1.")
    ] = None,
    how: TransferMethod = "copy",
    copy: Copy = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> int:
    """Split a directory into smaller ones: the first N trajectories, equal parts, or fractions."""
    from trajstore.compat.rlinf import merge_split

    def work(progress: Any) -> list["Target"]:
        sizes = [float(part) for part in fractions.split(",")] if fractions else None
        selection: dict[str, Any] = {"count": split_count, "parts": parts, "fractions": sizes}
        return merge_split.split(
            source_path, save_path, how=_check_method(how, copy), dry_run=dry_run, progress=progress, **selection
        )

    return _run_transfer(work, save_path, dry_run, as_json)


def import_(
    source: Annotated[str, Argument("The directory.", "SOURCE")],
    url: Url,
    trusted: Trusted = False,
    verify: Verify = True,
    storage_option: StorageOptions = None,
    as_json: AsJson = False,
) -> int:
    """Write a directory to a store. Continues where an earlier run stopped."""
    from trajstore.compat.rlinf.directory_transfer import import_directory

    options = parse_storage_options(storage_option)
    with explain_interrupt(), usage_errors(FileNotFoundError), progress_bar("trajectories") as progress:
        report = import_directory(
            source, url, trusted=trusted, verify=verify, progress=progress, storage_options=options
        )
    print_facts({"source": source, "target": url, **asdict(report)}, _print_report, as_json)
    return FINE


def export(
    url: Url,
    target: Annotated[str, Argument("The directory.", "TARGET")],
    verify: Verify = True,
    storage_option: StorageOptions = None,
    as_json: AsJson = False,
) -> int:
    """Write a store of trajectories as a directory that RLinf loads. Continues where an earlier run stopped."""
    from trajstore.compat.rlinf.directory_transfer import export_directory

    options = parse_storage_options(storage_option)
    with explain_interrupt(), usage_errors(), progress_bar("trajectories") as progress:
        report = export_directory(url, target, verify=verify, progress=progress, storage_options=options)
    print_facts({"source": url, "target": target, **asdict(report)}, _print_report, as_json)
    return FINE


RLINF_COMMANDS: dict[str, Callable[..., int]] = {
    "sample": sample,
    "merge": merge,
    "split": split,
    "import": import_,
    "export": export,
}


def _load_store(buffer: "TrajectoryReplayBuffer", url: str, options: dict[str, Any]) -> None:
    """Load the newest trajectories of a store that needs storage options."""
    from trajstore.compat.rlinf.stored_trajectories import StoredTrajectories

    stored = StoredTrajectories.open(url, options)
    for number in stored.numbers[-buffer.sample_window_size :]:
        buffer.add_numbered(number, stored.load(number))


def _check_method(how: str, copy: bool) -> "How":
    if copy and how != "copy":
        raise UsageError(f"--copy and --how {how} contradict each other")
    return how  # type: ignore[return-value]


def _run_transfer(work: Callable[[Any], list["Target"]], save_path: str, dry_run: bool, as_json: bool) -> int:
    if not save_path:
        raise UsageError("--save-path: expected a path, got none")
    with usage_errors(FileNotFoundError, FileExistsError), progress_bar("files") as progress:
        targets = work(progress)
    made = [{"path": str(t.path), "trajectories": len(t.entries), "samples": t.n_samples} for t in targets]
    print_facts({"dry_run": dry_run, "made": made}, _print_made, as_json)
    return FINE


def _describe_tensor(leaf: Any) -> dict[str, Any]:
    return {"shape": list(leaf.shape), "dtype": str(leaf.dtype).removeprefix("torch.")}


def _print_batch(console: "Console", facts: Facts) -> None:
    from rich.table import Table

    console.print(f"{facts['num_trajectories']:,} trajectories of {facts['total_samples']:,} transitions")
    table = Table("key", "shape", "dtype")
    for path, leaf in facts["batch"].items():
        table.add_row(path, str(leaf["shape"]), leaf["dtype"])
    console.print(table)


def _print_made(console: "Console", facts: Facts) -> None:
    verb = "would be created" if facts["dry_run"] else "created and verified"
    for made in facts["made"]:
        console.print(f"{made['path']}: {made['trajectories']:,} trajectories, {made['samples']:,} samples, {verb}")


def _print_report(console: "Console", facts: Facts) -> None:
    console.print(f"{facts['n_trajectories']:,} trajectories: {facts['source']} -> {facts['target']}")
    if facts["n_skipped"]:
        console.print(f"{facts['n_skipped']:,} were written by an earlier run.")
    if facts["missing"]:
        console.print(f"{len(facts['missing']):,} are listed, but have no file.")
    if facts["n_verified"]:
        console.print(f"{facts['n_verified']:,} were verified: equal bit by bit.")
