"""The pool of rows in front of the disk: the same rows as from a table held whole, within its bytes."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest
from conftest import publish_table, serving
from hypothesis import given
from hypothesis import strategies as st

from embedserve.client import ServiceError
from embedserve.proto import embedding_pb2 as pb
from embedserve.quant import Artifact, Catalog, Output, RowType
from embedserve.quant.kernels import _native
from embedserve.server import _lookup
from embedserve.server.cache import tiers

MIB = 1 << 20
REPOSITORY = Path(__file__).parents[2]
N, DIM = 5000, 20
KINDS = ("dense-int8", "keyed-int4", "keyed-fp16", "dense-fp32")


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory) -> dict[str, Artifact]:
    root = tmp_path_factory.mktemp("cached") / "root"
    rng = np.random.default_rng(0)
    keys = rng.choice(np.arange(-N, 9 * N), N, replace=False).astype(np.int64)
    keys[:2] = np.iinfo(np.int64).min, np.iinfo(np.int64).max
    for kind in KINDS:
        values = rng.standard_normal((N, DIM)).astype(np.float32)
        row_type = RowType(kind.split("-")[1])
        publish_table(root, kind, values, keys if kind.startswith("keyed") else None, row_type=row_type)
    return {kind: Catalog(root).open(kind) for kind in KINDS}


def cached(artifact: Artifact, policy: str = "s3fifo", budget: int = MIB, floor=0, ceiling=0, share=0.0, pool=None):
    table = artifact.native_table()
    pool = pool or _lookup.RowCache(budget, policy, artifact.manifest.format.stride)
    return _lookup.CachedRows(table, None, pool, tiers._disk_rows(artifact), tiers.DISK, floor, ceiling, share)


def some_ids(artifact: Artifact, rng: np.random.Generator, n: int) -> np.ndarray:
    keys = np.arange(N) if artifact.keys is None else artifact.keys
    ids = rng.choice(keys, n).astype(np.int64)
    strangers = rng.random(n) < 0.1
    ids[strangers] = rng.integers(-(2**63), 2**63 - 1, strangers.sum())
    return ids


def test_readers_race_writers_under_thread_sanitizer(tmp_path):
    binary = tmp_path / "races"
    sources = ["tests/native/row_cache_races.cpp", "quant/kernels/key_index.cpp"]
    flags = ["-std=c++20", "-O1", "-g", "-fsanitize=thread", "-Iserver/cache", "-Iquant/kernels", "-pthread"]
    subprocess.run(["g++", *flags, "-o", binary, *sources], cwd=REPOSITORY, check=True)
    done = subprocess.run([binary, "10000"], check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 wrong" in done.stdout and "WARNING" not in done.stderr


@pytest.mark.parametrize("policy", ["s3fifo", "lru", "lfu"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("output", list(Output))
def test_rows_are_those_of_the_whole_table(artifacts, kind, policy, output):
    artifact = artifacts[kind]
    whole, some, rng = artifact.native_table(), cached(artifact, policy), np.random.default_rng(7)
    for n in (0, 1, 17, 256, 257, 3000, 20_000, 300, 5):
        ids = some_ids(artifact, rng, n)
        expected = np.empty((n, whole.row_bytes(output)), np.uint8)
        found = np.full_like(expected, 0xAB)
        missing = whole.gather(ids, output, None, expected)
        assert some.gather(ids, output, found) == (missing, None)
        assert np.array_equal(found, expected)
    counts = some.counts()
    assert counts["hits"] > 0 and counts["misses"] > 0 and counts["unavailable"] == 0


def responders(artifact: Artifact, upserts: _native.Table | None = None):
    rows = cached(artifact).with_upserts(upserts)
    table = artifact.native_table(upserts=upserts)
    default_rows = (artifact.default_row.tobytes(), None, None, None)
    return [_lookup.Responder(each, "v", default_rows, True) for each in (table, rows)]


@pytest.fixture(scope="module")
def both(artifacts):
    """Whole and cached, with upserts over existing and new keys."""
    artifact = artifacts["keyed-int4"]
    keys = np.sort(np.append(artifact.keys[10:60], 10**12))
    rows = np.ascontiguousarray(artifact.rows[100 : 100 + len(keys)])
    from embedserve.quant import Place
    from embedserve.server.upserts import Overlay

    overlay = Overlay(artifact.manifest, keys, rows, 1.0, Place())
    return artifact, overlay, responders(artifact, overlay.table)


@given(data=st.data())
def test_answers_are_those_of_the_whole_table(both, data):
    """Whatever is asked, pooled or not, with upserts in front: equal but for the tier that is named."""
    artifact, _, (whole, some) = both
    known = st.sampled_from([int(k) for k in artifact.keys[:300]])
    ids = np.array(
        data.draw(st.lists(known | st.integers(-(2**63), 2**63 - 1) | st.just(10**12), max_size=60)), np.int64
    )
    on_missing, pooling = data.draw(st.integers(0, 2)), data.draw(st.booleans())
    answers = []
    for each in (whole, some):
        if pooling:
            starts = np.array([0] if len(ids) else [], np.uint32)
            message, missing, unavailable = each.pooled(ids.tobytes(), starts, None, True, 0, on_missing, 0)
        else:
            message, missing, unavailable = each.rows(ids.tobytes(), 0, on_missing, 0)
        response = pb.LookupResponse.FromString(message) if message else None
        if response:
            assert response.tiers.ram + response.tiers.disk == len(ids) - len(response.missing)
            response.ClearField("tiers")
        answers.append((response, missing, unavailable))
    assert answers[0] == answers[1]


def test_unknown_keys_are_remembered_and_never_rows(artifacts):
    rows = cached(artifacts["keyed-fp16"])
    ids, out = np.arange(10**15, 10**15 + 100), np.empty((100, DIM), np.float32)
    for _ in range(3):
        missing, _ = rows.gather(ids, 0, out)
        assert len(missing) == 400 and not out.any()
    counts = rows.counts()
    assert counts["misses"] == 100 and counts["unknown"] == 200 and counts["rows"] == 0
    assert rows.hot_keys(1000) == b""


def test_a_file_that_was_cut_short_is_unavailable_and_not_a_crash(artifacts, tmp_path):
    artifact = artifacts["dense-fp32"]
    copy = tmp_path / "rows"
    copy.write_bytes(artifact.rows_path.read_bytes()[: artifact.places["rows"].offset + 100 * artifact.rows.shape[1]])
    cold = _lookup.disk_rows(str(copy), artifact.places["rows"].offset, N, artifact.rows.shape[1], -1, 0, 0)
    table = artifact.native_table()
    rows = _lookup.CachedRows(table, None, _lookup.RowCache(MIB, "lru", 80), cold, tiers.DISK, 0, 0, 0.0)
    default = np.full(DIM, 7, np.float32)
    responder = _lookup.Responder(rows, "v", (default.tobytes(), None, None, None), True)
    ids = np.array([0, 99, 100, N, 4999], np.int64)
    message, _, unavailable = responder.rows(ids.tobytes(), 0, 0, 0)
    response = pb.LookupResponse.FromString(message)
    assert response.degraded and list(response.degraded_positions) == [2, 4] and list(response.missing) == [3]
    values = np.array(response.values).reshape(5, DIM)
    assert (values[[2, 4]] == 7).all() and not values[3].any() and response.tiers.disk == 2
    assert responder.rows(ids.tobytes(), 0, 0, 1)[0] is None  # FAIL
    assert np.frombuffer(unavailable, np.uint32).tolist() == [2, 4] and rows.counts()["unavailable"] == 4


def test_the_pool_is_bounded_and_shared(artifacts):
    pool = _lookup.RowCache(MIB, "s3fifo", 24)
    a, b = (cached(artifacts[kind], pool=pool) for kind in ("dense-fp32", "keyed-fp16"))
    rng = np.random.default_rng(3)
    out = np.empty((500, DIM), np.float32)
    for _ in range(200):
        for rows, kind in ((a, "dense-fp32"), (b, "keyed-fp16")):
            rows.gather(some_ids(artifacts[kind], rng, 500), 0, out)
            assert 0 < a.counts()["bytes"] + b.counts()["bytes"] < MIB
    assert a.counts()["rows"] > 100 < b.counts()["rows"]
    before = b.counts()["bytes"]
    del a  # the rows of a version that left go first
    for _ in range(60):
        b.gather(some_ids(artifacts["keyed-fp16"], rng, 500), 0, out)
    assert b.counts()["bytes"] > before


def test_floors_and_ceilings_hold(artifacts):
    pool = _lookup.RowCache(MIB, "s3fifo", 80)
    small = cached(artifacts["dense-int8"], pool=pool, floor=30_000)
    large = cached(artifacts["dense-fp32"], pool=pool, ceiling=200_000)
    rng, out = np.random.default_rng(4), np.empty((500, DIM), np.float32)
    small.gather(np.arange(500), 0, out)
    for _ in range(100):
        large.gather(rng.integers(0, N, 500), 0, out)
        assert large.counts()["bytes"] <= 200_000
    assert large.counts()["bytes"] > 100_000 and small.counts()["rows"] == 500


@pytest.mark.parametrize(("policy", "kept"), [("s3fifo", 0.9), ("lfu", 0.9), ("lru", 0.0)])
def test_a_scan_does_not_flush_what_is_asked_for(artifacts, policy, kept):
    """But for lru, whose promise is another."""
    artifact = artifacts["dense-fp32"]
    rows = cached(artifact, policy, 1 << 20)
    hot, out = np.arange(1000), np.empty((1000, DIM), np.float32)
    pool = rows
    for _ in range(4):
        pool.gather(hot, 0, out)

    for first in range(1000, N, 500):
        pool.gather(np.arange(first, first + 500), 0, out[:500])
    before = pool.counts()["hits"]
    pool.gather(hot, 0, out)
    assert (pool.counts()["hits"] - before) / 1000 >= kept


def test_damaged_rows_are_noticed_dropped_and_read_again(artifacts):
    artifact = artifacts["dense-int8"]
    rows, out = cached(artifact, share=1.0), np.empty((50, DIM), np.float32)
    ids = np.arange(50)
    rows.gather(ids, 0, out)
    true = out.copy()
    rows.check_samples()
    assert rows.overwrite(7, 255)
    rows.gather(ids, 0, out)
    assert rows.check_samples() == (50, [7])
    rows.gather(ids, 0, out)
    assert np.array_equal(out, true) and rows.check_samples() == (49, [])


def test_warming_loads_hot_keys_of_the_version_before(artifacts):
    artifact = artifacts["keyed-int4"]
    before, after = cached(artifact), cached(artifact)
    out = np.empty((100, DIM), np.float32)
    for _ in range(3):
        before.gather(artifact.keys[:100], 0, out)
    hot = before.hot_keys(1000)
    assert sorted(np.frombuffer(hot, np.int64)) == sorted(artifact.keys[:100])
    assert after.warm(hot) == 100 and after.warm(np.array([10**14])) == 0
    after.gather(artifact.keys[:100], 0, out)
    assert after.counts()["hits"] == 100 and after.counts()["misses"] == 0


@pytest.mark.parametrize("budget", [0, 1000])
def test_a_pool_too_small_is_refused(budget):
    with pytest.raises(ValueError, match="at least 1048576"):
        _lookup.RowCache(budget, "lru", 68)


def test_a_server_answers_from_ram_and_disk(tmp_path):
    """Reloads, rollbacks and upserts over cached tables give the true rows at every step."""
    root = tmp_path / "root"
    rng = np.random.default_rng(5)
    first, second = (rng.standard_normal((3000, 16)).astype(np.float32) for _ in range(2))
    keys = np.arange(3000) * 7 - 100
    options = {"row_type": RowType.FP32}
    publish_table(root, "items", first, keys, **options)
    publish_table(root, "small", first[:10], **options)
    flags = ("--memory-pool-size", str(2 * MIB), "--whole-tables", "small")
    with serving(root, *flags, log=tmp_path / "log") as (_, client, admin):
        for cached in (range(17), [500]):  # 16 were asked for when the server warmed up
            found = client.lookup("items", keys[:500])
            assert np.array_equal(found.values, first[:500]) and not found.degraded
            assert found.tiers["ram"] in cached and found.tiers["ram"] + found.tiers["disk"] == 500
        assert client.lookup("small", [1, 2]).tiers["ram"] == 2
        admin.upsert("items", [keys[3], 10**9], second[:2])
        found = client.lookup("items", [keys[3], 10**9, keys[4], 6])
        assert np.array_equal(found.values[:3], np.stack((second[0], second[1], first[4])))
        assert list(found.missing) == [3]
        version = publish_table(root, "items", second, keys, **options)
        admin.reload("items")
        found = client.lookup("items", keys[:500])
        assert found.version == version and np.array_equal(found.values, second[:500])
        assert found.tiers["ram"] > 200, "what was hot before the reload is there after it"
        best = client.topk("items", query_ids=keys[:3], k=5, exclude=[keys[3], 10**9])
        scores = second @ second[:3].T
        scores[3] = -np.inf
        assert np.array_equal(best.ids, keys[np.argsort(-scores, axis=0)[:5].T])
        admin.rollback("items")
        assert np.array_equal(client.lookup("items", keys[3:4]).values, second[:1]), "upserts lie over it as well"
        assert np.array_equal(client.lookup("items", keys[10:13]).values, first[10:13])
        with pytest.raises(ServiceError, match="NOT_FOUND"):
            client.lookup("items", [6], on_missing="error")
