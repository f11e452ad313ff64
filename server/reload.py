"""Takes up new versions while others are served.

One thread does all of it, one version after another, at a bounded rate and never on a request's path:

    OPENING ──> CHECKING ──> WARMING ──> LIVE ──> KEPT ──> DRAINING ──> GONE
    (header,    (figures,    (hot rows                     (requests that    (unmapped
     budget)     every byte   are loaded,                   began on it)      in pieces)
                 is read)     answers a
                              health query)
       └────────────┴────────────┴──> refused: what was served goes on being served

LIVE is one pointer store in the engine. A version that is refused is logged, counted, shown by
DescribeTable and by health, and tried again with growing pauses as long as the catalog names it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import datetime, timezone
from enum import Enum
from queue import SimpleQueue

from embedserve.quant import Artifact, RedisVersion, check_table_name
from embedserve.quant.errors import (
    ArtifactError,
    EmbedserveError,
    FailedPrecondition,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from embedserve.server import gate
from embedserve.server.cache.memory import Pace
from embedserve.server.cache.ram import Leaving
from embedserve.server.engine import Engine, ServedTable
from embedserve.server.versions import ServedVersion
from embedserve.server.warming import warm_like

log = logging.getLogger(__name__)
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0


class State(Enum):
    OPENING = "opening"
    CHECKING = "checking"
    WARMING = "warming"


@dataclass(frozen=True)
class Refusal:
    """A version that is not served, and why."""

    version: str
    reason: str
    time: str


@dataclass(frozen=True)
class Taken:
    """What a reload or rollback of a table came to."""

    table: str
    version: str
    previous: str
    changed: bool


@dataclass
class TableLog:
    """One table's reloads since start; written by the reload thread alone."""

    taken: int = 0
    refused: int = 0
    rolled_back: int = 0
    last_reload_s: float = 0.0
    loading: str = ""
    refusal: Refusal | None = None
    named: str | None = None  # what the catalog named when it was last acted upon
    pause_s: float = FIRST_PAUSE_S
    retry_at: float = 0.0


Ask = Callable[[str, str], None]  # asks the whole request path for a table's version; raises when it does not answer
Notice = Callable[[str, bool, bool], None]  # (table, served, served as the catalog says)


