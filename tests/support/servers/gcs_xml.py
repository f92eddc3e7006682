"""The part of GCS's XML interface that obstore uses, on the objects of gcp-storage-emulator, which has none.

It is written from Google's reference of that interface (objects: put, copy, get, head, delete; bucket: list), so it
shows that obstore and this reading of the reference agree, not that Google's servers do.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import formatdate
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit
from xml.sax.saxutils import escape

from gcp_storage_emulator.exceptions import NotFound

_PAGE = 1000  # objects and common prefixes in one answer at most
_OTHER_INTERFACES = ("/storage/", "/upload/", "/download/", "/batch/", "/b/", "/wipe")
_RANGE = re.compile(r"bytes=(\d+)-(\d*)")


@dataclass(frozen=True)
class Answer:
    """What the server says."""

    status: int
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Asked:
    """What a client asked."""

    method: str
    bucket: str
    name: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes


def is_xml(path: str) -> bool:
    """Whether a request is for this interface: its paths begin with the bucket."""
    return path != "/" and not path.startswith(_OTHER_INTERFACES)


def asked(method: str, path: str, headers: Mapping[str, str], body: bytes | None) -> Asked:
    url = urlsplit(path)
    bucket, _, name = url.path.lstrip("/").partition("/")
    query = dict(parse_qsl(url.query, keep_blank_values=True))
    return Asked(method, unquote(bucket), unquote(name), query, headers, body or b"")


def answer(request: Asked, storage: Any, lock: threading.RLock) -> Answer:
    """Do what was asked. The storage checks conditions on puts, and its error is the caller's."""
    if request.bucket not in storage.buckets:
        return _error(404, "NoSuchBucket")
    if not request.name:
        return _list(request, storage, lock) if request.method == "GET" else _error(501, "NotImplemented")
    functions: dict[str, Callable[[Asked, Any], Answer]] = {
        "GET": _get,
        "HEAD": _get,
        "PUT": _copy if "x-goog-copy-source" in request.headers else _put,
        "DELETE": _delete,
    }
    if request.method not in functions or request.query.keys() - {"generation"}:
        return _error(501, "NotImplemented")
    try:
        with lock:
            return functions[request.method](request, storage)
    except NotFound:
        return _error(404, "NoSuchKey")


def error_412() -> Answer:
    return _error(412, "PreconditionFailed")


def _error(status: int, code: str) -> Answer:
    text = f"<?xml version='1.0' encoding='UTF-8'?><Error><Code>{code}</Code><Message>{code}.</Message></Error>"
    return Answer(status, text.encode(), {"Content-Type": "application/xml; charset=UTF-8"})


def _put(request: Asked, storage: Any) -> Answer:
    return Answer(200, headers=_heads(_make(request, storage, request.body)))


def _copy(request: Asked, storage: Any) -> Answer:
    bucket, _, name = unquote(request.headers["x-goog-copy-source"]).lstrip("/").partition("/")
    made = _make(request, storage, storage.get_file(bucket, name, False))
    text = f"<CopyObjectResult><LastModified>{made['updated']}</LastModified><ETag>{_etag(made)}</ETag>"
    return Answer(200, f"{text}</CopyObjectResult>".encode(), _heads(made))


def _make(request: Asked, storage: Any, content: bytes) -> dict[str, Any]:
    generation = str(time.time_ns())
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    made = {
        "kind": "storage#object",
        "id": f"{request.bucket}/{request.name}/{generation}",
        "name": request.name,
        "bucket": request.bucket,
        "generation": generation,
        "metageneration": "1",
        "contentType": request.headers.get("Content-Type", "application/octet-stream"),
        "timeCreated": now,
        "updated": now,
        "size": str(len(content)),
        "etag": generation,
        "crc32c": None,
        "md5Hash": None,
    }
    storage.create_file(request.bucket, request.name, content, made)
    return made


def _get(request: Asked, storage: Any) -> Answer:
    found = storage.get_file_obj(request.bucket, request.name)
    content = storage.get_file(request.bucket, request.name, False)
    heads = _heads(found) | {"Content-Type": str(found["contentType"])}
    if request.method == "HEAD":
        return Answer(200, headers=heads | {"Content-Length": str(len(content))})
    wanted = _RANGE.fullmatch(request.headers.get("Range", ""))
    if wanted is None:
        return Answer(200, content, heads)
    start, stop = int(wanted[1]), int(wanted[2] or len(content)) + 1
    if start >= len(content):
        return _error(416, "InvalidRange")
    part = content[start:stop]
    heads["Content-Range"] = f"bytes {start}-{start + len(part) - 1}/{len(content)}"
    return Answer(206, part, heads)


def _delete(request: Asked, storage: Any) -> Answer:
    storage.delete_file(request.bucket, request.name)
    return Answer(204)


def _list(request: Asked, storage: Any, lock: threading.RLock) -> Answer:
    prefix, delimiter = request.query.get("prefix", ""), request.query.get("delimiter", "")
    after = max(request.query.get("continuation-token", ""), request.query.get("start-after", ""))
    n = min(int(request.query.get("max-keys", _PAGE)), _PAGE)
    with lock:
        objects = dict(storage.objects.get(request.bucket, {}))
    # In order of name; an object in a folder is shown as the folder, once.
    entries: dict[str, Any] = {}
    for name in sorted(name for name in objects if name.startswith(prefix)):
        head, cut, _ = name.removeprefix(prefix).partition(delimiter) if delimiter else (name, "", "")
        shown = f"{prefix}{head}{delimiter}" if cut else name
        if shown > after:
            entries.setdefault(shown, None if cut else objects[name])
    page = list(entries.items())[:n]
    text = "<?xml version='1.0' encoding='UTF-8'?><ListBucketResult xmlns='http://doc.s3.amazonaws.com/2006-03-01'>"
    text += f"<Name>{request.bucket}</Name><Prefix>{escape(prefix)}</Prefix><KeyCount>{len(page)}</KeyCount>"
    text += f"<IsTruncated>{str(len(entries) > n).lower()}</IsTruncated>"
    if len(entries) > n:
        text += f"<NextContinuationToken>{escape(page[-1][0])}</NextContinuationToken>"
    text += "".join(_contents(name, found) for name, found in page if found is not None)
    folders = (escape(name) for name, found in page if found is None)
    text += "".join(f"<CommonPrefixes><Prefix>{name}</Prefix></CommonPrefixes>" for name in folders)
    return Answer(200, f"{text}</ListBucketResult>".encode(), {"Content-Type": "application/xml; charset=UTF-8"})


def _contents(name: str, found: Mapping[str, Any]) -> str:
    values = f"<Generation>{found['generation']}</Generation><MetaGeneration>1</MetaGeneration>"
    values += (
        f"<LastModified>{found['updated']}</LastModified><ETag>{_etag(found)}</ETag><Size>{found['size']}</Size>"
    )
    return f"<Contents><Key>{escape(name)}</Key>{values}</Contents>"


def _etag(found: Mapping[str, Any]) -> str:
    return f'"{found["generation"]}"'


def _heads(found: Mapping[str, Any]) -> dict[str, str]:
    updated = datetime.fromisoformat(str(found["updated"])).timestamp()
    return {
        "ETag": _etag(found),
        "Last-Modified": formatdate(updated, usegmt=True),
        "x-goog-generation": str(found["generation"]),
        "x-goog-metageneration": "1",
        "x-goog-stored-content-length": str(found["size"]),
    }
