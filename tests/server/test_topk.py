"""TopK over real sockets against a full sort."""

from __future__ import annotations

import grpc
import numpy as np
import pytest
import reference as ref
from conftest import rows_of
from hypothesis import given
from hypothesis import strategies as st

from embedserve.client import Client, ServiceError
from embedserve.proto import embedding_pb2, embedding_pb2_grpc

T = embedding_pb2.TopKRequest


@given(st.data())
def test_filters_equal_a_full_sort(server, catalog_root, data):
    values, artifact = rows_of(catalog_root, "users")
    keys = artifact.keys
    some_keys = st.lists(st.sampled_from(keys.tolist()) | st.integers(-(10**6), 10**6), max_size=40)
    queries = np.random.default_rng(data.draw(st.integers(0, 99))).standard_normal((2, 24)).astype(np.float32)
    k, exclude, each = data.draw(st.integers(1, 400)), data.draw(some_keys), [data.draw(some_keys) for _ in range(2)]
    allow = data.draw(st.none() | some_keys.filter(len))
    exact = ref.scores(queries, values, "ip")
    min_score = data.draw(st.none() | st.floats(-3, 3, width=32))
    with Client(server.address) as client:
        best = client.topk(
            "users",
            vectors=queries,
            k=k,
            exclude=exclude,
            exclude_each=each,
            allow=allow,
            min_score=min_score,
            include_vectors="float32",
        )
    at = 0
    for q in range(2):
        passing = [
            i
            for i, key in enumerate(keys.tolist())
            if key not in exclude and key not in each[q] and (allow is None or key in allow)
        ]
        passing = [i for i in passing if min_score is None or exact[q, i] >= min_score]
        order = sorted(passing, key=lambda i: (-exact[q, i], keys[i]))[:k]
        n = best.counts[q]
        assert n == len(order)
        np.testing.assert_allclose(best.scores[q, :n], exact[q, order], atol=1e-4)
        assert set(best.ids[q, :n].tolist()) <= set(keys[passing].tolist())
        places = [int(np.flatnonzero(keys == i)[0]) for i in best.ids[q, :n]]
        assert n == 0 or np.array_equal(best.vectors[at : at + n], values[places])
        at += n
        assert (best.ids[q, n:] == -1).all() and np.isneginf(best.scores[q, n:]).all()


def test_queries_by_id_of_another_table_and_missing_ones(client, catalog_root):
    users, artifact = rows_of(catalog_root, "users")
    items, _ = rows_of(catalog_root, "items")
    asked = [int(artifact.keys[5]), 123456789, int(artifact.keys[0])]
    best = client.topk("items", query_ids=asked, query_table="users", k=7)
    assert best.missing_queries.tolist() == [1] and best.counts.tolist() == [7, 0, 7]
    exact = ref.scores(users[[5, 0]], items, "ip")
    assert np.array_equal(best.ids[[0, 2]], np.argsort(-exact, kind="stable")[:, :7])


def test_own_table_and_l2(client):
    best = client.topk("big", query_ids=[1], k=2)
    assert best.ids.tolist() == [[1, 0]] and best.scores[0, 0] == 0 and best.scores[0, 1] < -9e11


def test_k_past_the_rows_gives_all_rows(client):
    best = client.topk("big", query_ids=[0, 1], k=500)
    assert best.counts.tolist() == [2, 2] and best.ids.shape == (2, 500)


@pytest.mark.parametrize("request_,code,field,words", [
    (T(table="items", query_ids=[1], k=0), "INVALID_ARGUMENT", "k", "0; allowed are 1 to 500"),
    (T(table="items", query_ids=[1], k=501), "INVALID_ARGUMENT", "k", "501; allowed are 1 to 500"),
    (T(table="items", k=1), "INVALID_ARGUMENT", "vectors", "either vectors or query_ids"),
    (T(table="items", vectors=[0] * 24, query_ids=[1], k=1), "INVALID_ARGUMENT", "vectors", "not both"),
    (T(table="items", vectors=[0] * 25, k=1), "INVALID_ARGUMENT", "vectors", "dim 24"),
    (T(table="items", vectors=[0] * 24 + [float("inf")] * 24, k=1), "INVALID_ARGUMENT", "vectors", "query 1 holds NaN"),
    (T(table="items", query_ids=[1], query_table="big", k=1), "INVALID_ARGUMENT", "query_table", "'big' has dim 2"),
    (T(table="items", query_ids=[1], query_table="nope", k=1), "NOT_FOUND", None, "there is"),
    (T(table="items", query_ids=[1, 2], exclude_each=[embedding_pb2.IdList()], k=1), "INVALID_ARGUMENT", "exclude_each", "1 lists for 2"),
    (T(table="items", query_ids=[1], min_score=float("nan"), k=1), "INVALID_ARGUMENT", "min_score", "finite"),
    (T(table="items", query_ids=[1], include_vectors=7, k=1), "INVALID_ARGUMENT", "include_vectors", "allowed are"),
    (T(table="items", query_ids=range(1025), k=1), "RESOURCE_EXHAUSTED", None, "max_queries"),
    (T(table="items", query_ids=range(1000), k=500), "RESOURCE_EXHAUSTED", None, "max_response_bytes"),
    (T(table="items", query_ids=[1], exclude=range(20_001), k=1), "RESOURCE_EXHAUSTED", None, "max_ids"),
])  # fmt: skip
def test_each_bad_request_has_its_error(server, request_, code, field, words):
    with grpc.insecure_channel(server.address) as channel, pytest.raises(grpc.RpcError) as caught:
        embedding_pb2_grpc.EmbeddingServiceStub(channel).TopK(request_)
    error = ServiceError.from_rpc(caught.value)
    assert (error.code.name, error.field) == (code, field) and words in error.message


def test_unpacked_nested_ids_are_read(server):
    """exclude_each's ids written element by element."""
    request = T(table="items", query_ids=[3], k=1).SerializeToString() + b"\x3a\x09\x09" + (3).to_bytes(8, "little")
    plain = T(table="items", query_ids=[3], k=1, exclude_each=[embedding_pb2.IdList(ids=[3])])
    with grpc.insecure_channel(server.address) as channel:
        raw = channel.unary_unary("/embedserve.v1.EmbeddingService/TopK")(request)
        assert embedding_pb2.TopKResponse.FromString(raw) == embedding_pb2_grpc.EmbeddingServiceStub(channel).TopK(
            plain
        )
