"""What a collector has not made durable yet; it lives on when its writer is garbage-collected."""

from __future__ import annotations

import threading

import ray

from trajstore.errors import ClosedError
from trajstore.ray.block_sender import BlockSender
from trajstore.ray.staged_calls import StagedCalls
from trajstore.unclosed import Registration


class Outbox:
    """The staged and sent calls of a `RayWriter`. Nothing here refers to the writer, which the program may drop.

    Attributes:
        lock: Held during every call.
        is_closed: Whether everything was sent for the last time.
    """

    def __init__(self, sender: BlockSender, staged: StagedCalls) -> None:
        self.lock = threading.RLock()
        self.is_closed = False
        self._sender = sender
        self._staged = staged
        self._registration: Registration | None = None

    def register(self, writer: object, name: str) -> None:
        """Have everything sent when the writer is dropped, or when the process ends."""
        self._registration = Registration(writer, self._finish, self._flush_if_connected, name)

    def send(self) -> None:
        """Send the staged calls, without waiting for the answer."""
        self._staged.close_rollout()
        if self._staged.has_calls:
            self._sender.make_room()
            self._sender.send(*self._staged.take())

    def flush(self) -> None:
        """Send everything, and return when it is durable or counted as lost."""
        with self.lock:
            self.send()
            self._sender.flush()

    def close(self) -> None:
        """Flush, and let the actor forget the writer. A second call does nothing."""
        with self.lock:
            if not self.is_closed:
                self.flush()
                self.is_closed = True
                self.abandon()
                self._sender.close()

    def _finish(self) -> None:
        """Close if there is anything to store."""
        with self.lock:
            self._staged.close_rollout()
            if self._sender.is_settled and not self._staged.has_calls:
                self.is_closed = True
                self.abandon()
            elif not ray.is_initialized():  # a call would start it again
                raise ClosedError("Ray was shut down before the writer was closed")
            else:
                self.close()

    def _flush_if_connected(self) -> None:
        if ray.is_initialized():
            self.flush()

    def abandon(self) -> None:
        """Do not send anything when the writer is dropped, or when the process ends."""
        if self._registration is not None:
            self._registration.end()
