"""Which tables and versions are served, and from which memory.

The set of versions is one immutable mapping behind one attribute: a request takes it once, and what it took
stays whole until the request is done, whatever is swapped in meanwhile.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from embedserve.quant import Artifact, Catalog, Manifest, Output
from embedserve.quant.errors import ArtifactError, ConfigError, NotFound
from embedserve.quant.kernels import _native
from embedserve.server import _lookup
from embedserve.server.cache.ram import RamTable
from embedserve.server.config import ServerConfig

log = logging.getLogger(__name__)
FP16_MAX = 65_504.0


class ServedVersion:
    """One open version: its manifest, its rows in memory, and what a missing id reads as."""

    def __init__(self, artifact: Artifact, config: ServerConfig) -> None:
        self.artifact = artifact
        self.manifest: Manifest = artifact.manifest
        self.ram = RamTable(artifact, config.huge_pages, config.lock_memory)
        self.table: _native.Table = self.ram.table
        # What every request reads, taken out of the manifest once.
        self.name, self.dim, self.rows = self.manifest.version, self.manifest.dim, self.manifest.rows
        self.row_bytes = tuple(self.table.row_bytes(output) for output in Output)
        self.fits_float16 = self.manifest.quality.max_abs <= FP16_MAX
        default_rows = tuple(encoded_default(artifact, output) for output in Output)
        self.responder = _lookup.Responder(self.table, self.name, default_rows, self.fits_float16)

    def positions(self, ids: bytes | npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Row numbers [n] of ids, -1 where missing."""
        out = np.empty(len(ids) // 8 if isinstance(ids, bytes) else len(ids), np.int64)
        self.table.find(ids, out)
        return out

    def keys_at(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Keys of rows."""
        return positions if self.artifact.keys is None else self.artifact.keys[positions]


def encoded_default(artifact: Artifact, output: Output) -> bytes | None:
    """The default row as `output` returns it; None if the table's row type cannot hold it."""
    values, fmt = artifact.default_row, artifact.manifest.format
    if output is Output.FLOAT32:
        return values.tobytes()
    if output is Output.FLOAT16:
        with np.errstate(over="ignore"):
            return values.astype("<f2").tobytes()
    if output is Output.BFLOAT16:
        row = np.empty((1, 4 * len(values)), np.uint8)
        _native.encode(values[None].copy(), row, 3, False, 0, 0)
        table = _native.Table(row, len(values), 3, False)
        out = np.empty(2 * len(values), np.uint8)
        table.gather(np.zeros(1, np.int64), Output.BFLOAT16, None, out)
        return out.tobytes()
    stored = np.empty((1, fmt.stride), np.uint8)
    manifest = artifact.manifest
    report = _native.encode(
        values[None].copy(), stored, fmt.type.native, fmt.wide, manifest.scheme.native, manifest.calibration.native
    )
    return stored.tobytes() if report["needs_wide_row"] < 0 and report["bad_row"] < 0 else None


@dataclass(frozen=True)
class ServedTable:
    """A table's open versions by name, oldest first."""

    name: str
    current: ServedVersion
    versions: Mapping[str, ServedVersion]


class Engine:
    """Opens a catalog's tables and resolves names to versions."""

    def __init__(self, config: ServerConfig) -> None:
        """Raises ConfigError when there is nothing to serve, ArtifactError when a current version is damaged."""
        self._config = config
        catalog = Catalog(config.root)
        names = config.tables or tuple(name for name in catalog.tables() if catalog.current(name))
        if not names:
            raise ConfigError(
                f"root: no published table in {config.root}; see `embedserve import --publish` and `embedserve publish`"
            )
        self.tables: Mapping[str, ServedTable] = {name: self._open(catalog, name) for name in names}
        self.lookups = _lookup.Lookups(
            {
                name: (table.current.responder, {v: served.responder for v, served in table.versions.items()})
                for name, table in self.tables.items()
            }
        )

    def _open(self, catalog: Catalog, name: str) -> ServedTable:
        current = ServedVersion(catalog.open(name), self._config)
        opened = {current.manifest.version: current}
        older = [v for v in catalog.versions(name) if v != current.manifest.version]
        for version in reversed(older[-(self._config.keep_versions - 1) :] if self._config.keep_versions > 1 else []):
            try:
                opened[version] = ServedVersion(catalog.open(name, version), self._config)
            except ArtifactError as error:
                log.warning("version not kept for pins: %s", error, extra={"table": name, "version": version})
        log.info("serving", extra={"table": name, "version": current.manifest.version, "rows": current.manifest.rows})
        return ServedTable(name, current, dict(sorted(opened.items())))

    def resolve(self, table: str, version: str = "") -> ServedVersion:
        """The version that answers. Raises NotFound, listing what there is."""
        served = self.tables.get(table)
        if served is None:
            raise NotFound(f"no table {table[:200]!r}; there is: {', '.join(self.tables)}")
        if not version:
            return served.current
        pinned = served.versions.get(version)
        if pinned is None:
            raise NotFound(
                f"table {table!r} has no version {version[:200]!r} open; there is: {', '.join(served.versions)}"
            )
        return pinned
