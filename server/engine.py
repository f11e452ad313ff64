"""Which tables and versions are served.

What is served is one immutable snapshot behind one attribute: a request takes it once, and what it took
stays whole until the request is done, whatever is swapped in meanwhile (read-copy-update).
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass

from embedserve.index import SearchThreads
from embedserve.quant import (
    INDEX_FILE,
    Artifact,
    Catalog,
    Place,
    RedisCatalog,
    RedisConnection,
    RedisVersion,
    UpsertLog,
)
from embedserve.quant.errors import ArtifactError, ConfigError, FailedPrecondition, NotFound, Unavailable
from embedserve.server import _lookup
from embedserve.server.cache.memory import Pace, machine_bytes
from embedserve.server.cache.tiers import Tiers
from embedserve.server.config import ServerConfig
from embedserve.server.upserts import extended, open_overlay
from embedserve.server.versions import Overlay, ServedVersion
from embedserve.server.warming import warm_from

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServedTable:
    """A table's open versions, the one that answers first, then those that did before it, the latest first."""

    name: str
    open: tuple[ServedVersion, ...]

    @property
    def current(self) -> ServedVersion:
        return self.open[0]

    @property
    def versions(self) -> Mapping[str, ServedVersion]:
        """By name, oldest first."""
        return {version.name: version for version in sorted(self.open, key=lambda version: version.name)}

    def led_by(self, version: ServedVersion) -> ServedTable:
        """The table with this version in front; one of the same name goes."""
        return ServedTable(self.name, (version, *(each for each in self.open if each.name != version.name)))


class Snapshot:
    """All that is served at one moment."""

    def __init__(self, tables: Mapping[str, ServedTable]) -> None:
        self.tables = tables
        self.lookups = _lookup.Lookups(
            {
                name: (table.current.responder, {v: served.responder for v, served in table.versions.items()})
                for name, table in tables.items()
            }
        )

    def resolve(self, table: str, version: str = "") -> ServedVersion:
        """The version that answers. Raises NotFound, listing what there is."""
        served = self.tables.get(table)
        if served is None:
            raise NotFound(f"no table {table[:200]!r}; there is: {', '.join(self.tables) or 'none'}")
        if not version:
            return served.current
        pinned = served.versions.get(version)
        if pinned is None:
            raise NotFound(
                f"table {table!r} has no version {version[:200]!r} open; there is: {', '.join(served.versions)}"
            )
        return pinned


