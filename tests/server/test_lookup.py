"""Lookup in every form, over real sockets, against the artifact's own rows."""

from __future__ import annotations

import asyncio

import grpc
import numpy as np
import pytest
import reference as ref
from conftest import rows_of
from hypothesis import given
from hypothesis import strategies as st

from embedserve.client import AsyncClient, Client, ServiceError
from embedserve.proto import embedding_pb2, embedding_pb2_grpc
from embedserve.quant import Catalog


def expected(values, artifact, ids, fill):
    keys = np.arange(len(values)) if artifact.keys is None else artifact.keys
    places = {int(k): i for i, k in enumerate(keys)}
    rows = np.array([values[places[i]] if i in places else fill for i in ids], np.float32).reshape(-1, values.shape[1])
    return rows, [n for n, i in enumerate(ids) if i not in places]


@given(
    table=st.sampled_from(["items", "users"]), on_missing=st.sampled_from(["zero", "default"]),
    output=st.sampled_from(["float32", "float16", "bfloat16", "quantized"]),
    ids=st.lists(st.integers(-600, 1100) | st.sampled_from([2**63 - 1, -(2**63)]), max_size=60),
)  # fmt: skip
def test_every_output_equals_the_stored_rows(server, catalog_root, table, on_missing, output, ids):
    values, artifact = rows_of(catalog_root, table)
    fill = artifact.default_row if on_missing == "default" else np.zeros(values.shape[1], np.float32)
    with Client(server.address) as client:
        result = client.lookup(table, ids, output=output, on_missing=on_missing)
    rows, missing = expected(values, artifact, ids, fill)
    assert result.missing.tolist() == missing
    assert result.tiers["ram"] == len(ids) - len(missing) and not result.degraded
    assert result.version == artifact.manifest.version
    if output == "float32":
        assert np.array_equal(result.values, rows)
    elif output == "float16":
        assert np.array_equal(result.values, rows.astype(np.float16))
    elif output == "bfloat16":
        assert np.array_equal(
            result.values, (ref.bfloat16(rows).astype(np.uint32) << 16).view(np.float32).reshape(rows.shape)
        )
    elif len(ids):
        known = [n for n in range(len(ids)) if n not in missing]
        keys = np.arange(len(values)) if artifact.keys is None else artifact.keys
        places = [int(np.flatnonzero(keys == ids[n])[0]) for n in known]
        assert np.array_equal(result.values[known], artifact.rows[places])


def test_a_version_can_be_pinned(client, catalog_root):
    old, new = Catalog(catalog_root).versions("items")
    ids = np.arange(50)
    for version in (old, new):
        result = client.lookup("items", ids, version=version)
        assert result.version == version
        assert np.array_equal(result.values, rows_of(catalog_root, "items", version)[0][:50])
    assert client.lookup("items", ids).version == new


def test_pooling(client, catalog_root):
    values, _ = rows_of(catalog_root, "items")
    ids, offsets = np.array([1, 2, 3, 4, 9999, 6]), np.array([0, 2, 2, 5])
    weights = np.array([1, 2, 3, 4, 5, 6], np.float32)
    taken = values[np.minimum(ids, 999)]
    taken[4] = 0
    for mean in (False, True):
        for w in (None, weights):
            result = client.lookup("items", ids, pooling="mean" if mean else "sum", offsets=offsets, weights=w)
            assert np.array_equal(result.values, ref.pool(taken, offsets, w, mean))
            assert result.missing.tolist() == [4]


def test_more_ids_than_one_answer_should_carry_arrive_whole_and_of_one_version(server, catalog_root):
    values, _ = rows_of(catalog_root, "items")
    ids = np.random.default_rng(0).integers(-5, 1005, 150_000)
    with Client(server.address, timeout_s=60) as client:
        result = client.lookup("items", ids)
    known = (ids >= 0) & (ids < 1000)
    assert np.array_equal(result.values[known], values[ids[known]]) and not result.values[~known].any()
    assert np.array_equal(result.missing, np.flatnonzero(~known))


