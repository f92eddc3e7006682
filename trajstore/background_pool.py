"""A pool of daemon threads: it works until the process has ended, and never keeps the process from ending."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")
_Task = tuple["Future[Any]", Callable[..., Any], tuple[Any, ...]]


class BackgroundPool:
    """Runs functions in daemon threads, which are started as they are needed.

    Python's own `ThreadPoolExecutor` takes no work once the main thread has ended, and the process does not end
    before its last task has. A commit at the end of the process needs the first, and a storage that does not answer
    forbids the second.

    The threads end with `shutdown`, or when the pool is garbage-collected.

    Args:
        n_threads: The most threads.
        name: Name of the threads.
    """

    def __init__(self, n_threads: int, name: str) -> None:
        self._n_threads = n_threads
        self._name = name
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        self._idle = threading.Semaphore(0)  # threads that wait for a task that is not submitted yet
        self._is_shut_down = False
        weakref.finalize(self, self._tasks.put, None).atexit = False

    def submit(self, function: Callable[..., T], *args: Any) -> Future[T]:
        """Call a function in a thread.

        Raises:
            RuntimeError: The pool was shut down.
        """
        future: Future[T] = Future()
        with self._lock:
            if self._is_shut_down:
                raise RuntimeError(f"{self._name}: no work is accepted after shutdown")
            self._tasks.put((future, function, args))
            if not self._idle.acquire(blocking=False) and len(self._threads) < self._n_threads:
                self._start_thread()
        return future

    def _start_thread(self) -> None:
        name = f"{self._name}_{len(self._threads)}"
        thread = threading.Thread(target=_work, args=(self._tasks, self._idle), name=name, daemon=True)
        thread.start()
        self._threads.append(thread)

    def shutdown(self) -> None:
        """Finish the submitted tasks and end the threads. May be called again."""
        with self._lock:
            self._is_shut_down = True
            self._tasks.put(None)
        for thread in self._threads:
            thread.join()


def _work(tasks: SimpleQueue[_Task | None], idle: threading.Semaphore) -> None:
    """Run tasks until None comes. Holds no reference to the pool, so that the pool can be garbage-collected."""
    while (task := tasks.get()) is not None:
        _run(*task)
        del task  # its arguments must not stay alive while the thread waits
        idle.release()
    tasks.put(None)  # for the next thread


def _run(future: Future[Any], function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = function(*args)
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)
