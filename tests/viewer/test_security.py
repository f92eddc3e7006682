"""The viewer answers only to its token, under its own name, and shows nothing but the store."""

from __future__ import annotations

import contextlib
import logging
import re
import socket
import threading
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import pytest

import trajstore
from tests.support.viewed import Client, fill
from trajstore.errors import ClosedError, StorageError
from trajstore.viewer import Viewer, connections, overview
from trajstore.viewer.access import Access
from trajstore.viewer.page import exported_page

SCRIPTS = [path for path in files("trajstore.viewer").joinpath("assets").iterdir() if path.name.endswith(".js")]


@pytest.fixture(scope="module")
def viewer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Viewer]:
    with Viewer(fill(str(tmp_path_factory.mktemp("viewed") / "store"), 12), secrets=("top-secret",)) as viewer:
        yield viewer


@pytest.fixture
def client(viewer: Viewer) -> Client:
    return Client(viewer.url)


def test_a_question_without_the_token_is_refused(client: Client) -> None:
    for path in ("/", "/api/facts", "/api/nothing", f"/api/facts?token={client.token}"):
        answer = client.request(path)
        assert answer.status == 401, path
        assert b"episodes" not in answer.body
    for wrong in ("", "x", client.token[:-1], client.token + "x", "\xff\xfe"):
        assert client.request("/api/facts", headers={"X-Trajstore-Token": wrong}).status == 401


def test_the_page_answers_to_the_token_in_its_address(client: Client) -> None:
    answer = client.request(f"/?token={client.token}")
    assert answer.status == 200
    assert answer.headers["content-type"].startswith("text/html")
    assert client.token.encode() not in answer.body


def test_another_name_of_this_machine_is_refused(client: Client) -> None:
    token = {"X-Trajstore-Token": client.token}
    for host in ("evil.example", f"evil.example:{client.port}", "127.0.0.1", f"127.0.0.1:{client.port + 1}", ""):
        assert client.request("/api/facts", host=host, headers=token).status == 421, host
    assert client.request("/api/facts", host=f"localhost:{client.port}", headers=token).status == 200


def test_two_host_headers_are_refused() -> None:
    access = Access(80, "t")
    assert access.refusal("GET", ["127.0.0.1:80", "127.0.0.1:80"], [], "t") is not None
    assert access.refusal("GET", ["127.0.0.1:80"], [], "t") is None


def test_another_site_is_refused(client: Client) -> None:
    headers = {"X-Trajstore-Token": client.token, "Origin": "http://evil.example"}
    assert client.request("/api/facts", headers=headers).status == 403
    own = f"http://{client.host}:{client.port}"
    assert client.request("/api/facts", headers=headers | {"Origin": own}).status == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "HEAD", "PATCH"])
def test_only_get_is_answered(client: Client, method: str) -> None:
    assert client.request("/api/facts", method=method, headers={"X-Trajstore-Token": client.token}).status == 405


def test_every_answer_forbids_what_the_page_does_not_need(client: Client) -> None:
    for answer in (client.request(f"/?token={client.token}"), client.ask("facts"), client.request("/")):
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'sha256-")
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert answer.headers["cache-control"] == "no-store"
        assert "server" not in answer.headers


def test_the_page_names_no_other_place(client: Client) -> None:
    page = client.request(f"/?token={client.token}").body.decode()
    addresses = set(re.findall(r"https?://[^\s\"'`)]+", page))
    assert addresses == {"http://www.w3.org/2000/svg"}  # the name of a vocabulary, not an address
    assert not re.search(r"<(script|link|img)[^>]+(src|href)=\"(?!data:)", page)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_no_script_makes_markup_from_text(script: Path) -> None:
    text = script.read_text("utf-8")
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", text)


def test_nothing_outside_the_store_is_served(client: Client) -> None:
    token = {"X-Trajstore-Token": client.token}
    for path in ("/../pyproject.toml", "/%2e%2e/%2e%2e/etc/passwd", "/assets/app.js", "/api/../zarr.json", "//etc"):
        assert client.request(path, headers=token).status == 404, path
    for name in ("../../other", "steps/../../x", "/etc/passwd", "nothing"):
        found = client.json("episodes", n=1)["rows"][0]
        key = {"stream": found["stream"], "episode": found["episode"]}
        assert client.ask("series", path=name, **key).status == 400
        assert client.ask("column", path=name, **key).status == 400
        assert client.ask("frame", path=name, step=0, **key).status == 400
        assert client.ask("episode", stream=name, episode=0).status == 404


