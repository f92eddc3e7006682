"""What commands are made of: plain functions whose parameters say what the command line shows of them."""

import contextlib
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from trajstore.errors import TrajstoreError

if TYPE_CHECKING:
    from rich.console import Console

FINE, PROBLEMS, FAILED = 0, 1, 2
INTERRUPTED = 130  # as shells have it
Facts = dict[str, Any]
Progress = Callable[[int, int], None]  # done, in all
_PIPE_WIDTH = 240  # columns, where the output is no terminal and lines may be as long as they need


@dataclass(frozen=True)
class Argument:
    help: str
    metavar: str = "URL"


@dataclass(frozen=True)
class Option:
    name: str
    help: str
    metavar: str | None = None


Url = Annotated[str, Argument("Where the store is: a directory, or s3://bucket/..., gs://..., az://...")]
Pairs = Annotated[
    list[str] | None,
    Option(
        "--storage-option",
        "Option of the storage backend, such as client_kwargs.endpoint_url=... or anon=true; may be repeated. "
        "Never shown back. Lists of processes show it, so credentials are better left to the environment.",
        "KEY=VALUE",
    ),
]
AsJson = Annotated[bool, Option("--json", "Print one JSON document instead of tables.")]


class UsageError(Exception):
    """What was asked for can't be."""


@contextlib.contextmanager
def usage(*more: type[Exception]) -> Iterator[None]:
    """Take errors about arguments for what they are; those of trajstore say so themselves."""
    try:
        yield
    except TrajstoreError:
        raise
    except Exception as error:
        if not isinstance(error, (ValueError, TypeError, KeyError, *more)):
            raise
        is_plain = error.args and not isinstance(error, OSError)
        raise UsageError(str(error.args[0]) if is_plain else str(error) or type(error).__name__) from error


def storage_options(pairs: Sequence[str] | None) -> dict[str, Any]:
    """Options from ``KEY=VALUE``: dots in the key nest, and JSON objects, lists and words are taken as such."""
    options: dict[str, Any] = {}
    for pair in pairs or ():
        key, equals, text = pair.partition("=")
        if not equals or not all(key.split(".")):
            raise UsageError("--storage-option: expected KEY=VALUE")  # what came may be a secret
        *groups, name = key.split(".")
        inner = options
        for group in groups:
            inner = inner.setdefault(group, {})
            if not isinstance(inner, dict):
                raise UsageError(f"--storage-option: {group!r} is given both as a value and as a group")
        inner[name] = _option_value(text)
    return options


def _option_value(text: str) -> Any:
    if text in ("true", "false", "null") or text[:1] in ("{", "["):
        try:
            return json.loads(text)
        except ValueError:
            raise UsageError("--storage-option: expected JSON after a bracket or brace") from None
    return text  # also what looks like a number: a key may


@contextlib.contextmanager
def resumable(
    left: Callable[[], str] = lambda: "the same command goes on where this one stopped",
) -> Iterator[None]:
    """Say with an interrupt what became of the work, and how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(left()) from None


def counted(n: int, noun: str) -> str:
    """A number of things."""
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


def show(facts: Facts, how: Callable[["Console", Facts], None], as_json: bool) -> None:
    """Print facts: as JSON, or as a function does it."""
    if as_json:
        sys.stdout.write(json.dumps(_finite(facts), indent=2, allow_nan=False) + "\n")
        return
    from rich.console import Console

    width = None if sys.stdout.isatty() else _PIPE_WIDTH
    how(Console(width=width, highlight=False, markup=False, emoji=False), facts)


def _finite(value: Any) -> Any:
    """The same with null in place of numbers that JSON does not have."""
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextlib.contextmanager
def progress_bar(what: str) -> Iterator[Progress | None]:
    """Something to tell of progress, shown on stderr while there is somebody to see it."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (what, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
