"""Which tiers hold a version's rows, in the order they are asked.

    memory_pool_size not set     ram (the whole table)
    memory_pool_size set         ram (rows in the pool)  ->  disk, the artifact
    table not in the catalog     ram (rows in the pool)  ->  redis

Tables of `whole_tables` are held whole in either case.
"""

from __future__ import annotations

import logging
import mmap
import threading
import weakref
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import xxhash

from embedserve.quant import Artifact, RedisConnection, RedisVersion
from embedserve.quant.errors import ArtifactError, ConfigError
from embedserve.quant.kernels import _native
from embedserve.server import _lookup
from embedserve.server.cache.memory import PIECE_BYTES, Pace, machine_bytes
from embedserve.server.cache.ram import Leaving, RamTable
from embedserve.server.cache.redis import RedisRows

if TYPE_CHECKING:
    from embedserve.server.config import ServerConfig

log = logging.getLogger(__name__)
DISK, REDIS = 3, 4  # fields of TierCounts
COLD_NAMES = {DISK: "disk", REDIS: "redis"}
MOST_FLOORS = 0.8  # of the pool: the rest must be free to move


class CachedTable:
    """One version's rows, some in the pool, all in a colder tier."""

    def __init__(
        self, cached: _lookup.CachedRows, tier: int, artifact: Artifact | None, redis: RedisRows | None = None
    ) -> None:
        self.cached, self.tier, self.redis = cached, tier, redis
        self.resident_bytes = self.memory_bytes = 0  # the pool is not this version's own
        # None: rows lie where the kernels cannot see them.
        self.rows: npt.NDArray[np.uint8] | None = artifact.rows if artifact else None
        self._mappings = [artifact.mapping] if artifact else []
        self._readers = [weakref.ref(artifact.rows)] if artifact else []

    def lookup_rows(self, table: _native.Table, upserts: _native.Table | None) -> _lookup.CachedRows:
        """What Lookup reads, with upserts before all tiers."""
        return self.cached.with_upserts(upserts) if upserts else self.cached

    def leave(self) -> Leaving:
        return Leaving(self._mappings, self._readers)


Held = RamTable | CachedTable


class Tiers:
    """The pool, and what each table is held in."""

    def __init__(self, config: ServerConfig) -> None:
        """Raises ConfigError for floors and ceilings that cannot be kept."""
        self._config = config
        self._pool: _lookup.RowCache | None = None
        self._making = threading.Lock()
        size = config.memory_pool_size
        if size and sum(config.memory_floors.values()) > MOST_FLOORS * size:
            raise ConfigError(
                f"memory_floors: {sum(config.memory_floors.values()):,} bytes together; at most {MOST_FLOORS:.0%} of memory_pool_size "
                f"({size:,}) may be promised"
            )
        for table, ceiling in config.memory_ceilings.items():
            if ceiling < config.memory_floors.get(table, 0):
                raise ConfigError(f"memory_ceilings: {table}: {ceiling:,} is less than its floor")

    def holds_whole(self, artifact: Artifact) -> bool:
        return not self._config.memory_pool_size or artifact.manifest.table in self._config.whole_tables

    def memory_bytes(self, opened: Artifact | RedisVersion) -> int:
        """What a version takes, besides its index, until it leaves."""
        return opened.rows_entry.bytes if isinstance(opened, Artifact) and self.holds_whole(opened) else 0

    @property
    def pool_bytes(self) -> int:
        return self._pool.budget_bytes if self._pool else 0

    def hold(self, artifact: Artifact, pace: Pace, check: bool) -> Held:
        """Raises ArtifactError if `check` finds the rows damaged, ConfigError if memory cannot be had as configured."""
        config = self._config
        if self.holds_whole(artifact):
            return RamTable(artifact, pace, config.huge_pages, config.lock_memory, check)
        if check:
            _check_file(artifact, pace)
        native = artifact.native_table()
        cold = _disk_rows(artifact)
        artifact.mapping.madvise(mmap.MADV_DONTNEED)  # what opening it looked at
        return CachedTable(self._cached(artifact.manifest.table, native, cold, DISK), DISK, artifact)

    def hold_remote(self, version: RedisVersion, connection: RedisConnection) -> CachedTable:
        """A version of which nothing is on this machine. Raises ConfigError."""
        rows, native = RedisRows(version, connection), version.native_table()
        cold = _lookup.python_rows(rows, native.stride)
        return CachedTable(self._cached(version.manifest.table, native, cold, REDIS), REDIS, None, rows)

    def _cached(self, table: str, native: _native.Table, cold: _lookup.ColdSource, tier: int) -> _lookup.CachedRows:
        config = self._config
        floor, ceiling = config.memory_floors.get(table, 0), config.memory_ceilings.get(table, 0)
        pool = self._the_pool(native.stride)
        try:
            return _lookup.CachedRows(native, None, pool, cold, tier, floor, ceiling, config.shadow_check)
        except RuntimeError as error:
            raise ConfigError(str(error)) from None

    def _the_pool(self, usual_row_bytes: int) -> _lookup.RowCache:
        with self._making:
            if self._pool is None:
                size = self._config.memory_pool_size or machine_bytes() // 4
                try:
                    self._pool = _lookup.RowCache(size, self._config.swap_strategy, usual_row_bytes)
                except (ValueError, MemoryError) as error:
                    raise ConfigError(f"memory_pool_size: {size:,}: {error}") from None
                log.info("row cache: %d bytes, %s", size, self._config.swap_strategy)
            return self._pool


def _disk_rows(artifact: Artifact) -> _lookup.ColdSource:
    manifest, places = artifact.manifest, artifact.places
    index = places["key_index"] if manifest.has_keys else None
    try:
        return _lookup.disk_rows(
            str(artifact.rows_path), places["rows"].offset, manifest.rows, manifest.format.stride,
            index.offset if index else -1, index.shape[0] if index else 0, manifest.key_seed,
        )  # fmt: skip
    except RuntimeError as error:
        raise ArtifactError(str(error)) from None


def _check_file(artifact: Artifact, pace: Pace) -> None:
    """Every byte of the rows against its hash, leaving none of them in this process's memory."""
    entry, digest = artifact.rows_entry, xxhash.xxh3_64()
    # Mapped and not allocated: freed to the heap, 4 MB would stay there.
    with mmap.mmap(-1, PIECE_BYTES) as piece, open(artifact.rows_path, "rb", buffering=0) as file:
        while n := file.readinto(piece):
            with memoryview(piece)[:n] as read:
                digest.update(read)
            pace.after(n)
    if entry.xxh3 and digest.hexdigest() != entry.xxh3:
        raise ArtifactError(
            f"{artifact.directory}: its rows are not those that were written (xxh3 {digest.hexdigest()})"
        )
