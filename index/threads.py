"""How many searches run at once.

FAISS gives every thread that calls it an OpenMP pool of its own, so that threads and memory grow with the
callers and latency collapses. Here a search runs in the thread that asks, on that thread alone, and no more
than `n` at a time; a large batch that comes by itself is cut into parts for as many threads of one pool.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import numpy.typing as npt

PART_QUERIES = 16  # fewer are not worth a thread's waking up
T = TypeVar("T")


class SearchThreads:
    """`n` searches at a time; shared by all tables of a process."""

    def __init__(self, n: int) -> None:
        self._n = n
        self._slots = threading.BoundedSemaphore(n)
        self._pool = ThreadPoolExecutor(n, thread_name_prefix="search")

    def run(self, search: Callable[[npt.NDArray[np.float32]], T], queries: npt.NDArray[np.float32]) -> list[T]:
        """What `search` gives for the queries [Q, dim], or for each of some parts of them, in order."""
        parts = min(self._n, len(queries) // PART_QUERIES)
        if parts < 2:
            return [self._alone(search, queries)]
        return list(self._pool.map(lambda part: self._alone(search, part), np.array_split(queries, parts)))

    def _alone(self, search: Callable[[npt.NDArray[np.float32]], T], queries: npt.NDArray[np.float32]) -> T:
        with self._slots:
            return search(queries)
