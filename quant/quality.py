"""Recall of stored rows against their source, on a sample taken while importing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from embedserve.quant.kernels import _native
from embedserve.quant.rows import Metric, RowFormat

SAMPLE_ROWS = 20_000
SAMPLE_VALUES = 8_000_000  # at most 32 MB of FP32
QUERIES = 200
RECALL_K = 10


@dataclass
class RowSample:
    """Up to SAMPLE_ROWS rows, spread over the table at random: their source values and stored bytes."""

    n_rows: int
    format: RowFormat
    positions: npt.NDArray[np.int64] = field(init=False)
    _values: dict[int, npt.NDArray[np.float32]] = field(default_factory=dict)
    _stored: dict[int, npt.NDArray[np.uint8]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        wanted = min(self.n_rows, SAMPLE_ROWS, max(1, SAMPLE_VALUES // self.format.dim))
        generator = np.random.default_rng(0)
        if wanted == self.n_rows:
            self.positions = np.arange(wanted)
        else:
            self.positions = np.unique(generator.integers(0, self.n_rows, wanted))

    def take(self, first: int, values: npt.NDArray[np.float32], stored: npt.NDArray[np.uint8]) -> None:
        """Keeps the sampled rows of a chunk that begins at row `first`."""
        lo, hi = np.searchsorted(self.positions, (first, first + len(values)))
        if lo < hi:
            chosen = self.positions[lo:hi] - first
            self._values[first], self._stored[first] = values[chosen], stored[chosen]

    def recall(self, metric: Metric) -> dict[str, Any]:
        """The manifest's recall figures."""
        values = np.concatenate([self._values[first] for first in sorted(self._values)])
        stored = np.concatenate([self._stored[first] for first in sorted(self._stored)])
        if len(values) <= RECALL_K:
            return {}
        queries = np.random.default_rng(1).permutation(len(values))[:QUERIES].astype(np.int64)
        table = _native.Table(stored, self.format.dim, self.format.type.native, self.format.wide)
        recall = recall_at_k(values, table, values[queries], metric, RECALL_K, own=queries)
        return {"recall_at_10": recall, "recall_queries": len(queries), "recall_rows": len(values)}


def exact_scores(
    queries: npt.NDArray[np.float32], values: npt.NDArray[np.float32], metric: Metric
) -> npt.NDArray[np.float32]:
    """FP32 scores [Q, rows] of unquantised rows."""
    scores = queries @ values.T
    if metric is Metric.L2:
        return np.asarray(2 * scores - np.square(values).sum(1)[None, :] - np.square(queries).sum(1)[:, None])
    if metric is Metric.COSINE:
        norms = np.linalg.norm(queries, axis=1)[:, None] * np.linalg.norm(values, axis=1)[None, :]
        return np.asarray(np.divide(scores, norms, out=np.zeros_like(scores), where=norms > 0))
    return np.asarray(scores)


def native_topk(
    table: _native.Table,
    queries: npt.NDArray[np.float32],
    metric: Metric,
    k: int,
    own: npt.NDArray[np.int64] | None = None,
) -> npt.NDArray[np.int64]:
    """Positions [Q, k] of the best stored rows, each query's own row left out when `own` [Q] is given."""
    n = len(queries)
    positions, scores, counts = np.zeros((n, k), np.int64), np.zeros((n, k), np.float32), np.zeros(n, np.int64)
    excluded = np.empty(0, np.int64) if own is None else own
    spans = np.zeros(n + 1, np.int64) if own is None else np.arange(n + 1)
    none = np.empty(0, np.int64)
    table.topk(
        np.ascontiguousarray(queries), metric.native, None, None, excluded, spans, none, None, positions, scores, counts
    )
    return positions


def recall_at_k(
    values: npt.NDArray[np.float32], table: _native.Table, queries: npt.NDArray[np.float32], metric: Metric, k: int,
    own: npt.NDArray[np.int64] | None = None,
) -> float:  # fmt: skip
    """Mean share of the stored rows' top k whose source score is among the source's k best (ties count)."""
    found = native_topk(table, queries, metric, k, own)
    hits = 0.0
    for lo in range(0, len(queries), 50):
        scores = exact_scores(queries[lo : lo + 50], values, metric)
        if own is not None:
            scores[np.arange(len(scores)), own[lo : lo + 50]] = -np.inf
        least = np.partition(scores, -k, axis=1)[:, -k]
        hits += float((np.take_along_axis(scores, found[lo : lo + 50], axis=1) >= least[:, None]).sum())
    return hits / (len(queries) * k)
