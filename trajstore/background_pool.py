"""A pool of daemon threads: it works until the process has ended, and never keeps the process from ending."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")
_Task = tuple[Callable[..., None], tuple[Any, ...]]


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
        self._unfinished = _Count(0)
        self._is_shut_down = False
        weakref.finalize(self, self._tasks.put, None).atexit = False

    def submit(self, function: Callable[..., T], *args: Any) -> Future[T]:
        """Call a function in a thread.

        Raises:
            RuntimeError: The pool was shut down.
        """
        future: Future[T] = Future()
        self._put(_run, [(future, function, args)])
        return future

    def map(self, function: Callable[[Any], T], items: Sequence[Any]) -> list[T | BaseException]:
        """Call a function with each item, in threads, and wait; the results or errors are in order.

        This costs a few microseconds an item: much less than a future.

        Raises:
            RuntimeError: The pool was shut down.
        """
        calls = _Calls(function, items)
        if items:
            self._put(calls.make, [(i,) for i in range(len(items))])
            calls.are_done.wait()
        return calls.results

    def _put(self, function: Callable[..., None], calls: Sequence[tuple[Any, ...]]) -> None:
        with self._lock:
            if self._is_shut_down:
                raise RuntimeError(f"{self._name}: no work is accepted after shutdown")
            n_wanted = min(self._n_threads, self._unfinished.add(len(calls)))
            for args in calls:
                self._tasks.put((function, args))
            while len(self._threads) < n_wanted:
                self._start_thread()

    def _start_thread(self) -> None:
        name = f"{self._name}_{len(self._threads)}"
        thread = threading.Thread(target=_work, args=(self._tasks, self._unfinished), name=name, daemon=True)
        thread.start()
        self._threads.append(thread)

    def shutdown(self) -> None:
        """Finish the submitted tasks and end the threads. May be called again."""
        with self._lock:
            self._is_shut_down = True
            self._tasks.put(None)
        for thread in self._threads:
            thread.join()


class _Count:
    """A number that threads change."""

    def __init__(self, n: int) -> None:
        self._n = n
        self._lock = threading.Lock()

    def add(self, n: int) -> int:
        """Add to the number; returns the sum."""
        with self._lock:
            self._n += n
            return self._n


class _Calls:
    """Calls of one function with several items, and their results.

    Attributes:
        results: By item: the result, or the error.
        are_done: Set after the last call.
    """

    def __init__(self, function: Callable[[Any], Any], items: Sequence[Any]) -> None:
        self._function = function
        self._items = items
        self._left = _Count(len(items))
        self.results: list[Any] = [None] * len(items)
        self.are_done = threading.Event()

    def make(self, i: int) -> None:
        try:
            self.results[i] = self._function(self._items[i])
        except BaseException as error:
            self.results[i] = error
        if not self._left.add(-1):
            self.are_done.set()


def _work(tasks: SimpleQueue[_Task | None], unfinished: _Count) -> None:
    """Run tasks until None comes. Holds no reference to the pool, so that the pool can be garbage-collected."""
    while (task := tasks.get()) is not None:
        function, args = task
        function(*args)
        del task, function, args  # must not stay alive while the thread waits
        unfinished.add(-1)
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
