"""The hash index: every key is found, no other is, in bounded memory."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from embedserve.quant import key_index
from embedserve.quant.errors import SourceError
from embedserve.quant.kernels import _native

int64s = st.integers(-(2**63), 2**63 - 1)


def build(keys, seed=0, chunk=7):
    parts = []
    chunks = lambda: ((i, keys[i : i + chunk]) for i in range(0, len(keys), chunk))  # noqa: E731
    assert key_index.build(len(keys), chunks, seed, lambda part: parts.append(bytes(part)))
    return np.frombuffer(b"".join(parts), np.uint8).copy()


def find(keys, index, ids, seed=0):
    table = _native.Table(np.zeros((len(keys), 8), np.uint8), 4, 0, False, index.copy(), seed)
    out = np.empty(len(ids), np.int64)
    table.find(ids, out)
    return out


@given(st.lists(int64s, unique=True, min_size=1, max_size=300), st.lists(int64s, max_size=40), st.integers(0, 5))
def test_finds_exactly_the_keys_it_was_built_from(keys, others, seed):
    keys = np.array(keys, np.int64)
    index = build(keys, seed)
    assert find(keys, index, keys, seed).tolist() == list(range(len(keys)))
    places = {int(k): i for i, k in enumerate(keys)}
    assert find(keys, index, np.array(others, np.int64), seed).tolist() == [places.get(k, -1) for k in others]


@pytest.mark.parametrize(
    "make",
    [
        np.arange,
        lambda n: np.arange(n) * 2**32,
        lambda n: -np.arange(n) * 1024,
        lambda n: np.random.default_rng(0).integers(-(2**62), 2**62, n),
    ],
)
def test_parts_agree_with_one_pass(make, monkeypatch):
    """Regular keys and random ones; parts of a few buckets carry overflowing keys over their ends."""
    keys = np.unique(np.asarray(make(5000), np.int64))
    whole = build(keys, chunk=1000)
    monkeypatch.setattr(key_index, "PART_BYTES", 40 * 64)
    parts = build(keys, chunk=1000)
    assert find(keys, parts, keys).tolist() == find(keys, whole, keys).tolist() == list(range(len(keys)))
    assert (find(keys, parts, np.random.default_rng(1).integers(2**62, 2**63 - 1, 3000)) == -1).all()


@pytest.mark.parametrize("part_bytes", [1 << 20, 64])
def test_a_duplicate_is_named_with_both_rows(part_bytes, monkeypatch):
    monkeypatch.setattr(key_index, "PART_BYTES", part_bytes)
    keys = np.arange(100, dtype=np.int64)
    keys[71] = 13
    with pytest.raises(SourceError, match="key 13 appears twice, at rows 13 and 71"):
        build(keys)


def test_a_damaged_index_never_reads_outside_the_table():
    keys = np.arange(1000, dtype=np.int64)
    index = build(keys)
    noise = np.random.default_rng(0).integers(0, 256, index.shape, dtype=np.uint8)
    found = find(keys, noise, np.random.default_rng(1).integers(-(2**63), 2**63 - 1, 1000))
    assert ((found >= -1) & (found < 1000)).all()
    index[:] = 255
    assert (find(keys, index, keys) == -1).all()
