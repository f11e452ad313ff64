"""What a server does every second, off the requests' path: notes what was counted, looks after the pool, and tells health
of a tier that is gone."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from embedserve.server.engine import Engine
from embedserve.server.stats import MethodStats, Windows
from embedserve.server.versions import ServedVersion
from embedserve.server.warming import save_hot_keys

log = logging.getLogger(__name__)
EVERY_S = 1.0
SAVE_EVERY_S = 60.0


@dataclass
class ShadowCounts:
    compared: int = 0
    differing: int = 0


class Upkeep:
    """One thread; `start`, then `stop` once, which writes the hot keys down a last time."""

    def __init__(
        self, engine: Engine, stats: Mapping[str, MethodStats], available: Callable[[str, bool], None]
    ) -> None:
        """available(table, yes) hears, if `health_needs_redis` is set, when a table's rows can be had no more, or again."""
        self._engine, self._available = engine, available
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="upkeep", daemon=True)
        self._told: dict[str, bool] = {}
        self.shadow: dict[str, ShadowCounts] = {}
        self.windows = Windows(stats)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()
        self._save()

    def _work(self) -> None:
        saved = time.monotonic()
        while not self._stop.wait(EVERY_S):
            try:
                self.windows.note()
                for version in self._cached():
                    self._compare(version)
                    self._tell(version)
                if time.monotonic() - saved > SAVE_EVERY_S:
                    saved = time.monotonic()
                    self._save()
            except Exception:  # (the thread outlives it)
                log.exception("upkeep of the tiers failed")

    def _cached(self) -> list[ServedVersion]:
        versions = [table.current for table in self._engine.served.tables.values()]
        return [version for version in versions if version.cached is not None]

    def _compare(self, version: ServedVersion) -> None:
        if not self._engine.config.shadow_check or version.cached is None:
            return
        compared, differing = version.cached.check_samples()
        counts = self.shadow.setdefault(version.manifest.table, ShadowCounts())
        counts.compared += compared
        counts.differing += len(differing)
        if differing:
            log.error(
                "cached rows were not those of the colder tier, and are dropped: keys %s%s",
                ", ".join(map(str, differing[:10])), " …" if len(differing) > 10 else "",
                extra={"table": version.manifest.table, "version": version.name},
            )  # fmt: skip

    def _tell(self, version: ServedVersion) -> None:
        if not self._engine.config.health_needs_redis or version.redis is None:
            return
        table, well = version.manifest.table, version.redis.state == "closed"
        if self._told.get(table, True) != well:
            self._told[table] = well
            self._available(table, well)

    def _save(self) -> None:
        root = self._engine.config.root
        for version in self._cached() if root else ():
            if version.redis is None and root:
                save_hot_keys(version, root / version.manifest.table)
