"""The client of AdminService."""

from __future__ import annotations

from types import TracebackType
from typing import Any, cast

import grpc
import numpy as np
import numpy.typing as npt
from google.protobuf.message import Message

from embedserve.client._channel import OPTIONS, TLS, metadata
from embedserve.client._errors import ServiceError
from embedserve.client._messages import Ids, ids_array
from embedserve.proto import admin_pb2, wire_pb2

ADMIN_SERVICE = "/embedserve.v1.AdminService/"
DEFAULT_TIMEOUT_S = 600.0  # a reload reads a whole version
PART_BYTES = 3 << 20  # of an Upsert; under the server's usual max_request_bytes


class AdminClient:
    """Asks and steers an embedserve server by its admin port; safe to share between threads.

    Answers are the messages of admin.proto. A call raises ServiceError (with the gRPC code) when the server
    refuses or cannot be reached; none is retried.

        with AdminClient("127.0.0.1:50052") as admin:
            admin.reload("items")
            admin.upsert("items", [7, 8], vectors)
    """

    def __init__(
        self, target: str, *, timeout_s: float = DEFAULT_TIMEOUT_S, tls: TLS | None = None, token: str | None = None
    ) -> None:
        """Opens a channel to `target` ("host:admin port"); connects on the first call.

        timeout_s: deadline of each call. token: one of the server's admin tokens.
        """
        self._timeout_s, self._metadata = timeout_s, metadata(token)
        if tls is None:
            self._channel = grpc.insecure_channel(target, OPTIONS)
        else:
            self._channel = grpc.secure_channel(target, tls.credentials(), OPTIONS)

    def tables(self) -> list[admin_pb2.TableSummary]:
        """What is served."""
        answer = self._call("ListTables", admin_pb2.ListTablesRequest(), admin_pb2.ListTablesResponse)
        return list(answer.tables)

    def describe(self, table: str, version: str = "") -> admin_pb2.DescribeTableResponse:
        """A table's current version, or another that is open; what is being taken up, and what was refused and why."""
        request = admin_pb2.DescribeTableRequest(table=table, version=version)
        return cast(
            admin_pb2.DescribeTableResponse, self._call("DescribeTable", request, admin_pb2.DescribeTableResponse)
        )

    def stats(self) -> admin_pb2.GetStatsResponse:
        """Counters since the server's start."""
        answer = self._call("GetStats", admin_pb2.GetStatsRequest(), admin_pb2.GetStatsResponse)
        return cast(admin_pb2.GetStatsResponse, answer)

    def reload(self, table: str = "", version: str = "") -> list[admin_pb2.TableReload]:
        """Takes up what is published, of one table or of all; returns once every later request sees it.

        Raises ServiceError: FAILED_PRECONDITION with the limit that a version misses, RESOURCE_EXHAUSTED when memory is
        short, DATA_LOSS when files are damaged, NOT_FOUND. What was served before goes on being served.
        """
        request = admin_pb2.ReloadRequest(table=table, version=version)
        return list(self._call("Reload", request, admin_pb2.ReloadResponse).tables)

    def rollback(self, table: str, version: str = "") -> admin_pb2.TableReload:
        """Goes back to the version served before, or to another that is open, until the next reload or publish."""
        request = admin_pb2.RollbackRequest(table=table, version=version)
        answer = self._call("Rollback", request, admin_pb2.RollbackResponse)
        return cast(admin_pb2.RollbackResponse, answer).table

    def unload(self, table: str) -> None:
        """Serves a table no more."""
        self._call("Unload", admin_pb2.UnloadRequest(table=table), admin_pb2.UnloadResponse)

    def upsert(self, table: str, keys: Ids, values: npt.ArrayLike) -> admin_pb2.UpsertResponse:
        """Writes rows by key over the current version: keys [n], values [n, dim] or [dim], finite.

        Durable and visible to Lookup and TopK when it returns. More than some megabytes are sent in parts, each of
        which is stored as a whole or not at all; an error may then leave those before it in place.
        """
        key_array, rows = ids_array(keys, "keys"), np.atleast_2d(np.ascontiguousarray(values, "<f4"))
        if rows.ndim != 2 or len(rows) != len(key_array):
            raise ValueError(f"values: expected [{len(key_array)}, dim] for as many keys, got shape {rows.shape}")
        step = max(1, PART_BYTES // (8 + 4 * rows.shape[1]))
        for first in range(0, max(1, len(rows)), step):
            part = slice(first, first + step)
            request = wire_pb2.UpsertRequest(
                table=table, keys=[key_array[part].tobytes()], values=[rows[part].tobytes()]
            )
            answer = self._call("Upsert", request, admin_pb2.UpsertResponse)
        return cast(admin_pb2.UpsertResponse, answer)

    def warm(self, table: str, keys: Ids) -> int:
        """Loads rows into the ram tier before they are asked for; returns how many there are."""
        key_array, loaded = ids_array(keys, "keys"), 0
        for first in range(0, len(key_array), PART_BYTES // 8):
            request = wire_pb2.WarmRequest(table=table, keys=[key_array[first : first + PART_BYTES // 8].tobytes()])
            loaded += self._call("Warm", request, admin_pb2.WarmResponse).loaded
        return loaded

    def _call(self, method: str, request: Message, answer: type[Any]) -> Any:
        call = self._channel.unary_unary(
            ADMIN_SERVICE + method,
            request_serializer=type(request).SerializeToString,
            response_deserializer=answer.FromString,
        )
        try:
            return call(request, timeout=self._timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise ServiceError.from_rpc(error) from error

    def close(self) -> None:
        """Closes the channel; calls in progress are cancelled."""
        self._channel.close()

    def __enter__(self) -> AdminClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
