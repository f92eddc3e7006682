"""Which transport makes the requests, what it is told, and what neither ever shows."""

from __future__ import annotations

import contextlib
import json
import logging
import subprocess
import sys
import traceback
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem

import trajstore
from tests.conftest import Place
from tests.support.proxy import Answer, Proxy, first
from tests.support.servers.process import Server
from trajstore import Field
from trajstore.cli.app import main
from trajstore.compat.rlinf.checkpoint_reference import CheckpointReference
from trajstore.credentials import redacted, secrets_of, shows_secrets
from trajstore.errors import DataError, StorageError
from trajstore.storage import FsspecStorage, ObstoreStorage, open_storage
from trajstore.storage.obstore_options import UnmappedError, obstore_client
from trajstore.storage.service import ServiceStorage

S3 = {"key": "k", "secret": "s", "endpoint_url": "http://127.0.0.1:1"}
ACCOUNT_KEY = "cGxhbnRlZC1zZWNyZXQtb2Ytbm9ib2R5"
AZURE = f"AccountName=devstoreaccount1;AccountKey={ACCOUNT_KEY};BlobEndpoint=http://127.0.0.1:1/devstoreaccount1;"


def service(url: str, options: dict[str, Any]) -> ServiceStorage:
    storage = open_storage(url, options).source
    assert isinstance(storage, ServiceStorage)
    return storage


ENDPOINT = "http://127.0.0.1:1"
SAID = [
    ("s3://b/x", S3, {"region": "us-east-1", "endpoint": ENDPOINT}),
    (
        "s3a://b/x",
        {"anon": True, "client_kwargs": {"region_name": "eu-west-1"}},
        {"region": "eu-west-1", "skip_signature": True},
    ),
    (
        "s3://b",
        {**S3, "requester_pays": True, "client_kwargs": {"region_name": "r"}},
        {"region": "r", "endpoint": ENDPOINT, "request_payer": True},
    ),
    ("gs://b/x", {"token": "anon", "project": "p"}, {"skip_signature": True}),
    ("gs://b/x", {"token": "anon", "endpoint_url": f"{ENDPOINT}/"}, {"skip_signature": True, "base_url": ENDPOINT}),
    ("gcs://b/x", {"token": "keys.json"}, {"application_credentials": "keys.json"}),
    ("az://c/x", {"account_name": "a", "account_key": "k"}, {"account_name": "a", "account_key": "k"}),
    ("abfs://c/x", {"account_name": "a", "sas_token": "t"}, {"account_name": "a", "sas_key": "t"}),
    (
        "az://c/x",
        {"account_name": "a", "account_key": "k", "anon": True},
        {"account_name": "a", "account_key": "k"},
    ),
    (
        "az://c/x",
        {"connection_string": "AccountName=a;AccountKey=k;EndpointSuffix=core.example"},
        {"account_name": "a", "account_key": "k", "endpoint": "https://a.blob.core.example"},
    ),
    (
        "abfss://c/x",
        {"connection_string": AZURE},
        {
            "account_name": "devstoreaccount1",
            "account_key": ACCOUNT_KEY,
            "endpoint": f"{ENDPOINT}/devstoreaccount1",
        },
    ),
]


@pytest.mark.parametrize(("url", "options", "config"), SAID)
def test_options_of_fsspec_are_said_in_obstores_words(
    url: str, options: dict[str, Any], config: dict[str, Any]
) -> None:
    client = obstore_client(url, options)
    assert client.config == config
    assert isinstance(service(url, {**options, "transport": "obstore"}), ObstoreStorage)
    is_default = not url.startswith("g")
    assert isinstance(service(url, options), ObstoreStorage) is is_default
    assert ("never tested with Google's" in service(url, options).transport_reason) is not is_default


