"""The short, native way of a Lookup gives the answers of the long one, and leaves it every other request."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from embedserve.proto import embedding_pb2 as pb
from embedserve.quant.errors import EmbedserveError, InvalidArgument
from embedserve.server.config import ServerConfig
from embedserve.server.engine import Engine
from embedserve.server.service import Service

UNKNOWN_FIELD = b"\x78\x01"  # field 15: ignored by protobuf, and enough for the long way
MAX_IDS, MAX_BYTES = 40, 3000


@pytest.fixture(scope="module")
def engine(catalog_root: Path) -> Engine:
    return Engine(ServerConfig(root=catalog_root, max_ids=MAX_IDS, max_response_bytes=MAX_BYTES))


@pytest.fixture(scope="module")
def service(engine: Engine, catalog_root: Path) -> Service:
    return Service(engine, ServerConfig(root=catalog_root, max_ids=MAX_IDS, max_response_bytes=MAX_BYTES))


def outcome(service: Service, data: bytes) -> object:
    try:
        return service.lookup(data)
    except EmbedserveError as error:
        return type(error), str(error)


ids = st.lists(st.integers(-3, 1003) | st.sampled_from([-(2**63), 2**63 - 1]), max_size=MAX_IDS + 2)
requests = st.builds(
    pb.LookupRequest,
    table=st.sampled_from(["items", "users", "big", "", "item", "items\0"]),
    ids=ids, version=st.sampled_from(["", "no such version"]), output=st.integers(0, 4), pooling=st.sampled_from([0, 0, 0, 1]),
    on_missing=st.integers(0, 3), on_unavailable=st.integers(0, 2), weights=st.sampled_from([[], [], [1.0]]),
)  # fmt: skip


@given(request=requests, pinned=st.booleans())
def test_both_ways_answer_alike(service, engine, request, pinned):
    if pinned and request.table in engine.served.tables:
        request.version = min(engine.served.tables[request.table].versions)
    data = request.SerializeToString()
    assert outcome(service, data) == outcome(service, data + UNKNOWN_FIELD)


@given(request=requests, data=st.data())
def test_damaged_requests_are_judged_alike(service, request, data):
    """Bytes changed, dropped or repeated anywhere; what protobuf cannot read is refused, never answered."""
    raw = bytearray(request.SerializeToString())
    for _ in range(data.draw(st.integers(1, 4))):
        place, length = data.draw(st.integers(0, max(0, len(raw) - 1))), data.draw(st.integers(0, 12))
        change = data.draw(st.binary(max_size=8) | st.just(bytes(raw[place : place + length])))
        raw[place : place + data.draw(st.sampled_from([0, length]))] = change
    damaged = bytes(raw)
    try:
        pb.LookupRequest.FromString(damaged)
    except DecodeError:
        with pytest.raises(InvalidArgument):
            service.lookup(damaged)
    else:
        assert outcome(service, damaged) == outcome(service, damaged + UNKNOWN_FIELD)


@given(st.binary(max_size=200))
def test_noise_is_answered_or_refused(service, noise):
    outcome(service, noise)


@pytest.mark.parametrize("output", range(4))
@pytest.mark.parametrize("on_missing", range(2))
@pytest.mark.parametrize("ids", [[], [1, 1, 999], [5, 5000, -1]])
def test_plain_requests_take_the_short_way(engine, output, on_missing, ids):
    request = pb.LookupRequest(table="items", ids=ids, output=output, on_missing=on_missing)
    answer = engine.served.lookups.answer(request.SerializeToString(), MAX_IDS, MAX_BYTES)
    assert answer is not None and answer[1] == len(ids)
    response = pb.LookupResponse.FromString(answer[0])
    known = sum(0 <= i < 1000 for i in ids)
    assert response.HasField("tiers") and response.tiers.ram == known
    assert len(response.missing) == len(ids) - known


@pytest.mark.parametrize(
    "request_",
    [
        pb.LookupRequest(table="items", ids=[5000], on_missing=2),
        pb.LookupRequest(table="big", ids=[0], output=1),
        pb.LookupRequest(table="items", ids=range(MAX_IDS + 1)),
        pb.LookupRequest(table="items", ids=range(MAX_BYTES // 96 + 1)),
        pb.LookupRequest(table="items", ids=[1], pooling=1, offsets=[0]),
        pb.LookupRequest(table="nothing", ids=[1]),
    ],
)
def test_every_other_goes_the_long_way(engine, request_):
    assert engine.served.lookups.answer(request_.SerializeToString(), MAX_IDS, MAX_BYTES) is None


def test_a_response_at_the_limit_is_answered_and_one_past_it_refused(engine):
    """Missing places count too: they may push past the limit a response whose rows fit."""
    ids = np.full(25, -1)
    data = pb.LookupRequest(table="items", ids=ids).SerializeToString()
    length = len(engine.served.lookups.answer(data, MAX_IDS, 1 << 20)[0])
    assert length > 25 * 96 + 4 * 25
    assert engine.served.lookups.answer(data, MAX_IDS, length) is not None
    assert engine.served.lookups.answer(data, MAX_IDS, length - 1) is None
