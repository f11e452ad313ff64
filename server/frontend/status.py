"""From an error to a gRPC status with details: the only place that maps one to the other."""

from __future__ import annotations

from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2

from embedserve.quant.errors import EmbedserveError, InvalidArgument, ResourceExhausted

DOMAIN = "embedserve"


def to_status(error: EmbedserveError) -> status_pb2.Status:
    """google.rpc.Status with ErrorInfo, and BadRequest or RetryInfo where they apply."""
    details: list[Message] = [error_details_pb2.ErrorInfo(reason=error.code, domain=DOMAIN)]
    if isinstance(error, InvalidArgument):
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=error.description)
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if isinstance(error, ResourceExhausted) and error.retry_after_s is not None:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(int(error.retry_after_s * 1e9))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    packed = []
    for detail in details:
        wrapped = any_pb2.Any()
        wrapped.Pack(detail)
        packed.append(wrapped)
    return status_pb2.Status(code=code_pb2.Code.Value(error.code), message=str(error), details=packed)
