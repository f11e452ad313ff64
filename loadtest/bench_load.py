"""A server under load as a shop would have it: Lookup of Zipf ids that drift, TopK among them, rows in a pool, a reload half way.

An open loop: requests leave when they are due, and latency counts from then. Every answer's rows are of one version.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from embedserve.client import AdminClient
from embedserve.loadtest.bench_tiers import zipf
from embedserve.loadtest.checked_load import THREADS
from embedserve.loadtest.results import Chart, Figure, Result
from embedserve.loadtest.servers import ServerProcess
from embedserve.proto import wire_pb2
from embedserve.quant import Catalog, ImportOptions, import_table, open_matrix

DIM, IDS, SHARE_OF_TOPK, POOL_SHARE = 64, 256, 20, 0.1
LOOK_EVERY_S = 0.5
SERVICE = "/embedserve.v1.EmbeddingService/"
PERCENTILES = (50, 75, 90, 95, 99, 99.5, 99.9, 99.99)


def run(quick: bool, say: Callable[[str], None]) -> list[Result]:
    """See the module."""
    rows, seconds, rate = (20_000, 4.0, 100) if quick else (500_000, 40.0, 300)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "catalog"
        np.save(Path(folder) / "x.npy", np.random.default_rng(0).standard_normal((rows, DIM), np.float32))
        catalog, matrix = Catalog(root), open_matrix(str(Path(folder) / "x.npy"))
        catalog.publish("items", import_table(catalog, "items", matrix, ImportOptions()).version)
        following = import_table(catalog, "items", matrix, ImportOptions()).version
        pool = max(1 << 20, int(POOL_SHARE * rows * 122))
        say(
            f"{rate} requests/s for {seconds:g} s, {rows:,} rows x {DIM}, pool for {POOL_SHARE:.0%} of them; a reload half way"
        )
        with (
            ServerProcess(root, "--memory-pool-size", str(pool), "--no-watch") as server,
            AdminClient(server.admin_address) as admin,
        ):
            spawn = multiprocessing.get_context("spawn")
            ours, theirs = spawn.Pipe()
            sender = spawn.Process(target=_send, args=(theirs, server.address, rows, rate, seconds), daemon=True)
            sender.start()
            ours.recv()  # begun
            looks = _watch(admin, catalog, following, seconds)
            due, latencies, failures = ours.recv()
            sender.join()
            windows = {method.method: method.windows[2] for method in admin.stats().methods}
        figures = [
            Figure("answered", len(latencies) - failures, "requests", "sent", len(latencies)),
            Figure(
                "p50, from when it was due",
                1e3 * float(np.percentile(latencies, 50)),
                "ms",
                "in the server, Lookup",
                windows["Lookup"].p50_ms,
                True,
            ),
            Figure(
                "p99, from when it was due",
                1e3 * float(np.percentile(latencies, 99)),
                "ms",
                "in the server, Lookup",
                windows["Lookup"].p99_ms,
                True,
            ),
        ]
        return [*_charts(due, latencies, looks), *figures]


def _watch(admin: AdminClient, catalog: Catalog, following: str, seconds: float) -> list[tuple[float, Any]]:
    """(time, TableStats) twice a second; publishes and reloads half way."""
    begun, looks, reloading = time.monotonic(), [], None

    def reload() -> None:
        catalog.publish("items", following)
        admin.reload("items")

    while (now := time.monotonic() - begun) < seconds:
        looks.append((now, admin.stats().tables[0]))
        if now > seconds / 2 and reloading is None:
            reloading = threading.Thread(target=reload)
            reloading.start()
        time.sleep(LOOK_EVERY_S)
    if reloading:
        reloading.join()
    return looks


def _charts(due: Any, latencies: Any, looks: list[tuple[float, Any]]) -> list[Chart]:
    in_ms = 1e3 * latencies
    known = [p for p in PERCENTILES if len(in_ms) > 100 / (100 - p)]
    curve = [(100 / (100 - p), float(np.percentile(in_ms, p))) for p in known]
    seconds = np.floor(due).astype(int)
    each = range(int(seconds.max()) + 1)
    rate = [(float(s), float((seconds == s).sum())) for s in each]
    worst = [(float(s), float(np.percentile(in_ms[seconds == s], 99))) for s in each if (seconds == s).any()]
    shares: dict[str, list[tuple[float, float]]] = {"ram": [], "disk": []}
    for (_, a), (at, b) in pairwise(looks):
        if a.version != b.version:
            continue  # counted anew
        before, after = ({tier.tier: tier.hits for tier in stats.tiers} for stats in (a, b))
        asked = sum(after.values()) - sum(before.values())
        for tier, line in shares.items():
            if asked > 0:
                line.append((at, 100 * (after[tier] - before[tier]) / asked))
    return [
        Chart(
            "Latency by percentile",
            "percentile",
            "ms",
            {"from when it was due": curve},
            log_x=True,
            ticks={100 / (100 - p): f"p{p:g}" for p in known if p not in (75, 95, 99.5)},
        ),
        Chart("Requests", "seconds; a reload half way", "a second", {"sent": rate}),
        Chart("p99 of each second", "seconds", "ms", {"from when it was due": worst}),
        Chart("Rows by tier", "seconds", "%", shares),
    ]


def _request(i: int, ids: Any) -> tuple[str, Any]:
    if i % SHARE_OF_TOPK:
        return "Lookup", wire_pb2.LookupRequest(table="items", ids=[ids.tobytes()], output=1)
    few = [
        ids.tobytes()
    ]  # TopK among the rows that a Lookup would have asked for: what it costs does not hang on the pool's misses
    return "TopK", wire_pb2.TopKRequest(table="items", query_ids=[ids[:1].tobytes()], k=10, allow=few)


def _send(pipe: Any, address: str, rows: int, rate: float, seconds: float) -> None:
    import grpc

    n = int(rate * seconds)
    rng = np.random.default_rng(1)
    ids = zipf(rng, rows, 0.99, n * IDS).reshape(n, IDS)
    ids = (ids + np.arange(n)[:, None] * rows // n // 4) % rows  # what is hot moves through a quarter of the table
    latencies, failures = np.zeros(n), [0]
    taken = iter(range(n))
    lock = threading.Lock()
    with grpc.insecure_channel(address) as channel:
        grpc.channel_ready_future(channel).result(10)
        calls = {name: channel.unary_unary(SERVICE + name) for name in ("Lookup", "TopK")}
        pipe.send("begun")
        begun = time.perf_counter()

        def sender() -> None:
            while True:
                with lock:
                    i = next(taken, -1)
                if i < 0:
                    return
                name, request = _request(i, ids[i])
                data, due = request.SerializeToString(), begun + i / rate
                time.sleep(max(0.0, due - time.perf_counter()))
                try:
                    calls[name](data, timeout=10)
                except grpc.RpcError:
                    failures[0] += 1
                latencies[i] = time.perf_counter() - due

        threads = [threading.Thread(target=sender) for _ in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    pipe.send((np.arange(n) / rate, latencies, failures[0]))
