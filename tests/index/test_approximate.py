"""Approximate TopK: near what the exact search gives, never of rows that may not be answered, and never too few."""

from __future__ import annotations

import hashlib
import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import reference as ref
import xxhash
from conftest import eventually, publish_table, serving

from embedserve.client import ServiceError
from embedserve.index import ApproximateIndex, Filter, Layer, Params, SearchThreads, exact_topk, search_topk
from embedserve.index.build import BuildOptions, build_index
from embedserve.index.families import families
from embedserve.quant import Catalog, Metric, fold_upserts, make_delta
from embedserve.quant.errors import ArtifactError, FailedPrecondition, InvalidArgument
from embedserve.quant.kernels import _native

ROWS, DIM = 6000, 16
NONE = np.empty(0, np.int64)
# One bit a dim tells little apart in 16 of them; a graph finds its way badly by inner products.
LEAST_RECALL = {"IVF32,RaBitQ": 0.7, "HNSW16,SQ8": 0.7}
METRICS = [Metric.IP, Metric.L2, Metric.COSINE]
SPECS = [
    "PQ8x4fs",
    "IVF32,PQ8x4fs",
    "IVF32,RaBitQ",
    "IVF32,SQ8",
    "IVF32,Flat",
    "HNSW16,SQ8",
    "RR16,IVF32,Flat",
    "IVF64_HNSW8,SQ8",
]


