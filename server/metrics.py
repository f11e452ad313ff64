"""What Prometheus reads, and a page for people, on a port of their own.

/metrics      Prometheus's text format
/             the status page, which asks for /stats.json every second
/stats.json   AdminService.GetStats, as JSON

Labels are methods, codes, tables that are served and tiers: nothing that a request says becomes one.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from google.protobuf import json_format
from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from embedserve.proto import admin_pb2
from embedserve.quant.errors import ConfigError
from embedserve.server.admin import Admin
from embedserve.server.stats import MethodStats, upper_us

log = logging.getLogger(__name__)
SERVICE = "embedserve.v1.EmbeddingService"
STATUS_PAGE = Path(__file__).parent / "status.html"
# Ends of buckets that are ends of the histogram's own: 64 us to 8.4 s, by twos.
ENDS_US = tuple(64 << i for i in range(18))
BREAKER = {"closed": 0, "half-open": 1, "open": 2}
LABELS = ["grpc_type", "grpc_service", "grpc_method"]


class ServerCollector(Collector):
    """The server's own counts, read when Prometheus asks."""

    def __init__(self, admin: Admin, methods: dict[str, MethodStats]) -> None:
        self._admin, self._methods = admin, methods

    def collect(self) -> Iterator[Any]:
        yield from self._calls()
        stats = self._admin.get_stats(admin_pb2.GetStatsRequest())
        yield InfoMetricFamily("embedserve_build", "What runs.", {"frontend": stats.frontend, "kernels": stats.kernels})
        yield GaugeMetricFamily(
            "embedserve_pool_bytes", "Of the ram tier, for rows of tables that are not held whole.", stats.pool_bytes
        )
        yield GaugeMetricFamily(
            "embedserve_requests_in_progress", "Calls admitted and not yet answered.", stats.in_progress
        )
        yield from _tables(stats.tables)
        yield from _tiers(stats.tables)

    def _calls(self) -> Iterator[Any]:
        handled = CounterMetricFamily(
            "grpc_server_handled",
            "Calls answered, messages of streams one by one, by code.",
            labels=[*LABELS, "grpc_code"],
        )
        seconds = HistogramMetricFamily(
            "grpc_server_handling_seconds", "From a request's arrival to its answer.", labels=LABELS
        )
        rows = CounterMetricFamily("embedserve_rows", "Rows and queries asked for.", labels=["grpc_method"])
        for name, method in self._methods.items():
            now, labels = method.snapshot(), [method.kind, SERVICE, name]
            for code, count in now.codes.items():
                handled.add_metric([*labels, code], count)
            seconds.add_metric(labels, _cumulative(now.counts), now.sum_us / 1e6)
            rows.add_metric([name], now.rows)
        yield from (handled, seconds, rows)


def _cumulative(counts: tuple[int, ...]) -> list[tuple[str, float]]:
    found, total, bucket = [], 0, 0
    for end in ENDS_US:
        while bucket < len(counts) and upper_us(bucket) <= end:
            total += counts[bucket]
            bucket += 1
        found.append((f"{end / 1e6:g}", float(total)))
    return [*found, ("+Inf", float(sum(counts)))]


def _tables(tables: Iterable[admin_pb2.TableStats]) -> Iterator[Any]:
    info = InfoMetricFamily("embedserve_table", "The version that answers.", labels=["table"])
    gauges = {
        field: GaugeMetricFamily(f"embedserve_table_{field}", text, labels=["table"])
        for field, text in (
            ("memory_bytes", "Of all open versions, without the pool."), ("upserted_rows", "That lie over the version."),
            ("last_reload_s", "How long the last reload took."), ("as_published", "Whether what answers is what is published."),
        )
    }  # fmt: skip
    reloads = CounterMetricFamily(
        "embedserve_reloads", "Versions taken up, refused, and gone back to.", labels=["table", "outcome"]
    )
    shadow = CounterMetricFamily(
        "embedserve_shadow_rows", "Cached rows compared with the colder tier.", labels=["table", "outcome"]
    )
    for table in tables:
        info.add_metric([table.table], {"version": table.version})
        for field, gauge in gauges.items():
            gauge.add_metric([table.table], float(getattr(table, field)))
        for outcome in ("taken", "refused", "rolled_back"):
            reloads.add_metric([table.table, outcome], getattr(table, outcome))
        shadow.add_metric([table.table, "same"], table.shadow_compared - table.shadow_differing)
        shadow.add_metric([table.table, "differing"], table.shadow_differing)
    yield from (info, *gauges.values(), reloads, shadow)


