"""Between protobuf messages and arrays, without a copy where one can be spared.

Requests are parsed as the private twin (proto/embedserve/v1/wire.proto), whose packed fields are bytes. A
sender may also write such a field element by element; the twin then sees fields of unknown type, and the
request goes through the public message once, which packs it.
"""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from embedserve.proto import admin_pb2, embedding_pb2, wire_pb2
from embedserve.quant.errors import InvalidArgument

M = TypeVar("M", bound=Message)

_PUBLIC: dict[type[Message], type[Message]] = {
    wire_pb2.LookupRequest: embedding_pb2.LookupRequest,
    wire_pb2.LookupBatchRequest: embedding_pb2.LookupBatchRequest,
    wire_pb2.TopKRequest: embedding_pb2.TopKRequest,
    wire_pb2.UpsertRequest: admin_pb2.UpsertRequest,
}


def parse(kind: type[M], data: bytes) -> M:
    """Parses a request, as its twin if it has one. Raises InvalidArgument if it is no such message."""
    try:
        message = kind.FromString(data)
        if kind in _PUBLIC and _has_unknown(message):
            message = kind.FromString(_PUBLIC[kind].FromString(data).SerializeToString())
    except DecodeError as error:
        raise InvalidArgument("request", f"not a valid message: {error}") from None
    return message


def _has_unknown(message: Any) -> bool:
    if len(UnknownFieldSet(message)):
        return True
    if isinstance(message, wire_pb2.LookupBatchRequest):
        return any(len(UnknownFieldSet(request)) for request in message.requests)
    if isinstance(message, wire_pb2.TopKRequest):
        return any(len(UnknownFieldSet(ids)) for ids in message.exclude_each)
    return False


def joined(chunks: Any, item_bytes: int, field: str) -> bytes:
    """A packed field's bytes, however many chunks it came in. Raises InvalidArgument if they are no whole elements."""
    data: bytes = chunks[0] if len(chunks) == 1 else b"".join(chunks)
    if len(data) % item_bytes:
        raise InvalidArgument(field, f"{len(data)} bytes are not a whole number of {item_bytes}-byte elements")
    return data


def as_ids(data: bytes) -> npt.NDArray[np.int64]:
    return np.frombuffer(data, "<i8")


def bytes_field_head(number: int, length: int) -> bytes:
    """What precedes `length` bytes of a length-delimited field (protobuf encoding: tag, then varint length)."""
    head = bytearray([number << 3 | 2])
    while length > 127:
        head.append(length & 127 | 128)
        length >>= 7
    head.append(length)
    return bytes(head)
