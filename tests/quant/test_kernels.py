"""The kernels against the numpy oracle, on every instruction set this CPU has."""

from __future__ import annotations

import shutil
import subprocess

import numpy as np
import pytest
import reference as ref
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from embedserve.quant.kernels import _native

ISAS = [isa for isa in ("scalar", "avx2", "avx512", "neon") if _native.has_kernels(isa)]
CALIBRATIONS = ("minmax", "percentile", "mse")
DIMS = (1, 2, 3, 7, 15, 16, 17, 31, 32, 33, 64, 100, 128, 256, 384, 1000)
FORMATS = [
    (ref.INT8, False),
    (ref.INT8, True),
    (ref.INT4, False),
    (ref.INT4, True),
    (ref.FP16, False),
    (ref.FP32, False),
]
both = pytest.mark.parametrize("isa", ISAS)


def encode(values, row_type, wide=False, symmetric=False, calibration="minmax", isa=""):
    out = np.full((len(values), _native.stride(row_type, wide, values.shape[1])), 0xAA, np.uint8)
    report = _native.encode(values, out, row_type, wide, int(symmetric), CALIBRATIONS.index(calibration), isa)
    return out, report


def make_table(row_type, wide, dim, n=200, seed=0, isa=""):
    values = np.random.default_rng(seed).standard_normal((n, dim)).astype(np.float32)
    values = values.astype(np.float16).astype(np.float32)  # so that even a row of one value fits an FP16 bias
    rows, report = encode(values, row_type, wide)
    assert report["bad_row"] == report["needs_wide_row"] == -1
    return _native.Table(rows, dim, row_type, wide, kernels=isa), rows, values


floats = st.floats(-1e4, 1e4, width=32, allow_subnormal=False)
matrices = st.sampled_from(DIMS).flatmap(
    lambda d: hnp.arrays(np.float32, st.tuples(st.integers(1, 20), st.just(d)), elements=floats)
)


@both
@pytest.mark.parametrize("calibration", CALIBRATIONS)
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("row_type", [ref.INT8, ref.INT4])
@given(values=matrices, wide=st.booleans())
def test_codes_equal_the_reference(isa, calibration, symmetric, row_type, values, wide):
    stored, report = encode(values, row_type, wide, symmetric, calibration, isa)
    oracle = ref.Encoder(row_type, wide, symmetric, calibration)
    for i, row in enumerate(values[:8]):
        expected = oracle.row(row)
        if expected is None:
            assert report["needs_wide_row"] == i
            return
        assert stored[i].tobytes() == expected
    assert report["bad_row"] == -1


@both
@pytest.mark.parametrize("row_type", [ref.FP16, ref.FP32])
@given(values=matrices)
def test_float_rows_are_the_values_rounded_to_even(isa, row_type, values):
    stored, _ = encode(values, row_type, isa=isa)
    assert [row.tobytes() for row in stored] == [ref.Encoder(row_type, False, False, "").row(row) for row in values]


@both
def test_half_conversions_on_every_half_and_between(isa):
    """All finite halves, and the FP32 neighbours of each midpoint, as FP16 rows."""
    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    middles = (halves[:-1] + halves[1:]) / 2
    values = np.concatenate(
        [halves, middles, np.nextafter(middles, 0), np.nextafter(middles, np.float32(1e9)), -halves]
    )
    stored, report = encode(values[:, None], ref.FP16, isa=isa)
    assert report["bad_row"] == -1
    assert stored[:, :2].copy().view(np.float16)[:, 0].tobytes() == values.astype(np.float16).tobytes()


def test_golden_bytes():
    """Row bytes, written out: FBGEMM's layout, which must never change."""
    row = np.array([[0.0, 1.0, 2.0, 255.0, 127.5]], np.float32)
    stored, _ = encode(row, ref.INT8)
    assert stored.tobytes().hex() == "003c0000" + "000102ff80" + "000000"  # scale 1, bias 0; 127.5 rounds to even
    stored, _ = encode(np.array([[-7.5, 7.5, 0.5]], np.float32), ref.INT4)
    assert stored.tobytes().hex() == "003c80c7" + "f008" + "0000"  # low nibble first
    stored, _ = encode(np.array([[-127.0, 127.0, 0.0]], np.float32), ref.INT8, symmetric=True)
    assert stored.tobytes().hex() == "003c00d8" + "01ff80" + "00"  # zero is code 128
    stored, _ = encode(np.array([[0.0, 510.0]], np.float32), ref.INT8, wide=True)
    assert stored.tobytes().hex() == "00000040" + "00000000" + "00ff" + "0000"
    stored, _ = encode(np.array([[0.1, 0.1, 0.1]], np.float32), ref.INT8, wide=True)
    assert stored.tobytes().hex() == "00000000" + "cdcccc3d" + "000000" + "00"  # constant: its value is the bias


