"""What a set of tables takes under a configuration, before any of it is loaded: steady, and while a version is reloaded."""

from __future__ import annotations

from dataclasses import dataclass

from embedserve.quant import INDEX_FILE, Artifact, Catalog
from embedserve.quant.redis_catalog import ROWS_A_PAGE
from embedserve.server.cache.memory import machine_bytes
from embedserve.server.config import ServerConfig

# Measured: a page's key, its entry in Redis's dictionary, and what allocation rounds up.
REDIS_BYTES_A_PAGE = 150
PROCESS_BYTES = 80 << 20  # Python, its libraries, threads and buffers; FAISS, where an index needs it, not counted


@dataclass(frozen=True)
class TablePlan:
    """Bytes of one table. ram: of each open version; index: of these, FAISS's; disk: of all kept versions; redis: if published there."""

    table: str
    version: str
    rows: int
    held: str
    ram: int
    index: int
    disk: int
    redis: int
    versions: int

    @property
    def steady(self) -> int:
        return self.ram * self.versions

    @property
    def reloading(self) -> int:
        return self.ram


@dataclass(frozen=True)
class Plan:
    tables: list[TablePlan]
    pool: int
    process: int
    budget: int

    @property
    def steady(self) -> int:
        """RAM with every kept version of every table open."""
        return self.process + self.pool + sum(table.steady for table in self.tables)

    @property
    def reloading(self) -> int:
        """The most while one table at a time is reloaded: the version that is opened comes on top."""
        return self.steady + max((table.reloading for table in self.tables), default=0)

    @property
    def fits(self) -> bool:
        return self.reloading - self.process <= self.budget


def plan(config: ServerConfig, catalog: Catalog) -> Plan:
    """Of the published tables, or of those configured. Raises NotFound, ArtifactError."""
    names = config.tables or [name for name in catalog.tables() if catalog.current(name)]
    tables = [_of(catalog.open(name), config, catalog) for name in names]
    budget = config.memory_budget or machine_bytes() * 9 // 10
    return Plan(tables, config.memory_pool_size, PROCESS_BYTES, budget)


def _of(artifact: Artifact, config: ServerConfig, catalog: Catalog) -> TablePlan:
    manifest = artifact.manifest
    whole = not config.memory_pool_size or manifest.table in config.whole_tables
    index = manifest.files[INDEX_FILE].bytes if INDEX_FILE in manifest.files else 0
    ram = (artifact.rows_entry.bytes if whole else 0) + index
    kept = [v for v in catalog.versions(manifest.table) if v <= manifest.version][-config.keep_versions :]
    disk = sum(catalog.open(manifest.table, version).manifest.total_bytes for version in kept)
    a_row = manifest.format.stride + (8 if manifest.has_keys else 0)
    redis = manifest.rows * a_row + -(-manifest.rows // ROWS_A_PAGE) * REDIS_BYTES_A_PAGE
    held = "whole" if whole else "in the pool"
    return TablePlan(manifest.table, manifest.version, manifest.rows, held, ram, index, disk, redis, len(kept))
