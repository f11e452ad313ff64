"""Exact top-K: every allowed row is scored, from its stored bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from embedserve.quant import Metric
from embedserve.quant.kernels import _native

Positions = npt.NDArray[np.int64]
Found = tuple[Positions, npt.NDArray[np.float32], Positions]
_NONE: Positions = np.empty(0, np.int64)


@dataclass(frozen=True)
class Filter:
    """Which rows may be answered, by position.

    excluded: one ascending vector a query; allow: ascending distinct positions, or None for all.
    """

    excluded: list[Positions]
    allow: Positions | None = None
    min_score: float | None = None

    def joined(self) -> tuple[Positions, Positions]:
        """All exclusions end to end, and where each query's begin [Q + 1]."""
        spans = np.zeros(len(self.excluded) + 1, np.int64)
        np.cumsum([len(each) for each in self.excluded], out=spans[1:])
        return np.concatenate(self.excluded) if self.excluded else _NONE, spans

    def part(self, first: int, end: int) -> Filter:
        """The filter as rows [first, end) see it, counted from `first`."""
        cut = [each[slice(*np.searchsorted(each, (first, end)))] - first for each in self.excluded]
        allow = self.allow
        if allow is not None:
            allow = allow[slice(*np.searchsorted(allow, (first, end)))] - first
        return Filter(cut, allow, self.min_score)


@dataclass(frozen=True)
class Layer:
    """Some of a version's rows. keys [rows], where the table has its own, decide ties; dropped: ascending positions that
    another layer has newer rows for."""

    table: _native.Table
    keys: Positions | None
    dropped: Positions = field(default_factory=lambda: _NONE)


def exact_topk(
    layers: Sequence[Layer], metric: Metric, queries: npt.NDArray[np.float32], k: int, filter: Filter
) -> Found:
    """Positions [Q, k], scores [Q, k] and counts [Q] of the best rows for queries [Q, dim], best first.

    Positions count through the layers in their order. Entries past a query's count are undefined.
    """
    if len(layers) == 1:
        return _layer_topk(layers[0], metric, queries, k, filter)
    found, first = [], 0
    for layer in layers:
        end = first + layer.table.n_rows
        positions, scores, counts = _layer_topk(layer, metric, queries, k, filter.part(first, end))
        found.append((positions, scores, counts, layer.keys, first))
        first = end
    return merged(found, k, len(queries))


def _layer_topk(layer: Layer, metric: Metric, queries: npt.NDArray[np.float32], k: int, filter: Filter) -> Found:
    n = len(queries)
    k = min(k, layer.table.n_rows if filter.allow is None else max(1, len(filter.allow)))
    positions = np.zeros((n, k), np.int64)
    scores = np.zeros((n, k), np.float32)
    counts = np.zeros(n, np.int64)
    excluded, spans = filter.joined()
    layer.table.topk(
        queries, metric.native, layer.keys, filter.allow, excluded, spans, layer.dropped, filter.min_score, positions, scores, counts
    )  # fmt: skip
    return positions, scores, counts


def merged(
    found: list[tuple[Positions, npt.NDArray[np.float32], Positions, Positions | None, int]], k: int, n_queries: int
) -> Found:
    """The best of what several layers gave: each positions, scores, counts, its keys, and its first position."""
    width = min(k, sum(positions.shape[1] for positions, *_ in found))
    positions, scores = np.zeros((n_queries, width), np.int64), np.zeros((n_queries, width), np.float32)
    counts = np.zeros(n_queries, np.int64)
    for q in range(n_queries):
        at = [p[q, : c[q]] for p, _, c, _, _ in found]
        score = np.concatenate([s[q, : c[q]] for _, s, c, _, _ in found])
        key = np.concatenate([a if keys is None else keys[a] for a, (_, _, _, keys, _) in zip(at, found, strict=True)])
        place = np.concatenate([a + first for a, (*_, first) in zip(at, found, strict=True)])
        best = np.lexsort((key, -score))[:width]
        counts[q] = len(best)
        positions[q, : len(best)], scores[q, : len(best)] = place[best], score[best]
    return positions, scores, counts
