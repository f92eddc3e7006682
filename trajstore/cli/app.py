"""The command-line program: all commands, run by typer.

Commands are plain functions that return an exit code (see `exit_codes`). typer and rich are imported when the
program runs. If they are missing, it says what to install.
"""

import importlib.util
import inspect
import operator
import re
import sys
from collections.abc import Callable
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Union, get_args, get_type_hints

import trajstore
from trajstore.cli.bench import bench
from trajstore.cli.checkpoints import checkpoints, redistribute, request_checkpoint
from trajstore.cli.diff import diff
from trajstore.cli.doctor import doctor
from trajstore.cli.exit_codes import FAILED, FINE, print_error, run_command
from trajstore.cli.import_export import add_import_and_export
from trajstore.cli.info import info
from trajstore.cli.listing import list_episodes
from trajstore.cli.new_stores import copy_store, merge_stores
from trajstore.cli.pack import pack_store
from trajstore.cli.parameters import Argument, Option, find_secrets
from trajstore.cli.repair import repair_store
from trajstore.cli.rlinf import RLINF_COMMANDS
from trajstore.cli.sample import sample
from trajstore.cli.show import show
from trajstore.cli.split import split_store
from trajstore.cli.tail import tail
from trajstore.cli.trim import evict_steps, prune_store
from trajstore.cli.verify import verify_store
from trajstore.cli.view import view
from trajstore.cli.warm_up import warm_up

if TYPE_CHECKING:
    import typer

# By the headings under which --help lists them.
PANELS: dict[str, dict[str, Callable[..., int]]] = {
    "Look at a store": {
        "info": info,
        "ls": list_episodes,
        "show": show,
        "view": view,
        "sample": sample,
        "tail": tail,
        "checkpoints": checkpoints,
        "redistribute": redistribute,
    },
    "Check": {"verify": verify_store, "doctor": doctor, "diff": diff, "bench": bench},
    "Make new stores": {"copy": copy_store, "repair": repair_store, "merge": merge_stores, "split": split_store},
    "Change a store": {
        "pack": pack_store,
        "evict": evict_steps,
        "prune": prune_store,
        "request-checkpoint": request_checkpoint,
    },
    "This machine": {"warm-up": warm_up},
}
COMMANDS: dict[str, Callable[..., int]] = {name: c for panel in PANELS.values() for name, c in panel.items()}
_NEGATIVE = re.compile(r"-\d+")


def main() -> None:
    """Run the command that the arguments name, and exit the process with its exit code."""
    missing = [name for name in ("typer", "rich") if importlib.util.find_spec(name) is None]
    if missing:
        print_error(f"the command line needs {' and '.join(missing)}: pip install {' '.join(missing)}")
        raise SystemExit(FAILED)
    app()()


def app() -> "typer.Typer":
    """Create the typer application with all commands."""
    import typer

    # Pretty tracebacks show local variables, which may hold credentials.
    application = typer.Typer(
        name="trajstore",
        help="Inspect, sample, verify, import and export stores of trajectories.",
        no_args_is_help=True,
        add_completion=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    application.callback()(_make_callback())
    for panel, commands in PANELS.items():
        for name, command in commands.items():
            kind = _rows_from_the_end() if command is show else None
            application.command(name, cls=kind, rich_help_panel=panel)(_adapt(command, name))
    rlinf = typer.Typer(help="Work with directories of RLinf trajectories.", no_args_is_help=True)
    for name, command in RLINF_COMMANDS.items():
        rlinf.command(name)(_adapt(command, name))
    application.add_typer(rlinf, name="rlinf", rich_help_panel="Datasets of other libraries")
    add_import_and_export(application)
    return application


def _make_callback() -> Callable[..., None]:
    """Create the function that handles options before the command."""
    import typer

    def show_version(is_asked: bool) -> None:
        if is_asked:
            sys.stdout.write(f"trajstore {trajstore.__version__}\n")
            raise typer.Exit(FINE)

    option = typer.Option("--version", help="Show the version and exit.", is_eager=True, callback=show_version)

    def callback(version: Annotated[bool, option] = False) -> None:
        del version  # show_version has handled it

    return callback


def _rows_from_the_end() -> Any:
    """A kind of command that takes -1 as an argument, as it has no such option."""
    from typer.core import TyperCommand

    class Command(TyperCommand):
        def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
            numbers = [] if "--" in args else [arg for arg in args if _NEGATIVE.fullmatch(arg)]
            others = [arg for arg in args if arg not in numbers]
            return super().parse_args(ctx, [*others, "--", *numbers] if numbers else args)

    return Command


def _adapt(command: Callable[..., int], name: str) -> Callable[..., None]:
    """Turn a command into a function for typer, which raises its exit code."""
    import typer

    def run(**arguments: Any) -> None:
        options = (arguments.get(name) or () for name in ("storage_option", "target_option"))
        secrets = find_secrets([pair for pairs in options for pair in pairs])
        raise typer.Exit(run_command(command, arguments, secrets))

    hints = get_type_hints(command, include_extras=True)
    parameters = [
        p.replace(
            annotation=Annotated[_typer_type(hints[p.name].__origin__), _typer_info(hints[p.name].__metadata__[0])]
        )
        for p in inspect.signature(command).parameters.values()
    ]
    run.__name__, run.__doc__ = name, _in_paragraphs(command.__doc__ or "")
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run


def _in_paragraphs(text: str) -> str:
    """The text with one line a paragraph, which the terminal breaks where it ends."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in inspect.cleandoc(text).split("\n\n"))


def _typer_type(hint: Any) -> Any:
    """Return a type that all versions of typer accept: old ones know ``Union[X, None]`` but not ``X | None``."""
    return operator.getitem(Union, get_args(hint)) if isinstance(hint, UnionType) else hint


def _typer_info(description: Argument | Option) -> Any:
    import typer

    if isinstance(description, Argument):
        return typer.Argument(help=description.help, metavar=description.metavar, show_default=False)
    return typer.Option(description.name, help=description.help, metavar=description.metavar)


if __name__ == "__main__":
    main()
