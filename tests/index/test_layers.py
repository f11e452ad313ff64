"""Exact TopK over a version and its upserts answers as over one table that holds them in place."""

from __future__ import annotations

import numpy as np
import reference as ref
from hypothesis import given
from hypothesis import strategies as st

from embedserve.index import Filter, Layer, exact_topk
from embedserve.quant import Metric
from embedserve.quant.kernels import _native


def table_of(values: np.ndarray) -> _native.Table:
    rows = np.empty((len(values), 4 * values.shape[1]), np.uint8)
    _native.encode(values, rows, ref.FP32, False, 0, 0)
    return _native.Table(rows, values.shape[1], ref.FP32, False)


@given(st.data())
def test_layers_equal_a_full_sort(data):
    rng = np.random.default_rng(data.draw(st.integers(0, 10**6)))
    n, new, dim, k = data.draw(st.integers(1, 80)), data.draw(st.integers(1, 40)), 4, data.draw(st.integers(1, 150))
    metric = data.draw(st.sampled_from(list(Metric)))
    keys = rng.permutation(np.arange(-50, n - 50))
    replaced = np.sort(rng.choice(n, min(n, data.draw(st.integers(0, 40))), replace=False))
    over_keys = np.sort(np.concatenate((keys[replaced], np.arange(10**6, 10**6 + new))))
    # Few distinct values, so that ties abound.
    own, over = (rng.integers(-2, 3, (size, dim)).astype(np.float32) for size in (n, len(over_keys)))
    layers = (Layer(table_of(own), keys, replaced), Layer(table_of(over), over_keys))
    all_keys, all_rows = np.concatenate((keys, over_keys)), np.concatenate((own, over))
    there = np.ones(len(all_keys), bool)
    there[replaced] = False

    def some(limit: int) -> np.ndarray:
        return np.sort(
            rng.choice(np.flatnonzero(there), min(there.sum(), data.draw(st.integers(1, limit))), replace=False)
        )

    queries = rng.integers(-2, 3, (3, dim)).astype(np.float32)
    excluded = [some(30) for _ in queries]
    allow = some(60) if data.draw(st.booleans()) else None
    # No cosine of such vectors is 0.497; many are 0.5, but for the last bit.
    min_score = data.draw(st.sampled_from([None, -5.0, 0.0, 0.497 if metric is Metric.COSINE else 0.5]))
    positions, scores, counts = exact_topk(layers, metric, queries, k, Filter(excluded, allow, min_score))
    exact = ref.scores(queries, all_rows, metric.value)
    for q in range(len(queries)):
        passing = [
            p for p in np.flatnonzero(there)
            if p not in excluded[q] and (allow is None or p in allow) and (min_score is None or exact[q, p] >= min_score - 1e-6)
        ]  # fmt: skip
        expected = sorted(passing, key=lambda p: (-np.float32(exact[q, p]), all_keys[p]))[:k]
        assert counts[q] == len(expected)
        np.testing.assert_allclose(scores[q, : counts[q]], exact[q, expected], atol=1e-5)
        if metric is not Metric.COSINE:  # whose scores round, so that ties may part
            assert positions[q, : counts[q]].tolist() == expected
