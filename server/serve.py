"""A server's life, in the order it happens: open, warm up, listen, serve, drain."""

from __future__ import annotations

import gc
import ipaddress
import logging
import signal
import threading
from collections.abc import Callable

import numpy as np

from embedserve.proto import wire_pb2
from embedserve.server import logs
from embedserve.server.admin import Admin
from embedserve.server.config import ServerConfig
from embedserve.server.engine import Engine
from embedserve.server.frontend.grpcio import GrpcioFrontend
from embedserve.server.service import Service

log = logging.getLogger(__name__)
WARM_UP_ROUNDS = 3


def serve(config: ServerConfig, ready: Callable[[str], None]) -> None:
    """Serves until SIGTERM or SIGINT, then drains. `ready` gets the line that says where it listens.

    Raises ConfigError or ArtifactError before anything is served.
    """
    logs.configure(config.log_format, config.log_level)
    engine = Engine(config)
    service = Service(engine, config)
    _warm_up(service, engine)
    frontend = GrpcioFrontend(service, config)
    frontend.add_admin(Admin(engine, frontend.stats, frontend.name))
    _warn_if_open(config)
    # What is loaded by now lives as long as the process: the collector need not look at it during requests.
    gc.collect()
    gc.freeze()

    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    frontend.start()
    frontend.serve_health(list(engine.tables))
    ready(f"listening {config.host}:{frontend.port} admin {config.host}:{frontend.admin_port}")
    stop.wait()
    log.info("draining", extra={"drain_s": config.drain_s})
    frontend.drain()
    log.info("stopped")


def _warm_up(service: Service, engine: Engine) -> None:
    """Runs the request path once or more for every table, so that the first caller pays for no first time."""
    for name, table in engine.tables.items():
        ids = table.current.keys_at(np.arange(min(16, table.current.manifest.rows))).astype("<i8").tobytes()
        lookup = wire_pb2.LookupRequest(table=name, ids=[ids]).SerializeToString()
        topk = wire_pb2.TopKRequest(table=name, query_ids=[ids[:8]], k=1).SerializeToString()
        for _ in range(WARM_UP_ROUNDS):
            service.lookup(lookup)
        service.topk(topk)


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
