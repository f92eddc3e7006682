"""The commands ``import`` and ``export``, which have one subcommand per dataset format."""

import contextlib
import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from trajstore.cli.exit_codes import FINE, explain_interrupt, run_command
from trajstore.cli.output import Facts, format_count, print_facts, progress_bar
from trajstore.cli.parameters import find_secrets, parse_disk_cache, parse_storage_options
from trajstore.datasets.conversion import ConversionReport, export_episodes, import_episodes
from trajstore.datasets.formats import FORMATS, Format
from trajstore.errors import DataError, FormatError, SchemaError, TrajstoreError
from trajstore.store.store import open as open_store

if TYPE_CHECKING:
    import typer
    from rich.console import Console

T = TypeVar("T")
_OPTION_HELP = "Option of the format, with the name of the Python parameter."
_STORAGE_OPTION_HELP = "Option of the store's storage backend. Never printed."


def add_import_and_export(application: "typer.Typer") -> None:
    """Add the commands ``import FORMAT SOURCE URL`` and ``export FORMAT URL TARGET``."""
    import typer

    groups = {
        "import": ("from", "Write a dataset of another library to a store.", _make_import_command),
        "export": ("to", "Write a store as a dataset of another library.", _make_export_command),
    }
    for verb, (preposition, help_text, make_command) in groups.items():
        group = typer.Typer(help=f"{help_text} Continues where an earlier run stopped.", no_args_is_help=True)
        for name, dataset_format in FORMATS.items():
            command = make_command(dataset_format)
            group.command(name, help=f"{verb.capitalize()} {preposition} {dataset_format.help}.")(command)
        application.add_typer(group, name=verb, rich_help_panel="Datasets of other libraries")


def _make_import_command(dataset_format: Format) -> Callable[..., None]:
    import typer

    def command(
        source: Annotated[str, typer.Argument(help="The dataset.", metavar="SOURCE")],
        url: Annotated[str, typer.Argument(help="The store. Created if it does not exist.", metavar="URL")],
        skip: Annotated[
            list[str],
            _repeated("--skip", "Leave out this array, group or attribute, by its name in the dataset.", "NAME"),
        ],
        option: Annotated[list[str], _repeated("--option", _OPTION_HELP, "NAME=VALUE")],
        storage_option: Annotated[list[str], _repeated("--storage-option", _STORAGE_OPTION_HELP, "KEY=VALUE")],
        verify: Annotated[bool, typer.Option(help="Read every episode back and compare it.")] = True,
        as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    ) -> None:
        def work(storage_option: Sequence[str]) -> int:
            options = _parse_options(option) | ({"skip": skip} if skip else {})
            options = _check_options(dataset_format, "open_reader", options)
            with (
                explain_interrupt(),
                contextlib.closing(_open_dataset(dataset_format.open_reader, source, options)) as reader,
                progress_bar("episodes") as progress,
            ):
                report = import_episodes(
                    reader,
                    url,
                    verify=verify,
                    progress=progress,
                    storage_options=parse_storage_options(storage_option),
                )
            print_facts(asdict(report), _print_report, as_json)
            return FINE

        raise typer.Exit(_run(work, storage_option))

    return command


def _make_export_command(dataset_format: Format) -> Callable[..., None]:
    import typer

    def command(
        url: Annotated[str, typer.Argument(help="The store.", metavar="URL")],
        target: Annotated[str, typer.Argument(help="Path of the dataset. Must not exist.", metavar="TARGET")],
        option: Annotated[list[str], _repeated("--option", _OPTION_HELP, "NAME=VALUE")],
        storage_option: Annotated[list[str], _repeated("--storage-option", _STORAGE_OPTION_HELP, "KEY=VALUE")],
        fields: Annotated[
            str, typer.Option("--fields", help="Fields or groups to write, such as a,b/c; by default all.")
        ] = "",
        at: Annotated[
            str, typer.Option("--at", help="Export the store at this checkpoint: its name or id, or 'latest'.")
        ] = "",
        disk_cache: Annotated[
            str,
            typer.Option(
                "--disk-cache",
                help="Keep what is read of a remote store in this local directory, within so many bytes.",
                metavar="DIRECTORY,BYTES",
            ),
        ] = "",
        verify: Annotated[bool, typer.Option(help="Read every episode back and compare it.")] = True,
        as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    ) -> None:
        def work(storage_option: Sequence[str]) -> int:
            options = _check_options(dataset_format, "open_writer", _parse_options(option))
            store = open_store(
                url,
                at=at or None,
                storage_options=parse_storage_options(storage_option),
                disk_cache=parse_disk_cache(disk_cache),
            )
            with (
                explain_interrupt(lambda: _explain_interrupted_export(target)),
                progress_bar("episodes") as progress,
            ):
                report = export_episodes(
                    store,
                    _open_dataset(dataset_format.open_writer, target, options),
                    fields=fields.split(",") if fields else None,
                    reread=(lambda: dataset_format.open_reader(target)) if verify else None,
                    progress=progress,
                )
            print_facts(asdict(report), _print_report, as_json)
            return FINE

        raise typer.Exit(_run(work, storage_option))

    return command