@pytest.mark.parametrize("row", [[1000.3, 1000.8], [7e4, -7e4], [1e-9, 2e-9], [0.1, 0.1]])
def test_a_row_that_fp16_cannot_scale_asks_for_wide(row):
    values = np.array([[0, 1], row], np.float32)
    assert encode(values, ref.INT8)[1]["needs_wide_row"] == 1
    stored, report = encode(values, ref.INT8, wide=True)
    assert report["needs_wide_row"] == -1
    step = np.ptp(values, axis=1) / 255
    assert (abs(ref.decode(stored, ref.INT8, True, 2) - values).max(1) <= step / 2 + 1e-6 * abs(values).max(1)).all()


@both
@given(values=matrices)
def test_error_is_at_most_a_code_step(isa, values):
    """Half a step of rounding and half a step that FP16 may add, or the table would be wide."""
    stored, report = encode(values, ref.INT8, isa=isa)
    n = report["needs_wide_row"] if report["needs_wide_row"] >= 0 else len(values)
    step = np.ptp(values[:n], axis=1) / np.float32(255)
    error = abs(ref.decode(stored[:n], ref.INT8, False, values.shape[1]) - values[:n]).max(1)
    assert (error <= step * 1.001 + 1e-6 * abs(values[:n]).max(1)).all()


@pytest.mark.parametrize("row_type", range(4))
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("column", [0, 5, 16, 18])
def test_nonfinite_is_found_with_its_place(row_type, bad, column):
    values = np.ones((40, 19), np.float32) * np.arange(19, dtype=np.float32)
    values[33, column] = bad
    _, report = encode(values, row_type)
    assert (report["bad_row"], report["bad_column"]) == (33, column)


def test_values_a_row_type_cannot_hold_are_found():
    assert encode(np.array([[1, 65519]], np.float32), ref.FP16)[1]["bad_row"] == -1
    report = encode(np.array([[1, 65520]], np.float32), ref.FP16)[1]
    assert (report["bad_row"], report["bad_column"]) == (0, 1)
    assert encode(np.array([[3e38, -3e38]], np.float32), ref.INT8, wide=True)[1]["bad_row"] == 0


@both
def test_report_measures_the_stored_rows(isa):
    values = np.random.default_rng(3).standard_normal((777, 37)).astype(np.float32)
    stored, report = encode(values, ref.INT8, isa=isa)
    decoded = ref.decode(stored, ref.INT8, False, 37)
    error = (decoded - values).astype(np.float64)
    cosine = (decoded * values).sum(1) / (np.linalg.norm(decoded, axis=1) * np.linalg.norm(values, axis=1))
    assert report["squared_error"] == pytest.approx(np.square(error).sum(), rel=1e-5)
    assert report["max_error"] == abs(decoded - values).max()
    assert report["max_abs"] == abs(values).max()
    assert report["sum_cosine"] == pytest.approx(cosine.sum(), rel=1e-6)
    np.testing.assert_allclose(report["column_sums"], decoded.sum(0, dtype=np.float64), rtol=1e-5, atol=1e-4)


def misaligned(array, by=1):
    """A copy that begins at an odd address."""
    raw = np.zeros(array.nbytes + 64 + by, np.uint8)
    start = -raw.ctypes.data % 64 + by
    view = raw[start : start + array.nbytes]
    view[:] = array.reshape(-1).view(np.uint8)
    return view


id_lists = st.lists(st.integers(-5, 205) | st.sampled_from([2**31, -(2**63), 2**63 - 1]), max_size=70)


@both
@pytest.mark.parametrize("row_type,wide", FORMATS)
@given(dim=st.sampled_from(DIMS), ids=id_lists, output=st.integers(0, 3), fill=st.booleans(), odd=st.booleans())
def test_gather_equals_the_reference(isa, row_type, wide, dim, ids, output, fill, odd):
    table, rows, _ = make_table(row_type, wide, dim, isa=isa)
    if odd:
        table = _native.Table(misaligned(rows), dim, row_type, wide, kernels=isa)
    ids = np.array(ids, np.int64)
    known = (ids >= 0) & (ids < len(rows))
    expected = np.zeros((len(ids), table.row_bytes(output)), np.uint8)
    filler = np.random.default_rng(0).integers(0, 256, table.row_bytes(output), dtype=np.uint8) if fill else None
    if fill:
        expected[:] = filler
    taken = rows[ids[known]]
    expected[known] = taken if output == 3 else ref.encoded(ref.decode(taken, row_type, wide, dim), output)
    out = misaligned(np.full(expected.shape, 0xAA, np.uint8), 3 if odd else 0)
    missing = table.gather(misaligned(ids) if odd else ids, output, filler, out)
    assert out.tobytes() == expected.tobytes()
    assert ([] if missing is None else np.frombuffer(missing, np.uint32).tolist()) == np.flatnonzero(~known).tolist()