@pytest.mark.parametrize(
    ("url", "options", "named"),
    [
        ("s3://b/x", {**S3, "session": "x"}, "session"),
        ("s3://b/x", {**S3, "client_kwargs": {"verify": False}}, "client_kwargs.verify"),
        ("s3://b/x", {**S3, "config_kwargs": {"proxies": {}}}, "config_kwargs.proxies"),
        ("s3://b/x", {"key": "k"}, "only one of key and secret"),
        ("s3://b/x%20y", S3, "path"),
        ("s3://b//x", S3, "path"),
        ("s3://b/x/../y", S3, "path"),
        ("s3://b/x", {**S3, "client_kwargs": {"use_ssl": False}}, "use_ssl"),
        ("s3://k:s@b/x", {}, "more than a bucket"),
        ("gs://b/x", {"token": "cloud"}, "token"),
        ("gs://b/x", {"session_kwargs": {}}, "session_kwargs"),
        ("az://c/x", {"account_name": "a"}, "no credentials"),
        ("az://c/x", {"account_name": "a", "account_key": "k", "location_mode": "secondary"}, "location_mode"),
    ],
)
def test_what_obstore_cannot_be_told_is_left_to_fsspec_and_said(
    url: str, options: dict[str, Any], named: str
) -> None:
    with pytest.raises(UnmappedError, match=named):
        obstore_client(url, options)
    storage = service(url, options)
    assert isinstance(storage, FsspecStorage)
    assert named in storage.transport_reason
    with pytest.raises(ValueError, match=f"transport 'obstore' can't be used.*{named}"):
        open_storage(url, {**options, "transport": "obstore"})


def test_a_region_that_nobody_names_is_left_to_s3fs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_DEFAULT_REGION", "AWS_REGION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nonexistent")
    assert "region" in service("s3://b/x", {"key": "k", "secret": "s"}).transport_reason


def test_the_transport_can_be_chosen_and_an_unknown_one_is_refused() -> None:
    assert service("s3://b/x", S3).transport == "obstore"
    assert open_storage("s3://b/x", S3).stats()["transport"] == "obstore"
    assert service("s3://b/x", {**S3, "transport": "fsspec"}).transport == "s3fs"
    with pytest.raises(ValueError, match="transport: expected one of auto, obstore, fsspec"):
        open_storage("s3://b/x", {**S3, "transport": "curl"})
    for name in ("retry_s", "request_s", "hedge_s"):
        with pytest.raises(ValueError, match=f"{name}: expected seconds"):
            open_storage("s3://b/x", {**S3, name: "soon"})


def test_an_anonymous_client_of_gcs_sends_no_token(server: Callable[[str], Server]) -> None:
    """obstore would ask the machine for one, also where the user wants none."""
    with contextlib.closing(Proxy(server("gcs").endpoint)) as proxy:
        options = {**server("gcs").options_at(proxy.endpoint), "transport": "obstore", "retry_s": 1}
        storage = open_storage(server("gcs").new_url(), options)
        storage.put("key", b"data")
        storage.copy("key", storage, "other")
        assert storage.get("other") == b"data"
        assert storage.list_names("") == ["key", "other"]
        storage.delete(["key"])
        assert {request.authorization.strip() for request in proxy.requests} <= {"", "Bearer"}
        assert len(proxy.requests) == 5


def test_a_filesystem_can_be_handed_in() -> None:
    filesystem = MemoryFileSystem()
    storage = open_storage("memory://handed-in", {"filesystem": filesystem}).source
    storage.put("key", b"data")
    assert filesystem.cat_file("/handed-in/key") == b"data"
    with pytest.raises(ValueError, match="drop key"):
        open_storage("memory://handed-in", {"filesystem": filesystem, "key": "x"})


# ---- secrets ---------------------------------------------------------------------------------------------

