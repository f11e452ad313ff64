"""Lookup over gRPC beside a bare echo of the same byte sizes: one server core, the generator on another.

A closed loop: it finds how many requests a saturated server answers, not how long they take.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import grpc
import numpy as np

from embedserve.loadtest import generators
from embedserve.loadtest.results import Figure
from embedserve.loadtest.servers import ServerProcess, finish, start
from embedserve.proto import embedding_pb2
from embedserve.quant import Catalog, ImportOptions, import_table, open_matrix

METHOD = "/embedserve.v1.EmbeddingService/Lookup"
DIM, CALLERS, THREADS = 64, 8, 132
CASES = (
    ("256 ids, FLOAT16", 256, embedding_pb2.FLOAT16),
    ("256 ids, FLOAT32", 256, embedding_pb2.FLOAT32),
    ("1 id, FLOAT16", 1, embedding_pb2.FLOAT16),
)


def run(quick: bool, say: Callable[[str], None]) -> list[Figure]:
    """Requests a second, medians of many short alternating rounds: a shared machine's speed drifts within seconds."""
    rows, rounds, requests = (10_000, 2, 200) if quick else (1_000_000, 61, 1_500)
    cpus = sorted(os.sched_getaffinity(0))
    server_cpus, load_cpus = ({cpus[0]}, {cpus[1]}) if len(cpus) > 1 else (None, None)
    say(f"generator: {generators.name()}, {CALLERS} outstanding; server on core {server_cpus}, {rows:,} rows x {DIM}")
    figures = []
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        np.save(root / "x.npy", np.random.default_rng(0).standard_normal((rows, DIM), np.float32))
        catalog = Catalog(root / "catalog")
        import_table(catalog, "items", open_matrix(str(root / "x.npy")), ImportOptions())
        catalog.publish("items")
        with ServerProcess(root / "catalog", cpus=server_cpus) as server:
            for label, n, output in CASES:
                ids = np.random.default_rng(1).integers(0, rows, n)
                request = embedding_pb2.LookupRequest(table="items", ids=ids, output=output).SerializeToString()
                with grpc.insecure_channel(server.address) as channel:
                    answer_bytes = len(channel.unary_unary(METHOD)(request))
                command = [sys.executable, "-m", "embedserve.loadtest.echo", str(answer_bytes), str(THREADS)]
                echo, line = start(command, server_cpus)
                try:
                    ours: list[float] = []
                    bare: list[float] = []
                    for number in range(rounds):
                        turns = [(server.address, ours), (line.split()[1], bare)]
                        for address, rates in turns if number % 2 else reversed(turns):
                            rates.append(
                                generators.rate(address, METHOD, request, answer_bytes, CALLERS, requests, load_cpus)
                            )
                finally:
                    finish(echo)
                name = f"{label} ({answer_bytes:,} B)"
                figures.append(
                    Figure(name, statistics.median(ours), "requests/s", "grpcio echo", statistics.median(bare))
                )
                say(f"{name}: {figures[-1].ratio:.2f} of the echo")
    return figures
