"""A table with upserted rows over it answers as one that holds them in place."""

from __future__ import annotations

import numpy as np
import pytest
import reference as ref
from hypothesis import given
from hypothesis import strategies as st

from embedserve.quant import key_index
from embedserve.quant.kernels import _native

FORMATS = [(ref.INT8, False), (ref.INT8, True), (ref.INT4, False), (ref.FP16, False), (ref.FP32, False)]
OUTPUTS = range(4)


def index_of(keys: np.ndarray) -> np.ndarray:
    parts: list[memoryview] = []
    assert key_index.build(len(keys), lambda: iter([(0, keys)]), 0, parts.append)
    return np.concatenate([np.frombuffer(part, np.uint8) for part in parts])


def rows_of(rng: np.random.Generator, n: int, dim: int, row_type: int, wide: bool) -> np.ndarray:
    values = rng.standard_normal((n, dim)).astype(np.float16).astype(np.float32)
    rows = np.empty((n, _native.stride(row_type, wide, dim)), np.uint8)
    _native.encode(values, rows, row_type, wide, 0, 0)
    return rows


class Pair:
    """`layered`: some rows, and newer ones over them. `merged`: one table that says the same."""

    def __init__(
        self, seed: int, row_type: int, wide: bool, dim: int, keyed: bool, n: int, replaced: int, new: int
    ) -> None:
        rng = np.random.default_rng(seed)
        shape = (dim, row_type, wide)
        own = rng.choice(np.arange(-(10**6), 10**6), n, replace=False) if keyed else np.arange(n)
        places = rng.choice(n, min(replaced, n), replace=False)
        fresh = np.arange(2 * 10**6, 2 * 10**6 + (new if keyed else 0))
        self.upserted = rng.permutation(np.concatenate((own[places], fresh)))
        rows, over = rows_of(rng, n, *shape), rows_of(rng, len(self.upserted), *shape)
        self.own, self.keys = own, np.concatenate((own, fresh))
        merged = np.concatenate((rows, np.zeros((len(fresh), rows.shape[1]), np.uint8)))
        where = {int(key): i for i, key in enumerate(self.keys)}
        for key, row in zip(self.upserted.tolist(), over, strict=True):
            merged[where[key]] = row
        overlay = _native.Table(over, *shape, index_of(self.upserted), 0) if len(self.upserted) else None
        self.layered = _native.Table(rows, *shape, index_of(own) if keyed else None, 0, upserts=overlay)
        self.merged = _native.Table(merged, *shape, index_of(self.keys) if keyed else None, 0)
        self.rng, self.dim = rng, dim

    def ids(self, n: int) -> np.ndarray:
        """Known ones, upserted ones, unknown ones, again and again."""
        pool = np.concatenate((self.keys, self.upserted, [-1, -(2**63), 2**63 - 1, 10**7]))
        return self.rng.choice(pool, n).astype(np.int64)


shapes = st.tuples(
    st.integers(0, 10**6), st.sampled_from(FORMATS), st.sampled_from([1, 3, 16, 33, 64]), st.booleans(),
    st.integers(1, 60), st.integers(0, 60), st.integers(0, 40),
)  # fmt: skip


def pair(shape: tuple) -> Pair:
    seed, (row_type, wide), dim, keyed, n, replaced, new = shape
    return Pair(seed, row_type, wide, dim, keyed, n, replaced, new)


@given(shape=shapes, n=st.sampled_from([0, 1, 2, 17, 500, 20_000]), output=st.sampled_from(OUTPUTS), fill=st.booleans())
def test_gather(shape, n, output, fill):
    tables = pair(shape)
    misaligned, size = b"\0" + tables.ids(n).tobytes(), tables.layered.row_bytes(output)
    misaligned = np.frombuffer(misaligned, np.uint8)[1:]
    assert size == tables.merged.row_bytes(output)
    default = tables.rng.integers(0, 256, size).astype(np.uint8) if fill else None
    outs = [np.full(n * size, 0xAA, np.uint8) for _ in range(2)]
    missing = [
        t.gather(misaligned, output, default, out) for t, out in zip((tables.layered, tables.merged), outs, strict=True)
    ]
    assert missing[0] == missing[1] and np.array_equal(*outs)


@given(shape=shapes, data=st.data(), output=st.sampled_from([0, 1, 2]), mean=st.booleans(), fill=st.booleans())
def test_pool(shape, data, output, mean, fill):
    tables = pair(shape)
    n = data.draw(st.sampled_from([0, 1, 30, 2000]))
    ids, bags = tables.ids(n), data.draw(st.integers(1, 9))
    offsets = np.sort(np.concatenate(([0], tables.rng.integers(0, n + 1, bags - 1)))).astype(np.uint32)
    weights = tables.rng.uniform(0.5, 2, n).astype(np.float32) if data.draw(st.booleans()) else None
    default = tables.rng.standard_normal(tables.dim).astype(np.float32) if fill else None
    outs = [np.full(bags * tables.dim * (4 if output == 0 else 2), 0xAA, np.uint8) for _ in range(2)]
    missing = [
        t.pool(ids, offsets, weights, mean, output, default, out)
        for t, out in zip((tables.layered, tables.merged), outs, strict=True)
    ]
    assert missing[0] == missing[1] and np.array_equal(*outs)


@given(shape=shapes)
def test_positions_of_upserted_rows_count_on_from_the_tables_own(shape):
    tables = pair(shape)
    ids = tables.ids(300)
    own = {int(key): i for i, key in enumerate(tables.own)}
    over = {int(key): len(own) + i for i, key in enumerate(tables.upserted)}
    out = np.empty(len(ids), np.int64)
    tables.layered.find(ids, out)
    assert out.tolist() == [over.get(key, own.get(key, -1)) for key in ids.tolist()]


def test_an_overlay_of_another_format_is_refused():
    rng = np.random.default_rng(0)
    keys = np.arange(4)
    overlay = _native.Table(rows_of(rng, 4, 8, ref.INT8, False), 8, ref.INT8, False, index_of(keys), 0)
    for dim, row_type, wide in ((9, ref.INT8, False), (8, ref.INT4, False), (8, ref.INT8, True)):
        with pytest.raises(ValueError, match="upserts"):
            _native.Table(rows_of(rng, 4, dim, row_type, wide), dim, row_type, wide, upserts=overlay)
