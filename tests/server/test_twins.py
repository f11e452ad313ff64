"""The private twin has the public messages' numbers and names, or the two would drift apart."""

from __future__ import annotations

from google.protobuf.descriptor import FieldDescriptor as F

from embedserve.proto import admin_pb2, embedding_pb2, wire_pb2

FIXED = {F.TYPE_SFIXED64, F.TYPE_FIXED32, F.TYPE_FLOAT}


def test_every_field_has_its_twin():
    public, twin = dict(embedding_pb2.DESCRIPTOR.message_types_by_name), wire_pb2.DESCRIPTOR.message_types_by_name
    for name in ("UpsertRequest", "WarmRequest"):
        public[name] = admin_pb2.DESCRIPTOR.message_types_by_name[name]
    assert set(public) == set(twin)
    for name, message in public.items():
        fields = {f.name: f for f in twin[name].fields}
        assert {f.name: f.number for f in message.fields} == {n: f.number for n, f in fields.items()}
        for field in message.fields:
            other = fields[field.name]
            assert field.has_presence == other.has_presence or field.type in FIXED
            if field.is_repeated and field.type in FIXED:
                assert field.is_packed and other.type == F.TYPE_BYTES
                assert other.is_repeated == name.endswith(("Request", "IdList"))
            elif field.type == F.TYPE_ENUM:
                assert other.type == F.TYPE_INT32
            else:
                assert (field.type, field.is_repeated) == (other.type, other.is_repeated)


def test_bytes_of_one_are_bytes_of_the_other():
    request = embedding_pb2.LookupRequest(table="t", ids=[1, -2], weights=[0.5], offsets=[0], output=2)
    parsed = wire_pb2.LookupRequest.FromString(request.SerializeToString())
    assert parsed.SerializeToString() == request.SerializeToString()
