"""Locust users of EmbeddingService: Lookup, LookupBatch and TopK by id, mixed by weight.

    locust -f loadtest/locustfile.py --host 127.0.0.1:50051 --table items --rows 9066            # web UI on port 8089
    locust -f loadtest/locustfile.py --host 127.0.0.1:50051 --headless -u 20 -r 20 -t 1m --rate 10 --html report.html

`--processes 4`, or `--master` and `--worker`, spread users over processes and machines. Each user has a channel of its own.
With locust_steps.py in place of this file, users are added in steps.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import gevent
import grpc
import grpc.experimental.gevent as grpc_gevent
import numpy as np
import numpy.typing as npt
from locust import User, events, stats, task
from locust.argument_parser import LocustArgumentParser
from locust.env import Environment
from locust.exception import StopUser
from locust.user.wait_time import constant_throughput

from embedserve.proto import embedding_pb2 as pb

grpc_gevent.init_gevent()
SERVICE = "/embedserve.v1.EmbeddingService/"
DRAWN = 1_000_000


@events.init_command_line_parser.add_listener
def _options(parser: LocustArgumentParser) -> None:
    group = parser.add_argument_group("embedserve")
    group.add_argument("--table", default="items", help="table that is asked", env_var="LOCUST_TABLE")
    group.add_argument("--rows", type=int, default=1000, help="ids are 0 to ROWS - 1, by Zipf", env_var="LOCUST_ROWS")
    group.add_argument("--zipf", type=float, default=0.99, help="skew of the ids; 0: all alike", env_var="LOCUST_ZIPF")
    group.add_argument(
        "--trace", default="", help="a .npy of int64 ids to ask for in that order, instead", env_var="LOCUST_TRACE"
    )
    group.add_argument("--ids", type=int, default=256, help="ids a Lookup", env_var="LOCUST_IDS")
    group.add_argument("--k", type=int, default=10, help="of TopK", env_var="LOCUST_K")
    group.add_argument(
        "--rate",
        type=float,
        default=0.0,
        help="requests a second of each user; 0: as fast as answers come",
        env_var="LOCUST_RATE",
    )
    for name, weight in (("lookup", 8), ("batch", 1), ("topk", 1)):
        group.add_argument(
            f"--{name}-weight",
            type=int,
            default=weight,
            help=f"share of {name}",
            env_var=f"LOCUST_{name.upper()}_WEIGHT",
        )


@events.quitting.add_listener
def _let_the_last_second_be_written(environment: Environment, **_: Any) -> None:
    """Locust writes its CSVs once a second, and closes them without another look."""
    if environment.parsed_options.csv_prefix:
        gevent.sleep(stats.CSV_STATS_INTERVAL_SEC + 0.2)


class Ids:
    """Ids in the order they are asked for, of all users of a process."""

    def __init__(self, options: Any) -> None:
        self._at = 0
        if options.trace:
            self._ids = np.asarray(np.load(Path(options.trace), allow_pickle=False), np.int64)
        else:
            rng = np.random.default_rng()
            weights = np.arange(1, options.rows + 1, dtype=np.float64) ** -options.zipf
            ranks = np.searchsorted(np.cumsum(weights) / weights.sum(), rng.random(DRAWN))
            self._ids = (
                np.random.default_rng(0).permutation(options.rows)[np.minimum(ranks, options.rows - 1)].astype(np.int64)
            )

    def take(self, n: int) -> npt.NDArray[np.int64]:
        places = np.arange(self._at, self._at + n) % len(self._ids)
        self._at = int(places[-1]) + 1
        return np.asarray(self._ids[places])


_ids: Ids | None = None


class EmbedserveUser(User):
    """Asks one request after another, or `--rate` a second."""

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        global _ids  # noqa: PLW0603 (one trace for all users of a process)
        options = environment.parsed_options
        _ids = _ids or Ids(options)
        self._ids, self._options = _ids, options
        if not self.host:
            raise ValueError("give --host HOST:PORT of EmbeddingService")
        if options.rate:
            self.wait_time = constant_throughput(options.rate).__get__(self)
        else:
            self.wait_time = lambda: 0
        self.tasks = [
            each
            for each, weight in (
                (EmbedserveUser.lookup, options.lookup_weight),
                (EmbedserveUser.batch, options.batch_weight),
                (EmbedserveUser.topk, options.topk_weight),
            )
            for _ in range(weight)
        ]
        if not self.tasks:
            raise StopUser("all weights are 0")

    def on_start(self) -> None:
        self._channel = grpc.insecure_channel(
            self.host.removeprefix("grpc://"),
            [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1)],
        )

    def on_stop(self) -> None:
        self._channel.close()

    @task
    def lookup(self) -> None:
        self._ask(
            "Lookup",
            pb.LookupRequest(table=self._options.table, ids=self._ids.take(self._options.ids), output=pb.FLOAT16),
        )

    @task
    def batch(self) -> None:
        half = max(1, self._options.ids // 2)
        parts = [
            pb.LookupRequest(table=self._options.table, ids=self._ids.take(half), output=pb.FLOAT16) for _ in range(2)
        ]
        self._ask("LookupBatch", pb.LookupBatchRequest(requests=parts))

    @task
    def topk(self) -> None:
        ids = self._ids.take(1)
        self._ask("TopK", pb.TopKRequest(table=self._options.table, query_ids=ids, k=self._options.k, exclude=ids))

    def _ask(self, method: str, request: Any) -> None:
        """In a greenlet of its own: Locust may stop a user that has just begun, and then what it asked for counts all the same."""
        sending = gevent.spawn(self._send, method, request.SerializeToString())
        try:
            sending.join()
        finally:
            sending.join()

    def _send(self, method: str, data: bytes) -> None:
        """Locust hears of a request's time, its answer's bytes, and of a failure its code and message."""
        failure, length = None, 0
        begun = time.perf_counter()
        try:
            length = len(self._channel.unary_unary(SERVICE + method)(data, timeout=30))
        except grpc.RpcError as error:
            failure = RuntimeError(f"{error.code().name}: {error.details()}")
        took_ms = 1000 * (time.perf_counter() - begun)
        self.environment.events.request.fire(
            request_type="grpc",
            name=method,
            response_time=took_ms,
            response_length=length,
            exception=failure,
            context=self.context(),
        )
