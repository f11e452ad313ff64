"""TopK: candidates from an index where that pays, every row where it does not.

A version's index chooses `oversample` x k candidates, which the table's own rows rank. Where few rows may be
answered, scoring them all is as quick and misses none; the same goes for a k near the number of rows. Rows
that are excluded take candidates' places, so a search that is left with too few asks for more, and in the
end for all: a filter never shortens an answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from embedserve.index.approximate import ApproximateIndex, Params, Vectors
from embedserve.index.exact import Filter, Found, Layer, exact_topk, merged
from embedserve.quant import Metric

EXACT_SHARE = 4  # candidates past 1/4 of the rows, or fewer than 1/4 of the rows left by filters: all are scored
WIDER = 4
MOST_CANDIDATES = (
    8_000_000  # of all queries of a request, 12 bytes each; past them all rows are scored, which takes no memory
)
AS_TUNED = Params()


def search_topk(
    layers: Sequence[Layer], metric: Metric, index: ApproximateIndex | None, queries: Vectors, k: int, filter: Filter,
    exact: bool = False, params: Params = AS_TUNED,
) -> tuple[Found, bool]:  # fmt: skip
    """Positions [Q, k], scores [Q, k] and counts [Q] of the best rows, best first; and whether every row was scored.

    layers: the version's own rows, which the index is of, then those upserted over them.
    """
    own = layers[0]
    if _leaves_few(own.table.n_rows, filter):
        return _among_few(layers, metric, queries, k, filter), True
    if index is None or exact or not _pays(own, index, queries, k, filter, params):
        return exact_topk(layers, metric, queries, k, filter), True
    n = own.table.n_rows
    parts = [(*_approximate(own, metric, index, queries, k, filter.part(0, n), params), own.keys, 0)]
    first = n
    for layer in layers[1:]:
        end = first + layer.table.n_rows
        parts.append((*exact_topk([layer], metric, queries, k, filter.part(first, end)), layer.keys, first))
        first = end
    return (parts[0][:3] if len(parts) == 1 else merged(parts, k, len(queries))), False


def _leaves_few(n: int, filter: Filter) -> bool:
    """Whether exclusions leave every query so few rows that naming those is quicker than passing over the others."""
    return filter.allow is None and all(EXACT_SHARE * (n - len(each)) <= n for each in filter.excluded)


def _among_few(layers: Sequence[Layer], metric: Metric, queries: Vectors, k: int, filter: Filter) -> Found:
    total, none = sum(layer.table.n_rows for layer in layers), np.empty(0, np.int64)
    width = min(k, total)
    positions, scores = np.zeros((len(queries), width), np.int64), np.zeros((len(queries), width), np.float32)
    counts = np.zeros(len(queries), np.int64)
    for q, excluded in enumerate(filter.excluded):
        left = np.ones(total, np.bool_)
        left[excluded] = False
        one = Filter([none], np.flatnonzero(left), filter.min_score)
        found = _padded(exact_topk(layers, metric, queries[q : q + 1], width, one), width)
        positions[q], scores[q], counts[q] = (each[0] for each in found)
    return positions, scores, counts


def _pays(own: Layer, index: ApproximateIndex, queries: Vectors, k: int, filter: Filter, params: Params) -> bool:
    n = own.table.n_rows
    left_out = max((len(each) for each in filter.excluded), default=0) + len(own.dropped)  # queries may differ in this
    wanted = k * (params.oversample or index.figures.oversample)
    return (
        filter.allow is None
        and EXACT_SHARE * wanted < n
        and wanted * len(queries) <= MOST_CANDIDATES
        and EXACT_SHARE * (n - left_out) > n
        and bool(queries.any(axis=1).all())  # to a zero vector all rows are alike, and the smallest ids are the answer
    )


def _approximate(
    own: Layer, metric: Metric, index: ApproximateIndex, queries: Vectors, k: int, filter: Filter, params: Params
) -> Found:
    n, n_queries = own.table.n_rows, len(queries)
    excluded = np.array([len(each) for each in filter.excluded]) + len(own.dropped)
    wanted = k * (params.oversample or index.figures.oversample)
    # Exclusions are of what a user has seen, and that is what the index finds first.
    width = wanted + min(int(excluded.max(initial=0)), wanted)
    positions, scores = np.zeros((n_queries, k), np.int64), np.zeros((n_queries, k), np.float32)
    counts = np.zeros(n_queries, np.int64)
    todo = np.arange(n_queries)
    while len(todo):
        part = Filter([filter.excluded[q] for q in todo], None, filter.min_score)
        if EXACT_SHARE * width >= n or width * len(todo) > 2 * MOST_CANDIDATES:
            positions[todo], scores[todo], counts[todo] = _padded(exact_topk([own], metric, queries[todo], k, part), k)
            break
        candidates = index.candidates(queries[todo], width, params)
        found = _rescored(own, metric, queries[todo], candidates, k, part)
        positions[todo], scores[todo], counts[todo], considered = found
        returned = (candidates >= 0).sum(axis=1)
        enough = np.minimum(k, n - excluded[todo])
        starved = (considered < enough) | ((returned == width) & (2 * considered < wanted) & (excluded[todo] > 0))
        todo = todo[starved]
        width *= WIDER
        params = replace(params, nprobe=WIDER * (params.nprobe or index.figures.nprobe))
    return positions, scores, counts


def _rescored(
    own: Layer, metric: Metric, queries: Vectors, candidates: npt.NDArray[np.int64], k: int, filter: Filter
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    n = len(queries)
    positions, scores = np.zeros((n, k), np.int64), np.zeros((n, k), np.float32)
    counts, considered = np.zeros(n, np.int64), np.zeros(n, np.int64)
    excluded, spans = filter.joined()
    own.table.rescore(
        queries, metric.native, own.keys, candidates, excluded, spans, own.dropped, filter.min_score, positions, scores, counts, considered
    )  # fmt: skip
    return positions, scores, counts, considered


def _padded(found: Found, k: int) -> Found:
    positions, scores, counts = found
    more = ((0, 0), (0, k - positions.shape[1]))
    return np.pad(positions, more), np.pad(scores, more), counts
