"""The grpcio front end: sync server, one thread a call, every feature of gRPC.

Every call goes through one of two wrappers, unary or streaming, which admit it (token, draining, room,
deadline), count it and turn errors into statuses; the service sees bytes only.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2
from grpc_status import rpc_status

from embedserve.proto import admin_pb2, embedding_pb2, wire_pb2
from embedserve.quant.errors import ConfigError, DeadlineExceeded, EmbedserveError, ResourceExhausted, Unavailable
from embedserve.server import wire
from embedserve.server.admin import Admin
from embedserve.server.auth import TokenAuth
from embedserve.server.config import ServerConfig
from embedserve.server.frontend.status import to_status
from embedserve.server.frontend.workers import Workers, submitted
from embedserve.server.service import Service
from embedserve.server.stats import MethodStats

if TYPE_CHECKING:
    from embedserve.server.traces import Tracer

log = logging.getLogger(__name__)
EMBEDDING = embedding_pb2.DESCRIPTOR.services_by_name["EmbeddingService"].full_name
ADMIN = admin_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name
REFLECTION_V1 = "grpc.reflection.v1.ServerReflection"
RETRY_AFTER_S = 0.05
ADMIN_THREADS = 32  # reloads and upserts hold one each while they wait
SPARE_THREADS = 4  # for health, reflection and refusals while all room is taken

Call = Callable[[bytes], tuple[bytes, int]]


class _Room:
    """At most `limit` calls at once; more are refused, not queued."""

    def __init__(self, limit: int, name: str) -> None:
        self._limit, self._name = limit, name
        self._places = [None] * limit  # a list's pop and append are atomic, and cost less than a lock

    def __enter__(self) -> None:
        try:
            self._places.pop()
        except IndexError:
            raise ResourceExhausted(
                f"overloaded: {self._limit} calls in progress ({self._name}); retry later", RETRY_AFTER_S
            ) from None

    def __exit__(self, *error: object) -> None:
        self._places.append(None)

    @property
    def taken(self) -> int:
        return self._limit - len(self._places)


class GrpcioFrontend:
    """Serves one Service on `port` and one Admin on `admin_port`; `start`, then `drain` once."""

    name = "grpcio"

    def __init__(self, service: Service, config: ServerConfig) -> None:
        self._config = config
        self._draining = False
        self._workers: list[Workers] = []
        self._requests = _Room(config.max_concurrent_requests, "max_concurrent_requests")
        self._streams = _Room(config.max_concurrent_streams, "max_concurrent_streams")
        self._auth = TokenAuth(config.auth_tokens) if config.auth_tokens else None
        self._admin_auth = TokenAuth(config.admin_tokens) if config.admin_tokens else None
        self.health = health.HealthServicer()
        self.stats = {name: MethodStats() for name in ("Lookup", "LookupBatch", "TopK")}
        self.stats["LookupStream"] = MethodStats("bidi_stream")
        calls: dict[str, Call] = {"Lookup": service.lookup, "LookupBatch": service.lookup_batch, "TopK": service.topk}
        unary = {name: self._unary(call, self.stats[name]) for name, call in calls.items()}
        stream = self._stream(service.lookup, self.stats["LookupStream"])
        self._tracer = _tracer(config)
        if self._tracer:
            unary = {name: self._tracer.unary(name, handle) for name, handle in unary.items()}
            stream = self._tracer.stream("LookupStream", stream)
        handlers = {name: grpc.unary_unary_rpc_method_handler(handle) for name, handle in unary.items()}
        handlers["LookupStream"] = grpc.stream_stream_rpc_method_handler(stream)
        threads = config.max_concurrent_requests + config.max_concurrent_streams + SPARE_THREADS
        self._server = self._new_server(EMBEDDING, handlers, threads)
        self._admin_server: grpc.Server | None = None
        self.port = _bind(self._server, config, config.port, "port")
        self.admin_port = 0

    def add_admin(self, admin: Admin) -> None:
        """Opens AdminService on its own port."""
        calls: dict[str, tuple[type[Message], Callable[[Any], Message]]] = {
            "ListTables": (admin_pb2.ListTablesRequest, admin.list_tables),
            "DescribeTable": (admin_pb2.DescribeTableRequest, admin.describe_table),
            "GetStats": (admin_pb2.GetStatsRequest, admin.get_stats),
            "Reload": (admin_pb2.ReloadRequest, admin.reload),
            "Rollback": (admin_pb2.RollbackRequest, admin.rollback),
            "Unload": (admin_pb2.UnloadRequest, admin.unload),
            "Warm": (wire_pb2.WarmRequest, admin.warm),
            "Upsert": (wire_pb2.UpsertRequest, admin.upsert),
        }
        handlers = {
            name: grpc.unary_unary_rpc_method_handler(self._admin_call(kind, call))
            for name, (kind, call) in calls.items()
        }
        self._admin_server = self._new_server(ADMIN, handlers, ADMIN_THREADS)
        self.admin_port = _bind(self._admin_server, self._config, self._config.admin_port, "admin_port")

    def start(self) -> None:
        self._server.start()
        if self._admin_server:
            self._admin_server.start()

    def in_progress(self) -> int:
        """Calls and streams admitted and not yet answered."""
        return self._requests.taken + self._streams.taken

    def serve_health(self) -> None:
        """Turns EmbeddingService and the whole server to SERVING."""
        for name in ("", EMBEDDING):
            self.health.set(name, health_pb2.HealthCheckResponse.SERVING)

    def table_health(self, table: str, served: bool, as_published: bool) -> None:
        """A table's health under its name; under `TABLE:current`, whether it is served as the catalog says."""
        for name, well in ((table, served), (f"{table}:current", as_published)):
            status = health_pb2.HealthCheckResponse.SERVING if well else health_pb2.HealthCheckResponse.NOT_SERVING
            self.health.set(name, status)

    def rows_available(self, table: str, yes: bool) -> None:
        """A table's health under its name, while its only full tier comes and goes."""
        self.health.set(
            table, health_pb2.HealthCheckResponse.SERVING if yes else health_pb2.HealthCheckResponse.NOT_SERVING
        )

    def drain(self) -> None:
        """Turns health to NOT_SERVING, refuses new calls, and waits up to drain_s for those in flight."""
        self.health.enter_graceful_shutdown()
        self._draining = True
        stopped = [s.stop(self._config.drain_s) for s in (self._server, self._admin_server) if s]
        for event in stopped:
            event.wait()
        for workers in self._workers:
            workers.shutdown()
        if self._tracer:
            self._tracer.stop()

    def _new_server(self, service: str, handlers: dict[str, grpc.RpcMethodHandler], threads: int) -> grpc.Server:
        workers = Workers(threads, service.rpartition(".")[2])
        self._workers.append(workers)
        server = grpc.server(
            workers,
            maximum_concurrent_rpcs=2 * threads,
            options=[
                ("grpc.so_reuseport", 0),  # a port in use is an error, not a second server
                ("grpc.max_receive_message_length", self._config.max_request_bytes),
                ("grpc.max_send_message_length", -1),
            ],
        )
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
        health_pb2_grpc.add_HealthServicer_to_server(self.health, server)
        _add_reflection(server, (service, health.SERVICE_NAME, reflection.SERVICE_NAME, REFLECTION_V1))
        return server

    def _admit(self, context: grpc.ServicerContext, auth: TokenAuth | None) -> None:
        if auth:
            auth.check(context.invocation_metadata())
        if self._draining:
            raise Unavailable("this server is shutting down; retry on another")
        remaining = context.time_remaining()
        if remaining is not None and remaining <= 0:
            raise DeadlineExceeded("the deadline passed before work was begun")

    def _unary(self, call: Call, stats: MethodStats) -> Callable[[bytes, grpc.ServicerContext], bytes]:
        def handle(request: bytes, context: grpc.ServicerContext) -> bytes:
            try:
                with self._requests:
                    self._admit(context, self._auth)
                    answer, rows = call(request)
            except Exception as error:  # noqa: BLE001 (the boundary: every error becomes a status)
                stats.ended(submitted(), 0, _code(error))
                failure = error
            else:
                stats.ended(submitted(), rows)
                return answer
            try:
                _abort(context, failure)
            finally:
                del failure  # or this frame and the error keep each other, and what the request read, alive
            raise AssertionError("abort raises")

        return handle

    def _stream(
        self, call: Call, stats: MethodStats
    ) -> Callable[[Iterator[bytes], grpc.ServicerContext], Iterator[bytes]]:
        def handle(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
            begun = time.perf_counter()
            try:
                with self._streams:
                    self._admit(context, self._auth)
                    for request in requests:
                        begun = time.perf_counter()
                        self._admit(context, None)
                        answer, rows = call(request)
                        stats.ended(begun, rows)
                        yield answer
                    return
            except grpc.RpcError:
                return  # the caller went away: nobody is left to tell
            except Exception as error:  # noqa: BLE001 (the boundary: every error becomes a status)
                stats.ended(begun, 0, _code(error))
                failure = error
            try:
                _abort(context, failure)
            finally:
                del failure

        return handle

    def _admin_call(
        self, kind: type[Message], call: Callable[[Any], Message]
    ) -> Callable[[bytes, grpc.ServicerContext], bytes]:
        def handle(request: bytes, context: grpc.ServicerContext) -> bytes:
            try:
                self._admit(context, self._admin_auth)
                return call(wire.parse(kind, request)).SerializeToString()
            except Exception as error:  # noqa: BLE001 (the boundary: every error becomes a status)
                failure = error
            try:
                _abort(context, failure)
            finally:
                del failure
            raise AssertionError("abort raises")

        return handle


def _tracer(config: ServerConfig) -> Tracer | None:
    if not config.traces:
        return None
    from embedserve.server.traces import Tracer  # and with it OpenTelemetry

    return Tracer(config.traces, EMBEDDING)


def _code(error: Exception) -> str:
    return error.code if isinstance(error, EmbedserveError) else "INTERNAL"


def _abort(context: grpc.ServicerContext, error: Exception) -> None:
    if not isinstance(error, EmbedserveError):
        incident = uuid.uuid4().hex[:12]
        log.error("internal error %s", incident, exc_info=error)
        error = EmbedserveError(f"internal error; the server's log has it as {incident}")
    context.abort_with_status(rpc_status.to_status(to_status(error)))


def _add_reflection(server: grpc.Server, services: tuple[str, ...]) -> None:
    """Reflection v1alpha, and v1, whose messages differ in nothing but their package's name."""
    reflection.enable_server_reflection(services, server)
    handler = grpc.stream_stream_rpc_method_handler(
        reflection.ReflectionServicer(services).ServerReflectionInfo,
        reflection_pb2.ServerReflectionRequest.FromString,
        reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(REFLECTION_V1, {"ServerReflectionInfo": handler}),)
    )


def _bind(server: grpc.Server, config: ServerConfig, port: int, setting: str) -> int:
    host = f"[{config.host}]" if ":" in config.host else config.host
    address = f"{host}:{port}"
    try:
        if config.tls_cert and config.tls_key:
            return int(server.add_secure_port(address, _credentials(config, config.tls_cert, config.tls_key)))
        return int(server.add_insecure_port(address))
    except RuntimeError:
        raise ConfigError(
            f"{setting}: cannot listen on {address}: in use, or not an address of this machine; 0 picks a free port"
        ) from None


def _credentials(config: ServerConfig, cert: Path, key: Path) -> grpc.ServerCredentials:
    try:
        pair = (key.read_bytes(), cert.read_bytes())
        roots = config.tls_client_ca.read_bytes() if config.tls_client_ca else None
    except OSError as error:
        raise ConfigError(f"{error.filename}: {error.strerror}") from None
    return grpc.ssl_server_credentials([pair], root_certificates=roots, require_client_auth=roots is not None)