@both
@pytest.mark.parametrize("row_type", [ref.INT8, ref.INT4])
@pytest.mark.parametrize("dim", [16, 64, 384])
def test_huge_gathers_take_the_streaming_path_to_the_same_bits(isa, row_type, dim):
    table, rows, _ = make_table(row_type, False, dim, isa=isa)
    n = (17 << 20) // (4 * dim)  # kStreamBytes is 16 MB
    ids = np.random.default_rng(1).integers(0, len(rows) + 2, n)
    raw = np.zeros(n * dim * 4 + 128, np.uint8)
    start = -raw.ctypes.data % 64
    out = raw[start : start + n * dim * 4]
    missing = table.gather(ids, 0, None, out)
    expected = np.where(
        (ids < len(rows))[:, None], ref.decode(rows, row_type, False, dim)[np.minimum(ids, len(rows) - 1)], 0
    )
    assert np.array_equal(out.view(np.float32).reshape(n, dim), expected)
    assert len(missing) // 4 == (ids >= len(rows)).sum()


@both
@pytest.mark.parametrize("row_type,wide", FORMATS)
@given(
    data=st.data(),
    dim=st.sampled_from(DIMS),
    output=st.integers(0, 2),
    mean=st.booleans(),
    weighted=st.booleans(),
    fill=st.booleans(),
)
def test_pooling_equals_the_reference(isa, row_type, wide, data, dim, output, mean, weighted, fill):
    table, rows, _ = make_table(row_type, wide, dim, isa=isa)
    ids = np.array(data.draw(id_lists), np.int64)
    cuts = data.draw(st.lists(st.integers(0, len(ids)), max_size=6))
    offsets = np.array([0, *sorted(cuts)], np.uint32)
    weights = np.random.default_rng(len(ids)).uniform(0.1, 2, len(ids)).astype(np.float32) if weighted else None
    known = (ids >= 0) & (ids < len(rows))
    filler = np.linspace(-1, 1, dim).astype(np.float32)
    values = np.tile(filler if fill else np.zeros(dim, np.float32), (len(ids), 1))
    values[known] = ref.decode(rows[ids[known]], row_type, wide, dim)
    expected = ref.encoded(ref.pool(values, offsets.astype(int), weights, mean), output)
    got, want = np.empty(expected.size, np.uint8), expected.reshape(-1)
    missing = table.pool(ids, offsets, weights, mean, output, filler if fill else None, got)
    if output == 0:  # adding a missing zero row may turn -0 into +0
        assert np.array_equal(got.view(np.float32), want.view(np.float32))
    else:
        assert np.array_equal(got & 0x7F, want & 0x7F)
    assert (0 if missing is None else len(missing) // 4) == (~known).sum()


@pytest.mark.parametrize("offsets", [[1], [0, 5], [0, 3, 2], []])
def test_bad_offsets_are_refused_by_the_binding_itself(offsets):
    table, _, _ = make_table(ref.INT8, False, 8)
    with pytest.raises(ValueError, match="offsets"):
        table.pool(
            np.zeros(4, np.int64),
            np.array(offsets, np.uint32),
            None,
            False,
            0,
            None,
            np.empty(32 * len(offsets), np.uint8),
        )


@both
@pytest.mark.parametrize("metric", ["ip", "l2", "cosine"])
@given(
    dim=st.sampled_from(DIMS), row_type=st.sampled_from(FORMATS), n=st.integers(1, 150), n_queries=st.integers(1, 4),
    k=st.integers(1, 200), excluding=st.booleans(), allowing=st.booleans(), dropping=st.booleans(), least=st.booleans(), seed=st.integers(0, 1000),
)  # fmt: skip
def test_topk_equals_a_full_sort(
    isa, metric, dim, row_type, n, n_queries, k, excluding, allowing, dropping, least, seed
):
    """Scores agree within 4 ULPs of the sum of magnitudes (order of summation and FMA differ)."""
    generator = np.random.default_rng(seed)
    table, rows, _ = make_table(*row_type, dim, n=n, seed=seed, isa=isa)
    values = ref.decode(rows, *row_type, dim)
    queries = generator.standard_normal((n_queries, dim)).astype(np.float32)
    keys = generator.permutation(n).astype(np.int64) - n // 2
    excluded = [
        np.unique(generator.integers(0, n, 5)) if excluding else np.empty(0, np.int64) for _ in range(n_queries)
    ]
    allow = np.unique(generator.integers(0, n, max(1, n // 2))) if allowing else None
    dropped = np.unique(generator.integers(0, n, 3)) if dropping else np.empty(0, np.int64)
    exact = ref.scores(queries, values, metric)
    min_score = float(np.float32(np.median(exact))) if least else None
    positions, scores, counts = (
        np.zeros((n_queries, k), np.int64),
        np.zeros((n_queries, k), np.float32),
        np.zeros(n_queries, np.int64),
    )
    spans = np.cumsum([0, *map(len, excluded)])
    names = ["ip", "l2", "cosine"]
    table.topk(
        queries,
        names.index(metric),
        keys,
        allow,
        np.concatenate(excluded),
        spans,
        dropped,
        min_score,
        positions,
        scores,
        counts,
    )
    magnitude = np.abs(queries).max() * np.abs(values).max() * dim * 4 + np.square(values).max() * dim + 1
    bound = 1.0 if metric == "cosine" else magnitude
    for q in range(n_queries):
        found = positions[q, : counts[q]]
        possible = (
            set(range(n) if allow is None else allow.tolist()) - set(excluded[q].tolist()) - set(dropped.tolist())
        )
        assert len(set(found)) == len(found) and set(found.tolist()) <= possible
        np.testing.assert_allclose(scores[q, : counts[q]], exact[q, found], atol=bound * 1e-6)
        ranked = list(zip(-scores[q, : counts[q]], keys[found], strict=True))
        assert ranked == sorted(ranked)  # best first, ties by smaller key
        if min_score is None:
            assert counts[q] == min(k, len(possible))
        best = sorted((exact[q, p] for p in possible), reverse=True)[: counts[q]]
        np.testing.assert_allclose(scores[q, : counts[q]], best, atol=bound * 1e-6)


def test_equal_rows_tie_exactly_and_by_key():
    rows, _ = encode(np.tile(np.random.default_rng(0).standard_normal((1, 50)), (100, 1)).astype(np.float32), ref.INT8)
    table = _native.Table(rows, 50, ref.INT8, False)
    keys = np.random.default_rng(1).permutation(100).astype(np.int64) - 50
    positions, scores, counts = np.zeros((1, 10), np.int64), np.zeros((1, 10), np.float32), np.zeros(1, np.int64)
    none = np.empty(0, np.int64)
    query = np.ones((1, 50), np.float32)
    table.topk(query, 0, keys, None, none, np.zeros(2, np.int64), none, None, positions, scores, counts)
    assert keys[positions[0]].tolist() == list(range(-50, -40))
    table.topk(query, 0, None, none, none, np.zeros(2, np.int64), none, None, positions, scores, counts)
    assert counts.tolist() == [0]  # an empty allow list allows nothing


@pytest.mark.parametrize("call", [
    lambda t: t.gather(b"1234567", 0, None, np.empty(32, np.uint8)),
    lambda t: t.gather(np.zeros(1, np.int64), 0, None, np.empty(31, np.uint8)),
    lambda t: t.gather(np.zeros(1, np.int64), 4, None, np.empty(32, np.uint8)),
    lambda t: t.gather(np.zeros(1, np.int64), 0, b"short", np.empty(32, np.uint8)),
    lambda t: _native.Table(np.zeros(11, np.uint8), 8, 0, False),
    lambda t: _native.Table(np.zeros(12, np.uint8), 0, 0, False),
    lambda t: _native.Table(np.zeros(12, np.uint8), 8, 9, False),
    lambda t: _native.Table(np.zeros(12, np.uint8), 8, 0, False, index=np.zeros(64, np.uint8)),
    lambda t: _native.Table(np.zeros(12, np.uint8), 8, 0, False, kernels="mmx"),
])  # fmt: skip
def test_the_binding_checks_its_arguments(call):
    table, _, _ = make_table(ref.INT8, False, 8)
    with pytest.raises(ValueError):
        call(table)


@pytest.mark.skipif(shutil.which("nm") is None, reason="nm comes with the compiler")
def test_no_function_is_shared_between_instruction_sets():
    """An inline function compiled twice is merged by the linker, perhaps to the AVX-512 copy: then SSE machines crash."""
    symbols = subprocess.run(["nm", "-C", _native.__file__], capture_output=True, text=True, check=True).stdout
    shared = [
        line
        for line in symbols.splitlines()
        if " W " in line and any(s in line for s in ("Block", "RowReader", "std::__introsort", "std::__adjust_heap"))
    ]
    assert shared == []
