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

Pages = dict[bytes, bytes | None]


class RedisRows:
    """What the native cache asks for the rows that it lacks."""

    # Of all versions: what is in flight holds its pages in memory.
    _turns = threading.BoundedSemaphore(FETCHES_AT_ONCE)

    def __init__(self, version: RedisVersion, connection: RedisConnection) -> None:
        self._version, self._connection = version, connection
        self._format = version.manifest.format
        self._flights: dict[bytes, Future[Pages]] = {}
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
        numbers = pages[first:]
        names = self._version.page_keys(numbers)
        values = self._values(names)
        damaged = _lookup.rows_of_pages(
            values, names, numbers, keys, which.astype(np.int32).reshape(-1) - first, self._format.type.native | self._format.wide << 4,
            self._format.dim, self._version.manifest.has_keys, self._version.document.rows_a_page, self._version.manifest.rows, rows, statuses,
        )  # fmt: skip
        if damaged:
            self.damaged_pages += damaged
            log.error(
                "%d pages in Redis are damaged or of another version", damaged,
                extra={"table": self._version.manifest.table, "version": self._version.manifest.version},
            )  # fmt: skip
        return rows, statuses

    def _values(self, names: list[bytes]) -> list[bytes | None]:
        """Pages by their keys in Redis, None where one cannot be had. A page that another request is fetching is waited for."""
        if not names:
            return []
        flight: Future[Pages] = Future()
        with self._lock:
            flights = [self._flights.setdefault(name, flight) for name in names]
        mine = [name for name, other in zip(names, flights, strict=True) if other is flight]
        found: Pages = {}
        try:
            if mine:
                found = dict(zip(mine, self._get(mine), strict=True))
        finally:
            with self._lock:
                for name in mine:
                    del self._flights[name]
            flight.set_result(found)
        if len(mine) == len(names):
            return list(found.values())
        return [_landed(other).get(name) for name, other in zip(names, flights, strict=True)]

    def _get(self, names: list[bytes]) -> list[bytes | None]:
        if not self._turns.acquire(timeout=LONGEST_WAIT_S):
            raise ResourceExhausted(f"overloaded: {FETCHES_AT_ONCE} fetches from Redis in progress; retry later", 0.1)
        try:
            return self._connection.get_all(names)
        finally:
            self._turns.release()


def _landed(flight: Future[Pages]) -> Pages:
    try:
        return flight.result(LONGEST_WAIT_S)
    except Late:
        return {}
