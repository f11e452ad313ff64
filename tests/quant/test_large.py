"""Tables past 2^31 bytes and 2^31 elements, on sparse memory: offsets are 64-bit everywhere."""

from __future__ import annotations

import mmap

import numpy as np
import pytest
import reference as ref

from embedserve.quant.kernels import _native

MAP_NORESERVE = 0x4000  # Linux; in the mmap module from Python 3.13 on


def sparse_table(n_bytes):
    memory = mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    return np.frombuffer(memory, np.uint8)


@pytest.mark.parametrize("row_type,dim,n_rows", [
    (ref.INT8, 64, 2**31 // 64 + 1000),  # past 2^31 elements
    (ref.INT8, 16, 2**32 // 20 + 1000),  # past 2^32 bytes
    (ref.INT4, 4, 2**31 + 1000),  # more rows than int32 counts
    (ref.FP32, 1024, 2**32 // 4096 + 10),
])  # fmt: skip
def test_rows_at_the_far_end_are_found(row_type, dim, n_rows):
    stride = _native.stride(row_type, False, dim)
    memory = sparse_table(n_rows * stride)
    rows = memory.reshape(n_rows, stride)
    places = np.array([0, 1, n_rows // 2, n_rows - 2, n_rows - 1])
    values = np.random.default_rng(0).standard_normal((len(places), dim)).astype(np.float16).astype(np.float32)
    stored = np.empty((len(places), stride), np.uint8)
    assert _native.encode(values, stored, row_type, False, 0, 0)["bad_row"] == -1
    rows[places] = stored
    table = _native.Table(rows, dim, row_type, False)
    out = np.empty((7, dim), np.float32)
    ids = np.append(places, [n_rows, n_rows + 2**32])
    missing = table.gather(ids, 0, None, out)
    assert np.array_equal(out[:5], ref.decode(stored, row_type, False, dim)) and not out[5:].any()
    assert np.frombuffer(missing, np.uint32).tolist() == [5, 6]
    positions, scores, counts = np.zeros((1, 2), np.int64), np.zeros((1, 2), np.float32), np.zeros(1, np.int64)
    none, spans = np.empty(0, np.int64), np.zeros(2, np.int64)
    table.topk(values[4:5].copy(), 1, None, places, none, spans, none, None, positions, scores, counts)
    assert positions[0, 0] == n_rows - 1


def test_an_answer_past_2_to_the_31_bytes():
    dim, n = 1024, 2**31 // 4096 + 50
    values = np.random.default_rng(0).standard_normal((3, dim)).astype(np.float32)
    stored = np.empty((3, _native.stride(ref.INT8, False, dim)), np.uint8)
    _native.encode(values, stored, ref.INT8, False, 0, 0)
    ids = np.full(n, 99)
    ids[-40:] = np.arange(40) % 3
    out = sparse_table(n * dim * 4)
    missing = _native.Table(stored, dim, ref.INT8, False).gather(ids, 0, None, out)
    tail = out.view(np.float32).reshape(n, dim)[-40:]
    assert np.array_equal(tail, ref.decode(stored, ref.INT8, False, dim)[ids[-40:]])
    assert len(missing) == 4 * (n - 40)
