"""Folds a table's upserts into a new version, row for row: what is not upserted keeps its bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from embedserve.quant import key_index
from embedserve.quant.artifact import Artifact, ArtifactWriter, Manifest, rows_layout
from embedserve.quant.catalog import Catalog
from embedserve.quant.errors import ArtifactError, EmbedserveError, FailedPrecondition, InvalidArgument, SourceError
from embedserve.quant.kernels import _native
from embedserve.quant.rows import Output
from embedserve.quant.upsert_log import Upserts, latest

CHUNK_BYTES = 8 << 20
MAX_KEY_SEEDS = 8
Keys = npt.NDArray[np.int64]
Rows = npt.NDArray[np.uint8]


class UnstorableRow(InvalidArgument):
    """A row that the table's row type cannot hold."""

    def __init__(self, key: int, message: str) -> None:
        super().__init__("values", f"key {key}{message}")
        self.key = key


@dataclass(frozen=True)
class EncodedUpserts:
    """Upserts as rows of a table's own format: keys int64 [n], distinct, ascending; rows uint8 [n, stride]."""

    keys: Keys
    rows: Rows
    max_abs: float


def encode_upserts(manifest: Manifest, upserts: Upserts) -> EncodedUpserts:
    """Quantises rows as the table's are. Raises UnstorableRow for NaN, infinity or a value that those cannot hold."""
    fmt = manifest.format
    rows = np.empty((len(upserts.keys), fmt.stride), np.uint8)
    if not len(rows):
        return EncodedUpserts(upserts.keys, rows, 0.0)
    report = _native.encode(
        upserts.values, rows, fmt.type.native, fmt.wide, manifest.scheme.native, manifest.calibration.native
    )
    bad, wide = report["bad_row"], report["needs_wide_row"]
    if bad >= 0:
        value, column = float(upserts.values[bad, report["bad_column"]]), report["bad_column"]
        held = f"does not fit {fmt.type.value} rows" if np.isfinite(value) else "must be finite"
        raise UnstorableRow(int(upserts.keys[bad]), f", column {column}: {value:g} {held}")
    if wide >= 0:
        reason = (
            f": its range does not fit the FP16 scale and bias of {manifest.table!r}'s rows; import it with the others"
        )
        raise UnstorableRow(int(upserts.keys[wide]), reason)
    return EncodedUpserts(upserts.keys, rows, float(report["max_abs"]))


def fold_upserts(catalog: Catalog, table: str, progress: Callable[[int], None] = lambda rows: None) -> Manifest:
    """Writes the current version with all upserts in place as a new, unpublished one; quality figures stay as they were.

    Raises FailedPrecondition if there are none, ArtifactError if the log is damaged before its end.
    """
    base = catalog.open(table)
    log = catalog.upsert_log(table)
    mark = log.rotate()
    read = log.read(log.begin(base.manifest.upserts), through=mark.through if mark else None)
    if read.damage:
        raise ArtifactError(f"{read.damage}; mend or remove it, or upserts would be lost")
    upserts = encode_upserts(base.manifest, latest(read.batches, base.manifest.dim))
    if not len(upserts.keys):
        raise FailedPrecondition(f"table {table!r} has no upserts over its current version")
    with catalog.writer(table) as writer:
        described = _Fold(base, upserts, writer, progress).run()
        document = base.manifest.model_dump(
            mode="json", by_alias=True, exclude={"files", "created", "version", "index"}
        )
        return catalog.commit(
            writer, table, {**document, **described, "parent": base.manifest.version, "upserts": mark}
        )


class _Fold:
    def __init__(
        self, base: Artifact, upserts: EncodedUpserts, writer: ArtifactWriter, progress: Callable[[int], None]
    ) -> None:
        self._base, self._writer, self._progress = base, writer, progress
        positions = np.empty(len(upserts.keys), np.int64)
        base.native_table().find(upserts.keys, positions)
        if base.keys is None and (positions < 0).any():
            raise EmbedserveError(
                f"table {base.manifest.table!r} has an upsert of a key that is not one of its positions"
            )
        there = np.flatnonzero(positions >= 0)
        there = there[np.argsort(positions[there])]
        self._places, self._replacements = positions[there], upserts.rows[there]
        self._new_keys, self._new_rows = upserts.keys[positions < 0], upserts.rows[positions < 0]
        self._rows = base.manifest.rows + len(self._new_keys)
        self._max_abs = max(base.manifest.quality.max_abs, upserts.max_abs)

    def run(self) -> dict[str, object]:
        manifest = self._base.manifest
        header, layout = rows_layout(manifest.format, self._rows, manifest.has_keys)
        seed = self._write_keys(header, layout["default_row"].offset + layout["default_row"].nbytes)
        for first, rows in self._row_chunks():
            self._writer.append(rows)
            self._progress(first + len(rows))
        self._writer.append(self._default_row())
        quality = {**manifest.quality.model_dump(), "max_abs": self._max_abs}
        return {"rows": self._rows, "key_seed": seed, "quality": quality}

    def _write_keys(self, header: bytes, total_bytes: int) -> int:
        for seed in range(MAX_KEY_SEEDS):
            self._writer.begin_rows(total_bytes)
            self._writer.append(header)
            if self._base.keys is None:
                return 0
            if key_index.build(self._rows, self._key_chunks, seed, self._writer.append):
                for _, keys in self._key_chunks():
                    self._writer.append(keys)
                return seed
        raise SourceError(f"no hash seed of {MAX_KEY_SEEDS} spreads these keys")

    def _key_chunks(self) -> Iterator[tuple[int, Keys]]:
        assert self._base.keys is not None
        step = CHUNK_BYTES // 8
        for first in range(0, len(self._base.keys), step):
            yield first, self._base.keys[first : first + step]
        if len(self._new_keys):
            yield len(self._base.keys), self._new_keys

    def _row_chunks(self) -> Iterator[tuple[int, Rows]]:
        step = max(1, CHUNK_BYTES // self._base.rows.shape[1])
        for first in range(0, len(self._base.rows), step):
            rows = self._base.rows[first : first + step]
            lo, hi = np.searchsorted(self._places, (first, first + len(rows)))
            if lo < hi:
                rows = rows.copy()
                rows[self._places[lo:hi] - first] = self._replacements[lo:hi]
            yield first, rows
        if len(self._new_rows):
            yield len(self._base.rows), self._new_rows

    def _default_row(self) -> npt.NDArray[np.float32]:
        """The mean of all rows: the base's, moved by what was replaced and what came."""
        old, n = self._base.default_row.astype(np.float64), len(self._base.rows)
        total = old * n - self._sum(self._base.rows[self._places])
        total += self._sum(self._replacements) + self._sum(self._new_rows)
        return np.asarray(total / self._rows, "<f4")

    def _sum(self, rows: Rows) -> npt.NDArray[np.float64]:
        fmt = self._base.manifest.format
        values = np.empty((len(rows), fmt.dim), np.float32)
        if len(rows):
            table = _native.Table(np.ascontiguousarray(rows), fmt.dim, fmt.type.native, fmt.wide)
            table.gather(np.arange(len(rows)), Output.FLOAT32, None, values)
        return np.asarray(values.sum(axis=0, dtype=np.float64))
