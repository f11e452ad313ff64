"""The redis tier: rows of one version, fetched by pages, each page once however many requests want it."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import Future
from concurrent.futures import TimeoutError as Late

import numpy as np

from embedserve.quant.errors import ResourceExhausted
from embedserve.quant.redis_catalog import RedisVersion
from embedserve.quant.redis_connection import RedisConnection
from embedserve.server import _lookup

log = logging.getLogger(__name__)
FETCHES_AT_ONCE = 32
LONGEST_WAIT_S = 2.0  # for others' fetches, and for a turn; each of them is bounded by Redis's own timeout

Pages = dict[int, bytes | None]


class RedisRows:
    """What the native cache asks for the rows that it lacks."""

    # Of all versions: what is in flight holds its pages in memory.
    _turns = threading.BoundedSemaphore(FETCHES_AT_ONCE)

    def __init__(self, version: RedisVersion, connection: RedisConnection) -> None:
        self._version, self._connection = version, connection
        self._format = version.manifest.format
        self._flights: dict[int, Future[Pages]] = {}
        self._lock = threading.Lock()
        self.damaged_pages = 0  # seen so far

    @property
    def state(self) -> str:
        """Of the circuit breaker."""
        return self._connection.state.value

    def fetch(self, ids: bytes) -> tuple[np.ndarray, np.ndarray]:
        """Rows [n, stride] and statuses [n] (RowStatus) of packed int64 ids. Raises ResourceExhausted."""
        keys = np.frombuffer(ids, "<i8")
        rows, statuses = np.zeros((len(keys), self._format.stride), np.uint8), np.ones(len(keys), np.uint8)
        pages, which = np.unique(self._version.pages_of(keys), return_inverse=True)
        first = int(len(pages) > 0 and pages[0] < 0)  # -1: no such position
        numbers = [int(page) for page in pages[first:]]
        values = self._pages(numbers)
        names = [self._version.page_key(page) for page in numbers]
        damaged = _lookup.rows_of_pages(
            [values[page] for page in numbers], names, numbers, keys, which.astype(np.int32).reshape(-1) - first, self._format.type.native | self._format.wide << 4,
            self._format.dim, self._version.manifest.has_keys, self._version.document.rows_a_page, self._version.manifest.rows, rows, statuses,
        )  # fmt: skip
        if damaged:
            self.damaged_pages += damaged
            log.error(
                "%d pages in Redis are damaged or of another version", damaged,
                extra={"table": self._version.manifest.table, "version": self._version.manifest.version},
            )  # fmt: skip
        return rows, statuses

    def _pages(self, numbers: list[int]) -> Pages:
        """Pages by number, None where one cannot be had."""
        if not numbers:
            return {}
        mine: list[int] = []
        others: dict[int, Future[Pages]] = {}
        flight: Future[Pages] = Future()
        with self._lock:
            for page in numbers:
                if (other := self._flights.get(page)) is not None:
                    others[page] = other
                else:
                    self._flights[page] = flight
                    mine.append(page)
        found: Pages = {}
        try:
            if mine:
                found = self._get(mine)
        finally:
            with self._lock:
                for page in mine:
                    del self._flights[page]
            flight.set_result(found)
        answer = dict(found)
        for page, other in others.items():
            try:
                answer[page] = other.result(LONGEST_WAIT_S).get(page)
            except Late:
                answer[page] = None
        return answer

    def _get(self, pages: list[int]) -> Pages:
        if not self._turns.acquire(timeout=LONGEST_WAIT_S):
            raise ResourceExhausted(f"overloaded: {FETCHES_AT_ONCE} fetches from Redis in progress; retry later", 0.1)
        try:
            values = self._connection.get_all([self._version.page_key(page) for page in pages])
        finally:
            self._turns.release()
        return dict(zip(pages, values, strict=True))
