"""Exit codes of commands, and the errors and messages that lead to them."""

import contextlib
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from trajstore.cli.output import printable
from trajstore.errors import CorruptionError, FormatError, TrajstoreError, UnknownFormatError

FINE = 0
PROBLEMS = 1  # the store is damaged
FAILED = 2  # the command could not do its work
UNCONFIRMED = 3  # the command would remove something, and --yes was not given
INTERRUPTED = 130  # the code that shells use for Ctrl-C
_DAMAGE_HELP = "; 'trajstore verify' lists all damage, 'trajstore repair' makes a new store of what is intact"


class UsageError(Exception):
    """The arguments of a command are wrong."""


@contextlib.contextmanager
def usage_errors(*more: type[Exception]) -> Iterator[None]:
    """Turn ValueError, TypeError, KeyError and the given errors into a `UsageError`.

    Errors of trajstore pass unchanged: their messages are made for users.
    """
    try:
        yield
    except TrajstoreError:
        raise
    except Exception as error:
        if not isinstance(error, (ValueError, TypeError, KeyError, *more)):
            raise
        has_message = error.args and not isinstance(error, OSError)
        raise UsageError(str(error.args[0]) if has_message else str(error) or type(error).__name__) from error


@contextlib.contextmanager
def damage_of_a_store() -> Iterator[None]:
    """Treat malformed objects as damage: the location is known to hold a store that this version reads."""
    try:
        yield
    except UnknownFormatError:
        raise
    except FormatError as error:
        raise CorruptionError(str(error)) from error


@contextlib.contextmanager
def explain_interrupt(
    explanation: Callable[[], str] = lambda: "the same command continues where this one stopped",
) -> Iterator[None]:
    """Add to a Ctrl-C what was written and how to continue."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(explanation()) from None


def run_command(command: Callable[..., int], arguments: Mapping[str, Any], secrets: Iterable[str]) -> int:
    """Run a command and return its exit code.

    An error is printed on stderr, in one line if it is expected and as a traceback otherwise, without secrets.
    """
    try:
        return command(**arguments)
    except (TrajstoreError, UsageError) as error:
        is_damage = isinstance(error, CorruptionError)
        print_error(str(error) + _DAMAGE_HELP * is_damage, secrets)
        return PROBLEMS if is_damage else FAILED
    except BrokenPipeError:  # the reader of the output has seen enough, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FINE
    except KeyboardInterrupt as interrupt:
        print_error("; ".join(["interrupted", *map(str, interrupt.args)]), secrets)
        return INTERRUPTED
    except Exception:
        print_error(traceback.format_exc(), secrets, is_one_line=False)
        return FAILED


def print_error(message: str, secrets: Iterable[str] = (), *, is_one_line: bool = True) -> None:
    """Print a message on stderr, with every secret replaced by asterisks."""
    # Replace the longest first: a shorter secret may be a part of it.
    for secret in sorted(secrets, key=len, reverse=True):
        message = message.replace(secret, "***")
    if is_one_line:
        message = "trajstore: " + printable(" ".join(message.split()))
    sys.stderr.write(message.rstrip() + "\n")
