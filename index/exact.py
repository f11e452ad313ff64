"""Exact top-K: every allowed row is scored, from its stored bytes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from embedserve.quant import Metric
from embedserve.quant.kernels import _native


@dataclass(frozen=True)
class Filter:
    """Which rows may be answered, by position.

    excluded: one ascending vector a query; allow: ascending distinct positions, or None for all.
    """

    excluded: list[npt.NDArray[np.int64]]
    allow: npt.NDArray[np.int64] | None = None
    min_score: float | None = None


def exact_topk(
    table: _native.Table,
    keys: npt.NDArray[np.int64] | None,
    metric: Metric,
    queries: npt.NDArray[np.float32],
    k: int,
    filter: Filter,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """Positions [Q, k], scores [Q, k] and counts [Q] of the best rows for queries [Q, dim], best first.

    `keys` [rows], where the table has its own, decide ties; entries past a query's count are undefined.
    """
    n = len(queries)
    k = min(k, table.n_rows if filter.allow is None else max(1, len(filter.allow)))
    positions = np.zeros((n, k), np.int64)
    scores = np.zeros((n, k), np.float32)
    counts = np.zeros(n, np.int64)
    spans = np.zeros(n + 1, np.int64)
    np.cumsum([len(e) for e in filter.excluded], out=spans[1:])
    excluded = np.concatenate(filter.excluded) if filter.excluded else np.empty(0, np.int64)
    table.topk(queries, metric.native, keys, filter.allow, excluded, spans, filter.min_score, positions, scores, counts)
    return positions, scores, counts
