"""Worker threads for grpcio's sync server, handed over to with as little Python as will do.

The standard ThreadPoolExecutor gives every task a Future with a condition of its own and counts its idle
threads with a semaphore written in Python: per request, more than a lookup costs. grpcio wants of a pool only
`submit`, and of what that returns only `add_done_callback`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor
from queue import SimpleQueue
from typing import Any

log = logging.getLogger(__name__)
_current = threading.local()


def submitted() -> float:
    """When the task that this thread runs was handed over, by time.perf_counter()."""
    at: float = _current.submitted
    return at


class Task:
    """A submitted call. Its callbacks run once, after it ends, on whichever thread comes second."""

    __slots__ = ("_args", "_callbacks", "_ended", "_function", "_lock", "submitted")

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._function, self._args = function, args
        self.submitted = time.perf_counter()
        self._callbacks: list[Callable[[Task], object]] = []
        self._ended = False
        self._lock = threading.Lock()

    def add_done_callback(self, callback: Callable[[Task], object]) -> None:
        with self._lock:
            if not self._ended:
                self._callbacks.append(callback)
                return
        callback(self)

    def run(self) -> None:
        try:
            self._function(*self._args)
        except BaseException:  # (the boundary: a worker outlives its tasks)
            log.exception("a call ended with an exception that grpcio did not catch")

    def end(self) -> None:
        with self._lock:
            self._ended = True
        for callback in self._callbacks:
            callback(self)


class Workers(Executor):
    """Runs tasks in the order they come on at most `threads` daemon threads, made as they are needed."""

    def __init__(self, threads: int, name: str) -> None:
        self._most, self._name = threads, name
        self._tasks: SimpleQueue[Task | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._unfinished = 0
        self._lock = threading.Lock()

    def submit(self, function: Callable[..., Any], /, *args: Any) -> Task:  # type: ignore[override]
        """Queues `function(*args)`; its result is dropped."""
        task = Task(function, args)
        with self._lock:
            self._unfinished += 1
            if self._unfinished > len(self._threads) < self._most:
                self._start_one()
        self._tasks.put(task)
        return task

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Lets the threads end after what is queued; `wait` joins them."""
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads if wait else ():
            thread.join()

    def _start_one(self) -> None:
        thread = threading.Thread(target=self._work, name=f"{self._name}_{len(self._threads)}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            _current.submitted = task.submitted
            task.run()
            with self._lock:
                self._unfinished -= 1
            task.end()
            del task  # or it would keep the request alive until the next one