def test_work_for_one_question_is_bounded(client: Client) -> None:
    assert len(client.json("episodes", n=10**9)["rows"]) == 12
    found = client.json("episodes", n=1)["rows"][0]
    key = {"stream": found["stream"], "episode": found["episode"]}
    assert client.ask("series", path="reward", points=10**12, **key).status == 200
    for wrong in ("-1", "1.5", "9" * 30, "x", "\u0661"):
        assert client.ask("episodes", start=wrong).status == 400
    assert client.ask("episodes", filter="x" * 30_000).status == 414
    assert client.ask("episodes", filter="(" * 500).status == 400


def test_errors_show_no_credentials(viewer: Viewer, client: Client) -> None:
    answer = client.ask("episodes", sort="top-secret")
    assert answer.status == 400
    assert b"top-secret" not in answer.body
    assert client.token not in repr(viewer)


def test_a_client_that_sends_nothing_or_half_a_request_loses_its_connection(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "REQUEST_S", 0.3)
    whole = f"GET / HTTP/1.1\r\nHost: {client.host}:{client.port}\r\n\r\n".encode()
    for sent in (b"", b"GET / HTTP/1.1\r\nHost:", whole + whole[:10]):
        with socket.create_connection((client.host, client.port), timeout=20) as late:
            late.sendall(sent)
            with contextlib.suppress(ConnectionResetError):
                while late.recv(1 << 16):
                    pass


def test_an_error_inside_is_logged_without_secrets_and_control_characters(
    client: Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("\x1b]0;mine\x07 top-secret")

    monkeypatch.setattr(overview, "streams", fail)
    with caplog.at_level(logging.ERROR):
        answer = client.ask("streams")
    assert (answer.status, answer.json["kind"]) == (500, "internal")
    assert "RuntimeError" in caplog.text
    assert "top-secret" not in caplog.text
    assert not re.search("[\x1b\x07]", caplog.text)


def test_the_end_does_not_wait_for_a_slow_answer_and_logs_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked, ended = threading.Event(), threading.Event()

    def slow(*_: object) -> dict[str, int]:
        asked.set()
        ended.wait(60)
        return {}

    monkeypatch.setattr(overview, "streams", slow)
    monkeypatch.setattr(connections, "ENDING_S", 0.1)
    found: list[int] = []
    with caplog.at_level(logging.WARNING):
        with Viewer(trajstore.create("memory://viewed-slow")) as viewer:
            client = Client(viewer.url)
            asking = threading.Thread(target=lambda: found.append(client.ask("streams").status))
            asking.start()
            assert asked.wait(30)
        asking.join(30)
        ended.set()
    assert found == [503]
    servers = ("asyncio", "starlette", "trajstore.viewer", "uvicorn")  # buffers of other tests may log, too
    assert [record.getMessage() for record in caplog.records if record.name.startswith(servers)] == []


def test_it_listens_on_this_machine_only(viewer: Viewer, client: Client) -> None:
    address = socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)[0][4][0]
    if str(address).startswith("127."):
        pytest.skip("this machine has no other address")
    with pytest.raises(OSError, match="refused"), socket.create_connection((address, client.port), timeout=5):
        pass


def test_a_port_in_use_is_named(viewer: Viewer, client: Client) -> None:
    store = trajstore.create("memory://port-in-use")
    with pytest.raises(StorageError, match=f"port {client.port} of 127.0.0.1"):
        Viewer(store, port=client.port)


def test_a_viewer_serves_once() -> None:
    viewer = Viewer(trajstore.create("memory://viewed-once"))
    with viewer, pytest.raises(ClosedError, match="make a new one"):
        viewer.start()
    viewer.close()


def test_embedded_data_cannot_end_its_element() -> None:
    page = exported_page({"x": "</script><script>alert(1)</script><!--\u2028"}).decode()
    data = page.partition('id="data">')[2].partition("</script>")[0]
    assert "alert" in data
    assert "<" not in data
    assert "\u2028" not in data