def test_batch_and_stream(client, catalog_root):
    batch = client.lookup_batch({"items": [1, 2], "users": [-123456]})
    assert np.array_equal(batch["items"].values, rows_of(catalog_root, "items")[0][[1, 2]])
    assert batch["users"].missing.tolist() == [0]
    values = rows_of(catalog_root, "items")[0]
    requests = [np.arange(n, n + 5) for n in range(300)]
    results = list(client.lookup_stream("items", iter(requests)))
    assert all(np.array_equal(r.values, values[i]) for r, i in zip(results, requests, strict=True))


def test_asyncio_client(server, catalog_root):
    async def ask():
        async with AsyncClient(server.address) as client:
            many = await asyncio.gather(*(client.lookup("items", [i, i + 1]) for i in range(50)))
            best = await client.topk("items", query_ids=[5], k=1)

            async def batches():
                for i in range(20):
                    yield [i]

            stream = [r async for r in client.lookup_stream("items", batches())]
            with pytest.raises(ServiceError, match="NOT_FOUND"):
                await client.lookup("nope", [1])
            return many, best, stream

    many, best, stream = asyncio.run(ask())
    values = rows_of(catalog_root, "items")[0]
    assert all(np.array_equal(r.values, values[[i, i + 1]]) for i, r in enumerate(many))
    assert best.counts.tolist() == [1] and len(stream) == 20


def test_public_messages_packed_or_not_mean_the_same(server, catalog_root):
    """Another language's client, with the public .proto; and a sender that writes elements one by one."""
    values = rows_of(catalog_root, "items")[0]
    with grpc.insecure_channel(server.address) as channel:
        stub = embedding_pb2_grpc.EmbeddingServiceStub(channel)
        response = stub.Lookup(embedding_pb2.LookupRequest(table="items", ids=[7, -1, 8], on_missing="ZERO"))
        assert list(response.values) == [*values[7], *[0] * 24, *values[8]] and list(response.missing) == [1]
        unpacked = b"\x0a\x05items" + b"".join(b"\x11" + int(i).to_bytes(8, "little", signed=True) for i in (7, -1))
        mixed = unpacked + b"\x12\x08" + (8).to_bytes(8, "little")
        raw = channel.unary_unary("/embedserve.v1.EmbeddingService/Lookup")(mixed)
        assert embedding_pb2.LookupResponse.FromString(raw) == response
        both = embedding_pb2.LookupBatchRequest(requests=[embedding_pb2.LookupRequest(table="items", ids=[7])])
        assert list(stub.LookupBatch(both).responses[0].values) == list(values[7])


def code_of(call):
    with pytest.raises(ServiceError) as caught:
        call()
    return caught.value


R = embedding_pb2.LookupRequest


