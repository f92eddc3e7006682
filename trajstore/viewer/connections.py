"""Connections that do not wait for slow clients, and an end that does not wait for slow answers."""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

REQUEST_S = 10.0  # from the connection, or the answer before, to the end of the headers of a request
ENDING_S = 1.0  # that answers have to end in, once the server ends

# Any user of this machine can send malformed requests, which must not fill the terminal.
_log = logging.getLogger("trajstore.viewer.connections")
_log.setLevel(logging.ERROR)


class Connection(H11Protocol):
    """A connection that is closed if a request takes longer than `REQUEST_S` to arrive.

    There is a limit of connections. Without this, a client that connects and sends nothing would take one of them
    for as long as it likes, without the token.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.logger = _log
        self._late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_waiting()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _wait(self) -> None:
        self._stop_waiting()
        self._late = self.loop.call_later(REQUEST_S, self.transport.abort)

    def _stop_waiting(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None


class Server(uvicorn.Server):
    """A server that cancels, when it ends, what takes longer than `ENDING_S` to answer."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if tasks := set(self.server_state.tasks):
            _, late = await asyncio.wait(tasks, timeout=ENDING_S)
            for task in late:
                task.cancel()
        await super().shutdown(sockets)
