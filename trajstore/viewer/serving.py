"""Serves the page on this machine."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from types import TracebackType

from trajstore.errors import ClosedError, MissingExtraError, StorageError
from trajstore.store.store import Store
from trajstore.viewer.access import HOST, Access
from trajstore.viewer.live_view import LiveView

try:
    import uvicorn

    from trajstore.viewer.application import application
    from trajstore.viewer.connections import Connection, Server
except ImportError as error:
    raise MissingExtraError(
        "trajstore.viewer needs starlette and uvicorn: pip install 'trajstore[viewer]'"
    ) from error

_START_S = 10.0
_MAX_CONNECTIONS = 128


class Viewer:
    """Serves a page that shows a store, to this machine only, and only to who has its address.

    Reads the store while others write it, and writes nothing. In a notebook or a program::

        with trajstore.viewer.Viewer(trajstore.open(url)) as viewer:
            print(viewer.url)

    Args:
        store: The store; it is refreshed by the viewer. A store that was opened with ``at=`` is shown as it was at
            that checkpoint.
        port: The port; 0: any free one.
        secrets: Texts that no answer may hold, such as values of storage options.

    Attributes:
        view: The store as it was last read; its ``refresh_s`` says how often the storage is looked at.
    """

    def __init__(self, store: Store, *, port: int = 0, secrets: tuple[str, ...] = ()) -> None:
        self._socket = _listening(port)
        self._access = Access(self._socket.getsockname()[1])
        self.view = LiveView(store)
        config = uvicorn.Config(
            application(self.view, self._access, secrets),
            http=Connection,
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            lifespan="off",
            ws="none",
            limit_concurrency=_MAX_CONNECTIONS,
            timeout_graceful_shutdown=1,
        )
        self._server = Server(config)
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        """The address of the page, with its token."""
        return self._access.url

    def run(self, ready: Callable[[], None] = lambda: None) -> None:
        """Serve until Ctrl-C, which ends it without an error. Call it in the main thread.

        Args:
            ready: Called once requests are accepted.
        """
        ready()  # the socket listens already, so early requests wait
        with contextlib.suppress(KeyboardInterrupt):
            self._server.run(sockets=[self._socket])
        self._socket.close()

    def start(self) -> Viewer:
        """Serve in a thread, until `close`."""
        if self._thread is not None:
            raise ClosedError("this viewer was started already; make a new one")
        self._thread = threading.Thread(
            target=self._server.run, args=([self._socket],), name="trajstore-viewer", daemon=True
        )
        self._thread.start()
        return self

    def close(self) -> None:
        """End serving; may be called again."""
        self._server.should_exit = True
        if self._thread is not None:
            self._thread.join(_START_S)
        self._socket.close()

    def __enter__(self) -> Viewer:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Viewer of {self.view.url} at http://{HOST}:{self._access.port}>"


def _listening(port: int) -> socket.socket:
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((HOST, port))
    except OSError as error:
        listening.close()
        raise StorageError(
            f"port {port} of {HOST} can't be used: {error.strerror}; leave it out for a free one"
        ) from error
    listening.listen(64)
    return listening
