"""Latency and memory stay flat over many requests."""

from __future__ import annotations

import sys
import time
from contextlib import contextmanager
from itertools import product
from pathlib import Path

import grpc
import numpy as np
from conftest import publish_table

from embedserve.loadtest.servers import ServerProcess, finish, start
from embedserve.proto import embedding_pb2

STREAMED, UNARY = 196_000, 4_000


def resident_kb(pid: int) -> int:
    return int(
        next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS")).split()[
            1
        ]
    )


def test_200_000_requests_leave_latency_and_memory_as_they_were(catalog_root):
    """Most of them over one stream, where one test has the time for them; with missing ids among them.

    Latency is held against a bare echo's, asked in turns with ours: a shared machine may be several times slower
    a minute later, for both.
    """
    ids = np.random.default_rng(0).integers(-2, 1000, (50, 64))
    requests = [
        embedding_pb2.LookupRequest(table="items", ids=row, output=embedding_pb2.FLOAT16).SerializeToString()
        for row in ids
    ]
    echo, line = start([sys.executable, "-m", "embedserve.loadtest.echo", "4000", "16"])
    with (
        closing(echo),
        ServerProcess(catalog_root) as server,
        grpc.insecure_channel(server.address) as channel,
        grpc.insecure_channel(line.split()[1]) as echo_channel,
    ):
        calls = [each.unary_unary("/embedserve.v1.EmbeddingService/Lookup") for each in (channel, echo_channel)]
        stream = channel.stream_stream("/embedserve.v1.EmbeddingService/LookupStream")

        def latency(n):
            """Median seconds of ours over the echo's."""
            seconds = np.empty((n, 2))
            for i, (turn, call) in product(range(n), enumerate(calls)):
                begun = time.perf_counter()
                call(requests[i % 50])
                seconds[i, turn] = time.perf_counter() - begun
            ours, bare = np.median(seconds, axis=0)
            return ours / bare

        def streamed(n):
            assert sum(1 for _ in stream(requests[i % 50] for i in range(n))) == n

        latency(UNARY // 10)
        streamed(STREAMED // 20)
        first = latency(UNARY // 2)
        streamed(STREAMED // 2)
        memory = resident_kb(server.pid)
        second = latency(UNARY // 2)
        streamed(STREAMED // 2)
        grown = resident_kb(server.pid) - memory
    assert grown < 8 << 10, f"{grown} KB"
    assert second < 1.5 * first, (first, second)


def test_random_keys_leave_memory_within_the_pool(tmp_path):
    """Ten times more rows pass through the pool than it holds: what it takes is taken at the start."""
    budget, rows, requests = 32 << 20, 600_000, 1_200
    publish_table(tmp_path / "root", "items", np.random.default_rng(0).standard_normal((rows, 64), np.float32))
    rng = np.random.default_rng(1)
    with (
        ServerProcess(tmp_path / "root", "--memory-pool-size", str(budget)) as server,
        grpc.insecure_channel(server.address) as channel,
    ):
        stream = channel.stream_stream("/embedserve.v1.EmbeddingService/LookupStream")

        def ask(n):
            for _ in range(n):
                ids = rng.integers(0, rows, 4096)
                yield embedding_pb2.LookupRequest(table="items", ids=ids, output=3).SerializeToString()

        def memory_after(n):
            assert sum(1 for _ in stream(ask(n))) == n
            return resident_kb(server.pid) << 10

        started = memory_after(requests // 20)
        half = memory_after(requests // 2)
        end = memory_after(requests // 2)
    # What grows are glibc's arenas, a few MB for each thread that gRPC writes answers of 1 MB from; 350 MB of rows went through.
    assert end - half < 8 << 20 and end - started < budget // 2, (started, half, end)


@contextmanager
def closing(process):
    try:
        yield
    finally:
        finish(process)