class Reloader:
    """Moves an engine's tables from version to version; `start`, then `stop` once."""

    def __init__(self, engine: Engine, ask: Ask, notice: Notice) -> None:
        self._engine, self._ask, self._notice = engine, ask, notice
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._leaving: SimpleQueue[Leaving | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="reload", daemon=True)
        self._freeing = threading.Thread(target=self._free, name="free", daemon=True)
        self._queued: set[str] = set()
        self.tables: dict[str, TableLog] = {}
        for name, table in engine.served.tables.items():
            self.tables[name] = TableLog(named=table.current.name)
        for name, (version, why) in engine.passed_over.items():
            self._note_refusal(name, version, why)

    def start(self) -> None:
        self._thread.start()
        self._freeing.start()
        for name in self.tables:
            self._tell(name)

    def stop(self) -> None:
        """Ends after the version that is being taken up, if any."""
        self._queue.put(None)
        self._thread.join()
        self._leaving.put(None)

    # What callers ask for. Each waits for its turn and for the outcome.

    def reload(self, table: str, version: str = "") -> Taken:
        """Serves what the catalog names, or the version given. Raises what stands against it."""
        return self._in_turn(lambda: self._reload(table, version))

    def reload_all(self) -> list[Taken]:
        """Every table that is published; raises the first refusal once all were tried."""
        outcomes: list[Taken] = []
        failure: EmbedserveError | None = None
        for name in dict.fromkeys([*self._engine.published(), *self._engine.served.tables]):
            try:
                outcomes.append(self.reload(name))
            except EmbedserveError as error:
                failure = failure or error
        if failure:
            raise failure
        return outcomes

    def rollback(self, table: str, version: str = "") -> Taken:
        """Serves an open version again. Raises FailedPrecondition when there is no other, NotFound."""
        return self._in_turn(lambda: self._rollback(table, version))

    def unload(self, table: str) -> None:
        """Serves the table no more. Raises NotFound."""
        self._in_turn(lambda: self._unload(table))

    # What the watcher asks for; nobody waits.

    def changed_tables(self) -> list[str]:
        """Tables whose published version is not the one last acted upon, and refused ones whose pause is over."""
        changed = []
        try:
            published = self._engine.published()
        except Unavailable:
            return []  # Redis will come back; until then what is served goes on
        for name in published:
            history = self.tables.get(name)
            try:
                named: str | None = self._engine.home(name).current(name)
            except Unavailable:
                continue
            except ArtifactError as error:
                named = f"unreadable: {error}"
            retry = history is not None and history.refusal is not None and time.monotonic() >= history.retry_at
            if history is None or history.named != named or retry:
                changed.append(name)
        return changed

    def request(self, table: str) -> None:
        """Queues a reload unless one is waiting already; its outcome is logged."""
        if table not in self._queued:
            self._queued.add(table)
            self._queue.put(lambda: self._reload_quietly(table))

    # The reload thread.

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            job()
            del job  # or its error would keep what it read alive until the next one

    def _free(self) -> None:
        while (leaving := self._leaving.get()) is not None:
            try:
                leaving.finish(Pace(self._engine.config.reload_bandwidth))
            except Exception:  # (the thread outlives it)
                log.exception("a version's memory could not be freed")
            del leaving

    def _in_turn(self, job: Callable[[], Taken]) -> Taken:
        done: Future[Taken] = Future()

        def run() -> None:
            try:
                done.set_result(job())
            except BaseException as error:  # noqa: BLE001 (it is the caller's)
                done.set_exception(error)

        self._queue.put(run)
        return done.result()

    def _reload_quietly(self, table: str) -> None:
        self._queued.discard(table)
        try:
            self._reload(table, "")
        except EmbedserveError:
            pass  # logged and counted where it was refused
        except Exception:
            log.exception("reload failed", extra={"table": table})

    def _reload(self, table: str, version: str) -> Taken:
        history = self.tables.setdefault(check_table_name(table), TableLog())
        wanted = version
        try:
            named = self._named(table)
            history.named = named
            wanted = version or named or self._engine.home(table).open(table).manifest.version
            return self._take_up(table, wanted, history)
        except Exception as error:
            served = self._engine.served.tables.get(table)
            if served is None and isinstance(error, NotFound):
                self.tables.pop(table, None)
                raise
            self._note_refusal(table, wanted, str(error))
            if not isinstance(error, EmbedserveError | OSError):
                raise
            if isinstance(error, OSError):
                raise ArtifactError(f"{table} {wanted}: {error}") from error
            raise
        finally:
            if table in self.tables:
                self.tables[table].loading = ""
                self._tell(table)

    def _named(self, table: str) -> str | None:
        try:
            return self._engine.home(table).current(table)
        except ArtifactError as error:
            self.tables[table].named = f"unreadable: {error}"
            raise

    def _take_up(self, table: str, wanted: str, history: TableLog) -> Taken:
        served = self._engine.served.tables.get(table)
        previous = served.current.name if served else ""
        if wanted == previous:
            history.refusal = None
            return Taken(table, wanted, previous, False)
        begun = time.monotonic()
        already = served.versions.get(wanted) if served else None
        version = already or self._open(table, wanted, served, history)
        with self._engine.changing:
            served = self._engine.served.tables.get(table)  # upserts may have come meanwhile
            overlay = self._engine.newest_overlay(version)
            if overlay is not version.overlay:
                version = version.with_overlay(overlay)
            self._engine.replace(served.led_by(version) if served else ServedTable(table, (version,)))
        try:
            self._ask(table, wanted)
        except Exception as error:
            self._undo(table, wanted, served)
            raise FailedPrecondition(f"{table} {wanted} is refused: it did not answer: {error}") from error
        history.taken += 1
        history.last_reload_s = time.monotonic() - begun
        history.refusal, history.pause_s = None, FIRST_PAUSE_S
        log.info(
            "version is live",
            extra={"table": table, "version": wanted, "previous": previous, "seconds": round(history.last_reload_s, 3)},
        )
        self._let_go_of_oldest(table)
        return Taken(table, wanted, previous, True)

    def _open(self, table: str, wanted: str, served: ServedTable | None, history: TableLog) -> ServedVersion:
        engine, config = self._engine, self._engine.config
        history.loading = f"{wanted} {State.OPENING.value}"
        artifact = engine.home(table).open(table, wanted)
        if served:
            gate.check_figures(artifact.manifest, served.current.manifest, config)
        self._make_room(table, artifact)
        history.loading = f"{wanted} {State.CHECKING.value}"
        if served:
            gate.check_changes(artifact, served.current.artifact, config)
            if artifact.manifest.dim != served.current.dim:
                log.warning(
                    "dim changes from %d to %d",
                    served.current.dim,
                    artifact.manifest.dim,
                    extra={"table": table, "version": wanted},
                )
        del artifact
        version = engine.open_version(table, wanted, Pace(config.reload_bandwidth), check=True)
        history.loading = f"{wanted} {State.WARMING.value}"
        if served:
            warm_like(version, served.current)
        gate.ask(version)
        return version

    def _make_room(self, table: str, artifact: Artifact | RedisVersion) -> None:
        """Both versions fit the budget, if need be after older ones have left. Raises ResourceExhausted."""
        engine, needed = self._engine, self._engine.memory_bytes(artifact)
        while engine.open_bytes + needed > engine.budget_bytes:
            served = engine.served.tables.get(table)
            if served is None or len(served.open) == 1:
                raise ResourceExhausted(
                    f"{table} {artifact.manifest.version} needs {needed:,} bytes beside the {engine.open_bytes:,} of the versions that are open; "
                    f"memory_budget is {engine.budget_bytes:,}"
                )
            self._let_go(table, keep=len(served.open) - 1)

    def _let_go_of_oldest(self, table: str) -> None:
        self._let_go(table, self._engine.config.keep_versions)

    def _let_go(self, table: str, keep: int) -> None:
        with self._engine.changing:
            served = self._engine.served.tables[table]
            leaving = [version.leave() for version in served.open[keep:]]
            self._engine.replace(ServedTable(table, served.open[:keep]))
        for each in leaving:
            self._leaving.put(each)

    def _undo(self, table: str, failed: str, before: ServedTable | None) -> None:
        with self._engine.changing:
            served = self._engine.served.tables[table]
            leaving = [
                version.leave()
                for version in served.open
                if version.name == failed and (before is None or failed not in before.versions)
            ]
            if before is None:
                self._engine.remove(table)
            else:
                front = before.current
                overlay = self._engine.newest_overlay(front)
                back = front if overlay is front.overlay else front.with_overlay(overlay)
                self._engine.replace(before.led_by(back))
            del served
        for each in leaving:
            self._leaving.put(each)
        self.tables[table].rolled_back += 1

    def _rollback(self, table: str, version: str) -> Taken:
        served = self._engine.served.tables.get(table)
        if served is None:
            raise NotFound(f"no table {table[:200]!r}; there is: {', '.join(self._engine.served.tables) or 'none'}")
        if not version and len(served.open) < 2:
            raise FailedPrecondition(f"table {table!r} has no other version open; publish the one you want")
        wanted = version or served.open[1].name
        self._engine.served.resolve(table, wanted)
        taken = self._take_up(table, wanted, self.tables[table])
        self.tables[table].rolled_back += taken.changed
        self._tell(table)
        return taken

    def _unload(self, table: str) -> Taken:
        with self._engine.changing:
            served = self._engine.served.tables.get(table)
            if served is None:
                raise NotFound(f"no table {table[:200]!r}; there is: {', '.join(self._engine.served.tables) or 'none'}")
            leaving = [version.leave() for version in served.open]
            self._engine.remove(table)
        name = served.current.name
        del served
        for each in leaving:
            self._leaving.put(each)
        self._notice(table, False, False)
        log.info("unloaded", extra={"table": table, "version": name})
        return Taken(table, "", name, True)

    def _note_refusal(self, table: str, version: str, reason: str) -> None:
        history = self.tables.setdefault(table, TableLog())
        now = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
        if history.refusal is None or history.refusal.reason != reason:
            log.error("version is not taken: %s", reason, extra={"table": table, "version": version})
        history.refused += 1
        history.refusal = Refusal(version, reason, now)
        history.retry_at = time.monotonic() + history.pause_s
        history.pause_s = min(2 * history.pause_s, LONGEST_PAUSE_S)

    def _tell(self, table: str) -> None:
        served = self._engine.served.tables.get(table)
        history = self.tables[table]
        as_named = served is not None and history.refusal is None and history.named == served.current.name
        self._notice(table, served is not None, as_named)
