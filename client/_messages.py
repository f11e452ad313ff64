"""Arrays to request bytes and response bytes to arrays; both clients drive these, neither blocking nor awaiting."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import grpc
import numpy as np
import numpy.typing as npt

from embedserve.client._errors import ServiceError
from embedserve.proto import wire_pb2

OutputName = Literal["float32", "float16", "bfloat16", "quantized"]
PoolingName = Literal["none", "sum", "mean"]
MissingName = Literal["zero", "default", "error"]
UnavailableName = Literal["default_rows", "fail"]
Ids = npt.ArrayLike

_OUTPUTS: tuple[OutputName, ...] = ("float32", "float16", "bfloat16", "quantized")
_POOLINGS: tuple[PoolingName, ...] = ("none", "sum", "mean")
_MISSING: tuple[MissingName, ...] = ("zero", "default", "error")
_UNAVAILABLE: tuple[UnavailableName, ...] = ("default_rows", "fail")

FIRST_IDS = 1024  # sent before a row's size is known
MAX_IDS = 131_072
ANSWER_BYTES = 3 << 20  # aimed at; under gRPC's usual 4 MiB
STARTS = 3  # of a lookup in parts whose version leaves the server meanwhile


@dataclass(frozen=True)
class LookupResult:
    """An answered lookup of n ids, or n bags.

    values: [n, dim] float32; float16 with output "float16"; with "quantized" the stored rows, uint8 [n, stride].
    missing, degraded_positions: places in ids, ascending, int64. tiers: rows found, by tier.
    """

    values: npt.NDArray[Any]
    missing: npt.NDArray[np.int64]
    version: str
    tiers: dict[str, int]
    degraded: bool
    degraded_positions: npt.NDArray[np.int64]


@dataclass(frozen=True)
class TopKResult:
    """An answered TopK of Q queries.

    ids [Q, k] int64 and scores [Q, k] float32, best first; counts [Q] says how many of a row are real (the
    rest are -1 and -inf). missing_queries: places in query ids that name no row. vectors: [sum(counts), dim],
    or None. exact: every row was scored; else an index chose which.
    """

    ids: npt.NDArray[np.int64]
    scores: npt.NDArray[np.float32]
    counts: npt.NDArray[np.int64]
    version: str
    missing_queries: npt.NDArray[np.int64]
    vectors: npt.NDArray[Any] | None
    exact: bool = True


@dataclass(frozen=True)
class LookupOptions:
    """What every lookup call takes besides table and ids; see Client.lookup."""

    version: str = ""
    output: OutputName = "float32"
    pooling: PoolingName = "none"
    offsets: npt.ArrayLike | None = None
    weights: npt.ArrayLike | None = None
    on_missing: MissingName = "zero"
    on_unavailable: UnavailableName = "default_rows"


def ids_array(ids: Ids, name: str = "ids") -> npt.NDArray[np.int64]:
    """A flat int64 array. Raises TypeError for anything but integers, ValueError past int64."""
    array = np.asarray(ids)
    if array.size == 0:
        return np.empty(0, np.int64)
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name}: expected integers, got {array.dtype}")
    if array.dtype.kind == "u" and array.max() > np.iinfo(np.int64).max:
        raise ValueError(f"{name}: {array.max()} is past 2^63 - 1; ids are int64")
    return np.ascontiguousarray(array, "<i8").reshape(-1)


def lookup_request(table: str, ids: npt.NDArray[np.int64], options: LookupOptions, version: str = "") -> Any:
    request = wire_pb2.LookupRequest(
        table=table,
        ids=[ids.tobytes()],
        version=version or options.version,
        output=_choice(_OUTPUTS, options.output, "output"),
        pooling=_choice(_POOLINGS, options.pooling, "pooling"),
        on_missing=_choice(_MISSING, options.on_missing, "on_missing"),
        on_unavailable=_choice(_UNAVAILABLE, options.on_unavailable, "on_unavailable"),
    )
    if options.offsets is not None:
        request.offsets.append(np.ascontiguousarray(options.offsets, "<u4").tobytes())
    if options.weights is not None:
        request.weights.append(np.ascontiguousarray(options.weights, "<f4").tobytes())
    return request


def lookup_result(response: Any, rows: int, output: OutputName) -> LookupResult:
    return LookupResult(
        values=_rows(response.values if output == "float32" else response.raw, rows, response.dim, output),
        missing=_places(response.missing),
        version=response.version,
        tiers={name: getattr(response.tiers, name) for name in ("gpu", "ram", "disk", "redis")},
        degraded=response.degraded,
        degraded_positions=_places(response.degraded_positions),
    )


def lookup_exchange(
    table: str, ids: npt.NDArray[np.int64], options: LookupOptions
) -> Generator[bytes, bytes, LookupResult]:
    """Yields requests, takes their answers, returns the result; a failed call is thrown in as ServiceError.

    More ids than one answer should carry are asked for in parts, all of the version that answered the
    first; if that leaves the server meanwhile, all are asked for again. A part that the server finds too
    large is halved.
    """
    if options.pooling != "none":
        answer = yield lookup_request(table, ids, options).SerializeToString()
        return lookup_result(
            wire_pb2.LookupResponse.FromString(answer),
            int(np.size(options.offsets)) if options.offsets is not None else 0,
            options.output,
        )
    parts: list[LookupResult] = []
    at, size, version, starts = 0, FIRST_IDS, options.version, 1
    while at < len(ids) or not parts:
        part = ids[at : at + size]
        try:
            answer = yield lookup_request(table, part, options, version).SerializeToString()
        except ServiceError as error:
            if error.code is grpc.StatusCode.NOT_FOUND and version != options.version and starts < STARTS:
                parts, at, version, starts = [], 0, options.version, starts + 1
                continue
            if (
                error.code is not grpc.StatusCode.RESOURCE_EXHAUSTED
                or error.retry_after_s is not None
                or len(part) <= 1
            ):
                raise
            size = len(part) // 2
            continue
        response = wire_pb2.LookupResponse.FromString(answer)
        parts.append(lookup_result(response, len(part), options.output))
        at += len(part)
        version = response.version
        if at == len(part) and len(part):
            size = max(1, min(MAX_IDS, ANSWER_BYTES * len(part) // max(1, len(answer))))
    return _joined(parts)


def _joined(parts: list[LookupResult]) -> LookupResult:
    if len(parts) == 1:
        return parts[0]
    starts = np.cumsum([0] + [len(p.values) for p in parts[:-1]])
    return LookupResult(
        values=np.concatenate([p.values for p in parts]),
        missing=np.concatenate([p.missing + start for p, start in zip(parts, starts, strict=True)]),
        version=parts[0].version,
        tiers={name: sum(p.tiers[name] for p in parts) for name in parts[0].tiers},
        degraded=any(p.degraded for p in parts),
        degraded_positions=np.concatenate(
            [p.degraded_positions + start for p, start in zip(parts, starts, strict=True)]
        ),
    )


def topk_request(
    table: str, vectors: npt.ArrayLike | None, query_ids: Ids | None, query_table: str, k: int, exclude: Ids,
    exclude_each: Sequence[Ids] | None, allow: Ids | None, min_score: float | None, exact: bool, version: str,
    include_vectors: OutputName | None, params: dict[str, int],
) -> bytes:  # fmt: skip
    request = wire_pb2.TopKRequest(table=table, query_table=query_table, k=k, exact=exact, version=version)
    if (vectors is None) == (query_ids is None):
        raise ValueError("give either vectors or query_ids")
    if vectors is not None:
        queries = np.atleast_2d(np.ascontiguousarray(vectors, "<f4"))
        if queries.ndim != 2:
            raise ValueError(f"vectors: expected [Q, dim] or [dim], got shape {queries.shape}")
        request.vectors.append(queries.tobytes())
    else:
        ids = ids_array(query_ids if query_ids is not None else [], "query_ids")
        request.query_ids.append(ids.tobytes())
    request.exclude.append(ids_array(exclude, "exclude").tobytes())
    for each in exclude_each or ():
        request.exclude_each.add().ids.append(ids_array(each, "exclude_each").tobytes())
    if allow is not None:
        allowed = ids_array(allow, "allow")
        if not len(allowed):
            raise ValueError("allow: an empty list would allow nothing; leave it out to allow all")
        request.allow.append(allowed.tobytes())
    if min_score is not None:
        request.min_score = min_score
    for name, value in params.items():
        if value:
            setattr(request.params, name, value)
    if include_vectors is not None:
        request.include_vectors = _choice(_OUTPUTS, include_vectors, "include_vectors")
    return request.SerializeToString()


def topk_result(answer: bytes, k: int, include_vectors: OutputName | None) -> TopKResult:
    response = wire_pb2.TopKResponse.FromString(answer)
    counts = np.frombuffer(response.counts, "<u4").astype(np.int64)
    ids = np.full((len(counts), k), -1, np.int64)
    scores = np.full((len(counts), k), -np.inf, np.float32)
    real = np.arange(k)[None, :] < counts[:, None]
    ids[real] = np.frombuffer(response.ids, "<i8")
    scores[real] = np.frombuffer(response.scores, "<f4")
    vectors = None
    if include_vectors is not None:
        total = int(counts.sum())
        item = {"float32": 4, "float16": 2, "bfloat16": 2, "quantized": 1}[include_vectors]
        width = len(response.vectors) // (item * total) if total else 0
        vectors = _rows(response.vectors, total, width, include_vectors)
    return TopKResult(ids, scores, counts, response.version, _places(response.missing_queries), vectors, response.exact)


def _rows(data: bytes, rows: int, dim: int, output: OutputName) -> npt.NDArray[Any]:
    if output == "float32":
        return np.frombuffer(data, "<f4").reshape(rows, dim)
    if output == "float16":
        return np.frombuffer(data, "<f2").reshape(rows, dim)
    if output == "bfloat16":
        return (np.frombuffer(data, "<u2").astype(np.uint32) << np.uint32(16)).view(np.float32).reshape(rows, dim)
    return np.frombuffer(data, np.uint8).reshape(rows, len(data) // rows if rows else 0)


def _places(data: bytes) -> npt.NDArray[np.int64]:
    return np.frombuffer(data, "<u4").astype(np.int64)


def _choice(names: Sequence[str], name: str, field: str) -> int:
    if name not in names:
        raise ValueError(f"{field}: {name!r}; allowed are {', '.join(names)}")
    return names.index(name)
