"""One open version of a table: its rows in memory, the upserts over them, and what a missing id reads as."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from embedserve.index import ApproximateIndex, Layer, SearchThreads
from embedserve.quant import INDEX_FILE, Artifact, EncodedUpserts, Manifest, Output, Place, RedisVersion
from embedserve.quant import key_index as index_builder
from embedserve.quant.errors import Unavailable
from embedserve.quant.kernels import _native
from embedserve.server import _lookup
from embedserve.server.cache.memory import Pace
from embedserve.server.cache.ram import Leaving
from embedserve.server.cache.redis import RedisRows
from embedserve.server.cache.tiers import CachedTable, Held, Tiers

log = logging.getLogger(__name__)
FP16_MAX = 65_504.0
MAX_KEY_SEEDS = 8


@dataclass(frozen=True)
class Overlay:
    """Upserted rows over a version, immutable: keys int64 [n] ascending, rows uint8 [n, stride].

    place: how far the upsert log has been read into it. Adding rows makes another overlay, in time that
    grows with its size: readers never see a row half written.
    """

    manifest: Manifest
    keys: npt.NDArray[np.int64]
    rows: npt.NDArray[np.uint8]
    max_abs: float
    place: Place
    table: _native.Table | None = field(init=False)  # None when empty

    def __post_init__(self) -> None:
        object.__setattr__(self, "table", self._native_table() if len(self.keys) else None)

    @classmethod
    def empty(cls, manifest: Manifest, place: Place) -> Overlay:
        return cls(manifest, np.empty(0, np.int64), np.empty((0, manifest.format.stride), np.uint8), 0.0, place)

    def with_rows(self, upserts: EncodedUpserts, place: Place) -> Overlay:
        """The overlay with more rows, which replace those of the same keys."""
        if not len(upserts.keys):
            return Overlay(self.manifest, self.keys, self.rows, self.max_abs, place)
        kept = ~np.isin(self.keys, upserts.keys, assume_unique=True)
        keys = np.concatenate((self.keys[kept], upserts.keys))
        rows = np.concatenate((self.rows[kept], upserts.rows))
        order = np.argsort(keys)
        return Overlay(self.manifest, keys[order], rows[order], max(self.max_abs, upserts.max_abs), place)

    def _native_table(self) -> _native.Table:
        fmt, n = self.manifest.format, len(self.keys)
        for seed in range(MAX_KEY_SEEDS):
            parts: list[memoryview] = []
            if index_builder.build(n, lambda: iter([(0, self.keys)]), seed, parts.append):
                index = np.concatenate([np.frombuffer(part, np.uint8) for part in parts])
                return _native.Table(self.rows, fmt.dim, fmt.type.native, fmt.wide, index, seed)
        raise AssertionError("no seed spreads the keys of an overlay")


class ServedVersion:
    """What a request reads. Immutable: upserts make another one over the same memory."""

    def __init__(
        self, artifact: Artifact | RedisVersion, held: Held, overlay: Overlay, index: ApproximateIndex | None = None
    ) -> None:
        self.artifact, self.held, self.overlay, self.index = artifact, held, overlay, index
        self.manifest: Manifest = artifact.manifest
        self.table: _native.Table = artifact.native_table(held.rows, overlay.table)
        self.lookup_rows = held.lookup_rows(self.table, overlay.table)
        # What every request reads, taken out of the manifest once.
        self.name, self.dim = self.manifest.version, self.manifest.dim
        self.rows = self.manifest.rows + len(overlay.keys)
        self.row_bytes = tuple(self.table.row_bytes(output) for output in Output)
        self.max_abs = max(self.manifest.quality.max_abs, overlay.max_abs)
        self.fits_float16 = self.max_abs <= FP16_MAX
        default_rows = tuple(encoded_default(artifact, output) for output in Output)
        self.responder = _lookup.Responder(self.lookup_rows, self.name, default_rows, self.fits_float16)
        self.searchable = isinstance(artifact, Artifact)  # its rows are where the kernels can see them
        self.layers = self._layers()

    @classmethod
    def open(
        cls, artifact: Artifact, overlay: Overlay, tiers: Tiers, threads: SearchThreads, pace: Pace, check: bool
    ) -> ServedVersion:
        """Raises ArtifactError if `check` finds the files damaged, ConfigError if memory cannot be had as configured."""
        held = tiers.hold(artifact, pace, check)
        try:
            index = ApproximateIndex.open(artifact, threads, check)
        except ImportError:
            index = None
            log.warning(
                "TopK is exact, and slower: there is an index, but FAISS is not installed (pip install 'embedserve[cpu]')",
                extra={"table": artifact.manifest.table, "version": artifact.manifest.version},
            )
        return cls(artifact, held, overlay, index)

    @property
    def memory_bytes(self) -> int:
        """What it takes to keep the version in memory, whether of this process's own or in the page cache; without the pool."""
        index = self.manifest.files.get(INDEX_FILE)
        return self.held.memory_bytes + (index.bytes if index else 0)

    @property
    def cached(self) -> _lookup.CachedRows | None:
        """Its part of the pool; None where it is held whole."""
        return self.held.cached if isinstance(self.held, CachedTable) else None

    @property
    def redis(self) -> RedisRows | None:
        return self.held.redis if isinstance(self.held, CachedTable) else None

    def with_overlay(self, overlay: Overlay) -> ServedVersion:
        return ServedVersion(self.artifact, self.held, overlay, self.index)

    def leave(self) -> Leaving:
        return self.held.leave()

    def gather(self, ids: bytes | npt.NDArray[np.int64], output: Output, out: npt.NDArray[Any]) -> bytes | None:
        """Decoded rows of ids into `out`, zeros for those that name none, whose places are returned as packed uint32.

        Raises Unavailable if a row's tier cannot be reached.
        """
        if isinstance(self.lookup_rows, _native.Table):
            return self.lookup_rows.gather(ids, output, None, out)
        missing, unavailable = self.lookup_rows.gather(ids, output, out)
        if unavailable:
            raise Unavailable(
                f"{len(unavailable) // 4} rows of {self.manifest.table!r} are in a tier that cannot be reached now"
            )
        return missing

    def positions(self, ids: bytes | npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Row numbers [n] of ids, -1 where missing; upserted rows count on from the version's own."""
        out = np.empty(len(ids) // 8 if isinstance(ids, bytes) else len(ids), np.int64)
        self.table.find(ids, out)
        return out

    def keys_at(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Keys of rows."""
        own = (
            positions
            if self.artifact.keys is None
            else self.artifact.keys[np.minimum(positions, self.manifest.rows - 1)]
        )
        if not len(self.overlay.keys):
            return own
        upserted = np.maximum(positions - self.manifest.rows, 0)
        return np.where(positions < self.manifest.rows, own, self.overlay.keys[upserted])

    def _layers(self) -> tuple[Layer, ...]:
        """The version's own rows but for those with newer ones, and the upserted rows."""
        own = self.artifact.native_table(self.held.rows)
        if self.overlay.table is None:
            return (Layer(own, self.artifact.keys),)
        replaced = np.empty(len(self.overlay.keys), np.int64)
        own.find(self.overlay.keys, replaced)
        replaced = np.sort(replaced[replaced >= 0])
        return (Layer(own, self.artifact.keys, replaced), Layer(self.overlay.table, self.overlay.keys))


def encoded_default(artifact: Artifact | RedisVersion, output: Output) -> bytes | None:
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
