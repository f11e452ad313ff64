"""The blocking client."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import grpc
import numpy.typing as npt

from embedserve.client import _messages as messages
from embedserve.client._channel import DEFAULT_TIMEOUT_S, OPTIONS, SERVICE, TLS, metadata
from embedserve.client._errors import ServiceError
from embedserve.client._messages import Ids, LookupOptions, LookupResult, OutputName, TopKResult
from embedserve.proto import wire_pb2


class Client:
    """Asks an embedserve server; safe to share between threads.

    Numpy in, numpy out. A call raises ServiceError (with the gRPC code) when the server refuses or cannot be
    reached within the deadline; one that found no server is retried with backoff until then.

        with Client("127.0.0.1:50051") as client:
            rows = client.lookup("items", [1, 2, 3])
            best = client.topk("items", query_ids=[7], query_table="users", k=10)
    """

    def __init__(
        self, target: str, *, timeout_s: float = DEFAULT_TIMEOUT_S, tls: TLS | None = None, token: str | None = None
    ) -> None:
        """Opens a channel to `target` ("host:port"); connects on the first call.

        timeout_s: deadline of each call, unless the call says otherwise. token: sent as a bearer token.
        """
        self._timeout_s, self._metadata = timeout_s, metadata(token)
        if tls is None:
            self._channel = grpc.insecure_channel(target, OPTIONS)
        else:
            self._channel = grpc.secure_channel(target, tls.credentials(), OPTIONS)
        self._lookup = self._channel.unary_unary(SERVICE + "Lookup")
        self._lookup_batch = self._channel.unary_unary(SERVICE + "LookupBatch")
        self._lookup_stream = self._channel.stream_stream(SERVICE + "LookupStream")
        self._topk = self._channel.unary_unary(SERVICE + "TopK")

    def lookup(
        self, table: str, ids: Ids, *, version: str = "", output: OutputName = "float32",
        pooling: messages.PoolingName = "none", offsets: npt.ArrayLike | None = None, weights: npt.ArrayLike | None = None,
        on_missing: messages.MissingName = "zero", on_unavailable: messages.UnavailableName = "default_rows",
        timeout_s: float | None = None,
    ) -> LookupResult:  # fmt: skip
        """The vectors of ids [n], in their order; any n: large requests are sent in parts, of one version.

        version: pins one; empty: the current. pooling: "sum" or "mean" of bags that begin at `offsets`
        [bags] in ids, ids weighted by `weights` [n]. on_missing: what an id without a row reads as: "zero",
        "default" (the mean row), or "error" (NOT_FOUND).
        """
        options = LookupOptions(version, output, pooling, offsets, weights, on_missing, on_unavailable)
        exchange = messages.lookup_exchange(table, messages.ids_array(ids), options)
        request = next(exchange)
        while True:
            try:
                try:
                    answer = self._call(self._lookup, request, timeout_s)
                except ServiceError as error:
                    request = exchange.throw(error)
                else:
                    request = exchange.send(answer)
            except StopIteration as done:
                result: LookupResult = done.value
                return result

    def lookup_batch(
        self, ids_by_table: Mapping[str, Ids], *, output: OutputName = "float32",
        on_missing: messages.MissingName = "zero", timeout_s: float | None = None,
    ) -> dict[str, LookupResult]:  # fmt: skip
        """Several tables in one call; fails as a whole if one of them does."""
        options = LookupOptions(output=output, on_missing=on_missing)
        ids = {table: messages.ids_array(wanted) for table, wanted in ids_by_table.items()}
        batch = wire_pb2.LookupBatchRequest(
            requests=[messages.lookup_request(table, ids[table], options) for table in ids]
        )
        answer = self._call(self._lookup_batch, batch.SerializeToString(), timeout_s)
        responses = wire_pb2.LookupBatchResponse.FromString(answer).responses
        return {
            table: messages.lookup_result(response, len(wanted), output)
            for (table, wanted), response in zip(ids.items(), responses, strict=True)
        }

    def lookup_stream(
        self, table: str, batches: Iterable[Ids], *, version: str = "", output: OutputName = "float32",
        on_missing: messages.MissingName = "zero", timeout_s: float | None = None,
    ) -> Iterator[LookupResult]:  # fmt: skip
        """One result for each batch of ids, in order, over one stream; no deadline unless timeout_s is given."""
        options = LookupOptions(version=version, output=output, on_missing=on_missing)
        sizes: list[int] = []

        def requests() -> Iterator[bytes]:
            for batch in batches:
                ids = messages.ids_array(batch)
                sizes.append(len(ids))
                yield messages.lookup_request(table, ids, options).SerializeToString()

        try:
            for answer in self._lookup_stream(requests(), timeout=timeout_s, metadata=self._metadata):
                yield messages.lookup_result(wire_pb2.LookupResponse.FromString(answer), sizes.pop(0), output)
        except grpc.RpcError as error:
            raise ServiceError.from_rpc(error) from error

    def topk(
        self, table: str, *, vectors: npt.ArrayLike | None = None, query_ids: Ids | None = None, query_table: str = "",
        k: int = 10, exclude: Ids = (), exclude_each: Sequence[Ids] | None = None, allow: Ids | None = None,
        min_score: float | None = None, exact: bool = False, version: str = "",
        include_vectors: OutputName | None = None, nprobe: int = 0, ef_search: int = 0, oversample: int = 0,
        timeout_s: float | None = None,
    ) -> TopKResult:  # fmt: skip
        """The k best-scoring rows for vectors [Q, dim] (or [dim]), or for the rows of query_ids [Q] in query_table.

        exclude: ids left out of every answer; exclude_each: one list a query; allow: the only ids that may
        be answered; min_score: the least score that is. exact: score every row even where there is an index;
        nprobe, ef_search, oversample: how hard an index searches, as it was tuned if not given.
        """
        request = messages.topk_request(
            table,
            vectors,
            query_ids,
            query_table,
            k,
            exclude,
            exclude_each,
            allow,
            min_score,
            exact,
            version,
            include_vectors,
            {"nprobe": nprobe, "ef_search": ef_search, "oversample": oversample},
        )
        return messages.topk_result(self._call(self._topk, request, timeout_s), k, include_vectors)

    def _call(self, method: Any, request: bytes, timeout_s: float | None) -> bytes:
        try:
            answer: bytes = method(request, timeout=timeout_s or self._timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise ServiceError.from_rpc(error) from error
        return answer

    def close(self) -> None:
        """Closes the channel; calls in progress are cancelled."""
        self._channel.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