@pytest.mark.parametrize("request_,code,field,words", [
    (R(table="nope", ids=[1]), "NOT_FOUND", None, "there is: big, items, users"),
    (R(table="../x", ids=[1]), "NOT_FOUND", None, "no table '../x'"),
    (R(table="items", ids=[1], version="../x"), "NOT_FOUND", None, "no version '../x'"),
    (R(table="items", ids=[1], output=9), "INVALID_ARGUMENT", "output", "allowed are FLOAT32 (0)"),
    (R(table="items", ids=[1], pooling=3), "INVALID_ARGUMENT", "pooling", "allowed are"),
    (R(table="items", ids=[1], on_missing=5), "INVALID_ARGUMENT", "on_missing", "allowed are"),
    (R(table="items", ids=[1], on_unavailable=5), "INVALID_ARGUMENT", "on_unavailable", "allowed are"),
    (R(table="items", ids=[1], offsets=[0]), "INVALID_ARGUMENT", "offsets", "only with pooling"),
    (R(table="items", ids=[1], weights=[1]), "INVALID_ARGUMENT", "weights", "only with pooling"),
    (R(table="items", ids=[1, 2], pooling=1), "INVALID_ARGUMENT", "offsets", "[0] for a single one"),
    (R(table="items", ids=[1, 2], pooling=1, offsets=[1]), "INVALID_ARGUMENT", "offsets", "must begin at 0"),
    (R(table="items", ids=[1, 2], pooling=1, offsets=[0, 2, 1]), "INVALID_ARGUMENT", "offsets", "offsets[2] = 1; must ascend"),
    (R(table="items", ids=[1, 2], pooling=1, offsets=[0, 3]), "INVALID_ARGUMENT", "offsets", "past the 2 ids"),
    (R(table="items", ids=[1, 2], pooling=1, offsets=[0], weights=[1]), "INVALID_ARGUMENT", "weights", "1 for 2 ids"),
    (R(table="items", ids=[1], pooling=1, offsets=[0], weights=[float("nan")]), "INVALID_ARGUMENT", "weights", "weights[0] is not finite"),
    (R(table="items", ids=[1, 2], pooling=2, offsets=[0], weights=[1, -1]), "INVALID_ARGUMENT", "weights", "bag 0 sum to 0"),
    (R(table="items", ids=[1], pooling=1, offsets=[0], output=3), "INVALID_ARGUMENT", "output", "cannot be pooled"),
    (R(table="items", ids=range(20_001)), "RESOURCE_EXHAUSTED", None, "max_ids is 20,000"),
    (R(table="big", ids=[1], output=1), "FAILED_PRECONDITION", None, "past FLOAT16; ask for BFLOAT16"),
    (R(table="items", ids=[1, 5000, -3], on_missing=2), "NOT_FOUND", None, "no rows for ids 5000, -3"),
])  # fmt: skip
def test_each_bad_request_has_its_error(server, request_, code, field, words):
    with grpc.insecure_channel(server.address) as channel:
        stub = embedding_pb2_grpc.EmbeddingServiceStub(channel)
        with pytest.raises(grpc.RpcError) as caught:
            stub.Lookup(request_)
        error = ServiceError.from_rpc(caught.value)
        assert (error.code.name, error.field) == (code, field) and words in error.message
        with pytest.raises(grpc.RpcError) as caught:
            stub.LookupBatch(embedding_pb2.LookupBatchRequest(requests=[R(table="items", ids=[1]), request_]))
        assert caught.value.code() is error.code
        with pytest.raises(grpc.RpcError) as caught:
            list(stub.LookupStream(iter([R(table="items", ids=[1]), request_])))
        assert caught.value.code() is error.code


def test_bytes_that_are_no_message_are_an_invalid_argument(server):
    with grpc.insecure_channel(server.address) as channel:
        for method in ("Lookup", "LookupBatch", "TopK"):
            with pytest.raises(grpc.RpcError) as caught:
                channel.unary_unary(f"/embedserve.v1.EmbeddingService/{method}")(b"\xff\xff\xff")
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        ragged = b"\x0a\x05items\x12\x07" + b"1234567"
        with pytest.raises(grpc.RpcError, match="whole number"):
            channel.unary_unary("/embedserve.v1.EmbeddingService/Lookup")(ragged)


@given(st.binary(max_size=80))
def test_random_requests_are_never_internal_errors(server, noise):
    with grpc.insecure_channel(server.address) as channel:
        for method in ("Lookup", "TopK"):
            try:
                channel.unary_unary(f"/embedserve.v1.EmbeddingService/{method}")(b"\x0a\x05items" + noise)
            except grpc.RpcError as error:
                assert error.code() is not grpc.StatusCode.INTERNAL, error.details()


def test_an_answer_past_the_limit_names_the_way_out(server):
    ids = np.arange(20_000) % 1000
    with grpc.insecure_channel(server.address) as channel:
        stub = embedding_pb2_grpc.EmbeddingServiceStub(channel)
        wide = R(table="items", ids=ids)
        batch = embedding_pb2.LookupBatchRequest(requests=[R(table="items", ids=ids[:9000])] * 2)
        assert len(stub.Lookup(wide).values) == 20_000 * 24
        with pytest.raises(grpc.RpcError, match=r"max_ids|max_response_bytes"):
            stub.LookupBatch(embedding_pb2.LookupBatchRequest(requests=[*batch.requests, wide]))


def test_the_client_refuses_what_is_no_id(client):
    for bad, error in ((["a"], TypeError), ([1.5], TypeError), ([2**63], ValueError)):
        with pytest.raises(error):
            client.lookup("items", bad)
    with pytest.raises(ValueError, match="allowed are float32"):
        client.lookup("items", [1], output="float8")
    assert client.lookup("items", []).values.shape == (0, 24)
