"""The client's one exception."""

from __future__ import annotations

import grpc
from google.rpc import error_details_pb2, status_pb2


class ServiceError(Exception):
    """A call that failed: `str()` is the server's sentence.

    code: the gRPC status. field: the request field at fault, for INVALID_ARGUMENT. retry_after_s: when to
    try again, under overload.
    """

    def __init__(
        self, code: grpc.StatusCode, message: str, field: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(f"{code.name}: {message}")
        self.code = code
        self.message = message
        self.field = field
        self.retry_after_s = retry_after_s

    @classmethod
    def from_rpc(cls, error: grpc.RpcError) -> ServiceError:
        """Reads a failed call's code and its google.rpc details, whichever are there."""
        field, retry_after_s = None, None
        for key, value in error.trailing_metadata() or ():
            if key != "grpc-status-details-bin":
                continue
            for detail in status_pb2.Status.FromString(value).details:
                violation, retry = error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
                if detail.Unpack(violation) and violation.field_violations:
                    field = violation.field_violations[0].field
                elif detail.Unpack(retry):
                    retry_after_s = retry.retry_delay.ToNanoseconds() / 1e9
        return cls(error.code(), error.details() or "", field, retry_after_s)