class Engine:
    """Holds what is served. `served` may be read at any time; it is replaced under `changing` alone."""

    def __init__(self, config: ServerConfig) -> None:
        """Raises ConfigError when there is nothing to serve, NotFound for a configured table that is not there, ArtifactError
        when no table has a version that is whole."""
        self.config = config
        self.catalog = Catalog(config.root) if config.root else None
        self.redis = self._connect() if config.redis else None
        self.changing = threading.RLock()
        self.tiers = Tiers(config)
        self.search_threads = SearchThreads(config.search_threads or len(os.sched_getaffinity(0)))
        self.budget_bytes = config.memory_budget or machine_bytes() * 9 // 10
        try:
            names = self.published()
        except Unavailable as error:
            raise ConfigError(f"redis: {error}") from None
        if not names:
            where = " or ".join([*([str(config.root)] if config.root else []), *(["Redis"] if config.redis else [])])
            raise ConfigError(
                f"root: no published table in {where}; see `embedserve import --publish` and `embedserve publish`"
            )
        # What could not be served at the start, by table: (version, why).
        self.passed_over: dict[str, tuple[str, str]] = {}
        self.served = Snapshot({})
        for name in names:
            self._open(name)
        if not self.served.tables:
            raise ArtifactError("; ".join(why for _, why in self.passed_over.values()))

    def published(self) -> list[str]:
        """The tables to serve: those configured, or else all that are published in the catalog, and in Redis. Raises Unavailable."""
        if self.config.tables:
            return list(self.config.tables)
        homes = [home for home in (self.catalog, self.redis) if home is not None]
        return list(dict.fromkeys(name for home in homes for name in home.tables() if _is_published(home, name)))

    def home(self, table: str) -> Catalog | RedisCatalog:
        """Where a table's versions are: the catalog if that has one, else Redis."""
        if self.catalog is not None and (self.redis is None or self.catalog.versions(table)):
            return self.catalog
        assert self.redis is not None  # config: one of the two is given
        return self.redis

    def upsert_log(self, table: str) -> UpsertLog:
        """Raises FailedPrecondition for a table that has none."""
        home = self.home(table)
        if not isinstance(home, Catalog):
            raise FailedPrecondition(
                f"table {table!r} is served from Redis; upserts are written beside a table's versions in a catalog (--root)"
            )
        return home.upsert_log(table)

    def newest_overlay(self, version: ServedVersion) -> Overlay:
        """What lies over a version by now; its overlay itself where nothing came since."""
        if not isinstance(version.artifact, Artifact):
            return version.overlay
        return extended(version.overlay, self.upsert_log(version.manifest.table))

    def _connect(self) -> RedisCatalog:
        config = self.config
        return RedisCatalog(RedisConnection(config.redis, config.redis_timeout_ms / 1000), config.redis_prefix)

    def replace(self, table: ServedTable) -> None:
        """Serves the table as given, from the next request on."""
        with self.changing:
            self.served = Snapshot({**self.served.tables, table.name: table})

    def remove(self, name: str) -> None:
        with self.changing:
            self.served = Snapshot({each: table for each, table in self.served.tables.items() if each != name})

    @property
    def open_bytes(self) -> int:
        versions = [version for table in self.served.tables.values() for version in table.open]
        return self.tiers.pool_bytes + sum(version.memory_bytes for version in versions)

    def memory_bytes(self, opened: Artifact | RedisVersion) -> int:
        """What a version will take once it is served."""
        index = opened.manifest.files.get(INDEX_FILE) if isinstance(opened, Artifact) else None
        return self.tiers.memory_bytes(opened) + (index.bytes if index else 0)

    def open_version(self, table: str, version: str, pace: Pace, check: bool) -> ServedVersion:
        """Raises ArtifactError, NotFound, FailedPrecondition or Unavailable."""
        opened = self.home(table).open(table, version)
        if isinstance(opened, Artifact):
            overlay = open_overlay(self.upsert_log(table), opened.manifest)
            return ServedVersion.open(opened, overlay, self.tiers, self.search_threads, pace, check)
        assert self.redis is not None
        held = self.tiers.hold_remote(opened, self.redis.connection)
        return ServedVersion(opened, held, Overlay.empty(opened.manifest, Place()))

    def _open(self, name: str) -> None:
        """Serves a table as it was published, or as near to that as its files allow."""
        try:
            current = self._newest_whole(name)
        except (ArtifactError, FailedPrecondition, Unavailable) as error:
            log.error("table cannot be served: %s", error, extra={"table": name})
            self.passed_over[name] = ("", str(error))
            return
        opened = [current]
        if current.searchable and self.config.root:
            warm_from(current, self.config.root / name)
        older = [v for v in self.home(name).versions(name) if v < current.name]
        for version in reversed(older[-(self.config.keep_versions - 1) :] if self.config.keep_versions > 1 else []):
            try:
                opened.append(self.open_version(name, version, Pace(None), check=False))
            except (ArtifactError, FailedPrecondition, Unavailable) as error:
                log.warning("version not kept for pins: %s", error, extra={"table": name, "version": version})
        log.info("serving", extra={"table": name, "version": current.name, "rows": current.manifest.rows})
        self.replace(ServedTable(name, tuple(opened)))

    def _newest_whole(self, name: str) -> ServedVersion:
        """The current version; if its files are damaged or gone, the newest one before it that is whole.

        Raises ArtifactError if there is none, or CURRENT itself cannot be read: a version that was never published
        is not served in its place. Raises NotFound for what was never there.
        """
        published = self.home(name).current(name)
        try:
            return self.open_version(name, "", Pace(None), check=True)
        except (ArtifactError, NotFound) as error:
            if published is None:
                raise
            failure = str(error)
        for version in reversed([v for v in self.home(name).versions(name) if v < published]):
            try:
                whole = self.open_version(name, version, Pace(None), check=True)
            except ArtifactError as error:
                log.error("version is damaged too: %s", error, extra={"table": name, "version": version})
                continue
            log.error(
                "current version cannot be served, an older one is: %s",
                failure,
                extra={"table": name, "version": version},
            )
            self.passed_over[name] = (published, failure)
            return whole
        raise ArtifactError(failure)


def _is_published(home: Catalog | RedisCatalog, name: str) -> bool:
    try:
        return home.current(name) is not None
    except ArtifactError:
        return True  # and damaged, which whoever opens it will say
