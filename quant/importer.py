"""Turns a matrix in a file into a new version: read, quantise, write, measure, in one pass and bounded memory.

The calling thread reads chunks in order, and writes and hashes what worker threads have encoded; the
kernels release the GIL, so every core is busy.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from embedserve.quant import key_index
from embedserve.quant.artifact import MAX_DIM, ArtifactWriter, Manifest, UpsertMark, rows_layout
from embedserve.quant.catalog import Catalog
from embedserve.quant.errors import ArtifactError, InvalidArgument, SourceError
from embedserve.quant.kernels import _native
from embedserve.quant.quality import RowSample
from embedserve.quant.rows import Calibration, Metric, RowFormat, RowType, Scheme
from embedserve.quant.sources import CHUNK_BYTES, StoredArray, key_chunks, to_float32
from embedserve.quant.upsert_log import Place, Upserts, latest

Progress = Callable[[int], None]
MAX_KEY_SEEDS = 8


@dataclass(frozen=True)
class ImportOptions:
    """How rows are stored. nonfinite: refuse NaN and infinity, or store 0 for them and count them."""

    row_type: RowType = RowType.INT8
    scheme: Scheme = Scheme.ASYMMETRIC
    calibration: Calibration = Calibration.MINMAX
    metric: Metric = Metric.IP
    nonfinite: Literal["refuse", "zero"] = "refuse"


@dataclass
class _Chunk:
    first: int
    stored: npt.NDArray[np.uint8]
    report: dict[str, Any]
    zeroed: int


@dataclass
class _Totals:
    squared_error: float = 0.0
    sum_cosine: float = 0.0
    max_error: float = 0.0
    max_abs: float = 0.0
    zeroed: int = 0
    column_sums: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros(1))

    def add(self, chunk: _Chunk) -> None:
        report = chunk.report
        self.squared_error += report["squared_error"]
        self.sum_cosine += report["sum_cosine"]
        self.max_error = max(self.max_error, report["max_error"])
        self.max_abs = max(self.max_abs, report["max_abs"])
        self.zeroed += chunk.zeroed
        self.column_sums = self.column_sums + report["column_sums"]


class _NeedsWideRows(Exception):
    """A row loses too much to an FP16 scale and bias: the table is encoded again with FP32 ones."""


def import_table(
    catalog: Catalog, table: str, source: StoredArray, options: ImportOptions, keys: StoredArray | None = None,
    progress: Progress = lambda rows: None,
) -> Manifest:  # fmt: skip
    """Writes `source` [rows, dim] as a new, unpublished version of `table`.

    `progress` is called with rows done so far (and with fewer again if the table turns out to need wide
    rows). Raises SourceError for values or keys that cannot be stored, EmbedserveError when the disk is
    full. Nothing is left behind on any failure.

    Upserts made until now are folded in: `source` has the last word on the keys it holds, the others' rows
    come behind its own.
    """
    dim = source.shape[1]
    if dim > MAX_DIM:
        raise SourceError(f"{source.path}: dim {dim} is past {MAX_DIM}")
    mark, folded = _upserts_to_fold(catalog, table, keys, dim)
    rows = source.shape[0] + len(folded.keys)
    if keys is not None and rows > key_index.MAX_ROWS:
        raise SourceError(f"{source.path}: {rows} rows with keys; at most {key_index.MAX_ROWS}")
    with catalog.writer(table) as writer:
        wide = False
        while True:
            fmt = RowFormat(options.row_type, wide, dim)
            encoder = _Import(writer, source, keys, folded, options, fmt, progress)
            try:
                described = encoder.run()
                break
            except _NeedsWideRows:
                wide = True
        document = {
            **described, "table": table, "rows": rows, "dim": dim, "row_type": fmt.type, "wide": wide,
            "scheme": options.scheme, "calibration": options.calibration, "metric": options.metric,
            "keys": "positions" if keys is None else "int64", "parent": _current(catalog, table),
            "source": source.path.name, "source_dtype": source.dtype_name, "upserts": mark,
        }  # fmt: skip
        return catalog.commit(writer, table, document)


def _current(catalog: Catalog, table: str) -> str | None:
    try:
        return catalog.current(table)
    except ArtifactError:
        return None  # a damaged CURRENT is no reason not to make the version that replaces it


def _upserts_to_fold(
    catalog: Catalog, table: str, keys: StoredArray | None, dim: int
) -> tuple[UpsertMark | None, Upserts]:
    """The mark of a new version, and the upserts older than it whose keys its source lacks."""
    log = catalog.upsert_log(table)
    mark = log.rotate()
    none = latest([], dim)
    if mark is None or keys is None:
        return mark, none
    read = log.read(Place(), through=mark.through)
    if read.damage:
        raise ArtifactError(f"{read.damage}; mend or remove it, or upserts would be lost")
    upserts = latest(read.batches, dim)
    lacking = np.ones(len(upserts.keys), np.bool_)
    if len(lacking):
        for _, chunk in key_chunks(keys):
            lacking &= ~np.isin(upserts.keys, chunk)
    return mark, Upserts(upserts.keys[lacking], upserts.values[lacking])


class _Import:
    """One attempt to write rows.safetensors in one row format."""

    def __init__(
        self, writer: ArtifactWriter, source: StoredArray, keys: StoredArray | None, folded: Upserts, options: ImportOptions,
        fmt: RowFormat, progress: Progress,
    ) -> None:  # fmt: skip
        self.writer, self.source, self.keys, self.options, self.format = writer, source, keys, options, fmt
        self.folded, self.rows = folded, source.shape[0] + len(folded.keys)
        self.progress = progress
        self.totals = _Totals()
        self.sample = RowSample(self.rows, fmt)

    def run(self) -> dict[str, Any]:
        rows, dim = self.rows, self.source.shape[1]
        header, layout = rows_layout(self.format, rows, self.keys is not None)
        total_bytes = layout["default_row"].offset + layout["default_row"].nbytes
        seed = self._write_keys(header, total_bytes)
        for chunk in self._encoded():
            self._raise_on_bad_values(chunk)
            self.writer.append(chunk.stored)
            self.totals.add(chunk)
            self.progress(chunk.first + len(chunk.stored))
        totals = self.totals
        self.writer.append((totals.column_sums / rows).astype("<f4"))
        quality = {
            "mean_cosine": totals.sum_cosine / rows, "mse": totals.squared_error / (rows * dim),
            "max_error": totals.max_error, "max_abs": totals.max_abs, "nonfinite_zeroed": totals.zeroed,
            **self.sample.recall(self.options.metric),
        }  # fmt: skip
        return {"quality": quality, "key_seed": seed}

    def _write_keys(self, header: bytes, total_bytes: int) -> int:
        """Writes the header and, for a table with its own keys, index and keys. Returns the index's seed."""
        keys = self.keys
        for seed in range(MAX_KEY_SEEDS):
            self.writer.begin_rows(total_bytes)
            self.writer.append(header)
            if keys is None:
                return 0
            if key_index.build(self.rows, self._key_chunks, seed, self.writer.append):
                for _, chunk in self._key_chunks():
                    self.writer.append(chunk)
                return seed
        raise SourceError(f"{keys.path if keys else ''}: no hash seed of {MAX_KEY_SEEDS} spreads these keys")

    def _key_chunks(self) -> Iterator[tuple[int, npt.NDArray[np.int64]]]:
        if self.keys is not None:
            yield from key_chunks(self.keys)
        if len(self.folded.keys):
            yield self.source.shape[0], self.folded.keys

    def _value_chunks(self) -> Iterator[tuple[int, npt.NDArray[np.float32] | None, npt.NDArray[Any] | None]]:
        """(first row, values in FP32, or else as the source has them)."""
        for first, raw in self.source.chunks():
            yield first, None, raw
        step = max(1, CHUNK_BYTES // (4 * self.source.shape[1]))
        for at in range(0, len(self.folded.keys), step):
            yield self.source.shape[0] + at, self.folded.values[at : at + step], None

    def _encoded(self) -> Iterator[_Chunk]:
        """Encoded chunks in order; at most a few are in memory at a time."""
        workers = len(os.sched_getaffinity(0))
        pending: deque[Future[_Chunk]] = deque()
        with ThreadPoolExecutor(workers, thread_name_prefix="encode") as pool:
            chunks = self._value_chunks()
            try:
                for chunk in islice(chunks, workers + 2):
                    pending.append(pool.submit(self._encode, *chunk))
                while pending:
                    done = pending.popleft().result()
                    for chunk in islice(chunks, 1):
                        pending.append(pool.submit(self._encode, *chunk))
                    yield done
            finally:
                for future in pending:
                    future.cancel()

    def _encode(self, first: int, values: npt.NDArray[np.float32] | None, raw: npt.NDArray[Any] | None) -> _Chunk:
        if values is None:
            values = to_float32(self.source, raw)  # type: ignore[arg-type]  # one of the two is there
        zeroed = 0
        if self.options.nonfinite == "zero":
            bad = ~np.isfinite(values)
            zeroed = int(np.count_nonzero(bad))
            if zeroed:
                values = np.where(bad, np.float32(0), values)
        fmt = self.format
        stored = np.empty((len(values), fmt.stride), np.uint8)
        report = _native.encode(
            values, stored, fmt.type.native, fmt.wide, self.options.scheme.native, self.options.calibration.native
        )
        if report["bad_row"] < 0 and report["needs_wide_row"] < 0:
            self.sample.take(first, values, stored)
        elif report["bad_row"] >= 0:
            report["bad_value"] = float(values[report["bad_row"], report["bad_column"]])
        return _Chunk(first, stored, report, zeroed)

    def _raise_on_bad_values(self, chunk: _Chunk) -> None:
        bad, wide = chunk.report["bad_row"], chunk.report["needs_wide_row"]
        if bad >= 0:
            row, column, value = chunk.first + bad, chunk.report["bad_column"], chunk.report["bad_value"]
            where = f"{self.source.path}: key {self._key_at(row)} (row {row}), column {column}"
            if np.isfinite(value):
                raise SourceError(
                    f"{where}: {value:g} does not fit {self.format.type.value} rows; import with --bits 32"
                )
            raise SourceError(f"{where}: is {value}; mend the source, or store 0 for such values with --nonfinite zero")
        if wide >= 0:
            raise _NeedsWideRows

    def _key_at(self, row: int) -> int:
        if self.keys is None:
            return row
        for first, chunk in self._key_chunks():
            if row < first + len(chunk):
                return int(chunk[row - first])
        raise InvalidArgument("row", f"{row} is past the keys")
