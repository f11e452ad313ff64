"""A server's life, in the order it happens: open, warm up, listen, watch, serve, drain."""

from __future__ import annotations

import gc
import ipaddress
import logging
import signal
from collections.abc import Callable
from queue import SimpleQueue

from embedserve.proto import wire_pb2
from embedserve.quant.errors import FailedPrecondition
from embedserve.server import logs
from embedserve.server.admin import Admin
from embedserve.server.config import ServerConfig
from embedserve.server.engine import Engine
from embedserve.server.frontend.grpcio import GrpcioFrontend
from embedserve.server.metrics import MetricsServer
from embedserve.server.reload import Reloader
from embedserve.server.service import ERROR, Service
from embedserve.server.upkeep import Upkeep
from embedserve.server.upserts import UpsertWriter
from embedserve.server.watch import Watcher

log = logging.getLogger(__name__)
WARM_UP_ROUNDS, ASKED_KEYS = 3, 16


def serve(config: ServerConfig, ready: Callable[[str], None]) -> None:
    """Serves until SIGTERM or SIGINT, then drains. `ready` gets the line that says where it listens.

    Raises ConfigError or ArtifactError before anything is served.
    """
    logs.configure(config.log_format, config.log_level)
    engine = Engine(config)
    service = Service(engine, config)
    _warm_up(service, engine)
    frontend = GrpcioFrontend(service, config)
    reloader = Reloader(engine, lambda table, version: _ask(service, engine, table, version), frontend.table_health)
    upserts = UpsertWriter(engine)
    watcher = Watcher(engine, reloader, upserts)
    upkeep = Upkeep(engine, frontend.stats, frontend.rows_available)
    admin = Admin(engine, reloader, upserts, upkeep, frontend.stats, frontend.name, frontend.in_progress)
    frontend.add_admin(admin)
    metrics = MetricsServer(config.host, config.metrics_port, admin, frontend.stats) if config.metrics else None
    _warn_if_open(config)
    # What is loaded by now lives as long as the process: the collector need not look at it during requests.
    gc.collect()
    gc.freeze()

    # A queue and not an Event: a signal may come while this thread holds the lock within an Event.
    stop: SimpleQueue[int] = SimpleQueue()
    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, lambda number, _: stop.put(number))
    signal.signal(signal.SIGHUP, lambda *_: _request_all(reloader, engine))
    reloader.start()
    upserts.start()
    upkeep.start()
    frontend.start()
    frontend.serve_health()
    if metrics:
        metrics.start()
    if config.watch:
        watcher.start()
    ports = {"listening": frontend.port, "admin": frontend.admin_port, **({"metrics": metrics.port} if metrics else {})}
    ready(" ".join(f"{name} {config.host}:{port}" for name, port in ports.items()))
    stop.get()
    log.info("draining", extra={"drain_s": config.drain_s})
    if config.watch:
        watcher.stop()
    frontend.drain()
    upkeep.stop()
    upserts.stop()
    reloader.stop()
    if metrics:
        metrics.stop()
    log.info("stopped")


def _request_all(reloader: Reloader, engine: Engine) -> None:
    for name in engine.published():
        reloader.request(name)


def _warm_up(service: Service, engine: Engine) -> None:
    for name, table in engine.served.tables.items():
        _ask(service, engine, name, table.current.name)


def _ask(service: Service, engine: Engine, table: str, version: str) -> None:
    """Runs the request path of a table's version, some times: whether it answers, and so that the first caller
    pays for no first time. Raises EmbedserveError if it does not answer as it should."""
    served = engine.served.resolve(table, version)
    keys = served.artifact.sample_keys(ASKED_KEYS).astype("<i8")
    lookup = wire_pb2.LookupRequest(table=table, version=version, ids=[keys.tobytes()], on_missing=ERROR)
    topk = wire_pb2.TopKRequest(
        table=table, version=version, query_ids=[keys[:1].tobytes()], k=1, allow=[keys.tobytes()]
    )
    for _ in range(WARM_UP_ROUNDS):
        answer, _ = service.lookup(lookup.SerializeToString())
    if wire_pb2.LookupResponse.FromString(answer).version != version:
        raise FailedPrecondition(f"asked for version {version}, another answered")
    if served.searchable:
        service.topk(topk.SerializeToString())


def _warn_if_open(config: ServerConfig) -> None:
    try:
        loopback = ipaddress.ip_address(config.host).is_loopback
    except ValueError:
        loopback = config.host == "localhost"
    if not loopback and config.auth_tokens is None and config.tls_client_ca is None:
        log.warning(
            "listening beyond this machine without tokens or client certificates: anyone who reaches it may ask"
        )
    if not loopback and config.tls_cert is None:
        log.warning("listening beyond this machine without TLS: rows and tokens travel in the clear")
    if not loopback and config.admin_tokens is None:
        log.warning("AdminService listens beyond this machine without admin_tokens")
