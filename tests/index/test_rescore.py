"""Rescoring: the best of each query's candidates, by the table's own rows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from embedserve.index import Filter, Layer, exact_topk, search_topk
from embedserve.quant import Metric
from embedserve.quant.kernels import _native

NONE = np.empty(0, np.int64)


@given(st.data())
def test_rescoring_is_the_exact_search_among_the_candidates(data):
    rng = np.random.default_rng(data.draw(st.integers(0, 10**6)))
    row_type, wide = data.draw(st.sampled_from([(0, False), (0, True), (1, False), (2, False), (3, False)]))
    n, dim, queries = data.draw(st.integers(1, 80)), data.draw(st.integers(1, 40)), data.draw(st.integers(0, 4))
    metric, k, width = data.draw(st.integers(0, 2)), data.draw(st.integers(1, 12)), data.draw(st.integers(0, 30))
    rows = np.empty((n, _native.stride(row_type, wide, dim)), np.uint8)
    values = rng.integers(-3, 4, (n, dim)).astype(np.float32)  # few distinct ones: ties
    _native.encode(values, rows, row_type, wide, 0, 0)
    table = _native.Table(rows, dim, row_type, wide)
    keys = rng.permutation(n).astype(np.int64) if data.draw(st.booleans()) else None
    asked = rng.integers(-2, 3, (queries, dim)).astype(np.float32)
    width = min(width, n)
    candidates = np.array([rng.permutation(n)[:width] for _ in asked], np.int64).reshape(queries, width)
    candidates[rng.random(candidates.shape) < 0.1] = -1
    excluded = [np.unique(rng.integers(0, n, data.draw(st.integers(0, 5)))) for _ in asked]
    dropped = np.unique(rng.integers(0, n, data.draw(st.integers(0, 3))))
    min_score = data.draw(st.none() | st.floats(-5, 5, width=32))
    flat, spans = Filter(excluded).joined()
    positions, scores = np.zeros((queries, k), np.int64), np.zeros((queries, k), np.float32)
    counts, considered = np.zeros(queries, np.int64), np.zeros(queries, np.int64)
    table.rescore(
        asked, metric, keys, candidates, flat, spans, dropped, min_score, positions, scores, counts, considered
    )
    for q in range(queries):
        allow = np.unique(candidates[q][candidates[q] >= 0])
        assert considered[q] == len(np.setdiff1d(allow, np.union1d(excluded[q], dropped)))
        one = Filter([excluded[q]], allow, min_score)
        kind = Metric(["ip", "l2", "cosine"][metric])
        expected, expected_scores, count = exact_topk([Layer(table, keys, dropped)], kind, asked[q : q + 1], k, one)
        assert counts[q] == count[0]
        assert np.array_equal(positions[q, : counts[q]], expected[0, : count[0]])
        assert np.array_equal(scores[q, : counts[q]], expected_scores[0, : count[0]])


def test_candidates_out_of_range_are_refused():
    table = _native.Table(np.zeros((3, 20), np.uint8), 16, 0, False)
    out = np.zeros((1, 1), np.int64), np.zeros((1, 1), np.float32), np.zeros(1, np.int64), np.zeros(1, np.int64)
    for bad in ([[3]], [[0], [1]]):
        with pytest.raises(ValueError):
            table.rescore(
                np.ones((1, 16), np.float32), 0, None, np.array(bad), NONE, np.zeros(2, np.int64), NONE, None, *out
            )


@given(st.integers(0, 10**6), st.integers(1, 40), st.integers(1, 60))
def test_nearly_everything_excluded_is_the_exact_search_with_those_passed_over(seed, n, k):
    """Also over upserted rows, with ties, and with nothing left at all."""
    rng = np.random.default_rng(seed)
    rows = [np.empty((size, _native.stride(0, False, 4)), np.uint8) for size in (n, 5)]
    for each in rows:
        _native.encode(rng.integers(-2, 3, (len(each), 4)).astype(np.float32), each, 0, False, 0, 0)
    dropped = np.unique(rng.integers(0, n, 3))
    over = Layer(_native.Table(rows[1], 4, 0, False), np.arange(100, 105))
    layers = [Layer(_native.Table(rows[0], 4, 0, False), None, dropped), over]
    queries = rng.integers(-2, 3, (3, 4)).astype(np.float32)
    excluded = [np.sort(rng.permutation(n + 5)[: rng.integers(n * 3 // 4 + 1, n + 6)]) for _ in queries]
    for metric in Metric:
        (positions, scores, counts), exact = search_topk(layers, metric, None, queries, k, Filter(excluded))
        expected, expected_scores, expected_counts = exact_topk(layers, metric, queries, k, Filter(excluded))
        assert exact and np.array_equal(counts, expected_counts)
        for q, count in enumerate(counts):
            assert np.array_equal(positions[q, :count], expected[q, :count])
            assert np.array_equal(scores[q, :count], expected_scores[q, :count])
