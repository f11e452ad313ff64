"""A caller that knows nothing but the address: reflection, and messages made from what it says."""

from __future__ import annotations

import grpc
import numpy as np
import pytest
from conftest import rows_of
from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory
from grpc_reflection.v1alpha import reflection_pb2 as r


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
def test_lookup_and_topk_through_reflection_alone(server, catalog_root, version):
    with grpc.insecure_channel(server.address) as channel:
        reflect = channel.stream_stream(
            f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
            r.ServerReflectionRequest.SerializeToString, r.ServerReflectionResponse.FromString,
        )  # fmt: skip

        def ask(**question):
            return next(reflect(iter([r.ServerReflectionRequest(**question)])))

        services = {s.name for s in ask(list_services="").list_services_response.service}
        assert {"embedserve.v1.EmbeddingService", "grpc.health.v1.Health"} <= services
        assert not any("wire" in name for name in services)
        pool = descriptor_pool.DescriptorPool()
        for data in ask(
            file_containing_symbol="embedserve.v1.EmbeddingService"
        ).file_descriptor_response.file_descriptor_proto:
            pool.Add(descriptor_pb2.FileDescriptorProto.FromString(data))
        service = pool.FindServiceByName("embedserve.v1.EmbeddingService")

        def call(method, **fields):
            kind = service.FindMethodByName(method)
            request = json_format.ParseDict(fields, message_factory.GetMessageClass(kind.input_type)())
            answer = message_factory.GetMessageClass(kind.output_type)
            return channel.unary_unary(f"/embedserve.v1.EmbeddingService/{method}")(request.SerializeToString()), answer

        raw, answer = call("Lookup", table="items", ids=[3, 4])
        values = rows_of(catalog_root, "items")[0]
        assert np.array_equal(np.array(answer.FromString(raw).values, np.float32), values[[3, 4]].reshape(-1))
        raw, answer = call("TopK", table="items", queryIds=[3], k=2)
        assert list(answer.FromString(raw).counts) == [2]
