"""The command view: serves until Ctrl-C, writes files, and says what is wrong."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import trajstore
from tests.support.viewed import Client, fill
from trajstore.cli import app as cli
from trajstore.cli import view


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    return fill(str(tmp_path_factory.mktemp("view") / "store"), 6).url


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli.app(), ["view", *map(str, arguments)])


def test_it_serves_until_ctrl_c(url: str) -> None:
    command = [sys.executable, "-m", "trajstore", "view", url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith(f"{url} at http://127.0.0.1:")
        client = Client(line.split(" at ")[1].strip())
        assert client.json("facts")["n_episodes"] == 6
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
        assert (process.returncode, errors.strip()) == (0, "")


def test_it_writes_a_file(url: str, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    result = run(url, "--export", page, "--episode", 1, "--episode", 4)
    assert result.exit_code == 0, result.stderr
    assert "2 have series" in result.stdout
    again = run(url, "--export", page)
    assert (again.exit_code, "exists already" in again.stderr) == (2, True)
    last = run(url, "--export", page, "--yes", "--at", "first", "--json")
    assert (last.exit_code, [*json.loads(last.stdout)]) == (0, ["url", "file", "note"])


def test_wrong_arguments_are_explained(url: str, tmp_path: Path) -> None:
    for arguments, said in (
        (["--port", 99999], "--port: expected 0 to 65535"),
        (["--episode", 1], "--episode: needs --export"),
        (["--at", "nothing"], "no checkpoint 'nothing'"),
        (["--export", tmp_path / "no" / "page.html"], "No such file"),
        (["--export", tmp_path / "page.html", "--episode", 99], "no episode 99"),
    ):
        result = run(url, *arguments)
        assert result.exit_code == 2, arguments
        assert said in result.stderr
    assert run(tmp_path / "nothing").exit_code == 2
    assert "memory://" in run("memory://x").stderr


def test_a_damaged_store_is_said_to_be_damaged(tmp_path: Path) -> None:
    store = fill(str(tmp_path / "store"), 4)
    for record in store.streams:
        (tmp_path / "store" / "streams" / record.id / "zarr.json").write_text("{}")
    assert run(store.url).exit_code == 1


def test_secrets_are_not_in_the_file(url: str, tmp_path: Path) -> None:
    secret = "wJalrXUtnFEMI-secret"
    result = run(url, "--export", tmp_path / "page.html", "--storage-option", f"auto_mkdir={secret}")
    assert secret not in result.output
    if result.exit_code == 0:
        assert secret not in (tmp_path / "page.html").read_text("utf-8")


def test_a_browser_of_the_terminal_is_not_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    class Found:
        def __init__(self, name: str) -> None:
            self.name = name

    for name, is_opened in (("/usr/bin/w3m", False), ("lynx", False), ("firefox", True)):
        monkeypatch.setattr(view.webbrowser, "get", lambda name=name: Found(name))
        assert (view.graphical_browser() is not None) == is_opened

    def none() -> None:
        raise view.webbrowser.Error("no browser")

    monkeypatch.setattr(view.webbrowser, "get", none)
    assert view.graphical_browser() is None


def test_the_token_is_not_in_the_arguments_of_the_browser(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []

    class Found:
        name = "firefox"

        def open(self, address: str) -> None:
            opened.append(address)

    monkeypatch.setattr(view.webbrowser, "get", Found)
    with trajstore.viewer.Viewer(trajstore.open(url)) as viewer, contextlib.ExitStack() as stack:
        view.announce(viewer, url, stack)
        token = Client(viewer.url).token
        assert opened
        assert token not in opened[0]
        file = Path(opened[0].removeprefix("file://"))
        assert file.stat().st_mode & 0o777 == 0o600
        assert token in file.read_text("utf-8")
    assert not file.exists()


def test_without_its_server_the_extra_is_named() -> None:
    code = "import sys; sys.modules['uvicorn'] = None; import trajstore; trajstore.viewer.Viewer"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert "pip install 'trajstore[viewer]'" in process.stderr
    assert "MissingExtraError" in process.stderr
    assert trajstore.viewer.export_page
