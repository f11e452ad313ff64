"""The calls of EmbeddingService, from request bytes to response bytes; knows no transport.

Each call checks everything it was sent before it does anything, and raises an EmbedserveError that says
which field, what was given and what is allowed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from embedserve.index import Filter, Params, search_topk
from embedserve.proto import wire_pb2
from embedserve.quant import Output
from embedserve.quant.errors import FailedPrecondition, InvalidArgument, NotFound, ResourceExhausted, Unavailable
from embedserve.server import wire
from embedserve.server.config import ServerConfig
from embedserve.server.engine import Engine, Snapshot
from embedserve.server.versions import ServedVersion

NONE, SUM, MEAN = 0, 1, 2
FAIL = 1
ZERO, DEFAULT, ERROR = 0, 1, 2
HEADROOM_BYTES = 256  # of a TopKResponse, besides its arrays
MISSING_IDS_NAMED = 10
OUTPUTS = tuple(Output)
OUTPUT_NAMES = tuple(output.name for output in Output)
ON_MISSING_NAMES = ("ZERO", "DEFAULT", "ERROR")
ON_UNAVAILABLE_NAMES = ("DEFAULT_ROWS", "FAIL")
POOLING_NAMES = ("NONE", "SUM", "MEAN")


class Service:
    """Answers requests from an engine's tables within a configuration's limits. Safe for concurrent use."""

    def __init__(self, engine: Engine, limits: ServerConfig) -> None:
        self._engine = engine
        self._limits = limits
        self._max_ids, self._max_response_bytes = limits.max_ids, limits.max_response_bytes

    def lookup(self, data: bytes) -> tuple[bytes, int]:
        """LookupRequest to LookupResponse; also the number of ids asked for."""
        served = self._engine.served
        answer = served.lookups.answer(data, self._max_ids, self._max_response_bytes)
        return answer or self._lookup(served, wire.parse(wire_pb2.LookupRequest, data), self._max_response_bytes)

    def lookup_batch(self, data: bytes) -> tuple[bytes, int]:
        """LookupBatchRequest to LookupBatchResponse; also the number of ids asked for."""
        batch, served = wire.parse(wire_pb2.LookupBatchRequest, data), self._engine.served
        room = self._max_response_bytes
        parts, n_ids = [], 0
        for i, request in enumerate(batch.requests):
            try:
                answer, n = self._lookup(served, request, room)
            except InvalidArgument as error:
                raise InvalidArgument(f"requests[{i}].{error.field}", error.description) from None
            except (NotFound, FailedPrecondition) as error:
                raise type(error)(f"requests[{i}]: {error}") from None
            n_ids += n
            if n_ids > self._max_ids:
                raise self._too_many("requests.ids", n_ids, "max_ids", self._max_ids)
            parts += [wire.bytes_field_head(1, len(answer)), answer]
            room -= len(answer) + 8
        return b"".join(parts), n_ids

    def _lookup(self, served: Snapshot, request: Any, max_bytes: int) -> tuple[bytes, int]:
        version = served.resolve(request.table, request.version)
        ids = wire.joined(request.ids, 8, "ids")
        n = len(ids) >> 3
        output = _output(request.output, "output", version)
        pooling, on_missing = request.pooling, request.on_missing
        _check_enum(pooling, POOLING_NAMES, "pooling")
        _check_enum(on_missing, ON_MISSING_NAMES, "on_missing")
        _check_enum(request.on_unavailable, ON_UNAVAILABLE_NAMES, "on_unavailable")
        if n > self._max_ids:
            raise self._too_many("ids", n, "max_ids", self._max_ids)
        bags = _bags(request, n, output) if pooling != NONE or request.offsets or request.weights else None
        payload = (n if bags is None else len(bags.offsets) // 4) * version.row_bytes[output]
        if payload > max_bytes:
            raise self._too_long(payload, output)
        if bags is None:
            answer, missing, unavailable = version.responder.rows(ids, output, on_missing, request.on_unavailable)
        else:
            answer, missing, unavailable = version.responder.pooled(
                ids, bags.offsets, bags.weights, pooling == MEAN, output, on_missing, request.on_unavailable
            )
        if answer is None:
            if unavailable and request.on_unavailable == FAIL:
                raise Unavailable(
                    f"{len(unavailable) // 4} of {n} rows of {request.table!r} are in a tier that cannot be reached now; retry, or "
                    "ask with on_unavailable DEFAULT_ROWS"
                )
            if on_missing == ERROR:
                raise _ids_not_found(request.table, ids, missing or b"")
            raise FailedPrecondition(
                f"the default row of {request.table!r} does not fit its row type; ask for another output"
            )
        if len(answer) > max_bytes:
            raise self._too_long(len(answer), output)
        return answer, n

    def topk(self, data: bytes) -> tuple[bytes, int]:
        """TopKRequest to TopKResponse; also the number of queries."""
        request, served = wire.parse(wire_pb2.TopKRequest, data), self._engine.served
        version = served.resolve(request.table, request.version)
        output = (
            _output(request.include_vectors, "include_vectors", version)
            if request.HasField("include_vectors")
            else None
        )
        if not version.searchable:
            raise FailedPrecondition(
                f"table {request.table!r} is served from Redis; TopK scores rows on the server's own machine: give it a catalog (--root)"
            )
        if not 1 <= request.k <= self._limits.max_k:
            raise InvalidArgument("k", f"{request.k}; allowed are 1 to {self._limits.max_k} (max_k)")
        queries, missing = self._queries(served, request, version)
        n = len(queries)
        if n > self._limits.max_queries:
            raise self._too_many("queries", n, "max_queries", self._limits.max_queries)
        if request.HasField("min_score") and not np.isfinite(request.min_score):
            raise InvalidArgument("min_score", f"{request.min_score}; must be finite")
        item = 12 + (version.row_bytes[output] if output is not None else 0)
        longest = n * min(request.k, version.rows) * item
        if longest + HEADROOM_BYTES > self._max_response_bytes:
            raise ResourceExhausted(
                f"an answer of {longest:,} bytes would pass max_response_bytes ({self._max_response_bytes:,}); "
                "ask for fewer queries, a smaller k or no vectors, or raise it and the client's receive limit"
            )
        chosen = self._filter(request, version, n)
        positions, scores, counts, exact = self._search(version, request, queries, missing, chosen)
        real = np.arange(positions.shape[1])[None, :] < counts[:, None]
        found = positions[real]
        response = wire_pb2.TopKResponse(
            version=version.name,
            ids=version.keys_at(found).astype("<i8", copy=False).tobytes(),
            scores=scores[real].astype("<f4", copy=False).tobytes(),
            counts=counts.astype("<u4").tobytes(),
            missing_queries=np.flatnonzero(missing).astype("<u4").tobytes(),
            exact=exact,
        )
        if output is not None:
            vectors = np.empty(len(found) * version.row_bytes[output], np.uint8)
            version.gather(version.keys_at(found), output, vectors)
            response.vectors = vectors.tobytes()
        return response.SerializeToString(), n

    @staticmethod
    def _search(
        version: ServedVersion,
        request: Any,
        queries: npt.NDArray[np.float32],
        missing: npt.NDArray[np.bool_],
        chosen: Filter,
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32], npt.NDArray[np.int64], bool]:
        """Positions [Q, w], scores [Q, w] and counts [Q], 0 for missing queries; and whether every row was scored."""
        there = np.flatnonzero(~missing)
        if len(there) < len(queries):
            chosen = replace(chosen, excluded=[chosen.excluded[q] for q in there])
        params = Params(request.params.nprobe, request.params.ef_search, request.params.oversample)
        (found, found_scores, found_counts), exact = search_topk(
            version.layers,
            version.manifest.metric,
            version.index,
            queries[there],
            request.k,
            chosen,
            request.exact,
            params,
        )
        if len(there) == len(queries):
            return found, found_scores, found_counts, exact
        shape = (len(queries), found.shape[1])
        positions, scores, counts = (
            np.zeros(shape, np.int64),
            np.zeros(shape, np.float32),
            np.zeros(len(queries), np.int64),
        )
        positions[there], scores[there], counts[there] = found, found_scores, found_counts
        return positions, scores, counts, exact

    def _queries(
        self, served: Snapshot, request: Any, version: ServedVersion
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.bool_]]:
        """Query vectors [Q, dim] and which of them are of ids that name no row [Q]."""
        dim = version.dim
        vectors = wire.joined(request.vectors, 4, "vectors")
        query_ids = wire.joined(request.query_ids, 8, "query_ids")
        if bool(vectors) == bool(query_ids):
            raise InvalidArgument("vectors", "give either vectors or query_ids" + (", not both" if vectors else ""))
        if vectors:
            if len(vectors) % (4 * dim):
                raise InvalidArgument(
                    "vectors", f"{len(vectors) // 4} values are not a whole number of vectors of dim {dim}"
                )
            queries = np.frombuffer(vectors, "<f4").reshape(-1, dim)
            finite = np.isfinite(queries).all(axis=1)
            if not finite.all():
                raise InvalidArgument("vectors", f"query {int(np.argmin(finite))} holds NaN or infinity")
            return queries, np.zeros(len(queries), np.bool_)
        source = version
        if request.query_table and request.query_table != request.table:
            source = served.resolve(request.query_table)
            if source.manifest.dim != dim:
                raise InvalidArgument(
                    "query_table", f"{request.query_table!r} has dim {source.manifest.dim}, {request.table!r} has {dim}"
                )
        n = len(query_ids) // 8
        if n > self._limits.max_queries:
            raise self._too_many("query_ids", n, "max_queries", self._limits.max_queries)
        queries = np.empty((n, dim), np.float32)
        places = source.gather(query_ids, Output.FLOAT32, queries)
        missing = np.zeros(n, np.bool_)
        if places:
            missing[np.frombuffer(places, "<u4")] = True
        return queries, missing

    def _filter(self, request: Any, version: ServedVersion, n_queries: int) -> Filter:
        if request.exclude_each and len(request.exclude_each) != n_queries:
            raise InvalidArgument(
                "exclude_each", f"{len(request.exclude_each)} lists for {n_queries} queries; give none, or one a query"
            )
        lists = [wire.joined(request.exclude, 8, "exclude"), wire.joined(request.allow, 8, "allow")]
        lists += [wire.joined(each.ids, 8, f"exclude_each[{i}]") for i, each in enumerate(request.exclude_each)]
        total = sum(map(len, lists)) // 8
        if total > self._max_ids:
            raise self._too_many("exclude, exclude_each and allow", total, "max_ids", self._max_ids)
        for_all = _known_positions(version, lists[0])
        excluded = [np.union1d(for_all, _known_positions(version, each)) for each in lists[2:]] or [for_all] * n_queries
        allow = _known_positions(version, lists[1]) if lists[1] else None
        return Filter(excluded, allow, request.min_score if request.HasField("min_score") else None)

    @staticmethod
    def _too_many(field: str, given: int, limit: str, allowed: int) -> ResourceExhausted:
        return ResourceExhausted(
            f"{field}: {given:,} in one request; {limit} is {allowed:,}: split the request, or raise it on the server"
        )

    def _too_long(self, given: int, output: Output) -> ResourceExhausted:
        smaller = "" if output is Output.QUANTIZED else ", ask for a smaller output (FLOAT16, QUANTIZED)"
        return ResourceExhausted(
            f"an answer of {given:,} bytes would pass max_response_bytes ({self._max_response_bytes:,}): split the request{smaller}, "
            "or raise it on the server together with the client's receive limit (gRPC's own is 4 MiB)"
        )


def _output(number: int, field: str, version: ServedVersion) -> Output:
    _check_enum(number, OUTPUT_NAMES, field)
    if number == Output.FLOAT16 and not version.fits_float16:
        largest = version.max_abs
        raise FailedPrecondition(
            f"{field}: table {version.manifest.table!r} has values up to {largest:g}, past FLOAT16; ask for BFLOAT16 or FLOAT32"
        )
    return OUTPUTS[number]


def _check_enum(number: int, names: tuple[str, ...], field: str) -> None:
    if not 0 <= number < len(names):
        raise InvalidArgument(
            field, f"{number}; allowed are {', '.join(f'{name} ({i})' for i, name in enumerate(names))}"
        )


@dataclass(frozen=True)
class _Bags:
    """Packed uint32 offsets and float weights (None: all 1), checked."""

    offsets: bytes
    weights: bytes | None


def _bags(request: Any, n: int, output: Output) -> _Bags:
    offsets, weights = wire.joined(request.offsets, 4, "offsets"), wire.joined(request.weights, 4, "weights")
    if request.pooling == NONE:
        raise InvalidArgument("offsets" if offsets else "weights", "only with pooling SUM or MEAN")
    if output is Output.QUANTIZED:
        raise InvalidArgument("output", "QUANTIZED rows cannot be pooled; ask for another output")
    starts = np.frombuffer(offsets, "<u4").astype(np.int64)
    if not len(starts):
        if n:
            raise InvalidArgument(
                "offsets", "empty, but pooling is on: say where each bag begins, [0] for a single one"
            )
        return _Bags(offsets, None)
    if starts[0] != 0:
        raise InvalidArgument("offsets", f"begin at {starts[0]}; must begin at 0")
    falls = np.flatnonzero(np.diff(starts) < 0)
    if len(falls):
        raise InvalidArgument("offsets", f"fall at offsets[{falls[0] + 1}] = {starts[falls[0] + 1]}; must ascend")
    if starts[-1] > n:
        raise InvalidArgument("offsets", f"reach {starts[-1]}, past the {n} ids")
    if not weights:
        return _Bags(offsets, None)
    values = np.frombuffer(weights, "<f4")
    if len(values) != n:
        raise InvalidArgument("weights", f"{len(values)} for {n} ids; give none, or one an id")
    if not np.isfinite(values).all():
        raise InvalidArgument("weights", f"weights[{int(np.argmin(np.isfinite(values)))}] is not finite")
    if request.pooling == MEAN:
        ends = np.append(starts[1:], n)
        sums = np.array([values[a:b].sum() for a, b in zip(starts, ends, strict=True)])
        zero = np.flatnonzero((sums == 0) & (ends > starts))
        if len(zero):
            raise InvalidArgument("weights", f"of bag {zero[0]} sum to 0; a MEAN divides by their sum")
    return _Bags(offsets, weights)


def _known_positions(version: ServedVersion, ids: bytes) -> npt.NDArray[np.int64]:
    """Ascending distinct positions of those ids that name a row."""
    if not ids:
        return np.empty(0, np.int64)
    positions = np.unique(version.positions(ids))
    return positions[np.searchsorted(positions, 0) :]


def _ids_not_found(table: str, ids: bytes, missing: bytes) -> NotFound:
    places = np.frombuffer(missing, "<u4")
    named = ", ".join(str(i) for i in wire.as_ids(ids)[places[:MISSING_IDS_NAMED]])
    more = f" and {len(places) - MISSING_IDS_NAMED} more" if len(places) > MISSING_IDS_NAMED else ""
    return NotFound(f"table {table!r} has no rows for ids {named}{more}")