PLANTED = "planted+secret/of=nobody"
USER_TOKEN = {"type": "authorized_user", "refresh_token": PLANTED, "client_id": "x", "client_secret": PLANTED}
SERVICE_ACCOUNT = {
    "type": "service_account",
    "client_email": "me@x",
    "private_key_id": PLANTED,
    "private_key": f"-----BEGIN PRIVATE KEY-----\n{PLANTED}\n-----END PRIVATE KEY-----\n",
    "token_uri": f"{ENDPOINT}/token",
}
HEADERS = {"Authorization": f"Bearer {PLANTED}", "X-Api-Token": PLANTED, "Cookie": f"session={PLANTED}"}
BOTH = ("obstore", "fsspec")
PLACES = [
    ("s3://bucket/x", {"key": PLANTED, "secret": PLANTED, "token": PLANTED, "endpoint_url": ENDPOINT}, BOTH),
    ("s3://bucket/x", {"key": PLANTED, "secret": PLANTED, "client_kwargs": {"endpoint_url": ENDPOINT}}, BOTH),
    ("s3://me:planted@bucket/x", {"endpoint_url": ENDPOINT}, ("fsspec",)),
    ("gs://bucket/x", {"token": USER_TOKEN, "endpoint_url": ENDPOINT}, ("fsspec",)),
    ("gs://bucket/x", {"token": SERVICE_ACCOUNT, "endpoint_url": ENDPOINT}, BOTH),
    ("az://bucket/x", {"connection_string": AZURE}, BOTH),
    ("az://bucket/x", {"account_name": "a", "account_key": ACCOUNT_KEY, "account_host": "127.0.0.1:1"}, BOTH),
    (
        "az://bucket/x",
        {"account_name": "a", "sas_token": f"?sv=1&sig={PLANTED}", "account_host": "127.0.0.1:1"},
        BOTH,
    ),
    ("http://127.0.0.1:1/x", {"client_kwargs": {"headers": HEADERS}}, ("fsspec",)),
    ("http://127.0.0.1:1/x", {"client_kwargs": {"auth": ("me", PLANTED)}}, ("fsspec",)),
    ("http://me:planted@127.0.0.1:1/x?sig=planted", {}, ("fsspec",)),
    ("zip://::http://me:planted@127.0.0.1:1/x.zip", {}, ("fsspec",)),
    ("zip://::http://127.0.0.1:1/x.zip", {"http": {"client_kwargs": {"headers": HEADERS}}}, ("fsspec",)),
]


@pytest.mark.parametrize(
    ("url", "options", "transport"), [(url, options, by) for url, options, names in PLACES for by in names]
)
def test_an_unreachable_service_shows_no_secret_anywhere(
    url: str, options: dict[str, Any], transport: str, caplog: pytest.LogCaptureFixture
) -> None:
    from tests.storage.test_s3 import shown

    storage = open_storage(url, {**options, "transport": transport, "retry_s": 0.01, "request_s": 5}).source
    # What the client may quote, or keep in what it raises.
    with caplog.at_level(logging.DEBUG, "trajstore"), pytest.raises(StorageError) as caught:
        storage.put("key", b"data")
    errors: list[BaseException] = [caught.value]
    with caplog.at_level(logging.DEBUG, "trajstore"), pytest.raises(StorageError) as caught:
        storage.get("key")
    errors.append(caught.value)
    text = "".join(shown(error) + "".join(traceback.format_exception(error)) for error in errors)
    text += f"{storage!r} {storage.display} {storage.stats()} {vars(storage).get('_client')!r}"
    text += "\n".join(r.getMessage() for r in caplog.records if r.name.startswith("trajstore"))
    assert "planted" not in text
    assert ACCOUNT_KEY not in text


def test_a_secret_is_hidden_as_it_looks_in_a_url_too_and_whole() -> None:
    assert list(secrets_of("", {"secret": "a/b+cdef"})) == ["a/b+cdef", "a%2Fb%2Bcdef"]
    assert redacted("it is abcdef", ["abc", "abcdef"]) == "it is ***"


def test_a_secret_is_found_wherever_an_error_may_be_printed_with_it() -> None:
    noted, in_context = ValueError("plain"), ValueError("plain")
    noted.add_note(PLANTED)
    in_context.__context__ = ValueError(PLANTED)
    assert [shows_secrets(e, [PLANTED]) for e in (noted, in_context, ValueError("plain"))] == [True, True, False]


def test_a_password_beside_its_user_is_a_secret() -> None:
    assert list(secrets_of("", {"client_kwargs": {"auth": ("me", "planted")}, "places": ("not", "a secret")})) == [
        "planted"
    ]


