"""A filesystem of fsspec for a URL, made at its first use in each process."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import fsspec.core

from trajstore.errors import MissingExtraError
from trajstore.storage.fsspec_client import call, leave_open_at_exit, make_one_try, one_try_options, package_of
from trajstore.storage.interface import Place, storage_error
from trajstore.storage.retry import RetryPolicy


class FsspecConnection:
    """The filesystem at a URL, or chain of URLs, and the path in it.

    Event loops, and the position in an open zip file, can't be shared with a forked child: it connects by itself.

    Args:
        url: Where the objects are.
        options: Arguments of the filesystem for that URL; for a chain also those of its other links, by protocol.
        policy: Bounds of repetitions. The client's own ones are switched off.
        display: The URL for messages.
        secrets: What messages must not show.
        given: The filesystem to use, instead of one made from ``options``.
    """

    def __init__(
        self,
        url: str,
        options: Mapping[str, Any],
        policy: RetryPolicy,
        *,
        display: str,
        secrets: Sequence[str] = (),
        given: Any = None,
    ) -> None:
        self._url, self._options, self._policy = url, dict(options), policy
        self._display, self._secrets = display, tuple(secrets)
        self.given = given
        self._filesystem: Any = None
        self._root = ""
        self._lock = threading.Lock()
        _alive.add(self)

    @property
    def filesystem(self) -> Any:
        with self._lock:
            if self._filesystem is None:
                self._filesystem, self._root = self._connect()
            return self._filesystem

    @property
    def root(self) -> str:
        """The path of the URL in the filesystem, without a slash at its end."""
        self.filesystem  # noqa: B018  (finds it)
        return self._root

    def path(self, key: str) -> str:
        """The path of an object in the filesystem."""
        return "/".join(part for part in (self.root, key) if part)

    def call(self, name: str, timeout_s: float, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the filesystem; one that is asynchronous is cancelled after the timeout."""
        return call(self.filesystem, name, timeout_s, *args, **kwargs)

    @property
    def is_async(self) -> bool:
        """Whether the filesystem reads many places at once; another one would read one after the other."""
        return bool(getattr(self.filesystem, "async_impl", False))

    def ask_places(self, places: Sequence[Place], timeout_s: float, **options: Any) -> list[Any]:
        """The bytes of each place, or an error, by one call of the filesystem.

        Raises:
            Exception: The first error, if no place could be read.
        """
        starts = [None if stop is None else start for _, start, stop in places]
        stops = [stop for _, _, stop in places]
        paths = [self.path(key) for key, _, _ in places]
        found = list(self.call("cat_ranges", timeout_s, paths, starts, stops, on_error="return", **options))
        if all(isinstance(data, Exception) for data in found):
            raise found[0]
        return found

    def renew(self) -> bool:
        """Connect again at the next use; returns whether that finds new credentials, if there are any."""
        if self.given is not None:
            return False
        with self._lock:
            self._filesystem = None
        return True

    def leave_to_parent(self) -> None:
        """Connect again in a process that was forked, and leave alone what belongs to its parent."""
        self._lock = threading.Lock()  # the thread that held it does not exist here
        if self._filesystem is not None:
            _of_parent.append(self._filesystem)
        self._filesystem = None

    def _connect(self) -> tuple[Any, str]:
        """The filesystem and the path in it; a chain of URLs may be read for that."""
        if self.given is not None:
            return self.given, fsspec.core.split_protocol(self._url)[1].rstrip("/")
        protocols = [link.partition(":")[0] for link in self._url.split("::")]
        try:
            found, path = fsspec.core.url_to_fs(self._url, **self._options_of(protocols))
        except ImportError as error:
            names = [package for protocol in protocols if (package := package_of(protocol)) is not None]
            hint = f"pip install {' '.join(names)}" if names else str(error)
            raise MissingExtraError(f"{self._display} needs a package that is not installed: {hint}") from error
        except ValueError as error:
            raise storage_error("open", self._display, error, self._secrets) from None
        make_one_try(found, self._policy)
        leave_open_at_exit(found)
        return found, str(path).rstrip("/")

    def _options_of(self, protocols: Sequence[str]) -> dict[str, Any]:
        """The options of a chain: those of its first link beside those of the others, which their names hold."""
        options = dict(self._options)
        for protocol in protocols[1:]:
            given = dict(options.get(protocol) or {})
            options[protocol] = given | one_try_options(protocol, given, self._policy)
        return options | one_try_options(protocols[0], options, self._policy)


_alive: weakref.WeakSet[FsspecConnection] = weakref.WeakSet()
# A child keeps the filesystems of its parent for ever: their finalizers would take the parent's sockets out of the
# event queue that both processes share, and the parent would wait for answers in vain.
_of_parent: list[Any] = []


def _after_fork() -> None:
    for connection in list(_alive):
        connection.leave_to_parent()


os.register_at_fork(after_in_child=_after_fork)
