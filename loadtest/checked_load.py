"""Load at a fixed rate from a process of its own, every answer held against the true one.

An open loop: requests leave when they are due whether or not earlier ones came back, and latency counts
from when a request was due, so a server that stalls is seen to stall.
"""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import TracebackType

import grpc
import numpy as np
import numpy.typing as npt

from embedserve.proto import wire_pb2

SERVICE = "/embedserve.v1.EmbeddingService/"
THREADS = 12
OK, WRONG, FAILED = range(3)
RECORD = np.dtype([("due_s", "f8"), ("latency_s", "f8"), ("ask", "i4"), ("outcome", "i4")])
Truth = tuple[bytes, ...]  # what must come back, field by field


@dataclass(frozen=True)
class Ask:
    """One request, and what each version of its table must answer: (values,) of a Lookup, (ids, scores) of a TopK."""

    table: str
    method: str
    request: bytes
    truth: Mapping[str, Truth]


class CheckedLoad:
    """Sends `asks` in turn, `rate` a second, until stopped; a context manager. `records`, once it has ended: RECORD [n]."""

    def __init__(self, address: str, asks: Sequence[Ask], rate: float) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._ours, self._theirs = spawn.Pipe()
        self._process = spawn.Process(target=_send, args=(self._theirs, address, list(asks), rate), daemon=True)
        self.records: npt.NDArray[np.void] = np.empty(0, RECORD)

    def __enter__(self) -> CheckedLoad:
        self._process.start()
        self._theirs.close()  # or its end would not be seen here
        self._ours.recv()  # begun
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ours.send("stop")
        self.records = self._ours.recv()
        self._process.join()


def _send(pipe: Connection, address: str, asks: list[Ask], rate: float) -> None:
    stop = threading.Event()
    records: list[list[tuple[float, float, int, int]]] = [[] for _ in range(THREADS)]
    begin = time.monotonic() + 0.5

    def work(mine: int) -> None:
        options = [("grpc.use_local_subchannel_pool", 1)]
        with grpc.insecure_channel(address, options) as channel:
            number = mine
            while not stop.is_set():
                due = begin + number / rate
                time.sleep(max(0.0, due - time.monotonic()))
                index = number % len(asks)
                outcome = _answered(channel, asks[index])
                records[mine].append((due, time.monotonic() - due, index, outcome))
                number += THREADS

    threads = [threading.Thread(target=work, args=(i,)) for i in range(THREADS)]
    for thread in threads:
        thread.start()
    pipe.send("begun")
    pipe.recv()
    stop.set()
    for thread in threads:
        thread.join()
    pipe.send(np.array(sorted(record for each in records for record in each), RECORD))


def _answered(channel: grpc.Channel, ask: Ask) -> int:
    try:
        data = channel.unary_unary(SERVICE + ask.method)(ask.request, timeout=10)
    except grpc.RpcError:
        return FAILED
    if ask.method == "Lookup":
        lookup = wire_pb2.LookupResponse.FromString(data)
        return OK if ask.truth.get(lookup.version) == (lookup.values,) else WRONG
    topk = wire_pb2.TopKResponse.FromString(data)
    return OK if ask.truth.get(topk.version) == (topk.ids, topk.scores) else WRONG
