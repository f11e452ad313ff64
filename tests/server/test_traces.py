"""Spans, as a collector gets them from OpenTelemetry's own exporter."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np
import pytest
from conftest import publish_table, serving
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from embedserve.proto import embedding_pb2

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SERVICE = "/embedserve.v1.EmbeddingService/"


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self) -> None:
        self.spans: queue.Queue = queue.Queue()

    def Export(self, request, context):
        for resource in request.resource_spans:
            names = {each.key: each.value.string_value for each in resource.resource.attributes}
            for scope in resource.scope_spans:
                for span in scope.spans:
                    self.spans.put((names["service.name"], span))
        return trace_service_pb2.ExportTraceServiceResponse()


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("traces") / "root"
    publish_table(root, "items", np.random.default_rng(0).standard_normal((100, 8)).astype(np.float32))
    return root


@pytest.fixture
def collector() -> Iterator[tuple[Collector, str]]:
    collector, server = Collector(), grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield collector, f"http://127.0.0.1:{port}"
    server.stop(0).wait()


def attributes(span) -> dict[str, object]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes}


def test_requests_are_children_of_their_callers_spans(root, collector, monkeypatch):
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    gathered, endpoint = collector
    with serving(root, "--traces", endpoint) as (server, client, _), grpc.insecure_channel(server.address) as channel:
        lookup = channel.unary_unary(SERVICE + "Lookup")
        stream = channel.stream_stream(SERVICE + "LookupStream")
        request = embedding_pb2.LookupRequest(table="items", ids=[1, 2, 3]).SerializeToString()

        def called(flags: str = "01"):
            return [("traceparent", f"00-{TRACE}-{SPAN}-{flags}")]

        before = time.time_ns()
        lookup(request, metadata=called())
        name, span = gathered.spans.get(timeout=10)
        assert (name, span.name) == ("embedserve", "embedserve.v1.EmbeddingService/Lookup")
        assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, SPAN)
        assert before <= span.start_time_unix_nano < span.end_time_unix_nano <= time.time_ns()
        told = attributes(span)
        assert (told["embedserve.table"], told["embedserve.ids"], told["rpc.grpc.status_code"]) == ("items", 3, 0)

        with pytest.raises(grpc.RpcError):
            lookup(embedding_pb2.LookupRequest(table="none").SerializeToString(), metadata=called())
        _, span = gathered.spans.get(timeout=10)
        assert attributes(span)["rpc.grpc.status_code"] == 5 and span.status.message == "NOT_FOUND"

        with pytest.raises(grpc.RpcError):
            lookup(b"\xff\xff", metadata=[("traceparent", "no such thing")])
        _, span = gathered.spans.get(timeout=10)
        assert span.trace_id.hex() != TRACE and not span.parent_span_id

        assert len(list(stream(iter([request] * 3), metadata=called()))) == 3
        _, span = gathered.spans.get(timeout=10)
        assert span.name.endswith("LookupStream") and attributes(span)["embedserve.messages"] == 3

        lookup(request, metadata=called("00"))  # the caller did not sample it
        client.topk("items", query_ids=[1], k=4)
        _, span = gathered.spans.get(timeout=10)
        assert span.name.endswith("TopK") and attributes(span)["embedserve.k"] == 4
    assert gathered.spans.empty()


def test_a_collector_that_is_away_holds_up_nothing(root):
    with serving(root, "--traces", "http://127.0.0.1:1") as (server, client, _):
        begun = time.monotonic()
        for _ in range(50):
            assert not len(client.lookup("items", [1]).missing)
        assert time.monotonic() - begun < 5
        begun = time.monotonic()
        assert server.stop() == 0 and time.monotonic() - begun < 8
