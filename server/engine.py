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
from embedserve.quant import INDEX_FILE, Artifact, Catalog
from embedserve.quant.errors import ArtifactError, ConfigError, NotFound
from embedserve.server import _lookup
from embedserve.server.cache.memory import Pace, machine_bytes
from embedserve.server.cache.tiers import Tiers
from embedserve.server.config import ServerConfig
from embedserve.server.upserts import open_overlay
from embedserve.server.versions import ServedVersion

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
        self.catalog = Catalog(config.root)
        self.changing = threading.RLock()
        self.tiers = Tiers(config)
        self.search_threads = SearchThreads(config.search_threads or len(os.sched_getaffinity(0)))
        self.budget_bytes = config.memory_budget or machine_bytes() * 9 // 10
        names = self.published()
        if not names:
            raise ConfigError(
                f"root: no published table in {config.root}; see `embedserve import --publish` and `embedserve publish`"
            )
        # What could not be served at the start, by table: (version, why).
        self.passed_over: dict[str, tuple[str, str]] = {}
        self.served = Snapshot({})
        for name in names:
            self._open(name)
        if not self.served.tables:
            raise ArtifactError("; ".join(why for _, why in self.passed_over.values()))

    def published(self) -> list[str]:
        """The tables to serve: those configured, or else all that the catalog has published."""
        return list(self.config.tables) or [name for name in self.catalog.tables() if self._is_published(name)]

    def _is_published(self, name: str) -> bool:
        try:
            return self.catalog.current(name) is not None
        except ArtifactError:
            return True  # and damaged, which whoever opens it will say

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

    def memory_bytes(self, artifact: Artifact) -> int:
        """What a version will take once it is open."""
        index = artifact.manifest.files.get(INDEX_FILE)
        return self.tiers.memory_bytes(artifact) + (index.bytes if index else 0)

    def open_version(self, table: str, version: str, pace: Pace, check: bool) -> ServedVersion:
        """Raises ArtifactError or NotFound."""
        artifact = self.catalog.open(table, version)
        overlay = open_overlay(self.catalog.upsert_log(table), artifact.manifest)
        return ServedVersion.open(artifact, overlay, self.tiers, self.search_threads, pace, check)

    def _open(self, name: str) -> None:
        """Serves a table as it was published, or as near to that as its files allow."""
        try:
            current = self._newest_whole(name)
        except ArtifactError as error:
            log.error("table cannot be served: %s", error, extra={"table": name})
            self.passed_over[name] = ("", str(error))
            return
        opened = [current]
        older = [v for v in self.catalog.versions(name) if v < current.name]
        for version in reversed(older[-(self.config.keep_versions - 1) :] if self.config.keep_versions > 1 else []):
            try:
                opened.append(self.open_version(name, version, Pace(None), check=False))
            except ArtifactError as error:
                log.warning("version not kept for pins: %s", error, extra={"table": name, "version": version})
        log.info("serving", extra={"table": name, "version": current.name, "rows": current.manifest.rows})
        self.replace(ServedTable(name, tuple(opened)))

    def _newest_whole(self, name: str) -> ServedVersion:
        """The current version; if its files are damaged or gone, the newest one before it that is whole.

        Raises ArtifactError if there is none, or CURRENT itself cannot be read: a version that was never published
        is not served in its place. Raises NotFound for what was never there.
        """
        published = self.catalog.current(name)
        try:
            return self.open_version(name, "", Pace(None), check=True)
        except (ArtifactError, NotFound) as error:
            if published is None:
                raise
            failure = str(error)
        for version in reversed([v for v in self.catalog.versions(name) if v < published]):
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
