"""The process of gcp-storage-emulator, with what GCS promises and the emulator lacks.

The emulator ignores ``ifGenerationMatch``, parses uploads as mail (which cuts a carriage return off their end),
does not protect a listing from another thread that changes what it lists, and has no XML interface (`gcs_xml`).

Arguments: the port and the bucket.
"""

from __future__ import annotations

import sys
import threading
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qs, urlsplit

from gcp_storage_emulator import server, storage
from gcp_storage_emulator.exceptions import NotFound

from tests.support.servers import gcs_xml

_request = threading.local()
_lock = threading.RLock()


class PreconditionFailedError(Exception):
    """The object is not of the generation that the request names."""


class Storage(storage.Storage):  # type: ignore[misc]
    def create_file(self, bucket: str, name: str, *args: Any, **kwargs: Any) -> None:
        with _lock:
            expected = _request.query.get("ifGenerationMatch")
            if expected and expected[0] != self._generation(bucket, name):
                raise PreconditionFailedError
            super().create_file(bucket, name, *args, **kwargs)

    def get_file_list(self, *args: Any, **kwargs: Any) -> Any:
        with _lock:
            return super().get_file_list(*args, **kwargs)

    def delete_file(self, *args: Any, **kwargs: Any) -> Any:
        with _lock:
            return super().delete_file(*args, **kwargs)

    def _write_config_to_file(self) -> None:
        """Nothing outlives this process, so nothing is written at every put."""

    def _generation(self, bucket: str, name: str) -> str:
        try:
            return str(self.get_file_obj(bucket, name)["generation"])
        except NotFound:
            return "0"


class Router(server.Router):  # type: ignore[misc]
    def handle(self, method: str) -> None:
        if gcs_xml.is_xml(self._request_handler.path):
            self._handle_xml(method)
            return
        _request.query = parse_qs(urlsplit(self._request_handler.path).query)
        try:
            super().handle(method)
        except PreconditionFailedError:
            answer = server.Response(self._request_handler)
            answer.status = HTTPStatus.PRECONDITION_FAILED
            answer.json({"error": {"code": 412, "message": "conditionNotMet"}})
            answer.close()

    def _handle_xml(self, method: str) -> None:
        handler = self._request_handler
        asked = gcs_xml.asked(method, handler.path, handler.headers, server._read_raw_data(handler))
        condition = handler.headers.get("x-goog-if-generation-match")
        _request.query = {} if condition is None else {"ifGenerationMatch": [condition]}
        try:
            answer = gcs_xml.answer(asked, handler.storage, _lock)
        except PreconditionFailedError:
            answer = gcs_xml.error_412()
        handler.send_response(answer.status)
        for name, value in ({"Content-Length": str(len(answer.body))} | dict(answer.headers)).items():
            handler.send_header(name, value)
        handler.end_headers()
        if method != "HEAD":
            handler.wfile.write(answer.body)


class RequestHandler(server.RequestHandler):  # type: ignore[misc]
    disable_nagle_algorithm = True  # else each answer waits for 40 ms

    def do_HEAD(self) -> None:
        Router(self).handle("HEAD")


_read_data = server._read_data


def _exact_data(handler: Any, query: Any) -> Any:
    """The parts of an upload, byte for byte."""
    content_type = handler.headers.get("Content-Type") or ""
    if not content_type.startswith("multipart/related"):
        return _read_data(handler, query)
    boundary = content_type.partition("boundary=")[2].strip("\"' ").encode()
    # After the head: the metadata, and the content up to the last boundary.
    _, head, rest = server._read_raw_data(handler).split(b"--" + boundary, 2)
    meta = head.replace(b"\r\n", b"\n").partition(b"\n\n")[2]
    newline = b"\r\n" if rest.startswith(b"\r\n") else b"\n"
    content_head, _, content = rest.partition(newline * 2)
    content = content[: content.rindex(newline + b"--" + boundary + b"--")]
    heads = dict(line.lower().split(b":", 1) for line in content_head.splitlines() if b":" in line)
    kind = heads.get(b"content-type", b"application/octet-stream").strip().decode()
    return {"meta": server.json.loads(meta), "content": content, "content-type": kind}


def main() -> None:
    server.Storage, server.Router, server._read_data = Storage, Router, _exact_data
    server.RequestHandler = RequestHandler
    server.create_server("127.0.0.1", int(sys.argv[1]), in_memory=True, default_bucket=sys.argv[2]).run()


if __name__ == "__main__":
    main()