@pytest.mark.parametrize("transport", BOTH)
@pytest.mark.parametrize("kind", ["gcs", "azure"])
def test_a_service_that_quotes_secrets_is_not_repeated_to_the_user(
    kind: str, transport: str, server: Callable[[str], Server]
) -> None:
    from tests.storage.test_s3 import shown

    with contextlib.closing(Proxy(server(kind).endpoint)) as proxy:
        options: dict[str, Any] = {"token": "anon", "endpoint_url": proxy.endpoint}
        if kind == "azure":
            options = {"connection_string": AZURE.replace(ENDPOINT, proxy.endpoint)}
        storage = open_storage(
            f"{server(kind).scheme}://bucket/x", {**options, "transport": transport, "retry_s": 0.1}
        )
        quoted = f"AccountKey={ACCOUNT_KEY}; Authorization: Bearer {PLANTED}; https://h/x?sig={PLANTED}"
        for status in (400, 403, 503):
            proxy.plan = first(1000, Answer(status, "Quoting", quoted))
            for call in (
                lambda: storage.get("key"),
                lambda: storage.put("key", b"1"),
                lambda: storage.list_names(""),
            ):
                with pytest.raises(StorageError) as caught:
                    call()
                assert "planted" not in shown(caught.value)
                assert kind == "gcs" or ACCOUNT_KEY not in shown(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "s3://user:planted@host/x",
        "see https://h/x?X-Amz-Algorithm=A&X-Amz-Signature=planted",
        "https://account.blob.core.windows.net/c/x?sv=1&sig=planted",
    ],
)
def test_urls_with_credentials_are_not_stored(url: str) -> None:
    with trajstore.create(f"memory://{uuid.uuid4().hex}", {"x": Field("int64")}).writer() as writer:
        for metadata in ({"source": url}, {"nested": [{"source": url}]}):
            with pytest.raises(DataError, match=r"metadata .* a URL in it holds a") as caught:
                writer.append_episode({"x": np.arange(3)}, terminated=True, metadata=metadata)
            assert "planted" not in str(caught.value)
        harmless = {"source": "https://h/x?version=3", "mail": "a:b@c", "time": "12:30 @ home //x"}
        writer.append_episode({"x": np.arange(3)}, terminated=True, metadata=harmless)


def test_a_reference_does_not_store_credentials(tmp_path: Path) -> None:
    reference = CheckpointReference(str(tmp_path), None, 0, ("s3://user:planted@host/x",))
    with pytest.raises(DataError, match="a user and a password"):
        reference.write(None)
    assert not list(tmp_path.iterdir())


@pytest.mark.s3
@pytest.mark.parametrize("transport", ["obstore", "fsspec"])
def test_info_says_what_makes_the_requests(
    transport: str,
    new_place: Callable[[str], Place],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place = new_place("s3")
    trajstore.create(place.url, {"x": Field("int64")}, **place.kwargs)
    options = ["--storage-option", f"transport={transport}"]
    for name, value in place.options.items():
        options += ["--storage-option", f"{name}={value if isinstance(value, str) else json.dumps(value)}"]
    monkeypatch.setattr(sys, "argv", ["trajstore", "info", place.url, *options])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    said = "obstore" if transport == "obstore" else "s3fs, because asked for by the option transport"
    assert f"Requests are made by {said}" in shown


# ---- processes -------------------------------------------------------------------------------------------

EXIT = """
import os, sys, warnings
from trajstore.storage import open_storage
warnings.simplefilter("ignore")
storage = open_storage({url!r}, {options!r})
try:
    storage.get("key")
except OSError:
    pass
child = os.fork()
if child == 0:
    sys.exit(0)  # runs what is registered for the end of the process
os.waitpid(child, 0)
"""


@pytest.mark.parametrize("transport", ["auto", "fsspec"])
@pytest.mark.parametrize(
    ("url", "options"), [("az://c/x", {"connection_string": AZURE}), ("s3://b/x", S3)], ids=["azure", "s3"]
)
def test_a_process_and_its_forked_child_end_in_silence(url: str, options: dict[str, Any], transport: str) -> None:
    options = {**options, "transport": transport, "retry_s": 1e-6}  # one try, so that nothing is logged
    code = EXIT.format(url=url, options=options)
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


def test_importing_trajstore_loads_no_client() -> None:
    code = (
        "import sys, trajstore; print(sorted({'obstore', 's3fs', 'gcsfs', 'adlfs', 'botocore'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