def _run(work: Callable[..., int], storage_option: Sequence[str]) -> int:
    return run_command(
        _with_command_line_hints(work), {"storage_option": storage_option}, find_secrets(storage_option)
    )


def _with_command_line_hints(work: Callable[..., int]) -> Callable[..., int]:
    """Rewrite hints in errors from Python parameters to command-line options."""

    def run(**arguments: Any) -> int:
        try:
            return work(**arguments)
        except (DataError, FormatError, SchemaError) as error:
            message = re.sub(r"\bskip=\['([^']+)'\]", r"--skip \1", str(error))
            message = re.sub(r"\b([a-z_]+)=True\b", r"--option \1=true", message)
            raise type(error)(message) from error

    return run


def _explain_interrupted_export(target: str) -> str:
    if Path(f"{target}.journal").exists():
        return f"the same command continues where this one stopped ({target}.partial, {target}.journal)"
    if Path(target).exists():
        return f"{target} is complete, but was not fully verified; to export and verify it again, remove it"
    return "nothing was written"


def _repeated(name: str, help_text: str, metavar: str) -> Any:
    import typer

    return typer.Option(
        name, help=f"{help_text} May be repeated.", metavar=metavar, default_factory=list, show_default=False
    )


def _parse_options(pairs: Sequence[str]) -> dict[str, Any]:
    """Parse ``NAME=VALUE`` texts. A value is JSON, or else text."""
    options: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not name or not equals:
            raise DataError(f"--option: expected NAME=VALUE, got {pair!r}")
        try:
            options[name] = json.loads(text)
        except ValueError:
            options[name] = text
    return options


def _check_options(dataset_format: Format, opener: str, options: dict[str, Any]) -> dict[str, Any]:
    """Refuse options that the format does not have. For an option that takes names, turn one name into a list."""
    parameters = inspect.signature(getattr(import_module(dataset_format.module), opener)).parameters
    known = list(parameters)[1:]
    if unknown := [name for name in options if name not in known]:
        raise DataError(f"option {unknown[0]!r}: expected one of {', '.join(known) or 'none'}")
    takes_names = [name for name in options if "Collection[str]" in str(parameters[name].annotation)]
    return options | {name: _as_names(name, options[name]) for name in takes_names}


def _as_names(option: str, value: Any) -> list[str]:
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise DataError(f"option {option!r}: expected a name, or a list of names as JSON, got {value!r:.80}")
    return names


def _open_dataset(opener: Callable[..., T], path: str, options: Mapping[str, Any]) -> T:
    """Open a dataset. Errors about option values become a DataError, which prints as one line."""
    try:
        return opener(path, **options)
    except TrajstoreError:
        raise
    except (TypeError, ValueError) as error:
        given = ", ".join(f"{name}={value!r:.40}" for name, value in options.items())
        raise DataError(f"option: {error}; got {given or 'none'}") from error


def _print_report(console: "Console", facts: Facts) -> None:
    report = ConversionReport(**facts)
    written = f"{format_count(report.n_episodes, 'episode')} of {format_count(report.n_steps, 'step')}"
    console.print(f"{written}: {report.source} -> {report.target}")
    if report.n_left_out:
        console.print(f"Left out by an option: {format_count(report.n_left_out, 'step')}.")
    if report.n_skipped:
        console.print(f"Written by an earlier run: {format_count(report.n_skipped, 'episode')}.")
    if report.n_verified:
        console.print(f"Verified: {format_count(report.n_verified, 'episode')}, equal bit by bit.")
