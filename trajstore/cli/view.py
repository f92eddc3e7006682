"""The command ``view``: show a store in the browser, or write the page to a file."""

import contextlib
import html
import os
import sys
import tempfile
import webbrowser
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import trajstore
from trajstore.cli.exit_codes import FINE, UsageError, damage_of_a_store, usage_errors
from trajstore.cli.output import printable, write_json_line
from trajstore.cli.parameters import (
    AsJson,
    At,
    DiskCacheOption,
    Option,
    StorageOptions,
    Url,
    find_secrets,
    parse_disk_cache,
    parse_storage_options,
)
from trajstore.cli.stores import check_url
from trajstore.credentials import secrets_of
from trajstore.errors import FormatError
from trajstore.storage import open_storage
from trajstore.store.store import check_root

if TYPE_CHECKING:
    from trajstore.viewer import Viewer

_IN_TERMINAL = frozenset({"www-browser", "links", "elinks", "lynx", "w3m", "links2"})  # they would take it over
MAX_PORT = 65535


def view(
    url: Url,
    at: At = None,
    port: Annotated[int, Option("--port", "The port on this machine; 0: any free one.")] = 0,
    browser: Annotated[
        bool, Option("--browser/--no-browser", "Whether to open the page in the browser, if this is a terminal.")
    ] = True,
    export: Annotated[
        str | None,
        Option("--export", "Write the page to this file, which needs no server, instead of serving it.", "FILE"),
    ] = None,
    episode: Annotated[
        list[int] | None,
        Option(
            "--episode", "With --export: an episode to include, by its row in the table. May be repeated.", "ROW"
        ),
    ] = None,
    yes: Annotated[bool, Option("--yes", "With --export: replace an existing file.")] = False,
    storage_option: StorageOptions = None,
    disk_cache: DiskCacheOption = None,
    as_json: AsJson = False,
) -> int:
    """Show a store as a page in the browser: overview, episodes with plots and frames, checkpoints.

    The page is served to this machine only, and only to who has the address that is printed. It follows a run that
    writes. Nothing is written to the store. Ctrl-C ends it.
    """
    if not 0 <= port <= MAX_PORT:
        raise UsageError(f"--port: expected 0 to {MAX_PORT}, got {port}")
    store = _open(url, at, storage_option, disk_cache)
    secrets = (*find_secrets(storage_option or ()), *secrets_of(url, parse_storage_options(storage_option)))
    if export is not None:
        return _export(store, export, episode, yes, secrets, as_json)
    if episode:
        raise UsageError("--episode: needs --export")
    from trajstore.viewer import Viewer  # its server may not be installed

    viewer = Viewer(store, port=port, secrets=secrets)
    with contextlib.ExitStack() as opened:
        opens = browser and sys.stdout.isatty() and not as_json
        viewer.run(lambda: announce(viewer, store.url, opened if opens else None, as_json=as_json))
    sys.stderr.write("\n")
    return FINE


def _open(url: str, at: str | None, storage_option: list[str] | None, disk_cache: str | None) -> "trajstore.Store":
    with usage_errors():
        options, disk = parse_storage_options(storage_option), parse_disk_cache(disk_cache)
        try:
            return trajstore.open(check_url(url), at=at, storage_options=options, disk_cache=disk)
        except FormatError:
            check_root(open_storage(url, options))  # raises if this is no store that this version reads
            with damage_of_a_store():
                raise


def _export(
    store: "trajstore.Store",
    path: str,
    episodes: list[int] | None,
    replaces: bool,
    secrets: tuple[str, ...],
    as_json: bool,
) -> int:
    from trajstore.viewer import export_page

    with usage_errors(OSError):
        note = export_page(store, path, episodes=episodes or None, exist_ok=replaces, secrets=secrets)
    if as_json:
        write_json_line({"url": store.url, "file": path, "note": note})
    else:
        sys.stdout.write(f"{printable(path)}: {printable(note)}\n")
    return FINE


def announce(viewer: "Viewer", url: str, opened: contextlib.ExitStack | None, *, as_json: bool = False) -> None:
    """Print the address; also open it in the browser, until ``opened`` is closed."""
    if as_json:
        write_json_line({"url": url, "address": viewer.url})
    else:
        sys.stdout.write(f"{printable(url)} at {viewer.url}\nCtrl-C ends it.\n")
        sys.stdout.flush()
    if opened is not None and (found := graphical_browser()) is not None:
        found.open(opened.enter_context(redirecting_file(viewer.url)))


@contextlib.contextmanager
def redirecting_file(url: str) -> Iterator[str]:
    """The address of a file that leads a browser to a URL, and that only this user can read.

    The arguments of a process are seen by all users of a machine, so a browser must not be started with the token.
    """
    descriptor, path = tempfile.mkstemp(prefix="trajstore-view-", suffix=".html")  # mode 600
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(f'<!doctype html><meta http-equiv="refresh" content="0;url={html.escape(url)}">')
        yield Path(path).as_uri()
    finally:
        Path(path).unlink(missing_ok=True)


def graphical_browser() -> webbrowser.BaseBrowser | None:
    """The user's browser; None if there is none, or it is one that runs in the terminal."""
    try:
        found = webbrowser.get()
    except webbrowser.Error:
        return None
    name = str(getattr(found, "name", "")).rpartition("/")[2]
    return None if name in _IN_TERMINAL else found