def clustered(rows: int = ROWS, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    centres = rng.standard_normal((40, DIM))
    return (centres[rng.integers(0, 40, rows)] + 0.5 * rng.standard_normal((rows, DIM))).astype(np.float32)


def quiet(*_: object) -> None:
    pass


def indexed(root: Path, spec: str, metric: Metric = Metric.IP, rows: np.ndarray | None = None, keys=None) -> str:
    """Publishes a table t with an index; returns the version."""
    publish_table(root, "t", clustered() if rows is None else rows, keys, metric=metric)
    made = build_index(Catalog(root), "t", "", BuildOptions(spec=spec, recall=0.8), quiet, quiet).manifest
    assert made is not None
    return Catalog(root).publish("t", made.version)


@pytest.fixture(scope="module", params=[(spec, metric) for spec in SPECS for metric in METRICS], ids=str)
def opened(request, tmp_path_factory):
    spec, metric = request.param
    root = tmp_path_factory.mktemp("index") / "root"
    artifact = Catalog(root).open("t", indexed(root, spec, metric))
    index = ApproximateIndex.open(artifact, SearchThreads(2), check=True)
    return artifact, index, metric


def recall(found, expected, counts) -> float:
    return float(
        np.mean([len(np.intersect1d(a[:n], b[:n])) / n for a, b, n in zip(found, expected, counts, strict=True)])
    )


def test_every_family_answers_filtered_and_upserted_tables_as_the_exact_search_does(opened):
    """Positions and keys are never confused: rows replaced, rows added, rows left out."""
    artifact, index, metric = opened
    rng = np.random.default_rng(5)
    queries = clustered(30, 7)
    own = artifact.native_table()
    upserted = np.empty((50, own.stride), np.uint8)
    _native.encode(clustered(50, 9), upserted, 0, False, 0, 0)
    replaced = np.sort(rng.choice(ROWS, 30, replace=False))
    over_keys = np.concatenate((replaced, np.arange(ROWS, ROWS + 20)))
    layers = [Layer(own, None, replaced), Layer(_native.Table(upserted, DIM, 0, False), over_keys)]
    first, _, _ = exact_topk(layers, metric, queries, 200, Filter([NONE] * 30))
    for excluded in ([NONE] * 30, [np.sort(best[:20]) for best in first], [np.sort(best) for best in first]):
        filter = Filter(excluded)
        exact, exact_scores, exact_counts = exact_topk(layers, metric, queries, 10, filter)
        params = Params(nprobe=16, ef_search=400, oversample=60)
        (found, scores, counts), was_exact = search_topk(layers, metric, index, queries, 10, filter, params=params)
        assert not was_exact and np.array_equal(counts, exact_counts) and (counts == 10).all()
        assert recall(found, exact, counts) > LEAST_RECALL.get(artifact.manifest.index.spec, 0.85)
        assert not any(np.isin(a, b).any() for a, b in zip(found, excluded, strict=True))
        assert not np.isin(found, replaced).any()
        both = found == exact
        assert np.array_equal(scores[both], exact_scores[both])


def test_what_an_index_is_no_help_for_is_exact(opened):
    artifact, index, metric = opened
    layers, queries = [Layer(artifact.native_table(), None)], clustered(3, 7)
    cases = [
        {"k": 10, "filter": Filter([NONE] * 3, np.arange(0, ROWS, 3))},
        {"k": 1500, "filter": Filter([NONE] * 3)},
        {"k": 10, "filter": Filter([np.arange(0, ROWS - 600)] * 3)},
        {"k": 10, "filter": Filter([NONE] * 3), "exact": True},
    ]
    for case in cases:
        (found, _, counts), exact = search_topk(layers, metric, index, queries, **case)
        expected, _, expected_counts = exact_topk(layers, metric, queries, case["k"], case["filter"])
        assert exact and np.array_equal(found, expected) and np.array_equal(counts, expected_counts)
    queries[1] = 0  # all rows are alike to it; the smallest ids come first
    (found, _, _), exact = search_topk(layers, metric, index, queries, 10, Filter([NONE] * 3))
    assert exact and (metric is Metric.L2 or found[1].tolist() == list(range(10)))


def test_a_search_that_looks_into_too_few_lists_widens(tmp_path):
    root = tmp_path / "root"
    artifact = Catalog(root).open("t", indexed(root, "IVF256,Flat"))
    index = ApproximateIndex.open(artifact, SearchThreads(1), check=False)
    layers, queries = [Layer(artifact.native_table(), None)], clustered(20, 7)
    (_, _, counts), exact = search_topk(
        layers, Metric.IP, index, queries, 200, Filter([NONE] * 20), params=Params(nprobe=1, oversample=1)
    )
    assert not exact and (counts == 200).all()


def test_what_a_request_may_ask_for_is_bounded(opened, monkeypatch):
    """A breadth, a number of lists or of candidates past all sense is neither an error nor memory."""
    artifact, index, metric = opened
    layers, queries = [Layer(artifact.native_table(), None)], clustered(3, 7)
    most = 2**32 - 1
    found, _ = search_topk(
        layers,
        metric,
        index,
        queries,
        10,
        Filter([NONE] * 3),
        params=Params(nprobe=most, ef_search=most, oversample=20),
    )
    assert (found[2] == 10).all()
    assert search_topk(layers, metric, index, queries, 10, Filter([NONE] * 3), params=Params(oversample=most))[1]
    monkeypatch.setattr("embedserve.index.search.MOST_CANDIDATES", 500)
    assert search_topk(layers, metric, index, queries, 10, Filter([NONE] * 3), params=Params(oversample=20))[1]


def test_large_batches_in_parts_and_many_callers_give_the_same_answers_on_few_threads(opened):
    artifact, index, metric = opened
    layers, queries = [Layer(artifact.native_table(), None)], clustered(200, 8)

    def ask(part):
        return search_topk(layers, metric, index, part, 5, Filter([NONE] * len(part)))[0][0]

    whole = ask(queries)

    def threads() -> int:
        return len(list(Path("/proc/self/task").iterdir()))

    with ThreadPoolExecutor(16) as callers:
        list(callers.map(ask, [queries[i : i + 1] for i in range(200)]))
        before = threads()
        alone = np.concatenate(list(callers.map(ask, [queries[i % 200 : i % 200 + 1] for i in range(600)])))
        assert threads() <= before  # no OpenMP pool for each caller
    assert np.array_equal(alone[:200], whole)


# Building.


def test_the_kept_index_reaches_the_recall_and_its_figures_say_so(tmp_path):
    root = tmp_path / "root"
    before = publish_table(root, "t", clustered(30_000))
    lines: list[str] = []
    seen: list[int] = []
    outcome = build_index(Catalog(root), "t", "", BuildOptions(recall=0.95, memory=0.3), lines.append, seen.append)
    assert outcome.trials and seen == sorted(seen) and (not seen or seen[-1] == 30_000)
    if outcome.manifest is None:  # this machine scans as quickly
        outcome = build_index(Catalog(root), "t", "", BuildOptions(recall=0.95, spec="PQ8x4fs"), quiet, quiet)
    made = outcome.manifest
    assert made.index.recall > 0.9 and made.parent == before and made.index.target == 0.95
    rows = "rows.safetensors"
    assert made.files[rows] == Catalog(root).open("t", before).rows_entry
    assert (root / "t" / made.version / rows).samefile(root / "t" / before / rows)
    Catalog(root).open("t", made.version, verify=True)
    assert made.files["index.faiss"].bytes < 0.5 * 4 * DIM * 30_000


def test_what_cannot_be_built(tmp_path):
    root = tmp_path / "root"
    publish_table(root, "t", np.random.default_rng(0).standard_normal((5000, DIM)).astype(np.float32))
    publish_table(root, "few", clustered(300))
    publish_table(root, "one", clustered(1))
    catalog = Catalog(root)
    assert build_index(catalog, "few", "", BuildOptions(), quiet, quiet).manifest is None
    assert build_index(catalog, "one", "", BuildOptions(), quiet, quiet).manifest is None
    with pytest.raises(FailedPrecondition, match=r"no kind of index .* fits into 0.001"):
        build_index(catalog, "t", "", BuildOptions(memory=0.001), quiet, quiet)
    with pytest.raises(FailedPrecondition, match=r"reached recall 1@10; the best was IVF64,PQ1x4fs with 0\.\d+"):
        build_index(catalog, "t", "", BuildOptions(recall=1.0, spec="IVF64,PQ1x4fs"), quiet, quiet)
    for options, words in [
        (BuildOptions(spec="NoSuch"), "spec: 'NoSuch'"),
        (BuildOptions(queries=np.ones((4, DIM + 1), np.float32)), "queries: of shape"),
        (BuildOptions(queries=np.full((4, DIM), np.nan, np.float32)), "query 0 is not finite"),
        (BuildOptions(queries=np.zeros((4, DIM), np.float32)), "fewer than two that are not zero"),
    ]:
        with pytest.raises(InvalidArgument, match=words):
            build_index(catalog, "t", "", options, quiet, quiet)
    assert len(catalog.versions("t")) == 1


def test_rows_that_are_all_equal_get_an_index_or_none_but_no_error(tmp_path):
    root = tmp_path / "root"
    publish_table(root, "t", np.ones((4000, DIM), np.float32))
    outcome = build_index(Catalog(root), "t", "", BuildOptions(), quiet, quiet)
    assert outcome.manifest is None or outcome.manifest.index.recall == 1


@pytest.mark.parametrize("dim", [1, 2, 3, 7, 13, 64, 100, 768])
def test_families_fit_any_dim_and_the_memory_given(dim):
    for memory in (0.07, 0.125, 3):
        for family in families(100_000, dim, memory):
            assert family.bytes_a_row <= memory * 4 * dim and list(family.searches())


# Files.


def rewritten(version: Path, data: bytes) -> None:
    """index.faiss of other bytes, with hashes that say they are right."""
    (version / "index.faiss").write_bytes(data)
    manifest = json.loads((version / "manifest.json").read_text())
    manifest["files"]["index.faiss"] = {
        "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest(), "xxh3": xxhash.xxh3_64_hexdigest(data),
    }  # fmt: skip
    (version / "manifest.json").write_text(json.dumps(manifest))


def test_a_damaged_index_is_refused(tmp_path):
    root = tmp_path / "root"
    version = root / "t" / indexed(root, "IVF32,SQ8")
    data = (version / "index.faiss").read_bytes()

    def opening(check: bool = True):
        return ApproximateIndex.open(Catalog(root).open("t"), SearchThreads(1), check)

    flipped = bytearray(data)
    flipped[len(data) // 2] ^= 1
    (version / "index.faiss").write_bytes(flipped)
    with pytest.raises(ArtifactError, match="not those that were written"):
        opening()
    (version / "index.faiss").write_bytes(data[:-1])
    with pytest.raises(ArtifactError, match="bytes, but the manifest says"):
        opening()
    for other in (b"", b"IxZZ" + data[4:], data[: len(data) // 2]):  # as a newer FAISS might write
        rewritten(version, other)
        with pytest.raises(ArtifactError, match="cannot read what FAISS"):
            opening()
    elsewhere = tmp_path / "elsewhere" / "root"
    small = elsewhere / "t" / indexed(elsewhere, "IVF16,SQ8", rows=clustered(3000))
    rewritten(version, (small / "index.faiss").read_bytes())
    with pytest.raises(ArtifactError, match=r"holds 3,000 x 16, the version 6,000 x 16"):
        opening()
    manifest = json.loads((version / "manifest.json").read_text())
    del manifest["index"]
    (version / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ArtifactError, match="does not say what it is"):
        Catalog(root).open("t")


def test_a_delta_carries_the_index_and_a_fold_leaves_it_behind(tmp_path):
    root, other = tmp_path / "root", tmp_path / "other"
    old = publish_table(root, "t", clustered())
    shutil.copytree(root, other)
    changed = clustered()
    changed[:100] += 0.1
    new = indexed(root, "PQ8x4fs", rows=changed)
    make_delta(Catalog(root).open("t", old), Catalog(root).open("t", new), tmp_path / "delta")
    assert Catalog(other).publish("t", Catalog(other).install_delta("t", tmp_path / "delta")) == new
    files = [(base / "t" / new / "index.faiss").read_bytes() for base in (root, other)]
    assert files[0] == files[1]
    with serving(root) as (_, client, admin):
        admin.upsert("t", [3], clustered(1))
        folded = fold_upserts(Catalog(root), "t")
        assert folded.index is None and list(folded.files) == ["rows.safetensors"]
        Catalog(root).publish("t", folded.version)
        eventually(lambda: client.topk("t", query_ids=[3]).version == folded.version)
        assert client.topk("t", query_ids=[3]).exact


# In a server.


def test_a_server_says_which_answers_are_exact(tmp_path):
    root, values = tmp_path / "root", clustered()
    keys = np.random.default_rng(3).permutation(np.arange(-ROWS, ROWS, 2)).astype(np.int64)
    with_index = indexed(root, "IVF32,PQ8x4fs", rows=values, keys=keys)
    queries = clustered(20, 7)
    with serving(root, "--search-threads", "2") as (_, client, admin):
        asked = {"vectors": queries, "k": 10, "oversample": 60, "nprobe": 16}
        near, true = client.topk("t", **asked), client.topk("t", **asked, exact=True)
        assert (near.exact, true.exact) == (False, True) and near.version == with_index
        assert recall(near.ids, true.ids, near.counts) > 0.97
        best = ref.scores(queries, values, "ip")
        assert recall(true.ids, keys[np.argsort(-best)[:, :10]], true.counts) > 0.97
        assert client.topk("t", vectors=queries, allow=keys[:50]).exact
        # Seen items left out, a query id that is not there, and rows written a moment ago.
        seen = [ids.tolist() for ids in true.ids]
        left = client.topk("t", **asked, exclude_each=seen, include_vectors="float32")
        assert not left.exact and (left.counts == 10).all()
        assert not any(np.isin(a, b).any() for a, b in zip(left.ids, seen, strict=True))
        by_id = client.topk("t", query_ids=[int(keys[0]), 10**9, int(keys[1])], k=3)
        assert not by_id.exact and by_id.counts.tolist() == [3, 0, 3] and by_id.missing_queries.tolist() == [1]
        admin.upsert("t", [10**6], 4 * queries[:1])
        assert client.topk("t", vectors=queries[:1], k=3).ids[0, 0] == 10**6
        # A version without an index, and back.
        plain = publish_table(root, "t", values, keys)
        eventually(lambda: client.topk("t", vectors=queries, k=10).version == plain)
        assert client.topk("t", vectors=queries, k=10).exact
        admin.rollback("t")
        assert not client.topk("t", vectors=queries, k=10).exact


def test_a_version_whose_index_is_damaged_is_not_taken(tmp_path):
    root = tmp_path / "root"
    good = indexed(root, "IVF32,SQ8")
    with serving(root) as (_, client, admin):
        bad = build_index(Catalog(root), "t", "", BuildOptions(spec="IVF32,SQ8", recall=0.8), quiet, quiet).manifest
        path = root / "t" / bad.version / "index.faiss"
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
        with pytest.raises(ServiceError, match="not those that were written"):
            admin.reload("t", bad.version)
        assert client.topk("t", vectors=clustered(1), k=3).version == good
