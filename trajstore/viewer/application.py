"""What is served: the page, and the answers that its scripts ask for."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import traceback
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import parse_qs

import anyio.to_thread
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trajstore.credentials import redacted
from trajstore.errors import (
    CorruptionError,
    DataError,
    EpisodeNotFoundError,
    FormatError,
    SnapshotExpiredError,
    StorageError,
    TrajstoreError,
)
from trajstore.format.handles import EpisodeKey
from trajstore.viewer import overview, run_history
from trajstore.viewer.access import TOKEN_HEADER, Access, security_headers
from trajstore.viewer.episode_list import EpisodeList
from trajstore.viewer.episode_page import EpisodePage
from trajstore.viewer.json_numbers import to_json
from trajstore.viewer.live_view import LiveView
from trajstore.viewer.page import Page, live_page

Answer = dict[str, Any]

_log = logging.getLogger(__name__)
_MAX_THREADS = 6  # that compute answers
_MAX_QUERY = 20_000  # characters
_STATUS: tuple[tuple[type[TrajstoreError], int, str], ...] = (
    (SnapshotExpiredError, 409, "expired"),
    (EpisodeNotFoundError, 404, "missing"),
    (CorruptionError, 422, "damaged"),
    (StorageError, 503, "storage"),
    (DataError, 400, "question"),
    (FormatError, 422, "damaged"),
)


class Parameters:
    """The query of a request, checked."""

    def __init__(self, query: Mapping[str, str]) -> None:
        self._query = query

    def text(self, name: str) -> str:
        return self._query.get(name, "")

    def count(self, name: str, default: int = 0) -> int:
        text = self._query.get(name, "")
        if not text:
            return default
        if not (text.isascii() and text.isdecimal() and len(text) < 19):
            raise DataError(f"{name}: expected a number, got {text!r:.50}")
        return int(text)

    @property
    def key(self) -> EpisodeKey:
        return EpisodeKey(self.text("stream"), self.count("episode"))


class Questions:
    """Answers the questions of the page's scripts from a store.

    Args:
        view: The store.
    """

    def __init__(self, view: LiveView) -> None:
        self._view = view

    def version(self, _: Parameters) -> Answer:
        moment = self._view.refresh()
        streams = moment.snapshot.streams
        return {
            "number": moment.number,
            "committed_at": max((r.committed_at for r in streams), default=None),
            "n_open_streams": sum(not r.is_sealed for r in streams),
            "problem": self._view.problem,
        }

    def facts(self, _: Parameters) -> Answer:
        return self._kept("facts", overview.facts)

    def plots(self, _: Parameters) -> Answer:
        return self._kept("plots", overview.plots)

    def streams(self, _: Parameters) -> Answer:
        return self._kept("streams", overview.streams)

    def storage(self, _: Parameters) -> Answer:
        return self._kept("storage", overview.storage_by_field)

    def history(self, _: Parameters) -> Answer:
        moment = self._view.moment
        return run_history.history(moment.snapshot, self._view.checkpoints(moment))

    def _kept(self, name: str, compute: Callable[..., Answer]) -> Answer:
        moment = self._view.moment
        _ = moment.episodes  # shared by most of them
        return moment.keep(name, lambda: compute(moment.snapshot))

    def prepare(self) -> None:
        """Compute what the first page shows, so that it does not wait."""
        with contextlib.suppress(Exception):  # whoever asks is told
            self._kept("facts", overview.facts)
            self._kept("plots", overview.plots)

    def episodes(self, asked: Parameters) -> Answer:
        moment = self._view.moment
        found = moment.keep("list", lambda: EpisodeList(moment.episodes))
        return found.page(
            where=asked.text("filter"), sort=asked.text("sort"), start=asked.count("start"), n=asked.count("n", 50)
        )

    def episode(self, asked: Parameters) -> Answer:
        return EpisodePage(self._view.moment, asked.key).facts()

    def series(self, asked: Parameters) -> Answer:
        return self._shortened(asked, EpisodePage.series)

    def column(self, asked: Parameters) -> Answer:
        try:
            return self._shortened(asked, EpisodePage.column)
        except SnapshotExpiredError:  # a running session replaces its columns as a whole
            self._view.refresh(at_once=True)
            return self._shortened(asked, EpisodePage.column)

    def _shortened(self, asked: Parameters, method: Callable[..., Answer]) -> Answer:
        stop = asked.count("stop") if asked.text("stop") else None
        page = EpisodePage(self._view.moment, asked.key)
        return method(page, asked.text("path"), asked.count("start"), stop, asked.count("points", 600))

    def values(self, asked: Parameters) -> Answer:
        return EpisodePage(self._view.moment, asked.key).values(asked.count("step"))

    def frame(self, asked: Parameters) -> Response:
        image = EpisodePage(self._view.moment, asked.key).frame(asked.text("path"), asked.count("step"))
        return Response(image.data, media_type="image/png", headers={"x-note": image.note} if image.note else None)

    def all(self) -> dict[str, Callable[[Parameters], Answer | Response]]:
        """By name, every question."""
        names = "version facts plots streams storage history episodes episode series column values frame"
        return {name: getattr(self, name) for name in names.split()}


def application(view: LiveView, access: Access, secrets: tuple[str, ...] = ()) -> ASGIApp:
    """The application that serves a store.

    Args:
        view: The store.
        access: Who may ask.
        secrets: Texts that no answer may hold.
    """
    page = live_page()
    answering = anyio.CapacityLimiter(_MAX_THREADS)

    async def root(_: Request) -> Response:
        return Response(page.html, media_type="text/html")

    def answers(question: Callable[[Parameters], Answer | Response]) -> Callable[[Request], Any]:
        def answer(asked: Parameters) -> Response:
            try:
                found = question(asked)
            except TrajstoreError as error:
                return _error(error, view, secrets)
            except Exception:
                _log.error("a question of the viewer failed\n%s", _printable(traceback.format_exc(), secrets))
                return _json({"error": "internal error; the log has more", "kind": "internal"}, 500)
            return found if isinstance(found, Response) else _json(found)

        async def endpoint(request: Request) -> Response:
            return await anyio.to_thread.run_sync(answer, Parameters(request.query_params), limiter=answering)

        return endpoint

    routes = [Route("/", root)]
    questions = Questions(view)
    routes += [Route(f"/api/{name}", answers(question)) for name, question in questions.all().items()]
    threading.Thread(target=questions.prepare, name="trajstore-viewer-first-page", daemon=True).start()
    return Guard(Starlette(routes=routes), access, page)


def _error(error: TrajstoreError, view: LiveView, secrets: tuple[str, ...]) -> Response:
    status, kind = next(
        ((status, kind) for type_, status, kind in _STATUS if isinstance(error, type_)), (500, "internal")
    )
    if status == 409:
        view.refresh(at_once=True)  # what was asked for is gone; the next question gets the newest snapshot
    return _json({"error": redacted(str(error), secrets), "kind": kind}, status)


def _printable(text: str, secrets: tuple[str, ...]) -> str:
    """Text for a log: text of a store in it must not control the terminal."""
    plain = (c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)
    return redacted("".join(plain), secrets)


def _json(value: Answer, status: int = 200) -> Response:
    return Response(to_json(value), status, media_type="application/json")


class Guard:
    """Refuses requests that may not ask, and adds security headers to every answer.

    Args:
        inner: The application behind it.
        access: Who may ask.
        page: The page, whose policy every answer has.
    """

    def __init__(self, inner: ASGIApp, access: Access, page: Page) -> None:
        self._inner = inner
        self._access = access
        self._headers = security_headers(page.policy)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._inner(scope, receive, send)
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(self._headers)
            await send(message)

        refusal = self._refusal(scope)
        answer = self._inner if refusal is None else Response(refusal[1], refusal[0], media_type="text/plain")
        try:
            await answer(scope, receive, guarded)
        except asyncio.CancelledError:  # the server ends
            with contextlib.suppress(Exception):
                await Response("the viewer has ended", 503, media_type="text/plain")(scope, receive, guarded)

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        headers = Headers(scope=scope)
        query = scope["query_string"]
        if len(query) > _MAX_QUERY:
            return 414, "the question is too long"
        token = headers.get(TOKEN_HEADER, "")
        if scope["path"] == "/" and not token:
            token = parse_qs(query.decode("latin-1")).get("token", [""])[0]
        return self._access.refusal(scope["method"], headers.getlist("host"), headers.getlist("origin"), token)