def _tiers(tables: Iterable[admin_pb2.TableStats]) -> Iterator[Any]:
    """Counters begin anew with each version: rate() takes that for a restart."""
    labels = ["table", "tier"]
    counters = {
        field: CounterMetricFamily(f"embedserve_tier_{name}", text, labels=labels)
        for field, name, text in (
            ("hits", "hits", "Rows it gave."), ("misses", "misses", "Rows that the next tier was asked for."),
            ("evictions", "evictions", "Rows that left for others."), ("declined", "declined", "Rows not taken in for want of room."),
            ("unavailable", "unavailable_rows", "Rows it could not give."), ("fetches", "fetches", "Reads, of many rows each."),
            ("fetch_s", "fetch_seconds", "Time they took."), ("damaged_pages", "damaged_pages", "Pages that were not what they should be."),
        )
    }  # fmt: skip
    gauges = {
        field: GaugeMetricFamily(f"embedserve_tier_{field}", text, labels=labels)
        for field, text in (("rows", "That it holds."), ("bytes", "That these take."))
    }
    breaker = GaugeMetricFamily(
        "embedserve_breaker_state", "Of the circuit to Redis: 0 closed, 1 half-open, 2 open.", labels=["table"]
    )
    everything: dict[str, Any] = {**counters, **gauges}
    for table in tables:
        for tier in table.tiers:
            at = [table.table, tier.tier]
            for field, metric in everything.items():
                metric.add_metric(at, getattr(tier, field))
            if tier.state:
                breaker.add_metric([table.table], BREAKER[tier.state])
    yield from (*counters.values(), *gauges.values(), breaker)


class MetricsServer:
    """Serves the three pages; `start`, then `stop` once."""

    def __init__(self, host: str, port: int, admin: Admin, methods: dict[str, MethodStats]) -> None:
        """Raises ConfigError if the port cannot be had; 0 picks a free one."""
        self._admin = admin
        self._registry = CollectorRegistry()
        self._registry.register(ServerCollector(admin, methods))
        for each in (ProcessCollector, PlatformCollector, GCCollector):
            each(registry=self._registry)
        try:
            self._server = make_server(host, port, self._answer, _Server, handler_class=_Quiet)
        except OSError as error:
            raise ConfigError(
                f"metrics_port: cannot listen on {host}:{port}: {error.strerror}; 0 picks a free port"
            ) from None
        self.port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.2,), name="metrics", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, environ: dict[str, Any], begin: Any) -> list[bytes]:
        try:
            status, kind, body = self._page(environ.get("PATH_INFO", ""))
        except Exception:  # (the boundary)
            log.exception("a page could not be made")
            status, kind, body = "500 Internal Server Error", "text/plain", b"the server's log says why\n"
        begin(status, [("Content-Type", kind), ("Content-Length", str(len(body))), ("Cache-Control", "no-store")])
        return [body] if environ.get("REQUEST_METHOD") != "HEAD" else []

    def _page(self, path: str) -> tuple[str, str, bytes]:
        if path == "/metrics":
            return "200 OK", CONTENT_TYPE_LATEST, generate_latest(self._registry)
        if path == "/stats.json":
            stats = self._admin.get_stats(admin_pb2.GetStatsRequest())
            text = json_format.MessageToJson(
                stats, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
            )
            return "200 OK", "application/json", text.encode()
        if path == "/":
            return "200 OK", "text/html; charset=utf-8", STATUS_PAGE.read_bytes()
        return "404 Not Found", "text/plain", b"there is /, /metrics and /stats.json\n"


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _Quiet(WSGIRequestHandler):
    timeout = 10

    def log_message(self, format: str, *args: Any) -> None:
        log.debug(format, *args)
