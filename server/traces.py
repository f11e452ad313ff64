"""Spans of requests for an OpenTelemetry collector, as children of the caller's (W3C Trace Context, in the metadata).

Imported only when `traces` is set; without it a request passes nothing of this. What is sampled, how often spans are
sent, and with which headers: the standard environment variables of OpenTelemetry (`OTEL_TRACES_SAMPLER`,
`OTEL_BSP_*`, `OTEL_EXPORTER_OTLP_*`, `OTEL_SERVICE_NAME`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from embedserve.proto import wire_pb2
from embedserve.quant.errors import ConfigError
from embedserve.server.frontend.workers import submitted

CONTEXT_KEYS = ("traceparent", "tracestate")
FLUSH_MS = 2_000

Unary = Callable[[bytes, grpc.ServicerContext], bytes]
Stream = Callable[[Iterator[bytes], grpc.ServicerContext], Iterator[bytes]]


class Tracer:
    """Sends to `endpoint`, by OTLP over gRPC, from a thread of its own; what the collector does not take is dropped."""

    def __init__(self, endpoint: str, service: str) -> None:
        """Raises ConfigError where OpenTelemetry is not installed."""
        try:
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace import SpanKind, StatusCode
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise ConfigError(f"traces: {error}; pip install 'embedserve[traces]'") from None
        self._service, self._kind, self._error = service, SpanKind.SERVER, StatusCode.ERROR
        self._context = TraceContextTextMapPropagator()
        self._exporter = OTLPSpanExporter(endpoint=endpoint, insecure=not endpoint.startswith("https://"), timeout=5)
        name = os.environ.get("OTEL_SERVICE_NAME", "embedserve")
        self._provider = TracerProvider(resource=Resource.create({"service.name": name}), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self._tracer = self._provider.get_tracer("embedserve")

    def unary(self, method: str, handle: Unary) -> Unary:
        """`handle` within a span that begins when grpcio handed the call over."""
        request_kind = getattr(wire_pb2, f"{method}Request")

        def traced(request: bytes, context: grpc.ServicerContext) -> bytes:
            span = self._begin(method, context, time.perf_counter() - submitted())
            if span.is_recording():
                _describe(span, request_kind, request)
            try:
                return handle(request, context)
            finally:
                self._end(span, context)

        return traced

    def stream(self, method: str, handle: Stream) -> Stream:
        """`handle` within a span as long as the stream."""

        def traced(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
            span = self._begin(method, context, 0.0)
            answered = 0
            try:
                for answer in handle(requests, context):
                    yield answer
                    answered += 1
            finally:
                span.set_attribute("embedserve.messages", answered)
                self._end(span, context)

        return traced

    def stop(self) -> None:
        """Sends what is left, for no longer than FLUSH_MS."""
        self._provider.force_flush(FLUSH_MS)
        self._exporter.shutdown(0)  # or the provider waits for a collector that does not answer
        self._provider.shutdown()

    def _begin(self, method: str, context: grpc.ServicerContext, ago_s: float) -> Any:
        metadata = context.invocation_metadata()
        carrier = {key: value for key, value in metadata if key in CONTEXT_KEYS}
        attributes = {"rpc.system": "grpc", "rpc.service": self._service, "rpc.method": method}
        return self._tracer.start_span(
            f"{self._service}/{method}",
            self._context.extract(carrier),
            self._kind,
            attributes,
            start_time=time.time_ns() - int(ago_s * 1e9),
        )

    def _end(self, span: Any, context: grpc.ServicerContext) -> None:
        code = context.code() or grpc.StatusCode.OK  # type: ignore[attr-defined]  # not in the stubs
        span.set_attribute("rpc.grpc.status_code", code.value[0])
        if code is not grpc.StatusCode.OK:
            span.set_status(self._error, code.name)
        span.end()


def _describe(span: Any, kind: Any, data: bytes) -> None:
    try:
        request = kind.FromString(data)
    except DecodeError:
        return  # the call says so to its caller
    if isinstance(request, wire_pb2.LookupBatchRequest):
        span.set_attribute("embedserve.tables", [each.table for each in request.requests])
        return
    span.set_attribute("embedserve.table", request.table)
    if isinstance(request, wire_pb2.TopKRequest):
        span.set_attribute("embedserve.k", request.k)
    else:
        span.set_attribute("embedserve.ids", sum(map(len, request.ids)) >> 3)
