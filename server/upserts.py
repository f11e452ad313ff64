"""Upserts: from a request to the log, and from the log to the rows that are served.

One thread writes. It takes all requests that wait, logs those of a table with one wait for the disk, and
serves a new overlay with what the log then holds, its own rows and other servers'.
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from concurrent.futures import Future
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from embedserve.quant import Manifest, UnstorableRow, UpsertLog, Upserts, encode_upserts, latest
from embedserve.quant.errors import EmbedserveError, InvalidArgument, ResourceExhausted, Unavailable
from embedserve.server.versions import Overlay, ServedVersion

if TYPE_CHECKING:
    from embedserve.server.engine import Engine

log = logging.getLogger(__name__)
MOST_AT_ONCE = 256


def open_overlay(upsert_log: UpsertLog, manifest: Manifest) -> Overlay:
    """What the log holds for a version. Raises ArtifactError if the log's head is damaged."""
    return extended(Overlay.empty(manifest, upsert_log.begin(manifest.upserts)), upsert_log)


def extended(overlay: Overlay, upsert_log: UpsertLog) -> Overlay:
    """The overlay with what has been logged since. What cannot be stored in the version's rows is left out, aloud."""
    read = upsert_log.read(overlay.place)
    manifest = overlay.manifest
    fields = {"table": manifest.table, "version": manifest.version}
    if read.damage:
        log.error("upserts are damaged: %s", read.damage, extra=fields)
    others = sum(len(batch.keys) for batch in read.batches if batch.dim != manifest.dim)
    if others:
        log.error("%d upserted rows are of another dim than the version, and not served", others, extra=fields)
    if read.place == overlay.place:
        return overlay
    pending = latest(read.batches, manifest.dim)
    while len(pending.keys):
        try:
            return overlay.with_rows(encode_upserts(manifest, pending), read.place)
        except UnstorableRow as error:  # taken for a version of another row type
            log.error("an upserted row is not served: %s", error.description, extra=fields)
            kept = pending.keys != error.key
            pending = Upserts(pending.keys[kept], pending.values[kept])
    return overlay.with_rows(encode_upserts(manifest, pending), read.place)


@dataclass(frozen=True)
class _Request:
    table: str
    upserts: Upserts
    done: Future[ServedVersion]


class UpsertWriter:
    """Takes upserts for an engine's tables; `start`, then `stop` once."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._waiting: SimpleQueue[_Request | str | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="upserts", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends after what is waiting."""
        self._waiting.put(None)
        self._thread.join()

    def upsert(self, table: str, upserts: Upserts) -> ServedVersion:
        """Returns the version served once the rows are durable and visible.

        Raises NotFound, InvalidArgument for rows that cannot be stored, ResourceExhausted for limits and a full
        disk, ArtifactError if the log is damaged.
        """
        version = self._engine.served.resolve(table)
        self._engine.upsert_log(table)  # there is one
        encode_upserts(version.manifest, upserts)  # all of it can be stored, before any of it is
        if version.artifact.keys is None:
            self._check_positions(version, upserts)
        request = _Request(table, upserts, Future())
        self._waiting.put(request)
        return request.done.result()

    def refresh(self, table: str) -> None:
        """Serves what other servers have logged."""
        self._waiting.put(table)

    @staticmethod
    def _check_positions(version: ServedVersion, upserts: Upserts) -> None:
        beyond = upserts.keys[(upserts.keys < 0) | (upserts.keys >= version.manifest.rows)]
        if len(beyond):
            raise InvalidArgument(
                "keys", f"{beyond[0]} is not one of the {version.manifest.rows:,} positions that are {version.manifest.table!r}'s "
                "keys; tables that take new keys are imported with --keys",
            )  # fmt: skip

    def _work(self) -> None:
        while True:
            taken = [self._waiting.get()]
            try:
                while len(taken) < MOST_AT_ONCE:
                    taken.append(self._waiting.get_nowait())
            except Empty:
                pass
            by_table: dict[str, list[_Request]] = defaultdict(list)
            for each in taken:
                if isinstance(each, str):
                    by_table[each]  # an empty list: nothing to write, only to read
                elif each is not None:
                    by_table[each.table].append(each)
            for table, requests in by_table.items():
                self._apply(table, requests)
            if None in taken:
                return

    def _apply(self, table: str, requests: list[_Request]) -> None:
        try:
            version = self._write(table, [request.upserts for request in requests])
        except Exception as error:  # (the thread outlives it; every caller gets it)
            if not isinstance(error, EmbedserveError):
                log.exception("upserts failed", extra={"table": table})
            elif not requests:
                log.error("upserts cannot be read: %s", error, extra={"table": table})
            for request in requests:
                request.done.set_exception(error)
            return
        for request in requests:
            request.done.set_result(version)

    def _write(self, table: str, batches: list[Upserts]) -> ServedVersion:
        upsert_log = self._engine.upsert_log(table)
        with self._engine.changing:  # no version is swapped between the write and what is served of it
            served = self._engine.served.tables.get(table)
            if served is None:
                raise Unavailable(f"table {table!r} is not served any more")
            current = served.current
            if batches:
                if any(batch.dim != current.dim for batch in batches):
                    raise Unavailable(f"table {table!r} has just become one of dim {current.dim}; send the rows again")
                self._check_limit(current, sum(len(batch.keys) for batch in batches))
                upsert_log.append(batches, current.overlay.place)
            overlay = extended(current.overlay, upsert_log)
            if overlay is not current.overlay:
                current = current.with_overlay(overlay)
                self._engine.replace(served.led_by(current))
            return current

    def _check_limit(self, version: ServedVersion, more: int) -> None:
        limit = self._engine.config.max_upserted_rows
        if len(version.overlay.keys) + more > limit:
            raise ResourceExhausted(
                f"{len(version.overlay.keys):,} rows lie over {version.manifest.table} {version.name} and {more:,} more would pass "
                f"max_upserted_rows ({limit:,}); fold them into a version: embedserve fold --table {version.manifest.table} --publish"
            )
