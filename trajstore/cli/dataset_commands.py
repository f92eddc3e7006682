"""The commands ``import`` and ``export``, each with a command for every format."""

import contextlib
import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from trajstore.cli.command import FINE, Facts, counted, progress_bar, resumable, show, storage_options
from trajstore.datasets.conversion import Report, export_episodes, import_episodes
from trajstore.datasets.formats import FORMATS, Format
from trajstore.errors import DataError, FormatError, SchemaError, TrajstoreError
from trajstore.store.store import open as open_store

if TYPE_CHECKING:
    import typer
    from rich.console import Console

T = TypeVar("T")
_OPTION = "An option of the format, as Python's function has it."
_STORAGE_OPTION = "An option of the store's storage backend. Never shown back."


@dataclass(frozen=True)
class Shell:
    """What the command line has for all commands.

    Attributes:
        run: Calls a command with arguments; its exit code, or one for what it raised.
    """

    run: Callable[[Callable[..., int], Mapping[str, Any]], int]


def add_commands(app: "typer.Typer", shell: Shell) -> None:
    """Add ``import FORMAT SOURCE URL`` and ``export FORMAT URL TARGET``."""
    import typer

    groups = {
        "import": ("from", "Write a dataset of another library to a store.", _importer),
        "export": ("to", "Write a store as a dataset of another library.", _exporter),
    }
    for verb, (way, about, make) in groups.items():
        group = typer.Typer(help=f"{about} Goes on where an earlier run stopped.", no_args_is_help=True)
        for name, kind in FORMATS.items():
            group.command(name, help=f"{verb.capitalize()} {way} {kind.help}.")(make(kind, shell))
        app.add_typer(group, name=verb)


def _importer(kind: Format, shell: Shell) -> Callable[..., None]:
    import typer

    def command(
        source: Annotated[str, typer.Argument(help="The dataset.", metavar="SOURCE")],
        url: Annotated[str, typer.Argument(help="The store; made where there is none.", metavar="URL")],
        skip: Annotated[
            list[str],
            _repeated("--skip", "Leave out this array, group or attribute, as the dataset calls it.", "NAME"),
        ],
        option: Annotated[list[str], _repeated("--option", _OPTION, "NAME=VALUE")],
        storage_option: Annotated[list[str], _repeated("--storage-option", _STORAGE_OPTION, "KEY=VALUE")],
        verify: Annotated[bool, typer.Option(help="Read every episode back and compare.")] = True,
        as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    ) -> None:
        def work(storage_option: Sequence[str]) -> int:
            options = _checked(kind, "open_source", _options(option) | ({"skip": skip} if skip else {}))
            with (
                resumable(),
                contextlib.closing(_opened(kind.open_source, source, options)) as dataset,
                progress_bar("episodes") as progress,
            ):
                report = import_episodes(
                    dataset,
                    url,
                    verify=verify,
                    progress=progress,
                    storage_options=storage_options(storage_option),
                )
            show(asdict(report), _show, as_json)
            return FINE

        raise typer.Exit(shell.run(_as_options(work), {"storage_option": storage_option}))

    return command


def _exporter(kind: Format, shell: Shell) -> Callable[..., None]:
    import typer

    def command(
        url: Annotated[str, typer.Argument(help="The store.", metavar="URL")],
        target: Annotated[str, typer.Argument(help="The dataset; nothing may be there.", metavar="TARGET")],
        option: Annotated[list[str], _repeated("--option", _OPTION, "NAME=VALUE")],
        storage_option: Annotated[list[str], _repeated("--storage-option", _STORAGE_OPTION, "KEY=VALUE")],
        fields: Annotated[str, typer.Option("--fields", help="Fields or groups: a,b/c; all by default.")] = "",
        at: Annotated[str, typer.Option("--at", help="As of this checkpoint: name, id or latest.")] = "",
        verify: Annotated[bool, typer.Option(help="Read every episode back and compare.")] = True,
        as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    ) -> None:
        def work(storage_option: Sequence[str]) -> int:
            options = _checked(kind, "open_sink", _options(option))
            store = open_store(url, at=at or None, storage_options=storage_options(storage_option))
            with resumable(lambda: _left_of(target)), progress_bar("episodes") as progress:
                report = export_episodes(
                    store,
                    _opened(kind.open_sink, target, options),
                    fields=fields.split(",") if fields else None,
                    reread=(lambda: kind.open_source(target)) if verify else None,
                    progress=progress,
                )
            show(asdict(report), _show, as_json)
            return FINE

        raise typer.Exit(shell.run(_as_options(work), {"storage_option": storage_option}))

    return command


def _as_options(work: Callable[..., int]) -> Callable[..., int]:
    """The same, with hints in its errors as somebody at the command line can follow them."""

    def run(**arguments: Any) -> int:
        try:
            return work(**arguments)
        except (DataError, FormatError, SchemaError) as error:
            message = re.sub(r"\bskip=\['([^']+)'\]", r"--skip \1", str(error))
            message = re.sub(r"\b([a-z_]+)=True\b", r"--option \1=true", message)
            raise type(error)(message) from error

    return run


def _left_of(target: str) -> str:
    """What an export that was interrupted has left, and what to do."""
    if Path(f"{target}.journal").exists():
        return f"the same command goes on where this one stopped ({target}.partial, {target}.journal)"
    if Path(target).exists():
        return f"{target} is written whole, but not all of it was read back; to do both again, remove it"
    return "nothing was written"


def _repeated(name: str, about: str, metavar: str) -> Any:
    import typer

    return typer.Option(
        name, help=f"{about} May be repeated.", metavar=metavar, default_factory=list, show_default=False
    )


def _options(pairs: Sequence[str]) -> dict[str, Any]:
    """Options from ``NAME=VALUE``; values are JSON, or else text."""
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


def _checked(kind: Format, opener: str, options: dict[str, Any]) -> dict[str, Any]:
    """Refuse options that a format does not have; one name stands for a list of it."""
    parameters = inspect.signature(getattr(import_module(kind.module), opener)).parameters
    known = list(parameters)[1:]
    if unknown := [name for name in options if name not in known]:
        raise DataError(f"option {unknown[0]!r}: expected one of {', '.join(known) or 'none'}")
    takes_names = [name for name in options if "Collection[str]" in str(parameters[name].annotation)]
    return options | {name: _names(name, options[name]) for name in takes_names}


def _names(option: str, value: Any) -> list[str]:
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise DataError(f"option {option!r}: expected a name, or a list of names as JSON, got {value!r:.80}")
    return names


def _opened(opener: Callable[..., T], path: str, options: Mapping[str, Any]) -> T:
    """What the format opens; a value that it can't make sense of is one line, as other wrong input is."""
    try:
        return opener(path, **options)
    except TrajstoreError:
        raise
    except (TypeError, ValueError) as error:
        given = ", ".join(f"{name}={value!r:.40}" for name, value in options.items())
        raise DataError(f"option: {error}; got {given or 'none'}") from error


def _show(console: "Console", facts: Facts) -> None:
    report = Report(**facts)
    written = f"{counted(report.n_episodes, 'episode')} of {counted(report.n_steps, 'step')}"
    console.print(f"{written}: {report.source} -> {report.target}")
    if report.n_left_out:
        console.print(f"{counted(report.n_left_out, 'step')} left out, as asked for.")
    if report.n_skipped:
        console.print(f"There already: {counted(report.n_skipped, 'episode')}.")
    if report.n_verified:
        console.print(f"Read back: {counted(report.n_verified, 'episode')}, equal bit by bit.")
